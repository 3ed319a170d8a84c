"""Our own engine in the event loop's time: scheduler, blocks and prefix cache are the real ones. A step computes nothing, and takes as long
as a model of it says. Steps in which nothing is decided may be jumped over (`baton.simulate.jumps`)."""

import asyncio
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate

from baton.engine.core.commands import Commands, facts
from baton.engine.core.contract import EngineLoad, Listener
from baton.engine.core.drafting import Drafter
from baton.engine.core.engine import Engine, Output
from baton.engine.core.kvcache import KvLayout, KvPool
from baton.engine.core.limits import Limits
from baton.engine.core.protocol import Chunk, Tokens
from baton.engine.core.sampling import Sampled
from baton.engine.core.sequence import Sequence, State
from baton.profile.file import Profile
from baton.profile.models import Work, decode_seconds, pairs_of, step_seconds
from baton.simulate.cores import Computes, Kind, OwnCores
from baton.simulate.jumps import VOCABULARY, Jump, plain_steps
from baton.simulate.virtual_time import VirtualLoop

MOST_STEPS = 4096  # of one jump
KEPT = 4096  # ends of steps, before those that nobody waits for are dropped
ROOM_S = 0.05  # after it, an engine in which nothing fits looks again


@dataclass(frozen=True, slots=True)
class StepPace:
    """How long a step takes, in seconds."""

    step_s: float = 0.02
    prompt_token_s: float = 0.0005  # for each position of a prompt that is computed
    sequence_s: float = 0.001  # for each sequence that decodes

    def __call__(self, work: Work) -> float:
        return self.step_s + work.tokens * self.prompt_token_s + work.decodes * self.sequence_s


def work_of(batch: Seq[Chunk]) -> Work:
    """What a step with these chunks computes."""
    tokens = decodes = context = guesses = guess_context = drafts = 0
    pairs = 0.0
    for chunk in batch:
        seq = chunk.seq
        if seq.decoding:
            decodes += 1
            context += seq.computed
            if chunk.drafts:
                guesses += chunk.guesses
                guess_context += chunk.guesses * seq.computed
                drafts = max(drafts, chunk.guesses)
        else:
            tokens += chunk.n
            pairs += pairs_of(chunk.n, seq.computed)
    return Work(tokens, pairs, decodes, context, guesses, guess_context, drafts)


def sampled(chunk: Chunk) -> Tokens:
    """The token at a position is its number, also after a wrong guess."""
    if not chunk.samples:
        return ()
    known = len(chunk.seq.tokens)
    return tuple([Sampled(position % VOCABULARY) for position in range(known, known + 1 + len(chunk.drafts))])


class ProfiledPace:
    """How long a step takes by a profile, in seconds."""

    def __init__(self, profile: Profile) -> None:
        self.numbers, self._form = profile.values("step"), profile.form

    def __call__(self, work: Work) -> float:
        return step_seconds(self.numbers, self._form, work)

    def decodes(self, decodes: int, context: int, steps: int) -> list[float]:
        return decode_seconds(self.numbers, self._form, decodes, context, steps)


