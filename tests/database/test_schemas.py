"""Schemas that are not the three systems' own: names, keys and types that must work, and tables no purge may touch.

Most tests have one table, `sessions`, with a column `at`, and the policy `probe` for it; the policy `beside` stands
for the others, which must run whatever happens to `probe`.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from lab import Database, Line, Program, Result, configuration, log

OLD = "now() - interval '40 days'"
YOUNG = "now() - interval '20 days'"
AGE: dict[str, Any] = {"age_column": "at", "retention": "30d"}


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


@pytest.fixture
def schema(database: Database) -> Database:
    """A database with the table of the policy that must run in any case: one row to delete, one to keep."""
    database.execute(
        f"CREATE TABLE beside (at timestamptz); INSERT INTO beside VALUES ({OLD}), (now());"
        "GRANT ALL ON beside TO retention"
    )
    return database


def purge(program: Program, database: Database, policy: dict[str, Any] | None = None, **run: Any) -> Result:
    """One run with `probe` first and `beside` after it."""
    policies = {"probe": {"table": "sessions", **AGE, **(policy or {})}, "beside": {"table": "beside", **AGE}}
    return program.inside(configuration(database.conninfo, policies, **run), "--once", "--json")


def line(result: Result, event: str) -> Line:
    """The one line of that event about `probe`."""
    (found,) = [entry for entry in log(result.stderr) if entry.event == event and entry.fields["phase"] == "probe"]
    return found


def assert_purged(result: Result, deleted: int, *, blocked: int = 0) -> None:
    """The policy ran to its end and these are its counts."""
    probe = result.policies["probe"]
    assert (result.returncode, probe["error"]) == (0, None), result.output
    assert (probe["deleted"], probe["backlog"], probe["blocked"]) == (deleted, blocked, blocked)
    assert (probe["undeletable"], probe["stop_reason"]) == (0, "drained")
    assert result.policies["beside"]["deleted"] == 1


def assert_failed(result: Result, *mentioned: str) -> None:
    """The policy failed without a deletion and says why, in JSON and in the journal; the other ran; exit status 1."""
    assert result.returncode == 1, result.output
    probe, beside = result.policies["probe"], result.policies["beside"]
    assert probe["stop_reason"] == "failed"
    assert not probe["deleted"]
    assert (beside["deleted"], beside["stop_reason"], beside["error"]) == (1, "drained", None)
    message = probe["error"]["message"]
    assert [word for word in mentioned if word.lower() not in message.lower()] == [], message
    failed = line(result, "phase_failed")
    assert (failed.level, failed.fields["error"]) == ("ERROR", message)


# Names

NAMES = {
    "mixed case": "RefreshSessions",
    "upper case": "SESSIONS",
    "quote": 'we"ird',
    "apostrophe": "o'clock",
    "dot": "refresh.sessions",
    "percent": "100%s",
    "format": "%(now)s",
    "braces": "{table}",
    "space": "refresh sessions",
    "backslash": "a\\b",
    "reserved": "select",
    "reserved function": "user",
    "dollar": "$1",
    "63 bytes": "s" * 63,
    "63 bytes, not ASCII": "ж" * 31 + "s",
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_any_name_works(name: str, schema: Database, program: Program) -> None:
    """Schema, table, age column, status column, reference and constraint may be named anything a server allows."""
    table, age, status, parent = f"{quoted(name)}.{quoted(name)}", name, name[:-1] + "Z", name[:-1] + "P"
    columns = ", ".join(map(quoted, (age, status, parent)))
    schema.execute(
        f"CREATE SCHEMA {quoted(name)};"
        f"CREATE TABLE {table} (id int PRIMARY KEY, {quoted(age)} timestamptz, {quoted(status)} text,"
        f" {quoted(parent)} int CONSTRAINT {quoted(name)} REFERENCES {table});"
        f"INSERT INTO {table} (id, {columns}) VALUES (1, {OLD}, 'Revoked', NULL), (2, {OLD}, 'Active', 1),"
        f" (3, {OLD}, 'Revoked', NULL), (4, {OLD}, 'Revoked', 3), (5, {YOUNG}, 'Revoked', NULL);"
        f"GRANT USAGE ON SCHEMA {quoted(name)} TO retention"
    )
    schema.grant(table, select=f"id, {columns}")
    policy = {"table": table, "age_column": age, "only": {status: ["Revoked"]}, "parent_column": parent}
    result = purge(program, schema, policy)
    assert_purged(result, deleted=2, blocked=1)
    assert schema.execute(f"SELECT id FROM {table} ORDER BY 1") == [(1,), (2,), (5,)]
    assert name in line(result, "phase_completed").fields["blockedBy"]


@pytest.mark.parametrize("name", ["s" * 64, "ж" * 32], ids=["64 letters", "64 bytes"])
@pytest.mark.parametrize("place", ["table", "schema", "age_column", "only", "parent_column"])
def test_a_name_of_64_bytes_is_refused(place: str, name: str, schema: Database, program: Program) -> None:
    """The server would cut it off and might name something else: the configuration is wrong, nothing is deleted."""
    policy: dict[str, dict[str, Any]] = {
        "table": {"table": quoted(name)},
        "schema": {"table": f"{quoted(name)}.sessions"},
        "age_column": {"age_column": name},
        "only": {"only": {name: ["Revoked"]}},
        "parent_column": {"parent_column": name},
    }
    result = purge(program, schema, policy[place])
    assert (result.returncode, result.policies) == (78, {})
    key = "policy.probe." + place.replace("schema", "table")
    assert any(key in f"{error['key']} {error['message']}" for error in result.json["errors"]), result.stdout
    assert schema.count("beside") == 2


def test_a_table_without_a_schema_is_in_public(schema: Database, program: Program) -> None:
    """The role's search path leads elsewhere, to a table of the same name: that one is not touched."""
    schema.execute(
        f"CREATE SCHEMA decoy; CREATE TABLE decoy.sessions AS SELECT {OLD} AS at;"
        f"CREATE TABLE sessions AS SELECT {OLD} AS at;"
        "GRANT USAGE ON SCHEMA decoy TO retention; GRANT ALL ON sessions, decoy.sessions TO retention;"
        f"ALTER ROLE retention IN DATABASE {schema.name} SET search_path = decoy, public"
    )
    assert_purged(purge(program, schema), deleted=1)
    assert (schema.count("public.sessions"), schema.count("decoy.sessions")) == (0, 1)


