"""uvicorn in the router's event loop, and the bounds of a connection that it does not have itself.

    head        time for the headers of a request, once its first byte is there or the connection is new
    idle        time between two requests (uvicorn's own keep-alive timer)
    stall       time for a reader to take what is waiting for it
    number      connections at a time, as far as the system lets the process open files; more are refused

Size and time of a body are the application's business.
"""

import asyncio
import logging
import resource
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from baton.cluster.config import Config, RouterConfig
from baton.cluster.errors import BatonError, Reason
from baton.cluster.rpc import Tasks, is_loopback, target
from router.http.errors import HttpError, to_json

log = logging.getLogger(__name__)
MAX_HEAD_BYTES = 32 << 10
OTHER_FILES = 256  # of the process
SEND_BUFFER_BYTES = 128 << 10  # in the kernel; it would let a reader that stops hold megabytes
BACKLOG = 1024
CLOSE_WITHIN_S = 2  # whole seconds: uvicorn's type


class HttpServer:
    def __init__(self, config: Config, app: ASGIApp) -> None:
        """Raises OSError (ssl.SSLError) for a certificate that cannot be used."""
        security = config.security
        self._config = config
        family = socket.AF_INET6 if ":" in config.cluster.host else socket.AF_INET
        # The protocol by its name: asyncio switches Nagle's delay off for such connections only, and it costs 40 ms a request.
        self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._task: asyncio.Task[None] | None = None
        self._server = _Server(
            uvicorn.Config(
                app,
                http=_bounded(config.router, _connections(config.router.http_max_connections)),
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",  # its warnings are about what clients send: anybody could fill the log
                access_log=False,
                proxy_headers=False,
                server_header=False,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                timeout_keep_alive=config.router.http_idle_s,  # type: ignore[arg-type]  # it ends up in call_later
                timeout_graceful_shutdown=CLOSE_WITHIN_S,
                ssl_certfile=security.tls_cert,
                ssl_keyfile=security.tls_key,
                ssl_ca_certs=security.tls_ca,
                ssl_cert_reqs=ssl.CERT_REQUIRED if security.tls_ca else ssl.CERT_NONE,
            )
        )
        self._server.config.load()

    @property
    def idle(self) -> bool:
        """Nothing is being answered."""
        return not self._server.server_state.tasks

    def bind(self, port: int) -> str:
        """Take a port (0: any free one); returns `host:port`. Raises BatonError(INTERNAL) when it is taken."""
        host, security = self._config.cluster.host, self._config.security
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # connections inherit it
            self._socket.bind((host, port))
            self._socket.listen(BACKLOG)  # who connects from now on is served as soon as the server runs
        except OSError as error:
            raise BatonError(Reason.INTERNAL, f"cannot listen on {target(host, port)}: {error.strerror}") from None
        address = target(host, self._socket.getsockname()[1])
        if not (security.tls_ca or security.api_keys or is_loopback(host)):
            log.warning("%s is open to the network without API keys or mutual TLS: set security.api_keys, or tls_ca", address)
        return address

    def start(self, tasks: Tasks) -> None:
        self._task = tasks.start(self._server.serve([self._socket]), "http")

    async def stop(self) -> None:
        """Close every connection. Who still waits for an answer is told that there will be none."""
        if self._task is None:
            self._socket.close()
            return
        self._server.should_exit = True
        for request in self._server.server_state.tasks:
            request.cancel()
        await asyncio.wait([self._task])


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """They belong to the process."""
        yield


def _connections(wanted: int) -> int:
    """How many there can be so that enough files are left for the workers and the registry; raises the process's limit if it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else min(needed, hard), hard))
    except (OSError, ValueError):  # more than the system allows although its limit says otherwise
        log.debug("the limit of open files stays at %d", soft)
    return max(1, min(wanted, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - OTHER_FILES))


def _bounded(limits: RouterConfig, most: int) -> type[H11Protocol]:
    """uvicorn makes its connections from a class. `most`: connections."""

    class Connection(H11Protocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._head: asyncio.TimerHandle | None = None
            self._stall: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > most:
                self._refuse(HttpError(503, "too many connections are open", headers={"retry-after": "1"}))
            else:
                self._await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            for timer in (self._head, self._stall):
                if timer is not None:
                    timer.cancel()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._await_head()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._await_reader()

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._stall is not None and not self.transport.is_closing():
                self._stall.cancel()
                self._stall = None

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._await_reader_if_closing()

        def timeout_keep_alive_handler(self) -> None:
            super().timeout_keep_alive_handler()
            self._await_reader_if_closing()

        def send_400_response(self, msg: str) -> None:
            self._refuse(HttpError(400, "this is no HTTP request", code="invalid_http"))

        def _await_head(self) -> None:
            """The timer runs while no request is being answered and one has begun to arrive, or none was there yet."""
            waiting = self.cycle is None or self.cycle.response_complete
            if not waiting and self._head is not None:
                self._head.cancel()
                self._head = None
            elif waiting and self._head is None:
                self._head = self.loop.call_later(limits.http_read_timeout_s, self._late)

        def _late(self) -> None:
            self._refuse(HttpError(408, "the headers did not come in time"))

        def _await_reader_if_closing(self) -> None:
            if self.transport.is_closing():  # and waits for what is buffered to be taken
                self._await_reader()

        def _await_reader(self) -> None:
            if self._stall is None:
                self._stall = self.loop.call_later(limits.http_stall_s, self.transport.abort)

        def _refuse(self, error: HttpError) -> None:
            """Where no request is that could be answered; in the middle of an answer nothing can be told."""
            if not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete):
                self.transport.write(_answer(error))
            self.transport.close()
            self._await_reader_if_closing()

    return Connection


def _answer(error: HttpError) -> bytes:
    body = to_json(error.body)
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close", **error.headers}
    lines = [f"HTTP/1.1 {error.status} {error.code}", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode() + body
