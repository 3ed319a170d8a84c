"""The metrics listener of every process: what a scraper reads, and that no client can block it."""

import asyncio
import json
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from email.utils import parsedate_to_datetime
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text
from turn_work import TurnWork

from baton.cluster import metrics_http, page_server
from baton.cluster.config import ClusterConfig, Config, SecurityConfig
from baton.cluster.errors import BatonError, Reason
from baton.cluster.guard import Guard
from baton.cluster.health import HealthServer
from baton.cluster.lifecycle import Stage
from baton.cluster.metrics import Book
from baton.cluster.metrics_http import Exposition, MetricsServer
from baton.cluster.page_server import PageServer


def make_book() -> Book:
    book = Book("router", model='a "quoted" model')
    book.counters("baton_router_requests_total")["ok", "stop"].inc(3)
    book.histogram("baton_router_time_to_first_token_seconds").observe_all([0.004, 0.4])
    book.read("baton_router_requests_in_flight", lambda: 2)
    return book


@asynccontextmanager
async def serving(
    config: Config | None = None, healthy: Callable[[], bool] = lambda: True, exposition: Exposition | None = None
) -> AsyncIterator[MetricsServer]:
    config = config or Config()
    targets = ["127.0.0.1:1", "127.0.0.1:2"]
    server = MetricsServer(config, exposition or Exposition(make_book()), healthy, Guard(config), lambda: targets)
    await server.start(0)
    try:
        yield server
    finally:
        await server.close()


async def say(server: PageServer, text: bytes, tls: ssl.SSLContext | None = None) -> bytes:
    """Returns everything the server sends until it closes the connection."""
    host, _, port = server.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=tls)
    try:
        writer.write(text)
        return await asyncio.wait_for(reader.read(), 30)
    finally:
        writer.close()


async def get(server: PageServer, path: str, *fields: str, method: str = "GET") -> tuple[int, str, str]:
    """(status, content type, body)."""
    request = "\r\n".join((f"{method} {path} HTTP/1.1", "Host: x", *fields, "", ""))
    head, _, body = (await say(server, request.encode())).decode().partition("\r\n\r\n")
    told = dict(line.split(": ", 1) for line in head.split("\r\n")[1:])
    if method == "GET":
        assert int(told["Content-Length"]) == len(body.encode())
    return int(head.split(" ")[1]), told["Content-Type"], body


async def test_prometheus_can_parse_the_text_format() -> None:
    async with serving() as server:
        status, content_type, body = await get(server, "/metrics")
    assert status == 200 and content_type.startswith("text/plain; version=")
    families = {family.name: family for family in read_text(body)}
    ttft = {
        sample.labels.get("le", sample.name[-5:]): sample.value for sample in families["baton_router_time_to_first_token_seconds"].samples
    }
    assert ttft["0.0025"] == 0 and ttft["0.005"] == 1 and ttft["+Inf"] == 2 and ttft["count"] == 2 and ttft["s_sum"] == 0.404
    assert [sample.value for sample in families["baton_router_requests"].samples] == [3]
    running = families["vllm:num_requests_running"].samples[0]
    assert running.value == 2 and running.labels == {"model_name": 'a "quoted" model', "engine": "0"}
    assert families["process_resident_memory_bytes"].samples[0].value > 0
    assert not [name for name in families if name.endswith("_created")]


async def test_a_large_book_is_read_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_http, "SLICE_SERIES", 100)
    work, book = TurnWork(), Book("router")
    names = ("baton_router_worker_usable", "baton_router_worker_credit_tokens", "baton_router_worker_waiting_tokens")
    for name in names:
        book.read(name, work.counted(lambda: {(f"decode-{i}", "decode"): i for i in range(200)}))
    with work.watched():
        _, text = await Exposition(book).page()
    assert work.most == 1 and all(text.count(f"\n{name}{{".encode()) == 200 for name in names)


async def test_openmetrics_is_sent_on_request() -> None:
    async with serving() as server:
        status, content_type, body = await get(server, "/metrics", "Accept: application/openmetrics-text; version=1.0.0, text/plain; q=0.5")
    assert status == 200 and content_type.startswith("application/openmetrics-text")
    families = {family.name: family for family in read_openmetrics(body)}
    assert families["baton_router_requests"].type == "counter"


async def test_health_reports_the_health_of_the_process() -> None:
    async with serving(healthy=lambda: True) as well, serving(healthy=lambda: False) as ill:
        assert (await get(well, "/health"))[0] == 200 and (await get(ill, "/health"))[0] == 503


async def test_targets_have_the_format_of_http_sd() -> None:
    async with serving() as server:
        status, content_type, body = await get(server, "/targets")
    assert (status, content_type) == (200, "application/json")
    assert json.loads(body) == [{"targets": ["127.0.0.1:1", "127.0.0.1:2"]}]


@pytest.mark.parametrize("text", [b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", b"PUT / HTTP/1.1\r\nhost: x\r\n\r\n", b"nonsense\r\n\r\n"])
async def test_every_answer_has_a_date(text: bytes) -> None:
    """RFC 9110, 6.6.1."""
    async with serving() as server:
        before = int(time.time())
        lines = (await say(server, text)).decode().split("\r\n")
        [date] = [line.partition(": ")[2] for line in lines if line.lower().startswith("date: ")]
        assert before <= parsedate_to_datetime(date).timestamp() <= time.time()


async def test_the_response_to_head_has_no_body() -> None:
    async with serving() as server:
        assert (await get(server, "/metrics", method="HEAD"))[2] == ""


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /else HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        (b"GET /metrics HTTP/1.1\r\n\r\n", 400),
        (b"GET /metrics\r\n\r\n", 400),
        (b"\x16\x03\x01 \xff\xfe HTTP/9\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\n" + b"x: " + b"y" * 20_000 + b"\r\n\r\n", 431),
    ],
)
async def test_an_invalid_request_is_refused(request_: bytes, status: int) -> None:
    async with serving() as server:
        assert (await say(server, request_)).startswith(f"HTTP/1.1 {status} ".encode())
        assert (await get(server, "/health"))[0] == 200


