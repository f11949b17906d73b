"""The end of a run: by its budget, by a signal, by a server that is away; and what a retry can cure."""

from __future__ import annotations

import contextlib
import os
import pathlib
import select
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from lab import (
    POLICIES,
    PROMPTLY,
    Database,
    Line,
    Listener,
    Program,
    Result,
    Server,
    as_postgres,
    configuration,
    log,
    until,
)
from servers import Proxy, Standby, sessions

SICR = "identity.sign_in_confirmation_requests"


@pytest.fixture
def listener() -> Iterator[Listener]:
    """Where a server would be, in a path short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="retention-") as directory:
        yield Listener(pathlib.Path(directory))


def fill(database: Database, sicr: int = 0, tokens: int = 0) -> None:
    """So many rows to delete in the first policy, and in the third."""
    database.execute(
        "INSERT INTO identity.sign_in_confirmation_requests (phone_number, created_at)"
        f"    SELECT '', now() - interval '40 days' FROM generate_series(1, {sicr});"
        f"INSERT INTO refresh_tokens (expires_at) SELECT now() - interval '1 day' FROM generate_series(1, {tokens})"
    )


def on_delete(database: Database, body: str, table: str = SICR) -> None:
    """Run this PL/pgSQL for each row before it is deleted, with all rights; `attempts` counts, in any transaction."""
    database.execute(
        "CREATE SEQUENCE IF NOT EXISTS attempts;"
        "CREATE FUNCTION on_delete() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = public AS"
        f"    $body$ BEGIN {body}; RETURN OLD; END $body$;"
        f"CREATE TRIGGER on_delete BEFORE DELETE ON {table} FOR EACH ROW EXECUTE FUNCTION on_delete()"
    )


def ours(database: Database) -> list[tuple[str, str]]:
    """State and wait event type of each of the program's sessions in this database."""
    return database.execute(
        "SELECT state, wait_event_type FROM pg_stat_activity"
        " WHERE application_name = 'session-retention' AND datname = current_database()"
    )


def until_waiting(database: Database, kind: str) -> None:
    """Until the program's session is in the middle of a statement that waits for this kind of event."""
    until(lambda: ("active", kind) in ours(database), f"the program waits in {kind}: {ours(database)}")


def until_batches(process: subprocess.Popen[str], number: int) -> str:
    """Read the log until so many batches have been deleted; returns what was read."""
    assert process.stdout
    read = ""
    while read.count("batch deleted") < number:
        line = process.stdout.readline()
        assert line, f"the run ended early:\n{read}"
        read += line
    return read


def stop(process: subprocess.Popen[str], number: signal.Signals, read: str = "") -> Result:
    """Send the signal and wait, no longer than users were promised."""
    process.send_signal(number)
    result = Program.finish(process, PROMPTLY)
    return Result(result.returncode, read + result.stdout, result.stderr)


def batches(lines: list[Line], phase: str = "sicr") -> list[int]:
    """The size of each batch that the log says was deleted."""
    deleted = [line.fields for line in lines if line.event == "batch_deleted"]
    return [int(fields["deletedCount"]) for fields in deleted if fields["phase"] == phase]


def assert_ended(lines: list[Line], stop_reason: str) -> None:
    """Every phase that the run had in mind has its end, and so has the job, for this reason."""
    ends = [line.fields["phase"] for line in lines if line.event in ("phase_completed", "phase_failed")]
    assert ends == list(POLICIES)
    assert (lines[-1].event, lines[-1].fields["stopReason"]) == ("job_completed", stop_reason)


# ── Budget ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("arguments", [("--once",), ()], ids=["once", "scheduled"])
def test_the_budget_ends_a_run_between_batches(systems: Database, program: Program, arguments: tuple[str, ...]) -> None:
    """A spent budget is a good end: what is committed stays and is told, the rest is for the next night."""
    fill(systems, sicr=1000)
    config = configuration(systems.conninfo, max_run_duration="2s", batch_size=10, pause="100ms")
    result = program(config, *arguments, timeout=30)
    assert result.returncode == 0, result.output
    lines = log(result.stdout)
    assert_ended(lines, "budget")
    deleted = sum(batches(lines))
    assert 0 < deleted < 1000
    assert systems.count(SICR) == 1000 - deleted
    (sicr,) = [line for line in lines if line.event == "phase_completed" and line.fields["phase"] == "sicr"]
    assert sicr.message == f"Cleanup stopped (budget). Removed rows: {deleted}."
    counts = {key: sicr.fields[key] for key in ("deletedCount", "backlogRemaining", "blocked", "undeletable")}
    backlog = str(1000 - deleted)
    assert counts == {"deletedCount": str(deleted), "backlogRemaining": backlog, "blocked": "0", "undeletable": "0"}
    assert {line.fields["stopReason"] for line in lines if line.event == "phase_completed"} <= {"budget", "drained"}


