"""The operations between two matrices of a layer, compiled. `baton.engine.model.ops.Ops` defines what they compute."""

import math

import numpy as np
from numba import njit

from baton.engine.cpu.kernel import INT, REAL, complexes, floats, int64s, kernel, numbers
from baton.engine.cpu.primitives import ONE, SUMS, ZERO, exp, magnitude, put, share, wide
from baton.engine.cpu.softmax import greatest_of

GELU = np.float32(2 * math.sqrt(2 / math.pi))
GELU_CUBE = np.float32(0.044715)
INFINITE = np.uint32(0x7F800000)  # the bits of a float32
SEARCHED = 256  # logits among which the greatest is looked for again, to find its place


@njit(fastmath=SUMS, error_model="numpy")
def _inverse_rms(values, eps):
    """1 / √(mean(values²) + eps)."""
    squares = ZERO
    for i in range(len(values)):
        squares += wide(values[i]) * wide(values[i])
    return ONE / np.float32(math.sqrt(squares / np.float32(len(values)) + eps))


@kernel(
    "rows * width",
    SUMS,
    x=numbers("rows", "width"),
    y=numbers("rows", "width", optional=True),
    weight=numbers("width"),
    out=numbers("rows", "width"),
    eps=REAL,
)
def add_rms_norm(x, y, has_y, weight, out, rows, width, eps):
    first, last = share(rows)
    for start in range(first * width, last * width, width):
        row, normed = x[start : start + width], out[start : start + width]
        if has_y:
            added = y[start : start + width]
            for i in range(width):
                put(row, i, wide(row[i]) + wide(added[i]))
        scale = _inverse_rms(row, eps)
        for i in range(width):
            put(normed, i, wide(row[i]) * scale * wide(weight[i]))


@kernel("2 * rows * width", SUMS, gate_up=numbers("rows", "2 * width"), out=numbers("rows", "width"), gelu=INT)
def gated(gate_up, out, rows, width, gelu):
    """gate · up / (1 + e^(-a · gate)): a = 1 is SiLU; a = 2 √(2/π) (1 + 0.044715 gate²) is GELU's tanh form."""
    first, last = share(rows)
    for start in range(first * width, last * width, width):
        gates, ups, row = gate_up[2 * start : 2 * start + width], gate_up[2 * start + width :], out[start : start + width]
        if gelu:
            for i in range(width):
                gate = wide(gates[i])
                sharp = gate * GELU * (ONE + GELU_CUBE * gate * gate)
                put(row, i, gate / (ONE + exp(-sharp)) * wide(ups[i]))
        else:
            for i in range(width):
                gate = wide(gates[i])
                put(row, i, gate / (ONE + exp(-gate)) * wide(ups[i]))


