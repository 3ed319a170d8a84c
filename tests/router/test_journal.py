"""What became of a request: metrics and record report the times of its stages, and neither contains any of its text."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from spans import Box

from baton.cluster import semconv
from baton.cluster.config_router import SloConfig
from baton.cluster.errors import BatonError, Reason
from baton.cluster.metrics import Book
from baton.cluster.otel import OtelTracer
from baton.cluster.telemetry import Tracer
from baton.engine.core.sampling import SamplingParams
from router.choices import sibling
from router.curves import STEP_S
from router.journal import Journal, JournalEntry
from router.request import Failure, Request, Stopwatch, Timed, Token, Trace
from router.validate import MAX_REQUEST_ID

SECRET = [104, 117, 115, 104]
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Desk:
    """A journal on a clock that tests set."""

    slo: SloConfig = field(default_factory=SloConfig)
    keep: int = 10
    tracer: Tracer = field(default_factory=Tracer)
    wall: float = 5e9

    def __post_init__(self) -> None:
        self.clock = Clock()
        self.book = Book("router", model="tale")
        self.journal = Journal(self.book, self.tracer, "tale", self.slo, self.keep, wall_clock=lambda: self.wall)

    def open(self, name: str = "r", traceparent: str = "") -> JournalEntry:
        return self.journal.open("chat", name, traceparent, clock=self.clock)

    def request(self, entry: JournalEntry, name: str = "r", prompt: int = 4) -> Request:
        params = SamplingParams(max_tokens=8, temperature=0.5, seed=(1 << 64) - 1)
        entry.request = Request(name, (SECRET * prompt)[:prompt], prompt, params, "salt", 2000.0, entry.trace)
        return entry.request

    def serve(self, *steps: "tuple[str, str, float, int]", name: str = "r", traceparent: str = "", finish: str = "length") -> JournalEntry:
        """Each step: stage, worker, seconds, and the number of tokens, which come evenly spaced during the step."""
        with self.open(name, traceparent) as entry:
            request = self.request(entry, name)
            for stage, worker, seconds, tokens in steps:
                entry.trace.watch.enter(stage, worker)  # type: ignore[arg-type]
                for _ in range(tokens):
                    self.clock.now += seconds / tokens
                    request.tokens.append(7)
                    entry.trace.note_token()
                self.clock.now += 0.0 if tokens else seconds
            entry.trace.watch.stop()
            entry.finish = finish  # type: ignore[assignment]
        return entry

    def numbers(self, name: str) -> dict[tuple[str, ...], tuple[Any, int]]:
        """label values → (value or sum, approximately; count of a histogram)."""
        for family in self.book.families():
            if family.name == name:
                return {
                    tuple(series.labels.values()): (pytest.approx(series.value), series.buckets[-1] if series.buckets else 0)
                    for series in family.series
                }
        return {}


HANDOFF = (("queue", "", 0.5, 0), ("prefill", "p0", 1.0, 1), ("transfer", "d0", 0.25, 0), ("decode", "d0", 2.0, 4))


def test_the_times_of_a_request_are_measured() -> None:
    desk = Desk()
    desk.serve(*HANDOFF)
    assert desk.numbers("baton_router_time_to_first_token_seconds") == {(): (1.5, 1)}
    assert desk.numbers("baton_router_inter_token_latency_seconds") == {(): (2.25, 4)}
    assert desk.numbers("baton_router_time_per_output_token_seconds") == {(): (2.25 / 4, 1)}
    assert desk.numbers("baton_router_request_duration_seconds") == {(): (3.75, 1)}
    assert desk.numbers("baton_router_stage_duration_seconds") == {
        ("queue",): (0.5, 1), ("prefill",): (1.0, 1), ("transfer",): (0.25, 1), ("decode",): (2.0, 1),
    }  # fmt: skip
    assert desk.numbers("baton_router_prompt_tokens_total") == {(): (4, 0)}
    assert desk.numbers("baton_router_output_tokens_total") == {(): (5, 0)}
    assert desk.numbers("baton_router_request_output_tokens") == {(): (5, 1)}


def test_the_curves_show_tokens_when_they_come_and_each_of_them_once() -> None:
    desk = Desk(wall=5e9)
    with desk.open() as entry:
        request = desk.request(entry)
        for _ in range(3):
            desk.clock.now += 0.5
            request.tokens.append(7)
            entry.trace.note_token()
        desk.journal.follow(entry)
        desk.journal.follow(entry)
        gaps = "baton_router_inter_token_latency_seconds"
        assert desk.numbers(gaps)[()] == (1.0, 2)  # not at the end: many long outputs may end at once
        desk.wall += STEP_S
        desk.clock.now += 0.5
        request.tokens.append(7)
        entry.trace.note_token()
        entry.finish = "stop"
    desk.wall += STEP_S
    first, second = desk.journal.drawn_since(0)
    assert (first.output_tokens, first.ttft.total(), first.itl.total(), first.outcomes.total()) == (3, 1, 2, 0)
    assert (second.output_tokens, second.ttft.total(), second.itl.total(), second.outcomes) == (1, 0, 1, {"ok": 1})
    assert desk.numbers(gaps)[()] == (1.5, 3)


def test_a_stage_that_did_not_happen_is_not_counted() -> None:
    desk = Desk()
    desk.serve(("prefill", "d0", 1.0, 1), ("decode", "d0", 1.0, 3))
    assert desk.numbers("baton_router_stage_duration_seconds")["transfer",] == (0, 0)


def test_an_output_of_one_token_has_no_gap() -> None:
    desk = Desk(SloConfig(tpot_s=0.001))
    desk.serve(("prefill", "p0", 1.0, 1))
    assert desk.numbers("baton_router_time_per_output_token_seconds") == {(): (0, 0)}
    assert desk.numbers("baton_router_slo_met_total") == {(): (1, 0)}


def test_choices_bypasses_and_retries_are_counted() -> None:
    desk = Desk()
    with desk.open() as entry:
        desk.request(entry)
        entry.trace.choices += [("prefill", "cached prefix"), ("decode", "fits"), ("decode", "fits"), ("decode", "a new one")]
        entry.trace.bypasses += ["short"]
        entry.trace.retry_reasons += ["WORKER_LOST", "WORKER_LOST"]
        entry.finish = "stop"
    assert desk.numbers("baton_router_choices_total") == {
        ("prefill", "cached prefix"): (1, 0), ("decode", "fits"): (2, 0), ("decode", "other"): (1, 0),
    }  # fmt: skip
    assert desk.numbers("baton_router_bypasses_total")["short",] == (1, 0)
    assert desk.numbers("baton_router_retries_total")["WORKER_LOST",] == (2, 0)


def test_continued_streams_are_counted() -> None:
    desk = Desk()
    for resumed in (0, 3, 1):
        with desk.open() as entry:
            desk.request(entry).resumed = resumed
            entry.finish = "stop"
    assert desk.numbers("baton_router_resumed_total") == {(): (2, 0)}


def test_prompt_tokens_of_a_refused_request_are_not_counted() -> None:
    desk = Desk()
    with pytest.raises(BatonError), desk.open() as entry:
        desk.request(entry)
        raise BatonError(Reason.SATURATED, "full")
    assert desk.numbers("baton_router_prompt_tokens_total") == {(): (0, 0)}
    assert desk.numbers("baton_router_requests_total") == {("refused", "SATURATED"): (1, 0)}


def test_saturation_after_the_first_token_is_a_failure() -> None:
    desk = Desk()
    with pytest.raises(BatonError), desk.open() as entry:
        desk.request(entry).tokens.append(1)
        entry.trace.note_token()
        raise BatonError(Reason.SATURATED, "full")
    assert desk.numbers("baton_router_requests_total") == {("failed", "SATURATED"): (1, 0)}
    assert desk.numbers("baton_router_time_to_first_token_seconds") == {(): (0, 1)}
    assert desk.numbers("baton_router_request_duration_seconds") == {(): (0, 0)}


class TestObjectives:
    def test_without_objectives_no_slo_metric_exists(self) -> None:
        desk = Desk()
        desk.serve(*HANDOFF)
        assert not [family.name for family in desk.book.families() if "_slo_" in family.name]

    def test_met_and_missed_objectives_are_counted(self) -> None:
        desk = Desk(SloConfig(ttft_s=1.2, window=3))
        assert desk.numbers("baton_router_slo_attainment_ratio") == {}
        desk.serve(*HANDOFF)
        desk.serve(*HANDOFF[1:])
        assert desk.numbers("baton_router_slo_missed_total")["prefill",] == (1, 0)
        assert desk.numbers("baton_router_slo_met_total") == {(): (1, 0)}
        assert desk.numbers("baton_router_slo_attainment_ratio") == {(): (0.5, 0)}
        assert desk.numbers("baton_router_slo_objective_seconds") == {("ttft",): (1.2, 0)}
        assert [record.slo_missed for record in desk.journal.last(2)] == [None, "prefill"]

    def test_failures_are_misses_but_client_errors_and_cancellations_are_not(self) -> None:
        desk = Desk(SloConfig(ttft_s=10))
        for reason in (Reason.INTERNAL, Reason.SATURATED, Reason.INVALID_FIELD, Reason.UNAUTHENTICATED, Reason.CANCELLED):
            with pytest.raises(BatonError), desk.open():
                raise BatonError(reason, "x")
        with pytest.raises(GeneratorExit), desk.open():
            raise GeneratorExit
        assert desk.numbers("baton_router_slo_missed_total")["error",] == (2, 0)
        assert desk.numbers("baton_router_slo_attainment_ratio") == {(): (0, 0)}

    @pytest.mark.parametrize("how", [GeneratorExit, asyncio.CancelledError])
    @pytest.mark.parametrize(
        "left,outcome", [(1.0, ("cancelled", "CANCELLED")), (0.04, ("failed", "DEADLINE")), (-1.0, ("failed", "DEADLINE"))]
    )
    def test_a_client_that_leaves_at_its_deadline_counts_as_late(
        self, left: float, outcome: tuple[str, str], how: type[BaseException]
    ) -> None:
        """gRPC ends the call on both sides, and the client's side may be first. That must not hide a miss."""
        desk = Desk(SloConfig(ttft_s=10))
        with pytest.raises(how), desk.open() as entry:
            entry.deadline = desk.clock.now + 5
            desk.clock.now = entry.deadline - left
            raise how
        assert desk.numbers("baton_router_requests_total") == {outcome: (1, 0)}
        assert desk.numbers("baton_router_slo_missed_total").get(("error",), (0, 0)) == (int(outcome[0] == "failed"), 0)


