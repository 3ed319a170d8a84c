"""The commands of our own engine: each is a function that runs between two of its steps."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any, TypeVar

from baton.engine.core.block_key import DEVICE, MAX_EVENT_KEYS
from baton.engine.core.colder import Colder, ColderTiers
from baton.engine.core.contract import EngineLoad, EngineStopped, Grammars, Listener, Traits, cache_events, taken
from baton.engine.core.engine import Engine, Malformed, QueueFull, learn
from baton.engine.core.grammar import GrammarRefused, GrammarsBusy
from baton.engine.core.sequence import Sequence

T = TypeVar("T")
LATE_S = 5.0  # a load ends between two steps, and a step may take as long
LONG_PROMPT = 4096  # tokens; what is computed from every token of a longer prompt is not computed in the engine's thread


def facts(engine: Engine) -> EngineLoad:
    scheduler = engine.scheduler
    queued = *scheduler.waiting, *scheduler.loading, *scheduler.aside
    return EngineLoad(
        running=len(scheduler.running) + len(scheduler.fetching),
        waiting=len(queued),
        waiting_tokens=sum(seq.pending for seq in (*queued, *scheduler.running) if seq.prefilling),
        free_blocks=engine.pool.available,
        cached_blocks=engine.pool.num_cached,
        owned_blocks=engine.pool.num_owned,
        sequences=len(engine.sequences),
        credit_tokens=scheduler.credit_tokens(),
        counts=engine.counts.copy(),
    )


def held(engine: Engine) -> dict[str, list[bytes]]:
    colder = engine.colder.held if engine.colder is not None else {}
    return {DEVICE: engine.pool.sealed_keys(), **{medium: list(keys) for medium, keys in colder.items()}}


async def prepare(grammars: Grammars | None, *seqs: Sequence) -> None:
    """Compiles the grammars of sequences, off the engine's thread. Raises Malformed or QueueFull."""
    for seq in seqs:
        if seq.matcher is None and grammars is not None:
            await _prepare(grammars, seq)


async def _prepare(grammars: Grammars, seq: Sequence) -> None:
    form, thinking = seq.params.structured, seq.params.thinking
    if form is None and thinking is None:
        return
    try:
        seq.matcher = await grammars.ready(form, seq.tokens[seq.prompt_len :], thinking)
    except GrammarRefused as error:
        raise Malformed(f"{'thinking' if form is None else 'structured'}: {error}") from None
    except GrammarsBusy as error:
        raise QueueFull(str(error)) from None


