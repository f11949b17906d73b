"""Other sessions at work on the same rows: a second instance, holders of locks, an online service that renews."""

from __future__ import annotations

import random
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import pytest
from chains import TABLE, load
from lab import POLICIES, Database, Program, Result, configuration, until
from servers import Proxy

TOKENS = {"tokens": {**POLICIES["tokens_expired"], "title": "tokens"}}
REFRESH = {"refresh": POLICIES["refresh"]}


def expired(database: Database, rows: int, *, indexed: bool = True) -> None:
    if not indexed:
        database.execute("DROP INDEX ix_refresh_tokens_expires_at")
    database.execute(
        "INSERT INTO refresh_tokens (expires_at)"
        " SELECT now() - interval '1 day' - i * interval '1 second' FROM generate_series(1, %s) i",
        rows,
    )


def one_chain(database: Database, rows: int, apart: str, *, newest_first: bool = False) -> None:
    """A finished chain, its sessions numbered from the root on and so much time apart; in the heap in either order."""
    numbers = f"generate_series({rows}, 1, -1)" if newest_first else f"generate_series(1, {rows})"
    database.execute(
        f"SET session_replication_role = replica; INSERT INTO {TABLE} (id, parent_session_id, status, updated_at)"
        " SELECT md5(i::text)::uuid, CASE WHEN i > 1 THEN md5((i - 1)::text)::uuid END, 'Rotated',"
        f" now() - interval '200 days' + i * interval '{apart}' FROM {numbers} i;"
        " SET session_replication_role = origin"
    )


def two_at_once(database: Database, program: Program, policies: dict[str, Any], table: str) -> list[Result]:
    """Two processes with one configuration, let go together at a lock that both wait for; both end well."""
    config = configuration(database.conninfo, policies, database={"lock_timeout": "1m"}, batch_size=100, pause="5ms")
    holder = database.connect(autocommit=False)
    holder.execute(f"LOCK TABLE {table}")
    processes = [program.start(config, "--once", "--json"), program.start(None, "--once", "--json")]
    waiting = f"SELECT count(*) FROM pg_locks WHERE relation = '{table}'::regclass AND NOT granted"
    until(lambda: database.value(waiting) == 2, "both wait for the table")
    holder.rollback()
    results = [program.finish(process) for process in processes]
    assert [result.returncode for result in results] == [0, 0], [result.output for result in results]
    return results


@pytest.mark.parametrize("indexed", [True, False], ids=["index", "no index"])
def test_two_instances_count_every_row_once(indexed: bool, systems: Database, program: Program) -> None:
    """Two processes on one backlog: every row goes once and is counted once, and both end well."""
    expired(systems, 20_000, indexed=indexed)
    results = two_at_once(systems, program, TOKENS, "refresh_tokens")
    shares = [result.policies["tokens"]["deleted"] for result in results]
    assert (sum(shares), min(shares) > 0) == (20_000, True), shares
    assert systems.count("refresh_tokens") == 0


@pytest.mark.parametrize("indexed", [True, False], ids=["index", "no index"])
def test_two_instances_finish_chains(indexed: bool, systems: Database, program: Program) -> None:
    """Where parents and children are in the hands of both: nothing finished is left once both have ended.

    Not that both had a share: one that finds each parent's child in the other's hands may leave all of it to that one.
    """
    if indexed:
        systems.execute(f"CREATE INDEX ON {TABLE} (updated_at)")
    fate = load(systems, 20, 500)
    results = two_at_once(systems, program, REFRESH, TABLE)
    assert sum(result.policies["refresh"]["deleted"] for result in results) == len(fate.finished)
    assert {row[0] for row in systems.execute(f"SELECT id FROM {TABLE}")} == fate.staying
    assert {result.policies["refresh"]["undeletable"] for result in results} == {0}


LOCKS = ["FOR UPDATE", "FOR NO KEY UPDATE", "FOR SHARE", "FOR KEY SHARE"]


@pytest.mark.parametrize("lock", LOCKS)
@pytest.mark.parametrize("indexed", [True, False], ids=["index", "no index"])
def test_rows_that_another_session_holds_are_left(
    indexed: bool, lock: str, systems: Database, program: Program
) -> None:
    """Whatever the lock, the run does not wait: it leaves these rows as backlog, takes the others and ends well."""
    expired(systems, 1000, indexed=indexed)
    other = systems.connect(autocommit=False)
    held = other.execute(f"SELECT id FROM refresh_tokens WHERE id % 100 = 7 {lock}").fetchall()
    result = program.inside(configuration(systems.conninfo, TOKENS, batch_size=30), "--once", "--json")
    tokens = result.policies["tokens"]
    assert (result.returncode, tokens["stop_reason"], tokens["error"]) == (0, "locked", None)
    assert (tokens["deleted"], tokens["backlog"], tokens["blocked"], tokens["undeletable"]) == (990, 10, 0, 0)
    assert result.json["stop_reason"] == "locked"
    assert systems.execute("SELECT id FROM refresh_tokens ORDER BY 1") == held


