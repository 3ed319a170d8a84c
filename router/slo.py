"""Did a request meet its objectives, and if not, what cost most? Decides and does nothing else.

The same words and formulae as `loadtest/metrics.py`, taken from the router's own clock: what happened before the request arrived and
after its tokens left is not in it. An objective on something that there was not (the TPOT of one token) holds.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Objectives:
    """Seconds; None: no such objective."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    @property
    def limits(self) -> dict[str, float]:
        given = {"ttft": self.ttft_s, "tpot": self.tpot_s, "e2e": self.e2e_s}
        return {name: limit for name, limit in given.items() if limit is not None}


@dataclass(frozen=True, slots=True)
class Times:
    """Of one request, seconds. `stages`: queue, prefill, transfer, decode."""

    stages: Mapping[str, float]
    e2e_s: float
    ttft_s: float | None = None
    tpot_s: float | None = None
    tpot_rest_s: float | None = None  # without the gap between tokens 0 and 1, in which the KV moves
    prefill_wait_s: float = 0.0
    prefill_compute_s: float = 0.0


def missed_because(objectives: Objectives, times: Times) -> str | None:
    """The stage that cost most of the first objective that does not hold, in the order TTFT, TPOT, E2E. None: all of them hold."""
    for name, limit in objectives.limits.items():
        value = {"ttft": times.ttft_s, "tpot": times.tpot_s, "e2e": times.e2e_s}[name]
        if value is None or value <= limit:
            continue
        if name == "ttft":
            return _largest(_ttft_parts(times))
        if name == "e2e":
            return _largest(times.stages)
        handoff_alone = times.tpot_rest_s is None or times.tpot_rest_s <= limit
        return "transfer" if times.stages["transfer"] and handoff_alone else "decode"
    return None


def _ttft_parts(times: Times) -> dict[str, float]:
    """With a bypass the decode worker waits and computes and does not tell them apart: all of it is `prefill`."""
    told = times.prefill_wait_s + times.prefill_compute_s
    return {
        "queue": times.stages["queue"],
        "prefill_wait": times.prefill_wait_s,
        "prefill_compute": times.prefill_compute_s,
        "prefill": max(0.0, times.stages["prefill"] - told),
    }


def _largest(parts: Mapping[str, float]) -> str:
    return max(parts, key=lambda part: parts[part])


@dataclass(slots=True)
class Attainment:
    """The share of the last `window` requests that met every objective."""

    window: int
    _met: int = 0
    _last: deque[bool] = field(default_factory=deque)

    def note(self, met: bool) -> None:
        self._last.append(met)
        self._met += met
        if len(self._last) > self.window:
            self._met -= self._last.popleft()

    @property
    def ratio(self) -> float | None:
        """None before the first request."""
        return self._met / len(self._last) if self._last else None
