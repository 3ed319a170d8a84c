"""The traffic that a plan is made for: how often requests come, how unevenly, and how long they are."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, pvariance

WINDOW_S = 10.0  # over which arrivals are counted: about as long as a queue of requests lasts
SAMPLES = 200  # lengths that stand for all
BLOCK = 16


@dataclass(frozen=True, slots=True)
class Length:
    """Tokens of one request."""

    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """`lengths` are equally likely. `cv2`: of arrivals (`unevenness`). `cached`: share of prompt tokens that a prefix cache that forgets
    nothing would have; `distinct_tokens`: those that it would keep. Raises ValueError, which names the field."""

    rate: float  # requests per second
    lengths: tuple[Length, ...]
    cv2: float = 1.0
    cached: float = 0.0
    distinct_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.rate < float("inf"):
            raise ValueError(f"rate: {self.rate:g} is not a finite number above 0")
        if not self.lengths:
            raise ValueError("trace: has no request")
        if not 0 <= self.cached < 1 or self.cv2 < 0:
            raise ValueError(f"cached, cv2: {self.cached:g}, {self.cv2:g} are no share below 1 and no number from 0 on")

    @property
    def prompt(self) -> float:
        return fmean(each.prompt for each in self.lengths)

    @property
    def output(self) -> float:
        return fmean(each.output for each in self.lengths)

    @property
    def context(self) -> float:
        """Tokens before a position that is decoded, on average over all of these."""
        decoded = sum(each.output for each in self.lengths)
        return sum(each.output * (each.prompt + each.output / 2) for each in self.lengths) / decoded

    @property
    def whole(self) -> float:
        """Tokens of a sequence at its end, in whole blocks, on average over the time in which it decodes."""
        blocks = ((each.output, -(-(each.prompt + each.output) // BLOCK) * BLOCK) for each in self.lengths)
        return sum(output * tokens for output, tokens in blocks) / sum(each.output for each in self.lengths)

    def percentile(self, name: str, percent: float) -> int:
        values = sorted(getattr(each, name) for each in self.lengths)
        found: int = values[min(len(values) - 1, int(len(values) * percent / 100))]
        return found


def thinned(lengths: Sequence[Length], most: int = SAMPLES) -> tuple[Length, ...]:
    """Lengths taken evenly from all by length, `most` at most."""
    ordered = sorted(lengths, key=lambda each: (each.prompt, each.output))
    if len(ordered) <= most:
        return tuple(ordered)
    return tuple(ordered[int((number + 0.5) * len(ordered) / most)] for number in range(most))


def unevenness(times: Sequence[float], window_s: float = WINDOW_S) -> float:
    """The larger one of two squared coefficients of variation: of the gaps between arrivals, and the index of dispersion of their number in
    windows, which also sees bursts that last (Fendick and Whitt, "Measurements and approximations to describe the offered traffic and
    predict the average workload in a single-server queue", 1989). 1: as of independent users. `times` never decrease."""
    if len(times) < 3 or times[-1] <= times[0]:
        return 1.0
    gaps = [later - earlier for earlier, later in pairwise(times)]
    of_gaps = pvariance(gaps) / fmean(gaps) ** 2
    windows = int((times[-1] - times[0]) / window_s)
    if windows < 10:
        return of_gaps
    edges = [bisect_left(times, times[0] + number * window_s) for number in range(windows + 1)]
    counts = [later - earlier for earlier, later in pairwise(edges)]
    return max(of_gaps, pvariance(counts) / fmean(counts))
