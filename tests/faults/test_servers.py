"""Servers that are not what the run took them for: standbys, fail overs, processes that stand still."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest
from lab import POLICIES, SYSTEMS, Database, Program, Result, Server, configuration, log, until
from servers import Proxy, Standby, sessions

TOKENS = {"tokens": POLICIES["tokens_expired"]}
#: The batch, of ten rows of 200, at which a server goes away.
WHEN = 4


@pytest.fixture(scope="module")
def module_primary() -> Iterator[Server]:
    server = Server()
    yield server
    server.remove()


@pytest.fixture
def primary(module_primary: Server) -> Iterator[Server]:
    """A server that a test may stop, reconfigure or demote."""
    yield module_primary
    if not (module_primary.data / "postmaster.pid").exists():
        module_primary.start()
    with module_primary.connect() as connection:
        if connection.execute("SELECT pg_is_in_recovery()").fetchone() == (True,):
            module_primary.pg_ctl("promote")
    for name, value in (("default_transaction_read_only", "off"), ("synchronous_standby_names", "")):
        configure(module_primary, name, value)


def configure(server: Server, name: str, value: str) -> None:
    """Set it for all sessions, and wait until new ones have it."""
    with server.connect() as connection:
        connection.execute(f"ALTER SYSTEM SET {name} = '{value}'")
        connection.execute("SELECT pg_reload_conf()")

    def has_it() -> bool:
        with server.connect() as connection:
            return connection.execute(f"SHOW {name}").fetchone() == (value,)

    until(has_it, f"{name} is {value}")


_numbers = iter(range(1, 1000))


def fill(server: Server) -> Database:
    """A database on this server with 200 expired tokens and ten that are valid."""
    name = f"auth{next(_numbers)}"
    with server.connect() as connection:
        connection.execute(f"CREATE DATABASE {name}")
    database = Database(server, name)
    database.execute(SYSTEMS.read_text())
    database.execute(
        "INSERT INTO refresh_tokens (expires_at) SELECT now() - interval '1 day' FROM generate_series(1, 200);"
        "INSERT INTO refresh_tokens (expires_at) SELECT now() + interval '1 day' FROM generate_series(1, 10)"
    )
    database.close()
    return database


def left(server: Server, database: Database) -> int:
    """How many expired tokens there are on this server; no valid one may be missing."""
    seen = Database(server, database.name)
    valid, expired = seen.execute(
        "SELECT count(*) FILTER (WHERE expires_at > now()), count(*) FILTER (WHERE expires_at <= now())"
        " FROM refresh_tokens"
    )[0]
    seen.close()
    assert valid == 10
    return int(expired)


@pytest.fixture
def standby(primary: Server) -> Iterator[Standby]:
    standby = Standby(primary)
    yield standby
    standby.remove()


@pytest.fixture
def new_proxy() -> Iterator[Callable[[Server], Proxy]]:
    proxies: list[Proxy] = []

    def make(server: Server) -> Proxy:
        proxies.append(Proxy(server))
        return proxies[-1]

    yield make
    for proxy in proxies:
        proxy.close()


def assert_counts(result: Result, **expected: object) -> None:
    """The policy's result has these values, and its `deleted`, if known, is what the log says batch by batch."""
    tokens = result.policies["tokens"]
    assert {key: tokens[key] for key in expected} == expected, result.output
    lines = [line for line in log(result.stderr) if line.event == "batch_deleted"]
    logged = sum(int(line.fields["deletedCount"]) for line in lines)
    assert tokens["deleted"] in (logged, None), result.output


def assert_unavailable(result: Result, said: str, unsaid: str) -> None:
    assert (result.returncode, result.policies) == (69, {}), result.output
    (error,) = result.json["errors"]
    assert said in error["message"]
    assert unsaid not in error["message"]


# ── Not the primary ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_read_only_primary_and_a_standby_are_told_apart(primary: Server, standby: Standby, program: Program) -> None:
    """Their remedies differ: the one is to be made writable, beside the other there is one that is."""
    database = fill(primary)
    standby.catch_up()
    config = configuration(standby.conninfo(database.name, "retention"), TOKENS)
    assert_unavailable(program.inside(config, "--once", "--json"), "not the primary", "read-only")
    configure(primary, "default_transaction_read_only", "on")
    config = configuration(database.conninfo, TOKENS)
    assert_unavailable(program.inside(config, "--once", "--json"), "read-only", "primary")
    assert left(primary, database) == 200


