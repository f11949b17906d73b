"""The metrics file: its names, its counters, and that whoever reads it never sees half of one."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import metrics
import pytest
from lab import POLICIES, TOP, Database, Program, clean_environment, configuration, faketime, until

SICR = "identity.sign_in_confirmation_requests"
SESSIONS = "identity.refresh_sessions"
LABELS = {("sicr", SICR), ("refresh", SESSIONS)}
TWO = {"sicr": POLICIES["sicr"], "refresh": POLICIES["refresh"]}


def fill(database: Database, rows: int) -> None:
    database.execute(
        f"INSERT INTO {SICR} (phone_number, created_at)"
        f" SELECT '', now() - interval '40 days' - i * interval '1 second' FROM generate_series(1, {rows}) i"
    )


def with_file(program: Program, conninfo: str, policies: Any = TWO, **run: Any) -> dict[str, Any]:
    """A configuration with both files in the test's own directory."""
    return configuration(conninfo, policies, metrics={"textfile": str(program.directory / "metrics.prom")}, **run)


# ── Names ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_promtool_finds_in_no_file_anything_but_the_unit_that_the_specification_fixes(
    systems: Database, program: Program
) -> None:
    """From the first run on, however runs end: well-formed, the names and labels of the contract and no others."""
    path = program.directory / "metrics.prom"
    config = with_file(program, systems.conninfo)

    def written(status: int, *arguments: str, changed: Any = None) -> metrics.Series:
        result = program.inside({**config, **(changed or {})}, *arguments)
        assert result.returncode == status, result.output
        assert metrics.lint(path) == metrics.UNIT, path.read_text()
        series = metrics.read(path)
        gauges = {
            "backlog",
            "blocked",
            "undeletable",
            "overdue",
            "oldest_row_age_seconds",
            "last_drained_timestamp_seconds",
        }
        for name in gauges & set(series):
            assert set(series[name]) <= LABELS, name
        return series

    path.write_text(before_the_first_run())
    assert metrics.lint(path) == ""
    misspelt = {"policy": {**TWO, "sicr": {**TWO["sicr"], "retention": "30"}}}
    first = written(78, "--once", changed=misspelt)
    assert first["errors_total"] == {("",): 1}
    assert "last_success_timestamp_seconds" not in first
    assert first["interval_seconds"] == {(): 86400}, "without which nobody misses a success"

    skipped = written(0, changed={"run": {**config["run"], "night_window_utc": closed_window()}})
    assert skipped["errors_total"] == {("",): 1, ("sicr",): 0, ("refresh",): 0}
    assert skipped["run_duration_ms_count"] == {(): 0}, "which is no run"

    unreachable = written(69, "--once", changed={"database": {"conninfo": "host=/nonexistent", "connect_retry": "0s"}})
    assert unreachable["errors_total"][("",)] == 2
    assert "last_success_timestamp_seconds" not in unreachable

    wrong = {"policy": {**TWO, "sicr": {**TWO["sicr"], "age_column": "missing"}}}
    failing = written(1, "--once", changed=wrong)
    assert failing["errors_total"] == {("",): 2, ("sicr",): 1, ("refresh",): 0}

    systems.execute(f"""
        INSERT INTO {SESSIONS} (id, parent_session_id, status, updated_at) VALUES
            ('00000000-0000-0000-0000-000000000001', NULL, 'Rotated', now() - interval '100 days'),
            (DEFAULT, '00000000-0000-0000-0000-000000000001', 'Active', now()),
            ('00000000-0000-0000-0000-000000000002', NULL, 'Revoked', now() - interval '95 days');
        CREATE FUNCTION keep_it() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no'; END $$;
        CREATE TRIGGER keeper BEFORE DELETE ON {SESSIONS} FOR EACH ROW EXECUTE FUNCTION keep_it()
    """)
    refused = written(1, "--once")
    row = ("refresh", SESSIONS)
    counts = [refused[name][row] for name in ("backlog", "blocked", "undeletable", "overdue")]
    assert counts == [2, 1, 1, 1]
    assert refused["oldest_row_age_seconds"].keys() == {row}, "absent where there is none"
    assert refused["oldest_row_age_seconds"][row] == pytest.approx(95 * 86400, abs=60)
    assert "last_success_timestamp_seconds" not in refused

    systems.execute(f"DROP TRIGGER keeper ON {SESSIONS}")
    fill(systems, 3)
    partial = written(0, "--once", "--policy", "sicr")
    assert "last_success_timestamp_seconds" not in partial
    assert partial["backlog"] == {("sicr", SICR): 0, row: 2}, "that of the other policy is of its own last run"

    whole = written(0, "--once")
    assert whole.keys() == {
        *(name for name in metrics.NAMES if not name.startswith(("<", "oldest"))),
        "sicr_deleted_total",
        "refresh_deleted_total",
    }
    assert (whole["sicr_deleted_total"], whole["refresh_deleted_total"]) == ({(): 3}, {(): 1})
    assert whole["retention_seconds"] == {("sicr",): 30 * 86400, ("refresh",): 90 * 86400}
    assert whole["interval_seconds"] == {(): 86400}
    assert [whole[name][row] for name in ("backlog", "blocked", "undeletable", "overdue")] == [1, 1, 0, 0]


