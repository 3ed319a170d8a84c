"""Under overload, requests get less as the configuration says, are told what, and get all of it again without flapping."""

import random
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from fake_workers import record
from google.rpc import error_details_pb2
from http_door import CHAT, CONTEXT, HELLO, House, toy_tokenizer
from pydantic import ValidationError

from baton.cluster.config_router import RouterConfig
from baton.cluster.errors import BatonError
from baton.cluster.measures import Measure, read_measures
from baton.cluster.rpc import to_status
from baton.engine.core.speculation import NONE, Offer, Speculation
from router.degradation import Degradation, Rules
from router.door import to_response
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


class Noisy:
    """A cluster that serves 40 requests in a second, with guesses off 44 and with short answers 60, and users who send about so many as
    they are told to (Poisson), half of them with a priority that the last level refuses. `counts`: also those as not served."""

    SERVED = (40, 44, 60, 60)

    def __init__(self, rules: Rules, seed: int = 1, counts: bool = False) -> None:
        self.degradation, self.rng, self.counts = Degradation(rules), random.Random(seed), counts
        self.now, self.ended, self.met, self.levels = 0.0, 0, 0, list[int]()

    def seconds(self, count: int, load: Callable[[float], float]) -> int:
        for _ in range(count):
            self.now += 1.0
            mean = load(self.now)
            came = max(0, round(self.rng.gauss(mean, mean**0.5)))
            declined = sum(not self._takes(number % 2) for number in range(came))
            taken = came - declined
            self.met += min(taken, self.SERVED[self.degradation.level])
            self.ended += came if self.counts else taken
            self.degradation.judge(self.now, self.ended, self.met)
            self.levels.append(self.degradation.level)
        return self.degradation.level

    def _takes(self, priority: int) -> bool:
        try:
            self.degradation.serve(Ask(text="x", priority=priority), NOTHING)
        except BatonError:
            return False
        return True

    @property
    def turns(self) -> int:
        """How often a level was left after one was entered, or the other way round."""
        steps = [after - before for before, after in pairwise(self.levels) if after != before]
        return sum(one != other for one, other in pairwise(steps))


def test_what_a_level_refuses_does_not_keep_it_in_force() -> None:
    cluster = Noisy(Rules(LEVELS))
    assert cluster.seconds(60, lambda now: 200.0) == 3
    assert cluster.degradation.declined > 1000
    assert cluster.seconds(300, lambda now: 25.0) == 0, "25 can be served, whoever they are from"
    stuck = Noisy(Rules(LEVELS), counts=True)
    assert stuck.seconds(60, lambda now: 200.0) == stuck.seconds(900, lambda now: 25.0) == 3, "negative control"


@pytest.mark.parametrize("seed", range(2))
def test_noisy_load_around_what_can_be_served_makes_no_level_flap(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The load changes every ten seconds, to between 0.6 and 1.6 of what can be served with nothing taken away."""

    def load(now: float) -> float:
        return 40 * random.Random(seed * 1000 + int(now / 10)).uniform(0.6, 1.6)

    calm = Noisy(Rules(LEVELS), seed)
    calm.seconds(900, load)
    assert 0 < calm.turns <= 18 and max(calm.levels) >= 1
    monkeypatch.setattr("router.degradation.LONGEST", 1.0)
    flapping = Noisy(Rules(LEVELS, above=0.9, hold_s=1.0), seed)
    flapping.seconds(900, load)
    assert flapping.turns > 4 * calm.turns, "negative control: nothing is held, and levels are left where they are entered"


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


@pytest.mark.parametrize(("level", "fields"), [(0, []), (1, ["speculation"]), (2, ["speculation", "max_tokens"]), (3, ["priority"])])
async def test_each_level_is_told_with_its_reason_at_both_doors(tokenizer: Tokenizer, level: int, fields: list[str]) -> None:
    house = House(tokenizer, workers=False)
    guesses = {"speculation": ("draft", NONE), "speculation_tokens": 4}
    house.view.update([record("d0", tokenizer_fingerprint=tokenizer.fingerprint, max_model_len=CONTEXT, **guesses)], 0.0)
    house.journal.degradation = Degradation(Rules(read_measures(("speculation", "max_tokens=2", "priority=0"))))
    house.journal.degradation.level = level
    answer = await house.post(CHAT, {**HELLO, "max_tokens": 9, "priority": 1})
    told = answer.headers.get("x-baton-degraded", "")
    assert [sentence.partition(":")[0] for sentence in told.split("; ") if sentence] == fields
    assert told.count("because too many requests lately did not meet their objectives") == len(fields)
    ask = Ask(text="hello", sampling=AskSampling(max_tokens=9), priority=1)
    if level == 3:
        assert (answer.status, answer.error["param"]) == (429, "priority")
        with pytest.raises(BatonError) as caught:
            await anext(house.service.generate(ask, 10))
        assert told == caught.value.metadata["degraded"]
    else:
        assert answer.status == 200 and answer.json["choices"][0].get("degraded", []) == [each for each in told.split("; ") if each]
        async with aclosing(house.service.generate(ask, 10)) as events:
            assert [*to_response(await anext(events)).accepted.degraded] == [each for each in told.split("; ") if each]
            assert [event async for event in events]
    house.check()


async def test_requests_of_less_priority_are_refused_with_a_time(house: House) -> None:
    house.journal.degradation.level = 2
    refused = await house.post(CHAT, {**HELLO, "priority": 1})
    assert refused.status == 429 and "of priority 1" in refused.json["error"]["message"] and int(refused.headers["retry-after"]) > 0
    assert refused.headers["x-baton-degraded"].startswith("priority: 1 is refused, because ") and refused.error["param"] == "priority"
    served = await house.post(CHAT, {**HELLO, "priority": 0})
    assert served.status == 200 and "priority" not in served.headers["x-baton-degraded"], "which of the level takes nothing of this one"
    house.check()


def test_over_grpc_a_refusal_names_the_measure_and_why() -> None:
    degradation = Degradation(Rules((Measure("priority", 0),)))
    degradation.level = 1
    with pytest.raises(BatonError) as caught:
        degradation.serve(Ask(text="x", priority=3), NOTHING)
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    details = to_status(caught.value).details
    assert details[0].Unpack(info) and details[1].Unpack(retry) and retry.retry_delay.seconds > 0
    assert info.metadata["degraded"].startswith("priority: 3 is refused, because ")


async def test_requests_that_are_refused_or_late_are_what_a_level_is_entered_for(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """And those that are wrong, or that a level refuses, are not."""
    judged: list[tuple[int, int]] = []
    degradation = house.journal.degradation

    def judge(now: float, ended: int, met: int) -> int:
        judged.append((ended, met))
        return 0

    monkeypatch.setattr(degradation, "judge", judge)
    degradation.level = 2
    for body in ({**HELLO, "priority": 1}, {**HELLO, "max_tokens": -1}, HELLO):
        await house.post(CHAT, body)
    house.journal.sample(0, 0, None)
    house.admission.max_queue = 0
    house.admission.enter("all places", weight=1000)
    assert (await house.post(CHAT, HELLO)).status == 429
    house.journal.sample(0, 0, None)
    assert judged == [(1, 1), (2, 1)]
    house.admission.leave("all places")
    house.check()
