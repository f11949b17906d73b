"""The package, thoroughly: what needs the network, or minutes."""

from __future__ import annotations

import os
import pathlib
import subprocess
import time
from collections.abc import Iterator

import pytest
from guest import SUITES, Guest, mirrors
from lab import TOP, until

pytestmark = pytest.mark.skipif("RETENTION_SOAK_PACKAGE" not in os.environ, reason="RETENTION_SOAK_PACKAGE is not set")

SERVICE = "session-retention.service"
TIMER = "session-retention.timer"


@pytest.fixture(scope="module")
def package(built: pathlib.Path) -> pathlib.Path:
    (package,) = built.glob("*.deb")
    return package


@pytest.fixture(params=SUITES)
def guest(request: pytest.FixtureRequest, package: pathlib.Path) -> Iterator[Guest]:
    with Guest(request.param) as guest:
        guest.install(package)
        guest.systems()
        guest.fill()
        yield guest


@pytest.mark.parametrize("suite", SUITES)
def test_piuparts_finds_nothing(package: pathlib.Path, tmp_path: pathlib.Path, suite: str) -> None:
    """Installed, removed and purged in a minimal Debian with systemd, with its dependencies from Debian alone."""
    subprocess.run([TOP / "packaging" / "apt-install", "piuparts"], check=True)
    base, sources = tmp_path / "base.tar.gz", mirrors(suite)
    subprocess.run(
        ["mmdebstrap", "--quiet", "--variant=minbase", "--include=systemd,systemd-sysv", suite, base, *sources],
        check=True,
    )
    mirror = sources[0].split("] ")[1].split()[0]
    ignored = "--ignore-regex=/var/cache/debconf/.*"  # debconf's
    tested = subprocess.run(
        ["piuparts", f"--distribution={suite}", f"--basetgz={base}", f"--mirror={mirror} main", ignored, package],
        capture_output=True,
        text=True,
        check=False,
    )
    assert tested.returncode == 0, tested.stdout[-5000:]
    assert "PASS: All tests." in tested.stdout


def test_debian_12_is_upgraded_to_13(package: pathlib.Path) -> None:
    """With the package installed and its timer enabled: nothing is asked, nothing runs, the timer and the configuration
    are as before, and the job works with the newer Python, libraries and systemd."""
    with Guest("bookworm", network=True) as guest:
        guest.install(package)
        guest.systems()
        guest.fill()
        guest.configure(run={"night_window_utc": "02:00-05:00"})
        guest.exec("systemctl", "enable", "--now", TIMER)
        guest.forget()
        keep = "Dpkg::Options::=--force-confold"
        guest.put("\n".join([*mirrors("trixie"), ""]), "/etc/apt/sources.list")
        guest.shell(
            f"apt-get update -qq; apt-get --yes -qq -o {keep} full-upgrade",
            env={"DEBIAN_FRONTEND": "noninteractive"},
            timeout=1500,
        )
        assert guest.events() == []
        guest.reboot()
        assert guest.shell("cat /etc/debian_version").startswith("13")
        assert guest.show(TIMER, "ActiveState") == "active"
        assert guest.events() == []
        guest.configure()
        guest.exec("systemctl", "start", SERVICE)
        assert guest.left() == [10, 10, 10]


def test_a_run_that_hangs_half_way_is_ended(guest: Guest) -> None:
    """A process that has stopped making progress gets three times its last statement's time-out (10 s more than
    configured) and a minute, no more, and the next run finishes the work."""
    guest.configure(database={"statement_timeout": "1s"}, run={"batch_size": 1, "pause": "100ms"})
    guest.drop_in(SERVICE, "[Service]\nTimeoutStartSec=5s\n")
    guest.exec("systemctl", "start", "--no-block", SERVICE)
    until(lambda: guest.events().count("batch_deleted") > 2, "the first batches")
    began = time.monotonic()
    guest.exec("kill", "-STOP", guest.show(SERVICE, "MainPID"))
    until(lambda: guest.show(SERVICE, "Result") == "timeout", "its end", 120)
    assert time.monotonic() - began < 3 * (1 + 10) + 60 + 10
    guest.configure()
    guest.exec("systemctl", "start", SERVICE)
    assert guest.left() == [10, 10, 10]


def test_autopkgtest_passes(package: pathlib.Path) -> None:
    """The package's own tests, started as Debian starts them."""
    with Guest("bookworm", packages=("autopkgtest", "dpkg-dev")) as guest:
        for path in package.parent.iterdir():
            guest.put(path, f"/root/dist/{path.name}")
        guest.install(package)
        tested = guest.shell("cd /root/dist; autopkgtest --no-built-binaries *.dsc -- null 2>&1", timeout=600)
        assert "smoke                PASS (superficial)\npurge                PASS\n" in tested
