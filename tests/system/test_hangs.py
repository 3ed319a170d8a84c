"""A worker hangs: its event loop is blocked, or the thread of its engine waits forever, while its process and connections stay alive.

The router passes it over within `router.hang_s` and continues its streams elsewhere. The supervisor kills and restarts it.
"""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_cluster import SHARED, disturbed, faulty
from live_cluster import Cluster, toy, toy_output

from baton.client import AsyncClient, Result

pytestmark = pytest.mark.system
SHORT = list(range(1, 21))  # the decode worker computes this prompt itself
LONG = list(range(1, 151))
TOKENS = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy(tmp_path_factory.mktemp("models") / "toy", step_delay_ms=5)


@pytest.fixture(scope="module")
def four(model: Path) -> Iterator[Cluster]:
    """The first worker that reaches a failpoint of a test hangs until it is replaced."""
    with faulty(model, "", *SHARED, "--launcher.hang-s", "6") as live:
        yield live


async def ask(client: AsyncClient, prompt: list[int], tokens: int = TOKENS) -> Result:
    async with client.generate(token_ids=prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True, timeout_s=60) as stream:
        got = [token.id async for token in stream]
        assert got == toy_output(prompt, max_tokens=tokens)
        return stream.result


@pytest.mark.parametrize(
    ("failpoint", "why"),
    [
        ("decode.step=sleep:100@20", "it has shown no sign of life"),  # called on the event loop
        ("engine.step=sleep:100@20", "its engine has made no progress"),  # called in the engine's thread
    ],
    ids=["event loop", "engine"],
)
async def test_streams_of_a_hung_decode_worker_continue_elsewhere(four: Cluster, failpoint: str, why: str) -> None:
    old_router, old_up = four.log("router-0"), log_of_up(four)
    with disturbed(four, failpoint, SHORT) as prompt:
        before = {worker["name"]: worker["incarnation"] for worker in four.workers()}
        async with four.client() as client:
            streams = [asyncio.create_task(ask(client, [i, *prompt])) for i in range(6)]
            await asyncio.to_thread(four.wait, lambda: "has hung for" in four.log("router-0").removeprefix(old_router))
            found = re.search(r"(decode-\d) has hung for ([\d.]+) s", four.log("router-0").removeprefix(old_router))
            assert found and float(found[2]) < 2.0
            # The worker is passed over immediately: new requests are served normally.
            late = await asyncio.gather(*(ask(client, [7, i, *prompt], 20) for i in range(6)))
            assert not any(result.workers["retries"] for result in late)
            retries = [result.workers["retries"] for result in await asyncio.gather(*streams)]
            assert 0 < sum(retries) < 6 and max(retries) == 1, "the streams of the other worker were disturbed"
        name = found[1]
        assert four.log("router-0").removeprefix(old_router).count(f"{name} hangs: its requests continue elsewhere") == 1
        await asyncio.to_thread(four.wait, lambda: fresh(four, name, before[name]))
        assert why in log_of_up(four).removeprefix(old_up)
        await four.quiet()


async def test_requests_on_a_hung_prefill_worker_are_retried(four: Cluster) -> None:
    with disturbed(four, "prefill.computed=sleep:100", LONG) as prompt:
        async with four.client() as client:
            results = await asyncio.gather(*(ask(client, [i, *prompt], 20) for i in range(6)))
            assert max(result.workers["retries"] for result in results) == 1
        await asyncio.to_thread(four.wait, lambda: all("error" not in worker for worker in four.workers()))
        await four.quiet()


async def test_without_probes_a_hang_goes_unnoticed(model: Path) -> None:
    """Negative control: with very long timeouts the streams stop."""
    flags = ("--router.hang-s", "500", "--launcher.hang-s", "600")
    with faulty(model, "decode.step=sleep:100@20", *flags, prefill=1) as live:
        async with live.client() as client:
            streams = [asyncio.create_task(ask(client, [i, *SHORT])) for i in range(6)]
            await next(asyncio.as_completed(streams))  # one of the other worker
            done, waiting = await asyncio.wait(streams, timeout=4)
            assert done and waiting
            for stream in waiting:
                stream.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        for worker in live.status()["workers"]:
            if "error" in worker:
                live.kill(worker["name"])


def log_of_up(live: Cluster) -> str:
    return (live.logs.parent / f"{live.name}-up.log").read_text()


def fresh(live: Cluster, name: str, before: int) -> bool:
    return any(worker["name"] == name and worker["incarnation"] > before and "error" not in worker for worker in live.workers())
