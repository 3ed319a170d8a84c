"""Behavior specific to the TCP transport: who is admitted, what a stranger can do, and what a request can ask for."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from baton.cluster.errors import BatonError
from kvtransfer import tcp_server, tcp_transport, tcp_wire
from kvtransfer.tcp_wire import MAGIC, NONCE_BYTES, OK, OUT_OF_RANGE, PROOF_BYTES, TcpAddress, open_connection, proof, receive

if TYPE_CHECKING:
    from tests.kvtransfer.conftest import MakeReader, Reader, StartPeer


@pytest.fixture
def server(make_reader: MakeReader) -> Reader:
    """A transport that serves known bytes from this process, so that its threads can be counted."""
    reader = make_reader("tcp")
    reader.pool.array[:] = np.random.default_rng(3).integers(0, 256, size=reader.pool.array.shape, dtype=np.uint8)
    return reader


def target(server: Reader) -> TcpAddress:
    return TcpAddress.parse(server.transport.address())


def dial(server: Reader) -> socket.socket:
    return socket.create_connection((target(server).host, target(server).port), timeout=5)


def hear(sock: socket.socket, size: int) -> bytes:
    return receive(sock, size, time.monotonic() + 5)


def drain(sock: socket.socket) -> bytes:
    """Everything that arrives until the other side closes."""
    data = b""
    with sock, suppress(ConnectionResetError):
        while piece := sock.recv(1 << 16):
            data += piece
    return data


def finish(sock: socket.socket) -> None:
    """Closes our sending side; the server may have closed already."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_WR)


def connections(server: Reader) -> int:
    count: int = server.transport._server.num_connections
    return count


@pytest.mark.parametrize(("key", "admitted"), [("key", True), ("other key", False), ("", False)])
def test_only_readers_with_the_cluster_key_are_admitted(key: str, admitted: bool, make_reader: MakeReader, start_peer: StartPeer) -> None:
    peer, reader = start_peer("tcp"), make_reader("tcp", key=key)
    if admitted:
        reader.connect(peer)
        reader.read(peer, range(64), range(64))
        assert reader.has(peer, range(64), range(64))
    else:
        with pytest.raises(BatonError):
            reader.connect(peer)
        with pytest.raises(BatonError):
            reader.read(peer, [0], [0])
        assert reader.untouched()


@pytest.mark.parametrize(("key", "what"), [(b"key", "served"), (b"wrong", "nothing")])
def test_a_reader_without_the_key_receives_no_kv(key: bytes, what: str, server: Reader) -> None:
    """Bypasses all checks of our own reader: the test itself sends a proof, with a request right behind it."""
    address, nonce = target(server), os.urandom(NONCE_BYTES)
    sock = dial(server)
    sock.sendall(MAGIC + nonce)
    answer = hear(sock, NONCE_BYTES + PROOF_BYTES)
    nonces = nonce + answer[:NONCE_BYTES]
    assert answer[NONCE_BYTES:] == proof(b"key", b"server", address.instance, nonces)
    sock.sendall(proof(key, b"reader", address.instance, nonces) + struct.pack("<III", 2, 4, 7))
    finish(sock)
    expected = OK + OK + server.pool.array[[4, 7]].tobytes() if what == "served" else b""
    assert drain(sock) == expected


def test_the_servers_own_proof_does_not_admit_a_reader(server: Reader) -> None:
    """Reflection attack: a stranger sends the server's own proof back to it."""
    sock = dial(server)
    sock.sendall(MAGIC + os.urandom(NONCE_BYTES))
    answer = hear(sock, NONCE_BYTES + PROOF_BYTES)
    sock.sendall(answer[NONCE_BYTES:] + struct.pack("<II", 1, 0))
    assert drain(sock) == b""


def test_a_server_that_cannot_prove_the_key_receives_nothing(make_reader: MakeReader, server: Reader) -> None:
    """A process that merely listens on the right port must receive neither the reader's proof nor its request."""
    heard: list[bytes] = []

    def impostor(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock:
            heard.append(sock.recv(1 << 16))
            sock.sendall(os.urandom(NONCE_BYTES + PROOF_BYTES))
            heard.append(drain(sock))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=impostor, args=(listener,))
        thread.start()
        address = target(server)
        there = TcpAddress(address.instance, address.num_blocks, address.block_bytes, "127.0.0.1", listener.getsockname()[1])
        with pytest.raises(BatonError, match="another cluster key"):
            make_reader("tcp").transport.connect("impostor:1", there.pack())
        thread.join()
    assert len(heard[0]) == len(MAGIC) + NONCE_BYTES and heard[1] == b""


