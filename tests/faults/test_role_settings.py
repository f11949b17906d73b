"""What a role, a database or an environment sets by default: none of it changes which rows go, or how they are counted.

In every database here somebody has also put functions, operators and tables of the catalog's names into public and
into another schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from chains import TABLE, load
from lab import POLICIES, Database, Program, Result, configuration, log, until

SICR = "identity.sign_in_confirmation_requests"
#: Planted in public and in `decoy`: what an unqualified name would find there, were the search path to lead there.
PLANTED = """
CREATE SCHEMA decoy;
GRANT USAGE ON SCHEMA decoy TO retention;
CREATE FUNCTION {schema}.now() RETURNS timestamptz LANGUAGE sql AS $$ SELECT timestamptz '2100-01-01' $$;
CREATE FUNCTION {schema}.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS $$ SELECT timestamptz '2100-01-01' $$;
CREATE FUNCTION {schema}.pg_relation_size(oid) RETURNS bigint LANGUAGE sql AS 'SELECT 0::bigint';
CREATE FUNCTION {schema}.pg_relation_size(regclass) RETURNS bigint LANGUAGE sql AS 'SELECT 0::bigint';
CREATE FUNCTION {schema}.pg_is_in_recovery() RETURNS boolean LANGUAGE sql AS 'SELECT true';
CREATE FUNCTION {schema}.yes(timestamptz, timestamptz) RETURNS bool LANGUAGE sql AS 'SELECT true';
CREATE FUNCTION {schema}.no(uuid, uuid) RETURNS bool LANGUAGE sql AS 'SELECT false';
CREATE FUNCTION {schema}.yes(text, text) RETURNS bool LANGUAGE sql AS 'SELECT true';
CREATE OPERATOR {schema}.< (LEFTARG = timestamptz, RIGHTARG = timestamptz, FUNCTION = {schema}.yes);
CREATE OPERATOR {schema}.= (LEFTARG = uuid, RIGHTARG = uuid, FUNCTION = {schema}.no);
CREATE OPERATOR {schema}.= (LEFTARG = text, RIGHTARG = text, FUNCTION = {schema}.yes);
CREATE TABLE {schema}.pg_class (LIKE pg_catalog.pg_class);
CREATE TABLE {schema}.pg_constraint (LIKE pg_catalog.pg_constraint);
GRANT ALL ON {schema}.pg_class, {schema}.pg_constraint TO retention;
"""
OTHERS = """
CREATE TABLE decoy.refresh_tokens (LIKE public.refresh_tokens INCLUDING ALL);
INSERT INTO decoy.refresh_tokens (id, expires_at) SELECT i, '-infinity' FROM generate_series(1, 9) i;
GRANT ALL ON decoy.refresh_tokens TO retention;
"""


def prepare(database: Database) -> dict[str, tuple[int, int, int, int]]:
    """Rows of the three systems; returns what must become of them: deleted, backlog, blocked, undeletable."""
    fate = load(database, 10, 20)
    database.execute(f"""
        INSERT INTO {SICR} (phone_number, created_at)
            SELECT 'old', now() - interval '30 days 1 hour' - i * interval '7 hours' FROM generate_series(1, 70) i
            UNION ALL SELECT 'old', '-infinity'
            UNION ALL SELECT 'young', now() - interval '29 days 23 hours' + i * interval '7 hours'
                FROM generate_series(0, 70) i
            UNION ALL SELECT 'young', 'infinity' UNION ALL SELECT 'young', NULL;
        INSERT INTO refresh_tokens (token_hash, is_revoked, expires_at)
            SELECT 'old', i % 2 = 0, now() - i * interval '1 hour' FROM generate_series(1, 70) i
            UNION ALL SELECT 'young', i % 2 = 0, now() + i * interval '1 hour' FROM generate_series(1, 70) i;
        ANALYZE;
        {PLANTED.format(schema="decoy")}{PLANTED.partition("retention;")[2].format(schema="public")}{OTHERS}
    """)
    return {
        "sicr": (71, 0, 0, 0),
        "refresh": (len(fate.finished), len(fate.blocked), len(fate.blocked), 0),
        "tokens_expired": (70, 0, 0, 0),
        "tokens_revoked": (0, 0, 0, 0),
    }


def survivors(database: Database) -> dict[str, Any]:
    """What is left, by the labels that the rows were made with."""
    return {
        "sicr": database.execute(f"SELECT phone_number, count(*)::int FROM {SICR} GROUP BY 1"),
        "refresh": {row[0] for row in database.execute(f"SELECT id FROM {TABLE}")},
        "tokens": database.execute("SELECT token_hash, count(*)::int FROM public.refresh_tokens GROUP BY 1"),
        "decoy": database.count("decoy.refresh_tokens"),
    }


class Prepared:
    """The three systems with rows, and the comparison of a run with what must become of them."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.counts = prepare(database)
        staying = {
            row[0]
            for row in database.execute(f"""
                WITH RECURSIVE kept AS (
                    SELECT id, parent_session_id FROM {TABLE}
                    WHERE status = 'Active' OR updated_at >= now() - interval '90 days'
                    UNION
                    SELECT p.id, p.parent_session_id FROM kept k JOIN {TABLE} p ON p.id = k.parent_session_id
                )
                SELECT id FROM kept
            """)
        }
        self.left = {"sicr": [("young", 73)], "refresh": staying, "tokens": [("young", 70)], "decoy": 9}
        self.before = survivors(database)

    def set(self, settings: list[str]) -> None:
        for setting in settings:
            self.database.execute(f"ALTER ROLE retention IN DATABASE {self.database.name} SET {setting}")

    def check(self, dry: Result, result: Result) -> None:
        """The dry run foresaw it, the run did it, and nothing had to be tried twice."""
        assert (dry.returncode, result.returncode) == (0, 0), dry.output + result.output
        keys = ("backlog", "blocked", "undeletable")
        counts = {name: tuple(p[key] for key in ("deleted", *keys)) for name, p in result.policies.items()}
        assert counts == self.counts
        assert survivors(self.database) == self.left
        foreseen = {name: policy["would_delete"] for name, policy in dry.policies.items()}
        assert foreseen == {name: count[0] for name, count in self.counts.items()}
        assert not [line for line in log(result.stderr) if line.message.startswith("batch failed")], result.stderr


