"""Blocks over plain TCP sockets: any platform, nothing to install, and the reference for what a transport must do.

A connection, in order (integers little-endian, proofs HMAC-SHA256 under the cluster key):

1. reader → server  MAGIC, nonce
2. server → reader  nonce, proof("server", instance, both nonces)     instance: random bytes of this server, part of its address
3. reader → server  proof("reader", instance, both nonces)
4. server → reader  OK, or the connection is closed
5. any number of times: reader → server count, indices of blocks; server → reader OK and the bytes of the blocks, or OUT_OF_RANGE

So both sides prove the key, and the server that it is the process which gave the address, before anything else is said. It is the
peer that is authenticated, not each byte: where others can inject packets, the network has to be encrypted.

Bytes go from the server's pool to the socket and from the socket to the reader's pool; Python makes no copy. A read that fails or
runs out of time closes its connection, so nothing can land later: this transport never raises ReadPending.
"""

import hmac
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np

from baton.cluster.errors import BatonError
from baton.engine.kvcache import KvPool
from kvtransfer.transport import check_blocks, runs, transfer_failed

log = logging.getLogger(__name__)

MAGIC = b"baton-kv-tcp/1\r\n"
NONCE_BYTES = INSTANCE_BYTES = PROOF_BYTES = 32
OK, OUT_OF_RANGE = b"\x01", b"\x02"
ADDRESS = struct.Struct(f"<{len(MAGIC)}s{INSTANCE_BYTES}sQQH")  # MAGIC, instance, num_blocks, block_bytes, port; the host follows
COUNT = struct.Struct("<I")
INDEX = np.dtype("<u4")

# Seconds.
CONNECT_TIMEOUT = 5.0
HANDSHAKE_TIMEOUT = 2.0  # what a server gives a stranger
STALL_TIMEOUT = 30.0  # a reader that takes not a byte for so long loses its connection
IDLE_LIMIT = 30.0  # a connection idle for longer may have been forgotten by something in between, without a word
ACCEPT_POLL = 0.2  # closing a socket does not wake its accept() everywhere

MAX_STRANGERS = 32  # connections that have not proved the key
MAX_READERS = 256  # connections that have; one thread each
BACKLOG = 128  # connections that wait to be accepted, or turned away
CONNECTIONS_PER_PEER = 4  # reads from one peer at the same time; more wait their turn


@dataclass(frozen=True, slots=True)
class _Address:
    instance: bytes
    num_blocks: int
    block_bytes: int
    host: str
    port: int

    def pack(self) -> bytes:
        return ADDRESS.pack(MAGIC, self.instance, self.num_blocks, self.block_bytes, self.port) + self.host.encode()

    @classmethod
    def parse(cls, data: bytes) -> "_Address":
        """Raises BatonError(TRANSFER_FAILED) for what `pack` did not make."""
        try:
            magic, instance, num_blocks, block_bytes, port = ADDRESS.unpack_from(data)
            host = data[ADDRESS.size :].decode("ascii")
        except (struct.error, UnicodeDecodeError) as error:
            raise transfer_failed("not the address of a TCP transport") from error
        if magic != MAGIC or not host.isprintable() or not 0 < len(host) < 256:
            raise transfer_failed("not the address of a TCP transport")
        return cls(instance, num_blocks, block_bytes, host, port)


