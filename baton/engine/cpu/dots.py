"""The innermost loops of attention over keys and values that lie anywhere in memory, in LLVM's language (see `baton.engine.cpu.tile`).

Sums are float32 and stay in registers. Every sum adds its products in an order that follows from the sizes of the head alone.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from baton.engine.cpu.tile import (
    FLOAT,
    FLOATS,
    I8,
    I16,
    I32,
    I64,
    INTS,
    KINDS,
    LANES,
    OUTS,
    arguments_of,
    called,
    fused,
    repeat,
    spread,
    starts_of,
    switch,
    widened,
)

KEYS = 8  # that are scored at a time
QUERIES = 2  # that share a read key or value
VECTORS = 4  # of a value that are summed at a time
NAMES = {FLOAT: "f32", I16: "i16", I8: "i8"}  # of LLVM's types


@intrinsic
def score_keys(
    context: Any, pool: Any, at: Any, head: Any, query: Any, query_stride: Any, rows: Any, dim: Any, scores: Any, score_stride: Any
) -> Any:
    """`scores[r, j] = Σ_d query[r, d] · pool[at[j] + head + d]` for KEYS keys and 1 to QUERIES rows.

    Rows of `query` lie `query_stride` numbers apart, those of `scores` `score_stride`. A row of the query ends with zeros up to a
    multiple of LANES.
    """

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        pool, at, head, query, query_stride, rows, dim, scores, score_stride = arguments_of(context, builder, signature, given)
        keys = [row_at(builder, pool, at, head, I64(j)) for j in range(KEYS)]
        case = partial(_score, builder, keys, (query, query_stride), dim, (scores, score_stride))
        switch(builder, rows, range(1, QUERIES + 1), case)
        return context.get_dummy_value()

    int64 = types.int64
    return types.void(pool, at, int64, query, int64, int64, int64, scores, int64), generate


def _score(builder: Any, keys: list[Any], query: tuple[Any, Any], dim: Any, scores: tuple[Any, Any], count: int) -> None:
    """`count` rows of `score_keys`. `query`, `scores`: where the first row begins, and the stride of rows."""
    queries = starts_of(builder, *query, count)
    together = KEYS if LANES == 16 else KEYS // count  # their sums fit the registers
    for first in range(0, KEYS, together):
        some = keys[first : first + together]
        sums = _over(builder, dim, [zeros()] * (count * together), partial(_add_products, builder, queries, some))
        for r in range(count):
            place = builder.gep(scores[0], [builder.add(builder.mul(scores[1], I64(r)), I64(first))])
            store_totals(builder, sums[r * together : (r + 1) * together], place)


def _add_products(builder: Any, queries: list[Any], keys: list[Any], d: Any, sums: Sequence[Any], left: Any = None) -> list[Any]:
    own = [builder.load(builder.bitcast(builder.gep(each, [d]), FLOATS.as_pointer()), align=4) for each in queries]
    read = [_floats(builder, builder.gep(key, [d]), left) for key in keys]
    return [fused(builder, sums[r * len(keys) + j], read[j], own[r]) for r in range(len(queries)) for j in range(len(keys))]


@intrinsic
def add_values(
    context: Any,
    pool: Any,
    at: Any,
    head: Any,
    count: Any,
    weights: Any,
    weight_stride: Any,
    rows: Any,
    vectors: Any,
    left: Any,
    sums: Any,
    sum_stride: Any,
) -> Any:
    """`sums[r, d] += Σ_j weights[r, j] · pool[at[j] + head + d]` for `count` values and 1 to QUERIES rows, and for the ds of up to VECTORS
    whole vectors, or (`vectors` is 0) for the `left` ds of a part of one. Rows lie `weight_stride` and `sum_stride` numbers apart."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        pool, at, head, count, weights, weight_stride, rows, vectors, left, sums, sum_stride = arguments_of(
            context, builder, signature, given
        )
        number = builder.add(builder.mul(rows, I64(VECTORS + 1)), vectors)
        value = partial(row_at, builder, pool, at, head)
        case = partial(_add, builder, value, count, (weights, weight_stride), left, (sums, sum_stride))
        switch(builder, number, range(VECTORS + 1, (QUERIES + 1) * (VECTORS + 1)), case)
        return context.get_dummy_value()

    int64 = types.int64
    return types.void(pool, at, int64, int64, weights, int64, int64, int64, int64, sums, int64), generate


def _add(
    builder: Any, value: Callable[[Any], Any], count: Any, weights: tuple[Any, Any], left: Any, sums: tuple[Any, Any], number: int
) -> None:
    """A case of `add_values`: `number // (VECTORS + 1)` rows, and the rest whole vectors. `value(j)`: where the jth one begins; `weights`,
    `sums`: where the first row begins, and the stride of rows."""
    queries, whole = divmod(number, VECTORS + 1)
    starts = starts_of(builder, *sums, queries)
    places = [builder.bitcast(builder.gep(start, [I64(v * LANES)]), FLOATS.as_pointer()) for start in starts for v in range(max(whole, 1))]
    factors = starts_of(builder, *weights, queries)
    begun = [builder.load(place, align=4) for place in places]
    added = repeat(builder, count, begun, partial(_add_value, builder, value, factors, whole, left))
    for place, total in zip(places, added, strict=True):
        builder.store(total, place, align=4)


def _add_value(
    builder: Any, value: Callable[[Any], Any], factors: list[Any], whole: int, left: Any, j: Any, sums: Sequence[Any]
) -> list[Any]:
    """The sums with the jth value added, times each row's factor."""
    place = value(j)
    read = [_floats(builder, builder.gep(place, [I64(v * LANES)])) for v in range(whole)] or [_floats(builder, place, left)]
    by = [spread(builder, builder.load(builder.gep(each, [j]))) for each in factors]
    return [fused(builder, sums[r * len(read) + v], each, by[r]) for r in range(len(factors)) for v, each in enumerate(read)]


