"""The specifications' own tests: the table "Тесты" of SessionRetentionJob and the acceptance criteria of SES-009."""

from __future__ import annotations

import re
from typing import Any

import pytest
from lab import POLICIES, Database, Program, configuration

SICR = "identity.sign_in_confirmation_requests"
REFRESH = "identity.refresh_sessions"
SES_009 = {name: POLICIES[name] for name in ("tokens_expired", "tokens_revoked")}


def deleted(policies: dict[str, dict[str, Any]]) -> dict[str, int]:
    return {name: policy["deleted"] for name, policy in policies.items() if policy["deleted"]}


def requests(database: Database, status: str, age: str) -> None:
    database.execute(
        f"INSERT INTO {SICR} (phone_number, status, created_at) VALUES ('+7', %s, now() - %s::interval)", status, age
    )


def backlog(database: Database, rows: int) -> None:
    """So many requests past their retention."""
    database.execute(
        f"INSERT INTO {SICR} (phone_number, created_at)"
        " SELECT '+7', now() - interval '40 days' FROM generate_series(1, %s)",
        rows,
    )


def session(database: Database, status: str, age: str, parent: object = None) -> object:
    return database.value(
        f"INSERT INTO {REFRESH} (status, updated_at, parent_session_id) VALUES (%s, now() - %s::interval, %s)"
        " RETURNING id",
        status,
        age,
        parent,
    )


def left(database: Database, table: str) -> set[tuple[str, int]]:
    """The status and the age in whole days of each row that is left."""
    column = "created_at" if table == SICR else "updated_at"
    return set(database.execute(f"SELECT status, extract(day FROM now() - {column})::int FROM {table}"))


# SessionRetentionJob


def test_empty_batch(systems: Database, program: Program) -> None:
    """Empty batch: with no row under a predicate the run is a success that deletes nothing."""
    requests(systems, "Pending", "1 day")
    session(systems, "Active", "1 day")
    result = program.inside(configuration(systems.conninfo), "--once", "--json")
    assert result.returncode == 0
    assert deleted(result.policies) == {}
    assert {p["stop_reason"] for p in result.policies.values()} == {"drained"}
    assert (systems.count(SICR), systems.count(REFRESH)) == (1, 1)


def test_sicr_older_than_30_days(systems: Database, program: Program) -> None:
    """SICR older than 30 days go whatever their status; the others stay."""
    for status in ("Confirmed", "Expired", "Exhausted", "Superseded", "Pending"):
        requests(systems, status, "30 days 1 hour")
        requests(systems, status, "29 days 23 hours")
    result = program.inside(configuration(systems.conninfo), "--once", "--json")
    assert deleted(result.policies) == {"sicr": 5}
    assert left(systems, SICR) == {(s, 29) for s in ("Confirmed", "Expired", "Exhausted", "Superseded", "Pending")}


def test_sicr_status_has_no_influence(systems: Database, program: Program) -> None:
    """A Confirmed request of 40 days goes just as an Expired one does."""
    requests(systems, "Confirmed", "40 days")
    requests(systems, "Expired", "40 days")
    result = program.inside(configuration(systems.conninfo), "--once", "--json")
    assert deleted(result.policies) == {"sicr": 2}
    assert systems.count(SICR) == 0


def test_terminal_refresh_older_than_90_days(systems: Database, program: Program) -> None:
    """Rotated, Revoked and Expired sessions before the cutoff go; an Active one stays at any age."""
    for status in ("Rotated", "Revoked", "Expired"):
        session(systems, status, "90 days 1 hour")
    for age in ("91 days", "4000 days"):
        session(systems, "Active", age)
    result = program.inside(configuration(systems.conninfo), "--once", "--json")
    assert deleted(result.policies) == {"refresh": 3}
    assert left(systems, REFRESH) == {("Active", 91), ("Active", 4000)}


def test_refresh_younger_than_the_threshold(systems: Database, program: Program) -> None:
    """A terminal session of 10 days is not deleted."""
    session(systems, "Revoked", "10 days")
    result = program.inside(configuration(systems.conninfo), "--once", "--json")
    assert deleted(result.policies) == {}
    assert left(systems, REFRESH) == {("Revoked", 10)}


