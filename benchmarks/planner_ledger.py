"""What the workers of a real cluster cost: looked at from outside, several times a second.

A worker counts from the wish that it starts until its process is gone: as many as are wanted of a pool, or as many as there are processes
of it that do not drain, whichever is more, and those that drain. Wanted sizes and records are those of the registry; processes are the
children of `baton up`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from baton.cluster.records import ROLES, Pools, RoleName, WorkerRecord
from baton.cluster.registry import Registry


@dataclass(frozen=True, slots=True)
class WorkersSeen:
    """The workers at one moment (seconds). `processes`: the pool of each, by process id."""

    at: float
    wanted: Pools
    processes: Mapping[int, RoleName]
    records: tuple[WorkerRecord, ...]

    def serving(self, role: RoleName) -> int:
        return sum(record.serves(role) and record.state == "ready" for record in self.records)


@dataclass(slots=True)
class WorkerLedger:
    worker_s: float = 0.0
    most: int = 0  # workers at one time
    longest_gap_s: float = 0.0  # between two looks
    sizes: list[tuple[float, int, int]] = field(default_factory=list)  # when so many began to serve each role
    starts: list[float] = field(default_factory=list)  # seconds from a worker's first look to the first in which it serves
    _last: tuple[float, int] | None = None  # when, and how many
    _coming: dict[int, float | None] = field(default_factory=dict)  # when a process was first seen; None: it has served
    _draining: set[int] = field(default_factory=set)

    def note(self, look: WorkersSeen) -> None:
        """Between two looks there are as many as at the first of them."""
        if self._last is not None:
            gap = look.at - self._last[0]
            self.worker_s += gap * self._last[1]
            self.longest_gap_s = max(self.longest_gap_s, gap)
        self._draining |= {record.pid for record in look.records if record.state == "draining"}
        self._draining &= set(look.processes)
        stay = [pool for pid, pool in look.processes.items() if pid not in self._draining]
        count = sum(max(getattr(look.wanted, role), stay.count(role)) for role in ROLES) + len(self._draining)
        self._note_starts(look)
        self.most, self._last = max(self.most, count), (look.at, count)
        serving = look.serving("prefill"), look.serving("decode")
        if not self.sizes or self.sizes[-1][1:] != serving:
            self.sizes.append((look.at, *serving))

    def _note_starts(self, look: WorkersSeen) -> None:
        """Who is there at the first look was started before."""
        for pid in look.processes:
            self._coming.setdefault(pid, look.at if self._last is not None else None)
        for record in look.records:
            since = self._coming.get(record.pid)
            if since is not None and record.serving and record.state == "ready":
                self.starts.append(look.at - since)
                self._coming[record.pid] = None


async def look(registry: Registry, supervisor: int, at: float) -> WorkersSeen | None:
    """None: nobody wants any sizes yet. Raises RegistryUnavailable."""
    wanted, records = await registry.desired(), await registry.members()
    return None if wanted is None else WorkersSeen(at, wanted, workers_of(supervisor), tuple(records))


def workers_of(supervisor: int) -> dict[int, RoleName]:
    """The worker processes of a `baton up`, by their ids."""
    return {pid: role for pid in _children(supervisor) for role in ROLES if f"{role}_worker" in _command(pid)}


def _children(pid: int) -> Iterable[int]:
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            yield from map(int, task.read_text().split())
        except OSError:
            continue  # the thread has ended


def _command(pid: int) -> list[str]:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_text().split("\0")
    except OSError:
        return []  # the process has
