"""Whether a worker whose connection was lost still lives."""

import asyncio

from baton.cluster.errors import BatonError
from baton.cluster.records import WorkerRecord
from router.workers import Workers

CONFIRM_S = 1.0  # for it to answer; a process that is gone refuses at once


class Life:
    def __init__(self, workers: Workers, hang_s: float) -> None:
        self._workers = workers
        self._hang_s = hang_s
        self._asked: dict[tuple[str, int], asyncio.Task[bool]] = {}  # workers whose life is in question

    async def confirmed(self, worker: WorkerRecord) -> bool:
        """Whether only the connection was lost: the same process answers, and its engine makes progress. This happens with every worker
        after this router was stopped for a while. All requests that it served ask this at once, so they share one probe."""
        identity = worker.name, worker.incarnation
        if identity not in self._asked:
            asked = self._asked[identity] = asyncio.create_task(self._answers(worker))
            asked.add_done_callback(lambda _: self._asked.pop(identity))
        return await asyncio.shield(self._asked[identity])

    async def _answers(self, worker: WorkerRecord) -> bool:
        try:
            answer = await self._workers.probe(worker, CONFIRM_S)
        except BatonError:
            return False
        return answer.stalled_s < self._hang_s
