"""What `router.watch` and `router.probes` tell a router while nobody fails, for clusters so large that a heartbeat and a probe of each
worker would be most of the simulation: members once, and the load of a worker if it has changed in what is decided by. Block events come
by `baton.simulate.feed`.

A probe of a real router also tells of a change of the free blocks alone, which each sequence that decodes takes one after the other. They
decide nothing, but such an answer also says that work of ours which was sent a round earlier is known there; here that is said when the
work itself shows.
"""

import asyncio
from dataclasses import replace
from itertools import count

from baton.clock import loop_time
from baton.cluster.records import Load, WorkerRecord
from baton.simulate.workers import Fleet
from router.view import ClusterView

LOOK_EVERY_S = 0.5  # as often as `router.probes` asks each worker, with the usual router.hang_s
TIERS_EVERY = 10  # looks: what loading costs changes little, and to tell it is a look at all workers


class Onlooker:
    def __init__(self, view: ClusterView, fleet: Fleet) -> None:
        self._view, self._fleet = view, fleet
        self._seen: list[WorkerRecord] = []
        self._known: dict[str, tuple[int, ...]] = {}  # what was told of each worker's load
        self._shape, self._aside = -1, set[str]()
        self._touches: dict[str, int] = {}  # of each engine when it was looked at

    async def run(self) -> None:
        self._update()
        members, fleet = self._view.members, self._fleet
        for look in count():
            epoch = members.next_epoch()  # as in `router.probes`: an answer reports work that began a round earlier
            await asyncio.sleep(LOOK_EVERY_S)
            if look % TIERS_EVERY == 0:
                for worker in fleet.workers.values():
                    worker.tell_tiers()
            if [worker.record for worker in fleet.workers.values()] != self._seen:
                self._update()
            if members.shape != self._shape:  # who is put aside comes back by an answer
                self._shape, self._aside = members.shape, {name for name in fleet.workers if members.ejected(name)}
            for name, worker in fleet.workers.items():
                touches = worker.engine.touches
                if touches == self._touches.get(name, 0) and name not in self._aside:
                    continue
                record, load = worker.record, worker.load_now()
                self._touches[name] = touches
                if self._known.get(name) != (judged := _judged(load)) or name in self._aside:
                    self._known[name] = judged
                    members.note_answer(name, record.incarnation, record.state, load, epoch, record.roles)

    def _update(self) -> None:
        self._seen = [worker.record for worker in self._fleet.workers.values()]
        loads = {name: worker.load_now() for name, worker in self._fleet.workers.items()}
        self._known = {name: _judged(load) for name, load in loads.items()}
        self._view.update([replace(record, load=loads[record.name]) for record in self._seen], loop_time())
        for record in self._seen:
            self._view.members.note_roles(record.name, record.incarnation, record.roles)


def _judged(load: Load) -> tuple[int, ...]:
    """What of it decides."""
    return load.running, load.waiting, load.credit_tokens, load.waiting_tokens
