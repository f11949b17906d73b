"""The log: its line form, its journal fields, and what never appears in it."""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import uuid
import zoneinfo
from collections.abc import Iterator
from typing import Any

import pytest
from lab import (
    POLICIES,
    PROMPTLY,
    SYSTEMS,
    Database,
    Line,
    Program,
    Result,
    clean_environment,
    configuration,
    log,
    until,
)

SICR = "identity.sign_in_confirmation_requests"

#: The journal's fields of each event, beside EVENT, JOB_RUN_ID and MESSAGE_ID, and those that may be left out.
EVENTS: dict[str, tuple[str, str]] = {
    "job_started": ("CUTOFF_SICR CUTOFF_REFRESH CUTOFF_TOKENS_EXPIRED CUTOFF_TOKENS_REVOKED", ""),
    "phase_started": ("PHASE TABLE CUTOFF WALK", ""),
    "batch_deleted": ("PHASE DELETED_COUNT BATCH_SIZE DURATION_MS", ""),
    "phase_completed": (
        "PHASE DELETED_COUNT BACKLOG_REMAINING BLOCKED UNDELETABLE DURATION_MS STOP_REASON",
        "BLOCKED_BY",
    ),
    "phase_failed": (
        "PHASE ERROR DELETED_COUNT",
        "SQLSTATE BACKLOG_REMAINING BLOCKED UNDELETABLE BLOCKED_BY",
    ),
    "job_completed": (
        "SICR_DELETED REFRESH_DELETED TOKENS_EXPIRED_DELETED TOKENS_REVOKED_DELETED"
        " DURATION_MS STOP_REASON FAILED_PHASES",
        "BACKLOG_REMAINING "
        + " ".join(
            f"{policy}_{field}"
            for policy in ("SICR", "REFRESH", "TOKENS_EXPIRED", "TOKENS_REVOKED")
            for field in ("BACKLOG", "BLOCKED", "OVERDUE", "OLDEST_ROW_AGE_SECONDS", "LAST_DRAINED")
        ),
    ),
    "job_failed": ("ERROR", "SQLSTATE"),
    "job_skipped": ("NIGHT_WINDOW_UTC", ""),
}
FAILURES = {"phase_failed", "job_failed"}


def camel(field: str) -> str:
    """A journal field as the line form spells it."""
    first, *rest = field.lower().split("_")
    return first + "".join(word.title() for word in rest)


def fill(database: Database, rows: int = 1) -> None:
    """So many old requests, and one blocked and two deletable refresh sessions."""
    database.execute(
        "INSERT INTO identity.sign_in_confirmation_requests (phone_number, created_at)"
        f"    SELECT '', now() - interval '40 days' FROM generate_series(1, {rows});"
        "INSERT INTO identity.refresh_sessions (id, parent_session_id, status, updated_at) VALUES"
        "    ('00000000-0000-0000-0000-000000000001', NULL, 'Rotated', now() - interval '100 days'),"
        "    (DEFAULT, '00000000-0000-0000-0000-000000000001', 'Active', now()),"
        "    (DEFAULT, NULL, 'Expired', now() - interval '100 days'),"
        "    (DEFAULT, NULL, 'Revoked', now() - interval '100 days')"
    )


def every_event(program: Program, database: Database) -> list[Result]:
    """Four runs that between them have every event: well, with a failing phase, unreachable, outside the window."""
    now = datetime.datetime.now(datetime.UTC)
    closed = f"{(now.hour + 3) % 24:02}:00-{(now.hour + 4) % 24:02}:00"
    failing = {**POLICIES, "sicr": {**POLICIES["sicr"], "table": "missing"}}
    return [
        program(configuration(database.conninfo), "--once"),
        program(configuration(database.conninfo, failing), "--once"),
        program(configuration("host=/nonexistent"), "--once"),
        program(configuration(database.conninfo, night_window_utc=closed)),
    ]


# ── The line form ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_event_has_its_line_to_the_letter(systems: Database, program: Program) -> None:
    """Level, message and keys of every event are those that operators search for."""
    fill(systems)
    results = every_event(program, systems)
    assert [result.returncode for result in results] == [0, 1, 69, 0]
    lines = [line for result in results for line in log(result.stdout)]
    assert {line.event for line in lines} == set(EVENTS)
    for line in lines:
        required, optional = ({camel(field) for field in fields.split()} for fields in EVENTS[line.event])
        assert required | {"jobRunId"} <= set(line.fields) <= required | optional | {"jobRunId"}, line
        assert line.level == ("ERROR" if line.event in FAILURES else "INFO"), line
    assert all(result.stderr == "" for result in results[:1] + results[3:])


