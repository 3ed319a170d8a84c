"""`baton up`: the whole cluster from one configuration, in the foreground.

1 the model (the small one is made when none is named) → 2 Redis (embedded, or the one that is named) → 3 the launcher starts router and
workers, each the process that one would start by hand → 4 wait until the router would serve → 5 watch: pool sizes that somebody
desires are obeyed → 6 on SIGTERM or Ctrl-C, everything in reverse.
"""

import asyncio
import logging
import os
import re
import secrets
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.cluster.config import Config, keys
from baton.cluster.connect import connect_registry
from baton.cluster.errors import BatonError
from baton.cluster.records import Pools
from baton.cluster.registry import Registry, RegistryUnavailable
from baton.cluster.rpc import channel, target
from baton.launch import state
from baton.launch.launcher import Launcher, RestartRule, Template
from baton.launch.local_launcher import LocalLauncher
from baton.launch.redis_server import EmbeddedRedis, RedisServerError
from baton.v1 import worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)
READY_WITHIN_S = 120.0
WATCH_EVERY_S = 0.25
PORTS = ("port", "admin_port", "http_port", "page_port")  # of the router
ROUTER_GRACE_S = 5.0  # on top of the drain

Note = Callable[[str], None]
Loading = Callable[[str, int, int], None]
_LOADING = re.compile(r"loading weights (\d+)/(\d+)")


class UpError(state.StateError):
    """The cluster did not come up; the text says what to look at."""


@dataclass(slots=True)
class Supervisor:
    config: Config
    log_dir: Path
    note: Note  # one line for the person who waits
    loading: Loading = lambda name, done, total: None  # how far a worker is with its weights
    redis: EmbeddedRedis | None = None  # ours, if the cluster has no other

    async def run(self, on_ready: Callable[[state.ClusterState], None]) -> None:
        """Until SIGTERM or SIGINT. Raises UpError, BatonError, ConfigError."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        # On the main thread, which lives as long as we do: the server dies with the thread that started it.
        self.redis = EmbeddedRedis() if self.config.redis.url == "embedded" else None
        launcher = make_launcher(self.config, self.log_dir)
        try:
            config = complete(self.config, self.redis.url if self.redis else self.config.redis.url)
            await self._serve(config, launcher, stop, on_ready)
        finally:
            self.note("stopping")
            await launcher.stop()
            if self.redis is not None:
                await asyncio.to_thread(self.redis.stop)
            state.remove(self.config.cluster.name)

    async def _serve(self, config: Config, launcher: Launcher, stop: asyncio.Event, on_ready: Callable[[state.ClusterState], None]) -> None:
        registry = connect_registry(config)
        try:
            await launcher.start()
            pools = Pools(config.prefill.replicas, config.decode.replicas)
            await registry.desire(pools)
            for template, count in templates(config):
                await launcher.add(template, count)
            up = asyncio.create_task(self._wait_until_ready(config, launcher))
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait({up, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not up.done():
                up.cancel()
                return
            stopped.cancel()
            up.result()
            running = ready_state(config, self.log_dir)
            state.write(running)
            on_ready(running)
            await self._watch(launcher, registry, pools, stop)
        finally:
            await registry.close()

    async def _wait_until_ready(self, config: Config, launcher: Launcher) -> None:
        """The router serves and reaches every worker. That a worker is in the registry is not enough: the router may not have looked yet,
        and the first request would go without a handoff."""
        wanted = config.prefill.replicas + config.decode.replicas
        seen = -1
        async with asyncio.timeout(READY_WITHIN_S) as limit:
            try:
                while True:
                    reached = await workers_ready(config)
                    if reached != seen:
                        self.note(f"{reached} of {wanted} workers ready")
                        seen = reached
                    if reached >= wanted and await serving(config):
                        return
                    processes = await launcher.processes()
                    self._complain(processes)
                    for process in processes:
                        if found := _LOADING.findall(tail(self.log_dir / f"{process.name}.log")):
                            self.loading(process.name, *map(int, found[-1]))
                    await asyncio.sleep(WATCH_EVERY_S / 2)
            except TimeoutError:
                if not limit.expired():
                    raise
                raise UpError(f"not ready after {READY_WITHIN_S:g} s: {seen} of {wanted} workers; logs are in {self.log_dir}") from None

    def _complain(self, processes: list[Any]) -> None:
        """A process that dies at its start will not do better the third time."""
        for process in processes:
            if process.restarts >= 2 and process.state == "backoff":
                raise UpError(
                    f"{process.name} does not start (exit status {process.last_exit}):\n{tail(self.log_dir / f'{process.name}.log')}"
                )

    async def _watch(self, launcher: Launcher, registry: Registry, pools: Pools, stop: asyncio.Event) -> None:
        while not stop.is_set():
            try:
                wanted = await registry.desired() or pools
            except RegistryUnavailable:
                wanted = pools
                self._revive_redis()
            for role in ("prefill", "decode"):
                count = getattr(wanted, role)
                if count != getattr(pools, role):
                    self.note(f"{role} pool: {count} workers")
                    try:
                        await launcher.resize(role, count)
                    except BatonError as error:
                        self.note(f"{role} pool stays as it is: {error}")
            pools = wanted
            try:
                await asyncio.wait_for(stop.wait(), WATCH_EVERY_S)
            except TimeoutError:
                continue

    def _revive_redis(self) -> None:
        """A server of ours that died comes back, empty, at the same address: everybody writes anew what it has to know."""
        if self.redis is not None and not state.alive(self.redis.pid):
            self.note("redis died; it is started again")
            try:
                self.redis = EmbeddedRedis(self.redis.port, self.redis.password)
            except RedisServerError as error:
                self.note(str(error))


def complete(config: Config, redis_url: str) -> Config:
    """What is still open at the start of a cluster: the key, the registry's address, and ports the router must keep when restarted."""
    router = config.router
    ports = {name: getattr(router, name) for name in PORTS}
    for name in PORTS:
        while not ports[name]:  # the system may offer the same one twice
            port = free_port(config.cluster.host)
            ports[name] = 0 if port in ports.values() else port
    return config.model_copy(
        update={
            "cluster": config.cluster.model_copy(update={"key": config.cluster.key or secrets.token_hex(32)}),
            "redis": config.redis.model_copy(update={"url": redis_url}),
            "router": router.model_copy(update=ports),
        }
    )


