"""What `router.watch` and `router.probes` tell a router while nobody fails, for clusters so large that a heartbeat and a probe of each
worker would be most of the simulation: members once, block events as they come, and the load of the workers that have done something."""

import asyncio
from dataclasses import replace

from baton.clock import loop_time
from baton.cluster.records import WorkerRecord
from baton.cluster.registry import Registry
from baton.simulate.workers import Fleet
from router.view import ClusterView

LOOK_EVERY_S = 0.5  # as often as `router.probes` asks each worker, with the usual router.hang_s
EVENTS_WAIT_S = 1.0


class Onlooker:
    def __init__(self, view: ClusterView, registry: Registry, fleet: Fleet) -> None:
        self._view, self._registry, self._fleet = view, registry, fleet
        self._seen: list[WorkerRecord] = []
        self._laps = dict.fromkeys(fleet.workers, 0)  # steps and commands of each worker when it was looked at

    async def run(self) -> None:
        self._update()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._run_events())
            group.create_task(self._run_loads())

    async def _run_events(self) -> None:
        cursor = None
        while True:
            events, cursor = await self._registry.events(cursor, EVENTS_WAIT_S)
            for event in events:
                self._view.apply(event)

    async def _run_loads(self) -> None:
        members = self._view.members
        while True:
            epoch = members.next_epoch()  # as in `router.probes`: an answer reports work that began a round earlier
            await asyncio.sleep(LOOK_EVERY_S)
            if [worker.record for worker in self._fleet.workers.values()] != self._seen:
                self._update()
            for name, worker in self._fleet.workers.items():
                laps, record = worker.engine.activity()[0], worker.record
                if laps != self._laps.get(name, 0):
                    self._laps[name] = laps
                    members.note_answer(name, record.incarnation, record.state, worker.load_now(), epoch, record.roles)

    def _update(self) -> None:
        self._seen = [worker.record for worker in self._fleet.workers.values()]
        self._view.update([replace(worker.record, load=worker.load_now()) for worker in self._fleet.workers.values()], loop_time())
        for record in self._seen:
            self._view.members.note_roles(record.name, record.incarnation, record.roles)
