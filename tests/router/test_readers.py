"""Whatever readers do, the router's loop goes on: no turn takes long, what waits for a reader is bounded, and a stream that is cut costs
nothing more. Both doors, with and without TLS."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from authority import make, security
from http_door import toy_tokenizer
from readers import Hall, HttpReader, hall
from turns import watched

from baton.cli.certs import SERVER_NAME
from baton.cluster.errors import Reason
from baton.cluster.rpc import to_error
from router.http import connection, openai_out, server
from router.tokenizer import Tokenizer

TURN_S = 0.020
TOKENS = 1900  # with 20 log-probabilities, half a megabyte that waits, of which a door makes three
BOUND_BYTES = 256 << 10  # less than that, and more than a message of the worker
ENDLESS = 20 * TOKENS  # a worker that is told late to stop has not ended by itself
PAUSE_S = 0.005  # between two messages of the worker: whoever reads keeps up
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "stream": True, "logprobs": True, "top_logprobs": 20}
COMPLETION: dict[str, Any] = {"prompt": "hello", "stream": True, "logprobs": 5}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return toy_tokenizer(tmp_path_factory.mktemp("toy"))


async def opened(made: Hall, door: str, readers: int, tokens: int = TOKENS, n: int = 1) -> list[Any]:
    """Readers that do not read yet. Returns when the worker has made everything that it will make for them."""
    clients: list[Any]
    if door == "grpc":
        clients = [made.grpc_reader(tokens, 20) for _ in range(readers)]
    else:
        path, body = ("/v1/chat/completions", CHAT) if door == "chat" else ("/v1/completions", COMPLETION)
        clients = [await made.http_reader({**body, "max_tokens": tokens, "n": n}, path) for _ in range(readers)]
    await made.until(lambda: made.begun == readers * n and made.worker.done)
    return clients


def events(answer: bytes) -> list[Any]:
    """The data of each event; the last may be cut off."""
    told = [line.removeprefix(b"data: ") for line in answer.split(b"\r\n\r\n", 1)[1].split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(data) if data != b"[DONE]" else data for data in told]


async def heard(call: Any) -> tuple[int, Reason | None]:
    """How many tokens a gRPC reader gets, and the reason for which its stream was cut."""
    tokens = 0
    try:
        async for response in call:
            tokens += len(response.tokens.tokens)
    except grpc.aio.AioRpcError as error:
        return tokens, to_error(error).reason
    return tokens, None


@pytest.mark.parametrize(
    "door, readers, tokens, n",
    [
        ("chat", 1, TOKENS, 1),
        ("chat", 20, TOKENS, 1),
        ("chat", 200, 250, 1),
        ("chat", 10, 400, 8),
        ("completion", 20, TOKENS, 1),
        ("grpc", 20, TOKENS, 1),
        ("grpc", 200, 250, 1),
    ],
)
async def test_readers_that_stall_are_cut_and_hold_nobody_up(
    tokenizer: Tokenizer, door: str, readers: int, tokens: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if readers == 200:  # they stall earlier, so that the test is shorter
        monkeypatch.setattr(server, "SEND_BUFFER_BYTES", 4096)
        monkeypatch.setattr(connection, "MAX_UNSENT_BYTES", 4096)
    async with hall(tokenizer, tokens, 20, stall_s=1.0) as made:
        with watched() as turns:
            # seen while the worker sends: on a busy machine a reader may be cut before the worker's last message
            await asyncio.gather(opened(made, door, readers, tokens, n), made.until(lambda: made.workers.unread_bytes > 0))
            await made.until(lambda: made.idle)
        turns.check(TURN_S)
        assert not made.waiting_bytes and made.workers.unread_bytes == 0
        assert (made.public.stalled, made.http.stalled) == ((readers, 0) if door == "grpc" else (0, readers))


@pytest.mark.parametrize("door", ["chat", "grpc"])
async def test_readers_that_stalled_and_read_on_together_get_everything_and_hold_nobody_up(tokenizer: Tokenizer, door: str) -> None:
    tokens = 500
    async with hall(tokenizer, tokens, 20) as made:
        with watched() as turns:
            clients = await opened(made, door, 20, tokens, n=2 if door == "chat" else 1)
            answers = await asyncio.gather(*(client.rest() if door == "chat" else heard(client) for client in clients))
        turns.check(TURN_S)
    if door == "chat":
        assert all(len(told := events(answer)) == 2 * (tokens + 2) + 1 and told[-1] == b"[DONE]" for answer in answers)
    else:
        assert answers == [(tokens, None)] * 20


@pytest.mark.parametrize("n", [1, 8])
async def test_what_waits_for_a_reader_is_bounded_in_bytes_and_the_cut_says_so(tokenizer: Tokenizer, n: int) -> None:
    async with hall(tokenizer, ENDLESS, 20, backlog_bytes=BOUND_BYTES, max_answer_tokens=8 * ENDLESS) as made:
        made.worker.pause_s = PAUSE_S
        with watched() as turns:
            (client,) = await opened(made, "chat", 1, ENDLESS, n)
            assert made.worker.cancelled, "the worker goes no further for a reader that has too much to read"
            assert max(made.waiting_bytes) <= BOUND_BYTES
            *_, last = events(await client.rest())
            await made.until(lambda: made.idle)
        turns.check(TURN_S)
        assert last["error"]["code"] == "stalled" and str(BOUND_BYTES) in last["error"]["message"]
        assert len(made.worker.cancelled) == n


async def test_what_waits_for_a_grpc_reader_is_bounded_in_bytes_and_the_cut_says_so(tokenizer: Tokenizer) -> None:
    async with hall(tokenizer, ENDLESS, 20, backlog_bytes=BOUND_BYTES) as made:
        made.worker.pause_s = PAUSE_S
        (call,) = await opened(made, "grpc", 1, ENDLESS)
        assert made.worker.cancelled and max(made.waiting_bytes) <= BOUND_BYTES
        tokens, reason = await heard(call)
        assert 0 < tokens < ENDLESS and reason is Reason.STALLED


async def test_a_reader_that_was_cut_can_resume(tokenizer: Tokenizer) -> None:
    """The cut tells it how; the rest is what it would have got."""
    body = {**CHAT, "max_tokens": TOKENS, "stream_options": {"include_event_ids": True}}
    async with hall(tokenizer, TOKENS, 20, backlog_bytes=BOUND_BYTES) as made:
        made.worker.pause_s = PAUSE_S
        client = await made.http_reader(body)
        await made.until(lambda: made.begun == 1 and made.worker.done)
        answer = await client.rest()
        *told, last = events(answer)
        assert last["error"]["code"] == "stalled"
        id_ = answer.rsplit(b"\nid: ", 1)[1].split(b"\n")[0].decode()
        made.workers._streams = replace(
            made.workers._streams, most_bytes=1 << 30
        )  # on a busy machine, a whole answer may wait for a moment
        again = await made.http_reader(body, headers=f"last-event-id: {id_}")
        rest = events(await again.rest())
        assert rest[-1] == b"[DONE]" and len(told) + len(rest) == TOKENS + 3


async def test_a_reader_that_trickles_is_cut_like_one_that_stalls(tokenizer: Tokenizer) -> None:
    async with hall(tokenizer, TOKENS, 20, stall_s=0.5) as made:
        with watched() as turns:
            (client,) = await opened(made, "chat", 1)
            async with asyncio.timeout(30):
                while not made.idle:
                    await client.sip(1)
                    await asyncio.sleep(0.01)
        turns.check(TURN_S)


async def test_resets_of_all_readers_in_the_middle_hold_nobody_up_and_free_everything(tokenizer: Tokenizer) -> None:
    async with hall(tokenizer, TOKENS, 20) as made:
        with watched() as turns:
            clients: list[HttpReader] = await opened(made, "chat", 50)
            for client in clients:
                client.reset()
            await made.until(lambda: made.idle)
        turns.check(TURN_S)
        assert len(made.worker.sent) == 50 and not made.waiting_bytes


@asynccontextmanager
async def secured(tokenizer: Tokenizer, folder: Path, **limits: Any) -> AsyncIterator[Hall]:
    make(folder)
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    context.load_cert_chain(folder / "client.pem", folder / "client.key")
    pem = [(folder / name).read_bytes() for name in ("ca.pem", "client.key", "client.pem")]
    async with hall(tokenizer, TOKENS, 20, security(folder), (context, grpc.ssl_channel_credentials(*pem), SERVER_NAME), **limits) as made:
        yield made


@pytest.mark.parametrize("door", ["chat", "grpc"])
async def test_behind_tls_it_is_the_same(tokenizer: Tokenizer, door: str, tmp_path: Path) -> None:
    async with secured(tokenizer, tmp_path / "certs", stall_s=1.5) as made:
        with watched() as turns:
            await opened(made, door, 10)
            if door == "chat":
                unsent = [each._transport.get_write_buffer_size() for each in made.http.connections]
                assert unsent and max(unsent) < 128 << 10, "TLS, too, lets no more than 64 KiB and an event wait"
            await made.until(lambda: made.idle)
        turns.check(TURN_S)


@pytest.mark.parametrize("body", [CHAT, COMPLETION], ids=["chat", "completion"])
async def test_a_whole_answer_is_written_bit_by_bit(tokenizer: Tokenizer, body: dict[str, Any]) -> None:
    tokens, n = 400, 8
    path = "/v1/chat/completions" if body is CHAT else "/v1/completions"
    async with hall(tokenizer, tokens, 20) as made:
        with watched() as turns:
            client = await made.http_reader({**body, "stream": False, "n": n, "max_tokens": tokens}, path)
            head, answer = (await client.rest()).split(b"\r\n\r\n", 1)
        turns.check(TURN_S)
    assert f"content-length: {len(answer)}".encode() in head
    told = json.loads(answer)
    assert [len(one["logprobs"].get("content") or one["logprobs"].get("tokens")) for one in told["choices"]] == [tokens] * n


async def test_a_whole_answer_that_is_too_long_is_refused(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_out, "MAX_WHOLE_BYTES", 1 << 20)
    async with hall(tokenizer, TOKENS, 20) as made:
        client = await made.http_reader({**CHAT, "stream": False, "max_tokens": TOKENS})
        head, answer = (await client.rest()).split(b"\r\n\r\n", 1)
        assert head.startswith(b"HTTP/1.1 400") and json.loads(answer)["error"]["param"] == "stream"
        await made.until(lambda: made.idle)


async def test_ids_by_the_hundred_thousand_are_told_bit_by_bit(tokenizer: Tokenizer) -> None:
    async with hall(tokenizer, 1, 0) as made:
        client = await made.http_reader({"prompt": "x" * 120_000}, "/tokenize")
        with watched() as turns:
            answer = await client.rest()
        turns.check(TURN_S)
        assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["count"] == 120_000