def test_a_run_is_told_in_order(systems: Database, program: Program) -> None:
    """Start, then each phase from its start to its end in the order of the file, then the end; one id throughout."""
    fill(systems, 25)
    lines = log(program(configuration(systems.conninfo, batch_size=10), "--once").stdout)
    told = [(line.event, line.fields.get("phase")) for line in lines]
    expected: list[tuple[str, str | None]] = [("job_started", None)]
    for policy, batches in zip(POLICIES, (3, 1, 0, 0), strict=True):
        expected.append(("phase_started", policy))
        expected += [("batch_deleted", policy)] * batches
        expected.append(("phase_completed", policy))
    assert told == [*expected, ("job_completed", None)]
    (run_id,) = {line.fields["jobRunId"] for line in lines}
    assert str(uuid.UUID(run_id)) == run_id
    assert run_id != log(program(None, "--once").stdout)[0].fields["jobRunId"]


def test_the_counts_of_a_run_are_in_its_lines(systems: Database, program: Program) -> None:
    """Numbers are bare in fields and grouped in the message, as the specifications write them."""
    fill(systems, 1234)
    result = program(configuration(systems.conninfo, batch_size=1000), "--once")
    lines = log(result.stdout)
    sicr, refresh, *_ = [line for line in lines if line.event == "phase_completed"]
    assert sicr.message == "Cleanup finished successfully. Removed rows: 1,234."
    keys = ("deletedCount", "backlogRemaining", "blocked", "undeletable", "stopReason")
    assert [sicr.fields[key] for key in keys] == ["1234", "0", "0", "0", "drained"]
    assert [refresh.fields[key] for key in keys] == ["2", "1", "1", "0", "drained"]
    batches = [line.fields for line in lines if line.event == "batch_deleted" and line.fields["phase"] == "sicr"]
    assert [(fields["deletedCount"], fields["batchSize"]) for fields in batches] == [("1000", "1000"), ("234", "1000")]
    done = lines[-1].fields
    keys = ("sicrDeleted", "refreshDeleted", "tokensExpiredDeleted", "tokensRevokedDeleted", "backlogRemaining")
    assert [done[key] for key in keys] == ["1234", "2", "0", "0", "1"]
    assert done["stopReason"] == "drained"
    assert all(line.fields["durationMs"].isdecimal() for line in lines if "durationMs" in line.fields)
    titles = [line.message for line in lines if line.event == "phase_started"]
    assert titles == [
        "Starting sicr.",
        "Starting refresh.",
        "Starting SES-009: Refresh token table cleanup.",
        "Starting tokens_revoked.",
    ]


def test_a_failed_phase_is_told_and_counted(systems: Database, program: Program) -> None:
    """The missing table is named in the phase's line; the job's line has the worst of its phases."""
    fill(systems)
    failing = {**POLICIES, "sicr": {**POLICIES["sicr"], "table": '"Missing ""Table\\"'}}
    result = program(configuration(systems.conninfo, failing), "--once")
    assert result.returncode == 1
    (failed,) = [line for line in log(result.stdout) if line.event == "phase_failed"]
    assert failed.fields["phase"] == "sicr"
    assert 'Missing ""Table\\' in failed.fields["error"]
    assert failed.fields["deletedCount"] == "0"
    assert "backlogRemaining" not in failed.fields, "nobody could count"
    done = log(result.stdout)[-1]
    assert (done.event, done.fields["stopReason"], done.fields["failedPhases"]) == ("job_completed", "failed", "1")


@pytest.mark.parametrize("table", ["plain", "with space", 'with "quote"', "back\\slash", "a=b", "zeile\numbruch", "ж"])
def test_values_are_quoted_where_they_need_it(database: Database, program: Program, table: str) -> None:
    """A line stays one line, and every value can be read back from it."""
    name = '"{}"'.format(table.replace('"', '""'))
    database.execute(f"CREATE TABLE {name} (at timestamptz)")
    database.grant(name, select="at")
    policy = {"table": name, "age_column": "at", "retention": "1d"}
    result = program.inside(configuration(database.conninfo, {"odd": policy}), "--once")
    assert result.returncode == 0, result.output
    (started,) = [line for line in log(result.stdout) if line.event == "phase_started"]
    value = started.fields["table"]
    assert value.removeprefix("public.") in (name, "plain")
    raw = re.search(r" table=(.*?) cutoff=", result.stdout)
    assert raw
    assert raw[1].startswith('"') == (re.search(r'[\s"]', value) is not None)


