"""What has come for one call and has not been taken yet, in order."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from router.backlog import ENTRY_BYTES, Backlog

T = TypeVar("T")
LENGTH_BYTES = 4  # before each token in a run


class Inbox(Generic[T]):
    """Tokens wait as bytes. Successive ones are kept as one piece of memory: to free thousands of pieces takes milliseconds."""

    def __init__(self, interval_s: Callable[[], float], backlog: Backlog | None = None) -> None:
        """`interval_s`: between two times at which tokens are taken, asked each time; 0: none. `backlog` counts what waits here."""
        self._interval_s = interval_s
        self._backlog = backlog or Backlog()
        self._loop = asyncio.get_running_loop()
        self._due_at = 0.0  # when tokens are taken; 0: at once
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: deque[T | bytearray] = deque()  # bytearray: a run of tokens
        self.size = 0  # bytes of what waits
        self._patient = False  # whether tokens wait
        self._ended = False
        self._ready = asyncio.Event()

    def put(self, message: T) -> None:
        """It takes the tokens before it along."""
        if not self._ended:
            self._waiting.append(message)
            self._ready.set()

    def put_token(self, token: bytes) -> None:
        if self._ended:
            return
        if not (self._waiting and isinstance(run := self._waiting[-1], bytearray)):
            self._waiting.append(run := bytearray())
        run += len(token).to_bytes(LENGTH_BYTES, "big") + token
        self._grow(ENTRY_BYTES + len(token))
        self._patient = True
        if not self._due_at:
            self._ready.set()
        elif self._timer is None:
            self._timer = self._loop.call_at(self._due_at, self._ready.set)

    def end(self, message: T) -> None:
        """Drops everything that waits. `message` is the last one."""
        self._drop()
        self.put(message)
        self._ended = True

    async def take(self, most: int) -> tuple[list[T | bytes], int]:
        """Waits until something is to be taken. Returns up to `most` bytes of it, at least one message or token, and its size."""
        await self._ready.wait()
        taken: list[T | bytes] = []
        size = 0
        while self._waiting and size < most:
            first = self._waiting[0]
            if not isinstance(first, bytearray):
                taken.append(first)
            else:
                size += self._take_tokens(first, most - size, taken)
                if first:
                    break
            self._waiting.popleft()
        self._grow(-size)
        if not self._waiting:
            self._ready.clear()
            if self._patient:
                self._stop_timer()
                interval_s, self._patient = self._interval_s(), False
                self._due_at = self._loop.time() + interval_s if interval_s else 0.0
        return taken, size

    def _take_tokens(self, run: bytearray, most: int, taken: list[T | bytes]) -> int:
        """Moves tokens from the beginning of the run, until they have `most` bytes or more. Returns their size."""
        at = size = 0
        while at < len(run) and size < most:
            start = at + LENGTH_BYTES
            at = start + int.from_bytes(run[at:start], "big")
            taken.append(bytes(run[start:at]))
            size += ENTRY_BYTES + at - start
        del run[:at]
        return size

    def close(self) -> None:
        """Nobody takes any more."""
        self._drop()
        self._stop_timer()
        self._ended = True

    def _drop(self) -> None:
        self._grow(-self.size)
        self._waiting.clear()

    def _grow(self, by: int) -> None:
        self.size += by
        self._backlog.size += by

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
