"""The metrics file as Prometheus's own tools read it."""

from __future__ import annotations

import pathlib
import subprocess
from collections.abc import Callable
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

PREFIX = "identity_session_retention_"
#: Of each series its type and its labels in alphabetical order; <policy> stands for any name.
NAMES = {
    "<policy>_deleted_total": ("counter", ()),
    "run_duration_ms_bucket": ("histogram", ("le",)),
    "run_duration_ms_count": ("histogram", ()),
    "run_duration_ms_sum": ("histogram", ()),
    "errors_total": ("counter", ("policy",)),
    "backlog": ("gauge", ("policy", "table")),
    "blocked": ("gauge", ("policy", "table")),
    "undeletable": ("gauge", ("policy", "table")),
    "overdue": ("gauge", ("policy", "table")),
    "oldest_row_age_seconds": ("gauge", ("policy", "table")),
    "retention_seconds": ("gauge", ("policy",)),
    "interval_seconds": ("gauge", ()),
    "last_run_timestamp_seconds": ("gauge", ()),
    "last_success_timestamp_seconds": ("gauge", ()),
    "last_drained_timestamp_seconds": ("gauge", ("policy", "table")),
}
#: What the linter says of the one name that the specification fixes against its advice.
UNIT = f"{PREFIX}run_duration_ms metric names should not contain abbreviated units\n"

Labels = tuple[str, ...]
Series = dict[str, dict[Labels, float]]


def parse(text: str) -> Series:
    """Every series by its name without the prefix and the values of its labels; each must be one that there is."""
    series: Series = {}
    families: Callable[[str], Any] = text_string_to_metric_families
    for family in families(text):
        for sample in family.samples:
            assert sample.name.startswith(PREFIX), sample
            name = sample.name.removeprefix(PREFIX)
            known = "<policy>_deleted_total" if name.endswith("_deleted_total") else name
            assert NAMES[known] == (family.type, tuple(sorted(sample.labels))), sample
            labels = tuple(value for _, value in sorted(sample.labels.items()))
            assert labels not in series.setdefault(name, {}), f"twice: {sample}"
            series[name][labels] = sample.value
    return series


def read(path: pathlib.Path) -> Series:
    with path.open(encoding="utf-8", newline="\n") as stream:
        return parse(stream.read())


def lint(path: pathlib.Path) -> str:
    """What `promtool check metrics` finds."""
    with path.open("rb") as stream:
        done = subprocess.run(
            ["promtool", "check", "metrics"], stdin=stream, capture_output=True, check=False, text=True
        )
    return done.stdout + done.stderr
