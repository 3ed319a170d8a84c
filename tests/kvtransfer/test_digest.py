"""Digests detect every changed byte and report nothing else."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cluster.errors import BatonError, Reason
from baton.engine.core.kvcache import DIGEST_BYTES, KvLayout, KvPool
from kvtransfer.digest import mismatches

POOL = KvPool(KvLayout("test", "float32", block_size=2, num_layers=2, num_kv_heads=1, head_dim=8), num_blocks=16)
POOL.array[:] = np.random.default_rng(0).integers(0, 256, size=POOL.array.shape, dtype=np.uint8)
BLOCK_BYTES = POOL.layout.block_bytes

block_lists = st.lists(st.integers(0, POOL.num_blocks - 1), unique=True)


@given(block_lists)
def test_equal_bytes_have_no_mismatch(blocks: list[int]) -> None:
    digests = POOL.digests(blocks)
    assert len(digests) == DIGEST_BYTES * len(blocks)
    assert mismatches(POOL, blocks, digests) == []


@given(block_lists.filter(bool), st.data())
def test_any_flipped_bit_is_found_in_its_block(blocks: list[int], data: st.DataObject) -> None:
    digests = POOL.digests(blocks)
    place = data.draw(st.integers(0, len(blocks) - 1))
    at, bit = data.draw(st.integers(0, BLOCK_BYTES - 1)), data.draw(st.integers(0, 7))
    POOL.array[blocks[place], at] ^= 1 << bit
    try:
        assert mismatches(POOL, blocks, digests) == [place]
    finally:
        POOL.array[blocks[place], at] ^= 1 << bit


@given(block_lists.filter(lambda blocks: len(blocks) > 1))
def test_blocks_in_the_wrong_order_are_mismatches(blocks: list[int]) -> None:
    digests = POOL.digests(blocks)
    assert mismatches(POOL, blocks[1:] + blocks[:1], digests) == list(range(len(blocks)))


@given(block_lists)
def test_the_wrong_number_of_digests_is_refused(blocks: list[int]) -> None:
    for wrong in (POOL.digests(blocks) + b"\0", POOL.digests(blocks) + bytes(DIGEST_BYTES)):
        with pytest.raises(BatonError) as info:
            mismatches(POOL, blocks, wrong)
        assert info.value.reason is Reason.DIGEST_MISMATCH


def test_digests_do_not_depend_on_the_position_of_a_block() -> None:
    copy = KvPool(POOL.layout, num_blocks=3)
    copy.array[2] = POOL.array[11]
    assert copy.digests([2]) == POOL.digests([11])
