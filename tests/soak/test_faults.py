"""Whatever breaks, at whatever moment: the rows that are gone are those that were counted, and the next run goes on."""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from chains import TABLE, Fate, load
from lab import POLICIES, SYSTEMS, Database, Program, Result, Server, configuration, log, until
from servers import Proxy, sessions

#: How many faults. RETENTION_SOAK_SEED repeats those of a failure.
FAULTS = int(os.environ.get("RETENTION_SOAK_FAULTS", "100"))
POLICY = {"refresh": POLICIES["refresh"], "tokens": POLICIES["tokens_expired"]}
TABLES = {"refresh": TABLE, "tokens": "refresh_tokens"}
BATCH, EXPIRED = 20, 400
STATEMENT, CONNECT, BUDGET = 2, 2, 60
#: When a run must have ended: its budget, a batch that is not answered, either policy's attempts to connect, load.
BOUND = BUDGET + (STATEMENT + 10) + 2 * (30 + CONNECT) + 15


@dataclass
class Scene:
    """A run that a fault befalls."""

    server: Server
    database: Database
    proxy: Proxy
    process: subprocess.Popen[str]
    dice: random.Random
    stopped: list[int]

    def backend(self) -> int | None:
        found = sessions(self.database)
        return found[0][0] if found else None

    def nothing(self) -> None:
        """For comparison."""

    def terminate(self) -> None:
        """An administrator ends the session."""
        with self.server.connect() as connection:
            connection.execute("SELECT pg_terminate_backend(%s)", [self.backend()])

    def restart_fast(self) -> None:
        self.server.pg_ctl("--mode", "fast", "restart")

    def restart_immediate(self) -> None:
        """As after a crash of the server."""
        self.server.pg_ctl("--mode", "immediate", "restart")

    def kill(self) -> None:
        """The program dies without a word."""
        self.process.kill()

    def freeze_and_cut(self) -> None:
        """The network is dead for a while, and then the connections are."""
        self.proxy.freeze()
        self.wait(self.dice.choice([0.5, STATEMENT + 12]))
        self.proxy.cut()
        self.proxy.thaw()

    def lose(self) -> None:
        """The connection is dead for good, and neither side is told."""
        self.proxy.lose()

    def stop_process(self) -> None:
        """The server's process stands still, for a while or until the program has given it up."""
        if pid := self.backend():
            os.kill(pid, signal.SIGSTOP)
            self.stopped.append(pid)
            self.wait(self.dice.choice([1.0, STATEMENT + 12]))
            self.proceed()

    def proceed(self) -> None:
        while self.stopped:
            os.kill(self.stopped.pop(), signal.SIGCONT)

    def wait(self, seconds: float) -> None:
        """So long, or until the run has ended."""
        end = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)


KINDS: list[Callable[[Scene], None]] = [
    Scene.terminate,
    Scene.restart_fast,
    Scene.restart_immediate,
    Scene.kill,
    Scene.freeze_and_cut,
    Scene.lose,
    Scene.stop_process,
]


@pytest.fixture(scope="module")
def restless() -> Iterator[Server]:
    """A server that is restarted under everybody's feet."""
    server = Server()
    yield server
    server.remove()


def fill(server: Server, name: str) -> tuple[Database, Fate]:
    with server.connect() as connection:
        connection.execute(f"CREATE DATABASE {name}")
    database = Database(server, name)
    database.execute(SYSTEMS.read_text())
    database.execute(
        f"INSERT INTO refresh_tokens (expires_at) SELECT now() - interval '1 day' FROM generate_series(1, {EXPIRED});"
        "INSERT INTO refresh_tokens (expires_at) SELECT now() + interval '1 day' FROM generate_series(1, 50)"
    )
    fate = load(database, 20, 30)
    database.close()
    return database, fate


def rows_of(database: Database) -> dict[str, set[Any]]:
    """The keys that there are in either table, no child without its parent and no valid token missing."""
    rows = {name: {key for (key,) in database.execute(f"SELECT id FROM {table}")} for name, table in TABLES.items()}
    orphans = f"parent_session_id IS NOT NULL AND parent_session_id NOT IN (SELECT id FROM {TABLE})"
    assert database.count(TABLE, orphans) == 0
    assert database.count("refresh_tokens", "expires_at > now()") == 50
    database.close()
    return rows


