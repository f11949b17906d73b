"""The rows that a run leaves are those that a model written from the specifications leaves."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import model
import pytest
import survivors
from hypothesis import HealthCheck, given, settings
from lab import POLICIES, Database, Program, configuration
from servers import Proxy

TICK = timedelta(microseconds=1)
Variants = Callable[[survivors.Case], Database]
RELAXED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


@pytest.fixture(scope="module")
def variant(new_database: Callable[[], Database]) -> Variants:
    """The database for a case: one for each way to declare the table, made when first wanted."""
    made: dict[tuple[bool, str, bool], Database] = {}

    def find(case: survivors.Case) -> Database:
        if case.variant not in made:
            made[case.variant] = survivors.prepare(new_database(), case.variant)
        return made[case.variant]

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
def test_a_row_exactly_on_the_cutoff_stays(policy: str, systems: Database, program: Program, proxy: Proxy) -> None:
    """Of rows one microsecond apart across the cutoff, laid once the run has read its clock, those before it go."""
    table, column = POLICIES[policy]["table"], POLICIES[policy].get("age_column", "expires_at")
    others = {"sicr": "phone_number", "refresh": "status", "tokens_expired": "user_agent"}[policy]

    def insert(*times: datetime) -> None:
        for time in times:
            systems.execute(f"INSERT INTO {table} ({column}, {others}) VALUES (%s, 'Revoked')", time)

    def lay() -> None:
        state = tomllib.loads((program.directory / "state.toml").read_text())
        insert(*(state["policy"][policy]["cutoff"] + side * TICK for side in (1, 0, -1)))

    insert(datetime(2000, 1, 1, tzinfo=UTC))
    proxy.at("batch", 1, lay)
    result = program.inside(configuration(proxy.conninfo(systems), {policy: POLICIES[policy]}), "--once", "--json")
    assert result.returncode == 0, result.output
    cutoff = datetime.fromisoformat(result.policies[policy]["cutoff"])
    assert systems.execute(f"SELECT {column} FROM {table} ORDER BY 1") == [(cutoff,), (cutoff + TICK,)]
