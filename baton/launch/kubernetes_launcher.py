"""The launcher for a release of the chart: the Deployments start and restart its processes, this resizes their pools.

Kubernetes does what the other launchers do themselves: a pod has a name that is never used again, a process that ends or hangs is started
again in its pod after a growing wait, and a pod that goes has its grace. What is left: 1 who owns the size (`check_owner`) → 2 which
pods go, by their load (`idlest`), told to Kubernetes as their deletion cost → 3 the size, with the rights of the caller → 4 waiting until
the new pods have a place, or the old ones are gone. If there is no place in time, the size goes back.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from baton.cluster.errors import BatonError, Reason, invalid
from baton.launch import pods as read
from baton.launch.kubernetes_api import Api, connect
from baton.launch.launcher import PoolManager, ProcessState, Template
from baton.launch.pods import Conflict, Load, Object, ReleaseName

LOOK_EVERY_S = 0.25
CONTROLLERS_S = 2.0  # the controllers read from caches, which follow by a moment, longer on a busy machine
CONFLICTS = 10  # with other changes of a Deployment, until it is given up
GONE_S = 30.0  # on top of a pod's grace, for its node
Loads = Callable[[], Mapping[str, Load]]

log = logging.getLogger(__name__)


def unknown() -> Mapping[str, Load]:
    return {}


class KubernetesLauncher(PoolManager):
    """`context`: of the kubeconfig. `loads`: asked in a thread before a pool shrinks; worker → load. `place_timeout_s`: how long new pods
    may wait for a node. `borrows`: also resizes a pool whose size the chart's values own; whoever asks for that puts it back. `permit`:
    called immediately before a size is written; raises BatonError if that may not be any more."""

    def __init__(
        self,
        release: ReleaseName,
        context: str | None = None,
        loads: Loads = unknown,
        place_timeout_s: float = 60.0,
        borrows: bool = False,
        permit: Callable[[], None] = lambda: None,
    ) -> None:
        self._release = release
        self._context = context
        self._loads = loads
        self._place_timeout_s = place_timeout_s
        self._borrows = borrows
        self._permit = permit
        self._changing = asyncio.Lock()
        self._connected: Api | None = None

    async def start(self) -> None:
        """Connects. Raises ConfigError, and BatonError if there is no such release."""
        self._connected = await asyncio.to_thread(connect, self._context)
        await self._deployments()

    async def add(self, template: Template, count: int) -> None:
        raise invalid("launcher", f"Kubernetes starts the processes of {template.role}: `{self._release.upgrade()}`")

    async def stop(self) -> list[ProcessState]:
        raise invalid("launcher", f"Kubernetes keeps these processes running; to remove them: `{self._release.uninstall()}`")

    async def sizes(self) -> dict[str, int]:
        """The size of each pool that its owner wants."""
        return {role: read.size_of(deployment) for role, deployment in (await self._deployments()).items()}

    async def processes(self) -> list[ProcessState]:
        found = [pod for deployment in (await self._deployments()).values() for pod in await self._pods(deployment)]
        return [read.process_of(pod) for pod in sorted(found, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))]

    async def resize(self, role: str, count: int, only_from: int | None = None) -> list[ProcessState]:
        """`only_from`: nothing is changed if the pool has another size, whoever gave it that meanwhile.

        Raises FORBIDDEN, UNAUTHENTICATED or UNREACHABLE besides, and INVALID_FIELD for a pool that another owns. If pods do not end
        within their grace, raises DEADLINE: the size is as asked then, and Kubernetes goes on."""
        if count < 0:
            raise invalid("count", f"{count} is negative")
        async with self._changing:
            deployments = await self._deployments()
            if role not in deployments:
                raise invalid("role", f"{role} is not one of {', '.join(deployments)}")
            deployment = deployments[role]
            if not (self._borrows and read.owner_of(deployment) == "values"):
                read.check_owner(self._release, deployment, count)
            before = await self._pods(deployment)
            size = read.size_of(deployment)
            if only_from not in (None, size):
                raise taken(role, size)
            if count > size:
                await self._grow(deployment, before, count, only_from)
            if count >= size:
                return []
            going = await self._shrink(deployment, before, count, only_from)
        return await self._gone(deployment, before, count, going)

    async def _shrink(self, deployment: Object, before: list[Object], count: int, only_from: int | None) -> list[str]:
        """Returns the names of the pods that should go."""
        counted = [pod for pod in before if read.counts(pod)]
        loads = await asyncio.to_thread(self._loads)
        going = read.idlest(counted, loads, len(counted) - count)
        try:
            await self._mark(counted, going)
            await self._scale(deployment, count, only_from)
        except BaseException:  # also when cancelled: they stay, so they must not be the first to go the next time
            await asyncio.shield(self._unmark(counted, going))
            raise
        return going

    async def _mark(self, counted: list[Object], going: list[str]) -> None:
        """Makes these pods the first ones to go."""
        cost = str(read.cost_to_go_first(counted))
        for name in going:
            await self._ask("annotate_pod", name, {read.COST: cost})
        if going:
            await asyncio.sleep(CONTROLLERS_S)

    async def _unmark(self, counted: list[Object], names: Collection[str]) -> None:
        """Gives these pods back the cost that they had in `counted`. One that is gone, or cannot be reached, is left as it is."""
        for pod in counted:
            if read.name_of(pod) in names:
                with contextlib.suppress(BatonError):
                    await self._ask("annotate_pod", read.name_of(pod), {read.COST: read.cost_of(pod)})

    async def _grow(self, deployment: Object, before: list[Object], count: int, only_from: int | None) -> None:
        try:
            await self._scale(deployment, count, only_from)
            await self._placed(deployment, before, count)
        except BaseException:  # also when cancelled
            await asyncio.shield(self._put_back(deployment, before, count))
            raise

    async def _placed(self, deployment: Object, before: list[Object], count: int) -> None:
        """Returns when every new pod has a node. Raises SATURATED if that does not happen in time."""
        known = {read.name_of(pod) for pod in before}
        missing = count - read.size_of(deployment)
        fresh: list[Object] = []

        async def look() -> bool:
            nonlocal deployment, fresh
            deployment = (await self._deployments())[read.role_of(deployment)]
            fresh = [pod for pod in await self._pods(deployment) if read.name_of(pod) not in known and read.counts(pod)]
            return len(list(filter(read.is_placed, fresh))) >= missing

        if not await until(look, self._place_timeout_s):
            why = read.obstacle(deployment, fresh) or f"nothing was said within {self._place_timeout_s:g} s"
            raise BatonError(
                Reason.SATURATED, f"{read.role_of(deployment)}: no room for {missing} processes: {why}; the pool keeps its size"
            )

    async def _put_back(self, deployment: Object, before: list[Object], count: int) -> None:
        """The former size, without the new pods; unless someone else has chosen another since."""
        now = (await self._deployments())[read.role_of(deployment)]
        if read.size_of(now) != count:
            return
        known = {read.name_of(pod) for pod in before}
        counted = [pod for pod in await self._pods(now) if read.counts(pod)]
        going = [read.name_of(pod) for pod in counted if read.name_of(pod) not in known]
        await self._mark(counted, going)
        await self._scale(now, read.size_of(deployment), count)
        await self._gone(now, counted, read.size_of(deployment), going)

    async def _gone(self, deployment: Object, before: list[Object], count: int, going: list[str]) -> list[ProcessState]:
        """Waits until the surplus of `before` is gone, which is `going` unless Kubernetes has taken others: it takes one first that has
        stopped being ready. Those that have stayed in its place lose their mark; as long as too many are there, Kubernetes still needs it.
        Returns how each ended, as far as its node told in time."""
        last = {read.name_of(pod): pod for pod in before}
        staying: set[str] = set()

        async def look() -> bool:
            nonlocal staying
            found = {read.name_of(pod): pod for pod in await self._pods(deployment)}
            last.update((name, pod) for name, pod in found.items() if name in last)
            staying = {name for name, pod in found.items() if read.counts(pod)}
            return len(staying) <= count and not (found.keys() & last.keys()) - staying

        patience = max(map(read.grace_s, before), default=0.0) + GONE_S
        in_time = await until(look, patience)
        if len(staying) <= count and (spared := staying.intersection(going)):
            log.warning("%s: Kubernetes has kept %s and taken others", read.role_of(deployment), ", ".join(sorted(spared)))
            await self._unmark(before, spared)
        if not in_time:
            raise BatonError(
                Reason.DEADLINE, f"{read.role_of(deployment)}: after {patience:g} s pods still end; Kubernetes goes on with it"
            )
        return [replace(read.process_of(pod), state="exited") for name, pod in last.items() if name not in staying]

    async def _deployments(self) -> dict[str, Object]:
        found = await asyncio.to_thread(self._api.release, self._release)
        return {role: found[role] for role in read.ROLES if role in found}

    async def _pods(self, deployment: Object) -> list[Object]:
        """Those that exist; one that was evicted has left its object, but not a process."""
        found: list[Object] = await self._ask("pods", read.selector_of(deployment))
        return [pod for pod in found if not read.has_ended(pod)]

    async def _scale(self, deployment: Object, size: int, only_from: int | None) -> None:
        """Writes a size. Other things of a Deployment change all the time, its status first, so a conflict need not mean another size."""
        version = None
        for _ in range(CONFLICTS):
            if only_from is not None:
                deployment = (await self._deployments())[read.role_of(deployment)]
                if (found := read.size_of(deployment)) != only_from:
                    raise taken(read.role_of(deployment), found)
                version = read.version_of(deployment)
            self._permit()
            try:
                await self._ask("scale", read.name_of(deployment), size, version)
                return
            except Conflict as error:
                conflict = error
        raise conflict

    async def _ask(self, method: str, *what: Any) -> Any:
        return await asyncio.to_thread(getattr(self._api, method), self._release.namespace, *what)

    @property
    def _api(self) -> Api:
        assert self._connected is not None, "start() comes first"
        return self._connected


def taken(role: str, size: int) -> BatonError:
    return invalid("role", f"somebody else has made the size of {role} {size}")


async def until(condition: Callable[[], Awaitable[bool]], within_s: float) -> bool:
    """Whether the condition became true in time."""
    deadline = time.monotonic() + within_s
    while not await condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(LOOK_EVERY_S)
    return True
