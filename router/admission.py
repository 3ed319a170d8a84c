"""Decides how many requests are served at a time, which ones wait, and which ones are refused because they would wait in vain.

A request gets its places immediately while they are free: one for each sequence that the workers run for it, or all that there are if that
is fewer. Otherwise it waits, by priority and then in order of arrival, and is refused if the queue is full. Nobody passes a request that
waits for several places: they would never be free together. `overload` sets what happens when more requests arrive than can be served:

    queue   Every request that finds room in the queue waits. Under overload all are late: the wait grows with the queue.
    codel   A request that could not start in time is refused immediately, and one that becomes hopeless in the queue is dropped. The
            expected wait is the places for those ahead times the measured time from one freed place to the next. A burst may fill the
            queue until the last request is just in time. A standing queue (its waits have been longer than TARGET for a whole interval) is
            not a burst: it is kept to a SHARE of that length, because at the limit every error of the estimate is a miss. The more
            requests are refused, the shorter a queue keeps every place taken (`enough`), and the less of that length it may use. Whom a
            better priority overtakes in such a flood makes room for it at once, and a priority is refused while a better one is.
    lifo    Like codel, but in a standing queue the newest request of the lowest priority number goes first.

The standing queue is CoDel's criterion (Nichols and Jacobson, "Controlling Queue Delay", ACM Queue 2012; RFC 8289). Serving the newest
first is Facebook's answer to it (Maurer, "Fail at Scale", ACM Queue 2015). CoDel drops at the head of the queue. We refuse at its tail,
where the request has not waited yet and the client can still go elsewhere.

A request is judged only if it would have to wait. While a place is free it is served whatever the estimate says, so a wrong estimate
corrects itself. A request is never refused for an objective that it could not meet even without waiting.

All times are seconds on the caller's clock.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from router.pace import Pace

Overload = Literal["queue", "codel", "lifo"]
INTERVAL_S = 0.1  # at least this long, and at least as long as a request is served
TARGET = 0.1  # share of the interval: a shorter wait does not count as a queue
SHARE = 0.5  # of the time for which a request can wait: a standing queue may use at most this
FLOODED = 0.2  # and one that is longer than it need be, this
IDLE = 0.02  # share of the time for which a server may be idle because its queue was too short
RECENTLY_S = 1.0  # clients that were refused less than this ago are expected to come back


@dataclass(frozen=True, slots=True)
class Due:
    """The deadlines and objectives of a request."""

    deadline: float = math.inf  # the client's
    first: float = math.inf  # objective: the first token
    end: float = math.inf  # objective: the last token
    max_tokens: int = 1 << 31


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """What other routers do with the same workers. All limits of `Admission` hold for all routers together."""

    routers: int = 1  # including this one
    inflight: int = 0
    queued: int = 0


@dataclass(frozen=True, slots=True)
class Admitted:
    pass


@dataclass(frozen=True, slots=True)
class Queued:
    ahead: int  # requests that come first
    wait_s: float | None = field(default=None, compare=False)  # that it is expected to wait; None: this is no standing queue
    displaced: tuple[str, ...] = ()  # requests of higher priority numbers, which no longer wait: they must be told


@dataclass(frozen=True, slots=True)
class NotAdmitted:
    inflight: int
    queued: int
    late: bool = False  # the queue had room, but the request had no time
    retry_after: float | None = None  # seconds after which it can expect a place; None: nothing has been measured yet


@dataclass(frozen=True, slots=True)
class _Waiter:
    priority: int
    since: float
    due: Due
    weight: int  # places that it asks for
    taken: int  # that it would have got when it came


@dataclass(slots=True)
class _Line:
    """Those of one priority, in order of arrival: all of them may be let in at once."""

    waiting: dict[str, None] = field(default_factory=dict)
    places: int = 0  # for all of them


ANY_TIME = Due()
ALONE = Elsewhere()


def share(total: int, taken: int, routers: int) -> int:
    """What one of `routers` may use of `total`, of which the others use `taken`.

    It may use whatever is free, and its equal part in any case: a router that had everything then gives back what another one needs. So for
    a moment the routers can use more than `total` together, less than twice as much.
    """
    return max(total - taken, -(-total // routers))


def enough(load: float) -> float:
    """How many requests must wait so that a server is idle for at most IDLE of the time, if `load` times as many come as it can serve.

    Of the M/M/1/K queue (Gross and Harris, "Fundamentals of Queueing Theory", 2.5): it is empty for (load - 1) / (load^(K + 1) - 1) of the
    time. K is at least 1, and infinite where `load` is at most 1: what comes then can all be served.
    """
    return max(1.0, math.log1p((load - 1) / IDLE) / math.log(load) - 1) if load > 1 else math.inf


class Admission:
    def __init__(self, max_inflight: int, max_queue: int, overload: Overload = "codel") -> None:
        if max_inflight < 1 or max_queue < 0:
            raise ValueError(f"cannot serve {max_inflight} requests and queue {max_queue}")
        self.max_inflight = max_inflight
        self.max_queue = max_queue
        self.places = max_inflight  # how many sequences may be served now, `max_inflight` at most
        self.room = max_queue  # how many may wait now, `max_queue` at most
        self.elsewhere = ALONE
        self.pace = Pace()
        self._overload = overload
        self._inside: dict[str, int] = {}  # request → its places
        self.inflight = 0  # places, all of these
        self._waiting: dict[str, _Waiter] = {}  # in order of arrival
        self._lines: dict[int, _Line] = {}  # by priority
        self._standing_since: float | None = None  # when the first of consecutive waits longer than the target was noted
        self._refusals: deque[float] = deque(maxlen=65536)  # times of the recent refusals
        self._drowned = 0, -math.inf  # the best priority that a flood refused lately, and when: a worse one has no chance

    @property
    def requests(self) -> int:
        """That are served: each has one place or several."""
        return len(self._inside)

    @property
    def queued(self) -> int:
        return len(self._waiting)

    def enter(
        self, request_id: str, priority: int = 0, now: float = 0.0, due: Due = ANY_TIME, weight: int = 1
    ) -> Admitted | Queued | NotAdmitted:
        """The waiting request with the lowest `priority` goes first; among equals, the earliest. A request that is already here keeps its
        place. `weight`: the sequences that it makes the workers run."""
        if request_id in self._inside:
            return Admitted()
        if request_id in self._waiting:
            priority = self._waiting[request_id].priority
            lines = [line for other, line in self._lines.items() if other < priority]
            return Queued(sum(len(line.waiting) for line in lines) + list(self._lines[priority].waiting).index(request_id))
        late_by = self.late_by(priority, now, due, weight)
        if late_by is not None:
            if self._floods(*self._waits(priority, now, due, weight), now) and (priority <= self._drowned[0] or self._dry(now)):
                self._drowned = priority, now
            return self._refuse(late_by, now)
        lines, taken = self._before(priority), min(weight, self.places)
        if not lines and self._fits(weight):
            self._admit(request_id, weight)
            self._note_wait(0.0, now)
            return Admitted()
        wait_s = self._waits(priority, now, due, weight)[1] if self.standing(now) else None
        self._waiting[request_id] = _Waiter(priority, now, due, weight, taken)
        ahead = sum(len(line.waiting) for line in lines)
        line = self._lines.setdefault(priority, _Line())
        line.waiting[request_id] = None
        line.places += taken
        return Queued(ahead, wait_s, self._displace(priority, now))

    def late_by(self, priority: int = 0, now: float = 0.0, due: Due = ANY_TIME, weight: int = 1) -> float | None:
        """The seconds by which the wait of a new request is too long, less than 0 where only the queue has no room. None: `enter` would not
        refuse it. Nothing is decided by asking."""
        if self._fits(weight) and not self._before(priority):
            return None
        ahead, wait, room = self._waits(priority, now, due, weight)
        if self.queued >= self.room or wait > room * (SHARE if self.standing(now) else 1.0):
            return wait - room
        if self._floods(ahead, wait, room, now):
            return wait - FLOODED * room
        if priority > self._drowned[0] and not self._dry(now) and room < RECENTLY_S / FLOODED:
            return self._drowned[1] + RECENTLY_S - now
        return None

    def leave(self, request_id: str, now: float = 0.0) -> list[str]:
        """Removes a request that was served, failed, or stopped waiting. Returns those admitted now. An unknown id changes nothing."""
        if request_id in self._waiting:
            self._leave_line(request_id)
        self.inflight -= self._inside.pop(request_id, 0)
        return self._fill(now)

    def resize(self, places: int | None, now: float = 0.0) -> list[str]:
        """Sets how many sequences the workers can take now; None: only `max_inflight` bounds them. Returns the requests admitted now."""
        total = min(self.max_inflight, self.max_inflight if places is None else places)
        self.places = max(1, share(total, self.elsewhere.inflight, self.elsewhere.routers))
        self.room = share(self.max_queue, self.elsewhere.queued, self.elsewhere.routers)
        return self._fill(now)

    def share_with(self, elsewhere: Elsewhere) -> None:
        """What the other routers do counts from the next `resize` on."""
        self.elsewhere = elsewhere

    def note_served(self, held_s: float, first_s: float, tokens: int) -> None:
        """See `Pace.note`."""
        self.pace.note(held_s, first_s, tokens)

    def note_failure(self, held_s: float) -> None:
        """See `Pace.note_failure`."""
        self.pace.note_failure(held_s)

    def drop_hopeless(self, now: float) -> list[str]:
        """Removes and returns the waiting requests that would be late even if they started now."""
        hopeless = [id_ for id_, waiter in self._waiting.items() if self._room_s(waiter.due, waiter.since, now) < 0]
        for request_id in hopeless:
            self._leave_line(request_id)
            self._refusals.append(now)
        return hopeless

    def standing(self, now: float) -> bool:
        """Whether this is a standing queue: its waits have not come down to the target for a whole interval."""
        return self._standing_since is not None and now - self._standing_since >= self._interval_s

    def retry_after(self, now: float, more_s: float = 0.0) -> float | None:
        """Seconds after which a request that is refused now would be admitted: `more_s`, by which its wait is too long, plus one turn for
        each request refused in the last second, because all of those may come back."""
        if self.pace.held_s is None:
            return None
        return max(0.0, more_s) + self._refused_lately(now) * self._turn_s

    def check(self) -> None:
        """Checks the conservation law. Raises RuntimeError if it is violated."""
        if self._inside & self._waiting.keys():
            raise RuntimeError("a request is both served and waiting")
        if self.inflight != sum(self._inside.values()):
            raise RuntimeError(f"{self.inflight} places are taken, and {sum(self._inside.values())} are known")
        if self.inflight > self.max_inflight or self.queued > self.max_queue:
            raise RuntimeError(f"{self.inflight} of {self.max_inflight} served, {self.queued} of {self.max_queue} waiting")
        if {id_ for line in self._lines.values() for id_ in line.waiting} != self._waiting.keys():
            raise RuntimeError("the lines hold others than those that wait")
        if self._waiting and all(self._fits(self._waiting[first].weight) for first in self._lines[min(self._lines)].waiting):
            raise RuntimeError("a request waits although its places are free")

    @property
    def _interval_s(self) -> float:
        return max(INTERVAL_S, self.pace.held_s or 0.0)

    def _fill(self, now: float) -> list[str]:
        admitted = []
        while self._waiting and self._fits((waiter := self._waiting[chosen := self._next(now)]).weight):
            self._leave_line(chosen)
            self._note_wait(now - waiter.since, now)
            self._admit(chosen, waiter.weight)
            admitted.append(chosen)
        return admitted

    def _before(self, priority: int) -> list[_Line]:
        """The lines of those who would go before a newcomer of this priority."""
        return [line for other, line in self._lines.items() if other <= priority]

    def _waits(self, priority: int, now: float, due: Due, weight: int) -> tuple[int, float, float]:
        """Places for those ahead of a newcomer, its wait, and how long it can wait."""
        ahead = sum(line.places for line in self._before(priority))
        return ahead, (ahead + min(weight, self.places)) * self._turn_s, self._room_s(due, now, now)

    def _dry(self, now: float) -> bool:
        """Whether no request has been refused lately because the queue is flooded."""
        return now - self._drowned[1] >= RECENTLY_S

    def _floods(self, ahead: int, wait: float, room: float, now: float) -> bool:
        """Whether so many places for those ahead make a queue that is longer than it need be."""
        return ahead > 0 and wait > FLOODED * room and ahead >= enough(1 + self._refused_lately(now) * self._turn_s)

    def _displace(self, priority: int, now: float) -> tuple[str, ...]:
        """Removes from the end of the queue whom this priority overtakes, as long as the last one would not be let in if it came now. In a
        flood of better priority they would wait until they are hopeless. Returns their ids."""
        displaced = []
        while (worst := max(self._lines)) > priority:
            last = next(reversed(self._lines[worst].waiting))
            waiter = self._waiting[last]
            ahead = sum(line.places for line in self._lines.values()) - waiter.taken
            wait, room = (ahead + waiter.taken) * self._turn_s, self._room_s(waiter.due, waiter.since, now)
            if not self._floods(ahead, wait, room, now):
                break
            self._leave_line(last)
            self._refusals.append(now)
            displaced.append(last)
        return tuple(displaced)

    def _refused_lately(self, now: float) -> int:
        """How many were refused in the last second."""
        while self._refusals and self._refusals[0] < now - RECENTLY_S:
            self._refusals.popleft()
        return len(self._refusals)

    def _fits(self, weight: int) -> bool:
        return self.inflight + min(weight, self.places) <= self.places

    def _admit(self, request_id: str, weight: int) -> None:
        self._inside[request_id] = taken = min(weight, self.places)
        self.inflight += taken

    def _next(self, now: float) -> str:
        line = self._lines[min(self._lines)].waiting
        return next(reversed(line) if self._overload == "lifo" and self.standing(now) else iter(line))

    def _leave_line(self, request_id: str) -> _Waiter:
        waiter = self._waiting.pop(request_id)
        line = self._lines[waiter.priority]
        del line.waiting[request_id]
        line.places -= waiter.taken
        if not line.waiting:
            del self._lines[waiter.priority]
        return waiter

    def _note_wait(self, waited: float, now: float) -> None:
        if waited <= TARGET * self._interval_s:
            self._standing_since = None
        elif self._standing_since is None:
            self._standing_since = now

    @property
    def _turn_s(self) -> float:
        """The time from one freed place to the next: `places` requests are served at a time, each for `held_s` (Little's law)."""
        return (self.pace.held_s or 0.0) / self.places

    def _room_s(self, due: Due, since: float, now: float) -> float:
        """How long a request that arrived at `since` can still wait from `now` and be in time; negative if it is hopeless."""
        if self._overload == "queue" or self.pace.held_s is None:
            return math.inf
        needs = self.pace.needs_s(due.max_tokens)
        latest = due.deadline - needs
        for objective, need in ((due.first, self.pace.first_s), (due.end, needs)):
            if since + need <= objective:  # it could be met
                latest = min(latest, objective - need)
        return latest - now

    def _refuse(self, more_s: float, now: float) -> NotAdmitted:
        late = self.queued < self.room
        self._refusals.append(now)
        return NotAdmitted(self.inflight, self.queued, late, self.retry_after(now, more_s if late else 0.0))
