"""Real connections over loopback: partial requests, clients that stop reading, garbage, and more connections than allowed."""

import asyncio
import json
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import pytest
from http_door import CHAT, HELLO, House, Script, settled, toy_tokenizer
from starlette.responses import Response
from starlette.types import ASGIApp

from baton.cluster.config import ClusterConfig, Config, ConfigError, SecurityConfig
from baton.cluster.config_router import RouterConfig
from baton.cluster.errors import BatonError
from baton.cluster.rpc import Tasks
from router.http.connection import MAX_HEAD_BYTES, PROBE_S
from router.http.server import HttpServer
from router.tokenizer import Tokenizer

LIMITS: dict[str, Any] = {"http_read_timeout_s": 0.2, "http_idle_s": 0.3, "stall_s": 0.3, "http_max_connections": 5}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return toy_tokenizer(tmp_path_factory.mktemp("toy"))


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def response(self) -> tuple[int, dict[str, str], bytes]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        status, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int(await self.reader.readuntil(b"\r\n"), 16):
                body += await self.reader.readexactly(size)
                await self.reader.readexactly(2)
            await self.reader.readexactly(2)
        else:
            body = await self.reader.readexactly(int(headers["content-length"]))
        return int(status.split()[1]), headers, body

    async def error(self) -> tuple[int, str]:
        """Returns status and code of an error object, and checks that the connection is closed after it."""
        status, _, body = await self.response()
        assert await self.closed()
        return status, json.loads(body)["error"]["code"]

    async def closed(self) -> bool:
        try:
            return await self.reader.read(1) == b""
        except ConnectionResetError:
            return True


class Running:
    def __init__(self, house: House, server: HttpServer, address: str, ssl_context: ssl.SSLContext | None) -> None:
        self.house, self.server, self.address, self.ssl = house, server, address, ssl_context

    async def connect(self) -> Client:
        host, port = self.address.rsplit(":", 1)
        return Client(*await asyncio.open_connection(host, port, ssl=self.ssl))

    async def ask_and_stop_reading(self, data: bytes) -> Client:
        """Sends `data` over a connection with small buffers and does not read the answer."""
        host, port = self.address.rsplit(":", 1)
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((host, int(port)))
        client = Client(*await asyncio.open_connection(sock=sock))
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.send(data)
        return client

    @property
    def connections(self) -> int:
        return len(self.server.connections)

    async def freed(self) -> None:
        await settled(lambda: self.connections == 0 and self.server.idle)
        self.house.check()


@asynccontextmanager
async def serving(
    tokenizer: Tokenizer,
    script: Script | None = None,
    security: SecurityConfig | None = None,
    context: ssl.SSLContext | None = None,
    app: ASGIApp | None = None,
    **limits: Any,
) -> AsyncIterator[Running]:
    config = Config(router=RouterConfig(http_port=0, **{**LIMITS, **limits}), security=security or SecurityConfig())
    house = House(tokenizer, script or Script(), config.router)
    failures: list[BaseException] = []
    tasks = Tasks(failures.append)
    made = HttpServer(config, app or house.door)
    address = made.bind(0)
    made.start(tasks)
    try:
        yield Running(house, made, address, context)
    finally:
        await made.stop()
        await tasks.close()
    assert not failures


