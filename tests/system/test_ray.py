"""The same cluster under Ray, which places, restarts and resizes the same processes."""

import asyncio
import random
from collections.abc import Iterator
from functools import partial

import pytest
from live_cluster import Cluster, cluster, toy, toy_output

from baton.client import AsyncClient, Result

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = toy(tmp_path_factory.mktemp("models") / "toy", step_delay_ms=2)
    with cluster(model, "--prefill.cpus", "0.5", "--decode.cpus", "0.5", prefill=2, decode=2, launcher="ray") as running:
        yield running


async def ask(client: AsyncClient, prompt: list[int], tokens: int = 24) -> Result:
    async with client.generate(token_ids=prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True, timeout_s=120) as stream:
        async for _ in stream:
            pass
        return stream.result


async def test_two_hundred_concurrent_requests_with_shared_prefixes_and_random_cancels(live: Cluster) -> None:
    rng = random.Random(2)
    shared = [[rng.randrange(256) for _ in range(200)] for _ in range(4)]

    async def one(client: AsyncClient, prompt: list[int], cancel_after: int | None) -> None:
        got = []
        async with client.generate(token_ids=prompt, max_tokens=24, temperature=0.0, ignore_eos=True, timeout_s=120) as stream:
            async for token in stream:
                got.append(token.id)
                if cancel_after is not None and len(got) > cancel_after:
                    break
        assert got == toy_output(prompt, max_tokens=24)[: len(got)]
        assert cancel_after is not None or len(got) == 24

    async with live.client() as client:
        prompts = [rng.choice(shared) + [rng.randrange(256) for _ in range(rng.randrange(1, 100))] for _ in range(200)]
        await asyncio.gather(*(one(client, prompt, rng.choice([None, None, 0, 5])) for prompt in prompts))
    await live.quiet(30)


async def test_a_dead_worker_comes_back_as_a_new_incarnation(live: Cluster) -> None:
    before = {worker["name"]: worker["incarnation"] for worker in live.workers()}
    async with live.client() as client:
        running = asyncio.create_task(ask(client, list(range(1, 150)), 400))
        await asyncio.to_thread(live.wait, lambda: [worker for worker in live.workers("decode") if worker["load"]["running"]])
        busy = next(worker["name"] for worker in live.workers("decode") if worker["load"]["running"])
        live.kill(busy)
        assert list((await running).token_ids) == toy_output(list(range(1, 150)), max_tokens=400)
    await asyncio.to_thread(
        live.wait, lambda: {w["name"]: w["incarnation"] for w in live.workers() if "error" not in w}.get(busy, 0) > before[busy]
    )
    await live.quiet(30)


def has_sizes(live: Cluster, prefill: int, decode: int) -> bool:
    return (len(live.workers("prefill")), len(live.workers("decode"))) == (prefill, decode)


async def test_pools_can_be_resized_while_serving(live: Cluster) -> None:
    async with live.client() as client:
        running = asyncio.create_task(ask(client, list(range(1, 150)), 400))
        for prefill, decode in ((1, 3), (2, 2)):
            done = await asyncio.to_thread(live.baton, "scale", "--prefill", str(prefill), "--decode", str(decode), "--name", live.name)
            assert done.returncode == 0, done.stderr
            await asyncio.to_thread(live.wait, partial(has_sizes, live, prefill, decode), 60)
        assert list((await running).token_ids) == toy_output(list(range(1, 150)), max_tokens=400)
    await live.quiet(30)
