"""Behavior that every transport must have. The peer is always another process."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from baton.cluster.errors import BatonError, Reason
from kvtransfer.transport import ReadPending, runs

if TYPE_CHECKING:
    from tests.kvtransfer.conftest import MakeReader, Peer, Reader, SharedPeers, SharedReaders, StartPeer

Refused = Callable[[], AbstractContextManager[pytest.ExceptionInfo[BatonError]]]
Pair = Callable[[str], "tuple[Reader, Peer]"]

LINUX = ["nixl", "nixl-tcp", "tcp", "tls", "auto", "auto-tcp", "cuda_ipc", "device-vram", "device-tcp"]
KINDS = LINUX if sys.platform == "linux" else ["tcp", "tls", "auto"]
# Where one process may read another's memory: such a copy needs no answer from the peer.
IN_MEMORY = {"nixl", "auto", "cuda_ipc", "device-vram"}
OVER_NETWORK = [kind for kind in KINDS if kind not in IN_MEMORY]  # a stopped process cannot serve these
ON_SOCKETS = {"tcp", "tls", "auto-tcp", "device-tcp"}  # our own sockets: a failed read is never left pending
QUICK = 5.0  # seconds within which a dead peer must be noticed

every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def refused() -> Refused:
    """A block that must raise TRANSFER_FAILED and leave nothing pending."""

    class MustFail:
        def __enter__(self) -> pytest.ExceptionInfo[BatonError]:
            self._raises = pytest.raises(BatonError)
            self._info = self._raises.__enter__()
            return self._info

        def __exit__(self, *exc: Any) -> bool:
            handled = self._raises.__exit__(*exc)
            assert self._info.value.reason is Reason.TRANSFER_FAILED
            assert not isinstance(self._info.value, ReadPending)
            return handled

    return MustFail


@pytest.fixture
def pair(shared_readers: SharedReaders, shared_peers: SharedPeers) -> Pair:
    """Returns (reader, peer), connected, with the reader's pool cleared."""

    def connect(kind: str) -> tuple[Reader, Peer]:
        reader, peer = shared_readers(kind), shared_peers(kind)
        reader.connect(peer)
        reader.clear()
        return reader, peer

    return connect


def test_runs_group_consecutive_blocks() -> None:
    assert list(runs([])) == []
    assert list(runs([4, 5, 6, 2, 2, 1, 2])) == [(4, 3), (2, 1), (2, 1), (1, 2)]


rng = np.random.default_rng(7)
SELECTIONS = {
    "scattered": (rng.permutation(64)[:40].tolist(), rng.permutation(64)[:40].tolist()),
    "contiguous": (list(range(10, 50)), list(range(3, 43))),
    "backwards": (list(range(63, -1, -1)), list(range(64))),
    "repeated": ([5] * 8, list(range(8))),
    "single": ([63], [0]),
    "all": (list(range(64)), list(range(64))),
    "none": ([], []),
}


@every_kind
def test_requested_blocks_arrive_and_no_others_change(kind: str, pair: Pair) -> None:
    reader, peer = pair(kind)
    for name, (remote, local) in SELECTIONS.items():
        reader.clear()
        reader.read(peer, remote, local)
        assert reader.has(peer, remote, local), name


@every_kind
def test_a_read_returns_the_current_bytes(kind: str, pair: Pair) -> None:
    reader, peer = pair(kind)
    for seed in (5, 6):
        peer.fill(seed)
        reader.read(peer, range(64), range(64))
        assert reader.has(peer, range(64), range(64))


@every_kind
def test_eight_threads_can_read_concurrently(kind: str, pair: Pair) -> None:
    reader, peer = pair(kind)
    remote, local = rng.permutation(64), rng.permutation(64)

    def read(part: int) -> None:
        for _ in range(20):
            reader.read(peer, remote[part::8].tolist(), local[part::8].tolist())

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(read, range(8)))
    assert reader.has(peer, remote.tolist(), local.tolist())


