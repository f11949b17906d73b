"""The program as pip installs it from a checkout, without anything of Debian's Python."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

from lab import TOP, clean_environment, log

import retention

SHIPPED = ["retention.py", "pyproject.toml", "README.md", "LICENSE"]


def test_pip_installs_the_same_command(tmp_path: pathlib.Path) -> None:
    """`pip install .` in a clean environment gives the command, whose log is lines on stdout.

    With the extra `journal`, which builds systemd-python in a minute, it can write to the journal, too: this is for a
    person's patience (RETENTION_SOAK_PACKAGE).
    """
    checkout, environment = tmp_path / "checkout", tmp_path / "environment"
    checkout.mkdir()  # a copy: building leaves its traces where the source is
    for name in SHIPPED:
        shutil.copy(TOP / name, checkout)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)

    def run(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
        program, *arguments = command
        return subprocess.run(
            [environment / "bin" / program, *arguments],
            **{
                "cwd": checkout,
                "capture_output": True,
                "text": True,
                "check": True,
                "env": clean_environment(),
                **options,
            },
        )

    def install(what: str) -> None:
        pip = ["/usr/bin/pip", "--python", str(environment), "install", "--quiet", "--disable-pip-version-check", what]
        subprocess.run(pip, cwd=checkout, env=clean_environment(), check=True)

    install(".")
    assert run("session-retention", "--version", cwd="/").stdout == f"session-retention {retention.VERSION}\n"
    here = subprocess.run([sys.executable, TOP / "retention.py", "--help"], capture_output=True, text=True, check=True)
    assert run("session-retention", "--help", cwd="/").stdout == here.stdout
    config = tmp_path / "config.toml"
    config.write_text(
        f'[database]\nconninfo = "host={tmp_path}"\n[metrics]\ntextfile = ""\nstate = ""\n'
        '[policy.p]\ntable = "t"\nage_column = "a"\nretention = "1d"\n'
    )
    tmp_path.chmod(0o755)
    result = run("session-retention", "--config", str(config), "--once", check=False)
    assert result.returncode == 69
    assert [line.event for line in log(result.stdout)] == ["job_failed"]

    assert run("python", "-c", "import systemd.journal", check=False).returncode == 1
    if "RETENTION_SOAK_PACKAGE" in os.environ:
        install(".[journal]")
        run("python", "-c", "import systemd.journal")
