"""Beside pg_partman, which drops whole partitions: what a bound cannot decide is the job's, and all is counted."""

from __future__ import annotations

from typing import Any

import metrics
import pytest
from lab import POLICIES, Database, Program, configuration
from servers import Proxy

TABLE = "identity.sign_in_confirmation_requests"
SICR = {"sicr": POLICIES["sicr"]}
EXPIRED = "created_at < now() - interval '30 days'"
#: As old as rows get in the partition that holds the cutoff, which partman keeps until all of it is old.
BOUNDARY = "date_trunc('day', now() - interval '30 days')"


@pytest.fixture
def managed(database: Database) -> Database:
    """The requests of sixty days, in partitions of a day that partman made, drops after 30 days, and makes ahead."""
    if not database.count("pg_available_extensions", "name = 'pg_partman' AND default_version LIKE '4.%'"):
        pytest.skip("pg_partman 4 is not installed")
    database.execute(f"""
        CREATE SCHEMA partman; CREATE EXTENSION pg_partman SCHEMA partman;
        CREATE SCHEMA identity; GRANT USAGE ON SCHEMA identity TO retention;
        CREATE TABLE {TABLE} (id uuid DEFAULT gen_random_uuid(), phone_number text, created_at timestamptz,
            PRIMARY KEY (id, created_at)) PARTITION BY RANGE (created_at);
        CREATE INDEX ON {TABLE} (created_at);
        GRANT SELECT (id, created_at), UPDATE (id), DELETE ON {TABLE} TO retention;
        SELECT partman.create_parent('{TABLE}', 'created_at', 'native', 'daily', p_premake := 2,
            p_start_partition := (now() - interval '60 days')::text);
        UPDATE partman.part_config SET retention = '30 days', retention_keep_table = false;
        INSERT INTO {TABLE} (created_at) SELECT now() - i * interval '3 hours' FROM generate_series(1, 440) i;
        INSERT INTO {TABLE} (created_at) SELECT {BOUNDARY} FROM generate_series(1, 15)
    """)
    return database


def maintain(database: Database) -> None:
    database.execute("SELECT partman.run_maintenance(p_analyze := false)")


def partitions(database: Database) -> int:
    return database.count(f"pg_partition_tree('{TABLE}')", "isleaf")


def run(database: Database, program: Program, proxy: Proxy | None = None) -> tuple[Any, ...]:
    """One run: what it deleted and left, and what the metrics then say of deleted, backlog, overdue and the oldest."""
    textfile = program.directory / "metrics.prom"
    conninfo = proxy.conninfo(database) if proxy else database.conninfo
    config = configuration(conninfo, SICR, metrics={"textfile": str(textfile)}, batch_size=10)
    result = program.inside(config, "--once", "--json")
    sicr = result.policies["sicr"]
    assert (result.returncode, sicr["error"], sicr["stop_reason"]) == (0, None, "drained"), result.output
    series, labels = metrics.read(textfile), ("sicr", TABLE)
    told = [series[name][labels] for name in ("backlog", "overdue")]
    return (
        sicr["deleted"],
        sicr["backlog"],
        series["sicr_deleted_total"][()],
        *told,
        labels in series.get("oldest_row_age_seconds", {}),
    )


def test_what_a_partition_bound_cannot_decide_goes_row_by_row(managed: Database, program: Program) -> None:
    """Partman has dropped what is old as a whole; of the day on which the cutoff lies the job takes the old rows."""
    before, young = partitions(managed), managed.count(TABLE, f"NOT {EXPIRED}")
    maintain(managed)
    rest = managed.count(TABLE, EXPIRED)
    assert (before - partitions(managed) >= 29, rest in range(15, 25)) == (True, True)
    assert run(managed, program) == (rest, 0, rest, 0, 0, False)
    assert run(managed, program) == (0, 0, rest, 0, 0, False), "nothing is left, which is no failure"
    maintain(managed)
    assert (managed.count(TABLE), managed.count(TABLE, EXPIRED)) == (young, 0)


def test_where_partman_has_not_run_the_job_does_its_work(managed: Database, program: Program) -> None:
    """Every old row goes, of the default partition, too, which partman never empties; it drops what is empty."""
    managed.execute(f"INSERT INTO {TABLE} (created_at) SELECT now() - interval '1 year' FROM generate_series(1, 5)")
    assert managed.count(f"{TABLE}_default") == 5
    old, young = managed.count(TABLE, EXPIRED), managed.count(TABLE, f"NOT {EXPIRED}")
    assert run(managed, program) == (old, 0, old, 0, 0, False)
    before = partitions(managed)
    maintain(managed)
    assert (before - partitions(managed) >= 29, managed.count(TABLE)) == (True, young)


def test_partman_may_drop_partitions_while_the_job_runs(managed: Database, proxy: Proxy, program: Program) -> None:
    """Its maintenance between two batches takes what it takes: the run goes on, and counts its own rows."""
    young = managed.count(TABLE, f"NOT {EXPIRED}")
    proxy.at("pause", 1, lambda: maintain(managed))
    deleted, *rest = run(managed, program, proxy)
    assert (proxy.happened, rest) == (["pause"], [0, deleted, 0, 0, False])
    assert deleted in range(25, 35), "a batch, and the boundary"
    assert (managed.count(TABLE), managed.count(TABLE, EXPIRED)) == (young, 0)
