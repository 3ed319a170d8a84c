"""Cores that several processes share, in the event loop's time.

`Cores.work` is processor sharing (Kleinrock, "Time-shared systems: a theoretical treatment", 1967): while k jobs are busy on c cores, each
goes on at min(1, c / k) of its speed, which is what a fair scheduler of an operating system comes to over more than a time slice. Busy
cores also slow each other, since they share caches, memory and the clock, and some work more than other: `pair` is how fast each of two
goes that do the same and are both busy, in shares of one alone. A thread does one thing after the other (`Thread`).
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Protocol

ROUNDING_S = 1e-12  # what may be missing of a job that has had its time


class Computes(Protocol):
    async def work(self, seconds: float, pair: float | None = None) -> None:
        """Returns when so much processor time has been used. `pair`: of this work, if it is not that of all others."""


class Own:
    """A core for everybody: nobody waits."""

    async def work(self, seconds: float, pair: float | None = None) -> None:
        if seconds > 0:
            await asyncio.sleep(seconds)


@dataclass(slots=True, eq=False)
class _Job:
    left: float  # seconds of a core alone
    pair: float
    done: asyncio.Future[None]


class Cores:
    def __init__(self, cores: int, pair: float = 1.0) -> None:
        """Raises ValueError for no core, or a `pair` that is not above 0 and at most 1."""
        if cores < 1 or not 0 < pair <= 1:
            raise ValueError(f"{cores} cores at a speed of {pair}: there is at least one, at a speed above 0 and at most 1")
        self._cores, self._pair = cores, pair
        self._jobs: list[_Job] = []  # as they came: there are few, and each goes at a speed of its own
        self._at = 0.0  # until when what is left has been counted
        self._timer: asyncio.TimerHandle | None = None

    async def work(self, seconds: float, pair: float | None = None) -> None:
        """Raises ValueError as the constructor does."""
        if seconds <= 0:
            return
        pair = self._pair if pair is None else pair
        if not 0 < pair <= 1:
            raise ValueError(f"a speed of {pair}: it is above 0 and at most 1")
        loop = asyncio.get_running_loop()
        self._pass(loop.time())
        job = _Job(seconds, pair, loop.create_future())
        self._jobs.append(job)
        self._arm(loop)
        try:
            await job.done
        except asyncio.CancelledError:
            self._pass(loop.time())
            if job in self._jobs:
                self._jobs.remove(job)
            self._arm(loop)
            raise

    def _speed(self, job: _Job) -> float:
        busy = len(self._jobs)
        used = min(busy, self._cores)
        slowed = 1 - (1 - job.pair) * (used - 1) / (self._cores - 1) if used > 1 else 1.0
        return slowed * used / busy

    def _pass(self, now: float) -> None:
        passed = now - self._at
        for job in self._jobs:
            job.left -= passed * self._speed(job)
        self._at = now

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._jobs:
            first, after = min(((job, max(0.0, job.left) / self._speed(job)) for job in self._jobs), key=lambda each: each[1])
            self._timer = loop.call_at(self._at + after, self._due, loop, first)

    def _due(self, loop: asyncio.AbstractEventLoop, first: _Job) -> None:
        self._pass(loop.time())
        first.left = 0.0  # the timer was for this one: rounding must not leave it a moment short
        ended = [job for job in self._jobs if job.left <= ROUNDING_S]
        self._jobs = [job for job in self._jobs if job.left > ROUNDING_S]
        for job in ended:
            if not job.done.done():
                job.done.set_result(None)
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
