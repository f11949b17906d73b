"""Servers and networks that fail on purpose: a streaming standby, and a proxy that holds, loses or cuts connections."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import select
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from lab import Database, Server, as_postgres, until


class Standby(Server):
    """A hot standby that streams from a primary, and may be promoted."""

    def __init__(self, primary: Server) -> None:
        # nothing of a server's own beginning: it starts as a copy of the primary
        self.primary, self.programs, self.environment = primary, primary.programs, {}
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="retention-standby-"))
        self.data, self.log = self.directory / "data", self.directory / "server.log"
        if os.geteuid() == 0:
            shutil.chown(self.directory, "postgres", "postgres")
        self.directory.chmod(0o755)
        source = ["--host", str(primary.directory), "--username=postgres", "--checkpoint=fast", "--no-sync"]
        backup = as_postgres(
            self.programs / "pg_basebackup", "--pgdata", self.data, "--write-recovery-conf", "--wal-method=stream"
        )
        subprocess.run([*backup, *source], check=True, cwd="/")
        with (self.data / "postgresql.conf").open("a") as conf:
            conf.write(f"unix_socket_directories = '{self.directory}'\n")
        self.start()
        self.streaming(True)

    def streaming(self, wanted: bool) -> None:
        """Wait until the primary sends to this standby, or does not."""
        query = "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'"
        with self.primary.connect() as connection:
            until(lambda: bool(one(connection.execute(query))) is wanted, f"streaming is {wanted}")

    def catch_up(self) -> None:
        """Wait until everything that the primary has committed is here."""
        with self.primary.connect() as primary, self.connect() as standby:
            reached = one(primary.execute("SELECT pg_current_wal_flush_lsn()"))
            query = "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn"
            until(lambda: one(standby.execute(query, [reached])), "the standby has caught up")

    def detach(self) -> None:
        """What the primary commits from now on never comes here."""
        with self.connect() as connection:
            connection.execute("ALTER SYSTEM SET primary_conninfo = ''")
            connection.execute("SELECT pg_reload_conf()")
        self.streaming(False)

    def promote(self) -> None:
        self.pg_ctl("promote")


def one(cursor: Any) -> Any:
    ((value,),) = cursor.fetchall()
    return value


def sessions(database: Database) -> list[tuple[int, str]]:
    """Process id and state of each of the program's sessions in this database."""
    with database.server.connect() as connection:
        return connection.execute(
            "SELECT pid, state FROM pg_stat_activity WHERE application_name = 'session-retention' AND datname = %s",
            [database.name],
        ).fetchall()


