"""Partitioned tables: whose rows are told apart by their primary keys, as a place in the heap is that of many rows."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import pytest
from lab import Database, Program, Result, configuration, log, until
from servers import Proxy

AGE = {"age_column": "at", "retention": "30d"}
SESSIONS: dict[str, dict[str, Any]] = {"sessions": {"table": "sessions", **AGE}}
OLD, YOUNG = "now() - interval '40 days'", "now() - interval '20 days'"
ODD = """'it''s "1, 2" \\ %s {}'"""
#: The primary key, what the table is partitioned by, and how. In each shape old rows share partitions with young ones.
SHAPES = {
    "range": (
        "id, at",
        "RANGE (at)",
        "PARTITION OF sessions FOR VALUES FROM (MINVALUE) TO (now() - interval '36 days')",
        "PARTITION OF sessions FOR VALUES FROM (now() - interval '36 days') TO (now() - interval '9 days')",
        "PARTITION OF sessions DEFAULT",
    ),
    "list": (
        "region, id",
        "LIST (region)",
        "PARTITION OF sessions FOR VALUES IN ('eu')",
        f"PARTITION OF sessions FOR VALUES IN ({ODD}, 'us')",
        "PARTITION OF sessions DEFAULT",
    ),
    "hash": (
        "id",
        "HASH (id)",
        *(f"PARTITION OF sessions FOR VALUES WITH (MODULUS 3, REMAINDER {part})" for part in range(3)),
    ),
    "two levels": (
        "at, region, id",
        "LIST (region)",
        "PARTITION OF sessions FOR VALUES IN ('eu') PARTITION BY RANGE (at)",
        "PARTITION OF part0 FOR VALUES FROM (MINVALUE) TO (now() - interval '25 days')",
        "PARTITION OF part0 DEFAULT",
        "PARTITION OF sessions DEFAULT PARTITION BY HASH (id)",
        "PARTITION OF part3 FOR VALUES WITH (MODULUS 1, REMAINDER 0)",
    ),
}
WALKS = pytest.mark.parametrize("indexed", [True, False], ids=["index", "key"])


def create(database: Database, shape: str, *, indexed: bool, rows: int = 240) -> None:
    """The table `sessions`, half of whose rows are old, in an order that has to do with neither key nor partition."""
    key, by, *parts = SHAPES[shape]
    database.execute(
        f"CREATE TABLE sessions (region text, id bigint, at timestamptz, state text, PRIMARY KEY ({key}))"
        f" PARTITION BY {by}"
    )
    for number, part in enumerate(parts):
        database.execute(f"CREATE TABLE part{number} {part}")
    if indexed:
        database.execute("CREATE INDEX ON sessions (at)")
    database.execute(
        f"INSERT INTO sessions SELECT (ARRAY['eu', {ODD.replace('%', '%%')}, '', 'us'])[1 + i %% 4], i,"
        " now() - make_interval(days => CASE WHEN i %% 7 %% 2 = 0 THEN 31 + i %% 12 ELSE i %% 29 END),"
        " (ARRAY['ended', 'live', 'lost'])[1 + i %% 3] FROM generate_series(1, %s) i ORDER BY md5(i::text)",
        rows,
    )


def grant(database: Database, program: Program, policies: dict[str, dict[str, Any]] = SESSIONS) -> None:
    """The role may do what --print-sql lets it do, and nothing more."""
    printed = program.inside(configuration(database.conninfo, policies), "--print-sql")
    assert printed.returncode == 0, printed.output
    for statement in re.findall(r"^GRANT .*?;$", printed.stdout, re.MULTILINE | re.DOTALL):
        database.owner.execute(statement)


def run(
    database: Database,
    program: Program,
    *arguments: str,
    policies: dict[str, dict[str, Any]] = SESSIONS,
    proxy: Proxy | None = None,
    **options: Any,
) -> Result:
    conninfo = proxy.conninfo(database) if proxy else database.conninfo
    config = configuration(conninfo, policies, **{"batch_size": 10, **options})
    return program.inside(config, *(arguments or ("--once",)), "--json")


def counts(result: Result, policy: str = "sessions") -> tuple[Any, ...]:
    """Of a run that went well: what was deleted, what is left, what of it is blocked, and why the run ended."""
    found = result.policies[policy]
    assert (result.returncode, found["error"]) == (0, None), result.output
    return (*(found[name] for name in ("deleted", "backlog", "blocked")), found["stop_reason"])


@pytest.mark.parametrize("only", [None, {"state": ["ended", "lost"]}], ids=["all", "only"])
@WALKS
@pytest.mark.parametrize("shape", SHAPES)
def test_exactly_the_old_rows_go(
    shape: str, indexed: bool, only: dict[str, list[str]] | None, database: Database, program: Program
) -> None:
    """Whatever the shape: what plain SQL says goes, all of it and nothing else, under the grants of --print-sql, as the
    dry run foretold; young rows that have the same place in another partition as an old one stay.
    """
    create(database, shape, indexed=indexed)
    policies = {"sessions": {**SESSIONS["sessions"], **({"only": only} if only else {})}}
    grant(database, program, policies)
    rule = "at < now() - interval '30 days'" + (" AND state <> 'live'" if only else "")
    old, stays = database.count("sessions", rule), f"SELECT t::text FROM sessions t WHERE NOT ({rule}) ORDER BY 1"
    kept = database.execute(stays)
    assert database.count(
        "sessions t",
        f"{rule} AND EXISTS (SELECT FROM sessions x WHERE x.ctid = t.ctid AND x.at > now() - interval '29 days')",
    )
    dry = run(database, program, "--dry-run", policies=policies).policies["sessions"]
    assert (dry["would_delete"], dry["backlog"], database.count("sessions", rule)) == (old, 0, old)
    assert counts(run(database, program, policies=policies)) == (old, 0, 0, "drained")
    assert database.execute("SELECT t::text FROM sessions t ORDER BY 1") == kept


#: Columns of a key, with a value for each number.
KEYS = {
    "uuid": "md5(i::text)::uuid",
    "varchar(7)": "E'\\\\{%s,' || i",
    "char(6)": "CASE i WHEN 1 THEN '' ELSE 'a\" ' || i END",
    "text": "CASE i WHEN 1 THEN '' WHEN 2 THEN 'NULL' WHEN 3 THEN ' ' ELSE E'\\\\\\'\"{}%s, \\n' || i END",
    'text COLLATE "de-x-icu"': "CASE i % 2 WHEN 0 THEN 'Ä' ELSE 'z' END || i",
    "text COLLATE loose": "CASE i % 2 WHEN 0 THEN 'A' ELSE 'b' END || i",
    '"Kind, %s of"': """CASE i % 2 WHEN 0 THEN 'Big "one"' ELSE 'a, b' END::"Kind, %s of\"""",
    '"Short %s"': "'x' || i",
    "date": "CASE i WHEN 1 THEN '-infinity' ELSE date '2020-01-01' - i * 100000 END",
    "timestamptz": "clock_timestamp() + i * interval '1 us'",
    "timestamp(3)": "timestamp '1883-11-18 12:03:58' + i * interval '1 ms'",
    "interval": "i * interval '1 month -3 days 4.5 seconds'",
    "float8": "1 / (i + 0.1::float8)",
    "numeric(9, 3)": "-i / 3.0",
    "bytea": "sha256(i::text::bytea)",
    "inet": "inet '10.0.0.1/8' + i",
    "bit(8)": "i::bit(8)",
    "jsonb": """jsonb_build_object('"%', i, 'b', '{\\"')""",
    "text[]": "ARRAY['{}', E'\\\\\"', NULL, '', i::text]",
    "boolean": "i % 2 = 0",
}


