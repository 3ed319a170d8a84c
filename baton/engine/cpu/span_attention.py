"""Compiled attention of longer spans, a tile at a time (FlashAttention, Dao et al. 2022, with the products of `baton.engine.cpu.tile`).

Keys and values are copied once from the pool's blocks into panels. Then the queries of a few tokens meet KEYS keys at a time: a product
gives their scores, which stay in the caches, a softmax makes them weights, and a product adds the weighted values; what was added before
shrinks when a greater score is found. Keys are always cut at the same places, and a key that a query does not see adds exactly nothing:
unless a window cuts the table, the result for a token does not depend on the span in which it is computed, bit for bit.

Letters in shapes are those of `baton.engine.attention`.
"""

import numpy as np
from numba import njit
from torch import Tensor

from baton.engine.attention import Group, PagedKv
from baton.engine.checkpoint import LayerAttention
from baton.engine.cpu.decode_attention import EVERYTHING, in_rows
from baton.engine.cpu.dots import lay_values, turn_keys
from baton.engine.cpu.kernel import INT, REAL, int64s, kernel, numbers
from baton.engine.cpu.primitives import ONE, SUMS, ZERO, exp, put, share, team, wait
from baton.engine.cpu.softmax import cap, exponentials, scale_scores
from baton.engine.cpu.tile import LANES, OUTS, ROWS, add_tile, group_of

KEYS = 256  # whose scores are in the caches at the same time; whole panels
QUERIES = 64 // ROWS * ROWS  # that one thread computes at a time, unless a key head has more
SIZE = f"-(-keys // {OUTS}) * {OUTS}"  # keys in whole panels
NOTHING = np.zeros(OUTS, np.float32)
NO_SCORE = np.float32(-np.inf)


