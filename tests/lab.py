"""A private PostgreSQL server for the tests, databases with the three systems, and the program as its users run it.

The server listens on a socket in a temporary directory and nowhere else; it dies with the test session. Tests that
need no server do not start it. The program runs under the interpreter that runs the tests.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psycopg
import tomli_w

TOP = pathlib.Path(__file__).resolve().parent.parent
PROGRAM = TOP / "retention.py"
SYSTEMS = TOP / "tests" / "systems.sql"
#: What users are promised, in seconds from a signal to the end of a run; and what a loaded machine may add.
PROMPTLY = 5.0 + 3.0

#: The policies of the three systems, as config.toml.example has them.
POLICIES: dict[str, dict[str, Any]] = {
    "sicr": {
        "table": "identity.sign_in_confirmation_requests",
        "age_column": "created_at",
        "retention": "30d",
    },
    "refresh": {
        "table": "identity.refresh_sessions",
        "age_column": "updated_at",
        "retention": "90d",
        "only": {"status": ["Rotated", "Revoked", "Expired"]},
        "parent_column": "parent_session_id",
    },
    "tokens_expired": {
        "title": "SES-009: Refresh token table cleanup",
        "table": "refresh_tokens",
        "expiry_column": "expires_at",
        "grace": "0s",
    },
    "tokens_revoked": {
        "table": "refresh_tokens",
        "expiry_column": "expires_at",
        "grace": "24h",
        "only": {"is_revoked": [True]},
    },
}


def binaries() -> pathlib.Path:
    """The newest installed server's programs, as Debian lays them out."""
    found = sorted(pathlib.Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: int(p.parts[-3]))
    if not found:
        raise RuntimeError("no PostgreSQL server is installed: run tests/run, which installs it")
    return found[-1].parent


def as_postgres(*command: str | pathlib.Path) -> list[str]:
    """The server refuses to run as root: run the command as the user that its package made."""
    prefix = ["setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups"] if os.geteuid() == 0 else []
    return [*prefix, *map(str, command)]


class Server:
    """A PostgreSQL server on a private socket, without durability. Superuser `postgres`, job's role `retention`."""

    def __init__(
        self, environment: dict[str, str] | None = None, *, programs: pathlib.Path | None = None, settings: str = ""
    ) -> None:
        """`programs` are those of another version, `settings` are lines of postgresql.conf beside ours."""
        self.programs = programs or binaries()
        #: What the server's environment has beside ours: change it between stop() and start(), for another clock, say.
        self.environment = environment or {}
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="retention-pg-"))
        self.data = self.directory / "data"
        self.log = self.directory / "server.log"
        if os.geteuid() == 0:
            shutil.chown(self.directory, "postgres", "postgres")
        self.directory.chmod(0o755)
        initdb: list[str | pathlib.Path] = [
            self.programs / "initdb",
            "--pgdata",
            self.data,
            "--username=postgres",
            "--auth=trust",
        ]
        subprocess.run(
            as_postgres(*initdb, "--encoding=UTF8", "--locale=C.UTF-8", "--no-sync"),
            check=True,
            stdout=subprocess.DEVNULL,
            cwd="/",
        )
        with (self.data / "postgresql.conf").open("a") as conf:
            conf.write(
                f"listen_addresses = ''\nunix_socket_directories = '{self.directory}'\nfsync = off\n"
                "shared_buffers = 256MB\nmax_connections = 60\nautovacuum = off\ntimezone = 'UTC'\n"
                f"max_wal_size = 4GB\nmax_prepared_transactions = 4\nlog_min_messages = warning\n{settings}\n"
            )
        self.start()
        with self.connect() as connection:
            connection.execute("CREATE ROLE retention LOGIN")

    def pg_ctl(self, *arguments: str | pathlib.Path) -> None:
        environment = [f"{name}={value}" for name, value in self.environment.items()]
        pg_ctl: list[str | pathlib.Path] = [
            self.programs / "pg_ctl",
            "--pgdata",
            self.data,
            "--log",
            self.log,
            "--wait",
        ]
        subprocess.run(
            as_postgres("env", *environment, *pg_ctl, *arguments), check=True, stdout=subprocess.DEVNULL, cwd="/"
        )

    def start(self) -> None:
        self.pg_ctl("start")

    def stop(self, mode: str = "immediate") -> None:
        self.pg_ctl("--mode", mode, "stop")

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.directory)

    def conninfo(self, dbname: str = "postgres", user: str = "postgres") -> str:
        return f"host={self.directory} dbname={dbname} user={user}"

    def connect(self, dbname: str = "postgres", **options: Any) -> psycopg.Connection[Any]:
        options.setdefault("autocommit", True)
        return psycopg.connect(self.conninfo(dbname), **options)


