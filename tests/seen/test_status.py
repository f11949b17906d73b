"""--status: what ran, how it ended, what is left and whether rows went in time, told from the files alone."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import json
import re
import signal
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from lab import POLICIES, Database, Line, Program, Result, Server, configuration, faketime

import retention

NOWHERE = "host=/nonexistent"
SICR = {"sicr": POLICIES["sicr"]}
DAY = dt.timedelta(days=1)
WELL = {"deleted": 10, "backlog": 0, "blocked": 0, "undeletable": 0, "overdue": 0}
FAILED = {"stop_reason": "failed", "error": retention.PolicyFailedError("permission denied", "42501")}
HELD_BACK = {**WELL, "deleted": 5, "backlog": 100, "overdue": 40, "oldest_row_age_seconds": 40 * 86400.0}


class Nights:
    """Runs of the past: the files get what the program itself would have put there, and --status is asked for them."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.configure(SICR)

    def configure(self, policies: dict[str, dict[str, Any]], **options: Any) -> None:
        self.program.write(configuration(NOWHERE, policies, **options))
        self.config = retention.read_configuration(str(self.program.path))

    def run(
        self,
        days_ago: float,
        *changes: dict[str, Any],
        policies: Sequence[str] = (),
        errors: Sequence[str] = (),
        scheduled: bool = True,
        status: int = 0,
        killed: bool = False,
    ) -> None:
        """One run, of ten minutes, so many days ago; `changes` are how its policies ended if not drained."""
        began = dt.datetime.now(dt.UTC) - days_ago * DAY
        ended = began + dt.timedelta(minutes=10)
        record = retention.Record(self.config.metrics, lambda what, why: pytest.fail(f"{what}: {why}"))
        key = str(uuid.uuid4())
        record.begin(self.config, key, retention.RunningRecord(began, scheduled, 1, 0 if killed else retention.born(1)))
        if killed:
            return
        chosen = [policy for policy in self.config.enabled if not policies or policy.name in policies]
        result = retention.Result(key, retention.Exit(status), None if errors else began)
        for number, policy in enumerate(() if errors else chosen):
            how: dict[str, Any] = {**WELL, **(changes[number] if number < len(changes) else {})}
            result.outcomes.append(retention.Outcome(policy, began, started=True, **how))
            record.phase_ended(result.outcomes[-1], ended)
        result.errors = [("database", error) for error in errors]
        whole = tuple(chosen) == self.config.enabled
        record.job_ended(retention.history_line(result, began, ended, scheduled, whole=whole), ended, 600_000)

    def skip(self, days_ago: float) -> None:
        record = retention.Record(self.config.metrics, lambda *_: None)
        record.skip(self.config, dt.datetime.now(dt.UTC) - days_ago * DAY)

    def ask(self, *arguments: str, status: int = 0) -> str:
        result = self.program.inside(None, "--status", *arguments)
        assert (result.returncode, result.stderr) == (status, ""), result.output
        return result.stdout

    def told(self, status: int = 0) -> dict[str, Any]:
        """What --json says. The text must say it, too: every problem, or that there is none."""
        text, told = self.ask(status=status), json.loads(self.ask("--json", status=status))
        first = [line.removeprefix("ATTENTION: ") for line in text.splitlines() if line.startswith("ATTENTION: ")]
        assert [undated(line) for line in first] == [undated(line) for line in told["problems"]]
        assert text.startswith("OK: ") is (told["problems"] == [])
        assert "None" not in text
        assert isinstance(told, dict)
        return told

    def slo(self, name: str = "sicr") -> dict[str, Any]:
        slo = self.told()["policies"][name]["slo"]
        assert isinstance(slo, dict)
        return slo


def undated(text: str) -> str:
    """A sentence without its ages, which grow."""
    return re.sub(r"(\d+[dhms]+)+ ago", "ago", text)


@pytest.fixture
def nights(program: Program) -> Nights:
    return Nights(program)


