"""The whole cluster with real processes, real NIXL and real Redis on the toy model. Every token is checked against the oracle."""

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_cluster import Cluster, cluster, toy, toy_output

from baton.answer import CacheReport
from baton.client import AsyncClient, AsyncStream, GenerateError, Result, Token
from baton.stages import STAGES

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = toy(tmp_path_factory.mktemp("models") / "toy")
    with cluster(model, prefill=2, decode=2) as running:
        yield running


async def ask(client: AsyncClient, prompt: list[int], **sampling: object) -> Result:
    params: dict[str, Any] = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True, "timeout_s": 60, **sampling}
    async with client.generate(token_ids=prompt, **params) as stream:
        tokens = [token async for token in stream]
        assert [token.index for token in tokens] == list(range(len(tokens)))
        return stream.result


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    shared = [[rng.randrange(256) for _ in range(rng.randrange(64, 400))] for _ in range(5)]
    return [rng.choice(shared) + [rng.randrange(256) for _ in range(rng.randrange(1, 120))] for _ in range(count)]


async def test_a_request_passes_through_both_workers(live: Cluster) -> None:
    prompt = list(range(1, 201))
    async with live.client() as client:
        result = await ask(client, prompt)
        assert list(result.token_ids) == toy_output(prompt)
        assert result.finish_reason == "length" and result.usage.prompt_tokens == 200 and result.usage.completion_tokens == 16
        assert result.workers["prefill"].startswith("prefill-") and result.workers["decode"].startswith("decode-")
        handoff = result.handoff
        assert handoff["transport"] == "nixl" and handoff["blocks"] == 13 == handoff["digests_checked"]
        assert handoff["bytes"] == 13 * 2 * 16 * 8 * 8 and handoff["recomputed_tokens"] == 0 and not handoff["failure"]
        assert result.usage.cache == CacheReport(0, 0, (("new", 192), ("partial", 8)))
        again = await ask(client, prompt)
        assert again.token_ids == result.token_ids and again.usage.cached_tokens == 192
        assert again.usage.cache == CacheReport(192, 192, (("partial", 8),))
        other = await ask(client, [*prompt[:100], *range(1, 101)])
        assert other.usage.cache == CacheReport(96, 96, (("changed", 96), ("partial", 8)), changed_at=96)
    await live.quiet()


async def test_two_hundred_concurrent_requests_with_shared_prefixes_and_random_cancels(live: Cluster) -> None:
    rng = random.Random(1)
    everyone = prompts(rng, 200)

    async def one(client: AsyncClient, prompt: list[int], cancel_after: int | None, seed: int) -> str:
        params: dict[str, Any] = {"max_tokens": 24, "temperature": 1.0, "seed": seed}
        want = toy_output(prompt, **params)
        got: list[int] = []
        async with client.generate(token_ids=prompt, ignore_eos=True, timeout_s=90, **params) as stream:
            async for token in stream:
                got.append(token.id)
                if cancel_after is not None and len(got) > cancel_after:
                    break
        assert got == want[: len(got)]
        assert cancel_after is not None or len(got) == 24
        return "cancelled" if cancel_after is not None else "done"

    async with live.client() as client:
        cancels = [rng.choice([None, None, None, 0, 3, 11]) for _ in everyone]
        ends = await asyncio.gather(*(one(client, *args) for args in zip(everyone, cancels, range(200), strict=True)))
    assert ends.count("done") > 80 and ends.count("cancelled") > 40
    await live.quiet()


async def first_token(stream: AsyncStream) -> Token:
    return await anext(aiter(stream))


async def test_cancelling_before_the_first_token_leaves_nothing_behind(live: Cluster) -> None:
    async with live.client() as client:
        for pause in (0.0, 0.001, 0.003, 0.01):
            streams = [client.generate(token_ids=list(range(1, 200)), ignore_eos=True, max_tokens=50) for _ in range(20)]
            readers = [asyncio.create_task(first_token(stream)) for stream in streams]
            await asyncio.sleep(pause)
            for stream, reader in zip(streams, readers, strict=True):
                stream.cancel()
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
    await live.quiet()


async def test_short_prompts_skip_the_handoff(live: Cluster) -> None:
    async with live.client() as client:
        result = await ask(client, [5, 6, 7])
    assert list(result.token_ids) == toy_output([5, 6, 7])
    assert result.workers["prefill"] == "" and result.handoff["blocks"] == 0


async def test_a_long_prompt_is_scored_by_the_worker_that_decodes_and_none_of_its_cache_is_used(live: Cluster) -> None:
    prompt = [5 + i % 200 for i in range(300)]
    async with live.client() as client:
        plain = await ask(client, prompt)
        told = await ask(client, prompt, prompt_logprobs=1)
    assert plain.prompt_logprobs == () and plain.workers["prefill"]
    assert (
        told.token_ids == plain.token_ids == tuple(toy_output(prompt)) and told.workers["prefill"] == "" and told.usage.cached_tokens == 0
    )
    first, *others = told.prompt_logprobs
    assert [token.id for token in told.prompt_logprobs] == prompt and (first.logprob, first.rank) == (None, 0)
    assert all((token.logprob == 0.0) == (token.rank == 1) == (token.top[0][0] == token.id) for token in others)