def test_a_backlog_leaves_the_others_their_share(systems: Database, program: Program) -> None:
    """The first policy may use what is left divided by the phases left, not all of it."""
    fill(systems, sicr=1000, tokens=1000)
    config = configuration(systems.conninfo, max_run_duration="4s", batch_size=10, pause="100ms")
    result = program.inside(config, "--once", "--json")
    assert (result.returncode, result.json["stop_reason"]) == (0, "budget"), result.output
    policies = result.policies
    for name, table in (("sicr", SICR), ("tokens_expired", "refresh_tokens")):
        assert policies[name]["stop_reason"] == "budget"
        assert policies[name]["deleted"] > 10
        assert systems.count(table) == policies[name]["backlog"] == 1000 - policies[name]["deleted"]


def test_a_pause_ends_with_the_budget(systems: Database, program: Program) -> None:
    """Who pauses for an hour does not outstay its two seconds."""
    fill(systems, sicr=1000)
    config = configuration(systems.conninfo, max_run_duration="2s", batch_size=10, pause="1h")
    result = program(config, "--once", "--json", timeout=20)
    assert (result.returncode, result.json["stop_reason"]) == (0, "budget"), result.output


def test_an_automatic_pause_is_about_as_long_as_the_batch(systems: Database, program: Program) -> None:
    """`auto` gives the online service as much time as each batch took: half of the run's time is pause."""
    fill(systems, sicr=50)
    on_delete(systems, "PERFORM pg_sleep(0.02)")
    result = program(configuration(systems.conninfo, batch_size=10, pause="auto"), "--once")
    assert result.returncode == 0, result.output
    lines = log(result.stdout)
    worked = [int(line.fields["durationMs"]) for line in lines if line.event == "batch_deleted"]
    (phase,) = [line for line in lines if line.event == "phase_completed" and line.fields["phase"] == "sicr"]
    assert int(phase.fields["durationMs"]) >= sum(worked) + 0.9 * sum(worked[:-1])


# ── Signals ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("number", "arguments"), [(signal.SIGTERM, ()), (signal.SIGINT, ("--once",))], ids=["scheduled", "once"]
)
def test_a_signal_ends_the_run_after_the_batch_in_flight(
    systems: Database, program: Program, number: signal.Signals, arguments: tuple[str, ...]
) -> None:
    """What the log says was deleted is gone, what it does not say is there; exit 0."""
    fill(systems, sicr=2000, tokens=10)
    on_delete(systems, "PERFORM pg_sleep(0.01)")
    process = program.start(configuration(systems.conninfo, batch_size=10), *arguments)
    result = stop(process, number, until_batches(process, 3))
    assert (result.returncode, result.stderr) == (0, ""), result.output
    lines = log(result.stdout)
    assert_ended(lines, "signal")
    deleted = sum(batches(lines))
    assert systems.count(SICR) == 2000 - deleted
    assert systems.count("refresh_tokens") == 10
    (sicr,) = [line for line in lines if line.event == "phase_completed" and line.fields["phase"] == "sicr"]
    assert sicr.message == f"Cleanup stopped (signal). Removed rows: {deleted}."
    assert ours(systems) == []


def test_a_signal_leaves_a_complete_json_object(systems: Database, program: Program) -> None:
    """A script that stops a run still reads its result."""
    fill(systems, sicr=2000)
    on_delete(systems, "PERFORM pg_sleep(0.01)")
    process = program.start(configuration(systems.conninfo, batch_size=10), "--once", "--json")
    until(lambda: systems.count(SICR) < 2000, "a batch was deleted")
    result = stop(process, signal.SIGTERM)
    assert (result.returncode, result.json["stop_reason"], result.json["exit_status"]) == (0, "signal", 0)
    assert set(result.policies) == set(POLICIES)
    assert result.policies["sicr"]["deleted"] == 2000 - systems.count(SICR)


