"""What SQL a server was asked to run: its log, and skeletons of statements, where names and values are holes."""

from __future__ import annotations

import re

from lab import Database

_HOLES = re.compile(
    r"""
    (?P<literal> \s* (?: \b[eE]'(?:[^'\\]|\\.|'')*' | '(?:[^']|'')*' ) )  # the driver puts a space before an E
    | (?P<name> "(?:[^"]|"")*" )
    | (?P<number> \b\d+\b )
    """,
    re.VERBOSE | re.DOTALL,
)


def log_statements(database: Database) -> int:
    """Have the server log each statement of the job; where its log ends now."""
    database.execute(f"ALTER ROLE retention IN DATABASE {database.name} SET log_statement = 'all'")
    return database.server.log.stat().st_size


def statements(database: Database, offset: int) -> list[str]:
    """The statements in the log from the offset on, each of them whole."""
    with database.server.log.open(encoding="utf-8", newline="") as stream:
        stream.seek(offset)
        text = stream.read()
    found = re.findall(
        r"^\S+ \S+ \S+ \[\d+\] LOG:  (?:statement|execute [^:\n]*): (.*\n(?:\t.*\n)*)", text, re.MULTILINE
    )
    return [entry.removesuffix("\n").replace("\n\t", "\n") for entry in found]


def skeleton(statement: str) -> str:
    """The statement without its names, values and spaces: what is left is the program's own."""
    return " ".join(_HOLES.sub(lambda hole: f"<{hole.lastgroup}>", statement).split())