@WALKS
def test_a_key_of_any_type_names_its_row(indexed: bool, database: Database, program: Program) -> None:
    """Text with whatever it may hold, any collation, types of one's own, what settings show in one way or another."""
    execute = database.owner.execute
    execute("""CREATE TYPE "Kind, %s of" AS ENUM ('Big "one"', 'a, b'); CREATE DOMAIN "Short %s" AS varchar(9)""")
    execute("CREATE COLLATION loose (provider = icu, locale = 'und-u-ks-level2', deterministic = false)")
    execute(f"""ALTER ROLE retention IN DATABASE {database.name} SET bytea_output = 'escape';
        ALTER ROLE retention IN DATABASE {database.name} SET intervalstyle = 'sql_standard'""")
    policies = {}
    for number, (kind, value) in enumerate(KEYS.items()):
        table = f"keyed{number}"
        policies[table] = {"table": table, **AGE}
        execute(f"""
            CREATE TABLE {table} ("Key %s" {kind}, n int, at timestamptz, PRIMARY KEY ("Key %s", n))
                PARTITION BY LIST (n);
            CREATE TABLE {table}a PARTITION OF {table} FOR VALUES IN ({", ".join(map(str, range(1, 11)))});
            CREATE TABLE {table}b PARTITION OF {table} DEFAULT;
            INSERT INTO {table} SELECT {value}, i, CASE WHEN i % 5 < 3 THEN {OLD} ELSE {YOUNG} END
                FROM generate_series(1, 20) i;
        """)
        if indexed:
            execute(f"CREATE INDEX ON {table} (at)")
    grant(database, program, policies)
    kept = {
        table: database.execute(f"SELECT t::text FROM {table} t WHERE at > now() - interval '30 days' ORDER BY 1")
        for table in policies
    }
    result = run(database, program, policies=policies, batch_size=3)
    assert {kind: counts(result, table) for kind, table in zip(KEYS, policies, strict=True)} == dict.fromkeys(
        KEYS, (12, 0, 0, "drained")
    )
    assert {table: database.execute(f"SELECT t::text FROM {table} t ORDER BY 1") for table in policies} == kept