@pytest.fixture
def prepared(systems: Database) -> Iterator[Prepared]:
    yield Prepared(systems)
    systems.execute(f"ALTER ROLE retention IN DATABASE {systems.name} RESET ALL")


NODES = (
    "seqscan indexscan indexonlyscan bitmapscan tidscan sort incremental_sort nestloop hashjoin mergejoin hashagg"
    " material memoize gathermerge parallel_hash parallel_append"
)
DEFAULTS = {
    "repeatable read": ["default_transaction_isolation = 'repeatable read'"],
    "serializable": ["default_transaction_isolation = 'serializable'", "default_transaction_deferrable = on"],
    "time-outs": ["statement_timeout = '1s'", "lock_timeout = '1ms'", "idle_in_transaction_session_timeout = '500ms'"],
    "no search path": ["search_path = ''"],
    "search path": ["search_path = decoy, public, pg_catalog"],
    "path of nowhere": ['search_path = nowhere, "$user"'],
    "dates": ["datestyle = 'German, DMY'", "timezone = 'Pacific/Kiritimati'", "intervalstyle = 'sql_standard'"],
    "strings": ["standard_conforming_strings = off", "backslash_quote = off", "bytea_output = 'escape'"],
    "identifiers": ["quote_all_identifiers = on"],
    "nulls": ["transform_null_equals = on", "array_nulls = off"],
    "numbers": ["extra_float_digits = -15"],
    "encoding": ["client_encoding = 'LATIN1'"],
    "messages": ["client_min_messages = 'debug5'", "exit_on_error = on"],
    "row security": ["row_security = off", "synchronous_commit = remote_apply"],
    "memory": ["work_mem = '64kB'", "temp_buffers = '800kB'", "temp_tablespaces = 'nowhere'"],
    "parallel": [
        "force_parallel_mode = on",
        "debug_parallel_query = on",
        "max_parallel_workers_per_gather = 8",
        "min_parallel_table_scan_size = 0",
        "parallel_setup_cost = 0",
        "parallel_tuple_cost = 0",
    ],
    "planner": [f"enable_{node} = off" for node in NODES.split()],
    "dear": ["random_page_cost = 1e6", "cpu_tuple_cost = 1e3", "jit_above_cost = 0", "jit_optimize_above_cost = 0"],
    "joins": ["from_collapse_limit = 1", "join_collapse_limit = 1", "geqo_threshold = 2"],
    "plans": ["plan_cache_mode = force_generic_plan", "constraint_exclusion = on"],
}


