"""Whether what this router predicts comes, over all requests: a prediction that is always wrong is worse than none. Pure.

    cached        tokens of the prompt that the chosen worker was thought to cache
    wait          seconds that the gate expected a request to wait for its places (`router.admission`)
    first token   seconds from the sending of a prompt to its first token, of which the choice of a worker says that they grow with its
                  cost: what is to be computed there before it, and what is left of it

A time is compared as (came + FLOOR_S) / (predicted + FLOOR_S), so that one of nothing can be judged and a few milliseconds are no error.
The bias is the geometric mean of these ratios, the newest with a weight of one 32nd: errors to both sides cancel out, what is always too
much or too little stays. Each worker's promises of cached tokens are judged besides (`router.trust`), and count for less when they fail.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

Of = Literal["cached", "wait", "first token"]
FLOOR_S = 0.005
FLOOR_TOKENS = 16
NEWEST = 1 / 32  # weight of the newest request
LEAST = 32  # requests that a judgement needs
DRIFTS = 2.0  # a bias by this factor is told, until it is less than
AGAIN = 1.5


class CheckedPrediction(NamedTuple):
    of: Of
    predicted: float
    came: float

    @property
    def ratio(self) -> float:
        """What came over what was predicted."""
        floor = FLOOR_TOKENS if self.of == "cached" else FLOOR_S
        return (self.came + floor) / (self.predicted + floor)


@dataclass(slots=True)
class _Bias:
    requests: int = 0
    log: float = 0.0  # of the ratio, the running mean
    told: bool = False

    def note(self, ratio: float) -> None:
        self.requests += 1
        self.log += (math.log(ratio) - self.log) * max(NEWEST, 1 / self.requests)
        off = abs(self.log)
        self.told = self.requests >= LEAST and off > math.log(AGAIN if self.told else DRIFTS)


class Predictions:
    def __init__(self) -> None:
        self._biases: dict[Of, _Bias] = {}

    def note(self, predictions: Iterable[CheckedPrediction]) -> None:
        """What was predicted of a request that has ended."""
        for prediction in predictions:
            self._biases.setdefault(prediction.of, _Bias()).note(prediction.ratio)

    @property
    def biases(self) -> dict[str, float]:
        """What came over what was predicted, lately."""
        return {of: math.exp(bias.log) for of, bias in self._biases.items()}

    @property
    def alarm(self) -> str:
        """Which predictions are always wrong; empty: none."""
        return "; ".join(_sentence(of, self.biases[of]) for of, bias in self._biases.items() if bias.told)


def _sentence(of: Of, bias: float) -> str:
    by = f"{max(bias, 1 / bias):.1f} times"
    match of:
        case "cached":
            return f"prompts find {bias:.0%} of the cached tokens that are expected (`baton trace` tells why)"
        case "wait":
            return f"requests wait {by} as {'long' if bias > 1 else 'short'} as the gate expects"
        case "first token":
            return f"first tokens come {by} as {'late' if bias > 1 else 'soon'} as is expected"
