"""The pools of a release of the chart: the Deployments' sizes are what is wanted, and `baton.launch.kubernetes_launcher` writes them.

A size is written only if it is still the one that the planner saw (the API server compares the version of the Deployment), and if the lease
has not run out meanwhile. The pods that the planner means are made the first to go; Kubernetes lets them drain. That takes as long as their
requests, and a new pod as long as its node, so both go on while the planner looks on: one change of sizes at a time.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence

from baton.cluster.config import ConfigError
from baton.cluster.errors import BatonError, Reason
from baton.cluster.records import ROLES, Pools
from baton.launch.kubernetes_launcher import KubernetesLauncher
from baton.launch.pods import Load, parse_release
from baton.planner.change import Resize
from baton.planner.sizing import Lease

log = logging.getLogger(__name__)
BUSY: Load = (1.0,)  # of a worker that stays


class KubernetesSizing:
    def __init__(self, release: str, context: str | None = None) -> None:
        """`release`: NAMESPACE/NAME. Raises ConfigError."""
        name = parse_release(release)
        if name is None:
            raise ConfigError(f"planner.release: {release} is not NAMESPACE/RELEASE")
        self._lease: Lease | None = None
        self._staying: Mapping[str, Load] = {}
        self._launcher = KubernetesLauncher(name, context, lambda: self._staying, permit=self._permit)
        self._connected = False
        self._changes: set[asyncio.Task[None]] = set()

    async def wanted(self) -> Pools | None:
        sizes = await self._sizes()
        missing = [role for role in ROLES if role not in sizes]
        if missing:
            raise BatonError(Reason.INVALID_FIELD, f"the release has no Deployment of {' and '.join(missing)}")
        return Pools(sizes["prefill"], sizes["decode"])

    async def resize(self, lease: Lease, asked: Resize, leaving: Sequence[str]) -> str:
        if self._changes:
            return "the last change of the pools is not over yet"
        now = await self.wanted()
        if now != asked.before:
            return "somebody has asked for other sizes"
        known = [process.name for process in await self._launcher.processes()]
        self._lease, self._staying = lease, {name: BUSY for name in known if name not in leaving}
        begun = []
        for role in ROLES:
            before, after = getattr(asked.before, role), getattr(asked.pools, role)
            if before != after:
                begun.append(asyncio.create_task(self._change(role, before, after), name=f"resize {role}"))
        self._changes.update(begun)
        for task in begun:
            task.add_done_callback(self._changes.discard)
        return ""

    def in_pool(self, worker: str, pool: str) -> bool:
        """All of the release's are; nobody joins such a cluster from elsewhere."""
        return True

    async def close(self) -> None:
        """Leaves what Kubernetes does to Kubernetes."""
        for task in self._changes:
            task.cancel()
        await asyncio.gather(*self._changes, return_exceptions=True)

    async def _sizes(self) -> dict[str, int]:
        if not self._connected:
            await self._launcher.start()
            self._connected = True
        return await self._launcher.sizes()

    async def _change(self, role: str, before: int, after: int) -> None:
        try:
            await self._launcher.resize(role, after, before)
        except BatonError as error:
            log.warning("%s pool %d → %d: %s", role, before, after, error)
        else:
            log.info("%s pool has %d workers", role, after)

    def _permit(self) -> None:
        """Asked immediately before a size is written. Raises BatonError."""
        if self._lease is None or not self._lease.holds():
            raise BatonError(Reason.INVALID_FIELD, "this planner does not lead any more")
