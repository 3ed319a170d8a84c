"""A worker whose cache is not what is told of it: its promises count for less, and a policy that trusts them fares worse."""

from caching_router import PROMPT, World, prompt_of

from router.request import Request
from router.trust import FADES_S, Trust


def test_trust_follows_what_is_delivered_and_doubt_fades() -> None:
    trust = Trust()
    assert not trust.note("p0", 1, 100, 100, 0.0) and trust.shares(0.0) == {}
    told = [trust.note("p0", 1, 100, 0, 0.0) for _ in range(20)]
    assert told.count(True) == 1 and trust.shares(0.0)["p0"] < 0.1
    assert 0.5 < trust.shares(FADES_S)["p0"] < 0.6 and trust.shares(10 * FADES_S)["p0"] > 0.99
    for _ in range(40):
        trust.note("p0", 1, 100, 100, 0.0)
    assert trust.shares(0.0) == {}, "who keeps its promises again is trusted again"
    assert [trust.note("p0", 1, 100, 0, 0.0) for _ in range(20)].count(True) == 1, "and doubted anew"
    assert not trust.note("p0", 2, 100, 100, 0.0), "another process is not what the last one was"
    trust.forget("p0")
    assert trust.shares(0.0) == {}


async def computed(world: World, prompts: int = 40) -> tuple[int, int]:
    """Tokens of prompts that were computed, and how many prompts the liar got: p0 tells that it holds all, and holds nothing."""
    world.workers.delivers = lambda worker, request: 0 if worker == "p0" else World.held(world, worker, request)
    tokens = at_liar = 0
    for number in range(prompts):
        prompt = [*PROMPT, *prompt_of(16, seed=number)]
        world.model.index.overlap([], float("inf"))
        world.holds("p0", world.keys(prompt))
        world.holds("p1", world.keys(PROMPT))
        request, _ = await world.ask(prompt)
        tokens += request.prompt_len - request.trace.cached_tokens
        at_liar += request.trace.prefill_worker == "p0"
    return tokens, at_liar


async def test_a_worker_that_lies_about_its_cache_gets_fewer_prompts() -> None:
    class Credulous(Trust):
        def note(self, worker: str, incarnation: int, promised: int, delivered: int, now: float) -> bool:
            return False

    doubting, credulous = World(), World()
    credulous.model.trust = Credulous()
    tokens, at_liar = await computed(doubting)
    believed, everything = await computed(credulous)
    assert everything == 40 and at_liar < 10 and tokens < 0.5 * believed


async def test_one_wrong_hint_does_not_drive_prompts_away() -> None:
    world = World()
    worker = await world.first(PROMPT)
    held = world.workers.delivers

    def once(name: str, request: Request) -> int:
        world.workers.delivers = held
        return 0

    world.workers.delivers = once
    for _ in range(3):
        world.model.index.overlap([], float("inf"))  # the decode worker keeps nothing
        request, _ = await world.ask(PROMPT)
        assert request.trace.prefill_worker == worker