# ── The last run ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_before_the_first_run_it_says_so(nights: Nights) -> None:
    """No file is there yet, and none is made: nothing has run, which is not fine."""
    told = nights.told()
    assert told["problems"] == ["no run has ended yet"]
    assert (told["last_run"], told["last_success"], told["history"]["runs"]) == (None, None, 0)
    assert told["policies"]["sicr"] | {"slo": None} == {
        "table": "identity.sign_in_confirmation_requests",
        "column": "created_at",
        "goes_by": "age",
        "retention_seconds": 30 * 86400,
        "deleted_total": 0,
        "errors_total": 0,
        **dict.fromkeys(("last_drained", "as_of", "stop_reason", "error", "backlog", "blocked", "blocked_by")),
        **dict.fromkeys(("undeletable", "overdue", "oldest_row_age_seconds", "slo")),
    }
    assert "never drained" in nights.ask()
    assert [path.name for path in nights.program.directory.iterdir()] == ["config.toml"]


def test_after_a_success_all_is_well(nights: Nights) -> None:
    """One word first, then the last run, what is left of each table, and what pins it."""
    nights.run(0.1, {"backlog": 7, "blocked": 7, "blocked_by": "fk_holds"})
    told, text = nights.told(), nights.ask()
    assert text.startswith("OK: ")
    assert (told["last_run"]["exit_status"], told["last_run"]["scheduled"]) == (0, True)
    assert told["last_success"] == told["last_run"]["ended"]
    assert "scheduled, 10 rows deleted: nothing left to delete (drained)" in text
    assert "0 rows for the next run, 7 blocked by fk_holds" in text


def test_a_failure_is_said_first_and_names_the_policy(nights: Nights) -> None:
    """Status 1, the policy and its reason; the last success is the one before."""
    nights.configure(POLICIES)
    nights.run(1.1)
    before = nights.told()["last_success"]
    nights.run(0.1, WELL, FAILED, status=1)
    told, text = nights.told(), nights.ask()
    assert "refresh" in told["problems"][0]
    assert "sicr" not in told["problems"][0]
    assert told["policies"]["refresh"]["error"] == {"sqlstate": "42501", "message": "permission denied"}
    assert told["last_success"] == before
    assert "failed: permission denied" in text


def test_a_failure_is_not_hidden_by_a_run_of_something_else(nights: Nights) -> None:
    """The night failed; somebody then ran another policy by hand: that one went well, and the job is not well."""
    nights.configure(POLICIES)
    nights.run(1.1)
    nights.run(0.2, FAILED, status=1)
    nights.run(0.1, policies=["refresh"], scheduled=False)
    told = nights.told()
    assert any("sicr" in problem for problem in told["problems"]), told["problems"]
    nights.run(0.05, policies=["sicr"], scheduled=False)
    assert nights.told()["problems"] == []


def test_out_of_time_is_a_success_with_rows_left(nights: Nights) -> None:
    """A budget stop is no failure, but rows that have outstayed their retention are said."""
    nights.run(0.1, {**HELD_BACK, "stop_reason": "budget"})
    told, text = nights.told(), nights.ask()
    assert told["last_success"] == told["last_run"]["ended"]
    assert "out of time" in text
    assert [re.sub(r"\D*sicr: 40 rows.*", "overdue", problem) for problem in told["problems"]] == ["overdue"]
    assert "100 rows for the next run, 0 blocked" in text
    assert "the oldest unblocked row was 40d old" in text


def test_runs_outside_the_window_are_counted_until_one_is_not(nights: Nights) -> None:
    """A single late start is no problem, several in a row are: the timer and the window do not fit."""
    nights.run(1.1)
    nights.skip(0.2)
    assert (nights.told()["skipped"], nights.told()["problems"]) == (1, [])
    nights.skip(0.1)
    told = nights.told()
    assert told["skipped"] == 2
    assert len(told["problems"]) == 1
    assert "night_window_utc" in told["problems"][0]
    assert told["last_run"]["exit_status"] == 0
    nights.run(0.05)
    assert (nights.told()["skipped"], nights.told()["problems"]) == (0, [])


