"""The training loop on a model of a few thousand parameters: it learns, and a stopped training resumes as if it had not been stopped."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from baton.engine.model.checkpoint import Checkpoint, ModelConfig, with_head
from baton.engine.model.config_json import read_config
from baton.models.folder import Shape
from baton.models.train import training
from baton.models.train.__main__ import export, export_head
from baton.models.train.batches import OTHERS_WEIGHT, collate, round_batches
from baton.models.train.corpus import SPECIAL
from baton.models.train.head import TrainedHead, head_loss, new_head
from baton.models.train.recipe import CONTEXT, HEAD, RECIPES, TALE, Recipe, Stage
from baton.models.train.tokenizer import train_tokenizer
from baton.models.train.training import TrainingProgress, new_model, rate, read_run, train

VOCAB = 400
TINY = replace(TALE, name="tiny", shape=Shape(16, 32, 1, 2, 1, VOCAB, CONTEXT, tied=True))
STAGE = replace(TALE.stages["texts"], tokens=60_000)
PHASES = STAGE.phases


class Stopped(Exception):
    pass


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(VOCAB, seed=1, count=50)


@pytest.fixture(autouse=True)
def save_after_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "SAVE_EVERY_S", 0.0)
    monkeypatch.setattr("baton.models.train.batches.ROUND_WORDS", 800)


def run(
    tokenizer: Tokenizer, folder: Path, stop_at: int | None = None, stage: Stage = STAGE
) -> tuple[dict[str, torch.Tensor], TrainingProgress]:
    seen: list[TrainingProgress] = []

    def on_round(now: TrainingProgress) -> None:
        seen.append(now)
        if now.round == stop_at:
            raise Stopped

    model = new_model(TINY)
    train(model, stage, tokenizer, folder, on_round)
    return {name: p.detach().clone() for name, p in model.named_parameters()}, seen[-1]


def test_a_stopped_training_resumes_as_if_it_had_not_been_stopped(tokenizer: Tokenizer, tmp_path: Path) -> None:
    weights, whole = run(tokenizer, tmp_path / "whole")
    with pytest.raises(Stopped):
        run(tokenizer, tmp_path / "stopped", stop_at=2)
    assert read_run(tmp_path / "stopped").round == 1, "the interrupted round must not be saved"
    again, resumed = run(tokenizer, tmp_path / "stopped")
    assert [entry[:2] for entry in resumed.history] == [entry[:2] for entry in whole.history] and len(whole.history) >= 3
    for name, value in weights.items():
        assert torch.equal(value, again[name]), name
    assert not torch.equal(weights["model.embed_tokens.weight"], new_model(TINY).get_parameter("model.embed_tokens.weight"))


def test_training_lowers_the_loss(tokenizer: Tokenizer, tmp_path: Path) -> None:
    _, last = run(tokenizer, tmp_path)
    assert last.history[-1][1] < last.history[0][1] - 0.05


def test_a_draft_learns_from_its_teacher(tokenizer: Tokenizer) -> None:
    """The loss against a teacher's distribution is lowest for the teacher itself, where it is the entropy."""
    batch = next(iter(round_batches(tokenizer, 0, PHASES[0])))
    teacher, other = new_model(TINY), new_model(TINY)
    with torch.no_grad():
        for model, spread in ((teacher, 1.0), (other, 0.3)):
            for p in model.parameters():
                p.add_(torch.randn_like(p) * spread)
    own = training.text_loss(teacher, batch, "cpu", teacher).item()
    assert own < training.text_loss(other, batch, "cpu", teacher).item()
    assert own != pytest.approx(training.text_loss(teacher, batch, "cpu", None).item(), rel=1e-3)


def test_batches_are_bounded_consistent_and_reproducible(tokenizer: Tokenizer) -> None:
    batches = list(round_batches(tokenizer, 3, PHASES[1]))
    again = list(round_batches(tokenizer, 3, PHASES[1]))
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(batches, again, strict=True))
    assert not torch.equal(batches[0].ids, next(iter(round_batches(tokenizer, 4, PHASES[1]))).ids)
    for batch in batches:
        assert batch.ids.numel() <= 4096 + CONTEXT + 1 and batch.ids.shape[1] <= CONTEXT + 1
        assert batch.weights.shape == (batch.ids.shape[0], batch.ids.shape[1] - 1)
        assert batch.tokens == int((batch.weights > 0).sum())


