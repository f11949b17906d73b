"""The measurement of what an online service feels works; its figures are for a quiet machine."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

ONLINE = pathlib.Path(__file__).with_name("online.py")


def online(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ONLINE), "--tiny", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("table", ["refresh", "sicr"])
def test_every_way_to_purge_is_measured_and_fails_nobody(table: str) -> None:
    """Each contender has its line, with rows that went and without an error of the service."""
    done = online("--table", table)
    assert done.returncode == 0, done.stderr
    head, *lines = done.stdout.splitlines()[1:]
    figures = {line.split()[0]: line.split() for line in lines if ":" not in line}
    assert list(figures) == ["defaults", "quiet", "no-pause", "one-delete", "loop"], head
    for name, row in figures.items():
        assert (row[-3], row[-1] != "0") == ("0", True), name


def test_another_copy_of_the_program_is_measured_with_other_options(tmp_path: pathlib.Path) -> None:
    """A copy that cannot run is noticed; so is an option that it does not have."""
    other = tmp_path / "retention.py"
    other.write_text("raise SystemExit(3)")
    assert "the run failed" in online("--program", str(other), "defaults").stderr
    assert "the run failed" in online("--set", "no_such_option=1", "defaults").stderr