@pytest.mark.parametrize(("days", "stale"), [(1.9, False), (2.1, True)])
def test_two_intervals_without_a_success_are_a_problem(nights: Nights, days: float, stale: bool) -> None:
    """Failures, stopped and partial runs in between are none; the bound is twice the interval."""
    nights.configure(POLICIES)
    nights.run(days)
    nights.run(0.4, {"stop_reason": "signal"})
    nights.run(0.3, policies=["refresh", "sicr"], scheduled=False)
    problems = nights.told()["problems"]
    assert any("has ended well since" in problem for problem in problems) is stale, problems
    assert len(problems) == stale


def first_batches(database: Database, program: Program) -> Any:
    """A run that takes minutes, of which some batches are done."""
    database.execute(
        "INSERT INTO identity.sign_in_confirmation_requests (phone_number, created_at)"
        " SELECT '', now() - interval '40 days' FROM generate_series(1, 1000)"
    )
    process = program.start(configuration(database.conninfo, SICR, batch_size=1, pause="100ms"), "--once")
    assert process.stdout
    lines = (Line.parse(line.rstrip("\n")) for line in process.stdout)
    run = next(line for line in lines if line.event == "batch_deleted").fields["jobRunId"]
    return process, run


def test_a_run_is_shown_while_it_goes_on_and_when_it_was_killed(systems: Database, program: Program) -> None:
    """Running is neither ended nor interrupted. Killed, it says so before the next run, and in the history after it."""
    nights = Nights(program)
    process, run = first_batches(systems, program)
    told = nights.told()
    assert ([item["job_run_id"] for item in told["running"]], told["interrupted"]) == ([run], [])
    assert "Running now, since " in nights.ask()
    process.send_signal(signal.SIGKILL)
    process.wait()
    told = nights.told()
    assert ([item["job_run_id"] for item in told["interrupted"]], told["running"]) == ([run], [])
    assert "did not end" in told["problems"][1]
    assert "nothing deleted" not in told["problems"][1], "nobody can know that: it is saved every few seconds"
    nights.configure(SICR)
    assert program(configuration(systems.conninfo, SICR), "--once").returncode == 0
    told = nights.told()
    assert (told["problems"], told["running"], told["interrupted"]) == ([], [], [])
    assert told["history"]["interrupted_runs"] == [told["history"]["since"]]
    assert "interrupted: the run of " in nights.ask()


# ── Files that are not what they were ─────────────────────────────────────────────────────────────────────────────────


def test_a_state_that_cannot_be_read_is_said_and_ends_with_status_1(nights: Nights) -> None:
    """What the metrics file and the history know is still told; nothing is made up for the rest."""
    nights.configure(SICR)
    nights.run(0.1)
    metrics = nights.program.directory / "metrics.prom"
    nights.program.write(configuration(NOWHERE, SICR, metrics={"textfile": str(metrics)}))
    metrics.write_text(retention.exposition(retention.read_state(nights.config.metrics.state)), encoding="utf-8")
    (nights.program.directory / "state.toml").write_text("[job\n")
    told = nights.told(status=1)
    assert "state.toml" in told["problems"][0]
    assert told["last_success"] is not None
    assert told["history"]["runs"] == 1
    assert told["policies"]["sicr"]["backlog"] is None
    assert "by hand" not in nights.ask(status=1)


