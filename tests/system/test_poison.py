"""A prompt that kills every worker that computes it is given up after two, and other requests on those workers continue exactly."""

import asyncio
from collections.abc import Iterator

import pytest
from live_cluster import Cluster, cluster, toy, toy_output

from baton.client import AsyncClient, GenerateError, Result

pytestmark = pytest.mark.system
POISON = 250
SHORT = [1, 2, POISON, *range(4, 20)]  # computed by the decode worker
LONG = [*range(1, 100), POISON, *range(100, 140)]  # computed by the prefill worker


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(toy(tmp_path_factory.mktemp("models") / "toy", step_delay_ms=20, poison_token=POISON), prefill=3, decode=3) as running:
        yield running


async def ask(client: AsyncClient, prompt: list[int], tokens: int = 12, began: asyncio.Event | None = None) -> Result:
    """`began` is set at the first token."""
    async with client.generate(token_ids=prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True, timeout_s=60) as stream:
        async for _ in stream:
            if began is not None:
                began.set()
        return stream.result


def harmless(count: int, tokens: int) -> list[list[int]]:
    """Prompts for which the toy never produces the token that kills."""
    prompts = ([i, *range(30, 49)] for i in range(250))
    return [prompt for prompt in prompts if POISON not in toy_output(prompt, max_tokens=tokens)][:count]


@pytest.mark.parametrize(("prompt", "role"), [(SHORT, "decode"), (LONG, "prefill")], ids=["decode", "prefill"])
async def test_a_prompt_that_kills_workers_is_given_up_after_two(live: Cluster, prompt: list[int], role: str) -> None:
    before = {worker["name"]: worker["incarnation"] for worker in live.workers()}
    neighbours = harmless(6, 250)
    async with live.client() as client:
        # If both workers that die were a neighbour's, too, and it had no token from either, it would be as suspect as the prompt.
        all_began = [asyncio.Event() for _ in neighbours]
        streams = [asyncio.create_task(ask(client, neighbour, 250, began)) for neighbour, began in zip(neighbours, all_began, strict=True)]
        await asyncio.gather(*(began.wait() for began in all_began))
        with pytest.raises(GenerateError) as ended:
            await ask(client, prompt)
        assert ended.value.reason == "POISONOUS" and ended.value.code == "INTERNAL" and "2 workers" in str(ended.value)
        for again in (prompt, [*prompt, 5, 6, 7]):
            with pytest.raises(GenerateError) as refused:
                await ask(client, again)
            assert refused.value.reason == "POISONOUS" and "refused" in str(refused.value)
        for neighbour, stream in zip(neighbours, streams, strict=True):
            assert list((await stream).token_ids) == toy_output(neighbour, max_tokens=250)
        await asyncio.to_thread(live.wait, lambda: len(replaced(live, before)) == 2)
        assert {name.rpartition("-")[0] for name in replaced(live, before)} == {role}
    await live.quiet()


def replaced(live: Cluster, before: dict[str, int]) -> set[str]:
    """Workers whose process was replaced and which answer."""
    found = {worker["name"]: worker["incarnation"] for worker in live.workers() if "error" not in worker}
    return {name for name, incarnation in before.items() if found.get(name, incarnation) != incarnation}
