"""Long rotation chains for tests and measurements: an hourly rotation for months on end, most of them finished."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lab import Database

TABLE = "identity.refresh_sessions"
KINDS = ("finished", "finished", "finished", "live", "dormant", "finished", "finished", "young", "finished", "middle")


@dataclass(frozen=True)
class Fate:
    """What a run must do with the rows there are: ids that go, ids that a staying row keeps, ids of no concern."""

    finished: set[Any]
    blocked: set[Any]
    others: set[Any]

    @property
    def staying(self) -> set[Any]:
        return self.blocked | self.others


def fate(database: Database) -> Fate:
    """Follow the references from every row outside the predicate; what they reach is blocked."""
    rows = database.execute(
        "SELECT id, parent_session_id, (status IN ('Rotated', 'Revoked', 'Expired')"
        f" AND updated_at < now() - interval '90 days') IS TRUE FROM {TABLE}"
    )
    names = {key: parent for key, parent, _ in rows}
    matching = {key for key, _, matches in rows if matches}
    others = names.keys() - matching
    blocked: set[Any] = set()
    for key in others:
        while (key := names[key]) in matching and key not in blocked:
            blocked.add(key)
    return Fate(matching - blocked, blocked, others)


def load(
    database: Database,
    number: int,
    length: int,
    *,
    forward: bool = False,
    branches: int = 1,
    order: str = "made.updated_at",
) -> Fate:
    """Load chains of the kinds in turn, into the heap in the given order.

    finished: all of it terminal and old · live: in use now, its older half past retention · dormant: Active at its
    end, and everything old · young: its end revoked ten days ago, all before it old · middle: finished, but for one
    session in its middle that was terminated ten days ago. `forward`: the older row names the newer, instead of the
    child its parent. `branches`: how many children a session has.
    """
    before = f"place / {branches}" if branches > 1 else "place - 1"
    reference = "named.before = made.place" if forward else "named.place = made.before"
    database.execute(
        f"""
        SET session_replication_role = replica;
        CREATE TEMPORARY TABLE made AS
        SELECT chain, place, {before} AS before, gen_random_uuid() AS id,
            CASE WHEN place < {length} THEN 'Rotated' WHEN kind IN ('live', 'dormant') THEN 'Active'
            ELSE (ARRAY['Revoked', 'Expired', 'Rotated'])[1 + chain % 3] END AS status,
            now() - chain * interval '7 minutes' - CASE
                WHEN (kind, place) IN (('young', {length}), ('middle', {length // 2})) THEN interval '10 days'
                WHEN kind = 'live' THEN interval '181 days' * ({length} - place) / {length}
                ELSE interval '91 days' + interval '1 hour' * ({length} - place) END AS updated_at
        FROM (SELECT chain, (ARRAY{list(KINDS)})[1 + chain % {len(KINDS)}] AS kind
            FROM generate_series(0, {number - 1}) chain) c, generate_series(1, {length}) place;
        INSERT INTO {TABLE} (id, parent_session_id, status, updated_at)
        SELECT made.id, named.id, made.status, made.updated_at
        FROM made LEFT JOIN made named ON named.chain = made.chain AND {reference}
        ORDER BY {order};
        DROP TABLE made;
        SET session_replication_role = origin;
        ANALYZE {TABLE}
        """
    )
    return fate(database)