def before_the_first_run() -> str:
    """The metrics file as the package makes it."""
    line = (TOP / "packaging" / "systemd" / "session-retention.tmpfiles").read_text().splitlines()[-1]
    return line.split(maxsplit=6)[6].replace("\\n", "\n")


def closed_window() -> str:
    """A night window that is not now."""
    hour = datetime.datetime.now(datetime.UTC).hour
    return f"{(hour + 3) % 24:02}:00-{(hour + 4) % 24:02}:00"


ODD = ['say "hi"', "back\\", "\\n", "a\nb", "a\r\nb\r", "50%s", "Сессии", '{a="b"} 1', "x\\", "a,b=\t", "\u2028\x85#"]


def test_a_table_of_any_name_is_a_label_that_reads_back(database: Database, program: Program) -> None:
    """Quotes, backslashes, line ends: the linter and the parser see the name, and so does a run that lost its state."""
    policies = {}
    for number, name in enumerate(ODD):
        quoted = '"{}"'.format(name.replace('"', '""'))
        database.execute(f"CREATE TABLE {quoted} AS SELECT now() - interval '2 days' AS at")
        database.grant(quoted, select="at")
        policies[f"p{number}"] = {"table": quoted, "age_column": "at", "retention": "1d"}
    config = with_file(program, database.conninfo, policies)
    path = program.directory / "metrics.prom"
    for _ in range(2):
        result = program.inside(config, "--once", "--json")
        assert result.returncode == 0, result.output
        assert metrics.lint(path) == metrics.UNIT
        series = metrics.read(path)
        assert set(series["backlog"]) == {(name, policy["table"]) for name, policy in result.policies.items()}
        assert {series[f"{name}_deleted_total"][()] for name in policies} == {1}, "counters go on"
        (program.directory / "state.toml").unlink()


# ── Counters ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_counters_go_on_from_run_to_run(systems: Database, program: Program) -> None:
    """Two runs of 1,000 rows: 1,000, then 2,000; and one run, then two, in the histogram."""
    config = with_file(program, systems.conninfo)
    for run in (1, 2):
        fill(systems, 1000)
        assert program.inside(config, "--once").returncode == 0
        series = metrics.read(program.directory / "metrics.prom")
        assert series["sicr_deleted_total"][()] == run * 1000
        assert series["run_duration_ms_count"][()] == series["run_duration_ms_bucket"][("+Inf",)] == run
        bounds = [float(bound) for (bound,) in series["run_duration_ms_bucket"]]
        assert bounds == sorted(bounds)
        assert [*series["run_duration_ms_bucket"].values()] == sorted(series["run_duration_ms_bucket"].values())


def test_a_killed_run_takes_back_nothing_that_was_reported(systems: Database, program: Program) -> None:
    """Counts are saved every few seconds; after SIGKILL the next run goes on from there and the history has both."""
    fill(systems, 1000)
    systems.execute(
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS"
        f" $$ BEGIN PERFORM pg_sleep(0.005); RETURN OLD; END $$;"
        f"CREATE TRIGGER slow BEFORE DELETE ON {SICR} FOR EACH ROW EXECUTE FUNCTION slow()"
    )
    path = program.directory / "metrics.prom"
    fast = {**faketime(0), "FAKETIME": "+0 x20", "FAKETIME_DONT_FAKE_MONOTONIC": "0"}
    process = program.start(with_file(program, systems.conninfo, batch_size=10), "--once", env=fast)

    def reported() -> float:
        return metrics.read(path)["sicr_deleted_total"][()] if path.exists() else 0

    until(reported, "a first report on the way")
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = reported()
    assert 0 < before <= 1000 - systems.count(SICR) < 1000, "while it was under way"
    systems.execute(f"DROP TRIGGER slow ON {SICR}")
    until(lambda: not systems.value("SELECT count(*) FROM pg_stat_activity WHERE usename = 'retention'"), "its end")
    rest = systems.count(SICR)
    result = program.once(None)
    assert (result.returncode, result.policies["sicr"]["deleted"], reported()) == (0, rest, before + rest)
    series = metrics.read(path)
    assert (series["run_duration_ms_count"][()], series["errors_total"][("sicr",)]) == (1, 0)
    killed, last = [json.loads(line) for line in (program.directory / "history.jsonl").read_text().splitlines()]
    assert (killed["stop_reason"], killed["phase"], killed["success"]) == ("interrupted", "sicr", False)
    assert 0 < killed["deleted"] <= before
    assert (last["job_run_id"], last["success"]) == (result.json["job_run_id"], True)
    assert not [*program.directory.glob(".new-*")]


