"""How much of a prompt to load, from what loading and computing took lately."""

import pytest

from baton.tiers.choice import FORGET_S, Measured, Rate, units_to_compute, units_to_load

DISK = Rate(0.005, 1e8)
UNIT = 1_000_000  # 10 ms from DISK


def test_what_loads_sooner_than_it_computes_is_loaded() -> None:
    assert units_to_load([DISK] * 10, UNIT, 0.05) == 10


def test_what_computes_sooner_is_computed() -> None:
    assert units_to_load([DISK] * 10, UNIT, 0.009) == 0


def test_a_gain_too_small_to_notice_is_not_worth_a_load() -> None:
    assert units_to_load([DISK], UNIT, 0.0153) == 0
    assert units_to_load([DISK], UNIT, 0.0157) == 1


def test_the_front_is_loaded_as_far_as_it_gains() -> None:
    slow = Rate(0.5, 1e6)
    assert units_to_load([DISK] * 4 + [slow] * 4, UNIT, 0.05) == 4


def test_a_slow_unit_is_loaded_if_what_stands_behind_it_pays_for_it() -> None:
    slow = Rate(0.0, 1e7)  # 100 ms a unit
    assert units_to_load([slow] + [DISK] * 9, UNIT, 0.05) == 10
    assert units_to_load([slow, DISK], UNIT, 0.05) == 0


def test_what_nobody_has_measured_is_tried() -> None:
    assert units_to_load([None] * 3, UNIT, 0.001) == 3
    assert units_to_load([DISK] * 3, UNIT, None) == 3


def test_a_rate_follows_the_loads_and_is_forgotten() -> None:
    measured = Measured()
    assert measured.at(0.0) is None
    measured.note(1000, 0.1, 1.0, 1.0)
    assert measured.at(1.0) == Rate(0.1, 1000.0)
    for second in range(2, 40):
        measured.note(4000, 0.0, 1.0, float(second))
    rate = measured.at(40.0)
    assert rate is not None and rate.bytes_per_s == pytest.approx(4000, rel=0.01) and rate.latency_s < 0.001
    assert measured.at(39.0 + FORGET_S) is None


def test_both_ends_meet_where_both_take_as_long() -> None:
    rate = Rate(0.0, 1e6)  # 10 ms a unit of 10,000 bytes
    assert units_to_compute([rate] * 10, 10_000, 0.01) == 5
    assert units_to_compute([rate] * 10, 10_000, 0.005) == 7
    assert units_to_compute([Rate(0.02, 1e6)] * 10, 10_000, 0.01) == 6, "the latency of the tier is spent on two more"


def test_a_tier_that_is_near_is_loaded_from_and_one_that_is_far_is_not() -> None:
    assert units_to_compute([Rate(0.0, 1e8)] * 10, 10_000, 0.01) is None, "1 ms of loading against 10 of one unit"
    assert units_to_compute([Rate(0.0, 1e4)] * 10, 10_000, 0.01) is None, "the last unit alone takes longer than computing all"
    assert units_to_compute([Rate(0.0, 1e6)], 10_000, 0.01) is None


def test_of_what_nobody_has_measured_both_ends_are_not_tried() -> None:
    assert units_to_compute([None] * 3, UNIT, 1.0) is None


def test_a_long_run_is_decided_at_once() -> None:
    """In the engine's thread: each unit is looked at a few times."""
    looks = 0

    class Counted(Rate):
        def __hash__(self) -> int:
            nonlocal looks
            looks += 1
            return super().__hash__()

    assert units_to_compute([Counted(0.0, 1e6)] * 5000, 10_000, 0.01) == 2500
    assert looks < 10 * 5000
