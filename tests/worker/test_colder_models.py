"""KV of a real model comes back from tiers bit for bit: the tokens of an engine that has computed it, whatever a block consists of."""

import random
from pathlib import Path
from typing import Any

import pytest
from engine_bench import started
from tokenizers import Tokenizer

from baton.cli.up import SHIPPED
from baton.cluster.config_engine import TiersConfig
from baton.engine.options import Options
from baton.models.train.stories import story
from baton.tiers.tiers import Tiers
from baton.worker.colder import make_tiers

LONGEST = 1024  # tokens


def prompt(number: int) -> list[int]:
    tokenizer, rng = Tokenizer.from_file(str(SHIPPED / "tokenizer.json")), random.Random(number)
    text = " ".join(sentence for _ in range(9) for sentence in story(rng, 4).sentences)
    return list(tokenizer.encode(text).ids[:700])


@pytest.mark.parametrize(
    "of_a_block",  # and a pool of 1,024 to 1,600 tokens
    [
        {"kv_memory_mib": 5},
        {"kv_memory_mib": 1.5, "kv_dtype": "int8"},
        {"kv_memory_mib": 0.8, "kv_dtype": "int5"},
        {"kv_memory_mib": 6, "speculation": "draft", "draft_model": str(SHIPPED.with_name("tale-draft"))},
    ],
    ids=["keys and values", "numbers and scales", "rows of int5", "the draft's, too"],
)
async def test_what_was_loaded_gives_the_tokens_of_what_was_computed(
    tmp_path: Path, of_a_block: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is there is loaded, also where a busy machine would compute it sooner.
    monkeypatch.setattr(Tiers, "worth_loading", lambda self, media, compute_s, now: len(media))
    monkeypatch.setattr(Tiers, "worth_meeting", lambda self, media, compute_s, now: None)
    options = Options.of(SHIPPED, threads=1, max_model_len=LONGEST, **of_a_block)
    tiers = make_tiers(TiersConfig(memory_mib=2, disk=str(tmp_path), disk_mib=64, wait_s=20.0, save="at_once"), "w")
    assert tiers is not None
    bench, first = await started(options, tiers), list[list[int]]()
    try:
        for number in range(3):
            first.append(await bench.run(bench.seq(prompt(number))))
            whole = (number + 1) * (len(prompt(number)) // bench.engine.pool.layout.block_size)
            await bench.until(lambda whole=whole: sum(tier.units for tier in tiers.told()) >= whole)  # on a busy machine that takes a while
        again = bench.seq(prompt(0))
        assert await bench.run(again) == first[0]
        assert again.prefilled < 300, "of 700 tokens; the last block is always computed"
        assert sum(tier.tally.hits for tier in tiers.told()) > 20
    finally:
        tiers.close()
        await bench.engine.close()
    assert not bench.failures
