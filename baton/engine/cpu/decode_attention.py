"""Compiled attention of decodes, which reads the pool's blocks in place, and the compiled store of new keys and values.

Letters in shapes are those of `baton.engine.attention`.
"""

import numpy as np
from numba import njit
from torch import Tensor

from baton.engine.attention import Decodes, KvLayer, PagedKv
from baton.engine.checkpoint import LayerAttention
from baton.engine.cpu.kernel import INT, REAL, int64s, kernel, numbers
from baton.engine.cpu.primitives import SUMS, ZERO, prefetch, put, share, team, wide
from baton.engine.cpu.softmax import weigh

EVERYTHING = 1 << 62  # keys that a query without a window sees
AHEAD = 32  # keys between the one in use and the one being prefetched: blocks are scattered, so no processor can predict the next
LINE = 64  # bytes of a cache line
KEYS = 8  # summed at a time


def attend_in_place(paged: PagedKv, layer: int, q: Tensor, kv: Tensor, out: Tensor, decodes: Decodes, how: LayerAttention) -> None:
    """An `AttendInPlace`: every key and value is read once, in place, for all queries that share it."""
    window = EVERYTHING if how.window is None else how.window
    scale = q.shape[2] ** -0.5 if how.scale is None else how.scale
    softcap = how.softcap or 0.0
    _attend(
        paged.pool, in_rows(q), in_rows(kv), out, decodes.index, decodes.size, decodes.keys, paged.value_dim, layer, window, softcap, scale
    )


def store(kv: Tensor, kv_layer: KvLayer, slots: Tensor) -> None:
    """As `baton.engine.attention.store`."""
    _store(in_rows(kv), kv_layer.slots, slots)


def in_rows(x: Tensor) -> Tensor:
    """x with each of its rows contiguous."""
    return x if x[0].is_contiguous() else x.contiguous()


@njit
def _whole(count):
    return -(-count // KEYS) * KEYS


@njit
def _find_keys(table, first, count, block_size, where, dim, at):
    """`at[i]`: where the key at position `first + i` is. The last one is repeated up to a multiple of KEYS; the repeats get no weight."""
    layers, layer, rows = where
    i, block, slot = 0, first // block_size, first % block_size
    while i < count:
        start = (table[block] * layers + layer) * rows * block_size * dim
        for offset in range(slot, min(block_size, slot + count - i)):
            at[i] = start + offset * dim
            i += 1
        block, slot = block + 1, 0
    for j in range(count, _whole(count)):
        at[j] = at[count - 1]


@njit(fastmath=SUMS, error_model="numpy")
def _scale_queries(rows, scale, query):
    group, dim = query.shape
    for g in range(group):
        row = rows[g * dim :]
        for d in range(dim):
            query[g, d] = wide(row[d]) * scale


@njit(fastmath=SUMS, error_model="numpy")
def _score(pool, at, head, count, query, scores):
    """q kᵀ: each key is read once, for all queries that share it; four keys at a time."""
    group, dim = query.shape
    for i in range(0, _whole(count), 4):
        k0, k1, k2, k3 = pool[at[i] + head :], pool[at[i + 1] + head :], pool[at[i + 2] + head :], pool[at[i + 3] + head :]
        if i + AHEAD < _whole(count):
            for ahead in range(i + AHEAD, i + AHEAD + 4):
                for d in range(0, dim, LINE // pool.itemsize):
                    prefetch(pool, at[ahead] + head + d)
        for g in range(group):
            row, out = query[g], scores[g, i:]
            s0 = s1 = s2 = s3 = ZERO
            for d in range(dim):
                s0 += row[d] * wide(k0[d])
                s1 += row[d] * wide(k1[d])
                s2 += row[d] * wide(k2[d])
                s3 += row[d] * wide(k3[d])
            out[0], out[1], out[2], out[3] = s0, s1, s2, s3


@njit(fastmath=SUMS, error_model="numpy")
def _sum_values(pool, at, head, count, weights, sums):
    """Each value is read once, for all queries that share it; eight at a time, so the sums are read and written an eighth as often."""
    group, dim = sums.shape
    sums[:] = ZERO
    for i in range(0, _whole(count), 8):
        v0, v1, v2, v3 = pool[at[i] + head :], pool[at[i + 1] + head :], pool[at[i + 2] + head :], pool[at[i + 3] + head :]
        v4, v5, v6, v7 = pool[at[i + 4] + head :], pool[at[i + 5] + head :], pool[at[i + 6] + head :], pool[at[i + 7] + head :]
        if i + AHEAD < _whole(count):
            for ahead in range(i + AHEAD, i + AHEAD + 8):
                for d in range(0, dim, LINE // pool.itemsize):
                    prefetch(pool, at[ahead] + head + d)
        for g in range(group):
            w, out = weights[g, i:], sums[g]
            w0, w1, w2, w3, w4, w5, w6, w7 = w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]
            for d in range(dim):
                early = (w0 * wide(v0[d]) + w1 * wide(v1[d])) + (w2 * wide(v2[d]) + w3 * wide(v3[d]))
                late = (w4 * wide(v4[d]) + w5 * wide(v5[d])) + (w6 * wide(v6[d]) + w7 * wide(v7[d]))
                out[d] += early + late


@njit(fastmath=SUMS, error_model="numpy")
def _divide(sums, totals, out):
    group, dim = sums.shape
    for g in range(group):
        for d in range(dim):
            put(out, g * dim + d, sums[g, d] / totals[g])


@kernel(
    "keys * kv_heads * dim",
    SUMS,
    pool=numbers("blocks", "layers", "parts", "kv_heads", "block_size", "dim"),
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
    pool, layers, layer, parts, kv_heads, block_size, q, q_stride0, heads, dim, kv, kv_stride0, out, value_dim, index, size,
    window, softcap, scale,
):  # fmt: skip
    """One query per sequence, for the first `size` tokens. A token's key and value are stored in their slot; then its query sees the slots
    up to its own, or those in its window, and no others."""
    positions, bases, tables = index[:size], index[size : 2 * size], index[2 * size :]
    group, head_size = heads // kv_heads, block_size * dim
    most = _whole(min(window, positions.max() + 1))
    at = np.empty(most, np.int64)  # where the keys of a sequence for head 0 begin in the pool
    query = np.empty((group, dim), np.float32)
    scores = np.empty((group, most), np.float32)
    totals, sums = np.empty(group, np.float32), np.empty((group, value_dim), np.float32)
    me, threads = team()
    found, done, total = -1, 0, (positions.sum() + size) * kv_heads
    for b in range(size):
        length = positions[b] + 1
        count = min(window, length)
        for head in range(kv_heads):
            mine = done * threads // total == me
            done += length
            if not mine:
                continue
            if found != b:
                _find_keys(tables[bases[b] :], length - count, count, block_size, (layers, layer, parts * kv_heads), dim, at)
                found = b
            key, value = head * head_size, ((parts - 1) * kv_heads + head) * head_size
            for part in range(parts):
                new = (b * kv_stride0) + (part * kv_heads + head) * dim
                slot = at[count - 1] + (part * kv_heads + head) * head_size
                pool[slot : slot + dim] = kv[new : new + dim]
            _scale_queries(q[b * q_stride0 + head * group * dim :], scale, query)
            _score(pool, at, key, count, query, scores)
            for g in range(group):
                totals[g] = weigh(scores[g], count, softcap)
                scores[g, count : _whole(count)] = ZERO
            _sum_values(pool, at, value, count, scores, sums)
            _divide(sums, totals, out[(b * heads + head * group) * value_dim :])


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
            into[slot : slot + dim] = kv[new : new + dim]
