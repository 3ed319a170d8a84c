"""Which key is in which slot of a store that has room for so many units, and which goes first. It touches no medium.

A unit that is being written has a slot and is not held; nobody evicts it, nor one that is pinned. A unit that is read while its slot gets
another is found by its digest: readers hold nothing back.
"""

import heapq
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from baton.tiers.store import Unit


class SlotEntry(NamedTuple):
    key: bytes
    digest: bytes
    slot: int


class Placed(NamedTuple):
    entries: list[SlotEntry]  # to be written, then `commit`ted or `cancel`led
    units: list[Unit]  # of `entries`
    lost: list[bytes]


class Pins:
    """Keys that a store must not give up for others, once it holds them. Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[bytes] = Counter()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, key: bytes) -> bool:
        return key in self._counts

    def add(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            self._counts.update(keys)

    def remove(self, keys: Iterable[bytes]) -> None:
        """One pin of each. Raises ValueError for a key that has none."""
        with self._lock:
            for key in keys:
                if key not in self._counts:
                    raise ValueError(f"{key.hex()} is not pinned")
                self._counts[key] -= 1
                if not self._counts[key]:
                    del self._counts[key]


class Slots:
    """Thread-safe; no call waits."""

    def __init__(self, capacity: int, pins: Pins | None = None) -> None:
        self.capacity = capacity
        self._pins = Pins() if pins is None else pins
        self._entries: OrderedDict[bytes, SlotEntry] = OrderedDict()  # held; the longest unused first
        self._freed: list[int] = []  # a heap: what is written together lies together
        self._fresh = 0  # this slot and those behind it were never used
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def keys(self) -> list[bytes]:
        with self._lock:
            return list(self._entries)

    def entries(self) -> list[SlotEntry]:
        with self._lock:
            return list(self._entries.values())

    def holds(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return [key in self._entries for key in keys]

    def find(self, keys: Sequence[bytes]) -> list[SlotEntry | None]:
        with self._lock:
            return [self._entries.get(key) for key in keys]

    def reserve(self, units: Sequence[Unit]) -> Placed:
        """Slots for those that are not held. If there is not room for all, those that are pinned and the last ones get it."""
        with self._lock:
            news = {unit.key: unit for unit in reversed(units) if unit.key not in self._entries}
            wanted = sorted(reversed(news.values()), key=lambda unit: unit.key in self._pins)
            lost: list[bytes] = []
            while self._room < min(len(wanted), self.capacity):
                key = next((key for key in self._entries if key not in self._pins), None)
                if key is None:
                    break
                heapq.heappush(self._freed, self._entries.pop(key).slot)
                lost.append(key)
            over = max(0, len(wanted) - self._room)
            lost += [unit.key for unit in wanted[:over]]
            wanted = wanted[over:]
            return Placed([SlotEntry(unit.key, unit.digest, self._take()) for unit in wanted], wanted, lost)

    def commit(self, entries: Iterable[SlotEntry]) -> None:
        """These have been written."""
        with self._lock:
            for entry in entries:
                if self._entries.setdefault(entry.key, entry) is not entry:  # another thread was first
                    heapq.heappush(self._freed, entry.slot)

    def cancel(self, entries: Iterable[SlotEntry]) -> None:
        with self._lock:
            for entry in entries:
                heapq.heappush(self._freed, entry.slot)

    def use(self, entries: Iterable[SlotEntry]) -> None:
        with self._lock:
            for entry in entries:
                if self._entries.get(entry.key) == entry:
                    self._entries.move_to_end(entry.key)

    def lose(self, entry: SlotEntry) -> bool:
        """Forgets this one, which does not verify; False: it has gone already, and what was read belongs to another."""
        with self._lock:
            if self._entries.get(entry.key) != entry:
                return False
            self._remove(entry)
            return True

    def forget(self, keys: Iterable[bytes]) -> list[SlotEntry]:
        with self._lock:
            found = [entry for key in dict.fromkeys(keys) if (entry := self._entries.get(key)) is not None]
            for entry in found:
                self._remove(entry)
            return found

    def restore(self, entries: Iterable[SlotEntry]) -> None:
        """Holds exactly these, the longest unused first. Each has a slot of its own."""
        with self._lock:
            self._entries = OrderedDict((entry.key, entry) for entry in entries)
            taken = {entry.slot for entry in self._entries.values()}
            self._fresh = max(taken, default=-1) + 1
            self._freed = [slot for slot in range(self._fresh) if slot not in taken]

    @property
    def _room(self) -> int:
        return len(self._freed) + self.capacity - self._fresh

    def _take(self) -> int:
        if self._freed:
            return heapq.heappop(self._freed)
        self._fresh += 1
        return self._fresh - 1

    def _remove(self, entry: SlotEntry) -> None:
        del self._entries[entry.key]
        heapq.heappush(self._freed, entry.slot)
