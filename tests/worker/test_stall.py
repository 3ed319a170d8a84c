"""When an engine counts as stalled: never because it is slow, always when its thread waits for something that does not come."""

import asyncio
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

import pytest

from baton.engine.core import loop as loop_module
from baton.engine.core.block_key import root_key
from baton.engine.core.contract import Listener
from baton.engine.core.engine import Engine
from baton.engine.core.kvcache import KvPool
from baton.engine.core.limits import Limits
from baton.engine.core.loop import EngineLoop
from baton.engine.core.protocol import Chunk, Tokens
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.core.toy import ToyRunner
from baton.worker.stall import Activity, Stall

LONGEST_S = 60.0


def looks(stall: Stall, *seen: tuple[float, int, float | None, float | None]) -> list[float]:
    return [round(stall.look(now, Activity(laps, busy, cpu)), 3) for now, laps, busy, cpu in seen]


def test_an_idle_engine_is_not_stalled() -> None:
    assert looks(Stall(LONGEST_S), (0.0, 5, None, 1.0), (100.0, 5, None, 1.0)) == [0.0, 0.0]


def test_a_thread_that_waits_inside_a_step_is_stalled() -> None:
    stall = Stall(LONGEST_S)
    assert looks(stall, (1.0, 5, 0.9, 1.0), (2.0, 5, 0.9, 1.001), (3.0, 5, 0.9, 1.002)) == [0.0, 1.0, 2.0]
    assert looks(stall, (3.5, 6, 3.4, 1.003), (4.0, 6, 3.4, 1.003)) == [0.0, 0.5], "each step counts from zero"
    assert looks(stall, (4.5, 6, None, 1.003)) == [0.0]


@pytest.mark.parametrize("share", [1.0, 0.2, 0.05])
def test_a_long_computing_step_is_not_stalled_however_little_cpu_it_gets(share: float) -> None:
    stall = Stall(LONGEST_S)
    assert all(stall.look(now / 4, Activity(5, 0.0, now / 4 * share)) == 0.0 for now in range(1, 200))


def test_a_step_that_computes_for_too_long_is_stalled() -> None:
    stall = Stall(LONGEST_S)
    assert looks(stall, (59.0, 5, 0.0, 59.0), (61.0, 5, 0.0, 61.0)) == [0.0, 61.0]


def test_without_a_thread_clock_only_the_step_limit_applies() -> None:
    assert looks(Stall(LONGEST_S), (1.0, 5, 0.0, None), (30.0, 5, 0.0, None), (61.0, 5, 0.0, None)) == [0.0, 0.0, 61.0]


def test_time_before_the_step_began_does_not_count() -> None:
    """A step has just begun after a long time without a look."""
    stall = Stall(LONGEST_S)
    assert looks(stall, (0.0, 5, None, 1.0), (100.0, 5, 99.9, 1.0)) == [0.0, 0.1]


class Runner(ToyRunner):
    """Its steps take some time, which they spend computing or waiting."""

    def __init__(self, how: Callable[[float], None], on_device: bool = False) -> None:
        super().__init__({"vocab_size": 257, "eos_token_id": 256, "max_position_embeddings": 4096, "kv_width": 8}, "toy", 4)
        self.how = how
        self.on_device = on_device

    def run(self, batch: Seq[Chunk]) -> list[Tokens]:
        self.how(1.0)
        return super().run(batch)


def compute(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(1000))


@pytest.mark.parametrize(
    ("how", "on_device", "stalls"),
    [(time.sleep, False, True), (compute, False, False), (compute, True, True)],
    ids=["waits", "computes", "spins for a device"],
)
async def test_a_real_engine_thread_is_stalled_only_when_it_waits(how: Callable[[float], None], on_device: bool, stalls: bool) -> None:
    """Drivers spin where they wait: a thread that waits for a GPU that hangs uses a whole core."""
    runner = Runner(how, on_device)
    runner.attach(KvPool(runner.layout, 64))
    loop = EngineLoop(Engine(runner, Limits(8, 64), 256), Listener(lambda outputs: None, lambda events: None, lambda error: None))
    loop.start()
    stall, seen = Stall(LONGEST_S), []
    await loop.call(lambda engine: engine.add(Sequence("s", [1, 2, 3], 3, SamplingParams(max_tokens=1), root_key("toy"))))
    for _ in range(20):
        seen.append(stall.look(time.monotonic(), Activity(*loop.activity())))
        await asyncio.sleep(0.04)
    assert (max(seen) > 0.5) is stalls
    if not stalls:
        assert max(seen) < 0.3
    await loop.close()


async def test_a_hung_thread_does_not_delay_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "JOIN_S", 0.1)
    runner, release = Runner(lambda seconds: None), threading.Event()
    runner.how = lambda seconds: assert_set(release)
    runner.attach(KvPool(runner.layout, 64))
    loop = EngineLoop(Engine(runner, Limits(8, 64), 256), Listener(lambda outputs: None, lambda events: None, lambda error: None))
    loop.start()
    await loop.call(lambda engine: engine.add(Sequence("s", [1, 2, 3], 3, SamplingParams(max_tokens=1), root_key("toy"))))
    async with asyncio.timeout(30):
        await loop.close()
    release.set()


def assert_set(event: threading.Event) -> None:
    assert event.wait(20)
