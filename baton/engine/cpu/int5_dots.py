"""The innermost loops of attention over rows of int5 (`baton.engine.core.int5_rows`), in LLVM's language: levels become float32 in
registers.

Sums are float32. Every sum adds its products in an order that follows from the sizes of the head alone.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from baton.engine.core.int5_rows import GROUP, GROUP_BYTES, LEVELS, NIBBLE_BYTES
from baton.engine.cpu.dots import row_at, store_totals, zeros
from baton.engine.cpu.primitives import ONE, ROUND, SMALLEST, ZERO, magnitude, wide
from baton.engine.cpu.tile import (
    FLOATS,
    I8,
    I32,
    I64,
    INTS,
    LANES,
    arguments_of,
    fused,
    repeat,
    spread,
    starts_of,
    store_row,
    switch,
    vector,
)

KEYS = 8 if LANES == 16 else 4  # that are scored at a time
QUERIES = 2  # that share a read key or value
VECTORS = GROUP // LANES  # of a group
LEAST, MOST = np.float32(-LEVELS), np.float32(LEVELS - 1)
EVEN, SIXTEEN = np.uint32(0x7FFF), np.uint32(16)
NONE, INFINITE = np.float32(np.nan), np.uint32(0x7F800000)  # the second: bits of a float32


@intrinsic
def score_rows(
    context: Any, pool: Any, at: Any, head: Any, groups: Any, query: Any, query_stride: Any, rows: Any, scores: Any, score_stride: Any
) -> Any:
    """`scores[r, j] = Σ_d query[r, d] · level_j[d]` for the KEYS keys at `at[j] + head` and 1 to QUERIES rows.

    Rows of `query` lie `query_stride` numbers apart and end with zeros up to whole groups, those of `scores` lie `score_stride`.
    """

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        pool, at, head, groups, query, query_stride, rows, scores, score_stride = arguments_of(context, builder, signature, given)
        keys = [row_at(builder, pool, at, head, I64(j)) for j in range(KEYS)]
        case = partial(_score, builder, keys, groups, (query, query_stride), (scores, score_stride))
        switch(builder, rows, range(1, QUERIES + 1), case)
        return context.get_dummy_value()

    int64 = types.int64
    return types.void(pool, at, int64, int64, query, int64, int64, scores, int64), generate


def _score(builder: Any, keys: list[Any], groups: Any, query: tuple[Any, Any], scores: tuple[Any, Any], count: int) -> None:
    """`count` rows of `score_rows`. `query`, `scores`: where the first row begins, and the stride of rows."""
    queries = starts_of(builder, *query, count)
    sums = repeat(builder, groups, [zeros()] * (count * KEYS), partial(_add_products, builder, queries, keys))
    for r in range(count):
        store_totals(builder, sums[r * KEYS : (r + 1) * KEYS], builder.gep(scores[0], [builder.mul(scores[1], I64(r))]))


def _add_products(builder: Any, queries: list[Any], keys: list[Any], g: Any, sums: Sequence[Any]) -> list[Any]:
    """The sums with the products of group `g` added."""
    first, added = builder.mul(g, I64(GROUP)), list(sums)
    groups_at = [_group(builder, key, g) for key in keys]
    for v in range(VECTORS // 2):
        own = [
            [vector(builder, builder.gep(each, [builder.add(first, I64(half * NIBBLE_BYTES + v * LANES))]), FLOATS) for half in range(2)]
            for each in queries
        ]
        for j, group in enumerate(groups_at):
            for half, numbers in enumerate(_numbers(builder, group, v)):
                for r in range(len(queries)):
                    added[r * KEYS + j] = fused(builder, added[r * KEYS + j], numbers, own[r][half])
    return added


@intrinsic
def add_group(
    context: Any,
    pool: Any,
    at: Any,
    head: Any,
    g: Any,
    count: Any,
    weights: Any,
    weight_stride: Any,
    rows: Any,
    sums: Any,
    sum_stride: Any,
) -> Any:
    """`sums[r, d] += Σ_j weights[r, j] · level_j[d]` for the numbers of group `g` of `count` values at `at[j] + head`, and 1 to QUERIES
    rows, `weight_stride` and `sum_stride` numbers apart. `sums` begins at the group."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        pool, at, head, g, count, weights, weight_stride, rows, sums, sum_stride = arguments_of(context, builder, signature, given)
        value = partial(row_at, builder, pool, at, head)
        case = partial(_add, builder, value, g, count, (weights, weight_stride), (sums, sum_stride))
        switch(builder, rows, range(1, QUERIES + 1), case)
        return context.get_dummy_value()

    int64 = types.int64
    return types.void(pool, at, int64, int64, int64, weights, int64, int64, sums, int64), generate


