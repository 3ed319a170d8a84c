"""Host memory under a pool on a device, which itself copies to the slots and from them: no processor touches a unit's bytes.

A slot holds a block and nothing else. Its digest, that of the device, is in the entry; behind the block it makes a whole unit. A block that
comes back is compared with it in the pool, by the device. So what `get` hands on is not verified here: a unit brings its digest along, to
the pool, which is its only reader.

Slots are whole pages, so that what is page-locked ends with a slot. They are locked chunk by chunk, when they are first used, by who
writes: it takes milliseconds, and memory that nobody uses costs nothing.
"""

import logging
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from baton.engine.core.kvcache import Bytes, Channel, Dma, Pool
from baton.tiers.memory_store import MemoryStore
from baton.tiers.slots import SlotEntry
from baton.tiers.store import Unit, Wanted

log = logging.getLogger(__name__)
CHUNK_BYTES = 8 << 20  # that are locked at a time, and the most of one copy, at least one slot: what a step copies waits for no more
NOTHING = memoryview(b"")


def slot_bytes(pool: Pool) -> int:
    """What a unit of this pool takes of the host's memory."""
    return pool.unit_bytes if pool.dma is None else -(-pool.layout.block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def memory_store(pool: Pool, capacity: int) -> MemoryStore:
    """A store in host memory for the units of this pool. Raises ValueError as `MemoryStore` does."""
    return MemoryStore(pool.unit_bytes, capacity) if pool.dma is None else LockedStore(pool, pool.dma, capacity)


class LockedStore(MemoryStore):
    """See `Store`. `put` takes a unit's digest from its end, not from `Unit.digest`."""

    def __init__(self, pool: Pool, dma: Dma, capacity: int) -> None:
        super().__init__(pool.unit_bytes, capacity, slot_bytes(pool))
        self.pins = None  # contexts that are longer than the pool are read by the host
        self._dma = dma
        self._block = pool.layout.block_bytes
        self._chunk = max(1, CHUNK_BYTES // self.slot_bytes)  # slots
        self._locked: dict[int, Callable[[], None] | None] = {}  # chunk that has been used → what unlocks it, unless the driver refused
        self._refused = False
        self._copying = 0  # calls that copy now
        self._guard = threading.Lock()  # over these; never held while something is copied

    def save(self, blocks: Sequence[tuple[bytes, int]], channel: Channel, wanted: Callable[[], bool]) -> list[bytes] | None:
        """Does what `put` does, with blocks (key, block) of the pool. None: when they had been copied, nobody `wanted` them any more, and
        none is held. Raises RuntimeError if the device fails."""
        with self._copies():
            placed = self._slots.reserve([Unit(key, b"", NOTHING) for key, _ in blocks])
            entries, by_key, good = placed.entries, dict(reversed(blocks)), False
            try:
                memory = self._memory_of(entries, lock=True)
                digests = channel.out([by_key[entry.key] for entry in entries], memory)
                good = wanted()
            finally:
                if not good:
                    self._slots.cancel(entries)
        if not good:
            return None
        self._slots.commit(entry._replace(digest=digest) for entry, digest in zip(entries, digests, strict=True))
        return placed.lost

    def find(self, keys: Sequence[bytes]) -> list[SlotEntry | None]:
        return self._slots.find(keys)

    def load(self, entries: Sequence[SlotEntry], blocks: Sequence[int], channel: Channel) -> list[bool]:
        """Copies these to blocks of the pool; which of them are whole there. An entry that has gone meanwhile, and whose slot may have
        another unit, is not. Raises RuntimeError if the device fails."""
        order = sorted(range(len(entries)), key=lambda i: entries[i].slot)  # side by side: few copies
        whole = [False] * len(entries)
        with self._copies():
            memory = self._memory_of([entries[i] for i in order])
            for i, digest in zip(order, channel.into([blocks[i] for i in order], memory), strict=True):
                whole[i] = digest == entries[i].digest
        self._slots.use(entry for entry, good in zip(entries, whole, strict=True) if good)
        return whole

    def put(self, units: Sequence[Unit]) -> list[bytes]:
        with self._copies() as memory:
            placed = self._slots.reserve([unit._replace(digest=bytes(unit.data[self._block :])) for unit in units])
            self._memory_of(placed.entries, lock=True)
            for entry, unit in zip(placed.entries, placed.units, strict=True):
                memory[entry.slot, : self._block] = np.frombuffer(unit.data, np.uint8)[: self._block]
            self._slots.commit(placed.entries)
            return placed.lost

    def get(self, wanted: Sequence[Wanted]) -> list[bool]:
        with self._copies() as memory:
            found = self._slots.find([one.key for one in wanted])
            for entry, one in zip(found, wanted, strict=True):
                if entry is not None:
                    np.frombuffer(one.into, np.uint8)[: self._block] = memory[entry.slot, : self._block]
                    one.into[self._block :] = entry.digest
            self._slots.use(entry for entry in found if entry is not None)
            return [entry is not None for entry in found]

    def close(self) -> None:
        super().close()
        self._unlock()

    @contextmanager
    def _copies(self) -> Iterator[Bytes]:
        """Nothing is unlocked meanwhile."""
        with self._guard:
            memory = self._open()
            self._copying += 1
        try:
            yield memory
        finally:
            with self._guard:
                self._copying -= 1
            self._unlock()

    def _unlock(self) -> None:
        """The last one that leaves a closed store does it."""
        with self._guard:
            over = self._memory is None and not self._copying
            unlocks = list(self._locked.values()) if over else []
            if over:
                self._locked = {}
        for unlock in unlocks:
            if unlock is not None:
                unlock()

    def _memory_of(self, entries: Sequence[SlotEntry], lock: bool = False) -> list[Bytes]:
        """Pieces for a channel: of slots side by side, none in two chunks. `lock`: what of it has not been used before."""
        memory, slots, pieces = self._open(), [entry.slot for entry in entries], list[Bytes]()
        if lock:
            for chunk in sorted({slot // self._chunk for slot in slots} - self._locked.keys()):
                self._lock(chunk, memory[chunk * self._chunk : (chunk + 1) * self._chunk])
        first = 0
        for i in range(1, len(slots) + 1):
            if i == len(slots) or slots[i] != slots[i - 1] + 1 or slots[i] % self._chunk == 0:
                pieces.append(memory[slots[first] : slots[i - 1] + 1])
                first = i
        return pieces

    def _lock(self, chunk: int, memory: Bytes) -> None:
        memory.reshape(-1)[:: mmap.PAGESIZE] = 0  # else the driver would allocate the pages, and other calls would wait for it
        unlock = None
        if not self._refused:
            try:
                unlock = self._dma.lock(memory)
            except RuntimeError as error:
                self._refused = True
                log.warning("the memory under the device's pool is not page-locked, so blocks are copied slowly: %s", error)
        with self._guard:
            self._locked[chunk] = unlock
