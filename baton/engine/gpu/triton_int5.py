"""Rows of int5 (`baton.engine.core.int5_rows`) in Triton: what attention reads, and the kernel that writes new keys and values.

Letters in shapes are those of `baton.engine.gpu.triton_attention`.
"""

import triton
import triton.language as tl
from torch import Tensor

from baton.engine.core.int5_rows import groups_of
from baton.engine.gpu.attention import Packed

TINY = tl.constexpr(1.1754943508222875e-38)  # a smaller step is none
NEAREST = tl.constexpr(12582912.0)  # 1.5 · 2^23: a float32 of this size has no fractional digits
NONE = tl.constexpr(0x7FC0)  # the bits of a bfloat16 that is no number


@triton.jit
def levels_of(row, d, inside):
    """Levels `d` of the rows at `row` as float32, 0 where they are not `inside`."""
    group = row + d // 32 * 20
    nibble = tl.load(group + d % 16, mask=inside, other=0).to(tl.int32) >> (d % 32 // 16 * 4) & 15
    fifth = tl.load(group + 16 + d % 32 // 8, mask=inside, other=0).to(tl.int32) >> (d % 8) & 1
    return (nibble - 16 * fifth).to(tl.float32)


@triton.jit
def _half(x):
    """The bits of a float32 as bfloat16, to nearest even."""
    bits = x.to(tl.uint32, bitcast=True)
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


@triton.jit
def _levels(x, inverse, inside):
    """Five bits each."""
    product = x * inverse
    within = tl.minimum(tl.maximum(tl.where(product == product, product, -16.0), -16.0), 15.0)
    return tl.where(inside, ((within + NEAREST) - NEAREST).to(tl.int32) & 31, 0)


@triton.jit
def _halves(source, group, i, mine, D: tl.constexpr):
    """The numbers of a group, `[HEADS, 16]` twice, and which of them there are."""
    d = group * 32 + i
    early, late = mine & (d < D), mine & (d + 16 < D)
    first = tl.load(source + d, mask=early, other=0.0).to(tl.float32)
    return first, tl.load(source + d + 16, mask=late, other=0.0).to(tl.float32), early, late


@triton.jit
def _pack_kernel(
    kv,
    layer,
    scales,
    slots,
    tails,
    sources,
    kv_token,
    kv_part,
    kv_head,
    block_stride,
    part_stride,
    head_stride,
    slot_stride,
    scale_block,
    scale_part,
    scale_head,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(slots + entry)
    tail = tl.load(tails + entry)
    token = entry
    if CHOSEN:
        token = tl.load(sources + entry)
    head = tl.arange(0, HEADS_PAD)[:, None]
    mine = head < HEADS
    i = tl.arange(0, 16)[None, :]
    source = kv + token * kv_token + part * kv_part + head * kv_head
    target = layer + slot // BLOCK * block_stride + part * part_stride + head * head_stride + slot % BLOCK * slot_stride
    spot = scales + slot // BLOCK * scale_block + part * scale_part + head * scale_head + slot % BLOCK
    least = tl.full([HEADS_PAD, 1], float("inf"), tl.float32)
    most = tl.full([HEADS_PAD, 1], float("-inf"), tl.float32)
    finite = tl.full([HEADS_PAD, 1], 1, tl.int32)
    for group in tl.static_range(GROUPS):
        first, second, early, late = _halves(source, group, i, mine, D)
        low = tl.minimum(tl.where(early, first, float("inf")), tl.where(late, second, float("inf")))
        high = tl.maximum(tl.where(early, first, float("-inf")), tl.where(late, second, float("-inf")))
        least, most = tl.minimum(least, tl.min(low, 1)[:, None]), tl.maximum(most, tl.max(high, 1)[:, None])
        good = ((tl.abs(first) < float("inf")) & (tl.abs(second) < float("inf"))).to(tl.int32)
        finite = tl.minimum(finite, tl.min(good, 1)[:, None])
    scale = tl.where(finite == 0, NONE, _half(tl.where(most >= -least, most, least) / -16.0 + 0.0)).to(tl.uint32)
    step = (scale << 16).to(tl.float32, bitcast=True)
    inverse = tl.where(tl.abs(step) < TINY, 0.0, 1 / step)
    tl.store(spot, step.to(tl.bfloat16), mask=mine)
    for group in tl.static_range(GROUPS):
        first, second, early, late = _halves(source, group, i, mine, D)
        one, other = _levels(first, inverse, early), _levels(second, inverse, late)
        place = target + group * 20
        tl.store(place + i, (one & 15 | (other & 15) << 4).to(tl.uint8), mask=mine & (i < 16))
        fifth = tl.sum((one >> 4) << i | (other >> 4) << (16 + i), 1)[:, None]
        for byte in tl.static_range(4):
            tl.store(place + 16 + byte, (fifth >> 8 * byte & 255).to(tl.uint8), mask=mine)
    d = tl.arange(0, 32)[None, :]
    for behind in range(1, tail + 1):
        tl.store(spot + behind, tl.zeros([HEADS_PAD, 1], tl.bfloat16), mask=mine)
        for group in tl.static_range(GROUPS):
            there = target + behind * slot_stride + group * 20
            tl.store(there + d, tl.zeros([HEADS_PAD, 32], tl.uint8), mask=mine & (d < 20))


def store(kv: Tensor, layer: Packed, slots: Tensor, tails: Tensor, sources: Tensor | None = None) -> None:
    """See `baton.engine.gpu.triton_store.store`."""
    _, parts, heads, dim = kv.shape
    _pack_kernel[(len(slots), parts)](
        kv,
        layer.rows,
        layer.scales,
        slots,
        tails,
        slots if sources is None else sources,
        *kv.stride()[:3],
        *layer.rows.stride()[:4],
        *layer.scales.stride()[:3],
        HEADS=heads,
        HEADS_PAD=triton.next_power_of_2(heads),
        BLOCK=layer.rows.shape[3],
        D=dim,
        GROUPS=groups_of(dim),
        CHOSEN=sources is not None,
    )
