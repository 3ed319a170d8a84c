"""`baton planner`: the planner in the foreground, for a cluster that runs; or with --why, what planners have decided lately."""

import asyncio
import json
import os
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.console import Console

from baton.cli.failing import failing
from baton.cli.options import ConfigFiles, JsonOption
from baton.cluster import config_layers
from baton.cluster.config import Config
from baton.cluster.main import read_arguments
from baton.cluster.packages import command
from baton.launch import state
from baton.terminal import Fitting
from loadtest.options import takes

FREE = {"allow_extra_args": True, "ignore_unknown_options": True}
out, err = (Console(stderr=stderr, highlight=False, emoji=False) for stderr in (False, True))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerOptions:
    """Options of `planner`."""

    context: typer.Context
    config: ConfigFiles = None
    name: Annotated[str | None, typer.Option("--name", help="Name of the cluster.")] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Decide and explain, and change nothing.")] = False
    why: Annotated[bool, typer.Option("--why", help="Print what was decided lately, why, and what came of it; plan nothing.")] = False
    last: Annotated[int, typer.Option(min=1, max=10_000, help="With --why: how many decisions and outcomes.")] = 10


@takes(PlannerOptions, JsonOption)
def planner(asked: PlannerOptions, shown: JsonOption) -> None:
    """Size the pools of a running cluster and change what its workers serve, as the section planner of the configuration says. Keys of the
    configuration are flags, as --planner.budget 4. It finds a cluster that `baton up` started on this host, else redis.url."""
    with failing(err):
        flags = read_arguments(asked.context.args)[1]
        flags |= {"cluster.name": asked.name} if asked.name is not None else {}
        flags |= {"planner.dry_run": "true"} if asked.dry_run else {}
        config = config_layers.load(asked.config or (), flags=flags).config
        running = state.read(config.cluster.name)
        if config.redis.url == "embedded" and running is not None:
            flags["redis.url"] = running.redis_url
            config = config.model_copy(update={"redis": config.redis.model_copy(update={"url": running.redis_url})})
        if asked.why:
            from baton.planner.records import decode  # it loads numpy, which no other command needs to wait for

            _print(decode(asyncio.run(_read(config, asked.last))), shown.as_json)
            return
        # The process that `baton up` starts, too. A URL may hold a password, so it does not go on the command line.
        env = {**os.environ, "BATON_REDIS_URL": config.redis.url}
        given = [word for key, value in flags.items() if key != "redis.url" for word in (f"--{key}", value)]
        files = [word for file in asked.config or () for word in ("--config", str(file))]
        argv = command("baton.planner", *files, *given)
        os.execve(argv[0], argv, env)


async def _read(config: Config, last: int) -> list[bytes]:
    from baton.cluster.connect import connect_registry  # it loads redis, for which no other command needs to wait

    registry = connect_registry(config)
    try:
        return await registry.noted_plans(last)
    finally:
        await registry.close()


def _print(notes: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(notes))
        return
    if not notes:
        err.print("no planner has decided anything yet")
    for note in notes:
        at = datetime.fromtimestamp(note["at"]).strftime("%H:%M:%S")
        if note["kind"] == "outcome":
            _print_outcome(at, note)
        else:
            _print_decision(at, note)


def _print_decision(at: str, note: dict[str, Any]) -> None:
    demand, forecast = note["demand"], note["forecast"]
    done = f"change {note['change']}: {note['action']}" if note["action"] else "nothing"
    out.print(f"{at}  {'would do ' if note['dry'] else ''}{done}", style="bold", markup=False, soft_wrap=True)
    out.print(f"          why: {note['why']}", markup=False, soft_wrap=True)
    load = (
        f"{demand['rate']:g} requests/s of {demand['prompt']:g} tokens ({demand['uncached']:g} computed) and {demand['output']:g} of output"
    )
    out.print(f"          load: {load}; forecast by {forecast['by']}, errors {forecast['errors']}", markup=False, soft_wrap=True)
    if note["alternatives"]:
        table = Fitting(("sizes", "attainment", "prefill use", "decode use", "verdict"), left=("sizes", "verdict"), prose=("verdict",))
        for one in note["alternatives"]:
            effect = one["effect"]
            figures = [f"{effect[name]:.0%}" for name in ("attainment", "prefill_use", "decode_use")]
            table.add_row(one["sizes"], *figures, one["verdict"])
        out.print(table)


def _print_outcome(at: str, note: dict[str, Any]) -> None:
    came = "nothing was asked since" if note["attainment"] is None else f"attainment {note['attainment']:.0%}"
    expected = "" if note["expected"] is None else f", expected {note['expected']:.0%}"
    why = f": {note['why']}" if note["why"] else ""
    out.print(
        f"{at}  change {note['change']} {note['state']} after {note['seconds']:g} s{why}; {came}{expected}", markup=False, soft_wrap=True
    )


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(context_settings=FREE)(planner)
