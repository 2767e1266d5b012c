"""Rows of tables of tests: all of them in `make test` and `make test-long` together."""

import pytest


def rows(table, long):
    """Names as a test's parameters, of which those in `long` run in `make test-long` alone."""
    return [pytest.param(name, marks=pytest.mark.long) if name in long else name for name in table]
