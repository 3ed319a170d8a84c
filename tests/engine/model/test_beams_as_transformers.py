"""Beams find the tokens and the scores that `transformers` finds, in float32: ten prompts on the `tale` that ships, with this processor's
kernels, and on a small Qwen 3 with random weights, in plain torch. The searches run side by side, in small chunks, with prefixes in common.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

import baton.models
from baton.engine.choice import load_runner
from baton.engine.core.beams import Beams, Hypothesis
from baton.engine.core.engine import Engine
from baton.engine.core.kvcache import KvPool
from baton.engine.core.limits import Limits
from baton.engine.core.sampling import LOGPROBS_MODES, SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.runner import ModelRunner

TALE = Path(baton.models.__file__).parent / "tale"
PROMPTS = (
    "Once upon a time",
    "Once upon a time there was a girl who lived near the sea. One day",
    "The old king had three sons.",
    "The fox and the",
    "In a small village",
    "A boy named Tom found a",
    "It was raining, and the cat",
    "Question: Who lived near the sea? Answer:",
    "She opened the box. Inside",
    "The end",
)
ASKED: tuple[tuple[Beams, dict[str, Any]], ...] = (
    (Beams(4, 4), {}),
    (Beams(2, 1, 1.0, "true"), {}),
    (Beams(5, 3, 0.6, "never"), {}),
    (Beams(3, 3, -0.5), {}),
    (Beams(4, 2, 2.0, "never"), {}),
    (Beams(6, 6, 0.0, "true"), {}),
    (Beams(3, 2, 2.0), {"min_tokens": 10}),
    (Beams(4, 4, 1.0, "true"), {"ignore_eos": True}),
    (Beams(8, 8), {}),
    (Beams(4, 2), {"stop_token_ids": frozenset([5, 17, 40])}),
)


def qwen(folder: Path) -> list[list[int]]:
    torch.manual_seed(11)
    config = Qwen3Config(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        max_position_embeddings=512, eos_token_id=[3, 9, 20, 33, 50, 71], initializer_range=0.12,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    shared = torch.randint(0, 96, (20,)).tolist()
    return [shared[: 2 * i] + torch.randint(0, 96, (7 + i,)).tolist() for i in range(10)]


def searched(folder: Path, prompts: list[list[int]], tokens: int) -> tuple[list[list[Hypothesis]], Engine]:
    runner = load_runner(ModelRunner, folder, dtype="float32", block_size=8, compiled=folder is TALE)
    runner.attach(KvPool(runner.layout, 400))
    engine = Engine(runner, Limits(max_num_seqs=30, max_num_batched_tokens=40), 400)
    for i, (prompt, (beams, more)) in enumerate(zip(prompts, ASKED, strict=True)):
        params = SamplingParams(tokens, beams=beams, **more)
        engine.add(Sequence(str(i), list(prompt), len(prompt), params, b"root"))
    found = {output.seq.id: list(output.found) for _ in iter(lambda: engine.idle, True) for output in engine.step() if output.found}
    engine.pool.check()
    assert engine.pool.num_owned == 0
    return [found[str(i)] for i in range(len(prompts))], engine


def theirs(model: Any, prompt: list[int], beams: Beams, tokens: int, eos: set[int], more: dict[str, Any]) -> list[Hypothesis]:
    stops = set(more.get("stop_token_ids", ())) | (set() if more.get("ignore_eos") else eos)
    early: Any = {"true": True, "false": False, "never": "never"}[beams.early_stopping]
    least = {"min_new_tokens": more["min_tokens"]} if "min_tokens" in more else {}
    with torch.inference_mode():
        answer = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), do_sample=False, num_beams=beams.width,
            num_return_sequences=beams.count, length_penalty=beams.length_penalty, early_stopping=early, max_new_tokens=tokens,
            eos_token_id=sorted(stops) or None, pad_token_id=0, return_dict_in_generate=True, output_scores=True, output_logits=True,
            **least,
        )  # fmt: skip
    found = []
    for ids, score, indices in zip(answer.sequences.tolist(), answer.sequences_scores.tolist(), answer.beam_indices.tolist(), strict=True):
        output = tuple(ids[len(prompt) : len(prompt) + sum(index >= 0 for index in indices)])
        found.append(Hypothesis(output, score, output[-1] in stops))
    return found


pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.mark.parametrize("name", ["tale", "qwen3"])
def test_ten_prompts(name: str, tmp_path: Path) -> None:
    folder, tokens = (TALE, 24) if name == "tale" else (tmp_path, 16)
    tokenizer = Tokenizer.from_file(str(TALE / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in PROMPTS] if name == "tale" else qwen(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    ours, engine = searched(folder, prompts, tokens)
    endings, eos = set(), set(engine.runner.eos_token_ids)
    for prompt, mine, (beams, more) in zip(prompts, ours, ASKED, strict=True):
        expected = theirs(model, prompt, beams, tokens, eos, more)
        assert [one.tokens for one in mine] == [one.tokens for one in expected], (prompt, beams)
        assert [one.stopped for one in mine] == [one.stopped for one in expected]
        assert [one.score for one in mine] == pytest.approx([one.score for one in expected], rel=1e-5)
        endings |= {one.stopped for one in mine}
    assert endings == {True, False} and (name == "tale" or engine.counts.hit_tokens)


def test_what_log_probabilities_are_told_of_changes_no_search() -> None:
    """Those that are processed have no early stops, and would sum up to something else."""
    found = []
    for mode in LOGPROBS_MODES:
        runner = load_runner(ModelRunner, TALE, dtype="float32", block_size=8)
        runner.attach(KvPool(runner.layout, 40))
        engine = Engine(runner, Limits(max_num_seqs=4, max_num_batched_tokens=40), 100)
        often = frozenset(range(100, 220))
        params = SamplingParams(9, min_tokens=6, stop_token_ids=often, beams=Beams(3, 3), logprobs_mode=mode)
        engine.add(Sequence("a", list(range(20, 40)), 20, params, b"root"))
        found += [output.found for _ in iter(lambda e=engine: e.idle, True) for output in engine.step() if output.found]  # type: ignore[misc]
    assert found[0] == found[1]
