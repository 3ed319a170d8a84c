"""KV inside TLS: no byte of it travels in clear, and only processes of the cluster get any."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import authority
import numpy as np
import pytest

from baton.cluster.config import SecurityConfig
from baton.cluster.errors import BatonError
from baton.worker.kv_tls import kv_tls
from kvtransfer import tcp_wire
from kvtransfer.tcp_wire import TcpAddress

if TYPE_CHECKING:
    from tests.kvtransfer.conftest import MakeReader, Reader

SECRET = b"a key of the fox"  # fills every block


@pytest.fixture
def server(make_reader: MakeReader) -> Reader:
    return filled(make_reader("tls"))


def filled(reader: Reader) -> Reader:
    reader.pool.array[:] = np.frombuffer(SECRET * (reader.pool.array.shape[1] // len(SECRET)), dtype=np.uint8)
    return reader


class Tap:
    """Passes connections on to a server, keeps what went over them, and changes the last byte of each block while `damage` is set."""

    def __init__(self, target: TcpAddress) -> None:
        self.heard = bytearray()
        self.damage = False
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = TcpAddress(
            target.instance, target.num_blocks, target.block_bytes, "127.0.0.1", self._listener.getsockname()[1]
        ).pack()  # fmt: skip
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                ours, _ = self._listener.accept()
                theirs = socket.create_connection((self._target.host, self._target.port))
                threading.Thread(target=self._pass, args=(ours, theirs, False), daemon=True).start()
                threading.Thread(target=self._pass, args=(theirs, ours, True), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket, answers: bool) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 16):
                self.heard += data
                if answers and self.damage and len(data) > 1000:
                    data = data[:-1] + bytes([data[-1] ^ 1])
                other.sendall(data)
        tcp_wire.shut(other)

    def close(self) -> None:
        self._listener.close()


@contextmanager
def tapped(server: Reader) -> Iterator[Tap]:
    tap = Tap(TcpAddress.parse(server.transport.address()))
    try:
        yield tap
    finally:
        tap.close()


@pytest.mark.parametrize("kind", ["tls", "tcp"])
def test_nobody_on_the_way_reads_kv(make_reader: MakeReader, kind: str) -> None:
    """With a negative control: the plain transport."""
    server, reader = filled(make_reader(kind)), make_reader(kind)
    with tapped(server) as tap:
        reader.transport.connect("server:1", tap.address)
        reader.transport.read("server:1", [1, 2, 3], [4, 5, 6], 10)
        assert np.array_equal(reader.pool.array[[4, 5, 6]], server.pool.array[[1, 2, 3]])
        assert len(tap.heard) > 3 * reader.pool.array.shape[1]
        assert (SECRET in bytes(tap.heard)) == (kind == "tcp")


@pytest.mark.parametrize("kind", ["tls", "tcp"])
def test_a_changed_byte_is_not_accepted(make_reader: MakeReader, kind: str) -> None:
    """With a negative control: the plain transport leaves that to the digests of the handoff."""
    server, reader = filled(make_reader(kind)), make_reader(kind)
    with tapped(server) as tap:
        reader.transport.connect("server:1", tap.address)
        reader.transport.read("server:1", [1], [1], 10)  # so that the damage meets a session that stands
        tap.damage = True
        with pytest.raises(BatonError) if kind == "tls" else nullcontext():
            reader.transport.read("server:1", [2], [2], 10)
        assert np.array_equal(reader.pool.array[1], server.pool.array[1])
        assert not np.array_equal(reader.pool.array[2], server.pool.array[2])


@pytest.mark.parametrize("stranger", ["plain", "another authority", "a client of ours", "no certificate"])
def test_only_certificates_of_the_cluster_are_accepted(
    make_reader: MakeReader, server: Reader, certificates: Path, tmp_path: Path, stranger: str
) -> None:
    """All of them have the cluster key."""
    foreign, ca = authority.make(tmp_path / "foreign"), certificates / "ca.pem"

    def showing(cert: Path) -> dict[str, Any]:
        security = SecurityConfig(tls_cert=f"{cert}.pem", tls_key=f"{cert}.key", tls_ca=str(ca))
        return {"kind": "tls", "tls": kv_tls(security)}

    made: dict[str, Callable[[], dict[str, Any]]] = {
        "plain": lambda: {"kind": "tcp"},
        "another authority": lambda: showing(foreign / "server"),
        "a client of ours": lambda: showing(certificates / "client"),
        "no certificate": lambda: {"kind": "tls", "tls": without_certificate(str(ca))},
    }
    options = made[stranger]()
    other = make_reader(**options)
    if stranger != "a client of ours":  # it is of the cluster's authority: it may read, as `docs/security.md` says, but not serve
        with pytest.raises(BatonError):
            other.transport.connect("server:1", server.transport.address())
            other.transport.read("server:1", [1], [1], 5)
        assert other.untouched()
    if stranger != "no certificate":
        reader = make_reader("tls")
        with pytest.raises(BatonError):
            reader.transport.connect("other:1", other.transport.address())


def without_certificate(ca: str) -> tcp_wire.Tls:
    import ssl

    return tcp_wire.Tls(lambda: ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), lambda: ssl.create_default_context(cafile=ca), "baton.internal")


def test_a_certificate_for_another_service_is_refused(make_reader: MakeReader, server: Reader, certificates: Path) -> None:
    reader = make_reader("tls", tls=kv_tls(authority.security(certificates, server_name="other.internal")))
    with pytest.raises(BatonError, match=r"other\.internal"):
        reader.transport.connect("server:1", server.transport.address())


def test_new_certificates_are_used_for_new_connections(make_reader: MakeReader, tmp_path: Path) -> None:
    files, newer = authority.make(tmp_path / "files"), authority.make(tmp_path / "newer")
    server, early, late = (make_reader("tls", tls=kv_tls(authority.security(files))) for _ in range(3))
    early.transport.connect("server:1", server.transport.address())
    authority.replace(files, newer)
    late.transport.connect("server:1", server.transport.address())
    by_new_files = make_reader("tls", tls=kv_tls(authority.security(newer)))
    by_new_files.transport.connect("server:1", server.transport.address())
    early.transport.read("server:1", [1], [1], 5)  # the connection that it has stays good


def test_an_idle_connection_is_reused(make_reader: MakeReader, server: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """TLS sends nothing by itself that would make an idle connection look confused."""
    reader = make_reader("tls")
    opened: list[TcpAddress] = []
    real = tcp_wire.open_connection

    def counted(target: TcpAddress, *more: Any) -> socket.socket:
        opened.append(target)
        return real(target, *more)

    monkeypatch.setattr(tcp_wire, "open_connection", counted)
    reader.transport.connect("server:1", server.transport.address())
    for block in range(20):
        reader.transport.read("server:1", [block], [block], 5)
    assert len(opened) == 1


def test_a_silent_stranger_is_dropped_before_it_holds_a_thread(make_reader: MakeReader, server: Reader) -> None:
    address = TcpAddress.parse(server.transport.address())
    silent = [socket.create_connection((address.host, address.port)) for _ in range(40)]
    for sock in silent[:20]:
        sock.sendall(b"\x16\x03\x01\x02\x00")  # some start a handshake and stop
    began = time.monotonic()
    for sock in silent:
        sock.settimeout(20)
        with suppress(ConnectionResetError):
            while sock.recv(1 << 10):
                pass
        sock.close()
    assert time.monotonic() - began < 20
    reader = make_reader("tls")
    reader.transport.connect("server:1", server.transport.address())
    reader.transport.read("server:1", [1], [1], 5)
