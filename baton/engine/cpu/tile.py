"""The innermost loop of a product x Wᵀ: a tile of the result, up to ROWS rows of x by OUTS rows of W, whose sums stay in registers.

It is written in LLVM's language, because Numba has no vectors: each step loads OUTS numbers of W, and multiplies and adds them for each row
of x (as in BLIS, van Zee and van de Geijn 2015). W lies in panels of OUTS rows, `[steps, OUTS, group]`: the loop reads it from front to
back, once.

      a panel of W               step k                      a tile of sums, in registers
    o=0  1 ...  OUTS        W  [ LANES | LANES ]             [ LANES | LANES ]  row 0 of x
    [group] [group] ..  k=0        x                     +=  [ LANES | LANES ]  row 1
    [group] [group] ..  k=1    one group of a row of x,         ... ROWS
        down: the order      the same in all lanes         lane o: Σ_k x[r, k] · W[o, k]
        in memory

A group is as many neighbours of a row as one step multiplies and adds in a lane: 4 of int8, 2 of bfloat16 (AVX512_BF16), else 1. Without
VNNI, two instructions make up for the one that multiplies four int8 (PAIRS); without AVX512_BF16, x is given as float32 and W becomes it in
a register. Each sum adds its products in the order of the row, whatever the number of rows: a row of the result depends on its own row of
x alone, bit for bit. Sums of int8 are exact, so they are the same on every processor.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from baton.engine.core.pages import LINE
from baton.engine.cpu.features import FEATURES
from baton.engine.cpu.primitives import fetch

# Numbers of a register, registers of sums for each row, and rows: all sums and a step's numbers of W are in registers.
LANES, VECTORS, ROWS = (16, 2, 14) if "avx512f" in FEATURES else (8, 2, 6) if "avx2" in FEATURES else (4, 4, 6)
OUTS = LANES * VECTORS
# Steps that are written out one after the other; and the fewest rows of a tile with which an AVX2 core begins two products in each cycle,
# as it can: each takes four cycles.
UNROLLED, BUSY = (4, 4) if LANES == 8 else (1, 1)

FLOAT, I8, I16, I32, I64 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
FLOATS, INTS = ir.VectorType(FLOAT, LANES), ir.VectorType(I32, LANES)
BYTES, SHORTS = ir.VectorType(I8, 4 * LANES), ir.VectorType(I16, 2 * LANES)  # of as many bits
SIZES = {FLOAT: 4, I32: 4, I16: 2, I8: 1}  # bytes of a number


class _Bfloat(ir.Type):
    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat)

    def __hash__(self) -> int:
        return hash(_Bfloat)


BFLOAT = _Bfloat()


@dataclass(frozen=True, slots=True)
class Kind:
    """How numbers of one type are multiplied. A step loads a group of W as one number of type `loaded`, and one of x as `given`."""

    group: int
    loaded: Any
    given: Any
    total: Any  # a vector of sums
    add: Callable[[Any, Any, Any, Any], Any]  # (builder, sums, W's numbers as a vector of `loaded`, x's as one of `given`) → sums


def called(builder: Any, name: str, returned: Any, *arguments: Any) -> Any:
    """A call of one of LLVM's intrinsics, which returns the type `returned`."""
    return builder.call(
        cgutils.get_or_insert_function(builder.module, ir.FunctionType(returned, [a.type for a in arguments]), name), arguments
    )


def _all(number: int) -> Any:
    return ir.Constant(INTS, [number] * LANES)


def fused(builder: Any, total: Any, w: Any, x: Any) -> Any:
    return called(builder, f"llvm.fma.v{LANES}f32", FLOATS, w, x, total)


def widened(builder: Any, bits: Any) -> Any:
    """A vector of bfloat16 as float32, of which it is the first half of the bits."""
    return builder.bitcast(builder.shl(builder.zext(bits, INTS), _all(16)), FLOATS)


def _fma_bfloat16(builder: Any, total: Any, w: Any, x: Any) -> Any:
    return fused(builder, total, widened(builder, w), x)


