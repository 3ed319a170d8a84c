"""The part of a run that is measured, and the totals of the requests in it: goodput, attainment, load. Pure."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from loadtest.record import Record
from loadtest.slo import Slo, meets


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a run that is measured: [warm_up_s, duration_s - cool_down_s). Raises ValueError if that is empty."""

    duration_s: float
    warm_up_s: float = 0.0
    cool_down_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("duration_s", "warm_up_s", "cool_down_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}: must be finite and not negative")
        if self.end <= self.start:
            raise ValueError(f"nothing is left of {self.duration_s} s after {self.warm_up_s} s warm-up and {self.cool_down_s} s cool-down")

    @property
    def start(self) -> float:
        return self.warm_up_s

    @property
    def end(self) -> float:
        return self.duration_s - self.cool_down_s

    @property
    def length(self) -> float:
        return self.end - self.start

    def select(self, records: Iterable[Record]) -> list[Record]:
        """The records that were due in it. The due time decides, so a slow server cannot push its worst requests out of the window."""
        return [record for record in records if self.start <= record.scheduled < self.end]


def goodput(records: Iterable[Record], window: Window, slo: Slo) -> float:
    """Requests per second that were due in the window and meet the whole SLO. Source: DistServe (OSDI '24); vLLM `request_goodput`."""
    return sum(meets(record, slo) for record in window.select(records)) / window.length


def attainment(records: Iterable[Record], window: Window, slo: Slo) -> float | None:
    """Share of the requests due in the window that meet the SLO; refused, failed and timed out ones missed it. None: none was due.

    The share is of all requests, not of the completed ones, or a server that refuses the most would look best.
    """
    due = window.select(records)
    return sum(meets(record, slo) for record in due) / len(due) if due else None


@dataclass(frozen=True, slots=True)
class Concurrency:
    """Requests in flight during the window: `in_flight[i]` from `times[i]` (s) on. The first time is the window's start."""

    times: tuple[float, ...]
    in_flight: tuple[int, ...]
    max: int
    mean: float  # over time


def concurrency(records: Iterable[Record], window: Window) -> Concurrency:
    """A sweep over [sent, ended) of all records, whatever their outcome and due time: the load that the server carried.

    At equal times an end comes before a start, as in vLLM's `max_concurrent_requests` (which counts successful requests only).
    """
    change: Counter[float] = Counter({window.start: 0})
    busy = 0.0  # request-seconds
    for record in records:
        began, ended = max(record.sent, window.start), min(record.ended, window.end)
        if began < ended:
            change[began] += 1
            change[ended] -= 1
            busy += ended - began
    times = sorted(at for at in change if at < window.end)
    levels = np.cumsum([change[at] for at in times]).tolist()
    return Concurrency(tuple(times), tuple(levels), max(levels), busy / window.length)


def max_output_tokens_per_s(records: Iterable[Record], window: Window) -> int:
    """Most tokens that arrived in one of the seconds counted from the window's start. Source: vLLM `bench serve`."""
    seconds = Counter(int(at - window.start) for record in records for at in record.token_times if window.start <= at < window.end)
    return max(seconds.values(), default=0)
