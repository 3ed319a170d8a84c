"""The model card: tables and pictures of what was measured, and samples, written next to the checkpoint."""

import json
import platform
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoModelForCausalLM
from transformers import __version__ as transformers_version

from baton.models.train import evaluate, tool_talk
from baton.models.train.corpus import render
from baton.models.train.dialogues import Message
from baton.models.train.recipe import CONTEXT, RECIPES, SEED, VOCAB
from baton.models.train.training import TrainingProgress

matplotlib.use("Agg")
from matplotlib import pyplot as plt

BLUE, ORANGE = "#0072B2", "#D55E00"  # Okabe and Ito's palette
PROMPTS = (
    "<|bos|>Once upon a time there was a fox who lived near the river and wanted to see the sea.",
    "<|bos|>Willa was a curious rabbit who lived near the garden.",
    "<|bos|>Once upon a time there was a brave dragon named Zorbel.",
    evaluate.ask("Tell me a story about a hedgehog named Pim and an owl."),
    render([tool_talk.offer((tool_talk.CALCULATE, tool_talk.TIME)), Message("user", "What is 238 plus 467?")], reply=True),
)


Runs = dict[tuple[str, str], TrainingProgress]  # (model, stage) → its training


def write(folder: Path, draft_folder: Path, runs: Runs) -> None:
    """Writes `results.json`, `loss.png`, `loss-tools.png`, `recall.png`, `samples.md` and `README.md` to `folder`, a short README.md to
    `draft_folder`. A stage that is not in `runs` keeps its picture and its record."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model, draft = load(folder), load(draft_folder)
    models = {folder.name: model, draft_folder.name: draft}
    print("held-out loss")
    losses = {name: evaluate.held_out_loss(m, tokenizer) for name, m in models.items()}
    agreement = evaluate.agreement(draft, model, tokenizer)
    recalls: list[dict[str, float]] = []
    for distance in evaluate.DISTANCES:
        row: dict[str, float] = {"distance": distance}
        for name, m in models.items():
            row[name], row["measured_distance"] = evaluate.recall(m, tokenizer, distance)
        print(row)
        recalls.append(row)
    results: dict[str, Any] = {
        "losses": {n: {"nats": x.all, "perplexity": x.perplexity, "own": x.assistant, "tokens": x.tokens} for n, x in losses.items()},
        "agreement": agreement,
        "sums": {name: evaluate.sums(m, tokenizer) for name, m in models.items()},
        "recall": recalls,
        "tools": evaluate.tool_use(model, tokenizer),
        "training": _records(folder / "results.json", runs),
        "parameters": {name: sum(p.numel() for p in m.parameters()) for name, m in models.items()},
        "machine": {
            "processor": _processor(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "transformers": transformers_version,
        },
        "seed": SEED,
    }
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    for stage, picture in (("texts", "loss.png"), ("tools", "loss-tools.png")):
        if drawn := {name: run for (name, of), run in runs.items() if of == stage}:
            draw_losses(drawn, folder / picture)
    draw_recall(recalls, folder / "recall.png")
    print("samples")
    samples = [
        (text, temperature, evaluate.generate(model, tokenizer, text, temperature, seed))
        for text in PROMPTS
        for temperature, seed in ((0.0, 0), (0.8, 1), (0.8, 2))
    ]
    (folder / "samples.md").write_text(_samples(samples))
    known = {
        **results,
        "name": folder.name,
        "draft": draft_folder.name,
        "shape": RECIPES[folder.name].shape,
        "draft_shape": RECIPES[draft_folder.name].shape,
        "vocab": VOCAB,
        "context": CONTEXT,
        "trials": evaluate.RECALL_TRIALS,
        "tried": evaluate.USES_TRIED,
        "trained": partial(_trained, results),
    }
    templates = Environment(loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, keep_trailing_newline=True)
    (folder / "README.md").write_text(templates.get_template("card.md.jinja").render(known))
    (draft_folder / "README.md").write_text(templates.get_template("draft_card.md.jinja").render(known))


def draw_losses(runs: dict[str, TrainingProgress], file: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for (name, run), colour in zip(runs.items(), (BLUE, ORANGE), strict=True):
        tokens, losses, _ = zip(*run.history, strict=True)
        against = f"against {RECIPES[name].teacher}'s distribution" if RECIPES[name].teacher else "against the text"
        axes.plot([t / 1e6 for t in tokens], losses, color=colour, lw=0.5, alpha=0.35)
        axes.plot([t / 1e6 for t in tokens], _smooth(losses), color=colour, lw=1.6, label=f"{name}, {against}")
    axes.set(xlabel="training tokens (millions)", ylabel="weighted loss (nats a token)", title="Training loss", ylim=(0, 3))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=110)
    plt.close(figure)


def draw_recall(recalls: list[dict[str, float]], file: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, colour, marker in zip(RECIPES, (BLUE, ORANGE), "os", strict=True):
        axes.plot([r["measured_distance"] for r in recalls], [100 * r[name] for r in recalls], color=colour, marker=marker, label=name)
    axes.set(xscale="log", xlabel="tokens between fact and question", ylabel="answered right, word for word (%)", ylim=(-3, 103))
    axes.set_title(f"Recall by distance: one of four facts, {evaluate.RECALL_TRIALS} questions a point")
    ticks = [round(r["measured_distance"]) for r in recalls]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(loc="center left")
    figure.savefig(file, dpi=110)
    plt.close(figure)


def _smooth(values: tuple[float, ...], span: int = 3) -> list[float]:
    return [sum(part) / len(part) for i in range(len(values)) for part in [values[max(0, i - span) : i + 1]]]


def load(folder: Path) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.train(False)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())


def _samples(samples: list[tuple[str, float, str]]) -> str:
    parts = ["# Samples\n\nEach continuation goes on until the model ends it; nothing was chosen or left out.\n"]
    for text, temperature, said in samples:
        how = "greedy" if temperature == 0 else f"temperature {temperature}"
        parts.append(f"**{how}**, after `{text}`\n\n> {said.strip().replace(chr(10), chr(10) + '> ')}\n")
    return "\n".join(parts)


def _records(file: Path, runs: Runs) -> dict[str, dict[str, Any]]:
    """Model → stage → what its training took."""
    told: dict[str, dict[str, Any]] = json.loads(file.read_text())["training"] if file.exists() else {}
    for (name, stage), run in runs.items():
        told.setdefault(name, {})[stage] = {"tokens": run.tokens, "seconds": run.seconds, "rounds": run.round}
    return told


def _trained(results: dict[str, Any], name: str) -> str:
    stages, machine = results["training"][name], results["machine"]
    took = " and ".join(f"{run['tokens'] / 1e6:.1f} million tokens of {stage}" for stage, run in stages.items())
    minutes = sum(run["seconds"] for run in stages.values()) / 60
    return f"{took}, in {minutes:.0f} minutes on an {machine['processor']}, torch {machine['torch']}, seed {results['seed']}"
