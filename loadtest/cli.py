"""`baton loadtest`: measure an endpoint, compare ways to use the same cores, draw a report again."""

import asyncio
import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from baton.launch import state

if TYPE_CHECKING:  # numpy and matplotlib are loaded by the commands that need them, not by every `baton status`
    from loadtest.campaign import Campaign
    from loadtest.drive import Live
    from loadtest.measure import Plan
    from loadtest.slo import Slo

app = typer.Typer(no_args_is_help=True, help="Load test: goodput under an SLO, and whether disaggregation pays.")
out, err = Console(highlight=False), Console(stderr=True, highlight=False)

HEAVY = ("--hidden", "768", "--layers", "12", "--heads", "12", "--kv-heads", "4")
DISPLAY_EVERY_S = 0.5
RECENT = 200  # requests that the display looks at

Slos = Annotated[str, typer.Option("--slo", help="What a request must meet: ttft, tpot, itl_p99, with units.")]
Out = Annotated[Path, typer.Option("--out", help="Folder for the report and the raw records.")]
Seeds = Annotated[str, typer.Option(help="Several, for confidence intervals.")]
Prompt = Annotated[str, typer.Option("--input", help="Prompt tokens: 512, 100-600 or lognormal:512:0.6.")]
Output = Annotated[str, typer.Option("--output", help="Output tokens, in the same ways.")]
HitRate = Annotated[float, typer.Option(help="Share of the prompt tokens in prefixes that came before.")]
Turns = Annotated[str, typer.Option(help="Requests of a session; each carries the answers before it.")]
Think = Annotated[str, typer.Option(help="Pause of a session between answer and next turn, seconds.")]
PrefixTokens = Annotated[int, typer.Option(help="Tokens of one level of the tree of shared prefixes.")]
Branching = Annotated[int, typer.Option(help="Different prefixes on each level.")]
Depth = Annotated[int, typer.Option(help="Levels of shared prefixes.")]
TraceFile = Annotated[Path | None, typer.Option("--trace", help="Recorded workload instead: ShareGPT, Mooncake, BurstGPT, Azure, plain.")]
TraceFormat = Annotated[str, typer.Option("--format", help="auto, sharegpt, mooncake, burstgpt, azure or plain.")]
Tokens = Annotated[Path | None, typer.Option("--tokenizer", help="tokenizer.json that turns the text of a ShareGPT trace into ids.")]
Scale = Annotated[float, typer.Option(help="All lengths times this, so that a real trace fits a small machine.")]
MaxTokens = Annotated[int, typer.Option(help="Longest prompt with its answer; longer requests are left out and counted.")]
Vocab = Annotated[int, typer.Option(help="Token ids are drawn below this.")]
Lenient = Annotated[bool, typer.Option("--lenient", help="Skip malformed lines of a trace, and count them.")]
ArrivalKind = Annotated[str, typer.Option("--arrivals", help="poisson, constant, gamma:BURSTINESS, or trace (its own times).")]
Duration = Annotated[float, typer.Option(help="Seconds in which requests become due.")]
WarmUp = Annotated[float, typer.Option(help="Seconds at the start that do not count.")]
CoolDown = Annotated[float, typer.Option(help="Seconds at the end that do not count.")]
Timeout = Annotated[float, typer.Option(help="Deadline of each request, seconds.")]


@app.command()
def run(
    slo: Slos,
    rate: Annotated[float, typer.Option(help="Requests per second; of a trace with its own times: how much faster it is played.")],
    address: Annotated[str | None, typer.Option(help="host:port of the gRPC door; the running cluster's by default.")] = None,
    name: Annotated[str, typer.Option(help="Which running cluster.")] = "baton",
    out_: Out = Path("loadtest-report"),
    duration: Duration = 30.0,
    warm_up: WarmUp = 3.0,
    cool_down: CoolDown = 2.0,
    seeds: Seeds = "1,2,3",
    timeout: Timeout = 60.0,
    arrivals: ArrivalKind = "poisson",
    input_: Prompt = "100-300",
    output: Output = "32",
    hit_rate: HitRate = 0.0,
    turns: Turns = "1",
    think: Think = "0",
    prefix_tokens: PrefixTokens = 64,
    prefix_branching: Branching = 4,
    prefix_depth: Depth = 1,
    trace: TraceFile = None,
    format_: TraceFormat = "auto",
    tokenizer: Tokens = None,
    scale: Scale = 1.0,
    max_tokens: MaxTokens = 2048,
    vocab: Vocab = 256,
    lenient: Lenient = False,
) -> None:
    """Measure one endpoint at one rate."""
    with _failing():
        from loadtest.measure import measure_endpoint

        target = address or state.need(name).endpoints["grpc"]
        _report(asyncio.run(measure_endpoint(_plan(locals()), target, _positive("rate", rate))), out_)


