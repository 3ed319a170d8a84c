"""What the router predicts of each request is compared with what comes, and a prediction that is always wrong is told."""

import asyncio
import random
from typing import get_args

import pytest

from baton.cluster.config_router import RouterConfig, SloConfig
from baton.cluster.metric_table import BY_NAME, PREDICTIONS
from baton.cluster.metrics import Book
from baton.cluster.telemetry import Tracer
from baton.engine.core.sampling import SamplingParams
from router.admission import Admission
from router.gate import Gate
from router.journal import Journal
from router.predictions import LEAST, NEWEST, CheckedPrediction, Of, Predictions
from router.request import Request
from router.uncached import Uncached
from router.validate import Ask
from router.view import ClusterView


def noted(*predictions: CheckedPrediction, times: int = 1) -> Predictions:
    known = Predictions()
    for _ in range(times):
        known.note(predictions)
    return known


def test_the_table_of_metrics_knows_every_prediction() -> None:
    assert get_args(Of) == PREDICTIONS and "of" in BY_NAME["baton_router_prediction_ratio"].labels


@pytest.mark.parametrize(
    ("prediction", "told"),
    [
        (CheckedPrediction("cached", 1600, 0), "prompts find 1% of the cached tokens that are expected"),
        (CheckedPrediction("wait", 0.1, 1.0), "requests wait 9.6 times as long as the gate expects"),
        (CheckedPrediction("wait", 1.0, 0.1), "requests wait 9.6 times as short as the gate expects"),
        (CheckedPrediction("first token", 0.095, 0.395), "first tokens come 4.0 times as late as is expected"),
    ],
)
def test_one_that_is_always_wrong_is_told_after_some_requests(prediction: CheckedPrediction, told: str) -> None:
    assert noted(prediction, times=LEAST - 1).alarm == ""
    assert told in noted(prediction, times=LEAST).alarm


def test_errors_to_both_sides_and_of_a_few_milliseconds_are_no_drift() -> None:
    draw = random.Random(0)
    either = Predictions()
    for _ in range(2000):
        either.note(
            [CheckedPrediction("first token", 1.0, 2.0 ** draw.uniform(-2, 2)), CheckedPrediction("wait", 0.0, draw.uniform(0, 0.004))]
        )
        assert either.alarm == ""
    assert either.biases["first token"] == pytest.approx(1.0, rel=0.5)


def test_an_alarm_ends_when_predictions_come_true_again() -> None:
    wrong = noted(CheckedPrediction("wait", 0.1, 1.0), times=LEAST)
    told = 0
    while wrong.alarm and told < 10 / NEWEST:
        wrong.note([CheckedPrediction("wait", 1.0, 1.0)])
        told += 1
    assert 8 < told < 10 / NEWEST


async def test_the_wait_for_a_place_is_the_one_that_the_gate_expected_or_another() -> None:
    now = 100.0
    admission, view = Admission(1, 50), ClusterView({"toy": "tokenizer"})
    door = Gate(admission, view.models["toy"], RouterConfig(), {}, clock=lambda: now)
    journal = Journal(Book("router"), Tracer(), "toy", SloConfig(), keep=1)
    admission.note_served(held_s=2.0, first_s=0.5, tokens=8)
    end, entries = asyncio.Event(), []

    async def one() -> None:
        with journal.open("chat", clock=lambda: now) as entry:
            entries.append(entry)
            async with door.place(entry, Ask(), 1e9):
                await end.wait()

    tasks = [asyncio.create_task(one()) for _ in range(3)]
    await asyncio.sleep(0)
    now += 7.0
    end.set()
    await asyncio.gather(*tasks)
    assert [entry.trace.predictions for entry in entries] == [[], [("wait", 2.0, 7.0)], [("wait", 4.0, 7.0)]]


def test_the_journal_has_errors_as_a_histogram_and_tells_of_a_drift_once(caplog: pytest.LogCaptureFixture) -> None:
    book = Book("router", model="toy")
    journal = Journal(book, Tracer(), "toy", SloConfig(), keep=1, wall_clock=lambda: 0.0)

    def end(delivered: int, came_s: float) -> None:
        with journal.open("text_completion", clock=lambda: 0.0) as entry:
            entry.trace.predictions = [CheckedPrediction("first token", 0.1, came_s)]
            entry.trace.cached_tokens, entry.trace.uncached = delivered, Uncached(reachable=512, promised=512, causes=(("stale", 512),))
            entry.request = Request("r", [1] * 600, 600, SamplingParams(max_tokens=1), "", 1.0, entry.trace)
            entry.finish = "length"
        journal.sample(0, 0, None)

    for _ in range(LEAST):
        end(512, 0.4)
    shown = {(family.name, *series.labels.values()): series for family in book.families() for series in family.series}
    assert shown["baton_router_prediction_bias_ratio", "cached"].value == 1.0
    assert shown["baton_router_prediction_bias_ratio", "first token"].value == pytest.approx(0.405 / 0.105)
    late = shown["baton_router_prediction_ratio", "first token"]
    below, within = (late.buckets[BY_NAME["baton_router_prediction_ratio"].buckets.index(bound)] for bound in (2.0, 4.0))
    assert (below, within) == (0, LEAST)
    assert "3.9 times as late" in journal.alarm
    for _ in range(200):
        end(512, 0.1)
    told = [record.getMessage() for record in caplog.records]
    assert journal.alarm == "" and len(told) == 2 and told[1].startswith("no longer: ")
