"""Databases whose operators, functions, triggers and keys are not what they seem."""

from __future__ import annotations

import os
import pathlib
import stat
from typing import Any

import pytest
from lab import Database, Program, configuration, log
from psycopg.conninfo import make_conninfo
from servers import Proxy
from statements import log_statements, skeleton, statements

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
    sessions = program.inside(configuration(database.conninfo, policies), "--once", "--json").policies["sessions"]
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
    sessions = program.inside(configuration(database.conninfo, SESSIONS), "--once", "--json").policies["sessions"]
    assert (sessions["deleted"], sessions["blocked"], sessions["stop_reason"]) == (1, 1, "drained")
    assert database.execute("SELECT * FROM calls") == []


@pytest.mark.parametrize("schema", ["public", "auth"])
def test_operators_for_a_domain_change_nothing(schema: str, database: Database, program: Program) -> None:
    """Where a column's type is a domain, somebody's operator for it would be the better match: it is not looked at."""
    database.execute(f"""
        CREATE SCHEMA auth; GRANT USAGE ON SCHEMA auth TO retention;
        CREATE DOMAIN moment AS timestamptz; CREATE DOMAIN state AS smallint; CREATE DOMAIN kind AS text;
        CREATE TABLE auth.sessions (id int PRIMARY KEY, state state, kind kind, updated_at moment);
        CREATE INDEX ON auth.sessions (updated_at);
        INSERT INTO auth.sessions VALUES (1, 2, 'a', {OLD}), (2, 1, 'a', {OLD}), (3, 2, 'b', {OLD}),
            (4, 2, 'a', {YOUNG});
        GRANT ALL ON auth.sessions TO retention
    """)
    planted = (("moment", "timestamptz"), ("state", "bigint"), ("kind", "text"))
    for left, right in planted:
        database.execute(f"""
            CREATE FUNCTION {schema}.yes({left}, {right}) RETURNS boolean LANGUAGE sql AS 'SELECT true';
            CREATE OPERATOR {schema}.< (LEFTARG = {left}, RIGHTARG = {right}, FUNCTION = {schema}.yes);
            CREATE OPERATOR {schema}.= (LEFTARG = {left}, RIGHTARG = {right}, FUNCTION = {schema}.yes)
        """)
    only = {"state": [2], "kind": ["a"]}
    policies = {"sessions": {**SESSIONS["sessions"], "table": "auth.sessions", "only": only}}
    result = program.inside(configuration(database.conninfo, policies), "--once", "--json")
    sessions = result.policies["sessions"]
    assert (result.returncode, sessions["deleted"], sessions["backlog"]) == (0, 1, 0), result.output
    assert database.execute("SELECT id FROM auth.sessions ORDER BY 1") == [(2,), (3,), (4,)]


@pytest.mark.parametrize("own", [True, False], ids=["its own table", "another table"])
def test_keys_between_collations_hold_what_they_refer_to(own: bool, database: Database, program: Program) -> None:
    """The server compares as the key that is referred to does; so do we, and the rest goes."""
    database.execute(f"""
        CREATE TABLE sessions (id text COLLATE "C" PRIMARY KEY, parent text COLLATE "POSIX", updated_at timestamptz);
        CREATE INDEX ON sessions (parent);
        CREATE TABLE holds (session text COLLATE "POSIX" REFERENCES sessions);
        GRANT ALL ON holds TO retention;
        INSERT INTO sessions SELECT 'a' || i, NULL, {OLD} FROM generate_series(1, 10) i
    """)
    if own:
        database.execute("ALTER TABLE sessions ADD FOREIGN KEY (parent) REFERENCES sessions")
        database.execute(f"INSERT INTO sessions VALUES ('live', 'a3', {YOUNG})")
    else:
        database.execute("INSERT INTO holds VALUES ('a3')")
    database.grant("sessions", select="id, parent, updated_at")
    config = configuration(database.conninfo, SESSIONS)
    dry = program.inside(config, "--dry-run", "--json").policies["sessions"]
    result = program.inside(None, "--once", "--json")
    sessions = result.policies["sessions"]
    assert (dry["would_delete"], dry["blocked"]) == (9, 1)
    assert (result.returncode, sessions["deleted"], sessions["blocked"]) == (0, 9, 1), result.output
    assert database.execute("SELECT id FROM sessions WHERE id <> 'live'") == [("a3",)]


