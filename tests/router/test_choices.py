"""Several choices for one prompt: one prefill and one handoff, exact answers whatever fails, the best of them, and what is refused."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from fake_workers import EOS, MODEL, TOKENIZER, FakeFork, FakeWorkers, Fault, record

from baton.cluster.config_router import RouterConfig
from baton.cluster.errors import BatonError, Reason
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.toy import naive
from router.best import Best
from router.choices import relate, seeded, sibling
from router.dispatch import Dispatcher
from router.events import Finished, Pieces, TextPiece
from router.family import Family
from router.merging import merge
from router.request import Request, Stopwatch, Token, Tokens, Trace
from router.uncached import Uncached
from router.validate import Ask, AskSampling, RequestLimits, check, resolve
from router.view import ClusterView

PROMPT = list(range(1, 41))
PARAMS = SamplingParams(max_tokens=8, temperature=1.0, seed=7, ignore_eos=True)
LOST = BatonError(Reason.WORKER_LOST, "connection reset")


@dataclass
class World:
    names: str = "p0 d0 d1"
    opens: bool = False  # prompts are long
    prompt: list[int] = field(default_factory=lambda: list(PROMPT))
    params: SamplingParams = PARAMS
    forks: bool = True  # whether the workers know of them

    def __post_init__(self) -> None:
        self.view = ClusterView({MODEL: TOKENIZER})
        self.view.update([record(name, forks=self.forks) for name in self.names.split()], 0.0)
        self.workers = FakeWorkers()
        self.workers.opens = self.opens
        config = RouterConfig(bypass_tokens=8, recover_wait_s=0.2)
        self.dispatcher = Dispatcher(self.view.models[MODEL], self.workers, config)
        trace = Trace(Stopwatch(time.monotonic))
        first = Request("r-0", list(self.prompt), len(self.prompt), self.params, "", time.monotonic() + 20, trace)
        self.requests = [first, *(sibling(first, "r", choice) for choice in range(1, 4))]
        relate(self.requests)

    async def serve(self, leaves: int | None = None) -> list[list[int]]:
        """`leaves`: a choice whose reader has enough after its first token."""
        seen: list[list[int]] = [[] for _ in self.requests]

        async def one(request: Request) -> AsyncGenerator[Tokens, None]:
            async with aclosing(self.dispatcher.generate(request)) as batches:
                async for tokens in batches:
                    yield tokens
                    if request.choice == leaves:
                        return

        async with aclosing(merge([one(request) for request in self.requests])) as merged:
            async for choice, tokens in merged:
                seen[choice] += [token.id for token in tokens]
        return seen

    def kinds(self) -> list[str]:
        return [call.kind for call in self.workers.calls]

    def check(self) -> None:
        assert not self.workers.leases and set(self.workers.endings.values()) <= {1}
        for worker in self.view.members.records():
            assert self.view.members.decodes(worker.name) == 0 == self.view.members.unreported_decode_tokens(worker.name)


def truth(world: World) -> list[list[int]]:
    return [naive(world.prompt, seeded(world.params, choice)) for choice in range(4)]


@pytest.mark.parametrize("opens", [False, True])
async def test_they_share_a_prefill_a_handoff_and_a_decode_call(opens: bool) -> None:
    world = World(opens=opens)
    assert await world.serve() == truth(world)
    assert sorted(world.kinds()) == sorted(["fork"] * 3 + ["prefill", "live decode" if opens else "decode"])
    assert len({call.worker for call in world.workers.calls if call.kind != "prefill"}) == 1
    assert [request.trace.handoff.transport for request in world.requests] == ["tcp", "", "", ""]
    assert all(request.trace.prefill_worker == "p0" and request.trace.cached_tokens == 16 for request in world.requests)
    world.check()


@pytest.mark.parametrize("opens", [False, True])
@pytest.mark.parametrize("worker, tokens", [("p0", None), ("d0", None), ("d1", None), ("d0", 0), ("d0", 3), ("d1", 3), ("d0", 5)])
async def test_whatever_fails_every_choice_goes_on_exactly(opens: bool, worker: str, tokens: int | None) -> None:
    world = World(opens=opens)
    world.workers.faults[worker].extend([Fault(LOST, tokens)] * 4)
    world.workers.alive = {name: 0.0 for name in ("p0", "d0", "d1")}
    assert await world.serve() == truth(world)
    world.check()


@pytest.mark.parametrize("opens", [False, True])
async def test_an_older_worker_gets_a_call_for_each(opens: bool) -> None:
    """It would not answer calls that begin with another one."""
    world = World(opens=opens, forks=False)
    assert await world.serve() == truth(world)
    assert "fork" not in world.kinds() and len([kind for kind in world.kinds() if kind.endswith("decode")]) == 4
    world.check()


async def test_a_choice_that_ends_with_its_first_token_lets_the_next_one_lead() -> None:
    first = naive(PROMPT, PARAMS)[0]
    world = World(params=replace(PARAMS, stop_token_ids=frozenset([first])))
    seen = await world.serve()
    assert seen[0] == [first] and [choice[: len(got)] for choice, got in zip(truth(World()), seen, strict=True)] == seen
    assert world.kinds().count("prefill") == 2 and world.kinds().count("fork") == 2
    world.check()


@pytest.mark.parametrize("leaves", [0, 2])
@pytest.mark.parametrize("opens", [False, True])
async def test_a_choice_whose_reader_has_enough_ends_alone(opens: bool, leaves: int) -> None:
    world = World(opens=opens)
    seen = await world.serve(leaves)
    for choice, (got, expected) in enumerate(zip(seen, truth(world), strict=True)):
        assert got == (expected[: len(got)] if choice == leaves else expected)
    world.check()


async def test_a_client_that_leaves_ends_all_of_them() -> None:
    world = World()
    async with aclosing(merge([world.dispatcher.generate(request) for request in world.requests])) as merged:
        async for choice, _ in merged:
            if choice == 3:
                break
    await asyncio.sleep(0)
    world.check()


async def test_a_client_that_leaves_before_any_event_was_read_leaves_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of long prompts take turns before they read."""
    world, waiting, begun, fork = World(), asyncio.Event(), list[FakeFork](), FakeWorkers.fork

    async def turn(request: Request) -> None:
        if request.choice:
            waiting.set()
            await asyncio.Event().wait()

    def kept(*given: Any) -> FakeFork:
        begun.append(fork(*given))
        return begun[-1]

    monkeypatch.setattr(world.dispatcher._choosing, "turn_to_send", turn)
    monkeypatch.setattr(FakeWorkers, "fork", kept)
    serving = asyncio.create_task(world.serve())
    await asyncio.wait_for(waiting.wait(), 10)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    assert [each.closed for each in begun] == [True] * 3
    world.check()


