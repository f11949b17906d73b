"""A run by hand in a real terminal: progress below the lines of the log, none where nobody would see it."""

from __future__ import annotations

import json
import os
import pathlib
import pty
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from lab import POLICIES, PROMPTLY, Database, Line, Program, clean_environment, configuration, until
from servers import sessions

SLOW: dict[str, Any] = {"batch_size": 10, "pause": "100ms"}


class Terminal:
    """A terminal of tmux, with a server of its own, in which one command runs."""

    def __init__(self, command: str, width: int, term: str = "xterm-256color") -> None:
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="retention-tmux-"))
        self.width = width
        # the shell outlives Ctrl-C, says how the command ended, and keeps the terminal open
        script = f"trap : INT; export TERM={term}; {command}; echo status=$?; exec sleep 600"
        size = ["-x", str(width), "-y", "50"]
        self.tmux("new-session", "-d", *size, "sh", "-c", script)

    def tmux(self, *arguments: str, check: bool = True) -> str:
        command = ["tmux", "-f", "/dev/null", "-S", str(self.directory / "socket"), *arguments]
        return subprocess.run(command, check=check, capture_output=True, text=True, env=clean_environment()).stdout

    @property
    def screen(self) -> list[str]:
        """Its lines as they look, and what has left it at the top."""
        return [line.rstrip() for line in self.tmux("capture-pane", "-p", "-S", "-").rstrip().splitlines()]

    @property
    def log(self) -> list[Line]:
        """The lines of the log, each in one piece again and in the line form."""
        joined = self.tmux("capture-pane", "-p", "-J", "-S", "-").splitlines()
        return [Line.parse(line.rstrip()) for line in joined if line.startswith("[")]

    @property
    def cursor(self) -> bool:
        return self.tmux("display-message", "-p", "#{cursor_flag}").strip() == "1"

    def shows(self, pattern: str, timeout: float = 30) -> re.Match[str]:
        """Wait until a line has the pattern."""

        def look() -> re.Match[str] | None:
            return next(filter(None, (re.search(pattern, line) for line in self.screen)), None)

        try:
            match = until(look, pattern, timeout)
        except AssertionError as error:
            raise AssertionError("\n".join([str(error), *self.screen])) from None
        assert isinstance(match, re.Match)
        return match

    def close(self) -> None:
        self.tmux("kill-server", check=False)
        shutil.rmtree(self.directory)


Open = Callable[..., Terminal]


@pytest.fixture
def terminal(program: Program) -> Iterator[Open]:
    """Run the program in a terminal: the configuration, its arguments, and perhaps more of the shell's."""
    opened: list[Terminal] = []

    def start(
        config: dict[str, Any],
        *arguments: str,
        before: str = "",
        more: str = "",
        width: int = 120,
        term: str = "xterm-256color",
    ) -> Terminal:
        program.write(config)
        command = f"cd {program.directory}; {before} {shlex.join(program.command(*arguments))} {more}"
        opened.append(Terminal(command, width, term))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def fill(database: Database, rows: int) -> None:
    """So many rows of the first two policies, which the planner knows of."""
    database.execute(
        "INSERT INTO identity.sign_in_confirmation_requests (phone_number, created_at)"
        f"    SELECT '', now() - interval '40 days' FROM generate_series(1, {rows});"
        "INSERT INTO identity.refresh_sessions (status, updated_at)"
        f"    SELECT 'Expired', now() - interval '100 days' FROM generate_series(1, {rows});"
        "ANALYZE"
    )


@pytest.mark.parametrize("width", [80, 120])
def test_a_short_run_leaves_a_bar_for_each_phase_below_its_log(systems: Database, terminal: Open, width: int) -> None:
    """The lines of the log are whole, but those of batches are not shown; the cursor is back when it ends."""
    fill(systems, 1000)
    shown = terminal(configuration(systems.conninfo, batch_size=100), "--once", width=width)
    assert shown.shows(r"^status=(\d+)$")[1] == "0"
    events = [line.event for line in shown.log]
    assert events == ["job_started", *["phase_started", "phase_completed"] * 4, "job_completed"]
    bars = shown.screen[-5:-1]
    assert [bar.split()[0] for bar in bars] == list(POLICIES)
    for bar, rows in zip(bars, ("1,000", "1,000", "0", "0"), strict=True):
        assert bar.endswith(f"100% {rows} rows deleted, drained"), bar
    assert shown.cursor


