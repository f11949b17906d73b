"""The configuration: what is wrong with a file is said at once and in full, before anything is connected to."""

from __future__ import annotations

import copy
import os
import pathlib
import re
import shutil
import tempfile
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import tomli_w
from lab import TOP, Listener, Program, Result, configuration
from psycopg.conninfo import conninfo_to_dict

#: In `changed`: this key is not there at all.
ABSENT = object()

#: What a message says is accepted, by kind of value.
DURATION = r"a text with a unit, such as '30d' or '1h30m': .*, units ms s m h d w"
COUNT = r"(?i)whole number|integer"
STRING = r"(?i)string|text"
BOOLEAN = r"true.*false"
TABLE = r"(?i)schema\.name"
PAIRING = r"age_column.*retention|expiry_column.*grace|age_column.*expiry_column"
VALUES = r"(?i)list|array"
NAME = r"(?i)lower.?case"
COLUMN = r"(?i)column"
WINDOW = r"\d\d:\d\d-\d\d:\d\d|HH:MM"

SICR = {"table": "identity.sign_in_confirmation_requests", "age_column": "created_at", "retention": "30d"}


@pytest.fixture
def listener() -> Iterator[Listener]:
    """Where the configurations say the server is; in a short path, readable by all."""
    directory = pathlib.Path(tempfile.mkdtemp(prefix="retention-"))
    directory.chmod(0o755)
    yield Listener(directory)
    shutil.rmtree(directory)


def changed(listener: Listener, path: str, value: Any) -> dict[str, Any]:
    """A valid configuration with one policy, sicr, but for one key: `changed(listener, "run.pause", 5)`."""
    config = copy.deepcopy(configuration(listener.conninfo, {"sicr": SICR}))
    *sections, key = path.split(".")
    table = config
    for section in sections:
        table = table.setdefault(section, {})
    table.pop(key, None)
    if value is not ABSENT:
        table[key] = value
    return config


def refused(program: Program, listener: Listener, config: dict[str, Any] | str | bytes | None, *arguments: str) -> str:
    """Run it for real: refused before anything is connected to. Returns what was said."""
    result = program.inside(config, *(arguments or ("--once",)))
    assert_refused(result, listener)
    assert str(program.path) in result.output
    return result.output


def assert_refused(result: Result, listener: Listener) -> None:
    assert result.returncode == 78, result.output
    assert listener.untouched
    assert "Traceback" not in result.output


