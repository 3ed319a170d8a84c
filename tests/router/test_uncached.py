"""Why tokens of a prompt were computed: each planted cause is named, and the tokens of all causes add up."""

import asyncio
import math
import random
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
from caching_router import BLOCK, FULL, PROMPT, World, prompt_of
from fake_workers import Fault

from baton.cluster.errors import BatonError, Reason
from baton.cluster.records import BlockEvent
from baton.engine.core.block_key import DISK
from baton.uncached import UNCACHED
from router.uncached import History, Sought, Uncached, explain


async def test_new_and_partial() -> None:
    _, found = await World().ask(PROMPT)
    assert found == Uncached(0, 0, (("new", FULL), ("partial", 8)))
    _, whole = await World().ask(PROMPT[:FULL])
    assert whole.causes == (("new", FULL - BLOCK), ("partial", BLOCK)), "the last token is always computed"
    _, short = await World().ask(PROMPT[:BLOCK])
    assert short.causes == (("partial", BLOCK),)


async def test_all_is_delivered_that_was_computed_before() -> None:
    world = World()
    await world.first(PROMPT)
    request, found = await world.ask(PROMPT)
    assert (request.trace.cached_tokens, found) == (FULL, Uncached(FULL, FULL, (("partial", 8),)))


async def test_a_prompt_that_changes_in_the_middle_and_one_that_goes_on() -> None:
    world = World()
    await world.first(PROMPT)
    changed = PROMPT.copy()
    changed[100] += 1
    _, found = await world.ask(changed)
    assert found.causes == (("changed", 96), ("partial", 8)) and found.changed_at == 96 and found.promised == 96
    _, longer = await world.ask([*PROMPT, *prompt_of(60, seed=2)])
    assert longer.causes == (("grown", 64), ("partial", 4)) and longer.changed_at is None


async def test_evicted_and_restarted() -> None:
    world = World()
    worker = await world.first(PROMPT)
    world.holds(worker, world.keys(PROMPT)[:5])
    _, found = await world.ask(PROMPT)
    assert found.causes == (("evicted", FULL - 80), ("partial", 8))
    world = World()
    worker = await world.first(PROMPT)
    world.records = [replace(one, incarnation=2) if one.name == worker else one for one in world.records]
    world.view.update(world.records, 1.0)
    _, found = await world.ask(PROMPT)
    assert found.causes == (("restarted", FULL), ("partial", 8))


async def test_a_worker_that_holds_it_and_is_busy() -> None:
    world = World()
    worker = await world.first(PROMPT)
    world.view.members.start_prefill("others", worker, 5000)
    _, found = await world.ask(PROMPT)
    assert found.causes == (("busy", FULL), ("partial", 8)) and (found.promised, found.reachable, found.holder) == (0, FULL, worker)
    world.view.members.end_prefill("others")


async def test_a_worker_that_holds_it_and_failed_the_request() -> None:
    world = World("p0 p1 d0", recover_wait_s=0.2)
    worker = await world.first(PROMPT)
    world.workers.faults[worker].append(Fault(BatonError(Reason.WORKER_LOST, "connection reset")))
    _, found = await world.ask(PROMPT)
    assert found.causes == (("failed", FULL), ("partial", 8))


async def test_a_worker_that_holds_it_and_drains() -> None:
    world = World()
    worker = await world.first(PROMPT)
    world.view.update([replace(one, state="draining") if one.name == worker else one for one in world.records], 1.0)
    _, found = await world.ask(PROMPT)
    assert found.causes == (("unusable", FULL), ("partial", 8))


async def test_what_a_decode_worker_holds_is_moved_only_if_that_pays_and_it_lends() -> None:
    def decoder_holds(world: World) -> World:
        world.holds("d0", world.keys(PROMPT)[:8])
        return world

    _, found = await decoder_holds(World(fetch_tokens=256)).ask(PROMPT)
    assert found.causes == (("dearer", 128), ("new", 64), ("partial", 8)) and found.holder == "d0"
    _, found = await decoder_holds(World(fetch_tokens=32, lends=False)).ask(PROMPT)
    assert found.causes == (("unlent", 128), ("new", 64), ("partial", 8))
    _, found = await decoder_holds(World(fetch_tokens=32)).ask(PROMPT)
    assert found.causes == (("unfetched", 128), ("new", 64), ("partial", 8)) and found.promised == 128, "the stand-in fetches nothing"


