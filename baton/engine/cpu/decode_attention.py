"""Compiled attention of decodes, which reads the pool's blocks in place, and the compiled store of new keys and values.

Numbers in the pool are of the model's type, or (`baton.engine.cpu.kv_int8`) rounded, with a scale for each token of a head: then a score is
multiplied by its key's scale, and a weight by its value's, so that no number is multiplied one by one. In rows of int5
(`baton.engine.cpu.kv_int5`) levels become numbers in registers.

Letters in shapes are those of `baton.engine.model.attention`.
"""

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload
from torch import Tensor

from baton.engine.core.int5_rows import GROUP, GROUP_BYTES
from baton.engine.core.pages import LINE
from baton.engine.cpu import int5_dots
from baton.engine.cpu.dots import KEYS, QUERIES, VECTORS, add_values, score_keys
from baton.engine.cpu.int5_dots import add_group, pack_row, score_rows
from baton.engine.cpu.kernel import INT, REAL, int64s, kernel, numbers
from baton.engine.cpu.primitives import SUMS, ZERO, prefetch, put, round_row, share, team, wide
from baton.engine.cpu.softmax import weigh
from baton.engine.cpu.tile import LANES
from baton.engine.model.attention import Decodes, KvLayer, PagedKv
from baton.engine.model.checkpoint import LayerAttention

EVERYTHING = 1 << 62  # keys that a query without a window sees
AHEAD = 32  # keys between the one in use and the one being prefetched: blocks are scattered, so no processor can predict the next
VALUES = 16  # that are added before the sums are written
NEAR = 1 << 17  # bytes that the second cache of a core holds beside others


def attend_in_place(paged: PagedKv, layer: int, q: Tensor, kv: Tensor, out: Tensor, decodes: Decodes, how: LayerAttention) -> None:
    """An `AttendInPlace`: every key and value is read once, in place, for all queries that share it."""
    window = EVERYTHING if how.window is None else how.window
    scale = q.shape[2] ** -0.5 if how.scale is None else how.scale
    softcap = how.softcap or 0.0
    _attend(
        paged.pool, in_rows(q), in_rows(kv), out, decodes.index, decodes.size, decodes.keys, paged.value_dim, layer, window, softcap, scale
    )


def store(kv: Tensor, kv_layer: KvLayer, slots: Tensor) -> None:
    """See `baton.engine.model.attention.store`."""
    _store(in_rows(kv), kv_layer.slots, slots)


def has_any(scales: Any) -> bool:
    """Whether this (Numba's) type is that of scales and not of None."""
    return not isinstance(scales, types.NoneType)


def is_packed(pool: Any) -> bool:
    """Whether this (Numba's) type is that of rows of int5."""
    return bool(pool.dtype == types.uint8)


def in_rows(x: Tensor) -> Tensor:
    """x with each of its rows contiguous."""
    return x if x[0].is_contiguous() else x.contiguous()


