"""Watches the turns of an event loop. In one turn the loop runs everything that was ready when the turn began, and nothing else: what
arrives meanwhile waits."""

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")


class Turns:
    """Covers the block. `longest_s` is the processor time of the loop's thread in the longest turn, so a busy machine does not count;
    `most` is the most work of `counted` functions in one turn, for tests that must not depend on a clock."""

    def __init__(self) -> None:
        self.count = 0
        self.longest_s = 0.0
        self.most = 0
        self._done = 0
        loop: Any = asyncio.get_running_loop()
        self._loop = loop
        self._run_once: Callable[[], None] = self._loop._run_once

    def counted(self, function: Callable[..., T], amount: Callable[..., int] = lambda *arguments: 1) -> Callable[..., T]:
        """`function`, of which each call is so much work."""

        def call(*arguments: Any) -> T:
            self._done += amount(*arguments)
            self.most = max(self.most, self._done)
            return function(*arguments)

        return call

    def __enter__(self) -> Self:
        def run_once() -> None:
            self.count += 1
            self._done, began = 0, time.thread_time()
            try:
                self._run_once()
            finally:
                self.longest_s = max(self.longest_s, time.thread_time() - began)

        self._loop._run_once = run_once
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._loop._run_once = self._run_once
