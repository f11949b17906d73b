"""The installed job at work: by its timer and by hand, in its sandbox, stopped, hung and without its database."""

from __future__ import annotations

import datetime as dt
import json
import re
import time
import tomllib

import pytest
from guest import Guest
from lab import PROGRAM, until

SERVICE = "session-retention.service"
TIMER = "session-retention.timer"
STATE = "/var/lib/session-retention"
PASSWORD = "correct horse"
EXAMPLES = "/usr/share/doc/session-retention/examples"
OVER_TCP = "host=127.0.0.1 dbname=auth user=session-retention sslmode=require"

#: Fires as soon as it is started.
AT_ONCE = "[Timer]\nOnActiveSec=0\nRandomizedDelaySec=0\nAccuracySec=1us\n"
#: One row a transaction, three hundred of them: a run of a minute.
SLOW = {"batch_size": 1, "pause": "100ms"}


def start(guest: Guest) -> str:
    """Let the unit run once, to its end, and return its result."""
    guest.exec("systemctl", "start", SERVICE, check=False)
    return guest.show(SERVICE, "Result")


def start_slowly(guest: Guest) -> None:
    """Start a run that takes long, and wait until it has deleted something."""
    guest.configure(run=SLOW)
    guest.exec("systemctl", "start", "--no-block", SERVICE)
    until(lambda: guest.events().count("batch_deleted") > 2, "the first batches")


def files(guest: Guest, directory: str) -> dict[str, str]:
    """Owner, group and mode of each file in a directory."""
    listed = guest.shell(f"cd {directory}; stat --format='%n %U:%G %a' -- *")
    return {name: rest for name, _, rest in (line.partition(" ") for line in listed.splitlines())}


def with_password(guest: Guest) -> None:
    """Give the role a password, and the user its password file, as the manual says."""
    guest.sql(f"""ALTER ROLE "session-retention" PASSWORD '{PASSWORD}'""", "postgres")
    guest.exec(
        *("install", "-m", "600", "-o", "session-retention", "/dev/stdin", "/etc/session-retention/pgpass"),
        stdin=f"127.0.0.1:5432:auth:session-retention:{PASSWORD}\n",
    )
    guest.configure(database={"conninfo": f"{OVER_TCP} passfile=/etc/session-retention/pgpass"})


def connections(guest: Guest) -> list[str]:
    """What the server has logged of the job's connections."""
    log = guest.shell("cat /var/log/postgresql/*.log").splitlines()
    return [line for line in log if "authorized" in line and "application_name=session-retention" in line]


def test_the_timer_runs_the_job(guest: Guest) -> None:
    """Enabled and due, the timer starts a run that purges the three systems, as its own user and without a password;
    the journal has its events with their fields, the catalog explains them, and the next run is tomorrow night's."""
    guest.drop_in(TIMER, AT_ONCE)
    guest.exec("systemctl", "enable", "--now", TIMER)
    until(lambda: "job_completed" in guest.events(), "the run")
    until(lambda: guest.show(SERVICE, "ActiveState") == "inactive", "its end")
    assert guest.show(SERVICE, "Result") == "success"
    assert guest.left() == [10, 10, 10]

    entries = [entry for entry in guest.journal("--unit", SERVICE) if "EVENT" in entry]
    assert [entry["EVENT"] for entry in entries] == guest.events()
    user = guest.shell("id --user session-retention").strip()
    assert {(entry["_SYSTEMD_UNIT"], entry["_UID"], entry["SYSLOG_IDENTIFIER"]) for entry in entries} == {
        (SERVICE, user, "session-retention")
    }
    (run,) = {entry["JOB_RUN_ID"] for entry in entries}
    completed = {entry["PHASE"]: entry for entry in entries if entry["EVENT"] == "phase_completed"}
    deleted = {phase: (entry["DELETED_COUNT"], entry["STOP_REASON"]) for phase, entry in completed.items()}
    assert deleted == {
        "sicr": ("100", "drained"),
        "refresh": ("100", "drained"),
        "tokens_expired": ("100", "drained"),
        "tokens_revoked": ("0", "drained"),
    }
    explained = guest.shell(f"journalctl --catalog --no-pager JOB_RUN_ID={run}")
    for event in entries:
        assert f"-- MESSAGE_ID={event['MESSAGE_ID']}" not in explained
    for subject in ("A retention run has started", "Policy refresh is done: 100 rows deleted", "run has ended"):
        assert subject in explained

    assert re.search(r" 03:3[0-5]:\d\d UTC$", guest.show(TIMER, "NextElapseUSecRealtime"))
    assert TIMER in guest.shell("systemctl list-timers --no-pager")
    assert files(guest, STATE) == {
        "history.jsonl": "session-retention:session-retention 644",
        "metrics.prom": "session-retention:session-retention 644",
        "state.toml": "session-retention:session-retention 644",
    }