def test_a_cascade_that_appears_in_mid_run_takes_nothing_along(
    database: Database, program: Program, proxy: Proxy
) -> None:
    """The table is judged when the run begins; a foreign key that is added later ends the policy before it can bite."""
    database.execute(f"""
        CREATE TABLE sessions (id int PRIMARY KEY, updated_at timestamptz);
        INSERT INTO sessions SELECT i, {OLD} FROM generate_series(1, 300) i
    """)
    database.grant("sessions", select="id, updated_at")
    change = """
        CREATE TABLE live (id int REFERENCES sessions ON DELETE CASCADE);
        INSERT INTO live SELECT id FROM sessions
    """
    proxy.at("pause", 1, lambda: database.execute(change))
    result = program.inside(configuration(proxy.conninfo(database), SESSIONS, batch_size=100), "--once")
    assert (result.returncode, database.count("live")) == (1, 200), result.output
    assert "were changed while the run was on it" in result.stdout


def test_rows_that_move_behind_the_walk_are_found(database: Database, program: Program, proxy: Proxy) -> None:
    """An update of every row appends them all to the table, where a walk by pages has no page; they go all the same."""
    database.execute(f"""
        CREATE TABLE sessions (id int PRIMARY KEY, updated_at timestamptz, seen int);
        INSERT INTO sessions SELECT i, {OLD} FROM generate_series(1, 3000) i
    """)
    database.grant("sessions", select="id, updated_at")
    proxy.at("pause", 1, lambda: database.execute("UPDATE sessions SET seen = 1"))
    result = program.inside(configuration(proxy.conninfo(database), SESSIONS, batch_size=500), "--once", "--json")
    assert proxy.happened == ["pause"]
    sessions = result.policies["sessions"]
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
    result = program.inside(configuration(database.conninfo, SESSIONS, batch_size=20), "--once", "--json")
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
    result = program.inside(configuration(database.conninfo, SESSIONS, batch_size=30), "--once", "--json")
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
    result = program.inside(configuration(database.conninfo, SESSIONS), "--once", "--json")
    assert (result.returncode, database.count("sessions")) == (1, 1)
    assert "connection to the server was lost" in result.output
    assert canary not in result.output


def test_a_trigger_in_c_that_refuses_a_row_keeps_that_row_alone(database: Database, program: Program) -> None:
    """Its errors have no context that would tell them from the statement's own, and they quote the row: 99 go."""
    available = "SELECT count(*) FROM pg_available_extensions WHERE name = 'lo'"
    if not database.value(available):
        pytest.skip("this server comes without the extension lo")
    canary = 424242  # of a large object that is not there
    database.execute(f"""
        CREATE EXTENSION lo;
        CREATE TABLE sessions (id int PRIMARY KEY, image lo, updated_at timestamptz);
        CREATE INDEX ON sessions (updated_at);
        INSERT INTO sessions SELECT i, NULL, {OLD} FROM generate_series(1, 100) i;
        UPDATE sessions SET image = {canary} WHERE id = 50;
        CREATE TRIGGER image BEFORE UPDATE OR DELETE ON sessions FOR EACH ROW EXECUTE FUNCTION lo_manage(image)
    """)
    database.grant("sessions", select="id, updated_at")
    result = program.inside(configuration(database.conninfo, SESSIONS), "--once", "--json", "--verbose")
    sessions = result.policies["sessions"]
    assert (result.returncode, sessions["deleted"], sessions["undeletable"], sessions["backlog"]) == (1, 99, 1, 1)
    assert (sessions["error"]["sqlstate"], str(canary) in result.output) == ("42704", False)
    assert database.execute("SELECT id FROM sessions") == [(50,)]


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
    result = program.inside(configuration(systems.conninfo, policies))
    assert (result.returncode, systems.count("refresh_tokens"), result.stderr) == (0, 0, "")
    assert "state not read" in result.stdout
    assert "state not read" not in program.inside(None).stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a device file")
