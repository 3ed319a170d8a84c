"""`baton loadtest`: measure an endpoint, compare ways to use the same hardware, redraw a report."""

import asyncio
import math
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from baton.access.access import find, forwarded, identify
from baton.access.options import ClientIdentity, ClusterOptions
from baton.cluster.errors import BatonError
from baton.launch import state
from baton.launch.pods import parse_release
from loadtest.options import Arms, Entrance, LoadOptions, MeasureOptions, Target, takes

if TYPE_CHECKING:  # numpy and matplotlib are loaded by the commands that need them, not by every `baton status`
    from loadtest.access import DoorAccess
    from loadtest.arms import Ratio
    from loadtest.campaign import Campaign
    from loadtest.drive import Live
    from loadtest.hardware import Hardware
    from loadtest.plan import ComparePlan, Plan
    from loadtest.release import Release
    from loadtest.slo import Slo

app = typer.Typer(no_args_is_help=True, help="Load test: goodput under an SLO, and whether disaggregation pays.")
out, err = Console(highlight=False, width=None if sys.stdout.isatty() else 200), Console(stderr=True, highlight=False)

HEAVY = ("--hidden", "768", "--layers", "12", "--heads", "12", "--kv-heads", "4")
DISPLAY_EVERY_S = 0.5
NO_VERDICT = 3  # exit code
MODEL = "heavy"
CHUNK = 256  # tokens of a step on cores
RUN_S, SEEDS = 20.0, "1,2,3,4,5,6"  # where nothing is given; `compare` fits both into its time


@app.command()
@takes(Target, MeasureOptions, Entrance, ClusterOptions, ClientIdentity, LoadOptions)
def run(
    target: Target, measured: MeasureOptions, entrance: Entrance, place: ClusterOptions, identity: ClientIdentity, load: LoadOptions
) -> None:
    """Measure one endpoint at one rate."""
    with failing():
        from loadtest.measure import measure_endpoint

        found = find(entrance.door, place, identity)
        plan = plan_of(target.slo, measured, _access(entrance, found.identity), load)
        report_on(asyncio.run(measure_endpoint(plan, found.address, _positive("rate", target.rate))), measured.out)


@app.command()
@takes(Arms, MeasureOptions, Entrance, ClientIdentity, LoadOptions)
def compare(arms: Arms, measured: MeasureOptions, entrance: Entrance, identity: ClientIdentity, load: LoadOptions) -> None:
    """Is it worth separating prefill and decode? Every arm gets the same hardware and the same requests."""
    with failing():
        own = identify(identity)
        trusted = forwarded(own) if arms.kubernetes and not arms.address else own
        # Every answered request meets the time-out, until a look at the first arm has proposed objectives.
        plan = plan_of(arms.slo or f"ttft={measured.timeout}s", measured, _access(entrance, trusted), load)
        given = {"slo": arms.slo, "rates": arms.rates, "duration": load.duration, "seeds": measured.seeds}
        chosen = frozenset(name for name, value in given.items() if value is None)
        release = _release(arms, entrance, own, plan)
        report_on(asyncio.run(_compared(arms, chosen, plan, release)), measured.out)


async def _compared(arms: Arms, chosen: frozenset[str], plan: "Plan", release: "Release | None") -> "Campaign":
    """An order to stop ends it as Ctrl-C does: what was measured is kept, and a release gets its sizes back."""
    from loadtest.hardware import ClusterError
    from loadtest.measure import compare_arms

    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    campaign = None
    try:
        async with release or nullcontext():
            campaign = await compare_arms(*await _calibrated(plan, _comparison(arms, chosen, release)))
    except asyncio.CancelledError:
        raise RuntimeError("it was ended before anything was measured") from None
    except ClusterError as error:
        if campaign is None:
            raise
        return replace(campaign, partial="; ".join(filter(None, (campaign.partial, str(error)))))
    return campaign


@app.command()
def replay(
    folders: Annotated[list[Path], typer.Argument(help="Folder with campaign.json and records. Several are parts of one campaign.")],
    out_: Annotated[Path | None, typer.Option("--out", help="Another folder for the report.")] = None,
    slo: Annotated[str | None, typer.Option(help="Judge by other objectives than those measured for: ttft=500ms,tpot=30ms.")] = None,
) -> None:
    """Redraw a report from its raw records."""
    from loadtest.campaign import Campaign, merge
    from loadtest.slo import Slo

    with failing():
        objectives = None if slo is None else Slo.parse(slo)
        if out_ is None and (len(folders) > 1 or objectives is not None):
            what = "the joined parts of a campaign" if len(folders) > 1 else "other objectives"
            raise ValueError(f"out: {what} need a report folder of their own; name it with --out")
        campaign = merge([Campaign.load(folder) for folder in folders])
        report_on(campaign if objectives is None else replace(campaign, slo=objectives), out_ or folders[0])


