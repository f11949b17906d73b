"""A thousand old rows, of which another table holds three and a trigger keeps one; on any server."""

from __future__ import annotations

from typing import Any

from lab import Database, Program, Result, configuration, log, until

HELD, GUARDED = (300, 301, 900), 500
#: In the trigger's message and in the row that it guards; never to be told.
CANARY = "+79031234567"
#: How the database may refuse a row.
GUARDS = {
    "before": "CREATE TRIGGER keeper BEFORE DELETE ON sessions FOR EACH ROW EXECUTE FUNCTION keep_it()",
    "after": "CREATE TRIGGER keeper AFTER DELETE ON sessions FOR EACH ROW EXECUTE FUNCTION keep_it()",
    "deferred": (
        "CREATE CONSTRAINT TRIGGER keeper AFTER DELETE ON sessions DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW EXECUTE FUNCTION keep_it()"
    ),
}
AGE: dict[str, Any] = {"age_column": "at", "retention": "30d"}
POLICIES = {"probe": {"table": "sessions", **AGE}, "beside": {"table": "beside", **AGE}}


def prepare(database: Database, *, clause: str, readable: bool, indexed: bool, guard: str | None = None) -> None:
    """The rows, the table that names three of them through `legal_hold`, and a table of the policy after it."""
    database.execute(
        f"""
        CREATE TABLE sessions (id int PRIMARY KEY, at timestamptz, phone text);
        INSERT INTO sessions SELECT i, now() - interval '40 days' - i * interval '1 second', '{CANARY}'
            FROM generate_series(1, 1000) i;
        INSERT INTO sessions VALUES (2000, now(), '');
        CREATE TABLE holds (session int CONSTRAINT legal_hold REFERENCES sessions {clause});
        CREATE INDEX ON holds (session);
        INSERT INTO holds VALUES {", ".join(f"({key})" for key in HELD)};
        CREATE TABLE beside AS SELECT now() - interval '40 days' AS at;
        GRANT ALL ON beside TO retention;
        CREATE FUNCTION keep_it() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN
                IF OLD.id = {GUARDED} THEN RAISE 'kept for %', OLD.phone; END IF;
                RETURN OLD;
            END $$
        """
    )
    database.grant("sessions", select="id, at")
    if readable:
        database.execute("GRANT SELECT (session) ON holds TO retention")
    if indexed:
        database.execute("CREATE INDEX ON sessions (at)")
    if guard:
        database.execute(GUARDS[guard])


def purge(program: Program, database: Database) -> Result:
    return program.inside(configuration(database.conninfo, POLICIES), "--once", "--json", "--verbose")


def assert_told(result: Result, database: Database, *, indexed: bool, guarded: bool) -> None:
    """What can go is gone, the rest is counted and explained without a row's value, the next policy is done."""
    probe, beside = result.policies["probe"], result.policies["beside"]
    lines = [line for line in log(result.stderr) if line.fields.get("phase") == "probe"]
    ended = lines[-1]
    kept = len(HELD) + guarded
    assert lines[0].fields["walk"] == ("index" if indexed else "pages")
    assert (probe["deleted"], probe["blocked"], probe["undeletable"]) == (1000 - kept, 3, int(guarded)), result.output
    assert probe["backlog"] == kept
    assert ended.fields["blockedBy"] == "legal_hold"
    assert result.returncode == int(guarded)
    if guarded:
        assert (ended.event, ended.fields["sqlstate"]) == ("phase_failed", "P0001")
        assert probe["error"] == {"sqlstate": "P0001", "message": ended.fields["error"]}
        assert "function keep_it" in ended.fields["error"]
        assert "kept for" not in result.output
    else:
        assert (ended.event, probe["error"], probe["stop_reason"]) == ("phase_completed", None, "drained")
    assert CANARY not in result.output
    left = {key for (key,) in database.execute("SELECT id FROM sessions")}
    assert left == {*HELD, 2000} | ({GUARDED} if guarded else set())
    assert (beside["deleted"], beside["stop_reason"], database.count("beside")) == (1, "drained", 0)


def half_held(database: Database, program: Program, rows: int, *, readable: bool, indexed: bool) -> tuple[int, int]:
    """Purge so many old rows of which every other one is held; the transactions and the buffers that it took."""
    database.execute(
        f"""
        DROP TABLE IF EXISTS holds, sessions;
        CREATE TABLE sessions (id int PRIMARY KEY, at timestamptz);
        INSERT INTO sessions SELECT i, now() - interval '40 days' - i * interval '1 second'
            FROM generate_series(1, {rows}) i;
        CREATE TABLE holds (session int CONSTRAINT legal_hold REFERENCES sessions);
        CREATE INDEX ON holds (session);
        INSERT INTO holds SELECT id FROM sessions WHERE id % 2 = 0;
        ANALYZE sessions, holds
        """
    )
    database.grant("sessions", select="id, at")
    if readable:
        database.execute("GRANT SELECT (session) ON holds TO retention")
    if indexed:
        database.execute("CREATE INDEX ON sessions (at)")
    before = _counters(database)
    result = program.inside(configuration(database.conninfo, {"probe": POLICIES["probe"]}), "--once", "--json")
    # its counters are complete when its backend is gone
    gone = "SELECT count(*) = 0 FROM pg_stat_activity WHERE usename = 'retention' AND datname = current_database()"
    until(lambda: database.value(gone), "the end of the job's backend")
    after = _counters(database)
    probe = result.policies["probe"]
    assert (result.returncode, probe["error"], probe["stop_reason"]) == (0, None, "drained"), result.output[-2000:]
    assert (probe["deleted"], probe["blocked"], probe["backlog"]) == (rows // 2, rows // 2, rows // 2)
    assert database.count("sessions") == database.count("sessions", "id % 2 = 0") == rows // 2
    return after[0] - before[0], after[1] - before[1]


def _counters(database: Database) -> tuple[int, int]:
    """Transactions and buffers of this database so far."""
    database.execute("SELECT pg_stat_force_next_flush()")
    ((transactions, buffers),) = database.execute(
        "SELECT xact_commit + xact_rollback, blks_hit + blks_read FROM pg_stat_database"
        " WHERE datname = current_database()"
    )
    return int(transactions), int(buffers)
