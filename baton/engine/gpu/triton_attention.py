"""Attention over the paged pool in Triton: for any block size, grouped or multi-query heads, sliding windows, soft-capped scores, and the
one-vector KV of multi-head latent attention. The pool's numbers are of the model's type, or `RoundedKv`: then a score is multiplied by its
key's scale, and a weight by its value's. So it is if they are `Packed`: levels become numbers as they are read.

Kernels take the strides of one layer's slice of the pool, `[N, P, Hkv, bs, D]`: nothing is copied, and any memory order with D innermost
works. A key after a sequence's last token is never loaded, so whatever is there, NaN included, has no effect.

Decoding reads every key once and is bound by memory, so it is split over the keys until the device is full; a second kernel merges the
parts (Flash-Decoding, Dao et al. 2023). The softmax is the online one of Milakov and Gimelshein 2018, with base-2 exponentials.

Letters in shapes: T tokens of the batch, B sequences, S seats, M blocks per sequence, bs block size, Hq query heads, Hkv key/value heads,
G = Hq / Hkv, D head dim, Dv that of values, P parts (2: keys and values; 1: one vector that is both, its first Dv numbers being the value),
N blocks of the pool.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.core.int5_rows import groups_of
from baton.engine.gpu.attention import Layer, Packed, RoundedKv, parts_of
from baton.engine.gpu.device import capability
from baton.engine.gpu.tiles import HeadShape, decode_tile, prefill_tile
from baton.engine.gpu.triton_int5 import levels_of
from baton.engine.model.checkpoint import LayerAttention

LOG2_E = tl.constexpr(1.4426950408889634)
MOST_SPLITS = 64
PROGRAMS_PER_PROCESSOR = 4  # of the decode kernel, resident on one streaming multiprocessor
MERGE_WIDTH = 128  # numbers of an output head that one program merges


@triton.jit
def _tanh(x):
    return 1 - 2 / (1 + tl.exp2(x * (2 * LOG2_E)))


@triton.jit
def _keys_at(base, table, pos, seen, kv_head, block_stride, head_stride, slot_stride, BLOCK: tl.constexpr):
    """Pointers `[KEYS, 1]` to what a head has in the pool at the positions `pos`."""
    block = tl.load(table + pos // BLOCK, mask=seen, other=0).to(tl.int64)
    return base + (block * block_stride + kv_head * head_stride + (pos % BLOCK) * slot_stride)[:, None]


@triton.jit
def _read(at, d, inside, dtype, GROUPS: tl.constexpr):
    """Numbers `d` of what is at `at`; GROUPS of a row of int5, else 0."""
    if GROUPS > 0:
        return levels_of(at, d, inside).to(dtype)
    else:
        return tl.load(at + d, mask=inside, other=0).to(dtype)


@triton.jit
def _scales_at(base, table, pos, seen, kv_head, block_stride, head_stride, BLOCK: tl.constexpr):
    """`[KEYS]`, of what a head has in the pool at the positions `pos`."""
    block = tl.load(table + pos // BLOCK, mask=seen, other=0).to(tl.int64)
    return tl.load(base + block * block_stride + kv_head * head_stride + pos % BLOCK, mask=seen, other=0.0)


@triton.jit
def _decode_kernel(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    tables,
    seats,
    lens,
    out,
    parts,
    weights,
    scale,
    softcap,
    window,
    q_token,
    q_head,
    block_stride,
    head_stride,
    slot_stride,
    table_stride,
    out_token,
    scale_block,
    scale_head,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    DR: tl.constexpr,
    DR_PAD: tl.constexpr,
    SHARED: tl.constexpr,
    ROUNDED: tl.constexpr,
    GROUPS: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    b = tl.program_id(0)
    kv_head = tl.program_id(1) // HEAD_TILES
    split = tl.program_id(2)
    length = tl.load(lens + b)
    table = tables + tl.load(seats + b) * table_stride
    g = (tl.program_id(1) % HEAD_TILES) * GROUP_TILE + tl.arange(0, GROUP_TILE)
    mine = (g < GROUP)[:, None]
    head = (kv_head * GROUP + g)[:, None]  # [GROUP_TILE, 1]
    d = tl.arange(0, DV_PAD)[None, :]
    query = q + b * q_token + head * q_head
    q_value = tl.load(query + d, mask=mine & (d < DV), other=0.0)
    r = tl.arange(0, DR_PAD)[None, :]
    if DR > 0:
        q_rest = tl.load(query + DV + r, mask=mine & (r < DR), other=0.0)

    first = length * 0
    if WINDOWED:
        first = tl.maximum(length - window, 0)
    share = tl.cdiv(tl.cdiv(length - first, KEYS), SPLITS) * KEYS
    begin = first + split * share
    end = tl.minimum(begin + share, length)
    top = tl.full([GROUP_TILE], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_TILE], tl.float32)
    acc = tl.zeros([GROUP_TILE, DV_PAD], tl.float32)
    for at in range(begin, end, KEYS):
        pos = at + tl.arange(0, KEYS)
        seen = pos < end
        key = _keys_at(keys, table, pos, seen, kv_head, block_stride, head_stride, slot_stride, BLOCK)
        k = _read(key, d, seen[:, None] & (d < DV), q_value.dtype, GROUPS)
        scores = tl.dot(q_value, tl.trans(k), input_precision="ieee")
        if DR > 0:
            k_rest = _read(key, DV + r, seen[:, None] & (r < DR), q_value.dtype, GROUPS)
            scores += tl.dot(q_rest, tl.trans(k_rest), input_precision="ieee")
        scores *= scale
        if ROUNDED:
            scores *= _scales_at(key_scales, table, pos, seen, kv_head, scale_block, scale_head, BLOCK)[None, :]
        if CAPPED:
            scores = softcap * _tanh(scores / softcap)
        scores = tl.where(seen[None, :], scores * LOG2_E, float("-inf"))
        # Every piece begins with a key that is seen, so the maximum is finite from the first one on.
        higher = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp2(scores - higher[:, None])
        kept = tl.exp2(top - higher)
        total = total * kept + tl.sum(p, 1)
        if SHARED:
            v = k
        else:
            value = _keys_at(values, table, pos, seen, kv_head, block_stride, head_stride, slot_stride, BLOCK)
            v = _read(value, d, seen[:, None] & (d < DV), q_value.dtype, GROUPS)
        if ROUNDED:
            p *= _scales_at(value_scales, table, pos, seen, kv_head, scale_block, scale_head, BLOCK)[None, :]
        acc = acc * kept[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        top = higher

    some = total > 0  # a split without keys contributes nothing
    total = tl.where(some, total, 1.0)
    answer = acc / total[:, None]
    if SPLITS == 1:
        tl.store(out + b * out_token + head * DV + d, answer.to(out.dtype.element_ty), mask=mine & (d < DV))
    else:
        row = (b * tl.num_programs(1) // HEAD_TILES * GROUP + head) * SPLITS + split  # [GROUP_TILE, 1]
        tl.store(parts + row * DV + d, answer, mask=mine & (d < DV))
        weight = tl.where(some, top + tl.log2(total), float("-inf"))
        tl.store(weights + row, weight[:, None], mask=mine)


@triton.jit
def _merge_kernel(parts, weights, out, out_token, heads, SPLITS: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr):
    b = tl.program_id(0)
    head = tl.program_id(1)
    d = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    rows = (b * heads + head) * SPLITS + tl.arange(0, SPLITS)
    weight = tl.load(weights + rows)  # base-2 logarithms
    weight = tl.exp2(weight - tl.max(weight, 0))
    part = tl.load(parts + rows[:, None] * DV + d[None, :], mask=(d < DV)[None, :], other=0.0)
    merged = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + b * out_token + head * DV + d, merged.to(out.dtype.element_ty), mask=d < DV)


@triton.jit(do_not_specialize=["base"])
def _prefill_kernel(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    tables,
    seats,
    lens,
    firsts,
    out,
    base,
    scale,
    softcap,
    window,
    q_token,
    q_head,
    block_stride,
    head_stride,
    slot_stride,
    table_stride,
    out_token,
    scale_block,
    scale_head,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    DR: tl.constexpr,
    DR_PAD: tl.constexpr,
    SHARED: tl.constexpr,
    ROUNDED: tl.constexpr,
    GROUPS: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    offset = tl.program_id(0) * QUERIES
    head = tl.program_id(1)
    b = base + tl.program_id(2)
    token = tl.load(firsts + b)
    n = tl.load(firsts + b + 1) - token
    if offset < n:
        length = tl.load(lens + b)
        start = length - n
        table = tables + tl.load(seats + b) * table_stride
        kv_head = head // GROUP
        i = offset + tl.arange(0, QUERIES)
        mine = (i < n)[:, None]
        position = start + i  # of each query
        d = tl.arange(0, DV_PAD)[None, :]
        row = (token + i).to(tl.int64)[:, None]
        query = q + row * q_token + head * q_head
        q_value = tl.load(query + d, mask=mine & (d < DV), other=0.0)
        r = tl.arange(0, DR_PAD)[None, :]
        if DR > 0:
            q_rest = tl.load(query + DV + r, mask=mine & (r < DR), other=0.0)

        begin = length * 0
        if WINDOWED:
            begin = tl.maximum(start + offset - window + 1, 0)
        end = tl.minimum(start + offset + QUERIES, length)
        top = tl.full([QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        acc = tl.zeros([QUERIES, DV_PAD], tl.float32)
        for at in range(begin, end, KEYS):
            pos = at + tl.arange(0, KEYS)
            seen = pos < end
            key = _keys_at(keys, table, pos, seen, kv_head, block_stride, head_stride, slot_stride, BLOCK)
            k = _read(key, d, seen[:, None] & (d < DV), q_value.dtype, GROUPS)
            scores = tl.dot(q_value, tl.trans(k), input_precision="ieee")
            if DR > 0:
                k_rest = _read(key, DV + r, seen[:, None] & (r < DR), q_value.dtype, GROUPS)
                scores += tl.dot(q_rest, tl.trans(k_rest), input_precision="ieee")
            scores *= scale
            if ROUNDED:
                scores *= _scales_at(key_scales, table, pos, seen, kv_head, scale_block, scale_head, BLOCK)[None, :]
            if CAPPED:
                scores = softcap * _tanh(scores / softcap)
            visible = seen[None, :] & (pos[None, :] <= position[:, None])
            if WINDOWED:
                visible = visible & (pos[None, :] > position[:, None] - window)
            scores = tl.where(visible, scores * LOG2_E, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            finite = tl.where(higher == float("-inf"), 0.0, higher)  # a query whose window has not begun yet
            p = tl.exp2(scores - finite[:, None])
            kept = tl.exp2(top - finite)
            total = total * kept + tl.sum(p, 1)
            if SHARED:
                v = k
            else:
                value = _keys_at(values, table, pos, seen, kv_head, block_stride, head_stride, slot_stride, BLOCK)
                v = _read(value, d, seen[:, None] & (d < DV), q_value.dtype, GROUPS)
            if ROUNDED:
                p *= _scales_at(value_scales, table, pos, seen, kv_head, scale_block, scale_head, BLOCK)[None, :]
            acc = acc * kept[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
            top = higher
        # Rows beyond the span may see keys or none: they are not written.
        answer = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out + row * out_token + head * DV + d, answer.to(out.dtype.element_ty), mask=mine & (d < DV))


@triton.jit
def _flatten_kernel(tables, seats, firsts, out, table_stride, WIDTH: tl.constexpr):
    b = tl.program_id(0)
    begin = tl.load(firsts + b)
    count = tl.load(firsts + b + 1) - begin
    i = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    x = tl.load(tables + tl.load(seats + b) * table_stride + i, mask=i < count)
    tl.store(out + begin + i, x, mask=i < count)


def flatten_tables(tables: Tensor, seats: Tensor, firsts: Tensor, most: int, out: Tensor) -> None:
    """Writes the tables `[S, M]` of the sequences in `seats` `[B]` one after the other: the first blocks of sequence b go to
    `out[firsts[b] : firsts[b + 1]]`.

    `most`: the largest number of blocks of one sequence.
    """
    _flatten_kernel[(len(seats), triton.cdiv(most, 1024))](tables, seats, firsts, out, tables.stride(0), WIDTH=1024)


def splits(sequences: int, kv_heads: int, processors: int) -> int:
    """The number of programs, a power of two, over which the keys of one sequence and head are split, so that the whole device has work.

    It depends on nothing that changes from step to step, so that a captured launch stays correct.
    """
    wanted = PROGRAMS_PER_PROCESSOR * processors // max(1, sequences * kv_heads)
    return min(MOST_SPLITS, 1 << max(0, wanted.bit_length() - 1))


def decode(q: Tensor, layer: Layer, tables: Tensor, seats: Tensor, lens: Tensor, how: LayerAttention, out: Tensor, splits: int) -> None:
    """One query per sequence, q `[B, Hq, D]`, against its `lens[b]` ≥ 1 keys, the last of which is its own; into out `[B, Hq, Dv]`.

    `tables` `[S, M]` int32, in which sequence b has row `seats[b]`; `out` is contiguous within a token.
    """
    (batch, heads, _), kv_heads, dv = q.shape, parts_of(layer)[0].shape[2], out.shape[2]
    group = heads // kv_heads
    shape = _shape(q, layer, dv)
    tile = decode_tile(group, _head(q, shape), capability(q.device))
    head_tiles = triton.cdiv(group, tile.rows)
    parts = q.new_empty((batch, heads, splits, dv) if splits > 1 else 0, dtype=torch.float32)
    weights = q.new_empty((batch, heads, splits) if splits > 1 else 0, dtype=torch.float32)
    _decode_kernel[(batch, kv_heads * head_tiles, splits)](
        q,
        *_pointers(layer),
        tables,
        seats,
        lens,
        out,
        parts,
        weights,
        *_how(how, q),
        *_strides(q, layer, tables, out),
        GROUP_TILE=tile.rows,
        HEAD_TILES=head_tiles,
        SPLITS=splits,
        KEYS=tile.keys,
        **shape,
        **_kind(how),
        num_warps=tile.warps,
        num_stages=2,
    )
    if splits > 1:
        width = min(MERGE_WIDTH, triton.next_power_of_2(dv))
        grid = (batch, heads, triton.cdiv(dv, width))
        _merge_kernel[grid](parts, weights, out, out.stride(0), heads, SPLITS=splits, DV=dv, WIDTH=width)


class Queries(NamedTuple):
    """The queries of a step's prefills: those of the sequences from `base` on."""

    firsts: Tensor  # [B + 1] int32, the first row of each sequence
    base: int
    longest: int  # the largest number of queries of one sequence


