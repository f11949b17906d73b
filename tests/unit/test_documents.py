"""README.md, config.toml.example, `--help` and the program tell the same."""

from __future__ import annotations

import datetime as dt
import os
import re
import tomllib
from typing import Any

import pytest
from lab import POLICIES, TOP, Program

import retention

README = (TOP / "README.md").read_text()
EXAMPLE = (TOP / "config.toml.example").read_text()
EXIT_STATUSES = [str(status.value) for status in retention.Exit]
EVENTS = [value.name for value in vars(retention).values() if isinstance(value, retention.Event)]
SHOWN, EARLY = EXAMPLE.split("#[policy.tokens_revoked_early]")
#: The lines that the example shows switched off, but for the policy at its end.
SWITCHED_OFF = re.findall(r"^#(\w+ = .*)$", SHOWN, re.MULTILINE)
KEYS = sorted(set(re.findall(r"^#?(\w+) = ", EXAMPLE, re.MULTILINE)))


def printed(program: Program, config: str) -> dict[str, Any]:
    """The effective configuration."""
    result = program.inside(config, "--print-config")
    assert (result.returncode, result.stderr) == (0, "")
    return tomllib.loads(result.stdout)


def first_cells(heading: str) -> list[str]:
    """The first column of the README's table with this heading, without backticks."""
    table = README.split(f"\n| {heading} |", 1)[1].split("\n\n", 1)[0]
    return [line.split("|")[1].strip().strip("`") for line in table.splitlines()[2:]]


@pytest.fixture(scope="module")
def help_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    result = Program(tmp_path_factory.mktemp("help"))(None, "--help")
    assert result.returncode == 0
    return result.stdout


def test_the_example_has_the_policies_of_the_three_systems() -> None:
    """What the tests run is what the example ships."""
    assert tomllib.loads(EXAMPLE)["policy"] == POLICIES


def test_the_example_shows_the_defaults(program: Program) -> None:
    """Each key outside the policies stands in the example with the value it has when it is absent."""
    bare = '[policy.sicr]\ntable = "a"\nage_column = "b"\nretention = "1d"\n'
    sections = ["database", "run", "metrics"]
    example, defaults = printed(program, EXAMPLE), printed(program, bare)
    assert [example[section] for section in sections] == [defaults[section] for section in sections]


def test_the_example_leaves_no_key_out(program: Program) -> None:
    """What --print-config shows of the example is in it."""
    effective = printed(program, EXAMPLE)
    policies = effective.pop("policy").values()
    assert {key for section in [*effective.values(), *policies] for key in section} <= set(KEYS)


@pytest.mark.parametrize("line", SWITCHED_OFF)
def test_what_the_example_shows_switched_off_can_be_switched_on(program: Program, line: str) -> None:
    """A commented line is one that the program accepts."""
    printed(program, EXAMPLE.replace(f"\n#{line}\n", f"\n{line}\n"))


def test_the_example_of_a_policy_that_ends_replay_detection_is_valid(program: Program) -> None:
    """The commented policy at the end of the example, without its marks."""
    early = re.sub(r"^#", "", EARLY, flags=re.MULTILINE)
    config = f"{SHOWN}[policy.tokens_revoked_early]{early}"
    assert "tokens_revoked_early" in printed(program, config)["policy"]


@pytest.mark.parametrize("key", KEYS)
def test_the_readme_mentions_each_key(key: str) -> None:
    """A key of the configuration is in the README, as code."""
    assert re.search(rf"`[^`\n]*\b{key}\b[^`\n]*`", README)


def test_the_readme_and_help_have_the_same_options(help_text: str) -> None:
    """The README's list of options is that of --help, and no option of another version."""
    commands = README.split("## Command", 1)[1].split("```")[1]
    options = re.compile(r"--[a-z-]+")
    assert set(options.findall(commands)) == set(options.findall(help_text))


def test_the_readme_describes_each_exit_status() -> None:
    """The README's table has the statuses, all and only these."""
    assert first_cells("exit status") == EXIT_STATUSES


@pytest.mark.parametrize("status", EXIT_STATUSES)
def test_help_describes_each_exit_status(help_text: str, status: str) -> None:
    """--help explains what a status means."""
    assert re.search(rf"^\s*{status}\s+\w", help_text, re.MULTILINE)


def test_the_readme_describes_each_event() -> None:
    """The README's table has the events of the log, all and only these."""
    assert first_cells("`EVENT`") == EVENTS


def test_the_readme_describes_each_metric() -> None:
    """The README's table has the metrics that a file can have, with their labels, all and only these."""
    moment = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    policy = retention.PolicyRecord(table="t", enabled=True, oldest_row_age_seconds=1.0, last_drained=moment)
    policy.backlog = policy.blocked = policy.undeletable = policy.overdue = 1
    job = retention.JobRecord(interval_seconds=1.0, last_run=moment, last_success=moment)
    text = retention.exposition(retention.Totals(job, {"probe": policy}))
    names = re.findall(rf"^# TYPE {retention.PREFIX}(\w+)", text, re.MULTILINE)
    labels = {name: re.findall(rf'^{retention.PREFIX}{name}\{{(\w+)="[^"]*"(?:,(\w+))?', text, re.M) for name in names}
    shown = {
        name.replace("probe_", "<policy>_"): "{" + ",".join(filter(None, found[0])) + "}" if found else ""
        for name, found in labels.items()
    }
    assert set(first_cells("metric")) == {f"{name}{labelled}" for name, labelled in shown.items()}


def test_the_readme_says_what_is_wrong_in_the_words_of_the_program() -> None:
    """ "When something is wrong" has each finding, as --check and a run tell it, with its places in capitals."""
    rows = []
    for code, rule in retention.RULES.items():
        message, remedy = (re.sub(r"\{(\w+)\}", lambda m: m[1].upper(), text) for text in (rule.sentence, rule.remedy))
        rows.append(f"| `{code}` | {rule.severity} | {message} | {remedy} |")
    assert README.split("\n| code | severity | message | remedy |\n|---|---|---|---|\n")[1].split("\n\n")[
        0
    ] == "\n".join(rows)


@pytest.mark.parametrize("path", ["packaging/demo", "packaging/apt-install", "tests/run", ".ci/run"])
def test_a_command_can_be_executed(path: str) -> None:
    """What the README and CI call by its path can be called so."""
    assert os.access(TOP / path, os.X_OK)
    assert (TOP / path).read_bytes().startswith(b"#!")