class TestRecords:
    def test_records_contain_laps_and_failures(self) -> None:
        desk = Desk()
        with desk.open() as entry:
            request = desk.request(entry)
            watch = entry.trace.watch
            for at, stage, worker in ((0.5, "prefill", "p0"), (1.5, "prefill", "p1"), (2.0, "transfer", ""), (2.0, "transfer", "d1")):
                desk.clock.now = 1000 + at
                watch.enter(stage, worker)  # type: ignore[arg-type]
            entry.trace.failures.append(Failure(1001.5, "p0", "WORKER_LOST"))
            entry.trace.retries = 1
            request.tokens += SECRET
            desk.clock.now = 1003.0
            watch.stop()
            entry.finish = "stop"
        told = desk.journal.last()[0].to_json()
        assert told["laps"] == [
            {"stage": "queue", "worker": "", "start": 0.0, "end": 0.5, "bypass": False},
            {"stage": "prefill", "worker": "p0", "start": 0.5, "end": 1.5, "bypass": False},
            {"stage": "prefill", "worker": "p1", "start": 1.5, "end": 2.0, "bypass": False},
            {"stage": "transfer", "worker": "d1", "start": 2.0, "end": 3.0, "bypass": False},
        ]
        assert told["failures"] == [{"at": 1.5, "worker": "p0", "reason": "WORKER_LOST"}]
        assert (told["e2e"], told["retries"], told["outcome"], told["reason"], told["at"]) == (3.0, 1, "ok", "stop", 5e9)
        assert json.loads(json.dumps(told)) == told
        assert str(SECRET)[1:-1] not in json.dumps(told) and "salt" not in json.dumps(told)

    def test_a_name_finds_its_newest_record(self) -> None:
        desk = Desk(keep=3)
        for name in ("a", "b", "a", "c"):
            desk.serve(*HANDOFF, name=name)
        assert [record.request_id for record in desk.journal.last(9)] == ["c", "a", "b"]
        found = desk.journal.find("a")
        assert found is desk.journal.last(2)[1] and desk.journal.find("d") is None

    def test_no_more_records_are_kept_than_configured(self) -> None:
        desk = Desk(keep=0)
        desk.serve(*HANDOFF)
        assert desk.journal.last(5) == []

    def test_the_record_of_a_refused_request_has_the_name_from_the_client(self) -> None:
        desk = Desk()
        with pytest.raises(BatonError), desk.open("x" * 1000):
            raise BatonError(Reason.INVALID_FIELD, "request_id: too long")
        assert desk.journal.last()[0].request_id == "x" * MAX_REQUEST_ID

    def test_records_keep_no_token_gaps(self) -> None:
        """The record of a long answer does not keep every token's time."""
        desk = Desk()
        entry = desk.serve(*HANDOFF)
        assert len(entry.trace.gaps) == 0 and desk.journal.last()[0].times.tpot_s == pytest.approx(2.25 / 4)


