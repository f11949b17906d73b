"""What there is to purge: databases made once and copied for each run, so that all contenders find the same."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import chains
from lab import SYSTEMS, Database, Server, as_postgres, until

SICR = "identity.sign_in_confirmation_requests"

HOLDER = "old snapshot"


@dataclass(frozen=True)
class Data:
    """A template, its table and policy, and how many rows a run must delete."""

    template: str
    policy: str
    table: str
    age: str
    old: str
    to_go: int


#: Fills a database and says what is in it.
Make = Callable[[Database], Data]


def drop_indexes(database: Database, table: str) -> list[str]:
    """Drop all of them, as rows come in faster without; the statements make them again."""
    indexes = database.execute(
        "SELECT indexrelid::regclass::text, indisprimary, pg_get_indexdef(indexrelid) FROM pg_index"
        " WHERE indrelid = %s::regclass",
        table,
    )
    for name, primary, _ in indexes:
        constraint = name.rpartition(".")[2]
        database.execute(f"ALTER TABLE {table} DROP CONSTRAINT {constraint}" if primary else f"DROP INDEX {name}")
    return [f"ALTER TABLE {table} ADD PRIMARY KEY (id)" if primary else text for _, primary, text in indexes]


def requests(rows: int, to_go: int, *, shuffled: bool = False, index: bool = True) -> Make:
    """Sign-in confirmation requests, in the heap in the order of their age, unless they are shuffled."""

    def make(database: Database) -> Data:
        restore = drop_indexes(database, SICR)
        database.execute(
            f"INSERT INTO {SICR} (phone_number, user_agent, ip_address, status, created_at)"
            " SELECT '+49' || 15000000000 + i * 7919::bigint % 1000000000,"
            " 'Mozilla/5.0 (X11; Linux x86_64; rv:128.0) Gecko/20100101 Firefox/' || i % 140,"
            " inet '10.0.0.0' + i % 65536, (ARRAY['Confirmed', 'Denied', 'Expired'])[1 + i % 3],"
            f" now() - CASE WHEN i <= {to_go} THEN interval '31 days' + ({to_go} - i) * interval '1 second'"
            f" ELSE interval '20 days' * ({rows} - i) / {max(rows - to_go, 1)} END"
            f" FROM generate_series(1, {rows}) i ORDER BY {'md5(i::text)' if shuffled else 'i'}"
        )
        for statement in restore:
            if index or "(created_at)" not in statement:
                database.execute(statement)
        old = "created_at < now() - interval '30 days'"
        return Data(database.name, "sicr", SICR, "created_at", old, to_go)

    return make


def young(rows: int, *, index: bool) -> Make:
    """Refresh sessions that have ended, none of them long ago."""

    def make(database: Database) -> Data:
        database.execute(
            f"INSERT INTO {chains.TABLE} (status, updated_at)"
            f" SELECT 'Rotated', now() - interval '30 days' * i / {rows} FROM generate_series(1, {rows}) i"
        )
        if index:
            database.execute(f"CREATE INDEX ON {chains.TABLE} (updated_at)")
        return sessions(database, 0)

    return make


def rotations(number: int, length: int, *, index: bool) -> Make:
    """Chains of refresh sessions, most of them finished; the others keep all that is old in them."""

    def make(database: Database) -> Data:
        if index:
            database.execute(f"CREATE INDEX ON {chains.TABLE} (updated_at)")
        return sessions(database, len(chains.load(database, number, length).finished))

    return make


def ancestors(number: int, length: int, to_go: int, *, index: bool) -> Make:
    """Chains in use whose rows but the last are all old: nothing of them may go. And single rows that go."""

    def make(database: Database) -> Data:
        if index:
            database.execute(f"CREATE INDEX ON {chains.TABLE} (updated_at)")
        database.execute(
            f"""
            SET session_replication_role = replica;
            CREATE TEMPORARY TABLE made AS SELECT chain, place, gen_random_uuid() AS id
            FROM generate_series(1, {number}) chain, generate_series(1, {length}) place;
            INSERT INTO {chains.TABLE} (id, parent_session_id, status, updated_at)
            SELECT made.id, older.id, CASE WHEN made.place < {length} THEN 'Rotated' ELSE 'Active' END,
                now() - CASE WHEN made.place < {length} THEN interval '91 days' + interval '1 hour'
                    * ({length} - made.place) + made.chain * interval '1 second' ELSE interval '1 hour' END
            FROM made LEFT JOIN made older ON older.chain = made.chain AND older.place = made.place - 1
            ORDER BY made.place, made.chain;
            INSERT INTO {chains.TABLE} (status, updated_at) SELECT 'Expired', now() - interval '91 days'
                - i * interval '1 minute' FROM generate_series(1, {to_go}) i;
            DROP TABLE made;
            SET session_replication_role = origin
            """
        )
        return sessions(database, to_go)

    return make


def sessions(database: Database, to_go: int) -> Data:
    old = "status IN ('Rotated', 'Revoked', 'Expired') AND updated_at < now() - interval '90 days'"
    return Data(database.name, "refresh", chains.TABLE, "updated_at", old, to_go)


class Lab:
    """A private server, with templates and their copies."""

    def __init__(self) -> None:
        settings = ("shared_preload_libraries = 'pg_stat_statements'", "pg_stat_statements.track = none")
        self.server = Server(settings="\n".join(settings))
        # as one in use: the numbers of transactions are far ahead of those for rows that sessions share, which spares a
        # batch in place one question; on a page of them that is made when it is reached
        self.server.stop("fast")
        reset = (self.server.programs / "pg_resetwal", "--next-transaction-id", str(2**27), self.server.data)
        subprocess.run(as_postgres(*map(str, reset)), check=True, stdout=subprocess.DEVNULL, cwd="/")
        self.server.start()
        self.numbers = itertools.count(1)
        with self.server.connect() as connection:
            connection.execute("CREATE EXTENSION pg_stat_statements")
            self.strategy = "STRATEGY FILE_COPY" if connection.info.server_version >= 150000 else ""

    @contextlib.contextmanager
    def database(self, create: str = "") -> Iterator[Database]:
        name = f"bench{next(self.numbers)}"
        with self.server.connect() as connection:
            connection.execute(f"CREATE DATABASE {name} {create}")
            database = Database(self.server, name)
            try:
                yield database
            finally:
                database.close()
                connection.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def process(self) -> pathlib.Path:
        return pathlib.Path("/proc", (self.server.data / "postmaster.pid").read_text().split("\n")[0])

    def settle(self, database: Database) -> None:
        """Wait until sessions that were closed have ended, and their processes, so that what they did is counted."""
        others = (
            "SELECT count(*) FILTER (WHERE datname = current_database() AND pid <> pg_backend_pid()"
            f" AND application_name <> '{HOLDER}'), count(*) FROM pg_stat_activity"
        )
        children = self.process() / "task" / self.process().name / "children"
        until(lambda: database.execute(others) == [(0, len(children.read_text().split()))], "other sessions have ended")

    def cpu(self) -> float:
        """The seconds that sessions have computed which have ended."""
        user, system = (self.process() / "stat").read_text().rpartition(")")[2].split()[13:15]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    @contextlib.contextmanager
    def data(self, make: Make) -> Iterator[Data]:
        """Data to copy, vacuumed and analysed as those of a service are."""
        with self.database() as database:
            database.execute(SYSTEMS.read_text())
            database.execute("CREATE EXTENSION pg_prewarm")
            data = make(database)
            database.execute(f"VACUUM (ANALYZE) {data.table}")
            database.close()
            yield data

    @contextlib.contextmanager
    def copy(self, data: Data, *, snapshot: bool = False) -> Iterator[Database]:
        """A copy in the server's cache, as far as it fits, with nothing to be written; perhaps an old snapshot held."""
        with self.database(f"TEMPLATE {data.template} {self.strategy}") as database:
            with self.server.connect(database.name) as connection:  # whose reading is counted when it ends
                connection.execute(
                    "SELECT pg_prewarm(relation) FROM (SELECT %(table)s::regclass AS relation UNION ALL"
                    " SELECT indexrelid FROM pg_index WHERE indrelid = %(table)s::regclass) r",
                    {"table": data.table},
                )
            database.execute("CHECKPOINT")
            self.settle(database)
            if not snapshot:
                yield database
                return
            with self.server.connect(database.name, autocommit=False, application_name=HOLDER) as holder:
                holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
                holder.execute("SELECT 1")
                yield database
