"""Start-up: what is not used is not loaded, so that a run with nothing to do costs next to nothing."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import pytest
from lab import POLICIES, PROGRAM, Database, Program, configuration

#: What nothing here has a use for.
NEVER = {"rich", "opentelemetry", "requests", "urllib3", "numpy", "psycopg_pool", "http.server", "wsgiref"}


class Measured(Program):
    """The program, which tells what it imports."""

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-X", "importtime", str(PROGRAM), "--config", str(self.path), *arguments]

    def imported(self, config: dict[str, Any] | None, *arguments: str, status: int = 0) -> set[str]:
        """The modules, and the packages that they are in."""
        result = self(config, *arguments)
        assert result.returncode == status, result.output
        lines = [line for line in result.stderr.splitlines() if line.startswith("import time:")]
        return {line.rpartition("|")[2].strip() for line in lines}


@pytest.fixture
def measured(tmp_path: pathlib.Path) -> Measured:
    return Measured(tmp_path)


def test_a_run_loads_the_exposition_only_where_it_writes_metrics(systems: Database, measured: Measured) -> None:
    """Piped, without traces and without a metrics file: only what the purge is done with."""
    config = configuration(systems.conninfo, {"sicr": POLICIES["sicr"]})
    plain = measured.imported(config, "--once")
    assert "psycopg" in plain
    assert plain & (NEVER | {"prometheus_client"}) == set()
    config["metrics"]["textfile"] = str(measured.directory / "metrics.prom")
    again = measured.imported(config, "--once")
    assert "prometheus_client" in again
    assert again & {"rich", "opentelemetry", "requests"} == set()


@pytest.mark.parametrize("verb", ["--help", "--version", "--status", "--print-config"])
def test_what_needs_no_database_loads_nothing_optional(measured: Measured, verb: str) -> None:
    """Help, version, status and configuration: no library but those that every command begins with."""
    modules = measured.imported(configuration("host=/nonexistent", {"sicr": POLICIES["sicr"]}), verb)
    assert modules & (NEVER | {"prometheus_client", "systemd"}) == set()