@pytest.mark.parametrize(("status", "age"), [("Active", "100 days"), ("Rotated", "10 days")])
def test_rotation_chain(status: str, age: str, systems: Database, program: Program) -> None:
    """A parent with a live or young child stays, without an error, and goes once the child has ended and aged."""
    parent = session(systems, "Rotated", "200 days")
    child = session(systems, status, age, parent)
    result = program.inside(configuration(systems.conninfo), "--once", "--json")
    assert (result.returncode, deleted(result.policies)) == (0, {})
    refresh = result.policies["refresh"]
    assert (refresh["backlog"], refresh["blocked"], refresh["undeletable"]) == (1, 1, 0)
    assert systems.count(REFRESH) == 2
    systems.execute(
        f"UPDATE {REFRESH} SET status = 'Expired', updated_at = now() - interval '91 days' WHERE id = %s", child
    )
    result = program.inside(None, "--once", "--json")
    assert (result.returncode, deleted(result.policies)) == (0, {"refresh": 2})
    assert systems.count(REFRESH) == 0


def test_idempotency_and_restart(systems: Database, program: Program) -> None:
    """A run killed between batches leaves what it committed; the next takes the rest, and one more takes nothing."""
    backlog(systems, 50)
    config = configuration(systems.conninfo, batch_size=10, pause="3m")
    process = program.start(config, "--once", "--json")
    assert process.stderr is not None
    assert any("batch deleted" in line for line in process.stderr)
    process.kill()
    process.communicate()
    assert systems.count(SICR) == 40
    program.write(configuration(systems.conninfo))
    assert deleted(program.inside(None, "--once", "--json").policies) == {"sicr": 40}
    assert deleted(program.inside(None, "--once", "--json").policies) == {}


def test_parallel_instances(systems: Database, program: Program) -> None:
    """Two copies of the worker delete no row twice: what they count adds up to what was there."""
    backlog(systems, 2000)
    first = program.start(configuration(systems.conninfo, batch_size=50), "--once", "--json")
    second = program.start(None, "--once", "--json")
    results = [program.finish(process) for process in (first, second)]
    assert [r.returncode for r in results] == [0, 0]
    assert sum(r.policies["sicr"]["deleted"] for r in results) == 2000
    assert systems.count(SICR) == 0


def test_no_events_and_no_statuses(systems: Database, program: Program) -> None:
    """No event is written and no status changed: the run inserts and updates nothing, anywhere in the database."""
    written = "SELECT sum(n_tup_ins)::int, sum(n_tup_upd)::int, sum(n_tup_del)::int FROM pg_stat_user_tables"
    session(systems, "Active", "100 days", session(systems, "Rotated", "200 days"))
    session(systems, "Expired", "200 days")
    session(systems, "Revoked", "10 days")
    before = dict(systems.execute(f"SELECT id, r::text FROM {REFRESH} r"))
    systems.execute("SELECT pg_stat_force_next_flush()")
    assert systems.execute(written) == [(4, 0, 0)]
    result = program.inside(configuration(systems.conninfo), "--once", "--json")
    assert deleted(result.policies) == {"refresh": 1}
    after = dict(systems.execute(f"SELECT id, r::text FROM {REFRESH} r"))
    assert len(after) == 3
    assert after.items() <= before.items()
    while systems.value("SELECT count(*) FROM pg_stat_activity WHERE usename = 'retention'"):
        pass  # its counters are complete when its backend is gone
    assert systems.execute(written) == [(4, 0, 1)]


def test_cancellation(systems: Database, program: Program) -> None:
    """Stopped between batches it ends gracefully, and what was committed stays committed."""
    backlog(systems, 50)
    process = program.start(configuration(systems.conninfo, batch_size=10, pause="3m"), "--once", "--json")
    assert process.stderr is not None
    assert any("batch deleted" in line for line in process.stderr)
    process.terminate()
    result = program.finish(process, timeout=10)
    assert result.returncode == 0
    assert result.json["stop_reason"] == "signal"
    sicr = result.policies["sicr"]
    assert (sicr["deleted"], sicr["backlog"], sicr["stop_reason"]) == (10, 40, "signal")
    assert systems.count(SICR) == 40


# SES-009


