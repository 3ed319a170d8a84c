"""Compiled attention of longer spans, a tile at a time (FlashAttention, Dao et al. 2022, with the products of `baton.engine.cpu.tile`).

Keys and values are copied once from the pool's blocks into panels. Then the queries of a few tokens meet KEYS keys at a time: a product
gives their scores, which stay in the caches, a softmax makes them weights, and a product adds the weighted values; what was added before
shrinks when a greater score is found. Keys are always cut at the same places, and a key that a query does not see adds exactly nothing:
the result for a token does not depend on the span in which it is computed, bit for bit.

Rounded numbers (`baton.engine.cpu.kv_int8`, `kv_int5`) become those that they stand for while they are copied into panels.

Letters in shapes are those of `baton.engine.model.attention`.
"""

import numpy as np
from numba import njit
from numba.extending import overload
from torch import Tensor

from baton.engine.core.int5_rows import GROUP, GROUP_BYTES
from baton.engine.core.pages import LINE
from baton.engine.cpu import amx
from baton.engine.cpu.amx import begin_tiles, end_tiles
from baton.engine.cpu.amx_products import add_rows_by_tiles
from baton.engine.cpu.decode_attention import EVERYTHING, has_any, in_rows, is_packed, width_of
from baton.engine.cpu.dots import lay_values, turn_keys
from baton.engine.cpu.int5_dots import widen_group
from baton.engine.cpu.kernel import INT, REAL, int64s, kernel, numbers
from baton.engine.cpu.primitives import LOG2_E, ONE, SUMS, ZERO, exp, from_line, given, put, room_for, share, team, wait, wide
from baton.engine.cpu.softmax import cap, greatest_score, powers
from baton.engine.cpu.tile import LANES, OUTS, add_rows, group_of
from baton.engine.model.attention import CUT as KEYS
from baton.engine.model.attention import Group, PagedKv
from baton.engine.model.checkpoint import LayerAttention

QUERIES = 64  # that one thread computes at a time, unless a key head has more
SIZE = f"-(-keys // {OUTS}) * {OUTS}"  # keys in whole panels
NOTHING = np.zeros(OUTS, np.float32)
NO_SCORE = np.float32(-np.inf)


def attend_span(paged: PagedKv, layer: int, q: Tensor, out: Tensor, group: Group, how: LayerAttention) -> None:
    """An `AttendSpan`."""
    _attend_span(in_rows(q), paged.layers[layer].rows, *room(paged, group), out, *numbers_of(paged, q, group, how))


