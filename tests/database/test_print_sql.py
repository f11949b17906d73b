"""`--print-sql`: what it prints, executed once by psql, is all that the job needs, and no more.

The role that is granted does not exist before; whom the connection is made as is told by PGUSER.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import model
import psycopg
import pytest
import survivors
from lab import POLICIES, SYSTEMS, Database, Program, Result, Server, clean_environment, configuration

ROLE = "session-retention"
NOBODY = "no-privileges"
HOLDS = """
    CREATE TABLE identity.session_holds (session_id uuid REFERENCES identity.refresh_sessions, reason text);
    CREATE TABLE holds_by_month (session_id uuid REFERENCES identity.refresh_sessions, month int)
        PARTITION BY LIST (month);
    CREATE TABLE holds_of_may PARTITION OF holds_by_month FOR VALUES IN (5);
"""
#: From where the SQL may be written, as PGUSER and whether the server is reached.
WAYS = {"without a connection": None, "as a role without privileges": NOBODY, "as a superuser": "postgres"}
#: Everything that the SQL may change in a database, of the role, grants and indexes.
STATE = """
    SELECT 'table', c.oid::regclass::text, c.relacl::text FROM pg_class c
    WHERE c.relnamespace >= 16384 OR c.relnamespace = 'public'::regnamespace
    UNION ALL SELECT 'column', a.attrelid::regclass || '.' || a.attname, a.attacl::text FROM pg_attribute a
    WHERE a.attacl IS NOT NULL AND a.attrelid >= 16384
    UNION ALL SELECT 'schema', n.nspname, n.nspacl::text FROM pg_namespace n
    UNION ALL SELECT 'index', indexname, indexdef FROM pg_indexes WHERE schemaname !~ '^pg_'
    UNION ALL SELECT 'invalid', indexrelid::regclass::text, '' FROM pg_index WHERE NOT indisvalid
    UNION ALL SELECT 'database', '', datacl::text FROM pg_database WHERE datname = current_database()
    UNION ALL SELECT 'role', rolname, r::text FROM (SELECT rolname, rolsuper, rolcanlogin, rolbypassrls, rolinherit
        FROM pg_roles WHERE oid >= 16384) r
    ORDER BY 1, 2, 3
"""


@pytest.fixture
def bare(server: Server, new_database: Callable[[], Database]) -> Iterator[Callable[[], Database]]:
    """Make databases with the three systems, without grants; their role is made by the SQL, and dropped at the end."""
    made: list[Database] = []
    with server.connect() as connection:
        connection.execute(f'CREATE ROLE "{NOBODY}" LOGIN')

    def make() -> Database:
        database = new_database()
        database.user = ROLE
        database.execute(re.sub(r"^GRANT[^;]*;$", "", SYSTEMS.read_text(), flags=re.MULTILINE))
        made.append(database)
        return database

    yield make
    with server.connect() as connection:
        for database in made:
            database.close()
            connection.execute(f"DROP DATABASE {database.name} WITH (FORCE)")
        connection.execute(f'DROP ROLE IF EXISTS "{ROLE}"; DROP ROLE "{NOBODY}"')


def written(
    program: Program,
    database: Database,
    way: str,
    policies: dict[str, dict[str, Any]] | None = None,
    user: str = "",
    **run: Any,
) -> Result:
    """What the program says where it is to write SQL in that way; `user` is what conninfo has of one."""
    login = WAYS[way]
    host = database.server.directory if login else program.directory / "nobody"
    conninfo = f"host={host} dbname={database.name}{user and f' user={user}'}"
    with pytest.MonkeyPatch.context() as environment:
        if login:
            environment.setenv("PGUSER", login)
        return program.inside(configuration(conninfo, policies, **run), "--print-sql")


def print_sql(
    program: Program,
    database: Database,
    way: str,
    policies: dict[str, dict[str, Any]] | None = None,
    *,
    user: str = "",
    **run: Any,
) -> str:
    """The SQL, written in that way."""
    result = written(program, database, way, policies, user, **run)
    assert (result.returncode, result.stderr) == (0, "")
    offline = WAYS[way] is None
    assert ("\\gexec" in result.stdout, "without a connection" in result.stdout) == (offline, offline)
    return result.stdout


def psql(database: Database, text: str, *, stop: bool = True) -> subprocess.CompletedProcess[str]:
    """Have the superuser's psql execute it; `stop` is the option that ends it at the first error."""
    command: list[str | pathlib.Path] = [database.server.programs / "psql", "-X", "-q", "-f", "-"]
    return subprocess.run(
        [*command, "-d", database.server.conninfo(database.name), *(["-v", "ON_ERROR_STOP=1"] if stop else [])],
        input=text,
        capture_output=True,
        text=True,
        env={**clean_environment(), "LC_ALL": "C.UTF-8"},
        check=False,
    )


