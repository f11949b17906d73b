"""Rows that are claimed in place: where most rows of a page go, their locks tell them from those that others hold."""

from __future__ import annotations

import re

import psycopg
import pytest
from lab import POLICIES, SYSTEMS, Database, Program, Server, configuration
from servers import Proxy

TOKENS = {"tokens": POLICIES["tokens_expired"]}


@pytest.fixture
def filled(systems: Database) -> Database:
    """Fifty expired tokens, and the walk goes through pages. Three rows before them are gone, and their place free."""
    systems.execute("DROP INDEX ix_refresh_tokens_expires_at")
    systems.execute(
        "INSERT INTO refresh_tokens (expires_at) SELECT now() - interval '1 day' FROM generate_series(1, 53)"
    )
    systems.execute("DELETE FROM refresh_tokens WHERE id <= 3")
    systems.execute("VACUUM refresh_tokens")
    return systems


def run(database: Database, program: Program, conninfo: str = "") -> dict[str, int]:
    config = configuration(conninfo or database.conninfo, TOKENS, batch_size=10)
    result = program.inside(config, "--once", "--json")
    tokens = result.policies["tokens"]
    assert (result.returncode, tokens["undeletable"], tokens["error"]) == (0, 0, None)
    return {"deleted": tokens["deleted"], "backlog": tokens["backlog"]}


def test_what_becomes_old_between_claim_and_deletion_is_not_deleted_unclaimed(
    filled: Database, proxy: Proxy, program: Program
) -> None:
    """Two rows are born old into the very range of a batch, and one there is made old: no batch has claimed these."""
    filled.execute("UPDATE refresh_tokens SET expires_at = now() + interval '1 day' WHERE id = 5")
    filled.execute("VACUUM refresh_tokens")
    batches = []

    def interfere() -> None:
        filled.execute("INSERT INTO refresh_tokens (id, expires_at) VALUES (1001, now() - interval '9 days')")
        filled.execute("UPDATE refresh_tokens SET expires_at = now() - interval '9 days' WHERE id = 5")
        batches.extend(filled.execute("SELECT id, ctid::text FROM refresh_tokens WHERE id IN (5, 1001)"))

    proxy.at("deletion", 1, interfere)
    assert run(filled, program, proxy.conninfo(filled))["deleted"] == 49
    assert proxy.happened == ["deletion"]
    assert all(int(re.findall(r"\d+", place)[1]) < 10 for _, place in batches), "they lie where the first batch was"
    assert filled.execute("SELECT id FROM refresh_tokens ORDER BY id") == [(5,), (1001,)]
    assert run(filled, program) == {"deleted": 2, "backlog": 0}


def test_traces_of_locks_that_have_ended_keep_nothing(filled: Database, program: Program) -> None:
    """Locked by one session, by two at once, by the job itself, deleted and updated: all of it over, or rolled back."""
    first, second = filled.connect(autocommit=False), filled.connect(autocommit=False)
    for session in (first, second):
        session.execute("SELECT 1 FROM refresh_tokens WHERE id BETWEEN 10 AND 19 FOR SHARE")
    first.execute("SELECT 1 FROM refresh_tokens WHERE id BETWEEN 20 AND 24 FOR UPDATE")
    second.execute("DELETE FROM refresh_tokens WHERE id BETWEEN 30 AND 34")
    second.execute("UPDATE refresh_tokens SET user_agent = 'other' WHERE id BETWEEN 40 AND 44")
    first.commit()
    second.rollback()
    assert filled.value("SELECT count(*) FROM refresh_tokens WHERE xmax <> 0") == 25
    assert run(filled, program) == {"deleted": 50, "backlog": 0}


def test_a_row_that_two_sessions_share_is_left(filled: Database, program: Program) -> None:
    """Its lock names both of them. The rest of its page goes."""
    for number in (1, 2):
        session = filled.connect(autocommit=False)
        session.execute("SELECT 1 FROM refresh_tokens WHERE id = 25 FOR KEY SHARE")
        session.execute("SELECT 1 FROM refresh_tokens WHERE id = %s FOR UPDATE", [30 + number])
    assert run(filled, program) == {"deleted": 47, "backlog": 3}