def test_damaged_lines_of_the_history_are_left_out_and_said(nights: Nights) -> None:
    """A line that is not as the program writes it, in whatever way, takes nothing else with it."""
    nights.run(0.2)
    history = nights.program.directory / "history.jsonl"
    good = json.loads(history.read_text())
    sicr = good["policies"]["sicr"]
    damaged: list[Any] = [{key: value for key, value in good.items() if key != left_out} for left_out in good]
    damaged.remove({key: value for key, value in good.items() if key != "job_run_id"})  # which says nothing here
    damaged.remove({key: value for key, value in good.items() if key != "exit_status"})
    damaged += [good | {"errors": [1]}, good | {"errors": 1}, good | {"errors": [{}]}, good | {"started": {}}]
    damaged += [good | {"ended": None}, good | {"ended": "2026-01-01T00:00:00"}, good | {"policies": []}, [], 1, "{"]
    damaged += [good | {"policies": {"sicr": sicr | {key: []}}} for key in ("deleted", "error", "stop_reason")]
    lines = [json.dumps(line) for line in damaged] + ["", "[" * 100_000, "\0", '{"started":']
    with history.open("a") as stream:
        stream.writelines(f"{line}\n" for line in lines)
    told = nights.told(status=1)
    assert f"{len(lines)} lines" in told["problems"][0]
    assert told["history"]["runs"] == 1
    assert told["policies"]["sicr"]["slo"]["held"] is True


def test_without_a_history_the_state_is_told(nights: Nights) -> None:
    """The history is the auditor's; how the last run ended needs none."""
    nights.run(0.2)
    (nights.program.directory / "history.jsonl").unlink()
    told = nights.told()
    assert (told["history"]["runs"], told["policies"]["sicr"]["slo"]["held"]) == (0, None)
    assert told["last_run"]["exit_status"] == 0


def test_no_state_path_no_status(nights: Nights) -> None:
    """Where nothing is kept, nothing can be said, and that is no success."""
    nights.program.write(configuration(NOWHERE, SICR, metrics={"state": ""}))
    assert any("metrics.state" in problem for problem in nights.told(status=1)["problems"])


@pytest.mark.parametrize(
    ("arguments", "text", "status"),
    [(["--policy", "sicr"], None, 2), (["--verbose"], None, 1), ([], "[run]\nbatch_size = 0\n", 78)],
    ids=["one policy", "verbose", "configuration"],
)
def test_its_exit_statuses(nights: Nights, arguments: list[str], text: str | None, status: int) -> None:
    """Usage 2, configuration 78; 1 where the files cannot be read, which is not how the last run ended."""
    if text:
        nights.program.write(text)
    (nights.program.directory / "state.toml").write_text("=")
    result = nights.program.inside(None, "--status", *arguments)
    assert result.returncode == status, result.output
    assert (result.stdout == "") is (status != 1)


# ── The proof ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_night_after_night_the_promise_is_held(nights: Nights) -> None:
    """Each run deletes what became due since the one before: within an interval and a run, so 100 %."""
    for night in range(5, 0, -1):
        nights.run(night)
    slo = nights.slo()
    assert (slo["held"], slo["rows_in_time"], slo["short_runs"]) == (True, 1.0, [])
    assert slo["longest_delay_seconds"] == pytest.approx(86400 + 600, abs=5)
    assert nights.told()["history"]["missed_runs"] == []


@pytest.mark.parametrize(
    ("first", "rows", "held"), [(2.8, 10, False), (2.8, 1, True), (3.2, 1, False)], ids=["2 %", "0.2 %", "too late"]
)
def test_a_missed_night_counts_by_its_rows(nights: Nights, first: float, rows: int, held: bool) -> None:
    """99 % of the rows within an interval and a run, and none later than two: 1.8 days are late, 2.2 too late."""
    nights.run(first)
    nights.run(1, {"deleted": rows})
    nights.run(0.1, {"deleted": 500 - rows})
    slo = nights.slo()
    assert (slo["held"], slo["rows_in_time"]) == (held, 1 - rows / 500)
    assert slo["longest_delay_seconds"] == pytest.approx((first - 1) * 86400 + 600, abs=5)
    missed = nights.told()["history"]["missed_runs"]
    assert [item["runs"] for item in missed] == [1]


