"""Cases that were measured twice: what is judged, and what the two measurements do not agree about."""

import json
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import simulate
from simulate import CASES, MeasuredCase, Outcome, apart, as_json, from_json, merged

from loadtest.slo import Slo

GOODPUT, TAIL, TTFT = "goodput (/s)", "TTFT P99 (ms)", "TTFT P50 (ms)"


def measured(number: int, figures: Mapping[str, float] = MappingProxyType({}), void: str = "") -> MeasuredCase:
    return MeasuredCase("tale", CASES[number], 2.0, Slo(ttft_s=0.1), 15.0, [{GOODPUT: 1.0, **figures}], void)


def outcome(of: MeasuredCase, goodput: float) -> Outcome:
    told: Any = SimpleNamespace(figures={GOODPUT: SimpleNamespace(value=goodput), TAIL: SimpleNamespace(value=1.0)})
    return Outcome(of, told)


def test_two_measurements_are_judged_by_their_mean_and_told_apart() -> None:
    both = merged(measured(0, {TTFT: 10.0}), measured(0, {TTFT: 14.0}, void="late"))
    assert both.mean(TTFT) == 12.0 and both.apart(TTFT) == pytest.approx(4 / 12) and both.void == "late"
    assert both.mean("hit rate") is None and both.apart("hit rate") is None
    assert measured(0).apart(GOODPUT) is None, "there is nothing that it could differ from"
    rows = apart([both, merged(measured(1, {TTFT: 10.0}), measured(1, {TTFT: 10.0}))])
    assert rows[TTFT]["median"] == pytest.approx(1 / 6) and rows[TTFT]["worst"] == pytest.approx(1 / 3)
    assert rows["all but TTFT P99"]["median"] == 0.0 and TAIL not in rows


def test_a_winner_that_the_measurements_do_not_agree_about_is_none() -> None:

    sure = [replace(measured(number), rounds=[{GOODPUT: value}] * 2) for number, value in ((0, 1.1), (1, 0.9))]
    told = simulate._winner((outcome(sure[0], 1.0), outcome(sure[1], 2.0)))
    assert "goodput" in told and "a colocated / a split" in told
    assert not simulate._winner((outcome(sure[0], 2.0), outcome(sure[1], 1.0))), "negative control"
    unsure = replace(sure[0], rounds=[{GOODPUT: 1.5}, {GOODPUT: 0.7}])
    assert not simulate._winner((outcome(unsure, 1.0), outcome(sure[1], 2.0)))


def test_what_was_measured_can_be_predicted_again() -> None:
    for number in range(len(CASES)):
        one = measured(number)
        assert from_json(json.loads(json.dumps(as_json(one, None)))) == one
