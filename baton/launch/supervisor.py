"""Runs one whole cluster for `baton up`.

1 Redis (embedded, or the one that is named) → 2 the launcher starts router and workers, each as one would start it by hand → 3 wait until
the router can serve → 4 follow the wanted pool sizes, revive Redis → 5 on SIGTERM or Ctrl-C, everything in reverse; a second signal cuts
the drains short.
"""

import asyncio
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.cluster.address import advertised, target
from baton.cluster.config import Config
from baton.cluster.connect import connect_registry
from baton.cluster.guard import token
from baton.cluster.records import Pools
from baton.cluster.registry import Registry
from baton.cluster.rpc import channel
from baton.launch import state
from baton.launch.launcher import Launcher, ProcessState
from baton.launch.plan import UpError, complete, make_launcher, templates
from baton.launch.reconcile import Reconciler
from baton.launch.redis_server import EmbeddedRedis, RedisServerError
from baton.v1 import worker_pb2, worker_pb2_grpc

READY_WITHIN_S = 120.0
WATCH_EVERY_S = 0.25
HURRY_EVERY_S = 0.1
SIGNALS = (signal.SIGTERM, signal.SIGINT)

Note = Callable[[str], None]
Loading = Callable[[str, int, int], None]
OnReady = Callable[[state.ClusterState], None]


class Progress:
    """How much of their weights the workers have loaded, from the lines that they write to their logs. Each call reads only what is new."""

    _LINE = re.compile(rb"loading weights (\d+)/(\d+)\s")

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._read: dict[str, int] = {}  # bytes of each log

    def of(self, name: str) -> tuple[int, int] | None:
        """(done, total) if there is news."""
        try:
            with (self._log_dir / f"{name}.log").open("rb") as log:
                log.seek(self._read.get(name, 0))
                data = log.read(1 << 20)
        except OSError:  # under Ray the log may be on another host
            return None
        whole = data[: data.rfind(b"\n") + 1]
        self._read[name] = self._read.get(name, 0) + len(whole)
        found = self._LINE.findall(whole)
        return (int(found[-1][0]), int(found[-1][1])) if found else None


