"""Batches that adapt to the time they take, and standbys that are waited for; on a server of the file's own."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import tempfile
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
    Server,
    as_postgres,
    configuration,
    log,
    until,
)
from servers import Proxy, Standby

TOKENS = {"tokens": {**POLICIES["tokens_expired"], "title": "tokens"}}
#: One row every 0.2 s, and two looks at the standbys in a second and a bit.
SLOWLY: dict[str, Any] = {"pause": "200ms", "batch_size": 1, "max_replication_lag": "500ms"}
ROWS = 12


@pytest.fixture(scope="module")
def primary() -> Iterator[Server]:
    server = Server(settings="wal_level = logical")
    yield server
    server.remove()


@pytest.fixture(scope="module")
def replica(primary: Server) -> Iterator[Standby]:
    standby = Standby(primary)
    with standby.connect() as connection:
        connection.execute("ALTER SYSTEM SET wal_receiver_status_interval = '1s'")
        connection.execute("SELECT pg_reload_conf()")
    yield standby
    standby.remove()


@pytest.fixture
def database(primary: Server) -> Iterator[Database]:
    """An empty database on the primary, dropped after the test; the role may see the standbys."""
    with primary.connect() as connection:
        connection.execute("CREATE DATABASE auth")
        connection.execute("GRANT pg_read_all_stats TO retention")
    database = Database(primary, "auth")
    yield database
    database.close()
    with primary.connect() as connection:
        connection.execute("DROP DATABASE auth WITH (FORCE)")


@pytest.fixture
def server(primary: Server) -> Server:
    return primary


@pytest.fixture
def standby(replica: Standby, systems: Database) -> Iterator[Standby]:
    """The standby, up with its primary, which has rows to delete."""
    expired(systems, ROWS)
    replica.catch_up()
    yield replica
    if (replica.data / "postmaster.pid").exists():
        replay(replica, on=True)
    else:
        replica.start()
        replica.streaming(True)


def expired(database: Database, rows: int) -> None:
    database.execute(
        "INSERT INTO refresh_tokens (expires_at)"
        " SELECT now() - interval '1 day' - i * interval '1 second' FROM generate_series(1, %s) i",
        rows,
    )


def replay(standby: Standby, *, on: bool) -> None:
    with standby.connect() as connection:
        connection.execute("SELECT pg_wal_replay_resume()" if on else "SELECT pg_wal_replay_pause()")


def receiver(standby: Standby) -> int:
    """The process of the standby that receives from the primary."""
    with standby.connect() as connection:
        return int(connection.execute("SELECT pid FROM pg_stat_wal_receiver").fetchall()[0][0])


def until_awaited(process: subprocess.Popen[str]) -> str:
    """Read the log until the run waits for a standby; returns what was read."""
    assert process.stderr
    read = ""
    while "waiting for a standby" not in read:
        line = process.stderr.readline()
        assert line, f"the run did not wait:\n{read}"
        read += line
    return read


def until_idle(database: Database, times: int = 1) -> None:
    """Until the run's session has been idle, outside any transaction, so many times anew."""
    moments: set[tuple[Any, ...]] = set()
    query = (
        "SELECT state_change FROM pg_stat_activity WHERE application_name = 'session-retention' AND state = 'idle'"
        " AND xact_start IS NULL AND datname = current_database()"
    )

    def again() -> bool:
        moments.update(database.execute(query))
        return len(moments) >= times

    until(again, f"idle {times} times")


def finish(process: subprocess.Popen[str], read: str, timeout: float = 60) -> Result:
    result = Program.finish(process, timeout)
    return Result(result.returncode, result.stdout, read + result.stderr)


def waits(result: Result) -> list[Line]:
    return [line for line in log(result.stderr) if line.message == "waiting for a standby"]


def ends(result: Result) -> list[Line]:
    return [line for line in log(result.stderr) if line.event in ("phase_completed", "phase_failed")]


