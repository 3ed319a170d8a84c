"""What the router predicts of each request is compared with what comes, and a prediction that is always wrong is told."""

import asyncio
import random
from collections.abc import Callable
from typing import get_args

import pytest

from baton.cluster.config_router import RouterConfig, SloConfig
from baton.cluster.errors import BatonError
from baton.cluster.metric_table import BY_NAME, PREDICTIONS
from baton.cluster.metrics import Book
from baton.cluster.telemetry import Tracer
from baton.engine.core.sampling import SamplingParams
from router.admission import Admission
from router.gate import Gate
from router.journal import Journal, JournalEntry
from router.predictions import FORGOTTEN_S, INTERVAL_S, LAST, LEARNED, LEAST, CheckedPrediction, CostLine, Of, Predictions
from router.request import Request
from router.validate import Ask
from router.view import ClusterView

DRAW = random.Random(0)


def test_the_table_of_metrics_knows_every_prediction() -> None:
    assert get_args(Of) == PREDICTIONS and "of" in BY_NAME["baton_router_prediction_ratio"].labels


def noted(predict: Callable[[], CheckedPrediction], intervals: int, known: Predictions | None = None, start: int = 0) -> Predictions:
    known = known or Predictions()
    for interval in range(start, start + intervals):
        for number in range(20):
            known.note([predict()], (interval + number / 20) * INTERVAL_S)
    return known


@pytest.mark.parametrize(
    ("prediction", "told"),
    [
        (CheckedPrediction("cached", 1600, 0), "prompts find 1% of the cached tokens that are expected"),
        (CheckedPrediction("wait", 0.1, 1.0), "requests wait 9.6 times as long as the gate expects"),
        (CheckedPrediction("wait", 1.0, 0.1), "requests wait 10% of the time that the gate expects"),
        (CheckedPrediction("first token", 0.1, 0.4), "first tokens take 3.9 times as long as is expected"),
    ],
)
def test_one_that_is_always_wrong_is_told_after_a_minute_until_nothing_comes(prediction: CheckedPrediction, told: str) -> None:
    assert noted(lambda: prediction, LEAST - 1).judge(LEAST * INTERVAL_S) == ""
    known = noted(lambda: prediction, LEAST)
    assert told in known.judge(LEAST * INTERVAL_S)
    assert known.judge(LEAST * INTERVAL_S + FORGOTTEN_S) == "" and known.biases(LEAST * INTERVAL_S + FORGOTTEN_S) == {}


def test_many_requests_of_one_moment_are_one_finding() -> None:
    known = Predictions()
    known.note([CheckedPrediction("wait", 0.1, 1.0)] * 1000, 5.0)
    assert known.judge(5.0) == "" and known.biases(5.0) == {}


@pytest.mark.parametrize(
    "predict",
    [
        lambda: CheckedPrediction("cached", 32768, 0 if DRAW.random() < 0.1 else 32768),  # most is delivered
        lambda: CheckedPrediction("first token", 1.0, 2.0 ** DRAW.uniform(-2, 1.5)),
        lambda: CheckedPrediction("wait", 0.0, DRAW.uniform(0, 0.004)),  # a few milliseconds are no error
    ],
)
def test_errors_that_are_not_always_there_are_no_drift(predict: Callable[[], CheckedPrediction]) -> None:
    known = Predictions()
    for interval in range(200):
        noted(predict, 1, known, interval)
        assert known.judge((interval + 1) * INTERVAL_S) == ""


def test_an_alarm_ends_when_predictions_come_true_again_and_does_not_flap() -> None:
    known = noted(lambda: CheckedPrediction("wait", 0.1, 1.0), LAST)
    assert known.judge(LAST * INTERVAL_S)
    told = []
    for interval in range(LAST, 2 * LAST):
        noted(lambda: CheckedPrediction("wait", 1.0, 1.0), 1, known, interval)
        told.append(bool(known.judge((interval + 1) * INTERVAL_S)))
    assert told[0] and not told[-1] and sorted(told, reverse=True) == told
    near = noted(lambda: CheckedPrediction("wait", 1.0, 1.7), LAST)
    assert not near.judge(LAST * INTERVAL_S), "below the limit"
    noted(lambda: CheckedPrediction("wait", 1.0, 2.5), LAST, near, LAST)
    assert near.judge(2 * LAST * INTERVAL_S)
    noted(lambda: CheckedPrediction("wait", 1.0, 1.7), LAST, near, 2 * LAST)
    assert near.judge(3 * LAST * INTERVAL_S), "and not yet again below the other"


def test_a_line_knows_what_any_prompt_costs_besides_its_tokens() -> None:
    """Short and long ones: neither a time for each token nor one for each prompt fits both."""
    line = CostLine()
    for number in range(2 * LEARNED):
        assert (line.expects(100.0) is None) == (number < LEARNED)
        cost = (50.0, 8000.0)[number % 2]
        line.note(cost, 0.02 + 5e-5 * cost, float(number))
    for cost in (0.0, 50.0, 1000.0, 8000.0):
        assert line.expects(cost) == pytest.approx(0.02 + 5e-5 * cost)