@pytest.mark.parametrize("indexed", [True, False], ids=["index", "no index"])
def test_the_ancestors_of_a_held_session_wait_with_it(indexed: bool, systems: Database, program: Program) -> None:
    """A finished chain whose end is held: its other rows cannot go before it; the next run takes them all."""
    if indexed:
        systems.execute(f"CREATE INDEX ON {TABLE} (updated_at)")
    one_chain(systems, 20, "1 day")
    other = systems.connect(autocommit=False)
    other.execute(f"SELECT 1 FROM {TABLE} WHERE id = md5('15')::uuid FOR UPDATE")
    result = program.inside(configuration(systems.conninfo, REFRESH, batch_size=4), "--once", "--json")
    refresh = result.policies["refresh"]
    assert (result.returncode, refresh["deleted"], refresh["backlog"]) == (0, 5, 15)
    assert refresh["undeletable"] == 0
    other.rollback()
    result = program.inside(None, "--once", "--json")
    assert (result.returncode, result.policies["refresh"]["deleted"]) == (0, 15)


@pytest.mark.parametrize("indexed", [True, False], ids=["index", "no index"])
def test_a_row_renewed_during_the_run_stays(indexed: bool, systems: Database, program: Program, proxy: Proxy) -> None:
    """Held when the run comes by, renewed and committed while it goes on: the row stays, and is no backlog any more."""
    expired(systems, 500, indexed=indexed)
    other = systems.connect(autocommit=False)
    other.execute("UPDATE refresh_tokens SET expires_at = now() + interval '1 day' WHERE id IN (1, 250, 500)")
    proxy.at("batch", 3, other.commit)
    result = program.inside(configuration(proxy.conninfo(systems), TOKENS, batch_size=50), "--once", "--json")
    assert proxy.happened == ["batch"]
    tokens = result.policies["tokens"]
    assert (result.returncode, tokens["deleted"], tokens["backlog"]) == (0, 497, 0)
    assert systems.execute("SELECT id FROM refresh_tokens ORDER BY 1") == [(1,), (250,), (500,)]


@pytest.mark.parametrize("indexed", [True, False], ids=["index", "no index"])
def test_a_row_freed_during_the_run_goes(indexed: bool, systems: Database, program: Program, proxy: Proxy) -> None:
    """Rows that were held when the run came by are not mistaken for the end: free again, they go in the same run."""
    expired(systems, 500, indexed=indexed)
    other = systems.connect(autocommit=False)
    other.execute("SELECT 1 FROM refresh_tokens WHERE id <= 25 OR id > 475 FOR UPDATE")
    proxy.at("batch", 6, other.rollback)
    result = program.inside(configuration(proxy.conninfo(systems), TOKENS, batch_size=10), "--once", "--json")
    assert proxy.happened == ["batch"]
    assert (result.returncode, result.policies["tokens"]["deleted"]) == (0, 500)


def service(database: Database, keys: list[Any], work: Callable[[Any, Any], bool]) -> tuple[threading.Event, Any, Any]:
    """A thread that works on the keys in random order, one transaction each; what succeeded, when it is joined."""
    stop, done = threading.Event(), []
    connection = database.connect()
    random.Random(1).shuffle(keys)

    def run() -> None:
        for key in keys:
            if stop.is_set():
                break
            if work(connection, key):
                done.append(key)

    thread = threading.Thread(target=run)
    thread.start()
    return stop, thread, done


