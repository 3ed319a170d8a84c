"""A whole cluster of real processes on loopback, started with the command that a person would type."""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc import Channel
from typer.testing import CliRunner

from baton.access.access import Access
from baton.access.options import ClientIdentity
from baton.cli.admin import read_records, read_status
from baton.cli.main import app
from baton.client import AsyncClient, Result
from baton.cluster.failpoint import REACHED
from baton.cluster.rpc import NO_PROXY
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.toy import naive
from baton.launch.state import alive
from baton.models.make_small import make_toy
from baton.v1 import worker_pb2, worker_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
UP_WITHIN_S = 500.0  # a first start compiles; `baton up` itself gives up when nothing makes progress
DOWN_WITHIN_S = 90.0


@dataclass
class Cluster:
    name: str
    grpc: str
    http: str
    admin: str
    page: str
    pid: int
    env: dict[str, str]
    logs: Path

    def client(self, **how: Any) -> AsyncClient:
        return AsyncClient(self.grpc, **how)

    def status(self) -> dict[str, Any]:
        with self._channel() as channel:
            stub = worker_pb2_grpc.AdminStub(channel)
            return read_status(stub.Status(worker_pb2.StatusRequest(), timeout=5))

    def last(self) -> dict[str, Any]:
        """What the router knows about the request that ended last."""
        with self._channel() as channel:
            stub = worker_pb2_grpc.AdminStub(channel)
            return read_records(stub.Trace(worker_pb2.TraceRequest(last=1), timeout=5))[0]

    def ended(self) -> set[str]:
        """The last hundred requests that have ended, by their ids."""
        with self._channel() as channel:
            stub = worker_pb2_grpc.AdminStub(channel)
            return {record["request_id"] for record in read_records(stub.Trace(worker_pb2.TraceRequest(last=100), timeout=5))}

    def record(self, request_id: str) -> dict[str, Any]:
        """What the router remembers about a request that has ended."""
        with self._channel() as channel:
            stub = worker_pb2_grpc.AdminStub(channel)
            [record] = read_records(stub.Trace(worker_pb2.TraceRequest(request_id=request_id), timeout=5))
        return record

    def _channel(self) -> Channel:
        """As a command on this host would open it."""
        known = json.loads((self.logs.parent / f"{self.name}.json").read_text())
        files: dict[str, Any] = {name: Path(file) if name != "server_name" else file for name, file in known["tls"].items()}
        return Access(self.admin, ClientIdentity(tls=bool(files), api_key=known["token"], **files), (NO_PROXY,)).channel()

    def workers(self, pool: str | None = None) -> list[dict[str, Any]]:
        return [worker for worker in self.status()["workers"] if pool in (None, worker["pool"])]

    def incarnation(self, name: str) -> int:
        """Raises StopIteration while no worker of that name is ready."""
        found = (worker for worker in self.workers() if worker["name"] == name and worker.get("state") == "ready" and "error" not in worker)
        return int(next(found)["incarnation"])

    def counted(self, name: str) -> dict[str, float]:
        """The sum of a counter over the workers of each pool, once none is left that has to prove itself: that computes tokens, too."""
        self.wait(lambda: all(worker.get("state") == "ready" for worker in self.workers()))
        sums: dict[str, float] = {}
        for worker in self.workers():
            with urllib.request.urlopen(f"http://{worker['metrics']}/metrics", timeout=30) as answer:
                lines = answer.read().decode().splitlines()
            found = sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))
            sums[worker["pool"]] = sums.get(worker["pool"], 0.0) + found
        return sums

    def worker_pid(self, name: str) -> int:
        return int(next(worker["pid"] for worker in self.workers() if worker["name"] == name))

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        pid = self.worker_pid(name)
        os.kill(pid, number)
        return pid

    @contextmanager
    def faults(self, failpoints: str) -> Iterator[None]:
        """Sets failpoints; each must act once until the end, when a process that is held goes on. The cluster needs a
        BATON_FAILPOINTS_FOLDER."""
        rules = dict(item.split("=", 1) for item in failpoints.split(",") if item)
        try:
            for name, rule in rules.items():
                self.set_fault(name, rule)
            yield
            assert all(self.reached(name).exists() for name in rules), "the fault did not happen"
        finally:
            for file in (self.reached(name) for name in rules):
                file.with_suffix("").unlink(missing_ok=True)
                file.unlink(missing_ok=True)

    def set_fault(self, point: str, rule: str) -> None:
        """Within `faults`, it sets a point again that has acted: then the process that is held there goes on, and the next one is."""
        reached = self.reached(point)
        draft = reached.with_name("draft")  # a process must not read half a rule
        draft.write_text(rule)
        draft.rename(reached.with_suffix(""))
        reached.unlink(missing_ok=True)

    def reached(self, point: str) -> Path:
        """Exists once a process has reached that failpoint."""
        return Path(self.env["BATON_FAILPOINTS_FOLDER"]) / f"{point}{REACHED}"

    def baton(self, *arguments: str, timeout: float = 60, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "baton", *arguments]
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=timeout, **kwargs)

    def here(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The same in this process, without what a process costs to start. An answer streams in the main thread only."""
        hidden = {name: None for name in os.environ if name.startswith("BATON_")}
        done = CliRunner(env={**hidden, **self.env}).invoke(app, arguments)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)

    async def quiet(self, within_s: float = 60.0) -> None:
        """Waits until no lease, block, sequence, quarantined block or admission slot is left anywhere. Raises with whatever is left."""
        deadline, looks = time.monotonic() + within_s, pauses()
        while left := await asyncio.to_thread(self.residue):
            if time.monotonic() > deadline:
                raise AssertionError(f"left behind: {left}")
            await asyncio.sleep(next(looks))

    def residue(self) -> list[str]:
        try:
            status = self.status()
        except grpc.RpcError as error:
            return [f"the router does not answer: {error.code()}"]
        left = [f"router {key} {status['router'][key]}" for key in ("inflight", "queued") if status["router"][key]]
        for worker in status["workers"]:
            if "error" in worker:
                left.append(f"{worker['name']} {worker['error']}")
                continue
            for key in ("leases", "blocks_in_use", "quarantined_blocks"):
                if worker[key]:
                    left.append(f"{worker['name']} {key} {worker[key]}")
            if not worker["idle"]:
                left.append(f"{worker['name']} has sequences")
        return left

    def wait(self, condition: Callable[[], Any], within_s: float = 60.0) -> Any:
        """Returns the value of `condition` as soon as it is true. An RpcError or StopIteration counts as "not yet"."""
        deadline, looks = time.monotonic() + within_s, pauses()
        while True:
            try:
                value: Any = condition()
            except (grpc.RpcError, StopIteration):
                value = None
            if value:
                return value
            if time.monotonic() > deadline:
                up_log = self.logs.parent / f"{self.name}-up.log"
                raise AssertionError(f"the condition was not met in time; log of the supervisor:\n{up_log.read_text()[-2000:]}")
            time.sleep(next(looks))

    def log(self, process: str) -> str:
        return (self.logs / f"{process}.log").read_text(errors="replace")


def pauses() -> Iterator[float]:
    """Seconds between two looks at a cluster: each costs all of its processes something, and what takes long is worth fewer of them."""
    return (min(0.05 * 1.1**look, 0.25) for look in itertools.count())


def ends_of_logs(folder: Path) -> str:
    return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-4000:]}" for path in sorted(folder.rglob("*.log")))


@contextmanager
def cluster(
    model: Path,
    *flags: str,
    prefill: int = 1,
    decode: int = 1,
    launcher: str = "local",
    env: Mapping[str, str] | None = None,
    tls: Path | None = None,
    detach: bool = False,
) -> Iterator[Cluster]:
    """Runs `baton up` until it gets a SIGTERM at the end, after which no process of it may be alive.

    `tls`: the folder of a cluster's certificates (`authority.make`), which its processes use. `detach`: runs `baton up --detach`, and
    `baton down` at the end: two more processes, which take a fourth of a small cluster's processor time.
    """
    with tempfile.TemporaryDirectory(prefix="baton-test-") as folder:
        name = f"t{os.getpid()}"
        full = {**os.environ, "BATON_STATE_DIR": folder, **(env or {})}
        ports = ("--router.port", "0", "--router.admin-port", "0", "--router.http-port", "0", "--router.page-port", "0")
        files = {"cert": "server.pem", "key": "server.key", "ca": "ca.pem"} if tls else {}
        secured = [part for key, file in files.items() for part in (f"--security.tls-{key}", f"{tls}/{file}")]
        patient = ("--router.recover-wait-s", "60")  # a process needs 10 s to come back on a busy machine
        fixed = ("--cluster.name", name, *ports, *secured, "--engine.kv-memory-mib", "64", *patient)
        sizes = ("--prefill", str(prefill), "--decode", str(decode), "--launcher", launcher)
        command = [sys.executable, "-m", "baton", "up", "--model", str(model), *sizes, *fixed, *flags]
        started = _detached if detach else _attached
        with started(command, name, full, Path(folder)) as (state, end):
            at = state["endpoints"]
            running = Cluster(name, at["grpc"], at["http"], at["admin"], at["page"], state["pid"], full, Path(folder) / f"{name}-logs")
            pids: list[int] = []
            try:
                yield running
                pids = [worker["pid"] for worker in running.workers()]
            finally:
                print(ends_of_logs(Path(folder)))  # pytest shows it if the test fails
                failure = end()
        assert not failure, failure
        for pid in [*pids, running.pid]:
            assert not alive(pid), f"process {pid} outlived its cluster"


Started = Iterator[tuple[dict[str, Any], Callable[[], str]]]  # what is known about the cluster; what ends it and returns why it could not


@contextmanager
def _attached(command: list[str], name: str, env: dict[str, str], folder: Path) -> Started:
    log, state = folder / f"{name}-up.log", folder / f"{name}.json"
    with log.open("wb") as output:
        up = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, cwd=ROOT)
    with up:
        deadline = time.monotonic() + UP_WITHIN_S
        while not state.exists():
            if up.poll() is not None or time.monotonic() > deadline:
                up.kill()
                raise AssertionError(f"the cluster is not ready\n{ends_of_logs(folder)}")
            time.sleep(0.05)

        def end() -> str:
            up.terminate()
            try:
                code = up.wait(DOWN_WITHIN_S)
            except subprocess.TimeoutExpired:
                up.kill()
                return f"the cluster was still running after {DOWN_WITHIN_S:g} s"
            return "" if code == 0 else f"baton up ended with {code}: {log.read_text()}"

        yield json.loads(state.read_text()), end


@contextmanager
def _detached(command: list[str], name: str, env: dict[str, str], folder: Path) -> Started:
    up = subprocess.run([*command, "--detach"], env=env, capture_output=True, text=True, timeout=UP_WITHIN_S, cwd=ROOT)
    assert up.returncode == 0, f"{up.stderr}\n{ends_of_logs(folder)}"
    told = json.loads(up.stdout)

    def end() -> str:
        down = [sys.executable, "-m", "baton", "down", "--name", name]
        done = subprocess.run(down, env=env, capture_output=True, text=True, timeout=DOWN_WITHIN_S)
        if done.returncode:
            os.kill(told["pid"], signal.SIGKILL)
        return done.stderr if done.returncode else ""

    yield told, end


def toy(path: Path, **options: int) -> Path:
    make_toy(path, **options)
    return path


def toy_output(prompt: list[int], **params: Any) -> list[int]:
    """The tokens that the toy model must produce for `prompt`."""
    return naive(prompt, SamplingParams(**{"max_tokens": 16, "temperature": 0.0, "ignore_eos": True, **params}))


async def ask(client: AsyncClient, prompt: list[int], max_tokens: int, timeout_s: float = 60.0) -> Result:
    """Returns the result, once its tokens have been compared with the toy's."""
    params: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, "timeout_s": timeout_s}
    async with client.generate(token_ids=prompt, **params) as stream:
        async for _ in stream:
            pass
        assert list(stream.result.token_ids) == toy_output(prompt, max_tokens=max_tokens)
        return stream.result


KILLER = """
import os, sys, time, urllib.request

at, limit, number, pid = sys.argv[1:]

def reached():
    if at.startswith("/"):
        return float(os.path.exists(at))
    text = urllib.request.urlopen(f"http://{at}/metrics", timeout=10).read().decode()
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("baton_engine_computed_tokens_total"))

until = reached() + float(limit)
print("ready", flush=True)
while reached() < until:
    time.sleep(0.005)
os.kill(int(pid), int(number))
"""


@contextmanager
def killer(pid: int, at: str | Path, after: int = 1, number: int = signal.SIGKILL) -> Iterator[None]:
    """Sends a signal to a process once the worker whose metrics are at that address has computed so many more tokens, or once that file
    exists.

    The signal comes from a process in a session of its own: on a busy machine this one, which shares its turns with the load, may see the
    first tokens of a stream after the worker has computed the last.
    """
    command = [sys.executable, "-c", KILLER, str(at), str(after), str(number), str(pid)]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            yield
            assert process.wait(10) == 0, "the process got no signal"
        finally:
            process.kill()
