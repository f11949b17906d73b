"""The fixtures: a server for the session, a database and the program for each test."""

from __future__ import annotations

import fcntl
import itertools
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from lab import SYSTEMS, TOP, Database, Program, Server
from servers import Proxy


def pytest_configure() -> None:
    """Let a session that is told to end stop its server, too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


#: The files that take longest, which therefore begin first: xdist gives each to one worker (tests/run).
SLOWEST = (
    *("guests/test_package.py", "database/test_budget.py", "database/test_cost.py", "faults/test_network.py"),
    *("faults/test_versions.py", "bench/test_bench.py", "database/test_throttle.py", "bench/test_online.py"),
    *("guests/test_runs.py", "faults/test_log.py", "database/test_check.py", "guests/test_schedule.py"),
    *("database/test_chains.py", "database/test_schemas.py", "database/test_side_by_side.py", "database/test_time.py"),
    *("faults/test_servers.py", "database/test_survivors.py", "faults/test_blocked_rows.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files first; all others as they are."""
    places = {name: place for place, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: places.get("/".join(item.path.parts[-2:]), len(places)))


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.remove()


_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def new_database(server: Server) -> Iterator[Callable[[], Database]]:
    """Make databases that live as long as the test session does."""
    made: list[Database] = []

    def make() -> Database:
        name = f"auth{next(_numbers)}"
        with server.connect() as connection:
            connection.execute(f"CREATE DATABASE {name} STRATEGY file_copy")  # half the work, where nothing is synced
        made.append(Database(server, name))
        return made[-1]

    yield make
    for database in made:
        database.close()


@pytest.fixture
def database(new_database: Callable[[], Database], server: Server) -> Iterator[Database]:
    """An empty database, dropped after the test."""
    database = new_database()
    yield database
    database.close()
    with server.connect() as connection:
        connection.execute(f"DROP DATABASE {database.name} WITH (FORCE)")


@pytest.fixture
def systems(database: Database) -> Database:
    """A database with the three systems, empty."""
    database.execute(SYSTEMS.read_text())
    return database


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    """A way to the server that can be broken."""
    proxy = Proxy(server)
    yield proxy
    proxy.close()


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The package and its source package, as packaging/build-deb builds them; once, whichever worker is first."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with (base / "built.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (base / "built").exists():
            part = base / "building"
            subprocess.run([TOP / "packaging" / "build-deb", part], check=True, stdout=subprocess.DEVNULL)
            part.rename(base / "built")
    return base / "built"


@pytest.fixture
def program(tmp_path: pathlib.Path) -> Iterator[Program]:
    program = Program(tmp_path)
    yield program
    program.kill()
