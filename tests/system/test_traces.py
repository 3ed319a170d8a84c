"""One request makes one trace across all processes, as a real OTLP receiver sees it. Also covers clusters without a receiver."""

import asyncio
import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import pytest
from live_cluster import Cluster, cluster, toy
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_service
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc

from baton.client import build_request
from baton.cluster import semconv
from baton.launch.ports import Ports
from baton.v1 import generation_pb2, generation_pb2_grpc

pytestmark = pytest.mark.system

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CANARY = "a heron that nobody may hear of"


@dataclass(frozen=True)
class Got:
    """A span as received."""

    name: str
    service: str
    process: str
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    end: int
    kind: int
    error: str
    attributes: dict[str, Any] = field(hash=False)
    tracestate: str


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: list[Got] = []
        self.raw: list[bytes] = []
        self._lock = threading.Lock()

    def Export(self, request: Any, context: Any) -> Any:
        with self._lock:
            self.raw.append(request.SerializeToString())
            for resource in request.resource_spans:
                about = plain(resource.resource.attributes)
                self.spans += [to_got(span, about) for scope in resource.scope_spans for span in scope.spans]
        return trace_service.ExportTraceServiceResponse()

    def of(self, trace_id: str) -> list[Got]:
        with self._lock:
            return [span for span in self.spans if span.trace_id == trace_id]

    def wait(self, trace_id: str, count: int) -> dict[str, Got]:
        """Returns the spans by name. Raises AssertionError unless there are exactly `count`."""
        deadline = time.monotonic() + 30
        while len(self.of(trace_id)) < count and time.monotonic() < deadline:
            time.sleep(0.05)
        found = self.of(trace_id)
        assert len(found) == count, [span.name for span in found]
        return {span.name: span for span in found}


def plain(attributes: Any) -> dict[str, Any]:
    found = {}
    for pair in attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        found[pair.key] = [one.string_value for one in value.values] if kind == "array_value" else value
    return found


def to_got(span: Any, about: dict[str, Any]) -> Got:
    return Got(
        span.name, about[semconv.SERVICE_NAME], about[semconv.SERVICE_INSTANCE], span.trace_id.hex(), span.span_id.hex(),
        span.parent_span_id.hex(), span.start_time_unix_nano, span.end_time_unix_nano, span.kind, span.status.message,
        plain(span.attributes), span.trace_state,
    )  # fmt: skip


