"""How busy the workers of a model are, in order: what a choice depends on beside its own prompt. It is kept between choices, and only the
workers that have changed since the last one are judged again. So a choice costs no more with a thousand workers than with ten, but for
those that hold a part of its prompt, which `router.policy` judges one by one.

    decode    lowest (cost, -credit) first, of a sequence of which nobody caches anything
    prefill   fewest uncached tokens that wait first

Which of equal workers is meant is told by a number, in the order of their names.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

from baton.cluster.records import ROLES, RoleName, WorkerRecord
from router.members import Members

K = TypeVar("K", float, tuple[float, float])


class Ranks(Generic[K]):
    """Places of workers, by a key."""

    def __init__(self) -> None:
        self._keys: dict[int, K] = {}
        self._equal: dict[K, list[int]] = {}  # key → places, sorted
        self._sorted: list[K] = []  # the keys

    def put(self, place: int, key: K) -> None:
        if (before := self._keys.get(place)) is not None:
            if before == key:
                return
            self.drop(place)
        self._keys[place] = key
        equal = self._equal.get(key)
        if equal is None:
            self._equal[key] = [place]
            insort(self._sorted, key)
        else:
            insort(equal, place)

    def drop(self, place: int) -> None:
        key = self._keys.pop(place, None)
        if key is not None:
            equal = self._equal[key]
            del equal[bisect_left(equal, place)]
            if not equal:
                del self._equal[key]
                del self._sorted[bisect_left(self._sorted, key)]

    def key(self, place: int) -> K:
        """Raises KeyError if nobody with a key has this place."""
        return self._keys[place]

    def first(self, without: Collection[int], fits: Callable[[K], bool] = lambda key: True) -> K | None:
        """The lowest key that fits, of somebody whose place is not in `without`."""
        for key in self._sorted:
            if fits(key) and len(equal := self._equal[key]) > (len(self._inside(equal, without)) if without else 0):
                return key
        return None

    def count(self, key: K, without: Collection[int]) -> int:
        equal = self._equal.get(key, [])
        return len(equal) - len(self._inside(equal, without))

    def nth(self, key: K, number: int, without: Collection[int], more: Collection[int] = ()) -> int:
        """The place of the one with this number among those of a key without some, and some more."""
        equal = self._equal.get(key, [])
        if more:
            left: list[int] = [place for place in equal if place not in without]
            return sorted([*left, *more])[number]
        for skipped in self._inside(equal, without):
            number += skipped <= number
        return equal[number]

    @staticmethod
    def _inside(equal: list[int], places: Collection[int]) -> list[int]:
        """Where these places stand among the equal ones, in order."""
        found = []
        for place in sorted(places):
            at = bisect_left(equal, place)
            if at < len(equal) and equal[at] == place:
                found.append(at)
        return found


class Standings:
    def __init__(self, members: Members) -> None:
        self._members = members
        self._changed = self._members.follow()
        self._shape = -1
        self.names: dict[RoleName, list[str]] = {}  # sorted
        self.places: dict[RoleName, dict[str, int]] = {}  # the same: name → place
        self.decode = Ranks[tuple[float, float]]()
        self.prefill = Ranks[float]()
        self.sharing: set[int] = set()  # prefill workers that compute prompts of other routers: what waits there depends on the time
        self._queues: dict[str, int] = {}  # decode workers in which sequences wait
        self.room = math.inf  # tokens that each pool has room for, of those that may serve longer contexts

    def renew(self, names: Callable[[RoleName], list[str]]) -> None:
        """`names`: of the workers that a role has, sorted. They change with the members' shape alone."""
        if self._shape != self._members.shape:
            self._rebuild({role: names(role) for role in ROLES})
            return
        for name in self._changed:
            self._judge(self._members.record(name))
        self._changed.clear()

    @property
    def queued(self) -> int:
        """The most sequences that wait in a decode worker."""
        return max(self._queues.values(), default=0)

    def _rebuild(self, names: dict[RoleName, list[str]]) -> None:
        self._shape = self._members.shape
        self._changed.clear()
        self.decode, self.prefill, self.sharing, self._queues, self.room = Ranks(), Ranks(), set(), {}, math.inf
        self.names = names
        self.places = {role: {name: place for place, name in enumerate(there)} for role, there in names.items()}
        for name in {*names["prefill"], *names["decode"]}:
            self._judge(worker := self._members.record(name))
            size = worker.kv_blocks * worker.block_size
            if worker.max_model_len > size:
                self.room = min(self.room, size)

    def _judge(self, worker: WorkerRecord) -> None:
        if (place := self.places["decode"].get(worker.name)) is not None:
            cost, credit = decode_cost(self._members, worker)
            self.decode.put(place, (cost, -credit))
            if worker.load.waiting:
                self._queues[worker.name] = worker.load.waiting
            else:
                self._queues.pop(worker.name, None)
        if (place := self.places["prefill"].get(worker.name)) is not None:
            if self._members.shared(worker.name):
                self.sharing.add(place)
                self.prefill.drop(place)
            else:
                self.sharing.discard(place)
                self.prefill.put(place, self._members.prefill_tokens(worker.name, math.inf))


def decode_cost(members: Members, worker: WorkerRecord) -> tuple[int, int]:
    """The cost of a sequence of which the worker caches nothing, and its credit: both tokens."""
    credit = worker.load.credit_tokens - members.unreported_decode_tokens(worker.name)
    return worker.kv_blocks * worker.block_size - credit + worker.load.waiting_tokens, credit
