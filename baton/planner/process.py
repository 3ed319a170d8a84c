"""The planner as a process: `python -m baton.planner`, or the one that `baton up` starts with `planner.enabled`."""

import asyncio
import contextlib
import time
from pathlib import Path

from baton.cluster.config import Config, ConfigError
from baton.cluster.connect import connect_registry
from baton.cluster.lifecycle import Stop
from baton.cluster.membership import draw_incarnation, process_name
from baton.cluster.rpc import Tasks
from baton.planner.capacity import Model
from baton.planner.controller import Controller
from baton.planner.doors import RouterDoors
from baton.profile.file import Profile, ProfileError

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


class PlannerProcess:
    """A `baton.cluster.lifecycle.Process`."""

    def __init__(self, config: Config, stop: Stop) -> None:
        """Raises ConfigError."""
        self._registry = connect_registry(config)
        self._doors = RouterDoors(config, self._registry)
        who = f"{process_name('planner')} {draw_incarnation()}"
        self._controller = Controller(config.planner, model_of(config), self._registry, self._doors, who, time.time)
        self._tasks = Tasks(stop.fail)

    async def start(self) -> None:
        self._tasks.start(self._controller.run(), "planner")

    async def drain(self) -> None:
        """It has nothing to finish: a change under way is the launchers' and the workers'."""

    async def close(self) -> None:
        await self._tasks.close()
        with contextlib.suppress(asyncio.TimeoutError):
            async with asyncio.timeout(1.0):
                await self._controller.resign()
        await self._doors.close()
        await self._registry.close()
