"""Units in host memory: one allocation of so many slots, so that nothing is ever fragmented."""

import mmap
import os
from collections.abc import Sequence

import numpy as np
from xxhash import xxh3_128_digest

from baton.engine.core.block_key import HOST
from baton.engine.core.kvcache import Bytes
from baton.engine.core.pages import in_huge_pages
from baton.tiers.slots import Pins, Slots
from baton.tiers.store import StoreFailed, Unit, Wanted


class MemoryStore:
    """See `Store`."""

    medium = HOST

    def __init__(self, unit_bytes: int, capacity: int, slot_bytes: int | None = None) -> None:
        """Pages are allocated at their first touch. Raises ValueError for more than the machine has."""
        slot_bytes = unit_bytes if slot_bytes is None else slot_bytes
        if unit_bytes < 1 or capacity < 1:
            raise ValueError(f"no room for a unit of {unit_bytes} bytes in {capacity * slot_bytes} bytes of memory")
        size, most = capacity * slot_bytes, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if size > most:
            raise ValueError(f"{size} bytes of memory are more than this machine has: {most}")
        self.unit_bytes, self.slot_bytes, self.capacity = unit_bytes, slot_bytes, capacity
        memory = in_huge_pages(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        # uint8 [capacity, slot_bytes]; NumPy copies without the interpreter's lock
        self._memory: Bytes | None = np.frombuffer(memory, np.uint8).reshape(capacity, slot_bytes)
        self.pins: Pins | None = Pins()
        self._slots = Slots(capacity, self.pins)

    def keys(self) -> list[bytes]:
        return self._slots.keys()

    def holds(self, keys: Sequence[bytes]) -> list[bool]:
        return self._slots.holds(keys)

    def put(self, units: Sequence[Unit]) -> list[bytes]:
        memory = self._open()
        placed = self._slots.reserve(units)
        for entry, unit in zip(placed.entries, placed.units, strict=True):
            memory[entry.slot] = np.frombuffer(unit.data, np.uint8)
        self._slots.commit(placed.entries)
        return placed.lost

    def get(self, wanted: Sequence[Wanted]) -> list[bool]:
        memory, found = self._open(), self._slots.find([one.key for one in wanted])
        good = [False] * len(wanted)
        for i, entry in enumerate(found):
            if entry is None:
                continue
            into = np.frombuffer(wanted[i].into, np.uint8)
            into[:] = memory[entry.slot]
            good[i] = xxh3_128_digest(wanted[i].into) == entry.digest
            if not good[i]:
                self._slots.lose(entry)
        self._slots.use(entry for entry, whole in zip(found, good, strict=True) if entry is not None and whole)
        return good

    def drop(self, keys: Sequence[bytes]) -> None:
        self._slots.forget(keys)

    def close(self) -> None:
        self._memory = None
        self._slots.restore([])

    def _open(self) -> Bytes:
        if self._memory is None:
            raise StoreFailed("it is closed")
        return self._memory
