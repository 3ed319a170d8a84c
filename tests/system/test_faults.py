"""Workers are killed, suspended and given wrong bytes at every step of a request. The client receives the tokens of an undisturbed run,
none missing and none repeated, or a clear error. Nothing is left behind. With the toy model, "the same tokens" means exactly the same.
"""

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from faulty_cluster import GREEDY, PROMPT, SHARED, ask, disturbed, expected, faulty
from live_cluster import Cluster, cluster, killer, toy

from baton.client import AsyncClient, GenerateError

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy(tmp_path_factory.mktemp("models") / "toy", step_delay_ms=5)


PAUSE_S = 0.2  # of a client between two requests: requests are on their way all the time, and no core is kept busy
# A worker that a test suspends is not replaced: these tests are about those that wait for it.
FOR_ALL = (*SHARED, "--launcher.hang-s", "120")


@pytest.fixture(scope="module")
def four(model: Path) -> Iterator[Cluster]:
    with faulty(model, "", *FOR_ALL) as live:
        yield live


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[Cluster]:
    with faulty(model, "", *FOR_ALL, prefill=1, decode=1) as live:
        yield live


KILLS = [
    # failpoint, what the result must report
    ("prefill.computed", {"retries": 1}),  # prompt computed, no lease granted yet
    ("prefill.reply", {"retries": 1}),  # lease granted, but the router does not know yet
    ("kv.reserved", {"retries": 1}),  # decode worker, before the handshake
    ("kv.before_read", {"retries": 1}),  # decode worker, lease confirmed
    ("kv.before_check", {"retries": 1}),  # decode worker, bytes copied but not verified
    ("kv.adopted", {"retries": 1}),  # decode worker, lease released, no token yet
]


@pytest.mark.parametrize(("point", "says"), KILLS, ids=[point for point, _ in KILLS])
async def test_tokens_are_exact_when_a_worker_is_killed_around_the_handoff(four: Cluster, point: str, says: dict[str, int]) -> None:
    with disturbed(four, f"{point}=exit") as prompt:
        async with four.client() as client:
            result = await ask(client, prompt)
        assert list(result.token_ids) == expected(prompt)
        assert result.workers["retries"] == says["retries"]
        if point in ("kv.before_read", "kv.before_check", "kv.reserved"):
            # The lease outlived its first reader, so another decode worker read the KV and nothing was recomputed.
            assert result.handoff["blocks"] == 10 and result.handoff["recomputed_tokens"] == 0
        await four.quiet()


@pytest.mark.parametrize("step", [1, 2, 7, 15])
async def test_tokens_are_exact_when_a_decode_worker_is_killed_while_decoding(four: Cluster, step: int) -> None:
    cases: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 11}]
    with disturbed(four, f"decode.step=exit@{step}") as prompt:
        async with four.client() as client:
            for params in cases:
                result = await ask(client, prompt, **params)
                assert list(result.token_ids) == expected(prompt, **params)
        await four.quiet()


async def test_a_request_survives_the_restart_of_the_only_decode_worker(pair: Cluster) -> None:
    with disturbed(pair, "decode.step=exit@5") as prompt:
        async with pair.client() as client:
            result = await ask(client, prompt)
        # On a busy machine the new process may be slow to accept a connection, and is then tried once more.
        assert list(result.token_ids) == expected(prompt) and result.workers["retries"] >= 1
        await pair.quiet()


async def test_retries_are_limited_and_the_error_says_so(model: Path) -> None:
    """Every decode worker always dies at its fourth step."""
    limits = ("--router.max-retries", "1", "--cluster.prove-workers", "false")  # they would die in their proof
    with cluster(model, *limits, prefill=1, decode=2, env={"BATON_FAILPOINTS": "decode.step=exit@4"}) as live:
        async with live.client(max_resumes=0) as client:
            with pytest.raises(GenerateError) as caught:
                await ask(client)
        assert caught.value.code == "UNAVAILABLE" and caught.value.reason == "RETRIES_SPENT"
        assert int(caught.value.metadata["tokens_emitted"]) > 0 and caught.value.retry_after_s is not None


