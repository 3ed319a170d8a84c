"""Counts the work done in each turn of an event loop, for tests that must not depend on a clock. (`turns` measures the time of turns.)"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class TurnWork:
    """`most`: the highest amount in one turn."""

    def __init__(self) -> None:
        self.turns = 0
        self.most = 0
        self._done = 0

    def counted(self, function: Callable[..., T], amount: Callable[..., int] = lambda *arguments: 1) -> Callable[..., T]:
        """`function`, of which each call is so much work."""

        def call(*arguments: Any) -> T:
            self._done += amount(*arguments)
            self.most = max(self.most, self._done)
            return function(*arguments)

        return call

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Counts from here to the end of the block; what was done before does not count."""
        loop: Any = asyncio.get_running_loop()
        run_once = loop._run_once

        def one_turn() -> None:
            self.turns += 1
            self._done = 0
            run_once()

        self.most = self._done = 0
        loop._run_once = one_turn
        try:
            yield
        finally:
            del loop._run_once
