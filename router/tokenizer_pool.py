"""A small, bounded pool of threads for the tokenizer: long prompts delay each other there, but no other requests.

The threads keep the priority of the event loop's: one of a lower priority that holds the GIL, and loses its core to another process, holds
up the loop for as long (0.6 s were seen with niceness 10 on a busy machine).
"""

import asyncio
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
        self._begun = 0

    async def run(self, function: Callable[..., T], *arguments: Any, within_s: float) -> T:
        """Runs `function(*arguments)` in one of the threads.

        Raises SATURATED if too many calls wait for a thread, and DEADLINE after `within_s`. After that the thread keeps running, and its
        call counts until it is done.
        """
        if self._begun >= self._most:
            raise BatonError(Reason.SATURATED, "too many prompts are waiting to be tokenized")
        self._begun += 1
        future = asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)
        future.add_done_callback(self._end)
        try:
            async with asyncio.timeout(within_s):
                return await asyncio.shield(future)
        except TimeoutError:
            raise BatonError(Reason.DEADLINE, "the deadline of the request passed before the prompt was tokenized") from None

    def close(self) -> None:
        """Each thread ends after its current call."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _end(self, future: "asyncio.Future[Any]") -> None:
        self._begun -= 1
        if not future.cancelled():
            future.exception()  # marks it as retrieved: its caller may be gone
