"""Behind a transaction pooler: each transaction may meet another server process, which the next client has after us."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from chains import TABLE, load
from lab import POLICIES, PROMPTLY, Database, Program, configuration, log, until
from pooler import Pooler

SICR = "identity.sign_in_confirmation_requests"


@pytest.fixture
def pooler(systems: Database) -> Iterator[Pooler]:
    pooler = Pooler(systems.server)
    yield pooler
    pooler.remove()


def fill(database: Database, rows: int, table: str = SICR) -> None:
    columns = "phone_number, created_at" if table == SICR else "token_hash, expires_at"
    database.execute(
        f"INSERT INTO {table} ({columns})"
        f"    SELECT '', now() - interval '40 days' - i * interval '1 second' FROM generate_series(1, {rows}) i"
    )


#: Of one server process: every setting but the name of the client, which the pooler itself keeps apart.
SETTINGS = "SELECT name, setting FROM pg_settings WHERE name <> 'application_name'"
#: What else a client could leave behind in it.
LEFT = """
SELECT (SELECT count(*) FROM pg_prepared_statements) + (SELECT count(*) FROM pg_cursors)
     + (SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory')
"""


def processes(pooler: Pooler, database: Database) -> dict[int, Any]:
    """The settings of every server process that the pool has, as another client finds them; nothing else is in them."""
    clients = [pooler.connect(database) for _ in range(pooler.SIZE)]
    try:
        found = {}
        for client in clients:  # each keeps its transaction, and so its process, until all have one
            (pid,) = client.execute("SELECT pg_backend_pid()").fetchone() or (0,)
            assert client.execute(LEFT).fetchone() == (0,)
            found[pid] = dict(client.execute(SETTINGS).fetchall())
        return found
    finally:
        for client in clients:  # with a transaction open the pooler would throw the process away
            client.rollback()
            client.close()


def test_two_runs_share_a_pool_and_leave_nothing_in_it(systems: Database, pooler: Pooler, program: Program) -> None:
    """200 batches of chains and tokens in two processes of the server: complete, each row counted once, no trace."""
    fate = load(systems, 40, 80)
    fill(systems, 2000, "refresh_tokens")
    before = processes(pooler, systems)
    assert len(before) == pooler.SIZE
    policies = {name: POLICIES[name] for name in ("refresh", "tokens_expired")}
    conninfo = pooler.conninfo(systems)
    config = configuration(conninfo, policies, database={"lock_timeout": "1m"}, batch_size=20)
    holder = systems.connect(autocommit=False)
    holder.execute(f"LOCK TABLE {TABLE}")
    runs = [program.start(config, "--once", "--json"), program.start(None, "--once", "--json")]
    waiting = f"SELECT count(*) FROM pg_locks WHERE relation = '{TABLE}'::regclass AND NOT granted"
    until(lambda: systems.value(waiting) == 2, "both are at work")
    holder.rollback()
    meanwhile = 0
    while any(run.poll() is None for run in runs):
        with pooler.connect(systems) as client:
            (pid,) = client.execute("SELECT pg_backend_pid()").fetchone() or (0,)
            assert client.execute(LEFT).fetchone() == (0,)
            assert dict(client.execute(SETTINGS).fetchall()) == before[pid]
        meanwhile += 1
    results = [program.finish(run) for run in runs]
    assert [result.returncode for result in results] == [0, 0], [result.output for result in results]
    deleted = {name: sum(result.policies[name]["deleted"] for result in results) for name in policies}
    assert deleted == {"refresh": len(fate.finished), "tokens_expired": 2000}
    assert {row[0] for row in systems.execute(f"SELECT id FROM {TABLE}")} == fate.staying
    assert systems.count("refresh_tokens") == 0
    lines = [line for result in results for line in log(result.stderr)]
    batches = [int(line.fields["deletedCount"]) for line in lines if line.event == "batch_deleted"]
    assert (len(batches) >= 200, sum(batches)) == (True, sum(deleted.values()))
    assert not [line for line in lines if line.message.startswith("batch failed")]
    assert meanwhile > 5
    assert processes(pooler, systems) == before


def test_a_dry_run_through_a_pooler(systems: Database, pooler: Pooler, program: Program) -> None:
    """It counts what a run would delete, and leaves no read-only transaction to anybody."""
    fate = load(systems, 10, 20)
    before = processes(pooler, systems)
    result = program(configuration(pooler.conninfo(systems)), "--dry-run", "--json")
    refresh = result.policies["refresh"]
    assert (result.returncode, refresh["would_delete"]) == (0, len(fate.finished)), result.output
    assert refresh["blocked"] == len(fate.blocked)
    assert processes(pooler, systems) == before


def slow(database: Database, body: str) -> None:
    """Run this PL/pgSQL for each sign-in request before it is deleted; `attempts` counts, in any transaction."""
    database.execute(
        "CREATE SEQUENCE attempts;"
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = public AS"
        f"    $body$ BEGIN {body}; RETURN OLD; END $body$;"
        f"CREATE TRIGGER slow BEFORE DELETE ON {SICR} FOR EACH ROW EXECUTE FUNCTION slow()"
    )


def at_work(database: Database) -> list[Any]:
    """What the server runs for the job right now, whatever the pooler calls itself."""
    return database.execute(
        "SELECT query FROM pg_stat_activity WHERE usename = 'retention' AND state <> 'idle'"
        " AND datname = current_database()"
    )


def test_a_batch_is_cancelled_through_a_pooler(systems: Database, pooler: Pooler, program: Program) -> None:
    """The cancellation reaches the process that has our transaction: SIGTERM ends the run in time, nothing goes on."""
    fill(systems, 100)
    slow(systems, "IF nextval('attempts') = 15 THEN PERFORM pg_sleep(600); END IF")
    config = configuration(pooler.conninfo(systems), {"sicr": POLICIES["sicr"]}, batch_size=10)
    process = program.start(config, "--once", "--json")
    sleeping = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND datname = current_database()"
    until(lambda: systems.value(sleeping), "the batch is stuck")
    process.send_signal(signal.SIGTERM)
    result = program.finish(process, PROMPTLY)
    assert (result.returncode, result.json["stop_reason"]) == (0, "signal"), result.output
    assert (result.policies["sicr"]["deleted"], systems.count(SICR)) == (10, 90)
    assert at_work(systems) == []


def test_a_pooler_that_is_restarted_in_mid_run(systems: Database, pooler: Pooler, program: Program) -> None:
    """All its connections are cut and refused for a while: the run comes back, and counts what is gone."""
    fill(systems, 600)
    slow(systems, "PERFORM pg_sleep(0.005)")
    config = configuration(pooler.conninfo(systems), {"sicr": POLICIES["sicr"]}, batch_size=10)
    process = program.start(config, "--once", "--json")
    for rows in (550, 400):
        until(lambda rows=rows: systems.count(SICR) <= rows, "some batches")  # type: ignore[misc]
        pooler.stop()
        until(lambda: not at_work(systems), "what was cut off has ended")
        left = systems.count(SICR)
        assert left > 0
        pooler.start()
    result = program.finish(process)
    sicr = result.policies["sicr"]
    assert (result.returncode, sicr["deleted"], sicr["backlog"], systems.count(SICR)) == (0, 600, 0, 0), result.output
    batches = [int(line.fields["deletedCount"]) for line in log(result.stderr) if line.event == "batch_deleted"]
    assert sum(batches) == 600


def start_and_pause(systems: Database, pooler: Pooler, program: Program) -> subprocess.Popen[str]:
    """A run that after some of its 400 rows waits for a pooler that was told to pause."""
    fill(systems, 400)
    slow(systems, "PERFORM pg_sleep(0.005)")
    config = configuration(pooler.conninfo(systems), {"sicr": POLICIES["sicr"]}, batch_size=10)
    process = program.start(config, "--once", "--json")
    until(lambda: systems.count(SICR) <= 350, "some batches")
    pooler.ask("PAUSE")
    until(lambda: pooler.waiting(systems), "the run waits")
    return process


def test_a_pooler_that_is_paused_delays_the_run(systems: Database, pooler: Pooler, program: Program) -> None:
    """PAUSE and RESUME, as for a switch-over: the run waits with everybody else, and loses nothing."""
    process = start_and_pause(systems, pooler, program)
    left = systems.count(SICR)
    assert 0 < left < 400
    assert at_work(systems) == []
    pooler.ask("RESUME")
    result = program.finish(process)
    assert (result.returncode, result.policies["sicr"]["deleted"], systems.count(SICR)) == (0, 400, 0), result.output


def test_a_stop_while_the_pooler_has_no_server_for_us(systems: Database, pooler: Pooler, program: Program) -> None:
    """Waiting for a free process of the server does not hold up the stop."""
    process = start_and_pause(systems, pooler, program)
    process.send_signal(signal.SIGTERM)
    result = program.finish(process, PROMPTLY)
    assert (result.returncode, result.json["stop_reason"]) == (0, "signal"), result.output
    assert result.policies["sicr"]["deleted"] == 400 - systems.count(SICR)


def test_a_pool_that_others_use_up(systems: Database, program: Program) -> None:
    """A pooler that throws out who waits too long for a process of the server: the run tries again until it has one."""
    fill(systems, 100)
    pooler = Pooler(systems.server, query_wait_timeout=1)
    others: list[psycopg.Connection[Any]] = []
    try:
        config = configuration(pooler.conninfo(systems), {"sicr": POLICIES["sicr"]}, batch_size=10, pause="500ms")
        process = program.start(config, "--once", "--json")
        until(lambda: systems.count(SICR) < 100, "a first batch")
        others = [pooler.connect(systems) for _ in range(pooler.SIZE)]
        for other in others:
            other.execute("SELECT 1")
        until(lambda: "query_wait_timeout" in pooler.log.read_text(), "the run is thrown out")
        until(lambda: pooler.waiting(systems), "it is there again")
        for other in others:
            other.rollback()
        result = program.finish(process)
    finally:
        for other in others:
            other.close()
        pooler.remove()
    assert (result.returncode, result.policies["sicr"]["deleted"], systems.count(SICR)) == (0, 100, 0), result.output
