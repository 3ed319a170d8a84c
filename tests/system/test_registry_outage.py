"""Under load, Redis hangs, is emptied and dies for longer than a worker's record lives. No request is refused and no stream is retried."""

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import redis
from live_cluster import Cluster, cluster, toy, toy_output
from redis_servers import watched

from baton.client import AsyncClient, GenerateError, Result

pytestmark = pytest.mark.system
CLIENTS = 4
# Seconds. The router waits three for an absent worker, and a record lives for two: each outage is longer than both together.
RECORDS = ("--redis.record-ttl-s", "2", "--redis.heartbeat-s", "0.5")
OUTAGE_S = float(os.environ.get("BATON_TEST_OUTAGE_S", "7"))
AFTER_S = 4.0
PAUSE_S = 0.25  # of a client between two requests: many a moment is tried without keeping a core busy


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(toy(tmp_path_factory.mktemp("models") / "toy", step_delay_ms=5), *RECORDS, prefill=2, decode=2) as running:
        yield running


class Load:
    """Clients that send one request after another. The streams of one client last through the whole outage."""

    def __init__(self, live: Cluster) -> None:
        self._live = live
        self._until = asyncio.Event()
        self.served = self.retries = 0
        self.failures: list[str] = []

    async def __aenter__(self) -> "Load":
        self._client = await self._live.client().__aenter__()
        self._tasks = [asyncio.create_task(self._run(seed)) for seed in range(CLIENTS)]
        while self.served < CLIENTS:
            await asyncio.sleep(0.05)
        return self

    async def goes_on(self, least_s: float) -> None:
        """Returns after that time, and not before six more requests have been served."""
        before, deadline = self.served, time.monotonic() + 60
        await asyncio.sleep(least_s)
        while self.served < before + 6:
            assert time.monotonic() < deadline, f"{self.served - before} requests in a minute: {self.failures}"
            await asyncio.sleep(0.05)

    async def __aexit__(self, *_: object) -> None:
        self._until.set()
        await asyncio.gather(*self._tasks)
        await self._client.__aexit__(None, None, None)

    async def _run(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self._until.is_set():
            length = 1200 if seed == 0 else rng.randrange(8, 40)
            prompt = [rng.randrange(256) for _ in range(rng.randrange(20, 150))]
            try:
                result = await ask(self._client, prompt, length)
            except GenerateError as error:
                self.failures.append(f"{error.reason}: {error}")
                continue
            assert list(result.token_ids) == toy_output(prompt, max_tokens=length)
            self.served += 1
            self.retries += result.workers["retries"]
            await asyncio.sleep(PAUSE_S)


async def ask(client: AsyncClient, prompt: list[int], max_tokens: int) -> Result:
    async with client.generate(token_ids=prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, timeout_s=60) as stream:
        async for _ in stream:
            pass
        return stream.result


def server(live: Cluster) -> redis.Redis:
    state = json.loads((live.logs.parent / f"{live.name}.json").read_text())
    return redis.Redis.from_url(state["redis_url"], socket_timeout=2)


async def outage(live: Cluster, kind: str, load: Load) -> None:
    """Ends when Redis answers again. Requests are served meanwhile."""
    with server(live) as client:
        pid = client.info()["process_id"]
        match kind:
            case "stopped":
                os.kill(pid, signal.SIGSTOP)
                await load.goes_on(OUTAGE_S)
                os.kill(pid, signal.SIGCONT)
            case "paused":
                client.client_pause(int(OUTAGE_S * 1000))
                await load.goes_on(OUTAGE_S)
            case "flushed":  # again and again, so that no record lives longer than a moment
                going_on = asyncio.create_task(load.goes_on(OUTAGE_S))
                while not going_on.done():
                    client.flushall()
                    await asyncio.sleep(0.05)
                await going_on
            case "killed":  # `baton up` starts an empty one at the same address, which is killed as well
                going_on = asyncio.create_task(load.goes_on(OUTAGE_S))
                while not going_on.done():
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    await asyncio.sleep(0.5)
                    with suppress(redis.RedisError):
                        pid = client.info()["process_id"]
                await going_on


@pytest.mark.parametrize("kind", ["stopped", "paused", "flushed", "killed"])
async def test_no_request_notices_an_outage_of_the_registry(live: Cluster, kind: str) -> None:
    pids = {worker["pid"] for worker in live.workers()}
    async with Load(live) as load:
        await outage(live, kind, load)
        await load.goes_on(AFTER_S)
    assert not load.failures and not load.retries
    await asyncio.to_thread(live.wait, lambda: live.status()["router"]["registry"] == "reachable")
    with server(live) as client:
        assert json.loads(client.get(f"baton:{{{live.name}}}:pools") or b"{}") == {"prefill": 2, "decode": 2, "stop": False}
    assert {worker["pid"] for worker in live.workers()} == pids
    await live.quiet()
    await cached_where_it_was_computed(live)


async def test_no_request_notices_a_failover(tmp_path: Path) -> None:
    """A real primary under real Sentinels is killed, and its replica takes over."""
    with watched() as (url, primary, _):
        model = toy(tmp_path / "toy", step_delay_ms=5)
        with cluster(model, *RECORDS, prefill=1, decode=2, env={"BATON_REDIS_URL": url}) as live:
            async with Load(live) as load:
                primary.kill()
                await asyncio.to_thread(live.wait, lambda: live.status()["router"]["registry"] == "away")
                await asyncio.to_thread(live.wait, lambda: live.status()["router"]["registry"] == "reachable", 60)
                await load.goes_on(AFTER_S)
            assert not load.failures and not load.retries
            await live.quiet()
            await cached_where_it_was_computed(live)


async def cached_where_it_was_computed(live: Cluster) -> None:
    """Checks that the prefix index is correct again: a request finds what the previous one left in a cache."""
    prompt, deadline = [random.randrange(256) for _ in range(160)], time.monotonic() + 60
    async with live.client() as client:
        await ask(client, prompt, 4)
        while True:
            await asyncio.sleep(2.5)  # longer than the router trusts its own prediction: only the worker's report counts now
            if (await ask(client, prompt, 4)).usage.cached_tokens >= 144:
                return
            assert time.monotonic() < deadline, "the router does not learn what the workers cache"
