"""Databases whose operators, functions, triggers and keys are not what they seem."""

from __future__ import annotations

import pathlib

import pytest
from lab import Database, Program, configuration, until

SESSIONS = {"sessions": {"table": "sessions", "age_column": "updated_at", "retention": "90d"}}
OLD, YOUNG = "now() - interval '100 days'", "now() - interval '1 day'"


@pytest.mark.parametrize("action", ["CASCADE", "SET NULL", "RESTRICT", None])
def test_keys_are_compared_as_the_key_compares(action: str | None, database: Database, program: Program) -> None:
    """A case-insensitive key, its operator in a schema that nobody looks in: K1 is what the row with k1 names."""
    key = f"REFERENCES sessions ON DELETE {action}" if action else ""
    database.execute(f"""
        CREATE SCHEMA ext; CREATE EXTENSION citext SCHEMA ext; GRANT USAGE ON SCHEMA ext TO retention;
        CREATE TABLE sessions (id ext.citext PRIMARY KEY, parent ext.citext {key}, updated_at timestamptz);
        CREATE INDEX ON sessions (parent);
        INSERT INTO sessions VALUES
            ('K1', NULL, {OLD}), ('live', 'k1', {YOUNG}), ('K2', NULL, {OLD}), ('c', 'k2', {OLD});
    """)
    database.grant("sessions", select="id, parent, updated_at")
    policies = {"sessions": {**SESSIONS["sessions"], "parent_column": "parent"}}
    sessions = program.once(configuration(database.conninfo, policies)).policies["sessions"]
    assert (sessions["deleted"], sessions["blocked"]) == (2, 1)
    assert database.execute("SELECT id::text, parent::text FROM sessions ORDER BY 1") == [("K1", None), ("live", "k1")]


def test_functions_and_operators_of_others_are_not_used(database: Database, program: Program) -> None:
    """What somebody puts into public under a common name is not called by the job, and changes nothing for it."""
    database.execute(f"""
        CREATE TABLE calls (what text); GRANT INSERT ON calls TO PUBLIC;
        CREATE FUNCTION public.pg_relation_size(oid) RETURNS bigint LANGUAGE sql AS
            $$ INSERT INTO calls VALUES ('size'); SELECT 0::bigint $$;
        CREATE FUNCTION public.unnest(smallint[]) RETURNS SETOF smallint LANGUAGE sql AS
            $$ INSERT INTO calls VALUES ('unnest'); SELECT 1::smallint $$;
        CREATE FUNCTION public.format(text, name) RETURNS text LANGUAGE sql AS
            $$ INSERT INTO calls VALUES ('format'); SELECT 'x' $$;
        CREATE FUNCTION public.never(varchar, varchar) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$ SELECT false $$;
        CREATE TABLE sessions (id varchar PRIMARY KEY, parent varchar REFERENCES sessions, updated_at timestamptz);
        CREATE INDEX ON sessions (parent);
        CREATE OPERATOR public.= (FUNCTION = public.never, LEFTARG = varchar, RIGHTARG = varchar);
        INSERT INTO sessions VALUES ('held', NULL, {OLD}), ('live', 'held', {YOUNG}), ('gone', NULL, {OLD})
    """)
    database.grant("sessions", select="id, parent, updated_at")
    sessions = program.once(configuration(database.conninfo, SESSIONS)).policies["sessions"]
    assert (sessions["deleted"], sessions["blocked"], sessions["stop_reason"]) == (1, 1, "drained")
    assert database.execute("SELECT * FROM calls") == []


