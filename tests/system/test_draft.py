"""A cluster with a model that drafts says what a bare engine says without one; the draft's KV is handed over with the model's, and goes
with it whoever dies."""

import asyncio
import random
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from live_cluster import cluster
from tokenizers import Tokenizer

from baton.cli.up import SHIPPED
from baton.client import AsyncClient, Result
from baton.engine.build import build
from baton.engine.core.engine import Engine
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.options import Options
from baton.models.train.stories import story

pytestmark = pytest.mark.system
TOKENS = 120


def said(engine: Engine, prompt: list[int], seed: int) -> tuple[int, ...]:
    params = SamplingParams(max_tokens=TOKENS, temperature=seed % 2 * 0.8, seed=seed, ignore_eos=True)
    engine.add(seq := Sequence("bare", list(prompt), len(prompt), params, b"root"))
    while not engine.idle:
        engine.step()
    return tuple(seq.tokens[len(prompt) :])


async def ask(client: AsyncClient, prompt: list[int], seed: int) -> Result:
    params: dict[str, Any] = {"max_tokens": TOKENS, "temperature": seed % 2 * 0.8, "seed": seed, "ignore_eos": True, "timeout_s": 120}
    async with client.generate(token_ids=prompt, **params) as stream:
        async for _ in stream:
            pass
        return stream.result


def accepted(address: str) -> float:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("baton_engine_accepted_tokens_total"))


async def test_what_is_said_is_what_is_said_without_a_draft_and_a_death_changes_nothing(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    prompts = [tokenizer.encode(" ".join(story(random.Random(seed), 4).sentences[: 4 + 2 * seed])).ids for seed in range(4)]
    bare = build(Options.of(SHIPPED, kv_memory_mib=32, threads=1, products="baton", prefix_caching=False)).engine
    wanted = [said(bare, prompt, seed) for seed, prompt in enumerate(prompts)]
    flags = ("--engine.threads", "1", "--engine.products", "baton", "--router.bypass-tokens", "0", "--engine.speculation", "draft")
    with cluster(SHIPPED, *flags, decode=2, env={"BATON_FAILPOINTS_FOLDER": str(tmp_path)}) as live:
        async with live.client() as client:
            results = await asyncio.gather(*(ask(client, prompt, seed) for seed, prompt in enumerate(prompts)))
            assert [result.token_ids for result in results] == wanted
            for result in results:
                handoff = result.handoff
                assert handoff["blocks"] == handoff["digests_checked"] > 0 and not handoff["recomputed_tokens"] and not handoff["failure"]
            assert sum([accepted(worker["metrics"]) for worker in live.workers("decode")]) > 0, "a model drafted"
            with live.faults("decode.step=exit@5"):
                disturbed = await ask(client, prompts[3], 3)
            assert disturbed.token_ids == wanted[3] and disturbed.workers["retries"] == 1
        await live.quiet(180)
