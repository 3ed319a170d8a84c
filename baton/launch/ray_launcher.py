"""The launcher for a Ray cluster: Ray chooses the nodes, and an actor there supervises a process like one that is started by hand.

There is one actor per process, and one placement group per `add` or growth: all of its processes find room, or none. See `_Rooms` for
shrinking.

The actor restarts its child (the same `Child`, by the same rule as locally). Ray restarts the actor if it or its node dies, and the new
actor starts the child again. The old child is dead by then: it is leashed to the actor's thread, and the actor to its raylet.

Ray listens on every interface of a machine. A cluster started here uses Ray's token authentication (RAY_AUTH_TOKEN, else a token that Ray
writes under the home directory). To join a cluster, this process needs the same RAY_AUTH_MODE and token before it imports Ray.
"""

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from baton.cluster.errors import BatonError, Reason
from baton.cluster.gpus import VISIBLE
from baton.cluster.packages import HOME
from baton.launch.child import KILLED_S, Child
from baton.launch.launcher import Launcher, ProcessKeeper, ProcessState, RestartRule, Template
from baton.launch.placing import Gpus

REACHABLE_S = 5.0
JOIN_S = 120.0  # to start or join a cluster; on a busy machine Ray needs more than a minute
SUPERVISOR_S = 60.0  # for Ray to start the supervisors of a growth, once they have room
ANSWER_S = 2.0  # for a supervisor to report the state of its child
PARTING_S = KILLED_S + 5.0  # beyond the grace period, for a supervisor to report that its child is gone


class RaySupervisor:
    """The actor. Ray builds it on the thread of its event loop, after a crash too, so the child can be started in the constructor."""

    def __init__(self, name: str, template: Template, rule: RestartRule, log_dir: Path | None, cwd: str) -> None:
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, 0)  # Ray runs its workers at niceness 15, which the child would inherit
        if log_dir is not None:
            log_dir.mkdir(parents=True, exist_ok=True)
        node = f"{socket.gethostname()}/{ray.get_runtime_context().get_node_id()[:8]}"
        self._child = Child(name, template, rule, inherited(template), node, log_dir, cwd if os.path.isdir(cwd) else None)
        self._child.start()

    async def state(self) -> tuple[int, ProcessState]:
        """Has our own pid: if it changes, the child's restarts are counted from zero again."""
        return os.getpid(), await self._child.state()

    async def stop(self) -> ProcessState:
        return await self._child.stop()

    async def hurry(self) -> None:
        await self._child.hurry()


