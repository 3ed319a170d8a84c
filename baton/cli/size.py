"""`baton size`: memory, times and cost, from formulae."""

import json
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.console import Console

from baton.engine.facts.fields import CheckpointError
from baton.plan.hardware import DEVICES, MEASURED, Efficiency
from baton.plan.shape import KNOWN, shape_of
from baton.plan.size import Asked, figures, shown
from baton.terminal import Fitting
from loadtest.options import takes


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeOptions:
    """Arguments and options of `size`."""

    model: Annotated[str, typer.Argument(help=f"Folder with config.json, or one of {', '.join(KNOWN)}.")]
    gpu: Annotated[str, typer.Option(help=f"One of {', '.join(DEVICES)}.")] = "h100"
    gpus: Annotated[int, typer.Option(min=1, help="Of one replica, with tensor parallelism.")] = 1
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 4096
    output: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 512
    cached: Annotated[int, typer.Option(min=0, help="Tokens of the prompt that are cached.")] = 0
    longest: Annotated[int | None, typer.Option(min=1, help="Most tokens of a sequence: what room for all at once loses.")] = None
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a decode step.")] = 32
    weight_bits: Annotated[float, typer.Option(min=1, max=64, help="Of a weight, scales included.")] = 16
    kv_bits: Annotated[float, typer.Option(min=1, max=64, help="Of a number of KV, scales included: engine.kv_dtype int5 has 5.25.")] = 16
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a block of KV.")] = 16
    link_gbps: Annotated[float, typer.Option(min=0.001, help="Gbit/s between a prefill and a decode worker.")] = 200
    price: Annotated[float | None, typer.Option(min=0, help="Of a GPU for an hour.")] = None
    acceptance: Annotated[float | None, typer.Option(min=0, max=1, help="Share of guesses that are right, for speculation.")] = None
    guess_cost: Annotated[float, typer.Option(min=0, help="Of a guess, in decode steps.")] = 0.1
    efficiency: Annotated[
        float | None, typer.Option(min=0.01, max=1, help="Share of the stated compute and bandwidth that is reached.")
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False


@takes(SizeOptions)
def size(given: SizeOptions) -> None:
    """Tell what a model needs in memory, and how fast a GPU could serve it at most: formulae, not measurements."""
    if given.gpu.lower() not in DEVICES:
        raise typer.BadParameter(f"{given.gpu!r} is not in the sheet: {', '.join(DEVICES)}", param_hint="--gpu")
    if given.cached >= given.prompt:
        raise typer.BadParameter(f"must be less than the prompt's {given.prompt}", param_hint="--cached")
    device = DEVICES[given.gpu.lower()]
    reached = MEASURED if given.efficiency is None else Efficiency(given.efficiency, given.efficiency, "given")
    asked = Asked(
        given.prompt,
        given.output,
        given.batch,
        given.gpus,
        given.weight_bits,
        given.kv_bits,
        given.block_size,
        given.link_gbps / 8 * 1e9,
        given.price,
        given.acceptance,
        given.guess_cost,
        given.cached,
        given.longest,
    )
    try:
        shape = shape_of(given.model)
        told = list(figures(shape, device, reached, asked))
    except (CheckpointError, KeyError, ValueError) as error:
        raise typer.BadParameter(str(error.args[0]), param_hint="MODEL") from None
    if given.as_json:
        print(json.dumps({"device": asdict(device), "efficiency": asdict(reached), "figures": [asdict(one) for one in told]}, indent=2))
        return
    out = Console(highlight=False, emoji=False)
    table = Fitting(("figure", "value", "from"), left=("figure", "from"), prose=("from",))
    for one in told:
        table.add_row(one.name, shown(one), one.formula)
    out.print(table)
    out.print(
        f"{given.gpus} x {device.name}: {device.source}. Reached of it: {reached.compute:.0%} of compute,"
        f" {reached.bandwidth:.0%} of bandwidth, {reached.source}. No queue, no interference: a bound. Measure with `baton loadtest`.",
        style="dim",
        markup=False,
    )
