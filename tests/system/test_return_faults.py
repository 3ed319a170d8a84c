"""KV that comes back, with real processes: the second turn of a conversation is fetched from the decode worker, and either side may die,
hang or send wrong bytes during the fetch."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
from faulty_cluster import ask, expected, faulty
from live_cluster import Cluster, killer, toy

from baton.client import AsyncClient, Result

pytestmark = pytest.mark.system
BLOCK, ANSWER = 16, 24
PROMPT = [i * 7 % 251 for i in range(200)]
CACHED = (len(PROMPT) + ANSWER - 1) // BLOCK * BLOCK  # positions of full blocks in the decode worker after the first turn


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy(tmp_path_factory.mktemp("models") / "toy", step_delay_ms=5)


@contextmanager
def talking(model: Path, failpoints: str = "", *flags: str, decode: int = 1) -> Iterator[Cluster]:
    """A cluster that fetches whatever it can. Live transfer is off, so only complete handles are read: the first turn has one read, on the
    decode worker, and the second turn begins with the fetch."""
    fixed = ("--router.fetch-tokens", "16", "--router.bypass-tokens", "0", "--kv.live", "false", "--launcher.restart-backoff-s", "2")
    with faulty(model, failpoints, *fixed, *flags, prefill=1, decode=decode) as live:
        yield live


def second(first: Result) -> list[int]:
    return [*PROMPT, *first.token_ids, *range(50, 90)]


async def first_turn(live: Cluster, client: AsyncClient) -> list[int]:
    """Returns the prompt of the second turn. The prefill worker that computed the first turn is then restarted, with an empty cache."""
    prompt = second(await ask(client, PROMPT))
    await live.quiet()
    before = live.incarnation("prefill-0")
    await asyncio.to_thread(live.kill, "prefill-0", signal.SIGTERM)

    await asyncio.to_thread(live.wait, lambda: live.incarnation("prefill-0") != before)
    return prompt


async def test_the_second_turn_is_fetched_from_the_decode_worker(model: Path) -> None:
    with talking(model) as live:
        async with live.client() as client:
            prompt = await first_turn(live, client)
            result = await ask(client, prompt)
        assert list(result.token_ids) == expected(prompt) and result.workers["retries"] == 0
        assert live.last()["fetched_tokens"] == CACHED and result.handoff["recomputed_tokens"] == 0
        await live.quiet()


async def test_nothing_is_fetched_when_fetching_is_off(model: Path) -> None:
    """Negative control."""
    with talking(model, "", "--router.fetch-tokens", "0") as live:
        async with live.client() as client:
            prompt = await first_turn(live, client)
            result = await ask(client, prompt)
        assert list(result.token_ids) == expected(prompt) and live.last()["fetched_tokens"] == 0
        await live.quiet()


async def test_a_request_survives_a_prefill_worker_killed_after_its_fetch(model: Path) -> None:
    """The only prefill worker dies, so the decode worker, which caches most of the prompt, computes the rest itself."""
    with talking(model, "prefill.fetched=exit") as live:
        async with live.client() as client:
            prompt = await first_turn(live, client)
            result = await ask(client, prompt)
        assert list(result.token_ids) == expected(prompt) and result.workers["retries"] == 1
        await live.quiet()


@pytest.mark.parametrize("point", ["kv.before_read", "kv.before_check"])
async def test_a_request_survives_a_prefill_worker_killed_during_its_fetch(model: Path, point: str) -> None:
    """The first turn bypassed prefill, so the first process that reads is the prefill worker, in its fetch."""
    with talking(model, f"{point}=exit") as live:
        async with live.client() as client:
            prompt, _ = await bypassed_turn(live, client)
            reader = live.incarnation("prefill-0")
            holder = live.incarnation("decode-0")
            result = await ask(client, prompt)
        assert list(result.token_ids) == expected(prompt) and result.workers["retries"] == 1
        await asyncio.to_thread(live.wait, lambda: live.incarnation("prefill-0") != reader)
        assert live.incarnation("decode-0") == holder
        await live.quiet()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
@pytest.mark.parametrize("point", ["kv.before_read", "kv.before_check"])
async def test_a_request_survives_the_loss_of_the_source_during_the_fetch(model: Path, point: str, number: signal.Signals) -> None:
    """The reader waits at the failpoint while its source is lost. The prompt is computed, and another decode worker takes over."""
    with talking(model, f"{point}=sleep:0.7", "--launcher.hang-s", "120", decode=2) as live:
        async with live.client() as client:
            prompt, name = await bypassed_turn(live, client)
            source = next(worker["pid"] for worker in live.workers("decode") if worker["name"] == name)
            try:
                with killer(source, live.reached(point), number=number):
                    result = await ask(client, prompt)
            finally:
                if number == signal.SIGSTOP:
                    os.kill(source, signal.SIGCONT)
        assert list(result.token_ids) == expected(prompt) and result.workers["retries"] <= 2
        await asyncio.to_thread(live.wait, lambda: all("error" not in worker for worker in live.workers()))
        await live.quiet()


async def test_a_flipped_byte_is_found_and_recomputed(model: Path) -> None:
    with talking(model, "kv.copied=flip") as live:
        async with live.client() as client:
            prompt, _ = await bypassed_turn(live, client)
            result = await ask(client, prompt)
        assert list(result.token_ids) == expected(prompt)
        assert live.last()["fetched_tokens"] == 0 and result.workers["retries"] == 0
        await live.quiet()


async def test_a_client_that_disconnects_during_the_fetch_frees_everything(model: Path) -> None:
    with talking(model, "kv.before_check=sleep:0.7") as live:
        async with live.client() as client:
            prompt, _ = await bypassed_turn(live, client)
            request = asyncio.create_task(ask(client, prompt))
            await at(live, "kv.before_check")
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
            await live.quiet()
            assert list((await ask(client, prompt)).token_ids) == expected(prompt)
        await live.quiet()


@pytest.mark.parametrize("point", ["kv.before_read", "kv.before_check"])
async def test_a_deadline_during_the_fetch_frees_everything(model: Path, point: str) -> None:
    """The reader reaches the failpoint within the two seconds that the request has, and waits there until they are over. Over HTTP only the
    router ends a request that is late; a gRPC client would, too."""
    with talking(model, f"{point}=sleep:2.2", "--router.hang-s", "8", "--launcher.hang-s", "120") as live:
        async with live.client() as client, httpx2.AsyncClient(base_url=f"http://{live.http}", timeout=60) as http:
            prompt, _ = await bypassed_turn(live, client)
            body = {"model": "toy", "prompt": prompt, "max_tokens": 24}
            late = await http.post("/v1/completions", json=body, headers={"x-request-timeout-ms": "2000"})
            assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline")
            await live.quiet()
            record = live.last()
            assert (record["reason"], record["laps"][-1]["stage"], record["retries"]) == ("DEADLINE", "prefill", 0)
            assert list((await ask(client, prompt)).token_ids) == expected(prompt)
        await live.quiet()


async def at(live: Cluster, point: str) -> None:
    """Waits until a process has reached the failpoint."""
    await asyncio.to_thread(live.wait, live.reached(point).exists)


async def bypassed_turn(live: Cluster, client: AsyncClient) -> tuple[list[int], str]:
    """Returns the prompt of the second turn and the worker that caches most of it: the decode worker that computed the first turn alone,
    while there was no prefill worker."""
    before = live.incarnation("prefill-0")
    await asyncio.to_thread(live.kill, "prefill-0")
    first = await ask(client, PROMPT)
    assert first.workers["prefill"] == "" and first.handoff["blocks"] == 0

    await asyncio.to_thread(live.wait, lambda: live.incarnation("prefill-0") != before)
    await asyncio.sleep(0.5)  # the router learns about the blocks
    return second(first), first.workers["decode"]
