"""The fault tests of handoff and router with guesses: predictions that are right but for an edit, and the method of the engine
(`BATON_TEST_SPECULATION`; prompt_lookup if it is not set). The client receives the tokens of an undisturbed run, and nothing is left
behind."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faulty_cluster import SHARED, ask, disturbed, expected, faulty
from live_cluster import Cluster, toy

from baton.engine.core.speculation import Follower

pytestmark = pytest.mark.system
METHOD = os.environ.get("BATON_TEST_SPECULATION", "prompt_lookup")
LENGTH = 40
KILLS = ["prefill.computed", "kv.before_read", "kv.before_check", "kv.adopted", "decode.step=exit@1", "decode.step=exit@3"]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = toy(tmp_path_factory.mktemp("models") / "toy", step_delay_ms=5)
    with faulty(model, "", *SHARED, "--launcher.hang-s", "120", "--engine.speculation", METHOD) as live:
        yield live


def thought(tokens: list[int]) -> list[int]:
    """What a client expects who does not know of one edit."""
    return [*tokens[:17], 7, *tokens[18:]]


@pytest.mark.parametrize("fault", KILLS)
async def test_tokens_are_exact_when_a_worker_is_killed_in_the_middle_of_guesses(four: Cluster, fault: str) -> None:
    with disturbed(four, fault if "=" in fault else f"{fault}=exit") as prompt:
        async with four.client() as client:
            for params in ({}, {"temperature": 1.0, "seed": 11}):
                right = expected(prompt, max_tokens=LENGTH, **params)
                result = await ask(client, prompt, max_tokens=LENGTH, prediction=thought(right), **params)
                assert list(result.token_ids) == right
                follower = Follower(thought(right))
                for token in right:
                    follower.follow(token)
                usage = result.usage
                assert (usage.accepted_prediction_tokens, usage.rejected_prediction_tokens) == (follower.accepted, follower.rejected)
                assert usage.accepted_tokens > LENGTH // 3, "guesses before the death and after it"
                record = four.record(result.request_id)
                assert sum(record["guesses"][::2]) == record["accepted_tokens"] == usage.accepted_tokens
                assert sum(record["guesses"]) == record["drafted_tokens"] == usage.drafted_tokens
        await four.quiet()


async def test_who_asks_for_no_guesses_gets_the_same_tokens_and_none(four: Cluster) -> None:
    prompt = list(range(1, 60))
    async with four.client() as client:
        same: list[dict[str, Any]] = [{"speculation": {"method": "none"}}, {"speculation": {"max_tokens": 2}, "prediction": [1] * 30}, {}]
        results = [await ask(client, prompt, max_tokens=LENGTH, **asked) for asked in same]
    assert {result.token_ids for result in results} == {tuple(expected(prompt, max_tokens=LENGTH))}
    assert results[0].usage.drafted_tokens == 0
    await four.quiet()


def test_the_method_in_force_is_told(four: Cluster, tmp_path: Path) -> None:
    assert {worker["speculation"][0] for worker in four.workers("decode")} == {METHOD}
    assert f"guesses: {METHOD}" in four.here("status", "--name", four.name).stdout
    asked = ("generate", "ab", "--max-tokens", "30", "--temperature", "0", "--ignore-eos", "--show-draft", "--name", four.name)
    told = four.here(*asked, "--speculation", "none")
    assert "0 of 0 guesses right" in told.stderr
    (tmp_path / "told").write_text(told.stdout.removesuffix("\n"))
    again = four.here(*asked, "--prediction", str(tmp_path / "told"))
    assert again.stdout == told.stdout and "guesses right" in again.stderr
