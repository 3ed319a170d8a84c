"""Calls of a library that may never return, in threads: so many at a time, each with a deadline."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Round(Generic[T]):
    """The calls of one `all`."""

    def __init__(self, calls: Sequence[Callable[[], T]]) -> None:
        self.left = deque(enumerate(calls))
        self.results: dict[int, T] = {}
        self.error: Exception | None = None
        self.threads = 0
        self.stuck = False  # its threads did not return in time


class Calls:
    """Thread-safe. Its threads end with their calls, and are daemons: what never returns keeps no process alive."""

    def __init__(self, at_once: int, deadline_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.at_once = at_once
        self.deadline_s = deadline_s
        self._clock = clock
        self._changed = threading.Condition()
        self._running = 0  # threads
        self._stuck = 0  # of these

    def all(self, calls: Sequence[Callable[[], T]], deadline_s: float = 0.0) -> list[T]:
        """What each returns. As soon as one raises, that is raised, and no other is begun. Raises TimeoutError if one takes longer than its
        deadline (0: `self.deadline_s`), and at once if all threads are in calls that did."""
        if not calls:
            return []
        each_s = deadline_s or self.deadline_s
        round_ = Round(calls)
        with self._changed:
            self._start(round_, each_s)
            began = self._clock()
            while len(round_.results) < len(calls) and round_.error is None:
                rounds = 1 + len(round_.results) // round_.threads if round_.threads else 1
                left_s = began + rounds * each_s - self._clock()
                if left_s <= 0:
                    round_.error, round_.stuck = TimeoutError(f"no answer for {self._clock() - began:.1f} s"), True
                    self._stuck += round_.threads
                else:
                    self._changed.wait(left_s)
            round_.left.clear()
            if round_.error is not None:
                raise round_.error
            return [round_.results[i] for i in range(len(calls))]

    def _start(self, round_: Round[T], seconds: float) -> None:
        """Threads for it: at least one, as soon as one may run."""
        until = self._clock() + seconds
        while self._running == self.at_once:
            left_s = until - self._clock()
            if self._stuck == self._running or left_s <= 0:
                raise TimeoutError(f"{self._running} calls before this one have had no answer")
            self._changed.wait(left_s)
        round_.threads = min(self.at_once - self._running, len(round_.left))
        self._running += round_.threads
        for _ in range(round_.threads):
            threading.Thread(target=self._run, args=(round_,), name="store-call", daemon=True).start()

    def _run(self, round_: Round[T]) -> None:
        while True:
            with self._changed:
                if not round_.left:
                    round_.threads -= 1
                    self._running -= 1
                    self._stuck -= round_.stuck
                    self._changed.notify_all()
                    return
                number, call = round_.left.popleft()
            try:
                result = call()
            except Exception as error:  # each library has errors of its own
                with self._changed:
                    round_.error = round_.error or error
                    round_.left.clear()
                    self._changed.notify_all()
            else:
                with self._changed:
                    round_.results[number] = result
                    self._changed.notify_all()