def test_rows_that_are_still_there_are_late_as_well(nights: Nights) -> None:
    """Nothing has been deleted late so far; but what the last runs left grows older, and the promise is broken now."""
    nights.run(4)
    nights.run(3)
    for night in (2, 1, 0.1):
        nights.run(night, {**HELD_BACK, "deleted": 0, "stop_reason": "budget"})
    slo = nights.slo()
    assert slo["held"] is False
    assert slo["longest_delay_seconds"] == pytest.approx(10 * 86400, abs=5)  # the oldest that was left
    assert [short["stop_reason"] for short in slo["short_runs"]] == ["budget"] * 3


def test_what_was_proved_of_other_rows_is_no_proof(nights: Nights) -> None:
    """Another list of `only`, another column: the proof begins anew, and nothing is known to be drained."""
    nights.run(2)
    nights.run(1)
    assert nights.slo()["held"] is True
    nights.configure({"sicr": {**SICR["sicr"], "only": {"status": ["Expired"]}}})
    policy = nights.told()["policies"]["sicr"]
    assert (policy["last_drained"], policy["backlog"], policy["slo"]["held"]) == (None, None, None)


def test_rows_that_came_back_are_late_whatever_was_drained_before(nights: Nights) -> None:
    """A restore brings old rows the day after a good night: what the run measured of them decides."""
    nights.run(1)
    nights.run(0.1, {**HELD_BACK, "stop_reason": "budget"})
    slo, text = nights.slo(), nights.ask()
    assert (slo["held"], slo["longest_delay_seconds"]) == (False, 10 * 86400)
    assert slo["rows_in_time"] == 5 / 45
    assert "NOT in time: of the rows that came due since" in text
    assert "some may have waited 10d (limit 2d)" in text


def test_what_is_blocked_breaks_no_promise(nights: Nights) -> None:
    """Rows that live chains pin are named and counted, and are not late."""
    for night in (3, 2, 1, 0.1):
        nights.run(night, {"backlog": 9, "blocked": 9, "blocked_by": "fk_parent"})
    policy = nights.told()["policies"]["sicr"]
    assert (policy["slo"]["held"], policy["blocked"], policy["blocked_by"]) == (True, 9, "fk_parent")


def test_an_undeletable_row_breaks_the_promise(nights: Nights) -> None:
    """A policy that a trigger holds up has not drained, however many rows went."""
    nights.run(3)
    for night in (2, 1, 0.1):
        nights.run(night, {**FAILED, "backlog": 1, "undeletable": 1}, status=1)
    assert nights.slo()["held"] is False


def test_bad_nights_are_listed_each_as_what_it_was(nights: Nights) -> None:
    """Missed, unreachable, killed, failed, stopped: an auditor finds every one of them, with its reason."""
    nights.run(9)
    nights.run(8, errors=["connection refused"], status=69)
    nights.run(7, FAILED, status=1)
    nights.run(6, killed=True)
    nights.run(5, {**HELD_BACK, "stop_reason": "signal"})
    nights.run(4)
    nights.run(1)
    nights.run(0.1)
    told, text = nights.told(), nights.ask()
    history = told["history"]
    assert [item["error"] for item in history["failed_runs"]] == ["connection refused"]
    assert [item["runs"] for item in history["missed_runs"]] == [2]
    assert len(history["interrupted_runs"]) == 1
    short = [(item["stop_reason"], item["error"]) for item in told["policies"]["sicr"]["slo"]["short_runs"]]
    assert short == [("failed", "permission denied"), ("signal", None)]
    for words in (
        "could not be made: the run of ",
        "missed: 2 runs",
        "interrupted: the run of ",
        "failed: permission denied",
    ):
        assert words in text


def test_the_text_stays_short(nights: Nights) -> None:
    """A year of bad nights is a screen or two; --json has it all."""
    nights.run(80)
    for night in range(79, 9, -3):
        nights.run(night, FAILED, status=1)
        nights.run(night - 0.3, errors=["connection refused"], status=69)
    nights.run(0.1)
    history = nights.told()["history"]
    assert len(history["missed_runs"]) > 20
    assert len(history["failed_runs"]) > 20
    assert len(nights.ask().splitlines()) < 60


