"""The serving end of the TCP transport: sends blocks of the pool to readers that prove the key.

One thread accepts connections and watches the idle ones. Each request is answered by a thread from a thread pool. So a thousand readers
cost a thousand sockets, but only as many threads as there are requests at the same moment.
"""

import logging
import os
import selectors
import socket
import ssl
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np

from baton.cluster.open_files import files_for
from baton.engine.core.kvcache import KvPool
from kvtransfer import tcp_wire as wire

log = logging.getLogger(__name__)

MAX_STRANGERS = 32  # connections that have not proved the key yet; one thread each
MAX_CONNECTIONS = 8192  # connections that have proved the key: twice the 4 connections of each of 1,024 readers
SERVING = 64  # requests answered concurrently; further ones wait for a thread
BACKLOG = 1024  # connections that wait to be accepted or turned away
WATCH_S = 0.2  # how often the watching thread checks whether it should stop
IDLE_S = 120.0  # readers drop connections that are idle for `wire.IDLE_LIMIT`, so one that is idle for this long has lost its reader


class TcpServer:
    def __init__(self, pool: KvPool, host: str, port: int, key: bytes, tls: wire.Tls | None = None) -> None:
        self.instance = os.urandom(wire.INSTANCE_BYTES)
        self._pool = pool
        self._key = key
        self._tls = tls
        self._most = files_for(2 * MAX_CONNECTIONS) // 2  # a reader holds a connection of gRPC as well
        self._strangers = threading.BoundedSemaphore(MAX_STRANGERS)
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()  # all connections
        self._admitted: set[socket.socket] = set()  # those that proved the key
        self._to_park: deque[socket.socket] = deque()  # no longer in use: the watching thread takes them back
        self._closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.listener = socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=host == "::")
        self.listener.setblocking(False)
        self.port: int = self.listener.getsockname()[1]
        self._wakeup, self._wake = socket.socketpair()
        self._wakeup.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._greeters = ThreadPoolExecutor(MAX_STRANGERS, "kv-tcp-greet")
        self._servers = ThreadPoolExecutor(SERVING, "kv-tcp-serve")
        self._watcher = threading.Thread(target=self._watch, name="kv-tcp-watch", daemon=True)
        self._watcher.start()

    @property
    def num_connections(self) -> int:
        with self._lock:
            return len(self._open)

    def close(self) -> None:
        self._closed = True
        self._watcher.join()
        with self._lock:
            for sock in self._open:
                wire.shut(sock)  # wakes the thread that answers, which then closes it
        for threads in (self._greeters, self._servers):
            threads.shutdown(cancel_futures=True)
        with self._lock:
            left, self._open = self._open, set()
        for sock in left:
            sock.close()
        self._wakeup.close()
        self._wake.close()

    def _watch(self) -> None:
        """Accepts connections, parks those not in use, hands over those with a request, and drops those that were idle for too long."""
        idle_since: dict[socket.socket, float] = {}
        self._selector.register(self.listener, selectors.EVENT_READ)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        with self.listener, self._selector:
            while not self._closed:
                for key, _ in self._selector.select(WATCH_S):
                    assert isinstance(key.fileobj, socket.socket)
                    self._on_readable(key.fileobj, idle_since)
                now = time.monotonic()
                while self._to_park:
                    sock = self._to_park.popleft()
                    self._selector.register(sock, selectors.EVENT_READ)
                    idle_since[sock] = now
                for sock in [sock for sock, since in idle_since.items() if now - since > IDLE_S]:
                    self._selector.unregister(sock)
                    del idle_since[sock]
                    self._drop(sock)

    def _on_readable(self, sock: socket.socket, idle_since: dict[socket.socket, float]) -> None:
        if sock is self.listener:
            self._accept()
        elif sock is self._wakeup:
            with suppress(BlockingIOError):
                self._wakeup.recv(4096)
        else:
            self._selector.unregister(sock)
            del idle_since[sock]
            self._servers.submit(self._serve, sock)

    def _accept(self) -> None:
        try:
            sock, _ = self.listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # out of descriptors, or the connection was reset before we accepted it
            log.warning("cannot accept a KV reader: %s", error)
            time.sleep(WATCH_S)
            return
        if not self._strangers.acquire(blocking=False):
            sock.close()
            return
        if self._tls is not None:
            try:
                sock = self._tls.server().wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            except OSError as error:  # gone already
                log.debug("KV reader gone: %s", error)
                self._strangers.release()
                return
        with self._lock:
            self._open.add(sock)
        self._greeters.submit(self._greet, sock)

    def _greet(self, sock: socket.socket) -> None:
        """Parks a connection that proves the key. If there are too many, tells the reader so and drops the connection."""
        try:
            try:
                proved = wire.prove_as_server(sock, self._key, self.instance)
            finally:
                self._strangers.release()  # before the reader is told, so that its next connection is not turned away
            if not proved:
                log.warning("a KV reader without the cluster key was refused")
                self._drop(sock)
                return
            with self._lock:
                room = len(self._admitted) < self._most
                if room:
                    self._admitted.add(sock)
            wire.send(sock, wire.OK if room else wire.FULL, time.monotonic() + wire.HANDSHAKE_TIMEOUT)
            if room:
                self._park(sock)
            else:
                log.warning("a KV reader was turned away: %d connections are open", self._most)
                self._drop(sock)
        except ssl.SSLError as error:
            log.warning("a KV reader was refused: %s", error)
            self._drop(sock)
        except OSError as error:
            log.debug("KV reader gone: %s", error)
            self._drop(sock)

    def _serve(self, sock: socket.socket) -> None:
        try:
            if self._answer(sock):
                self._park(sock)
                return
        except OSError as error:
            log.debug("KV reader gone: %s", error)
        self._drop(sock)

    def _answer(self, sock: socket.socket) -> bool:
        """Answers one request. Returns False if the connection has to be closed."""
        deadline = time.monotonic() + wire.STALL_TIMEOUT
        (count,) = wire.COUNT.unpack(wire.receive(sock, wire.COUNT.size, deadline))
        if count > self._pool.num_blocks:  # before anything is allocated for it
            wire.send(sock, wire.OUT_OF_RANGE, deadline)
            return False
        blocks = np.frombuffer(wire.receive(sock, count * wire.INDEX.itemsize, deadline), dtype=wire.INDEX)
        if count and int(blocks.max()) >= self._pool.num_blocks:
            wire.send(sock, wire.OUT_OF_RANGE, deadline)
            return True
        wire.send(sock, wire.OK, deadline)
        wire.send_blocks(sock, self._pool, blocks.tolist())
        return True

    def _park(self, sock: socket.socket) -> None:
        self._to_park.append(sock)
        with suppress(OSError):  # closing
            self._wake.send(b"\0")

    def _drop(self, sock: socket.socket) -> None:
        with self._lock:
            self._open.discard(sock)
            self._admitted.discard(sock)
        sock.close()
