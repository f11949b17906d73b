"""What a batch costs does not grow: the buffers that the server counts for early and for late batches of one run.

The server logs the plan of each statement of the job with its buffers (auto_explain); a batch is charged with all
that was read since the batch before it. Time is not measured.
"""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from lab import POLICIES, Database, Program, configuration

ROWS, BATCH, FRONT, HELD = 17_600, 80, 40_000, 10_000
#: A late batch may cost so much more than an early one: pages are not filled evenly, and an index has levels.
GROWTH = 1.5
#: Buffers a row: its index entry and its page, read to choose, to lock and to delete, and a probe for each reference.
PER_ROW = 15

OLD = "interval '200 days'"
SESSIONS = "identity.refresh_sessions"


@dataclass(frozen=True)
class Target:
    """A table to purge; `first` and `last` are ages at the ends of what its policy matches."""

    table: str
    column: str
    policy: str
    insert: str

    def fill(self, database: Database, rows: int, *, status: str = "Rotated", ages: str = "i", start: int = 0) -> None:
        """Add rows `start` … in the order of their age, one second apart, unless `ages` says otherwise."""
        database.execute(
            f"INSERT INTO {self.table} ({self.column}, {self.insert})"
            f" SELECT now() - {OLD} + {ages} * interval '1 second', '{status}'"
            f" FROM generate_series({start + 1}, {start + rows}) i"
        )

    def index(self, database: Database, wanted: bool) -> None:
        """Have an index on the age column, or none."""
        database.execute("DROP INDEX IF EXISTS ix_refresh_tokens_expires_at")
        if wanted:
            database.execute(f"CREATE INDEX ON {self.table} ({self.column})")


CHAINED = Target(SESSIONS, "updated_at", "refresh", "status")
PLAIN = Target("refresh_tokens", "expires_at", "tokens_expired", "user_agent")


def plan_buffers(log: str) -> Iterator[tuple[str, int]]:
    """The statements in a server log and the buffers that each touched, in order."""
    for entry in re.findall(r"^.*? LOG:  duration: [\d.]+ ms  plan:\n((?:\t.*\n)+)", log, re.MULTILINE):
        found = json.loads(entry)
        plan = found["Plan"]
        counted = ("Shared Hit Blocks", "Shared Read Blocks", "Temp Read Blocks", "Local Hit Blocks")
        yield found["Query Text"], sum(plan.get(name, 0) for name in counted)


def batch_costs(log: str) -> list[int]:
    """The buffers of each batch, with whatever was read between it and the one before."""
    costs, running = [], 0
    for statement, buffers in plan_buffers(log):
        running += buffers
        if "DELETE FROM" in statement:
            costs.append(running)
            running = 0
    return costs


@pytest.fixture
def explained(systems: Database) -> Database:
    """The three systems in a database where the server logs the plan of each statement of the job."""
    for setting, value in {
        "session_preload_libraries": "auto_explain",
        "auto_explain.log_min_duration": "0",
        "auto_explain.log_analyze": "on",
        "auto_explain.log_buffers": "on",
        "auto_explain.log_timing": "off",
        "auto_explain.log_format": "json",
    }.items():
        systems.execute(f"ALTER ROLE retention IN DATABASE {systems.name} SET {setting} = '{value}'")
    return systems


