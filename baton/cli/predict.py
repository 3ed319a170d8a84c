"""`baton size`, `baton plan`, `baton profile` and `baton simulate`: what can be said of a cluster without its users."""

import asyncio
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from baton.cli.plan import plan
from baton.cli.size import size
from baton.cluster import config_layers
from baton.cluster.config import Config
from baton.cluster.main import read_arguments
from baton.engine.facts.fields import CheckpointError
from baton.plan.hardware import DEVICES, MEASURED
from baton.plan.pools import WorkerKind, sized
from baton.plan.shape import shape_of
from baton.plan.sheet import profile_of as of_sheet
from baton.profile.file import Profile
from baton.terminal import Fitting
from loadtest.cli import failing, plan_of, report_on
from loadtest.options import LoadOptions, MeasureOptions, Target, takes

if TYPE_CHECKING:
    from baton.predict.setting import ClusterSetting

FREE = {"allow_extra_args": True, "ignore_unknown_options": True}
ConfigFiles = Annotated[list[Path] | None, typer.Option("--config", help="Configuration file (YAML); may be given more than once.")]
out, err = Console(highlight=False, emoji=False, width=None if sys.stdout.isatty() else 180), Console(stderr=True, highlight=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """Instead of a measurement."""

    sheet: Annotated[str | None, typer.Option(help=f"Compute the profile from the sheet of devices: {', '.join(DEVICES)}.")] = None
    model: Annotated[
        str | None, typer.Option(help="Folder of a checkpoint; with --sheet also one known by name, as llama-3.1-8b (see `baton size`).")
    ] = None
    gpus: Annotated[int, typer.Option(min=1, help="With --sheet: of one worker, with tensor parallelism.")] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiling:
    """Options of `profile`."""

    context: typer.Context
    config: ConfigFiles = None
    to: Annotated[Path, typer.Option(help="File for the profile.")] = Path("profile.yaml")
    quick: Annotated[bool, typer.Option("--quick", help="Measure less, in a third of the time: wider intervals.")] = False
    arrangements: Annotated[
        str,
        typer.Option(
            help="What to measure: colocated needs one worker, split (handoffs) and pair (shared cores) need two. guesses and tiers need"
            " one, and are left out where the configuration has none."
        ),
    ] = "colocated,split,pair,guesses,tiers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulating:
    """Options of `simulate`."""

    context: typer.Context
    config: ConfigFiles = None
    profile: Annotated[Path | None, typer.Option(help="Profile of `baton profile`.")] = None
    cores: Annotated[int | None, typer.Option(min=1, help="Cores that all processes share, also who asks. Not set: each has its own.")] = (
        None
    )
    draws: Annotated[int, typer.Option(min=0, help="Runs with other numbers that fit the measurements as well, for the intervals.")] = 8
    large: Annotated[
        bool, typer.Option("--large", help="For many workers: no heartbeats, probes or processor time of each token, and steps in jumps.")
    ] = False


@takes(Profiling, Sheet)
def profile(asked: Profiling, sheet: Sheet) -> None:
    """Measure how long the parts of a cluster take, on small clusters that it starts here, and write the profile that `baton simulate`
    reads. Keys of the configuration are flags, as --engine.threads 1. With --sheet, nothing is measured."""
    with failing("baton profile"):
        made = _from_sheet(sheet) if sheet.sheet is not None else _measured(asked, sheet)
        asked.to.parent.mkdir(parents=True, exist_ok=True)
        made.save(asked.to)
    table = Fitting(("model", "numbers (s)", "error", "rows"), left=("model", "numbers (s)"), prose=("numbers (s)",))
    for name, fitted in made.models.items():
        numbers = ", ".join(f"{key} {value:.3g}" for key, value in fitted.values.items())
        table.add_row(name, numbers, f"{fitted.error:.1%}", str(fitted.rows or "assumed"))
    out.print(table)
    if missing := ", ".join(made.unmeasured):
        out.print(f"Not measured, and so without a time: {missing}", markup=False, soft_wrap=True)
    err.print(f"profile {asked.to}", markup=False, soft_wrap=True)


@takes(Simulating, Sheet, Target, MeasureOptions, LoadOptions)
def simulate(asked: Simulating, sheet: Sheet, target: Target, measured: MeasureOptions, load: LoadOptions) -> None:
    """Say what the load test would report of a cluster: its own configuration and the router's and the scheduler's own code, in virtual
    time, with steps and handoffs that take what a profile or a sheet of devices says. Every figure is simulated."""
    with failing("baton simulate"):
        from baton.predict.report import intervals
        from baton.predict.report import simulate as simulated

        seen = _profile(asked, sheet)
        plan = plan_of(target.slo, measured, None, load)
        campaign, told = simulated(plan, _setting(asked, seen), seen, target.rate, asked.draws, asked.large)
        if told.warning:
            out.print(told.warning, style="bold", markup=False, soft_wrap=True)
        table = Fitting(("simulated", "value", "90 % interval"), left=("simulated",), prose=())
        for row in intervals(told):
            table.add_row(*row)
        out.print(table)
        report_on(campaign, measured.out)


def _profile(asked: Simulating, sheet: Sheet) -> Profile:
    """Raises ValueError, which ProfileError is one of."""
    if (asked.profile is None) == (sheet.sheet is None):
        raise ValueError("profile: give either --profile or --sheet with --model")
    return _from_sheet(sheet) if asked.profile is None else Profile.load_file(asked.profile)


def _from_sheet(sheet: Sheet) -> Profile:
    """Raises ValueError."""
    if sheet.sheet not in DEVICES:
        raise ValueError(f"sheet: {sheet.sheet!r} is none of {', '.join(DEVICES)}")
    if sheet.model is None:
        raise ValueError("model: goes with --sheet")
    try:
        shape, device = shape_of(sheet.model), DEVICES[sheet.sheet]
        return sized(of_sheet(shape, device, MEASURED, devices=sheet.gpus), WorkerKind(device, sheet.gpus), shape)
    except (CheckpointError, KeyError) as error:
        raise ValueError(f"model: {error.args[0]}") from None


def _config(context: typer.Context, config: list[Path] | None, model: str | None = None) -> Config:
    """Raises ConfigError."""
    files, flags = read_arguments(context.args)
    given = flags | ({"model.path": model} if model is not None else {})
    return config_layers.load([*(config or ()), *files], flags=given).config


def _flags(config: Config) -> dict[str, str]:
    """What of a configuration differs from the defaults, but sizes of pools and ports, which whoever measures chooses."""
    usual, found = Config().model_dump(mode="json"), dict[str, str]()
    for section, values in config.model_dump(mode="json").items():
        for key, value in values.items():
            if value != usual[section][key] and key not in ("replicas", "cores") and not key.endswith("port") and section != "cluster":
                found[f"{section}.{key}"] = value if isinstance(value, str) else json.dumps(value)
    return found


def _setting(asked: Simulating, seen: Profile) -> "ClusterSetting":
    from baton.predict.setting import setting_of

    return setting_of(_config(asked.context, asked.config), seen, asked.cores)


def _measured(asked: Profiling, sheet: Sheet) -> Profile:
    """Raises what `measure` raises, and ValueError."""
    from baton.predict.fitted import profile_of
    from baton.predict.measure import QUICK, Amount, measure

    config = _config(asked.context, asked.config, sheet.model)
    if not config.model.path:
        raise ValueError("model: which one is measured? Give --model FOLDER")
    chunk = config.engine.max_num_batched_tokens or 512
    set_here = {"model.path": str(Path(config.model.path).resolve()), "telemetry.log_level": "warning"}
    keys = _flags(config) | set_here | {"engine.max_num_batched_tokens": str(chunk)}
    amount = QUICK if asked.quick else Amount()
    load = os.getloadavg()[0]
    if load > 1:
        err.print(f"the machine is busy (load {load:.1f}): what is measured now is too slow", style="yellow", markup=False)
    only = [name.strip() for name in asked.arrangements.split(",")]
    found = asyncio.run(measure(keys, amount, chunk, lambda line: err.print(line, markup=False), only))
    engine = {name: value for name, value in config.engine.model_dump().items() if value is not None and name in ENGINE}
    return profile_of(found, Path(config.model.path).name, engine, amount, chunk)


# What a profile is of.
ENGINE = ("kind", "threads", "weight_dtype", "kv_dtype", "block_size", "max_num_seqs", "speculation", "speculation_batch_tokens")


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command()(size)
    app.command()(plan)
    app.command(context_settings=FREE)(profile)
    app.command(context_settings=FREE)(simulate)
