"""The life of the package on a machine: installed, upgraded, removed, purged. The administrator's choices are kept."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator

import pytest
from guest import SUITES, Guest
from lab import TOP, until

SERVICE = "session-retention.service"
TIMER = "session-retention.timer"
CONFIG = "/etc/session-retention/config.toml"


def traces(guest: Guest) -> set[str]:
    """What is on the disk, but for what any package and any hour leaves: dpkg's files, caches, logs, the database."""
    unrelated = (
        "var/lib/dpkg var/lib/apt var/cache var/log var/lib/postgresql root tmp etc/passwd- etc/shadow- etc/group-"
    )
    leave = " -o ".join(f"-path /{path}" for path in (*unrelated.split(), "etc/gshadow-", "var/tmp"))
    found = guest.shell(f"find / -xdev \\( {leave} \\) -prune -o -type d -print -o -print").splitlines()
    return {path for path in found if "__pycache__" not in path}


def accounts(guest: Guest) -> str:
    return guest.shell("getent passwd; getent group")


def test_installing_asks_nothing_and_runs_nothing(bare: Guest, package: pathlib.Path) -> None:
    """Installed by a script: no question, no run, no timer, not even by preset, no row deleted; everything is in its
    place, with its owner and mode, and the command says what is missing before it can do anything."""
    bare.systems()
    bare.fill()
    bare.install(package)

    bare.exec("systemctl", "preset", TIMER)
    assert bare.show(SERVICE, "ExecMainStartTimestamp") == ""
    assert bare.events() == []
    assert bare.left() == [110, 110, 110]
    assert bare.exec("systemctl", "is-enabled", TIMER, check=False).stdout == "disabled\n"
    assert bare.show(TIMER, "ActiveState") == "inactive"
    assert bare.shell("systemctl list-timers --all --no-pager --plain --no-legend").count("session-retention") == 0
    assert bare.exec("systemctl", "is-system-running", check=False).stdout == "running\n"

    listed = bare.shell(f"""
        stat --format='%n %U:%G %a' /etc/session-retention {CONFIG} /usr/bin/session-retention \
            /usr/lib/systemd/system/{SERVICE} /usr/lib/systemd/system/{TIMER} \
            /usr/lib/systemd/catalog/session-retention.catalog /usr/share/man/man8/session-retention.8.gz \
            /var/lib/session-retention /var/lib/session-retention/metrics.prom
        getent passwd session-retention | cut -d: -f6,7
    """)
    assert listed.splitlines() == [
        "/etc/session-retention root:root 755",
        f"{CONFIG} root:session-retention 640",
        "/usr/bin/session-retention root:root 755",
        f"/usr/lib/systemd/system/{SERVICE} root:root 644",
        f"/usr/lib/systemd/system/{TIMER} root:root 644",
        "/usr/lib/systemd/catalog/session-retention.catalog root:root 644",
        "/usr/share/man/man8/session-retention.8.gz root:root 644",
        "/var/lib/session-retention session-retention:session-retention 755",
        "/var/lib/session-retention/metrics.prom session-retention:session-retention 644",
        "/nonexistent:/usr/sbin/nologin",
    ]

    for arguments in (["--check"], ["--once"], []):
        for user in ("", "session-retention"):
            refused = bare.exec("session-retention", *arguments, user=user, check=False)
            assert refused.returncode == 78
            said = refused.stdout + refused.stderr
            assert f"{CONFIG}: policy: no policy is enabled" in said
            assert "add a [policy.<name>] table" in said
    assert bare.left() == [110, 110, 110]


def test_the_first_night(bare: Guest, package: pathlib.Path) -> None:
    """As the manual has it: from a database that has never heard of the job to a timer that is enabled."""
    bare.systems(role=False)
    bare.fill()
    bare.install(package)
    bare.configure(run={"night_window_utc": "02:00-05:00"})
    bare.shell("session-retention --print-sql | sudo -u postgres psql --set=ON_ERROR_STOP=1 -d auth")
    bare.exec("systemctl", "enable", "--now", TIMER)
    checked = bare.exec("session-retention", "--check").stdout
    assert "error:" not in checked
    assert "warning:" not in checked
    foreseen = json.loads(bare.exec("session-retention", "--dry-run", "--json").stdout)["policies"]
    assert {name: policy["would_delete"] for name, policy in foreseen.items()} == {
        "sicr": 100,
        "refresh": 100,
        "tokens_expired": 100,
        "tokens_revoked": 0,
    }
    assert bare.left() == [110, 110, 110]
    bare.exec("session-retention", "--once")
    assert bare.left() == [10, 10, 10]
    assert bare.show(TIMER, "ActiveState") == "active"