def known(database: Database, settings: list[str]) -> list[str]:
    """Those of the settings that this version of the server has."""
    names = {row[0] for row in database.execute("SELECT lower(name) FROM pg_settings")}
    return [setting for setting in settings if setting.partition(" = ")[0] in names]


@pytest.mark.parametrize("settings", DEFAULTS.values(), ids=DEFAULTS)
def test_a_default_of_the_role_changes_nothing(settings: list[str], prepared: Prepared, program: Program) -> None:
    """Same survivors, same counts, no retry, whatever the role has as its default."""
    prepared.set(known(prepared.database, settings))
    config = configuration(prepared.database.conninfo, batch_size=30)
    dry = program.inside(config, "--dry-run", "--json")
    prepared.check(dry, program.inside(None, "--once", "--json"))


def test_all_defaults_at_once_change_nothing(prepared: Prepared, program: Program) -> None:
    """All of them together, but for those that another contradicts; and none of them is unheard of."""
    every = [setting for settings in DEFAULTS.values() for setting in settings]
    usable = known(prepared.database, every)
    assert len(usable) >= len(every) - 2
    prepared.set(sorted(usable, key=lambda setting: setting in DEFAULTS["search path"] + DEFAULTS["serializable"]))
    config = configuration(prepared.database.conninfo, batch_size=30)
    dry = program.inside(config, "--dry-run", "--json")
    prepared.check(dry, program.inside(None, "--once", "--json"))


#: What a batch runs with, whatever the role has as its default.
OURS = {
    "transaction_isolation": "read committed",
    "transaction_read_only": "off",
    "statement_timeout": "1min",
    "lock_timeout": "2s",
    "idle_in_transaction_session_timeout": "1min",
    "client_connection_check_interval": "1s",
    "row_security": "off",
    "synchronous_commit": "local",
    "datestyle": "ISO",
    "timezone": "UTC",
    "jit": "off",
    "max_parallel_workers_per_gather": "0",
}


