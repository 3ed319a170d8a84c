"""Percentiles of many values. Without values, every number is None."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear interpolation between the two nearest ranks (numpy's default, as in vLLM). None without values."""
    return float(np.percentile(values, percent)) if values else None


@dataclass(frozen=True, slots=True)
class Distribution:
    """`std` is that of the values themselves (divided by n), as in numpy and vLLM. Without values, all but `count` is None."""

    count: int
    mean: float | None
    std: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        if not values:
            return cls(0, None, None, None, None, None, None)
        p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
        return cls(len(values), float(np.mean(values)), float(np.std(values)), p50, p90, p99, max(values))
