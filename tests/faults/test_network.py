"""A network that is dead and does not say so: nobody hangs, on either side, and the counts stay true."""

from __future__ import annotations

import ctypes
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from lab import POLICIES, PROMPTLY, SYSTEMS, Database, Program, Result, Server, configuration, log, until
from servers import Proxy, sessions

TOKENS = {"tokens": POLICIES["tokens_expired"]}
#: The batch, of ten rows of 100, at which the network dies.
WHEN = 3
#: What the configuration allows a statement, and a login.
STATEMENT, CONNECT = 2, 2
#: What users are promised, in seconds: an answer is waited for so much longer; the server is tried again so long.
SLACK, RECONNECT = 10, 30
#: Of a loaded machine.
LOAD = 20


@dataclass
class Run:
    """A run through a proxy of its own, on a database of its own."""

    name: str
    database: Database
    proxy: Proxy
    program: Program
    verb: str = "--once"
    result: Result = field(init=False)
    config: dict[str, object] = field(default_factory=dict)

    def perform(self, timeout: float) -> None:
        self.result = self.program.finish(self.program.start(self.config, self.verb, "--json"), timeout)

    @property
    def logged(self) -> int:
        lines = [line for line in log(self.result.stderr) if line.event == "batch_deleted"]
        return sum(int(line.fields["deletedCount"]) for line in lines)

    @property
    def gone(self) -> int:
        """How many of the expired tokens are not there any more; no other may be missing."""
        assert self.database.count("refresh_tokens", "expires_at > now()") == 10
        return 100 - self.database.count("refresh_tokens", "expires_at <= now()")


NewRun = Callable[[str], Run]


@pytest.fixture
def new_run(new_database: Callable[[], Database], server: Server, tmp_path: pathlib.Path) -> Iterator[NewRun]:
    """Make runs that can be under way at once, since they mostly wait."""
    runs: list[Run] = []

    def make(name: str) -> Run:
        database = new_database()
        database.execute(SYSTEMS.read_text())
        database.execute(
            "INSERT INTO refresh_tokens (expires_at) SELECT now() - interval '1 day' FROM generate_series(1, 100);"
            "INSERT INTO refresh_tokens (expires_at) SELECT now() + interval '1 day' FROM generate_series(1, 10)"
        )
        directory = tmp_path / str(len(runs))
        directory.mkdir()
        run = Run(name, database, Proxy(server), Program(directory))
        limits = {"statement_timeout": f"{STATEMENT}s", "connect_timeout": f"{CONNECT}s"}
        run.config = configuration(
            run.proxy.conninfo(database), TOKENS, database=limits, batch_size=10, max_run_duration="5m", pause="20ms"
        )
        runs.append(run)
        return run

    yield make
    for run in runs:
        run.program.kill()
        run.proxy.close()
        run.database.close()