def _dot_bfloat16(builder: Any, total: Any, w: Any, x: Any) -> Any:
    pairs = (builder.bitcast(each, ir.VectorType(BFLOAT, 2 * LANES)) for each in (w, x))
    return called(builder, f"llvm.x86.avx512bf16.dpbf16ps.{32 * LANES}", FLOATS, total, *pairs)


def _multiply_int8(builder: Any, total: Any, w: Any, x: Any) -> Any:
    return builder.add(total, builder.mul(builder.sext(w, INTS), builder.zext(x, INTS)))


def _dot_int8(builder: Any, total: Any, w: Any, x: Any) -> Any:
    return called(builder, f"llvm.x86.avx512.vpdpbusd.{32 * LANES}", INTS, total, x, w)  # the unsigned operand is the second


def _add_pairs_int8(builder: Any, total: Any, w: Any, x: Any) -> Any:
    """|w| · (x with the sign of w). Two products fit an int16, also if w is -128: 2 · 128 · 127 < 2¹⁵."""
    w, x = builder.bitcast(w, BYTES), builder.bitcast(x, BYTES)
    below = builder.icmp_signed("<", w, ir.Constant(BYTES, [0] * BYTES.count))
    # Of a w of 0, x may be anything.
    signed = called(builder, "llvm.x86.avx2.psign.b", BYTES, x, w) if LANES == 8 else builder.select(below, builder.neg(x), x)
    return builder.add(total, added_pairs(builder, _pairs(builder, builder.select(below, builder.neg(w), w), signed)))


def _pairs(builder: Any, unsigned: Any, signed: Any) -> Any:
    """Products of bytes, two added in each int16. They must fit: the instruction would cut them off."""
    name = "llvm.x86.avx512.pmaddubs.w.512" if LANES == 16 else "llvm.x86.avx2.pmadd.ub.sw"
    return called(builder, name, SHORTS, unsigned, signed)


def added_pairs(builder: Any, sums: Any) -> Any:
    """Two int16 added in each int32."""
    name = "llvm.x86.avx512.pmaddw.d.512" if LANES == 16 else "llvm.x86.avx2.pmadd.wd"
    return called(builder, name, INTS, sums, ir.Constant(SHORTS, [1] * SHORTS.count))


FLOAT32 = Kind(1, FLOAT, FLOAT, FLOATS, fused)
BFLOAT16 = Kind(2, I32, I32, FLOATS, _dot_bfloat16) if "avx512bf16" in FEATURES else Kind(1, I16, FLOAT, FLOATS, _fma_bfloat16)
VNNI = {"avx512vnni", "avx512vl"} <= FEATURES or "avxvnni" in FEATURES
PAIRS = not VNNI and ("avx512bw" if LANES == 16 else "avx2") in FEATURES
INT8 = Kind(4, I32, I32, INTS, _dot_int8 if VNNI else _add_pairs_int8) if VNNI or PAIRS else Kind(1, I8, I8, INTS, _multiply_int8)
ADDED = 0 if PAIRS else 128  # to numbers of x in int8, which makes them unsigned
KINDS = {types.float32: FLOAT32, types.uint16: BFLOAT16, types.int8: INT8}


@intrinsic
def group_of(context: Any, array: Any) -> Any:
    """How many neighbours of a row of this array one instruction multiplies and adds."""
    group = I64(KINDS[array.dtype].group)
    return types.int64(array), lambda context, builder, signature, arguments: group


