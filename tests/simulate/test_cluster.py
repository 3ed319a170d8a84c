"""The router's own code and the workers' own schedulers in virtual time."""

import asyncio
import random
from typing import Any

import pytest

from baton.cluster.config_router import RouterConfig
from baton.cluster.errors import BatonError, Reason
from baton.profile.file import Profile
from baton.profile.models import Fitted
from baton.simulate.cluster import SimulatedCluster, Sizes
from baton.simulate.engine import ProfiledPace, StepPace
from baton.simulate.virtual_time import run
from baton.simulate.workers import Times
from baton.worker.prompts import Prompts
from router.members import Members

Record = tuple[float, str, str, float, int]  # arrival, prefill worker, decode worker, end, tokens


async def traffic(cluster: SimulatedCluster, rate: float, seconds: float, seed: int) -> tuple[list[Record], dict[str, int]]:
    """Poisson arrivals. What became of each request, and the refusals by reason."""
    loop, rng, done, refused = asyncio.get_running_loop(), random.Random(seed), list[Record](), dict[str, int]()

    async def one(prompt: int, output: int) -> None:
        came = loop.time()
        try:
            request = await cluster.ask([rng.randrange(1000) for _ in range(prompt)], output)
        except BatonError as error:
            refused[error.reason.name] = refused.get(error.reason.name, 0) + 1
            return
        done.append((came, request.trace.prefill_worker, request.trace.decode_worker, loop.time(), request.output_len))

    async with asyncio.TaskGroup() as group:
        while loop.time() < seconds:
            await asyncio.sleep(rng.expovariate(rate))
            group.create_task(one(rng.randrange(40, 400), rng.randrange(1, 16)))
    return done, refused


def day(
    seed: int, sizes: Sizes, rate: float = 0.008, seconds: float = 86400, times: Times | None = None
) -> tuple[list[Record], dict[str, int], int]:
    async def main() -> tuple[list[Record], dict[str, int], int]:
        cluster = SimulatedCluster(sizes, times or Times(), RouterConfig())
        async with cluster.watched(beat_s=60):
            done, refused = await traffic(cluster, rate, seconds, seed)
            await asyncio.sleep(1)
            (router,) = cluster.routers
            assert not cluster.fleet.leases and router.admission.inflight == 0 == router.admission.queued
            for worker in cluster.fleet.workers.values():
                assert (await worker.engine.look()).sequences == 0
        return done, refused, router.journal.totals.handoffs

    return run(main())


def test_a_day_of_traffic_is_the_same_twice_and_uses_every_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.probes.LOOK_EVERY_S", 30.0)
    monkeypatch.setattr("router.watch.MEMBERS_EVERY_S", 30.0)
    monkeypatch.setattr("router.watch.SNAPSHOT_EVERY_S", 30.0)
    sizes = Sizes(prefill=2, decode=2)
    done, refused, handoffs = day(1, sizes)
    assert (done, refused, handoffs) == day(1, sizes), "bit for bit"
    assert len(done) > 600 and refused == {} and handoffs > 0.9 * len(done)
    for place, role in ((1, "prefill"), (2, "decode")):
        counts = {name: sum(record[place] == name for record in done) for name in (f"{role}-0", f"{role}-1")}
        assert min(counts.values()) > 0.3 * len(done), counts


def test_with_half_of_the_workers_requests_take_longer() -> None:
    """The model is one: what is scarce is waited for."""

    def mean(sizes: Sizes) -> float:
        done, _, _ = day(3, sizes, rate=8, seconds=60)
        return sum(end - came for came, *_, end, _ in done) / len(done)

    assert mean(Sizes(prefill=1, decode=1)) > 1.3 * mean(Sizes(prefill=2, decode=2))


def test_more_than_the_cluster_can_take_is_refused_and_nothing_stays_behind() -> None:
    done, refused, _ = day(4, Sizes(max_num_seqs=2), rate=60.0, seconds=40)
    assert refused.get("SATURATED", 0) > len(done) > 0


def test_a_prefix_is_computed_once_and_found_by_the_next_prompt_that_has_it() -> None:
    async def main() -> tuple[list[int], list[str]]:
        cluster = SimulatedCluster(Sizes(prefill=3, decode=1), Times(), RouterConfig(bypass_tokens=0))
        async with cluster.watched():
            done = []
            for number in range(4):
                done.append(await cluster.ask([*range(320), number, 7], 2))
                await asyncio.sleep(1)
        return [request.trace.cached_tokens for request in done], [request.trace.prefill_worker for request in done]

    cached, workers = run(main())
    assert cached == [0, 320, 320, 320] and len(set(workers)) == 1


