"""Tiers under modelled engines: the engine's own decisions, of which only bytes and threads are modelled."""

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from baton.cluster.config_router import RouterConfig
from baton.engine.core.block_key import DEVICE, DISK, HOST, REMOTE
from baton.engine.core.colder import Colder, TierPolicy
from baton.simulate.cluster import SimulatedCluster, Sizes
from baton.simulate.cores import Cores
from baton.simulate.engine import StepPace
from baton.simulate.tiers import TierPace, TierSizes
from baton.simulate.virtual_time import run
from baton.simulate.workers import Times
from baton.tiers.tier import TierReport
from baton.tiers.worth import REST_S, WINDOW_S

BLOCK_BYTES = 1 << 16
QUICK = TierPace(0.0005, 1e-9, 1e-10)  # a block comes in 0.07 ms, and is computed in 1.6 ms
SLOW = TierPace(0.0, 1e-6)  # a block comes in 66 ms: also from both ends it is not worth it
PACE = StepPace(step_s=0.001, prompt_token_s=1e-4, sequence_s=1e-4)
MANY = 5000  # blocks: nothing is ever lost
POOL = 100  # blocks: four prompts


@dataclass
class Told:
    """What a run showed."""

    hit_rate: float
    first: list[float]  # seconds to the first token of each request, sorted
    workers: dict[str, list[TierReport]] = field(default_factory=dict)
    known: dict[tuple[str, str], int] = field(default_factory=dict)  # blocks that the router knows of, by worker and medium
    held: dict[tuple[str, str], int] = field(default_factory=dict)  # blocks that there are
    costs: dict[str, list[float]] = field(default_factory=dict)  # that the router knows, by worker

    @property
    def prefill(self) -> TierReport:
        """Of the first prefill worker's nearest tier."""
        return self.workers["prefill-0"][0]


def tiers(*blocks: tuple[str, int], **more: Any) -> TierSizes:
    return TierSizes(blocks, BLOCK_BYTES, **more)


@dataclass(frozen=True)
class Load:
    """Prompts of one of so many prefixes of 256 tokens, and 80 tokens of their own."""

    prefixes: int = 20
    requests: int = 150
    rate: float = 10.0


def serve(
    kv_blocks: int, sizes: TierSizes | None, pace: TierPace | Mapping[str, TierPace] = QUICK, load: Load | None = None, rest_s: float = 0.0,
    **more: Any,
) -> Told:  # fmt: skip
    """`rest_s`: nothing comes for so long at the end. `more`: of the cluster."""
    load = load or Load()

    async def main() -> Told:
        cluster = SimulatedCluster(
            Sizes(1, 1, kv_blocks=kv_blocks, max_model_len=1024, tiers=sizes),
            Times(PACE, tiers={HOST: pace, DISK: pace} if isinstance(pace, TierPace) else pace),
            RouterConfig(bypass_tokens=0),
            **more,
        )
        rng, found, loop = random.Random(1), list[tuple[float, int, int]](), asyncio.get_running_loop()

        async def one(prompt: list[int]) -> None:
            began = loop.time()
            request = await cluster.ask(prompt, 8)
            found.append((request.trace.first_at - began, request.trace.cached_tokens, request.prompt_len))

        async with cluster.watched():
            async with asyncio.TaskGroup() as group:
                for number in range(load.requests):
                    group.create_task(one([rng.randrange(load.prefixes)] * 256 + [1000 + number] * 80))
                    await asyncio.sleep(rng.expovariate(load.rate))
            await asyncio.sleep(6 + rest_s)
            told = Told(sum(each[1] for each in found) / sum(each[2] for each in found), sorted(each[0] for each in found))
            look(cluster, told)
        return told

    return run(main())


def look(cluster: SimulatedCluster, told: Told) -> None:
    (router,) = cluster.routers
    index = router.view.models["model"].index
    index.overlap([], 0.0)
    for name, worker in cluster.fleet.workers.items():
        engine = worker.engine._engine
        engine.pool.check()
        told.workers[name] = [*worker.tiers.told()] if worker.tiers is not None else []
        told.known |= {(name, medium): kept.size for medium, kept in index._workers[name].media.items()}
        told.held[name, DEVICE] = len(engine.pool.sealed_keys())
        told.held |= {(name, medium): len(keys) for medium, keys in (engine.colder.held if engine.colder else {}).items()}
        told.costs[name] = [tier.cost for tier in router.view.members.record(name).tiers]


@pytest.fixture(scope="module")
def roomy() -> Told:
    return serve(MANY, None)


@pytest.fixture(scope="module")
def bare() -> Told:
    return serve(POOL, None)


@pytest.fixture(scope="module")
def tiered() -> Told:
    return serve(POOL, tiers((HOST, MANY)))