def test_a_long_run_shows_how_far_it_is_and_ends_at_ctrl_c(systems: Database, terminal: Open) -> None:
    """Deleted, rate, share of the estimate and budget left, in 80 columns; Ctrl-C is as SIGTERM: exit 0, all logged.

    The bar of a phase that was stopped does not look done.
    """
    fill(systems, 1000)
    shown = terminal(configuration(systems.conninfo, **SLOW, max_run_duration="30m"), "--once", width=80)
    progress = shown.shows(r"^sicr +\S+ +(\d+)% (\d+) of about ([\d,]+) rows deleted, [\d,]+/s, budget left 29m\d+s$")
    share, deleted, estimate = (int(number.replace(",", "")) for number in progress.groups())
    assert 0 < deleted < 1000 == estimate
    assert share == deleted * 100 // estimate
    assert not shown.cursor
    shown.tmux("send-keys", "C-c")
    assert shown.shows(r"^status=(\d+)$", PROMPTLY)[1] == "0"
    assert shown.log[-1].fields["stopReason"] == "signal"
    gone = int(shown.log[-1].fields["sicrDeleted"])
    assert systems.count("identity.sign_in_confirmation_requests") == 1000 - gone
    assert shown.shows(r"^sicr .*?(\d+)% \d+ rows deleted, signal$")[1] == str(gone * 100 // 1000)
    assert shown.cursor


def test_names_and_numbers_of_any_length_fit(systems: Database, terminal: Open) -> None:
    """The longest name of a policy, and a table that nothing is known of: a bar has one line, and how many went."""
    fill(systems, 300)
    name = "a_policy_name_of_forty_characters_in_all"
    shown = terminal(configuration(systems.conninfo, {name: POLICIES["sicr"]}, **SLOW), "--once", width=80)
    shown.shows(rf"^{name[:20]}.* \d+ rows deleted")
    assert max(map(len, shown.screen)) <= 80
    shown.tmux("send-keys", "C-c")
    shown.shows(r"^status=0$")
    assert len([line for line in shown.screen if line.startswith(name[:20])]) <= 2, "one that ^C has moved, and the end"


def test_verbose_shows_the_batches_above_the_bar(systems: Database, terminal: Open) -> None:
    """-v is for whoever wants to see each line."""
    fill(systems, 20)
    shown = terminal(configuration(systems.conninfo, {"sicr": POLICIES["sicr"]}, batch_size=10), "--once", "-v")
    shown.shows(r"^status=0$")
    assert [line.event for line in shown.log].count("batch_deleted") == 2
    shown.shows(r"^sicr .* 20 rows deleted, drained$")


def test_the_result_is_apart_from_what_is_shown(systems: Database, terminal: Open, tmp_path: pathlib.Path) -> None:
    """With --json the log and the bars are on stderr, and the file has one JSON object and nothing else."""
    fill(systems, 20)
    config = configuration(systems.conninfo, {"sicr": POLICIES["sicr"]})
    shown = terminal(config, "--once", "--json", more=f">{tmp_path / 'result.json'}")
    shown.shows(r"^status=0$")
    shown.shows(r"^sicr .* 20 rows deleted, drained$")
    assert json.loads((tmp_path / "result.json").read_text())["policies"]["sicr"]["deleted"] == 20


@pytest.mark.parametrize("why", ["piped", "dumb", "no library", "failing configuration"])
def test_plain_lines_where_a_bar_cannot_be(
    systems: Database, terminal: Open, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Piped, on a terminal that can do nothing, or without the library: the log, batches and all, and no escape."""
    fill(systems, 20)
    config = configuration(systems.conninfo, {"sicr": POLICIES["sicr"]}, batch_size=10)
    if why == "no library":
        (tmp_path / "rich.py").touch()  # a module of that name that has nothing in it
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    if why == "failing configuration":
        config["run"]["batch_size"] = -1
    shown = terminal(
        config, "--once", more="2>&1 | cat -v" if why == "piped" else "", term="dumb" if why == "dumb" else "xterm"
    )
    shown.shows(r"^status=")
    events = [line.event for line in shown.log]
    if why == "failing configuration":
        assert events == ["job_failed"]
    else:
        batches = ["batch_deleted"] * 2
        assert events == ["job_started", "phase_started", *batches, "phase_completed", "job_completed"]
        assert len([line for line in shown.tmux("capture-pane", "-p", "-J").splitlines() if line]) == len(events) + 1
    assert "━" not in "".join(shown.screen)
    assert "^[" not in "".join(shown.screen)


@pytest.mark.parametrize("how", ["closed", "closed over nohup"])
def test_a_terminal_that_is_closed(systems: Database, terminal: Open, program: Program, how: str) -> None:
    """The window is closed over a run by hand, or a line is lost: as SIGTERM, and it is logged and recorded how far it
    came. Under nohup it goes on to its end, as it was asked to."""
    rows = 1000 if how == "closed" else 60
    fill(systems, rows)
    config = configuration(systems.conninfo, {"sicr": POLICIES["sicr"]}, **SLOW)
    if how == "closed":
        shown = terminal(config, "--once")
        shown.shows(r"^sicr .* \d+ of about 1,000 rows deleted")
    else:
        shown = terminal(config, "--once", before="nohup", more=">nohup.out 2>&1")
        until(lambda: systems.count("identity.sign_in_confirmation_requests") < rows, "the first batch")
    shown.tmux("kill-server")
    until(lambda: sessions(systems) == [], "the run has ended", PROMPTLY)
    left = systems.count("identity.sign_in_confirmation_requests")
    told = json.loads(program(None, "--status", "--json").stdout)
    assert told["policies"]["sicr"]["deleted_total"] == rows - left
    if how == "closed":
        assert 0 < left < rows
        assert (told["last_run"]["stop_reason"], told["last_run"]["exit_status"]) == ("signal", 0)
    else:
        assert (left, told["last_run"]["stop_reason"]) == (0, "drained")


def test_a_paused_terminal_holds_nothing_up(systems: Database, program: Program) -> None:
    """Ctrl-S, and somebody goes home: the run ends with its budget all the same, and is recorded."""
    fill(systems, 1000)
    two = {name: POLICIES[name] for name in ("sicr", "refresh")}
    program.write(configuration(systems.conninfo, two, **SLOW, max_run_duration="3s"))
    master, slave = pty.openpty()
    process = subprocess.Popen(
        program.command("--once"),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**clean_environment(), "TERM": "xterm-256color"},
        cwd="/",
        start_new_session=True,
    )
    os.close(slave)
    try:
        shown = b""
        while b"rows deleted" not in shown:
            shown += os.read(master, 4096)
        os.write(master, b"\x13")
        assert process.wait(3 + PROMPTLY) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)
    told = json.loads(program.inside(None, "--status", "--json").stdout)
    assert (told["last_run"]["stop_reason"], told["running"]) == ("budget", [])
