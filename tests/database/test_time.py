"""Time: cut-offs come from the database's clock, once; no zone, date style or wrong clock changes which rows go."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Iterator

import pytest
from lab import POLICIES, SYSTEMS, Database, Program, Result, Server, configuration, faketime, log

DAY = 24 * 60 * 60
YEAR = 365 * DAY

#: The same instants in three kinds of column. Text decides what must go, so that the job's own reading of time cannot.
MOMENTS = """
    CREATE TABLE zoned (label text, at timestamptz);
    CREATE TABLE unzoned (label text, at timestamp);
    CREATE TABLE days (label text, at date);
    INSERT INTO zoned SELECT label, at FROM moments;
    INSERT INTO unzoned SELECT label, at AT TIME ZONE 'UTC' FROM moments;
    INSERT INTO days SELECT CASE WHEN at >= $cutoff_day THEN 'young' ELSE 'old' END, at
        FROM (SELECT (at AT TIME ZONE 'UTC')::date AS at FROM moments) AS moments;
    INSERT INTO days VALUES ('young', $cutoff_day), ('old', $cutoff_day - 1);
    GRANT SELECT (ctid, at), UPDATE (at), DELETE ON zoned, unzoned, days TO retention;
"""


def moments(database: Database, cutoff_near: str) -> str:
    """Fill the three tables around a cut-off that lies within the half hour before, or after, a midnight UTC.

    Returns the retention. Near midnight a zone that leaks in moves a date, at whatever hour the test runs.
    """
    minutes = int(database.value("SELECT extract(epoch FROM now() - date_trunc('day', now(), 'UTC')) / 60"))
    minutes += {"before": 30, "after": DAY // 60 - 30}[cutoff_near]
    retention = f"30d{minutes}m"
    cutoff = f"(now() - interval '30 days {minutes} minutes')"
    database.execute(
        "CREATE TABLE moments (label text, at timestamptz);"
        f"INSERT INTO moments SELECT 'old', {cutoff} - hours * interval '1 hour' FROM generate_series(0, 15) AS hours;"
        f"INSERT INTO moments SELECT 'young', {cutoff} + interval '5 minutes' + hours * interval '1 hour'"
        "    FROM generate_series(0, 15) AS hours;"
        "INSERT INTO moments VALUES ('old', '-infinity'), ('young', 'infinity'), ('young', NULL);"
        + MOMENTS.replace("$cutoff_day", f"({cutoff} AT TIME ZONE 'UTC')::date")
        + "UPDATE days SET label = 'young' WHERE at IS NULL"
    )
    return retention


SETTINGS: list[tuple[str, dict[str, str]]] = [
    ("", {}),
    ("", {"TZ": "America/New_York"}),
    ("", {"TZ": "Asia/Tokyo"}),
    ("", {"PGTZ": "Asia/Tokyo"}),
    ("", {"PGTZ": "America/New_York", "PGDATESTYLE": "German"}),
    ("", {"PGDATESTYLE": "SQL, DMY"}),
    ("timezone = 'UTC'", {"TZ": "Asia/Tokyo"}),
    ("timezone = 'America/New_York'", {}),
    ("timezone = 'Asia/Tokyo'", {}),
    ("datestyle = 'SQL, DMY'", {}),
    ("datestyle = 'German'", {}),
    ("datestyle = 'Postgres, MDY'", {}),
    ("intervalstyle = 'sql_standard'", {}),
]


#: With the side of midnight on which it is: a zone west of UTC moves a date on the one, east of it on the other.
CASES = [
    (role, env, side)
    for role, env in SETTINGS
    for side in ("before", "after")
    if side == "before" or "zone" in role or {"TZ", "PGTZ"} & env.keys()
]


@pytest.mark.parametrize(
    ("role", "env", "cutoff_near"),
    CASES,
    ids=[" ".join([role, *map("=".join, env.items()), side]).strip() for role, env, side in CASES],
)
def test_the_same_rows_go_in_every_zone_and_date_style(
    database: Database, program: Program, role: str, env: dict[str, str], cutoff_near: str
) -> None:
    """Zones and date styles of the machine, the client and the role are about display, not about what has expired."""
    retention = moments(database, cutoff_near)
    if role:
        database.execute(f"ALTER ROLE retention IN DATABASE {database.name} SET {role}")
    policies = {t: {"table": t, "age_column": "at", "retention": retention} for t in ("zoned", "unzoned", "days")}
    run = functools.partial(program, env=env) if env else program.inside
    result = run(configuration(database.conninfo, policies), "--once", "--json")
    assert result.returncode == 0, result.output
    for table, policy in result.policies.items():
        left = database.execute(f"SELECT label, count(*) FROM {table} GROUP BY 1")
        young = database.count("moments", "label = 'young'")
        assert [label for label, _ in left] == ["young"], table
        if table != "days":
            assert left == [("young", young)]
        now, cutoff = (datetime.datetime.fromisoformat(text) for text in (result.json["now"], policy["cutoff"]))
        minutes = int(retention.removeprefix("30d").removesuffix("m"))
        assert now - cutoff == datetime.timedelta(days=30, minutes=minutes)
        assert now.utcoffset() == cutoff.utcoffset() == datetime.timedelta(0)


@pytest.mark.parametrize("kind", ["timestamptz", "timestamp", "date"])
def test_expiry_is_read_the_same_way(database: Database, program: Program, kind: str) -> None:
    """What expires today is still valid in a date column, and over in the others once its moment has passed."""
    database.execute(f"CREATE TABLE tokens (expires_at {kind})")
    database.execute("SET timezone = 'UTC'")
    database.execute(
        "INSERT INTO tokens SELECT now() + days * interval '1 day' FROM generate_series(-2, 2) AS days WHERE days <> 0;"
        "INSERT INTO tokens SELECT current_date + 1;"
    )
    database.grant("tokens", select="expires_at")
    today = f"current_date::{kind}"
    database.execute(f"INSERT INTO tokens VALUES ({today})")
    config = configuration(
        database.conninfo, {"tokens": {"table": "tokens", "expiry_column": "expires_at", "grace": "0s"}}
    )
    database.execute(f"ALTER ROLE retention IN DATABASE {database.name} SET timezone = 'Asia/Tokyo'")
    assert program.inside(config, "--once").returncode == 0
    gone = 2 if kind == "date" else 3
    assert database.count("tokens") == 6 - gone
    assert database.count("tokens", today + " = expires_at") == (kind == "date")


def fill(database: Database, *, sicr: int = 0, refresh: int = 0, tokens: int = 0, days: int = 100) -> None:
    """So many rows of each system, that many days over."""
    age = f"now() - interval '{days} days'"
    database.execute(
        "INSERT INTO identity.sign_in_confirmation_requests (phone_number, created_at)"
        f"    SELECT '', {age} FROM generate_series(1, {sicr});"
        "INSERT INTO identity.refresh_sessions (status, updated_at)"
        f"    SELECT 'Expired', {age} FROM generate_series(1, {refresh});"
        f"INSERT INTO refresh_tokens (expires_at) SELECT {age} FROM generate_series(1, {tokens})"
    )


def left(database: Database) -> tuple[int, int, int]:
    """How many rows each of the three systems has."""
    tables = "identity.sign_in_confirmation_requests", "identity.refresh_sessions", "refresh_tokens"
    sicr, refresh, tokens = (database.count(table) for table in tables)
    return sicr, refresh, tokens


def test_cutoffs_are_now_less_the_retention_in_result_and_log(systems: Database, program: Program) -> None:
    """`now` is the database's, one for the whole run, and every cut-off follows from it exactly."""
    before = systems.value("SELECT clock_timestamp()")
    result = program(configuration(systems.conninfo), "--once", "--json", env=faketime(200))
    after = systems.value("SELECT clock_timestamp()")
    assert result.returncode == 0, result.output
    now = datetime.datetime.fromisoformat(result.json["now"])
    assert before <= now <= after
    ages = {"sicr": 30, "refresh": 90, "tokens_expired": 0, "tokens_revoked": 1}
    expected = {name: now - datetime.timedelta(days=days) for name, days in ages.items()}
    assert {k: datetime.datetime.fromisoformat(v["cutoff"]) for k, v in result.policies.items()} == expected
    lines = log(result.stderr)
    started = lines[0].fields
    names = {"sicr": "Sicr", "refresh": "Refresh", "tokens_expired": "TokensExpired", "tokens_revoked": "TokensRevoked"}
    logged = {name: datetime.datetime.fromisoformat(started[f"cutoff{word}"]) for name, word in names.items()}
    assert logged == expected
    phases = [line.fields for line in lines if line.event == "phase_started"]
    assert {f["phase"]: datetime.datetime.fromisoformat(f["cutoff"]) for f in phases} == expected


