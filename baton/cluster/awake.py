"""Time during which this process was running itself.

Whoever waits for a sign of life from another process must not count a pause of its own: after a stop, a frozen container or a second
without a processor the other's signs lie unread, and it would be taken for dead because we were.
"""


class AwakeClock:
    """Give it the time at regular intervals. An interval counts for `longest_s` at most, so a pause between two looks is nearly free."""

    def __init__(self, now: float, longest_s: float) -> None:
        self.seconds = 0.0
        self._last = now
        self._longest_s = longest_s

    def look(self, now: float) -> float:
        """Seconds awake since the start, at the moment `now` of any clock that only goes forward."""
        self.seconds += min(max(0.0, now - self._last), self._longest_s)
        self._last = now
        return self.seconds
