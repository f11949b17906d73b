"""Started as root: the credential is read, then root is given up for good, before anything is connected to.

The user exists in a mount namespace alone, so the machine stays as it is.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import socket
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from lab import PROGRAM, Listener, Program, configuration

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be given up")

UID, GID, EXTRA = 64123, 64124, 64125

#: What the program is told about itself, by an exit hook of the interpreter it runs under.
HOOK = """
import atexit, json, os, sys
def tell():
    names = ("HOME", "USER", "LOGNAME")
    told = {"cwd": os.getcwd(), "groups": sorted(os.getgroups()), **{name: os.environ.get(name) for name in names}}
    with open(os.environ["TOLD"], "w") as stream:
        json.dump({**told, "ids": [*os.getresuid(), *os.getresgid()]}, stream)
atexit.register(tell)
"""


@dataclass
class Machine:
    """A view of this machine in which the user exists, and a directory that user may write to."""

    directory: pathlib.Path
    home: pathlib.Path
    listener: Listener

    @property
    def prefix(self) -> tuple[str, ...]:
        """Run a command in that view, as root, in a directory that only root may enter, with root's environment."""
        script = (
            f"mount --bind {self.directory}/passwd /etc/passwd && mount --bind {self.directory}/group /etc/group &&"
            f" cd {self.directory}/root && exec env HOME=/root USER=root LOGNAME=root"
            f' PYTHONPATH={self.directory} TOLD={self.home}/told "$@"'
        )
        return ("unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh")


def make(directory: pathlib.Path, home: str) -> Machine:
    machine = Machine(directory, directory / "home", Listener(directory))
    passwd, group = pathlib.Path("/etc/passwd").read_text(), pathlib.Path("/etc/group").read_text()
    (directory / "passwd").write_text(f"{passwd}session-retention:x:{UID}:{GID}::{home}:/usr/sbin/nologin\n")
    (directory / "group").write_text(
        f"{group}session-retention:x:{GID}:\nretention-extra:x:{EXTRA}:session-retention\n"
    )
    (directory / "sitecustomize.py").write_text(HOOK)
    (directory / "root").mkdir(mode=0o700)
    machine.home.mkdir()
    os.chown(machine.home, UID, GID)
    return machine


