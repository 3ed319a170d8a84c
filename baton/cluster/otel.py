"""Traces through the OpenTelemetry SDK, which reads `traceparent` and `tracestate`, samples, queues ended spans and exports them from its
own thread.

This is the only file that imports the SDK, and it is loaded only if `telemetry.otlp_endpoint` is set. It adds what the SDK lacks: it counts
the spans that were exported and lost, logs once that the collector is unreachable, and closes within CLOSE_WITHIN_S.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from baton.cluster import semconv
from baton.cluster.telemetry import NO_SPAN, NOTHING, Kind, Tracer, TraceSpan, Value

log = logging.getLogger(__name__)
MAX_QUEUED = 4096  # spans
BATCH = 512
EXPORT_EVERY_S = 0.5
EXPORT_TIMEOUT_S = 2.0  # of one batch, retries included
MAX_TRACESTATE = 8192  # characters; W3C asks to carry 512
CLOSE_WITHIN_S = 0.8  # spans that the collector has not accepted by then are lost

_KINDS = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}
_NO_PARENT = Context()
_W3C = TraceContextTextMapPropagator()
_IDS = RandomIdGenerator()
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_UNSET = Status(StatusCode.UNSET)


class RecordedSpan(TraceSpan):
    """Our own class, because making, filling and ending an SDK span takes 27 us in the serving thread, and one of these takes 5 us."""

    __slots__ = ("_attributes", "_context", "_ended", "_kind", "_name", "_parent", "_queue", "_start_ns")

    def __init__(
        self, queue: "_Queue", name: str, kind: Kind, trace_id: int, parent: SpanContext | None, attributes: Mapping[str, Value] = NOTHING
    ) -> None:
        self._queue = queue
        self._name = name
        self._kind = kind
        state = parent.trace_state if parent else None
        self._context = SpanContext(trace_id, _IDS.generate_span_id(), is_remote=False, trace_flags=_SAMPLED, trace_state=state)
        self._parent = parent
        self._attributes = dict(attributes)
        self._start_ns = time.time_ns()
        self._ended = False

    @property
    def traceparent(self) -> str:
        return f"00-{self._context.trace_id:032x}-{self._context.span_id:016x}-{_SAMPLED:02x}"

    @property
    def tracestate(self) -> str:
        return self._context.trace_state.to_header()

    def child(self, name: str, kind: Kind = "internal", attributes: Mapping[str, Value] = NOTHING) -> TraceSpan:
        return RecordedSpan(self._queue, name, kind, self._context.trace_id, self._context, attributes)

    def past_child(self, name: str, seconds: float) -> None:
        span = RecordedSpan(self._queue, name, "internal", self._context.trace_id, self._context)
        span._start_ns = self._start_ns
        span._send(self._start_ns + int(seconds * 1e9), _UNSET)

    def set(self, attributes: Mapping[str, Value]) -> None:
        self._attributes.update(attributes)

    def end(self, error: str = "") -> None:
        if self._ended:
            return
        if error:
            self._attributes[semconv.ERROR_TYPE] = error
        self._send(time.time_ns(), Status(StatusCode.ERROR, error) if error else _UNSET)

    def _send(self, end_ns: int, status: Status) -> None:
        self._ended = True
        self._queue.on_end(
            ReadableSpan(
                name=self._name,
                context=self._context,
                parent=self._parent,
                resource=self._queue.resource,
                attributes=self._attributes,
                kind=_KINDS[self._kind],
                status=status,
                start_time=self._start_ns,
                end_time=end_ns,
            )
        )


class OtelTracer(Tracer):
    def __init__(
        self, exporter: SpanExporter, resource: Mapping[str, str] = {}, sample_ratio: float = 1.0, max_queued: int = MAX_QUEUED
    ) -> None:
        """`resource`: attributes of the process."""
        self._queue = _Queue(_Counting(exporter), Resource.create(dict(resource)), max_queued)
        self._sampler = ParentBased(TraceIdRatioBased(sample_ratio))

    @property
    def exported(self) -> int:
        return self._queue.exporter.exported

    @property
    def dropped(self) -> int:
        return self._queue.refused + self._queue.exporter.lost

    def begin(self, name: str, traceparent: str = "", tracestate: str = "", kind: Kind = "server") -> TraceSpan:
        return self._make(name, _read(traceparent, tracestate), kind)

    def follow(self, name: str, traceparent: str, tracestate: str = "", kind: Kind = "server") -> TraceSpan:
        here = _read(traceparent, tracestate)
        return self._make(name, here, kind) if get_current_span(here).get_span_context().is_valid else NO_SPAN

    def close(self) -> None:
        if self._queue.closed:
            return
        self._queue.closed = True
        flushing = threading.Thread(target=self._queue.shutdown, name="flush spans", daemon=True)  # waits 30 s for an export that hangs
        flushing.start()
        flushing.join(CLOSE_WITHIN_S / 2)
        # Ends the export in flight. It runs in its own thread, because closing a channel may wait for the call.
        threading.Thread(target=self._queue.exporter.shutdown, name="close spans", daemon=True).start()
        flushing.join(CLOSE_WITHIN_S / 2)
        self._queue.refused += self._queue.waiting

    def _make(self, name: str, here: Context, kind: Kind) -> TraceSpan:
        given = get_current_span(here).get_span_context()
        parent = given if given.is_valid else None
        trace_id = parent.trace_id if parent else _IDS.generate_trace_id()
        if self._sampler.should_sample(here, trace_id, name).decision is not Decision.RECORD_AND_SAMPLE:
            return NO_SPAN
        return RecordedSpan(self._queue, name, kind, trace_id, parent)


def otlp(endpoint: str) -> SpanExporter:
    return OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)


def _read(traceparent: str, tracestate: str) -> Context:
    """The SDK drops a `tracestate` that W3C's rules do not allow, as a whole."""
    if not traceparent:
        return _NO_PARENT
    carried = {"traceparent": traceparent}
    if tracestate and len(tracestate) <= MAX_TRACESTATE:
        carried["tracestate"] = tracestate
    return _W3C.extract(carried, _NO_PARENT)


class _Counting(SpanExporter):
    """Called only by the SDK's thread. A batch that fails is lost; the log says when failures begin and when they end."""

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
            log.warning("the span collector is %s", "reachable again" if reached else "unreachable; spans are dropped")
        self._reached = reached
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class _Queue(BatchSpanProcessor):
    """Refuses a span when `max_queued` spans are waiting. The SDK would drop an older one instead, and count neither."""

    def __init__(self, exporter: _Counting, resource: Resource, max_queued: int) -> None:
        super().__init__(exporter, max_queued, EXPORT_EVERY_S * 1000, min(BATCH, max_queued), EXPORT_TIMEOUT_S * 1000)
        self.exporter = exporter
        self.resource = resource
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
