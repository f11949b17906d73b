"""The same comparison with the model, thousands of times, on larger cases and with other ones each time."""

from __future__ import annotations

import os
from collections.abc import Callable

import survivors
from hypothesis import HealthCheck, given, settings
from lab import Database, Program

_made: dict[tuple[bool, str, bool], Database] = {}


@settings(
    max_examples=int(os.environ.get("RETENTION_SOAK_EXAMPLES", "5000")),
    print_blob=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(case=survivors.cases(largest=10))
def test_a_run_leaves_what_the_model_leaves(
    case: survivors.Case, new_database: Callable[[], Database], program: Program
) -> None:
    """As in tests/database; a failure prints what reproduces it. RETENTION_SOAK_EXAMPLES sets how many."""
    if case.variant not in _made:
        _made[case.variant] = survivors.prepare(new_database(), case.variant)
    seen, foreseen = survivors.observe(_made[case.variant], program, case)
    assert seen == foreseen
