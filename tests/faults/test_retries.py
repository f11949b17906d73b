"""Errors that pass, brought about for real: tried again within bounds, counted once, named in the log."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable

import pytest
from lab import POLICIES, Database, Program, configuration, log, until

SICR = "identity.sign_in_confirmation_requests"
POLICY = {name: POLICIES[name] for name in ("sicr", "tokens_expired")}
ROWS = 100


def fill(database: Database, body: str) -> None:
    """Rows for two policies; this PL/pgSQL runs before a row of the first goes. `attempts` counts on regardless."""
    database.execute(
        f"INSERT INTO {SICR} (phone_number, created_at)"
        f"    SELECT '', now() - interval '40 days' FROM generate_series(1, {ROWS});"
        "INSERT INTO refresh_tokens (expires_at) SELECT now() - interval '1 day' FROM generate_series(1, 10);"
        "CREATE SEQUENCE attempts;"
        "CREATE FUNCTION on_delete() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = public AS"
        f"    $body$ BEGIN {body}; RETURN OLD; END $body$;"
        f"CREATE TRIGGER on_delete BEFORE DELETE ON {SICR} FOR EACH ROW EXECUTE FUNCTION on_delete()"
    )


def waits(database: Database, lock: str) -> None:
    """Until the program waits for this kind of lock."""
    query = (
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'session-retention'"
        " AND datname = current_database() AND wait_event_type = 'Lock' AND wait_event = %s"
    )
    until(lambda: database.value(query, lock), f"the program waits for a lock: {lock}")


def deadlock(database: Database, start: Callable[[], subprocess.Popen[str]]) -> subprocess.Popen[str]:
    """Another session wants the table that a batch has, and has what the batch wants; the batch finds out first."""
    fill(database, "PERFORM pg_advisory_xact_lock(1); PERFORM pg_advisory_xact_lock(2)")
    database.execute(f"ALTER ROLE retention IN DATABASE {database.name} SET deadlock_timeout = '20ms'")
    gate, other = database.connect(autocommit=False), database.connect(autocommit=False)
    gate.execute("SELECT pg_advisory_xact_lock(1)")
    other.execute("SET deadlock_timeout = '10min'")
    other.execute("SELECT pg_advisory_xact_lock(2)")
    process = start()
    waits(database, "advisory")

    def wait_for_table() -> None:
        other.execute(f"LOCK TABLE {SICR}")
        other.rollback()

    thread = threading.Thread(target=wait_for_table)
    thread.start()
    waiting = f"SELECT count(*) FROM pg_locks WHERE relation = '{SICR}'::regclass AND NOT granted"
    until(lambda: database.value(waiting), "the other session waits for the table")
    gate.rollback()
    thread.join()
    return process


def moved(database: Database, start: Callable[[], subprocess.Popen[str]]) -> subprocess.Popen[str]:
    """A trigger's row moves to another partition while it waits for it: the one such failure of read committed."""
    fill(database, "UPDATE counters SET gone = gone + 1")
    database.execute(
        "CREATE TABLE counters (part int, gone int) PARTITION BY LIST (part);"
        "CREATE TABLE one PARTITION OF counters FOR VALUES IN (1);"
        "CREATE TABLE two PARTITION OF counters FOR VALUES IN (2);"
        "INSERT INTO counters VALUES (1, 0)"
    )
    other = database.connect(autocommit=False)
    other.execute("UPDATE counters SET part = 2")
    process = start()
    waits(database, "transactionid")
    other.commit()
    return process


def locked(database: Database, start: Callable[[], subprocess.Popen[str]]) -> subprocess.Popen[str]:
    """Somebody has the table for longer than the lock time-out."""
    fill(database, "NULL")
    holder = database.connect(autocommit=False)
    holder.execute(f"LOCK TABLE {SICR}")
    process = start()
    assert process.stdout
    read = process.stdout
    until(lambda: "batch failed" in (line := read.readline()) and "sqlstate=55P03" in line, "the end of a wait")
    holder.rollback()
    return process


def overrun(_database: Database, start: Callable[[], subprocess.Popen[str]]) -> subprocess.Popen[str]:
    """One row, at its first try, takes longer than the statement time-out."""
    fill(_database, "IF nextval('attempts') = 30 THEN PERFORM pg_sleep(600); END IF")
    return start()


@pytest.mark.parametrize(
    ("sqlstate", "happen", "database_options"),
    [
        ("40P01", deadlock, {"lock_timeout": "1m"}),
        ("40001", moved, {"lock_timeout": "1m"}),
        ("55P03", locked, {"lock_timeout": "300ms"}),
        ("57014", overrun, {"statement_timeout": "1s"}),
    ],
    ids=["deadlock", "serialization", "lock time-out", "statement time-out"],
)
def test_an_error_that_passes_is_survived_and_told(
    sqlstate: str,
    happen: Callable[[Database, Callable[[], subprocess.Popen[str]]], subprocess.Popen[str]],
    database_options: dict[str, str],
    systems: Database,
    program: Program,
) -> None:
    """The batch is tried again, a few times at most, every row is counted once, and the log has the server's code."""
    config = configuration(systems.conninfo, POLICY, database=database_options, batch_size=50)
    result = program.finish(happen(systems, lambda: program.start(config, "--once")))
    assert result.returncode == 0, result.output
    lines = log(result.stdout)
    (sicr, tokens) = (line.fields for line in lines if line.event == "phase_completed")
    assert (sicr["deletedCount"], sicr["undeletable"], tokens["deletedCount"]) == (str(ROWS), "0", "10")
    assert (systems.count(SICR), systems.count("refresh_tokens")) == (0, 0)
    batches = [line.fields for line in lines if line.event == "batch_deleted" and line.fields["phase"] == "sicr"]
    assert sum(int(fields["deletedCount"]) for fields in batches) == ROWS
    if sqlstate != "55P03":  # there the first is what the test itself has read
        retried = [line.fields for line in lines if line.message.startswith("batch failed")]
        assert {(fields["phase"], fields["sqlstate"]) for fields in retried} == {("sicr", sqlstate)}
        assert len(retried) <= 3
        smaller = sqlstate == "57014"
        assert (int(batches[0]["batchSize"]) < 50) is smaller


def test_an_error_that_stays_fails_its_policy_alone(systems: Database, program: Program) -> None:
    """A lock that nobody releases: tried a bounded number of times, whatever the rows, then the next policy; exit 1."""
    fill(systems, "PERFORM pg_advisory_xact_lock(1)")
    holder = systems.connect()
    holder.execute("SELECT pg_advisory_lock(1)")
    config = configuration(systems.conninfo, POLICY, database={"lock_timeout": "50ms"}, batch_size=50)
    result = program.inside(config, "--once", "--json")
    assert (result.returncode, result.json["stop_reason"]) == (1, "failed"), result.output
    sicr, tokens = result.policies["sicr"], result.policies["tokens_expired"]
    assert (sicr["deleted"], sicr["stop_reason"], sicr["error"]["sqlstate"]) == (0, "failed", "55P03")
    assert (tokens["deleted"], tokens["stop_reason"], tokens["error"]) == (10, "drained", None)
    assert systems.count(SICR) == sicr["backlog"] == ROWS
    lines = log(result.stderr)
    retried = [line.fields for line in lines if line.message.startswith("batch failed")]
    assert {fields["sqlstate"] for fields in retried} == {"55P03"}
    assert len(retried) <= 30
    (failed,) = [line.fields for line in lines if line.event == "phase_failed"]
    assert (failed["phase"], failed["sqlstate"]) == ("sicr", "55P03")
