"""Contexts longer than the pool: the old blocks of a running sequence live in a tier, and come back for attention, layer by layer.

A *long* sequence owns a window of so many blocks, in which its newest tokens are computed. Before each step, what is full goes to the
shelf, a tier in which these blocks stay as long as they are pinned: `Sequence.away` counts them. For each layer, or for a few, the runner
reads them from there, in order, beside the window, and the kernels that compute attention in the pool compute it there: so no bit differs.

A sequence is long if its known tokens do not fit the pool, and becomes long if it can grow no more. At most `most` run at once. Others that
do not fit wait `aside`, where nobody waits behind them. What the shelf loses is computed again; if the tier is off, long sequences end.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol, runtime_checkable

from baton.engine.core.protocol import Runner
from baton.engine.core.scheduler import Scheduler
from baton.engine.core.sequence import Sequence, State

LOSSES = 3  # a sequence whose blocks were lost so often is not computed again


class ShelfFailed(Exception):
    """Blocks could not be kept, or were not whole when they were read."""


class Shelf(Protocol):
    """The tier that long sequences use. Called in the engine's thread; `keep` and `read` wait for the medium, for a bounded time."""

    capacity: int  # blocks

    @property
    def why_off(self) -> str:
        """Empty: it is on."""
        ...

    def pin(self, keys: Seq[bytes]) -> None:
        """These stay, once they are held, until they have been unpinned as often."""
        ...

    def unpin(self, keys: Seq[bytes]) -> None: ...

    def holds(self, keys: Seq[bytes]) -> list[bool]: ...

    def keep(self, blocks: Seq[tuple[int, bytes]]) -> None:
        """Keeps blocks, each given as (block of the pool, key), whose keys are pinned. When it returns, the blocks may be reused. Raises
        ShelfFailed, if it does not hold all."""
        ...

    def read(self, keys: Seq[bytes], take: Callable[[int, memoryview], None]) -> None:
        """`take` gets, in some thread, the index of each key and the verified bytes of its block, and copies them. Raises ShelfFailed, if
        not all came; none comes afterwards."""
        ...


class Unreadable(Exception):
    """Blocks of `sequence_id` could not be read from the shelf in a step. No sequence of the step has a sampled token."""

    def __init__(self, sequence_id: str, why: str) -> None:
        super().__init__(f"the KV of {sequence_id} could not be read: {why}")
        self.sequence_id = sequence_id


@runtime_checkable
class ReadsShelf(Protocol):
    """A `Runner` that can compute long sequences."""

    def read_from(self, shelf: Shelf, longest: int) -> None:
        """Sequences with `away` blocks on this shelf may come, one of at most `longest` tokens in a step at a time. A step raises
        Unreadable."""
        ...


