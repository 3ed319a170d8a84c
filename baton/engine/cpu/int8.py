"""The steps before and after a product of int8 matrices, compiled.

The results equal those of `baton.engine.model.ops.Ops`, bit for bit.
"""

import numpy as np
from numba import njit

from baton.engine.cpu.kernel import floats, kernel, numbers, uint8s
from baton.engine.cpu.primitives import ONE, ROUND, magnitude, put, share, wide

STEPS, SMALLEST = np.float32(127), np.finfo(np.float32).tiny


@njit(error_model="numpy")
def round_row(values, added, rounded):
    """Rounds to int8, with `added` added, which may make it unsigned. Returns the step."""
    greatest = np.uint32(0)
    for i in range(len(values)):
        greatest = max(greatest, magnitude(wide(values[i])))
    step = np.uint32(greatest).view(np.float32) / STEPS
    step = step if step > SMALLEST or step != step else SMALLEST
    inverse = ONE / step  # one division, instead of one for every number
    for i in range(len(values)):
        nearest = np.float32(wide(values[i]) * inverse + ROUND)
        rounded[i] = np.uint8(nearest.view(np.uint32) + np.uint32(added))
    return step


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
