"""A real cluster for one experiment: `baton up` with the experiment's settings, as a child of the cockpit.

1 `OwnClusters.take` refuses what this machine has no room for, and a second cluster of its kind, whichever cockpit asks → 2 `OwnCluster`
makes the model if it does not ship, starts `baton up`, and waits until it serves → 3 the run → 4 the cluster is taken down, also when the
run is stopped or fails.

When the cockpit is killed, so is `baton up`, because it is on a leash, and with it all that it has started, for the same reason. The
cluster has its own name, and nothing of the user's configuration: no variable of the environment that sets a key reaches it.
"""

import asyncio
import fcntl
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import IO

from baton.access.access import Access
from baton.access.options import ClientIdentity
from baton.cluster.errors import BatonError, Reason
from baton.cluster.packages import command
from baton.cluster.rpc import NO_PROXY
from baton.cockpit.bounds import MachineRoom, notes, refuse_beyond, start_flags
from baton.cockpit.checkpoints import CHECKPOINTS
from baton.cockpit.cluster import ClusterFacts, CockpitCluster, OpenedDoor
from baton.cockpit.knobs import Settings
from baton.engine.machine import available_memory, usable_cores
from baton.launch import state
from baton.launch.child import gone, leashed

NAME = "cockpit"
START_WITHIN_S = 240.0  # from the model to the first request
LOOK_EVERY_S = 0.1
ENDING = ((signal.SIGTERM, 10.0), (signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0))  # each signal, and how long it has, s
KEPT_VARIABLES = ("BATON_STATE_DIR", "BATON_KERNEL_CACHE")  # of those that begin with BATON_
MOST_TOLD = 600  # characters of what a process said before it ended
Say = Callable[[str], None]


class OwnClusters:
    """The clusters of this user's experiments on this host: one at a time."""

    def __init__(self, program: Sequence[str] = command("baton")) -> None:
        """`program`: the command `baton`."""
        self._program = program

    def room(self) -> MachineRoom:
        return MachineRoom(usable_cores(), available_memory())

    def take(self, settings: Settings, longest: int) -> "OwnCluster":
        """`longest`: tokens of the longest request. Raises BatonError: INVALID_FIELD; SATURATED while there is such a cluster; NO_WORKER
        where none can be."""
        room = self.room()
        refuse_beyond(settings, longest, room)
        try:
            folder = state.state_dir()
            others = [name for name in state.running() if name != NAME]
            lock = (folder / f"{NAME}.lock").open("w")
            taken = state.read(NAME) is not None
        except (state.StateError, OSError) as error:
            raise BatonError(Reason.NO_WORKER, f"no cluster can be started here: {error}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed, or this process ends
        except OSError:
            taken = True
        if taken:
            lock.close()
            raise BatonError(Reason.SATURATED, f"a cluster {NAME!r} runs on this host: stop its experiment, or wait until it has ended")
        return OwnCluster(settings, notes(settings, room, others), folder, lock, self._program)


class OwnCluster:
    """`doubts`: what is to be said before the figures of its run."""

    def __init__(self, settings: Settings, doubts: list[str], folder: Path, lock: IO[str], program: Sequence[str]) -> None:
        """`folder`: for its log and its model. `lock` is closed when it has ended."""
        self.doubts = doubts
        self._settings, self._lock, self._program = settings, lock, program
        self._log, self._made = folder / f"{NAME}-up.log", folder / f"{NAME}-model"
        self._processes: list[subprocess.Popen[bytes]] = []

    @asynccontextmanager
    async def running(self, say: Say) -> AsyncIterator[tuple[OpenedDoor, ClusterFacts]]:
        """`say` gets what it is doing, empty while it serves. Raises RuntimeError if it does not start or end."""
        try:
            try:
                async with asyncio.timeout(START_WITHIN_S):
                    started = await self._start(say)
            except TimeoutError:
                raise RuntimeError(f"its cluster was not ready within {START_WITHIN_S:g} s: {self._said()}") from None
            say("")
            yield started
        finally:
            say("its cluster is taken down")
            await self._down()
            say("")

    async def _start(self, say: Say) -> tuple[OpenedDoor, ClusterFacts]:
        model, folder = CHECKPOINTS[self._settings.checkpoint], CHECKPOINTS[self._settings.checkpoint].folder
        if model.made:
            say(f"{model.name} is made")
            folder = self._made
            await self._make(model.made)
        up = self._spawn(*self._program, *start_flags(self._settings, NAME, str(folder)))
        while (running := state.read(NAME)) is None or running.pid != up.pid:
            if up.poll() is not None:
                raise RuntimeError(f"its cluster did not start: {self._said()}")
            said = self._said().rpartition(" / ")[2]
            say(f"its cluster starts: {said}" if said else "its cluster starts")
            await asyncio.sleep(LOOK_EVERY_S)
        endpoints = running.endpoints
        found = CockpitCluster(lambda door: Access(endpoints[door], ClientIdentity(), (NO_PROXY,)))
        while True:
            try:
                facts = await found.facts()
                return await found.open(self._settings, facts), facts
            except BatonError as error:  # on a busy machine the router may be late
                if error.reason is not Reason.NO_WORKER or up.poll() is not None:
                    raise
                await asyncio.sleep(LOOK_EVERY_S)

    async def _make(self, sizes: Mapping[str, int]) -> None:
        shutil.rmtree(self._made, ignore_errors=True)
        flags = [part for name, value in sizes.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        making = self._spawn(*command("baton.models.make_small", str(self._made), *flags))
        while making.poll() is None:
            await asyncio.sleep(LOOK_EVERY_S)
        if making.returncode:
            raise RuntimeError(f"its model could not be made: {self._said()}")

    def _spawn(self, *words: str) -> "subprocess.Popen[bytes]":
        """Must be called on the main thread: the process ends with the thread that started it. It has a session of its own, so that a
        Ctrl-C in the terminal does not reach it: the cockpit ends it."""
        env = {name: value for name, value in os.environ.items() if not name.startswith("BATON_") or name in KEPT_VARIABLES}
        with self._log.open("wb") as log:
            process = subprocess.Popen(
                leashed(*words), env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )  # fmt: skip
        self._processes.append(process)
        return process

    def _said(self) -> str:
        """The last lines of what its process wrote."""
        with suppress(OSError):
            lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
            return " / ".join(lines)[-MOST_TOLD:]
        return ""

    async def _down(self) -> None:
        """Goes on to the end, however often the run is cancelled meanwhile. Raises RuntimeError for a process that is still there."""
        ending = asyncio.ensure_future(self._end())
        while not ending.done():
            with suppress(asyncio.CancelledError):
                await asyncio.shield(ending)
        ending.result()

    async def _end(self) -> None:
        try:
            for process in self._processes:
                await _ended(process)
        finally:
            shutil.rmtree(self._made, ignore_errors=True)
            self._lock.close()


async def _ended(process: "subprocess.Popen[bytes]") -> None:
    for number, within_s in ENDING:
        if process.poll() is None:
            process.send_signal(number)
        if await gone(process, within_s):
            return
    raise RuntimeError(f"process {process.pid} of its cluster is still there after SIGKILL")
