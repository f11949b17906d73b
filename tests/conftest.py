"""The fixtures: a server for the session, a database and the program for each test."""

from __future__ import annotations

import itertools
import pathlib
import signal
import sys
from collections.abc import Callable, Iterator

import pytest
from lab import SYSTEMS, Database, Program, Server
from servers import Proxy


def pytest_configure() -> None:
    """Let a session that is told to end stop its server, too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


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
            connection.execute(f"CREATE DATABASE {name}")
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


@pytest.fixture
def program(tmp_path: pathlib.Path) -> Iterator[Program]:
    program = Program(tmp_path)
    yield program
    program.kill()
