"""How the processes of a cluster are run: the launchers' contract (`PoolManager`), and the rules of those that own processes (`Launcher`).

1 `Launcher.add` gives a role its `Template` and its first processes → 2 `Roster` names each one `role-index`, a name that is never reused →
3 `_open` puts each in a `ProcessKeeper`: a child process, here or on a node of Ray → 4 a process that hangs (`Watchdog`) is killed; one
that ends by itself is restarted under its name, after the wait that `Restarts` decides → 5 `resize` opens new names or drains the highest
ones → 6 `stop` drains them all, those that hand out work first.

No part of a request passes through a launcher, so a slow launcher delays no token.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from baton.cluster.awake import AwakeClock
from baton.cluster.errors import BatonError, Reason, invalid
from baton.cluster.placement import Placement

LOOK_AT_MOST_S = 0.5
NAME_VARIABLE = "BATON_WORKER_NAME"

State = Literal["running", "backoff", "stopping", "exited"]


@dataclass(frozen=True, slots=True)
class Template:
    """How every process of a role is started. Raises INVALID_FIELD for a template that can never be started."""

    role: str  # "prefill", "decode", "router"
    argv: tuple[str, ...]  # the whole command; a launcher appends nothing
    env: Mapping[str, str] = field(default_factory=dict)  # added to the environment that the process inherits where it runs
    cpus: float = 1.0  # per process, used for placement; not enforced
    gpus: float = 0.0  # the same; a fraction shares one device, more than one must be whole
    placement: Placement = "spread"  # over hosts, of processes that are added together
    cores: tuple[int, ...] | None = None  # the role's processes may run only on these (Linux)
    cores_each: int | None = None  # each process gets this many of them, in turn; None: each gets all
    grace_s: float = 30.0  # from SIGTERM to SIGKILL
    env_each: tuple[Mapping[str, str], ...] = ()  # added for the process of this number, if there is one
    stem: str = ""  # the processes are named `stem-number`; empty: the role. A host that joins a cluster needs names of its own
    leads: bool = False  # its processes hand out the work of all others, so `stop` drains them first

    def __post_init__(self) -> None:
        if not self.role or not self.argv:
            raise invalid("template", "needs a role and a command")
        if min(self.cpus, self.gpus, self.grace_s) < 0:
            raise invalid("template", f"{self.role}: cpus, gpus and grace_s cannot be negative")
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise invalid("template", f"{self.role}: {self.gpus} gpus: more than one must be a whole number")

    def cores_of(self, name: str) -> tuple[int, ...]:
        """The cores of the process `name`; empty: it may run anywhere."""
        cores, each = self.cores or (), self.cores_each
        if each is None or each >= len(cores):
            return cores
        start = _number(name) * each
        return tuple(cores[(start + i) % len(cores)] for i in range(each))

    def env_of(self, name: str) -> dict[str, str]:
        """What is added to the environment of the process `name`."""
        own = dict(enumerate(self.env_each)).get(_number(name), {})
        return {**self.env, **own, NAME_VARIABLE: name}


def _number(name: str) -> int:
    """The last part of a process' name."""
    number = name.rpartition("-")[2]
    return int(number) if number.isdigit() else 0


@dataclass(frozen=True, slots=True)
class ProcessState:
    name: str
    role: str
    pid: int | None  # on its node; None while nothing runs
    state: State  # "exited" only in what `resize` and `stop` return
    restarts: int  # since the name was started
    last_exit: int | None  # status of the latest run that ended; -9 is "by SIGKILL"; None if unknown or none has ended
    node: str  # "localhost", or where Ray put it


@dataclass(frozen=True, slots=True)
class RestartRule:
    """Seconds. The wait doubles from `backoff_s` to `max_backoff_s`; after a run of `stable_s`, the next wait is `backoff_s` again."""

    backoff_s: float = 0.5
    max_backoff_s: float = 30.0
    stable_s: float = 30.0
    hang_s: float = 10.0  # a process that hangs for this long is killed