def test_functions_and_operators_of_other_schemas_are_not_taken(schema: Database, program: Program) -> None:
    """A search path that puts another now() and another `<` before the built-in ones changes nothing."""
    schema.execute(
        f"""
        CREATE SCHEMA decoy;
        GRANT USAGE ON SCHEMA decoy TO retention;
        CREATE FUNCTION decoy.now() RETURNS timestamptz LANGUAGE sql AS $$ SELECT timestamptz '2100-01-01' $$;
        CREATE FUNCTION decoy.clock_timestamp() RETURNS timestamptz LANGUAGE sql
            AS $$ SELECT timestamptz '2100-01-01' $$;
        CREATE FUNCTION decoy.yes(timestamptz, timestamptz) RETURNS bool LANGUAGE sql AS 'SELECT true';
        CREATE OPERATOR decoy.< (LEFTARG = timestamptz, RIGHTARG = timestamptz, FUNCTION = decoy.yes);
        CREATE TABLE sessions AS SELECT {OLD} AS at UNION ALL SELECT {YOUNG};
        GRANT ALL ON sessions TO retention;
        ALTER ROLE retention IN DATABASE {schema.name} SET search_path = decoy, pg_catalog, public
        """
    )
    assert_purged(purge(program, schema), deleted=1)
    assert schema.count("sessions") == 1


@pytest.mark.parametrize("table", ["SESSIONS", "Public.Sessions", '"public".sessions', 'PUBLIC."sessions"'])
def test_an_unquoted_name_folds_to_lower_case(table: str, schema: Database, program: Program) -> None:
    """As in SQL: without double quotes upper case means nothing."""
    schema.execute(
        f'CREATE TABLE sessions AS SELECT {OLD} AS at; CREATE TABLE "SESSIONS" AS SELECT {OLD} AS at;'
        'GRANT ALL ON sessions, "SESSIONS" TO retention'
    )
    assert_purged(purge(program, schema, {"table": table}), deleted=1)
    assert (schema.count("sessions"), schema.count('"SESSIONS"')) == (0, 1)


# Keys and types

KEYS = {
    "none": "note text",
    "bigint": "id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
    "uuid": "id uuid PRIMARY KEY DEFAULT gen_random_uuid()",
    "text": "id text PRIMARY KEY DEFAULT md5(random()::text)",
    "two columns": "one int DEFAULT 1, other serial, PRIMARY KEY (one, other)",
    "unique only": "id bigint GENERATED ALWAYS AS IDENTITY UNIQUE",
}


@pytest.mark.parametrize("indexed", [True, False], ids=["index", "no index"])
@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_any_key_or_none_works(key: str, indexed: bool, schema: Database, program: Program) -> None:
    """A purge needs no key: rows that are alike in every column go one by one all the same."""
    schema.execute(
        f"CREATE TABLE sessions ({key}, at timestamptz);"
        f"INSERT INTO sessions (at) SELECT {OLD} FROM generate_series(1, 20);"
        f"INSERT INTO sessions (at) SELECT {YOUNG} FROM generate_series(1, 5)"
    )
    if indexed:
        schema.execute("CREATE INDEX ON sessions (at)")
    schema.grant("sessions", select="at")
    assert_purged(purge(program, schema, batch_size=3), deleted=20)
    assert schema.count("sessions") == 5


INDEXES = {
    "descending": "(at DESC)",
    "nulls first": "(at NULLS FIRST)",
    "descending, nulls last": "(at DESC NULLS LAST)",
    "two columns": "(at, status)",
    "covering": "(at) INCLUDE (status)",
    "second column": "(status, at)",
    "partial": "(at) WHERE status = 'Active'",
    "hash": "USING hash (at)",
    "brin": "USING brin (at)",
    "of an expression": "((at + interval '1 day'))",
}


