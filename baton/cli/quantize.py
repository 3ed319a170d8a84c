"""What a person sees of `baton quantize`; `baton.models.quantise` does the work."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from baton.cli.evaluate import configured
from baton.cli.gguf_files import Say, folder_of
from baton.cli.options import Quantising
from baton.cluster.config import ConfigError
from baton.models.evaluate.reader import Reader
from baton.models.evaluate.texts import Speller, calibration_texts, file_texts, made_texts
from baton.models.evaluate.whole import Evaluation, Extent
from baton.models.quantise.whole import Done, quantise
from baton.terminal import Fitting

READ = 4096  # tokens of text by which the result is compared with the original


def run(asked: Quantising, out: Console, err: Console) -> None:
    """Prints a table or one JSON object. Raises ConfigError for what cannot be quantised, OSError."""

    def say(line: str) -> None:
        err.print(line, markup=False, soft_wrap=True)

    try:
        model = folder_of(asked.model, say)
        speller = Speller.of(model)
        texts = file_texts(speller, asked.calibration, asked.tokens) if asked.calibration else calibration_texts(speller, asked.tokens)
        done = quantise(model, asked.out, asked.method, texts, asked.group, say)
        compared = None if asked.no_quality else quality(model, asked.out, speller, say)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from None
    told = {name: value for name, value in asdict(done).items() if not name.startswith(("signal", "wrong"))}
    told |= {"error": done.error, "error_nearest": done.error_nearest, "quality": compared}
    if asked.as_json:
        print(json.dumps(told))
    else:
        out.print(table(done, compared))


def quality(model: Path, made: Path, speller: Speller, say: Say) -> list[dict[str, Any]]:
    """Measures the original and the result as `baton evaluate` does."""
    readers = [Reader(configured(folder)) for folder in (model, made)]
    evaluation = Evaluation(readers, speller, Extent(trials=0, questions=False, continuations=0), say)
    evaluation.run(made_texts(speller, READ))
    return [row["texts"] for row in evaluation.rows]


def table(done: Done, compared: list[dict[str, Any]] | None) -> Fitting:
    shown = Fitting([done.method, ""], left=[done.method, ""])
    shown.add_row("columns with one scale", str(done.group or "all of a row"))
    shown.add_row("weights", f"{done.bytes_before / 2**20:.1f} MiB → {done.bytes_after / 2**20:.1f} MiB")
    shown.add_row("time, memory", f"{done.seconds:.0f} s, at most {done.peak_mib:,} MiB")
    shown.add_row("error of outputs", f"{done.error:.3%} of their square; rounded to nearest {done.error_nearest:.3%}")
    before, after = compared or ({}, {})
    for kind, first in before.items():
        second = after[kind]
        shown.add_row(f"perplexity, {kind}", f"{first['perplexity']:.3f} → {second['perplexity']:.3f}")
        shown.add_row(f"same next token, {kind}", f"{second['same_choice']:.1%}, KL divergence {second['kl']:.5f}")
    return shown
