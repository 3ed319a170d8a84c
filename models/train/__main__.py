"""`python -m models.train` makes the checkpoints that ship: tokenizer, model, draft, model cards. Stopped, it goes on where it was."""

import argparse
import hashlib
import json
import os
import re
import shutil
from itertools import islice
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn

from models.train import card
from models.train.corpus import BOS, CHAT_TEMPLATE, EOS, SPECIAL, documents
from models.train.recipe import CONTEXT, DRAFT, RECIPES, RMS_NORM_EPS, SEED, TALE, TOKENIZER_DOCUMENTS, VOCAB, Recipe
from models.train.tokenizer import train_tokenizer
from models.train.training import Run, read_run, train

HOME = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=HOME, help="folder of the checkpoints' folders (default: %(default)s)")
    parser.add_argument("--work", type=Path, default=Path(".baton/train"), help="states of unfinished trainings (default: %(default)s)")
    parser.add_argument("--only", choices=["tokenizer", *RECIPES, "card"], help="one step instead of all")
    parser.add_argument("--tokens", type=int, help="train on so many tokens instead of the recipe's: a trial")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    tokenizer_file = arguments.work / "tokenizer.json"
    if not tokenizer_file.exists():
        arguments.work.mkdir(parents=True, exist_ok=True)
        plain = (re.sub(r"<\|\w+\|>", "\n", text) for text in islice(documents(SEED, "tokenizer", 250), TOKENIZER_DOCUMENTS))
        train_tokenizer(plain, VOCAB).save(str(tokenizer_file))
    tokenizer = Tokenizer.from_file(str(tokenizer_file))

    for recipe in RECIPES.values():
        if arguments.only in (None, recipe.name):
            teacher = card.load(arguments.out / recipe.teacher) if recipe.teacher else None
            tokens = arguments.tokens or recipe.tokens
            model = _train(recipe, tokens, tokenizer, arguments.work / recipe.name, device, teacher)
            export(model.cpu(), recipe, tokenizer_file, arguments.out / recipe.name)
    if arguments.only in (None, "card"):
        runs = {name: read_run(arguments.work / name) for name in RECIPES}
        card.write(arguments.out / TALE.name, arguments.out / DRAFT.name, runs)


def _train(recipe: Recipe, tokens: int, tokenizer: Tokenizer, work: Path, device: str, teacher: nn.Module | None) -> nn.Module:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>4.1f} %"),
        TextColumn("loss {task.fields[loss]}"),
    )
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(elapsed_when_finished=True)) as bar:
        task = bar.add_task(recipe.name, total=tokens, loss="")

        def on_round(run: Run) -> None:
            bar.update(task, completed=run.tokens, loss=f"{run.history[-1][1]:.3f}")
            if not bar.console.is_terminal:
                bar.console.print(f"{recipe.name}: {run.tokens}/{tokens} tokens, loss {run.history[-1][1]:.3f}, {run.seconds:.0f} s")

        return train(recipe, tokens, tokenizer, work, device, on_round, teacher)


def export(model: nn.Module, recipe: Recipe, tokenizer_file: Path, folder: Path) -> None:
    """A Hugging Face folder with weights in bfloat16. Everything that is in the folder already and is not of it stays."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: p.detach().to(torch.bfloat16).contiguous() for name, p in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    bos, eos = SPECIAL.index(BOS), SPECIAL.index(EOS)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": recipe.hidden,
        "intermediate_size": recipe.inner,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.head_dim,
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": RMS_NORM_EPS,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": bos,
        "eos_token_id": eos,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    shutil.copyfile(tokenizer_file, folder / "tokenizer.json")
    for name, content in (
        ("config.json", config),
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", {"bos_token_id": bos, "eos_token_id": eos, "do_sample": True, "temperature": 0.8}),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    files = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    sums = (f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in files)
    (folder / "SHA256SUMS").write_text("".join(sums))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    main()