@every_kind
def test_two_workers_can_read_from_each_other(kind: str, pair: Pair) -> None:
    reader, peer = pair(kind)
    reader.pool.array[:] = peer.bytes[::-1]
    reader.pool.expose(range(64))
    address, blocks = reader.transport.address().hex(), list(range(64))
    with ThreadPoolExecutor(1) as thread:
        theirs = thread.submit(peer.ask, "read", "shared-reader:1", address, blocks, blocks)
        assert theirs.result(timeout=20) is None
    peer.bytes = peer.bytes[::-1].copy()
    reader.pool.array[:] = 0
    reader.read(peer, blocks, blocks)
    assert np.array_equal(reader.pool.array, peer.bytes)
    peer.fill(1)


MISFITS = [
    ([64], [0]),
    ([-1], [0]),
    ([2**40], [0]),
    ([0], [64]),
    ([0], [-1]),
    ([0, 1], [0]),
    ([0], [0, 1]),
    ([0, 1], [3, 3]),
    ([3, 64], [3, 4]),
]


@every_kind
def test_a_read_that_does_not_fit_the_pools_is_refused_before_any_byte_moves(kind: str, pair: Pair, refused: Refused) -> None:
    reader, peer = pair(kind)
    for remote, local in MISFITS:
        with refused():
            reader.read(peer, remote, local)
        assert reader.untouched()
    reader.read(peer, [0], [0])  # the connection still works
    assert reader.has(peer, [0], [0])


@every_kind
def test_pools_may_differ_in_size(kind: str, start_peer: StartPeer, make_reader: MakeReader, refused: Refused) -> None:
    peer, reader = start_peer(kind, num_blocks=200), make_reader(kind, num_blocks=7)
    reader.connect(peer)
    reader.read(peer, [199, 0, 100], [0, 6, 3])
    assert reader.has(peer, [199, 0, 100], [0, 6, 3])
    with refused():
        reader.read(peer, [200], [0])


@every_kind
def test_an_invalid_address_is_refused(kind: str, make_reader: MakeReader, shared_peers: SharedPeers, refused: Refused) -> None:
    reader, peer = make_reader(kind), shared_peers(kind)
    good = peer.address
    flipped = [good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :] for at in (0, 10, 20, 35, 60, len(good) - 1)]
    both = 4 + int.from_bytes(good[:4], "little")
    over_nixl, over_tcp = good[:both], good[both:]
    for bad in [b"", b"x", os.urandom(300), good[:40], good[:-1], *flipped]:
        if kind == "auto":  # it holds two addresses, and each is valid on its own
            with suppress(BatonError):
                reader.transport.connect("bad:1", bad)
            route = reader.transport.route("bad:1")
            carrier = route and route.carrier
            assert not carrier or (bad.endswith(over_tcp) if carrier == "tcp" else bad.startswith(over_nixl))
            reader.transport.disconnect("bad:1")
        else:
            with refused():
                reader.transport.connect("bad:1", bad)
        with refused():
            reader.transport.read("bad:1", [0], [0], 1)
    assert reader.untouched()
    reader.connect(peer)
    reader.read(peer, [1], [1])
    assert reader.has(peer, [1], [1])


def test_an_address_of_another_transport_is_refused(make_reader: MakeReader, shared_peers: SharedPeers, refused: Refused) -> None:
    for kind, other in permutations(("nixl", "tcp", "auto"), 2):
        with refused():
            make_reader(kind).connect(shared_peers(other))


@every_kind
def test_a_different_block_size_is_refused_at_connect(
    kind: str, make_reader: MakeReader, shared_peers: SharedPeers, refused: Refused
) -> None:
    reader, peer = make_reader(kind, block_kib=8), shared_peers(kind)
    with refused() as info:
        reader.connect(peer)
    assert "4096" in info.value.message and "8192" in info.value.message


@every_kind
def test_only_a_connected_peer_can_be_read(kind: str, pair: Pair, refused: Refused) -> None:
    reader, peer = pair(kind)
    with refused():
        reader.transport.read("nobody:1", [0], [0], 1)
    reader.transport.disconnect("nobody:1")
    reader.transport.disconnect(peer.name)
    with refused():
        reader.read(peer, [0], [0])
    reader.connect(peer)
    reader.connect(peer)
    reader.read(peer, [0], [0])
    assert reader.has(peer, [0], [0])


