"""More than fits: batches that take longer than they may, tables that others hold, and others that wait for us."""

from __future__ import annotations

import threading

import pytest
from lab import POLICIES, Database, Line, Program, configuration, log, until

SICR = "identity.sign_in_confirmation_requests"
ONE = {"sicr": POLICIES["sicr"]}


def fill(database: Database, rows: int, *, agent: str = "NULL") -> None:
    """Rows to delete, the first of them the oldest, numbered in `phone_number`."""
    database.execute(
        f"INSERT INTO {SICR} (phone_number, user_agent, created_at)"
        f"    SELECT i::text, {agent}, now() - interval '40 days' + i * interval '1 second'"
        f"    FROM generate_series(1, {rows}) i"
    )


def slow(database: Database, seconds: float, condition: str = "true") -> None:
    """A trigger that takes so long for each row of which the condition holds."""
    database.execute(
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS"
        f"    $$ BEGIN IF {condition} THEN PERFORM pg_sleep({seconds}); END IF; RETURN OLD; END $$;"
        f"CREATE TRIGGER slow BEFORE DELETE ON {SICR} FOR EACH ROW EXECUTE FUNCTION slow()"
    )


def batches(lines: list[Line]) -> list[tuple[int, int]]:
    """What each batch deleted, and what it might have."""
    deleted = [line.fields for line in lines if line.event == "batch_deleted" and line.fields["phase"] == "sicr"]
    return [(int(fields["deletedCount"]), int(fields["batchSize"])) for fields in deleted]


def test_a_batch_that_exceeds_its_time_out_goes_in_smaller_ones(systems: Database, program: Program) -> None:
    """Rows of 500 KB and a slow trigger: the batch shrinks until it fits, all is gone, and grows back when it may."""
    systems.execute(f"ALTER TABLE {SICR} ALTER user_agent SET STORAGE EXTERNAL")
    fill(systems, 400, agent="CASE WHEN i <= 40 THEN repeat('x', 500000) END")
    assert systems.value(f"SELECT pg_table_size('{SICR}')") > 40 * 500_000, "kept out of line, as it is"
    slow(systems, 0.04, "OLD.phone_number::int <= 40")
    database = {"statement_timeout": "1s"}
    result = program.inside(configuration(systems.conninfo, ONE, database=database, batch_size=60), "--once", "--json")
    sicr = result.policies["sicr"]
    assert (result.returncode, sicr["deleted"], sicr["undeletable"], sicr["error"]) == (0, 400, 0, None), result.output
    assert systems.count(SICR) == 0
    lines = log(result.stderr)
    retried = [line.fields for line in lines if line.message.startswith("batch failed")]
    assert (retried[0]["sqlstate"], retried[0]["batchSize"]) == ("57014", "60")
    assert sum(deleted for deleted, _ in batches(lines)) == 400
    assert batches(lines)[0][1] < 60
    assert (60, 60) in batches(lines)


@pytest.mark.parametrize(("statement_timeout", "progress"), [("60s", 100), ("1s", 1)], ids=["in time", "too slow"])
def test_a_budget_shorter_than_a_batch_brings_progress(
    systems: Database, program: Program, statement_timeout: str, progress: int
) -> None:
    """Night after night each policy gets a batch through, if a smaller one, and says that the budget ended it."""
    fill(systems, 250)
    systems.execute(
        "INSERT INTO refresh_tokens (expires_at) SELECT now() - interval '1 day' FROM generate_series(1, 250)"
    )
    slow(systems, 0.02)
    policies = {**ONE, "tokens": POLICIES["tokens_expired"]}
    database = {"statement_timeout": statement_timeout}
    config = configuration(systems.conninfo, policies, database=database, batch_size=100, max_run_duration="1s")
    left = {"sicr": 250, "tokens": 250}
    for _ in range(2):
        result = program.inside(config, "--once", "--json")
        assert (result.returncode, result.json["stop_reason"]) == (0, "budget"), result.output
        for name, table in (("sicr", SICR), ("tokens", "refresh_tokens")):
            policy = result.policies[name]
            assert policy["deleted"] >= min(progress, left[name])
            left[name] -= policy["deleted"]
            assert systems.count(table) == left[name]
        assert (result.policies["sicr"]["stop_reason"], result.policies["sicr"]["backlog"]) == ("budget", left["sicr"])


def waiters(database: Database, mode: str) -> int:
    """How many sessions wait for a lock of this mode on the table."""
    waiting = f"SELECT count(*) FROM pg_locks WHERE relation = '{SICR}'::regclass AND NOT granted AND mode = '{mode}'"
    return int(database.value(waiting))


def test_who_queues_behind_our_wait_waits_no_longer_than_lock_timeout(systems: Database, program: Program) -> None:
    """Somebody builds an index for hours and we wait: readers pass, and who queues behind us soon goes before us."""
    fill(systems, 100)
    builder = systems.connect(autocommit=False)
    builder.execute(f"LOCK TABLE {SICR} IN SHARE MODE")
    config = configuration(systems.conninfo, ONE, database={"lock_timeout": "2s"})
    process = program.start(config, "--once", "--json")
    until(lambda: waiters(systems, "RowExclusiveLock") + waiters(systems, "RowShareLock"), "the run waits")
    reader = systems.connect()
    reader.execute("SET lock_timeout = '50ms'")
    for statement in (f"SELECT count(*) FROM {SICR}", f"SELECT count(*) FROM {SICR} WHERE id IS NULL"):
        reader.execute(statement)
    another = systems.connect(autocommit=False)
    another.execute("SET lock_timeout = '10s'")  # ours, and what a loaded machine adds
    another.execute(f"LOCK TABLE {SICR} IN SHARE MODE")
    assert builder.info.transaction_status.name == "INTRANS", "the first is still at it"
    another.rollback()
    builder.rollback()
    result = program.finish(process)
    assert (result.returncode, result.policies["sicr"]["deleted"]) == (0, 100), result.output


def test_a_migration_waits_for_one_batch(systems: Database, program: Program) -> None:
    """ALTER TABLE, and whoever queues behind it, gets its turn after the batch in flight, not after the run."""
    fill(systems, 500)
    systems.execute(
        "CREATE FUNCTION gate() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        "    IF OLD.phone_number = '75' THEN PERFORM pg_advisory_xact_lock(4711); END IF; RETURN OLD; END $$;"
        f"CREATE TRIGGER gate BEFORE DELETE ON {SICR} FOR EACH ROW EXECUTE FUNCTION gate()"
    )
    gate, migration = systems.connect(), systems.connect(autocommit=False)
    gate.execute("SELECT pg_advisory_lock(4711)")
    config = configuration(systems.conninfo, ONE, database={"lock_timeout": "1m"}, batch_size=50)
    process = program.start(config, "--once", "--json")
    until(
        lambda: systems.value("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"),
        "the second batch is in flight",
    )
    migrating = threading.Thread(target=migration.execute, args=[f"ALTER TABLE {SICR} ADD COLUMN device text"])
    migrating.start()
    until(lambda: waiters(systems, "AccessExclusiveLock"), "the migration waits")
    gate.execute("SELECT pg_advisory_unlock(4711)")
    migrating.join(60)
    assert migration.execute(f"SELECT count(*) FROM {SICR}").fetchone() == (400,), "two batches have gone"
    migration.commit()
    result = program.finish(process)
    assert (result.returncode, result.policies["sicr"]["deleted"], systems.count(SICR)) == (0, 500, 0), result.output
