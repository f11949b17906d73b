"""PostgreSQL 16 and 18: the same rows stay, the same is counted and told."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import blocked
import psycopg
import pytest
import survivors
from hypothesis import HealthCheck, given, settings
from lab import Database, Program, Server
from other_versions import SERVERS, server_of


@pytest.fixture(scope="module", params=SERVERS)
def other(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server of each other version."""
    with server_of(request.param) as server:
        assert server.connect().info.server_version // 10000 == request.param
        yield server


@pytest.fixture
def database(other: Server) -> Iterator[Database]:
    """An empty database on that server, dropped after the test."""
    with other.connect() as connection:
        connection.execute("CREATE DATABASE auth")
    database = Database(other, "auth")
    yield database
    database.close()
    with other.connect() as connection:
        connection.execute("DROP DATABASE auth WITH (FORCE)")


@pytest.fixture(scope="module")
def variant(other: Server) -> Iterator[Callable[[survivors.Case], Database]]:
    """The database for a case: one for each way to declare the table, made when first wanted."""
    made: dict[tuple[bool, str, bool], Database] = {}

    def find(case: survivors.Case) -> Database:
        if case.variant not in made:
            name = f"variant{len(made)}"
            with other.connect() as connection:
                connection.execute(f"CREATE DATABASE {name}")
            made[case.variant] = survivors.prepare(Database(other, name), case.variant)
        return made[case.variant]

    yield find
    for database in made.values():
        database.close()


@settings(
    max_examples=12,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(case=survivors.cases(largest=2))
def test_a_run_leaves_what_the_model_leaves(
    case: survivors.Case, variant: Callable[[survivors.Case], Database], program: Program
) -> None:
    """The three systems: who survives, every count, and what the dry run foretold are as the model says."""
    seen, foreseen = survivors.observe(variant(case), program, case)
    assert seen == foreseen


@pytest.mark.parametrize(
    ("readable", "guarded"),
    [(True, True), (False, True), (False, False)],
    ids=["readable, guarded", "not readable, guarded", "not readable, not guarded"],
)
@pytest.mark.parametrize("clause", ["", "ON DELETE RESTRICT", "DEFERRABLE INITIALLY DEFERRED"])
def test_of_1000_rows_those_that_can_go_do(
    clause: str, readable: bool, guarded: bool, database: Database, program: Program
) -> None:
    """996 deleted, 3 blocked, 1 undeletable, whatever the server calls the refusal of RESTRICT."""
    blocked.prepare(database, clause=clause, readable=readable, indexed=True, guard="before" if guarded else None)
    blocked.assert_told(blocked.purge(program, database), database, indexed=True, guarded=guarded)


def test_version_18_has_a_code_of_its_own_for_restrict(database: Database) -> None:
    """What the tests with RESTRICT are here for: 23001 in 18, 23503 before."""
    blocked.prepare(database, clause="ON DELETE RESTRICT", readable=True, indexed=False)
    with pytest.raises(psycopg.IntegrityError) as refused:
        database.execute(f"DELETE FROM sessions WHERE id = {blocked.HELD[0]}")
    expected = "23001" if database.owner.info.server_version >= 180000 else "23503"
    assert refused.value.sqlstate == expected