class LongContexts:
    """Belongs to the engine's thread. What a sequence has pinned are always the first `Sequence.away` of its keys."""

    def __init__(self, scheduler: Scheduler, shelf: Shelf, runner: Runner, most: int, longest: int) -> None:
        """`longest`: tokens. Raises ValueError, which names the configuration key, for what cannot serve such sequences."""
        size, limits, blocks = scheduler.block_size, scheduler.limits, scheduler.pool.num_blocks
        self.window = max(2, min(blocks // 2, -(-limits.max_num_batched_tokens // size) + 1))  # blocks
        need = most * -(-longest // size)
        if need > shelf.capacity:
            raise ValueError(
                f"tiers.long_contexts: {most} of {longest} tokens need {need} blocks in one tier, and the largest has {shelf.capacity}"
            )
        if not isinstance(runner, ReadsShelf):
            raise ValueError("tiers.long_contexts: this engine cannot compute attention over what is in a tier")
        runner.read_from(shelf, longest)
        self.most = most
        self._scheduler, self._pool, self._shelf = scheduler, scheduler.pool, shelf
        self._ending: list[tuple[Sequence, str]] = []

    def turn(self, now: float) -> list[tuple[Sequence, str]]:
        """Must be called before each step. Returns the sequences that cannot go on, and why."""
        ending, self._ending = self._ending, []
        running = self._running()
        if why := self._shelf.why_off:
            return ending + [(seq, why) for seq in (*running, *self._queued())]
        for seq in running:
            try:
                self._retire(seq)
            except ShelfFailed as error:
                ending.append((seq, str(error)))
        self._seat(now)
        return ending

    def lost(self, seq: Sequence, why: str) -> None:
        """What it had on the shelf is not all there: it is computed again, from the first block that is missing."""
        seq.losses += 1
        self._scheduler.preempt(seq)
        if seq.losses >= LOSSES:
            self._ending.append((seq, why))

    def admit(self, seq: Sequence) -> bool:
        """Gives it a window, and the blocks that the shelf or the pool has of it."""
        scheduler, pool, shelf = self._scheduler, self._pool, self._shelf
        if len(self._running()) >= self.most or not scheduler.fits(seq, self.window, pool.available - self.window):
            return False
        keys = scheduler.usable_keys(seq)
        shelf.pin(keys)
        known, cached = 0, list[tuple[int, bytes]]()
        for key, held in zip(keys, shelf.holds(keys), strict=True):
            found = [] if held else pool.match([key])
            if not (held or found):
                break
            cached += [(block, key) for block in found]
            known += 1
        shelf.unpin(keys[known:])
        try:
            if cached:
                shelf.keep(cached)
        except ShelfFailed:
            shelf.unpin(keys[:known])
            return False
        finally:
            pool.release([block for block, _ in cached])
        seq.long, seq.away, seq.blocks = True, known, pool.allocate(self.window) or []
        scheduler.starts_with(seq, known)
        return True

    def extend(self, seq: Sequence) -> bool:
        """A running sequence has no room for its next token: makes it long, if it is one that has to be. False: it is not, or there is no
        room even for that."""
        scheduler = self._scheduler
        may = not seq.hold and seq.owner is None and seq.params.beams is None and not seq.long and len(self._running()) < self.most
        if not may or not scheduler.outgrows(seq) or 2 * len(seq.blocks) < self._pool.num_blocks:
            return False
        seq.long = True
        try:
            self._retire(seq)
        except ShelfFailed as error:
            self._ending.append((seq, str(error)))
            seq.long = False
        return seq.long and len(seq.blocks) == self.window

    def leave(self, seq: Sequence) -> None:
        """Its blocks are given back."""
        self._shelf.unpin(seq.keys[: seq.away])
        seq.long, seq.away = False, 0

    def _running(self) -> list[Sequence]:
        return [seq for seq in self._scheduler.running if seq.long]

    def _queued(self) -> list[Sequence]:
        scheduler = self._scheduler
        waiting = [seq for seq in scheduler.waiting if scheduler.is_long(seq)]
        return sorted((*waiting, *scheduler.aside), key=lambda seq: seq.arrival or 0)

    def _retire(self, seq: Sequence) -> None:
        """Moves its full blocks to the shelf, and gives it empty ones. Raises ShelfFailed; then nothing has changed."""
        full = seq.computed // self._scheduler.block_size - seq.away
        if full:
            keys, blocks = seq.keys[seq.away : seq.away + full], seq.blocks[:full]
            self._shelf.pin(keys)
            try:
                self._shelf.keep(list(zip(blocks, keys, strict=True)))
            except ShelfFailed:
                self._shelf.unpin(keys)
                raise
            self._pool.release(blocks)
            seq.blocks = seq.blocks[full:]
            seq.away += full
        seq.blocks += self._pool.allocate(max(0, self.window - len(seq.blocks))) or []

    def _seat(self, now: float) -> None:
        """Puts those that may run into the queue, and those that are too late; the others wait aside."""
        scheduler, free = self._scheduler, self.most - len(self._running())
        for seq in self._queued():
            stands = free > 0 or seq.expires_at <= now
            free -= 1
            if stands and seq in scheduler.aside:
                scheduler.aside.remove(seq)
                scheduler.enqueue(seq)
            elif not stands and seq in scheduler.waiting:
                scheduler.waiting.remove(seq)
                scheduler.aside.append(seq)


def ended(seq: Sequence, why: str) -> str:
    """What its caller is told."""
    where = "it waited" if seq.state is State.WAITING else "it ran"
    return f"a context longer than the pool cannot go on while {where}: {why}"
