"""A real model computes a context that is longer than its pool with the bits of one whose pool holds everything."""

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_bench import started
from pydantic import ValidationError
from tokenizers import Tokenizer

from baton.cli.up import SHIPPED
from baton.cluster.config_engine import TiersConfig
from baton.engine.build import BuildError
from baton.engine.core.contract import Listener
from baton.engine.core.loop import EngineLoop
from baton.engine.core.sequence import Sequence
from baton.engine.model.long_attention import Panel
from baton.engine.options import Options
from baton.engine.runner import ModelRunner
from baton.engine.start import start_engine
from baton.models.train.stories import story
from baton.worker.colder import make_tiers

LONG: dict[str, Any] = {"memory_mib": 16, "long_contexts": 1}


def prompt(number: int, length: int) -> list[int]:
    tokenizer, rng = Tokenizer.from_file(str(SHIPPED / "tokenizer.json")), random.Random(number)
    text = " ".join(sentence for _ in range(40) for sentence in story(rng, 4).sentences)
    return list(tokenizer.encode(text).ids[:length])


async def told(options: Options, tiers: TiersConfig | None, length: int) -> tuple[list[object], Sequence]:
    """What the model says, with log-probabilities, after three prompts at once, of which the first has this length."""
    opened = None if tiers is None else make_tiers(tiers, "w")
    bench = await started(replace(options, long_contexts=0 if tiers is None else tiers.long_contexts), opened)
    try:
        seqs = [bench.seq(prompt(1, length), max_tokens=40, logprobs=2)]
        if options.engine.compiled:  # else bits depend on the batch
            seqs += [bench.seq(prompt(n, 30 * n), max_tokens=20, logprobs=2) for n in (2, 3)]
        for seq in seqs:
            await bench.engine.add(seq)
        await bench.quiet()
        assert not bench.failures and not [output.failure for output in bench.outputs if output.failure]
        return [(output.seq.prompt_len, output.sampled) for seq in seqs for output in bench.outputs if output.seq is seq], seqs[0]
    finally:
        if opened is not None:
            opened.close()
        await bench.engine.close()


@pytest.mark.parametrize(
    ("keys", "of_tier"),
    [
        ({"kv_memory_mib": 1}, {}),  # 256 tokens
        ({"kv_memory_mib": 1.1, "kv_dtype": "int8"}, {}),
        ({"kv_memory_mib": 1, "compiled": False, "max_num_batched_tokens": 64}, {}),
        ({"kv_memory_mib": 1, "dtype": "bfloat16"}, {"disk": True}),
    ],
    ids=["float32", "int8", "plain torch", "bfloat16 on a disk"],
)
async def test_the_bits_are_those_of_a_large_pool(tmp_path: Path, keys: dict[str, Any], of_tier: dict[str, Any]) -> None:
    tier = TiersConfig(disk=str(tmp_path), disk_mib=64, long_contexts=1) if of_tier else TiersConfig(**LONG)
    options = Options.of(SHIPPED, threads=1, **keys)
    large, _ = await told(options.but(kv_memory_mib=32), None, 1500)
    long, seq = await told(options, tier, 1500)
    assert long == large
    assert seq.preemptions == 0


async def test_what_goes_on_elsewhere_has_the_same_bits() -> None:
    """The prompt and a part of the output, as after the death of a worker: the tail is computed as the steps that it was."""
    options = replace(Options.of(SHIPPED, threads=1, kv_memory_mib=1), long_contexts=1)
    said: list[list[int]] = []
    for known in (0, 17):
        tiers = make_tiers(TiersConfig(**LONG), "w")
        bench = await started(options, tiers)
        try:
            tokens = prompt(1, 900)
            seq = bench.seq([*tokens, *(said[0][:known] if known else ())], 900, max_tokens=40)
            said.append(await bench.run(seq))
        finally:
            assert tiers is not None
            tiers.close()
            await bench.engine.close()
    assert said[1] == said[0][17:] and len(said[0]) == 40


async def test_a_block_that_is_not_where_it_was_changes_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the tests above see it if one block of the panel is another."""
    whole, take = Options.of(SHIPPED, threads=1, kv_memory_mib=1), Panel.take

    def wrong(panel: Panel, block: int, unit: Any, first: int) -> None:
        take(panel, {3: 4, 4: 3}.get(block, block), unit, first)

    right, _ = await told(whole, TiersConfig(**LONG), 600)
    monkeypatch.setattr(Panel, "take", wrong)
    assert (await told(whole, TiersConfig(**LONG), 600))[0] != right


async def test_a_panel_has_as_many_layers_as_half_of_the_pool_holds() -> None:
    """So what it takes is bounded: half of the pool, or one layer of the longest context."""
    for mib, layers in ((1.0, 1), (8.0, 2), (14.0, 3)):
        tiers = make_tiers(TiersConfig(**LONG), "w")
        bench = await started(replace(Options.of(SHIPPED, threads=1, kv_memory_mib=mib), long_contexts=1), tiers)
        try:
            assert isinstance(bench.engine, EngineLoop) and isinstance(runner := bench.engine._engine.runner, ModelRunner)
            assert runner._long is not None and runner._long.panel.layers == layers
        finally:
            assert tiers is not None
            tiers.close()
            await bench.engine.close()


@pytest.mark.parametrize(
    ("keys", "tier", "why"),
    [
        ({"kv_memory_mib": 0.1}, LONG, "engine.kv_memory_mib: 0.1 MiB hold 1 blocks of KV; tiers.long_contexts needs 8"),
        ({"speculation": "draft"}, LONG, "tiers.long_contexts: needs an engine.speculation other than draft"),
        ({"prefix_caching": False}, LONG, "tiers need engine.kind baton and engine.prefix_caching"),
        ({"kv_memory_mib": 1}, {"memory_mib": 4, "long_contexts": 1}, "tiers.long_contexts: 1 of 2048 tokens need 128 blocks in one tier"),
        ({"kv_memory_mib": 1}, {"memory_mib": 16}, "engine.kv_memory_mib: 1.0 MiB hold 256 tokens of KV, fewer than one sequence"),
    ],
    ids=["a pool without a window", "a draft", "no prefix cache", "a small tier", "without the key"],
)
async def test_what_cannot_be_is_refused_by_its_key(keys: dict[str, Any], tier: dict[str, Any], why: str) -> None:
    config = TiersConfig(**tier)
    options = replace(Options.of(SHIPPED, threads=1, **keys), long_contexts=config.long_contexts)
    with pytest.raises(BuildError, match=re.escape(why)):
        await start_engine(options, Listener(_ignore, _ignore, _ignore), tiers=make_tiers(config, "w"))


def test_without_a_tier_that_keeps_what_it_has_it_is_refused() -> None:
    refused: tuple[dict[str, Any], ...] = {}, {"object": "memory://a", "object_mib": 4}
    for keys in refused:
        with pytest.raises(ValidationError, match="long_contexts needs memory_mib or disk"):
            TiersConfig(long_contexts=1, **keys)


async def test_without_tiers_it_is_refused() -> None:
    with pytest.raises(BuildError, match=re.escape("tiers.long_contexts: there is no tier")):
        await start_engine(replace(Options.of(SHIPPED), long_contexts=1), Listener(_ignore, _ignore, _ignore))


def _ignore(*anything: object) -> None:
    pass