@every_kind
def test_many_threads_can_connect_to_and_read_one_peer_concurrently(kind: str, make_reader: MakeReader, shared_peers: SharedPeers) -> None:
    reader, peer = make_reader(kind), shared_peers(kind)

    def fetch(block: int) -> None:
        reader.connect(peer)
        reader.read(peer, [block], [block])

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(fetch, range(32)))
    assert reader.has(peer, range(32), range(32))


@every_kind
def test_the_address_of_a_dead_process_is_refused_quickly(
    kind: str, start_peer: StartPeer, make_reader: MakeReader, refused: Refused
) -> None:
    reader, peer = make_reader(kind), start_peer(kind)
    peer.kill()
    began = time.monotonic()
    with refused():
        reader.connect(peer)
    assert time.monotonic() - began < QUICK + 1


@every_kind
def test_reads_fail_quickly_after_the_peer_is_killed(kind: str, start_peer: StartPeer, make_reader: MakeReader, refused: Refused) -> None:
    reader, peer = make_reader(kind), start_peer(kind)
    reader.connect(peer)
    reader.read(peer, [0], [0])
    peer.kill()
    for _ in range(3):
        began = time.monotonic()
        with refused():
            reader.read(peer, range(64), range(64))
        assert time.monotonic() - began < QUICK
    assert reader.has(peer, [0], [0])


@every_kind
def test_a_read_ends_quickly_when_its_peer_is_killed(kind: str, start_peer: StartPeer, make_reader: MakeReader) -> None:
    reader, peer = make_reader(kind, block_kib=64), start_peer(kind, block_kib=64)
    reader.connect(peer)
    peer.stop()  # so the read cannot finish by itself where the peer has to take part
    with ThreadPoolExecutor(1) as thread:
        read = thread.submit(reader.read, peer, range(64), range(64), 30)
        time.sleep(0.2)
        peer.kill()
        error = read.exception(timeout=QUICK)
    if kind in IN_MEMORY and error is None:
        assert reader.has(peer, range(64), range(64))
        return
    assert isinstance(error, BatonError) and error.reason is Reason.TRANSFER_FAILED and not isinstance(error, ReadPending)
    assert reader.still(0.3)


@every_kind
def test_a_restarted_peer_is_a_new_peer(kind: str, start_peer: StartPeer, make_reader: MakeReader, refused: Refused) -> None:
    reader, old = make_reader(kind), start_peer(kind, "peer:1", seed=1)
    reader.connect(old)
    reader.read(old, [0], [0])
    old.kill()
    new = start_peer(kind, "peer:2", seed=2)
    reader.connect(new)
    with refused():
        reader.read(old, [1], [1])
    reader.transport.disconnect(old.name)
    reader.read(new, range(64), range(64))
    assert reader.has(new, range(64), range(64))


@every_kind
def test_a_peer_that_closed_cannot_be_read(kind: str, start_peer: StartPeer, make_reader: MakeReader, refused: Refused) -> None:
    reader, peer = make_reader(kind), start_peer(kind)
    reader.connect(peer)
    peer.ask("close")

    def fails() -> bool:  # an in-memory copy needs no answer, so it works until the closed connection is noticed
        with suppress(BatonError):
            reader.read(peer, [0], [0])
            return False
        return True

    wait_until(fails, QUICK)
    reader.transport.disconnect(peer.name)
    with refused():
        reader.connect(peer)


@pytest.mark.parametrize("kind", sorted(IN_MEMORY & set(KINDS)))
def test_an_in_memory_copy_works_while_the_peer_is_stopped(kind: str, start_peer: StartPeer, make_reader: MakeReader) -> None:
    reader, peer = make_reader(kind), start_peer(kind)
    reader.connect(peer)
    if "copied in memory" not in reader.transport.backend_detail():
        pytest.skip("this host does not let one process read another's memory")
    peer.stop()
    reader.read(peer, range(64), range(64), timeout=2)
    assert reader.has(peer, range(64), range(64))