SINGLE_FAULTS: list[tuple[str, Any, str]] = [
    # [database]
    ("database.conninfo", 5, STRING),
    ("database.conninfo", "dbname auth", r"libpq|keyword|URI"),
    ("database.conninfo", "postgresql://[::1/auth", r"libpq|keyword|URI"),
    ("database.conninfo", "host=localhost nonsense_option=1", r"libpq|keyword|URI"),
    ("database.connect_timeout", "1500ms", DURATION),
    ("database.connect_timeout", "2500ms", DURATION),
    ("database.connect_timeout", "1s", DURATION),
    ("database.connect_timeout", "0s", DURATION),
    ("database.connect_timeout", 10, DURATION),
    ("database.connect_retry", "forever", DURATION),
    ("database.connect_retry", "-1s", DURATION),
    ("database.statement_timeout", "0s", DURATION),
    ("database.statement_timeout", "36501d", DURATION),
    ("database.lock_timeout", "2", DURATION),
    ("database.lock_timeout", 2.5, DURATION),
    ("database.max_clock_skew", 5, DURATION),
    # [run]
    ("run.batch_size", True, COUNT),
    ("run.batch_size", "5000", COUNT),
    ("run.batch_size", 0, COUNT),
    ("run.batch_size", -1, COUNT),
    ("run.batch_size", 1.5, COUNT),
    ("run.batch_size", 10**30, COUNT),
    ("run.max_run_duration", "0s", DURATION),
    ("run.max_run_duration", 1800, DURATION),
    ("run.max_run_duration", True, DURATION),
    ("run.max_run_duration", "30M", DURATION),
    ("run.max_run_duration", "30min", DURATION),
    ("run.max_run_duration", "1.5h", DURATION),
    ("run.max_run_duration", "", DURATION),
    ("run.max_run_duration", "-30m", DURATION),
    ("run.max_run_duration", "٣h", DURATION),  # a digit to Python's str.isdigit, not to an operator
    ("run.retention_interval", "24", DURATION),
    ("run.night_window_utc", "2-5", WINDOW),
    ("run.night_window_utc", "02:00", WINDOW),
    ("run.night_window_utc", "02:00-02:00", WINDOW),
    ("run.night_window_utc", "25:00-05:00", WINDOW),
    ("run.night_window_utc", "02:60-05:00", WINDOW),
    ("run.night_window_utc", "02:00-05:00 UTC", WINDOW),
    ("run.night_window_utc", False, WINDOW),
    ("run.pause", "-1s", r"or a duration of 0s or more such as .*, units ms s m h d w"),
    ("run.pause", "sometimes", r"auto"),
    ("run.pause", 0, r"auto"),
    ("run.max_replication_lag", "10", r"max_replication_lag"),
    ("run.max_replication_lag", False, r"max_replication_lag"),
    ("run.vacuum", "no", r"false"),
    ("run.vacuum", 0, r"false"),
    # [metrics]
    ("metrics.textfile", 5, STRING),
    ("metrics.state", False, r"path"),
    # [policy.*]
    ("policy.sicr.table", ABSENT, TABLE),
    ("policy.sicr.table", 5, TABLE),
    ("policy.sicr.table", "", TABLE),
    ("policy.sicr.table", "auth.identity.requests", TABLE),
    ("policy.sicr.table", "identity..requests", TABLE),
    ("policy.sicr.table", ".requests", TABLE),
    ("policy.sicr.table", 'identity."requests', TABLE),
    ("policy.sicr.table", '""', TABLE),
    ("policy.sicr.table", "sign in requests", TABLE),
    ("policy.sicr.table", "requests; DROP TABLE users", TABLE),
    ("policy.sicr.table", 'identity."re\0quests"', TABLE),
    ("policy.sicr.table", "identity." + "r" * 64, r"63"),
    ("policy.sicr.table", '"' + "ж" * 32 + '"', r"63"),
    ("policy.sicr.age_column", 5, COLUMN),
    ("policy.sicr.age_column", "", COLUMN),
    ("policy.sicr.age_column", "created\0at", COLUMN),
    ("policy.sicr.age_column", "c" * 64, r"63"),
    ("policy.sicr.age_column", ABSENT, PAIRING),
    ("policy.sicr.retention", ABSENT, PAIRING),
    ("policy.sicr.retention", "0d", DURATION),
    ("policy.sicr.retention", "-5d", DURATION),
    ("policy.sicr.retention", 30, DURATION),
    ("policy.sicr.retention", True, DURATION),
    ("policy.sicr.retention", "30", DURATION),
    ("policy.sicr.retention", "1M", DURATION),
    ("policy.sicr.retention", "1mo", DURATION),
    ("policy.sicr.retention", "1y", DURATION),
    ("policy.sicr.retention", "1h30", DURATION),
    ("policy.sicr.retention", "30 days", DURATION),
    ("policy.sicr.retention", "36501d", DURATION),
    ("policy.sicr.retention", f"{10**30}d", DURATION),
    ("policy.sicr.retention", "9" * 5000 + "d", DURATION),  # more digits than Python converts
    ("policy.sicr.grace", "24h", PAIRING),
    ("policy.sicr.expiry_column", "expires_at", PAIRING),
    ("policy.sicr.only", {}, r"only"),
    ("policy.sicr.only", "status", VALUES),
    ("policy.sicr.only", {"status": []}, VALUES),
    ("policy.sicr.only", {"status": "Expired"}, VALUES),
    ("policy.sicr.only", {"status": ["Expired", 1]}, VALUES),
    ("policy.sicr.only", {"status": [True, 1]}, VALUES),
    ("policy.sicr.only", {"status": [1.5]}, VALUES),
    ("policy.sicr.only", {"status": [["Expired"]]}, VALUES),
    ("policy.sicr.only", {"status": [2**63]}, r"64"),
    ("policy.sicr.only", {"status": ["Exp\0ired"]}, r"status"),
    ("policy.sicr.only", {"": ["Expired"]}, COLUMN),
    ("policy.sicr.only", {"s" * 64: ["Expired"]}, COLUMN),
    ("policy.sicr.parent_column", 5, COLUMN),
    ("policy.sicr.batch_size", 0, COUNT),
    ("policy.sicr.enabled", "yes", BOOLEAN),
    ("policy.sicr.allow_cascade", 1, BOOLEAN),
    ("policy.sicr.title", 5, STRING),
    ("policy.sicr.title", "two\nlines", r"(?i)one line|single line|control|printable"),
    # Keys and sections that do not exist: the message lists, or suggests, those that do.
    ("databse", {"conninfo": "dbname=auth"}, r"database"),
    ("batch_size", 5000, r"database|run"),
    ("run.batchsize", 5000, r"batch_size"),
    ("run.batch-size", 5000, r"batch_size"),
    ("run.dry_run", True, r"batch_size|pause"),
    ("metrics.file", "/tmp/metrics.prom", r"textfile"),
    ("policy.sicr.retain", "30d", r"retention"),
    ("policy.sicr.Retention", "30d", r"retention"),
    # A value where a section belongs.
    ("database", "dbname=auth", r"(?i)table|section"),
    ("policy", [], r"(?i)table|section"),
    ("policy.sicr", 5, r"(?i)table|section"),
    # Policy names.
    ("policy.SICR", SICR, NAME),
    ("policy.sicr-old", SICR, NAME),
    ("policy.sicr__old", SICR, NAME),
    ("policy._sicr", SICR, NAME),
    ("policy.sicr_", SICR, NAME),
    ("policy.просрочено", SICR, NAME),
    ("policy." + "x" * 41, SICR, r"40"),
    ("policy.", SICR, NAME),
]


