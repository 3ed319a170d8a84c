"""A cluster over several hosts: every process listens on all addresses, tells others its own, and KV moves between hosts."""

import asyncio
import os
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
import pytest
from hosts import Host, hosts
from joined_hosts import ADMIN_PORT, OPEN, PORT, SMALL, Commands
from live_cluster import ask, toy
from redis_servers import PASSWORD, until

from baton.cli.admin import read_status
from baton.client import AsyncClient
from baton.launch.redis_server import find_binary
from baton.v1 import worker_pb2, worker_pb2_grpc
from router.split import LEAST, WORTH

pytestmark = pytest.mark.system
REDIS_PORT = 6379
NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass
class Spread:
    """A router on the first host, a prefill worker on the second, a decode worker on each other one."""

    hosts: list[Host]

    @property
    def door(self) -> str:
        return f"{self.hosts[0].address}:{PORT}"

    def workers(self) -> dict[str, dict[str, Any]]:
        """By the address of their host; only those that answer."""
        found = status(f"{self.hosts[0].address}:{ADMIN_PORT}")
        return {worker["address"].rpartition(":")[0]: worker for worker in found if "error" not in worker}

    def wait(self, count: int) -> None:
        def there() -> bool:
            try:
                return len(self.workers()) == count
            except grpc.RpcError:
                return False

        until(there, 120.0)  # all of them start at once


@contextmanager
def spread(model: Path, folder: Path, decode: int, more: Mapping[str, str] = NOTHING) -> Iterator[Spread]:
    """`more`: of the environment of all."""
    with hosts(2 + decode) as made:
        head, started = made[0], []
        clean = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")}
        env = {
            **clean,
            "BATON_CLUSTER_HOST": "0.0.0.0",
            "BATON_SECURITY_OPEN_ADMIN": "true",
            "BATON_CLUSTER_KEY": "a key that all hosts share",
            "BATON_REDIS_URL": f"redis://:{PASSWORD}@{head.address}:{REDIS_PORT}/0",
            "BATON_MODEL_PATH": str(model),
            "BATON_ENGINE_KV_MEMORY_MIB": "64",
            "BATON_ROUTER_BYPASS_TOKENS": "0",
            "BATON_KV_TRANSPORT": "tcp",  # namespaces share the memory of the machine, and NIXL would find that
            **more,
        }
        redis = (str(find_binary()), "--port", str(REDIS_PORT), "--bind", "0.0.0.0", "--requirepass", PASSWORD, "--save", "")
        try:
            started.append(head.start(*redis, env=clean, log=folder / "redis.log"))
            for host, module in zip(made, ("router", "prefill_worker", *["decode_worker"] * decode), strict=True):
                command = (sys.executable, "-P", "-m", module)
                started.append(host.start(*command, env=env, log=folder / f"{module}-{host.name}.log"))
            cluster = Spread(made)
            cluster.wait(1 + decode)
            yield cluster
        finally:
            for process in reversed(started):
                process.kill()
                process.wait(20)


async def test_a_cluster_over_several_hosts_survives_a_pulled_cable(tmp_path: Path) -> None:
    """Each worker is known by the address of its own host, though all listen on 0.0.0.0. KV moves over TCP between them. Streams of a host
    that is cut off continue on another one, and it serves again when it is back."""
    model, rng = toy(tmp_path / "toy", step_delay_ms=5), random.Random(1)
    with spread(model, tmp_path, decode=2) as cluster:
        assert set(cluster.workers()) == {host.address for host in cluster.hosts[1:]}
        async with AsyncClient(cluster.door) as client:
            prompts = [[rng.randrange(256) for _ in range(300)] for _ in range(8)]
            first = await asyncio.gather(*(ask(client, prompt, 20) for prompt in prompts))
            assert all(result.handoff["transport"] == "tcp" and not result.handoff["failure"] for result in first)
            assert len({result.workers["decode"] for result in first}) == 2

            streams = [asyncio.create_task(ask(client, prompt, 400)) for prompt in prompts]
            await asyncio.to_thread(until, lambda: all(cluster.workers()[host.address]["load"]["running"] for host in cluster.hosts[2:]))
            cluster.hosts[3].unplug()
            moved = await asyncio.gather(*streams)
            assert sum(result.workers["retries"] > 0 for result in moved) >= 1
            assert {result.workers["decode"] for result in moved} == {cluster.workers()[cluster.hosts[2].address]["name"]}

            cluster.hosts[3].plug_in()
            await asyncio.to_thread(cluster.wait, 3)

            async def served_by_both() -> bool:
                results = await asyncio.gather(*(ask(client, prompt, 20) for prompt in prompts))
                return len({result.workers["decode"] for result in results}) == 2

            async with asyncio.timeout(60):
                while not await served_by_both():
                    await asyncio.sleep(0.2)


