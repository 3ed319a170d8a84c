"""An event loop whose time passes only when nobody can go on: then it jumps to the next timer. Hours take seconds, and a run can be
repeated.

Nothing real may be waited for: there are no sockets, and a function that is given to a thread runs at once, in the loop's own thread.

The time is exactly that of the timer, and timers of one moment go in the order in which they were set. Those of `at_first` go before: a
step of an engine that ends at a moment has ended for all that happens at it. So what follows from steps is the same whether each is waited
for or many at once (`baton.simulate.jumps`).
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from functools import partial
from itertools import count
from typing import Any, TypeVar

T = TypeVar("T")
# Places among the timers of one moment: of the ends of steps, of messages, of all others.
MESSAGES, LAST = 1 << 40, 1 << 60
KEPT = 1024  # timers that may be cancelled before they are looked for


class Deadlock(RuntimeError):
    """Everybody waits for something that will never happen."""


class VirtualLoop(asyncio.BaseEventLoop):
    _ready: deque[asyncio.Handle]  # what can go on

    def __init__(self) -> None:
        self._now = 0.0
        self._timers: list[tuple[float, int, int, asyncio.TimerHandle]] = []  # a heap: moment, place, number
        self._numbers = count()
        self._cancelled = 0  # timers in it that were, about
        super().__init__()

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._now

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self._set(self._now + delay, LAST, callback, args, context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self._set(when, LAST, callback, args, context)

    def at_first(self, when: float, place: int, callback: Callable[[], object]) -> asyncio.TimerHandle:
        """`call_at`, before all other timers of that moment; among these, in the order of their places."""
        return self._set(when, place, callback, (), None)

    def run_in_executor(self, executor: Executor | None, func: Callable[..., T], *args: Any) -> "asyncio.Future[T]":  # type: ignore[override]
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        super().close()
        self._timers.clear()

    def _set(self, when: float, place: int, callback: Callable[..., object], args: tuple[Any, ...], context: Any) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, place, next(self._numbers), timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is told of every one."""
        self._cancelled += 1
        if self._cancelled > KEPT and 2 * self._cancelled > len(self._timers):
            self._timers = [each for each in self._timers if not each[3].cancelled()]
            heapq.heapify(self._timers)
            self._cancelled = 0

    def _run_once(self) -> None:
        """A turn: what is ready when it begins."""
        ready, timers = self._ready, self._timers
        if not ready:
            self._jump()
        elif timers and timers[0][0] <= self._now:
            self._due()
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()

    def _jump(self) -> None:
        timers = self._timers
        while timers and timers[0][3].cancelled():
            heapq.heappop(timers)
        if not timers:
            raise Deadlock(f"at {self._now:g} s everybody waits, and no timer runs")
        self._now = max(self._now, timers[0][0])
        self._due()

    def _due(self) -> None:
        timers, ready, now = self._timers, self._ready, self._now
        while timers and timers[0][0] <= now:
            ready.append(heapq.heappop(timers)[3])

    def _write_to_self(self) -> None:
        """Another thread has called something: there is nothing to wake."""


async def until(when: float, place: int = LAST) -> None:
    """Waits for a moment of the loop, exactly. Returns at once if it has passed. `place`: among those that wait for the same moment."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    if when > loop.time():
        future = loop.create_future()
        timer = loop.at_first(when, place, partial(_done, future))
        try:
            await future
        finally:
            timer.cancel()


def _done(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Same as `asyncio.run`, in virtual time. Raises Deadlock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
