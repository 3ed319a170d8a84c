"""`baton logs`: the output of any process of a cluster."""

import contextlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
from rich.console import Console

from baton.access.access import DEFAULT_NAME, find
from baton.access.options import ClientIdentity, ClusterOptions
from baton.cli.interrupt import interruptible
from baton.cli.options import LogsOptions
from baton.client import leave
from baton.cluster import log_file
from baton.cluster.errors import invalid
from baton.launch import state
from baton.launch.kubernetes_api import connect
from baton.launch.pods import INSTANCE, ReleaseName, log_of, name_of
from baton.v1 import worker_pb2, worker_pb2_grpc

TIMEOUT_S = 60.0


def show(process: str, lines: int, follow: bool, place: ClusterOptions, identity: ClientIdentity) -> None:
    """Asks the cluster. If it cannot answer, because the process or every router is dead, shows the file that a cluster of this machine
    left. Raises StateError, ConfigError, grpc.RpcError."""
    asked = worker_pb2.AdminLogsRequest(name=process, lines=lines, follow=follow)
    began = False
    try:
        with find("admin", place, identity).channel() as channel, _asked(channel, asked) as pages:
            for page in pages:
                began = True
                _write(page.text)
    except grpc.RpcError:
        left = None if began or follow or place.address else _left(place.name or DEFAULT_NAME, process)
        if left is None:
            raise
        with left.open("rb") as file:
            file.seek(log_file.start_of(left, lines))
            _write(file.read(log_file.MOST_BYTES))


def show_pod(release: ReleaseName, context: str | None, reading: LogsOptions, err: Console) -> None:
    """Asks the API server, so it works for a pod that is down, too. Raises ConfigError, BatonError."""
    api = connect(context)
    api.release(release)
    pods = {name_of(pod): pod for pod in api.pods(release.namespace, f"{INSTANCE}={release.name}")}
    if reading.process not in pods:
        raise invalid("name", f"there is no pod {reading.process!r} of {release}; known pods: {', '.join(sorted(pods))}")
    log = log_of(pods[reading.process])
    if log.note:
        err.print(log.note, markup=False, soft_wrap=True)
    how = {"tail_lines": reading.lines, "previous": log.previous, "follow": reading.follow and not log.previous}
    with contextlib.closing(api.log(release.namespace, reading.process, log.container, **how)) as pieces:
        for piece in pieces:
            _write(piece)


@contextmanager
def _asked(channel: grpc.Channel, asked: worker_pb2.AdminLogsRequest) -> Iterator[Iterable[worker_pb2.LogsResponse]]:
    """Ctrl-C ends the answer in order."""
    call = worker_pb2_grpc.AdminStub(channel).Logs(asked, timeout=None if asked.follow else TIMEOUT_S)
    try:
        with interruptible(call):
            yield call
    finally:
        leave(call)


def _left(cluster: str, process: str) -> Path | None:
    running = state.read(cluster)
    found = {path.stem: path for path in Path(running.log_dir).glob("*.log")} if running else {}
    return found.get(process)


def _write(text: bytes) -> None:
    sys.stdout.buffer.write(text)
    sys.stdout.buffer.flush()
