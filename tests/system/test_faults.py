"""Workers are killed, hung and lied to at every step of a request. The client gets the tokens of the undisturbed run: none missing, none
twice; or an honest error. Afterwards nothing is left. The toy model makes "the same tokens" an exact statement.
"""

import asyncio
import json
import os
import random
import signal
from pathlib import Path

import pytest
import redis
from faulty_cluster import GREEDY, PROMPT, ask, expected, faulty
from live_cluster import Cluster, cluster, toy

from baton.client import AsyncClient, GenerateError

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy(tmp_path_factory.mktemp("models") / "toy", step_delay_ms=5)


KILLS = [
    # failpoint, what the result must say
    ("prefill.computed", {"retries": 1}),  # prompt computed, lease not granted
    ("prefill.reply", {"retries": 1}),  # lease granted, nobody knows of it
    ("kv.reserved", {"retries": 1}),  # decode worker, before the handshake
    ("kv.before_read", {"retries": 1}),  # decode worker, lease confirmed
    ("kv.before_check", {"retries": 1}),  # decode worker, bytes copied, nothing believed yet
    ("kv.adopted", {"retries": 1}),  # decode worker, lease released, no token yet
]


@pytest.mark.parametrize(("point", "says"), KILLS, ids=[point for point, _ in KILLS])
async def test_worker_killed_around_the_handoff(model: Path, point: str, says: dict[str, int]) -> None:
    with faulty(model, f"{point}=exit") as live:
        async with live.client() as client:
            result = await ask(client)
        assert list(result.token_ids) == expected()
        assert result.workers["retries"] == says["retries"]
        if point in ("kv.before_read", "kv.before_check", "kv.reserved"):
            # The lease outlived its first reader: another decode worker read it, and nothing was computed again.
            assert result.handoff["blocks"] == 10 and result.handoff["recomputed_tokens"] == 0
        await live.quiet()


@pytest.mark.parametrize("step", [1, 2, 7, 15])
async def test_decode_worker_killed_while_decoding(model: Path, step: int) -> None:
    with faulty(model, f"decode.step=exit@{step}") as live:
        async with live.client() as client:
            for params in ({}, {"temperature": 1.0, "seed": 11}):
                result = await ask(client, **params)
                assert list(result.token_ids) == expected(**params)
        await live.quiet()


async def test_only_decode_worker_dies_and_comes_back(model: Path) -> None:
    with faulty(model, "decode.step=exit@5", prefill=1, decode=1) as live:
        async with live.client() as client:
            result = await ask(client)
        assert list(result.token_ids) == expected() and result.workers["retries"] == 1
        await live.quiet()


async def test_retries_are_bounded_and_the_error_is_honest(model: Path) -> None:
    """Every decode worker dies at its fourth step, for ever."""
    with cluster(model, "--router.max-retries", "1", prefill=1, decode=2, env={"BATON_FAILPOINTS": "decode.step=exit@4"}) as live:
        async with live.client() as client:
            with pytest.raises(GenerateError) as caught:
                await ask(client)
        assert caught.value.code == "UNAVAILABLE" and caught.value.reason == "RETRIES_SPENT"
        assert int(caught.value.metadata["tokens_emitted"]) > 0 and caught.value.retry_after_s is not None


async def test_prefill_worker_dies_between_first_token_and_read(model: Path) -> None:
    """The decode worker waits on its side while the holder of the KV is killed: the read fails and the prompt is computed again."""
    with faulty(model, "kv.reserved=sleep:0.7", prefill=1, decode=1) as live:
        async with (
            live.client() as client,
            client.generate(token_ids=PROMPT, max_tokens=24, **GREEDY) as stream,
        ):
            tokens = []
            async for token in stream:
                tokens.append(token.id)
                if len(tokens) == 1:
                    await asyncio.to_thread(live.kill, "prefill-0")
            result = stream.result
        assert tokens == expected()
        assert result.handoff["failure"] == "TRANSFER_FAILED" and result.handoff["recomputed_tokens"] == len(PROMPT)
        await asyncio.to_thread(live.wait, lambda: all("error" not in worker for worker in live.workers()))
        await live.quiet()