class TcpTransport:
    """Binds `host`, and tells peers `advertise` (default: the same). `port` 0: any that is free. Raises OSError if it cannot bind."""

    name = "tcp"

    def __init__(self, pool: KvPool, host: str, cluster_key: bytes, *, port: int = 0, advertise: str | None = None) -> None:
        self._pool = pool
        self._key = cluster_key
        self._server = _Server(pool, host, port, cluster_key)
        layout = pool.layout
        self._address = _Address(self._server.instance, pool.num_blocks, layout.block_bytes, advertise or host, self._server.port)
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}
        self._closed = False

    def address(self) -> bytes:
        return self._address.pack()

    def backend_detail(self) -> str:
        return f"plain TCP sockets; serves on {self._address.host} port {self._address.port}"

    def connect(self, peer: str, address: bytes) -> None:
        target = _Address.parse(address)
        if target.block_bytes != self._pool.layout.block_bytes:
            raise transfer_failed(f"blocks have {target.block_bytes} bytes at {peer}, {self._pool.layout.block_bytes} here")
        stale = fresh = None
        with self._lock:
            if self._closed:
                raise transfer_failed("the transport is closed")
            link = self._peers.get(peer)
            if link is None or link.target != target:
                stale, link = link, _Peer(peer, target, self._key)
                fresh = self._peers[peer] = link
        if stale is not None:
            stale.close()
        try:
            with link.connection(time.monotonic() + CONNECT_TIMEOUT):
                pass  # opened, or known to be open: it waits for the first read
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
            _send(sock, COUNT.pack(len(remote)) + np.asarray(remote, dtype=INDEX).tobytes(), deadline)
            if _receive(sock, 1, deadline) != OK:
                raise transfer_failed(f"{peer} refused the read")
            for first, count in runs(local):
                _receive_into(sock, _bytes_of(self._pool, first, count), deadline)

    def carrier(self, peer: str) -> str:
        return self.name

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

    def __init__(self, name: str, target: _Address, key: bytes) -> None:
        self.target = target
        self._name = name
        self._key = key
        self._slots = threading.BoundedSemaphore(CONNECTIONS_PER_PEER)
        self._lock = threading.Lock()
        self._idle: list[tuple[float, socket.socket]] = []  # (idle since, socket), the longest first
        self._busy: set[socket.socket] = set()
        self._closed = False

    @contextmanager
    def connection(self, deadline: float) -> Iterator[socket.socket]:
        """A connection for one exchange. It is used again only if the exchange went well; whatever failed becomes TRANSFER_FAILED."""
        if not self._slots.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise transfer_failed(f"all connections to {self._name} are busy")
        sock = None
        try:
            sock = self._take_idle() or _open(self.target, self._key, deadline)
            with self._lock:
                if self._closed:
                    raise ConnectionAbortedError("disconnected")
                self._busy.add(sock)
            yield sock
            self._put_idle(sock)
            sock = None
        except OSError as error:
            raise transfer_failed(f"{self._name}: {error or type(error).__name__}") from error
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
                _shut(sock)  # wakes the thread that reads, which then closes it
        for _, sock in idle:
            sock.close()

    def _take_idle(self) -> socket.socket | None:
        """The one that was used last, if it is still good."""
        with self._lock:
            idle, self._idle = self._idle, []
            now = time.monotonic()
            stale = [sock for since, sock in idle if now - since > IDLE_LIMIT or not _is_quiet(sock)]
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


class _Server:
    """Serves the pool to whoever proves the key. One thread accepts, one more per connection."""

    def __init__(self, pool: KvPool, host: str, port: int, key: bytes) -> None:
        self.instance = os.urandom(INSTANCE_BYTES)
        self._pool = pool
        self._key = key
        self._strangers = threading.BoundedSemaphore(MAX_STRANGERS)
        self._readers = threading.BoundedSemaphore(MAX_READERS)
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        self._listener.settimeout(ACCEPT_POLL)
        self.port: int = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, name="kv-tcp-accept", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        self._closed = True
        self._acceptor.join()
        with self._lock:
            threads = list(self._connections.values())
            for sock in self._connections:
                _shut(sock)
        for thread in threads:
            thread.join(STALL_TIMEOUT)

    def _accept(self) -> None:
        with self._listener:
            while not self._closed:
                try:
                    sock, _ = self._listener.accept()
                except TimeoutError:
                    continue
                except OSError as error:  # out of descriptors, or it was reset before we came
                    log.warning("cannot accept a KV reader: %s", error)
                    time.sleep(ACCEPT_POLL)
                    continue
                if self._strangers.acquire(blocking=False):
                    thread = threading.Thread(target=self._serve, args=(sock,), name="kv-tcp-serve", daemon=True)
                    with self._lock:
                        self._connections[sock] = thread
                    thread.start()
                else:
                    sock.close()

    def _serve(self, sock: socket.socket) -> None:
        proved = False
        try:
            try:
                self._admit(sock)
            finally:
                self._strangers.release()
            proved = self._readers.acquire(blocking=False)
            if proved:
                _send(sock, OK, time.monotonic() + STALL_TIMEOUT)
                while self._answer(sock):
                    pass
        except OSError as error:
            log.debug("KV reader gone: %s", error)
        finally:
            if proved:
                self._readers.release()
            with self._lock:
                del self._connections[sock]
            sock.close()

    def _admit(self, sock: socket.socket) -> None:
        """Raises OSError unless the other side proves the key in time."""
        deadline = time.monotonic() + HANDSHAKE_TIMEOUT
        _tune(sock)
        hello = _receive(sock, len(MAGIC) + NONCE_BYTES, deadline)
        if not hello.startswith(MAGIC):
            raise ConnectionRefusedError("not a KV reader")
        nonces = hello[len(MAGIC) :] + os.urandom(NONCE_BYTES)
        _send(sock, nonces[NONCE_BYTES:] + _proof(self._key, b"server", self.instance, nonces), deadline)
        if not hmac.compare_digest(_receive(sock, PROOF_BYTES, deadline), _proof(self._key, b"reader", self.instance, nonces)):
            log.warning("a KV reader without the cluster key was refused")
            raise ConnectionRefusedError("no proof of the cluster key")

    def _answer(self, sock: socket.socket) -> bool:
        """One request. False: the connection has to end."""
        (count,) = COUNT.unpack(_receive(sock, COUNT.size, None))
        if count > self._pool.num_blocks:  # before anything is allocated for it
            _send(sock, OUT_OF_RANGE, time.monotonic() + STALL_TIMEOUT)
            return False
        blocks = np.frombuffer(_receive(sock, count * INDEX.itemsize, time.monotonic() + STALL_TIMEOUT), dtype=INDEX)
        if count and int(blocks.max()) >= self._pool.num_blocks:
            _send(sock, OUT_OF_RANGE, time.monotonic() + STALL_TIMEOUT)
            return True
        _send(sock, OK, time.monotonic() + STALL_TIMEOUT)
        for first, size in runs(blocks.tolist()):
            _send(sock, _bytes_of(self._pool, first, size), None)
        return True