# ── What other sessions do meanwhile ──────────────────────────────────────────────────────────────────────────────────

SLOW = """
    CREATE TYPE state AS ENUM ('ended', 'live', 'lost');
    CREATE FUNCTION slowly(state) RETURNS text LANGUAGE plpgsql AS $$ BEGIN
        PERFORM pg_advisory_lock_shared(1); PERFORM pg_advisory_unlock_shared(1);
        RETURN CASE $1 WHEN 'ended' THEN 'ended' END;
    END $$;
    CREATE CAST (state AS text) WITH FUNCTION slowly(state);
    ALTER TABLE sessions ALTER state TYPE state USING 'ended';
"""
CHANGES = {
    "moved, and young": ("UPDATE sessions SET at = now() WHERE id = %s", 0, 1),
    "moved, and old": ("UPDATE sessions SET at = at - interval '200 days' WHERE id = %s", 1, 0),
    "renewed in place": (f"UPDATE sessions SET at = {YOUNG} WHERE id = %s", 0, 1),
    "of another state": ("UPDATE sessions SET state = 'live' WHERE id = %s", 0, 1),
    "of another key": ("UPDATE sessions SET id = id + 1000 WHERE id = %s", 1, 0),
    "deleted": ("DELETE FROM sessions WHERE id = %s", 0, 0),
}


@WALKS
@pytest.mark.parametrize(("change", "gone", "left"), CHANGES.values(), ids=CHANGES)
def test_a_row_changed_between_snapshot_and_lock(
    change: str, gone: int, left: int, indexed: bool, database: Database, proxy: Proxy, program: Program
) -> None:
    """A batch that sees the row as it was, and comes too late: it goes as what it is now, or stays; no run fails."""
    create(database, "range", indexed=indexed)
    database.execute(f"TRUNCATE sessions; {SLOW}")
    database.execute(
        "INSERT INTO sessions SELECT 'eu', i, now() - interval '35 days', 'ended' FROM generate_series(1, 9) i"
    )
    policies = {"sessions": {**SESSIONS["sessions"], "only": {"state": ["ended"]}}}
    grant(database, program, policies)
    other = database.connect()

    def too_late() -> None:
        waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        until(lambda: database.value(waiting), "the batch has its snapshot")
        other.execute(change.replace("%s", "5"))
        other.execute("SELECT pg_advisory_unlock(1)")

    thread = threading.Thread(target=too_late)

    def begin() -> None:
        other.execute("SELECT pg_advisory_lock(1)")
        thread.start()

    proxy.at("batch", 1, begin)
    result = run(database, program, policies=policies, proxy=proxy)
    thread.join()
    assert counts(result) == (8 + gone, 0, 0, "drained")
    assert database.count("sessions") == left