def sizes(result: Result) -> list[int]:
    """The size that each batch could have had."""
    return [int(line.fields["batchSize"]) for line in log(result.stderr) if line.event == "batch_deleted"]


# ── Batches that adapt ────────────────────────────────────────────────────────────────────────────────────────────────


def on_delete(database: Database, condition: str, seconds: float) -> None:
    """Let a batch take so long where this is true of the rows that it deletes, `gone`."""
    database.execute(f"""
        CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN IF EXISTS (SELECT FROM gone WHERE {condition}) THEN PERFORM pg_sleep({seconds}); END IF;
            RETURN NULL; END $$;
        CREATE TRIGGER slow AFTER DELETE ON refresh_tokens REFERENCING OLD TABLE AS gone
            FOR EACH STATEMENT EXECUTE FUNCTION slow()""")


def test_batches_shrink_where_rows_are_slow_and_recover(systems: Database, program: Program) -> None:
    """With an automatic pause a batch has as many rows as go unnoticed: few slow ones, then many again, and never more
    than batch_size."""
    expired(systems, 6000)
    systems.execute("""
        CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN IF OLD.id BETWEEN 4000 AND 4300 THEN PERFORM pg_sleep(0.004); END IF; RETURN OLD; END $$;
        CREATE TRIGGER slow BEFORE DELETE ON refresh_tokens FOR EACH ROW EXECUTE FUNCTION slow()""")
    result = program.once(configuration(systems.conninfo, TOKENS, pause="auto", batch_size=600))
    assert (result.returncode, systems.count("refresh_tokens")) == (0, 0), result.output
    found = sizes(result)
    slowest = found.index(min(found))
    assert 10 * min(found) <= max(found) <= 600, found
    assert min(max(found[:slowest]), max(found[slowest:])) >= 300, found


@pytest.mark.parametrize("case", ["always", "from some time on", "after rows that stay"])
def test_batches_do_not_shrink_where_that_does_not_help(case: str, systems: Database, program: Program) -> None:
    """What takes its time for any number of rows is done for many, though rows before them were quick."""
    if case == "after rows that stay":
        systems.execute("DROP INDEX ix_refresh_tokens_expires_at")
        systems.execute("INSERT INTO refresh_tokens (expires_at) SELECT 'infinity' FROM generate_series(1, 3000)")
    expired(systems, 6000)
    on_delete(systems, "id < 5000" if case == "from some time on" else "true", 0.1)
    config = configuration(systems.conninfo, TOKENS, pause="auto", batch_size=1000, max_run_duration="30s")
    result = program.once(config)
    assert (result.policies["tokens"]["deleted"], result.json["stop_reason"]) == (6000, "drained"), sizes(result)
    assert len(sizes(result)) <= 60, sizes(result)


def test_a_batch_that_finds_nothing_makes_none_larger(systems: Database, program: Program) -> None:
    """The first rows that go are few, however many that stay have been read before."""
    systems.execute("DROP INDEX ix_refresh_tokens_expires_at")
    systems.execute("INSERT INTO refresh_tokens (expires_at) SELECT 'infinity' FROM generate_series(1, 60000)")
    expired(systems, 6000)
    result = program.once(configuration(systems.conninfo, TOKENS, pause="auto"))
    assert (result.policies["tokens"]["deleted"], sizes(result)[0]) == (6000, 500), sizes(result)


def test_batches_with_a_fixed_pause_are_as_large_as_they_may_be(systems: Database, program: Program) -> None:
    """A fixed pause is somebody's choice, and so is batch_size then."""
    expired(systems, 6000)
    on_delete(systems, "true", 0.05)
    result = program.once(configuration(systems.conninfo, TOKENS, pause="0s", batch_size=700))
    assert (set(sizes(result)), systems.count("refresh_tokens")) == ({700}, 0), result.output


