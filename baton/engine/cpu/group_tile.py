"""The innermost loop of a product with W in groups: neighbours of a row that share a scale and, perhaps, a shift (see `groups`).

It is that of `baton.engine.cpu.tile`, whose letters it uses; W's numbers have 4 or 8 bits, and a group has any number of blocks of BLOCK.
`add_groups` is that of int4, whose groups all have INT4_GROUP numbers and no shift.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from baton.engine.cpu.features import FEATURES
from baton.engine.cpu.tile import (
    ADDED,
    FLOAT,
    FLOATS,
    I16,
    I32,
    I64,
    INT8,
    INTS,
    LANES,
    OUTS,
    PAIRS,
    SHORTS,
    VECTORS,
    VNNI,
    add_nibbles,
    added_pairs,
    arguments_of,
    fused,
    repeat,
    spread,
    starts_of,
    store_row,
    switch,
    vectors,
    widened,
)
from baton.engine.model.linear import INT4_GROUP

BLOCK = 32  # numbers
GROUP_ROWS = 8 if "avx512f" in FEATURES else 2  # of which one kind of sums stays in registers
WORDS = INT4_GROUP // 8  # int32s that hold the numbers of a group of int4, eight each
MIDDLE = {4: 8, 8: ADDED}  # what the numbers of W have added, by their bits
Sums = list[list[Any]]  # [rows][VECTORS]


@intrinsic
def add_scaled_groups(context: Any, x: Any, panel: Any, scales: Any, shifts: Any, totals: Any, rows: Any, sizes: Any, sums: Any) -> Any:
    """`sums[r, o] = Σ_g scales[g, o] · Σ x[r, k] · (panel[k, o] - MIDDLE)` for the ks of each group; with shifts, `Σ_g scales[g, o] · Σ
    x[r, k] · panel[k, o] + shifts[g, o] · totals[r, g]`.

    For 1 to GROUP_ROWS rows of int8. `sizes`: groups, 1 or more, and the blocks of each. Rows of x lie as many numbers apart as all groups
    have. The panel is int32, eight numbers of 4 bits of one row of W each (as in `add_groups`), or uint8, four neighbours of a row
    together. Scales and shifts are float16 or float32. `totals`: the sum of the numbers of each group of a row of x.
    """
    shifted = isinstance(shifts, types.Array)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        numbers, packed, scales_, shifts_, totals_, rows_, sizes_, out = arguments_of(context, builder, signature, arguments)
        groups, blocks = (builder.extract_value(sizes_, i) for i in range(2))
        bits = 4 if panel.dtype == types.int32 else 8
        packed = builder.bitcast(packed, I32.as_pointer())
        these = _Groups(builder, bits, packed, scales_, shifts_ if shifted else None, blocks)
        width = builder.mul(builder.mul(groups, blocks), I64(BLOCK))
        switch(builder, rows_, range(1, GROUP_ROWS + 1), partial(these.store_sums, numbers, width, totals_, groups, out))
        return context.get_dummy_value()

    return types.void(x, panel, scales, shifts, totals, types.int64, sizes, sums), generate


def _flat(rows: Sums) -> list[Any]:
    return [each for row in rows for each in row]


def _rows(flat: list[Any]) -> Sums:
    return [flat[i : i + VECTORS] for i in range(0, len(flat), VECTORS)]


@dataclass(frozen=True, slots=True)
class _Groups:
    """Where a panel of W is."""

    builder: Any
    bits: int
    packed: Any  # pointer to int32
    scales: Any
    shifts: Any | None
    blocks: Any  # of a group

    def store_sums(self, x: Any, width: Any, totals: Any, groups: Any, out: Any, count: int) -> None:
        """`count` rows of `add_scaled_groups`."""
        builder = self.builder
        xs, totals_of = starts_of(builder, x, width, count), starts_of(builder, totals, groups, count)
        nothing = [ir.Constant(FLOATS, [0.0] * LANES)] * (count * VECTORS)
        for r, row in enumerate(_rows(repeat(builder, groups, nothing, partial(self._add, xs, totals_of)))):
            store_row(builder, row, builder.gep(out, [I64(r * OUTS)]))

    def _add(self, x: list[Any], totals: list[Any], g: Any, now: list[Any]) -> list[Any]:
        """The sums with those of group g added. `x`, `totals`: where each row begins."""
        builder, at, sums = self.builder, self.builder.mul(g, I64(OUTS)), _rows(now)
        of_x = [builder.load(builder.gep(each, [g])) for each in totals]
        steps = self._factors(self.scales, at)
        begin = [spread(builder, I32(0) if self.shifts else builder.mul(each, I32(-MIDDLE[self.bits]))) for each in of_x]
        first = builder.mul(g, self.blocks)
        starts = [each for each in begin for _ in range(VECTORS)]
        whole = _rows(repeat(builder, self.blocks, starts, partial(self._add_block, x, first)))
        if self.shifts:
            more = self._factors(self.shifts, at)
            parts = [spread(builder, builder.sitofp(each, FLOAT)) for each in of_x]
            sums = [
                [fused(builder, each, shift, part) for each, shift in zip(row, more, strict=True)]
                for row, part in zip(sums, parts, strict=True)
            ]
        return [
            fused(builder, total, builder.sitofp(each, FLOATS), step)
            for row, found in zip(sums, whole, strict=True)
            for total, each, step in zip(row, found, steps, strict=True)
        ]

    def _factors(self, array: Any, at: Any) -> list[Any]:
        place = self.builder.gep(array, [at])
        if array.type.pointee == FLOAT:
            return vectors(self.builder, place, FLOATS)
        return [_from_half(self.builder, each) for each in vectors(self.builder, place, ir.VectorType(I16, LANES))]

    def _add_block(self, x: list[Any], first: Any, i: Any, now: list[Any]) -> list[Any]:
        """int32 sums with the products of one block added, the ith from `first` on."""
        builder, pairs, sums = self.builder, PAIRS and self.bits == 4, _rows(now)
        block = builder.add(first, i)
        whole = [[ir.Constant(SHORTS, [0] * SHORTS.count)] * VECTORS for _ in x] if pairs else sums
        words = BLOCK * self.bits // 32
        for word in range(words):
            at = builder.add(builder.mul(block, I64(words)), I64(word))
            packed = vectors(builder, builder.gep(self.packed, [builder.mul(at, I64(OUTS))]), INTS)
            for half in range(8 // self.bits):
                place = builder.add(builder.mul(at, I64(32 // self.bits)), I64(4 * half))
                shifted = [builder.lshr(each, ir.Constant(INTS, [4 * half] * LANES)) for each in packed] if half else packed
                multiply = add_nibbles if self.bits == 4 else _add_bytes
                whole = [multiply(builder, row, shifted, builder.gep(start, [place])) for row, start in zip(whole, x, strict=True)]
        if not pairs:
            return _flat(whole)
        return [builder.add(a, added_pairs(builder, b)) for row in zip(sums, whole, strict=True) for a, b in zip(*row, strict=True)]


def _add_bytes(builder: Any, totals: list[Any], packed: list[Any], x: Any) -> list[Any]:
    """Adds the products of four int8 at `x` with those of each int32."""
    four = builder.load(builder.bitcast(x, I32.as_pointer()), align=1)
    if VNNI:  # the unsigned operand is W's
        return [INT8.add(builder, total, spread(builder, four), each) for total, each in zip(totals, packed, strict=True)]
    if PAIRS:
        return [INT8.add(builder, total, each, spread(builder, four)) for total, each in zip(totals, packed, strict=True)]
    for byte in range(4):
        number = builder.sext(spread(builder, builder.load(builder.gep(x, [I64(byte)]))), INTS)
        shift, low = (ir.Constant(INTS, [each] * LANES) for each in (8 * byte, 255))
        numbers = [builder.and_(builder.lshr(each, shift), low) for each in packed]
        totals = [builder.add(total, builder.mul(each, number)) for total, each in zip(totals, numbers, strict=True)]
    return totals


def _from_half(builder: Any, bits: Any) -> Any:
    """A vector of finite float16 as float32."""
    if "avx2" in FEATURES:  # and F16C with it
        return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), FLOATS)
    sign, rest, shift, up = (ir.Constant(INTS, [each] * LANES) for each in (0x8000, 0x7FFF, 13, 16))
    wide, scale = builder.zext(bits, INTS), ir.Constant(FLOATS, [2.0**112] * LANES)
    size = builder.fmul(builder.bitcast(builder.shl(builder.and_(wide, rest), shift), FLOATS), scale)
    signed = builder.or_(builder.bitcast(size, INTS), builder.shl(builder.and_(wide, sign), up))
    return builder.bitcast(signed, FLOATS)


@intrinsic
def add_groups(context: Any, x: Any, width: Any, panel: Any, scales: Any, offsets: Any, rows: Any, groups: Any, sums: Any) -> Any:
    """`sums[r, o] = Σ_g scales[g, o] · (offsets[r, g] + Σ x[r, k] · panel[k, o])` for the INT4_GROUP ks of each of some groups, 1 or more.

    For 1 to GROUP_ROWS rows of int8, `width` numbers apart; `offsets` lie `width // INT4_GROUP` apart, sums OUTS. The panel is
    `[groups, WORDS, OUTS]`: each int32 holds eight numbers of 0 to 15 of one row of W, in its byte b those of k = b (low half) and b + 4.
    Scales are bfloat16.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        numbers, width, panel, scales, offsets, rows, groups, out = arguments_of(context, builder, signature, arguments)
        sums_of = partial(_scaled_sums, builder, panel, scales, groups)
        switch(builder, rows, range(1, GROUP_ROWS + 1), partial(_store_sums, builder, sums_of, numbers, offsets, width, out))
        return context.get_dummy_value()

    int64 = types.int64
    return types.void(x, int64, panel, scales, offsets, int64, int64, sums), generate