@pytest.mark.parametrize(("names", "holder"), [("p0 d0", "p0"), ("d0", "d0")])
async def test_what_a_worker_keeps_in_its_tiers_and_did_not_load(names: str, holder: str) -> None:
    """The stand-in loads nothing. A decode worker that computes the prompt loads from its tiers, too."""
    for load_tokens, cause in ((64, "unloaded"), (128, "dearer")):
        world = World(names, load_tokens=load_tokens)
        world.view.apply(BlockEvent(holder, 1, 1, "stored", tuple(world.keys(PROMPT)[:8]), DISK))
        _, found = await world.ask(PROMPT)
        assert found.causes == ((cause, 128), ("new", 64), ("partial", 8)) and found.reachable == 128


async def test_what_was_promised_and_not_delivered() -> None:
    world = World()
    await world.first(PROMPT)
    world.workers.delivers = lambda worker, request: 32
    _, found = await world.ask(PROMPT)
    assert found.causes == (("stale", FULL - 32), ("partial", 8))
    world = World()
    await world.ask(PROMPT)  # it is predicted, and never reported
    _, found = await world.ask(PROMPT)
    assert found.causes == (("computing", FULL), ("partial", 8)) and found.promised == FULL


@pytest.mark.parametrize("known", [False, True])
async def test_prompts_that_are_sent_together_do_not_explain_each_other(known: bool) -> None:
    """What was known when a prompt was sent counts, though the same prompt, sent later to another worker, has been computed before it."""
    world = World()
    if known:
        await world.ask(PROMPT[:100])
        world.model.index.overlap([], math.inf)
    world.workers.waits = {name: asyncio.Event() for name in ("p0", "p1")}
    first = asyncio.create_task(world.ask(PROMPT))
    while not world.workers.calls or world.workers.calls[-1].known != len(PROMPT):
        await asyncio.sleep(0)
    second = asyncio.create_task(world.ask(PROMPT))
    holder = world.workers.calls[-1].worker
    world.workers.waits["p1" if holder == "p0" else "p0"].set()
    _, later = await second
    world.workers.waits[holder].set()
    _, earlier = await first
    start = (("evicted", 96), ("grown", 96)) if known else (("new", FULL),)
    assert earlier.causes == (*start, ("partial", 8)) and earlier.changed_at is None
    assert later.causes == (("busy", FULL), ("partial", 8)) and later.holder == holder


async def test_so_do_prompts_under_another_salt_of_their_tenant() -> None:
    world = World()
    await world.first(PROMPT, salt="ann\0one", tenant="ann")
    twins = await asyncio.gather(*(world.ask(PROMPT, salt="ann\0two", tenant="ann") for _ in range(2)))
    assert {found.causes for _, found in twins} == {(("salt", FULL), ("partial", 8)), (("busy", FULL), ("partial", 8))}


async def test_a_prompt_goes_on_from_one_that_is_still_computed() -> None:
    world = World("p0 d0")
    world.workers.waits["p0"] = asyncio.Event()
    tasks = [asyncio.create_task(world.ask(PROMPT[:160]))]
    await asyncio.sleep(0.01)
    tasks.append(asyncio.create_task(world.ask(PROMPT)))
    await asyncio.sleep(0.01)
    world.workers.waits["p0"].set()
    (_, first), (_, second) = await asyncio.gather(*tasks)
    assert first.causes == (("new", 144), ("partial", 16))
    assert second.causes == (("computing", 160), ("grown", 32), ("partial", 8))


async def test_another_salt_of_the_same_tenant_and_none_of_another_tenant() -> None:
    world = World()
    await world.first(PROMPT, salt="ann\0one", tenant="ann")
    _, found = await world.ask(PROMPT, salt="ann\0two", tenant="ann")
    assert found.causes == (("salt", FULL), ("partial", 8))
    for tenant in ("bob", ""):
        _, found = await world.ask(PROMPT, salt=f"{tenant}\0one", tenant=tenant)
        assert found == Uncached(0, 0, (("new", FULL), ("partial", 8))), "nothing of another tenant shows"


