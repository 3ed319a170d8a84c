"""A Ray cluster over three hosts: where processes are placed, and what happens when a host dies or is cut off and comes back.

The first host is Ray's head, and runs `baton up` with its Redis.
"""

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from hosts import Host, hosts
from live_cluster import ask, toy
from redis_servers import until

from baton.cli.admin import read_status
from baton.client import AsyncClient
from baton.launch import state
from baton.v1 import worker_pb2, worker_pb2_grpc

pytestmark = pytest.mark.system
GCS_PORT = 6399
TRIES = 4
RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
    "RAY_prestart_worker_first_driver": "0",  # as in a Ray that `baton up` starts: nothing here uses those workers
    # A host counts as dead after six seconds. By default Ray needs fifteen.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "4",
}
UP = (
    "--launcher", "ray", "--cluster.host", "0.0.0.0", "--cluster.advertise", "eth0", "--security.open-admin", "true",
    "--engine.kv-memory-mib", "64", "--engine.threads", "1", "--router.bypass-tokens", "0", "--kv.transport", "tcp",
    "--prefill", "2", "--decode", "3", "--prefill.placement", "pack",
)  # fmt: skip


@dataclass
class RayCluster:
    hosts: list[Host]
    folder: Path
    sockets: str  # Ray's own folder. The path of a socket is short
    nodes: dict[int, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    doors: dict[str, str] = field(default_factory=dict)  # as `baton up` printed them: Ray chose the router's host

    def env(self, number: int) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("BATON_", "RAY_"))}
        own = self.folder / f"state-{number}"
        own.mkdir(exist_ok=True)
        return {**clean, **RAY, "BATON_STATE_DIR": str(own), "BATON_CLUSTER_KEY": "a key that all hosts share"}

    def join(self, number: int) -> None:
        """Starts Ray on a host, which has room for four workers. On a busy machine Ray may find its own start too slow."""
        log = self.folder / f"ray-{number}.log"
        for _ in range(TRIES):
            log.unlink(missing_ok=True)
            node = self._start(number, log)
            until(lambda node=node: "Ray runtime started" in log.read_text() or node.poll() is not None, 120)
            if node.poll() is None:
                return
        raise AssertionError(log.read_text())

    def _start(self, number: int, log: Path) -> "subprocess.Popen[bytes]":
        host, head = self.hosts[number], self.hosts[0]
        own = ("--node-ip-address", host.address, "--num-cpus", "4", "--object-store-memory", "100000000", "--block")
        where: tuple[str, ...] = ("--address", f"{head.address}:{GCS_PORT}")
        if host is head:
            where = ("--head", "--port", str(GCS_PORT), "--include-dashboard", "false", "--temp-dir", self.sockets)
        command = (str(Path(sys.executable).with_name("ray")), "start", *own, *where)
        self.nodes[number] = host.start(*command, env=self.env(number), log=log)
        return self.nodes[number]

    def leave(self) -> None:
        for node in reversed(self.nodes.values()):
            end(node)

    def baton(self, number: int, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Runs a command there, and waits for it."""
        command = ("ip", "netns", "exec", self.hosts[number].name, sys.executable, "-P", "-m", "baton", *arguments)
        return subprocess.run(command, env=self.env(number), capture_output=True, text=True, timeout=120)

    def status(self) -> dict[str, Any]:
        with grpc.insecure_channel(self.doors["admin"], [("grpc.enable_http_proxy", 0)]) as channel:
            return read_status(worker_pb2_grpc.AdminStub(channel).Status(worker_pb2.StatusRequest(), timeout=10))

    def workers(self) -> dict[str, dict[str, Any]]:
        """Those that answer."""
        return {worker["name"]: worker for worker in self.status()["workers"] if "error" not in worker}

    def host_of(self, worker: dict[str, Any]) -> int:
        return [host.address for host in self.hosts].index(worker["address"].rpartition(":")[0])

    def all_workers(self, prefill: int, decode: int, within_s: float = 120.0) -> list[dict[str, Any]]:
        """Waits until all of them answer the same question. One that is busy may be missing from an answer."""
        seen: list[dict[str, Any]] = []

        def there() -> bool:
            with suppress(grpc.RpcError):
                seen[:] = self.workers().values()
            return Counter(worker["pool"] for worker in seen) == Counter(prefill=prefill, decode=decode)

        until(there, within_s)
        return seen

    def until_busy(self, number: int) -> None:
        """Waits until a decode worker of that host has streams."""
        until(lambda: any(w["load"]["running"] for w in self.workers().values() if w["pool"] == "decode" and self.host_of(w) == number))

    def place_of(self, pool: str, workers: list[dict[str, Any]]) -> Counter[int]:
        return Counter(self.host_of(worker) for worker in workers if worker["pool"] == pool)


@contextmanager
def ray_cluster(model: Path, folder: Path) -> Iterator[tuple[RayCluster, "subprocess.Popen[bytes]"]]:
    with hosts(3) as made, ExitStack() as stack:
        cluster = RayCluster(made, folder, stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)))
        stack.callback(cluster.leave)
        for number in range(3):
            cluster.join(number)
        log = folder / "up.log"
        command = (
            sys.executable,
            "-P",
            "-m",
            "baton",
            "up",
            *UP,
            "--model",
            str(model),
            "--launcher.ray-address",
            f"{made[0].address}:{GCS_PORT}",
        )
        up = made[0].start(*command, env=cluster.env(0), log=log)
        stack.callback(end, up)
        until(lambda: "Ctrl-C stops it" in log.read_text() or up.poll() is not None, 240)
        assert up.poll() is None, log.read_text()
        words = [line.split() for line in log.read_text().splitlines()]
        cluster.doors = {word[0]: word[1] for word in words if word and word[0] in ("gRPC", "admin")}
        yield cluster, up


def end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)


def power_off(host: Host) -> None:
    """Ends every process of the host at once, so that none can say goodbye."""
    for pid in host.run("ip", "netns", "pids", host.name).split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


@pytest.mark.timeout(1800)
async def test_ray_over_three_hosts(tmp_path: Path) -> None:
    """Decode workers are spread, prefill workers packed. A host without the router and without Ray's head is cut off for 20 s, comes back,
    gets workers again, and loses its power. No stream ends early or has a wrong token; whoever was replaced serves nobody."""
    model, rng = toy(tmp_path / "toy", step_delay_ms=5), random.Random(3)
    prompts = [[rng.randrange(256) for _ in range(300)] for _ in range(12)]
    with ray_cluster(model, tmp_path) as (cluster, up):
        workers = cluster.all_workers(2, 3)
        assert len(cluster.place_of("prefill", workers)) == 1 and sorted(cluster.place_of("decode", workers).values()) == [1, 1, 1]
        victim = next(n for n in (2, 1) if not cluster.doors["admin"].startswith(f"{cluster.hosts[n].address}:"))
        async with AsyncClient(cluster.doors["gRPC"]) as client:
            first = await asyncio.gather(*(ask(client, prompt, 20, timeout_s=120) for prompt in prompts))
            assert {result.handoff["transport"] for result in first} == {"tcp"}

            cut = [worker for worker in workers if cluster.host_of(worker) == victim]
            streams = [asyncio.create_task(ask(client, prompt, 1000, timeout_s=120)) for prompt in prompts]
            await asyncio.to_thread(cluster.until_busy, victim)
            cluster.hosts[victim].unplug()
            back = asyncio.create_task(asyncio.sleep(20))
            assert sum(result.workers["retries"] > 0 for result in await asyncio.gather(*streams)) >= 1
            await back
            cluster.hosts[victim].plug_in()
            await asyncio.to_thread(until, lambda: not any(state.alive(worker["pid"]) for worker in cut), 120)
            workers = await asyncio.to_thread(cluster.all_workers, 2, 3)
            assert victim not in map(cluster.host_of, workers), (cut, workers)
            assert not {worker["incarnation"] for worker in workers} & {worker["incarnation"] for worker in cut}

            end(cluster.nodes[victim])
            await asyncio.to_thread(cluster.join, victim)
            for decode in (2, 5):
                asked = await asyncio.to_thread(cluster.baton, 2, "scale", "--decode", str(decode), "--address", cluster.doors["admin"])
                assert asked.returncode == 0, asked.stderr
                workers = await asyncio.to_thread(cluster.all_workers, 2, decode)
            assert victim in cluster.place_of("decode", workers)

            streams = [asyncio.create_task(ask(client, prompt, 1000, timeout_s=120)) for prompt in prompts]
            await asyncio.to_thread(cluster.until_busy, victim)
            power_off(cluster.hosts[victim])
            assert sum(result.workers["retries"] > 0 for result in await asyncio.gather(*streams)) >= 1
            workers = await asyncio.to_thread(cluster.all_workers, 2, 5)
            assert victim not in map(cluster.host_of, workers), workers

        for process in ("router-0", *(worker["name"] for worker in workers)):
            told = cluster.baton(0, "logs", process, "--address", cluster.doors["admin"])
            assert f" I {process} " in told.stdout and " ready on " in told.stdout, told
        down = cluster.baton(3 - victim, "down", "--address", cluster.doors["admin"])
        assert down.returncode == 0, down.stderr
        assert up.wait(90) == 0, (tmp_path / "up.log").read_text()