def assert_constant(database: Database, program: Program, target: Target, *, blocked: int = 0) -> None:
    """Purge, and compare the batches of the run with each other and with what so many rows may cost."""
    policies = {target.policy: POLICIES[target.policy]}
    config = configuration(database.conninfo, policies, batch_size=BATCH, max_run_duration="6h")
    offset = database.server.log.stat().st_size
    result = program.inside(config, "--once", "--json")
    with database.server.log.open() as log:
        log.seek(offset)
        costs = batch_costs(log.read())
    counts = result.policies[target.policy]
    assert (result.returncode, counts["deleted"], counts["blocked"]) == (0, ROWS, blocked), result.stderr[-2000:]
    assert len(costs) >= ROWS // BATCH
    working = [cost for cost in costs if cost >= BATCH]  # and not only passing over rows of no concern
    assert len(working) >= ROWS // BATCH, "the server's counters do not show the work"
    early, late = statistics.median(working[2:22]), statistics.median(working[-20:])
    dearest = max(costs[len(costs) // 2 :])
    assert late <= GROWTH * early, f"{early} buffers early, {late} late: {costs}"
    assert late <= PER_ROW * BATCH, f"{late} buffers for {BATCH} rows"
    assert dearest <= 2 * PER_ROW * BATCH, f"{dearest} buffers for one late batch"
    most = PER_ROW * (ROWS + database.count(target.table))
    assert sum(costs) <= most, f"{sum(costs)} buffers in all, {most} allowed"


Prepare = Callable[[Database, Target], None]


def plain(database: Database, target: Target) -> None:
    target.fill(database, ROWS)


def hold_snapshot(database: Database) -> None:
    other = database.connect(autocommit=False)
    other.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    other.execute("SELECT 1")


def old_snapshot(database: Database, target: Target) -> None:
    """A dump or a forgotten transaction elsewhere: nothing that dies can be forgotten."""
    target.fill(database, ROWS)
    hold_snapshot(database)


def one_timestamp(database: Database, target: Target) -> None:
    """A migration wrote everything at one instant."""
    target.fill(database, ROWS, ages="1")


def emptied_front(database: Database, target: Target) -> None:
    """The greater part of heap and index, in front, is dead rows that no vacuum has removed nor may remove."""
    target.fill(database, FRONT // 2)
    hold_snapshot(database)
    database.execute(f"DELETE FROM {target.table}")
    target.fill(database, ROWS, start=FRONT // 2)


def yesterdays_statistics(database: Database, target: Target) -> None:
    """Analysed when it was small and nothing matched, so that an index on `status` seems to lead to nearly no row."""
    database.execute(f"CREATE INDEX ON {target.table} ({target.insert})")
    database.execute(f"ALTER TABLE {target.table} ALTER user_agent SET DEFAULT repeat('x', 300)")
    target.fill(database, 500, status="Active")
    database.execute(f"ANALYZE {target.table}")
    target.fill(database, ROWS)


def rows_of_no_concern(database: Database, target: Target) -> None:
    """Old rows that the allow-list leaves alone, before and after what goes, all of them scattered over the heap."""
    database.execute(
        f"INSERT INTO {target.table} ({target.column}, {target.insert})"
        f" SELECT now() - {OLD} + i * interval '1 second',"
        f" CASE WHEN i BETWEEN {FRONT // 2 + 1} AND {FRONT // 2 + ROWS} THEN 'Rotated' ELSE 'Active' END"
        f" FROM generate_series(1, {FRONT + ROWS}) i ORDER BY md5(i::text)"
    )


def blocked_rows(database: Database, target: Target) -> None:
    """Old terminal parents of live children, before and after what goes."""
    target.fill(database, HELD // 2)
    target.fill(database, HELD // 2, start=HELD // 2 + ROWS)
    database.execute(
        "SET session_replication_role = replica;"
        f"INSERT INTO {target.table} (parent_session_id, status, updated_at) SELECT id, 'Active', now()"
        f" FROM {target.table}; SET session_replication_role = origin"
    )
    target.fill(database, ROWS, start=HELD // 2)


SCENARIOS: list[tuple[Target, Prepare, bool]] = [
    (CHAINED, one_timestamp, True),
    (CHAINED, emptied_front, True),
    (CHAINED, emptied_front, False),
    (CHAINED, yesterdays_statistics, True),
    (CHAINED, yesterdays_statistics, False),
    (CHAINED, rows_of_no_concern, True),
    (CHAINED, rows_of_no_concern, False),
    (CHAINED, blocked_rows, True),
    (CHAINED, blocked_rows, False),
    (PLAIN, one_timestamp, True),
    (PLAIN, emptied_front, True),
    (PLAIN, emptied_front, False),
]
#: What is easier than an emptied front, which has a snapshot as well, or what is all the same to a walk by pages.
EASIER = [(t, p, i) for t in (CHAINED, PLAIN) for p in (plain, old_snapshot) for i in (True, False)]
EASIER += [(t, one_timestamp, False) for t in (CHAINED, PLAIN)]
if "RETENTION_SOAK_PACKAGE" in os.environ:
    SCENARIOS += EASIER


@pytest.mark.parametrize(
    ("target", "prepare", "indexed"),
    SCENARIOS,
    ids=[f"{t.policy}, {p.__name__.replace('_', ' ')}, {'index' if i else 'no index'}" for t, p, i in SCENARIOS],
)
def test_a_late_batch_reads_no_more_than_an_early_one(
    target: Target, prepare: Prepare, indexed: bool, explained: Database, program: Program
) -> None:
    """In each of these conditions, with either walk, more than 200 batches cost the same, and not much."""
    target.index(explained, indexed)
    prepare(explained, target)
    assert_constant(explained, program, target, blocked=HELD if prepare is blocked_rows else 0)


@pytest.mark.parametrize(("gone", "by_pages"), [(25_000, True), (12_000, False)])
def test_a_heap_in_no_order_is_read_page_by_page_where_most_of_it_goes(
    gone: int, by_pages: bool, explained: Database, program: Program
) -> None:
    """From the first batch on: where the planner, asked for all that goes, would read the table."""
    explained.execute(
        "INSERT INTO refresh_tokens (expires_at, user_agent)"
        f" SELECT now() + (i - {gone} - 0.5) * interval '1 hour', repeat('x', 100)"
        f" FROM generate_series(1, {30_000 if by_pages else 300_000}) i ORDER BY md5(i::text)"
    )
    explained.execute("VACUUM ANALYZE refresh_tokens")
    offset = explained.server.log.stat().st_size
    policies = {"tokens_expired": POLICIES["tokens_expired"]}
    config = configuration(explained.conninfo, policies, batch_size=5_000)
    result = program.inside(config, "--once", "--json")
    assert result.policies["tokens_expired"]["deleted"] == gone
    with explained.server.log.open() as log:
        log.seek(offset)
        assert ('"Node Type": "Tid Range Scan"' in log.read()) is by_pages
