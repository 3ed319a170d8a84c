"""The innermost loop of a product x Wᵀ on Intel's AMX, whose registers are tiles: 16 rows of 64 bytes.

One instruction multiplies a tile of x with a tile of W and adds the products to a tile of 16 by 16 sums. A panel of W (see
`baton.engine.cpu.tile`) is two tiles wide as it is. x is laid out in tiles first: rows that lie a power of two apart would push each other
out of the cache. Sums of int8 are exact, so they have the bits of every other way. Sums of bfloat16 are rounded in an order that follows
from the width alone, so a row of the result depends on its own row of x alone, as in `tile`; but the order differs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from baton.engine.cpu.features import AMX, FEATURES
from baton.engine.cpu.int8 import round_row
from baton.engine.cpu.kernel import body
from baton.engine.cpu.primitives import LINE, fetch, from_line, in_parts, part_of
from baton.engine.cpu.tile import (
    ADDED,
    BFLOAT16,
    FLOATS,
    I8,
    I16,
    I32,
    I64,
    INT8,
    INTS,
    OUTS,
    SIZES,
    WORDS,
    arguments_of,
    called,
    fused,
    repeat,
    row_of,
    scaled,
    store_normal_row,
    store_row,
    store_rows,
    switch,
    vector,
    vectors,
    widened,
)
from baton.engine.model.linear import INT4_GROUP

TILE = 16  # rows of a tile, of a cache line each
ROWS = 2 * TILE  # of x, whose sums are in registers: two tiles of x by two of W
CHUNK = 256  # rows of x that are laid out at the same time, and stay in the cache of a core
CHUNK_BYTES = 1 << 20
PANEL = 2 * TILE * LINE  # bytes of a panel for a line of x
PART = 8  # lines of x for which a panel stays in the smallest cache while rows pass
FETCHED = 8  # lines of the panel's next part that are brought into the caches at each step
SHARES = PANEL // LINE // FETCHED  # blocks of rows that bring all of it
FLIGHT = 4  # groups of int4 whose products are under way at the same time
LAG = 2  # groups that are multiplied before a product is stored, and then before it is added
PALETTE = 1  # eight tiles, of up to 16 rows of up to 64 bytes

THERE = FEATURES >= AMX and OUTS == 2 * TILE and BFLOAT16.group == 2 and INT8.group == 4 and ADDED > 0
DOT = {types.uint16: "llvm.x86.tdpbf16ps", types.int8: "llvm.x86.tdpbusd"}  # (sums, x, W), and x of int8 is unsigned
SUMS, X, W = (0, 1, 2, 3), (4, 5), (6, 7)  # which tiles hold what; sums of row r and column c are in tile 2 · r + c


def _number(each: int) -> Any:
    return ir.Constant(I8, each)


def _tile(builder: Any, name: str, *arguments: Any) -> None:
    called(builder, f"llvm.x86.{name}", ir.VoidType(), *arguments)


def _bytes(builder: Any, place: Any) -> Any:
    return builder.bitcast(place, I8.as_pointer())


def multiplies(array: Any) -> bool:
    """Whether weights of this (Numba's) type of array are multiplied here."""
    return THERE and array.dtype in DOT


def _configure(builder: Any, rows: Any, depth: int) -> None:
    """Tiles of x have up to `rows` rows of `depth` bytes; those of W, as many lines of neighbours as these meet."""
    for limit, sign in ((1, "<"), (TILE, ">")):
        rows = builder.select(builder.icmp_signed(sign, rows, I64(limit)), I64(limit), rows)
    height, bytes_ = builder.trunc(rows, I8), ir.ArrayType(I8, 64)
    shape = cgutils.alloca_once(builder, bytes_)
    builder.store(ir.Constant(bytes_, [PALETTE] + [0] * 63), shape)
    for tile in range(8):
        width = builder.gep(shape, [I32(0), I32(16 + 2 * tile)])  # two bytes; the second is 0
        builder.store(_number(depth if tile in X else LINE), width)
        builder.store(_number(depth // 4) if tile in W else height, builder.gep(shape, [I32(0), I32(48 + tile)]))
    _tile(builder, "ldtilecfg", _bytes(builder, shape))


@intrinsic
def begin_tiles(context: Any, weights: Any, rows: Any) -> Any:
    """Prepares this thread's registers for tiles of x of up to `rows` rows, if AMX multiplies such weights. `end_tiles` must follow."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if multiplies(weights):
            _configure(builder, arguments[1], LINE)
        return context.get_dummy_value()

    return types.void(weights, types.int64), generate


@intrinsic
def begin_half_tiles(context: Any) -> Any:
    """As `begin_tiles`, for tiles of x as deep as a group of int4."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _configure(builder, I64(TILE), INT4_GROUP)
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def end_tiles(context: Any, weights: Any) -> Any:
    """Empties the registers: otherwise Linux saves them whenever it switches from this thread to another."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if multiplies(weights):
            _tile(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(weights), generate


@intrinsic
def _lay(context: Any, x: Any, lines: Any, tiles: Any) -> Any:
    """Copies a row of that many lines into tiles, a line into each."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, lines, tiles = arguments_of(context, builder, signature, arguments)
        line = ir.VectorType(I8, LINE).as_pointer()
        x, tiles = (builder.bitcast(each, line) for each in (x, tiles))

        def copy(i: Any, none: list[Any]) -> list[Any]:
            builder.store(builder.load(builder.gep(x, [i]), align=1), builder.gep(tiles, [builder.mul(i, I64(TILE))]), align=1)
            return none

        repeat(builder, lines, [], copy)
        return context.get_dummy_value()

    return types.void(x, types.int64, tiles), generate


@njit
def lay_row(x, width, row, tiles):
    """Copies a row of x, a whole number of lines, to its place in tiles `[*, width / line, TILE, line]`."""
    line = LINE // x.itemsize
    _lay(x, width // line, tiles[row // TILE * TILE * width + row % TILE * line :])


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows in memory: where they begin, how many bytes apart they are, and how many bytes a line has."""

    first: Any
    apart: Any
    step: int = LINE

    def tile(self, builder: Any, nth: int, at: Any) -> tuple[Any, Any]:
        """The nth TILE rows of them, from byte `at` of each on: what a load or a store of a tile asks for."""
        return builder.gep(self.first, [builder.add(builder.mul(self.apart, I64(TILE * nth)), at)]), self.apart


def _multiply(
    builder: Any, dot: str, before: Rows, x: Sequence[Rows], panel: Any, lines: Any, after: Rows,
    meanwhile: Callable[[Any], None] | None = None,
) -> None:  # fmt: skip
    """`after[r, o] = before[r, o] + Σ x[r, k] · panel[k, o]` for the rows of one tile or two, and the ks of some lines of x.

    `x`: the rows of each tile. `meanwhile(k)` is done at the kth line.
    """
    w, mine = Rows(panel, I64(2 * LINE)), SUMS[: 2 * len(x)]

    def load(tile: int, rows: Rows, nth: int, at: Any) -> None:
        _tile(builder, "tileloadd64", _number(tile), *rows.tile(builder, nth, at))

    def add(k: Any, none: list[Any]) -> list[Any]:
        if meanwhile:
            meanwhile(k)
        for tile in mine:  # loads between products: fewer wait for each other
            r, c = divmod(tile, 2)
            if c == 0:
                load(X[r], x[r], 0, builder.mul(k, I64(x[r].step)))
            if r == 0:
                load(W[c], w, 0, builder.add(builder.mul(k, I64(PANEL)), I64(c * LINE)))
            called(builder, dot, ir.VoidType(), _number(tile), _number(X[r]), _number(W[c]))
        return none

    for tile in mine:
        load(tile, before, tile // 2, I64(tile % 2 * LINE))
    repeat(builder, lines, [], add)
    for tile in mine:
        _tile(builder, "tilestored64", _number(tile), *after.tile(builder, tile // 2, I64(tile % 2 * LINE)))


def _in_blocks(builder: Any, rows: Any, whole: Callable[[Any], None], last: Callable[[Any, int], None]) -> None:
    """`whole(b)` for every ROWS rows, and `last(b, tiles)` for what is left."""

    def each(b: Any, none: list[Any]) -> list[Any]:
        whole(b)
        return none

    blocks, left = builder.udiv(rows, I64(ROWS)), builder.urem(rows, I64(ROWS))
    repeat(builder, blocks, [], each)
    switch(builder, builder.udiv(builder.add(left, I64(TILE - 1)), I64(TILE)), (1, 2), lambda tiles: last(blocks, tiles))


@intrinsic
def add_part(
    context: Any, begin: Any, sums: Any, x: Any, width: Any, done: Any, lines: Any, last: Any, panel: Any, rows: Any, scaling: Any,
    out: Any, apart: Any, some: Any,
) -> Any:  # fmt: skip
    """`sums[r, o] += Σ x[r, k] · panel[k, o]` for rows of x in tiles, `width` numbers each, and the ks of some lines.

    If no lines are `done`, sums begin as `begin[o]`. They are float32, or int32 for int8. Rows beyond the last one, up to a whole tile,
    get numbers that mean nothing. After the `last` lines, while they are in the smallest cache, the first `some` sums of each row are
    stored in `out`, whose rows lie `apart` numbers apart: as they are, none of them subnormal, or as by `baton.engine.cpu.tile.scale_rows`;
    `scaling` is () or (scales, steps, bias).
    """
    dot, far, stored = DOT[panel.dtype], TILE * 2 * LINE, OUTS * out.dtype.bitwidth // 8

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        begin, totals, x, width, done, lines, last, panel, rows, packed, out, apart, some = arguments_of(
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
        high = builder.mul(width, I64(TILE))  # numbers of x in the tiles of TILE rows
        begin, sums, panel = (_bytes(builder, each) for each in (begin, totals, panel))
        before, again = builder.select(more, sums, begin), builder.zext(more, I64)

        def block(b: Any, tiles: int, whole: bool) -> None:
            """ROWS rows from `b * ROWS` on or, unless `whole`, those that are left, in `tiles` tiles."""
            first = builder.mul(b, I64(ROWS))
            at = builder.mul(b, I64(2 * far))
            tall = [builder.mul(high, builder.add(builder.mul(b, I64(2)), I64(r))) for r in range(tiles)]
            x_rows = [Rows(_bytes(builder, builder.gep(x, [each])), I64(LINE), TILE * LINE) for each in tall]
            before_rows = Rows(builder.gep(before, [builder.mul(at, again)]), builder.mul(again, I64(2 * LINE)))
            after = Rows(builder.gep(sums, [at]), I64(2 * LINE))
            ahead = builder.mul(lines, builder.add(builder.mul(b, I64(FETCHED * LINE)), I64(PANEL)))

            def fetch_next(k: Any) -> None:
                """A share of the panel's next part, and the places of two rows of the result."""
                line = builder.add(ahead, builder.mul(k, I64(FETCHED * LINE)))
                with builder.if_then(builder.icmp_unsigned("<", b, I64(SHARES))):
                    for i in range(FETCHED):
                        fetch(builder, builder.gep(panel, [builder.add(line, I64(i * LINE))]))
                nth = builder.mul(builder.add(done, k), I64(2))
                for i in range(2):
                    row = builder.add(first, builder.and_(builder.add(nth, I64(i)), I64(ROWS - 1)))
                    place = _bytes(builder, builder.gep(out, [builder.mul(row, apart)]))
                    for byte in range(0, stored, LINE):
                        fetch(builder, builder.gep(place, [I64(byte)]), write=True)

            _multiply(builder, dot, before_rows, x_rows, panel, lines, after, fetch_next if whole else None)
            with builder.if_then(last):
                count, place = I64(ROWS) if whole else builder.sub(rows, first), builder.gep(out, [builder.mul(first, apart)])
                store_rows(builder, count, lambda r: finished(builder.add(first, r)), place, apart, some, store)

        _in_blocks(builder, rows, lambda b: block(b, 2, whole=True), lambda b, tiles: block(b, tiles, whole=False))
        return context.get_dummy_value()

    int64 = types.int64
    return types.void(begin, sums, x, int64, int64, int64, types.boolean, panel, int64, scaling, out, int64, int64), generate


@intrinsic
def add_rows_by_tiles(
    context: Any, before: Any, gap: Any, x: Any, far: Any, lines: Any, panel: Any, rows: Any, after: Any, apart: Any
) -> Any:
    """As `baton.engine.cpu.tile.add_rows`, for `lines` lines of x and sums of float32; rows are rounded up to whole tiles."""
    dot = DOT[panel.dtype]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        before, gap, x, far, lines, panel, rows, after, apart = arguments_of(context, builder, signature, arguments)
        panel = _bytes(builder, panel)

        def from_row(array: Any, far: Any, row: Any) -> Rows:
            size = builder.mul(far, I64(SIZES[array.type.pointee]))
            return Rows(builder.gep(_bytes(builder, array), [builder.mul(size, row)]), size)

        def block(b: Any, tiles: int) -> None:
            row = builder.mul(b, I64(ROWS))
            x_rows = [from_row(x, far, builder.add(row, I64(TILE * r))) for r in range(tiles)]
            first, last = from_row(before, gap, row), from_row(after, apart, row)
            _multiply(builder, dot, first, x_rows, panel, lines, last)

        _in_blocks(builder, rows, lambda b: block(b, 2), block)
        return context.get_dummy_value()

    int64 = types.int64
    return types.void(before, int64, x, int64, int64, panel, int64, after, int64), generate


@intrinsic
def unpack(context: Any, packed: Any, groups: Any, panel: Any) -> Any:
    """A panel of int4 (see `baton.engine.cpu.tile.add_groups`) as one of int8, -8 to 7."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        packed, groups, panel = arguments_of(context, builder, signature, arguments)
        kind = ir.VectorType(I8, LINE)
        low, four, eight = (ir.Constant(each, [number] * each.count) for each, number in ((INTS, 0x0F0F0F0F), (INTS, 4), (kind, 8)))

        def word(i: Any, none: list[Any]) -> list[Any]:
            for v, numbers in enumerate(vectors(builder, builder.gep(packed, [builder.mul(i, I64(OUTS))]), INTS)):
                for half, each in enumerate((numbers, builder.lshr(numbers, four))):
                    step = builder.add(builder.mul(i, I64(4 * LINE)), I64(2 * LINE * half + LINE * v))
                    signed = builder.sub(builder.bitcast(builder.and_(each, low), kind), eight)
                    builder.store(signed, builder.bitcast(builder.gep(panel, [step]), kind.as_pointer()), align=1)
            return none

        repeat(builder, builder.mul(groups, I64(WORDS)), [], word)
        return context.get_dummy_value()

    return types.void(packed, types.int64, panel), generate


@dataclass(frozen=True, slots=True)
class _Groups:
    """How groups of int4 are multiplied, stored, and added to the sums of a column: TILE outs of the panel. See `add_groups_by_tiles`."""

    builder: Any
    x: Any
    panel: Any
    scales: Any
    spare: Any
    column: Any

    def fly(self, flights: Any, totals: list[Any]) -> list[Any]:
        """Adds the groups of some flights, 1 or more."""
        last = self.builder.sub(flights, I64(1))
        for i in range(FLIGHT):
            self._multiply(I64(0), i)
            if i >= LAG:
                self._store(i - LAG)
        totals = repeat(self.builder, last, totals, self._next)
        for i in range(FLIGHT - LAG, FLIGHT):
            self._store(i)
        for i in range(FLIGHT):
            totals = self._add(totals, last, i)
        return totals

    def rest(self, flight: Any, count: int, totals: list[Any]) -> list[Any]:
        """Adds the first groups of a flight."""
        for i in range(count):
            self._multiply(flight, i)
        for i in range(count):
            self._store(i)
        for i in range(count):
            totals = self._add(totals, flight, i)
        return totals

    def _next(self, flight: Any, totals: list[Any]) -> list[Any]:
        for i in range(FLIGHT):
            self._multiply(self.builder.add(flight, I64(1)), i)
            self._store((i - LAG) % FLIGHT)
            totals = self._add(totals, flight, i)
        return totals

    def _group(self, flight: Any, i: int) -> Any:
        return self.builder.add(self.builder.mul(flight, I64(FLIGHT)), I64(i))

    def _product(self, i: int, row: int = 0) -> Any:
        return self.builder.gep(self.spare, [I64((i * TILE + row) * TILE)])

    def _multiply(self, flight: Any, i: int) -> None:
        builder, g, mine, other = self.builder, self._group(flight, i), _number(X[i % 2]), _number(W[i % 2])
        line, half = builder.lshr(g, I64(1)), builder.and_(g, I64(1))
        at = builder.add(builder.mul(line, I64(TILE * LINE)), builder.mul(half, I64(INT4_GROUP)))
        rows = Rows(builder.gep(self.panel, [builder.mul(g, I64(INT4_GROUP * OUTS))]), I64(2 * LINE))
        _tile(builder, "tilezero", _number(SUMS[i]))
        _tile(builder, "tileloadd64", mine, builder.gep(self.x, [at]), I64(LINE))
        _tile(builder, "tileloadd64", other, *rows.tile(builder, 0, builder.mul(self.column, I64(LINE))))
        _tile(builder, "tdpbssd", _number(SUMS[i]), mine, other)

    def _store(self, i: int) -> None:
        _tile(self.builder, "tilestored64", _number(SUMS[i]), _bytes(self.builder, self._product(i)), I64(LINE))

    def _add(self, totals: list[Any], flight: Any, i: int) -> list[Any]:
        builder = self.builder
        at = builder.add(builder.mul(self._group(flight, i), I64(OUTS)), builder.mul(self.column, I64(TILE)))
        step = widened(builder, vector(builder, builder.gep(self.scales, [at]), ir.VectorType(I16, TILE)))
        found = [builder.sitofp(vector(builder, self._product(i, row), INTS), FLOATS) for row in range(TILE)]
        return [fused(builder, total, each, step) for total, each in zip(totals, found, strict=True)]


@intrinsic
def add_groups_by_tiles(context: Any, x: Any, panel: Any, scales: Any, groups: Any, spare: Any, sums: Any) -> Any:
    """`sums[r, o] = Σ_g scales[g, o] · Σ x[r, k] · panel[k, o]` for the INT4_GROUP ks of each of some groups, and TILE rows of x in tiles.

    As `baton.engine.cpu.tile.add_groups`, with the same bits; x is int8, in lines of two groups, and so is the panel. Products reach the
    sums by way of memory, `spare`, int32 `[FLIGHT, TILE, TILE]`, which takes a while: a group is multiplied while the last but one is
    stored, and one that was stored two groups ago is added.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, panel, scales, groups, spare, sums = arguments_of(context, builder, signature, arguments)
        flights, left = builder.udiv(groups, I64(FLIGHT)), builder.urem(groups, I64(FLIGHT))

        def sums_of(column: Any, none: list[Any]) -> list[Any]:
            these = _Groups(builder, _bytes(builder, x), _bytes(builder, panel), scales, spare, column)
            places = [builder.gep(sums, [builder.add(builder.mul(column, I64(TILE)), I64(row * OUTS))]) for row in range(TILE)]

            def write(totals: list[Any]) -> None:
                for total, each in zip(totals, places, strict=True):
                    store_row(builder, [total], each)

            some = builder.zext(builder.icmp_unsigned(">", flights, I64(0)), I64)
            nothing = [ir.Constant(FLOATS, [0.0] * TILE)] * TILE
            write(repeat(builder, some, nothing, lambda _, totals: these.fly(flights, totals)))
            begun = [vector(builder, each, FLOATS) for each in places]
            switch(builder, left, range(1, FLIGHT), lambda count: write(these.rest(flights, count, begun)))
            return none

        repeat(builder, I64(OUTS // TILE), [], sums_of)
        return context.get_dummy_value()

    return types.void(x, panel, scales, types.int64, spare, sums), generate


@body
def _multiply_panel(begin, sums, laid, width, lines, weights, rows, scaling, out, apart, some):
    """Products of rows in tiles, of so many lines each, with one panel. The other arguments: see `add_part`."""
    line, part = width // lines, PART if rows > ROWS else lines
    for k in range(0, lines, part):
        x, panel, depth = laid[k * TILE * line :], weights[k * OUTS * line :], min(part, lines - k)
        add_part(begin, sums, x, width, k, depth, k + depth == lines, panel, rows, scaling, out, apart, some)


@body
def multiply_tiles(x, weights, bias, out, rows, width, outs):
    """As `baton.engine.cpu.panels.multiply_rows`, for bfloat16 rows of whole lines."""
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
    """As `baton.engine.cpu.panels.multiply_rows_int8`, for rows of whole lines of int8."""
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
