"""Host memory under a device's pool: nothing is verified in it, and no block that is wrong comes back from it."""

import mmap
import threading
from collections.abc import Callable

import numpy as np
import pytest
from stand_in_dma import StandInPool

from baton.engine.core.kvcache import DIGEST_BYTES, Channel, KvLayout, KvPool
from baton.tiers import locked_store
from baton.tiers.locked_store import LockedStore, memory_store, slot_bytes
from baton.tiers.memory_store import MemoryStore
from baton.tiers.store import StoreFailed, Unit, Wanted

LAYOUT = KvLayout("toy", "int64", 4, 1, 1, 80)  # blocks of 5,120 bytes: no whole pages
PAGE, CAPACITY, BLOCKS = mmap.PAGESIZE, 12, 40
SLOT = -(-LAYOUT.block_bytes // PAGE) * PAGE
WITHIN_S = 20.0


class Bench:
    """A store of a few slots in chunks of four."""

    def __init__(self) -> None:
        self.pool = StandInPool(LAYOUT, BLOCKS)
        made = memory_store(self.pool, CAPACITY)
        assert isinstance(made, LockedStore)
        self.store, self.dma = made, self.pool.dma
        self.channel: Channel = self.dma.channel(CAPACITY, SLOT)

    def save(self, *blocks: int, wanted: Callable[[], bool] = lambda: True) -> list[bytes] | None:
        return self.store.save([(key(block), block) for block in blocks], self.channel, wanted)

    def load(self, *blocks: int, into: int = 20) -> list[bool]:
        """Into other blocks, from `into` on. Asserts that what is whole has the bytes that left."""
        entries = [entry for entry in self.store.find([key(block) for block in blocks]) if entry is not None]
        assert len(entries) == len(blocks)
        whole = self.store.load(entries, range(into, into + len(blocks)), self.channel)
        for i, (block, good) in enumerate(zip(blocks, whole, strict=True)):
            assert good == np.array_equal(self.pool.array[into + i], self.pool.array[block])
        return whole

    def held(self) -> list[int]:
        return sorted(map(lambda each: int.from_bytes(each, "little"), self.store.keys()))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(locked_store, "CHUNK_BYTES", 4 * SLOT)
    return Bench()


def key(block: int) -> bytes:
    return block.to_bytes(16, "little")


def slot_of(bench: Bench, block: int) -> int:
    [entry] = bench.store.find([key(block)])
    assert entry is not None
    return entry.slot


def damage(bench: Bench, block: int, byte: int = 0) -> None:
    assert bench.store._memory is not None
    bench.store._memory[slot_of(bench, block), byte] ^= 1


def test_the_pool_says_which_store_it_has() -> None:
    host, device = KvPool(LAYOUT, 4), StandInPool(LAYOUT, 4)
    assert type(memory_store(host, 3)) is MemoryStore and slot_bytes(host) == host.unit_bytes == LAYOUT.block_bytes
    assert slot_bytes(device) == SLOT and SLOT % PAGE == 0
    with pytest.raises(ValueError, match="no room for a unit"):
        memory_store(device, 0)


def test_what_leaves_the_pool_comes_back(bench: Bench) -> None:
    assert bench.save(3, 1, 2) == [] and bench.held() == [1, 2, 3]
    assert bench.load(2, 3) == [True] * 2 and bench.load(1) == [True]


def test_the_longest_unused_goes_first_and_is_said(bench: Bench) -> None:
    assert bench.save(*range(CAPACITY)) == [] and bench.load(0, 2) == [True] * 2
    assert bench.save(12, 13) == [key(1), key(3)]
    assert bench.held() == [0, 2, *range(4, 14)] and all(bench.load(*range(4, 14)))


def test_a_key_that_is_held_stays_as_it_is(bench: Bench) -> None:
    bench.save(1)
    assert bench.store.save([(key(1), 2), (key(3), 3), (key(3), 4)], bench.channel, lambda: True) == []
    assert bench.load(1, 3) == [True] * 2


@pytest.mark.parametrize("byte", [0, LAYOUT.block_bytes - 1])
def test_a_flipped_bit_in_a_slot_is_found(bench: Bench, byte: int) -> None:
    bench.save(1, 2, 3)
    damage(bench, 2, byte)
    assert bench.load(1, 2, 3) == [True, False, True]
    damage(bench, 2, byte)
    assert bench.load(1, 2, 3) == [True] * 3, "negative control: that bit was what was found"


def test_a_slot_that_gets_another_unit_while_it_is_read_is_found(bench: Bench) -> None:
    bench.save(*range(CAPACITY))
    taken = slot_of(bench, 0)

    def others() -> None:
        assert bench.save(CAPACITY) == [key(0)] and slot_of(bench, CAPACITY) == taken

    bench.dma.before = others
    assert bench.load(0, 1) == [False, True]
    bench.dma.before = lambda: None
    assert bench.load(CAPACITY, 1) == [True] * 2


@pytest.mark.parametrize("way", ["out", "into"])
def test_a_copy_that_did_not_happen_is_found(bench: Bench, way: str) -> None:
    bench.dma.skips = {way}
    bench.save(1, 2)
    assert bench.load(1, 2) == [False] * 2


def test_a_save_that_nobody_wants_any_more_leaves_nothing(bench: Bench) -> None:
    assert bench.save(1, 2, wanted=lambda: False) is None and bench.held() == []
    assert bench.save(*range(CAPACITY)) == [] and len(bench.held()) == CAPACITY, "no room is lost"


def test_a_device_that_fails_leaves_no_unit_and_takes_no_room(bench: Bench) -> None:
    bench.dma.fails = True
    with pytest.raises(RuntimeError, match="has failed"):
        bench.save(1, 2)
    bench.dma.fails = False
    assert bench.held() == [] and bench.save(*range(CAPACITY)) == []
    bench.dma.fails = True
    with pytest.raises(RuntimeError, match="has failed"):
        bench.load(1)


def test_slots_side_by_side_are_one_copy_that_covers_no_two_chunks(bench: Bench) -> None:
    bench.save(*range(9))
    assert bench.dma.pieces == [4, 4, 1]
    bench.dma.pieces.clear()
    bench.store.drop([key(1), key(6)])
    assert bench.load(8, 3, 2, 0, 4, 5) == [True] * 6, "in the order of the slots, into the blocks that were named"
    assert bench.dma.pieces == [1, 2, 2, 1]
    bench.dma.pieces.clear()
    assert bench.save(30, 31, 32) == [] and bench.dma.pieces == [1, 1, 1]


def test_memory_is_locked_when_its_slots_are_first_used(bench: Bench) -> None:
    memory, locked = bench.store._memory, bench.dma.locked
    assert memory is not None and not locked, "no page before it is needed"
    bench.save(0)
    assert locked == {memory.ctypes.data: 4 * SLOT} and memory.ctypes.data % PAGE == 0
    bench.save(1, 2, 3)
    assert len(locked) == 1
    bench.save(*range(4, CAPACITY))
    assert locked == {memory.ctypes.data + chunk * 4 * SLOT: 4 * SLOT for chunk in range(3)}
    bench.save(20, 21)
    assert bench.dma.asked == 3
    bench.store.close()
    assert not locked


def test_the_last_chunk_ends_with_the_last_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locked_store, "CHUNK_BYTES", 5 * SLOT)
    bench = Bench()
    bench.save(*range(CAPACITY))
    assert list(bench.dma.locked.values()) == [5 * SLOT, 5 * SLOT, 2 * SLOT] and bench.load(0, 5, 11) == [True] * 3


