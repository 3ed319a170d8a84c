"""The dispatcher puts bad workers aside, takes them back, and does not multiply what a sick pool gets. Time is a clock that the workers
move. The negative controls are the same worlds with `router.outlier_share` or `router.retry_budget` at 0."""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from fake_workers import MODEL, TOKENIZER, FakeWorkers, Fault, answers, record, tied

from baton.cluster.config_router import RouterConfig
from baton.cluster.errors import BatonError, Reason
from baton.cluster.handoff import Handoff
from baton.cluster.records import WorkerRecord
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.toy import naive
from router.conduct import Sent
from router.dispatch import Dispatcher
from router.predictions import LEARNED
from router.request import Request, Stopwatch, Trace
from router.view import ClusterView
from router.workers import Adopted, Died, FirstToken

PROMPT = list(range(1, 65))
PARAMS = SamplingParams(max_tokens=8, temperature=1.0, seed=7, ignore_eos=True)
CONFIG = RouterConfig(bypass_tokens=8, recover_wait_s=0.2, retry_budget=0, outlier_s=300.0)
OFF = CONFIG.model_copy(update={"outlier_share": 0.0})
BROKEN = BatonError(Reason.INTERNAL, "the engine failed")


@dataclass
class World:
    names: str
    config: RouterConfig = CONFIG
    now: float = 1000.0
    token_s: dict[str, float] = field(default_factory=dict)  # worker → what its tokens take; of a prefill, all of its prompt's

    def __post_init__(self) -> None:
        self.view = ClusterView({MODEL: TOKENIZER})
        self.view.update([record(name) for name in self.names.split()], 0.0)
        self.workers = SlowWorkers(self)
        self.dispatcher = Dispatcher(self.view.models[MODEL], self.workers, self.config, lambda: self.now)
        self.numbers = itertools.count()

    def request(self, prompt: list[int] = PROMPT) -> Request:
        number = next(self.numbers)
        trace = Trace(Stopwatch(lambda: self.now))
        return Request(tied(number, number), [number % 200, *prompt], 1 + len(prompt), PARAMS, "", self.now + 1000.0, trace)

    async def serve(self, request: Request | None = None) -> Request:
        request = request or self.request()
        async for _ in self.dispatcher.generate(request):
            pass
        assert request.output == naive(request.tokens[: request.prompt_len], request.params)
        return request

    async def serve_all(self, count: int) -> list[Request]:
        """One after the other, and all of them well; a second passes between two."""
        served = []
        for _ in range(count):
            served.append(await self.serve())
            self.now += 1.0
        return served

    def calls(self, name: str) -> int:
        return sum(call.worker == name for call in self.workers.calls)

    def states(self) -> dict[str, str]:
        return {worker.name: self.view.state(worker.name) for worker in self.view.members.records()}

    def look(self) -> None:
        """A round of probes."""
        for worker in self.view.members.records():
            answers(self.view, worker.name)


