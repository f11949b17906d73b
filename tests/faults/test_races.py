"""What other sessions do at the worst moment."""

from __future__ import annotations

import threading

import psycopg
import pytest
from lab import POLICIES, Database, Program, configuration, until


@pytest.mark.parametrize("action", ["CASCADE", "SET NULL", "RESTRICT"])
def test_a_child_born_during_a_batch_keeps_its_parent(action: str, systems: Database, program: Program) -> None:
    """No live session goes, or loses its parent, along with a parent that it was inserted under while a batch ran."""
    table = "identity.refresh_sessions"
    systems.execute(f"""
        ALTER TABLE {table} DROP CONSTRAINT refresh_sessions_parent_session_id_fkey,
            ADD CONSTRAINT own FOREIGN KEY (parent_session_id) REFERENCES {table} ON DELETE {action};
        INSERT INTO {table} (status, updated_at)
            SELECT 'Expired', now() - interval '100 days' - i * interval '1 second' FROM generate_series(1, 30000) i
    """)
    parents = [key for (key,) in systems.execute(f"SELECT id FROM {table} ORDER BY random()")]
    born: list[str] = []
    ended = threading.Event()

    def sign_in() -> None:
        """Insert live children until the run has ended; a parent that is gone refuses its child."""
        connection = systems.connect()
        for parent in parents:
            if ended.is_set():
                break
            try:
                (key,) = connection.execute(
                    f"INSERT INTO {table} (parent_session_id, status, updated_at) VALUES (%s, 'Active', now())"
                    " RETURNING id",
                    [parent],
                ).fetchone() or (None,)
                born.append(str(key))
            except psycopg.errors.ForeignKeyViolation:
                pass

    service = threading.Thread(target=sign_in)
    service.start()
    try:
        policies = {"refresh": POLICIES["refresh"]}
        result = program.inside(configuration(systems.conninfo, policies, batch_size=30000), "--once", "--json")
    finally:
        ended.set()
        service.join()
    assert result.returncode == 0, result.output
    assert born
    assert systems.count(table, "status = 'Active' AND parent_session_id IS NOT NULL") == len(born)
    assert systems.count(table, "status = 'Expired'") == 30000 - result.policies["refresh"]["deleted"]


def test_of_30_rows_of_which_10_are_locked_20_go(systems: Database, program: Program) -> None:
    """In batches of 25: 20 deleted, backlog 10, "locked" and not "drained", exit status 0; the run ends by itself."""
    systems.execute(
        "INSERT INTO refresh_tokens (id, expires_at)"
        " SELECT i, now() - interval '1 day' - i * interval '1 second' FROM generate_series(1, 30) i"
    )
    other = systems.connect(autocommit=False)
    other.execute("SELECT FROM refresh_tokens WHERE id % 3 = 0 FOR UPDATE")
    policies = {"tokens": {**POLICIES["tokens_expired"], "title": "tokens"}}
    result = program.inside(configuration(systems.conninfo, policies, batch_size=25), "--once", "--json")
    tokens = result.policies["tokens"]
    assert (result.returncode, tokens["deleted"], tokens["backlog"], tokens["stop_reason"]) == (0, 20, 10, "locked")
    assert (tokens["blocked"], tokens["undeletable"], tokens["error"]) == (0, 0, None)
    assert "Cleanup stopped (locked). Removed rows: 20." in result.stderr
    assert systems.count("refresh_tokens") == systems.count("refresh_tokens", "id % 3 = 0") == 10


@pytest.mark.parametrize("where", ["its own table", "another table"])
def test_the_parent_of_an_open_child_is_skipped(where: str, systems: Database, program: Program) -> None:
    """A child that is inserted and not committed: its parent is left and the rest goes, while that session is open."""
    table = "identity.refresh_sessions"
    systems.execute(f"""
        CREATE TABLE holds (session uuid REFERENCES {table}); CREATE INDEX ON holds (session);
        INSERT INTO {table} (id, status, updated_at)
            SELECT md5(i::text)::uuid, 'Expired', now() - interval '100 days' FROM generate_series(1, 10) i
    """)
    child = {
        "its own table": f"{table} (parent_session_id, status, updated_at) SELECT md5('5')::uuid, 'Active', now()",
        "another table": "holds SELECT md5('5')::uuid",
    }
    other = systems.connect(autocommit=False)
    other.execute(f"INSERT INTO {child[where]}")
    # a run that waited would wait for longer than the test does
    patience = {"lock_timeout": "10m", "statement_timeout": "10m"}
    config = configuration(systems.conninfo, {"refresh": POLICIES["refresh"]}, database=patience)
    result = program.inside(config, "--once", "--json")
    refresh = result.policies["refresh"]
    assert (result.returncode, refresh["deleted"], refresh["backlog"], refresh["stop_reason"]) == (0, 9, 1, "locked")
    other.commit()
    refresh = program.inside(None, "--once", "--json").policies["refresh"]
    assert (refresh["deleted"], refresh["backlog"], refresh["blocked"]) == (0, 1, 1)


def test_the_parent_of_a_hidden_child_that_another_session_holds_is_locked(systems: Database, program: Program) -> None:
    """The role may not read the child that is being deleted: its parent waits for the next run, which is no failure."""
    systems.execute("""
        INSERT INTO refresh_tokens (id, expires_at)
            SELECT i, now() - interval '1 day' - i * interval '1 second' FROM generate_series(1, 20) i;
        CREATE TABLE holds (token bigint REFERENCES refresh_tokens); CREATE INDEX ON holds (token);
        INSERT INTO holds VALUES (6)
    """)
    other = systems.connect(autocommit=False)
    other.execute("DELETE FROM holds")
    policies = {"tokens": POLICIES["tokens_expired"]}
    result = program.inside(
        configuration(systems.conninfo, policies, database={"lock_timeout": "50ms"}), "--once", "--json"
    )
    tokens = result.policies["tokens"]
    assert (result.returncode, tokens["deleted"], tokens["backlog"], tokens["stop_reason"]) == (0, 19, 1, "locked")
    assert (tokens["blocked"], tokens["undeletable"], tokens["error"]) == (0, 0, None)
    other.commit()
    assert program.inside(None, "--once", "--json").policies["tokens"]["deleted"] == 1


