"""packaging/demo: what it shows is what happens, and nothing of it stays."""

from __future__ import annotations

import contextlib
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

import pytest
from lab import TOP, clean_environment

DEMO = TOP / "packaging" / "demo"


@pytest.fixture
def place() -> Iterator[pathlib.Path]:
    """Where the demo makes its temporary directory; short, as the name of a socket has to be."""
    place = pathlib.Path(tempfile.mkdtemp(prefix="demo-"))
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


def start(place: pathlib.Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [DEMO],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**clean_environment(), "TMPDIR": str(place), "PGHOST": "/nonexistent"},
    )


def traces(place: pathlib.Path) -> list[str]:
    """Files there, and processes that were started with its name."""
    commands = []
    for process in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # gone in the meantime
            commands.append(process.read_text())
    return [*map(str, place.iterdir()), *(command for command in commands if str(place) in command)]


def test_the_demo_purges_its_rows_and_cleans_up(place: pathlib.Path) -> None:
    """Before: rows past retention in each table; after: none but those of the live chain; then no trace."""
    process = start(place)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    rows = re.findall(r"^ (\S+) +\| +(\d+) \| +(\d+) \| +(\d+)$", output, re.MULTILINE)
    past = {"identity.sign_in_confirmation_requests": 4000, "identity.refresh_sessions": 5022, "refresh_tokens": 3000}
    left = {"identity.sign_in_confirmation_requests": 0, "identity.refresh_sessions": 22, "refresh_tokens": 0}
    assert [(table, int(number)) for table, _, number, _ in rows] == [*past.items(), *left.items()]
    assert traces(place) == []


def test_an_interrupted_demo_cleans_up(place: pathlib.Path) -> None:
    """Ended while its server runs, it stops the server and removes the directory."""
    process = start(place)
    assert process.stdout
    for line in process.stdout:
        if line.startswith("== Before"):
            break
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert traces(place) == []
