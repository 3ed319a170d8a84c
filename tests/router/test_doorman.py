"""What has no chance is turned away before it is read, at both doors, and only that."""

import asyncio
import json
import random
from typing import Any

import grpc
import pytest
from fake_workers import MODEL
from grpc_door import serving
from http_door import CHAT, HELLO, House, Script, settled, toy_tokenizer

from baton.cluster import semconv
from baton.cluster.config_router import RouterConfig
from baton.cluster.errors import DEGRADED, Reason
from baton.cluster.measures import read_measures
from baton.cluster.rpc import to_error
from baton.v1 import generation_pb2 as pb
from router.admission import Admission, Due
from router.degradation import Degradation, Rules
from router.doorman import Arrival
from router.gate import Gate
from router.tokenizer import Tokenizer
from router.validate import Ask, AskSampling
from router.view import ClusterView

FULL = RouterConfig(max_inflight=1, max_queue=0)
WRONG: dict[str, Any] = {"messages": "no list"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return toy_tokenizer(tmp_path_factory.mktemp("toy"))


async def full(tokenizer: Tokenizer, config: RouterConfig = FULL) -> tuple[House, "asyncio.Task[Any]"]:
    """A house with one place, which is taken."""
    house = House(tokenizer, Script(gate=asyncio.Event()), config)
    holder = asyncio.create_task(house.post(CHAT))
    await settled(lambda: len(house.script.begun) == 1)
    return house, holder


async def emptied(house: House, holder: "asyncio.Task[Any]") -> None:
    assert house.script.gate is not None
    house.script.gate.set()
    assert (await holder).status == 200
    house.check()


async def test_a_body_that_has_no_chance_is_not_read(tokenizer: Tokenizer) -> None:
    house, holder = await full(tokenizer)
    for body in (WRONG, b"{", HELLO):
        answer = await house.post(CHAT, body)
        assert (answer.status, answer.error["code"]) == (429, "overloaded") and answer.headers["retry-after"] == "1"
    [record, *_] = house.journal.last(3)
    assert (record.outcome, record.reason, record.request_id) == ("refused", "SATURATED", answer.headers["x-request-id"])
    assert house.journal.totals.outcomes == {"refused": 3}
    await emptied(house, holder)
    assert (await house.post(CHAT, WRONG)).status == 400, "negative control: with a place, it is read"


@pytest.mark.parametrize("name", ["priority", "pr\\u0069ority"])
async def test_a_body_that_may_have_a_priority_is_read(tokenizer: Tokenizer, name: str) -> None:
    """A better one may wait, or go before others."""
    house, holder = await full(tokenizer)
    body = json.dumps({**WRONG, "priority": -1}).replace("priority", name).encode()
    answer = await house.post(CHAT, body)
    assert answer.status == 400 and answer.error["param"] == "messages"
    await emptied(house, holder)


async def test_over_grpc_what_has_no_chance_is_not_read_unless_a_stream_goes_on(tokenizer: Tokenizer) -> None:
    house, holder = await full(tokenizer)
    async with serving(house, None) as stub:
        for ask, reason in (
            (pb.GenerateRequest(text="a", model="another", request_id="mine"), Reason.SATURATED),
            (pb.GenerateRequest(text="a", model="another", resume=b"?"), Reason.MODEL_NOT_FOUND),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                [_ async for _ in stub.Generate(ask, timeout=20)]
            assert to_error(refused.value).reason is reason
        assert house.journal.find("mine") is not None
        await emptied(house, holder)


@pytest.mark.parametrize("case", ["draining", "no worker", "late", "declined"])
async def test_another_reason_comes_first(tokenizer: Tokenizer, case: str) -> None:
    house, holder = await full(tokenizer)
    arrival, timeout_s = Arrival(semconv.CHAT, "r", "", "", "", priority=2), 10.0
    assert house.service.doorman.look(arrival, timeout_s) is not None
    before = house.journal.totals.outcomes
    told = {"draining": "draining", "no worker": "no worker", "late": "deadline", "declined": "refused"}
    if case == "draining":
        house.service.draining = True
    elif case == "no worker":
        house.view.models[MODEL].served = None
    elif case == "late":
        timeout_s = 0.0
    else:
        house.journal.degradation = Degradation(Rules(read_measures(("priority=1",))))
        house.journal.degradation.level = 1
    assert house.service.doorman.look(arrival, timeout_s) is None and house.journal.totals.outcomes == before
    with pytest.raises(Exception, match=told[case]) as refused:
        await anext(house.service.generate(Ask(text="a", priority=2), timeout_s))
    assert (DEGRADED in getattr(refused.value, "metadata", {})) == (case == "declined")
    house.service.draining = False
    await emptied(house, holder)


def test_what_is_turned_away_would_be_refused_whatever_it_asked() -> None:
    """In many states of the queue, for many requests; and most of those that are refused need not be read."""
    rng, turned, read = random.Random(7), 0, 0
    for _ in range(100):
        seed, now = rng.random(), 10.0
        objectives = rng.choice(({"e2e": 0.5}, {"ttft": 1.0}, {"ttft": 1.0, "e2e": 2.0}))
        priority, deadline = rng.randrange(3), now + rng.choice((0.5, 5.0, 60.0))
        gate, admission = flooded(seed, objectives, now)
        early = gate.refusal(priority, deadline)
        for _ in range(8):
            _, admission = flooded(seed, objectives, now)
            most, weight = rng.choice((1, 2, 40, 100, 400)), rng.choice((1, 1, 2, 5))
            ask = Ask(priority=priority, n=weight, sampling=AskSampling(max_tokens=most))
            due = gate._due(now, ask, deadline)
            refused = admission.late_by(priority, now, due, ask.sequences) is not None
            assert refused or early is None, (seed, objectives, priority, deadline, ask)
            turned, read = turned + (refused and early is not None), read + (refused and early is None)
    assert turned > 100 and read > 0


def flooded(seed: float, objectives: dict[str, float], now: float) -> tuple[Gate, Admission]:
    rng, at = random.Random(seed), now - 3.0
    admission = Admission(8, rng.choice((2, 20, 200)), "codel")
    admission.note_served(rng.uniform(0.1, 2.0), rng.uniform(0.01, 0.5), 40)
    for number in range(rng.choice((3, 60, 300))):
        at = min(now, at + rng.expovariate(300))
        admission.enter(str(number), rng.randrange(3), at, Due(at + 5.0, at + 1.0, at + 2.0, 40))
    gate = Gate(admission, ClusterView({MODEL: "tokenizer"}).models[MODEL], RouterConfig(), objectives, clock=lambda: now)
    gate._places = gate._model.members.shape, None  # the view has no workers, and they are not asked
    return gate, admission
