"""The package as it is built: the same bytes each time, without a complaint of lintian, and its texts in step with the
program."""

from __future__ import annotations

import os
import pathlib
import platform
import re
import subprocess
import tarfile
import tomllib

import pytest
from lab import TOP

import retention

PACKAGING = TOP / "packaging"
MANUAL = PACKAGING / "debian" / "session-retention.8"


def git(*arguments: str | pathlib.Path, cwd: pathlib.Path = TOP) -> str:
    return subprocess.run(["git", *arguments], cwd=cwd, check=True, capture_output=True, text=True).stdout


def build(checkout: pathlib.Path, target: pathlib.Path, **environment: str) -> dict[str, bytes]:
    """Build the package and return its files."""
    subprocess.run(
        [checkout / "packaging" / "build-deb", target],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )
    return {path.name: path.read_bytes() for path in target.iterdir()}


@pytest.fixture(scope="module")
def unpacked(built: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    tree = tmp_path_factory.mktemp("tree")
    (package,) = built.glob("*.deb")
    subprocess.run(["dpkg-deb", "--raw-extract", package, tree], check=True)
    return tree


def test_the_same_checkout_gives_the_same_bytes(built: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Elsewhere, at another time, in another time zone and language, with another umask; and no file of the checkout is
    touched."""
    checkout = tmp_path / "another place" / "checkout"
    checkout.mkdir(parents=True)
    for name in git("ls-files", "-z").split("\0"):
        if name and (TOP / name).exists():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            (checkout / name).write_bytes((TOP / name).read_bytes())
            (checkout / name).chmod(0o700 if (TOP / name).stat().st_mode & 0o100 else 0o600)
    git("init", "--quiet", cwd=checkout)
    git("add", "--all", cwd=checkout)
    before = git("status", "--porcelain", "--ignored", cwd=checkout)
    old = os.umask(0o077)
    try:
        again = build(checkout, tmp_path / "dist", TZ="Asia/Tokyo", LC_ALL="C", DEB_BUILD_OPTIONS="nostrip")
    finally:
        os.umask(old)
    first = {path.name: path.read_bytes() for path in built.iterdir()}
    assert sorted(first) == sorted(again)
    assert [name for name in first if first[name] != again[name]] == []
    assert git("status", "--porcelain", "--ignored", cwd=checkout) == before


def test_lintian_has_nothing_to_say(built: pathlib.Path) -> None:
    """Neither of the package nor, in the release that has the same standards, of its source; down to the pedantic."""
    here = platform.freedesktop_os_release().get("VERSION_CODENAME")
    files = [path for path in built.iterdir() if path.suffix in (".deb", ".dsc")[: 2 if here == "bookworm" else 1]]
    assert files
    said = subprocess.run(
        ["lintian", "--allow-root", "--pedantic", "-EI", *files], capture_output=True, text=True, check=False
    )
    assert said.stdout + said.stderr == ""
    assert said.returncode == 0


def test_the_version_is_the_programs(built: pathlib.Path) -> None:
    """debian/changelog and retention.py have the same version."""
    assert [path.name for path in built.glob("*.deb")] == [f"session-retention_{retention.VERSION}_all.deb"]


def test_it_installs_the_program_as_it_is(unpacked: pathlib.Path) -> None:
    """But for the first line, which names Debian's own Python."""
    program = (unpacked / "usr" / "bin" / "session-retention").read_text().splitlines()
    assert program[0].split() == ["#!", "/usr/bin/python3"] or program[0] == "#!/usr/bin/python3"
    assert program[1:] == (TOP / "retention.py").read_text().splitlines()[1:]


def test_the_configuration_is_the_example_with_its_policies_as_comments(unpacked: pathlib.Path) -> None:
    """What is installed deletes nothing; uncommented, it is the documented example."""
    installed = (unpacked / "usr" / "share" / "session-retention" / "config.toml").read_text()
    assert list(tomllib.loads(installed)) == ["database", "run", "metrics"]
    with pytest.raises(retention.ConfigurationError) as refused:
        retention.read_configuration(str(unpacked / "usr" / "share" / "session-retention" / "config.toml"))
    assert [key for key, _ in refused.value.problems] == ["policy"]

    example = (TOP / "config.toml.example").read_text()
    before, head, policies = installed.partition("#[policy.sicr]")
    uncommented = before + re.sub(r"^#(?=\S)", "", head + policies, flags=re.MULTILINE)
    original, head, policies = example.partition("[policy.sicr]")
    assert (
        uncommented.splitlines()[1:]
        == (original + re.sub(r"^#(?=\S)", "", head + policies, flags=re.MULTILINE)).splitlines()[1:]
    )


def test_every_event_is_in_the_catalog() -> None:
    """One entry for each event, by its MESSAGE_ID; one for a failure says what to do."""
    catalog = (PACKAGING / "systemd" / "session-retention.catalog").read_text()
    entries = dict(re.findall(r"^-- ([0-9a-f]{32})\n(.*?)(?=^-- |\Z)", catalog, re.MULTILINE | re.DOTALL))
    events = {event.message_id: event for event in vars(retention).values() if isinstance(event, retention.Event)}
    assert sorted(entries) == sorted(events)
    for key, entry in entries.items():
        assert entry.startswith("Subject: ")
        assert len(entry.splitlines()[0]) <= 80
        assert "Documentation: man:session-retention(8)\n" in entry
        if events[key].level == retention.Level.ERROR:
            assert "What to do" in entry or "makes it\nso" in entry


def test_the_catalog_compiles(tmp_path: pathlib.Path) -> None:
    """journalctl takes it, and lists each entry."""
    directory = tmp_path / "usr" / "lib" / "systemd" / "catalog"
    directory.mkdir(parents=True)
    (tmp_path / "var" / "lib" / "systemd" / "catalog").mkdir(parents=True)
    text = (PACKAGING / "systemd" / "session-retention.catalog").read_text()
    (directory / "session-retention.catalog").write_text(text)
    compiled = subprocess.run(
        ["journalctl", f"--root={tmp_path}", "--update-catalog"], capture_output=True, text=True, check=True
    )
    assert compiled.stdout + compiled.stderr == ""
    listed = subprocess.run(
        ["journalctl", f"--root={tmp_path}", "--list-catalog"], capture_output=True, text=True, check=True
    ).stdout
    assert len(listed.splitlines()) == len(re.findall(r"^-- ", text, re.MULTILINE))


def test_the_manual_has_every_option_and_exit_status() -> None:
    """Those of --help, no more and no fewer; and man shows it without a warning."""
    text = MANUAL.read_text().replace("\\-", "-")
    helped = subprocess.run(
        ["/usr/bin/python3", TOP / "retention.py", "--help"], capture_output=True, text=True, check=True
    ).stdout
    options = r"(?<![\w-])--[a-z][a-z-]+"
    section = text.partition(".SH OPTIONS")[2].partition(".SH ")[0]
    assert set(re.findall(options, section)) == set(re.findall(options, helped.partition("exit status:")[0]))
    statuses = text.partition('.SH "EXIT STATUS"')[2].partition(".SH ")[0]
    assert re.findall(r"^\.B (\d+)$", statuses, re.MULTILINE) == [str(int(status)) for status in retention.Exit]
    shown = subprocess.run(
        ["man", "--warnings", "--local-file", MANUAL],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "MANROFFSEQ": "", "MANWIDTH": "80", "LC_ALL": "C.UTF-8"},
    )
    assert shown.stderr == ""
    assert "RUNBOOK" in shown.stdout


def test_the_source_package_has_what_git_knows(built: pathlib.Path) -> None:
    """All of it and nothing else: the package can be built from it again."""
    (archive,) = built.glob("*.tar.xz")
    with tarfile.open(archive) as tar:
        names = {member.name.partition("/")[2] for member in tar.getmembers() if not member.isdir()}
    known = {name for name in git("ls-files", "-z").split("\0") if name and (TOP / name).exists()}
    assert names == {re.sub("^packaging/debian/", "debian/", name) for name in known if not name.endswith(".gitignore")}
