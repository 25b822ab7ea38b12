"""What the plan remembers of a rank was computed from constants that some tests change."""

import pytest

from penstock.plan import predict


@pytest.fixture(autouse=True)
def nothing_remembered():
    """By a test of another, in either direction."""
    predict._rank.cache_clear()
    yield
    predict._rank.cache_clear()
