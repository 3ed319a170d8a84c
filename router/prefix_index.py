"""Which worker holds which blocks: those that workers report, and for a short while those of prompts just sent to them.

The index gives hints. A wrong hint costs a cache hit but never a token, because the worker looks for the blocks itself. So after a lost
event the entries stay in use until a snapshot replaces them, and a full index refuses entries instead of growing.

Each incarnation of a worker numbers its reports from 1. What is known is what its cache held after event `last`. An event that arrives too
early waits in `ahead` until the events before it, or a snapshot, have arrived.

The index is one table from key to a mask of workers, so `overlap` walks the keys of a prompt once, however many workers there are. It is
cut into TABLES by the first byte of the key (keys are digests), because Python copies a whole dict when it grows.

A worker may hold a key in several media (`MEDIA`), each of which has a bit of its own. Predictions are of the device. `overlap` counts one
medium, and `reach` all of them.

No call does work for all entries of a worker. A worker that leaves or begins again gives up its bit of the masks, which then counts for
nobody; `sweep` removes it later, a few tables at a time, and only then is the bit used again. A snapshot is filled in parts under a new
bit (`Filling`), while the old entries stay in use.
"""

import heapq
import itertools
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from baton.cluster.records import BlockEvent
from baton.engine.core.block_key import DEVICE

MAX_ENTRIES = 2_000_000  # pairs of worker and key; a key takes about 150 bytes, however many workers hold it
MAX_AHEAD = 1024  # events of one worker that wait for a lost one
MAX_PREDICTED = 32_768  # keys of one worker
MAX_EXPIRED = 8192  # predicted keys that one call removes; the rest count until the next
MAX_SHARED = 8192  # masks that entries share
TABLES = 256
SWEEPS = 2  # entries swept for each one stored, so that what is to be swept cannot pile up

Applied = Literal["ok", "gap", "stale", "duplicate"]


@dataclass(slots=True, eq=False)
class _Kept:
    """What a worker holds in one medium."""

    slot: int  # the number of its bit
    size: int = 0  # entries, predicted ones included


@dataclass(slots=True, eq=False)
class _Holdings:
    incarnation: int
    media: dict[str, _Kept]  # the device always
    last: int = 0
    ahead: dict[int, BlockEvent] = field(default_factory=dict)
    newest: int | None = None  # the highest report known to exist; None: not known yet
    predicted: dict[bytes, float] = field(default_factory=dict)  # key that was not reported → when we stop believing it

    @property
    def device(self) -> _Kept:
        return self.media[DEVICE]

    @property
    def cold(self) -> int:
        """The bits of the other media."""
        return sum(1 << kept.slot for medium, kept in self.media.items() if medium != DEVICE)

    @property
    def size(self) -> int:
        return sum(kept.size for kept in self.media.values())

    @property
    def complete(self) -> bool:
        return self.newest is not None and self.last >= self.newest


