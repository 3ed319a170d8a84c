"""Brings the pools to their wanted sizes.

`WorkerPool` decides: from wanted sizes and outcomes it derives what to ask of the launcher; it has no clock and awaits nothing.
`Reconciler` acts: it reads the wanted sizes from the registry and runs each change as its own task, so that a pool that drains for half a
minute delays neither the next change nor anything else.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from baton.cluster.errors import BatonError
from baton.cluster.records import Pools
from baton.cluster.registry import Registry, RegistryUnavailable
from baton.launch.launcher import Launcher
from baton.moves import Moves

RETRY_S = 5.0  # after a refusal: room may be found later


class Phase(Enum):
    SETTLED = "settled"
    CHANGING = "changing"
    REFUSED = "refused"


# (phase, event) → phase. A new change need not wait for one under way: the launcher does them in order, and only draining takes long.
MOVES = Moves(
    {
        (Phase.SETTLED, "change"): Phase.CHANGING,
        (Phase.CHANGING, "change"): Phase.CHANGING,
        (Phase.CHANGING, "done"): Phase.SETTLED,
        (Phase.CHANGING, "refuse"): Phase.REFUSED,
        (Phase.REFUSED, "change"): Phase.CHANGING,
    }
)


@dataclass(slots=True)
class WorkerPool:
    """One pool: the size that was last asked of the launcher, and the outcome."""

    asked: int
    phase: Phase = Phase.SETTLED
    retry_at: float = 0.0
    changes: int = 0  # so far; only the outcome of the latest one counts

    def decide(self, wanted: int, now: float) -> bool:
        """Whether to ask the launcher for `wanted` now."""
        if wanted != self.asked:
            return True
        return self.phase is Phase.REFUSED and now >= self.retry_at

    def change(self, wanted: int) -> int:
        """Notes that the launcher is being asked for `wanted`. Returns the number of this change."""
        self._move("change")
        self.asked = wanted
        self.changes += 1
        return self.changes

    def done(self, change: int) -> None:
        if change == self.changes:
            self._move("done")

    def refuse(self, change: int, now: float) -> None:
        if change == self.changes:
            self._move("refuse")
            self.retry_at = now + RETRY_S

    def _move(self, event: str) -> None:
        self.phase = MOVES.after(self.phase, event, "the pool")


class Reconciler:
    """`note` gets lines for the person who is waiting. `step` is called repeatedly; it reads the registry and never waits for a change."""

    def __init__(self, launcher: Launcher, registry: Registry, sizes: Pools, note: Callable[[str], None]) -> None:
        self._launcher = launcher
        self._registry = registry
        self._wanted = sizes
        self._pools = {"prefill": WorkerPool(sizes.prefill), "decode": WorkerPool(sizes.decode)}
        self._note = note
        self._changes: set[asyncio.Task[None]] = set()

    @property
    def stop(self) -> bool:
        """Whether someone asked for the end of the cluster."""
        return self._wanted.stop

    async def step(self) -> bool:
        """Follows the latest wanted sizes. Returns False while the registry is unreachable; the last known sizes then remain in force."""
        reached = True
        try:
            if (wish := await self._registry.desired()) is None:
                # The registry lost everything, but `baton scale` must find the other pool's size there.
                await self._registry.desire(self._wanted)
            else:
                self._wanted = wish
        except RegistryUnavailable:
            reached = False
        now = asyncio.get_running_loop().time()
        for role, pool in self._pools.items():
            wanted = getattr(self._wanted, role)
            if pool.decide(wanted, now):
                again = pool.phase is Phase.REFUSED and wanted == pool.asked
                if not again:
                    self._note(f"{role} pool: {wanted} workers")
                task = asyncio.create_task(self._obey(role, pool, pool.change(wanted), wanted, again), name=f"resize {role}")
                self._changes.add(task)
                task.add_done_callback(self._changes.discard)
        return reached

    async def close(self) -> None:
        """Abandons the changes under way; draining goes on in the launcher until its `stop`."""
        for task in self._changes:
            task.cancel()
        await asyncio.gather(*self._changes, return_exceptions=True)

    async def _obey(self, role: str, pool: WorkerPool, change: int, wanted: int, again: bool) -> None:
        try:
            await self._launcher.resize(role, wanted)
        except BatonError as error:
            pool.refuse(change, asyncio.get_running_loop().time())
            if not again:
                self._note(f"{role} pool stays as it is: {error}; trying again every {RETRY_S:g} s")
        else:
            pool.done(change)
