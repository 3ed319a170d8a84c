"""`python -m baton.models.train` makes what ships: tokenizer, model, draft, head and model cards. A stopped run resumes where it was."""

import argparse
import os
from dataclasses import replace
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn

from baton.models.folder import write, write_json, write_sums
from baton.models.train import card
from baton.models.train.head import TrainedHead, head_loss, new_head
from baton.models.train.recipe import DRAFT, HEAD, RECIPES, SEED, TALE, TOKENIZER_DOCUMENTS, VOCAB, Recipe, Stage
from baton.models.train.tokenizer import train_tokenizer
from baton.models.train.training import Loss, TrainingProgress, new_model, read_run, text_loss, train

HOME = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=HOME, help="folder of the checkpoints' folders (default: %(default)s)")
    parser.add_argument("--work", type=Path, default=Path(".baton/train"), help="states of unfinished training runs (default: %(default)s)")
    parser.add_argument("--only", choices=["tokenizer", *RECIPES, HEAD.name, "card"], help="one step instead of all")
    parser.add_argument("--from-stage", help="begin with this stage, and with the weights in --out, where earlier stages have been")
    parser.add_argument("--tokens", type=int, help="train each stage on this many tokens instead of the recipe's, for a trial")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    tokenizer_file = arguments.work / "tokenizer.json"
    if not tokenizer_file.exists():
        arguments.work.mkdir(parents=True, exist_ok=True)
        train_tokenizer(VOCAB, SEED, TOKENIZER_DOCUMENTS).save(str(tokenizer_file))
    tokenizer = Tokenizer.from_file(str(tokenizer_file))

    for recipe in RECIPES.values():
        if arguments.only in (None, recipe.name):
            teacher = card.load(arguments.out / recipe.teacher).to(device) if recipe.teacher else None
            begun = arguments.from_stage is None
            model = new_model(recipe) if begun else card.load(arguments.out / recipe.name)
            for name, stage in recipe.stages.items():
                begun = begun or name == arguments.from_stage
                if begun:
                    stage = replace(stage, tokens=arguments.tokens or stage.tokens)
                    _train(model.to(device), f"{recipe.name}, {name}", stage, tokenizer, place(arguments.work, recipe.name, name), teacher)
            export(model.cpu(), recipe, tokenizer, arguments.out / recipe.name)
    if arguments.only in (None, HEAD.name):
        teacher = card.load(arguments.out / HEAD.teacher).to(device)
        head = new_head(HEAD, teacher).to(device)
        stage = replace(HEAD.stage, tokens=arguments.tokens or HEAD.stage.tokens)
        _train(head, HEAD.name, stage, tokenizer, place(arguments.work, HEAD.name, "head"), teacher, head_loss)
        export_head(head.cpu(), arguments.out / HEAD.name)
    if arguments.only in (None, "card"):
        places = {(one.name, stage): place(arguments.work, one.name, stage) for one in RECIPES.values() for stage in one.stages}
        runs = {key: read_run(folder) for key, folder in places.items() if folder.exists()}
        card.write(arguments.out / TALE.name, arguments.out / DRAFT.name, runs)


def place(work: Path, recipe: str, stage: str) -> Path:
    """The folder of a stage's state."""
    return work / recipe / stage


def _train(
    model: nn.Module,
    title: str,
    stage: Stage,
    tokenizer: Tokenizer,
    work: Path,
    teacher: nn.Module | None,
    loss_of: Loss = text_loss,
) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>4.1f} %"),
        TextColumn("loss {task.fields[loss]}"),
    )
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(elapsed_when_finished=True)) as bar:
        task = bar.add_task(title, total=stage.tokens, loss="")

        def on_round(run: TrainingProgress) -> None:
            bar.update(task, completed=run.tokens, loss=f"{run.history[-1][1]:.3f}")
            if not bar.console.is_terminal:
                bar.console.print(f"{title}: {run.tokens}/{stage.tokens} tokens, loss {run.history[-1][1]:.3f}, {run.seconds:.0f} s")

        train(model, stage, tokenizer, work, on_round, teacher, loss_of)


def export(model: nn.Module, recipe: Recipe, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes a Hugging Face folder with weights in bfloat16. Other files in the folder stay."""
    write(folder, recipe.shape, tokenizer, dtype="bfloat16", temperature=0.8)
    weights = {name: p.detach().to(torch.bfloat16).contiguous() for name, p in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_sums(folder)


def export_head(head: TrainedHead, folder: Path) -> None:
    """Writes the head's folder, weights in bfloat16: tensors have the names that they would have in the model's."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", {"architectures": ["BatonHead"], "intermediate_size": head.mlp.intermediate_size})
    prefix = f"model.layers.{head.after}"
    weights = {f"{prefix}.{name}": p.detach().to(torch.bfloat16).contiguous() for name, p in head.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_sums(folder)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    main()
