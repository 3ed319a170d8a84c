"""The last quarter of an hour: what is counted, how much is kept, and what several routers did together."""

import random
from collections import Counter

import pytest

from router.curves import BOUNDS, KEPT, STEP_S, Curves, Point, draw, merge, quantile

AT = 1_000_000 * STEP_S


def test_a_point_holds_what_happened_in_its_five_seconds() -> None:
    curves = Curves()
    for outcome in ("ok", "ok", "failed", "refused", "cancelled"):
        curves.end(AT + 1, outcome)
    curves.end(AT + 1, "ok", met=True, tpot_s=0.05)
    curves.first(AT + 2, 0.3)
    curves.tokens(AT + 2, 3, [0.01, 0.02])
    curves.tokens(AT + 4.9, 2, [])
    curves.sample(AT + 1, 4, 0, 0.5)
    curves.sample(AT + 3, 8, 2, 0.7)
    assert curves.since(0, AT + 4.9) == [], "it is not complete"
    [point] = curves.since(0, AT + 5)
    told = draw(point)
    assert told["at"] == AT + STEP_S and (told["ok"], told["errors"], told["tokens"]) == (0.6, 0.4, 1.0)
    assert told["goodput"] == 0.2 and told["tpot_p50"] == pytest.approx(0.05, rel=0.19)
    assert (told["running"], told["queued"], told["kv"]) == (6.0, 1.0, pytest.approx(0.6))
    assert told["ttft_p50"] == pytest.approx(0.3, rel=0.19) and told["itl_p95"] == pytest.approx(0.02, rel=0.19)


def test_a_step_without_events_is_a_point_of_zeros() -> None:
    curves = Curves()
    curves.end(AT, "ok")
    curves.end(AT + 3 * STEP_S, "ok")
    told = [draw(point) for point in curves.since(0, AT + 4 * STEP_S)]
    assert [point["ok"] for point in told] == [0.2, 0.0, 0.0, 0.2]
    assert told[1]["ttft_p50"] is None and told[1]["kv"] is None and told[1]["tokens"] == 0.0
    assert [point.number for point in curves.since(int(AT / STEP_S) + 2, AT + 4 * STEP_S)] == [1_000_002, 1_000_003]


def test_only_a_quarter_of_an_hour_is_kept_and_every_histogram_has_a_bound() -> None:
    curves, draws = Curves(), random.Random(1)
    for step in range(3 * KEPT):
        for _ in range(40):
            curves.first(AT + step * STEP_S, 10 ** draws.uniform(-9, 9))
    kept = curves.since(0, AT + 3 * KEPT * STEP_S)
    assert len(kept) == KEPT == 900 / STEP_S and kept[-1].number - kept[0].number == KEPT - 1
    assert all(len(point.ttft) <= len(BOUNDS) + 1 for point in kept)


@pytest.mark.parametrize("jump", [-3600.0, -2 * STEP_S, 3600.0])
def test_a_clock_that_was_set_begins_a_new_curve(jump: float) -> None:
    curves = Curves()
    curves.end(AT, "ok")
    curves.end(AT + jump, "failed")
    [point] = curves.since(0, AT + jump + STEP_S)
    assert point.outcomes == {"failed": 1}


def test_a_clock_that_is_corrected_by_a_moment_loses_nothing() -> None:
    curves = Curves()
    curves.end(AT, "ok")
    curves.end(AT - 1, "ok")
    assert curves.since(0, AT + STEP_S)[-1].outcomes == {"ok": 2}


def test_points_of_several_routers_become_one() -> None:
    one = Point(7, 3.0, 1.0, 0.5, 10, Counter(ok=2), Counter({5: 1}), Counter({9: 4}), 1, Counter({3: 1}))
    other = Point(7, 4.0, 0.0, 0.6, 5, Counter(ok=1, failed=1), Counter({5: 1, 6: 2}), Counter(), 1, Counter({3: 1}))
    alone = Point(8, 1.0)
    assert merge([one, alone, other]) == [
        Point(7, 7.0, 1.0, 0.5, 15, Counter(ok=3, failed=1), Counter({5: 2, 6: 2}), Counter({9: 4}), 2, Counter({3: 2})),
        alone,
    ]
    assert one.outcomes == Counter(ok=2), "what a router keeps is not changed by a look at it"


def test_a_percentile_is_exact_to_the_width_of_a_bucket() -> None:
    draws = random.Random(3)
    values = sorted(10 ** draws.uniform(-3.9, 2.9) for _ in range(1000))
    curves = Curves()
    for value in values:
        curves.first(AT, value)
    [point] = curves.since(0, AT + STEP_S)
    for share in (0.05, 0.5, 0.95, 1.0):
        exact = values[max(0, int(share * len(values)) - 1)]
        assert quantile(point.ttft, share) == pytest.approx(exact, rel=0.2)
    assert quantile(Counter(), 0.5) is None
    assert quantile(Counter({len(BOUNDS): 1}), 0.5) == BOUNDS[-1], "beyond the last bound"
    assert 0 < (quantile(Counter({0: 1}), 0.5) or 0) <= BOUNDS[0]


def test_what_a_planner_asks_for_is_counted_and_merged() -> None:
    """Requests that came, tokens of prompts, what of them was computed, output of those that completed, and whom to blame for the rest."""
    one, two = Curves(), Curves()
    for curves in (one, two):
        curves.arrive(0.0)
        curves.arrive(1.0)
        curves.prompt(1.5, 100, 40)
        curves.first(2.0, 0.1, broken_tokens=20)
        curves.end(3.0, "ok", met=True, tpot_s=0.01, tokens=7)
        curves.end(4.0, "refused", missed="error")
    for curves, times in ((one, 1), (two, 2)):
        told = curves.since(0, 6.0) if times == 1 else merge([*one.since(0, 6.0), *two.since(0, 6.0)])
        point = told[0]
        assert (point.arrived, point.prompt_tokens, point.uncached_tokens, point.completed_tokens) == (
            2 * times,
            100 * times,
            60 * times,
            7 * times,
        )
        assert point.missed == {"error": times} and point.met == times
