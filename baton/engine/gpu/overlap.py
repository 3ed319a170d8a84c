"""An engine with one step in flight: the next batch is chosen and submitted while the device computes the previous one.

1. `step` schedules a batch and gives it to `submit`, which returns immediately.
2. Only then does it read the results of the previous step, which by now has ended or soon will, and settle its sequences.
3. It books the new step as if it were done: its positions count as computed, and every sequence that will sample gets `UNKNOWN` as its last
   token. So scheduling needs no special rule: such a sequence has one pending token, like any that decodes. The runner takes the token
   from where it was sampled, on the device; the host replaces `UNKNOWN` with it one step later.

This has further consequences:

- **Nothing outside sees an unknown token.** `UNKNOWN` is removed before a sequence is settled or leaves. Blocks are sealed after the step
  that filled them has been read: by then all their tokens are known, and their KV is written.
- **Surplus.** A stop token is seen one step late. The step in flight computes a position for that sequence that is not needed, and the
  result is dropped. Ends that can be foreseen (length, `hold`) make no surplus: they get no `UNKNOWN`, so nothing is pending.
- **Who is guessed for, waits, and so do the others.** Guesses follow known tokens. So a sequence for which the drafter is ready gets no
  `UNKNOWN`, and after a step with guesses none does that had some: how far it has come is not known. While such a sequence is in flight,
  that step is read before the next one is chosen. Otherwise sequences that began at different steps would join every other step each, and
  a device that is bound by reading the weights reads them for both halves. Nobody waits while so many run that a step of all of them gets
  no guesses.
- **So does who has a grammar:** the mask of a token depends on the one before it. And so do beams: which go on depends on all of them.
- **No block is released while a step in flight may write to it.** Blocks of a sequence that ends or is aborted are parked until that step
  has been read. The device would keep the order, but a transport that fills a block (`Engine.reserve`) would not.
- **Preemption waits for the step in flight.** If the pool lacks a block for a decode, that step is read before anything is scheduled:
  then nothing is parked, and no sequence with an unknown token goes to the queue.

A token reaches its reader as early as without overlap: when its step has ended. A new sequence starts one step later. That the pool may be
on a device concerns only those who read and fill its blocks (`Pool.expose`, `Pool.take_in`), in threads of their own.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from baton.engine.core.blocks import BlockPool
from baton.engine.core.drafting import Drafter
from baton.engine.core.engine import Engine, Output
from baton.engine.core.limits import Limits
from baton.engine.core.protocol import Chunk, NonFiniteLogits, NothingAllowed, OutOfDeviceMemory, Runner, Tokens
from baton.engine.core.scheduler import Scheduler
from baton.engine.core.sequence import Sequence, State

UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a step, aligned with its batch: what each chunk yields. Nothing for one that failed."""

    tokens: list[Tokens]
    failed: frozenset[int] = frozenset()  # indices whose logits were not finite; the others are good
    denied: frozenset[int] = frozenset()  # indices of sequences whose grammar allows no token


class Pending(Protocol):
    """A step that was submitted."""

    def result(self) -> StepResult:
        """Waits for the end of the step; by then its KV is written, too."""
        ...


class OverlapRunner(Runner, Protocol):
    """A runner that works asynchronously. Two implementations: `baton.engine.gpu.runner.GpuRunner` and the toy in the tests."""

    def submit(self, batch: Seq[Chunk]) -> Pending:
        """Begins what `run` does. Steps are computed in order. `UNKNOWN` stands for the token that the previous step sampled. Raises
        OutOfDeviceMemory; then the step before is as it was."""
        ...


@dataclass(slots=True)
class StepInFlight:
    """A step between `submit` and the reading of its results."""

    batch: list[Chunk]
    pending: Pending
    gone: set[Sequence] = field(default_factory=set)  # of the batch: they left after it was submitted
    parked: list[int] = field(default_factory=list)  # their blocks


