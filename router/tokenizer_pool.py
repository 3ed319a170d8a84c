"""Threads of their own for the tokeniser, few and bounded: long prompts delay each other there, and nobody else."""

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
        """`function(*arguments)` in one of the threads.

        Raises SATURATED where too many wait for one, and DEADLINE after `within_s`; then the thread runs on, and what it does counts
        until it is done.
        """
        if self._begun >= self._most:
            raise BatonError(Reason.SATURATED, "too many prompts wait to be tokenised")
        self._begun += 1
        future = asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)
        future.add_done_callback(self._end)
        try:
            async with asyncio.timeout(within_s):
                return await asyncio.shield(future)
        except TimeoutError:
            raise BatonError(Reason.DEADLINE, "the deadline of the request was over before the prompt was tokenised") from None

    def close(self) -> None:
        """Threads end with what they do now."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _end(self, future: "asyncio.Future[Any]") -> None:
        self._begun -= 1
        if not future.cancelled():
            future.exception()  # whoever waited for it may be gone
