"""Rows of int4 (`baton.engine.core.int4_rows`) in Triton: what attention reads, and the kernel that writes new keys and values.

Letters in shapes are those of `baton.engine.gpu.triton_attention`.
"""

import triton
import triton.language as tl
from torch import Tensor

from baton.engine.core.int4_rows import groups_of
from baton.engine.gpu.attention import Packed

TINY = tl.constexpr(1.1754943508222875e-38)  # a smaller step is none
NEAREST = tl.constexpr(12582912.0)  # 1.5 · 2^23: a float32 of this size has no fractional digits
NONE = tl.constexpr(0x7FC0)  # the bits of a bfloat16 that is no number


@triton.jit
def numbers_of(row, d, inside, GROUPS: tl.constexpr):
    """Numbers `d` of the rows at `row` as float32, 0 where they are not `inside`. A row has GROUPS groups."""
    level = tl.load(row + d // 32 * 16 + d % 16, mask=inside, other=0).to(tl.int32) >> (d % 32 // 16 * 4) & 15
    place = (row + GROUPS * 16 + d // 32 * 4).to(tl.pointer_type(tl.uint32))
    factors = tl.load(place, mask=inside, other=0)
    scale, shift = factors & 0xFFFF0000, factors << 16
    return level.to(tl.float32) * scale.to(tl.float32, bitcast=True) + shift.to(tl.float32, bitcast=True)


@triton.jit
def _half(x):
    """The bits of a float32 as bfloat16, to nearest even."""
    bits = x.to(tl.uint32, bitcast=True)
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


@triton.jit
def _levels(x, low, inverse, inside):
    within = tl.minimum(tl.maximum((x - low) * inverse, 0.0), 15.0)
    level = ((within + NEAREST) - NEAREST).to(tl.int32)
    return tl.where(inside & (within == within), level, 0)


@triton.jit
def _pack_kernel(
    kv,
    layer,
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
    for group in tl.static_range(GROUPS):
        d = group * 32 + i
        early, late = mine & (d < D), mine & (d + 16 < D)
        first = tl.load(source + d, mask=early, other=0.0).to(tl.float32)
        second = tl.load(source + d + 16, mask=late, other=0.0).to(tl.float32)
        least = tl.minimum(tl.where(early, first, float("inf")), tl.where(late, second, float("inf")))
        most = tl.maximum(tl.where(early, first, float("-inf")), tl.where(late, second, float("-inf")))
        least, most = tl.min(least, 1)[:, None] + 0.0, tl.max(most, 1)[:, None]
        bad = ((tl.abs(first) < float("inf")) & (tl.abs(second) < float("inf"))).to(tl.int32)
        bad = tl.min(bad, 1)[:, None] == 0
        low = tl.where(bad, NONE, _half(least)).to(tl.uint32)
        shift = (low << 16).to(tl.float32, bitcast=True)
        scale = tl.where(bad, NONE, _half((most - shift) / 15.0)).to(tl.uint32)
        step = (scale << 16).to(tl.float32, bitcast=True)
        inverse = tl.where(step < TINY, 0.0, 1 / step)
        packed = _levels(first, shift, inverse, early) | _levels(second, shift, inverse, late) << 4
        tl.store(target + group * 16 + i, packed.to(tl.uint8), mask=mine & (i < 16))
        place = (target + GROUPS * 16 + group * 4).to(tl.pointer_type(tl.uint32))
        tl.store(place, low | scale << 16, mask=mine)
        for behind in range(1, tail + 1):
            there = target + behind * slot_stride
            tl.store(there + group * 16 + i, tl.zeros([HEADS_PAD, 16], tl.uint8), mask=mine & (i < 16))
            place = (there + GROUPS * 16 + group * 4).to(tl.pointer_type(tl.uint32))
            tl.store(place, tl.zeros([HEADS_PAD, 1], tl.uint32), mask=mine)


def store(kv: Tensor, layer: Packed, slots: Tensor, tails: Tensor, sources: Tensor | None = None) -> None:
    """See `baton.engine.gpu.triton_store.store`."""
    _, parts, heads, dim = kv.shape
    _pack_kernel[(len(slots), parts)](
        kv,
        layer.rows,
        slots,
        tails,
        slots if sources is None else sources,
        *kv.stride()[:3],
        *layer.rows.stride()[:4],
        HEADS=heads,
        HEADS_PAD=triton.next_power_of_2(heads),
        BLOCK=layer.rows.shape[3],
        D=dim,
        GROUPS=groups_of(dim),
        CHOSEN=sources is not None,
    )
