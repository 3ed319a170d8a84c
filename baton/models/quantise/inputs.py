"""What a matrix is multiplied with, over the calibration text."""

from dataclasses import dataclass

import torch
from torch import Tensor

SAMPLE = 256  # rows that are kept as they are


@dataclass(slots=True)
class InputSums:
    """Sums over all rows x `[in]`; as much memory as in² numbers."""

    hessian: Tensor  # sum of x xᵀ, [in, in]: (W - V) H (W - V)ᵀ says how far the outputs of V are from those of W
    total: Tensor  # of |x|, [in]
    largest: Tensor  # of |x|, [in]
    sample: Tensor  # [SAMPLE or fewer, in]
    count: int = 0

    @classmethod
    def none(cls, width: int) -> "InputSums":
        return cls(torch.zeros(width, width), torch.zeros(width), torch.zeros(width), torch.empty(0, width))

    def add(self, rows: Tensor, share: int) -> None:
        """Rows `[n, in]`; up to `share` of them, evenly spaced, may go to the sample."""
        self.hessian.addmm_(rows.t(), rows)
        magnitudes = rows.abs()
        self.total += magnitudes.sum(0)
        self.largest = torch.maximum(self.largest, magnitudes.amax(0))
        kept = rows[:: max(1, -(-len(rows) // share))][: SAMPLE - len(self.sample)]
        self.sample = torch.cat((self.sample, kept))
        self.count += len(rows)

    def error(self, wrong: Tensor) -> float:
        """The mean square of x wrongᵀ, summed over outputs, for a difference of weights `[out, in]`."""
        return float((wrong @ self.hessian).mul_(wrong).sum()) / self.count