def test_a_line_that_knows_one_cost_and_one_that_falls_expect_the_mean() -> None:
    one, falls = CostLine(), CostLine()
    for number in range(LEARNED):
        one.note(100.0, 0.5, float(number))
        falls.note(float(number), 1.0 - number / 100, float(number))
    assert one.expects(100.0) == one.expects(5000.0) == pytest.approx(0.5)
    assert falls.expects(0.0) == falls.expects(1000.0) == pytest.approx(0.965, abs=0.01)


def test_a_change_of_pace_is_told_for_minutes_and_then_the_rule() -> None:
    """Ten prompts a second: a line that counted prompts instead of seconds would take the new pace for the rule at once."""
    line, known, told = CostLine(), Predictions(), []
    for second in range(3 * 3600):
        for part in range(10):
            now = second + part / 10
            took = 0.1 if second < 1000 else 0.4
            if (expected := line.expects(100.0)) is not None:
                known.note([CheckedPrediction("first token", expected, took)], now)
            line.note(100.0, took, now)
        if second % 10 == 9:
            told.append(bool(known.judge(second + 1.0)))
    first, minutes = told.index(True), sum(told) / 6
    assert 100 < first <= 100 + LAST and 3 < minutes < 10 and not told[-1]


class Waiting:
    """A gate with one place, whose clock is set by the test."""

    def __init__(self) -> None:
        self.now = 100.0
        self.admission, view = Admission(1, 50), ClusterView({"toy": "tokenizer"})
        self.door = Gate(self.admission, view.models["toy"], RouterConfig(queue_timeout_s=1000.0), {}, clock=lambda: self.now)
        self.journal = Journal(Book("router"), Tracer(), "toy", SloConfig(), keep=1)
        self.end, self.entries = asyncio.Event(), list[JournalEntry]()
        self.admission.note_served(held_s=0.05, first_s=0.01, tokens=8)

    async def one(self, deadline: float = 1e9, priority: int = 0) -> None:
        with self.journal.open("chat", clock=lambda: self.now) as entry:
            self.entries.append(entry)
            async with self.door.place(entry, Ask(priority=priority), deadline):
                await self.end.wait()

    @property
    def predictions(self) -> list[list[CheckedPrediction]]:
        return [entry.trace.predictions for entry in self.entries]


async def test_the_wait_in_a_burst_is_not_compared() -> None:
    gate = Waiting()
    tasks = [asyncio.create_task(gate.one()) for _ in range(3)]
    await asyncio.sleep(0)
    gate.now += 2.0
    gate.end.set()
    await asyncio.wait(tasks, timeout=10)
    assert gate.predictions == [[], [], []]


async def test_the_wait_in_a_standing_queue_is_compared_also_of_those_that_are_dropped_but_not_of_those_that_leave() -> None:
    gate = Waiting()
    tasks = [asyncio.create_task(gate.one())]
    await asyncio.sleep(0)
    gate.admission._standing_since = gate.now - 1.0
    tasks += [asyncio.create_task(gate.one()), asyncio.create_task(gate.one()), asyncio.create_task(gate.one(gate.now + 0.5))]
    await asyncio.sleep(0)
    tasks[2].cancel()
    gate.now += 0.6
    gate.door._drop_hopeless()
    gate.end.set()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(done[2], asyncio.CancelledError) and isinstance(done[3], BatonError)
    served, second, left, dropped = gate.predictions
    assert served == [] == left and not gate.door._expected
    for [one], ahead in ((second, 0), (dropped, 2)):
        assert one.of == "wait" and one.predicted == pytest.approx(0.05 * (ahead + 1)) and one.came == pytest.approx(0.6)


def test_the_journal_has_errors_as_a_histogram_and_tells_of_each_drift_once(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    book = Book("router", model="toy")
    journal = Journal(book, Tracer(), "toy", SloConfig(), keep=1, wall_clock=lambda: now)

    def end(came_s: float) -> None:
        nonlocal now
        now += INTERVAL_S
        with journal.open("text_completion", clock=lambda: 0.0) as entry:
            entry.trace.predictions = [CheckedPrediction("first token", 0.1, came_s), CheckedPrediction("cached", 512, 512)]
            entry.request = Request("r", [1] * 600, 600, SamplingParams(max_tokens=1), "", 1.0, entry.trace)
            entry.finish = "length"
        journal.sample(0, 0, None)

    for _ in range(LAST):
        end(0.4)
    shown = {(family.name, *series.labels.values()): series for family in book.families() for series in family.series}
    assert shown["baton_router_prediction_bias_ratio", "cached"].value == 1.0
    assert shown["baton_router_prediction_bias_ratio", "first token"].value == pytest.approx(0.405 / 0.105)
    late = shown["baton_router_prediction_ratio", "first token"]
    below, within = (late.buckets[BY_NAME["baton_router_prediction_ratio"].buckets.index(bound)] for bound in (2.0, 4.0))
    assert (below, within) == (0, LAST) and "3.9 times" in journal.alarm
    for _ in range(LAST):
        end(0.1)
    told = [record.getMessage() for record in caplog.records]
    assert journal.alarm == "" and len(told) == 2 and told[1].startswith("no longer: ")
    now += FORGOTTEN_S
    assert not any(family.name == "baton_router_prediction_bias_ratio" and family.series for family in book.families()), "nothing came"