@pytest.mark.parametrize("how", ["over the socket", "over TCP, with TLS and a password"])
def test_by_hand_it_is_the_same_as_by_the_timer(guest: Guest, how: str) -> None:
    """Run by root, by its own user and by the unit, in any order: each purges, and can write what the others wrote."""
    if how != "over the socket":
        with_password(guest)
    before = len(connections(guest))
    boots = set()
    by_hand = ["session-retention", "--once", "--json"]
    for command in (
        ["sudo", *by_hand],
        ["systemctl", "start", SERVICE],
        ["sudo", "-u", "session-retention", *by_hand],
        ["systemctl", "start", SERVICE],
        ["sudo", *by_hand],
    ):
        guest.fill(old=3, young=1)
        guest.exec(*command)
        assert guest.left() == [1, 1, 1]
        assert set(files(guest, STATE).values()) == {"session-retention:session-retention 644"}
        boots |= {last["boot_id"] for last in tomllib.loads(guest.shell(f"cat {STATE}/state.toml"))["policy"].values()}
    assert boots == {guest.shell("cat /proc/sys/kernel/random/boot_id").strip().replace("-", "")}
    made = connections(guest)[before:]
    assert len(made) == 5
    assert all(
        "user=session-retention" in line and ("SSL enabled" in line) == (how != "over the socket") for line in made
    )
    assert "record_failed" not in guest.events()


def test_the_documented_grants_and_indexes_leave_nothing_to_say(guest: Guest) -> None:
    """As installed and configured, with the timer enabled, --check has no error and no warning."""
    guest.configure(run={"night_window_utc": "02:00-05:00"})
    guest.exec("systemctl", "enable", "--now", TIMER)
    found = json.loads(guest.exec("session-retention", "--check", "--json").stdout)["findings"]
    assert [finding for finding in found if finding["severity"] != "info"] == []


PROBE = """
import ctypes, errno, json, mmap, os, socket
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)
def attempt(action):
    try:
        action()
    except OSError as error:
        return errno.errorcode.get(error.errno, "refused")
    return "allowed"
attempts = {
    "write to /etc": lambda: open("/etc/probe", "w"),
    "write to /usr": lambda: open("/usr/probe", "w"),
    "write to /var/lib": lambda: open("/var/lib/probe", "w"),
    "change the configuration": lambda: open("/etc/session-retention/config.toml", "a"),
    "see /home": lambda: os.listdir("/home"),
    "see /root": lambda: os.listdir("/root"),
    "read a disk": lambda: open("/dev/sda"),
    "read the kernel's log": lambda: open("/dev/kmsg"),
    "load a module": lambda: call("syscall", 175, None, 0, b""),
    "make a namespace": lambda: call("unshare", 0x10000000),
    "set the clock": lambda: call("clock_settime", 0, (ctypes.c_long * 2)(0, 0)),
    "mount": lambda: call("mount", b"none", b"/tmp", b"tmpfs", 0, None),
    "run code that it has written": lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_WRITE | mmap.PROT_EXEC),
    "a netlink socket": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
    "a packet socket": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW),
    "a set-user-ID file": lambda: os.chmod("/var/lib/session-retention/probe", 0o4755),
}
report = open("/var/lib/session-retention/probe", "w")
result = {name: attempt(action) for name, action in attempts.items()}
result["processes"] = [int(name) == os.getpid() for name in os.listdir("/proc") if name.isdigit()]
result["temporary files"] = os.listdir("/tmp")
json.dump(result, report)
"""