@WALKS
@pytest.mark.parametrize("shape", ["range", "hash"])
def test_locked_rows_are_passed_over(shape: str, indexed: bool, database: Database, program: Program) -> None:
    """In any partition: they are the backlog, and what the run ended with."""
    create(database, shape, indexed=indexed)
    database.execute("GRANT SELECT, UPDATE, DELETE ON sessions TO retention")
    old = database.count("sessions", "at < now() - interval '30 days'")
    other = database.connect(autocommit=False)
    held = other.execute(
        "SELECT id FROM sessions WHERE at < now() - interval '30 days' AND id % 5 = 0 FOR UPDATE"
    ).fetchall()
    assert counts(run(database, program)) == (old - len(held), len(held), 0, "locked")
    left = database.execute("SELECT id FROM sessions WHERE at < now() - interval '30 days' ORDER BY 1")
    assert left == sorted(held)


@WALKS
def test_partitions_come_and_go_in_mid_run(indexed: bool, database: Database, proxy: Proxy, program: Program) -> None:
    """Between two batches one is detached, whose rows are nobody's now, and one is attached, whose old rows go."""
    create(database, "list", indexed=indexed)
    database.execute(f"""
        CREATE TABLE holds (region text, id bigint, FOREIGN KEY (region, id) REFERENCES sessions);
        CREATE INDEX ON holds (region, id);
        CREATE TABLE later (LIKE sessions);
        INSERT INTO later SELECT 'zz', i, now() - interval '31 days', 'ended' FROM generate_series(1, 25) i;
        INSERT INTO later SELECT 'zz', i, {YOUNG}, 'ended' FROM generate_series(26, 30) i;
    """)
    database.execute("DELETE FROM sessions WHERE region = ''")
    grant(database, program)
    found: list[Any] = []

    def change() -> None:
        database.execute("ALTER TABLE sessions DETACH PARTITION part1")
        found[:] = database.execute("SELECT * FROM part1")
        database.execute("ALTER TABLE sessions ATTACH PARTITION later FOR VALUES IN ('zz')")

    proxy.at("pause", 1, change)
    result = run(database, program, proxy=proxy)
    assert (proxy.happened, counts(result)[1:]) == (["pause"], (0, 0, "drained"))
    assert database.execute("SELECT * FROM part1") == found
    assert database.execute("SELECT id FROM later ORDER BY 1") == [(i,) for i in range(26, 31)]
    assert database.count("sessions", "at < now() - interval '30 days'") == 0


TWINS = "INSERT INTO sessions SELECT region, id, part, now(), 'young' FROM sessions"
KEY_CHANGES = {
    "not a key any more": f"ALTER TABLE sessions DROP CONSTRAINT sessions_pkey; {TWINS}",
    "another key": f"""ALTER TABLE sessions DROP CONSTRAINT sessions_pkey;
        ALTER TABLE sessions ADD PRIMARY KEY (region, id, part, state); {TWINS}""",
    "longer": """ALTER TABLE sessions ALTER region TYPE varchar(9);
        INSERT INTO sessions SELECT region || '4', id, part, at, 'old' FROM sessions;
        UPDATE sessions SET at = now() WHERE region = '123'""",
}