def apply(database: Database, text: str) -> None:
    done = psql(database, text)
    assert (done.returncode, done.stderr) == (0, "")


def state(database: Database) -> list[tuple[Any, ...]]:
    return database.execute(STATE)


def refused(database: Database, *statements: str) -> list[str]:
    """Those of the statements that the role is not allowed to execute."""
    found = []
    for statement in statements:
        with database.server.connect(database.name, user=database.user.strip("'"), autocommit=False) as connection:
            try:
                connection.execute(statement)
            except psycopg.errors.InsufficientPrivilege:
                found.append(statement)
            connection.rollback()
    return found


def rows() -> model.Rows:
    """Chains that have ended, that have a live or a young member, and a tree; requests and tokens of many ages."""
    old, young, day = -100 * model.DAY, -10 * model.DAY, model.DAY
    ended = [model.Session(i, "Rotated", old - (9 - i) * day, i - 1 if i else None) for i in range(10)]
    live = [
        model.Session(10 + i, "Active" if i == 4 else "Rotated", old - (9 - i) * day, 9 + i if i else None)
        for i in range(5)
    ]
    fresh = [
        model.Session(20 + i, "Revoked", young if i == 2 else old - i * day, 19 + i if i else None) for i in range(3)
    ]
    tree = [model.Session(30 + i, "Expired", old, 30 if i else None) for i in range(4)]
    return model.Rows(
        [model.Request(i, "Pending", -(20.5 + i) * day) for i in range(20)],
        [*ended, *live, *fresh, *tree],
        [model.Token(i, i % 2 == 0, (3.5 - i) * day) for i in range(10)],
    )


PARTITIONED = """
    CREATE TABLE parted ("Region" text, id int, at timestamptz, secret text, PRIMARY KEY ("Region", id))
        PARTITION BY LIST ("Region");
    CREATE TABLE parted_eu PARTITION OF parted FOR VALUES IN ('eu');
    CREATE TABLE parted_rest PARTITION OF parted DEFAULT;
    CREATE TABLE parted_holds ("Region" text, id int, FOREIGN KEY ("Region", id) REFERENCES parted_eu);
    INSERT INTO parted SELECT r, i, now() - interval '40 days'
        FROM unnest(ARRAY['eu', 'us']) r, generate_series(1, 9) i;
    INSERT INTO parted_holds VALUES ('eu', 5)
"""


@pytest.mark.parametrize("way", WAYS)
def test_a_partitioned_table_needs_its_key_and_nothing_of_its_partitions(
    way: str, bare: Callable[[], Database], program: Program
) -> None:
    """The columns of the key to read, an index over all partitions, and to see what refers to one of them alone."""
    database = bare()
    database.execute(PARTITIONED)
    policies = {"parted": {"table": "parted", "age_column": "at", "retention": "30d"}}
    apply(database, print_sql(program, database, way, policies))
    denied = [
        "SELECT secret FROM parted",
        "SELECT id FROM parted_eu",
        "DELETE FROM parted_rest",
        "UPDATE parted SET id = 1",
    ]
    assert refused(database, *denied) == denied
    check = program.inside(configuration(database.conninfo, policies), "--check", "--json")
    assert [f["code"] for f in check.json["findings"] if not f["code"].startswith(("timer", "schedule"))] == []
    parted = program.inside(None, "--once", "--json").policies["parted"]
    assert (parted["deleted"], parted["backlog"], parted["blocked"], parted["error"]) == (17, 1, 1, None)


