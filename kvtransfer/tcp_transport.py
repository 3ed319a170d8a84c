"""Moves blocks over TCP sockets, inside TLS if the cluster has it. Works on any platform without extra packages, and is the reference for
what a transport must do.

This is the reader's end; `kvtransfer.tcp_server` is the serving end, and `kvtransfer.tcp_wire` defines the protocol between them.

Bytes go from the server's pool to the socket (or its TLS) and from there to the reader's pool; Python makes no copy. A read that fails or
runs out of time closes its connection, so nothing can land later: this transport never raises ReadPending.
"""

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from baton.cluster.errors import BatonError
from baton.engine.core.kvcache import KvPool
from kvtransfer import tcp_wire as wire
from kvtransfer.tcp_server import TcpServer
from kvtransfer.transport import Route, check_blocks, transfer_failed

CONNECTIONS_PER_PEER = 4  # concurrent reads from one peer; further ones wait their turn


class TcpTransport:
    """Binds `host` and advertises `advertise` (default: `host`) to peers. `port` 0: any free port. Raises OSError if it cannot bind."""

    name = "tcp"

    def __init__(
        self,
        pool: KvPool,
        host: str,
        cluster_key: bytes,
        *,
        port: int = 0,
        advertise: str | None = None,
        tls: wire.Tls | None = None,
    ) -> None:
        self._pool = pool
        self._key = cluster_key
        self._tls = tls
        self._server = TcpServer(pool, host, port, cluster_key, tls)
        layout = pool.layout
        self._address = wire.TcpAddress(self._server.instance, pool.num_blocks, layout.block_bytes, advertise or host, self._server.port)
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}
        self._closed = False

    def address(self) -> bytes:
        return self._address.pack()

    def backend_detail(self) -> str:
        kind = "TCP sockets inside TLS" if self._tls else "plain TCP sockets"
        return f"{kind}; serves on {self._address.host} port {self._address.port}"

    def connect(self, peer: str, address: bytes) -> None:
        target = wire.TcpAddress.parse(address)
        if target.block_bytes != self._pool.layout.block_bytes:
            raise transfer_failed(f"blocks have {target.block_bytes} bytes at {peer}, {self._pool.layout.block_bytes} here")
        stale = fresh = None
        with self._lock:
            if self._closed:
                raise transfer_failed("the transport is closed")
            link = self._peers.get(peer)
            if link is None or link.target != target:
                stale, link = link, _Peer(peer, target, self._key, self._tls)
                fresh = self._peers[peer] = link
        if stale is not None:
            stale.close()
        try:
            with link.connection(time.monotonic() + wire.CONNECT_TIMEOUT):
                pass  # opened, or known to be open; kept for the first read
        except BatonError:
            if fresh is not None:
                self._forget(peer, fresh)
            raise

    def read(self, peer: str, remote: Sequence[int], local: Sequence[int], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        with self._lock:
            link = self._peers.get(peer)
        if link is None:
            raise transfer_failed(f"not connected to {peer}")
        check_blocks(remote, link.target.num_blocks, local, self._pool.num_blocks)
        if not remote:
            return
        with link.connection(deadline) as sock:
            wire.send(sock, wire.COUNT.pack(len(remote)) + np.asarray(remote, dtype=wire.INDEX).tobytes(), deadline)
            if wire.receive(sock, 1, deadline) != wire.OK:
                raise transfer_failed(f"{peer} refused the read")
            wire.receive_blocks(sock, self._pool, local, deadline)

    def route(self, peer: str) -> Route:
        return Route("tcp")

    def disconnect(self, peer: str) -> None:
        with self._lock:
            link = self._peers.get(peer)
        if link is not None:
            self._forget(peer, link)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            links = list(self._peers.items())
        for peer, link in links:
            self._forget(peer, link)
        self._server.close()

    def _forget(self, peer: str, link: "_Peer") -> None:
        with self._lock:
            if self._peers.get(peer) is link:
                del self._peers[peer]
        link.close()


class _Peer:
    """The connections to one peer."""

    def __init__(self, name: str, target: wire.TcpAddress, key: bytes, tls: wire.Tls | None) -> None:
        self.target = target
        self._tls = tls
        self._name = name
        self._key = key
        self._slots = threading.BoundedSemaphore(CONNECTIONS_PER_PEER)
        self._lock = threading.Lock()
        self._idle: list[tuple[float, socket.socket]] = []  # (idle since, socket), longest idle first
        self._busy: set[socket.socket] = set()
        self._closed = False

    @contextmanager
    def connection(self, deadline: float) -> Iterator[socket.socket]:
        """Yields a connection for one exchange. It is reused only if the exchange succeeded; an OSError becomes TRANSFER_FAILED."""
        if not self._slots.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise transfer_failed(f"all connections to {self._name} are busy")
        sock = None
        try:
            sock = self._take_idle() or wire.open_connection(self.target, self._key, deadline, self._tls)
            with self._lock:
                if self._closed:
                    raise ConnectionAbortedError("disconnected")
                self._busy.add(sock)
            yield sock
            self._put_idle(sock)
            sock = None
        except OSError as error:
            raise transfer_failed(f"{self._name}: {str(error) or type(error).__name__}") from error
        finally:
            if sock is not None:
                with self._lock:
                    self._busy.discard(sock)
                sock.close()
            self._slots.release()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for sock in self._busy:
                wire.shut(sock)  # wakes the thread that reads, which then closes it
        for _, sock in idle:
            sock.close()

    def _take_idle(self) -> socket.socket | None:
        """Returns the most recently used idle connection that is still good, and closes stale ones."""
        with self._lock:
            idle, self._idle = self._idle, []
            now = time.monotonic()
            stale = [sock for since, sock in idle if now - since > wire.IDLE_LIMIT or not wire.is_quiet(sock)]
            good = [entry for entry in idle if entry[1] not in stale]
            chosen = good.pop()[1] if good else None
            self._idle = good
        for sock in stale:
            sock.close()
        return chosen

    def _put_idle(self, sock: socket.socket) -> None:
        with self._lock:
            self._busy.discard(sock)
            if not self._closed:
                self._idle.append((time.monotonic(), sock))
                return
        sock.close()
