"""A prompt that is longer than every pool is served: at the decode worker, with the tokens of a large pool, whatever dies."""

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faulty_cluster import SHARED, ask, disturbed, expected, faulty
from live_cluster import Cluster, toy

from baton.client import GenerateError

pytestmark = pytest.mark.system
LENGTH = 1000  # tokens
POOL = "0.0625"  # MiB: 32 blocks of the toy, 512 tokens
TIERS = ("--tiers.memory-mib", "1", "--tiers.long-contexts", "1")


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = toy(tmp_path_factory.mktemp("models") / "toy", step_delay_ms=2)
    with faulty(model, "", *SHARED, *TIERS, "--engine.kv-memory-mib", POOL, "--model.max-model-len", "1500") as live:
        yield live


def prompt(number: int = 1) -> list[int]:
    return [(number * 37 + i * 11 + i // 256) % 256 for i in range(LENGTH)]


async def test_it_is_computed_where_it_is_decoded_and_the_tokens_are_right(four: Cluster) -> None:
    async with four.client() as client:
        result = await ask(client, prompt())
    assert list(result.token_ids) == expected(prompt())
    assert four.last()["bypasses"] == ["longer than the pool"]
    await four.quiet()


async def test_others_run_beside_it(four: Cluster) -> None:
    async def one(number: int, length: int) -> None:
        async with four.client() as client:
            own = prompt(number)[:length]
            assert list((await ask(client, own)).token_ids) == expected(own)

    await asyncio.gather(*itertools.starmap(one, [(2, LENGTH), (3, LENGTH), (4, LENGTH), (5, 40), (6, 100), (7, 300)]))
    await four.quiet()


async def test_it_goes_on_elsewhere_after_a_death(four: Cluster) -> None:
    with disturbed(four, "decode.step=exit@7", prompt()) as own:
        async with four.client() as client:
            result = await ask(client, own)
    assert list(result.token_ids) == expected(own)
    assert result.workers["retries"] == 1
    await four.quiet()


async def test_a_cancelled_one_leaves_room_for_the_next(four: Cluster) -> None:
    async with four.client() as client:
        params: dict[str, Any] = {"max_tokens": 400, "temperature": 0.0, "ignore_eos": True, "timeout_s": 60}
        stream = client.generate(token_ids=prompt(8), **params)
        async with stream:
            await anext(aiter(stream))
        await four.quiet()
        assert list((await ask(client, prompt(9))).token_ids) == expected(prompt(9))
    await four.quiet()


async def test_the_limit_is_the_context_and_not_the_pool(four: Cluster) -> None:
    async with four.client() as client:
        with pytest.raises(GenerateError, match="1500"):
            await ask(client, prompt() + prompt())


def test_without_the_key_such_a_pool_is_refused(tmp_path: Path, four: Cluster) -> None:
    model = toy(tmp_path / "toy")
    refused = four.baton(
        "up", "--model", str(model), "--tiers.memory-mib", "1", "--engine.kv-memory-mib", POOL, "--model.max-model-len", "1500"
    )
    assert refused.returncode != 0 and "fewer than one sequence of 1500 tokens needs" in refused.stdout + refused.stderr
