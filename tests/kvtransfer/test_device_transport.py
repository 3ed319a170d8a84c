"""Which way carries KV between two pools on devices. Both ends are in one process; host memory stands for the devices'."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from baton.cluster.errors import BatonError, Reason
from kvtransfer import device_transport, select
from kvtransfer.device_transport import DeviceTransport
from kvtransfer.select import make_transport
from kvtransfer.transport import ReadPending, Route, Transport, transfer_failed

KEY = b"k" * 32
MakeDevice = Callable[[int], Any]
Holders = dict[str, Any]


class Clock:
    """The only time that passes is what reads take."""

    now = 0.0


class Way:
    """Copies between pools of this process: `direct` between the memories of the devices, else between those of their hosts."""

    def __init__(self, name: str, pool: Any, holders: Holders, direct: bool) -> None:
        self.name, self._pool, self._holders, self._direct = name, pool, holders, direct
        self.connected: set[str] = set()
        self.reads: list[list[int]] = []

    def address(self) -> bytes:
        return self.name.encode()

    def backend_detail(self) -> str:
        return "in this process"

    def connect(self, peer: str, address: bytes) -> None:
        assert address == self.address()
        self.connected.add(peer)

    seconds = 1e-5  # for 64 KiB

    def read(self, peer: str, remote: Sequence[int], local: Sequence[int], timeout: float) -> None:
        Clock.now += self.seconds
        self.reads.append(list(local))
        source, target = (self._memory(pool) for pool in (self._holders[peer], self._pool))
        target[list(local)] = source[list(remote)]

    def _memory(self, pool: Any) -> Any:
        return pool._memory.array if self._direct else pool.staged.array

    def route(self, peer: str) -> Route | None:
        return Route(self.name, through_host=not self._direct)

    def disconnect(self, peer: str) -> None:
        self.connected.discard(peer)

    def close(self) -> None:
        self.connected.clear()


class Lies(Way):
    """Delivers blocks in another order."""

    def read(self, peer: str, remote: Sequence[int], local: Sequence[int], timeout: float) -> None:
        super().read(peer, remote, [*local[1:], *local[:1]], timeout)


class Forgets(Way):
    """Copies the first time, then nothing: what was there before is right."""

    def read(self, peer: str, remote: Sequence[int], local: Sequence[int], timeout: float) -> None:
        if not self.reads:
            super().read(peer, remote, local, timeout)


class Fails(Way):
    def connect(self, peer: str, address: bytes) -> None:
        raise transfer_failed("no path between these devices")


class Slow(Way):
    seconds = 1e-3


class Hangs(Way):
    settled = False

    def read(self, peer: str, remote: Sequence[int], local: Sequence[int], timeout: float) -> None:
        if self.settled:
            return super().read(peer, remote, local, timeout)
        raise ReadPending("timed out; bytes may still land", lambda: self.settled)


Pair = Callable[..., DeviceTransport]


@pytest.fixture
def pair(make_device: MakeDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """Returns a reader of the peer "holder:1", over these kinds of ways. `there`: the ways of the holder, if they are others."""
    monkeypatch.setattr(device_transport, "monotonic", lambda: Clock.now)
    opened: list[DeviceTransport] = []

    def make(there: Sequence[str] | None = None, lacking: dict[str, str] | None = None, **kinds: type[Way]) -> DeviceTransport:
        holder, mine = make_device(64), make_device(64)
        holders = {"holder:1": holder}
        for pool, names in ((holder, kinds if there is None else there), (mine, kinds)):
            ways = {name: kinds.get(name, Way)(name, pool, holders, name in ("cuda_ipc", "nixl_vram")) for name in names}
            opened.append(DeviceTransport("auto", pool, ways, lacking if pool is holder else {}))
        holder.array[:] = np.random.default_rng(1).integers(0, 256, holder.array.shape, dtype=np.uint8)
        holder.expose(range(64))
        return opened[-1]

    make.holder = lambda: opened[-2]  # type: ignore[attr-defined]
    yield make
    for transport in opened:
        transport.close()


def connect(pair: Any, reader: DeviceTransport, carrier: str) -> None:
    """By that way the blocks arrive, and no others change."""
    reader.connect("holder:1", pair.holder().address())
    route = reader.route("holder:1")
    assert route is not None and route.carrier == carrier and route.rate > 0
    mine, theirs = reader._pool, pair.holder()._pool
    before = mine.array.copy()  # type: ignore[attr-defined]
    reader.read("holder:1", [5, 60], [2, 63], 5.0)
    if route.through_host:
        mine.take_in([2, 63])
    before[[2, 63]] = theirs.array[[5, 60]]
    assert np.array_equal(mine.array, before)  # type: ignore[attr-defined]
    assert [name for name, way in reader._ways.items() if "holder:1" in way.connected] == [carrier]  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [Lies, Forgets, Fails, Hangs])
def test_a_way_that_lies_or_fails_is_passed_over_with_its_reason_in_one_line(
    kind: type[Way], pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    reader = pair(cuda_ipc=kind, nixl_vram=kind, nixl=kind, tcp=Way)
    with caplog.at_level(logging.INFO):
        connect(pair, reader, "tcp")
    (line,) = [record.getMessage() for record in caplog.records if record.name == device_transport.__name__]
    assert line.startswith("KV from holder:1: tcp, ")
    reason = {
        Lies: "it delivers other bytes",
        Forgets: "it delivers other bytes",
        Fails: "no path between",
        Hangs: "timed out",
    }[kind]
    assert all(f"{way}: {reason}" in line for way in ("cuda_ipc", "nixl_vram", "nixl"))


def test_negative_control_the_first_way_carries_kv_if_nothing_is_wrong_with_it(pair: Pair) -> None:
    for name in ("cuda_ipc", "nixl_vram", "nixl", "tcp"):
        connect(pair, pair(**{name: Way}), name)


def test_a_way_that_is_much_slower_than_another_is_passed_over(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        connect(pair, pair(cuda_ipc=Slow, tcp=Way), "tcp")
    assert "passed over: cuda_ipc: 0.0655 GB/s, where tcp reaches 6.55 GB/s" in caplog.text


def test_nothing_that_carries_kv_is_an_error_that_names_every_reason(pair: Pair) -> None:
    reader = pair(cuda_ipc=Fails, nixl_vram=Lies, there=("cuda_ipc", "nixl_vram"), lacking={"nixl": "no wheel"})
    with pytest.raises(BatonError) as info:
        reader.connect("holder:1", pair.holder().address())  # type: ignore[attr-defined]
    assert info.value.reason is Reason.TRANSFER_FAILED and reader.route("holder:1") is None
    for part in ("cuda_ipc: no path", "nixl_vram: it delivers other bytes", "nixl: holder:1 has none: no wheel"):
        assert part in info.value.message
    with pytest.raises(BatonError, match="not connected"):
        reader.read("holder:1", [0], [0], 1.0)


def test_only_what_both_sides_offer_is_probed(pair: Pair) -> None:
    reader = pair(cuda_ipc=Way, tcp=Way, there=("tcp",), lacking={"cuda_ipc": "the driver refuses"})
    connect(pair, reader, "tcp")
    assert not reader._ways["cuda_ipc"].reads  # type: ignore[attr-defined]


def test_a_probe_that_may_still_write_hurts_no_other(pair: Pair) -> None:
    reader = pair(cuda_ipc=Hangs, tcp=Way)
    connect(pair, reader, "tcp")
    hung, sound = reader._ways["cuda_ipc"], reader._ways["tcp"]
    assert not set(hung.reads[0] if hung.reads else reader._landings["cuda_ipc"]) & set(sound.reads[0])  # type: ignore[attr-defined]
    reader.disconnect("holder:1")
    connect(pair, reader, "tcp")
    assert "holder:1" not in hung.connected  # type: ignore[attr-defined]
    reader.disconnect("holder:1")
    hung.settled = True  # type: ignore[attr-defined]
    reader._unsettled["cuda_ipc"] = lambda: False
    connect(pair, reader, "tcp")  # not before it has settled
    reader.disconnect("holder:1")
    reader._unsettled["cuda_ipc"] = lambda: True
    connect(pair, reader, "cuda_ipc")


def test_a_way_that_breaks_is_probed_anew(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = pair(cuda_ipc=Way, tcp=Way)
    connect(pair, reader, "cuda_ipc")
    reads = len(reader._ways["cuda_ipc"].reads)  # type: ignore[attr-defined]
    reader.connect("holder:1", pair.holder().address())  # type: ignore[attr-defined]
    assert len(reader._ways["cuda_ipc"].reads) == reads, "it works: nothing is probed"  # type: ignore[attr-defined]
    monkeypatch.setattr(Way, "connect", lambda self, peer, address: Fails.connect(self, peer, address) if self._direct else None)
    reader._ways["tcp"].connected.add("holder:1")  # type: ignore[attr-defined]
    connect(pair, reader, "tcp")


def test_no_block_of_a_probe_can_be_read_or_written_as_kv(pair: Pair) -> None:
    reader = pair(tcp=Way)
    connect(pair, reader, "tcp")
    for remote, local in (([64], [0]), ([0], [64]), ([reader._pool.probes[0]], [0])):
        with pytest.raises(BatonError, match="out of range"):
            reader.read("holder:1", remote, local, 1.0)


def test_an_address_that_was_altered_is_refused(pair: Pair) -> None:
    reader = pair(tcp=Way)
    good = pair.holder().address()  # type: ignore[attr-defined]
    for bad in (b"", good[:-1], good[:40] + bytes([good[40] ^ 1]) + good[41:], b"x" * 200):
        with pytest.raises(BatonError, match="not the address of a device transport"):
            reader.connect("holder:1", bad)


@pytest.fixture
def real(make_device: MakeDevice) -> Iterator[Callable[..., Transport]]:
    opened: list[Transport] = []

    def open_one(kind: str, name: str) -> Transport:
        opened.append(make_transport(kind, peer=name, pool=make_device(64), host="127.0.0.1", key=KEY))
        return opened[-1]

    yield open_one
    for transport in opened:
        transport.close()


@pytest.mark.skipif(sys.platform != "linux", reason="NIXL has wheels for Linux only")
@pytest.mark.parametrize(("kind", "carriers"), [("nixl", {"nixl"}), ("auto", {"cuda_ipc", "nixl", "tcp"}), ("tcp", {"tcp"})])
def test_without_cuda_memory_of_a_device_is_not_registered_and_kv_goes_another_way(
    kind: str, carriers: set[str], real: Callable[..., Transport], caplog: pytest.LogCaptureFixture
) -> None:
    """What stands for a device's memory is not one's: NIXL itself refuses it."""
    holder, reader = real(kind, "holder:1"), real(kind, "reader:1")
    reader.connect("holder:1", holder.address())
    route = reader.route("holder:1")
    assert route is not None and route.carrier in carriers and route.rate > 0
    if kind != "tcp":
        assert "KV cannot go by nixl_vram here" in caplog.text and "cannot register the pool as VRAM" in caplog.text
        assert "no nixl_vram: " in reader.backend_detail()


def test_what_is_open_is_closed_when_the_port_is_not_free(make_device: MakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    class Opened:
        def __init__(self, *_: object) -> None: ...

        def close(self) -> None:
            closed.append("cuda_ipc")

    def taken(*_: object, **__: object) -> None:
        raise OSError("address in use")

    monkeypatch.setattr(select, "CudaIpcTransport", Opened)
    monkeypatch.setattr(select, "TcpTransport", taken)
    monkeypatch.setitem(select.WANTED, "auto", ("cuda_ipc", "tcp"))
    with pytest.raises(OSError, match="in use"):
        make_transport("auto", peer="a:1", pool=make_device(8), host="127.0.0.1", key=KEY)
    assert closed == ["cuda_ipc"]
