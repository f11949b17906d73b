"""What is kept from run to run: counters through every loss of a file, what counts as a success, and what is left."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from typing import Any

import metrics
import pytest
from lab import POLICIES, SYSTEMS, TOP, Database, Program, Result, configuration, faketime, log, until
from statements import log_statements, statements

SICR = "identity.sign_in_confirmation_requests"
SESSIONS = "identity.refresh_sessions"
TWO = {"sicr": POLICIES["sicr"], "refresh": POLICIES["refresh"]}
DAY = 86400.0
#: Root, but for its right to read and write what is another's.
POWERLESS = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
ONCE = ("--once", "--json")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away, and mount")


def fill(database: Database, rows: int) -> None:
    database.execute(
        f"INSERT INTO {SICR} (phone_number, created_at)"
        f" SELECT '', now() - interval '40 days' - i * interval '1 second' FROM generate_series(1, {rows}) i"
    )


class Files:
    """The program's files, in two directories."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.kept, self.shown = directory / "kept", directory / "shown"
        for made in (self.kept, self.shown):
            made.mkdir()

    @property
    def state(self) -> pathlib.Path:
        return self.kept / "state.toml"

    @property
    def history(self) -> pathlib.Path:
        return self.kept / "history.jsonl"

    @property
    def textfile(self) -> pathlib.Path:
        return self.shown / "metrics.prom"

    def configuration(self, conninfo: str, policies: Any = TWO, **run: Any) -> dict[str, Any]:
        paths = {"state": str(self.state), "textfile": str(self.textfile)}
        return configuration(conninfo, policies, metrics=paths, **run)

    def read_state(self) -> dict[str, Any]:
        return tomllib.loads(self.state.read_text())

    def series(self) -> metrics.Series:
        return metrics.read(self.textfile)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.history.read_text().splitlines()]

    def contents(self) -> dict[str, tuple[bytes, int, int]]:
        """Every file there is, with what tells that it was written anew."""
        paths = [*self.kept.iterdir(), *self.shown.iterdir()]
        return {path.name: (path.read_bytes(), path.stat().st_ino, path.stat().st_mtime_ns) for path in paths}


@pytest.fixture(scope="module")
def one_for_all(new_database: Callable[[], Database]) -> Database:
    database = new_database()
    database.execute(SYSTEMS.read_text())
    return database


@pytest.fixture
def systems(one_for_all: Database) -> Database:
    """The three systems, empty, in one database for all of these tests."""
    one_for_all.execute(f"TRUNCATE {SICR}, {SESSIONS}, refresh_tokens")
    return one_for_all


@pytest.fixture
def files(tmp_path: pathlib.Path) -> Files:
    return Files(tmp_path)


def twentyfold() -> dict[str, str]:
    """The environment in which a program's clocks run twenty times as fast."""
    return {**faketime(0), "FAKETIME": "+0 x20", "FAKETIME_DONT_FAKE_MONOTONIC": "0"}


def said(result: Result) -> dict[str, str]:
    """What could not be read or written, and the reason."""
    return {line.message: line.fields["error"] for line in log(result.stderr) if line.event == "record_failed"}


# ── Files that are lost, damaged or cannot be written ─────────────────────────────────────────────────────────────────


def lost(path: pathlib.Path) -> None:
    path.unlink()


def damaged(path: pathlib.Path) -> None:
    path.write_bytes(b"\xff[policy")


def of_another_type(path: pathlib.Path) -> None:
    path.write_text('[job]\nlast_success = "yesterday"\n')


def given_away(path: pathlib.Path) -> None:
    """Nobody else's to write any more, nor is its directory."""
    os.chown(path.parent, 65534, 65534)


def hidden(path: pathlib.Path) -> None:
    os.chown(path, 65534, 65534)
    path.chmod(0o600)
    given_away(path)


NOT_WRITTEN = {"state not written", "history not written"}
LOSSES: dict[str, tuple[Callable[[pathlib.Path], None], set[str], set[str]]] = {
    "lost": (lost, {"state not read"}, set()),
    "damaged": (damaged, {"state not read"}, set()),
    "of another type": (of_another_type, {"state not read"}, set()),
    "in a directory of another's": (given_away, NOT_WRITTEN, NOT_WRITTEN),
    "unreadable": (hidden, {"state not read", *NOT_WRITTEN}, {"state not read", *NOT_WRITTEN}),
}


