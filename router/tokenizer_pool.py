"""A small, bounded pool of threads for the tokenizer: long prompts delay each other there, but no other requests.

A request that has been there goes before those that have not: its next steps are short, and if they waited behind the first ones of
everybody, all requests of a burst would be done only when the last one is.

The threads keep the priority of the event loop's: one of a lower priority that holds the GIL, and loses its core to another process, holds
up the loop for as long (0.6 s were seen with niceness 10 on a busy machine).
"""

import asyncio
import heapq
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from baton.cluster.errors import BatonError, Reason

T = TypeVar("T")


class TokenizerPool:
    def __init__(self, threads: int, max_waiting: int) -> None:
        """`max_waiting`: calls that may wait for a thread."""
        self._threads = ThreadPoolExecutor(threads, "tokenizer")
        self._most = threads + max_waiting
        self._free = threads
        self._calls = 0  # that wait or run
        self._numbers = itertools.count()
        self._waiting: list[tuple[bool, int, asyncio.Future[None]]] = []  # a heap

    async def run(self, function: Callable[..., T], *arguments: Any, within_s: float, begun: bool = False) -> T:
        """Runs `function(*arguments)` in one of the threads. `begun`: the request has been here before.

        Raises SATURATED if too many calls wait for a thread, and DEADLINE after `within_s`. A call that runs by then runs on, and counts
        until it is done.
        """
        if self._calls >= self._most:
            raise BatonError(Reason.SATURATED, "too many prompts are waiting to be tokenized")
        try:
            async with asyncio.timeout(within_s):
                await self._enter(begun)
                future = asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)
                future.add_done_callback(self._end)
                return await asyncio.shield(future)
        except TimeoutError:
            raise BatonError(Reason.DEADLINE, "the deadline of the request passed before the prompt was tokenized") from None

    def close(self) -> None:
        """Each thread ends after its current call."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _enter(self, begun: bool) -> None:
        """Returns when a thread is free for the call."""
        self._calls += 1
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        place = not begun, next(self._numbers), turn
        heapq.heappush(self._waiting, place)
        try:
            await turn
        except asyncio.CancelledError:
            if place in self._waiting:
                self._waiting.remove(place)
                heapq.heapify(self._waiting)
                self._calls -= 1
            else:  # it was called a moment ago
                self._leave()
            raise

    def _leave(self) -> None:
        self._calls -= 1
        if not self._waiting:
            self._free += 1
            return
        *_, turn = heapq.heappop(self._waiting)
        if not turn.done():
            turn.set_result(None)

    def _end(self, future: "asyncio.Future[Any]") -> None:
        self._leave()
        if not future.cancelled():
            future.exception()  # marks it as retrieved: its caller may be gone