@intrinsic
def add_rows(
    context: Any, before: Any, before_stride: Any, x: Any, x_stride: Any, panel: Any, rows: Any, depth: Any, after: Any, after_stride: Any
) -> Any:
    """`after[r, o] = before[r, o] + Σ x[r, k] · panel[k, o]` for some rows, and k up to `depth`, a multiple of the group above 0.

    Rows of x lie `x_stride` numbers apart, those of `before` `before_stride`, those of `after` `after_stride`. Where `after` is bfloat16,
    sums are rounded. Where the panel is int8, x is int8 with ADDED added, and sums are int32. Where it is bfloat16, x is as
    `primitives.given` gives it.
    """
    kind = KINDS[panel.dtype]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        before, before_stride, numbers, x_stride, panel, rows, depth, after, after_stride = arguments_of(
            context, builder, signature, arguments
        )
        step, steps = (builder.udiv(count, I64(kind.group)) for count in (x_stride, depth))
        numbers, panel = builder.bitcast(numbers, kind.given.as_pointer()), builder.bitcast(panel, kind.loaded.as_pointer())
        arrays = (before, before_stride), (numbers, step), (after, after_stride)
        following = builder.bitcast(builder.gep(panel, [builder.mul(steps, I64(OUTS))]), I8.as_pointer())
        _over_rows(builder, rows, partial(_tile, builder, kind, arrays, panel, steps), following, steps, OUTS * SIZES[kind.loaded])
        return context.get_dummy_value()

    int64 = types.int64
    return types.void(before, int64, x, int64, panel, int64, int64, after, int64), generate


def _tile(
    builder: Any, kind: Kind, arrays: Iterable[tuple[Any, Any]], panel: Any, steps: Any, first: Any, count: int,
    meanwhile: Callable[[Any, int], None] | None = None,
) -> None:  # fmt: skip
    """`count` rows of `add_rows`, from `first` on. `arrays`: where the first row of `before`, of x and of `after` begins, and strides."""
    nth = [builder.add(first, I64(r)) for r in range(count)]
    begin, xs, end = ([builder.gep(array, [builder.mul(stride, row)]) for row in nth] for array, stride in arrays)
    sums = _sums(builder, kind, [vectors(builder, place, kind.total) for place in begin], xs, panel, steps, meanwhile)
    for row, place in zip(sums, end, strict=True):
        store_row(builder, row, place)


