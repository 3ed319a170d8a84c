"""`baton up` calls a cluster ready only when the router itself reaches every worker."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from baton.cluster.config_layers import load
from baton.cluster.lifecycle import CANNOT
from baton.cluster.records import Pools, RouterRecord, StartRecord
from baton.cluster.registry import RegistryUnavailable
from baton.launch import plan, supervisor
from baton.launch.launcher import ProcessState, RestartRule, Template
from baton.launch.local_launcher import LocalLauncher
from baton.launch.ports import Ports
from baton.launch.supervisor import Supervisor
from baton.simulate.memory_registry import MemoryRegistry
from baton.v1 import worker_pb2, worker_pb2_grpc

POLLS = 4


class Router(worker_pb2_grpc.AdminServicer):
    """A serving router that knows one worker for each of `states`."""

    def __init__(self) -> None:
        self.states: list[str] = []
        self.asked = asyncio.Queue[int]()

    async def Status(self, request: worker_pb2.StatusRequest, context: Any) -> worker_pb2.StatusResponse:
        self.asked.put_nowait(len(self.states))
        return worker_pb2.StatusResponse(workers=[{"record": {"state": state}} for state in self.states])


@pytest.fixture
async def router() -> AsyncIterator[tuple[Router, list[int]]]:
    server, router, serving = grpc.aio.server(), Router(), health.aio.HealthServicer()
    await serving.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(serving, server)
    worker_pb2_grpc.add_AdminServicer_to_server(router, server)
    ports = [server.add_insecure_port("127.0.0.1:0") for _ in range(2)]
    await server.start()
    yield router, ports
    await server.stop(None)


async def test_a_cluster_is_ready_when_the_router_reaches_every_worker(router: tuple[Router, list[int]], tmp_path: Path) -> None:
    """Otherwise a router that knows only one of two workers would serve the first request without a handoff."""
    scripted, (port, admin_port) = router
    config, registry = load([]).config, MemoryRegistry()
    endpoints = {"grpc": f"127.0.0.1:{port}", "admin": f"127.0.0.1:{admin_port}"}
    await registry.join(RouterRecord("router-0", 1, 1, "host", endpoints, "toy"))
    notes: list[str] = []
    launcher = LocalLauncher(RestartRule(0.1, 1.0), tmp_path)
    waiting = asyncio.create_task(Supervisor(config, tmp_path, notes.append)._wait_until_ready(config, launcher, registry))
    for states in ([], ["ready"], ["ready", "unreachable"], ["ready", "starting"]):
        scripted.states = states
        while not scripted.asked.empty():
            scripted.asked.get_nowait()
        for _ in range(POLLS):
            await asyncio.wait_for(scripted.asked.get(), 10)
        assert not waiting.done(), states
    scripted.states = ["ready", "ready"]
    await asyncio.wait_for(waiting, 10)
    assert notes == ["0 of 2 workers ready", "1 of 2 workers ready", "2 of 2 workers ready"]


async def test_a_start_lasts_as_long_as_a_worker_makes_progress(
    router: tuple[Router, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker is a program that only sleeps; what it does is written into the registry here."""
    _, (port, admin_port) = router
    config = load([], flags={"launcher.start-s": "100", "prefill.replicas": "0"}).config
    registry, shown, now = MemoryRegistry(), list[StartRecord](), [0.0]
    monkeypatch.setattr(supervisor, "loop_time", lambda: now[0])
    await registry.join(RouterRecord("router-0", 1, 1, "host", {"grpc": f"127.0.0.1:{port}", "admin": f"127.0.0.1:{admin_port}"}, "toy"))
    launcher = LocalLauncher(RestartRule(0.1, 1.0), tmp_path)
    await launcher.start()
    await launcher.add(Template("decode", (sys.executable, "-c", "import time; time.sleep(600)")), 1)
    starting = Supervisor(config, tmp_path, lambda line: None, shown.append)
    waiting = asyncio.create_task(starting._wait_until_ready(config, launcher, registry))
    try:
        async with asyncio.timeout(60):
            for done in range(1, 5):
                await registry.join(StartRecord("decode-0", "decode", 7, 1, "host", "compiling kernels", done, 24))
                await registry.join(StartRecord("decode-9", "decode", 7, 1, "host", "of another cluster's host", done, 24))
                while not shown or shown[-1].done < done:
                    await asyncio.sleep(0.01)
                now[0] += 99
        assert not waiting.done() and {record.name for record in shown} == {"decode-0"}
        now[0] += 100
        said = r"no progress for 100 s \(launcher.start_s\): 0 of 1 workers ready; decode-0: compiling kernels: 4 of 24"
        with pytest.raises(plan.UpError, match=said):
            async with asyncio.timeout(30):
                await waiting
    finally:
        await launcher.stop()


