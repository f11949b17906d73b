"""Long rotation chains: everything finished goes in one run, everything that a staying session needs is left whole."""

from __future__ import annotations

import pytest
from chains import TABLE, Fate, load
from lab import POLICIES, Database, Program, configuration

REFRESH = {"refresh": POLICIES["refresh"]}
UNCHANGED = f"SELECT id, md5(s::text) FROM {TABLE} s"


def purge_and_compare(database: Database, program: Program, fate: Fate, batch_size: int) -> None:
    """Run once; exactly the finished rows are gone, the others are as they were, and the counts say so."""
    before = dict(database.execute(UNCHANGED))
    assert fate.finished
    assert fate.blocked
    result = program.inside(configuration(database.conninfo, REFRESH, batch_size=batch_size), "--once", "--json")
    assert result.returncode == 0, result.stderr
    refresh = result.policies["refresh"]
    assert (refresh["deleted"], refresh["backlog"]) == (len(fate.finished), len(fate.blocked))
    assert (refresh["blocked"], refresh["undeletable"], refresh["stop_reason"]) == (len(fate.blocked), 0, "drained")
    after = dict(database.execute(UNCHANGED))
    assert after.keys() == fate.staying
    assert after.items() <= before.items()


@pytest.mark.parametrize(
    ("indexed", "forward", "batch_size"),
    [
        pytest.param(True, False, 777, id="odd batch, index, child names parent"),
        pytest.param(True, True, 5000, id="index, older names newer"),
        pytest.param(False, False, 5000, id="no index, child names parent"),
        pytest.param(False, True, 777, id="odd batch, no index, older names newer"),
    ],
)
def test_finished_chains_of_2000_go_in_one_run(
    indexed: bool, forward: bool, batch_size: int, systems: Database, program: Program
) -> None:
    """Ten chains of 2,000: the finished ones go whole, those with a live or young member stay whole and are blocked."""
    if indexed:
        systems.execute(f"CREATE INDEX ON {TABLE} (updated_at)")
    purge_and_compare(systems, program, load(systems, 10, 2000, forward=forward), batch_size)


@pytest.mark.parametrize("indexed", [True, False], ids=["index", "no index"])
@pytest.mark.parametrize("order", ["made.id", "made.chain, made.updated_at", "made.updated_at DESC"])
def test_the_place_in_the_heap_does_not_matter(order: str, indexed: bool, systems: Database, program: Program) -> None:
    """Shuffled by updates, one chain after the other or newest first in the heap: it is still one run."""
    if indexed:
        systems.execute(f"CREATE INDEX ON {TABLE} (updated_at)")
    purge_and_compare(systems, program, load(systems, 20, 300, order=order), 500)


@pytest.mark.parametrize("forward", [False, True], ids=["child names parent", "older names newer"])
@pytest.mark.parametrize("indexed", [True, False], ids=["index", "no index"])
def test_ages_out_of_order_do_not_matter(indexed: bool, forward: bool, systems: Database, program: Program) -> None:
    """Where the clocks of the services disagreed, ages along a chain go up and down: it is still one run."""
    if indexed:
        systems.execute(f"CREATE INDEX ON {TABLE} (updated_at)")
    fate = load(systems, 20, 200, forward=forward)
    systems.execute(
        f"UPDATE {TABLE} SET updated_at = now() - interval '100 days' - random() * interval '9 days'"
        " WHERE updated_at < now() - interval '90 days'"
    )
    purge_and_compare(systems, program, fate, 300)


@pytest.mark.parametrize("indexed", [True, False], ids=["index", "no index"])
def test_a_chain_written_at_one_instant_goes_in_one_run(indexed: bool, systems: Database, program: Program) -> None:
    """A migration gave all rows one timestamp: age says nothing about the order in a chain any more."""
    if indexed:
        systems.execute(f"CREATE INDEX ON {TABLE} (updated_at)")
    fate = load(systems, 20, 200, order="made.id")
    systems.execute(
        f"UPDATE {TABLE} SET updated_at = date_trunc('day', now()) - interval '100 days'"
        " WHERE updated_at < now() - interval '90 days'"
    )
    purge_and_compare(systems, program, fate, 300)


@pytest.mark.parametrize("indexed", [True, False], ids=["index", "no index"])
def test_branching_chains_lose_their_finished_branches(indexed: bool, systems: Database, program: Program) -> None:
    """Sessions with three children each: what lies between the root and a staying one stays, the other branches go."""
    if indexed:
        systems.execute(f"CREATE INDEX ON {TABLE} (updated_at)")
    purge_and_compare(systems, program, load(systems, 20, 1000, branches=3), 777)


@pytest.mark.parametrize(("batch_size", "deleted"), [(1000, 1000), (50, 998)], ids=["one batch", "two batches"])
@pytest.mark.parametrize("indexed", [True, False], ids=["index", "no index"])
def test_sessions_that_name_each_other_go_in_one_batch_or_stay(
    indexed: bool, batch_size: int, deleted: int, systems: Database, program: Program
) -> None:
    """A cycle can only go at once; members too far apart for one batch are blocked by each other."""
    if indexed:
        systems.execute(f"CREATE INDEX ON {TABLE} (updated_at)")
    systems.execute(
        f"INSERT INTO {TABLE} (id, parent_session_id, status, updated_at) SELECT md5(i::text)::uuid,"
        " CASE i WHEN 1 THEN md5('1000')::uuid WHEN 1000 THEN md5('1')::uuid END, 'Revoked',"
        " now() - interval '200 days' + i * interval '1 minute' FROM generate_series(1, 1000) i"
    )
    result = program.inside(configuration(systems.conninfo, REFRESH, batch_size=batch_size), "--once", "--json")
    refresh = result.policies["refresh"]
    assert (result.returncode, refresh["deleted"], refresh["blocked"]) == (0, deleted, 1000 - deleted)
