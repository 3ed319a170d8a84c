"""What observability costs the router: CPU per request and per streamed token, with metrics and traces off and on.

    python benchmarks/observability.py [--json FILE]

Two measurements. First, in one process, without network and workers, the router's own path (service, dispatcher) with and without its
journal: the bare cost of counting, in microseconds. Then real clusters, all up and loaded in turns: the CPU time of the router's process
(user + system, from /proc) without observability, with /metrics scraped every second, and with every request traced to an OTLP receiver.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc
from machine import describe
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from serving import cluster, cpu_s, load, router_pid

from baton.client import AsyncClient
from baton.cluster.config_router import RouterConfig, SloConfig
from baton.cluster.handoff import Handoff
from baton.cluster.metrics import Book
from baton.cluster.otel import OtelTracer
from baton.cluster.records import Load, WorkerRecord
from baton.cluster.telemetry import Tracer
from baton.models.make_small import make_toy
from baton.v1 import worker_pb2, worker_pb2_grpc
from router.admission import Admission
from router.dispatch import Dispatcher
from router.journal import Journal, JournalEntry
from router.request import Request, Token, Trace
from router.service import Draws, GenerateService, ModelText
from router.tokenizer import Tokenizer
from router.validate import Ask, AskSampling
from router.view import ClusterView
from router.workers import Adopted, DecodeEvent, Ended, FirstToken, Source

TOKENS, ROUNDS, REQUESTS = 101, 21, 100  # of the measurement in one process
CLUSTER_ROUNDS, CLUSTER_REQUESTS = 5, 300  # as many as `serving.load` sends


class Answering:
    """Stands in for the workers: hands over and answers immediately, so that only the router's work remains."""

    async def prefill(
        self, worker: WorkerRecord, request: Request, timeout_s: float, source: Source | None = None, uncached_tokens: int = 0
    ) -> AsyncGenerator[FirstToken, None]:
        with request.trace.span.child("baton.prefill", "client", {"baton.worker": worker.name}):
            yield FirstToken(
                Token(7), b"lease" if request.params.max_tokens > 1 else b"", None if request.params.max_tokens > 1 else "length", 0, 0, 1
            )

    async def decode(
        self,
        worker: WorkerRecord,
        request: Request,
        handle: bytes,
        timeout_s: float,
        first: "asyncio.Future[int] | None" = None,
        forks: Sequence[Any] = (),
    ) -> AsyncGenerator[DecodeEvent, None]:
        with request.trace.span.child("baton.decode", "client", {"baton.worker": worker.name}):
            yield Adopted(Handoff(transport="tcp", blocks=4, bytes=4096, digests_checked=4, read_ms=0.1, verify_ms=0.1))
            for _ in range(request.params.max_tokens - 1):
                yield (Token(7),)
            yield Ended("length", 0, 0)

    def release(self, worker: WorkerRecord, handle: bytes, request_id: str) -> None: ...

    async def hint(self, worker: WorkerRecord, keys: Sequence[bytes], within_s: float) -> int:
        raise AssertionError("no worker brings anything here")


class Silent(Journal):
    """Counts nothing and keeps nothing."""

    def close(self, entry: JournalEntry, outcome: str, reason: str) -> None: ...


