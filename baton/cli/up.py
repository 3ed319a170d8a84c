"""What a person sees of `baton up` and `baton down`; `baton.launch.supervisor` does the work."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import grpc
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID

from baton.access.access import Access
from baton.cli.gguf_files import SUFFIX, folder_of
from baton.cluster.config import Config, ConfigError
from baton.cluster.guard import check_doors
from baton.cluster.packages import command
from baton.cluster.records import StartRecord
from baton.launch import state
from baton.launch.gpus import SettledConfig, settle
from baton.launch.join import configure, draw_label, learn
from baton.launch.plan import check_launcher, check_model, check_ports, check_shared_ports
from baton.launch.preflight import check_here
from baton.launch.supervisor import Supervisor, joined_name
from baton.v1 import worker_pb2, worker_pb2_grpc

DOWN_WITHIN_S = 60.0
LINE_EVERY_S = 10.0  # of a worker that starts, where there are no bars
ASK_S = 5.0
SHIPPED = Path(__file__).resolve().parents[1] / "models" / "tale"
TRY = (  # long enough for a handoff
    "Once upon a time there was a fox who lived near the river and wanted to see the sea."
    " The fox was called Pim, and everybody knew that he was very brave. His best friend was Ida the owl."
)
TRY_JSON = json.dumps({"messages": [{"role": "user", "content": "Tell me a story about a hedgehog named Pim and an owl."}]})


def join(address: str, config: Config, files: list[Path], flags: dict[str, str], err: Console) -> None:
    """Runs workers that join the cluster whose router has the admin address `address`. Returns when they have stopped. Raises StateError
    and whatever keeps them from starting."""
    check_launcher(config)
    learned = asyncio.run(learn(address, config))
    config = configure(address, learned, files, flags)
    if state.read(joined_name(config)) is not None:
        raise state.StateError(f"workers of this host have joined already; `baton down{_named(joined_name(config))}` stops them")
    config = with_model(config, lambda line: err.print(line, soft_wrap=True, markup=False))
    settled = settle(config)
    check_here(settled.config)
    check_shared_ports(config, routers=0)
    check_model(config)
    if status := _run(settled, err, draw_label()):
        raise typer.Exit(status)


def start(config: Config, err: Console, detach: bool, show: Callable[[str], None] = lambda line: None) -> None:
    """Returns when the cluster has stopped, or with `detach` when it is ready; `show` gets what it is doing meanwhile.

    Raises StateError and whatever keeps it from starting."""
    check_launcher(config)
    name = config.cluster.name
    if state.read(name) is not None:
        raise state.StateError(f"cluster {name!r} is already running; `baton down{_named(name)}` stops it")
    check_doors(config)
    config = with_model(config, lambda line: err.print(line, soft_wrap=True, markup=False))
    settled = settle(config)
    check_here(settled.config)
    check_ports(config)
    check_model(config)
    if detach:
        _detach(name, show)
    elif status := _run(settled, err):
        raise typer.Exit(status)


def end(name: str, err: Console) -> None:
    """Stops a running cluster and waits until it is down. Raises StateError."""
    running = state.need(name)
    os.kill(running.pid, signal.SIGTERM)
    deadline = time.monotonic() + DOWN_WITHIN_S
    while state.alive(running.pid):
        if time.monotonic() > deadline:
            raise state.StateError(f"the supervisor (pid {running.pid}) is still running after {DOWN_WITHIN_S:g} s")
        time.sleep(0.05)
    err.print(f"cluster {name} is down")


def end_from_afar(access: Access, err: Console) -> None:
    """Asks the routers to have their cluster stopped, and waits until they are gone. Raises StateError, grpc.RpcError."""
    deadline = time.monotonic() + DOWN_WITHIN_S
    with access.channel() as channel:
        stub = worker_pb2_grpc.AdminStub(channel)
        stub.Down(worker_pb2.DownRequest(), timeout=ASK_S)
        while time.monotonic() < deadline:
            try:
                stub.Status(worker_pb2.StatusRequest(), timeout=ASK_S)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    err.print(f"the router at {access.address} is down; the cluster's workers follow", soft_wrap=True, markup=False)
                    return
            time.sleep(0.2)
    raise state.StateError(f"the router at {access.address} is still running after {DOWN_WITHIN_S:g} s")


def _run(settled: SettledConfig, err: Console, label: str = "") -> int:
    config = settled.config
    name = joined_name(config) if label else config.cluster.name
    log_dir = state.state_dir() / f"{name}-logs"
    log_dir.mkdir(exist_ok=True)
    for old in log_dir.glob("*.log"):
        old.unlink()
    with _Starting(err) as starting:
        if settled.note:
            starting.note(settled.note)

        def on_ready(running: state.ClusterState) -> None:
            starting.stop()
            if label:
                err.print(f"[bold green]joined[/]  {config.prefill.replicas} prefill, {config.decode.replicas} decode, logs {log_dir}")
                err.print(f"[dim]Ctrl-C or `baton down{_named(name)}` stops these workers; the cluster goes on[/]")
            else:
                _banner(config, running, err)

        return asyncio.run(Supervisor(config, log_dir, starting.note, starting.show, gpus=settled.gpus, label=label).run(on_ready))


class _Starting:
    """What a person sees while a cluster starts: a line for each change, and on a terminal a bar for each worker that starts."""

    def __init__(self, err: Console) -> None:
        self._err = err
        self._bars = Progress(SpinnerColumn(), "{task.description}", BarColumn(), MofNCompleteColumn(), console=err, transient=True)
        self._tasks: dict[str, TaskID] = {}
        self._said: dict[str, float] = {}  # when each worker's step was last shown
        self._live = err.is_terminal

    def __enter__(self) -> Self:
        if self._live:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def note(self, line: str) -> None:
        self._err.print(line, soft_wrap=True, markup=False)

    def show(self, record: StartRecord) -> None:
        name, now = record.name, time.monotonic()
        if not self._live:
            if now - self._said.get(name, -LINE_EVERY_S) >= LINE_EVERY_S:
                self._said[name] = now
                self.note(f"{name}: {record}")
            return
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name)
        self._bars.update(self._tasks[name], description=f"{name} {record.step}", completed=record.done, total=record.total or None)

    def stop(self) -> None:
        if self._live:
            self._bars.stop()
            self._live = False


def _banner(config: Config, running: state.ClusterState, err: Console) -> None:
    scheme = "https" if config.security.tls_cert else "http"
    http = f"{scheme}://{running.endpoints['http']}"
    err.print(f"[bold green]ready[/]  {config.prefill.replicas} prefill, {config.decode.replicas} decode, model {config.model.path}")
    err.print(f"gRPC   {running.endpoints['grpc']}   (baton.v1.Generation/Generate)")
    err.print(f"HTTP   {http}/v1   (OpenAI)")
    err.print(f"admin  {running.endpoints['admin']}")
    err.print(f"page   {scheme}://{running.endpoints['page']}/")
    err.print(f"logs   {running.log_dir}")
    err.print(f'try    baton generate "{TRY}" --max-tokens 60 --trace{_named(running.name)}', soft_wrap=True)
    err.print(f"       curl {http}/v1/chat/completions -H 'content-type: application/json' -d '{TRY_JSON}'", soft_wrap=True, markup=False)
    err.print("[dim]Ctrl-C stops it[/]")


def _named(name: str) -> str:
    return "" if name == "baton" else f" --name {name}"


def with_model(config: Config, say: Callable[[str], None] = lambda line: None) -> Config:
    """Uses the configured model, or the one that ships with Baton; of a GGUF file, its folder. Processes elsewhere find the folders by
    their whole paths. Raises ConfigError."""
    path, engine = _found(config.model.path or str(SHIPPED), config, say), config.engine
    if engine.draft_model is not None:
        engine = engine.model_copy(update={"draft_model": _found(engine.draft_model, config, say)})
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path}), "engine": engine})


def _found(path: str, config: Config, say: Callable[[str], None]) -> str:
    if config.launcher.ray_address is not None and path.endswith(SUFFIX):
        raise ConfigError(f"{path}: other hosts have no folder of a GGUF file: `baton unpack` it to where all of them see it")
    return str(folder_of(Path(path).resolve(), say, plainly=config.engine.kind == "vllm").resolve())


def _detach(name: str, show: Callable[[str], None]) -> None:
    """Runs the same command without --detach, in its own session."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--detach"]
    log = state.state_dir() / f"{name}-up.log"
    with log.open("wb") as output:
        child = subprocess.Popen(
            command("baton", *arguments), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        while (running := state.read(name)) is None:  # the child gives up when nothing makes progress
            if child.poll() is not None:
                raise state.StateError(f"the cluster did not start:\n{log.read_text(errors='replace').strip()}")
            if lines := log.read_text(errors="replace").splitlines():
                show(lines[-1])
            time.sleep(0.1)
    except KeyboardInterrupt:
        child.terminate()
        raise
    print(json.dumps({"name": running.name, "pid": running.pid, "endpoints": running.endpoints}))
