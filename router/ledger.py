"""Which of our requests is on which worker.

A set of requests per worker, not a counter: ending a request twice, or after the worker has left, changes nothing.
"""

from collections import Counter
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
        self._ended: Counter[tuple[str, int]] = Counter()  # worker, incarnation → tokens that ended since the last report

    def start(self, request_id: str, worker: str, task: Task) -> None:
        self.end(request_id)
        self._places[request_id] = worker
        self._tasks.setdefault(worker, {})[request_id] = task

    def end(self, request_id: str) -> None:
        worker = self._places.pop(request_id, None)
        if worker is None:
            return
        task = self._tasks[worker].pop(request_id)
        self._ended[worker, task.incarnation] += task.tokens
        if not self._tasks[worker]:
            del self._tasks[worker]

    def tokens(self, record: WorkerRecord, since: int = 0) -> int:
        """Tokens on the process that `record` describes. What an earlier process of that name had is lost."""
        tasks = self._tasks.get(record.name, {}).values()
        return sum(task.tokens for task in tasks if task.incarnation == record.incarnation and task.since >= since)

    def count(self, record: WorkerRecord) -> int:
        """Requests on that process."""
        return sum(task.incarnation == record.incarnation for task in self._tasks.get(record.name, {}).values())

    def recent_tokens(self, record: WorkerRecord) -> int:
        """As `tokens`, plus what has ended since the last report."""
        return self.tokens(record) + self._ended[record.name, record.incarnation]

    def note_update(self) -> None:
        self._ended.clear()

    def note_report(self, record: WorkerRecord) -> None:
        self._ended.pop((record.name, record.incarnation), None)