class Swallow(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def make_service(
    tokenizer: Tokenizer, journal: Callable[..., Journal], tracer: Tracer, workers: type[Answering] = Answering
) -> GenerateService:
    view, config = ClusterView({"toy": tokenizer.fingerprint}), RouterConfig(bypass_tokens=0)
    model = view.models["toy"]
    prefill = WorkerRecord(
        "prefill-0", "prefill", "x:1", 1, "ready", 1, "host", "toy", "model", tokenizer.fingerprint, 16, 4096, 9999, "tcp",
        Load(credit_tokens=99999),
    )  # fmt: skip
    view.update([prefill, replace(prefill, name="decode-0", pool="decode", address="x:2")], 0.0)
    return GenerateService(
        model=model,
        text=ModelText(tokenizer),
        dispatcher=Dispatcher(model, workers(), config),  # type: ignore[arg-type]
        admission=Admission(256, 512),
        config=config,
        journal=journal(Book("router", model="toy"), tracer, "toy", SloConfig(ttft_s=1.0, tpot_s=0.1), 512),
        draws=Draws(lambda: 1, lambda: "r"),
    )


async def burn(service: GenerateService, tokens: int) -> float:
    """CPU seconds of one request."""
    began = time.process_time()
    for i in range(REQUESTS):
        ask = Ask(token_ids=tuple((i * 31 + k) % 256 for k in range(64)), sampling=AskSampling(max_tokens=tokens, ignore_eos=True))
        async for _ in service.generate(ask, 60):
            pass
    return (time.process_time() - began) / REQUESTS


def measure_alone(tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
    """arm → µs per request of one token, µs per further token: medians over rounds in which the arms take turns.

    `more_`: the quartiles of an arm's extra cost over "off" in the same round, as a share of "off". On a busy machine, the rounds differ
    far more than the arms.
    """
    note = Trace.note_token
    arms: dict[str, tuple[GenerateService, Callable[[Trace], None]]] = {
        "off": (make_service(tokenizer, Silent, Tracer()), lambda trace: None),
        "metrics": (make_service(tokenizer, Journal, Tracer()), note),
        "metrics and traces": (make_service(tokenizer, Journal, OtelTracer(Swallow())), note),
    }
    costs: dict[str, dict[str, list[float]]] = {arm: {"request_us": [], "token_us": []} for arm in arms}
    for _ in range(ROUNDS + 1):
        for arm, (service, note_token) in arms.items():
            with patch.object(Trace, "note_token", note_token):
                one, many = (asyncio.run(burn(service, tokens)) for tokens in (1, TOKENS))
            costs[arm]["request_us"].append(one * 1e6)
            costs[arm]["token_us"].append((many - one) / (TOKENS - 1) * 1e6)
    told: dict[str, dict[str, Any]] = {}
    for arm, names in costs.items():
        told[arm] = {name: statistics.median(values[1:]) for name, values in names.items()}
        for name, values in names.items():
            shares = [value / off - 1 for value, off in zip(values[1:], costs["off"][name][1:], strict=True)]
            told[arm][f"more_{name}"] = statistics.quantiles(shares, n=4)
    return told


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans = 0

    def Export(self, request: Any, context: Any) -> Any:
        self.spans += sum(len(scope.spans) for resource in request.resource_spans for scope in resource.scope_spans)
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def receiving(receiver: Receiver) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop(None)


@contextmanager
def scraping(address: str) -> Iterator[list[float]]:
    """Scrapes once a second while the block runs; yields how long each scrape took."""
    over, took = threading.Event(), []

    def run() -> None:
        while not over.wait(1.0):
            began = time.perf_counter()
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
                answer.read()
            took.append(time.perf_counter() - began)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield took
    finally:
        over.set()
        thread.join()


def metrics_address(admin: str) -> str:
    with grpc.insecure_channel(admin) as channel:
        status = worker_pb2_grpc.AdminStub(channel).Status(worker_pb2.StatusRequest(), timeout=5)
    address: str = status.endpoints["metrics"]
    return address


async def cost(endpoints: dict[str, str], offset: int) -> tuple[float, float]:
    """(the router's CPU ms per request of one token, CPU µs per further token)."""
    pid, spent = router_pid(endpoints["admin"]), []
    async with AsyncClient(endpoints["grpc"]) as client:
        for tokens in (1, TOKENS):
            before = cpu_s(pid)
            await load(client, tokens, offset + tokens)
            spent.append((cpu_s(pid) - before) / CLUSTER_REQUESTS)
    return spent[0] * 1e3, (spent[1] - spent[0]) / (TOKENS - 1) * 1e6


def measure_clusters(model: Path) -> dict[str, Any]:
    receiver = Receiver()
    with ExitStack() as stack:
        endpoint = stack.enter_context(receiving(receiver))
        flags = {
            "off": ("--telemetry.metrics", "false"),
            "metrics": (),
            "metrics and traces": ("--telemetry.otlp-endpoint", endpoint),
        }
        small = ("--engine.kv-memory-mib", "64")
        arms = {arm: stack.enter_context(cluster(model, *small, *more)) for arm, more in flags.items()}
        scrapes = [stack.enter_context(scraping(metrics_address(arms[arm]["admin"]))) for arm in arms if arm != "off"]
        rows: dict[str, list[tuple[float, float]]] = {arm: [] for arm in arms}
        for round_ in range(CLUSTER_ROUNDS + 1):
            turn = itertools.islice(itertools.cycle(arms), round_ % len(arms), round_ % len(arms) + len(arms))
            for arm in turn:
                rows[arm].append(asyncio.run(cost(arms[arm], round_ * 7919)))
        told = {
            arm: {
                "request_ms": statistics.median(request for request, _ in values[1:]),
                "token_us": statistics.median(token for _, token in values[1:]),
                "request_ms_range": (min(request for request, _ in values[1:]), max(request for request, _ in values[1:])),
                "token_us_range": (min(token for _, token in values[1:]), max(token for _, token in values[1:])),
            }
            for arm, values in rows.items()
        }
        took = sorted(itertools.chain(*scrapes))
    return {"arms": told, "spans": receiver.spans, "scrapes": len(took), "scrape_ms_median": 1e3 * statistics.median(took)}


def show_alone(arms: dict[str, dict[str, Any]]) -> None:
    print(
        f"\nthe router's path alone; median of {ROUNDS} rounds of {REQUESTS} requests; more than off in the same round: median (quartiles)"
    )
    for arm, told in arms.items():
        cells = []
        for name in ("request_us", "token_us"):
            low, middle, high = told[f"more_{name}"]
            cells.append(f"{told[name]:8.2f} {middle:+5.0%} ({low:+5.0%} … {high:+5.0%})")
        print(f"  {arm:<20} {cells[0]} µs a request  {cells[1]} µs a token")


def show_clusters(told: dict[str, Any]) -> None:
    print(f"\nCPU of a live router, three clusters in turns; median (range) of {CLUSTER_ROUNDS} rounds of {CLUSTER_REQUESTS} requests")
    for arm, row in told["arms"].items():
        cells = [f"{row[name]:8.3f} ({' … '.join(f'{end:.3f}' for end in row[f'{name}_range'])})" for name in ("request_ms", "token_us")]
        print(f"  {arm:<20} {cells[0]} ms a request  {cells[1]} µs a token")
    print(f"  {told['spans']} spans received; a scrape takes {told['scrape_ms_median']:.1f} ms (median of {told['scrapes']})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--alone", action="store_true", help="run only the part that needs no cluster")
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": describe()}
    print(results["machine"])
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "toy"
        make_toy(model)
        results["alone"] = measure_alone(Tokenizer.load(model))
        show_alone(results["alone"])
        if not options.alone:
            results["clusters"] = measure_clusters(model)
            show_clusters(results["clusters"])
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
