"""The sections: what is measured, beside what was promised of it."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import pathlib
import signal
import statistics
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from bench import contenders, picture
from bench.contenders import Contender, Measured, client, look, program
from bench.data import Data, Lab, Make, ancestors, requests, rotations, young
from bench.picture import Chart
from lab import TOP, Database

T = TypeVar("T")
#: No limit of time, for the program alone.
HOURS = 6 * 3600.0
SIZES = (100_000, 300_000, 1_000_000, 3_000_000, 10_000_000)
ORDERS = {False: "heap in the order of age", True: "heap shuffled"}
HELD = ", an old snapshot held"
WALKS = {True: "index on age", False: "no index"}


@dataclass
class Result:
    """The runs of one contender on the same data."""

    runs: list[Measured]
    to_go: int

    @property
    def capped(self) -> bool:
        return any(run.capped for run in self.runs)

    @property
    def seconds(self) -> float:
        return statistics.median(run.seconds for run in self.runs)

    @property
    def wall(self) -> float:
        return statistics.median(run.wall for run in self.runs)

    @property
    def typical(self) -> Measured:
        """The run whose time is nearest to the median."""
        return min(self.runs, key=lambda run: abs(run.seconds - self.seconds))

    @property
    def per_row(self) -> float:
        """Seconds for each row that went. Ended at the limit it is less than the whole takes, for no way speeds up."""
        return self.seconds / (self.typical.deleted or self.to_go)

    @property
    def cpu(self) -> float:
        return statistics.median(run.cpu for run in self.runs)

    def row(self) -> list[str]:
        times = [run.seconds for run in self.runs]
        cpu = f"{self.cpu:.2f}"
        if self.capped:
            return [f"> {self.seconds:.0f}", "", cpu, "", f"{self.typical.deleted:,} of {self.to_go:,}"]
        wall = f"{self.wall:.2f}" if self.wall else ""
        return [f"{self.seconds:.3f}", f"{min(times):.3f}-{max(times):.3f}", cpu, wall, f"{self.to_go:,}"]


HEAD = ("", "seconds", "least-most", "server CPU", "process", "rows")


@dataclass
class Bench:
    """The server, the options, and what has been found."""

    lab: Lab
    runs: int
    limit: float
    largest: int
    tiny: bool
    charts: list[Chart] = field(default_factory=list)

    def rows(self, number: int) -> int:
        return max(number // 100, 100) if self.tiny else number

    def some(self, *variants: T) -> tuple[T, ...]:
        """Variants of a section, of which the first alone is enough to see that it works."""
        return variants[:1] if self.tiny else variants

    @property
    def sizes(self) -> list[int]:
        return [self.rows(size) for size in SIZES if size <= self.largest]

    def heading(self, text: str) -> None:
        print(f"\n{text}\n{'-' * len(text)}", flush=True)

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
        for row in [head, *rows]:
            first, *rest = (
                f"{cell:<{w}}" if i == 0 else f"{cell:>{w}}"
                for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            print("  ".join([first, *rest]).rstrip(), flush=True)

    def target(self, what: str, value: float, most: float = 0.0, *, least: float = 0.0, bound: str = "") -> None:
        """`bound`: the value is only known to lie above (>) or below (<) this."""
        met = value <= most if most else value >= least
        certain = not bound or (bound == ">") == (met if least else not met)
        verdict = ("met" if met else "NOT MET") if certain else "not decided"
        wanted = f"at most {most:g}" if most else f"at least {least:g}"
        print(f"* {what}: {bound}{value:.3g}, {wanted}{'' if self.tiny else f': {verdict}'}", flush=True)

    def ratio(self, what: str, one: Result, other: Result, most: float = 0.0, *, least: float = 0.0) -> None:
        """The time of one in times of the other, row for row."""
        bound = ">" if one.capped else "<" if other.capped else ""
        computed = "" if bound else f" (server CPU {one.cpu / max(other.cpu, 0.01):.3g})"
        self.target(what + computed, one.per_row / other.per_row, most, least=least, bound=bound)

    def measure(self, data: Data, contender: Contender, limit: float = HOURS, *, snapshot: bool = False) -> Measured:
        with self.lab.copy(data, snapshot=snapshot) as database:
            before = self.lab.cpu()
            measured = contender(database, data, limit)
            self.lab.settle(database)
            measured.cpu = self.lab.cpu() - before
        if measured.deleted != data.to_go and not measured.capped:
            raise RuntimeError(f"{measured.deleted} rows were deleted of {data.to_go}")
        return measured

    def compare(self, data: Data, field: Mapping[str, Contender], *, snapshot: bool = False) -> dict[str, Result]:
        """The contenders in turn, back and forth. One that takes too long runs once, ended unless it is the program."""
        results = {name: Result([], data.to_go) for name in field}
        for number in range(self.runs):
            for name in list(field)[:: -1 if number % 2 else 1]:
                limit = HOURS if field[name] is program else self.limit
                if not any(run.seconds > self.limit for run in results[name].runs):
                    results[name].runs.append(self.measure(data, field[name], limit, snapshot=snapshot))
        return results

    def show(self, results: Mapping[str, Result], title: str) -> None:
        """A table, and a chart of what had gone by when."""
        self.table(HEAD, [[name, *result.row()] for name, result in results.items()])
        curves = {name: result.typical.progress for name, result in results.items()}
        self.charts.append(Chart(title, "seconds", "rows deleted", curves))


def sicr(bench: Bench) -> None:
    """One simple table: what claiming rows and small transactions cost."""
    field: dict[str, Contender] = {
        "program": program,
        "program, batch_size = 20000": functools.partial(program, batch_size=20_000),
        "floor: claim and delete": contenders.FLOOR,
        "one DELETE": contenders.ONE_SHOT,
        "obvious loop": contenders.OBVIOUS,
    }
    rows, to_go = bench.rows(500_000), bench.rows(350_000)
    for shuffled, order in bench.some(*ORDERS.items()):
        with bench.lab.data(requests(rows, to_go, shuffled=shuffled)) as data:
            quiet: Result | None = None
            for snapshot in (False, True):
                title = f"sicr: {rows:,} rows, {order}{HELD if snapshot else ''}"
                bench.heading(title)
                results = bench.compare(data, field, snapshot=snapshot)
                bench.show(results, title)
                ours, large, floor, one_shot, obvious = results.values()
                bench.ratio("program / floor", ours, floor, 1.15)
                bench.ratio("program, batch_size = 20000 / floor", large, floor, 1.15)
                bench.ratio("program / one DELETE", ours, one_shot, 4)
                bench.ratio("obvious loop / program", obvious, ours, least=5)
                if quiet:
                    bench.ratio("program, with / without an old snapshot", ours, quiet, 1.1)
                quiet = ours


def chains(bench: Bench) -> None:
    """Rotation chains: a finished one goes whole, and others stay whole."""
    field = {
        "program": program,
        "one recursive DELETE": contenders.ONE_SHOT_CHAINS,
        "obvious loop, leaf first": contenders.OBVIOUS_CHAINS,
    }
    short, long = (bench.rows(10_000), 50, 3), (400, 2000, 20)
    for number, length, faster in bench.some(short, long):
        for index, name in bench.some(*WALKS.items()):
            with bench.lab.data(rotations(number, length, index=index)) as data:
                title = f"chains: {number:,} of {length:,}, {name}"
                bench.heading(title)
                results = bench.compare(data, field)
                bench.show(results, title)
                ours, one_shot, obvious = results.values()
                if faster == 3:
                    bench.ratio("program / one recursive DELETE", ours, one_shot, 1.1)
                bench.ratio("obvious loop / program", obvious, ours, least=faster)


def growth(bench: Bench) -> None:
    """The time for a row, and memory, do not grow with the table."""
    bench.heading("growth: 70 % of the table goes")
    times, memory = {}, {}
    table, verdicts = [], []
    for index, name in bench.some(*WALKS.items()):
        per_row, peaks = [], []
        for size in bench.sizes:
            with bench.lab.data(requests(size, size * 7 // 10, index=index)) as data:
                result = Result([bench.measure(data, program) for _ in range(bench.runs)], data.to_go)
            per_row.append(result.per_row * 1e6)
            peaks.append(max(run.peak_mb for run in result.runs))
            table.append([f"{size:,} rows, {name}", f"{result.seconds:.3f}", f"{per_row[-1]:.2f}", f"{peaks[-1]:.1f}"])
        times[name] = list(zip(bench.sizes, per_row, strict=True))
        memory[name] = list(zip(bench.sizes, peaks, strict=True))
        verdicts += [
            (f"time for a row, largest / smallest, {name}", per_row[-1] / per_row[0], 1.25),
            (f"MB of memory, most - least, {name}", max(peaks) - min(peaks), 5),
            (f"MB of memory, most, {name}", max(peaks), 60),
        ]
    bench.table(("", "seconds", "us a row", "MB"), table)
    for what, value, most in verdicts:
        bench.target(what, value, most)
    bench.charts += [
        Chart("growth: time for a row", "rows of the table", "microseconds for a row deleted", times, "x"),
        Chart("growth: memory of the program", "rows of the table", "MB at most", memory, "x"),
    ]


def buffers(database: Database, table: str) -> tuple[int, int]:
    """Buffers of the heap and of the indexes that sessions have touched which have ended."""
    heap, indexes = database.execute(
        "SELECT heap_blks_read + heap_blks_hit, idx_blks_read + idx_blks_hit FROM pg_statio_user_tables"
        " WHERE relid = %s::regclass",
        table,
    )[0]
    return heap, indexes


def touched(bench: Bench, data: Data, contender: Contender = program) -> tuple[Measured, int, int]:
    """One run, with the buffers of the heap and of the indexes that it has touched."""
    counts: list[int] = []

    def counted(database: Database, data: Data, limit: float) -> Measured:
        before = buffers(database, data.table)
        measured = contender(database, data, limit)
        bench.lab.settle(database)
        counts.extend(after - was for after, was in zip(buffers(database, data.table), before, strict=True))
        return measured

    return bench.measure(data, counted), counts[0], counts[1]


def idle(bench: Bench) -> None:
    """A night with nothing to do."""
    size, fewer = bench.sizes[-1], bench.rows(min(1_000_000, bench.largest))
    bench.heading(f"idle: {size:,} requests or {fewer:,} refresh sessions, none of them old")
    table: list[list[str]] = []
    verdicts: list[tuple[str, float, float]] = []
    for index, walk in WALKS.items():
        for kind, make in (("requests", requests(size, 0, index=index)), ("sessions", young(fewer, index=index))):
            name = f"{kind}, {walk}"
            with bench.lab.data(make) as data:
                with bench.lab.copy(data) as database:
                    pages = database.value("SELECT pg_relation_size(%s) / 8192", data.table)
                measured, heap, indexes = touched(bench, data)
            table.append([name, f"{pages:,}", f"{heap:,}", f"{indexes:,}", f"{measured.seconds:.3f}"])
            if index:
                verdicts.append((f"buffers, {name}", heap + indexes, 19))
            else:
                verdicts.append((f"buffers / pages of the table, {name}", (heap + indexes) / pages, 1.01))
    bench.table(("", "pages", "heap buffers", "index buffers", "seconds"), table)
    for what, value, most in verdicts:
        bench.target(what, value, most)


def nightly(bench: Bench) -> None:
    """What a night costs depends on what goes, not on what stays."""
    to_go = bench.rows(10_000)
    sizes = bench.sizes[1:] or bench.sizes
    bench.heading(f"nightly: {to_go:,} rows go, index on age")
    table, costs = [], []
    for size in sizes:
        with bench.lab.data(requests(size, to_go)) as data:
            runs = [touched(bench, data) for _ in range(bench.runs)]
        seconds = statistics.median(measured.seconds for measured, _, _ in runs)
        costs.append(statistics.median(heap + indexes for _, heap, indexes in runs))
        table.append([f"{size:,} rows", f"{seconds:.3f}", f"{costs[-1]:,.0f}", f"{costs[-1] / to_go:.2f}"])
    bench.table(("", "seconds", "buffers", "a row deleted"), table)
    bench.target("buffers, largest / smallest table", costs[-1] / costs[0], 1.25)
    curves = {"program": list(zip(sizes, costs, strict=True))}
    bench.charts.append(Chart(f"nightly: {to_go:,} rows go", "rows of the table", "buffers", curves, "x"))
    blocked(bench)


def blocked(bench: Bench) -> None:
    """The old rows of chains in use are looked at once a run, however long the chains and whatever else goes."""
    rows = bench.rows(100_000)
    bench.heading(f"nightly: {rows:,} rows of chains in use, all but the newest of each old")
    table, verdicts = [], []
    for index, name in bench.some(*WALKS.items()):
        for length in bench.some(50, 2000):
            with bench.lab.data(ancestors(rows // length, length, 0, index=index)) as data:
                once = sum(touched(bench, data, client(look))[1:])
            for to_go in (0, rows // 5):
                with bench.lab.data(ancestors(rows // length, length, to_go, index=index)) as data:
                    measured, heap, indexes = touched(bench, data)
                what = f"chains of {length:,}, {to_go:,} others go, {name}"
                table.append([what, f"{measured.seconds:.3f}", f"{heap + indexes:,}", f"{once:,}"])
                if not to_go:
                    verdicts.append(
                        (f"buffers of the run / of one look, chains of {length:,}, {name}", heap + indexes, once)
                    )
    bench.table(("", "seconds", "buffers", "one look"), table)
    for what, run, once in verdicts:
        bench.target(what, run / once, 1.5)


class Watcher:
    """Watches the write-ahead log, the dirtied buffers and the transactions of everybody else in a database."""

    LONGEST = (
        "SELECT COALESCE(max(extract(epoch FROM clock_timestamp() - xact_start)), 0)::float8 FROM pg_stat_activity"
        " WHERE datname = %s AND backend_xid IS NOT NULL"
    )

    def __init__(self, database: Database) -> None:
        self.database = database
        self.longest, self.over = 0.0, threading.Event()
        database.execute(f"ALTER DATABASE {database.name} SET pg_stat_statements.track = 'top'")
        self.before = self.totals()

    def totals(self) -> tuple[int, int, int]:
        with self.database.server.connect() as connection:
            row = connection.execute(
                "SELECT pg_current_wal_insert_lsn() - '0/0', pg_snapshot_xmax(pg_current_snapshot())::text::bigint,"
                " (SELECT COALESCE(sum(shared_blks_dirtied), 0) FROM pg_stat_statements s"
                " JOIN pg_database d ON d.oid = s.dbid WHERE datname = %s)",
                [self.database.name],
            ).fetchone()
        assert row
        return int(row[0]), int(row[1]), int(row[2])

    def sample(self) -> None:
        with self.database.server.connect() as connection:
            while not self.over.wait(0.005):
                row = connection.execute(self.LONGEST, [self.database.name]).fetchone()
                assert row
                self.longest = max(self.longest, row[0])

    def watch(self, contender: Contender) -> Contender:
        def run(database: Database, data: Data, limit: float) -> Measured:
            sampler = threading.Thread(target=self.sample)
            sampler.start()
            try:
                return contender(database, data, limit)
            finally:
                self.over.set()
                sampler.join()

        return run


def wal(bench: Bench) -> None:
    """What is written, and for how long transactions stay open."""
    simple: dict[str, Contender] = {"program": program, "one DELETE": contenders.ONE_SHOT}
    linked: dict[str, Contender] = {"program": program, "one recursive DELETE": contenders.ONE_SHOT_CHAINS}
    rows = bench.rows(500_000)
    worlds: list[tuple[str, Make, dict[str, Contender]]] = [
        (f"{rows:,} requests, in order", requests(rows, rows * 7 // 10), simple),
        (f"{rows:,} requests, shuffled", requests(rows, rows * 7 // 10, shuffled=True), simple),
        (f"{rows // 50:,} chains of 50", rotations(rows // 50, 50, index=True), linked),
    ]
    head = ("", "WAL bytes a row", "dirtied buffers a row", "transactions", "longest, ms")
    for title, make, ways in bench.some(*worlds):
        bench.heading(f"wal: {title}, after a checkpoint")
        table = []
        with bench.lab.data(make) as data:
            for name, contender in ways.items():
                totals = [written(bench, data, contender) for _ in range(bench.runs)]
                log, transactions, dirtied, longest = map(statistics.median, zip(*totals, strict=True))
                table.append([name, f"{log:.0f}", f"{dirtied:.4f}", f"{transactions:.0f}", f"{1000 * longest:.0f}"])
        bench.table(head, table)


def written(bench: Bench, data: Data, contender: Contender) -> tuple[float, ...]:
    """WAL bytes a row, transactions that wrote, buffers dirtied a row, and the longest transaction in seconds."""
    found: list[tuple[float, ...]] = []

    def watched(database: Database, data: Data, limit: float) -> Measured:
        watcher = Watcher(database)
        measured = watcher.watch(contender)(database, data, limit)
        log, transactions, dirtied = (after - was for after, was in zip(watcher.totals(), watcher.before, strict=True))
        rows = max(measured.deleted, 1)
        found.append((log / rows, transactions, dirtied / rows, watcher.longest))
        return measured

    bench.measure(data, watched)
    return found[0]


def together(number: int) -> Contender:
    """So many programs at once: from the first phase that starts to the last that ends."""

    def run(database: Database, data: Data, limit: float) -> Measured:
        with ThreadPoolExecutor(number) as pool:
            parts = list(pool.map(lambda _: program(database, data, limit), range(number)))
        began, deleted = min(part.began for part in parts), sum(part.deleted for part in parts)
        wall = max(part.wall for part in parts)
        return Measured(max(part.ended for part in parts) - began, deleted, wall=wall, began=began)

    return run


def instances(bench: Bench) -> None:
    """Several runs at once on one table are done no later than one alone."""
    rows = bench.rows(min(1_000_000, bench.largest))
    field = {"one": together(1), "two": together(2), "four": together(4)}
    worlds = [
        (f"{rows:,} requests, {name}", requests(rows, rows * 7 // 10, index=index)) for index, name in WALKS.items()
    ]
    worlds.append((f"{rows // 100:,} chains of 50, index on age", rotations(rows // 100, 50, index=True)))
    for title, make in bench.some(*worlds):
        with bench.lab.data(make) as data:
            bench.heading(f"instances: {title}")
            results = bench.compare(data, field)
            bench.table(HEAD, [[name, *result.row()] for name, result in results.items()])
            for name in ("two", "four"):
                bench.ratio(f"{name} / one", results[name], results["one"], 1)


def peers(bench: Bench) -> None:
    """Ways that are met in the wild, on the data of sicr."""
    rows, to_go = bench.rows(500_000), bench.rows(350_000)
    for shuffled, order in bench.some(*ORDERS.items()):
        with bench.lab.data(requests(rows, to_go, shuffled=shuffled)) as data:
            for snapshot in bench.some(False, True):
                title = f"peers: {rows:,} rows, {order}{HELD if snapshot else ''}"
                bench.heading(title)
                bench.show(bench.compare(data, {"program": program, **contenders.PEERS}, snapshot=snapshot), title)


SECTIONS: dict[str, Callable[[Bench], None]] = {
    section.__name__: section for section in (sicr, chains, growth, idle, nightly, wal, instances, peers)
}


@contextlib.contextmanager
def bench_of(options: argparse.Namespace) -> Iterator[Bench]:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    lab = Lab()
    try:
        largest = 1_000_000 if options.tiny else options.largest
        yield Bench(lab, 1 if options.tiny else options.runs, options.limit, largest, options.tiny)
    finally:
        lab.server.remove()


def main(arguments: Sequence[str] | None = None) -> None:
    described = "\n".join(f"  {name:<10} {section.__doc__}" for name, section in SECTIONS.items())
    parser = argparse.ArgumentParser(
        prog="tests/bench/run",
        description="Compare the program with other ways to delete, side by side on a private server whose data is not"
        f" safe (fsync = off). Prints medians; draws curves. TMPDIR=/dev/shm keeps the disk out of it.\n\n{described}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help="default: all")
    parser.add_argument("--runs", type=int, default=5, help="of each contender (5)")
    parser.add_argument("--limit", type=float, default=60, help="seconds after which a contender is ended (60)")
    parser.add_argument("--largest", type=int, default=SIZES[-1], help=f"rows of the largest table ({SIZES[-1]:,})")
    parser.add_argument("--tiny", action="store_true", help="a hundredth of the rows, once: does it work?")
    parser.add_argument("--picture", default=TOP / "dist" / "bench.png", help="a PNG (dist/bench.png), '' for none")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"no such section: {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    if options.picture and not picture.can_draw():
        parser.error(picture.MISSING)
    with bench_of(options) as bench:
        with bench.lab.server.connect() as connection:
            version = connection.info.parameter_status("server_version")
        load = " ".join(f"{number:.2f}" for number in os.getloadavg())
        print(f"PostgreSQL {version}, {os.cpu_count()} cores, load {load}, median of {bench.runs}")
        for name in options.sections or SECTIONS:
            SECTIONS[name](bench)
    if options.picture and bench.charts:
        picture.draw(bench.charts, pathlib.Path(options.picture))
        print(f"\ncurves: {options.picture}")
