"""Logs and traces. Nothing of prompts, outputs or keys is ever in either.

A log line is one event on stderr, with the process's name.

A span is a plain object: made when a phase begins, told a few facts, ended. Ended spans wait in a bounded queue; one thread hands them to
OpenTelemetry's OTLP exporter. Whoever serves a request never waits: a span that finds the queue full is counted and gone, and so is a
batch that the collector did not take. Without `telemetry.otlp_endpoint` there is no thread, no OpenTelemetry, and every span is the one
`NO_SPAN`.

Which requests are traced is decided once, at the router: by the `traceparent` of the client (W3C Trace Context), else by the sample
ratio. Everybody after that follows the `traceparent` that the caller sends, and does nothing without one.
"""

import asyncio
import logging
import random
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, Protocol, Self

from baton.cluster import semconv
from baton.cluster.config import ConfigError, TelemetryConfig
from baton.cluster.errors import BatonError, Reason

log = logging.getLogger(__name__)
MAX_QUEUED = 4096  # spans
BATCH = 512
EXPORT_EVERY_S = 0.5
EXPORT_TIMEOUT_S = 2.0  # of one batch, retries included
CLOSE_WITHIN_S = 0.8  # what the collector has not taken by then is lost

Value = str | int | float | bool | Sequence[str]
Kind = Literal["server", "client", "internal"]
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 0x01
_NOTHING: Mapping[str, Value] = MappingProxyType({})


def setup_logging(config: TelemetryConfig, process: str) -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=config.log_level.upper(),
        format=f"%(asctime)s %(levelname).1s {process} %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it logs each failed batch; we log when that begins and ends


class Span:
    """One phase of a traced request. `end` may be called again; the first time counts."""

    __slots__ = ("_send", "attributes", "end_ns", "error", "kind", "name", "parent_id", "span_id", "start_ns", "trace_id")

    def __init__(
        self, send: "Callable[[Span], None]", name: str, kind: Kind, trace_id: int, parent_id: int, attributes: Mapping[str, Value]
    ) -> None:
        """`parent_id` 0: the trace begins here."""
        self._send = send
        self.name = name
        self.kind = kind
        self.trace_id = trace_id
        self.span_id = random.getrandbits(64) or 1
        self.parent_id = parent_id
        self.attributes = dict(attributes)
        self.start_ns = time.time_ns()
        self.end_ns = 0
        self.error = ""

    @property
    def traceparent(self) -> str:
        """For the next process; empty when the request is not traced."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{_SAMPLED:02x}"

    def child(self, name: str, kind: Kind = "internal", attributes: Mapping[str, Value] = _NOTHING) -> "Span":
        return Span(self._send, name, kind, self.trace_id, self.span_id, attributes)

    def past_child(self, name: str, seconds: float) -> None:
        """A phase that began with this one and has ended."""
        span = Span(self._send, name, "internal", self.trace_id, self.span_id, _NOTHING)
        span.start_ns = self.start_ns
        span.end_ns = self.start_ns + int(seconds * 1e9)
        self._send(span)

    def set(self, attributes: Mapping[str, Value]) -> None:
        self.attributes.update(attributes)

    def end(self, error: str = "") -> None:
        """`error`: a reason of the error table; empty when the phase ended well."""
        if self.end_ns:
            return
        self.end_ns = time.time_ns()
        if error:
            self.error = error
            self.attributes[semconv.ERROR_TYPE] = error
        self._send(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        """The phase ends with the block, and badly if the block does."""
        if isinstance(error, BatonError):
            self.end(error.reason.name)
        elif isinstance(error, asyncio.CancelledError | GeneratorExit):
            self.end(Reason.CANCELLED.name)
        else:
            self.end(kind.__name__ if kind else "")


class _NoSpan(Span):
    """Of a request that is not traced."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(lambda span: None, "", "internal", 0, 0, {})

    @property
    def traceparent(self) -> str:
        return ""

    def child(self, name: str, kind: Kind = "internal", attributes: Mapping[str, Value] = _NOTHING) -> Span:
        return self

    def past_child(self, name: str, seconds: float) -> None:
        pass

    def set(self, attributes: Mapping[str, Value]) -> None:
        pass

    def end(self, error: str = "") -> None:
        pass


NO_SPAN: Span = _NoSpan()


class Collector(Protocol):
    """Takes ended spans; called by one thread."""

    def export(self, spans: Sequence[Span]) -> bool:
        """Whether they arrived. Takes EXPORT_TIMEOUT_S at most, and no time after `shutdown`."""

    def shutdown(self) -> None: ...


