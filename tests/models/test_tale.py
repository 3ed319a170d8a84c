"""The shipped checkpoint: it is intact, matches its card and can recall facts, and its draft model mostly agrees with it."""

import json
import shutil
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from host_pool import on_host
from tokenizers import Tokenizer
from torch import nn

from baton.cli.up import SHIPPED
from baton.engine.build import BuildError, build
from baton.engine.choice import load_runner
from baton.engine.core.engine import Engine
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.model.naive import next_logits
from baton.engine.options import Options
from baton.engine.runner import ModelRunner
from baton.models.train import card, evaluate
from baton.models.train.corpus import documents
from baton.models.train.recipe import CONTEXT, RECIPES, SEED, TOKENIZER_DOCUMENTS, VOCAB
from baton.models.train.tokenizer import train_tokenizer

DRAFT = SHIPPED.with_name("tale-draft")
RESULTS = json.loads((SHIPPED / "results.json").read_text())
BLOCK = 16


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return card.load(SHIPPED)


@pytest.fixture(scope="module")
def draft() -> nn.Module:
    return card.load(DRAFT)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses less of the held-out text."""
    monkeypatch.setattr(evaluate, "HELD_OUT", {150: 24, 350: 8})


def test_the_shipped_models_are_small_and_follow_their_recipes(model: nn.Module, draft: nn.Module) -> None:
    files = [file for folder in (SHIPPED, DRAFT) for file in folder.iterdir()]
    assert sum(file.stat().st_size for file in files) <= 15_000_000
    assert not any(file.suffix in (".bin", ".pt", ".pth", ".pkl") for file in files), "nothing may be pickled"
    sizes = {name: sum(p.numel() for p in m.parameters()) for name, m in (("tale", model), ("tale-draft", draft))}
    assert sizes == RESULTS["parameters"] and 2e6 < sizes["tale"] < 6e6 and sizes["tale-draft"] < sizes["tale"] / 8
    for folder in (SHIPPED, DRAFT):
        config, shape = json.loads((folder / "config.json").read_text()), RECIPES[folder.name].shape
        assert config["num_attention_heads"] > config["num_key_value_heads"] == shape.kv_heads, "grouped-query attention"
        assert config["max_position_embeddings"] == shape.context >= 2048


def test_the_shipped_tokenizer_can_be_made_from_the_seed() -> None:
    made = train_tokenizer(VOCAB, SEED, TOKENIZER_DOCUMENTS)
    for folder in (SHIPPED, DRAFT):
        assert Tokenizer.from_file(str(folder / "tokenizer.json")).to_str() == made.to_str()


def test_the_engine_gives_the_logits_of_transformers(model: nn.Module, tokenizer: Tokenizer) -> None:
    ours = load_runner(ModelRunner, SHIPPED).model
    for text in islice(documents(SEED, "logits", 350), 3):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        with torch.inference_mode():
            theirs = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        for n in (1, 17, len(ids) // 2, len(ids)):
            torch.testing.assert_close(next_logits(ours, ids[:n])[0], theirs[n - 1], rtol=0, atol=2e-3)


@pytest.mark.usefixtures("few")
def test_held_out_losses_match_the_card(model: nn.Module, draft: nn.Module, tokenizer: Tokenizer) -> None:
    for name, m in (("tale", model), ("tale-draft", draft)):
        loss = evaluate.held_out_loss(m, tokenizer)
        assert loss.all == pytest.approx(RESULTS["losses"][name]["nats"], rel=0.25)
        assert loss.assistant < loss.all, "answers must be easier to predict than the whole text"
    untrained = nn.Module.train(card.load(SHIPPED), False)
    with torch.no_grad():
        for p in untrained.parameters():
            p.normal_(std=0.02)
    assert evaluate.held_out_loss(untrained, tokenizer).all > 5


@pytest.mark.usefixtures("few")
def test_the_draft_mostly_agrees_with_the_model(model: nn.Module, draft: nn.Module, tokenizer: Tokenizer) -> None:
    agreement = evaluate.agreement(draft, model, tokenizer)
    assert agreement == pytest.approx(RESULTS["agreement"], abs=0.05) and agreement >= 0.7
    assert evaluate.agreement(model, model, tokenizer) == 1.0


@pytest.mark.parametrize("distance", [64, 512])
def test_recall_is_as_good_as_the_card_says(distance: int, model: nn.Module, tokenizer: Tokenizer) -> None:
    said = next(row for row in RESULTS["recall"] if row["distance"] == distance)
    right, measured = evaluate.recall(model, tokenizer, distance, trials=20)
    assert right >= said["tale"] - 0.25 and abs(measured - distance) < 0.25 * distance + 20


def test_tools_are_used_as_well_as_the_card_says(model: nn.Module, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "USES_TRIED", 8)
    for kind, right in evaluate.tool_use(model, tokenizer).items():
        assert all(right[of] >= RESULTS["tools"][kind][of] - 0.25 for of in ("calls", "answers")), kind
    assert all(said["calls"] >= 0.9 for said in RESULTS["tools"].values())


def test_a_recall_question_is_as_far_from_its_fact_as_requested(tokenizer: Tokenizer) -> None:
    for distance in evaluate.DISTANCES:
        prompt, answer, gap = evaluate.recall_question(tokenizer, distance, 0)
        assert len(prompt) + len(answer) <= CONTEXT and abs(gap - distance) < 0.25 * distance + 20


def ask(engine: Engine, prompt: list[int], name: str) -> tuple[list[int], list[int], int]:
    """The greedy answer, the blocks it was computed on, and how many prompt tokens were cached."""
    seq = Sequence(name, list(prompt), len(prompt), SamplingParams(max_tokens=24, temperature=0.0), b"root")
    engine.add(seq)
    said: list[int] = []
    blocks: list[int] = []
    cached = 0
    while not engine.idle:
        for output in engine.step():
            if not said:
                blocks, cached = list(output.seq.blocks), output.seq.cached
            said.append(output.sampled.token if output.sampled else -1)
    return said, blocks, cached


def test_a_broken_kv_block_changes_the_answer(tokenizer: Tokenizer) -> None:
    """The same prompts on the same cached blocks: right while they are intact, wrong when those that hold the fact are not."""
    engine = build(Options.of(SHIPPED, kv_memory_mib=64)).engine
    right = broken = asked = 0
    for trial in range(12):
        prompt, answer, gap = evaluate.recall_question(tokenizer, 256, trial)
        first, blocks, _ = ask(engine, prompt, f"first {trial}")
        if first != answer:
            continue
        asked += 1
        again, _, cached = ask(engine, prompt, f"again {trial}")
        assert cached >= len(prompt) - BLOCK - 1
        right += again == answer
        for block in {(len(prompt) - gap + i) // BLOCK for i in range(8)}:
            on_host(engine.runner.pool).array[blocks[block]] = np.random.default_rng(trial).permutation(
                on_host(engine.runner.pool).array[blocks[block]]
            )
        with np.errstate(all="ignore"):
            wrong, _, cached = ask(engine, prompt, f"broken {trial}")
        broken += wrong != answer
    assert asked >= 6 and right == asked and broken >= asked - 1


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SHIPPED, tmp_path / "copy"))


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_an_altered_file_is_refused_by_name(name: str, copy: Path) -> None:
    options = Options.of(copy, kv_memory_mib=32)
    flip(copy / name)
    with pytest.raises(BuildError, match=rf"{name}: altered or truncated"):
        build(options)
    if name == "model.safetensors":
        (copy / "SHA256SUMS").unlink()
        build(options)  # without the sums the change goes unnoticed


def test_a_truncated_or_missing_file_is_refused(copy: Path) -> None:
    options, file = Options.of(copy, kv_memory_mib=32), copy / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(BuildError, match="altered or truncated"):
        build(options)
    (copy / "SHA256SUMS").rename(copy / "sums")
    with pytest.raises(ValueError, match="truncated or altered"):
        build(options)
    (copy / "sums").rename(copy / "SHA256SUMS")
    file.unlink()
    with pytest.raises(BuildError, match=r"model\.safetensors: cannot be read"):
        build(options)


def test_malformed_checksum_lines_are_refused(copy: Path) -> None:
    for line in ("no sum at all", f"{'0' * 64}  ../config.json"):
        (copy / "SHA256SUMS").write_text(line + "\n")
        with pytest.raises(BuildError, match="is not a checksum of a file in this folder"):
            build(Options.of(copy))