async def test_nothing_cached_at_all() -> None:
    _, found = await World(caching=False).ask(PROMPT)
    assert found.causes == (("off", 200),)
    request, found = await World().ask(PROMPT, prompt_logprobs=0)
    assert found.causes == (("scored", 200),) and request.trace.bypasses == ["prompt_logprobs"]


async def test_a_prompt_that_the_decode_worker_computes() -> None:
    world = World("d0")
    await world.first(PROMPT)
    request, found = await world.ask([*PROMPT, 1, 2])
    assert request.trace.prefill_worker == "" and found.causes == (("partial", 10),) and request.trace.cached_tokens == FULL


@pytest.mark.parametrize("early", [True, False])
async def test_a_client_that_has_enough_before_the_end_is_told_too(early: bool) -> None:
    """After a stop string, say. An older worker tells what was cached at the end, which nobody waits for then."""
    world = World("d0")
    await world.first(PROMPT)
    world.workers.tells_early = early
    request = world.request([*PROMPT, 1, 2], max_tokens=9)
    async with aclosing(world.dispatcher.generate(request)) as batches:
        await anext(batches)
    trace = request.trace
    assert (trace.cached_tokens, trace.uncached and trace.uncached.causes) == ((FULL, (("partial", 10),)) if early else (0, None))
    _, found = await world.ask([*PROMPT, 1, 2])
    assert found.causes == (("partial", 10),), "told once, early or at the end"


def test_the_causes_always_add_up() -> None:
    """Whatever was thought, held and delivered."""
    rng = random.Random(7)
    for _ in range(2000):
        history, length = History(most=rng.choice((4, 1000))), rng.randint(1, 130)
        keys = [bytes([rng.randrange(3), place]) for place in range((length - 1) // BLOCK)]
        for _ in range(rng.randint(0, 3)):
            history.note([bytes([rng.randrange(3), place]) for place in range(rng.randint(0, 9))], ("p0", rng.randint(1, 2)), None, "")
        promised = rng.randint(0, len(keys))
        reachable = rng.randint(promised, len(keys))
        remembered, lost, beyond = history.recall(keys, reachable, {("p0", 2)})
        sought = Sought(("p0", 1), promised, reachable, remembered, lost=lost, beyond=beyond)
        delivered = rng.choice((0, rng.randint(0, len(keys)) * BLOCK, length))
        found = explain(sought, history.beyond(keys, sought, delivered // BLOCK), len(keys), delivered, length, BLOCK)
        assert sum(tokens for _, tokens in found.causes) == length - delivered
        assert all(tokens > 0 for _, tokens in found.causes)


def test_the_page_of_causes_is_complete() -> None:
    page = (Path(__file__).parents[2] / "docs/architecture.md").read_text()
    assert all(f"| `{cause}` | {meaning} |\n" in page for cause, meaning in UNCACHED.items())


def test_what_was_cached_is_noted_too_unless_it_is_known_of_the_same_worker() -> None:
    a, b, c, d, e = (bytes([number]) for number in range(5))
    one, two = ("p0", 1), ("p1", 1)
    history = History()
    history.note([a, b, c], one, None, "", cached=2)  # of another router's prompt, for all that is known here
    assert history.recall([a, b, c, d], 0, {one}) == (3, "evicted", "grown")
    history.note([a, b, c, d], one, None, "", cached=3)
    assert history.recall([a, b, c, e], 0, {one}) == (3, "evicted", "changed")
    history.note([a, b, c, e], two, None, "")
    assert [history.worker(key) for key in (a, b, c, d, e)] == [two, two, two, one, two]
    history.note([a, b, c, d], one, None, "", cached=4)
    assert [history.worker(key) for key in (a, b, c, d, e)] == [one, one, one, one, two]
    history.note([a, b, c, d], two, None, "", cached=4)
    assert history.recall([a, b, c, d], 0, {one}) == (4, "restarted", "grown")


def test_what_is_remembered_is_bounded() -> None:
    history = History(most=100)
    for number in range(1000):
        history.note([number.to_bytes(4, "little")], ("p0", 1), number.to_bytes(4, "big"), str(number))
    assert len(history._young) + len(history._old) <= 202 and sum(map(len, history._salts)) <= 2 * (100 // 16 + 1)
    assert history.depth([(999).to_bytes(4, "little")], 0) == 1 and history.depth([(1).to_bytes(4, "little")], 0) == 0
