"""Which of our requests is on which worker.

A set of requests per worker, not a counter: ending a request twice, or after the worker has left, changes nothing.
"""

from dataclasses import dataclass

from baton.cluster.records import WorkerRecord


@dataclass(frozen=True, slots=True)
class Task:
    incarnation: int
    tokens: int
    since: int  # the epoch in which it started


class Ledger:
    def __init__(self) -> None:
        self._tasks: dict[str, dict[str, Task]] = {}  # worker → request → task
        self._places: dict[str, str] = {}  # request → worker

    def start(self, request_id: str, worker: str, task: Task) -> None:
        self.end(request_id)
        self._places[request_id] = worker
        self._tasks.setdefault(worker, {})[request_id] = task

    def end(self, request_id: str) -> None:
        worker = self._places.pop(request_id, None)
        if worker is None:
            return
        del self._tasks[worker][request_id]
        if not self._tasks[worker]:
            del self._tasks[worker]

    def tokens(self, record: WorkerRecord, since: int = 0) -> int:
        """Tokens on the process that `record` describes. What an earlier process of that name had is lost."""
        tasks = self._tasks.get(record.name, {}).values()
        return sum(task.tokens for task in tasks if task.incarnation == record.incarnation and task.since >= since)

    def count(self, record: WorkerRecord) -> int:
        """Requests on that process."""
        return sum(task.incarnation == record.incarnation for task in self._tasks.get(record.name, {}).values())
