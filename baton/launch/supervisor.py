"""Runs one whole cluster for `baton up`.

1 Redis (embedded, or the one that is named) → 2 the launcher starts router and workers, each as one would start it by hand → 3 wait until
the router can serve → 4 follow the wanted pool sizes, revive Redis → 5 on SIGTERM or Ctrl-C, everything in reverse; a second signal cuts
the drains short.
"""

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.clock import loop_time
from baton.cluster.config import Config
from baton.cluster.connect import connect_registry
from baton.cluster.guard import metadata, token
from baton.cluster.lifecycle import CANNOT
from baton.cluster.records import Pools, RouterRecord, StartRecord
from baton.cluster.registry import Registry, RegistryUnavailable
from baton.cluster.rpc import channel
from baton.launch import state
from baton.launch.gpus import settle_afar
from baton.launch.launcher import Launcher, ProcessState
from baton.launch.patience import Patience
from baton.launch.placing import Gpus
from baton.launch.plan import UpError, complete, make_launcher, redis_host, templates
from baton.launch.ports import Ports
from baton.launch.reconcile import Reconciler
from baton.launch.redis_server import EmbeddedRedis, RedisServerError
from baton.v1 import worker_pb2, worker_pb2_grpc

REGISTRY_WITHIN_S = 10.0
WATCH_EVERY_S = 0.25
HURRY_EVERY_S = 0.1
COUNT_S = 4.0  # how long a person who stops a cluster waits at most for the number of its requests
SIGNALS = (signal.SIGTERM, signal.SIGINT)
ERROR_LINE = re.compile(r"\d\d:\d\d:\d\d [EC] \S+ \S+: (.+)")  # as `baton.cluster.logs` writes text

Note = Callable[[str], None]
Starts = Callable[[StartRecord], None]
OnReady = Callable[[state.ClusterState], None]


