"""The thread that owns an engine: commands run between steps and in order, results arrive in the order they were made, the prefix cache's
events describe it completely, and nothing runs after the end."""

import asyncio
import math
import random
import threading
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from baton.engine.core import commands as commands_module
from baton.engine.core import scheduler
from baton.engine.core.block_key import DEVICE, HOST, MAX_EVENT_KEYS, extend_keys, root_key
from baton.engine.core.blocks import CacheChange
from baton.engine.core.commands import facts
from baton.engine.core.contract import CacheEvent, EngineStopped, Listener, cache_events
from baton.engine.core.engine import Engine, Output, TooLong
from baton.engine.core.kvcache import KvPool
from baton.engine.core.limits import Limits
from baton.engine.core.loop import EngineLoop
from baton.engine.core.protocol import Chunk, Tokens
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence, State
from baton.engine.core.toy import ToyRunner, naive

BLOCK = 4
CONFIG = {"vocab_size": 257, "eos_token_id": 256, "max_position_embeddings": 4096, "kv_width": 8}
WITHIN_S = 20.0  # limit on waiting for what never happens if something is wrong


class Gate(ToyRunner):
    """A runner whose steps can be blocked, watched, and made to fail."""

    def __init__(self) -> None:
        super().__init__(CONFIG, "toy", BLOCK)
        self.threads: set[int] = set()
        self.error: BaseException | None = None
        self.steps = 0
        self._permits: float = math.inf
        self._busy = False
        self._changed = threading.Condition()

    def run(self, batch: Seq[Chunk]) -> list[Tokens]:
        with self._changed:
            self.steps += 1
            self.threads.add(threading.get_ident())
            self._busy = True
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._permits > 0, WITHIN_S)
            self._permits -= 1
            self._busy = False
            if self.error is not None:
                raise self.error
        return super().run(batch)

    def let(self, steps: float) -> None:
        """Lets `steps` steps pass; further ones block until they are let through, too."""
        with self._changed:
            self._permits = steps
            self._changed.notify_all()

    async def inside(self) -> None:
        """Waits until a step is blocked."""
        assert await asyncio.to_thread(self._wait_until_busy)

    def _wait_until_busy(self) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._busy, WITHIN_S)


@dataclass
class Reported:
    """What a loop reported through its callbacks."""

    outputs: list[Output] = field(default_factory=list)
    events: list[CacheEvent] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)

    def on_step(self, outputs: list[Output]) -> None:
        self.threads.add(threading.get_ident())
        self.outputs += outputs

    def tokens(self, name: str) -> list[int]:
        return [output.sampled.token for output in self.outputs if output.seq.id == name and output.sampled]

    def replayed(self, upto: int | None = None) -> set[bytes]:
        keys: set[bytes] = set()
        for event in self.events[:upto]:
            if event.kind == "stored":
                assert not keys & set(event.keys), "stored twice"
                keys |= set(event.keys)
            else:
                assert keys >= set(event.keys), "removed but never stored"
                keys -= set(event.keys)
        return keys


@dataclass
class Running:
    loop: EngineLoop
    engine: Engine
    runner: Gate
    reported: Reported


@asynccontextmanager
async def running(blocks: int = 512) -> AsyncIterator[Running]:
    runner, reported = Gate(), Reported()
    runner.attach(KvPool(runner.layout, blocks))
    engine = Engine(runner, Limits(8, 32), min(1024, blocks * BLOCK))
    loop = EngineLoop(engine, Listener(reported.on_step, reported.events.extend, reported.failures.append))
    loop.start()
    try:
        yield Running(loop, engine, runner, reported)
    finally:
        runner.let(math.inf)
        await asyncio.wait_for(loop.close(), WITHIN_S)


def make_seq(name: str, tokens: list[int], max_tokens: int = 8, hold: bool = False) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Sequence(name, list(tokens), len(tokens), params, root_key("toy"), hold)


def adding(seq: Sequence) -> Callable[[Engine], None]:
    return lambda engine: engine.add(seq)


def aborting(name: str) -> Callable[[Engine], list[int]]:
    return lambda engine: engine.abort(name)


