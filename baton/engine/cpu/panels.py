"""Products with a matrix of weights, compiled, for any number of rows: at few rows nearly as fast as the weights can be read."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numba.extending import overload
from torch import Tensor

from baton.engine.core.pages import LINE
from baton.engine.cpu import amx, amx_products
from baton.engine.cpu.kernel import body, floats, kernel, numbers
from baton.engine.cpu.primitives import from_line, given, in_parts, room_for, share
from baton.engine.cpu.tile import BFLOAT16, FLOAT32, INT8, OUTS, ROWS, add_rows
from baton.engine.model.memory import zeros

TILES_FROM = 12  # rows of int8: fewer are multiplied nearly as fast as the weights can be read without AMX
CHUNK = 256 // ROWS * ROWS  # rows of x that stay in the cache of a core while a thread's panels pass: whole tiles
CHUNK_BYTES = 1 << 19
DEPTH = 256  # numbers of each row for which a panel stays in the cache
OUTS_PADDED = f"-(-outs // {OUTS}) * {OUTS}"
GROUPS = {torch.float32: FLOAT32.group, torch.bfloat16: BFLOAT16.group, torch.int8: INT8.group}
PANELS = f"{OUTS_PADDED} * width"


def fits(matrix: Tensor) -> bool:
    """`[outs, width]`: float32, bfloat16 or int8, and its rows are whole groups."""
    return matrix.dtype in GROUPS and matrix.numel() > 0 and matrix.shape[1] % GROUPS[matrix.dtype] == 0


def panels(matrix: Tensor) -> Tensor:
    """`[outs, width]` as panels, in a row (see `baton.engine.cpu.tile`). The last one ends with rows of zeros."""
    together, (outs, width) = GROUPS[matrix.dtype], matrix.shape
    packed = zeros((-(-outs // OUTS), width // together, OUTS, together), matrix.dtype)
    whole = outs // OUTS
    packed[:whole] = matrix[: whole * OUTS].view(-1, OUTS, width // together, together).transpose(1, 2)
    if rest := outs % OUTS:
        packed[-1, :, :rest] = matrix[-rest:].view(rest, -1, together).transpose(0, 1)
    return packed.view(-1)


class Product:
    """A `Multiply` by one of the kernels."""

    def __init__(self, kernel: Callable[..., None], matrix: tuple[Any, ...], shape: torch.Size) -> None:
        """`matrix`: tensors, and perhaps numbers, as the kernel wants them; `shape`: `[outs, width]`."""
        self.kernel, self.matrix = kernel, matrix
        self.outs, self.width = shape

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty(len(x), self.outs)
        self.kernel(x.contiguous(), *self.matrix, out)
        return out


def multiplier(matrix: Tensor, bias: Tensor | None) -> Product:
    """x Wᵀ + bias for W `[outs, width]` of the type of x; W must fit."""
    return Product(product, (panels(matrix), padded(bias, len(matrix))), matrix.shape)


def padded(vector: Tensor | None, outs: int) -> Tensor:
    """Returns a number for each row of the panels; None: zeros."""
    if vector is None:
        return torch.zeros(outs + -outs % OUTS)
    return F.pad(vector if vector.dtype == torch.int32 else vector.float(), (0, -outs % OUTS))


@body
def multiply_rows(x, weights, bias, out, rows, width, outs):
    first, last = share(-(-outs // OUTS))
    size = in_parts(rows, ROWS, min(CHUNK, CHUNK_BYTES // (width * x.itemsize)))
    sums, spare = from_line(np.empty(size * OUTS + LINE, np.float32)), np.empty(size * OUTS, out.dtype)
    widened = room_for(x, size * width)
    for start in range(0, rows, size):
        count = min(size, rows - start)
        these = given(x[start * width : (start + count) * width], widened)
        for panel in range(first, last):
            base = panel * OUTS
            for k in range(0, width, DEPTH):
                part, depth, some = weights[base * width + k * OUTS :], min(DEPTH, width - k), these[k:]
                before, before_stride = (sums, OUTS) if k else (bias[base:], 0)
                if k + depth < width:
                    add_rows(before, before_stride, some, width, part, count, depth, sums, OUTS)
                elif base + OUTS <= outs:
                    add_rows(before, before_stride, some, width, part, count, depth, out[start * outs + base :], outs)
                else:
                    add_rows(before, before_stride, some, width, part, count, depth, spare, OUTS)
                    for r in range(count):
                        out[(start + r) * outs + base : (start + r + 1) * outs] = spare[r * OUTS : r * OUTS + outs - base]


def multiply(x, weights, bias, out, rows, width, outs):
    """This thread's part of a product. A row has the same bits whatever `rows` is."""


@overload(multiply)
def _multiply_by(x, weights, bias, out, rows, width, outs):
    def by_tiles(x, weights, bias, out, rows, width, outs):
        if width % (LINE // 2):
            multiply_rows(x, weights, bias, out, rows, width, outs)
        else:
            amx_products.multiply_tiles(x, weights, bias, out, rows, width, outs)

    return by_tiles if amx.multiplies(weights) else multiply_rows.py_func


@kernel("outs * width", x=numbers("rows", "width"), weights=numbers(PANELS), bias=floats(OUTS_PADDED), out=numbers("rows", "outs"))
def product(x, weights, bias, out, rows, width, outs):
    multiply(x, weights, bias, out, rows, width, outs)
