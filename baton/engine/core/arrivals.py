"""One order of arrival for the sequences in the queue and for those that ask again and again for room for KV from elsewhere.

No sequence overtakes another. A sequence keeps its place when it comes back: after a refusal, a fetch that failed, or a preemption.
"""

import itertools
from bisect import insort

from baton.engine.core.sequence import Sequence


class Arrivals:
    def __init__(self) -> None:
        self.waiting: list[Sequence] = []  # in order of arrival
        self.claims: dict[str, int] = {}  # sequence that was refused room for KV from elsewhere and will ask again → place in the order
        self._places = itertools.count()

    def place(self, seq: Sequence) -> int:
        """The last place, for a sequence that has none."""
        if seq.arrival is None:
            seq.arrival = next(self._places)
        return seq.arrival

    def is_next(self, seq: Sequence) -> bool:
        """Whether no earlier sequence still waits for room, in the queue or with a claim."""
        return self.place(seq) <= min((*self.claims.values(), *map(self.place, self.waiting[:1])), default=self.place(seq))

    def claim(self, seq: Sequence) -> None:
        self.claims[seq.id] = self.place(seq)

    def enqueue(self, seq: Sequence) -> None:
        self.claims.pop(seq.id, None)
        insort(self.waiting, seq, key=self.place)

    def expire(self, now: float) -> list[Sequence]:
        """Takes out the sequences that have waited too long."""
        expired = [seq for seq in self.waiting if seq.expires_at <= now]
        for seq in expired:
            self.waiting.remove(seq)
            seq.move("abort")
        return expired