def test_a_state_file_that_is_a_device_stays_one(systems: Database, program: Program, tmp_path: pathlib.Path) -> None:
    """A state of /dev/null, say: neither read nor replaced by a file; the purge goes on and says so."""
    device = tmp_path / "null"
    os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    systems.execute(f"INSERT INTO refresh_tokens (expires_at) VALUES ({OLD})")
    policies = {"sessions": {"table": "refresh_tokens", "expiry_column": "expires_at", "grace": "0s"}}
    result = program.inside(configuration(systems.conninfo, policies, metrics={"state": str(device)}))
    assert (result.returncode, systems.count("refresh_tokens")) == (0, 0), result.output
    assert "state not read" in result.stdout
    assert stat.S_ISCHR(device.stat().st_mode)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.toml", "null"]


def test_a_consent_is_remembered_whatever_the_clock_was(
    systems: Database, program: Program, tmp_path: pathlib.Path
) -> None:
    """A last run that claims to be in the future does not keep --once from being remembered."""
    policies = {"sessions": {"table": "refresh_tokens", "expiry_column": "expires_at", "grace": "0s"}}
    (tmp_path / "state.toml").write_text(
        '[policy.sessions]\nnow = 2999-01-01T00:00:00Z\ncutoff = 1999-01-01T00:00:00Z\nuptime = 1.0\nboot_id = ""\n'
    )
    config = configuration(systems.conninfo, policies)
    assert [program.inside(config, *verb).returncode for verb in ([], ["--once"], [])] == [1, 0, 0]


HARMLESS = [f"n{number}" for number in range(12)]
HOSTILE = [
    'x"; DROP TABLE canary; --',
    "'); DELETE FROM canary; --",
    "\\'; TRUNCATE canary; --",
    "$$; DROP TABLE canary; $$",
    "*/ DROP TABLE canary; /*",
    "%(bound)s%s%%(%b",
    "{table}{0}{{}}",
    "a\nDROP TABLE canary;\r\n\t--",
    "\x1b[2J\x07\x85\u2028",
    'U&"\\0022; DROP TABLE canary"',
    '""""""',
    "e'\\''; DROP TABLE canary; --",
]


def name_everything(database: Database, names: list[str]) -> dict[str, dict[str, Any]]:
    """For each name a schema in which everything is called so, with 3 rows to go and 2 that stay; their policies."""
    policies = {}
    for number, given in enumerate(names):

        def quote(name: str) -> str:
            return '"' + name.replace('"', '""') + '"'

        def literal(text: str) -> str:
            return " E'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

        schema, age, status, parent, label = (f"{given}{suffix}" for suffix in "satpl")
        table = f"{quote(schema)}.{quote(given)}"
        database.execute(f"""
            CREATE SCHEMA {quote(schema)};
            CREATE TYPE {table} AS ENUM ('live', {literal(label)});
            CREATE TABLE {quote(schema)}.{quote(given + "1")} (id int PRIMARY KEY, {quote(age)} timestamptz,
                {quote(status)} {table}, {quote(parent)} int CONSTRAINT {quote(given)}
                REFERENCES {quote(schema)}.{quote(given + "1")});
            CREATE INDEX {quote(given + "2")} ON {quote(schema)}.{quote(given + "1")} ({quote(parent)});
            CREATE TABLE {quote(schema)}.{quote(given + "3")} ({quote(parent)} int CONSTRAINT {quote(given + "h")}
                REFERENCES {quote(schema)}.{quote(given + "1")});
            INSERT INTO {quote(schema)}.{quote(given + "1")} VALUES (1, {OLD}, {literal(label)}, NULL),
                (2, {OLD}, {literal(label)}, 1), (3, {OLD}, {literal(label)}, NULL), (4, {OLD}, 'live', NULL),
                (5, {OLD}, {literal(label)}, NULL);
            INSERT INTO {quote(schema)}.{quote(given + "3")} VALUES (5);
            GRANT USAGE ON SCHEMA {quote(schema)} TO retention;
            GRANT ALL ON ALL TABLES IN SCHEMA {quote(schema)} TO retention
        """)
        policies[f"p{number}"] = {
            "table": f"{quote(schema)}.{quote(given + '1')}",
            "age_column": age,
            "retention": "30d",
            "only": {status: [label]},
            "parent_column": parent,
        }
    return policies