def test_a_tier_of_enough_room_gives_the_hit_rate_of_a_large_pool(roomy: Told, bare: Told, tiered: Told) -> None:
    assert bare.hit_rate < roomy.hit_rate / 2, "or the pool is not small"
    assert roomy.hit_rate - 0.02 < tiered.hit_rate <= roomy.hit_rate
    middle = len(bare.first) // 2
    assert roomy.first[middle] < tiered.first[middle] < bare.first[middle] / 2
    assert tiered.prefill.tally.hits == tiered.prefill.tally.reads > 1000


def test_a_run_is_the_same_twice_and_on_shared_cores_moving_takes_some_of_them(tiered: Told) -> None:
    assert serve(POOL, tiers((HOST, MANY))) == tiered, "bit for bit"

    def shared(pace: TierPace) -> float:
        async def main() -> Cores:
            return Cores(1)

        return sum(serve(POOL, tiers((HOST, MANY)), pace, cores=run(main())).first)

    writes = TierPace(0.0005, 1e-9, 5e-8)  # 3 ms a block
    assert shared(writes) > 1.1 * shared(QUICK)
    assert sum(serve(POOL, tiers((HOST, MANY)), writes).first) < 1.02 * sum(tiered.first), "the writer has a core of its own"


@pytest.mark.parametrize("large", [False, True])
def test_tiers_without_room_are_none(bare: Told, large: bool) -> None:
    one, other = (serve(POOL, sizes, large=large) for sizes in (tiers((HOST, 0), (DISK, 0)), None))
    assert one == other and not one.workers["prefill-0"]
    assert large or one == bare


def test_a_tier_from_which_loading_takes_longer_than_computing_is_not_read(bare: Told, tiered: Told) -> None:
    """It is tried, or nobody would know, and once a minute again."""
    slow = serve(POOL, tiers((HOST, MANY)), SLOW)
    assert 0 < slow.prefill.tally.reads < 50 < tiered.prefill.tally.reads / 20
    assert slow.hit_rate < bare.hit_rate + 0.05 and sum(slow.first) < 1.1 * sum(bare.first)


