"""A small HTTP server for pages that programs ask for: metrics and health. A connection carries one GET or HEAD request, which must end
within REQUEST_S.

We handle the connections ourselves (with h11) instead of using uvicorn, which takes 50 ms more CPU and 1.5 MiB more memory at the start of
every worker (h11 alone: 11 ms and 0.1 MiB), wakes ten times a second, and has no deadline for a client that sends or reads slowly.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable
from email.utils import formatdate
from http import HTTPStatus
from typing import TypeAlias

import h11

from baton.cluster.address import advertised, listener, target
from baton.cluster.config import Config, SecurityConfig
from baton.cluster.errors import BatonError, Reason
from baton.cluster.tls import server_context

MAX_HEAD_BYTES = 8192
MAX_CONNECTIONS = 32
REQUEST_S = 10.0  # from the connection to the last byte of the answer
TEXT = "text/plain; charset=utf-8"

Page = tuple[int, str, bytes]  # status, content type, body
Headers: TypeAlias = Iterable[tuple[bytes, bytes]]  # names in lower case


class PageServer(ABC):
    def __init__(self, config: Config, security: SecurityConfig) -> None:
        """`security`: whose TLS is used. Raises ConfigError for a certificate that cannot be used."""
        self._host = config.cluster.host
        self._advertised = advertised(config)
        self._tls = server_context(security)
        self.address = ""  # host:port while it listens
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @abstractmethod
    async def answer(self, path: bytes, headers: Headers) -> Page: ...

    async def start(self, port: int) -> str:
        """Listen on `port` (0: any free one); returns the `host:port` for others. Raises BatonError(INTERNAL) if the port is taken."""
        try:
            self._server = await asyncio.start_server(self._serve, sock=listener(self._host, port), ssl=self._tls)
        except OSError as error:
            raise BatonError(Reason.INTERNAL, f"cannot listen on {target(self._host, port)}: {error.strerror}") from None
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
                    writer.write(_encode(connection, await self._ask(request), with_body=request.method != b"HEAD"))
                await writer.drain()
        except h11.RemoteProtocolError as error:
            writer.write(_encode(connection, (error.error_status_hint, TEXT, f"{error}\n".encode())))
        except (TimeoutError, OSError):
            writer.transport.abort()  # the client is too slow, or gone: closing would wait until it has read the rest
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _ask(self, request: h11.Request) -> Page:
        if request.method not in (b"GET", b"HEAD"):
            return 405, TEXT, b"GET or HEAD\n"
        return await self.answer(request.target.partition(b"?")[0], request.headers)


async def _receive(connection: h11.Connection, reader: asyncio.StreamReader) -> h11.Request:
    """Raises h11.RemoteProtocolError for bytes that are not an HTTP/1 request, ConnectionError when the client closes early."""
    while (event := connection.next_event()) is h11.NEED_DATA:
        connection.receive_data(await reader.read(MAX_HEAD_BYTES))
    if isinstance(event, h11.Request):
        return event
    raise ConnectionResetError("the client closed the connection")


def _encode(connection: h11.Connection, page: Page, with_body: bool = True) -> bytes:
    status, content_type, body = page
    told = {"Date": formatdate(usegmt=True), "Content-Type": content_type, "Content-Length": str(len(body)), "Connection": "close"}
    response = h11.Response(status_code=status, headers=[*told.items()], reason=HTTPStatus(status).phrase.encode())
    parts = (response, h11.Data(data=body if with_body else b""), h11.EndOfMessage())
    return b"".join(connection.send(part) or b"" for part in parts)
