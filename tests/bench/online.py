#!/usr/bin/python3
"""Measure what an online service feels while old rows are purged beside it. No assertion; it prints a table.

Four connections of pgbench sign in, rotate and revoke by key at 60 % of what the machine can do without a purge; 2 % of
their transactions lock an old row, as a client with a stale token does. A transaction counts when it was under way
within the span of the purge, from the moment when it was due: what waits in a queue has waited. It is compared with the
same load in the seconds before that purge, so that other work on the machine does the least harm. Each measurement has
a fresh copy of the same database, on a server with autovacuum off and durability as in production: TMPDIR says on which
file system. In one round every contender has its turn, and the figures are medians over the rounds.

tests/bench/online.py [--tiny] [--table sicr] [--program PATH] [--set key=value] [CONTENDER...]

A contender is one of those that --help lists, or the program with other options of its section [run]:
`batch_size=1000,pause=10ms`.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from lab import LINE, POLICIES, PROGRAM, SYSTEMS, Database, Line, Program, Server, configuration

CLIENTS = 4
SHARE = 0.6  # of what the machine can do
COOL_DOWN = 0.1  # seconds of load after a measurement
SETTINGS = """
fsync = on
synchronous_commit = on
shared_buffers = 512MB
checkpoint_timeout = 1h
"""


@dataclass(frozen=True)
class Service:
    """A table with as many rows to purge as live ones, their keys made from their numbers, and what is done with it."""

    load: str
    scripts: dict[str, tuple[int, str]]  # their weights in a hundred, and what they do
    due: str  # what is to go
    claim: str  # of the obvious loop


def key(kind: str, number: str) -> str:
    return f"md5('{kind}' || {number})::uuid"


SESSIONS, REQUESTS = "identity.refresh_sessions", "identity.sign_in_confirmation_requests"
NUMBERS = "FROM generate_series(1, :rows) n"
LIVE, OLD = "\\set live random(1, :rows)\n", "\\set old random(1, :rows)\n"


def session(key: str, parent: str, status: str, age: str) -> str:
    return f"{key}, {parent}, '{status}', repeat('agent ', 15), '192.0.2.1', now() - {age}, now() - {age}"


def request(key: str, status: str, age: str) -> str:
    return f"{key}, '5550100', '{status}', repeat('agent ', 15), '192.0.2.1', now() - {age}"


INSERT_SESSION = (
    f"INSERT INTO {SESSIONS} (id, parent_session_id, status, user_agent, ip_address, created_at, updated_at) SELECT"
)
INSERT_REQUEST = f"INSERT INTO {REQUESTS} (id, phone_number, status, user_agent, ip_address, created_at) SELECT"
AGE, ZERO = "(interval '700 days' - n * interval '1 minute')", "interval '0'"
PREDECESSOR = f"CASE WHEN n % 6 IN (2, 4, 5) THEN {key('old', '(n - 1)')} END"  # chains of one, two and three
END_SESSION = f"UPDATE {SESSIONS} SET status = '{{}}', updated_at = now() WHERE id = {key('live', ':live')};\n"
OVER = "status IN ('Rotated', 'Revoked', 'Expired') AND updated_at < now() - interval '90 days'"
AGED = "created_at < now() - interval '30 days'"
SERVICES = {
    "refresh": Service(
        load=f"{INSERT_SESSION} {session(key('old', 'n'), PREDECESSOR, 'Rotated', AGE)} {NUMBERS};"
        f"{INSERT_SESSION} {session(key('live', 'n'), 'NULL', 'Active', AGE)} {NUMBERS}",
        scripts={
            "sign in": (20, f"{INSERT_SESSION} {session('gen_random_uuid()', 'NULL', 'Active', ZERO)};"),
            "rotate": (
                60,
                f"{LIVE}BEGIN;\n{END_SESSION.format('Rotated')}"
                f"{INSERT_SESSION} {session('gen_random_uuid()', key('live', ':live'), 'Active', ZERO)};\nEND;",
            ),
            "revoke": (18, f"{LIVE}{END_SESSION.format('Revoked')}"),
            "stale": (2, f"{OLD}SELECT status FROM {SESSIONS} WHERE id = {key('old', ':old')} FOR UPDATE;"),
        },
        due=OVER,
        claim=f"SELECT id FROM {SESSIONS} t WHERE {OVER} AND NOT EXISTS"
        f" (SELECT FROM {SESSIONS} child WHERE child.parent_session_id = t.id) ORDER BY updated_at",
    ),
    "sicr": Service(
        load=f"{INSERT_REQUEST} {request(key('old', 'n'), 'Confirmed', AGE)} {NUMBERS};"
        f"{INSERT_REQUEST} {request(key('live', 'n'), 'Pending', ZERO)} {NUMBERS}",
        scripts={
            "request": (49, f"{INSERT_REQUEST} {request('gen_random_uuid()', 'Pending', ZERO)};"),
            "confirm": (49, f"{LIVE}UPDATE {REQUESTS} SET status = 'Confirmed' WHERE id = {key('live', ':live')};"),
            "stale": (2, f"{OLD}SELECT status FROM {REQUESTS} WHERE id = {key('old', ':old')} FOR UPDATE;"),
        },
        due=AGED,
        claim=f"SELECT id FROM {REQUESTS} WHERE {AGED} ORDER BY created_at",
    ),
}


@dataclass(frozen=True)
class Transaction:
    """One transaction of the service: when it ended, and how many seconds after it was due and after it began."""

    ended: float
    latency: float
    duration: float
    script: int


class Load:
    """The service at work: pgbench, from the moment it is made until `stop`."""

    def __init__(
        self, database: Database, service: Service, options: argparse.Namespace, rate: float | None, directory: str
    ) -> None:
        self.log = pathlib.Path(tempfile.mkdtemp(dir=directory)) / "log"
        self.stale = list(service.scripts).index("stale")
        command = ["pgbench", "--no-vacuum", "--protocol=prepared", f"--client={CLIENTS}", "--time=3600"]
        command += ["--log", f"--log-prefix={self.log}", f"--define=rows={options.rows}"]
        if rate:
            command.append(f"--rate={rate:.0f}")
        for name, (weight, text) in service.scripts.items():
            script = self.log.with_name(f"{name}.sql")
            script.write_text(text)
            command.append(f"--file={script}@{weight}")
        command.append(database.server.conninfo(database.name))
        command[0] = str(database.server.programs / command[0])
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        time.sleep(options.warm_up)  # until pages are in the log in full, after the checkpoint

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()

    def stop(self) -> tuple[list[Transaction], str]:
        """What it did, as far as it did not fail, and what it said of failures."""
        self.process.send_signal(signal.SIGALRM)  # as its own --time does
        _, errors = self.process.communicate(timeout=60)
        (log,) = self.log.parent.glob("log.*")
        transactions = []
        for line in log.read_text().splitlines():
            _, _, latency, script, second, micro, *lag = line.split()
            if latency == "failed":
                errors += line
                continue
            ended, late = int(second) + int(micro) / 1e6, int(lag[0]) / 1e6 if lag else 0.0
            transactions.append(Transaction(ended, int(latency) / 1e6, int(latency) / 1e6 - late, int(script)))
        return transactions, errors


@dataclass
class Purge:
    """From when to when it was at work, how many rows it deleted, and how long its transactions took."""

    begun: float
    ended: float
    deleted: int = 0
    batches: list[float] = field(default_factory=list)

    def felt(self, transactions: Sequence[Transaction]) -> list[Transaction]:
        """Those that were due, or had not ended, in its time."""
        return [t for t in transactions if t.ended >= self.begun and t.ended - t.latency <= self.ended]


def percentile(share: int, transactions: Sequence[Transaction]) -> float:
    latencies = sorted(1000 * t.latency for t in transactions)
    return latencies[math.ceil(share / 100 * len(latencies)) - 1]


class Bench:
    """A server with the database that each measurement begins with, and the rate of its load."""

    def __init__(self, server: Server, options: argparse.Namespace, directory: str) -> None:
        self.server, self.options, self.directory = server, options, directory
        self.service = SERVICES[options.table]
        self.rate: float | None = None  # transactions a second; None: as many as go
        with self.server.connect() as connection:
            connection.execute("CREATE DATABASE template")
        template = Database(self.server, "template")
        template.execute(SYSTEMS.read_text())
        template.execute(self.service.load.replace(":rows", str(options.rows)))
        template.execute("CREATE EXTENSION pg_prewarm")
        template.execute("VACUUM ANALYZE")
        template.close()

    def fresh(self) -> Database:
        """A copy of the database, all of it cached and on the disk."""
        with self.server.connect() as connection:
            connection.execute("DROP DATABASE IF EXISTS auth WITH (FORCE)")
            connection.execute("CREATE DATABASE auth TEMPLATE template STRATEGY file_copy")
        database = Database(self.server, "auth")
        database.execute("SELECT pg_prewarm(oid) FROM pg_class WHERE relkind IN ('r', 'i') AND relfilenode <> 0")
        database.execute("CHECKPOINT")
        return database

    def capacity(self) -> float:
        """Transactions a second of a service that does not wait for its users."""
        database = self.fresh()
        with Load(database, self.service, self.options, None, self.directory) as load:
            calm = self.calm()
            done, _ = load.stop()
        database.close()
        return len(calm.felt(done)) / (calm.ended - calm.begun)

    def calm(self) -> Purge:
        """A time without a purge."""
        begun = time.time()
        time.sleep(self.options.calm)
        return Purge(begun, time.time())

    def measure(self, contender: str) -> dict[str, float]:
        """A service in peace, then the same with a purge beside it: the figures of both, times in milliseconds."""
        database = self.fresh()
        with Load(database, self.service, self.options, self.rate, self.directory) as load:
            calm = self.calm()
            purge = self.purge(database, contender)
            time.sleep(COOL_DOWN + 2 * max(purge.batches))  # what waited in a queue is done by then
            done, errors = load.stop()
        database.close()
        before, during = calm.felt(done), purge.felt(done)
        if not before or not during:
            raise RuntimeError(f"the service did nothing: {errors}")
        p99 = percentile(99, during)
        return {
            "calm": percentile(99, before),
            "p50": percentile(50, during),
            "p95": percentile(95, during),
            "p99": p99,
            "times": p99 / percentile(99, before),
            "max": percentile(100, during),
            "wait": max((1000 * t.duration for t in during if t.script == load.stale), default=0.0),
            "batch": 1000 * max(purge.batches),
            "mean": 1000 * statistics.fmean(purge.batches),
            "errors": float(len(errors.splitlines())),
            "seconds": purge.ended - purge.begun,
            "pace": purge.deleted / (purge.ended - purge.begun),
        }

    def purge(self, database: Database, contender: str) -> Purge:
        table = POLICIES[self.options.table]["table"]
        if contender == "one-delete":
            return self.statements(database, f"DELETE FROM {table} WHERE {self.service.due}", math.inf)
        if contender == "loop":
            claim = f"{self.service.claim} LIMIT 5000 FOR UPDATE SKIP LOCKED"
            return self.statements(database, f"DELETE FROM {table} WHERE id IN ({claim})", 1)
        changed = CONTENDERS.get(contender, contender)
        if contender == "quiet":
            changed = f"batch_size={self.options.quiet_batch},pause={self.options.quiet_pause}"
        return self.program(database, [*self.options.set, *filter(None, changed.split(","))])

    def statements(self, database: Database, statement: str, worth: float) -> Purge:
        """The same statement, until it deletes fewer rows than are worth another."""
        begun, count = time.time(), math.inf
        purge = Purge(begun, begun)
        while count >= worth and purge.ended - begun < self.options.seconds:
            last, count = purge.ended, database.owner.execute(statement).rowcount
            purge.ended = time.time()
            purge.deleted += count
            purge.batches.append(purge.ended - last)
        return purge

    def program(self, database: Database, changed: Sequence[str]) -> Purge:
        """The program, timed by its log: from the start of its phase to its last batch."""
        policies = {self.options.table: POLICIES[self.options.table]}
        run: dict[str, Any] = {"max_run_duration": f"{self.options.seconds}s"}
        for name, value in (text.split("=") for text in changed):
            run[name] = int(value) if value.isdecimal() else value
        config = configuration(database.conninfo, policies, **{"pause": "auto", **run})
        with tempfile.TemporaryDirectory(dir=self.directory) as directory:
            program = Program(pathlib.Path(directory))
            program.write(config)
            command = [sys.executable, str(self.options.program), *program.command("--once", "--json")[2:]]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd="/")
            purge, said = Purge(0.0, 0.0), ""
            assert process.stderr
            for text in process.stderr:
                said += text
                line = Line.parse(text.rstrip("\n")) if LINE.fullmatch(text.rstrip("\n")) else None
                if line and line.event == "phase_started":
                    purge.begun = time.time()
                elif line and line.event == "batch_deleted":
                    purge.ended = time.time()
                    purge.deleted += int(line.fields["deletedCount"])
                    purge.batches.append(int(line.fields["durationMs"]) / 1000)
            if process.wait() != 0 or not purge.batches:
                raise RuntimeError(f"the run failed: {said}")
        return purge


#: The options of the program that each changes, if it is the program.
CONTENDERS = {"defaults": "", "quiet": "", "no-pause": "pause=0s", "one-delete": "", "loop": ""}
#: At most how many times the p99 of the seconds before the purge.
TARGETS = {"defaults": 3.0, "quiet": 1.5}
COLUMNS = {
    "calm": "p99 before",
    "p50": "p50 ms",
    "p95": "p95 ms",
    "p99": "p99 ms",
    "times": "times",
    "max": "max ms",
    "wait": "longest wait",
    "batch": "longest batch",
    "mean": "mean batch",
    "errors": "errors",
    "seconds": "purge s",
    "pace": "rows/s",
}


def table(rounds: dict[str, list[dict[str, float]]]) -> str:
    """The medians; of what must not happen, the worst."""
    width = max(map(len, rounds))
    lines = ["  ".join([" " * width, *COLUMNS.values()])]
    for contender, figures in rounds.items():
        row = [contender.ljust(width)]
        for name, title in COLUMNS.items():
            value = (sum if name == "errors" else statistics.median)(figure[name] for figure in figures)
            digits = 0 if name in ("errors", "pace") else 1
            row.append(f"{value:,.{digits}f}".rjust(len(title)))
        lines.append("  ".join(row))
    return "\n".join(lines)


def verdicts(rounds: dict[str, list[dict[str, float]]]) -> list[str]:
    lines = []
    for contender, figures in rounds.items():
        times = statistics.median(figure["times"] for figure in figures)
        if target := TARGETS.get(contender):
            lines.append(
                f"{contender}: p99 {times:.1f} x that without a purge, at most {target}: {met(times <= target)}"
            )
        if contender in TARGETS:
            errors = sum(figure["errors"] for figure in figures)
            lines.append(f"{contender}: {errors:.0f} errors, none allowed: {met(errors == 0)}")
            excess = statistics.median(figure["wait"] - figure["batch"] for figure in figures)
            lines.append(f"{contender}: the longest wait is {excess:+.1f} ms to the longest batch: {met(excess <= 0)}")
    return lines


def met(condition: bool) -> str:
    return "met" if condition else "NOT MET"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("contenders", nargs="*", default=list(CONTENDERS), help=f"of {', '.join(CONTENDERS)} (all), or key=value,…")
    add("--table", choices=SERVICES, default="refresh")
    add("--rows", type=int, default=200_000, help="to purge; as many stay")
    add("--rounds", type=int, default=5)
    add("--seconds", type=int, default=15, help="of a purge at most")
    add("--calm", type=float, default=5, help="seconds of load before a purge")
    add("--warm-up", type=float, default=3, help="seconds of load before those")
    add("--quiet-batch", type=int, default=200)
    add("--quiet-pause", default="100ms")
    add("--program", type=pathlib.Path, default=PROGRAM, help="another copy of retention.py")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="an option of [run] for each run")
    add("--rate", type=float, help="transactions a second, instead of a share of what was measured")
    add("--tiny", action="store_true", help="only to see that it works")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that its server ends with it
    if options.tiny:
        options.rows, options.rounds, options.seconds, options.warm_up, options.calm = 4_000, 1, 1, 0.3, 0.3
    with tempfile.TemporaryDirectory() as directory:
        server = Server(settings=SETTINGS)
        try:
            bench = Bench(server, options, directory)
            capacity = bench.capacity()
            bench.rate = options.rate or SHARE * capacity
            print(f"{options.table}: {capacity:,.0f} transactions/s at most, load {bench.rate:,.0f}/s", flush=True)
            rounds: dict[str, list[dict[str, float]]] = {name: [] for name in options.contenders}
            for number in range(options.rounds):
                turn = number % len(options.contenders)
                for contender in [*options.contenders[turn:], *options.contenders[:turn]]:
                    rounds[contender].append(bench.measure(contender))
        finally:
            server.remove()
    print(table(rounds), *verdicts(rounds), sep="\n")


if __name__ == "__main__":
    main()
