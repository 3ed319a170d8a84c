"""The innermost loop of a product x Wᵀ of bfloat16 or int8 on AMX, and the products around it.

Sums of int8 are exact, so they have the bits of every other way. Sums of bfloat16 are rounded in an order that follows from the width
alone, so a row of the result depends on its own row of x alone, as in `baton.engine.cpu.tile`; but the order differs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from baton.engine.core.pages import LINE
from baton.engine.cpu.amx import CHUNK, DOT, ROWS, SUMS, TILE, StridedRows, W, X, begin_tiles, bytes_of, end_tiles, lay_row, number, on_tile
from baton.engine.cpu.kernel import body
from baton.engine.cpu.primitives import fetch, from_line, in_parts, part_of, round_row
from baton.engine.cpu.tile import (
    ADDED,
    FLOATS,
    I64,
    OUTS,
    SIZES,
    arguments_of,
    called,
    repeat,
    row_of,
    scaled,
    store_normal_row,
    store_row,
    store_rows,
    switch,
)

CHUNK_BYTES = 1 << 20
PANEL = 2 * TILE * LINE  # bytes of a panel for a line of x
PART = 8  # lines of x for which a panel stays in the smallest cache while rows pass
FETCHED = 8  # lines of the panel's next part that are brought into the caches at each step
SHARES = PANEL // LINE // FETCHED  # blocks of rows that bring all of it
TILE_SUMS = TILE * 2 * LINE  # bytes of the sums of TILE rows


def _multiply(
    builder: Any, dot: str, before: StridedRows, x: Sequence[StridedRows], panel: Any, lines: Any, after: StridedRows,
    meanwhile: Callable[[Any], None] | None = None,
) -> None:  # fmt: skip
    """`after[r, o] = before[r, o] + Σ x[r, k] · panel[k, o]` for the rows of one tile or two, and the ks of some lines of x.

    `x`: the rows of each tile. `meanwhile(k)` is done at the kth line.
    """
    w, mine, load = StridedRows(panel, I64(2 * LINE)), SUMS[: 2 * len(x)], partial(_load, builder)

    def add(k: Any, none: list[Any]) -> list[Any]:
        if meanwhile:
            meanwhile(k)
        for tile in mine:  # loads between products: fewer wait for each other
            r, c = divmod(tile, 2)
            if c == 0:
                load(X[r], x[r], 0, builder.mul(k, I64(x[r].step)))
            if r == 0:
                load(W[c], w, 0, builder.add(builder.mul(k, I64(PANEL)), I64(c * LINE)))
            called(builder, dot, ir.VoidType(), number(tile), number(X[r]), number(W[c]))
        return none

    for tile in mine:
        load(tile, before, tile // 2, I64(tile % 2 * LINE))
    repeat(builder, lines, [], add)
    for tile in mine:
        on_tile(builder, "tilestored64", number(tile), *after.tile(builder, tile // 2, I64(tile % 2 * LINE)))


def _load(builder: Any, tile: int, rows: StridedRows, nth: int, at: Any) -> None:
    on_tile(builder, "tileloadd64", number(tile), *rows.tile(builder, nth, at))


def _in_blocks(builder: Any, rows: Any, whole: Callable[[Any], None], last: Callable[[Any, int], None]) -> None:
    """`whole(b)` for every ROWS rows, and `last(b, tiles)` for what is left."""

    def each(b: Any, none: list[Any]) -> list[Any]:
        whole(b)
        return none

    blocks, left = builder.udiv(rows, I64(ROWS)), builder.urem(rows, I64(ROWS))
    repeat(builder, blocks, [], each)
    switch(builder, builder.udiv(builder.add(left, I64(TILE - 1)), I64(TILE)), (1, 2), partial(last, blocks))


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a product: `rows` rows of x by some lines of a panel. See `add_part`: these are its arguments, as the builder has them."""

    builder: Any
    dot: str
    before: Any  # bytes that the sums begin as, the same for all rows unless `again`
    again: Any
    sums: Any
    x: Any
    high: Any  # numbers of x in the tiles of TILE rows
    done: Any
    lines: Any
    last: Any
    panel: Any
    rows: Any
    out: Any
    out_stride: Any
    some: Any
    stored: int  # bytes of a panel's part of a row of the result
    finished: Callable[[Any], list[Any]]
    store: Callable[..., None]

    def block(self, b: Any, tiles: int, whole: bool) -> None:
        """ROWS rows from `b * ROWS` on or, unless `whole`, those that are left, in `tiles` tiles."""
        builder = self.builder
        first = builder.mul(b, I64(ROWS))
        at = builder.mul(b, I64(2 * TILE_SUMS))
        tall = [builder.mul(self.high, builder.add(builder.mul(b, I64(2)), I64(r))) for r in range(tiles)]
        x_rows = [StridedRows(bytes_of(builder, builder.gep(self.x, [each])), I64(LINE), TILE * LINE) for each in tall]
        before_rows = StridedRows(builder.gep(self.before, [builder.mul(at, self.again)]), builder.mul(self.again, I64(2 * LINE)))
        after = StridedRows(builder.gep(self.sums, [at]), I64(2 * LINE))
        ahead = builder.mul(self.lines, builder.add(builder.mul(b, I64(FETCHED * LINE)), I64(PANEL)))
        meanwhile = partial(self._fetch, b, first, ahead) if whole else None
        _multiply(builder, self.dot, before_rows, x_rows, self.panel, self.lines, after, meanwhile)
        with builder.if_then(self.last):
            count = I64(ROWS) if whole else builder.sub(self.rows, first)
            place = builder.gep(self.out, [builder.mul(first, self.out_stride)])
            store_rows(builder, count, lambda r: self.finished(builder.add(first, r)), place, self.out_stride, self.some, self.store)

    def _fetch(self, b: Any, first: Any, ahead: Any, k: Any) -> None:
        """A share of the panel's next part, and the places of two rows of the result."""
        builder = self.builder
        line = builder.add(ahead, builder.mul(k, I64(FETCHED * LINE)))
        with builder.if_then(builder.icmp_unsigned("<", b, I64(SHARES))):
            for i in range(FETCHED):
                fetch(builder, builder.gep(self.panel, [builder.add(line, I64(i * LINE))]))
        nth = builder.mul(builder.add(self.done, k), I64(2))
        for i in range(2):
            row = builder.add(first, builder.and_(builder.add(nth, I64(i)), I64(ROWS - 1)))
            place = bytes_of(builder, builder.gep(self.out, [builder.mul(row, self.out_stride)]))
            for byte in range(0, self.stored, LINE):
                fetch(builder, builder.gep(place, [I64(byte)]), write=True)


