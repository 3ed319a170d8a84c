"""The engine: schedule, run, advance, settle. Synchronous and single-threaded; `baton.engine.core.loop` gives it a thread.

`hold`, `reserve`/`arrive`/`adopt`, `pin` and `release` are all that an engine needs in order to be one half of a disaggregated pair.
"""

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from baton.engine.core.beams import Hypothesis
from baton.engine.core.blocks import BlockPool
from baton.engine.core.colder import Colder
from baton.engine.core.counts import Counts
from baton.engine.core.drafting import Drafter
from baton.engine.core.groups import Groups
from baton.engine.core.limits import Limits
from baton.engine.core.long_contexts import LongContexts, Shelf, Unreadable, ended
from baton.engine.core.protocol import Chunk, NonFiniteLogits, NothingToSample, OutOfDeviceMemory, Runner, Tokens, accepted, path
from baton.engine.core.sampling import Sampled, Scored
from baton.engine.core.scheduler import Scheduler, seats
from baton.engine.core.sequence import Finish, Sequence, State, finish_reason


class SequenceRefused(Exception):
    """The engine does not accept this sequence and keeps nothing of it."""


class QueueFull(SequenceRefused):
    """The waiting queue is full."""


class TooLong(SequenceRefused):
    """The sequence does not fit this engine, even if it is alone in it."""


class Unfetchable(TooLong):
    """The sequence is served, but its KV cannot come from elsewhere or be read there: it does not fit the pool."""


class Malformed(SequenceRefused):
    """The sequence is invalid: it has no tokens, an unknown token, or a prompt that is longer than the sequence."""


@dataclass(frozen=True, slots=True)
class Output:
    """One token of one sequence; `finish` is set with the last one. If `failure` or `expired` is set, there is no token and the engine has
    dropped the sequence.

    Without a token, a failure or an expiry, the output reports a computed chunk of a prompt: `full` lists the blocks that are full now, if
    it will be held, and `scores` are of the next tokens of the prompt, if that was asked for. The answer of a search comes at its end:
    `found` has it, and there are no tokens.
    """

    seq: Sequence
    sampled: Sampled | None
    finish: Finish | None = None
    failure: str | None = None
    unavailable: bool = False  # of a failure: it is not the sequence's fault, and another engine may have none
    expired: bool = False  # its deadline passed while it waited in the queue
    full: tuple[int, ...] = ()
    scores: tuple[Scored, ...] = ()
    scored_at: int = 0  # position of the first of them
    guessed: bool = False  # the token had been guessed
    rejected: int = 0  # guesses of its step that did not become output; told with the last token of the step
    found: tuple[Hypothesis, ...] = ()
    searched: int = 0  # tokens that a search has computed for each beam