# ── Fail over ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def fail_over(proxy: Proxy, standby: Standby, *, caught_up: bool = True) -> None:
    """The primary behind the proxy is gone at once, with all of its connections, and the standby takes over."""
    if caught_up:
        standby.catch_up()
    proxy.down()
    proxy.server.stop("immediate")
    standby.promote()


def either(proxy: Proxy, standby: Standby, database: Database) -> str:
    """The connection string with both hosts, the primary's proxy first."""
    return f"host={proxy.directory},{standby.directory} dbname={database.name} user=retention"


@pytest.mark.parametrize("stage", ["batch", "batch answered", "commit", "commit answered", "pause"])
def test_a_fail_over_costs_no_row_and_no_count(
    stage: str, primary: Server, standby: Standby, new_proxy: Callable[[Server], Proxy], program: Program
) -> None:
    """The standby has all that was committed and is promoted: each row goes once and is counted once, exit 0."""
    database, proxy = fill(primary), new_proxy(primary)
    proxy.at(stage, WHEN, lambda: fail_over(proxy, standby))
    hosts = either(proxy, standby, database)
    config = configuration(f"{hosts} target_session_attrs=read-write", TOKENS, batch_size=10)
    result = program.inside(config, "--once", "--json")
    assert proxy.happened == [stage]
    assert result.returncode == 0, result.output
    assert_counts(result, deleted=200, backlog=0, stop_reason="drained")
    assert left(standby, database) == 0


def test_rows_that_a_fail_over_brought_back_are_not_passed_over(
    primary: Server, standby: Standby, new_proxy: Callable[[Server], Proxy], program: Program
) -> None:
    """Asynchronous replication loses the last batches: their rows are there again, behind the walk, and go again.

    Each batch was committed when it was counted, so those rows count twice; what is left is told as it is.
    """
    database, proxy = fill(primary), new_proxy(primary)
    standby.catch_up()
    proxy.at("batch", 2, standby.detach)
    proxy.at("pause", WHEN, lambda: fail_over(proxy, standby, caught_up=False))
    hosts = either(proxy, standby, database)
    config = configuration(f"{hosts} target_session_attrs=read-write", TOKENS, batch_size=10, pause="10ms")
    result = program.inside(config, "--once", "--json")
    assert proxy.happened == ["batch", "pause"]
    assert result.returncode == 0, result.output
    assert_counts(result, deleted=200 + 10 * (WHEN - 1), backlog=left(standby, database), stop_reason="drained")
    assert left(standby, database) == 0


def test_a_commit_that_the_fail_over_lost_is_not_counted(
    primary: Server, standby: Standby, new_proxy: Callable[[Server], Proxy], program: Program
) -> None:
    """The old primary did commit, and told nobody: the new one does not know of it, so that batch goes again."""
    database, proxy = fill(primary), new_proxy(primary)
    standby.catch_up()

    def lose_this() -> None:
        standby.catch_up()
        standby.detach()

    proxy.at("batch", WHEN, lose_this)
    proxy.at("commit answered", WHEN, lambda: fail_over(proxy, standby, caught_up=False))
    hosts = either(proxy, standby, database)
    config = configuration(f"{hosts} target_session_attrs=read-write", TOKENS, batch_size=10)
    result = program.inside(config, "--once", "--json")
    assert proxy.happened == ["batch", "commit answered"]
    assert result.returncode == 0, result.output
    assert_counts(result, deleted=200, backlog=0, stop_reason="drained")
    assert left(standby, database) == 0


def test_a_host_list_alone_finds_the_new_primary(
    primary: Server, standby: Standby, new_proxy: Callable[[Server], Proxy], program: Program
) -> None:
    """Without target_session_attrs the run lands on the standby before that is promoted, and waits until it is."""
    database, proxy = fill(primary), new_proxy(primary)
    told: list[bool] = []

    def promote() -> None:
        copy = Database(standby, database.name)
        told.append(bool(until(lambda: sessions(copy), "the program is connected to the standby")))
        standby.promote()

    promoting = threading.Thread(target=promote)

    def fail() -> None:
        standby.catch_up()
        promoting.start()
        proxy.down()
        primary.stop("immediate")

    proxy.at("batch", WHEN, fail)
    hosts = either(proxy, standby, database)
    result = program.inside(configuration(hosts, TOKENS, batch_size=10), "--once", "--json")
    promoting.join()
    assert told == [True]
    assert result.returncode == 0, result.output
    assert_counts(result, deleted=200, backlog=0, stop_reason="drained")
    assert left(standby, database) == 0