class Proxy:
    """Stands between the program and a server, on a unix socket, or on a TCP port of this machine.

    A test says what happens `at` a stage of one of the batches, counted from 1 over all connections:

        login            the first connection is made, and nothing has been asked yet; its batch is 0
        batch            the statement that deletes has arrived here, and not at the server
        batch answered   the server has executed it, and the program has not been told
        commit, commit answered    the same for its COMMIT
        pause            the program has been told of its COMMIT

    The action runs before the bytes in question go on, but for `pause`. It may `freeze` the network, and with it all
    connections, new ones too, until it is thawed; or `lose` those that there are, so that neither side ever hears of
    the other again, while new ones work; or `cut` them, which both sides notice; or go `down`; or `ask` the server, in
    the sessions of the program. `prepared` has the numbers of the batches whose statement the server knew already.
    """

    def __init__(self, server: Server, *, tcp: bool = False) -> None:
        self.server = server
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="retention-proxy-"))
        self.directory.chmod(0o755)
        self.socket = socket.socket(socket.AF_INET if tcp else socket.AF_UNIX)
        if tcp:
            self.socket.bind(("127.0.0.1", 0))
            self.address = f"host=127.0.0.1 port={self.socket.getsockname()[1]}"
        else:
            path = self.directory / ".s.PGSQL.5432"
            self.socket.bind(str(path))
            path.chmod(0o777)
            self.address = f"host={self.directory}"
        self.socket.listen(64)
        self.lock = threading.Lock()
        self.links: list[Link] = []
        self.lost: list[Link] = []
        self.frozen = False
        self.batches = 0
        self.prepared: list[int] = []
        self.actions: dict[tuple[str, int], Callable[[], object]] = {}
        self.happened: list[str] = []
        threading.Thread(target=self.accept, daemon=True).start()

    def conninfo(self, database: Database) -> str:
        return f"{self.address} dbname={database.name} user={database.user}"

    def at(self, stage: str, batch: int, action: Callable[[], object]) -> None:
        self.actions[stage, batch] = action

    def reach(self, stage: str) -> None:
        """A connection is at this stage of the current batch: do what the test wants then."""
        if action := self.actions.pop((stage, self.batches), None):
            action()
            self.happened.append(stage)

    def accept(self) -> None:
        with contextlib.suppress(OSError):  # the test is over
            while True:
                client = self.socket.accept()[0]
                with self.lock:
                    self.links.append(Link(self, client))
                    if self.frozen:
                        self.links[-1].passing.clear()
                    self.links[-1].start()

    def freeze(self) -> None:
        with self.lock:
            self.frozen = True
            for link in self.links:
                link.passing.clear()

    def thaw(self) -> None:
        with self.lock:
            self.frozen = False
            for link in self.links:
                link.passing.set()

    def lose(self) -> None:
        with self.lock:
            for link in self.links:
                link.passing.clear()
            self.lost += self.links
            self.links = []

    def cut(self) -> None:
        with self.lock:
            for link in (*self.links, *self.lost):
                link.cut()
            self.links, self.lost = [], []

    def ask(self, query: str) -> None:
        """Have a statement executed in each of the program's sessions, which must be between two of its own."""
        for link in self.links:
            link.ask(query)

    def down(self) -> None:
        """Cut everything and refuse what comes: the machine is there, and no server on it."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # ends accept()
        self.socket.close()
        self.cut()

    def close(self) -> None:
        self.down()
        shutil.rmtree(self.directory)


class Link(threading.Thread):
    """One connection through the proxy."""

    BEGIN, STATEMENT, COMMIT = b"BEGIN ISOLATION", b"SKIP LOCKED", b"COMMIT\0"
    PREPARED = re.compile(rb"(_pg3_[0-9]+)\0")  # as the driver calls them: in Parse, which has a text, and in Bind

    def __init__(self, proxy: Proxy, client: socket.socket) -> None:
        super().__init__(daemon=True)
        self.proxy, self.client = proxy, client
        self.server = socket.socket(socket.AF_UNIX)
        self.passing = threading.Event()
        self.passing.set()
        self.over = False
        self.tail = b""  # of what the client sent, lest a pattern lie across two reads
        self.names: set[bytes] = set()  # of statements that were prepared
        self.asked: str | None = None  # what the server has to answer
        self.deleting = self.logged_in = False

    def cut(self) -> None:
        self.over = True
        for end in (self.client, self.server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self.passing.set()

    def run(self) -> None:
        with self.client, self.server, contextlib.suppress(OSError):
            self.server.connect(str(self.proxy.server.directory / ".s.PGSQL.5432"))
            while True:
                for source in select.select([self.client, self.server], [], [])[0]:
                    self.passing.wait()
                    data = source.recv(65536)
                    if not data or self.over:
                        return
                    if source is self.client:
                        self.to_server(data)
                    else:
                        self.to_client(data)

    def to_server(self, data: bytes) -> None:
        if not self.logged_in and self.BEGIN in data:
            self.logged_in = True
            self.reach("login")
        seen, self.tail = self.tail + data, data[-15:]
        prepared = self.PREPARED.search(data)
        if prepared and self.STATEMENT in seen:
            self.names.add(prepared[1])
        elif (prepared and prepared[1] in self.names) or (self.STATEMENT in seen and b"EXPLAIN" not in seen):
            self.deleting = True
            self.proxy.batches += 1
            if prepared:
                self.proxy.prepared.append(self.proxy.batches)
            self.reach("batch")
        elif self.COMMIT in seen and self.deleting:
            self.deleting = False
            self.reach("commit")
        self.server.sendall(data)

    def ask(self, query: str) -> None:
        text = query.encode() + b"\0"
        self.server.sendall(b"Q" + (len(text) + 4).to_bytes(4, "big") + text)
        answer = b""
        while not answer.endswith(b"Z\0\0\0\5I"):  # ready, and idle
            answer += self.server.recv(65536)
            assert b"SERROR" not in answer, answer

    def reach(self, stage: str) -> None:
        self.asked, self.tail = stage, b""
        self.proxy.reach(stage)
        self.passing.wait()

    def to_client(self, data: bytes) -> None:
        asked, self.asked = self.asked, None
        if asked:
            self.proxy.reach(f"{asked} answered")
            self.passing.wait()
        self.client.sendall(data)
        if asked == "commit":
            self.proxy.reach("pause")
