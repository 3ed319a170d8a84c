"""The protocol between the two ends of the TCP transport, and how they wait.

A connection, in order (integers little-endian, proofs HMAC-SHA256 under the cluster key):

1. reader → server  MAGIC, nonce
2. server → reader  nonce, proof("server", instance, both nonces)     instance: random bytes of this server, part of its address
3. reader → server  proof("reader", instance, both nonces)
4. server → reader  OK, or FULL, or the connection is closed
5. any number of times: reader → server count, indices of blocks; server → reader OK and the bytes of the blocks, or OUT_OF_RANGE

So before anything else is sent, both sides prove that they have the key, and the server proves that it is the process that gave the
address. This authenticates the peer, not each byte: where others can inject packets or read them, the connection has to be inside TLS
(`Tls`). Then the steps above are its content, and both sides must have TLS: a plain reader and a TLS server do not understand each other.
"""

import hmac
import os
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from baton.engine.core.kvcache import KvPool
from kvtransfer.transport import runs, transfer_failed

MAGIC = b"baton-kv-tcp/2\r\n"
NONCE_BYTES = INSTANCE_BYTES = PROOF_BYTES = 32
OK, OUT_OF_RANGE, FULL = b"\x01", b"\x02", b"\x03"
ADDRESS = struct.Struct(f"<{len(MAGIC)}s{INSTANCE_BYTES}sQQH")  # MAGIC, instance, num_blocks, block_bytes, port; the host follows
COUNT = struct.Struct("<I")
VIEWS = 64  # runs of blocks in one system call
INDEX = np.dtype("<u4")

# Seconds.
CONNECT_TIMEOUT = 5.0
HANDSHAKE_TIMEOUT = 2.0  # how long a server waits for the proof of a new connection
STALL_TIMEOUT = 30.0  # a reader that accepts no byte for this long loses its connection
TLS_PIECE = 256 << 10  # bytes handed to TLS at a time: it reports progress only when all of them are sent, and STALL_TIMEOUT needs progress
IDLE_LIMIT = 30.0  # a device in between may have silently forgotten a connection that is idle for longer: its reader drops it


@dataclass(frozen=True, slots=True)
class Tls:
    """`server` and `client` return the context for the next connection, so that certificates can change. `name`: what a server's
    certificate must contain; None: the address."""

    server: Callable[[], ssl.SSLContext]
    client: Callable[[], ssl.SSLContext]
    name: str | None


@dataclass(frozen=True, slots=True)
class TcpAddress:
    instance: bytes
    num_blocks: int
    block_bytes: int
    host: str
    port: int

    def pack(self) -> bytes:
        return ADDRESS.pack(MAGIC, self.instance, self.num_blocks, self.block_bytes, self.port) + self.host.encode()

    @classmethod
    def parse(cls, data: bytes) -> "TcpAddress":
        """Raises BatonError(TRANSFER_FAILED) for data that `pack` did not make."""
        try:
            magic, instance, num_blocks, block_bytes, port = ADDRESS.unpack_from(data)
            host = data[ADDRESS.size :].decode("ascii")
        except (struct.error, UnicodeDecodeError) as error:
            raise transfer_failed("not the address of a TCP transport") from error
        if magic != MAGIC or not host.isprintable() or not 0 < len(host) < 256:
            raise transfer_failed("not the address of a TCP transport")
        return cls(instance, num_blocks, block_bytes, host, port)


def open_connection(target: TcpAddress, key: bytes, deadline: float, tls: Tls | None = None) -> socket.socket:
    """Opens a connection on which both sides have proved the key. Raises OSError (ssl.SSLError for a certificate that is refused);
    ConnectionRefusedError if the server has another key, is not the process that gave the address, or already serves as many readers as it
    can."""
    deadline = min(deadline, time.monotonic() + CONNECT_TIMEOUT)
    sock = socket.create_connection((target.host, target.port), timeout=left(deadline))
    try:
        tune(sock)
        if tls is not None:
            sock = tls.client().wrap_socket(sock, server_hostname=tls.name or target.host, do_handshake_on_connect=False)
            shake(sock, deadline)
        nonce = os.urandom(NONCE_BYTES)
        send(sock, MAGIC + nonce, deadline)
        answer = receive(sock, NONCE_BYTES + PROOF_BYTES, deadline)
        nonces = nonce + answer[:NONCE_BYTES]
        if not hmac.compare_digest(answer[NONCE_BYTES:], proof(key, b"server", target.instance, nonces)):
            raise ConnectionRefusedError("it has another cluster key, or is not the process that gave the address")
        send(sock, proof(key, b"reader", target.instance, nonces), deadline)
        verdict = receive(sock, 1, deadline)
        if verdict == FULL:
            raise ConnectionRefusedError("it serves as many KV connections as it can")
        if verdict != OK:
            raise ConnectionRefusedError("it does not speak this protocol")
    except BaseException:
        sock.close()
        raise
    return sock