@pytest.mark.parametrize(
    ("path", "value", "accepted"),
    SINGLE_FAULTS,
    ids=[f"{path}={'absent' if value is ABSENT else repr(value)[:40]}" for path, value, _ in SINGLE_FAULTS],
)
def test_one_fault_is_refused_by_file_key_and_what_is_accepted(
    program: Program, listener: Listener, path: str, value: Any, accepted: str
) -> None:
    """Every wrong value, unknown key and wrong name ends in 78, and the message says which and what would be right."""
    output = refused(program, listener, changed(listener, path, value))
    key = path.rpartition(".")[2]
    lines = [line for line in output.splitlines() if key in line]
    assert lines
    assert any(re.search(accepted, line) for line in lines), output


def test_neither_age_nor_expiry_column_is_refused(program: Program, listener: Listener) -> None:
    """A policy that says nothing about time would delete everything."""
    config = configuration(listener.conninfo, {"sicr": {"table": "requests"}})
    output = refused(program, listener, config)
    assert "age_column" in output
    assert "expiry_column" in output


@pytest.mark.parametrize("grace", [{}, {"retention": "30d"}], ids=["no grace", "retention"])
def test_expiry_column_goes_with_grace_alone(program: Program, listener: Listener, grace: dict[str, str]) -> None:
    """The row says itself when it ended: an age on top of that, or nothing at all, is refused."""
    config = configuration(listener.conninfo, {"tokens": {"table": "t", "expiry_column": "expires_at", **grace}})
    assert "grace" in refused(program, listener, config)


def test_a_negative_grace_is_refused(program: Program, listener: Listener) -> None:
    """A negative grace would delete tokens that are still valid."""
    policy = {"table": "refresh_tokens", "expiry_column": "expires_at", "grace": "-1s"}
    assert "grace" in refused(program, listener, configuration(listener.conninfo, {"tokens": policy}))


