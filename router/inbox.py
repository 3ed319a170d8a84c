"""What has come for one call and has not been taken yet: whoever takes gets all of it, in order."""

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    def __init__(self, interval_s: float) -> None:
        """`interval_s`: between two times at which messages that can wait are taken."""
        self._interval_s = interval_s
        self._loop = asyncio.get_running_loop()
        self._due_at = 0.0  # when messages that can wait are taken
        self._timer: asyncio.TimerHandle | None = None
        self._messages: list[T] = []
        self._patient = False  # whether some of the messages can wait
        self._ready = asyncio.Event()

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: T, can_wait: bool = False) -> None:
        """A message that cannot wait takes those before it along."""
        self._messages.append(message)
        self._patient |= can_wait
        if not (can_wait and self._interval_s):
            self._ready.set()
        elif self._timer is None:
            self._timer = self._loop.call_at(self._due_at, self._ready.set)

    async def take(self) -> list[T]:
        """Waits until something is to be taken."""
        await self._ready.wait()
        self._ready.clear()
        if self._patient:
            self.close()
            self._due_at, self._patient = self._loop.time() + self._interval_s, False
        messages, self._messages = self._messages, []
        return messages

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
