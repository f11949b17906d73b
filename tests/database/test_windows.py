"""The night window: a scheduled run works inside it and nowhere else; an operator's run does not ask."""

from __future__ import annotations

import datetime
import pathlib
import tempfile
from collections.abc import Iterator

import pytest
from lab import POLICIES, Database, Listener, Program, configuration, faketime, log


@pytest.fixture
def listener() -> Iterator[Listener]:
    """Where a server would be, in a path short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="retention-") as directory:
        yield Listener(pathlib.Path(directory))


def at(clock: str) -> dict[str, str]:
    """The environment in which it is that time of the UTC day, in a zone far from UTC."""
    now = datetime.datetime.now(datetime.UTC)
    hour, minute, second = (int(part) for part in clock.split(":"))
    then = now.replace(hour=hour, minute=minute, second=second, microsecond=0)
    return {**faketime((then - now).total_seconds()), "TZ": "Asia/Kathmandu"}


#: The window is a matter of this machine's clock, which these tests set up to a day apart from the database's.
ANY_CLOCK = {"max_clock_skew": "2d"}

OPEN = [
    ("02:00-05:00", "02:00:00"),
    ("02:00-05:00", "04:58:00"),
    ("22:00-02:00", "22:00:00"),
    ("22:00-02:00", "00:00:00"),
    ("22:00-02:00", "01:58:00"),
    ("00:00-23:59", "12:00:00"),
    ("05:00-00:00", "23:58:00"),
    ("", "12:00:00"),
]
CLOSED = [
    ("02:00-05:00", "01:59:00"),
    ("02:00-05:00", "05:00:00"),
    ("02:00-05:00", "14:00:00"),
    ("22:00-02:00", "02:00:00"),
    ("22:00-02:00", "21:59:00"),
    ("22:00-02:00", "12:00:00"),
    ("05:00-00:00", "00:00:00"),
]


@pytest.mark.parametrize(("window", "clock"), OPEN)
def test_a_scheduled_run_works_inside_the_window(systems: Database, program: Program, window: str, clock: str) -> None:
    """From the first second of the window on, by UTC, across midnight as well; the empty window is always open."""
    config = configuration(systems.conninfo, database=ANY_CLOCK, night_window_utc=window)
    result = program(config, env=at(clock))
    assert result.returncode == 0, result.output
    assert log(result.stdout)[-1].event == "job_completed"


@pytest.mark.parametrize(("window", "clock"), CLOSED)
def test_a_scheduled_run_outside_the_window_says_so_and_connects_to_nothing(
    listener: Listener, program: Program, window: str, clock: str
) -> None:
    """Not a failure: exit 0 and one line. The end of the window is outside."""
    result = program(configuration(listener.conninfo, night_window_utc=window), env=at(clock))
    assert (result.returncode, result.stderr) == (0, ""), result.output
    (line,) = log(result.stdout)
    assert (line.event, line.level) == ("job_skipped", "INFO")
    assert (set(line.fields), line.fields["nightWindowUtc"]) == ({"jobRunId", "nightWindowUtc"}, window)
    assert listener.untouched


def exactly(clock: str) -> dict[str, str]:
    """The environment in which it is, and stays, that time of this UTC day, however long the program takes to start."""
    return {**faketime(0), "FAKETIME": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d} {clock}", "TZ": "UTC"}


def test_the_window_is_half_open(listener: Listener, program: Program) -> None:
    """Its first instant belongs to it, its last does not."""
    process = program.start(configuration(listener.conninfo, night_window_utc="02:00-05:00"), env=exactly("02:00:00"))
    listener.accept().close()
    assert program.finish(process, 20).returncode == 69
    result = program(None, env=exactly("05:00:00"))
    assert (result.returncode, [line.event for line in log(result.stdout)]) == (0, ["job_skipped"])
    assert listener.untouched


@pytest.mark.parametrize("verb", ["--once", "--dry-run"])
def test_an_operators_run_does_not_ask_for_the_window(systems: Database, program: Program, verb: str) -> None:
    """`--once` and `--dry-run` work at noon."""
    config = configuration(systems.conninfo, database=ANY_CLOCK, night_window_utc="02:00-05:00")
    result = program(config, verb, "--json", env=at("12:00:00"))
    assert (result.returncode, set(result.policies)) == (0, set(POLICIES)), result.output


def backlog(database: Database, rows: int) -> None:
    """So many requests to delete, each of which takes 50 ms."""
    database.execute(
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS"
        "    $$ BEGIN PERFORM pg_catalog.pg_sleep(0.05); RETURN OLD; END $$;"
        "CREATE TRIGGER slow BEFORE DELETE ON identity.sign_in_confirmation_requests"
        "    FOR EACH ROW EXECUTE FUNCTION slow();"
        "INSERT INTO identity.sign_in_confirmation_requests (phone_number, created_at)"
        f"    SELECT '', now() - interval '40 days' FROM generate_series(1, {rows})"
    )


@pytest.mark.parametrize("pause", ["0s", "1h"])
def test_a_scheduled_run_ends_with_the_window(systems: Database, program: Program, pause: str) -> None:
    """What the window's end cuts short ends well, between batches or in a pause, and tells what it left."""
    backlog(systems, 2000)
    config = configuration(
        systems.conninfo, database=ANY_CLOCK, night_window_utc="02:00-05:00", batch_size=5, pause=pause
    )
    result = program(config, env=exactly("04:59:57"), timeout=20)
    assert result.returncode == 0, result.output
    lines = log(result.stdout)
    assert lines[-1].fields["stopReason"] == "budget"
    phases = {line.fields["phase"]: line for line in lines if line.event == "phase_completed"}
    assert set(phases) == set(POLICIES)
    deleted = int(phases["sicr"].fields["deletedCount"])
    assert 0 < deleted < 2000
    assert systems.count("identity.sign_in_confirmation_requests") == 2000 - deleted
    assert int(phases["sicr"].fields["backlogRemaining"]) == 2000 - deleted


def test_once_does_not_end_with_the_window(systems: Database, program: Program) -> None:
    """An operator's run that began inside the window goes on past its end."""
    backlog(systems, 50)
    config = configuration(systems.conninfo, database=ANY_CLOCK, night_window_utc="02:00-05:00", batch_size=10)
    result = program(config, "--once", "--json", env=exactly("04:59:59"))
    assert (result.returncode, result.json["stop_reason"]) == (0, "drained"), result.output


def test_a_server_that_is_away_is_not_waited_for_beyond_the_window(listener: Listener, program: Program) -> None:
    """`connect_retry` ends with the window."""
    listener.socket.close()
    config = configuration(
        listener.conninfo, database={**ANY_CLOCK, "connect_retry": "10m"}, night_window_utc="02:00-05:00"
    )
    result = program(config, env=exactly("04:59:57"), timeout=20)
    assert result.returncode == 69, result.output
    assert log(result.stdout)[-1].event == "job_failed"