def test_all_faults_are_named_at_once(program: Program, listener: Listener) -> None:
    """Who mends one fault does not meet the next one tomorrow night."""
    config = changed(listener, "run.batch_size", True)
    config["run"]["pase"] = "0s"
    config["database"]["lock_timeout"] = "2"
    config["policy"]["sicr"]["retention"] = "1M"
    config["policy"]["Second"] = {"table": "a.b.c", "age_column": "x", "retention": "0d"}
    result = program.inside(config, "--once", "--json")
    assert_refused(result, listener)
    keys = {error["key"] for error in result.json["errors"]}
    assert keys >= {"run.batch_size", "run.pase", "database.lock_timeout", "policy.sicr.retention"}
    assert any("Second" in key for key in keys)
    text = refused(program, listener, None)
    assert all(word in text for word in ("batch_size", "pase", "lock_timeout", "retention", "Second"))


@pytest.mark.parametrize("policies", [{}, {"sicr": {**SICR, "enabled": False}}], ids=["none", "none enabled"])
def test_without_an_enabled_policy_nothing_runs(
    program: Program, listener: Listener, policies: dict[str, dict[str, Any]]
) -> None:
    """A package that was only installed deletes nothing, and says so."""
    assert "policy" in refused(program, listener, configuration(listener.conninfo, policies))


def test_an_empty_file_has_no_policy(program: Program, listener: Listener) -> None:
    """Defaults alone are no reason to delete anything."""
    assert "policy" in refused(program, listener, "")


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        (b'[run]\nbatch_size = 5000\npause = "0s\n', 3, ""),
        (b'[run]\npause = "0s"\npause = "1s"\n', 3, "pause|overwrite|twice|dup"),
        (b"[run]\n[run]\n", 2, "run|twice|dup"),
        (b"[run]\nbatch_size = 5_000_\n", 2, ""),
        (b"\xef\xbb\xbf[run]\nbatch_size = 5000\n", 1, "BOM|byte.order"),
        ('[run]\n# Größe\npause = "1s"\n'.encode("latin-1"), 2, "UTF-8"),
        ('[run]\npause = "1s"\n'.encode("utf-16"), 1, "UTF-8"),
    ],
    ids=["unterminated", "duplicate key", "duplicate section", "number", "BOM", "Latin-1", "UTF-16"],
)
def test_a_syntax_error_names_file_line_and_reason(
    program: Program, listener: Listener, text: bytes, line: int, reason: str
) -> None:
    """What cannot be read as TOML is refused as a whole, with the place where reading ended."""
    output = refused(program, listener, text)
    assert re.search(rf"(line |:){line}\b", output), output
    assert re.search(reason, output, re.IGNORECASE)


@pytest.mark.parametrize("fault", ["missing", "directory"])
def test_what_is_no_file_is_refused_by_name(program: Program, listener: Listener, fault: str) -> None:
    """A configuration that is not there is an error, not a reason for defaults."""
    if fault == "directory":
        program.path.mkdir()
    assert str(program.path) in refused(program, listener, None)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_an_unreadable_file_is_refused(program: Program, listener: Listener) -> None:
    """A file of another user is an error with its name, as the system gives it."""
    program.path = listener.directory / "config.toml"
    program.write(configuration(listener.conninfo, {"sicr": SICR}))
    program.path.chmod(0o600)
    prefix = ("setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups")
    result = program(None, "--once", prefix=prefix)
    assert_refused(result, listener)
    assert str(program.path) in result.output
    assert "ermission denied" in result.output


SECRET = "hush-hush"


