"""Keeps the view up to date: members, block events, snapshots, and the state of each worker (`router.probes`).

Each of the four loops survives whatever the registry or a worker does. While the registry is away, the last known members stay, and only
failed calls and probes decide which workers are down.
"""

import asyncio
import logging
from contextlib import aclosing
from dataclasses import replace

from baton.clock import loop_time
from baton.cluster.config import Config
from baton.cluster.errors import BatonError, Reason
from baton.cluster.records import Pools, StartRecord, WorkerRecord
from baton.cluster.registry import Registry, RegistryUnavailable
from router.members import Joined, Left, Reincarnated
from router.plans import NOTES, Plans
from router.prefix_index import Applied, Filling
from router.probes import Probes
from router.served import Refused
from router.view import ClusterView
from router.workers import WatchedWorkers

log = logging.getLogger(__name__)
MEMBERS_EVERY_S = 0.25
SNAPSHOT_EVERY_S = 0.2
SNAPSHOT_AT_LEAST_EVERY_S = 10.0  # however often it has failed
EVENTS_WAIT_S = 1.0
AWAY_S = 0.5  # pause before asking the registry again after a failure
SLICE_KEYS = 4096  # that are put into the index in one turn of the event loop
LONGEST_NAME = 64  # of a cluster; the chart cuts longer ones


def outside_of(config: Config) -> str:
    """NAMESPACE/RELEASE of a cluster that Kubernetes runs, as the chart's name for it says; empty for any other."""
    if config.launcher.kind != "kubernetes":
        return ""
    namespace, dot, release = config.cluster.name.partition(".")
    return f"{namespace}/{release}" if dot and len(config.cluster.name) < LONGEST_NAME else "NAMESPACE/RELEASE"


