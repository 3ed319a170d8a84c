"""Requests that wait in the router have their KV loaded meanwhile, and one that leaves has nothing loaded any more."""

import asyncio
from dataclasses import replace

import pytest
from fake_workers import MODEL, TOKENIZER, FakeWorkers, record

from baton.clock import loop_time
from baton.cluster.config_router import RouterConfig
from baton.cluster.records import BlockEvent, Load, WorkerRecord
from baton.engine.core.block_key import HOST, extend_keys, root_key
from baton.engine.core.sampling import SamplingParams
from router.dispatch import Dispatcher
from router.hints import HINTS, HINTS_A_WORKER, Hints
from router.request import Request, Stopwatch, Trace
from router.view import ClusterView

PROMPT = list(range(200))
KEYS: list[bytes] = []
extend_keys(KEYS, root_key("model", ""), PROMPT, 16)
PARAMS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
FULL = Load(credit_tokens=0, waiting=1)

pytestmark = pytest.mark.virtual_time


async def until(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


class World:
    """A decode worker without room, and prefill workers, of which p1 keeps a prompt in host memory."""

    def __init__(self, brings: bool = True) -> None:
        self.workers, self.view = FakeWorkers(), ClusterView({MODEL: TOKENIZER})
        self.records = [record("p0", brings=brings), record("p1", brings=brings), record("d0", load=FULL)]
        self.view.update(self.records, 0.0)
        self.view.apply(BlockEvent("p1", 1, 1, "stored", tuple(KEYS[:10]), HOST))
        config = RouterConfig(bypass_tokens=8, load_tokens=16, queue_timeout_s=20.0)
        self.dispatcher = Dispatcher(self.view.models[MODEL], self.workers, config)

    @property
    def hints(self) -> Hints:
        return self.dispatcher._choosing._hints

    def serve(self, name: str = "a") -> "asyncio.Task[list[int]]":
        request = Request(name, list(PROMPT), len(PROMPT), PARAMS, "", loop_time() + 20, Trace(Stopwatch(loop_time)))

        async def serve() -> list[int]:
            return [token.id async for tokens in self.dispatcher.generate(request) for token in tokens]

        return asyncio.create_task(serve())

    def make_room(self) -> None:
        self.view.update([*self.records[:2], record("d0")], 1.0)


async def test_a_request_that_waits_is_hinted_once_and_then_goes_there() -> None:
    world = World()
    tasks = [world.serve("a"), world.serve("b")]
    await until(lambda: len(world.workers.hints) == 2)  # also the one that may not look yet
    assert world.workers.hints == [("p1", KEYS[:10])] * 2
    world.make_room()
    answers = await asyncio.gather(*tasks)
    assert all(len(answer) == 4 for answer in answers) and len(world.workers.hints) == 2
    assert next(call.worker for call in world.workers.calls if call.kind == "prefill") == "p1"
    world.workers.hint_ends.set()
    await until(lambda: not len(world.hints))


async def test_who_does_not_wait_hints_nothing() -> None:
    """Negative control."""
    world = World()
    world.make_room()
    assert len(await world.serve()) == 4 and not world.workers.hints


async def test_an_older_worker_is_told_nothing() -> None:
    world = World(brings=False)
    task = world.serve()
    await asyncio.sleep(0.05)
    world.make_room()
    assert len(await task) == 4 and not world.workers.hints


async def test_the_hint_of_a_request_that_leaves_is_cancelled() -> None:
    world = World()
    task = world.serve()
    await until(lambda: world.workers.hints)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: world.workers.unhinted == ["p1"] and not len(world.hints))
    assert loop_time() < 1, "not at the end of its time"


async def test_the_hint_of_a_request_that_goes_elsewhere_is_cancelled() -> None:
    world = World()
    task = world.serve()
    await until(lambda: world.workers.hints)
    world.view.update([world.records[0], replace(world.records[1], state="draining"), record("d0")], 1.0)
    assert len(await task) == 4
    await until(lambda: world.workers.unhinted == ["p1"] and not len(world.hints))
    assert loop_time() < 1, "not at the end of its time"


@pytest.mark.parametrize(("workers", "most"), [(1, HINTS_A_WORKER), (2 * HINTS, HINTS)])
async def test_hints_are_bounded_and_end_in_time(workers: int, most: int) -> None:
    told: list[str] = []

    async def send(worker: WorkerRecord, keys: object, within_s: float) -> int:
        told.append(worker.name)
        await asyncio.sleep(60)
        return 0

    hints = Hints(send)
    for request in range(3 * HINTS):
        hints.tell(request, record(f"p{request % workers}", brings=True), KEYS, 0.2)
        hints.tell(request, record(f"p{request % workers}", brings=True), KEYS, 0.2)
    await until(lambda: len(told) == most == len(hints))
    await until(lambda: not len(hints))
    assert loop_time() == pytest.approx(0.2, abs=0.01)