@pytest.mark.parametrize("numbers", [(signal.SIGINT,), (signal.SIGTERM, signal.SIGTERM)], ids=repr)
def test_a_stuck_batch_is_cancelled_on_the_server(
    systems: Database, program: Program, numbers: tuple[signal.Signals, ...]
) -> None:
    """A batch that does not end by itself is cancelled: nothing of ours goes on after the program is gone."""
    fill(systems, sicr=100)
    on_delete(systems, "IF nextval('attempts') = 15 THEN PERFORM pg_sleep(600); END IF")
    process = program.start(configuration(systems.conninfo, batch_size=10), "--once")
    until_waiting(systems, "Timeout")
    for number in numbers[:-1]:
        process.send_signal(number)
    result = stop(process, numbers[-1])
    assert (result.returncode, result.stderr) == (0, ""), result.output
    lines = log(result.stdout)
    assert_ended(lines, "signal")
    assert (batches(lines), systems.count(SICR)) == ([10], 90)
    assert ours(systems) == []


def test_a_stop_while_a_row_lock_is_waited_for(systems: Database, program: Program) -> None:
    """A trigger that waits for another session does not hold up the stop."""
    fill(systems, sicr=100)
    on_delete(systems, "PERFORM pg_advisory_xact_lock(4711)")
    holder = systems.connect()
    holder.execute("SELECT pg_advisory_lock(4711)")
    config = configuration(systems.conninfo, database={"lock_timeout": "60s"})
    process = program.start(config, "--once")
    until_waiting(systems, "Lock")
    result = stop(process, signal.SIGTERM)
    assert (result.returncode, systems.count(SICR), ours(systems)) == (0, 100, []), result.output


def test_a_stop_while_a_table_lock_is_waited_for(systems: Database, program: Program) -> None:
    """A table that somebody migrates does not hold up the stop, whatever we wanted of it."""
    fill(systems, sicr=100)
    holder = systems.connect(autocommit=False)
    holder.execute(f"LOCK TABLE {SICR}")
    config = configuration(systems.conninfo, database={"lock_timeout": "60s"})
    process = program.start(config, "--once")
    until_waiting(systems, "Lock")
    result = stop(process, signal.SIGTERM)
    assert result.returncode == 0, result.output
    holder.rollback()
    assert (systems.count(SICR), ours(systems)) == (100, [])


def test_a_dry_run_can_be_stopped(systems: Database, program: Program) -> None:
    """A count that takes too long is cancelled like a batch."""
    fill(systems, sicr=100)
    holder = systems.connect(autocommit=False)
    holder.execute(f"LOCK TABLE {SICR}")
    config = configuration(systems.conninfo, database={"lock_timeout": "60s"})
    process = program.start(config, "--dry-run")
    until_waiting(systems, "Lock")
    result = stop(process, signal.SIGTERM)
    assert result.returncode == 0, result.output
    assert "Traceback" not in result.output
    assert ours(systems) == []


def test_a_stop_while_the_server_does_not_answer(listener: Listener, program: Program) -> None:
    """A connection that hangs is given up at once."""
    process = program.start(configuration(listener.conninfo, database={"connect_timeout": "60s"}), "--once")
    with listener.accept():
        result = stop(process, signal.SIGTERM)
    assert result.returncode == 0, result.output
    assert "Traceback" not in result.output


def test_a_stop_between_two_attempts_to_connect(listener: Listener, program: Program) -> None:
    """A run that waits for its server to come back can be stopped at any time."""
    process = program.start(configuration(listener.conninfo, database={"connect_retry": "10m"}))
    listener.accept().close()
    listener.accept().close()
    result = stop(process, signal.SIGTERM)
    assert (result.returncode, result.stderr) == (0, ""), result.output
    assert_ended(log(result.stdout), "signal")


