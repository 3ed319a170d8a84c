"""The engine's half of colder copies: which blocks go down, and which come up before their sequence runs. It decides and never waits.

down   The oldest cached blocks are saved before their room is needed, so that an eviction loses nothing (or all blocks as soon as they are
       sealed). The saver owns a block meanwhile.
up     A sequence near the head of the queue whose keys go on in a tier beyond the prefix cache leaves the queue and keeps its place
       (`Scheduler.loading`). The load owns blocks for what comes. What has come is sealed and cached, and the sequence queues again: it is
       admitted like any other, with a longer prefix. At `Load.deadline` the load ends with what has come, and the rest is computed.

A step never has fewer blocks than it needs because of this: what is saved at a time is little, and never the last free block.
"""

import itertools
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from baton.engine.core.block_key import DEVICE
from baton.engine.core.blocks import BlockPool, CacheChange, Content, Keyed
from baton.engine.core.kvcache import Pool
from baton.engine.core.long_contexts import Shelf
from baton.engine.core.scheduler import Scheduler
from baton.engine.core.sequence import Sequence

SOUGHT = 4  # sequences at the head of the queue whose keys are looked up
NEAR = 512  # blocks that are free or saved, so that one admission may take so many and nothing is lost
SAVED = 64  # blocks that are saved at a time; an eighth of a small pool
REMEMBERED = 4096  # sealed blocks that wait to be saved
LEAST_WAIT_S = 0.1  # for a load, however soon it would be computed: a thread may be late
SMOOTHING = 0.2  # weight of the newest step in the pace of prefills


class Wanted(NamedTuple):
    block: int
    key: bytes
    medium: str  # the nearest that holds the key


@dataclass(frozen=True, slots=True)
class Policy:
    at_once: bool = False  # blocks are saved when they are sealed, not only before they are evicted
    wait_s: float = 1.0  # the longest that a sequence waits for a load


class Report(Protocol):
    """Tells the engine, from any thread and without waiting, what `Colder` wants to know under the same names."""

    def saved(self, blocks: Seq[tuple[int, bytes]]) -> None: ...

    def landed(self, number: int) -> None: ...

    def given_back(self, blocks: Seq[int]) -> None: ...

    def moved(self, stored: bool, medium: str, keys: Seq[bytes]) -> None: ...


class Tiers(Protocol):
    """Colder places. All but `open` and `close` is called in the engine's thread, returns at once and raises nothing."""

    policy: Policy

    def open(self, pool: Pool, report: Report) -> None:
        """May wait for the media. Raises ValueError, which names the configuration key, for what cannot serve this pool."""
        ...

    def close(self) -> None:
        """May wait. No byte lands in the pool afterwards, and everything that was taken has been reported."""
        ...

    def shelf(self, longest: int) -> Shelf:
        """Where one sequence after the other of so many tokens has room. Raises ValueError, which names the key, if no medium is one."""
        ...

    @property
    def media(self) -> Seq[str]:
        """The nearest first."""
        ...

    @property
    def saves_to(self) -> str | None:
        """The medium that takes what is saved now."""
        ...

    def save(self, blocks: Seq[tuple[int, bytes]]) -> None:
        """Of (block, key). Each is given to `saved`."""
        ...

    def worth_loading(self, media: Seq[str], compute_s: float | None, now: float) -> int:
        """How many of a run of units, from the first on, are sooner loaded than computed. `media`: where each is. `compute_s`: what the
        engine takes for one, if that is known."""
        ...

    def load(self, number: int, wanted: Seq[tuple[int, bytes, str]], compute_s: float) -> None:
        """Copies units into blocks, and tells `landed` when no more will come. Of (block, key, medium). `compute_s`: of one."""
        ...

    def end(self, number: int) -> Seq[bool | None]:
        """Of a load: which of its units have arrived. No byte of others lands any more, but in the blocks of those that are None: these are
        being filled at this moment, and are told to `given_back` after that. To be called once for each, landed or not."""
        ...

    def watch(self, now: float) -> None:
        """Now and then, for what only a clock can tell: a medium that hangs."""
        ...

    def drop(self, keys: Seq[bytes]) -> None:
        """Forgets these: what they hold is wrong."""
        ...


@dataclass(eq=False, slots=True)
class Load:
    seq: Sequence
    known: list[int]  # blocks of the prefix before it; owned, so that they stay
    wanted: list[Wanted]
    contents: list[Content] | None  # of `wanted`, if the pool describes blocks
    deadline: float


