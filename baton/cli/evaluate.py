"""What a person sees of `baton evaluate`; `baton.models.evaluate` does the work."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from baton.cli.gguf_files import folder_of
from baton.cli.options import Evaluating
from baton.cluster import config_layers as configuration
from baton.cluster.config import ConfigError
from baton.cluster.main import read_arguments
from baton.engine.facts.fingerprint import tokenizer_fingerprint
from baton.engine.options import Options
from baton.models.evaluate.reader import Reader
from baton.models.evaluate.texts import Speller, Texts, file_texts, made_texts
from baton.models.evaluate.whole import Evaluation, Extent
from baton.terminal import Fitting
from baton.worker.host import options as settled

SECTIONS = ("model.", "engine.")
OTHER = "against."
Flags = dict[str, str]


def run(asked: Evaluating, out: Console, err: Console) -> None:
    """Prints a table or one JSON object. Raises ConfigError for what cannot be measured."""

    def say(line: str) -> None:
        err.print(line, markup=False, soft_wrap=True)

    files, given = read_arguments(asked.context.args)
    flags, others = divided(given)
    wanted = [(asked.model, flags)]
    if asked.against is not None or others:
        wanted.insert(0, (asked.against or asked.model, others))
    try:
        folders = [folder_of(path, say) for path, _ in wanted]
        chosen = [configured(folder, files, told) for folder, (_, told) in zip(folders, wanted, strict=True)]
        if len({tokenizer_fingerprint(folder) for folder in folders}) > 1:
            raise ConfigError(f"--against: {folders[0]} has another tokenizer than {folders[-1]}, so no token can be compared")
        speller = Speller.of(folders[-1])
        texts = _texts(speller, asked)
        readers = [Reader(options) for options in chosen]
        extent = Extent(asked.trials, asked.longest, not asked.no_questions, asked.continuations, asked.within)
        evaluation = Evaluation(readers, speller, extent, say)
        evaluation.run(texts)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from None
    for row, (path, told) in zip(evaluation.rows, wanted, strict=True):
        row |= {"model": str(path), "settings": told}
    if asked.as_json:
        print(json.dumps({"rows": evaluation.rows[::-1]}))
    else:
        out.print(table(evaluation.rows))


def divided(given: Flags) -> tuple[Flags, Flags]:
    """Keys of the configuration: of the model, and of what it is compared with. Raises ConfigError for a key that no engine reads."""
    sides = Flags(), Flags()
    for name, value in given.items():
        key = name.removeprefix(OTHER).replace("-", "_")
        if not key.startswith(SECTIONS) or key == "model.path":
            raise ConfigError(f"--{name}: is no key of the sections model and engine, other than model.path")
        sides[name.startswith(OTHER)][key] = value
    return sides


def configured(folder: Path, files: Sequence[Path] = (), flags: Flags | None = None) -> Options:
    """The options with which a worker would run the model here. Raises ConfigError, which names the key."""
    return settled(configuration.load(files, flags=(flags or {}) | {"model.path": str(folder)}).config)


def table(rows: Sequence[Mapping[str, Any]]) -> Fitting:
    """A column for each row of `evaluate`; the first one is what the other is compared with."""
    shown = Fitting(["", *map(_title, rows)], left=[""])
    for name, cells in _lines(rows):
        shown.add_row(name, *cells)
    return shown


def _title(row: Mapping[str, Any]) -> str:
    return ", ".join((Path(row["model"]).name, *(f"{key.partition('.')[2]}={value}" for key, value in row["settings"].items())))


def _lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    for kind, first in rows[0]["texts"].items():
        readings = [row["texts"][kind] for row in rows]
        yield f"perplexity, {first['tokens']:,} tokens of {kind}", [f"{each['perplexity']:.3f}" for each in readings]
        if len(rows) > 1:
            yield f"same next token, {kind}", ["", *(f"{each['same_choice']:.1%}" for each in readings[1:])]
            yield f"KL divergence, {kind}, nats", ["", *(f"{each['kl']:.5f}" for each in readings[1:])]
    if "continuations" in rows[0]:
        told = [row["continuations"] for row in rows]
        if len(rows) > 1:
            yield "continuations alike", ["", *(f"{each['same']} of {each['possible']} tokens" for each in told[1:])]
        if any(each["drafted"] for each in told):
            yield "guesses right", [f"{each['accepted']} of {each['drafted']}" if each["drafted"] else "" for each in told]
    for name, title in (("facts", "facts, one of four"), ("sums", "sums, one of four")):
        if name in rows[0]:
            yield title, [f"{row[name]:.0%}" for row in rows]
    for distance in rows[0]["recall"]:
        yield f"recall after {distance} tokens", [f"{row['recall'][distance]:.0%}" for row in rows]


def _texts(speller: Speller, asked: Evaluating) -> Texts:
    if not asked.text:
        return made_texts(speller, asked.tokens)
    return {str(file): file_texts(speller, file, asked.tokens) for file in asked.text}