def test_a_cascade_that_appears_in_mid_run_takes_nothing_along(database: Database, program: Program) -> None:
    """The table is judged when the run begins; a foreign key that is added later ends the policy before it can bite."""
    database.execute(f"""
        CREATE TABLE sessions (id int PRIMARY KEY, updated_at timestamptz);
        INSERT INTO sessions SELECT i, {OLD} FROM generate_series(1, 300) i
    """)
    database.grant("sessions", select="id, updated_at")
    process = program.start(configuration(database.conninfo, SESSIONS, batch_size=100, pause="1s"), "--once")
    until(lambda: database.count("sessions") < 300, "the first batch")
    database.execute("""
        CREATE TABLE live (id int REFERENCES sessions ON DELETE CASCADE);
        INSERT INTO live SELECT id FROM sessions
    """)
    alive = database.count("live")
    result = program.finish(process)
    assert (result.returncode, database.count("live"), alive > 0) == (1, alive, True)
    assert "were changed while the run was on it" in result.stdout


def test_rows_that_move_behind_the_walk_are_found(database: Database, program: Program) -> None:
    """An update of every row appends them all to the table, where a walk by pages has no page; they go all the same."""
    database.execute(f"""
        CREATE TABLE sessions (id int PRIMARY KEY, updated_at timestamptz, seen int);
        INSERT INTO sessions SELECT i, {OLD} FROM generate_series(1, 3000) i
    """)
    database.grant("sessions", select="id, updated_at")
    process = program.start(
        configuration(database.conninfo, SESSIONS, batch_size=500, pause="500ms"), "--once", "--json"
    )
    until(lambda: database.count("sessions") < 3000, "the first batch")
    database.execute("UPDATE sessions SET seen = 1")
    sessions = program.finish(process).policies["sessions"]
    assert (sessions["deleted"], sessions["backlog"], database.count("sessions")) == (3000, 0, 0)


@pytest.mark.parametrize("state", ["40001", "55P03", "57014", "55000", "25006", "08006", "53400", "P0001", "22012"])
def test_a_row_that_its_trigger_refuses_is_left_whatever_the_trigger_calls_it(
    state: str, database: Database, program: Program
) -> None:
    """One row is undeletable, the others of its batch and those after it go."""
    database.execute(f"""
        CREATE TABLE sessions (id int PRIMARY KEY, updated_at timestamptz);
        CREATE INDEX ON sessions (updated_at);
        INSERT INTO sessions SELECT i, {OLD} + i * interval '1 second' FROM generate_series(1, 50) i;
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN
                IF OLD.id = 17 THEN RAISE EXCEPTION 'no' USING ERRCODE = '{state}'; END IF;
                RETURN OLD;
            END $$;
        CREATE TRIGGER refuse BEFORE DELETE ON sessions FOR EACH ROW EXECUTE FUNCTION refuse()
    """)
    database.grant("sessions", select="id, updated_at")
    result = program.once(configuration(database.conninfo, SESSIONS, batch_size=20))
    sessions = result.policies["sessions"]
    assert (sessions["deleted"], sessions["undeletable"], sessions["backlog"]) == (49, 1, 1), result.output
    assert (result.returncode, sessions["error"]["sqlstate"]) == (1, state)
    assert database.execute("SELECT id FROM sessions") == [(17,)]


@pytest.mark.parametrize("refusal", ["RETURN NULL", "RAISE EXCEPTION 'no'"])
@pytest.mark.parametrize("indexed", [True, False], ids=["index", "no index"])
def test_what_an_undeletable_row_holds_is_blocked(
    indexed: bool, refusal: str, database: Database, program: Program
) -> None:
    """Two chains of ten whose newest rows cannot go: 2 undeletable, 18 blocked, nothing left for the next night."""
    database.execute(f"""
        CREATE TABLE sessions (id int PRIMARY KEY, parent int REFERENCES sessions, updated_at timestamptz);
        CREATE INDEX ON sessions (parent);
        INSERT INTO sessions SELECT i, nullif(i - 1, (i - 1) / 10 * 10), {OLD} + i * interval '1 hour'
            FROM generate_series(1, 100) i;
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN
                IF OLD.id IN (10, 20) THEN {refusal}; END IF;
                RETURN OLD;
            END $$;
        CREATE TRIGGER refuse BEFORE DELETE ON sessions FOR EACH ROW EXECUTE FUNCTION refuse()
    """)
    if indexed:
        database.execute("CREATE INDEX ON sessions (updated_at)")
    database.grant("sessions", select="id, parent, updated_at")
    result = program.once(configuration(database.conninfo, SESSIONS, batch_size=30))
    sessions = result.policies["sessions"]
    counts = [sessions[key] for key in ("deleted", "backlog", "blocked", "undeletable")]
    assert (result.returncode, counts, database.count("sessions")) == (1, [80, 20, 18, 2], 20), result.output


