"""A span collector in the test's own process, and the spans sent to it."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult


@dataclass(frozen=True)
class Sent:
    """A span as the SDK exports it."""

    name: str
    kind: str
    trace_id: int
    span_id: int
    parent_id: int  # 0: the trace begins here
    start_ns: int
    end_ns: int
    error: str
    attributes: Mapping[str, Any] = field(hash=False)
    tracestate: str = ""


class Box(SpanExporter):
    """Keeps the spans that it receives. Accepts spans only while `gate` is open."""

    def __init__(self, takes: Callable[[], bool] = lambda: True) -> None:
        self.spans: list[Sent] = []
        self.gate = threading.Event()
        self.gate.set()
        self.shut = threading.Event()
        self.asked = threading.Event()
        self._takes = takes

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.asked.set()
        self.gate.wait()
        if not self._takes():
            return SpanExportResult.FAILURE
        self.spans += map(_sent, spans)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.shut.set()


def _sent(span: ReadableSpan) -> Sent:
    here, parent, start, end = span.get_span_context(), span.parent, span.start_time, span.end_time
    assert here is not None and start is not None and end is not None
    return Sent(
        span.name, span.kind.name.lower(), here.trace_id, here.span_id, parent.span_id if parent else 0, start, end,
        span.status.description or "", dict(span.attributes or {}), here.trace_state.to_header(),
    )  # fmt: skip