async def test_who_never_took_its_call_gives_it_back() -> None:
    family: Family[str, str] = Family(["a", "b", "c"])
    assert list(family.waiting) == [1, 2]
    family.join(1, "call")
    assert family.leave(1) == "call" and family.leave(0) is None and family.leader == 2
    assert await family.turn(2) is None


async def test_a_call_may_begin_for_one_that_no_longer_waits() -> None:
    """Its deadline has passed, and its task has not run yet."""
    family: Family[str, str] = Family(["a", "b"])
    waits = asyncio.create_task(family.turn(1))
    await asyncio.sleep(0)
    waits.cancel()
    family.join(1, "call")
    with pytest.raises(asyncio.CancelledError):
        await waits
    assert family.leave(1) == "call"


def ended(choice: int, logprobs: list[float]) -> list[Pieces | Finished]:
    request = Request(f"r-{choice}", [0] * (2 + len(logprobs)), 2, PARAMS, "", 0.0, Trace(Stopwatch(lambda: 0.0)), choice=choice)
    pieces = tuple(TextPiece(i, Token(i, logprob, ((i, logprob),)), "x") for i, logprob in enumerate(logprobs))
    return [Pieces(pieces), Finished(request, "stop", "", None)]


@pytest.mark.parametrize("logprobs", [None, 1])
def test_the_best_have_the_highest_mean_and_the_rest_is_counted(logprobs: int | None) -> None:
    best = Best(2, 4, logprobs)
    for choice, told in enumerate(([-3.0], [-1.0, -1.0, -1.0], [-0.5, -2.5], [-1.0])):
        for event in ended(choice, told):
            best.take(choice, event)
    events = list(best.events())
    ends = [event for event in events if isinstance(event, Finished)]
    assert [(end.request.choice, end.choice, end.discarded_tokens) for end in ends] == [(1, 0, 0), (3, 1, 3)], "of equal ones the first"
    pieces = [piece for event in events if isinstance(event, Pieces) for piece in event.pieces]
    assert [piece.token.logprob for piece in pieces] == ([None] * 4 if logprobs is None else [-1.0] * 4)


