"""What the kernels are made of."""

from hypothesis import given
from hypothesis import strategies as st

from baton.engine.cpu.primitives import in_parts


@given(st.integers(1, 5000), st.sampled_from([4, 14, 32]), st.integers(0, 600))
def test_rows_are_taken_in_as_few_parts_as_fit_and_these_are_about_equal(rows: int, tile: int, most: int) -> None:
    size, limit = in_parts.py_func(rows, tile, most), max(tile, most // tile * tile)
    parts = -(-rows // size)
    assert size % tile == 0 and size <= limit and parts == -(-rows // limit)
    assert size == tile or -(-rows // (size - tile)) > parts  # with a tile less, there would be more parts


def test_no_rows_are_one_tile() -> None:
    assert in_parts.py_func(0, 14, 252) == 14
