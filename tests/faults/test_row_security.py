"""Row security in force for the job's role: what it would hide is never a zero, whenever it is switched on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from lab import Database, Program, configuration, log

ROWS = 200
OLD = "now() - interval '40 days'"
AGE: dict[str, Any] = {"age_column": "at", "retention": "30d"}
#: Every policy by command, by what it shows, and by whether it grants or restricts.
SHAPES = list(
    itertools.product(("SELECT", "UPDATE", "DELETE", "ALL"), ("true", "false"), ("PERMISSIVE", "RESTRICTIVE"))
)
NAMES = [f"{command}_{using}_{kind}".lower() for command, using, kind in SHAPES]


def tables(database: Database, *, owned: bool) -> Iterator[str]:
    """A table of old rows for each shape of policy, which is not in force yet; `owned` by the job's role or not."""
    for table, (command, using, kind) in zip(NAMES, SHAPES, strict=True):
        database.execute(
            f"CREATE TABLE {table} AS SELECT i AS id, {OLD} AS at FROM generate_series(1, {ROWS}) i;"
            f"CREATE POLICY shape ON {table} AS {kind} FOR {command} USING ({using});"
            f"GRANT SELECT, UPDATE, DELETE ON {table} TO retention"
        )
        if kind == "RESTRICTIVE":  # something must grant what it restricts
            database.execute(f"CREATE POLICY show ON {table} USING (true)")
        if owned:
            database.execute(f"ALTER TABLE {table} OWNER TO retention")
        yield table


def switch(table: str, *, owned: bool) -> str:
    """The statement that puts row security in force for the job's role."""
    return f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY" + (", FORCE ROW LEVEL SECURITY" if owned else "")


def policies(names: list[str]) -> dict[str, dict[str, Any]]:
    return {name: {"table": name, **AGE} for name in names}


def assert_refused(policy: dict[str, Any]) -> None:
    """A failure that says what is the matter, and no count that could be taken for the end."""
    assert (policy["stop_reason"], policy["error"]["sqlstate"]) == ("failed", "42501"), policy
    assert "row-level security" in policy["error"]["message"]
    assert "BYPASSRLS" in policy["error"]["message"]
    assert policy["backlog"] is None


@pytest.mark.parametrize("owned", [False, True], ids=["another's table", "forced on the owner"])
def test_row_security_fails_each_policy_that_it_touches(owned: bool, database: Database, program: Program) -> None:
    """Sixteen shapes of policies, those that hide nothing included: run and dry run fail, and nothing is deleted."""
    names = list(tables(database, owned=owned))
    for name in names:
        database.execute(switch(name, owned=owned))
    database.execute(f"CREATE TABLE beside AS SELECT {OLD} AS at; GRANT ALL ON beside TO retention")
    config = configuration(database.conninfo, policies([*names, "beside"]))
    dry = program.inside(config, "--dry-run", "--json")
    assert dry.returncode == 1
    for name in names:
        assert dry.policies[name]["would_delete"] is None
        assert_refused(dry.policies[name])
    result = program.inside(None, "--once", "--json")
    assert result.returncode == 1
    for name in names:
        assert result.policies[name]["deleted"] == 0
        assert_refused(result.policies[name])
        assert database.count(name) == ROWS
    assert result.policies["beside"]["deleted"] == 1


@pytest.mark.parametrize("owned", [False, True], ids=["another's table", "forced on the owner"])
def test_row_security_that_comes_between_batches_fails_the_policy(
    owned: bool, database: Database, program: Program
) -> None:
    """Switched on when the first batch of each table is told: what was committed is counted, the rest stays."""
    names = list(tables(database, owned=owned))
    process = program.start(configuration(database.conninfo, policies(names), batch_size=10, pause="250ms"), "--once")
    assert process.stdout is not None
    text, switched = "", set()
    for line in process.stdout:
        text += line
        (told,) = log(line.rstrip("\n"))
        if told.event == "batch_deleted" and told.fields["phase"] not in switched:
            switched.add(told.fields["phase"])
            database.execute(switch(told.fields["phase"], owned=owned))
    assert process.wait() == 1
    failed = {line.fields["phase"]: line.fields for line in log(text) if line.event == "phase_failed"}
    assert switched == failed.keys() == set(names)
    for name, fields in failed.items():
        assert (fields["sqlstate"], "row-level security" in fields["error"]) == ("42501", True)
        deleted = int(fields["deletedCount"])
        assert 10 <= deleted < ROWS
        assert database.count(name) == ROWS - deleted
        assert "backlogRemaining" not in fields