def perform(runs: list[Run], bound: float) -> None:
    """All at once; none may take longer than the bound."""
    threads = [threading.Thread(target=run.perform, args=(bound + LOAD,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [run.name for run in runs if not hasattr(run, "result")] == [], "these did not end"


STAGES = ["batch", "batch answered", "commit", "commit answered", "pause"]


def test_connections_that_a_network_loses_cost_time_alone(new_run: NewRun) -> None:
    """A firewall forgets the connection: it is given up after the time-out and made again; all goes, counted once."""
    runs = [new_run(stage) for stage in STAGES]
    for run in runs:
        run.proxy.at(run.name, WHEN, run.proxy.lose)
    perform(runs, STATEMENT + SLACK)
    for run in runs:
        assert run.proxy.happened == [run.name]
        assert run.result.returncode == 0, run.result.output
        tokens = run.result.policies["tokens"]
        assert (tokens["deleted"], tokens["backlog"], tokens["stop_reason"]) == (100, 0, "drained"), run.name
        assert (run.logged, run.gone) == (100, 100), run.name


def test_a_network_that_stays_dead_ends_the_run(new_run: NewRun) -> None:
    """The policy fails, exit 1; its count is what was committed, or null where a COMMIT was left in doubt."""
    runs = [new_run(stage) for stage in STAGES]
    for run in runs:
        run.proxy.at(run.name, WHEN, run.proxy.freeze)
    perform(runs, STATEMENT + SLACK + RECONNECT + CONNECT)
    for run in runs:
        assert run.proxy.happened == [run.name]
        assert (run.result.returncode, run.result.json["stop_reason"]) == (1, "failed"), run.result.output
        tokens = run.result.policies["tokens"]
        # on a busy machine a batch may have been retried, and so the network have died a batch earlier
        counted = None if run.name.startswith("commit") else run.gone
        assert (tokens["deleted"], tokens["backlog"]) == (counted, None), (run.name, run.result.output)
        assert run.logged <= run.gone <= run.logged + (10 if counted is None else 0), run.name
        assert 0 < run.gone < 100
        assert tokens["error"]["message"]


def test_a_network_that_comes_back_in_time_is_used_again(new_run: NewRun) -> None:
    """Dead for all connections, old and new, and thawed while the run tries to connect: nothing is lost or doubled."""
    runs = [new_run("batch"), new_run("commit answered")]

    def outage(run: Run) -> None:
        run.proxy.freeze()
        seen = len(run.proxy.links)
        threading.Thread(target=come_back, args=(run, seen), daemon=True).start()

    def come_back(run: Run, seen: int) -> None:
        until(lambda: len(run.proxy.links) > seen, "the program connects again")
        run.proxy.thaw()

    for run in runs:
        run.proxy.at(run.name, WHEN, lambda run=run: outage(run))  # type: ignore[misc]
    perform(runs, STATEMENT + SLACK + CONNECT)
    for run in runs:
        assert run.result.returncode == 0, run.result.output
        tokens = run.result.policies["tokens"]
        assert (tokens["deleted"], tokens["backlog"], run.logged, run.gone) == (100, 0, 100, 100), run.name


def test_a_network_that_dies_before_the_first_batch_ends_every_command(new_run: NewRun) -> None:
    """The login went through, and then nothing: the first question is bounded like a batch, and the answer is 69."""
    runs = [new_run(verb) for verb in ("--once", "--dry-run", "--check")]
    for run in runs:
        run.proxy.at("login", 0, run.proxy.freeze)
        run.verb = run.name
    perform(runs, STATEMENT + SLACK)
    for run in runs:
        assert (run.result.returncode, run.gone) == (69, 0), run.result.output
        assert "Traceback" not in run.result.output
        if run.verb != "--check":
            assert run.result.policies == {}


def holding(database: Database) -> int:
    """How many of the program's sessions do anything, or hold a lock or a snapshot."""
    return int(
        database.value(
            "SELECT count(*) FROM pg_stat_activity a"
            " WHERE application_name = 'session-retention' AND datname = current_database() AND (state = 'active'"
            "    OR backend_xid IS NOT NULL OR backend_xmin IS NOT NULL"
            "    OR EXISTS (SELECT FROM pg_locks l WHERE l.pid = a.pid AND l.locktype <> 'virtualxid'))"
        )
    )


# ── The server's side ─────────────────────────────────────────────────────────────────────────────────────────────────


def die(run: Run) -> None:
    """The program's machine dies, at the stage of the first batch that gives the run its name."""
    if run.name == "running":
        run.database.execute(
            "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN PERFORM pg_catalog.pg_sleep(600); RETURN OLD; END $$;"
            "CREATE TRIGGER slow BEFORE DELETE ON refresh_tokens FOR EACH ROW EXECUTE FUNCTION slow()"
        )
    else:
        run.proxy.at(run.name, 1, run.proxy.freeze)
    process = run.program.start(run.config, "--once", "--json")
    if run.name == "running":
        sleeping = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'"
        until(lambda: run.database.value(sleeping), "the trigger sleeps")
        run.proxy.freeze()
    else:
        until(lambda: run.proxy.happened, "the network is dead")
    assert sessions(run.database), run.name
    run.program.kill()
    assert process.returncode == -9


def assert_rid_of(run: Run) -> None:
    until(lambda: not holding(run.database), f"nothing is held: {run.name}", STATEMENT + LOAD / 2)
    if run.name != "running":
        until(lambda: not sessions(run.database), f"no session is left: {run.name}", STATEMENT + LOAD / 2)
    assert run.gone == 0


def test_the_server_is_rid_of_a_client_whose_machine_died(new_run: NewRun) -> None:
    """Nobody closes the connection. No statement, lock or snapshot of ours outlives the time-out by much.

    What may be left of a statement that was `running` is a session that does nothing: its transaction has failed, and
    it waits to be told so for as long as its kernel believes in the connection.
    """
    runs = [new_run(stage) for stage in ("batch", "running", "batch answered", "commit")]
    for run in runs:
        die(run)
    for run in runs:
        assert_rid_of(run)


# ── TCP ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_tcp_connection_has_keepalives_unless_told_otherwise(systems: Database, program: Program) -> None:
    """A silent peer is noticed within 30 s, idle or in the middle of a statement; the connection string has the say."""
    names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
    seen: list[list[int]] = []
    proxy = Proxy(systems.server, tcp=True)

    def look() -> None:
        """The program runs in this process: find its end of the proxy's connection."""
        peer = proxy.links[-1].client.getpeername()
        for number in map(int, os.listdir("/proc/self/fd")):
            try:
                end = socket.socket(fileno=os.dup(number))
            except OSError:
                continue
            with end:
                if end.family == socket.AF_INET and end.getsockname() == peer:
                    options = [end.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names]
                    seen.append([end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), *options])

    try:
        for own in ("", " keepalives_idle=7 tcp_user_timeout=9000", " keepalives=0 tcp_user_timeout=0"):
            systems.execute("INSERT INTO refresh_tokens (expires_at) VALUES (now() - interval '1 day')")
            proxy.at("batch", proxy.batches + 1, look)
            result = program.inside(configuration(proxy.conninfo(systems) + own, TOKENS), "--once", "--json")
            assert result.returncode == 0, result.output
    finally:
        proxy.close()
    assert seen[:2] == [[1, 10, 5, 4, 30_000], [1, 7, 5, 4, 9000]]
    assert (seen[2][0], seen[2][-1]) == (0, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can have a name server of its own")
def test_a_name_server_that_never_answers_does_not_hold_up_a_stop(program: Program, tmp_path: pathlib.Path) -> None:
    """The library looks a name up for as long as it likes: 5 s after SIGTERM the process is gone all the same."""
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\n")
    # a name server that hears and never says anything, in a network of its own
    silent = (
        "import socket, sys, time; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('127.0.0.1', 53));"
        " print(flush=True); s.recv(512); print(flush=True); time.sleep(600)"
    )
    script = 'ip link set lo up && mount --bind "$1" /etc/resolv.conf && exec "$2" -c "$3"'
    apart = ("unshare", "--net", "--mount", "--propagation", "private", "sh", "-c", script, "sh")
    command = [*apart, str(tmp_path / "resolv.conf"), sys.executable, silent]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdout
        try:
            if not keeper.stdout.readline():
                pytest.skip("network namespaces are not possible here")
            prefix = ("nsenter", "--net", "--mount", "--target", str(keeper.pid))
            config = configuration("host=db.example.com dbname=auth user=retention", TOKENS)
            process = program.start(config, "--once", prefix=prefix)
            assert keeper.stdout.readline(), "it has been asked"
            process.send_signal(signal.SIGTERM)
            program.finish(process, PROMPTLY)
        finally:
            keeper.kill()


class Network:
    """Two network namespaces, of the server and of the program, and a link between them that can be pulled."""

    SERVER, PROGRAM = "10.99.0.1", "10.99.0.2"

    def __init__(self) -> None:
        command = ["unshare", "--net", "sh", "-c", "echo && exec cat"]  # which ends with the tests, however they end
        self.keepers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
        for keeper in self.keepers:
            assert keeper.stdout
            keeper.stdout.readline()
        self.ours, self.theirs = (("nsenter", "--net", f"--target={keeper.pid}") for keeper in self.keepers)
        peer = ["peer", "name", "cable", "netns", str(self.keepers[1].pid)]
        self.ip(self.ours, "link", "add", "name", "cable", "type", "veth", *peer)
        for where, address in ((self.ours, self.SERVER), (self.theirs, self.PROGRAM)):
            self.ip(where, "address", "add", f"{address}/24", "dev", "cable")
            self.ip(where, "link", "set", "cable", "up")

    @staticmethod
    def ip(where: tuple[str, ...], *arguments: str) -> None:
        subprocess.run([*where, "ip", *arguments], check=True, capture_output=True)

    def pull(self) -> None:
        self.ip(self.ours, "link", "set", "cable", "down")

    def plug(self) -> None:
        self.ip(self.ours, "link", "set", "cable", "up")

    @contextmanager
    def entered(self) -> Iterator[None]:
        """What this thread starts is where the server is to be (os.setns comes with Python 3.12 only)."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        there = os.open(f"/proc/{self.keepers[0].pid}/ns/net", os.O_RDONLY)
        setns = ctypes.CDLL(None, use_errno=True).setns
        try:
            assert setns(there, 0) == 0
            yield
        finally:
            assert setns(before, 0) == 0
            os.close(before)
            os.close(there)

    def close(self) -> None:
        for keeper in self.keepers:
            keeper.kill()
            keeper.communicate()


@pytest.fixture
def network() -> Iterator[Network]:
    possible = os.geteuid() == 0 and shutil.which("ip") and shutil.which("nsenter")
    if not possible or subprocess.run(["unshare", "--net", "true"], check=False, capture_output=True).returncode:
        pytest.skip("only root, with iproute2, can make network namespaces, and not everywhere")
    network = Network()
    yield network
    network.close()


@pytest.fixture
def far_away(network: Network) -> Iterator[Database]:
    """A database with expired tokens, on a server that is reached over the network's link."""
    with network.entered():
        server = Server(settings=f"listen_addresses = '{network.SERVER}'")
    with (server.data / "pg_hba.conf").open("a") as rules:
        rules.write("host all all 10.99.0.0/24 trust\n")
    with server.connect() as connection:
        connection.execute("SELECT pg_reload_conf()")
    database = Database(server, "postgres")
    database.execute(SYSTEMS.read_text())
    database.execute(
        "INSERT INTO refresh_tokens (expires_at) SELECT now() - interval '1 day' FROM generate_series(1, 100)"
    )
    yield database
    database.close()
    server.remove()


def test_a_link_that_is_pulled_is_noticed_by_tcp(far_away: Database, network: Network, program: Program) -> None:
    """Long before statement_timeout: the batch is given up, and once the link is back the rest goes."""
    far_away.execute(
        "CREATE SEQUENCE attempts; GRANT USAGE ON attempts TO retention;"
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        "    IF nextval('public.attempts') = 35 THEN PERFORM pg_catalog.pg_sleep(600); END IF; RETURN OLD; END $$;"
        "CREATE TRIGGER slow BEFORE DELETE ON refresh_tokens FOR EACH ROW EXECUTE FUNCTION slow()"
    )
    conninfo = f"host={network.SERVER} dbname=postgres user=retention"
    impatient = "keepalives_idle=1 keepalives_interval=1 keepalives_count=2 tcp_user_timeout=3000"
    config = configuration(
        f"{conninfo} {impatient}",
        TOKENS,
        database={"statement_timeout": "10m", "connect_timeout": "2s"},
        batch_size=10,
    )
    process = program.start(config, "--once", "--json", prefix=network.theirs)
    sleeping = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'PgSleep'"
    ((pid,),) = until(lambda: far_away.execute(sleeping), "a batch is under way")
    network.pull()
    assert process.stderr
    limit = threading.Timer(30, process.kill)
    limit.start()
    line = ""
    while "connect again" not in line:
        line = process.stderr.readline()
        assert line, "the run does not notice"
    limit.cancel()
    network.plug()
    far_away.execute(f"SELECT pg_terminate_backend({pid})")  # which has ten rows and ten minutes
    result = program.finish(process)
    assert result.returncode == 0, result.output
    tokens = result.policies["tokens"]
    assert (tokens["deleted"], tokens["backlog"], tokens["stop_reason"]) == (100, 0, "drained"), result.output
    assert far_away.count("refresh_tokens") == 0


def test_a_server_whose_client_was_unplugged_is_rid_of_it(
    far_away: Database, network: Network, program: Program
) -> None:
    """No packet says that the client is gone: the server ends its transaction after statement_timeout."""
    far_away.execute(
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN PERFORM pg_catalog.pg_sleep(600); RETURN OLD; END $$;"
        "CREATE TRIGGER slow BEFORE DELETE ON refresh_tokens FOR EACH ROW EXECUTE FUNCTION slow()"
    )
    conninfo = f"host={network.SERVER} dbname=postgres user=retention"
    config = configuration(conninfo, TOKENS, database={"statement_timeout": f"{STATEMENT}s"})
    program.start(config, "--once", prefix=network.theirs)
    sleeping = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'"
    until(lambda: far_away.value(sleeping), "a batch is under way")
    network.pull()
    program.kill()
    until(lambda: not holding(far_away), "nothing is held", STATEMENT + LOAD / 2)
    assert far_away.count("refresh_tokens") == 100
