"""Which worker holds which blocks: those that workers report, and for a short while those of prompts just sent to them.

The index gives hints. A wrong hint costs a cache hit but never a token, because the worker looks for the blocks itself. So after a lost
event the entries stay in use until a snapshot replaces them, and a full index refuses entries instead of growing.

Each incarnation of a worker numbers its reports from 1. `keys` is what its cache held after event `last`. An event that arrives too early
waits in `ahead` until the events before it, or a snapshot, have arrived.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from baton.cluster.records import BlockEvent

MAX_ENTRIES = 2_000_000  # pairs of worker and key, about 150 bytes each
MAX_AHEAD = 1024  # events of one worker that wait for a lost one

Applied = Literal["ok", "gap", "stale", "duplicate"]


@dataclass(slots=True)
class _Holdings:
    incarnation: int
    last: int = 0
    keys: set[bytes] = field(default_factory=set)
    ahead: dict[int, BlockEvent] = field(default_factory=dict)
    newest: int | None = None  # the highest report known to exist; None: not known yet
    predicted: OrderedDict[bytes, float] = field(default_factory=OrderedDict)  # key → when we stop believing it

    @property
    def complete(self) -> bool:
        return self.newest is not None and self.last >= self.newest

    @property
    def size(self) -> int:
        return len(self.keys) + len(self.predicted)


class PrefixIndex:
    """Covers the workers that joined. `refused` counts the entries that were not kept because the index was full."""

    def __init__(self, max_entries: int = MAX_ENTRIES, max_ahead: int = MAX_AHEAD) -> None:
        self.refused = 0
        self._max_entries = max_entries
        self._max_ahead = max_ahead
        self._workers: dict[str, _Holdings] = {}

    @property
    def entries(self) -> int:
        return sum(held.size for held in self._workers.values())

    def join(self, worker: str, incarnation: int) -> None:
        """Adds a worker whose cache is not known yet. Discards what was known about another incarnation."""
        known = self._workers.get(worker)
        if known is None or known.incarnation != incarnation:
            self._workers[worker] = _Holdings(incarnation)

    def forget(self, worker: str) -> None:
        self._workers.pop(worker, None)

    def apply(self, event: BlockEvent) -> Applied:
        """Returns `gap` if an earlier event is missing, so that this one waits; `stale` for an unknown worker or an older incarnation."""
        held = self._reported(event.worker, event.incarnation)
        if held is None:
            return "stale"
        if event.sequence <= held.last or event.sequence in held.ahead:
            return "duplicate"
        held.newest = max(held.newest or 0, event.sequence)
        held.ahead[event.sequence] = event
        self._catch_up(held)
        if len(held.ahead) > self._max_ahead:
            del held.ahead[min(held.ahead)]  # only a snapshot can help now, and it will be newer than this event
        return "ok" if held.last >= event.sequence else "gap"

    def snapshot(self, worker: str, incarnation: int, sequence: int, keys: Iterable[bytes]) -> Applied:
        """`keys`: all that the worker's cache held after event `sequence`; a set becomes the index's own. Later events are applied to it.

        Returns `duplicate` if the snapshot says nothing new, `gap` if later events are still missing, `stale` as `apply` does.
        """
        held = self._reported(worker, incarnation)
        if held is None:
            return "stale"
        if sequence < held.last or (sequence == held.last and held.complete):
            return "duplicate"
        held.newest = max(held.newest or 0, sequence)
        self._restart(held, sequence, keys)
        self._catch_up(held)
        return "ok" if held.complete else "gap"

    def needing_snapshot(self) -> list[str]:
        """Workers whose cache is not exactly known."""
        return [name for name, held in self._workers.items() if not held.complete]

    def predict(self, worker: str, keys: Iterable[bytes], expires_at: float) -> None:
        """A prompt of these blocks was sent to the worker: they count as cached there until it reports them, or until `expires_at`."""
        held = self._workers.get(worker)
        if held is None:
            return
        room = self._max_entries - self.entries
        for key in keys:
            if key in held.keys:
                continue
            if key not in held.predicted:
                if room <= 0:
                    self.refused += 1
                    continue
                room -= 1
            held.predicted[key] = max(expires_at, held.predicted.get(key, expires_at))
            held.predicted.move_to_end(key)

    def retract(self, worker: str, keys: Iterable[bytes]) -> None:
        """Undoes `predict` for a prompt that is not computed there after all. Blocks that the worker has reported stay."""
        if held := self._workers.get(worker):
            for key in keys:
                held.predicted.pop(key, None)

    def overlap(self, keys: Sequence[bytes], now: float) -> dict[str, int]:
        """How many leading `keys` each worker holds; workers that hold none are left out. Drops predictions that have expired."""
        found = {}
        for name, held in self._workers.items():
            while held.predicted and next(iter(held.predicted.values())) <= now:
                held.predicted.popitem(last=False)
            count = 0
            for key in keys:
                if key not in held.keys and held.predicted.get(key, now) <= now:
                    break
                count += 1
            if count:
                found[name] = count
        return found

    def _reported(self, worker: str, incarnation: int) -> _Holdings | None:
        """The holdings that a report updates. None for an unknown worker or an older incarnation; empty for a new incarnation."""
        held = self._workers.get(worker)
        if held is None or incarnation < held.incarnation:
            return None
        self.join(worker, incarnation)
        return self._workers[worker]

    def _restart(self, held: _Holdings, sequence: int, keys: Iterable[bytes]) -> None:
        held.keys = set()
        held.last = sequence
        held.ahead = {number: event for number, event in held.ahead.items() if number > sequence}
        if isinstance(keys, set) and len(keys) <= self._max_entries - self.entries:  # a million keys one by one would take a second
            held.keys = keys
            for key in [key for key in held.predicted if key in keys]:
                del held.predicted[key]
        else:
            self._store(held, keys)

    def _catch_up(self, held: _Holdings) -> None:
        while (event := held.ahead.pop(held.last + 1, None)) is not None:
            held.last = event.sequence
            if event.kind == "stored":
                self._store(held, event.keys)
            else:
                held.keys.difference_update(event.keys)

    def _store(self, held: _Holdings, keys: Iterable[bytes]) -> None:
        room = self._max_entries - self.entries
        for key in keys:
            if held.predicted.pop(key, None) is not None:
                room += 1
            if key in held.keys:
                continue
            if room <= 0:
                room = self._drop_predictions()
            if room <= 0:
                self.refused += 1
                continue
            held.keys.add(key)
            room -= 1

    def _drop_predictions(self) -> int:
        for held in self._workers.values():
            held.predicted.clear()
        return self._max_entries - self.entries