class LateScheduler(Scheduler):
    """A scheduler that parks blocks to which a step in flight may still write."""

    def __init__(self, pool: BlockPool, limits: Limits, block_size: int, drafter: Drafter | None = None, draft_kv: bool = False) -> None:
        super().__init__(pool, limits, block_size, drafter=drafter, draft_kv=draft_kv)
        self.flight: StepInFlight | None = None

    def lacks_blocks(self, more: int = 0) -> bool:
        """Whether the decodes of the next step need more blocks than there are, so that it would preempt. `more`: for beams."""
        return sum(seq.decoding and seq.computed == len(seq.blocks) * self.block_size for seq in self.running) + more > self.pool.available

    def _guessable(self, chunk: Chunk) -> bool:
        return super()._guessable(chunk) and chunk.seq.tokens[-1] != UNKNOWN

    def free(self, seq: Sequence) -> None:
        if seq.tokens[-1] == UNKNOWN:
            seq.tokens.pop()
        if self.flight is not None and any(chunk.seq is seq for chunk in self.flight.batch):
            self.flight.gone.add(seq)
            self.flight.parked += seq.blocks
            seq.blocks = []
        super().free(seq)


class OverlapEngine(Engine):
    """An `Engine` that produces the same tokens, with a runner that can `submit`."""

    runner: OverlapRunner
    scheduler: LateScheduler
    scores = False

    def __init__(
        self, runner: OverlapRunner, limits: Limits, max_len: int, prefix_caching: bool = True, drafter: Drafter | None = None
    ) -> None:
        super().__init__(runner, limits, max_len, prefix_caching, drafter=drafter)
        self.scheduler = LateScheduler(self.pool, limits, self.block_size, drafter, runner.layout.draft is not None)
        self._drafts = drafter is not None
        self._guessed = False  # whether guesses follow for a sequence in flight

    @property
    def idle(self) -> bool:
        return super().idle and self.scheduler.flight is None

    def step(self, now: float = 0.0) -> list[Output]:
        """Submits the next batch, then returns the outputs of the previous one."""
        outputs = self._land(None) if self._guessed or self.scheduler.lacks_blocks(self.groups.wanted) else []
        batch = self._schedule(now, outputs)
        if not batch and self.scheduler.flight is not None:
            outputs += self._land(None)
            batch = self._schedule(now, outputs)  # what has landed made room
        try:
            flight = StepInFlight(batch, self.runner.submit(batch)) if batch else None
        except OutOfDeviceMemory as error:
            outputs += self._land(None)  # then all tokens are known, and nothing writes to the blocks that are given up
            for chunk in batch:
                self.scheduler.choose(chunk, None)
            return outputs + self._lighten(batch, error)
        outputs += self._land(flight)
        self._guessed = False
        for chunk in batch:
            if flight is not None and chunk.seq not in flight.gone:
                self._book(chunk)
        return outputs

    def _land(self, following: StepInFlight | None) -> list[Output]:
        """Reads the step in flight, if there is one; `following` has been submitted after it."""
        landed, self.scheduler.flight = self.scheduler.flight, following
        if landed is None:
            return []
        result = landed.pending.result()
        self.counts.chunks += len(landed.batch) - len(result.failed | result.denied)
        self.pool.release(landed.parked)
        outputs = []
        for i, (chunk, tokens) in enumerate(zip(landed.batch, result.tokens, strict=True)):
            seq = chunk.seq
            gone = seq in landed.gone or seq.state is State.DONE  # a beam goes with the one that failed
            if gone or i in result.failed or i in result.denied:
                self.scheduler.choose(chunk, None)
            if gone:
                continue
            if i in result.failed:
                outputs += self._fail(NonFiniteLogits([seq.id]))
                continue
            if i in result.denied:
                outputs += self._fail(NothingAllowed([seq.id]))
                continue
            if seq.tokens[-1] == UNKNOWN:
                seq.tokens.pop()
            seq.computed -= chunk.n  # as before it was booked
            outputs += self._land_chunk(chunk, tokens)
        return outputs

    def _book(self, chunk: Chunk) -> None:
        seq, samples = chunk.seq, chunk.samples
        seq.computed += chunk.n
        guessed = samples and (bool(chunk.drafts) or self._guesses(seq))
        self._guessed = self._guessed or guessed
        waits = guessed or seq.matcher is not None or seq.params.beams is not None
        if samples and not (waits or seq.hold or seq.remaining <= 1 or len(seq.tokens) + 1 >= self.max_len):
            seq.tokens.append(UNKNOWN)

    def _guesses(self, seq: Sequence) -> bool:
        few = len(self.scheduler.running) < self.scheduler.limits.speculation_batch_tokens
        return self._drafts and few and self.drafter.ready(seq)