def test_a_stop_while_pausing(systems: Database, program: Program) -> None:
    """A pause of an hour ends with the signal, and the batch before it counts."""
    fill(systems, sicr=100)
    process = program.start(configuration(systems.conninfo, batch_size=10, pause="1h"), "--once")
    result = stop(process, signal.SIGTERM, until_batches(process, 1))
    assert (result.returncode, systems.count(SICR)) == (0, 90), result.output
    assert_ended(log(result.stdout), "signal")


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_a_signal_that_comes_when_all_is_done_changes_nothing(
    systems: Database, program: Program, tmp_path: pathlib.Path, number: str
) -> None:
    """The run is over and said so: its exit status is not that of a program that was killed."""
    fill(systems, sicr=10)
    hook = f"import atexit, os, signal; atexit.register(lambda: os.kill(os.getpid(), signal.{number}))"
    (tmp_path / "sitecustomize.py").write_text(hook)
    result = program(configuration(systems.conninfo), "--once", env={"PYTHONPATH": str(tmp_path)})
    assert log(result.stdout)[-1].fields["stopReason"] == "drained"
    assert (result.returncode, result.stderr, systems.count(SICR)) == (0, "", 0)


def test_a_check_that_is_interrupted_has_not_passed(systems: Database, listener: Listener, program: Program) -> None:
    """While it reads its configuration, connects, or asks the server: whoever deploys on its success does not."""
    os.mkfifo(program.path)
    process = program.start(None, "--check", "--json")
    with program.path.open("w"):  # it has come as far as to read, and there is nothing yet
        assert stop(process, signal.SIGINT).returncode not in (0, None)
    program.path.unlink()

    process = program.start(configuration(listener.conninfo, database={"connect_timeout": "60s"}), "--check", "--json")
    with listener.accept():
        assert stop(process, signal.SIGINT).returncode not in (0, None)

    fill(systems, sicr=10)
    holder = systems.connect(autocommit=False)
    holder.execute(f"LOCK TABLE {SICR}")
    process = program.start(configuration(systems.conninfo, database={"lock_timeout": "60s"}), "--check", "--json")
    until_waiting(systems, "Lock")
    result = stop(process, signal.SIGINT)
    assert result.returncode not in (0, None)
    assert "Traceback" not in result.output


def test_the_longest_durations_work(systems: Database, program: Program) -> None:
    """What the configuration allows, libpq and the server can do, too: no number of theirs runs over."""
    fill(systems, sicr=10)
    limits = dict.fromkeys(("connect_timeout", "connect_retry", "statement_timeout", "lock_timeout"), "36500d")
    longest: dict[str, Any] = {"pause": "36500d", "max_run_duration": "36500d", "retention_interval": "36500d"}
    result = program.inside(configuration(systems.conninfo, database=limits, **longest), "--once", "--json")
    assert (result.returncode, result.policies["sicr"]["deleted"], systems.count(SICR)) == (0, 10, 0), result.output


def test_a_stopped_server_process_does_not_hold_up_the_stop(systems: Database, program: Program) -> None:
    """A server that no longer answers, as over a dead network, is left to its own time-outs."""
    fill(systems, sicr=100)
    on_delete(systems, "PERFORM pg_sleep(600)")
    process = program.start(configuration(systems.conninfo), "--once")
    until_waiting(systems, "Timeout")
    (pid,) = systems.execute("SELECT pid FROM pg_stat_activity WHERE application_name = 'session-retention'")[0]
    subprocess.run(as_postgres("kill", "-STOP", str(pid)), check=True)
    try:
        result = stop(process, signal.SIGTERM)
    finally:
        subprocess.run(as_postgres("kill", "-CONT", str(pid)), check=True)
    assert result.returncode == 0, result.output
    assert "Traceback" not in result.output
    until(lambda: not ours(systems), "the server noticed that its client is gone")
    assert systems.count(SICR) == 100


# ── What a retry can cure ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("sqlstate", ["40P01", "40001", "55P03", "57014"])
def test_a_batch_that_fails_for_a_moment_is_tried_again(systems: Database, program: Program, sqlstate: str) -> None:
    """Deadlocks, serialization failures, lock and statement time-outs pass; nothing is lost or counted twice."""
    fill(systems, sicr=100)
    on_delete(systems, f"IF nextval('attempts') IN (5, 20) THEN RAISE SQLSTATE '{sqlstate}'; END IF")
    result = program.inside(configuration(systems.conninfo, batch_size=50), "--once", "--json")
    assert result.returncode == 0, result.output
    assert (result.policies["sicr"]["deleted"], systems.count(SICR)) == (100, 0)
    assert sum(batches(log(result.stderr))) == 100


