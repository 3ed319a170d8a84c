"""Under overload, requests get less as the configuration says, are told what, and get all of it again without flapping."""

import random
from dataclasses import replace
from typing import Any

import pytest
from http_door import CHAT, HELLO, House, toy_tokenizer
from pydantic import ValidationError

from baton.cluster.config_router import RouterConfig
from baton.cluster.errors import BatonError
from baton.cluster.measures import Measure, read_measures
from baton.engine.core.speculation import NONE, Offer, Speculation
from router.degradation import Degradation, Rules
from router.tokenizer import Tokenizer
from router.validate import Ask, AskSampling

LEVELS = read_measures(("speculation", "max_tokens=100", "priority=0"))
DRAFTING, NOTHING = Offer(("draft", NONE), 4), Offer()


class Day:
    """Seconds, in each of which `per_s` requests end and a share of them is good."""

    def __init__(self, rules: Rules = Rules(LEVELS)) -> None:  # noqa: B008  # it is frozen
        self.degradation, self.now, self.ended, self.met = Degradation(rules), 0.0, 0, 0
        self.history: list[int] = []

    def seconds(self, count: int, good: float, per_s: int = 20) -> int:
        for _ in range(count):
            self.now += 1.0
            self.ended += per_s
            self.met += round(per_s * good)
            self.degradation.judge(self.now, self.ended, self.met)
            self.history.append(self.degradation.level)
        return self.degradation.level

    @property
    def changes(self) -> int:
        return sum(one != other for one, other in zip(self.history, self.history[1:], strict=False))


def test_levels_are_entered_one_after_another_while_it_is_bad_and_left_when_it_is_good() -> None:
    day = Day()
    assert day.seconds(10, good=1.0) == 0
    assert day.seconds(2, good=0.5) == 1, "each level has time to show what it does"
    assert day.seconds(10, good=0.5) == 3
    assert day.seconds(60, good=0.95) == 3, "neither bad nor good: as it is"
    assert day.seconds(20, good=1.0) == 2
    assert day.seconds(60, good=1.0) == 0


def test_without_levels_nothing_is_judged() -> None:
    day = Day(Rules())
    assert day.seconds(20, good=0.0) == 0 and day.degradation.share is None


def test_few_requests_decide_nothing_and_none_at_all_counts_as_good() -> None:
    day = Day()
    assert day.seconds(4, good=0.0, per_s=1) == 0
    assert day.seconds(20, good=0.0, per_s=20) == 3
    assert day.seconds(120, good=0.0, per_s=0) == 0


def test_load_that_needs_a_level_does_not_make_it_flap() -> None:
    """Good with the first level, bad without: each time it is left, it holds twice as long."""
    day = Day()
    for _ in range(1800):
        day.seconds(1, good=1.0 if day.degradation.level else 0.5)
    assert day.changes < 24, day.changes
    assert sum(day.history) > 0.9 * len(day.history)


def test_noise_around_the_border_changes_little() -> None:
    day, noise = Day(), random.Random(3)
    for _ in range(3600):
        day.seconds(1, good=min(1.0, max(0.0, noise.gauss(0.93, 0.04))))
    assert day.changes <= 6, day.changes


def test_a_level_takes_what_it_names_and_says_so() -> None:
    degradation = Degradation(Rules(LEVELS))
    asked = Ask(text="x", speculation=Speculation("draft", 4, (1, 2)), sampling=AskSampling(max_tokens=500, min_tokens=200))
    assert degradation.serve(asked, DRAFTING) == (asked, ())
    degradation.level = 2
    served, told = degradation.serve(asked, DRAFTING)
    assert served.speculation == Speculation(NONE) and served.sampling == replace(
        asked.sampling, max_tokens=100, min_tokens=100, default_max_tokens=100
    )
    assert [sentence.partition(",")[0] for sentence in told] == ["speculation: none", "max_tokens: 100 instead of 500"]
    served, told = degradation.serve(Ask(text="x"), NOTHING)
    assert served.sampling.max_tokens is None and served.sampling.default_max_tokens == 100 and len(told) == 1
    assert degradation.serve(Ask(text="x", sampling=AskSampling(max_tokens=100)), NOTHING)[1] == ()
    resumed = Ask(text="x", sampling=AskSampling(max_tokens=500), resume=b"receipt", priority=5)
    degradation.level = 3
    assert degradation.serve(resumed, NOTHING) == (resumed, ()), "a stream keeps what it began with"
    assert degradation.serve(Ask(text="x", priority=0), NOTHING)[1]
    with pytest.raises(BatonError, match="of priority 1 are refused"):
        degradation.serve(Ask(text="x", priority=1), NOTHING)