@needs_root
@pytest.mark.parametrize("loss", LOSSES)
def test_without_the_state_the_counters_come_from_the_metrics_file(
    loss: str, systems: Database, program: Program, files: Files
) -> None:
    """The purge goes on and says so; nothing that was reported is taken back, and what is reported is of this run."""
    damage, *failures = LOSSES[loss]
    # the policy whose phase is not the last is the one that would be forgotten
    config = files.configuration(systems.conninfo, {"refresh": TWO["refresh"], "sicr": TWO["sicr"]})
    fill(systems, 1000)
    assert program.inside(config, "--once").returncode == 0
    before = files.series()
    damage(files.state)
    systems.execute(
        f"INSERT INTO {SESSIONS} (id, parent_session_id, status, updated_at) VALUES"
        " ('00000000-0000-0000-0000-000000000001', NULL, 'Rotated', now() - interval '100 days'),"
        " (DEFAULT, '00000000-0000-0000-0000-000000000001', 'Active', now())"
    )
    for run, expected in enumerate(failures, 2):
        fill(systems, 1000)
        if expected >= NOT_WRITTEN:  # a run so long that it saves on the way
            program.write({**config, "run": {**config["run"], "batch_size": 100, "pause": "1s"}})
            result = program(None, *ONCE, prefix=POWERLESS, env=twentyfold())
        else:
            result = program.inside(None, *ONCE)
        assert (result.returncode, systems.count(SICR)) == (0, 0), result.output
        assert said(result).keys() == expected
        series = files.series()
        assert (series["sicr_deleted_total"][()], series["run_duration_ms_count"][()]) == (run * 1000, run)
        assert series["backlog"] == series["blocked"] == {("refresh", SESSIONS): 1, ("sicr", SICR): 0}
        assert series["interval_seconds"] == {(): DAY}
        for name in ("last_success_timestamp_seconds", "last_drained_timestamp_seconds"):
            assert series[name].keys() == before[name].keys()
            assert all(series[name][key] > before[name][key] for key in before[name]), name


def test_what_the_metrics_file_told_last_is_kept_when_the_state_is_lost(
    systems: Database, program: Program, files: Files
) -> None:
    """A run that fails in the night when the state was lost: the last success, and when each policy drained, stay."""
    fill(systems, 10)
    assert program.inside(files.configuration(systems.conninfo), "--once").returncode == 0
    before = files.series()
    files.state.unlink()
    unreachable = files.configuration("host=/nonexistent")
    assert program.inside(unreachable, "--once").returncode == 69
    after = files.series()
    for name in ("sicr_deleted_total", "last_success_timestamp_seconds", "last_drained_timestamp_seconds"):
        assert {key: pytest.approx(value) for key, value in after[name].items()} == before[name], name
    assert after["errors_total"][("",)] == 1


@needs_root
def test_metrics_that_cannot_be_written_are_caught_up_with(systems: Database, program: Program, files: Files) -> None:
    """The purge goes on and says so; the state has the counts, and the file when it can be written again."""
    os.chown(files.shown, 65534, 65534)
    fill(systems, 1000)
    result = program(files.configuration(systems.conninfo), *ONCE, prefix=POWERLESS)
    assert (result.returncode, systems.count(SICR)) == (0, 0), result.output
    assert said(result).keys() == {"metrics not written"}
    assert str(files.textfile) in said(result)["metrics not written"]
    assert [*files.shown.iterdir()] == []
    assert files.read_state()["policy"]["sicr"]["deleted"] == 1000
    os.chown(files.shown, 0, 0)
    fill(systems, 1000)
    assert said(program.inside(None, *ONCE)) == {}
    assert files.series()["sicr_deleted_total"][()] == 2000


