"""Products with W as a checkpoint has it: numbers of 4 or 8 bits, or of float8, in groups of neighbours of a row that share a scale and,
perhaps, a shift. They are read as they are stored, and become numbers of x's type in registers. x is not rounded.

**Words.** Numbers lie in int32 words, PER in each. Of four words, the first PER · 4 columns of a row, word i has in its jth place column
4 j + i: so four words that are read at once meet four neighbours of x at once. Rows are filled up with zeros.

**One row** (`_row_kernel`): x · q is summed up for each word in float32, and multiplied by the word's scale. Nothing is rounded. A number
is taken out of its word and made a float32 by one logical operation: its bits, put below the exponent of 2^23, are 2^23 + q · 16^j, and x
is divided by 16^j instead, which is exact.

**A few rows** (`_rows_kernel`): tiles of W become numbers of x's type, rounded like a dequantised matrix, and are multiplied by tensor
cores. So a result differs from that of the dequantised matrix in the order of its sums. If there are few tiles, each is divided among
`parts` programs along the columns, and a second kernel adds up what they have found, in one order.

**Many rows**, and any but one where scales are too many for tiles (`tiled`): W is dequantised as a whole, or in parts of SCRATCH_BYTES,
and the library multiplies. The memory for it goes back to PyTorch at once, so that the next product finds it.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.model.quantised.matrix import Quantised

ABREAST = 4  # words that lie side by side
MOST_ROWS = 64  # of x, for tiles
TILE_WORDS = 8  # of a row of W in a tile
GROUP_WORDS = 16  # of a group of 128 numbers of 4 bits
DEQUANTISED_WORDS = 512  # at a time: four for each thread
SCRATCH_BYTES = 256 << 20  # for a dequantised matrix: those of most models are smaller

_ABREAST = tl.constexpr(ABREAST)
_WHOLE = tl.constexpr(0x4B000000)  # float32 2^23
_WHOLE_VALUE = tl.constexpr(8388608.0)
_FLOAT8 = tl.constexpr(2.0**60)  # float8 as the bits of a float32 is worth 2^-120 of it


@triton.jit
def _taken(word, j: tl.constexpr, BITS: tl.constexpr, FLOAT8: tl.constexpr, MIDDLE: tl.constexpr):
    """The number in place j, times 2^(BITS · (j mod (16 / BITS))), or a float8 times 2^-120."""
    if FLOAT8:
        top = word.to(tl.uint32, bitcast=True) << (24 - 8 * j)
        return ((top & 0x80000000) | ((top >> 4) & 0x07F00000)).to(tl.float32, bitcast=True)
    half: tl.constexpr = 16 // BITS
    up: tl.constexpr = BITS * (j % half)
    part = word if j < half else word >> 16
    found = (part & (((1 << BITS) - 1) << up)) | _WHOLE
    return found.to(tl.float32, bitcast=True) - (_WHOLE_VALUE + MIDDLE * (1 << up))


@triton.jit
def _row_kernel(
    x, words, scales, shifts, bias, out, outs, width, row_words, groups, group_words,
    PER: tl.constexpr, FLOAT8: tl.constexpr, SHIFTED: tl.constexpr, BIASED: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    bits: tl.constexpr = 32 // PER
    half: tl.constexpr = 16 // bits
    middle: tl.constexpr = 0 if SHIFTED else 1 << (bits - 1)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    known = row < outs
    total = tl.zeros([ROWS, WORDS], tl.float32)
    for first in range(0, row_words, WORDS):
        word = first + tl.arange(0, WORDS)
        inside = known[:, None] if EVEN else known[:, None] & (word < row_words)[None, :]
        q = tl.load(words + row[:, None] * row_words + word[None, :], mask=inside, other=0)
        at = row[:, None] * groups + (word // group_words)[None, :]
        scale = tl.load(scales + at, mask=inside, other=0.0).to(tl.float32)
        column = word // _ABREAST * (_ABREAST * PER) + word % _ABREAST
        found = tl.zeros([ROWS, WORDS], tl.float32)
        added = tl.zeros([WORDS], tl.float32)
        for j in tl.static_range(PER):
            here = column + _ABREAST * j
            near = tl.load(x + here, mask=here < width, other=0.0).to(tl.float32)
            if SHIFTED:
                added += near
            near = near * (_FLOAT8 if FLOAT8 else 1.0 / (1 << (bits * (j % half))))
            found += near[None, :] * _taken(q, j, bits, FLOAT8, middle)
        total += found * scale
        if SHIFTED:
            total += added[None, :] * tl.load(shifts + at, mask=inside, other=0.0).to(tl.float32)
    answer = tl.sum(total, 1)
    if FLOAT8:
        answer = answer * _FLOAT8
    if BIASED:
        answer += tl.load(bias + row, mask=known, other=0.0).to(tl.float32)
    tl.store(out + row, answer.to(out.dtype.element_ty), mask=known)


@triton.jit
def _spread(q, PER: tl.constexpr, FLOAT8: tl.constexpr, MIDDLE: tl.constexpr):
    """Words `[ROWS, WORDS]` → their numbers as float32 `[ROWS, WORDS, PER]`."""
    bits: tl.constexpr = 32 // PER
    up = tl.arange(0, PER) * bits
    if FLOAT8:
        top = q.to(tl.uint32, bitcast=True)[:, :, None] << (24 - up)[None, None, :].to(tl.uint32)
        return ((top & 0x80000000) | ((top >> 4) & 0x07F00000)).to(tl.float32, bitcast=True) * (_FLOAT8 * _FLOAT8)
    found = ((q[:, :, None] >> up[None, None, :]) & ((1 << bits) - 1)) | _WHOLE
    return found.to(tl.float32, bitcast=True) - (_WHOLE_VALUE + MIDDLE)


@triton.jit
def _tile(
    words, scales, shifts, o, known, first, row_words, groups, group_words, like,
    PER: tl.constexpr, FLOAT8: tl.constexpr, SHIFTED: tl.constexpr, ONE_GROUP: tl.constexpr, OUTS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Rows `o` of W, from word `first` on, `[OUTS, WORDS * PER]` of the type that `like` points to."""
    middle: tl.constexpr = 0 if SHIFTED else 1 << (32 // PER - 1)
    word = first + tl.arange(0, WORDS)
    inside = known[:, None] & (word < row_words)[None, :]
    q = tl.load(words + o[:, None] * row_words + word[None, :], mask=inside, other=0)
    w = _spread(q, PER, FLOAT8, middle)
    if ONE_GROUP:
        at = o * groups + first // group_words
        w = w * tl.load(scales + at, mask=known, other=0.0).to(tl.float32)[:, None, None]
        if SHIFTED:
            w += tl.load(shifts + at, mask=known, other=0.0).to(tl.float32)[:, None, None]
    else:
        at = o[:, None] * groups + (word // group_words)[None, :]
        w = w * tl.load(scales + at, mask=inside, other=0.0).to(tl.float32)[:, :, None]
        if SHIFTED:
            w += tl.load(shifts + at, mask=inside, other=0.0).to(tl.float32)[:, :, None]
    w = tl.permute(tl.reshape(w.to(like.dtype.element_ty), [OUTS, WORDS // _ABREAST, _ABREAST, PER]), (0, 1, 3, 2))
    return tl.reshape(w, [OUTS, WORDS * PER])


@triton.jit
def _rows_kernel(
    x, words, scales, shifts, bias, out, rows, outs, width, row_words, groups, group_words, part_words, x_row,
    PER: tl.constexpr, FLOAT8: tl.constexpr, SHIFTED: tl.constexpr, BIASED: tl.constexpr, ONE_GROUP: tl.constexpr,
    ROWS: tl.constexpr, OUTS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o = tl.program_id(1).to(tl.int64) * OUTS + tl.arange(0, OUTS)
    known = o < outs
    begin = tl.program_id(2) * part_words
    total = tl.zeros([OUTS, ROWS], tl.float32)
    for first in range(begin, min(begin + part_words, row_words), WORDS):
        w = _tile(
            words, scales, shifts, o, known, first, row_words, groups, group_words, x, PER, FLOAT8, SHIFTED, ONE_GROUP, OUTS, WORDS
        )  # fmt: skip
        column = first * PER + tl.arange(0, WORDS * PER)
        near = tl.load(x + row[None, :] * x_row + column[:, None], mask=(row < rows)[None, :] & (column < width)[:, None], other=0.0)
        total = tl.dot(w, near, total, input_precision="ieee")
    if BIASED:
        total += tl.load(bias + o, mask=known, other=0.0).to(tl.float32)[:, None]
    place = out + (tl.program_id(2) * rows + row[None, :]) * outs + o[:, None]
    tl.store(place, total.to(out.dtype.element_ty), mask=known[:, None] & (row < rows)[None, :])


@triton.jit
def _add_parts_kernel(parts, bias, out, size, outs, PARTS: tl.constexpr, BIASED: tl.constexpr, SIZE: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    total = tl.zeros([SIZE], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * size + i, mask=i < size, other=0.0)
    if BIASED:
        total += tl.load(bias + i % outs, mask=i < size, other=0.0).to(tl.float32)
    tl.store(out + i, total.to(out.dtype.element_ty), mask=i < size)


@triton.jit
def _dequantise_kernel(
    words, scales, shifts, out, outs, width, row_words, groups, group_words,
    PER: tl.constexpr, FLOAT8: tl.constexpr, SHIFTED: tl.constexpr, ONE_GROUP: tl.constexpr, OUTS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    o = tl.program_id(0).to(tl.int64) * OUTS + tl.arange(0, OUTS)
    known, first = o < outs, tl.program_id(1) * WORDS
    w = _tile(
        words, scales, shifts, o, known, first, row_words, groups, group_words, out, PER, FLOAT8, SHIFTED, ONE_GROUP, OUTS, WORDS
    )  # fmt: skip
    column = first * PER + tl.arange(0, WORDS * PER)
    tl.store(out + o[:, None] * width + column[None, :], w, mask=known[:, None] & (column < width)[None, :])


class ProductShape(NamedTuple):
    """How a product is divided among programs."""

    rows: int  # of x in a tile
    outs: int  # rows of W in a tile
    words: int  # of a row of W at a time
    warps: int
    parts: int = 1  # among which the columns are divided


def fits(matrix: Quantised) -> bool:
    """Whether groups are whole words abreast."""
    step = ABREAST * 32 // matrix.bits
    return matrix.numbers.numel() > 0 and (matrix.group % step == 0 or matrix.scales.shape[1] == 1)


class GroupProduct:
    """x `[T, in]` → x Wᵀ + bias `[T, out]`, of the type of x."""

    def __init__(self, matrix: Quantised, bias: Tensor | None, device: torch.device) -> None:
        """The matrix must fit."""
        self.outs, self.width = matrix.shape
        self.per, self.float8 = 32 // matrix.bits, matrix.float8
        self.words = _packed(matrix).to(device)  # int32 [out, words]
        self.scales = _narrow(matrix.scales).to(device)
        self.shifts = None if matrix.shifts is None else _narrow(matrix.shifts).to(device)
        self.bias = bias
        one = matrix.scales.shape[1] == 1
        self.group_words = self.words.shape[1] if one else matrix.group // self.per

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.words, self.scales, self.shifts) if each is not None)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        out = x.new_empty(rows, self.outs)
        if rows == 1:
            self.one_row(x, out, row_shape(self.words.shape[1]))
        elif tiled(rows, self.group_words):
            self.in_tiles(x, out, rows_shape(rows, self.outs, self.words.shape[1], x.element_size()))
        elif rows:
            self.dequantised(x, out)
        return out

    def one_row(self, x: Tensor, out: Tensor, shape: ProductShape) -> None:
        row_words = self.words.shape[1]
        _row_kernel[(triton.cdiv(self.outs, shape.outs),)](
            x, self.words, self.scales, self.scales if self.shifts is None else self.shifts, x if self.bias is None else self.bias, out,
            self.outs, self.width, row_words, self.scales.shape[1], self.group_words,
            PER=self.per, FLOAT8=self.float8, SHIFTED=self.shifts is not None, BIASED=self.bias is not None,
            EVEN=row_words % shape.words == 0, ROWS=shape.outs, WORDS=shape.words, num_warps=shape.warps,
        )  # fmt: skip

    def in_tiles(self, x: Tensor, out: Tensor, shape: ProductShape) -> None:
        (rows, _), row_words, parts = x.shape, self.words.shape[1], shape.parts
        x = x if x.stride(1) == 1 else x.contiguous()
        found = out if parts == 1 else out.new_empty(parts, rows, self.outs, dtype=torch.float32)
        part_words = triton.cdiv(triton.cdiv(row_words, parts), shape.words) * shape.words
        bias, biased = x if self.bias is None else self.bias, self.bias is not None
        _rows_kernel[(triton.cdiv(rows, shape.rows), triton.cdiv(self.outs, shape.outs), parts)](
            x, self.words, self.scales, self.scales if self.shifts is None else self.shifts, bias, found,
            rows, self.outs, self.width, row_words, self.scales.shape[1], self.group_words, part_words, x.stride(0),
            PER=self.per, FLOAT8=self.float8, SHIFTED=self.shifts is not None, BIASED=biased and parts == 1,
            ONE_GROUP=self.group_words % shape.words == 0, ROWS=shape.rows, OUTS=shape.outs, WORDS=shape.words, num_warps=shape.warps,
        )  # fmt: skip
        if parts > 1:
            size = rows * self.outs
            _add_parts_kernel[(triton.cdiv(size, 1024),)](found, bias, out, size, self.outs, PARTS=parts, BIASED=biased, SIZE=1024)

    def dequantised(self, x: Tensor, out: Tensor) -> None:
        parts = triton.cdiv(self.outs * self.width * x.element_size(), SCRATCH_BYTES)
        size = triton.cdiv(self.outs, parts)
        scratch = x.new_empty(size, self.width)
        for first in range(0, self.outs, size):
            last = min(first + size, self.outs)
            self._dequantise(slice(first, last), w := scratch[: last - first])
            if self.bias is None:
                torch.mm(x, w.t(), out=out[:, first:last])
            else:
                torch.addmm(self.bias[first:last], x, w.t(), out=out[:, first:last])

    def _dequantise(self, rows: slice, out: Tensor) -> None:
        words, scales = self.words[rows], self.scales[rows]
        (outs, row_words), size = words.shape, GROUP_WORDS if self.per == 8 else 2 * GROUP_WORDS
        _dequantise_kernel[(triton.cdiv(outs, DEQUANTISED_WORDS // size), triton.cdiv(row_words, size))](
            words, scales, scales if self.shifts is None else self.shifts[rows], out,
            outs, self.width, row_words, scales.shape[1], self.group_words,
            PER=self.per, FLOAT8=self.float8, SHIFTED=self.shifts is not None, ONE_GROUP=self.group_words % size == 0,
            OUTS=DEQUANTISED_WORDS // size, WORDS=size, num_warps=4,
        )  # fmt: skip


def tiled(rows: int, group_words: int) -> bool:
    """Whether so few rows are sooner multiplied in tiles. On an H200, with the matrices of Llama 3 8B: tiles of groups of 128 take 6 ms for
    32 rows, and would take longer than dequantising and the library for 128; those of int4 groups of 32 take 15 ms. 4 ms for the library
    alone, and 4 ms, at the speed of memory, to dequantise."""
    return 1 < rows <= MOST_ROWS and group_words % TILE_WORDS == 0


def row_shape(row_words: int) -> ProductShape:
    """The shape for one row of x."""
    return ProductShape(1, 4, min(128, triton.next_power_of_2(row_words)), 1)


def rows_shape(rows: int, outs: int, row_words: int, element: int) -> ProductShape:
    """The shape for `rows` of x, whose numbers have so many bytes."""
    tall, wide = max(16, triton.next_power_of_2(rows)), 128 if element <= 2 else 64
    parts = max(1, min(8, 1024 // triton.cdiv(outs, wide), row_words // (4 * TILE_WORDS)))
    return ProductShape(tall, wide, TILE_WORDS, 4, parts)


def _packed(matrix: Quantised) -> Tensor:
    """int32 `[out, words]` as the kernels read them."""
    (outs, width), per = matrix.shape, 32 // matrix.bits
    whole = F.pad(matrix.numbers, (0, -width % (ABREAST * per))).view(outs, -1, per, ABREAST).transpose(2, 3).contiguous()
    if matrix.bits == 8:
        return whole.view(outs, -1).view(torch.int32)
    pairs = whole.view(outs, -1, 2)
    return (pairs[..., 0] | pairs[..., 1] << 4).view(outs, -1).view(torch.int32)


def _narrow(factors: Tensor) -> Tensor:
    """The factors in two bytes each, if they are exactly that."""
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(factors.to(dtype).float(), factors.float()):
            return factors.to(dtype).contiguous()
    return factors.float().contiguous()
