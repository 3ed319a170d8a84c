"""`/metrics` and `/health` on a port of their own, in every process; the router also serves `/targets`, the list of all processes.

This is the only file that knows Prometheus's format (through prometheus_client). If TLS is configured, it applies here, too; `guard` says
who may read the metrics.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as WireMetric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from baton.cluster.config import Config
from baton.cluster.errors import BatonError
from baton.cluster.guard import Guard
from baton.cluster.metrics import Book, MetricFamily
from baton.cluster.page_server import TEXT, Headers, Page, PageServer

JSON = "application/json"
SLICE_SERIES = 1000  # that are read in one turn of the event loop


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
        families, series = [], 0
        for family in self.book.families():
            families.append(family)
            series += len(family.series)
            if series >= SLICE_SERIES:
                series = 0
                await asyncio.sleep(0)
        snapshot = _Snapshot(families)
        encode, content_type = choose_encoder(accept)
        return content_type, await asyncio.to_thread(encode, snapshot)


class MetricsServer(PageServer):
    def __init__(
        self,
        config: Config,
        exposition: Exposition,
        healthy: Callable[[], bool],
        guard: Guard,
        targets: Callable[[], list[str]] | None = None,
    ) -> None:
        """`targets`: host:port of every process whose /metrics can be scraped, for Prometheus's http_sd_configs."""
        super().__init__(config, config.security)
        self._exposition = exposition
        self._healthy = healthy
        self._guard = guard
        self._targets = targets

    async def answer(self, path: bytes, headers: Headers) -> Page:
        if path != b"/health":
            try:
                self._guard.check(next((value.decode("latin-1") for name, value in headers if name == b"authorization"), None))
            except BatonError as refusal:
                return refusal.reason.value.http, TEXT, f"{refusal.message}\n".encode()
        match path:
            case b"/metrics":
                accept = b",".join(value for name, value in headers if name == b"accept")
                return 200, *await self._exposition.page(accept.decode("latin-1"))
            case b"/health":
                return (200, TEXT, b"ok\n") if self._healthy() else (503, TEXT, b"not ready\n")
            case b"/targets" if self._targets is not None:
                return 200, JSON, json.dumps([{"targets": self._targets()}]).encode()
        return 404, TEXT, b"there are /metrics and /health\n"


class _Snapshot(Collector):
    """Our families in prometheus_client's form, and its own families for the process: CPU, memory, open files."""

    _process = ProcessCollector(registry=None)

    def __init__(self, families: list[MetricFamily]) -> None:
        self._families = families

    def collect(self) -> Iterator[WireMetric]:
        yield from map(_to_wire, self._families)
        yield from self._process.collect()


def _to_wire(family: MetricFamily) -> WireMetric:
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
