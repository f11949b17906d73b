"""Debian's PgBouncer in front of the tests' server, in transaction mode: each transaction may meet another process."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import tempfile
from typing import Any

import psycopg
from lab import Database, Server, as_postgres, until


class Pooler:
    """A pooler on a private socket. It refuses any start-up parameter that it does not know, as its defaults have it.

    A database and a user share `SIZE` server processes; nothing resets them between two clients.
    """

    SIZE = 2
    PORT = 6432

    def __init__(self, server: Server, **settings: object) -> None:
        """`settings` are lines of pgbouncer.ini beside ours."""
        program = shutil.which("pgbouncer", path="/usr/sbin:/usr/bin")
        if program is None:
            raise RuntimeError("pgbouncer is not installed: run tests/run, which installs it")
        self.program = program
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="retention-pool-"))
        self.ini = self.directory / "pgbouncer.ini"
        self.log = self.directory / "pgbouncer.log"
        users = self.directory / "users.txt"
        users.write_text('"postgres" ""\n"retention" ""\n')
        lines = {
            "unix_socket_dir": self.directory,
            "listen_port": self.PORT,
            "auth_type": "trust",
            "auth_file": users,
            "admin_users": "postgres",
            "pool_mode": "transaction",
            "default_pool_size": self.SIZE,
            **settings,
        }
        pairs = "\n".join(f"{key} = {value}" for key, value in lines.items())
        self.ini.write_text(f"[databases]\n* = host={server.directory}\n\n[pgbouncer]\n{pairs}\n")
        if server.directory.owner() == "postgres":
            shutil.chown(self.directory, "postgres", "postgres")
        self.directory.chmod(0o755)
        self.start()

    def start(self) -> None:
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                as_postgres(self.program, self.ini), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/"
            )
        until(self.answers, "the pooler answers")

    def answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            self.ask("SHOW VERSION")
        except psycopg.OperationalError:
            return False
        return True

    def stop(self) -> None:
        """At once: every client and server connection is cut."""
        self.process.terminate()
        self.process.wait(30)

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.directory)

    def ask(self, command: str) -> list[dict[str, Any]]:
        """One command for the pooler itself, such as PAUSE or SHOW POOLS."""
        conninfo = f"host={self.directory} port={self.PORT} dbname=pgbouncer user=postgres"
        with psycopg.connect(conninfo, autocommit=True, row_factory=psycopg.rows.dict_row) as connection:
            cursor = connection.execute(command.encode())
            return cursor.fetchall() if cursor.description else []

    def waiting(self, database: Database) -> int:
        """How many of the job's sessions wait for a server process."""
        pools = [pool for pool in self.ask("SHOW POOLS") if pool["database"] == database.name]
        return sum(int(pool["cl_waiting"]) for pool in pools)

    def conninfo(self, database: Database) -> str:
        return f"host={self.directory} port={self.PORT} dbname={database.name} user={database.user}"

    def connect(self, database: Database) -> psycopg.Connection[Any]:
        """Another client that shares the job's server processes; each transaction lasts until it says so."""
        return psycopg.connect(self.conninfo(database), prepare_threshold=None)
