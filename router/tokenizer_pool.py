"""A small, bounded pool of threads for the tokenizer: long prompts delay each other there, but no other requests. On Linux, its threads
give way to the event loop where there are fewer cores than would like to work."""

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from baton.cluster.errors import BatonError, Reason

T = TypeVar("T")
NICE = 10  # of its threads


class TokenizerPool:
    def __init__(self, threads: int, max_waiting: int) -> None:
        """`max_waiting`: calls that may wait for a thread."""
        self._threads = ThreadPoolExecutor(threads, "tokenizer", initializer=_give_way)
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


def _give_way() -> None:
    """Linux schedules threads by a priority of their own; elsewhere it belongs to the process."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
