"""A password in a URI, with signs that must be encoded there: it works, what fails is told in one line, and it stays
secret, in every output, in the server's log and in the list of processes.
"""

from __future__ import annotations

import pathlib
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
from lab import Database, Program, Result, Server, configuration, log, until

PASSWORD = "p@ss w%rd/ключ:?#"
WRONG = "falsch @100%"
POLICIES = {"probe": {"table": "sessions", "age_column": "at", "retention": "30d"}}
#: Every text by which a password could be recognised: as it is, encoded, escaped, and in parts.
SECRETS = {
    form
    for password in (PASSWORD, WRONG)
    for form in (
        password,
        quote(password, safe=""),
        ascii(password)[1:-1],
        password.split()[0],
        password.split()[1],
        quote(password.split()[1], safe=""),
    )
}


@pytest.fixture(scope="module")
def locked() -> Iterator[Database]:
    """A server that asks the job's role for its password, and a table with ten rows to delete."""
    server = Server()
    with server.connect() as connection:
        connection.execute(f"ALTER ROLE retention PASSWORD '{PASSWORD}'")
    (server.data / "pg_hba.conf").write_text("local all postgres trust\nlocal all all scram-sha-256\n")
    database = Database(server, "postgres")
    database.execute(
        "SELECT pg_reload_conf(); CREATE TABLE sessions (id int, at timestamptz); GRANT ALL ON sessions TO retention"
    )
    yield database
    database.close()
    server.remove()


def uri(host: object, *, password: str = PASSWORD, port: int = 5432, dbname: str = "postgres") -> dict[str, Any]:
    conninfo = f"postgresql://retention:{quote(password, safe='')}@{quote(str(host), safe='')}:{port}/{dbname}"
    return configuration(conninfo, POLICIES, database={"connect_timeout": "5s"})


def assert_secret(*outputs: str) -> None:
    assert [secret for secret in SECRETS for output in outputs if secret in output] == []


def processes(root: int) -> Iterator[tuple[int, str]]:
    """A process and all below it, with what the list of processes shows of each and of its threads."""
    place = pathlib.Path(f"/proc/{root}")
    names = [path.read_text() for path in place.glob("task/*/comm")]
    yield root, " ".join([(place / "cmdline").read_text().replace("\0", " "), *names])
    for children in place.glob("task/*/children"):
        for child in children.read_text().split():
            yield from processes(int(child))


def test_a_password_that_needs_encoding_works_and_stays_secret(locked: Database, program: Program) -> None:
    """The run connects and purges; nobody who lists processes or sessions, or reads a log, sees the password."""
    locked.execute("INSERT INTO sessions SELECT i, '2020-01-01' FROM generate_series(1, 10) i")
    offset = locked.server.log.stat().st_size
    other = locked.connect(autocommit=False)
    other.execute("LOCK TABLE sessions")
    config = uri(locked.server.directory)
    config["database"]["lock_timeout"] = "1m"
    process = program.start(config, "--once", "--json", "--verbose")
    waiting = "SELECT count(*) FROM pg_locks WHERE relation = 'sessions'::regclass AND NOT granted"
    until(lambda: locked.value(waiting), "the run waits for the table")
    listed = dict(processes(process.pid))
    sessions = locked.execute("SELECT a::text FROM pg_stat_activity a WHERE usename = 'retention'")
    other.rollback()
    result = program.finish(process)
    assert (result.returncode, result.policies["probe"]["deleted"]) == (0, 10), result.output
    assert process.pid in listed
    assert "retention.py" in listed[process.pid]
    assert sessions
    shown = program.inside(None, "--print-config")
    assert (shown.returncode, "retention" in shown.stdout) == (0, True)
    with locked.server.log.open() as stream:
        stream.seek(offset)
        assert_secret(stream.read())
    assert_secret(*listed.values(), str(sessions), result.output, shown.output)
    assert_secret((program.directory / "state.toml").read_text())


def assert_one_clear_line(program: Program, config: dict[str, Any], reason: str, *named: str) -> None:
    """Exit status 69 and one line, which gives the reason once and names what was to be reached; no secret."""
    once = program.inside(config, "--once", "--verbose")
    as_json = program.inside(None, "--once", "--json")
    dry = program.inside(None, "--dry-run")
    scheduled = program.inside(None, "--verbose")
    results: list[Result] = [once, as_json, dry, scheduled]
    assert [result.returncode for result in results] == [69] * 4, [result.output for result in results]
    for result in (once, scheduled):
        (failed,) = log(result.stdout)
        assert (failed.event, failed.level, result.stderr) == ("job_failed", "ERROR", "")
    (problem,) = as_json.json["errors"]
    assert (as_json.policies, len(as_json.stderr.splitlines())) == ({}, 1)
    assert (dry.stdout, len(dry.stderr.splitlines())) == ("", 1)
    for text in (log(once.stdout)[0].fields["error"], problem["message"], dry.stderr):
        assert text.count(reason) == 1, text
        assert [name for name in named if name not in text] == [], text
    assert_secret(*(result.output for result in results))
    assert_secret((program.directory / "state.toml").read_text(), (program.directory / "history.jsonl").read_text())


def test_a_wrong_password_is_one_clear_line(locked: Database, program: Program) -> None:
    """What the server says, for which user and where."""
    directory = str(locked.server.directory)
    reason = 'password authentication failed for user "retention"'
    assert_one_clear_line(program, uri(directory, password=WRONG), reason, directory)


def test_a_missing_password_is_one_clear_line(locked: Database, program: Program) -> None:
    """A password that is not there is told from a wrong one."""
    directory = str(locked.server.directory)
    config = configuration(f"postgresql://retention@{quote(directory, safe='')}/postgres", POLICIES)
    assert_one_clear_line(program, config, "no password supplied", directory, "retention")


def test_a_database_that_is_not_there_is_one_clear_line(locked: Database, program: Program) -> None:
    """With the right password."""
    directory = str(locked.server.directory)
    assert_one_clear_line(program, uri(directory, dbname="nothing"), 'database "nothing" does not exist', directory)


def test_a_refused_connection_is_one_clear_line(program: Program) -> None:
    """A port on which nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        assert_one_clear_line(program, uri("127.0.0.1", port=port), "Connection refused", "127.0.0.1", str(port))


def test_a_socket_that_is_not_there_is_one_clear_line(program: Program) -> None:
    """A server that is down, on its own machine."""
    assert_one_clear_line(program, uri("/nonexistent"), "No such file or directory", "/nonexistent")


def test_an_unknown_host_is_one_clear_line(program: Program) -> None:
    """A name that does not resolve."""
    with pytest.raises(socket.gaierror) as unknown:
        socket.getaddrinfo("nowhere.invalid", 5432)
    assert_one_clear_line(program, uri("nowhere.invalid"), unknown.value.strerror or "", "nowhere.invalid")
