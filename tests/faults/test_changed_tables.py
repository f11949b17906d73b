"""Tables that are replaced or changed between two batches of a run: what was not judged is not deleted from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from lab import Database, Program, Result, configuration, log
from servers import Proxy

POLICY: dict[str, Any] = {"table": "sessions", "expiry_column": "expires_at", "grace": "0s", "only": {"state": [2]}}
BEFORE: dict[str, Any] = {"table": "before", "expiry_column": "expires_at", "grace": "0s"}
#: Rows in each table, of which ten go before the change.
ROWS = 40

TABLE = f"""
    CREATE TABLE sessions (id bigint PRIMARY KEY, state smallint, expires_at timestamptz);
    CREATE INDEX ON sessions (expires_at);
    INSERT INTO sessions SELECT i, 2, now() - interval '2 days' - i * interval '1 second'
        FROM generate_series(1, {ROWS}) i;
    INSERT INTO sessions SELECT 100 + i, 2, date_trunc('day', now()) + interval '1 day' - interval '1 microsecond'
        FROM generate_series(1, 5) i;
    INSERT INTO sessions SELECT 200 + i, 1, now() - interval '2 days' FROM generate_series(1, 5) i;
    GRANT ALL ON sessions TO retention;
    CREATE FUNCTION leave() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN OLD; END';
    CREATE TRIGGER off BEFORE DELETE ON sessions FOR EACH ROW EXECUTE FUNCTION leave();
    ALTER TABLE sessions DISABLE TRIGGER off;
    CREATE TRIGGER audit BEFORE DELETE ON sessions FOR EACH ROW EXECUTE FUNCTION leave();
    CREATE TABLE before AS TABLE sessions;
    GRANT ALL ON before TO retention;
"""
AWAY = "ALTER TABLE sessions RENAME TO sessions_before;"
SWAPPED = f"""{AWAY}
    CREATE TABLE sessions (LIKE sessions_before INCLUDING ALL); INSERT INTO sessions TABLE sessions_before;
    GRANT ALL ON sessions TO retention;
"""
CHANGES = {
    "swapped for one that is the same": SWAPPED,
    "swapped for one whose live rows hang on old ones": f"""{SWAPPED}
        ALTER TABLE sessions ADD parent bigint REFERENCES sessions ON DELETE CASCADE;
        INSERT INTO sessions SELECT 1000 + id, 1, now() + interval '1 year', id FROM sessions
    """,
    "swapped for one that takes others along": f"""{SWAPPED}
        CREATE TABLE live (session bigint REFERENCES sessions ON DELETE CASCADE);
        INSERT INTO live SELECT id FROM sessions
    """,
    "swapped for a partitioned one": f"""{AWAY}
        CREATE TABLE sessions (LIKE sessions_before) PARTITION BY RANGE (expires_at);
        CREATE TABLE live PARTITION OF sessions DEFAULT; INSERT INTO sessions TABLE sessions_before;
        GRANT ALL ON sessions TO retention
    """,
    "inherited": "CREATE TABLE live () INHERITS (sessions); INSERT INTO live SELECT id + 1000, 2 FROM before",
    "age retyped to a date": "ALTER TABLE sessions ALTER expires_at TYPE date",
    "column of only retyped": "ALTER TABLE sessions ALTER state TYPE numeric",
    "trigger disabled": "ALTER TABLE sessions DISABLE TRIGGER audit",
    "trigger enabled": "ALTER TABLE sessions ENABLE TRIGGER off",
}
#: What a service may do to its table at any time.
HARMLESS = {
    "column added": ["ALTER TABLE sessions ADD device text, ADD seen timestamptz DEFAULT now()"],
    "index made": ["CREATE INDEX CONCURRENTLY ON sessions (state, expires_at)"],
    "index rebuilt": ["REINDEX INDEX CONCURRENTLY sessions_expires_at_idx"],
    "another column retyped": ["ALTER TABLE sessions ALTER id TYPE numeric"],
}


@pytest.fixture
def run(database: Database, proxy: Proxy, program: Program) -> Callable[..., Result]:
    """A run in batches of ten; once the first has been committed it waits while this SQL is executed."""
    database.execute(TABLE)

    def perform(statements: list[str], *, earlier: bool = False) -> Result:
        def change() -> None:
            for statement in statements:
                database.execute(statement)
            database.execute("CREATE TABLE found AS TABLE sessions")

        proxy.at("pause", 1, change)
        policies = {"before": BEFORE, "sessions": POLICY} if earlier else {"sessions": POLICY}
        config = configuration(proxy.conninfo(database), policies, batch_size=10)
        result = program.inside(config, "--once", "--json")
        assert proxy.happened == ["pause"], result.output
        return result

    return perform


@pytest.mark.parametrize("earlier", [False, True], ids=["in its turn", "in the turn of an earlier policy"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_nothing_goes_from_a_table_that_was_changed(
    change: str, earlier: bool, database: Database, run: Callable[..., Result]
) -> None:
    """The policy fails and says so, its table is as the change left it, and no count of it is guessed."""
    result = run([change], earlier=earlier)
    sessions = result.policies["sessions"]
    assert (result.returncode, sessions["deleted"], sessions["stop_reason"]) == (1, 0 if earlier else 10, "failed")
    assert "were changed while the run was on it" in sessions["error"]["message"]
    (failed,) = [line for line in log(result.stderr) if line.event == "phase_failed"]
    assert failed.fields["error"] == sessions["error"]["message"]
    assert database.execute("TABLE found EXCEPT ALL TABLE sessions") == []
    if database.value("SELECT to_regclass('live') IS NOT NULL"):
        assert database.count("live") >= ROWS
    if earlier:
        assert (result.policies["before"]["error"], database.count("before", "state = 1")) == (None, 0)
    assert sessions["backlog"] in (None, database.count("found", f"id <= {ROWS}"))


@pytest.mark.parametrize("changes", HARMLESS.values(), ids=HARMLESS)
def test_what_a_service_does_online_ends_no_run(
    changes: list[str], database: Database, run: Callable[..., Result]
) -> None:
    """Columns and indexes that come between two batches, or a type of no concern: all that is to go does."""
    result = run(changes)
    sessions = result.policies["sessions"]
    assert (result.returncode, sessions["deleted"], sessions["backlog"]) == (0, ROWS, 0), result.output
    assert database.execute("SELECT id::int FROM sessions ORDER BY id") == [
        (first + i,) for first in (100, 200) for i in range(1, 6)
    ]