def test_a_batch_that_always_times_out_is_given_up(systems: Database, program: Program) -> None:
    """Retries are bounded: that policy fails with the server's code, the others run, exit 1."""
    fill(systems, sicr=100, tokens=10)
    on_delete(systems, "RAISE SQLSTATE '57014'")
    result = program.inside(configuration(systems.conninfo, batch_size=50), "--once", "--json")
    assert (result.returncode, result.json["exit_status"], result.json["stop_reason"]) == (1, 1, "failed")
    sicr = result.policies["sicr"]
    assert (sicr["deleted"], sicr["stop_reason"], sicr["error"]["sqlstate"]) == (0, "failed", "57014")
    assert result.policies["tokens_expired"]["deleted"] == 10
    assert systems.count(SICR) == 100


def test_a_table_lock_that_is_released_delays_the_run(systems: Database, program: Program) -> None:
    """SKIP LOCKED skips no table lock: the lock time-out ends the wait, the retry finds the table free."""
    fill(systems, sicr=100)
    holder = systems.connect(autocommit=False)
    holder.execute(f"LOCK TABLE {SICR}")
    process = program.start(configuration(systems.conninfo, database={"lock_timeout": "300ms"}), "--once", "--json")
    until_waiting(systems, "Lock")
    until(lambda: ("active", "Lock") not in ours(systems), "the lock time-out ended the wait")
    holder.rollback()
    result = program.finish(process)
    assert (result.returncode, result.policies["sicr"]["deleted"]) == (0, 100), result.output


def test_a_table_that_is_locked_when_all_has_gone_delays_the_end(systems: Database, program: Program) -> None:
    """A migration waits for the last batch and then has the table: what stays is looked for again, not given up."""
    fill(systems, sicr=10)
    on_delete(systems, "PERFORM pg_advisory_xact_lock(4711)")
    gate, migration = systems.connect(), systems.connect(autocommit=False)
    gate.execute("SELECT pg_advisory_lock(4711)")
    config = configuration(systems.conninfo, database={"lock_timeout": "1s", "statement_timeout": "30s"})
    process = program.start(config, "--once", "--json")
    until_waiting(systems, "Lock")
    migrating = threading.Thread(target=migration.execute, args=[f"LOCK TABLE {SICR}"])
    migrating.start()
    queued = f"SELECT count(*) FROM pg_locks WHERE relation = '{SICR}'::regclass AND NOT granted"
    until(lambda: systems.value(queued), "the migration waits")
    gate.execute("SELECT pg_advisory_unlock(4711)")
    migrating.join()
    until_waiting(systems, "Lock")
    until(lambda: ("active", "Lock") not in ours(systems), "the lock time-out ended the wait")
    migration.rollback()
    sicr = program.finish(process).policies["sicr"]
    assert (process.returncode, sicr["deleted"], sicr["backlog"], sicr["stop_reason"]) == (0, 10, 0, "drained")


def test_a_table_lock_that_is_never_released_fails_its_policy_alone(systems: Database, program: Program) -> None:
    """A forgotten lock costs one policy a bounded wait, not the run."""
    fill(systems, sicr=100, tokens=10)
    holder = systems.connect(autocommit=False)
    holder.execute(f"LOCK TABLE {SICR}")
    result = program.inside(configuration(systems.conninfo, database={"lock_timeout": "100ms"}), "--once", "--json")
    assert result.returncode == 1, result.output
    assert result.policies["sicr"]["error"]["sqlstate"] == "55P03"
    assert result.policies["sicr"]["backlog"] is None, "nobody could count"
    assert (result.policies["tokens_expired"]["deleted"], result.policies["tokens_expired"]["error"]) == (10, None)


def test_retries_do_not_outstay_the_budget(systems: Database, program: Program) -> None:
    """A batch that the budget's end finds failing may end; it is not begun again and again after that."""
    fill(systems, sicr=100)
    on_delete(systems, "PERFORM pg_sleep(60)")
    config = configuration(systems.conninfo, database={"statement_timeout": "500ms"}, max_run_duration="1s")
    result = program(config, "--once", "--json")
    assert result.returncode in (0, 1)
    assert systems.count(SICR) == 100
    assert len([line for line in log(result.stderr) if line.event == "batch_retried"]) <= 3, result.output


