"""A worker hangs: its event loop is blocked, or the thread of its engine waits forever, while its process and connections stay alive.

The router passes it over within `router.hang_s` and continues its streams elsewhere. The supervisor kills and restarts it.
"""

import asyncio
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from live_cluster import Cluster, cluster, toy, toy_output

from baton.client import AsyncClient, Result

pytestmark = pytest.mark.system
SHORT = list(range(1, 21))  # the decode worker computes this prompt itself
LONG = list(range(1, 151))
TOKENS = 300


@contextmanager
def hanging(path: Path, failpoint: str, *flags: str, prefill: int = 1, decode: int = 2) -> Iterator[Cluster]:
    """The first worker that reaches the failpoint hangs for longer than the test lasts."""
    with tempfile.TemporaryDirectory() as points:
        env, model = {"BATON_FAILPOINTS_FOLDER": points}, toy(path / "toy", step_delay_ms=5)
        with cluster(model, *flags, prefill=prefill, decode=decode, env=env) as live, live.faults(failpoint):
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
async def test_streams_of_a_hung_decode_worker_continue_elsewhere(tmp_path: Path, failpoint: str, why: str) -> None:
    with hanging(tmp_path, failpoint, "--launcher.hang-s", "6") as live:
        before = {worker["name"]: worker["incarnation"] for worker in live.workers()}
        async with live.client() as client:
            streams = [asyncio.create_task(ask(client, [i, *SHORT])) for i in range(6)]
            await asyncio.to_thread(live.wait, lambda: "has hung for" in live.log("router-0"))
            found = re.search(r"(decode-\d) has hung for ([\d.]+) s", live.log("router-0"))
            assert found and float(found[2]) < 2.0
            # The worker is passed over immediately: new requests are served normally.
            late = await asyncio.gather(*(ask(client, [7, i, *SHORT], 20) for i in range(6)))
            assert not any(result.workers["retries"] for result in late)
            retries = [result.workers["retries"] for result in await asyncio.gather(*streams)]
            assert 0 < sum(retries) < 6 and max(retries) == 1, "the streams of the other worker were disturbed"
        name = found[1]
        assert live.log("router-0").count(f"{name} hangs: its requests continue elsewhere") == 1
        await asyncio.to_thread(live.wait, lambda: fresh(live, name, before[name]))
        assert why in (live.logs.parent / f"{live.name}-up.log").read_text()
        await live.quiet()


async def test_requests_on_a_hung_prefill_worker_are_retried(tmp_path: Path) -> None:
    with hanging(tmp_path, "prefill.computed=sleep:100", "--launcher.hang-s", "6", prefill=2, decode=1) as live:
        async with live.client() as client:
            results = await asyncio.gather(*(ask(client, [i, *LONG], 20) for i in range(6)))
            assert max(result.workers["retries"] for result in results) == 1
        await asyncio.to_thread(live.wait, lambda: all("error" not in worker for worker in live.workers()))
        await live.quiet()


async def test_without_probes_a_hang_goes_unnoticed(tmp_path: Path) -> None:
    """Negative control: with very long timeouts the streams stop."""
    with hanging(tmp_path, "decode.step=sleep:100@20", "--router.hang-s", "500", "--launcher.hang-s", "600") as live:
        async with live.client() as client:
            streams = [asyncio.create_task(ask(client, [i, *SHORT])) for i in range(6)]
            done, waiting = await asyncio.wait(streams, timeout=8)
            assert done and waiting
            for stream in waiting:
                stream.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        for worker in live.status()["workers"]:
            if "error" in worker:
                live.kill(worker["name"])


def fresh(live: Cluster, name: str, before: int) -> bool:
    return any(worker["name"] == name and worker["incarnation"] > before and "error" not in worker for worker in live.workers())