@pytest.mark.parametrize(
    "conninfo",
    [
        f"dbname=auth password={SECRET} {SECRET}",
        f"dbname=auth password='{SECRET}",
        f"dbname=auth password={SECRET} nonsense=1",
        f"dbname=auth oauth_client_secre={SECRET}",
        f"host=nowhere.invalid dbname=postgresql://job:{SECRET}@localhost/auth",
        f"host=nowhere.invalid dbname='auth password={SECRET}'",
        f"postgresql://job:{SECRET}@[::1/auth",
        f"postgresql://job:{SECRET}%zz@localhost/auth",
        f"postgresql://job:x@localhost/auth?password={SECRET}%zz",
        f"postgresql://job:{SECRET}@localhost/auth?nonsense=1",
        f"postgresql://job@localhost/auth?nonsense={SECRET}",
        f"postgresql://job:{SECRET}@localhost:54x32/auth?sslmode",
    ],
)
def test_a_wrong_conninfo_does_not_show_its_password(program: Program, listener: Listener, conninfo: str) -> None:
    """The library's message may quote what it could not parse; ours does not."""
    output = refused(program, listener, changed(listener, "database.conninfo", conninfo))
    assert "conninfo" in output
    assert SECRET not in output
    assert SECRET not in program.inside(None, "--once", "--json", "--verbose").output
    assert SECRET not in program.inside(None, "--print-config").output


@pytest.mark.parametrize("password", ["a@{}", "a@b:{}", "a/{}", "5432/{}", "a?{}", "a#{}", "a:{}@b"])
def test_a_password_that_a_uri_takes_for_something_else_is_not_shown(
    program: Program, listener: Listener, password: str
) -> None:
    """Forgotten percent signs make a part of the password look like a host, a port or a database; it stays secret."""
    conninfo = f"postgresql://job:{password.format(SECRET)}@nowhere.invalid/auth"
    config = changed(listener, "database.conninfo", conninfo)
    for arguments in (("--once", "--verbose"), ("--once", "--json"), ("--print-config",)):
        result = program.inside(config, *arguments)
        assert result.returncode in (0, 69, 78)
        assert SECRET not in result.output, arguments


@pytest.mark.parametrize("arguments", [("--once",), ("--dry-run",)], ids=" ".join)
def test_with_json_the_faults_are_in_the_object(
    program: Program, listener: Listener, arguments: tuple[str, ...]
) -> None:
    """One object on stdout, no policies, and each fault with its key and its message."""
    result = program.inside(changed(listener, "policy.sicr.retention", "1M"), *arguments, "--json")
    assert_refused(result, listener)
    assert set(result.json) == {"job_run_id", "now", "stop_reason", "exit_status", "policies", "errors"}
    assert (result.json["exit_status"], result.policies) == (78, {})
    (error,) = result.json["errors"]
    assert set(error) == {"key", "message"}
    assert error["key"] == "policy.sicr.retention"
    assert re.search(DURATION, error["message"])


@pytest.mark.parametrize("arguments", [(), ("--once",), ("--dry-run",), ("--print-config",)], ids=" ".join)
def test_every_verb_refuses_a_wrong_file(program: Program, listener: Listener, arguments: tuple[str, ...]) -> None:
    """A configuration that does not run is not shown as if it did, and a scheduled run says so at any hour."""
    config = changed(listener, "run.night_window_utc", "02:00-02:00")
    result = program.inside(config, *arguments)
    assert_refused(result, listener)
    assert "night_window_utc" in result.output


def normal(value: Any) -> Any:
    """A value of the configuration as it is meant: durations in milliseconds, tables with their schema."""
    units = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
    if isinstance(value, dict):
        return {
            key: f"public.{table}" if key == "table" and "." not in (table := str(item)) else normal(item)
            for key, item in value.items()
        }
    if isinstance(value, str) and re.fullmatch(r"(\d+(ms|[smhdw]))+", value):
        return sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+)(ms|[smhdw])", value))
    return value


def effective(program: Program, config: dict[str, Any] | str | bytes | None) -> dict[str, Any]:
    """What --print-config says, read as TOML, as it is meant."""
    result = program.inside(config, "--print-config")
    assert (result.returncode, result.stderr) == (0, ""), result.output
    shown = normal(tomllib.loads(result.stdout))
    assert isinstance(shown, dict)
    return shown


