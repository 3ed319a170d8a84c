"""The steps of a softmax over a row of scores, compiled."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from baton.engine.cpu import primitives
from baton.engine.cpu.dots import repeat
from baton.engine.cpu.primitives import ONE, SUMS, TWO, ZERO, exp
from baton.engine.cpu.tile import FLOATS, I32, I64, INTS, LANES, OUTS, VECTORS, arguments_of, fused, spread, store_row, vectors


@njit(fastmath=SUMS, error_model="numpy")
def cap(scores, count, softcap):
    """cap · tanh(s / cap), in place, with tanh(x) = 1 - 2 / (e^2x + 1); nothing if there is no cap."""
    if softcap > ZERO:
        for i in range(count):
            scores[i] = softcap - TWO * softcap / (exp(TWO * scores[i] / softcap) + ONE)


@njit
def _in_order(x):
    bits = np.float32(x).view(np.int32)
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@njit
def greatest_of(values, count):
    """Floats have the same order as their bits read as integers, once the bits of negative numbers are inverted; a processor compares many
    integers at a time."""
    greatest = np.int32(-(2**31))
    for i in range(count):
        greatest = max(greatest, _in_order(values[i]))
    return np.int32(_in_order(np.int32(greatest).view(np.float32))).view(np.float32)


@njit(fastmath=SUMS, error_model="numpy")
def weigh(scores, count, softcap):
    """e^(score - greatest) of the first `count` scores, in place; scores are capped first if there is a cap. Returns the sum."""
    cap(scores, count, softcap)
    greatest, total = greatest_of(scores, count), ZERO
    for i in range(count):
        scores[i] = exp(scores[i] - greatest)
        total += scores[i]
    return total


@intrinsic
def scale_scores(context: Any, scores: Any, count: Any, scale: Any) -> Any:
    """Multiplies some scores, a multiple of OUTS, by `scale`, and returns the greatest one; NaN is none."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scores, count, scale = arguments_of(context, builder, signature, arguments)
        by = spread(builder, scale)

        def body(i: Any, greatest: list[Any]) -> list[Any]:
            place = builder.gep(scores, [builder.mul(i, I64(OUTS))])
            scaled = [builder.fmul(each, by) for each in vectors(builder, place, FLOATS)]
            store_row(builder, scaled, place)
            return [_greater(builder, a, b) for a, b in zip(scaled, greatest, strict=True)]

        none = ir.Constant(FLOATS, [-np.inf] * LANES)
        return _across(builder, repeat(builder, builder.udiv(count, I64(OUTS)), [none] * VECTORS, body), _greater)

    return types.float32(scores, types.int64, types.float32), generate


@intrinsic
def exponentials(context: Any, scores: Any, count: Any, greatest: Any, weights: Any) -> Any:
    """e^(score - greatest) of some scores, a multiple of OUTS, into `weights`; returns their sum. No score is above the greatest."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scores, count, greatest, weights = arguments_of(context, builder, signature, arguments)
        zero = spread(builder, greatest)

        def body(i: Any, sums: list[Any]) -> list[Any]:
            at = builder.mul(i, I64(OUTS))
            made = [_exp(builder, builder.fsub(each, zero)) for each in vectors(builder, builder.gep(scores, [at]), FLOATS)]
            store_row(builder, made, builder.gep(weights, [at]))
            return [builder.fadd(total, each) for total, each in zip(sums, made, strict=True)]

        none = ir.Constant(FLOATS, [0.0] * LANES)
        sums = repeat(builder, builder.udiv(count, I64(OUTS)), [none] * VECTORS, body)
        return _across(builder, sums, lambda builder, a, b: builder.fadd(a, b))

    return types.float32(scores, types.int64, types.float32, weights), generate


def _greater(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _across(builder: Any, found: list[Any], both: Any) -> Any:
    """One number of all the numbers of some vectors."""
    one, *others = found
    for each in others:
        one = both(builder, one, each)
    half = LANES // 2
    while half:
        indices = ir.Constant(INTS, [i + half if i < half else i for i in range(LANES)])
        one = both(builder, one, builder.shuffle_vector(one, one, indices))
        half //= 2
    return builder.extract_element(one, I32(0))


def _exp(builder: Any, x: Any) -> Any:
    """As `baton.engine.cpu.primitives.exp`, of numbers that are not above 0."""

    def all_(number: Any) -> Any:
        return ir.Constant(FLOATS, [float(number)] * LANES)

    least = all_(primitives.LEAST)
    x = builder.select(builder.fcmp_ordered("<", x, least), least, x)
    shifted = fused(builder, all_(primitives.ROUND), x, all_(primitives.LOG2_E))
    minus = builder.fsub(all_(primitives.ROUND), shifted)
    r = fused(builder, fused(builder, x, minus, all_(primitives.LN_2_HIGH)), minus, all_(primitives.LN_2_LOW))
    series = all_(primitives.T7)
    for term in (primitives.T6, primitives.T5, primitives.T4, primitives.T3, primitives.T2, ONE, ONE):
        series = fused(builder, all_(term), series, r)
    power = builder.shl(builder.bitcast(shifted, INTS), ir.Constant(INTS, [23] * LANES))
    return builder.fmul(series, builder.bitcast(builder.add(power, ir.Constant(INTS, [0x3F800000] * LANES)), FLOATS))
