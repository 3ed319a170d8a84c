"""One HTTP/1.1 connection: bytes to ASGI and back. h11 implements the protocol; this module limits what a stranger can cost.

    head        time for the headers of a request, from its first byte or from the start of the connection
    idle        time between two requests
    stall       time for the client to read what waits for it

uvicorn is not used: its public configuration has neither head nor stall. It cannot refuse with an error object, and it drops a client that
closes its sending half after a whole request. The application bounds the size and the time of a body.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Iterable
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import h11
from starlette.types import ASGIApp, Message, Scope

from baton.cluster.config_router import RouterConfig
from router.http.errors import HttpError, to_json
from router.http.stream import ClientGone
from router.turn_budget import BYTES_OF_AN_END, TurnBudget

log = logging.getLogger(__name__)
MAX_HEAD_BYTES = 32 << 10
MAX_UNREAD_BYTES = 64 << 10  # of a body that the application has not read yet; beyond that, reading pauses
MAX_UNSENT_BYTES = 64 << 10  # of an answer; beyond that, the application waits for the client to read
PROBE_S = 0.25
_PHRASES = {int(status): status.phrase.encode() for status in HTTPStatus}
_CLOSE = (b"connection", b"close")
_CHUNKED = b"\r\ntransfer-encoding: chunked\r\n"


class Exchange:
    """One request and its answer, as the application sees them."""

    def __init__(self, connection: "Connection", request: h11.Request, keep_alive: bool, expects_continue: bool) -> None:
        self.started = False  # the application has begun to answer
        self.complete = False
        self.gone = False  # nobody reads the answer any more
        self.body = bytearray()
        self.more_body = True
        self.news = asyncio.Event()
        self.modern = request.http_version >= b"1.1"
        self._head_only = request.method == b"HEAD"
        self._head = b""  # held back, to be sent with the first piece of the body
        self._chunked = False
        self._keep_alive = keep_alive
        self._expects_continue = expects_continue
        self._connection = connection

    async def receive(self) -> Message:
        connection = self._connection
        if self._expects_continue:
            self._expects_continue = False
            connection.inform()
        if not (self.gone or self.complete):
            connection.read_on()
            await self.news.wait()
            self.news.clear()
        if self.gone or self.complete:
            return {"type": "http.disconnect"}
        body, self.body = bytes(self.body), bytearray()
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def send(self, message: Message) -> None:
        """Waits while the client has not read what was sent before. Raises ClientGone if nobody will read this."""
        if not (writable := self._connection.writable).is_set():
            await writable.wait()
        if self.gone or self._connection.lost:
            raise ClientGone
        if not self.started:
            self._start(message)
        elif not self.complete:
            self._continue(message)
        else:
            raise RuntimeError(f"{message['type']} after the end of the answer")

    def leave(self) -> None:
        self.gone = True
        self.news.set()

    def _start(self, message: Message) -> None:
        self.started, self._expects_continue = True, False
        headers = list(message.get("headers", ()))
        if (self._connection.leaving or not self._keep_alive) and _CLOSE not in headers:
            headers.append(_CLOSE)
        headers.append((b"date", _date(int(time.time()))))
        status = message["status"]
        self._head = self._connection.pack(h11.Response(status_code=status, headers=headers, reason=_PHRASES.get(status, b"")))
        self._chunked = _CHUNKED in self._head.lower()

    def _continue(self, message: Message) -> None:
        connection = self._connection
        data = self._framed(b"" if self._head_only else message.get("body", b""))
        if self._head:
            data, self._head = self._head + data, b""
        if message.get("more_body", False):
            connection.write(data)
            return
        self.complete = True
        connection.write(data + connection.pack(h11.EndOfMessage()))
        self.news.set()
        connection.answered()

    def _framed(self, body: bytes) -> bytes:
        """A piece of the body. A chunk changes nothing in h11's state, and h11 takes as long to make one as the rest of this class: each
        token of a stream is one. An empty chunk would end the answer."""
        if self._chunked:
            return b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        return self._connection.pack(h11.Data(data=body))


class Connection(asyncio.Protocol):
    def __init__(
        self,
        app: ASGIApp,
        limits: RouterConfig,
        most: int,
        connections: set["Connection"],
        tasks: set[asyncio.Task[None]],
        budget: TurnBudget,
        on_stall: Callable[[], None] = lambda: None,
    ) -> None:
        """Adds itself to `connections` and the application's tasks to `tasks`. Refuses the client if that makes more than `most`.
        `on_stall`: the connection is cut because the client does not read."""
        self.writable = asyncio.Event()
        self.writable.set()
        self._app = app
        self._limits = limits
        self._connections = connections
        self._tasks = tasks
        self._budget = budget
        self._on_stall = on_stall
        self._most = most
        self._loop = asyncio.get_running_loop()
        self._parser = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._exchange: Exchange | None = None
        self._task: asyncio.Task[None] | None = None  # the application's, for the last request
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.leaving = False  # the connection closes after this answer
        self.lost = False
        self._transport: asyncio.Transport

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(MAX_UNSENT_BYTES)  # TLS would let eight times as much wait
        self._connections.add(self)
        if len(self._connections) > self._most:
            self._refuse(HttpError(503, "too many connections are open", headers={"retry-after": "1"}))
        else:
            self._await_head()

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.discard(self)
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self.lost = True
        self._budget.call(BYTES_OF_AN_END, self._part)  # many may be lost together

    def _part(self) -> None:
        """Ends the application's work on an answer that nobody reads."""
        self.writable.set()
        if self._exchange is not None:
            self._exchange.leave()

    def data_received(self, data: bytes) -> None:
        self._clear("idle")
        if self._parser.their_state in (h11.IDLE, h11.DONE) and not self._parser.trailing_data[0]:
            data = data.lstrip(b"\r\n")  # RFC 9112, 2.2: there may be empty lines before a request
        if data:  # for h11, nothing is the end of the connection
            self._parser.receive_data(data)
        self._advance()
        self._await_head()

    def eof_received(self) -> bool:
        """True keeps the sending half open."""
        if self._transport.get_extra_info("sslcontext") is not None:  # TLS has no half-open state
            return False
        self._parser.receive_data(b"")
        self._advance()
        return not self._transport.is_closing()

    def pause_writing(self) -> None:
        self.writable.clear()
        self._await_reader()

    def resume_writing(self) -> None:
        self.writable.set()
        if not self._transport.is_closing():
            self._clear("stall")

    # What the exchange calls

    def pack(self, event: h11.Event) -> bytes:
        return self._parser.send(event) or b""

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def inform(self) -> None:
        """Sends status 100: the request was understood so far."""
        if not self._transport.is_closing():
            self.write(self.pack(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")))

    def read_on(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def answered(self) -> None:
        if self.leaving or self._parser.our_state is not h11.DONE:
            self._close()
            return
        self._set("idle", self._limits.http_idle_s, self._close)
        self._next_request()
        self.read_on()
        self._advance()

    def retire(self) -> None:
        """Closes when the current request is answered, and says so in the answer. Without a request: immediately."""
        self.leaving = True
        if self._exchange is None or self._exchange.complete:
            self._close()

    def leave(self) -> None:
        """Closes. A client that waits for an answer is first told that there will be none."""
        self.leaving = True
        if self._task is None or self._task.done():
            self._close()
        else:
            self._task.cancel()

    def abort(self) -> None:
        self._transport.abort()

    # Requests

    def _advance(self) -> None:
        """Handles all events that the parser has ready."""
        while not self._transport.is_closing():
            try:
                event = self._parser.next_event()
            except h11.RemoteProtocolError as error:
                status = 501 if error.error_status_hint == 501 else 400
                self._refuse(HttpError(status, "this is not an HTTP request", code="invalid_http"))
                return
            if event is h11.NEED_DATA:
                return
            if event is h11.PAUSED:  # the next request waits until this one is answered
                self._transport.pause_reading()
                return
            if isinstance(event, h11.ConnectionClosed):
                self._receive_end()
                return
            if isinstance(event, h11.Request):
                self._begin(event)
            else:
                self._receive(event)

    def _begin(self, request: h11.Request) -> None:
        names = {name for name, _ in request.headers}
        # RFC 9112, 6.1: such a request may be an attempt to smuggle another one past a proxy.
        keep_alive = not {b"content-length", b"transfer-encoding"} <= names
        exchange = Exchange(self, request, keep_alive, self._parser.they_are_waiting_for_100_continue)
        self._exchange = exchange
        self._task = self._loop.create_task(self._run(exchange, self._scope(request)))
        self._tasks.add(self._task)
        self._task.add_done_callback(self._tasks.discard)

    async def _run(self, exchange: Exchange, scope: Scope) -> None:
        """Leaves either a complete answer or a closed connection."""
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except ClientGone:
            pass
        except Exception:
            log.exception("the application failed")
        finally:
            if not (exchange.complete or exchange.gone):
                self._close()

    def _receive(self, event: Any) -> None:
        """A piece of a body, or its end."""
        exchange = self._exchange
        if exchange is None or exchange.complete:  # no longer needed
            if isinstance(event, h11.EndOfMessage):
                self._next_request()
            return
        if isinstance(event, h11.Data):
            exchange.body += event.data
            if len(exchange.body) > MAX_UNREAD_BYTES:
                self._transport.pause_reading()
        else:
            exchange.more_body = False
        exchange.news.set()

    def _next_request(self) -> None:
        """Starts the next request if the last one was read and answered completely."""
        if self._parser.our_state is self._parser.their_state is h11.DONE:
            self._parser.start_next_cycle()
            self._exchange = None
            self._clear("head")

    def _receive_end(self) -> None:
        """The client closed its sending half, or left. If a whole request waits for its answer, a probe shows which.

        Data sent to a client that left makes its system reset the connection; one that listens must accept an interim response at any time.
        """
        exchange = self._exchange
        if exchange is None or exchange.started or not exchange.modern:
            self._close()
        elif "probe" not in self._timers:
            self.inform()
            self._set("probe", PROBE_S, self._probe)

    def _probe(self) -> None:
        del self._timers["probe"]
        if self._transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._transport.abort()
        elif self._exchange is not None and not self._exchange.started:
            self._set("probe", PROBE_S, self._probe)

    def _scope(self, request: h11.Request) -> Scope:
        target, _, query = request.target.partition(b"?")
        headers = list(request.headers)
        if not target.startswith(b"/") and b"://" in target:  # RFC 9112, 3.2.2: its authority counts, not the host header
            authority, slash, path = target.partition(b"://")[2].partition(b"/")
            target = slash + path or b"/"
            headers = [(b"host", authority), *((name, value) for name, value in headers if name != b"host")]
        info = self._transport.get_extra_info
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": request.http_version.decode(),
            "method": request.method.decode(),
            "scheme": "http" if info("sslcontext") is None else "https",
            "path": unquote(target.decode()),
            "raw_path": target,
            "query_string": query,
            "root_path": "",
            "headers": headers,
            "client": _address(info("peername")),
            "server": _address(info("sockname")),
            "state": {},
        }

    # Limits

    def _await_head(self) -> None:
        """The timer runs while no request is being answered and either one has begun to arrive or none has come yet."""
        if self._transport.is_closing():
            return
        if self._exchange is not None and not self._exchange.complete:
            self._clear("head")
        elif "head" not in self._timers and "idle" not in self._timers:
            self._set("head", self._limits.http_read_timeout_s, lambda: self._refuse(HttpError(408, "the headers did not arrive in time")))

    def _await_reader(self) -> None:
        if "stall" not in self._timers:
            self._set("stall", self._limits.stall_s, self._cut)

    def _cut(self) -> None:
        self._on_stall()
        self._transport.abort()

    def _refuse(self, error: HttpError) -> None:
        """Sends an error that belongs to no valid request, and closes. An answer that has begun is cut off."""
        exchange = self._exchange
        if not self._transport.is_closing() and (exchange is None or exchange.complete or not exchange.started):
            self._transport.write(_answer(error))
        if exchange is not None:
            exchange.leave()
        self._close()

    def _close(self) -> None:
        """The transport closes when the client has read what is buffered; the client may stall here, too."""
        if not self._transport.is_closing():
            self._transport.close()
            self._await_reader()

    def _set(self, name: str, seconds: float, then: Callable[[], None]) -> None:
        self._clear(name)
        self._timers[name] = self._loop.call_later(seconds, then)

    def _clear(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()


def _address(name: Any) -> tuple[str, int] | None:
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None


@lru_cache(maxsize=1)
def _date(second: int) -> bytes:
    """RFC 9110, 6.6.1: a server with a clock sends the time of every answer. Written once a second."""
    return formatdate(second, usegmt=True).encode()


def _answer(error: HttpError) -> bytes:
    body = to_json(error.body)
    told = {"date": _date(int(time.time())).decode(), "content-type": "application/json", "content-length": str(len(body))}
    headers = {**told, "connection": "close", **error.headers}
    lines: Iterable[str] = (f"{name}: {value}" for name, value in headers.items())
    return "\r\n".join([f"HTTP/1.1 {error.status} {_PHRASES[error.status].decode()}", *lines, "", ""]).encode() + body
