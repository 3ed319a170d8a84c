"""A mean over seeds, with Student's confidence interval. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean of `count` runs; `half_width` of its confidence interval, None for fewer than two."""

    count: int
    mean: float | None
    half_width: float | None

    @property
    def low(self) -> float | None:
        return None if self.mean is None or self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float | None:
        return None if self.mean is None or self.half_width is None else self.mean + self.half_width


def mean_and_interval(values: Sequence[float], confidence: float = 0.95) -> Estimate:
    """mean +- t * s / sqrt(n), s with n - 1: Student's interval for independent runs ("The Probable Error of a Mean", 1908).

    Raises ValueError for a value that is not finite, or a confidence outside (0, 1).
    """
    if not all(math.isfinite(value) for value in values):
        raise ValueError(f"not all finite: {list(values)}")
    n = len(values)
    if not n:
        return Estimate(0, None, None)
    mean = float(np.mean(values))
    if n == 1:
        return Estimate(1, mean, None)
    return Estimate(n, mean, t_quantile(n - 1, confidence) * float(np.std(values, ddof=1)) / math.sqrt(n))


def t_quantile(freedom: int, confidence: float) -> float:
    """t with P(|T| <= t) = confidence, for Student's T. Raises ValueError unless freedom >= 1 and confidence is in (0, 1)."""
    if freedom < 1 or not 0 < confidence < 1:
        raise ValueError(f"no t for {freedom} degrees of freedom and a confidence of {confidence}")
    low, high = 0.0, math.pi / 2  # bounds of the angle, with which the probability grows steadily
    while low < (middle := (low + high) / 2) < high:
        if _t_probability(middle, freedom) < confidence:
            low = middle
        else:
            high = middle
    return math.sqrt(freedom) * math.tan(low)


def _t_probability(angle: float, freedom: int) -> float:
    """P(|T| <= sqrt(freedom) * tan(angle)): Abramowitz and Stegun 26.7.3 (odd) and 26.7.4 (even), a finite sum."""
    odd = freedom % 2
    power = math.cos(angle) if odd else 1.0
    terms = 0.0
    for k in range(2 + odd, freedom + 1, 2):
        terms += power
        power *= math.cos(angle) ** 2 * (k - 1) / k
    series = math.sin(angle) * terms
    return 2 / math.pi * (angle + series) if odd else series
