"""Compares two outputs of one model, computed on two paths. They must be equal, or first differ where the model cannot tell tokens apart.

Matrix kernels may sum in a different order at a different batch size, so the same logits differ in their last bits (measured: up to 3e-5 on
the shipped model, whose logits have a standard deviation of 3). A token may change only where the two best scores are that close.
"""

import math
from collections.abc import Sequence as Seq

from torch import Tensor

from baton.engine.core.sampling import SamplingParams, mix64, noise_key
from baton.engine.model.naive import next_logits
from baton.engine.model.transformer import Transformer

TOLERANCE = 2e-4  # of a score (logit over temperature, plus noise): ten times the measured difference of one logit


def parting(model: Transformer, prompt: Seq[int], params: SamplingParams, ours: Seq[int], theirs: Seq[int]) -> float | None:
    """None if the outputs are equal, else the difference in score of the first two tokens that differ: inf if one output just ends earlier.

    Only for `params` without penalties and filters.
    """
    if list(ours) == list(theirs):
        return None
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if at is None:
        return math.inf
    known = [*prompt, *ours[:at]]
    logits = next_logits(model, known)[0]
    return abs(score(logits, ours[at], len(known), params) - score(logits, theirs[at], len(known), params))


def score(logits: Tensor, token: int, position: int, params: SamplingParams) -> float:
    """The score that the sampler maximizes, as `baton.engine.core.sampling` defines it: the logit if greedy, else the Gumbel-max score."""
    if params.temperature == 0:
        return float(logits[token])
    bits = mix64(noise_key(params.seed, position) + (token + 1) * 0x9E3779B97F4A7C15)
    noise = -math.log(-math.log(((bits >> 11) + 0.5) / 2.0**53))
    return float(logits[token]) / params.temperature + noise


def assert_same(model: Transformer, prompt: Seq[int], params: SamplingParams, ours: Seq[int], theirs: Seq[int]) -> bool:
    """Returns whether the outputs are equal. Raises if they differ where the model could tell the tokens apart."""
    gap = parting(model, prompt, params, ours, theirs)
    assert gap is None or gap < TOLERANCE, f"the outputs differ at a gap of {gap}: {list(ours)} and {list(theirs)}"
    return gap is None