def test_tcp_between_hosts_raises_the_alarm_where_rdma_was_asked_for(tmp_path: Path) -> None:
    """NIXL is tried, and refuses what UCX could only do over its TCP."""
    apart = {"BATON_KV_TRANSPORT": "auto", "UCX_TLS": "^posix,sysv,cma", "UCX_PROTO_EMULATION_ENABLE": "y"}

    async def ask_all(door: str) -> None:
        async with AsyncClient(door) as client:
            await asyncio.gather(*(ask(client, [number * 7 % 250] * (WORTH + 32), 2) for number in range(LEAST)))

    for rdma in ("true", "false"):
        with spread(toy(tmp_path / rdma), tmp_path, decode=1, more={**apart, "BATON_KV_RDMA": rdma}) as cluster:
            asyncio.run(ask_all(cluster.door))
            told = whole_status(f"{cluster.hosts[0].address}:{ADMIN_PORT}")
            assert told["router"]["alarm"].startswith("tcp carries the KV, and RDMA was asked for (kv.rdma" if rdma == "true" else "")
            assert bool(told["router"]["alarm"]) == (rdma == "true"), "negative control"
            assert [worker["transport"] for worker in told["workers"] if worker["pool"] == "decode"] == ["auto, tcp"]
            logs = [path.read_text() for path in tmp_path.glob("decode_worker-*.log")]
            assert any("only over TCP" in log for log in logs), logs


# --- `baton up --join` ---------------------------------------------------------------------------------------------------------------


def test_workers_of_a_second_host_join_a_running_cluster(tmp_path: Path) -> None:
    """The second host is told an address and the key; everything else it learns. The first host's Redis listens where both reach it."""
    model = toy(tmp_path / "toy", step_delay_ms=2)
    with hosts(2) as made:
        commands = Commands(made, tmp_path)
        head, head_log = commands.start(0, "up", "--model", str(model), *SMALL, *OPEN)
        started = [head]
        try:
            until(lambda: "Ctrl-C stops it" in head_log.read_text())
            stranger, log = commands.start(1, "up", "--join", commands.admin, key="another key that is no secret")
            assert stranger.wait(60) == 1 and "no proof of the cluster's key" in log.read_text()

            joined, joined_log = commands.start(1, "up", "--join", commands.admin, "--prefill", "0", "--decode", "2")
            started.append(joined)
            until(lambda: "joined" in joined_log.read_text() or joined.poll() is not None)
            assert joined.poll() is None, joined_log.read_text()
            cluster = Spread(made)
            names = [worker["name"] for worker in status(commands.admin)]
            assert len(names) == len(set(names)) == 4 and len([name for name in names if name.startswith("decode-")]) == 3

            async def asked() -> set[str]:
                async with AsyncClient(cluster.door) as client:
                    prompts = [[number] * 200 for number in range(12)]
                    results = await asyncio.gather(*(ask(client, prompt, 40) for prompt in prompts))
                return {result.workers["decode"] for result in results}

            assert asyncio.run(asked()) >= set(names) - {"prefill-0", "decode-0"}, "the second host decodes, too"
            joined.terminate()
            assert joined.wait(60) == 0
            until(lambda: len(status(commands.admin)) == 2)
            assert asyncio.run(asked()) == {"decode-0"}
        finally:
            for process in reversed(started):
                if process.poll() is None:
                    process.terminate()
                    process.wait(60)
        assert head.returncode == 0, head_log.read_text()


def whole_status(address: str) -> dict[str, Any]:
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        answer = worker_pb2_grpc.AdminStub(channel).Status(worker_pb2.StatusRequest(), timeout=10)
    return read_status(answer)


def status(address: str) -> list[dict[str, Any]]:
    return list(whole_status(address)["workers"])
