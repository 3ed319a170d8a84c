"""The Triton kernel between two steps of a chain (`baton.engine.gpu.chain`): what one has drawn is what the next one computes."""

import triton
import triton.language as tl
from torch import Tensor

from baton.engine.gpu.inputs import Following


@triton.jit
def _advance_kernel(
    winners,
    found,
    counts,
    keys,
    key,
    tokens,
    positions,
    slots,
    tails,
    lens,
    seats,
    limits,
    tables,
    table_stride,
    dummy,
    SIZE: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.arange(0, PAD)
    mine = i < SIZE
    token = tl.load(winners + i, mask=mine, other=0)
    count = tl.load(counts + i, mask=mine, other=0)
    tl.store(found + count * SIZE + i, token, mask=mine)
    tl.store(counts + i, count + 1, mask=mine)
    tl.store(key + i, tl.load(keys + (count + 1) * SIZE + i, mask=mine, other=0), mask=mine)
    tl.store(tokens + i, token, mask=mine)
    pos = tl.load(positions + i, mask=mine, other=0) + 1
    tl.store(positions + i, pos, mask=mine)
    scratch = tl.load(tables + dummy * table_stride).to(tl.int64) * BLOCK
    inside = mine & (pos <= tl.load(limits + i, mask=mine, other=0))
    table = tables + tl.load(seats + i, mask=mine, other=0).to(tl.int64) * table_stride
    block = tl.load(table + pos // BLOCK, mask=inside, other=0).to(tl.int64)
    tl.store(slots + i, tl.where(inside, block * BLOCK + pos % BLOCK, scratch), mask=mine)
    tl.store(tails + i, tl.where(inside & (pos % BLOCK == 0), BLOCK - 1, 0), mask=mine)
    tl.store(lens + i, tl.where(inside, pos + 1, 1).to(tl.int32), mask=mine)


def advance(
    winners: Tensor, found: Tensor, counts: Tensor, keys: Tensor, key: Tensor, following: Following, tables: Tensor, block_size: int
) -> None:
    """Puts what was drawn, `winners` `[S]`, into row `counts[s]` of `found` `[steps, S]`, and before the next step: its token, position,
    slot, tail, length, and noise `key` `[S]`, which is the next row of `keys` `[steps + 1, S]`. Beyond its limit a sequence has no block,
    and writes into that of the last row of `tables`, the dummy's."""
    size = len(winners)
    _advance_kernel[(1,)](
        winners,
        found,
        counts,
        keys,
        key,
        *following,
        tables,
        tables.stride(0),
        len(tables) - 1,
        SIZE=size,
        PAD=triton.next_power_of_2(size),
        BLOCK=block_size,
        num_warps=1,
    )
