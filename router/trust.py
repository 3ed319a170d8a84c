"""How far what workers are thought to cache can be trusted, from what prompts found there. Pure.

The prefix index gives hints, and a hint that is always wrong draws requests to a worker that computes everything anew. So what came
is compared with what was promised, and the policy counts only so much of a promise as was kept lately. Doubt fades: a worker of which
nothing is expected would get no request that could prove it right.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

NEWEST = 1 / 8  # weight of the newest prompt
FADES_S = 60.0  # after which doubt is half of what it was
DOUBTED = 0.5  # a worker that keeps less of its promises is told of
NOTHING: Mapping[str, float] = MappingProxyType({})


@dataclass(slots=True)
class _Doubt:
    incarnation: int
    share: float = 0.0  # of what is promised and not delivered
    at: float = 0.0
    told: bool = False  # that the worker is doubted

    def now(self, now: float) -> float:
        """What is left of `share`."""
        left: float = self.share * 0.5 ** ((now - self.at) / FADES_S)
        return left


class Trust:
    def __init__(self) -> None:
        self._doubts: dict[str, _Doubt] = {}

    def note(self, worker: str, incarnation: int, promised: int, delivered: int, now: float) -> bool:
        """A prompt found `delivered` of the `promised` tokens, more than none. Returns whether the worker is doubted from now on."""
        doubt = self._doubts.get(worker)
        if doubt is None or doubt.incarnation != incarnation:
            if delivered >= promised:
                return False
            doubt = self._doubts[worker] = _Doubt(incarnation)
        missing = 1.0 - min(1.0, delivered / promised)
        before = doubt.now(now)
        doubt.share, doubt.at = before + NEWEST * (missing - before), now
        if doubt.share < 0.01:
            self._doubts.pop(worker)
        known, doubted = doubt.told, doubt.share > 1.0 - DOUBTED
        doubt.told = doubted or (known and doubt.share >= (1.0 - DOUBTED) / 2)
        return doubted and not known

    def shares(self, now: float) -> Mapping[str, float]:
        """Worker → the share of its promises that counts; one that is not named keeps all."""
        if not self._doubts:
            return NOTHING
        return {name: 1.0 - doubt.now(now) for name, doubt in self._doubts.items()}

    def forget(self, worker: str) -> None:
        self._doubts.pop(worker, None)
