"""Numbers in messages, as people say them."""

from penstock.errors import counted, size


def test_one_is_no_plural():
    assert [counted(n, "row") for n in (0, 1, 2, 1200)] == ["0 rows", "1 row", "2 rows", "1,200 rows"]


def test_a_small_size_is_not_rounded_to_nothing():
    assert [size(n) for n in (5 * 2**20, 2**29, 3 * 2**30)] == ["5 MiB", "0.5 GiB", "3.0 GiB"]