def test_purged_it_leaves_nothing(bare: Guest, package: pathlib.Path) -> None:
    """Removed in mid-run the batch in flight is finished, and configuration, state and choices stay for the day when it
    is installed again; purged, the machine is as it was before."""
    users, before = accounts(bare), traces(bare)
    bare.install(package)
    bare.systems()
    bare.fill()
    bare.configure(run={"batch_size": 1, "pause": "50ms"})
    bare.put("secret", "/etc/session-retention/pgpass", 0o600, "session-retention")
    bare.exec("systemctl", "enable", "--now", TIMER)
    bare.exec("touch", "/var/lib/systemd/timers/stamp-session-retention.timer")
    bare.exec("systemctl", "start", "--no-block", SERVICE)
    until(lambda: bare.events().count("batch_deleted") > 2, "the first batches")

    bare.exec("apt-get", "remove", "--yes", "session-retention")
    (end,) = (entry for entry in bare.journal() if entry.get("EVENT") == "job_completed")
    assert end["STOP_REASON"] == "signal"
    assert bare.left() == [110 - int(end["SICR_DELETED"]), 110, 110]
    assert bare.show(TIMER, "ActiveState") == "inactive"
    assert bare.exec("systemctl", "is-system-running", check=False).stdout == "running\n"
    assert "No such file" in bare.exec("ls", "/usr/bin/session-retention", check=False).stderr

    bare.configure(run={"batch_size": 77})
    bare.install(package)
    assert bare.exec("systemctl", "is-enabled", TIMER).stdout == "enabled\n"
    assert "batch_size = 77" in bare.exec("session-retention", "--print-config").stdout
    assert "secret" in bare.shell("cat /etc/session-retention/pgpass")

    for command in (["purge"], ["install", "/root/" + package.name], ["purge"]):  # as new in between
        command = [*command, "session-retention"] if command == ["purge"] else command
        bare.exec("apt-get", "--yes", *command)
        if command[0] == "install":
            assert bare.exec("systemctl", "is-enabled", TIMER, check=False).stdout == "disabled\n"
            assert bare.exec("session-retention", "--once", check=False).returncode == 78
    assert traces(bare) - before == set()
    assert before - traces(bare) == set()
    assert accounts(bare) == users
    assert bare.shell("dpkg --audit") == ""
    assert bare.exec("dpkg-query", "--status", "session-retention", check=False).returncode == 1
    assert "session-retention" not in bare.shell(
        "journalctl --list-catalog --no-pager | tr A-Z a-z; systemctl list-units"
    )
    assert bare.exec("systemctl", "is-system-running", check=False).stdout == "running\n"


@pytest.fixture(scope="module", params=SUITES)
def old(request: pytest.FixtureRequest, package: pathlib.Path, previous: pathlib.Path) -> Iterator[Guest]:
    """A guest with the previous version, and rows that it could delete."""
    with Guest(request.param) as guest:
        guest.put(package, f"/root/{package.name}")
        guest.install(previous)
        guest.systems()
        yield guest


@pytest.fixture
def upgraded(old: Guest, previous: pathlib.Path) -> Guest:
    """The previous version as it was first installed, and a configuration that no version has shipped."""
    old.shell(f"apt-get purge --yes session-retention; systemctl unmask --quiet {TIMER}")
    old.install(previous)
    old.configure(run={"batch_size": 1, "pause": "50ms"})
    old.fill()
    old.forget()
    assert old.exec("session-retention", "--version").stdout == "session-retention 0.0.1\n"
    return old


def upgrade(guest: Guest, package: pathlib.Path) -> None:
    """Upgrade, with nobody at the keyboard; the configuration and its mode are as before, and the program is new."""
    look = f"cat {CONFIG}; stat --format='%U:%G %a %i %Y' {CONFIG}"
    before = guest.shell(look)
    guest.install(package)
    assert guest.shell(look) == before
    version = package.name.split("_")[1]
    assert guest.exec("session-retention", "--version").stdout == f"session-retention {version}\n"