def _over_rows(builder: Any, rows: Any, tile: Callable[..., None], following: Any, steps: Any, size: int) -> None:
    """`tile(first, count, meanwhile)` of all rows: whole tiles, then the rows that are left. Meanwhile, whole tiles bring what lies at
    `following` into the caches, as much as they read themselves: `steps` times `size` bytes."""
    whole, left, groups = builder.udiv(rows, I64(ROWS)), builder.urem(rows, I64(ROWS)), builder.udiv(steps, I64(UNROLLED))
    lines = max(1, UNROLLED * size // LINE)  # of a group of steps
    one = partial(_whole_tile, builder, tile, following)
    if BUSY == 1:
        repeat(builder, whole, [], partial(one, 1, lambda i: builder.mul(builder.urem(i, I64(lines)), groups)))
        switch(builder, left, range(1, ROWS), lambda count: tile(builder.sub(rows, left), count))
        return
    # Two tiles of 3 to 5 rows take less time than a whole one and one of 1 to 3.
    halved = builder.and_(builder.icmp_unsigned("<", builder.sub(left, I64(1)), I64(BUSY - 1)), builder.icmp_unsigned(">", whole, I64(1)))
    whole = builder.sub(whole, builder.zext(halved, I64))
    # If there are enough tiles, each brings a part: memory that is asked for all at once is waited for.
    many = builder.icmp_unsigned(">=", whole, I64(lines))
    part = builder.udiv(builder.mul(groups, I64(lines)), builder.select(many, whole, I64(1)))
    repeat(builder, builder.select(many, whole, I64(0)), [], partial(one, 1, lambda i: builder.mul(i, builder.add(part, I64(1)))))
    repeat(builder, builder.select(many, I64(0), whole), [], partial(one, lines, lambda _: I64(0)))
    times, begun = builder.select(halved, I64(2), I64(1)), builder.mul(whole, I64(ROWS))
    repeat(builder, times, [begun], partial(_last_tile, builder, rows, tile))


def _whole_tile(
    builder: Any, tile: Callable[..., None], following: Any, lines: int, start: Callable[[Any], Any], i: Any, none: list[Any]
) -> list[Any]:
    """The ith tile, which brings that many lines with every group of steps, from the line `start(i)` on."""
    ahead = partial(_fetch, builder, following, lines, start(i))
    tile(builder.mul(i, I64(ROWS)), ROWS, ahead)
    return none


def _fetch(builder: Any, following: Any, lines: int, start: Any, group: Any, nth: int) -> None:
    """What a tile brings at the nth step of a group."""
    if nth < lines:
        line = builder.add(start, builder.add(builder.mul(group, I64(lines)), I64(nth)))
        fetch(builder, builder.gep(following, [builder.mul(line, I64(LINE))]))


def _last_tile(builder: Any, rows: Any, tile: Callable[..., None], _: Any, begun: list[Any]) -> list[Any]:
    """The rows that are left or, if they are enough for a whole tile, half of them. Returns with which row the next one begins."""
    count = builder.sub(rows, begun[0])
    half = builder.lshr(builder.add(count, I64(1)), I64(1))
    count = builder.select(builder.icmp_unsigned(">=", count, I64(ROWS)), half, count)
    switch(builder, count, range(1, ROWS), partial(tile, begun[0]))
    return [builder.add(begun[0], count)]


@intrinsic
def scale_rows(context: Any, sums: Any, rows: Any, scales: Any, steps: Any, bias: Any, out: Any, out_stride: Any, some: Any) -> Any:
    """`out[r, o] = sums[r, o] · scales[o] · steps[r] + bias[o]` for the first `some` of a panel's OUTS sums, int32, in each of the rows.

    Rows of `out` lie `out_stride` numbers apart.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, rows, scales, steps, bias, out, out_stride, some = arguments_of(context, builder, signature, arguments)
        store_rows(builder, rows, scaled(builder, sums, scales, steps, bias), out, out_stride, some)
        return context.get_dummy_value()

    return types.void(sums, types.int64, scales, steps, bias, out, types.int64, types.int64), generate


def scaled(builder: Any, sums: Any, scales: Any, steps: Any, bias: Any) -> Callable[[Any], list[Any]]:
    """The rows of `scale_rows`."""
    factors, begin = vectors(builder, scales, FLOATS), vectors(builder, bias, FLOATS)

    def row(r: Any) -> list[Any]:
        step = spread(builder, builder.load(builder.gep(steps, [r])))
        totals = [builder.sitofp(each, FLOATS) for each in row_of(builder, sums, r, INTS)]
        return [
            builder.fadd(builder.fmul(builder.fmul(total, factor), step), first)
            for total, factor, first in zip(totals, factors, begin, strict=True)
        ]

    return row


@intrinsic
def step_rows(context: Any, sums: Any, rows: Any, steps: Any, bias: Any, out: Any, out_stride: Any, some: Any) -> Any:
    """Same as `scale_rows`, for sums of float32 that are scaled already: `out[r, o] = sums[r, o] · steps[r] + bias[o]`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, rows, steps, bias, out, out_stride, some = arguments_of(context, builder, signature, arguments)
        row = partial(_stepped, builder, sums, steps, vectors(builder, bias, FLOATS))
        store_rows(builder, rows, row, out, out_stride, some)
        return context.get_dummy_value()

    return types.void(sums, types.int64, steps, bias, out, types.int64, types.int64), generate


def _stepped(builder: Any, sums: Any, steps: Any, begin: list[Any], r: Any) -> list[Any]:
    """A row of `step_rows`."""
    step = spread(builder, builder.load(builder.gep(steps, [r])))
    return [fused(builder, first, total, step) for total, first in zip(row_of(builder, sums, r, FLOATS), begin, strict=True)]


def add_nibbles(builder: Any, totals: list[Any], packed: list[Any], x: Any) -> list[Any]:
    """Adds the products of four int8 at `x` with the lower half of each byte: to int32 or, in pairs, to int16, which those of a group fit
    (16 · 15 · 127 < 2¹⁵)."""
    if VNNI or PAIRS:
        four = spread(builder, builder.load(builder.bitcast(x, I32.as_pointer()), align=1))
        nibbles = [builder.and_(each, _all(0x0F0F0F0F)) for each in packed]
        if VNNI:
            return [_dot_int8(builder, total, four, each) for total, each in zip(totals, nibbles, strict=True)]
        pairs = [_pairs(builder, *(builder.bitcast(all_, BYTES) for all_ in (each, four))) for each in nibbles]
        return [builder.add(total, each) for total, each in zip(totals, pairs, strict=True)]
    for byte in range(4):
        number = builder.sext(spread(builder, builder.load(builder.gep(x, [I64(byte)]))), INTS)
        nibbles = [builder.and_(builder.lshr(each, _all(8 * byte)), _all(15)) for each in packed]
        totals = [builder.add(total, builder.mul(each, number)) for total, each in zip(totals, nibbles, strict=True)]
    return totals


def _sums(
    builder: Any, kind: Kind, sums: list[list[Any]], x: list[Any], panel: Any, steps: Any, meanwhile: Callable[[Any, int], None] | None
) -> list[list[Any]]:
    """The loop, from sums `[rows][VECTORS]` to sums. `x`: where each row begins. `meanwhile(i, j)` is done at step i · UNROLLED + j."""
    step = partial(_step, builder, kind, x, panel)
    groups, totals = builder.udiv(steps, I64(UNROLLED)), [total for row in sums for total in row]
    totals = repeat(builder, groups, totals, partial(_steps, builder, step, meanwhile))
    if UNROLLED > 1:
        done = builder.mul(groups, I64(UNROLLED))
        totals = repeat(builder, builder.sub(steps, done), totals, lambda i, each: step(builder.add(done, i), each))
    return [totals[r * VECTORS : (r + 1) * VECTORS] for r in range(len(sums))]


def _steps(
    builder: Any, step: Callable[..., list[Any]], meanwhile: Callable[[Any, int], None] | None, i: Any, totals: list[Any]
) -> list[Any]:
    """The ith group of steps."""
    first = builder.mul(i, I64(UNROLLED))
    for nth in range(UNROLLED):
        if meanwhile:
            meanwhile(i, nth)
        totals = step(builder.add(first, I64(nth)), totals)
    return totals


def _step(builder: Any, kind: Kind, x: list[Any], panel: Any, k: Any, totals: list[Any]) -> list[Any]:
    weights = vectors(builder, builder.gep(panel, [builder.mul(k, I64(OUTS))]), ir.VectorType(kind.loaded, LANES))
    numbers = [spread(builder, builder.load(builder.gep(start, [k]), align=1)) for start in x]
    pairs = [(w, number) for number in numbers for w in weights]
    return [kind.add(builder, total, w, number) for total, (w, number) in zip(totals, pairs, strict=True)]


def repeat(builder: Any, count: Any, starts: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """`body(i, values)` gives the next values, `count` times from `starts`, and none if it is 0."""
    entry = builder.block
    head, inside, after = (builder.append_basic_block(name) for name in ("head", "inside", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    i = builder.phi(I64)
    values = [builder.phi(start.type) for start in starts]
    builder.cbranch(builder.icmp_unsigned("<", i, count), inside, after)
    builder.position_at_end(inside)
    following = [builder.add(i, I64(1)), *body(i, values)]
    for phi, start, then in zip([i, *values], [I64(0), *starts], following, strict=True):
        phi.add_incoming(start, entry)
        phi.add_incoming(then, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return values


def switch(builder: Any, number: Any, numbers: Iterable[int], case: Callable[[int], None]) -> None:
    """`case(number)`, with a block of its own for each of `numbers`; nothing for any other."""
    done = builder.append_basic_block("done")
    cases = builder.switch(number, done)
    for each in numbers:
        block = builder.append_basic_block(f"case{each}")
        cases.add_case(each, block)
        builder.position_at_end(block)
        case(each)
        builder.branch(done)
    builder.position_at_end(done)


def arguments_of(context: Any, builder: Any, signature: Any, arguments: Any) -> list[Any]:
    """Where the numbers of each array are; other arguments as they are."""
    return [
        context.make_array(kind)(context, builder, value).data if isinstance(kind, types.Array) else value
        for kind, value in zip(signature.args, arguments, strict=True)
    ]


def vector(builder: Any, place: Any, kind: Any) -> Any:
    """LANES numbers, not aligned."""
    return builder.load(builder.bitcast(place, kind.as_pointer()), align=1)


def vectors(builder: Any, place: Any, kind: Any) -> list[Any]:
    """OUTS numbers, not aligned."""
    return [vector(builder, builder.gep(place, [I64(v * LANES)]), kind) for v in range(VECTORS)]


def starts_of(builder: Any, first: Any, stride: Any, count: int) -> list[Any]:
    """Where each of `count` rows begins."""
    return [builder.gep(first, [builder.mul(stride, I64(r))]) for r in range(count)]


def row_of(builder: Any, sums: Any, row: Any, kind: Any) -> list[Any]:
    """The sums of a row in a panel."""
    return vectors(builder, builder.gep(sums, [builder.mul(row, I64(OUTS))]), kind)


def spread(builder: Any, number: Any) -> Any:
    """A vector of equal numbers."""
    none = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(none, number, I32(0)), none, _all(0))


def store_row(builder: Any, row: list[Any], place: Any) -> None:
    for v, value in enumerate(row):
        value = _rounded(builder, value) if place.type.pointee == I16 else value
        builder.store(value, builder.bitcast(builder.gep(place, [I64(v * LANES)]), value.type.as_pointer()), align=1)


def store_rows(
    builder: Any, rows: Any, row: Callable[[Any], list[Any]], out: Any, out_stride: Any, some: Any,
    store: Callable[[Any, list[Any], Any], None] = store_row,
) -> None:  # fmt: skip
    """Stores the first `some` of the OUTS numbers that `row(r)` gives, for each of the rows of `out`."""
    whole = builder.icmp_signed("==", some, I64(OUTS))
    spare = builder.bitcast(cgutils.alloca_once(builder, ir.ArrayType(out.type.pointee, OUTS)), out.type)

    def each(r: Any, none: list[Any]) -> list[Any]:
        place = builder.gep(out, [builder.mul(r, out_stride)])
        store(builder, row(r), builder.select(whole, place, spare))
        repeat(builder, builder.select(whole, I64(0), some), [], partial(_copy, builder, spare, place))
        return none

    repeat(builder, rows, [], each)


def _copy(builder: Any, source: Any, target: Any, i: Any, none: list[Any]) -> list[Any]:
    builder.store(builder.load(builder.gep(source, [i])), builder.gep(target, [i]))
    return none


def store_normal_row(builder: Any, row: list[Any], place: Any) -> None:
    """Same as `store_row`, for numbers none of which is subnormal: the instruction that rounds to bfloat16 would make these 0."""
    if place.type.pointee != I16 or "avx512bf16" not in FEATURES or LANES * VECTORS != 32:
        return store_row(builder, row, place)
    low, high = row
    rounded = called(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", ir.VectorType(BFLOAT, 2 * LANES), high, low)
    builder.store(rounded, builder.bitcast(place, rounded.type.as_pointer()), align=1)
    return None


def _rounded(builder: Any, value: Any) -> Any:
    """float32 as bfloat16, to nearest even; NaN stays NaN."""
    bits = builder.bitcast(value, INTS)
    even = builder.and_(builder.lshr(bits, _all(16)), _all(1))
    rounded = builder.lshr(builder.add(builder.add(bits, _all(0x7FFF)), even), _all(16))
    kept = builder.select(builder.fcmp_unordered("uno", value, value), _all(0x7FC0), rounded)
    return builder.trunc(kept, ir.VectorType(I16, LANES))
