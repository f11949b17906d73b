"""The ways to delete that are compared: the program as its users run it, and statements as people write them."""

from __future__ import annotations

import contextlib
import pathlib
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import psycopg
from bench.data import Data
from lab import POLICIES, Database, Line, Program, configuration

BATCH = 5000
Connection = psycopg.Connection[Any]


@dataclass
class Measured:
    """One run: how long it took, what had gone by when, and whether it was ended at the limit.

    `wall` and `peak_mb` are those of the program's process, `cpu` the seconds that the server computed for it.
    """

    seconds: float
    deleted: int
    capped: bool = False
    progress: list[tuple[float, int]] = field(default_factory=list)
    wall: float = 0.0
    peak_mb: float = 0.0
    began: float = 0.0
    cpu: float = 0.0

    @property
    def ended(self) -> float:
        return self.began + self.seconds


#: Deletes what is old in a copy of the data, within a limit of seconds.
Contender = Callable[[Database, Data, float], Measured]


def program(database: Database, data: Data, limit: float, **options: Any) -> Measured:
    """The program in a process of its own: the time of its phase as its log tells it, and the wall time of all.

    `options` are those of its section [run].
    """
    config = configuration(database.conninfo, {data.policy: POLICIES[data.policy]}, max_run_duration="6h", **options)
    progress, deleted, started, phase = [(0.0, 0)], 0, 0.0, None
    peak, log = [0.0], []
    with tempfile.TemporaryDirectory() as directory:
        runner = Program(pathlib.Path(directory))
        begin = time.perf_counter()
        process = runner.start(config, "--once", "--json")
        threading.Thread(target=watch, args=(process.pid, peak)).start()
        end = threading.Timer(limit, process.terminate)  # it ends after the batch in flight
        end.start()
        try:
            assert process.stderr
            for text in process.stderr:
                log.append(text)
                now, line = time.perf_counter(), Line.parse(text.rstrip("\n"))
                if line.event == "phase_started":
                    started = now
                elif line.event == "batch_deleted":
                    deleted += int(line.fields["deletedCount"])
                    progress.append((now - started, deleted))
                elif line.event == "phase_completed":
                    phase = line
            process.communicate()
        finally:
            end.cancel()
            runner.kill()
        wall = time.perf_counter() - begin
    if process.returncode != 0 or phase is None:
        raise RuntimeError("".join(log[-20:]))
    seconds, capped = int(phase.fields["durationMs"]) / 1000, phase.fields["stopReason"] == "signal"
    return Measured(seconds, int(phase.fields["deletedCount"]), capped, progress, wall, peak[0], started)


def watch(process: int, peak: list[float]) -> None:
    """The greatest memory that a process has had, in MB, until it ends: the kernel keeps it, and forgets it then."""
    with contextlib.suppress(OSError):
        while found := re.search(r"VmHWM:\s+(\d+) kB", pathlib.Path(f"/proc/{process}/status").read_text()):
            peak[0] = int(found[1]) / 1024
            time.sleep(0.02)


def client(work: Callable[[Connection, Data], Iterator[int]]) -> Contender:
    """A client whose work says after each transaction how many rows went in it. JIT compilation would slow it down."""

    def run(database: Database, data: Data, limit: float) -> Measured:
        with database.server.connect(database.name) as connection:
            connection.execute(f"SET jit = off; SET statement_timeout = {round(limit * 1000)}")
            begin, deleted, progress = time.perf_counter(), 0, [(0.0, 0)]
            capped = False
            try:
                for count in work(connection, data):
                    deleted += count
                    progress.append((time.perf_counter() - begin, deleted))
                    capped = progress[-1][0] > limit and deleted < data.to_go
                    if capped:
                        break
            except psycopg.errors.QueryCanceled:
                capped = True
            return Measured(time.perf_counter() - begin, deleted, capped, progress, began=begin)

    return run


def statement(text: str) -> Contender:
    """One statement for everything."""

    def work(connection: Connection, data: Data) -> Iterator[int]:
        yield connection.execute(text.format(**vars(data), batch=BATCH)).rowcount

    return client(work)


