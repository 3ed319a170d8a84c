"""Spans by the OpenTelemetry SDK. The only file that imports it, loaded when `telemetry.otlp_endpoint` is set.

The SDK samples, reads `traceparent`, queues ended spans and exports them from a thread of its own. This file adds what it lacks: it counts
the spans that were exported and lost, logs once that the collector is away, and closes within CLOSE_WITHIN_S.
"""

import logging
import threading
from collections.abc import Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace import Span as SdkSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, Status, StatusCode, get_current_span, set_span_in_context
from opentelemetry.trace import Tracer as SdkTracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from baton.cluster import semconv
from baton.cluster.telemetry import NO_SPAN, NOTHING, Kind, Span, Tracer, Value

log = logging.getLogger(__name__)
MAX_QUEUED = 4096  # spans
BATCH = 512
EXPORT_EVERY_S = 0.5
EXPORT_TIMEOUT_S = 2.0  # of one batch, retries included
CLOSE_WITHIN_S = 0.8  # spans that the collector has not taken by then are lost

_KINDS = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}
_NO_PARENT = Context()
_W3C = TraceContextTextMapPropagator()


class RecordedSpan(Span):
    __slots__ = ("_span", "_tracer")

    def __init__(self, tracer: SdkTracer, span: SdkSpan) -> None:
        self._tracer = tracer
        self._span = span

    @property
    def traceparent(self) -> str:
        told: dict[str, str] = {}
        _W3C.inject(told, self._here)
        return told["traceparent"]

    def child(self, name: str, kind: Kind = "internal", attributes: Mapping[str, Value] = NOTHING) -> Span:
        return recorded(self._tracer, name, self._here, kind, attributes)

    def past_child(self, name: str, seconds: float) -> None:
        start = self._span.start_time or 0
        self._tracer.start_span(name, self._here, start_time=start).end(start + int(seconds * 1e9))

    def set(self, attributes: Mapping[str, Value]) -> None:
        self._span.set_attributes(attributes)

    def end(self, error: str = "") -> None:
        if not self._span.is_recording():
            return
        if error:
            self._span.set_attribute(semconv.ERROR_TYPE, error)
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()

    @property
    def _here(self) -> Context:
        return set_span_in_context(self._span, _NO_PARENT)


def recorded(tracer: SdkTracer, name: str, parent: Context, kind: Kind, attributes: Mapping[str, Value] = NOTHING) -> Span:
    """NO_SPAN when the sampler decides against it."""
    span = tracer.start_span(name, parent, _KINDS[kind], attributes)
    return RecordedSpan(tracer, span) if isinstance(span, SdkSpan) else NO_SPAN


class OtelTracer(Tracer):
    def __init__(
        self, exporter: SpanExporter, resource: Mapping[str, str] = {}, sample_ratio: float = 1.0, max_queued: int = MAX_QUEUED
    ) -> None:
        """`resource`: attributes of the process."""
        self._queue = _Queue(_Counting(exporter), max_queued)
        sampler = ParentBased(TraceIdRatioBased(sample_ratio))
        self._provider = TracerProvider(sampler, Resource.create(dict(resource)), shutdown_on_exit=False)
        self._provider.add_span_processor(self._queue)
        self._tracer = self._provider.get_tracer("baton")

    @property
    def exported(self) -> int:
        return self._queue.exporter.exported

    @property
    def dropped(self) -> int:
        return self._queue.refused + self._queue.exporter.lost

    def begin(self, name: str, traceparent: str = "", kind: Kind = "server") -> Span:
        return recorded(self._tracer, name, _read(traceparent), kind)

    def follow(self, name: str, traceparent: str, kind: Kind = "server") -> Span:
        parent = _read(traceparent)
        if not get_current_span(parent).get_span_context().is_valid:
            return NO_SPAN
        return recorded(self._tracer, name, parent, kind)

    def close(self) -> None:
        if self._queue.closed:
            return
        self._queue.closed = True
        flushing = threading.Thread(target=self._provider.shutdown, name="flush spans", daemon=True)  # waits 30 s for an export that hangs
        flushing.start()
        flushing.join(CLOSE_WITHIN_S / 2)
        # Ends the export in flight. In a thread of its own, because closing a channel may wait for the call.
        threading.Thread(target=self._queue.exporter.shutdown, name="close spans", daemon=True).start()
        flushing.join(CLOSE_WITHIN_S / 2)
        self._queue.refused += self._queue.waiting


def otlp(endpoint: str) -> SpanExporter:
    return OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)


def _read(traceparent: str) -> Context:
    return _W3C.extract({"traceparent": traceparent}, _NO_PARENT) if traceparent else _NO_PARENT


class _Counting(SpanExporter):
    """Called by the SDK's thread alone. A batch that fails is lost; the log says when failures begin and when they end."""

    def __init__(self, exporter: SpanExporter) -> None:
        self.exported = 0  # spans
        self.lost = 0
        self._exporter = exporter
        self._reached = True

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._exporter.export(spans)
        except Exception as error:  # whatever it is, it must not end the thread
            log.debug("spans were not exported: %r", error)
            result = SpanExportResult.FAILURE
        reached = result is SpanExportResult.SUCCESS
        if reached:
            self.exported += len(spans)
        else:
            self.lost += len(spans)
        if reached != self._reached:
            log.warning("the span collector is %s", "reachable again" if reached else "away; spans are dropped")
        self._reached = reached
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class _Queue(BatchSpanProcessor):
    """Refuses a span when `max_queued` wait. The SDK would drop an older one instead, and count neither."""

    def __init__(self, exporter: _Counting, max_queued: int) -> None:
        super().__init__(exporter, max_queued, EXPORT_EVERY_S * 1000, min(BATCH, max_queued), EXPORT_TIMEOUT_S * 1000)
        self.exporter = exporter
        self.refused = 0  # spans
        self.closed = False
        self._max_queued = max_queued
        self._taken = 0

    @property
    def waiting(self) -> int:
        """Spans in the queue or on their way to the collector."""
        return self._taken - self.exporter.exported - self.exporter.lost

    def on_end(self, span: ReadableSpan) -> None:
        if self.closed or self.waiting >= self._max_queued:
            self.refused += 1
            return
        self._taken += 1
        super().on_end(span)