async def test_a_client_that_disconnects_during_a_request_leaves_no_connection() -> None:
    async with serving() as server:
        host, _, port = server.address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /metr")
        writer.close()
        await writer.wait_closed()
        assert (await get(server, "/health"))[0] == 200
        while server._writers:
            await asyncio.sleep(0.001)


async def test_a_client_that_does_not_read_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "REQUEST_S", 0.2)

    class Endless(Exposition):
        async def page(self, accept: str = "") -> tuple[str, bytes]:
            return "text/plain", b"x" * (64 << 20)

    async with serving(exposition=Endless(make_book())) as server:
        host, _, port = server.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        while not server._writers:
            await asyncio.sleep(0.001)
        while server._writers:
            await asyncio.sleep(0.01)
        got = 0
        with suppress(ConnectionError):
            while part := await reader.read(1 << 20):
                got += len(part)
        assert got < 64 << 20, "the rest of the answer was kept for a client that does not read"
        assert (await get(server, "/health"))[0] == 200
        writer.close()


async def test_an_incomplete_request_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "REQUEST_S", 0.05)
    async with serving() as server:
        assert await say(server, b"GET /metr") == b""
        assert not server._writers


async def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "MAX_CONNECTIONS", 3)
    async with serving() as server:
        host, _, port = server.address.rpartition(":")
        held = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
        while len(server._writers) < 3:
            await asyncio.sleep(0.001)
        assert (await say(server, b"")).startswith(b"HTTP/1.1 503 ")
        held.pop()[1].close()
        while len(server._writers) > 2:
            await asyncio.sleep(0.001)
        assert (await get(server, "/health"))[0] == 200
        for _, writer in held:
            writer.close()


async def test_closing_disconnects_the_remaining_clients() -> None:
    async with serving() as server:
        host, _, port = server.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        while not server._writers:
            await asyncio.sleep(0.001)
        await server.close()
        with suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(host, int(port))


async def test_the_error_for_a_taken_port_names_it() -> None:
    async with serving() as server:
        port = int(server.address.rpartition(":")[2])
        with pytest.raises(BatonError, match=str(port)):
            await MetricsServer(Config(), Exposition(make_book()), lambda: True, Guard(Config())).start(port)


async def test_a_scrape_updates_the_values_first_and_survives_a_hung_engine() -> None:
    looks: list[int] = []

    async def look() -> None:
        looks.append(len(looks))
        if len(looks) > 1:
            raise BatonError(Reason.INTERNAL, "the engine has not answered for 60 s")

    async with serving(exposition=Exposition(make_book(), look)) as server:
        assert (await get(server, "/metrics"))[0] == 200 and looks == [0]
        assert (await get(server, "/metrics"))[0] == 200 and looks == [0, 1]


# TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An authority, and a key pair that it signed for 127.0.0.1; both sides use this pair."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=authority")
    openssl("req", "-newkey", "rsa:2048", "-nodes", "-keyout", "own.key", "-out", "own.csr", "-subj", "/CN=localhost")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    openssl(
        "x509", "-req", "-in", "own.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-out", "own.pem", "-days", "2", "-extfile", "names"
    )  # fmt: skip
    return {name: str(Path(folder) / name) for name in ("ca.pem", "own.pem", "own.key")}


async def test_mutual_tls_admits_only_clients_with_a_signed_certificate(certificates: dict[str, str]) -> None:
    security = SecurityConfig(tls_cert=certificates["own.pem"], tls_key=certificates["own.key"], tls_ca=certificates["ca.pem"])
    async with serving(Config(cluster=ClusterConfig(), security=security)) as server:
        known = ssl.create_default_context(cafile=certificates["ca.pem"])
        known.load_cert_chain(certificates["own.pem"], certificates["own.key"])
        request = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
        assert (await say(server, request, known)).startswith(b"HTTP/1.1 200 ")
        stranger = ssl.create_default_context(cafile=certificates["ca.pem"])
        for without in (stranger, None):
            with suppress(ssl.SSLError, ConnectionError):
                assert await say(server, request, without) == b""


async def test_health_is_plain_http_even_where_everything_else_is_mutual_tls(certificates: dict[str, str]) -> None:
    security = SecurityConfig(tls_cert=certificates["own.pem"], tls_key=certificates["own.key"], tls_ca=certificates["ca.pem"])
    stage, stalled_s, waits_for = Stage.STARTING, 0.0, "a registry"
    server = HealthServer(Config(security=security), lambda: stage, stalled_s=lambda: stalled_s, waits_for=lambda: waits_for)

    async def statuses() -> list[int]:
        return [(await get(server, path))[0] for path in ("/livez", "/startupz", "/readyz")]

    await server.start(0)
    try:
        assert await statuses() == [200, 503, 503]
        stage = Stage.READY
        assert await statuses() == [200, 200, 503]
        waits_for = ""
        assert await statuses() == [200, 200, 200]
        stalled_s = Config().launcher.hang_s
        assert await statuses() == [503, 200, 200]
        stage = Stage.DRAINING
        assert await statuses() == [503, 200, 503]
        assert (await get(server, "/metrics"))[0] == 404
    finally:
        await server.close()