@WALKS
@pytest.mark.parametrize("change", KEY_CHANGES.values(), ids=KEY_CHANGES)
def test_no_young_row_goes_for_an_old_one_of_its_key(
    change: str, indexed: bool, database: Database, proxy: Proxy, program: Program
) -> None:
    """A key that in mid-run tells rows apart no longer, or by more than it did, ends the policy."""
    database.execute(f"""
        CREATE TABLE sessions (region varchar(3), id bigint, part int, at timestamptz, state text,
            PRIMARY KEY (region, id, part)) PARTITION BY HASH (part);
        CREATE TABLE part0 PARTITION OF sessions FOR VALUES WITH (MODULUS 1, REMAINDER 0);
        INSERT INTO sessions SELECT '123', i, 0, {OLD}, 'old' FROM generate_series(1, 30) i;
    """)
    if indexed:
        database.execute("CREATE INDEX ON sessions (at)")
    database.execute("GRANT SELECT, UPDATE, DELETE ON sessions TO retention")
    proxy.at("pause", 1, lambda: database.execute(change))
    sessions = run(database, program, proxy=proxy).policies["sessions"]
    assert (proxy.happened, sessions["deleted"], sessions["stop_reason"]) == (["pause"], 10, "failed")
    assert "were changed while the run was on it" in sessions["error"]["message"]
    assert (database.count("sessions", "at > now() - interval '1 day'"), database.count("sessions")) == (20, 40)


# ── What keeps rows, and what ends a run ──────────────────────────────────────────────────────────────────────────────


@WALKS
@pytest.mark.parametrize("shape", ["range", "list"])
def test_a_held_row_stays(shape: str, indexed: bool, database: Database, program: Program) -> None:
    """A legal hold by a key of several columns: what it names is blocked, the rest goes; its constraint is named."""
    create(database, shape, indexed=indexed)
    key = SHAPES[shape][0]
    database.execute(f"""
        CREATE TABLE holds AS SELECT {key} FROM sessions WHERE id % 6 = 0;
        ALTER TABLE holds ADD CONSTRAINT held FOREIGN KEY ({key}) REFERENCES sessions; CREATE INDEX ON holds ({key})
    """)
    old = database.count("sessions", "at < now() - interval '30 days'")
    held = database.count("sessions", "at < now() - interval '30 days' AND id % 6 = 0")
    kept = database.execute(
        "SELECT t::text FROM sessions t WHERE at > now() - interval '30 days' OR id % 6 = 0 ORDER BY 1"
    )
    grant(database, program)
    result = run(database, program)
    assert counts(result) == (old - held, held, held, "drained")
    assert "blockedBy=held" in result.stderr
    assert database.execute("SELECT t::text FROM sessions t ORDER BY 1") == kept


@WALKS
def test_a_cascade_among_partitions_takes_no_live_row_along(
    indexed: bool, database: Database, program: Program
) -> None:
    """Chains whose own foreign key deletes children with their parents: one with a live end stays whole."""
    database.execute(f"""
        CREATE TABLE sessions (id int PRIMARY KEY, parent int REFERENCES sessions ON DELETE CASCADE, at timestamptz)
            PARTITION BY HASH (id);
        CREATE TABLE part0 PARTITION OF sessions FOR VALUES WITH (MODULUS 2, REMAINDER 0);
        CREATE TABLE part1 PARTITION OF sessions FOR VALUES WITH (MODULUS 2, REMAINDER 1);
        CREATE INDEX ON sessions (parent);
        INSERT INTO sessions SELECT i, CASE WHEN i % 10 > 0 THEN i - 1 END, CASE i % 20 WHEN 9 THEN now() ELSE {OLD} END
            FROM generate_series(0, 99) i
    """)
    if indexed:
        database.execute("CREATE INDEX ON sessions (at)")
    grant(database, program)
    assert counts(run(database, program, batch_size=7)) == (50, 45, 45, "drained")
    assert database.count("sessions", "id % 20 < 10") == database.count("sessions") == 50


@WALKS
@pytest.mark.parametrize("action", ["CASCADE", "SET NULL", "NO ACTION"])
def test_a_reference_to_one_partition_counts(action: str, indexed: bool, database: Database, program: Program) -> None:
    """A foreign key into a partition itself holds its rows; one that would take rows along is asked about first."""
    create(database, "list", indexed=indexed)
    database.execute(f"""
        CREATE TABLE live (region text, id bigint, FOREIGN KEY (region, id) REFERENCES part0 ON DELETE {action});
        CREATE INDEX ON live (region, id);
        INSERT INTO live SELECT region, id FROM part0 WHERE id % 8 = 0
    """)
    grant(database, program)
    live = database.execute("TABLE live ORDER BY 1, 2")
    held = database.count(
        "sessions s", "at < now() - interval '30 days' AND EXISTS (SELECT FROM live l WHERE l.id = s.id)"
    )
    dry, done = run(database, program, "--dry-run"), run(database, program)
    if action == "NO ACTION":
        assert counts(done)[1:] == (held, held, "drained")
        assert dry.policies["sessions"]["blocked"] == held > 0
    else:
        assert "would also delete or change rows of public.live" in done.policies["sessions"]["error"]["message"]
    assert database.execute("TABLE live ORDER BY 1, 2") == live


