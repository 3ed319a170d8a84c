"""Which of our requests is on which worker.

A set of requests per worker, not a counter: ending a request twice, or after the worker has left, changes nothing. Sums are kept beside it,
because every choice of a worker asks for those of all workers: a walk over what runs there would cost each request more, the more others
there are.
"""

from dataclasses import dataclass

from baton.cluster.records import WorkerRecord


@dataclass(frozen=True, slots=True)
class Task:
    incarnation: int
    tokens: int
    since: int  # the epoch in which it started


@dataclass(slots=True)
class _Sum:
    tokens: int = 0
    requests: int = 0


class Ledger:
    def __init__(self) -> None:
        self._tasks: dict[str, Task] = {}
        self._places: dict[str, str] = {}  # request → worker
        self._sums: dict[str, dict[tuple[int, int], _Sum]] = {}  # worker → incarnation and epoch → what started then and has not ended

    def start(self, request_id: str, worker: str, task: Task) -> str | None:
        """Returns the worker on which the request was until now, as `end` does."""
        before = self.end(request_id)
        self._places[request_id], self._tasks[request_id] = worker, task
        total = self._sums.setdefault(worker, {}).setdefault((task.incarnation, task.since), _Sum())
        total.tokens += task.tokens
        total.requests += 1
        return before

    def end(self, request_id: str) -> str | None:
        """Returns the worker on which it was."""
        worker = self._places.pop(request_id, None)
        if worker is None:
            return None
        task, sums = self._tasks.pop(request_id), self._sums[worker]
        total = sums[task.incarnation, task.since]
        total.tokens -= task.tokens
        total.requests -= 1
        if not total.requests:
            del sums[task.incarnation, task.since]
        if not sums:
            del self._sums[worker]
        return worker

    def tokens(self, record: WorkerRecord, since: int = 0) -> int:
        """Tokens on the process that `record` describes. What an earlier process of that name had is lost."""
        if (sums := self._sums.get(record.name)) is None:
            return 0
        return sum(total.tokens for (process, epoch), total in sums.items() if process == record.incarnation and epoch >= since)

    def count(self, record: WorkerRecord) -> int:
        """Requests on that process."""
        if (sums := self._sums.get(record.name)) is None:
            return 0
        return sum(total.requests for (process, _), total in sums.items() if process == record.incarnation)
