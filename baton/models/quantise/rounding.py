"""Round to nearest, in groups of neighbours of a row: what every method comes to in the end."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

TINY = 2.0**-18  # the least scale: smaller ones have too few bits as float16


@dataclass(frozen=True, slots=True)
class Grid:
    """What the numbers of some groups are worth: (number - zero) · scale, for numbers from 0 to `top`."""

    scales: Tensor  # float16 [out, groups]
    zeros: Tensor  # float32 [out, groups], whole numbers
    top: int

    def numbers(self, w: Tensor) -> Tensor:
        """The nearest ones to w `[out, groups, n]`: float32, whole."""
        return w.div(self.scales.float()[..., None]).round_().add_(self.zeros[..., None]).clamp_(0, self.top)

    def worth(self, numbers: Tensor) -> Tensor:
        """float32, of the shape of `numbers` `[out, groups, n]`."""
        return (numbers - self.zeros[..., None]).mul_(self.scales.float()[..., None])


@dataclass(frozen=True, slots=True)
class Rounded:
    """A matrix W `[out, in]`."""

    bits: int
    group: int  # the last group of a row may be shorter
    numbers: Tensor  # uint8 [out, in], from 0 on
    grid: Grid

    def worth(self) -> Tensor:
        """float32 `[out, in]`."""
        return self.grid.worth(grouped(self.numbers.float(), self.group)).flatten(1)[:, : self.numbers.shape[1]].contiguous()


def grouped(w: Tensor, group: int) -> Tensor:
    """`[out, in]` → `[out, groups, group]`, the last group filled with zeros."""
    return F.pad(w, (0, -w.shape[1] % group)).view(len(w), -1, group)


def fit(w: Tensor, bits: int, symmetric: bool) -> Grid:
    """The grid of each group of w `[out, groups, n]`, which reaches its least and its greatest number; 0 is always on it. `symmetric`: it
    reaches as far down as up, and all zero points are the middle."""
    top = (1 << bits) - 1
    if symmetric:
        scales = w.abs().amax(2).mul_(2 / top).clamp_(min=TINY).half()
        return Grid(scales, torch.full_like(scales, (top + 1) // 2, dtype=torch.float32), top)
    least, most = w.amin(2).clamp_(max=0), w.amax(2).clamp_(min=0)
    scales = (most - least).div_(top).clamp_(min=TINY).half()
    return Grid(scales, least.neg().div_(scales.float()).round_().clamp_(0, top), top)


def nearest(w: Tensor, bits: int, group: int, symmetric: bool) -> Rounded:
    """W float32 `[out, in]` with each weight rounded by itself."""
    groups = grouped(w, group)
    grid = fit(groups, bits, symmetric)
    return Rounded(bits, group, grid.numbers(groups).flatten(1)[:, : w.shape[1]].to(torch.uint8), grid)
