"""The flags of `baton generate` and `baton chat`, each declared once. `loadtest.options.takes` gives them to a command."""

from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from baton.engine.sampling import NUMBERS, Number

ConfigFiles = Annotated[list[Path] | None, typer.Option("--config", help="Configuration file (YAML); may be given more than once.")]
Name = Annotated[str, typer.Option("--name", help="Which cluster.")]
Address = Annotated[str | None, typer.Option(help="host:port of the router; the running cluster's by default.")]


def numbers(**defaults: float) -> Any:
    """An option class with a flag for every number of `baton.engine.sampling`. None, unless `defaults` says otherwise, leaves a number to
    the router."""
    fields = [(name, Annotated[_kind(number), _option(number)], field(default=defaults.get(name))) for name, number in NUMBERS.items()]
    return make_dataclass("Numbers", fields, frozen=True, kw_only=True)


def _kind(number: Number) -> Any:
    return int | None if number.integer else float | None


def _option(number: Number) -> Any:
    return typer.Option(help=f"{number.meaning[0].upper()}{number.meaning[1:]}. {str(number.range).capitalize()}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Who is asked."""

    address: Address = None
    name: Name = "baton"
    config: ConfigFiles = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answering:
    """What `generate` and `chat` both ask for, apart from the numbers of the sampler."""

    max_tokens: Annotated[int | None, typer.Option(help="Tokens of the answer at most.")] = None
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same tokens.")] = None
    timeout: Annotated[float | None, typer.Option(help="Seconds for one answer.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OnePrompt:
    """What only `generate` asks for."""

    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from stdin.")]
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is one user message, under the model's chat template.")] = False
    min_tokens: Annotated[int | None, typer.Option(help="Tokens of the answer at least.")] = None
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be given more than once.")] = None
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end token.")] = False
    trace: Annotated[bool, typer.Option("--trace", help="Draw the stages of this request.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of streamed text.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What only `chat` asks for."""

    system: Annotated[str | None, typer.Option(help="System message.")] = None