def test_a_traced_request_follows_the_semantic_conventions() -> None:
    box = Box()
    desk = Desk(tracer=OtelTracer(box))
    desk.serve(*HANDOFF, traceparent=TRACEPARENT)
    with pytest.raises(BatonError), desk.open(traceparent=TRACEPARENT):
        raise BatonError(Reason.NO_WORKER, "none")
    desk.tracer.close()
    queue, good, _, bad = box.spans
    assert (good.name, good.kind, good.error) == ("chat tale", "server", "")
    assert good.attributes == {
        semconv.OPERATION_NAME: "chat",
        semconv.PROVIDER_NAME: "baton",
        semconv.REQUEST_MODEL: "tale",
        semconv.RESPONSE_MODEL: "tale",
        semconv.RESPONSE_ID: "r",
        semconv.REQUEST_MAX_TOKENS: 8,
        semconv.REQUEST_TEMPERATURE: 0.5,
        semconv.REQUEST_TOP_P: 1.0,
        semconv.REQUEST_TOP_K: 0,
        semconv.RESPONSE_TIME_TO_FIRST_TOKEN: 1.5,
        semconv.RESPONSE_FINISH_REASONS: ["length"],
        semconv.USAGE_INPUT_TOKENS: 4,
        semconv.USAGE_OUTPUT_TOKENS: 5,
        semconv.USAGE_CACHED_TOKENS: 0,
        semconv.RETRIES: 0,
    }
    assert (queue.name, queue.parent_id, queue.end_ns - queue.start_ns) == (semconv.QUEUE, good.span_id, 500_000_000)
    assert bad.error == "NO_WORKER" and bad.attributes[semconv.ERROR_TYPE] == "NO_WORKER" and bad.span_id != good.span_id
    assert {record.trace_id for record in desk.journal.last(2)} == {TRACEPARENT[3:35]}


