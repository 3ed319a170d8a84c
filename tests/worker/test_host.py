"""A worker's host: whether its threads fit the cores, and that it closes every part although one of them fails."""

import asyncio
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toy_worker import toy_worker

from baton.cluster import lifecycle
from baton.cluster.config_layers import load
from baton.cluster.errors import BatonError
from baton.cluster.lifecycle import Stage, Stop, run
from baton.cluster.membership import Membership
from baton.cluster.metrics_http import MetricsServer
from baton.cluster.redis_registry import RedisRegistry
from baton.cluster.rpc import Server, Tasks
from baton.cluster.telemetry import Tracer
from baton.engine.core.loop import EngineLoop
from baton.worker.host import fits
from baton.worker.kv_peers import KvPeers
from baton.worker.kv_port import KvPort
from kvtransfer.tcp_transport import TcpTransport

# What a worker closes, in this order.
PARTS: dict[str, tuple[type, str]] = {
    "membership": (Membership, "leave"),
    "metrics": (MetricsServer, "close"),
    "server": (Server, "stop"),
    "port": (KvPort, "close"),
    "peers": (KvPeers, "close"),
    "transport": (TcpTransport, "close"),
    "engine": (EngineLoop, "close"),
    "tracer": (Tracer, "close"),
    "registry": (RedisRegistry, "close"),
}


@pytest.mark.parametrize(
    "prefill,decode,threads,cores,pinned,fit",
    [
        ("1", "1", None, 2, {}, False),  # the default: each worker uses all cores
        ("1", "1", "1", 2, {}, True),
        ("0", "1", None, 2, {}, True),
        ("0", "2", "1", 2, {}, True),
        ("0", "2", "2", 2, {}, False),
        ("2", "2", "4", 16, {}, True),
        ("2", "3", "4", 16, {}, False),
        ("1", "1", "1", 1, {"prefill.cores": "[0]", "decode.cores": "[1]"}, True),  # each sees only its own core
        ("4", "1", "1", 1, {"prefill.cores": "[0, 1, 2, 3]"}, True),
    ],
)
def test_fits_compares_the_threads_of_all_workers_with_the_cores(
    prefill: str, decode: str, threads: str | None, cores: int, pinned: dict[str, str], fit: bool
) -> None:
    flags = {"prefill.replicas": prefill, "decode.replicas": decode, **pinned}
    config = load(env={}, flags=flags | ({"engine.threads": threads} if threads else {})).config
    assert fits(config, "decode", cores) is fit


class Closing:
    """Wraps the closing of each part, records which began and which ended. The one named `bad` first really closes, then calls `act`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bad: str = "", act: Callable[[], Any] = lambda: None) -> None:
        self.begun: list[str] = []
        self.ended: list[str] = []
        self._bad, self._act = bad, act
        for name, (part, method) in PARTS.items():
            close = getattr(part, method)
            wrapped = self._awaited(name, close) if inspect.iscoroutinefunction(close) else self._called(name, close)
            monkeypatch.setattr(part, method, wrapped)

    def _awaited(self, name: str, close: Callable[..., Any]) -> Callable[..., Any]:
        async def wrapped(*args: Any) -> None:
            self.begun.append(name)
            await close(*args)
            if name == self._bad and (waiting := self._act()) is not None:
                await waiting
            self.ended.append(name)

        return wrapped

    def _called(self, name: str, close: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> None:
            self.begun.append(name)
            close(*args)
            if name == self._bad:
                self._act()
            self.ended.append(name)

        return wrapped


def lived(folder: Path, stop: Stop, closing: Closing, hurry: bool = False) -> int:
    """Runs a worker as its main function does, and asks it to stop when it is ready. Returns its exit status. `hurry`: asks a second time
    when the part that fails is being closed."""
    process = toy_worker(folder, stop)

    async def live() -> int:
        running = asyncio.create_task(run(process, stop))
        async with asyncio.timeout(30):
            while process.host.stage is not Stage.READY:
                await asyncio.sleep(0.005)
            stop.ask()
            while hurry and closing._bad not in closing.begun:
                await asyncio.sleep(0.005)
        if hurry:
            stop.ask()
        return await running

    return asyncio.run(live())


class Working:
    """A role with work that ends when it is told to."""

    def __init__(self) -> None:
        self.done = False
        self.asked = 0

    @property
    def idle(self) -> bool:
        self.asked += 1
        return self.done

    def on_step(self, outputs: list[Any]) -> None: ...


async def test_a_worker_that_is_told_to_stop_finishes_its_work_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router with retries hides a worker that leaves at once: what it had is done again elsewhere."""
    stop, closing, role = Stop(), Closing(monkeypatch), Working()
    process = toy_worker(tmp_path, stop)
    running = asyncio.create_task(run(process, stop))
    async with asyncio.timeout(30):
        while process.host.stage is not Stage.READY:
            await asyncio.sleep(0.005)
        monkeypatch.setattr(process.host, "roles", {"prefill": role})
        stop.ask()
        while role.asked < 3 and not running.done():
            await asyncio.sleep(0.005)
        assert not running.done() and not closing.begun, "its work has not ended"
        with pytest.raises(BatonError, match="draining"):
            process.host.mounts.admit("prefill")
        role.done = True
        assert await running == 0
    assert closing.ended == list(PARTS)


def fail() -> None:
    raise RuntimeError("does not close")


def hang() -> Any:
    return asyncio.sleep(20)


def test_a_worker_closes_its_parts_in_reverse_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closing = Closing(monkeypatch)
    assert lived(tmp_path, Stop(), closing) == 0
    assert closing.begun == closing.ended == list(PARTS)


@pytest.mark.parametrize("bad", PARTS)
def test_a_worker_closes_every_part_although_one_raises(bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop, closing = Stop(), Closing(monkeypatch, bad, fail)
    assert lived(tmp_path, stop, closing) == 1 and str(stop.failure) == "does not close"
    assert closing.ended == [name for name in PARTS if name != bad]


@pytest.mark.parametrize("bad", ["membership", "server", "port", "engine"])
def test_the_time_limit_abandons_a_part_that_hangs_and_the_others_are_closed(
    bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing the part after it takes a few turns of the event loop, and must not be cut off by the same limit."""
    monkeypatch.setattr(lifecycle, "CLOSE_S", 3.0)
    stop, closing = Stop(), Closing(monkeypatch, bad, hang)
    assert lived(tmp_path, stop, closing) == 1 and isinstance(stop.failure, TimeoutError) and "longer than 3 s" in str(stop.failure)
    assert closing.begun == list(PARTS) and closing.ended == [name for name in PARTS if name != bad]


def test_a_worker_leaves_the_registry_although_a_task_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "CLOSE_S", 3.0)
    close, calls = Tasks.close, iter(range(100))
    monkeypatch.setattr(Tasks, "close", lambda tasks: close(tasks) if next(calls) else hang())  # the host's are closed first
    closing = Closing(monkeypatch)
    assert lived(tmp_path, Stop(), closing) == 1
    assert closing.ended == list(PARTS)


@pytest.mark.parametrize("bad", ["membership", "server", "port", "engine"])
def test_a_second_stop_request_abandons_a_part_that_hangs_and_closes_the_others(
    bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closing = Closing(monkeypatch, bad, hang)
    assert lived(tmp_path, Stop(), closing, hurry=True) == 0
    assert closing.begun == list(PARTS) and bad not in closing.ended
