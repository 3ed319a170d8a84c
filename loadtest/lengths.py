"""How long the runs of a comparison are and how many seeds it has, where nobody said: what fits into the time that it may take. Pure.

A rate's run lasts until enough requests were judged, so slow rates have longer runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

ENOUGH = 20  # requests that a run should judge at least: fewer show an attainment of 90 % only in steps of more than 5 %
SHORTEST_S, LONGEST_S = 4.0, 60.0  # of a window
FACTORS = (8.0, 6.0, 5.0, 4.0, 3.0, 2.5, 2.0, 1.5, 1.0, 0.75, 0.5)  # times ENOUGH
DRAIN_S = 1.0  # until the last answer, at a rate that holds
MOST_SEEDS, FEWEST_SEEDS = 6, 3  # one chooses; two that judge show a spread, five a narrow one
PILOT = 1  # more than another seed, by so many times as much: it looks for the rate


@dataclass(frozen=True, slots=True)
class Lengths:
    """`factor`: how many times ENOUGH requests a window is to hold. None: every run has the length `fixed_s`."""

    around_s: float  # warm-up and cool-down
    factor: float | None = None
    fixed_s: float = 0.0

    def of(self, rate: float) -> float:
        """Seconds of a run."""
        if self.factor is None:
            return self.fixed_s
        return self.around_s + min(max(self.factor * ENOUGH / rate, SHORTEST_S), LONGEST_S)

    def sweep_s(self, rates: Sequence[float]) -> float:
        """Seconds of a sweep and one run more, at the middle rate."""
        ordered = sorted(rates)
        return sum(self.of(rate) + DRAIN_S for rate in [*ordered, ordered[len(ordered) // 2]])

    @classmethod
    def fit(cls, rates: Sequence[float], cluster_s: float, around_s: float) -> Self:
        """The longest runs whose `sweep_s` is at most `cluster_s`; or the shortest ones."""
        for factor in FACTORS:
            found = cls(around_s, factor)
            if found.sweep_s(rates) <= cluster_s:
                return found
        return found


def share(seconds: float, seeds: int, clusters: int) -> float:
    """The share of one cluster of one seed; each of the pilot's has PILOT more of them."""
    return seconds / ((seeds + PILOT) * clusters)


def choose(rates: Sequence[float], seconds: float, clusters: int, start_s: float, around_s: float) -> tuple[int, Lengths]:
    """Seeds and lengths for `clusters` clusters a seed, each of which takes `start_s` to start and stop: as many seeds as leave runs that
    judge enough."""
    for seeds in range(MOST_SEEDS, FEWEST_SEEDS - 1, -1):
        found = Lengths.fit(rates, share(seconds, seeds, clusters) - start_s, around_s)
        if (found.factor or 0.0) >= 1.5:
            return seeds, found
    return FEWEST_SEEDS, found