@contextmanager
def receiving() -> Iterator[tuple[Receiver, str]]:
    receiver = Receiver()
    server = grpc.server(ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield receiver, f"http://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Receiver]]:
    """A cluster that traces a request only if the client asks for it."""
    model = toy(tmp_path_factory.mktemp("models") / "toy")
    with receiving() as (receiver, endpoint):
        flags = ("--telemetry.otlp-endpoint", endpoint, "--telemetry.trace-sample-ratio", "0")
        with cluster(model, *flags, decode=2) as live:
            yield live, receiver


def generate(live: Cluster, traceparent: str = "", tracestate: tuple[str, ...] = (), **ask: Any) -> list[generation_pb2.GenerateResponse]:
    request = build_request(**{"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, **ask})
    metadata = [("traceparent", traceparent)] if traceparent else []
    metadata += [("tracestate", one) for one in tracestate]
    with grpc.insecure_channel(live.grpc) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        return list(stub.Generate(request, timeout=60, metadata=metadata))


def numbered(number: int) -> tuple[str, str]:
    """Returns a trace id and the traceparent that requests it."""
    trace_id = f"{number:032x}"
    return trace_id, f"00-{trace_id}-{PARENT}-01"


def test_one_trace_spans_router_prefill_and_decode(traced: tuple[Cluster, Receiver]) -> None:
    live, receiver = traced
    generate(live, f"00-{TRACE}-{PARENT}-01", ("rojo=1", "congo=t61"), token_ids=list(range(200)), request_id="followed")
    spans = receiver.wait(TRACE, 8)
    names = {span.span_id: name for name, span in spans.items()}
    parents = {name: names.get(span.parent_id, span.parent_id) for name, span in spans.items()}
    root = "text_completion toy"
    assert parents == {
        root: PARENT,
        semconv.QUEUE: root,
        semconv.PREFILL: root,
        semconv.PREFILL_WORK: semconv.PREFILL,
        semconv.LEASE: semconv.PREFILL_WORK,
        semconv.DECODE: root,
        semconv.DECODE_WORK: semconv.DECODE,
        semconv.TRANSFER: semconv.DECODE_WORK,
    }
    services = {name: span.service.removeprefix("baton-") for name, span in spans.items()}
    assert services == {
        root: "router", semconv.QUEUE: "router", semconv.PREFILL: "router", semconv.DECODE: "router", semconv.PREFILL_WORK: "prefill",
        semconv.LEASE: "prefill", semconv.DECODE_WORK: "decode", semconv.TRANSFER: "decode",
    }  # fmt: skip
    decode = spans[semconv.DECODE_WORK].process
    assert spans[semconv.DECODE].attributes == {semconv.WORKER: decode} and decode.startswith("decode-")
    assert spans[semconv.PREFILL_WORK].process == "prefill-0"
    server, client, internal = 2, 3, 1  # the values of OTLP
    assert [spans[name].kind for name in (root, semconv.PREFILL, semconv.PREFILL_WORK, semconv.QUEUE)] == [server, client, server, internal]
    told = spans[root].attributes
    assert told[semconv.OPERATION_NAME] == "text_completion" and told[semconv.RESPONSE_ID] == "followed"
    assert (told[semconv.USAGE_INPUT_TOKENS], told[semconv.USAGE_OUTPUT_TOKENS]) == (200, 12)
    assert told[semconv.RESPONSE_FINISH_REASONS] == ["length"]
    moved = spans[semconv.TRANSFER].attributes
    assert (moved["baton.transport"], moved["baton.blocks"], moved["baton.digests_checked"]) == ("nixl", 13, 13)
    assert moved["baton.bytes"] == 13 * 2 * 16 * 8 * 8 and moved[semconv.WORKER] == "prefill-0"
    assert {span.tracestate for span in spans.values()} == {"rojo=1,congo=t61"}
    for span in spans.values():
        assert spans[root].start <= span.start <= span.end and not span.error
    for name in (semconv.QUEUE, semconv.PREFILL, semconv.PREFILL_WORK, semconv.TRANSFER):
        assert spans[name].end <= spans[root].end


def test_the_terminal_and_the_collector_show_the_same_trace(traced: tuple[Cluster, Receiver]) -> None:
    live, receiver = traced
    trace_id, traceparent = numbered(77)
    generate(live, traceparent, token_ids=[(i * 3) % 251 for i in range(150)], request_id="drawn")
    receiver.wait(trace_id, 8)
    told = json.loads(live.here("trace", "drawn", "--json", "--name", live.name).stdout)
    assert told["trace_id"] == trace_id and [lap["stage"] for lap in told["laps"]] == ["queue", "prefill", "transfer", "decode"]
    drawn = live.here("trace", "--last", "--name", live.name)
    assert drawn.returncode == 0 and trace_id in drawn.stdout
    listed = json.loads(live.here("trace", "--sort", "total", "--slower-than", "0", "--json", "--name", live.name).stdout)
    assert "drawn" in {one["request_id"] for one in listed}
    assert [one["e2e"] for one in listed] == sorted((one["e2e"] for one in listed), reverse=True)
    assert "drawn" in live.here("trace", "--name", live.name).stdout
    refused = live.here("trace", "--sort", "colour", "--name", live.name)
    assert refused.returncode == 1 and "sort" in refused.stderr and "total" in refused.stderr
    for part in ("drawn", "queue", "prefill-0", "nixl (memory), 10 blocks", "decode-", "output 12"):
        assert part in drawn.stdout, part


def test_a_bypass_has_no_prefill_and_no_transfer(traced: tuple[Cluster, Receiver]) -> None:
    live, receiver = traced
    trace_id, traceparent = numbered(1)
    generate(live, traceparent, prompt="short")
    assert set(receiver.wait(trace_id, 4)) == {"text_completion toy", semconv.QUEUE, semconv.DECODE, semconv.DECODE_WORK}


def test_spans_contain_no_text(traced: tuple[Cluster, Receiver]) -> None:
    live, receiver = traced
    trace_id, traceparent = numbered(2)
    messages = [{"role": "user", "content": f"{CANARY}, {CANARY}, {CANARY}"}]
    generate(live, traceparent, messages=messages, cache_salt="salt of the heron")
    assert set(receiver.wait(trace_id, 8)) >= {"chat toy"}
    everything = b"".join(receiver.raw)
    assert CANARY.encode() not in everything and b"salt of" not in everything and b"chat toy" in everything


def test_at_ratio_zero_only_requests_that_ask_are_traced(traced: tuple[Cluster, Receiver]) -> None:
    live, receiver = traced
    generate(live, token_ids=list(range(100)))
    generate(live, f"00-{TRACE[::-1]}-{PARENT}-00", token_ids=list(range(100)))
    generate(live, "not a traceparent", token_ids=list(range(100)))
    trace_id, traceparent = numbered(3)
    generate(live, traceparent, prompt="x")  # when this has arrived, everything before it has arrived too
    receiver.wait(trace_id, 4)
    asked = {TRACE, *(numbered(n)[0] for n in (1, 2, 3, 77))}
    assert {span.trace_id for span in receiver.spans} <= asked


def test_the_span_of_a_refusal_names_the_reason(traced: tuple[Cluster, Receiver]) -> None:
    live, receiver = traced
    trace_id, traceparent = numbered(4)
    with pytest.raises(grpc.RpcError):
        generate(live, traceparent, prompt="x", max_tokens=0)
    spans = receiver.wait(trace_id, 2)
    assert spans["text_completion toy"].error == "INVALID_FIELD" == spans["text_completion toy"].attributes[semconv.ERROR_TYPE]


async def test_a_retry_has_its_own_span_and_is_drawn(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A decode worker dies in mid-stream: there are two decode calls under one root, and the first carries the error."""
    model = toy(tmp_path_factory.mktemp("models") / "toy", step_delay_ms=20)
    with receiving() as (receiver, endpoint), cluster(model, "--telemetry.otlp-endpoint", endpoint, decode=2) as live:
        async with live.client() as client:
            params: dict[str, Any] = {"max_tokens": 150, "temperature": 0.0, "ignore_eos": True, "timeout_s": 60, "request_id": "survivor"}
            async with client.generate(token_ids=list(range(100)), **params) as stream:
                async for token in stream:
                    if token.index == 5:
                        victim = next(worker["name"] for worker in live.workers("decode") if worker["load"]["running"])
                        await asyncio.to_thread(live.kill, victim)
                assert stream.result.workers["retries"] == 1
        told = json.loads(live.here("trace", "survivor", "--json", "--name", live.name).stdout)
        assert [failure["worker"] for failure in told["failures"]] == [victim] and told["failures"][0]["reason"] == "WORKER_LOST"
        assert {lap["worker"] for lap in told["laps"] if lap["stage"] == "decode"} == {"decode-0", "decode-1"}
        drawn = live.here("trace", "survivor", "--name", live.name).stdout
        assert f"{victim}: WORKER_LOST" in drawn and "1 retry" in drawn
        deadline = time.monotonic() + 30
        while sum(span.name == semconv.DECODE for span in receiver.of(told["trace_id"])) < 2 and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        calls = [span for span in receiver.of(told["trace_id"]) if span.name == semconv.DECODE]
        assert {span.attributes[semconv.WORKER]: span.error for span in calls} == {
            worker: "WORKER_LOST" if worker == victim else "" for worker in ("decode-0", "decode-1")
        }
        assert len({span.parent_id for span in calls}) == 1
        await live.quiet()


async def test_without_a_collector_a_cluster_serves_and_counts_dropped_spans(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = toy(tmp_path_factory.mktemp("models") / "toy")
    with Ports("127.0.0.1") as ports, cluster(model, "--telemetry.otlp-endpoint", f"http://127.0.0.1:{ports.hold()}") as live:
        async with live.client() as client:
            for i in range(20):
                async with client.generate(token_ids=[i] * 100, max_tokens=4, ignore_eos=True, timeout_s=60) as stream:
                    assert len([token async for token in stream]) == 4
        addresses = [live.status()["endpoints"]["metrics"], *(worker["metrics"] for worker in live.workers())]
        for address in addresses:
            live.wait(partial(counter, address, "baton_spans_dropped_total"))
            assert counter(address, "baton_spans_exported_total") == 0
        assert "the span collector is unreachable" in live.log("router-0")
        await live.quiet()


def counter(address: str, name: str) -> float:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0].partition(" ")[0] == name)


def test_without_opentelemetry_an_endpoint_is_an_error(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("shadow")
    (folder / "opentelemetry.py").write_text("raise ImportError('not installed')\n")
    model = toy(tmp_path_factory.mktemp("models") / "toy")
    with pytest.raises(
        AssertionError,
        match=r"telemetry\.otlp_endpoint http.*: the package opentelemetry is not installed here: pip install 'baton-llm\[otel\]'",
    ):
        shadow = {"PYTHONPATH": str(folder)}
        with cluster(model, "--telemetry.otlp-endpoint", "http://127.0.0.1:4317", env=shadow):
            pass
