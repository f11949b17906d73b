"""What the README tells a reader to run on the database does what it says."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from lab import TOP, Database, Program, configuration

ROLE, HOLDS, _ = re.findall(r"```sql\n(.*?)```", (TOP / "README.md").read_text(), re.DOTALL)
OLD = "now() - interval '1 year'"


@pytest.fixture
def granted(systems: Database) -> Iterator[Database]:
    """The three systems, with old rows and the README's role, which has the README's grants."""
    systems.execute(ROLE.replace("DATABASE auth", f"DATABASE {systems.name}"))
    systems.user = "session-retention"
    systems.execute(f"""
        INSERT INTO identity.sign_in_confirmation_requests (phone_number, created_at) VALUES ('+79001234567', {OLD});
        INSERT INTO refresh_tokens (expires_at) VALUES ({OLD});
        INSERT INTO identity.refresh_sessions (status, updated_at) VALUES ('Revoked', {OLD});
        WITH parent AS (
            INSERT INTO identity.refresh_sessions (status, updated_at) VALUES ('Rotated', {OLD}) RETURNING id
        )
        INSERT INTO identity.refresh_sessions (status, updated_at, parent_session_id, user_agent)
        SELECT 'Revoked', {OLD}, id, 'held' FROM parent;
    """)
    yield systems
    systems.execute('DROP OWNED BY "session-retention" CASCADE; DROP ROLE "session-retention"')


def test_the_grants_suffice(granted: Database, program: Program) -> None:
    """With the README's grants and no others a run deletes what is old."""
    result = program.inside(configuration(granted.conninfo), "--once", "--json")
    assert result.returncode == 0
    assert {name: policy["deleted"] for name, policy in result.policies.items()} == {
        "sicr": 1,
        "refresh": 3,
        "tokens_expired": 1,
        "tokens_revoked": 0,
    }


@pytest.mark.parametrize("column", ["phone_number", "user_agent", "ip_address"])
def test_the_grants_show_no_personal_data(granted: Database, column: str) -> None:
    """The role that the README makes cannot read what it deletes."""
    table = "identity.sign_in_confirmation_requests"
    assert not granted.value("SELECT has_column_privilege('session-retention', %s, %s, 'SELECT')", table, column)


@pytest.mark.parametrize("readable", [True, False], ids=["readable", "unreadable"])
def test_a_held_session_stays_with_those_it_descends_from(granted: Database, program: Program, readable: bool) -> None:
    """The README's hold keeps a session and its parent, as blocked rows of a good run, also without its grant."""
    granted.execute(HOLDS)
    if not readable:
        granted.execute('REVOKE ALL ON identity.session_holds FROM "session-retention"')
    granted.execute("""
        INSERT INTO identity.session_holds (session_id, reason)
        SELECT id, 'a court order' FROM identity.refresh_sessions WHERE user_agent = 'held'
    """)
    result = program.inside(configuration(granted.conninfo), "--once", "--json")
    assert result.returncode == 0
    assert (result.policies["refresh"]["deleted"], result.policies["refresh"]["blocked"]) == (1, 2)
    assert granted.count("identity.refresh_sessions") == 2
