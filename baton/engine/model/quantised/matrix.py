"""A quantised matrix, whatever format it was read from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Quantised:
    """W `[out, in]`, in groups of neighbours of a row: a number is worth number · scale + shift of its group, and without shifts
    (number - middle) · scale. With `float8`, its bits are those of a float8 (e4m3), which is worth float8 · scale."""

    bits: int  # 4 or 8
    group: int  # numbers; the last group of a row may have fewer
    numbers: Tensor  # uint8 [out, in], 0 to 15 or 255
    scales: Tensor  # [out, groups], of the file's type
    shifts: Tensor | None = None  # float32 [out, groups]
    float8: bool = False

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    def rows(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The matrix with other rows: `change` maps any `[out, n]` to `[other out, n]`."""
        shifts = None if self.shifts is None else change(self.shifts)
        return replace(self, numbers=change(self.numbers), scales=change(self.scales), shifts=shifts)

    def dequantised(self) -> Tensor:
        """float32 `[out, in]`."""
        (outs, width), groups = self.shape, self.scales.shape[1]
        padded = F.pad(self.numbers, (0, groups * self.group - width)).view(outs, groups, self.group)
        grouped = padded.view(torch.float8_e4m3fn).float() if self.float8 else padded.float()
        if self.shifts is None and not self.float8:
            grouped -= self.middle
        grouped *= self.scales.float()[:, :, None]
        if self.shifts is not None:
            grouped += self.shifts[:, :, None]
        return grouped.view(outs, -1)[:, :width].contiguous()

    def widened(self) -> "Quantised":
        """The same with numbers of 8 bits."""
        up = 128 - self.middle
        shifts = None if self.shifts is None else self.shifts - self.scales.float() * up
        return replace(self, bits=8, numbers=self.numbers + up, shifts=shifts)

    def regrouped(self, group: int) -> "Quantised":
        """The same in groups of a size that divides this one's."""
        times, groups = self.group // group, -(-self.shape[1] // group)
        scales, shifts = (
            None if each is None else each.repeat_interleave(times, dim=1)[:, :groups].contiguous() for each in (self.scales, self.shifts)
        )
        assert scales is not None
        return replace(self, group=group, scales=scales, shifts=shifts)


@dataclass(frozen=True, slots=True)
class MatrixWorth:
    """What a matrix is worth that was quantised in a form which nothing computes."""

    numbers: Tensor  # float32 [out, in]

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    def rows(self, change: Callable[[Tensor], Tensor]) -> Self:
        return replace(self, numbers=change(self.numbers))

    def dequantised(self) -> Tensor:
        return self.numbers


Matrix = Tensor | Quantised | MatrixWorth


def plain(matrix: Matrix) -> Tensor:
    return matrix if isinstance(matrix, Tensor) else matrix.dequantised()


def with_rows(matrix: Matrix, change: Callable[[Tensor], Tensor]) -> Matrix:
    """See `Quantised.rows`."""
    return change(matrix) if isinstance(matrix, Tensor) else matrix.rows(change)


def join(parts: Sequence[Quantised]) -> Quantised:
    """The parts, which are as wide as each other, and all float8 or none, stacked along `out`. Of unlike ones, all become what can hold
    each."""
    if any(part.bits == 8 for part in parts):
        parts = [part if part.bits == 8 else part.widened() for part in parts]
    group = gcd(*(part.group for part in parts))
    parts = [part if part.group == group else part.regrouped(group) for part in parts]
    shifts = None
    if any(part.shifts is not None for part in parts):
        shifts = torch.cat([part.scales.float() * -part.middle if part.shifts is None else part.shifts for part in parts])
    numbers, scales = torch.cat([part.numbers for part in parts]), torch.cat([part.scales.float() for part in parts])
    return Quantised(parts[0].bits, group, numbers, scales, shifts, parts[0].float8)


def shifts_of(zeros: Tensor, scales: Tensor, bits: int) -> Tensor | None:
    """The shifts of a format whose numbers are worth (number - zero) · scale; both are `[out, groups]`. Exact for float16 scales."""
    return -zeros.float() * scales.float() if (zeros != 1 << (bits - 1)).any() else None


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Numbers of 4 or 8 bits as uint8 `[rows, n · 32 / bits]` from int32 `[rows, n]`, which hold the first in their lowest bits."""
    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)
