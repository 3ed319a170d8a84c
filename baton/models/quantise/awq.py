"""AWQ (Lin et al., arXiv 2306.00978): columns that meet large inputs are stretched before they are rounded.

A column that is multiplied with s before rounding, while its input is divided by s, is the same to the model, but its rounding error is
s times smaller beside its weights. All other columns of the group pay for it if s is large: the group's steps grow. So s follows the
inputs' mean magnitude to a power between 0 and 1, the one whose outputs are nearest to the original's.
"""

import torch
from torch import Tensor

from baton.models.quantise.inputs import InputSums
from baton.models.quantise.rounding import nearest

POWERS = 11  # that are tried, from 0 (no scaling) to 1
LEAST = 1e-4


def scaling(weights: list[Tensor], inputs: InputSums, heads: tuple[int, int], bits: int, group: int) -> Tensor:
    """s `[in]` for matrices W `[out, in]` with the same inputs. `heads`: (n, repeats), columns are n sets of `repeats` parts that must have
    the same s, since one head of values feeds them all; (1, 1): none."""
    mean = shared(inputs.total / inputs.count, heads).clamp_(min=LEAST)
    best, chosen = float("inf"), torch.ones_like(mean)
    for i in range(POWERS):
        s = mean.pow(i / (POWERS - 1))
        s /= (s.max() * s.min()).sqrt()
        error = sum(inputs.error(nearest(w * s, bits, group, symmetric=False).worth().div_(s).sub_(w)) for w in weights)
        if error < best:
            best, chosen = error, s
    return chosen


def shared(of_columns: Tensor, heads: tuple[int, int]) -> Tensor:
    """`[in]` with the mean of the parts in each of them."""
    sets, repeats = heads
    parts = of_columns.view(sets, repeats, -1)
    return parts.mean(1, keepdim=True).expand_as(parts).flatten().clone()