@pytest.mark.parametrize("point", ["kv.copied", "kv.exported"])
async def test_flipped_byte_is_found_and_recomputed(model: Path, point: str) -> None:
    # At the second handoff: the first one connects the processes, so that nothing but the flip disturbs this request.
    with faulty(model, f"{point}=flip@2", prefill=1, decode=1) as live:
        async with live.client() as client:
            await ask(client, [7, *PROMPT])
            result = await ask(client)
            assert list(result.token_ids) == expected()
            assert result.handoff["failure"] == "DIGEST_MISMATCH" and result.handoff["recomputed_tokens"] == len(PROMPT)
        await live.quiet()


async def test_flipped_byte_under_the_fail_policy_is_prefilled_elsewhere(model: Path) -> None:
    with faulty(model, "kv.copied=flip", "--kv.on-failure", "fail", decode=2) as live:
        async with live.client() as client:
            result = await ask(client)
        assert list(result.token_ids) == expected() and result.workers["retries"] == 1
        assert result.handoff["recomputed_tokens"] == 0
        await live.quiet()


async def test_lease_that_expired_before_the_read_is_not_used(model: Path) -> None:
    with faulty(model, "kv.reserved=sleep:2.6", prefill=1, decode=1) as live:
        async with live.client() as client:
            result = await ask(client)
        assert list(result.token_ids) == expected()
        assert result.handoff["failure"] == "LEASE_EXPIRED" and result.handoff["blocks"] == 0
        await live.quiet()


async def test_hung_decode_worker_is_given_up_and_its_late_tokens_are_fenced(model: Path) -> None:
    with faulty(model, "", "--launcher.hang-s", "120", prefill=1, decode=2) as live:
        async with (
            live.client() as client,
            client.generate(token_ids=PROMPT, max_tokens=200, **GREEDY) as stream,
        ):
            tokens, stopped = [], None
            async for token in stream:
                tokens.append(token.id)
                assert token.index == len(tokens) - 1
                if len(tokens) == 20:
                    busy = [worker for worker in await asyncio.to_thread(live.workers, "decode") if worker["load"]["running"]]
                    stopped = busy[0]["pid"]
                    os.kill(stopped, signal.SIGSTOP)
                if len(tokens) == 60 and stopped is not None:
                    os.kill(stopped, signal.SIGCONT)
        assert tokens == expected(max_tokens=200)
        await asyncio.to_thread(live.wait, lambda: all("error" not in worker for worker in live.workers()))
        await live.quiet()


async def test_short_stall_is_no_death(model: Path) -> None:
    with faulty(model, prefill=1, decode=2) as live:
        async with live.client() as client:
            task = asyncio.create_task(ask(client, max_tokens=200))
            await asyncio.sleep(0.3)
            pids = [worker["pid"] for worker in await asyncio.to_thread(live.workers, "decode")]
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(0.8)
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            result = await task
        assert list(result.token_ids) == expected(max_tokens=200) and result.workers["retries"] == 0
        await live.quiet()


async def test_hung_prefill_worker_while_it_is_read_from(model: Path) -> None:
    # Its supervisor has patience: this is about those who read from it.
    with faulty(model, "kv.reserved=sleep:0.5", "--launcher.hang-s", "120", prefill=1, decode=1) as live:
        async with (
            live.client() as client,
            client.generate(token_ids=PROMPT, max_tokens=24, **GREEDY) as stream,
        ):
            tokens, pid = [], 0
            async for token in stream:
                tokens.append(token.id)
                if len(tokens) == 1:
                    pid = await asyncio.to_thread(live.kill, "prefill-0", signal.SIGSTOP)
            result = stream.result
        os.kill(pid, signal.SIGCONT)
        assert tokens == expected() and result.handoff["failure"] == "TRANSFER_FAILED"
        await asyncio.to_thread(live.wait, lambda: all("error" not in worker for worker in live.workers()))
        await live.quiet()