# ── Standbys ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def stuck(standby: Standby, how: str) -> Iterator[None]:
    """The standby replays nothing, or does not even receive."""
    pid = receiver(standby)
    if how == "replay paused":
        replay(standby, on=False)
    else:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        if how == "replay paused":
            replay(standby, on=True)
        else:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("how", ["replay paused", "receiver stopped"])
def test_a_run_waits_for_a_standby(how: str, systems: Database, standby: Standby, program: Program) -> None:
    """It says so once and begins no batch, with no transaction open; when the standby is there again, all rows go."""
    with stuck(standby, how):
        process = program.start(configuration(systems.conninfo, TOKENS, **SLOWLY), "--once", "--json")
        read, before = until_awaited(process), systems.count("refresh_tokens")
        until_idle(systems, 3)
        after = systems.count("refresh_tokens")
    result = finish(process, read)
    assert (result.returncode, systems.count("refresh_tokens")) == (0, 0), result.output
    assert 0 < before == after < ROWS
    (wait,), (end,) = waits(result), ends(result)
    assert (wait.fields["phase"], wait.fields["standby"]) == ("tokens", "walreceiver")
    assert int(wait.fields["lagMs"]) > 500
    tokens = result.policies["tokens"]
    assert (tokens["deleted"], tokens["stop_reason"]) == (ROWS, "drained")
    assert int(end.fields["replicationWaitMs"]) == tokens["replication_wait_ms"] > 1000


def waiting(systems: Database, program: Program, **run: Any) -> tuple[subprocess.Popen[str], str]:
    """A run that waits for a standby, and what it has logged up to then."""
    process = program.start(configuration(systems.conninfo, TOKENS, **{**SLOWLY, **run}), "--once", "--json")
    return process, until_awaited(process)


def assert_left(systems: Database, result: Result, stop_reason: str) -> None:
    """The run ended well and early for this reason, and has counted what is there and what is not."""
    left, tokens = systems.count("refresh_tokens"), result.policies["tokens"]
    assert (result.returncode, tokens["stop_reason"]) == (0, stop_reason), result.output
    assert (tokens["deleted"], tokens["backlog"]) == (ROWS - left, left)
    assert 0 < left < ROWS
    assert len(waits(result)) == 1


def test_a_stop_while_a_standby_is_waited_for(systems: Database, standby: Standby, program: Program) -> None:
    """SIGTERM ends the wait at once, and the run well."""
    with stuck(standby, "replay paused"):
        process, read = waiting(systems, program)
        process.send_signal(signal.SIGTERM)
        assert_left(systems, finish(process, read, PROMPTLY), "signal")


def test_the_budget_ends_the_wait_for_a_standby(systems: Database, standby: Standby, program: Program) -> None:
    """A standby that does not come back costs the budget and no more."""
    with stuck(standby, "replay paused"):
        process, read = waiting(systems, program, max_run_duration="4s")
        assert_left(systems, finish(process, read, 4 + PROMPTLY), "budget")


def test_a_standby_that_was_behind_before(systems: Database, standby: Standby, program: Program) -> None:
    """Of a standby that has long been behind a run knows at once; each phase waits for its share of the budget."""
    policies = {**TOKENS, "revoked": POLICIES["tokens_revoked"]}
    with stuck(standby, "replay paused"):
        expired(systems, 1)
        query = "SELECT count(*) FROM pg_stat_replication WHERE replay_lag > interval '1s'"
        until(lambda: systems.value(query) == 1, "the server knows of the lag")
        result = program.once(configuration(systems.conninfo, policies, **SLOWLY, max_run_duration="4s"))
    assert (result.returncode, systems.count("refresh_tokens")) == (0, ROWS + 1), result.output
    assert [line.fields["phase"] for line in waits(result)] == list(policies)
    for policy in result.policies.values():
        assert (policy["stop_reason"], policy["replication_wait_ms"] > 1000) == ("budget", True)


