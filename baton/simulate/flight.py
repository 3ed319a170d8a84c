"""Tokens of one stream on their way from a worker to a router. Pure.

A message takes its time, and what has ended when it arrives comes with it. So the arrivals follow from the ends of the steps, whether each
is told when it ends or many are told later: then those that have arrived are given together, with the moment of each (`Timed`).
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from operator import ge

from baton.engine.core.engine import Output
from baton.engine.core.sequence import Finish
from baton.simulate.engine import Told
from baton.simulate.jumps import IDS, ids
from router.request import Timed, Token, Tokens


@cache
def _all() -> tuple[Token, ...]:
    """One object for each token, however many streams have it."""
    return tuple(map(Token, IDS))


class Flight:
    def __init__(self, position: int, travel_s: float) -> None:
        """`position`: of the next token."""
        self.finish: Finish | None = None
        self.failure: Output | None = None  # what came instead of a token
        self._position, self._travel_s = position, travel_s
        self._ends: list[float] = []  # of the steps of tokens that have not been given
        self._failed_at: float | None = None
        self._message = -math.inf  # when the last one arrived

    def __bool__(self) -> bool:
        return bool(self._ends) or self._failed_at is not None

    def add(self, told: Told, now: float) -> None:
        self._ends.extend(told.ends)
        output = told.output
        if output is not None and output.sampled is not None:
            self.finish = output.finish
        elif output is not None and (output.failure is not None or output.expired):
            self.failure, self._failed_at = output, now

    @property
    def lands(self) -> float:
        """When the next message arrives."""
        if self._ends and self._ends[0] <= self._message:
            return self._message
        first = self._ends[0] if self._ends else self._failed_at
        assert first is not None
        return first + self._travel_s

    def land(self, now: float) -> Iterator[Tokens]:
        """What has arrived, once."""
        arrivals = self._arrivals()
        count = bisect_right(arrivals, now)
        if count:
            del self._ends[:count]
            self._message = arrivals[count - 1]
            tokens = self._take(count)
            if arrivals[0] == now:
                yield tokens
            else:
                timed = Timed(tokens)
                timed.times = arrivals[:count]
                yield timed
        if not self._ends and self._failed_at is not None and self._failed_at + self._travel_s <= now:
            self._failed_at = None

    def land_all(self) -> Iterator[Tokens]:
        """All that was added has arrived."""
        count, self._failed_at = len(self._ends), None
        self._ends.clear()
        if count:
            yield self._take(count)

    def _arrivals(self) -> Sequence[float]:
        ends, travel_s = self._ends, self._travel_s
        arrivals = [end + travel_s for end in ends]
        message = self._message
        if (ends and ends[0] <= message) or any(map(ge, arrivals, islice(ends, 1, None))):  # a step takes less time than a message
            for place, end in enumerate(ends):
                message = arrivals[place] = message if end <= message else arrivals[place]
        return arrivals

    def _take(self, count: int) -> Tokens:
        start, self._position = self._position, self._position + count
        tokens = _all()
        return tuple([tokens[each] for each in ids(start, start + count)])