@pytest.mark.parametrize("index", INDEXES.values(), ids=INDEXES)
def test_any_index_works(index: str, schema: Database, program: Program) -> None:
    """Whether an index on the age column serves the walk or not: the same rows go."""
    index = index.replace("at +", "at AT TIME ZONE 'UTC' +")
    schema.execute(
        f"""
        CREATE TABLE sessions (at timestamptz, status text);
        CREATE INDEX ON sessions {index};
        INSERT INTO sessions SELECT t.at, s.status FROM (VALUES ({OLD}), ({YOUNG}), (NULL), ('-infinity'), ('infinity'),
            (now() - interval '41 days'), ({OLD})) t (at), (VALUES ('Revoked'), ('Active'), (NULL)) s (status)
        """
    )
    schema.grant("sessions", select="at, status")
    assert_purged(purge(program, schema, {"only": {"status": ["Revoked"]}}, batch_size=2), deleted=4)
    assert schema.count("sessions") == 17


STATUSES: dict[str, tuple[str, list[str], list[Any]]] = {
    "text": ("text", ["'Revoked'", "'Expired'", "'Active'"], ["Revoked", "Expired"]),
    "varchar": ("varchar(20)", ["'Revoked'", "'Expired'", "'Active'"], ["Revoked", "Expired"]),
    "char": ("char(12)", ["'Revoked'", "'Expired'", "'Active'"], ["Revoked", "Expired"]),
    "enum": ('"Session.Status"', ["'Revoked'", "'Expired'", "'Active'"], ["Revoked", "Expired"]),
    "smallint": ("smallint", ["2", "3", "1"], [2, 3]),
    "integer": ("integer", ["2", "3", "'-1'"], [2, 3]),
    "bigint": ("bigint", ["5000000000", "3", "1"], [5_000_000_000, 3]),
    "boolean": ("boolean", ["true", "true", "false"], [True]),
    "boolean, false": ("boolean", ["false", "false", "true"], [False]),
    "domain over text": ("word", ["'Revoked'", "'Expired'", "'Active'"], ["Revoked", "Expired"]),
    "domain over smallint": ("code", ["2", "3", "1"], [2, 3]),
    "domain over enum": ("marked", ["'Revoked'", "'Expired'", "'Active'"], ["Revoked", "Expired"]),
    "text with signs": ("text", ["'100%s'", "'it''s \"\\'", "'100'"], ["100%s", "it's \"\\"]),
    "collation without case": ("text COLLATE nocase", ["'Revoked'", "'revoked'", "'Active'"], ["Revoked"]),
}


@pytest.mark.parametrize("indexed", [True, False], ids=["index", "no index"])
@pytest.mark.parametrize(("kind", "values", "only"), STATUSES.values(), ids=STATUSES)
def test_any_type_of_status_works(
    kind: str, values: list[str], only: list[Any], indexed: bool, schema: Database, program: Program
) -> None:
    """Of each type the named values go, another one and NULL stay."""
    if "COLLATE" in kind:
        schema.execute("CREATE COLLATION nocase (provider = icu, locale = 'und-u-ks-level2', deterministic = false)")
    schema.execute(
        """
        CREATE TYPE "Session.Status" AS ENUM ('Active', 'Expired', 'Revoked');
        CREATE DOMAIN word AS text CHECK (value <> '');
        CREATE DOMAIN code AS smallint;
        CREATE DOMAIN marked AS "Session.Status"
        """
    )
    schema.execute(f"CREATE TABLE sessions (status {kind}, at timestamptz)")
    for value in [*values, "NULL"]:
        schema.execute(f"INSERT INTO sessions VALUES ({value}, {OLD}), ({value}, {YOUNG})")
    if indexed:
        schema.execute("CREATE INDEX ON sessions (at)")
    schema.grant("sessions", select="status, at")
    assert_purged(purge(program, schema, {"only": {"status": only}}), deleted=2)
    old = "at < now() - interval '30 days'"
    assert schema.count("sessions", old) == 2
    assert schema.count("sessions", f"(status IS NULL OR status::text = {values[2]}::text) AND {old}") == 2


def test_several_columns_in_only_must_all_match(schema: Database, program: Program) -> None:
    """The values of a column are alternatives; the columns are conditions that hold together."""
    schema.execute(
        f"""
        CREATE TABLE sessions (status text, level smallint, closed boolean, at timestamptz);
        INSERT INTO sessions SELECT status, level, closed, {OLD}
        FROM unnest(ARRAY['Revoked', 'Expired', 'Active', NULL]) status, unnest(ARRAY[1, 2, 3, NULL]) level,
            unnest(ARRAY[true, false, NULL]) closed
        """
    )
    schema.grant("sessions", select="status, level, closed, at")
    only = {"status": ["Revoked", "Expired"], "level": [1, 2], "closed": [True]}
    assert_purged(purge(program, schema, {"only": only}), deleted=4)
    matching = "status IN ('Revoked', 'Expired') AND level IN (1, 2) AND closed"
    assert (schema.count("sessions"), schema.count("sessions", matching)) == (44, 0)


