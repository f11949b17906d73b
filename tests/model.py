"""What a run must leave behind, worked out the slow and obvious way from the two specifications.

It shares nothing with the program. Times are seconds since the epoch; `inf` and `-inf` are PostgreSQL's infinities,
None is NULL. A reference is the id of another row; one that names no row at all is allowed and means nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DAY = 86_400.0
TERMINAL = ("Rotated", "Revoked", "Expired")


@dataclass(frozen=True, slots=True)
class Request:
    """A row of identity.sign_in_confirmation_requests."""

    id: int
    status: str | None
    created_at: float | None


@dataclass(frozen=True, slots=True)
class Session:
    """A row of identity.refresh_sessions; `parent` is the id in parent_session_id."""

    id: int
    status: str | None
    updated_at: float | None
    parent: int | None


@dataclass(frozen=True, slots=True)
class Token:
    """A row of refresh_tokens."""

    id: int
    is_revoked: bool | None
    expires_at: float | None


@dataclass(frozen=True, slots=True)
class Counts:
    """What a run says of one policy; of the backlog, `blocked` rows are referred to by rows that stay."""

    deleted: int
    backlog: int
    blocked: int


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of the three systems."""

    requests: Sequence[Request]
    sessions: Sequence[Session]
    tokens: Sequence[Token]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The ids that are left, and the counts of each policy."""

    requests: set[int]
    sessions: set[int]
    tokens: set[int]
    counts: dict[str, Counts]


def older(time: float | None, cutoff: float) -> bool:
    """Strictly older; NULL is of no age."""
    return time is not None and time < cutoff


def kept(sessions: Sequence[Session], matching: set[int]) -> set[int]:
    """The matching sessions that must stay: something that stays refers to them."""
    blocked: set[int] = set()
    while True:
        staying = [s for s in sessions if s.id not in matching or s.id in blocked]
        more = {s.parent for s in staying if s.parent is not None} & matching
        if more <= blocked:
            return blocked
        blocked |= more


def outcome(rows: Rows, now: float, policies: Sequence[str]) -> Outcome:
    """What the named policies leave when they run in that order at `now`.

    Beside those of the specifications there is `rotated`: Rotated sessions go after 60 days already.
    """
    requests = {r.id: r for r in rows.requests}
    sessions = {s.id: s for s in rows.sessions}
    tokens = {t.id: t for t in rows.tokens}
    counts: dict[str, Counts] = {}
    for policy in policies:
        blocked: set[int] = set()
        left: dict[int, Request] | dict[int, Session] | dict[int, Token]
        if policy == "sicr":
            left = requests
            matching = {r.id for r in requests.values() if older(r.created_at, now - 30 * DAY)}
        elif policy in ("refresh", "rotated"):
            left = sessions
            statuses, days = (TERMINAL, 90) if policy == "refresh" else (("Rotated",), 60)
            matching = {
                s.id for s in sessions.values() if s.status in statuses and older(s.updated_at, now - days * DAY)
            }
            blocked = kept(list(sessions.values()), matching)
        elif policy == "tokens_expired":
            left = tokens
            matching = {t.id for t in tokens.values() if older(t.expires_at, now)}
        else:
            assert policy == "tokens_revoked"
            left = tokens
            matching = {t.id for t in tokens.values() if t.is_revoked and older(t.expires_at, now - DAY)}
        for gone in matching - blocked:
            del left[gone]
        counts[policy] = Counts(len(matching - blocked), len(blocked), len(blocked))
    return Outcome(set(requests), set(sessions), set(tokens), counts)