def test_a_prediction_is_a_guess_and_who_asks_for_none_loses_nothing() -> None:
    degradation, predicting = Degradation(Rules(LEVELS[:1])), Offer((NONE, "prediction"), 8)
    degradation.level = 1
    for asked in (Ask(text="x", predicted_text="y"), Ask(text="x", speculation=Speculation("", None, (1, 2)))):
        served, told = degradation.serve(asked, predicting)
        assert served == Ask(text="x", speculation=Speculation(NONE)) and len(told) == 1
    assert degradation.serve(Ask(text="x"), predicting) == (Ask(text="x"), ())
    unguessed = Ask(text="x", speculation=Speculation(NONE))
    assert degradation.serve(unguessed, DRAFTING) == (unguessed, ())


def test_an_output_that_is_brought_without_a_receipt_may_be_longer_than_the_level_allows() -> None:
    """It would be refused as malformed else, which it is not."""
    degradation = Degradation(Rules(LEVELS))
    degradation.level = 3
    asked = Ask(text="x", output_so_far=[1] * 150, sampling=AskSampling(max_tokens=500))
    assert degradation.serve(asked, NOTHING) == (asked, ())
    with pytest.raises(BatonError, match="of priority 1 are refused"):
        degradation.serve(replace(asked, priority=1), NOTHING)


@pytest.mark.parametrize(
    "texts", [["fewer"], ["max_tokens=0"], ["max_tokens=5", "max_tokens=5"], ["speculation", "speculation"], ["priority="]]
)
def test_what_is_no_measure_is_refused_by_field(texts: list[str]) -> None:
    with pytest.raises(ValidationError, match=r"degrade: .*(is no measure|no more than)"):
        RouterConfig(degrade=tuple(texts))
    assert RouterConfig(degrade=("max_tokens=9", "max_tokens=5"), degrade_below=0.5).degrade == ("max_tokens=9", "max_tokens=5")


# Through the doors


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return toy_tokenizer(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def house(tokenizer: Tokenizer) -> House:
    house = House(tokenizer)
    house.journal.degradation = Degradation(Rules((Measure("max_tokens", 2), Measure("priority", 0))))
    return house


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_is_told_in_a_header_and_a_field(house: House, stream: bool) -> None:
    body: dict[str, Any] = {**HELLO, "max_tokens": 9, "stream": stream}
    answer = await house.post(CHAT, body)
    assert "x-baton-degraded" not in answer.headers and b"degraded" not in answer.body
    house.journal.degradation.level = 1
    answer = await house.post(CHAT, body)
    assert answer.headers["x-baton-degraded"].startswith("max_tokens: 2 instead of 9, because ")
    told = answer.chunks[0]["choices"][0] if stream else answer.json["choices"][0]
    assert told["degraded"] == [answer.headers["x-baton-degraded"]]
    assert house.script.begun[-1].params.max_tokens == 2
    house.check()


async def test_requests_of_less_priority_are_refused_with_a_time(house: House) -> None:
    house.journal.degradation.level = 2
    refused = await house.post(CHAT, {**HELLO, "priority": 1})
    assert refused.status == 429 and "of priority 1" in refused.json["error"]["message"] and int(refused.headers["retry-after"]) > 0
    assert (await house.post(CHAT, {**HELLO, "priority": 0})).status == 200
    house.check()


async def test_requests_that_are_refused_or_late_are_what_a_level_is_entered_for(house: House) -> None:
    """And those that are wrong are not."""
    house.journal.degradation.level = 2
    for body in ({**HELLO, "priority": 1}, {**HELLO, "max_tokens": -1}, HELLO):
        await house.post(CHAT, body)
    assert (house.journal._demand, house.journal.totals.met) == (2, 1)