def logged(result: Result, policy: str) -> int:
    """What the log says of committed batches; its last line may be cut off where the program was killed."""
    whole = result.stderr[: result.stderr.rfind("\n") + 1]
    fields = [line.fields for line in log(whole) if line.event == "batch_deleted"]
    return sum(int(line["deletedCount"]) for line in fields if line["phase"] == policy)


def check(result: Result, policy: str, gone: int, left: int) -> None:
    """The first run's counts, of a policy that had so many rows when it began: `gone` have gone, `left` are there."""
    told = logged(result, policy)
    assert told <= gone <= told + BATCH, f"{policy}: {gone} gone, {told} logged"
    if result.returncode in (-signal.SIGKILL, 69):
        assert result.returncode != 69 or gone == 0
        return
    assert result.returncode in (0, 1)
    counts = result.policies[policy]
    if counts["deleted"] is None:
        assert result.returncode == 1
    else:
        assert counts["deleted"] == gone == told, f"{policy}: {gone} gone, {told} logged"
    assert counts["backlog"] in (left, None), f"{policy}: {left} left"


def befall(kind: Callable[[Scene], None], proxy: Proxy, name: str, program: Program, moment: float, seed: int) -> float:
    """Let a fault befall a run after so many seconds, and look at what is left; returns how long that run took."""
    server = proxy.server
    database, fate = fill(server, name)
    before = rows_of(database)
    limits = {"statement_timeout": f"{STATEMENT}s", "connect_timeout": f"{CONNECT}s"}
    budget = f"{BUDGET}s"
    config = configuration(
        proxy.conninfo(database), POLICY, database=limits, batch_size=BATCH, pause="10ms", max_run_duration=budget
    )
    process = program.start(config, "--once", "--json")
    started = time.monotonic()
    scene = Scene(server, database, proxy, process, random.Random(seed), [])
    try:
        scene.wait(moment)
        kind(scene)
        first = program.finish(process, BOUND)
        seconds = time.monotonic() - started
    finally:
        scene.proceed()
        program.kill()
        proxy.cut()
    try:
        until(lambda: not sessions(database), "the server is rid of the program", 2 * STATEMENT + 10)
        after = rows_of(database)
        matching = {"refresh": len(fate.finished | fate.blocked), "tokens": EXPIRED}
        for policy in TABLES:
            assert after[policy] <= before[policy]
            gone = len(before[policy] - after[policy])
            check(first, policy, gone, matching[policy] - gone)
        assert fate.staying <= after["refresh"]
        second = program.once(config)
        assert second.returncode == 0, second.output
        finished = rows_of(database)
        assert (finished["refresh"], len(finished["tokens"])) == (fate.staying, 50)
        for policy in TABLES:
            assert second.policies[policy]["deleted"] == len(after[policy] - finished[policy])
    except AssertionError:
        print(first.output)
        raise
    with server.connect() as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
    print(f"exit {first.returncode} after {seconds:.2f} s", flush=True)
    return seconds


def test_no_fault_costs_a_row_or_a_count(restless: Server, tmp_path: pathlib.Path) -> None:
    """Each kind in turn, at a random moment of a run; a second run after it finishes what there is."""
    seed = int(os.environ.get("RETENTION_SOAK_SEED", random.randrange(2**32)))
    print(f"RETENTION_SOAK_SEED={seed}")
    dice = random.Random(seed)
    usual = 0.0
    kinds: list[Callable[[Scene], None]] = [Scene.nothing]
    for number in range(FAULTS + 1):
        kinds = kinds or dice.sample(KINDS, len(KINDS))
        kind, moment, rest = kinds.pop(), dice.uniform(0, usual), dice.randrange(2**32)
        print(f"fault {number}: {kind.__name__} after {moment:.2f} s", end=": ", flush=True)
        with contextlib.closing(Proxy(restless)) as proxy:
            seconds = befall(kind, proxy, f"fault{number}", Program(tmp_path), moment, rest)
        usual = usual or seconds