@pytest.mark.parametrize("zone", ["Asia/Kathmandu", "America/New_York"])
def test_a_line_has_the_time_of_the_machines_zone(systems: Database, program: Program, zone: str) -> None:
    """As every other line in the machine's log; the cut-offs in it are UTC."""
    lines = log(program(configuration(systems.conninfo), "--once", env={"TZ": zone}).stdout)
    here = datetime.datetime.now(zoneinfo.ZoneInfo(zone)).replace(tzinfo=None)
    for line in lines:
        assert abs(here - datetime.datetime.fromisoformat(line.time)) < datetime.timedelta(minutes=5)
    cutoff = datetime.datetime.fromisoformat(lines[0].fields["cutoffTokensExpired"])
    assert cutoff.utcoffset() == datetime.timedelta(0)
    assert abs(cutoff - datetime.datetime.now(datetime.UTC)) < datetime.timedelta(minutes=5)


@pytest.mark.parametrize("verb", ["--once", "--dry-run"])
def test_with_json_stdout_is_one_object_and_the_log_is_on_stderr(
    systems: Database, program: Program, verb: str
) -> None:
    """A script can read stdout whole, whatever is logged."""
    fill(systems)
    result = program(configuration(systems.conninfo), verb, "--json", "--verbose")
    assert result.json["exit_status"] == result.returncode == 0
    if verb == "--once":
        lines = log(result.stderr)
        assert {line.fields["jobRunId"] for line in lines} == {result.json["job_run_id"]}
        assert lines[-1].event == "job_completed"


def test_without_json_all_is_on_stdout(systems: Database, program: Program) -> None:
    """What cron mails, and what a container's log has, is the log."""
    fill(systems)
    result = program(configuration(systems.conninfo), "--once")
    assert (result.stderr, log(result.stdout)[-1].event) == ("", "job_completed")


@pytest.mark.parametrize("fault", ["closed pipe", "full disk", "closed"])
def test_a_log_that_cannot_be_written_does_not_stop_the_purge(systems: Database, program: Program, fault: str) -> None:
    """`| head -1`, a full disk, no stdout at all: what has expired goes, and the exit status says so."""
    fill(systems, 25)
    program.write(configuration(systems.conninfo, batch_size=10))
    command = program.command("--once")
    if fault == "closed pipe":
        reading, writing = os.pipe()
        os.close(reading)
    else:
        writing = os.open("/dev/full", os.O_WRONLY)
    if fault == "closed":
        command = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    done = subprocess.run(
        command, stdout=writing, stderr=subprocess.PIPE, env=clean_environment(), text=True, timeout=60, check=False
    )
    os.close(writing)
    assert systems.count(SICR) == 0
    assert (done.returncode, done.stderr) == (0, "")


def test_output_that_nobody_reads_does_not_hold_up_a_stop(systems: Database, program: Program) -> None:
    """A pager that was left open, and a pipe that is full: 5 s after SIGTERM the process is gone."""
    policies = {f"policy_with_quite_a_long_name_{number}": POLICIES["sicr"] for number in range(90)}
    systems.execute("DROP INDEX identity.ix_sicr_created_at")
    program.write(configuration(systems.conninfo, policies))
    readers, processes = [], []
    try:
        for verb in (["--once"], ["--once", "--json"], ["--check"]):
            reading, writing = os.pipe()
            readers.append(reading)
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
            command, env = program.command(*verb), clean_environment()
            processes.append(subprocess.Popen(command, stdout=writing, stderr=subprocess.DEVNULL, env=env, cwd="/"))
            os.close(writing)
        for process in processes:
            waiting = pathlib.Path(f"/proc/{process.pid}/wchan")
            until(lambda waiting=waiting: "pipe" in waiting.read_text(), "the pipe is full")  # type: ignore[misc]
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait(PROMPTLY)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for reading in readers:
            os.close(reading)


