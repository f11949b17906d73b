"""VACUUM at the end of a run: of what lost rows, within the budget, and never at the cost of the run."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from lab import (
    POLICIES,
    PROMPTLY,
    SYSTEMS,
    Database,
    Line,
    Program,
    Result,
    binaries,
    configuration,
    log,
    until,
)
from other_versions import server_of
from pooler import Pooler

SICR = "identity.sign_in_confirmation_requests"
PASSED_OVER = "the server passed over it: it was locked, perhaps"
TOKENS = {name: POLICIES[name] for name in ("tokens_expired", "tokens_revoked")}


@pytest.fixture
def owned(systems: Database) -> Iterator[Database]:
    """The role of the job owns the tables; what is set for it is reset with the test."""
    systems.execute(f"ALTER TABLE refresh_tokens OWNER TO retention; ALTER TABLE {SICR} OWNER TO retention")
    yield systems
    systems.execute("ALTER ROLE retention RESET ALL")


def expired(database: Database, rows: int = 1000) -> None:
    database.execute(
        "INSERT INTO refresh_tokens (expires_at, is_revoked)"
        " SELECT now() - mod(i, 100) * interval '1 hour', mod(i, 2) = 0 FROM generate_series(1, %s) i",
        rows,
    )


def config_of(database: Database, policies: dict[str, dict[str, Any]] | None = None, **run: Any) -> dict[str, Any]:
    return configuration(database.conninfo, TOKENS if policies is None else policies, **{"vacuum": True, **run})


def vacuumed(result: Result) -> list[Line]:
    return [line for line in log(result.stderr) if line.message in ("table vacuumed", "table not vacuumed")]


def told(result: Result) -> list[tuple[str, str | None]]:
    """Each table that was vacuumed, with None, or was not, with the reason."""
    return [(line.fields["table"], line.fields.get("error")) for line in vacuumed(result)]


def dead(database: Database, table: str = "refresh_tokens") -> int:
    """How many rows of the table could be freed: what another VACUUM would find."""
    database.execute("CREATE EXTENSION IF NOT EXISTS pgstattuple")
    return int(database.value("SELECT sum(dead_tuple_count) FROM pgstattuple(%s)", table))


def assert_gone(database: Database, result: Result) -> None:
    assert (result.returncode, database.count("refresh_tokens")) == (0, 0), result.output
    assert {policy["stop_reason"] for policy in result.policies.values()} == {"drained"}


def test_what_lost_rows_is_vacuumed_once(owned: Database, program: Program) -> None:
    """Two policies purge one table, which is vacuumed once; another, from which nothing went, is not."""
    expired(owned)
    result = program.once(config_of(owned, {"sicr": POLICIES["sicr"], **TOKENS}))
    assert_gone(owned, result)
    assert (told(result), dead(owned)) == ([("refresh_tokens", None)], 0)
    assert log(result.stderr)[-1].event == "job_completed"
    query = "SELECT relname, last_vacuum, last_analyze FROM pg_stat_user_tables WHERE last_vacuum IS NOT NULL"
    ((table, *moments),) = owned.execute(query)
    assert (table, None in moments) == ("refresh_tokens", False)
    again = program.once(None)
    assert (again.returncode, told(again)) == (0, [])


def test_a_table_of_somebody_else_is_left_to_autovacuum(systems: Database, program: Program) -> None:
    """The rows go, the run ends well, and one line says why there was no VACUUM and what to do."""
    expired(systems)
    result = program.once(config_of(systems))
    assert_gone(systems, result)
    ((table, reason),) = told(result)
    assert (table, str(reason).partition(",")[0]) == (
        "refresh_tokens",
        "the role retention may not VACUUM refresh_tokens",
    )
    assert "run.vacuum = false" in str(reason)
    assert systems.value("SELECT last_vacuum FROM pg_stat_user_tables WHERE relname = 'refresh_tokens'") is None


def test_the_owner_of_the_database_may(systems: Database, program: Program) -> None:
    """As PostgreSQL has it: whoever owns the database may VACUUM what others have in it."""
    systems.execute(f"ALTER DATABASE {systems.name} OWNER TO retention")
    expired(systems)
    result = program.once(config_of(systems))
    assert_gone(systems, result)
    assert (told(result), dead(systems)) == ([("refresh_tokens", None)], 0)


#: A VACUUM of some pages takes minutes.
SLOW = (
    "ALTER ROLE retention SET vacuum_cost_delay = '100ms'; ALTER ROLE retention SET vacuum_cost_limit = 1;"
    "ALTER ROLE retention SET vacuum_cost_page_dirty = 1000"
)
OURS = (
    "SELECT count(*) FROM pg_stat_activity"
    " WHERE datname = current_database() AND query ~ '^VACUUM' AND state = 'active'"
)


def slow(database: Database, program: Program, rows: int = 5000, **run: Any) -> subprocess.Popen[str]:
    """A run in the middle of a VACUUM."""
    expired(database, rows)
    database.execute(SLOW)
    process = program.start(config_of(database, **run), "--once", "--json")
    until(lambda: database.value(OURS) == 1, "the run is at VACUUM")
    return process


def test_the_budget_ends_a_vacuum(owned: Database, program: Program) -> None:
    """It is cancelled on the server when the budget is spent; the run has ended well all the same."""
    result = program.finish(slow(owned, program, max_run_duration="4s"), 4 + PROMPTLY)
    assert_gone(owned, result)
    assert (told(result), owned.value(OURS)) == ([("refresh_tokens", "it took too long")], 0)


def test_a_signal_ends_a_vacuum(owned: Database, program: Program) -> None:
    """Within what is promised, and nothing goes on on the server."""
    process = slow(owned, program)
    process.send_signal(signal.SIGTERM)
    result = program.finish(process, PROMPTLY)
    assert_gone(owned, result)
    assert told(result) == [("refresh_tokens", "the run was stopped")]
    until(lambda: owned.value(OURS) == 0, "the VACUUM has ended")


def test_a_connection_lost_in_a_vacuum_is_said(owned: Database, program: Program) -> None:
    """The rows were gone before."""
    process = slow(owned, program)
    owned.execute(f"SELECT pg_terminate_backend(pid) FROM ({OURS.replace('count(*)', 'pid')}) a")
    result = program.finish(process)
    assert_gone(owned, result)
    ((_, reason),) = told(result)
    assert "connection" in str(reason)


def test_no_time_for_a_vacuum(owned: Database, program: Program) -> None:
    """A run whose budget is spent by its batches begins none."""
    expired(owned, 200)
    result = program.once(config_of(owned, max_run_duration="1s", batch_size=1, pause="20ms"))
    assert (result.returncode, told(result)) == (0, [("refresh_tokens", "no time was left")]), result.output


def test_a_locked_table_is_passed_over(owned: Database, program: Program) -> None:
    """Whoever holds a lock that VACUUM waits for is not waited for, and that is said."""
    expired(owned)
    with owned.connect(autocommit=False) as other:
        other.execute("LOCK TABLE refresh_tokens IN SHARE UPDATE EXCLUSIVE MODE")
        result = program.once(config_of(owned))
    assert_gone(owned, result)
    assert told(result) == [("refresh_tokens", PASSED_OVER)]


SETTINGS = {
    "client_min_messages": "error",
    "track_counts": "off",
    "idle_in_transaction_session_timeout": "1ms",
    "lock_timeout": "1ms",
    "default_transaction_isolation": "serializable",
    "default_transaction_deferrable": "on",
    "search_path": "identity",
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_role_do_not_matter(name: str, owned: Database, program: Program) -> None:
    """Whatever the role has set, the table is vacuumed and that is said."""
    expired(owned)
    owned.execute(f"ALTER ROLE retention SET {name} = '{SETTINGS[name]}'")
    result = program.once(config_of(owned))
    assert_gone(owned, result)
    assert (told(result), dead(owned)) == ([("refresh_tokens", None)], 0)


def test_a_time_out_of_the_role_ends_a_vacuum(owned: Database, program: Program) -> None:
    """The one setting that is obeyed, as none of ours could be taken back behind a pooler."""
    owned.execute("ALTER ROLE retention SET statement_timeout = '500ms'")
    result = program.finish(slow(owned, program))
    assert_gone(owned, result)
    assert told(result) == [("refresh_tokens", "it took too long")]


def test_a_vacuum_behind_a_pooler_leaves_no_setting(owned: Database, program: Program) -> None:
    """The next client of the same server process finds it as it was."""
    expired(owned)
    pooler = Pooler(owned.server, default_pool_size=1)
    try:
        query = "SELECT pg_backend_pid(), string_agg(concat(name, setting), ' ' ORDER BY name) FROM pg_settings"
        query += " WHERE name <> 'application_name'"
        with pooler.connect(owned) as client:
            before = client.execute(query).fetchall()
        result = program.once({**config_of(owned), "database": {"conninfo": pooler.conninfo(owned)}})
        assert_gone(owned, result)
        assert told(result) == [("refresh_tokens", None)]
        with pooler.connect(owned) as client:
            assert client.execute(query).fetchall() == before
    finally:
        pooler.remove()


PARTITIONED = """
    CREATE TABLE refresh_tokens (id serial PRIMARY KEY, is_revoked boolean, expires_at timestamptz)
        PARTITION BY HASH (id);
    CREATE TABLE first PARTITION OF refresh_tokens FOR VALUES WITH (MODULUS 2, REMAINDER 0);
    CREATE TABLE second PARTITION OF refresh_tokens FOR VALUES WITH (MODULUS 2, REMAINDER 1)
