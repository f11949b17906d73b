"""For programs under libfaketime 0.9.10, which refuses (EINVAL) the way in which time.sleep sleeps."""

from __future__ import annotations

import select
import time


def _sleep(seconds: float, /) -> None:
    select.select([], [], [], seconds)


time.sleep = _sleep  # type: ignore[assignment]