class PrefixIndex:
    """Covers the workers that joined. `refused` counts the entries that were not kept because the index was full."""

    def __init__(self, max_entries: int = MAX_ENTRIES, max_ahead: int = MAX_AHEAD) -> None:
        self.refused = 0
        self.entries = 0
        self._max_entries = max_entries
        self._max_ahead = max_ahead
        self._workers: dict[str, _Holdings] = {}
        self._tables: list[dict[bytes, int]] = [{} for _ in range(TABLES)]  # key → the bits of those that hold it
        self._shared: dict[int, int] = {}  # equal masks as one object: less memory, and `overlap` sees at once that nothing changes
        self._names: list[str] = []  # by slot
        self._free: list[int] = []  # slots whose bits are in no table
        self._live = 0  # the bits of the workers' devices
        self._cold = 0  # those of their other media
        self._retired = 0  # bits that are to be swept
        self._sweeping = 0  # those that this round sweeps
        self._unswept: list[int] = []  # tables that this round has not come to
        self._credit = 0  # entries that may be swept; negative after a large table
        self._batches: list[tuple[float, int, _Holdings, tuple[bytes, ...]]] = []  # a heap: what was predicted, by its end
        self._numbers = itertools.count()

    def join(self, worker: str, incarnation: int) -> None:
        """Adds a worker whose cache is not known yet. Discards what was known about another incarnation."""
        known = self._workers.get(worker)
        if known is None or known.incarnation != incarnation:
            self.forget(worker)
            held = self._workers[worker] = _Holdings(incarnation, {DEVICE: _Kept(self._take_slot(worker))})
            self._live |= 1 << held.device.slot

    def forget(self, worker: str) -> None:
        if held := self._workers.pop(worker, None):
            self._live &= ~(1 << held.device.slot)
            self._cold &= ~held.cold
            self.entries -= held.size
            held.predicted = {}
            for kept in held.media.values():
                self._retire(kept)

    def apply(self, event: BlockEvent) -> Applied:
        """Returns `gap` if an earlier event is missing, so that this one waits; `stale` for an unknown worker or an older incarnation."""
        held = self._reported(event.worker, event.incarnation)
        if held is None:
            return "stale"
        if event.sequence <= held.last or event.sequence in held.ahead:
            return "duplicate"
        held.newest = max(held.newest or 0, event.sequence)
        if event.sequence == held.last + 1:
            self._note_event(held, event)
        else:
            held.ahead[event.sequence] = event
        if held.ahead:
            self._catch_up(held)
        if len(held.ahead) > self._max_ahead:
            del held.ahead[min(held.ahead)]  # only a snapshot can help now, and it will be newer than this event
        return "ok" if held.last >= event.sequence else "gap"

    def snapshot(self, worker: str, incarnation: int, sequence: int, keys: Iterable[bytes]) -> Applied:
        """`keys`: all that the worker's device held after event `sequence`, and its other media nothing. Later events are applied to it.

        Returns `duplicate` if the snapshot says nothing new, `gap` if later events are still missing, `stale` as `apply` does.
        """
        filling = self.fill(worker, incarnation, sequence)
        if isinstance(filling, Filling):
            filling.add(keys)
            return filling.end()
        return filling

    def fill(self, worker: str, incarnation: int, sequence: int) -> "Filling | Applied":
        """Begins a snapshot that comes in parts. The caller must `end` or `drop` it."""
        held = self._reported(worker, incarnation)
        if held is None:
            return "stale"
        return "duplicate" if _is_old(held, sequence) else Filling(self, worker, held, sequence)

    def needing_snapshot(self) -> list[str]:
        """Workers whose cache is not exactly known."""
        return [name for name, held in self._workers.items() if not held.complete]

    def predict(self, worker: str, keys: Iterable[bytes], expires_at: float) -> None:
        """A prompt of these blocks was sent to the worker: they count as cached there until it reports them, or until `expires_at`."""
        held = self._workers.get(worker)
        if held is None:
            return
        batch, predicted, device, tables = tuple(keys), held.predicted, held.device, self._tables
        bit = self._share(1 << device.slot)
        most = room = min(self._max_entries - self.entries, MAX_PREDICTED - len(predicted))
        for key in batch:
            if key in predicted:
                predicted[key] = max(expires_at, predicted[key])
                continue
            table = tables[key[0]]
            mask = table.get(key, 0)
            if not mask & bit:
                if room <= 0:
                    self.refused += 1
                    continue
                room -= 1
                table[key] = self._share(mask | bit) if mask else bit
                predicted[key] = expires_at
        device.size += most - room
        self.entries += most - room
        heapq.heappush(self._batches, (expires_at, next(self._numbers), held, batch))

    def retract(self, worker: str, keys: Iterable[bytes]) -> None:
        """Undoes `predict` for a prompt that is not computed there after all. Blocks that the worker has reported stay."""
        if held := self._workers.get(worker):
            for key in keys:
                if held.predicted.pop(key, None) is not None:
                    self._unset(held.device, key)

    def is_predicted(self, worker: str, key: bytes) -> bool:
        """Whether a key counts as cached there only because a prompt with it was sent to the worker."""
        held = self._workers.get(worker)
        return held is not None and key in held.predicted

    def overlap(self, keys: Sequence[bytes], now: float, medium: str = DEVICE) -> dict[str, int]:
        """How many leading `keys` each worker holds in a medium; workers that hold none are left out. Drops predictions that have
        expired."""
        self._expire(now)
        return self._walk(keys, self._live if medium == DEVICE else self._bits(medium))

    def reach(self, keys: Sequence[bytes]) -> dict[str, int]:
        """How many leading `keys` each worker holds, each in whichever medium. Empty if nobody has more than a device. To be called after
        `overlap`, which drops predictions that have expired."""
        return self._walk(keys, self._live, self._cold) if self._cold else {}

    @property
    def tiered(self) -> bool:
        """Whether anybody holds keys in another medium than a device."""
        return self._cold != 0

    def media(self, worker: str, key: bytes) -> list[str]:
        """The media in which a worker holds a key."""
        held, mask = self._workers.get(worker), self._tables[key[0]].get(key, 0)
        return [medium for medium, kept in held.media.items() if mask >> kept.slot & 1] if held is not None else []

    def sweep(self, most: int) -> None:
        """Removes the bits that belong to nobody from about `most` entries. It sweeps whole tables; later calls pay for the excess."""
        self._credit += most
        while self._credit > 0 and (self._unswept or self._retired):
            if not self._unswept:
                self._sweeping, self._retired, self._unswept = self._retired, 0, list(range(TABLES))
            number = self._unswept.pop()
            table, dead = self._tables[number], self._sweeping
            self._credit -= len(table) + 1
            kept = ((key, mask & ~dead if mask & dead else mask) for key, mask in table.items())
            self._tables[number] = {key: self._share(mask) for key, mask in kept if mask}  # a new dict: the old one would never shrink
            if not self._unswept:
                self._free += [slot for slot in range(dead.bit_length()) if dead >> slot & 1]
                self._sweeping = 0
        self._credit = min(self._credit, 0)

    def _walk(self, keys: Sequence[bytes], alive: int, cold: int = 0) -> dict[str, int]:
        """How many leading `keys` each of the workers with these bits holds. Bits of `cold` media count for their workers' devices, too."""
        found: dict[str, int] = {}
        before: int | None = None
        tables, count = self._tables, 0
        for key in keys:
            mask = tables[key[0]].get(key, 0)
            if mask is not before:
                before = mask
                kept = alive & (mask | self._homes(mask & cold) if cold else mask)
                if kept != alive:
                    if count:
                        self._note(found, alive & ~kept, count)
                    alive = kept
                if not alive:
                    return found
            count += 1
        if count:
            self._note(found, alive, count)
        return found

    def _note(self, found: dict[str, int], mask: int, count: int) -> None:
        while mask:
            bit = mask & -mask
            found[self._names[bit.bit_length() - 1]] = count
            mask ^= bit

    def _bits(self, medium: str) -> int:
        return sum(1 << held.media[medium].slot for held in self._workers.values() if medium in held.media)

    def _homes(self, mask: int) -> int:
        """The bits of the devices of those workers whose other media have these bits."""
        homes = 0
        while mask:
            bit = mask & -mask
            homes |= 1 << self._workers[self._names[bit.bit_length() - 1]].device.slot
            mask ^= bit
        return homes

    def _take_slot(self, worker: str) -> int:
        if self._free:
            slot = self._free.pop()
            self._names[slot] = worker
            return slot
        self._names.append(worker)
        return len(self._names) - 1

    def _retire(self, kept: _Kept) -> None:
        if kept.size:
            self._retired |= 1 << kept.slot
        else:
            self._free.append(kept.slot)

    def _share(self, mask: int) -> int:
        if len(self._shared) >= MAX_SHARED:
            self._shared.clear()  # they only save memory and time
        return self._shared.setdefault(mask, mask)

    def _set(self, key: bytes, kept: _Kept) -> None:
        table = self._tables[key[0]]
        table[key] = self._share(table.get(key, 0) | 1 << kept.slot)
        kept.size += 1
        self.entries += 1

    def _unset(self, kept: _Kept, key: bytes) -> None:
        table = self._tables[key[0]]
        mask = table[key] & ~(1 << kept.slot)
        if mask:
            table[key] = self._share(mask)
        else:
            del table[key]
        kept.size -= 1
        self.entries -= 1

    def _reported(self, worker: str, incarnation: int) -> _Holdings | None:
        """The holdings that a report updates. None for an unknown worker or an older incarnation; empty for a new incarnation."""
        held = self._workers.get(worker)
        if held is None or incarnation < held.incarnation:
            return None
        if incarnation == held.incarnation:
            return held
        self.join(worker, incarnation)
        return self._workers[worker]

    def _catch_up(self, held: _Holdings) -> None:
        while (event := held.ahead.pop(held.last + 1, None)) is not None:
            self._note_event(held, event)

    def _note_event(self, held: _Holdings, event: BlockEvent) -> None:
        """Notes an event, the next of all that are not known."""
        held.last = event.sequence
        kept = held.media.get(event.medium)
        if kept is None:
            kept = held.media[event.medium] = _Kept(self._take_slot(event.worker))
            self._cold |= 1 << kept.slot
        predicted = held.predicted if event.medium == DEVICE else {}
        if event.kind == "stored":
            self._store(kept, event.keys, predicted)
        else:
            self._remove(kept, event.keys, predicted)

    # The next two are most of the work with many workers, so they do what `_set` and `_unset` do in place.

    def _store(self, kept: _Kept, keys: Sequence[bytes], predicted: dict[bytes, float]) -> None:
        tables, bit = self._tables, self._share(1 << kept.slot)
        for key in keys:
            if predicted and predicted.pop(key, None) is not None:
                continue  # its bit is set
            table = tables[key[0]]
            mask = table.get(key, 0)
            if mask & bit:
                continue
            if (room := self._max_entries - self.entries) <= 0:
                if not self._make_room(room):
                    continue
                mask = table.get(key, 0)  # another worker's prediction of it may have gone
            table[key] = self._share(mask | bit) if mask else bit
            kept.size += 1
            self.entries += 1
        self.sweep(SWEEPS * len(keys))

    def _remove(self, kept: _Kept, keys: Sequence[bytes], predicted: Container[bytes]) -> None:
        tables, bit, removed = self._tables, 1 << kept.slot, 0
        for key in keys:
            table = tables[key[0]]
            mask = table.get(key, 0)
            if not mask & bit or key in predicted:
                continue
            if mask == bit:
                del table[key]
            else:
                table[key] = self._share(mask & ~bit)
            removed += 1
        kept.size -= removed
        self.entries -= removed

    def _make_room(self, room: int) -> bool:
        """Whether one more entry may be kept: reports take the room of predictions. Counts it as refused if not."""
        while room <= 0 and self._batches:
            _, _, held, keys = heapq.heappop(self._batches)
            room += self._drop(held, keys, float("inf"))
        self.refused += room <= 0
        return room > 0

    def _drop(self, held: _Holdings, keys: Iterable[bytes], now: float) -> int:
        """Drops the predictions of `keys` that end by `now`, and returns how many."""
        dropped = 0
        for key in keys if held.predicted else ():
            if held.predicted.get(key, now) <= now and held.predicted.pop(key, None) is not None:
                self._unset(held.device, key)
                dropped += 1
        return dropped

    def _expire(self, now: float) -> None:
        left = MAX_EXPIRED
        while left > 0 and self._batches and self._batches[0][0] <= now:
            _, _, held, keys = heapq.heappop(self._batches)
            self._drop(held, keys, now)
            left -= len(keys)