@pytest.mark.parametrize("told_by", [0, 3])
def test_why_the_prompt_was_computed_is_told_whichever_choices_are_the_best(told_by: int) -> None:
    """Once: it was computed for one of them."""
    best, found = Best(2, 4, None), Uncached(0, 0, (("new", 16), ("partial", 2)))
    for choice, told in enumerate(([-3.0], [-1.0], [-2.0], [-1.5])):
        for event in ended(choice, told):
            best.take(choice, replace(event, uncached=found) if isinstance(event, Finished) and choice == told_by else event)
    ends = [event for event in best.events() if isinstance(event, Finished)]
    assert [end.uncached for end in ends] == ([found, None] if told_by == 0 else [None, found])


@pytest.mark.parametrize(
    "ask, field",
    [
        (Ask(n=0), "n"),
        (Ask(n=9), "n"),
        (Ask(n=2, best_of=9), "best_of"),
        (Ask(n=3, best_of=2), "best_of"),
        (Ask(n=4, sampling=AskSampling(max_tokens=26)), "sampling.max_tokens"),
        (Ask(n=1, best_of=4, sampling=AskSampling(max_tokens=26)), "sampling.max_tokens"),
        (Ask(n=2, output_so_far=(1,)), "output_so_far"),
        (Ask(n=2, resume=b"x"), "resume"),
    ],
)
def test_what_cannot_be_is_refused_by_field(ask: Ask, field: str) -> None:
    limits = RequestLimits(max_choices=8, max_answer_tokens=100)
    with pytest.raises(BatonError) as caught:
        check(replace(ask, text="a"), limits, ("toy",), 257)
    assert [violation.field for violation in caught.value.violations] == [field]


def test_without_a_limit_of_its_own_an_answer_is_cut_to_what_all_may_have() -> None:
    limits = RequestLimits(max_choices=8, max_answer_tokens=100)
    check(ask := Ask(text="a", n=4, sampling=AskSampling(default_max_tokens=1000)), limits, ("toy",), 257)
    assert resolve(ask, 1, 4096, 0, limits)[0].max_tokens == 25
    assert resolve(replace(ask, n=1), 1, 4096, 0, limits)[0].max_tokens == 1000


@pytest.mark.parametrize("n, refused", [(8, False), (7, True)])
def test_no_more_is_kept_for_the_best_than_a_router_has_room_for(n: int, refused: bool) -> None:
    """Choices that are all told need not be kept."""
    ask = Ask(text="a", n=n, best_of=8, sampling=AskSampling(max_tokens=4000, logprobs=20))
    try:
        resolve(ask, 1, 4096, 0)
    except BatonError as error:
        assert refused and error.violations[0].field == "sampling.logprobs"
    else:
        assert not refused
    resolve(replace(ask, sampling=AskSampling(max_tokens=4000, logprobs=15)), 1, 4096, 0)


def test_seeds_wrap() -> None:
    assert seeded(replace(PARAMS, seed=(1 << 64) - 1), 2).seed == 1 and EOS == 256
