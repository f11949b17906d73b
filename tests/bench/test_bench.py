"""The comparison with other ways to delete works, in small; what it finds is for a person to read."""

from __future__ import annotations

import pathlib
import re
import subprocess

RUN = pathlib.Path(__file__).parent / "run"


def test_every_section_measures_and_curves_are_drawn(tmp_path: pathlib.Path) -> None:
    """`run --tiny` goes through all of its sections, and writes a picture."""
    picture = tmp_path / "bench.png"
    result = subprocess.run([RUN, "--tiny", "--picture", picture], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    sections = set(re.findall(r"^(\w+):.*\n-+$", result.stdout, re.MULTILINE))
    assert sections == {"sicr", "chains", "growth", "idle", "nightly", "wal", "instances", "peers"}
    assert result.stdout.count("\nprogram ") >= 5
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")


def test_without_gnuplot_it_says_what_to_install() -> None:
    """Nothing is measured that could then not be drawn."""
    result = subprocess.run([RUN, "--tiny"], capture_output=True, text=True, env={"PATH": "/nowhere"})
    assert result.returncode == 2
    assert "apt-get install gnuplot-nox" in result.stderr