def finish(process: subprocess.Popen[str], stop: threading.Event, thread: threading.Thread) -> Result:
    try:
        return Program.finish(process)
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("indexed", [True, False], ids=["index", "no index"])
def test_no_renewed_session_is_lost(indexed: bool, systems: Database, program: Program) -> None:
    """A service that revives old sessions all the while: each that it got hold of is there, as it left it."""
    if indexed:
        systems.execute(f"CREATE INDEX ON {TABLE} (updated_at)")
    systems.execute(
        f"INSERT INTO {TABLE} (status, updated_at)"
        " SELECT 'Revoked', now() - interval '100 days' - i * interval '1 second' FROM generate_series(1, 20000) i"
    )

    def renew(connection: Any, key: Any) -> bool:
        change = f"UPDATE {TABLE} SET status = 'Active', updated_at = now() WHERE id = %s"
        return bool(connection.execute(change, (key,)).rowcount)

    keys = [row[0] for row in systems.execute(f"SELECT id FROM {TABLE}")]
    stop, thread, renewed = service(systems, keys, renew)
    process = program.start(configuration(systems.conninfo, REFRESH, batch_size=5000), "--once", "--json")
    result = finish(process, stop, thread)
    assert result.returncode == 0, result.output
    deleted = result.policies["refresh"]["deleted"]
    assert deleted > 0
    assert renewed
    assert set(renewed) <= {row[0] for row in systems.execute(f"SELECT id FROM {TABLE} WHERE status = 'Active'")}
    assert systems.count(TABLE) == 20_000 - deleted


@pytest.mark.parametrize("indexed", [True, False], ids=["index", "no index"])
def test_a_child_born_during_the_run_keeps_its_parent(indexed: bool, systems: Database, program: Program) -> None:
    """A service that lets old sessions have children: the run neither fails nor counts a parent as undeletable."""
    if indexed:
        systems.execute(f"CREATE INDEX ON {TABLE} (updated_at)")
    systems.execute(
        f"INSERT INTO {TABLE} (status, updated_at)"
        " SELECT 'Rotated', now() - interval '100 days' - i * interval '1 second' FROM generate_series(1, 20000) i"
    )

    def rotate(connection: Any, key: Any) -> bool:
        child = (
            f"INSERT INTO {TABLE} (parent_session_id, status, updated_at)"
            f" SELECT id, 'Active', now() FROM {TABLE} WHERE id = %s FOR KEY SHARE"
        )
        return bool(connection.execute(child, (key,)).rowcount)

    keys = [row[0] for row in systems.execute(f"SELECT id FROM {TABLE}")]
    stop, thread, parents = service(systems, keys, rotate)
    process = program.start(configuration(systems.conninfo, REFRESH, batch_size=5000), "--once", "--json")
    result = finish(process, stop, thread)
    refresh = result.policies["refresh"]
    assert (result.returncode, refresh["undeletable"]) == (0, 0), result.output
    assert refresh["deleted"] > 0
    assert parents
    assert set(parents) == {row[0] for row in systems.execute(f"SELECT id FROM {TABLE} WHERE status = 'Rotated'")}
    assert refresh["deleted"] == 20_000 - len(parents)


@pytest.mark.parametrize("indexed", [True, False], ids=["index", "no index"])
def test_a_service_that_touches_old_rows_is_no_failure(indexed: bool, systems: Database, program: Program) -> None:
    """Rows changed under a batch, and still old: the run ends well, and what it could not get goes with the next."""
    expired(systems, 20_000, indexed=indexed)

    def touch(connection: Any, key: Any) -> bool:
        change = "UPDATE refresh_tokens SET user_agent = 'seen' WHERE id = %s"
        return bool(connection.execute(change, (key,)).rowcount)

    stop, thread, touched = service(systems, list(range(1, 20_001)), touch)
    process = program.start(configuration(systems.conninfo, TOKENS, batch_size=5000), "--once", "--json")
    result = finish(process, stop, thread)
    tokens = result.policies["tokens"]
    assert (result.returncode, tokens["error"], tokens["undeletable"]) == (0, None, 0), result.output
    assert touched
    assert tokens["deleted"] == 20_000 - systems.count("refresh_tokens")
    again = program.inside(None, "--once", "--json")
    assert (again.returncode, systems.count("refresh_tokens")) == (0, 0)


@pytest.mark.parametrize("indexed", [True, False], ids=["index", "no index"])
def test_where_another_instance_is_at_work_the_rest_goes_first(
    indexed: bool, systems: Database, program: Program, proxy: Proxy
) -> None:
    """The rows at the front are held, and free again once all others are gone: they go last, and nobody waited."""
    expired(systems, 20_000, indexed=indexed)
    systems.execute("VACUUM ANALYZE refresh_tokens")
    other = systems.connect(autocommit=False)
    age = "expires_at < now() - interval '1 day 5 hours'" if indexed else "id < 2000"
    held = len(other.execute(f"SELECT 1 FROM refresh_tokens WHERE {age} FOR UPDATE").fetchall())
    assert 1000 < held < 3000
    left: list[int] = []

    def give_way() -> None:
        left.append(systems.count("refresh_tokens"))
        other.rollback()

    proxy.at("batch", 25, give_way)
    result = program.inside(configuration(proxy.conninfo(systems), TOKENS, batch_size=1000), "--once", "--json")
    assert (result.returncode, result.policies["tokens"]["deleted"]) == (0, 20_000)
    assert result.policies["tokens"]["stop_reason"] == "drained"
    assert left[0] < held + 3000, "what nobody held went before"
    assert proxy.batches < 40