def test_without_stderr_stdout_is_still_one_object(systems: Database, program: Program) -> None:
    """`2>&-` loses the log, and does not put it where the result is read."""
    fill(systems)
    result = program(configuration(systems.conninfo), "--once", "--json", prefix=("sh", "-c", 'exec "$@" 2>&-', "sh"))
    assert (result.json["exit_status"], result.returncode, systems.count(SICR)) == (0, 0, 0)


def test_an_ascii_terminal_does_not_stop_the_purge(systems: Database, program: Program) -> None:
    """A title that the locale cannot print is printed somehow."""
    fill(systems)
    policies = {"sicr": {**POLICIES["sicr"], "title": "Очистка"}}
    env = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    result = program(configuration(systems.conninfo, policies), "--once", env=env)
    assert (result.returncode, systems.count(SICR)) == (0, 0), result.output


# ── journald ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Journal:
    """A real systemd-journald in a mount namespace of its own; `prefix` runs a command where its socket is."""

    SETUP = """
        mount -t tmpfs tmpfs /run/systemd && mount -t tmpfs tmpfs /run/log &&
        mkdir -p /run/systemd/journal /run/systemd/journald.conf.d &&
        printf '[Journal]\\nStorage=volatile\\nReadKMsg=no\\nAudit=no\\nRateLimitIntervalSec=0\\n' \
            > /run/systemd/journald.conf.d/tests.conf &&
        exec /lib/systemd/systemd-journald
    """

    def __init__(self) -> None:
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", self.SETUP]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
        self.prefix = ("nsenter", "--mount", "--target", str(self.process.pid))
        until(lambda: self.call("test", "-S", "/run/systemd/journal/io.systemd.journal").returncode == 0, "journald")

    def call(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*self.prefix, *command], capture_output=True, text=True, check=False, timeout=30)

    def read(self, run_id: str) -> list[dict[str, Any]]:
        """The entries of one run, in order."""
        assert self.call("journalctl", "--sync").returncode == 0
        done = self.call("journalctl", "--directory=/run/log/journal", "--output=json", "--all", f"JOB_RUN_ID={run_id}")
        return [json.loads(line) for line in done.stdout.splitlines()]

    def close(self) -> None:
        self.process.terminate()
        self.process.communicate()


@pytest.fixture(scope="module")
def journal() -> Iterator[Journal]:
    if os.geteuid() != 0:
        pytest.skip("only root can start journald")
    journal = Journal()
    yield journal
    journal.close()


class WithJournal(Program):
    """The program where journald is; its runs by their id."""

    def __init__(self, directory: pathlib.Path, journal: Journal) -> None:
        super().__init__(directory)
        self.journal = journal

    def command(self, *arguments: str) -> list[str]:
        return [*self.journal.prefix, *super().command(*arguments)]


@pytest.fixture
def journalled(tmp_path: pathlib.Path, journal: Journal) -> Iterator[WithJournal]:
    program = WithJournal(tmp_path, journal)
    yield program
    program.kill()


def own_fields(entry: dict[str, Any]) -> set[str]:
    """The fields of an entry that are the program's, not the journal's or of the journal's Python library."""
    standard = {"CODE_FILE", "CODE_LINE", "CODE_FUNC", "MESSAGE", "PRIORITY", "SYSLOG_IDENTIFIER", "SYSLOG_PID", "TID"}
    return {key for key in entry if not key.startswith("_") and key not in standard}


def test_journald_has_every_event_with_its_fields(systems: Database, journalled: WithJournal) -> None:
    """What the line form says is in the journal as fields, entry for entry, to the letter."""
    fill(systems)
    ids: dict[str, set[str]] = {}
    for result in every_event(journalled, systems):
        lines = log(result.stdout)
        entries = journalled.journal.read(lines[0].fields["jobRunId"])
        assert [entry["EVENT"] for entry in entries] == [line.event for line in lines]
        for line, entry in zip(lines, entries, strict=True):
            assert entry["MESSAGE"] == line.message
            assert entry["PRIORITY"] == ("3" if line.event in FAILURES else "6")
            assert entry["SYSLOG_IDENTIFIER"] == "session-retention"
            required, optional = (set(fields.split()) for fields in EVENTS[line.event])
            required |= {"EVENT", "JOB_RUN_ID", "MESSAGE_ID"}
            assert required <= own_fields(entry) <= required | optional, entry
            fields = {camel(key): entry[key] for key in own_fields(entry) - {"EVENT", "MESSAGE_ID"}}
            assert fields == line.fields
            ids.setdefault(line.event, set()).add(entry["MESSAGE_ID"])
    assert set(ids) == set(EVENTS)
    assert all(len(of_event) == 1 for of_event in ids.values()), "one id for an event, in every run"
    all_ids = [next(iter(of_event)) for of_event in ids.values()]
    assert len(set(all_ids)) == len(EVENTS)
    assert all(re.fullmatch("[0-9a-f]{32}", message_id) for message_id in all_ids)


