"""How long the turns of an event loop take, in processor time of the loop's thread: a busy machine makes no turn longer.

    with watched() as turns:
        ...
    turns.check(0.020)

A turn is everything that the loop does between two looks at its sockets and timers: whoever becomes ready meanwhile waits for its end, so
many short callbacks that are ready together count as one long turn. The garbage collector's time is left out, because it depends on the
heap of the whole test process. Limits are those of a processor that adds a number in Python in ADDED_S; a slower one has more time.

A neighbour on the same silicon, and a host that takes the processor away, lengthen what a thread is said to have used, to twice of it at
times. Such noise only adds, so what is too long raises TooLong, and a test that ends so is repeated (pyproject.toml): what the code itself
makes long is so each time.
"""

import asyncio
import gc
import threading
import time
from asyncio.events import Handle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

ADDED_S = 33e-9  # a Zen 5, for which the limits were chosen
ADDED = 50_000
TRIALS = 20


class TooLong(AssertionError):
    """Of processor time."""


def within(spent_s: float, most_s: float, what: object = "") -> None:
    """Asserts that what took `spent_s` of a thread's time takes `most_s` at most, at this processor's pace."""
    __tracebackhide__ = True
    if spent_s > most_s and spent_s > most_s * (slower := pace()):
        raise TooLong(f"{what or spent_s} is more than {most_s} s; this processor is {slower:.1f} times slower")


def pace() -> float:
    """How many times slower this processor is now; 1 if it is faster. Four trials of five are quicker: a neighbour comes and goes, and what
    is judged is the longest of many turns."""

    def trial(_: int) -> float:
        time.sleep(0.005)
        began, total = time.thread_time(), 0
        for i in range(ADDED):
            total += i
        return time.thread_time() - began

    return max(1.0, sorted(map(trial, range(TRIALS)))[TRIALS * 4 // 5] / (ADDED * ADDED_S))


@dataclass(frozen=True, slots=True)
class Turn:
    cpu_s: float = 0.0
    callbacks: int = 0
    worst: str = ""  # the callback that took most of it
    worst_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.cpu_s * 1e3:.1f} ms in {self.callbacks} callbacks, {self.worst_s * 1e3:.1f} ms of it in {self.worst}"


@dataclass(slots=True)
class Turns:
    count: int = 0
    longest: Turn = field(default_factory=Turn)

    def check(self, most_s: float) -> None:
        """Asserts that no turn took longer, at this processor's pace."""
        within(self.longest.cpu_s, most_s, f"a turn of the loop of {self.longest}")


@contextmanager
def watched(clock: Callable[[], float] = time.thread_time) -> Iterator[Turns]:
    """Measures the turns of the running loop, from the next one to the end of the block."""
    loop: Any = asyncio.get_running_loop()
    handles: Any = Handle
    turns, watch = Turns(), _Watch(clock)
    turn_of_loop, run = loop._run_once, handles._run

    def one_turn() -> None:
        watch.begin()
        turn_of_loop()
        note()

    def note() -> None:
        if watch.open:
            turns.count += 1
            turn = watch.end()
            if turn.cpu_s > turns.longest.cpu_s:
                turns.longest = turn

    def timed(handle: Any) -> None:
        if handle._loop is loop and watch.open:
            watch.time(handle, run)
        else:
            run(handle)

    loop._run_once, handles._run = one_turn, timed
    gc.callbacks.append(watch.note_collection)
    try:
        yield turns
    finally:
        note()  # the turn that leaves the block, as far as it has come
        gc.callbacks.remove(watch.note_collection)
        handles._run = run
        del loop._run_once


class _Watch:
    """One turn after the other."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.open = False
        self._clock = clock
        self._thread = threading.get_ident()
        self._began = self._collecting_since = self._collected = 0.0
        self._callbacks = 0
        self._worst: tuple[float, str] = (0.0, "")
        self._running: tuple[Any, float] | None = None  # a callback, and when it began

    def begin(self) -> None:
        self.open, self._callbacks, self._collected, self._worst = True, 0, 0.0, (0.0, "")
        self._running, self._began = None, self._clock()

    def end(self) -> Turn:
        self._judge()
        self.open = False
        took_s, name = self._worst
        return Turn(self._now() - self._began, self._callbacks, name, took_s)

    def time(self, handle: Any, run: Callable[[Any], None]) -> None:
        self._callbacks += 1
        self._running = handle._callback, self._now()
        run(handle)
        self._judge()

    def _judge(self) -> None:
        if self._running is not None:
            callback, began = self._running
            self._running = None
            if (took_s := self._now() - began) > self._worst[0]:
                self._worst = took_s, _name(callback)

    def _now(self) -> float:
        return self._clock() - self._collected

    def note_collection(self, phase: str, info: dict[str, int]) -> None:
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._collecting_since = self._clock()
        else:
            self._collected += self._clock() - self._collecting_since


def _name(callback: Any) -> str:
    """A task's coroutine, and where it waits now; any other callback's own name."""
    task = getattr(callback, "__self__", None)
    if not isinstance(task, asyncio.Task):
        return str(getattr(callback, "__qualname__", callback))
    coroutine: Any = task.get_coro()
    names = [str(coroutine.__qualname__ or coroutine)]  # gRPC's have no names
    while (coroutine := getattr(coroutine, "cr_await", None) or getattr(coroutine, "ag_await", None)) is not None:
        if name := getattr(coroutine, "__qualname__", ""):
            names.append(name)
    return " > ".join(names)