VALID: list[tuple[str, Any]] = [
    ("policy.sicr.retention", "1h30m"),
    ("policy.sicr.retention", "36500d"),
    ("policy.sicr.retention", "1ms"),
    ("policy.sicr.retention", "4w2d"),
    ("policy.sicr.table", "requests"),
    ("policy.sicr.table", '"Identity"."Sign.In ""Requests"" 100%"'),
    ("policy.sicr.table", '"' + "ж" * 31 + '"'),
    ("policy.sicr.age_column", 'Created "At"'),
    ("policy.sicr.age_column", "c" * 63),
    ("policy.sicr.only", {"kind": [1, -(2**63)], "status": ["", "it's"], "is_revoked": [True]}),
    ("policy.sicr.batch_size", 1),
    ("policy.sicr.title", "SES-009: очистка"),
    ("policy." + "x" * 40, SICR),
    ("policy.sicr", {"table": "t", "expiry_column": "e", "grace": "0s"}),
    ("run.pause", "0s"),
    ("run.pause", "auto"),
    ("run.night_window_utc", "22:00-02:00"),
    ("run.night_window_utc", ""),
    ("database.connect_timeout", "2s"),
    ("database.connect_retry", "0s"),
]


@pytest.mark.parametrize(("path", "value"), VALID, ids=[f"{path}={value!r}"[:60] for path, value in VALID])
def test_values_at_the_edge_are_accepted(program: Program, listener: Listener, path: str, value: Any) -> None:
    """What the documentation allows is allowed to its edge, and --print-config gives it back."""
    config = changed(listener, path, value)
    meant: Any = normal(config)
    shown: Any = effective(program, config)
    for part in path.split("."):
        meant, shown = meant[part], shown[part]
    assert (meant.items() <= shown.items()) if isinstance(meant, dict) else shown == meant


def test_missing_sections_have_their_defaults(program: Program, listener: Listener) -> None:
    """Only policies must be written down; every other key has the default that the example shows."""
    shown = effective(program, tomli_w.dumps({"policy": {"sicr": SICR}}))
    example = normal(tomllib.loads((TOP / "config.toml.example").read_text()))
    example["run"].pop("max_replication_lag", None)  # off by default
    for section in ("database", "run", "metrics"):
        assert shown[section] == example[section]
    assert listener.untouched


EXAMPLE_KEYS = {
    "database": "conninfo connect_timeout connect_retry statement_timeout lock_timeout max_clock_skew",
    "run": "batch_size max_run_duration retention_interval night_window_utc pause vacuum",
    "metrics": "textfile state",
}


def test_the_example_is_valid_and_has_every_key(program: Program) -> None:
    """config.toml.example is what an operator starts from: it runs as it is, and leaves no key unsaid."""
    text = (TOP / "config.toml.example").read_text()
    shown = effective(program, text)
    example = normal(tomllib.loads(text))
    assert list(shown["policy"]) == list(example["policy"]) == ["sicr", "refresh", "tokens_expired", "tokens_revoked"]
    for name, policy in example["policy"].items():
        assert {key: shown["policy"][name][key] for key in policy} == policy
    for section, keys in EXAMPLE_KEYS.items():
        assert set(keys.split()) <= set(example[section])
    documented = "max_replication_lag enabled allow_cascade parent_column title grace expiry_column only"
    assert [word for word in documented.split() if word not in text] == []
    specified = "SicrRetention RefreshTerminalRetention RetentionInterval BatchSize MaxRunDuration NightWindowUtc"
    assert [option for option in specified.split() if option not in text] == []


def test_what_print_config_shows_is_a_configuration_with_the_same_effect(program: Program, listener: Listener) -> None:
    """Its output can be written to a file and run: printing that gives the same again."""
    config = changed(listener, "policy.sicr.only", {"status": ["Expired"]})
    config["policy"]["second"] = {"table": '"T 2"', "expiry_column": "until", "grace": "1h", "enabled": False}
    first = program.inside(config, "--print-config").stdout
    assert program.inside(first, "--print-config").stdout == first


