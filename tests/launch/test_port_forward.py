"""The listener of `--kubernetes`, over real sockets. What it joins to a router's port is a plain connection here."""

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from baton.cluster.errors import BatonError, Reason
from baton.launch.port_forward import Forward

Open = Callable[[], socket.socket]


@pytest.fixture
def echo() -> Iterator[Open]:
    """Opens a connection to a server that sends back what it gets, in capitals."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(client,), daemon=True).start()

    def answer(client: socket.socket) -> None:
        with client:
            while data := client.recv(1 << 16):
                client.sendall(data.upper())

    threading.Thread(target=serve, daemon=True).start()
    yield lambda: socket.create_connection(listener.getsockname())
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def connect(forward: Forward) -> socket.socket:
    host, _, port = forward.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def read(client: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (piece := client.recv(1 << 16)):
        data += piece
    return data


def test_connections_carry_bytes_both_ways_at_the_same_time(echo: Open) -> None:
    forward = Forward(echo)
    clients = [connect(forward) for _ in range(5)]
    for number, client in enumerate(clients):
        client.sendall(f"number {number}".encode())
    assert [read(client, 8) for client in clients] == [f"NUMBER {number}".encode() for number in range(5)]
    big = b"x" * 3_000_000
    sender = threading.Thread(target=clients[0].sendall, args=(big,), daemon=True)
    sender.start()
    assert read(clients[0], len(big)) == big.upper()
    for client in clients:
        client.close()
    forward.close()


def test_the_first_connection_is_opened_before_anybody_asks_and_its_refusal_is_the_commands(echo: Open) -> None:
    def refused() -> socket.socket:
        raise BatonError(Reason.FORBIDDEN, "you lack the right to create pods/portforward")

    with pytest.raises(BatonError, match="you lack the right"):
        Forward(refused)
    opened: list[socket.socket] = []

    def counted() -> socket.socket:
        opened.append(echo())
        return opened[-1]

    forward = Forward(counted)
    assert len(opened) == 1
    with connect(forward) as first:
        first.sendall(b"a")
        assert read(first, 1) == b"A" and len(opened) == 1, "the first one is used, not thrown away"
        with connect(forward) as second:
            second.sendall(b"b")
            assert read(second, 1) == b"B" and len(opened) == 2
    forward.close()


def test_when_either_end_closes_the_other_one_is_closed(echo: Open) -> None:
    ends: list[socket.socket] = []

    def kept() -> socket.socket:
        near, far = socket.socketpair()
        ends.append(far)
        return near

    forward = Forward(kept)
    client = connect(forward)
    client.close()
    ends[0].settimeout(20)
    assert ends[0].recv(1) == b""
    second = connect(forward)
    second.sendall(b"x")
    while len(ends) < 2:
        threading.Event().wait(0.01)
    ends[1].settimeout(20)
    assert ends[1].recv(1) == b"x"
    ends[1].close()
    assert second.recv(1) == b""
    forward.close()


def test_a_connection_that_cannot_be_opened_is_closed_and_the_next_one_works(echo: Open) -> None:
    calls: list[int] = []

    def sometimes() -> socket.socket:
        calls.append(1)
        if len(calls) == 2:
            raise BatonError(Reason.NO_WORKER, "no router is ready")
        return echo()

    forward = Forward(sometimes)
    for alive in (True, False, True):
        with connect(forward) as client:
            client.sendall(b"a")
            assert read_quietly(client) == (b"A" if alive else b"")
    forward.close()


def read_quietly(client: socket.socket) -> bytes:
    """A connection that is closed with bytes unread is reset."""
    try:
        return client.recv(1)
    except ConnectionResetError:
        return b""


def test_close_ends_every_connection_and_its_threads(echo: Open) -> None:
    """One that were frozen in a library's code at the interpreter's end could abort the process."""
    closed: list[bool] = []
    before = set(threading.enumerate())
    forward = Forward(echo, lambda: closed.append(True))
    clients = [connect(forward) for _ in range(3)]
    for client in clients:
        client.sendall(b"a")
        assert read(client, 1) == b"A"
    forward.close()
    assert [read_quietly(client) for client in clients] == [b""] * 3 and closed == [True]
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("forward")]


def test_after_close_it_accepts_nothing(echo: Open) -> None:
    forward = Forward(echo)
    forward.close()
    with pytest.raises(OSError):
        connect(forward).close()
    forward.close()
