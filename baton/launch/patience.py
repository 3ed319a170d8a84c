"""Decides whether a cluster that starts still makes progress. However long a model takes to load, something changes meanwhile."""

from collections.abc import Sequence

from baton.cluster.records import StartRecord

COMPUTES = 0.1  # of a core: a process that uses less is only waiting


class Patience:
    def __init__(self, start_s: float, now: float) -> None:
        """`start_s`: the longest time without progress. `now`: in seconds, on any clock that only goes forward."""
        self._start_s = start_s
        self._progress_at = now
        self._ready = 0
        self._steps: dict[str, tuple[int, str, int]] = {}
        self._cpu_s: dict[tuple[str, int], float] = {}  # when each process last counted as computing

    def over(self, now: float, ready: int, starts: Sequence[StartRecord]) -> bool:
        """`ready`: processes that need nothing more; `starts`: what the others say."""
        if ready != self._ready or any([self._moves(record) for record in starts]):
            self._ready, self._progress_at = ready, now
        return now - self._progress_at >= self._start_s

    def _moves(self, record: StartRecord) -> bool:
        process, step = (record.name, record.incarnation), (record.incarnation, record.step, record.done)
        computes = record.cpu_s - self._cpu_s.setdefault(process, record.cpu_s) >= COMPUTES * self._start_s
        if computes or self._steps.get(record.name) != step:
            self._cpu_s[process], self._steps[record.name] = record.cpu_s, step
            return True
        return False
