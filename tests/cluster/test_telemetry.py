"""Spans: who starts one, who its parent is, and that a collector that is slow, away or broken costs nobody but the spans."""

import asyncio
import builtins
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cluster import semconv, telemetry
from baton.cluster.config import ConfigError, TelemetryConfig
from baton.cluster.errors import BatonError, Reason
from baton.cluster.telemetry import NO_SPAN, Span, Tracer, make_tracer, parse_traceparent

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GIVEN = f"00-{TRACE}-{PARENT}-01"


class Box:
    """A collector that keeps what it gets, and takes it only while `gate` is open."""

    def __init__(self, takes: Callable[[], bool] = lambda: True) -> None:
        self.spans: list[Span] = []
        self.gate = threading.Event()
        self.gate.set()
        self.shut = threading.Event()
        self.asked = threading.Event()
        self._takes = takes

    def export(self, spans: Sequence[Span]) -> bool:
        self.asked.set()
        self.gate.wait()
        if not self._takes():
            return False
        self.spans += spans
        return True

    def shutdown(self) -> None:
        self.shut.set()


@pytest.fixture
def box() -> Iterator[Box]:
    box = Box()
    yield box
    box.gate.set()


def delivered(tracer: Tracer, box: Box) -> dict[str, Span]:
    tracer.close()
    return {span.name: span for span in box.spans}


class TestTraceparent:
    def test_is_read_as_w3c_writes_it(self) -> None:
        assert parse_traceparent(GIVEN) == (int(TRACE, 16), int(PARENT, 16), True)
        assert parse_traceparent(f"00-{TRACE}-{PARENT}-00") == (int(TRACE, 16), int(PARENT, 16), False)
        assert parse_traceparent(f"cc-{TRACE}-{PARENT}-03-what the future brings") == (int(TRACE, 16), int(PARENT, 16), True)

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "00",
            GIVEN.upper(),
            f"ff-{TRACE}-{PARENT}-01",
            f"00-{TRACE}-{PARENT}-01-more",
            f"00-{'0' * 32}-{PARENT}-01",
            f"00-{TRACE}-{'0' * 16}-01",
            f"00-{TRACE[1:]}-{PARENT}-01",
            f" {GIVEN}",
            f"{GIVEN}\n",
        ],
    )
    def test_anything_else_is_none(self, text: str) -> None:
        assert parse_traceparent(text) is None

    @given(st.text(max_size=80))
    def test_any_text_is_survived(self, text: str) -> None:
        parse_traceparent(text)

    @given(st.integers(1, (1 << 128) - 1), st.integers(1, (1 << 64) - 1))
    def test_what_a_span_says_of_itself_is_one(self, trace_id: int, parent_id: int) -> None:
        span = Span(lambda span: None, "x", "internal", trace_id, parent_id, {})
        assert parse_traceparent(span.traceparent) == (trace_id, span.span_id, True)


class TestSampling:
    def test_a_client_decides_about_its_own_trace(self, box: Box) -> None:
        for ratio in (0.0, 1.0):
            tracer = Tracer(box, ratio)
            assert tracer.begin("a", GIVEN).traceparent.startswith(f"00-{TRACE}-")
            assert tracer.begin("a", f"00-{TRACE}-{PARENT}-00") is NO_SPAN
            tracer.close()

    def test_the_ratio_decides_about_the_others(self, box: Box) -> None:
        random.seed(5)
        tracer = Tracer(box, 0.25)
        begun = sum(tracer.begin("a", "no traceparent") is not NO_SPAN for _ in range(4000))
        tracer.close()
        assert 850 < begun < 1150
        for ratio, sampled in ((0.0, False), (1.0, True)):
            tracer = Tracer(Box(), ratio)
            assert all((tracer.begin("a") is not NO_SPAN) == sampled for _ in range(100))
            tracer.close()

    def test_a_worker_begins_nothing_by_itself(self, box: Box) -> None:
        tracer = Tracer(box, 1.0)
        assert tracer.follow("work", "") is NO_SPAN and tracer.follow("work", "nonsense") is NO_SPAN
        assert tracer.follow("work", f"00-{TRACE}-{PARENT}-00") is NO_SPAN
        assert tracer.follow("work", GIVEN).parent_id == int(PARENT, 16)
        tracer.close()

    def test_off_is_off(self) -> None:
        tracer = Tracer()
        assert tracer.begin("a", GIVEN) is NO_SPAN and tracer.follow("a", GIVEN) is NO_SPAN
        assert NO_SPAN.traceparent == "" and NO_SPAN.child("b") is NO_SPAN
        with NO_SPAN as span:
            span.set({"a": 1})
            span.past_child("c", 1.0)
        assert not NO_SPAN.attributes and not NO_SPAN.end_ns and (tracer.exported, tracer.dropped) == (0, 0)
        tracer.close()


