"""A quantised matrix, whatever format it was read from."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Quantised:
    """W `[out, in]`, in groups of neighbours of a row: a number's worth is number · scale + shift of its group."""

    bits: int  # 4 or 8
    group: int  # numbers; the last group of a row may have fewer
    numbers: Tensor  # int8 [out, in], -8 to 7 or -128 to 127
    scales: Tensor  # [out, groups], of the file's type
    shifts: Tensor | None = None  # float32 [out, groups]; None: all are 0

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
        grouped = F.pad(self.numbers, (0, groups * self.group - width)).view(outs, groups, self.group).float()
        grouped *= self.scales.float()[:, :, None]
        if self.shifts is not None:
            grouped += self.shifts[:, :, None]
        return grouped.view(outs, -1)[:, :width].contiguous()


def shifts_of(zeros: Tensor, scales: Tensor) -> Tensor | None:
    """Of a format whose numbers are worth (number - zero) · scale; both are `[out, groups]`. Exact for float16 scales."""
    return -zeros.float() * scales.float() if zeros.any() else None


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Numbers of 4 or 8 bits as uint8 `[rows, n · 32 / bits]` from int32 `[rows, n]`, which hold the first in their lowest bits."""
    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)


def centred(numbers: Tensor, bits: int) -> Tensor:
    """int8 from unsigned numbers: 0 becomes the least."""
    return numbers.bitwise_xor(1 << (bits - 1)).view(torch.int8) if bits == 8 else numbers.view(torch.int8).sub(8)
