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
from faulty_cluster import ask, disturbed, expected, faulty
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
    fetching = ("--router.fetch-tokens", "16", "--router.bypass-tokens", "0", "--kv.live", "false")
    sharing = ("--launcher.restart-backoff-s", "0.5", "--launcher.restart-backoff-max-s", "0.5", "--router.outlier-share", "0")
    unproven = ("--cluster.prove-workers", "false")  # a proof reads KV, too, and would meet the failpoint
    with faulty(model, failpoints, *fetching, *sharing, *unproven, *flags, prefill=1, decode=decode) as live:
        yield live


FOR_ALL = ("--router.hang-s", "8", "--launcher.hang-s", "120")  # a process that waits at a failpoint is neither lost nor replaced


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[Cluster]:
    with talking(model, "", *FOR_ALL) as live:
        yield live


@pytest.fixture(scope="module")
def three(model: Path) -> Iterator[Cluster]:
    with talking(model, "", "--launcher.hang-s", "120", decode=2) as live:
        yield live


def second(opening: list[int], first: Result) -> list[int]:
    return [*opening, *first.token_ids, *range(50, 90)]


async def first_turn(live: Cluster, client: AsyncClient, opening: list[int]) -> list[int]:
    """Returns the prompt of the second turn. The prefill worker that computed the first turn is then restarted, with an empty cache."""
    prompt = second(opening, await ask(client, opening))
    await live.quiet()
    before = live.incarnation("prefill-0")
    await asyncio.to_thread(live.kill, "prefill-0", signal.SIGTERM)

    await asyncio.to_thread(live.wait, lambda: live.incarnation("prefill-0") != before)
    return prompt


async def test_the_second_turn_is_fetched_from_the_decode_worker(pair: Cluster) -> None:
    with disturbed(pair, prompt=PROMPT) as opening:
        async with pair.client() as client:
            prompt = await first_turn(pair, client, opening)
            result = await ask(client, prompt)
        assert list(result.token_ids) == expected(prompt) and result.workers["retries"] == 0
        assert pair.last()["fetched_tokens"] == CACHED and result.handoff["recomputed_tokens"] == 0
        await pair.quiet()


async def test_nothing_is_fetched_when_fetching_is_off(model: Path) -> None:
    """Negative control."""
    with talking(model, "", "--router.fetch-tokens", "0") as live:
        async with live.client() as client:
            prompt = await first_turn(live, client, PROMPT)
            result = await ask(client, prompt)
        assert list(result.token_ids) == expected(prompt) and live.last()["fetched_tokens"] == 0
        await live.quiet()


async def test_a_request_survives_a_prefill_worker_killed_after_its_fetch(pair: Cluster) -> None:
    """The only prefill worker dies, so the decode worker, which caches most of the prompt, computes the rest itself."""
    with disturbed(pair, "prefill.fetched=exit", PROMPT) as opening:
        async with pair.client() as client:
            prompt = await first_turn(pair, client, opening)
            result = await ask(client, prompt)
        assert list(result.token_ids) == expected(prompt) and result.workers["retries"] == 1
        await pair.quiet()


@pytest.mark.parametrize("point", ["kv.before_read", "kv.before_check"])
async def test_a_request_survives_a_prefill_worker_killed_during_its_fetch(pair: Cluster, point: str) -> None:
    """The first turn bypassed prefill, so the first process that reads is the prefill worker, in its fetch."""
    with disturbed(pair, f"{point}=exit", PROMPT) as opening:
        async with pair.client() as client:
            prompt, _ = await bypassed_turn(pair, client, opening)
            reader = pair.incarnation("prefill-0")
            holder = pair.incarnation("decode-0")
            result = await ask(client, prompt)
        assert list(result.token_ids) == expected(prompt) and result.workers["retries"] == 1
        await asyncio.to_thread(pair.wait, lambda: pair.incarnation("prefill-0") != reader)
        assert pair.incarnation("decode-0") == holder
        await pair.quiet()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