def loop(text: str, *, least: int = BATCH, before: str = "") -> Contender:
    """The same statement again, until fewer rows go than the least; perhaps another before each."""

    def work(connection: Connection, data: Data) -> Iterator[int]:
        names = {**vars(data), "batch": BATCH}
        count = least
        while count >= least:
            if before:
                connection.execute(before.format(**names)).fetchall()
            count = connection.execute(text.format(**names)).rowcount
            yield count

    return client(work)


def fetched(delete: Callable[[psycopg.Cursor[Any], str, list[Any]], None]) -> Contender:
    """A list of keys goes to the client, which deletes these, in one transaction for each list."""

    def work(connection: Connection, data: Data) -> Iterator[int]:
        select = f"SELECT id FROM {data.table} WHERE {data.old} ORDER BY {data.age} LIMIT {BATCH}"
        count = BATCH
        while count >= BATCH:
            with connection.transaction(), connection.cursor() as cursor:
                ids = [key for (key,) in cursor.execute(select)]
                delete(cursor, data.table, ids)
                count = cursor.rowcount
            yield count

    return client(work)


def by_list(cursor: psycopg.Cursor[Any], table: str, ids: list[Any]) -> None:
    cursor.execute(f"DELETE FROM {table} WHERE id = ANY (%s)", [ids])


def one_by_one(cursor: psycopg.Cursor[Any], table: str, ids: list[Any]) -> None:
    cursor.executemany(f"DELETE FROM {table} WHERE id = %s", [(key,) for key in ids])


#: All rows claimed and deleted at once: what claiming rows costs at least.
FLOOR = statement(
    "WITH claim AS MATERIALIZED (SELECT ctid AS tid FROM {table} WHERE {old} FOR UPDATE SKIP LOCKED)"
    " DELETE FROM {table} WHERE ctid = ANY (ARRAY (SELECT tid FROM claim))"
)
ONE_SHOT = statement("DELETE FROM {table} WHERE {old}")
OBVIOUS = loop(
    "DELETE FROM {table} WHERE id IN (SELECT id FROM {table} WHERE {old} ORDER BY {age} LIMIT {batch}"
    " FOR UPDATE SKIP LOCKED)"
)

#: What a row that stays refers to, and what that refers to in turn, is kept.
ONE_SHOT_CHAINS = statement(
    "WITH RECURSIVE held AS (SELECT parent_session_id AS id FROM {table}"
    " WHERE NOT ({old}) AND parent_session_id IS NOT NULL"
    " UNION SELECT t.parent_session_id FROM held JOIN {table} t USING (id) WHERE t.parent_session_id IS NOT NULL)"
    " DELETE FROM {table} t WHERE {old} AND NOT EXISTS (SELECT FROM held WHERE held.id = t.id)"
)
#: Leaf first, and until nothing is left: a batch may be short because few rows are leaves just now.
OBVIOUS_CHAINS = loop(
    "DELETE FROM {table} WHERE id IN (SELECT id FROM {table} t WHERE {old}"
    " AND NOT EXISTS (SELECT FROM {table} child WHERE child.parent_session_id = t.id)"
    " ORDER BY {age} LIMIT {batch} FOR UPDATE SKIP LOCKED)",
    least=1,
)


def look(connection: Connection, data: Data) -> Iterator[int]:
    """Nothing is deleted: whoever wants to know which old rows are referred to has to touch so much."""
    connection.execute(
        "SELECT count(children) FROM (SELECT (SELECT count(*) FROM (SELECT FROM {table} child"
        " WHERE child.parent_session_id = t.id LIMIT 1) c) AS children FROM {table} t WHERE {old} OFFSET 0) x".format(
            **vars(data)
        )
    ).fetchall()
    yield 0


UNORDERED = "DELETE FROM {table} WHERE ctid IN (SELECT ctid FROM {table} WHERE {old} LIMIT {batch})"
#: By the pattern of what others run; the statements are ours.
PEERS: dict[str, Contender] = {
    "LIMIT without order": loop(UNORDERED),
    "IN (subselect), ordered": loop(
        "DELETE FROM {table} WHERE id IN (SELECT id FROM {table} WHERE {old} ORDER BY {age} LIMIT {batch})"
    ),
    "count before each batch": loop(UNORDERED, before="SELECT count(*) FROM {table} WHERE {old}"),
    "list of keys to the client": fetched(by_list),
    "rows one by one": fetched(one_by_one),
}