@pytest.mark.parametrize("stage", ["deletion", "deletion answered", "commit", "commit answered"])
def test_a_connection_lost_in_between_costs_nothing(
    stage: str, filled: Database, proxy: Proxy, program: Program
) -> None:
    """After the claim, after the deletion, at COMMIT: each row is deleted, and counted, once."""
    proxy.at(stage, 2, proxy.cut)
    assert run(filled, program, proxy.conninfo(filled)) == {"deleted": 50, "backlog": 0}
    assert proxy.happened == [stage]


@pytest.mark.parametrize("reason", ["a role that may not read locks", "a trigger"])
def test_where_locks_do_not_tell_rows_go_by_their_addresses(
    reason: str, filled: Database, proxy: Proxy, program: Program
) -> None:
    """No privilege on xmax is asked for: without it the same rows go. A trigger could keep a claimed row."""
    if reason == "a trigger":
        filled.execute(
            "CREATE FUNCTION seen() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN OLD; END';"
            "CREATE TRIGGER seen BEFORE DELETE ON refresh_tokens FOR EACH ROW EXECUTE FUNCTION seen()"
        )
    else:
        filled.execute("REVOKE SELECT (xmax) ON refresh_tokens FROM retention")
        assert program.inside(configuration(filled.conninfo, TOKENS), "--check").returncode == 0
    proxy.at("deletion", 1, lambda: None)
    assert run(filled, program, proxy.conninfo(filled)) == {"deleted": 50, "backlog": 0}
    assert proxy.happened == []


def test_few_rows_among_many_are_not_gone_over_three_times(filled: Database, proxy: Proxy, program: Program) -> None:
    """Of ten rows one goes: by its address, after the first batch. Then most go: all in place."""
    filled.execute("DELETE FROM refresh_tokens")
    filled.execute(
        "INSERT INTO refresh_tokens (expires_at) SELECT CASE WHEN i % 10 = 0 OR i > 2000"
        " THEN now() - interval '1 day' ELSE now() + interval '1 day' END FROM generate_series(1, 3000) i"
    )
    filled.execute("VACUUM FULL refresh_tokens")
    filled.execute("ANALYZE refresh_tokens")
    in_place: list[int] = []
    for number in range(1, 150):
        proxy.at("deletion", number, lambda number=number: in_place.append(number))  # type: ignore[misc]
    assert run(filled, program, proxy.conninfo(filled)) == {"deleted": 1200, "backlog": 0}
    first, *later = in_place
    assert first == 1, "which is taken for granted"
    assert 20 < later[0] < 60
    assert later == list(range(later[0], later[0] + len(later)))
    assert len(later) > 90


CHANGES = {
    "cascade": "ALTER TABLE audit ADD FOREIGN KEY (token) REFERENCES refresh_tokens ON DELETE CASCADE",
    "restrict": "ALTER TABLE audit ADD FOREIGN KEY (token) REFERENCES refresh_tokens",
    "trigger": "CREATE TRIGGER keep BEFORE DELETE ON refresh_tokens FOR EACH ROW EXECUTE FUNCTION keep()",
}


@pytest.mark.parametrize("change", CHANGES)
def test_no_key_and_no_trigger_comes_between_claim_and_deletion(
    change: str, filled: Database, proxy: Proxy, program: Program
) -> None:
    """Whoever would make one waits for the batch: what was judged is what the deletion sets off."""
    filled.execute("""
        CREATE TABLE audit AS SELECT id, id AS token FROM refresh_tokens;
        CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'
    """)
    refused = []

    def interfere() -> None:
        try:
            filled.execute(f"SET lock_timeout = '200ms'; {CHANGES[change]}")
        except psycopg.errors.LockNotAvailable:
            refused.append(change)

    proxy.at("deletion", 2, interfere)
    assert run(filled, program, proxy.conninfo(filled)) == {"deleted": 50, "backlog": 0}
    assert (refused, filled.count("audit")) == ([change], 50)


