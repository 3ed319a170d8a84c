"""The forecast of load: what is believed, and when."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.planner import forecast
from baton.planner.demand import Demand, Interval, LoadForecast
from baton.planner.forecast import ENOUGH, LAST, MOST_MISSING, Forecaster, Sum, steady


def day(interval: int, period: int) -> float:
    return 40 + 25 * math.sin(2 * math.pi * interval / period)


def errors(load: list[float], period: int, ahead: int = 6) -> tuple[float, float]:
    """Mean error of the forecast, and of "last value", over the second half."""
    forecaster = Forecaster(ahead, period)
    said, off, off_last = list[float](), list[float](), list[float]()
    for number, value in enumerate(load):
        if number >= ahead and number > len(load) // 2:
            off.append(abs(said[number - ahead] - value))
            off_last.append(abs(load[number - ahead] - value))
        forecaster.add(value)
        said.append(forecaster.forecast().value)
    return sum(off) / len(off), sum(off_last) / len(off_last)


def test_waves_that_repeat_are_foreseen() -> None:
    rng = random.Random(1)
    load = [day(number, 96) + rng.gauss(0, 2) for number in range(480)]
    ours, last = errors(load, 96)
    assert ours < 0.5 * last


def test_a_load_without_a_pattern_is_left_to_the_last_value() -> None:
    """A random walk: nothing forecasts it better."""
    rng = random.Random(2)
    load, level = [], 100.0
    for _ in range(400):
        level = max(0.0, level + rng.gauss(0, 5))
        load.append(level)
    ours, last = errors(load, 96)
    assert ours < 1.15 * last


def test_what_is_worse_than_the_last_value_is_not_believed() -> None:
    """Negative control: a harmonic whose period is wrong, after a load that has stopped swinging."""
    forecaster = Forecaster(4, 20)
    for number in range(60):
        forecaster.add(day(number, 20))
    assert forecaster.forecast().by == "harmonic"
    for _ in range(200):
        forecaster.add(10.0)
    told = forecaster.forecast()
    assert abs(told.value - 10.0) < 1.0


def test_nothing_is_believed_before_it_was_scored() -> None:
    forecaster = Forecaster(2, 0)
    for number in range(ENOUGH + 1):
        forecaster.add(10.0 * number)
        assert forecaster.forecast().by == LAST


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=80), st.integers(1, 10), st.integers(0, 30))
def test_a_forecast_is_a_load_and_memory_is_bounded(load: list[float], ahead: int, period: int) -> None:
    forecaster = Forecaster(ahead, period, keep=50)
    for value in load:
        forecaster.add(value)
        assert math.isfinite(forecaster.forecast().value) and forecaster.forecast().value >= 0
    assert len(forecaster._values) <= 50 and len(forecaster._said) <= ahead


def test_a_long_gap_forgets_everything() -> None:
    forecaster = Forecaster(1)
    for _ in range(20):
        forecaster.add(50.0)
    forecaster.add(5.0, missing=MOST_MISSING)
    assert len(forecaster._values) == 21 + MOST_MISSING
    forecaster.add(7.0, missing=MOST_MISSING + 1)
    assert [*forecaster._values] == [7.0] and forecaster.forecast().value == 7.0


def test_lengths_follow_the_last_intervals_and_refused_requests_count() -> None:
    load = LoadForecast(1)
    load.add([Interval(1, 5.0, arrived=50, prompts=50, prompt_tokens=5000, uncached_tokens=4000, completed=50, completed_tokens=500)])
    assert load.demand == Demand(10.0, 100.0, 80.0, 10.0)
    full = Interval(2, 5.0, arrived=100, prompts=50, prompt_tokens=50_000, uncached_tokens=50_000, completed=50, completed_tokens=500)
    load.add([full])
    assert load.demand.rate == 20.0 and load.demand.prompt > 600
    load.add([full])  # the same again is passed over
    assert load.demand.rate == 20.0 and load.last == 2


def counted(rates: list[float], seconds: float = 10.0, seed: int = 3) -> list[int]:
    """Arrivals of a Poisson process, of each interval."""
    rng = random.Random(seed)

    def arrivals(rate: float) -> int:
        now, count = rng.expovariate(rate), 0
        while now < seconds:
            now, count = now + rng.expovariate(rate), count + 1
        return count

    return [arrivals(rate) for rate in rates]


def sums(counts: list[int]) -> list[Sum]:
    return [Sum(count, 10.0) for count in counts]


def test_chance_is_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some twenty requests an interval, of one rate: what is said is much nearer to it than the last count is."""
    runs = [counted([2.0] * 8, seed=seed) for seed in range(40)]
    noise = sum(abs(counts[-1] / 10.0 - 2.0) for counts in runs)

    def off() -> float:
        return sum(abs(steady(sums(counts), events=True).mean - 2.0) for counts in runs)

    assert off() < 0.5 * noise
    load = LoadForecast(1)
    load.add([Interval(number, 10.0, arrived=count) for number, count in enumerate(runs[0])])
    assert load.forecast.by == "steady" and load.demand.rate == steady(sums(runs[0]), events=True).mean
    monkeypatch.setattr(forecast, "CHANCE", 0.0)  # negative control: every difference is a change
    assert off() > 0.9 * noise


def test_what_is_more_than_chance_is_seen_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def rate_after(change: float) -> float:
        return steady(sums(counted([10.0] * 8 + [10.0 * change])), events=True).mean

    assert rate_after(2.0) > 17 and rate_after(0.5) < 6.5
    monkeypatch.setattr(forecast, "CHANCE", 1e9)  # negative control: nothing is ever a change
    assert rate_after(2.0) < 13 and rate_after(0.5) > 8


def test_lengths_are_averaged_until_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    long, short = Sum(44 * 400.0, 44), Sum(44 * 30.0, 44)
    noisy = [Sum(20 * length, 20) for length in (390.0, 450.0, 370.0, 420.0, 360.0, 400.0, 430.0, 380.0)]
    assert steady(noisy, events=False).mean == pytest.approx(400.0)
    assert steady([*[short] * 8, long], events=False).mean == 400.0 and steady([*[long] * 8, short], events=False).mean == 30.0
    few = [*[short] * 8, Sum(3 * 100.0, 3)]
    assert steady(few, events=False).mean < 40.0, "a few long ones are no change"
    monkeypatch.setattr(forecast, "FEW", 0)  # negative control
    assert steady(few, events=False).mean == 100.0
    assert steady([Sum(0.0, 10.0)] * 4, events=True).mean == 0.0
