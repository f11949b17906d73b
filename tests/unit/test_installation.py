"""The program as pip installs it from a checkout."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys

from lab import TOP

import retention

SHIPPED = ["retention.py", "pyproject.toml", "README.md", "LICENSE"]


def test_pip_installs_a_working_command(tmp_path: pathlib.Path) -> None:
    """`pip install .` in a fresh environment gives the command, with what it depends on from PyPI."""
    checkout, environment = tmp_path / "checkout", tmp_path / "environment"
    checkout.mkdir()  # a copy: building leaves its traces where the source is
    for name in SHIPPED:
        shutil.copy(TOP / name, checkout)
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    subprocess.run(
        [environment / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", "."],
        cwd=checkout,
        check=True,
    )
    answer = subprocess.run(
        [environment / "bin" / "session-retention", "--version"], cwd="/", capture_output=True, text=True, check=True
    )
    assert retention.VERSION in answer.stdout