def test_the_sandbox_is_felt(guest: Guest) -> None:
    """In the unit's place a program can write to its state directory and nowhere else, and do nothing that a purge does
    not need: no home, no module, no namespace, no device, no other kind of socket, no process but its own."""
    guest.put(PROBE, "/usr/local/lib/probe.py")
    guest.shell("mkdir -p /home/somebody; touch /tmp/somebodys")
    guest.drop_in(SERVICE, "[Service]\nExecStart=\nExecStart=/usr/bin/python3 /usr/local/lib/probe.py\n")
    assert start(guest) == "success"
    result = json.loads(guest.shell(f"cat {STATE}/probe"))
    assert result.pop("processes") == [True]
    assert result.pop("temporary files") == []
    assert "allowed" not in result.values(), result


def test_the_sandbox_is_rated(guest: Guest) -> None:
    """`systemd-analyze` finds nothing wrong with the units, and an exposure of 1.1 at most."""
    verified = guest.exec("systemd-analyze", "verify", "--man=no", SERVICE, TIMER)
    assert verified.stdout + verified.stderr == ""
    guest.exec("systemd-analyze", "security", "--no-pager", "--threshold=11", SERVICE)


@pytest.mark.parametrize("example", ["socket-only", "password-credential"])
def test_the_shipped_drop_ins_work(guest: Guest, example: str) -> None:
    """The purge works without any network but the socket, and with a password that only the unit is given."""
    if example == "password-credential":
        with_password(guest)
        guest.configure(database={"conninfo": OVER_TCP})
        guest.shell("rm /etc/session-retention/pgpass")
        guest.put(PASSWORD + "\n", "/etc/session-retention/db-password", 0o600)
        assert start(guest) == "exit-code"  # without it
    guest.shell(f"install -D -m 644 {EXAMPLES}/{example}.conf /etc/systemd/system/{SERVICE}.d/{example}.conf")
    guest.exec("systemctl", "daemon-reload")
    assert start(guest) == "success"
    assert guest.left() == [10, 10, 10]


def test_local_time_needs_another_window(guest: Guest) -> None:
    """The shipped drop-in for local time moves the next run, and --check asks for the window to follow."""
    guest.shell(f"""
        install -D -m 644 {EXAMPLES}/local-time.conf /etc/systemd/system/{TIMER}.d/local-time.conf
        ln -sf /usr/share/zoneinfo/Europe/Moscow /etc/localtime
        systemctl daemon-reload
        systemctl enable --quiet --now {TIMER}
    """)
    try:
        assert " 03:3" in guest.show(TIMER, "NextElapseUSecRealtime")
        for window, codes in (("02:00-05:00", {"timer_outside_window"}), ("00:00-03:00", set())):
            guest.configure(run={"night_window_utc": window})
            found = json.loads(guest.exec("session-retention", "--check", "--json").stdout)["findings"]
            assert {f["code"] for f in found if f["code"].startswith("timer")} == codes
    finally:
        guest.exec("ln", "-sf", "/usr/share/zoneinfo/Etc/UTC", "/etc/localtime")


def test_a_run_that_is_stopped_ends_well(guest: Guest) -> None:
    """`systemctl stop` in mid-run: the batch in flight is the last one, and that is a success."""
    start_slowly(guest)
    began = time.monotonic()
    guest.exec("systemctl", "stop", SERVICE)
    assert time.monotonic() - began < 30
    assert guest.show(SERVICE, "Result") == "success"
    assert guest.show(SERVICE, "ExecMainStatus") == "0"
    (end,) = (entry for entry in guest.journal("--unit", SERVICE) if entry.get("EVENT") == "job_completed")
    assert end["STOP_REASON"] == "signal"
    assert 0 < int(end["SICR_DELETED"]) < 100
    assert guest.left() == [110 - int(end["SICR_DELETED"]), 110, 110]


