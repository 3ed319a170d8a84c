"""Keys of blocks are an agreement between routers, workers and what tiers have written: they do not change."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.core.block_key import block_key, extend_keys, root_key

ROOT = root_key("model", "salt")

PLAIN, MARKED = "3caa8957c1d019600705d4df0cf06c21", "ab1d61b280dfe4758ae81dc8499d3e6d"


@pytest.mark.parametrize(("output_from", "second"), [(None, PLAIN), (8, PLAIN), (5, MARKED)])
def test_keys_are_those_that_they_always_were(output_from: int | None, second: str) -> None:
    keys = list[bytes]()
    extend_keys(keys, ROOT, range(10), 4, output_from)
    assert [key.hex() for key in keys] == ["c02aa9edac40d99436228bab3ef6a0f6", second]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 5), st.none() | st.integers(0, 45), st.integers(0, 40))
def test_keys_of_many_blocks_are_those_of_each(tokens: list[int], size: int, output_from: int | None, first: int) -> None:
    """In two calls or in one."""
    keys, parent, expected = list[bytes](), ROOT, list[bytes]()
    for start in range(0, len(tokens) - size + 1, size):
        marked = output_from is not None and output_from < start + size
        parent = block_key(parent, tokens[start : start + size], max(0, (output_from or 0) - start) if marked else None)
        expected.append(parent)
    extend_keys(keys, ROOT, tokens[:first], size, output_from)
    extend_keys(keys, ROOT, tokens, size, output_from)
    assert keys == expected
