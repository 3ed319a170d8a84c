"""GPTQ (Frantar et al., arXiv 2210.17323): columns are rounded one after the other, and those that are still to come make up for it.

The outputs of V instead of W differ by (W - V) x, so what counts is the sum of squares (W - V) H (W - V)ᵀ with H = sum of x xᵀ over the
calibration text. Let a column of W be rounded, with error e. Among all changes of the later columns, the one that makes the sum least
follows from H: column j changes by -e · U[i, j] / U[i, i], where U is the upper Cholesky factor of H⁻¹. U holds the answer for every
step at once: its row i belongs to the inverse of H without the columns before i.
"""

import torch
from torch import Tensor

from baton.models.quantise.inputs import InputSums
from baton.models.quantise.rounding import Grid, Rounded, fit

DAMPING = 0.01  # of the mean of H's diagonal, added to it: columns that are nearly alike must not make up for each other without limit
MOST_DAMPING = 1.0
BLOCK = 128  # columns whose corrections reach the rest of the matrix together, in one product


def gptq(w: Tensor, inputs: InputSums, bits: int, group: int, symmetric: bool = True) -> Rounded:
    """W float32 `[out, in]`, which is left as it is. Raises ValueError if the inputs are not finite."""
    w, upper = w.clone(), factor(inputs.hessian)
    width, groups = w.shape[1], -(-w.shape[1] // group)
    numbers = torch.empty(w.shape, dtype=torch.uint8)
    scales, zeros = torch.empty(len(w), groups, dtype=torch.float16), torch.empty(len(w), groups)
    for start in range(0, width, BLOCK):
        end = min(start + BLOCK, width)
        errors = torch.zeros(len(w), end - start)
        for i in range(start, end):
            if i % group == 0:  # with the corrections that have reached this group so far
                ahead = w[:, i : i + group]
                if i + group > end:  # those of this block are not yet in what lies behind its end
                    ahead = ahead.clone()
                    ahead[:, end - i :] -= errors @ upper[start:end, end : i + group]
                grid = fit(ahead[:, None], bits, symmetric)
                scales[:, i // group], zeros[:, i // group] = grid.scales[:, 0], grid.zeros[:, 0]
            chosen = grid.numbers(w[:, i, None, None])
            numbers[:, i] = chosen[:, 0, 0].to(torch.uint8)
            errors[:, i - start] = (w[:, i] - grid.worth(chosen)[:, 0, 0]) / upper[i, i]
            w[:, i + 1 : end] -= errors[:, i - start, None] * upper[i, i + 1 : end]
        w[:, end:] -= errors @ upper[start:end, end:]
    return Rounded(bits, group, numbers, Grid(scales, zeros, (1 << bits) - 1))


def factor(hessian: Tensor) -> Tensor:
    """The upper Cholesky factor of H⁻¹, `[in, in]`. More damping if H is nearly singular. Raises ValueError if H is not finite."""
    mean = hessian.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny)
    if not mean.isfinite():
        raise ValueError("the inputs of a matrix are not finite")
    damping = DAMPING
    while damping <= MOST_DAMPING:
        damped = hessian + torch.eye(len(hessian)) * (damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper: Tensor
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return upper
        damping *= 10
    raise ValueError("the inputs of a matrix are too much alike for GPTQ; calibrate with more text")