@pytest.mark.parametrize("pairing", ["age", "expiry"])
@pytest.mark.parametrize("indexed", [True, False], ids=["index", "no index"])
@pytest.mark.parametrize("kind", ["timestamptz", "timestamp", "date", "timestamptz(0)", "instant"])
def test_any_type_of_time_works(kind: str, indexed: bool, pairing: str, schema: Database, program: Program) -> None:
    """A time without zone is UTC, a date is over at the next midnight UTC, whatever the zone of the role."""
    schema.execute(
        f"""
        CREATE DOMAIN instant AS timestamptz;
        ALTER ROLE retention IN DATABASE {schema.name} SET timezone = 'Asia/Tokyo';
        SET timezone = 'UTC';
        CREATE TABLE sessions (at {kind});
        INSERT INTO sessions SELECT now() AT TIME ZONE 'UTC' - i * interval '1 hour' - interval '7 minutes'
        FROM generate_series(24 * 27, 24 * 33) i;
        INSERT INTO sessions VALUES ('infinity'), ('-infinity'), (NULL)
        """
    )
    if indexed:
        schema.execute("CREATE INDEX ON sessions (at)")
    schema.grant("sessions", select="at")
    rows = [row[0] for row in schema.execute("SELECT at FROM sessions WHERE isfinite(at)")]
    policy = AGE if pairing == "age" else {"expiry_column": "at", "grace": "30d"}
    policies = {"probe": {"table": "sessions", **policy}, "beside": {"table": "beside", **AGE}}
    result = program.inside(configuration(schema.conninfo, policies), "--once", "--json")
    cutoff = datetime.fromisoformat(result.policies["probe"]["cutoff"])

    def over(value: Any) -> datetime:
        if isinstance(value, datetime):
            return value if value.tzinfo else value.replace(tzinfo=UTC)
        return datetime(value.year, value.month, value.day, tzinfo=UTC) + timedelta(days=1)

    old = [row for row in rows if over(row) < cutoff]
    assert_purged(result, deleted=len(old) + 1)
    left = [row[0] for row in schema.execute("SELECT at FROM sessions WHERE isfinite(at)")]
    assert sorted(left) == sorted(row for row in rows if over(row) >= cutoff)
    assert schema.execute("SELECT at::text FROM sessions WHERE isfinite(at) IS NOT TRUE") == [("infinity",), (None,)]


# References within the table


def test_a_composite_self_reference_guards(schema: Database, program: Program) -> None:
    """All columns of the key must agree, and a reference that is NULL in part refers to nothing."""
    schema.execute(
        f"""
        CREATE TABLE sessions (tenant int, id int, parent_tenant int, parent int, live bool,
            at timestamptz DEFAULT {OLD}, PRIMARY KEY (tenant, id),
            CONSTRAINT rotated_from FOREIGN KEY (parent_tenant, parent) REFERENCES sessions (tenant, id));
        INSERT INTO sessions VALUES (1, 1, NULL, NULL, false), (1, 2, 1, 1, true), (2, 1, NULL, NULL, false),
            (2, 2, 2, 1, false), (3, 1, NULL, NULL, false), (3, 2, NULL, 1, true)
        """
    )
    schema.grant("sessions", select="tenant, id, parent_tenant, parent, live, at")
    result = purge(program, schema, {"only": {"live": [False]}})
    assert_purged(result, deleted=3, blocked=1)
    assert schema.execute("SELECT tenant, id FROM sessions ORDER BY 1, 2") == [(1, 1), (1, 2), (3, 2)]
    assert "rotated_from" in line(result, "phase_completed").fields["blockedBy"]


def test_every_self_reference_guards(schema: Database, program: Program) -> None:
    """A reference to the parent and one to the successor, one of them to a unique column that is not the key."""
    schema.execute(
        f"""
        CREATE TABLE sessions (id int PRIMARY KEY, token text UNIQUE, parent int REFERENCES sessions,
            successor text REFERENCES sessions (token), live bool DEFAULT false, at timestamptz DEFAULT {OLD});
        INSERT INTO sessions (id, token, parent, successor, live) VALUES (1, 'a', NULL, NULL, false),
            (2, 'b', 1, NULL, true), (3, 'c', NULL, NULL, false), (4, 'd', NULL, 'c', true),
            (5, 'e', NULL, NULL, false), (6, 'f', 5, 'e', false), (7, 'g', NULL, NULL, false), (8, 'h', 7, NULL, false),
            (9, 'i', NULL, 'h', true)
        """
    )
    schema.grant("sessions", select="id, token, parent, successor, live, at")
    result = purge(program, schema, {"only": {"live": [False]}, "parent_column": "parent"})
    assert_purged(result, deleted=2, blocked=4)
    assert schema.execute("SELECT array_agg(id ORDER BY id) FROM sessions") == [([1, 2, 3, 4, 7, 8, 9],)]