def test_a_standby_that_has_gone_is_not_waited_for(systems: Database, standby: Standby, program: Program) -> None:
    """When it disconnects the run goes on without it."""
    replay(standby, on=False)
    process, read = waiting(systems, program)
    standby.stop()
    result = finish(process, read)
    assert (result.returncode, systems.count("refresh_tokens"), len(waits(result))) == (0, 0, 1), result.output


@contextlib.contextmanager
def client(primary: Server, name: str, *arguments: str) -> Iterator[None]:
    """One of PostgreSQL's own programs, connected to the primary for replication."""
    with tempfile.TemporaryDirectory(prefix="retention-", ignore_cleanup_errors=True) as directory:
        pathlib.Path(directory).chmod(0o777)
        target = "--pgdata" if name == "pg_basebackup" else "--directory"
        path = pathlib.Path(directory, "copy")
        if name == "pg_receivewal":
            path.mkdir()
            path.chmod(0o777)
        command = as_postgres(
            primary.programs / name, f"--host={primary.directory}", "--username=postgres", target, path
        )
        process = subprocess.Popen([*command, *arguments], cwd="/", stderr=subprocess.DEVNULL)
        query = "SELECT pid FROM pg_stat_replication WHERE application_name = %s AND state <> 'startup'"
        wanted = 2 if name == "pg_basebackup" else 1  # that which copies the files, and that which streams
        with primary.connect() as connection:
            until(lambda: len(connection.execute(query, [name]).fetchall()) == wanted, f"{name} is connected")
            try:
                yield
                assert process.poll() is None
            finally:
                process.kill()  # its children, and a server process that still sends a file, would live on
                connection.execute(query.replace("SELECT pid", "SELECT pg_terminate_backend(pid)"), [name])
                process.wait(30)
                until(lambda: not connection.execute(query, [name]).fetchall(), f"{name} is gone")


CLIENTS = {
    "pg_basebackup": ("--max-rate=32k", "--wal-method=stream", "--checkpoint=fast", "--no-sync"),
    "pg_receivewal": ("--no-sync",),
}


def assert_not_awaited(systems: Database, program: Program) -> None:
    result = program.once(configuration(systems.conninfo, TOKENS, **SLOWLY, max_run_duration="8s"))
    tokens = result.policies["tokens"]
    assert (tokens["stop_reason"], tokens["replication_wait_ms"]) == ("drained", 0), result.output


@pytest.mark.parametrize("name", CLIENTS)
def test_who_copies_and_does_not_replay_is_not_waited_for(
    name: str, systems: Database, primary: Server, program: Program
) -> None:
    """A base backup in progress, an archive of WAL."""
    expired(systems, ROWS)
    with client(primary, name, *CLIENTS[name]):
        assert_not_awaited(systems, program)


def test_a_subscriber_is_not_waited_for(systems: Database, primary: Server, program: Program) -> None:
    """Of logical replication, though it stands still."""
    systems.execute("CREATE DATABASE subscriber")
    systems.execute("CREATE PUBLICATION p FOR TABLE refresh_tokens")
    systems.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
    subscriber = Database(primary, "subscriber")
    subscriber.execute(SYSTEMS.read_text())
    subscriber.execute(
        f"CREATE SUBSCRIPTION s CONNECTION '{primary.conninfo('auth')}' PUBLICATION p"
        " WITH (create_slot = false, copy_data = false)"
    )
    try:
        with subscriber.connect(autocommit=False) as holder:
            holder.execute("LOCK TABLE refresh_tokens")
            expired(systems, ROWS)
            behind = "SELECT count(*) FROM pg_stat_replication WHERE application_name = 's' AND state = 'streaming'"
            until(lambda: systems.value(behind) == 1, "it is connected")
            assert_not_awaited(systems, program)
    finally:
        subscriber.execute("DROP SUBSCRIPTION s")
        subscriber.close()
        systems.execute("DROP DATABASE subscriber WITH (FORCE)")