def attend_span(paged: PagedKv, layer: int, q: Tensor, out: Tensor, group: Group, how: LayerAttention) -> None:
    """An `AttendSpan`. Scores and sums are float32; for bfloat16 values, the weights are rounded to bfloat16."""
    dim, size = q.shape[2], -(-group.keys // OUTS) * OUTS * paged.kv_heads
    keys, values = size * (dim + dim % 2), size * -(-paged.value_dim // OUTS) * OUTS
    panels = paged.scratch(-(-(keys + values) // (dim * paged.block_size))).view(-1)
    window = EVERYTHING if how.window is None else how.window
    scale = dim**-0.5 if how.scale is None else how.scale
    gather, softcap = group.gather.view(paged.parts, paged.kv_heads, -1), how.softcap or 0.0
    _attend_span(
        in_rows(q), paged.layers[layer].rows, gather, panels[:keys], panels[keys : keys + values], out, group.keys, paged.block_size,
        paged.value_dim, window, softcap, scale,
    )  # fmt: skip


@njit
def _find(table, shape, first, last, at):
    """Where the OUTS rows from `first` on are; the one before `last` is repeated."""
    block_size, dim = shape
    for i in range(OUTS):
        key = min(first + i, last - 1)
        at[i] = (table[key // block_size] * block_size + key % block_size) * dim


@njit
def _pack_keys(rows, at, dim, panel):
    """OUTS keys as a panel `[dim / group, OUTS, group]`, filled up with zeros to a whole group."""
    together = group_of(rows)
    whole = dim // (LANES * together) * LANES * together
    for o in range(0, OUTS, LANES):
        for d in range(0, whole, LANES * together):
            turn_keys(rows, at[o:], d // together, panel[o * together :])
    for o in range(OUTS):
        for d in range(whole, dim, together):
            for i in range(together):
                panel[d * OUTS + o * together + i] = rows[at[o] + d + i] if d + i < dim else 0


@njit
def _pack_values(rows, at, count, dim, panels, far):
    """OUTS values, of which those from `count` on are zeros, as a part of panels `[dim / OUTS, *, OUTS, group]`, `far` apart."""
    together = group_of(rows)
    for o in range(0, OUTS, together):
        there = min(max(count - o, 0), together)
        for d in range(0, dim, OUTS):
            width, place = min(OUTS, dim - d), d // OUTS * far + o * OUTS
            if there == together and width == OUTS:
                lay_values(rows, at[o:], d, panels[place:])
                continue
            panels[place : place + OUTS * together] = 0
            for i in range(there):
                for j in range(width):
                    panels[place + j * together + i] = rows[at[o + i] + d + j]


@njit(fastmath=SUMS, error_model="numpy")
def _meet(scores, weights, seen, state, sums, how):
    """Turns a row of scores, whole panels of them, into weights, 0 for keys outside `seen`. `state` (the greatest score so far, the sum of
    weights) and `sums` become relative to the greatest of all."""
    (first, last), (scale, softcap), size = seen, how, len(scores)
    if first >= last:
        weights[:] = 0
        return
    if softcap > ZERO:
        for i in range(size):
            scores[i] *= scale
        cap(scores, size, softcap)
        scale = ONE
    scores[:first] = scores[last:] = NO_SCORE
    found, before = scale_scores(scores, size, scale), state[0]
    if found > before:
        state[0], shrunk = found, exp(before - found)
        state[1] *= shrunk
        for d in range(len(sums)):
            sums[d] *= shrunk
    state[1] += exponentials(scores, size, state[0], weights)
    weights[:first] = weights[last:] = 0


@njit
def _multiply(before, x, far, panel, depth, out, rows):
    """`add_tile` for any number of rows. `before` and `out`: an array, and how far apart its rows are."""
    for row in range(0, rows, ROWS):
        first, last = before[0][row * before[1] :], out[0][row * out[1] :]
        add_tile(first, before[1], x[row * far :], far, panel, min(ROWS, rows - row), depth, last, out[1])


@njit
def _attend_rows(x, rows, panels, sizes, seen, how, scratch):
    """Sums and state of `rows` rows of queries, `group` for each token. `seen`: the keys of the first token, as if it had no window."""
    (keys, values), (size, width, far, group), (window, scale, softcap), (scores, weights, sums, state) = panels, sizes, how, scratch
    sums[: rows * far], state[:rows, 0], state[:rows, 1] = ZERO, NO_SCORE, ZERO
    end = seen + (rows - 1) // group
    for start in range(max(0, seen - window) // KEYS * KEYS, end, KEYS):
        depth = min(KEYS, -(-(end - start) // OUTS) * OUTS)
        for panel in range(0, depth, OUTS):
            _multiply((NOTHING, 0), x, width, keys[(start + panel) * width :], width, (scores[panel:], KEYS), rows)
        for row in range(rows):
            last = seen + row // group
            mine = min(max(last - window - start, 0), depth), min(max(last - start, 0), depth)
            at = row * KEYS
            _meet(scores[at : at + depth], weights[at : at + depth], mine, state[row], sums[row * far : (row + 1) * far], (scale, softcap))
        for d in range(0, far, OUTS):
            _multiply((sums[d:], far), weights, KEYS, values[d * size + start * OUTS :], depth, (sums[d:], far), rows)


@njit
def _take(q, apart, shape, x, width):
    """The queries of one key head, in rows."""
    count, group, dim = shape
    for row in range(count * group):
        at = row // group * apart + row % group * dim
        x[row * width : row * width + dim] = q[at : at + dim]


@njit(error_model="numpy")
def _give(sums, far, state, shape, out, apart):
    count, group, dim = shape
    for row in range(count * group):
        at = row // group * apart + row % group * dim
        for d in range(dim):
            put(out, at + d, sums[row * far + d] / state[row, 1])


@njit
def _seen(first, count, window):
    """By `count` tokens, of which the first sees `first` keys: the sum."""
    total = 0
    for seen in range(first, first + count):
        total += min(seen, window)
    return total


@kernel(
    "tokens * heads * keys",
    SUMS,
    q=numbers("tokens", "heads", "dim", strided=1),
    rows=numbers("slots", "block_size * dim"),
    gather=int64s("parts", "kv_heads", "blocks"),
    key_panels=numbers(f"{SIZE} * kv_heads * (dim + dim % 2)"),
    value_panels=numbers(f"{SIZE} * kv_heads * -(-value_dim // {OUTS}) * {OUTS}"),
    out=numbers("tokens", "heads * value_dim"),
    keys=INT,
    block_size=INT,
    value_dim=INT,
    window=INT,
    softcap=REAL,
    scale=REAL,
)
def _attend_span(
    q, q_stride0, rows, gather, parts, blocks, kv_heads, key_panels, value_panels, out, tokens, heads, dim, keys, block_size, value_dim,
    window, softcap, scale,
):  # fmt: skip
    """The queries are those of the last `tokens` of `keys` keys. Each sees the keys up to its own, or those in its window."""
    shape, group, together = (block_size, dim), heads // kv_heads, group_of(rows)
    size, width, far = -(-keys // OUTS) * OUTS, -(-dim // together) * together, -(-value_dim // OUTS) * OUTS
    at = np.empty(OUTS, np.int64)
    first, last = share(size // OUTS * kv_heads)
    for part in range(first, last):
        head, start = part % kv_heads, part // kv_heads * OUTS
        _find(gather[head * blocks :], shape, start, keys, at)
        _pack_keys(rows, at, dim, key_panels[(head * size + start) * width :])
        _find(gather[((parts - 1) * kv_heads + head) * blocks :], shape, start, keys, at)
        _pack_values(rows, at, keys - start, value_dim, value_panels[head * size * far + start * OUTS :], size * OUTS)
    wait()
    at_once = max(1, QUERIES // group)
    most = at_once * group
    x, scores, weights = np.zeros(most * width, q.dtype), np.empty(most * KEYS, np.float32), np.empty(most * KEYS, q.dtype)
    sums, state = np.empty(most * far, np.float32), np.empty((most, 2), np.float32)
    (me, threads), before, done = team(), keys - tokens + 1, 0
    total = _seen(before, tokens, window) * kv_heads
    for head in range(kv_heads):
        panels = key_panels[head * size * width :], value_panels[head * size * far :]
        for token in range(0, tokens, at_once):
            count = min(at_once, tokens - token)
            mine = done * threads // total == me
            done += _seen(before + token, count, window)
            if mine:
                _take(q[token * q_stride0 + head * group * dim :], q_stride0, (count, group, dim), x, width)
                _attend_rows(
                    x, count * group, panels, (size, width, far, group), before + token, (window, scale, softcap),
                    (scores, weights, sums, state),
                )  # fmt: skip
                _give(sums, far, state, (count, group, value_dim), out[(token * heads + head * group) * value_dim :], heads * value_dim)