@intrinsic
def add_part(
    context: Any, begin: Any, sums: Any, x: Any, width: Any, done: Any, lines: Any, last: Any, panel: Any, rows: Any, scaling: Any,
    out: Any, out_stride: Any, some: Any,
) -> Any:  # fmt: skip
    """`sums[r, o] += Σ x[r, k] · panel[k, o]` for rows of x in tiles, `width` numbers each, and the ks of some lines.

    If no lines are `done`, sums begin as `begin[o]`. They are float32, or int32 for int8. Rows beyond the last one, up to a whole tile,
    get numbers that mean nothing. After the `last` lines, while they are in the smallest cache, the first `some` sums of each row are
    stored in `out`, whose rows lie `out_stride` numbers apart: as they are, none of them subnormal, or as by
    `baton.engine.cpu.tile.scale_rows`; `scaling` is () or (scales, steps, bias).
    """
    dot, stored = DOT[panel.dtype], OUTS * out.dtype.bitwidth // 8

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        begin, totals, x, width, done, lines, last, panel, rows, packed, out, out_stride, some = arguments_of(
            context, builder, signature, arguments
        )
        finished: Callable[[Any], list[Any]]
        if len(scaling):
            parts = zip(scaling.types, cgutils.unpack_tuple(builder, packed), strict=True)
            finished = scaled(builder, totals, *(context.make_array(kind)(context, builder, each).data for kind, each in parts))
            store = store_row
        else:
            finished, store = partial(row_of, builder, totals, kind=FLOATS), store_normal_row
        more = builder.icmp_unsigned(">", done, I64(0))
        high = builder.mul(width, I64(TILE))
        begin, sums, panel = (bytes_of(builder, each) for each in (begin, totals, panel))
        before, again = builder.select(more, sums, begin), builder.zext(more, I64)
        these = _Part(
            builder, dot, before, again, sums, x, high, done, lines, last, panel, rows, out, out_stride, some, stored, finished, store
        )  # fmt: skip
        _in_blocks(builder, rows, partial(these.block, tiles=2, whole=True), partial(these.block, whole=False))
        return context.get_dummy_value()

    int64 = types.int64
    return types.void(begin, sums, x, int64, int64, int64, types.boolean, panel, int64, scaling, out, int64, int64), generate


