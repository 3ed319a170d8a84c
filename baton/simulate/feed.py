"""Block events on their way from many workers to the routers, without a timer for each.

Nobody looks at a prefix index but a router that chooses a worker, so events wait until one does. Each is told then as if it had come when
it was due: those of one moment in the order of the workers. An engine that jumps over steps sends no event by itself. It says when
the next step ends that has one (`expect`), and is asked for what it did if somebody looks after that.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from itertools import count

from baton.clock import loop_time
from baton.cluster.records import BlockEvent
from baton.engine.core.block_key import DEVICE
from baton.simulate.engine import ModelledEngine
from baton.simulate.jumps import Jump
from router.prefix_index import PrefixIndex
from router.view import ClusterView


class Feed:
    def __init__(self, travel_s: float) -> None:
        self.views: list[ClusterView] = []
        self._travel_s = travel_s
        self._due: list[tuple[float, int, int, list[BlockEvent] | tuple[ModelledEngine, Jump, int]]] = []  # a heap: moment, place, number
        self._numbers = count()
        self._until = -math.inf  # what is due by then is being told

    def send(self, events: list[BlockEvent], engine: ModelledEngine) -> None:
        when, place, due = engine.told_at + self._travel_s, engine.number, self._due
        if when <= self._until and not (due and due[0][:2] <= (when, place)):  # it would be the next to be told
            self._apply(events)
        else:
            heapq.heappush(due, (when, place, next(self._numbers), events))

    def expect(self, engine: ModelledEngine, jump: Jump) -> None:
        """A jump of the engine may change the prefix cache."""
        if (step := jump.next_change) is not None:
            due = jump.ends[step - 1] + self._travel_s, engine.number, next(self._numbers), (engine, jump, step)
            heapq.heappush(self._due, due)

    def tell(self) -> None:
        """All that has come by now."""
        due, self._until = self._due, loop_time()
        while due and due[0][0] <= self._until:
            *_, what = heapq.heappop(due)
            if isinstance(what, list):
                self._apply(what)
                continue
            engine, jump, step = what
            if engine.reach(jump, step):
                self.expect(engine, jump)
        self._until = -math.inf

    def _apply(self, events: list[BlockEvent]) -> None:
        for event in events:
            for view in self.views:
                view.apply(event)


class FedIndex(PrefixIndex):
    """A router's index, which hears of what has come before it is asked."""

    def __init__(self, feed: Feed) -> None:
        super().__init__()
        self._feed = feed

    def overlap(self, keys: Sequence[bytes], now: float, medium: str = DEVICE) -> dict[str, int]:
        self._feed.tell()
        return super().overlap(keys, now, medium)

    @property
    def tiered(self) -> bool:
        self._feed.tell()
        return super().tiered

    def predict(self, worker: str, keys: Iterable[bytes], expires_at: float) -> None:
        self._feed.tell()
        super().predict(worker, keys, expires_at)

    def retract(self, worker: str, keys: Iterable[bytes]) -> None:
        self._feed.tell()
        super().retract(worker, keys)

    def is_predicted(self, worker: str, key: bytes) -> bool:
        self._feed.tell()
        return super().is_predicted(worker, key)