@pytest.mark.parametrize("without", ["state", "textfile", "both"])
def test_either_file_can_be_done_without(without: str, systems: Database, program: Program, files: Files) -> None:
    """An empty path is none: nothing is written there, nothing said, and the other goes on counting by itself."""
    config = files.configuration(systems.conninfo)
    config["metrics"] |= dict.fromkeys(["state", "textfile"] if without == "both" else [without], "")
    for run in (1, 2):
        fill(systems, 10)
        result = program.inside(config, *ONCE)
        assert (result.returncode, result.policies["sicr"]["deleted"], said(result)) == (0, 10, {})
        if without == "state":
            series = files.series()
            assert (series["sicr_deleted_total"], series["run_duration_ms_count"]) == ({(): run * 10}, {(): run})
            assert [*series["backlog"].values()] == [0, 0]
            assert series["interval_seconds"] == {(): DAY}
        elif without == "textfile":
            assert files.read_state()["policy"]["sicr"]["deleted"] == run * 10
    names = {"state": {"metrics.prom"}, "textfile": {"state.toml", "history.jsonl"}, "both": set[str]()}
    assert files.contents().keys() == names[without]
    if without == "state":  # a night with a mistake in the configuration loses nothing either
        assert program.inside({**config, "run": {"batch_size": 0}}, "--once").returncode == 78
        series = files.series()
        assert (series["sicr_deleted_total"], series["errors_total"][("",)]) == ({(): 20}, 1)


class SmallDisk:
    """A disk of 256 KB over a directory, in a mount namespace of its own; `prefix` runs a command where it is."""

    def __init__(self, directory: pathlib.Path) -> None:
        mount = (
            'mount -t tmpfs -o size=256k,mode=755 tmpfs "$1" && mkdir "$1/kept" "$1/shown" && echo && exec sleep 999'
        )
        command = ["unshare", "--mount", "--propagation=private", "sh", "-c", mount, "sh", str(directory)]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout
        assert self.process.stdout.readline() == "\n"
        self.prefix = ("nsenter", "--mount", "--target", str(self.process.pid))
        self.root = pathlib.Path(f"/proc/{self.process.pid}/root{directory}")

    def fill(self) -> None:
        with contextlib.suppress(OSError), (self.root / "ballast").open("wb", buffering=0) as stream:
            while True:
                stream.write(bytes(4096))

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def small_disk(tmp_path: pathlib.Path) -> Iterator[SmallDisk]:
    (tmp_path / "disk").mkdir()
    disk = SmallDisk(tmp_path / "disk")
    yield disk
    disk.close()


@needs_root
def test_a_full_disk_is_said_and_survived(
    systems: Database, program: Program, small_disk: SmallDisk, tmp_path: pathlib.Path
) -> None:
    """What has expired goes; the old files stay whole, no half one is left, and the next run counts on."""
    paths = {"state": str(tmp_path / "disk/kept/state.toml"), "textfile": str(tmp_path / "disk/shown/metrics.prom")}
    config = configuration(systems.conninfo, TWO, metrics=paths)

    def contents() -> dict[str, bytes]:
        found = [*small_disk.root.glob("*/*"), *small_disk.root.glob("*/.*")]
        return {path.name: path.read_bytes() for path in found}

    program.write(config)
    told, seen = [], []
    for full in (False, True, False):
        fill(systems, 1000)
        if full:
            small_disk.fill()
        else:
            (small_disk.root / "ballast").unlink(missing_ok=True)
        result = program(None, *ONCE, prefix=small_disk.prefix)
        assert (result.returncode, systems.count(SICR), result.policies["sicr"]["deleted"]) == (0, 0, 1000)
        told.append(said(result))
        seen.append(contents())
    assert [set(failures) for failures in told] == [
        set(),
        {"state not written", "metrics not written", "history not written"},
        set(),
    ]
    assert all("No space left on device" in why for why in told[1].values())
    assert seen[0].keys() == {"state.toml", "history.jsonl", "metrics.prom"}
    assert seen[1] == seen[0]
    assert metrics.parse(seen[2]["metrics.prom"].decode())["sicr_deleted_total"][()] >= 2000
    assert len(seen[2]["history.jsonl"].splitlines()) >= 2


def link(path: pathlib.Path) -> None:
    path.symlink_to("elsewhere")


def device(path: pathlib.Path) -> None:
    path.symlink_to("/dev/null")


def pipe(path: pathlib.Path) -> None:
    os.mkfifo(path)