@pytest.mark.parametrize("way", WAYS)
def test_the_whole_job_runs_under_what_was_granted(way: str, bare: Callable[[], Database], program: Program) -> None:
    """After it the three systems are purged as the model says, and `--check` has nothing to say."""
    database = bare()
    survivors.fill(database, rows(), wide=False)
    database.execute("DROP INDEX identity.ix_refresh_sessions_parent_session_id, ix_refresh_tokens_expires_at")
    database.execute(HOLDS)
    apply(database, print_sql(program, database, way))
    config = configuration(database.conninfo)
    check = program.inside(config, "--check", "--json")
    severities = {(f["severity"], f["code"]) for f in check.json["findings"] if not f["code"].startswith("timer")}
    assert (check.returncode, severities) == (0, set()), check.output
    run = program.inside(None, "--once", "--json")
    expected = model.outcome(rows(), 0.0, list(POLICIES))
    assert (run.returncode, {name: policy["error"] for name, policy in run.policies.items()}) == (
        0,
        dict.fromkeys(POLICIES),
    )
    assert {n: (p["deleted"], p["backlog"], p["blocked"]) for n, p in run.policies.items()} == {
        name: (count.deleted, count.backlog, count.blocked) for name, count in expected.counts.items()
    }
    left = survivors.contents(database)
    assert set(left["sessions"]) == {survivors.uuid(number) for number in expected.sessions}
    assert set(left["tokens"]) == expected.tokens


def test_it_is_the_same_from_wherever_it_was_written(bare: Callable[[], Database], program: Program) -> None:
    """Without a connection, as nobody and as the superuser: the same role, grants and indexes."""
    results = []
    for way in WAYS:
        database = bare()
        database.execute("DROP INDEX identity.ix_refresh_sessions_parent_session_id, identity.ix_sicr_created_at")
        database.execute(HOLDS)
        text = print_sql(program, database, way)
        apply(database, text)
        granted = state(database)
        assert ("role", ROLE) in [row[:2] for row in granted]
        results.append(granted)
        with database.server.connect() as connection:  # the next one makes the role anew
            connection.execute(f"DROP DATABASE {database.name} WITH (FORCE)")
            connection.execute(f"CREATE DATABASE {database.name}")
            connection.execute(f'DROP ROLE "{ROLE}"')
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("way", WAYS)
def test_the_role_cannot_do_what_the_job_does_not(way: str, bare: Callable[[], Database], program: Program) -> None:
    """It can neither read what is personal, nor change a status, nor insert; what it can update is the key."""
    database = bare()
    database.execute(HOLDS)
    apply(database, print_sql(program, database, way))
    requests, sessions, tokens = survivors.TABLES.values()
    forbidden = [
        f"SELECT phone_number FROM {requests}",
        *(f"SELECT {column} FROM {t}" for t in survivors.TABLES.values() for column in ("user_agent", "ip_address")),
        f"SELECT token_hash FROM {tokens}",
        f"SELECT user_id FROM {sessions}",
        "SELECT reason FROM identity.session_holds",
        "SELECT month FROM holds_by_month",
        *(f"SELECT * FROM {table}" for table in survivors.TABLES.values()),
        f"UPDATE {sessions} SET status = 'Active'",
        f"UPDATE {sessions} SET updated_at = now()",
        f"UPDATE {sessions} SET parent_session_id = NULL",
        f"UPDATE {requests} SET created_at = now()",
        f"UPDATE {tokens} SET is_revoked = true",
        f"UPDATE {tokens} SET expires_at = now()",
        *(f"INSERT INTO {table} DEFAULT VALUES" for table in survivors.TABLES.values()),
        *(f"TRUNCATE {table}" for table in survivors.TABLES.values()),
        "DELETE FROM identity.session_holds",
        "INSERT INTO identity.session_holds DEFAULT VALUES",
        "UPDATE identity.session_holds SET session_id = NULL",
        "CREATE TABLE identity.x ()",
        "CREATE ROLE x",
    ]
    assert refused(database, *forbidden) == forbidden
    allowed = [
        f"UPDATE {sessions} SET id = gen_random_uuid()",
        f"UPDATE {requests} SET id = gen_random_uuid()",
        f"UPDATE {tokens} SET id = 1",
        f"SELECT ctid, id, status, updated_at, parent_session_id FROM {sessions} FOR UPDATE SKIP LOCKED",
        f"SELECT ctid, created_at FROM {requests}",
        f"SELECT ctid, expires_at, is_revoked FROM {tokens}",
        *(f"DELETE FROM {table}" for table in survivors.TABLES.values()),
        "SELECT session_id FROM identity.session_holds",
        "SELECT session_id FROM holds_by_month",
    ]
    assert refused(database, *allowed) == []