def test_a_batch_runs_with_settings_of_its_own(systems: Database, program: Program) -> None:
    """A trigger sees the time-outs of the configuration and settings that no role has changed."""
    systems.execute(
        "INSERT INTO refresh_tokens (expires_at) SELECT now() - interval '1 day' FROM generate_series(1, 2);"
        "CREATE TABLE seen (name text, setting text); GRANT INSERT ON seen TO retention;"
        "CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS"
        "    $$ BEGIN INSERT INTO seen SELECT n, current_setting(n)"
        f"    FROM unnest(ARRAY{list(OURS)}) n; RETURN OLD; END $$;"
        "CREATE TRIGGER look BEFORE DELETE ON refresh_tokens FOR EACH ROW EXECUTE FUNCTION look()"
    )
    for setting in known(systems, [setting for settings in DEFAULTS.values() for setting in settings]):
        systems.execute(f"ALTER ROLE retention IN DATABASE {systems.name} SET {setting}")
    result = program.inside(configuration(systems.conninfo, {"tokens": POLICIES["tokens_expired"]}), "--once", "--json")
    assert (result.returncode, systems.count("refresh_tokens")) == (0, 0), result.output
    seen = {name: setting.partition(",")[0] for name, setting in systems.execute("SELECT DISTINCT * FROM seen")}
    assert seen == OURS


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_what_is_renewed_while_a_batch_waits_stays(isolation: str, systems: Database, program: Program) -> None:
    """Rows that change while we wait for the table are seen as they are then: no failure, no second try."""
    systems.execute(
        "INSERT INTO refresh_tokens (expires_at) SELECT now() - interval '1 day' FROM generate_series(1, 60);"
        f"ALTER ROLE retention IN DATABASE {systems.name} SET default_transaction_isolation = '{isolation}'"
    )
    holder = systems.connect(autocommit=False)
    holder.execute("LOCK TABLE refresh_tokens IN EXCLUSIVE MODE")
    config = configuration(
        systems.conninfo, {"tokens": POLICIES["tokens_expired"]}, database={"lock_timeout": "1m"}, batch_size=30
    )
    process = program.start(config, "--once", "--json")
    waiting = "SELECT count(*) FROM pg_locks WHERE relation = 'refresh_tokens'::regclass AND NOT granted"
    until(lambda: systems.value(waiting), "the batch waits")
    holder.execute("UPDATE refresh_tokens SET expires_at = now() + interval '1 day' WHERE id % 2 = 0")
    holder.commit()
    result = program.finish(process)
    tokens = result.policies["tokens"]
    assert (result.returncode, tokens["deleted"], tokens["backlog"]) == (0, 30, 0), result.output
    assert systems.count("refresh_tokens") == systems.count("refresh_tokens", "expires_at > now()") == 30
    assert not [line for line in log(result.stderr) if line.message.startswith("batch failed")]


ENVIRONMENTS = [
    {"PGOPTIONS": "-c default_transaction_isolation=serializable -c search_path=decoy -c enable_tidscan=off"},
    {"PGOPTIONS": "-c statement_timeout=1s -c standard_conforming_strings=off -c extra_float_digits=-15"},
    {"PGDATESTYLE": "German, DMY", "PGTZ": "Pacific/Kiritimati", "PGCLIENTENCODING": "LATIN1", "PGGEQO": "off"},
    {"PGCLIENTENCODING": "SQL_ASCII", "PGAPPNAME": "another", "LC_ALL": "C", "PYTHONUTF8": "0"},
    {"PGHOST": "/nowhere", "PGDATABASE": "nowhere", "PGUSER": "nobody"},
]


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=" ".join)
def test_an_environment_changes_nothing(environment: dict[str, str], prepared: Prepared, program: Program) -> None:
    """What libpq reads from the environment, in a shell or a unit with settings for somebody else's work."""
    config = configuration(prepared.database.conninfo, batch_size=30)
    dry = program(config, "--dry-run", "--json", env=environment)
    prepared.check(dry, program(None, "--once", "--json", env=environment))


def test_time_outs_of_the_role_do_not_end_our_batches(systems: Database, program: Program) -> None:
    """A batch may take what our own configuration says; the defaults of the role are for others."""
    systems.execute(
        "INSERT INTO refresh_tokens (expires_at) SELECT now() - interval '1 day' FROM generate_series(1, 60);"
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS"
        "    $$ BEGIN PERFORM pg_sleep(0.02); RETURN OLD; END $$;"
        "CREATE TRIGGER slow BEFORE DELETE ON refresh_tokens FOR EACH ROW EXECUTE FUNCTION slow()"
    )
    for setting in ("statement_timeout", "idle_in_transaction_session_timeout", "lock_timeout"):
        systems.execute(f"ALTER ROLE retention IN DATABASE {systems.name} SET {setting} = '500ms'")
    policies = {"tokens": POLICIES["tokens_expired"]}
    result = program.inside(configuration(systems.conninfo, policies), "--once", "--json")
    assert (result.returncode, result.policies["tokens"]["deleted"]) == (0, 60), result.output
    lines = log(result.stderr)
    assert [line.message for line in lines if line.message.startswith("batch")] == ["batch deleted"]