@kernel(
    "rows * heads * dim",
    SUMS,
    x=numbers("rows", "heads", "dim", strided=2),
    rotation=complexes("rows", "1", "dim // 2"),
)
def rotate(x, x_stride0, x_stride1, rotation, rows, heads, dim):
    """Every two neighbours of x are a complex number, which is multiplied in place by one of `rotation`."""
    first, last = share(rows)
    for row in range(first, last):
        turns = rotation[row * dim : (row + 1) * dim]
        for head in range(heads):
            pairs = x[row * x_stride0 + head * x_stride1 :]
            for i in range(dim // 2):
                real, imaginary, cosine, sine = wide(pairs[2 * i]), wide(pairs[2 * i + 1]), turns[2 * i], turns[2 * i + 1]
                put(pairs, 2 * i, real * cosine - imaginary * sine)
                put(pairs, 2 * i + 1, real * sine + imaginary * cosine)


@njit(error_model="numpy")
def _butterflies(values, size):
    """Sums and differences of numbers that lie 1, 2, 4 … apart, within every `size` of them."""
    apart = 1
    while apart < size:
        for first in range(0, len(values), 2 * apart):
            for i in range(first, first + apart):
                one, other = values[i], values[i + apart]
                values[i], values[i + apart] = one + other, one - other
        apart *= 2


@kernel("rows * heads * dim * 8", x=numbers("rows", "heads", "dim", strided=2), size=INT)
def turn(x, x_stride0, x_stride1, rows, heads, dim, size):
    """See `baton.engine.model.ops.Ops.turn_`."""
    first, last = share(rows)
    values, scale = np.empty(dim, np.float32), ONE / np.float32(math.sqrt(size))
    for row in range(first, last):
        for head in range(heads):
            numbers_of = x[row * x_stride0 + head * x_stride1 :]
            for i in range(dim):
                values[i] = wide(numbers_of[i])
            _butterflies(values, size)
            for i in range(dim):
                put(numbers_of, i, values[i] * scale)


@kernel("rows * width", table=numbers("entries", "width"), ids=int64s("rows"), out=numbers("rows", "width"), scale=REAL)
def embed(table, entries, ids, out, rows, width, scale):
    """Rows of the table, times `scale`. NaN for an id that is not in it."""
    first, last = share(rows)
    for row in range(first, last):
        entry, found = out[row * width : (row + 1) * width], ids[row]
        if not 0 <= found < entries:
            for i in range(width):
                put(entry, i, np.float32(math.nan))
        else:
            values = table[found * width : (found + 1) * width]
            for i in range(width):
                put(entry, i, wide(values[i]) * scale)


@kernel("8 * rows * half", positions=int64s("rows"), frequencies=floats("half"), out=complexes("rows", "1", "half"), amplitude=REAL)
def turns(positions, frequencies, out, rows, half, amplitude):
    """See `baton.engine.model.rope.rotation`."""
    first, last = share(rows)
    for row in range(first, last):
        for i in range(half):
            angle = np.float32(positions[row]) * frequencies[i]
            out[2 * (row * half + i)] = amplitude * np.float32(math.cos(angle))
            out[2 * (row * half + i) + 1] = amplitude * np.float32(math.sin(angle))


@njit
def _greatest(values):
    """The greatest, or infinity if one is NaN."""
    largest = np.uint32(0)
    for i in range(len(values)):
        largest = max(largest, magnitude(values[i]))
    return np.float32(math.inf) if largest > INFINITE else greatest_of(values, len(values))


@kernel("rows * width", logits=floats("rows", "width"), ids=int64s("rows"))
def greatest(logits, ids, rows, width):
    """See `baton.engine.model.sampler.greatest`."""
    first, last = share(rows)
    for row in range(first, last):
        values, best, found = logits[row * width : (row + 1) * width], np.float32(-math.inf), 0
        for start in range(0, width, SEARCHED):
            value = _greatest(values[start : start + SEARCHED])
            if value > best:
                best, found = value, start
        while found < width and values[found] != best:
            found += 1
        ids[row] = found if abs(best) < math.inf else -1


@kernel("rows * width", logits=floats("rows", "width"), ids=int64s("rows", "most"))
def next_greatest(logits, ids, rows, width, most):
    """`ids[row]`: those of the greatest logits after the greatest, in descending order, of equal ones the first. What NaN does to them is
    not said."""
    first, last = share(rows)
    top, at = np.empty(most + 1, np.float32), np.empty(most + 1, np.int64)
    for row in range(first, last):
        values = logits[row * width : (row + 1) * width]
        top[:], at[:] = np.float32(-math.inf), 0
        for i in range(width):
            if values[i] > top[most]:
                place = most
                while place > 0 and values[i] > top[place - 1]:
                    top[place], at[place] = top[place - 1], at[place - 1]
                    place -= 1
                top[place], at[place] = values[i], i
        for place in range(most):
            ids[row * most + place] = at[place + 1]


@kernel(
    "tokens * dim * heads",
    SUMS,
    absorbed=numbers("tokens", "heads", "rank"),
    key=numbers("tokens", "dim"),
    turned=numbers("tokens", "heads", "dim - rank", strided=2),
    weight=numbers("rank"),
    out=numbers("tokens", "heads + 1", "dim"),
    eps=REAL,
)
def latent_heads(absorbed, key, turned, turned_stride0, turned_stride1, weight, out, tokens, heads, rank, dim, eps):
    """See `baton.engine.model.ops.Ops.latent_heads`."""
    first, last = share(tokens)
    for token in range(first, last):
        for head in range(heads):
            at, q = (token * (heads + 1) + head) * dim, token * heads + head
            out[at : at + rank] = absorbed[q * rank : (q + 1) * rank]
            start = token * turned_stride0 + head * turned_stride1
            out[at + rank : at + dim] = turned[start : start + dim - rank]
        at, row = (token * (heads + 1) + heads) * dim, key[token * dim : (token + 1) * dim]
        out[at + rank : at + dim] = row[rank:]
        scale = _inverse_rms(row[:rank], eps)
        for i in range(rank):
            put(out, at + i, wide(row[i]) * scale * wide(weight[i]))


@kernel("rows * heads * dim", SUMS, x=numbers("rows", "heads", "dim", strided=2), weight=numbers("heads", "dim"), eps=REAL)
def norm_heads(x, x_stride0, x_stride1, weight, rows, heads, dim, eps):
    """Each head of x becomes x / √(mean(x²) + eps) · weight, in place."""
    first, last = share(rows)
    for row in range(first, last):
        for head in range(heads):
            values, scales = x[row * x_stride0 + head * x_stride1 :], weight[head * dim :]
            scale = _inverse_rms(values[:dim], eps)
            for i in range(dim):
                put(values, i, wide(values[i]) * scale * wide(scales[i]))


@kernel("8 * rows * width", x=numbers("rows", "width"), out=floats("rows", "width"), cap=REAL)
def to_logits(x, out, rows, width, cap):
    """Returns float32; with a cap, cap · tanh(x / cap)."""
    first, last = share(rows * width)
    for i in range(first, last):
        value = wide(x[i])
        out[i] = cap * np.float32(math.tanh(value / cap)) if cap > 0 else value
