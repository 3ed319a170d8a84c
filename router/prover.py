"""Lets workers that have started prove themselves (`router.proof`), and serve if they do. One router at a time does so, by a lease in the
registry: two could each admit a first worker on its own word. A router asks for the lease only while somebody waits to be proved.
"""

import asyncio
import logging
from contextlib import suppress

from baton.clock import loop_time
from baton.cluster.errors import BatonError
from baton.cluster.metrics import Children, Counter
from baton.cluster.records import ROLES, WorkerRecord
from baton.cluster.registry import Registry, RegistryUnavailable
from router.members import Health
from router.newcomers import Newcomers
from router.proof import Answers, NoReference, ProvingWorkers, Try, admit, usable
from router.view import ClusterView

log = logging.getLogger(__name__)
LEASE_S = 6.0
RENEW_SHARE = 1 / 3
LOOK_S = 0.5  # and at each change of a member


class Prover:
    def __init__(self, view: ClusterView, workers: ProvingWorkers, registry: Registry, who: str, outcomes: Children[Counter]) -> None:
        """`who`: a name that no other process has. `outcomes`: of proofs, counted."""
        self.newcomers = Newcomers()
        self._view, self._members, self._workers = view, view.members, workers
        self._registry, self._who = registry, who
        self._outcomes = outcomes
        self._known: Answers = {}
        self._term, self._until, self._renew_at = 0, 0.0, 0.0
        self._shape = -1  # of the members, at the last look
        self._changed = asyncio.Event()
        self._members.listen(self._note)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                self._changed.clear()
                self._shape = self._members.shape
                await self._look(group)
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._changed.wait()

    async def close(self) -> None:
        """Lets another router prove at once."""
        if self._term:
            with suppress(RegistryUnavailable):  # the lease ends by itself
                await self._registry.resign(self._who, self._term, "prover")

    def _note(self) -> None:
        if self._members.shape != self._shape:
            self._changed.set()

    async def _look(self, group: asyncio.TaskGroup) -> None:
        found = self._members.newcomers()
        self.newcomers.keep(member.record for member in found)
        if not self.newcomers or not await self._leads():
            return
        able = {member.record.name for member in found if member.health is Health.UP}
        served = {role: {member.record.model_fingerprint for member in self._members.answering(role)} for role in ROLES}
        for worker in self.newcomers.next(able, served, loop_time()):
            group.create_task(self._try(worker, self.newcomers.begin(worker)))

    async def _leads(self) -> bool:
        """Keeps the lease while somebody waits, or takes it. While the registry is away, it runs out."""
        asked = loop_time()  # the lease begins later than this
        if asked >= self._renew_at:
            try:
                self._term = await self._registry.lead(self._who, LEASE_S, self._term, "prover")
            except RegistryUnavailable as error:
                log.debug("the lease was not renewed: %s", error)
            else:
                self._until, self._renew_at = asked + LEASE_S, asked + (LEASE_S * RENEW_SHARE if self._term else 0.0)
        return self._term > 0 and loop_time() < self._until

    async def _try(self, worker: WorkerRecord, which: Try) -> None:
        began = loop_time()
        try:
            serving = await admit(self._workers, usable(self._members, worker), worker, which, self._known)
        except BatonError as error:
            await self._refuse(worker, error)
            return
        for unfit in self._view.note_roles(worker, serving):
            log.warning("%s", unfit)
        self.newcomers.admit(worker)
        self._outcomes["admitted"].inc()
        log.info("%s has proved itself in %.3f s and serves %s", worker.name, loop_time() - began, ", ".join(serving))
        self._changed.set()  # those that waited for the first decode worker

    async def _refuse(self, worker: WorkerRecord, error: BatonError) -> None:
        own = not isinstance(error, NoReference)
        wait_s = self.newcomers.refuse(worker, error.message, loop_time(), own)
        self._outcomes["refused" if own else "undecided"].inc()
        log.warning("%s is kept out: %s; it is tried again in %g s", worker.name, error.message, wait_s)
        if own:
            with suppress(BatonError):  # other routers learn from its record why; one that does not answer cannot tell
                await self._workers.set_roles(worker, worker.proving, prove=True, why=error.message)
