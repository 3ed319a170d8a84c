"""The planner as a process: `python -m baton.planner`, or the one that `baton up` starts with `planner.enabled`."""

import asyncio
import contextlib
import logging
import time
from contextlib import AsyncExitStack
from pathlib import Path

from baton.cluster.config import Config, ConfigError
from baton.cluster.connect import connect_registry
from baton.cluster.guard import Guard
from baton.cluster.health import HealthServer
from baton.cluster.lifecycle import Stage, Stop, move
from baton.cluster.membership import draw_incarnation, process_name
from baton.cluster.metrics import Book
from baton.cluster.metrics_http import Exposition, MetricsServer
from baton.cluster.registry import Registry
from baton.cluster.rpc import Tasks
from baton.planner.capacity import Model
from baton.planner.controller import Controller
from baton.planner.doors import RouterDoors
from baton.planner.meter import Meter
from baton.planner.sizing import RegistrySizing, Sizing
from baton.profile.file import Profile, ProfileError

log = logging.getLogger(__name__)

CHUNK = 512  # tokens of a step, where neither the configuration nor the profile says more


def model_of(config: Config) -> Model:
    """Raises ConfigError."""
    planner, slo, engine = config.planner, config.slo, config.engine
    if planner.profile is None:
        raise ConfigError("planner.profile: the planner needs a profile of this cluster; `baton profile` measures one")
    if slo.ttft_s is None and slo.tpot_s is None:
        raise ConfigError("slo.ttft_s, slo.tpot_s: the planner needs an objective to size for")
    try:
        profile = Profile.load_file(Path(planner.profile))
    except ProfileError as error:
        raise ConfigError(f"planner.profile: {error}") from None
    chunk = engine.max_num_batched_tokens or int(profile.engine.get("max_num_batched_tokens", CHUNK))
    return Model(profile, slo.ttft_s, slo.tpot_s, chunk=chunk)


def sizing_of(config: Config, registry: Registry) -> Sizing:
    """Raises ConfigError."""
    if config.planner.release is None:
        return RegistrySizing(registry)
    # The package `kubernetes` is loaded only here.
    from baton.planner.kubernetes_sizing import KubernetesSizing

    return KubernetesSizing(config.planner.release)


class PlannerProcess:
    """A `baton.cluster.lifecycle.Process`."""

    def __init__(self, config: Config, stop: Stop) -> None:
        """Raises ConfigError."""
        self.config = config
        self.stage = Stage.STARTING
        model = model_of(config)
        registry = connect_registry(config)
        doors, sizing = RouterDoors(config, registry), sizing_of(config, registry)
        name, book = process_name("planner"), Book("planner")
        who = f"{name} {draw_incarnation()}"
        self._controller = Controller(config.planner, model, registry, doors, who, time.time, sizing, Meter(book))
        self._metrics = MetricsServer(config, Exposition(book), lambda: self.stage is Stage.READY, Guard(config))
        self._health = HealthServer(config, lambda: self.stage)
        self._tasks = Tasks(stop.fail)
        self._closers = AsyncExitStack()  # all of them run, in reverse order, even if one fails
        for close in (registry.close, doors.close, sizing.close, self._resign, self._health.close, self._metrics.close, self._tasks.close):
            self._closers.push_async_callback(close)

    async def start(self) -> None:
        telemetry = self.config.telemetry
        if telemetry.health_port is not None:
            await self._health.start(telemetry.health_port)
        if telemetry.metrics:
            await self._metrics.start(telemetry.worker_metrics_port)
            log.info("metrics on %s", self._metrics.address)
        self._tasks.start(self._controller.run(), "planner")
        self.stage = move(self.stage, "ready")

    async def drain(self) -> None:
        """It has nothing to finish: a change under way is the launchers' and the workers'."""
        self.stage = move(self.stage, "drain")

    async def close(self) -> None:
        self.stage = move(self.stage, "close")
        await self._closers.aclose()

    async def _resign(self) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            async with asyncio.timeout(1.0):
                await self._controller.resign()
