"""What a tier is worth: the seconds of computing that it has saved, and those that it has cost. Pure.

A tier that has cost more than it saved for WINDOW_S is not worth having, unless the difference is nothing that anybody would notice.
"""

from collections import deque
from dataclasses import dataclass

WINDOW_S = 600.0
REST_S = 1800.0  # how long a tier that did not pay rests before it is tried again
SLOTS = 10
UNNOTICED = 0.001  # share of the time that a tier may cost for nothing


@dataclass(slots=True)
class Tally:
    """Counts since the start; each only grows."""

    reads: int = 0  # units that were asked for
    hits: int = 0  # part of them: came, verified
    read_bytes: int = 0
    written: int = 0  # units
    written_bytes: int = 0
    dropped: int = 0  # units that were not written, because too many waited
    saved_s: float = 0.0  # what computing the hits would have taken
    spent_s: float = 0.0  # processor time of writing, and the time that loads took


class Worth:
    def __init__(self, now: float) -> None:
        self.tally = Tally()
        self._slots: deque[tuple[float, float, float]] = deque()  # (begin, seconds saved, seconds spent) of each part of the window
        self.begin(now)

    def begin(self, now: float) -> None:
        """Nothing of what was before counts any more."""
        self._slots.clear()
        self._slots.append((now, 0.0, 0.0))

    def wrote(self, units: int, size: int, seconds: float, now: float) -> None:
        self.tally.written += units
        self.tally.written_bytes += units * size
        self._count(0.0, seconds, now)

    def read(self, asked: int, came: int, size: int, seconds: float, saved_s: float, now: float) -> None:
        self.tally.reads += asked
        self.tally.hits += came
        self.tally.read_bytes += came * size
        self._count(saved_s, seconds, now)

    def saved(self, seconds: float, now: float) -> None:
        self._count(seconds, 0.0, now)

    def pays(self, now: float) -> bool:
        """False once it has cost too much for the whole of the window."""
        saved, spent = self.lately(now)
        if now - self._slots[0][0] < WINDOW_S:
            return True
        return spent - saved <= UNNOTICED * WINDOW_S

    def lately(self, now: float) -> tuple[float, float]:
        """Seconds saved and spent in the window."""
        self._turn(now)
        return sum(saved for _, saved, _ in self._slots), sum(spent for _, _, spent in self._slots)

    def _count(self, saved_s: float, spent_s: float, now: float) -> None:
        self.tally.saved_s += saved_s
        self.tally.spent_s += spent_s
        self._turn(now)
        begin, saved, spent = self._slots[-1]
        self._slots[-1] = begin, saved + saved_s, spent + spent_s

    def _turn(self, now: float) -> None:
        if now - self._slots[-1][0] >= WINDOW_S / SLOTS:
            self._slots.append((now, 0.0, 0.0))
        while len(self._slots) > 1 and now - self._slots[1][0] >= WINDOW_S:
            self._slots.popleft()
