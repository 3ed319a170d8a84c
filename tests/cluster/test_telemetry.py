"""Spans: what starts one, what its parent is, and that a slow, unavailable or broken collector costs nothing but spans."""

import asyncio
import builtins
import random
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spans import Box, Sent

from baton.cluster import semconv
from baton.cluster.config import ConfigError, TelemetryConfig
from baton.cluster.errors import BatonError, Reason
from baton.cluster.otel import MAX_TRACESTATE, OtelTracer
from baton.cluster.telemetry import NO_SPAN, Tracer
from baton.cluster.tracing import make_tracer

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GIVEN = f"00-{TRACE}-{PARENT}-01"


@pytest.fixture
def box() -> Iterator[Box]:
    box = Box()
    yield box
    box.gate.set()


SHARED = OtelTracer(Box(), max_queued=1)


def delivered(tracer: Tracer, box: Box) -> dict[str, Sent]:
    tracer.close()
    return {span.name: span for span in box.spans}


class TestTraceparent:
    @pytest.mark.parametrize("text", [GIVEN, f"cc-{TRACE}-{PARENT}-01-what the future brings"])
    def test_a_traceparent_is_read_as_w3c_defines_it(self, box: Box, text: str) -> None:
        tracer = OtelTracer(box)
        tracer.follow("work", text).end()
        span = delivered(tracer, box)["work"]
        assert (span.trace_id, span.parent_id) == (int(TRACE, 16), int(PARENT, 16))

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
            f"{GIVEN}-" + "x" * 1_000_000,
        ],
    )
    def test_an_invalid_traceparent_counts_as_none(self, box: Box, text: str) -> None:
        tracer = OtelTracer(box)
        assert tracer.follow("work", text) is NO_SPAN
        tracer.begin("request", text).end()
        assert delivered(tracer, box)["request"].parent_id == 0

    @given(st.text(max_size=80))
    def test_any_text_is_tolerated_as_traceparent(self, text: str) -> None:
        SHARED.follow("work", text).end()
        SHARED.begin("request", text).end()

    def test_a_span_provides_a_valid_traceparent(self, box: Box) -> None:
        tracer = OtelTracer(box)
        span = tracer.begin("request")
        tracer.follow("work", span.traceparent).end()
        span.end()
        spans = delivered(tracer, box)
        assert spans["work"].parent_id == spans["request"].span_id and spans["work"].trace_id == spans["request"].trace_id
        assert span.traceparent == f"00-{spans['request'].trace_id:032x}-{spans['request'].span_id:016x}-01"


class TestTracestate:
    """W3C Trace Context, section 3.3."""

    @pytest.mark.parametrize(
        ("given", "carried"),
        [
            ("rojo=00f067aa0ba902b7,congo=t61rcWkgMzE", "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"),
            (" a=1 ,, b@c-d/e*f_g=two words, ", "a=1,b@c-d/e*f_g=two words"),
            (",".join(f"k{i}=v" for i in range(32)), ",".join(f"k{i}=v" for i in range(32))),
            ("", ""),
            (",".join(f"k{i}=v" for i in range(33)), ""),
            ("a=1,a=2", ""),
            ("a=1,B=2", ""),
            ("a=1,b", ""),
            ("a=1,b=c=d", ""),
            ("a=1,b=\u00e9", ""),
            ("a=" + "x" * 257, ""),
            ("a=1" + "," * MAX_TRACESTATE, ""),
        ],
    )
    def test_a_valid_one_goes_along_and_an_invalid_one_is_dropped_alone(self, box: Box, given: str, carried: str) -> None:
        router, worker = OtelTracer(box), OtelTracer(box)
        root = router.begin("request", GIVEN, given)
        with root, root.child("call") as call, worker.follow("work", call.traceparent, call.tracestate):
            root.past_child("queue", 0.1)
        router.close()
        spans = delivered(worker, box)
        assert {name: span.tracestate for name, span in spans.items()} == dict.fromkeys(("request", "queue", "call", "work"), carried)
        assert {span.trace_id for span in spans.values()} == {int(TRACE, 16)} and spans["request"].parent_id == int(PARENT, 16)

    def test_without_a_valid_traceparent_it_means_nothing(self, box: Box) -> None:
        tracer = OtelTracer(box)
        for parent in ("", "nonsense"):
            assert tracer.begin("request", parent, "a=1").tracestate == "" and tracer.follow("work", parent, "a=1") is NO_SPAN
        tracer.close()

    @given(st.text(max_size=80))
    def test_any_text_is_tolerated_as_tracestate(self, text: str) -> None:
        assert SHARED.begin("request", GIVEN, text).traceparent.startswith(f"00-{TRACE}-")


