"""What the planner decides by, what it remembers, and what it decides."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.cluster.records import Pools, RoleName
from baton.planner.capacity import Effect, PoolSizes
from baton.planner.change import Action, Change
from baton.planner.demand import Demand


class Refusal(str):
    """Why something is not done. `kind`: one of `baton.cluster.metric_table.REFUSALS`."""

    kind = "other"

    @classmethod
    def of(cls, kind: str, why: str) -> "Refusal":
        made = cls(why)
        made.kind = kind
        return made


def kind_of(refusal: str) -> str:
    return refusal.kind if isinstance(refusal, Refusal) else Refusal.kind


NONE = Refusal()


@dataclass(frozen=True, slots=True)
class PlannerRules:
    """Seconds and workers. `target`: share of requests that should meet each objective. `costs`: what a worker of each pool takes of the
    budget. `cold_s`: what a worker does so soon after it started or changed its role says nothing. `margin`: a pool shrinks only if what is
    left would also serve so much more than was forecast half of `hold_s`. `spares`: workers of each role that are kept beyond what the load
    needs."""

    least: PoolSizes
    most: PoolSizes
    budget: float
    costs: tuple[float, float] = (1.0, 1.0)
    target: float = 0.95
    flips: bool = True
    margin: float = 0.15
    spares: int = 0
    cooldown_s: float = 30.0
    hold_s: float = 180.0
    start_timeout_s: float = 300.0
    flip_timeout_s: float = 30.0
    cold_s: float = 10.0
    stale_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Need:
    """The sizes that a load needed at one moment: to grow to, and, with the margin, to shrink to."""

    at: float
    grow: PoolSizes
    shrink: PoolSizes


@dataclass(frozen=True, slots=True)
class RoleHold:
    """How many times `hold_s` workers of a role must not have been needed before they go. `shrunk`: when some went last; None: none did, or
    they were missed."""

    times: float = 1.0
    shrunk: float | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """A pressure that was raised, to see whether more workers help. `sizes`, `pressure`, `missed`: those that served, what it was, and the
    share of requests that missed an objective, before."""

    role: RoleName
    sizes: PoolSizes
    pressure: tuple[float, float]
    missed: float


@dataclass(frozen=True, slots=True)
class Memory:
    """What was decided before. `pressure`: by how much each role needs more than the model says, from misses that it did not foresee.
    `reach`: the share of requests that can meet the objectives, whatever the sizes; `misses`: shares that missed one, of the last intervals
    with too many.
    `blocked`: pools that could not grow and workers that did not flip: until when, and the wait after that. `holds`: of roles whose workers
    have gone."""

    change: Change | None = None
    changes: int = 0
    ended: float = -1e9  # the last change
    flipped: tuple[float, RoleName] | None = None  # when, and to what
    needs: tuple[Need, ...] = ()
    blocked: tuple[tuple[str, float, float], ...] = ()
    pressure: tuple[float, float] = (1.0, 1.0)
    raised: int = 0  # how often
    trial: Trial | None = None  # the oldest that is not judged
    reach: float = 1.0
    misses: tuple[float, ...] = ()
    learned: int = -1  # the last interval that was
    awaited: tuple[Pools, float] | None = None  # the sizes that are wanted, and since when
    holds: Mapping[RoleName, RoleHold] = field(default_factory=dict)

    def hold_s(self, role: RoleName, rules: PlannerRules) -> float:
        """How long workers of a role must not have been needed before they go."""
        return rules.hold_s * self.holds.get(role, RoleHold()).times


@dataclass(frozen=True, slots=True)
class Alternative:
    sizes: PoolSizes
    effect: Effect
    verdict: str


@dataclass(frozen=True, slots=True)
class Decision:
    """`action` None: nothing changes, and `why` says why. `expected`: of the sizes that serve afterwards."""

    action: Action | None
    why: str
    sizes: PoolSizes
    demand: Demand
    after: PoolSizes
    now: Effect | None = None
    expected: Effect | None = None
    alternatives: tuple[Alternative, ...] = ()
    memory: Memory = field(default=Memory(), repr=False)
    undoes: bool = False  # the action takes back one that did not come about; it is no change of its own
    refused: tuple[str, ...] = ()  # kinds of the refusals that led to it
    need: PoolSizes | None = None  # what the load needs; None: that was not looked at
