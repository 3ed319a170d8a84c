"""What a tier is worth, and when it is not worth having."""

from baton.tiers.worth import WINDOW_S, Worth


def spend(worth: Worth, begin: float, end: float, spent_s: float, saved_s: float) -> None:
    """Every ten seconds."""
    for now in range(int(begin), int(end), 10):
        worth.read(8, 8, 1000, spent_s, saved_s, float(now))


def test_a_tier_that_costs_more_than_it_saves_for_the_whole_window_does_not_pay() -> None:
    worth = Worth(0.0)
    spend(worth, 0, 700, 0.5, 0.1)
    assert worth.pays(WINDOW_S - 1), "it has been tried for too short a time"
    assert not worth.pays(700.0)


def test_a_tier_that_saves_more_pays() -> None:
    worth = Worth(0.0)
    spend(worth, 0, 700, 0.1, 0.5)
    assert worth.pays(700.0)


def test_what_it_saved_long_ago_does_not_count() -> None:
    worth = Worth(0.0)
    spend(worth, 0, 600, 0.1, 100.0)
    spend(worth, 600, 1000, 0.5, 0.0)
    assert worth.pays(1000.0)
    spend(worth, 1000, 1300, 0.5, 0.0)
    assert not worth.pays(1300.0)


def test_a_cost_that_nobody_notices_is_no_reason() -> None:
    worth = Worth(0.0)
    worth.wrote(100, 1000, 0.3, 5.0)
    assert worth.pays(700.0)


def test_a_new_trial_begins_at_nothing_and_the_tally_goes_on() -> None:
    worth = Worth(0.0)
    spend(worth, 0, 700, 0.5, 0.1)
    worth.begin(2500.0)
    assert worth.pays(2501.0) and worth.lately(2501.0) == (0.0, 0.0)
    assert (worth.tally.reads, worth.tally.hits, worth.tally.read_bytes) == (560, 560, 560_000)
    spend(worth, 2500, 3200, 0.5, 0.1)
    assert not worth.pays(3200.0)
