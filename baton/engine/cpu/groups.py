"""Products with W as a checkpoint has it: groups of neighbours of a row share a scale and, perhaps, a shift; x is rounded to int8.

Numbers have 4 or 8 bits. Scales and shifts are float16 if all are exactly that, else float32. See `baton.engine.cpu.tile` for panels and
tiles.
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from numba import njit, types
from numba.extending import overload
from torch import Tensor

from baton.engine.cpu.group_tile import BLOCK, GROUP_ROWS, MIDDLE, add_scaled_groups
from baton.engine.cpu.kernel import INT, REAL, Array, body, float16s, floats, int32s, int64s, kernel, named, numbers, uint8s
from baton.engine.cpu.panels import CHUNK, CHUNK_BYTES, OUTS_PADDED, Product, padded
from baton.engine.cpu.primitives import in_parts, part_of, put, round_row, share
from baton.engine.cpu.tile import OUTS, step_rows
from baton.engine.model.memory import zeros
from baton.engine.model.quantised.matrix import Quantised

WIDE = "(-(-width // group) * group)"
FACTORS = f"{OUTS_PADDED} * -(-width // group)"


def fits(matrix: Quantised) -> bool:
    return matrix.group % BLOCK == 0 and matrix.numbers.numel() > 0


def multiplier(matrix: Quantised, bias: Tensor | None) -> Product:
    """See `Ops.stored_multiplier`; the matrix must fit."""
    (outs, _), bits, scales, shifts = matrix.shape, matrix.bits, matrix.scales.float(), matrix.shifts
    if shifts is not None and MIDDLE[bits] != matrix.middle:
        shifts = shifts + scales * (matrix.middle - MIDDLE[bits])
    half = _is_half(scales) and (shifts is None or (bits == 4 and _is_half(shifts)))
    if not half and shifts is None:
        shifts = scales * -MIDDLE[bits]
    factors = [_beside(each.half() if half else each) for each in (scales, shifts) if each is not None]
    whole = (_panels(matrix), *factors, padded(bias, outs), matrix.group)
    return Product(PRODUCTS[bits, half, shifts is not None], whole, matrix.shape)


def _is_half(factors: Tensor) -> bool:
    return bool((factors.half().float() == factors).all())


def _panels(matrix: Quantised) -> Tensor:
    """int32 or, of numbers of 8 bits, uint8, in a row."""
    outs, width = matrix.shape
    whole = F.pad(matrix.numbers, (0, -width % matrix.group, 0, -outs % OUTS))
    if matrix.bits == 8:
        four = whole.bitwise_xor(matrix.middle - MIDDLE[8]).view(-1, OUTS, whole.shape[1] // 4, 4).transpose(1, 2)
        return zeros(tuple(four.shape), torch.uint8).copy_(four).view(-1)
    eight = whole.view(-1, OUTS, whole.shape[1] // 8, 2, 4)
    packed = (eight[..., 0, :] | eight[..., 1, :] << 4).transpose(1, 2)
    return zeros(tuple(packed.shape), torch.uint8).copy_(packed).view(torch.int32).view(-1)


def _beside(factors: Tensor) -> Tensor:
    """`[outs, groups]` in the order of the panels."""
    whole = F.pad(factors, (0, 0, 0, -len(factors) % OUTS)).view(-1, OUTS, factors.shape[1])
    return zeros((len(whole), factors.shape[1], OUTS), factors.dtype).copy_(whole.transpose(1, 2)).view(-1)


def rest(array, at):
    """What follows of an array, if there is one."""


@overload(rest)
def _rest_of(array, at):
    return (lambda array, at: array[at:]) if isinstance(array, types.Array) else lambda array, at: None


@njit
def _add_up(rounded, group, totals):
    for g in range(len(totals)):
        total = np.int32(0)
        for i in range(g * group, (g + 1) * group):
            total += np.int32(np.int8(rounded[i]))
        totals[g] = total


@body
def multiply_groups(x, weights, scales, shifts, bias, group, out, rows, width, outs):
    """Each thread rounds its rows itself."""
    begin, end, first, last = part_of(rows, GROUP_ROWS, CHUNK, -(-outs // OUTS))
    groups = -(-width // group)
    wide, sums = groups * group, np.empty(GROUP_ROWS * OUTS, np.float32)
    size = in_parts(end - begin, GROUP_ROWS, min(CHUNK, CHUNK_BYTES // wide))
    rounded = np.zeros(size * wide, np.uint8)
    totals, steps = np.empty(size * groups, np.int32), np.empty(size, np.float32)
    panel_size = len(weights) // -(-outs // OUTS)
    for start in range(begin, end, size):
        count = min(size, end - start)
        for row in range(count):
            steps[row] = round_row(x[(start + row) * width : (start + row + 1) * width], 0, rounded[row * wide :])
            _add_up(rounded[row * wide :], group, totals[row * groups : (row + 1) * groups])
        for panel in range(first, last):
            base, at = panel * OUTS, panel * OUTS * groups
            part, factors, more = weights[panel * panel_size :], scales[at:], rest(shifts, at)
            for tile in range(0, count, GROUP_ROWS):
                some = min(GROUP_ROWS, count - tile)
                sizes = groups, group // BLOCK
                add_scaled_groups(rounded[tile * wide :], part, factors, more, totals[tile * groups :], some, sizes, sums)
                step_rows(sums, some, steps[tile:], bias[base:], out[(start + tile) * outs + base :], outs, min(OUTS, outs - base))


def stored(weights, at, o, k):
    """The kth number of row `o` in the panel that begins with int32 `at`, as the products take it: with MIDDLE added."""


@overload(stored)
def _stored_of(weights, at, o, k):
    def four(weights, at, o, k):
        byte = np.uint32(weights[at + k // 8 * OUTS + o]) >> np.uint32(8 * (k % 4))
        return np.int32((byte >> np.uint32(k // 4 % 2 * 4)) & np.uint32(15))

    def eight(weights, at, o, k):
        return np.int32(weights[(at + k // 4 * OUTS + o) * 4 + k % 4])

    def eight_signed(weights, at, o, k):
        return np.int32(np.int8(weights[(at + k // 4 * OUTS + o) * 4 + k % 4]))

    return four if weights.dtype == types.int32 else eight if MIDDLE[8] else eight_signed


def factor(factors, at):
    """A scale or shift as float32; without shifts, NaN stands for it."""


@overload(factor)
def _factor_of(factors, at):
    if not isinstance(factors, types.Array):
        return lambda factors, at: np.float32(np.nan)
    if factors.dtype == types.float32:
        return lambda factors, at: factors[at]

    def from_half(factors, at):
        bits = np.uint32(factors[at])
        size = np.uint32((bits & np.uint32(0x7FFF)) << np.uint32(13)).view(np.float32) * np.float32(2.0**112)
        return -size if bits & np.uint32(0x8000) else size

    return from_half


@body
def take_rows(ids, weights, scales, shifts, group, out, rows, width, outs, middle, scale):
    """Rows of W times `scale`. NaN for an id that is not in it."""
    groups, words = -(-width // group), len(weights) * weights.itemsize // 4 // -(-outs // OUTS)
    first, last = share(rows)
    for row in range(first, last):
        entry, found = out[row * width : (row + 1) * width], ids[row]
        if not 0 <= found < outs:
            for i in range(width):
                put(entry, i, np.float32(np.nan))
            continue
        panel, o = found // OUTS, found % OUTS
        for g in range(groups):
            at = (panel * groups + g) * OUTS + o
            step, shift = factor(scales, at), factor(shifts, at)
            shift = np.float32(-middle) * step if shift != shift else shift
            for i in range(g * group, min(width, (g + 1) * group)):
                put(entry, i, (np.float32(stored(weights, panel * words, o, i)) * step + shift) * scale)


Kernels = tuple[Callable[..., None], Callable[..., None]]  # the product, and what takes rows


def _kernels(name: str, weights: Array, factors: Array) -> Kernels:
    middle = MIDDLE[4 if weights is FOUR else 8]

    @kernel(
        "outs * width", x=numbers("rows", "width"), weights=weights, scales=factors, bias=floats(OUTS_PADDED), group=INT,
        out=numbers("rows", "outs"),
    )  # fmt: skip
    @named(f"product_{name}")
    def multiply(x, weights, scales, bias, group, out, rows, width, outs):
        multiply_groups(x, weights, scales, None, bias, group, out, rows, width, outs)

    @kernel(
        "rows * width", ids=int64s("rows"), weights=weights, scales=factors, group=INT, outs=INT, scale=REAL, out=numbers("rows", "width"),
    )  # fmt: skip
    @named(f"take_{name}")
    def take(ids, weights, scales, group, outs, scale, out, rows, width):
        take_rows(ids, weights, scales, None, group, out, rows, width, outs, middle, scale)

    return multiply, take


def _shifted_kernels(name: str, weights: Array, factors: Array) -> Kernels:
    @kernel(
        "outs * width", x=numbers("rows", "width"), weights=weights, scales=factors, shifts=factors, bias=floats(OUTS_PADDED), group=INT,
        out=numbers("rows", "outs"),
    )  # fmt: skip
    @named(f"product_{name}")
    def multiply(x, weights, scales, shifts, bias, group, out, rows, width, outs):
        multiply_groups(x, weights, scales, shifts, bias, group, out, rows, width, outs)

    @kernel(
        "rows * width", ids=int64s("rows"), weights=weights, scales=factors, shifts=factors, group=INT, outs=INT, scale=REAL,
        out=numbers("rows", "width"),
    )  # fmt: skip
    @named(f"take_{name}")
    def take(ids, weights, scales, shifts, group, outs, scale, out, rows, width):
        take_rows(ids, weights, scales, shifts, group, out, rows, width, outs, 0, scale)

    return multiply, take


FOUR, EIGHT = int32s(f"{OUTS_PADDED} * {WIDE} // 8"), uint8s(f"{OUTS_PADDED} * {WIDE}")
HALF, SINGLE = float16s(FACTORS), floats(FACTORS)
product_half4, take_half4 = _kernels("half4", FOUR, HALF)
product_half4_shifted, take_half4_shifted = _shifted_kernels("half4_shifted", FOUR, HALF)
product_single4, take_single4 = _shifted_kernels("single4", FOUR, SINGLE)
product_half8, take_half8 = _kernels("half8", EIGHT, HALF)
product_single8, take_single8 = _shifted_kernels("single8", EIGHT, SINGLE)
# (bits, whether scales and shifts are float16, whether there are shifts)
PRODUCTS = {
    (4, True, False): product_half4,
    (4, True, True): product_half4_shifted,
    (4, False, True): product_single4,
    (8, True, False): product_half8,
    (8, False, True): product_single8,
}
TAKES = {
    product_half4: take_half4,
    product_half4_shifted: take_half4_shifted,
    product_single4: take_single4,
    product_half8: take_half8,
    product_single8: take_single8,
}


class Rows:
    """A table of a product's rows: see `baton.engine.model.ops.Ops.table`."""

    def __init__(self, product: Product, dtype: torch.dtype) -> None:
        self._take, self._outs, self._width, self._dtype = TAKES[product.kernel], product.outs, product.width, dtype
        *self._matrix, _, self._group = product.matrix

    def __call__(self, ids: Tensor, scale: float) -> Tensor:
        out = ids.new_empty(len(ids), self._width, dtype=self._dtype)
        self._take(ids.contiguous(), *self._matrix, self._group, self._outs, scale, out)
        return out
