"""Several routers over the same workers: each serves any request and shows the whole cluster, and the death of one stops nobody else."""

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from live_cluster import Cluster, cluster, killer, toy
from live_cluster import ask as ask_through
from sweep import until

from baton.cli.admin import read_live, read_records, read_status
from baton.client import AsyncClient, Result
from baton.v1 import worker_pb2, worker_pb2_grpc

pytestmark = pytest.mark.system
PROMPT = list(range(1, 100))


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = toy(tmp_path_factory.mktemp("models") / "toy", step_delay_ms=2)
    with cluster(model, "--router.replicas", "3", prefill=1, decode=1) as running:
        yield running


def routers(live: Cluster) -> dict[str, dict[str, Any]]:
    return {router["name"]: router for router in live.status()["routers"]}


def admin(router: dict[str, Any]) -> worker_pb2_grpc.AdminStub:
    return worker_pb2_grpc.AdminStub(grpc.insecure_channel(router["endpoints"]["admin"], [("grpc.enable_http_proxy", 0)]))


async def ask(address: str | list[str], prompt: list[int], max_tokens: int = 40) -> Result:
    async with AsyncClient(address) as client:
        return await ask_through(client, prompt, max_tokens)


async def test_every_router_serves_and_shows_the_whole_cluster(live: Cluster) -> None:
    # A router looks for the others four times a second; the cluster counts as ready without that.
    await until(lambda: len(routers(live)) == 3)
    known = await asyncio.to_thread(routers, live)
    assert list(known) == ["router-0", "router-1", "router-2"]
    addresses = [router["endpoints"]["grpc"] for router in known.values()]
    assert len(set(addresses)) == 3 and addresses[0] == live.grpc
    results = await asyncio.gather(*(ask(address, [*PROMPT, i, n]) for i, address in enumerate(addresses) for n in range(4)))
    served = [result.request_id for result in results]
    for router in known.values():
        told = await asyncio.to_thread(admin(router).Status, worker_pb2.StatusRequest(), timeout=20)
        assert [one["name"] for one in read_status(told)["routers"]] == list(known) and len(told.workers) == 2
        trace = await asyncio.to_thread(admin(router).Trace, worker_pb2.TraceRequest(last=100), timeout=20)
        assert {record["request_id"] for record in read_records(trace)} >= set(served)
        seen = read_live(await asyncio.to_thread(admin(router).Live, worker_pb2.LiveRequest(), timeout=20))
        assert seen["totals"]["outcomes"]["ok"] >= 12 and len(seen["routers"]) == 3
    traced = await asyncio.to_thread(live.baton, "trace", served[-1], "--name", live.name)
    assert traced.returncode == 0 and served[-1] in traced.stdout, traced.stderr
    await live.quiet()


async def test_a_router_finds_a_prefix_that_another_one_had_computed(live: Cluster) -> None:
    """Each follows the workers' block events itself."""
    first, *others = [router["endpoints"]["grpc"] for router in (await asyncio.to_thread(routers, live)).values()]
    prefix = [7] * 96
    await ask(first, [*prefix, 1])
    for number, address in enumerate(others):

        def cached(last: int = 2 + number, where: str = address) -> bool:
            asyncio.run(ask(where, [*prefix, last]))
            return bool(live.last()["cached_tokens"] >= 96)

        await asyncio.to_thread(live.wait, cached)
    await live.quiet()


async def test_the_streams_of_a_router_that_dies_continue_at_another(live: Cluster) -> None:
    known = await asyncio.to_thread(routers, live)
    victim, survivor = known["router-1"], known["router-2"]
    both = [victim["endpoints"]["grpc"], survivor["endpoints"]["grpc"]]
    client = AsyncClient(both)  # one client takes its addresses in turns; six would each draw where they begin
    decode = next(worker for worker in live.workers() if worker["name"] == "decode-0")
    with killer(victim["pid"], decode["metrics"], after=3500):  # more than the living ones take
        dying = [asyncio.create_task(ask_through(client, [*PROMPT, 50 + i], 1500)) for i in range(6)]
        living = [asyncio.create_task(ask(survivor["endpoints"]["grpc"], [*PROMPT, 60 + i], max_tokens=600)) for i in range(4)]
        resumed = [result.resumes for result in await asyncio.gather(*dying)]
    await client.close()
    assert sum(resumed) >= 2, "about half of them were at the router that died"
    assert all(result.resumes == 0 for result in await asyncio.gather(*living))

    def back() -> bool:
        return bool(routers(live).get("router-1", victim)["pid"] != victim["pid"])

    await asyncio.to_thread(live.wait, back)
    again = (await asyncio.to_thread(routers, live))["router-1"]
    assert again["endpoints"] | {"metrics": ""} == victim["endpoints"] | {"metrics": ""} and again["incarnation"] > victim["incarnation"]

    def serves() -> bool:
        return bool(asyncio.run(ask(again["endpoints"]["grpc"], [*PROMPT, 70])))

    await asyncio.to_thread(live.wait, serves)
    await live.quiet()


async def test_a_draining_router_leaves_the_registry_and_finishes_its_streams(live: Cluster) -> None:
    known = await asyncio.to_thread(routers, live)
    leaving = known["router-2"]
    stream = asyncio.create_task(ask(leaving["endpoints"]["grpc"], [*PROMPT, 80], max_tokens=1500))
    await asyncio.to_thread(live.wait, lambda: any(worker["load"]["running"] for worker in live.workers()))
    os.kill(leaving["pid"], signal.SIGTERM)
    await asyncio.to_thread(live.wait, lambda: "router-2" not in routers(live))
    assert not stream.done(), "it was out of the registry before its stream ended"
    await stream
    await asyncio.to_thread(live.wait, lambda: routers(live).get("router-2", leaving)["pid"] != leaving["pid"])
    await live.quiet()
