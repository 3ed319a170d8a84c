"""The training loop: rounds of documents, Muon for the matrices and AdamW for the rest, and regular checkpoints of everything.

Muon: Jordan et al. 2024, "Muon: an optimizer for hidden layers". Distillation: Hinton et al. 2015, https://arxiv.org/abs/1503.02531.
"""

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from baton.engine.model.memory import keep_memory
from baton.models.folder import BOS_ID, EOS_ID, RMS_NORM_EPS
from baton.models.train.batches import Batch, round_batches
from baton.models.train.recipe import SEED, Recipe, Stage

WARMUP = 0.026  # of a stage
DECAY_FROM = 0.48  # of a stage; from there the rate falls to zero
SAVE_EVERY_S = 120.0
Loss = Callable[[nn.Module, Batch, str, nn.Module | None], Tensor]  # (model, batch, device, teacher) → what falls


@dataclass(slots=True)
class TrainingProgress:
    """The progress of a training. `history` has one entry per round: [tokens so far, loss, seconds so far]."""

    round: int = 0
    tokens: int = 0
    seconds: float = 0.0
    history: list[tuple[int, float, float]] = field(default_factory=list)


def new_model(recipe: Recipe) -> nn.Module:
    torch.manual_seed(SEED)
    shape = recipe.shape
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context,
        rms_norm_eps=RMS_NORM_EPS,
        tie_word_embeddings=shape.tied,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def train(
    model: nn.Module,
    stage: Stage,
    tokenizer: Tokenizer,
    folder: Path,
    on_round: Callable[[TrainingProgress], None],
    teacher: nn.Module | None = None,
    loss_of: Loss | None = None,
) -> None:
    """Takes `model`, in float32, through `stage`, from the last state in `folder` if there is one. `loss_of`: `text_loss` if it is None."""
    keep_memory()
    device, tokens = next(model.parameters()).device.type, stage.tokens
    optimizers = _optimizers(model, stage)
    run = _resume(folder, model, optimizers)
    saved = begun = time.monotonic()
    before = run.seconds
    while run.tokens < tokens:
        losses = []
        for batch in round_batches(tokenizer, run.round, stage.phase(run.tokens / tokens)):
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = stage.learning_rate * group["scale"] * rate(run.tokens / tokens)
            loss = (loss_of or text_loss)(model, batch, device, teacher)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            run.tokens += batch.tokens
            losses.append(loss.detach())
        run.round += 1
        now = time.monotonic()
        run.seconds = before + now - begun
        run.history.append((run.tokens, round(torch.stack(losses).mean().item(), 4), round(run.seconds, 1)))
        on_round(run)
        if now - saved > SAVE_EVERY_S or run.tokens >= tokens:
            _save(folder, model, optimizers, run)
            saved = now


def rate(progress: float) -> float:
    """Share of a stage's learning rate: it rises, stays level, and falls to zero along a cosine."""
    if progress < WARMUP:
        return (progress + 1e-3) / (WARMUP + 1e-3)
    if progress < DECAY_FROM:
        return 1.0
    return max(0.0, 0.5 + 0.5 * math.cos(math.pi * (progress - DECAY_FROM) / (1 - DECAY_FROM)))


def text_loss(model: nn.Module, batch: Batch, device: str, teacher: nn.Module | None) -> Tensor:
    """Weighted mean over the tokens: cross entropy with the text, or with the teacher's distribution."""
    ids, weights = batch.ids.to(device), batch.weights.to(device).flatten()
    with torch.autocast(device, torch.bfloat16):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits.flatten(0, 1)
        if teacher is not None:
            with torch.no_grad():
                target = teacher(input_ids=ids[:, :-1], use_cache=False).logits.flatten(0, 1).float().softmax(-1)
        else:
            target = ids[:, 1:].flatten()
    each = functional.cross_entropy(logits.float(), target, reduction="none")
    mean: Tensor = (each * weights).sum() / weights.sum()
    return mean


def _optimizers(model: nn.Module, stage: Stage) -> list[torch.optim.Optimizer]:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        torch.optim.Muon([{"params": matrices, "scale": 1.0}], lr=stage.learning_rate, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([{"params": others, "scale": 0.5}], lr=stage.learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def _save(folder: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], run: TrainingProgress) -> None:
    """Saves weights and optimizer state as safetensors, the rest as JSON; a crash leaves the old state intact."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"model/{name}": p.detach().contiguous() for name, p in model.named_parameters()}
    for i, optimizer in enumerate(optimizers):
        for key, values in optimizer.state_dict()["state"].items():
            tensors |= {f"{i}/{key}/{name}": value.contiguous() for name, value in values.items()}
    scratch = folder / "state.safetensors.new"
    save_file(tensors, scratch, metadata={"run": json.dumps(asdict(run))})
    scratch.rename(folder / "state.safetensors")


def _resume(folder: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> TrainingProgress:
    """Restores what `_save` wrote, or starts a new run if there is nothing."""
    file = folder / "state.safetensors"
    if not file.exists():
        return TrainingProgress()
    tensors = load_file(file)
    model.load_state_dict({name: tensors[f"model/{name}"] for name, _ in model.named_parameters()}, strict=False)
    for i, optimizer in enumerate(optimizers):
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            owner, _, rest = name.partition("/")
            if owner == str(i):
                key, _, what = rest.partition("/")
                state.setdefault(int(key), {})[what] = value
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return read_run(folder)


def read_run(folder: Path) -> TrainingProgress:
    """How far the training in `folder` has come."""
    with safe_open(folder / "state.safetensors", "pt") as file:
        saved = json.loads(file.metadata()["run"])
    return TrainingProgress(saved["round"], saved["tokens"], saved["seconds"], [tuple(entry) for entry in saved["history"]])