@pytest.mark.parametrize("stage", ["batch", "commit answered"])
def test_a_server_demoted_in_mid_run_fails_the_policy(
    stage: str, primary: Server, new_proxy: Callable[[Server], Proxy], program: Program
) -> None:
    """Nothing that can be written to is left: exit 1, and why. Of a standby nobody asks whether a COMMIT was done."""
    database, proxy = fill(primary), new_proxy(primary)

    def demote() -> None:
        primary.stop("fast")  # first, lest the run is connected again and at its next batch by then
        proxy.cut()
        (primary.data / "standby.signal").touch()
        primary.start()

    proxy.at(stage, WHEN, demote)
    result = program.inside(
        configuration(proxy.conninfo(database), TOKENS, batch_size=10, max_run_duration="6s"), "--once", "--json"
    )
    assert proxy.happened == [stage]
    assert result.returncode == 1, result.output
    doubtful = stage == "commit answered"
    gone = 10 * (WHEN if doubtful else WHEN - 1)
    assert_counts(result, deleted=None if doubtful else gone, backlog=200 - gone, stop_reason="failed")
    assert "not the primary" in result.policies["tokens"]["error"]["message"]
    assert left(primary, database) == 200 - gone


def test_a_synchronous_standby_that_is_gone_holds_nothing_up(primary: Server, program: Program) -> None:
    """Every other session's COMMIT waits for it; ours needs none, and its counts are those of the primary."""
    database = fill(primary)
    configure(primary, "synchronous_standby_names", "nobody")  # synchronous_commit is on where nobody changed it
    result = program(configuration(database.conninfo, TOKENS, batch_size=10), "--once", "--json", timeout=30)
    assert result.returncode == 0, result.output
    assert_counts(result, deleted=200, backlog=0, stop_reason="drained")
    assert left(primary, database) == 0


# ── A server process that stands still ────────────────────────────────────────────────────────────────────────────────


LIMITS = {"statement_timeout": "2s", "connect_timeout": "2s"}


def test_a_server_process_that_stands_still_is_given_up(primary: Server, program: Program) -> None:
    """Its rows are in its hands still: the run leaves them after the time-out, takes the others and ends well."""
    database = fill(primary)
    database.execute(
        "CREATE SEQUENCE attempts; GRANT USAGE ON attempts TO retention;"
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        "    IF nextval('public.attempts') = 35 THEN PERFORM pg_catalog.pg_sleep(600); END IF; RETURN OLD; END $$;"
        "CREATE TRIGGER slow BEFORE DELETE ON refresh_tokens FOR EACH ROW EXECUTE FUNCTION slow()"
    )
    config = configuration(database.conninfo, TOKENS, batch_size=10, database=LIMITS)
    process = program.start(config, "--once", "--json")
    sleeping = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND datname = current_database()"
    ((pid,),) = until(lambda: database.execute(sleeping), "a batch is under way")
    os.kill(pid, signal.SIGSTOP)
    try:
        result = program.finish(process, 45)
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: not sessions(database), "the process has noticed that its client is gone")
    assert result.returncode == 0, result.output
    assert_counts(result, deleted=190, backlog=10, stop_reason="locked")
    assert left(primary, database) == 10
    database.close()


def test_a_server_process_that_stands_still_in_its_commit_leaves_the_count_unknown(
    primary: Server, new_proxy: Callable[[Server], Proxy], program: Program
) -> None:
    """Nobody can say whether that batch will be committed: null, exit 1, and the run ends all the same."""
    database, proxy = fill(primary), new_proxy(primary)
    stopped: list[int] = []

    def stop() -> None:
        ((pid, _),) = sessions(database)
        os.kill(pid, signal.SIGSTOP)
        stopped.append(pid)

    proxy.at("commit", WHEN, stop)
    config = configuration(proxy.conninfo(database), TOKENS, batch_size=10, database=LIMITS, max_run_duration="18s")
    try:
        result = program(config, "--once", "--json", timeout=45)
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    until(lambda: not sessions(database), "the process has noticed that its client is gone")
    assert result.returncode == 1, result.output
    tokens = result.policies["tokens"]
    assert (tokens["deleted"], tokens["stop_reason"]) == (None, "failed")
    assert left(primary, database) in (200 - 10 * (WHEN - 1), 200 - 10 * WHEN)