class Watch:
    def __init__(self, view: ClusterView, registry: Registry, workers: WatchedWorkers, hang_s: float, outside: str = "") -> None:
        """`outside`: NAMESPACE/RELEASE, if Kubernetes runs this cluster: nothing there reads what a router wishes for."""
        self._outside = outside
        self._view = view
        self._registry = registry
        self._workers = workers
        self._probes = Probes(view, workers, hang_s)
        self.registry_reachable = False
        self.reached = 0  # how often the registry became reachable

    @property
    def reconnects(self) -> int:
        return max(0, self.reached - 1)

    async def wanted(self) -> Pools | None:
        """The sizes to which a supervisor keeps the pools. None: nobody does, or the registry does not answer."""
        try:
            return await self._registry.desired()
        except RegistryUnavailable:
            return None

    async def resize(self, prefill: int | None, decode: int | None) -> Pools:
        """Writes the wanted sizes of the pools into the registry; None keeps a size. Raises RegistryUnavailable,
        and INVALID_FIELD where nothing would read them."""
        if self._outside:
            way = f"`baton scale --kubernetes {self._outside}`, where a kubeconfig is"
            raise BatonError(Reason.INVALID_FIELD, f"Kubernetes runs this cluster, and no pod may change it: {way}")
        now = await self._registry.desired() or Pools(1, 1)
        wanted = replace(now, prefill=now.prefill if prefill is None else prefill, decode=now.decode if decode is None else decode)
        await self._registry.desire(wanted)
        return wanted

    async def starts(self) -> list[StartRecord]:
        """WatchedWorkers that are starting; none while the registry is away."""
        try:
            return await self._registry.starts()
        except RegistryUnavailable:
            return []

    async def plans(self) -> Plans | None:
        """What planners have decided lately. None: the registry does not answer."""
        try:
            leader, notes = await self._registry.leader(), await self._registry.noted_plans(NOTES)
        except RegistryUnavailable:
            return None
        return Plans.of(leader.partition(" ")[0], notes)

    async def end(self) -> bool:
        """Writes into the registry that the cluster should end. Returns False if no supervisor reads that. Raises RegistryUnavailable,
        and INVALID_FIELD on Kubernetes."""
        if self._outside:
            namespace, _, release = self._outside.partition("/")
            way = f"`helm -n {namespace} uninstall {release}`"
            raise BatonError(Reason.INVALID_FIELD, f"Kubernetes runs this cluster, and no pod may end it: {way}")
        now = await self._registry.desired()
        if now is not None:
            await self._registry.desire(replace(now, stop=True))
        return now is not None

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._run_members())
            group.create_task(self._run_events())
            group.create_task(self._run_snapshots())
            group.create_task(self._probes.run())

    async def _run_members(self) -> None:
        while True:
            try:
                members = await self._registry.members()
                self._note(True)
                await self._apply(members)
                await asyncio.sleep(MEMBERS_EVERY_S)
            except RegistryUnavailable as error:
                self._note(False, error)
                await asyncio.sleep(AWAY_S)

    async def _apply(self, members: list[WorkerRecord]) -> None:
        for fact in self._view.update(members, loop_time()):
            match fact:
                case Joined(worker):
                    self._workers.welcome(worker)
                    log.info("%s joined: %s incarnation %d", worker.name, worker.address, worker.incarnation)
                case Left(worker):
                    log.info("%s left", worker.name)
                    await self._workers.forget(worker)
                case Reincarnated(old, new):
                    log.info("%s is another process now: %s incarnation %d", new.name, new.address, new.incarnation)
                    await self._workers.forget(old)
                case Refused():
                    log.warning("%s", fact)

    async def _run_events(self) -> None:
        cursor = None
        while True:
            try:
                events, cursor = await self._registry.events(cursor, EVENTS_WAIT_S)
            except RegistryUnavailable:
                await asyncio.sleep(AWAY_S)
                continue
            done = 0
            for event in events:
                self._view.apply(event)
                done += 1 + len(event.keys)
                if done >= SLICE_KEYS:
                    done = 0
                    await asyncio.sleep(0)

    async def _run_snapshots(self) -> None:
        """Asks a worker, after a missed event, for its whole cache until that is known."""
        asked: set[str] = set()
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(SNAPSHOT_EVERY_S)
                self._view.sweep(SLICE_KEYS)
                for name in set(self._view.needing_snapshot()) - asked:
                    asked.add(name)
                    group.create_task(self._ask_snapshots(name, asked))

    async def _ask_snapshots(self, name: str, asked: set[str]) -> None:
        """Pauses longer after failures, because each attempt costs the worker's engine a copy of all keys. Removes `name` from `asked`."""
        pause = SNAPSHOT_EVERY_S
        while name in self._view.needing_snapshot() and (worker := self._view.members.find(name)) is not None:
            try:
                await self._read_snapshot(worker)
            except BatonError as error:
                log.debug("no snapshot of %s: %s", name, error)
                pause = min(2 * pause, SNAPSHOT_AT_LEAST_EVERY_S)
            await asyncio.sleep(pause)
        asked.discard(name)

    async def _read_snapshot(self, worker: WorkerRecord) -> None:
        """Page by page: a million keys at once would take half a second. Raises BatonError."""
        async with aclosing(self._workers.snapshot(worker)) as pages:
            filling: Filling | Applied | None = None
            try:
                async for page in pages:
                    if filling is None:
                        filling = self._view.fill(worker.name, page.incarnation, page.sequence)
                    if not isinstance(filling, Filling):
                        return
                    filling.add(page.keys, page.medium)
                    await asyncio.sleep(0)
                if isinstance(filling, Filling):
                    filling.end()
                    filling = None
            finally:
                if isinstance(filling, Filling):
                    filling.drop()

    def _note(self, reachable: bool, error: BaseException | None = None) -> None:
        if reachable != self.registry_reachable:
            log.info("registry is %s", "reachable" if reachable else f"unreachable: {error}")
            self.reached += reachable
        self.registry_reachable = reachable
