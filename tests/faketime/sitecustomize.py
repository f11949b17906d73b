"""For programs under libfaketime 0.9.10: it refuses (EINVAL) an absolute sleep on a clock it leaves alone, as time.sleep does."""

import select
import time


def _sleep(seconds: float) -> None:
    select.select([], [], [], seconds)


time.sleep = _sleep
