"""Blocks go straight from a device's pool to the host's memory and back, through tiers, too. A block that is wrong does not come back."""

import logging
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from baton.engine.core.colder import TierPolicy
from baton.engine.core.kvcache import Bytes, KvLayout
from baton.tiers.disk_store import DiskStore
from baton.tiers.kind import UnitKind
from baton.tiers.locked_store import LockedStore, memory_store, slot_bytes
from baton.tiers.store import Store
from baton.tiers.tier import Bounds
from baton.tiers.tiers import Tiers

pytest.importorskip("triton")
from baton.engine.gpu.dma import DeviceChannel, DeviceDma
from baton.engine.gpu.pool import DevicePool, rows

LAYOUT = KvLayout("device", "float32", 4, 2, 2, 8)  # blocks of 1 KiB, a quarter of a page
LARGE = KvLayout("device", "bfloat16", 16, 32, 8, 128)  # of 2 MiB
BLOCKS, WITHIN_S = 12, 60.0
LONG = 100_000_000  # cycles, 50 ms: what comes on the stream after it has not been done when the host goes on


class LateChannel(DeviceChannel):
    """A stream that does its work when somebody waits for it, and no sooner; on a device, one that is busy with something else before."""

    def _begin(self, work: Callable[[], None]) -> None:
        if not self._pool.is_cuda:
            self._late = work
            return
        with self._stream.on():
            torch.cuda._sleep(LONG)
        super()._begin(work)

    def _wait(self) -> None:
        if not self._pool.is_cuda:
            self._late()
        else:
            super()._wait()


def make(device: torch.device, layout: KvLayout = LAYOUT, blocks: int = BLOCKS) -> DevicePool:
    torch.manual_seed(1)
    numbers = torch.randn(rows(layout, blocks), *layout.block_shape, device=device)
    return DevicePool(layout, numbers.to(getattr(torch, layout.dtype)))


def content(pool: DevicePool) -> Bytes:
    """uint8 `[blocks, block_bytes]`."""
    return pool._words.cpu().numpy().view(np.uint8).copy()


def memory_of(pool: DevicePool, *slots: int) -> list[Bytes]:
    """Pieces of so many slots, page-locked."""
    pinned = pool._words.is_cuda
    return [torch.zeros(count, slot_bytes(pool), dtype=torch.uint8, pin_memory=pinned).numpy() for count in slots]


def channel(pool: DevicePool, kind: type[DeviceChannel] = DeviceChannel) -> DeviceChannel:
    return kind(pool._words, 4, slot_bytes(pool))


def parts(digests: bytes) -> list[bytes]:
    return [digests[i : i + 16] for i in range(0, len(digests), 16)]


@pytest.mark.parametrize("kind", [DeviceChannel, LateChannel])
def test_blocks_go_to_memory_and_come_back_to_the_blocks_that_are_named(device: torch.device, kind: type[DeviceChannel]) -> None:
    pool = make(device)
    before, ours = content(pool), channel(pool, kind)
    one, two = memory_of(pool, 1, 2)
    assert ours.out([7, 0, 11], [one, two]) == parts(pool.digests([7, 0, 11]))
    assert np.array_equal(np.concatenate([one, two])[:, : LAYOUT.block_bytes], before[[7, 0, 11]])
    assert np.array_equal(content(pool), before)
    assert ours.into([3, 5], [two]) == parts(pool.digests([0, 11]))
    after = before.copy()
    after[[3, 5]] = before[[0, 11]]
    assert np.array_equal(content(pool), after)
    assert ours.out([], []) == ours.into([], []) == []


def test_slots_that_are_not_one_for_each_block_are_refused(device: torch.device) -> None:
    pool = make(device)
    with pytest.raises(ValueError, match="2 slots for 3 blocks"):
        channel(pool).out([1, 2, 3], memory_of(pool, 2))


