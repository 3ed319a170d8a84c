"""A store with threads of its own and bounds: whoever gives it work never waits, and what is too much is dropped and counted.

One thread writes, at a bounded rate, and looks after the tier's state; others read. Each has a `Way` of its own out of the pool and back:
a store that may not come back is read into the reader's memory, so that it has no block of the pool. The writer's queue is bounded: when it
is full, its oldest entry goes. The readers' is, too: a load that finds it full brings nothing, and the blocks are computed.

State (`MOVES`): a store that fails, or does not answer for HANG_S, is off, with a warning, and is tried again after 1 s, 2 s, 4 s …
RETRY_MAX_S; one that does not pay (`baton.tiers.worth`) rests. While a tier is off, nobody is told that it holds anything.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from xxhash import xxh3_128_digest

from baton.engine.core.block_key import KEY_BYTES
from baton.engine.core.colder import SAVED
from baton.engine.core.ghosts import Ghosts
from baton.engine.core.kvcache import Pool
from baton.moves import Moves
from baton.tiers.choice import Measured, Rate
from baton.tiers.store import Store, StoreFailed, Unit, Wanted
from baton.tiers.ways import Saved, Take, Way, ways
from baton.tiers.worth import REST_S, Tally, Worth

log = logging.getLogger(__name__)
QUEUED_BYTES = 64 << 20  # units that wait to be written, at least one; blocks of the pool are as many as an engine saves at a time
QUEUED_PIECES = 256  # of loads
HANG_S = 5.0
LOOK_S = 1.0  # how often the writer looks after the state if there is nothing to write
REFRESH_S, REFRESH_SHARE = 10.0, 0.05  # how often, and the most of its time that the writer takes for it
RETRY_S, RETRY_MAX_S = 1.0, 60.0
DISK_READERS = 2
JOIN_S = 5.0  # a thread that hangs in a call of the system cannot be stopped: the process exits without it


class TierState(Enum):
    ON = "on"
    FAILED = "failed"  # the store refused something
    PROBING = "probing"
    RESTING = "resting"  # it cost more than it saved
    CLOSED = "closed"


MOVES = Moves(
    {
        (TierState.ON, "fail"): TierState.FAILED,
        (TierState.FAILED, "probe"): TierState.PROBING,
        (TierState.PROBING, "fail"): TierState.FAILED,
        (TierState.PROBING, "answer"): TierState.ON,
        (TierState.ON, "cost"): TierState.RESTING,
        (TierState.RESTING, "try"): TierState.ON,
        (TierState.ON, "close"): TierState.CLOSED,
        (TierState.FAILED, "close"): TierState.CLOSED,
        (TierState.PROBING, "close"): TierState.CLOSED,
        (TierState.RESTING, "close"): TierState.CLOSED,
    }
)


class Save(NamedTuple):
    units: Sequence[Saved]  # they do not change until `done`
    done: Callable[[], None]
    urgent: bool = False  # somebody waits: it is written next, at any rate, and not dropped


class LoadPiece(NamedTuple):
    """A part of a load, read in one call: at most `Tier.piece` units."""

    keys: Sequence[bytes]
    began: float
    compute_s: float  # what computing these would take
    take: Take
    done: Callable[[], None]
    wanted: Callable[[], bool] = lambda: True  # whether anybody still waits for it
    counts: bool = True  # whether it says what the tier is worth, and how fast loads are


class TierReport(NamedTuple):
    """What a tier says of itself."""

    medium: str
    state: str  # of its table, or watching: it is on, and keeps nothing new
    why: str  # it is off, or only watches
    units: int
    capacity: int
    tally: Tally
    saved_s: float  # lately
    spent_s: float
    cost: float  # of loading, as a share of computing; 0: not known


@dataclass(frozen=True, slots=True)
class Bounds:
    save_bytes_per_s: float | None = None  # None: as fast as the store takes it
    readers: int = 1  # threads
    refresh: Callable[[], tuple[list[bytes], list[bytes]]] | None = None  # of a store that others use, too: keys gained, and lost


class Tier:
    """`moved(stored, keys)` is told, in some thread, what the tier gained or lost."""

    below: "Tier | None" = None  # gets what this one has no more room for
    ghosts: Ghosts | None = None  # whether what leaves the pool comes here; None: it does
    units = 0  # keys that `moved` was told of and that are still here

    def __init__(
        self,
        store: Store,
        bounds: Bounds,
        pool: Pool,
        moved: Callable[[bool, list[bytes]], None],
        clock: Callable[[], float] = time.monotonic,
        spent: Callable[[], float] = time.thread_time,
    ) -> None:
        """`spent`: processor time of the thread that writes, so far. Raises RuntimeError if the pool's device has no room for the ways."""
        self.store = store
        self.medium = store.medium
        self.state = TierState.ON
        self.why = ""  # it is off
        self._bounds = bounds
        self._moved = moved
        self._clock, self._spent = clock, spent
        self.worth = Worth(clock())
        self._rate = Measured()
        self._lock = threading.Lock()  # over the queues, the state and the worth; never held while a store is asked
        self._to_write, self._to_read = threading.Condition(self._lock), threading.Condition(self._lock)
        self._saves: deque[Save] = deque()
        self._urgent: deque[Save] = deque()  # their givers wait for them, so there are few
        self._drops: list[bytes] = []
        self._writing: Save | None = None
        self._most = max(1, QUEUED_BYTES // store.unit_bytes)
        self._batch, self.piece, make = ways(store, pool)
        self._way = make(self._batch, self._asks)  # the writer's
        self._pieces: deque[LoadPiece] = deque()
        self._asking: dict[int, float] = {}  # thread that asks the store → since when
        self._told: dict[bytes, None] = {}  # keys that `moved` was told of and that are still here
        self._told_lock = threading.Lock()  # what is told and how it is told are in one order
        self._next_write = 0.0  # when the rate allows it
        self._next_refresh = clock() + REFRESH_S
        self._retry_s, self._retry_at = RETRY_S, 0.0
        self._reading = [make(self.piece, self._asks) for _ in range(bounds.readers)]  # the readers' ways
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        self._tell(True, self.store.keys())
        self._threads.append(threading.Thread(target=self._write, name=f"{self.medium}-writer", daemon=True))
        for i, way in enumerate(self._reading):
            self._threads.append(threading.Thread(target=self._read, name=f"{self.medium}-reader-{i}", args=(way,), daemon=True))
        for thread in self._threads:
            thread.start()

    @property
    def on(self) -> bool:
        return self.state is TierState.ON

    @property
    def _watching(self) -> Ghosts | None:
        """Those for whose sake it is on and keeps nothing new that may come back or not."""
        return self.ghosts if self.on and self.ghosts is not None and not self.ghosts.open else None

    def rate(self, now: float) -> Rate | None:
        return self._rate.at(now)

    def told(self, now: float, compute_s: float = 0.0) -> TierReport:
        """`compute_s`: of a unit; 0: not known."""
        with self._lock:
            saved_s, spent_s = self.worth.lately(now)
            rate, units, tally = self._rate.at(now), (self.units, self.store.capacity), replace(self.worth.tally)
            cost = self.store.unit_bytes / rate.bytes_per_s / compute_s if rate and compute_s else 0.0
            state = ("watching", ghosts.why) if (ghosts := self._watching) is not None else (self.state.value, self.why)
            return TierReport(self.medium, *state, *units, tally, saved_s, spent_s, cost)

    def save(self, save: Save) -> None:
        """Never waits. `done` is called in any case, also now."""
        dropped: list[Save] = []
        with self._lock:
            if self.on:
                (self._urgent if save.urgent else self._saves).append(save)
                while len(self._saves) > 1 and self._full():
                    dropped.append(self._saves.popleft())
                self.worth.tally.dropped += sum(len(each.units) for each in dropped)
                self._to_write.notify()
            else:
                dropped.append(save)
        for each in dropped:
            each.done()

    def _full(self) -> bool:
        """Blocks that wait lie in the pool, which has room for them; copies take memory of their own."""
        contents = [content for save in self._saves for _, content in save.units]
        copies = sum(not isinstance(content, int) for content in contents)
        return copies > self._most or len(contents) - copies > max(SAVED, self._most)

    def load(self, piece: LoadPiece) -> None:
        """Never waits. `done` is called in any case, also now."""
        with self._lock:
            taken = self.on and len(self._pieces) < QUEUED_PIECES
            if taken:
                self._pieces.append(piece)
                self._to_read.notify()
        if not taken:
            piece.done()

    def credit(self, seconds: float) -> None:
        """Credits computing time, saved by units that came before somebody asked for them."""
        with self._lock:
            self.worth.saved(seconds, self._clock())

    def watch(self, now: float) -> None:
        """Now and then: a store that does not answer is off. Never waits."""
        if self.on and self._hangs(now):
            self._fail(StoreFailed(f"it has not answered for {HANG_S:.0f} s"))

    def drop(self, keys: Sequence[bytes]) -> None:
        """Never waits. What is being read at this moment may still come."""
        with self._lock:
            self._drops += keys
            gone = set(keys)
            for i, save in enumerate(self._saves):
                if not gone.isdisjoint(key for key, _ in save.units):
                    self._saves[i] = Save([unit for unit in save.units if unit[0] not in gone], save.done)
            self._to_write.notify()

    def close(self) -> None:
        with self._lock:
            self.state = MOVES.after(self.state, "close", f"tier {self.medium}")
            self._to_write.notify_all()
            self._to_read.notify_all()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(JOIN_S)
        self._abandon()
        self.store.close()

    def _write(self) -> None:
        while self.state is not TierState.CLOSED:
            self._drop()
            self._refresh()
            save = self._due()
            if save is None:
                self._look()
            else:
                self._write_one(save)

    def _write_one(self, save: Save) -> None:
        try:
            if self.on:
                self._put(save)
        except StoreFailed as error:
            self._fail(error)
        finally:
            with self._lock:
                given, self._writing = self._writing, None
            if given is not None:  # nobody has given it up
                given.done()

    def _due(self) -> Save | None:
        with self._lock:
            wait_s = LOOK_S if not self._saves else self._next_write - self._clock()
            wait_s = 0.0 if self._drops or self._urgent else wait_s
            if wait_s > 0 and self.state is not TierState.CLOSED:
                self._to_write.wait(min(wait_s, LOOK_S))
            return self._next_save()

    def _next_save(self) -> Save | None:
        """What is written now, if something is. Needs the lock."""
        if not self._urgent and (not self._saves or self._next_write > self._clock()):
            return None
        self._writing = (self._urgent or self._saves).popleft()
        return self._writing

    def _put(self, save: Save) -> None:
        """A save that is given up gives its blocks back, and others may fill them: so what has been copied, or digested, counts only if the
        save has not been given up by then."""
        began, store = self._spent(), self.store
        keys = [key for key, _ in save.units]
        news = [unit for unit, held in zip(save.units, store.holds(keys), strict=True) if not held]
        gone: list[bytes] = []
        for start in range(0, len(news), self._batch):
            part = news[start : start + self._batch]
            self._hand_down(start - len(gone) + len(part))
            if (lost := self._way.put(part, lambda: self._writing is save)) is None:
                news = news[:start]
                break
            gone += lost
        self._tell(True, [key for key, held in zip(keys, store.holds(keys), strict=True) if held])
        self._tell(False, gone)
        now = self._clock()
        with self._lock:
            self.worth.wrote(len(news), store.unit_bytes, self._spent() - began, now)
            if self._bounds.save_bytes_per_s is not None:
                self._next_write = max(now, self._next_write) + len(news) * store.unit_bytes / self._bounds.save_bytes_per_s

    def _hand_down(self, count: int) -> None:
        """Makes room for `count` units. Those that have to go for them are read first, for the tier below."""
        below, store = self.below, self.store
        victims = max(0, self.units + count - store.capacity)
        if below is None or not below.on or not victims:
            return
        keys, pins = store.keys(), store.pins
        if pins:
            keys = [key for key in keys if key not in pins]
        keys = keys[:victims]
        keys = [key for key, held in zip(keys, below.store.holds(keys), strict=True) if not held]
        copies = self._copies(len(keys))
        with self._asks():
            read = store.get([Wanted(key, into) for key, into in zip(keys, copies, strict=True)])
        store.drop(keys)  # reading them has made them the youngest
        self._tell(False, keys)
        below.save(Save([unit for unit, good in zip(zip(keys, copies, strict=True), read, strict=True) if good], lambda: None))

    def _copies(self, count: int) -> list[memoryview]:
        """Memory for so many units that are handed down."""
        return [memoryview(bytearray(self.store.unit_bytes)) for _ in range(count)]

    def _refresh(self) -> None:
        """Learns what others have put into the store, and deleted there."""
        if self._bounds.refresh is None or not self.on or (began := self._clock()) < self._next_refresh:
            return
        try:
            gained, lost = self._bounds.refresh()
            self._tell(True, gained)
            self._tell(False, lost)
        except StoreFailed as error:
            self._fail(error)
        now = self._clock()
        self._next_refresh = now + max(REFRESH_S, (now - began) / REFRESH_SHARE)

    def _drop(self) -> None:
        with self._lock:
            keys, self._drops = self._drops, []
        if keys:
            self.store.drop(keys)
            self._tell(False, keys)

    def _read(self, way: Way) -> None:
        while (piece := self._next_piece()) is not None:
            if piece.wanted():
                self._read_one(way, piece, self._clock())
            else:
                piece.done()

    def _read_one(self, way: Way, piece: LoadPiece, began: float) -> None:
        came = [False] * len(piece.keys)
        try:
            if self.on:
                came = way.get(piece.keys, piece.take)
        except StoreFailed as error:
            self._fail(error)
        finally:
            self._note(piece, came, began)
            piece.done()

    @contextmanager
    def _asks(self) -> Iterator[None]:
        me = threading.get_ident()
        self._asking[me] = self._clock()
        try:
            yield
        finally:
            del self._asking[me]

    def _hangs(self, now: float) -> bool:
        return any(now - since > HANG_S for since in list(self._asking.values()))

    def _next_piece(self) -> LoadPiece | None:
        with self._lock:
            while not self._pieces and self.state is not TierState.CLOSED:
                self._to_read.wait()
            return self._pieces.popleft() if self._pieces else None

    def _note(self, piece: LoadPiece, came: list[bool], began: float) -> None:
        now, asked, good, size = self._clock(), len(came), sum(came), self.store.unit_bytes
        saved_s = piece.compute_s * good / asked if now - piece.began <= piece.compute_s else 0.0  # later, it was computed
        with self._lock:
            if piece.counts:
                self.worth.read(asked, good, size, now - began, saved_s, now)
            if good and piece.counts:
                self._rate.note(good * size, began - piece.began, now - began, now)
        if good < asked:
            self._tell(False, [key for key, whole in zip(piece.keys, came, strict=True) if not whole], unless_held=True)

    def _tell(self, stored: bool, keys: Sequence[bytes] | None = None, unless_held: bool = False) -> None:
        """None: all keys that it was told of. `unless_held`: what did not come may have been written again meanwhile. That is told after it
        was written, so what is not held now is told of after this."""
        with self._told_lock:
            if stored and not self.on:  # another thread has found that the store fails
                return
            if unless_held and keys is not None:
                keys = [key for key, held in zip(keys, self.store.holds(keys), strict=True) if not held]
            changed = [key for key in dict.fromkeys(self._told if keys is None else keys) if (key in self._told) != stored]
            for key in changed:
                if stored:
                    self._told[key] = None
                else:
                    del self._told[key]
            self.units = len(self._told)
            if changed:
                self._moved(stored, changed)

    def _look(self) -> None:
        """Goes back on when it is time, and off if it does not pay."""
        now = self._clock()
        if self.state is TierState.FAILED and now >= self._retry_at and not self._hangs(now):
            self._probe(now)
        elif self.state is TierState.RESTING and now >= self._retry_at:
            with self._lock:
                self._move("try")
                self.worth.begin(now)
            self._return()
        elif self.on and self._watching is None and not self.store.pins and not self.worth.pays(now):
            saved, spent = self.worth.lately(now)
            self._off("cost", f"it saved {saved:.1f} s and cost {spent:.1f} s lately", now + REST_S)

    def _probe(self, now: float) -> None:
        store, key, data = self.store, os.urandom(KEY_BYTES), os.urandom(self.store.unit_bytes)
        with self._lock:
            self._move("probe")
        try:
            with self._asks():
                lost = store.put([Unit(key, xxh3_128_digest(data), memoryview(data))])
                if key not in lost and not store.get([Wanted(key, memoryview(bytearray(len(data))))])[0]:
                    raise StoreFailed("what was just written cannot be read")
                store.drop([key])
        except StoreFailed as error:
            self._fail(error)
            return
        with self._lock:
            self._move("answer")
            self._retry_s = RETRY_S
            self.worth.begin(now)
        self._return()

    def _return(self) -> None:
        log.warning("the tier %s is back", self.medium)
        self.why = ""
        self._tell(True, self.store.keys())

    def _fail(self, error: Exception) -> None:
        self._off("fail", str(error), self._clock() + self._retry_s)
        self._retry_s = min(2 * self._retry_s, RETRY_MAX_S)

    def _off(self, event: str, why: str, until: float) -> None:
        with self._lock:
            if (self.state, event) not in MOVES:  # another thread was first, or it is closed
                return
            quiet = self.state is TierState.PROBING
            self._move(event)
            self.why, self._retry_at = why, until
        if not quiet:
            log.warning("the tier %s is off: %s", self.medium, why)
        self._tell(False)
        self._abandon()

    def _abandon(self) -> None:
        with self._lock:
            saves, pieces = [*self._urgent, *self._saves, *([self._writing] if self._writing else [])], list(self._pieces)
            self._writing = None
            self._urgent.clear()
            self._saves.clear()
            self._pieces.clear()
        for save in saves:
            save.done()
        for piece in pieces:
            piece.done()

    def _move(self, event: str) -> None:
        self.state = MOVES.after(self.state, event, f"tier {self.medium}")