def prefill(
    q: Tensor,
    layer: Layer,
    tables: Tensor,
    seats: Tensor,
    lens: Tensor,
    queries: Queries,
    how: LayerAttention,
    out: Tensor,
) -> None:
    """Attends causally from several queries of a sequence, which belong to the last of its `lens[b]` keys. Sequence b has the rows
    `firsts[b] : firsts[b + 1]` of q `[T, Hq, D]` and writes the same rows of out `[T, Hq, Dv]`. Otherwise as `decode`.
    """
    firsts, base, longest = queries
    heads, dv = q.shape[1], out.shape[2]
    shape = _shape(q, layer, dv)
    tile = prefill_tile(_head(q, shape), capability(q.device))
    _prefill_kernel[(triton.cdiv(longest, tile.rows), heads, len(seats) - base)](
        q,
        *_pointers(layer),
        tables,
        seats,
        lens,
        firsts,
        out,
        base,
        *_how(how, q),
        *_strides(q, layer, tables, out),
        QUERIES=tile.rows,
        KEYS=tile.keys,
        **shape,
        **_kind(how),
        num_warps=tile.warps,
        num_stages=2,
    )


def _how(how: LayerAttention, q: Tensor) -> tuple[float, float, int]:
    return q.shape[2] ** -0.5 if how.scale is None else how.scale, how.softcap or 0.0, how.window or 0