@pytest.mark.parametrize("way", WAYS)
def test_the_sight_of_standbys_is_granted_to_who_waits_for_them(
    way: str, bare: Callable[[], Database], program: Program
) -> None:
    """Not without the option. Before PostgreSQL 17 there is nothing to grant for VACUUM, and no error of it."""
    database = bare()
    sees = "SELECT pg_has_role(%s, 'pg_read_all_stats', 'USAGE')"
    apply(database, print_sql(program, database, way))
    assert database.value(sees, ROLE) is False
    before = set(state(database))
    for _ in range(2):
        apply(database, print_sql(program, database, way, max_replication_lag="10s", vacuum=True))
    assert (database.value(sees, ROLE), set(state(database))) == (True, before)


@pytest.mark.parametrize("way", WAYS)
def test_indexes_that_the_job_needs_are_made_concurrently(
    way: str, bare: Callable[[], Database], program: Program
) -> None:
    """Of foreign keys and of the age where it is walked along; none on updated_at, none that there is already."""
    database = bare()
    text = print_sql(program, database, way)
    before = [row for row in state(database) if row[0] == "index"]
    apply(database, text)
    assert [row for row in state(database) if row[0] == "index"] == before
    database.execute("DROP INDEX identity.ix_refresh_sessions_parent_session_id, ix_refresh_tokens_expires_at")
    database.execute(HOLDS)
    text = print_sql(program, database, way)
    apply(database, text)
    after = {row[2] for row in state(database) if row[0] == "index" and row not in before}
    assert sorted(re.sub(r"INDEX .* ON ", "INDEX ON ", definition) for definition in after) == [
        "CREATE INDEX ON ONLY public.holds_by_month USING btree (session_id)",
        "CREATE INDEX ON identity.refresh_sessions USING btree (parent_session_id)",
        "CREATE INDEX ON identity.session_holds USING btree (session_id)",
        "CREATE INDEX ON public.holds_of_may USING btree (session_id)",
        "CREATE INDEX ON public.refresh_tokens USING btree (expires_at)",
    ]
    if way != "without a connection":
        made = re.findall(r"^CREATE INDEX .*$", text, flags=re.MULTILINE)
        assert ["CONCURRENTLY" in statement for statement in made] == ["by_month" not in line for line in made]


@pytest.mark.parametrize("way", WAYS)
def test_written_and_executed_a_second_time_it_changes_nothing(
    way: str, bare: Callable[[], Database], program: Program
) -> None:
    """What is there already is not asked for again, and nothing fails."""
    database = bare()
    database.execute("DROP INDEX identity.ix_refresh_sessions_parent_session_id")
    apply(database, print_sql(program, database, way))
    first = state(database)
    again = print_sql(program, database, way)
    apply(database, again)
    assert state(database) == first
    assert re.findall("^CREATE", again, flags=re.MULTILINE) == []


@pytest.mark.parametrize("way", WAYS)
def test_the_same_file_executed_twice_does_no_harm(way: str, bare: Callable[[], Database], program: Program) -> None:
    """The second time psql may say that the role or an index is there, but nothing is made twice or left out."""
    database = bare()
    database.execute(HOLDS)
    database.execute("DROP INDEX identity.ix_refresh_sessions_parent_session_id, identity.ix_sicr_created_at")
    text = print_sql(program, database, way)
    apply(database, text)
    first = state(database)
    done = psql(database, text, stop=False)
    assert state(database) == first
    said = [line for line in done.stderr.splitlines() if not line.endswith("already exists, skipping")]
    role = [] if WAYS[way] is None else [f'role "{ROLE}" already exists']
    assert (done.returncode, [line.partition("ERROR:  ")[2] for line in said]) == (0, role)