def _open(target: _Address, key: bytes, deadline: float) -> socket.socket:
    """A connection on which both sides have proved the key. Raises OSError, or BatonError if the server is not the one wanted."""
    deadline = min(deadline, time.monotonic() + CONNECT_TIMEOUT)
    sock = socket.create_connection((target.host, target.port), timeout=_left(deadline))
    try:
        _tune(sock)
        nonce = os.urandom(NONCE_BYTES)
        _send(sock, MAGIC + nonce, deadline)
        answer = _receive(sock, NONCE_BYTES + PROOF_BYTES, deadline)
        nonces = nonce + answer[:NONCE_BYTES]
        if not hmac.compare_digest(answer[NONCE_BYTES:], _proof(key, b"server", target.instance, nonces)):
            raise ConnectionRefusedError("it has another cluster key, or is not the process that gave the address")
        _send(sock, _proof(key, b"reader", target.instance, nonces), deadline)
        if _receive(sock, 1, deadline) != OK:
            raise ConnectionRefusedError("it does not speak this protocol")
    except BaseException:
        sock.close()
        raise
    return sock


def _proof(key: bytes, side: bytes, instance: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, MAGIC + side + instance + nonces, "sha256")


def _bytes_of(pool: KvPool, first: int, count: int) -> memoryview:
    """The memory of `count` neighbouring blocks."""
    return pool.array[first : first + count].reshape(-1).data


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def _send(sock: socket.socket, data: bytes | memoryview, deadline: float | None) -> None:
    """All of it. Without a deadline, the other side has to take something every STALL_TIMEOUT seconds."""
    view = memoryview(data)
    while view:
        sock.settimeout(STALL_TIMEOUT if deadline is None else _left(deadline))
        view = view[sock.send(view) :]


def _receive_into(sock: socket.socket, view: memoryview, deadline: float | None) -> None:
    while view:
        sock.settimeout(None if deadline is None else _left(deadline))
        count = sock.recv_into(view)
        if count == 0:
            raise ConnectionResetError("closed by the other side")
        view = view[count:]


def _receive(sock: socket.socket, size: int, deadline: float | None) -> bytes:
    data = bytearray(size)
    _receive_into(sock, memoryview(data), deadline)
    return bytes(data)


def _tune(sock: socket.socket) -> None:
    """No delay, and a peer whose host is gone is noticed within seconds. What a platform does not know is left out."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 5000)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _is_quiet(sock: socket.socket) -> bool:
    """Open, and with nothing to read: bytes on an idle connection mean that it ended or that the other side is confused."""
    sock.settimeout(0)
    try:
        sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _shut(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
