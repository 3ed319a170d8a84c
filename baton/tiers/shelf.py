"""What long sequences have in a tier: units that are pinned there, kept and read while the engine waits. Implements
`baton.engine.core.long_contexts.Shelf`.

The engine's thread waits for threads of the tier, and looks after the tier meanwhile: a store that does not answer is off after HANG_S, and
gives back what was asked of it. So every wait ends.
"""

import threading
import time
from collections.abc import Callable, Sequence

from baton.engine.core.long_contexts import ShelfFailed
from baton.tiers.tier import LoadPiece, Save, Tier
from baton.tiers.ways import Landing

PIECES = 32  # of a reading, that a tier is given at a time
LOOK_S = 0.2


class PinnedShelf:
    def __init__(self, tier: Tier) -> None:
        """`tier`: whose store has pins."""
        assert tier.store.pins is not None, "others would take its room"
        self.capacity = tier.store.capacity
        self._tier, self._pins = tier, tier.store.pins

    @property
    def why_off(self) -> str:
        return "" if self._tier.on else f"the tier {self._tier.medium} is off: {self._tier.why or self._tier.state.value}"

    def pin(self, keys: Sequence[bytes]) -> None:
        self._pins.add(keys)

    def unpin(self, keys: Sequence[bytes]) -> None:
        self._pins.remove(keys)

    def holds(self, keys: Sequence[bytes]) -> list[bool]:
        return self._tier.store.holds(keys)

    def keep(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        done = threading.Event()
        self._tier.save(Save([(key, block) for block, key in blocks], done.set, urgent=True))
        while not done.wait(LOOK_S):  # also if the tier is off: only then does nobody read the blocks any more
            self._tier.watch(time.monotonic())
        if not all(self.holds([key for _, key in blocks])):
            raise ShelfFailed(self.why_off or f"the tier {self._tier.medium} has no room")

    def read(self, keys: Sequence[bytes], take: Callable[[int, memoryview], None]) -> None:
        piece, at_once = self._tier.piece, PIECES * self._tier.piece
        for first in range(0, len(keys), at_once):
            part = keys[first : first + at_once]
            reading = _Reading(first, len(part), take)
            for start in range(0, len(part), piece):
                own = part[start : start + piece]
                self._tier.load(LoadPiece(own, time.monotonic(), 0.0, reading.takes(start), reading.ends(len(own)), counts=False))
            while not reading.over.wait(LOOK_S) and self._tier.on:
                self._tier.watch(time.monotonic())
            if not reading.end():
                raise ShelfFailed(self.why_off or f"the tier {self._tier.medium} has lost some of it")


class _Reading:
    """Units that are read together, from number `first` on. Thread-safe."""

    def __init__(self, first: int, count: int, take: Callable[[int, memoryview], None]) -> None:
        self.over = threading.Event()
        self._first, self._take = first, take
        self._arrived = [False] * count
        self._left = count
        self._ended = False
        self._lock = threading.Lock()  # over what `take` writes to, too

    def takes(self, start: int) -> Callable[[Sequence[int], Landing], list[bool]]:
        """The `Take` of a piece that begins there."""

        def take(units: Sequence[int], landing: Landing) -> list[bool]:
            with self._lock:
                for i in () if self._ended else units:
                    self._take(self._first + start + i, landing.units[i])
                    self._arrived[start + i] = True
            return [True] * len(units)

        return take

    def ends(self, count: int) -> Callable[[], None]:
        """The end of a piece of so many."""

        def end() -> None:
            with self._lock:
                self._left -= count
                if self._left == 0:
                    self.over.set()

        return end

    def end(self) -> bool:
        """Whether all have come. None comes afterwards."""
        with self._lock:
            self._ended = True
            return all(self._arrived)
