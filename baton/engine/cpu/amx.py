"""Intel's AMX, whose registers are tiles: 16 rows of 64 bytes. What the products on it share (`amx_products`, `amx_int4`): which tile holds
what, how rows of x lie in memory, and how a thread's registers are set up.

    x        16 rows of 64 bytes     X: one tile for each 16 rows
    W        16 lines of 64 bytes    W: a line has 4 bytes of each of 16 outs, as a panel has them (`baton.engine.cpu.tile`)
    sums     16 rows of 16 numbers   SUMS: a tile for each pair of the two above

One instruction multiplies a tile of x with a tile of W and adds the products to a tile of sums. A panel of W is two tiles wide as it is. x
is laid out in tiles first: rows that lie a power of two apart would push each other out of the cache.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from baton.engine.core.pages import LINE
from baton.engine.cpu.features import AMX, FEATURES
from baton.engine.cpu.tile import ADDED, BFLOAT16, I8, I32, I64, INT8, OUTS, arguments_of, called, repeat
from baton.engine.model.linear import INT4_GROUP

TILE = 16  # rows of a tile, of a cache line each
ROWS = 2 * TILE  # of x, whose sums are in registers: two tiles of x by two of W
CHUNK = 256  # rows of x that are laid out at the same time, and stay in the cache of a core
PALETTE = 1  # eight tiles, of up to 16 rows of up to 64 bytes

THERE = FEATURES >= AMX and OUTS == 2 * TILE and BFLOAT16.group == 2 and INT8.group == 4 and ADDED > 0
DOT = {types.uint16: "llvm.x86.tdpbf16ps", types.int8: "llvm.x86.tdpbusd"}  # (sums, x, W), and x of int8 is unsigned
SUMS, X, W = (0, 1, 2, 3), (4, 5), (6, 7)  # which tiles hold what; sums of row r and column c are in tile 2 · r + c


def number(each: int) -> Any:
    """An immediate operand: a tile's number, or a count."""
    return ir.Constant(I8, each)


def on_tile(builder: Any, name: str, *arguments: Any) -> None:
    called(builder, f"llvm.x86.{name}", ir.VoidType(), *arguments)


def bytes_of(builder: Any, place: Any) -> Any:
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
        builder.store(number(depth if tile in X else LINE), width)
        builder.store(number(depth // 4) if tile in W else height, builder.gep(shape, [I32(0), I32(48 + tile)]))
    on_tile(builder, "ldtilecfg", bytes_of(builder, shape))


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
    """Same as `begin_tiles`, for tiles of x as deep as a group of int4."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _configure(builder, I64(TILE), INT4_GROUP)
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def end_tiles(context: Any, weights: Any) -> Any:
    """Empties the registers: otherwise Linux saves them whenever it switches from this thread to another."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if multiplies(weights):
            on_tile(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(weights), generate


@intrinsic
def _lay(context: Any, x: Any, lines: Any, tiles: Any) -> Any:
    """Copies a row of that many lines into tiles, a line into each."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, lines, tiles = arguments_of(context, builder, signature, arguments)
        line = ir.VectorType(I8, LINE).as_pointer()
        x, tiles = (builder.bitcast(each, line) for each in (x, tiles))
        repeat(builder, lines, [], partial(_lay_line, builder, x, tiles))
        return context.get_dummy_value()

    return types.void(x, types.int64, tiles), generate


def _lay_line(builder: Any, x: Any, tiles: Any, i: Any, none: list[Any]) -> list[Any]:
    builder.store(builder.load(builder.gep(x, [i]), align=1), builder.gep(tiles, [builder.mul(i, I64(TILE))]), align=1)
    return none


@njit
def lay_row(x, width, row, tiles):
    """Copies a row of x, a whole number of lines, to its place in tiles `[*, width / line, TILE, line]`."""
    line = LINE // x.itemsize
    _lay(x, width // line, tiles[row // TILE * TILE * width + row % TILE * line :])


@dataclass(frozen=True, slots=True)
class StridedRows:
    """Rows in memory: where they begin, how many bytes are from one to the next, and how many bytes a line has."""

    first: Any
    stride: Any
    step: int = LINE

    def tile(self, builder: Any, nth: int, at: Any) -> tuple[Any, Any]:
        """The nth TILE rows of them, from byte `at` of each on: what a load or a store of a tile asks for."""
        return builder.gep(self.first, [builder.add(builder.mul(self.stride, I64(TILE * nth)), at)]), self.stride