def test_another_process_behind_the_address_is_refused(make_reader: MakeReader, start_peer: StartPeer) -> None:
    """The next worker may reuse a port, but its blocks are not the leased ones. Same key, same port, different instance."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    reader, old = make_reader("tcp"), start_peer("tcp", port=port)
    reader.connect(old)
    reader.read(old, [0], [0])
    old.kill()
    new = start_peer("tcp", "peer:2", port=port, seed=2)
    with pytest.raises(BatonError):
        reader.read(old, [1], [1])
    with pytest.raises(BatonError, match="not the process that gave the address"):
        make_reader("tcp").connect(old)
    assert reader.has(old, [0], [0])
    reader.connect(new)
    reader.read(new, range(64), range(64))
    assert reader.has(new, range(64), range(64))


@pytest.mark.parametrize("garbage", [b"", b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100, bytes(range(256)) * 4, MAGIC, MAGIC + bytes(200)])
def test_garbage_closes_the_connection(garbage: bytes, server: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_wire, "HANDSHAKE_TIMEOUT", 0.3)
    sock = dial(server)
    sock.sendall(garbage)
    finish(sock)
    assert len(drain(sock)) <= NONCE_BYTES + PROOF_BYTES
    open_connection(target(server), b"key", time.monotonic() + 2).close()


def test_unproven_connections_are_limited_in_number(make_reader: MakeReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_server, "MAX_STRANGERS", 4)
    monkeypatch.setattr(tcp_wire, "HANDSHAKE_TIMEOUT", 600.0)
    server, reader = make_reader("tcp"), make_reader("tcp")
    reader.transport.connect("server:1", server.transport.address())
    before = connections(server)
    silent = [dial(server) for _ in range(12)]
    for sock in silent[4:]:
        assert drain(sock) == b""  # refused at once
        assert connections(server) <= before + 4
    wait_until(lambda: connections(server) == before + 4)
    reader.transport.read("server:1", [1], [1], 5)  # admitted readers are still served
    for sock in silent[:4]:
        sock.close()
    wait_until(lambda: connections(server) == before)
    make_reader("tcp").transport.connect("server:1", server.transport.address())


def test_a_reader_that_was_admitted_is_no_stranger_any_more(make_reader: MakeReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_server, "MAX_STRANGERS", 1)
    server, slow = make_reader("tcp"), threading.Event()
    monkeypatch.setattr(server.transport._server, "_greeters", ThreadPoolExecutor(2))
    monkeypatch.setattr(tcp_server.TcpServer, "_park", lambda *_: slow.wait(60))  # the thread that admitted a reader is held up
    try:
        for _ in range(2):
            make_reader("tcp").transport.connect("server:1", server.transport.address())
    finally:
        slow.set()


def test_unproven_connections_are_limited_in_time(make_reader: MakeReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_wire, "HANDSHAKE_TIMEOUT", 1.0)
    server = make_reader("tcp")
    before, silent = connections(server), [dial(server) for _ in range(4)]
    for sock in silent[:2]:
        sock.sendall(MAGIC[:3])  # some start the handshake and stop
    for sock in silent:
        assert drain(sock) == b""
    wait_until(lambda: connections(server) == before)


def test_a_stranger_cannot_extend_its_time_by_trickling_bytes(server: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_wire, "HANDSHAKE_TIMEOUT", 0.4)
    began = time.monotonic()
    with dial(server) as sock, pytest.raises(OSError):
        while time.monotonic() < began + 5:
            sock.sendall(MAGIC[:1])
            time.sleep(0.02)
    assert time.monotonic() - began < 2


def test_an_out_of_range_request_reads_no_memory(server: Reader) -> None:
    num_blocks = server.pool.num_blocks
    sock = open_connection(target(server), b"key", time.monotonic() + 5)
    sock.settimeout(5)
    for blocks in ([num_blocks], [0, num_blocks], [2**32 - 1]):
        sock.sendall(struct.pack(f"<I{len(blocks)}I", len(blocks), *blocks))
        assert hear(sock, 1) == OUT_OF_RANGE
    sock.sendall(struct.pack("<II", 1, num_blocks - 1))  # the connection still works
    assert hear(sock, 1 + 4096) == OK + server.pool.array[-1].tobytes()
    sock.sendall(struct.pack("<I", 2**32 - 1))  # more blocks than the pool has: refused before the list is read
    assert drain(sock) == OUT_OF_RANGE


def test_connections_are_reused_and_limited(make_reader: MakeReader, server: Reader) -> None:
    reader = make_reader("tcp")
    reader.transport.connect("server:1", server.transport.address())
    before = connections(server)
    for _ in range(20):
        reader.transport.read("server:1", [1, 2], [3, 4], 5)
    assert connections(server) == before
    threads = [threading.Thread(target=reader.transport.read, args=("server:1", [i], [i], 5)) for i in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert connections(server) <= before - 1 + tcp_transport.CONNECTIONS_PER_PEER
    assert np.array_equal(reader.pool.array[:32], server.pool.array[:32])


def test_a_thousand_readers_use_sockets_but_no_extra_threads(server: Reader) -> None:
    before = threading.active_count()
    socks = [open_connection(target(server), b"key", time.monotonic() + 20) for _ in range(1024)]
    assert connections(server) == 1024
    assert threading.active_count() - before <= tcp_server.MAX_STRANGERS
    for block, sock in enumerate(socks):
        sock.sendall(struct.pack("<II", 1, block % 64))
    for block, sock in enumerate(socks):
        assert hear(sock, 1 + 4096) == OK + server.pool.array[block % 64].tobytes()
    assert threading.active_count() - before <= tcp_server.MAX_STRANGERS + tcp_server.SERVING
    for sock in socks:
        sock.close()
    wait_until(lambda: connections(server) == 0)


def test_a_reader_beyond_the_limit_of_open_files_is_refused_with_the_reason(
    make_reader: MakeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_server, "files_for", lambda wanted: 4)  # two of each reader
    server = make_reader("tcp")
    readers = [make_reader("tcp") for _ in range(3)]
    for reader in readers[:2]:
        reader.transport.connect("server:1", server.transport.address())
    with pytest.raises(BatonError, match="as many KV connections as it can"):
        readers[2].transport.connect("server:1", server.transport.address())
    readers[0].transport.read("server:1", [1], [1], 5)  # admitted readers are still served
    readers[0].transport.disconnect("server:1")
    wait_until(lambda: connections(server) == 1)
    readers[2].transport.connect("server:1", server.transport.address())


def test_an_idle_connection_is_closed(make_reader: MakeReader, server: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_server, "IDLE_S", 0.1)
    with open_connection(target(server), b"key", time.monotonic() + 5) as sock:
        assert drain(sock) == b""
    assert connections(server) == 0


def test_a_dead_idle_connection_is_replaced(make_reader: MakeReader, server: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = make_reader("tcp")
    reader.transport.connect("server:1", server.transport.address())
    for sock in list(server.transport._server._open):
        sock.shutdown(socket.SHUT_RDWR)  # as if a middlebox had restarted
    time.sleep(0.05)
    reader.transport.read("server:1", [1], [1], 5)
    monkeypatch.setattr(tcp_wire, "IDLE_LIMIT", 0.0)
    opened: list[tuple[Any, ...]] = []

    def counted(*args: Any) -> socket.socket:
        opened.append(args)
        return open_connection(*args)

    monkeypatch.setattr(tcp_wire, "open_connection", counted)
    reader.transport.read("server:1", [2], [2], 5)
    assert opened  # a connection that was idle too long is not reused, although it looks healthy
    assert np.array_equal(reader.pool.array[[1, 2]], server.pool.array[[1, 2]])


def test_reads_from_a_stalled_server_time_out_even_when_all_connections_are_busy(make_reader: MakeReader, start_peer: StartPeer) -> None:
    reader, peer = make_reader("tcp"), start_peer("tcp")
    reader.connect(peer)
    peer.stop()
    ended: list[float] = []

    def read() -> None:
        began = time.monotonic()
        with pytest.raises(BatonError):
            reader.read(peer, [0], [0], timeout=0.5)
        ended.append(time.monotonic() - began)

    threads = [threading.Thread(target=read) for _ in range(3 * tcp_transport.CONNECTIONS_PER_PEER)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ended) == len(threads) and max(ended) < 2
    link = reader.transport._peers[peer.name]
    assert not link._busy and not link._idle  # failed connections are closed, so that late bytes cannot be mistaken for an answer


def test_it_listens_on_the_configured_host_and_advertises_the_configured_address(make_reader: MakeReader) -> None:
    reader = make_reader("tcp")
    listener = reader.transport._server.listener
    assert listener.getsockname()[0] == "127.0.0.1"
    told = make_reader("tcp", host="0.0.0.0", advertise="127.0.0.1")
    assert TcpAddress.parse(told.transport.address()).host == "127.0.0.1"
    reader.transport.connect("told:1", told.transport.address())


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_ipv6_works(make_reader: MakeReader) -> None:
    try:
        server = make_reader("tcp", host="::1")
    except OSError:
        pytest.skip("no IPv6 loopback")
    server.pool.array[5] = 9
    reader = make_reader("tcp")
    reader.transport.connect("server:1", server.transport.address())
    reader.transport.read("server:1", [5], [6], 5)
    assert (reader.pool.array[6] == 9).all()


def wait_until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.01)