def _add(
    builder: Any, value: Callable[[Any], Any], g: Any, count: Any, weights: tuple[Any, Any], sums: tuple[Any, Any], queries: int
) -> None:
    """`queries` rows of `add_group`. `value(j)`: where the jth one begins; `weights`, `sums`: where the first row begins, and the stride
    of rows."""
    factors = starts_of(builder, *weights, queries)
    places = [
        builder.gep(sums[0], [builder.add(builder.mul(sums[1], I64(r)), I64(half * NIBBLE_BYTES + v * LANES))])
        for r in range(queries)
        for v in range(VECTORS // 2)
        for half in range(2)
    ]
    begun = [vector(builder, each, FLOATS) for each in places]
    added = repeat(builder, count, begun, partial(_add_value, builder, value, g, factors))
    for place, total in zip(places, added, strict=True):
        builder.store(total, builder.bitcast(place, FLOATS.as_pointer()), align=4)


def _add_value(builder: Any, value: Callable[[Any], Any], g: Any, factors: list[Any], j: Any, sums: Sequence[Any]) -> list[Any]:
    """The sums with a group of the jth value added, times each row's factor."""
    place, added = value(j), list(sums)
    by = [spread(builder, builder.load(builder.gep(each, [j]))) for each in factors]
    group = _group(builder, place, g)
    numbers = [each for v in range(VECTORS // 2) for each in _numbers(builder, group, v)]
    for r in range(len(factors)):
        for i, each in enumerate(numbers):
            added[r * VECTORS + i] = fused(builder, added[r * VECTORS + i], each, by[r])
    return added


@intrinsic
def widen_group(context: Any, pool: Any, row: Any, g: Any, scale: Any, out: Any, at: Any) -> Any:
    """The numbers of group `g` of the row that begins at `pool[row]` into `out`, rounded to its type, from `at` on."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        pool, row, g, scale, out, at = arguments_of(context, builder, signature, given)
        group, by = _group(builder, builder.gep(pool, [row]), g), spread(builder, scale)
        for v in range(VECTORS // 2):
            for half, levels in enumerate(_numbers(builder, group, v)):
                place = builder.gep(out, [builder.add(at, I64(half * NIBBLE_BYTES + v * LANES))])
                store_row(builder, [builder.fmul(levels, by)], place)
        return context.get_dummy_value()

    int64 = types.int64
    return types.void(pool, int64, int64, types.float32, out, int64), generate


def _group(builder: Any, row: Any, g: Any) -> tuple[Any, Any]:
    """Where a group begins, and the fifth bits of its levels, in all lanes."""
    start = builder.gep(row, [builder.mul(g, I64(GROUP_BYTES))])
    fifth = builder.load(builder.bitcast(builder.gep(start, [I64(NIBBLE_BYTES)]), I32.as_pointer()), align=1)
    return start, spread(builder, fifth)


def _numbers(builder: Any, group: tuple[Any, Any], v: int) -> list[Any]:
    """The vth LANES levels of the first half of a group, and of the second, as float32."""
    start, fifth = group
    nibbles = builder.zext(vector(builder, builder.gep(start, [I64(v * LANES)]), ir.VectorType(I8, LANES)), INTS)
    halves = builder.and_(nibbles, ir.Constant(INTS, [15] * LANES)), builder.lshr(nibbles, ir.Constant(INTS, [4] * LANES))
    return [
        builder.sitofp(builder.sub(half, _sixteens(builder, fifth, i * NIBBLE_BYTES + v * LANES)), FLOATS) for i, half in enumerate(halves)
    ]


def _sixteens(builder: Any, fifth: Any, first: int) -> Any:
    """16 where the bit of a level is set, of those from `first` on."""
    if first < 4:  # so that no shift is negative, and none loses a bit that is wanted
        fifth, first = builder.shl(fifth, ir.Constant(INTS, [4] * LANES)), first + 4
    shifts = [first - 4 + lane for lane in range(LANES)]
    return builder.and_(builder.lshr(fifth, ir.Constant(INTS, shifts)), ir.Constant(INTS, [16] * LANES))


@njit
def _short(x):
    """A float32 rounded to a bfloat16, to nearest even."""
    bits = np.float32(x).view(np.uint32)
    rounded = np.uint32(np.uint32(bits + EVEN + ((bits >> SIXTEEN) & np.uint32(1))) >> SIXTEEN)
    return np.uint32(rounded << SIXTEEN).view(np.float32)


@njit
def _level(x):
    """Rounds to nearest even, within the levels, and NaN to the least. Five bits."""
    within = min(x, MOST) if x > LEAST else LEAST
    return np.uint8(np.float32(within + ROUND).view(np.uint32) & np.uint32(31))


@njit(error_model="numpy", fastmath=False)
def pack_row(numbers, pool, row):
    """Rounds a key or value into the row that begins at `pool[row]`, as `baton.engine.model.int5_rows.pack` does it, to the byte. Returns
    the scale. Plain arithmetic: see `round_row`."""
    dim = len(numbers)
    least = most = wide(numbers[0])
    greatest = np.uint32(0)
    for i in range(dim):
        x = wide(numbers[i])
        greatest = max(greatest, magnitude(x))
        least, most = min(least, x), max(most, x)
    scale = NONE
    if greatest < INFINITE:
        scale = _short(np.float32((most if most >= -least else least) / LEAST) + ZERO)
    inverse = ZERO if abs(scale) < SMALLEST else np.float32(ONE / scale)
    for g in range(-(-dim // GROUP)):
        first, place, fifth = g * GROUP, row + g * GROUP_BYTES, np.uint32(0)
        for i in range(NIBBLE_BYTES):
            low, high = first + i, first + NIBBLE_BYTES + i
            one = _level(wide(numbers[low]) * inverse) if low < dim else np.uint8(0)
            other = _level(wide(numbers[high]) * inverse) if high < dim else np.uint8(0)
            pool[place + i] = (one & np.uint8(15)) | np.uint8(other << np.uint8(4))
            fifth |= np.uint32(one >> np.uint8(4)) << np.uint32(i) | np.uint32(other >> np.uint8(4)) << np.uint32(NIBBLE_BYTES + i)
        for i in range(GROUP_BYTES - NIBBLE_BYTES):
            pool[place + NIBBLE_BYTES + i] = np.uint8(fifth >> np.uint32(8 * i))
    return scale
