"""Products with int4 weights, compiled: groups of 32 neighbours of a row share a scale (as in llama.cpp's Q4_0), and x is rounded to int8.

A number of W takes 4.5 bits, and a product of few rows reads these, once. See `baton.engine.cpu.tile` for panels and tiles.
"""

import numpy as np
import torch
import torch.nn.functional as F
from numba import njit
from numba.extending import overload
from torch import Tensor

from baton.engine.core.pages import LINE
from baton.engine.cpu import amx, amx_int4
from baton.engine.cpu.group_tile import GROUP_ROWS, WORDS, add_groups
from baton.engine.cpu.kernel import bfloat16s, body, floats, int32s, kernel, numbers
from baton.engine.cpu.panels import CHUNK, CHUNK_BYTES, OUTS_PADDED, Product, padded
from baton.engine.cpu.primitives import from_line, in_parts, part_of, prefetch, round_row
from baton.engine.cpu.tile import OUTS, step_rows
from baton.engine.model.linear import INT4_GROUP
from baton.engine.model.memory import zeros

TILES_FROM = 24  # rows: fewer are multiplied faster without AMX
GROUPS = f"-(-width // {INT4_GROUP})"


def multiplier(matrix: Tensor, scales: Tensor, bias: Tensor | None) -> Product:
    """See `Ops.int4_multiplier`."""
    return Product(product_int4, (_panels(matrix), _beside(scales), padded(bias, len(matrix))), matrix.shape)


def _panels(matrix: Tensor) -> Tensor:
    """`[outs, groups * INT4_GROUP]` of -8 to 7 as int32."""
    halves = _whole(matrix).add(8).to(torch.uint8).view(-1, OUTS, matrix.shape[1] // 8, 2, 4)
    packed = (halves[..., 0, :] | halves[..., 1, :] << 4).transpose(1, 2)
    return zeros(tuple(packed.shape), torch.uint8).copy_(packed).view(torch.int32).view(-1)


def _beside(scales: Tensor) -> Tensor:
    """`[outs, groups]` in the order of the panels."""
    return _whole(scales).view(-1, OUTS, scales.shape[1]).transpose(1, 2).contiguous().view(-1)


def _whole(rows: Tensor) -> Tensor:
    return F.pad(rows, (0, 0, 0, -len(rows) % OUTS))


@njit
def _find_offsets(rounded, groups, offsets):
    """Minus what the 8 added to each stored number of W adds to a row's sum of each group."""
    for group in range(groups):
        total = np.int32(0)
        for i in range(INT4_GROUP):
            total += np.int32(np.int8(rounded[group * INT4_GROUP + i]))
        offsets[group] = np.int32(-8) * total


@body
def multiply_int4_rows(x, weights, scales, bias, out, rows, width, outs):
    """Each thread rounds its rows itself. W's numbers are stored with 8 added; sums of a group begin with what that adds, subtracted."""
    begin, end, first, last = part_of(rows, GROUP_ROWS, CHUNK, -(-outs // OUTS))
    groups = -(-width // INT4_GROUP)
    wide, sums = groups * INT4_GROUP, np.empty(GROUP_ROWS * OUTS, np.float32)
    size = in_parts(end - begin, GROUP_ROWS, min(CHUNK, CHUNK_BYTES // wide))
    rounded = np.zeros(size * wide, np.uint8)
    offsets, steps = np.empty(size * groups, np.int32), np.empty(size, np.float32)
    for start in range(begin, end, size):
        count = min(size, end - start)
        for row in range(count):
            steps[row] = round_row(x[(start + row) * width : (start + row + 1) * width], 0, rounded[row * wide :])
            _find_offsets(rounded[row * wide :], groups, offsets[row * groups :])
        for panel in range(first, last):
            base = panel * OUTS
            part, factors = weights[base * groups * WORDS :], scales[base * groups :]
            for tile in range(0, count, GROUP_ROWS):
                some = min(GROUP_ROWS, count - tile)
                add_groups(rounded[tile * wide :], wide, part, factors, offsets[tile * groups :], some, groups, sums)
                step_rows(sums, some, steps[tile:], bias[base:], out[(start + tile) * outs + base :], outs, min(OUTS, outs - base))


@body
def multiply_int4_tiles(x, weights, scales, bias, out, rows, width, outs):
    """Multiplies by AMX. Panels are unpacked to int8 once for many rows."""
    begin, end, first, last = part_of(rows, amx.ROWS, amx.CHUNK, -(-outs // OUTS))
    groups, lines = -(-width // INT4_GROUP), -(-width // LINE)
    wide, size = lines * LINE, in_parts(end - begin, amx.TILE, amx.CHUNK)
    rounded, steps = np.zeros(wide, np.uint8), np.empty(size, np.float32)
    laid, panel = from_line(np.zeros(size * wide + LINE, np.uint8)), from_line(np.empty(groups * INT4_GROUP * OUTS + LINE, np.int8))
    spare = from_line(np.empty(amx_int4.FLIGHT * amx.TILE * amx.TILE + LINE, np.int32))
    sums = from_line(np.empty(amx.TILE * OUTS + LINE, np.float32))
    amx.begin_half_tiles()
    for start in range(begin, end, size):
        count = min(size, end - start)
        for row in range(count):
            steps[row] = round_row(x[(start + row) * width : (start + row + 1) * width], 0, rounded)
            amx.lay_row(rounded, wide, row, laid)
        # Each block of rows fetches a share of the next panel, which is still in memory.
        ahead = -(-groups * WORDS * OUTS // (-(-count // amx.TILE)))
        for base in range(first * OUTS, last * OUTS, OUTS):
            amx_int4.unpack(weights[base * groups * WORDS :], groups, panel)
            next_ = (base + OUTS) * groups * WORDS
            for block in range(0, count, amx.TILE):
                for i in range(next_, next_ + ahead, LINE // weights.itemsize):
                    prefetch(weights, i)
                next_ += ahead
                amx_int4.add_groups_by_tiles(laid[block * wide :], panel, scales[base * groups :], groups, spare, sums)
                some = min(amx.TILE, count - block)
                step_rows(sums, some, steps[block:], bias[base:], out[(start + block) * outs + base :], outs, min(OUTS, outs - base))
    amx.end_tiles(panel)


def multiply_int4(x, weights, scales, bias, out, rows, width, outs):
    """This thread's part of a product."""


@overload(multiply_int4)
def _multiply_int4_by(x, weights, scales, bias, out, rows, width, outs):
    def by_tiles(x, weights, scales, bias, out, rows, width, outs):
        if rows < TILES_FROM:
            multiply_int4_rows(x, weights, scales, bias, out, rows, width, outs)
        else:
            multiply_int4_tiles(x, weights, scales, bias, out, rows, width, outs)

    return by_tiles if amx.THERE else multiply_int4_rows.py_func


@kernel(
    "outs * width",
    x=numbers("rows", "width"),
    weights=int32s(f"{OUTS_PADDED} * ({GROUPS}) * {WORDS}"),
    scales=bfloat16s(f"{OUTS_PADDED} * ({GROUPS})"),
    bias=floats(OUTS_PADDED),
    out=numbers("rows", "outs"),
)
def product_int4(x, weights, scales, bias, out, rows, width, outs):
    multiply_int4(x, weights, scales, bias, out, rows, width, outs)