def test_beside_another_instance_a_few_rows_are_come_back_to_without_another_pass(
    systems: Database, program: Program, proxy: Proxy
) -> None:
    """Ten rows in the middle are held as well, and free when all others are gone: no more than their pages is read."""
    expired(systems, 20_000, indexed=False)
    systems.execute("VACUUM ANALYZE refresh_tokens")
    other = systems.connect(autocommit=False)
    other.execute("SELECT 1 FROM refresh_tokens WHERE id < 1000 OR id BETWEEN 15001 AND 15010 FOR UPDATE")
    proxy.at("batch", 24, other.rollback)
    result = program.inside(configuration(proxy.conninfo(systems), TOKENS, batch_size=1000), "--once", "--json")
    tokens = result.policies["tokens"]
    assert proxy.happened == ["batch"]
    assert (result.returncode, tokens["deleted"], tokens["stop_reason"]) == (0, 20_000, "drained")
    assert proxy.batches < 29


def test_an_instance_on_the_same_chains_is_followed(systems: Database, program: Program, proxy: Proxy) -> None:
    """Its rows are waited for where they are, and not walked past: chains are gone through once."""
    systems.execute(f"CREATE INDEX ON {TABLE} (updated_at)")
    fate = load(systems, 20, 500)
    other = systems.connect(autocommit=False)
    newest = f"SELECT id FROM {TABLE} WHERE updated_at < now() - interval '90 days' AND status <> 'Active'"
    other.execute(f"SELECT 1 FROM {TABLE} WHERE id IN ({newest} ORDER BY updated_at DESC LIMIT 600) FOR UPDATE")
    proxy.at("batch", 4, other.rollback)
    result = program.inside(configuration(proxy.conninfo(systems), REFRESH, batch_size=1000), "--once", "--json")
    assert proxy.happened == ["batch"]
    assert (result.returncode, result.policies["refresh"]["deleted"]) == (0, len(fate.finished))
    assert proxy.batches < 4 + 1.5 * systems.count(TABLE) / 1000 + 1.5 * len(fate.finished) / 1000


@pytest.mark.parametrize("indexed", [True, False], ids=["index", "no index"])
def test_who_holds_many_rows_all_night_is_waited_for_once(
    indexed: bool, systems: Database, program: Program, proxy: Proxy
) -> None:
    """No other instance, then: after eight waits all others go, and the run ends as for a single row that is held."""
    expired(systems, 10_000, indexed=indexed)
    other = systems.connect(autocommit=False)
    other.execute("SELECT 1 FROM refresh_tokens WHERE id % 1000 < 800 FOR UPDATE")
    result = program.inside(configuration(proxy.conninfo(systems), TOKENS, batch_size=1000), "--once", "--json")
    tokens = result.policies["tokens"]
    assert (result.returncode, tokens["deleted"], tokens["backlog"]) == (0, 2000, 8000)
    assert tokens["stop_reason"] == "locked"
    assert proxy.batches < 70


@pytest.mark.parametrize("released", [True, False])
def test_a_row_that_is_held_in_the_middle_of_a_chain(
    released: bool, systems: Database, program: Program, proxy: Proxy
) -> None:
    """Climbing from the newest the run comes to it: what it names is left with it, or goes once it is free again."""
    one_chain(systems, 300, "1 hour", newest_first=True)
    systems.execute(f"ANALYZE {TABLE}")
    other = systems.connect(autocommit=False)
    other.execute(f"SELECT 1 FROM {TABLE} WHERE id = md5('150')::uuid FOR UPDATE")
    if released:
        proxy.at("commit answered", 3, other.rollback)
    result = program.inside(configuration(proxy.conninfo(systems), REFRESH, batch_size=200), "--once", "--json")
    refresh = result.policies["refresh"]
    found = (refresh["deleted"], refresh["backlog"], refresh["blocked"], refresh["stop_reason"])
    assert found == ((300, 0, 0, "drained") if released else (150, 150, 0, "locked"))