@intrinsic
def add_rows_by_tiles(
    context: Any, before: Any, before_stride: Any, x: Any, x_stride: Any, lines: Any, panel: Any, rows: Any, after: Any, after_stride: Any
) -> Any:
    """Same as `baton.engine.cpu.tile.add_rows`, for `lines` lines of x and sums of float32; rows are rounded up to whole tiles."""
    dot = DOT[panel.dtype]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        before, before_stride, x, x_stride, lines, panel, rows, after, after_stride = arguments_of(context, builder, signature, arguments)
        arrays = (before, before_stride), (x, x_stride), (after, after_stride)
        block = partial(_block, builder, dot, arrays, bytes_of(builder, panel), lines)
        _in_blocks(builder, rows, partial(block, tiles=2), block)
        return context.get_dummy_value()

    int64 = types.int64
    return types.void(before, int64, x, int64, int64, panel, int64, after, int64), generate


def _block(builder: Any, dot: str, arrays: Sequence[tuple[Any, Any]], panel: Any, lines: Any, b: Any, tiles: int) -> None:
    """The bth ROWS rows of `add_rows_by_tiles`. `arrays`: where the first row of `before`, of x and of `after` begins, and strides."""
    row, (before, x, after) = builder.mul(b, I64(ROWS)), arrays
    x_rows = [_rows_from(builder, *x, builder.add(row, I64(TILE * r))) for r in range(tiles)]
    first, last = _rows_from(builder, *before, row), _rows_from(builder, *after, row)
    _multiply(builder, dot, first, x_rows, panel, lines, last)


def _rows_from(builder: Any, array: Any, stride: Any, row: Any) -> StridedRows:
    size = builder.mul(stride, I64(SIZES[array.type.pointee]))
    return StridedRows(builder.gep(bytes_of(builder, array), [builder.mul(size, row)]), size)


@body
def _multiply_panel(begin, sums, laid, width, lines, weights, rows, scaling, out, out_stride, some):
    """Products of rows in tiles, of so many lines each, with one panel. The other arguments: see `add_part`."""
    line, part = width // lines, PART if rows > ROWS else lines
    for k in range(0, lines, part):
        x, panel, depth = laid[k * TILE * line :], weights[k * OUTS * line :], min(part, lines - k)
        add_part(begin, sums, x, width, k, depth, k + depth == lines, panel, rows, scaling, out, out_stride, some)


@body
def multiply_tiles(x, weights, bias, out, rows, width, outs):
    """Same as `baton.engine.cpu.panels.multiply_rows`, for bfloat16 rows of whole lines."""
    begin, end, first, last = part_of(rows, ROWS, CHUNK, -(-outs // OUTS))
    size, lines = in_parts(end - begin, ROWS, min(CHUNK, CHUNK_BYTES // (2 * width))), width * 2 // LINE
    laid, sums = from_line(np.empty(size * width + LINE, x.dtype)), from_line(np.empty(size * OUTS + LINE, np.float32))
    begin_tiles(weights, end - begin)
    for start in range(begin, end, size):
        count = min(size, end - start)
        for row in range(count):
            lay_row(x[(start + row) * width :], width, row, laid)
        for panel in range(first, last):
            base = panel * OUTS
            place, some = out[start * outs + base :], min(OUTS, outs - base)
            _multiply_panel(bias[base:], sums, laid, width, lines, weights[base * width :], count, (), place, outs, some)
    end_tiles(weights)


@body
def multiply_tiles_int8(x, weights, beside, out, rows, width, outs):
    """Same as `baton.engine.cpu.int8.multiply_rows_int8`, for rows of whole lines of int8."""
    (scales, zeros, bias), (begin, end, first, last) = beside, part_of(rows, ROWS, CHUNK, -(-outs // OUTS))
    size, lines = in_parts(end - begin, ROWS, min(CHUNK, CHUNK_BYTES // width)), width // LINE
    laid, sums = from_line(np.empty(size * width + LINE, np.uint8)), from_line(np.empty(size * OUTS + LINE, np.int32))
    rounded, steps = np.empty(width, np.uint8), np.empty(size, np.float32)
    begin_tiles(weights, end - begin)
    for start in range(begin, end, size):
        count = min(size, end - start)
        for row in range(count):
            steps[row] = round_row(x[(start + row) * width : (start + row + 1) * width], ADDED, rounded)
            lay_row(rounded, width, row, laid)
        for panel in range(first, last):
            base = panel * OUTS
            place, some, scaling = out[start * outs + base :], min(OUTS, outs - base), (scales[base:], steps, bias[base:])
            _multiply_panel(zeros[base:], sums, laid, width, lines, weights[base * width :], count, scaling, place, outs, some)
    end_tiles(weights)