@WALKS
def test_what_a_trigger_on_one_partition_keeps(indexed: bool, database: Database, program: Program) -> None:
    """It keeps its row, which is undeletable and in the backlog; all others go, of that partition, too."""
    create(database, "two levels", indexed=indexed)
    database.execute("""
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN IF OLD.id % 9 = 0 THEN RAISE 'not this one'; END IF; RETURN OLD; END $$;
        CREATE TRIGGER keep BEFORE DELETE ON part1 FOR EACH ROW EXECUTE FUNCTION refuse()
    """)
    kept = database.execute("SELECT id FROM part1 WHERE at < now() - interval '30 days' AND id % 9 = 0 ORDER BY 1")
    grant(database, program)
    check = program.inside(None, "--check", "--json").json["findings"]
    assert "delete_trigger" in [finding["code"] for finding in check]
    result = run(database, program)
    sessions = result.policies["sessions"]
    assert (result.returncode, sessions["undeletable"], sessions["backlog"]) == (1, len(kept), len(kept))
    left = "SELECT id FROM sessions WHERE at < now() - interval '30 days' ORDER BY 1"
    assert (database.execute(left), len(kept) > 0) == (kept, True)


@WALKS
@pytest.mark.parametrize("stage", ["batch", "batch answered", "commit", "commit answered"])
def test_a_lost_connection_leaves_no_doubt(
    stage: str, indexed: bool, database: Database, proxy: Proxy, program: Program
) -> None:
    """Cut off in its second batch, before COMMIT or after: each row goes once and counts once."""
    create(database, "range", indexed=indexed)
    grant(database, program)
    old = database.count("sessions", "at < now() - interval '30 days'")
    proxy.at(stage, 2, proxy.cut)
    result = run(database, program, proxy=proxy)
    assert (proxy.happened, counts(result)) == ([stage], (old, 0, 0, "drained"))
    assert sum(int(line.fields["deletedCount"]) for line in log(result.stderr) if line.event == "batch_deleted") == old


@WALKS
def test_a_budget_ends_it_between_batches(indexed: bool, database: Database, program: Program) -> None:
    """A run whose budget is spent has deleted whole batches, tells what is left, and the next one goes on."""
    create(database, "hash", indexed=indexed)
    grant(database, program)
    old = database.count("sessions", "at < now() - interval '30 days'")
    first = counts(run(database, program, pause="10m", max_run_duration="1s"))
    assert first == (first[0], old - first[0], 0, "budget")
    assert first[0] in range(1, 11)
    assert counts(run(database, program)) == (old - first[0], 0, 0, "drained")


# ── What a batch costs ────────────────────────────────────────────────────────────────────────────────────────────────

ROWS, GONE, BATCH, PARTITIONS = 100_000, 6_000, 200, 20
#: Buffers a row: index entries and pages, read to choose, to lock, to check and to delete; and for each partition in
#: which a row that refers to it may be.
PER_ROW, PER_PROBE = 15, 3


def buffers(database: Database, offset: int) -> list[int]:
    """Of each batch in the server's log from there on, as auto_explain counted them."""
    with database.server.log.open() as stream:
        stream.seek(offset)
        plans = map(json.loads, re.findall(r"  plan:\n((?:\t.*\n)+)", stream.read()))
    batches = [found["Plan"] for found in plans if "DELETE FROM" in found["Query Text"]]
    return [sum(plan.get(f"Shared {how} Blocks", 0) for how in ("Hit", "Read")) for plan in batches]


