"""Load a run of blocks, or compute them? Pure: from what loads of each tier took lately, and what the engine takes for a token.

A prompt's blocks are computed from the front, and each needs all before it, so what is loaded is the front of the run: the longest part of
it whose loading gains most. A tier that nobody has asked lately is asked: only so does anybody know how it is now.
"""

from collections.abc import Sequence
from typing import NamedTuple

FORGET_S = 60.0
SMOOTHING = 0.3  # weight of the newest load
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
    best, gain, loading_s = 0, LEAST_GAIN_S, 0.0
    asked: set[Rate] = set()
    for count, rate in enumerate(run, 1):
        if rate is not None:
            loading_s += unit_bytes / rate.bytes_per_s + (0.0 if rate in asked else rate.latency_s)
            asked.add(rate)
        if count * compute_s - loading_s > gain:
            best, gain = count, count * compute_s - loading_s
    return best