def test_no_sql_but_ours_is_run_whatever_things_are_called(database: Database, program: Program) -> None:
    """Names and values that would end a statement and begin another: the statements are those of harmless names."""
    database.execute("CREATE TABLE canary AS SELECT 1; GRANT ALL ON canary TO retention")
    run: dict[str, Any] = {}
    for kind, names in {"harmless": HARMLESS, "hostile": HOSTILE}.items():
        policies = name_everything(database, names)
        config = configuration(database.conninfo, policies)
        offset = log_statements(database)
        dry = program.inside(config, "--dry-run", "--json")
        check = program.inside(None, "--check", "--json")
        result = program.inside(None, "--once", "--json")
        run[kind] = [skeleton(statement) for statement in statements(database, offset)]
        assert [policy["would_delete"] for policy in dry.policies.values()] == [3] * len(names), dry.output
        assert check.returncode == 0, check.output
        assert [policy["deleted"] for policy in result.policies.values()] == [3] * len(names), result.output
        ended = [line for line in log(result.stderr) if line.event == "phase_completed"]
        assert [line.fields["blockedBy"] for line in ended] == [f"{name}h" for name in names]
    assert len(run["harmless"]) > 12 * len(HARMLESS)
    assert run["hostile"] == run["harmless"]
    assert not any("canary" in statement for statement in run["hostile"])
    assert database.count("canary") == 1


@pytest.mark.parametrize("place", ["table", "schema", "age_column", "only", "parent_column"])
def test_what_is_not_there_is_named_on_one_line(place: str, systems: Database, program: Program) -> None:
    """A hostile name of nothing: that policy fails, its line is one line, and a terminal is not obeyed."""
    systems.execute("CREATE TABLE canary AS SELECT 1; GRANT ALL ON canary TO retention")
    systems.execute(f"INSERT INTO refresh_tokens (expires_at) VALUES ({OLD})")
    good: dict[str, Any] = {"table": "refresh_tokens", "age_column": "expires_at", "retention": "30d"}
    policies = {}
    for number, name in enumerate(HOSTILE):
        quoted = '"' + name.replace('"', '""') + '"'
        changed: dict[str, dict[str, Any]] = {
            "table": {"table": quoted},
            "schema": {"table": f"{quoted}.refresh_tokens"},
            "age_column": {"age_column": name},
            "only": {"only": {name: [name]}},
            "parent_column": {"parent_column": name},
        }
        policies[f"p{number}"] = {**good, **changed[place]}
    offset = log_statements(systems)
    result = program.inside(configuration(systems.conninfo, {**policies, "good": good}), "--once", "--json")
    dry = program.inside(None, "--dry-run")
    failed = [line for line in log(result.stderr) if line.event == "phase_failed"]
    assert [line.fields["phase"] for line in failed] == list(policies)
    assert (result.returncode, result.policies["good"]["deleted"], systems.count("canary")) == (1, 1, 1)
    assert not any("canary" in skeleton(statement) for statement in statements(systems, offset))
    assert [line.partition(":")[0] for line in dry.stdout.splitlines()] == [*policies, "good"]
    assert all(text.isprintable() for text in dry.stdout.split("\n"))


MONSTER = "'\"; DROP TABLE canary; --%s" * 400  # ten thousand characters