class Engine:
    scores = True  # whether it can say what the model thinks of a prompt

    def __init__(
        self,
        runner: Runner,
        limits: Limits,
        max_len: int,
        prefix_caching: bool = True,
        reuse_output: bool = False,
        drafter: Drafter | None = None,
        long_contexts: int = 0,
    ) -> None:
        """`reuse_output`: KV of output may serve as the KV of a prompt, though its last bits differ (see `Runner.separates_output`).
        `drafter`: guesses what comes next. `long_contexts`: sequences that may run at once and are longer than the pool (`lengthen`)."""
        self.runner = runner
        self.max_len = max_len  # tokens of one sequence, prompt and output
        self.pool = BlockPool(runner.pool.num_blocks, prefix_caching)
        self.block_size = runner.layout.block_size
        separates, draft_kv = runner.separates_output and not reuse_output, runner.layout.draft is not None
        self.scheduler = Scheduler(self.pool, limits, self.block_size, separates, drafter, draft_kv)
        self.drafter = Drafter() if drafter is None else drafter
        self.sequences: dict[str, Sequence] = {}
        self.groups = Groups(lambda: self.scheduler, runner, self.sequences, lambda beam: self.drafter.forget(beam))
        self.counts = Counts()
        self.colder: Colder | None = None  # copies of KV that left the pool
        self.long_contexts = long_contexts
        self.long: LongContexts | None = None
        if not long_contexts and max_len > self.pool.num_blocks * self.block_size:
            raise ValueError(f"max_len {max_len} does not fit the pool of {self.pool.num_blocks} blocks of {self.block_size} tokens")

    def step(self, now: float = 0.0) -> list[Output]:
        """Runs one batch. `now` is the caller's clock; a sequence keeps the `now` of its first step in `started_at`."""
        outputs: list[Output] = []
        batch = self._schedule(now, outputs)
        if not batch:
            return outputs
        try:
            sampled = self.runner.run(batch)
        except (NothingToSample, OutOfDeviceMemory, Unreadable) as error:
            for chunk in batch:
                self.scheduler.choose(chunk, None)
            if isinstance(error, Unreadable):
                return outputs + self._lose(error)
            failed = self._fail(error) if isinstance(error, NothingToSample) else self._lighten(batch, error)
            return outputs + failed  # the others run again
        self.counts.chunks += len(batch)
        for chunk, tokens in zip(batch, sampled, strict=True):
            outputs += self._land_chunk(chunk, tokens)
        return outputs

    @property
    def idle(self) -> bool:
        return not (self.scheduler.running or self.scheduler.waiting or self.scheduler.aside)

    def lengthen(self, shelf: Shelf) -> None:
        """`long_contexts` sequences may be longer than the pool. Before any is added. Raises ValueError, which names the key."""
        self.scheduler.long = self.long = LongContexts(self.scheduler, shelf, self.runner, self.long_contexts, self.max_len)

    def add(self, seq: Sequence, forks: Seq[Sequence] = ()) -> None:
        """Queues a sequence. Raises QueueFull, TooLong or Malformed, and then keeps nothing of it.

        `forks`: sequences with the same prompt and no output. Each goes on from there with the KV that `seq` has, and computes the last
        position for itself. Where that cannot be, because there is no room or `seq` has left, it is queued like any other.
        """
        self.scheduler.claims.pop(seq.id, None)
        if seq.hold:
            self._check_whole(seq)
        self._welcome(seq, forks)
        self.groups.open(seq)
        self.scheduler.enqueue(seq)

    def reserve(self, seq: Sequence) -> bool:
        """Reserves room for KV that is fetched from elsewhere. The caller fills `seq.blocks[seq.computed // block_size:]`.

        Returns False while there is no room, or while an earlier sequence waits for room: call again, or `abort`. Raises the same errors as
        `add`, and Unfetchable.
        """
        self._check_whole(seq)
        if seq.id not in self.scheduler.claims:  # a sequence that asks again has been checked already
            self._welcome(seq)
        if self.scheduler.reserve(seq):
            self.sequences[seq.id] = seq
            self.groups.open(seq)
            return True
        self.sequences.pop(seq.id, None)
        return False

    def arrive(self, seq: Sequence, end: int) -> None:
        """The caller has filled the reserved blocks up to position `end` and vouches for them. More KV may come from elsewhere."""
        if not seq.computed <= end <= len(seq.tokens):
            raise ValueError(f"sequence {seq.id} has {seq.computed} positions of {len(seq.tokens)}: it cannot have {end} now")
        seq.move("arrive")
        seq.drafted = end  # what a peer lends has both
        self.scheduler.advance(seq, end)

    def adopt(self, seq: Sequence, first: int | None = None, forks: Seq[Sequence] = ()) -> None:
        """No more KV comes from elsewhere: this engine computes what is pending. `first` is a token that became known meanwhile.
        `forks`: as in `add`."""
        if first is not None:
            learn(seq, first)
        if not seq.pending:
            raise ValueError(f"nothing of sequence {seq.id} is left to compute: no token could be sampled")
        self._attach(seq, forks)
        self.scheduler.fetching.remove(seq)
        seq.move("adopt")
        seq.began = seq.computed
        self.scheduler.running.append(seq)
        self._branch(seq)

    def give_up(self, seq: Sequence, first: int | None = None, forks: Seq[Sequence] = ()) -> list[int]:
        """Queues the sequence for a local prefill because the fetch failed. `first` and `forks` mean the same as in `adopt`.

        Returns the blocks that were being filled. The caller still owns them and releases them once no byte can land in them.
        """
        if first is not None:
            learn(seq, first)
        self._attach(seq, forks)
        filling = self._withdraw(seq, "give_up")
        self.scheduler.enqueue(seq)
        return filling

    def abort(self, seq_id: str) -> list[int]:
        """Forgets a sequence in any state. Returns the blocks that a fetch may still be filling (see `give_up`), else []."""
        self.scheduler.claims.pop(seq_id, None)
        seq = self.sequences.get(seq_id)
        if seq is None:
            return []
        self._leave(seq)
        match seq.state:
            case State.FETCHING:
                return self._withdraw(seq, "abort")
            case State.WAITING:
                self._unqueue(seq)
                seq.move("abort")
            case State.RUNNING:
                self.scheduler.running.remove(seq)
                seq.move("abort")
                self.scheduler.free(seq)
            case State.SEARCHING:
                seq.move("abort")
            case State.HELD:
                seq.move("release")
                self.scheduler.free(seq)
        return []

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """`child` goes on from what `parent`, which runs, has computed, with the same first tokens: it owns the parent's full blocks, too,
        and a copy of the one that is not full. Returns False, and keeps nothing of it, while there is no room, or while others wait for it:
        then `add` it, or ask again. Raises ValueError for tokens that are not the parent's, and what `add` raises."""
        done = parent.computed
        if child.tokens[:done] != parent.tokens[:done] or len(child.tokens) <= done or child.root != parent.root:
            raise ValueError(f"sequence {child.id} does not go on from the {done} computed tokens of {parent.id}")
        if parent.state is not State.RUNNING:
            raise ValueError(f"sequence {parent.id} is {parent.state.value}: nothing goes on from it")
        self._welcome(child)
        if not self._fork(parent, child, done):
            del self.sequences[child.id]
            return False
        return True

    def pin(self, keys: Seq[bytes]) -> list[int]:
        """The cached blocks of the longest known prefix of `keys`, for a peer to read. The caller owns them and releases them."""
        return self.pool.match(keys)

    def release(self, blocks: Seq[int]) -> None:
        """Releases blocks that the caller owns (from `give_up`, `abort` or `pin`)."""
        self.pool.release(blocks)

    def _schedule(self, now: float, outputs: list[Output]) -> list[Chunk]:
        """Returns the next batch, counts the sequences that start with it, and adds the expired ones to `outputs`."""
        if self.colder is not None:
            self.counts.hit_tokens += self.colder.turn(now)
        if self.long is not None:
            outputs += [self._end(seq, why) for seq, why in self.long.turn(now)]
        plan, counts = self.scheduler.schedule(now, self.groups.make_room()), self.counts
        self.groups.restart(plan.preempted)
        for source, target in plan.copies:
            self.runner.copy(source, target)
        counts.preemptions += len(plan.preempted)
        for seq in plan.expired:
            self._leave(seq)
            outputs.append(Output(seq, None, expired=True))
        for chunk in plan.chunks:
            self.note_start(chunk.seq, now)
        return plan.chunks

    def note_start(self, seq: Sequence, now: float) -> None:
        """A step with the sequence begins. Its first one counts."""
        if seq.started_at is None:
            seq.started_at = now
            self.counts.queried_tokens += seq.arrived_with
            self.counts.hit_tokens += seq.cached

    def _welcome(self, seq: Sequence, forks: Seq[Sequence] = ()) -> None:
        check(seq, self.runner.vocab_size, self.max_len)
        if seq.params.prompt_logprobs is not None and (seq.hold or not self.scores):
            raise Malformed("prompt_logprobs: this engine cannot tell them")
        if (waiting := self.scheduler.num_queued) >= self.scheduler.limits.max_queue:
            raise QueueFull(f"{waiting} sequences are waiting")
        if seq.id in self.sequences:
            raise ValueError(f"sequence {seq.id} is already here")
        if seq.branches:
            self._check_beams(seq)
        self._attach(seq, forks)
        self.sequences[seq.id] = seq

    def _attach(self, parent: Sequence, forks: Seq[Sequence]) -> None:
        """`forks` wait for the prompt of `parent`, with places in the order of arrival right behind its own."""
        check_forks(parent, forks)
        for child in forks:
            check(child, self.runner.vocab_size, self.max_len)
            if child.id in self.sequences:
                raise ValueError(f"sequence {child.id} is already here")
        if forks:
            self.scheduler.attach(parent, forks)
            self.sequences |= {child.id: child for child in forks}

    def _branch(self, parent: Sequence) -> None:
        """If `parent`, which runs, has computed its prompt, those that wait for it go on from there. They compute its last position again,
        as a part of the prompt, each in a block of its own: so they sample their first tokens from the logits that they would have alone.
        """
        if parent.computed < parent.prompt_len - 1:
            return
        for child in self.scheduler.detach(parent):
            child.started_at, child.cached = parent.started_at or 0.0, parent.cached
            if not self._fork(parent, child, len(child.tokens) - 1):
                child.started_at, child.cached = None, 0
                self.scheduler.enqueue(child)

    def _fork(self, parent: Sequence, child: Sequence, done: int) -> bool:
        if not self.scheduler.fork(parent, child, done):
            return False
        self.counts.forks += 1
        full, rest = divmod(done, self.block_size)
        if rest:
            self.runner.copy(parent.blocks[full], child.blocks[full])
        return True

    def _unqueue(self, seq: Sequence) -> None:
        """A sequence that waits for room, for the prompt of another one, or for colder copies, no longer does."""
        if not self.scheduler.forget_fork(seq):
            scheduler = self.scheduler
            next(queue for queue in (scheduler.loading, scheduler.aside, scheduler.waiting) if seq in queue).remove(seq)

    def _check_whole(self, seq: Sequence) -> None:
        if len(seq.tokens) > (most := self.pool.num_blocks * self.block_size) and self.long is not None:
            raise Unfetchable(f"KV of {len(seq.tokens)} tokens is not handed over: the pool has room for {most}")

    def _check_beams(self, seq: Sequence) -> None:
        """Raises TooLong for beams that do not fit this engine, even if they are alone in it."""
        limits, most = self.scheduler.limits, self.scheduler.final_blocks(seq)
        if seats(seq) > limits.max_num_seqs:
            raise TooLong(f"beam.width: {seats(seq)} beams; {limits.max_num_seqs} sequences may run at a time")
        if most > self.pool.num_blocks:
            raise TooLong(f"beam.width: {seats(seq)} beams may need {most} blocks of KV; there are {self.pool.num_blocks}")

    def _withdraw(self, seq: Sequence, event: str) -> list[int]:
        self.scheduler.fetching.remove(seq)
        seq.move(event)
        filling = seq.blocks[seq.sealed :]
        seq.blocks = seq.blocks[: seq.sealed]
        self.scheduler.free(seq)
        seq.reached = 0
        return filling

    def _advance(self, seq: Sequence, n: int) -> None:
        start, end = seq.computed, seq.computed + n
        again = max(0, min(end, seq.reached) - start)
        seq.recomputed += again
        self.counts.computed_tokens += n
        self.counts.recomputed_tokens += again
        seq.prefilled += max(0, min(end, seq.arrived_with - 1) - start - again)
        self.scheduler.advance(seq, end)

    def _land_chunk(self, chunk: Chunk, sampled: Tokens) -> list[Output]:
        """Applies a computed chunk to its sequence. The KV of a guess counts once the token is known, so nothing has to be taken back;
        tokens after the one that ends the sequence do not exist."""
        seq = chunk.seq
        if chunk.scored:
            return self._land_scored(chunk, sampled)
        self._advance(seq, chunk.n)
        self._branch(seq)
        tokens = accepted(chunk.drafts, sampled)
        if not tokens:
            return [Output(seq, None, full=tuple(seq.blocks[: seq.computed // self.block_size]))] if seq.hold else []
        if seq.params.beams is not None and not seq.hold:
            return self._search(seq, tokens[0])
        method, branch = "", None
        if chunk.drafts:
            method = self.drafter.source(seq)  # it is forgotten with the last token
            self.drafter.study(seq, chunk.drafts, sampled[: 1 + len(chunk.drafts)])
            self.drafter.observe(seq, len(chunk.drafts), len(tokens) - 1)
        if chunk.branches:
            branch, rows = path(chunk, sampled)
            tokens = tuple(sampled[row] for row in rows)
            self.scheduler.choose(chunk, branch)
        right = len(tokens) - 1
        outputs = [self._settle(seq, tokens[0], right > 0)]
        for i, token in enumerate(tokens[1:], 1):
            if seq.state is not State.RUNNING:
                break
            self._advance(seq, 1)
            outputs.append(self._settle(seq, token, i < right))
        if chunk.drafts:
            kept = min(right, len(outputs))
            self.counts.note_guesses(method, len(chunk.drafts), kept if branch is None else 0)
            for other in chunk.branches:
                self.counts.note_guesses(method, len(other.drafts), kept if other is branch else 0)
            if rejected := chunk.guesses - kept:
                outputs[-1] = replace(outputs[-1], rejected=rejected)
        return outputs

    def _land_scored(self, chunk: Chunk, tokens: Tokens) -> list[Output]:
        """A part of the prompt that is computed again after a preemption has been told."""
        seq, count = chunk.seq, chunk.scored
        first = max(seq.computed, seq.scored)
        scores = tuple(each for each in tokens[first - seq.computed : count] if isinstance(each, Scored))
        seq.scored = max(seq.scored, seq.computed + count)
        self._advance(seq, chunk.n)
        self._branch(seq)
        told = [Output(seq, None, scores=scores, scored_at=first + 1)] if scores else []
        return told + [self._settle(seq, token, False) for token in tokens[count:]]

    def _search(self, seq: Sequence, sampled: Sampled) -> list[Output]:
        """Takes what a sequence that branches, or one of its beams, may be continued with."""
        owner = seq.owner or seq
        before, found = self.groups.steps(owner), self.groups.land(seq, sampled)
        searched = self.groups.steps(owner)
        if not found:
            return [Output(owner, None, searched=searched)] if searched > before else []
        if owner.state is State.RUNNING:
            self.scheduler.running.remove(owner)
            self.scheduler.free(owner)
        owner.move("finish")
        self._leave(owner)
        return [Output(owner, None, Finish.STOP if found[0].stopped else Finish.LENGTH, found=found, searched=searched)]

    def _fail(self, error: NothingToSample) -> list[Output]:
        """Ends sequences. If their logits are not finite, their blocks leave the prefix cache, so that they are not found again."""
        outputs = []
        for seq in (self.sequences[seq_id] for seq_id in error.sequence_ids if seq_id in self.sequences):  # a beam takes its others along
            if isinstance(error, NonFiniteLogits):
                self.pool.forget(seq.blocks)
                if self.colder is not None:
                    self.colder.drop(seq.keys)
            seq = seq.owner or seq
            self.abort(seq.id)
            failure, more = str(type(error)([seq.id])), seq.matcher.failure if seq.matcher is not None else ""
            outputs.append(Output(seq, None, failure=f"{failure}: {more}" if more else failure))
        return outputs

    def _lose(self, error: Unreadable) -> list[Output]:
        """The others run again, and this one from the first block that is missing."""
        seq = self.sequences[error.sequence_id]
        self.counts.preemptions += 1
        if self.long is not None:
            self.long.lost(seq, str(error))
        return []

    def _end(self, seq: Sequence, why: str) -> Output:
        why = ended(seq, why)
        self.abort(seq.id)
        return Output(seq, None, failure=why, unavailable=True)

    def _lighten(self, batch: Seq[Chunk], error: OutOfDeviceMemory) -> list[Output]:
        """Ends the sequence with the largest part of a batch for which there was no memory, of equal ones the newest. It alone pays: the
        others run again in the next step."""
        left = [chunk for chunk in batch if chunk.seq.state is State.RUNNING]
        if not left:
            return []
        seq = max(left, key=lambda chunk: (chunk.positions, chunk.seq.arrival or 0)).seq
        seq = seq.owner or seq
        self.abort(seq.id)
        return [Output(seq, None, failure=f"the device had no memory left for a step with this sequence: {error}")]

    def _settle(self, seq: Sequence, sampled: Sampled, guessed: bool) -> Output:
        seq.tokens.append(sampled.token)
        reason = finish_reason(seq, self.runner.eos_token_ids, self.max_len)
        if reason is None and not seq.hold:
            return Output(seq, sampled, guessed=guessed)
        self.scheduler.running.remove(seq)
        if reason is None:
            seq.move("hold")
            return Output(seq, sampled, guessed=guessed)
        seq.move("finish")
        self.scheduler.free(seq)
        self._leave(seq)
        return Output(seq, sampled, reason, guessed=guessed)

    def _leave(self, seq: Sequence) -> None:
        del self.sequences[seq.id]
        self.groups.close(seq)
        self.drafter.forget(seq)
        for child in self.scheduler.detach(seq):
            self.scheduler.enqueue(child)


def check(seq: Sequence, vocab_size: int, max_len: int) -> None:
    """Raises Malformed or TooLong for a sequence that no engine with this vocabulary and length can run."""
    if not 1 <= seq.prompt_len <= len(seq.tokens):
        raise Malformed(f"{seq.prompt_len} prompt tokens among {len(seq.tokens)}")
    if min(seq.tokens) < 0 or max(seq.tokens) >= vocab_size:
        raise Malformed(f"a token id is outside the model's vocabulary of {vocab_size}")
    if not all(bias < math.inf for bias in seq.params.logit_bias.values()):
        raise Malformed("a logit_bias is not a number, or infinite")
    if seq.matcher is None and seq.params.structured is not None:
        raise Malformed("structured: this engine cannot hold an output to a grammar")
    closing = [marks.closing for marks in seq.params.thinking.marks] if seq.params.thinking is not None else []
    if not all(ids and 0 <= min(ids) <= max(ids) < vocab_size for ids in closing):
        raise Malformed("a closing of the thinking is empty, or outside the model's vocabulary")
    if seq.matcher is None and seq.params.thinking is not None:
        raise Malformed("max_thinking_tokens: this engine cannot end the thinking")
    if len(seq.tokens) + max(1, seq.remaining) > max_len:
        raise TooLong(f"{len(seq.tokens)} tokens and {seq.remaining} to come; one sequence may have {max_len}")


def check_forks(parent: Sequence, forks: Seq[Sequence]) -> None:
    """Raises ValueError for sequences that cannot go on from the prompt of `parent`."""
    for child in forks:
        alike = child.root == parent.root and child.tokens == parent.tokens[: parent.prompt_len] and child.prompt_len == parent.prompt_len
        if not alike or parent.hold or child.hold:
            raise ValueError(f"sequence {child.id} does not go on from the prompt of {parent.id}")


def learn(seq: Sequence, token: int) -> None:
    """Appends a token that another engine sampled. It counts as one that the sequence arrived with."""
    seq.tokens.append(token)
    seq.arrived_with = len(seq.tokens)