class Filling:
    """A snapshot that arrives in parts. What was known stays in use until it is complete."""

    def __init__(self, index: PrefixIndex, worker: str, held: _Holdings, sequence: int) -> None:
        self._index = index
        self._worker = worker
        self._held = held
        self._sequence = sequence
        self._media = {DEVICE: _Kept(index._take_slot(worker))}

    def add(self, keys: Iterable[bytes], medium: str = DEVICE) -> None:
        index, taken = self._index, 0
        kept = self._media.get(medium)
        if kept is None:
            kept = self._media[medium] = _Kept(index._take_slot(self._worker))
        bit = 1 << kept.slot
        for key in keys:
            taken += 1
            if index._tables[key[0]].get(key, 0) & bit:
                continue
            if index._make_room(index._max_entries - index.entries + self._held.size):  # the old entries go
                index._set(key, kept)
        index.sweep(SWEEPS * taken)

    def end(self) -> Applied:
        """Puts the snapshot in place of what was known. The same answers as `PrefixIndex.snapshot`."""
        index, held = self._index, self._held
        if index._workers.get(self._worker) is not held:
            self.drop()
            return "stale"
        if _is_old(held, self._sequence):
            self.drop()
            return "duplicate"
        device = self._media[DEVICE]
        bit = 1 << device.slot
        for key in list(held.predicted):
            if index._tables[key[0]].get(key, 0) & bit:
                del held.predicted[key]
            else:
                index._set(key, device)
        index._live = index._live & ~(1 << held.device.slot) | bit
        index._cold &= ~held.cold
        self._media, held.media = held.media, self._media
        index._cold |= held.cold
        self.drop()
        held.last = self._sequence
        held.newest = max(held.newest or 0, self._sequence)
        held.ahead = {number: event for number, event in held.ahead.items() if number > self._sequence}
        index._catch_up(held)
        return "ok" if held.complete else "gap"

    def drop(self) -> None:
        """Ends it without a change."""
        for kept in self._media.values():
            self._index.entries -= kept.size
            self._index._retire(kept)


def _is_old(held: _Holdings, sequence: int) -> bool:
    return sequence < held.last or (sequence == held.last and held.complete)