def stopping_type(database: Database) -> None:
    """A text type whose comparison waits for an advisory lock: a batch that has its snapshot can be made to wait."""
    database.execute(
        """
        CREATE TYPE stopping;
        CREATE FUNCTION stopping_in(cstring) RETURNS stopping LANGUAGE internal IMMUTABLE STRICT AS 'textin';
        CREATE FUNCTION stopping_out(stopping) RETURNS cstring LANGUAGE internal IMMUTABLE STRICT AS 'textout';
        CREATE TYPE stopping (INPUT = stopping_in, OUTPUT = stopping_out, CATEGORY = 'S', STORAGE = extended);
        CREATE FUNCTION shown(stopping) RETURNS text LANGUAGE plpgsql AS $$
            BEGIN
                IF current_user = 'retention' THEN PERFORM pg_advisory_xact_lock_shared(4711); END IF;
                RETURN public.stopping_out($1)::text;
            END $$;
        CREATE CAST (stopping AS text) WITH FUNCTION shown(stopping)
        """
    )


@pytest.mark.parametrize("indexed", [True, False], ids=["index", "no index"])
@pytest.mark.parametrize("chained", [True, False], ids=["chains", "no chains"])
def test_what_is_renewed_while_a_batch_chooses_stays(
    chained: bool, indexed: bool, database: Database, program: Program
) -> None:
    """Renewed, revived, deleted, touched, given a child: committed after the batch has looked and before it locks."""
    key = "REFERENCES sessions" if chained else ""
    stopping_type(database)
    database.execute(f"""
        CREATE TABLE sessions (id int PRIMARY KEY, parent int {key}, status stopping, expires_at timestamptz, seen int);
        CREATE INDEX ON sessions (parent);
        INSERT INTO sessions SELECT i, NULL, 'Rotated', now() - interval '1 day' - i * interval '1 second'
            FROM generate_series(1, 10) i
    """)
    if indexed:
        database.execute("CREATE INDEX ON sessions (expires_at)")
    database.grant("sessions", select="id, parent, status, expires_at")
    policies = {
        "sessions": {
            "table": "sessions",
            "expiry_column": "expires_at",
            "grace": "1h",
            "only": {"status": ["Rotated", "Revoked"]},
        }
    }
    service = database.connect()
    service.execute("SELECT pg_advisory_lock(4711)")
    config = configuration(database.conninfo, policies, database={"lock_timeout": "1m"})
    process = program.start(config, "--once", "--json")
    waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    until(lambda: database.value(waiting), "the batch is at its first row")
    service.execute("""
        UPDATE sessions SET expires_at = now() + interval '30 days' WHERE id = 1;
        UPDATE sessions SET status = 'Active' WHERE id = 2;
        DELETE FROM sessions WHERE id = 3;
        UPDATE sessions SET seen = 1 WHERE id = 4;
        INSERT INTO sessions VALUES (11, 5, 'Active', now() + interval '30 days');
        SELECT pg_advisory_unlock(4711)
    """)
    result = program.finish(process)
    sessions = result.policies["sessions"]
    kept = [1, 2, 5, 11] if chained else [1, 2, 11]
    assert [key for (key,) in database.execute("SELECT id FROM sessions ORDER BY 1")] == kept
    assert (result.returncode, sessions["deleted"], sessions["undeletable"]) == (0, 6 if chained else 7, 0)
    assert (sessions["blocked"], sessions["backlog"]) == (int(chained), int(chained))


@pytest.mark.parametrize("chained", [True, False], ids=["chains", "no chains"])
def test_what_is_renewed_while_the_run_waits_stays(chained: bool, systems: Database, program: Program) -> None:
    """The run waits for a table that is locked; what that session renewed meanwhile is there afterwards."""
    table, policy = ("identity.refresh_sessions", "refresh") if chained else ("refresh_tokens", "tokens_expired")
    if chained:
        systems.execute(
            f"INSERT INTO {table} (status, updated_at) SELECT 'Revoked', '2020-01-01' FROM generate_series(1, 10) i"
        )
        renewal = f"UPDATE {table} SET status = 'Active', user_agent = 'renewed' WHERE ctid IN ('(0,1)', '(0,10)')"
    else:
        systems.execute(f"INSERT INTO {table} (expires_at) SELECT '2020-01-01' FROM generate_series(1, 10) i")
        renewal = f"UPDATE {table} SET expires_at = 'infinity', user_agent = 'renewed' WHERE id IN (1, 10)"
    service = systems.connect(autocommit=False)
    service.execute(f"LOCK TABLE {table}")
    config = configuration(systems.conninfo, {policy: POLICIES[policy]}, database={"lock_timeout": "1m"})
    process = program.start(config, "--once", "--json")
    waiting = f"SELECT count(*) FROM pg_locks WHERE relation = '{table}'::regclass AND NOT granted"
    until(lambda: systems.value(waiting), "the run waits for the table")
    service.execute(renewal)
    service.commit()
    result = program.finish(process)
    assert (result.returncode, result.policies[policy]["deleted"], result.policies[policy]["backlog"]) == (0, 8, 0)
    assert systems.count(table) == systems.count(table, "user_agent = 'renewed'") == 2
