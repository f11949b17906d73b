"""What a lost connection leaves open: whether a COMMIT went through, and what the server still holds for us."""

from __future__ import annotations

import signal
import socket
import subprocess
import time

import pytest
from lab import POLICIES, PROMPTLY, Database, Program, configuration, until
from servers import Proxy, sessions

TOKENS = {"tokens": POLICIES["tokens_expired"]}


@pytest.fixture
def filled(systems: Database) -> Database:
    """Thirty expired tokens."""
    systems.execute(
        "INSERT INTO refresh_tokens (expires_at) SELECT now() - interval '1 day' FROM generate_series(1, 30)"
    )
    return systems


def stopped(process: subprocess.Popen[str], program: Program) -> int | None:
    """Send SIGTERM; how many rows the run then says it deleted, None where it does not know or had no time to say."""
    process.send_signal(signal.SIGTERM)
    result = program.finish(process, PROMPTLY)
    if (result.returncode, result.stdout) == (1, ""):  # on a loaded machine
        return None
    assert result.returncode == 0, result.output
    tokens = result.policies["tokens"]
    assert (tokens["stop_reason"], tokens["error"]) == ("signal", None)
    deleted: int | None = tokens["deleted"]
    return deleted


@pytest.mark.parametrize("stage", ["commit", "commit answered"])
@pytest.mark.parametrize("network", ["lost", "dead"])
def test_a_signal_while_a_commit_is_not_answered(
    network: str, stage: str, filled: Database, proxy: Proxy, program: Program
) -> None:
    """The second batch may be committed: counted where the server can be asked, else the count is unknown, never less.

    Dead is a network for all connections; where only ours is lost, another can ask.
    """
    proxy.at(stage, 2, proxy.lose if network == "lost" else proxy.freeze)
    process = program.start(configuration(proxy.conninfo(filled), TOKENS, batch_size=10), "--once", "--json")
    until(lambda: proxy.happened, "the COMMIT is not answered")
    deleted = stopped(process, program)
    proxy.thaw()
    proxy.cut()
    until(lambda: not sessions(filled), "the server knows that its client is gone")
    gone = 30 - filled.count("refresh_tokens")
    if (network, stage) == ("lost", "commit answered"):
        assert (deleted, gone) == (20, 20)
    else:
        assert deleted in (None, gone)


def test_what_a_lost_connection_holds_goes_in_the_same_run(filled: Database, proxy: Proxy, program: Program) -> None:
    """The server has not noticed and would keep the rows of the batch locked: its process is ended first."""

    def hang_up() -> None:
        link = proxy.links[-1]
        proxy.lose()
        link.client.shutdown(socket.SHUT_RDWR)

    proxy.at("batch answered", 2, hang_up)
    began = time.monotonic()
    limits = {"statement_timeout": "10m"}
    config = configuration(proxy.conninfo(filled), TOKENS, database=limits, batch_size=10)
    tokens = program.inside(config, "--once", "--json").policies["tokens"]
    assert proxy.happened == ["batch answered"]
    assert (tokens["deleted"], tokens["backlog"], tokens["stop_reason"]) == (30, 0, "drained")
    assert time.monotonic() - began < 60, "who waits for the server's time-out has not ended its process"
    until(lambda: not sessions(filled), "the process of the lost connection has gone, and the other with the run")


def test_only_the_lost_process_of_ours_is_ended(filled: Database, proxy: Proxy, program: Program) -> None:
    """Another instance in the same database, and a session of the same role that is no job, live on."""
    other = Program(program.directory / "other")
    other.directory.mkdir()
    session = filled.connect(user="retention")
    proxy.at("batch", 2, proxy.cut)
    filled.execute("INSERT INTO refresh_tokens (expires_at) VALUES (now() - interval '2 days')")
    paused = other.start(configuration(filled.conninfo, TOKENS, batch_size=1, pause="1h"), "--once", "--json")
    try:
        until(lambda: filled.count("refresh_tokens") == 30, "the other instance pauses")
        ((pid, _),) = sessions(filled)
        result = program.inside(configuration(proxy.conninfo(filled), TOKENS, batch_size=10), "--once", "--json")
        assert (result.returncode, result.policies["tokens"]["deleted"]) == (0, 30), result.output
        until(lambda: [pid for pid, _ in sessions(filled)] == [pid], "the session of the run has gone, and no other")
        assert session.execute("SELECT 1").fetchall() == [(1,)]
        assert stopped(paused, other) == 1
    finally:
        other.kill()


@pytest.mark.parametrize("stage", ["login", "batch"])
def test_a_scheduled_run_outlives_a_connection_lost_at_once(
    stage: str, filled: Database, proxy: Proxy, program: Program
) -> None:
    """Right after the login, or in the first batch: it connects again within connect_retry, and all goes."""
    proxy.at(stage, 0 if stage == "login" else 1, proxy.cut)
    config = configuration(proxy.conninfo(filled), TOKENS, database={"connect_retry": "1m"}, batch_size=10)
    result = program.inside(config)
    assert proxy.happened == [stage]
    assert (result.returncode, filled.count("refresh_tokens")) == (0, 0), result.output
    assert "connect again" in result.stdout


def test_once_does_not_try_to_begin_again(filled: Database, proxy: Proxy, program: Program) -> None:
    """By hand the first loss ends it, with 69."""
    proxy.at("login", 0, proxy.cut)
    config = configuration(proxy.conninfo(filled), TOKENS, database={"connect_retry": "1m"})
    result = program.inside(config, "--once", "--json")
    assert (result.returncode, filled.count("refresh_tokens")) == (69, 30), result.output
