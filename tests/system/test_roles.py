"""A worker's roles change while requests run. Every stream stays exact, and the load follows the roles."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
from live_cluster import Cluster, cluster, toy, toy_output

from baton.client import AsyncClient, Result

pytestmark = pytest.mark.system


async def ask(client: AsyncClient, prompt: list[int], max_tokens: int, running: asyncio.Event | None = None) -> Result:
    async with client.generate(token_ids=prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, timeout_s=60) as stream:
        async for _ in stream:
            if running is not None:
                running.set()
        return stream.result


PROMPT = list(range(1, 100))


def apart(number: int) -> list[int]:
    """A prompt that shares no prefix with another: load alone decides who computes it."""
    return [number, *PROMPT]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = toy(tmp_path_factory.mktemp("models") / "toy", step_delay_ms=2)
    with cluster(model, "--router.bypass-tokens", "0", prefill=1, decode=2) as running:
        yield running


def workers(live: Cluster) -> dict[str, dict[str, Any]]:
    return {worker["name"]: worker for worker in live.status()["workers"]}


def until(live: Cluster, name: str, roles: list[str]) -> None:
    deadline = time.monotonic() + 60
    while workers(live)[name]["roles"] != roles:
        assert time.monotonic() < deadline, workers(live)[name]
        time.sleep(0.05)


async def test_a_decode_worker_becomes_a_prefill_worker_and_back(live: Cluster) -> None:
    names = sorted(name for name, worker in workers(live).items() if worker["pool"] == "decode")
    async with live.client() as client:
        running = asyncio.Event()
        streams = [asyncio.create_task(ask(client, apart(i), 150, running)) for i in range(6)]
        await asyncio.wait_for(running.wait(), 30)
        changed = await asyncio.to_thread(live.here, "roles", names[0], "prefill", "--name", live.name)
        assert f"{names[0]} serves prefill" in changed.stdout
        for i, result in enumerate(await asyncio.gather(*streams)):
            assert list(result.token_ids) == toy_output(apart(i), max_tokens=150)
        await asyncio.to_thread(until, live, names[0], ["prefill"])
        later = await asyncio.gather(*(ask(client, apart(50 + i), max_tokens=20) for i in range(12)))
        assert {result.workers["decode"] for result in later} == {names[1]}
        assert names[0] in {result.workers["prefill"] for result in later}
        for i, result in enumerate(later):
            assert list(result.token_ids) == toy_output(apart(50 + i), max_tokens=20)
        await asyncio.to_thread(live.here, "roles", names[0], "prefill", "decode", "--name", live.name)
        await asyncio.to_thread(until, live, names[0], ["prefill", "decode"])
        # Until its next report, the worker still looks as loaded as it was by the prefills above.
        decoded: set[str] = set()
        deadline = time.monotonic() + 60
        while names[0] not in decoded:
            assert time.monotonic() < deadline, "it serves both roles and decodes nothing"
            both = await asyncio.gather(*(ask(client, apart(100 + i), max_tokens=20) for i in range(12)))
            decoded |= {result.workers["decode"] for result in both}
            for i, result in enumerate(both):
                assert list(result.token_ids) == toy_output(apart(100 + i), max_tokens=20)
        await asyncio.to_thread(live.here, "roles", names[0], "decode", "--name", live.name)
        await asyncio.to_thread(until, live, names[0], ["decode"])
    await live.quiet()


@pytest.mark.parametrize(
    ("arguments", "words"), [(("nobody", "decode"), "there is no worker 'nobody'"), (("NAME", "cook"), "must be one or both")]
)
def test_an_unknown_worker_or_role_is_refused_by_name(live: Cluster, arguments: tuple[str, str], words: str) -> None:
    name = next(name for name, worker in workers(live).items() if worker["pool"] == "decode")
    done = live.here("roles", arguments[0].replace("NAME", name), arguments[1], "--name", live.name)
    assert done.returncode != 0 and words in done.stderr
