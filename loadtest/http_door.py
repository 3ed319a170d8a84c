"""The HTTP door: /v1/completions of the OpenAI API, streamed.

Connections are kept and reused, as clients do; a request that finds a kept connection closed opens a new one. The server reports the
number of tokens with every chunk (`continuous_usage_stats`), because a chunk may hold text without a token. It reports neither stages nor
token ids, so records of this door have none. Sessions need the gRPC door, because their later turns carry the ids of the answers.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Self

import h11

from loadtest.drive import DEADLINE, GRACE_S, NO_SERVER, Answer
from loadtest.grpc_door import CUT_SHORT
from loadtest.record import Outcome

READ_BYTES = 1 << 16
MAX_BODY_BYTES = 1 << 20  # of a refusal
MAX_LINE_BYTES = 1 << 20  # of an event
DONE = "[DONE]"


class _Closed(Exception):
    """The server closed the connection before it sent any answer."""


class _Error(Exception):
    """The server refused the request, or ended the stream with an error."""

    def __init__(self, status: int, code: str, begun: bool) -> None:
        super().__init__(code)
        self.status, self.code, self.begun = status, code, begun


class HttpDoor:
    """Decoding is greedy and continues past any end-of-sequence token, so each request gets exactly as many tokens as the workload says."""

    def __init__(
        self,
        address: str,
        salt: str = "",
        api_key: str | None = None,
        tls: ssl.SSLContext | None = None,
        server_name: str | None = None,
    ) -> None:
        self._address = address
        self._salt = salt
        self._tls = tls
        self._server_name = server_name
        self._headers = [("host", address), ("content-type", "application/json"), ("accept", "text/event-stream")]
        if api_key is not None:
            self._headers.append(("authorization", f"Bearer {api_key}"))
        self._idle: list[_Connection] = []

    async def ask(self, prompt: Sequence[int], output_tokens: int, timeout_s: float, on_tokens: Callable[[int], None]) -> Answer:
        """See `drive.Door`."""
        asked: dict[str, Any] = {"prompt": list(prompt), "max_tokens": output_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        asked["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        if self._salt:
            asked["cache_salt"] = self._salt
        usage: dict[str, Any] = {}
        try:
            events = self._events(json.dumps(asked).encode(), timeout_s)
            async with asyncio.timeout(timeout_s + GRACE_S), aclosing(events):
                async for chunk in events:
                    before = usage.get("completion_tokens", 0)
                    usage = chunk.get("usage") or usage
                    if (new := usage.get("completion_tokens", 0) - before) > 0:
                        on_tokens(new)
        except TimeoutError:
            return Answer("timeout", DEADLINE)
        except _Error as error:
            return Answer(*_judge(error))
        except (OSError, _Closed):
            return Answer("failed", "CONNECTION_LOST" if usage else NO_SERVER)
        except (h11.RemoteProtocolError, ValueError) as error:
            return Answer("failed", f"NOT_HTTP: {error}")
        whole = usage.get("completion_tokens") == output_tokens
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return Answer("ok" if whole else "failed", "" if whole else CUT_SHORT, (), usage.get("prompt_tokens", 0), cached)

    async def _events(self, body: bytes, timeout_s: float) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of the answer. Raises _Error, _Closed, OSError, h11.RemoteProtocolError and ValueError."""
        headers = [*self._headers, ("content-length", str(len(body))), ("x-request-timeout-ms", str(max(1, round(timeout_s * 1000))))]
        request = h11.Request(method="POST", target="/v1/completions", headers=headers)
        connection = await self._send(request, body)
        try:
            async for chunk in connection.events():
                yield chunk
        except BaseException:
            connection.close()
            raise
        if connection.start_next():
            self._idle.append(connection)
        else:
            connection.close()

    async def _send(self, request: h11.Request, body: bytes) -> "_Connection":
        """Sends on a connection that answers: the server may have closed a kept one meanwhile."""
        while self._idle:
            kept = self._idle.pop()
            try:
                await kept.send(request, body)
                return kept
            except (OSError, _Closed, h11.RemoteProtocolError):
                kept.close()
            except BaseException:
                kept.close()
                raise
        host, _, port = self._address.rpartition(":")
        named = self._server_name if self._tls else None
        streams = await asyncio.open_connection(host.strip("[]"), int(port), ssl=self._tls, server_hostname=named, limit=READ_BYTES)
        fresh = _Connection(*streams)
        try:
            await fresh.send(request, body)
        except BaseException:
            fresh.close()
            raise
        return fresh

    async def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._protocol = h11.Connection(h11.CLIENT)
        self._status = 0

    async def send(self, request: h11.Request, body: bytes) -> None:
        """Returns once the head of the answer has arrived."""
        for event in (request, h11.Data(data=body), h11.EndOfMessage()):
            self._writer.write(self._protocol.send(event) or b"")
        await self._writer.drain()
        while not isinstance(event := await self._next(), h11.Response):
            if not isinstance(event, h11.InformationalResponse):
                raise _Closed
        self._status = event.status_code

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """The events of the answer as JSON, to its end. Raises _Error if the answer is a refusal, or ends with an error."""
        rest, begun = b"", False
        while isinstance(event := await self._next(), h11.Data):
            rest += event.data
            if self._status != 200:
                rest = rest[:MAX_BODY_BYTES]
                continue
            *lines, rest = rest.split(b"\n")
            if len(rest) > MAX_LINE_BYTES:
                raise ValueError(f"a line of more than {MAX_LINE_BYTES} bytes")
            for line in lines:
                if not line.startswith(b"data:") or (text := line[5:].strip().decode()) == DONE:
                    continue
                chunk = json.loads(text)
                if error := chunk.get("error"):
                    raise _Error(0, str(error.get("code")), begun)
                begun = True
                yield chunk
        if self._status != 200:
            raise _Error(self._status, _code(rest) or f"HTTP {self._status}", False)

    def start_next(self) -> bool:
        """Whether the connection can carry another request."""
        if self._protocol.our_state is not h11.DONE or self._protocol.their_state is not h11.DONE:
            return False
        self._protocol.start_next_cycle()
        return not self._reader.at_eof()

    def close(self) -> None:
        self._writer.close()

    async def _next(self) -> Any:
        while (event := self._protocol.next_event()) is h11.NEED_DATA:
            received = await self._reader.read(READ_BYTES)
            if not received and self._protocol.their_state is h11.SEND_RESPONSE:
                raise _Closed
            self._protocol.receive_data(received)
        return event


def _code(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return ""


def _judge(error: _Error) -> tuple[Outcome, str]:
    reason = error.code.upper()
    if error.status == 504 or reason == DEADLINE:
        return "timeout", DEADLINE
    if error.begun:
        return "failed", reason
    return ("refused", reason) if 400 <= error.status < 500 or error.status == 503 else ("failed", reason)
