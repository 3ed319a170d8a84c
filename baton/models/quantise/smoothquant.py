"""SmoothQuant (Xiao et al., arXiv 2211.10438): what is hard to round in the inputs is moved into the weights.

With inputs in int8, each row of x has one step, which its greatest number decides. A few columns of x are often a hundred times larger
than the others, always the same ones, and leave these only a few steps. Dividing such a column of x by s and multiplying the column of W
with it changes nothing to the model, and evens x out: s = max|x|^a / max|W|^(1 - a).
"""

import torch
from torch import Tensor

from baton.models.quantise.inputs import InputSums
from baton.models.quantise.rounding import nearest

POWERS = (0.25, 0.5, 0.65, 0.8)  # of max|x| that are tried, besides no migration at all
LEAST = 1e-5


def migration(weights: list[Tensor], inputs: InputSums) -> Tensor:
    """s `[in]` for matrices W `[out, in]` with the same inputs: the one with which the outputs of a sample are nearest to the original's,
    both rounded to int8."""
    column = torch.stack([w.abs().amax(0) for w in weights]).amax(0).clamp_(min=LEAST)
    tried = [torch.ones_like(column)]
    tried += [inputs.largest.clamp(min=LEAST).pow(a) / column.pow(1 - a) for a in POWERS]
    return min(tried, key=lambda s: sum(_error(w, inputs.sample, s) for w in weights))


def _error(w: Tensor, x: Tensor, s: Tensor) -> float:
    rounded = by_rows(x / s) @ nearest(w * s, 8, w.shape[1], symmetric=True).worth().t()
    return float((rounded - x @ w.t()).square().mean())


def by_rows(x: Tensor) -> Tensor:
    """x `[n, in]`, each row rounded to 255 steps: as an engine rounds activations to int8."""
    steps = x.abs().amax(1, keepdim=True).div_(127).clamp_(min=torch.finfo(torch.float32).tiny)
    return x.div(steps).round_().mul_(steps)