@pytest.mark.parametrize("action", ["CASCADE", "SET NULL", "SET DEFAULT", "NO ACTION"])
def test_a_self_reference_with_an_action_never_acts(action: str, schema: Database, program: Program) -> None:
    """A parent whose child stays is not deleted, so the child is neither deleted along nor changed."""
    schema.execute(
        f"""
        CREATE TABLE sessions (id int PRIMARY KEY, parent int REFERENCES sessions ON DELETE {action},
            live bool, at timestamptz DEFAULT {OLD});
        INSERT INTO sessions VALUES (1, NULL, false), (2, 1, false), (3, 2, true), (4, NULL, false), (5, 4, false)
        """
    )
    schema.grant("sessions", select="id, parent, live, at")
    assert_purged(purge(program, schema, {"only": {"live": [False]}}), deleted=2, blocked=2)
    assert schema.execute("SELECT id, parent FROM sessions ORDER BY 1") == [(1, None), (2, 1), (3, 2)]


def test_a_reference_without_a_constraint_guards_when_it_is_named(schema: Database, program: Program) -> None:
    """`parent_column` alone protects a parent; a name of no row protects nothing."""
    schema.execute(
        f"""
        CREATE TABLE sessions (id uuid PRIMARY KEY, parent uuid, live bool, at timestamptz DEFAULT {OLD});
        INSERT INTO sessions SELECT md5(i::text)::uuid, md5(p::text)::uuid, l
        FROM (VALUES (1, 99, false), (2, 1, true), (3, NULL, false), (4, 3, false)) v (i, p, l)
        """
    )
    schema.grant("sessions", select="id, parent, live, at")
    result = purge(program, schema, {"only": {"live": [False]}, "parent_column": "parent"})
    assert_purged(result, deleted=2, blocked=1)
    assert schema.count("sessions") == 2


# References from other tables


def referred(database: Database, clause: str = "", *, index: bool = True) -> None:
    """Ten old rows, of which another table, as its constraint `legal_hold`, refers to the third and the seventh."""
    database.execute(
        f"""
        CREATE TABLE sessions (id int PRIMARY KEY, parent int REFERENCES sessions, at timestamptz DEFAULT {OLD});
        CREATE TABLE holds (session int DEFAULT 100,
            CONSTRAINT legal_hold FOREIGN KEY (session) REFERENCES sessions {clause});
        INSERT INTO sessions (id) SELECT generate_series(1, 10);
        INSERT INTO sessions (id, at) VALUES (100, now());
        INSERT INTO holds VALUES (3), (7)
        """
    )
    if index:
        database.execute("CREATE INDEX ON holds (session)")
    database.grant("sessions", select="id, parent, at")


@pytest.mark.parametrize("batch_size", [1, 4, 5000])
@pytest.mark.parametrize("readable", [True, False], ids=["readable", "not readable"])
@pytest.mark.parametrize("clause", ["", "ON DELETE RESTRICT", "DEFERRABLE INITIALLY DEFERRED"])
def test_a_row_that_another_table_refers_to_is_blocked(
    clause: str, readable: bool, batch_size: int, schema: Database, program: Program
) -> None:
    """It stays, the rest goes, and the constraint is named, also where the job may not read the other table."""
    referred(schema, clause)
    if readable:
        schema.execute("GRANT SELECT ON holds TO retention")
    result = purge(program, schema, batch_size=batch_size)
    assert_purged(result, deleted=8, blocked=2)
    assert schema.execute("SELECT id FROM sessions ORDER BY 1") == [(3,), (7,), (100,)]
    assert "legal_hold" in line(result, "phase_completed").fields["blockedBy"]


@pytest.mark.parametrize("index", [True, False], ids=["index", "no index"])
@pytest.mark.parametrize("readable", [True, False], ids=["readable", "not readable"])
def test_the_ancestors_of_a_held_row_are_blocked_too(
    readable: bool, index: bool, schema: Database, program: Program
) -> None:
    """What another table holds keeps its own chain: 3 is held, so 2 and 1 stay; 4 to 6 and 8 to 10 go."""
    referred(schema, index=index)
    schema.execute("UPDATE sessions SET parent = id - 1 WHERE id BETWEEN 2 AND 6 OR id BETWEEN 8 AND 10")
    if readable:
        schema.execute("GRANT SELECT ON holds TO retention")
    assert_purged(purge(program, schema), deleted=6, blocked=4)
    assert schema.execute("SELECT array_agg(id ORDER BY id) FROM sessions") == [([1, 2, 3, 7, 100],)]


