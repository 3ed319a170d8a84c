"""The engine's half of colder copies: which blocks go down, and which come up before their sequence runs. It decides and never waits.

down   The oldest cached blocks are saved before their room is needed, so that an eviction loses nothing (or all blocks as soon as they are
       sealed). The saver owns a block meanwhile. While none comes back (`ghosts`), only those of preempted sequences are.
up     A sequence near the head of the queue whose keys go on in a tier beyond the prefix cache leaves the queue and keeps its place
       (`Scheduler.loading`). The load owns blocks for what comes. What has come is sealed and cached, and the sequence queues again: it is
       admitted like any other, with a longer prefix. At `TierLoad.deadline` the load ends with what has come, and the rest is computed.
ahead  `bring` loads blocks for which no sequence is here yet: a router's hint, a peer that borrows, KV of a handoff. They are cached. A
       sequence that comes meanwhile waits for that load like for one of its own.
both   Where that is sooner, and it can be admitted now, it runs at once: its front is computed while the tail is loaded (`meeting`).

A step never has fewer blocks than it needs because of this: what is saved at a time is little, and never the last free block.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

from baton.engine.core.ahead import Ahead, Result
from baton.engine.core.block_key import DEVICE
from baton.engine.core.blocks import BlockContent, BlockPool, CacheChange, Keyed
from baton.engine.core.ghosts import Ghosts
from baton.engine.core.kvcache import Pool
from baton.engine.core.long_contexts import Shelf
from baton.engine.core.meeting import Meeting
from baton.engine.core.scheduler import Scheduler
from baton.engine.core.sequence import Sequence

SOUGHT = 4  # sequences at the head of the queue whose keys are looked up
NEAR = 512  # blocks that are free or saved, so that one admission may take so many and nothing is lost
SAVED = 64  # blocks that are saved at a time; an eighth of a small pool
REMEMBERED = 4096  # sealed blocks that wait to be saved
LEAST_WAIT_S = 0.1  # for a load, however soon it would be computed: a thread may be late
BRING_WAIT_S = 1.0  # for what a handoff, or a peer that borrows, asks for; a borrower waits twice as long
BRINGING = 8  # loads for which no sequence is here, at a time
SMOOTHING = 0.2  # weight of the newest step in the pace of prefills


class WantedBlock(NamedTuple):
    block: int
    key: bytes
    medium: str  # the nearest that holds the key


@dataclass(frozen=True, slots=True)
class TierPolicy:
    at_once: bool = False  # blocks are saved when they are sealed, not only before they are evicted
    wait_s: float = 1.0  # the longest that a sequence waits for a load
    keeps_all: bool = False  # also while no block comes back


class Report(Protocol):
    """Tells the engine, from any thread and without waiting, what `Colder` wants to know under the same names."""

    def saved(self, blocks: Seq[tuple[int, bytes]]) -> None: ...

    def landed(self, number: int) -> None: ...

    def given_back(self, blocks: Seq[int]) -> None: ...

    def moved(self, stored: bool, medium: str, keys: Seq[bytes]) -> None: ...


class ColderTiers(Protocol):
    """Colder places. All but `open` and `close` is called in the engine's thread, returns at once and raises nothing."""

    policy: TierPolicy

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
    def capacity(self) -> int:
        """Blocks that have room in them."""
        ...

    @property
    def saves_to(self) -> str | None:
        """The medium that takes what is saved now."""
        ...

    def follow(self, ghosts: Ghosts) -> None:
        """What they tell of themselves says whether these let anything in."""
        ...

    def save(self, blocks: Seq[tuple[int, bytes]]) -> None:
        """Saves blocks, each given as (block, key), and gives each to `saved`."""
        ...

    def worth_loading(self, media: Seq[str], compute_s: float | None, now: float) -> int:
        """How many of a run of units, from the first on, are sooner loaded than computed. `media`: where each is. `compute_s`: what the
        engine takes for one, if that is known."""
        ...

    def worth_meeting(self, media: Seq[str], compute_s: float, now: float) -> int | None:
        """How many of a run of units are computed, from the first on, while the others are loaded, from the last on. None: it is not sooner
        than to load the front, or not known."""
        ...

    def load(self, number: int, wanted: Seq[tuple[int, bytes, str]], compute_s: float) -> None:
        """Copies units into blocks, and tells `landed` when no more will come. Of (block, key, medium). `compute_s`: of one."""
        ...

    def arrived(self, number: int) -> Seq[bool]:
        """Which units of a load that has not ended have arrived."""
        ...

    def narrow(self, number: int, most: int) -> None:
        """Cuts such a load short: none but its first `most` units land any more. Waits for those that are landing at this moment."""
        ...

    def end(self, number: int) -> Seq[bool | None]:
        """Ends a load. Returns which of its units have arrived. No byte of others lands any more, but in the blocks of those that are
        None: these are being filled at this moment, and are told to `given_back` after that. To be called once for each load, landed or
        not."""
        ...

    def watch(self, now: float) -> None:
        """Now and then, for what only a clock can tell: a medium that hangs."""
        ...

    def drop(self, keys: Seq[bytes]) -> None:
        """Forgets these: what they hold is wrong."""
        ...

    def credit(self, medium: str, seconds: float) -> None:
        """Computing that blocks saved which a hint had brought: `load` was given no `compute_s` for them."""
        ...

    def hinted(self, result: str) -> None:
        """What has become of a hint (`ahead.Result`)."""
        ...