@pytest.mark.parametrize("json_option", [(), ("--json",)], ids=["lines", "json"])
@pytest.mark.parametrize("is_journal", [True, False], ids=["stdout is the journal", "stdout is a pipe"])
def test_what_the_journal_has_is_not_written_to_it_twice(
    systems: Database, journalled: WithJournal, is_journal: bool, json_option: tuple[str, ...]
) -> None:
    """JOURNAL_STREAM says whether the stream that the lines would go to is the journal already."""
    fill(systems)
    journalled.write(configuration(systems.conninfo))
    reading, writing = os.pipe()
    status = os.fstat(writing)
    stream = f"{status.st_dev}:{status.st_ino if is_journal else status.st_ino + 1}"
    streams = {
        "stderr" if json_option else "stdout": writing,
        "stdout" if json_option else "stderr": subprocess.DEVNULL,
    }
    done = subprocess.run(
        journalled.command("--once", *json_option),
        env={**clean_environment(), "JOURNAL_STREAM": stream},
        timeout=60,
        check=False,
        **streams,  # type: ignore[call-overload]
    )
    os.close(writing)
    with os.fdopen(reading) as output:
        written = output.read()
    assert (done.returncode, systems.count(SICR)) == (0, 0)
    if is_journal:
        assert written == ""
    else:
        assert log(written)[-1].event == "job_completed"


def comparable(result: Result) -> tuple[int, list[Any], list[tuple[str, str]]]:
    """What a run did, without what differs from run to run."""
    policies = [{**policy, "cutoff": None} for policy in result.policies.values()]
    lines: list[Line] = log(result.stderr)
    return result.returncode, policies, [(line.event, line.message) for line in lines]


@pytest.mark.parametrize(
    "module",
    [
        "raise ImportError('no systemd here')",
        "raise OSError('libsystemd.so.0: cannot open shared object file')",
        "def send(*args, **kwargs): raise OSError(105, 'No buffer space available')",
        "def send(*args, **kwargs): raise ValueError('name is invalid')",
        "",
    ],
    ids=["not installed", "broken", "journald full", "field refused", "empty"],
)
def test_without_the_systemd_module_a_run_is_the_same(
    systems: Database, journalled: WithJournal, module: str, tmp_path: pathlib.Path
) -> None:
    """The journal is where it can be; the purge and its result do not depend on it."""
    shadow = tmp_path / "shadow" / "systemd"
    shadow.mkdir(parents=True)
    (shadow / "__init__.py").write_text("")
    (shadow / "journal.py").write_text(module)
    fill(systems)
    plain = journalled.once(configuration(systems.conninfo))
    systems.execute("TRUNCATE identity.refresh_sessions")
    fill(systems)
    without = journalled(None, "--once", "--json", env={"PYTHONPATH": str(shadow.parent)})
    assert comparable(without) == comparable(plain)
    assert plain.policies["sicr"]["deleted"] == 1
    assert journalled.journal.read(without.json["job_run_id"]) == []
    assert journalled.journal.read(plain.json["job_run_id"]) != []


def test_without_journald_a_run_is_the_same(systems: Database, program: Program, journalled: WithJournal) -> None:
    """A container has no journal socket."""
    fill(systems)
    plain = journalled.once(configuration(systems.conninfo))
    systems.execute("TRUNCATE identity.refresh_sessions")
    fill(systems)
    assert comparable(program.once(None)) == comparable(plain)