@pytest.mark.parametrize("table", ["identity.sessions", '"Identity".refresh_sessions', '"it\'s \\"'])
def test_a_table_that_does_not_exist_is_an_error_of_psql(
    table: str, bare: Callable[[], Database], program: Program
) -> None:
    """Whoever mistyped a name sees it in psql, which ends with an error, before anything is granted or created.

    So it does without the option that the DBA may not know of.
    """
    database = bare()
    before = state(database)
    policies = {"sicr": POLICIES["sicr"], "refresh": {**POLICIES["refresh"], "table": table}}
    text = print_sql(program, database, "without a connection", policies)
    assert "psql -d DATABASE -f FILE" in text
    done = psql(database, text, stop=False)
    assert done.returncode == 3
    assert "does not exist" in done.stderr
    assert table.split(".")[-1].strip('"') in done.stderr
    assert state(database) == before


@pytest.mark.parametrize("login", [way for way, login in WAYS.items() if login])
def test_tables_that_do_not_exist_are_named_where_there_is_a_connection(
    login: str, bare: Callable[[], Database], program: Program
) -> None:
    """Exit 1, one line that names each of them as the configuration does, and nothing that might be executed."""
    missing = ["identity.sessions", '"Identity".refresh_sessions', '"it\'s \\"', "public.tokens"]
    policies = {"sicr": POLICIES["sicr"]}
    policies |= {f"p{number}": {**POLICIES["sicr"], "table": table} for number, table in enumerate(missing)}
    result = written(program, bare(), login, policies)
    assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (1, "", 1)
    assert [table for table in missing if table not in result.stderr] == []
    assert "sign_in_confirmation_requests" not in result.stderr


@pytest.mark.parametrize("login", [way for way, login in WAYS.items() if login])
def test_mistakes_about_columns_are_named_where_there_is_a_connection(
    login: str, bare: Callable[[], Database], program: Program
) -> None:
    """Exit 1, one line that names each wrong column and type, and nothing that might be executed."""
    database = bare()
    database.execute("""
        ALTER TABLE identity.sign_in_confirmation_requests ALTER phone_number TYPE varchar(5);
        CREATE VIEW requests AS SELECT * FROM identity.sign_in_confirmation_requests;
    """)
    sicr, refresh = POLICIES["sicr"], POLICIES["refresh"]
    wrong = {
        'no column "created"': {**sicr, "age_column": "created"},
        '"phone_number" of identity': {**sicr, "age_column": "phone_number"},
        "policy.p2.only gives whole numbers": {**refresh, "only": {"status": [1]}},
        "cannot be '+7 800'": {**sicr, "only": {"phone_number": ["+7 80", "+7 800"]}},
        'no column "parent"': {**refresh, "parent_column": "parent"},
        '"status" of identity.refresh_sessions is': {**refresh, "parent_column": "status"},
        "is a view": {**sicr, "table": "requests"},
    }
    policies = {f"p{number}": policy for number, policy in enumerate(wrong.values())}
    policies["tokens"] = POLICIES["tokens_expired"]
    result = written(program, database, login, policies)
    assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (1, "", 1), result.output
    assert [words for words in wrong if words not in result.stderr] == [], result.stderr
    assert "refresh_tokens" not in result.stderr


@pytest.mark.parametrize("way", ["without a connection", "as a superuser"])
def test_every_index_is_made_however_alike_the_names_are(
    way: str, bare: Callable[[], Database], program: Program
) -> None:
    """Names too long for PostgreSQL to keep, and names that look alike when joined: no index is taken for another."""
    long = "sign_in_confirmation_requests_that_were_kept_for_audit"
    policies = {"tokens": POLICIES["tokens_expired"]}
    database = bare()
    database.execute(f"""
        CREATE TABLE {long} (requested bigint REFERENCES refresh_tokens, used bigint REFERENCES refresh_tokens);
        CREATE TABLE holds (of_request bigint REFERENCES refresh_tokens);
        CREATE TABLE holds_of (request bigint REFERENCES refresh_tokens);
    """)
    psql(database, print_sql(program, database, way, policies))
    check = program.inside(configuration(database.conninfo, policies), "--check", "--json")
    found = [finding["message"] for finding in check.json["findings"] if finding["code"] == "reference_unindexed"]
    assert (check.returncode, found) == (0, [])


