"""Rate, spread and determinism of the times at which requests are sent."""

import math
import random
from itertools import islice, pairwise

import numpy as np
import pytest

from loadtest.arrivals import Arrivals, Constant, Gamma, Poisson, Replay, parse


def moments(arrivals: Arrivals, count: int, seed: int = 0) -> list[float]:
    return list(islice(arrivals.times(random.Random(seed)), count))


def gaps(arrivals: Arrivals, count: int = 40_000) -> np.ndarray:
    return np.diff([0.0, *moments(arrivals, count)])


@pytest.mark.parametrize("arrivals", [Poisson(5.0), Gamma(5.0, 0.3), Gamma(5.0, 4.0), Constant(5.0)])
def test_the_mean_rate_is_the_requested_one(arrivals: Arrivals) -> None:
    assert gaps(arrivals).mean() == pytest.approx(1 / 5.0, rel=0.03)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_the_spread_of_gamma_gaps_is_one_over_the_root_of_the_burstiness(burstiness: float) -> None:
    between = gaps(Gamma(2.0, burstiness))
    assert between.std() / between.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_poisson_gaps_are_exponential() -> None:
    between = gaps(Poisson(10.0))
    for quantile in (0.1, 0.5, 0.9, 0.99):
        assert np.quantile(between, quantile) == pytest.approx(-math.log(1 - quantile) / 10.0, rel=0.05)


def test_gamma_with_burstiness_one_is_poisson() -> None:
    ours, exponential = gaps(Gamma(3.0, 1.0)), gaps(Poisson(3.0))
    for quantile in (0.1, 0.5, 0.9):
        assert np.quantile(ours, quantile) == pytest.approx(np.quantile(exponential, quantile), rel=0.05)


def test_constant_arrivals_are_even_and_do_not_drift() -> None:
    times = moments(Constant(10.0), 100_001)
    assert times[:4] == [0.0, 0.1, 0.2, 0.3]
    assert times[-1] == 10_000.0


@pytest.mark.parametrize("arrivals", [Poisson(100.0), Gamma(100.0, 0.05), Constant(3.0), Replay((0.0, 1.0, 1.0, 4.0))])
def test_times_never_decrease_and_none_is_negative(arrivals: Arrivals) -> None:
    times = moments(arrivals, 5000)
    assert times[0] >= 0 and all(a <= b for a, b in pairwise(times)) and all(map(math.isfinite, times))


@pytest.mark.parametrize("arrivals", [Poisson(7.0), Gamma(7.0, 0.5)])
def test_the_seed_determines_the_times(arrivals: Arrivals) -> None:
    assert moments(arrivals, 100, seed=1) == moments(arrivals, 100, seed=1) != moments(arrivals, 100, seed=2)


def test_a_replay_keeps_its_times_and_ends() -> None:
    assert moments(Replay((0.0, 1.0, 3.0)), 10) == [0.0, 1.0, 3.0]
    assert moments(Replay((0.0, 1.0, 3.0), speed=2.0), 10) == [0.0, 0.5, 1.5]
    assert moments(Replay(()), 10) == []


@pytest.mark.parametrize("times", [(1.0, 0.5), (-1.0,), (math.nan,), (0.0, math.inf)])
def test_a_replay_refuses_invalid_times(times: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="moments: number"):
        Replay(times)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_the_error_for_an_invalid_number_names_its_field(value: float) -> None:
    for make in (Poisson, Constant, lambda rate: Gamma(rate, 1.0), parse("poisson"), parse("gamma:2")):
        with pytest.raises(ValueError, match=r"^rate: "):
            make(value)
    with pytest.raises(ValueError, match=r"^burstiness: "):
        Gamma(1.0, value)
    with pytest.raises(ValueError, match=r"^speed: "):
        Replay((0.0,), speed=value)


def test_text_from_the_command_line_selects_a_process() -> None:
    assert parse("poisson")(2.0) == Poisson(2.0)
    assert parse(" constant ")(2.0) == Constant(2.0)
    assert parse("gamma:0.3")(2.0) == Gamma(2.0, 0.3)


@pytest.mark.parametrize("text", ["", "uniform", "poisson:2", "constant:", "Gamma:1", "trace"])
def test_the_error_for_an_unknown_process_lists_the_known_ones(text: str) -> None:
    with pytest.raises(ValueError, match="not one of poisson, constant, gamma:BURSTINESS"):
        parse(text)


@pytest.mark.parametrize("text", ["gamma", "gamma:", "gamma:x", "gamma:0", "gamma:-1", "gamma:nan", "gamma:inf", "gamma:1e-9", "gamma:1:2"])
def test_a_bad_burstiness_is_refused_before_the_rate_is_known(text: str) -> None:
    with pytest.raises(ValueError, match=r"^burstiness: "):
        parse(text)
