"""Many steps of an engine as one: exactly what they would have done one by one.

Between two events that change a batch, an engine does the same in every step: each sequence gets one token more. So the ends of all steps
until the next event are known at once. They are the sum of the steps' times (`baton.profile.models.decode_seconds`), added in the order in
which the steps would have added them. Nothing in them needs to be decided:

    the batch         `plain_steps` counts how many steps no sequence ends, none waits that could begin, none is guessed for, and each finds
                      its block
    the blocks        a sequence takes one when its last is full, and seals that; `Jump.reach` does both in the order of the steps
    the tokens        a modelled token is its position, so it is known before its step; `Jump.settle` appends them
    the tiers         `_still_steps` counts until when they have nothing to save, load or note
    a command         comes between two steps: it waits for the end of the step under way, with which the jump ends (`Jump.under_way`)
    who looks         at loads, tokens or caches during a jump sees what the steps that have begun by then have done (`reach`, `settle`)

As in a step by itself, what a step does to blocks and sequences is done when it begins, and is told when it ends. A step that ends at the
moment of an event has ended, and the next has begun.
"""

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq

from baton.engine.core.colder import Colder
from baton.engine.core.engine import Engine
from baton.engine.core.sequence import Sequence
from baton.engine.core.speculation import NONE, NOTHING_OFFERED

VOCABULARY = 1 << 16
IDS = tuple(range(VOCABULARY))  # one object for each token, however many sequences have it
LEAST = 2  # steps of a jump: one is a step


def ids(start: int, end: int) -> tuple[int, ...]:
    """The tokens at these positions: they say nothing, each is its position."""
    first = start % VOCABULARY
    found = IDS[first : first + end - start]
    while len(found) < end - start:
        found += IDS[: end - start - len(found)]
    return found


def plain_steps(engine: Engine, most: int) -> int:
    """The most steps in which running sequences decode and nothing else happens, if nobody asks for anything."""
    scheduler, block = engine.scheduler, engine.block_size
    running = scheduler.running
    if not running or scheduler.attached or may_guess(engine) or not all(_plain(seq, block) for seq in running):
        return 0
    if scheduler.waiting and scheduler.may_begin(scheduler.waiting[0]):
        return 0
    steps = min(most, min(seq.remaining for seq in running) - 1)
    while steps >= LEAST and _taken(running, steps, block) > engine.pool.available:
        steps //= 2
    if engine.colder is not None:
        steps = _still_steps(engine, engine.colder, steps)
    return steps if steps >= LEAST else 0


def may_guess(engine: Engine) -> bool:
    """Whether a step in which the running sequences decode may have guesses."""
    running, offer = engine.scheduler.running, engine.drafter.offer
    if offer is NOTHING_OFFERED or len(running) >= engine.scheduler.limits.speculation_batch_tokens:
        return False
    return any(offer.method_for(seq.params.speculation) != NONE for seq in running)


def _still_steps(engine: Engine, colder: Colder, most: int) -> int:
    """How many of these steps leave tiers nothing to do. They see at the next step what one takes from the pool, seals or evicts."""
    if not colder.still:
        return 0
    running, block, pool = engine.scheduler.running, engine.block_size, engine.pool
    first = min(most, *(seq.room(block) - seq.computed + 1 for seq in running))  # that takes a block
    if colder.saves:
        return min(first, *(block - seq.computed % block for seq in running))
    while most > first and _taken(running, most, block) > pool.available - pool.num_cached:
        most //= 2
    return max(most, first)


def _taken(running: Seq[Sequence], steps: int, block: int) -> int:
    """Blocks that so many steps take."""
    return sum([max(0, -(-(seq.computed + steps - seq.room(block)) // block)) for seq in running])


def _plain(seq: Sequence, block: int) -> bool:
    """Whether it decodes, and all that it has computed counts as it does in its first run."""
    return (
        seq.decoding
        and not seq.hold
        and seq.computed >= seq.reached
        and seq.computed >= seq.arrived_with - 1
        and seq.sealed == seq.computed // block
        and seq.params.beams is None
        and not seq.params.stop_token_ids
    )


class Jump:
    """The steps that have begun are those up to the one under way, of `steps` at most."""

    def __init__(self, engine: Engine, began: float, ends: list[float], publish: Callable[[float], None]) -> None:
        """`ends`: of its steps. `publish` is called with the end of each step that has changed the prefix cache."""
        self.ends, self.steps = ends, len(ends)
        self.settled = self.told = 0  # steps that the sequences have, and whose ends were told
        self._engine, self._publish = engine, publish
        self.seqs = list(engine.scheduler.running)
        self._computed = [seq.computed for seq in self.seqs]
        self._crossings = list(self._first_crossings())  # a heap: step, whether it seals, place in the batch
        heapq.heapify(self._crossings)
        engine.scheduler.pass_over()
        for seq in self.seqs:
            engine.note_start(seq, began)

    def under_way(self, now: float) -> int:
        """The number of the step under way, from 1 on."""
        return min(bisect_right(self.ends, now, hi=self.steps) + 1, self.steps)

    def end_after(self, steps: int) -> float:
        """A command waits: no further step begins. Returns when the last one ends."""
        self.steps = min(self.steps, steps)
        return self.ends[self.steps - 1]

    def ended(self, now: float) -> list[float]:
        """The ends of the steps that have ended since the last call."""
        told, self.told = self.told, bisect_right(self.ends, now, hi=self.steps)
        return self.ends[told : self.told]

    @property
    def next_change(self) -> int | None:
        """The next step that may change the prefix cache; None: none does."""
        return self._crossings[0][0] if self._crossings and self._crossings[0][0] <= self.steps else None

    def reach(self, steps: int) -> None:
        """Does to the pool what the steps up to this one do."""
        crossings, pool, block, changed = self._crossings, self._engine.pool, self._engine.block_size, False
        steps = min(steps, self.steps)
        while crossings and (step := crossings[0][0]) <= steps:
            _, seals, place = crossings[0]
            seq = self.seqs[place]
            changed = changed or seals or pool.available == pool.num_cached  # without free blocks, one that is cached goes
            if seals:
                self._extend(seq, self._computed[place] + step + 1)
                self._engine.scheduler.extend_keys(seq)
                pool.seal(seq.blocks[seq.sealed], seq.keys[seq.sealed])
                seq.sealed += 1
            else:
                seq.blocks += pool.allocate(1) or []  # `plain_steps` has counted them
            heapq.heapreplace(crossings, (step + block, seals, place))
            if changed and crossings[0][0] != step:
                self._publish(self.ends[step - 1])
                changed = False

    def settle(self, steps: int) -> None:
        """Does all that the steps up to this one do."""
        self.reach(steps)
        steps = min(steps, self.steps)
        if (more := steps - self.settled) <= 0:
            return
        for seq, computed in zip(self.seqs, self._computed, strict=True):
            self._extend(seq, computed + steps + 1)
            seq.computed = computed + steps
            seq.reached = max(seq.reached, seq.computed)
        counts = self._engine.counts
        counts.chunks += more * len(self.seqs)
        counts.computed_tokens += more * len(self.seqs)
        self.settled = steps

    def _first_crossings(self) -> Iterator[tuple[int, bool, int]]:
        block = self._engine.block_size
        for place, seq in enumerate(self.seqs):
            yield seq.room(block) - seq.computed + 1, False, place
            yield block - seq.computed % block, True, place

    def _extend(self, seq: Sequence, length: int) -> None:
        if length > len(seq.tokens):
            seq.tokens += ids(len(seq.tokens), length)
