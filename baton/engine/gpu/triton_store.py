"""The Triton kernel that writes new keys and values into their slots of the pool, rounded if the pool is of int8 or (`triton_int5`) int5.

Letters in shapes are those of `baton.engine.gpu.triton_attention`.
"""

import triton
import triton.language as tl
from torch import Tensor

from baton.engine.gpu import triton_int5
from baton.engine.gpu.attention import Layer, Packed, RoundedKv, parts_of

LEVELS = tl.constexpr(127.0)  # up to which a row is rounded
TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest scale
NEAREST = tl.constexpr(12582912.0)  # 1.5 · 2^23: a float32 of this size has no fractional digits


@triton.jit
def _rounded(x):
    """Rows `[HEADS, D]` as numbers up to LEVELS, and their scales `[HEADS, 1]`. Of a row that is not finite only the scale says so."""
    x = x.to(tl.float32)
    bad = tl.max((x != x).to(tl.int32), 1)
    scale = tl.maximum(tl.max(tl.abs(x), 1) / LEVELS, TINY)
    scale = tl.where(bad > 0, float("nan"), scale)[:, None]
    nearest = (x * (1 / scale) + NEAREST) - NEAREST
    return tl.where(nearest == nearest, nearest, 0.0), scale


@triton.jit
def _store_kernel(
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
    D_PAD: tl.constexpr,
    ROUNDED: tl.constexpr,
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
    d = tl.arange(0, D_PAD)[None, :]
    inside = (head < HEADS) & (d < D)
    x = tl.load(kv + token * kv_token + part * kv_part + head * kv_head + d, mask=inside, other=0.0)
    target = layer + slot // BLOCK * block_stride + part * part_stride + head * head_stride + slot % BLOCK * slot_stride + d
    if ROUNDED:
        x, scale = _rounded(x)
        spot = scales + slot // BLOCK * scale_block + part * scale_part + head * scale_head + slot % BLOCK
        tl.store(spot, scale, mask=head < HEADS)
        for behind in range(1, tail + 1):
            tl.store(spot + behind, tl.zeros([HEADS_PAD, 1], tl.float32), mask=head < HEADS)
    x = x.to(layer.dtype.element_ty)
    tl.store(target, x, mask=inside)
    nothing = tl.zeros([HEADS_PAD, D_PAD], x.dtype)
    for behind in range(1, tail + 1):
        tl.store(target + behind * slot_stride, nothing, mask=inside)


def store(kv: Tensor, layer: Layer, slots: Tensor, tails: Tensor, sources: Tensor | None = None) -> None:
    """Writes kv `[T, P, Hkv, D]` into one layer of the pool: token `sources[e]` into slot `slots[e]` = block · bs + offset; without
    `sources`, token e.

    The `tails[e]` slots after it in its block are zeroed. The span that begins a block must do that, so that the block's bytes depend only
    on its tokens.
    """
    if isinstance(layer, Packed):
        triton_int5.store(kv, layer, slots, tails, sources)
        return
    _, parts, heads, dim = kv.shape
    numbers, scales = parts_of(layer)
    _store_kernel[(len(slots), parts)](
        kv,
        numbers,
        scales,
        slots,
        tails,
        slots if sources is None else sources,
        *kv.stride()[:3],
        *numbers.stride()[:4],
        *scales.stride()[:3],
        HEADS=heads,
        HEADS_PAD=triton.next_power_of_2(heads),
        BLOCK=numbers.shape[3],
        D=dim,
        D_PAD=triton.next_power_of_2(dim),
        ROUNDED=isinstance(layer, RoundedKv),
        CHOSEN=sources is not None,
    )