@pytest.mark.parametrize("way", ["without a connection", "as a superuser"])
def test_each_parent_column_of_a_table_has_its_index(way: str, bare: Callable[[], Database], program: Program) -> None:
    """Two policies on one table that name different ones: nothing is missing afterwards, neither index nor grant."""
    database = bare()
    database.execute("CREATE TABLE pairs (id bigint PRIMARY KEY, one bigint, two bigint, at timestamptz)")
    policy = {"table": "pairs", "age_column": "at", "retention": "30d"}
    policies = {name: {**policy, "parent_column": name} for name in ("one", "two")}
    apply(database, print_sql(program, database, way, policies))
    check = program.inside(configuration(database.conninfo, policies), "--check", "--json")
    codes = {finding["code"] for finding in check.json["findings"]}
    assert (check.returncode, codes & {"reference_unindexed", "privilege_missing"}) == (0, set()), check.output


@pytest.mark.parametrize("way", ["without a connection", "as a superuser"])
def test_an_index_that_was_not_finished_is_made_when_it_is_executed_again(
    way: str, bare: Callable[[], Database], program: Program
) -> None:
    """What a time-out has left behind of CREATE INDEX CONCURRENTLY, an invalid index, is not taken for the index."""
    policies = {"tokens": POLICIES["tokens_expired"]}
    database = bare()
    database.execute("DROP INDEX ix_refresh_tokens_expires_at")
    text = print_sql(program, database, way, policies)
    with database.connect(autocommit=False) as elsewhere:
        elsewhere.execute("LOCK TABLE refresh_tokens IN ROW EXCLUSIVE MODE")
        interrupted = psql(database, f"SET lock_timeout = '200ms';\n{text}")
    assert (interrupted.returncode, "lock timeout" in interrupted.stderr) == (3, True)
    psql(database, print_sql(program, database, way, policies))
    check = program.inside(configuration(database.conninfo, policies), "--check", "--json")
    codes = [finding["code"] for finding in check.json["findings"] if not finding["code"].startswith("timer")]
    assert (check.returncode, codes) == (0, [])


def test_chains_need_no_index_on_their_age_though_only_the_foreign_key_tells_of_them(
    bare: Callable[[], Database], program: Program
) -> None:
    """The self reference is obeyed without parent_column, and then no index on updated_at is asked for either."""
    database = bare()
    refresh = {key: value for key, value in POLICIES["refresh"].items() if key != "parent_column"}
    for way in WAYS:
        text = print_sql(program, database, way, {"refresh": refresh})
        assert "CREATE INDEX" not in psql_dry(database, text) + (text if WAYS[way] else "")


@pytest.mark.parametrize("way", ["without a connection", "as a superuser"])
def test_any_name_is_quoted(way: str, new_database: Callable[[], Database], program: Program, server: Server) -> None:
    """Role, schema, table and columns with quotes, percent signs, braces, colons and backslashes; reserved words."""
    role, table, child = "Night \"Job\" 100% :x 'y' {0}", '"It\'s 100%"."user"', '"It\'s 100%"."the ""holds"""'
    age, state_column, parent = 'at "%s" \\d', "order", "Parent's {id}"
    quoted_age, quoted_parent = '"at ""%s"" \\d"', '"Parent\'s {id}"'
    database = new_database()
    database.execute(f"""
        CREATE SCHEMA "It's 100%";
        CREATE TABLE {table} ("Key" bigint PRIMARY KEY, {quoted_age} timestamptz, "order" text, secret text,
                              {quoted_parent} bigint REFERENCES {table});
        CREATE TABLE {child} ("select" bigint REFERENCES {table});
        INSERT INTO {table} VALUES (1, now() - interval '9 days', 'x', 's', NULL), (2, now(), 'x', 's', 1),
            (3, now() - interval '9 days', 'x', 's', NULL), (4, now() - interval '9 days', 'x', 's', 3),
            (5, now() - interval '9 days', 'x', 's', NULL);
        INSERT INTO {child} VALUES (5);
    """)
    policy = {
        "table": table,
        "age_column": age,
        "retention": "7d",
        "only": {state_column: ["x"]},
        "parent_column": parent,
    }
    user = "'" + role.replace("\\", "\\\\").replace("'", "\\'") + "'"
    with server.connect() as connection:
        if way == "as a superuser":
            # whom conninfo names is who connects: the role has to be there
            connection.execute('CREATE ROLE "Night ""Job"" 100% :x \'y\' {0}" LOGIN SUPERUSER')
    try:
        text = print_sql(program, database, way, {"probe": policy}, user=user)
        with server.connect() as connection:
            if way == "as a superuser":
                connection.execute('ALTER ROLE "Night ""Job"" 100% :x \'y\' {0}" NOSUPERUSER')
        apply(database, text)
        database.user = user
        config = configuration(database.conninfo, {"probe": policy})
        check = program.inside(config, "--check", "--json")
        codes = {f["code"] for f in check.json["findings"] if not f["code"].startswith("timer")}
        assert (check.returncode, codes) == (0, set())
        run = program.inside(None, "--once", "--json").policies["probe"]
        assert (run["deleted"], run["blocked"], run["error"]) == (2, 2, None)
    finally:
        database.close()
        with server.connect() as connection:
            connection.execute(f"DROP DATABASE {database.name} WITH (FORCE)")
            connection.execute('DROP ROLE IF EXISTS "Night ""Job"" 100% :x \'y\' {0}"')