@pytest.mark.parametrize("way", ["out", "into"])
def test_a_copy_that_nobody_waits_for_has_no_digest(device: torch.device, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: and so it is no block, whatever the call before has left behind."""
    pool = make(device)
    ours, memory = channel(pool, LateChannel), memory_of(pool, 1)
    [digest] = ours.out([7], memory)
    with monkeypatch.context() as patch:
        patch.setattr(LateChannel, "_wait", lambda self: None)
        found = ours.out([7], memory) if way == "out" else ours.into([3], memory)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert found == [bytes(16)] != [digest]


class Reports:
    """Implements `baton.engine.core.colder.Report`."""

    def __init__(self) -> None:
        self._told: deque[str] = deque()
        self.held: set[tuple[str, bytes]] = set()

    def saved(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        self._told.append("saved")

    def landed(self, number: int) -> None:
        self._told.append("landed")

    def given_back(self, blocks: Sequence[int]) -> None: ...

    def moved(self, stored: bool, medium: str, keys: Sequence[bytes]) -> None:
        named = {(medium, key) for key in keys}
        self.held = self.held | named if stored else self.held - named

    def wait_for(self, name: str) -> None:
        until(lambda: name in self._told)
        self._told.remove(name)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.002)


class Opened:
    """Tiers under a pool. One thing at a time: Triton's interpreter keeps the place in the grid for all threads."""

    def __init__(self, pool: DevicePool, tiers: Tiers, reports: Reports) -> None:
        self.pool, self.tiers, self.reports = pool, tiers, reports
        store = tiers.tiers[0].store
        assert isinstance(store, LockedStore)
        self.store = store
        self._numbers = iter(range(100))

    def save(self, *blocks: int) -> None:
        self.tiers.save([(block, key(block)) for block in blocks])
        self.reports.wait_for("saved")

    def load(self, *blocks: int, into: int = 6, medium: str = "host") -> list[bool | None]:
        """Saved before, to other blocks, from `into` on."""
        number = next(self._numbers)
        self.tiers.load(number, [(into + i, key(block), medium) for i, block in enumerate(blocks)], 1.0)
        self.reports.wait_for("landed")
        return self.tiers.end(number)


@contextmanager
def opened(pool: DevicePool, units: int, *below: Store, readers: int = 1) -> Iterator[Opened]:
    reports, first = Reports(), Bounds(readers=readers)
    tiers = Tiers(lambda pool: [(memory_store(pool, units), first), *((store, Bounds()) for store in below)], TierPolicy())
    tiers.open(pool, reports)
    try:
        yield Opened(pool, tiers, reports)
    finally:
        tiers.close()


def key(block: int) -> bytes:
    return block.to_bytes(16, "little")


def test_blocks_go_through_tiers_and_back(device: torch.device) -> None:
    pool = make(device)
    before = content(pool)
    with opened(pool, 8) as ours:
        ours.save(4, 0, 2)
        assert ours.load(0, 4, 2) == [True] * 3
        after = before.copy()
        after[[6, 7, 8]] = before[[0, 4, 2]]
        assert np.array_equal(content(pool), after)
        tally = ours.tiers.told()[0].tally
        assert (tally.written, tally.reads, tally.hits, tally.dropped) == (3, 3, 3, 0)


def test_a_flipped_bit_in_memory_is_found_and_the_block_does_not_count(device: torch.device) -> None:
    with opened(make(device), 8) as ours:
        ours.save(0, 1, 2)
        [entry] = ours.store.find([key(1)])
        assert entry is not None and ours.store._memory is not None
        ours.store._memory[entry.slot, LAYOUT.block_bytes - 1] ^= 4
        assert ours.load(0, 1, 2) == [True, False, True]
        assert ours.reports.held == {("host", key(0)), ("host", key(2))} and ours.store.holds([key(1)]) == [False]
        ours.save(1)
        assert ours.load(1) == [True]


def test_a_slot_that_gets_another_block_while_it_is_read_is_found(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer waits for nobody: it copies into the slot after the reader has found it, and before the device reads it."""
    with opened(make(device), 2) as ours:
        ours.save(0, 1)
        into, times = DeviceChannel.into, [0]

        def slow(self: DeviceChannel, blocks: Sequence[int], memory: Sequence[Bytes]) -> list[bytes]:
            if times[0] == 0:
                times[0] = 1
                ours.save(2)
                assert ours.store.holds([key(0), key(1), key(2)]) == [False, True, True]
            return into(self, blocks, memory)

        monkeypatch.setattr(DeviceChannel, "into", slow)
        assert ours.load(0, 1) == [False, True]
        assert ours.load(2, 1) == [True, True]


def test_a_copy_that_did_not_happen_is_found(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(self: DeviceChannel, blocks: Sequence[int], memory: Sequence[Bytes]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return iter(())

    with opened(make(device), 8) as ours:
        with monkeypatch.context() as patch:
            patch.setattr(DeviceChannel, "_pieces", nothing)
            ours.save(0)
        ours.save(1)
        assert ours.load(0, 1) == [False, True]
        ours.save(0)
        with monkeypatch.context() as patch:
            patch.setattr(DeviceChannel, "_pieces", nothing)
            assert ours.load(0) == [False]
        assert ours.reports.held == {("host", key(1))}


def test_a_save_that_is_given_up_while_it_is_copied_leaves_nothing(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has its block back then, and others fill it."""
    pool, copying, go_on, out = make(device), threading.Event(), threading.Event(), DeviceChannel.out

    def slow(self: DeviceChannel, blocks: Sequence[int], memory: Sequence[Bytes]) -> list[bytes]:
        copying.set()
        assert go_on.wait(WITHIN_S)
        return out(self, blocks, memory)

    with opened(pool, 8) as ours:
        monkeypatch.setattr(DeviceChannel, "out", slow)
        ours.tiers.save([(3, key(3))])
        assert copying.wait(WITHIN_S)
        tier = ours.tiers.tiers[0]
        tier._abandon()
        ours.reports.wait_for("saved")
        pool.flip(3)
        go_on.set()
        ours.save(4)
        assert ours.reports.held == {("host", key(4))} and ours.store.keys() == [key(4)]


def test_a_device_that_fails_turns_the_tier_off_and_it_comes_back(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: DeviceChannel, blocks: Sequence[int], memory: Sequence[Bytes]) -> list[bytes]:
        raise RuntimeError("out of memory")

    with opened(make(device), 8) as ours:
        ours.save(0)
        with monkeypatch.context() as patch:
            patch.setattr(DeviceChannel, "into", fails)
            assert ours.load(0) == [False]
            told = ours.tiers.told()[0]
            assert told.state == "failed" and told.why == "the pool's device does not take blocks: out of memory"
        until(lambda: ours.tiers.tiers[0].on)
        until(lambda: ours.reports.held == {("host", key(0))})
        assert ours.load(0) == [True], "its probe left what it held"


@pytest.mark.parametrize("damaged", [False, True])
def test_what_goes_on_to_a_disk_is_a_whole_unit_that_the_pool_knows_again(device: torch.device, damaged: bool, tmp_path: Path) -> None:
    """Also if it was damaged before it went on: then the pool finds it."""
    pool = make(device)
    before = content(pool)
    with opened(pool, 2, DiskStore(tmp_path / "kv", UnitKind(pool.layout.fingerprint, pool.unit_bytes), 8)) as ours:
        ours.save(0, 1)
        if damaged:
            [entry] = ours.store.find([key(0)])
            assert entry is not None and ours.store._memory is not None
            ours.store._memory[entry.slot, 7] ^= 1
        ours.save(2, 3)
        until(lambda: {("disk", key(0)), ("disk", key(1))} <= ours.reports.held)
        assert ours.load(0, 1, medium="disk") == [not damaged, True]
        assert np.array_equal(content(pool)[7], before[1])
        assert damaged or np.array_equal(content(pool)[6], before[0])
        assert (("disk", key(0)) in ours.reports.held) == (not damaged)


def test_what_cuda_refuses_is_said_and_does_not_stay_for_the_next_launch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls, code, launches = list[tuple[object, ...]](), [0], list[object]()

    def called(*arguments: int) -> int:
        calls.append(arguments)
        return code[0]

    def launch(*_: object, **__: object) -> None:
        launches.append(_)
        raise RuntimeError("CUDA error: the one that was kept")

    cudart = SimpleNamespace(cudaHostRegister=called, cudaHostUnregister=called, cudaGetErrorString=lambda _: "operation not supported")
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch, "zeros", launch)
    dma, memory = DeviceDma(SimpleNamespace(device=torch.device("cuda"))), np.zeros(8192, np.uint8)  # type: ignore[arg-type]
    unlock = dma.lock(memory)
    unlock()
    assert calls == [(memory.ctypes.data, 8192, 0), (memory.ctypes.data,)] and not launches and not caplog.text
    code[0] = 801
    with pytest.raises(RuntimeError, match=r"cudaHostRegister of 8192 bytes: operation not supported \(801\)"):
        dma.lock(memory)
    assert len(launches) == 1
    with caplog.at_level(logging.WARNING):
        unlock()
    assert len(launches) == 2 and "cudaHostUnregister: operation not supported (801)" in caplog.text


@pytest.mark.gpu
def test_on_a_device_blocks_go_to_page_locked_memory_and_come_back_bit_for_bit() -> None:
    pool, order = make(torch.device("cuda"), LARGE, 64), np.random.default_rng(1).permutation(20).tolist()
    before, others = pool._words.clone(), pool.digests(range(30))
    with opened(pool, 32, readers=2) as ours:
        memory = ours.store._memory
        assert memory is not None and pool._words.shape[1] * 8 == slot_bytes(pool) == 2 << 20
        pages = [torch.from_numpy(memory[slot]) for slot in (0, 31)]
        assert not any(page.is_pinned() for page in pages)
        ours.save(*order)
        assert [page.is_pinned() for page in pages] == [True, False], "the last slot has not been used"
        assert ours.load(*range(20), into=30) == [True] * 20
        assert torch.equal(pool._words[30:50], before[:20]) and pool.digests(range(30)) == others
        memory[order.index(7), 12345] ^= 16
        assert ours.load(*range(20), into=40) == [block != 7 for block in range(20)]
        assert ours.store.holds([key(7), key(8)]) == [False, True]
    assert not pages[0].is_pinned(), "and is the system's again"


@pytest.mark.gpu
def test_on_a_device_memory_is_refused_that_is_locked_already_and_the_next_launch_is_none_the_worse() -> None:
    pool = make(torch.device("cuda"))
    memory = np.frombuffer(mmap.mmap(-1, 4 * slot_bytes(pool)), np.uint8).reshape(4, -1)
    unlock = pool.dma.lock(memory)
    with pytest.raises(RuntimeError, match=r"cudaHostRegister of \d+ bytes: .*\(712\)"):
        pool.dma.lock(memory)
    assert int(torch.ones(8, device="cuda").sum()) == 8
    before, ours = content(pool), channel(pool)
    digests = ours.out([3, 4, 5, 6], [memory])
    unlock()
    assert np.array_equal(memory[:, : LAYOUT.block_bytes], before[3:7])
    assert ours.into([8, 9, 10, 11], [memory]) == digests, "the driver copies what is not page-locked, too"
    torch.cuda.synchronize()
