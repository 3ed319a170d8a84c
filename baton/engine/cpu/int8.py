"""Products with int8 matrices, compiled: the product with panels, and the steps before and after one that others multiply.

The results equal those of `baton.engine.model.ops.Ops`, bit for bit.
"""

import numpy as np
import torch
from numba.extending import overload
from torch import Tensor

from baton.engine.core.pages import LINE
from baton.engine.cpu import amx, amx_products
from baton.engine.cpu.kernel import body, floats, int8s, int32s, kernel, numbers, uint8s
from baton.engine.cpu.panels import CHUNK, CHUNK_BYTES, DEPTH, OUTS_PADDED, PANELS, Product, padded, panels
from baton.engine.cpu.primitives import in_parts, put, round_row, share, wide
from baton.engine.cpu.tile import ADDED, OUTS, ROWS, add_rows, scale_rows

TILES_FROM = 12  # rows: fewer are multiplied nearly as fast as the weights can be read without AMX


def multiplier(matrix: Tensor, scales: Tensor, bias: Tensor | None) -> Product:
    """Joins `Ops.quantize`, the product with int8 `[outs, width]`, and `Ops.dequantize`, with the same bits; the matrix must fit."""
    outs = len(matrix)
    begin = padded(matrix.sum(dim=1, dtype=torch.int32).mul_(-ADDED), outs)
    return Product(product_int8, (panels(matrix), padded(scales, outs), begin, padded(bias, outs)), matrix.shape)


@body
def multiply_rows_int8(x, weights, beside, out, rows, width, outs):
    """Each thread rounds all rows itself: that is little work beside the product, and less than waiting for each other. Rounded numbers
    have ADDED added; sums begin with `zeros`, minus what that adds to them."""
    (scales, zeros, bias), (first, last) = beside, share(-(-outs // OUTS))
    size = in_parts(rows, ROWS, min(CHUNK, CHUNK_BYTES // width))
    sums = np.empty(size * OUTS, np.int32)
    rounded, steps = np.empty(size * width, np.uint8), np.empty(size, np.float32)
    for start in range(0, rows, size):
        count = min(size, rows - start)
        for r in range(count):
            row = x[(start + r) * width : (start + r + 1) * width]
            steps[r] = round_row(row, ADDED, rounded[r * width : (r + 1) * width])
        for panel in range(first, last):
            base = panel * OUTS
            for k in range(0, width, DEPTH):
                part, depth = weights[base * width + k * OUTS :], min(DEPTH, width - k)
                before, before_stride = (sums, OUTS) if k else (zeros[base:], 0)
                add_rows(before, before_stride, rounded[k:], width, part, count, depth, sums, OUTS)
            scale_rows(sums, count, scales[base:], steps, bias[base:], out[start * outs + base :], outs, min(OUTS, outs - base))


def multiply_int8(x, weights, beside, out, rows, width, outs):
    """This thread's part of a product. `beside`: scales, zeros and bias."""


@overload(multiply_int8)
def _multiply_int8_by(x, weights, beside, out, rows, width, outs):
    def by_tiles(x, weights, beside, out, rows, width, outs):
        if width % LINE or rows < TILES_FROM:
            multiply_rows_int8(x, weights, beside, out, rows, width, outs)
        else:
            amx_products.multiply_tiles_int8(x, weights, beside, out, rows, width, outs)

    return by_tiles if amx.multiplies(weights) else multiply_rows_int8.py_func


@kernel(
    "outs * width",
    x=numbers("rows", "width"),
    weights=int8s(PANELS),
    scales=floats(OUTS_PADDED),
    zeros=int32s(OUTS_PADDED),
    bias=floats(OUTS_PADDED),
    out=numbers("rows", "outs"),
)
def product_int8(x, weights, scales, zeros, bias, out, rows, width, outs):
    multiply_int8(x, weights, (scales, zeros, bias), out, rows, width, outs)


@kernel("rows * width", x=numbers("rows", "width"), out=uint8s("rows", "width"), steps=floats("rows"))
def quantize(x, out, steps, rows, width):
    """See `Ops.quantize`."""
    first, last = share(rows)
    for row in range(first, last):
        steps[row] = round_row(x[row * width : (row + 1) * width], 128, out[row * width : (row + 1) * width])


@kernel(
    "rows * width",
    products=floats("rows", "width"),
    steps=floats("rows"),
    bias=numbers("width", optional=True),
    out=numbers("rows", "width"),
)
def dequantize(products, steps, bias, has_bias, out, rows, width):
    """See `Ops.dequantize`. `out` may be `products`."""
    first, last = share(rows)
    for row in range(first, last):
        values, scaled, step = products[row * width : (row + 1) * width], out[row * width : (row + 1) * width], steps[row]
        if has_bias:
            for i in range(width):
                put(scaled, i, values[i] * step + wide(bias[i]))
        else:
            for i in range(width):
                put(scaled, i, values[i] * step)