def test_a_deadline_names_the_stage_that_spent_it() -> None:
    now = 100.0
    error = BatonError(Reason.DEADLINE, "the deadline of the request is over", metadata={"tokens_emitted": "3"})
    journal = Journal(Book("router", model="toy"), Tracer(), "toy", SloConfig(), keep=1)
    with pytest.raises(BatonError), journal.open("chat", clock=lambda: now) as entry:
        now += 0.5
        entry.trace.watch.enter("prefill", "prefill-1")
        now += 4.0
        entry.trace.watch.enter("decode", "decode-0")
        entry.trace.retries = 1
        now += 0.25
        raise error
    assert str(error) == (
        "DEADLINE: the deadline of the request is over: it ended in decode at decode-0, after 1 retry"
        " (queue 0.500 s, prefill 4.000 s, decode 0.250 s)"
    )
    spent = {"queue_s": "0.500", "prefill_s": "4.000", "transfer_s": "0.000", "decode_s": "0.250"}
    assert error.metadata == {"tokens_emitted": "3", "stage": "decode", **spent}


async def test_a_deadline_of_several_choices_names_a_stage_once() -> None:
    """A message with a part for each would not fit into the trailers."""
    desk, error = Desk(keep=200), BatonError(Reason.DEADLINE, "over")
    with pytest.raises(BatonError), desk.open() as entry:
        first = desk.request(entry)
        others = [sibling(first, "r", choice) for choice in range(1, 100)]
        with desk.journal.shared(entry, "", "", others):
            raise error
    assert str(error).count("it ended in") == 1
    assert [record.reason for record in desk.journal.last(200)] == ["DEADLINE"] * 100


def test_a_deadline_before_dispatch_names_the_step_that_was_reached() -> None:
    desk = Desk()
    error = BatonError(Reason.DEADLINE, "over")
    with pytest.raises(BatonError), desk.open() as entry:
        entry.trace.step = "tokenizing"
        raise error
    assert error.metadata["stage"] == "tokenizing" and "it ended in tokenizing" in str(error)
    other = BatonError(Reason.SATURATED, "full")
    with pytest.raises(BatonError), desk.open():
        raise other
    assert other.metadata == {}


def test_tokens_that_are_told_later_with_their_moments_count_as_if_each_was_told_when_it_came() -> None:
    """Workers in virtual time do that."""
    times, now = [1.0, 1.5, 1.5, 2.25, 4.0], 0.0

    def request() -> Request:
        trace = Trace(Stopwatch(lambda: now))
        return Request("r", [5, 6], 2, SamplingParams(max_tokens=9), "", 60.0, trace)

    one_by_one, together = request(), request()
    tokens = [Token(7 + i) for i in range(5)]
    for now, token in zip(times, tokens, strict=True):  # noqa: B007 - the stopwatch reads it
        one_by_one.grow((token,))
    for part in (slice(0, 1), slice(1, 4), slice(4, 5)):
        timed = Timed(tokens[part])
        timed.times = times[part]
        together.grow(timed)
    assert together.tokens == one_by_one.tokens == [5, 6, 7, 8, 9, 10, 11]
    for name in ("first_at", "last_at", "gaps", "guesses"):
        assert getattr(together.trace, name) == getattr(one_by_one.trace, name)
    assert list(together.trace.gaps) == [0.5, 0.0, 0.75, 1.75]
