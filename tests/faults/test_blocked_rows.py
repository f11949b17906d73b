"""Rows that cannot go: what refers to them or keeps them is named, the others go, and the cost stays in proportion."""

from __future__ import annotations

import os

import blocked
import pytest
from chains import TABLE, load
from lab import POLICIES, Database, Program, configuration, log

AGE = blocked.AGE
OLD = "now() - interval '40 days'"
PROBE = {"probe": {"table": "sessions", **AGE}}


#: Every two of these meet; all four, for the patient.
COMBINED = [
    (clause, readable, indexed, guarded)
    for number, clause in enumerate(["", "ON DELETE RESTRICT", "DEFERRABLE INITIALLY DEFERRED"])
    for readable in (True, False)
    for indexed in (True, False)
    for guarded in (True, False)
    if guarded == ((number + readable + indexed) % 2 == 0) or "RETENTION_SOAK_PACKAGE" in os.environ
]


@pytest.mark.parametrize(("clause", "readable", "indexed", "guarded"), COMBINED)
def test_of_1000_rows_those_that_can_go_do(
    clause: str, readable: bool, indexed: bool, guarded: bool, database: Database, program: Program
) -> None:
    """996 deleted, 3 blocked, 1 undeletable and exit status 1; without the trigger 997, 3, 0 and exit status 0."""
    guard = "before" if guarded else None
    blocked.prepare(database, clause=clause, readable=readable, indexed=indexed, guard=guard)
    blocked.assert_told(blocked.purge(program, database), database, indexed=indexed, guarded=guarded)


@pytest.mark.parametrize("guard", ["after", "deferred"])
def test_a_trigger_may_refuse_its_row_at_any_time(guard: str, database: Database, program: Program) -> None:
    """After the deletion or only at COMMIT: it is that row that stays, and not its batch."""
    blocked.prepare(database, clause="DEFERRABLE INITIALLY DEFERRED", readable=False, indexed=True, guard=guard)
    blocked.assert_told(blocked.purge(program, database), database, indexed=True, guarded=True)


@pytest.mark.parametrize("indexed", [True, False], ids=["index", "no index"])
def test_what_held_rows_cost_is_in_proportion(indexed: bool, database: Database, program: Program) -> None:
    """Of 10,000 rows half are held: a few transactions, and four times the buffers that 2,500 take.

    What it costs where the role may not read what holds them is in tests/soak.
    """
    small = blocked.half_held(database, program, 2_500, readable=True, indexed=indexed)
    large = blocked.half_held(database, program, 10_000, readable=True, indexed=indexed)
    assert large[0] <= 50
    assert large[1] <= 4 * 1.25 * small[1], (small, large)


@pytest.mark.parametrize("batch_size", [1, 5, 5000])
def test_a_trigger_that_cancels_every_deletion_ends_the_policy(
    batch_size: int, database: Database, program: Program
) -> None:
    """Five rows that no error keeps: the run ends, exit status 1, "claimed 5, deleted 0"; the next policy is done."""
    database.execute(
        f"""
        CREATE TABLE sessions AS SELECT id, {OLD} AS at FROM generate_series(1, 5) id;
        CREATE TABLE beside AS SELECT {OLD} AS at;
        GRANT ALL ON sessions, beside TO retention;
        CREATE FUNCTION cancel() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
        CREATE TRIGGER keeper BEFORE DELETE ON sessions FOR EACH ROW EXECUTE FUNCTION cancel()
        """
    )
    result = program.inside(
        configuration(database.conninfo, blocked.POLICIES, batch_size=batch_size), "--once", "--json"
    )
    probe = result.policies["probe"]
    assert (result.returncode, probe["deleted"], probe["undeletable"], probe["backlog"]) == (1, 0, 5, 5)
    assert "claimed 5, deleted 0" in probe["error"]["message"]
    (failed,) = [line for line in log(result.stderr) if line.event == "phase_failed"]
    assert failed.fields["error"] == probe["error"]["message"]
    assert (database.count("sessions"), result.policies["beside"]["deleted"]) == (5, 1)


# Keys that act on other rows

REACH = {
    "cascade to the fourth table": (
        ["ON DELETE CASCADE", "ON DELETE CASCADE", "ON DELETE CASCADE", "ON DELETE CASCADE"],
        ["reach1", "reach2", "reach3", "reach4"],
    ),
    "null at the third": (
        ["ON DELETE CASCADE", "ON DELETE CASCADE", "ON DELETE SET NULL", "ON DELETE CASCADE"],
        ["reach1", "reach2", "reach3"],
    ),
    "default at the second": (["ON DELETE CASCADE", "ON DELETE SET DEFAULT"], ["reach1", "reach2"]),
    "null at once": (["ON DELETE SET NULL", "ON DELETE CASCADE"], ["reach1"]),
}


