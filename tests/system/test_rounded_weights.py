"""A cluster with rounded matrices produces exactly the tokens of a bare engine with such matrices, and its KV fits no other model."""

import random
from typing import Any

import pytest
from live_cluster import cluster
from tokenizers import Tokenizer

from baton.cli.up import SHIPPED
from baton.engine.build import build
from baton.engine.core.engine import Engine
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.facts.fingerprint import fingerprint
from baton.engine.options import Options
from baton.models.train.stories import story

pytestmark = pytest.mark.system
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


def tokens(engine: Engine, prompt: list[int]) -> list[int]:
    seq = Sequence("bare", list(prompt), len(prompt), GREEDY, b"root")
    engine.add(seq)
    while not engine.idle:
        engine.step()
    return seq.tokens[len(prompt) :]


@pytest.mark.parametrize("kind", ["int8", "int4"])
async def test_tokens_equal_those_of_a_bare_engine(kind: str) -> None:
    """A row of a product does not depend on the batch, so the test allows no near-tie."""
    tokenizer = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    bare = build(Options.of(SHIPPED, weight_dtype=kind, kv_memory_mib=32, threads=1, prefix_caching=False)).engine
    flags = ("--engine.threads", "1", "--engine.weight-dtype", kind, "--router.bypass-tokens", "0")
    with cluster(SHIPPED, *flags) as live:
        (alike,) = {worker["model_fingerprint"] for worker in live.workers()}
        assert alike.startswith(f"{fingerprint(SHIPPED)}-float32-{kind}")
        async with live.client() as client:
            for seed in range(6):
                prompt = tokenizer.encode(" ".join(story(random.Random(seed), 4).sentences[: 3 + 2 * seed])).ids
                params: dict[str, Any] = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True, "timeout_s": 60}
                async with client.generate(token_ids=prompt, **params) as stream:
                    got = [token.id async for token in stream]
                handoff = stream.result.handoff
                assert got == tokens(bare, prompt)
                assert handoff["blocks"] == handoff["digests_checked"] > 0 and handoff["recomputed_tokens"] == 0 and not handoff["failure"]
        await live.quiet()
