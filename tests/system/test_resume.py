"""Streams that outlive their router. It is killed again and again while they run; every one gets exactly the tokens of an undisturbed run."""

import asyncio
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from faulty_cluster import GREEDY, faulty
from live_cluster import Cluster, toy, toy_output

from baton.client import AsyncClient, GenerateError, Result

pytestmark = pytest.mark.system
STREAMS, TOKENS, KILLS = 12, 400, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy(tmp_path_factory.mktemp("models") / "toy", step_delay_ms=20)


async def stream(client: AsyncClient, number: int, progress: dict[int, int]) -> Result:
    prompt = random.Random(number).choices(range(256), k=10 + 13 * number)
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0.0}
    asked: dict[str, Any] = {**GREEDY, **sampling, "max_tokens": TOKENS, "timeout_s": 300}
    tokens: list[int] = []
    async with client.generate(token_ids=prompt, **asked) as running:
        async for token in running:
            assert token.index == len(tokens)
            tokens.append(token.id)
            progress[number] = len(tokens)
        del asked["timeout_s"]
        assert tokens == toy_output(prompt, **asked), f"stream {number}"
        assert running.result.token_ids == tuple(tokens)
        assert (running.result.usage.prompt_tokens, running.result.usage.completion_tokens) == (len(prompt), TOKENS)
        return running.result


def router_pid(live: Cluster) -> int:
    return int(live.status()["router"]["pid"])


async def kill_router(live: Cluster, how: int) -> None:
    """Returns when another process serves at its address."""
    pid = await asyncio.to_thread(live.wait, lambda: router_pid(live), 60)
    os.kill(pid, how)
    await asyncio.to_thread(live.wait, lambda: router_pid(live) != pid, 120)


async def advanced(progress: dict[int, int], running: "list[asyncio.Task[Result]]", by: int = 5) -> None:
    """Waits until every running stream has `by` more tokens: so each is broken in its middle, by every kill."""
    before, deadline = dict(progress), time.monotonic() + 120
    while any(not task.done() and progress[i] < min(TOKENS, before[i] + by) for i, task in enumerate(running)):
        assert time.monotonic() < deadline, "the streams do not go on"
        await asyncio.sleep(0.05)


async def test_no_stream_is_lost_when_the_router_is_killed_again_and_again(model: Path) -> None:
    with faulty(model, prefill=1, decode=2) as live:
        progress = dict.fromkeys(range(STREAMS), 0)
        async with live.client() as client:
            running = [asyncio.create_task(stream(client, number, progress)) for number in range(STREAMS)]
            for kill in range(KILLS):
                await advanced(progress, running)
                await kill_router(live, signal.SIGKILL)
                assert any(not task.done() for task in running), f"kill {kill} came too late"
            results = await asyncio.gather(*running)
        assert sum(result.resumes for result in results) >= STREAMS
        await live.quiet()


async def test_a_stream_that_outlives_a_drain_is_resumed(model: Path) -> None:
    """The router drains for a second, and then ends the streams that are left."""
    with faulty(model, "", "--router.drain-s", "1", prefill=1, decode=1) as live:
        progress = {0: 0, 1: 0}
        async with live.client() as client:
            running = [asyncio.create_task(stream(client, number, progress)) for number in range(2)]
            await advanced(progress, running)
            await kill_router(live, signal.SIGTERM)
            results = await asyncio.gather(*running)
        assert [result.resumes for result in results] == [1, 1]
        await live.quiet()


async def test_a_client_that_does_not_resume_loses_its_streams(model: Path) -> None:
    """Negative control."""
    with faulty(model, prefill=1, decode=1) as live:
        progress = {0: 0}
        async with live.client(max_resumes=0) as client:
            running = [asyncio.create_task(stream(client, 0, progress))]
            await advanced(progress, running)
            await kill_router(live, signal.SIGKILL)
            with pytest.raises(GenerateError) as caught:
                await running[0]
        assert caught.value.code == grpc.StatusCode.UNAVAILABLE.name
        await live.quiet()
