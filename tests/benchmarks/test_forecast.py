"""The benchmark of forecasts: planted loads, of which it is known what foresees them."""

import math
import random

import numpy as np
import pytest
from forecast import BELIEVED, EVERY_S, HARMONIC, PERIODS_S, judged, ratio

from baton.planner.forecast import LAST


def test_what_foresees_a_load_wins() -> None:
    rng = random.Random(1)
    waves = [5 + 3 * math.sin(2 * math.pi * EVERY_S * number / PERIODS_S[0]) + rng.gauss(0, 0.2) for number in range(230)]
    chance = [max(0.0, 5 + rng.gauss(0, math.sqrt(5 / EVERY_S))) for _ in range(230)]
    of_waves, of_chance = (judged(load, 120) for load in (waves, chance))
    assert of_waves["ratios"][HARMONIC][2] < 0.3 < 0.9 < of_waves["ratios"]["steady"][1]
    assert of_chance["ratios"]["steady"][2] < 0.9 and of_chance["ratios"][BELIEVED][0] < 0.9
    assert LAST not in of_chance["ratios"]


def test_a_candidate_that_is_the_last_value_has_the_ratio_one() -> None:
    same = np.array([abs(math.sin(number)) for number in range(100)])
    assert ratio(same, same) == pytest.approx([1.0, 1.0, 1.0])
