"""The HTTP listener: its socket, its TLS, and the number of its connections. A connection's own limits are in `connection`."""

import asyncio
import logging
import socket

from starlette.types import ASGIApp

from baton.clock import loop_time
from baton.cluster.address import advertised, is_loopback, target
from baton.cluster.config import Config
from baton.cluster.errors import BatonError, Reason
from baton.cluster.open_files import files_for
from baton.cluster.rpc import Tasks
from baton.cluster.tls import server_context
from router.http.connection import Connection
from router.turn_budget import TurnBudget

log = logging.getLogger(__name__)
SEND_BUFFER_BYTES = 128 << 10  # in the kernel, which would otherwise let a stalled client hold megabytes
BACKLOG = 1024
CLOSE_WITHIN_S = 2.0
CLOSE_POLL_S = 0.01


class HttpServer:
    def __init__(self, config: Config, app: ASGIApp, budget: TurnBudget | None = None) -> None:
        """Raises ConfigError for a certificate that cannot be used."""
        self._config = config
        self._app = app
        self._budget = budget or TurnBudget()
        self._most = files_for(config.router.http_max_connections)
        self._ssl = server_context(config.security)
        family = socket.AF_INET6 if ":" in config.cluster.host else socket.AF_INET
        # asyncio turns Nagle's delay off only for a socket that names its protocol, and the delay costs 40 ms per request.
        self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._listening: asyncio.Task[None] | None = None
        self.connections: set[Connection] = set()
        self.stalled = 0  # connections that were cut because their client did not read
        self._tasks: set[asyncio.Task[None]] = set()  # the application's
        self._draining = False

    @property
    def idle(self) -> bool:
        """Whether no request is being answered."""
        return not self._tasks

    def bind(self, port: int) -> str:
        """Binds a port (0: any free one); returns the `host:port` for others. Raises BatonError(INTERNAL) if the port is in use."""
        host, security = self._config.cluster.host, self._config.security
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # connections inherit it
            self._socket.bind((host, port))
            self._socket.listen(BACKLOG)  # clients that connect from now on are served as soon as the server runs
        except OSError as error:
            raise BatonError(Reason.INTERNAL, f"cannot listen on {target(host, port)}: {error.strerror}") from None
        address = target(advertised(self._config), self._socket.getsockname()[1])
        if not (security.tls_ca or security.api_keys or is_loopback(host)):
            log.warning("%s is open to the network without API keys or mutual TLS: set security.api_keys, or tls_ca", address)
        return address

    def start(self, tasks: Tasks) -> None:
        self._listening = tasks.start(self._listen(), "http")

    def drain(self) -> None:
        """Closes every connection after its next answer, so that clients open their next one elsewhere."""
        self._draining = True
        for connection in list(self.connections):
            connection.retire()

    async def stop(self) -> None:
        """Closes every connection. A client that still waits for an answer is told that there will be none."""
        if self._listening is None:
            self._socket.close()
            return
        self._listening.cancel()
        await asyncio.wait([self._listening])
        for connection in list(self.connections):
            connection.leave()
        until = loop_time() + CLOSE_WITHIN_S
        while (self.connections or self._tasks) and loop_time() < until:
            await asyncio.sleep(CLOSE_POLL_S)
        for connection in list(self.connections):
            connection.abort()

    async def _listen(self) -> None:
        limits = self._config.router
        server = await asyncio.get_running_loop().create_server(
            self._connection,
            sock=self._socket,
            backlog=BACKLOG,
            ssl=self._ssl,
            ssl_handshake_timeout=limits.http_read_timeout_s if self._ssl else None,
        )
        try:
            await asyncio.get_running_loop().create_future()  # until it is cancelled
        finally:
            server.close()

    def _connection(self) -> Connection:
        connection = Connection(self._app, self._config.router, self._most, self.connections, self._tasks, self._budget, self._stall)
        connection.leaving = self._draining
        return connection

    def _stall(self) -> None:
        self.stalled += 1
