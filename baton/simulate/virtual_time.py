"""An event loop whose time passes only when nobody can go on: then it jumps to the next timer. Hours take seconds, and a run can be
repeated.

Nothing real may be waited for: there are no sockets, and a function that is given to a thread runs at once, in the loop's own thread.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Everybody waits for something that will never happen."""


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._now

    def pass_time(self, seconds: float | None) -> None:
        if seconds is None:
            raise Deadlock(f"at {self._now:g} s everybody waits, and no timer runs")
        self._now += seconds

    def run_in_executor(self, executor: Executor | None, func: Callable[..., T], *args: Any) -> "asyncio.Future[T]":  # type: ignore[override]
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


class _Jumping(selectors.SelectSelector):
    """Waits for nothing, and lets the loop's time pass instead."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if found := super().select(0):  # the loop's own pipe: something was called from another thread
            return found
        if timeout is None or timeout > 0:
            self._loop.pass_time(timeout)
        return []


def run(main: Coroutine[Any, Any, T]) -> T:
    """Same as `asyncio.run`, in virtual time. Raises Deadlock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
