"""Several answers to one prompt, as the dispatcher sees them. One of them leads: its prefill, its handoff and its decode call serve all,
and the calls of the others begin with its own. From then on each is a request like any other, also when its worker dies. If the leader
ends before its decode, because its first token was its last, the next one leads.
"""

import asyncio
from collections.abc import Sequence
from typing import Generic, TypeVar

M = TypeVar("M")  # an answer
C = TypeVar("C")  # its call that begins with the leader's


class Family(Generic[M, C]):
    def __init__(self, members: Sequence[M]) -> None:
        """The first one leads. A member is known by its place."""
        loop = asyncio.get_running_loop()
        self.leader = 0
        self._members = members
        self._turns: dict[int, asyncio.Future[C | None]] = {place: loop.create_future() for place in range(1, len(members))}
        self._waiting = dict.fromkeys(self._turns)  # in order

    @property
    def size(self) -> int:
        return len(self._members)

    @property
    def waiting(self) -> dict[int, M]:
        """Those that will begin with the leader, by their places."""
        return {place: self._members[place] for place in self._waiting}

    async def turn(self, place: int) -> C | None:
        """Waits until a member can begin. None: it leads."""
        if place == self.leader:
            return None
        await asyncio.wait((self._turns[place],))  # who no longer waits does not cancel it: the leader may not know yet
        return self._turns.pop(place).result()

    def join(self, place: int, call: C) -> None:
        """The leader's call begins, and this one with it."""
        del self._waiting[place]
        self._turns[place].set_result(call)

    def disband(self) -> None:
        """Nobody can begin with the leader's call: those that wait begin by themselves."""
        for place in self._waiting:
            self._turns[place].set_result(None)
        self._waiting.clear()

    def leave(self, place: int) -> C | None:
        """A member has ended. If it led, the next one does. Returns the call that has begun for it and that it never took."""
        self._waiting.pop(place, None)
        turn = self._turns.pop(place, None)
        if place == self.leader and self._waiting:
            self.leader = next(iter(self._waiting))
            del self._waiting[self.leader]
            if not (next_turn := self._turns[self.leader]).done():
                next_turn.set_result(None)
        return turn.result() if turn is not None and turn.done() and not turn.cancelled() else None
