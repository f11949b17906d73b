"""The fixtures: the package, and guests that have it."""

from __future__ import annotations

import pathlib
import subprocess
from collections.abc import Iterator

import pytest
from guest import RUNS_ON, SUITES, Guest


@pytest.fixture(scope="session")
def package(built: pathlib.Path) -> pathlib.Path:
    """The package, as packaging/build-deb builds it from this checkout."""
    (package,) = built.glob("session-retention_*_all.deb")
    return package


@pytest.fixture(scope="session")
def previous(package: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The version before: an older number, another program, and another configuration to start from."""
    tree = tmp_path_factory.mktemp("previous") / "tree"
    subprocess.run(["dpkg-deb", "--raw-extract", package, tree], check=True)

    def edit(path: str, old: str, new: str) -> None:
        text = (tree / path).read_text()
        assert old in text
        (tree / path).write_text(text.replace(old, new))

    version = package.name.split("_")[1]
    edit("DEBIAN/control", f"Version: {version}", "Version: 0.0.1")
    edit("usr/bin/session-retention", f'VERSION = "{version}"', 'VERSION = "0.0.1"')
    edit("usr/share/session-retention/config.toml", "batch_size = 5000", "batch_size = 50000")
    built = tree.parent / "session-retention_0.0.1_all.deb"
    subprocess.run(["dpkg-deb", "--build", "--root-owner-group", tree, built], check=True, stdout=subprocess.DEVNULL)
    return built


@pytest.fixture(params=SUITES)
def bare(request: pytest.FixtureRequest) -> Iterator[Guest]:
    """A guest of its own for the test, without the package."""
    with Guest(request.param) as guest:
        yield guest


@pytest.fixture(scope="session", params=RUNS_ON)
def machine(request: pytest.FixtureRequest, package: pathlib.Path) -> Iterator[Guest]:
    """A guest with the package and the three systems, for all tests that leave these in place."""
    with Guest(request.param) as guest:
        guest.install(package)
        guest.systems()
        guest.put("log_connections = on\n", f"{guest.cluster}/conf.d/log.conf")
        guest.sql("SELECT pg_reload_conf()", "postgres")
        yield guest


@pytest.fixture
def guest(machine: Guest) -> Iterator[Guest]:
    """A guest as it is after the installation, with a configuration and 100 rows of each system that are to go."""
    machine.exec("systemctl", "start", machine.server)
    machine.configure()
    machine.fill()
    machine.forget()
    yield machine
    machine.shell("""
        systemctl disable --quiet --now session-retention.timer
        systemctl stop session-retention.service
        rm -rf /etc/systemd/system/session-retention*
        rm -f /etc/session-retention/* /var/lib/session-retention/* /var/lib/systemd/timers/stamp-session-retention.*
        systemctl daemon-reload
        systemctl reset-failed
        systemd-tmpfiles --create session-retention.conf
    """)
