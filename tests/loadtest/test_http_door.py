"""The HTTP door against servers that answer correctly, refuse, break off, or close idle connections."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from loadtest.access import DoorAccess, Tls
from loadtest.drive import DEADLINE, NO_SERVER, Answer
from loadtest.grpc_door import GrpcDoor
from loadtest.http_door import HttpDoor

HEAD = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(text: str) -> str:
    return f"{len(text.encode()):x}\r\n{text}\r\n"


def event(completion: int, **more: object) -> str:
    usage = {"prompt_tokens": 3, "completion_tokens": completion, "prompt_tokens_details": {"cached_tokens": 2}}
    return chunk(f"data: {json.dumps({'choices': [], 'usage': usage} | more)}\n\n")


WHOLE = HEAD + event(1) + event(2) + event(2) + chunk("data: [DONE]\n\n") + "0\r\n\r\n"


class Server:
    """Answers the n-th request with the n-th text and later requests with the last text; "" closes the connection."""

    def __init__(self, *answers: str) -> None:
        self.answers = answers
        self.requests: list[tuple[str, dict[str, object]]] = []  # head and body
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next(int(line.split(":")[1]) for line in head.splitlines() if line.lower().startswith("content-length"))
                self.requests.append((head, json.loads(await reader.readexactly(length))))
                answer = self.answers[min(len(self.requests), len(self.answers)) - 1]
                if not answer:
                    return
                writer.write(answer.encode())
                await writer.drain()
                if "0\r\n\r\n" not in answer and "content-length" not in answer:
                    if "stall" in answer:
                        await asyncio.sleep(60)
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def door(server: Server, api_key: str | None = None) -> AsyncIterator[HttpDoor]:
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    try:
        async with HttpDoor(f"127.0.0.1:{port}", "salt", api_key) as opened:
            yield opened
    finally:
        listening.close()


async def ask(opened: HttpDoor, on_tokens: Callable[[int], None] = lambda count: None, timeout_s: float = 5.0) -> Answer:
    return await opened.ask([1, 2, 3], 2, timeout_s, on_tokens)


async def test_tokens_are_counted_from_the_usage_the_server_sends() -> None:
    """The last event contains text but no token."""
    server = Server(WHOLE)
    counted: list[int] = []
    async with door(server, "a key") as opened:
        told = await ask(opened, counted.append)
    assert (told.outcome, told.prompt_tokens, told.cached_tokens, counted) == ("ok", 3, 2, [1, 1])
    [(head, body)] = server.requests
    assert "authorization: Bearer a key" in head and "x-request-timeout-ms: 5000" in head and "POST /v1/completions" in head
    assert body["prompt"] == [1, 2, 3] and body["max_tokens"] == 2 and body["ignore_eos"] is True and body["cache_salt"] == "salt"


async def test_connections_are_reused_and_a_closed_one_is_replaced() -> None:
    server = Server(WHOLE, WHOLE, "", WHOLE)
    async with door(server) as opened:
        assert [(await ask(opened)).outcome for _ in range(3)] == ["ok"] * 3
    assert len(server.requests) == 4 and server.connections == 2, "the third request was sent again on a new connection"


async def test_concurrent_requests_use_separate_connections() -> None:
    server = Server(WHOLE)
    async with door(server) as opened:
        told = await asyncio.gather(*(ask(opened) for _ in range(9)))
    assert {one.outcome for one in told} == {"ok"} and 1 < server.connections <= 9


def refusal(status: int, code: str) -> str:
    body = json.dumps({"error": {"message": "no", "code": code}})
    return f"HTTP/1.1 {status} No\r\ncontent-length: {len(body)}\r\n\r\n{body}"


BROKEN = chunk('data: {"error": {"code": "worker_lost", "message": "gone"}}\n\n')


@pytest.mark.parametrize(
    ("answer", "outcome", "reason"),
    [
        (refusal(429, "overloaded"), "refused", "OVERLOADED"),
        (refusal(503, "no_worker"), "refused", "NO_WORKER"),
        (refusal(401, "invalid_api_key"), "refused", "INVALID_API_KEY"),
        (refusal(500, "internal"), "failed", "INTERNAL"),
        (refusal(504, "deadline"), "timeout", DEADLINE),
        ("HTTP/1.1 502 Bad\r\ncontent-length: 2\r\n\r\nhi", "failed", "HTTP 502"),
        (HEAD + event(1) + BROKEN + "0\r\n\r\n", "failed", "WORKER_LOST"),
        (HEAD + event(1) + chunk("data: [DONE]\n\n") + "0\r\n\r\n", "failed", "CUT_SHORT"),
        ("", "failed", NO_SERVER),
        ("SSH-2.0-OpenSSH\r\n\r\n", "failed", "NOT_HTTP"),
        (HEAD + chunk("data: {not json\n\n") + "0\r\n\r\n", "failed", "NOT_HTTP"),
        (HEAD + event(1), "failed", "NOT_HTTP"),  # closed in the middle of the answer
    ],
)
async def test_every_failure_has_an_outcome_and_a_reason(answer: str, outcome: str, reason: str) -> None:
    async with door(Server(answer)) as opened:
        told = await ask(opened)
    assert told.outcome == outcome and told.reason.startswith(reason), told


async def test_a_stalled_answer_is_a_timeout_and_its_connection_is_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtest.http_door.GRACE_S", 0.1)
    server = Server(HEAD + event(1, note="stall"), WHOLE)
    async with door(server) as opened:
        told = await ask(opened, timeout_s=0.2)
        assert (told.outcome, told.reason) == ("timeout", DEADLINE)
        assert (await ask(opened)).outcome == "ok" and server.connections == 2


async def test_a_missing_server_is_reported() -> None:
    async with HttpDoor("127.0.0.1:9") as opened:
        assert (await ask(opened)).reason == NO_SERVER


def test_access_opens_the_requested_door() -> None:
    assert isinstance(DoorAccess("http").door("127.0.0.1:1"), HttpDoor)
    assert isinstance(Tls().context(), ssl.SSLContext)
    assert GrpcDoor.__init__.__code__.co_varnames[1:5] == HttpDoor.__init__.__code__.co_varnames[1:5]