def first_tokens(routers: int, seed: int, rate: float = 20, seconds: float = 60) -> list[float]:
    """Times to the first token, sorted: 64 prefixes of 768 tokens, of which each of two prefill workers keeps two thirds. Requests go to
    a router drawn at random. `benchmarks/routers.py` does the same with real processes. The load depends on the seed alone."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(256) for _ in range(768)] for _ in range(64)]
    weights = [(rank + 1) ** -0.8 for rank in range(64)]
    pauses = [rng.expovariate(rate) for _ in range(int(rate * seconds))]
    prompts = [[*rng.choices(prefixes, weights)[0], *(rng.randrange(256) for _ in range(64))] for _ in pauses]
    doors = [rng.random() for _ in pauses]

    async def main() -> list[float]:
        times = Times(StepPace(step_s=0.0015, prompt_token_s=60e-6, sequence_s=0.0001), handoff_s=0.003)
        sizes = Sizes(prefill=2, decode=2, kv_blocks=2048, max_num_seqs=64)
        cluster = SimulatedCluster(sizes, times, RouterConfig(bypass_tokens=0), routers=routers)
        loop, found = asyncio.get_running_loop(), list[float]()

        async def one(prompt: list[int], router: int) -> None:
            began = loop.time()
            request = await cluster.ask(prompt, 8, router=router)
            found.append(request.trace.first_at - began)

        async with cluster.watched(), asyncio.TaskGroup() as group:
            for pause, prompt, door in zip(pauses, prompts, doors, strict=True):
                await asyncio.sleep(pause)
                group.create_task(one(prompt, int(door * routers)))
            await asyncio.sleep(2)
        return sorted(found)

    return run(main())


def p99(routers: int, seed: int) -> float:
    return first_tokens(routers, seed)[int(0.99 * 1200)]


def test_three_routers_choose_as_well_as_one_unless_work_of_others_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two loads."""
    one = {seed: p99(1, seed) for seed in (1, 3)}
    monkeypatch.setattr(Members, "note_prefill", lambda *_: None)
    assert sum(p99(3, seed) for seed in one) <= 1.1 * sum(one.values())
    monkeypatch.setattr(Prompts, "follow", lambda *_: None)  # what a probe saw half a second ago counts as if it were still there
    assert p99(3, 1) >= 1.2 * one[1], "negative control"


def test_a_worker_that_stops_beating_and_answering_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watch and probes in virtual time: ten minutes of them take a moment."""

    async def main() -> list[list[str]]:
        cluster = SimulatedCluster(Sizes(prefill=1, decode=2), Times(), RouterConfig())
        (router,), seen = cluster.routers, []
        async with cluster.watched():
            await asyncio.sleep(300)
            seen.append([record.name for record in router.view.decode_workers()])
            gone = cluster.records.pop()

            async def probe(worker: Any, timeout_s: float) -> Any:
                if worker.name == gone.name:
                    raise BatonError(Reason.WORKER_LOST, "nobody listens")
                return await answer(worker, timeout_s)

            answer = router.workers.probe
            monkeypatch.setattr(router.workers, "probe", probe)
            await asyncio.sleep(300)
            seen.append([record.name for record in router.view.members.records()])
        return seen

    assert run(main()) == [["decode-0", "decode-1"], ["decode-0", "prefill-0"]]


def test_a_step_takes_what_the_profile_says_of_its_chunks() -> None:
    """Two prompts of 300 tokens, one after the other, on one worker whose steps cost a second for each 100 tokens."""
    numbers = {"step": 0.0, "tokens": 0.01, "decodes": 0.1}
    profile = Profile("measured", "", "m", {}, 1.0, "sum", {"step": Fitted(numbers)})

    async def main() -> list[float]:
        cluster = SimulatedCluster(Sizes(prefill=0, decode=1), Times(ProfiledPace(profile), travel_s=0.0), RouterConfig())
        async with cluster.watched():
            ends = []
            for number in range(2):
                began = asyncio.get_running_loop().time()
                await cluster.ask([number] * 300, 4)
                ends.append(asyncio.get_running_loop().time() - began)
        return ends

    assert run(main()) == pytest.approx([3 + 3 * 0.1] * 2, abs=0.01)
