"""`/metrics` and `/health` on a port of their own, on every process; on the router also `/targets`, the list of all of them.

The only file that knows Prometheus's format, through prometheus_client. HTTP as far as a scraper needs it: GET and HEAD, one request a
connection, everything bounded. Where TLS is configured it holds here too; mutual TLS then keeps strangers out.
"""

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as WireMetric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from baton.cluster.config import Config, SecurityConfig
from baton.cluster.errors import BatonError, Reason
from baton.cluster.metrics import Book, Family
from baton.cluster.rpc import target

MAX_HEAD_BYTES = 8192
MAX_CONNECTIONS = 32
REQUEST_S = 10.0  # from the connection to the last byte of the answer
JSON = "application/json"
TEXT = "text/plain; charset=utf-8"
_STATUS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}

Page = tuple[int, str, bytes]  # status, content type, body


class Exposition:
    """A book as text. `refresh` is awaited first: what a worker knows of its engine is then of this moment."""

    def __init__(self, book: Book, refresh: Callable[[], Awaitable[object]] | None = None) -> None:
        self.book = book
        self._refresh = refresh

    async def page(self, accept: str = "") -> tuple[str, bytes]:
        """(content type, body) in the format that `accept` asks for: Prometheus text, or OpenMetrics."""
        if self._refresh is not None:
            with suppress(BatonError):  # an engine that hangs is what somebody who scrapes wants to see
                await self._refresh()
        snapshot = _Snapshot(self.book.families())
        encode, content_type = choose_encoder(accept)
        return content_type, await asyncio.to_thread(encode, snapshot)


class MetricsServer:
    def __init__(
        self,
        config: Config,
        exposition: Exposition,
        healthy: Callable[[], bool],
        targets: Callable[[], list[str]] | None = None,
    ) -> None:
        """`targets`: host:port of every process whose /metrics can be scraped, for Prometheus's http_sd_configs."""
        self._host = config.cluster.host
        self._security = config.security
        self._exposition = exposition
        self._healthy = healthy
        self._targets = targets
        self.address = ""  # host:port while it listens
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self, port: int) -> str:
        """Listen on `port` (0: any free one); returns `host:port`. Raises BatonError(INTERNAL) when it is taken."""
        tls = _server_context(self._security) if self._security.tls_cert else None
        try:
            self._server = await asyncio.start_server(self._serve, self._host, port, limit=MAX_HEAD_BYTES, ssl=tls)
        except OSError as error:
            raise BatonError(Reason.INTERNAL, f"telemetry: cannot listen on {target(self._host, port)}: {error.strerror}") from None
        self.address = target(self._host, self._server.sockets[0].getsockname()[1])
        return self.address

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            async with asyncio.timeout(REQUEST_S):
                if len(self._writers) > MAX_CONNECTIONS:
                    _write(writer, (503, TEXT, b"too many connections\n"))
                else:
                    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                    _write(writer, await self._answer(head), with_body=not head.startswith("HEAD "))
                await writer.drain()
        except asyncio.LimitOverrunError:
            _write(writer, (400, TEXT, b"the request is too long\n"))
        except (TimeoutError, asyncio.IncompleteReadError, OSError):
            pass  # whoever asked does not want the answer any more
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, head: str) -> Page:
        line, *fields = head.split("\r\n")
        words = line.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return 400, TEXT, b"this is no HTTP/1 request\n"
        if words[0] not in ("GET", "HEAD"):
            return 405, TEXT, b"GET or HEAD\n"
        match words[1].partition("?")[0]:
            case "/metrics":
                return 200, *await self._exposition.page(_field(fields, "accept"))
            case "/health":
                return (200, TEXT, b"ok\n") if self._healthy() else (503, TEXT, b"not ready\n")
            case "/targets" if self._targets is not None:
                return 200, JSON, json.dumps([{"targets": self._targets()}]).encode()
        return 404, TEXT, b"there are /metrics and /health\n"


def _field(fields: Iterable[str], name: str) -> str:
    """Of a header; of one that comes several times, all of it."""
    pairs = (field.partition(":") for field in fields)
    return ",".join(value.strip() for key, _, value in pairs if key.lower() == name)


def _write(writer: asyncio.StreamWriter, page: Page, with_body: bool = True) -> None:
    status, content_type, body = page
    fields = (f"Content-Type: {content_type}", f"Content-Length: {len(body)}", "Connection: close")
    head = "\r\n".join((f"HTTP/1.1 {status} {_STATUS[status]}", *fields, "", ""))
    writer.write(head.encode() + (body if with_body else b""))


def _server_context(security: SecurityConfig) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=security.tls_ca)
    context.load_cert_chain(str(security.tls_cert), security.tls_key)
    if security.tls_ca:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class _Snapshot(Collector):
    """Families as prometheus_client takes them, and what it knows of the process itself: CPU, memory, open files."""

    _process = ProcessCollector(registry=None)

    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[WireMetric]:
        yield from map(_to_wire, self._families)
        yield from self._process.collect()


def _to_wire(family: Family) -> WireMetric:
    names = list(family.series[0].labels)
    made: Any
    match family.kind:
        case "counter":
            made = CounterMetricFamily(family.name, family.help, labels=names)
        case "gauge":
            made = GaugeMetricFamily(family.name, family.help, labels=names)
        case "histogram":
            made = HistogramMetricFamily(family.name, family.help, labels=names)
    for series in family.series:
        values = list(series.labels.values())
        if family.kind == "histogram":
            bounds = [*map(floatToGoString, family.bounds), "+Inf"]
            made.add_metric(values, list(zip(bounds, series.buckets, strict=True)), series.value)
        else:
            made.add_metric(values, series.value)
    wire: WireMetric = made
    return wire
