"""What is special about CUDA IPC: copies that a device makes by itself, and peers that may die. A device stands in that ends copies when a
test says so; tests/kvtransfer/test_transport.py has the behaviour that all transports share, tests/engine/gpu/test_on_a_device.py the real
memory."""

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from baton.cluster.errors import BatonError, Reason
from baton.engine.core.kvcache import KvLayout, Region
from kvtransfer import cuda_ipc_transport
from kvtransfer.cuda_ipc_transport import PREFIX, SHARED, CudaIpcTransport, Presence, Watch
from kvtransfer.transport import ReadPending

LAYOUT = KvLayout("device", "float32", 4, 1, 1, 8)


class Mapping:
    """A peer's memory, mapped."""


class Device:
    layout = LAYOUT
    region = Region(0, 8, "VRAM")

    def __init__(self) -> None:
        self.done = True
        self.error: Exception | None = None
        self.mapped: list[weakref.ref[Mapping]] = []
        self.copies: list[tuple[list[int], list[int]]] = []

    def share(self) -> bytes:
        return b"memory"

    def open(self, shared: bytes) -> Any:
        if shared != b"memory":
            raise RuntimeError("invalid handle")
        mapping = Mapping()
        self.mapped.append(weakref.ref(mapping))
        return mapping

    def begin_copy(self, peer: Any, remote: Sequence[int], local: Sequence[int]) -> Callable[[], bool]:
        self.copies.append((list(remote), list(local)))

        def ended(kept: object = peer) -> bool:
            if self.error is not None:
                raise self.error
            return self.done

        return ended


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def reader(device: Device) -> Iterator[CudaIpcTransport]:
    transport = CudaIpcTransport(device)
    yield transport
    device.done, device.error = True, None
    transport.close()


@pytest.fixture
def holder() -> Iterator[CudaIpcTransport]:
    transport = CudaIpcTransport(Device())
    yield transport
    transport.close()


def failed(function: Callable[..., object], *arguments: object) -> BatonError:
    with pytest.raises(BatonError) as info:
        function(*arguments)
    assert info.value.reason is Reason.TRANSFER_FAILED
    return info.value


def test_a_copy_that_outlasts_its_deadline_is_pending_until_the_device_ends_it(
    device: Device, reader: CudaIpcTransport, holder: CudaIpcTransport
) -> None:
    reader.connect("holder", holder.address())
    device.done = False
    error = failed(reader.read, "holder", [1, 2], [3, 4], 0.05)
    assert isinstance(error, ReadPending) and not error.settled()
    reader.disconnect("holder")
    gc.collect()
    assert not error.settled() and device.mapped[0]() is not None, "memory was unmapped under a copy"
    device.done = True
    assert error.settled()
    assert device.copies == [([1, 2], [3, 4])]


def test_memory_is_unmapped_after_the_last_copy(device: Device, reader: CudaIpcTransport, holder: CudaIpcTransport) -> None:
    reader.connect("holder", holder.address())
    reader.read("holder", [1], [1], 1.0)
    assert device.mapped[0]() is not None
    reader.disconnect("holder")
    gc.collect()
    assert device.mapped[0]() is None


def test_a_device_that_fails_leaves_nothing_pending(device: Device, reader: CudaIpcTransport, holder: CudaIpcTransport) -> None:
    reader.connect("holder", holder.address())
    device.error = RuntimeError("an illegal memory access was encountered")
    error = failed(reader.read, "holder", [1], [1], 1.0)
    assert not isinstance(error, ReadPending) and "illegal memory access" in str(error)


def test_closing_waits_for_copies_that_are_under_way(device: Device, holder: CudaIpcTransport) -> None:
    reader = CudaIpcTransport(device)
    reader.connect("holder", holder.address())
    device.done = False
    error = failed(reader.read, "holder", [1], [1], 0.01)
    assert isinstance(error, ReadPending)
    closing = threading.Thread(target=reader.close)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    device.done = True
    closing.join(10)
    assert not closing.is_alive() and error.settled()
    assert "closed" in str(failed(reader.read, "holder", [1], [1], 1.0))


def test_closing_gives_up_on_a_device_that_hangs(device: Device, holder: CudaIpcTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_ipc_transport, "CLOSE_TIMEOUT_S", 0.05)
    reader = CudaIpcTransport(device)
    reader.connect("holder", holder.address())
    device.done = False
    failed(reader.read, "holder", [1], [1], 0.01)
    reader.close()


def test_a_peer_that_dies_during_a_copy_fails_the_read(device: Device, reader: CudaIpcTransport) -> None:
    """Whatever lay in its memory then."""
    holder = CudaIpcTransport(Device())
    reader.connect("holder", holder.address())
    device.done = False
    results: list[BatonError] = []
    reading = threading.Thread(target=lambda: results.append(failed(reader.read, "holder", [1], [1], 10.0)))
    reading.start()
    while not device.copies:
        time.sleep(0.001)
    holder.close()
    device.done = True
    reading.join(10)
    assert "has ended" in str(results[0]) and not isinstance(results[0], ReadPending)


def test_memory_that_cannot_be_mapped_or_shared_is_refused_by_name(reader: CudaIpcTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Device()
    monkeypatch.setattr(other, "share", lambda: b"elsewhere")
    holder = CudaIpcTransport(other)
    assert "the memory of holder cannot be mapped: RuntimeError: invalid handle" in str(failed(reader.connect, "holder", holder.address()))
    holder.close()
    assert "does not live on this machine" in str(failed(reader.connect, "holder", holder.address()))

    def refuse() -> bytes:
        raise RuntimeError("operation not supported")

    monkeypatch.setattr(other, "share", refuse)
    assert "operation not supported" in str(failed(CudaIpcTransport, other))


def test_whoever_is_killed_leaves_no_file_for_good() -> None:
    child = os.fork()
    if not child:
        Presence()
        os._exit(0)
    os.waitpid(child, 0)
    living = Presence()  # sweeps
    names = [bytes.fromhex(file.name.removeprefix(PREFIX)) for file in SHARED.glob(f"{PREFIX}*")]
    assert living.name in names
    for name in names:
        watch = Watch(name)
        assert watch.is_there()
        watch.end()
    living.end()
    with pytest.raises(FileNotFoundError):
        Watch(living.name)
