"""What the planner sees of the cluster, what it can change, and the life of a change.

    event →     act       there      proved     late        refuse    undo
    proposed    acting                                      undone
    acting                proving               timed_out   undone
    proving                          settled    timed_out   timed_out
    timed_out                                                         undone

A planner that takes over goes on with the change that the one before it noted (`Change.noted`), from `acting`.

`act`: it was written where the launchers, or the worker, read it. `there`: the workers that it meant are there. `proved`: they have served
as long as a new worker is thought to be cold. `refuse`: it was not accepted, or a worker turned out bad. `late`: its time is over. One
change at a time is alive.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import ClassVar

from pydantic import TypeAdapter, ValidationError

from baton.cluster.records import ROLES, Pools, RoleName
from baton.moves import Moves
from baton.planner.capacity import PoolSizes


class ChangeState(Enum):
    PROPOSED = "proposed"
    ACTING = "acting"
    PROVING = "proving"
    SETTLED = "settled"
    TIMED_OUT = "timed out"
    UNDONE = "undone"


MOVES = Moves(
    {
        (ChangeState.PROPOSED, "act"): ChangeState.ACTING,
        (ChangeState.PROPOSED, "refuse"): ChangeState.UNDONE,
        (ChangeState.ACTING, "there"): ChangeState.PROVING,
        (ChangeState.ACTING, "late"): ChangeState.TIMED_OUT,
        (ChangeState.ACTING, "refuse"): ChangeState.UNDONE,
        (ChangeState.PROVING, "proved"): ChangeState.SETTLED,
        (ChangeState.PROVING, "late"): ChangeState.TIMED_OUT,
        (ChangeState.PROVING, "refuse"): ChangeState.TIMED_OUT,
        (ChangeState.TIMED_OUT, "undo"): ChangeState.UNDONE,
    }
)
OVER = (ChangeState.SETTLED, ChangeState.UNDONE)


@dataclass(frozen=True, slots=True)
class Worker:
    """`since`: when this planner first saw this process serve these roles. `pool`: the role that it was started in; empty: it is in none of
    the pools that are sized here."""

    name: str
    pool: str
    serves: tuple[RoleName, ...]
    since: float
    draining: bool = False
    busy: int = 0  # sequences that it has
    waiting_tokens: int = 0  # of prompts, not computed yet

    @property
    def number(self) -> int:
        tail = self.name.rpartition("-")[2]
        return int(tail) if tail.isdigit() else 0


@dataclass(frozen=True, slots=True)
class Seen:
    """The cluster at one moment. `at`: when the newest figure in it was counted. `wanted`: sizes of the pools; None: no supervisor keeps
    any. `starting`: workers of each pool that have not joined yet."""

    at: float
    workers: tuple[Worker, ...]
    wanted: Pools | None
    starting: Mapping[str, int] = field(default_factory=dict)

    def of(self, pool: RoleName, draining: bool = False) -> list[Worker]:
        """A pool's workers in the order in which a launcher started them."""
        found = [worker for worker in self.workers if worker.pool == pool and worker.draining == draining]
        return sorted(found, key=lambda worker: (worker.number, worker.name))

    def serving(self, role: RoleName) -> list[Worker]:
        return [worker for worker in self.workers if role in worker.serves and not worker.draining]

    @property
    def sizes(self) -> PoolSizes:
        return PoolSizes(len(self.serving("prefill")), len(self.serving("decode")))

    def alive(self, pool: RoleName) -> int:
        """Workers of a pool that are there or starting, without those that drain."""
        return len(self.of(pool)) + self.starting.get(pool, 0)

    def most(self, wanted: Pools) -> dict[str, int]:
        """How many workers each pool may have at one time on its way to the wanted size: those that drain are still there."""
        return {pool: max(self.alive(pool), getattr(wanted, pool)) + len(self.of(pool, draining=True)) for pool in ROLES}


@dataclass(frozen=True, slots=True)
class Resize:
    """Asks the launchers for these sizes of the pools, `before` being what they were."""

    pools: Pools
    before: Pools

    def __str__(self) -> str:
        steps = [f"{pool} pool {getattr(self.before, pool)} → {getattr(self.pools, pool)}" for pool in ROLES]
        return ", ".join(step for step, pool in zip(steps, ROLES, strict=True) if getattr(self.before, pool) != getattr(self.pools, pool))

    @property
    def kind(self) -> str:
        return "grow" if self.grows else "shrink"

    @property
    def grows(self) -> bool:
        return self.pools.prefill > self.before.prefill or self.pools.decode > self.before.decode


@dataclass(frozen=True, slots=True)
class Flip:
    """Lets a running worker serve another role."""

    worker: str
    to: RoleName
    before: RoleName
    kind: ClassVar[str] = "flip"

    def __str__(self) -> str:
        return f"{self.worker} serves {self.to} instead of {self.before}"

    def back(self) -> "Flip":
        return Flip(self.worker, self.before, self.to)


Action = Resize | Flip


def sized(pools: Pools, sizes: Mapping[str, int]) -> Pools:
    """The pools, some with these sizes."""
    return replace(pools, prefill=sizes.get("prefill", pools.prefill), decode=sizes.get("decode", pools.decode))


@dataclass(frozen=True, slots=True)
class Change:
    number: int
    action: Action
    sizes: PoolSizes  # that serve when it has settled
    deadline: float
    began: float
    state: ChangeState = ChangeState.PROPOSED
    there: float = 0.0  # when its workers were
    why: str = ""  # it was undone

    def after(self, event: str, why: str = "") -> "Change":
        """Raises IllegalMove."""
        return replace(self, state=MOVES.after(self.state, event, f"change {self.number}"), why=why or self.why)

    @property
    def alive(self) -> bool:
        return self.state not in OVER

    def noted(self, now: float) -> bytes:
        """A note to the planner that may take over. Durations alone: no two hosts have one clock."""
        made = _Noted(self.number, self.action, asdict(self.sizes), max(0.0, self.deadline - now), now - self.began, self.alive)
        return _NOTED.dump_json(made)

    @classmethod
    def of_note(cls, note: bytes, now: float) -> "Change":
        """The change that the planner before left: it may have been made or not. Raises ValueError."""
        try:
            told = _NOTED.validate_json(note)
            sizes = PoolSizes(**told.sizes)
        except (ValidationError, TypeError) as error:
            raise ValueError(f"this is no note of a change: {error}") from None
        state = ChangeState.ACTING if told.alive else ChangeState.SETTLED
        return cls(told.number, told.action, sizes, now + told.left_s, now - told.took_s, state)

    def done(self, seen: Seen) -> bool:
        """Whether what it asked for is there."""
        if isinstance(self.action, Flip):
            return any(worker.name == self.action.worker and worker.serves == (self.action.to,) for worker in seen.workers)
        wanted = self.action.pools
        return all(len(seen.of(pool)) == getattr(wanted, pool) and not seen.of(pool, draining=True) for pool in ROLES)


@dataclass(frozen=True, slots=True)
class _Noted:
    number: int
    action: Resize | Flip
    sizes: dict[str, int]
    left_s: float
    took_s: float
    alive: bool


_NOTED = TypeAdapter(_Noted)
