#!/usr/bin/env python3
"""session-retention: delete session rows that have outlived their retention from PostgreSQL.

What can go wrong: this program deletes, on a schedule, unattended. What is committed cannot be undone.

The invariant: no row outside its policy is ever deleted (but for what `allow_cascade` permits), and no row to which a
row that stays refers by a foreign key. The whole predicate of a policy is checked again on the locked row, in the
statement that deletes it. No status is changed, no row's content is read into a message, and no failure is a zero.

The transaction boundary: one batch, of at most `batch_size` rows, is one transaction. It is counted and logged after
its commit, so that the log never claims what a crash took back. Between batches the session is idle.

The sections stand in the order in which a run flows: durations and the window, configuration, the session, errors,
findings, what the database says of a table, statements, the log, the record, the report, a phase, the schedule, the
run, the status, setting up, the commands, main.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import datetime as dt
import enum
import errno
import fcntl
import getpass
import glob
import io
import itertools
import json
import logging
import math
import os
import pwd
import re
import select
import shlex
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import tomllib
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType, SimpleNamespace
from typing import Any, NoReturn, cast

import psycopg
import psycopg.conninfo
import psycopg.errors
import psycopg.pq
import tomli_w
from psycopg import sql
from psycopg.abc import Query

VERSION = "0.1.0"
PROGRAM = "session-retention"
USER = "session-retention"
DEFAULT_CONFIG = "/etc/session-retention/config.toml"
UTC = dt.UTC


class Exit(enum.IntEnum):
    """The exit statuses, of sysexits.h where it has one."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNAVAILABLE = 69
    CONFIG = 78


def printable(text: str) -> str:
    """The text on one line, without anything that a terminal would obey."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def known(fields: Mapping[Any, Any]) -> dict[Any, Any]:
    """Those that are not None."""
    return {key: value for key, value in fields.items() if value is not None}


def some(names: Sequence[str], owner: object) -> dict[str, Any]:
    """These fields of the owner."""
    return {name: getattr(owner, name) for name in names}


class RetentionError(Exception):
    """The base of what this program raises on purpose; the text is safe to log."""

    exit_status = Exit.FAILED

    def __init__(self, message: str, sqlstate: str | None = None) -> None:
        self.message = printable(message)
        self.sqlstate = sqlstate
        self.lines = [self.message]  # for stderr
        super().__init__(self.message)

    def json(self) -> dict[str, str | None]:
        return some(("sqlstate", "message"), self)


class ConfigurationError(RetentionError):
    """The configuration is wrong; `problems` are pairs of key and explanation, all of them."""

    exit_status = Exit.CONFIG

    def __init__(self, file: str, problems: Sequence[tuple[str, str]], metrics: MetricsOptions | None = None) -> None:
        self.metrics = metrics  # where such a failure is counted, if that much can be read
        self.problems = [
            (key, printable(f"{file}: {key}: {text}" if key else f"{file}: {text}")) for key, text in problems
        ]
        super().__init__("; ".join(text for _, text in self.problems))
        self.lines = [text for _, text in self.problems]


class UsageError(RetentionError):
    """The command line is wrong in a way that only the configuration shows."""

    exit_status = Exit.USAGE


class UnavailableError(RetentionError):
    """The database could not be reached, or cannot be written to."""

    exit_status = Exit.UNAVAILABLE


class RunFailedError(RetentionError):
    """Nothing may be deleted in this run."""


class PolicyFailedError(RetentionError):
    """This policy cannot go on; others can."""


class StoppedError(Exception):
    """A signal arrived while the program waited."""


def clock() -> float:
    """Seconds on a clock that nobody sets and that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class SilentServerError(psycopg.OperationalError):
    """The server did not answer when it must have: it, or the network between, has died without a word."""


# ── Durations and the night window ────────────────────────────────────────────────────────────────────────────────────
# Pure functions of text and time.

UNITS = {
    "ms": dt.timedelta(milliseconds=1),
    "s": dt.timedelta(seconds=1),
    "m": dt.timedelta(minutes=1),
    "h": dt.timedelta(hours=1),
    "d": dt.timedelta(days=1),
    "w": dt.timedelta(weeks=1),
}
# A century: beyond any retention, and still a date that Python and PostgreSQL can hold.
LONGEST = dt.timedelta(days=36500)
ZERO = dt.timedelta(0)


def parse_duration(text: str) -> dt.timedelta:
    """Read `90d` or `1h30m`; ValueError for anything else, a number without a unit and more than 36500d included.

    >>> parse_duration("1h30m")
    datetime.timedelta(seconds=5400)
    >>> parse_duration("90")
    Traceback (most recent call last):
    ...
    ValueError: 90
    """
    if not re.fullmatch(r"([0-9]{1,15}(ms|[smhdw]))+", text, re.ASCII):
        raise ValueError(text)
    try:
        total = sum((int(n) * UNITS[unit] for n, unit in re.findall(r"([0-9]+)(ms|[smhdw])", text)), ZERO)
    except OverflowError:
        raise ValueError(text) from None
    if total > LONGEST:
        raise ValueError(text)
    return total


def format_duration(duration: dt.timedelta) -> str:
    """The shortest text that `parse_duration` reads back, in days and smaller units.

    >>> format_duration(dt.timedelta(hours=25, milliseconds=5))
    '1d1h5ms'
    >>> format_duration(ZERO)
    '0s'
    """
    parts = []
    for unit in ("d", "h", "m", "s", "ms"):
        count, duration = divmod(duration, UNITS[unit])
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


@dataclass(frozen=True, slots=True)
class NightWindow:
    """From `start` (included) to `end` (excluded), in minutes of the UTC day; it may cross midnight."""

    start: int
    end: int

    @classmethod
    def parse(cls, text: str) -> NightWindow | None:
        """Read `02:00-05:00`; None for the empty text, which means any time; ValueError otherwise.

        >>> NightWindow.parse("23:30-05:00")
        NightWindow(start=1410, end=300)
        """
        if not text:
            return None
        clock = r"([01][0-9]|2[0-3]):([0-5][0-9])"
        match = re.fullmatch(f"{clock}-{clock}", text, re.ASCII)
        if not match:
            raise ValueError(text)
        hour, minute, end_hour, end_minute = map(int, match.groups())
        window = cls(hour * 60 + minute, end_hour * 60 + end_minute)
        if window.start == window.end:
            raise ValueError(text)
        return window

    def __str__(self) -> str:
        return "-".join(f"{minute // 60:02}:{minute % 60:02}" for minute in (self.start, self.end))

    def remaining(self, now: dt.datetime) -> dt.timedelta | None:
        """The time until the window closes; None while it is closed.

        >>> NightWindow.parse("23:30-05:00").remaining(dt.datetime(2026, 1, 1, 4, 0))
        datetime.timedelta(seconds=3600)
        """
        day = UNITS["d"]
        since_midnight = now - now.replace(hour=0, minute=0, second=0, microsecond=0)
        since_start = (since_midnight - self.start * UNITS["m"]) % day
        length = (self.end - self.start) * UNITS["m"] % day
        return length - since_start if since_start < length else None


# ── Configuration ─────────────────────────────────────────────────────────────────────────────────────────────────────
# Knows the file and no database. Each option is declared once, as a field of a dataclass: its key, its kind (what is
# accepted, how it is read and shown) and its default.


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value. `read` turns what TOML holds into ours, or raises ValueError; `show` turns it back."""

    accepts: str
    read: Callable[[Any], Any]
    show: Callable[[Any], Any] = lambda value: value


def expect(condition: bool) -> None:
    if not condition:
        raise ValueError


def anything(_value: Any) -> bool:
    return True


def exactly(kind: type, allowed: Callable[[Any], bool] = anything, make: Callable[[Any], Any] = lambda v: v) -> Any:
    """A `read` of exactly this type (TOML's `true` is not the number 1), made into ours, of which some are allowed."""

    def read(value: Any) -> Any:
        expect(type(value) is kind and "\0" not in str(value))
        ours = make(value)
        expect(allowed(ours))
        return ours

    return read


def duration_kind(accepts: str, allowed: Callable[[dt.timedelta], bool]) -> Kind:
    accepts = f"a text with a unit, such as '30d' or '1h30m': {accepts}, units ms s m h d w, 36500d at most"
    return Kind(accepts, exactly(str, allowed, parse_duration), format_duration)


# A column name, exactly as the catalog has it. 63 bytes: the server would cut it and may then mean another.
read_name = exactly(str, lambda name: 0 < len(name.encode()) <= 63)
text_of = exactly(str)


# Of PostgreSQL's key words, those that cannot name a table or a column without quotes.
RESERVED = """
    all analyse analyze and any array as asc asymmetric authorization binary both case cast check collate collation
    column concurrently constraint create cross current_catalog current_date current_role current_schema current_time
    current_timestamp current_user default deferrable desc distinct do else end except false fetch for foreign freeze
    from full grant group having ilike in initially inner intersect into is isnull join lateral leading left like limit
    localtime localtimestamp natural not notnull null offset on only or order outer overlaps placing primary references
    returning right select session_user similar some symmetric system_user table tablesample then to trailing true
    union unique user using variadic verbose when where window with"""


def quoted(name: str) -> str:
    """The name as SQL writes it.

    >>> quoted("refresh_tokens"), quoted("user"), quoted("Session")
    ('refresh_tokens', '"user"', '"Session"')
    """
    plain = re.fullmatch(r"[a-z_][a-z0-9_]*", name, re.ASCII) and name not in RESERVED.split()
    return name if plain else '"{}"'.format(name.replace('"', '""'))


@dataclass(frozen=True, slots=True)
class TableName:
    """A table, by the names in the catalog; `written` is how the configuration calls it, and so do we."""

    schema: str
    name: str
    written: str = field(default="", compare=False)

    @classmethod
    def read(cls, value: Any) -> TableName:
        """Read `name` or `schema.name` as SQL would: what is not in double quotes folds to lower case.

        >>> TableName.read('Auth."Session.Log"') == TableName("auth", "Session.Log")
        True
        """
        part = r'(?:"((?:[^"]|"")+)"|([^\W\d][\w$]*))'
        match = re.fullmatch(rf"\s*(?:{part}\s*\.\s*)?{part}\s*", text_of(value))
        if not match:
            raise ValueError
        quoted_schema, schema, quoted, name = match.groups()

        def fold(quoted: str | None, plain: str | None) -> str | None:
            return quoted.replace('""', '"') if quoted else plain and re.sub("[A-Z]+", lambda m: m[0].lower(), plain)

        return cls(read_name(fold(quoted_schema, schema) or "public"), read_name(fold(quoted, name)), value.strip())

    @property
    def sql(self) -> str:
        return f"{quoted(self.schema)}.{quoted(self.name)}"

    def __str__(self) -> str:
        """The name as the configuration writes it or, if it is of another table, as SQL does."""
        return self.written or self.sql


def read_conninfo(value: Any) -> str:
    conninfo: str = text_of(value)
    try:
        given = psycopg.conninfo.conninfo_to_dict(conninfo)
    except psycopg.Error:
        raise ValueError from None  # libpq's own message quotes the string, and a password may be in it
    if conninfo.startswith(("postgresql://", "postgres://")):
        # A password that is not percent-encoded ends where libpq sees a delimiter; what is left of it passes for a
        # host, a port or a database, which messages do show.
        authority, _, rest = conninfo.partition("?")[0].partition("://")[2].partition("/")
        expect(authority.count("@") <= 1 and "@" not in rest)
    expect(re.fullmatch(r"[0-9,]*", str(given.get("port") or ""), re.ASCII) is not None)
    expect(not re.search("=|://", str(given.get("dbname") or "")))  # libpq would take it for a connection string
    return conninfo


def read_only_lists(value: Any) -> dict[str, list[Any]]:
    """The allow-list: each column's values, of one type each, in the order of the file."""
    expect(type(value) is dict and len(value) > 0)
    for column, values in value.items():
        read_name(column)
        expect(type(values) is list and len(values) > 0 and type(values[0]) in (str, int, bool))
        for item in values:
            expect(type(item) is type(values[0]))
            expect(type(item) is not str or "\0" not in item)
            expect(type(item) is not int or -(2**63) <= item < 2**63)
    return dict(value)


POSITIVE = duration_kind("more than 0", lambda d: d > ZERO)
DURATION = duration_kind("0s or more", anything)
WHOLE_SECONDS = duration_kind("whole seconds, 2s or more", lambda d: d % UNITS["s"] == ZERO and d >= UNITS["s"] * 2)
CONNINFO = Kind(
    "a libpq connection string, keywords ('dbname=auth user=x') or URI ('postgresql://…', with @ : / in its parts"
    " percent-encoded)",
    read_conninfo,
)
SIZE = Kind("a whole number of rows, 1 to 2147483647", exactly(int, lambda size: 1 <= size < 2**31))
BOOLEAN = Kind("true or false", exactly(bool))
WINDOW = Kind(
    'a UTC time span such as "02:00-05:00", its ends different, or "" for any time',
    exactly(str, make=NightWindow.parse),
    lambda window: str(window or ""),
)
PAUSE = Kind(
    '"auto", or a duration of 0s or more such as "100ms", units ms s m h d w, 36500d at most',
    exactly(str, make=lambda text: None if text == "auto" else parse_duration(text)),
    lambda pause: "auto" if pause is None else format_duration(pause),
)
PATH = Kind('an absolute path, or "" for none', exactly(str, lambda path: not path or path.startswith("/")))
TITLE = Kind("one line of printable text", exactly(str, lambda title: title.isprintable() and title.strip()))
TABLE = Kind(
    '"name" or "schema.name", parts in double quotes where SQL needs them, 63 bytes each at most', TableName.read, str
)
COLUMN = Kind("the exact column name, unquoted, 63 bytes at most", read_name)
ONLY = Kind(
    'columns with non-empty lists of one type (text, 64-bit whole numbers or booleans), as in { status = ["Revoked"] }',
    read_only_lists,
)


def option(kind: Kind, default: Any = None) -> Any:
    """A field of a section; the default is written as TOML would have it, None for a key that has none."""
    return field(default=None if default is None else kind.read(default), metadata={"kind": kind})


@dataclass(frozen=True, slots=True)
class DatabaseOptions:
    conninfo: str = option(CONNINFO, "dbname=auth")
    connect_timeout: dt.timedelta = option(WHOLE_SECONDS, "10s")
    connect_retry: dt.timedelta = option(DURATION, "10m")
    statement_timeout: dt.timedelta = option(POSITIVE, "60s")
    lock_timeout: dt.timedelta = option(POSITIVE, "2s")
    max_clock_skew: dt.timedelta = option(POSITIVE, "5m")


@dataclass(frozen=True, slots=True)
class RunOptions:
    batch_size: int = option(SIZE, 5000)
    max_run_duration: dt.timedelta = option(POSITIVE, "30m")
    retention_interval: dt.timedelta = option(POSITIVE, "24h")
    night_window_utc: NightWindow | None = option(WINDOW, "02:00-05:00")
    pause: dt.timedelta | None = option(PAUSE, "auto")
    max_replication_lag: dt.timedelta | None = option(POSITIVE)
    vacuum: bool = option(BOOLEAN, False)


@dataclass(frozen=True, slots=True)
class MetricsOptions:
    textfile: str = option(PATH, "/var/lib/session-retention/metrics.prom")
    state: str = option(PATH, "/var/lib/session-retention/state.toml")

    @property
    def history(self) -> str:
        """history.jsonl beside state.toml; beside a state of another name one that is called after it."""
        directory, name = os.path.split(self.state)
        stem = name.removesuffix(".toml")
        return os.path.join(directory, "history.jsonl" if stem == "state" else f"{stem}.history.jsonl") if name else ""


@dataclass(frozen=True, slots=True)
class Policy:
    """One rule: rows of `table` whose age column lies before `now` less `retention` (or `grace`) are to go."""

    name: str
    title: str | None = option(TITLE)
    table: TableName = option(TABLE)
    age_column: str | None = option(COLUMN)
    retention: dt.timedelta | None = option(POSITIVE)
    expiry_column: str | None = option(COLUMN)
    grace: dt.timedelta | None = option(DURATION)
    only: dict[str, list[Any]] | None = option(ONLY)
    parent_column: str | None = option(COLUMN)
    batch_size: int | None = option(SIZE)
    enabled: bool = option(BOOLEAN, True)
    allow_cascade: bool = option(BOOLEAN, False)

    @property
    def column(self) -> str:
        column = self.age_column or self.expiry_column
        assert column is not None
        return column

    @property
    def keep(self) -> dt.timedelta:
        """How long a row stays after the time in its column."""
        keep = self.retention if self.retention is not None else self.grace
        assert keep is not None
        return keep

    @property
    def rule(self) -> str:
        """Which rows it is about, whatever their age: what was learnt of other rows says nothing of these."""
        return json.dumps([str(self.table), self.column, self.only])

    def cutoff(self, now: dt.datetime) -> dt.datetime:
        return now - self.keep


@dataclass(frozen=True, slots=True)
class Configuration:
    file: str
    database: DatabaseOptions
    run: RunOptions
    metrics: MetricsOptions
    policies: tuple[Policy, ...]

    @property
    def enabled(self) -> tuple[Policy, ...]:
        return tuple(policy for policy in self.policies if policy.enabled)


SECTIONS: dict[str, type[Any]] = {"database": DatabaseOptions, "run": RunOptions, "metrics": MetricsOptions}
Problems = list[tuple[str, str]]


def kinds(section: type[Any]) -> dict[str, Kind]:
    return {f.name: f.metadata["kind"] for f in dataclasses.fields(section) if "kind" in f.metadata}


def read_section(section: type[Any], where: str, table: Any, problems: Problems, **given: Any) -> Any:
    """Make a section from its TOML table; None if anything in it is wrong, which `problems` then tells."""
    before = len(problems)
    known = kinds(section)
    if type(table) is not dict:
        problems.append((where, f"must be a table with the keys {', '.join(known)}"))
        return None
    for key, value in table.items():
        if key not in known:
            problems.append((f"{where}.{key}", f"unknown key; known here: {', '.join(known)}"))
            continue
        try:
            given[key] = known[key].read(value)
        except ValueError:
            problems.append((f"{where}.{key}", f"must be {known[key].accepts}"))
    return section(**given) if len(problems) == before else None


def read_policy(name: str, table: Any, problems: Problems) -> Policy | None:
    where = f"policy.{name}"
    before = len(problems)
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name, re.ASCII) or len(name) > 40:
        problems.append(
            (where, "a policy name must be lower-case words joined by single underscores, 40 characters at most")
        )
    policy: Policy | None = read_section(Policy, where, table, problems, name=name)
    if type(table) is dict:
        if "table" not in table:
            problems.append((f"{where}.table", f"is missing; must be {TABLE.accepts}"))
        pairs = ({"age_column", "retention"}, {"expiry_column", "grace"})
        if set(table) & (pairs[0] | pairs[1]) not in pairs:
            problems.append(
                (where, "needs either age_column with retention, or expiry_column with grace, and no other pairing")
            )
    return policy if len(problems) == before else None


def user_name() -> str:
    """Who runs this: a name, or the number of one that has none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.geteuid())


def read_configuration(file: str) -> Configuration:
    """Read and check the file; ConfigurationError names every fault in it at once."""
    try:
        with open(file, "rb") as stream:
            content = stream.read()
        document = tomllib.loads(content.decode())
    except OSError as error:
        reader = f" by the user {user_name()}" if error.errno == errno.EACCES else ""
        raise ConfigurationError(file, [("", f"cannot be read{reader}: {error.strerror}")]) from None
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigurationError(file, [("", f"line {line}: not UTF-8; save the file in UTF-8")]) from None
    except tomllib.TOMLDecodeError as error:
        bom = content.startswith(b"\xef\xbb\xbf")
        reason = (
            "line 1: starts with a byte order mark; save the file without it" if bom else f"not valid TOML: {error}"
        )
        raise ConfigurationError(file, [("", reason)]) from None
    except (RecursionError, ValueError):
        raise ConfigurationError(file, [("", "not valid TOML: nested too deeply, or a number too large")]) from None
    problems: Problems = []
    for key in document:
        if key not in (*SECTIONS, "policy"):
            problems.append((key, f"unknown key; known here: {', '.join(SECTIONS)}, policy.<name>"))
    sections = {key: read_section(kind, key, document.get(key, {}), problems) for key, kind in SECTIONS.items()}
    metrics = sections["metrics"]
    if metrics and metrics.textfile and metrics.textfile in (metrics.state, metrics.history):
        problems.append(("metrics.textfile", f"must be another file than {metrics.state} and {metrics.history}"))
    tables = document.get("policy", {})
    if type(tables) is not dict:
        problems.append(("policy", "must be tables named [policy.<name>]"))
        tables = {}
    policies = [read_policy(name, table, problems) for name, table in tables.items()]
    if not any(policy is None or policy.enabled for policy in policies):
        problems.append(("policy", "no policy is enabled, so there is nothing to do; add a [policy.<name>] table"))
    if problems:
        raise ConfigurationError(file, problems, sections["metrics"])
    return Configuration(file, **sections, policies=tuple(policy for policy in policies if policy))


def secret_options() -> set[str]:
    """The connection options that libpq itself would not show, and newer ones that an older libpq does not know."""
    marked = {option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults() if option.dispchar == b"*"}
    return marked | {"password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key"}


def mask_conninfo(conninfo: str) -> str:
    """The connection string as keywords, its secrets replaced by asterisks."""
    secret = secret_options()
    given = psycopg.conninfo.conninfo_to_dict(conninfo)
    masked = {key: "********" if key in secret else value for key, value in given.items()}
    return psycopg.conninfo.make_conninfo(**masked)


def show_section(section: Any) -> dict[str, Any]:
    values = ((key, kind, getattr(section, key)) for key, kind in kinds(type(section)).items())
    return {key: kind.show(value) for key, kind, value in values if value is not None or kind in (WINDOW, PAUSE)}


def show_configuration(config: Configuration) -> str:
    """The effective configuration as TOML that this program reads back, without secrets."""
    document = {name: show_section(getattr(config, name)) for name in SECTIONS}
    document["database"]["conninfo"] = mask_conninfo(config.database.conninfo)
    document["policy"] = {policy.name: show_section(policy) for policy in config.policies}
    return tomli_w.dumps(document)


# ── The session ───────────────────────────────────────────────────────────────────────────────────────────────────────
# The one thin layer that talks to the driver. Depends on nothing that outlives a transaction, so it works behind a
# pooler that hands each transaction to another server process; what is prepared without a pooler only saves time.


class Name(sql.Identifier):
    """An identifier inside a statement with parameters, where the driver reads a percent sign as a placeholder.

    Such a statement is executed with parameters, `{}` if it has none.
    """

    def as_bytes(self, context: Any = None) -> bytes:
        return super().as_bytes(context).replace(b"%", b"%%")


class Constant(sql.Literal):
    """A value that is always the same for a statement with parameters; likewise."""

    def as_bytes(self, context: Any = None) -> bytes:
        return super().as_bytes(context).replace(b"%", b"%%")


def one_line(text: str) -> str:
    return " ".join(text.split())


def stops() -> set[signal.Signals]:
    """The signals that ask for a stop. That the terminal is gone does, too, unless that is to be ignored (nohup)."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return {signal.SIGTERM, signal.SIGINT} | (set() if ignored else {signal.SIGHUP})