def prove_as_server(sock: socket.socket, key: bytes, instance: bytes) -> bool:
    """Runs steps 1 to 3. Returns False if the other side does not know the key. Raises OSError if it does not answer in time."""
    deadline = time.monotonic() + HANDSHAKE_TIMEOUT
    tune(sock)
    shake(sock, deadline)
    hello = receive(sock, len(MAGIC) + NONCE_BYTES, deadline)
    if not hello.startswith(MAGIC):
        raise ConnectionRefusedError("not a KV reader")
    nonces = hello[len(MAGIC) :] + os.urandom(NONCE_BYTES)
    send(sock, nonces[NONCE_BYTES:] + proof(key, b"server", instance, nonces), deadline)
    return hmac.compare_digest(receive(sock, PROOF_BYTES, deadline), proof(key, b"reader", instance, nonces))


def shake(sock: socket.socket, deadline: float) -> None:
    """The handshake of TLS; nothing for a plain socket."""
    if isinstance(sock, ssl.SSLSocket):
        sock.settimeout(left(deadline))
        sock.do_handshake()


def proof(key: bytes, side: bytes, instance: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, MAGIC + side + instance + nonces, "sha256")


def bytes_of(pool: KvPool, first: int, count: int) -> memoryview:
    """Returns the memory of `count` neighbouring blocks."""
    run: memoryview = pool.array[first : first + count].reshape(-1).data
    return run


def left(deadline: float) -> float:
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("timed out")
    return seconds


def send(sock: socket.socket, data: bytes | memoryview, deadline: float | None) -> None:
    """Sends all of `data`. Without a deadline, the other side must accept at least one byte every STALL_TIMEOUT seconds."""
    view = memoryview(data)
    while view:
        sock.settimeout(STALL_TIMEOUT if deadline is None else left(deadline))
        view = view[sock.send(view[:TLS_PIECE] if isinstance(sock, ssl.SSLSocket) else view) :]


def receive_into(sock: socket.socket, view: memoryview, deadline: float | None) -> None:
    while view:
        sock.settimeout(None if deadline is None else left(deadline))
        count = sock.recv_into(view)
        if count == 0:
            raise ConnectionResetError("closed by the other side")
        view = view[count:]


def send_blocks(sock: socket.socket, pool: KvPool, blocks: Sequence[int]) -> None:
    """Sends blocks, many in one system call; the kernel copies them straight from the pool. The other side must accept at least one byte
    every STALL_TIMEOUT seconds."""
    for views in _batches(sock, pool, blocks):
        if isinstance(sock, ssl.SSLSocket):
            send(sock, views[0], None)
            continue
        while views:
            sock.settimeout(STALL_TIMEOUT)
            views = _rest(views, sock.sendmsg(views))


def receive_blocks(sock: socket.socket, pool: KvPool, blocks: Sequence[int], deadline: float) -> None:
    """Receives blocks straight into the pool, many in one system call."""
    for views in _batches(sock, pool, blocks):
        if isinstance(sock, ssl.SSLSocket):
            receive_into(sock, views[0], deadline)
            continue
        while views:
            sock.settimeout(left(deadline))
            count = sock.recvmsg_into(views)[0]
            if count == 0:
                raise ConnectionResetError("closed by the other side")
            views = _rest(views, count)


def _batches(sock: socket.socket, pool: KvPool, blocks: Sequence[int]) -> Iterator[list[memoryview]]:
    """The memory of the blocks, in order, one run of neighbours at a time for TLS, else VIEWS."""
    views = [bytes_of(pool, first, count) for first, count in runs(blocks)]
    size = 1 if isinstance(sock, ssl.SSLSocket) else VIEWS
    return (views[start : start + size] for start in range(0, len(views), size))


def _rest(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of them after the first `count` bytes."""
    for number, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[number + 1 :]]
        count -= len(view)
    return []


def receive(sock: socket.socket, size: int, deadline: float | None) -> bytes:
    data = bytearray(size)
    receive_into(sock, memoryview(data), deadline)
    return bytes(data)


def tune(sock: socket.socket) -> None:
    """Turns off send delay and detects within seconds that a peer's host is gone. Skips options that the platform lacks."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 5000)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def is_quiet(sock: socket.socket) -> bool:
    """Whether the connection is open with nothing to read: bytes on an idle connection mean that it ended or the other side is confused."""
    sock.settimeout(0)
    try:
        socket.socket.recv(sock, 1, socket.MSG_PEEK)  # under TLS, too: what arrived, not what it means
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def shut(sock: socket.socket) -> None:
    """Wakes the thread that uses the socket. Not `SSLSocket.shutdown`: that ends TLS first, and the thread would go on in clear."""
    with suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