class TestSpans:
    def test_across_processes_make_one_tree(self, box: Box) -> None:
        router, worker = Tracer(box), Tracer(box)
        root = router.begin("chat tale", GIVEN)
        with root.child("call", "client", {"baton.worker": "w"}) as call, worker.follow("work", call.traceparent) as work:
            work.set({"n": 3})
        root.past_child("queue", 0.25)
        root.end()
        worker.close()
        spans = delivered(router, box)
        assert {span.trace_id for span in spans.values()} == {int(TRACE, 16)}
        parents = {name: span.parent_id for name, span in spans.items()}
        assert parents == {
            "chat tale": int(PARENT, 16),
            "call": spans["chat tale"].span_id,
            "work": spans["call"].span_id,
            "queue": spans["chat tale"].span_id,
        }
        assert len({span.span_id for span in spans.values()}) == 4
        assert spans["queue"].end_ns - spans["queue"].start_ns == 250_000_000 and spans["queue"].start_ns == spans["chat tale"].start_ns
        assert spans["work"].attributes == {"n": 3} and spans["call"].attributes == {"baton.worker": "w"}
        for span in spans.values():
            assert 0 < span.start_ns <= span.end_ns and not span.error

    @pytest.mark.parametrize(
        ("error", "told"),
        [
            (BatonError(Reason.WORKER_LOST, "gone, and who knows what was in the prompt"), "WORKER_LOST"),
            (asyncio.CancelledError(), "CANCELLED"),
            (GeneratorExit(), "CANCELLED"),
            (ZeroDivisionError("x"), "ZeroDivisionError"),
        ],
    )
    def test_say_how_they_failed_and_not_why(self, box: Box, error: BaseException, told: str) -> None:
        tracer = Tracer(box)
        with pytest.raises(type(error)), tracer.begin("a"):
            raise error
        span = delivered(tracer, box)["a"]
        assert span.error == told and span.attributes == {semconv.ERROR_TYPE: told}

    def test_end_once(self, box: Box) -> None:
        tracer = Tracer(box)
        span = tracer.begin("a")
        span.end("LOST")
        span.end()
        tracer.close()
        assert [(s.name, s.error) for s in box.spans] == [("a", "LOST")] and tracer.exported == 1


class TestCollector:
    def test_that_hangs_fills_the_queue_and_nobody_waits(self, box: Box) -> None:
        tracer = Tracer(box, max_queued=10)
        box.gate.clear()
        for _ in range(telemetry.BATCH):  # wakes the thread, which then hangs
            tracer._queue.append(tracer.begin("early"))
        tracer._wake.set()
        assert box.asked.wait(20)
        while tracer._queue:
            time.sleep(0.001)
        for _ in range(25):
            tracer.begin("late").end()
        assert len(tracer._queue) == 10 and tracer.dropped == 15
        box.gate.set()
        tracer.close()
        assert tracer.exported == telemetry.BATCH + 10 and tracer.dropped == 15

    def test_that_hangs_does_not_hold_up_the_end(self, box: Box) -> None:
        box.gate.clear()
        tracer = Tracer(box)
        tracer.begin("a").end()
        assert box.asked.wait(20)
        tracer.begin("b").end()
        closing = threading.Thread(target=tracer.close)
        closing.start()
        closing.join(20)
        assert not closing.is_alive() and not box.gate.is_set(), "the collector still hangs, and we are done"
        assert box.shut.wait(20)
        tracer.begin("c").end()
        assert tracer.dropped == 2

    def test_that_is_away_loses_spans_and_counts_them(self) -> None:
        box = Box(takes=lambda: False)
        tracer = Tracer(box)
        for _ in range(7):
            tracer.begin("a").end()
        tracer.close()
        assert (tracer.exported, tracer.dropped) == (0, 7)

    def test_that_is_off_needs_no_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        forbid(monkeypatch)
        assert make_tracer(TelemetryConfig(), "c", "router", "router").begin("a", GIVEN) is NO_SPAN

    def test_that_is_wanted_without_the_library_is_an_error_that_names_the_key(self, monkeypatch: pytest.MonkeyPatch) -> None:
        forbid(monkeypatch)
        with pytest.raises(ConfigError, match=r"telemetry\.otlp_endpoint.*baton\[otel\]"):
            make_tracer(TelemetryConfig(otlp_endpoint="http://127.0.0.1:4317"), "c", "router", "router")


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenTelemetry is not installed."""
    real = builtins.__import__

    def refuse(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", refuse)


def test_names_stand_once() -> None:
    names = [value for name, value in vars(semconv).items() if name.isupper()]
    assert len(set(names)) == len(names)
