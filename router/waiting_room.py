"""Who waits for a worker with room, and who may look for one. Nobody asks again and again: a change in the cluster calls the first of the
line; when it has left, or cannot use what others could, it calls the next.

The line is ordered by rank, and nobody overtakes: who joins it looks at once only if nobody is before it.
"""

import asyncio
from bisect import insort
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from baton.cluster.errors import BatonError, Reason
from router.request import Request, emitted, too_late

Rank = tuple[Any, ...]  # the lowest goes first; no two are equal


class WaitingRoom:
    def __init__(self) -> None:
        self._line: list[WaitingPlace] = []

    def __len__(self) -> int:
        return len(self._line)

    def enter(self, rank: Rank) -> "WaitingPlace":
        return WaitingPlace(self, rank)

    def call(self, everybody: bool = False) -> None:
        """There may be room now. `everybody`: there is something else to be told, such as that nobody serves any more."""
        for place in self._line if everybody else self._line[:1]:
            place.call()

    def join(self, place: "WaitingPlace") -> None:
        insort(self._line, place, key=lambda each: each.rank)
        if self._line[0] is place:
            place.call()

    def call_after(self, place: "WaitingPlace") -> None:
        following = self._line.index(place) + 1
        for each in self._line[following : following + 1]:
            each.call()

    def leave(self, place: "WaitingPlace") -> None:
        if place.may_look:
            self.call_after(place)
        self._line.remove(place)


class WaitingPlace:
    """One's place in the line, as long as the block lasts."""

    def __init__(self, room: WaitingRoom, rank: Rank) -> None:
        self.rank = rank
        self.may_look = False
        self._room = room
        self._called = asyncio.Event()

    def __enter__(self) -> Self:
        self._room.join(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._room.leave(self)

    def call(self) -> None:
        self.may_look = True
        self._called.set()

    async def called(self, within_s: float) -> bool:
        """Whether it was one's turn to look within this time. A call during the last look counts."""
        with suppress(TimeoutError):
            if not self._called.is_set():
                async with asyncio.timeout(within_s):
                    await self._called.wait()
        called = self._called.is_set()
        self._called.clear()
        return called

    def wait_on(self, let_pass: bool) -> None:
        """One has looked and found nothing. `let_pass`: what the next one finds may be of no use here."""
        if let_pass:
            self._room.call_after(self)
        self.may_look = self._called.is_set()


class NoRoom(BatonError):
    """The router's own view found no room during the whole wait: an immediate retry would fail in the same way."""


def no_room(request: Request, now: float, waited_s: float) -> BatonError:
    if now >= request.deadline:
        return too_late(request, "while it waited for a decode worker with room")
    return NoRoom(Reason.SATURATED, f"no decode worker had room for {waited_s:g} s", metadata=emitted(request))