def test_the_role_is_that_of_the_connection_string(bare: Callable[[], Database], program: Program) -> None:
    """`user` in conninfo, as keyword or in a URI; else session-retention."""
    database = bare()
    assert 'TO "night-job"' in psql_dry(
        database, print_sql(program, database, "without a connection", user="night-job")
    )
    assert f'TO "{ROLE}"' in psql_dry(database, print_sql(program, database, "without a connection"))
    config = configuration(f"postgresql://night%2Djob@127.0.0.1:1/{database.name}")
    assert 'TO "night-job"' in psql_dry(database, program.inside(config, "--print-sql").stdout)
    database.execute('DROP ROLE IF EXISTS "night-job"')


def psql_dry(database: Database, text: str) -> str:
    """What psql would execute: each query's rows instead of their execution."""
    done = psql(database, text.replace("\\gexec", "\\g"))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("reached", [True, False])
def test_a_password_never_shows(reached: bool, bare: Callable[[], Database], program: Program) -> None:
    """Neither one of the connection string, with or without a connection, nor of the environment or a credential."""
    database = bare()
    host = database.server.directory if reached else program.directory / "hunter2-is-not-here"
    credentials = program.directory / "credentials"
    credentials.mkdir()
    pathlib.Path(credentials, "db-password").write_text("hunter4")
    for conninfo in (
        f"host={host} dbname={database.name} password=hunter2 user=postgres",
        f"postgresql://postgres:hunter2@/{database.name}?host={str(host).replace('/', '%2F')}",
    ):
        env = {"PGPASSWORD": "hunter3", "CREDENTIALS_DIRECTORY": str(credentials)}
        result = program(configuration(conninfo), "--print-sql", env=env)
        assert result.returncode == 0
        assert ("without a connection" in result.stdout) is not reached
        assert re.findall("hunter[34]|hunter2(?!-is)", result.output) == []


@pytest.mark.parametrize("option", [["--json"], ["--policy", "sicr"], ["--check"]], ids=" ".join)
def test_options_that_do_not_go_with_it_are_refused(option: list[str], program: Program) -> None:
    """It is SQL for every policy, and nothing else."""
    config = configuration(f"host={program.directory}")
    result = program.inside(config, "--print-sql", *option)
    assert (result.returncode, result.stdout) == (2, "")


def test_a_wrong_configuration_prints_no_sql(program: Program) -> None:
    """78, and nothing that somebody might pipe into psql."""
    result = program.inside(
        configuration("host=/nowhere", {"sicr": {**POLICIES["sicr"], "retention": "x"}}), "--print-sql"
    )
    assert (result.returncode, result.stdout) == (78, "")


def test_a_policy_that_is_switched_off_is_left_out(bare: Callable[[], Database], program: Program) -> None:
    """No privilege is granted for what does not run."""
    database = bare()
    policies = {**POLICIES, "refresh": {**POLICIES["refresh"], "enabled": False}}
    apply(database, print_sql(program, database, "without a connection", policies))
    assert refused(database, "DELETE FROM identity.refresh_sessions") == ["DELETE FROM identity.refresh_sessions"]
    assert refused(database, "DELETE FROM refresh_tokens") == []