def request(body: Any = HELLO, path: str = CHAT, *headers: str, method: str = "POST") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {len(data)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + data


STREAM = request({**HELLO, "stream": True})


async def test_one_connection_serves_many_requests(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as running:
        client = await running.connect()
        for data in (request(), STREAM, request(b"{"), request(), request(b"", "/livez", method="GET")):
            client.send(data)
            status, headers, body = await client.response()
            assert status == (400 if data == request(b"{") else 200) and body and headers["x-request-id"]
        assert "server" not in headers
        assert await client.closed(), "an idle connection is closed"
        await running.freed()


async def test_every_final_answer_has_a_date(tokenizer: Tokenizer) -> None:
    """RFC 9110, 6.6.1; also what is refused before the application sees it."""
    async with serving(tokenizer) as running:
        for sent in (b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n", b"nonsense\r\n\r\n"):
            before = int(time.time())
            client = await running.connect()
            client.send(sent)
            _, headers, _ = await client.response()
            assert before <= parsedate_to_datetime(headers["date"]).timestamp() <= time.time()
            assert headers["date"].endswith(" GMT")


async def test_small_writes_do_not_wait_for_each_other(tokenizer: Tokenizer) -> None:
    """Nagle's algorithm is off: with it, the first event of a stream waits 40 ms for the acknowledgment of the headers."""
    async with serving(tokenizer) as running:
        client = await running.connect()
        client.send(request())
        await client.response()
        [connection] = running.server.connections
        made = connection._transport.get_extra_info("socket")
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_pipelined_requests_are_answered_in_order(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as running:
        client = await running.connect()
        client.send(b"".join(request(HELLO, CHAT, f"x-request-id: r{i}") for i in range(3)))
        assert [(await client.response())[1]["x-request-id"] for _ in range(3)] == ["r0", "r1", "r2"]


@pytest.mark.parametrize("sent", [b"", b"POST ", request()[:-200], request().partition(b"\r\n\r\n")[0]])
async def test_headers_that_do_not_arrive_time_out(tokenizer: Tokenizer, sent: bytes) -> None:
    async with serving(tokenizer, http_idle_s=60) as running:
        client = await running.connect()
        client.send(sent)
        assert await client.error() == (408, "request_timeout")
        await running.freed()


async def test_headers_that_do_not_arrive_on_a_used_connection_time_out(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, http_idle_s=60) as running:
        client = await running.connect()
        client.send(request())
        await client.response()
        client.send(b"POST ")
        assert await client.error() == (408, "request_timeout")
        await running.freed()


async def test_headers_that_arrive_too_slowly_time_out(tokenizer: Tokenizer) -> None:
    """The time limit applies to all headers together: another byte does not extend it."""
    async with serving(tokenizer, http_idle_s=60) as running:
        client = await running.connect()
        error = asyncio.create_task(client.error())
        for byte in request(HELLO, CHAT, "x: " + "y" * 10_000):
            client.send(bytes([byte]))
            await asyncio.sleep(0.01)
            if error.done():
                break
        assert await error == (408, "request_timeout")


async def test_a_body_that_does_not_arrive_times_out(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as running:
        client = await running.connect()
        client.send(request()[:-5])
        assert await client.error() == (408, "request_timeout")
        await running.freed()


async def test_a_connection_that_breaks_in_the_middle_of_a_body_is_freed(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, http_read_timeout_s=60) as running:
        client = await running.connect()
        client.send(request()[:-5])
        await settled(lambda: not running.server.idle)
        client.writer.transport.abort()
        await running.freed()
        assert not running.house.script.begun


async def test_a_body_that_is_too_long_is_refused_without_being_read(tokenizer: Tokenizer) -> None:
    """The connection can be used again, because the rest of the body is discarded as it arrives."""
    async with serving(tokenizer, max_message_bytes=100_000) as running:
        client = await running.connect()
        client.send(request(b" " * 300_000))
        status, _, body = await client.response()
        assert (status, json.loads(body)["error"]["code"]) == (413, "request_entity_too_large")
        client.send(request())
        assert (await client.response())[0] == 200


async def test_a_refused_body_that_does_not_end_is_cut_off(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, max_message_bytes=100_000, http_idle_s=60) as running:
        client = await running.connect()
        client.send(request(b" " * 200_000).replace(b"content-length: 200000", b"content-length: 900000000"))
        assert (await client.response())[0] == 413
        client.send(b" " * 1000)
        with pytest.raises(ConnectionError):
            async with asyncio.timeout(30):
                while True:
                    client.send(b" " * 1000)
                    await client.writer.drain()
                    await asyncio.sleep(0.01)
        await running.freed()


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 a TLS hello\r\n\r\n",
        b"hello\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\n\r\n",
        b"GET /" + b"x" * (MAX_HEAD_BYTES + 1),
        b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * (MAX_HEAD_BYTES + 1),
        b"GET / HTTP/1.1\r\nhost: x\r\nx: a\x00b\r\n\r\n",
    ],
    ids=lambda data: repr(data[:30]),
)
async def test_garbage_is_refused_and_the_connection_closed(tokenizer: Tokenizer, garbage: bytes) -> None:
    async with serving(tokenizer) as running:
        client = await running.connect()
        client.send(garbage)
        assert (await client.error())[0] in (400, 501)
        await running.freed()


@pytest.mark.parametrize("empty", [b"\r\n", b"\r\n\r\n", b"\n"])
async def test_empty_lines_before_a_request_are_nothing(tokenizer: Tokenizer, empty: bytes) -> None:
    gate = asyncio.Event()
    async with serving(tokenizer, Script(gate=gate, gate_at=1)) as running:
        client = await running.connect()
        client.send(empty)
        client.send(empty + request())
        await settled(lambda: len(running.house.script.begun) == 1)
        client.send(empty)  # after a body, while the answer is being made
        gate.set()
        assert (await client.response())[0] == 200
        client.send(empty + request())
        assert (await client.response())[0] == 200


async def test_garbage_after_a_request_in_progress_leaks_nothing(tokenizer: Tokenizer) -> None:
    gate = asyncio.Event()
    async with serving(tokenizer, Script(gate=gate, gate_at=1)) as running:
        client = await running.connect()
        client.send(STREAM + b"\x00garbage\r\n\r\n")
        assert b"data: " in await client.reader.readuntil(b"\n\n")
        gate.set()
        await client.reader.read()
        await running.freed()


async def test_a_client_that_disconnects_in_the_middle_of_an_answer_frees_everything(tokenizer: Tokenizer) -> None:
    for ends in ("close", "abort"):
        async with serving(tokenizer, Script(gate=asyncio.Event(), gate_at=1)) as running:
            client = await running.connect()
            client.send(STREAM)
            await client.reader.readuntil(b'"content":"a"')
            getattr(client.writer.transport, ends)()
            await running.freed()
            assert running.house.script.said == 1


async def test_a_client_that_disconnects_before_the_answer_frees_everything(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, Script(gate=asyncio.Event())) as running:
        client = await running.connect()
        client.send(request())
        await settled(lambda: len(running.house.script.begun) == 1)
        client.writer.close()
        await running.freed()


# Clients that do not read


async def test_a_client_that_stops_reading_is_dropped_and_uses_little_memory(tokenizer: Tokenizer) -> None:
    body = {**HELLO, "stream": True, "logprobs": True, "top_logprobs": 20}
    script = Script(b"x" * 4000)
    async with serving(tokenizer, script) as running:
        client = await running.ask_and_stop_reading(request(body))
        await settled(lambda: script.said > 10)
        await running.freed()
        assert script.said < 1000, "tokens wait at the worker, not in the memory of the router"
        assert not client.writer.is_closing(), "the server closed the connection, not the client"


async def test_a_client_that_reads_slowly_gets_everything(tokenizer: Tokenizer) -> None:
    """Negative control: the client takes longer than `stall_s` in total, but never stops reading."""
    async with serving(tokenizer, Script(b"x" * 4000), stall_s=0.5) as running:
        client = await running.connect()
        client.send(request({**HELLO, "stream": True, "logprobs": True, "top_logprobs": 20}))
        got, began = b"", asyncio.get_running_loop().time()
        while b"[DONE]" not in got[-100:]:
            got += await client.reader.read(200_000)
            await asyncio.sleep(0.05)
        assert got.count(b"data: ") == 4003 and asyncio.get_running_loop().time() - began > 0.5


async def test_a_client_that_never_reads_the_end_is_dropped(tokenizer: Tokenizer) -> None:
    """The complete answer is in the send buffer, and closing waits for the client to read it."""
    body = {**HELLO, "logprobs": True, "top_logprobs": 20}
    async with serving(tokenizer, Script(b"x" * 4000)) as running:
        client = await running.ask_and_stop_reading(request(body, CHAT, "connection: close"))
        await settled(lambda: running.house.script.ended == 1)
        await running.freed()
        assert not client.writer.is_closing()


# The edges of HTTP/1.1 (RFC 9112)


async def test_after_a_request_with_two_lengths_the_connection_is_closed(tokenizer: Tokenizer) -> None:
    """Section 6.1: data after such a request may have been smuggled past a proxy, so the connection closes after the answer."""
    body = json.dumps(HELLO).encode()
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    head = request(body).partition(b"\r\n\r\n")[0]
    async with serving(tokenizer) as running:
        client = await running.connect()
        client.send(head + b"\r\ntransfer-encoding: chunked\r\n\r\n" + chunked + request())
        status, headers, _ = await client.response()
        assert (status, headers["connection"]) == (200, "close") and await client.closed()
        await running.freed()
        client = await running.connect()
        client.send(head.replace(b"content-length", b"x-length") + b"\r\ntransfer-encoding: chunked\r\n\r\n" + chunked + request())
        assert [(await client.response())[0] for _ in range(2)] == [200, 200], "with a single length, the connection stays open"


@pytest.mark.parametrize("sent", [b"nonsense\r\n", b"-1\r\n", b"5\r\nhello, too long\r\n", b"1" * 30 + b"\r\n"])
async def test_a_chunk_of_a_bad_size_is_refused(tokenizer: Tokenizer, sent: bytes) -> None:
    head = request().partition(b"\r\n\r\n")[0].replace(b"content-length", b"x-length")
    async with serving(tokenizer) as running:
        client = await running.connect()
        client.send(head + b"\r\ntransfer-encoding: chunked\r\n\r\n" + sent)
        assert await client.error() == (400, "invalid_http")
        await running.freed()
        assert not running.house.script.begun


@pytest.mark.parametrize(
    ("target", "path"), [("http://x/livez?a=b", "/livez"), ("https://other:1/livez", "/livez"), ("HTTP://x/no%20way", "/no way")]
)
async def test_a_target_may_be_a_whole_uri(tokenizer: Tokenizer, target: str, path: str) -> None:
    async with serving(tokenizer) as running:
        client = await running.connect()
        client.send(request(b"", target, method="GET"))
        assert (await client.response())[0] == (200 if path == "/livez" else 404)


async def test_the_authority_of_a_whole_uri_replaces_the_host(tokenizer: Tokenizer) -> None:
    """Section 3.2.2. The live page decides by the host whether to answer."""
    seen: list[tuple[str, list[str]]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope["path"], [value.decode() for name, value in scope["headers"] if name == b"host"]))
        await Response(b"")(scope, receive, send)

    async with serving(tokenizer, app=app) as running:
        client = await running.connect()
        for target in ("/", "http://evil.example", "http://evil.example:80/a?b=http://c/"):
            client.send(request(b"", target, method="GET"))
            await client.response()
    assert seen == [("/", ["x"]), ("/", ["evil.example"]), ("/a", ["evil.example:80"])]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_closes_its_sending_half_gets_its_answer(tokenizer: Tokenizer, stream: bool) -> None:
    """`nc -N` closes its sending half after the request and waits."""
    gate = asyncio.Event()
    async with serving(tokenizer, Script(gate=gate)) as running:
        client = await running.connect()
        client.send(STREAM if stream else request())
        client.writer.write_eof()
        assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        await asyncio.sleep(3 * PROBE_S)
        gate.set()
        status, _, body = await client.response()
        assert status == 200 and (b"[DONE]" if stream else b'"content":"abc"') in body and await client.closed()
        await running.freed()


async def test_half_a_request_followed_by_the_end_of_input_is_refused(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, http_read_timeout_s=60) as running:
        for sent in (request()[:-5], request()[:50]):
            client = await running.connect()
            client.send(sent)
            client.writer.write_eof()
            assert await client.error() == (400, "invalid_http")
        await running.freed()
        assert not running.house.script.begun


async def test_an_application_that_fails_ends_the_connection(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("a bug in the server")

    async with serving(tokenizer, app=app) as running:
        client = await running.connect()
        client.send(request())
        assert await client.closed()
        await running.freed()
    assert "a bug in the server" in caplog.text


# Too many connections


async def test_more_connections_than_allowed_are_refused(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, http_read_timeout_s=60) as running:
        clients = [await running.connect() for _ in range(5)]
        late = await running.connect()
        status, headers, _ = await late.response()
        assert (status, headers["retry-after"]) == (503, "1") and await late.closed()
        clients[0].send(request())
        assert (await clients[0].response())[0] == 200, "open connections are kept"
        clients[1].writer.close()
        await settled(lambda: running.connections < 5)
        again = await running.connect()
        again.send(request())
        assert (await again.response())[0] == 200


async def test_idle_connections_are_closed(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, http_max_connections=300, http_read_timeout_s=3) as running:
        clients = [await running.connect() for _ in range(200)]
        await settled(lambda: running.connections == 200)
        assert [await client.error() for client in clients] == [(408, "request_timeout")] * 200
        await running.freed()


# Start, stop, TLS


async def test_a_port_that_is_in_use_is_an_error(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as running:
        config = Config()
        second = HttpServer(config, running.house.door)
        port = int(running.address.rsplit(":", 1)[1])
        with pytest.raises(BatonError, match=f"cannot listen on 127.0.0.1:{port}"):
            second.bind(port)
        await second.stop()


async def test_a_draining_server_closes_each_connection_after_its_answer(tokenizer: Tokenizer) -> None:
    gate = asyncio.Event()
    async with serving(tokenizer, Script(gate=gate, gate_at=1), http_idle_s=30.0) as running:
        idle, asked, streams = [await running.connect() for _ in range(3)]
        idle.send(request(b"", "/livez", method="GET"))
        assert "connection" not in (await idle.response())[1]
        asked.send(request())
        streams.send(STREAM)
        await settled(lambda: len(running.house.script.begun) == 2)
        running.server.drain()
        assert await idle.closed()
        late = await running.connect()  # refusing it is the application's business
        late.send(request(b"", "/livez", method="GET"))
        gate.set()
        for client in (asked, streams, late):
            status, headers, _ = await client.response()
            assert status == 200 and (client is streams or headers["connection"] == "close") and await client.closed()
        await running.freed()


@pytest.mark.parametrize("gate_at", [0, 1])
async def test_stopping_answers_the_requests_in_progress(tokenizer: Tokenizer, gate_at: int) -> None:
    async with serving(tokenizer, Script(gate=asyncio.Event(), gate_at=gate_at), http_read_timeout_s=60) as running:
        client, idle = await running.connect(), await running.connect()
        client.send(STREAM)
        await settled(lambda: len(running.house.script.begun) == 1 and running.house.script.said == gate_at)
        await asyncio.sleep(0.02)
        stopping = asyncio.create_task(running.server.stop())
        status, _, body = await client.response()
        assert status == (200 if gate_at else 503) and b'"code":"draining"' in body and b"[DONE]" not in body
        assert await client.closed() and await idle.closed()
        await stopping
        running.house.check()
        with pytest.raises(OSError):
            await running.connect()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(cert), "-days", "2"]
    subprocess.run([*command, "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    return str(cert), str(key)


async def test_tls_uses_the_certificates_of_the_configuration(tokenizer: Tokenizer, certificate: tuple[str, str]) -> None:
    cert, key = certificate
    security = SecurityConfig(tls_cert=cert, tls_key=key)
    async with serving(tokenizer, security=security, context=ssl.create_default_context(cafile=cert)) as running:
        client = await running.connect()
        client.send(request())
        assert (await client.response())[0] == 200


async def test_mutual_tls_refuses_clients_without_a_certificate(tokenizer: Tokenizer, certificate: tuple[str, str]) -> None:
    cert, key = certificate
    security = SecurityConfig(tls_cert=cert, tls_key=key, tls_ca=cert)
    trusting = ssl.create_default_context(cafile=cert)
    async with serving(tokenizer, security=security, context=trusting) as running:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            client = await running.connect()
            client.send(request())
            if await client.reader.read(1) == b"":
                raise ConnectionResetError
        trusting.load_cert_chain(cert, key)
        client = await running.connect()
        client.send(request())
        assert (await client.response())[0] == 200


def test_an_unusable_certificate_is_an_error_at_startup(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "x.pem").write_text("not a certificate")
    security = SecurityConfig(tls_cert=str(tmp_path / "x.pem"), tls_key=str(tmp_path / "x.pem"))
    with pytest.raises(ConfigError, match=r"security\.tls_cert: .*x\.pem"):
        HttpServer(Config(security=security), House(tokenizer).door)


@pytest.mark.parametrize(
    ("host", "security", "warned"),
    [
        ("127.0.0.1", {}, False),
        ("localhost", {}, False),
        ("0.0.0.0", {}, True),
        ("0.0.0.0", {"api_keys": "keys"}, False),
    ],
)
def test_a_door_that_is_open_to_the_network_logs_a_warning(
    tokenizer: Tokenizer, host: str, security: dict[str, Any], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config(security=SecurityConfig(**security))
    everywhere = config.model_copy(update={"cluster": ClusterConfig().model_copy(update={"host": host})})
    made = HttpServer(everywhere, House(tokenizer).door)
    made.bind(0)
    made._socket.close()
    assert ("security.api_keys" in caplog.text) == warned
