"""The innermost loops of attention over rows of int4 (`baton.engine.core.int4_rows`), in LLVM's language: numbers are made in registers.

Sums are float32. Every sum adds its products in an order that follows from the sizes of the head alone.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from baton.engine.core.int4_rows import FACTOR_BYTES, GROUP, LEVEL_BYTES, LEVELS
from baton.engine.cpu.dots import totals, zeros
from baton.engine.cpu.primitives import ONE, ROUND, SMALLEST, ZERO, magnitude, wide
from baton.engine.cpu.tile import FLOATS, I8, I32, I64, INTS, LANES, arguments_of, fused, repeat, spread, store_row, switch, vector

KEYS = 8 if LANES == 16 else 4  # that are scored at a time
QUERIES = 2  # that share a read key or value
VECTORS = GROUP // LANES  # of a group
MOST = np.float32(LEVELS)
EVEN, SIXTEEN = np.uint32(0x7FFF), np.uint32(16)
NONE, INFINITE = np.uint32(0x7FC0), np.uint32(0x7F800000)  # bits of a bfloat16 that is no number, and of a float32


@intrinsic
def score_rows(context: Any, pool: Any, at: Any, head: Any, groups: Any, query: Any, far: Any, rows: Any, scores: Any, apart: Any) -> Any:
    """`scores[r, j] = Σ_d query[r, d] · key_j[d]` for the KEYS keys at `at[j] + head` and 1 to QUERIES rows.

    Rows of `query` lie `far` numbers apart and end with zeros up to whole groups, those of `scores` lie `apart`.
    """

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        pool, at, head, groups, query, far, rows, scores, apart = arguments_of(context, builder, signature, given)
        keys = [builder.gep(pool, [builder.add(builder.load(builder.gep(at, [I64(j)])), head)]) for j in range(KEYS)]

        def case(count: int) -> None:
            queries = [builder.gep(query, [builder.mul(far, I64(r))]) for r in range(count)]

            def add(g: Any, sums: Sequence[Any]) -> list[Any]:
                first, added = builder.mul(g, I64(GROUP)), list(sums)
                factors = [_factors(builder, key, groups, g) for key in keys]
                for v in range(VECTORS // 2):
                    own = [
                        [
                            vector(builder, builder.gep(each, [builder.add(first, I64(half * LEVEL_BYTES + v * LANES))]), FLOATS)
                            for half in range(2)
                        ]
                        for each in queries
                    ]
                    for j, key in enumerate(keys):
                        for half, numbers in enumerate(_numbers(builder, key, g, v, factors[j])):
                            for r in range(count):
                                added[r * KEYS + j] = fused(builder, added[r * KEYS + j], numbers, own[r][half])
                return added

            sums = repeat(builder, groups, [zeros()] * (count * KEYS), add)
            for r in range(count):
                place = builder.gep(scores, [builder.mul(apart, I64(r))])
                for part in totals(builder, sums[r * KEYS : (r + 1) * KEYS]):
                    builder.store(part, builder.bitcast(place, part.type.as_pointer()), align=4)
                    place = builder.gep(place, [I64(part.type.count)])

        switch(builder, rows, range(1, QUERIES + 1), case)
        return context.get_dummy_value()

    int64 = types.int64
    return types.void(pool, at, int64, int64, query, int64, int64, scores, int64), generate


@intrinsic
def add_group(
    context: Any,
    pool: Any,
    at: Any,
    head: Any,
    groups: Any,
    g: Any,
    count: Any,
    weights: Any,
    far: Any,
    rows: Any,
    sums: Any,
    apart: Any,
) -> Any:
    """`sums[r, d] += Σ_j weights[r, j] · value_j[d]` for the numbers of group `g` of `count` values at `at[j] + head`, and 1 to QUERIES
    rows, `far` and `apart` numbers apart. `sums` begins at the group."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        pool, at, head, groups, g, count, weights, far, rows, sums, apart = arguments_of(context, builder, signature, given)

        def case(queries: int) -> None:
            factors = [builder.gep(weights, [builder.mul(far, I64(r))]) for r in range(queries)]
            places = [
                builder.gep(sums, [builder.add(builder.mul(apart, I64(r)), I64(half * LEVEL_BYTES + v * LANES))])
                for r in range(queries)
                for v in range(VECTORS // 2)
                for half in range(2)
            ]

            def add(j: Any, before: Sequence[Any]) -> list[Any]:
                value, added = builder.gep(pool, [builder.add(builder.load(builder.gep(at, [j])), head)]), list(before)
                by = [spread(builder, builder.load(builder.gep(each, [j]))) for each in factors]
                own = _factors(builder, value, groups, g)
                numbers = [each for v in range(VECTORS // 2) for each in _numbers(builder, value, g, v, own)]
                for r in range(queries):
                    for i, each in enumerate(numbers):
                        added[r * VECTORS + i] = fused(builder, added[r * VECTORS + i], each, by[r])
                return added

            for place, total in zip(places, repeat(builder, count, [vector(builder, each, FLOATS) for each in places], add), strict=True):
                builder.store(total, builder.bitcast(place, FLOATS.as_pointer()), align=4)

        switch(builder, rows, range(1, QUERIES + 1), case)
        return context.get_dummy_value()

    int64 = types.int64
    return types.void(pool, at, int64, int64, int64, int64, weights, int64, int64, sums, int64), generate


@intrinsic
def widen_group(context: Any, pool: Any, row: Any, groups: Any, g: Any, out: Any, at: Any) -> Any:
    """The numbers of group `g` of the row that begins at `pool[row]` into `out`, rounded to its type, from `at` on."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        pool, row, groups, g, out, at = arguments_of(context, builder, signature, given)
        start = builder.gep(pool, [row])
        factors = _factors(builder, start, groups, g)
        for v in range(VECTORS // 2):
            for half, numbers in enumerate(_numbers(builder, start, g, v, factors)):
                store_row(builder, [numbers], builder.gep(out, [builder.add(at, I64(half * LEVEL_BYTES + v * LANES))]))
        return context.get_dummy_value()

    int64 = types.int64
    return types.void(pool, int64, int64, int64, out, int64), generate


def _factors(builder: Any, row: Any, groups: Any, g: Any) -> tuple[Any, Any]:
    """Scale and shift of a group, each in all lanes."""
    place = builder.add(builder.mul(groups, I64(LEVEL_BYTES)), builder.mul(g, I64(FACTOR_BYTES)))
    both = spread(builder, builder.load(builder.bitcast(builder.gep(row, [place]), I32.as_pointer()), align=1))
    scale = builder.and_(both, ir.Constant(INTS, [0xFFFF0000] * LANES))
    shift = builder.shl(both, ir.Constant(INTS, [16] * LANES))
    return builder.bitcast(scale, FLOATS), builder.bitcast(shift, FLOATS)


def _numbers(builder: Any, row: Any, g: Any, v: int, factors: tuple[Any, Any]) -> list[Any]:
    """The vth LANES numbers of the first half of a group, and of the second."""
    place = builder.gep(row, [builder.add(builder.mul(g, I64(LEVEL_BYTES)), I64(v * LANES))])
    levels = builder.zext(vector(builder, place, ir.VectorType(I8, LANES)), INTS)
    halves = builder.and_(levels, ir.Constant(INTS, [15] * LANES)), builder.lshr(levels, ir.Constant(INTS, [4] * LANES))
    scale, shift = factors
    return [fused(builder, shift, builder.sitofp(half, FLOATS), scale) for half in halves]


@njit
def _half(x):
    """The bits of a float32 as bfloat16, to nearest even."""
    bits = np.float32(x).view(np.uint32)
    return np.uint32(np.uint32(bits + EVEN + ((bits >> SIXTEEN) & np.uint32(1))) >> SIXTEEN)


@njit
def _full(half):
    return np.uint32(np.uint32(half) << SIXTEEN).view(np.float32)


@njit
def _level(x):
    """To nearest even, 0 to LEVELS; 0 for NaN."""
    within = min(x, MOST) if x > ZERO else ZERO
    return np.uint8(np.float32(within + ROUND).view(np.uint32))


@njit(error_model="numpy", fastmath=False)
def pack_row(numbers, pool, row):
    """Rounds a key or value into the row that begins at `pool[row]`, as `baton.engine.model.int4_rows.pack` does it, to the byte. Plain
    arithmetic: see `round_row`."""
    dim = len(numbers)
    groups = -(-dim // GROUP)
    for g in range(groups):
        first, count = g * GROUP, min(GROUP, dim - g * GROUP)
        least = most = wide(numbers[first])
        greatest = np.uint32(0)
        for i in range(first, first + count):
            x = wide(numbers[i])
            greatest = max(greatest, magnitude(x))
            least, most = min(least, x), max(most, x)
        shift, scale = _half(least + ZERO), np.uint32(0)
        low = _full(shift)
        if greatest >= INFINITE:
            shift = scale = NONE
        else:
            scale = _half(np.float32(most - low) / MOST)
        step = _full(scale)
        inverse = ZERO if step < SMALLEST else np.float32(ONE / step)
        place = row + g * LEVEL_BYTES
        for i in range(LEVEL_BYTES):
            one = _level(np.float32(wide(numbers[first + i]) - low) * inverse) if i < count else np.uint8(0)
            i_high = i + LEVEL_BYTES
            other = _level(np.float32(wide(numbers[first + i_high]) - low) * inverse) if i_high < count else np.uint8(0)
            pool[place + i] = one | np.uint8(other << np.uint8(4))
        place = row + groups * LEVEL_BYTES + g * FACTOR_BYTES
        for i, half in enumerate((shift, scale)):
            pool[place + 2 * i], pool[place + 2 * i + 1] = np.uint8(half), np.uint8(half >> np.uint32(8))