async def test_all_prefill_workers_dead_means_bypass(model: Path) -> None:
    with faulty(model, "", "--launcher.restart-backoff-s", "20", prefill=1, decode=1) as live:
        await asyncio.to_thread(live.kill, "prefill-0")
        async with live.client() as client:
            result = await ask(client)
        assert list(result.token_ids) == expected() and result.workers["prefill"] == ""


async def test_no_decode_worker_is_unavailable_at_once(model: Path) -> None:
    with faulty(model, "", "--launcher.restart-backoff-s", "20", prefill=1, decode=1) as live:
        await asyncio.to_thread(live.kill, "decode-0")
        async with live.client() as client:
            first = await asyncio.gather(ask(client, timeout_s=30), return_exceptions=True)
            assert isinstance(first[0], GenerateError) and first[0].code == "UNAVAILABLE"  # it found out, and waited for another
            with pytest.raises(GenerateError) as caught:
                await ask(client, timeout_s=30)
        assert caught.value.reason == "NO_WORKER" and caught.value.retry_after_s is not None


async def test_router_killed_frees_what_its_requests_held(model: Path) -> None:
    with faulty(model, prefill=1, decode=2) as live:
        async with live.client() as client:
            requests = [asyncio.create_task(ask(client, [i, *PROMPT], max_tokens=2000)) for i in range(10)]
            await asyncio.to_thread(live.wait, lambda: sum(worker["load"]["running"] for worker in live.workers("decode")) >= 10)
            os.kill(live.status()["router"]["pid"], signal.SIGKILL)
            ends = await asyncio.gather(*requests, return_exceptions=True)
            assert all(isinstance(end, GenerateError) and end.code == "UNAVAILABLE" for end in ends)
        await asyncio.to_thread(live.wait, lambda: len(live.workers()) == 3)
        await live.quiet()
        async with live.client() as client:
            assert list((await ask(client)).token_ids) == expected()


@pytest.mark.parametrize("trouble", ["flush", "hang", "kill"])
async def test_registry_trouble_fails_no_request(model: Path, trouble: str) -> None:
    with faulty(model, prefill=1, decode=2) as live:
        async with live.client() as client:
            done = 0

            async def load(seed: int, until: asyncio.Event) -> None:
                nonlocal done
                rng = random.Random(seed)
                while not until.is_set():
                    prompt = [rng.randrange(256) for _ in range(100)]
                    assert list((await ask(client, prompt)).token_ids) == expected(prompt)
                    done += 1

            until = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                for seed in range(3):
                    group.create_task(load(seed, until))
                await asyncio.sleep(0.5)
                before = done
                await asyncio.to_thread(_trouble, live, trouble)
                await asyncio.sleep(3.0)
                until.set()
            assert done > before + 5
        await asyncio.to_thread(live.wait, lambda: len(live.workers()) == 3 and live.status()["router"]["registry"] == "reachable")
        await live.quiet()


def _trouble(live: Cluster, kind: str) -> None:
    state = json.loads((live.logs.parent / f"{live.name}.json").read_text())
    with redis.Redis.from_url(state["redis_url"]) as client:
        match kind:
            case "flush":
                client.flushall()
            case "hang":
                client.client_pause(2500)
            case "kill":
                os.kill(client.info()["process_id"], signal.SIGKILL)


async def test_rolling_restart_under_load_loses_nothing(model: Path) -> None:
    with faulty(model, prefill=2, decode=2) as live:
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
                except (GenerateError, AssertionError) as error:
                    lost.append(error)

        async with live.client() as client, asyncio.TaskGroup() as group:
            for seed in range(6):
                group.create_task(load(client, seed))
            try:
                for name in ("prefill-0", "decode-0", "prefill-1", "decode-1"):
                    before = await asyncio.to_thread(_incarnations, live)
                    await asyncio.to_thread(live.kill, name, signal.SIGTERM)
                    await asyncio.to_thread(live.wait, lambda b=before, n=name: _incarnations(live).get(n, 0) > b[n])
            finally:
                until.set()
        assert not lost and served > 20
        await live.quiet()


def _incarnations(live: Cluster) -> dict[str, int]:
    return {worker["name"]: worker["incarnation"] for worker in live.workers() if "error" not in worker and worker["state"] == "ready"}