def test_a_real_deadlock_is_survived(systems: Database, program: Program) -> None:
    """Two sessions that wait for each other: the server ends one of them, and the purge goes on."""
    fill(systems, sicr=10)
    on_delete(systems, "PERFORM pg_advisory_xact_lock(2)")
    systems.execute("ALTER ROLE retention IN DATABASE " + systems.name + " SET deadlock_timeout = '10s'")
    holder = systems.connect(autocommit=False)
    holder.execute("SET deadlock_timeout = '20ms'")
    holder.execute("SELECT pg_advisory_xact_lock(2)")
    process = program.start(configuration(systems.conninfo, database={"lock_timeout": "30s"}), "--once", "--json")
    until_waiting(systems, "Lock")
    with pytest.raises(psycopg.errors.DeadlockDetected):
        holder.execute(f"LOCK TABLE {SICR}")
    holder.rollback()
    result = program.finish(process)
    assert (result.returncode, result.policies["sicr"]["deleted"], systems.count(SICR)) == (0, 10, 0), result.output


@pytest.mark.parametrize("attempt", [1, 25], ids=["first batch", "later batch"])
def test_a_connection_lost_in_a_batch_is_made_again(systems: Database, program: Program, attempt: int) -> None:
    """A failover in the middle: the batch is rolled back, tried again, and counted once."""
    fill(systems, sicr=100)
    on_delete(
        systems,
        f"IF nextval('attempts') = {attempt} THEN PERFORM pg_terminate_backend(pg_backend_pid()); PERFORM pg_sleep(9);"
        " END IF",
    )
    result = program.inside(configuration(systems.conninfo, batch_size=10), "--once", "--json")
    assert result.returncode == 0, result.output
    assert (result.policies["sicr"]["deleted"], systems.count(SICR)) == (100, 0)
    assert sum(batches(log(result.stderr))) == 100


def test_a_connection_lost_between_batches_is_made_again(systems: Database, proxy: Proxy, program: Program) -> None:
    """An idle session that an administrator ended is no failure either."""
    fill(systems, sicr=100)

    def end() -> None:
        ((pid, state),) = sessions(systems)
        assert state == "idle"
        with systems.server.connect() as administrator:
            administrator.execute("SELECT pg_terminate_backend(%s, 30000)", [pid])

    proxy.at("pause", 2, end)
    result = program.inside(configuration(proxy.conninfo(systems), batch_size=10, pause="100ms"), "--once")
    assert proxy.happened == ["pause"]
    assert result.returncode == 0, result.output
    assert sum(batches(log(result.stdout))) == 100
    assert systems.count(SICR) == 0


class CutAtCommit(threading.Thread):
    """Stands between the program and the server, and cuts the connection at the COMMIT of one of the batches."""

    def __init__(self, listener: Listener, server: Server, batch: int, *, committed: bool) -> None:
        super().__init__(daemon=True)
        self.listener, self.batch, self.committed = listener, batch, committed
        self.path = str(server.directory / ".s.PGSQL.5432")
        self.batches = 0

    def run(self) -> None:
        with contextlib.suppress(OSError):  # the test is over
            while True:
                client = self.listener.accept(60)
                server = socket.socket(socket.AF_UNIX)
                server.connect(self.path)
                threading.Thread(target=self.forward, args=(client, server), daemon=True).start()

    def forward(self, client: socket.socket, server: socket.socket) -> None:
        deleting = False
        with client, server:
            while True:
                for source in select.select([client, server], [], [])[0]:
                    data = source.recv(65536)
                    if not data:
                        return
                    if source is client:
                        deleting = deleting or (b"SKIP LOCKED" in data and b"EXPLAIN" not in data)
                        if deleting and b"COMMIT" in data:
                            deleting, self.batches = False, self.batches + 1
                            if self.batches == self.batch:
                                if self.committed:
                                    server.sendall(data)
                                    server.recv(65536)
                                return
                    (server if source is client else client).sendall(data)