def test_a_connection_lost_inside_a_trigger_tells_no_row(database: Database, program: Program) -> None:
    """The server's last words quote the statement that it was in, and the driver hands them on; we do not."""
    canary = "+79161234567"
    database.execute(f"""
        CREATE TABLE sessions (id int PRIMARY KEY, phone text, updated_at timestamptz);
        INSERT INTO sessions VALUES (1, '{canary}', {OLD});
        CREATE FUNCTION audit() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN
                EXECUTE format('SELECT pg_terminate_backend(pg_backend_pid()), pg_sleep(1), %L', OLD.phone);
                RETURN OLD;
            END $$;
        ALTER FUNCTION audit() SECURITY DEFINER;
        CREATE TRIGGER audit BEFORE DELETE ON sessions FOR EACH ROW EXECUTE FUNCTION audit()
    """)
    database.grant("sessions", select="id, updated_at")
    result = program.once(configuration(database.conninfo, SESSIONS))
    assert (result.returncode, database.count("sessions")) == (1, 1)
    assert "connection to the server was lost" in result.output
    assert canary not in result.output


LAST = '[policy.sessions]\nnow = {0}\ncutoff = {0}\nuptime = {1}\nboot_id = ""\n'
STATES = {
    "nesting": b"a = " + b"[" * 5000,
    "uptime without end": LAST.format("2026-01-01T00:00:00Z", "-inf").encode(),
    "a huge number": LAST.format("2026-01-01T00:00:00Z", "9" * 400).encode(),
    "the year one": LAST.format("0001-01-01T00:00:00+14:00", "1").encode(),
    "no table": b"policy = 1",
    "bytes": b"\xff\x00",
}


@pytest.mark.parametrize("content", STATES.values(), ids=STATES)
def test_a_state_file_of_any_content_stops_no_run(
    content: bytes, systems: Database, program: Program, tmp_path: pathlib.Path
) -> None:
    """It is said that the file cannot be used, the purge goes on, and the next run finds a good one."""
    policies = {"sessions": {"table": "refresh_tokens", "expiry_column": "expires_at", "grace": "0s"}}
    (tmp_path / "state.toml").write_bytes(content)
    systems.execute(f"INSERT INTO refresh_tokens (expires_at) VALUES ({OLD})")
    result = program(configuration(systems.conninfo, policies))
    assert (result.returncode, systems.count("refresh_tokens"), result.stderr) == (0, 0, "")
    assert "state not read" in result.stdout
    assert "state not read" not in program(None).stdout


def test_a_consent_is_remembered_whatever_the_clock_was(
    systems: Database, program: Program, tmp_path: pathlib.Path
) -> None:
    """A last run that claims to be in the future does not keep --once from being remembered."""
    policies = {"sessions": {"table": "refresh_tokens", "expiry_column": "expires_at", "grace": "0s"}}
    (tmp_path / "state.toml").write_text(
        '[policy.sessions]\nnow = 2999-01-01T00:00:00Z\ncutoff = 1999-01-01T00:00:00Z\nuptime = 1.0\nboot_id = ""\n'
    )
    config = configuration(systems.conninfo, policies)
    assert [program(config, *verb).returncode for verb in ([], ["--once"], [])] == [1, 0, 0]