async def test_the_prompt_is_recomputed_when_the_prefill_worker_dies_before_the_read(pair: Cluster) -> None:
    """The holder of the KV is killed while the decode worker waits, so the read fails and the prompt is recomputed."""
    with disturbed(pair, "kv.reserved=sleep:0.7") as prompt:
        with killer(pair.worker_pid("prefill-0"), pair.reached("kv.reserved")):
            async with pair.client() as client:
                result = await ask(client, prompt)
        assert list(result.token_ids) == expected(prompt)
        assert result.handoff["failure"] == "TRANSFER_FAILED" and result.handoff["recomputed_tokens"] == len(PROMPT)
        await asyncio.to_thread(pair.wait, lambda: all("error" not in worker for worker in pair.workers()))
        await pair.quiet()


@pytest.mark.parametrize("point", ["kv.copied", "kv.exported"])
async def test_a_flipped_byte_is_found_and_recomputed(pair: Cluster, point: str) -> None:
    # The flip comes at the second handoff. The first one connects the processes, so only the flip disturbs this request.
    with disturbed(pair, f"{point}=flip@2") as prompt:
        async with pair.client() as client:
            await ask(client, [7, *prompt])
            result = await ask(client, prompt)
            assert list(result.token_ids) == expected(prompt)
            assert result.handoff["failure"] == "DIGEST_MISMATCH" and result.handoff["recomputed_tokens"] == len(PROMPT)
        await pair.quiet()


async def test_under_the_fail_policy_a_flipped_byte_moves_the_request_elsewhere(model: Path) -> None:
    with faulty(model, "kv.copied=flip", "--kv.on-failure", "fail", prefill=1) as live:
        async with live.client() as client:
            result = await ask(client)
        assert list(result.token_ids) == expected() and result.workers["retries"] == 1
        assert result.handoff["recomputed_tokens"] == 0
        await live.quiet()


async def test_a_lease_that_expired_before_the_read_is_not_used(pair: Cluster) -> None:
    with disturbed(pair, "kv.reserved=sleep:2.6") as prompt:
        async with pair.client() as client:
            result = await ask(client, prompt)
        assert list(result.token_ids) == expected(prompt)
        assert result.handoff["failure"] == "LEASE_EXPIRED" and result.handoff["blocks"] == 0
        await pair.quiet()


async def test_a_hung_decode_worker_is_abandoned_and_its_late_tokens_are_dropped(four: Cluster) -> None:
    before = four.log("router-0")
    with disturbed(four) as prompt:
        async with (
            four.client() as client,
            client.generate(token_ids=prompt, max_tokens=400, **GREEDY) as stream,
        ):
            tokens = []
            async for token in stream:
                tokens.append(token.id)
                assert token.index == len(tokens) - 1
                if len(tokens) == 20:
                    busy = [worker for worker in await asyncio.to_thread(four.workers, "decode") if worker["load"]["running"]]
                    stopped = busy[0]
                    os.kill(stopped["pid"], signal.SIGSTOP)
                    await asyncio.to_thread(four.wait, partial(_said, four, "is retried (1) after WORKER_LOST", before))
                    os.kill(stopped["pid"], signal.SIGCONT)
        assert tokens == expected(prompt, max_tokens=400) and stream.result.workers["retries"] == 1
        await asyncio.to_thread(four.wait, lambda: all("error" not in worker for worker in four.workers()))
        await four.quiet()


async def test_a_short_stall_causes_no_retry(four: Cluster) -> None:
    with disturbed(four) as prompt:
        pids = [worker["pid"] for worker in four.workers("decode")]
        async with four.client() as client, client.generate(token_ids=prompt, max_tokens=400, **GREEDY) as stream:
            tokens = []
            async for token in stream:
                tokens.append(token.id)
                if len(tokens) == 20:
                    for pid in pids:
                        os.kill(pid, signal.SIGSTOP)
                    await asyncio.sleep(0.8)
                    for pid in pids:
                        os.kill(pid, signal.SIGCONT)
        assert tokens == expected(prompt, max_tokens=400) and stream.result.workers["retries"] == 0
        await four.quiet()


