"""Cores that several processes share, in the event loop's time.

`Cores.work` is processor sharing (Kleinrock, "Time-shared systems: a theoretical treatment", 1967): while k jobs are busy on c cores, each
goes on at min(1, c / k) of its speed, which is what a fair scheduler of an operating system comes to over more than a time slice. Busy
cores also slow each other, since they share caches, memory and the clock: `pair` is how fast two go that are both busy, in shares of one
alone. A thread does one thing after the other (`Thread`).
"""

import asyncio
import heapq
from collections import deque
from itertools import count
from typing import Protocol


class Computes(Protocol):
    async def work(self, seconds: float) -> None:
        """Returns when so much processor time has been used."""


class Own:
    """A core for everybody: nobody waits."""

    async def work(self, seconds: float) -> None:
        if seconds > 0:
            await asyncio.sleep(seconds)


class Cores:
    def __init__(self, cores: int, pair: float = 1.0) -> None:
        """Raises ValueError for no core, or a `pair` that is not above 0 and at most 1."""
        if cores < 1 or not 0 < pair <= 1:
            raise ValueError(f"{cores} cores at a speed of {pair}: there is at least one, at a speed above 0 and at most 1")
        self._cores, self._pair = cores, pair
        self._jobs: list[tuple[float, int, asyncio.Future[None]]] = []  # (end, in work that each job has had since the start; order; who)
        self._had = 0.0  # work that each busy job has had since the start
        self._at = 0.0  # when `_had` was that
        self._numbers = count()
        self._timer: asyncio.TimerHandle | None = None

    async def work(self, seconds: float) -> None:
        if seconds <= 0:
            return
        loop = asyncio.get_running_loop()
        self._pass(loop.time())
        job = self._had + seconds, next(self._numbers), loop.create_future()
        heapq.heappush(self._jobs, job)
        self._arm(loop)
        try:
            await job[2]
        except asyncio.CancelledError:
            self._pass(loop.time())
            if job in self._jobs:
                self._jobs.remove(job)
                heapq.heapify(self._jobs)
            self._arm(loop)
            raise

    @property
    def _speed(self) -> float:
        """Of each job."""
        busy = len(self._jobs)
        used = min(busy, self._cores)
        slowed = 1 - (1 - self._pair) * (used - 1) / (self._cores - 1) if self._cores > 1 and used > 1 else 1.0
        return slowed * used / busy

    def _pass(self, now: float) -> None:
        if self._jobs:
            self._had += (now - self._at) * self._speed
        self._at = now

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._jobs:
            self._timer = loop.call_at(self._at + max(0.0, self._jobs[0][0] - self._had) / self._speed, self._due, loop)

    def _due(self, loop: asyncio.AbstractEventLoop) -> None:
        self._pass(loop.time())
        self._had = max(self._had, self._jobs[0][0])  # the timer was for this one: rounding must not leave it a moment short
        while self._jobs and self._jobs[0][0] <= self._had:
            _, _, future = heapq.heappop(self._jobs)
            if not future.done():
                future.set_result(None)
        self._timer = None
        self._arm(loop)


class Thread:
    """Does one thing after the other, in the order in which they are asked."""

    def __init__(self, cores: Computes) -> None:
        self._cores = cores
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._busy = False

    async def work(self, seconds: float) -> None:
        if seconds <= 0:
            return
        if self._busy:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._next()
                raise
        self._busy = True
        try:
            await self._cores.work(seconds)
        finally:
            self._next()

    def _next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._busy = False