@dataclass
class Database:
    """One database on the server, seen as its owner; `conninfo` is what the job's configuration holds."""

    server: Server
    name: str
    user: str = "retention"
    connections: list[psycopg.Connection[Any]] = field(default_factory=list)

    @property
    def conninfo(self) -> str:
        return self.server.conninfo(self.name, self.user)

    def connect(self, **options: Any) -> psycopg.Connection[Any]:
        """Another session, of the superuser, to hold locks or snapshots; closed with the test."""
        connection = self.server.connect(self.name, **options)
        self.connections.append(connection)
        return connection

    @property
    def owner(self) -> psycopg.Connection[Any]:
        if not self.connections or self.connections[0].closed:
            self.connections.insert(0, self.server.connect(self.name))
        return self.connections[0]

    def execute(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run a statement (several, without parameters) as the owner and return the rows of the last, if it has any."""
        cursor = self.owner.execute(statement, parameters or None)
        return cursor.fetchall() if cursor.description else []

    def value(self, statement: str, *parameters: Any) -> Any:
        ((value,),) = self.execute(statement, *parameters)
        return value

    def count(self, table: str, where: str = "true") -> int:
        return int(self.value(f"SELECT count(*) FROM {table} WHERE {where}"))

    def grant(self, table: str, *, select: str, update: str = "") -> None:
        """The least that the job needs on a table: `select` the columns it names, `update` one (or the first)."""
        first = update or select.split(",")[0]
        self.execute(f"GRANT SELECT (ctid, xmax, {select}), UPDATE ({first}), DELETE ON {table} TO retention")

    def close(self) -> None:
        for connection in self.connections:
            connection.close()


@dataclass
class Result:
    """What one run of the program left behind."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        result = json.loads(self.stdout)
        assert isinstance(result, dict)
        return result

    @property
    def policies(self) -> dict[str, dict[str, Any]]:
        policies = self.json["policies"]
        assert isinstance(policies, dict)
        return policies

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def configuration(
    conninfo: str,
    policies: dict[str, dict[str, Any]] | None = None,
    *,
    database: dict[str, Any] | None = None,
    metrics: dict[str, Any] | None = None,
    **run: Any,
) -> dict[str, Any]:
    """A configuration without pause, night window or metrics file: a test names what it changes."""
    return {
        "database": {"conninfo": conninfo, "connect_retry": "0s", **(database or {})},
        "run": {"pause": "0s", "night_window_utc": "", **run},
        "metrics": {"textfile": "", **(metrics or {})},
        "policy": POLICIES if policies is None else policies,
    }


class Program:
    """The program, with a configuration written for it: `program(config, "--once", "--json")`."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        self.path = directory / "config.toml"
        self.running: list[subprocess.Popen[str]] = []

    def write(self, config: dict[str, Any] | str | bytes) -> pathlib.Path:
        """Write the configuration; a dictionary gets a state file in the test's own directory."""
        if isinstance(config, dict):
            metrics = {"state": str(self.directory / "state.toml"), **config.get("metrics", {})}
            config = tomli_w.dumps({**config, "metrics": metrics})
        self.path.write_bytes(config.encode() if isinstance(config, str) else config)
        return self.path

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, str(PROGRAM), "--config", str(self.path), *arguments]

    def start(
        self,
        config: dict[str, Any] | str | bytes | None,
        *arguments: str,
        env: dict[str, str] | None = None,
        prefix: tuple[str, ...] = (),
    ) -> subprocess.Popen[str]:
        """Start it and return at once; `prefix` is a command to run it under. What runs on is killed with the test."""
        if config is not None:
            self.write(config)
        process = subprocess.Popen(
            [*prefix, *self.command(*arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**clean_environment(), **(env or {})},
            cwd="/",
        )
        self.running.append(process)
        return process

    @staticmethod
    def finish(process: subprocess.Popen[str], timeout: float = 120) -> Result:
        stdout, stderr = process.communicate(timeout=timeout)
        return Result(process.returncode, stdout, stderr)

    def __call__(
        self,
        config: dict[str, Any] | str | bytes | None,
        *arguments: str,
        env: dict[str, str] | None = None,
        prefix: tuple[str, ...] = (),
        timeout: float = 120,
    ) -> Result:
        return self.finish(self.start(config, *arguments, env=env, prefix=prefix), timeout)

    def inside(self, config: dict[str, Any] | str | bytes | None, *arguments: str) -> Result:
        """The same without a new process, for tests that make hundreds of runs."""
        import retention

        if config is not None:
            self.write(config)
        stdout, stderr = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            status = retention.main(["--config", str(self.path), *arguments])
        return Result(status, stdout.getvalue(), stderr.getvalue())

    def once(self, config: dict[str, Any] | str | bytes | None, *arguments: str) -> Result:
        return self(config, "--once", "--json", *arguments)

    def kill(self) -> None:
        for process in self.running:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.communicate()


def clean_environment() -> dict[str, str]:
    """The environment without what would change the program's behaviour behind a test's back."""
    hidden = ("PG", "OTEL_", "SESSION_RETENTION_")
    unwanted = {"JOURNAL_STREAM", "CREDENTIALS_DIRECTORY", "NOTIFY_SOCKET", "INVOCATION_ID"}
    return {k: v for k, v in os.environ.items() if not k.startswith(hidden) and k not in unwanted}


def faketime(seconds: float) -> dict[str, str]:
    """The environment in which a program believes that the clock on the wall is so many seconds ahead of what it is."""
    library = next(pathlib.Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    return {
        "LD_PRELOAD": str(library),
        "FAKETIME": f"{seconds:+.3f}",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "NO_FAKE_STAT": "1",
    }


def until(condition: Callable[[], Any], what: str, timeout: float = 30) -> Any:
    """Wait for what only another process can bring about, and return what the condition then says."""
    end = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {timeout} s in vain: {what}"
        time.sleep(0.02)
    return value


class Listener:
    """A unix socket where a PostgreSQL server would be: it knows who connected, and says nothing unless a test does."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        self.socket = socket.socket(socket.AF_UNIX)
        path = directory / ".s.PGSQL.5432"
        self.socket.bind(str(path))
        path.chmod(0o777)
        self.socket.listen(64)

    @property
    def conninfo(self) -> str:
        return f"host={self.directory} dbname=auth user=retention"

    def accept(self, timeout: float = 30) -> socket.socket:
        self.socket.settimeout(timeout)
        return self.socket.accept()[0]

    @property
    def untouched(self) -> bool:
        """Nobody has connected, not even to hang up at once."""
        self.socket.setblocking(False)
        try:
            self.socket.accept()[0].close()
        except BlockingIOError:
            return True
        return False


_FIELD = r'[a-z][A-Za-z0-9]*=(?:"(?:[^"\\\n]|\\.)*"|[^\s"]+)'
LINE = re.compile(rf"\[(\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d)\] \[(INFO|ERROR)\] ([^\n]*?)((?: {_FIELD})+)")


def _unescape(match: re.Match[str]) -> str:
    code = match[1]
    return chr(int(code[1:], 16)) if len(code) > 1 else {"n": "\n", "t": "\t", "r": "\r"}.get(code, code)


@dataclass
class Line:
    """One line of the log in its line form."""

    time: str
    level: str
    message: str
    fields: dict[str, str]

    @classmethod
    def parse(cls, text: str) -> Line:
        match = LINE.fullmatch(text)
        assert match, f"not the line form: {text!r}"
        fields = {}
        for pair in re.findall(_FIELD, match[4]):
            key, _, value = pair.partition("=")
            assert key not in fields, f"{key} twice: {text!r}"
            quoted = value.startswith('"')
            fields[key] = re.sub(r"\\(x[0-9a-f]{2}|u[0-9a-f]{4}|.)", _unescape, value[1:-1]) if quoted else value
        return cls(match[1], match[2], match[3], fields)

    @property
    def event(self) -> str:
        """The event that has this message."""
        if self.message.startswith("Starting "):
            return "phase_started"
        if self.message.startswith("Cleanup "):
            return "phase_completed"
        if self.message.startswith("batch failed, "):
            return "batch_retried"
        if re.fullmatch(r"(state|metrics|history) not (read|written)|traces not sent", self.message):
            return "record_failed"
        if self.message == "trying to connect again":
            return "connect_retried"
        if self.message == "waiting for a standby":
            return "standby_awaited"
        if self.message == "table not vacuumed":
            return "vacuum_skipped"
        return "job_skipped" if self.message == "outside the night window" else self.message.replace(" ", "_")


def log(text: str) -> list[Line]:
    """Every line that a run wrote, each of which must have the line form."""
    return [Line.parse(line) for line in text.splitlines()]
