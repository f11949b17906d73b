"""What `--check` and `--status` say of the timer and the service, and systemd of a run, asked of a booted systemd."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterator

import pytest
from guest import Guest
from lab import PROGRAM, until

SERVICE = """
[Unit]
Description=Delete session rows that have outlived their retention

[Service]
Type=oneshot
User=session-retention
ExecStart=/usr/bin/session-retention
StateDirectory=session-retention
NotifyAccess=main
TimeoutStartSec=5min
"""
TIMER = """
[Unit]
Description=Delete session rows every night

[Timer]
OnCalendar=*-*-* 03:30:00 UTC
RandomizedDelaySec=15min
Persistent=yes

[Install]
WantedBy=timers.target
"""
SCHEDULE_CODES = {"timer_missing", "timer_outside_window", "timer_period", "start_timeout"}


def install(guest: Guest) -> None:
    """The program, its user, its units and its database, as its package would have them."""
    guest.exec("systemd-sysusers", "--inline", 'u session-retention - "" /nonexistent')
    guest.systems()
    guest.put(PROGRAM, "/usr/bin/session-retention", 0o755)
    guest.put(SERVICE, "/usr/lib/systemd/system/session-retention.service")
    guest.put(TIMER, "/usr/lib/systemd/system/session-retention.timer")
    guest.exec("install", "-d", "-o", "session-retention", "-g", "session-retention", "/var/lib/session-retention")
    guest.exec("systemctl", "daemon-reload")


@pytest.fixture(scope="module")
def machine() -> Iterator[Guest]:
    with Guest() as guest:
        install(guest)
        yield guest


@pytest.fixture
def guest(machine: Guest) -> Iterator[Guest]:
    """A guest with the timer enabled, in UTC; what a test changes goes again."""
    machine.configure(run={"night_window_utc": "02:00-05:00"})
    machine.exec("systemctl", "enable", "--quiet", "--now", "session-retention.timer")
    yield machine
    machine.shell("""
        rm -rf /etc/systemd/system/session-retention.*.d /run/systemd/system/session-retention.*
        systemctl unmask --quiet session-retention.timer
        ln -sf /usr/share/zoneinfo/Etc/UTC /etc/localtime
        systemctl daemon-reload
    """)


def drop_in(guest: Guest, unit: str, *lines: str) -> None:
    """Override settings of a unit as `systemctl edit` would: `[Timer]` or `[Service]` lines."""
    section = "[Timer]" if unit.endswith(".timer") else "[Service]"
    guest.put("\n".join([section, *lines, ""]), f"/etc/systemd/system/{unit}.d/override.conf")
    guest.exec("systemctl", "daemon-reload")


def timer(guest: Guest, *calendars: str, delay: str = "15min") -> None:
    """Give the timer other times, all of them in place of its own."""
    lines = [f"OnCalendar={calendar}" for calendar in ("", *calendars)]
    drop_in(guest, "session-retention.timer", *lines, f"RandomizedDelaySec={delay}")


def schedule(guest: Guest) -> list[str]:
    """The codes of what --check has to say of the schedule; each of its findings has a remedy."""
    result = guest.exec("session-retention", "--check", "--json", check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    findings = [finding for finding in json.loads(result.stdout)["findings"] if finding["code"] in SCHEDULE_CODES]
    assert all(finding["severity"] == "warning" and finding["message"] and finding["remedy"] for finding in findings)
    return sorted(finding["code"] for finding in findings)


def test_the_schedule_as_documented_is_right(guest: Guest) -> None:
    """Nightly at 03:30 UTC with a small random delay, in a window from 02:00 to 05:00: nothing to say."""
    assert schedule(guest) == []


@pytest.mark.parametrize("how", ["disable --now", "mask --now", "stop"])
def test_a_timer_that_will_not_fire_is_named(guest: Guest, how: str) -> None:
    """A timer that is disabled or masked is missing; so is one that is enabled but was stopped, until it is started."""
    guest.shell(f"systemctl {how} --quiet session-retention.timer")
    assert schedule(guest) == ["timer_missing"]


def test_a_timer_that_is_not_there_is_named(guest: Guest) -> None:
    """The units were never installed, or only the service was."""
    guest.shell("""
        systemctl disable --now --quiet session-retention.timer
        mv /usr/lib/systemd/system/session-retention.timer /root; systemctl daemon-reload
    """)
    try:
        assert schedule(guest) == ["timer_missing"]
    finally:
        guest.shell("mv /root/session-retention.timer /usr/lib/systemd/system/; systemctl daemon-reload")


def test_local_time_is_compared_with_a_window_in_utc(guest: Guest) -> None:
    """03:30 of a machine five hours ahead is 22:30 UTC: outside the window, unless that follows."""
    guest.exec("ln", "-sf", "/usr/share/zoneinfo/Asia/Yekaterinburg", "/etc/localtime")
    assert schedule(guest) == []  # a time with UTC beside it is what it was
    timer(guest, "*-*-* 03:30:00")
    assert schedule(guest) == ["timer_outside_window"]
    guest.configure(run={"night_window_utc": "22:00-01:00"})
    assert schedule(guest) == []


def test_daylight_saving_time_is_foreseen(guest: Guest) -> None:
    """03:30 in Berlin is 02:30 UTC in winter and 01:30 in summer: a window from 02:00 is named in any season, a wider
    one is right in both, and the night that is an hour shorter or longer is no other period."""
    timer(guest, "*-*-* 03:30:00 Europe/Berlin")
    assert schedule(guest) == ["timer_outside_window"]
    guest.configure(run={"night_window_utc": "01:00-03:00"})
    assert schedule(guest) == []


def test_the_random_delay_counts(guest: Guest) -> None:
    """A run that starts up to twenty minutes after 04:50 may find the window closed; up to five, it does not."""
    timer(guest, "*-*-* 04:50:00 UTC", delay="5min")
    assert schedule(guest) == []
    timer(guest, "*-*-* 04:50:00 UTC", delay="20min")
    assert schedule(guest) == ["timer_outside_window"]


def test_every_one_of_several_times_counts(guest: Guest) -> None:
    """Two lines are two runs a day: each must fall inside the window, and 12 hours apart is not every 24."""
    timer(guest, "*-*-* 02:30:00 UTC", "*-*-* 14:30:00 UTC")
    assert schedule(guest) == ["timer_outside_window", "timer_period"]
    guest.configure(run={"night_window_utc": "", "retention_interval": "12h"})
    assert schedule(guest) == []
    timer(guest, "Mon..Fri 03:30 UTC", "Sat,Sun 03:30 UTC")
    guest.configure(run={"night_window_utc": "02:00-05:00"})
    assert schedule(guest) == []  # two lines, one night each


@pytest.mark.parametrize(
    ("calendar", "interval", "codes"),
    [
        ("Mon..Fri 03:30 UTC", "24h", ["timer_period"]),
        ("*-*-* 03:30 UTC", "12h", ["timer_period"]),
        ("Mon 03:30 UTC", "7d", []),
        ("*-*-1/2 03:30 UTC", "2d", []),  # from the 31st to the 1st it is a day: sooner does no harm
    ],
)
def test_the_period_is_compared_with_the_interval(guest: Guest, calendar: str, interval: str, codes: list[str]) -> None:
    """`retention_interval`, which drives the alerts, is the longest that the timer lets pass, on all days ahead."""
    timer(guest, calendar)
    guest.configure(run={"night_window_utc": "02:00-05:00", "retention_interval": interval})
    assert schedule(guest) == codes


@pytest.mark.parametrize(
    ("lines", "codes"),
    [
        (["NotifyAccess=none"], ["start_timeout"]),
        (["NotifyAccess=none", "TimeoutStartSec=2h"], []),
        (["NotifyAccess=none", "TimeoutStartSec=infinity"], []),
        (["NotifyAccess=all"], []),
    ],
)
def test_the_start_timeout_is_compared_with_the_budget(guest: Guest, lines: list[str], codes: list[str]) -> None:
    """A run that may last half an hour must not be ended after five minutes, unless it may tell of its progress."""
    drop_in(guest, "session-retention.service", *lines)
    assert schedule(guest) == codes


def test_a_restricted_user_sees_the_same(guest: Guest) -> None:
    """--check needs no root for what systemd tells anybody."""
    timer(guest, "*-*-* 12:00:00 UTC")
    result = guest.exec("session-retention", "--check", "--json", user="session-retention", check=False)
    assert "timer_outside_window" in [finding["code"] for finding in json.loads(result.stdout)["findings"]]


def test_the_status_knows_when_systemd_starts_the_next_run(guest: Guest) -> None:
    """The time is systemd's own, random delay and all; of a timer that is not started, it says that none will come."""

    # or systemd draws the delay anew whenever somebody sets the clock
    drop_in(guest, "session-retention.timer", "FixedRandomDelay=yes")
    asked = "systemctl list-timers --output=json session-retention.timer; session-retention --status --json"
    first, _, rest = guest.shell(asked).partition("\n")
    (timer,), told = json.loads(first), json.loads(rest)
    following = datetime.datetime.fromtimestamp(timer["next"] // 1_000_000, datetime.UTC)
    assert told["next_run"] == following.isoformat().replace("+00:00", "Z")
    assert re.search(r"^Next run:     [-0-9]+ 03:\d\d:\d\d UTC, in ", guest.shell("session-retention --status"), re.M)
    guest.shell("systemctl stop session-retention.timer")
    told = json.loads(guest.exec("session-retention", "--status", "--json", user="session-retention").stdout)
    assert told["next_run"] is None
    assert told["schedule"] == "not by systemd: session-retention.timer is not started"


def test_systemctl_status_shows_how_a_run_gets_on(guest: Guest) -> None:
    """While it goes on: policy, rows, rate, share and what is left of the time; when it is over, how it ended."""
    guest.fill(old=20)
    guest.configure(run={"batch_size": 1, "pause": "50ms"})
    guest.exec("systemctl", "start", "--no-block", "session-retention.service")

    def shown(pattern: str) -> bool:
        return re.search(rf'Status: "{pattern}"', guest.shell("systemctl status session-retention || true")) is not None

    until(lambda: shown(r"\w+: [1-9]\d*( of about \d+)? rows deleted, \d+/s.*, budget left 29m\d+s"), "progress")
    until(lambda: guest.show("session-retention.service", "ActiveState") == "inactive", "the end")
    assert guest.show("session-retention.service", "Result") == "success"
    assert "60 rows deleted, drained" in guest.show("session-retention.service", "StatusText")
