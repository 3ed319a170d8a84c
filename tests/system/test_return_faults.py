"""KV that comes back, with real processes: the second turn of a conversation is fetched from the decode worker, and what happens when
either side dies, hangs or lies in the middle of that."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from faulty_cluster import ask, expected, faulty
from live_cluster import Cluster, toy

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
    """What may be fetched is fetched. The prefill worker has no early opening, so the only reads are of whole handles: the first turn has
    one, on the decode worker; the second one begins with the fetch."""
    fixed = ("--router.fetch-tokens", "16", "--router.bypass-tokens", "0", "--kv.live", "false", "--launcher.restart-backoff-s", "2")
    with faulty(model, failpoints, *fixed, *flags, prefill=1, decode=decode) as live:
        yield live


def second(first: Result) -> list[int]:
    return [*PROMPT, *first.token_ids, *range(50, 90)]


async def first_turn(live: Cluster, client: AsyncClient) -> list[int]:
    """The prompt of the second turn. The prefill worker that has computed the first one is another process now, with nothing cached."""
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


async def test_nothing_is_fetched_where_that_is_turned_off(model: Path) -> None:
    """Negative control."""
    with talking(model, "", "--router.fetch-tokens", "0") as live:
        async with live.client() as client:
            prompt = await first_turn(live, client)
            result = await ask(client, prompt)
        assert list(result.token_ids) == expected(prompt) and live.last()["fetched_tokens"] == 0
        await live.quiet()


async def test_fetching_worker_killed_with_the_kv_in_its_hands(model: Path) -> None:
    """The only prefill worker dies: the decode worker, which caches most of the prompt, computes the rest itself."""
    with talking(model, "prefill.fetched=exit") as live:
        async with live.client() as client:
            prompt = await first_turn(live, client)
            result = await ask(client, prompt)
        assert list(result.token_ids) == expected(prompt) and result.workers["retries"] == 1
        await live.quiet()


@pytest.mark.parametrize("point", ["kv.before_read", "kv.before_check"])
async def test_fetching_worker_killed_in_the_middle_of_the_fetch(model: Path, point: str) -> None:
    """The decode worker bypassed the first turn: the first process that reads is the prefill worker, fetching."""
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
async def test_source_lost_in_the_middle_of_the_fetch(model: Path, point: str, number: signal.Signals) -> None:
    """The reader stands still at the point while its source is lost. The prompt is computed, and another decode worker takes it over."""
    with talking(model, f"{point}=sleep:0.7", "--launcher.hang-s", "120", decode=2) as live:
        async with live.client() as client:
            prompt, name = await bypassed_turn(live, client)
            source = next(worker["pid"] for worker in live.workers("decode") if worker["name"] == name)
            request = asyncio.create_task(ask(client, prompt))
            await at(live, point)
            os.kill(source, number)
            try:
                result = await request
            finally:
                if number == signal.SIGSTOP:
                    os.kill(source, signal.SIGCONT)
        assert list(result.token_ids) == expected(prompt) and result.workers["retries"] <= 2
        await asyncio.to_thread(live.wait, lambda: all("error" not in worker for worker in live.workers()))
        await live.quiet()


async def test_flipped_byte_is_found_and_computed(model: Path) -> None:
    with talking(model, "kv.copied=flip") as live:
        async with live.client() as client:
            prompt, _ = await bypassed_turn(live, client)
            result = await ask(client, prompt)
        assert list(result.token_ids) == expected(prompt)
        assert live.last()["fetched_tokens"] == 0 and result.workers["retries"] == 0
        await live.quiet()


async def test_client_that_leaves_during_the_fetch_frees_everything(model: Path) -> None:
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


async def at(live: Cluster, point: str) -> None:
    """Until a process has come to the failpoint."""
    await asyncio.to_thread(live.wait, (Path(live.env["BATON_FAILPOINTS_ONCE"]) / point).exists)


async def bypassed_turn(live: Cluster, client: AsyncClient) -> tuple[list[int], str]:
    """The prompt of the second turn, and the worker that caches most of it: the decode worker did the first turn alone, while no prefill
    worker was there."""
    before = live.incarnation("prefill-0")
    await asyncio.to_thread(live.kill, "prefill-0")
    first = await ask(client, PROMPT)
    assert first.workers["prefill"] == "" and first.handoff["blocks"] == 0

    await asyncio.to_thread(live.wait, lambda: live.incarnation("prefill-0") != before)
    await asyncio.sleep(0.5)  # the router hears of the blocks
    return second(first), first.workers["decode"]