def test_overlapping_runs_prove_no_less(nights: Nights) -> None:
    """Two instances at once end in any order: the promise that each of them proves stands."""
    for night in (3, 2, 1, 0.1):
        nights.run(night + 0.003)
        nights.run(night, scheduled=False)
    slo = nights.slo()
    assert (slo["held"], slo["rows_in_time"]) == (True, 1.0)
    assert nights.told()["history"]["missed_runs"] == []


def test_partial_runs_prove_their_own_policy(nights: Nights) -> None:
    """--policy by hand drains that one; for the others the night was missed."""
    nights.configure(POLICIES)
    nights.run(4)
    for night in (3, 2, 1, 0.1):
        nights.run(night, policies=["sicr"], scheduled=False)
    policies = nights.told()["policies"]
    assert [policies[name]["slo"]["held"] for name in ("sicr", "refresh")] == [True, False]
    assert [item["runs"] for item in nights.told()["history"]["missed_runs"]] == [3]


@pytest.mark.parametrize(
    "change",
    [{"table": "identity.other"}, {"retention": "10d"}],
    ids=["table", "retention"],
)
def test_what_was_another_policy_proves_nothing_of_this_one(nights: Nights, change: dict[str, Any]) -> None:
    """The table, or how long its rows are kept, has changed: what went before says nothing of what was due then."""
    for night in (3, 2):
        nights.run(night)
    nights.configure({"sicr": {**POLICIES["sicr"], **change}})
    assert nights.slo()["held"] is None
    nights.run(1, {"deleted": 1_000_000})
    nights.run(0.1)
    slo = nights.slo()
    assert (slo["held"], slo["rows_in_time"]) == (True, 1.0)
    assert slo["longest_delay_seconds"] == pytest.approx(0.9 * 86400 + 600, abs=5)


def test_a_policy_that_is_new_or_was_off_is_judged_by_its_own_runs(nights: Nights) -> None:
    """Added later, it begins later; disabled for a while, its rows did outstay; disabled now, it is not told of."""
    nights.run(6)
    nights.configure({**SICR, "refresh": {**POLICIES["refresh"], "enabled": True}})
    nights.run(5)
    nights.configure({**SICR, "refresh": {**POLICIES["refresh"], "enabled": False}})
    for night in (4, 3, 2):
        nights.run(night)
    assert list(nights.told()["policies"]) == ["sicr"]
    nights.configure({**SICR, "refresh": POLICIES["refresh"]})
    nights.run(1)
    policies = nights.told()["policies"]
    assert [policies[name]["slo"]["held"] for name in ("sicr", "refresh")] == [True, False]


@pytest.mark.parametrize(("before", "after", "missed"), [("24h", "1h", []), ("12h", "24h", [1, 1, 1])])
def test_a_changed_interval_does_not_rewrite_the_past(
    nights: Nights, before: str, after: str, missed: list[int]
) -> None:
    """Each run was to be followed by the next within the interval of its time: when the job is made to run more often,
    as the runbook has it, the nights before were no worse for it; made to run less often, no better."""
    nights.configure(SICR, retention_interval=before)
    for night in (4, 3, 2, 1):
        nights.run(night)
    held = nights.slo()["held"]
    nights.configure(SICR, retention_interval=after)
    nights.run(0.02)
    assert [item["runs"] for item in nights.told()["history"]["missed_runs"]] == missed
    assert nights.slo()["held"] == held == (missed == [])


def test_a_clock_that_was_ahead_breaks_nothing(nights: Nights) -> None:
    """A run of tomorrow, by a clock that was set back since: no negative time, no promise that is broken by it."""
    nights.run(-1)
    slo = nights.slo()
    assert slo["held"] is True
    assert slo["longest_delay_seconds"] >= 0
    assert not re.search(r" -\d", nights.ask())
    nights.run(0.1)
    nights.run(0.05)
    assert nights.slo()["held"] is True
    assert nights.slo()["longest_delay_seconds"] >= 0