def test_a_journald_that_hangs_up_does_not_stop_the_purge(systems: Database, journalled: WithJournal) -> None:
    """A journald that has died leaves its socket behind: the run goes on, and its lines are on stdout."""
    other = Journal()
    fill(systems)
    program = WithJournal(journalled.directory, other)
    keeper = subprocess.Popen([*other.prefix, "sleep", "60"])
    name = pathlib.Path(f"/proc/{keeper.pid}/comm")
    until(lambda: name.read_text() == "sleep\n", "the keeper has entered the namespace")
    other.close()
    program.journal.prefix = ("nsenter", "--mount", "--target", str(keeper.pid))
    try:
        assert program.journal.call("test", "-e", "/run/systemd/journal/socket").returncode == 0
        result = program(configuration(systems.conninfo), "--once")
    finally:
        keeper.kill()
        keeper.wait()
    assert (result.returncode, systems.count(SICR)) == (0, 0), result.output
    assert log(result.stdout)[-1].event == "job_completed"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_journald_that_reads_nothing_does_not_hold_up_a_stop(systems: Database, program: Program) -> None:
    """Its queue is full and stays so: 5 s after SIGTERM the process is gone."""
    fill(systems, 100)
    script = (
        'mount -t tmpfs tmpfs /run/systemd && mkdir /run/systemd/journal && exec "$@"',
        """if True:
            import contextlib, socket, time
            theirs, ours = (socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2))
            ours.setblocking(False)
            theirs.bind("/run/systemd/journal/socket")
            with contextlib.suppress(BlockingIOError):
                while True:
                    ours.sendto(b"MESSAGE=full", theirs.getsockname())
            print(flush=True)
            time.sleep(600)
        """,
    )
    apart = ("unshare", "--mount", "--propagation", "private", "sh", "-c", script[0], "sh")
    with subprocess.Popen([*apart, sys.executable, "-c", script[1]], stdout=subprocess.PIPE) as keeper:
        assert keeper.stdout
        try:
            keeper.stdout.readline()
            prefix = ("nsenter", "--mount", "--target", str(keeper.pid))
            config = configuration(systems.conninfo, {"sicr": POLICIES["sicr"]}, batch_size=1)
            process = program.start(config, "--once", "--json", prefix=prefix)
            connected = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'session-retention'"
            until(lambda: systems.value(f"{connected} AND datname = current_database()"), "it has something to tell")
            process.send_signal(signal.SIGTERM)
            program.finish(process, PROMPTLY)
        finally:
            keeper.kill()


# ── What never appears ────────────────────────────────────────────────────────────────────────────────────────────────

PHONE, AGENT, ADDRESS = "+79261234567", "Canary/1.0 (канарейка) function canary(", "203.0.113.77"
CANARIES = (PHONE, PHONE[1:], AGENT, "Canary", "canary", "канарейка", ADDRESS)

#: PL/pgSQL for each row before it is deleted: the ways in which a server quotes a row, and whether its row can go.
QUOTES: dict[str, str] = {
    "raise": "RAISE EXCEPTION 'cannot delete %', OLD USING DETAIL = OLD.phone_number, HINT = OLD.user_agent",
    "raise 22": "RAISE SQLSTATE '22000' USING MESSAGE = OLD.phone_number, DETAIL = OLD.user_agent",
    "raise 23": "RAISE SQLSTATE '23514' USING MESSAGE = OLD.phone_number, DETAIL = OLD.user_agent",
    "raise foreign key": "RAISE SQLSTATE '23503' USING MESSAGE = OLD.phone_number, DETAIL = OLD.user_agent",
    "raise unknown": "RAISE SQLSTATE 'PII01' USING MESSAGE = OLD.phone_number, DETAIL = OLD.user_agent",
    "raise 42": "RAISE SQLSTATE '42501' USING MESSAGE = 'not ' || OLD.phone_number, HINT = OLD.user_agent",
    "raise 40": "RAISE SQLSTATE '40001' USING MESSAGE = 'not ' || OLD.phone_number, HINT = OLD.user_agent",
    "raise 55": "RAISE SQLSTATE '55000' USING MESSAGE = 'not ' || OLD.phone_number, HINT = OLD.user_agent",
    "raise 57": "RAISE SQLSTATE '57014' USING MESSAGE = 'not ' || OLD.phone_number, HINT = OLD.user_agent",
    "raise 08": "RAISE SQLSTATE '08006' USING MESSAGE = 'not ' || OLD.phone_number, HINT = OLD.user_agent",
    "raise names": "RAISE SQLSTATE '23514' USING TABLE = OLD.phone_number, CONSTRAINT = OLD.user_agent",
    "raise type": "RAISE SQLSTATE '22P02' USING SCHEMA = OLD.phone_number, COLUMN = OLD.user_agent, DATATYPE = 'x'",
    "dynamic call": "EXECUTE format('DO $$ BEGIN PERFORM 1/0; /* function %s( */ END $$', OLD.user_agent)",
    "notice": "RAISE WARNING 'deleting %', OLD",
    "unique": "INSERT INTO archive VALUES (OLD.phone_number, OLD.user_agent)",
    "check": "INSERT INTO checked VALUES (OLD.phone_number, OLD.user_agent)",
    "cast": "PERFORM OLD.user_agent::integer",
    "cast inet": "PERFORM (OLD.phone_number)::inet",
    "dynamic statement": "EXECUTE format('SELECT %L::integer, %L', OLD.user_agent, OLD.phone_number)",
    "dynamic syntax": "EXECUTE 'SELECT ' || OLD.phone_number || OLD.user_agent",
    "dynamic name": "EXECUTE format('SELECT FROM %I', OLD.user_agent)",
    "dynamic function": "EXECUTE format('SELECT %I(1)', OLD.phone_number)",
    "foreign key": "INSERT INTO referring VALUES (OLD.phone_number)",
    "assertion": "ASSERT false, OLD.user_agent",
}


