"""Rows that are claimed in place: where most rows of a page go, their locks tell them from those that others hold."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator

import psycopg
import pytest
from lab import POLICIES, SYSTEMS, Database, Program, Server, configuration, log
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


def test_what_is_born_or_made_old_behind_the_walk_is_claimed_by_the_next_run(
    filled: Database, proxy: Proxy, program: Program
) -> None:
    """Two rows are born old where a batch has just been, and one there is made old: the pass has gone on."""
    filled.execute("UPDATE refresh_tokens SET expires_at = now() + interval '1 day' WHERE id = 5")
    filled.execute("VACUUM refresh_tokens")
    batches = []

    def interfere() -> None:
        filled.execute("INSERT INTO refresh_tokens (id, expires_at) VALUES (1001, now() - interval '9 days')")
        filled.execute("UPDATE refresh_tokens SET expires_at = now() - interval '9 days' WHERE id = 5")
        batches.extend(filled.execute("SELECT id, ctid::text FROM refresh_tokens WHERE id IN (5, 1001)"))

    proxy.at("batch answered", 1, interfere)
    assert run(filled, program, proxy.conninfo(filled))["deleted"] == 49
    assert proxy.happened == ["batch answered"]
    assert all(int(re.findall(r"\d+", place)[1]) < 10 for _, place in batches), "they lie where the first batch was"
    assert filled.execute("SELECT id FROM refresh_tokens ORDER BY id") == [(5,), (1001,)]
    assert run(filled, program) == {"deleted": 2, "backlog": 0}


def test_a_row_that_moves_under_a_batch_is_counted_once(filled: Database, proxy: Proxy, program: Program) -> None:
    """Changed between the look at its page and its lock, and still old: it goes with the next batch."""
    filled.execute("ALTER TABLE refresh_tokens SET (autovacuum_enabled = false)")
    for milliseconds in range(2, 42, 2):
        filled.execute("TRUNCATE refresh_tokens")
        filled.execute(
            "INSERT INTO refresh_tokens (id, expires_at)"
            " SELECT i, now() - interval '1 day' FROM generate_series(1, 50000) i"
        )
        with filled.connect() as other:
            touch = "UPDATE refresh_tokens SET user_agent = 'seen' WHERE id > 49990"
            timer = threading.Timer(milliseconds / 1000, other.execute, [touch])
            proxy.batches = 0
            proxy.at("batch", 1, timer.start)
            config = configuration(proxy.conninfo(filled), TOKENS, batch_size=50000)
            result = program.inside(config, "--once", "--json")
            timer.join()
        tokens = result.policies["tokens"]
        assert (tokens["deleted"], tokens["backlog"], filled.count("refresh_tokens")) == (50000, 0, 0)
        batches = [int(line.fields["deletedCount"]) for line in log(result.stderr) if line.event == "batch_deleted"]
        assert sum(batches) == 50000
        if batches[0] == 49990:
            return
    pytest.fail("no row was changed while a batch was under way")


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


@pytest.mark.parametrize("stage", ["batch", "batch answered", "commit", "commit answered"])
def test_a_connection_lost_in_between_costs_nothing(
    stage: str, filled: Database, proxy: Proxy, program: Program
) -> None:
    """Before the batch, after it, at COMMIT: each row is deleted, and counted, once."""
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
    assert run(filled, program, proxy.conninfo(filled)) == {"deleted": 50, "backlog": 0}
    assert (proxy.batches >= 5, proxy.prepared) == (True, [])


def test_a_privilege_on_locks_that_is_taken_away_in_mid_run_is_done_without(
    filled: Database, proxy: Proxy, program: Program
) -> None:
    """What may not be deleted at all is another matter."""
    proxy.at("pause", 2, lambda: filled.execute("REVOKE SELECT (xmax) ON refresh_tokens FROM retention"))
    proxy.at("pause", 5, lambda: filled.execute("REVOKE DELETE ON refresh_tokens FROM retention"))
    result = program.inside(configuration(proxy.conninfo(filled), TOKENS, batch_size=10), "--once", "--json")
    tokens = result.policies["tokens"]
    assert (result.returncode, tokens["deleted"], tokens["error"]["sqlstate"]) == (1, 40, "42501")
    assert filled.count("refresh_tokens") == 10


def test_few_rows_among_many_are_not_gone_over_three_times(filled: Database, proxy: Proxy, program: Program) -> None:
    """Of ten rows one goes: by its address, after the first batch. Then most go: all in place."""
    filled.execute("DELETE FROM refresh_tokens")
    filled.execute(
        "INSERT INTO refresh_tokens (expires_at) SELECT CASE WHEN i % 10 = 0 OR i > 2000"
        " THEN now() - interval '1 day' ELSE now() + interval '1 day' END FROM generate_series(1, 3000) i"
    )
    filled.execute("VACUUM FULL refresh_tokens")
    filled.execute("ANALYZE refresh_tokens")
    assert run(filled, program, proxy.conninfo(filled)) == {"deleted": 1200, "backlog": 0}
    first, *later = proxy.prepared
    assert first == 1, "which is taken for granted"
    assert 20 < later[0] < 60
    assert later == list(range(later[0], later[0] + len(later)))
    assert len(later) > 90


CHANGES = {
    "cascade": "ALTER TABLE audit ADD FOREIGN KEY (token) REFERENCES refresh_tokens ON DELETE CASCADE",
    "restrict": "ALTER TABLE audit ADD FOREIGN KEY (token) REFERENCES refresh_tokens",
    "trigger": "CREATE TRIGGER keep BEFORE DELETE ON refresh_tokens FOR EACH ROW EXECUTE FUNCTION keep()",
    "soft delete": "CREATE RULE soft AS ON DELETE TO refresh_tokens"
    " DO INSTEAD UPDATE refresh_tokens SET is_revoked = true WHERE id = OLD.id",
    "rule that keeps": "CREATE RULE keep AS ON DELETE TO refresh_tokens DO INSTEAD SELECT 1",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_key_a_trigger_or_a_rule_of_another_is_met_by_a_prepared_statement(
    change: str, filled: Database, proxy: Proxy, program: Program
) -> None:
    """Whoever makes one waits for the batch under way; the next finds that the table is not what was judged."""
    filled.execute("""
        CREATE TABLE audit AS SELECT id, id AS token FROM refresh_tokens;
        CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'
    """)
    refused = []

    def try_it() -> None:
        try:
            filled.execute(f"SET lock_timeout = '200ms'; {CHANGES[change]}")
        except psycopg.errors.LockNotAvailable:
            refused.append(change)

    def do_it() -> None:
        filled.execute(f"DELETE FROM audit WHERE id <= 33; {CHANGES[change]}")

    proxy.at("batch answered", 2, try_it)
    proxy.at("pause", 3, do_it)
    result = program.inside(configuration(proxy.conninfo(filled), TOKENS, batch_size=10), "--once", "--json")
    tokens = result.policies["tokens"]
    assert (result.returncode, tokens["deleted"], filled.count("refresh_tokens")) == (1, 30, 20)
    assert "were changed while the run was on it" in tokens["error"]["message"]
    assert (refused, proxy.prepared) == ([change], [1, 2, 3, 4])


@pytest.mark.parametrize(
    ("stage", "batch", "loss", "state", "prepared"),
    [("pause", 2, "DEALLOCATE ALL", "26000", [1, 2, 3]), ("login", 0, "PREPARE _pg3_0 AS SELECT 1", "42P05", [])],
    ids=["lost", "another's"],
)
def test_a_prepared_statement_that_is_lost_or_anothers_is_done_without(
    stage: str,
    batch: int,
    loss: str,
    state: str,
    prepared: list[int],
    filled: Database,
    proxy: Proxy,
    program: Program,
) -> None:
    """As behind a pooler that does not show that it is one."""
    proxy.at(stage, batch, lambda: proxy.ask(loss))
    config = configuration(proxy.conninfo(filled), TOKENS, batch_size=10)
    result = program.inside(config, "--once", "--json")
    tokens = result.policies["tokens"]
    assert (result.returncode, tokens["deleted"], tokens["backlog"]) == (0, 50, 0)
    retried = [line.fields["sqlstate"] for line in log(result.stderr) if line.event == "batch_retried"]
    assert (proxy.happened, retried, proxy.prepared) == ([stage], [state], prepared)


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


@pytest.mark.parametrize("how", ["written anew", "a place used again"])
def test_a_place_with_another_row_under_a_doubtful_commit_leaves_no_wrong_count(
    how: str, filled: Database, proxy: Proxy, program: Program
) -> None:
    """The place of a deleted row has another of the same age then: how many have gone is not known, and not said."""
    filled.execute("UPDATE refresh_tokens SET expires_at = date_trunc('day', expires_at)")
    filled.execute("VACUUM FULL refresh_tokens")

    def rewrite() -> None:
        filled.execute("VACUUM FULL refresh_tokens" if how == "written anew" else "VACUUM refresh_tokens")
        if how == "a place used again":
            filled.execute(
                "INSERT INTO refresh_tokens (expires_at)"
                " SELECT (SELECT min(expires_at) FROM refresh_tokens) FROM generate_series(1, 10)"
            )
        proxy.cut()

    proxy.at("commit answered", 1, rewrite)
    config = configuration(proxy.conninfo(filled), TOKENS, batch_size=10)
    result = program.inside(config, "--once", "--json")
    tokens = result.policies["tokens"]
    left = 40 if how == "written anew" else 50
    assert (result.returncode, tokens["deleted"], filled.count("refresh_tokens")) == (1, None, left)


@pytest.fixture
def sharers() -> Iterator[Database]:
    """A server of its own, that has had more numbers for several sessions which share a row than for transactions."""
    server = Server()
    try:
        database = Database(server, "postgres")
        database.execute(SYSTEMS.read_text())
        database.execute("DROP INDEX ix_refresh_tokens_expires_at")
        database.execute("CREATE TABLE numbers AS SELECT generate_series(0, 1023) AS id")
        sharing = [database.connect(autocommit=False) for _ in range(10)]
        for bit, session in enumerate(sharing):  # each set of sessions takes a number
            session.execute(f"SELECT 1 FROM numbers WHERE id >> {bit} & 1 = 1 FOR KEY SHARE")
        for session in sharing:
            session.rollback()
        yield database
        database.close()
    finally:
        server.remove()


def take_transactions(database: Database, number: int) -> None:
    """Until the next one has this number."""
    next_one = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text"
    assert int(database.value(next_one)) < number
    while int(database.value(next_one)) < number:
        database.execute("SELECT pg_current_xact_id()")


def test_a_number_for_several_sessions_is_not_taken_for_ours(sharers: Database, program: Program) -> None:
    """A row that sessions share has a number for all of them as its locker, which may be that of our transaction."""
    sharers.execute(
        "INSERT INTO refresh_tokens (expires_at) SELECT now() - interval '1 day' FROM generate_series(1, 50)"
    )
    for bit in range(5):
        session = sharers.connect(autocommit=False)
        session.execute(f"SELECT 1 FROM refresh_tokens WHERE id < 32 AND id >> {bit} & 1 = 1 FOR KEY SHARE")
    number = sharers.value(
        "SELECT xmax::text::bigint FROM refresh_tokens WHERE id < 32 ORDER BY 1 DESC OFFSET 7 LIMIT 1"
    )
    take_transactions(sharers, number)
    tokens = program.inside(
        configuration(sharers.conninfo, TOKENS, database={"lock_timeout": "500ms"}), "--once", "--json"
    ).policies["tokens"]
    assert (tokens["deleted"], tokens["backlog"], tokens["stop_reason"]) == (19, 31, "locked")
    assert sharers.count("refresh_tokens", f"xmax::text = '{number}'") == 1


@pytest.mark.parametrize("ahead", [530, 545, 560, 600])
def test_our_number_is_not_given_to_several_sessions_while_a_batch_goes_on(
    ahead: int, sharers: Database, program: Program
) -> None:
    """2,000 live rows come to be shared, one after the other, while a statement deletes 50,000 old ones."""
    sharers.execute("""
        INSERT INTO refresh_tokens (id, expires_at)
            SELECT i, now() + CASE WHEN i <= 50000 THEN -1 ELSE 1 END * interval '5 days'
            FROM generate_series(1, 52000) i;
        CREATE FUNCTION share() RETURNS void LANGUAGE plpgsql AS $$
        BEGIN
            LOOP  -- until the batch has come to its end
                EXIT WHEN (SELECT xmax::text <> '0' FROM refresh_tokens WHERE id = 50000);
            END LOOP;
            FOR n IN 50001..52000 LOOP
                BEGIN
                    PERFORM FROM refresh_tokens WHERE id = n FOR KEY SHARE;
                EXCEPTION WHEN division_by_zero THEN NULL;
                END;
            END LOOP;
        END $$;
        CHECKPOINT
    """)
    one, other = sharers.connect(autocommit=False), sharers.connect()
    one.execute("SELECT FROM refresh_tokens WHERE id > 50000 FOR KEY SHARE")
    take_transactions(
        sharers, int(sharers.value("SELECT next_multixact_id::text FROM pg_control_checkpoint()")) + ahead
    )

    def share() -> None:
        other.execute("SET statement_timeout = '60s'; SELECT share()")
        one.rollback()

    sharing = threading.Thread(target=share)
    sharing.start()
    tokens = program.inside(configuration(sharers.conninfo, TOKENS, batch_size=100_000), "--once", "--json").policies[
        "tokens"
    ]
    sharing.join()
    assert (tokens["deleted"], tokens["backlog"], tokens["stop_reason"]) == (50_000, 0, "drained")
    assert sharers.count("refresh_tokens") == 2000


@pytest.mark.parametrize("heap", ["in order", "shuffled", "few", "statistics of yesterday", "few of late"])
def test_pages_are_gone_through_where_most_of_a_table_goes(heap: str, systems: Database, program: Program) -> None:
    """Though there is an index on age, from the first batch on. Where the planner is wrong, and few are old, they are
    found along the index all the same.
    """
    order = "random()" if heap == "shuffled" else "i"
    old = {"shuffled": 19_000, "few": 6_000}.get(heap, 25_000)
    systems.execute(
        f"INSERT INTO refresh_tokens (expires_at) SELECT now() + (i - {old} - 0.5) * interval '1 hour'"
        f" FROM generate_series(1, 40000) i ORDER BY {order}"
    )
    systems.execute("VACUUM FULL ANALYZE refresh_tokens")
    expected = old
    if heap.endswith(("yesterday", "late")):
        systems.execute("DELETE FROM refresh_tokens WHERE expires_at < now()")
        expected = 0
    if heap == "few of late":
        systems.execute("UPDATE refresh_tokens SET expires_at = now() - interval '9 days' WHERE id % 10 = 0")
        expected = systems.count("refresh_tokens", "expires_at < now()")
        assert 0 < expected < 5000
    result = program.inside(configuration(systems.conninfo, TOKENS), "--once", "--json")
    tokens = result.policies["tokens"]
    assert (tokens["deleted"], tokens["stop_reason"]) == (expected, "drained")
    (started,) = [line for line in log(result.stderr) if line.event == "phase_started"]
    assert started.fields["walk"] == ("pages" if heap in ("in order", "shuffled") else "index")