@pytest.mark.parametrize("kind", OVER_NETWORK)
def test_a_read_from_a_hung_peer_times_out_and_nothing_lands_after_it_settles(
    kind: str, start_peer: StartPeer, make_reader: MakeReader
) -> None:
    reader, peer = make_reader(kind, block_kib=64), start_peer(kind, block_kib=64)
    reader.connect(peer)
    peer.stop()
    began = time.monotonic()
    with pytest.raises(BatonError) as info:
        reader.read(peer, range(64), range(64), timeout=0.3)
    assert 0.3 <= time.monotonic() - began < 2
    assert info.value.reason is Reason.TRANSFER_FAILED
    settled = info.value.settled if isinstance(info.value, ReadPending) else lambda: True
    if kind in ON_SOCKETS:
        assert settled() and reader.untouched()
    peer.resume()
    wait_until(settled)
    assert settled() and reader.still(0.5)
    # The reason for ReadPending: the bytes landed after the read had failed. Blocks reused before `settled` would be overwritten.
    assert reader.has(peer, range(64), range(64)) if kind == "nixl-tcp" else reader.untouched()
    reader.connect(peer)
    reader.read(peer, range(64), range(64))
    assert reader.has(peer, range(64), range(64))


@pytest.mark.parametrize("kind", OVER_NETWORK)
def test_a_pending_read_settles_when_its_hung_peer_dies(kind: str, start_peer: StartPeer, make_reader: MakeReader) -> None:
    reader, peer = make_reader(kind, block_kib=64), start_peer(kind, block_kib=64)
    reader.connect(peer)
    peer.stop()
    with pytest.raises(BatonError) as info:
        reader.read(peer, range(64), range(64), timeout=0.2)
    reader.transport.disconnect(peer.name)
    if isinstance(info.value, ReadPending):
        assert not info.value.settled()
    peer.kill()
    if isinstance(info.value, ReadPending):
        wait_until(info.value.settled)
    assert reader.still(0.3)


@pytest.mark.parametrize("kind", OVER_NETWORK)
@pytest.mark.parametrize("end", ["disconnect", "close"])
def test_a_read_does_not_outlast_its_connection(kind: str, end: str, start_peer: StartPeer, make_reader: MakeReader) -> None:
    reader, peer = make_reader(kind, block_kib=64), start_peer(kind, block_kib=64)
    reader.connect(peer)
    peer.stop()
    with ThreadPoolExecutor(1) as thread:
        read = thread.submit(reader.read, peer, range(64), range(64), 30)
        time.sleep(0.2)
        reader.transport.disconnect(peer.name) if end == "disconnect" else reader.transport.close()
        error = read.exception(timeout=QUICK)
    assert isinstance(error, BatonError) and error.reason is Reason.TRANSFER_FAILED
    if end == "close":
        assert not isinstance(error, ReadPending) or error.settled()
        peer.resume()
        assert reader.still(0.5) and reader.untouched()


@every_kind
def test_a_closed_transport_refuses_calls(kind: str, make_reader: MakeReader, shared_peers: SharedPeers, refused: Refused) -> None:
    reader, peer = make_reader(kind), shared_peers(kind)
    reader.connect(peer)
    reader.transport.close()
    reader.transport.close()
    with refused():
        reader.read(peer, [0], [0])
    with refused():
        reader.connect(peer)
    reader.transport.disconnect(peer.name)
    assert reader.untouched()


@every_kind
def test_close_leaves_no_threads_or_descriptors(kind: str, make_reader: MakeReader, shared_peers: SharedPeers) -> None:
    peer = shared_peers(kind)

    def live() -> None:
        reader = make_reader(kind)
        reader.connect(peer)
        reader.read(peer, range(64), range(64))
        assert peer.ask("read", "reader:1", reader.transport.address().hex(), [0], [0]) is None
        reader.transport.close()

    live()  # opens what the libraries open once and keep
    threads, descriptors = set(threading.enumerate()), open_descriptors()
    for _ in range(3):
        live()
    wait_until(lambda: open_descriptors() <= descriptors)
    assert set(threading.enumerate()) <= threads
    peer.fill(1)


def open_descriptors() -> int:
    """Without those of a `MappedPool`, which lives as long as the test."""
    if not os.path.isdir("/proc/self/fd"):
        return 0
    names = []
    for file in os.scandir("/proc/self/fd"):
        with suppress(OSError):
            names.append(os.readlink(file.path))
    return sum("memfd:device" not in name for name in names)


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.01)