def test_tokens_that_the_model_does_not_write_count_less() -> None:
    bos, eos, user, assistant, _ = range(len(SPECIAL))
    row = [bos, user, 10, 11, eos, assistant, 12, 13, eos, user, 14]
    low, full = OTHERS_WEIGHT, 1.0
    expected = [low, low, low, low, low, full, full, full, low, low]
    weights = collate([row, [bos, 10, 11, eos]]).weights
    assert weights[0].tolist() == pytest.approx(expected)
    assert weights[1].tolist() == pytest.approx([full, full, full] + [0.0] * 7), "plain text counts in full, padding not at all"


def test_the_learning_rate_rises_stays_and_falls_to_zero() -> None:
    rates = [rate(i / 1000) for i in range(1001)]
    top = rates.index(1.0)
    assert rates[0] < 0.1 and rates[:top] == sorted(rates[:top]) and rates[top:] == sorted(rates[top:], reverse=True)
    assert rates[300] == 1.0 and rates[-1] == pytest.approx(0.0)


def test_the_phases_cover_the_whole_training() -> None:
    assert [STAGE.phase(at) for at in (0.0, 0.1, 0.2, 0.4, 0.5, 0.7, 1.1)] == [PHASES[i] for i in (0, 0, 1, 2, 2, 3, 3)]
    stages = [HEAD.stage, *(stage for recipe in RECIPES.values() for stage in recipe.stages.values())]
    assert all(sum(share for _, share in part.sizes) == pytest.approx(1.0) for stage in stages for part in stage.phases)


def test_a_share_of_the_documents_offers_tools(tokenizer: Tokenizer) -> None:
    def offers(tools: float) -> list[bool]:
        batches = list(round_batches(tokenizer, 0, replace(PHASES[1], tools=tools)))
        texts = tokenizer.decode_batch([row.tolist() for batch in batches for row in batch.ids], skip_special_tokens=False)
        return ["You can call these tools:" in text for text in texts]

    assert not any(offers(0.0)) and all(offers(1.0))
    assert 0.2 < sum(half := offers(0.5)) / len(half) < 0.8


def test_an_exported_model_is_a_valid_checkpoint(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = new_model(TINY)
    export(model, TINY, tokenizer, tmp_path)
    checkpoint = Checkpoint(tmp_path, read_config(tmp_path))
    weights = load_file(tmp_path / "model.safetensors")
    assert set(weights) == set(dict(model.named_parameters())) and all(w.dtype == torch.bfloat16 for w in weights.values())
    assert torch.equal(checkpoint.tensor("model.norm.weight"), weights["model.norm.weight"])


def test_a_head_is_trained_on_what_it_will_see_when_it_guesses() -> None:
    """In pass k, as if the last k - 1 hidden states were its own guesses, and those before the model's."""
    torch.manual_seed(1)
    model: Any = new_model(TINY)
    head, length = TrainedHead(model, 24), 7
    embedded, true = torch.randn(2, length, 16), torch.randn(2, length, 16)
    turns = model.model.rotary_emb(true, torch.arange(length)[None])
    before, earlier, made = true, list[tuple[torch.Tensor, torch.Tensor]](), [true]
    for number in range(3):
        guessed = head(embedded, before, turns, earlier)
        for at in range(number, length):
            seen = true.clone()
            for back in range(number):
                seen[:, at - back] = made[number - back][:, at - back]
            alone = head(embedded, seen, turns, [])
            torch.testing.assert_close(guessed[:, at], alone[:, at])
        before = torch.nn.functional.pad(guessed, (0, 0, 1, 0))[:, :-1]
        made.append(before)


def test_a_head_learns_and_is_exported_with_the_names_of_a_layer_after_the_last(tokenizer: Tokenizer, tmp_path: Path) -> None:
    seen: list[TrainingProgress] = []
    teacher: Any = new_model(TINY)
    teacher.model.embed_tokens.weight.data *= 20  # so that it is sure of something
    head = new_head(replace(HEAD, inner=24), teacher)
    train(head, replace(STAGE, tokens=16_000), tokenizer, tmp_path / "work", lambda run: seen.append(replace(run)), teacher, head_loss)
    assert seen[-1].history[-1][1] < seen[0].history[0][1] - 0.05
    export_head(head, tmp_path / "head")
    config = with_head(read_config_of(TINY, tokenizer, teacher, tmp_path / "model"), 24)
    checkpoint = Checkpoint(tmp_path / "head", config, head=True)
    assert checkpoint.tensor("model.layers.1.eh_proj.weight").shape == (16, 32)


def read_config_of(recipe: Recipe, tokenizer: Tokenizer, model: torch.nn.Module, folder: Path) -> ModelConfig:
    export(model, recipe, tokenizer, folder)
    return read_config(folder)