class SlowWorkers(FakeWorkers):
    """`broken[name]` says whether the worker's next call fails."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self.broken: dict[str, Callable[[], bool]] = {}
        self.wrong: set[str] = set()  # holders whose KV has wrong digests
        self.tick = lambda stage: None

    def _fault(self, worker: WorkerRecord) -> Fault | None:
        takes = self._world.token_s.get(worker.name, 0.0)

        def pass_time(stage: str) -> None:
            self._world.now += takes

        self.tick = pass_time  # requests are served one after the other
        if worker.name in self.broken and self.broken[worker.name]():
            return Fault(BROKEN, None if worker.name.startswith("p") else 2)
        return super()._fault(worker)

    async def decode(self, worker: WorkerRecord, request: Request, handle: bytes, timeout_s: float, first=None, forks=()):  # type: ignore[no-untyped-def]
        holder = self.leases[handle][0] if handle in self.leases else ""
        async for event in super().decode(worker, request, handle, timeout_s, first, forks):
            if isinstance(event, Adopted) and holder in self.wrong:
                event = Adopted(Handoff(failure=Reason.DIGEST_MISMATCH.name))
            yield event


def one_in_three() -> Callable[[], bool]:
    numbers = itertools.count(1)
    return lambda: next(numbers) % 3 == 0


# A worker that fails one request in three


@pytest.mark.parametrize("bad", ["p1", "d1"])
async def test_a_worker_that_fails_one_request_in_three_is_put_aside_and_comes_back_when_it_behaves(bad: str) -> None:
    world = World("p0 p1 d0 d1")
    world.workers.broken[bad] = one_in_three()
    served = await world.serve_all(80)
    assert world.states() == {**dict.fromkeys(["p0", "p1", "d0", "d1"], "ready"), bad: "ejected"}
    assert "calls failed" in world.view.members.ejected(bad) and world.dispatcher.conduct.ejections == {"errors": 1}
    assert sum(request.trace.retries for request in served) < 10 and served[-1].trace.put_aside == {bad}
    before = world.calls(bad)
    world.look()
    await world.serve_all(10)
    assert world.calls(bad) == before
    del world.workers.broken[bad]
    world.now += world.config.outlier_s
    answers(world.view, "p0")  # the term is over
    assert world.states()[bad] == "ejected"
    answers(world.view, bad)  # and it has answered since
    assert world.states()[bad] == "ready"
    assert not (await world.serve_all(80))[-1].trace.put_aside and world.calls(bad) > before + 20
    assert world.states()[bad] == "ready"


@pytest.mark.parametrize("bad", ["p1", "d1"])
async def test_without_ejection_it_keeps_getting_requests(bad: str) -> None:
    """Negative control."""
    world = World("p0 p1 d0 d1", OFF)
    world.workers.broken[bad] = one_in_three()
    served = await world.serve_all(80)
    assert set(world.states().values()) == {"ready"} and world.calls(bad) >= 40 and sum(request.trace.retries for request in served) > 12


async def test_the_calls_that_one_worker_ends_at_once_do_not_put_it_aside_if_it_only_lost_its_connection() -> None:
    world = World("d0 d1")
    world.workers.alive["d0"] = 0.0
    await world.serve_all(20)
    world.workers.faults["d0"].extend([Fault(Died("reset"), 3)] * 50)
    await asyncio.gather(*(world.serve() for _ in range(50)))
    answers(world.view, "d0")
    assert world.states() == {"d0": "ready", "d1": "ready"}


async def test_no_more_than_the_share_is_put_aside_and_never_all() -> None:
    world = World("d0 d1 d2 d3 d4", CONFIG.model_copy(update={"outlier_share": 0.3}))
    for bad in ("d0", "d1"):
        world.workers.broken[bad] = one_in_three()
    await world.serve_all(200)
    assert sorted(world.states().values()) == ["ejected", "ready", "ready", "ready", "ready"]
    for name, state in world.states().items():
        if state == "ready":
            world.view.members.mark_down(name, 1)
    world.workers.broken.clear()
    assert world.states()[(await world.serve()).trace.decode_worker] == "ejected", "no other was left"


async def test_an_only_worker_is_never_put_aside() -> None:
    world = World("p0 d0", CONFIG.model_copy(update={"outlier_share": 0.9, "max_retries": 16}))
    world.workers.broken["d0"] = world.workers.broken["p0"] = one_in_three()
    await world.serve_all(80)
    assert world.states() == {"p0": "ready", "d0": "ready"}


async def test_who_waits_for_room_is_called_when_a_worker_is_taken_back() -> None:
    world = World("d0 d1")
    world.workers.broken["d1"] = one_in_three()
    await world.serve_all(80)
    assert world.states()["d1"] == "ejected"
    world.workers.broken.clear()
    full = replace(record("d0").load, credit_tokens=0, waiting=1)
    world.view.members.note_answer("d0", 1, "ready", full, 0)
    waiting = asyncio.create_task(world.serve())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not waiting.done()
    world.now += world.config.outlier_s
    world.view.members.note_answer("d0", 1, "ready", full, 0)
    answers(world.view, "d1")
    assert (await waiting).trace.decode_worker == "d1"


async def test_a_worker_may_leave_while_it_is_called() -> None:
    """What it did no longer counts, and does not disturb the request."""
    world = World("p0 p1 d0 d1")
    await world.serve_all(4)

    def leave() -> None:
        left = [record("p1"), record("d1"), record("d2")]
        world.view.update(left, 1.0)
        for name in ("p0", "d0"):
            world.view.members.note_silence(name, 1)
        world.view.update(left, 10.0)

    stream = world.dispatcher.generate(request := world.request())
    await anext(stream)
    await anext(stream)
    assert (request.trace.prefill_worker, request.trace.decode_worker) == ("p0", "d0")
    leave()
    async for _ in stream:
        pass
    assert world.view.members.find("p0") is None and request.finish == "length"
    await world.serve_all(8)


# A worker whose KV is damaged


@pytest.mark.parametrize(("config", "state"), [(CONFIG, "ejected"), (OFF, "ready")])
async def test_a_worker_whose_kv_has_wrong_digests_is_put_aside(config: RouterConfig, state: str) -> None:
    world = World("p0 p1 d0 d1 d2", config)
    world.workers.wrong.add("p1")
    await world.serve_all(40)
    assert world.states() == {**dict.fromkeys(["p0", "d0", "d1", "d2"], "ready"), "p1": state}
    assert world.dispatcher.conduct.ejections == ({"digests": 1} if config is CONFIG else {})


async def test_so_is_one_whose_readers_fail_the_call() -> None:
    """`kv.on_failure: fail`. The call of the decode worker fails, and the holder is to blame."""
    world = World("p0 p1 d0 d1 d2")
    decode = world.workers.decode

    async def fails(worker: WorkerRecord, request: Request, handle: bytes, timeout_s: float, first=None, forks=()):  # type: ignore[no-untyped-def]
        async for event in decode(worker, request, handle, timeout_s, first):
            if isinstance(event, Adopted) and event.handoff.failure:
                raise BatonError(Reason.DIGEST_MISMATCH, "block 3")
            yield event

    world.workers.decode = fails  # type: ignore[method-assign]
    world.workers.wrong.add("p1")
    await world.serve_all(40)
    assert [name for name, state in world.states().items() if state == "ejected"] == ["p1"]


# A worker that is ten times slower


@pytest.mark.parametrize("names", ["p0 p1 d0 d1", "p0 p1 p2 d0 d1 d2"])
@pytest.mark.parametrize("bad", ["p1", "d1"])
async def test_a_worker_that_is_ten_times_slower_is_put_aside(names: str, bad: str) -> None:
    pace = {name: (2.0 if name[0] == "p" else 0.05) * (10 if name == bad else 1) for name in names.split()}
    world, careless = World(names, token_s=pace), World(names, OFF, token_s=pace)
    await world.serve_all(40)
    await careless.serve_all(40)
    assert world.states() == {**dict.fromkeys(names.split(), "ready"), bad: "ejected"}
    assert "ms a token" in world.view.members.ejected(bad) and world.dispatcher.conduct.ejections == {"pace": 1}
    assert world.calls(bad) < careless.calls(bad) and set(careless.states().values()) == {"ready"}


async def test_a_slow_reader_makes_no_worker_slow() -> None:
    """Every request that d1 serves has a client that reads ten times as slowly as d1 generates."""
    world = World("d0 d1", token_s={"d0": 0.05, "d1": 0.05})
    for _ in range(40):
        async for _tokens in world.dispatcher.generate(request := world.request()):
            world.now += 0.5 if request.trace.decode_worker == "d1" else 0.0
        world.now += 1.0
    assert set(world.states().values()) == {"ready"}


# The budget of all retries


async def refusal(world: World, request: Request) -> BatonError:
    with pytest.raises(BatonError) as caught:
        async for _ in world.dispatcher.generate(request):
            pass
    return caught.value


@pytest.mark.parametrize("budget", [20, 0], ids=["a budget", "none"])
async def test_a_sick_pool_is_not_multiplied(budget: int) -> None:
    """Every call fails. Negative control: without a budget each request makes four."""
    world = World("d0 d1 d2 d3", CONFIG.model_copy(update={"retry_budget": budget}))
    for name in world.names.split():
        world.workers.faults[name].extend([Fault(BROKEN)] * 1000)
    errors = []
    for _ in range(50):
        request = world.request()
        errors.append(await refusal(world, request))
        world.now += 1.0
    assert {error.reason for error in errors} == {Reason.RETRIES_SPENT}
    conduct = world.dispatcher.conduct
    if not budget:
        assert len(world.workers.calls) == 50 * 4 and not conduct.retries_refused
        return
    assert len(world.workers.calls) < 50 + budget and conduct.budget.left < 0.5 and conduct.retries_refused > 40
    assert "router.retry_budget" in errors[-1].message and "the engine failed" in errors[-1].message and request.trace.retry_refused


async def test_streams_use_the_lower_half_of_the_budget() -> None:
    world = World("d0 d1", CONFIG.model_copy(update={"retry_budget": 10}))
    for number in range(6):
        world.dispatcher.conduct.budget.note_failure(f"x{number}", world.now)
    world.workers.faults["d0"].append(Fault(BROKEN, 3))
    assert (await world.serve()).trace.retries == 1
    world.workers.faults["d1"].append(Fault(BROKEN))
    error = await refusal(world, world.request())
    assert error.reason is Reason.RETRIES_SPENT and error.metadata == {"tokens_emitted": "0"}


@pytest.mark.parametrize("spent", [False, True])
async def test_the_death_of_a_worker_with_many_streams_costs_none_of_them(spent: bool) -> None:
    """Whatever is left of the budget; and the death takes one token of it, so that other requests are retried as before."""
    world = World("d0 d1", CONFIG.model_copy(update={"retry_budget": 10}))
    budget = world.dispatcher.conduct.budget
    for number in range(20 if spent else 0):
        budget.note_failure(f"x{number}", world.now)
    before = budget.left
    world.workers.faults["d0"].extend([Fault(Died("reset"), 3)] * 100)
    served = await asyncio.gather(*(world.serve() for _ in range(100)))
    assert sum(request.trace.retries for request in served) > 5
    assert budget.left >= before - 0.1


async def test_the_death_of_a_worker_where_many_prompts_wait_costs_none_of_them() -> None:
    world = World("p0 p1 d0 d1", CONFIG.model_copy(update={"retry_budget": 10}))
    world.workers.faults["p0"].extend([Fault(Died("reset"))] * 100)
    served = await asyncio.gather(*(world.serve() for _ in range(100)))
    assert sum(request.trace.retries for request in served) > 5


async def test_streams_that_their_readers_leave_count_as_served() -> None:
    """Most outputs may end with a stop string, which only the router knows."""
    world = World("d0", CONFIG.model_copy(update={"retry_budget": 10}))
    budget = world.dispatcher.conduct.budget
    for number in range(20):
        budget.note_failure(f"x{number}", world.now)
    for _ in range(30):
        stream = world.dispatcher.generate(world.request())
        await anext(stream)
        await stream.aclose()
    assert budget.left == pytest.approx(0.3)
    left = asyncio.create_task(world.serve())
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    assert budget.left == pytest.approx(0.3), "before its first token nobody knows"


async def test_saturation_keeps_its_reason() -> None:
    world = World("d0 d1", CONFIG.model_copy(update={"retry_budget": 2}))
    world.workers.faults["d0"].append(Fault(BatonError(Reason.SATURATED, "full")))
    error = await refusal(world, replace(world.request(), tokens=PROMPT, prompt_len=len(PROMPT)))
    assert error.reason is Reason.SATURATED and "router.retry_budget" in error.message


@pytest.mark.parametrize("pace", [1, 5])
async def test_first_tokens_are_compared_with_what_prompts_of_their_cost_took(pace: int) -> None:
    world = World("prefill-0 decode-0")
    world.token_s = {"prefill-0": 0.65}
    learning = [await world.serve() for _ in range(LEARNED)]
    assert all(request.trace.predictions == [] for request in learning), "too little is known"
    world.token_s = {"prefill-0": 0.65 * pace}
    [compared] = (await world.serve()).trace.predictions
    assert compared.of == "first token" and compared.predicted == pytest.approx(0.65) and compared.came == pytest.approx(0.65 * pace)


async def test_a_new_process_of_a_name_is_learned_anew_and_those_that_left_are_forgotten() -> None:
    world = World("prefill-0 decode-0")
    world.token_s = {"prefill-0": 0.65}
    for _ in range(LEARNED):
        await world.serve()
    other = replace(record("prefill-0"), incarnation=2)
    world.view.update([other, record("decode-0")], 1.0)
    assert (await world.serve()).trace.predictions == []
    assert list(world.dispatcher.conduct._lines) == [("prefill-0", 2)]


async def test_a_prompt_that_computes_more_than_was_promised_says_nothing_of_its_workers_pace() -> None:
    """That its promise was wrong is told of the cached tokens."""
    world, lines = World("prefill-0 decode-0"), []
    world.token_s = {"prefill-0": 0.65}
    for promised in (False, True):
        conduct, request = world.dispatcher.conduct, world.request()
        sent = Sent(65.0, len(request.tokens) - 1 if promised else len(request.tokens), None)
        conduct.prefilled(record("prefill-0"), request, FirstToken(request.tokens[0], b"", "", 0, 0.0, 0.0), 0.65, sent)  # type: ignore[arg-type]
        lines.append(conduct._lines[("prefill-0", 1)].prompts)
    assert lines == [1, 1]
