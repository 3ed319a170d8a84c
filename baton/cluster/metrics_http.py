"""`/metrics` and `/health` on a port of their own, in every process; the router also serves `/targets`, the list of all processes.

This is the only file that knows Prometheus's format (through prometheus_client) and HTTP/1 (through h11). A connection carries one GET or
HEAD request, which must end within REQUEST_S. If TLS is configured, it applies here too, and mutual TLS keeps strangers out.

We handle the connections ourselves instead of using uvicorn, which takes 50 ms more CPU and 1.5 MiB more memory at the start of every
worker (h11 alone: 11 ms and 0.1 MiB), wakes ten times a second, and has no deadline for a client that sends or reads slowly.
"""

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import h11
from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as WireMetric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from baton.cluster.address import advertised, listener, target
from baton.cluster.config import Config, SecurityConfig
from baton.cluster.errors import BatonError, Reason
from baton.cluster.metrics import Book, Family

MAX_HEAD_BYTES = 8192
MAX_CONNECTIONS = 32
REQUEST_S = 10.0  # from the connection to the last byte of the answer
JSON = "application/json"
TEXT = "text/plain; charset=utf-8"

Page = tuple[int, str, bytes]  # status, content type, body


class Exposition:
    """A book as text. `refresh` is awaited first, so that the numbers of a worker's engine are current."""

    def __init__(self, book: Book, refresh: Callable[[], Awaitable[object]] | None = None) -> None:
        self.book = book
        self._refresh = refresh

    async def page(self, accept: str = "") -> tuple[str, bytes]:
        """(content type, body) in the format that `accept` asks for: Prometheus text, or OpenMetrics."""
        if self._refresh is not None:
            with suppress(BatonError):  # the scrape must succeed even if the engine hangs, to show that it does
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
        self._advertised = advertised(config)
        self._security = config.security
        self._exposition = exposition
        self._healthy = healthy
        self._targets = targets
        self.address = ""  # host:port while it listens
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self, port: int) -> str:
        """Listen on `port` (0: any free one); returns the `host:port` for others. Raises BatonError(INTERNAL) if the port is taken."""
        tls = _server_context(self._security) if self._security.tls_cert else None
        try:
            self._server = await asyncio.start_server(self._serve, sock=listener(self._host, port), ssl=tls)
        except OSError as error:
            raise BatonError(Reason.INTERNAL, f"telemetry: cannot listen on {target(self._host, port)}: {error.strerror}") from None
        self.address = target(self._advertised, self._server.sockets[0].getsockname()[1])
        return self.address

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        try:
            async with asyncio.timeout(REQUEST_S):
                if len(self._writers) > MAX_CONNECTIONS:
                    writer.write(_encode(connection, (503, TEXT, b"too many connections\n")))
                else:
                    request = await _receive(connection, reader)
                    writer.write(_encode(connection, await self._answer(request), with_body=request.method != b"HEAD"))
                await writer.drain()
        except h11.RemoteProtocolError as error:
            writer.write(_encode(connection, (error.error_status_hint, TEXT, f"{error}\n".encode())))
        except (TimeoutError, OSError):
            writer.transport.abort()  # the client is too slow, or gone: closing would wait until it has read the rest
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, request: h11.Request) -> Page:
        if request.method not in (b"GET", b"HEAD"):
            return 405, TEXT, b"GET or HEAD\n"
        match request.target.partition(b"?")[0]:
            case b"/metrics":
                accept = b",".join(value for name, value in request.headers if name == b"accept")
                return 200, *await self._exposition.page(accept.decode("latin-1"))
            case b"/health":
                return (200, TEXT, b"ok\n") if self._healthy() else (503, TEXT, b"not ready\n")
            case b"/targets" if self._targets is not None:
                return 200, JSON, json.dumps([{"targets": self._targets()}]).encode()
        return 404, TEXT, b"there are /metrics and /health\n"


async def _receive(connection: h11.Connection, reader: asyncio.StreamReader) -> h11.Request:
    """Raises h11.RemoteProtocolError for bytes that are not an HTTP/1 request, ConnectionError when the client closes early."""
    while (event := connection.next_event()) is h11.NEED_DATA:
        connection.receive_data(await reader.read(MAX_HEAD_BYTES))
    if isinstance(event, h11.Request):
        return event
    raise ConnectionResetError("the client closed the connection")


def _encode(connection: h11.Connection, page: Page, with_body: bool = True) -> bytes:
    status, content_type, body = page
    headers = [("Content-Type", content_type), ("Content-Length", str(len(body))), ("Connection", "close")]
    response = h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase.encode())
    parts = (response, h11.Data(data=body if with_body else b""), h11.EndOfMessage())
    return b"".join(connection.send(part) or b"" for part in parts)


def _server_context(security: SecurityConfig) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=security.tls_ca)
    context.load_cert_chain(str(security.tls_cert), security.tls_key)
    if security.tls_ca:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class _Snapshot(Collector):
    """Our families in prometheus_client's form, and its own families for the process: CPU, memory, open files."""

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