class Interrupts:
    """What SIGTERM, SIGINT and SIGHUP do: ask for a stop; end a wait at once; cancel a batch that takes too long.

                     first signal            second signal    alarm after a signal
        waiting      StoppedError            StoppedError     StoppedError
        statement    alarm in GRACE          alarm at once    cancel, alarm in PATIENCE; then StoppedError
        neither      alarm in GRACE          -                -

    The batch in flight gets GRACE seconds, then it is cancelled on the server (a second signal cancels it at once);
    if even that does not end it within PATIENCE, the connection is given up. Together they stay under the 5 s that
    users are promised.

    Without a signal the alarm is for a statement that must have been answered long ago: SilentServerError.
    """

    GRACE = 3.0
    PATIENCE = 1.0
    LAST = 4.9  # seconds after a signal, when the process ends whatever it is blocked in: a name server, a full pipe

    def __init__(self, *, final: bool = False) -> None:
        self.final = final  # the process ends after this, and a late signal must not change its exit status
        self.requested = False
        self.end = math.inf  # seconds of `clock`: when `last` ends the process
        self.waiting = False
        self.statement: psycopg.Connection[Any] | None = None
        self.cancelled = False

    def __enter__(self) -> Interrupts:
        signals = {**dict.fromkeys(stops(), self.ask), signal.SIGALRM: self.overdue}
        self.before = {number: signal.signal(number, handler) for number, handler in signals.items()}
        if self.final:
            read_end, write_end = os.pipe()
            os.set_blocking(write_end, False)
            signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
            threading.Thread(target=self.last, args=[read_end], daemon=True).start()
        return self

    def last(self, numbers: int) -> None:
        """End the process, if it has not ended itself, LAST seconds after the first signal that asks for that."""
        while not stops() & set(os.read(numbers, 64)):
            pass
        select.select([], [], [], self.LAST)
        os._exit(Exit.FAILED)

    def __exit__(self, *_exception: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self.before.items():
            signal.signal(number, self.too_late if self.final else handler)

    def too_late(self, _number: int, _frame: FrameType | None) -> None:
        """A signal while the result is written: only `last` heeds it."""

    def ask(self, _number: int, _frame: FrameType | None) -> None:
        again, self.requested = self.requested, True
        if not again:
            self.end = clock() + self.LAST
            signal.setitimer(signal.ITIMER_REAL, self.GRACE)
        elif not self.cancelled:
            signal.setitimer(signal.ITIMER_REAL, 0.01)
        if self.waiting:
            raise StoppedError

    def overdue(self, _number: int, _frame: FrameType | None) -> None:
        if not self.requested:
            if self.statement:
                raise SilentServerError
        elif self.waiting or (self.statement and self.cancelled):
            raise StoppedError
        elif self.statement:
            self.cancelled = True
            # in a thread: asking the server opens a connection, which a dead network would block
            threading.Thread(target=cancel, args=[self.statement], daemon=True).start()
            signal.setitimer(signal.ITIMER_REAL, self.PATIENCE)

    def expect_answer(self, seconds: float) -> None:
        """From now on the server has so many seconds; 0 for no limit. After a signal its alarm stands instead."""
        if not self.requested:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            if self.requested:  # just then, and its alarm was replaced
                signal.setitimer(signal.ITIMER_REAL, self.GRACE)

    @contextlib.contextmanager
    def wait(self, *, urgent: bool = False) -> Iterator[None]:
        """Around whatever a signal may end at any point; raises StoppedError, at once after a signal.

        What is `urgent` is begun even then, and ended when the batch in flight would be.
        """
        if self.requested and not urgent:
            raise StoppedError
        self.waiting = True
        try:
            yield
        finally:
            self.waiting = False

    def time_left(self) -> dt.timedelta:
        """How long a last statement may take: after a signal, what is left until the batch in flight would be ended."""
        if not self.requested:
            return dt.timedelta.max
        return dt.timedelta(seconds=signal.getitimer(signal.ITIMER_REAL)[0])

    def pause(self, seconds: float) -> None:
        """Wait; StoppedError if a signal ends it."""
        with self.wait():
            select.select([], [], [], max(0.0, seconds))  # time.sleep fails where libfaketime fakes the clocks

    def sleep(self, seconds: float) -> None:
        """Wait, for a shorter time if a signal comes."""
        with contextlib.suppress(StoppedError):
            self.pause(seconds)


def cancel(connection: psycopg.Connection[Any]) -> None:
    """Ask the server to cancel what the connection is at; that it cannot be asked is for the caller's time-out.

    From psycopg 3.2 on without blocking: its implementation in C would hold up the whole process on a dead network.
    """
    with contextlib.suppress(psycopg.Error):
        safely = getattr(connection, "cancel_safe", None)
        if safely:
            safely(timeout=Interrupts.PATIENCE)
        else:
            connection.cancel()


# Planner settings for statements that walk: with them the index or the page range is the only plan left, whatever the
# statistics of yesterday say. JIT costs more than it saves here, parallel workers would count a page range twice over.
WALKING = {
    **dict.fromkeys(("enable_seqscan", "enable_bitmapscan", "enable_sort", "enable_mergejoin"), "off"),
    **dict.fromkeys(("enable_indexscan", "enable_tidscan", "enable_incremental_sort", "enable_nestloop"), "on"),
    **dict.fromkeys(("enable_hashjoin", "enable_hashagg", "enable_material"), "on"),
    "plan_cache_mode": "auto",  # a plan for each of our statements, one for all the checks of a foreign key
}
# For the survey, which reads a whole table once: references are followed by key, never by hashing a table per step.
# The generous memory only keeps the planner from giving up hashing for the sets of row addresses.
SURVEYING = {
    **dict.fromkeys(("enable_seqscan", "enable_indexscan", "enable_nestloop"), "on"),
    **dict.fromkeys(("enable_hashjoin", "enable_mergejoin"), "off"),
    "work_mem": "1GB",
}


def notify(text: str) -> None:
    """Tell systemd, if it waits for us (sd_notify(3)). Its own library would wait for somebody who does not read."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if path:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(text.encode(), f"\0{path[1:]}" if path.startswith("@") else path)


def sign_of_life(seconds: float) -> None:
    """Tell systemd that the next sign comes within so many seconds; it gets a minute more."""
    notify(f"EXTEND_TIMEOUT_USEC={int((seconds + 60) * 1_000_000)}")


LARGEST = 2**31 - 1  # of a time-out, in PostgreSQL and in libpq
# Of a TCP connection, unless the connection string has its own: a peer that is silently gone is noticed in 30 s.
KEEPALIVES = {
    "keepalives": 1,
    "keepalives_idle": 10,  # seconds, as the next
    "keepalives_interval": 5,
    "keepalives_count": 4,
    "tcp_user_timeout": 30_000,  # milliseconds
}


@dataclass(frozen=True, slots=True)
class Transaction:
    """What a statement is executed in: each must be answered within so many seconds, or SilentServerError ends it."""

    connection: psycopg.Connection[Any]
    interrupts: Interrupts
    seconds: float

    def execute(
        self, query: Query, parameters: Mapping[str, Any] | None = None, *, prepare: bool = False
    ) -> psycopg.Cursor[Any]:
        self.interrupts.expect_answer(self.seconds)
        return self.connection.execute(query, parameters, prepare=prepare)

    def row(
        self, query: Query, parameters: Mapping[str, Any] | None = None, *, prepare: bool = False
    ) -> tuple[Any, ...]:
        """The one row of a statement that always has one."""
        row: tuple[Any, ...]
        (row,) = self.execute(query, parameters, prepare=prepare).fetchall()
        return row


class Session:
    """A connection that can be made again, and transactions in it with the settings that a batch depends on."""

    SLACK = 10.0  # seconds, after which a server that has not kept its own time-out is taken for dead
    LONGEST_PAUSE = 15.0  # seconds between two tries to connect

    def __init__(self, options: DatabaseOptions, password: str | None, interrupts: Interrupts) -> None:
        self.options = options
        self.password = password
        self.interrupts = interrupts
        self.connection: psycopg.Connection[Any] | None = None
        self.process = 0  # of the server, for this connection or the last
        self.direct: bool | None = None  # if known: this connection leads to that process and to no other
        self.prologues: dict[Any, bytes] = {}

    def connect(self, *, urgent: bool = False) -> None:
        """Connect, once; UnavailableError says why not."""
        conninfo = psycopg.conninfo.conninfo_to_dict(self.options.conninfo)
        given: dict[str, Any] = {key: value for key, value in KEEPALIVES.items() if key not in conninfo}
        if self.password is not None:
            given["password"] = self.password
        sign_of_life(self.options.connect_timeout.total_seconds() + self.LONGEST_PAUSE)
        try:
            with self.interrupts.wait(urgent=urgent):
                self.connection = psycopg.connect(
                    self.options.conninfo,
                    autocommit=True,
                    prepare_threshold=LARGEST,  # never by count: only what `Transaction.execute` is told to
                    application_name=PROGRAM,
                    client_encoding="utf8",
                    connect_timeout=min(self.options.connect_timeout // UNITS["s"], LARGEST // 1000),
                    **given,
                )
        except (psycopg.Error, OSError, UnicodeError) as error:
            where = [f"{key} {conninfo[key]}" for key in ("host", "port", "dbname", "user") if conninfo.get(key)]
            text = str(error).removeprefix("connection failed: ")
            lines = dict.fromkeys(text.splitlines())  # libpq tries with TLS and without, and says the same twice
            message = f"{one_line(' '.join(lines))} ({', '.join([*where, 'as database.conninfo says'])})"
            raise UnavailableError(self.scrub(message), getattr(error, "sqlstate", None)) from None
        self.process = self.connection.info.backend_pid
        self.direct = None
        self.prologues = {}  # another server may be of another version

    def connect_in_place_of(self, process: int, *, urgent: bool = False) -> None:
        """Connect, and end that server process of a connection that was lost, lest it go on to hold rows."""
        self.connect(urgent=urgent)
        query = """SELECT pg_terminate_backend(a.pid) FROM pg_stat_activity a
            WHERE a.pid = %(process)s AND a.usename = current_user AND a.application_name = %(program)s
                AND a.pid <> pg_backend_pid()"""
        try:
            with self.transaction(snapshot=True) as transaction:
                transaction.execute(query, {"process": process, "program": PROGRAM})
        except psycopg.Error as error:
            if judge(error) is Verdict.RECONNECT:
                raise  # else it may not be ended, which the next pass makes the best of

    def connect_until(self, deadline: float, tell: Callable[[UnavailableError], None]) -> None:
        """Connect, trying again until the deadline (seconds of `clock`); the first try is always made.

        `tell` is called before another try, once for each new reason.
        """
        pause, told = 1.0, set()
        while True:
            try:
                return self.connect()
            except UnavailableError as error:
                left = deadline - clock()
                if left <= 0:
                    raise
                if error.message not in told:
                    told.add(error.message)
                    tell(error)
            self.interrupts.pause(min(pause, left))
            pause = min(pause * 2, self.LONGEST_PAUSE)

    def scrub(self, text: str) -> str:
        """The text without any secret that the connection was made with."""
        given = psycopg.conninfo.conninfo_to_dict(self.options.conninfo)
        secrets = [self.password, os.environ.get("PGPASSWORD"), *(given.get(key) for key in secret_options())]
        for secret in filter(None, secrets):
            if len(secret) < 4:  # replaced, it would be given away by the holes in ordinary words
                continue
            text = text.replace(str(secret), "********")
        return text

    def close(self) -> None:
        if self.connection:
            self.connection.close()
            self.connection = None

    @contextlib.contextmanager
    def transaction(
        self,
        settings: Mapping[str, str] | None = None,
        *,
        schema: str | None = None,
        snapshot: bool = False,
        timeout: dt.timedelta | None = None,
    ) -> Iterator[Transaction]:
        """A transaction with our settings for it alone: read committed, or one read-only `snapshot`.

        A `schema` is for statements that fire triggers, whose functions may count on finding it and public. Everything
        else looks up names in pg_catalog alone: in public, anybody's function may wait for us under a common name.

        Commits at the end. A lost connection raises psycopg.OperationalError, as does a server that keeps silent for
        SLACK seconds longer than its time-out for a statement allows, COMMIT included. StoppedError ends it when a
        signal has cancelled its statement, or when a signal came and the server does not answer. Where the server does
        not answer, the connection is closed.
        """
        connection = self.connection
        if connection is None:
            raise psycopg.OperationalError("not connected")
        limit = min((timeout or self.options.statement_timeout) // UNITS["ms"], LARGEST)
        transaction = Transaction(connection, self.interrupts, limit / 1000 + self.SLACK)
        sign_of_life(5 * transaction.seconds)  # settings, three statements at most, COMMIT
        self.interrupts.statement = connection
        try:
            transaction.execute(self.prologue(settings or {}, schema, snapshot, str(limit)))
            yield transaction
            self.interrupts.expect_answer(transaction.seconds)
            connection.commit()
        except (StoppedError, SilentServerError):
            self.close()
            raise
        except BaseException as error:
            self.roll_back(transaction)
            if isinstance(error, psycopg.errors.InvalidSqlStatementName | psycopg.errors.DuplicatePreparedStatement):
                self.direct = False  # whatever it looked like
            if isinstance(error, psycopg.errors.QueryCanceled) and self.interrupts.requested:
                raise StoppedError from None
            raise
        finally:
            self.interrupts.statement = None
            self.interrupts.expect_answer(0)

    def execute_alone(self, statement: Query, seconds: float) -> None:
        """Execute what cannot be in a transaction, where no time-out of the server's can be set for it alone.

        It is cancelled after so many seconds: psycopg.errors.QueryCanceled. A signal and silence do what they do in a
        transaction.
        """
        connection = self.connection
        if connection is None:
            raise psycopg.OperationalError("not connected")
        timer = threading.Timer(seconds, cancel, [connection])
        timer.daemon = True
        sign_of_life(seconds + self.SLACK)
        self.interrupts.statement = connection
        try:
            timer.start()
            self.interrupts.expect_answer(seconds + self.SLACK)
            connection.execute(statement)
        except psycopg.errors.QueryCanceled:
            if self.interrupts.requested:
                raise StoppedError from None
            raise
        except (StoppedError, psycopg.OperationalError):  # stopped, silent or lost
            self.close()
            raise
        finally:
            self.interrupts.statement = None
            self.interrupts.expect_answer(0)
            timer.cancel()
            timer.join(Interrupts.PATIENCE)  # a cancel request that is under way must not hit the next statement

    def is_direct(self, transaction: Transaction) -> bool:
        """Whether a statement may be prepared: it is there in the next transaction, and no other client meets it.

        So it is where the process that executes the transaction is the one that the connection was made to. A pooler
        announces a number of its own making, by which it knows whom to cancel.
        """
        if self.direct is None:
            self.direct = transaction.row("SELECT pg_backend_pid()") == (self.process,)
        return self.direct

    def roll_back(self, transaction: Transaction) -> None:
        """End a transaction that failed; where the server does not answer, close the connection."""
        try:
            self.interrupts.expect_answer(transaction.seconds)
            transaction.connection.rollback()
        except (psycopg.Error, StoppedError):
            self.close()

    def prologue(self, settings: Mapping[str, str], schema: str | None, snapshot: bool, limit: str) -> bytes:
        """BEGIN, and SET LOCAL for everything that a role, a database or an environment may have set otherwise.

        But for READ WRITE: a server that is made read-only in mid-run is obeyed.
        """
        wanted = (tuple(settings.items()), schema, snapshot, limit)
        if wanted not in self.prologues:  # composing it takes as long as a small batch
            self.prologues[wanted] = self.compose(settings, schema, snapshot, limit)
        return self.prologues[wanted]

    def compose(self, settings: Mapping[str, str], schema: str | None, snapshot: bool, limit: str) -> bytes:
        mode = sql.SQL("REPEATABLE READ, READ ONLY" if snapshot else "READ COMMITTED")
        ours = {
            "statement_timeout": limit,
            "lock_timeout": str(min(self.options.lock_timeout // UNITS["ms"], LARGEST)),
            # ends us on the server if this machine dies; not for a slow network
            "idle_in_transaction_session_timeout": str(max(int(limit), int(self.SLACK * 1000))),
            "client_connection_check_interval": "1000",
            "row_security": "off",  # an error instead of rows silently hidden
            "synchronous_commit": "local",  # a commit never waits for a standby; deleting again is harmless
            "datestyle": "ISO",
            "timezone": "UTC",
            "extra_float_digits": "1",
            "jit": "off",
            "max_parallel_workers_per_gather": "0",
            "client_min_messages": "error",
            "quote_all_identifiers": "off",
            "exit_on_error": "off",  # or one row ends the session
            **settings,
        }
        assert self.connection is not None
        if self.connection.info.server_version >= 170000:
            ours["transaction_timeout"] = "0"
        lines = [sql.SQL("SET LOCAL {} = {};").format(sql.Identifier(key), sql.Literal(ours[key])) for key in ours]
        names = ("pg_catalog", *((schema, "public") if schema else ()), "pg_temp")
        path = sql.SQL("SET LOCAL search_path = {};").format(sql.SQL(", ").join(map(sql.Identifier, names)))
        begin = sql.SQL("BEGIN ISOLATION LEVEL {};").format(mode)
        # a deferred key would speak up at COMMIT only
        constraints = sql.SQL("" if snapshot else "SET CONSTRAINTS ALL IMMEDIATE;")
        return sql.SQL("\n").join([begin, *lines, path, constraints]).as_bytes(self.connection)


# ── Errors ────────────────────────────────────────────────────────────────────────────────────────────────────────────
# What an error of the server calls for, and what may be said of it. One table for the one, one function for the other.


class Verdict(enum.Enum):
    """What an error of a batch calls for."""

    RETRY = "retry"
    SMALLER = "retry with a smaller batch"
    RECONNECT = "connect again and retry"
    ISOLATE = "find the row"
    FAIL = "fail the policy"
    FAIL_RUN = "fail the run"


# By SQLSTATE, else by its class (the first two characters), else FAIL. The driver's own errors go by their names.
VERDICTS = {
    "40001": Verdict.RETRY,  # serialization failure
    "40P01": Verdict.RETRY,  # deadlock
    "26000": Verdict.RETRY,  # a prepared statement was lost: none is used from now on
    "42P05": Verdict.RETRY,  # its name is another's: likewise
    "55P03": Verdict.SMALLER,  # lock time-out
    "57014": Verdict.SMALLER,  # statement time-out
    "53": Verdict.SMALLER,  # out of memory, of disk, of connections
    "08": Verdict.RECONNECT,
    "25006": Verdict.RECONNECT,  # read-only: this server is not the primary any more, another may be
    "57P01": Verdict.RECONNECT,  # administrator's shutdown
    "57P02": Verdict.RECONNECT,  # crash of another server process
    "57P03": Verdict.RECONNECT,  # starting up
    "57P04": Verdict.FAIL_RUN,  # the database was dropped
    "57P05": Verdict.RECONNECT,  # idle time-out
    "25P03": Verdict.RECONNECT,  # idle in transaction time-out
    "25P04": Verdict.RECONNECT,  # transaction time-out
    "23": Verdict.ISOLATE,  # integrity: a foreign key, or a trigger that says so
    "P0": Verdict.ISOLATE,  # RAISE in PL/pgSQL
    "22": Verdict.ISOLATE,  # data that a trigger chokes on
    "09": Verdict.ISOLATE,
    "27": Verdict.ISOLATE,  # a trigger changed the row under us
    "38": Verdict.ISOLATE,  # external routine
    "39": Verdict.ISOLATE,
    "28": Verdict.FAIL_RUN,  # wrong password, no such role, pg_hba.conf
    "3D": Verdict.FAIL_RUN,  # no such database
    "OperationalError": Verdict.RECONNECT,  # lost
    "SilentServerError": Verdict.RECONNECT,
}
FOREIGN_KEY = ("23503", "23001")  # 23001 is how PostgreSQL 18 reports RESTRICT
# Classes whose message is the server's own sentence about names and settings, and quotes no row.
PUBLIC_CLASSES = {"08", "0A", "25", "26", "28", "3D", "3F", "40", "42", "53", "54", "55", "57", "58"}


def verdict_of(state: str) -> Verdict:
    return VERDICTS.get(state) or VERDICTS.get(state[:2]) or Verdict.FAIL


def judge(error: psycopg.Error) -> Verdict:
    """What an error calls for, whether the server sent it or the driver found the connection lost."""
    verdict = verdict_of(error.sqlstate or type(error).__name__)
    # in a function, that is a trigger, only what a retry cures is about anything but the row
    curable = (Verdict.RETRY, Verdict.SMALLER)
    return Verdict.ISOLATE if error.diag.context and verdict not in curable else verdict


def describe(error: psycopg.Error | RetentionError, *, triggered: bool = False) -> str:
    """What may be said of an error: never a server's DETAIL, and its message only where it cannot quote a row.

    Whatever ran inside a function may quote anything, so there only the names of the condition, the table, the
    constraint and the function are given. It has a context, but for functions in C: `triggered` says there may be one.
    """
    if isinstance(error, RetentionError):
        return error.message
    state, diag = error.sqlstate, error.diag
    if state is None:  # the driver's own; libpq appends the whole of the server's last message to it
        if isinstance(error, SilentServerError):
            return "the server does not answer, nor does it keep its own time-out"
        lost = isinstance(error, psycopg.OperationalError)
        return "the connection to the server was lost" if lost else type(error).__name__
    if state[:2] in PUBLIC_CLASSES and not diag.context and not triggered:
        return one_line(diag.message_primary or "")
    try:
        condition = psycopg.errors.lookup(state).__name__
    except KeyError:
        condition = "error"
    table, constraint = public_name(diag, diag.table_name), public_name(diag, diag.constraint_name)
    # the last line is the trigger itself; those before it may quote what a dynamic statement was made of
    function = re.match(r'(?:\w+ )?PL/\w+ (?:\w+ )?([\w.$"]+)\(', (diag.context or "").rpartition("\n")[2])
    parts = [
        table and f"table {table}",
        constraint and f"constraint {constraint}",
        function and f"function {function[1]}",
    ]
    return ", ".join([condition, *filter(None, parts)])


# Of the server's source, as its errors name it: what checks constraints, and so names real ones.
CHECKS = {"ri_ReportViolation", "_bt_check_unique", "check_exclusion_or_unique_constraint", "ExecConstraints"}


def public_name(diag: psycopg.errors.Diagnostic, name: str | None) -> str | None:
    """The name, unless a function may have put a row's value in its place (RAISE … USING TABLE = …)."""
    return name if not diag.context or diag.source_function in CHECKS else None


def failure_of(error: psycopg.Error, *, triggered: bool = False) -> PolicyFailedError | RunFailedError:
    """The server's error as a policy's failure, or the run's where no policy can go on."""
    failure = RunFailedError if judge(error) is Verdict.FAIL_RUN else PolicyFailedError
    return failure(describe(error, triggered=triggered), error.sqlstate)


# ── Findings ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# What may be wrong with a policy, its table, the server or the schedule: each kind once, with what to say and what to
# do. An error fails a run as well, with the same words. The README's "When something is wrong" is this table.


class Severity(enum.StrEnum):
    """How bad a finding is: an error would fail a run."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class Rule:
    """A kind of finding. `sentence` and `remedy` have places in braces; an error raises `failure` in a run."""

    severity: Severity
    sentence: str
    remedy: str
    sqlstate: str | None = None
    failure: type[RetentionError] = PolicyFailedError


ERROR, WARNING, INFO = Severity
FAILURES = {"": PolicyFailedError, "RunFailedError": RunFailedError, "UnavailableError": UnavailableError}
# A code, its severity, of an error the SQLSTATE and what fails if not the policy; what to say; and what to do.
RULE = re.compile(
    r"^(\w+) (\w+)(?: ([0-9A-Z]{5}))?(?: ([A-Z]\w+Error))?\n    (.+?)\n    -> (.+?)(?=\n\w|\Z)", re.M | re.S
)
RULES = {
    code: Rule(Severity(severity), one_line(sentence), one_line(remedy), state or None, FAILURES[failure or ""])
    for code, severity, state, failure, sentence, remedy in RULE.findall("""\
configuration error
    {problem}
    -> correct the file or its permissions
unreachable error UnavailableError
    {problem}
    -> see that the server runs and lets the role in: database.conninfo, the passfile (mode 0600, of the job's user),
        pg_hba.conf; where there is no role yet, --print-sql
server_too_old error UnavailableError
    the server is older than PostgreSQL 14, which this program needs
    -> upgrade the server
not_primary error 25006 UnavailableError
    the server is not the primary: it is a standby, in recovery
    -> point database.conninfo at the primary
read_only error 25006 UnavailableError
    the server is read-only: default_transaction_read_only is on, by {source}
    -> make it writable again; an administrator or a full disk may have made it so
password_exposed warning
    {file} holds a password and can be read by everybody on this machine (mode {mode})
    -> chmod o-r {file}  # or move the password to a passfile of mode 0600
state_unusable warning
    {problem}
    -> let the user {user} write to the directory of metrics.state: without it there is no cutoff brake, no --status and
        no history; a run replaces a file that is no state file
metrics_unusable warning
    {problem}
    -> let the user {user} write to the directory of metrics.textfile, or set it to "" for no metrics
clock_skew error RunFailedError
    clock skew: the database says {database}, this machine {machine}, more than database.max_clock_skew
        ({allowed}) apart; nothing is deleted
    -> set the clocks right
keys_off error RunFailedError
    foreign keys and triggers are off for the role {role}: session_replication_role is replica
    -> ALTER ROLE {role} IN DATABASE {database} SET session_replication_role = origin;
idle_timeout warning
    the server ends sessions that are idle for {timeout}, and run.pause is {pause}: each batch connects anew
    -> ALTER ROLE {role} IN DATABASE {database} SET idle_session_timeout = 0;
table_missing error 42P01
    table {table} does not exist in the database {database}
    -> correct policy.{policy}.table or database.conninfo
not_a_table error 42809
    {table} is {kind}, not an ordinary table
    -> name the table itself
inherited error 42809
    {table} is {kind}, not a table of its own
    -> name the partitioned table; a table from which others inherit is not purged
key_missing error 42809
    {table} is {spread} and has no primary key of built-in types, by which alone its rows can be told apart
    -> add a primary key
partitions_foreign error 42809
    {table} has partitions that are foreign tables: {partitions}
    -> detach them, or see to their rows where they are
column_missing error 42703
    table {table} has no column "{column}"
    -> correct policy.{policy}.{key}
age_type error 42804
    column "{column}" of {table} is {type}; it must be timestamptz, timestamp or date
    -> correct policy.{policy}.{key}
value_type error 42804
    column "{column}" of {table} is {type}, policy.{policy}.only gives {given}
    -> {accepted}
value_impossible error
    column "{column}" of {table} is {type} and cannot be {value}
    -> correct policy.{policy}.only{labels}
parent_without_key error
    policy.{policy}.parent_column "{column}" of {table} has no foreign key, and the table no single-column
        primary key that it could name
    -> add one of the two, or leave parent_column out
parent_type error 42804
    policy.{policy}.parent_column "{column}" of {table} is {type}, and the primary key "{key}" is {key_type}
    -> correct policy.{policy}.parent_column
cascade error
    deleting from {table} would also delete or change rows of {tables} (a foreign key with a delete action)
    -> if that is meant, set policy.{policy}.allow_cascade = true
cascade_into_policy warning
    deleting from {table} takes rows of {other} along, whatever policy.{others} would keep of them
    -> make the foreign key {constraint} ON DELETE RESTRICT, or be sure that it is meant
privilege_missing error 42501
    permission denied: the role {role} lacks {privileges}, on {table}
    -> {sql}
row_security error 42501
    row-level security of {table} applies to the role {role} and would hide rows from it
    -> ALTER ROLE {role} BYPASSRLS;  -- a policy for the role will not do, it could hide rows unseen
keys_disabled error
    foreign keys of {table} are switched off (DISABLE TRIGGER), so that nothing would keep rows to which others refer
    -> ALTER TABLE {sql} ENABLE TRIGGER ALL;
delete_rule error 0A000
    the rule {rule} on {table} rewrites every DELETE
    -> ALTER TABLE {sql} DISABLE RULE {rule};
delete_trigger warning
    the trigger {trigger} on {table} runs before each row is deleted, and can refuse or cancel that
    -> see that it lets old rows go
replica_identity error 55000
    {table} is published by {publication} and has no replica identity, so that the server refuses every DELETE
    -> ALTER TABLE {sql} REPLICA IDENTITY FULL;  -- or add a primary key
delete_refused error
    the server refuses every DELETE from {table}: {problem}
    -> see what it says
reference_unreadable warning
    the role {role} cannot read {child}, whose foreign key {constraint} may hold rows of {table}: they are found
        by trying, one by one
    -> {sql}
reference_unindexed warning
    {columns} of {child}, by which rows refer to others ({constraint}), has no index: all of {child} is read for
        each row or batch that goes
    -> {sql}
age_unindexed info
    column "{column}" of {table} has no index that a run could follow, so it reads the whole table, page by page
    -> {sql}  -- or leave it so where that is quick enough
all_values info
    policy.{policy} has a parent_column and no `only`: old rows of {table} go whatever their status
    -> if some rows must stay at any age, name the values of those that may go in policy.{policy}.only
age_without_zone info
    column "{column}" of {table} is {type} and is taken as UTC
    -> see that the service writes UTC
not_examined warning
    {table} could not be looked at: {problem}
    -> try again when nobody has it locked; where reading takes too long, raise run.max_run_duration
age_missing warning
    rows of {table} whose "{column}" is NULL, so that this policy never reaches them: {count}
    -> fill the column in and set it NOT NULL, or delete these rows by hand
age_implausible warning
    rows of {table} whose "{column}" is before the year 2000, so that they count as old and would go: {count}
    -> if such a value means something else, correct it
age_in_future warning
    rows of {table} whose "{column}" lies in the future: {count}
    -> see that the service writes UTC and that its clock is right
value_unused warning
    no row of {table} has "{column}" = {value}
    -> see that policy.{policy}.only has it right
within_lifetime warning
    rows of {table} that would go while their "{column}" still lies ahead, so that a token which is used again
        is not recognized any more: {count}
    -> keep them until they have expired: expiry_column with grace
deletes_cancelled error
    claimed {count}, deleted 0: the database reports no error and keeps the rows
    -> look for a BEFORE DELETE trigger on {table}
table_changed error
    {table} was written anew, or its triggers, rules, foreign keys or columns were changed while the run was on it
    -> none is needed: the next run judges the table anew
lag_unreadable error 42501
    the role {role} may not see how far a standby is behind, for which run.max_replication_lag asks
    -> GRANT pg_read_all_stats TO {role};
vacuum_denied warning
    the role {role} may not VACUUM {table}, for which run.vacuum asks
    -> {cure}
cutoff_jumped error
    the cutoff moved forward from {before} to {after}, by {moved}, while {elapsed} passed since the last run;
        nothing is deleted
    -> check policy.{policy} and the clocks; if it is meant, run {command}
schedule_unknown info
    systemd does not tell about {unit}: {problem}
    -> run systemctl status {unit}
timer_missing warning
    {unit} is not both enabled and started (it is {state}), so that systemd starts no run
    -> systemctl enable --now {unit}  # unless cron or another machine starts them
timer_outside_window warning
    {unit} may start a run at {when}, outside run.night_window_utc ({window}): that run would do nothing
    -> change OnCalendar= of the timer, or run.night_window_utc
timer_period warning
    {unit} lets up to {gap} pass between two runs, run.retention_interval is {interval}
    -> change OnCalendar= of the timer and run.retention_interval together
start_timeout warning
    systemd ends {unit} after {timeout} (TimeoutStartSec=), run.max_run_duration is {budget}
    -> set NotifyAccess=main, or a longer TimeoutStartSec=""")
}


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong, or that its user should know; `policy` is None where it is about all of them."""

    code: str
    policy: str | None
    message: str
    remedy: str
    sqlstate: str | None

    @classmethod
    def of(cls, code: str, policy: str | None = None, sqlstate: str | None = None, /, **names: object) -> Finding:
        """One of the RULES, with its places filled in."""
        rule = RULES[code]
        message, remedy = (text.format(policy=policy, **names) for text in (rule.sentence, rule.remedy))
        return cls(code, policy, printable(message), printable(remedy), sqlstate or rule.sqlstate)

    @property
    def severity(self) -> Severity:
        return RULES[self.code].severity

    def failure(self, more: str = "") -> RetentionError:
        """The error that it is in a run."""
        return RULES[self.code].failure(f"{self.message}; {self.remedy}{more}", self.sqlstate)

    def json(self) -> dict[str, str | None]:
        return some(("policy", "severity", "code", "message", "remedy"), self)


# ── What the database says of a table ─────────────────────────────────────────────────────────────────────────────────
# Reads the catalog, once a run, and judges whether a policy can be carried out. Knows the policy, what a run is to do
# beside deleting, and no clock.


@dataclass(frozen=True, slots=True)
class Reference:
    """Something that keeps a row: `child` rows whose columns name it.

    `pairs` are (child column, our column, operator): the operator by which the key itself compares, as SQL.
    """

    name: str
    child: TableName
    pairs: tuple[tuple[str, str, str], ...]
    own: bool  # child and parent are the same table
    indexed: bool  # a probe by the child columns is cheap


@dataclass(frozen=True, slots=True)
class AllowList:
    """The values of `only` for one column, and the type to compare them in."""

    column: str
    type: str
    values: list[Any]
    proven: bool  # by the type: an enum or a boolean has no other values than it names


@dataclass(frozen=True, slots=True)
class Table:
    """One policy with what the catalog says of its table: all that the statements need."""

    policy: Policy
    name: TableName
    oid: int
    fingerprint: str
    triggered: bool  # somebody's triggers run when rows are deleted
    age: str
    age_type: str  # timestamptz, timestamp or date
    only: tuple[AllowList, ...]
    indexed: bool  # a walk in the order of age is cheap
    references: tuple[Reference, ...]
    own_action: bool  # a self reference would delete or change children along with a parent
    key: tuple[tuple[str, str], ...]  # the primary key, columns and types, where a place in the heap names no row
    locks_readable: bool  # by this role: which transaction has locked a row (xmax)
    no_vacuum: str | None  # why this role may not VACUUM it
    cascades: tuple[TableName, ...]  # tables from which a delete here takes rows along, by leave of allow_cascade

    @property
    def other_walk(self) -> str:
        """The walk that needs no index on age."""
        return "key" if self.key else "pages"

    def bound(self, now: dt.datetime) -> str:
        """The cutoff as a value of the column's type, for a strict comparison.

        A date is over at the next midnight UTC, so a date d is past the cutoff c when d + 1 day < c.
        """
        cutoff = self.policy.cutoff(now)
        if self.age_type == "date":
            return (cutoff - dt.timedelta(microseconds=1)).date().isoformat()
        return without_zone(cutoff)


def without_zone(moment: dt.datetime) -> str:
    """The moment in UTC as the server reads it for any type: its sessions are in UTC."""
    return moment.astimezone(UTC).replace(tzinfo=None).isoformat()


# Whatever else a relation may be (an index, a composite type) is "no table".
KINDS_OF_RELATION = {
    "v": "a view",
    "m": "a materialized view",
    "f": "a foreign table",
    "S": "a sequence",
    "r": "a parent of inheriting tables",
}
AGE_TYPES = {1184: "timestamptz", 1114: "timestamp", 1082: "date"}  # fixed type oids of pg_catalog
# Of `only`: the type of the values in the file, and the SQL type to compare them in.
COMPARED = {16: (bool, "boolean"), 20: (int, "bigint"), 21: (int, "bigint"), 23: (int, "bigint")}
INTEGER_BITS = {20: 64, 21: 16, 23: 32}


def tree(table: str) -> str:
    """A table (SQL for its oid) and, where it has them, its partitions: an array."""
    return f"ARRAY (SELECT {table} UNION SELECT p.relid FROM pg_partition_tree({table}) p)"  # noqa: S608, of our own text


# Of the triggers there, those that are its own, or a partition's own, and no copies of another's.
OWN_TRIGGER = f"g.tgrelid = ANY ({tree('c.oid')}) AND (g.tgrelid = c.oid OR g.tgparentid = 0)"
# What was judged of a table, found by its name: which table that is, what its deletes set off (foreign keys into it are
# triggers on it, too) or are made into (rules), and the columns that the policy goes by. A run deletes only while it is
# the same; partitions may come and go.
FINGERPRINT = """COALESCE((
    SELECT pg_catalog.concat_ws(' ', c.oid, c.relkind, c.relam, c.relispartition,
        c.relkind <> 'p' AND EXISTS (SELECT FROM pg_catalog.pg_inherits i WHERE i.inhparent = c.oid), {key},
        (SELECT pg_catalog.string_agg(pg_catalog.concat(g.oid, g.tgenabled), ',' ORDER BY g.oid)
         FROM pg_catalog.pg_trigger g WHERE {own_trigger}),
        CASE WHEN c.relhasrules THEN (
            SELECT pg_catalog.string_agg(pg_catalog.concat('rule', r.oid, r.ev_enabled), ',' ORDER BY r.oid)
            FROM pg_catalog.pg_rewrite r WHERE r.ev_class = c.oid AND r.ev_type = '4') END,
        (SELECT pg_catalog.string_agg(pg_catalog.concat(a.attnum, ':', a.atttypid), ',' ORDER BY a.attnum)
         FROM pg_catalog.pg_attribute a WHERE a.attrelid = c.oid AND a.attname = ANY ({{judged}}::name[])))
    FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = {{schema}} AND c.relname = {{name}}), '')"""


def fingerprint(policy: Policy, *, spread: bool) -> sql.Composed:
    """The fingerprint of a policy's table; `spread`: its rows are found by key, as they may be in partitions.

    It is planned for each batch, so of other tables it asks no more than it must.
    """
    key, own_trigger = "NULL", "g.tgrelid = c.oid"
    if spread:
        key = """(SELECT i.indexrelid FROM pg_catalog.pg_index i
            WHERE i.indrelid = c.oid AND i.indisprimary AND i.indisvalid)"""
        own_trigger = OWN_TRIGGER
    judged = [policy.column, *(policy.only or {}), *filter(None, [policy.parent_column])]
    return sql.SQL(FINGERPRINT.format(key=key, own_trigger=own_trigger)).format(
        schema=Constant(policy.table.schema), name=Constant(policy.table.name), judged=Constant(judged)
    )


RELATION = """
SELECT c.oid::bigint, c.relkind::text, c.relispartition,
       EXISTS (SELECT FROM pg_catalog.pg_inherits i WHERE i.inhparent = c.oid), current_user::text,
       (SELECT a.amname::text FROM pg_catalog.pg_am a WHERE a.oid = c.relam),
       to_regclass('pg_catalog.pg_dist_partition') IS NOT NULL
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %(schema)s AND c.relname = %(name)s
"""
# Citus keeps the rows of a table on other servers, and says so in a catalog of its own.
DISTRIBUTED = "SELECT EXISTS (SELECT FROM pg_catalog.pg_dist_partition d WHERE d.logicalrelid = %(oid)s::oid)"
# An index that a walk can follow both ways: ASC NULLS LAST or DESC NULLS FIRST.
AGE_INDEX = """EXISTS (
    SELECT FROM pg_catalog.pg_index i
        JOIN pg_catalog.pg_class ic ON ic.oid = i.indexrelid
        JOIN pg_catalog.pg_am am ON am.oid = ic.relam
    WHERE i.indrelid = {relation} AND i.indkey[0] = {attnum} AND am.amname = 'btree' AND i.indpred IS NULL
      AND i.indoption[0] IN (0, 3) AND i.indisvalid AND i.indisready AND NOT i.indcheckxmin)"""
# A domain stands for the type under it.
COLUMNS = f"""
WITH RECURSIVE resolved AS (
    SELECT a.attname::text, a.attnum, a.atttypid AS declared, a.atttypid AS type, a.atttypmod AS modifier
    FROM pg_catalog.pg_attribute a WHERE a.attrelid = %(oid)s AND NOT a.attisdropped
    UNION ALL
    SELECT r.attname, r.attnum, r.declared, t.typbasetype, t.typtypmod
    FROM resolved r JOIN pg_catalog.pg_type t ON t.oid = r.type WHERE t.typtype = 'd'
)
SELECT r.attname, r.type::bigint, t.typtype = 'e', t.typcategory = 'S', pg_catalog.format_type(r.declared, r.modifier),
       ARRAY(SELECT e.enumlabel::text FROM pg_catalog.pg_enum e WHERE e.enumtypid = r.type ORDER BY e.enumsortorder),
       CASE WHEN r.type IN (1042, 1043) AND r.modifier >= 4 THEN r.modifier - 4 END,  -- char and varchar
       {AGE_INDEX.format(relation="%(oid)s", attnum="r.attnum")}
FROM resolved r JOIN pg_catalog.pg_type t ON t.oid = r.type WHERE t.typtype <> 'd'
"""  # noqa: S608, of our own text
# With the operator that is "equal" to its index (strategy 3 of a btree), and what a text is cast to for it: the type
# without its modifier, which may change, in the collation of the index.
PRIMARY_KEY = """
SELECT a.attname::text, format('OPERATOR(%%I.%%s)', n.nspname, o.oprname),
       concat(format_type(a.atttypid, -1), ' COLLATE ' || NULLIF(a.attcollation, 0)::regcollation)
FROM pg_catalog.pg_index i
    CROSS JOIN unnest(i.indkey::int2[], i.indclass::oid[]) WITH ORDINALITY AS u (attnum, class, position)
    JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = u.attnum
    JOIN pg_catalog.pg_opclass c ON c.oid = u.class  -- a column that is only included has none
    JOIN pg_catalog.pg_amop m ON m.amopfamily = c.opcfamily AND m.amopstrategy = 3
        AND m.amoplefttype = c.opcintype AND m.amoprighttype = c.opcintype
    JOIN pg_catalog.pg_operator o ON o.oid = m.amopopr
    JOIN pg_catalog.pg_namespace n ON n.oid = o.oprnamespace
WHERE i.indrelid = %(oid)s AND i.indisprimary AND i.indisvalid  -- partitions may not have it yet: it is not unique then
ORDER BY u.position
"""
FOREIGN_PARTITIONS = """
SELECT string_agg(p.relid::text, ', ' ORDER BY 1)
FROM pg_partition_tree(%(oid)s) p JOIN pg_catalog.pg_class c ON c.oid = p.relid WHERE c.relkind = 'f'
"""
# An index by which the children of one row are found; leaving out NULLs, as EF Core's filtered indexes do, is no loss.
CHILD_INDEX = """EXISTS (
    SELECT FROM pg_catalog.pg_index i
        JOIN pg_catalog.pg_class ic ON ic.oid = i.indexrelid
        JOIN pg_catalog.pg_am am ON am.oid = ic.relam
        JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
    WHERE i.indrelid = {relation} AND a.{column}
      AND i.indisvalid AND i.indisready AND am.amname IN ('btree', 'hash')
      AND (i.indpred IS NULL
           OR pg_catalog.pg_get_expr(i.indpred, i.indrelid) = pg_catalog.format('(%I IS NOT NULL)', a.attname)))"""
# Foreign keys into the table, and from there as far as a delete spreads: into what it deletes from (c), not into what
# it only sets to NULL (n) or to its default (d). The rows of a partitioned child are found through the child itself.
REFERENCES = f"""
WITH RECURSIVE reached AS (
    SELECT k.oid, k.conrelid, k.confrelid, k.confdeltype FROM pg_catalog.pg_constraint k
    WHERE k.contype = 'f' AND k.confrelid = ANY ({tree("%(oid)s::oid")}) AND k.conparentid = 0
    UNION
    SELECT k.oid, k.conrelid, k.confrelid, k.confdeltype
    FROM reached r JOIN pg_catalog.pg_constraint k ON k.confrelid = ANY ({tree("r.conrelid")})
    WHERE r.confdeltype = 'c' AND k.contype = 'f' AND k.conparentid = 0
)
SELECT k.conname::text, n.nspname::text, c.relname::text,
       k.confrelid = ANY ({tree("%(oid)s::oid")}) AS direct,
       k.conrelid = k.confrelid AND k.confrelid = %(oid)s,
       k.confdeltype::text,
       ARRAY(SELECT ARRAY[x.attname::text, p.attname::text, concat(
                 CASE WHEN p.attcollation <> x.attcollation THEN 'COLLATE ' || l.oid::pg_catalog.regcollation END,
                 format(' OPERATOR(%%I.%%s)', s.nspname, o.oprname))]
             FROM unnest(k.conkey, k.confkey, k.conpfeqop) WITH ORDINALITY AS u (child, parent, equal, position)
                 JOIN pg_catalog.pg_attribute x ON x.attrelid = k.conrelid AND x.attnum = u.child
                 JOIN pg_catalog.pg_attribute p ON p.attrelid = k.confrelid AND p.attnum = u.parent
                 JOIN pg_catalog.pg_operator o ON o.oid = u.equal
                 JOIN pg_catalog.pg_namespace s ON s.oid = o.oprnamespace
                 LEFT JOIN pg_catalog.pg_collation l ON l.oid = p.attcollation
             ORDER BY u.position),
       pg_catalog.row_security_active(k.conrelid), NOT pg_catalog.has_schema_privilege(n.oid, 'USAGE'),
       (SELECT bool_or(NOT pg_catalog.has_column_privilege(k.conrelid, u.attnum, 'SELECT'))
        FROM unnest(k.conkey) AS u (attnum)),
       c.relkind = 'p' AS partitioned,
       {CHILD_INDEX.format(relation="k.conrelid", column="attnum = ANY (k.conkey)").replace("%", "%%")}
FROM reached r JOIN pg_catalog.pg_constraint k ON k.oid = r.oid
    JOIN pg_catalog.pg_class c ON c.oid = k.conrelid
    JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
ORDER BY k.conname, k.oid
"""  # noqa: S608, of our own text
PRIVILEGES = """
SELECT CASE WHEN NOT pg_catalog.has_schema_privilege(c.relnamespace, 'USAGE') THEN n.nspname::text END,
       pg_catalog.has_table_privilege(c.oid, 'DELETE'), pg_catalog.has_any_column_privilege(c.oid, 'UPDATE'),
       ARRAY(SELECT u.name FROM unnest(%(columns)s::text[]) WITH ORDINALITY AS u (name, position)
             WHERE NOT pg_catalog.has_column_privilege(c.oid, u.name, 'SELECT') ORDER BY u.position)
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = %(oid)s
"""
# What of the table this role may not VACUUM. From PostgreSQL 17 on there is a privilege for it, which can be granted;
# before, it takes the owner of the table or of the database.
VACUUM_RIGHTS = f"""
SELECT string_agg(r.oid::regclass::text, ', ' ORDER BY r.oid), current_setting('server_version_num')::int >= 170000
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_class r ON r.oid = ANY ({tree("c.oid")}), pg_catalog.pg_database d
WHERE c.oid = %(oid)s AND d.datname = current_database()
    AND NOT (pg_has_role(r.relowner, 'USAGE') OR pg_has_role(d.datdba, 'USAGE') OR CASE
        WHEN current_setting('server_version_num')::int >= 170000 THEN has_table_privilege(r.oid, 'MAINTAIN')
        ELSE false END)
"""  # noqa: S608, of our own text
# Whether row security applies to us; rules that rewrite a DELETE; triggers before a row is deleted (of pg_trigger.h:
# row 1, before 2, delete 8); a publication of deletes for a table by whose rows a subscriber could not know them again.
HINDRANCES = f"""
SELECT pg_catalog.row_security_active(c.oid),
       (SELECT min(r.rulename)::text FROM pg_catalog.pg_rewrite r
        WHERE r.ev_class = c.oid AND r.ev_type = '4' AND r.ev_enabled IN ('O', 'A')),
       ARRAY(SELECT g.tgname::text FROM pg_catalog.pg_trigger g
             WHERE {OWN_TRIGGER} AND NOT g.tgisinternal AND g.tgenabled IN ('O', 'A') AND g.tgtype & 11 = 11
             ORDER BY 1),
       EXISTS (SELECT FROM pg_catalog.pg_trigger g
               WHERE {OWN_TRIGGER} AND NOT g.tgisinternal AND g.tgenabled IN ('O', 'A') AND g.tgtype & 8 = 8),
       EXISTS (SELECT FROM pg_catalog.pg_trigger g
               WHERE g.tgrelid = ANY ({tree("c.oid")}) AND g.tgisinternal AND g.tgenabled IN ('D', 'R')),
       CASE WHEN c.relkind <> 'p' AND (c.relreplident = 'n' OR c.relreplident <> 'f' AND NOT EXISTS (
                SELECT FROM pg_catalog.pg_index i
                WHERE i.indrelid = c.oid AND CASE c.relreplident
                    WHEN 'd' THEN i.indisprimary AND i.indimmediate ELSE i.indisreplident END))
            THEN (SELECT min(p.pubname)::text FROM pg_catalog.pg_publication p
                      JOIN pg_catalog.pg_publication_tables t ON t.pubname = p.pubname
                  WHERE p.pubdelete AND t.schemaname = n.nspname AND t.tablename = c.relname) END
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = %(oid)s
"""  # noqa: S608, of our own text


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    type: int  # oid of the type, of the one under it for a domain
    enum: bool
    text: bool
    declared: str
    labels: list[str]
    length: int | None  # in characters, where it is limited
    indexed: bool


def inspect(session: Session, policy: Policy, policies: Sequence[Policy], options: RunOptions) -> Inspection:
    """What the catalog says of the policy's table; `policies` are all of them, this one included."""
    with session.transaction(snapshot=True) as transaction:
        inspection = Inspection(transaction, policy, options)
        inspection.look(policies)
    if inspection.table:
        try:
            with session.transaction(snapshot=True) as transaction:
                transaction.execute(*explained(inspection.table))
        except psycopg.Error as error:
            if judge(error) in (Verdict.RECONNECT, Verdict.FAIL_RUN):
                raise
            if judge(error) is Verdict.FAIL:  # anything else, such as a lock, is for the run to meet
                problem = " ".join(filter(None, [error.diag.message_primary, error.diag.message_detail]))
                inspection.report("delete_refused", error.sqlstate, problem=problem)
    return inspection


class Inspection:
    """One look at the catalog, in one snapshot. What is wrong is reported, and the look goes on as far as it can."""

    def __init__(self, transaction: Transaction, policy: Policy, options: RunOptions) -> None:
        self.transaction = transaction
        self.policy = policy
        self.options = options
        self.name = policy.table
        self.judged: Table | None = None
        self.lifetime: Column | None = None  # where the policy does not go by it: when a row's token would expire
        self.findings: list[Finding] = []
        self.columns: dict[str, Column] = {}
        self.role = ""
        self.oid = 0

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity is ERROR]

    @property
    def table(self) -> Table | None:
        """What a run may delete from; None if there is an error."""
        return None if self.errors else self.judged

    def failure(self) -> RetentionError:
        """The error that the policy has in a run; there is more in `--check` if there is more."""
        first, *others = self.errors
        return first.failure(f" ({len(others)} more: {PROGRAM} --check)" if others else "")

    def ask(self, query: str, **parameters: object) -> list[tuple[Any, ...]]:
        return self.transaction.execute(query.encode(), {"oid": self.oid, **parameters}).fetchall()

    def report(self, code: str, sqlstate: str | None = None, /, **names: object) -> None:
        names = {"table": self.name, "role": self.role, **names}
        self.findings.append(Finding.of(code, self.policy.name, sqlstate, **names))

    def look(self, policies: Sequence[Policy]) -> None:
        relations = self.ask(RELATION, schema=self.name.schema, name=self.name.name)
        if not relations:
            ((database,),) = self.ask("SELECT current_database()")
            self.report("table_missing", database=database)
            return
        self.oid, relkind, is_partition, has_children, role, method, citus = relations[0]
        self.role = quoted(role)
        partitioned = relkind == "p" and not is_partition
        if not partitioned and (relkind != "r" or is_partition or has_children):
            kind = "a partition" if is_partition else KINDS_OF_RELATION.get(relkind, "no table")
            self.report("inherited" if is_partition or relkind == "r" else "not_a_table", kind=kind)
            return
        spread = ""
        if partitioned:
            spread = "partitioned"
        elif citus and self.ask(DISTRIBUTED) == [(True,)]:
            spread = "distributed"
        elif method != "heap":
            spread = f"stored by {method}"
        key = self.key(spread) if spread else ()
        (judged,) = self.transaction.row(sql.SQL("SELECT {}").format(fingerprint(self.policy, spread=bool(key))), {})
        self.columns = {row[0]: Column(*row) for row in self.ask(COLUMNS)}
        age = self.age()
        only = [self.allow_list(column, values) for column, values in (self.policy.only or {}).items()]
        references, own_action, cascades = self.references(policies)
        # chains go as quickly page by page
        if age and not age.indexed and not any(reference.own for reference in references):
            cure = create_index(self.name, [age.name], concurrently=not partitioned)
            self.report("age_unindexed", column=age.name, sql=cure)
        if self.policy.parent_column in self.columns and not self.policy.only:
            self.report("all_values")
        reads = dict.fromkeys(
            [
                *([column for column, _ in key] if spread else ["ctid"]),
                *([age.name] if age else []),
                *(allowed.column for allowed in only if allowed),
                *(pair[0] for reference in references if reference.own for pair in reference.pairs),
                *(pair[1] for reference in references for pair in reference.pairs),
            ]
        )
        self.privileges(list(reads))
        self.sight_of_standbys()
        triggered, no_vacuum = self.hindrances(), self.refusal_to_vacuum()
        if age is None or not all(only):
            return
        self.lifetime = self.find_lifetime(policies)
        self.judged = Table(
            policy=self.policy,
            name=self.name,
            oid=self.oid,
            fingerprint=judged,
            triggered=triggered,
            age=age.name,
            age_type=AGE_TYPES[age.type],
            only=tuple(filter(None, only)),
            indexed=age.indexed,
            references=tuple(references),
            own_action=own_action,
            cascades=cascades,
            key=key,
            locks_readable=self.may_read("xmax"),
            no_vacuum=no_vacuum,
        )

    def key(self, spread: str) -> tuple[tuple[str, str], ...]:
        """The primary key, with the types of its columns: what names a row where its place in the heap does not."""
        key = self.ask(PRIMARY_KEY)
        ((foreign,),) = self.ask(FOREIGN_PARTITIONS)
        if foreign:  # with which there can be no key
            self.report("partitions_foreign", partitions=foreign)
        elif not key or any(not operator.startswith("OPERATOR(pg_catalog.") for _, operator, _ in key):
            self.report("key_missing", spread=spread)
        return tuple((column, kind) for column, _, kind in key)

    def column(self, key: str, wanted: str) -> Column | None:
        if wanted not in self.columns:
            self.report("column_missing", column=wanted, key=key)
        return self.columns.get(wanted)

    def age(self) -> Column | None:
        """The column that the policy goes by; None if it cannot."""
        key = "age_column" if self.policy.age_column else "expiry_column"
        age = self.column(key, self.policy.column)
        if age is None:
            return None
        if age.type not in AGE_TYPES:
            self.report("age_type", column=age.name, type=age.declared, key=key)
            return None
        if age.type == 1114:  # timestamp
            self.report("age_without_zone", column=age.name, type=age.declared)
        return age

    def allow_list(self, name: str, values: list[Any]) -> AllowList | None:
        """The column with its values; None if it cannot have one of them."""
        column = self.column("only", name)
        if column is None:
            return None
        about = {"column": name, "type": column.declared}
        kind, comparison = (str, "text") if column.enum or column.text else COMPARED.get(column.type, (None, ""))
        if type(values[0]) is not kind:
            names = {str: "text", bool: "booleans", int: "whole numbers"}
            accepted = f"give {names[kind]}" if kind else "it can be text, an enum, a whole number or boolean"
            self.report("value_type", given=names[type(values[0])], accepted=accepted, **about)
            return None
        largest = 2 ** (INTEGER_BITS.get(column.type, 64) - 1)
        before = len(self.findings)
        for value in values:
            if column.enum and value not in column.labels:
                sqlstate, labels = "22P02", ": " + ", ".join(column.labels)
            elif column.length is not None and len(value) > column.length:
                sqlstate, labels = "22001", ""
            elif kind is int and not -largest <= value < largest:
                sqlstate, labels = "22003", ""
            else:
                continue
            self.report("value_impossible", sqlstate, value=repr(value), labels=labels, **about)
        if len(self.findings) > before:
            return None
        return AllowList(name, comparison, values, column.enum or kind is bool)

    def references(self, policies: Sequence[Policy]) -> tuple[list[Reference], bool, tuple[TableName, ...]]:
        """What keeps rows: our own foreign keys of any action, and others that refuse, where this role may read them.

        And whether one of our own has an action; and the tables that a delete here would spread to.
        """
        found, own_action = [], False
        cascades: dict[TableName, tuple[str, str]] = {}
        for row in self.ask(REFERENCES):
            name, schema, relation_name, direct, own, action, pairs = row[:7]
            row_security, schema_hidden, columns_hidden, partitioned, indexed = row[7:]
            columns = [pair[0] for pair in pairs]
            child = TableName(schema, relation_name)
            refuses = action in ("a", "r")  # NO ACTION, RESTRICT
            readable = not (row_security or schema_hidden or columns_hidden)
            listed = ", ".join(map(quoted, columns))
            if not indexed:
                cure = create_index(child, columns, concurrently=not partitioned)
                self.report("reference_unindexed", columns=listed, constraint=quoted(name), child=child, sql=cure)
            if own and direct:
                own_action |= not refuses
            elif not refuses:
                if action == "c" or child not in cascades:
                    cascades[child] = name, action
            elif direct and not readable:  # such rows are found by isolation
                cures = [
                    (schema_hidden, f"GRANT USAGE ON SCHEMA {quoted(schema)} TO {self.role}"),
                    (columns_hidden, f"GRANT SELECT ({listed}) ON {child.sql} TO {self.role}"),
                    (row_security, f"ALTER ROLE {self.role} BYPASSRLS"),
                ]
                cure = " ".join(f"{statement};" for needed, statement in cures if needed)
                self.report("reference_unreadable", constraint=quoted(name), child=child, sql=cure)
            if direct and (own or (refuses and readable)):
                found.append(Reference(name, child, tuple(map(tuple, pairs)), own, indexed))
        parent = self.policy.parent_column
        if parent and not any(r.own and [pair[0] for pair in r.pairs] == [parent] for r in found):
            found += self.reference_by_key(parent)
        if cascades and not self.policy.allow_cascade:
            self.report("cascade", tables=", ".join(sorted(map(str, cascades))))
        for other in policies:
            constraint, action = cascades.get(other.table, ("", ""))
            if action == "c":
                names = {"other": other.table, "others": other.name, "constraint": quoted(constraint)}
                self.report("cascade_into_policy", **names)
        return found, own_action, tuple(cascades)

    def reference_by_key(self, name: str) -> list[Reference]:
        """The reference that `parent_column` declares and no constraint does: to the single-column primary key."""
        parent = self.column("parent_column", name)
        if parent is None:
            return []
        key = self.ask(PRIMARY_KEY)
        if len(key) != 1:
            self.report("parent_without_key", column=name)
            return []
        named = self.columns[key[0][0]]
        if COMPARED.get(parent.type, parent.type) != COMPARED.get(named.type, named.type) and not (
            parent.text and named.text
        ):
            self.report("parent_type", column=name, type=parent.declared, key=named.name, key_type=named.declared)
            return []
        child_index = CHILD_INDEX.replace("%", "%%").format(relation="%(oid)s::oid", column="attname = %(column)s")
        ((indexed,),) = self.ask(f"SELECT {child_index}", column=name)
        if not indexed:
            names = {"columns": quoted(name), "constraint": "parent_column", "child": self.name}
            self.report("reference_unindexed", sql=create_index(self.name, [name]), **names)
        return [Reference(name, self.name, ((name, *key[0][:2]),), True, indexed)]

    def privileges(self, reads: Sequence[str]) -> None:
        """Whether the role may do what the statements do: read these columns, lock rows (UPDATE on any), delete."""
        ((schema, may_delete, may_lock, unreadable),) = self.ask(PRIVILEGES, columns=reads)
        lacks, grants = [], []
        if unreadable:
            grants.append(f"SELECT ({', '.join(map(quoted, unreadable))})")
            lacks += grants
        if not may_lock:
            lacks.append("UPDATE on any one column")
            key = [quoted(row[0]) for row in self.ask(PRIMARY_KEY)]
            grants.append(f"UPDATE ({key[0] if key else quoted(self.policy.column)})")
        if not may_delete:
            lacks.append("DELETE")
            grants.append("DELETE")
        statements = [f"GRANT {', '.join(grants)} ON {self.name.sql} TO {self.role}"] if grants else []
        if schema:
            lacks.insert(0, f"USAGE on the schema {quoted(schema)}")
            statements.insert(0, f"GRANT USAGE ON SCHEMA {quoted(schema)} TO {self.role}")
        if lacks:
            self.report("privilege_missing", privileges=", ".join(lacks), sql="; ".join(statements) + ";")

    def sight_of_standbys(self) -> None:
        """Whether the role may see how far they are behind, if it is to wait for them."""
        if self.options.max_replication_lag:
            ((may_see,),) = self.ask("SELECT pg_has_role('pg_read_all_stats', 'USAGE')")
            if not may_see:
                self.report("lag_unreadable")

    def refusal_to_vacuum(self) -> str | None:
        """Why the role may not VACUUM the table, if it is to: the server would pass over it with a mere warning."""
        if not self.options.vacuum:
            return None
        ((denied, grantable),) = self.ask(VACUUM_RIGHTS)
        if not denied:
            return None
        leave = "leave it to autovacuum, with run.vacuum = false"
        grant = f"GRANT MAINTAIN ON {denied} TO {self.role}; -- or {leave}"
        self.report("vacuum_denied", cure=grant if grantable else f"{leave}: before PostgreSQL 17 only the owner may")
        finding = self.findings[-1]
        return f"{finding.message}: {finding.remedy}"

    def find_lifetime(self, policies: Sequence[Policy]) -> Column | None:
        """The column by which another policy of the table goes, or one of the usual name, if the role may read it."""
        if self.policy.expiry_column:
            return None
        names = [policy.expiry_column for policy in policies if policy.table == self.name]
        for column in filter(None, map(self.columns.get, [*filter(None, names), "expires_at"])):
            if column.type in AGE_TYPES and self.may_read(column.name):
                return column
        return None

    def may_read(self, column: str) -> bool:
        query = "SELECT pg_catalog.has_column_privilege(%(oid)s::oid, %(column)s, 'SELECT')"
        return self.ask(query, column=column) == [(True,)]

    def hindrances(self) -> bool:
        """What would keep rows from us, or keep them from going; whether somebody's triggers see them go."""
        ((row_security, rule, triggers, triggered, keys_disabled, publication),) = self.ask(HINDRANCES)
        if keys_disabled:
            self.report("keys_disabled", sql=self.name.sql)
        if row_security:
            self.report("row_security")
        if rule:
            self.report("delete_rule", rule=quoted(rule), sql=self.name.sql)
        for trigger in triggers:
            self.report("delete_trigger", trigger=quoted(trigger))
        if publication:
            self.report("replica_identity", publication=quoted(publication), sql=self.name.sql)
        return bool(triggered)


def create_index(table: TableName, columns: Sequence[str], *, concurrently: bool = True) -> str:
    return f"CREATE INDEX {'CONCURRENTLY ' if concurrently else ''}ON {table.sql} ({', '.join(map(quoted, columns))});"


# ── Statements ────────────────────────────────────────────────────────────────────────────────────────────────────────
# SQL as data: functions of what is known of a table. They know no clock and run nothing. Aliases: t is a row of the
# policy's table, p a parent (the row that is named), x a child (the row that names it).


@dataclass(frozen=True, slots=True)
class Walk:
    """How a pass goes through a table: along an index on age, by ranges of pages, or, over partitions, by primary key.

    With references the walk goes from new to old, because a chain's children are as a rule newer than their parents,
    and then goes in one pass; without, from old to new. `parts` are what statements of the walk are made of, by the
    names of their places.
    """

    name: str  # as the log calls it: index, pages or key
    descending: bool
    parts: dict[str, sql.Composable]


# What differs between the walks. An index serves a comparison of rows by its leading column, and has ties in the order
# of addresses; ranges of pages are TID range scans. Operators on a column are named in full: its type may be a domain,
# for which anybody could put one of the same name into public.
#   ahead       t lies in the walk's range and beyond its position
#   passed      t was walked over before this batch (descending walks only)
WALKS = {
    "index": {
        "ahead": "(%(age)s::{type} IS NULL"
        " OR (t.{age}, {address}) OPERATOR(pg_catalog.{beyond}) (%(age)s::{type}, %(tid)s::{address_type}))",
        "order": "t.{age} {direction}, {address} {direction}",
        "passed": "(%(done)s::boolean"
        " OR (t.{age}, {address}) OPERATOR(pg_catalog.>=) (%(age)s::{type}, %(tid)s::{address_type}))",
    },
    "key": {
        "ahead": "(%(tid)s::text IS NULL OR ({key}) OPERATOR(pg_catalog.{beyond}) ({position}))",
        "order": "{key_in_order}",
        "passed": "(%(done)s::boolean OR ({key}) OPERATOR(pg_catalog.>=) ({position}))",
    },
    "pages": {
        "ahead": "t.ctid {beyond} %(tid)s::tid AND t.ctid {short_of} %(edge)s::tid",
        "order": "t.ctid {direction}",
        "passed": "t.ctid >= %(tid)s::tid",
    },
}
NO_HORIZON = "horizon AS MATERIALIZED (SELECT NULL::{type} AS age, NULL::{address_type} AS tid WHERE false)"
# The next rows of the policy; `horizon`, if there is one, is the row at which a batch ends even if it is not full.
LOOK = """{no_horizon}, look AS MATERIALIZED (
    SELECT {selected} FROM {rows} t WHERE {ahead} AND {rule_in_order} ORDER BY {order} LIMIT %(limit)s::bigint
)"""
# Old rows that are not the policy's may be the majority: a batch reads %(scan)s at most.
SCANNING_LOOK = """scanned AS MATERIALIZED (
    SELECT {selected}, {chosen} AS chosen FROM {rows} t WHERE {ahead} AND {in_order}
    ORDER BY {order} LIMIT %(scan)s::bigint
), horizon AS MATERIALIZED (
    SELECT age, tid FROM scanned OFFSET %(scan)s::bigint - 1
), look AS MATERIALIZED (
    SELECT * FROM scanned WHERE chosen LIMIT %(limit)s::bigint
)"""
# Fields of `Batch`, in its order.
RESULT = """(SELECT n FROM went) AS deleted,
       (SELECT age::text FROM last) AS last_age,
       (SELECT tid::text FROM last) AS last_tid,
       CASE WHEN (SELECT n FROM went) > 0 THEN pg_current_xact_id()::text END AS xid,
       (SELECT tid::text FROM gone LIMIT 1) AS witness,
       (SELECT age::text FROM gone LIMIT 1) AS witness_age,
       (SELECT unchanged FROM judged) AS unchanged,
       NULL::boolean AS near,
       ARRAY (SELECT tid::text FROM claim WHERE NOT %(delete)s::boolean) AS claimed_tids"""


def walk_of(table: Table, name: str) -> Walk:
    down = bool(table.references)
    direction = "DESC" if down else "ASC"
    parts: dict[str, sql.Composable] = {
        "age": Name(table.age),
        "rows": rows(table),
        "type": sql.SQL(table.age_type),
        "address": address(table),
        "address_type": sql.SQL(address_type(table)),
        "key": sql.SQL(", ").join(key_columns(table)),
        "key_in_order": sql.SQL(", ").join(
            sql.SQL("{} {}").format(key, sql.SQL(direction)) for key in key_columns(table)
        ),
        "position": key_of(table, "%(tid)s"),
        "at_seen": at(table, "(SELECT tids FROM seen)"),
        "at_claimed": at(table, "(SELECT tids FROM claimed, judged WHERE %(delete)s::boolean AND unchanged)"),
        "at_chosen": at(table, "ARRAY (SELECT tid FROM chosen, judged WHERE %(delete)s::boolean AND unchanged)"),
        # a key may be another row's by now
        "once_more": sql.SQL("AND {}").format(predicate(table)) if table.key else sql.SQL(""),
        "at_free": at(table, "ARRAY (SELECT tid FROM free)"),
        "at_seeds": at(table, "%(seeds)s"),
        "selected": selected(table),
        "rule": predicate(table),
        "rule_in_order": predicate(table, ordered=name == "index"),
        "judged": sql.SQL("judged AS MATERIALIZED (SELECT {} AS unchanged)").format(unchanged(table)),
        "beyond": sql.SQL("<" if down else ">"),
        "short_of": sql.SQL(">=" if down else "<"),
        "in_order": old(table) if name == "index" else sql.SQL("true"),
        "chosen": allowed(table) if name == "index" else predicate(table),
        "direction": sql.SQL(direction),
    }
    scanning = name == "key" or (name == "index" and table.only)
    look = SCANNING_LOOK if scanning else LOOK
    for place, text in {**WALKS[name], "no_horizon": NO_HORIZON, "look": look, "result": RESULT}.items():
        parts[place] = sql.SQL(text).format(**parts)
    return Walk(name, down, parts)


def predicate(table: Table, alias: str = "t", policy: str = "", *, ordered: bool = False) -> sql.Composed:
    """The whole rule on one row. An index may serve it only in a walk `ordered` by age: `(…) IS TRUE` fits none.

    `policy` is a prefix of the parameters' names, for statements about several policies.
    """
    age = old(table, alias, policy) if ordered else sql.SQL("({}) IS TRUE").format(old(table, alias, policy))
    return sql.SQL("{} AND {}").format(age, allowed(table, alias, policy))


def old(table: Table, alias: str = "t", policy: str = "") -> sql.Composed:
    older = "{}.{} OPERATOR(pg_catalog.<) " + f"%({policy}bound)s::{table.age_type}"
    return sql.SQL(older).format(sql.Identifier(alias), Name(table.age))


def allowed(table: Table, alias: str = "t", policy: str = "") -> sql.Composed:
    """The row has the values of `only`."""
    row, conditions = sql.Identifier(alias), [sql.SQL("true").format()]
    for number, only in enumerate(table.only):
        cast = "::text" if only.type == "text" else ""
        condition = f"{cast} OPERATOR(pg_catalog.=) ANY (%({policy}only{number})s::{only.type}[])"
        conditions.append(sql.SQL("({}.{}" + condition + ") IS TRUE").format(row, Name(only.column)))
    return sql.SQL(" AND ").join(conditions)


def parameters_of(table: Table, bound: str, policy: str = "") -> dict[str, Any]:
    """The parameters of `predicate`, the cutoff being `bound`."""
    lists = {f"{policy}only{number}": only.values for number, only in enumerate(table.only)}
    return {f"{policy}bound": bound, **lists}


def unchanged(table: Table) -> sql.Composed:
    """The table is what was judged; whoever changes it waits for our lock on it."""
    now = fingerprint(table.policy, spread=bool(table.key))
    return sql.SQL("{} = {}").format(now, sql.Literal(table.fingerprint))


def relation(name: TableName) -> sql.Composed:
    return sql.SQL("{}.{}").format(Name(name.schema), Name(name.name))


def rows(table: Table) -> sql.Composed:
    """Where the policy's rows are: in the table alone, or in the partitions of it."""
    return sql.SQL("{}" if table.key else "ONLY {}").format(relation(table.name))


def key_columns(table: Table, alias: str = "t") -> list[sql.Composed]:
    return [sql.SQL("{}.{}").format(sql.Identifier(alias), Name(column)) for column, _ in table.key]


def address(table: Table, alias: str = "t") -> sql.Composed:
    """What tells a row from all others: its place in the heap. Over partitions that would name the wrong rows, so it is
    the primary key there, as the text of an array: one value, whatever the columns of the key.
    """
    if not table.key:
        return sql.SQL("{}.ctid").format(sql.Identifier(alias))
    texts = [sql.SQL("{}::text").format(column) for column in key_columns(table, alias)]
    return sql.SQL('(ARRAY[{}]::text COLLATE "C")').format(sql.SQL(", ").join(texts))


def address_type(table: Table) -> str:
    return "text" if table.key else "tid"


def key_of(table: Table, tid: str) -> sql.Composed:
    """The primary key that an address stands for."""
    kinds = [kind.replace("%", "%%") for _, kind in table.key]
    columns = [f"(({tid}::text::text[])[{place}])::{kind}" for place, kind in enumerate(kinds, 1)]
    return sql.SQL(", ").join(map(sql.SQL, columns))


def at(table: Table, addresses: str) -> sql.Composed:
    """Row t has one of these addresses, an array. By its place, or by the index of its primary key; never by a join on
    ctid, for which the planner reads the table.
    """
    array = sql.SQL(addresses)
    if not table.key:
        return sql.SQL("t.ctid = ANY ({}::tid[])").format(array)
    return sql.SQL("EXISTS (SELECT FROM unnest({}::text[]) AS a (tid) WHERE ({}) OPERATOR(pg_catalog.=) ({}))").format(
        array, sql.SQL(", ").join(key_columns(table)), key_of(table, "a.tid")
    )


def refers(reference: Reference, child: str, parent: str, short: Mapping[str, str], *ours: str) -> sql.Composed:
    """`child` names `parent`, compared as the key compares. Rows of `ours` have their columns under `short` names."""

    def column(row: str, name: str) -> sql.Composed:
        return sql.SQL("{}.{}").format(sql.Identifier(row), Name(short[name] if row in ours else name))

    return sql.SQL(" AND ").join(
        sql.SQL("{} {} {}").format(column(parent, key), sql.SQL(equal.replace("%", "%%")), column(child, name))
        for name, key, equal in reference.pairs
    )


def carried(table: Table) -> dict[str, str]:
    """The columns by which rows name each other and are named, and what our statements call them."""
    own = [child for reference in table.references if reference.own for child, _, _ in reference.pairs]
    named = [parent for reference in table.references for _, parent, _ in reference.pairs]
    return {column: f"c{number}" for number, column in enumerate(dict.fromkeys([*own, *named]))}


def selected(table: Table) -> sql.Composed:
    """The address, the age and the columns of t by which rows name each other."""
    columns = [
        sql.SQL("t.{} AS {}").format(Name(column), sql.Identifier(name)) for column, name in carried(table).items()
    ]
    place_and_age = sql.SQL("{} AS tid, t.{} AS age").format(address(table), Name(table.age))
    return sql.SQL(", ").join([place_and_age, *columns])


def parents_of(
    table: Table, row: str, condition: sql.Composable, references: Sequence[Reference] | None = None
) -> sql.Composed:
    """The rows that `row` (of `selected` columns) names and that satisfy the condition on t; for CROSS JOIN LATERAL.

    By the index of each parent key; `references` are those of the table unless they are given.
    """
    short = carried(table)
    none = sql.SQL("SELECT {} FROM {} t WHERE false").format(selected(table), rows(table))
    branches = [
        sql.SQL("SELECT {} FROM {} t WHERE {} AND {}").format(
            selected(table),
            rows(table),
            refers(reference, row, "t", short, row),
            condition,
        )
        for reference in (table.references if references is None else references)
        if reference.own
    ]
    return sql.SQL(" UNION ALL ").join([none, *branches])


def simple_batch(walk: Walk) -> sql.Composed:
    """Look at rows, claim them and delete them, where nothing refers to them.

    The table is read once, by the walk's index or page range; then its rows by their addresses. Sets are counted where
    they are gathered: each further reading of them costs a tenth of the deletion.
    """
    return sql.SQL("""
WITH {judged}, {look}, seen AS MATERIALIZED (
    SELECT count(*) AS n, array_agg(tid) AS tids, max(age) AS age FROM look
), claim AS MATERIALIZED (
    SELECT {address} AS tid FROM {rows} t WHERE {at_seen} AND {rule} FOR UPDATE SKIP LOCKED
), claimed AS MATERIALIZED (
    SELECT count(*) AS n, array_agg(tid) AS tids FROM claim
), gone AS (
    DELETE FROM {rows} t WHERE {at_claimed} {once_more} RETURNING {address} AS tid, t.{age} AS age
), went AS MATERIALIZED (
    SELECT count(*) AS n FROM gone
), last AS MATERIALIZED (
    SELECT age, tids[n] AS tid FROM seen WHERE n = %(limit)s::bigint
    UNION ALL
    SELECT h.age, h.tid FROM horizon h, seen WHERE seen.n < %(limit)s::bigint
)
SELECT (SELECT n FROM seen) AS looked,
       0::bigint AS held,
       (SELECT n FROM claimed) AS claimed,
       {result}
""").format(**walk.parts)


# A row's xmax has the number of a transaction or, from a counter of its own, that of several that share the row. Ours
# is ambiguous if it lies between the oldest of these in the table and the next: a locked row may not be ours then.
AMBIGUOUS = """(SELECT mxid_age(pg_current_xact_id()::xid) BETWEEN 0 AND mxid_age(c.relminmxid)
    FROM pg_class c WHERE c.oid = %(oid)s::oid)"""
# It may become so while a batch goes on; not if it is so far ahead of the next, more than are taken meanwhile.
FAR = 2**24


def batch_in_place(walk: Walk) -> sql.Composed:
    """Claim what of a range of pages is the policy's, and delete the rows of it that are locked by us then (xmax).

    Where many rows of the pages are the policy's, to read them thrice takes less than to gather their addresses and to
    report each row that is deleted. All readings have one snapshot, to which a deleted row is there until the end, so
    their order does not matter.

    FOR UPDATE follows a row that was just changed to a version which that snapshot does not show: it is claimed, and
    not deleted; the old version is of the rest, as are the rows that others hold. So where there is no rest, all that
    was claimed went; but for a full batch, which may end before such a row, and is counted.
    """
    return sql.SQL("""
WITH {judged}, claimed AS MATERIALIZED (
    SELECT count(*) AS n FROM (
        SELECT FROM {rows} t WHERE {ahead} AND t.ctid < (SELECT %(edge)s::tid FROM judged WHERE unchanged) AND {rule}
        LIMIT %(limit)s::bigint FOR UPDATE SKIP LOCKED
    ) c
), ours AS MATERIALIZED (
    SELECT CASE WHEN n > 0 AND NOT {ambiguous} THEN pg_current_xact_id()::xid END AS xid,
           CASE WHEN n = %(limit)s::bigint THEN (
               SELECT max(t.ctid) FROM {rows} t
               WHERE {ahead} AND t.xmax OPERATOR(pg_catalog.=) pg_current_xact_id()::xid
           ) END AS last
    FROM claimed
), gone AS (
    DELETE FROM {rows} t WHERE {to_last} AND {is_ours}
), rest AS MATERIALIZED (
    SELECT count(*) AS n FROM {rows} t WHERE {to_last} AND ({is_ours}) IS NOT TRUE AND {rule}
), went AS MATERIALIZED (
    SELECT CASE WHEN rest.n = 0 AND last IS NULL THEN claimed.n ELSE (
        SELECT count(*) FROM {rows} t WHERE {to_last} AND {is_ours}
    ) END AS n
    FROM claimed, ours, rest
), witness AS MATERIALIZED (
    SELECT t.ctid AS tid, t.{age} AS age FROM {rows} t WHERE {to_last} AND {is_ours} LIMIT 1
)
SELECT went.n + rest.n AS looked,
       0::bigint AS held,
       claimed.n AS claimed,
       went.n AS deleted,
       NULL::text AS last_age,
       ours.last::text AS last_tid,
       CASE WHEN went.n > 0 THEN pg_current_xact_id() END::text AS xid,
       (SELECT tid::text FROM witness) AS witness,
       (SELECT age::text FROM witness) AS witness_age,
       unchanged,
       mxid_age(ours.xid) > -{far} AS near
FROM judged, claimed, ours, rest, went
""").format(
        **walk.parts,
        ambiguous=sql.SQL(AMBIGUOUS),
        far=sql.Literal(FAR),
        to_last=sql.SQL("{ahead} AND t.ctid <= (SELECT COALESCE(last, %(edge)s::tid) FROM ours)").format(**walk.parts),
        is_ours=sql.SQL("t.xmax OPERATOR(pg_catalog.=) (SELECT xid FROM ours)"),
    )


def passed(walk: Walk) -> sql.Composed:
    """t is a row of the policy that lies behind the walk; put so that no index but that of its key fits."""
    return sql.SQL("{} AND ({}) IS TRUE").format(walk.parts["rule"], walk.parts["passed"])


def climbed(table: Table, walk: Walk) -> sql.Composed:
    """Rows behind the walk that nothing names any more (%(seeds)s), and on from each to the rows that it alone names.

    By the primary key and the children's index. This is how a chain whose older row names the newer goes in one pass.
    """
    referrers = sql.SQL(" + ").join(
        sql.SQL("(SELECT count(*) FROM (SELECT FROM {} x WHERE {} LIMIT 2) s)").format(
            relation(reference.child), refers(reference, "x", "t", {})
        )
        for reference in table.references
    )
    condition = sql.SQL("{} AND {} = 1").format(passed(walk), referrers)
    return sql.SQL("""{no_horizon}, climb AS (
    SELECT {selected} FROM {rows} t WHERE {at_seeds} AND {rule}
    UNION
    SELECT p.* FROM climb c CROSS JOIN LATERAL ({parents}) p
), look AS MATERIALIZED (
    SELECT * FROM climb LIMIT %(limit)s::bigint
)""").format(**walk.parts, parents=parents_of(table, "c", condition))


def named_inside(table: Table) -> sql.Composed:
    """Who names whom inside the look: (child, parent, number of the reference)."""
    short = carried(table)
    edges = [sql.SQL("SELECT tid AS child, tid AS parent, 0 AS reference FROM look WHERE false").format()]
    for number, reference in enumerate(table.references):
        if reference.own:
            names = refers(reference, "x", "p", short, "x", "p")
            edges.append(sql.SQL("SELECT x.tid, p.tid, {} FROM look x JOIN look p ON {}").format(number, names))
    return sql.SQL(" UNION ALL ").join(edges)


def named_outside(table: Table) -> sql.Composed:
    """Each row of the look, with the number of the first reference by which more rows name it than are in the look.

    A correlated count stays a probe of the children's index, where NOT EXISTS would hash the whole table. Without such
    an index the children are read once for the batch, not once for each row.
    """
    short = carried(table)
    joins, cases = [], []
    for number, reference in enumerate(table.references):
        parts = {
            "number": sql.Literal(number),
            "child": relation(reference.child),
            "names": refers(reference, "x", "p", short, "p"),
            "inside": sql.Identifier(f"inside{number}"),
            "all": sql.Identifier(f"all{number}"),
        }
        known = sql.SQL("0").format()
        if reference.own:
            known = sql.SQL("COALESCE({inside}.n, 0)").format(**parts)
            join = "(SELECT parent, count(*) AS n FROM edge WHERE reference = {number} GROUP BY parent) {inside}"
            joins.append(sql.SQL(f"LEFT JOIN {join} ON {{inside}}.parent = p.tid").format(**parts))
        total = "(SELECT count(*) FROM (SELECT FROM {child} x WHERE {names} LIMIT {known} + 1) s)"
        if not reference.indexed:
            total = "COALESCE({all}.n, 0)"
            join = "(SELECT p.tid, count(*) AS n FROM look p JOIN {child} x ON {names} GROUP BY p.tid) {all}"
            joins.append(sql.SQL(f"LEFT JOIN {join} ON {{all}}.tid = p.tid").format(**parts))
        cases.append(sql.SQL(f"WHEN {total} > {{known}} THEN {{number}}").format(known=known, **parts))
    return sql.SQL("SELECT p.tid, CASE {} END AS held_by FROM look p {}").format(
        sql.SQL(" ").join(cases), sql.SQL(" ").join(joins)
    )


def named_behind(table: Table, walk: Walk) -> sql.Composed:
    """Rows behind the walk that a deleted row named. Those that it named inside the look are not looked up."""
    outward = """SELECT p.tid FROM (
        SELECT * FROM gone g WHERE NOT EXISTS (SELECT FROM edge e WHERE e.child = g.tid AND e.reference = {}) OFFSET 0
    ) g CROSS JOIN LATERAL ({}) p"""
    return sql.SQL(" UNION ALL ").join(
        [
            sql.SQL("SELECT tid FROM gone WHERE false"),
            *(
                sql.SQL(outward).format(number, parents_of(table, "g", passed(walk), [reference]))
                for number, reference in enumerate(table.references)
                if reference.own
            ),
        ]
    )


def closed_batch(table: Table, walk: Walk, look: sql.Composable) -> sql.Composed:
    """Look at rows, keep those to which a row that stays refers, then claim and delete the rest.

    `held` goes from the rows named from outside the look to all that they name in turn. Rows are locked only when
    nothing holds them and, where %(claimed_tids)s is given, only of these; `kept` undoes the choice of those whose
    child could not be claimed. `freed` are rows behind the walk that a deleted row named: what held them may be gone.
    """
    return sql.SQL("""
WITH RECURSIVE {judged}, {look}, edge AS MATERIALIZED (
    {named_inside}
), counted AS MATERIALIZED (
    {named_outside}
), held (tid) AS (
    SELECT tid FROM counted WHERE held_by IS NOT NULL
    UNION
    SELECT e.parent FROM held h JOIN edge e ON e.child = h.tid
), free AS MATERIALIZED (
    SELECT tid FROM look EXCEPT SELECT tid FROM held
), claim AS MATERIALIZED (
    SELECT {address} AS tid FROM {rows} t
    WHERE {at_free} AND {rule}
      AND (%(claimed_tids)s::{address_type}[] IS NULL OR {address} = ANY (%(claimed_tids)s::{address_type}[]))
    FOR UPDATE SKIP LOCKED
), kept (tid) AS (
    (SELECT tid FROM free EXCEPT SELECT tid FROM claim)
    UNION
    SELECT e.parent FROM kept k JOIN edge e ON e.child = k.tid
), chosen AS MATERIALIZED (
    SELECT tid FROM claim EXCEPT SELECT tid FROM kept
), gone AS (
    DELETE FROM {rows} t WHERE {at_chosen} {once_more} RETURNING {selected}
), went AS MATERIALIZED (
    SELECT count(*) AS n FROM gone
), freed AS (
    SELECT DISTINCT tid FROM ({named_behind}) p
), seen AS MATERIALIZED (
    SELECT count(*) AS n FROM look
), last AS (
    (SELECT age, tid FROM look OFFSET %(limit)s::bigint - 1)
    UNION ALL
    SELECT age, tid FROM horizon WHERE (SELECT n FROM seen) < %(limit)s::bigint
)
SELECT (SELECT n FROM seen) AS looked,
       (SELECT count(*) FROM held) AS held,
       (SELECT count(*) FROM chosen) AS claimed,
       {result},
       ARRAY (SELECT tid::text FROM freed) AS freed,
       ARRAY (SELECT DISTINCT held_by::bigint FROM counted WHERE held_by IS NOT NULL) AS held_by
""").format(
        **{**walk.parts, "look": look},
        named_inside=named_inside(table),
        named_outside=named_outside(table),
        named_behind=named_behind(table, walk),
    )


def batch_of(table: Table, walk: Walk) -> sql.Composed:
    """Look, claim and delete, in one statement that the walk repeats from where it has come to."""
    return closed_batch(table, walk, walk.parts["look"]) if table.references else simple_batch(walk)


def explained(table: Table) -> tuple[sql.Composed, dict[str, Any]]:
    """EXPLAIN of the batch statement, and its parameters: the server says what it would refuse, and does nothing."""
    walk = walk_of(table, "index" if table.indexed else table.other_walk)
    batch = batch_of(table, walk)
    # no times, for which the planner would read the ends of the index
    unknown = dict.fromkeys(("bound", "age", "tid", "edge", "claimed_tids"))
    numbers = {"limit": 1, "scan": 1, "done": False, "delete": False}
    return sql.SQL("EXPLAIN {}").format(batch), {
        **parameters_of(table, ""),
        **unknown,
        **numbers,
    }


@dataclass(frozen=True, slots=True)
class Found:
    """What a survey finds of a policy's rows; `oldest`: seconds from the oldest that is not held to the cutoff."""

    rows: int
    held: int
    overdue: int  # not held, and past the retention by more than an interval
    oldest: float | None


def survey(
    tables: Sequence[Table],
    now: dt.datetime,
    interval: dt.timedelta,
    hidden: Sequence[str] = (),
    refused: Sequence[str] = (),
) -> tuple[sql.Composed, dict[str, Any]]:
    """A statement and its parameters that give `Found` for the last of these policies, as if the others had run before.

    What an earlier policy takes, a later one does not find, nor does it hold anything. Each `held` starts from the rows
    that stay and goes to what they name, by key. Reads a whole table once for each policy with references. `hidden` are
    addresses of rows that are held by rows which we cannot see, and count as held; `refused` of rows that the database
    refuses to delete, which do not, while what they name does. Rows are overdue when an interval has passed since their
    retention has.
    """

    def not_taken(alias: str, name: TableName, number: int) -> sql.Composed:
        """No policy before `number` takes this row of the table of that name."""
        conditions = [sql.SQL("true").format()]
        for earlier, table in enumerate(tables[:number]):
            if table.name == name:
                held = sql.Identifier(f"held{earlier}")
                stays = sql.SQL("{} IN (SELECT tid FROM {})").format(address(table, alias), held)
                rule = predicate(table, alias, f"p{earlier}_")
                conditions.append(sql.SQL("(({}) IS NOT TRUE OR {})").format(rule, stays))
        return sql.SQL(" AND ").join(conditions)

    ctes = []
    parameters: dict[str, Any] = {"hidden": [*hidden], "refused": [*refused]}
    for number, table in enumerate(tables):
        parameters |= parameters_of(table, table.bound(now), f"p{number}_")
        rule = predicate(table, "t", f"p{number}_")
        condition = sql.SQL("{} AND {}").format(rule, not_taken("t", table.name, number))
        starts = [sql.SQL("SELECT {} FROM {} t WHERE false").format(selected(table), rows(table))]
        for reference in table.references:
            stays = not_taken("x", reference.child, number)
            if reference.own:
                stays = sql.SQL("({}) IS NOT TRUE AND {}").format(predicate(table, "x", f"p{number}_"), stays)
            starts.append(
                sql.SQL("SELECT {} FROM {} x JOIN {} t ON {} WHERE {} AND {}").format(
                    selected(table),
                    relation(reference.child),
                    rows(table),
                    refers(reference, "x", "t", {}),
                    condition,
                    stays,
                )
            )
        if number == len(tables) - 1:
            unseen, kept = (
                sql.SQL("SELECT {} FROM {} t WHERE {} AND {}").format(
                    selected(table), rows(table), at(table, which), condition
                )
                for which in ("%(hidden)s", "%(refused)s")
            )
            held_by_them = sql.SQL("SELECT p.* FROM ({}) u CROSS JOIN LATERAL ({}) p")
            starts += [unseen, held_by_them.format(kept, parents_of(table, "u", condition))]
        held = sql.Identifier(f"held{number}")
        ctes.append(
            sql.SQL("{held} AS (({starts}) UNION SELECT p.* FROM {held} h CROSS JOIN LATERAL ({parents}) p)").format(
                held=held, starts=sql.SQL(" UNION ALL ").join(starts), parents=parents_of(table, "h", condition)
            )
        )
    parameters |= {"late": table.bound(now - interval), "cutoff": without_zone(table.policy.cutoff(now))}
    statement = sql.SQL("""WITH RECURSIVE {ctes}
SELECT count(*), count(*) FILTER (WHERE r.held),
       count(*) FILTER (WHERE NOT r.held AND r.age OPERATOR(pg_catalog.<) %(late)s::{type}),
       CASE WHEN count(*) FILTER (WHERE NOT r.held) > 0 THEN EXTRACT(EPOCH FROM %(cutoff)s::timestamp - GREATEST(
           '0001-01-01'::timestamp, (min(r.age) FILTER (WHERE NOT r.held){over})::timestamp))::float8 END
FROM (SELECT t.{age} AS age, {address} IN (SELECT tid FROM {held}) AS held
      FROM {rows} t WHERE {rule} AND {not_taken}) r""").format(
        ctes=sql.SQL(", ").join(ctes),
        rows=rows(table),
        address=address(table),
        age=Name(table.age),
        type=sql.SQL(table.age_type),
        over=sql.SQL(" + 1" if table.age_type == "date" else ""),  # a date is over at the next midnight
        rule=predicate(table, "t", f"p{number}_", ordered=table.indexed),
        not_taken=not_taken("t", table.name, number),
        held=held,
    )
    return statement, parameters


def census(table: Table, lifetime: Column | None) -> sql.Composed:
    """What `--check` asks about the rows: four counts, then of each value of `only` whether any row has it.

    One reading of the whole table. Parameters: those of `parameters_of`, `now`, and `late`, after which is the future.
    """
    parts: dict[str, sql.Composable] = {
        "age": sql.SQL("t.{}").format(Name(table.age)),
        "type": sql.SQL(table.age_type),
        "allowed": allowed(table),
        "alive": sql.SQL("false"),
    }
    if lifetime:
        ahead = "{} AND t.{} > " + f"%(now)s::{AGE_TYPES[lifetime.type]}"
        parts["alive"] = sql.SQL(ahead).format(predicate(table), Name(lifetime.name))
    used = [
        sql.SQL(
            "bool_or(t.{}" + f"::{only.type} = (%(only{number})s::{only.type}[])[{place}]) IS TRUE OR count(*) = 0"
        ).format(Name(only.column))
        for number, only in enumerate(table.only)
        for place in range(1, len(only.values) + 1)
        if not only.proven
    ]
    counts = sql.SQL("""count(*) FILTER (WHERE {age} IS NULL AND {allowed}),
       count(*) FILTER (WHERE {age} < '2000-01-01'::{type} AND {allowed}),
       count(*) FILTER (WHERE {age} > %(late)s::{type} AND isfinite({age}) AND {allowed}),
       count(*) FILTER (WHERE {alive})""").format(**parts)
    return sql.SQL("SELECT {} FROM {} t").format(sql.SQL(", ").join([counts, *used]), rows(table))


# ── The log ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# The journal and the line form. Never decides, never stops a purge.

JOURNAL_SOCKET = "/run/systemd/journal/socket"


class Level(enum.IntEnum):
    """Levels of the line form, with syslog's priorities."""

    ERROR = 3
    INFO = 6


@dataclass(frozen=True, slots=True)
class Event:
    name: str
    message_id: str  # fixed for ever: the journal's catalog explains events by it
    level: Level = Level.INFO


CONNECT_RETRIED = Event("connect_retried", "8f57563ba8cb4e65b24071576872d624")
JOB_STARTED = Event("job_started", "8be5866cf939403d83e8277c8197ac8d")
PHASE_STARTED = Event("phase_started", "66c0c15ba496482d91b41fc4d2679204")
BATCH_DELETED = Event("batch_deleted", "7a1c8af61b79448d81a6da9fa53c46bf")
STANDBY_AWAITED = Event("standby_awaited", "11040931e9ce4ca08d883e89a8a7f06d")
BATCH_RETRIED = Event("batch_retried", "6340cf10498a48dfbbbfa031aafd452c")
PHASE_COMPLETED = Event("phase_completed", "4b50381d6b5e46938ad24669a6a526d1")
PHASE_FAILED = Event("phase_failed", "cfd189ef71d94205afac29b7556588a8", Level.ERROR)
TABLE_VACUUMED = Event("table_vacuumed", "15d1e9c020ce4697b8b65518ae95b001")
VACUUM_SKIPPED = Event("vacuum_skipped", "9913204a403e4b719cb438e810b91505")
JOB_COMPLETED = Event("job_completed", "922ac7c65dad43cfae0e5940cc1f34bc")
JOB_FAILED = Event("job_failed", "cc2bccc63a2544e2b925f69c5e295d2a", Level.ERROR)
JOB_SKIPPED = Event("job_skipped", "b58b7f19fef548588ec0d44ea0529539")
RECORD_FAILED = Event("record_failed", "c2ac23a6f0504881972e95d3334f7348", Level.ERROR)


def camel(name: str) -> str:
    """The specification's spelling of a journal field.

    >>> camel("JOB_RUN_ID")
    'jobRunId'
    """
    first, *rest = name.lower().split("_")
    return first + "".join(word.capitalize() for word in rest)


def format_value(value: object) -> str:
    r"""A value of the line form: in double quotes where a space, a quote or nothing at all would be misread.

    >>> print(format_value('say "no"'))
    "say \"no\""
    """
    text = str(value)
    if text and text.isprintable() and not re.search(r"[\s\"\\=]", text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{printable(escaped)}"'


def format_time(moment: dt.datetime) -> str:
    """ISO 8601 in UTC."""
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


class Log:
    """Events to journald where its socket is, and to `stream` in the line form unless the journal reads that anyway."""

    def __init__(self, job_run_id: str, stream: Any, verbose: bool) -> None:
        self.job_run_id = job_run_id
        self.stream = stream
        self.verbose = verbose
        self.send = self.find_journal()
        self.write: Callable[[str], None] = lambda line: print(line, file=self.stream, flush=True)
        self.unwritten: tuple[Event, ...] = ()  # by `write`
        self.stopping: Callable[[], bool] = lambda: False

    @staticmethod
    def find_journal() -> Callable[..., None] | None:
        if os.path.exists(JOURNAL_SOCKET):
            with contextlib.suppress(Exception):  # not installed, broken, or another module of that name
                from systemd import journal

                send: Callable[..., None] = journal.send
                return send
        return None

    def is_journal(self) -> bool:
        """Whether the stream is read by the journal, as systemd.exec(5) says of JOURNAL_STREAM."""
        try:
            status = os.fstat(self.stream.fileno())
        except (AttributeError, OSError, ValueError):  # closed, or none at all
            return False
        return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"

    def emit(self, event: Event, message: str, **fields: object) -> None:
        """Log one event; a field that is None is left out. A failure to log is nobody's failure."""
        fields = {"JOB_RUN_ID": self.job_run_id, **known(fields)}
        sent = False
        if self.send and not self.journal_reads():
            self.send = None  # it is stuck; the purge goes on
        if self.send:
            with contextlib.suppress(Exception):
                self.send(
                    message,
                    MESSAGE_ID=event.message_id,
                    PRIORITY=str(int(event.level)),
                    SYSLOG_IDENTIFIER=PROGRAM,
                    EVENT=event.name,
                    **{key: str(value) for key, value in fields.items()},
                )
                sent = True
        if not (sent and self.is_journal()) and event not in self.unwritten:
            moment = time.strftime("%Y-%m-%d %H:%M:%S")
            pairs = " ".join(f"{camel(key)}={format_value(value)}" for key, value in fields.items())
            with contextlib.suppress(OSError, ValueError):
                if self.is_writable():
                    self.write(f"[{moment}] [{event.level.name}] {message} {pairs}")

    def journal_reads(self) -> bool:
        """Wait, for two seconds at most, for journald to take more: the library would hold up signals and all."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            probe.connect(JOURNAL_SOCKET)
            return bool(select.select([], [probe], [], 0.0 if self.stopping() else 2.0)[1])
        return True

    def is_writable(self) -> bool:
        """Wait for whoever reads the stream, a pager for example; False once the run must end and nobody does."""
        try:
            number = self.stream.fileno()
        except (AttributeError, io.UnsupportedOperation):
            return True
        while not select.select([], [number], [], 0.2)[1]:
            if self.stopping():
                return False
        return True

    def record_failed(self, what: str, why: str) -> None:
        self.emit(RECORD_FAILED, what, ERROR=why)

    def connecting_again(self, error: UnavailableError) -> None:
        self.emit(CONNECT_RETRIED, "trying to connect again", ERROR=error.message, SQLSTATE=error.sqlstate)


# ── The record ────────────────────────────────────────────────────────────────────────────────────────────────────────
# What is kept from run to run: the state file, the metrics file that is made of it, and the history beside it. Knows no
# database. A file that cannot be read or written is said, and stops no purge.


def boot_id() -> str:
    """Which start of this machine it is; empty if that cannot be known. A sandboxed unit passes it as a variable."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as stream:
            return stream.read().strip().replace("-", "")
    except OSError:
        return os.environ.get("SESSION_RETENTION_BOOT_ID", "").replace("-", "")


def born(process: int) -> int:
    """When the process started, in the kernel's ticks since the machine did; 0 if there is no such process."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{process}/stat", "rb") as stream:
        return int(stream.read().rpartition(b")")[2].split()[19])
    return 0


def read_moment(value: Any) -> dt.datetime:
    expect(type(value) is dt.datetime and value.tzinfo is not None)
    return value.astimezone(UTC)  # type: ignore[no-any-return]


def read_number(value: Any) -> float:
    expect(type(value) in (int, float) and 0 <= float(value) < 1e12)  # beyond any time span in seconds
    return float(value)


# The upper bounds of the histogram of run durations, in milliseconds: from an empty run to the longest one.
BUCKETS = ("100", "1000", "10000", "60000", "300000", "900000", "1800000", "3600000", "+Inf")


def read_buckets(value: Any) -> dict[str, int]:
    expect(type(value) is dict and all(type(count) is int and count >= 0 for count in value.values()))
    return {bound: value.get(bound, 0) for bound in BUCKETS}


COUNT = Kind("a whole number, 0 or more", exactly(int, lambda count: 0 <= count < 2**63))
NUMBER = Kind("a number, 0 or more", read_number)
MOMENT = Kind("a time with its zone", read_moment)
WORDS = Kind("text", text_of)
COUNTS = Kind("counts by upper bound", read_buckets)


# What stays of a policy's rows, by the fields of its outcome, its record, the history and the status alike.
REST = ("backlog", "blocked", "blocked_by", "undeletable", "overdue", "oldest_row_age_seconds")
# Of the last run, likewise.
LAST_RUN = ("job_run_id", "started", "scheduled", "stop_reason", "exit_status")


@dataclass(slots=True)
class PolicyRecord:
    """What is kept of a policy: its counters for ever, its last cutoff, and how its last run left its table."""

    table: str = option(WORDS, "")
    rule: str = option(WORDS, "")
    enabled: bool = option(BOOLEAN, False)
    retention_seconds: float = option(NUMBER, 0)
    deleted: int = option(COUNT, 0)
    errors: int = option(COUNT, 0)
    # of the last run that was let go on: what the cutoff brake compares with
    now: dt.datetime | None = option(MOMENT)  # the database's clock
    cutoff: dt.datetime | None = option(MOMENT)
    uptime: float = option(NUMBER, 0)  # of `clock`
    boot_id: str = option(WORDS, "")
    # of the last run: None is not known
    ended: dt.datetime | None = option(MOMENT)
    stop_reason: str | None = option(WORDS)
    sqlstate: str | None = option(WORDS)
    error: str | None = option(WORDS)
    # REST
    backlog: int | None = option(COUNT)
    blocked: int | None = option(COUNT)
    blocked_by: str | None = option(WORDS)
    undeletable: int | None = option(COUNT)
    overdue: int | None = option(COUNT)
    oldest_row_age_seconds: float | None = option(NUMBER)
    # of the last run that drained it: the database's clock when that began
    last_drained: dt.datetime | None = option(MOMENT)


@dataclass(slots=True)
class JobRecord:
    """What is kept of the job as a whole, its last run among it."""

    interval_seconds: float | None = option(NUMBER)
    errors: int = option(COUNT, 0)
    run_duration_ms: dict[str, int] = field(default_factory=dict, metadata={"kind": COUNTS})
    run_duration_ms_sum: float = option(NUMBER, 0)
    last_success: dt.datetime | None = option(MOMENT)
    skipped: int = option(COUNT, 0)  # in a row, since the last run
    last_skipped: dt.datetime | None = option(MOMENT)
    last_run: dt.datetime | None = option(MOMENT)  # its end, as that of last_success
    job_run_id: str | None = option(WORDS)
    started: dt.datetime | None = option(MOMENT)
    scheduled: bool = option(BOOLEAN, False)
    stop_reason: str | None = option(WORDS)
    exit_status: int | None = option(COUNT)
    error: str | None = option(WORDS)


@dataclass(slots=True)
class RunningRecord:
    """A run that has not ended. Where its process is gone, it was killed, or its machine was."""

    started: dt.datetime | None = option(MOMENT)
    scheduled: bool = option(BOOLEAN, False)
    process: int = option(COUNT, 0)
    born: int = option(COUNT, 0)
    boot_id: str = option(WORDS, "")
    phase: str | None = option(WORDS)
    deleted: int = option(COUNT, 0)  # when it was last saved

    @property
    def alive(self) -> bool:
        return self.boot_id == boot_id() and self.born == born(self.process) != 0

    def json(self, job_run_id: str) -> dict[str, Any]:
        started = self.started and format_time(self.started)
        return {"job_run_id": job_run_id, "started": started, **some(("phase", "deleted"), self)}


@dataclass(slots=True)
class Totals:
    """The content of the state file."""

    job: JobRecord = field(default_factory=JobRecord)
    policies: dict[str, PolicyRecord] = field(default_factory=dict)
    running: dict[str, RunningRecord] = field(default_factory=dict)

    def policy(self, name: str) -> PolicyRecord:
        return self.policies.setdefault(name, PolicyRecord())

    def configure(self, config: Configuration) -> None:
        """Take over what the metrics tell of the configuration."""
        self.job.interval_seconds = config.run.retention_interval.total_seconds()
        for record in self.policies.values():
            record.enabled = False
        for policy in config.enabled:
            record, kept = self.policy(policy.name), policy.keep.total_seconds()
            if record.rule and (record.rule != policy.rule or record.retention_seconds > kept):
                for name in (*REST, "last_drained", "ended", "stop_reason", "sqlstate", "error"):
                    setattr(record, name, None)
            record.table, record.rule, record.enabled = str(policy.table), policy.rule, True
            record.retention_seconds = kept


def read_state(path: str) -> Totals:
    """Read a state file; ValueError, among others, if it is none."""
    with open(path, "rb") as stream:
        document = tomllib.load(stream)
    problems: Problems = []
    totals = Totals(
        read_section(JobRecord, "job", document.get("job", {}), problems),
        {name: read_section(PolicyRecord, name, table, problems) for name, table in document.get("policy", {}).items()},
        {key: read_section(RunningRecord, key, table, problems) for key, table in document.get("running", {}).items()},
    )
    expect(not problems)
    return totals


def show_state(totals: Totals) -> str:
    policies = {name: show_section(record) for name, record in totals.policies.items()}
    running = {key: show_section(record) for key, record in totals.running.items()}
    return tomli_w.dumps({"job": show_section(totals.job), "policy": policies, "running": running})


PREFIX = "identity_session_retention_"
# By their labels: of the job, of each enabled policy, of its table. A gauge shows the field of that name of the record;
# a value that is not known, or that nothing has, is left out.
GAUGES: dict[tuple[str, ...], dict[str, str]] = {
    (): {
        "interval_seconds": "How often the job is meant to run.",
        "last_run_timestamp_seconds": "When the last run ended, however it ended.",
        "last_success_timestamp_seconds": "When the last run of all policies ended well.",
    },
    ("policy",): {"retention_seconds": "How long the policy keeps a row after the time in its column."},
    ("policy", "table"): {
        "backlog": "Rows still under the policy's predicate as it last ended, blocked and undeletable ones included.",
        "blocked": "Of the backlog, rows to which a row that stays refers.",
        "undeletable": "Of the backlog, rows that the database refuses to delete.",
        "overdue": "Of the backlog, unblocked rows older than their retention plus one interval.",
        "oldest_row_age_seconds": "Age of the oldest unblocked row of the backlog, as the policy last ended.",
        "last_drained_timestamp_seconds": "When the last run began that left no unblocked row of the policy.",
    },
}


def exposition(totals: Totals) -> str:
    """The metrics, in Prometheus's text format."""
    from prometheus_client import generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    job = totals.job
    policies = {name: record for name, record in totals.policies.items() if record.enabled}
    families: list[Any] = []

    def add(kind: Any, name: str, text: str, samples: Mapping[Any, Any], labels: Sequence[str] = ()) -> None:
        family = kind(PREFIX + name, text, labels=labels)
        for values, value in known(samples).items():
            family.add_metric(values, value.timestamp() if isinstance(value, dt.datetime) else value)
        if family.samples:
            families.append(family)

    for name, record in policies.items():
        add(CounterMetricFamily, f"{name}_deleted", f"Rows that the policy {name} has deleted.", {(): record.deleted})
    errors = {("",): job.errors, **{(name,): record.errors for name, record in policies.items()}}
    add(CounterMetricFamily, "errors", "Failures of a policy, or with an empty one of a whole run.", errors, ["policy"])
    buckets = [(bound, job.run_duration_ms.get(bound, 0)) for bound in BUCKETS]
    text = "Duration of a run, in milliseconds."
    families.append(HistogramMetricFamily(f"{PREFIX}run_duration_ms", text, buckets, job.run_duration_ms_sum))
    for labels, gauges in GAUGES.items():
        of_policies = {(name, record.table)[: len(labels)]: record for name, record in policies.items()}
        records = of_policies if labels else {(): job}
        for gauge, text in gauges.items():
            samples = {
                key: getattr(record, gauge.removesuffix("_timestamp_seconds")) for key, record in records.items()
            }
            add(GaugeMetricFamily, gauge, text, samples, labels)
    return generate_latest(cast(Any, SimpleNamespace(collect=lambda: families))).decode()


def add_reported(totals: Totals, text: str) -> None:
    """Raise the counters and times to those of a metrics file: what was reported once is never taken back."""
    from prometheus_client.parser import text_string_to_metric_families

    def reach(record: JobRecord | PolicyRecord, name: str, value: Any) -> None:
        setattr(record, name, max(getattr(record, name) or value, value))

    job, buckets, total = totals.job, dict.fromkeys(BUCKETS, 0), 0.0
    read: Callable[[str], Any] = text_string_to_metric_families
    alone = not totals.policies  # there is no state
    # all or none, if some cannot be read
    for sample in [sample for family in read(text) for sample in family.samples if 0 <= sample.value < 2**53]:
        name, value, policy = sample.name.removeprefix(PREFIX), sample.value, sample.labels.get("policy")
        record = totals.policy(policy) if policy else job
        if name.endswith("_deleted_total"):
            deleting = totals.policy(name.removesuffix("_deleted_total"))
            reach(deleting, "deleted", int(value))
            deleting.enabled = deleting.enabled or alone
        elif name == "errors_total":
            reach(record, "errors", int(value))
        elif name == "run_duration_ms_bucket" and sample.labels["le"] in buckets:
            buckets[sample.labels["le"]] = int(value)
        elif name == "run_duration_ms_sum":
            total = value
        elif (moment := name.removesuffix("_timestamp_seconds")) in ("last_run", "last_success", "last_drained"):
            if isinstance(record, JobRecord) or record.table in ("", sample.labels["table"]):  # else it is another now
                reach(record, moment, dt.datetime.fromtimestamp(value, UTC))
        elif name == "interval_seconds":
            job.interval_seconds = job.interval_seconds or value
        elif name == "retention_seconds" and alone:
            totals.policy(policy).retention_seconds = value
    if buckets["+Inf"] > job.run_duration_ms.get("+Inf", 0):
        job.run_duration_ms, job.run_duration_ms_sum = buckets, total


def read_file(path: str) -> str:
    """What is in the file; OSError if it is none, such as a pipe, on which one would wait for ever."""
    if not os.path.isfile(path):
        raise OSError(errno.EINVAL, "not a regular file")
    with open(path, encoding="utf-8", errors="surrogateescape", newline="\n") as stream:
        return stream.read()


def replace_file(path: str, content: str, *, durable: bool = True) -> None:
    """Put the content in the file's place at once, mode 0644: a reader sees the old file or the new one.

    A `durable` file is there after a crash of the machine, too. What is there and no file, such as a device, stays.
    """
    path = os.path.realpath(path)
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(errno.EINVAL, "not a regular file")
    directory, name = os.path.split(path)
    for left in glob.glob(f".{glob.escape(name)}.*.new", root_dir=directory):  # of a run that was killed
        with contextlib.suppress(OSError, ValueError):
            if not born(int(left.split(".")[-2])):
                os.unlink(os.path.join(directory, left))
    new = os.path.join(directory, f".{name}.{os.getpid()}.new")
    try:
        with open(new, "x", encoding="utf-8", errors="surrogateescape", newline="\n") as stream:
            stream.write(content)
            stream.flush()
            os.fchmod(stream.fileno(), 0o644)
            if durable:
                os.fsync(stream.fileno())
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise


NO_BRAKE = "without it a run has no cutoff brake"


class Record:
    """The state file, the metrics file and the history. Losing them loses counts and the cutoff brake of one run.

    What a run adds is collected, and put into the files as they are when it is saved: another instance on this machine
    may have written meanwhile, and a lock on the directory keeps two from doing that at once.
    """

    EVERY = 5.0  # seconds, between two savings on the way
    KEPT = 400  # runs in the history: more than a year of nights

    def __init__(self, options: MetricsOptions, tell: Callable[[str, str], None]) -> None:
        """Read the state; `tell` gets what failed, and why, each failure once."""
        self.options = options
        self.tell = tell
        self.told: set[str] = set()
        self.patience = 2.0  # seconds, for the lock, which is held for milliseconds
        self.saved = clock()
        self.changes: list[Callable[[Totals], None]] = []
        self.deleted: Counter[str] = Counter()
        self.runs: dict[str, dict[str, Any]] = {}  # for the history
        self.kept: Totals | None = None  # what only the metrics file has of it: the state could not be written
        self.totals = self.read()

    @property
    def history(self) -> str:
        """Its path; none beside a state that is something like a device."""
        state = self.options.state
        return "" if os.path.exists(state) and not os.path.isfile(state) else self.options.history

    def fail(self, what: str, path: str, error: Exception, consequence: str) -> None:
        if what not in self.told:
            self.told.add(what)
            reason = error.strerror if isinstance(error, OSError) else one_line(str(error))
            self.tell(what, f"{path}: {reason or type(error).__name__}; {consequence}")

    def read(self) -> Totals:
        """What the files tell, and this run beside them."""
        totals, path = copy.deepcopy(self.kept) or Totals(), self.options.state
        try:
            if path and os.path.exists(path) and not self.kept:
                expect(os.path.isfile(path))
                totals = read_state(path)
        except (OSError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            cause = error if isinstance(error, OSError) else ValueError("not a state file of this program")
            self.fail("state not read", path, cause, NO_BRAKE)
        if self.options.textfile:
            with contextlib.suppress(Exception):
                add_reported(totals, read_file(self.options.textfile))
        if path and not os.path.exists(path) and totals.job.last_run:
            self.fail("state not read", path, OSError(errno.ENOENT, "it is gone"), NO_BRAKE)
        return totals

    def change(self, change: Callable[[Totals], None], *, save: bool = True) -> None:
        """Make a change in the files, now or with the next saving."""
        self.changes.append(change)
        if save:
            self.save()

    def add_deleted(self, policy: str, count: int) -> None:
        self.deleted[policy] += count

    def save(self) -> None:
        """Write the files; whatever cannot be written is tried again with the next saving."""
        state, textfile = self.options.state, self.options.textfile
        if not state and not textfile:
            return
        self.saved = clock()
        with self.locked(os.path.dirname(state or textfile)):
            totals = self.read()
            for change in self.changes:
                change(totals)
            for policy, count in self.deleted.items():
                totals.policy(policy).deleted += count
            self.totals = totals
            # the history first: what the state says has ended is in it
            if self.runs and self.write("history", self.history, self.history_of, "this run is not in it"):
                self.runs.clear()
            written = [
                self.write("state", state, lambda: show_state(totals), NO_BRAKE),
                self.write("metrics", textfile, lambda: exposition(totals), "what is there is of an earlier run"),
            ]
            if any(written):
                self.kept = None if written[0] else totals
                self.changes.clear()
                self.deleted.clear()

    def write(self, what: str, path: str, content: Callable[[], str], consequence: str) -> bool:
        if not path:
            return False
        try:
            replace_file(path, content(), durable=what != "metrics")
        except Exception as error:  # noqa: BLE001, a library's perhaps
            self.fail(f"{what} not written", path, error, consequence)
            return False
        return True

    def history_of(self) -> str:
        """The history with the runs that are to be added; OSError where it cannot be read, so that it is not lost."""
        lines = read_file(self.history).splitlines() if os.path.exists(self.history) else []
        for key, run in self.runs.items():
            others = [line for line in lines if key not in line]
            if run["stop_reason"] != "interrupted" or len(others) == len(lines):  # what has ended was not interrupted
                lines = [*others, json.dumps(run)]
        return "".join(f"{line}\n" for line in lines[-self.KEPT :])

    @contextlib.contextmanager
    def locked(self, directory: str) -> Iterator[None]:
        """Hold the lock on the directory, if it can be had: a count may get lost without it, a run would with it."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                number = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                stack.callback(os.close, number)
                end = clock() + self.patience
                while True:
                    try:
                        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    except BlockingIOError:
                        if clock() >= end:
                            self.patience = 0.0  # somebody sits on it
                            break
                        select.select([], [], [], 0.02)
            yield

    def remember_cutoffs(self, policies: Sequence[Policy], now: dt.datetime, *, consent: bool) -> None:
        """Keep the cutoffs with which policies run, before they delete. Of a clock that went back only by consent."""

        def remember(totals: Totals) -> None:
            for policy in policies:
                record = totals.policy(policy.name)
                if record.now is None or now >= record.now or consent:
                    record.now, record.cutoff = now, policy.cutoff(now)
                    record.uptime, record.boot_id = clock(), boot_id()

        self.change(remember)

    def skip(self, config: Configuration, moment: dt.datetime) -> None:
        """Count a run outside the night window, which is no run."""

        def skip(totals: Totals) -> None:
            totals.configure(config)
            totals.job.skipped += 1
            totals.job.last_skipped = moment

        self.change(skip)

    def begin(self, config: Configuration, job_run_id: str, running: RunningRecord) -> None:
        """Note that a run has begun, and which ones never ended."""

        def begin(totals: Totals) -> None:
            interval = totals.job.interval_seconds or 0
            totals.configure(config)
            for key, other in [*totals.running.items()]:
                if not other.alive:
                    self.runs[key] = interrupted(key, other) | {"interval_seconds": interval}
                    del totals.running[key]
            totals.running[job_run_id] = running
            totals.job.skipped = 0

        self.change(begin)

    def progress(self, job_run_id: str, phase: str, deleted: int) -> None:
        """Save every few seconds how far a run has come."""
        if clock() - self.saved < self.EVERY:
            return

        def progress(totals: Totals) -> None:
            if job_run_id in totals.running:
                totals.running[job_run_id].phase, totals.running[job_run_id].deleted = phase, deleted

        self.change(progress)

    def phase_ended(self, outcome: Outcome, moment: dt.datetime) -> None:
        def end(totals: Totals) -> None:
            record = totals.policy(outcome.policy.name)
            record.errors += outcome.error is not None
            record.ended = moment
            record.sqlstate, record.error = (
                (outcome.error.sqlstate, outcome.error.message) if outcome.error else (None, None)
            )
            for name, value in some(("stop_reason", *REST), outcome).items():
                setattr(record, name, value)
            if outcome.drained:
                record.last_drained = max(filter(None, [record.last_drained, outcome.now]))

        self.change(end, save=False)

    def job_ended(self, run: dict[str, Any], moment: dt.datetime, milliseconds: float | None) -> None:
        """Note how a run ended: `run` is its line of the history; a wrong configuration has no duration."""

        def end(totals: Totals) -> None:
            job = totals.job
            totals.running.pop(run["job_run_id"], None)
            for name in LAST_RUN:
                setattr(job, name, run[name])
            job.started, job.last_run, job.skipped = dt.datetime.fromisoformat(run["started"]), moment, 0
            job.error = "; ".join(error["message"] for error in run["errors"]) or None
            job.errors += bool(run["errors"])
            if run["success"]:
                job.last_success = moment
            if milliseconds is not None:
                reached = {bound for bound in BUCKETS if milliseconds <= float(bound)}
                buckets = job.run_duration_ms
                job.run_duration_ms = {bound: buckets.get(bound, 0) + (bound in reached) for bound in BUCKETS}
                job.run_duration_ms_sum += milliseconds

        self.runs[run["job_run_id"]] = run | {"interval_seconds": self.totals.job.interval_seconds or 0}
        self.change(end)


def interrupted(job_run_id: str, running: RunningRecord) -> dict[str, Any]:
    """The history's line of a run that was killed; what it deleted after it was last saved is not known."""
    return {
        **running.json(job_run_id),
        **dict.fromkeys(("ended", "now", "exit_status")),
        "scheduled": running.scheduled,
        "success": False,
        "stop_reason": "interrupted",
        "errors": [],
        "policies": {},
    }


# ── The report ────────────────────────────────────────────────────────────────────────────────────────────────────────
# What is told of a run while it goes on: to the log, the record, whoever looks at the terminal or asks systemd, and to
# a collector of traces. Never decides, never stops a purge.


class View:
    """Where progress is shown; here, nowhere."""

    shows = False  # so that nothing is estimated for nobody

    def show(self, policy: str, words: str, done: int, total: int | None, *, urgent: bool = False) -> None:
        """How far a phase is, in words and in rows of a total, if that is known; `urgent` at its begin and end."""

    def ended(self, words: str) -> None:
        """The run has ended; `words` say how."""

    def close(self) -> None:
        """Nothing more is shown."""


class UnitView(View):
    """What `systemctl status` shows."""

    shows = True
    told = 0.0

    def show(self, policy: str, words: str, done: int, total: int | None, *, urgent: bool = False) -> None:  # noqa: ARG002
        if urgent or clock() - self.told >= 1:  # a second: nobody reads faster
            self.told = 0.0 if urgent else clock()
            notify(f"STATUS={policy}: {words}")

    def ended(self, words: str) -> None:
        notify(f"STATUS=ended: {words}")


class TerminalView(View):
    """A bar for each phase below the lines of the log, of which those of batches are left to the journal.

    It is drawn here and not in a thread: while a terminal is paused (Ctrl-S), nothing may wait for it.
    """

    shows = True

    def __init__(self, log: Log) -> None:
        """ImportError, if what it takes is not there."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn

        # nothing in a line is markup, an emoji or to be coloured
        console = Console(file=log.stream, markup=False, emoji=False, highlight=False)
        if not console.is_terminal or console.is_dumb_terminal or not log.is_writable():
            raise ImportError
        self.log = log
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(16, complete_style="cyan"),
            TaskProgressColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[words]}", markup=False),
            console=console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self.tasks: dict[str, TaskID] = {}
        self.drawn = 0.0
        self.progress.start()
        log.write = lambda line: console.print(line, soft_wrap=True)
        log.unwritten = () if log.verbose else (BATCH_DELETED,)

    def show(self, policy: str, words: str, done: int, total: int | None, *, urgent: bool = False) -> None:
        if policy not in self.tasks:
            self.progress.disable = True  # to add is to draw
            self.tasks[policy] = self.progress.add_task(policy, total=None, words="")
            self.progress.disable = False
        self.progress.update(self.tasks[policy], completed=done, total=total and max(total, 1), words=words)
        with contextlib.suppress(OSError, ValueError):  # the terminal has gone
            takes_it = bool(select.select([], [self.log.stream.fileno()], [], 0)[1])
            if takes_it and (urgent or clock() - self.drawn >= 0.1):
                self.drawn = clock()
                self.progress.refresh()

    def close(self) -> None:
        if self.log.is_writable():
            self.progress.stop()


def view_of(log: Log) -> View:
    """Where to show progress: on a terminal that can, or to systemd if it started us."""
    if "NOTIFY_SOCKET" in os.environ:
        return UnitView()
    with contextlib.suppress(Exception):  # not installed, closed, or no stream at all
        if log.stream.isatty():
            return TerminalView(log)
    return View()


class Failures(logging.Handler):
    """Notes that something failed, and no more: what is said of it may quote an endpoint with its credentials."""

    happened = False

    def emit(self, _record: logging.LogRecord) -> None:
        self.happened = True


class Traces:
    """Spans of the run, its phases and batches: where OpenTelemetry is installed and OTEL_… name an endpoint."""

    PATIENCE = 5.0  # seconds, for sending what is left at the end

    def __init__(self, tell: Callable[[str, str], None]) -> None:
        self.tell = tell
        self.tracer: Any = None
        self.spans: list[Any] = []  # the run, and the phase in it
        self.failures = Failures(logging.ERROR)
        if traces_wanted():
            with self.trying(), contextlib.suppress(ImportError):
                self.connect()

    def connect(self) -> None:
        logger = logging.getLogger("opentelemetry")
        logger.addHandler(self.failures)
        logger.propagate = False
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        else:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        resource = Resource.create({} if named else {"service.name": PROGRAM})
        self.provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self.provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self.api, self.tracer = trace, self.provider.get_tracer(PROGRAM, VERSION)

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Around what the library does: if it fails, there are no more traces."""
        try:
            yield
        except Exception as error:  # noqa: BLE001, of a library that reads settings of its own
            self.tracer, self.spans = None, []
            self.tell("traces not sent", f"{type(error).__name__} of OpenTelemetry: see the OTEL_… variables")

    def begin(self, name: str, *, seconds_ago: float = 0.0, **attributes: Any) -> None:
        """Begin a span in the innermost one that has not ended; attributes that are None are left out."""
        if self.tracer:
            with self.trying():
                context = self.api.set_span_in_context(self.spans[-1]) if self.spans else None
                start = time.time_ns() - int(seconds_ago * 1e9)
                self.spans.append(self.tracer.start_span(name, context, attributes=known(attributes), start_time=start))

    def end(self, error: str | None = None, **attributes: Any) -> None:
        """End the innermost span that has not ended; the error's text is safe to show."""
        if self.spans:
            with self.trying():
                span = self.spans.pop()
                span.set_attributes(known(attributes))
                if error:
                    span.set_status(self.api.Status(self.api.StatusCode.ERROR, error))
                span.end()

    def close(self, end: Callable[[], float]) -> None:
        """Send what is left, for PATIENCE at most: an endpoint that does not answer holds up no run.

        `end`, in seconds of `clock`, is when it must be over; a signal may bring it nearer.
        """
        if self.tracer:
            sending = threading.Thread(target=self.provider.shutdown, daemon=True)
            sending.start()
            latest = clock() + self.PATIENCE
            while sending.is_alive() and clock() < min(latest, end()):
                sending.join(0.1)
            if sending.is_alive() or self.failures.happened:
                self.tell(
                    "traces not sent",
                    "the endpoint in OTEL_EXPORTER_OTLP_ENDPOINT, or …_TRACES_ENDPOINT, does not take them",
                )


def traces_wanted() -> bool:
    """Whether OpenTelemetry's own variables ask for traces."""
    environment = os.environ
    endpoints = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return (
        any(environment.get(endpoint) for endpoint in endpoints)
        and environment.get("OTEL_SDK_DISABLED", "").strip().lower() != "true"
        and "otlp" in environment.get("OTEL_TRACES_EXPORTER", "otlp")
    )


class Report:
    """Tells everybody of what happens in a run."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.log = job.log
        self.record = Record(job.config.metrics, job.log.record_failed)
        self.view = view_of(job.log)
        self.traces = Traces(job.log.record_failed)
        self.started = dt.datetime.now(UTC)
        self.deleted = 0  # in this run, for certain
        self.phase_deleted, self.phase_started_at = 0, 0.0
        self.estimate: int | None = None

    def begin(self) -> None:
        """The run begins, and has not connected yet."""
        run, job = self.log.job_run_id, self.job
        process = os.getpid()
        running = RunningRecord(self.started, job.scheduled, process, born(process), boot_id())
        self.record.begin(job.config, run, running)
        self.traces.begin("run", jobRunId=run, correlationId=run)

    def job_started(self, now: dt.datetime, tables: Sequence[Table]) -> None:
        """It knows what time it is, and the tables that it will delete from."""
        cutoffs = {f"CUTOFF_{policy.name.upper()}": format_time(policy.cutoff(now)) for policy in self.job.policies}
        reached = sorted({str(name) for table in tables for name in table.cascades})  # by leave of allow_cascade
        self.log.emit(JOB_STARTED, "job started", **cutoffs, CASCADES=", ".join(reached) or None)
        policies = [table.policy for table in tables]
        self.record.remember_cutoffs(policies, now, consent=not self.job.scheduled)

    def phase_started(self, policy: Policy, now: dt.datetime, walk: str) -> None:
        self.log.emit(
            PHASE_STARTED,
            f"Starting {policy.title or policy.name}.",
            PHASE=policy.name,
            TABLE=policy.table,
            CUTOFF=format_time(policy.cutoff(now)),
            WALK=walk,
        )
        self.phase_deleted, self.phase_started_at, self.estimate = 0, clock(), None
        self.traces.begin("phase", phase=policy.name, table=str(policy.table), walk=walk)
        self.view.show(policy.name, "started", 0, None, urgent=True)

    def batch_deleted(self, policy: Policy, deleted: int, size: int, seconds: float) -> None:
        """A batch of at most `size` rows was committed, after so many seconds."""
        self.log.emit(
            BATCH_DELETED,
            "batch deleted",
            PHASE=policy.name,
            DELETED_COUNT=deleted,
            BATCH_SIZE=size,
            DURATION_MS=round(seconds * 1000),
        )
        self.traces.begin("batch", seconds_ago=seconds, phase=policy.name, batchSize=size, deletedCount=deleted)
        self.traces.end()
        self.count(policy, deleted)
        self.view.show(policy.name, self.words(), self.phase_deleted, self.total())
        self.record.progress(self.log.job_run_id, policy.name, self.deleted)

    def standby_awaited(self, policy: Policy, standby: str, lag: float) -> None:
        """The next batch waits until the standby, so many seconds behind, has caught up."""
        self.log.emit(
            STANDBY_AWAITED, "waiting for a standby", PHASE=policy.name, STANDBY=standby, LAG_MS=round(lag * 1000)
        )
        self.view.show(policy.name, "waiting for a standby", self.phase_deleted, self.total(), urgent=True)

    def vacuumed(self, table: TableName, seconds: float, why_not: str | None) -> None:
        """The table was vacuumed in so many seconds, unless there is a reason why not."""
        if why_not is None:
            self.log.emit(TABLE_VACUUMED, "table vacuumed", TABLE=table, DURATION_MS=round(seconds * 1000))
        else:
            self.log.emit(VACUUM_SKIPPED, "table not vacuumed", TABLE=table, ERROR=why_not)

    def count(self, policy: Policy, deleted: int) -> None:
        self.deleted += deleted
        self.phase_deleted += deleted
        self.record.add_deleted(policy.name, deleted)

    def total(self) -> int | None:
        """Of the phase's rows, if it was estimated: more than are deleted, so that no bar is full before the end."""
        return self.estimate and max(self.estimate, self.phase_deleted + 1 + self.phase_deleted // 100)

    def words(self) -> str:
        """How the phase gets on."""
        seconds = max(clock() - self.phase_started_at, 0.001)
        left = format_duration(round_down(dt.timedelta(seconds=max(0.0, self.job.end - clock()))))
        deleted = self.phase_deleted
        share = f" of about {self.estimate:,}" if self.estimate and deleted <= self.estimate else ""
        more = ", more than estimated" if self.estimate and deleted > self.estimate else ""
        return f"{deleted:,}{share} rows deleted{more}, {deleted / seconds:,.0f}/s, budget left {left}"

    def batch_retried(self, policy: Policy, failure: RetentionError, what: str, size: int) -> None:
        self.log.emit(
            BATCH_RETRIED,
            f"batch failed, {what}",
            PHASE=policy.name,
            SQLSTATE=failure.sqlstate,
            ERROR=failure.message,
            BATCH_SIZE=size,
        )

    def phase_ended(self, outcome: Outcome) -> None:
        """The policy has its outcome; perhaps its phase did not even start."""
        counts: dict[str, object] = {
            "PHASE": outcome.policy.name,
            "DELETED_COUNT": outcome.deleted,
            "BACKLOG_REMAINING": outcome.backlog,
            "BLOCKED": outcome.blocked,
            "BLOCKED_BY": outcome.blocked_by,
            "UNDELETABLE": outcome.undeletable,
            "REPLICATION_WAIT_MS": outcome.replication_wait_ms,
        }
        removed = "unknown" if outcome.deleted is None else f"{outcome.deleted:,}"
        error = outcome.error
        if error:
            self.log.emit(PHASE_FAILED, "phase failed", SQLSTATE=error.sqlstate, ERROR=error.message, **counts)
        else:
            drained = outcome.stop_reason == "drained"
            ended = "finished successfully" if drained else f"stopped ({outcome.stop_reason})"
            counts |= {"DURATION_MS": round(outcome.seconds * 1000), "STOP_REASON": outcome.stop_reason}
            self.log.emit(PHASE_COMPLETED, f"Cleanup {ended}. Removed rows: {removed}.", **counts)
        if outcome.deleted is not None and outcome.deleted > self.phase_deleted and outcome.started:
            self.count(outcome.policy, outcome.deleted - self.phase_deleted)  # settled after the last batch
        self.record.phase_ended(outcome, dt.datetime.now(UTC))
        if self.traces.tracer and not outcome.started:
            self.traces.begin("phase", phase=outcome.policy.name, table=str(outcome.policy.table))
        self.traces.end(
            error.message if error else None,
            deletedCount=outcome.deleted,
            backlogRemaining=outcome.backlog,
            stopReason=outcome.stop_reason,
            sqlstate=error.sqlstate if error else None,
        )
        if outcome.started:
            rows, drained = max(self.phase_deleted, 1), outcome.stop_reason == "drained"
            done = (rows, rows) if drained else (self.phase_deleted, self.estimate or rows * 2)  # nothing looks done
            self.view.show(outcome.policy.name, f"{removed} rows deleted, {outcome.stop_reason}", *done, urgent=True)

    def job_ended(self, result: Result) -> None:
        """The run has an outcome for each of its policies."""
        backlogs = [outcome.backlog for outcome in result.outcomes]
        numbers = [backlog for backlog in backlogs if backlog is not None]
        seconds = clock() - self.job.started
        self.record_run(result, seconds)  # with which the fields below are of the same knowledge
        fields: dict[str, object] = {}
        for outcome in result.outcomes:
            fields |= {f"{outcome.policy.name.upper()}_{key}": value for key, value in self.proof(outcome).items()}
        self.log.emit(
            JOB_COMPLETED,
            "job completed",
            **fields,
            DURATION_MS=round(seconds * 1000),
            BACKLOG_REMAINING=sum(numbers) if len(numbers) == len(backlogs) else None,
            STOP_REASON=result.stop_reason,
            FAILED_PHASES=sum(1 for outcome in result.outcomes if outcome.error),
        )
        self.traces.end("a policy failed" if result.exit_status else None, stopReason=result.stop_reason)
        self.view.ended(f"{self.deleted:,} rows deleted, {result.stop_reason}")

    def proof(self, outcome: Outcome) -> dict[str, object]:
        """What an auditor asks of a policy, for the journal: the files can be rewritten by the user of the job."""
        before = self.record.totals.policy(outcome.policy.name).last_drained
        drained = outcome.now if outcome.drained else before
        return {
            "DELETED": outcome.deleted,
            "BACKLOG": outcome.backlog,
            "BLOCKED": outcome.blocked,
            "OVERDUE": outcome.overdue,
            "OLDEST_ROW_AGE_SECONDS": outcome.oldest_row_age_seconds and round(outcome.oldest_row_age_seconds),
            "LAST_DRAINED": drained and format_time(drained),
        }

    def job_failed(self, result: Result, sqlstate: str | None) -> None:
        """Something stopped the whole run."""
        message = result.errors[0][1]
        self.log.emit(JOB_FAILED, "job failed", ERROR=message, SQLSTATE=sqlstate)
        self.record_run(result, clock() - self.job.started)
        self.traces.end(message, sqlstate=sqlstate)
        self.view.ended(f"failed: {message}")

    def record_run(self, result: Result, seconds: float) -> None:
        ended = dt.datetime.now(UTC)
        if self.job.session.interrupts.requested:  # of whose five seconds the batch in flight may have had four
            self.record.patience = min(self.record.patience, 0.5)
        whole = self.job.policies == self.job.config.enabled
        line = history_line(result, self.started, ended, self.job.scheduled, whole=whole)
        self.record.job_ended(line, ended, seconds * 1000)

    def close(self) -> None:
        """Nothing more comes: the terminal is given back, and traces are sent."""
        with contextlib.suppress(Exception):
            self.view.close()
        self.traces.close(lambda: self.job.session.interrupts.end - 0.5)


def history_line(
    result: Result, started: dt.datetime, ended: dt.datetime, scheduled: bool, *, whole: bool
) -> dict[str, Any]:
    """What the history keeps of a run. A success is one of all policies that no signal stopped, with status 0."""
    return {
        "job_run_id": result.job_run_id,
        "started": format_time(started),
        "ended": format_time(ended),
        "now": result.now and format_time(result.now),
        "scheduled": scheduled,
        "success": whole and result.exit_status == Exit.OK and result.stop_reason != "signal",
        "stop_reason": result.stop_reason,
        "exit_status": int(result.exit_status),
        "errors": [{"key": key, "message": message} for key, message in result.errors],
        "policies": {outcome.policy.name: outcome.history() for outcome in result.outcomes},
    }


# ── A phase ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# One policy's batches until nothing deletable is left, and the standbys that they wait for. Knows the session, its
# statements and the report, and no file.


@dataclass(frozen=True, slots=True)
class Batch:
    """What one batch statement reports: the columns of each of them, in this order.

    Times and addresses are the server's text; None: there is no such row.
    """

    looked: int  # rows of the policy that it passed
    held: int  # of these, rows to which a row that stays refers
    claimed: int
    deleted: int
    last_age: str | None  # of the row at which the batch ended, though more lie ahead
    last_tid: str | None
    xid: str | None
    witness: str | None  # address of a deleted row: whether it is still there tells if a doubtful COMMIT went through
    witness_age: str | None
    unchanged: bool
    near: bool | None  # in place: our number is not FAR ahead
    claimed_tids: Sequence[str] = ()  # addresses of the rows that were claimed, if none was to be deleted
    freed: Sequence[str] = ()  # addresses of rows behind the walk that a deleted row named
    held_by: Sequence[int] = ()  # by which references, as numbers


@dataclass(slots=True)
class Tally:
    """What one pass over the table found: its rows of the policy are deleted, blocked, undeletable or left."""

    deleted: int = 0
    blocked: int = 0
    undeletable: int = 0
    left: int = 0
    missed: int = 0  # of left: claimed, and not deleted all the same

    def add(self, batch: Batch, *, climbing: bool, refused: str | None = None) -> None:
        """Add what a batch did; `refused` (blocked, locked or undeletable) is why its one claimed row was not deleted.

        A row that is climbed to was walked over before, as held: of 10 climbed to and 8 deleted, 2 are held still.
        """
        self.blocked += batch.held - (batch.looked if climbing else 0)
        self.deleted += batch.deleted
        self.left += batch.looked - batch.held - batch.deleted
        if refused is None:
            self.missed += batch.claimed - batch.deleted
        elif refused == "blocked":
            self.blocked, self.left = self.blocked + batch.claimed, self.left - batch.claimed
        elif refused == "undeletable":
            self.undeletable, self.left = self.undeletable + batch.claimed, self.left - batch.claimed


class Position:
    """Where a pass is. `done` once a batch found the end."""

    can_be_in_place = False
    in_place = False  # the next rows are claimed in place, being many
    tied = False  # among so many rows of one age that the other walk is better
    done: bool

    def go_by_address(self) -> None:
        """For the rest of the pass no rows are claimed in place."""
        self.can_be_in_place = self.in_place = False

    def step_aside(self) -> bool:
        """Skip half of the pages ahead, to come back to them; False where that cannot be."""
        return False

    def come_back(self, batch: Batch) -> bool:  # noqa: ARG002, as that of AcrossPages
        """Go over the range of a batch once more at the end of the pass; False where that cannot be, or was."""
        return False


class AlongIndex(Position):
    """A position in the order of age, or of the primary key."""

    # Rows of one age are sorted again by each batch that starts among them; from here on the other walk is cheaper.
    MANY_OF_ONE_AGE = 1000
    LONGEST_STRETCH = 4  # of the largest batch: to read so many rows costs as much as to delete that

    def __init__(self, walk: Walk, size: int) -> None:
        """`size` is how large a batch may be."""
        self.walk, self.size = walk, size
        self.age: str | None = None
        self.tid: str | None = None
        self.of_one_age = 0
        self.stretch = 1  # how many times as many rows as it may delete the next batch may read
        self.done = False

    def parameters(self, limit: int) -> dict[str, Any]:
        return {"age": self.age, "tid": self.tid, "scan": limit * self.stretch, "done": self.done}

    def advance(self, batch: Batch, limit: int) -> None:
        same_age = self.walk.name == "index" and batch.last_age is not None and batch.last_age == self.age
        self.of_one_age = self.of_one_age + limit * self.stretch if same_age else 0
        self.tied = self.of_one_age >= self.MANY_OF_ONE_AGE
        if batch.looked < limit / 2:
            self.stretch = max(1, min(self.LONGEST_STRETCH * self.size // limit, self.stretch * 2))
        else:
            self.stretch = max(1, self.stretch // 2)
        self.age, self.tid, self.done = batch.last_age, batch.last_tid, batch.last_tid is None


def page_and_row(tid: str) -> tuple[int, int]:
    """The page of a row, and which of its rows it is."""
    page, row = tid[1:-1].split(",")
    return int(page), int(row)


class AcrossPages(Position):
    """A position in the heap, before a range of pages that adapts so that it fills most of a batch.

    The pages are those that the table had when the pass began; `Phase.moved` looks after what was appended since.
    """

    FILL = 0.9  # of a batch: the rows of a range that overfills one are sorted again for the next
    FILL_IN_PLACE = 0.99  # to overfill one costs less
    WIDEST = 1024  # pages, 8 MiB: where little matches, a transaction stays short all the same
    DENSE = 0.25  # of the rows in a range: from here on they are claimed in place, where they can be

    def __init__(self, walk: Walk, pages: int, rows_per_page: float, *, can_be_in_place: bool) -> None:
        self.walk = walk
        self.rows_per_page = rows_per_page
        self.can_be_in_place = can_be_in_place
        self.in_place = can_be_in_place  # of the first range it is taken for granted that it is dense
        self.matches_per_page = rows_per_page  # of the last range: rows of the policy
        self.width, self.widest = 1, self.WIDEST  # pages, of the range, and of the next one at most
        self.tid = f"({pages},0)" if walk.descending else "(0,0)"
        self.end = 0 if walk.descending else pages
        self.edge = self.end
        self.later: list[tuple[str, int, bool]] = []  # what is left to do: from here to that page, perhaps once more
        self.again = False
        self.done = pages == 0

    def step_aside(self) -> bool:
        page, _ = page_and_row(self.tid)
        if self.walk.descending or self.end - page < 4 * self.width:  # chains go from the newest on, and not otherwise
            return False
        middle = (page + self.end) // 2
        self.later.append((self.tid, middle, self.again))
        self.tid = f"({middle},0)"
        return True

    def come_back(self, batch: Batch) -> bool:
        if not self.can_be_in_place or self.again:
            return False
        end = page_and_row(batch.last_tid)[0] + 1 if batch.last_tid else self.edge
        self.later.insert(0, (self.tid, end, True))
        return True

    def parameters(self, limit: int) -> dict[str, Any]:
        """Those of the next range, which is chosen so that it has about `limit` rows of the policy, and no more."""
        page, row = page_and_row(self.tid)
        fill = self.FILL_IN_PLACE if self.in_place else self.FILL
        fitting = int(fill * limit / self.matches_per_page) if self.matches_per_page else self.widest
        self.width = max(1, min(self.widest, fitting))
        if self.walk.descending:  # the rest of a row's page belongs to the range
            self.edge = max(self.end, page + (row > 0) - self.width)
        else:  # in place that rest is an extra: small batches may end in each page
            self.edge = min(self.end, page + self.width + (self.in_place and row > 0))
        return {"tid": self.tid, "edge": f"({self.edge},0)"}

    def advance(self, batch: Batch, limit: int) -> None:  # noqa: ARG002, as that of AlongIndex
        full = batch.last_tid is not None
        last_tid = batch.last_tid or f"({self.edge},0)"
        (page, row), (start, first) = page_and_row(last_tid), page_and_row(self.tid)
        pages = max(1, abs(page - start) + full)
        rows_there = abs((page - start) * self.rows_per_page + row - first)
        self.in_place = self.can_be_in_place and batch.looked >= self.DENSE * rows_there
        self.matches_per_page = batch.looked / pages
        self.widest = min(self.WIDEST, 2 * pages)
        self.tid = last_tid
        if not full and self.edge == self.end:
            self.done = not self.later
            if self.later:
                self.tid, self.end, self.again = self.later.pop()


# Another number when the table's file is another, after VACUUM FULL for example, or its partitions are others.
SHAPE = """(SELECT CASE s.relkind WHEN 'p' THEN (
        SELECT hashtextextended(string_agg(p.relid::oid::text, ',' ORDER BY p.relid::oid), 0)
        FROM pg_partition_tree(s.oid) p)
    ELSE pg_relation_filenode(s.oid)::bigint END FROM pg_class s WHERE s.oid = %(oid)s::oid)"""
# Another number when a VACUUM has ended.
VACUUMS = "pg_stat_get_vacuum_count(%(oid)s::oid) + pg_stat_get_autovacuum_count(%(oid)s::oid)"


# Standbys that follow by replaying; not those that only copy the database, nor those that decode its changes.
STANDBYS = """
SELECT r.application_name, r.state IS NULL, r.replay_lsn - '0/0', EXTRACT(EPOCH FROM r.replay_lag)::float8,
       pg_current_wal_lsn() - '0/0', current_user::text
FROM pg_stat_replication r
WHERE (r.state IS NULL OR r.state IN ('streaming', 'catchup') AND r.replay_lsn IS NOT NULL) AND NOT EXISTS (
    SELECT FROM pg_replication_slots s WHERE s.active_pid = r.pid AND s.slot_type = 'logical')
"""


class Standbys:
    """How far the standbys are behind, and whether that is more than they may be.

    The server's own measure stands still while a standby does. So what counts, too, is for how long a standby has
    lacked what had been written when we looked.
    """

    INTERVAL = 1.0  # seconds between two looks, each of which is a transaction

    def __init__(self, session: Session, allowed: dt.timedelta) -> None:
        self.session = session
        self.allowed = allowed.total_seconds()
        self.written: list[tuple[float, int]] = []  # when, in seconds of `clock`, how many bytes had been
        self.looked = -math.inf
        self.furthest: tuple[str, float] | None = None  # its name, and by how many seconds

    def behind(self) -> tuple[str, float] | None:
        """The standby that is furthest behind, by its name, and by how many seconds, if these are more than allowed."""
        if clock() - self.looked >= self.INTERVAL:
            with self.session.transaction(snapshot=True) as transaction:
                found = transaction.execute(STANDBYS).fetchall()
            self.looked = clock()
            self.furthest = max(self.lags(found), key=lambda lag: lag[1], default=None)
        return self.furthest if self.furthest and self.furthest[1] > self.allowed else None

    def lags(self, found: Sequence[tuple[Any, ...]]) -> Iterator[tuple[str, float]]:
        if found:
            self.written.append((self.looked, int(found[0][4])))
        for name, hidden, replayed, reported, _, role in found:
            if hidden:
                raise Finding.of("lag_unreadable", role=quoted(role)).failure()
            since = [moment for moment, end in self.written if end > (replayed or 0)]
            if since:
                yield name, max(self.looked - since[0], reported or 0.0)
        everywhere = min((int(row[2] or 0) for row in found), default=0)
        self.written = [(moment, end) for moment, end in self.written if end > everywhere]


@dataclass
class Phase:
    """The work on one table; `run` returns the stop reason, and the counts stand whatever ended it."""

    SHRINK = 8  # a failed batch to the next
    RETRIES = 8  # in a row: a batch of 5000 shrinks to one row in 4 steps
    RETRIES_IN_TRIGGER = 3  # in a row, of what a retry cures, before the row is suspected
    SUSPECTS = 5  # such rows, none deleted between, before it is the table's fault
    FRUITLESS = 4  # passes in which nothing goes
    RECONNECT_FOR = 30.0  # seconds
    SETTLE = 0.4  # seconds, of what is left of the five after a signal
    # How long a batch may take, in seconds: with the pause "auto" what the online service does not notice, else what it
    # may wait for a row. Where even the quickest takes about that long, smaller ones would only cost more: so twice as
    # long as the quickest in any case.
    UNNOTICED, LONGEST = 0.02, 1.0
    FIRST = 500  # rows, of the first batch that is to go unnoticed
    # More rows of a batch than this that other sessions hold, and more than it has itself: another instance is at work
    # here. To go on elsewhere, or else to wait (at first for a moment, at most for these seconds or four batches),
    # costs less than to go through the same rows beside it. In case it is none, so many times in a row, and then never.
    OTHERS, STEP_BACK, PATIENCE = 50, 0.25, 8
    MANY = 5000  # rows: for fewer the whole table is not looked at, whatever the planner says
    GLANCE = dt.timedelta(seconds=1)  # to find so many
    MOST = 0.5  # of the table: to go through all of it takes no longer then, in whatever order its pages are

    session: Session
    table: Table
    now: dt.datetime
    options: RunOptions
    share_end: float  # seconds of `clock`: when its share of the budget is spent, and when the night window closes
    window_end: float
    report: Report
    standbys: Standbys | None = None
    deleted: int | None = 0
    waited: float = 0.0  # seconds, for standbys
    waiting: bool = False  # for a standby
    quickest: float = math.inf  # seconds, of the batches so far
    met: int = 0  # another instance, in so many batches in a row
    beside: bool = False  # another instance was met
    patient: bool = True
    blockers: set[str] = field(default_factory=set)
    hidden: list[str] = field(default_factory=list)  # addresses of rows that were found blocked by trying
    refused: list[str] = field(default_factory=list)  # addresses of undeletable rows
    refusal: RetentionError | None = None
    failures: int = 0
    suspects: int = 0
    progressed: bool = False
    in_doubt: Batch | None = None
    reconnected: bool = False
    finished: bool = False  # the tally is of a whole pass
    shape: int | None = 0  # SHAPE of the table, VACUUMS, and its pages, as the pass began
    vacuums: int = 0
    pages: int = 0

    def __post_init__(self) -> None:
        self.bound = self.table.bound(self.now)
        self.size = self.table.policy.batch_size or self.options.batch_size
        self.first = self.limit = min(self.size, self.FIRST) if self.options.pause is None else self.size
        self.begin_pass(out_of_order=not self.table.indexed)

    @property
    def end(self) -> float:
        return min(self.share_end, self.window_end)

    def stop_reason(self) -> str | None:
        """Why it must end now; the budget leaves it the first batch, the window does not."""
        if self.session.interrupts.requested:
            return "signal"
        return "budget" if clock() >= (self.end if self.progressed or self.waiting else self.window_end) else None

    def held_back(self) -> bool:
        """Whether a standby is too far behind for another batch; if so, a moment has been waited."""
        late = self.standbys and self.standbys.behind()
        if late and not self.waiting:
            self.report.standby_awaited(self.table.policy, *late)
        self.waiting = bool(late)
        if self.waiting:
            began = clock()
            self.rest(Standbys.INTERVAL)
            self.waited += clock() - began
        return self.waiting

    def rest(self, seconds: float) -> None:
        """Wait outside any transaction, no longer than the phase may last, and tell systemd so."""
        seconds = max(0.0, min(seconds, self.end - clock()))
        sign_of_life(seconds)
        self.session.interrupts.sleep(seconds)

    def adapted(self, limit: int, seconds: float) -> int:
        """How large the next batch may be, one of `limit` rows having taken so many seconds; twice that at most."""
        self.quickest = seconds if limit == 1 else min(self.quickest, seconds)  # no smaller batch would be quicker
        allowed = max(self.UNNOTICED if self.options.pause is None else self.LONGEST, 2 * self.quickest)
        return max(1, min(self.size, 2 * limit, int(limit * allowed / max(seconds, 0.001))))

    def begin_pass(self, *, out_of_order: bool) -> None:
        """Start a pass, its counts from nothing; `out_of_order` where the order of age is not to be followed."""
        self.out_of_order = out_of_order
        self.walk = walk_of(self.table, self.table.other_walk if out_of_order else "index")
        self.statements: dict[str, Query] = {"walk": batch_of(self.table, self.walk)}
        # for the sets of a batch: much more would be cleared in vain at each, which took half of the time
        self.settings = {**WALKING, "work_mem": f"{min(65_536, max(1024, self.size // 5))}kB"}
        if self.table.references:
            self.statements["climb"] = closed_batch(self.table, self.walk, climbed(self.table, self.walk))
        elif self.walk.name == "pages" and self.table.locks_readable and not self.table.triggered:
            self.statements["in place"] = batch_in_place(self.walk)
            self.settings["plan_cache_mode"] = "force_generic_plan"  # the same for all ranges of pages
        self.tally = Tally()
        self.seeds: dict[str, None] = {}
        self.position: AlongIndex | AcrossPages | None = None

    def first_position(self) -> AlongIndex | AcrossPages:
        """The first position of a pass; remembers the table's shape and how many pages it has."""
        query = sql.SQL(
            "SELECT {}, {}, pg_relation_size(c.oid::regclass) / current_setting('block_size')::bigint,"
            " CASE WHEN c.reltuples > 0 AND c.relpages > 0 THEN c.reltuples::float8 / c.relpages ELSE 50 END"
            " FROM pg_class c WHERE c.oid = %(oid)s::oid"
        ).format(sql.SQL(SHAPE), sql.SQL(VACUUMS))
        with self.session.transaction(snapshot=True) as transaction:
            row = transaction.execute(query, {"oid": self.table.oid}).fetchone()
        if row is None:
            raise PolicyFailedError(f"table {self.table.name} does not exist any more", "42P01")
        self.shape, self.vacuums, self.pages, rows_per_page = row
        if self.walk.name != "pages":
            return AlongIndex(self.walk, self.size)
        return AcrossPages(self.walk, self.pages, rows_per_page, can_be_in_place="in place" in self.statements)

    def run(self) -> str:
        """Passes over the table until one finds nothing left; PolicyFailedError when the policy cannot go on."""
        fruitless = 0
        while True:
            stopped = self.one_pass()
            if stopped:
                return stopped
            tally = self.tally
            fruitless += not tally.deleted
            self.finished = True
            if fruitless < self.FRUITLESS and (tally.blocked < 0 or self.reconnected or self.moved()):
                self.reconnected = False  # other sessions, or a fail-over, brought old rows behind the walk
            elif not tally.left:
                return "drained"
            elif not tally.deleted and not tally.missed:
                return "locked"
            elif fruitless >= self.FRUITLESS:
                tally.left -= tally.missed
                tally.undeletable += tally.missed
                raise self.failure("deletes_cancelled", count=tally.missed)
            elif tally.missed:  # another session may have changed the rows just then
                self.session.interrupts.sleep(0.2)
            self.finished = False
            self.begin_pass(out_of_order=self.out_of_order)

    def choose_walk(self) -> None:
        """Go by pages from the start where that is sooner than along the index of age.

        So it is where most of the table goes, or much of it from a heap in another order. The index is asked whether
        there are many old rows, then the planner, whose statistics may be of yesterday: at worst the table is read once
        in vain. Chains are better in order, and partitions have no pages in common.
        """
        if self.walk.name != "index" or self.table.references or self.table.key:
            return
        count = sql.SQL("SELECT count(*) FROM (SELECT t.{} FROM {} t WHERE {} ORDER BY 1 LIMIT %(many)s) s").format(
            Name(self.table.age), rows(self.table), old(self.table)
        )
        parameters = {**parameters_of(self.table, self.bound), "many": self.MANY}
        try:
            # the planner, if it knew the cutoff, would read the ends of the index
            settings = {**WALKING, "plan_cache_mode": "force_generic_plan"}
            with self.session.transaction(settings, snapshot=True, timeout=self.GLANCE) as transaction:
                if transaction.row(count, parameters) != (self.MANY,):
                    return
        except psycopg.Error:
            return  # the first batch meets it, and knows what to do
        plan, everything = self.planned(predicate(self.table, ordered=True)), self.planned(sql.SQL("true"))
        share = plan.get("Plan Rows", 0) / everything.get("Plan Rows", math.inf)
        if plan.get("Node Type") == "Seq Scan" or share >= self.MOST:
            self.begin_pass(out_of_order=True)

    def failure(self, code: str, **names: object) -> RetentionError:
        return Finding.of(code, self.table.policy.name, table=self.table.name, **names).failure()

    def moved(self) -> bool:
        """Whether rows of the policy may stand where this pass has not been.

        So it is when the table was written anew or has other partitions, or when rows were changed and so put
        elsewhere: behind its pages, or where a VACUUM has made room. Their places in an index do not change by that.
        """
        appended = sql.SQL("false").format()
        if self.walk.name == "pages":
            appended = sql.SQL("EXISTS (SELECT FROM {} t WHERE t.ctid >= %(end)s::tid AND {})").format(
                rows(self.table), predicate(self.table)
            )
        query = sql.SQL("SELECT {}, {}, {}").format(sql.SQL(SHAPE), sql.SQL(VACUUMS), appended)
        parameters = {**parameters_of(self.table, self.bound), "oid": self.table.oid, "end": f"({self.pages},0)"}
        try:
            with self.session.transaction(WALKING, snapshot=True) as transaction:
                row = transaction.row(query, parameters)
        except psycopg.Error as error:
            if judge(error) in (Verdict.RECONNECT, Verdict.RETRY, Verdict.SMALLER):
                return True  # the next pass meets it, and knows what to do
            raise
        shape, vacuums, appended_some = row
        return bool(shape != self.shape or appended_some or (self.walk.name == "pages" and vacuums != self.vacuums))

    def one_pass(self) -> str | None:
        """Walk over the table once, climbing to what was freed behind; a stop reason if it could not finish."""
        while self.seeds or self.position is None or not self.position.done:
            if stopped := self.stop_reason():
                return stopped
            seeds = list(self.seeds)[: self.limit]
            limit, started = self.limit, clock()
            refused = recovered = None
            try:
                if self.held_back():
                    continue
                started = clock()
                batch = self.execute(seeds, limit)
                seconds = clock() - started
            except psycopg.Error as error:
                seconds = clock() - started
                recovered = self.recover(error, seeds)
                if recovered is None:
                    continue
                batch, refused = recovered
            assert self.position is not None
            self.failures, self.progressed = 0, True
            others = batch.looked - batch.held - batch.claimed
            met = not seeds and self.meets_another(batch, others)
            if met or (self.beside and self.patient and others and self.position.come_back(batch)):
                batch = dataclasses.replace(batch, looked=batch.claimed, held=0)  # what stays is looked at again
            self.tally.add(batch, climbing=bool(seeds), refused=refused)
            assert self.deleted is not None
            self.deleted += batch.deleted
            self.suspects = 0 if batch.deleted else self.suspects
            self.blockers.update(self.table.references[number].name for number in batch.held_by)
            if seeds:
                for seed in seeds:
                    self.seeds.pop(seed, None)
            elif not met:
                self.position.advance(batch, limit)
            self.seeds.update(dict.fromkeys(batch.freed))
            if refused is not None:
                self.limit = 1
            elif batch.deleted and not recovered:
                self.limit = self.adapted(limit, seconds)
            else:  # it says nothing of what deleting takes; but many rows that stay are not passed one by one
                self.limit = max(limit, min(2 * limit, self.first))
            if batch.deleted:
                self.report.batch_deleted(self.table.policy, batch.deleted, limit, seconds)
            if self.position.tied:
                self.begin_pass(out_of_order=True)
            elif met and not self.position.step_aside():
                self.limit = min(self.limit, self.FIRST)
                self.rest(min(max(self.STEP_BACK, 4 * seconds), 5 * seconds * 2**self.met))
            elif batch.deleted and (self.seeds or not self.position.done):
                self.rest(seconds if self.options.pause is None else self.options.pause / UNITS["s"])
        return None

    def meets_another(self, batch: Batch, others: int) -> bool:
        """Whether another instance is at work on the rows of a batch, by how many of them other sessions hold.

        Once one is known to be there, any row may be one of its, and a pass over chains is not to be made twice for a
        few. But who still holds rows after all our patience is none: from then on nobody is waited for.
        """
        few = 0 if self.beside and self.table.references else max(batch.claimed, self.OTHERS)
        self.met = self.met + 1 if others > few else 0
        self.beside = self.beside or self.met > 0
        self.patient = self.patient and self.met <= self.PATIENCE
        return self.patient and self.met > 0

    def execute(self, seeds: list[str], limit: int, *, delete: bool = True) -> Batch:
        """One batch in one transaction. `in_doubt` holds its result while its COMMIT is under way."""
        if self.position is None:
            self.position = self.first_position()
            self.render()
        parameters = {
            **parameters_of(self.table, self.bound),
            **self.position.parameters(limit),
            "seeds": seeds,
            "limit": limit,
            "delete": delete,
            "claimed_tids": None,
            "oid": self.table.oid,
        }
        kind = "climb" if seeds else "in place" if delete and self.position.in_place else "walk"

        def ask(statement: str, **changed: object) -> Batch:
            prepare = statement == "in place" and self.session.is_direct(transaction)
            return Batch(*transaction.row(self.statements[statement], {**parameters, **changed}, prepare=prepare))

        self.in_doubt = None
        with self.session.transaction(self.settings, schema=self.table.name.schema) as transaction:
            if self.table.own_action and delete:
                # A child that was committed after the statement began would not be seen, and go along with its parent.
                # So lock first, which keeps new children out, and look again in a statement that sees what came before.
                parameters["claimed_tids"] = ask(kind, delete=False).claimed_tids
            batch = ask(kind)
            if batch.near and self.is_ambiguous(transaction):
                self.position.go_by_address()
                raise psycopg.errors.SerializationFailure("a lock has the number of this transaction")
            if kind == "in place" and batch.claimed and not batch.deleted:  # AMBIGUOUS, or all were just changed
                self.position.go_by_address()
                batch = ask("walk")
            if not batch.unchanged:
                raise self.failure("table_changed")
            self.in_doubt = batch if batch.xid else None
        self.in_doubt = None
        return batch

    def is_ambiguous(self, transaction: Transaction) -> bool:
        """Whether what carries our number may not be ours, by now."""
        prepare, parameters = self.session.is_direct(transaction), {"oid": self.table.oid}
        return transaction.row(f"SELECT {AMBIGUOUS}", parameters, prepare=prepare) == (True,)

    def render(self) -> None:
        """Put the statements of this pass into the text that is sent: that takes as long as a small batch."""
        for name, statement in self.statements.items():
            if isinstance(statement, sql.Composed):
                self.statements[name] = statement.as_bytes(self.session.connection)

    def recover(self, error: psycopg.Error, seeds: list[str]) -> tuple[Batch, str | None] | None:
        """Do what the error calls for: None to try again, a batch with the reason why its one row stays, or raise."""
        verdict = judge(error)
        failure = failure_of(error, triggered=self.table.triggered)
        smallest, silent = self.limit == 1, isinstance(error, SilentServerError)
        if error.diag.context and self.failures >= self.RETRIES_IN_TRIGGER and self.suspects < self.SUSPECTS:
            verdict = Verdict.ISOLATE
            self.suspects += smallest
        elif verdict is Verdict.FAIL and self.table.triggered and self.failures < self.RETRIES:
            verdict = Verdict.ISOLATE  # a trigger in C, perhaps; where it is the statement, isolating fails as well
        elif error.sqlstate == "42501" and self.position and self.position.in_place:
            verdict = Verdict.RETRY  # xmax may not be read any more
            self.position.go_by_address()
        elif verdict in (Verdict.FAIL, Verdict.FAIL_RUN) or self.failures >= self.RETRIES:
            raise failure from None
        elif self.is_of_known_key(error) and self.failures == 0:
            verdict = Verdict.RETRY
        if verdict is not Verdict.ISOLATE or self.report.log.verbose:  # isolating ends in a row that the phase counts
            self.report.batch_retried(self.table.policy, failure, verdict.value, self.limit)
        if verdict is Verdict.ISOLATE:
            if smallest:
                return self.leave_row(error, failure, seeds)
            self.limit = max(1, self.limit // self.SHRINK)
            return None
        self.failures += 1
        may_shrink = verdict is Verdict.SMALLER and not smallest  # a first batch is worth making smaller in any case
        if not self.progressed and not may_shrink and clock() >= self.end:
            raise failure from None
        if verdict is Verdict.RECONNECT:
            went = self.reconnect(failure)
            if went or not silent:
                return went
            if smallest and self.failures > self.RETRIES_IN_TRIGGER:  # a trigger that cannot be cancelled, perhaps
                return self.leave_row(error, failure, seeds)
        if verdict is Verdict.SMALLER or silent:
            self.limit = max(1, self.limit // self.SHRINK)
        if smallest and error.sqlstate == "57014" and not self.out_of_order:
            # the index may lead through too many rows of no interest before the first that is
            self.begin_pass(out_of_order=True)
        self.session.interrupts.sleep(min(0.05 * 2**self.failures, 2.0))
        return None

    def is_of_known_key(self, error: psycopg.Error) -> bool:
        """The error is of a foreign key that the statement itself looks after: a child was inserted meanwhile."""
        names = {reference.name for reference in self.table.references}
        return error.sqlstate in FOREIGN_KEY and public_name(error.diag, error.diag.constraint_name) in names

    def leave_row(self, error: psycopg.Error, failure: RetentionError, seeds: list[str]) -> tuple[Batch, str] | None:
        """Pass over the one row that the database refuses to delete, and remember why; None to try it once more."""
        refused = "blocked" if error.sqlstate in FOREIGN_KEY else "undeletable"
        if error.sqlstate == "55P03" and "PL/" not in (error.diag.context or ""):
            refused = "locked"  # the key's own check waits for a row that refers to it
        try:
            batch = self.execute(seeds, 1, delete=False)
        except psycopg.Error:
            self.failures += 1
            return None
        if refused == "blocked":
            self.blockers.update(filter(None, [public_name(error.diag, error.diag.constraint_name)]))
            self.hidden += batch.claimed_tids
        elif refused == "undeletable":
            self.refusal = self.refusal or failure
            self.refused += batch.claimed_tids
        return batch, refused

    def reconnect(self, failure: RetentionError) -> tuple[Batch, None] | None:
        """Connect again; the batch whose COMMIT was cut off, if it went through.

        Even after a signal one try is made, to settle the doubt. If it cannot be, `deleted` is not known.
        """
        self.reconnected, lost = True, self.session.process
        doubtful, end = self.in_doubt, min(clock() + self.RECONNECT_FOR, self.end)
        deleted, self.deleted = self.deleted, None if doubtful else self.deleted
        while True:
            try:
                self.session.close()
                self.session.connect_in_place_of(lost, urgent=doubtful is not None)
                raise_errors(judge_server(self.session, self.options.pause))
                committed = doubtful is not None and self.went_through(doubtful)
                self.deleted, self.in_doubt = deleted, None  # settled, whatever is lost before the next batch
                return (doubtful, None) if doubtful and committed else None
            except (UnavailableError, psycopg.OperationalError) as error:
                if self.session.interrupts.requested:
                    raise StoppedError from None
                message = describe(error)
                if verdict_of(error.sqlstate or "") is Verdict.FAIL_RUN:
                    raise RunFailedError(f"{failure.message}; then {message}", error.sqlstate) from None
                if clock() > end:
                    raise PolicyFailedError(f"{failure.message}; then {message}", failure.sqlstate) from None
            self.session.interrupts.sleep(1.0)

    def settle(self) -> None:
        """After a signal that came while a COMMIT was not answered: one quick try to learn whether it went through."""
        batch, deleted = self.in_doubt, self.deleted
        if batch is None or deleted is None:
            return
        self.deleted = None
        with contextlib.suppress(StoppedError, RetentionError, psycopg.Error):
            signal.setitimer(signal.ITIMER_REAL, self.SETTLE)
            self.session.close()
            self.session.connect(urgent=True)
            self.deleted = deleted + (batch.deleted if self.went_through(batch) else 0)

    def went_through(self, batch: Batch) -> bool:
        """Whether a batch was committed: its transaction is over, and the row that it deleted is not there.

        The status of the transaction alone would not do: after a crash its number may be another's. UnavailableError
        while its server process has not come to an end; PolicyFailedError where a row is there, but the table has been
        changed, written anew or vacuumed, so that it may be another row.
        """
        status = "SELECT pg_xact_status(%(xid)s::xid8)"
        gone = sql.SQL("SELECT NOT EXISTS (SELECT FROM {} t WHERE {} AND t.{} = %(age)s::{}), {}, {}, {}").format(
            rows(self.table),
            at(self.table, "ARRAY[%(witness)s]"),
            Name(self.table.age),
            sql.SQL(self.table.age_type),
            unchanged(self.table),
            sql.SQL(SHAPE),
            sql.SQL(VACUUMS),
        )
        found = {"oid": self.table.oid, "witness": batch.witness, "age": batch.witness_age}
        try:
            with self.session.transaction(snapshot=True) as transaction:
                row = transaction.row(status, {"xid": batch.xid})
        except psycopg.errors.InvalidParameterValue:  # in the future: lost with what followed it, in a fail-over
            return False
        if row == ("in progress",):
            raise UnavailableError("the COMMIT of a batch is still under way")
        if row != ("committed",):
            return False
        with self.session.transaction(snapshot=True) as transaction:
            is_gone, same, *numbers = transaction.row(gone, found)
        if not is_gone and (not same or numbers != [self.shape, self.vacuums]):
            raise self.failure("table_changed")
        return bool(is_gone)

    def find_rest(self, timeout: dt.timedelta) -> Found:
        """What is left of the policy's rows, if time allows: psycopg.Error when it does not.

        RetentionError when the table is not what it was.
        """
        judged = sql.SQL("SELECT {}").format(unchanged(self.table))
        interval = self.options.retention_interval
        question = survey([self.table], self.now, interval, self.hidden, self.refused)
        with self.session.transaction(SURVEYING, snapshot=True, timeout=timeout) as transaction:
            if transaction.row(judged, {}) != (True,):
                raise self.failure("table_changed")
            return Found(*transaction.row(*question))

    def planned(self, condition: sql.Composable) -> dict[str, Any]:
        """How the planner would find the rows t of a condition, for which nothing is read; empty if it does not say."""
        query = sql.SQL("EXPLAIN (FORMAT JSON) SELECT {} FROM {} t WHERE {}").format(
            address(self.table), rows(self.table), condition
        )
        try:
            with self.session.transaction(snapshot=True) as transaction:
                ((plan,),) = transaction.row(query, parameters_of(self.table, self.bound))
            return cast("dict[str, Any]", plan["Plan"])
        except (psycopg.Error, LookupError, TypeError, ValueError):
            return {}


# ── The schedule ──────────────────────────────────────────────────────────────────────────────────────────────────────
# What systemd says of the timer and the service, where it is there. Asks its own programs: they know its calendar.

TIMER = f"{PROGRAM}.timer"
SERVICE = f"{PROGRAM}.service"


class SystemdError(Exception):
    """systemd does not tell; the text says why."""


def systemd(*command: str, **variables: str) -> str:
    """What one of systemd's programs prints, in its own language and without colours."""
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "SYSTEMD_COLORS": "0", **variables}
    try:
        done = subprocess.run(  # noqa: S603, of our own text and systemd's
            command, capture_output=True, text=True, env=environment, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SystemdError(one_line(str(error))) from None
    if done.returncode:
        raise SystemdError(one_line(done.stderr) or f"{command[0]} failed")
    return done.stdout


def properties(unit: str, *names: str) -> dict[str, list[str]]:
    """These properties of a unit: each may have several values, or none."""
    found: dict[str, list[str]] = {name: [] for name in names}
    # in UTC: systemd before version 253, Debian 12's, does not print every time as --timestamp= would have it
    for line in systemd("systemctl", "show", f"--property={','.join(names)}", unit, TZ="UTC").splitlines():
        name, _, value = line.partition("=")
        found[name].append(value)
    return found


def time_span(text: str) -> dt.timedelta:
    """A time span as systemd prints it, such as `1min 30s`; the longest there is for `infinity`."""
    match = re.search(r"s: (\d+)$", systemd("systemd-analyze", "timespan", text), re.MULTILINE)
    return dt.timedelta(microseconds=int(match[1])) if match else dt.timedelta.max


def elapses(expression: str, count: int) -> list[dt.datetime]:
    """The next times, in UTC, at which a timer with this OnCalendar= elapses."""
    text = systemd("systemd-analyze", "calendar", f"--iterations={count}", expression)
    times = re.findall(r"(?:\(in UTC\)|Next elapse|Iteration #\d+|Iter\. #\d+): \w+ ([-0-9]+ [:0-9]+) UTC$", text, re.M)
    return [dt.datetime.fromisoformat(time).replace(tzinfo=UTC) for time in times]


def judge_schedule(options: RunOptions) -> list[Finding]:
    """Whether systemd starts runs, inside the night window and as often as is meant, and lets them end."""
    if not os.path.isdir("/run/systemd/system"):  # as sd_booted(3) has it
        return []
    try:
        return [*judge_timer(options), *judge_service(options)]
    except SystemdError as error:
        return [Finding.of("schedule_unknown", unit=TIMER, problem=error)]


def judge_timer(options: RunOptions) -> Iterator[Finding]:
    timer = properties(TIMER, "UnitFileState", "ActiveState", "TimersCalendar", "RandomizedDelayUSec")
    (active,), (enabled,) = timer["ActiveState"], timer["UnitFileState"] or [""]
    if active != "active" or not enabled.startswith("enabled"):
        yield Finding.of("timer_missing", unit=TIMER, state=f"{enabled or 'not installed'}, {active}")
    delay = time_span(timer["RandomizedDelayUSec"][0])
    calendars = re.findall(r"OnCalendar=(.*?) ;", "\n".join(timer["TimersCalendar"]))
    # more than a year of nights: every change of the clocks is among them
    nights = [elapses(calendar, 400) for calendar in calendars]
    known = min((starts[-1] for starts in nights if starts), default=None)  # up to here every one of them is known
    starts = sorted({start for starts in nights for start in starts if known and start <= known})
    window = options.night_window_utc
    for start in starts:
        room = window.remaining(start) if window else dt.timedelta.max
        if room is None or room <= delay:
            when = f"{start:%Y-%m-%d %H:%M} UTC" + (f", or up to {format_duration(delay)} later" if delay else "")
            yield Finding.of("timer_outside_window", unit=TIMER, when=when, window=window)
            break
    gap = max((after - before for before, after in itertools.pairwise(starts)), default=options.retention_interval)
    if abs(gap - options.retention_interval) > options.retention_interval / 8:  # an hour of the clocks, a short month
        interval = format_duration(options.retention_interval)
        yield Finding.of("timer_period", unit=TIMER, gap=format_duration(gap), interval=interval)


def judge_service(options: RunOptions) -> Iterator[Finding]:
    service = properties(SERVICE, "LoadState", "TimeoutStartUSec", "NotifyAccess")
    if service["LoadState"] != ["loaded"] or service["NotifyAccess"] != ["none"]:
        return
    timeout = time_span(service["TimeoutStartUSec"][0])
    if timeout < options.max_run_duration:
        budget = format_duration(options.max_run_duration)
        yield Finding.of("start_timeout", unit=SERVICE, timeout=format_duration(timeout), budget=budget)


# ── The run ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# Policies in order, each with its share of the time. Decides what runs; the reporting above tells it.

# From good to bad, and in words for people.
STOP_REASONS = {
    "drained": "nothing left to delete (drained)",
    "locked": "other sessions held what is left (locked)",
    "budget": "out of time (budget), what is left is for the next run",
    "signal": "stopped by a signal (signal), what is left is for the next run",
    "failed": "failed",
}


@dataclass(slots=True)
class Outcome:
    """What became of one policy. A count that is not known is None."""

    policy: Policy
    now: dt.datetime | None = None
    deleted: int | None = 0
    backlog: int | None = None
    blocked: int | None = None
    blocked_by: str | None = None  # the constraints
    undeletable: int | None = None
    overdue: int | None = None
    oldest_row_age_seconds: float | None = None  # of the unblocked rows of the backlog; None also if there is none
    stop_reason: str = "drained"
    error: RetentionError | None = None
    started: bool = False
    seconds: float = 0.0
    replication_wait_ms: int | None = None  # where run.max_replication_lag is set

    @property
    def drained(self) -> bool:
        return self.started and self.stop_reason == "drained" and self.backlog == self.blocked

    @property
    def cutoff(self) -> str | None:
        return format_time(self.policy.cutoff(self.now)) if self.now else None

    def json(self, deleted: str = "deleted") -> dict[str, Any]:
        return {
            "table": str(self.policy.table),
            "cutoff": self.cutoff,
            deleted: self.deleted,
            **some(("backlog", "blocked", "undeletable", "stop_reason"), self),
            "error": self.error and self.error.json(),
            **known({"replication_wait_ms": self.replication_wait_ms}),
        }

    def history(self) -> dict[str, Any]:
        """What the history keeps of it."""
        return self.json() | {
            "rule": self.policy.rule,
            "retention_seconds": self.policy.keep.total_seconds(),
            **some(REST, self),
        }


@dataclass(slots=True)
class Result:
    """What became of a run. `errors` are pairs of key and message: what stopped the whole of it."""

    job_run_id: str
    exit_status: Exit
    now: dt.datetime | None = None
    outcomes: list[Outcome] = field(default_factory=list)
    errors: list[tuple[str, str]] = field(default_factory=list)

    @property
    def stop_reason(self) -> str:
        if self.errors:
            return "failed"
        return max((outcome.stop_reason for outcome in self.outcomes), key=[*STOP_REASONS].index)

    def json(self, deleted: str = "deleted") -> str:
        document = {
            **some(("job_run_id", "stop_reason"), self),
            "now": self.now and format_time(self.now),
            "exit_status": int(self.exit_status),
            "policies": {outcome.policy.name: outcome.json(deleted) for outcome in self.outcomes},
            "errors": [{"key": key, "message": message} for key, message in self.errors],
        }
        return json.dumps(document, indent=2)


# What a cutoff may gain on the time that passed: the timer's random delay, a late night, a leap of the calendar.
BRAKE_SLACK = dt.timedelta(days=1)
# For counting what a phase leaves that has not drained its table.
COUNT_TIMEOUT = dt.timedelta(seconds=30)


def judge_cutoff(last: PolicyRecord, policy: Policy, now: dt.datetime, file: str) -> list[Finding]:
    """Whether the cutoff moved further than time did: a mistyped retention, a clock that jumped.

    Time is what this machine's own unadjustable clock says, while it has not been restarted; else the database's.
    """
    if last.now is None or last.cutoff is None:
        return []
    elapsed = now - last.now
    if last.boot_id and last.boot_id == boot_id():
        elapsed = min(elapsed, dt.timedelta(seconds=max(0.0, clock() - last.uptime)))
    cutoff = policy.cutoff(now)
    if cutoff - last.cutoff <= elapsed + BRAKE_SLACK:
        return []
    names = {
        "before": format_time(last.cutoff),
        "after": format_time(cutoff),
        "moved": format_duration(round_down(cutoff - last.cutoff)),
        "elapsed": format_duration(round_down(elapsed)),
        "command": f"{PROGRAM} --config {shlex.quote(file)} --once --policy {policy.name}",
    }
    return [Finding.of("cutoff_jumped", policy.name, **names)]


def round_down(duration: dt.timedelta) -> dt.timedelta:
    return max(ZERO, duration // UNITS["s"] * UNITS["s"])


def read_clock(session: Session, allowed: dt.timedelta) -> tuple[dt.datetime, list[Finding]]:
    """The database's time, once a run, and that this machine's differs by more than `allowed` if it does."""
    query = """SELECT to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US')"""
    with session.transaction(snapshot=True) as transaction:
        before = dt.datetime.now(UTC)
        row = transaction.row(query)
        after = dt.datetime.now(UTC)
    now = dt.datetime.fromisoformat(row[0]).replace(tzinfo=UTC)
    skew = max(before - now, now - after, ZERO)
    if skew <= allowed:
        return now, []
    clocks = {"database": format_time(now), "machine": format_time(after), "allowed": format_duration(allowed)}
    return now, [Finding.of("clock_skew", **clocks)]


# Of pg_settings.source, in words.
SOURCES = {
    "configuration file": "the configuration file",
    "database": "a setting of the database",
    "user": "a setting of the role",
    "database user": "a setting of the role in this database",
    "client": "PGOPTIONS or database.conninfo",
}


def judge_server(session: Session, pause: dt.timedelta | None) -> list[Finding]:
    """Whether this server can be written to, and whether the role's settings let a run do its work."""
    assert session.connection is not None
    if session.connection.info.server_version < 140000:  # without TID range scans
        return [Finding.of("server_too_old")]
    query = """SELECT pg_is_in_recovery(),
       (SELECT source FROM pg_settings WHERE name = 'default_transaction_read_only' AND setting = 'on'),
       current_setting('session_replication_role') = 'replica',
       (SELECT setting::bigint FROM pg_settings WHERE name = 'idle_session_timeout'),
       current_user::text, current_database()::text"""
    with session.transaction(snapshot=True) as transaction:
        row = transaction.row(query)
    in_recovery, read_only, keys_off, idle_timeout, role, database = row
    names = {"role": quoted(role), "database": quoted(database)}
    found = []
    if in_recovery:
        found.append(Finding.of("not_primary"))
    if read_only:
        found.append(Finding.of("read_only", source=SOURCES.get(read_only, read_only)))
    if keys_off:
        found.append(Finding.of("keys_off", **names))
    timeout = dt.timedelta(milliseconds=idle_timeout)
    if pause and ZERO < timeout <= pause:
        spans = {"timeout": format_duration(timeout), "pause": format_duration(pause)}
        found.append(Finding.of("idle_timeout", **spans, **names))
    return found


def raise_errors(findings: Sequence[Finding]) -> None:
    """The first error among them, as that which it is in a run."""
    for finding in findings:
        if finding.severity is ERROR:
            raise finding.failure()


@dataclass(frozen=True, slots=True)
class Job:
    """One invocation: what it works with."""

    config: Configuration
    policies: tuple[Policy, ...]
    log: Log
    session: Session
    scheduled: bool
    started: float  # seconds of `clock`
    window_end: float  # seconds of `clock`; infinite outside scheduled runs

    @property
    def end(self) -> float:
        """When the budget is spent, or the window closes: seconds of `clock`."""
        return min(self.started + self.config.run.max_run_duration.total_seconds(), self.window_end)


def begin(job: Job, *, writing: bool) -> dt.datetime:
    """Connect, judge the server (for `writing`, or to read alone) and return its time; raises what forbids a run.

    A scheduled run keeps trying for connect_retry, inside the window and the budget.
    """
    retry = job.config.database.connect_retry.total_seconds() if job.scheduled else 0.0
    end = min(job.started + retry, job.end)
    while True:
        job.session.connect_until(end, job.log.connecting_again)
        try:
            found = judge_server(job.session, job.config.run.pause)
            raise_errors([finding for finding in found if writing or finding.code not in ("not_primary", "read_only")])
            now, skewed = read_clock(job.session, job.config.database.max_clock_skew)
            raise_errors(skewed)
            return now
        except psycopg.Error as error:
            if judge(error) is not Verdict.RECONNECT or clock() >= end:
                raise
            job.log.connecting_again(UnavailableError(describe(error), error.sqlstate))
        job.session.close()
        job.session.interrupts.pause(1.0)


def run(job: Job, report: Report) -> Result:
    """A whole run: every policy that it had in mind gets an outcome, unless the run itself cannot begin."""
    result = Result(job.log.job_run_id, Exit.OK)
    report.begin()
    try:
        result.now = begin(job, writing=True)
        tables = [inspect_safely(job, policy) for policy in job.policies]
    except StoppedError:
        result.outcomes = [Outcome(policy, stop_reason="signal") for policy in job.policies]
        for outcome in result.outcomes:
            report.phase_ended(outcome)
    except (RetentionError, psycopg.Error) as error:
        run_failed(result, error)
        report.job_failed(result, getattr(error, "sqlstate", None))
        return result
    else:
        run_phases(job, tables, result.now, result, report)
    if any(outcome.error for outcome in result.outcomes):
        result.exit_status = Exit.FAILED
    report.job_ended(result)
    return result


def run_failed(result: Result, error: RetentionError | psycopg.Error) -> None:
    """Note what stopped the whole run: a server that cannot be used, or clocks that disagree."""
    result.exit_status = Exit.FAILED if isinstance(error, RunFailedError) else Exit.UNAVAILABLE
    result.errors = [("database", describe(error))]


def run_phases(
    job: Job, tables: Sequence[Table | RetentionError], now: dt.datetime, result: Result, report: Report
) -> None:
    """The phases in order, then VACUUM. What a phase leaves of its share of the budget, the next ones have."""
    tables = [braked(job, table, now, report.record) for table in tables]
    report.job_started(now, [table for table in tables if isinstance(table, Table)])
    allowed = job.config.run.max_replication_lag
    standbys = Standbys(job.session, allowed) if allowed else None
    failed: RunFailedError | None = None  # what no policy can go on after
    for number, (policy, table) in enumerate(zip(job.policies, tables, strict=True)):
        share = clock() + max(0.0, job.end - clock()) / (len(tables) - number)
        outcome = run_phase(job, policy, failed or table, now, share, report, standbys)
        failed = failed or (outcome.error if isinstance(outcome.error, RunFailedError) else None)
        result.outcomes.append(outcome)
    if job.config.run.vacuum:
        lost = {outcome.policy.table for outcome in result.outcomes if outcome.deleted != 0}
        judged = {table.name: table for table in tables if isinstance(table, Table)}  # each once, whatever its policies
        for name, table in judged.items():
            if name in lost:
                began = clock()
                why_not = vacuum(job, table)
                report.vacuumed(name, clock() - began, why_not)


# How many of the table, or of its partitions, were not vacuumed since, if the server keeps count of that. (The tree of
# partitions is looked up in the catalog: pg_partition_tree would wait for a lock.)
NOT_VACUUMED = b"""
WITH RECURSIVE tree (oid) AS (
    SELECT %(oid)s::oid UNION ALL SELECT i.inhrelid FROM pg_inherits i JOIN tree ON i.inhparent = tree.oid
)
SELECT count(*) FROM tree JOIN pg_class c ON c.oid = tree.oid AND c.relkind = 'r'
    JOIN pg_stat_all_tables s ON s.relid = c.oid
WHERE current_setting('track_counts')::boolean AND (s.last_vacuum < %(began)s::timestamptz) IS NOT FALSE
"""


def vacuum(job: Job, table: Table) -> str | None:
    """VACUUM (ANALYZE) a table for as long as budget and window last; why it was not done, if it was not."""
    if table.no_vacuum:
        return table.no_vacuum
    if job.session.interrupts.requested:
        return "the run was stopped"
    seconds = job.end - clock()
    if seconds <= 0:
        return "no time was left"
    try:
        if job.session.connection is None:  # lost in the last phase, or over another table
            connect_again(job)
        with job.session.transaction(snapshot=True) as transaction:
            (began,) = transaction.row("SELECT clock_timestamp()::text")
        # what is locked, by another VACUUM for example, is passed over; but ANALYZE of partitions would wait for each
        statement = sql.SQL("VACUUM (ANALYZE {}, SKIP_LOCKED) {}").format(
            sql.SQL("off" if table.key else "on"), sql.Identifier(table.name.schema, table.name.name)
        )
        job.session.execute_alone(statement, seconds)
        with job.session.transaction(snapshot=True) as transaction:
            (missed,) = transaction.row(NOT_VACUUMED, {"oid": table.oid, "began": began})
        return "the server passed over it: it was locked, perhaps" if missed else None
    except psycopg.errors.QueryCanceled:
        return "it took too long"
    except (psycopg.Error, PolicyFailedError) as error:
        return describe(error)
    except StoppedError:
        return "the run was stopped"


def braked(job: Job, table: Table | RetentionError, now: dt.datetime, record: Record) -> Table | RetentionError:
    """The table, or why nothing may be deleted from it: in a scheduled run, a cutoff that jumped."""
    if job.scheduled and isinstance(table, Table):
        for finding in judge_cutoff(record.totals.policy(table.policy.name), table.policy, now, job.config.file):
            return finding.failure()
    return table


def inspect_safely(job: Job, policy: Policy, *, again: bool = True) -> Table | RetentionError:
    """The policy's table, or the reason why it cannot be purged; a lost connection is made `again`, once."""
    try:
        inspection = inspect(job.session, policy, job.config.enabled, job.config.run)
    except psycopg.Error as error:
        if not again or judge(error) is not Verdict.RECONNECT:
            return failure_of(error)
        try:
            connect_again(job)
        except PolicyFailedError as failure:
            return failure
        return inspect_safely(job, policy, again=False)
    return inspection.table or inspection.failure()


def judge_anew(job: Job, policy: Policy, error: RetentionError) -> RetentionError:
    """In place of the server's word on a table that was changed in mid-run, what is wrong with it now."""
    if job.session.connection is None or (error.sqlstate or "")[:2] not in ("42", "55"):
        return error
    try:
        judged = inspect_safely(job, policy)
    except StoppedError:
        return error
    return judged if isinstance(judged, RetentionError) else error


def run_phase(
    job: Job,
    policy: Policy,
    table: Table | RetentionError,
    now: dt.datetime,
    share: float,
    report: Report,
    standbys: Standbys | None,
) -> Outcome:
    """One policy from phase_started to phase_completed or phase_failed; raises nothing."""
    outcome = Outcome(policy, now)
    started = clock()
    phase: Phase | None = None
    try:
        if not isinstance(table, Table):
            raise table
        phase = Phase(job.session, table, now, job.config.run, share, job.window_end, report, standbys)
        phase.choose_walk()
        outcome.started = True
        report.phase_started(policy, now, phase.walk.name)
        if report.view.shows:
            report.estimate = phase.planned(predicate(table, ordered=True)).get("Plan Rows")
        if job.session.connection is None:  # lost in the phase before
            connect_again(job)
        outcome.stop_reason = phase.run()
    except StoppedError:
        outcome.stop_reason = "signal"
        if phase:
            phase.settle()
    except (PolicyFailedError, RunFailedError) as error:
        outcome.error = judge_anew(job, policy, error) if phase else error
    except psycopg.Error as error:
        outcome.error = failure_of(error)
    if phase:
        outcome.deleted = phase.deleted
        outcome.error = outcome.error or phase.refusal
        outcome.replication_wait_ms = round(phase.waited * 1000) if standbys else None
        outcome.blocked_by = ", ".join(sorted(phase.blockers)) or None
        count_what_stays(phase, outcome, job.end)
    if outcome.error:
        outcome.stop_reason = "failed"
    outcome.seconds = clock() - started
    report.phase_ended(outcome)
    return outcome


def connect_again(job: Job) -> None:
    """Replace a lost connection; PolicyFailedError if that takes too long."""
    job.session.close()
    try:
        end = min(clock() + Phase.RECONNECT_FOR, job.end)
        job.session.connect_until(end, job.log.connecting_again)
    except UnavailableError as error:
        raise PolicyFailedError(error.message, error.sqlstate) from None


def count_what_stays(phase: Phase, outcome: Outcome, end: float) -> None:
    """Fill in backlog and its parts: from the last pass if that says it all, else by a survey with a time limit.

    All surveys together may go beyond the `end` of the run by no more than that limit.
    """
    tally = phase.tally
    if phase.finished:
        outcome.blocked, outcome.undeletable = tally.blocked, tally.undeletable
        outcome.backlog = tally.blocked + tally.undeletable + tally.left
    # somebody's trigger may have put rows back behind the pass
    if phase.finished and outcome.backlog == outcome.blocked and not phase.table.triggered:
        outcome.overdue = 0
        return
    if tally.undeletable > len(phase.refused):
        return  # which rows a trigger kept without a word is not known, nor what these hold
    allowed = max(0.0, min(COUNT_TIMEOUT.total_seconds(), end - clock() + COUNT_TIMEOUT.total_seconds()))
    timeout = min(dt.timedelta(seconds=allowed), phase.session.interrupts.time_left())
    if phase.session.connection is None or timeout < UNITS["ms"] * 100:
        return
    try:
        found = phase.find_rest(timeout)
    except (psycopg.Error, RetentionError, StoppedError):
        return
    # all of one moment; of rows that a locked row names it says that they can go when that can
    outcome.backlog, outcome.blocked = found.rows, found.held
    outcome.undeletable = min(tally.undeletable, found.rows - found.held)
    outcome.overdue = found.overdue
    if found.oldest is not None:
        outcome.oldest_row_age_seconds = found.oldest + outcome.policy.keep.total_seconds()


def dry_run(job: Job) -> Result:
    """What a run would delete now: the same predicates and clock, in read-only transactions, on a standby too."""
    result = Result(job.log.job_run_id, Exit.OK)
    inspected: list[Table] = []
    try:
        result.now = begin(job, writing=False)
        for policy in job.policies:
            outcome = Outcome(policy, result.now, deleted=None)
            result.outcomes.append(outcome)
            try:
                inspected.append(foresee(job, inspected, result.now, outcome))
            except PolicyFailedError as error:
                outcome.error, outcome.stop_reason = error, "failed"
                result.exit_status = Exit.FAILED
    except StoppedError:
        result.outcomes = [Outcome(policy, deleted=None, stop_reason="signal") for policy in job.policies]
    except (RetentionError, psycopg.Error) as error:
        run_failed(result, error)
    return result


def foresee(job: Job, earlier: Sequence[Table], now: dt.datetime, outcome: Outcome) -> Table:
    """Fill in what a run would do for a policy, those of the `earlier` tables having run, and return its table."""
    table = inspect_safely(job, outcome.policy)
    if not isinstance(table, Table):
        raise table
    options = job.config.run
    question = survey([*earlier, table], now, options.retention_interval)
    try:
        with job.session.transaction(SURVEYING, snapshot=True, timeout=options.max_run_duration) as transaction:
            found = Found(*transaction.row(*question))
    except psycopg.Error as error:
        raise failure_of(error) from None
    outcome.deleted, outcome.backlog, outcome.blocked = found.rows - found.held, found.held, found.held
    return table


def check(job: Job) -> list[Finding]:
    """All there is to say of the configuration on this database and of its schedule; changes nothing."""
    config, session = job.config, job.session
    session.connect()
    findings = judge_server(session, config.run.pause)
    if any(finding.code == "server_too_old" for finding in findings):
        return findings
    now, skewed = read_clock(session, config.database.max_clock_skew)
    findings += skewed
    findings += judge_state(job, now)
    for policy in job.policies:
        try:
            inspection = inspect(session, policy, config.enabled, config.run)
            findings += inspection.findings
            if inspection.table:
                findings += examine(job, inspection.table, inspection.lifetime, now)
        except psycopg.Error as error:
            problem = describe(error)
            findings.append(
                Finding.of("not_examined", policy.name, error.sqlstate, table=policy.table, problem=problem)
            )
            if judge(error) in (Verdict.RECONNECT, Verdict.FAIL_RUN):
                return [*findings, Finding.of("unreachable", None, error.sqlstate, problem=problem)]
    return [*findings, *judge_file(config), *judge_schedule(config.run)]


def judge_state(job: Job, now: dt.datetime) -> list[Finding]:
    """Whether the state and metrics files can be read and replaced, and what the cutoff brake would say."""
    options, user = job.config.metrics, user_name()
    found: list[Finding] = []
    record = Record(options, lambda _, why: found.append(Finding.of("state_unusable", problem=why, user=user)))
    for path, code in ((options.state, "state_unusable"), (options.textfile, "metrics_unusable")):
        if path and not os.access(os.path.dirname(path), os.W_OK | os.X_OK) and not (found and path == options.state):
            problem = f"{path}: its directory is not there, or not writable by the user {user}"
            found.append(Finding.of(code, problem=problem, user=user))
    for policy in job.policies:
        found += judge_cutoff(record.totals.policy(policy.name), policy, now, job.config.file)
    return found


def judge_file(config: Configuration) -> Iterator[Finding]:
    """Whether a password in the configuration is there for everybody to read."""
    mode = os.stat(config.file).st_mode
    given = psycopg.conninfo.conninfo_to_dict(config.database.conninfo)
    if mode & stat.S_IROTH and any(given.get(option) for option in secret_options()):
        yield Finding.of("password_exposed", file=shlex.quote(config.file), mode=f"{stat.S_IMODE(mode):04o}")


def examine(job: Job, table: Table, lifetime: Column | None, now: dt.datetime) -> list[Finding]:
    """What the rows themselves give to think about; reads the whole table once."""
    policy, found = table.policy, []

    def report(code: str, **names: object) -> None:
        found.append(Finding.of(code, policy.name, table=table.name, **names))

    moments = {"now": without_zone(now), "late": without_zone(now + job.config.database.max_clock_skew)}
    with job.session.transaction(SURVEYING, snapshot=True, timeout=job.config.run.max_run_duration) as transaction:
        row = transaction.row(census(table, lifetime), {**parameters_of(table, table.bound(now)), **moments})
    missing, implausible, future, alive, *used = row
    if missing:
        report("age_missing", count=f"{missing:,}", column=table.age)
    if implausible:
        report("age_implausible", count=f"{implausible:,}", column=table.age)
    if future and policy.age_column:
        report("age_in_future", count=f"{future:,}", column=table.age)
    if alive and lifetime:
        report("within_lifetime", count=f"{alive:,}", column=lifetime.name)
    values = [(only.column, value) for only in table.only for value in only.values if not only.proven]
    for (column, value), is_used in zip(values, used, strict=True):
        if not is_used:
            report("value_unused", column=column, value=repr(value))
    return found


# ── The status ────────────────────────────────────────────────────────────────────────────────────────────────────────
# What the record proves, without the database: what ran, how it ended, what is left, and whether rows went in time.


def read_history(path: str) -> tuple[list[dict[str, Any]], int]:
    """The runs in the order in which they ended, and how many lines cannot be read; OSError."""
    runs, damaged = [], 0
    if os.path.exists(path):
        for line in read_file(path).splitlines():
            try:
                runs.append(checked_run(json.loads(line)))
            except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError):
                damaged += 1
    return runs, damaged


def checked_run(run: Any) -> dict[str, Any]:
    """A line of the history with its times read."""
    times = {key: run[key] and dt.datetime.fromisoformat(run[key]) for key in ("started", "ended", "now")}
    for moment in filter(None, times.values()):
        expect(moment.tzinfo is not None and 2000 <= moment.year < 3000)
    for policy in run["policies"].values():
        expect(type(policy["stop_reason"]) is str and type(policy["rule"]) is str)
        expect(policy["error"] is None or type(policy["error"]["message"]) is str)
        numbers = ("retention_seconds", "deleted", "backlog", "blocked", "overdue", "oldest_row_age_seconds")
        expect(all(policy[key] is None or read_number(policy[key]) >= 0 for key in numbers))
    expect(type(run["success"]) is bool and type(run["stop_reason"]) is str)
    expect(all(type(error["message"]) is str for error in run["errors"]))
    expect(type(times["ended"]) is dt.datetime or (run["stop_reason"] == "interrupted" and not run["policies"]))
    expect(type(run["scheduled"]) is bool and type(times["started"]) is dt.datetime)
    expect(read_number(run["interval_seconds"]) >= 0)
    return {**run, **times}


@dataclass(frozen=True, slots=True)
class Promise:
    """What is to hold: rows go within one interval and a run after their retention, and never later than two."""

    SHARE = 0.99  # of the rows, as the specification has it

    interval: dt.timedelta
    longest_run: dt.timedelta

    def at(self, *runs: dict[str, Any]) -> Promise:
        """As it was when these runs ended: by the longest of their intervals, where that was changed in between."""
        intervals = [dt.timedelta(seconds=run["interval_seconds"]) for run in runs]
        return dataclasses.replace(self, interval=max(intervals, default=ZERO) or self.interval)

    @property
    def target(self) -> dt.timedelta:
        return self.interval + self.longest_run

    @property
    def limit(self) -> dt.timedelta:
        return 2 * self.interval


def proof_of(policy: Policy, runs: Sequence[dict[str, Any]], now: dt.datetime, promise: Promise) -> dict[str, Any]:
    """What the history proves of a policy, since it has been what it is.

    A run that drained it left no unblocked row past its retention at the time when it began. So whatever a later run
    deletes and has come due since has waited no longer than since then. Rows that came back (a restore, a fail-over)
    may be older: where a run has measured the oldest of what it left, that decides.
    """
    kept = policy.keep.total_seconds()
    drains: list[dict[str, Any]] = []
    delays: list[tuple[dt.timedelta, int, Promise]] = []  # of each run since, with the rows that it deleted
    short: list[dict[str, Any]] = []
    for run in runs:
        ended = run["policies"].get(policy.name)
        if ended is None:
            continue
        if (ended["rule"], ended["retention_seconds"]) != (policy.rule, kept):
            drains, delays, short = [], [], []
            continue
        if drains:
            then = promise.at(drains[-1], run)
            delays.append((run["ended"] - drains[-1]["now"], ended["deleted"] or 0, then))
            measured = dt.timedelta(seconds=(ended["oldest_row_age_seconds"] or kept) - kept)
            delays.append((measured, ended["overdue"] or 0, then))
        if run["now"] and ended["stop_reason"] == "drained" and ended["backlog"] == ended["blocked"]:
            drains.append(run)
        else:
            message = ended["error"] and ended["error"]["message"]
            short.append(
                {"started": format_time(run["started"]), "stop_reason": ended["stop_reason"], "error": message}
            )
    rows = sum(deleted for _, deleted, _ in delays)
    share = sum(deleted for delay, deleted, then in delays if delay <= then.target) / rows if rows else None
    if drains:
        delays.append((now - drains[-1]["now"], 0, promise.at(drains[-1])))
    longest = max([ZERO, *(delay for delay, _, _ in delays)]) if drains else None
    limits_kept = all(delay <= then.limit for delay, _, then in delays)
    return {
        "since": format_time(drains[0]["now"]) if drains else None,
        "longest_delay_seconds": None if longest is None else round(longest.total_seconds()),
        "target_seconds": round(promise.target.total_seconds()),
        "limit_seconds": round(promise.limit.total_seconds()),
        "rows_in_time": share,
        "held": None if longest is None else limits_kept and (share is None or share >= promise.SHARE),
        "short_runs": short,
    }


def missed_runs(runs: Sequence[dict[str, Any]], now: dt.datetime, promise: Promise) -> list[dict[str, Any]]:
    """Where runs were to be expected, and none was: between two of them, or since the last."""
    runs = [run for run in runs if run["scheduled"] or run["success"]]
    gaps = [
        (before["started"], round((after["started"] - before["started"]) / promise.at(before, after).interval) - 1)
        for before, after in itertools.pairwise(runs)
    ]
    if runs:
        gaps.append((runs[-1]["started"], round((now - runs[-1]["started"]) / promise.at(runs[-1]).interval) - 1))
    return [{"after": format_time(before), "runs": count} for before, count in gaps if count > 0]


def next_run() -> tuple[dt.datetime | None, str]:
    """When the timer fires next, or in words why that is not known."""
    if not os.path.isdir("/run/systemd/system"):
        return None, "not known: systemd does not run here"
    try:
        timer = properties(TIMER, "ActiveState", "NextElapseUSecRealtime")
    except SystemdError as error:
        return None, f"not known: {error}"
    if timer["ActiveState"] != ["active"]:
        return None, f"not by systemd: {TIMER} is not started"
    (when,) = timer["NextElapseUSecRealtime"] or [""]
    match = re.fullmatch(r"\w+ ([-0-9]+ [:0-9]+) UTC", when)
    if not match:
        return None, "not known: systemd does not say"
    return dt.datetime.fromisoformat(match[1]).replace(tzinfo=UTC), TIMER


def status_of(
    config: Configuration, totals: Totals, runs: Sequence[dict[str, Any]], now: dt.datetime
) -> dict[str, Any]:
    """All that there is to say, as --json has it."""
    promise = Promise(config.run.retention_interval, config.run.max_run_duration)
    job = totals.job

    def moment(value: dt.datetime | None) -> str | None:
        return format_time(value) if value else None

    when, about = next_run()
    last = some((*LAST_RUN, "error"), job) | {"started": moment(job.started), "ended": moment(job.last_run)}
    told = runs[-1]["policies"] if runs and runs[-1]["job_run_id"] == job.job_run_id else {}
    last["deleted"] = {name: ended["deleted"] for name, ended in told.items()}
    policies = {}
    for policy in config.enabled:
        record = totals.policy(policy.name)
        policies[policy.name] = {
            "table": str(policy.table),
            "column": policy.column,
            "goes_by": "age" if policy.age_column else "expiry",
            "retention_seconds": policy.keep.total_seconds(),
            "deleted_total": record.deleted,
            "errors_total": record.errors,
            "last_drained": moment(record.last_drained),
            "as_of": moment(record.ended),
            "stop_reason": record.stop_reason,
            "error": {"sqlstate": record.sqlstate, "message": record.error} if record.error else None,
            **some(REST, record),
            "slo": proof_of(policy, runs, now, promise),
        }
    running = [(run.alive, run.json(key)) for key, run in totals.running.items()]
    status = {
        "now": format_time(now),
        "interval_seconds": config.run.retention_interval.total_seconds(),
        "next_run": moment(when),
        "schedule": about,
        "running": [about for alive, about in running if alive],
        "interrupted": [about for alive, about in running if not alive],
        "last_run": last if job.last_run else None,
        "last_success": moment(job.last_success),
        "errors_total": job.errors,
        "skipped": job.skipped,
        "last_skipped": moment(job.last_skipped),
        "policies": policies,
        "history": {
            "runs": len(runs),
            "since": moment(runs[0]["started"]) if runs else None,
            "missed_runs": missed_runs(runs, now, promise),
            "failed_runs": [
                {"started": moment(run["started"]), "error": run["errors"][0]["message"]}
                for run in runs
                if run["errors"]
            ],
            "interrupted_runs": [moment(run["started"]) for run in runs if run["stop_reason"] == "interrupted"],
        },
    }
    return {"problems": [*problems_of(status, now, promise)], **status}


def problems_of(status: dict[str, Any], now: dt.datetime, promise: Promise) -> Iterator[str]:
    """What an operator must know first, in sentences."""
    last, success, policies = status["last_run"], status["last_success"], status["policies"]
    late = success is None or now - dt.datetime.fromisoformat(success) > promise.limit
    if success is None:
        yield "no run of all policies has ended well yet" if last else "no run has ended yet"
    elif late:
        interval = format_duration(promise.interval)
        yield f"no run of all policies has ended well since {ago(success, now)}; it is meant to run every {interval}"
    for run in status["interrupted"]:
        yield (
            f"the run that began {ago(run['started'], now)} did not end: it was killed, or the machine went down"
            f" ({progress_of(run)}); the next run goes on where it was"
        )
    if last and last["error"]:
        yield f"the last run failed, with exit status {last['exit_status']}: {last['error']}"
    if status["skipped"] > 1:
        yield (
            f"the last {status['skipped']} scheduled runs did nothing: they started outside run.night_window_utc, the"
            f" last {ago(status['last_skipped'], now)}"
        )
    if late and not status["next_run"] and TIMER in status["schedule"]:
        yield f"{status['schedule']}: systemctl enable --now {TIMER}, unless cron starts the job"
    for name, policy in policies.items():
        if policy["error"]:
            yield f"{name}: failed {ago(policy['as_of'], now)}: {policy['error']['message']}"
        if policy["overdue"]:
            yield f"{name}: {policy['overdue']:,} rows have outstayed their retention by more than an interval"
        if policy["undeletable"]:
            yield f"{name}: the database refuses to delete {policy['undeletable']:,} rows; its own log says why"


def ago(moment: str | None, now: dt.datetime) -> str:
    """A time, and how long ago that was, or how soon it will be, in its two largest units."""
    if moment is None:
        return "at a time that is not known"
    then = dt.datetime.fromisoformat(moment)
    span = "".join(re.findall(r"\d+[a-z]+", format_duration(round_down(abs(now - then))))[:2])
    return f"{plainly(moment)}, {f'{span} ago' if then <= now else f'in {span}'}"


def progress_of(run: dict[str, Any]) -> str:
    return (
        f"as last saved: in policy {run['phase']}, {run['deleted']:,} rows deleted"
        if run["phase"]
        else "how far it is, is saved every few seconds"
    )


SHOWN = 10  # of each kind of bad night, the last ones; --json has them all


def show_status(status: dict[str, Any]) -> str:
    """The status for people."""
    now = dt.datetime.fromisoformat(status["now"])
    problems, last, history = status["problems"], status["last_run"], status["history"]
    lines = [f"ATTENTION: {problem}" for problem in problems] or ["OK: nothing is wrong now"]
    if problems:
        lines.append(f"What to do:   {PROGRAM} --check; journalctl -xe -p err -t {PROGRAM}")
    lines += [f"Running now, since {ago(run['started'], now)}: {progress_of(run)}" for run in status["running"]]
    if last:
        lines.append(f"Last run:     {ago(last['ended'], now)}{what_ran(last, status['policies'])}: {ended_how(last)}")
    else:
        lines.append("Last run:     none yet")
    lines.append(f"Last success: {ago(status['last_success'], now) if status['last_success'] else 'none yet'}")
    when = f"{ago(status['next_run'], now)} ({status['schedule']})" if status["next_run"] else status["schedule"]
    lines.append(f"Next run:     {when}")
    if status["skipped"]:
        skipped = (
            f"{status['skipped']} since, outside run.night_window_utc, the last {ago(status['last_skipped'], now)}"
        )
        lines.append(f"Skipped:      {skipped}")
    for name, policy in status["policies"].items():
        lines += ["", *show_policy(name, policy, now)]
    if history["runs"]:
        lines += ["", f"History: {history['runs']} run{'s' * (history['runs'] > 1)} since {plainly(history['since'])}"]
        lines += [f"  interrupted: the run of {plainly(moment)}" for moment in history["interrupted_runs"][-SHOWN:]]
        for run in history["failed_runs"][-SHOWN:]:
            lines.append(f"  could not be made: the run of {plainly(run['started'])}: {run['error']}")
        for missed in history["missed_runs"][-SHOWN:]:
            lines.append(
                f"  missed: {missed['runs']} run{'s' * (missed['runs'] > 1)} after that of {plainly(missed['after'])}"
            )
    return "\n".join(map(printable, lines))


def what_ran(last: dict[str, Any], policies: Mapping[str, Any]) -> str:
    """How the last run came about, what it was about, and what it deleted; nothing of a run that is not known."""
    words = [] if last["job_run_id"] is None else ["scheduled" if last["scheduled"] else "by hand"]
    deleted = last["deleted"]
    if deleted:
        words += [] if set(deleted) >= set(policies) else [f"only {', '.join(deleted)}"]
        words.append(f"{sum(filter(None, deleted.values())):,} rows deleted")
    return "".join(f", {word}" for word in words)


def ended_how(last: dict[str, Any]) -> str:
    if last["exit_status"]:
        return f"failed, exit status {last['exit_status']}"
    return STOP_REASONS.get(last["stop_reason"], "how it ended is not known, as the state was lost")


def plainly(moment: str) -> str:
    return f"{dt.datetime.fromisoformat(moment):%Y-%m-%d %H:%M:%S} UTC"


def show_policy(name: str, policy: dict[str, Any], now: dt.datetime) -> Iterator[str]:
    """One policy for people, and what the history proves of it."""
    slo, kept = policy["slo"], format_duration(dt.timedelta(seconds=policy["retention_seconds"]))
    due = f"kept for {kept}" if policy["goes_by"] == "age" else f"due {kept} after {policy['column']}"
    yield f"{name}: {policy['table']}, {due}; {policy['deleted_total']:,} rows deleted in all"
    drained = policy["last_drained"]
    yield (
        f"  drained {ago(drained, now)}: no unblocked row past its retention was left" if drained else "  never drained"
    )
    if policy["backlog"] is None:
        yield "  left: not known"
    else:
        undeletable, blocked = policy["undeletable"] or 0, policy["blocked"] or 0
        left = policy["backlog"] - blocked - undeletable
        yield (
            f"  left {ago(policy['as_of'], now)}: {left:,} rows for the next run, {blocked:,} blocked"
            + (f" by {policy['blocked_by']}" if policy["blocked_by"] else "")
            + (f", {undeletable:,} undeletable" if undeletable else "")
        )
    if policy["oldest_row_age_seconds"] is not None:
        age = format_duration(round_down(dt.timedelta(seconds=policy["oldest_row_age_seconds"])))
        yield f"  the oldest unblocked row was {age} old then"
    if slo["since"]:
        longest, target, limit = (
            format_duration(dt.timedelta(seconds=slo[f"{key}_seconds"])) for key in ("longest_delay", "target", "limit")
        )
        due = f"of the rows that came due since {plainly(slo['since'])}"
        share = ""
        if slo["rows_in_time"] is not None:
            share = f"; {slo['rows_in_time']:.2%} went within {target} (promised: {Promise.SHARE:.0%})"
        waited = f"none waited more than {longest}" if slo["held"] else f"some may have waited {longest}"
        yield f"  {'in time' if slo['held'] else 'NOT in time'}: {due} {waited} (limit {limit}){share}"
    for run in slo["short_runs"][-SHOWN:]:
        reason = f"failed: {run['error']}" if run["error"] else STOP_REASONS.get(run["stop_reason"], "")
        yield f"  the run of {plainly(run['started'])}: {reason}"


# ── Setting up ────────────────────────────────────────────────────────────────────────────────────────────────────────
# What a DBA runs once. Queries that write it, so that keys and indexes are those that the catalog has when they are
# executed: by us, over a connection, or by psql. Each has the comment above what it writes, and is asked once, or for
# each table, or for each age column of one.

# Beside SETUP, for run.vacuum and for run.max_replication_lag.
MAINTAINING = (
    "table",
    "It may VACUUM the tables. (From PostgreSQL 17 on; before, only their owner may.)",
    """SELECT format('GRANT MAINTAIN ON %s TO %I', string_agg(t.oid::regclass::text, ', ' ORDER BY t.oid), {role})
FROM (SELECT {table} AS oid UNION SELECT relid FROM pg_partition_tree({table})) t
WHERE current_setting('server_version_num')::int >= 170000 HAVING count(t.oid) > 0""",
)
SEEING_STANDBYS = (
    "once",
    "It sees how far standbys are behind.",
    """SELECT format('GRANT pg_read_all_stats TO %I', {role}) WHERE NOT EXISTS (
    SELECT FROM pg_roles WHERE rolname = {role} AND pg_has_role(oid, 'pg_read_all_stats', 'USAGE'))""",
)
SETUP = (
    (
        "table",
        "These tables must exist.",
        "SELECT format('SELECT %L::regclass', format('%I.%I', {schema}, {name})) WHERE {table} IS NULL",
    ),
    (
        "once",
        "The role of the job. Over the local socket it is the system user of that name, and needs no password.",
        "SELECT format('CREATE ROLE %I LOGIN', {role}) WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = {role})",
    ),
    (
        "once",
        "It connects to this database.",
        "SELECT format('GRANT CONNECT ON DATABASE %I TO %I', current_database(), {role})",
    ),
    (
        "table",
        "It finds the tables, and those that refer to them.",
        """WITH t AS (SELECT {table} AS oid)
SELECT DISTINCT format('GRANT USAGE ON SCHEMA %s TO %I', c.relnamespace::regnamespace, {role})
FROM t JOIN pg_class c ON c.oid = t.oid OR EXISTS (
    SELECT FROM pg_constraint k
    WHERE k.contype = 'f' AND k.conrelid = c.oid AND k.confdeltype IN ('a', 'r') AND k.confrelid IN (
        SELECT t.oid UNION SELECT p.relid FROM pg_partition_tree(t.oid) p))""",
    ),
    (
        "table",
        "It reads the columns that say which rows are to go, and deletes rows. It never changes one: PostgreSQL\n"
        "asks for UPDATE on some column before it lets anybody lock a row. That is a real power all the same: the\n"
        "role could overwrite that one column (the key, where there is one) and no other.",
        """WITH t AS (SELECT {table} AS oid), key AS (
    SELECT a.attname AS name FROM t JOIN pg_index i ON i.indrelid = t.oid AND i.indisprimary
        JOIN pg_attribute a ON a.attrelid = t.oid AND a.attnum = i.indkey[0]
), needed AS (
    SELECT unnest(ARRAY[{columns}])::name AS name
    UNION
    SELECT a.attname FROM t JOIN pg_constraint k ON k.contype = 'f' AND k.confrelid = t.oid
        JOIN pg_attribute a ON a.attrelid = t.oid
            AND (a.attnum = ANY (k.confkey) OR k.conrelid = t.oid AND a.attnum = ANY (k.conkey))
    WHERE k.conrelid = t.oid OR k.confdeltype IN ('a', 'r')
    UNION
    SELECT name FROM key WHERE cardinality({parents}) > 0
    UNION
    SELECT a.attname FROM t JOIN pg_class c ON c.oid = t.oid AND (c.relkind = 'p' OR c.relam <> 2)  -- by which rows go
        JOIN pg_index i ON i.indrelid = t.oid AND i.indisprimary
        JOIN pg_attribute a ON a.attrelid = t.oid AND a.attnum = ANY (i.indkey)
)
SELECT format('GRANT SELECT (%s), UPDATE (%I), DELETE ON %s TO %I',
    (SELECT string_agg(quote_ident(name), ', ' ORDER BY name NOT IN ('ctid', 'xmax'), name) FROM needed),
    COALESCE((SELECT name FROM key), {age}), t.oid::regclass, {role})
FROM t""",
    ),
    (
        "table",
        "It sees which rows of other tables keep ours.",
        """SELECT format('GRANT SELECT (%s) ON %s TO %I', string_agg(DISTINCT quote_ident(a.attname), ', '),
    k.conrelid::regclass, {role})
FROM pg_constraint k JOIN pg_attribute a ON a.attrelid = k.conrelid AND a.attnum = ANY (k.conkey)
WHERE k.contype = 'f' AND k.conrelid <> k.confrelid AND k.conparentid = 0 AND k.confdeltype IN ('a', 'r')
    AND k.confrelid IN (SELECT {table} UNION SELECT p.relid FROM pg_partition_tree({table}) p)
GROUP BY k.conrelid""",
    ),
    (
        "table",
        "Without these indexes PostgreSQL reads the whole referring table for each row that goes. (They are not made\n"
        "inside a transaction.)",
        """SELECT DISTINCT format('CREATE INDEX %sIF NOT EXISTS %I ON %s (%s)',
    CASE c.relkind WHEN 'p' THEN '' ELSE 'CONCURRENTLY ' END,
    concat('session_retention_', to_hex(hashtext(c.relname || n.quoted)), '_', c.relname, '_', n.plain)::name,
    c.oid::regclass, n.quoted)
FROM (
    SELECT k.conrelid, k.conkey FROM pg_constraint k
    WHERE k.contype = 'f' AND k.conparentid = 0
        AND k.confrelid IN (SELECT {table} UNION SELECT p.relid FROM pg_partition_tree({table}) p)
    UNION
    SELECT a.attrelid, ARRAY[a.attnum] FROM pg_attribute a WHERE a.attrelid = {table} AND a.attname = ANY ({parents})
) r (oid, columns) JOIN pg_class c ON c.oid = r.oid CROSS JOIN LATERAL (
    SELECT string_agg(quote_ident(a.attname), ', ' ORDER BY u.position) AS quoted,
        string_agg(a.attname, '_' ORDER BY u.position) AS plain
    FROM unnest(r.columns) WITH ORDINALITY AS u (attnum, position)
        JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = u.attnum
) n
WHERE NOT {child_index}""",
    ),
    (
        "age",
        "With these indexes the job reads what has to go, instead of the whole table.",
        """SELECT format('CREATE INDEX %sIF NOT EXISTS %I ON %s (%I)',
    CASE c.relkind WHEN 'p' THEN '' ELSE 'CONCURRENTLY ' END,
    concat('session_retention_', to_hex(hashtext(c.relname || a.attname)), '_', c.relname, '_', a.attname)::name,
    c.oid::regclass, a.attname)
FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
WHERE c.oid = {table} AND a.attname = {age} AND NOT {age_index}
    AND cardinality({parents}) = 0 AND NOT EXISTS (  -- chains go as quickly page by page
        SELECT FROM pg_constraint k WHERE k.contype = 'f' AND k.conrelid = c.oid AND k.confrelid = c.oid)""",
    ),
    (
        "table",
        "These indexes were begun, and not finished.",
        """SELECT format('REINDEX INDEX CONCURRENTLY %s', i.indexrelid::regclass)
FROM pg_index i JOIN pg_class x ON x.oid = i.indexrelid
WHERE NOT i.indisvalid AND x.relkind = 'i' AND starts_with(x.relname, 'session_retention_') AND (
    i.indrelid = {table} OR EXISTS (
        SELECT FROM pg_constraint k WHERE k.contype = 'f' AND k.conrelid = i.indrelid AND k.confrelid = {table}))""",
    ),
)
# A table is found by its names in the catalog, for which no privilege is needed.
FOUND_TABLE = """(SELECT c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = {schema} AND c.relname = {name})"""


def setup(config: Configuration, role: str) -> Iterator[tuple[str, list[sql.Composed]]]:
    """The comments of what the configuration takes, each with its queries for the enabled policies."""
    tables: dict[TableName, list[Policy]] = {}
    for policy in config.enabled:
        tables.setdefault(policy.table, []).append(policy)
    wanted = [
        *([MAINTAINING] if config.run.vacuum else []),
        *([SEEING_STANDBYS] if config.run.max_replication_lag else []),
    ]
    for scope, comment, query in [*SETUP, *wanted]:
        queries = []
        for name, of_table in tables.items():
            parents = [policy.parent_column for policy in of_table if policy.parent_column]
            columns = [column for policy in of_table for column in (policy.column, *(policy.only or {}))]
            ages = dict.fromkeys(policy.column for policy in of_table)
            places = ["ctid"] if parents else ["ctid", "xmax"]
            for age in list(ages)[: None if scope == "age" else 1]:
                catalog = {"schema": sql.Literal(name.schema), "name": sql.Literal(name.name)}
                parts: dict[str, sql.Composable] = {
                    **catalog,
                    "role": sql.Literal(role),
                    "table": sql.SQL(FOUND_TABLE).format(**catalog),
                    "columns": sql.SQL(", ").join(map(sql.Literal, dict.fromkeys([*places, *columns, *parents]))),
                    "parents": sql.SQL("ARRAY[{}]::name[]").format(sql.SQL(", ").join(map(sql.Literal, parents))),
                    "age": sql.Literal(age),
                    "child_index": sql.SQL(CHILD_INDEX.format(relation="c.oid", column="attnum = ANY (r.columns)")),
                    "age_index": sql.SQL(AGE_INDEX.format(relation="a.attrelid", attnum="a.attnum")),
                }
                queries.append(sql.SQL(query).format(**parts))
        yield comment, queries[:1] if scope == "once" else queries


# What the configuration has wrong: nothing is to be granted for it.
MISTAKES = """
    table_missing not_a_table inherited key_missing partitions_foreign column_missing age_type value_type
    value_impossible parent_without_key parent_type"""


def refuse_mistakes(session: Session, policies: Sequence[Policy], options: RunOptions) -> None:
    """RetentionError names every table and column that is not what a policy takes it for."""
    findings = [finding for policy in policies for finding in inspect(session, policy, policies, options).findings]
    mistakes = [finding for finding in findings if finding.code in MISTAKES.split()]
    if mistakes:
        raise RetentionError("; ".join(f"{finding.message}; {finding.remedy}" for finding in mistakes))


def print_sql(arguments: argparse.Namespace) -> Exit:
    """What a DBA runs once for the enabled policies: from the catalog, or without a connection as queries for psql."""
    password, config = prepare(arguments)
    role = str(psycopg.conninfo.conninfo_to_dict(config.database.conninfo).get("user") or USER)
    lines = []
    with opened(arguments, config, password) as session:
        try:
            session.connect()
        except UnavailableError as error:
            lines.append(f"-- Written without a connection: {error.message}")
            lines.append("-- So run it with psql, which executes what each query returns: psql -d DATABASE -f FILE")
            lines.append("\\set ON_ERROR_STOP on")
        try:
            if session.connection:
                refuse_mistakes(session, config.enabled, config.run)
            for comment, queries in setup(config, role):
                if session.connection is None:
                    statements = [f"{query.as_string(None)}\n\\gexec" for query in queries]
                else:
                    with session.transaction(snapshot=True) as transaction:
                        rows = [row for query in queries for row in transaction.execute(query)]
                    statements = [f"{row[0]};" for row in dict.fromkeys(rows)]
                if statements:
                    lines += ["", *(f"-- {line}" for line in comment.splitlines()), *statements]
        except psycopg.Error as error:
            raise failure_of(error) from None
    write_result("\n".join(["-- To be run once, by a superuser, in the database of the tables.", *lines]))
    return Exit.OK


# ── The commands ──────────────────────────────────────────────────────────────────────────────────────────────────────
# What each verb does with a configuration: it prints its result, and returns the exit status for `main` to return.


def give_up_root() -> None:
    """As root, become the user session-retention where it exists, wholly: by hand and by the timer it is the same."""
    if os.geteuid() != 0:
        return
    try:
        user = pwd.getpwnam(USER)
    except KeyError:
        return
    try:
        os.initgroups(USER, user.pw_gid)
        os.setgid(user.pw_gid)
        os.setuid(user.pw_uid)
    except OSError as error:
        raise RetentionError(f"cannot give up root for the user {USER}: {error.strerror}") from None
    os.environ.update(HOME=user.pw_dir, USER=USER, LOGNAME=USER)
    os.chdir(user.pw_dir if os.path.isdir(user.pw_dir) else "/")


def read_credential() -> str | None:
    """The systemd credential db-password, if there is one. Read before root is given up: it may be root's alone."""
    directory = os.environ.get("CREDENTIALS_DIRECTORY")
    if not directory:
        return None
    path = os.path.join(directory, "db-password")
    try:
        with open(path, encoding="utf-8") as stream:
            return stream.read().removesuffix("\n")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigurationError(path, [("", f"the credential cannot be read: {reason}")]) from None


def choose_policies(config: Configuration, wanted: Sequence[str]) -> tuple[Policy, ...]:
    """The enabled policies in the order of the file, or those of them that are wanted."""
    enabled = {policy.name: policy for policy in config.enabled}
    for name in wanted:
        if name not in enabled:
            raise UsageError(f"--policy {name}: no enabled policy of that name; there is {', '.join(enabled)}")
    return tuple(policy for policy in enabled.values() if not wanted or policy.name in wanted)


def prepare(arguments: argparse.Namespace) -> tuple[str | None, Configuration]:
    """The password that a credential gives, if any, and the configuration, read as the user that goes on."""
    password = read_credential()
    give_up_root()
    return password, read_configuration(arguments.config)


@contextlib.contextmanager
def opened(arguments: argparse.Namespace, config: Configuration, password: str | None) -> Iterator[Session]:
    """A session, not connected yet, that is closed at the end; signals end its work meanwhile."""
    with (
        Interrupts(final=arguments.final) as interrupts,
        contextlib.closing(Session(config.database, password, interrupts)) as session,
    ):
        yield session


def run_command(arguments: argparse.Namespace) -> Exit:
    """A scheduled run, --once or --dry-run."""
    if arguments.final:
        end_early(Exit.OK)  # a run that has not begun ends well
    started = clock()
    log = Log(str(uuid.uuid4()), sys.stderr if arguments.json else sys.stdout, arguments.verbose)
    scheduled = arguments.verb == "scheduled"
    try:
        password, config = prepare(arguments)
        policies = choose_policies(config, arguments.policy)
    except ConfigurationError as error:
        result = Result(log.job_run_id, Exit.CONFIG, errors=error.problems)
        if arguments.verb != "dry-run":
            log.emit(JOB_FAILED, "job failed", ERROR=error.message)
            if error.metrics:
                moment = dt.datetime.now(UTC)
                line = history_line(result, moment, moment, scheduled, whole=True)
                Record(error.metrics, lambda *_: None).job_ended(line, moment, None)
        if arguments.json:
            write_result(result.json())
        raise
    window_end = math.inf
    if scheduled and config.run.night_window_utc:
        remaining = config.run.night_window_utc.remaining(dt.datetime.now(UTC))
        if remaining is None:
            log.emit(JOB_SKIPPED, "outside the night window", NIGHT_WINDOW_UTC=config.run.night_window_utc)
            Record(config.metrics, log.record_failed).skip(config, dt.datetime.now(UTC))
            return Exit.OK
        window_end = started + remaining.total_seconds()
    with opened(arguments, config, password) as session:
        job = Job(config, policies, log, session, scheduled, started, window_end)
        log.stopping = lambda: session.interrupts.requested or clock() >= job.end
        if arguments.verb == "dry-run":
            result = dry_run(job)
        else:
            with contextlib.closing(Report(job)) as report:
                result = run(job, report)
    if arguments.verb == "dry-run":  # which is not logged
        for _, message in result.errors:
            print(f"{PROGRAM}: {message}", file=sys.stderr)
    if arguments.json:
        write_result(result.json("would_delete" if arguments.verb == "dry-run" else "deleted"))
    elif arguments.verb == "dry-run" and result.outcomes:
        write_result(foresight(result))
    return result.exit_status


def check_command(arguments: argparse.Namespace) -> Exit:
    """--check: what was found, with the remedies."""
    status = Exit.FAILED
    try:
        password, config = prepare(arguments)
        policies = choose_policies(config, arguments.policy)
        with opened(arguments, config, password) as session:
            log = Log("", sys.stderr, arguments.verbose)
            findings = check(Job(config, policies, log, session, False, clock(), math.inf))
    except ConfigurationError as error:
        status = Exit.CONFIG
        findings = [Finding.of("configuration", problem=text) for _, text in error.problems]
    except (UnavailableError, psycopg.Error) as error:
        findings = [Finding.of("unreachable", None, error.sqlstate, problem=describe(error))]
    errors = [finding for finding in findings if finding.severity is ERROR]
    if any(RULES[finding.code].failure.exit_status is Exit.UNAVAILABLE for finding in errors):
        status = Exit.UNAVAILABLE
    if arguments.json:
        write_result(json.dumps({"findings": [finding.json() for finding in findings]}, indent=2))
    else:
        write_result(report_findings(findings))
    return status if errors else Exit.OK


def status_command(arguments: argparse.Namespace) -> Exit:
    """--status: what the record says; it needs no database."""
    _, config = prepare(arguments)
    problems: list[str] = []
    record = Record(config.metrics, lambda what, why: problems.append(f"{what}: {why}"))
    try:
        runs, damaged = read_history(record.history)
    except OSError as error:
        runs, damaged = [], 0
        problems.append(f"history not read: {record.history}: {error.strerror}")
    if damaged:
        problems.append(f"history: {record.history}: {damaged} lines are damaged and left out")
    if not config.metrics.state:
        problems.append("metrics.state is empty, so that nothing is remembered of a run")
    record.totals.configure(config)  # it may have changed since the last run
    status = status_of(config, record.totals, runs, dt.datetime.now(UTC))
    status["problems"] = [*problems, *status["problems"]]
    write_result(json.dumps(status, indent=2) if arguments.json else show_status(status))
    return Exit.FAILED if problems else Exit.OK


def report_findings(findings: Sequence[Finding]) -> str:
    """The findings for people, errors first."""
    lines = []
    for severity in Severity:
        for finding in findings:
            if finding.severity is severity:
                where = f"policy {finding.policy}: " if finding.policy else ""
                lines += [f"{severity}: {where}{finding.message} [{finding.code}]", f"    remedy: {finding.remedy}"]
    counts = (f"{severity} {sum(finding.severity is severity for finding in findings)}" for severity in Severity)
    lines.append(", ".join(counts))
    return "\n".join(lines)


def write_result(text: str) -> None:
    """Print what was asked for; unlike a line of the log it must not be lost unnoticed."""
    try:
        print(text, flush=True)
    except OSError as error:
        raise RetentionError(f"the result could not be written: {error.strerror}") from None


def foresight(result: Result) -> str:
    """A dry run for people, a policy on each line."""
    lines = []
    for outcome in result.outcomes:
        name, policy = outcome.policy.name, outcome.policy
        if outcome.error:
            lines.append(f"{name}: would fail: {outcome.error.message}")
        elif outcome.deleted is not None:
            blocked = f", {outcome.blocked:,} blocked" if outcome.blocked else ""
            when = f"{'older than' if policy.age_column else 'expired before'} {outcome.cutoff}"
            for column, values in (policy.only or {}).items():
                when += f"; {column} {', '.join(map(str, values))}"
            lines.append(f"{name}: would delete {outcome.deleted:,} rows of {policy.table}{blocked} ({when})")
    return "\n".join(map(printable, lines))


def print_configuration(arguments: argparse.Namespace) -> Exit:
    _, config = prepare(arguments)
    write_result(show_configuration(config).rstrip())
    return Exit.OK


# ── main ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

VERBS: dict[str, tuple[Callable[[argparse.Namespace], Exit], str]] = {
    "once": (run_command, "one run now, night window or not; a cutoff that has jumped is taken as meant"),
    "dry-run": (run_command, "what a run would delete now; deletes nothing"),
    "check": (
        check_command,
        "is this configuration safe and fast on this database? each finding with its remedy; changes nothing",
    ),
    "status": (
        status_command,
        "what ran, when and how it ended, what is left, whether rows went in time, and when the timer fires next; needs"
        " no database",
    ),
    "print-sql": (print_sql, "the SQL a DBA must run once: role, grants and missing indexes"),
    "print-config": (print_configuration, "the effective configuration as TOML, secrets masked"),
}
DESCRIPTION = """\
Delete session rows that have outlived their retention from PostgreSQL, in bounded batches.
Without an option: one scheduled run, which does nothing outside the night window."""
EPILOG = """\
exit status:
  0   the run ended well: drained, nothing to do, only blocked or locked rows left,
      budget spent, stopped by a signal, or outside the night window
  1   a policy failed (the others still ran; what was committed stays), the clocks disagree,
      or --check has an error; or another command could not do its work
  2   usage
  69  the database could not be reached, or is not one that can be written to
  78  the configuration is wrong"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description=DESCRIPTION,
        epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_mutually_exclusive_group()
    for verb, (_, text) in VERBS.items():
        verbs.add_argument(f"--{verb}", dest="verb", action="store_const", const=verb, help=text)
    add = parser.add_argument
    # absolute: giving up root changes the working directory
    add("-c", "--config", metavar="FILE", type=os.path.abspath, default=DEFAULT_CONFIG, help="default %(default)s")
    only = "only this policy; repeatable; with a run, --dry-run or --check"
    add("--policy", metavar="NAME", action="append", default=[], help=only)
    result = "the result of --once, --dry-run, --check or --status as one JSON object on stdout; the log goes to stderr"
    add("--json", action="store_true", help=result)
    add("-v", "--verbose", action="store_true", help="also log each step of isolating a row that cannot go")
    parser.add_argument("--version", action="version", version=f"%(prog)s {VERSION}")
    parser.set_defaults(verb="scheduled")
    arguments = parser.parse_args(argv, argparse.Namespace(final=argv is None))
    if arguments.json and arguments.verb not in ("once", "dry-run", "check", "status"):
        parser.error("--json goes with --once, --dry-run, --check or --status")
    if arguments.policy and arguments.verb in ("status", "print-sql", "print-config"):
        parser.error("--policy goes with a run, --dry-run or --check")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    logging.getLogger("psycopg").addHandler(logging.NullHandler())  # its warnings may quote the connection
    try:
        arguments = parse_arguments(argv)
        return VERBS.get(arguments.verb, (run_command,))[0](arguments)
    except SystemExit as done:  # argparse
        return int(done.code or 0)
    except StoppedError:  # but a run, which ends well
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return Exit.FAILED
    except RetentionError as error:
        for line in error.lines:
            print(f"{PROGRAM}: {line}", file=sys.stderr)
        return error.exit_status


def end_early(status: Exit) -> None:
    """End at once with this status when asked to stop, until Interrupts takes the signals over."""
    for number in stops():
        signal.signal(number, lambda *_: os._exit(status))


def command() -> NoReturn:
    """The entry point: `main`, on streams that can print anything and may be closed under us."""
    end_early(Exit.FAILED)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    status = main()
    try:
        sys.stdout.flush()
    except OSError:  # log lines for somebody who went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    for number in stops():  # a late one must not change the exit status
        signal.signal(number, signal.SIG_IGN)
    sys.exit(status)


if __name__ == "__main__":
    command()