def token(database: Database, number: int, *, expires: str, is_revoked: bool = False) -> None:
    database.execute(
        "INSERT INTO refresh_tokens (id, is_revoked, expires_at) VALUES (%s, %s, now() + %s::interval)",
        number,
        is_revoked,
        expires,
    )


def test_scenario_1_an_expired_token_goes(systems: Database, program: Program) -> None:
    """ID=101, expired yesterday and not revoked, is deleted; an index scan no longer finds it either."""
    token(systems, 101, expires="-1 day")
    result = program.inside(configuration(systems.conninfo), "--once", "--json")
    assert result.returncode == 0
    assert systems.count("refresh_tokens") == 0
    systems.execute("SET enable_seqscan = off")
    assert systems.count("refresh_tokens", "expires_at < now()") == 0


def test_scenario_2_an_active_session_stays(systems: Database, program: Program) -> None:
    """ID=102, not revoked and valid for 30 more days, stays as it was."""
    token(systems, 102, expires="30 days")
    before = systems.execute("SELECT t::text FROM refresh_tokens t")
    result = program.inside(configuration(systems.conninfo), "--once", "--json")
    assert result.returncode == 0
    assert systems.execute("SELECT t::text FROM refresh_tokens t") == before


def test_the_log_lines(systems: Database, program: Program) -> None:
    """The two lines of section 4.3, with the count's thousands set apart."""
    systems.execute(
        "INSERT INTO refresh_tokens (expires_at) SELECT now() - interval '2 days' FROM generate_series(1, 12503)"
    )
    result = program(configuration(systems.conninfo), "--once")
    stamp = r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] \[INFO\] "
    started = re.search(stamp + r"Starting SES-009: Refresh token table cleanup\.( |$)", result.stdout, re.MULTILINE)
    finished = re.search(
        stamp + r"Cleanup finished successfully\. Removed rows: 12,503\.( |$)", result.stdout, re.MULTILINE
    )
    assert started, result.stdout
    assert finished, result.stdout
    assert started.start() < finished.start()


@pytest.mark.parametrize("batch_size", [50_000, 97])
def test_the_row_set_is_that_of_the_sql(batch_size: int, systems: Database, program: Program) -> None:
    """What goes is what the specification's own DELETE takes from a copy of the table."""
    systems.execute(
        """
        INSERT INTO refresh_tokens (is_revoked, expires_at)
        SELECT (ARRAY[true, false, NULL])[1 + i % 3],
            CASE WHEN i % 101 = 0 THEN NULL WHEN i % 103 = 0 THEN 'infinity' WHEN i % 107 = 0 THEN '-infinity'
            ELSE now() + (i * 7919 % 2000 - 1000) * interval '3 minutes' - interval '90 seconds' END
        FROM generate_series(1, 3000) i;
        CREATE TABLE copy AS TABLE refresh_tokens
        """
    )
    systems.execute(
        "DELETE FROM copy WHERE expires_at < NOW() OR (is_revoked = true AND expires_at < NOW() - INTERVAL '1 day')"
    )
    config = configuration(systems.conninfo, SES_009, batch_size=batch_size)
    result = program.inside(config, "--once", "--json")
    assert result.returncode == 0
    assert systems.execute("TABLE refresh_tokens EXCEPT TABLE copy") == []
    assert systems.execute("TABLE copy EXCEPT TABLE refresh_tokens") == []
    assert 0 < systems.count("refresh_tokens") < 3000
    assert sum(p["deleted"] for p in result.policies.values()) == 3000 - systems.count("copy")


def test_the_first_run_in_batches_of_50_000(systems: Database, program: Program) -> None:
    """A first run takes a large backlog in batches of 50,000 rows, as the warning to the DBA advises."""
    systems.execute(
        "INSERT INTO refresh_tokens (expires_at)"
        " SELECT now() - i * interval '1 second' - interval '1 hour' FROM generate_series(1, 120000) i"
    )
    token(systems, 200_000, expires="1 day")
    result = program(configuration(systems.conninfo, SES_009, batch_size=50_000), "--once")
    assert result.returncode == 0, result.output
    batches = [int(n) for n in re.findall(r"\] batch deleted .*\bdeletedCount=(\d+)", result.stdout)]
    assert (len(batches), sum(batches), max(batches)) == (3, 120_000, 50_000)
    assert systems.execute("SELECT id FROM refresh_tokens") == [(200_000,)]
