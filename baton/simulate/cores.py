"""Cores that several processes share, in the event loop's time.

`Cores.work` is processor sharing (Kleinrock, "Time-shared systems: a theoretical treatment", 1967): while k jobs are busy on c cores, each
goes on at min(1, c / k) of its speed, which is what a fair scheduler of an operating system comes to over more than a time slice. Busy
cores also slow each other, since they share caches, memory and the clock, and how much depends on what both do (`Speeds`). A thread does
one thing after the other (`Thread`).
"""

import asyncio
from collections import deque
from dataclasses import dataclass, fields
from typing import Literal, Protocol, get_args

ROUNDING_S = 1e-12  # what may be missing of a job that has had its time
Kind = Literal["prompt", "decode", "other"]


@dataclass(frozen=True, slots=True)
class Speeds:
    """How fast a busy core goes while another is busy, in shares of one alone. None: as `pair`. Nobody slows what is neither a prompt nor a
    decode. Raises ValueError for one that is not above 0 and at most 1."""

    pair: float = 1.0  # both compute prompts
    decode: float | None = None  # both decode
    prompt_beside: float | None = None  # a prompt, while the other decodes
    decode_beside: float | None = None  # a decode, while the other computes a prompt
    prompt_crowded: float = 1.0  # a prompt, while the other does neither
    decode_crowded: float = 1.0  # a decode, while the other does neither

    def __post_init__(self) -> None:
        for speed in fields(self):
            value = getattr(self, speed.name)
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"a speed of {value}: it is above 0 and at most 1")

    def of(self, kind: Kind, other: Kind) -> float:
        """The speed of one that does `kind`."""
        if kind == "other":
            return 1.0
        special = {
            ("prompt", "other"): self.prompt_crowded,
            ("decode", "other"): self.decode_crowded,
            ("decode", "decode"): self.decode,
            ("prompt", "decode"): self.prompt_beside,
            ("decode", "prompt"): self.decode_beside,
        }.get((kind, other))
        return self.pair if special is None else special


class Computes(Protocol):
    async def work(self, seconds: float, kind: Kind = "other") -> None:
        """Returns when so much processor time has been used."""


class OwnCores:
    """A core for everybody: nobody waits."""

    async def work(self, seconds: float, kind: Kind = "other") -> None:
        if seconds > 0:
            await asyncio.sleep(seconds)


@dataclass(slots=True, eq=False)
class _Job:
    left: float  # seconds of a core alone
    kind: Kind
    done: asyncio.Future[None]


class Cores:
    def __init__(self, cores: int, speeds: Speeds | None = None) -> None:
        """Raises ValueError for no core."""
        if cores < 1:
            raise ValueError(f"{cores} cores: there is at least one")
        speeds = speeds or Speeds()
        kinds: tuple[Kind, ...] = get_args(Kind)
        self._cores = cores
        self._lost = {(kind, other): 1 - speeds.of(kind, other) for kind in kinds for other in kinds}
        self._jobs: list[_Job] = []  # as they came: there are few, and each goes at a speed of its own
        self._at = 0.0  # until when what is left has been counted
        self._timer: asyncio.TimerHandle | None = None

    async def work(self, seconds: float, kind: Kind = "other") -> None:
        if seconds <= 0:
            return
        loop = asyncio.get_running_loop()
        self._pass(loop.time())
        job = _Job(seconds, kind, loop.create_future())
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
        """What all cores but one lose it is told by `Speeds`; fewer lose it their share. Which of the others run beside it, chance says."""
        busy = len(self._jobs)
        used = min(busy, self._cores)
        if used == 1:
            return 1 / busy
        lost = sum(self._lost[job.kind, other.kind] for other in self._jobs if other is not job) / (busy - 1)
        return (1 - lost * (used - 1) / (self._cores - 1)) * used / busy

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
