"""Half of the rows are held by a table that the role may not read, so that each is found by trying.

RETENTION_SOAK_HELD says how many rows there are: a person takes 10,000.
"""

from __future__ import annotations

import os

import blocked
import pytest
from lab import Database, Program

ROWS = int(os.environ.get("RETENTION_SOAK_HELD", "600"))


@pytest.mark.parametrize("indexed", [False, True] if "RETENTION_SOAK_PACKAGE" in os.environ else [False])
def test_trying_one_by_one_costs_in_proportion(indexed: bool, database: Database, program: Program) -> None:
    """The same rows stay as where the role may read, at three transactions a row at most; four times the rows, four
    times the cost."""
    small = blocked.half_held(database, program, ROWS // 4, readable=False, indexed=indexed)
    large = blocked.half_held(database, program, ROWS, readable=False, indexed=indexed)
    assert large[0] <= 3 * ROWS
    assert large[0] <= 4 * 1.25 * small[0], (small, large)
    assert large[1] <= 4 * 1.25 * small[1], (small, large)