class TestSampling:
    def test_a_client_decides_whether_its_trace_is_sampled(self, box: Box) -> None:
        for ratio in (0.0, 1.0):
            tracer = OtelTracer(box, {}, ratio)
            assert tracer.begin("a", GIVEN).traceparent.startswith(f"00-{TRACE}-")
            assert tracer.begin("a", f"00-{TRACE}-{PARENT}-00") is NO_SPAN
            tracer.close()

    def test_the_ratio_decides_for_requests_without_a_traceparent(self, box: Box) -> None:
        random.seed(5)  # the SDK draws trace ids from it
        tracer = OtelTracer(box, {}, 0.25)
        begun = sum(tracer.begin("a", "no traceparent") is not NO_SPAN for _ in range(4000))
        tracer.close()
        assert 850 < begun < 1150
        for ratio, sampled in ((0.0, False), (1.0, True)):
            tracer = OtelTracer(Box(), {}, ratio)
            assert all((tracer.begin("a") is not NO_SPAN) == sampled for _ in range(100))
            tracer.close()

    def test_a_worker_never_starts_a_trace(self, box: Box) -> None:
        tracer = OtelTracer(box)
        assert tracer.follow("work", "") is NO_SPAN and tracer.follow("work", "nonsense") is NO_SPAN
        assert tracer.follow("work", f"00-{TRACE}-{PARENT}-00") is NO_SPAN
        assert tracer.follow("work", GIVEN) is not NO_SPAN
        tracer.close()

    def test_a_disabled_tracer_records_nothing(self) -> None:
        tracer = Tracer()
        assert tracer.begin("a", GIVEN) is NO_SPAN and tracer.follow("a", GIVEN) is NO_SPAN
        assert NO_SPAN.traceparent == "" and NO_SPAN.child("b") is NO_SPAN
        with NO_SPAN as span:
            span.set({"a": 1})
            span.past_child("c", 1.0)
        assert (tracer.exported, tracer.dropped) == (0, 0)
        tracer.close()


class TestSpans:
    def test_spans_of_several_processes_form_one_tree(self, box: Box) -> None:
        router, worker = OtelTracer(box), OtelTracer(box)
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
    def test_a_failed_span_has_the_reason_but_not_the_message(self, box: Box, error: BaseException, told: str) -> None:
        tracer = OtelTracer(box)
        with pytest.raises(type(error)), tracer.begin("a"):
            raise error
        span = delivered(tracer, box)["a"]
        assert span.error == told and span.attributes == {semconv.ERROR_TYPE: told}

    def test_a_span_ends_only_once(self, box: Box) -> None:
        tracer = OtelTracer(box)
        span = tracer.begin("a")
        span.end("LOST")
        span.end()
        tracer.close()
        assert [(s.name, s.error) for s in box.spans] == [("a", "LOST")] and tracer.exported == 1


class TestCollector:
    def test_a_hung_collector_fills_the_queue_and_blocks_no_caller(self, box: Box) -> None:
        tracer = OtelTracer(box, max_queued=10)
        box.gate.clear()
        for _ in range(10):
            tracer.begin("early").end()
        assert box.asked.wait(20)
        for _ in range(25):
            tracer.begin("late").end()
        assert tracer.dropped == 25
        box.gate.set()
        tracer.close()
        assert tracer.exported == 10 == len(box.spans) and tracer.dropped == 25
        assert {span.name for span in box.spans} == {"early"}

    def test_a_hung_collector_does_not_delay_closing(self, box: Box) -> None:
        box.gate.clear()
        tracer = OtelTracer(box)
        tracer.begin("a").end()
        assert box.asked.wait(20)
        tracer.begin("b").end()
        closing = threading.Thread(target=tracer.close)
        closing.start()
        closing.join(20)
        assert not closing.is_alive() and not box.gate.is_set(), "close returned while the collector still hung"
        assert box.shut.wait(20)
        tracer.begin("c").end()
        assert tracer.dropped == 3

    def test_a_collector_that_raises_is_called_again(self) -> None:
        answers = iter([ZeroDivisionError("x"), None])

        def takes() -> bool:
            if error := next(answers, None):
                raise error
            return True

        tracer = OtelTracer(box := Box(takes))
        tracer.begin("lost").end()
        deadline = time.monotonic() + 20
        while not tracer.dropped and time.monotonic() < deadline:
            time.sleep(0.005)
        tracer.begin("kept").end()
        tracer.close()
        assert [span.name for span in box.spans] == ["kept"] and (tracer.exported, tracer.dropped) == (1, 1)

    def test_spans_lost_to_an_unavailable_collector_are_counted(self) -> None:
        box = Box(takes=lambda: False)
        tracer = OtelTracer(box)
        for _ in range(7):
            tracer.begin("a").end()
        tracer.close()
        assert (tracer.exported, tracer.dropped) == (0, 7)

    def test_disabled_tracing_needs_no_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        forbid(monkeypatch)
        assert make_tracer(TelemetryConfig(), "c", "router", "router").begin("a", GIVEN) is NO_SPAN
        assert "baton.cluster.otel" not in sys.modules

    def test_enabling_tracing_without_the_library_is_an_error_that_names_the_key(self, monkeypatch: pytest.MonkeyPatch) -> None:
        forbid(monkeypatch)
        with pytest.raises(ConfigError, match=r"telemetry\.otlp_endpoint.*baton-llm\[otel\]"):
            make_tracer(TelemetryConfig(otlp_endpoint="http://127.0.0.1:4317"), "c", "router", "router")


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes OpenTelemetry look uninstalled."""
    real = builtins.__import__

    def refuse(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.delitem(sys.modules, "baton.cluster.otel")


def test_semantic_convention_names_are_unique() -> None:
    names = [value for name, value in vars(semconv).items() if name.isupper()]
    assert len(set(names)) == len(names)