@pytest.mark.parametrize(
    "conninfo",
    [
        f"host=db.example dbname=auth user=job password={SECRET}",
        f"host=db.example dbname=auth user=job password = '{SECRET} \\' x'",
        f"host=db.example dbname=auth user=job sslkey=/k sslpassword={SECRET}",
        f"postgresql://job:{SECRET}@db.example/auth",
        f"postgres://job:{SECRET.replace('-', '%2D')}@db.example:5433/auth?connect_timeout=5",
        f"postgresql://job@db.example/auth?password={SECRET}",
        f"postgresql://job@db.example/auth?sslpassword={SECRET}&password=x",
    ],
)
def test_print_config_masks_secrets_and_nothing_else(program: Program, listener: Listener, conninfo: str) -> None:
    """A configuration can be shown to a colleague; what is not secret in its conninfo stays legible."""
    shown = effective(program, changed(listener, "database.conninfo", conninfo))["database"]["conninfo"]
    secret = {"password", "sslpassword"}
    before, after = conninfo_to_dict(conninfo), conninfo_to_dict(shown)
    assert "hush" not in shown
    assert {k: v for k, v in after.items() if k not in secret} == {k: v for k, v in before.items() if k not in secret}
    assert all(after[key] != before[key] for key in secret & set(before) if key in after)


def test_print_config_does_not_show_a_password_from_elsewhere(
    program: Program, listener: Listener, tmp_path: pathlib.Path
) -> None:
    """Neither PGPASSWORD nor a credential is part of the file."""
    (tmp_path / "db-password").write_text(SECRET)
    env = {"PGPASSWORD": SECRET, "CREDENTIALS_DIRECTORY": str(tmp_path)}
    result = program(changed(listener, "run.pause", "0s"), "--print-config", env=env)
    assert result.returncode == 0
    assert SECRET not in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        "--dry",
        "--onc",
        "--once --verb",
        "--once --dry-run",
        "--once --print-config",
        "--dry-run --print-config",
        "--json",
        "--json --print-config",
        "--once --policy nobody",
        "--dry-run --policy nobody",
        "--policy nobody",
        "--once --policy sicr --policy nobody",
        "--once --policy disabled",
        "--once --policy SICR",
        "--once --policy",
        "--once now",
        "--force",
    ],
)
def test_a_usage_error_ends_in_2(program: Program, listener: Listener, arguments: str) -> None:
    """Nothing is guessed from a command line that is not plainly one of the documented ones."""
    config = changed(listener, "policy.disabled", {**SICR, "enabled": False})
    run = program if arguments == "--force" else program.inside  # one of them as a process is enough
    result = run(config, *arguments.split())
    assert result.returncode == 2, result.output
    assert result.stdout == ""
    assert result.stderr
    assert "Traceback" not in result.stderr
    assert listener.untouched


def test_help_documents_verbs_and_exit_statuses(program: Program) -> None:
    """What a script needs to know about the command is in --help."""
    result = program(None, "--help")
    assert result.returncode == 0
    for word in ("--once", "--dry-run", "--print-config", "--config", "--policy", "--json", "--verbose", "--version"):
        assert word in result.stdout
    for status in (0, 1, 2, 69, 78):
        assert re.search(rf"^\s+{status}\s+\w", result.stdout, re.MULTILINE), status


def test_version_is_one_line(program: Program) -> None:
    """Name and version, as other commands print them."""
    result = program(None, "--version")
    assert result.returncode == 0
    assert result.stdout.startswith("session-retention ")
    assert result.stdout.count("\n") == 1


@pytest.mark.parametrize("name", ["state.toml", "history.jsonl"])
def test_the_metrics_have_a_file_of_their_own(program: Program, name: str) -> None:
    """Not the state's, nor that of the history beside it."""
    metrics = {"state": "/var/lib/x/state.toml", "textfile": f"/var/lib/x/{name}"}
    result = program.inside(configuration("dbname=auth", metrics=metrics), "--print-config")
    assert result.returncode == 78
    assert "metrics.textfile: must be another file than /var/lib/x/state.toml" in result.stderr