def directory(path: pathlib.Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("make", [link, device, pipe, directory], ids=lambda make: make.__name__)
@pytest.mark.parametrize("which", ["state", "textfile", "history"])
def test_what_is_no_file_in_a_files_place_stops_no_run(
    which: str, make: Callable[[pathlib.Path], None], systems: Database, program: Program, files: Files
) -> None:
    """A link to a file serves as one; whatever else is there stays as it is, and that it does not serve is said."""
    path: pathlib.Path = getattr(files, which)
    make(path)
    before = path.lstat()
    fill(systems, 1)
    config = files.configuration(systems.conninfo)
    # one may wait for a pipe for ever
    result = program(config, *ONCE, timeout=20) if make is pipe else program.inside(config, *ONCE)
    assert (result.returncode, systems.count(SICR)) == (0, 0), result.output
    assert (path.lstat().st_ino, path.lstat().st_mode) == (before.st_ino, before.st_mode)
    if make is link:
        assert (said(result), path.with_name("elsewhere").stat().st_mode & 0o777) == ({}, 0o644)
        assert path.read_text()
    else:
        assert any(str(path) in why for why in said(result).values()), result.stderr
    assert not [*files.kept.glob(".new-*"), *files.shown.glob(".new-*")]


def test_who_sits_on_the_lock_delays_a_run_by_two_seconds_at_most(
    systems: Database, program: Program, files: Files
) -> None:
    """A stopped process that holds the lock on the directory: the run goes on without it, and its counts are kept."""
    config = files.configuration(systems.conninfo)
    fill(systems, 10)
    assert program.inside(config, "--once").returncode == 0
    holder = subprocess.Popen(
        ["flock", str(files.kept), "sh", "-c", "echo; exec sleep 999"], stdout=subprocess.PIPE, process_group=0
    )
    try:
        assert holder.stdout
        holder.stdout.readline()
        os.killpg(holder.pid, signal.SIGSTOP)
        fill(systems, 10)
        result = program.inside(None, *ONCE)
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
        holder.communicate()
    duration = files.series()["run_duration_ms_sum"][()]
    assert (result.returncode, said(result)) == (0, {}), result.output
    assert files.series()["sicr_deleted_total"][()] == 20
    assert duration < 2000 + 2 * 1500, "two runs, and a second each for a loaded machine"


# ── The history ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_history_keeps_the_last_400_runs(systems: Database, program: Program, files: Files) -> None:
    """The oldest go; a damaged line is a line like others, and goes in its turn."""
    config = files.configuration(systems.conninfo)
    assert program.inside(config, "--once").returncode == 0
    (line,) = files.lines()
    earlier = [json.dumps({**line, "job_run_id": f"run {number}"}) for number in range(450)]
    earlier[300] = '{"job_run_id": "half a li'
    files.history.write_bytes("\n".join(earlier).encode() + b"\n\xff\x00\n")
    assert program.inside(None, *ONCE).returncode == 0
    kept = files.history.read_bytes().splitlines()
    assert len(kept) == 400
    assert kept[:-2] == [text.encode() for text in earlier[-398:]]
    assert kept[-2] == b"\xff\x00"
    assert json.loads(kept[-1])["job_run_id"] == files.read_state()["job"]["job_run_id"]


@needs_root
def test_a_history_that_cannot_be_read_is_left_alone(systems: Database, program: Program, files: Files) -> None:
    """It is said that the run is not in it; nobody throws away what somebody may still read."""
    config = files.configuration(systems.conninfo)
    assert program.inside(config, "--once").returncode == 0
    os.chown(files.history, 65534, 65534)
    files.history.chmod(0o600)
    before = files.contents()["history.jsonl"]
    result = program(None, *ONCE, prefix=POWERLESS)
    assert (result.returncode, set(said(result))) == (0, {"history not written"}), result.output
    assert files.contents()["history.jsonl"] == before


# ── Success ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def closed_window() -> str:
    """A night window that is not now."""
    hour = datetime.datetime.now(datetime.UTC).hour
    return f"{(hour + 3) % 24:02}:00-{(hour + 4) % 24:02}:00"


def last_success(files: Files, program: Program) -> float:
    """When it was, of which metrics, state and status say the same."""
    status = program.inside(None, "--status", "--json").json
    told = datetime.datetime.fromisoformat(status["last_success"])
    assert files.read_state()["job"]["last_success"] == told
    assert files.series()["last_success_timestamp_seconds"][()] == pytest.approx(told.timestamp(), abs=1e-3)
    return told.timestamp()


def test_the_first_success_comes_with_its_time(systems: Database, program: Program, files: Files) -> None:
    """When it ended, by this machine's clock; also of a run that its budget ended, in the middle of its work."""
    fill(systems, 30)
    before = time.time()
    config = files.configuration(systems.conninfo, batch_size=10, max_run_duration="1ms")
    result = program.inside(config, *ONCE)
    assert (result.returncode, result.json["stop_reason"]) == (0, "budget")
    first = last_success(files, program)
    assert before <= first <= time.time()
    assert files.series()["backlog"][("sicr", SICR)] == 20
    assert ("sicr", SICR) not in files.series()["last_drained_timestamp_seconds"]
    result = program.inside(files.configuration(systems.conninfo), *ONCE)
    assert last_success(files, program) > first
    drained = datetime.datetime.fromisoformat(result.json["now"]).timestamp()
    assert [*files.series()["last_drained_timestamp_seconds"].values()] == [pytest.approx(drained, abs=1e-3)] * 2


def failed(program: Program, files: Files, systems: Database) -> str:
    """A policy whose column is not there; the others run."""
    wrong = {**TWO, "refresh": {**TWO["refresh"], "age_column": "missing"}}
    result = program.inside(files.configuration(systems.conninfo, wrong), *ONCE)
    assert result.returncode == 1
    lines = {line.event: line for line in log(result.stderr)}
    message = result.policies["refresh"]["error"]["message"]
    assert (lines["phase_failed"].fields["phase"], lines["phase_failed"].fields["error"]) == ("refresh", message)
    assert lines["job_completed"].fields["failedPhases"] == "1"
    assert files.series()["errors_total"] == {("",): 0, ("sicr",): 0, ("refresh",): 1}
    kept = files.read_state()["policy"]
    assert (kept["refresh"]["errors"], kept["refresh"]["error"], kept["sicr"]["errors"]) == (1, message, 0)
    assert "error" not in kept["sicr"]
    told = program.inside(None, "--status", "--json").json
    assert told["policies"]["refresh"]["error"]["message"] == message
    assert (told["policies"]["sicr"]["error"], told["last_run"]["exit_status"]) == (None, 1)
    assert "refresh" in program.inside(None, "--status").stdout
    assert files.lines()[-1]["policies"]["refresh"]["error"]["message"] == message
    return "failed"


def unreachable(program: Program, files: Files, _systems: Database) -> str:
    assert program.inside(files.configuration("host=/nonexistent"), "--once").returncode == 69
    assert files.series()["errors_total"] == {("",): 1, ("sicr",): 0, ("refresh",): 0}
    return "failed"


def misconfigured(program: Program, files: Files, systems: Database) -> str:
    config = files.configuration(systems.conninfo, retention_interval="1 day")
    assert program.inside(config, "--once").returncode == 78
    assert files.series()["errors_total"] == {("",): 1, ("sicr",): 0, ("refresh",): 0}
    program.write(files.configuration(systems.conninfo))
    return "failed"


def partial(program: Program, files: Files, systems: Database) -> str:
    assert program.inside(files.configuration(systems.conninfo), "--once", "--policy", "sicr").returncode == 0
    return "drained"


def skipped(program: Program, files: Files, systems: Database) -> str:
    assert program.inside(files.configuration(systems.conninfo, night_window_utc=closed_window())).returncode == 0
    assert files.read_state()["job"]["skipped"] == 1
    return ""


def stopped(program: Program, files: Files, systems: Database) -> str:
    fill(systems, 20)
    config = files.configuration(systems.conninfo, batch_size=10, pause="1h", max_run_duration="2h")
    process = program.start(config, *ONCE)
    until(lambda: systems.count(SICR) == 10, "a batch")
    process.send_signal(signal.SIGTERM)
    result = program.finish(process)
    assert (result.returncode, result.json["stop_reason"]) == (0, "signal"), result.output
    assert files.series()["backlog"][("sicr", SICR)] == 10
    return "signal"


@pytest.mark.parametrize(
    "run", [failed, unreachable, misconfigured, partial, skipped, stopped], ids=lambda run: run.__name__
)
def test_what_is_no_success_leaves_the_last_one_as_it_was(
    run: Callable[[Program, Files, Database], str], systems: Database, program: Program, files: Files
) -> None:
    """Failed, of some policies only, outside the window, stopped by a signal: none is a night's work."""
    assert program.inside(files.configuration(systems.conninfo), "--once").returncode == 0
    success, ended = last_success(files, program), files.series()["last_run_timestamp_seconds"][()]
    reason = run(program, files, systems)
    assert last_success(files, program) == success
    assert (files.series()["last_run_timestamp_seconds"][()] > ended) == bool(reason)
    if reason:
        assert (files.lines()[-1]["stop_reason"], files.lines()[-1]["success"]) == (reason, False)


def test_who_only_asks_writes_nothing(systems: Database, program: Program, files: Files) -> None:
    """A dry run, a check and a status leave every file as it is, and make none, whatever they find."""
    config = files.configuration(systems.conninfo)
    fill(systems, 10)
    for _ in range(2):
        before = files.contents()
        for asked in (["--dry-run"], ["--dry-run", "--json"], ["--check"], ["--status"], ["--print-config"]):
            program.inside(config, *asked)
        program.inside({**config, "run": {"batch_size": 0}}, "--dry-run")
        program.inside(files.configuration("host=/nonexistent"), "--dry-run")
        assert files.contents() == before
        assert program.inside(config, "--once").returncode == 0
        assert files.contents().keys() == {"state.toml", "history.jsonl", "metrics.prom"}


# ── What is left ──────────────────────────────────────────────────────────────────────────────────────────────────────

KEEP, INTERVAL = 60 * DAY, 30 * DAY
CHAINS = """
    DROP TABLE IF EXISTS holds, chains;
    CREATE TABLE chains (id int PRIMARY KEY, parent int REFERENCES chains, status text, at {kind});
    CREATE INDEX ON chains (parent);
    CREATE TABLE holds (held int CONSTRAINT legal_hold REFERENCES chains);
    CREATE INDEX ON holds (held);
    CREATE OR REPLACE FUNCTION keep_it() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN IF OLD.id % 7 = 3 THEN RAISE 'no'; END IF; RETURN OLD; END $$;
    GRANT SELECT (ctid, id, parent, status, at), UPDATE (id), DELETE ON chains TO retention
"""
FINISHED = {"table": "chains", "age_column": "at", "retention": "60d", "only": {"status": ["done", "over"]}}


def mix(database: Database, draw: random.Random, kind: str, *, indexed: bool, readable: bool, guarded: bool) -> None:
    """A random forest of rows old and young, finished and live, some held by another table, some by a trigger."""
    database.execute(CHAINS.replace("{kind}", kind))
    count = draw.randrange(20, 60)
    rows = []
    for number in range(count):
        parent = draw.choice([None, None, number - 1, draw.randrange(number)]) if number else None
        age = draw.choice([None, "infinity", *(f"{draw.uniform(0, 200):.6f} days" for _ in range(8))])
        rows.append((number, parent, draw.choice(["done", "over", "done", "over", "live"]), age))
    database.execute(
        "INSERT INTO chains SELECT id, parent, status, CASE age WHEN 'infinity' THEN '-infinity' ELSE"
        f" now() AT TIME ZONE 'UTC' - nullif(age, 'infinity')::interval END::{kind}"
        " FROM unnest(%s::int[], %s::int[], %s::text[], %s::text[]) r (id, parent, status, age)",
        *map(list, zip(*rows, strict=True)),
    )
    database.execute("INSERT INTO holds SELECT unnest(%s::int[])", draw.sample(range(count), count // 10))
    if indexed:
        database.execute("CREATE INDEX ON chains (at)")
    if readable:
        database.execute("GRANT SELECT (held) ON holds TO retention")
    if guarded:
        database.execute("CREATE TRIGGER keeper BEFORE DELETE ON chains FOR EACH ROW EXECUTE FUNCTION keep_it()")


def expected(database: Database, now: datetime.datetime, *, readable: bool, guarded: bool) -> dict[str, Any]:
    """What is left of the finished rows, by plain queries and the slow way."""
    date = database.value(
        "SELECT atttypid = 'date'::regtype FROM pg_attribute WHERE attname = 'at' AND attrelid = 'chains'::regclass"
    )
    rows = database.execute(
        f"SELECT id, parent, status, extract(epoch FROM at{' + 1' if date else ''})::float8 FROM chains"
    )
    cutoff = now.timestamp() - KEEP
    ages = {key: at for key, _, status, at in rows if status in ("done", "over") and at is not None and at < cutoff}
    refused = {key for key in ages if guarded and key % 7 == 3}
    blocked = {held for (held,) in database.execute("SELECT held FROM holds")} & ages.keys()
    blocked -= set() if readable else refused  # which of the two it is only the first refusal tells
    while True:
        stays = ({row[0] for row in rows} - ages.keys()) | blocked | refused
        more = {parent for key, parent, *_ in rows if key in stays} & ages.keys()
        if more <= blocked:
            break
        blocked |= more
    free = {key: max(at, YEAR_ONE) for key, at in ages.items() if key not in blocked}
    return {
        "backlog": len(ages),
        "blocked": len(blocked),
        "undeletable": len(refused & free.keys()),
        "overdue": sum(at < cutoff - INTERVAL for at in free.values()),
        "oldest_row_age_seconds": now.timestamp() - min(free.values()) if free else None,
    }


YEAR_ONE = datetime.datetime(1, 1, 1, tzinfo=datetime.UTC).timestamp()


def told(result: Result, files: Files, policy: str = "chains", table: str = "chains") -> dict[str, float | None]:
    """What a run left, of which its result, metrics, state, history and the journal's last line say the same."""
    state, line = files.read_state()["policy"][policy], files.lines()[-1]["policies"][policy]
    (done,) = [line for line in log(result.stderr) if line.event == "job_completed"]
    series = files.series()
    left = {name: line[name] for name in ("backlog", "blocked", "undeletable", "overdue", "oldest_row_age_seconds")}
    assert {name: state.get(name) for name in left} == left
    assert {name: series.get(name, {}).get((policy, table)) for name in left} == left
    assert {name: result.policies[policy][name] for name in ("backlog", "blocked", "undeletable")} == {
        name: left[name] for name in ("backlog", "blocked", "undeletable")
    }

    def field(name: str) -> float | None:
        value = done.fields.get(policy + name)
        return None if value is None else float(value)

    assert [field("Deleted"), field("Backlog"), field("Blocked"), field("Overdue")] == [
        line["deleted"],
        left["backlog"],
        left["blocked"],
        left["overdue"],
    ]
    age = left["oldest_row_age_seconds"]
    assert field("OldestRowAgeSeconds") == (None if age is None else pytest.approx(age, abs=0.5))
    drained = state.get("last_drained")
    when = done.fields.get(policy + "LastDrained")
    assert (when and datetime.datetime.fromisoformat(when)) == drained
    seconds = series.get("last_drained_timestamp_seconds", {}).get((policy, table))
    assert seconds == (drained and pytest.approx(drained.timestamp(), abs=1e-3))
    return left


def purge(program: Program, files: Files, database: Database, **run: Any) -> Result:
    config = files.configuration(database.conninfo, {"chains": FINISHED}, retention_interval="30d", **run)
    return program.inside(config, *ONCE)


def test_what_is_left_is_what_plain_queries_find(database: Database, program: Program, files: Files) -> None:
    """Backlog and its parts, and the oldest unblocked row to a second, over random forests however runs end."""
    draw = random.Random(5)
    database.execute(f"ALTER ROLE retention IN DATABASE {database.name} SET timezone = 'Asia/Kathmandu'")
    for number in range(16):
        kind = ("timestamptz", "timestamp", "date")[number % 3]
        indexed, guarded, short = number % 2 == 0, number % 4 > 1, number % 8 == 5
        readable = short or draw.random() < 0.5
        mix(database, draw, kind, indexed=indexed, readable=readable, guarded=guarded and not short)
        limits = {"max_run_duration": "1ms", "batch_size": 3} if short else {"batch_size": draw.choice([1, 3, 1000])}
        result = purge(program, files, database, **limits)
        found = told(result, files)
        now = datetime.datetime.fromisoformat(result.json["now"])
        wanted = expected(database, now, readable=readable, guarded=guarded and not short)
        age = wanted["oldest_row_age_seconds"]
        if age is not None:
            wanted["oldest_row_age_seconds"] = pytest.approx(age, abs=1)
        context = (number, kind, indexed, readable, guarded, result.json)
        assert found == wanted, context
        drained = found["backlog"] == found["blocked"]
        assert ("chainsLastDrained" in log(result.stderr)[-1].fields) >= drained, context


@pytest.mark.parametrize("indexed", [True, False], ids=["along the index", "across the pages"])
def test_rows_that_others_hold_are_work_for_the_next_night(
    indexed: bool, database: Database, program: Program, files: Files
) -> None:
    """A locked row and what it refers to are left, and overdue; no row is counted twice, as blocked and as overdue."""
    database.execute(CHAINS.replace("{kind}", "timestamptz"))
    database.execute(
        "INSERT INTO chains SELECT i, nullif(i - 1, 0), 'done', now() - interval '100 days'"
        " FROM generate_series(1, 9) i"
    )
    if indexed:
        database.execute("CREATE INDEX ON chains (at)")
    database.execute("GRANT SELECT (held) ON holds TO retention")
    database.connect(autocommit=False).execute("SELECT FROM chains WHERE id = 5 FOR UPDATE")
    result = purge(program, files, database, batch_size=1)
    left = told(result, files)
    assert (result.policies["chains"]["deleted"], left["backlog"], left["undeletable"]) == (4, 5, 0)
    backlog, blocked, overdue = (left[name] or 0 for name in ("backlog", "blocked", "overdue"))
    assert overdue <= backlog - blocked, left
    assert left["oldest_row_age_seconds"] == pytest.approx(100 * DAY, abs=60)
    assert "chainsLastDrained" not in log(result.stderr)[-1].fields


def test_two_policies_on_one_table_tell_what_each_leaves(database: Database, program: Program, files: Files) -> None:
    """Each counts the rows under its own predicate, blocked ones among them, with its own retention."""
    database.execute(CHAINS.replace("{kind}", "timestamptz"))
    database.execute(
        "INSERT INTO chains SELECT i, NULL, CASE WHEN i % 2 = 0 THEN 'done' ELSE 'over' END,"
        " now() - interval '50 days' FROM generate_series(1, 10) i;"
        "INSERT INTO chains SELECT i + 100, i, 'live', now() FROM generate_series(1, 5) i;"
        "GRANT SELECT (held) ON holds TO retention"
    )
    policies = {
        "done": {**FINISHED, "only": {"status": ["done"]}, "retention": "40d"},
        "over": {**FINISHED, "only": {"status": ["over"]}, "retention": "30d"},
    }
    result = program.inside(files.configuration(database.conninfo, policies), *ONCE)
    for policy, blocked in (("done", 2), ("over", 3)):
        left = told(result, files, policy)
        assert left["backlog"] == left["blocked"] == database.count("chains", f"status = '{policy}'") == blocked
        assert (left["overdue"], left["oldest_row_age_seconds"]) == (0, None)


def test_counting_what_is_left_costs_at_most_one_more_look_at_the_table(
    database: Database, program: Program, files: Files
) -> None:
    """None where the walk came to the end, one where it was cut short: statements that count rows and delete none."""
    database.execute(CHAINS.replace("{kind}", "timestamptz"))
    database.execute(
        "INSERT INTO chains SELECT i, nullif(i - 1, 0), 'done', now() - interval '100 days'"
        " FROM generate_series(1, 99) i"
    )
    for limits, looks in (({"max_run_duration": "1ms", "batch_size": 10}, 1), ({}, 0)):
        offset = log_statements(database)
        result = purge(program, files, database, **limits)
        assert result.policies["chains"]["stop_reason"] == ("budget" if limits else "drained"), result.output
        assert told(result, files)["backlog"] == database.count("chains")
        asked = [text for text in statements(database, offset) if '"chains"' in text]
        assert sum("count(*)" in text and "DELETE FROM" not in text for text in asked) == looks
        assert any("DELETE FROM" in text for text in asked)


def test_without_the_lock_no_file_is_a_half_one(tmp_path: pathlib.Path) -> None:
    """Two that write the same file at once, where no lock keeps them apart: each version is whole, none fails."""
    path = tmp_path / "metrics.prom"
    writing = f"import retention\nfor n in range(400): retention.replace_file({str(path)!r}, '%s' * 20000)\n"
    writers = [
        subprocess.Popen([sys.executable, "-B", "-c", writing % letter], cwd=TOP, stderr=subprocess.PIPE)
        for letter in "ab"
    ]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        if path.exists():
            seen.add(path.read_text())
    assert seen <= {"a" * 20000, "b" * 20000}
    assert [writer.communicate()[1] for writer in writers] == [b"", b""]
    assert [left.name for left in tmp_path.iterdir()] == ["metrics.prom"]


def test_two_states_in_one_directory_have_two_histories(systems: Database, program: Program, files: Files) -> None:
    """What one configuration did proves nothing of another."""
    assert program.inside(files.configuration(systems.conninfo, TWO), "--once").returncode == 0
    other = files.state.with_name("other.toml")
    config = configuration(systems.conninfo, TWO, metrics={"state": str(other)})
    assert json.loads(program.inside(config, "--status", "--json").stdout)["history"]["runs"] == 0
    assert program.inside(None, "--once").returncode == 0
    assert (files.state.parent / "other.history.jsonl").read_text().count("\n") == 1
