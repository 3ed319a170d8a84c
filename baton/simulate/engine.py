"""Our own engine in the event loop's time: scheduler, blocks and prefix cache are the real ones. A step computes nothing, and takes as long
as a model of it says."""

import asyncio
from bisect import bisect_right
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TypeVar

from baton.clock import loop_time
from baton.engine.core.commands import Commands, facts
from baton.engine.core.contract import Facts, Listener
from baton.engine.core.drafting import Ask, Drafter
from baton.engine.core.engine import Engine
from baton.engine.core.kvcache import KvLayout, KvPool
from baton.engine.core.limits import Limits
from baton.engine.core.protocol import Chunk, Tokens
from baton.engine.core.sampling import Sampled
from baton.engine.core.sequence import Sequence
from baton.profile.file import Profile
from baton.profile.models import Work, pairs_of, step_seconds
from baton.simulate.cores import Computes, Own

T = TypeVar("T")
VOCABULARY = 1 << 16
ROOM_S = 0.05  # after it, an engine in which nothing fits looks again


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a step takes, in seconds."""

    step_s: float = 0.02
    prompt_token_s: float = 0.0005  # for each position of a prompt that is computed
    sequence_s: float = 0.001  # for each sequence that decodes

    def __call__(self, work: Work) -> float:
        return self.step_s + work.tokens * self.prompt_token_s + work.decodes * self.sequence_s


def work_of(batch: Seq[Chunk]) -> Work:
    """What a step with these chunks computes."""
    tokens = decodes = context = 0
    pairs = 0.0
    for chunk in batch:
        seq = chunk.seq
        if seq.decoding:
            rows = chunk.positions
            decodes += rows
            context += rows * seq.computed
        else:
            tokens += chunk.n
            pairs += pairs_of(chunk.n, seq.computed)
    return Work(tokens, pairs, decodes, context)


class ProfiledPace:
    """How long a step takes by a profile, in seconds."""

    def __init__(self, profile: Profile) -> None:
        self._numbers, self._form = profile.values("step"), profile.form

    def __call__(self, work: Work) -> float:
        return step_seconds(self._numbers, self._form, work)


class Stride(Drafter):
    """Makes one step of the engine do what `count` steps would: it guesses that each sequence goes on as the modelled runner says it does,
    so all guesses are right. How long these steps take is counted apart (`ModelledEngine`)."""

    def __init__(self) -> None:
        self.count = 1

    def most(self, seqs: Seq[Sequence], rows: int) -> Seq[int]:
        return [self.count - 1] * len(seqs) if self.count > 1 else ()

    def propose(self, asks: Seq[Ask]) -> list[Seq[int]]:
        return [tuple(said(ask.seq, i) for i in range(ask.most)) for ask in asks]


def said(seq: Sequence, after: int) -> int:
    """The token that comes so many tokens after the known ones: tokens say nothing, each is its position."""
    return (len(seq.tokens) + after) % VOCABULARY


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

    def run(self, batch: Seq[Chunk]) -> list[Tokens]:
        self.step_s = self.pace(work_of(batch))
        return [tuple(Sampled(said(chunk.seq, i)) for i in range(1 + len(chunk.drafts))) if chunk.samples else () for chunk in batch]

    def copy(self, source: int, target: int) -> None: ...


class ModelledEngine(Commands):
    """A `baton.engine.core.contract.ServingEngine` that needs no thread: a task of the event loop steps it."""

    _wake: asyncio.Event

    def __init__(self, runner: ModelledRunner, limits: Limits, listener: Listener, cores: Computes | None = None, stride: int = 1) -> None:
        """`stride`: while all sequences decode and nobody asks for anything, so many steps at most are simulated as one. They take as long
        and yield the same tokens, which are told together when the last one has ended."""
        max_len = min(runner.max_positions, runner.pool.num_blocks * runner.layout.block_size)
        self._stride, self._most_steps = Stride(), stride
        super().__init__(Engine(runner, limits, max_len, drafter=self._stride if stride > 1 else None), listener)
        self._runner = runner
        self._cores = cores or Own()
        self._wake = asyncio.Event()
        self._laps = 0
        self._busy_since: float | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    def activity(self) -> tuple[int, float | None, float | None]:
        return self._laps, self._busy_since, None

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            await self._work()
        finally:
            self._stopped = True
            self._refuse()

    async def _work(self) -> None:
        engine = self._engine
        while True:
            while self._commands:
                self._execute()
            if engine.idle:
                self._wake.clear()
                await self._wake.wait()
                continue
            self._laps += 1
            self._busy_since, self._runner.step_s = loop_time(), 0.0
            if (steps := self._plain_steps()) > 1:
                self._stride.count = await self._pass(steps)
                outputs = engine.step(loop_time())
                self._stride.count = 1
            else:
                outputs = engine.step(loop_time())
                await self._cores.work(self._runner.step_s)
            self._busy_since = None
            self._publish_cache()
            if outputs:
                self._listener.on_step(outputs)
            elif not self._runner.step_s:
                await self._room()

    def _plain_steps(self) -> int:
        """How many steps at most will do nothing but decode the same sequences, if nobody asks for anything."""
        if self._most_steps == 1:
            return 1
        scheduler = self._engine.scheduler
        running, block = scheduler.running, self._engine.block_size
        room = self._engine.pool.available >= len(running) * (1 + self._most_steps // block)
        if scheduler.waiting or not running or not room or not all(seq.decoding for seq in running):
            return 1
        budget = scheduler.limits.max_num_batched_tokens // len(running)
        return min(self._most_steps, budget, *(seq.remaining for seq in running))

    async def _pass(self, steps: int) -> int:
        """Waits until so many steps of the running sequences have ended, or the one in which a command comes. Returns how many did."""
        running, pace = self._engine.scheduler.running, self._runner.pace
        batch, context, ends, end = len(running), sum(seq.computed for seq in running), list[float](), 0.0
        for step in range(steps):
            end += pace(Work(decodes=batch, context=context + step * batch))
            ends.append(end)
        began = loop_time()
        self._wake.clear()
        try:
            async with asyncio.timeout(end):
                await self._wake.wait()
        except TimeoutError:
            return steps
        passed = loop_time() - began
        done = min(bisect_right(ends, passed), steps - 1)
        await asyncio.sleep(max(0.0, ends[done] - passed))
        return done + 1

    def facts(self) -> Facts:
        """`look` without waiting for a step to end."""
        return facts(self._engine)

    async def _room(self) -> None:
        """No sequence fits: only a command can change that."""
        self._wake.clear()
        try:
            async with asyncio.timeout(ROOM_S):
                await self._wake.wait()
        except TimeoutError:
            pass

    def _post(self, function: Callable[..., None], *args: object) -> None:
        function(*args)
