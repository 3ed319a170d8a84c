"""Lets so much work through in one turn of the event loop, and the rest in the next ones, first come first served.

In one turn the loop runs everything that was ready when it began, and only then looks at its connections again. When a worker dies, all its
streams are ready at once; each takes a moment, and together they would stop the router. What waits here lets everything else go first.
"""

import asyncio
from collections import deque


class Turnstile:
    def __init__(self, most: int) -> None:
        """`most`: the work of one turn, in units of the caller's."""
        self._most = self._left = most
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def enter(self, amount: int = 1) -> None:
        """Returns at once while there is anything left of this turn. An amount above it takes a turn for itself."""
        if self._left > 0 and not self._waiting:
            self._take(amount)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((amount, turn))
        await turn

    def _take(self, amount: int) -> None:
        if self._left == self._most:
            asyncio.get_running_loop().call_soon(self._refill)
        self._left -= max(1, amount)

    def _refill(self) -> None:
        self._left = self._most
        while self._waiting and self._left > 0:
            amount, turn = self._waiting.popleft()
            if not turn.done():  # else its caller was cancelled
                self._take(amount)
                turn.set_result(None)