@intrinsic
def turn_keys(context: Any, pool: Any, at: Any, k: Any, panel: Any) -> Any:
    """Copies LANES steps of LANES keys, from step k on, into their columns of a panel `[steps, OUTS, group]`."""
    kind = ir.VectorType(KINDS[pool.dtype].loaded, LANES)

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        pool, at, k, panel = arguments_of(context, builder, signature, given)
        keys = [builder.gep(pool, [builder.load(builder.gep(at, [I64(j)]))]) for j in range(LANES)]
        lines = [builder.bitcast(builder.gep(builder.bitcast(key, kind.element.as_pointer()), [k]), kind.as_pointer()) for key in keys]
        turned = [builder.load(line, align=1) for line in lines]
        half = LANES // 2
        while half:  # of each square of 2 · half numbers a side, swap the two quarters off the diagonal
            low = [i if not i & half else LANES + i - half for i in range(LANES)]
            high = [i + half if not i & half else LANES + i for i in range(LANES)]
            for i in (i for i in range(LANES) if not i & half):
                pair = turned[i], turned[i + half]
                turned[i], turned[i + half] = (_shuffled(builder, *pair, indices) for indices in (low, high))
            half //= 2
        first = builder.gep(builder.bitcast(panel, kind.element.as_pointer()), [builder.mul(k, I64(OUTS))])
        for step, column in enumerate(turned):
            builder.store(column, builder.bitcast(builder.gep(first, [I64(step * OUTS)]), kind.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(pool, at, types.int64, panel), generate


@intrinsic
def lay_values(context: Any, pool: Any, at: Any, d: Any, panel: Any) -> Any:
    """Copies the OUTS numbers from the dth on of a group of values into a step of a panel `[OUTS, group]`."""
    group = KINDS[pool.dtype].group

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        pool, at, d, panel = arguments_of(context, builder, signature, given)
        kind = ir.VectorType(pool.type.pointee, OUTS)
        starts = [row_at(builder, pool, at, d, I64(j)) for j in range(group)]
        values = [builder.load(builder.bitcast(start, kind.as_pointer()), align=1) for start in starts]
        side_by_side = [j * OUTS + o for o in range(OUTS) for j in range(group)]
        step = _shuffled(builder, values[0], values[1], side_by_side) if group == 2 else values[0]
        builder.store(step, builder.bitcast(panel, step.type.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(pool, at, types.int64, panel), generate


def row_at(builder: Any, pool: Any, at: Any, head: Any, j: Any) -> Any:
    """Where the jth row of a head begins."""
    return builder.gep(pool, [builder.add(builder.load(builder.gep(at, [j])), head)])


def _over(builder: Any, dim: Any, starts: list[Any], add: Callable[..., list[Any]]) -> list[Any]:
    """`add(d, sums)` for each whole vector of `dim` numbers, and `add(d, sums, left)` for what is left."""
    left = builder.urem(dim, I64(LANES))
    whole = builder.sub(dim, left)
    sums = repeat(builder, builder.udiv(dim, I64(LANES)), starts, lambda i, each: add(builder.mul(i, I64(LANES)), each))
    some = builder.zext(builder.icmp_unsigned("!=", left, I64(0)), I64)
    return repeat(builder, some, sums, lambda _, each: add(whole, each, left))


def _floats(builder: Any, place: Any, left: Any = None) -> Any:
    """A vector of float32, bfloat16 or int8 as float32. `left`: only so many numbers are read; the others are zero."""
    kind = ir.VectorType(place.type.pointee, LANES)
    place = builder.bitcast(place, kind.as_pointer())
    if left is None:
        read = builder.load(place, align=1)
    else:
        there = builder.icmp_unsigned("<", ir.Constant(INTS, list(range(LANES))), spread(builder, builder.trunc(left, I32)))
        name = f"llvm.masked.load.v{LANES}{NAMES[kind.element]}.p0"
        read = called(builder, name, kind, place, I32(1), there, ir.Constant(kind, [0] * LANES))
    if kind.element == I8:
        return builder.sitofp(builder.sext(read, INTS), FLOATS)
    return widened(builder, read) if kind.element == I16 else read


def totals(builder: Any, sums: list[Any]) -> list[Any]:
    """The sum of each vector's numbers, in as few vectors as they fit: vectors are halved and added in pairs, so that none is left idle."""
    parts = LANES  # numbers that are still to be added, side by side, for each of the vectors that are one by now
    while parts > 1:
        low, high = [[g + i + half for g in range(0, LANES, parts) for i in range(parts // 2)] for half in (0, parts // 2)]
        if len(sums) > 1:
            low, high = [index + [LANES + i for i in index] for index in (low, high)]
        pairs = zip(sums[::2], sums[1::2], strict=True) if len(sums) > 1 else [(sums[0], sums[0])]
        sums = [builder.fadd(_shuffled(builder, a, b, low), _shuffled(builder, a, b, high)) for a, b in pairs]
        parts //= 2
    return sums


def store_totals(builder: Any, sums: list[Any], place: Any) -> None:
    """The `totals`, one after the other."""
    for part in totals(builder, sums):
        builder.store(part, builder.bitcast(place, part.type.as_pointer()), align=4)
        place = builder.gep(place, [I64(part.type.count)])


def _shuffled(builder: Any, a: Any, b: Any, indices: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(indices)), indices))


def zeros() -> Any:
    return ir.Constant(FLOATS, [0.0] * LANES)
