"""Experts, compiled: which ones a token passes through, products of rows that each have a matrix of their own, and the sum of the results.

Letters in shapes are those of `baton.engine.model.moe`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numba import njit
from torch import Tensor

from baton.engine.cpu.group_tile import WORDS
from baton.engine.cpu.int4 import multiply_int4, product_int4
from baton.engine.cpu.int8 import multiply_int8, product_int8
from baton.engine.cpu.kernel import INT, REAL, ArgumentError, body, floats, int64s, kernel, named, numbers
from baton.engine.cpu.panels import CHUNK, Product, multiply, product
from baton.engine.cpu.primitives import ONE, SUMS, ZERO, exp, put, share, view_float32, view_int8, view_int32, view_like, view_uint16, wide
from baton.engine.cpu.softmax import weigh
from baton.engine.cpu.tile import OUTS
from baton.engine.model.linear import INT4_GROUP


class Each:
    """A `baton.engine.model.ops.Each`. Without owners, rows own the matrices in turns: `[A, in]` → `[A, out]`."""

    def __init__(self, products: Sequence[Product]) -> None:
        """Their matrices are of equal shapes and one type."""
        self._products = products  # whose memory the tables point to
        self._outs, self._width = products[0].outs, products[0].width
        self._kernel, self._unit = EACH[products[0].kernel]
        self._tables = torch.tensor([[part.data_ptr() for part in each.matrix] for each in products])

    def __call__(self, x: Tensor, owners: Tensor | None = None) -> Tensor:
        rows, width = x.shape
        if width + -width % self._unit != self._width:
            raise ArgumentError(f"x: must be [rows, {self._width}], got {list(x.shape)}")
        assigned = rows if owners is None else len(owners)
        out = x.new_empty(assigned, self._outs)
        self._kernel(x, owners if owners is None else owners.contiguous(), self._tables, out, assigned // max(rows, 1))
        return out


def each(products: Sequence[object]) -> Each | None:
    """None: they are not all products of one kernel with matrices of equal shapes."""
    ours = [each for each in products if isinstance(each, Product) and each.kernel in EACH]
    kinds = {(each.kernel, each.outs, each.width, tuple((part.dtype, part.shape) for part in each.matrix)) for each in ours}
    return Each(ours) if len(ours) == len(products) and len(kinds) == 1 else None


# --- which experts -------------------------------------------------------------------------------------------------------------------


@njit(fastmath=SUMS, error_model="numpy")
def _score(logits, scores, sigmoid):
    if sigmoid:
        for e in range(len(logits)):
            scores[e] = ONE / (ONE + exp(-logits[e]))
    else:
        scores[:] = logits
        total = weigh(scores, len(scores), ZERO)
        for e in range(len(scores)):
            scores[e] /= total


@njit
def _greatest(values):
    """The first place of the greatest, or 0 if there is none."""
    found = 0
    for i in range(1, len(values)):
        if values[i] > values[found]:
            found = i
    return found


@njit
def _close(choice, groups, open_groups, two):
    """-inf for the experts of groups that are not among the best: a group is worth its best expert, or its two best."""
    size = len(choice) // groups
    worth = np.empty(groups, np.float32)
    for g in range(groups):
        some = choice[g * size : (g + 1) * size].copy()
        best = _greatest(some)
        worth[g], some[best] = some[best], -np.inf
        if two:
            worth[g] += some[_greatest(some)]
    for _ in range(open_groups):
        worth[_greatest(worth)] = -np.inf
    for g in range(groups):
        if worth[g] > -np.inf:
            choice[g * size : (g + 1) * size] = -np.inf


@kernel(
    "tokens * experts",
    logits=floats("tokens", "experts"),
    bias=replace(floats("experts"), optional=True),
    shares=floats("tokens", "chosen"),
    ids=int64s("tokens", "chosen"),
    sigmoid=INT,
    groups=INT,
    open_groups=INT,
    normalised=INT,
    scale=REAL,
)
def route(logits, bias, has_bias, shares, ids, tokens, experts, chosen, sigmoid, groups, open_groups, normalised, scale):
    """See `baton.engine.model.ops.Ops.route`. Of equal experts, the first is chosen."""
    first, last = share(tokens)
    scores, choice = np.empty(experts, np.float32), np.empty(experts, np.float32)
    for token in range(first, last):
        _score(logits[token * experts : (token + 1) * experts], scores, sigmoid)
        for e in range(experts):
            choice[e] = scores[e] + (bias[e] if has_bias else ZERO)
        if groups > 1:
            _close(choice, groups, open_groups, sigmoid)
        at, total = token * chosen, np.float32(1e-20)  # sigmoids may all be 0
        for k in range(chosen):
            found = _greatest(choice)
            ids[at + k], shares[at + k], choice[found] = found, scores[found], -np.inf
            total += scores[found]
        for k in range(chosen):
            shares[at + k] *= scale / total if normalised else scale


@kernel(
    "tokens * chosen * width",
    y=numbers("tokens * chosen", "width"),
    shares=floats("tokens", "chosen"),
    more=numbers("tokens", "width", optional=True),
    out=numbers("tokens", "width"),
)
def combine(y, shares, more, has_more, out, tokens, chosen, width):
    """See `baton.engine.model.ops.Ops.combine`."""
    first, last = share(tokens)
    sums = np.empty(width, np.float32)
    for token in range(first, last):
        if has_more:
            for i in range(width):
                sums[i] = wide(more[token * width + i])
        else:
            sums[:] = ZERO
        for k in range(token * chosen, (token + 1) * chosen):
            row, weight = y[k * width : (k + 1) * width], shares[k]
            for i in range(width):
                sums[i] += weight * wide(row[i])
        for i in range(width):
            put(out, token * width + i, sums[i])


# --- products ------------------------------------------------------------------------------------------------------------------------


@njit
def _take(x, x_stride, owners, owned, expert, first, some, rows):
    """Copies the rows of x that the expert owns into `some`, and their assignments into `rows`: up to CHUNK, from assignment `first` on.
    Returns the assignment to go on with, and how many rows it copied.

    `owners`: the expert of each assignment. If it is empty, each expert owns every `step`-th assignment. `owned`: how many assignments
    there are, how many each row has, the step, and how many numbers a row has.
    """
    (assigned, times, step, width), a, count = owned, first, 0
    while a < assigned and count < CHUNK:
        if len(owners) == 0 or owners[a] == expert:
            row = a // times * x_stride
            some[count * width : (count + 1) * width] = x[row : row + width]
            rows[count] = a
            count += 1
        a += step
    return a, count


@njit
def _give(result, rows, count, outs, out):
    """This thread's part of the rows."""
    first, last = share(-(-outs // OUTS))
    first, last = first * OUTS, min(last * OUTS, outs)
    for i in range(count):
        at = rows[i] * outs
        out[at + first : at + last] = result[i * outs + first : i * outs + last]


@body
def _padded(outs):
    return -(-outs // OUTS) * OUTS


@body
def _by_one(x, table, rows, out, width, outs):
    weights, bias = view_like(x, table[0], _padded(outs) * width), view_float32(table[1], _padded(outs))
    multiply(x, weights, bias, out, rows, width, outs)


@body
def _by_one_int8(x, table, rows, out, width, outs):
    weights, scales = view_int8(table[0], _padded(outs) * width), view_float32(table[1], _padded(outs))
    zeros, bias = view_int32(table[2], _padded(outs)), view_float32(table[3], _padded(outs))
    multiply_int8(x, weights, (scales, zeros, bias), out, rows, width, outs)


@body
def _by_one_int4(x, table, rows, out, width, outs):
    groups = _padded(outs) * -(-width // INT4_GROUP)
    weights, scales, bias = view_int32(table[0], groups * WORDS), view_uint16(table[1], groups), view_float32(table[2], _padded(outs))
    multiply_int4(x, weights, scales, bias, out, rows, width, outs)


def _kernel(name: str, parts: int, by_one: Callable[..., None]) -> Callable[..., None]:
    """`by_one` multiplies rows of x with the matrix whose `parts` are at the addresses in a row of the table."""

    @kernel(
        "rows * times * outs * width",
        x=numbers("rows", "width", strided=1),
        owners=replace(int64s("rows * times"), optional=True),
        tables=int64s("experts", str(parts)),
        out=numbers("rows * times", "outs"),
        times=INT,
    )
    @named(name)
    def each(x, x_stride0, owners, has_owners, tables, out, rows, width, times, experts, outs):
        some, result, taken = np.empty(CHUNK * width, x.dtype), np.empty(CHUNK * outs, out.dtype), np.empty(CHUNK, np.int64)
        owners, owned = owners if has_owners else owners[:0], (rows * times, times, 1 if has_owners else experts, width)
        for expert in range(experts):
            next_, table = 0 if has_owners else expert, tables[parts * expert : parts * (expert + 1)]
            while next_ < rows * times:
                next_, count = _take(x, x_stride0, owners, owned, expert, next_, some, taken)
                if count:
                    by_one(some, table, count, result, width, outs)
                    _give(result, taken, count, outs, out)

    return each


product_each = _kernel("product_each", 2, _by_one)
product_int8_each = _kernel("product_int8_each", 4, _by_one_int8)
product_int4_each = _kernel("product_int4_each", 3, _by_one_int4)

# Kernel of a product → the kernel for `Each`, and a number: the width of x is rounded up to a multiple of it.
EACH: dict[Callable[..., None], tuple[Callable[..., None], int]] = {
    product: (product_each, 1),
    product_int8: (product_int8_each, 1),
    product_int4: (product_int4_each, INT4_GROUP),
}