class Commands:
    """What a caller may ask of an engine, as functions that run between two of its steps. Who runs the engine sets `_wake`, calls
    `_execute` while there are `_commands`, and says how something is told to the event loop (`_post`)."""

    _wake: threading.Event | asyncio.Event

    def __init__(self, engine: Engine, listener: Listener, tokenizer_fingerprint: str = "", grammars: Grammars | None = None) -> None:
        """`grammars`: who prepares them; without, a sequence that has one is refused."""
        self._engine = engine
        self._listener = listener
        self._commands: deque[tuple[Callable[[Engine], Any], asyncio.Future[Any] | None]] = deque()  # without a future, no caller waits
        self._stopped = False
        self._grammars = grammars
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self.pool = engine.runner.pool
        self._cache_sequence = 0  # of the last event of the prefix cache

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Runs `function(engine)`. Its exception is raised here. A cancelled caller's command still runs. Raises EngineStopped."""
        if self._stopped:
            raise EngineStopped("the engine has stopped")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._commands.append((function, future))
        self._wake.set()
        return await future

    def tell(self, function: Callable[[Engine], object]) -> None:
        """Runs `function(engine)` without waiting: for clean-up, which must not be cancelled. It must not raise."""
        self._commands.append((function, None))
        self._wake.set()

    @property
    def traits(self) -> Traits:
        engine, runner = self._engine, self._engine.runner
        return Traits(
            model_fingerprint=runner.layout.model_fingerprint,
            tokenizer_fingerprint=self._tokenizer_fingerprint,
            max_model_len=engine.max_len,
            max_num_seqs=engine.scheduler.limits.max_num_seqs,
            num_blocks=engine.pool.num_blocks,
            eos_token_ids=runner.eos_token_ids,
            lends=True,
            brings=engine.colder is not None and not engine.pool.describes,
            offer=engine.drafter.offer,
            matrices=runner.matrices,
        )

    async def add(self, seq: Sequence, forks: list[Sequence] | None = None) -> None:
        await self._prepare(seq, *(forks or ()))
        now = taken(forks)
        await self.call(lambda engine: engine.add(seq, now))

    async def reserve(self, seq: Sequence) -> bool:
        await self._prepare(seq)
        return await self.call(lambda engine: engine.reserve(seq))

    async def adopt(self, seq: Sequence, end: int | None = None, first: int | None = None, forks: list[Sequence] | None = None) -> None:
        await prepare(self._grammars, *(forks or ()))
        now = taken(forks)

        def adopt(engine: Engine) -> None:
            if end is not None:
                engine.arrive(seq, end)
            engine.adopt(seq, first, now)

        await self.call(adopt)

    async def give_up(self, seq: Sequence, filling: list[int], first: int | None = None, forks: list[Sequence] | None = None) -> None:
        await prepare(self._grammars, *(forks or ()))
        now = taken(forks)

        def give_up(engine: Engine) -> None:
            if seq.id in engine.sequences:
                filling.extend(engine.give_up(seq, first, now))
                return
            if first is not None:
                learn(seq, first)
            engine.add(seq, now)

        await self.call(give_up)

    async def abort(self, seq_id: str, filling: list[int]) -> None:
        await self.call(lambda engine: filling.extend(engine.abort(seq_id)))

    def forget(self, seq_id: str) -> None:
        self.tell(lambda engine: engine.abort(seq_id))

    async def pin(self, keys: Seq[bytes], pinned: list[int]) -> None:
        await self.call(lambda engine: pinned.extend(engine.pin(keys)))

    async def bring(self, keys: Seq[bytes], wait_s: float, rival_s: float | None = None, hint: bool = False) -> int:
        colder = self._engine.colder
        if colder is None or not any(key in held for held in colder.held.values() for key in keys):
            return 0
        loop = asyncio.get_running_loop()
        came: asyncio.Future[int] = loop.create_future()
        ended, now = partial(self._post, _resolve, came), loop.time()
        number = await self.call(lambda engine: colder.bring(keys, now + wait_s, now, ended, rival_s, hint))
        if number is None:
            return 0
        try:
            async with asyncio.timeout(wait_s + LATE_S):
                return await came
        except TimeoutError:  # the engine has stopped, or a step takes very long
            return 0
        finally:
            self.tell(lambda engine: colder.leave(number, ended))

    async def release(self, blocks: Seq[int]) -> None:
        await self.call(lambda engine: engine.release(blocks))

    def release_soon(self, blocks: Seq[int]) -> None:
        self.tell(lambda engine: engine.release(blocks))

    async def look(self) -> EngineLoad:
        return await self.call(facts)

    async def snapshot(self) -> tuple[int, dict[str, list[bytes]]]:
        return await self.call(lambda engine: (self._cache_sequence, held(engine)))

    def attach(self, tiers: ColderTiers) -> None:
        """Must be called before it runs. May wait; raises what `ColderTiers.open` raises."""
        tiers.open(self.pool, Reports(self))
        self._engine.colder = Colder(tiers, self._engine.pool, self._engine.scheduler, both=not self._engine.runner.on_device)
        if self._engine.long_contexts:
            self._engine.lengthen(tiers.shelf(self._engine.max_len))

    async def _prepare(self, seq: Sequence, *forks: Sequence) -> None:
        """What needs no engine: all its sequences would wait for it. Raises Malformed or QueueFull."""
        await prepare(self._grammars, seq, *forks)
        if LONG_PROMPT < len(seq.tokens) <= self._engine.max_len:
            await asyncio.to_thread(self._engine.scheduler.extend_keys, seq)

    def _execute(self) -> None:
        """Runs the oldest command."""
        function, future = self._commands.popleft()
        try:
            value = function(self._engine)
        except Exception as error:
            if future is None:
                raise
            self._publish_cache()
            self._post(_fail, future, error)
        else:
            told_on = future is None and self._commands and self._commands[0][1] is None
            if not told_on:  # what tiers tell comes in runs, each part of which would wake the event loop
                self._publish_cache()
            if future is not None:
                self._post(_resolve, future, value)

    def _publish_cache(self) -> None:
        changes = self._engine.pool.drain_changes()
        if not changes:
            return
        if self._engine.colder is not None:
            self._engine.colder.noted(changes)
        events = cache_events(changes, self._cache_sequence)
        self._cache_sequence += len(events)
        self._post(self._listener.on_cache, events)

    def _refuse(self) -> None:
        """Runs on the event loop, as `call` does: an earlier command is refused here, and `call` refuses a later one."""
        while self._commands:
            _, future = self._commands.popleft()
            if future is not None:
                _fail(future, EngineStopped("the engine has stopped"))

    def _post(self, function: Callable[..., None], *args: object) -> None:
        """Calls `function(*args)` on the event loop, after what was posted before."""
        raise NotImplementedError


class Reports:
    """Implements `baton.engine.core.colder.Report`."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands

    def saved(self, blocks: Seq[tuple[int, bytes]]) -> None:
        self._tell(lambda colder: colder.saved(blocks))

    def landed(self, number: int) -> None:
        self._tell(lambda colder: colder.landed(number))

    def given_back(self, blocks: Seq[int]) -> None:
        self._tell(lambda colder: colder.given_back(blocks))

    def moved(self, stored: bool, medium: str, keys: Seq[bytes]) -> None:
        for start in range(0, len(keys), MAX_EVENT_KEYS):  # a command stands between two steps
            self._tell(partial(Colder.moved, stored=stored, medium=medium, keys=keys[start : start + MAX_EVENT_KEYS]))

    def _tell(self, function: Callable[[Colder], None]) -> None:
        self._commands.tell(lambda engine: function(engine.colder) if engine.colder is not None else None)


def _resolve(future: "asyncio.Future[T]", value: T) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: "asyncio.Future[T]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