async def until(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await asyncio.sleep(0.001)


async def test_call_returns_the_value_or_raises_the_exception() -> None:
    async with running() as r:
        assert await r.loop.call(lambda engine: engine.pool.num_blocks) == 512
        with pytest.raises(TooLong):
            await r.loop.call(lambda engine: engine.add(make_seq("long", [1] * 2000)))
        assert (await r.loop.call(facts)).sequences == 0, "a command that raised leaves nothing behind and does not stop the loop"
        assert not r.reported.failures


async def test_everything_runs_in_one_thread_and_is_reported_in_another() -> None:
    async with running() as r:
        commands = {await r.loop.call(lambda _: threading.get_ident()) for _ in range(3)}
        await r.loop.call(lambda engine: engine.add(make_seq("s", [1, 2, 3])))
        await until(lambda: len(r.reported.tokens("s")) == 8)
    assert commands == r.runner.threads and len(commands) == 1
    assert r.reported.threads == {threading.get_ident()} != commands


async def test_memory_is_asked_for_before_a_step_writes_there(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, written = [0], list[bool]()
    monkeypatch.setattr(KvPool, "back", lambda self, blocks: asked.append(blocks))

    def note(self: Gate, batch: Seq[Chunk]) -> list[Tokens]:
        for chunk in batch:
            last = (chunk.seq.computed + chunk.n - 1) // BLOCK
            written.extend(block < asked[-1] for block in chunk.seq.blocks[: last + 1])
        return ToyRunner.run(self, batch)

    monkeypatch.setattr(Gate, "run", note)
    async with running() as r:
        await until(lambda: asked[-1] == 4 * 32 // BLOCK)  # four of the largest steps, before anything comes
        for name in ("s", "t"):
            await r.loop.call(adding(make_seq(name, [1] * 400, max_tokens=40)))
        await until(lambda: len(r.reported.tokens("s")) == len(r.reported.tokens("t")) == 40)
    assert len(written) > 200 and all(written)


async def test_each_step_that_computed_something_is_reported_in_the_engine_thread() -> None:
    runner, reported, threads = Gate(), Reported(), set()
    batches: list[tuple[float, int, int]] = []

    def on_batch(*batch: Any) -> None:
        batches.append(batch)
        threads.add(threading.get_ident())

    runner.attach(KvPool(runner.layout, 512))
    engine = Engine(runner, Limits(8, 32), 1024)
    loop = EngineLoop(engine, Listener(reported.on_step, reported.events.extend, reported.failures.append, on_batch))
    loop.start()

    def add_both(engine: Engine) -> None:
        for name in "ab":
            engine.add(make_seq(name, [ord(name)] * 48, max_tokens=4))

    await loop.call(add_both)
    await until(lambda: len(reported.tokens("a")) == 4 == len(reported.tokens("b")))
    counts = (await loop.call(facts)).counts
    await loop.close()
    assert [tokens for _, tokens, _ in batches[:3]] == [32, 32, 32], "two prompts of 48 in chunks of a budget of 32"
    assert sum(tokens for _, tokens, _ in batches) == counts.computed_tokens == 2 * (48 + 3) - counts.hit_tokens
    assert sum(sequences for _, _, sequences in batches) == counts.chunks
    assert all(seconds > 0 and tokens >= sequences > 0 for seconds, tokens, sequences in batches)
    assert threads == runner.threads


@pytest.mark.parametrize("way", ["add", "reserve"])
async def test_the_keys_of_a_long_prompt_are_not_computed_in_the_engines_thread(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """5,000 keys would take 5 ms and more between two steps of everybody else. Control: a short prompt is not worth another thread."""
    hashed: list[tuple[int, int]] = []  # thread, keys

    def extend(keys: list[bytes], *more: Any) -> None:
        known = len(keys)
        extend_keys(keys, *more)
        if len(keys) > known:
            hashed.append((threading.get_ident(), len(keys) - known))

    monkeypatch.setattr(commands_module, "LONG_PROMPT", 64)
    monkeypatch.setattr(scheduler, "extend_keys", extend)
    async with running() as r:
        engine_thread = await r.loop.call(lambda _: threading.get_ident())
        for length in (64, 80):
            await getattr(r.loop, way)(make_seq(f"s{length}", [length] * length, max_tokens=1))
        await until(lambda: len(hashed) == 2)
        assert {count: thread == engine_thread for thread, count in hashed} == {64 // BLOCK: True, 80 // BLOCK: False}
        with pytest.raises(TooLong):
            await getattr(r.loop, way)(make_seq("long", [1] * 2000))
        assert len(hashed) == 2, "a prompt that is refused costs nothing"
        if way == "add":
            await until(lambda: len(r.reported.tokens("s80")) == 1)
        for name in ("s64", "s80"):
            await r.loop.abort(name, [])


async def test_commands_run_in_the_order_they_were_given() -> None:
    async with running() as r:
        ran: list[int] = []

        def noting(value: int) -> Callable[[Engine], None]:
            return lambda _: ran.append(value)

        r.runner.let(0)
        await r.loop.call(lambda engine: engine.add(make_seq("s", [1] * 8, max_tokens=100)))
        await r.runner.inside()
        calls = []
        for i in range(0, 30, 3):
            calls.append(asyncio.create_task(r.loop.call(noting(i))))
            await asyncio.sleep(0)  # the task has given its command
            r.loop.tell(noting(i + 1))
            r.loop.tell(noting(i + 2))
        assert not ran, "a command ran in the middle of a step"
        r.runner.let(math.inf)
        await asyncio.gather(*calls)
        assert await r.loop.call(lambda _: list(ran)) == list(range(30))


async def test_all_earlier_steps_are_reported_before_a_call_returns() -> None:
    async with running() as r:
        seq = make_seq("s", [1, 2, 3])
        r.runner.let(0)
        await r.loop.call(lambda engine: engine.add(seq))
        for made in range(1, 6):
            await r.runner.inside()
            looking = asyncio.create_task(r.loop.call(lambda _: seq.output_len))
            await asyncio.sleep(0)
            r.runner.let(1)
            assert await looking == len(r.reported.outputs) == made
        assert r.reported.tokens("s") == naive([1, 2, 3], seq.params)[:5]


async def test_an_aborted_sequence_gives_no_output_after_the_abort() -> None:
    async with running() as r:
        for i in range(30):
            name, seq = f"s{i}", make_seq(f"s{i}", [i, 2, 3], max_tokens=200)
            await r.loop.call(adding(seq))
            if i % 3:
                await asyncio.sleep(0.001)
            await r.loop.call(aborting(name))
            seen = len(r.reported.tokens(name))
            await asyncio.sleep(0.002)
            assert len(r.reported.tokens(name)) == seen
        left = await r.loop.call(facts)
        assert (left.owned_blocks, left.sequences, left.running, left.waiting) == (0, 0, 0, 0)


async def test_tell_cleans_up_after_a_cancelled_call() -> None:
    """The pattern of the workers: a cancelled caller tells the engine to forget, and that runs after the command that added."""
    async with running() as r:
        r.runner.let(0)
        await r.loop.call(lambda engine: engine.add(make_seq("other", [9] * 4, max_tokens=3)))
        await r.runner.inside()
        call = asyncio.create_task(r.loop.call(lambda engine: engine.add(make_seq("s", [1, 2, 3]))))
        await asyncio.sleep(0)
        call.cancel()
        r.loop.tell(lambda engine: engine.abort("s"))
        r.runner.let(math.inf)
        assert (await asyncio.gather(call, return_exceptions=True))[0].__class__ is asyncio.CancelledError
        assert "s" not in await r.loop.call(lambda engine: dict(engine.sequences))
        assert not r.reported.tokens("s")


async def test_a_cancelled_callers_command_still_runs() -> None:
    async with running() as r:
        r.runner.let(0)
        await r.loop.call(lambda engine: engine.add(make_seq("other", [9] * 4, max_tokens=3)))
        await r.runner.inside()
        call = asyncio.create_task(r.loop.call(lambda engine: engine.add(make_seq("s", [1, 2, 3]))))
        await asyncio.sleep(0)
        call.cancel()
        r.runner.let(math.inf)
        await until(lambda: len(r.reported.tokens("s")) == 8)
        assert call.cancelled() and not r.reported.failures


def test_a_long_run_of_one_kind_becomes_several_events() -> None:
    """A cache that is cleared loses all its keys at once, and a reader applies an event in one piece."""
    keys = [i.to_bytes(16, "big") for i in range(2 * MAX_EVENT_KEYS + 1)]
    events = cache_events([CacheChange(True, keys[0]), *(CacheChange(False, key) for key in keys)], 4)
    assert [(event.sequence, event.kind, len(event.keys)) for event in events] == [
        (5, "stored", 1), (6, "removed", MAX_EVENT_KEYS), (7, "removed", MAX_EVENT_KEYS), (8, "removed", 1),
    ]  # fmt: skip
    assert [key for event in events[1:] for key in event.keys] == keys


async def snapshot(loop: EngineLoop) -> tuple[int, list[bytes]]:
    """Of an engine without tiers."""
    sequence, held = await loop.snapshot()
    assert list(held) == [DEVICE]
    return sequence, held[DEVICE]


async def test_replayed_cache_events_reproduce_the_cache() -> None:
    """Events are numbered from 1 without gaps; the events up to the number of any snapshot give exactly its keys."""
    rng = random.Random(1)
    async with running(blocks=24) as r:
        prefixes = [[rng.randrange(256) for _ in range(12)] for _ in range(3)]
        snapshots: list[tuple[int, list[bytes]]] = []
        for i in range(60):
            tokens = rng.choice(prefixes) + [rng.randrange(256) for _ in range(rng.randrange(1, 20))]
            await r.loop.call(adding(make_seq(f"s{i}", tokens, max_tokens=6)))
            if rng.random() < 0.5:
                await asyncio.sleep(0.001)
            if rng.random() < 0.3:
                r.loop.tell(aborting(f"s{i}"))
            snapshots.append(await snapshot(r.loop))
            assert len(r.reported.events) >= snapshots[-1][0], "the events up to a snapshot must arrive before it"
        await until(lambda: not r.engine.sequences)
        snapshots.append(await snapshot(r.loop))
        assert [event.sequence for event in r.reported.events] == list(range(1, len(r.reported.events) + 1))
        assert {event.kind for event in r.reported.events} == {"stored", "removed"}
        assert all(event.keys for event in r.reported.events)
        for sequence, keys in snapshots:
            assert r.reported.replayed(sequence) == set(keys) and len(keys) == len(set(keys))
        assert len({len(keys) for _, keys in snapshots}) > 3 and snapshots[-1][0] == len(r.reported.events)
        assert await r.loop.call(lambda engine: set(engine.pool.sealed_keys())) == r.reported.replayed()


async def test_cache_changes_by_a_command_are_numbered_before_the_next_command() -> None:
    """A fetched sequence is adopted, and a snapshot is taken before any step."""
    async with running() as r:
        r.runner.let(0)
        await r.loop.call(lambda engine: engine.add(make_seq("other", [9] * 3, max_tokens=3)))
        await r.runner.inside()
        seq = make_seq("fetched", list(range(18)))

        def fetch(engine: Engine) -> None:
            if engine.reserve(seq):
                engine.arrive(seq, 17)
                engine.adopt(seq)

        r.loop.tell(fetch)
        looking = asyncio.create_task(snapshot(r.loop))
        await asyncio.sleep(0)
        r.runner.let(math.inf)
        sequence, keys = await looking
        assert len(keys) == 4 and r.reported.replayed(sequence) == set(keys)


async def test_cache_changes_that_are_told_in_a_run_are_published_together() -> None:
    """What tiers tell, while a step runs. Negative control: a command in between that somebody waits for."""
    async with running() as r:
        keys = [bytes([number]) * 16 for number in range(4)]
        r.runner.let(0)
        await r.loop.call(adding(make_seq("other", [9] * 3, max_tokens=3)))
        await r.runner.inside()
        for i, key in enumerate(keys):
            r.loop.tell(lambda engine, key=key: engine.pool.note([CacheChange(True, key, HOST)]))  # type: ignore[misc]
            if i == 2:
                looking = asyncio.create_task(r.loop.snapshot())
                await asyncio.sleep(0)
        r.runner.let(math.inf)
        await until(lambda: not r.engine.sequences)
        found = [event for event in r.reported.events if event.medium == HOST]
        assert [event.keys for event in found] == [tuple(keys[:3]), tuple(keys[3:])] and (await looking)[0] == found[0].sequence


async def test_a_missing_event_would_be_detected() -> None:
    """Negative control of the replay."""
    async with running(blocks=16) as r:
        for i in range(6):
            await r.loop.call(adding(make_seq(f"s{i}", [i] * 20)))
            await until(lambda: not r.engine.sequences)
        _, keys = await snapshot(r.loop)
        del r.reported.events[len(r.reported.events) // 2]
        try:
            assert r.reported.replayed() != set(keys)
        except AssertionError as error:
            assert str(error).startswith(("stored twice", "removed but never stored"))


async def test_a_step_that_raises_is_reported_once_and_nothing_runs_after_it() -> None:
    async with running() as r:
        r.runner.let(2)
        await r.loop.call(lambda engine: engine.add(make_seq("s", [1, 2, 3])))
        await until(lambda: len(r.reported.outputs) == 2)
        r.runner.error = RuntimeError("the device is gone")
        r.runner.let(math.inf)
        await until(lambda: r.reported.failures)
        steps, outputs = r.runner.steps, len(r.reported.outputs)
        r.loop.tell(lambda engine: engine.abort("s"))
        await asyncio.sleep(0.05)
        assert r.reported.failures == [r.runner.error]
        assert (r.runner.steps, len(r.reported.outputs)) == (steps, outputs)
        assert "s" in r.engine.sequences, "its memory is in doubt, so nothing may clean up in it either"


async def test_a_cleanup_that_raises_is_reported_as_a_failure() -> None:
    async with running() as r:
        r.loop.tell(lambda engine: engine.release([3]))
        await until(lambda: r.reported.failures)
        assert "no owner" in str(r.reported.failures[0])


@pytest.mark.parametrize("how", ["failure", "close"])
async def test_no_command_waits_for_a_stopped_engine(how: str) -> None:
    async with running() as r:
        r.runner.let(0)
        await r.loop.call(lambda engine: engine.add(make_seq("s", [1, 2, 3], max_tokens=200)))
        await r.runner.inside()
        if how == "failure":
            r.runner.error = RuntimeError("the device is gone")
        closing = asyncio.create_task(r.loop.close() if how == "close" else asyncio.sleep(0))
        before = asyncio.create_task(r.loop.call(lambda engine: engine.pool.num_blocks))
        await asyncio.sleep(0.01)
        r.runner.let(math.inf)
        with pytest.raises(EngineStopped):
            await asyncio.wait_for(before, WITHIN_S)
        await closing
        with pytest.raises(EngineStopped):
            await asyncio.wait_for(r.loop.call(lambda engine: engine.pool.num_blocks), WITHIN_S)
        with pytest.raises(EngineStopped):
            await asyncio.wait_for(r.loop.snapshot(), WITHIN_S)


async def test_close_while_busy_finishes_after_the_step_in_flight() -> None:
    async with running() as r:
        r.runner.let(0)
        seqs = [make_seq(f"s{i}", [i] * 30, max_tokens=500) for i in range(3)]
        for seq in seqs:
            r.loop.tell(adding(seq))
        await r.runner.inside()
        closing = asyncio.create_task(r.loop.close())
        await asyncio.sleep(0.01)
        assert not closing.done(), "closing must not interrupt a step"
        r.runner.let(math.inf)
        await asyncio.wait_for(closing, WITHIN_S)
        steps, outputs = r.runner.steps, len(r.reported.outputs)
        await asyncio.sleep(0.02)
        assert (r.runner.steps, len(r.reported.outputs)) == (steps, outputs) and steps == 1
        assert not r.reported.failures
        await r.loop.close()  # closing again does nothing


async def test_a_sequence_that_does_not_fit_waits_for_a_release() -> None:
    """Nothing runs and nothing fits: the loop must notice the command that makes room."""
    async with running(blocks=8) as r:
        held = make_seq("held", [1] * 20, max_tokens=2, hold=True)
        await r.loop.call(lambda engine: engine.add(held))
        await until(lambda: held.state is State.HELD)
        await r.loop.call(lambda engine: engine.add(make_seq("s", [2] * 20, max_tokens=2)))
        await asyncio.sleep(0.1)
        assert not r.reported.tokens("s")
        await r.loop.call(lambda engine: engine.abort("held"))
        await until(lambda: len(r.reported.tokens("s")) == 2)
        assert r.reported.tokens("s") == naive([2] * 20, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
