"""The job against a service at work: sign-ins, rotations, revocations, expiries, with retentions of seconds."""

from __future__ import annotations

import bisect
import concurrent.futures
import itertools
import os
import random
import threading
import time
import uuid
from typing import Any, TypeVar

from chains import TABLE
from lab import POLICIES, Database, Program, Result, configuration, until

SECONDS = float(os.environ.get("RETENTION_SOAK_SECONDS", "600"))
INSTANCES, CLIENTS = 4, 4
SICR, TOKENS = "identity.sign_in_confirmation_requests", "refresh_tokens"
#: Everything is over within seconds, so that rows become due while the service is busy with their neighbours.
RETENTION = 2.0
AGED = {
    "sicr": {**POLICIES["sicr"], "retention": "2s"},
    "refresh": {**POLICIES["refresh"], "retention": "2s"},
    "tokens_expired": POLICIES["tokens_expired"],
    "tokens_revoked": {**POLICIES["tokens_revoked"], "grace": "1s"},
}
Key = TypeVar("Key")
LIVE_FOR = 4 * SECONDS + 600  # seconds: a token that does not expire while the test runs


class Client:
    """One of the service's connections, with a ledger of what it inserted and of what is alive.

    It does what the service does, and asserts what the service counts on: what is alive is there.
    """

    def __init__(self, database: Database, number: int, stop: threading.Event) -> None:
        self.connection = database.connect(autocommit=False)
        self.random = random.Random(number)
        self.stop = stop
        self.inserted = dict.fromkeys((SICR, TABLE, TOKENS), 0)
        self.sessions: dict[uuid.UUID, uuid.UUID] = {}  # alive, and whose
        self.ended: list[tuple[float, uuid.UUID]] = []  # sessions that go two seconds after that moment
        self.tokens: list[int] = []  # valid to the end
        self.short: list[tuple[float, int]] = []  # tokens that go two seconds after that moment

    def run(self) -> None:
        actions = [
            *(self.sign_in, self.sign_in, self.rotate, self.rotate, self.rotate, self.rotate, self.revoke, self.expire),
            *(self.revoke_all, self.reuse, self.revive, self.revive, self.renew, self.long_transaction),
        ]
        try:
            while not self.stop.is_set():
                action = self.random.choice(actions if self.sessions else [self.sign_in])
                with self.connection.transaction():
                    action()
        finally:  # also where an assertion failed
            self.stop.set()

    def change(self, statement: str, *parameters: Any) -> int:
        return self.connection.execute(statement, parameters).rowcount

    def any_session(self) -> uuid.UUID:
        return self.random.choice(list(itertools.islice(self.sessions, 200)))

    def sign_in(self) -> None:
        """A request, its confirmation, a session and two tokens, one of which lives on, and may even be revoked."""
        user, session, request = uuid.uuid4(), uuid.uuid4(), uuid.uuid4()
        begun = time.monotonic()
        self.change(
            f"INSERT INTO {SICR} (id, phone_number, status, created_at) VALUES (%s, '', 'Pending', clock_timestamp())",
            request,
        )
        confirmed = self.change(f"UPDATE {SICR} SET status = 'Confirmed' WHERE id = %s", request)
        assert confirmed == 1, f"a request gone after {time.monotonic() - begun} s"
        self.insert(session, user, None)
        life = self.random.choice([RETENTION, RETENTION, LIVE_FOR])
        row = self.connection.execute(
            f"INSERT INTO {TOKENS} (user_id, is_revoked, expires_at)"
            " VALUES (%s, %s, clock_timestamp() + make_interval(secs => %s)) RETURNING id",
            (user, self.random.random() < 0.5, life),
        ).fetchone()
        assert row is not None
        self.inserted[SICR] += 1
        self.inserted[TOKENS] += 1
        if life == LIVE_FOR:
            self.tokens.append(row[0])
        else:
            self.short.append((time.monotonic(), row[0]))

    def insert(self, session: uuid.UUID, user: uuid.UUID, parent: uuid.UUID | None) -> None:
        self.change(
            f"INSERT INTO {TABLE} (id, user_id, parent_session_id, status, created_at, updated_at)"
            " VALUES (%s, %s, %s, 'Active', clock_timestamp(), clock_timestamp())",
            *(session, user, parent),
        )
        self.inserted[TABLE] += 1
        self.sessions[session] = user

    def end(self, session: uuid.UUID, status: str) -> None:
        ended = self.change(
            f"UPDATE {TABLE} SET status = %s, updated_at = clock_timestamp() WHERE id = %s AND status = 'Active'",
            *(status, session),
        )
        assert ended == 1, "a live session is gone"
        del self.sessions[session]
        if status != "Rotated":  # as a rule that one's child keeps it
            self.ended.append((time.monotonic(), session))

    def rotate(self) -> None:
        session = self.any_session()
        self.insert(uuid.uuid4(), self.sessions[session], session)
        self.end(session, "Rotated")

    def revoke(self) -> None:
        self.end(self.any_session(), "Revoked")

    def expire(self) -> None:
        self.end(self.any_session(), "Expired")

    def revoke_all(self) -> None:
        """Every session of a user, old ones too, in whatever order the table has them."""
        user = self.sessions[self.any_session()]
        statement = (
            f"UPDATE {TABLE} SET status = 'Revoked', updated_at = clock_timestamp() WHERE user_id = %s RETURNING id"
        )
        revoked = [row[0] for row in self.connection.execute(statement, (user,))]
        live = [session for session, whose in self.sessions.items() if whose == user]
        assert set(live) <= set(revoked), "a live session is gone"
        for session in live:
            del self.sessions[session]
        self.ended += [(time.monotonic(), session) for session in revoked]

    def due(self, ledger: list[tuple[float, Key]]) -> Key | None:
        """One of those that the job is about to take, takes or has just taken."""
        now = time.monotonic()
        first, last = (bisect.bisect(ledger, now - RETENTION - side, key=lambda e: e[0]) for side in (0.5, -0.1))
        del ledger[:first]
        return ledger.pop(self.random.randrange(last - first))[1] if last > first else None

    def reuse(self) -> None:
        """A client with a stale token: the row is locked and looked at, if it is still there."""
        if session := self.due(self.ended):
            self.change(f"SELECT FROM {TABLE} WHERE id = %s FOR UPDATE", session)
            self.change(f"UPDATE {TABLE} SET user_agent = 'stale' WHERE id = %s", session)

    def revive(self) -> None:
        """An old session is made live again, and is from then on as live as any, if it was still there."""
        if session := self.due(self.ended):
            row = self.connection.execute(
                f"UPDATE {TABLE} SET status = 'Active', updated_at = clock_timestamp() WHERE id = %s RETURNING user_id",
                (session,),
            ).fetchone()
            if row:
                self.sessions[session] = row[0]

    def renew(self) -> None:
        """A token that is about to expire, or has, lives on, if it was still there."""
        if token := self.due(self.short):
            renewed = self.change(
                f"UPDATE {TOKENS} SET expires_at = clock_timestamp() + make_interval(secs => %s) WHERE id = %s",
                *(LIVE_FOR, token),
            )
            if renewed:
                self.tokens.append(token)

    def long_transaction(self) -> None:
        """Several rotations, and old rows of several chains, in a transaction that takes its time."""
        for _ in range(3):
            self.rotate()
            self.reuse()
            self.stop.wait(self.random.random() * 0.02)