@pytest.mark.parametrize("skipped", [False, True], ids=["behind the walk", "where it has come back from"])
def test_rows_that_a_vacuum_lets_move_are_found(
    skipped: bool, filled: Database, proxy: Proxy, program: Program
) -> None:
    """Updated and still old, they go to places that are free since a VACUUM in mid-run, where the walk has been."""
    filled.execute("DELETE FROM refresh_tokens")
    filled.execute(
        "INSERT INTO refresh_tokens (id, expires_at)"
        " SELECT i, now() - interval '1 day' FROM generate_series(1, 20000) i"
    )
    filled.execute("VACUUM ANALYZE refresh_tokens")
    other = filled.connect(autocommit=False)
    if skipped:
        other.execute("SELECT 1 FROM refresh_tokens WHERE id < 2000 FOR UPDATE")

    def touch() -> None:
        other.rollback()
        filled.execute("VACUUM refresh_tokens")
        moving = "id < 1500" if skipped else "id > 19000"
        filled.execute(f"UPDATE refresh_tokens SET user_agent = 'seen' WHERE {moving}")

    proxy.at("batch", 16 if skipped else 12, touch)
    config = configuration(proxy.conninfo(filled), TOKENS, batch_size=1000)
    tokens = program.inside(config, "--once", "--json").policies["tokens"]
    assert proxy.happened == ["batch"]
    assert (tokens["stop_reason"], tokens["backlog"], filled.count("refresh_tokens")) == ("drained", 0, 0)


def test_a_table_written_anew_under_a_doubtful_commit_leaves_no_wrong_count(
    filled: Database, proxy: Proxy, program: Program
) -> None:
    """The place of a deleted row has another of the same age then: how many have gone is not known, and not said."""

    def rewrite() -> None:
        filled.execute("VACUUM FULL refresh_tokens")
        proxy.cut()

    proxy.at("commit answered", 1, rewrite)
    config = configuration(proxy.conninfo(filled), TOKENS, batch_size=10)
    result = program.inside(config, "--once", "--json")
    tokens = result.policies["tokens"]
    assert (result.returncode, tokens["deleted"], filled.count("refresh_tokens")) == (1, None, 40)


def test_a_number_for_several_sessions_is_not_taken_for_ours(program: Program) -> None:
    """A row that sessions share has a number for all of them as its locker, which may be that of our transaction."""
    server = Server()
    try:
        database = Database(server, "postgres")
        database.execute(SYSTEMS.read_text())
        database.execute("""
            DROP INDEX ix_refresh_tokens_expires_at;
            INSERT INTO refresh_tokens (expires_at) SELECT now() - interval '1 day' FROM generate_series(1, 50);
            CREATE TABLE numbers AS SELECT generate_series(0, 1023) AS id
        """)
        sharing = [database.connect(autocommit=False) for _ in range(10)]
        for bit, session in enumerate(sharing):  # each set of sessions takes a number, more than there are transactions
            session.execute(f"SELECT 1 FROM numbers WHERE id >> {bit} & 1 = 1 FOR KEY SHARE")
        for session in sharing:
            session.rollback()
        for bit, session in enumerate(sharing[:5]):
            session.execute(f"SELECT 1 FROM refresh_tokens WHERE id < 32 AND id >> {bit} & 1 = 1 FOR KEY SHARE")
        number = database.value(
            "SELECT xmax::text::bigint FROM refresh_tokens WHERE id < 32 ORDER BY 1 DESC OFFSET 7 LIMIT 1"
        )
        next_one = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text"
        assert int(database.value(next_one)) < number
        while int(database.value(next_one)) < number:
            database.execute("SELECT pg_current_xact_id()")
        tokens = program.inside(
            configuration(database.conninfo, TOKENS, database={"lock_timeout": "500ms"}), "--once", "--json"
        ).policies["tokens"]
        assert (tokens["deleted"], tokens["backlog"], tokens["stop_reason"]) == (19, 31, "locked")
        assert database.count("refresh_tokens", f"xmax::text = '{number}'") == 1
        database.close()
    finally:
        server.remove()
