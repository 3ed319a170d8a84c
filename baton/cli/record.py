"""`baton record` and `baton replay-run`: what the processes of a cluster have decided lately, as one file, and that file decided again."""

import json
import os
import secrets
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import grpc
import typer
from rich.console import Console

from baton.access.access import find
from baton.access.options import ClientIdentity, ClusterOptions
from baton.cli.admin import read_status
from baton.cli.failing import failing
from baton.cluster.config import ConfigError
from baton.launch.state import StateError
from baton.recorder.recorder import SECRET_BYTES
from baton.v1 import worker_pb2, worker_pb2_grpc
from loadtest.options import takes

STATUS_S = 5.0
AT_ONCE = 8  # processes that are read at a time
err = Console(stderr=True, highlight=False, emoji=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordOptions:
    """Argument and option of `record`."""

    file: Annotated[Path, typer.Argument(help="The file that is written, readable by its owner only.")]
    within: Annotated[float, typer.Option(min=1, max=600, help="Seconds for all processes together.")] = 60.0


@takes(RecordOptions, ClusterOptions, ClientIdentity)
def record(asked: RecordOptions, place: ClusterOptions, identity: ClientIdentity) -> None:
    """Write what all processes of a cluster have decided lately to one file. It has no prompt, no answer and no key. A process that does
    not answer is named, and the exit status is 1. Here, `--address` is the router's admin address."""
    with failing(err):
        file, deadline = asked.file, time.monotonic() + asked.within
        with find("admin", place, identity).channel() as channel:
            stub = worker_pb2_grpc.AdminStub(channel)
            status = read_status(stub.Status(worker_pb2.StatusRequest(), timeout=min(asked.within, STATUS_S)))
            names = [one["name"] for kind in ("routers", "workers") for one in status[kind]]
            missing = _write(file, stub, names, deadline)
        err.print(f"{file}: {len(names) - len(missing)} of {len(names)} processes", markup=False, soft_wrap=True)
        for name, why in missing.items():
            err.print(f"{name} is missing: {why}", markup=False, soft_wrap=True)
        if missing:
            raise typer.Exit(1)


def replay_run(
    file: Annotated[Path, typer.Argument(help="A file of `baton record`, or one that a process wrote when it failed or on SIGUSR2.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Decide again what a recording has, and compare. Needs no cluster. The exit status is 1 if a decision differs: the first one is shown,
    with its inputs and its line in the file."""
    from baton.recorder.recording import BadRecording, read  # the router's own code, which no other command needs
    from baton.simulate.replay import replay, summary
    from baton.simulate.replay_engine import ReplayedEngine
    from baton.simulate.replay_router import ReplayedRouter

    with failing(err):
        try:
            outcomes = [replay(section, {"router": ReplayedRouter, "engine": ReplayedEngine}) for section in read(file)]
        except BadRecording as error:
            raise ConfigError(str(error)) from None
        if as_json:
            print(json.dumps([one.to_json() for one in outcomes]))
        else:
            for line in summary(outcomes):
                print(line)
        if any(one.difference for one in outcomes):
            raise typer.Exit(1)


def _write(path: Path, stub: Any, names: list[str], deadline: float) -> dict[str, str]:
    """Writes the sections of these processes. Returns who is missing, and why. Raises OSError, and StateError if nobody answers."""
    secret = secrets.token_bytes(SECRET_BYTES)
    draft, unfinished = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(draft, "wb") as whole, ThreadPoolExecutor(AT_ONCE) as pool:
            sections = dict(zip(names, pool.map(lambda name: _section(stub, name, secret, deadline), names), strict=True))
            for section in sections.values():
                _append(section, whole)
        missing = {name: section for name, section in sections.items() if isinstance(section, str)}
        if len(missing) == len(names):
            raise StateError("; ".join(f"{name}: {why}" for name, why in missing.items()) or "the cluster has no process")
        os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(unfinished)
        raise
    return missing


def _append(section: BinaryIO | str, whole: BinaryIO) -> None:
    if not isinstance(section, str):
        with section:
            shutil.copyfileobj(section, whole)


def _section(stub: Any, name: str, secret: bytes, deadline: float) -> BinaryIO | str:
    """A file with the section of one process, at its start; or why there is none."""
    section: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    try:
        asked = worker_pb2.AdminRecordRequest(name=name, secret=secret)
        for answer in stub.Record(asked, timeout=max(0.1, deadline - time.monotonic())):
            section.write(answer.lines)
    except grpc.RpcError as error:
        section.close()
        return str(error.details() or error.code().name)
    section.seek(0)
    return section
