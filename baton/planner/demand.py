"""What is asked of the cluster: the routers' counts of each interval, and the load that follows from them."""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from baton.planner.forecast import WINDOW, Forecast, Forecaster, Sum, steady

COUNTS = ("arrived", "prompts", "prompt_tokens", "uncached_tokens", "completed", "completed_tokens", "met")


@dataclass(frozen=True, slots=True)
class Interval:
    """What all routers counted. `number`: consecutive."""

    number: int
    seconds: float
    arrived: int = 0
    prompts: int = 0  # that were sent to a worker
    prompt_tokens: int = 0  # of those
    uncached_tokens: int = 0  # part of them: is to be computed
    completed: int = 0
    completed_tokens: int = 0  # output of those
    met: int = 0  # requests that met all objectives
    missed: Mapping[str, int] = field(default_factory=dict)  # by the stage that took most of the time; error: refused or failed

    @property
    def judged(self) -> int:
        return self.met + sum(self.missed.values())

    @property
    def attainment(self) -> float | None:
        """None: nothing was judged."""
        return self.met / self.judged if self.judged else None


@dataclass(frozen=True, slots=True)
class Demand:
    """`rate`: requests per second; `prompt`, `uncached`, `output`: tokens of a request, means. `prefill`, `decode`: how many times as much
    each role has to do."""

    rate: float = 0.0
    prompt: float = 0.0
    uncached: float = 0.0
    output: float = 0.0
    prefill: float = 1.0
    decode: float = 1.0

    def times(self, factor: float) -> "Demand":
        return replace(self, rate=self.rate * factor)


def together(counts: Iterable[Interval], seconds: float) -> list[Interval]:
    """Puts the routers' shorter intervals together. Those that are not complete, at either end, are left out."""
    groups: dict[int, list[Interval]] = {}
    for each in counts:
        groups.setdefault(int(each.number * each.seconds // seconds), []).append(each)
    return [_sum(number, seconds, found) for number, found in sorted(groups.items()) if len(found) * found[0].seconds >= seconds - 1e-6]


def _sum(number: int, seconds: float, found: list[Interval]) -> Interval:
    missed: Counter[str] = Counter()
    for each in found:
        missed.update(each.missed)
    counts = {name: sum(getattr(each, name) for each in found) for name in COUNTS}
    return Interval(number, seconds, **counts, missed=missed)


class LoadForecast:
    """Follows the intervals, and says what comes. Refused requests count as well: the cluster is sized for what is asked of it."""

    def __init__(self, ahead: int, period: int = 0) -> None:
        """Both numbers count intervals; see `Forecaster`."""
        self._rate = Forecaster(ahead, period)
        self._last: int | None = None
        # Of the last intervals in which some were known: tokens of so many requests.
        self._prompt, self._uncached, self._output = (deque[Sum](maxlen=WINDOW) for _ in range(3))

    def add(self, intervals: Iterable[Interval]) -> None:
        """Intervals that were added before are passed over."""
        for each in sorted(intervals, key=lambda one: one.number):
            if self._last is not None and each.number <= self._last:
                continue
            missing = 0 if self._last is None else each.number - self._last - 1
            self._rate.add(each.arrived / each.seconds, missing, each.seconds)
            self._last = each.number
            if each.prompts:
                self._prompt.append(Sum(each.prompt_tokens, each.prompts))
                self._uncached.append(Sum(each.uncached_tokens, each.prompts))
            if each.completed:
                self._output.append(Sum(each.completed_tokens, each.completed))

    @property
    def forecast(self) -> Forecast:
        """The forecast of requests per second."""
        return self._rate.forecast()

    @property
    def last(self) -> int | None:
        """The number of the last interval."""
        return self._last

    @property
    def demand(self) -> Demand:
        """That is forecast."""
        lengths = (steady(sums, events=False).mean if sums else 0.0 for sums in (self._prompt, self._uncached, self._output))
        return Demand(self.forecast.value, *lengths)