HOLDERS = {
    "partitioned": (
        "CREATE TABLE holds (id int, session int, CONSTRAINT legal_hold FOREIGN KEY (session) REFERENCES sessions)"
        " PARTITION BY RANGE (id);"
        "CREATE TABLE holds_1 PARTITION OF holds FOR VALUES FROM (0) TO (5);"
        "CREATE TABLE holds_2 PARTITION OF holds DEFAULT; INSERT INTO holds VALUES (1, 3), (9, 7)"
    ),
    "by a unique column": (
        "CREATE TABLE holds (code text CONSTRAINT legal_hold REFERENCES sessions (code));"
        "INSERT INTO holds VALUES ('c3'), ('c7'), (NULL)"
    ),
    "by two columns": (
        "CREATE TABLE holds (one int, two text,"
        " CONSTRAINT legal_hold FOREIGN KEY (one, two) REFERENCES sessions (id, code));"
        "INSERT INTO holds VALUES (3, 'c3'), (7, 'c7'), (5, NULL), (NULL, 'c6')"
    ),
    "in another schema": (
        "CREATE SCHEMA law; CREATE TABLE law.holds (session int CONSTRAINT legal_hold REFERENCES sessions);"
        "INSERT INTO law.holds VALUES (3), (7), (7); GRANT USAGE ON SCHEMA law TO retention"
    ),
}


@pytest.mark.parametrize("readable", [True, False], ids=["readable", "not readable"])
@pytest.mark.parametrize("statements", HOLDERS.values(), ids=HOLDERS)
def test_any_table_with_a_foreign_key_can_hold_rows(
    statements: str, readable: bool, schema: Database, program: Program
) -> None:
    """A partitioned table, a key of several columns or one that is not the primary key, a table elsewhere."""
    schema.execute(
        f"CREATE TABLE sessions (id int PRIMARY KEY, code text UNIQUE, at timestamptz, UNIQUE (id, code));"
        f"INSERT INTO sessions SELECT i, 'c' || i, {OLD} FROM generate_series(1, 10) i; {statements}"
    )
    schema.grant("sessions", select="id, code, at")
    if readable:
        schema.execute(f"GRANT SELECT ON {'law.holds' if 'law' in statements else 'holds'} TO retention")
    result = purge(program, schema, batch_size=4)
    assert_purged(result, deleted=8, blocked=2)
    assert schema.execute("SELECT id FROM sessions ORDER BY 1") == [(3,), (7,)]
    assert "legal_hold" in line(result, "phase_completed").fields["blockedBy"]


def test_a_held_row_among_many_costs_no_other_row(schema: Database, program: Program) -> None:
    """One referenced row in a full batch, again and again: every other row goes in the same run."""
    referred(schema)
    schema.execute(
        "INSERT INTO sessions (id) SELECT generate_series(1001, 3000);"
        "INSERT INTO holds SELECT generate_series(1050, 3000, 100)"
    )
    assert_purged(purge(program, schema, batch_size=400), deleted=8 + 1980, blocked=2 + 20)


@pytest.mark.parametrize("clause", ["ON DELETE CASCADE", "ON DELETE SET NULL", "ON DELETE SET DEFAULT"])
def test_a_reference_that_acts_on_other_rows_is_refused(clause: str, schema: Database, program: Program) -> None:
    """Deleting ours would delete or change theirs: the policy refuses, names the table and what would allow it."""
    referred(schema, clause)
    schema.execute("GRANT SELECT ON holds TO retention")
    assert_failed(purge(program, schema), "holds", "allow_cascade")
    assert (schema.count("sessions"), schema.count("holds")) == (11, 2)


@pytest.mark.parametrize(
    ("clause", "left"),
    [("ON DELETE CASCADE", []), ("ON DELETE SET NULL", [(None,)] * 2), ("ON DELETE SET DEFAULT", [(100,)] * 2)],
)
def test_allow_cascade_says_how_far_it_reaches(
    clause: str, left: list[tuple[Any]], schema: Database, program: Program
) -> None:
    """With the operator's consent it runs, and the first line of the log names the tables that it reaches."""
    referred(schema, clause)
    result = purge(program, schema, {"allow_cascade": True})
    assert_purged(result, deleted=10)
    assert schema.execute("SELECT session FROM holds") == left
    (started,) = [entry for entry in log(result.stderr) if entry.event == "job_started"]
    assert any("holds" in value for value in started.fields.values()), started


def test_a_cascade_of_a_cascade_is_named_too(schema: Database, program: Program) -> None:
    """Consent needs the whole reach: the table behind the table is named as well."""
    referred(schema, "ON DELETE CASCADE")
    schema.execute(
        "ALTER TABLE holds ADD id int UNIQUE GENERATED ALWAYS AS IDENTITY;"
        "CREATE TABLE papers (hold int REFERENCES holds (id) ON DELETE CASCADE); INSERT INTO papers VALUES (1)"
    )
    assert_failed(purge(program, schema), "holds", "papers")
    result = purge(program, schema, {"allow_cascade": True})
    (started,) = [entry for entry in log(result.stderr) if entry.event == "job_started"]
    assert any("papers" in value for value in started.fields.values()), started


# Policies that must fail

