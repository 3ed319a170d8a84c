"""What requests get less of while the cluster cannot serve all well, so that more of them are served in time. Pure.

The configuration lists levels; each adds one measure to those before it. A level is entered when too few of the requests that ended lately
met their objectives (a request that was refused for want of room or time did not), and the last change has had time to show. It is left
when nearly all did for a while, and that while doubles each time the level is entered again soon after it was left: load that needs the
measure does not make it flap. A request that a measure itself refuses says nothing of how the others are served: if it counted as one that
was not, the measure would stay in force as long as such requests come, however few they all are.
"""

from dataclasses import dataclass, replace
from typing import Self

from baton.cluster.config_router import RouterConfig
from baton.cluster.errors import DEGRADED, BatonError, Reason
from baton.cluster.measures import Measure, read_measures
from baton.engine.core.speculation import NONE, UNASKED, Offer
from router.validate import Ask

Lost = tuple[str, ...]  # what a request does not get: sentences, each beginning with the field
LEAST = 10  # requests that a judgement needs
RELAPSE = 10.0  # times the hold after it was left: a level that is entered again within that is held twice as long
LONGEST = 16.0  # times the hold


@dataclass(frozen=True, slots=True)
class Rules:
    levels: tuple[Measure, ...] = ()
    below: float = 0.9  # share of requests that meet their objectives: with fewer, the next level is entered
    above: float = 0.98  # with as many, the last level is left after `hold_s`
    look_s: float = 2.0  # what one judgement looks at, and how long a change has before the next one
    hold_s: float = 15.0

    @classmethod
    def of(cls, config: RouterConfig) -> Self:
        return cls(read_measures(config.degrade), config.degrade_below, hold_s=config.degrade_hold_s)


@dataclass(slots=True)
class _Level:
    """What is remembered of a level."""

    times: float = 1.0  # of `hold_s`
    left_at: float = float("-inf")


class Degradation:
    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.level = 0  # measures in force
        self.share: float | None = None  # of the requests of the last judgement
        self.declined = 0  # requests that a measure has refused since the start
        self._held = [_Level() for _ in rules.levels]
        self._changed_at = float("-inf")
        self._good_since: float | None = None
        self._seen: tuple[float, int, int] | None = None  # when the last judgement was made, and the counts then

    @property
    def measures(self) -> tuple[Measure, ...]:
        return self._rules.levels[: self.level]

    def judge(self, now: float, ended: int, met: int) -> int:
        """Takes how many requests have ended since the start, those that a measure refused left out, and how many of them met every
        objective. Returns by how much the level changes: -1, 0 or 1. Times are in seconds."""
        if not self._rules.levels:
            return 0
        if self._seen is None:
            self._seen = now, ended, met
        since, ended_then, met_then = self._seen
        count = ended - ended_then
        if now - since < self._rules.look_s or (count < LEAST and (count or now - since < 2 * self._rules.look_s)):
            return 0
        self._seen = now, ended, met
        self.share = (met - met_then) / count if count else None  # None: nobody came
        self._good_since = None if self.share is not None and self.share < self._rules.above else self._good_since or now
        if self.share is not None and self.share < self._rules.below:
            return self._rise(now)
        return self._fall(now)

    def _rise(self, now: float) -> int:
        if self.level == len(self._held) or now - self._changed_at < self._rules.look_s:
            return 0
        held = self._held[self.level]
        relapsed = now - held.left_at < RELAPSE * self._rules.hold_s * held.times
        held.times = min(LONGEST, held.times * 2) if relapsed else 1.0
        self.level, self._changed_at = self.level + 1, now
        return 1

    def _fall(self, now: float) -> int:
        if not self.level or self._good_since is None:
            return 0
        held = self._held[self.level - 1]
        if now - max(self._good_since, self._changed_at) < self._rules.hold_s * held.times:
            return 0
        held.left_at = self._changed_at = now
        self.level -= 1
        self._good_since = now
        return -1

    def declines(self, priority: int) -> bool:
        """Whether a measure refuses requests of this priority."""
        return any(measure.kind == "priority" and priority > measure.value for measure in self.measures)

    def serve(self, ask: Ask, offer: Offer) -> tuple[Ask, Lost]:
        """What is served of `ask`, and what it does not get. A stream that goes on keeps what it began with. Raises SATURATED
        for a priority that is refused."""
        if not self.level or ask.resume:
            return ask, ()
        if self.declines(ask.priority):
            self.declined += 1
            message = f"under overload, requests of priority {ask.priority} are refused"
            told = {DEGRADED: f"priority: {ask.priority} is refused, {self._why}"}
            raise BatonError(Reason.SATURATED, message, metadata=told, retry_after=self._rules.hold_s)
        return self._lower(ask, offer)

    def _lower(self, ask: Ask, offer: Offer) -> tuple[Ask, Lost]:
        told = []
        for measure in self.measures:
            if measure.kind == "speculation" and _guessed(ask, offer):
                ask = replace(ask, speculation=replace(UNASKED, method=NONE), predicted_text=None)
                told.append(f"speculation: none, {self._why}")
            elif measure.kind == "max_tokens" and not ask.output_so_far:  # it may have more already
                asked = ask.sampling
                most = asked.default_max_tokens if asked.max_tokens is None else asked.max_tokens
                if most > measure.value:
                    least = None if asked.min_tokens is None else min(asked.min_tokens, measure.value)
                    sampling = replace(asked, max_tokens=measure.value if asked.max_tokens is not None else None, min_tokens=least)
                    ask = replace(ask, sampling=replace(sampling, default_max_tokens=min(asked.default_max_tokens, measure.value)))
                    told.append(f"max_tokens: {measure.value} instead of {most}, {self._why}")
        return ask, tuple(told)

    @property
    def _why(self) -> str:
        """Why the level was entered stays true until it is left."""
        return "because too many requests lately did not meet their objectives"


def _guessed(ask: Ask, offer: Offer) -> bool:
    """Whether anything would be guessed for it: where no method is in force, a prediction still is used."""
    predicted = ask.predicted_text is not None or bool(ask.speculation.prediction)
    return predicted or (ask.speculation.method or offer.methods[0]) != NONE
