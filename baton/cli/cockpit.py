"""`baton cockpit`: experiments and calculators in the browser."""

import asyncio
import webbrowser
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from baton.access.access import identify
from baton.access.options import ClientIdentity, ClusterOptions
from baton.cli.failing import failing
from loadtest.options import takes

PORT = 8475
err = Console(stderr=True, highlight=False, emoji=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class CockpitOptions:
    """Options of `cockpit`."""

    port: Annotated[int, typer.Option(min=0, max=65535, help="Of the page, on loopback; 0: any free one.")] = PORT
    profile: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Profile of `baton profile`, for experiments in the simulator.")
    ] = None
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the address, and open nothing.")] = False


@takes(CockpitOptions, ClusterOptions, ClientIdentity)
def cockpit(opening: CockpitOptions, place: ClusterOptions, identity: ClientIdentity) -> None:
    """Open the cockpit: seven experiments with sliders and live charts, on the running cluster, on one of their own and in the simulator,
    and the calculators. It listens on loopback until Ctrl-C. Here, `--address` is not used: the cockpit needs the gRPC and the admin door
    of a cluster."""
    with failing(err):
        if place.address is not None:
            raise typer.BadParameter(
                "the cockpit needs two doors: name both in the client's profile, or use --name", param_hint="--address"
            )
        from baton.cockpit.serve import serve  # the simulator, which no other command needs

        own = replace(identity, api_key=identify(identity, place.config).api_key)
        asyncio.run(serve(opening.port, place, own, opening.profile, partial(_ready, opening)))


def _ready(opening: CockpitOptions, url: str) -> None:
    print(url, flush=True)
    err.print("Ctrl-C ends the cockpit", style="dim")
    if not opening.no_browser:
        webbrowser.open(url)
