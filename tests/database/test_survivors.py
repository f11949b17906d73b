"""The rows that a run leaves are those that a model written from the specifications leaves."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime, timedelta

import model
import pytest
import survivors
from hypothesis import HealthCheck, given, settings
from lab import POLICIES, Database, Program, configuration

Variants = Callable[[survivors.Case], Database]
RELAXED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


@pytest.fixture(scope="module")
def variant(new_database: Callable[[], Database]) -> Variants:
    """The database for a case: one for each way to declare the table, made when first wanted."""
    made: dict[tuple[bool, str], Database] = {}

    def find(case: survivors.Case) -> Database:
        key = case.indexed, case.references
        if key not in made:
            made[key] = survivors.prepare(new_database(), indexed=case.indexed, references=case.references)
        return made[key]

    return find


@settings(
    max_examples=int(os.environ.get("RETENTION_EXAMPLES", "300")),
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=RELAXED,
)
@given(case=survivors.cases())
def test_a_run_leaves_what_the_model_leaves(case: survivors.Case, variant: Variants, program: Program) -> None:
    """Whatever the rows: who survives, unchanged, every count, and what the dry run foretold are as the model says."""
    seen, foreseen = survivors.observe(variant(case), program, case)
    assert seen == foreseen


def test_the_model_keeps_what_a_staying_row_refers_to() -> None:
    """The model itself, on a chain worked out by hand: the ancestors of a live row stay, its descendants do not."""
    old = -100 * model.DAY
    line = [
        model.Session(1, "Rotated", old, None),
        model.Session(2, "Rotated", old, 1),
        model.Session(3, "Active", old, 2),
        model.Session(4, "Revoked", old, 3),
        model.Session(5, "Revoked", -90 * model.DAY, None),
    ]
    result = model.outcome(model.Rows([], line, []), 0.0, ["refresh"])
    assert result.sessions == {1, 2, 3, 5}
    assert result.counts == {"refresh": model.Counts(deleted=1, backlog=2, blocked=2)}


@pytest.mark.parametrize("policy", ["sicr", "refresh", "tokens_expired"])
def test_a_row_exactly_on_the_cutoff_stays(policy: str, systems: Database, program: Program) -> None:
    """Of rows laid one microsecond apart across the cutoff, exactly those before it go."""
    table, column = POLICIES[policy]["table"], POLICIES[policy].get("age_column", "expires_at")
    retention = POLICIES[policy].get("retention", "0d")
    others = "phone_number" if policy == "sicr" else "status" if policy == "refresh" else "user_agent"
    config = configuration(systems.conninfo, {policy: POLICIES[policy]}, batch_size=100_000)

    def cutoff(*arguments: str) -> datetime:
        result = program.inside(config, "--json", *arguments)
        assert result.returncode == 0, result.output
        return datetime.fromisoformat(result.policies[policy]["cutoff"])

    for _ in range(10):
        systems.execute(f"TRUNCATE {table}")
        # Where in a run the clock is read: learn it from one that finds nothing, then lay rows out around that time.
        started = systems.value("SELECT clock_timestamp() - %s::interval", retention)
        delay = cutoff("--once") - started
        start = systems.value("SELECT clock_timestamp() + '800ms'")
        centre = start + delay
        systems.execute(
            f"INSERT INTO {table} ({column}, {others})"
            " SELECT %s::timestamptz - %s::interval + i * interval '1 microsecond', 'Revoked'"
            " FROM generate_series(-25000, 25000) i",
            centre,
            retention,
        )
        first, last = systems.execute(f"SELECT min({column}), max({column}) FROM {table}")[0]
        systems.execute("SELECT pg_sleep(extract(epoch FROM %s - clock_timestamp()))", start)
        exact = cutoff("--once")
        if first < exact < last:
            break
    else:
        pytest.fail("no run had its cutoff among the rows")
    assert systems.value(f"SELECT min({column}) FROM {table}") == exact
    assert systems.count(table) == (last - exact) // timedelta(microseconds=1) + 1
