"""The last quarter of an hour: one point every five seconds, each with counts, sums and three histograms. Memory is bounded, however much
is served. Times are seconds since the epoch, which the caller passes in.

A point's number is the time divided by STEP_S. So the points of several routers with one number belong together, as far as the clocks of
their hosts agree.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

STEP_S = 5.0
KEPT = 180
QUANTILES = (50, 95)
# Bounds of the histograms, seconds: from 0.1 ms on, each 19 % above the last, up to 1000 s. The rest is counted in one more bucket.
BOUNDS = tuple(1e-4 * 2 ** (i / 4) for i in range(94))


@dataclass(slots=True)
class Point:
    """`running`, `queued` and `kv` are means. The histograms map a bucket, the index of its upper bound in BOUNDS, to a count."""

    number: int
    running: float = 0.0
    queued: float = 0.0
    kv: float | None = None  # used share of the decode workers' pools; None: there was none
    output_tokens: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    ttft: Counter[int] = field(default_factory=Counter)
    itl: Counter[int] = field(default_factory=Counter)
    met: int = 0  # requests that completed and met every objective
    tpot: Counter[int] = field(default_factory=Counter)  # of requests that completed
    arrived: int = 0
    prompts: int = 0  # that were sent to a worker
    prompt_tokens: int = 0  # of those
    uncached_tokens: int = 0  # part of them: was not promised, or turned out not to be cached
    completed_tokens: int = 0  # output of requests that completed
    missed: Counter[str] = field(default_factory=Counter)  # requests by the stage to blame; error: refused or failed


class Curves:
    def __init__(self) -> None:
        self._points: deque[Point] = deque(maxlen=KEPT + 1)  # consecutive numbers; the last one is still growing
        self._samples = 0  # of the last one

    def arrive(self, now: float) -> None:
        self._at(now).arrived += 1

    def end(
        self, now: float, outcome: str, met: bool = False, tpot_s: float | None = None, tokens: int = 0, missed: str | None = None
    ) -> None:
        """`met`: it completed and met every objective. `tpot_s`: None for one that did not complete, or has a single token. `tokens`: of
        its output, if it completed. `missed`: the stage to blame for a missed objective."""
        point = self._at(now)
        point.outcomes[outcome] += 1
        point.met += met
        point.completed_tokens += tokens
        if missed is not None:
            point.missed[missed] += 1
        if tpot_s is not None:
            point.tpot[bisect_left(BOUNDS, tpot_s)] += 1

    def prompt(self, now: float, tokens: int, uncached_tokens: int) -> None:
        """One was sent to a worker: what it asks for counts when it comes, however long its answer takes."""
        point = self._at(now)
        point.prompts += 1
        point.prompt_tokens += tokens
        point.uncached_tokens += uncached_tokens

    def first(self, now: float, ttft_s: float, broken_tokens: int = 0) -> None:
        """`broken_tokens`: of the prompt, promised and not cached."""
        point = self._at(now)
        point.ttft[bisect_left(BOUNDS, ttft_s)] += 1
        point.uncached_tokens += broken_tokens

    def tokens(self, now: float, count: int, gaps: Sequence[float]) -> None:
        """`gaps`: seconds before those of the tokens that are not the first of their output."""
        point = self._at(now)
        point.output_tokens += count
        point.itl.update(map(partial(bisect_left, BOUNDS), gaps))

    def sample(self, now: float, running: int, queued: int, kv: float | None) -> None:
        """`kv`: None while there is no decode worker."""
        point = self._at(now)
        self._samples += 1
        point.running += (running - point.running) / self._samples
        point.queued += (queued - point.queued) / self._samples
        if kv is not None:
            point.kv = kv if point.kv is None else point.kv + (kv - point.kv) / self._samples

    def since(self, number: int, now: float) -> list[Point]:
        """The points from that number on that are complete."""
        self._at(now)
        return [point for point in list(self._points)[:-1] if point.number >= number]

    def _at(self, now: float) -> Point:
        number = int(now // STEP_S)
        if self._points and not -1 <= number - self._points[-1].number <= KEPT:  # the clock was set, or nothing was noted for long
            self._points.clear()
        if not self._points:
            self._points.append(Point(number))
            self._samples = 0
        while self._points[-1].number < number:
            self._points.append(Point(self._points[-1].number + 1))
            self._samples = 0
        return self._points[-1]


def merge(points: Iterable[Point]) -> list[Point]:
    """One point for each number, in order: what several routers did together. `kv` is the first one's: they see the same workers."""
    together: dict[int, Point] = {}
    for point in points:
        total = together.setdefault(point.number, Point(point.number))
        total.running += point.running
        total.queued += point.queued
        total.kv = point.kv if total.kv is None else total.kv
        total.output_tokens += point.output_tokens
        total.outcomes.update(point.outcomes)
        total.ttft.update(point.ttft)
        total.itl.update(point.itl)
        total.met += point.met
        total.tpot.update(point.tpot)
        total.arrived += point.arrived
        total.prompts += point.prompts
        total.prompt_tokens += point.prompt_tokens
        total.uncached_tokens += point.uncached_tokens
        total.completed_tokens += point.completed_tokens
        total.missed.update(point.missed)
    return [together[number] for number in sorted(together)]


def draw(point: Point) -> dict[str, Any]:
    """What a page draws: `at` is the end of the step; counts are per second; times are in seconds, None without any."""
    rates = {name: count / STEP_S for name, count in point.outcomes.items()}
    return {
        "number": point.number,
        "at": (point.number + 1) * STEP_S,
        "ok": rates.get("ok", 0.0),
        "goodput": point.met / STEP_S,
        "errors": rates.get("failed", 0.0) + rates.get("refused", 0.0),
        "tokens": point.output_tokens / STEP_S,
        **{f"{name}_p{q}": quantile(getattr(point, name), q / 100) for name in ("ttft", "tpot", "itl") for q in QUANTILES},
        "running": point.running,
        "queued": point.queued,
        "kv": point.kv,
    }


def quantile(histogram: Counter[int], share: float) -> float | None:
    """Values within a bucket are taken to be evenly spread over the logarithm. Exact to the width of a bucket; None without values."""
    rank = share * histogram.total()
    below = 0
    for bucket in sorted(histogram):
        count = histogram[bucket]
        if below + count >= rank and count:
            if bucket >= len(BOUNDS):
                return BOUNDS[-1]
            upper = BOUNDS[bucket]
            lower = BOUNDS[bucket - 1] if bucket else upper / 2 ** (1 / 4)
            return float(lower * (upper / lower) ** ((rank - below) / count))
        below += count
    return None
