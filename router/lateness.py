"""How late the event loop is, and how long a stream should therefore let its tokens wait for each other.

A message costs the router more than a token in it. While the loop keeps up, each token is sent as it comes. When its turns grow long,
tokens that come within a few of them travel together, so the router serves more. No token waits for others for more than MOST_S.
"""

import asyncio

TICK_S = 0.02
LATE_S = 0.001  # less is not late
TURNS = 8  # that tokens wait for each other
MOST_S = 0.015
WEIGHT = 1 / 4  # of the newest tick


class Lateness:
    """`interval_s`: what to wait instead, if it is configured."""

    def __init__(self, interval_s: float = 0.0) -> None:
        self._interval_s = interval_s
        self.late_s = 0.0  # a running mean

    def note(self, late_s: float) -> None:
        """A tick came so late."""
        self.late_s += WEIGHT * (late_s - self.late_s)

    def interval_s(self) -> float:
        """Shortest time between two messages of one stream; 0: none."""
        if self._interval_s:
            return self._interval_s
        return min(MOST_S, TURNS * self.late_s) if self.late_s >= LATE_S else 0.0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)
            self.note(max(0.0, loop.time() - due))
