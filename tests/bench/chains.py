"""Measure chains of 2,000 rows: both walks, both directions of the reference. No assertion; it prints a table.

python3 tests/bench/chains.py [--chains 400] [--length 2000] [--batch-size 5000]
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import chains
from lab import POLICIES, SYSTEMS, Database, Program, Server, configuration


def measure(server: Server, name: str, options: argparse.Namespace, *, indexed: bool, forward: bool) -> tuple[int, ...]:
    """Load, run once in a process of its own, and return rows, finished, blocked, deleted, and milliseconds."""
    with server.connect() as connection:
        connection.execute(f"CREATE DATABASE {name}")
    database = Database(server, name)
    database.execute(SYSTEMS.read_text())
    if indexed:
        database.execute(f"CREATE INDEX ON {chains.TABLE} (updated_at)")
    fate = chains.load(database, options.chains, options.length, forward=forward)
    database.execute("CHECKPOINT")
    with tempfile.TemporaryDirectory() as directory:
        policies = {"refresh": POLICIES["refresh"]}
        config = configuration(database.conninfo, policies, batch_size=options.batch_size, max_run_duration="6h")
        begin = time.perf_counter()
        result = Program(pathlib.Path(directory))(config, "--once", "--json", timeout=7200)
        elapsed = round(1000 * (time.perf_counter() - begin))
    database.close()
    with server.connect() as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
    finished, blocked = len(fate.finished), len(fate.blocked)
    return finished + len(fate.staying), finished, blocked, result.policies["refresh"]["deleted"], elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chains", type=int, default=400)
    parser.add_argument("--length", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=5000)
    options = parser.parse_args()
    head = ("index", "reference", "rows", "finished", "blocked", "deleted", "seconds", "rows/s")
    layout = "{:<6} {:<18} {:>9} {:>9} {:>9} {:>9} {:>8} {:>8}"
    print(layout.format(*head), flush=True)
    server = Server()
    try:
        for number, (indexed, forward) in enumerate([(True, False), (False, False), (True, True), (False, True)]):
            rows, finished, blocked, deleted, ms = measure(
                server, f"bench{number}", options, indexed=indexed, forward=forward
            )
            direction = "older names newer" if forward else "child names parent"
            numbers = [f"{n:,}" for n in (rows, finished, blocked, deleted)]
            pace = f"{1000 * deleted // max(ms, 1):,}"
            print(layout.format("yes" if indexed else "no", direction, *numbers, f"{ms / 1000:.1f}", pace), flush=True)
    finally:
        server.remove()


if __name__ == "__main__":
    main()