@app.command()
def diff(one: Path, other: Path) -> None:
    """Two campaigns side by side."""
    from loadtest.campaign import Campaign
    from loadtest.report import compare_runs

    with failing():
        out.print(compare_runs(Campaign.load(one), Campaign.load(other)))


def report_on(campaign: "Campaign", folder: Path) -> None:
    """Raises RuntimeError if no run counts, and typer.Exit if arms were compared without a verdict: a script must not mistake either for a
    result."""
    from loadtest.campaign import Campaign
    from loadtest.report import console_table, draw, sections

    campaign.save(folder)
    campaign = Campaign.load(folder)  # the file's numbers are rounded: this report must show what a replay will show
    draw(campaign, folder)
    out.print(console_table(campaign))
    if campaign.partial:
        err.print(f"partial: {campaign.partial}", style="yellow", markup=False)
    err.print(f"report {folder / 'report.html'}", markup=False, soft_wrap=True)
    parts = sections(campaign)
    runs = [run for part in parts for run in part.results.runs]
    if all(run.flaw for run in runs):
        why = "; ".join(dict.fromkeys(run.flaw for run in runs))
        raise RuntimeError(f"none of the {len(runs)} runs counts, so nothing was measured: {why}")
    if len(campaign.arms) > 1 and any(part.verdict.status == "no verdict" for part in parts):
        raise typer.Exit(NO_VERDICT)


async def _calibrated(plan: "Plan", comparison: "ComparePlan") -> tuple["Plan", "ComparePlan"]:
    """Adds the objectives and the rates that nobody gave. Raises as `calibrate` does."""
    from loadtest.calibrate import calibrate
    from loadtest.plan import TRACE

    if not comparison.chosen & {"slo", "rates"}:
        return plan, comparison
    if "rates" in comparison.chosen and plan.workload.arrivals == TRACE:
        raise ValueError("rates: how much faster to play a trace with its own times has to be said")
    began = perf_counter()
    key, values = comparison.vary
    seen = await calibrate(comparison, plan.workload.vary(key, values[0]), plan.access, plan.timeout_s, plan.note)
    if "slo" in comparison.chosen:
        plan = replace(plan, slo=seen.slo)
    rates = seen.rates if "rates" in comparison.chosen else comparison.rates
    same = f"--slo {plan.slo} --rates {','.join(f'{rate:g}' for rate in rates)}"
    told = seen.as_json() | {"flags": same}
    plan.note(f"{seen}; the same again: {same}")
    within_s = comparison.within_s - (perf_counter() - began)
    return plan, replace(comparison, rates=rates, within_s=within_s, start_s=seen.start_s, proposed=told)


def plan_of(slo_text: str, measured: MeasureOptions, access: "DoorAccess | None", load: LoadOptions) -> "Plan":
    """`access`: None where no endpoint is asked. Raises ValueError."""
    from loadtest.access import DoorAccess
    from loadtest.plan import Plan, Workload
    from loadtest.slo import Slo

    workload = Workload(
        input=load.input,
        output=load.output,
        hit_rate=load.hit_rate,
        turns=load.turns,
        think=load.think,
        prefix_tokens=load.prefix_tokens,
        prefix_branching=load.prefix_branching,
        prefix_depth=load.prefix_depth,
        trace=None if load.trace is None else str(load.trace),
        format=load.format,
        tokenizer=None if load.tokenizer is None else str(load.tokenizer),
        scale=load.scale,
        max_tokens=load.max_tokens,
        vocab=load.vocab,
        lenient=load.lenient,
        arrivals=load.arrivals,
        duration_s=RUN_S if load.duration is None else load.duration,
    )
    return Plan(
        workload=workload,
        slo=Slo.parse(slo_text),
        seeds=tuple(int(number) for number in _numbers("seeds", SEEDS if measured.seeds is None else measured.seeds)),
        warm_up_s=measured.warm_up,
        cool_down_s=measured.cool_down,
        timeout_s=measured.timeout,
        access=access or DoorAccess(),
        show=_show,
        note=lambda line: err.print(line, markup=False, soft_wrap=True),
    )


def _access(entrance: Entrance, identity: ClientIdentity) -> "DoorAccess":
    from loadtest.access import DoorAccess, Tls

    tls = Tls(identity.ca, identity.cert, identity.key, identity.server_name) if identity.tls else None
    return DoorAccess(entrance.door, identity.api_key, tls)