@pytest.mark.parametrize("owned", [False, True], ids=["another's table", "forced on the owner"])
def test_rows_hold_others_though_they_are_hidden(owned: bool, database: Database, program: Program) -> None:
    """Row security on a table that refers to ours: what it holds is found by trying, blocks, and is no failure."""
    database.execute(f"CREATE TABLE sessions AS SELECT i AS id, {OLD} AS at FROM generate_series(1, 64) i")
    database.execute("ALTER TABLE sessions ADD PRIMARY KEY (id)")
    database.grant("sessions", select="id, at")
    for number, table in enumerate(tables(database, owned=owned), 1):
        database.execute(
            f"UPDATE {table} SET id = NULL WHERE id <> {number};"
            f"UPDATE {table} SET id = {4 * number} WHERE id = {number};"
            f"ALTER TABLE {table} ADD CONSTRAINT {table} FOREIGN KEY (id) REFERENCES sessions;"
            + switch(table, owned=owned)
        )
    if owned:
        database.execute("GRANT REFERENCES ON sessions TO retention")
    result = program.inside(configuration(database.conninfo, policies(["sessions"])), "--once", "--json")
    sessions = result.policies["sessions"]
    assert (result.returncode, sessions["deleted"], sessions["blocked"]) == (0, 48, 16), result.output
    assert database.execute("SELECT id FROM sessions ORDER BY 1") == [(4 * i,) for i in range(1, 17)]
    (ended,) = [line for line in log(result.stderr) if line.event == "phase_completed"]
    assert ended.fields["blockedBy"].split(", ") == sorted(NAMES)


@pytest.mark.parametrize("using", ["true", "false"])
def test_rows_that_become_hidden_hold_others_all_the_same(using: str, database: Database, program: Program) -> None:
    """Switched on in mid-run for a table that the job reads: the policy fails, and what is held is there."""
    database.execute(
        f"""
        CREATE TABLE sessions (id int PRIMARY KEY, at timestamptz);
        INSERT INTO sessions SELECT i, {OLD} FROM generate_series(1, {ROWS}) i;
        CREATE TABLE holds (session int REFERENCES sessions);
        INSERT INTO holds SELECT id FROM sessions WHERE id % 2 = 0;
        CREATE POLICY shape ON holds USING ({using});
        GRANT SELECT ON holds TO retention
        """
    )
    database.grant("sessions", select="id, at")
    process = program.start(
        configuration(database.conninfo, policies(["sessions"]), batch_size=10, pause="250ms"), "--once"
    )
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if "batch deleted" in line:
            database.execute(switch("holds", owned=False))
    assert process.wait() == 1
    (failed,) = [line.fields for line in log(text) if line.event == "phase_failed"]
    assert (failed["sqlstate"], "row-level security" in failed["error"]) == ("42501", True)
    assert database.count("sessions", "id % 2 = 0") == ROWS // 2
    assert database.count("sessions") == ROWS - int(failed["deletedCount"])


def test_a_role_that_bypasses_row_security_runs(database: Database, program: Program) -> None:
    """BYPASSRLS: all of it goes, whatever the policies."""
    names = list(tables(database, owned=False))
    for name in names:
        database.execute(switch(name, owned=False))
    database.execute("ALTER ROLE retention BYPASSRLS")
    try:
        result = program.inside(configuration(database.conninfo, policies(names)), "--once", "--json")
    finally:
        database.execute("ALTER ROLE retention NOBYPASSRLS")
    assert result.returncode == 0, result.output
    assert {result.policies[name]["deleted"] for name in names} == {ROWS}
    assert sum(database.count(name) for name in names) == 0