class Offered(Ports):
    """For 0, gives ports in this order."""

    def __init__(self, *ports: int) -> None:
        self._ports = iter(ports)

    def hold(self, port: int = 0) -> int:
        return port or next(self._ports)


def test_a_port_of_the_configuration_is_not_chosen_for_another_door() -> None:
    config = load([], flags={"router.port": "0", "router.http-port": "0", "router.page-port": "0", "decode.port": "5001"}).config
    router = plan.complete(config, "redis://x", Offered(5000, 5001, 5002, 5003)).router
    assert (router.port, router.admin_port, router.http_port, router.page_port) == (5000, 8471, 5002, 5003)


def test_every_router_gets_ports_of_its_own() -> None:
    config = load([], flags={"router.replicas": "3", "telemetry.metrics-port": "9100"}).config
    [(template, count), *_] = plan.templates(config, Offered(*range(6000, 6004), 8470, *range(6004, 6012)))
    assert count == 3 and template.leads
    own = [template.env_of(f"router-{number}") for number in range(4)]
    assert "BATON_ROUTER_PORT" not in own[0] and "BATON_ROUTER_PORT" not in own[3]
    names = [
        f"BATON_{name}" for name in ("ROUTER_PORT", "ROUTER_ADMIN_PORT", "ROUTER_HTTP_PORT", "ROUTER_PAGE_PORT", "TELEMETRY_METRICS_PORT")
    ]
    ports = [env[name] for env in own[1:3] for name in names]
    assert len(set(ports)) == 10 and "8470" not in ports, "no two listen on one port, nor on the first router's"
    assert "BATON_TELEMETRY_HEALTH_PORT" not in own[1], "what is off for one is off for all"
    assert own[1]["BATON_WORKER_NAME"] == "router-1"


async def test_a_registry_that_is_slow_at_first_does_not_end_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    registry, pools = MemoryRegistry(), Pools(1, 2)
    registry.available = False
    storing = asyncio.create_task(supervisor._store(registry, pools))
    await asyncio.sleep(0.05)
    registry.available = True
    await asyncio.wait_for(storing, 10)
    assert await registry.desired() == pools
    registry.available = False
    monkeypatch.setattr(supervisor, "REGISTRY_WITHIN_S", 0.1)
    with pytest.raises(RegistryUnavailable):
        await asyncio.wait_for(supervisor._store(registry, pools), 10)


def ended(status: int, restarts: int) -> ProcessState:
    return ProcessState("decode-0", "decode", None, "backoff", restarts, status, "localhost")


def test_a_worker_that_cannot_start_says_its_reason_and_names_its_log(tmp_path: Path) -> None:
    log = tmp_path / "decode-0.log"
    said = "12:00:01 E decode-0 baton.cluster.lifecycle: engine.device: this torch cannot use a cuda device: no NVIDIA driver\n"
    log.write_text(f"12:00:00 I decode-0 baton.worker: starting\n{said}12:00:02 I decode-0 baton.worker: closed\n")
    notes: list[str] = []
    starting = Supervisor(load([]).config, tmp_path, notes.append)
    with pytest.raises(plan.UpError) as at_once:  # it will not do better the next time
        starting._complain(ended(CANNOT, 0))
    why = "engine.device: this torch cannot use a cuda device: no NVIDIA driver"
    assert str(at_once.value) == f"decode-0 does not start (exit status 2): {why}\nits log: {log}" and not notes


def test_a_worker_that_dies_at_its_start_says_why_each_time(tmp_path: Path) -> None:
    log, notes = tmp_path / "decode-0.log", list[str]()
    starting = Supervisor(load([]).config, tmp_path, notes.append)
    log.write_text("Traceback (most recent call last):\n  File\nImportError: libcudart.so.13\n")
    for restarts in (0, 0, 1):  # it is looked at more often than it dies
        starting._complain(ended(1, restarts))
    assert notes == [f"decode-0 ended with status 1: ImportError: libcudart.so.13; it is started again; its log: {log}"] * 2
    with pytest.raises(plan.UpError, match=rf"(?s)does not start \(exit status 1\): ImportError: lib.*Traceback.*its log: {log}"):
        starting._complain(ended(1, 2))
    log.write_text("")
    assert supervisor.reason(log) == "it wrote nothing"
