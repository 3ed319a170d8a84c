"""Logs and traces. Neither ever holds anything of prompts, outputs or keys.

A log line is one event on stderr and carries the name of the process.

A span is one phase of a request: made when the phase begins, told a few facts, ended. Here stands what the rest of the code sees of spans,
and what they are when tracing is off: one object, `NO_SPAN`, that does nothing. With `telemetry.otlp_endpoint`, `baton.cluster.otel` makes
real ones and the OpenTelemetry SDK exports them; without, the SDK is not loaded.

Whether a request is traced is decided once, at the router: by the `traceparent` of the client (W3C Trace Context), otherwise by the sample
ratio. Every process after that follows the `traceparent` that its caller sends, and records nothing without one.
"""

import asyncio
import logging
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, Self

from baton.cluster.config import TelemetryConfig
from baton.cluster.errors import BatonError, Reason

Value = str | int | float | bool | Sequence[str]
Kind = Literal["server", "client", "internal"]
NOTHING: Mapping[str, Value] = MappingProxyType({})


def setup_logging(config: TelemetryConfig, process: str) -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=config.log_level.upper(),
        format=f"%(asctime)s %(levelname).1s {process} %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it logs each failed batch; we log when failures begin and end


class Span:
    """One phase of a request. This class records nothing: it is the span of a request that is not traced."""

    __slots__ = ()

    @property
    def traceparent(self) -> str:
        """What the next process is told; empty when the request is not traced."""
        return ""

    def child(self, name: str, kind: Kind = "internal", attributes: Mapping[str, Value] = NOTHING) -> "Span":
        return self

    def past_child(self, name: str, seconds: float) -> None:
        """A phase that began with this one and has already ended."""

    def set(self, attributes: Mapping[str, Value]) -> None: ...

    def end(self, error: str = "") -> None:
        """`error`: a reason of the error table; empty when the phase ended well. A second call changes nothing."""

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


NO_SPAN = Span()


class Tracer:
    """Makes the spans of one process. This class makes none: tracing is off."""

    @property
    def exported(self) -> int:
        """Spans that the collector took."""
        return 0

    @property
    def dropped(self) -> int:
        """Spans that were lost: the queue was full, or the collector was away."""
        return 0

    def begin(self, name: str, traceparent: str = "", kind: Kind = "server") -> Span:
        """The span of a client's request; NO_SPAN when the request is not to be traced. An invalid `traceparent` counts as none."""
        return NO_SPAN

    def follow(self, name: str, traceparent: str, kind: Kind = "server") -> Span:
        """The span of a call from another process of ours; NO_SPAN when the caller does not trace."""
        return NO_SPAN

    def close(self) -> None:
        """Send what is queued. Blocks for less than a second; spans that end later are dropped."""
