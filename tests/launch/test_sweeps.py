"""Launcher, child, reconciler and supervisor, cancelled at every await: no process, task or file is left behind."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from sweep import cancelled

from baton.cluster.config import Config
from baton.cluster.config_layers import load
from baton.cluster.records import Pools, RouterRecord
from baton.cluster.registry import Registry
from baton.launch import supervisor
from baton.launch.child import Child
from baton.launch.launcher import RestartRule, Template
from baton.launch.local_launcher import LocalLauncher
from baton.launch.reconcile import Phase, Reconciler
from baton.launch.state import ClusterState
from baton.launch.supervisor import Supervisor
from baton.simulate.memory_registry import MemoryRegistry

RULE = RestartRule(backoff_s=0.05, max_backoff_s=0.2, stable_s=5.0)
PROCESSES: Any = {"fine": 8, "coarse": 2.0}  # a trial waits for real processes
SLEEP = ("/bin/sleep", "600")


def template(role: str = "decode", grace_s: float = 5.0) -> Template:
    return Template(role, SLEEP, grace_s=grace_s)


def children() -> list[int]:
    """Live processes that this process started. (The kernel's own list of children may lack one while another one exits.)"""
    return [child.pid for child in psutil.Process().children() if _is_ours(child)]


def _is_ours(child: psutil.Process) -> bool:
    try:
        command = " ".join(child.cmdline())
        # While a leash becomes the program, its command line is empty.
        return "sleep" in command or "leash" in command or (not command and child.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def tasks() -> list["asyncio.Task[Any]"]:
    return [task for task in asyncio.all_tasks() if task.get_name().startswith(("supervise", "drain", "resize"))]


async def stopped(launcher: LocalLauncher) -> None:
    """Asserts that `stop` leaves nothing behind, whatever was cancelled."""
    async with asyncio.timeout(20):
        await launcher.stop()
    assert await launcher.processes() == [] and children() == [] and tasks() == []


async def test_add_can_be_cancelled_at_every_await() -> None:
    launchers: list[LocalLauncher] = []

    async def add() -> None:
        launchers.append(launcher := LocalLauncher(RULE))
        await launcher.start()
        async with launcher._changing:  # another change is under way
            waiting = asyncio.create_task(launcher.add(template(), 2))
            try:
                await asyncio.sleep(0)
            except BaseException:
                waiting.cancel()
                raise
        try:
            await waiting
        finally:
            waiting.cancel()

    async for _ in cancelled(add):
        for launcher in launchers:
            states = await launcher.processes()
            roster = launcher._roster._roles.get("decode")
            assert [state.name for state in states] == (roster.names if roster else []), "a name without a process blocks the role"
            await stopped(launcher)
        launchers.clear()


@pytest.mark.parametrize("count", [0, 1, 3])
async def test_resize_can_be_cancelled_at_every_await(count: int) -> None:
    """A drain that has begun continues, and the role can be resized again."""
    launcher = LocalLauncher(RULE)
    await launcher.start()
    await launcher.add(template(), 2)

    async for _ in cancelled(lambda: launcher.resize("decode", count), **PROCESSES):
        async with asyncio.timeout(20):
            await launcher.resize("decode", 2)
            while launcher._drains:
                await asyncio.sleep(0.01)
        states = await launcher.processes()
        assert [state.state for state in states] == ["running"] * 2 and len(children()) == 2
    await stopped(launcher)


async def test_stop_can_be_cancelled_at_every_await() -> None:
    launchers: list[LocalLauncher] = []

    async def make() -> None:
        launchers.append(launcher := LocalLauncher(RULE))
        await launcher.start()
        await launcher.add(template(), 1)

    await make()
    async for _ in cancelled(lambda: launchers[-1].stop(), **PROCESSES):
        await stopped(launchers[-1])
        await make()
    await stopped(launchers[-1])


async def test_stopping_a_child_can_be_cancelled_at_every_await() -> None:
    made: list[Child] = []

    def make() -> Child:
        child = Child("decode-0", template(), RULE, dict(os.environ), "localhost")
        child.start()
        made.append(child)
        return child

    make()
    async for _ in cancelled(lambda: made[-1].stop(), **PROCESSES):
        async with asyncio.timeout(20):
            state = await made[-1].stop()
        assert (state.state, state.pid, state.last_exit) == ("exited", None, -signal.SIGTERM) and children() == [] and tasks() == []
        make()
    await made[-1].stop()


class Slow(MemoryRegistry):
    """Each answer takes one turn of the event loop."""

    async def desired(self) -> Pools | None:
        await asyncio.sleep(0)
        return await super().desired()

    async def desire(self, pools: Pools) -> None:
        await asyncio.sleep(0)
        await super().desire(pools)


@pytest.mark.parametrize("wished", [None, Pools(1, 3), Pools(0, 0)])
async def test_reconciling_can_be_cancelled_at_every_await(wished: Pools | None) -> None:
    """After one step and `close`, no change is under way, and a pool that is not settled was asked for the wanted size."""
    launcher, registry = LocalLauncher(RULE), Slow()
    await launcher.start()
    for role in ("prefill", "decode"):
        await launcher.add(template(role), 1)
    for _ in range(2):
        if wished is not None:
            await registry.desire(wished)
        reconcilers: list[Reconciler] = []

        async def work(reconcilers: list[Reconciler] = reconcilers) -> None:
            reconcilers.append(reconciler := Reconciler(launcher, registry, Pools(1, 1), lambda line: None))
            try:
                await reconciler.step()
                await asyncio.sleep(0)
            finally:
                await reconciler.close()

        async for _ in cancelled(work):
            assert not [task for task in tasks() if task.get_name().startswith("resize")]
            for reconciler in reconcilers:
                assert not reconciler._changes
                for role, pool in reconciler._pools.items():
                    assert pool.phase is Phase.SETTLED or pool.asked == getattr(wished, role)
        registry._pools = None
    await stopped(launcher)


class Closed(MemoryRegistry):
    def __init__(self) -> None:
        super().__init__()
        self.closed = 0

    async def close(self) -> None:
        self.closed += 1


class Redis:
    url, pid = "redis://nowhere", os.getpid()

    def __init__(self) -> None:
        self.stopped = 0

    def stop(self) -> None:
        self.stopped += 1


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], tuple[Supervisor, list[Any]]]:
    """A cluster of two sleeping processes that is ready after a few turns."""
    monkeypatch.setenv("BATON_STATE_DIR", str(tmp_path))
    made: list[Any] = []

    async def find(registry: Registry) -> list[RouterRecord]:
        await asyncio.sleep(0)
        return [RouterRecord("router-0", 1, 1, "host", {"grpc": "127.0.0.1:1", "admin": "127.0.0.1:2"}, "toy")]

    async def ready(config: Config, router: RouterRecord, label: str) -> tuple[int, dict[str, str]]:
        await asyncio.sleep(0)
        return config.prefill.replicas + config.decode.replicas, {}

    async def serves(config: Config, routers: list[RouterRecord]) -> bool:
        await asyncio.sleep(0)
        return True

    async def running(config: Config, routers: list[RouterRecord]) -> str:
        await asyncio.sleep(0)
        return "1 request is"

    def remember(one: Any) -> Any:
        made.append(one)
        return one

    monkeypatch.setattr(supervisor, "find_routers", find)
    monkeypatch.setattr(supervisor, "workers_ready", ready)
    monkeypatch.setattr(supervisor, "serving", serves)
    monkeypatch.setattr(supervisor, "requests_running", running)
    monkeypatch.setattr(supervisor, "complete", lambda config, url, ports: config)
    monkeypatch.setattr(supervisor, "EmbeddedRedis", lambda host: remember(Redis()))
    monkeypatch.setattr(supervisor, "connect_registry", lambda config: remember(Closed()))
    monkeypatch.setattr(supervisor, "make_launcher", lambda config, log_dir, gpus: remember(LocalLauncher(RULE)))
    monkeypatch.setattr(supervisor, "templates", lambda config, ports, label: [(template("router"), 1), (template("decode", 300.0), 1)])

    def make() -> tuple[Supervisor, list[Any]]:
        made.clear()
        config = load([], flags={"cluster.name": "swept", "redis.url": "embedded"}).config
        return Supervisor(config, tmp_path, lambda line: None), made

    return make


async def test_a_cluster_can_be_cancelled_at_every_await(scripted: Callable[[], tuple[Supervisor, list[Any]]], tmp_path: Path) -> None:
    """During startup, operation and shutdown: the processes and the Redis server end, and no state file remains."""
    current: list[Any] = []

    async def run() -> None:
        up, made = scripted()
        current[:] = [up, made]
        loop = asyncio.get_running_loop()

        def serving(running: ClusterState) -> None:
            loop.call_later(0.02, up.stop.set)

        assert await up.run(serving) == 0

    async for _ in cancelled(run, fine=30, coarse=1.6):
        made = current[1] if current else []
        assert children() == [] and tasks() == []
        assert not list(tmp_path.glob("*swept*"))
        for one in made:
            if isinstance(one, LocalLauncher):
                assert await one.processes() == []
            else:
                assert (one.stopped if isinstance(one, Redis) else one.closed) == 1