@pytest.mark.parametrize("committed", [True, False], ids=["after", "before"])
@pytest.mark.parametrize("batch", [1, 4, 10], ids=["first batch", "later batch", "last batch"])
def test_a_connection_lost_at_commit_counts_what_is_gone(
    systems: Database, listener: Listener, program: Program, batch: int, committed: bool
) -> None:
    """Nobody told us whether the COMMIT went through: the server is asked, and the counts are true either way."""
    fill(systems, sicr=100)
    proxy = CutAtCommit(listener, systems.server, batch, committed=committed)
    proxy.start()
    config = configuration(f"host={listener.directory} dbname={systems.name} user=retention", batch_size=10)
    result = program.inside(config, "--once", "--json")
    assert proxy.batches >= batch, "the connection was cut"
    assert (result.returncode, systems.count(SICR)) == (0, 0), result.output
    assert result.policies["sicr"]["deleted"] == sum(batches(log(result.stderr))) == 100


def test_a_connection_lost_again_and_again_fails_the_policy(systems: Database, program: Program) -> None:
    """Reconnecting is bounded too; the next policy gets a connection of its own."""
    fill(systems, sicr=10, tokens=10)
    on_delete(systems, "PERFORM pg_terminate_backend(pg_backend_pid()); PERFORM pg_sleep(9)")
    result = program.inside(configuration(systems.conninfo), "--once", "--json")
    assert (result.returncode, systems.count(SICR)) == (1, 10), result.output
    assert result.policies["sicr"]["stop_reason"] == "failed"
    assert result.policies["tokens_expired"]["deleted"] == 10


# ── A server that is away, or cannot be written to ────────────────────────────────────────────────────────────────────


def assert_unavailable(result: Result, word: str) -> None:
    """Exit 69 with an empty result that says why, and one line in the log."""
    assert result.returncode == 69, result.output
    assert (result.json["exit_status"], result.json["stop_reason"], result.policies) == (69, "failed", {})
    (error,) = result.json["errors"]
    assert set(error) == {"key", "message"}
    assert word in error["message"]
    (line,) = log(result.stderr)
    assert (line.event, line.level) == ("job_failed", "ERROR")
    assert word in line.fields["error"]


def test_once_tries_an_unreachable_server_once(listener: Listener, program: Program) -> None:
    """An operator gets the answer at once, whatever connect_retry says."""
    process = program.start(configuration(listener.conninfo, database={"connect_retry": "10m"}), "--once", "--json")
    listener.accept().close()
    assert_unavailable(program.finish(process, 20), "server")
    assert listener.untouched


def test_a_scheduled_run_keeps_trying_for_a_while(listener: Listener, program: Program) -> None:
    """A server that restarts at half past three is waited for; one that stays away ends in 69."""
    process = program.start(configuration(listener.conninfo, database={"connect_retry": "3s"}))
    listener.accept().close()
    listener.accept().close()
    listener.socket.close()
    result = program.finish(process, 20)
    assert result.returncode == 69, result.output
    assert log(result.stdout)[-1].event == "job_failed"


def test_a_scheduled_run_finds_the_server_that_came_back(
    systems: Database, listener: Listener, program: Program
) -> None:
    """Once the server is there, the run is like any other."""
    fill(systems, sicr=1)
    conninfo = f"host={listener.directory} dbname={systems.name} user=retention"
    process = program.start(configuration(conninfo, database={"connect_retry": "1m"}))
    listener.accept().close()
    listener.socket.close()
    path = listener.directory / ".s.PGSQL.5432"
    path.unlink()
    path.symlink_to(systems.server.directory / ".s.PGSQL.5432")
    result = program.finish(process, 30)
    assert (result.returncode, systems.count(SICR)) == (0, 0), result.output


def test_connecting_is_part_of_the_budget(listener: Listener, program: Program) -> None:
    """`connect_retry` ends with `max_run_duration`."""
    listener.socket.close()
    config = configuration(listener.conninfo, database={"connect_retry": "10m"}, max_run_duration="3s")
    assert program(config, timeout=20).returncode == 69


def test_a_server_that_does_not_answer_is_given_up_after_connect_timeout(listener: Listener, program: Program) -> None:
    """A dead network does not hang the run."""
    config = configuration(listener.conninfo, database={"connect_timeout": "2s"})
    assert_unavailable(program(config, "--once", "--json", timeout=20), "time")


@pytest.mark.parametrize(
    ("fault", "word"), [("dbname=nowhere", "nowhere"), ("user=nobody_here", "nobody_here")], ids=["database", "role"]
)
def test_a_login_that_is_refused_is_unavailable(systems: Database, program: Program, fault: str, word: str) -> None:
    """The server's answer about names is passed on."""
    assert_unavailable(program.inside(configuration(f"{systems.conninfo} {fault}"), "--once", "--json"), word)