# ── Real runs at other times ──────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass
class Clock:
    """A server and a program that share a clock, which a test sets."""

    server: Server
    program: Program

    @property
    def environment(self) -> dict[str, str]:
        shared = faketime(0)
        del shared["FAKETIME"]
        return {**shared, "FAKETIME_TIMESTAMP_FILE": str(self.server.directory / "clock"), "FAKETIME_NO_CACHE": "1"}

    def set(self, seconds: float) -> None:
        """So many seconds ahead of what it is."""
        (self.server.directory / "clock").write_text(f"{seconds:+.0f}")

    def start(self, config: dict[str, Any] | None, *arguments: str) -> Any:
        return self.program.start(config, *arguments, env=self.environment)

    def __call__(self, config: dict[str, Any] | None, *arguments: str) -> Result:
        return self.program.finish(self.start(config, *arguments))


@pytest.fixture
def clock(program: Program) -> Iterator[Clock]:
    with contextlib.ExitStack() as stack:
        server = Server()
        stack.callback(server.remove)
        clock = Clock(server, program)
        clock.set(0)
        server.stop("fast")
        server.environment = clock.environment
        server.start()
        yield clock


def test_an_auditor_is_answered_by_real_nights(clock: Clock) -> None:
    """Two days, a run every six hours: on time, killed, late after that, on time, missed twice, unreachable, too late.

    A row becomes due every ten minutes, so that what each run deletes, and how late, is known beforehand.
    """
    database = Database(clock.server, "postgres")
    database.execute(
        "CREATE TABLE rows (at timestamptz); CREATE INDEX ON rows (at); GRANT SELECT (ctid, at), UPDATE, DELETE ON rows"
        " TO retention; INSERT INTO rows SELECT now() - interval '30 days' + (n - 0.5) * interval '10 minutes'"
        " FROM generate_series(1, 288) AS n"
    )
    database.close()
    policies = {"rows": {"table": "rows", "age_column": "at", "retention": "30d"}}
    every: dict[str, Any] = {"retention_interval": "6h", "max_run_duration": "30m"}
    well = configuration(database.conninfo, policies, **every)
    slow = configuration(database.conninfo, policies, batch_size=1, pause="100ms", **every)

    for hours, config in [(0, well), (6, well), (12, slow), (18, well), (24, well), (42, None), (47, well)]:
        clock.set(hours * 3600)
        if config is slow:
            process = clock.start(config)
            assert any(" batch deleted " in line for line in process.stdout)
            process.kill()
            process.wait()
            continue
        result = clock(config or configuration(NOWHERE, policies, **every))
        assert result.returncode == (0 if config else 69), result.output
    deleted = [line["policies"]["rows"]["deleted"] for line in lines(clock.program) if line["policies"]]
    late = deleted[2]  # the killed run had some of them, in time
    assert deleted == [0, 36, late, 36, 138]
    assert 36 <= late < 72
    told = json.loads(clock(None, "--status", "--json").stdout)
    policy, history = told["policies"]["rows"], told["history"]
    slo = policy["slo"]
    assert slo["held"] is False
    assert slo["longest_delay_seconds"] == pytest.approx(23 * 3600, abs=60)
    assert slo["rows_in_time"] == pytest.approx((36 + 36) / sum(deleted))
    assert [item["runs"] for item in history["missed_runs"]] == [2]
    assert (len(history["interrupted_runs"]), len(history["failed_runs"])) == (1, 1)
    assert policy["last_drained"] == lines(clock.program)[-1]["now"]
    assert (policy["backlog"], policy["overdue"]) == (0, 0)


def lines(program: Program) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (program.directory / "history.jsonl").read_text().splitlines()]