class Watchdog:
    """Decides whether a process hangs, from its pulses (`cluster.pulse`). It starts with the first pulse: a process that sends none, or
    that is loading its model, is left alone. Time during which the supervisor itself was stopped does not count.

    A long step is not taken for a hang, whatever the model and however busy the machine: the pulse reports an engine that makes no
    progress, not one that is slow.
    """

    def __init__(self, hang_s: float, now: float) -> None:
        self._hang_s = hang_s
        self._awake = AwakeClock(now, LOOK_AT_MOST_S)
        self._heard: float | None = None  # awake seconds

    def look(self, now: float, stalled_s: float | None) -> str | None:
        """Why the process must be killed, or None. Must be called often; `stalled_s` is the newest pulse since the last call."""
        awake = self._awake.look(now)
        if stalled_s is not None:
            self._heard = awake
            return f"its engine has made no progress for {stalled_s:.1f} s" if stalled_s >= self._hang_s else None
        if self._heard is None or awake - self._heard < self._hang_s:
            return None
        return f"it has shown no sign of life for {awake - self._heard:.1f} s"


class Restarts:
    """Decides when one process may be restarted. `now` is in seconds, on any clock that only goes forward."""

    def __init__(self, rule: RestartRule) -> None:
        self._rule = rule
        self._began = 0.0
        self._wait = rule.backoff_s
        self._starts = 0

    @property
    def count(self) -> int:
        return max(self._starts - 1, 0)

    def started(self, now: float) -> None:
        self._began = now
        self._starts += 1

    def exited(self, now: float) -> float:
        """Seconds to wait before the next start."""
        if now - self._began >= self._rule.stable_s:
            self._wait = self._rule.backoff_s
        wait = min(self._wait, self._rule.max_backoff_s)
        self._wait = wait * 2
        return wait


@dataclass(slots=True)
class _Role:
    template: Template
    names: list[str] = field(default_factory=list)  # oldest first
    next: int = 0

    def grow(self, count: int) -> list[str]:
        fresh = [f"{self.template.stem or self.template.role}-{index}" for index in range(self.next, self.next + count)]
        self.next += count
        self.names += fresh
        return fresh


class Roster:
    """Which processes should exist. It only keeps names; the launcher acts on what it returns."""

    def __init__(self) -> None:
        self._roles: dict[str, _Role] = {}

    def add(self, template: Template, count: int) -> list[str]:
        """Names to start. Raises INVALID_FIELD for a role that already has processes."""
        role = self._roles.setdefault(template.role, _Role(template))
        if role.names:
            raise invalid("role", f"{template.role} already has {len(role.names)} processes; resize it")
        role.template = template
        return role.grow(_natural(count))

    def resize(self, name: str, count: int) -> tuple[list[str], list[str]]:
        """(names to start, names to drain: the highest first). Raises INVALID_FIELD for an unknown role or a negative count."""
        role = self._roles.get(name)
        if role is None:
            raise invalid("role", f"{name} is not one of {', '.join(self._roles) or 'no roles'}")
        surplus = len(role.names) - _natural(count)
        if surplus < 0:
            return role.grow(-surplus), []
        role.names, drained = role.names[:count], role.names[count:]
        return [], drained[::-1]

    def template(self, role: str) -> Template:
        return self._roles[role].template

    def of(self, name: str) -> Template:
        """The template of a process, which may be gone from its pool."""
        stem = name.rpartition("-")[0]
        return next(role.template for role in self._roles.values() if stem == (role.template.stem or role.template.role))

    def withdraw(self, role: str, names: Iterable[str]) -> None:
        """Removes names that could not be started."""
        gone = set(names)
        self._roles[role].names = [name for name in self._roles[role].names if name not in gone]


def _natural(count: int) -> int:
    if count < 0:
        raise invalid("count", f"{count} is negative")
    return count


class ProcessKeeper(Protocol):
    """Keeps the process of one name alive. No method raises, and all are bounded."""

    async def state(self) -> ProcessState: ...

    async def hurry(self) -> None:
        """Makes a `stop` under way skip the rest of the grace period: SIGTERM again, and soon SIGKILL."""
        ...

    async def stop(self) -> ProcessState:
        """SIGTERM, up to `grace_s`, SIGKILL; immediate if nothing runs. Returns the final state when nothing is left of the process."""
        ...