@dataclass(slots=True)
class Supervisor:
    config: Config
    log_dir: Path
    note: Note  # one line for the person who is waiting
    starts: Starts = lambda record: None  # what a worker that starts is doing
    redis: EmbeddedRedis | None = None  # ours, if the cluster has no other
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    asked_by: int = 0  # the signal that asked us to stop
    gpus: Gpus | None = None  # of this host, for its processes
    label: str = ""  # of a host that joins a cluster: only workers run here, and their names contain it
    deaths: dict[str, int] = field(default_factory=dict)  # of processes that start, as far as they were told
    kept_out: dict[str, str] = field(default_factory=dict)  # workers that have not proved themselves, and why
    routers: list[RouterRecord] = field(default_factory=list)  # once all of them serve
    ports: Ports = field(init=False)  # of the routers

    def __post_init__(self) -> None:
        self.ports = Ports(self.config.cluster.host)

    async def run(self, on_ready: OnReady) -> int:
        """Runs until SIGTERM or SIGINT. Returns the exit status: 0, or 128 + the signal's number if it came before the cluster was ready.
        Raises UpError, BatonError, ConfigError, RedisServerError, RegistryUnavailable."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._ask, number)
        # On the main thread, which lives as long as we do: the server dies with the thread that started it.
        self.redis = EmbeddedRedis(host=redis_host(self.config)) if self.config.redis.url == "embedded" else None
        launcher = make_launcher(self.config, self.log_dir, self.gpus)
        config = self.config
        served = False
        try:
            if not self.label:
                config = complete(config, self.redis.url if self.redis else config.redis.url, self.ports)
            served = await self._serve(config, launcher, on_ready)
        finally:
            with self.ports:
                await self._end(config, launcher, served)
        return 0 if served else 128 + self.asked_by

    @property
    def known_as(self) -> str:
        """The name by which commands on this host find it."""
        return joined_name(self.config) if self.label else self.config.cluster.name

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
            running = replace(ready_state(config, self.log_dir, self.routers), name=self.known_as)
            state.write(running)
            on_ready(running)
            if self.label:
                await self.stop.wait()
            else:
                await self._watch(launcher, registry, ready.result())
            return True
        finally:
            await registry.close()

    async def _start(self, config: Config, launcher: Launcher, registry: Registry) -> Pools:
        await launcher.start()
        if config.launcher.ray_address is not None:
            config = settle_afar(config, await launcher.gpus())
        pools = Pools(config.prefill.replicas, config.decode.replicas)
        if not self.label:
            await _store(registry, pools)
        for template, count in templates(config, self.ports, self.label):
            await launcher.add(template, count)
        await self._wait_until_ready(config, launcher, registry)
        return pools

    async def _wait_until_ready(self, config: Config, launcher: Launcher, registry: Registry) -> None:
        """Returns when every router serves and reaches every worker. It is not enough that a worker is in the registry: a router may not
        have read that yet, and its first request would get no handoff."""
        wanted, seen = config.prefill.replicas + config.decode.replicas, -1
        patience = Patience(config.launcher.start_s, loop_time())
        while True:
            self.routers = await find_routers(registry)
            looks = await asyncio.gather(*(workers_ready(config, router, self.label) for router in self.routers))
            reached = min((count for count, _ in looks), default=0)
            self._tell_kept_out({name: why for _, kept_out in looks for name, why in kept_out.items()})
            if reached != seen:
                self.note(f"{reached} of {wanted} workers ready")
                seen = reached
            if reached >= wanted and await serving(config, self.routers):
                return
            starts = await self._look(launcher, registry)
            if patience.over(loop_time(), len(self.routers) + reached, starts):
                why = [f"{name} is kept out: {why}" for name, why in self.kept_out.items()]
                doing = "; ".join([f"{seen} of {wanted} workers ready", *(f"{record.name}: {record}" for record in starts), *why])
                raise UpError(f"no progress for {config.launcher.start_s:g} s (launcher.start_s): {doing}; logs are in {self.log_dir}")
            await asyncio.sleep(WATCH_EVERY_S / 2)

    def _tell_kept_out(self, found: dict[str, str]) -> None:
        for name, why in found.items():
            if self.kept_out.get(name) != why:
                self.note(f"{name} is kept out: {why}")
        self.kept_out = found

    async def _look(self, launcher: Launcher, registry: Registry) -> list[StartRecord]:
        """Shows what our processes are doing, and returns it. Raises UpError for one that does not start."""
        ours = await launcher.processes()
        for process in ours:
            self._complain(process)
        names = {process.name for process in ours}
        starts = [record for record in await find_starts(registry) if record.name in names]
        for record in starts:
            self.starts(record)
        return starts

    def _complain(self, process: ProcessState) -> None:
        """Notes why a process has died. Raises UpError for one that has died three times at its start, or that says it cannot start: it
        will not do better the next time."""
        deaths = process.restarts + (process.state == "backoff")
        if process.last_exit is None or deaths <= self.deaths.get(process.name, 0):
            return
        self.deaths[process.name] = deaths
        log = self.log_dir / f"{process.name}.log"
        lines, why = tail(log), reason(log)
        if process.last_exit == CANNOT:
            raise UpError(f"{process.name} does not start (exit status {CANNOT}): {why}\nits log: {log}")
        if deaths >= 3:
            raise UpError(f"{process.name} does not start (exit status {process.last_exit}): {why}\n{lines}\nits log: {log}")
        self.note(f"{process.name} ended with status {process.last_exit}: {why}; it is started again; its log: {log}")

    async def _watch(self, launcher: Launcher, registry: Registry, pools: Pools) -> None:
        reconciler = Reconciler(launcher, registry, pools, self.note)
        try:
            while not self.stop.is_set():
                if not await reconciler.step():
                    self._revive_redis()
                if reconciler.stop:
                    self.stop.set()
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(WATCH_EVERY_S):
                        await self.stop.wait()
        finally:
            await reconciler.close()

    async def _end(self, config: Config, launcher: Launcher, served: bool) -> None:
        try:
            if served:
                running = await requests_running(config, self.routers)
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
            try:
                if self.redis is not None:
                    await _to_the_end(asyncio.to_thread(self.redis.stop))
            finally:
                state.remove(self.known_as)

    def _revive_redis(self) -> None:
        """If our own server has died, starts it again, empty and at the same address: every process then writes its part again."""
        if self.redis is not None and not state.alive(self.redis.pid):
            self.note("redis died; restarting it")
            try:
                self.redis = EmbeddedRedis(self.redis.port, self.redis.password, host=self.redis.host)
            except RedisServerError as error:
                self.note(str(error))


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Bounded work that a cancellation must not prevent: on a busy machine its thread may not have begun."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


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


async def _store(registry: Registry, pools: Pools) -> None:
    """Tries again while a server that has just started is slow, as on a busy machine. Raises RegistryUnavailable if it stays so."""
    deadline = asyncio.get_running_loop().time() + REGISTRY_WITHIN_S
    while True:
        try:
            return await registry.desire(pools)
        except RegistryUnavailable:
            if asyncio.get_running_loop().time() > deadline:
                raise
            await asyncio.sleep(WATCH_EVERY_S)


def joined_name(config: Config) -> str:
    return f"{config.cluster.name}-joined"


async def find_routers(registry: Registry) -> list[RouterRecord]:
    try:
        return await registry.routers()
    except RegistryUnavailable:
        return []


async def find_starts(registry: Registry) -> list[StartRecord]:
    try:
        return await registry.starts()
    except RegistryUnavailable:
        return []


async def serving(config: Config, routers: list[RouterRecord]) -> bool:
    """Whether as many routers serve as the configuration wants."""
    return sum(await asyncio.gather(*(_serves(config, router) for router in routers))) >= config.router.replicas


async def _serves(config: Config, router: RouterRecord) -> bool:
    async with channel(router.endpoints["grpc"], config.security) as open_channel:
        try:
            request = health_pb2.HealthCheckRequest()
            answer = await health_pb2_grpc.HealthStub(open_channel).Check(request, timeout=1.0)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def workers_ready(config: Config, router: RouterRecord, label: str = "") -> tuple[int, dict[str, str]]:
    """How many workers, or of a host that joins, of its own, the router knows and reaches; 0 while it does not answer. And those that have
    tried to prove themselves and could not, with the reasons."""
    status = await _status(config, router, 2.0)
    own = [worker for worker in status.workers if not label or f"-{label}-" in worker.record.name] if status else []
    kept_out = {worker.record.name: worker.error for worker in own if worker.record.state == "unproven" and worker.record.unproved}
    return sum(worker.record.state == "ready" for worker in own), kept_out


async def requests_running(config: Config, routers: list[RouterRecord]) -> str:
    """The number of requests as text for a person; empty if there are none or no router answers."""
    statuses = await asyncio.gather(*(_status(config, router, COUNT_S) for router in routers))
    count = sum(status.router.inflight + status.router.queued for status in statuses if status)
    return f"{count} request{'s are' if count > 1 else ' is'}" if count else ""


async def _status(config: Config, router: RouterRecord, timeout_s: float) -> worker_pb2.StatusResponse | None:
    async with channel(router.endpoints["admin"], config.security) as open_channel:
        try:
            stub = worker_pb2_grpc.AdminStub(open_channel)
            answer: worker_pb2.StatusResponse = await stub.Status(worker_pb2.StatusRequest(), timeout=timeout_s, metadata=metadata(config))
        except grpc.RpcError:
            return None
        return answer


def ready_state(config: Config, log_dir: Path, routers: list[RouterRecord]) -> state.ClusterState:
    endpoints, security = [router.endpoints for router in routers], config.security
    files = {"cert": security.tls_cert, "key": security.tls_key, "ca": security.tls_ca}
    tls = {name: str(Path(path).resolve()) for name, path in files.items() if path}
    if tls and security.server_name:
        tls["server_name"] = security.server_name
    pid = os.getpid()
    return state.ClusterState(
        name=config.cluster.name,
        pid=pid,
        endpoints=endpoints[0],
        redis_url=config.redis.url,
        log_dir=str(log_dir),
        born=state.born(pid),
        tls=tls,
        token=token(config) or "",
        routers=endpoints,
    )


def reason(path: Path) -> str:
    """The last error in a log, else its last line: why the process ended."""
    lines = tail(path, 200).splitlines()
    errors = [found[1] for line in lines if (found := ERROR_LINE.match(line))]
    return (errors or [line.strip() for line in lines if line.strip()] or ["it wrote nothing"])[-1]


def tail(path: Path, lines: int = 15) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return f"(no log at {path})"
