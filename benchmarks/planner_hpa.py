"""The rule with which the benchmarks of the planner compare it, as of a horizontal autoscaler for each pool."""

import math
from collections import deque
from collections.abc import Mapping, Sequence

from baton.cluster.config_planner import PlannerConfig
from baton.cluster.records import ROLES, Load, RoleName
from baton.planner.capacity import PoolSizes


class Autoscaler:
    """Kubernetes' rule: ceil(size * load / target), unchanged within a tenth, down to the highest wish of the last while."""

    def __init__(self, target: Mapping[RoleName, float], config: PlannerConfig) -> None:
        """`target`: sequences for each worker of a role. A pool may have half of the budget at most, and shrinks after the planner's
        `hold_s`."""
        self._target = target
        self._least = {"prefill": config.least_prefill, "decode": config.least_decode}
        self._most, self._hold_s = config.budget // 2, config.hold_s
        self._wished: deque[tuple[float, dict[RoleName, int]]] = deque()

    def wants(self, loads: Mapping[RoleName, Sequence[Load]], now: float) -> PoolSizes:
        """`loads`: of the workers that serve each role."""
        wish: dict[RoleName, int] = {}
        for role in ROLES:
            size = len(loads[role])
            ratio = sum(load.running + load.waiting for load in loads[role]) / (self._target[role] * max(1, size))
            asked = size if abs(ratio - 1) < 0.1 else math.ceil(size * ratio)
            wish[role] = min(self._most, max(self._least[role], asked))
        self._wished.append((now, wish))
        while now - self._wished[0][0] > self._hold_s:
            self._wished.popleft()
        return PoolSizes(*(max(lately[role] for _, lately in self._wished) for role in ROLES))