@pytest.mark.parametrize(
    ("indexed", "referred", "analysed"),
    [
        pytest.param(True, False, True, id="index, analysed"),
        pytest.param(True, True, False, id="index, referred to"),
        pytest.param(False, False, False, id="key"),
        pytest.param(False, True, True, id="key, referred to, analysed"),
    ],
)
def test_a_batch_costs_what_its_rows_cost(
    indexed: bool, referred: bool, analysed: bool, database: Database, program: Program
) -> None:
    """Of 20 partitions with 100,000 rows a batch reads those that go, early and late, whatever the planner knows."""
    database.execute(f"""
        CREATE TABLE sessions (id bigint PRIMARY KEY, at timestamptz, parent bigint, agent text) PARTITION BY HASH (id);
        DO $$ BEGIN FOR i IN 0..{PARTITIONS - 1} LOOP EXECUTE format(
            'CREATE TABLE part%1$s PARTITION OF sessions FOR VALUES WITH (MODULUS {PARTITIONS}, REMAINDER %1$s)', i);
        END LOOP; END $$;
        INSERT INTO sessions SELECT i, now() - CASE WHEN i <= {GONE} THEN interval '40 days' ELSE '20 days' END
            + i * interval '1 second', CASE WHEN i BETWEEN 2 AND {GONE} THEN i - 1 END,
                repeat('x', 300) FROM generate_series(1, {ROWS}) i;
        CREATE INDEX ON sessions (parent);
    """)
    if indexed:
        database.execute("CREATE INDEX ON sessions (at)")
    if referred:
        database.execute("ALTER TABLE sessions ADD FOREIGN KEY (parent) REFERENCES sessions")
    if analysed:
        database.execute("ANALYZE sessions")
    for setting in (
        "log_min_duration = 0",
        "log_analyze = on",
        "log_buffers = on",
        "log_timing = off",
        "log_format = json",
    ):
        database.execute(f"ALTER ROLE retention IN DATABASE {database.name} SET auto_explain.{setting}")
    database.execute(f"ALTER ROLE retention IN DATABASE {database.name} SET session_preload_libraries = auto_explain")
    grant(database, program)
    offset = database.server.log.stat().st_size
    assert counts(run(database, program, batch_size=BATCH)) == (GONE, 0, 0, "drained")
    costs = buffers(database, offset)
    assert len(costs) >= GONE // BATCH
    assert max(costs) <= BATCH * (PER_ROW + PER_PROBE * PARTITIONS * referred), costs


@pytest.mark.parametrize(
    ("made", "spread"),
    [
        ("CREATE ACCESS METHOD other TYPE TABLE HANDLER heap_tableam_handler", "stored by other"),
        # what Citus says of a table, which Debian does not have
        (
            "SET allow_system_table_mods = on; CREATE TABLE pg_catalog.pg_dist_partition (logicalrelid regclass);"
            "GRANT SELECT ON pg_catalog.pg_dist_partition TO retention",
            "distributed",
        ),
    ],
)
def test_rows_whose_place_may_be_no_name_go_by_their_key(
    made: str, spread: str, systems: Database, program: Program
) -> None:
    """A table of another access method, or one that Citus has distributed; without a primary key it is refused."""
    using = "USING other" if spread.endswith("other") else ""
    systems.execute(made)
    systems.execute(f"CREATE TABLE spread (id int, at timestamptz) {using}")
    if not using:
        systems.execute("INSERT INTO pg_catalog.pg_dist_partition VALUES ('spread')")
    systems.execute("INSERT INTO spread SELECT i, now() - i * interval '1 day' FROM generate_series(1, 60) i")
    systems.grant("spread", select="id, at")
    config = configuration(
        systems.conninfo, {"spread": {"table": "spread", "age_column": "at", "retention": "30d12h"}}, batch_size=7
    )
    error = program.once(config).policies["spread"]["error"]
    assert f"spread is {spread} and has no primary key" in error["message"]
    systems.execute("ALTER TABLE spread ADD PRIMARY KEY (id)")
    result = program.once(config)
    assert "walk=key" in result.stderr
    assert (result.policies["spread"]["deleted"], systems.execute("SELECT max(id) FROM spread")) == (30, [(30,)])