def test_a_tier_that_is_always_read_is_worse_where_it_is_slow(bare: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without the decision, waiting for loads would show."""
    monkeypatch.setattr("baton.tiers.tiers.units_to_load", lambda run, size, compute_s: len(run))
    always = serve(POOL, tiers((HOST, MANY)), SLOW)
    assert always.prefill.tally.reads > 100 and sum(always.first) > 1.3 * sum(bare.first)


def test_what_the_memory_has_no_room_for_goes_to_the_disk_and_comes_back_from_there(roomy: Told) -> None:
    less = serve(POOL, tiers((HOST, 150)))
    both = serve(POOL, tiers((HOST, 150), (DISK, MANY)))
    memory, disk = both.workers["prefill-0"]
    assert memory.units == 150 == less.prefill.units and disk.tally.hits > 200 and disk.tally.written > 1000
    assert less.hit_rate + 0.2 < both.hit_rate > roomy.hit_rate - 0.03
    slow = serve(POOL, tiers((HOST, 150), (DISK, MANY)), {HOST: QUICK, DISK: SLOW})
    assert slow.workers["prefill-0"][1].tally.reads < 50 and slow.workers["prefill-0"][0].tally.reads > 100, "each by its own pace"


@pytest.mark.parametrize("large", [False, True])
def test_routers_hear_what_each_medium_holds_and_what_loading_costs(large: bool) -> None:
    told = serve(POOL, tiers((HOST, 150), (DISK, MANY)), large=large)
    assert told.known == told.held and {medium for _, medium in told.held} == {DEVICE, HOST, DISK}
    assert min(told.held.values()) > 20
    memory, disk = told.costs["prefill-0"]
    assert 0.02 < memory < 0.2 and 0.02 < disk < 0.2, "0.07 ms of 1.6"


def test_among_two_workers_a_prompt_goes_to_the_one_whose_tier_has_it() -> None:
    async def main() -> list[str]:
        sizes = Sizes(prefill=2, decode=1, kv_blocks=POOL, max_model_len=1024, tiers=tiers((HOST, MANY)))
        cluster = SimulatedCluster(sizes, Times(PACE, tiers={HOST: QUICK}), RouterConfig(bypass_tokens=0), large=True)
        found = []
        async with cluster.watched():
            first = (await cluster.ask([1] * 320, 2)).trace.prefill_worker
            for number in range(2, 22):  # they push it out of both pools
                await cluster.ask([number] * 320, 2)
                await asyncio.sleep(0.2)
            keys = next(iter(cluster.fleet.workers[first].engine._engine.colder.held.values()))  # type: ignore[union-attr]
            assert len(keys) > POOL
            again = await cluster.ask([1] * 320, 2)
            found += [first, again.trace.prefill_worker, str(again.trace.cached_tokens)]
        return found

    first, again, cached = run(main())
    assert first == again and cached == "304"


def test_a_decode_worker_takes_from_its_tier_what_is_sooner_there_than_from_its_holder() -> None:
    """A prompt of which its pool has kept nothing, after a handoff has told how long one takes."""

    def handed(token_s: float) -> int:
        async def main() -> int:
            sizes = Sizes(1, 1, kv_blocks=POOL, max_model_len=1024, tiers=tiers((HOST, MANY)))
            times = Times(PACE, handoff_token_s=token_s, tiers={HOST: QUICK})
            cluster = SimulatedCluster(sizes, times, RouterConfig(bypass_tokens=0))
            async with cluster.watched():
                for number in (1, *range(2, 12), 1):
                    await cluster.ask([number] * 320, 2)
                    await asyncio.sleep(0.2)
                worker = cluster.fleet.workers["decode-0"]
                return worker.tiers.told()[0].tally.hits if worker.tiers else 0

        return run(main())

    assert handed(1e-3) == 20 and handed(1e-6) == 0


def test_a_load_ends_when_the_prompt_would_have_been_computed() -> None:
    """The first one is tried, whatever it takes; with what has come by then, the rest is computed."""

    def second(pace: TierPace) -> tuple[float, int]:
        async def main() -> tuple[float, int]:
            sizes = Sizes(0, 1, kv_blocks=POOL, max_model_len=1024, tiers=tiers((HOST, MANY)))
            cluster = SimulatedCluster(sizes, Times(PACE, tiers={HOST: pace}), RouterConfig())
            async with cluster.watched():
                for number in (1, *range(2, 12)):
                    await cluster.ask([number] * 320, 2)
                    await asyncio.sleep(0.2)
                began = asyncio.get_running_loop().time()
                request = await cluster.ask([1] * 320, 2)
                return request.trace.first_at - began, request.trace.cached_tokens

        return run(main())

    took, cached = second(QUICK)
    assert cached == 304 and took < 0.01
    took, cached = second(TierPace(0.0, 1.5e-7))  # 10 ms a block: eight come in a tenth of a second
    assert cached == 128 and 0.1 < took < 0.15
    assert second(TierPace(10.0))[1] == 0


def test_a_tier_that_costs_more_than_it_saves_rests_and_is_tried_again() -> None:
    """Nothing returns, and everything is kept."""
    useless = tiers((HOST, MANY), policy=TierPolicy(keeps_all=True))
    load, pace = Load(prefixes=1 << 15, requests=700, rate=1.0), TierPace(write=1e-6)
    told = serve(POOL, useless, pace, load, large=True)
    assert told.prefill.state == "resting" and told.known == told.held and told.held["prefill-0", HOST] == 0
    assert told.prefill.tally.written < 22 * load.requests
    later = serve(POOL, useless, pace, load, rest_s=REST_S, large=True)
    assert later.prefill.state == "on"
    watching = serve(POOL, tiers((HOST, 50)), pace, load, large=True)
    assert watching.prefill.state == "watching" and watching.prefill.tally.written < told.prefill.tally.written / 10
    assert serve(POOL, useless, TierPace(), load, large=True).prefill.state == "on", "negative control"
    assert load.requests / load.rate > WINDOW_S


def test_no_more_is_written_than_the_rate_allows() -> None:
    free, bound = (serve(POOL, tiers((HOST, MANY), save_bytes_per_s=rate)).prefill.tally for rate in (None, 20 * BLOCK_BYTES))
    assert free.written > 1000 and free.dropped == 0
    assert 200 < bound.written < 20 * 25 + 64, "64 at a time"


def test_at_once_all_is_saved_that_is_computed() -> None:
    load = Load(requests=3)
    late, at_once = (serve(MANY, tiers((HOST, MANY), policy=TierPolicy(at_once=how)), load=load).prefill.tally for how in (False, True))
    assert late.written == 0 and at_once.written >= 3 * 21


@pytest.mark.parametrize(
    ("sizes", "words"), [(((REMOTE, 5),), "remote is not modelled"), (((HOST, 5), ("tape", 1)), "tape is not modelled")]
)
def test_a_medium_that_is_not_modelled_is_refused(sizes: tuple[tuple[str, int], ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TierSizes(sizes, BLOCK_BYTES)
    with pytest.raises(ValueError, match="a block of 0 bytes"):
        TierSizes((), 0)


def test_an_engine_is_not_still_while_something_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What allows jumps over steps says so of an engine as soon as its tiers have something to do."""
    seen = set[tuple[bool, bool, bool]]()
    turn = Colder.turn

    def watched(self: Colder, now: float) -> int:
        still, before = self.still, (len(self.held[HOST]), self._saving, len(self._loads), self._pool.num_owned)
        met = turn(self, now)
        after = (len(self.held[HOST]), self._saving, len(self._loads), self._pool.num_owned)
        seen.add((still, before != after, bool(self._loads)))
        return met

    monkeypatch.setattr(Colder, "turn", watched)
    serve(POOL, tiers((HOST, MANY)))
    assert (True, False, False) in seen and (False, True, True) in seen
    assert not any(still and (changed or loads) for still, changed, loads in seen)