@pytest.mark.parametrize(("clauses", "named"), REACH.values(), ids=REACH)
def test_a_delete_that_reaches_other_tables_needs_leave(
    clauses: list[str], named: list[str], database: Database, program: Program
) -> None:
    """However far behind, each table that would lose or change rows is named, and with leave it is named in the log."""
    database.execute(
        f"CREATE TABLE sessions (id int PRIMARY KEY, at timestamptz); INSERT INTO sessions VALUES (1, {OLD})"
    )
    before = "sessions"
    for number, clause in enumerate(clauses, 1):
        database.execute(
            f"CREATE TABLE reach{number} (id int PRIMARY KEY, up int REFERENCES {before} {clause});"
            f"INSERT INTO reach{number} VALUES (1, 1)"
        )
        before = f"reach{number}"
    database.grant("sessions", select="id, at")
    result = program.inside(configuration(database.conninfo, PROBE), "--once", "--json")
    error = result.policies["probe"]["error"]
    assert (result.returncode, result.policies["probe"]["deleted"], database.count("sessions")) == (1, 0, 1)
    assert f"rows of {', '.join(f'public.{name}' for name in named)} " in error["message"]
    assert "policy.probe.allow_cascade = true" in error["message"]
    allowed = {"probe": {**PROBE["probe"], "allow_cascade": True}}
    result = program.inside(configuration(database.conninfo, allowed), "--once", "--json")
    (started,) = [line for line in log(result.stderr) if line.event == "job_started"]
    assert started.fields["cascades"] == ", ".join(f"public.{name}" for name in named)
    assert (result.returncode, result.policies["probe"]["deleted"], database.count("sessions")) == (0, 1, 0)
    gone = [name for name, clause in zip(named, clauses, strict=False) if clause == "ON DELETE CASCADE"]
    assert [name for name in named if database.count(name) == 0] == gone
    assert [name for name in named if database.count(name, "up IS NULL") == 1] == [n for n in named if n not in gone]


def test_a_cascade_that_comes_back_to_the_table_needs_leave(database: Database, program: Program) -> None:
    """A live session of the same device would go along with an old one: the policy refuses and names both tables."""
    database.execute(
        f"""
        CREATE TABLE sessions (id int PRIMARY KEY, at timestamptz);
        CREATE TABLE devices (id int PRIMARY KEY, first int REFERENCES sessions ON DELETE CASCADE);
        ALTER TABLE sessions ADD device int REFERENCES devices ON DELETE CASCADE;
        INSERT INTO sessions VALUES (1, {OLD});
        INSERT INTO devices VALUES (1, 1);
        INSERT INTO sessions VALUES (2, now(), 1)
        """
    )
    database.grant("sessions", select="id, at, device")
    result = program.inside(configuration(database.conninfo, PROBE), "--once", "--json")
    assert (result.returncode, database.count("sessions"), database.count("devices")) == (1, 2, 1)
    assert "rows of public.devices, public.sessions " in result.policies["probe"]["error"]["message"]


def test_what_holds_a_row_behind_a_cascade_blocks(database: Database, program: Program) -> None:
    """With leave to cascade, a row whose cascade is refused further on stays and is blocked; the others go."""
    database.execute(
        f"""
        CREATE TABLE sessions (id int PRIMARY KEY, at timestamptz);
        INSERT INTO sessions SELECT i, {OLD} FROM generate_series(1, 20) i;
        CREATE TABLE devices (id int PRIMARY KEY REFERENCES sessions ON DELETE CASCADE);
        INSERT INTO devices SELECT id FROM sessions;
        CREATE TABLE holds (device int CONSTRAINT legal_hold REFERENCES devices);
        INSERT INTO holds VALUES (7)
        """
    )
    database.grant("sessions", select="id, at")
    allowed = {"probe": {**PROBE["probe"], "allow_cascade": True}}
    result = program.inside(configuration(database.conninfo, allowed), "--once", "--json")
    probe = result.policies["probe"]
    assert (result.returncode, probe["deleted"], probe["blocked"], probe["undeletable"]) == (0, 19, 1, 0), result.output
    (ended,) = [line for line in log(result.stderr) if line.event == "phase_completed"]
    assert ended.fields["blockedBy"] == "legal_hold"
    assert database.execute("SELECT id FROM sessions") == database.execute("SELECT id FROM devices") == [(7,)]


@pytest.mark.parametrize("indexed", [True, False], ids=["index", "no index"])
@pytest.mark.parametrize("action", ["RESTRICT", "CASCADE", "SET NULL", "SET DEFAULT"])
def test_whatever_a_self_reference_does_the_same_sessions_stay(
    action: str, indexed: bool, systems: Database, program: Program
) -> None:
    """Chains finished, live, dormant, young at the end or in the middle: the action deletes and nulls nothing."""
    systems.execute(
        f"ALTER TABLE {TABLE} DROP CONSTRAINT refresh_sessions_parent_session_id_fkey,"
        f" ADD CONSTRAINT own FOREIGN KEY (parent_session_id) REFERENCES {TABLE} ON DELETE {action}"
    )
    if indexed:
        systems.execute(f"CREATE INDEX ON {TABLE} (updated_at)")
    fate = load(systems, 20, 50, order="random()")
    parents = dict(systems.execute(f"SELECT id, parent_session_id FROM {TABLE}"))
    policy = {key: value for key, value in POLICIES["refresh"].items() if key != "parent_column"}
    config = configuration(systems.conninfo, {"refresh": policy}, batch_size=70)
    result = program.inside(config, "--once", "--json")
    refresh = result.policies["refresh"]
    assert (result.returncode, refresh["deleted"], refresh["blocked"]) == (0, len(fate.finished), len(fate.blocked))
    left = dict(systems.execute(f"SELECT id, parent_session_id FROM {TABLE}"))
    assert left == {key: parents[key] for key in fate.staying}