def test_what_is_locked_later_keeps_what_was_there(bench: Bench) -> None:
    """A unit of bytes, as a probe puts it, is the first in its chunk."""
    data = np.random.default_rng(2).bytes(bench.store.unit_bytes)
    assert bench.store.put([Unit(key(1), b"", memoryview(data))]) == [] and len(bench.dma.locked) == 1
    bench.save(2, 3)
    copy = bytearray(len(data))
    assert bench.store.get([Wanted(key(1), memoryview(copy))]) == [True] and copy == data


def test_if_the_driver_refuses_it_is_said_once_and_blocks_are_copied_all_the_same(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.save(0)
    bench.dma.refuses = True
    bench.save(*range(1, CAPACITY))
    assert bench.dma.asked == 2 and caplog.text.count("not page-locked") == 1 and "the driver refuses" in caplog.text
    assert all(bench.load(*range(CAPACITY)))
    bench.store.close()
    assert not bench.dma.locked


def test_nothing_is_unlocked_while_it_is_copied(bench: Bench) -> None:
    bench.save(1)
    reading, go_on, said = threading.Event(), threading.Event(), list[bool]()

    def wait() -> None:
        reading.set()
        assert go_on.wait(WITHIN_S)

    bench.dma.before = wait
    reader = threading.Thread(target=lambda: said.extend(bench.load(1)))
    reader.start()
    assert reading.wait(WITHIN_S)
    bench.store.close()
    assert bench.dma.locked, "the device may still read it"
    go_on.set()
    reader.join(WITHIN_S)
    assert said == [True] and not bench.dma.locked


def test_a_closed_store_refuses(bench: Bench) -> None:
    bench.save(1)
    [entry] = bench.store.find([key(1)])
    assert entry is not None
    bench.store.close()
    with pytest.raises(StoreFailed, match="closed"):
        bench.save(2)
    with pytest.raises(StoreFailed, match="closed"):
        bench.store.load([entry], [20], bench.channel)
    bench.store.close()
    assert bench.held() == []


def test_what_is_handed_on_is_a_whole_unit(bench: Bench) -> None:
    """A block and its digest; put into such a store, it comes back to the pool."""
    bench.save(1)
    unit = memoryview(bytearray(bench.store.unit_bytes))
    assert bench.store.get([Wanted(key(1), unit), Wanted(key(2), memoryview(bytearray(len(unit))))]) == [True, False]
    assert unit[: LAYOUT.block_bytes] == bench.pool.block(1) and len(unit) == LAYOUT.block_bytes + DIGEST_BYTES
    bench.store.drop([key(1)])
    bench.store.put([Unit(key(1), b"", unit)])
    assert bench.load(1) == [True]
    unit[-1] ^= 1
    bench.store.drop([key(1)])
    bench.store.put([Unit(key(1), b"", unit)])
    [entry] = bench.store.find([key(1)])
    assert entry is not None and bench.store.load([entry], [20], bench.channel) == [False]
