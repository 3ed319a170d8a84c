"""The choice between NIXL and TCP, made for each peer. Both ends are in one process, with real transports."""

from collections.abc import Iterator

import numpy as np
import pytest

from baton.cluster.errors import BatonError, Reason
from baton.engine.core.kvcache import KvLayout, KvPool
from kvtransfer.auto_transport import AutoTransport
from kvtransfer.nixl_transport import NixlTransport
from kvtransfer.select import make_transport
from kvtransfer.tcp_transport import TcpTransport
from kvtransfer.transport import transfer_failed

KEY = b"k" * 32


def make_pool(fill: int) -> KvPool:
    pool = KvPool(KvLayout("m", "int64", 4, 1, 1, 8), 8)
    pool.array[:] = np.arange(8, dtype=np.uint8)[:, None] * fill
    return pool


class Refusing(NixlTransport):
    """NIXL on a host that forbids processes to read each other's memory."""

    def connect(self, peer: str, address: bytes) -> None:
        raise transfer_failed("UCX reaches it over TCP only")


@pytest.fixture
def peer() -> Iterator[AutoTransport]:
    transport = make_transport("auto", peer="peer:1", pool=make_pool(3), host="127.0.0.1", key=KEY)
    assert isinstance(transport, AutoTransport)
    yield transport
    transport.close()


@pytest.mark.parametrize(("here", "carrier"), [("nixl", "nixl"), ("refusing", "tcp"), ("none", "tcp")])
def test_bytes_arrive_over_either_transport(peer: AutoTransport, here: str, carrier: str) -> None:
    pool = make_pool(0)
    nixl = {"nixl": NixlTransport, "refusing": Refusing}.get(here)
    reader = AutoTransport(nixl("reader:1", pool, "127.0.0.1") if nixl else None, TcpTransport(pool, "127.0.0.1", KEY))
    try:
        reader.connect("peer:1", peer.address())
        reader.read("peer:1", [5, 2], [0, 7], 5.0)
        route = reader.route("peer:1")
        assert route is not None and route.carrier == carrier and route.through_host
        assert (pool.array[0] == 15).all() and (pool.array[7] == 6).all() and not pool.array[1:7].any()
        reader.disconnect("peer:1")
        with pytest.raises(BatonError) as caught:
            reader.read("peer:1", [5], [0], 5.0)
        assert caught.value.reason is Reason.TRANSFER_FAILED
    finally:
        reader.close()


def test_an_invalid_address_is_refused(peer: AutoTransport) -> None:
    for address in (b"", b"\x01", b"\xff\xff\xff\xff", peer.address()[:20]):
        with pytest.raises(BatonError) as caught:
            peer.connect("other:1", address)
        assert caught.value.reason is Reason.TRANSFER_FAILED
