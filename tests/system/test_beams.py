"""Beam search through a whole cluster, with the handoff: what the search over everything finds, whichever worker dies."""

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from beam_reference import toy_search
from faulty_cluster import PROMPT, SHARED, disturbed, faulty
from live_cluster import Cluster, toy

from baton.client import AsyncClient, GenerateError, Result
from baton.engine.core.beams import Beams, Hypothesis
from baton.engine.core.sampling import SamplingParams

pytestmark = pytest.mark.system
BEAM = {"width": 4, "count": 3, "length_penalty": 0.6, "early_stopping": "never"}
TOKENS = 24


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = toy(tmp_path_factory.mktemp("models") / "toy", step_delay_ms=5)
    with faulty(model, "", *SHARED, "--engine.max-num-seqs", "16", "--engine.max-num-batched-tokens", "64") as live:
        yield live


def expected(prompt: list[int], **more: Any) -> list[Hypothesis]:
    return toy_search(prompt, SamplingParams(TOKENS, beams=Beams(**BEAM), **more))  # type: ignore[arg-type]


async def ask(client: AsyncClient, prompt: list[int], beam: dict[str, Any] = BEAM, **more: Any) -> Result:
    async with client.generate(token_ids=prompt, beam=beam, max_tokens=TOKENS, timeout_s=60, **more) as stream:
        assert [token async for token in stream] == []
        return stream.result


def found(result: Result) -> list[Hypothesis]:
    return [Hypothesis(one.token_ids, one.score, one.finish_reason == "stop") for one in result.hypotheses]


async def test_beams_are_handed_over_and_end_without_trace(four: Cluster) -> None:
    async with four.client() as client:
        # Long enough to be read while it is computed, cached somewhere, short enough for one chunk, and without a handoff.
        for prompt, blocks in ((PROMPT, {10}), (PROMPT, {0, 10}), (PROMPT[50:98], {3}), ([7], {0})):
            result = await ask(client, prompt)
            assert result.handoff["blocks"] in blocks
            assert found(result) == expected(prompt)
            assert (result.token_ids, result.finish_reason) == (result.hypotheses[0].token_ids, result.hypotheses[0].finish_reason)
            assert result.usage.completion_tokens == sum(len(one.token_ids) for one in result.hypotheses)
            assert result.handoff["recomputed_tokens"] == 0
    await four.quiet()


@pytest.mark.parametrize(
    ("point", "retries"), [("decode.step=exit@1", 1), ("engine.step=exit@12", 1), ("kv.adopted=exit", 1), ("prefill.computed=exit", 1)]
)
async def test_a_death_begins_the_search_anew_elsewhere_and_it_finds_the_same(four: Cluster, point: str, retries: int) -> None:
    with disturbed(four, point) as prompt:
        async with four.client() as client:
            result = await ask(client, prompt)
        assert found(result) == expected(prompt)
        assert result.workers["retries"] == retries
        await four.quiet()


async def test_kv_that_is_wrong_is_computed_again_and_the_search_finds_the_same(four: Cluster) -> None:
    with disturbed(four, "kv.copied=flip") as prompt:
        async with four.client() as client:
            result = await ask(client, prompt)
        assert found(result) == expected(prompt)
        assert result.handoff["failure"] == "DIGEST_MISMATCH" and result.handoff["recomputed_tokens"] == len(PROMPT) - 1
        await four.quiet()


def test_the_command_prints_the_answers_with_their_scores(four: Cluster) -> None:
    asked = ("generate", "abc", "--beams", "4", "--max-tokens", "8", "--name", four.name)
    [best, second] = json.loads(four.here(*asked, "--answers", "2", "--json").stdout)["hypotheses"]
    assert best["score"] >= second["score"]
    printed = four.here(*asked, "--answers", "2").stdout
    assert printed.startswith(f"{best['score']:.4f}  ") and f"\n\n{second['score']:.4f}  " in printed
    assert four.here(*asked).stdout.strip() == best["text"].strip()
    told = four.here("generate", "abc", "--answers", "2", "--name", four.name)
    assert told.returncode and "need --beams" in told.stderr


async def test_a_client_that_leaves_leaves_nothing(four: Cluster) -> None:
    async with four.client() as client, client.generate(token_ids=PROMPT, beam=BEAM, max_tokens=900, ignore_eos=True, timeout_s=60):
        await asyncio.to_thread(four.wait, lambda: any(worker["load"]["running"] >= 4 for worker in four.workers()))
    await four.quiet()


async def test_http_has_vllms_names(four: Cluster) -> None:
    body = {"prompt": PROMPT, "use_beam_search": True, "best_of": 4, "n": 3, "length_penalty": 0.6, "early_stopping": "never"}
    body |= {"max_tokens": TOKENS, "temperature": 0, "return_token_ids": True}
    request = urllib.request.Request(f"http://{four.http}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.load(response)
    told = [Hypothesis(tuple(one["token_ids"]), one["score"], one["finish_reason"] == "stop") for one in answer["choices"]]
    assert told == expected(PROMPT) and [one["index"] for one in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)
    assert answer["usage"]["completion_tokens"] == sum(len(one.tokens) for one in told)


async def test_beams_that_no_worker_has_room_for_are_refused_at_once(four: Cluster) -> None:
    async with four.client() as client:
        with pytest.raises(GenerateError, match="a worker runs 16 sequences at a time") as refused:
            async with client.generate(token_ids=PROMPT, beam={"width": 32}, max_tokens=20, timeout_s=60) as stream:
                [token async for token in stream]
    assert (refused.value.reason, refused.value.violations[0][0]) == ("CONTEXT_LENGTH", "beam.width")