@app.command()
def compare(
    slo: Slos,
    rates: Annotated[str, typer.Option(help="Requests per second of the sweep: 1,2,4.")],
    model: Annotated[
        str, typer.Option(help="Folder of a checkpoint; heavy: a seeded random one of 85 M parameters, made on the first use.")
    ] = "heavy",
    arms: Annotated[
        str, typer.Option(help="Of colocated, unchunked, static, dynamic, disaggregated, bypass; colocated@64: with its own chunk.")
    ] = "colocated,unchunked,disaggregated,bypass",
    cores: Annotated[str | None, typer.Option(help="Cores that every arm gets, whole: 0,1. All by default.")] = None,
    threads: Annotated[int, typer.Option(help="Cores of one worker.")] = 1,
    ratio: Annotated[str, typer.Option(help="Prefill to decode workers of the arms that have both.")] = "1:1",
    chunk: Annotated[int, typer.Option(help="Tokens in one step at most.")] = 256,
    vary: Annotated[str, typer.Option(help="A parameter at several values: input=100,400,1000 (also output, hit_rate, chunk).")] = "",
    bisections: Annotated[
        int, typer.Option(help="Runs of each arm and seed between the last rate that holds and the first that does not.")
    ] = 2,
    out_: Out = Path("loadtest-report"),
    duration: Duration = 20.0,
    warm_up: WarmUp = 3.0,
    cool_down: CoolDown = 2.0,
    seeds: Seeds = "1,2",
    timeout: Timeout = 60.0,
    arrivals: ArrivalKind = "poisson",
    input_: Prompt = "100-600",
    output: Output = "32",
    hit_rate: HitRate = 0.0,
    turns: Turns = "1",
    think: Think = "0",
    prefix_tokens: PrefixTokens = 64,
    prefix_branching: Branching = 4,
    prefix_depth: Depth = 1,
    trace: TraceFile = None,
    format_: TraceFormat = "auto",
    tokenizer: Tokens = None,
    scale: Scale = 1.0,
    max_tokens: MaxTokens = 2048,
    vocab: Vocab = 256,
    lenient: Lenient = False,
) -> None:
    """Is it worth separating prefill and decode? The same cores, the same requests, every arm."""
    with _failing():
        from loadtest.cluster import Hardware, default_cores
        from loadtest.measure import Comparison, compare_arms

        prefill_share, _, decode_share = ratio.partition(":")
        if not (prefill_share.isdigit() and decode_share.isdigit()):
            raise ValueError(f"ratio: {ratio!r} is not N:M")
        comparison = Comparison(
            model=_model(model),
            arms=tuple(arms.split(",")),
            hardware=Hardware(tuple(map(int, _numbers("cores", cores))) if cores else default_cores(), threads),
            ratio=(int(prefill_share), int(decode_share)),
            chunk=chunk,
            rates=tuple(_positive("rates", rate) for rate in _numbers("rates", rates)),
            vary=_vary(vary),
            bisections=bisections,
        )
        _report(asyncio.run(compare_arms(_plan(locals()), comparison, err.print)), out_)


@app.command()
def replay(
    folders: Annotated[list[Path], typer.Argument(help="Folder with campaign.json and records; several: parts of one campaign.")],
    out_: Annotated[Path | None, typer.Option("--out", help="Another folder for the report.")] = None,
) -> None:
    """Draw a report again from its raw records."""
    from loadtest.campaign import Campaign, merge

    with _failing():
        if len(folders) > 1 and out_ is None:
            raise ValueError("out: parts of a campaign become a report in a folder of its own")
        _report(merge([Campaign.load(folder) for folder in folders]), out_ or folders[0])