def _store_sums(builder: Any, sums_of: Callable[..., list[list[Any]]], x: Any, offsets: Any, width: Any, out: Any, count: int) -> None:
    """`count` rows of `add_groups`."""
    starts = [builder.mul(width, I64(r)) for r in range(count)]
    xs = [builder.gep(x, [each]) for each in starts]
    begins = [builder.gep(offsets, [builder.udiv(each, I64(INT4_GROUP))]) for each in starts]
    for r, row in enumerate(sums_of(xs, begins)):
        store_row(builder, row, builder.gep(out, [I64(r * OUTS)]))


def _scaled_sums(builder: Any, panel: Any, scales: Any, groups: Any, x: list[Any], offsets: list[Any]) -> list[list[Any]]:
    """The loop over groups; sums `[rows][VECTORS]`. `x`, `offsets`: where each row's begin."""
    entry, loop, after = builder.block, builder.append_basic_block("group"), builder.append_basic_block("after")
    builder.branch(loop)
    builder.position_at_end(loop)
    g = builder.phi(I64)
    totals = [[builder.phi(FLOATS) for _ in range(VECTORS)] for _ in x]
    begin = [[spread(builder, builder.load(builder.gep(each, [g])))] * VECTORS for each in offsets]
    whole = [[ir.Constant(SHORTS, [0] * SHORTS.count)] * VECTORS for _ in x] if PAIRS else begin
    for word in range(WORDS):
        at = builder.add(builder.mul(g, I64(WORDS)), I64(word))
        packed = vectors(builder, builder.gep(panel, [builder.mul(at, I64(OUTS))]), INTS)
        for half in range(2):
            place = builder.add(builder.mul(at, I64(8)), I64(4 * half))
            shifted = [builder.lshr(each, ir.Constant(INTS, [4 * half] * LANES)) for each in packed] if half else packed
            for r, start in enumerate(x):
                whole[r] = add_nibbles(builder, whole[r], shifted, builder.gep(start, [place]))
    if PAIRS:
        whole = [
            [builder.add(first, added_pairs(builder, each)) for first, each in zip(*row, strict=True)]
            for row in zip(begin, whole, strict=True)
        ]
    bits = vectors(builder, builder.gep(scales, [builder.mul(g, I64(OUTS))]), ir.VectorType(I16, LANES))
    steps = [widened(builder, each) for each in bits]
    added = [
        [fused(builder, total, builder.sitofp(each, FLOATS), step) for total, each, step in zip(row, sums, steps, strict=True)]
        for row, sums in zip(totals, whole, strict=True)
    ]
    following = builder.add(g, I64(1))
    builder.cbranch(builder.icmp_signed("<", following, groups), loop, after)
    g.add_incoming(I64(0), entry)
    g.add_incoming(following, loop)
    for row, then in zip(totals, added, strict=True):
        for phi, value in zip(row, then, strict=True):
            phi.add_incoming(ir.Constant(FLOATS, [0.0] * LANES), entry)
            phi.add_incoming(value, loop)
    builder.position_at_end(after)
    return added