def test_what_expires_during_the_run_is_for_the_next_run(systems: Database, program: Program) -> None:
    """The clock is read once: a token that expires while an earlier phase works is not expired in this run."""
    systems.execute(
        "CREATE FUNCTION expire() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$ BEGIN"
        "    INSERT INTO public.refresh_tokens (expires_at) VALUES (clock_timestamp()); RETURN OLD; END $$;"
        "CREATE TRIGGER expire BEFORE DELETE ON identity.sign_in_confirmation_requests"
        "    FOR EACH ROW EXECUTE FUNCTION expire()"
    )
    fill(systems, sicr=1, tokens=1)
    result = program.inside(configuration(systems.conninfo), "--once", "--json")
    assert (result.returncode, left(systems)) == (0, (0, 0, 1)), result.output
    assert result.policies["tokens_expired"]["deleted"] == 1
    assert program.inside(None, "--once", "--json").policies["tokens_expired"]["deleted"] == 1


@pytest.mark.parametrize("skew", [YEAR, -YEAR, 400], ids=["a year ahead", "a year behind", "400 seconds ahead"])
@pytest.mark.parametrize("arguments", [("--once",), ()], ids=["once", "scheduled"])
def test_clocks_that_differ_delete_nothing(
    systems: Database, program: Program, skew: float, arguments: tuple[str, ...]
) -> None:
    """One of the two clocks is wrong, and nobody here can say which: the run fails, and its log says why."""
    fill(systems, sicr=1, refresh=1, tokens=1)
    result = program(configuration(systems.conninfo), *arguments, env=faketime(skew))
    assert result.returncode == 1, result.output
    assert left(systems) == (1, 1, 1)
    failed = log(result.stdout)[-1]
    assert (failed.event, failed.level) == ("job_failed", "ERROR")
    assert "clock" in failed.fields["error"]