def _comparison(arms: Arms, chosen: frozenset[str], release: "Release | None" = None) -> "ComparePlan":
    """`chosen`: what nobody gave. All is checked before the model is made, which takes a while. Raises ValueError and ClusterError."""
    from loadtest.plan import ComparePlan

    comparison = ComparePlan(
        model=arms.model or MODEL,
        arms=tuple(arms.arms.split(",")),
        hardware=_hardware(arms) if release is None else release.pods,
        ratio=_ratio(arms.ratio),
        chunk=arms.chunk if arms.chunk or arms.gpus is not None else CHUNK,
        rates=tuple(_positive("rates", rate) for rate in _numbers("rates", arms.rates)) if arms.rates is not None else (),
        vary=_vary(arms.vary),
        bisections=arms.bisections,
        engines=tuple((arms.engines or "baton").split(",")),
        vllm=arms.vllm,
        parallel=arms.tensor_parallel,
        dtype=arms.dtype,
        within_s=_positive("within", arms.within),
        chosen=chosen,
        release=release,
    )
    comparison.check(comparison.make_arms())
    return comparison if release is not None else replace(comparison, model=_model(arms.model or MODEL))


def _release(arms: Arms, entrance: Entrance, identity: ClientIdentity, plan: "Plan") -> "Release | None":
    """None unless one is named. Raises ValueError for flags that say what a release decides itself."""
    name = parse_release(arms.kubernetes or "")
    if arms.kubernetes is None:
        if arms.context or arms.address:
            raise ValueError(f"{'context' if arms.context else 'address'}: goes with --kubernetes")
        return None
    if name is None:
        raise ValueError(f"kubernetes: {arms.kubernetes!r} is not NAMESPACE/RELEASE")
    own = ("model", "engines", "cores", "threads", "gpus", "dtype", "chunk")
    if given := [field for field in own if getattr(arms, field) is not None]:
        raise ValueError(f"{given[0]}: the release decides that: `{name.upgrade()}` with other values, or a second release")
    if arms.tensor_parallel != 1 or arms.vllm != "{}":
        raise ValueError("tensor-parallel, vllm: the release decides that")
    if _vary(arms.vary)[0] == "chunk":
        raise ValueError("vary: chunk: a release keeps its configuration")
    from loadtest.release import Release
    from loadtest.release_cluster import OutsideCluster

    keep = state.state_dir() / "compare" / f"{name.namespace}.{name.name}.json"
    cluster = OutsideCluster(name, arms.context, entrance.door, identity, arms.address)
    return Release(name, cluster, keep, plan.note)


def _hardware(arms: Arms) -> "Hardware":
    """Raises ValueError and ClusterError."""
    from loadtest.hardware import Cores, default_cores, find_gpus

    if arms.gpus is None:
        if arms.tensor_parallel != 1:
            raise ValueError("tensor-parallel: ranks are on GPUs: say how many with --gpus")
        return Cores(tuple(map(int, _numbers("cores", arms.cores))) if arms.cores else default_cores(), arms.threads or 1)
    for name, given in (("cores", arms.cores), ("threads", arms.threads)):
        if given is not None:
            raise ValueError(f"{name}: with --gpus, arms share GPUs and not cores")
    return find_gpus(arms.gpus, arms.tensor_parallel)


def _ratio(text: str) -> "Ratio":
    """Raises ValueError."""
    prefill, _, decode = text.partition(":")
    if text == "all":
        return None
    if not (prefill.isdigit() and decode.isdigit()):
        raise ValueError(f"ratio: {text!r} is not N:M or all")
    return int(prefill), int(decode)


async def _show(running: "asyncio.Task[Any]", live: "Live", slo: "Slo", duration_s: float, title: str) -> None:
    """A progress line: requests sent, requests finished, and the recent latencies."""
    from loadtest.progress import line

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TextColumn("{task.fields[now]}"), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task(title, total=duration_s, now="")
        passed = 0.0
        while not running.done():
            await asyncio.wait({running}, timeout=DISPLAY_EVERY_S)
            passed += DISPLAY_EVERY_S
            bar.update(task, completed=min(passed, duration_s), now=line(live, slo, passed))


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
    from loadtest.plan import VARIED

    key, _, values = text.partition("=")
    key = key.replace("-", "_")
    if text and (key not in VARIED or not values):
        raise ValueError(f"vary: {text!r} is not input=, output=, hit_rate= or chunk= with values")
    return key, tuple(values.split(",")) if values else ("",)


def _model(name: str) -> str:
    """Folder of a checkpoint. `heavy` is made on first use: it is large enough that a prefill stalls decodes on two cores."""
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
def failing(command: str = "baton loadtest") -> Iterator[None]:
    """Reports an error on stderr in one line. Exit code 2: an error in the input; 1: any other; `report_on` adds NO_VERDICT."""
    try:
        yield
    except typer.Exit:  # a RuntimeError, too
        raise
    except (state.StateError, BatonError, ConnectionError, RuntimeError, OSError) as error:
        err.print(f"{command}: {error}", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except ValueError as error:
        err.print(f"{command}: {error}", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
