"""Several answers to one prompt through a whole cluster: the prompt is computed and handed over once, each answer is that of a request of
its own, also when the worker dies in the middle, and nothing is left behind."""

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from live_cluster import Cluster, cluster, toy, toy_output

from baton.client import AsyncClient, GenerateError, Result

pytestmark = pytest.mark.system

N, MAX_TOKENS, SEED = 4, 60, 40
PROMPT = [(i * 37) % 250 for i in range(300)]
HOW: dict[str, Any] = {"temperature": 1.0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
LONG = {**HOW, "max_tokens": 4 * MAX_TOKENS}  # so long that none has ended when a busy machine has found and killed its worker


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(toy(tmp_path_factory.mktemp("model"), step_delay_ms=5), prefill=1, decode=2) as found:
        yield found


async def answers(live: Cluster, **asked: Any) -> tuple[list[Result], dict[int, list[int]]]:
    seen: dict[int, list[int]] = {}
    async with AsyncClient(live.grpc) as client, client.generate(**asked) as stream:
        async for token in stream:
            assert token.index == len(seen.setdefault(token.choice, []))
            seen[token.choice].append(token.id)
    return stream.results, seen


def quiet(live: Cluster) -> None:
    live.wait(lambda: not live.residue())


async def test_the_prompt_is_computed_and_handed_over_once(running: Cluster) -> None:
    names = "baton_engine_computed_tokens_total", "baton_engine_forks_total", "baton_handoffs_total"
    before = {name: running.counted(name) for name in names}
    results, seen = await answers(running, token_ids=PROMPT, n=N, seed=SEED, **HOW)
    assert len(results) == N
    for choice, result in enumerate(results):
        expected = toy_output(PROMPT, seed=SEED + choice, **HOW)
        assert seen[choice] == list(result.token_ids) == expected and result.finish_reason == "length"
        assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (len(PROMPT), MAX_TOKENS)
    assert [bool(result.handoff["transport"]) for result in results] == [True, False, False, False]
    quiet(running)
    after = {name: running.counted(name) for name in names}
    grown = {name: {role: after[name][role] - before[name][role] for role in after[name]} for name in names}
    assert grown[names[0]] == {"prefill": len(PROMPT), "decode": MAX_TOKENS - 1 + (N - 1) * MAX_TOKENS}
    assert grown[names[1]] == {"prefill": 0, "decode": N - 1} and grown[names[2]]["decode"] == 1
    records = [running.record(f"{results[0].request_id[:-2]}-{choice}") for choice in range(N)]
    assert [(record["choice"], record["choices"]) for record in records] == [(choice, N) for choice in range(N)]


async def test_a_decode_worker_that_dies_in_the_middle_costs_no_answer_a_token(running: Cluster) -> None:
    async with AsyncClient(running.grpc) as client, client.generate(token_ids=PROMPT[7:], n=N, seed=SEED, **LONG) as stream:
        seen: dict[int, list[int]] = {choice: [] for choice in range(N)}
        killed = False
        async for token in stream:
            seen[token.choice].append(token.id)
            if not killed and min(map(len, seen.values())) == MAX_TOKENS // 3:
                killed = True
                busy = next(worker for worker in running.workers("decode") if worker["load"]["running"])
                os.kill(busy["pid"], signal.SIGKILL)
    assert killed and all(result.workers["retries"] for result in stream.results)
    for choice in range(N):
        assert seen[choice] == toy_output(PROMPT[7:], seed=SEED + choice, **LONG)
    running.wait(lambda: len(running.workers("decode")) == 2)
    quiet(running)


async def test_a_client_that_leaves_leaves_nothing(running: Cluster) -> None:
    async with AsyncClient(running.grpc) as client, client.generate(token_ids=PROMPT[1:], n=8, seed=1, **HOW) as stream:
        async for token in stream:
            if token.index == 3:
                break
    quiet(running)


async def test_over_http_all_doors_share_the_prompt(running: Cluster) -> None:
    before = running.counted("baton_engine_computed_tokens_total")
    async with openai.AsyncOpenAI(base_url=f"http://{running.http}/v1", api_key="none") as client:
        prompt, name = list(range(1, 201)), (await client.models.list()).data[0].id
        extra = {"ignore_eos": True, "return_token_ids": True}
        whole = await client.completions.create(model=name, prompt=prompt, n=3, seed=5, max_tokens=9, extra_body=extra)
        best = await client.completions.create(
            model=name, prompt=prompt, n=1, best_of=3, seed=5, max_tokens=9, logprobs=1, extra_body=extra
        )
        streamed: dict[int, list[int]] = {}
        chunks = await client.completions.create(model=name, prompt=prompt, n=3, seed=5, max_tokens=9, stream=True, extra_body=extra)
        async for chunk in chunks:
            for choice in chunk.choices:
                streamed.setdefault(choice.index, []).extend((choice.model_extra or {}).get("token_ids", []))
    expected = [toy_output(prompt, seed=5 + i, max_tokens=9, ignore_eos=True, temperature=1.0) for i in range(3)]
    assert [choice.model_extra["token_ids"] for choice in whole.choices] == expected  # type: ignore[index]
    assert streamed == dict(enumerate(expected))
    assert whole.usage is not None and (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (200, 27)
    assert best.choices[0].model_extra["token_ids"] == expected[0]  # type: ignore[index]  # the toy finds all equally likely
    assert best.usage is not None and best.usage.completion_tokens == 27
    quiet(running)
    after = running.counted("baton_engine_computed_tokens_total")
    computed = sum(after.values()) - sum(before.values())
    assert computed <= 200 + 2 * 16 + 3 * 3 * 10, "one of three requests computes the prompt, the others find it cached"


@pytest.mark.parametrize(
    "wrong, field",
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"n": 100, "max_tokens": 2000}, "sampling.max_tokens"),
    ],
)
async def test_what_cannot_be_is_refused_by_field(running: Cluster, wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(GenerateError) as caught:
        await answers(running, token_ids=[1, 2, 3], **wrong)
    assert caught.value.reason == "INVALID_FIELD" and [name for name, _ in caught.value.violations] == [field]


def test_the_command_shows_all(running: Cluster) -> None:
    flags = "--n", "2", "--seed", "7", "--max-tokens", "5", "--ignore-eos", "--json", "--address", running.grpc
    told = json.loads(running.here("generate", "abc", *flags).stdout)
    expected = [toy_output(list(b"abc"), seed=7 + i, max_tokens=5, ignore_eos=True, temperature=1.0) for i in range(2)]
    assert [choice["token_ids"] for choice in told["choices"]] == expected