def test_a_run_that_is_stopped_at_once_ends_well(guest: Guest) -> None:
    """Stopped before it has begun, while Python still starts, it has not failed either."""
    guest.exec("systemctl", "start", "--no-block", SERVICE)
    until(lambda: guest.show(SERVICE, "MainPID") != "0", "its process")
    guest.exec("systemctl", "stop", SERVICE)
    assert guest.show(SERVICE, "Result") == "success"


def test_a_run_longer_than_the_start_timeout_lives(guest: Guest) -> None:
    """As long as it makes progress the program asks for more time, so that it may take longer than the time-out."""
    guest.drop_in(SERVICE, "[Service]\nTimeoutStartSec=5s\n")
    guest.configure(run={"batch_size": 5, "pause": "100ms"})
    began = time.monotonic()
    assert start(guest) == "success"
    assert time.monotonic() - began > 5
    assert guest.left() == [10, 10, 10]


def test_a_hung_run_is_ended_and_the_next_one_runs(guest: Guest) -> None:
    """Without progress a run is ended by the start time-out, and fails; it does not keep the next one from running."""
    guest.shell("mkfifo /run/config.toml")  # nobody will ever write to it
    text = "[Service]\nTimeoutStartSec=2s\nExecStart=\nExecStart=/usr/bin/session-retention --config /run/config.toml\n"
    guest.drop_in(SERVICE, text)
    assert start(guest) == "timeout"
    guest.shell(f"rm -r /run/config.toml /etc/systemd/system/{SERVICE}.d; systemctl daemon-reload")
    assert start(guest) == "success"
    assert guest.left() == [10, 10, 10]


def test_an_unreachable_database_fails_once_and_is_told_once(guest: Guest) -> None:
    """No server within connect_retry: status 69, and OnFailure= of the shipped example has one thing to say."""
    guest.shell(f"""
        cd /etc/systemd/system
        install -m 644 {EXAMPLES}/session-retention-failed.service .
        install -D -m 644 {EXAMPLES}/notify-failure.conf {SERVICE}.d/notify-failure.conf
        systemctl daemon-reload
    """)
    guest.configure(database={"conninfo": "host=127.0.0.1 port=1 dbname=auth", "connect_retry": "2s"})
    assert start(guest) == "exit-code"
    assert guest.show(SERVICE, "ExecMainStatus") == "69"
    assert "connect_retried" in guest.events()
    assert guest.events().count("job_failed") == 1
    told = until(lambda: guest.journal("--unit=session-retention-failed.service", "PRIORITY=1"), "the notice")
    assert [entry["MESSAGE"] for entry in told] == ["session-retention.service failed: exit-code 69"]


def test_a_database_that_is_back_in_time_is_purged(guest: Guest) -> None:
    """A run that finds the server down waits for it, and then does its work."""
    guest.configure(database={"connect_retry": "2m"})
    guest.exec("systemctl", "stop", guest.server)
    guest.exec("systemctl", "start", "--no-block", SERVICE)
    until(lambda: "connect_retried" in guest.events(), "the first try")
    guest.exec("systemctl", "start", guest.server)
    until(lambda: guest.show(SERVICE, "ActiveState") != "activating", "the end of the run")
    assert guest.show(SERVICE, "Result") == "success"
    assert guest.left() == [10, 10, 10]


def window(begins_in: int, ends_in: int) -> str:
    """A window from so many hours from now to so many."""
    now = dt.datetime.now(dt.UTC)
    return "-".join(f"{now + dt.timedelta(hours=hours):%H:%M}" for hours in (begins_in, ends_in))


