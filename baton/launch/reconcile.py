"""Bringing the pools to the sizes that somebody wishes for.

`Pool` decides: it is told wishes and outcomes and says what to ask of the launcher; it knows no clock and awaits nothing. `Reconciler`
obeys: it reads the wishes from the registry and runs each change as a task of its own, so that a pool that drains for half a minute
delays neither the next wish nor anything else.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from baton.cluster.errors import BatonError
from baton.cluster.records import Pools
from baton.cluster.registry import Registry, RegistryUnavailable
from baton.launch.launcher import Launcher

RETRY_S = 5.0  # after a refusal: room may be found later


class Phase(Enum):
    SETTLED = "settled"
    CHANGING = "changing"
    REFUSED = "refused"


# (phase, event) → phase. A wish overtakes a change under way: the launcher carries them out in order, and only draining takes long.
MOVES = {
    (Phase.SETTLED, "change"): Phase.CHANGING,
    (Phase.CHANGING, "change"): Phase.CHANGING,
    (Phase.CHANGING, "done"): Phase.SETTLED,
    (Phase.CHANGING, "refuse"): Phase.REFUSED,
    (Phase.REFUSED, "change"): Phase.CHANGING,
}


class IllegalPhase(RuntimeError):
    """An event that the phase does not know. Nothing was changed."""


@dataclass(slots=True)
class Pool:
    """One pool: the size that was last asked of the launcher, and what became of that."""

    asked: int
    phase: Phase = Phase.SETTLED
    retry_at: float = 0.0
    changes: int = 0  # so far; the outcome of one that was overtaken says nothing

    def decide(self, wanted: int, now: float) -> bool:
        """Whether to ask for `wanted` at this moment."""
        if wanted != self.asked:
            return True
        return self.phase is Phase.REFUSED and now >= self.retry_at

    def change(self, wanted: int) -> int:
        """`wanted` is being asked for. Returns the number of this change."""
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
        target = MOVES.get((self.phase, event))
        if target is None:
            raise IllegalPhase(f"the pool is {self.phase.value}: {event!r} is not possible")
        self.phase = target


class Reconciler:
    """`note` tells the person who waits. `step` is called again and again; it asks the registry and never waits for a change."""

    def __init__(self, launcher: Launcher, registry: Registry, sizes: Pools, note: Callable[[str], None]) -> None:
        self._launcher = launcher
        self._registry = registry
        self._wanted = sizes
        self._pools = {"prefill": Pool(sizes.prefill), "decode": Pool(sizes.decode)}
        self._note = note
        self._changes: set[asyncio.Task[None]] = set()

    async def step(self) -> bool:
        """Obeys the latest wish. False while the registry is away; the last wish known then stands."""
        reached = True
        try:
            if (wish := await self._registry.desired()) is None:
                await self._registry.desire(
                    self._wanted
                )  # a registry that lost everything: `baton scale` reads the other pool's size there
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
        """What was begun is given up; draining goes on in the launcher until its `stop`."""
        for task in self._changes:
            task.cancel()
        await asyncio.gather(*self._changes, return_exceptions=True)

    async def _obey(self, role: str, pool: Pool, change: int, wanted: int, again: bool) -> None:
        try:
            await self._launcher.resize(role, wanted)
        except BatonError as error:
            pool.refuse(change, asyncio.get_running_loop().time())
            if not again:
                self._note(f"{role} pool stays as it is: {error}; trying again every {RETRY_S:g} s")
        else:
            pool.done(change)
