"""When requests are sent, in seconds from the start of a run, never decreasing. The loop is open, so nothing here waits for an answer.

    Poisson    independent users at `rate` requests per second: exponential gaps
    Constant   one request every 1 / rate seconds, the first at 0
    Gamma      gaps of a gamma distribution with shape `burstiness` and scale 1 / (rate * burstiness), so that their mean stays 1 / rate and
               their coefficient of variation is 1 / sqrt(burstiness). 1 is Poisson, a smaller value is burstier, a larger one smoother.
               vLLM's `bench serve` defines `--burstiness` the same way. Unlike vLLM's, the times are not stretched afterwards to make the
               last one fall on n / rate: the rate holds on average, not exactly in each run.
    Replay     the times of a trace, `speed` times as fast; ends with the trace

The first three never end. `times` takes its randomness as an argument: the same state yields the same times.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

MIN_BURSTINESS = 1e-3  # about 1 / burstiness requests arrive together; gaps far below 1e-300 s would vanish altogether


class Arrivals(Protocol):
    def times(self, rng: random.Random) -> Iterator[float]: ...


@dataclass(frozen=True, slots=True)
class Poisson:
    rate: float  # requests per second

    def __post_init__(self) -> None:
        _check("rate", self.rate)

    def times(self, rng: random.Random) -> Iterator[float]:
        moment = 0.0
        while True:
            moment += rng.expovariate(self.rate)
            yield moment


@dataclass(frozen=True, slots=True)
class Constant:
    rate: float  # requests per second

    def __post_init__(self) -> None:
        _check("rate", self.rate)

    def times(self, rng: random.Random) -> Iterator[float]:
        number = 0
        while True:
            yield number / self.rate  # not a running sum: its error would grow
            number += 1


@dataclass(frozen=True, slots=True)
class Gamma:
    rate: float  # requests per second
    burstiness: float

    def __post_init__(self) -> None:
        _check("rate", self.rate)
        _check_burstiness(self.burstiness)

    def times(self, rng: random.Random) -> Iterator[float]:
        moment = 0.0
        scale = 1 / self.burstiness / self.rate
        while True:
            moment += rng.gammavariate(self.burstiness, scale)
            yield moment


@dataclass(frozen=True, slots=True)
class Replay:
    moments: tuple[float, ...]  # seconds from the start, like `Item.at`
    speed: float = 1.0  # 2: in half the time, hence at twice the rate

    def __post_init__(self) -> None:
        _check("speed", self.speed)
        before = 0.0
        for number, moment in enumerate(self.moments):
            if not (math.isfinite(moment) and moment >= before):
                raise ValueError(
                    f"moments: number {number} is {moment!r}, after {before!r}; they are finite, 0 or more, and never decrease"
                )
            before = moment

    def times(self, rng: random.Random) -> Iterator[float]:
        return (moment / self.speed for moment in self.moments)


def parse(text: str) -> Callable[[float], Arrivals]:
    """The value of `--arrivals` ("poisson", "constant", "gamma:0.3") as a constructor that takes the rate.

    Raises ValueError, before any rate is known."""
    name, colon, argument = text.strip().partition(":")
    if name == "gamma":
        burstiness = _number("burstiness", argument)
        _check_burstiness(burstiness)
        return lambda rate: Gamma(rate, burstiness)
    if colon or name not in ("poisson", "constant"):
        raise ValueError(f"arrivals: {text!r} is not one of poisson, constant, gamma:BURSTINESS")
    return Poisson if name == "poisson" else Constant


def _number(field: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{field}: {text!r} is not a number") from None


def _check_burstiness(value: float) -> None:
    _check("burstiness", value)
    if value < MIN_BURSTINESS:
        raise ValueError(f"burstiness: {value!r} is below {MIN_BURSTINESS:g}")


def _check(field: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{field}: {value!r} is not a finite number above 0")
