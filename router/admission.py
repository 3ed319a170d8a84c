"""How many requests are served at a time, and who waits, by priority and then in order of arrival. Decides and does nothing else.

`_next` alone chooses who comes next.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Admitted:
    pass


@dataclass(frozen=True, slots=True)
class Queued:
    ahead: int  # requests that come first


@dataclass(frozen=True, slots=True)
class Refused:
    inflight: int
    queued: int


class Admission:
    def __init__(self, max_inflight: int, max_queue: int) -> None:
        if max_inflight < 1 or max_queue < 0:
            raise ValueError(f"cannot serve {max_inflight} requests and queue {max_queue}")
        self.max_inflight = max_inflight
        self.max_queue = max_queue
        self._inside: set[str] = set()
        self._waiting: dict[str, int] = {}  # request → priority, in order of arrival

    @property
    def inflight(self) -> int:
        return len(self._inside)

    @property
    def queued(self) -> int:
        return len(self._waiting)

    def enter(self, request_id: str, priority: int = 0) -> Admitted | Queued | Refused:
        """Of those who wait, the least `priority` comes first, and of equals who came first. A request that is here already keeps its
        place."""
        if request_id in self._inside:
            return Admitted()
        if request_id in self._waiting:
            return Queued(sorted(self._waiting, key=self._waiting.__getitem__).index(request_id))
        if self.inflight < self.max_inflight:  # then nobody waits
            self._inside.add(request_id)
            return Admitted()
        if self.queued >= self.max_queue:
            return Refused(self.inflight, self.queued)
        self._waiting[request_id] = priority
        return Queued(sum(other <= priority for other in self._waiting.values()) - 1)

    def leave(self, request_id: str) -> list[str]:
        """Served, failed, or tired of waiting: the same. Returns who is admitted now; an unknown id changes nothing."""
        self._waiting.pop(request_id, None)
        self._inside.discard(request_id)
        admitted = []
        while self._waiting and self.inflight < self.max_inflight:
            chosen = self._next()
            del self._waiting[chosen]
            self._inside.add(chosen)
            admitted.append(chosen)
        return admitted

    def check(self) -> None:
        """The conservation law. Raises RuntimeError."""
        if self._inside & self._waiting.keys():
            raise RuntimeError("a request is served and waits")
        if self.inflight > self.max_inflight or self.queued > self.max_queue:
            raise RuntimeError(f"{self.inflight} of {self.max_inflight} served, {self.queued} of {self.max_queue} waiting")
        if self._waiting and self.inflight < self.max_inflight:
            raise RuntimeError("a request waits for a free place")

    def _next(self) -> str:
        return min(self._waiting, key=self._waiting.__getitem__)  # the first of equals
