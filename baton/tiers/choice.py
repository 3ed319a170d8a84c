"""Load a run of blocks, or compute them? Pure: from what loads of each tier took lately, and what the engine takes for a token.

A prompt's blocks are computed from the front, and each needs all before it. So what is loaded before anything is computed is the front of
the run: the longest part of it whose loading gains most. Or its front is computed while its tail is loaded, from both ends at once. A tier
that nobody has asked lately is asked: only so does anybody know how it is now.
"""

from collections.abc import Sequence
from typing import NamedTuple

FORGET_S = 60.0
SMOOTHING = 0.3  # weight of the newest load
LEAST_GAIN = 0.1  # of both ends at once, as a share: a load takes something from who computes beside it
LEAST_GAIN_S = 0.0005  # what a load costs besides: two turns of the engine, a thread that wakes


class Rate(NamedTuple):
    latency_s: float  # before the first byte
    bytes_per_s: float

    def seconds(self, size: int) -> float:
        return self.latency_s + size / self.bytes_per_s


class Measured:
    """The rate of one tier's loads."""

    def __init__(self) -> None:
        self._rate: Rate | None = None
        self._at = 0.0

    def note(self, size: int, waited_s: float, seconds: float, now: float) -> None:
        """A load of `size` bytes waited so long, and then took so long."""
        new = Rate(waited_s, size / max(seconds, 1e-9))
        if (old := self.at(now)) is not None:
            new = Rate(*(before + SMOOTHING * (after - before) for before, after in zip(old, new, strict=True)))
        self._rate, self._at = new, now

    def at(self, now: float) -> Rate | None:
        """None: it is not known, or was measured too long ago."""
        return self._rate if now - self._at < FORGET_S else None


def units_to_load(run: Sequence[Rate | None], unit_bytes: int, compute_s: float | None) -> int:
    """How many of a run's units to load from the front. `run`: the rate of the tier that holds each unit, if that is known. `compute_s`:
    what the engine takes for a unit; None: not known, then all are loaded."""
    if compute_s is None:
        return len(run)
    best, gain, loading = 0, LEAST_GAIN_S, _Loading(unit_bytes)
    for count, rate in enumerate(run, 1):
        loading_s = loading.seconds([] if rate is None else [rate])
        if count * compute_s - loading_s > gain:
            best, gain = count, count * compute_s - loading_s
    return best


def units_to_compute(run: Sequence[Rate | None], unit_bytes: int, compute_s: float) -> int | None:
    """How many of a run's units to compute from the front, while the others are loaded from the back: where both end soonest. None: a rate
    is not known, or what `units_to_load` says is not later."""
    rates = [rate for rate in run if rate is not None]
    if len(rates) < len(run):
        return None
    loads = units_to_load(run, unit_bytes, compute_s)
    one_end_s = _Loading(unit_bytes).seconds(rates[:loads]) + (len(run) - loads) * compute_s
    front, both_s, loading = 0, one_end_s * (1 - LEAST_GAIN) - LEAST_GAIN_S, _Loading(unit_bytes)
    for computed in range(len(run) - 1, 0, -1):
        seconds = max(computed * compute_s, loading.seconds(rates[computed : computed + 1]))
        if seconds < both_s:
            front, both_s = computed, seconds
    return front or None


class _Loading:
    """What it takes to load units, with those before."""

    def __init__(self, unit_bytes: int) -> None:
        self._unit_bytes = unit_bytes
        self._seconds = 0.0
        self._asked: set[Rate] = set()

    def seconds(self, more: Sequence[Rate]) -> float:
        for rate in more:
            self._seconds += self._unit_bytes / rate.bytes_per_s + (0.0 if rate in self._asked else rate.latency_s)
            self._asked.add(rate)
        return self._seconds