async def test_the_stage_times_add_up_to_the_request_time(live: Cluster) -> None:
    """The stage times that the client receives add up to the time that the router measured for the same request.

    Both come from the router's clock, so a busy machine lengthens them equally.
    """
    async with live.client() as client:
        told = (await ask(client, list(range(1, 250)), max_tokens=200, request_id="whole")).stages_ms
    record = await asyncio.to_thread(live.record, "whole")
    assert sum(told[name] for name in STAGES) == pytest.approx(record["e2e"] * 1000, rel=0.02)
    assert {name: told[name] / 1000 for name in STAGES} == pytest.approx(record["stages"], rel=0.02, abs=1e-4)
    assert all(told[name] > 0 for name in STAGES)


async def test_a_stop_string_across_tokens_ends_the_request_everywhere(live: Cluster) -> None:
    prompt = list(range(60, 200))
    async with live.client() as client:
        whole = await ask(client, prompt, max_tokens=60)
        middle = whole.text[20:24]
        result = await ask(client, prompt, max_tokens=60, stop=[middle])
    assert result.text == whole.text[: whole.text.index(middle)]
    assert result.finish_reason == "stop" and result.stop == middle
    await live.quiet()


async def test_a_cluster_without_prefill_workers_is_colocated(tmp_path: Path) -> None:
    with cluster(toy(tmp_path / "toy"), prefill=0) as colocated:
        async with colocated.client() as client:
            result = await ask(client, list(range(1, 200)))
        assert list(result.token_ids) == toy_output(list(range(1, 200)))
        assert result.workers["prefill"] == "" and result.workers["decode"] == "decode-0"
        await colocated.quiet()


def test_commands_print_results_and_errors(live: Cluster) -> None:
    named = ("--ignore-eos", "--max-tokens", "8", "--name", live.name)
    answer = live.baton("generate", "Once upon a time, " * 5, "--temperature", "0", "--json", *named)
    assert answer.returncode == 0, answer.stderr
    told = json.loads(answer.stdout)
    assert set(told) >= {"text", "token_ids", "finish_reason", "usage", "stages_ms", "workers", "handoff"}
    assert set(told["workers"]) >= {"prefill", "decode"}
    assert set(told["handoff"]) >= {"transport", "blocks", "bytes", "digests_checked", "recomputed_tokens"}
    assert told["token_ids"] == toy_output(list(("Once upon a time, " * 5).encode()), max_tokens=8)
    drawn = live.here("generate", "Once upon a time, " * 9, "--trace", *named)
    assert drawn.returncode == 0 and all(stage in drawn.stderr for stage in ("queue", "prefill", "transfer", "decode"))
    status = json.loads(live.here("status", "--json", "--name", live.name).stdout)
    assert status["endpoints"]["grpc"] == live.grpc and len(status["workers"]) == 4
    assert {worker["pool"] for worker in status["workers"]} == {"prefill", "decode"}
    assert "decode-1" in live.here("status", "--name", live.name).stdout
    refused = live.here("generate", "x", "--max-tokens", "0", "--name", live.name)
    assert refused.returncode == 1 and "max_tokens" in refused.stderr
    assert live.here("generate", "x", "--name", "nobody").returncode == 1
    wrong = live.here("up", "--engine.blok-size", "8")
    assert wrong.returncode == 2 and "block_size" in wrong.stderr


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One worker of each role, whose steps take 5 ms."""
    with cluster(toy(tmp_path_factory.mktemp("slow") / "toy", step_delay_ms=5)) as running:
        yield running


async def test_a_deadline_ends_the_request_and_frees_everything(slow: Cluster) -> None:
    """The whole answer would take three seconds."""
    async with slow.client() as client:
        with pytest.raises(GenerateError) as caught:
            await ask(client, list(range(1, 100)), max_tokens=600, timeout_s=0.6)
    assert caught.value.code == "DEADLINE_EXCEEDED"
    await slow.quiet()


async def test_pools_can_be_resized_while_serving(slow: Cluster) -> None:
    stop = asyncio.Event()
    served = 0

    async def load(client: AsyncClient, seed: int) -> None:
        nonlocal served
        rng = random.Random(seed)
        while not stop.is_set():
            prompt = [rng.randrange(256) for _ in range(100)]
            assert list((await ask(client, prompt)).token_ids) == toy_output(prompt)
            served += 1
            await asyncio.sleep(0.2)  # there is always a request on its way, and no core is kept busy

    async with slow.client() as client, asyncio.TaskGroup() as group:
        for seed in range(4):
            group.create_task(load(client, seed))
        try:
            await asyncio.to_thread(_scale_and_wait, slow, 2, 3)
            await asyncio.to_thread(_scale_and_wait, slow, 1, 1)
        finally:
            stop.set()
    assert served > 4
    await slow.quiet()


def _scale_and_wait(live: Cluster, prefill: int, decode: int) -> None:
    done = live.here("scale", "--prefill", str(prefill), "--decode", str(decode), "--name", live.name)
    assert done.returncode == 0, done.stderr
    live.wait(lambda: (len(live.workers("prefill")), len(live.workers("decode"))) == (prefill, decode))