RELATIONS = {
    "view": ("CREATE VIEW sessions AS SELECT * FROM base", "view"),
    "materialized view": ("CREATE MATERIALIZED VIEW sessions AS SELECT * FROM base", "view"),
    "foreign table": (
        "CREATE EXTENSION file_fdw; CREATE SERVER files FOREIGN DATA WRAPPER file_fdw;"
        "CREATE FOREIGN TABLE sessions (id int, at timestamptz, status text) SERVER files"
        " OPTIONS (filename '/dev/null')",
        "foreign",
    ),
    "sequence": ("CREATE SEQUENCE sessions", "sequence"),
    "partitioned table": (
        "CREATE TABLE sessions (id int, at timestamptz, status text) PARTITION BY RANGE (at);"
        "CREATE TABLE part PARTITION OF sessions DEFAULT; INSERT INTO sessions TABLE base",
        "partition",
    ),
    "parent of a table": (
        "CREATE TABLE sessions AS TABLE base; CREATE TABLE heir () INHERITS (sessions);"
        "INSERT INTO heir TABLE base; GRANT ALL ON heir TO retention",
        "inherit",
    ),
}


@pytest.mark.parametrize(("statements", "word"), RELATIONS.values(), ids=RELATIONS)
def test_what_is_not_an_ordinary_table_fails(statements: str, word: str, schema: Database, program: Program) -> None:
    """The policy fails and says what it found."""
    schema.execute(f"CREATE TABLE base AS SELECT 1 AS id, {OLD} AS at, 'Revoked'::text AS status")
    schema.execute(f"{statements}; GRANT ALL ON ALL TABLES IN SCHEMA public TO retention")
    assert_failed(purge(program, schema), "sessions", word)
    assert schema.count("base") == 1
    if "inherit" in word or "partition" in word:
        assert schema.count("sessions") > 0


MISTAKES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no such table": ({"table": "sesions"}, ("sesions", "policy.probe.table")),
    "no such schema": ({"table": "identty.sessions"}, ("identty", "policy.probe.table")),
    "no such age column": ({"age_column": "att"}, ("att", "age_column")),
    "age column in another case": ({"age_column": "At"}, ("At", "age_column")),
    "no such status column": ({"only": {"state": ["Revoked"]}}, ("state", "only")),
    "no such parent column": ({"parent_column": "parent_id"}, ("parent_id", "parent_column")),
    "no such label": ({"only": {"label": ["Revoked", "Rotatd"]}}, ("Rotatd", "label", "Revoked")),
    "label in another case": ({"only": {"label": ["revoked"]}}, ("revoked", "label")),
    "age column of type text": ({"age_column": "status"}, ("status", "text")),
    "age column of type time": ({"age_column": "clock"}, ("clock", "time")),
    "age column of type integer": ({"age_column": "id"}, ("id", "integer")),
    "text for a number": ({"only": {"code": ["2"]}}, ("code", "smallint")),
    "number for a text": ({"only": {"status": [2]}}, ("status", "text")),
    "number for a boolean": ({"only": {"closed": [1]}}, ("closed", "boolean")),
    "boolean for a text": ({"only": {"status": [True]}}, ("status", "text")),
    "boolean for a number": ({"only": {"code": [True]}}, ("code", "smallint")),
    "number out of range": ({"only": {"code": [70000]}}, ("code", "70000")),
    "text for a time": ({"only": {"at": ["yesterday"]}}, ("at", "timestamp")),
    "parent of another type": ({"parent_column": "status"}, ("status", "parent_column")),
}


@pytest.mark.parametrize(("policy", "mentioned"), MISTAKES.values(), ids=MISTAKES)
def test_a_policy_that_does_not_fit_its_table_fails(
    policy: dict[str, Any], mentioned: tuple[str, ...], schema: Database, program: Program
) -> None:
    """It names what is missing or wrong; nothing of its table is deleted, the other policy runs."""
    schema.execute(
        f"""
        CREATE TYPE state AS ENUM ('Active', 'Revoked', 'Expired');
        CREATE TABLE sessions (id int PRIMARY KEY, at timestamptz, status text, code smallint, closed boolean,
            label state, clock time);
        INSERT INTO sessions VALUES (1, {OLD}, 'Revoked', 2, true, 'Revoked', '12:00');
        GRANT ALL ON sessions TO retention
        """
    )
    assert_failed(purge(program, schema, policy), *mentioned)
    assert schema.count("sessions") == 1


PRIVILEGES = {
    "SELECT": "GRANT UPDATE, DELETE ON sessions TO retention",
    "SELECT on the age column": "GRANT SELECT (ctid), UPDATE, DELETE ON sessions TO retention",
    "SELECT on ctid": "GRANT SELECT (at), UPDATE, DELETE ON sessions TO retention",
    "UPDATE": "GRANT SELECT, DELETE ON sessions TO retention",
    "DELETE": "GRANT SELECT, UPDATE ON sessions TO retention",
    "USAGE on the schema": "GRANT ALL ON sessions TO retention; REVOKE USAGE ON SCHEMA public FROM public",
}


@pytest.mark.parametrize("statement", PRIVILEGES.values(), ids=PRIVILEGES)
def test_a_missing_privilege_fails(statement: str, schema: Database, program: Program) -> None:
    """The policy fails and asks for the grant; a table of another schema is still purged."""
    schema.execute(
        f"CREATE TABLE sessions AS SELECT {OLD} AS at; CREATE SCHEMA apart; ALTER TABLE beside SET SCHEMA apart;"
        f"GRANT USAGE ON SCHEMA apart TO retention; {statement}"
    )
    policies = {"probe": {"table": "sessions", **AGE}, "beside": {"table": "apart.beside", **AGE}}
    result = program.inside(configuration(schema.conninfo, policies), "--once", "--json")
    assert_failed(result, "permission denied", "grant")
    assert result.policies["probe"]["error"]["sqlstate"] == "42501"
    assert schema.count("sessions") == 1


