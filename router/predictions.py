"""Whether what this router predicts comes, over all requests: a prediction that is always wrong is worse than none. Pure.

    cached        tokens of a prompt that the chosen worker was thought to cache
    wait          seconds until a request that joins a standing queue gets its places (`router.admission`); in a burst onto an idle cluster
                  those who are served began together and end together, which the estimate does not know
    first token   seconds from the sending of a prompt to its first token: what the process took lately for that cost (`CostLine`)

What came in an interval is divided by what was predicted in it, so that many requests of one moment count as one finding. The bias is the
median over the last intervals: it is far from 1 if most of them were off to the same side. Each worker's promises of cached tokens are
judged besides (`router.trust`), and count for less when they fail.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Literal, NamedTuple

Of = Literal["cached", "wait", "first token"]
FLOOR_S, FLOOR_TOKENS = 0.005, 16  # are added to what came and what was predicted: less is no error
INTERVAL_S = 10.0
LAST, LEAST = 12, 6  # intervals that are looked at, and that a judgement needs
FORGOTTEN_S = 600.0
DRIFTS, AGAIN = 2.0, 1.5  # a bias by the first factor is told, until it is less than the second
LEARNED = 8  # prompts that a line needs
SLOWLY_S = 900.0  # in which a line forgets two thirds: a change is seen before it has become the rule


class CheckedPrediction(NamedTuple):
    of: Of
    predicted: float
    came: float

    @property
    def floor(self) -> float:
        return FLOOR_TOKENS if self.of == "cached" else FLOOR_S

    @property
    def ratio(self) -> float:
        """What came over what was predicted."""
        return (self.came + self.floor) / (self.predicted + self.floor)


@dataclass(slots=True)
class _Interval:
    number: int
    predicted: float = 0.0
    came: float = 0.0


@dataclass(slots=True)
class _Bias:
    intervals: deque[_Interval] = field(default_factory=lambda: deque(maxlen=LAST))
    told: bool = False

    def note(self, prediction: CheckedPrediction, now: float) -> None:
        number = int(now // INTERVAL_S)
        if not self.intervals or self.intervals[-1].number != number:
            self.intervals.append(_Interval(number))
        self.intervals[-1].predicted += prediction.predicted + prediction.floor
        self.intervals[-1].came += prediction.came + prediction.floor

    def ratio(self, now: float) -> float | None:
        """None: too little came lately."""
        oldest = (now - FORGOTTEN_S) // INTERVAL_S
        recent = [each.came / each.predicted for each in self.intervals if each.number >= oldest]
        return median(recent) if len(recent) >= LEAST else None

    def drift(self, now: float) -> float | None:
        """The ratio while it is one to be told; None: it is not."""
        ratio, limit = self.ratio(now), AGAIN if self.told else DRIFTS
        self.told = ratio is not None and abs(math.log(ratio)) > math.log(limit)
        return ratio if self.told else None


class Predictions:
    def __init__(self) -> None:
        self._biases = defaultdict[Of, _Bias](_Bias)

    def note(self, predictions: Iterable[CheckedPrediction], now: float) -> None:
        """What was predicted of a request that has ended."""
        for prediction in predictions:
            self._biases[prediction.of].note(prediction, now)

    def biases(self, now: float) -> dict[str, float]:
        """What came over what was predicted, of those of which enough is known."""
        return {of: ratio for of, bias in self._biases.items() if (ratio := bias.ratio(now)) is not None}

    def judge(self, now: float) -> str:
        """Which predictions are always wrong; empty: none."""
        drifts = [(of, bias.drift(now)) for of, bias in self._biases.items()]
        return "; ".join(_sentence(of, drift) for of, drift in drifts if drift is not None)


@dataclass(slots=True)
class CostLine:
    """How long prompts of a given cost take until their first token: the least squares of the last ones, a line that falls nowhere."""

    prompts: int = 0
    at: float = 0.0
    weight: float = 0.0
    x: float = 0.0  # means, then the mean square of the costs, and that of costs times seconds, about the means
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def note(self, cost: float, seconds: float, now: float) -> None:
        kept = self.weight * math.exp(-max(0.0, now - self.at) / SLOWLY_S)
        self.at, self.weight, self.prompts = now, kept + 1.0, self.prompts + 1
        new, dx, dy = 1.0 / self.weight, cost - self.x, seconds - self.y
        self.x, self.y = self.x + new * dx, self.y + new * dy
        self.xx = (1.0 - new) * (self.xx + new * dx * dx)
        self.xy = (1.0 - new) * (self.xy + new * dx * dy)

    def expects(self, cost: float) -> float | None:
        """None: too little is known."""
        if self.prompts < LEARNED:
            return None
        slope = max(0.0, self.xy / self.xx) if self.xx > 0 else 0.0
        return max(0.0, self.y + slope * (cost - self.x))


def _sentence(of: Of, bias: float) -> str:
    long = f"{bias:.1f} times as long as" if bias > 1 else f"{bias:.0%} of the time that"
    match of:
        case "cached":
            return f"prompts find {bias:.0%} of the cached tokens that are expected (`baton trace` tells why)"
        case "wait":
            return f"requests wait {long} the gate expects"
        case "first token":
            return f"first tokens take {long} is expected"