def test_a_dry_run_also_refuses_clocks_that_differ(systems: Database, program: Program) -> None:
    """A dry run says what a run would do: fail."""
    result = program(configuration(systems.conninfo), "--dry-run", "--json", env=faketime(YEAR))
    assert result.returncode == 1, result.output
    assert "clock" in result.output


def test_max_clock_skew_is_what_the_clocks_may_differ(systems: Database, program: Program) -> None:
    """A machine whose clock is known to be off can say so, and the database's clock decides all the same."""
    fill(systems, sicr=1, refresh=1, tokens=1, days=91)
    fill(systems, sicr=1, refresh=1, tokens=1, days=-300)
    config = configuration(systems.conninfo, database={"max_clock_skew": "366d"})
    result = program(config, "--once", env=faketime(YEAR))
    assert (result.returncode, left(systems)) == (0, (1, 1, 1)), result.output


def scheduled(
    program: Program, database: Database, retention: str = "90d", env: dict[str, str] | None = None
) -> Result:
    """A scheduled run with this retention of refresh sessions."""
    policies = {**POLICIES, "refresh": {**POLICIES["refresh"], "retention": retention}}
    config = configuration(database.conninfo, policies)
    return program(config, env=env) if env else program.inside(config)


def assert_held(result: Result, phase: str) -> None:
    """That phase did not run, and the log names the cut-off of its last run and the one it would have had."""
    assert result.returncode == 1, result.output
    lines = log(result.stdout)
    (failed,) = [line for line in lines if line.event == "phase_failed" and line.fields["phase"] == phase]
    assert "--once" in failed.fields["error"], "the remedy"
    assert lines[0].fields[f"cutoff{phase.capitalize()}"][:10] in failed.fields["error"]


def test_a_retention_mistyped_is_held_until_an_operator_consents(systems: Database, program: Program) -> None:
    """`9d` for `90d`: that policy alone does not run by itself. `--once` is the consent, and is remembered."""
    before = scheduled(program, systems)
    assert before.returncode == 0, before.output
    fill(systems, sicr=1, refresh=1, tokens=1, days=60)
    held = scheduled(program, systems, "9d")
    assert_held(held, "refresh")
    last = log(before.stdout)[0].fields["cutoffRefresh"]
    (failed,) = [line for line in log(held.stdout) if line.event == "phase_failed"]
    assert last[:10] in failed.fields["error"]
    assert left(systems) == (0, 1, 0), "the others run"
    assert_held(scheduled(program, systems, "9d"), "refresh")
    assert left(systems) == (0, 1, 0), "a second attempt is no consent"
    assert program.inside(None, "--once").returncode == 0
    assert left(systems) == (0, 0, 0)
    fill(systems, refresh=1, days=60)
    assert scheduled(program, systems, "9d").returncode == 0
    assert left(systems) == (0, 0, 0)


