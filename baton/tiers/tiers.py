"""The tiers under one pool, the nearest first. Implements `baton.engine.core.colder.ColderTiers`.

What leaves the pool goes to the first tier that is on; what leaves a tier goes to the next. A load is cut into pieces, which the tiers that
hold them read at once; it has landed when all of them have ended, or is cancelled.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from baton.engine.core.colder import Report, TierPolicy
from baton.engine.core.ghosts import Ghosts
from baton.engine.core.kvcache import Pool
from baton.tiers.choice import units_to_compute, units_to_load
from baton.tiers.shelf import PinnedShelf
from baton.tiers.store import Store
from baton.tiers.tier import Bounds, LoadPiece, Save, Tier, TierReport
from baton.tiers.ways import Landing

log = logging.getLogger(__name__)
WATCH_S = 0.1  # the engine asks before each step
MakeStores = Callable[[Pool], list[tuple[Store, Bounds]]]


class Tiers:
    def __init__(self, make: MakeStores, policy: TierPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        """`make`: the stores for the units of this pool, the nearest first; it may wait, and raises ValueError, which names the
        configuration key."""
        self.policy = policy
        self.tiers: list[Tier] = []
        self._make, self._clock = make, clock
        self._loads: dict[int, _Load] = {}
        self._watch_at = 0.0
        self._compute_s = 0.0  # of a unit; 0: not known
        self.hints: Counter[str] = Counter(used=0, unused=0, nothing=0)  # what has become of them

    def open(self, pool: Pool, report: Report) -> None:
        self._pool, self._report = pool, report
        for store, bounds in self._make(pool):
            try:
                tier = self._tier(store, bounds, pool)
            except RuntimeError as error:
                raise ValueError(f"tiers: no room beside the pool for copies of its blocks: {error}") from error
            if self.tiers:
                self.tiers[-1].below = tier
            self.tiers.append(tier)
        self._by_medium = {tier.medium: tier for tier in self.tiers}
        for tier in self.tiers:
            tier.start()
            log.info("tier %s: room for %d blocks, holds %d", tier.medium, tier.store.capacity, tier.units)

    def _tier(self, store: Store, bounds: Bounds, pool: Pool) -> Tier:
        return Tier(store, bounds, pool, partial(self._moved, store.medium), self._clock)

    def close(self) -> None:
        for tier in self.tiers:
            tier.close()

    def shelf(self, longest: int) -> PinnedShelf:
        """A shelf in the nearest tier that has room for `longest` tokens, or the largest."""
        need = -(-longest // self._pool.layout.block_size)
        tiers = [tier for tier in self.tiers if tier.store.pins is not None]
        if not tiers:
            raise ValueError("tiers.long_contexts: needs tiers.memory_mib or tiers.disk")
        roomy = next((tier for tier in tiers if tier.store.capacity >= need), None)
        return PinnedShelf(roomy or max(tiers, key=lambda tier: tier.store.capacity))

    @property
    def media(self) -> list[str]:
        return [tier.medium for tier in self.tiers]

    @property
    def capacity(self) -> int:
        return sum(tier.store.capacity for tier in self.tiers)

    @property
    def saves_to(self) -> str | None:
        return next((tier.medium for tier in self.tiers if tier.on), None)

    def follow(self, ghosts: Ghosts) -> None:
        self.ghosts = ghosts
        for tier in self.tiers:
            tier.ghosts = None if self.policy.keeps_all else ghosts

    def save(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        tier = next((tier for tier in self.tiers if tier.on), self.tiers[0])
        tier.save(Save([(key, block) for block, key in blocks], partial(self._report.saved, blocks)))

    def worth_loading(self, media: Sequence[str], compute_s: float | None, now: float) -> int:
        rates = {tier.medium: tier.rate(now) for tier in self.tiers}
        return units_to_load([rates[medium] for medium in media], self._pool.unit_bytes, compute_s)

    def worth_meeting(self, media: Sequence[str], compute_s: float, now: float) -> int | None:
        rates = {tier.medium: tier.rate(now) for tier in self.tiers}
        return units_to_compute([rates[medium] for medium in media], self._pool.unit_bytes, compute_s)

    def load(self, number: int, wanted: Sequence[tuple[int, bytes, str]], compute_s: float) -> None:
        began, self._compute_s = self._clock(), compute_s or self._compute_s
        self._loads[number] = load = _Load([block for block, _, _ in wanted], partial(self._report.landed, number), self._report.given_back)
        for medium, tier in self._by_medium.items():
            places = [i for i, (_, _, where) in enumerate(wanted) if where == medium]
            for start in range(0, len(places), tier.piece):
                part = places[start : start + tier.piece]
                keys, done = [wanted[i][1] for i in part], partial(load.done, len(part))
                tier.load(LoadPiece(keys, began, len(part) * compute_s, partial(load.take, part), done, wanted=partial(load.wants, part)))

    def arrived(self, number: int) -> list[bool]:
        return self._loads[number].arrived

    def narrow(self, number: int, most: int) -> None:
        self._loads[number].narrow(most)

    def end(self, number: int) -> list[bool | None]:
        return self._loads.pop(number).end()

    def watch(self, now: float) -> None:
        if now >= self._watch_at:
            self._watch_at = now + WATCH_S
            for tier in self.tiers:
                tier.watch(now)

    def told(self) -> list[TierReport]:
        """Reports for people and metrics; any thread may call it."""
        return [tier.told(self._clock(), self._compute_s) for tier in self.tiers]

    def drop(self, keys: Sequence[bytes]) -> None:
        for tier in self.tiers:
            tier.drop(keys)

    def credit(self, medium: str, seconds: float) -> None:
        self._by_medium[medium].credit(seconds)

    def hinted(self, result: str) -> None:
        self.hints[result] += 1

    def _moved(self, medium: str, stored: bool, keys: list[bytes]) -> None:
        self._report.moved(stored, medium, keys)


class _Load:
    """What has come of one load, and where it goes. `landed` is called once, when there is nothing more to come."""

    def __init__(self, blocks: list[int], landed: Callable[[], None], given_back: Callable[[list[int]], None]) -> None:
        self._blocks = blocks
        self.arrived = [False] * len(blocks)
        self._crossing = set[int]()  # places whose blocks are being filled
        self._left = len(blocks)
        self._most = len(blocks)  # that may still land, the first ones
        self._landed, self._given_back = landed, given_back
        self._ended = False
        self._crossed = threading.Condition()  # its lock is never held while something is copied

    def take(self, places: Sequence[int], units: Sequence[int], landing: Landing) -> list[bool]:
        """`units`: which of the piece, that goes to `places`, are here."""
        with self._crossed:
            wanted = [i for i in units if places[i] < self._most]  # nobody wants the others any more
            into = [places[i] for i in wanted]
            self._crossing.update(into)
        whole = [False] * len(into)
        try:
            whole = landing.into([self._blocks[i] for i in into], wanted) if into else []
        finally:
            with self._crossed:
                self._crossing.difference_update(into)
                late = self._ended
                for i, good in zip(into, whole, strict=True):
                    self.arrived[i] = good and not late
                self._crossed.notify_all()
            if late and into:
                self._given_back([self._blocks[i] for i in into])
        found = dict(zip(wanted, whole, strict=True))
        return [found.get(i, True) for i in units]

    def wants(self, places: Sequence[int]) -> bool:
        return min(places) < self._most

    def narrow(self, most: int) -> None:
        """Only the first `most` land from now on. Waits for the copy, from memory to memory, of a piece that is crossing."""
        with self._crossed:
            self._most = min(self._most, most)
            self._crossed.wait_for(lambda: all(place < self._most for place in self._crossing))

    def done(self, count: int) -> None:
        with self._crossed:
            self._left -= count
            over = self._left == 0
        if over:
            self._landed()

    def end(self) -> list[bool | None]:
        """Which have arrived. None: its block is being filled, and is told to `given_back` after that. Nothing more begins."""
        with self._crossed:
            self._ended, self._most = True, 0
            return [None if i in self._crossing else came for i, came in enumerate(self.arrived)]
