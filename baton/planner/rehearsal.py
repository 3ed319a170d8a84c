"""The planner with a simulated cluster: the same controller, and the router's own code, in virtual time."""

from collections.abc import Sequence

from baton.cluster.records import RoleName
from baton.planner.demand import Interval
from baton.planner.doors import to_interval
from baton.simulate.cluster import SimulatedCluster
from baton.simulate.pools import SimulatedPools
from router.curves import merge


class SimulatedDoors:
    """`baton.planner.controller.Doors`"""

    def __init__(self, cluster: SimulatedCluster, pools: SimulatedPools) -> None:
        self._cluster, self._pools = cluster, pools

    async def counts(self) -> list[Interval]:
        await self._cluster.fleet.ask()
        journals = [router.journal for router in self._cluster.routers]
        for journal in journals:
            for entry in journal.open_entries:
                journal.follow(entry)
        return [to_interval(point) for point in merge(point for journal in journals for point in journal.drawn_since(0))]

    async def set_roles(self, worker: str, roles: Sequence[RoleName], timeout_s: float) -> None:
        """Raises BatonError."""
        self._pools.set_roles(worker, roles)