def room(paged: PagedKv, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """`gather` as a kernel wants it, and the panels of keys and of values."""
    dim, size = paged.dim, -(-group.keys // OUTS) * OUTS * paged.kv_heads
    keys, values = size * (dim + dim % 2), size * -(-paged.value_dim // OUTS) * OUTS
    panels = paged.scratch(-(-(keys + values) // (paged.pool.shape[-1] * paged.block_size))).view(-1)
    return group.gather.view(paged.parts, paged.kv_heads, -1), panels[:keys], panels[keys : keys + values]


def numbers_of(paged: PagedKv, q: Tensor, group: Group, how: LayerAttention) -> tuple[int, int, int, int, float, float]:
    """The last arguments of a kernel."""
    window = EVERYTHING if how.window is None else how.window
    scale = q.shape[2] ** -0.5 if how.scale is None else how.scale
    return group.keys, paged.block_size, paged.value_dim, window, how.softcap or 0.0, scale


@njit
def _find(table, shape, first, last, at):
    """Where the OUTS rows from `first` on are; the one before `last` is repeated."""
    block_size, width = shape
    for i in range(OUTS):
        key = min(first + i, last - 1)
        at[i] = (table[key // block_size] * block_size + key % block_size) * width


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
def _pack_values(rows, at, count, dim, panels, panel_stride):
    """OUTS values, of which those from `count` on are zeros, as a part of panels `[dim / OUTS, *, OUTS, group]`, `panel_stride` apart."""
    together = group_of(rows)
    for o in range(0, OUTS, together):
        there = min(max(count - o, 0), together)
        for d in range(0, dim, OUTS):
            width, place = min(OUTS, dim - d), d // OUTS * panel_stride + o * OUTS
            if there == together and width == OUTS:
                lay_values(rows, at[o:], d, panels[place:])
                continue
            panels[place : place + OUTS * together] = 0
            for i in range(there):
                for j in range(width):
                    panels[place + j * together + i] = rows[at[o + i] + d + j]


@njit(fastmath=SUMS, error_model="numpy")
def _meet(scratch, rows, part, seen, sizes, how):
    """Turns rows of scores of a part of the keys (where it starts, and whole panels of them) into weights, 0 for keys that the row's query
    does not see. `state` (the greatest score so far, the sum of weights) and `sums` become relative to the greatest of all."""
    (scores, weights, sums, state), (start, depth), (value_width, group), (window, scale, softcap) = scratch, part, sizes, how
    factor = ONE if softcap > ZERO else scale
    for row in range(rows):
        at, last = row * KEYS, seen + row // group - start
        first, last = at + min(max(last - window, 0), depth), at + min(max(last, 0), depth)
        if first >= last:
            weights[at : at + depth] = 0
            continue
        if softcap > ZERO:
            for i in range(at, at + depth):
                scores[i] *= scale
            cap(scores[at:], depth, softcap)
        for i in range(at, first):
            scores[i] = NO_SCORE
        for i in range(last, at + depth):
            scores[i] = NO_SCORE
        found, before = greatest_score(scores, at, depth), state[row, 0]
        if found > before:
            state[row, 0], shrunk = found, exp((before - found) * factor)
            state[row, 1] *= shrunk
            for d in range(row * value_width, (row + 1) * value_width):
                sums[d] *= shrunk
        state[row, 1] += powers(scores, at, depth, factor * LOG2_E, state[row, 0], weights)
        for i in range(at, first):
            weights[i] = 0
        for i in range(last, at + depth):
            weights[i] = 0


def _multiply(before, x, x_stride, panel, depth, out, rows):
    """`add_rows`; those above the last one, up to a whole number of AMX's tiles, may get numbers that mean nothing. `before` and `out`: an
    array, and the stride of its rows."""


@overload(_multiply)
def _multiply_by(before, x, x_stride, panel, depth, out, rows):
    def by_rows(before, x, x_stride, panel, depth, out, rows):
        add_rows(before[0], before[1], x, x_stride, panel, rows, depth, out[0], out[1])

    def by_tiles(before, x, x_stride, panel, depth, out, rows):
        if depth * 2 % LINE:
            add_rows(before[0], before[1], x, x_stride, panel, rows, depth, out[0], out[1])
        else:
            add_rows_by_tiles(before[0], before[1], x, x_stride, depth * 2 // LINE, panel, rows, out[0], out[1])

    return by_tiles if amx.multiplies(panel) else by_rows


@njit
def _attend_rows(x, rows, panels, sizes, seen, how, scratch):
    """Sums and state of `rows` rows of queries, `group` for each token. `seen`: the keys of the first token, as if it had no window;
    `how`: the window, the scale and the cap of scores."""
    (keys, values), (size, width, value_width, group), (scores, weights, sums, state, widened) = panels, sizes, scratch
    x = given(x[: rows * width], widened[0])
    sums[: rows * value_width], state[:rows, 0], state[:rows, 1] = ZERO, NO_SCORE, ZERO
    end = seen + (rows - 1) // group
    for start in range(max(0, seen - how[0]) // KEYS * KEYS, end, KEYS):
        depth = min(KEYS, -(-(end - start) // OUTS) * OUTS)
        for panel in range(0, depth, OUTS):
            _multiply((NOTHING, 0), x, width, keys[(start + panel) * width :], width, (scores[panel:], KEYS), rows)
        _meet((scores, weights, sums, state), rows, (start, depth), seen, (value_width, group), how)
        some = given(weights[: rows * KEYS], widened[1])
        for d in range(0, value_width, OUTS):
            _multiply((sums[d:], value_width), some, KEYS, values[d * size + start * OUTS :], depth, (sums[d:], value_width), rows)


@njit
def _take(q, q_stride, shape, x, width):
    """The queries of one key head, in rows."""
    count, group, dim = shape
    for row in range(count * group):
        at = row // group * q_stride + row % group * dim
        x[row * width : row * width + dim] = q[at : at + dim]


@njit(error_model="numpy")
def _give(sums, value_width, state, shape, out, out_stride):
    count, group, dim = shape
    for row in range(count * group):
        at = row // group * out_stride + row % group * dim
        for d in range(dim):
            put(out, at + d, sums[row * value_width + d] / state[row, 1])


@njit
def _seen(first, count, window):
    """How many keys `count` tokens see together, of which the first sees `first`."""
    total = 0
    for seen in range(first, first + count):
        total += min(seen, window)
    return total


@njit
def spot_of(slot, block_stride, scales_stride):
    """Where the scale of a slot is. `block_stride`: slots from one block to the next; `scales_stride`: scales."""
    return slot // block_stride * scales_stride + slot % block_stride


def _scaled(rows, scales, at, dim, strides, plain):
    """Returns what OUTS rows are read from, and sets `at` to where: the pool or, with what rounded numbers stand for, `plain`."""


@overload(_scaled)
def _scaled_by(rows, scales, at, dim, strides, plain):
    def scaled(rows, scales, at, dim, strides, plain):
        for o in range(OUTS):
            scale = scales[spot_of(at[o] // dim, strides[0], strides[1])]
            for d in range(dim):
                put(plain, o * dim + d, np.float32(rows[at[o] + d]) * scale)
            at[o] = o * dim
        return plain

    def unpacked(rows, scales, at, dim, strides, plain):
        groups = -(-dim // GROUP)
        for o in range(OUTS):
            scale = wide(scales[spot_of(at[o] // (groups * GROUP_BYTES), strides[0], strides[1])])
            for g in range(groups):
                widen_group(rows, at[o], g, scale, plain, (o * groups + g) * GROUP)
            at[o] = o * groups * GROUP
        return plain

    return unpacked if is_packed(rows) else scaled if has_any(scales) else lambda rows, scales, at, dim, strides, plain: rows


@njit
def _lay_panels(rows, scales, gather, panels, plain, sizes):
    """This thread's share of all keys and values, in panels."""
    (key_panels, value_panels), (keys, size, width, value_width), (block_size, dim, value_dim, strides) = panels, sizes[0], sizes[1]
    (parts, kv_heads, blocks), shape = sizes[2], (block_size, width_of(rows, dim))
    at = np.empty(OUTS, np.int64)
    first, last = share(size // OUTS * kv_heads)
    for part in range(first, last):
        head, start = part % kv_heads, part // kv_heads * OUTS
        _find(gather[head * blocks :], shape, start, keys, at)
        source = _scaled(rows, scales, at, dim, strides, plain)
        _pack_keys(source, at, dim, key_panels[(head * size + start) * width :])
        if parts > 1:
            _find(gather[((parts - 1) * kv_heads + head) * blocks :], shape, start, keys, at)
            source = _scaled(rows, scales, at, dim, strides, plain)
        _pack_values(source, at, keys - start, value_dim, value_panels[head * size * value_width + start * OUTS :], size * OUTS)


@njit
def attend_spans(rows, scales, given, panels, sizes, how):
    """The queries are those of the last `tokens` of `keys` keys. Each sees the keys up to its own, or those in its window."""
    (q, q_stride, gather, out), (key_panels, value_panels), (window, scale, softcap) = given, panels, how
    (tokens, heads, keys), (_, kv_heads, _), (_, dim, value_dim, _) = sizes
    group, together = heads // kv_heads, group_of(key_panels)
    size, width, value_width = -(-keys // OUTS) * OUTS, -(-dim // together) * together, -(-value_dim // OUTS) * OUTS
    plain = np.empty(OUTS * -(-dim // GROUP) * GROUP, q.dtype)
    _lay_panels(rows, scales, gather, panels, plain, ((keys, size, width, value_width), sizes[2], sizes[1]))
    wait()
    at_once = max(1, QUERIES // group)
    most = -(-at_once * group // amx.TILE) * amx.TILE
    x, weights = from_line(np.zeros(most * width + LINE, q.dtype)), from_line(np.zeros(most * KEYS + LINE, q.dtype))
    scores, sums = from_line(np.empty(most * KEYS + LINE, np.float32)), from_line(np.empty(most * value_width + LINE, np.float32))
    state, widened = np.empty((most, 2), np.float32), (room_for(x, most * width), room_for(weights, most * KEYS))
    (me, threads), before, done = team(), keys - tokens + 1, 0
    begin_tiles(key_panels, amx.TILE)
    total = _seen(before, tokens, window) * kv_heads
    for head in range(kv_heads):
        mine_of = key_panels[head * size * width :], value_panels[head * size * value_width :]
        for token in range(0, tokens, at_once):
            count = min(at_once, tokens - token)
            mine = done * threads // total == me
            done += _seen(before + token, count, window)
            if mine:
                _take(q[token * q_stride + head * group * dim :], q_stride, (count, group, dim), x, width)
                _attend_rows(
                    x, count * group, mine_of, (size, width, value_width, group), before + token, (window, scale, softcap),
                    (scores, weights, sums, state, widened),
                )  # fmt: skip
                _give(
                    sums,
                    value_width,
                    state,
                    (count, group, value_dim),
                    out[(token * heads + head * group) * value_dim :],
                    heads * value_dim,
                )
    end_tiles(key_panels)


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
    sizes = (tokens, heads, keys), (parts, kv_heads, blocks), (block_size, dim, value_dim, (0, 0))
    attend_spans(rows, None, (q, q_stride0, gather, out), (key_panels, value_panels), sizes, (window, scale, softcap))
