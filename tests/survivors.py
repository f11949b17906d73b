"""Random rows for the three systems, put on a real server and compared with the model after a dry run and a run.

Times are drawn as seconds from now and never closer than half an hour to a cutoff: what happens exactly on it has a
test of its own, which takes the cutoff from the run.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import model
from hypothesis import strategies as st
from lab import POLICIES, SYSTEMS, Database, Program, configuration

#: How the self reference may be declared, and whether the age column has an index.
REFERENCES = ("RESTRICT", "NO ACTION", "DEFERRED", "NONE")
TABLES = {
    "requests": "identity.sign_in_confirmation_requests",
    "sessions": "identity.refresh_sessions",
    "tokens": "refresh_tokens",
}
HOUR = 3_600.0
#: The policies of the three systems, and one more for a table that has one already, with a rule that overlaps.
RULES = {
    **POLICIES,
    "rotated": {**POLICIES["refresh"], "retention": "60d", "only": {"status": ["Rotated"]}},
}
NOWHERE = 100_000  # ids from here on are names of no row


@dataclass(frozen=True)
class Case:
    """One example: the rows, in the order in which they reach the heap, and how the program meets them."""

    rows: model.Rows
    indexed: bool
    references: str
    named: bool
    batch_size: int
    policies: tuple[str, ...]
    wide: bool
    partitioned: bool

    @property
    def variant(self) -> tuple[bool, str, bool]:
        """How the tables are declared for it."""
        return self.indexed, self.references, self.partitioned


def times(*edges: float) -> st.SearchStrategy[float | None]:
    """Ages around the edges (in days), with NULL, infinities, ties, and whole hours and a half in between."""
    near = [-edge * model.DAY + side * HOUR for edge in edges for side in (-1, 1)]
    fixed: list[float | None] = [None, math.inf, -math.inf, -20_000 * model.DAY, -400 * model.DAY, 5 * model.DAY, *near]
    hours = st.integers(-24 * 2 * int(max(edges) + 1), 24).map(lambda h: (h + 0.5) * HOUR)
    return st.one_of(st.sampled_from(fixed), st.sampled_from(near), hours)


def statuses(*more: str | None) -> st.SearchStrategy[str | None]:
    return st.sampled_from([*model.TERMINAL, *model.TERMINAL, *more])


@st.composite
def chains(draw: st.DrawFn, first: int, *, dangling: bool, cycles: bool) -> list[model.Session]:
    """A chain of rotations with ids from `first` on; row by row it gets younger, unless its ages are out of order."""
    length = draw(st.one_of(st.just(1), st.integers(1, 6), st.integers(7, 40)))
    shape = draw(st.sampled_from(["line", "line", "tree", "apart"]))
    finished = draw(st.booleans())
    old = st.integers(91 * 24, 300 * 24).map(lambda h: -(h + 0.5) * HOUR)
    time = old if finished else st.one_of(old, times(60, 90))
    ages: list[float | None] = [draw(time) for _ in range(length)]
    if draw(st.booleans()):
        ages.sort(key=lambda age: -math.inf if age is None else age)
    if draw(st.booleans()):
        ages = [draw(st.sampled_from(ages))] * length
    status = statuses() if finished else statuses("Active", None)
    states = [draw(status) for _ in range(length)]
    tail = draw(st.sampled_from(["as drawn", "as drawn", "live", "young"]))
    if tail == "live":
        states[-1] = "Active"
    elif tail == "young":
        ages[-1] = -10 * model.DAY
    parents: list[int | None] = [None] * length
    for child in range(1, length):
        if shape == "line":
            parents[child] = first + child - 1
        elif shape == "tree":
            parents[child] = draw(st.one_of(st.none(), st.integers(0, child - 1).map(lambda p: first + p)))
    if draw(st.booleans()):  # the older row names the newer: the same shape read backwards
        parents = [None if p is None else first + length - 1 - (p - first) for p in reversed(parents)]
    if cycles and draw(st.booleans()):
        one, other = draw(st.integers(0, length - 1)), draw(st.integers(0, length - 1))
        parents[one], parents[other] = first + other, first + one
    elif draw(st.integers(0, 4)) == 0:
        itself = draw(st.integers(0, length - 1))
        parents[itself] = first + itself
    if dangling and draw(st.booleans()):
        parents[draw(st.integers(0, length - 1))] = NOWHERE + first
    return [model.Session(first + i, states[i], ages[i], parents[i]) for i in range(length)]


@st.composite
def cases(draw: st.DrawFn, largest: int = 4) -> Case:
    """`largest` is the number of chains at most."""
    references = draw(st.sampled_from(REFERENCES))
    batch_size = draw(st.one_of(st.integers(1, 7), st.just(1_000)))
    wide = draw(st.booleans())
    # A cycle goes in one transaction or not at all: it is drawn only where one batch is sure to hold the whole table.
    cycles = batch_size == 1_000 and not wide
    sessions: list[model.Session] = []
    for _ in range(draw(st.integers(0, largest))):
        sessions += draw(chains(len(sessions), dangling=references == "NONE", cycles=cycles))
    order = draw(st.sampled_from(["written in order", "backwards", "shuffled"]))
    if order == "backwards":
        sessions.reverse()
    elif order == "shuffled":
        random.Random(draw(st.integers(0, 999))).shuffle(sessions)
    sicr_states = st.sampled_from(["Pending", "Confirmed", "Expired", "Exhausted", "Superseded", None])
    requests = draw(st.lists(st.tuples(sicr_states, times(30)), max_size=15))
    tokens = draw(st.lists(st.tuples(st.sampled_from([True, False, None]), times(0, 1)), max_size=15))
    return Case(
        rows=model.Rows(
            [model.Request(i, *row) for i, row in enumerate(requests)],
            sessions,
            [model.Token(i, *row) for i, row in enumerate(tokens)],
        ),
        indexed=draw(st.booleans()),
        references=references,
        named=references == "NONE" or draw(st.booleans()),
        batch_size=batch_size,
        policies=tuple(draw(st.one_of(st.permutations(list(POLICIES)), st.permutations(list(RULES))))),
        wide=wide,
        partitioned=draw(st.booleans()),
    )


def prepare(database: Database, variant: tuple[bool, str, bool]) -> Database:
    """Create the three systems in one of their variants."""
    (indexed, references, partitioned), systems = variant, SYSTEMS.read_text()
    database.execute(re.sub(r"^\);", ") PARTITION BY HASH (id);", systems, flags=re.M) if partitioned else systems)
    for number, table in itertools.product(range(3), TABLES.values() if partitioned else ()):
        bounds = f"FOR VALUES WITH (MODULUS 3, REMAINDER {number})"
        database.execute(
            f"CREATE TABLE {table}_{number} PARTITION OF {table} {bounds}; GRANT SELECT (id) ON {table} TO retention"
        )
    if indexed:
        database.execute("CREATE INDEX ON identity.refresh_sessions (updated_at)")
    if references != "RESTRICT":
        database.execute(
            "ALTER TABLE identity.refresh_sessions DROP CONSTRAINT refresh_sessions_parent_session_id_fkey"
        )
        if references != "NONE":
            deferred = "DEFERRABLE INITIALLY DEFERRED" if references == "DEFERRED" else ""
            database.execute(
                "ALTER TABLE identity.refresh_sessions ADD FOREIGN KEY (parent_session_id)"
                f" REFERENCES identity.refresh_sessions {deferred}"
            )
    return database


def uuid(number: int) -> UUID:
    """Keys in no order that has to do with age or place, as a service makes them."""
    return UUID(int=(number + 1) * 0x9E3779B97F4A7C15F39CC0605CEDC835 % 2**128)


def fill(database: Database, rows: model.Rows, *, wide: bool) -> None:
    """Replace the rows; wide ones spread over many pages."""
    database.execute(f"TRUNCATE {', '.join(TABLES.values())}")
    agent = "x" * 1_500 if wide else "x"
    stamp = "now() + make_interval(secs => CASE WHEN abs(age) < 'inf' THEN age END)"
    when = f"CASE age WHEN 'inf' THEN 'infinity' WHEN '-inf' THEN '-infinity' ELSE {stamp} END"
    database.execute(
        "INSERT INTO identity.sign_in_confirmation_requests (id, status, created_at, phone_number, user_agent)"
        f" SELECT id, status, {when}, '+70000000000', %s"
        " FROM unnest(%s::uuid[], %s::text[], %s::float8[]) r (id, status, age)",
        agent,
        [uuid(r.id) for r in rows.requests],
        [r.status for r in rows.requests],
        [r.created_at for r in rows.requests],
    )
    database.execute(
        "INSERT INTO identity.refresh_sessions (id, status, updated_at, parent_session_id, user_agent)"
        f" SELECT id, status, {when}, parent, %s"
        " FROM unnest(%s::uuid[], %s::text[], %s::float8[], %s::uuid[]) r (id, status, age, parent)",
        agent,
        [uuid(s.id) for s in rows.sessions],
        [s.status for s in rows.sessions],
        [s.updated_at for s in rows.sessions],
        [None if s.parent is None else uuid(s.parent) for s in rows.sessions],
    )
    database.execute(
        "INSERT INTO refresh_tokens (id, is_revoked, expires_at, user_agent)"
        f" SELECT id, is_revoked, {when}, %s"
        " FROM unnest(%s::bigint[], %s::bool[], %s::float8[]) r (id, is_revoked, age)",
        agent,
        [t.id for t in rows.tokens],
        [t.is_revoked for t in rows.tokens],
        [t.expires_at for t in rows.tokens],
    )


def contents(database: Database) -> dict[str, dict[Any, str]]:
    """Every row of the three systems as text, by its key."""
    return {name: dict(database.execute(f"SELECT id, t::text FROM {table} t")) for name, table in TABLES.items()}


def observe(database: Database, program: Program, case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    """Put the case on the server, run dry and for good; return what was seen and what the model says."""
    fill(database, case.rows, wide=case.wide)
    before = contents(database)
    policies = {name: dict(RULES[name]) for name in case.policies}
    if not case.named:
        for policy in policies.values():
            policy.pop("parent_column", None)
    config = configuration(database.conninfo, policies, batch_size=case.batch_size)
    dry = program.inside(config, "--dry-run", "--json")
    run = program.inside(None, "--once", "--json")
    expected = model.outcome(case.rows, 0.0, case.policies)
    keys: dict[str, set[UUID] | set[int]] = {
        "requests": {uuid(number) for number in expected.requests},
        "sessions": {uuid(number) for number in expected.sessions},
        "tokens": expected.tokens,
    }
    seen = {
        "status": (dry.returncode, run.returncode),
        "rows": contents(database),
        "counts": {n: (p["deleted"], p["backlog"], p["blocked"]) for n, p in run.policies.items()},
        "dry": {n: (p["would_delete"], p["backlog"], p["blocked"]) for n, p in dry.policies.items()},
        "rest": {(p["undeletable"], p["stop_reason"], p["error"]) for p in run.policies.values()},
    }
    counts = {n: (c.deleted, c.backlog, c.blocked) for n, c in expected.counts.items()}
    foreseen = {
        "status": (0, 0),
        "rows": {name: {key: before[name][key] for key in left} for name, left in keys.items()},
        "counts": counts,
        "dry": counts,
        "rest": {(0, "drained", None)},
    }
    return seen, foreseen