class Instance:
    """One of the machines that run the job, again and again."""

    def __init__(self, program: Program, stop: threading.Event) -> None:
        self.program, self.stop = program, stop
        self.results: list[Result] = []

    def run(self) -> None:
        try:
            while not self.stop.is_set():
                self.results.append(self.program.once(None))
        finally:  # also where an assertion failed
            self.stop.set()


def test_a_service_at_work_does_not_notice(systems: Database, program: Program) -> None:
    """Four instances all the while: no error online, no live row gone, and what they counted is what is gone."""
    systems.execute(
        "CREATE FUNCTION audit() RETURNS trigger LANGUAGE plpgsql AS"
        "    $$ BEGIN IF random() < 0.1 THEN PERFORM pg_sleep(0.005); END IF; RETURN OLD; END $$;"
        f"CREATE TRIGGER audit BEFORE DELETE ON {TABLE} FOR EACH ROW EXECUTE FUNCTION audit()"
    )  # so that a batch has its locks for a while, and meets the service
    program.write(configuration(systems.conninfo, AGED, batch_size=200))
    stop = threading.Event()
    clients = [Client(systems, number, stop) for number in range(CLIENTS)]
    instances = [Instance(program, stop) for _ in range(INSTANCES)]
    with concurrent.futures.ThreadPoolExecutor(CLIENTS + INSTANCES) as threads:
        running = [threads.submit(work) for work in (*(c.run for c in clients), *(i.run for i in instances))]
        stop.wait(SECONDS)
        stop.set()
    for thread in running:
        thread.result()
    results = [result for instance in instances for result in instance.results]
    for result in results:
        assert (result.returncode, result.json["errors"]) == (0, []), result.output
        assert "40P01" not in result.stderr, "a deadlock"
        assert {(policy["undeletable"], policy["error"]) for policy in result.policies.values()} == {(0, None)}
    for name in ("sicr", "refresh", "tokens_expired"):
        shares = [sum(result.policies[name]["deleted"] for result in instance.results) for instance in instances]
        assert sum(share > 0 for share in shares) >= 2, f"{name}: {shares}"

    newest = systems.value("SELECT clock_timestamp()")
    until(lambda: systems.value("SELECT clock_timestamp() - interval '3 seconds' > %s", newest), "all is over")
    last = program(None, "--once", "--json", timeout=300)
    assert (last.returncode, last.json["stop_reason"]) == (0, "drained"), last.output
    results.append(last)
    assert {policy["backlog"] - policy["blocked"] for policy in last.policies.values()} == {0}

    policies = {SICR: ["sicr"], TABLE: ["refresh"], TOKENS: ["tokens_expired", "tokens_revoked"]}
    for table, names in policies.items():
        deleted = sum(result.policies[name]["deleted"] for result in results for name in names)
        assert sum(client.inserted[table] for client in clients) - systems.count(table) == deleted, table
        assert deleted > 0
    alive = {session for client in clients for session in client.sessions}
    assert alive == {row[0] for row in systems.execute(f"SELECT id FROM {TABLE} WHERE status = 'Active'")}
    tokens = {token for client in clients for token in client.tokens}
    assert tokens == {row[0] for row in systems.execute(f"SELECT id FROM {TOKENS}")}
    assert systems.count(SICR) == 0
    kept = systems.value(f"""
        WITH RECURSIVE kept AS (
            SELECT id, parent_session_id FROM {TABLE} WHERE status = 'Active'
            UNION
            SELECT p.id, p.parent_session_id FROM kept k JOIN {TABLE} p ON p.id = k.parent_session_id
        )
        SELECT count(*) FROM kept
    """)
    assert systems.count(TABLE) == kept, "all that may go has gone"
