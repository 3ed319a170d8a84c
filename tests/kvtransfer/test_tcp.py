"""What is particular to the TCP transport: who gets in, what a stranger can do, what a request can ask for."""

import os
import socket
import struct
import threading
import time
from contextlib import suppress

import numpy as np
import pytest

from baton.cluster.errors import BatonError
from kvtransfer import tcp_server, tcp_transport, tcp_wire
from kvtransfer.tcp_wire import MAGIC, NONCE_BYTES, OK, OUT_OF_RANGE, PROOF_BYTES, Address, open_connection, proof, receive


@pytest.fixture
def server(make_reader):
    """A transport that serves, in this process so that its threads can be counted, with known bytes."""
    reader = make_reader("tcp")
    reader.pool.array[:] = np.random.default_rng(3).integers(0, 256, size=reader.pool.array.shape, dtype=np.uint8)
    return reader


def target(server) -> Address:
    return Address.parse(server.transport.address())


def dial(server) -> socket.socket:
    return socket.create_connection((target(server).host, target(server).port), timeout=5)


def hear(sock: socket.socket, size: int) -> bytes:
    return receive(sock, size, time.monotonic() + 5)


def drain(sock: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    data = b""
    with sock, suppress(ConnectionResetError):
        while piece := sock.recv(1 << 16):
            data += piece
    return data


def finish(sock: socket.socket) -> None:
    """We have said all; the server may have closed already."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_WR)


def connections(server) -> int:
    return server.transport._server.num_connections


@pytest.mark.parametrize(("key", "admitted"), [("key", True), ("other key", False), ("", False)])
def test_only_the_cluster_key_opens_the_door(key, admitted, make_reader, start_peer):
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
def test_a_reader_that_cannot_prove_the_key_hears_not_a_byte_of_kv(key, what, server):
    """By hand, past all checks of our own reader: it sends a proof, and a request right behind."""
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


def test_the_servers_own_proof_does_not_let_one_in(server):
    """Reflection: a stranger hands back what the server proved itself with."""
    sock = dial(server)
    sock.sendall(MAGIC + os.urandom(NONCE_BYTES))
    answer = hear(sock, NONCE_BYTES + PROOF_BYTES)
    sock.sendall(answer[NONCE_BYTES:] + struct.pack("<II", 1, 0))
    assert drain(sock) == b""


def test_a_server_that_cannot_prove_the_key_is_told_nothing(make_reader, server):
    """The reader's proof, and what it wants, are not for somebody who only sits on the right port."""
    heard = []

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
        there = Address(address.instance, address.num_blocks, address.block_bytes, "127.0.0.1", listener.getsockname()[1])
        with pytest.raises(BatonError, match="another cluster key"):
            make_reader("tcp").transport.connect("impostor:1", there.pack())
        thread.join()
    assert len(heard[0]) == len(MAGIC) + NONCE_BYTES and heard[1] == b""


def test_another_process_behind_the_address_is_refused(make_reader, start_peer):
    """A port is reused by the worker that comes next; its blocks are not those that were leased. Same key, same port, other instance."""
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
def test_garbage_is_answered_with_an_end(garbage, server, monkeypatch):
    monkeypatch.setattr(tcp_wire, "HANDSHAKE_TIMEOUT", 0.3)
    sock = dial(server)
    sock.sendall(garbage)
    finish(sock)
    assert len(drain(sock)) <= NONCE_BYTES + PROOF_BYTES
    open_connection(target(server), b"key", time.monotonic() + 2).close()


def test_strangers_are_few_and_soon_gone(make_reader, monkeypatch):
    monkeypatch.setattr(tcp_server, "MAX_STRANGERS", 4)
    monkeypatch.setattr(tcp_wire, "HANDSHAKE_TIMEOUT", 1.0)
    server, reader = make_reader("tcp"), make_reader("tcp")
    reader.transport.connect("server:1", server.transport.address())
    before = connections(server)
    silent = [dial(server) for _ in range(12)]
    for sock in silent[:2]:
        sock.sendall(MAGIC[:3])  # some begin and stop
    wait_until(lambda: connections(server) == before + 4)
    reader.transport.read("server:1", [1], [1], 5)  # who is in is served
    for sock in silent:
        assert drain(sock) == b""  # turned away at once, or when their time was up
        assert connections(server) <= before + 4
    wait_until(lambda: connections(server) == before)
    make_reader("tcp").transport.connect("server:1", server.transport.address())


def test_a_stranger_cannot_buy_time_with_single_bytes(server, monkeypatch):
    monkeypatch.setattr(tcp_wire, "HANDSHAKE_TIMEOUT", 0.4)
    began = time.monotonic()
    with dial(server) as sock, pytest.raises(OSError):
        while time.monotonic() < began + 5:
            sock.sendall(MAGIC[:1])
            time.sleep(0.02)
    assert time.monotonic() - began < 2


def test_a_request_out_of_range_reads_no_memory(server):
    num_blocks = server.pool.num_blocks
    sock = open_connection(target(server), b"key", time.monotonic() + 5)
    sock.settimeout(5)
    for blocks in ([num_blocks], [0, num_blocks], [2**32 - 1]):
        sock.sendall(struct.pack(f"<I{len(blocks)}I", len(blocks), *blocks))
        assert hear(sock, 1) == OUT_OF_RANGE
    sock.sendall(struct.pack("<II", 1, num_blocks - 1))  # the connection lives
    assert hear(sock, 1 + 4096) == OK + server.pool.array[-1].tobytes()
    sock.sendall(struct.pack("<I", 2**32 - 1))  # more than there are: refused before it is read
    assert drain(sock) == OUT_OF_RANGE


def test_connections_are_used_again_and_bounded(make_reader, server):
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


def test_a_thousand_readers_cost_sockets_and_no_threads(server):
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


def test_the_reader_too_many_is_told_so(make_reader, server, monkeypatch):
    monkeypatch.setattr(tcp_server, "MAX_CONNECTIONS", 2)
    readers = [make_reader("tcp") for _ in range(3)]
    for reader in readers[:2]:
        reader.transport.connect("server:1", server.transport.address())
    with pytest.raises(BatonError, match="as many KV connections as it can"):
        readers[2].transport.connect("server:1", server.transport.address())
    readers[0].transport.read("server:1", [1], [1], 5)  # who is in is served
    readers[0].transport.disconnect("server:1")
    wait_until(lambda: connections(server) == 1)
    readers[2].transport.connect("server:1", server.transport.address())


def test_a_connection_without_a_reader_ends(make_reader, server, monkeypatch):
    monkeypatch.setattr(tcp_server, "IDLE_S", 0.1)
    with open_connection(target(server), b"key", time.monotonic() + 5) as sock:
        assert drain(sock) == b""
    assert connections(server) == 0


def test_an_idle_connection_that_died_is_replaced(make_reader, server, monkeypatch):
    reader = make_reader("tcp")
    reader.transport.connect("server:1", server.transport.address())
    for sock in list(server.transport._server._open):
        sock.shutdown(socket.SHUT_RDWR)  # what a restart of something in between does to it
    time.sleep(0.05)
    reader.transport.read("server:1", [1], [1], 5)
    monkeypatch.setattr(tcp_wire, "IDLE_LIMIT", 0.0)
    opened = []
    monkeypatch.setattr(tcp_wire, "open_connection", lambda *args: opened.append(args) or open_connection(*args))
    reader.transport.read("server:1", [2], [2], 5)
    assert opened  # one that was idle for too long is not trusted, though it looks well
    assert np.array_equal(reader.pool.array[[1, 2]], server.pool.array[[1, 2]])


def test_a_read_of_a_stalled_server_ends_when_all_connections_wait(make_reader, start_peer):
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
    assert not link._busy and not link._idle  # what failed is closed, so that nothing of it can be taken for an answer later


def test_it_listens_where_it_is_told(make_reader):
    reader = make_reader("tcp")
    listener = reader.transport._server.listener
    assert listener.getsockname()[0] == "127.0.0.1"
    told = make_reader("tcp", host="0.0.0.0", advertise="127.0.0.1")
    assert Address.parse(told.transport.address()).host == "127.0.0.1"
    reader.transport.connect("told:1", told.transport.address())


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_ipv6(make_reader):
    try:
        server = make_reader("tcp", host="::1")
    except OSError:
        pytest.skip("no IPv6 loopback")
    server.pool.array[5] = 9
    reader = make_reader("tcp")
    reader.transport.connect("server:1", server.transport.address())
    reader.transport.read("server:1", [5], [6], 5)
    assert (reader.pool.array[6] == 9).all()


def wait_until(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