def inherited(template: Template) -> dict[str, str]:
    """The node's environment without what Ray adds for its own workers, so that the child is the same process as one started by hand."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_") and key != "PYTHONBREAKPOINT"}
    if env.get("OMP_NUM_THREADS") == str(max(int(template.cpus), 1)):  # Ray's guess; any other value was set by the operator
        del env["OMP_NUM_THREADS"]
    if not template.gpus:
        env[VISIBLE] = ""  # otherwise it would see devices that Ray gave to other processes
    if "PYTHONPATH" in env:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, env["PYTHONPATH"].split(os.pathsep)))
    return env


@dataclass(frozen=True, slots=True)
class _Room:
    """One bundle of a placement group."""

    group: PlacementGroup
    index: int


@dataclass(slots=True)
class _RayPlace:
    """A `ProcessKeeper` whose supervisor may be unreachable for a while."""

    supervisor: Any
    room: _Room | None
    grace_s: float
    last: ProcessState  # as last reported by the supervisor
    dismiss: Callable[["_RayPlace"], Awaitable[None]]  # ends the supervisor and frees its room
    incarnation: int = 0  # pid of the supervisor
    restarts: int = 0  # of the child under earlier supervisors

    async def ready(self) -> None:
        """Waits without a bound until Ray has placed the supervisor and the child was started. Raises RayError."""
        incarnation, told = await _result(self.supervisor.state.remote())
        if self.incarnation not in (0, incarnation):
            self.restarts = self.last.restarts + 1
        self.incarnation = incarnation
        self.last = replace(told, restarts=self.restarts + told.restarts)

    async def state(self) -> ProcessState:
        try:
            async with asyncio.timeout(ANSWER_S):
                await self.ready()
        except (RayError, TimeoutError):
            self.last = replace(self.last, pid=None, state="backoff")
        return self.last

    async def hurry(self) -> None:
        with suppress(RayError, TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                await _result(self.supervisor.hurry.remote())

    async def stop(self) -> ProcessState:
        try:
            async with asyncio.timeout(self.grace_s + PARTING_S):
                self.last = replace(await _result(self.supervisor.stop.remote()), restarts=self.last.restarts)
        except (RayError, TimeoutError):  # the supervisor is gone, and its child with it; how it ended is unknown
            self.last = replace(self.last, pid=None, state="exited", last_exit=None)
        await self.dismiss(self)
        return self.last


class _Rooms:
    """What this launcher has reserved. Every method blocks briefly.

    Ray takes a group back only as a whole. The rooms of drained processes are therefore kept for the next process of the same size,
    whatever its role (a prefill GPU becomes a decode GPU, and nobody else can take it in between); a group whose rooms are all empty is
    given back. Shrinking undoes the latest growth first, so a growth that is undone is given back; the group that a role began with may be
    kept.
    """

    def __init__(self) -> None:
        self._empty: list[_Room] = []

    @property
    def empty(self) -> list[dict[str, float]]:
        return [room.group.bundle_specs[room.index] for room in self._empty]

    def take(self, template: Template, count: int) -> list[_Room | None]:
        """None for a process that needs nothing: a bundle cannot be empty. Does not wait for Ray to find the room."""
        size = {resource: float(amount) for resource, amount in (("CPU", template.cpus), ("GPU", template.gpus)) if amount}
        if not size:
            return [None] * count
        rooms = [room for room in self._empty if room.group.bundle_specs[room.index] == size][:count]
        self._empty = [room for room in self._empty if room not in rooms]
        if missing := count - len(rooms):
            group = placement_group([size] * missing, strategy=template.placement.replace("-", "_").upper())
            rooms += [_Room(group, index) for index in range(missing)]
        return list(rooms)

    def give_back(self, room: _Room) -> None:
        self._empty.append(room)
        if sum(other.group == room.group for other in self._empty) == room.group.bundle_count:
            self._empty = [other for other in self._empty if other.group != room.group]
            remove_placement_group(room.group)


class RayLauncher(Launcher):
    """Joins the cluster at `address` ("host:port" or "auto"), or starts one on this machine, which ends with `stop` or with this process.

    A process has only one connection to Ray: if it is already connected, that connection is used and not closed. `ray_num_cpus`,
    `ray_num_gpus`: the resources of a cluster started here, instead of those that Ray finds; `gpus`: what it may give to processes, instead
    of all. `log_dir` is a path on the nodes; without it, the output goes to Ray's session directory.
    """

    def __init__(
        self,
        address: str | None = None,
        rule: RestartRule | None = None,
        log_dir: Path | None = None,
        place_timeout_s: float = 60.0,
        ray_num_cpus: int | None = None,
        ray_num_gpus: int | None = None,
        gpus: Gpus | None = None,
    ) -> None:
        super().__init__()
        self._address = address
        self._rule = rule or RestartRule()
        self._log_dir = log_dir
        self._rooms = _Rooms()
        self._place_timeout_s = place_timeout_s
        self._num_cpus = ray_num_cpus
        self._num_gpus = ray_num_gpus if gpus is None else len(gpus.devices)
        self._gpus = gpus
        self._connected_here = False
        # One thread for all of Ray's blocking calls, for the life of this launcher: Ray's daemons are tied to the thread that started them.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ray")

    @property
    def address(self) -> str:
        """The address at which another launcher can join. Available only after `start`."""
        return str(ray.get_runtime_context().gcs_address)

    async def start(self) -> None:
        """Raises INTERNAL when the cluster cannot be started or joined."""
        where = self._address or "this machine"
        try:
            await _reachable(self._address)
            async with asyncio.timeout(JOIN_S):
                await self._call(self._connect)
        except (Exception, SystemExit) as error:  # ray.init raises almost anything
            self._thread.shutdown(wait=False)
            hint = "; if it uses tokens, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN" if self._address else ""
            raise BatonError(Reason.INTERNAL, f"no Ray cluster at {where}: {str(error) or type(error).__name__}{hint}") from error
        finally:
            take_back(signal.SIGTERM)

    def _connect(self) -> None:
        if ray.is_initialized():
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if self._address is None:
            if self._gpus is not None:  # Ray hands out what this variable names
                os.environ[VISIBLE] = ",".join(device.token for device in self._gpus.devices)
            # `address="local"`: otherwise the remains of a killed cluster are taken for a living one. Niceness: see RaySupervisor. These
            # cannot use prestarted workers, one idle Python per core, because they need another PYTHONPATH.
            self._init(
                address="local",
                include_dashboard=False,
                num_cpus=self._num_cpus,
                num_gpus=self._num_gpus,
                _system_config={"worker_niceness": 0, "prestart_worker_first_driver": False},
            )
        else:
            self._init(address=self._address)
        self._connected_here = True

    def _init(self, **how: Any) -> None:
        """Ray makes its workers import from the current working directory first, so that must contain no Python files."""
        with chdir("/"):
            ray.init(log_to_driver=False, configure_logging=False, **how)

    async def gpus(self) -> float:
        return float((await self._call(ray.cluster_resources)).get("GPU", 0))

    async def _close(self) -> None:
        if self._connected_here:
            self._connected_here = False
            await self._call(ray.shutdown)  # ends the cluster only if this process started it
        self._thread.shutdown(wait=False)

    async def _open(self, template: Template, names: list[str]) -> dict[str, ProcessKeeper]:
        places: dict[str, _RayPlace] = {}
        try:
            await self._call(self._ask_for, template, names, places)
            await self._room_found(template, places)
            await self._started(template, places)
        except BaseException:  # also when cancelled; the one thread ends `_ask_for` before it runs `_dismiss`, so `places` is complete
            await asyncio.shield(self._call(self._dismiss, places))
            raise
        return dict(places)

    def _ask_for(self, template: Template, names: list[str], places: dict[str, _RayPlace]) -> None:
        """Blocks, but does not wait for room."""
        actor = ray.remote(RaySupervisor)
        plain = replace(template, env=dict(template.env))  # a read-only view of a mapping cannot be sent
        for name, room in zip(names, self._rooms.take(template, len(names)), strict=True):
            supervisor = actor.options(
                num_cpus=template.cpus,
                num_gpus=template.gpus,
                max_restarts=-1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(room.group, room.index) if room else "SPREAD",
                runtime_env=_runtime_env(),
            ).remote(name, plain, self._rule, self._log_dir, os.getcwd())
            unknown = ProcessState(name, template.role, None, "backoff", 0, None, "")
            places[name] = _RayPlace(supervisor, room, template.grace_s, unknown, self._end_of)

    async def _end_of(self, place: _RayPlace) -> None:
        await self._call(self._dismiss, {place.last.name: place})

    def _dismiss(self, places: Mapping[str, _RayPlace]) -> None:
        """Blocks. Kills the supervisors without a restart; their children die with them."""
        for place in places.values():
            with suppress(RayError):
                ray.kill(place.supervisor, no_restart=True)
                if place.room is not None:
                    self._rooms.give_back(place.room)

    async def _room_found(self, template: Template, places: dict[str, _RayPlace]) -> None:
        groups = {place.room.group for place in places.values() if place.room}
        try:
            async with asyncio.timeout(self._place_timeout_s):
                await asyncio.gather(*(_result(group.ready()) for group in groups))
        except TimeoutError as error:
            asked = f"{len(places)} processes of {template.cpus:g} CPUs and {template.gpus:g} GPUs each"
            free = await self._call(ray.available_resources)
            found = f"{free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs are free"
            kept = f", reserved for processes of the same size: {self._rooms.empty}" if self._rooms.empty else ""
            message = f"{template.role}: no room for {asked} in the Ray cluster within {self._place_timeout_s:g} s; {found}{kept}"
            raise BatonError(Reason.SATURATED, message) from error

    async def _started(self, template: Template, places: dict[str, _RayPlace]) -> None:
        try:
            async with asyncio.timeout(SUPERVISOR_S):
                await asyncio.gather(*(place.ready() for place in places.values()))
        except (RayError, TimeoutError) as error:
            raise BatonError(Reason.INTERNAL, f"{template.role}: Ray did not start a supervisor: {str(error) or 'timeout'}") from error

    def _call(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().run_in_executor(self._thread, function, *args)


def take_back(number: int) -> None:
    """Gives Python the signal that Ray has taken. Ray's handler of SIGTERM (absl's failure signal handler, as of Ray 2.60) writes a
    traceback, calls Python's, and aborts this process three seconds later, whatever it still has to drain. Only the main thread can set
    handlers."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(number, signal.getsignal(number))
        signal.siginterrupt(number, False)  # as asyncio sets it


def _runtime_env() -> dict[str, Any]:
    """Makes supervisors and their children import this project from the same path as here, even from a checkout that is not installed, and
    nothing from a working directory."""
    env = {"PYTHONSAFEPATH": "1"}
    if HOME.name not in ("site-packages", "dist-packages"):
        env["PYTHONPATH"] = f"{HOME}{os.pathsep}${{PYTHONPATH}}"
    return {"env_vars": env}


async def _result(ref: Any) -> Any:
    return await asyncio.wrap_future(ref.future())


async def _reachable(address: str | None) -> None:
    """Raises OSError or TimeoutError. Ray itself would try a dead address for two minutes and then end the process."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdigit():
        async with asyncio.timeout(REACHABLE_S):
            _, writer = await asyncio.open_connection(host, int(port))
        writer.close()