@dataclass(slots=True)
class Supervisor:
    config: Config
    log_dir: Path
    note: Note  # one line for the person who is waiting
    loading: Loading = lambda name, done, total: None  # how much of its weights a worker has loaded
    redis: EmbeddedRedis | None = None  # ours, if the cluster has no other
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    asked_by: int = 0  # the signal that asked us to stop

    async def run(self, on_ready: OnReady) -> int:
        """Runs until SIGTERM or SIGINT. Returns the exit status: 0, or 128 + the signal's number if it came before the cluster was ready.
        Raises UpError, BatonError, ConfigError, RedisServerError, RegistryUnavailable."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._ask, number)
        # On the main thread, which lives as long as we do: the server dies with the thread that started it.
        self.redis = EmbeddedRedis() if self.config.redis.url == "embedded" else None
        launcher = make_launcher(self.config, self.log_dir)
        config = self.config
        served = False
        try:
            config = complete(config, self.redis.url if self.redis else config.redis.url)
            served = await self._serve(config, launcher, on_ready)
        finally:
            await self._end(config, launcher, served)
        return 0 if served else 128 + self.asked_by

    def _ask(self, number: int) -> None:
        if self.stop.is_set():
            self.hurry.set()
        self.asked_by = self.asked_by or number
        self.stop.set()

    async def _serve(self, config: Config, launcher: Launcher, on_ready: OnReady) -> bool:
        """Returns whether the cluster ever became ready."""
        registry = connect_registry(config)
        try:
            ready = asyncio.create_task(self._start(config, launcher, registry))
            if not await unless(self.stop, ready):
                return False
            running = ready_state(config, self.log_dir)
            state.write(running)
            on_ready(running)
            await self._watch(launcher, registry, ready.result())
            return True
        finally:
            await registry.close()

    async def _start(self, config: Config, launcher: Launcher, registry: Registry) -> Pools:
        await launcher.start()
        pools = Pools(config.prefill.replicas, config.decode.replicas)
        await registry.desire(pools)
        for template, count in templates(config):
            await launcher.add(template, count)
        await self._wait_until_ready(config, launcher)
        return pools

    async def _wait_until_ready(self, config: Config, launcher: Launcher) -> None:
        """Returns when the router serves and reaches every worker. It is not enough that a worker is in the registry: the router may not
        have read that yet, and the first request would get no handoff."""
        wanted = config.prefill.replicas + config.decode.replicas
        seen, logs = -1, Progress(self.log_dir)
        try:
            async with asyncio.timeout(READY_WITHIN_S) as limit:
                while True:
                    reached = await workers_ready(config)
                    if reached != seen:
                        self.note(f"{reached} of {wanted} workers ready")
                        seen = reached
                    if reached >= wanted and await serving(config):
                        return
                    await self._look(launcher, logs)
                    await asyncio.sleep(WATCH_EVERY_S / 2)
        except TimeoutError:
            if not limit.expired():
                raise
            raise UpError(f"not ready after {READY_WITHIN_S:g} s: {seen} of {wanted} workers; logs are in {self.log_dir}") from None

    async def _look(self, launcher: Launcher, logs: Progress) -> None:
        """Reports how much the processes have loaded. Raises UpError for one that does not start."""
        for process in await launcher.processes():
            self._complain(process)
            if found := logs.of(process.name):
                self.loading(process.name, *found)

    def _complain(self, process: ProcessState) -> None:
        """Raises UpError for a process that has died three times at its start: it will not do better the next time."""
        if process.restarts >= 2 and process.state == "backoff":
            log = tail(self.log_dir / f"{process.name}.log")
            raise UpError(f"{process.name} does not start (exit status {process.last_exit}):\n{log}")

    async def _watch(self, launcher: Launcher, registry: Registry, pools: Pools) -> None:
        reconciler = Reconciler(launcher, registry, pools, self.note)
        try:
            while not self.stop.is_set():
                if not await reconciler.step():
                    self._revive_redis()
                try:
                    await asyncio.wait_for(self.stop.wait(), WATCH_EVERY_S)
                except TimeoutError:
                    continue
        finally:
            await reconciler.close()

    async def _end(self, config: Config, launcher: Launcher, served: bool) -> None:
        try:
            if served:
                running = await requests_running(config)
                self.note(f"stopping: {running} running; Ctrl-C again ends them at once" if running else "stopping")
            else:
                self.note("stopping")
            stopping = asyncio.create_task(launcher.stop())
            if not await unless(self.hurry, stopping, cancel=False):
                self.note("ending at once")
                await launcher.hurry()
                await stopping
        except asyncio.CancelledError:  # no time for the grace period, but what was started must still end
            await _stop_now(launcher)
            raise
        finally:
            if self.redis is not None:
                await asyncio.to_thread(self.redis.stop)
            state.remove(config.cluster.name)

    def _revive_redis(self) -> None:
        """If our own server has died, starts it again, empty and at the same address: every process then writes its part again."""
        if self.redis is not None and not state.alive(self.redis.pid):
            self.note("redis died; restarting it")
            try:
                self.redis = EmbeddedRedis(self.redis.port, self.redis.password)
            except RedisServerError as error:
                self.note(str(error))


async def _stop_now(launcher: Launcher) -> None:
    stopping = asyncio.create_task(launcher.stop())
    while not stopping.done():
        await launcher.hurry()
        await asyncio.wait({stopping}, timeout=HURRY_EVERY_S)


async def unless(event: asyncio.Event, task: "asyncio.Task[Any]", cancel: bool = True) -> bool:
    """Wait for the task, or until the event is set; the task is then cancelled if `cancel`. True if it finished; raises what it raises."""
    waiter = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiter.cancel()
        if cancel and not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    if task.done() and not task.cancelled():
        task.result()
        return True
    return False


async def serving(config: Config) -> bool:
    async with channel(target(advertised(config), config.router.port), config.security) as open_channel:
        try:
            request = health_pb2.HealthCheckRequest()
            answer = await health_pb2_grpc.HealthStub(open_channel).Check(request, timeout=1.0)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def workers_ready(config: Config) -> int:
    """How many workers the router knows and reaches; 0 while it does not answer."""
    status = await _status(config, 2.0)
    return sum(worker.record.state == "ready" for worker in status.workers) if status else 0


async def requests_running(config: Config) -> str:
    """The number of requests as text for a person; empty if there are none or the router does not answer."""
    status = await _status(config, 1.0)
    count = status.router.inflight + status.router.queued if status else 0
    return f"{count} request{'s are' if count > 1 else ' is'}" if count else ""


async def _status(config: Config, timeout_s: float) -> worker_pb2.StatusResponse | None:
    async with channel(target(advertised(config), config.router.admin_port), config.security) as open_channel:
        try:
            stub = worker_pb2_grpc.AdminStub(open_channel)
            shown = (("authorization", f"Bearer {token(config)}"),)
            answer: worker_pb2.StatusResponse = await stub.Status(worker_pb2.StatusRequest(), timeout=timeout_s, metadata=shown)
        except grpc.RpcError:
            return None
        return answer


def ready_state(config: Config, log_dir: Path) -> state.ClusterState:
    host, router, security = advertised(config), config.router, config.security
    ports = {"grpc": router.port, "http": router.http_port, "admin": router.admin_port, "page": router.page_port}
    endpoints = {name: target(host, port) for name, port in ports.items()}
    files = {"cert": security.tls_cert, "key": security.tls_key, "ca": security.tls_ca}
    tls = {name: str(Path(path).resolve()) for name, path in files.items() if path}
    if tls and security.server_name:
        tls["server_name"] = security.server_name
    pid = os.getpid()
    born = state.born(pid)
    return state.ClusterState(config.cluster.name, pid, endpoints, config.redis.url, str(log_dir), born, tls, token(config) or "")


def tail(path: Path, lines: int = 15) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return f"(no log at {path})"