class Tracer:
    """Of one process. `collector` None: tracing is off."""

    def __init__(self, collector: Collector | None = None, sample_ratio: float = 1.0, max_queued: int = MAX_QUEUED) -> None:
        self.exported = 0  # spans
        self._refused = 0  # by a full or closed queue: counted by whoever serves
        self._lost = 0  # on the way to the collector: counted by the thread
        self._collector = collector
        self._sample_ratio = sample_ratio
        self._max_queued = max_queued
        self._queue: deque[Span] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._reached = True
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        if collector is not None:
            self._thread.start()

    @property
    def dropped(self) -> int:
        return self._refused + self._lost

    def begin(self, name: str, traceparent: str = "", kind: Kind = "server") -> Span:
        """The span of a request that a client sent; NO_SPAN when it is not to be traced. What is no traceparent counts as none."""
        if self._collector is None:
            return NO_SPAN
        given = parse_traceparent(traceparent)
        if given is None:
            trace_id, parent_id, sampled = random.getrandbits(128) or 1, 0, random.random() < self._sample_ratio
        else:
            trace_id, parent_id, sampled = given
        return Span(self._send, name, kind, trace_id, parent_id, {}) if sampled else NO_SPAN

    def follow(self, name: str, traceparent: str, kind: Kind = "server") -> Span:
        """The span of a call from another process of ours; NO_SPAN when that does not trace."""
        given = parse_traceparent(traceparent) if self._collector is not None and traceparent else None
        if given is None or not given[2]:
            return NO_SPAN
        return Span(self._send, name, kind, given[0], given[1], {})

    def close(self) -> None:
        """Blocks, for CLOSE_WITHIN_S at most. Spans that are ended later are dropped."""
        if self._collector is None or self._closing:
            return
        self._closing = True
        self._wake.set()
        self._thread.join(CLOSE_WITHIN_S / 2)
        # A thread of its own: closing a channel may wait for the call in flight.
        threading.Thread(target=self._collector.shutdown, name="close spans", daemon=True).start()
        self._thread.join(CLOSE_WITHIN_S / 2)
        self._refused += len(self._queue)

    def _send(self, span: Span) -> None:
        if self._closing or len(self._queue) >= self._max_queued:
            self._refused += 1
            return
        self._queue.append(span)
        if len(self._queue) >= BATCH:
            self._wake.set()

    def _run(self) -> None:
        assert self._collector is not None
        while True:
            self._wake.wait(EXPORT_EVERY_S)
            self._wake.clear()
            last = self._closing  # read first: what was queued before it was set is still sent
            while self._queue:
                batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
                self._note(self._collector.export(batch), len(batch))
                if last and not self._reached:
                    return
            if last:
                return

    def _note(self, reached: bool, spans: int) -> None:
        if reached:
            self.exported += spans
        else:
            self._lost += spans
        if reached != self._reached:
            log.warning("the span collector is %s", "reachable again" if reached else "away; spans are dropped")
        self._reached = reached


def make_tracer(config: TelemetryConfig, cluster: str, role: str, process: str) -> Tracer:
    """Raises ConfigError when an endpoint is set and OpenTelemetry is not installed."""
    if config.otlp_endpoint is None:
        return Tracer()
    resource = {
        semconv.SERVICE_NAME: f"baton-{role}",
        semconv.SERVICE_NAMESPACE: cluster,
        semconv.SERVICE_INSTANCE: process,
    }
    return Tracer(_otlp(config.otlp_endpoint, resource), config.trace_sample_ratio)


def parse_traceparent(text: str) -> tuple[int, int, bool] | None:
    """(trace id, span id, sampled) of a W3C traceparent; None for anything else."""
    match = _TRACEPARENT.fullmatch(text)
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
        return None
    trace_id, span_id = int(match[2], 16), int(match[3], 16)
    return (trace_id, span_id, bool(int(match[4], 16) & _SAMPLED)) if trace_id and span_id else None


def _otlp(endpoint: str, resource: Mapping[str, str]) -> Collector:
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.trace.export import SpanExportResult
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
    except ImportError as error:
        raise ConfigError(f"telemetry.otlp_endpoint: traces need OpenTelemetry, pip install 'baton[otel]' ({error})") from None

    flags = TraceFlags(_SAMPLED)
    kinds = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}
    about = Resource.create(dict(resource))

    def convert(span: Span) -> Any:
        parent = SpanContext(span.trace_id, span.parent_id, is_remote=True, trace_flags=flags) if span.parent_id else None
        return ReadableSpan(
            name=span.name,
            context=SpanContext(span.trace_id, span.span_id, is_remote=False, trace_flags=flags),
            parent=parent,
            resource=about,
            attributes=span.attributes,
            kind=kinds[span.kind],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
            start_time=span.start_ns,
            end_time=span.end_ns,
        )

    class Otlp:
        def __init__(self) -> None:
            self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)

        def export(self, spans: Sequence[Span]) -> bool:
            try:
                return bool(self._exporter.export([convert(span) for span in spans]) is SpanExportResult.SUCCESS)
            except Exception as error:  # whatever it is, spans are not worth a process
                log.debug("spans were not exported: %r", error)
                return False

        def shutdown(self) -> None:
            self._exporter.shutdown()

    return Otlp()
