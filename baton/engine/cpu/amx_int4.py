"""Products of int4 on AMX: a panel is unpacked to int8 once for many rows, groups are multiplied one by one, and their products, exact
integers, are scaled and added in the order of every other way, so that they have its bits."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from baton.engine.core.pages import LINE
from baton.engine.cpu.amx import SUMS, TILE, StridedRows, W, X, bytes_of, number, on_tile
from baton.engine.cpu.group_tile import WORDS
from baton.engine.cpu.tile import (
    FLOATS,
    I8,
    I16,
    I64,
    INTS,
    OUTS,
    arguments_of,
    fused,
    repeat,
    store_row,
    switch,
    vector,
    vectors,
    widened,
)
from baton.engine.model.linear import INT4_GROUP

FLIGHT = 4  # groups whose products are under way at the same time
LAG = 2  # groups that are multiplied before a product is stored, and then before it is added


@intrinsic
def unpack(context: Any, packed: Any, groups: Any, panel: Any) -> Any:
    """A panel of int4 (see `baton.engine.cpu.group_tile.add_groups`) as one of int8, -8 to 7."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        packed, groups, panel = arguments_of(context, builder, signature, arguments)
        repeat(builder, builder.mul(groups, I64(WORDS)), [], partial(_unpack_word, builder, packed, panel))
        return context.get_dummy_value()

    return types.void(packed, types.int64, panel), generate


def _unpack_word(builder: Any, packed: Any, panel: Any, i: Any, none: list[Any]) -> list[Any]:
    """The ith OUTS int32s of a panel."""
    kind = ir.VectorType(I8, LINE)
    low, four, eight = (ir.Constant(each, [number] * each.count) for each, number in ((INTS, 0x0F0F0F0F), (INTS, 4), (kind, 8)))
    for v, numbers in enumerate(vectors(builder, builder.gep(packed, [builder.mul(i, I64(OUTS))]), INTS)):
        for half, each in enumerate((numbers, builder.lshr(numbers, four))):
            step = builder.add(builder.mul(i, I64(4 * LINE)), I64(2 * LINE * half + LINE * v))
            signed = builder.sub(builder.bitcast(builder.and_(each, low), kind), eight)
            builder.store(signed, builder.bitcast(builder.gep(panel, [step]), kind.as_pointer()), align=1)
    return none


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

    def rest(self, flight: Any, totals: list[Any], places: list[Any], count: int) -> None:
        """Adds the first groups of a flight, and writes the sums."""
        for i in range(count):
            self._multiply(flight, i)
        for i in range(count):
            self._store(i)
        for i in range(count):
            totals = self._add(totals, flight, i)
        _write(self.builder, totals, places)

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
        builder, g, mine, other = self.builder, self._group(flight, i), number(X[i % 2]), number(W[i % 2])
        line, half = builder.lshr(g, I64(1)), builder.and_(g, I64(1))
        at = builder.add(builder.mul(line, I64(TILE * LINE)), builder.mul(half, I64(INT4_GROUP)))
        rows = StridedRows(builder.gep(self.panel, [builder.mul(g, I64(INT4_GROUP * OUTS))]), I64(2 * LINE))
        on_tile(builder, "tilezero", number(SUMS[i]))
        on_tile(builder, "tileloadd64", mine, builder.gep(self.x, [at]), I64(LINE))
        on_tile(builder, "tileloadd64", other, *rows.tile(builder, 0, builder.mul(self.column, I64(LINE))))
        on_tile(builder, "tdpbssd", number(SUMS[i]), mine, other)

    def _store(self, i: int) -> None:
        on_tile(self.builder, "tilestored64", number(SUMS[i]), bytes_of(self.builder, self._product(i)), I64(LINE))

    def _add(self, totals: list[Any], flight: Any, i: int) -> list[Any]:
        builder = self.builder
        at = builder.add(builder.mul(self._group(flight, i), I64(OUTS)), builder.mul(self.column, I64(TILE)))
        step = widened(builder, vector(builder, builder.gep(self.scales, [at]), ir.VectorType(I16, TILE)))
        found = [builder.sitofp(vector(builder, self._product(i, row), INTS), FLOATS) for row in range(TILE)]
        return [fused(builder, total, each, step) for total, each in zip(totals, found, strict=True)]


@intrinsic
def add_groups_by_tiles(context: Any, x: Any, panel: Any, scales: Any, groups: Any, spare: Any, sums: Any) -> Any:
    """`sums[r, o] = Σ_g scales[g, o] · Σ x[r, k] · panel[k, o]` for the INT4_GROUP ks of each of some groups, and TILE rows of x in tiles.

    As `baton.engine.cpu.group_tile.add_groups`, with the same bits; x is int8, in lines of two groups, and so is the panel. Products reach
    the sums by way of memory, `spare`, int32 `[FLIGHT, TILE, TILE]`, which takes a while: a group is multiplied while the last but one is
    stored, and one that was stored two groups ago is added.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, panel, scales, groups, spare, sums = arguments_of(context, builder, signature, arguments)
        flights, left = builder.udiv(groups, I64(FLIGHT)), builder.urem(groups, I64(FLIGHT))
        repeat(builder, I64(OUTS // TILE), [], partial(_sum_column, builder, (x, panel, scales, spare), flights, left, sums))
        return context.get_dummy_value()

    return types.void(x, panel, scales, types.int64, spare, sums), generate


def _sum_column(builder: Any, given: tuple[Any, ...], flights: Any, left: Any, sums: Any, column: Any, none: list[Any]) -> list[Any]:
    """TILE outs of `add_groups_by_tiles`. `given`: its x, panel, scales and spare; `left`: groups after the last flight."""
    x, panel, scales, spare = given
    these = _Groups(builder, bytes_of(builder, x), bytes_of(builder, panel), scales, spare, column)
    places = [builder.gep(sums, [builder.add(builder.mul(column, I64(TILE)), I64(row * OUTS))]) for row in range(TILE)]
    some = builder.zext(builder.icmp_unsigned(">", flights, I64(0)), I64)
    nothing = [ir.Constant(FLOATS, [0.0] * TILE)] * TILE
    _write(builder, repeat(builder, some, nothing, lambda _, totals: these.fly(flights, totals)), places)
    begun = [vector(builder, each, FLOATS) for each in places]
    switch(builder, left, range(1, FLIGHT), partial(these.rest, flights, begun, places))
    return none


def _write(builder: Any, totals: list[Any], places: list[Any]) -> None:
    for total, each in zip(totals, places, strict=True):
        store_row(builder, [total], each)
