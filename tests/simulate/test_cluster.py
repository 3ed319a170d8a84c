"""The router's own code in virtual time, with workers that are models."""

import asyncio
import random
from typing import Any

import pytest

from baton.cluster.config_router import RouterConfig
from baton.cluster.errors import BatonError, Reason
from baton.simulate.cluster import SimulatedCluster, Sizes
from baton.simulate.virtual_time import run
from baton.simulate.workers import Pace

Record = tuple[float, str, str, float, int]  # arrival, prefill worker, decode worker, end, tokens


async def traffic(cluster: SimulatedCluster, rate: float, seconds: float, seed: int) -> tuple[list[Record], dict[str, int]]:
    """Poisson arrivals. What became of each request, and the refusals by reason."""
    loop, rng, done, refused = asyncio.get_running_loop(), random.Random(seed), list[Record](), dict[str, int]()

    async def one(prompt: int, output: int) -> None:
        came = loop.time()
        try:
            request = await cluster.ask([1] * prompt, output)
        except BatonError as error:
            refused[error.reason.name] = refused.get(error.reason.name, 0) + 1
            return
        done.append((came, request.trace.prefill_worker, request.trace.decode_worker, loop.time(), request.output_len))

    async with asyncio.TaskGroup() as group:
        while loop.time() < seconds:
            await asyncio.sleep(rng.expovariate(rate))
            group.create_task(one(rng.randrange(20, 800), rng.randrange(1, 80)))
    return done, refused


def day(seed: int, sizes: Sizes, rate: float = 0.05, seconds: float = 86400) -> tuple[list[Record], dict[str, int], int]:
    async def main() -> tuple[list[Record], dict[str, int], int]:
        cluster = SimulatedCluster(sizes, Pace(), RouterConfig())
        cluster.report()

        async def reports() -> None:
            while True:
                await asyncio.sleep(10)
                cluster.report()

        reporting = asyncio.create_task(reports())
        done, refused = await traffic(cluster, rate, seconds, seed)
        reporting.cancel()
        assert not cluster.workers.leases and cluster.admission.inflight == 0 == cluster.admission.queued
        return done, refused, cluster.journal.totals.handoffs

    return run(main())


def test_a_day_of_traffic_is_the_same_twice_and_uses_every_worker() -> None:
    sizes = Sizes(prefill=2, decode=2)
    done, refused, handoffs = day(1, sizes)
    assert (done, refused, handoffs) == day(1, sizes), "bit for bit"
    assert len(done) > 4000 and refused == {} and handoffs > 0.9 * len(done)
    assert done != day(2, sizes)[0]
    for place, role in ((1, "prefill"), (2, "decode")):
        counts = {name: sum(record[place] == name for record in done) for name in (f"{role}-0", f"{role}-1")}
        assert min(counts.values()) > 0.3 * len(done), counts


def test_with_half_of_the_workers_requests_take_longer() -> None:
    """The model is one: what is scarce is waited for."""

    def mean(sizes: Sizes) -> float:
        done, _, _ = day(3, sizes, rate=4.5, seconds=200)
        return sum(end - came for came, *_, end, _ in done) / len(done)

    assert mean(Sizes(prefill=1, decode=1)) > 1.3 * mean(Sizes(prefill=2, decode=2))


def test_more_than_the_cluster_can_take_is_refused_and_nothing_stays_behind() -> None:
    done, refused, _ = day(4, Sizes(max_num_seqs=2), rate=20.0, seconds=120)
    assert refused.get("SATURATED", 0) > len(done) > 0


async def joined(cluster: SimulatedCluster, seconds: float) -> None:
    for _ in range(int(seconds)):
        await cluster.beat()
        await asyncio.sleep(1)


def test_a_worker_that_stops_beating_and_answering_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watch and probes in virtual time: ten minutes of them take a moment."""

    async def main() -> list[list[str]]:
        cluster = SimulatedCluster(Sizes(prefill=1, decode=2), Pace(), RouterConfig())
        seen = []
        async with cluster.watched():
            await joined(cluster, 300)
            seen.append([record.name for record in cluster.view.decode_workers()])
            gone = cluster.records.pop()

            async def probe(worker: Any, timeout_s: float) -> Any:
                if worker.name == gone.name:
                    raise BatonError(Reason.WORKER_LOST, "nobody listens")
                return await answer(worker, timeout_s)

            answer = cluster.workers.probe
            monkeypatch.setattr(cluster.workers, "probe", probe)
            await joined(cluster, 300)
            seen.append([record.name for record in cluster.view.members.records()])
        return seen

    assert run(main()) == [["decode-0", "decode-1"], ["decode-0", "prefill-0"]]