@pytest.mark.parametrize("whom", ["ROLE retention IN DATABASE {0}", "DATABASE {0}"])
def test_a_read_only_server_is_unavailable(systems: Database, program: Program, whom: str) -> None:
    """Made read-only by an administrator, or by a full disk: nothing to be had here tonight."""
    fill(systems, sicr=1)
    systems.execute(f"ALTER {whom.format(systems.name)} SET default_transaction_read_only = on")
    assert_unavailable(program.inside(configuration(systems.conninfo), "--once", "--json"), "read-only")
    assert systems.count(SICR) == 1


@pytest.fixture
def standby(systems: Database) -> Iterator[Database]:
    """The database as a hot standby has it."""
    fill(systems, sicr=3)
    server = Standby(systems.server)
    database = Database(server, systems.name)
    yield database
    database.close()
    server.remove()


def test_a_standby_is_unavailable_to_a_run_and_good_for_a_dry_run(standby: Database, program: Program) -> None:
    """Nothing can be deleted on a standby, but what would be deleted can be counted there."""
    config = configuration(standby.conninfo)
    assert_unavailable(program.inside(config, "--once", "--json"), "standby")
    result = program(config, "--dry-run", "--json")
    assert (result.returncode, result.policies["sicr"]["would_delete"]) == (0, 3), result.output


def test_exit_status_is_in_the_result(systems: Database, program: Program) -> None:
    """The shape of a run's result, to the letter, when all went well."""
    fill(systems, sicr=3)
    result = program.inside(configuration(systems.conninfo), "--once", "--json")
    assert set(result.json) == {"job_run_id", "now", "stop_reason", "exit_status", "policies", "errors"}
    assert (result.json["exit_status"], result.json["stop_reason"], result.json["errors"]) == (0, "drained", [])
    assert list(result.policies) == list(POLICIES)
    sicr = result.policies["sicr"]
    assert sicr.pop("cutoff").startswith("20")
    counts = {"deleted": 3, "backlog": 0, "blocked": 0, "undeletable": 0}
    assert sicr == {"table": SICR, **counts, "stop_reason": "drained", "error": None}


def test_a_dry_run_has_the_same_shape(systems: Database, program: Program) -> None:
    """`would_delete` stands where a run has `deleted`; a row of two policies is counted in the first alone."""
    fill(systems, sicr=3)
    systems.execute("INSERT INTO refresh_tokens (expires_at, is_revoked) VALUES (now() - interval '2 days', true)")
    result = program(configuration(systems.conninfo), "--dry-run", "--json")
    assert result.returncode == 0, result.output
    assert set(result.json) == {"job_run_id", "now", "stop_reason", "exit_status", "policies", "errors"}
    keys = {"table", "cutoff", "would_delete", "backlog", "blocked", "undeletable", "stop_reason", "error"}
    assert {frozenset(policy) for policy in result.policies.values()} == {frozenset(keys)}
    would = {name: policy["would_delete"] for name, policy in result.policies.items()}
    assert would == {"sicr": 3, "refresh": 0, "tokens_expired": 1, "tokens_revoked": 0}
    assert (systems.count(SICR), systems.count("refresh_tokens")) == (3, 1)


@pytest.mark.parametrize("verb", ["--once", "--dry-run", ""])
def test_policy_limits_a_run_to_what_is_named(systems: Database, program: Program, verb: str) -> None:
    """`--policy`, repeated, in the order of the file; the others are not even mentioned."""
    fill(systems, sicr=3, tokens=3)
    names = ("tokens_revoked", "sicr")
    arguments = [*filter(None, [verb]), *(word for name in names for word in ("--policy", name))]
    result = program(configuration(systems.conninfo), *arguments)
    assert result.returncode == 0, result.output
    assert "refresh" not in result.output.replace("refresh_tokens", "")
    assert systems.count("refresh_tokens") == 3
    assert systems.count(SICR) == (3 if verb == "--dry-run" else 0)
    if verb != "--dry-run":
        phases = [line.fields["phase"] for line in log(result.stdout) if line.event == "phase_started"]
        assert phases == ["sicr", "tokens_revoked"]