class PoolManager(ABC):
    """What every launcher does: it tells which processes there are, and resizes their pools without touching those that stay. A name is
    never used twice, and a process that ends is started again under its name. What a launcher cannot do, it refuses with INVALID_FIELD
    and the way to do it."""

    @abstractmethod
    async def start(self) -> None:
        """Must be called first."""

    @abstractmethod
    async def add(self, template: Template, count: int) -> None:
        """Gives a role its first processes. Refused where something else starts them."""

    @abstractmethod
    async def resize(self, role: str, count: int) -> list[ProcessState]:
        """Starts new processes or drains surplus ones; returns the final states of those. No other process is touched.

        Raises SATURATED (nothing was started), INVALID_FIELD for an unknown role or a negative count.
        """

    @abstractmethod
    async def processes(self) -> list[ProcessState]:
        """Every process that should run or is still being drained, in order of start."""

    @abstractmethod
    async def stop(self) -> list[ProcessState]:
        """Ends all processes. Refused where something else owns them."""


class Launcher(PoolManager):
    """A launcher that owns its processes: it starts them and keeps them alive, and they end with it.

    Each process gets BATON_WORKER_NAME and draws its own incarnation at start. It receives SIGTERM only from here (a Ctrl-C in the
    terminal does not reach it), and dies with its supervisor. An exit is noticed within 0.2 s. All methods belong to one event loop;
    cancelling one that drains does not stop the draining.
    """

    def __init__(self) -> None:
        self._roster = Roster()
        self._places: dict[str, ProcessKeeper] = {}
        self._drains: dict[str, asyncio.Task[ProcessState]] = {}
        self._changing = asyncio.Lock()
        self._stopped = False
        self._hurried = False

    @abstractmethod
    async def _open(self, template: Template, names: list[str]) -> dict[str, ProcessKeeper]:
        """Starts all of them, or raises and starts none. Raises SATURATED if there is no room after a bounded wait."""

    async def gpus(self) -> float:
        """Those of other hosts that it can give to processes, once it has started."""
        return 0.0

    @abstractmethod
    async def _close(self) -> None:
        """Called after the last place is gone."""

    async def add(self, template: Template, count: int) -> None:
        """Raises SATURATED (nothing was started), INVALID_FIELD for a role that already has processes, DRAINING after `stop`."""
        async with self._changing:
            self._refuse_if_stopped()
            await self._grow(template, self._roster.add(template, count))

    async def resize(self, role: str, count: int) -> list[ProcessState]:
        """Starts new processes or drains the highest-numbered ones; returns the final states of those. No other process is touched.

        Raises SATURATED (nothing was started), INVALID_FIELD for an unknown role, DRAINING after `stop`.
        """
        async with self._changing:
            self._refuse_if_stopped()
            fresh, surplus = self._roster.resize(role, count)
            await self._grow(self._roster.template(role), fresh)
        return await self._drain(surplus)

    async def processes(self) -> list[ProcessState]:
        """Every process that should run or is still being drained, in order of start."""
        return await asyncio.gather(*(place.state() for place in self._places.values()))

    async def stop(self) -> list[ProcessState]:
        """Drains all processes and returns their final states. Nothing is left then; a second call does nothing.

        A growth under way finishes first. The processes that lead are drained before the others: a request between its prefill and its
        decode still needs a worker that accepts it.
        """
        async with self._changing:
            self._stopped = True
        ended = await self._drain([name for name in self._places if self._leads(name)])
        ended += await self._drain(list(self._places))
        await self._close()
        return ended

    async def hurry(self) -> None:
        """Makes every process that is being drained end now instead of after its grace period; after `stop`, all of them."""
        self._hurried = self._stopped
        await asyncio.gather(*(self._places[name].hurry() for name in self._drains if name in self._places))

    def _refuse_if_stopped(self) -> None:
        if self._stopped:
            raise BatonError(Reason.DRAINING, "this launcher was stopped")

    async def _grow(self, template: Template, names: list[str]) -> None:
        try:
            self._places |= await self._open(template, names)
        except BaseException:  # also when cancelled
            self._roster.withdraw(template.role, names)
            raise

    async def _drain(self, names: list[str]) -> list[ProcessState]:
        for name in names:
            if name not in self._drains:
                self._drains[name] = asyncio.create_task(self._end(name), name=f"drain {name}")
        return await asyncio.shield(asyncio.gather(*(self._drains[name] for name in names)))

    def _leads(self, name: str) -> bool:
        return self._roster.of(name).leads

    async def _end(self, name: str) -> ProcessState:
        try:
            if self._hurried:
                await self._places[name].hurry()
            return await self._places[name].stop()
        finally:
            del self._places[name], self._drains[name]