def test_a_connection_lost_while_waiting_is_made_again(
    systems: Database, standby: Standby, proxy: Proxy, program: Program
) -> None:
    """A batch whose COMMIT was cut off is counted once, though the next connection is lost before the next batch."""
    systems.user = f"retention host={proxy.directory}"
    for batch in range(1, ROWS):
        proxy.at("commit answered", batch, proxy.cut)
    with stuck(standby, "replay paused"):
        process, read = waiting(systems, program)
        proxy.cut()
        until_idle(systems)
    result = finish(process, read)
    assert (result.returncode, systems.count("refresh_tokens")) == (0, 0), result.output
    assert result.policies["tokens"]["deleted"] == ROWS


def test_the_sight_of_standbys_may_be_lost(systems: Database, standby: Standby, program: Program) -> None:
    """A lag that cannot be seen any more fails the policy: nothing is deleted blindly."""
    with stuck(standby, "replay paused"):
        process, read = waiting(systems, program)
        systems.execute("REVOKE pg_read_all_stats FROM retention")
        result = finish(process, read)
    tokens = result.policies["tokens"]
    assert (result.returncode, tokens["error"]["sqlstate"], tokens["stop_reason"]) == (1, "42501", "failed")
    assert "role retention may not see how far a standby is behind" in tokens["error"]["message"]
    assert tokens["deleted"] == ROWS - systems.count("refresh_tokens") < ROWS


def test_systemd_hears_from_a_run_that_waits(
    systems: Database, standby: Standby, program: Program, tmp_path: pathlib.Path
) -> None:
    """Each second that it waits it asks for more time, so that it is not taken for hung."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified, stuck(standby, "replay paused"):
        notified.bind(str(tmp_path / "notify"))
        config = configuration(systems.conninfo, TOKENS, **SLOWLY)
        process = program.start(config, "--once", "--json", env={"NOTIFY_SOCKET": str(tmp_path / "notify")})
        read = until_awaited(process)
        left = systems.count("refresh_tokens")
        notified.setblocking(False)
        with contextlib.suppress(BlockingIOError):  # what came before
            while notified.recv(100):
                pass
        notified.settimeout(30)
        signs = [notified.recv(100).decode() for _ in range(5)]
        assert systems.count("refresh_tokens") == left
    finish(process, read)
    assert sum(sign.startswith("EXTEND_TIMEOUT_USEC=") for sign in signs) >= 4, signs  # one may say what it is at


def test_who_does_not_ask_for_it_waits_for_no_standby(systems: Database, standby: Standby, program: Program) -> None:
    """Without the option no privilege is needed, and neither log nor result has a wait; with it, and no wait, 0."""
    systems.execute("REVOKE pg_read_all_stats FROM retention")
    with stuck(standby, "replay paused"):
        result = program.once(configuration(systems.conninfo, TOKENS, pause="200ms", batch_size=1))
    assert (result.returncode, systems.count("refresh_tokens")) == (0, 0), result.output
    assert "replication" not in result.output
    assert "standby" not in result.output
    systems.execute("GRANT pg_read_all_stats TO retention")
    result = program.once(configuration(systems.conninfo, TOKENS, max_replication_lag="1m"))
    assert (ends(result)[0].fields["replicationWaitMs"], result.policies["tokens"]["replication_wait_ms"]) == ("0", 0)


HOSTILE = {
    "statement_timeout": "1ms",
    "lock_timeout": "1ms",
    "client_min_messages": "debug5",
    "search_path": "decoy",
    "default_transaction_isolation": "serializable",
    "idle_in_transaction_session_timeout": "1ms",
}


def test_settings_of_the_role_do_not_matter_while_waiting(
    systems: Database, standby: Standby, program: Program
) -> None:
    """Nor does a view of the catalog's name in public: the wait is the same."""
    systems.execute("CREATE SCHEMA decoy CREATE VIEW pg_stat_replication AS SELECT WHERE false")
    systems.execute("GRANT USAGE ON SCHEMA decoy TO retention")
    for name, value in HOSTILE.items():
        systems.execute(f"ALTER ROLE retention IN DATABASE auth SET {name} = '{value}'")
    with stuck(standby, "replay paused"):
        process, read = waiting(systems, program)
        until_idle(systems, 2)
    result = finish(process, read)
    assert (result.returncode, systems.count("refresh_tokens"), len(waits(result))) == (0, 0, 1), result.output


