"""Time during which this process itself was running.

A process that waits for a sign of life from another one must not count its own pauses. After a SIGSTOP, a frozen container or a second
without a processor, the other's signs of life are still unread, and it would be taken for dead although only we had paused.
"""


class AwakeClock:
    """Call `look` at regular intervals. An interval counts for `longest_s` at most, so a pause between two calls adds almost nothing."""

    def __init__(self, now: float, longest_s: float) -> None:
        self.seconds = 0.0
        self._last = now
        self._longest_s = longest_s

    def look(self, now: float) -> float:
        """Returns the seconds awake since the start. `now` is the time on any clock that only goes forward."""
        self.seconds += min(max(0.0, now - self._last), self._longest_s)
        self._last = now
        return self.seconds