@app.command()
def diff(one: Path, other: Path) -> None:
    """Two campaigns side by side."""
    from loadtest.campaign import Campaign
    from loadtest.report import compare_runs

    with _failing():
        out.print(compare_runs(Campaign.load(one), Campaign.load(other)))


def _report(campaign: "Campaign", folder: Path) -> None:
    from loadtest.campaign import Campaign
    from loadtest.report import console_table, draw

    campaign.save(folder)
    campaign = Campaign.load(folder)  # the file's numbers are rounded: what is told now is what a replay tells
    draw(campaign, folder)
    out.print(console_table(campaign))
    if campaign.partial:
        err.print(f"[yellow]partial: {campaign.partial}[/]")
    err.print(f"report {folder / 'report.html'}")


def _plan(given: dict[str, Any]) -> "Plan":
    """From a command's arguments. Raises ValueError."""
    from loadtest.measure import Plan, Workload
    from loadtest.slo import Slo

    slo = Slo.parse(given["slo"])
    said: dict[str, Any] = {name: given.get(f"{name}_", given.get(name)) for name in Workload.__slots__}
    said |= {"duration_s": given["duration"], **{name: said[name] and str(said[name]) for name in ("trace", "tokenizer")}}
    seeds = tuple(int(number) for number in _numbers("seeds", given["seeds"]))
    return Plan(
        Workload(**said), slo, seeds, given["warm_up"], given["cool_down"], given["timeout"], partial(_show, slo, given["duration"])
    )


async def _show(slo: "Slo", duration_s: float, running: "asyncio.Task[Any]", live: "Live", title: str) -> None:
    """A line that moves: what went out, what came back, how it looks just now."""
    from loadtest.distribution import percentile
    from loadtest.latency import itl, ttft
    from loadtest.slo import meets

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TextColumn("{task.fields[now]}"), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task(title, total=duration_s, now="")
        passed = 0.0
        while not running.done():
            await asyncio.wait({running}, timeout=DISPLAY_EVERY_S)
            passed += DISPLAY_EVERY_S
            recent = live.records[-RECENT:]
            firsts = percentile([value for record in recent if (value := ttft(record)) is not None], 50)
            gaps = percentile([gap for record in recent for gap in itl(record)], 50)
            met = sum(meets(record, slo) for record in recent) / len(recent) if recent else 0.0
            now = f"{live.in_flight} in flight · {len(live.records)}/{live.due} ended · SLO {met:4.0%}"
            if firsts is not None:
                now += f" · TTFT {1000 * firsts:.0f} ms"
            if gaps is not None:
                now += f" · ITL {1000 * gaps:.1f} ms"
            bar.update(task, completed=min(passed, duration_s), now=now)


def _numbers(field: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{field}: {text!r} is not a list of numbers") from None


def _positive(field: str, number: float) -> float:
    if not 0 < number < math.inf:
        raise ValueError(f"{field}: {number:g} is not above 0")
    return number


def _vary(text: str) -> tuple[str, tuple[str, ...]]:
    key, _, values = text.partition("=")
    key = key.replace("-", "_")
    if text and (key not in ("input", "output", "hit_rate", "chunk") or not values):
        raise ValueError(f"vary: {text!r} is not input=, output=, hit_rate= or chunk= with values")
    return key, tuple(values.split(",")) if values else ("",)


def _model(name: str) -> str:
    """A checkpoint's folder; `heavy` is made when it is not there yet: large enough that a prefill stalls decodes on two cores."""
    if name != "heavy":
        if not (Path(name) / "config.json").is_file():
            raise ValueError(f"model: {name} holds no config.json")
        return str(Path(name).resolve())
    folder = state.state_dir() / "models" / "heavy"
    if not (folder / "config.json").exists():
        err.print("making the heavy model (once)")
        subprocess.run([sys.executable, "-m", "baton.models.make_small", str(folder), *HEAVY], check=True)
    return str(folder)


@contextmanager
def _failing() -> Iterator[None]:
    """What is wrong with the input or the endpoint becomes a line on stderr: 2 for input, 1 for the rest."""
    try:
        yield
    except (state.StateError, ConnectionError, RuntimeError, OSError) as error:
        err.print(f"baton loadtest: {error}", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except ValueError as error:
        err.print(f"baton loadtest: {error}", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