def test_an_idle_time_out_between_two_batches_costs_nothing(systems: Database, program: Program) -> None:
    """A server that hangs up on us before the pause ends: each batch connects again, and all rows go once."""
    systems.execute(
        "INSERT INTO refresh_tokens (expires_at) SELECT now() - interval '1 day' FROM generate_series(1, 40)"
    )
    systems.execute(f"ALTER ROLE retention IN DATABASE {systems.name} SET idle_session_timeout = '600ms'")
    policies = {"tokens": POLICIES["tokens_expired"]}
    result = program.inside(configuration(systems.conninfo, policies, batch_size=10, pause="1s"), "--once", "--json")
    tokens = result.policies["tokens"]
    assert (result.returncode, tokens["deleted"], tokens["backlog"]) == (0, 40, 0), result.output
    batches = [int(line.fields["deletedCount"]) for line in log(result.stderr) if line.event == "batch_deleted"]
    assert sum(batches) == 40


def test_a_transaction_time_out_of_the_role_does_not_end_our_batches(systems: Database, program: Program) -> None:
    """The limit on whole transactions that PostgreSQL 17 has: a batch may take what our own configuration says."""
    if systems.server.connect().info.server_version < 170000:
        pytest.skip("this server has no transaction_timeout")
    systems.execute(
        "INSERT INTO refresh_tokens (expires_at) SELECT now() - interval '1 day' FROM generate_series(1, 60);"
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS"
        "    $$ BEGIN PERFORM pg_sleep(0.02); RETURN OLD; END $$;"
        "CREATE TRIGGER slow BEFORE DELETE ON refresh_tokens FOR EACH ROW EXECUTE FUNCTION slow();"
        f"ALTER ROLE retention IN DATABASE {systems.name} SET transaction_timeout = '500ms'"
    )
    policies = {"tokens": POLICIES["tokens_expired"]}
    result = program.inside(configuration(systems.conninfo, policies), "--once", "--json")
    assert (result.returncode, result.policies["tokens"]["deleted"]) == (0, 60), result.output


def test_a_role_that_switches_foreign_keys_off_deletes_nothing(systems: Database, program: Program) -> None:
    """With session_replication_role = replica no key is checked and no trigger asked: what a hold keeps would go."""
    systems.execute(
        "INSERT INTO refresh_tokens (id, expires_at) SELECT i, now() - interval '1 day' FROM generate_series(1, 60) i;"
        "CREATE TABLE holds (token bigint REFERENCES refresh_tokens); INSERT INTO holds VALUES (17);"
        f"ALTER ROLE retention IN DATABASE {systems.name} SET session_replication_role = replica"
    )
    result = program.inside(configuration(systems.conninfo, {"tokens": POLICIES["tokens_expired"]}), "--once", "--json")
    assert systems.count("refresh_tokens") == 60, result.output
    assert result.returncode in (1, 69)
    assert "session_replication_role" in result.output
    dry = program.inside(None, "--dry-run", "--json")
    assert (dry.returncode, dry.json["errors"]) == (result.returncode, result.json["errors"]), dry.output


def test_an_error_does_not_end_the_session_of_a_role_that_exits_on_error(systems: Database, program: Program) -> None:
    """With exit_on_error, one refused row would end connection after connection: it is isolated as everywhere."""
    systems.execute(
        "INSERT INTO refresh_tokens (id, expires_at) SELECT i, now() - interval '1 day' FROM generate_series(1, 60) i;"
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
        "    $$ BEGIN IF OLD.id = 17 THEN RAISE EXCEPTION 'no'; END IF; RETURN OLD; END $$;"
        "CREATE TRIGGER refuse BEFORE DELETE ON refresh_tokens FOR EACH ROW EXECUTE FUNCTION refuse();"
        f"ALTER ROLE retention IN DATABASE {systems.name} SET exit_on_error = on"
    )
    result = program.inside(configuration(systems.conninfo, {"tokens": POLICIES["tokens_expired"]}), "--once", "--json")
    tokens = result.policies["tokens"]
    assert (result.returncode, tokens["deleted"], tokens["undeletable"]) == (1, 59, 1), result.output
    assert tokens["error"]["sqlstate"] == "P0001"
    assert systems.execute("SELECT id FROM refresh_tokens") == [(17,)]
