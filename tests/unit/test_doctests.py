"""The examples in the program's docstrings."""

from __future__ import annotations

import doctest

import retention


def test_the_docstrings_are_true() -> None:
    """Each example gives what it says."""
    failed, tried = doctest.testmod(retention)
    assert tried
    assert not failed