def free_port(host: str, port: int = 0) -> int:
    """`port` if one can listen on it, any free one for 0. Raises OSError."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        return int(probe.getsockname()[1])


def check_ports(config: Config) -> None:
    """Raises UpError when somebody else listens where the router should."""
    for name in PORTS:
        port = getattr(config.router, name)
        try:
            free_port(config.cluster.host, port)
        except OSError as error:
            where, flag = target(config.cluster.host, port), f"--router.{name.replace('_', '-')}"
            raise UpError(f"router.{name}: cannot listen on {where} ({error.strerror}); choose another with {flag}") from None


def make_launcher(config: Config, log_dir: Path) -> Launcher:
    rule = RestartRule(config.launcher.restart_backoff_s, config.launcher.restart_backoff_max_s)
    if config.launcher.kind == "local":
        return LocalLauncher(rule, log_dir, [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu])
    # Ray is loaded here and only here: a laptop cluster starts without it.
    from baton.launch.ray_launcher import RayLauncher

    needed = 1 + sum(pool.cpus * pool.replicas for pool in (config.prefill, config.decode))
    own = None if config.launcher.ray_address else max(int(needed) + 2, 4)
    return RayLauncher(config.launcher.ray_address, rule, log_dir, ray_num_cpus=own)


def templates(config: Config) -> list[tuple[Template, int]]:
    """Router and pools. The configuration travels as environment, so that a process on any node gets it whole."""
    env = MappingProxyType(to_env(config))
    router = Template("router", (sys.executable, "-m", "router"), env, cpus=0.0, grace_s=config.decode.drain_s + ROUTER_GRACE_S)
    made = [(router, 1)]
    for role in ("prefill", "decode"):
        pool = getattr(config, role)
        argv = (sys.executable, "-m", f"{role}_worker")
        template = Template(role, argv, env, pool.cpus, pool.gpus, pool.cores, config.engine.threads, pool.drain_s + ROUTER_GRACE_S)
        made.append((template, pool.replicas))
    return made


def to_env(config: Config) -> dict[str, str]:
    """The variables from which `baton.cluster.config.load` makes this configuration again."""
    env = {}
    for key in keys():
        section, leaf = key.name.split(".")
        value = getattr(getattr(config, section), leaf)
        if value != key.default:
            env[key.env] = "null" if value is None else str(list(value) if isinstance(value, tuple) else value)
    return env


async def serving(config: Config) -> bool:
    async with channel(target(config.cluster.host, config.router.port), config.security) as open_channel:
        try:
            request = health_pb2.HealthCheckRequest()
            answer = await health_pb2_grpc.HealthStub(open_channel).Check(request, timeout=1.0)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def workers_ready(config: Config) -> int:
    """How many workers the router knows and reaches; 0 while it does not answer."""
    async with channel(target(config.cluster.host, config.router.admin_port), config.security) as open_channel:
        try:
            stub = worker_pb2_grpc.AdminStub(open_channel)  # type: ignore[no-untyped-call]
            answer = await stub.Status(worker_pb2.StatusRequest(), timeout=2.0)
        except grpc.RpcError:
            return 0
        return sum(worker.record.state == "ready" for worker in answer.workers)


def ready_state(config: Config, log_dir: Path) -> state.ClusterState:
    host = config.cluster.host
    router = config.router
    ports = {"grpc": router.port, "http": router.http_port, "admin": router.admin_port, "page": router.page_port}
    endpoints = {name: target(host, port) for name, port in ports.items()}
    return state.ClusterState(config.cluster.name, os.getpid(), endpoints, config.redis.url, str(log_dir), state.born(os.getpid()))


def tail(path: Path, lines: int = 15) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return f"(no log at {path})"
