"""What a worker is doing until it serves: in its log, and in the registry, where `baton up` and `baton status` read it on any host."""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from baton.cluster.records import RoleName, StartRecord
from baton.cluster.registry import Registry, RegistryUnavailable, StaleIncarnation
from baton.engine.core.progress import Step

log = logging.getLogger(__name__)
LINE_EVERY_S = 5.0  # of the log, after the first line of each step


class Starting:
    def __init__(self, name: str, pool: RoleName, incarnation: int, registry: Registry, heartbeat_s: float) -> None:
        self._name, self._pool, self._incarnation = name, pool, incarnation
        self._step = Step("starting")
        self._logged_at = 0.0
        self._logged: set[str] = set()  # steps
        self._registry, self._heartbeat_s = registry, heartbeat_s
        self._left = False
        self._now = asyncio.get_running_loop().time  # for other threads, too

    def tell(self, step: Step) -> None:
        """May be called in any thread."""
        now, self._step = self._now(), step
        if step.what not in self._logged or now - self._logged_at >= LINE_EVERY_S:
            self._logged_at = now
            self._logged.add(step.what)
            log.info("%s", step)

    async def describe(self) -> StartRecord:
        step = self._step
        cpu_s = await asyncio.to_thread(processor_s, os.getpid())
        return StartRecord(
            self._name,
            self._pool,
            self._incarnation,
            os.getpid(),
            socket.gethostname(),
            step.what,
            step.done,
            step.total,
            step.unit,
            cpu_s,
        )

    async def run(self) -> None:
        """Runs until `leave`. A ghost is refused here, too; it ends when it wants to join."""
        while not self._left:
            with suppress(RegistryUnavailable, StaleIncarnation):
                await self._registry.join(await self.describe())
                if self._left:  # meanwhile
                    await self._remove()
            await asyncio.sleep(self._heartbeat_s)

    async def leave(self) -> None:
        """The worker serves, or will not. Best effort: the record expires."""
        if not self._left:
            self._left = True
            await self._remove()

    async def _remove(self) -> None:
        with suppress(RegistryUnavailable):
            await self._registry.leave(self._name, self._incarnation, "start")


def processor_s(pid: int, read: Callable[[Path], str] = Path.read_text) -> float:
    """Processor time of a process and its descendants, seconds: an engine may load its model in a process of its own. Linux; elsewhere
    that of this process."""
    ticks, left = 0, [pid]
    while left:
        here = Path(f"/proc/{left.pop()}")
        try:
            fields = read(here / "stat").rpartition(")")[2].split()
            ticks += sum(int(field) for field in fields[11:15])  # its own and that of children that have ended
            for task in (here / "task").iterdir():
                left += [int(child) for child in read(task / "children").split()]
        except OSError:  # it has ended
            continue
    return ticks / os.sysconf("SC_CLK_TCK") if ticks else time.process_time()
