"""A softmax's numerators and their sum, compiled."""

import numpy as np
from numba import njit

from baton.engine.cpu.primitives import ONE, SUMS, TWO, ZERO, exp


@njit(fastmath=SUMS, error_model="numpy")
def weigh(scores, count, softcap):
    """e^(score - greatest) of the first `count` scores, in place; scores are capped first if there is a cap. Returns the sum."""
    if softcap > ZERO:
        for i in range(count):
            # cap · tanh(s / cap), tanh(x) = 1 - 2 / (e^2x + 1)
            scores[i] = softcap - TWO * softcap / (exp(TWO * scores[i] / softcap) + ONE)
    greatest, total = _greatest(scores, count), ZERO
    for i in range(count):
        scores[i] = exp(scores[i] - greatest)
        total += scores[i]
    return total


@njit
def _greatest(values, count):
    """Floats have the same order as their bits read as integers, once the bits of negative numbers are inverted; a processor compares many
    integers at a time."""
    greatest = np.int32(-(2**31))
    for i in range(count):
        greatest = max(greatest, _in_order(values[i]))
    return np.int32(_in_order(np.int32(greatest).view(np.float32))).view(np.float32)


@njit
def _in_order(x):
    bits = np.float32(x).view(np.int32)
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))