@pytest.fixture
def directory() -> Iterator[pathlib.Path]:
    """A short path that everybody can reach."""
    directory = pathlib.Path(tempfile.mkdtemp(prefix="retention-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def machine(directory: pathlib.Path) -> Machine:
    """The usual view: the user's home exists."""
    return make(directory, f"{directory}/home")


@pytest.fixture
def program(directory: pathlib.Path) -> Iterator[Program]:
    """The program, its configuration as the package installs it: root's, and readable by the user's group."""
    program = Program(directory)
    yield program
    program.kill()


def write(program: Program, machine: Machine, conninfo: str | None = None) -> None:
    """The configuration, and a state file in the user's own directory."""
    state = {"state": str(machine.home / "state.toml")}
    program.write(configuration(conninfo or machine.listener.conninfo, metrics=state))
    os.chown(program.path, 0, GID)
    program.path.chmod(0o640)


def peer(connection: socket.socket) -> tuple[int, int]:
    """User and group of whoever connected, as they were when they did."""
    _, uid, gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return uid, gid


def told(machine: Machine) -> dict[str, object]:
    result = json.loads((machine.home / "told").read_text())
    assert isinstance(result, dict)
    return result


@pytest.mark.parametrize("arguments", [("--once",), ("--dry-run",), ()], ids=["once", "dry run", "scheduled"])
def test_root_is_given_up_before_anything_is_connected_to(
    program: Program, machine: Machine, arguments: tuple[str, ...]
) -> None:
    """The server never sees root: by hand and by the timer the job is the same user."""
    write(program, machine)
    process = program.start(None, *arguments, prefix=machine.prefix)
    with machine.listener.accept() as connection:
        assert peer(connection) == (UID, GID)
        status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Uid"].split() == [str(UID)] * 4
    assert fields["Gid"].split() == [str(GID)] * 4
    assert set(fields["Groups"].split()) == {str(GID), str(EXTRA)}
    assert fields["CapEff"].strip("0") == fields["CapPrm"].strip("0") == ""
    assert program.finish(process).returncode == 69


def test_environment_and_directory_are_the_users(program: Program, machine: Machine) -> None:
    """What is found through HOME, USER, LOGNAME and the working directory is the user's, not root's."""
    write(program, machine)
    process = program.start(None, "--once", prefix=machine.prefix)
    machine.listener.accept().close()
    program.finish(process)
    assert told(machine) == {
        "HOME": str(machine.home),
        "USER": "session-retention",
        "LOGNAME": "session-retention",
        "cwd": str(machine.home),
        "groups": sorted([GID, EXTRA]),
        "ids": [UID] * 3 + [GID] * 3,
    }


def test_a_home_that_does_not_exist_is_no_hindrance(program: Program, directory: pathlib.Path) -> None:
    """A system user has no home: the program works from a directory that is there for everybody."""
    machine = make(directory, "/nonexistent")
    write(program, machine)
    process = program.start(None, "--once", prefix=machine.prefix)
    machine.listener.accept().close()
    assert program.finish(process).returncode == 69
    assert (told(machine)["HOME"], told(machine)["cwd"]) == ("/nonexistent", "/")


def test_the_users_service_file_is_used(program: Program, machine: Machine) -> None:
    """libpq looks in the user's home, as it does when the timer starts the job."""
    service = machine.home / ".pg_service.conf"
    service.write_text(f"[auth]\nhost={machine.directory}\ndbname=auth\n")
    write(program, machine, "service=auth")
    process = program.start(None, "--once", prefix=machine.prefix)
    machine.listener.accept().close()
    assert program.finish(process).returncode == 69


def message(connection: socket.socket, head: int) -> tuple[bytes, bytes]:
    """One message of the client: `head` bytes of type, then what the length says."""
    connection.settimeout(30)
    kind = connection.recv(head, socket.MSG_WAITALL) if head else b""
    (length,) = struct.unpack("!I", connection.recv(4, socket.MSG_WAITALL))
    return kind, connection.recv(length - 4, socket.MSG_WAITALL)


@pytest.mark.parametrize("ending", ["", "\n"], ids=["bare", "with a newline"])
def test_a_credential_of_root_is_the_password(program: Program, machine: Machine, ending: str) -> None:
    """Read while the program is still root, used when it no longer is; an editor's newline is not part of it."""
    write(program, machine)
    credentials = machine.directory / "credentials"
    credentials.mkdir(mode=0o700)
    password = credentials / "db-password"
    password.write_text("päss wörd" + ending)
    password.chmod(0o400)
    process = program.start(
        None, "--once", prefix=machine.prefix, env={"CREDENTIALS_DIRECTORY": str(credentials), "PGPASSWORD": "other"}
    )
    with machine.listener.accept() as connection:
        _, startup = message(connection, 0)
        assert b"user\0retention\0" in startup
        connection.sendall(b"R" + struct.pack("!II", 8, 3))  # asks for the password in clear text
        assert message(connection, 1) == (b"p", "päss wörd".encode() + b"\0")
    result = program.finish(process)
    assert result.returncode == 69
    assert "wörd" not in result.output


def test_the_role_is_the_users_where_none_is_named(program: Program, machine: Machine) -> None:
    """`dbname=auth` alone logs in as session-retention, whoever started the command."""
    write(program, machine, f"host={machine.directory} dbname=auth")
    process = program.start(None, "--once", prefix=machine.prefix)
    with machine.listener.accept() as connection:
        assert b"user\0session-retention\0" in message(connection, 0)[1]
    program.finish(process)


def test_a_relative_path_means_what_the_operator_meant(program: Program, machine: Machine) -> None:
    """`--config config.toml` is where the command was given, not in the user's home."""
    write(program, machine)
    program.path = pathlib.Path(program.path.name)
    prefix = (*machine.prefix, "env", "--chdir", str(machine.directory))
    process = program.start(None, "--once", prefix=prefix)
    machine.listener.accept().close()
    assert program.finish(process).returncode == 69


def test_a_configuration_that_the_user_may_not_read_is_refused(program: Program, machine: Machine) -> None:
    """A run by hand shows the fault that the timer's run would have."""
    write(program, machine)
    program.path.chmod(0o600)
    result = program(None, "--once", prefix=machine.prefix)
    assert result.returncode == 78, result.output
    assert "ermission denied" in result.output
    assert machine.listener.untouched


def test_print_config_reads_what_a_run_reads(program: Program, machine: Machine) -> None:
    """It gives up root as well, so it cannot show a file that the run could not have read."""
    write(program, machine)
    assert program(None, "--print-config", prefix=machine.prefix).returncode == 0
    assert told(machine)["ids"] == [UID] * 3 + [GID] * 3
    program.path.chmod(0o600)
    assert program(None, "--print-config", prefix=machine.prefix).returncode == 78


def test_without_the_user_root_stays_root(program: Program, machine: Machine) -> None:
    """In a checkout there is no such user, and the program runs as whoever started it."""
    if subprocess.run(["getent", "passwd", "session-retention"], stdout=subprocess.DEVNULL).returncode == 0:
        pytest.skip("the user exists on this machine")
    write(program, machine)
    process = program.start(None, "--once")
    with machine.listener.accept() as connection:
        assert peer(connection) == (0, 0)
    program.finish(process)


def test_who_is_not_root_gives_up_nothing(program: Program, machine: Machine) -> None:
    """The timer starts the job as the user already; any other user stays who they are."""
    write(program, machine)
    program.path.chmod(0o644)
    prefix = (*machine.prefix, "setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups")
    process = program.start(None, "--once", prefix=prefix, env={"PYTHONPATH": ""})
    with machine.listener.accept() as connection:
        assert peer(connection)[0] not in (0, UID)
    assert program.finish(process).returncode == 69


def test_a_user_without_a_name_is_told_by_number(tmp_path: pathlib.Path) -> None:
    """In a container there may be no entry for who runs it; what it cannot read is a clear error all the same."""
    copy = pathlib.Path(tempfile.mkdtemp()) / "retention.py"
    shutil.copy(PROGRAM, copy)
    copy.parent.chmod(0o755)
    config = tmp_path / "config.toml"
    config.write_text("")
    config.chmod(0o600)
    command = ["setpriv", f"--reuid={UID}", "--clear-groups", "env", "-i", "/usr/bin/python3", "-B", str(copy)]
    done = subprocess.run(
        [*command, "--check", "-c", str(config)], capture_output=True, text=True, check=False, cwd="/"
    )
    shutil.rmtree(copy.parent)
    assert done.returncode == 78
    assert (f"by the user {UID}: Permission denied" in done.stdout, done.stderr) == (True, "")