@njit
def _whole(count):
    return -(-count // KEYS) * KEYS


@njit
def _padded(dim):
    return -(-dim // GROUP) * GROUP


def width_of(pool, dim):
    """The elements of a row of so many numbers."""


@overload(width_of)
def _width_of(pool, dim):
    return (lambda pool, dim: -(-dim // GROUP) * GROUP_BYTES) if is_packed(pool) else lambda pool, dim: dim


@njit
def _find_keys(table, first, count, block_size, where, width, at):
    """`at[i]`: where the key at position `first + i` is. The last one is repeated up to a multiple of KEYS; the repeats get no weight."""
    pool_stride, layer, rows = where
    i, block, slot = 0, first // block_size, first % block_size
    while i < count:
        start = table[block] * pool_stride + layer * rows * block_size * width
        for offset in range(slot, min(block_size, slot + count - i)):
            at[i] = start + offset * width
            i += 1
        block, slot = block + 1, 0
    for j in range(count, _whole(count)):
        at[j] = at[count - 1]


@njit(fastmath=SUMS, error_model="numpy")
def _scale_queries(rows, dim, scale, query):
    for g in range(len(query)):
        row = rows[g * dim :]
        for d in range(dim):
            query[g, d] = wide(row[d]) * scale


@njit
def _fetch(pool, at, head, width, first, last):
    """Prefetches keys or values."""
    for i in range(first, last):
        for d in range(0, width, LINE // pool.itemsize):
            prefetch(pool, at[i] + head + d)


def _score(pool, at, head, counts, dim, query, scores):
    """q kᵀ: each key is read once from memory, for all queries that share it. `counts`: of the keys, and of those that are prefetched."""


@overload(_score)
def _score_by(pool, at, head, counts, dim, query, scores):
    def plain(pool, at, head, counts, dim, query, scores):
        (group, query_stride), score_stride = query.shape, scores.shape[1]
        for i in range(0, _whole(counts[0]), KEYS):
            _fetch(pool, at, head, dim, i + AHEAD, min(i + AHEAD + KEYS, counts[1]))
            for g in range(0, group, QUERIES):
                score_keys(pool, at[i:], head, query[g], query_stride, min(QUERIES, group - g), dim, scores[g, i:], score_stride)

    def packed(pool, at, head, counts, dim, query, scores):
        (group, query_stride), score_stride, groups, width = query.shape, scores.shape[1], -(-dim // GROUP), width_of(pool, dim)
        for i in range(0, _whole(counts[0]), int5_dots.KEYS):
            _fetch(pool, at, head, width, i + AHEAD, min(i + AHEAD + int5_dots.KEYS, counts[1]))
            for g in range(0, group, int5_dots.QUERIES):
                score_rows(
                    pool, at[i:], head, groups, query[g], query_stride, min(int5_dots.QUERIES, group - g), scores[g, i:], score_stride
                )

    return packed if is_packed(pool) else plain


def _sum_values(pool, at, head, counts, dims, weights, sums):
    """Each value is read once from memory, for all queries that share it. `counts`: as in `_score`; `dims`: numbers of a row, of which the
    first are the value, and how many."""


@overload(_sum_values)
def _sum_values_by(pool, at, head, counts, dims, weights, sums):
    def plain(pool, at, head, counts, dims, weights, sums):
        (group, sum_stride), weight_stride, dim = sums.shape, weights.shape[1], dims[1]
        sums[:] = ZERO
        for i in range(0, counts[0], VALUES):
            _fetch(pool, at, head, dim, i + AHEAD, min(i + AHEAD + VALUES, counts[1]))
            some, d = min(VALUES, counts[0] - i), 0
            while d < dim:
                vectors = min(VECTORS, (dim - d) // LANES)
                for g in range(0, group, QUERIES):
                    rows = min(QUERIES, group - g)
                    add_values(pool, at[i:], head + d, some, weights[g, i:], weight_stride, rows, vectors, dim - d, sums[g, d:], sum_stride)
                d += max(vectors, 1) * LANES

    def packed(pool, at, head, counts, dims, weights, sums):
        (group, sum_stride), weight_stride, width = sums.shape, weights.shape[1], width_of(pool, dims[0])
        sums[:] = ZERO
        for i in range(0, counts[0], VALUES):
            _fetch(pool, at, head, width, i + AHEAD, min(i + AHEAD + VALUES, counts[1]))
            some = min(VALUES, counts[0] - i)
            for part in range(-(-dims[1] // GROUP)):
                for g in range(0, group, int5_dots.QUERIES):
                    rows = min(int5_dots.QUERIES, group - g)
                    add_group(pool, at[i:], head, part, some, weights[g, i:], weight_stride, rows, sums[g, part * GROUP :], sum_stride)

    return packed if is_packed(pool) else plain


@njit(fastmath=SUMS, error_model="numpy")
def _divide(sums, dim, totals, out):
    for g in range(len(sums)):
        for d in range(dim):
            put(out, g * dim + d, sums[g, d] / totals[g])


def _scale(scores, scales, table, first, count, where, room):
    """Multiplies by the scales of the keys or values from position `first` on, if they have any. `where`: where those of the head begin in
    block 0 of the pool, the stride of blocks, and tokens of a block; `room`: for as many."""


@overload(_scale)
def _scale_by(scores, scales, table, first, count, where, room):
    def scale(scores, scales, table, first, count, where, room):
        start, scales_stride, block_size = where
        i, block, slot = 0, first // block_size, first % block_size
        while i < count:
            base, some = table[block] * scales_stride + start + slot, min(block_size - slot, count - i)
            for j in range(some):
                room[i + j] = wide(scales[base + j])
            i, block, slot = i + some, block + 1, 0
        for g in range(len(scores)):
            for i in range(count):
                scores[g, i] *= room[i]

    return scale if has_any(scales) else lambda scores, scales, table, first, count, where, room: None


def _fetch_scales(scales, table, first, count, where):
    """Prefetches what `_scale` will read: a line or two in each block, which no processor can predict."""


@overload(_fetch_scales)
def _fetch_scales_of(scales, table, first, count, where):
    def fetch(scales, table, first, count, where):
        start, scales_stride, block_size = where
        for block in range(first // block_size, (first + count - 1) // block_size + 1):
            for slot in range(0, block_size, LINE // 4):
                prefetch(scales, table[block] * scales_stride + start + slot)

    return fetch if has_any(scales) else lambda scales, table, first, count, where: None


def keep(pool, scales, numbers, slot, spot):
    """Stores a key or a value at `slot`: as it is, or rounded and its scale at `spot`."""


@overload(keep)
def _keep_in(pool, scales, numbers, slot, spot):
    def as_it_is(pool, scales, numbers, slot, spot):
        pool[slot : slot + len(numbers)] = numbers

    def rounded(pool, scales, numbers, slot, spot):
        scales[spot] = round_row(numbers, 0, pool[slot : slot + len(numbers)])

    def packed(pool, scales, numbers, slot, spot):
        put(scales, spot, pack_row(numbers, pool, slot))

    return packed if is_packed(pool) else rounded if has_any(scales) else as_it_is


@njit
def _store_new(pool, scales, new_rows, token, keys, head, shape, where):
    """Stores the key and the value of a token for one head in their slots, and those of the tokens before it in this step: other threads
    may compute these, and they may be in other blocks. They store the same bytes."""
    (positions, before, table), (scales_stride, first, rows, kv_heads), (block_size, dim, head_size) = where, shape[0], shape[1]
    (kv, kv_stride), (at, seen) = new_rows, keys
    while token >= 0 and seen >= 0:
        slot, offset = at[seen], positions[token] % block_size
        for row in range(head, rows, kv_heads):
            new = token * kv_stride + row * dim
            spot = table[positions[token] // block_size] * scales_stride + (first + row) * block_size + offset
            keep(pool, scales, kv[new : new + dim], slot + row * head_size, spot)
        token, seen = before[token], seen - 1


@njit
def attend_tokens(pool, scales, given, places, shape, how):
    """The first `size` tokens. A token's key and value are stored in their slot; then its query sees the slots up to its own, or those in
    its window, and no others. Tokens of one sequence are computed one after the other for each head: the first brings its keys and values
    into the core's cache."""
    (q, q_stride, kv, kv_stride, out), (index, size), (window, softcap, scale) = given, places, how
    (pool_stride, scales_stride, layer), (parts, heads, kv_heads, block_size, dim, value_dim) = shape
    positions, bases, before, tables = index[:size], index[size : 2 * size], index[2 * size : 3 * size], index[3 * size :]
    width, group, rows = width_of(pool, dim), heads // kv_heads, parts * kv_heads
    head_size = block_size * width
    most = _whole(min(window, positions.max() + 1))
    at = np.empty(most, np.int64)  # where the keys of a sequence for head 0 begin in the pool
    query = np.zeros((group, _padded(dim)), np.float32)
    scores, factors = np.empty((group, most), np.float32), np.empty(0 if scales is None else most, np.float32)
    totals, sums = np.empty(group, np.float32), np.empty((group, _padded(value_dim)), np.float32)
    me, threads = team()
    end, found, done, total = 0, -1, 0, (positions.sum() + size) * kv_heads
    while end < size:
        first, end = end, end + 1
        while end < size and bases[end] == bases[first]:
            end += 1
        for head in range(kv_heads):
            warm = False
            for b in range(first, end):
                length = positions[b] + 1
                count, table = min(window, length), tables[bases[b] :]
                mine = done * threads // total == me
                done += length
                if not mine:
                    continue
                if found != b:
                    _find_keys(table, length - count, count, block_size, (pool_stride, layer, rows), width, at)
                    found = b
                counts = count, 0 if warm and count * width * parts * pool.itemsize <= NEAR else count
                warm = True
                last = (parts - 1) * kv_heads + head
                key, value = head * head_size, last * head_size
                sizes = (scales_stride, layer * rows, rows, kv_heads), (block_size, dim, head_size)
                _store_new(pool, scales, (kv, kv_stride), b, (at, count - 1), head, sizes, (positions, before, table))
                of_keys = (layer * rows + head) * block_size, scales_stride, block_size
                of_values = (layer * rows + last) * block_size, scales_stride, block_size
                _fetch_scales(scales, table, length - count, count, of_keys)
                _fetch_scales(scales, table, length - count, count, of_values)
                _scale_queries(q[b * q_stride + head * group * dim :], dim, scale, query)
                _score(pool, at, key, counts, dim, query, scores)
                _scale(scores, scales, table, length - count, count, of_keys, factors)
                _fetch(pool, at, value, width_of(pool, value_dim), 0, min(AHEAD, counts[1]))
                for g in range(group):
                    totals[g] = weigh(scores[g], count, softcap)
                if b + 1 == end and head + 1 < kv_heads:
                    _fetch(pool, at, key + head_size, width, 0, min(AHEAD, count))
                _scale(scores, scales, table, length - count, count, of_values, factors)
                _sum_values(pool, at, value, counts, (dim, value_dim), scores, sums)
                _divide(sums, value_dim, totals, out[(b * heads + head * group) * value_dim :])


@kernel(
    "keys * kv_heads * dim",
    SUMS,
    pool=numbers("blocks", "layers", "parts", "kv_heads", "block_size", "dim", strided=1),
    q=numbers("tokens", "heads", "dim", strided=1),
    kv=numbers("tokens", "parts", "kv_heads", "dim", strided=1),
    out=numbers("tokens", "heads * value_dim"),
    index=int64s("index_size"),
    size=INT,
    keys=INT,
    value_dim=INT,
    layer=INT,
    window=INT,
    softcap=REAL,
    scale=REAL,
)
def _attend(
    pool, pool_stride0, layer, parts, kv_heads, block_size, q, q_stride0, heads, dim, kv, kv_stride0, out, value_dim, index, size,
    window, softcap, scale,
):  # fmt: skip
    shape = (pool_stride0, 0, layer), (parts, heads, kv_heads, block_size, dim, value_dim)
    attend_tokens(pool, None, (q, q_stride0, kv, kv_stride0, out), (index, size), shape, (window, softcap, scale))


@kernel(
    "tokens * parts * kv_heads * dim",
    kv=numbers("tokens", "parts", "kv_heads", "dim", strided=1),
    into=numbers("rows", "dim"),
    slots=int64s("tokens * parts * kv_heads"),
)
def _store(kv, kv_stride0, into, slots, tokens, parts, kv_heads, dim):
    heads = parts * kv_heads
    first, last = share(tokens)
    for token in range(first, last):
        for head in range(heads):
            new, slot = token * kv_stride0 + head * dim, slots[token * heads + head] * dim
            keep(into, None, kv[new : new + dim], slot, 0)
