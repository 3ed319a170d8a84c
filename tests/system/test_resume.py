"""Streams that outlive their router. It is killed again and again while they run; each gets exactly the tokens of an undisturbed run."""

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from faulty_cluster import GREEDY, SHARED, faulty
from live_cluster import Cluster, toy, toy_output

from baton.client import AsyncClient, GenerateError, Result

pytestmark = pytest.mark.system
STREAMS, TOKENS, KILLS = 12, 400, 4
FEW = 150  # tokens of streams that break once or twice


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy(tmp_path_factory.mktemp("models") / "toy", step_delay_ms=20)


@pytest.fixture(scope="module")
def live(model: Path) -> Iterator[Cluster]:
    """Its router drains for a second when it is asked to end."""
    with faulty(model, "", *SHARED, "--router.drain-s", "1", prefill=1, decode=2) as running:
        yield running


async def stream(client: AsyncClient, number: int, progress: dict[int, int], length: int = TOKENS) -> Result:
    prompt = random.Random(number).choices(range(256), k=10 + 13 * number)
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0.0}
    asked: dict[str, Any] = {**GREEDY, **sampling, "max_tokens": length, "timeout_s": 300}
    tokens: list[int] = []
    async with client.generate(token_ids=prompt, **asked) as running:
        async for token in running:
            assert token.index == len(tokens)
            tokens.append(token.id)
            progress[number] = len(tokens)
        del asked["timeout_s"]
        assert tokens == toy_output(prompt, **asked), f"stream {number}"
        assert running.result.token_ids == tuple(tokens)
        assert (running.result.usage.prompt_tokens, running.result.usage.completion_tokens) == (len(prompt), length)
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


async def test_no_stream_is_lost_when_the_router_is_killed_again_and_again(live: Cluster) -> None:
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


async def test_a_stream_that_outlives_a_drain_is_resumed(live: Cluster) -> None:
    """When its time is over, the router ends the streams that are left."""
    progress = {0: 0, 1: 0}
    async with live.client() as client:
        running = [asyncio.create_task(stream(client, number, progress, FEW)) for number in range(2)]
        await advanced(progress, running)
        await kill_router(live, signal.SIGTERM)
        results = await asyncio.gather(*running)
    assert [result.resumes for result in results] == [1, 1]
    await live.quiet()


async def test_a_client_that_does_not_resume_loses_its_streams(live: Cluster) -> None:
    """Negative control."""
    progress = {0: 0}
    async with live.client(max_resumes=0) as client:
        running = [asyncio.create_task(stream(client, 0, progress))]
        await advanced(progress, running)
        await kill_router(live, signal.SIGKILL)
        with pytest.raises(GenerateError) as caught:
            await running[0]
    assert caught.value.code == grpc.StatusCode.UNAVAILABLE.name
    await live.quiet()


def ready(live: Cluster) -> bool:
    try:
        return httpx2.get(f"http://{live.http}/readyz").status_code == 200
    except httpx2.TransportError:
        return False


async def test_a_stream_over_http_is_resumed_with_the_id_of_its_last_event(live: Cluster) -> None:
    prompt = list(range(1, 60))
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": FEW, "ignore_eos": True, "stream": True, "return_token_ids": True}
    body["stream_options"] = {"include_event_ids": True}
    tokens: list[int] = []
    last, done, breaks = "", False, 0
    await asyncio.to_thread(live.wait, lambda: ready(live))
    async with httpx2.AsyncClient(base_url=f"http://{live.http}", timeout=60) as client:
        for sends_ids in (False, False, True):  # the second call has nothing but the id, the third has the tokens, too
            more = {"output_so_far": tokens} if sends_ids else {}
            headers = {"last-event-id": last} if last else {}
            try:
                async with client.stream("POST", "/v1/completions", json={**body, **more}, headers=headers) as response:
                    assert response.status_code == 200
                    before = len(tokens)
                    async for line in response.aiter_lines():
                        name, _, value = line.partition(": ")
                        done = done or value == "[DONE]"
                        last = value if name == "id" else last
                        if name == "data" and not done:
                            tokens += json.loads(value)["choices"][0].get("token_ids", [])
                        if name == "id" and not sends_ids and len(tokens) >= before + 20:
                            break
            except httpx2.TransportError:
                pass
            if not done:
                breaks += 1
                await kill_router(live, signal.SIGKILL)
                await asyncio.to_thread(live.wait, lambda: ready(live))
    await live.quiet()
    seed = int(last.split(".")[2])
    assert done and breaks == 2 and tokens == toy_output(prompt, max_tokens=FEW, temperature=1.0, seed=seed)


EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "resume.mjs"


@pytest.fixture(scope="module")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example and the packages that it needs."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("node and npm are not installed")
    folder = tmp_path_factory.mktemp("node")
    packages = ("@grpc/grpc-js@1.14", "@grpc/proto-loader@0.8")
    install = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *packages]
    done = subprocess.run(install, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"npm cannot install {' '.join(packages)}: {done.stderr[-200:]}")
    shutil.copy(EXAMPLE, folder)
    return folder


async def test_the_example_in_node_resumes_its_stream(live: Cluster, node_folder: Path) -> None:
    prompt = list(range(1, 60))
    sampling: dict[str, Any] = {"maxTokens": FEW, "seed": "18446744073709551615", "ignoreEos": True, "temperature": 0.7}
    request = json.dumps({"tokenIds": {"ids": prompt}, "sampling": sampling})
    environment = {**os.environ, "BATON_PROTO": str(EXAMPLE.parents[2] / "proto")}
    running = await asyncio.create_subprocess_exec(
        "node", str(node_folder / EXAMPLE.name), live.grpc, request, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert running.stdout is not None
    text = await asyncio.wait_for(running.stdout.read(20), 60)
    await kill_router(live, signal.SIGKILL)
    rest, told = await asyncio.wait_for(running.communicate(), 120)
    await live.quiet()
    answer = json.loads(told)
    assert answer["ids"] == toy_output(prompt, max_tokens=FEW, seed=2**64 - 1, temperature=0.7) and answer["tries"] >= 1
    assert answer["usage"]["completionTokens"] == FEW
    assert (text + rest).decode().endswith("\n") and len(text + rest) > FEW / 2
