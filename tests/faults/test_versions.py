"""PostgreSQL 16 to 18: the same rows stay, the same is counted and told."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace

import blocked
import model
import psycopg
import pytest
import survivors
from chains import TABLE, load
from hypothesis import HealthCheck, Phase, given, settings
from lab import POLICIES, SYSTEMS, Database, Program, Server, binaries, configuration, log
from other_versions import VERSIONS, server_of

TOKENS = {"tokens": POLICIES["tokens_expired"]}


@pytest.fixture(scope="module", params=VERSIONS)
def other(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server of each other version."""
    with server_of(request.param) as server:
        assert server.connect().info.server_version // 10000 == request.param
        yield server


@pytest.fixture
def database(other: Server) -> Iterator[Database]:
    """An empty database on that server, dropped after the test."""
    with other.connect() as connection:
        connection.execute("CREATE DATABASE auth STRATEGY file_copy")
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
                connection.execute(f"CREATE DATABASE {name} STRATEGY file_copy")
            made[case.variant] = survivors.prepare(Database(other, name), case.variant)
        return made[case.variant]

    yield find
    for database in made.values():
        database.close()


def telling(case: survivors.Case) -> bool:
    """Do some sessions go, and stay others that are old enough? Most of the first random cases have hardly a row."""
    refresh = model.outcome(case.rows, 0.0, case.policies).counts["refresh"]
    return refresh.deleted > 0 and refresh.blocked > 0


@pytest.mark.parametrize("partitioned", [False, True], ids=["plain", "partitioned"])
@settings(
    max_examples=5,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],  # a smaller counterexample would take minutes
    suppress_health_check=list(HealthCheck),
)
@given(case=survivors.cases(largest=2).filter(telling))
def test_a_run_leaves_what_the_model_leaves(
    case: survivors.Case, partitioned: bool, variant: Callable[[survivors.Case], Database], program: Program
) -> None:
    """The three systems: who survives, every count, and what the dry run foretold are as the model says."""
    case = replace(case, partitioned=partitioned)
    seen, foreseen = survivors.observe(variant(case), program, case)
    assert seen == foreseen


@pytest.mark.parametrize("forward", [False, True], ids=["child names parent", "older names newer"])
@pytest.mark.parametrize("indexed", [True, False], ids=["index", "no index"])
def test_finished_chains_go_in_one_run(indexed: bool, forward: bool, database: Database, program: Program) -> None:
    """Twenty chains of 200: the finished ones go whole, those with a live or young member stay whole."""
    database.execute(SYSTEMS.read_text())
    if indexed:
        database.execute(f"CREATE INDEX ON {TABLE} (updated_at)")
    fate = load(database, 20, 200, forward=forward)
    config = configuration(database.conninfo, {"refresh": POLICIES["refresh"]}, batch_size=333)
    refresh = program.inside(config, "--once", "--json").policies["refresh"]
    assert (refresh["deleted"], refresh["blocked"]) == (len(fate.finished), len(fate.blocked))
    assert (refresh["stop_reason"], refresh["error"]) == ("drained", None)
    assert {key for (key,) in database.execute(f"SELECT id FROM {TABLE}")} == fate.staying


@pytest.mark.parametrize(
    ("readable", "guarded", "indexed"),
    [(True, False, False), (False, True, True)],
    ids=["readable, not guarded, no index", "not readable, guarded, index"],
)
@pytest.mark.parametrize("clause", ["", "ON DELETE RESTRICT", "DEFERRABLE INITIALLY DEFERRED"])
def test_of_1000_rows_those_that_can_go_do(
    clause: str, readable: bool, guarded: bool, indexed: bool, database: Database, program: Program
) -> None:
    """996 deleted, 3 blocked, 1 undeletable (else 997, 3, 0), whatever the server calls the refusal of RESTRICT."""
    blocked.prepare(database, clause=clause, readable=readable, indexed=indexed, guard="before" if guarded else None)
    blocked.assert_told(blocked.purge(program, database), database, indexed=indexed, guarded=guarded)


def test_version_18_has_a_code_of_its_own_for_restrict(database: Database) -> None:
    """What the tests with RESTRICT are here for: 23001 in 18, 23503 before."""
    blocked.prepare(database, clause="ON DELETE RESTRICT", readable=True, indexed=False)
    with pytest.raises(psycopg.IntegrityError) as refused:
        database.execute(f"DELETE FROM sessions WHERE id = {blocked.HELD[0]}")
    expected = "23001" if database.owner.info.server_version >= 180000 else "23503"
    assert refused.value.sqlstate == expected


def test_a_transaction_time_out_of_the_role_does_not_end_our_batches(database: Database, program: Program) -> None:
    """The limit on whole transactions that there is from 17 on: a batch may take what our own configuration says."""
    database.execute(f"""
        {SYSTEMS.read_text()};
        INSERT INTO refresh_tokens (expires_at) SELECT now() - interval '1 day' FROM generate_series(1, 60);
        CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN PERFORM pg_sleep(0.01); RETURN OLD; END $$;
        CREATE TRIGGER slow BEFORE DELETE ON refresh_tokens FOR EACH ROW EXECUTE FUNCTION slow()
    """)
    if database.owner.info.server_version >= 170000:
        database.execute("ALTER ROLE retention IN DATABASE auth SET transaction_timeout = '400ms'")
    result = program.inside(configuration(database.conninfo, TOKENS), "--once", "--json")
    assert (result.returncode, result.policies["tokens"]["deleted"]) == (0, 60), result.output


def test_who_is_granted_what_print_sql_writes_may_vacuum_from_17_on(database: Database, program: Program) -> None:
    """Before, there is no MAINTAIN to grant: the table is left to autovacuum, and that is told."""
    database.execute(
        f"{SYSTEMS.read_text()}; INSERT INTO refresh_tokens (expires_at) VALUES (now() - interval '1 day')"
    )
    config = configuration(database.conninfo, TOKENS, vacuum=True)
    granted = program.inside(config, "--print-sql").stdout
    psql = [str(binaries() / "psql"), "-Xq", "-v", "ON_ERROR_STOP=1", "-d", database.server.conninfo(database.name)]
    subprocess.run(psql, input=granted, text=True, check=True)
    result = program.inside(config, "--once", "--json")
    told = [line.message for line in log(result.stderr) if line.message.endswith("vacuumed")]
    since = database.owner.info.server_version >= 170000
    assert (result.returncode, told) == (0, ["table vacuumed" if since else "table not vacuumed"]), result.output