Ended = Callable[[int], None]  # gets the number of blocks that have come


@dataclass(eq=False, slots=True)
class TierLoad:
    seqs: list[Sequence]  # that wait for it
    known: list[int]  # blocks of the prefix before it; owned, so that they stay
    wanted: list[WantedBlock]
    contents: list[BlockContent] | None  # of `wanted`, if the pool describes blocks
    deadline: float
    ended: list[Ended] = field(default_factory=list)  # those that have asked for it without a sequence
    ahead: bool = False  # it began without a sequence
    hint: bool = False  # it does not count as saved until somebody comes for it


class Colder:
    """Belongs to the engine's thread."""

    def __init__(self, tiers: ColderTiers, pool: BlockPool, scheduler: Scheduler, both: bool = True) -> None:
        """`tiers`: are open. `both`: a load may land in the blocks of a sequence that runs."""
        self._both = both
        self._tiers = tiers
        self._pool = pool
        self._scheduler = scheduler
        self._policy = tiers.policy
        self.ghosts = Ghosts(pool.num_blocks, tiers.capacity)
        tiers.follow(self.ghosts)
        self.held: dict[str, dict[bytes, None]] = {medium: {} for medium in tiers.media}  # medium, the nearest first → keys
        self._loads: dict[int, TierLoad] = {}
        self._meetings: dict[int, Meeting] = {}
        scheduler.part, scheduler.admitted = self._part, self._admitted
        self._numbers = itertools.count()
        self._saving = 0  # blocks
        self._late = 0  # blocks of loads that have ended, which something may still land in
        self._sealed: deque[bytes] = deque(maxlen=REMEMBERED)
        self._left: list[bytes] = []  # keys that the pool has given up since the last turn
        self._clean: tuple[object, ...] | None = None  # the state of the pool in which nothing was left to save
        self._prefill_s: float | None = None  # of a token
        self._ahead = Ahead()
        self.loaded_tokens = 0

    def turn(self, now: float) -> int:
        """Must be called before each step, and when there is none. Returns how many tokens running sequences have got."""
        self._tiers.watch(now)
        if self._left:
            self.ghosts.left(self._left, now)
            self._left.clear()
        for number in [number for number, load in self._loads.items() if load.deadline <= now]:
            self.landed(number)
        if self._ahead:
            self._tell_hints(self._ahead.expire(now))
        met = sum(self._met(meeting) for meeting in list(self._meetings.values()) if meeting.over)
        if self._scheduler.waiting:
            self._seek(now)
        self._save()
        return met

    def bring(
        self, keys: Seq[bytes], until: float, now: float, ended: Ended, rival_s: float | None = None, hint: bool = False
    ) -> int | None:
        """Begins to load what a tier holds of a prefix, `keys`, beyond the pool. `rival_s`: what a block costs if it is not loaded; None:
        computing it. Returns the number of the load, which calls `ended` in any case. None: nothing is loaded."""
        pool = self._pool
        known, idle = pool.matched(keys)
        self._use(keys[:known])
        if (found := self._coming(keys, known)) is not None:
            self._loads[found].ended.append(ended)
            return found
        media = [] if pool.describes else list(self._media(keys[known:]))
        compute_s = self._block_s
        worth = self._tiers.worth_loading(media, compute_s if rival_s is None else rival_s, now) if media else 0
        # Half of what is left at most: those that run need blocks, too.
        count = min(worth, pool.num_blocks // 4 - self._loading, (pool.available - idle) // 2)
        if count <= 0 or sum(not load.seqs for load in self._loads.values()) >= BRINGING:
            self._tell_hints(["nothing"] if hint else [])
            return None
        number, load = self._begin(TierLoad([], [], [], None, until, [ended], True, hint), keys, known, media[:count])
        if not hint:  # nobody has come yet
            self._ask(keys[known : known + count])
        self._tiers.load(number, load.wanted, 0.0 if hint else compute_s or 0.0)
        return number

    def leave(self, number: int, ended: Ended) -> None:
        """Who has asked for a load no longer wants it: it ends, unless others wait for it."""
        load = self._loads.get(number)
        if load is not None and ended in load.ended:
            load.ended.remove(ended)
            if not load.ended and not load.seqs:
                self.landed(number)

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
        for change in changes:
            if change.medium != DEVICE:
                continue
            if not change.stored:
                self._left.append(change.key)
            elif self._policy.at_once:
                self._sealed.append(change.key)

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
        here = sum(map(bool, arrived))
        self.loaded_tokens += here * self._scheduler.block_size
        self._late += arrived.count(None)
        still = [one.block for one, came in zip(load.wanted, arrived, strict=True) if came is not None]
        self._pool.release([*load.known, *still])
        if load.hint:
            brought = [(one.key, one.medium) for one, good in zip(load.wanted, arrived, strict=True) if good]
            self._tell_hints(self._ahead.brought(number, brought, load.deadline))
        for seq in load.seqs:
            if seq in self._scheduler.loading:
                if load.ahead and here:
                    seq.sought = None  # what is left may be worth a load of its own
                self._scheduler.loading.remove(seq)
                self._scheduler.enqueue(seq)
        for ended in load.ended:
            ended(here)

    def given_back(self, blocks: Seq[int]) -> None:
        """Nothing lands any more in these blocks of a load that has ended."""
        self._late -= len(blocks)
        self._pool.release(blocks)

    def drop(self, keys: Seq[bytes]) -> None:
        self._tiers.drop(keys)

    @property
    def still(self) -> bool:
        """Whether `turn` does nothing, now and as long as nobody tells or asks anything and no block changes hands."""
        if self._left or self._sealed or self._loads or self._meetings or self._ahead:
            return False
        target, every, must = self._aim()
        if target is not None and self._state(target, every, must) != self._clean:
            return False
        waiting = self._scheduler.waiting[:SOUGHT] if any(self.held.values()) else ()
        return all(self._sought(seq, self._pool.matched(self._scheduler.usable_keys(seq))[0]) for seq in waiting)

    @property
    def saves(self) -> bool:
        return self._aim()[0] is not None

    def _aim(self) -> tuple[str | None, bool, Seq[Sequence]]:
        """Where blocks are saved now, if they are; whether all are, or those of these sequences alone."""
        every = self._policy.keeps_all or self.ghosts.open
        must = () if every else self._preempted()
        return self._tiers.saves_to if every or must else None, every, must

    def _state(self, target: str, every: bool, must: Seq[Sequence]) -> tuple[object, ...]:
        """If it is still this, nothing more is to be saved."""
        pool, held = self._pool, self.held[target]
        return pool.available, pool.num_cached, len(held), target, every, *((seq.id, seq.preemptions) for seq in must)

    def _save(self) -> None:
        pool = self._pool
        target, every, must = self._aim()
        if target is None or not every:
            self._sealed.clear()
        if target is None:
            self._clean = None
            return
        held, now = self.held[target], self._state(target, every, must)
        if now == self._clean and not self._sealed:
            return
        only = None if every else {key for seq in must for key in seq.keys}
        spare = pool.available - len(self._scheduler.running) - 1  # each that runs may need one in the next step
        room = max(1, min(SAVED, pool.num_blocks // 8)) - self._saving
        blocks: list[Keyed] = []
        while self._sealed and len(blocks) < min(room, spare):
            key = self._sealed.popleft()
            if key not in held:
                blocks += [Keyed(block, key) for block in pool.match([key])]
        near = NEAR - (pool.available - pool.num_cached)
        room = min(room, spare) - len(blocks)
        blocks += (coldest := pool.coldest(room, near, held, only))
        self._clean = now if len(coldest) < room else None
        if blocks:
            self._saving += len(blocks)
            self._tiers.save(blocks)

    def _preempted(self) -> list[Sequence]:
        """Those that will need again what they have in the pool; in the order of arrival they are before all that never ran."""
        return [seq for seq in self._scheduler.waiting[: self._scheduler.limits.max_num_seqs] if seq.preemptions]

    def _admitted(self, seq: Sequence, known: int) -> None:
        """It has `known` blocks of the pool."""
        self._ask(self._scheduler.usable_keys(seq)[known:], seq)

    def _ask(self, keys: Seq[bytes], seq: Sequence | None = None) -> None:
        """The blocks of a preempted or a long sequence are kept in any case, and say nothing of others that left the pool."""
        if seq is None or not (seq.preemptions or seq.long):
            self.ghosts.asked(keys, self.held.values())

    def _seek(self, now: float) -> None:
        if any(self.held.values()):
            for seq in self._scheduler.waiting[:SOUGHT]:
                self._seek_for(seq, now)

    def _seek_for(self, seq: Sequence, now: float) -> None:
        scheduler, pool = self._scheduler, self._pool
        if scheduler.is_long(seq):  # what is of it in a tier is read from there
            return
        keys = scheduler.usable_keys(seq)
        known, _ = pool.matched(keys)
        if self._ahead:
            self._use(keys[:known])
        if self._sought(seq, known):
            return
        if (found := self._coming(keys, known)) is not None:
            self._join(seq, known, self._loads[found], now)
            return
        media, compute_s = list(self._media(keys[known:])), self._block_s
        if compute_s is not None and self._meets(seq, keys[: known + len(media)], media, compute_s, now):
            return
        worth = self._tiers.worth_loading(media, compute_s, now) if media else 0
        if worth == 0:
            seq.sought = known
            return
        count = min(worth, pool.num_blocks // 2 - self._loading)
        if count <= 0:
            return  # it is looked for again in the next step
        seq.sought = known
        self._ask(keys[known : known + count], seq)
        contents = [scheduler.content(seq, known + i) for i in range(count)] if pool.describes else None
        wait_s = self._policy.wait_s if compute_s is None else min(self._policy.wait_s, max(LEAST_WAIT_S, count * compute_s))
        scheduler.waiting.remove(seq)
        scheduler.loading.append(seq)
        number, load = self._begin(TierLoad([seq], [], [], contents, now + wait_s), keys, known, media[:count])
        self._tiers.load(number, load.wanted, compute_s or 0.0)

    def _sought(self, seq: Sequence, known: int) -> bool:
        """Whether nothing is looked for, for a sequence of which `known` blocks are in the pool."""
        return (seq.sought is not None and known >= seq.sought) or not self._scheduler.has_room(seq)

    def _begin(self, load: TierLoad, keys: Seq[bytes], known: int, media: Seq[str]) -> tuple[int, TierLoad]:
        """Owns the known prefix, and blocks for what comes behind it: there is room."""
        load.known, fresh = self._pool.match(keys[:known]), self._pool.allocate(len(media))
        assert fresh is not None, "there is room for more"
        load.wanted = [WantedBlock(*one) for one in zip(fresh, keys[known:], media, strict=False)]
        self._loads[number := next(self._numbers)] = load
        return number, load

    def _coming(self, keys: Seq[bytes], known: int) -> int | None:
        """The load that goes on behind the known keys and began without a sequence."""
        after = keys[known] if known < len(keys) else None
        return next((number for number, load in self._loads.items() if load.ahead and load.wanted[0].key == after), None)

    def _join(self, seq: Sequence, known: int, load: TierLoad, now: float) -> None:
        load.deadline = min(load.deadline, now + self._policy.wait_s)
        load.seqs.append(seq)
        seq.sought = known
        self._scheduler.waiting.remove(seq)
        self._scheduler.loading.append(seq)

    def _use(self, keys: Seq[bytes]) -> None:
        """These are in the pool, and somebody has come for them."""
        for medium, count in self._ahead.used(keys).items():
            self.ghosts.came(count)
            self._tiers.credit(medium, count * (self._block_s or 0.0))

    def _tell_hints(self, results: Iterable[Result]) -> None:
        for result in results:
            self._tiers.hinted(result)

    @property
    def _block_s(self) -> float | None:
        """What computing a block takes, if that is known."""
        return None if self._prefill_s is None else self._scheduler.block_size * self._prefill_s

    def _meets(self, seq: Sequence, keys: Seq[bytes], media: Seq[str], compute_s: float, now: float) -> bool:
        """Begins both ends of a run, those of `keys` that are in `media`, if that is sooner. False: nothing has changed."""
        tiers, scheduler = self._tiers, self._scheduler
        if not self._both or len(media) < 2 or seq.expires_at <= now:
            return False
        if (front := tiers.worth_meeting(media, compute_s, now)) is None or not scheduler.begin(seq):
            return False
        number, end, known = next(self._numbers), len(keys), len(keys) - len(media)
        wanted = [WantedBlock(seq.blocks[i], keys[i], media[i - known]) for i in range(end - 1, known - 1, -1)]
        tiers.load(number, wanted, compute_s)
        seq.meets = self._meetings[number] = Meeting(
            seq, known + front, end, scheduler.block_size, partial(tiers.arrived, number), partial(tiers.narrow, number)
        )
        return True

    def _met(self, meeting: Meeting) -> int:
        """The sequence goes on behind what has come, so many tokens."""
        seq, end = meeting.seq, meeting.end * self._scheduler.block_size
        self._part(seq)
        tokens = end - seq.computed
        self.loaded_tokens += tokens
        seq.cached += tokens if seq.preemptions == 0 else 0
        seq.drafted = end  # a block has both
        self._scheduler.advance(seq, end)
        return tokens if seq.preemptions == 0 else 0

    def _part(self, seq: Sequence) -> None:
        number = next(number for number, meeting in self._meetings.items() if meeting.seq is seq)
        del self._meetings[number]
        self._tiers.narrow(number, 0)  # the sequence may give its blocks away at once
        self._tiers.end(number)
        seq.meets = None

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