def test_a_missed_night_is_made_up_for_inside_the_window_only(guest: Guest) -> None:
    """A machine that was down in the night runs the job when it starts: by day that does nothing, by night it purges.
    Nor does a timer that is enabled again by day delete anything."""
    stamp = "/var/lib/systemd/timers/stamp-session-retention.timer"
    guest.drop_in(TIMER, "[Timer]\nRandomizedDelaySec=0\n")
    guest.exec("systemctl", "enable", "--quiet", TIMER)
    for night_window_utc, event, left in (
        (window(6, 8), "job_skipped", [110, 110, 110]),
        (window(-2, 6), "job_completed", [10, 10, 10]),
    ):
        guest.configure(run={"night_window_utc": night_window_utc})
        guest.shell(f"touch --date='3 days ago' {stamp}; systemctl stop {TIMER}")
        guest.forget()
        guest.reboot()
        until(lambda: guest.events()[-1:] in (["job_skipped"], ["job_completed"]), "the run")
        assert guest.events()[-1] == event
        assert guest.left() == left

    guest.configure(run={"night_window_utc": window(6, 8)})
    guest.fill()
    guest.exec("systemctl", "disable", "--quiet", "--now", TIMER)
    guest.exec("touch", "--date=3 days ago", stamp)
    guest.forget()
    guest.exec("systemctl", "enable", "--quiet", "--now", TIMER)
    until(lambda: guest.events() == ["job_skipped"], "the run")
    assert guest.left() == [110, 110, 110]


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe"])
def test_no_change_of_the_clocks_moves_the_run(guest: Guest, zone: str) -> None:
    """Over the nights on which clocks change, and over a leap day, it is at 03:30 UTC, once a day."""
    calendar = guest.shell(f"systemctl show --property=TimersCalendar {TIMER}").split("OnCalendar=")[1].split(" ;")[0]
    for base in ("2027-03-12", "2027-03-26", "2027-04-02", "2027-10-02", "2027-10-29", "2027-11-05", "2028-02-27"):
        text = guest.exec(
            *("systemd-analyze", "calendar", "--iterations=5", f"--base-time={base} 12:00 UTC", calendar),
            env={"TZ": zone, "LC_ALL": "C.UTF-8"},
        ).stdout
        times = [line.split()[-3:-1] for line in text.splitlines() if line.endswith(" UTC") and "form" not in line]
        days = [dt.date.fromisoformat(base) + dt.timedelta(days=n) for n in range(1, 6)]
        assert times == [[str(day), "03:30:00"] for day in days]


@pytest.mark.parametrize("mode", [0o644, 0o640])
def test_a_password_file_that_others_can_read_is_refused(guest: Guest, mode: int) -> None:
    """libpq does not use it: the run fails with 69 and the journal says which mode the file must have."""
    with_password(guest)
    guest.exec("chmod", f"{mode:o}", "/etc/session-retention/pgpass")
    assert start(guest) == "exit-code"
    assert guest.show(SERVICE, "ExecMainStatus") == "69"
    assert guest.left() == [110, 110, 110]
    said = "".join(str(entry["MESSAGE"]) for entry in guest.journal("--unit", SERVICE))
    assert "/etc/session-retention/pgpass" in said
    assert "0600" in said
    assert PASSWORD not in said


@pytest.mark.xfail("password_exposed" not in PROGRAM.read_text(), reason="--check does not look at the mode yet")
def test_a_configuration_with_a_password_that_others_can_read_is_warned_about(guest: Guest) -> None:
    """--check names the file and what to do; one that only the job and root can read is no finding, nor is one without
    a password."""
    with_password(guest)
    for conninfo, mode, expected in (
        (f"{OVER_TCP} password='{PASSWORD}'", 0o644, 1),
        (f"{OVER_TCP} password='{PASSWORD}'", 0o640, 0),
        (f"{OVER_TCP} passfile=/etc/session-retention/pgpass", 0o644, 0),
    ):
        guest.configure(database={"conninfo": conninfo})
        guest.exec("chmod", f"{mode:o}", "/etc/session-retention/config.toml")
        said = guest.exec("session-retention", "--check", "--json").stdout
        found = [finding for finding in json.loads(said)["findings"] if finding["code"] == "password_exposed"]
        assert len(found) == expected
        assert PASSWORD not in said