@pytest.fixture(scope="module")
def canaries(new_database: Any) -> Database:
    """The three systems with one canary in the first, and tables that a trigger can offend."""
    database: Database = new_database()
    database.execute(
        SYSTEMS.read_text()
        + "CREATE TABLE archive (phone_number text UNIQUE, user_agent text);"
        + f"INSERT INTO archive VALUES ('{PHONE}', '{AGENT}');"
        + "CREATE TABLE checked (phone_number text CHECK (phone_number = ''), user_agent text);"
        + "CREATE TABLE known (phone_number text PRIMARY KEY);"
        + "CREATE TABLE referring (phone_number text REFERENCES known);"
        + "CREATE FUNCTION quote() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN OLD; END';"
        + f"CREATE TRIGGER quote BEFORE DELETE ON {SICR} FOR EACH ROW EXECUTE FUNCTION quote()"
    )
    return database


def assert_silent(program: WithJournal, outputs: list[str], secrets: tuple[str, ...]) -> None:
    """None of these is in what was printed, in the journal, or in the files that were left."""
    places = {str(path): path.read_text() for path in program.directory.rglob("*") if path != program.path}
    places |= {f"output {number}": output for number, output in enumerate(outputs)}
    run_ids = set(re.findall(r"\bjob_?[rR]un_?[iI]d\W{1,4}([0-9a-f-]{36})", "".join(outputs)))
    assert run_ids
    places["journal"] = json.dumps([program.journal.read(run_id) for run_id in run_ids], ensure_ascii=False)
    escaped = {secret.encode("ascii", "backslashreplace").decode() for secret in secrets} | set(secrets)
    found = [(place, secret) for place, text in places.items() for secret in escaped if secret in text]
    assert found == []


@pytest.mark.parametrize("quote", QUOTES)
def test_no_value_of_a_row_is_ever_told(canaries: Database, journalled: WithJournal, quote: str) -> None:
    """However a server's error quotes a row, the log, the result and the state have the code and names alone."""
    canaries.execute(f"TRUNCATE {SICR}")
    canaries.execute(
        f"INSERT INTO {SICR} (phone_number, user_agent, ip_address, created_at)"
        f"    VALUES (%s, %s, '{ADDRESS}', now() - interval '40 days')",
        PHONE,
        AGENT,
    )
    body = f"BEGIN {QUOTES[quote]}; RETURN OLD; END"
    canaries.execute(
        "CREATE OR REPLACE FUNCTION quote() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER"
        f" SET search_path = public AS $body$ {body} $body$"
    )
    policies = {"sicr": POLICIES["sicr"]}
    config = configuration(canaries.conninfo, policies, database={"connect_timeout": "2s"}, max_run_duration="5s")
    result = journalled(config, "--once", "--json", "--verbose")
    assert "Traceback" not in result.output
    assert log(result.stderr)[-1].event == "job_completed"
    assert_silent(journalled, [result.output], CANARIES)
    if quote not in ("notice", "raise foreign key", "foreign key"):  # these end well, or mean that the row is blocked
        assert result.returncode == 1
        error = result.policies["sicr"]["error"]
        assert re.fullmatch("[0-9A-Z]{5}", error["sqlstate"])
        assert error["message"]


