"""How much work all streams together may do in one turn of the event loop. What exceeds it waits for the next turns, in order of arrival.

Streams become ready together: a step of a worker brings a token for each, and clients that were stalled read on at the same moment. If each
did its share at once, everything else would wait for the sum.

Work is measured in the bytes of the tokens that it is about, as they wait (`router.backlog`): a byte costs about 0.2 µs at the doors, with
log-probabilities and without.
"""

import asyncio
from collections import deque
from collections.abc import Callable

BYTES_IN_A_TURN = 16 << 10  # about 4 ms; a turn may see the last of one budget and the first of the next
BYTES_AT_ONCE = 4 << 10  # the most that one stream does between two calls of `spend`

BYTES_OF_AN_END = 2 << 10  # what the end of a request costs, in the same measure: many may end together, too


class TurnBudget:
    """Belongs to the loop in which it is first used."""

    def __init__(self, most: int = BYTES_IN_A_TURN) -> None:
        self._most = most
        self._spent = 0
        self._renewing = False
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()

    async def spend(self, size: int) -> None:
        """Returns when work on `size` bytes may begin: at once if no other stream waits and the turn has room for it."""
        if not self._waiting and self._spent < self._most:
            self._note(size)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((size, lambda: None if turn.done() else turn.set_result(None)))  # done: its stream has ended
        await turn

    def call(self, size: int, work: Callable[[], None]) -> None:
        """Calls `work` under the same condition."""
        if not self._waiting and self._spent < self._most:
            self._note(size)
            work()
        else:
            self._waiting.append((size, work))

    def ending(self) -> "_Ending":
        """A request that ends with this block waits for a turn that has room for its end."""
        return _Ending(self)

    def _note(self, size: int) -> None:
        self._spent += size
        if not self._renewing:
            self._renewing = True
            asyncio.get_running_loop().call_soon(self._renew)

    def _renew(self) -> None:
        self._renewing, self._spent = False, 0
        while self._waiting and self._spent < self._most:
            size, work = self._waiting.popleft()
            self._note(size)
            work()


class _Ending:
    def __init__(self, budget: TurnBudget) -> None:
        self._budget = budget

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, *raised: object) -> None:
        await self._budget.spend(BYTES_OF_AN_END)
