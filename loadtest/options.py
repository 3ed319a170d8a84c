"""The flags of the commands, each declared once: dataclasses group related flags, and a command takes their instances.

    @takes(Target, MeasureOptions, LoadOptions)
    def run(target: Target, measured: MeasureOptions, load: LoadOptions) -> None: ...

This command has a flag for every field of the three classes. Renaming a field renames its flag or fails the type check; no code looks up
values by name.
"""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

SLO_HELP = "Objectives that every request must meet, with units: ttft=500ms,tpot=50ms,itl_p99=150ms."


def takes(*kinds: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turns a function that takes one object of each kind into one that takes a keyword for each of their fields, for typer to read.

    Raises TypeError if two of the classes have a field of the same name.
    """
    owners = [(kind, field) for kind in kinds for field in fields(kind)]
    names = [field.name for _, field in owners]
    if shared := sorted({name for name in names if names.count(name) > 1}):
        raise TypeError(f"two option classes share {', '.join(shared)}")
    hints = {kind: get_type_hints(kind, include_extras=True) for kind in kinds}
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[kind][field.name],
        )
        for kind, field in owners
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def call(**given: Any) -> None:
            command(*(kind(**{field.name: given[field.name] for field in fields(kind)}) for kind in kinds))

        call.__name__, call.__doc__ = command.__name__, command.__doc__
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return call

    return decorate


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureOptions:
    """What counts, and where the results are written."""

    out: Annotated[Path, typer.Option(help="Folder for the report and the raw records.")] = Path("loadtest-report")
    warm_up: Annotated[float, typer.Option(help="Seconds at the start that do not count.")] = 3.0
    cool_down: Annotated[float, typer.Option(help="Seconds at the end that do not count.")] = 2.0
    timeout: Annotated[float, typer.Option(help="Deadline of each request, seconds.")] = 60.0
    seeds: Annotated[
        str | None,
        typer.Option(
            help="One run for each seed, by default 1,2,3,4,5,6. In `compare`, the first chooses rates and the others judge; by default "
            "it takes as many of these as fit into --within."
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrance:
    """Which door. How to reach it is in `baton.access.options`."""

    door: Annotated[Literal["grpc", "http"], typer.Option(help="grpc (baton.v1), or http (/v1/completions of the OpenAI API).")] = "grpc"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """The requests to send."""

    input: Annotated[str, typer.Option(help="Prompt tokens: 512, 100-600 or lognormal:512:0.6.")] = "100-600"
    output: Annotated[str, typer.Option(help="Output tokens, in the same forms.")] = "32"
    hit_rate: Annotated[float, typer.Option(help="Share of the prompt tokens that belong to prefixes sent before.")] = 0.0
    turns: Annotated[str, typer.Option(help="Requests in a session. Each carries the earlier answers.")] = "1"
    think: Annotated[str, typer.Option(help="Pause of a session between an answer and the next turn, seconds.")] = "0"
    prefix_tokens: Annotated[int, typer.Option(help="Tokens in one level of the tree of shared prefixes.")] = 64
    prefix_branching: Annotated[int, typer.Option(help="Different prefixes on each level.")] = 4
    prefix_depth: Annotated[int, typer.Option(help="Levels of shared prefixes.")] = 1
    trace: Annotated[Path | None, typer.Option(help="Recorded workload to send instead: ShareGPT, Mooncake, BurstGPT, Azure or plain.")] = (
        None
    )
    format: Annotated[str, typer.Option(help="auto, sharegpt, mooncake, burstgpt, azure or plain.")] = "auto"
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json that turns the text of a ShareGPT trace into ids.")] = None
    scale: Annotated[float, typer.Option(help="Factor for all lengths, so that a real trace fits a small machine.")] = 1.0
    max_tokens: Annotated[int, typer.Option(help="Longest prompt plus answer. Longer requests are left out and counted.")] = 2048
    vocab: Annotated[int, typer.Option(help="All token ids are below this.")] = 256
    lenient: Annotated[bool, typer.Option("--lenient", help="Skip and count malformed lines of a trace.")] = False
    arrivals: Annotated[str, typer.Option(help="poisson, constant, gamma:BURSTINESS, or trace (its own times).")] = "poisson"
    duration: Annotated[
        float | None,
        typer.Option(help="Seconds during which requests become due. By default 20; in `compare`, for each rate, what fits into --within."),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What `run` measures."""

    slo: Annotated[str, typer.Option(help=SLO_HELP)]
    rate: Annotated[float, typer.Option(help="Requests per second. With a trace's own times: how much faster to play it.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arms:
    """What `compare` compares."""

    slo: Annotated[str | None, typer.Option(help=f"{SLO_HELP} Without it, a look at the first arm proposes some.")] = None
    rates: Annotated[
        str | None, typer.Option(help="Requests per second of the sweep: 1,2,4. Without it, a look at the first arm proposes some.")
    ] = None
    within: Annotated[
        float, typer.Option(help="Seconds that the comparison should take. Run lengths, seeds and rates that are not given follow it.")
    ] = 480.0
    model: Annotated[
        str | None,
        typer.Option(help="Folder of a checkpoint; by default heavy: a seeded random one of 85 M parameters, made on first use."),
    ] = None
    arms: Annotated[
        str,
        typer.Option(
            help="Any of colocated, unchunked, static, dynamic, disaggregated, bypass; colocated@64 has its own chunk, "
            "disaggregated-1:3 its own split."
        ),
    ] = "colocated,disaggregated"
    engines: Annotated[
        str | None,
        typer.Option(help="Engines under the arms: baton (the default), vllm, or baton,vllm, which compares every arm over both."),
    ] = None
    vllm: Annotated[str, typer.Option(help="Arguments of vLLM for the arms over it, as in engine.vllm: {enforce_eager: true}.")] = "{}"
    cores: Annotated[str | None, typer.Option(help="Cores that every arm gets: 0,1. By default all.")] = None
    threads: Annotated[int | None, typer.Option(help="Cores per worker, by default 1.")] = None
    gpus: Annotated[int | None, typer.Option(help="GPUs that every arm gets instead of cores, one for each worker.")] = None
    tensor_parallel: Annotated[int, typer.Option(help="GPUs per worker. Only for vLLM.")] = 1
    dtype: Annotated[str | None, typer.Option(help="Type of weights and KV, as model.dtype.")] = None
    ratio: Annotated[str, typer.Option(help="Prefill to decode workers of the arms that have both; all: every split is an arm.")] = "1:1"
    chunk: Annotated[int | None, typer.Option(help="Most tokens in one step; by default 256, on GPUs the engine's own.")] = None
    kubernetes: Annotated[
        str | None,
        typer.Option(help="NAMESPACE/RELEASE of the chart, whose pods are the hardware and whose pools are resized between the arms."),
    ] = None
    context: Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig; its current one by default.")] = None
    address: Annotated[str | None, typer.Option(help="host:port of the release's door; by default requests go through the API server.")] = (
        None
    )
    vary: Annotated[str, typer.Option(help="A parameter at several values: input=100,400,1000 (also output, hit_rate, chunk).")] = ""
    bisections: Annotated[
        int, typer.Option(help="Runs of each arm between the last rate that holds and the first that does not, to choose its rate.")
    ] = 2