def _kind(how: LayerAttention) -> dict[str, bool]:
    return {"CAPPED": how.softcap is not None, "WINDOWED": how.window is not None}


def _pointers(layer: Layer) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    numbers, scales = parts_of(layer)
    return numbers, numbers[:, -1], scales, scales[:, -1]


def _strides(q: Tensor, layer: Layer, tables: Tensor, out: Tensor) -> tuple[int, ...]:
    numbers, scales = parts_of(layer)
    block, _, head, slot, _ = numbers.stride()
    return q.stride(0), q.stride(1), block, head, slot, tables.stride(0), out.stride(0), scales.stride(0), scales.stride(2)


def _head(q: Tensor, shape: dict[str, int]) -> HeadShape:
    rest, packed = shape["DR_PAD"] if shape["DR"] else 0, shape["GROUPS"] > 0
    return HeadShape(shape["DV_PAD"], rest, bool(shape["SHARED"]), q.element_size(), packed or bool(shape["ROUNDED"]), packed)


def _shape(q: Tensor, layer: Layer, dv: int) -> dict[str, int]:
    """A key consists of its first Dv numbers, which may also be the value, and DR others."""
    rest, (_, parts, kv_heads, block, _) = q.shape[2] - dv, parts_of(layer)[0].shape
    return {
        "GROUP": q.shape[1] // kv_heads,
        "BLOCK": block,
        "DV": dv,
        "DV_PAD": max(16, triton.next_power_of_2(dv)),
        "DR": rest,
        "DR_PAD": max(16, triton.next_power_of_2(rest)),
        "SHARED": parts == 1,
        "ROUNDED": isinstance(layer, RoundedKv | Packed),
        "GROUPS": groups_of(q.shape[2]) if isinstance(layer, Packed) else 0,
    }