class ModelledRunner:
    """A `baton.engine.core.protocol.Runner`."""

    vocab_size = VOCABULARY
    eos_token_ids: frozenset[int] = frozenset()
    matrices = ""
    separates_output = True  # as of every real model
    on_device = False

    def __init__(self, pace: Callable[[Work], float], num_blocks: int, block_size: int, max_positions: int) -> None:
        self.pace = pace
        self.max_positions = max_positions
        self.layout = KvLayout("model", "int8", block_size, 1, 1, 1)
        self.pool = KvPool(self.layout, num_blocks)
        self.step_s = 0.0  # of the last step
        self.kind: Kind = "other"  # of the last step

    def run(self, batch: Seq[Chunk]) -> list[Tokens]:
        work = work_of(batch)
        self.step_s = self.pace(work)
        self.kind = "prompt" if work.tokens else "decode"
        return [sampled(chunk) for chunk in batch]

    def decodes(self, decodes: int, context: int, steps: int) -> list[float]:
        """How long each of so many steps takes in which the same sequences decode. `context`: of the first."""
        if isinstance(self.pace, ProfiledPace):
            return self.pace.decodes(decodes, context, steps)
        return [self.pace(Work(0, 0.0, decodes, context + step * decodes)) for step in range(steps)]

    def copy(self, source: int, target: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Told:
    """What steps brought for a sequence: a token for each of `ends`, when its step ended. `output`: the last one, if it says more than its
    token, or something else."""

    seq: Sequence
    ends: Iterable[float] = ()
    output: Output | None = None


@dataclass(slots=True)
class Untold:
    """The tokens of sequences that decode, of which nobody has been told. A sequence that decodes has a token of each step, so that the
    ends of all steps say when, and where its own begin."""

    ends: "array[float]" = field(default_factory=lambda: array("d"))  # of the steps so far
    dropped: int = 0  # of those, from the first on
    since: dict[Sequence, int] = field(default_factory=dict)  # the number of the first step that was not told

    @property
    def steps(self) -> int:
        return self.dropped + len(self.ends)

    def take(self, seq: Sequence) -> "array[float]":
        """The ends of its steps."""
        since = self.since.pop(seq, None)
        return array("d") if since is None else self.ends[since - self.dropped :]

    def extend(self, seqs: Iterable[Sequence], ends: Iterable[float]) -> None:
        """Steps in which they decoded."""
        number = self.steps
        for seq in seqs:
            self.since.setdefault(seq, number)
        self.ends.extend(ends)

    def trim(self) -> None:
        if len(self.ends) > KEPT:
            self.since = {seq: number for seq, number in self.since.items() if seq.state is State.RUNNING}
            least = min(self.since.values(), default=self.steps) - self.dropped
            if 2 * least > len(self.ends):
                del self.ends[:least]
                self.dropped += least


class Bell:
    """What `Commands` rings when somebody asks for something."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self.set = ring


class ModelledEngine(Commands):
    """A `baton.engine.core.contract.ServingEngine` that needs no thread: a task of the event loop steps it."""

    def __init__(
        self, runner: ModelledRunner, limits: Limits, listener: Listener, tell: Callable[[Told], None] | None = None,
        cores: Computes | None = None, number: int = 0, drafter: Drafter | None = None,
    ) -> None:  # fmt: skip
        """`drafter`: who guesses (`baton.simulate.guesses`). `number`: its place among engines whose steps end at one moment. With `tell`,
        and with processor time of its own, steps may be jumped over: then `tell` gets what they bring, in place of the listener's
        `on_step`, tokens of decodes when their sequence ends, or when somebody asks for them (`ask`), or when a step brings several; and
        `on_batch` gets only steps that were not jumped over."""
        max_len = min(runner.max_positions, runner.pool.num_blocks * runner.layout.block_size)
        super().__init__(Engine(runner, limits, max_len, drafter=drafter), listener)
        self._runner, self.number = runner, number
        self._cores = None if isinstance(cores, OwnCores) or cores is None else cores
        self._wake = Bell(self._ring)  # type: ignore[assignment]
        self._jumps = tell is not None and self._cores is None
        self._tell = tell or (lambda told: None)
        self._jump: Jump | None = None
        self._untold = Untold()
        self.awaited: set[Sequence] = set()  # sequences whose first token is told at once
        self.told_at = 0.0  # the moment of what the listener's `on_cache` gets
        self.touches = 0  # commands, and steps that were not jumped over
        self.changes: Callable[[Jump], None] = lambda jump: None  # called when a jump begins, which may change the prefix cache
        self._laps = self._last = self._preemptions = 0  # `_last`: steps of the last jump
        self._busy_since: float | None = None
        self._closing = False
        self._sleeping: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None  # of the end of what is under way
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Must be called within a loop of virtual time."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self._loop = loop
        self._task = loop.create_task(self._run())

    def activity(self) -> tuple[int, float | None, float | None]:
        return self._laps + (self._jump.under_way(self._loop.time()) if self._jump else 0), self._busy_since, None

    async def close(self) -> None:
        self._closing = True
        self._ring()
        if self._task is not None:
            await asyncio.wait([self._task])

    def facts(self) -> EngineLoad:
        """`look` without waiting for a step to end."""
        if self._jump is not None:
            self._jump.settle(self._jump.under_way(self._loop.time()))
        return facts(self._engine)

    def ask(self, *seqs: Sequence) -> None:
        """Tells the tokens that these sequences have by now, or all."""
        now, jump = self._loop.time(), self._jump
        if jump is not None:
            self._untold.extend(jump.seqs, jump.ended(now))
        for seq in seqs or list(self._untold.since):
            if ends := self._untold.take(seq):
                self._tell(Told(seq, ends))

    def reach(self, jump: Jump, step: int) -> bool:
        """A step of a jump has ended. Returns False if there was no such step, or all has been done."""
        if self._jump is not jump or step > jump.steps:
            return False
        jump.reach(step)
        return True

    async def _run(self) -> None:
        try:
            await self._work()
        except Exception as error:
            self._listener.on_failure(error)
        finally:
            self._stopped = True
            self._refuse()

    async def _work(self) -> None:
        engine = self._engine
        while not self._closing:
            while self._commands:
                self._laps += 1
                self.touches += 1
                self._execute()
            if engine.idle:
                await self._rest()
                continue
            now = self._busy_since = self._loop.time()
            if self._jumps and (ends := self._plain(now)):
                await self._leap(now, ends)
                continue
            self._laps += 1
            self.touches += 1
            outputs = await self._step(now)
            self._busy_since = None
            self._publish_cache()
            if outputs:
                self._note(outputs)
            elif not self._runner.step_s:
                await self._sleep(ROOM_S)  # no sequence fits: only a command can change that

    def _plain(self, now: float) -> list[float]:
        """The ends of steps that can be jumped over. Where commands come often, few are planned."""
        running = self._engine.scheduler.running
        steps = plain_steps(self._engine, min(MOST_STEPS, 8 * self._last + 32)) if self.awaited.isdisjoint(running) else 0
        if not steps:
            return []
        seconds = self._runner.decodes(len(running), sum([seq.computed for seq in running]), steps)
        return list(accumulate(seconds, initial=now))[1:] if min(seconds) > 0 else []

    async def _leap(self, began: float, ends: list[float]) -> None:
        jump = self._jump = Jump(self._engine, began, ends, self._publish_at)
        self.changes(jump)
        await self._end(ends[-1])
        jump.settle(jump.steps)
        self._untold.extend(jump.seqs, jump.ended(self._loop.time()))
        self._jump, self._busy_since = None, None
        self._laps += jump.steps
        self._last = jump.steps

    async def _step(self, began: float) -> list[Output]:
        counts, runner = self._engine.counts, self._runner
        chunks, tokens, runner.step_s = counts.chunks, counts.computed_tokens, 0.0
        outputs = self._engine.step(began)
        chunks, tokens = counts.chunks - chunks, counts.computed_tokens - tokens
        if self._cores is not None:
            await self._cores.work(runner.step_s, runner.kind)
        elif runner.step_s > 0:
            await self._end(began + runner.step_s)
        if chunks:
            done = self._loop.time() - began, tokens, chunks
            self._listener.on_batch(*done)
            if self._engine.colder is not None:
                self._engine.colder.paced(*done)
        return outputs

    async def _rest(self) -> None:
        """Nothing runs or waits to run. What tiers load may come, or take too long."""
        if (colder := self._engine.colder) is None:
            await self._sleep()
            return
        colder.turn(self._loop.time())
        if self._engine.idle:
            await self._sleep(colder.until(self._loop.time()))

    async def _end(self, when: float) -> None:
        """Waits for the end of a step. `_ring` may set another."""
        self._ended = self._loop.create_future()
        self._timer = self._loop.at_first(when, self.number, self._note_end)
        try:
            await self._ended
        finally:
            self._timer.cancel()

    def _note_end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    async def _sleep(self, seconds: float | None = None) -> None:
        """Sleeps until somebody asks for something."""
        if self._commands:  # they came while the engine was busy
            return
        self._sleeping = self._loop.create_future()
        timer = None if seconds is None else self._loop.call_later(seconds, self._wake_up)
        try:
            await self._sleeping
        finally:
            self._sleeping = None
            if timer is not None:
                timer.cancel()

    def _wake_up(self) -> None:
        if self._sleeping is not None and not self._sleeping.done():
            self._sleeping.set_result(None)

    def _ring(self) -> None:
        self._wake_up()
        if (jump := self._jump) is not None and self._timer is not None:
            before = jump.steps
            end = jump.end_after(jump.under_way(self._loop.time()))
            if jump.steps < before:
                self._timer.cancel()
                self._timer = self._loop.at_first(end, self.number, self._note_end)

    def _note(self, outputs: list[Output]) -> None:
        """A step has ended."""
        if not self._jumps:
            self._listener.on_step(outputs)
            return
        now, untold = self._loop.time(), self._untold
        if self._engine.counts.preemptions > self._preemptions:
            self._preemptions = self._engine.counts.preemptions
            for seq in [seq for seq in untold.since if seq.state is State.WAITING]:
                self._tell(Told(seq, untold.take(seq)))
        tokens = Counter([output.seq for output in outputs if output.sampled is not None])
        for seq in [seq for seq, count in tokens.items() if count > 1]:  # a step tells one end of each sequence
            self._tell(Told(seq, [*untold.take(seq), *[now] * tokens.pop(seq)]))
        untold.extend(tokens, (now,))
        for output in outputs:
            seq = output.seq
            if output.sampled is None or seq.state is not State.RUNNING or seq in self.awaited:
                self.awaited.discard(seq)
                self._tell(Told(seq, untold.take(seq), output))
        untold.trim()

    def _publish_cache(self) -> None:
        self._publish_at(self._loop.time())

    def _publish_at(self, moment: float) -> None:
        self.told_at = moment
        super()._publish_cache()

    def _post(self, function: Callable[..., None], *args: object) -> None:
        function(*args)
