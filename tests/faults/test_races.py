"""What other sessions do at the worst moment."""

from __future__ import annotations

import threading

import psycopg
import pytest
from lab import POLICIES, Database, Program, configuration


@pytest.mark.parametrize("action", ["CASCADE", "SET NULL", "RESTRICT"])
def test_a_child_born_during_a_batch_keeps_its_parent(action: str, systems: Database, program: Program) -> None:
    """No live session goes, or loses its parent, along with a parent that it was inserted under while a batch ran."""
    table = "identity.refresh_sessions"
    systems.execute(f"""
        ALTER TABLE {table} DROP CONSTRAINT refresh_sessions_parent_session_id_fkey,
            ADD CONSTRAINT own FOREIGN KEY (parent_session_id) REFERENCES {table} ON DELETE {action};
        INSERT INTO {table} (status, updated_at)
            SELECT 'Expired', now() - interval '100 days' - i * interval '1 second' FROM generate_series(1, 30000) i
    """)
    parents = [key for (key,) in systems.execute(f"SELECT id FROM {table} ORDER BY random()")]
    born: list[str] = []
    ended = threading.Event()

    def sign_in() -> None:
        """Insert live children until the run has ended; a parent that is gone refuses its child."""
        connection = systems.connect()
        for parent in parents:
            if ended.is_set():
                break
            try:
                (key,) = connection.execute(
                    f"INSERT INTO {table} (parent_session_id, status, updated_at) VALUES (%s, 'Active', now())"
                    " RETURNING id",
                    [parent],
                ).fetchone() or (None,)
                born.append(str(key))
            except psycopg.errors.ForeignKeyViolation:
                pass

    service = threading.Thread(target=sign_in)
    service.start()
    try:
        policies = {"refresh": POLICIES["refresh"]}
        result = program.once(configuration(systems.conninfo, policies, batch_size=30000))
    finally:
        ended.set()
        service.join()
    assert result.returncode == 0, result.output
    assert born
    assert systems.count(table, "status = 'Active' AND parent_session_id IS NOT NULL") == len(born)
    assert systems.count(table, "status = 'Expired'") == 30000 - result.policies["refresh"]["deleted"]