"""


@pytest.fixture
def partitioned(systems: Database) -> Iterator[Database]:
    """Tokens in two partitions, all of the role of the job."""
    systems.execute(f"""DROP TABLE refresh_tokens; {PARTITIONED}; ALTER TABLE refresh_tokens OWNER TO retention;
        ALTER TABLE first OWNER TO retention; ALTER TABLE second OWNER TO retention""")
    yield systems
    systems.execute("ALTER ROLE retention RESET ALL")


def test_partitions_are_vacuumed(partitioned: Database, program: Program) -> None:
    """All of them, with one statement and one line."""
    expired(partitioned)
    result = program.once(config_of(partitioned))
    assert_gone(partitioned, result)
    assert told(result) == [("refresh_tokens", None)]
    assert (dead(partitioned, "first"), dead(partitioned, "second")) == (0, 0)


@pytest.mark.parametrize("mode", ["SHARE UPDATE EXCLUSIVE", "ACCESS EXCLUSIVE"])
def test_a_locked_partition_is_passed_over(mode: str, partitioned: Database, program: Program) -> None:
    """The others are vacuumed; the locked one is not waited for, and that is said."""
    expired(partitioned)
    partitioned.execute(f"""{SLOW}; ALTER TABLE {SICR} OWNER TO retention; INSERT INTO {SICR} (phone_number, created_at)
        SELECT '', now() - interval '40 days' FROM generate_series(1, 300)""")
    config = config_of(partitioned, {"sicr": POLICIES["sicr"], **TOKENS}, max_run_duration="20s")
    process = program.start(config, "--once", "--json")
    until(lambda: partitioned.value(OURS) == 1, "the run is at VACUUM of the table before")
    with partitioned.connect(autocommit=False) as holder:
        holder.execute(f"LOCK TABLE second IN {mode} MODE")
        result = program.finish(process, 60)
    assert_gone(partitioned, result)
    assert told(result) == [(SICR, None), ("refresh_tokens", PASSED_OVER)]
    assert dead(partitioned, "first") == 0


@pytest.mark.parametrize("reached", [True, False], ids=["connected", "not connected"])
def test_who_is_granted_what_print_sql_writes_may(reached: bool, program: Program) -> None:
    """From PostgreSQL 17 on a role may VACUUM what it does not own, partitions included."""
    with server_of(18) as server:
        database = Database(server, "postgres")
        database.execute(f"{SYSTEMS.read_text()}; DROP TABLE refresh_tokens; {PARTITIONED}")
        config = config_of(database)
        conninfo = database.conninfo if reached else "host=/nowhere user=retention"
        sql = program({**config, "database": {"conninfo": conninfo}}, "--print-sql").stdout
        psql = [str(binaries() / "psql"), "-Xq", "-v", "ON_ERROR_STOP=1", "-d", server.conninfo()]
        subprocess.run(psql, input=sql, text=True, check=True)
        expired(database)
        result = program.once(config)
        assert_gone(database, result)
        assert told(result) == [("refresh_tokens", None)]
        database.execute("REVOKE MAINTAIN ON second FROM retention")
        (found,) = [f for f in program(None, "--check", "--json").json["findings"] if f["code"] == "vacuum_denied"][:1]
        assert found["remedy"].startswith("GRANT MAINTAIN ON public.second TO retention;")
        database.close()