@pytest.mark.parametrize(
    "changed",
    [
        {"table": f'"{MONSTER}"'},
        {"age_column": MONSTER},
        {"only": {MONSTER: [True]}},
        {"parent_column": MONSTER},
        {"title": MONSTER + "\n"},
        {"retention": MONSTER},
        {"table": 'a"\0b'},
        {"age_column": "\0"},
        {"only": {"is_revoked\0": [True]}},
        {"only": {"token_hash": ["\0"]}},
        {"title": "\0"},
    ],
    ids=lambda changed: f"{next(iter(changed))}{' NUL' if chr(0) in str(changed.values()) else ''}",
)
def test_monsters_are_refused_unread(changed: dict[str, Any], systems: Database, program: Program) -> None:
    """NUL and ten thousand characters where a name is wanted: exit status 78, one line, which does not quote them."""
    systems.execute(f"INSERT INTO refresh_tokens (expires_at) VALUES ({OLD})")
    policy = {"table": "refresh_tokens", "age_column": "expires_at", "retention": "30d", **changed}
    result = program.inside(configuration(systems.conninfo, {"monster": policy}), "--once")
    assert (result.returncode, systems.count("refresh_tokens")) == (78, 1)
    assert len(result.stderr.splitlines()) == len(result.stdout.splitlines()) == 1
    assert "canary" not in result.output or next(iter(changed)) == "only"
    assert all(text.isprintable() for text in result.output.split("\n"))


def test_monsters_that_are_values_are_only_values(systems: Database, program: Program) -> None:
    """A title and an allowed value of ten thousand characters: what has that value goes, and nothing else happens."""
    systems.execute("CREATE TABLE canary AS SELECT 1; GRANT ALL ON canary TO retention")
    systems.execute("GRANT SELECT (token_hash) ON refresh_tokens TO retention")
    systems.execute(f"INSERT INTO refresh_tokens (token_hash, expires_at) VALUES (%s, {OLD}), ('x', {OLD})", MONSTER)
    policy = {
        "title": MONSTER,
        "table": "refresh_tokens",
        "age_column": "expires_at",
        "retention": "30d",
        "only": {"token_hash": [MONSTER, "%(bound)s"]},
    }
    offset = log_statements(systems)
    result = program.inside(configuration(systems.conninfo, {"monster": policy}), "--once", "--json")
    assert (result.returncode, result.policies["monster"]["deleted"]) == (0, 1), result.output
    assert systems.execute("SELECT token_hash FROM refresh_tokens") == [("x",)]
    assert not any("canary" in statement for statement in statements(systems, offset))
    assert systems.count("canary") == 1


@pytest.mark.parametrize("name", [*HOSTILE, MONSTER], ids=lambda name: ascii(name[:20]))
def test_a_hostile_place_to_connect_to_is_one_clear_line(name: str, systems: Database, program: Program) -> None:
    """As database, user, host or policy to run: 69 or a usage error, one line, and a terminal is not obeyed."""
    for keyword in ("dbname", "user", "host"):
        given = {"host": str(systems.server.directory), "dbname": systems.name, "user": "retention", keyword: name}
        program.write(configuration(make_conninfo(**given)))
        result = program.inside(None, "--dry-run")
        assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (69, "", 1), keyword
        check = program.inside(None, "--check")
        assert (check.returncode, check.stderr) == (69, ""), keyword
        finding, remedy, _counts = check.stdout.splitlines()
        assert (finding.partition(":")[0], remedy.partition(":")[0].strip()) == ("error", "remedy")
        assert all(text.isprintable() for text in (result.output + check.output).split("\n"))
        if keyword != "user":  # whose name is a value there
            written = program.inside(None, "--print-sql").stdout.splitlines()
            assert not [line for line in written if "canary" in line and not line.startswith("-- ")]
    result = program.inside(configuration(systems.conninfo), "--once", "--policy", name)
    assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)
    assert result.stderr.removesuffix("\n").isprintable(), ascii(result.stderr)