class Colder:
    """Belongs to the engine's thread."""

    def __init__(self, tiers: Tiers, pool: BlockPool, scheduler: Scheduler) -> None:
        """`tiers`: are open."""
        self._tiers = tiers
        self._pool = pool
        self._scheduler = scheduler
        self._policy = tiers.policy
        self.held: dict[str, dict[bytes, None]] = {medium: {} for medium in tiers.media}  # medium, the nearest first → keys
        self._loads: dict[int, Load] = {}
        self._numbers = itertools.count()
        self._saving = 0  # blocks
        self._late = 0  # blocks of loads that have ended, which something may still land in
        self._sealed: deque[bytes] = deque(maxlen=REMEMBERED)
        self._clean: tuple[object, ...] | None = None  # the state of the pool in which nothing was left to save
        self._prefill_s: float | None = None  # of a token
        self.loaded_tokens = 0

    def turn(self, now: float) -> None:
        """Before each step, and when there is none."""
        self._tiers.watch(now)
        for number in [number for number, load in self._loads.items() if load.deadline <= now]:
            self.landed(number)
        self._seek(now)
        self._save()

    def until(self, now: float) -> float | None:
        """Seconds until a load has to end. None: there is none."""
        return max(0.0, min(load.deadline for load in self._loads.values()) - now) if self._loads else None

    def paced(self, seconds: float, tokens: int, sequences: int) -> None:
        """A step took so long. Those that mostly decode say little of a prefill."""
        if tokens >= 8 * sequences:
            each, known = seconds / tokens, self._prefill_s
            self._prefill_s = each if known is None else known + SMOOTHING * (each - known)

    def noted(self, changes: Iterable[CacheChange]) -> None:
        """What the prefix cache has gained and lost since the last call."""
        if self._policy.at_once:
            self._sealed.extend(change.key for change in changes if change.stored and change.medium == DEVICE)

    def saved(self, blocks: Seq[tuple[int, bytes]]) -> None:
        """These are in a tier, or the tiers do not want them."""
        self._saving -= len(blocks)
        for block, _ in blocks:  # the oldest first
            self._pool.release([block])

    def moved(self, stored: bool, medium: str, keys: Iterable[bytes]) -> None:
        """A tier gained or lost keys."""
        held = self.held[medium]
        changed = [key for key in keys if (key in held) != stored]
        if stored:
            held.update(dict.fromkeys(changed))
        else:
            for key in changed:
                del held[key]
        self._pool.note(CacheChange(stored, key, medium) for key in changed)

    def landed(self, number: int) -> None:
        """A load has ended, or ends now."""
        load = self._loads.pop(number, None)
        if load is None:
            return
        arrived = self._tiers.end(number)
        for i, (one, came) in enumerate(zip(load.wanted, arrived, strict=True)):
            if came:
                self._pool.seal(one.block, one.key, load.contents[i] if load.contents else None)
        self.loaded_tokens += sum(map(bool, arrived)) * self._scheduler.block_size
        self._late += arrived.count(None)
        still = [one.block for one, came in zip(load.wanted, arrived, strict=True) if came is not None]
        self._pool.release([*load.known, *still])
        if load.seq in self._scheduler.loading:
            self._scheduler.loading.remove(load.seq)
            self._scheduler.enqueue(load.seq)

    def given_back(self, blocks: Seq[int]) -> None:
        """Nothing lands any more in these blocks of a load that has ended."""
        self._late -= len(blocks)
        self._pool.release(blocks)

    def drop(self, keys: Seq[bytes]) -> None:
        self._tiers.drop(keys)

    def _save(self) -> None:
        target, pool = self._tiers.saves_to, self._pool
        if target is None:
            self._sealed.clear()
            return
        held = self.held[target]
        now = pool.available, pool.num_cached, len(held), target
        if now == self._clean and not self._sealed:
            return
        spare = pool.available - len(self._scheduler.running) - 1  # each that runs may need one in the next step
        room = max(1, min(SAVED, pool.num_blocks // 8)) - self._saving
        blocks: list[Keyed] = []
        while self._sealed and len(blocks) < min(room, spare):
            key = self._sealed.popleft()
            if key not in held:
                blocks += [Keyed(block, key) for block in pool.match([key])]
        near = NEAR - (pool.available - pool.num_cached)
        room = min(room, spare) - len(blocks)
        blocks += (coldest := pool.coldest(room, near, held))
        self._clean = now if len(coldest) < room else None
        if blocks:
            self._saving += len(blocks)
            self._tiers.save(blocks)

    def _seek(self, now: float) -> None:
        if any(self.held.values()):
            for seq in self._scheduler.waiting[:SOUGHT]:
                self._seek_for(seq, now)

    def _seek_for(self, seq: Sequence, now: float) -> None:
        scheduler, pool, size = self._scheduler, self._pool, self._scheduler.block_size
        if scheduler.is_long(seq):  # what is of it in a tier is read from there
            return
        keys = scheduler.usable_keys(seq)
        known, _ = pool.matched(keys)
        if (seq.sought is not None and known >= seq.sought) or not scheduler.has_room(seq):
            return
        media = list(self._media(keys[known:]))
        compute_s = None if self._prefill_s is None else size * self._prefill_s
        worth = self._tiers.worth_loading(media, compute_s, now) if media else 0
        if worth == 0:
            seq.sought = known
            return
        count = min(worth, pool.num_blocks // 2 - self._loading)
        if count <= 0:
            return  # it is looked for again in the next step
        seq.sought = known
        owned, fresh = pool.match(keys[:known]), pool.allocate(count)
        assert fresh is not None, "there is room for more"
        wanted = [Wanted(*one) for one in zip(fresh, keys[known:], media, strict=False)]
        contents = [scheduler.content(seq, known + i) for i in range(count)] if pool.describes else None
        wait_s = self._policy.wait_s if compute_s is None else min(self._policy.wait_s, max(LEAST_WAIT_S, count * compute_s))
        scheduler.waiting.remove(seq)
        scheduler.loading.append(seq)
        self._loads[number := next(self._numbers)] = Load(seq, owned, wanted, contents, now + wait_s)
        self._tiers.load(number, wanted, compute_s or 0.0)

    @property
    def _loading(self) -> int:
        """Blocks that loads own."""
        return sum(len(load.wanted) for load in self._loads.values()) + self._late

    def _media(self, keys: Seq[bytes]) -> Iterable[str]:
        """Where each of the leading keys is that some tier holds."""
        for key in keys:
            medium = next((medium for medium, held in self.held.items() if key in held), None)
            if medium is None:
                return
            yield medium