@pytest.mark.parametrize("point", ["kv.before_read", "kv.before_check"])
async def test_a_request_survives_the_loss_of_the_source_during_the_fetch(three: Cluster, point: str, number: signal.Signals) -> None:
    """The reader waits at the failpoint while its source is lost. The prompt is computed, and another decode worker takes over."""
    with disturbed(three, f"{point}=sleep:0.7", PROMPT) as opening:
        async with three.client() as client:
            prompt, name = await bypassed_turn(three, client, opening)
            source = next(worker["pid"] for worker in three.workers("decode") if worker["name"] == name)
            try:
                with killer(source, three.reached(point), number=number):
                    result = await ask(client, prompt)
            finally:
                if number == signal.SIGSTOP:
                    os.kill(source, signal.SIGCONT)
        assert list(result.token_ids) == expected(prompt) and result.workers["retries"] <= 2
        await asyncio.to_thread(three.wait, lambda: all("error" not in worker for worker in three.workers()))
        await three.quiet()


async def test_a_flipped_byte_is_found_and_recomputed(pair: Cluster) -> None:
    with disturbed(pair, "kv.copied=flip", PROMPT) as opening:
        async with pair.client() as client:
            prompt, _ = await bypassed_turn(pair, client, opening)
            result = await ask(client, prompt)
        assert list(result.token_ids) == expected(prompt)
        assert pair.last()["fetched_tokens"] == 0 and result.workers["retries"] == 0
        await pair.quiet()


async def test_a_client_that_disconnects_during_the_fetch_frees_everything(pair: Cluster) -> None:
    with disturbed(pair, "kv.before_check=sleep:0.7", PROMPT) as opening:
        async with pair.client() as client:
            prompt, _ = await bypassed_turn(pair, client, opening)
            request = asyncio.create_task(ask(client, prompt))
            await at(pair, "kv.before_check")
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
            await pair.quiet()
            assert list((await ask(client, prompt)).token_ids) == expected(prompt)
        await pair.quiet()


@pytest.mark.parametrize("point", ["kv.before_read", "kv.before_check"])
async def test_a_deadline_during_the_fetch_frees_everything(pair: Cluster, point: str) -> None:
    """The reader reaches the failpoint within the two seconds that the request has, and waits there until they are over. Over HTTP only the
    router ends a request that is late; a gRPC client would, too."""
    with disturbed(pair, f"{point}=sleep:2.2", PROMPT) as opening:
        async with pair.client() as client, httpx2.AsyncClient(base_url=f"http://{pair.http}", timeout=60) as http:
            prompt, _ = await bypassed_turn(pair, client, opening)
            body = {"model": "toy", "prompt": prompt, "max_tokens": 24}
            late = await http.post("/v1/completions", json=body, headers={"x-request-timeout-ms": "2000"})
            assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline")
            await pair.quiet()
            record = pair.last()
            assert (record["reason"], record["laps"][-1]["stage"], record["retries"]) == ("DEADLINE", "prefill", 0)
            assert list((await ask(client, prompt)).token_ids) == expected(prompt)
        await pair.quiet()


async def at(live: Cluster, point: str) -> None:
    """Waits until a process has reached the failpoint."""
    await asyncio.to_thread(live.wait, live.reached(point).exists)


async def bypassed_turn(live: Cluster, client: AsyncClient, opening: list[int]) -> tuple[list[int], str]:
    """Returns the prompt of the second turn and the worker that caches most of it: the decode worker that computed the first turn alone,
    while there was no prefill worker."""
    before = live.incarnation("prefill-0")
    await asyncio.to_thread(live.kill, "prefill-0")
    first = await ask(client, opening)
    assert first.workers["prefill"] == "" and first.handoff["blocks"] == 0

    await asyncio.to_thread(live.wait, lambda: live.incarnation("prefill-0") != before)
    await asyncio.sleep(0.5)  # the router learns about the blocks
    return second(opening, first), first.workers["decode"]