async def test_a_read_from_a_hung_prefill_worker_fails_and_the_prompt_is_recomputed(pair: Cluster) -> None:
    with disturbed(pair, "kv.reserved=sleep:0.5") as prompt:
        pid = pair.worker_pid("prefill-0")
        with killer(pid, pair.reached("kv.reserved"), number=signal.SIGSTOP):
            async with pair.client() as client:
                result = await ask(client, prompt)
        os.kill(pid, signal.SIGCONT)
        assert list(result.token_ids) == expected(prompt) and result.handoff["failure"] == "TRANSFER_FAILED"
        await asyncio.to_thread(pair.wait, lambda: all("error" not in worker for worker in pair.workers()))
        await pair.quiet()


async def test_without_a_prefill_worker_requests_bypass_prefill_and_without_a_decode_worker_they_are_refused(model: Path) -> None:
    late = ("--launcher.restart-backoff-s", "20", "--router.recover-wait-s", "5")
    with faulty(model, "", *late, prefill=1, decode=1) as live:
        await asyncio.to_thread(live.kill, "prefill-0")
        async with live.client() as client:
            result = await ask(client)
        assert list(result.token_ids) == expected() and result.workers["prefill"] == ""
        await asyncio.to_thread(live.kill, "decode-0")
        async with live.client(max_resumes=0) as client:
            first = await asyncio.gather(ask(client, timeout_s=30), return_exceptions=True)
            assert (
                isinstance(first[0], GenerateError) and first[0].code == "UNAVAILABLE"
            )  # this request noticed the loss and waited for another worker
            with pytest.raises(GenerateError) as caught:
                await ask(client, timeout_s=30)
        assert caught.value.reason == "NO_WORKER" and caught.value.retry_after_s is not None


async def test_killing_the_router_frees_what_its_requests_held(four: Cluster) -> None:
    with disturbed(four) as prompt:
        async with four.client(max_resumes=0) as client:
            requests = [asyncio.create_task(ask(client, [i, *prompt], max_tokens=2000)) for i in range(10)]
            await asyncio.to_thread(four.wait, lambda: sum(worker["load"]["running"] for worker in four.workers("decode")) >= 10)
            os.kill(four.status()["router"]["pid"], signal.SIGKILL)
            ends = await asyncio.gather(*requests, return_exceptions=True)
            assert all(isinstance(end, GenerateError) and end.code == "UNAVAILABLE" for end in ends)
        await asyncio.to_thread(four.wait, lambda: len(four.workers()) == 4)
        await four.quiet()
        async with four.client() as client:
            assert list((await ask(client, prompt)).token_ids) == expected(prompt)


async def test_a_rolling_restart_under_load_loses_no_request(four: Cluster) -> None:
    with disturbed(four):
        lost: list[BaseException] = []
        served = 0
        until = asyncio.Event()

        async def load(client: AsyncClient, seed: int) -> None:
            nonlocal served
            rng = random.Random(seed)
            while not until.is_set():
                prompt = [rng.randrange(256) for _ in range(rng.randrange(20, 200))]
                try:
                    assert list((await ask(client, prompt)).token_ids) == expected(prompt)
                    served += 1
                    await asyncio.sleep(PAUSE_S)
                except (GenerateError, AssertionError) as error:
                    lost.append(error)

        async with four.client() as client, asyncio.TaskGroup() as group:
            for seed in range(4):
                group.create_task(load(client, seed))
            try:
                for name in ("prefill-0", "decode-0", "prefill-1", "decode-1"):
                    before = await asyncio.to_thread(_incarnations, four)
                    await asyncio.to_thread(four.kill, name, signal.SIGTERM)
                    await asyncio.to_thread(four.wait, partial(_restarted, four, name, before[name]))
            finally:
                until.set()
        assert not lost and served > 20
        await four.quiet()


def _said(live: Cluster, words: str, before: str) -> bool:
    """Whether the router has logged these words since its log was `before`."""
    return words in live.log("router-0").removeprefix(before)


def _restarted(live: Cluster, name: str, before: int) -> bool:
    return _incarnations(live).get(name, 0) > before


def _incarnations(live: Cluster) -> dict[str, int]:
    return {worker["name"]: worker["incarnation"] for worker in live.workers() if "error" not in worker and worker["state"] == "ready"}
