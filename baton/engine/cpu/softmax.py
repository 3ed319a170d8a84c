"""The steps of a softmax over a row of scores, compiled."""

import math
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from baton.engine.cpu.primitives import ONE, SUMS, TWO, ZERO, exp
from baton.engine.cpu.tile import (
    FLOATS,
    I32,
    I64,
    INTS,
    LANES,
    OUTS,
    VECTORS,
    arguments_of,
    fused,
    repeat,
    spread,
    store_normal_row,
    vectors,
)

LEAST = -125  # 2 to this is still a normal float32
TERMS = tuple(math.log(2) ** k / math.factorial(k) for k in range(8))  # of the series of 2^r, to the last place of a float32
TERMS_ROUNDED = TERMS[:5]  # to a fiftieth of the last place of a bfloat16


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
def greatest_score(context: Any, scores: Any, first: Any, count: Any) -> Any:
    """The greatest of `count` scores, a multiple of OUTS above 0, from `first` on; NaN is ignored."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scores, first, count = arguments_of(context, builder, signature, arguments)
        scores = builder.gep(scores, [first])
        found = repeat(builder, builder.udiv(count, I64(OUTS)), [_all(-np.inf)] * VECTORS, partial(_compare, builder, scores))
        return _across(builder, found, _greater)

    return types.float32(scores, types.int64, types.int64), generate


def _compare(builder: Any, scores: Any, i: Any, greatest: list[Any]) -> list[Any]:
    """The greatest, with the ith OUTS scores among them."""
    found = vectors(builder, builder.gep(scores, [builder.mul(i, I64(OUTS))]), FLOATS)
    return [_greater(builder, a, b) for a, b in zip(found, greatest, strict=True)]


@intrinsic
def powers(context: Any, scores: Any, first: Any, count: Any, factor: Any, greatest: Any, weights: Any) -> Any:
    """2^((score - greatest) · factor) of `count` scores, a multiple of OUTS, from the first on; into the same places of `weights`. Returns
    their sum. No score is above the greatest."""
    terms = TERMS if weights.dtype == types.float32 else TERMS_ROUNDED

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scores, first, count, factor, greatest, weights = arguments_of(context, builder, signature, arguments)
        scores, weights = (builder.gep(each, [first]) for each in (scores, weights))
        by, less = spread(builder, factor), spread(builder, builder.fneg(builder.fmul(greatest, factor)))
        body = partial(_raise, builder, scores, weights, by, less, terms)
        sums = repeat(builder, builder.udiv(count, I64(OUTS)), [_all(0)] * VECTORS, body)
        return _across(builder, sums, _added)

    return types.float32(scores, types.int64, types.int64, types.float32, types.float32, weights), generate


def _raise(builder: Any, scores: Any, weights: Any, by: Any, less: Any, terms: tuple[float, ...], i: Any, sums: list[Any]) -> list[Any]:
    """The sums, with the ith OUTS weights, which are stored: 2^(score · by + less)."""
    at = builder.mul(i, I64(OUTS))
    found = vectors(builder, builder.gep(scores, [at]), FLOATS)
    made = [_power(builder, fused(builder, less, each, by), terms) for each in found]
    store_normal_row(builder, made, builder.gep(weights, [at]))
    return [builder.fadd(total, each) for total, each in zip(sums, made, strict=True)]


def _added(builder: Any, a: Any, b: Any) -> Any:
    return builder.fadd(a, b)


def _greater(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _across(builder: Any, found: list[Any], both: Any) -> Any:
    """Reduces all the numbers of some vectors to one."""
    one, *others = found
    for each in others:
        one = both(builder, one, each)
    half = LANES // 2
    while half:
        indices = ir.Constant(INTS, [i + half if i < half else i for i in range(LANES)])
        one = both(builder, one, builder.shuffle_vector(one, one, indices))
        half //= 2
    return builder.extract_element(one, I32(0))


def _all(number: float) -> Any:
    return ir.Constant(FLOATS, [float(number)] * LANES)


def _power(builder: Any, x: Any, terms: tuple[float, ...]) -> Any:
    """2^x of numbers that are hardly above 0: 2^n · 2^r with |r| ≤ 1/2, at least 2^LEAST, and NaN of NaN. `terms`: of the series of 2^r.

    Sums may be reordered where this is used, so n is not found by adding a large number.
    """
    x = builder.select(builder.fcmp_ordered("<", x, _all(LEAST)), _all(LEAST), x)
    n = builder.fptosi(builder.fsub(x, _all(0.5)), INTS)  # what is cut off is at least 0 and below 1
    r = builder.fsub(x, builder.sitofp(n, FLOATS))
    series = _all(terms[-1])
    for term in reversed(terms[:-1]):
        series = fused(builder, _all(term), series, r)
    exponent = builder.shl(builder.add(n, ir.Constant(INTS, [127] * LANES)), ir.Constant(INTS, [23] * LANES))
    return builder.fmul(series, builder.bitcast(exponent, FLOATS))
