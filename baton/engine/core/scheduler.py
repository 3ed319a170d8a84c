"""Which sequences run in the next step, and for how many tokens each. Decides and does nothing else.

The order of a step: decodes first (a client waits for each token), then the prompt chunks of admitted sequences, then admissions from
the queue in order of arrival, and at last guesses of what the decodes will sample, all under one token budget. There is no branch on the
worker's role: a prefill worker is a scheduler whose sequences are held after one token, a decode worker one whose sequences mostly arrive
computed.

Admission counts future growth: a sequence is admitted when the pool has room for its known tokens plus a share (`reserve_growth`) of
what it and the admitted sequences may still produce. If they produce more than that share, the scheduler preempts: the youngest sequence
gives its blocks back and waits in its old place. Beams of one search run and are preempted together.

Nobody overtakes another (`arrivals`), and the oldest always fits once it is alone.

`Limits.batching` says how sequences join. Continuous: at any step (Orca, Yu et al., OSDI 2022). The two older methods are kept for
comparison. They run whole batches, which no sequence joins until all members are done. A dynamic batch takes the sequences that wait when
the previous batch ends; a static one waits until it is full, for `batch_wait_s` at most.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

from baton.engine.core.arrivals import Arrivals
from baton.engine.core.beams import most_blocks
from baton.engine.core.block_key import extend_keys
from baton.engine.core.blocks import BlockContent, BlockPool
from baton.engine.core.drafting import Drafter, DraftRequest, Tree
from baton.engine.core.limits import Limits
from baton.engine.core.protocol import Branch, Chunk
from baton.engine.core.sequence import Sequence, State

SCORED_AT_ONCE = 256  # positions of a step that have logits, each as many as the vocabulary has tokens


@dataclass(slots=True)
class Schedule:
    chunks: list[Chunk] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    expired: list[Sequence] = field(default_factory=list)  # removed from the queue before anything was computed for them
    copies: list[tuple[int, int]] = field(default_factory=list)  # (block, block that gets its content before the step)


class Long(Protocol):
    """Who looks after sequences that are longer than the pool: `baton.engine.core.long_contexts`."""

    window: int  # blocks that one owns

    def admit(self, seq: Sequence) -> bool: ...

    def extend(self, seq: Sequence) -> bool: ...

    def leave(self, seq: Sequence) -> None: ...


class Scheduler:
    long: Long | None = None  # None: every sequence has to fit the pool
    admitted: Callable[[Sequence, int], None] = staticmethod(lambda seq, known: None)  # with so many blocks that were in the pool
    part: Callable[[Sequence], None] = staticmethod(lambda seq: None)  # no load lands any more in the blocks of a sequence that `meets` one

    def __init__(
        self,
        pool: BlockPool,
        limits: Limits,
        block_size: int,
        separates_output: bool = False,
        drafter: Drafter | None = None,
        draft_kv: bool = False,
    ) -> None:
        """`separates_output`: see `Runner`. `draft_kv`: a block is full once it has the draft's KV, too."""
        self._drafter = drafter
        self._draft_kv = draft_kv
        self._separates_output = separates_output
        self.pool = pool
        self.limits = limits
        self.block_size = block_size
        self._arrivals = Arrivals()
        self.waiting, self.claims = self._arrivals.waiting, self._arrivals.claims
        self.running: list[Sequence] = []  # in order of admission
        self.fetching: list[Sequence] = []
        self.loading: list[Sequence] = []  # out of the queue, with a place in it, until colder copies of their KV are here
        self.aside: list[Sequence] = []  # likewise, until one more that is longer than the pool may run
        self.attached: dict[Sequence, list[Sequence]] = {}  # parent → those that will go on from its prompt; they wait in no queue
        # The last arrival of the current batch: later sequences do not join it.
        self._last: float = math.inf if limits.batching == "continuous" else -1
        self._forming_since: float | None = None

    def schedule(self, now: float = 0.0, preempted: Iterable[Sequence] = ()) -> Schedule:
        """`now` is the caller's clock in seconds. It decides which queued sequences have expired and when a static batch stops waiting.
        `preempted`: by `make_way` since the last step."""
        plan = Schedule(preempted=list(preempted), expired=self._arrivals.expire(now))
        if self.limits.batching != "continuous":
            self._form_batch(now)
        for seq in list(self.running):
            if seq.decoding and seq.state is State.RUNNING and self._make_room(seq, plan):
                plan.chunks.append(Chunk(seq, 1))
        plan.chunks = [chunk for chunk in plan.chunks if chunk.seq.state is State.RUNNING]  # a beam may have been preempted with its group
        budget = self.limits.max_num_batched_tokens - len(plan.chunks)
        for seq in self.running:
            if seq.prefilling and budget > 0:
                budget -= self._chunk(seq, budget, plan)
        while budget > 0 and self.waiting and not plan.preempted and self._joins(self.waiting[0]) and self._admit(self.waiting[0]):
            seq = self.waiting.pop(0)
            seq.move("admit")
            self.running.append(seq)
            budget -= self._chunk(seq, budget, plan)
        if self._drafter is not None and not plan.preempted:
            self._add_guesses(plan, budget, self._drafter)
        return plan

    def may_begin(self, seq: Sequence) -> bool:
        """Whether a waiting sequence would be admitted in a step now. If not, it is not in later ones either that only decode: they free no
        seat and no block, and what is left for growth shrinks with what is promised."""
        return self._joins(seq) and self._is_next(seq) and self.has_room(seq)

    def pass_over(self) -> None:
        """Steps that only decode are done without `schedule`: it would have seen that a batch runs, so that none is formed."""
        self._forming_since = None

    def begin(self, seq: Sequence) -> bool:
        """Admits a waiting sequence now. False, and nothing has changed: it cannot be."""
        if not self._joins(seq) or not self._admit(seq):
            return False
        self.waiting.remove(seq)
        seq.move("admit")
        self.running.append(seq)
        return True

    def reserve(self, seq: Sequence) -> bool:
        """Blocks for the known tokens of a sequence whose KV comes from elsewhere, leaving the last token to compute.

        Sets `seq.computed` to the positions that were already here. Returns False and changes nothing while there is no room.
        """
        if not self._admit(seq):
            self._arrivals.claim(seq)
            return False
        self.claims.pop(seq.id, None)
        seq.move("reserve")
        self.fetching.append(seq)
        return True

    def fork(self, parent: Sequence, child: Sequence, done: int) -> bool:
        """Admits `child` with the parent's full blocks among the first `done` positions, and room of its own for the rest of its tokens.
        False: there is none."""
        full = done // self.block_size
        fresh = self._blocks_for(len(child.tokens)) - full
        if parent.long or not self._is_next(child) or not self.fits(child, full + fresh, self.pool.available - fresh):
            return False
        return self.branch(parent, child, done)

    def branch(self, parent: Sequence, child: Sequence, done: int) -> bool:
        """`fork` of one that nobody is before; a beam runs next to its parent. False: there is no block for it."""
        full = done // self.block_size
        own = self.pool.allocate(self._blocks_for(len(child.tokens)) - full)
        if own is None:
            return False
        self.pool.share(parent.blocks[:full])
        child.blocks = parent.blocks[:full] + own
        child.sealed = min(parent.sealed, full)
        child.keys = parent.keys[:full]
        child.computed = child.began = child.reached = done
        child.drafted = min(parent.drafted, done)
        child.move("admit")
        self.running.insert(self.running.index(parent) + 1 if child.owner is not None else len(self.running), child)
        return True

    def attach(self, parent: Sequence, forks: Iterable[Sequence]) -> None:
        """They wait for the prompt of `parent`, and in the order of arrival they follow it."""
        for seq in (parent, *forks):
            self._arrivals.place(seq)
        self.attached[parent] = list(forks)

    @property
    def num_queued(self) -> int:
        """Sequences that wait for something."""
        return len(self.waiting) + len(self.loading) + len(self.aside) + sum(map(len, self.attached.values()))

    def detach(self, parent: Sequence) -> list[Sequence]:
        """Those that waited for its prompt."""
        return self.attached.pop(parent, [])

    def forget_fork(self, seq: Sequence) -> bool:
        """Whether it waited for the prompt of another one; it no longer does."""
        parent = next((parent for parent, forks in self.attached.items() if seq in forks), None)
        if parent is None:
            return False
        self.attached[parent].remove(seq)
        return True

    def extend(self, seq: Sequence) -> bool:
        """Blocks for all that is known of a running sequence. False: there are none."""
        more = self.pool.allocate(self.missing(seq))
        seq.blocks += more or []
        return more is not None

    def missing(self, seq: Sequence) -> int:
        return max(0, self._blocks_for(len(seq.tokens)) - len(seq.blocks))

    def enqueue(self, seq: Sequence) -> None:
        self._arrivals.enqueue(seq)

    def preempt(self, seq: Sequence) -> Sequence:
        """Returns who waits now: `seq`, or the owner of the beam `seq`, all of whose beams are gone."""
        if (owner := seq.owner) is None:
            self.running.remove(seq)
            self.free(seq)
        else:
            for beam in [other for other in self.running if other.owner is owner]:
                self.drop(beam)
            seq = owner
        seq.move("preempt")
        seq.preemptions += 1
        seq.sought = None
        self.enqueue(seq)
        return seq

    def drop(self, beam: Sequence) -> None:
        self.running.remove(beam)
        beam.move("abort")
        self.free(beam)

    def make_way(self, seq: Sequence, preempted: list[Sequence]) -> bool:
        """Preempts the youngest sequence, `seq` itself last. Returns whether `seq` still runs."""
        # A peer may be reading the blocks of a prompt that will be held.
        victim = next((other for other in reversed(self.running) if not other.hold), seq)
        preempted.append(self.preempt(victim))
        return seq.state is State.RUNNING

    def free(self, seq: Sequence) -> None:
        """Takes a sequence's blocks away. Its KV is lost unless the prefix cache keeps it."""
        if seq.meets is not None:
            self.part(seq)
        self.pool.release(seq.blocks)
        seq.blocks = []
        seq.computed = seq.drafted = seq.sealed = 0
        if seq.long and self.long is not None:
            self.long.leave(seq)

    def advance(self, seq: Sequence, computed: int) -> None:
        """Notes that `seq` now holds the KV of `computed` positions, and seals the blocks that are full, with the draft's KV if there is
        one."""
        seq.computed = computed
        seq.reached = max(seq.reached, computed)
        self.extend_keys(seq)
        if seq.long:  # its blocks are found in the tier
            return
        full = (min(computed, seq.drafted) if self._draft_kv else computed) // self.block_size
        while seq.sealed < full:
            self.pool.seal(seq.blocks[seq.sealed], seq.keys[seq.sealed], self.content(seq, seq.sealed) if self.pool.describes else None)
            seq.sealed += 1

    def extend_keys(self, seq: Sequence) -> None:
        """Computes the keys of the blocks that its tokens fill. They depend on nothing but the sequence, so another thread may call this
        before the sequence is here."""
        extend_keys(seq.keys, seq.root, seq.tokens, self.block_size, seq.prompt_len if self._separates_output else None)

    def growth(self, seqs: Iterable[Sequence]) -> int:
        """Blocks that these sequences will ask for beyond those they own, if each runs to its last token."""
        return sum(max(0, self.final_blocks(seq) - len(seq.blocks)) for seq in seqs)

    def credit_tokens(self) -> int:
        """Tokens that this worker can still promise to hold, in addition to those that it has promised already."""
        queued = *self.waiting, *self.loading, *self.aside, *chain.from_iterable(self.attached.values())
        promised = self.growth((*self.running, *self.fetching, *queued))
        return (self.pool.available - promised) * self.block_size

    def _form_batch(self, now: float) -> None:
        if self.running or not self.waiting:
            self._forming_since = None
            return
        if self._forming_since is None:
            self._forming_since = now
        members = self.waiting[: self.limits.max_num_seqs]
        full = len(members) == self.limits.max_num_seqs
        if self.limits.batching == "dynamic" or full or now - self._forming_since >= self.limits.batch_wait_s:
            self._last = self._arrivals.place(members[-1])

    def _joins(self, seq: Sequence) -> bool:
        return self._arrivals.place(seq) <= self._last

    def _admit(self, seq: Sequence) -> bool:
        """Gives a waiting sequence its blocks if it fits: cached blocks for its known prefix, and fresh ones for the rest."""
        if not self._is_next(seq):
            return False
        if self.long is not None and self.is_long(seq):
            return self.long.admit(seq)
        keys = self.usable_keys(seq)
        known, idle = self.pool.matched(keys)
        fresh = self._blocks_for(len(seq.tokens)) - known
        if not self.fits(seq, known + fresh, self.pool.available - idle - fresh):
            return False
        seq.blocks = self.pool.match(keys) + (self.pool.allocate(fresh) or [])
        self.starts_with(seq, known)
        return True

    def starts_with(self, seq: Sequence, known: int) -> None:
        """It has `known` full blocks."""
        seq.sealed = known
        seq.computed = seq.drafted = seq.began = known * self.block_size
        self.admitted(seq, known)
        if seq.reached == 0:
            seq.cached = seq.computed
        seq.reached = max(seq.reached, seq.computed)

    def is_long(self, seq: Sequence) -> bool:
        """Whether it does not fit the pool."""
        return self._blocks_for(len(seq.tokens)) > self.pool.num_blocks

    def outgrows(self, seq: Sequence) -> bool:
        """Whether it may grow longer than the pool."""
        return self._longest(seq) > self.pool.num_blocks

    def usable_keys(self, seq: Sequence) -> list[bytes]:
        """The keys of blocks that need not be computed if somebody has them. The last known token is always computed here: sampling needs
        its logits."""
        self.extend_keys(seq)
        return seq.keys[: 0 if seq.unscored else (len(seq.tokens) - 1) // self.block_size]

    def has_room(self, seq: Sequence) -> bool:
        """Whether a waiting sequence has enough blocks, though perhaps no seat yet."""
        known, idle = self.pool.matched(self.usable_keys(seq))
        fresh = self._blocks_for(len(seq.tokens)) - known
        return self.fits(seq, known + fresh, self.pool.available - idle - fresh)

    def _is_next(self, seq: Sequence) -> bool:
        """Whether one more may run, and nobody is before it."""
        taken = sum(map(seats, (*self.running, *self.fetching)))
        return taken + seats(seq) <= self.limits.max_num_seqs and self._arrivals.is_next(seq)

    def fits(self, seq: Sequence, owns: int, left: int) -> bool:
        """Whether it leaves enough room for growth if it begins with `owns` blocks, and `left` blocks are available then."""
        others = (*self.running, *self.fetching)
        growth = self.growth(others) + max(0, self.final_blocks(seq) - owns)
        return left >= 0 and not (others and left < growth * self.limits.reserve_growth)

    def _make_room(self, seq: Sequence, plan: Schedule) -> bool:
        """Makes room for the next token of `seq`. Preempts the youngest sequences until a block is free, and `seq` itself last."""
        if seq.computed < seq.room(self.block_size):
            return True
        while (block := self.pool.allocate(1)) is None:
            if self.long is not None and self.long.extend(seq):
                return True
            if not self.make_way(seq, plan.preempted):
                return False
        seq.blocks += block
        return True

    def _chunk(self, seq: Sequence, budget: int, plan: Schedule) -> int:
        # A token that became known while KV was fetched may be beyond the blocks that were reserved: it gets room as a decode.
        most = SCORED_AT_ONCE - sum(chunk.scored for chunk in plan.chunks) if seq.unscored else budget
        n = min(seq.pending, budget, seq.room(self.block_size) - seq.computed, most)
        if n > 0 and seq.meets is not None:
            n = seq.meets.take(seq.computed, n)
        if n > 0:
            plan.chunks.append(Chunk(seq, n))
        return n

    def _add_guesses(self, plan: Schedule, budget: int, drafter: Drafter) -> None:
        """Gives the decodes guesses out of what is left of the budget. Nobody loses a block for a guess."""
        rows = sum([chunk.n for chunk in plan.chunks])
        budget = min(budget, self.limits.speculation_batch_tokens - rows)
        single = [i for i, chunk in enumerate(plan.chunks) if chunk.n == 1]
        if not single or budget <= 0:
            return
        asks: dict[int, DraftRequest] = {}
        for i, most in zip(single, drafter.most([plan.chunks[i].seq for i in single], rows), strict=False):
            if most and self._guessable(plan.chunks[i]):
                seq = plan.chunks[i].seq
                if (most := min(budget, seq.remaining - 1, most)) > 0 and (most := self._room(seq, most)) > 0:
                    asks[i] = DraftRequest(seq, most)
        for i, drafts in zip(asks, drafter.propose([*asks.values()]) if asks else (), strict=True):
            if not drafts:
                continue
            seq, most = asks[i].seq, min(budget, asks[i].most)
            first = tuple(drafts[:most])
            branches = self._branches(plan, seq, drafts, most - len(first)) if isinstance(drafts, Tree) else ()
            plan.chunks[i] = Chunk(seq, 1, first, branches)
            budget -= plan.chunks[i].guesses

    def _branches(self, plan: Schedule, seq: Sequence, tree: Tree, most: int) -> tuple[Branch, ...]:
        """Other guesses, of `most` tokens together, as far as there are blocks. Each owns those that it does not share, until `choose`.
        None beside the last token of a prompt, which is computed as a part of the prompt, while branches are steps of the output."""
        if seq.computed < seq.prompt_len:
            return ()
        shared, made, firsts = (seq.computed + 1) // self.block_size, list[Branch](), {tree[0]}
        for drafts in tree.others[: self.limits.speculation_branches - 1]:
            drafts = drafts[:most]
            if not drafts or drafts[0] in firsts:
                continue
            own = self.pool.allocate(self._blocks_for(seq.computed + 1 + len(drafts)) - shared)
            if own is None:
                break
            if seq.computed % self.block_size and shared == seq.computed // self.block_size:
                plan.copies.append((seq.blocks[shared], own[0]))
            made.append(Branch(drafts, (*seq.blocks[:shared], *own), shared))
            firsts.add(drafts[0])
            most -= len(drafts)
        return tuple(made)

    def choose(self, chunk: Chunk, branch: Branch | None) -> None:
        """The step is over: the sequence goes on with this branch of it, or as it was."""
        for other in chunk.branches:
            own = other.blocks[other.shared :]
            if other is branch:
                own, chunk.seq.blocks = tuple(chunk.seq.blocks[other.shared :]), [*other.blocks]
            self.pool.release(own)

    def _guessable(self, chunk: Chunk) -> bool:
        return chunk.samples and chunk.n == 1 and not (chunk.seq.hold or chunk.seq.long) and chunk.seq.params.beams is None

    def _room(self, seq: Sequence, guesses: int) -> int:
        """How many guesses there is room for now: who drafts may write KV of its own for them."""
        missing = self._blocks_for(seq.computed + 1 + guesses) - len(seq.blocks)
        if missing > 0:
            seq.blocks += self.pool.allocate(min(missing, self.pool.available)) or []
        return min(guesses, len(seq.blocks) * self.block_size - seq.computed - 1)

    def content(self, seq: Sequence, index: int) -> BlockContent:
        """The content of one of its full blocks."""
        start = index * self.block_size
        return BlockContent(seq.keys[index - 1] if index else None, tuple(seq.tokens[start : start + self.block_size]))

    def final_blocks(self, seq: Sequence) -> int:
        """The most blocks that `seq` will own on this worker, with all its beams. A sequence that will be held stops at its first token."""
        if self.long is None or seq.params.beams is not None:
            return self._longest(seq)
        return self.long.window if seq.long or self.is_long(seq) else min(self._longest(seq), self.pool.num_blocks)

    def _longest(self, seq: Sequence) -> int:
        longest = len(seq.tokens) + (0 if seq.hold else max(0, seq.remaining))
        return most_blocks(seats(seq), len(seq.tokens), longest, self.block_size)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


def seats(seq: Sequence) -> int:
    """How many run, or will run, where `seq` runs."""
    return seq.params.beams.width if seq.params.beams is not None and seq.branches else 1