def test_a_dry_run_is_no_consent(systems: Database, program: Program) -> None:
    """Looking at what would go releases nothing."""
    assert scheduled(program, systems).returncode == 0
    fill(systems, refresh=1, days=60)
    assert scheduled(program, systems, "9d").returncode == 1
    assert program.inside(None, "--dry-run").returncode == 0
    assert_held(scheduled(program, systems, "9d"), "refresh")
    assert left(systems) == (0, 1, 0)


@pytest.mark.parametrize("retention", ["90d", "900d", "89d12h"])
def test_what_is_no_leap_is_not_held(systems: Database, program: Program, retention: str) -> None:
    """The same retention, a longer one, or one shorter by less than a day, runs by itself."""
    fill(systems, refresh=1, days=1000)
    assert scheduled(program, systems).returncode == 0, "the first run ever is not held either"
    fill(systems, refresh=1, days=1000)
    result = scheduled(program, systems, retention)
    assert (result.returncode, left(systems)) == (0, (0, 0, 0)), result.output


def test_a_new_policy_is_not_held(systems: Database, program: Program) -> None:
    """The brake is about a policy that changed, not about one that never ran."""
    config = configuration(systems.conninfo, {"sicr": POLICIES["sicr"]})
    assert program.inside(config).returncode == 0
    fill(systems, refresh=1)
    assert scheduled(program, systems).returncode == 0
    assert left(systems) == (0, 0, 0)


@pytest.mark.parametrize(
    "state", [b"\xff\xfe\x00garbage", b"", b"[policy", b"run = 5\npolicy = 'x'\nversion = []\n"], ids=repr
)
def test_a_state_file_that_cannot_be_read_is_said_and_the_run_goes_on(
    systems: Database, program: Program, state: bytes
) -> None:
    """Without memory there is no brake, but what has expired must go; the next run has a memory again."""
    fill(systems, sicr=1)
    path = program.directory / "state.toml"
    path.write_bytes(state)
    result = scheduled(program, systems)
    assert (result.returncode, left(systems)) == (0, (0, 0, 0)), result.output
    assert "Traceback" not in result.output
    if state:
        assert str(path) in result.output
    fill(systems, refresh=1, days=60)
    assert_held(scheduled(program, systems, "9d"), "refresh")


def test_a_state_file_that_cannot_be_written_does_not_stop_the_purge(systems: Database, program: Program) -> None:
    """What has expired goes even where nothing can be remembered, and the log names the file."""
    fill(systems, sicr=1)
    config = configuration(systems.conninfo, metrics={"state": "/proc/no/state.toml"})
    result = program.inside(config)
    assert left(systems) == (0, 0, 0), result.output
    assert "/proc/no/state.toml" in result.output
    assert "Traceback" not in result.output


@pytest.fixture(scope="module")
def other_server() -> Iterator[Server]:
    """A server whose clock a test may set."""
    server = Server()
    yield server
    server.remove()


def test_when_both_clocks_leap_the_brake_holds_until_an_operator_consents(
    other_server: Server, program: Program
) -> None:
    """Two clocks that agree can still both be wrong: everything would be over at once, so nothing goes unasked."""
    database = Database(other_server, "postgres")
    database.execute(SYSTEMS.read_text())
    fill(database, sicr=1, refresh=1, tokens=1)
    assert scheduled(program, database).returncode == 0
    assert left(database) == (0, 0, 0)
    fill(database, sicr=1, refresh=1, tokens=1, days=-1)
    database.close()
    other_server.stop("fast")
    other_server.environment = faketime(YEAR)
    other_server.start()
    assert database.value("SELECT now()") > datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=364)
    held = scheduled(program, database, env=faketime(YEAR))
    assert held.returncode == 1, held.output
    failed = {line.fields["phase"] for line in log(held.stdout) if line.event == "phase_failed"}
    assert failed == set(POLICIES)
    assert_held(held, "sicr")
    assert left(database) == (1, 1, 1)
    assert program(None, "--once", env=faketime(YEAR)).returncode == 0
    assert left(database) == (0, 0, 0)
    fill(database, sicr=1, refresh=1, tokens=1)
    assert scheduled(program, database, env=faketime(YEAR)).returncode == 0
    assert left(database) == (0, 0, 0)
    database.close()