ROW_SECURITY = {
    "no policy at all": "",
    "all hidden": "CREATE POLICY hide ON sessions USING (false)",
    "a part hidden": "CREATE POLICY hide ON sessions USING (id > 5)",
    "hidden from DELETE only": (
        "CREATE POLICY show ON sessions USING (true);"
        "CREATE POLICY hide ON sessions AS RESTRICTIVE FOR DELETE USING (false)"
    ),
    "hidden from UPDATE only": (
        "CREATE POLICY show ON sessions USING (true);"
        "CREATE POLICY hide ON sessions AS RESTRICTIVE FOR UPDATE USING (false)"
    ),
}


@pytest.mark.parametrize("statement", ROW_SECURITY.values(), ids=ROW_SECURITY)
def test_row_security_is_a_failure_and_no_zero(statement: str, schema: Database, program: Program) -> None:
    """Rows that the role may not see would make a purge that is silently incomplete."""
    schema.execute(
        f"CREATE TABLE sessions AS SELECT id, {OLD} AS at FROM generate_series(1, 10) id;"
        f"GRANT ALL ON sessions TO retention; ALTER TABLE sessions ENABLE ROW LEVEL SECURITY; {statement}"
    )
    assert_failed(purge(program, schema), "sessions", "row")
    assert schema.count("sessions") == 10


# Triggers


def triggered(database: Database, body: str) -> None:
    """Ten old rows and a trigger before the deletion of each."""
    database.execute(
        f"""
        CREATE TABLE sessions AS SELECT id, {OLD} AS at, 'agent-' || id AS user_agent FROM generate_series(1, 10) id;
        GRANT ALL ON sessions TO retention;
        CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body} END $$;
        CREATE TRIGGER keeper BEFORE DELETE ON sessions FOR EACH ROW EXECUTE FUNCTION keep()
        """
    )


@pytest.mark.parametrize("batch_size", [1, 3, 5000])
def test_a_row_that_a_trigger_refuses_is_isolated(batch_size: int, schema: Database, program: Program) -> None:
    """It is left and counted as undeletable, the rest of its batch goes, and the policy counts as failed."""
    triggered(schema, "IF OLD.id = 4 THEN RAISE 'not %', OLD.user_agent; END IF; RETURN OLD;")
    result = purge(program, schema, batch_size=batch_size)
    assert result.returncode == 1
    probe = result.policies["probe"]
    assert (probe["deleted"], probe["backlog"], probe["blocked"], probe["undeletable"]) == (9, 1, 0, 1)
    assert (probe["stop_reason"], probe["error"]["sqlstate"]) == ("failed", "P0001")
    assert schema.execute("SELECT id FROM sessions") == [(4,)]
    failed = line(result, "phase_failed").fields
    assert (failed["deletedCount"], failed["backlogRemaining"], failed["undeletable"]) == ("9", "1", "1")
    assert "agent-4" not in result.output
    assert result.policies["beside"]["deleted"] == 1


@pytest.mark.parametrize("batch_size", [1, 3, 5000])
def test_a_trigger_that_cancels_every_deletion_is_a_failure(
    batch_size: int, schema: Database, program: Program
) -> None:
    """The server deletes nothing and reports no error: the policy fails, and says where to look."""
    triggered(schema, "RETURN NULL;")
    result = purge(program, schema, batch_size=batch_size)
    assert_failed(result, "sessions", "trigger")
    probe = result.policies["probe"]
    assert (probe["deleted"], probe["backlog"]) == (0, 10)
    assert schema.count("sessions") == 10


def test_a_rule_that_cancels_deletions_is_a_failure(schema: Database, program: Program) -> None:
    """A rule can do the same as such a trigger."""
    schema.execute(
        f"CREATE TABLE sessions AS SELECT {OLD} AS at; GRANT ALL ON sessions TO retention;"
        "CREATE RULE keeper AS ON DELETE TO sessions DO INSTEAD NOTHING"
    )
    assert_failed(purge(program, schema))
    assert schema.count("sessions") == 1


def test_a_trigger_that_cancels_one_deletion_is_a_failure(schema: Database, program: Program) -> None:
    """One row silently kept is as much a failure: it is in the backlog, and the exit status says so."""
    triggered(schema, "IF OLD.id = 4 THEN RETURN NULL; END IF; RETURN OLD;")
    result = purge(program, schema, batch_size=3)
    assert result.returncode == 1
    probe = result.policies["probe"]
    assert probe["error"]
    assert schema.count("sessions", "id = 4") == 1
    assert probe["deleted"] == 10 - schema.count("sessions")
    assert probe["backlog"] == schema.count("sessions")
    assert result.policies["beside"]["deleted"] == 1