def test_the_name_of_a_standby_is_quoted_in_the_log(systems: Database, standby: Standby, program: Program) -> None:
    """Whatever it calls itself, the line has its form and the field the name."""
    name = 'a "b" \\ c=d'
    with standby.connect() as connection:
        (before,) = connection.execute("SHOW primary_conninfo").fetchall()[0]
        value = name.replace("\\", "\\\\")
        connection.execute(f"ALTER SYSTEM SET primary_conninfo = $${before} application_name='{value}'$$")
        connection.execute("SELECT pg_reload_conf()")
        query = "SELECT count(*) FROM pg_stat_replication WHERE application_name = %s AND state = 'streaming'"
        until(lambda: systems.value(query, name) == 1, "it has the name")
        try:
            with stuck(standby, "replay paused"):
                process, read = waiting(systems, program)
            assert waits(finish(process, read))[0].fields["standby"] == name
        finally:
            connection.execute("ALTER SYSTEM RESET primary_conninfo")
            connection.execute(f"ALTER SYSTEM SET primary_conninfo = $${before}$$")
            connection.execute("SELECT pg_reload_conf()")
            until(lambda: systems.value(query, "walreceiver") == 1, "it has its own name again")


def test_a_table_without_rows_that_go_waits_for_its_turn_as_well(
    systems: Database, standby: Standby, program: Program
) -> None:
    """What there is nothing of is said once the standby is there; the budget ends the wait with nothing deleted."""
    systems.execute("UPDATE refresh_tokens SET expires_at = 'infinity'")
    with stuck(standby, "replay paused"):
        query = "SELECT count(*) FROM pg_stat_replication WHERE replay_lag > interval '1s'"
        systems.execute("UPDATE refresh_tokens SET user_id = user_id")
        until(lambda: systems.value(query) == 1, "the server knows of the lag")
        result = program.once(configuration(systems.conninfo, TOKENS, **SLOWLY, max_run_duration="2s"))
    tokens = result.policies["tokens"]
    assert (result.returncode, tokens["deleted"], tokens["stop_reason"], tokens["backlog"]) == (0, 0, "budget", 0)


def transactions(database: Database) -> int:
    """Of the job, which has gone: the server adds a session's up when it ends."""
    gone = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE usename = 'retention')"
    until(lambda: database.value(gone), "the job's session is over")
    return int(database.value("SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"))


def test_rows_that_stay_are_not_passed_one_by_one(systems: Database, program: Program) -> None:
    """Where a row was refused, the many blocked ones behind it are read in batches again."""
    systems.execute("""
        CREATE TABLE t (id bigint PRIMARY KEY, created_at timestamptz NOT NULL);
        CREATE INDEX ON t (created_at);
        CREATE TABLE holds (t bigint REFERENCES t);
        CREATE INDEX ON holds (t);
        INSERT INTO t SELECT n, now() - interval '40 days' - n * interval '1 minute' FROM generate_series(1, 1000) n;
        INSERT INTO holds SELECT id FROM t WHERE id > 1;
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE ''no''; END';
        CREATE TRIGGER refuse BEFORE DELETE ON t FOR EACH ROW EXECUTE FUNCTION refuse();
        GRANT SELECT ON holds TO retention""")
    systems.grant("t", select="id, created_at")
    before = transactions(systems)
    policy = {"t": {"table": "t", "age_column": "created_at", "retention": "30d"}}
    found = program.once(configuration(systems.conninfo, policy, pause="auto")).policies["t"]
    assert (found["blocked"], found["undeletable"]) == (999, 1)
    assert transactions(systems) - before < 100
