"""Traces. They never contain any part of a prompt, an output or a key; neither do logs (`baton.cluster.logs`).

A span is one phase of a request: it is made when the phase begins, gets a few attributes, and is ended. This file has the interface of
spans that the rest of the code uses, and what they are when tracing is off: one object, `NO_SPAN`, that does nothing. If
`telemetry.otlp_endpoint` is set, `baton.cluster.otel` makes real spans and the OpenTelemetry SDK exports them; otherwise the SDK is not
loaded.

The router decides once whether a request is traced: by the client's `traceparent` (W3C Trace Context), or else by the sample ratio. Every
process after it follows the `traceparent` that its caller sends, and records nothing without one.
"""

import asyncio
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, Self

from baton.cluster.errors import BatonError, Reason

Value = str | int | float | bool | Sequence[str]
Kind = Literal["server", "client", "internal"]
NOTHING: Mapping[str, Value] = MappingProxyType({})


class TraceSpan:
    """One phase of a request. This class records nothing: it is the span of a request that is not traced."""

    __slots__ = ()

    @property
    def traceparent(self) -> str:
        """What is sent to the next process; empty if the request is not traced."""
        return ""

    @property
    def tracestate(self) -> str:
        """What other systems along the trace want to be told, unchanged; it is sent with the `traceparent`."""
        return ""

    def child(self, name: str, kind: Kind = "internal", attributes: Mapping[str, Value] = NOTHING) -> "TraceSpan":
        return self

    def past_child(self, name: str, seconds: float) -> None:
        """Records a phase that began with this one and has already ended."""

    def set(self, attributes: Mapping[str, Value]) -> None: ...

    def end(self, error: str = "") -> None:
        """`error`: a reason from the error table; empty if the phase succeeded. A second call changes nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        """The phase ends with the block, and fails if the block raises."""
        if isinstance(error, BatonError):
            self.end(error.reason.name)
        elif isinstance(error, asyncio.CancelledError | GeneratorExit):
            self.end(Reason.CANCELLED.name)
        else:
            self.end(kind.__name__ if kind else "")


NO_SPAN = TraceSpan()


class Tracer:
    """Makes the spans of one process. This class makes none, because tracing is off."""

    @property
    def exported(self) -> int:
        """Spans that the collector accepted."""
        return 0

    @property
    def dropped(self) -> int:
        """Spans that were lost: the queue was full, or the collector was unreachable."""
        return 0

    def begin(self, name: str, traceparent: str = "", tracestate: str = "", kind: Kind = "server") -> TraceSpan:
        """The span of a client's request; NO_SPAN if the request is not to be traced. An invalid `traceparent` counts as none, and so does
        an invalid `tracestate`, which leaves the `traceparent` as it is."""
        return NO_SPAN

    def follow(self, name: str, traceparent: str, tracestate: str = "", kind: Kind = "server") -> TraceSpan:
        """The span of a call from another of our processes; NO_SPAN if the caller does not trace."""
        return NO_SPAN

    def close(self) -> None:
        """Send what is queued. Blocks for less than a second; spans that end later are dropped."""
