"""What load the next intervals bring, from that of those before.

Several candidates forecast side by side, and each is scored against what came. "last" says that nothing will change; another one is
believed only while it has been clearly better than that. Memory is bounded by `keep` values.

    last      the last value
    steady    the mean of the last values, as far back as they differ by no more than chance lets counts differ. Known only of values that
              were counted, and then what the others, "last" too, must have been clearly better than
    smoothed  exponential smoothing
    trend     Holt's linear trend, damped (Gardner and McKenzie 1985): the trend grows by less with each interval
    harmonic  least squares over sines and cosines of the period and of parts of it, moved to the level of the last values. A wave counts
              once there are one and a half of it
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
LAST, STEADY = "last", "steady"
PARTS = (1, 2, 3, 24)  # of the period: a day and its hour
WAVES = 1.5  # a harmonic needs so many of them
LEVEL = 4  # last values to whose level a harmonic is moved
SMOOTHING, TRENDING, DAMPING = 0.4, 0.2, 0.8
SCORES = 40  # a mean of about so many last errors
ENOUGH = 8  # scores, before one is believed
BETTER = 0.9  # of the error of "last"
CHANCE = 2.58  # standard deviations: one difference in a hundred is larger by chance
FEW = 8  # requests, whose lengths say nothing yet
WINDOW = 8  # intervals, at most, over which a steady load is averaged
MOST_MISSING = 4  # intervals that a gap may have; after a longer one, everything is forgotten


@dataclass(frozen=True, slots=True)
class Forecast:
    value: float
    by: str  # the candidate that is believed
    errors: Mapping[str, float]  # mean absolute error of each candidate so far; without those that have none


@dataclass(frozen=True, slots=True)
class Sum:
    """`total` of so many things (`of`): requests of seconds, or tokens of requests."""

    total: float
    of: float

    def __add__(self, other: "Sum") -> "Sum":
        return Sum(self.total + other.total, self.of + other.of)

    @property
    def mean(self) -> float:
        return self.total / self.of if self.of > 0 else 0.0


def steady(sums: Sequence[Sum], events: bool) -> Sum:
    """Those at the end (oldest first), together, as far back as nothing has changed: the last one, two, four … are taken together while
    they differ by no more than chance from as many before them (after Bifet and Gavaldà, "Learning from time-changing data with adaptive
    windowing", 2007). `events`: `total` counts events that come by chance (Poisson); else `of` counts things whose values spread about as
    widely as their mean is large."""
    newest = list(sums)[::-1]
    window, count = newest[0], 1
    while 2 * count <= min(len(newest), WINDOW):
        older = sum(newest[count + 1 : 2 * count], newest[count])
        if (events or window.of >= FEW) and _differ(window, older, events):
            break
        window, count = window + older, 2 * count
    return window


def _differ(one: Sum, other: Sum, events: bool) -> bool:
    """Whether they differ by more than chance; see `steady`."""
    both = (one + other).mean
    if both <= 0 or min(one.of, other.of) <= 0:
        return False
    counts = [each.of * both if events else each.of for each in (one, other)]
    return abs(one.mean - other.mean) > CHANCE * both * math.sqrt(sum(1 / count for count in counts))


class Forecaster:
    """`ahead`: intervals from the last value to the one that is forecast. `period`: intervals in which load repeats; 0: it does not."""

    def __init__(self, ahead: int, period: int = 0, keep: int = 5760) -> None:
        self._ahead, self._period = max(1, ahead), period
        self._values: deque[float] = deque(maxlen=keep)
        self._counted: deque[Sum] = deque(maxlen=WINDOW)  # the last values, if they were counted
        self._said: deque[dict[str, float]] = deque(maxlen=self._ahead)  # oldest first
        self._errors: dict[str, float] = {}
        self._scores: dict[str, int] = {}
        self._level = self._trend = 0.0

    def add(self, value: float, missing: int = 0, seconds: float = 0.0) -> None:
        """`missing`: intervals before this one of which nothing is known. `seconds`: in which events were counted whose rate is `value`; 0:
        it was not counted."""
        if missing > MOST_MISSING:
            self.__init__(self._ahead, self._period, self._values.maxlen or 1)  # type: ignore[misc]
            missing = 0
        if missing:
            self._said.clear()  # they were of other intervals
            self._counted.clear()
            self._values.extend([self._values[-1] if self._values else value] * missing)
        if len(self._said) == self._ahead:
            self._score(self._said[0], value)
        before = self._level
        if not self._values:
            self._level = value
        else:
            self._level = SMOOTHING * value + (1 - SMOOTHING) * (before + DAMPING * self._trend)
            self._trend = TRENDING * (self._level - before) + (1 - TRENDING) * DAMPING * self._trend
        self._values.append(value)
        if seconds > 0:
            self._counted.append(Sum(value * seconds, seconds))
        else:
            self._counted.clear()
        self._said.append(self._candidates())

    @property
    def candidates(self) -> Mapping[str, float]:
        """What each says of the interval `ahead` after the last one."""
        return self._said[-1] if self._said else {}

    def forecast(self) -> Forecast:
        """The forecast of the interval `ahead` after the last one; 0 before the first."""
        if not self._said:
            return Forecast(0.0, LAST, {})
        best = STEADY if STEADY in self._said[-1] else LAST
        limit = BETTER * self._errors.get(best, 0.0)
        for name, error in self._errors.items():
            if name in self._said[-1] and self._scores[name] >= ENOUGH and error < limit:
                best, limit = name, error
        return Forecast(self._said[-1][best], best, dict(self._errors))

    def _score(self, said: Mapping[str, float], value: float) -> None:
        for name, told in said.items():
            count = self._scores[name] = self._scores.get(name, 0) + 1
            error = self._errors.get(name, 0.0)
            self._errors[name] = error + (abs(told - value) - error) / min(count, SCORES)

    def _candidates(self) -> dict[str, float]:
        damped = sum(DAMPING**step for step in range(1, self._ahead + 1))
        said = {LAST: self._values[-1], "smoothed": self._level, "trend": self._level + damped * self._trend}
        if self._counted:
            said[STEADY] = steady(self._counted, events=True).mean
        waves = [self._period / part for part in PARTS if self._period / part >= 2 and len(self._values) >= WAVES * self._period / part]
        if waves:
            said["harmonic"] = _harmonic(np.array(self._values), waves, self._ahead)
        return {name: max(0.0, value) for name, value in said.items() if math.isfinite(value)}


def _harmonic(values: Values, waves: list[float], ahead: int) -> float:
    times = np.arange(len(values) + ahead, dtype=np.float64)
    columns = [np.ones_like(times)]
    for wave in waves:
        angle = 2 * np.pi * times / wave
        columns += [np.sin(angle), np.cos(angle)]
    matrix = np.stack(columns, axis=1)
    known = matrix[: len(values)]
    numbers = np.linalg.lstsq(known, values, rcond=None)[0]
    off = float(np.mean(values[-LEVEL:] - known[-LEVEL:] @ numbers))
    return float(matrix[-1] @ numbers) + off
