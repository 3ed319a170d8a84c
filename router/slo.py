"""Did a request meet its objectives, and if not, what cost most? Decides and does nothing else.

The formulae are those of `baton.stages`, on the router's own clock. It sees neither what happened before the request arrived nor what
happened after its tokens left. An objective for a value that does not exist (the TPOT of one token) is met.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.stages import largest, slow_tokens_because, ttft_parts


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
class RequestTimes:
    """The times of one request, in seconds. `stages`: those of `baton.stages.STAGES`."""

    stages: Mapping[str, float]
    e2e_s: float
    ttft_s: float | None = None
    tpot_s: float | None = None
    tpot_rest_s: float | None = None  # without the gap between tokens 0 and 1, in which the KV moves
    prefill_wait_s: float = 0.0
    prefill_compute_s: float = 0.0


def missed_because(objectives: Objectives, times: RequestTimes) -> str | None:
    """The stage that took most of the first missed objective, in the order TTFT, TPOT, E2E. None: all objectives are met."""
    for name, limit in objectives.limits.items():
        value = {"ttft": times.ttft_s, "tpot": times.tpot_s, "e2e": times.e2e_s}[name]
        if value is None or value <= limit:
            continue
        if name == "ttft":
            return largest(ttft_parts({**times.stages, "prefill_wait": times.prefill_wait_s, "prefill_compute": times.prefill_compute_s}))
        if name == "e2e":
            return largest(times.stages)
        return slow_tokens_because(times.stages["transfer"], times.tpot_rest_s is None or times.tpot_rest_s <= limit)
    return None


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