def test_instances_that_end_at_the_same_instant_are_all_counted(systems: Database, program: Program) -> None:
    """Each adds its own to what the others wrote: rows, runs and lines of the history, exactly."""
    instances = 4
    fill(systems, 1000)
    config = with_file(program, systems.conninfo, batch_size=10)
    config["database"]["lock_timeout"] = "60s"
    holder = systems.connect(autocommit=False)
    holder.execute(f"LOCK TABLE {SESSIONS}")
    program.write(config)
    running = [program.start(None, "--once", "--json") for _ in range(instances)]
    waiting = f"SELECT count(*) FROM pg_locks WHERE relation = '{SESSIONS}'::regclass AND NOT granted"
    until(lambda: systems.value(waiting) == instances, "all wait for the last table")
    holder.rollback()
    results = [program.finish(process) for process in running]
    assert {result.returncode for result in results} == {0}, [result.output for result in results]
    assert sum(result.policies["sicr"]["deleted"] for result in results) == 1000
    series = metrics.read(program.directory / "metrics.prom")
    assert (series["sicr_deleted_total"][()], series["run_duration_ms_count"][()]) == (1000, instances)
    assert len((program.directory / "history.jsonl").read_text().splitlines()) == instances


# ── Readers ───────────────────────────────────────────────────────────────────────────────────────────────────────────

READER = """
import os, sys, tomllib
from prometheus_client.parser import text_string_to_metric_families
metrics, state, seen = sys.argv[1], sys.argv[2], set()
while True:
    text = open(metrics).read()
    names = {family.name for family in text_string_to_metric_families(text)}
    whole = text.endswith("\\n") and {"identity_session_retention_last_run_timestamp_seconds",
        "identity_session_retention_backlog"} <= names
    whole = whole and {"job", "policy"} <= tomllib.load(open(state, "rb")).keys()
    modes = {oct(os.stat(path).st_mode & 0o777) for path in (metrics, state)}
    assert whole and modes == {"0o644"}, (modes, text)
    if text not in seen:
        seen.add(text)
        print(len(seen), flush=True)
"""
#: A run saves in exactly this way; starting one costs a hundred times more than its saving.
WRITER = """
import datetime, sys, retention
config = retention.read_configuration(sys.argv[1])
now = datetime.datetime.now(datetime.UTC)
for number in range(200):
    record = retention.Record(config.metrics, lambda *told: sys.exit(str(told)))
    record.add_deleted("sicr", number)
    result = retention.Result(str(number), retention.Exit.OK, now, [
        retention.Outcome(policy, now, backlog=number, blocked=number) for policy in config.enabled])
    for outcome in result.outcomes:
        record.phase_ended(outcome, now)
    record.job_ended(retention.history_line(result, now, now, False, whole=True), now, number)
"""


@pytest.fixture
def public() -> Iterator[Program]:
    """The program with its files where other users may read them."""
    program = Program(pathlib.Path(tempfile.mkdtemp(prefix="retention-public-")))
    program.directory.chmod(0o755)
    yield program
    program.kill()
    shutil.rmtree(program.directory)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_never_reads_half_a_file(systems: Database, public: Program) -> None:
    """While 200 runs write: each reading is whole, mode 0644, whatever the program's umask is."""
    config = with_file(public, systems.conninfo)
    fill(systems, 1)
    umask = ("sh", "-c", 'umask 077 && exec "$@"', "sh")
    assert public(config, "--once", prefix=umask).returncode == 0
    paths = [str(public.directory / name) for name in ("metrics.prom", "state.toml")]
    nobody = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
    reader = subprocess.Popen(
        [*nobody, "/usr/bin/python3", "-c", READER, *paths], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    public.running.append(reader)
    assert reader.stdout
    assert reader.stdout.readline() == "1\n"
    environment = {**clean_environment(), "PYTHONPATH": str(TOP)}
    writer = [*umask, sys.executable, "-B", "-c", WRITER, str(public.path)]
    done = subprocess.run(writer, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert public(None, "--once", prefix=umask).returncode == 0
    assert reader.poll() is None, reader.communicate()[1]
    reader.kill()
    assert len(reader.communicate()[0].split()) > 20, "of many versions"
    series = metrics.read(pathlib.Path(paths[0]))
    assert series["sicr_deleted_total"][()] == 1 + sum(range(200))
    assert series["run_duration_ms_count"][()] == 202
    assert sorted(path.name for path in public.directory.iterdir()) == [
        "config.toml",
        "history.jsonl",
        "metrics.prom",
        "state.toml",
    ]
