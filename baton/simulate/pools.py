"""What `baton.launch` does for a real cluster, in virtual time: it follows the wanted sizes of the pools. Workers take `start_s` to start,
and those that go are drained; the newest go first. It also lets workers change their role, and counts what they cost."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from baton.clock import loop_time
from baton.cluster.errors import BatonError, Reason
from baton.cluster.records import ROLES, Pools, RoleName, WorkerRecord
from baton.simulate.cluster import SimulatedCluster, Sizes, worker

LOOK_EVERY_S = 0.25
BEAT_EVERY_S = 1.0
DRAINED_S = 2.0  # by then, every router knows that a worker drains


class SimulatedPools:
    def __init__(self, cluster: SimulatedCluster, sizes: Sizes, start_s: float, flip_s: float = 0.1) -> None:
        """`flip_s`: from the wish that a worker serves another role until it does."""
        self._cluster, self._sizes = cluster, sizes
        self._start_s, self._flip_s = start_s, flip_s
        self._next = {"prefill": sizes.prefill, "decode": sizes.decode}
        self._starting: dict[str, asyncio.Task[None]] = {}
        self._draining: dict[str, asyncio.Task[None]] = {}
        self._flipping: set[asyncio.Task[None]] = set()
        self._counted = loop_time()
        self.worker_s = 0.0  # of all workers so far, from the wish that they start until they are gone
        self.history: list[tuple[float, int, int]] = []  # when so many began to serve each role

    async def run(self) -> None:
        await self._cluster.registry.desire(Pools(self._sizes.prefill, self._sizes.decode))
        beat = 0.0
        while True:
            wanted = await self._cluster.registry.desired()
            self.count()
            if wanted is not None:
                for role in ROLES:
                    self._reconcile(role, getattr(wanted, role))
            if loop_time() >= beat:
                beat = loop_time() + BEAT_EVERY_S
                await self._cluster.beat()
            self._note()
            await asyncio.sleep(LOOK_EVERY_S)

    async def close(self) -> None:
        self.count()
        for task in [*self._starting.values(), *self._draining.values(), *self._flipping]:
            task.cancel()

    def count(self) -> None:
        now = loop_time()
        self.worker_s += (now - self._counted) * (len(self._cluster.fleet.workers) + len(self._starting))
        self._counted = now

    def set_roles(self, name: str, roles: Sequence[RoleName]) -> None:
        """Raises BatonError for a worker that is not there, or drains."""
        if name not in self._cluster.fleet.workers or name in self._draining:
            raise BatonError(Reason.DRAINING, f"{name} is not there")
        task = asyncio.get_running_loop().create_task(self._flip(name, tuple(roles)))
        self._flipping.add(task)
        task.add_done_callback(self._flipping.discard)

    def serving(self, role: RoleName) -> int:
        records = [worker.record for worker in self._cluster.fleet.workers.values()]
        return sum(record.serves(role) and record.state == "ready" for record in records)

    async def _flip(self, name: str, roles: tuple[RoleName, ...]) -> None:
        await asyncio.sleep(self._flip_s)
        if name in self._cluster.fleet.workers:
            self._change(name, replace(self._cluster.fleet.workers[name].record, roles=roles))

    def _reconcile(self, pool: RoleName, size: int) -> None:
        fleet = self._cluster.fleet.workers
        there = sorted((name for name, one in fleet.items() if one.record.pool == pool and name not in self._draining), key=_number)
        coming = sorted((name for name in self._starting if name.startswith(f"{pool}-")), key=_number)
        surplus = len(there) + len(coming) - size
        for _ in range(-surplus):
            name = f"{pool}-{self._next[pool]}"
            self._next[pool] += 1
            self._starting[name] = asyncio.get_running_loop().create_task(self._start(name, pool))
        for name in [*there, *coming][::-1][: max(0, surplus)]:
            if name in self._starting:
                self._starting.pop(name).cancel()
            else:
                self._draining[name] = asyncio.get_running_loop().create_task(self._drain(name))

    async def _start(self, name: str, pool: RoleName) -> None:
        await asyncio.sleep(self._start_s)
        record = worker(name, pool, self._sizes)
        self._cluster.fleet.add(record)
        self._cluster.records.append(record)
        self.count()
        del self._starting[name]

    async def _drain(self, name: str) -> None:
        record = replace(self._cluster.fleet.workers[name].record, state="draining")
        self._change(name, record)
        await self._cluster.registry.join(record)
        await asyncio.sleep(DRAINED_S)
        while not self._cluster.fleet.idle(name):
            await asyncio.sleep(LOOK_EVERY_S)
        self.count()
        self._cluster.records[:] = [each for each in self._cluster.records if each.name != name]
        await self._cluster.fleet.remove(name)
        await self._cluster.registry.leave(name, record.incarnation)
        del self._draining[name]

    def _change(self, name: str, record: WorkerRecord) -> None:
        self._cluster.fleet.workers[name].record = record

    def _note(self) -> None:
        sizes = self.serving("prefill"), self.serving("decode")
        if not self.history or self.history[-1][1:] != sizes:
            self.history.append((loop_time(), *sizes))


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