def test_what_is_named_instead_of_a_row(canaries: Database, journalled: WithJournal) -> None:
    """Code, table, constraint and function are enough to find the trigger that objects."""
    canaries.execute(f"TRUNCATE {SICR}")
    canaries.execute(f"INSERT INTO {SICR} (phone_number, created_at) VALUES (%s, '2000-01-01')", PHONE)
    canaries.execute(
        "CREATE OR REPLACE FUNCTION quote() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = public"
        f" AS $body$ BEGIN {QUOTES['unique']}; RETURN OLD; END $body$"
    )
    error = journalled.once(configuration(canaries.conninfo, {"sicr": POLICIES["sicr"]})).policies["sicr"]["error"]
    assert error["sqlstate"] == "23505"
    assert all(name in error["message"] for name in ("archive", "archive_phone_number_key", "quote"))


def test_a_foreign_key_of_personal_data_is_not_told(database: Database, journalled: WithJournal) -> None:
    """A row that is referred to by its phone number is blocked; the constraint is named, the number is not."""
    database.execute(
        "CREATE TABLE requests (phone text PRIMARY KEY, at timestamptz);"
        f"INSERT INTO requests VALUES ('{PHONE}', '2000-01-01');"
        "CREATE TABLE holds (phone text CONSTRAINT legal_hold REFERENCES requests);"
        f"INSERT INTO holds VALUES ('{PHONE}')"
    )
    database.grant("requests", select="at", update="at")
    config = configuration(
        database.conninfo, {"requests": {"table": "requests", "age_column": "at", "retention": "1d"}}
    )
    lines, result = journalled(config, "--once", "--verbose"), journalled(None, "--once", "--json", "--verbose")
    assert (lines.returncode, result.policies["requests"]["blocked"]) == (0, 1), lines.output
    assert "legal_hold" in lines.output
    assert_silent(journalled, [lines.output, result.output], CANARIES)


PASSWORD = "kanari-geheim-4711"


@pytest.fixture(scope="module")
def locked(new_database: Any) -> Iterator[Database]:
    """A database that wants a password of everybody but the superuser."""
    database: Database = new_database()
    hba = database.server.data / "pg_hba.conf"
    before = hba.read_text()
    hba.write_text(f"local {database.name} locked scram-sha-256\n{before}")
    database.execute(f"CREATE ROLE locked LOGIN PASSWORD '{PASSWORD}'; SELECT pg_reload_conf()")
    yield database
    hba.write_text(before)
    database.execute("DROP ROLE locked; SELECT pg_reload_conf()")


@pytest.mark.parametrize(
    ("conninfo", "env"),
    [
        ("host=/nonexistent user=locked password={}", {}),
        ("host=nowhere.invalid user=locked password={}", {}),
        ("host=/nonexistent,nowhere.invalid user=locked password={}", {}),
        ("postgresql://locked:{}@nowhere.invalid/auth", {}),
        ("postgresql://locked:x@{}@nowhere.invalid/auth", {}),
        ("postgresql://locked:x/{}@nowhere.invalid/auth", {}),
        ("postgresql://locked:x:{}@localhost:1/auth", {}),
        ("postgresql://localhost:1/auth?user=locked&password={}", {}),
        ("host=/nonexistent user=locked", {"PGPASSWORD": PASSWORD}),
        ("host=/nonexistent user=locked sslpassword={}", {}),
        ("{server} user=locked password=wrong-{}", {}),
        ("{server} user=locked", {"PGPASSWORD": f"wrong-{PASSWORD}"}),
        ("{server} user=locked password={}", {}),
    ],
)
def test_no_password_is_ever_told(
    locked: Database, journalled: WithJournal, conninfo: str, env: dict[str, str]
) -> None:
    """Wrong hosts, refused logins and good ones: whatever fails after that, the password is not in it."""
    server = f"host={locked.server.directory} dbname={locked.name}"
    config = configuration(
        conninfo.replace("{server}", server).replace("{}", PASSWORD),
        {"sicr": POLICIES["sicr"]},
        database={"connect_timeout": "2s"},
    )
    results = [journalled(config, verb, "--json", "--verbose", env=env) for verb in ("--once", "--dry-run")]
    assert {result.returncode for result in results} <= {1, 69, 78}, "the table is missing, at the best"
    assert "Traceback" not in "".join(result.output for result in results)
    assert_silent(journalled, [result.output for result in results], (PASSWORD,))