@pytest.mark.parametrize(
    ("choice", "enabled", "active"),
    [
        ("enable --now", "enabled", "active"),
        ("enable", "enabled", "inactive"),
        ("disable --now", "disabled", "inactive"),
        ("mask --now", "masked", "inactive"),
    ],
)
def test_an_upgrade_keeps_what_the_administrator_chose(
    upgraded: Guest, package: pathlib.Path, choice: str, enabled: str, active: str
) -> None:
    """The timer is as it was, with the same next night; no run was started; the edited configuration is in use."""
    upgraded.shell(f"systemctl --quiet {choice} {TIMER}")
    following = upgraded.show(TIMER, "NextElapseUSecRealtime")
    upgraded.exec("chmod", "600", CONFIG)  # not ours, but the administrator's
    upgrade(upgraded, package)
    assert upgraded.exec("systemctl", "is-enabled", TIMER, check=False).stdout == f"{enabled}\n"
    assert upgraded.show(TIMER, "ActiveState") == active
    assert upgraded.show(TIMER, "NextElapseUSecRealtime") == following
    assert upgraded.events() == []
    assert upgraded.left() == [110, 110, 110]


def test_an_upgrade_does_not_touch_a_run(upgraded: Guest, package: pathlib.Path) -> None:
    """A run that is under way goes on through the upgrade, as the same process, and can then be stopped as ever."""
    upgraded.exec("systemctl", "enable", "--quiet", "--now", TIMER)
    upgraded.exec("systemctl", "start", "--no-block", SERVICE)
    until(lambda: upgraded.events().count("batch_deleted") > 2, "the first batches")
    process = upgraded.show(SERVICE, "MainPID")
    upgrade(upgraded, package)
    deleted = upgraded.events().count("batch_deleted")
    assert upgraded.show(SERVICE, "MainPID") == process
    until(lambda: upgraded.events().count("batch_deleted") > deleted, "a batch after the upgrade")
    upgraded.exec("systemctl", "stop", SERVICE)
    assert upgraded.show(SERVICE, "Result") == "success"
    assert upgraded.left() == [110 - upgraded.events().count("batch_deleted"), 110, 110]
    assert upgraded.events().count("job_started") == 1


def test_an_upgrade_does_not_bring_back_a_configuration(upgraded: Guest, package: pathlib.Path) -> None:
    """A configuration that was deleted stays so, and the command says so."""
    upgraded.exec("rm", CONFIG)
    upgraded.install(package)
    assert f"{CONFIG}: cannot be read" in upgraded.exec("session-retention", "--once", check=False).stderr


def test_node_exporter_finds_the_metrics(upgraded: Guest, package: pathlib.Path) -> None:
    """Where its directory is, a link there leads to the metrics file, for as long as the package is installed."""
    link = "/var/lib/prometheus/node-exporter/session-retention.prom"
    upgraded.exec("mkdir", "-p", "/var/lib/prometheus/node-exporter")
    upgraded.install(package)
    assert upgraded.shell(f"readlink -e {link}") == "/var/lib/session-retention/metrics.prom\n"
    upgraded.exec("apt-get", "remove", "--yes", "session-retention")
    assert upgraded.exec("test", "-L", link, check=False).returncode == 1


def test_the_package_passes_its_own_tests(guest: Guest) -> None:
    """The tests that Debian would run against the installed package, one of them a purge in a throw-away cluster."""
    guest.put("", CONFIG)
    for test in ("smoke", "purge"):
        guest.put(TOP / "packaging" / "debian" / "tests" / test, f"/root/{test}", 0o755)
        guest.exec(f"/root/{test}")


def test_lintian_has_nothing_to_say_on_debian_13(package: pathlib.Path) -> None:
    """Nor has the newer release's lintian. (Of the source package it would say that its standards are those of 12.)"""
    with Guest("trixie") as guest:
        guest.put(package, "/root/package.deb")
        said = guest.exec("lintian", "--allow-root", "--pedantic", "-EI", "/root/package.deb")
        assert said.stdout + said.stderr == ""
