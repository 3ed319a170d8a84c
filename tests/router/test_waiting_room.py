"""The line of those who wait for room: its order, and that nobody looks without a reason."""

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from router.waiting_room import Rank, WaitingRoom


@dataclass
class House:
    """Has so many places. Whoever gets one keeps it."""

    room: WaitingRoom = field(default_factory=WaitingRoom)
    free: int = 0
    served: list[Rank] = field(default_factory=list)
    looks: int = 0

    async def client(self, rank: Rank, within_s: float = 30.0, picky: bool = False) -> bool:
        """`picky`: what is free is of no use to it."""
        with self.room.enter(rank) as place:
            while await place.called(within_s):
                self.looks += 1
                if self.free and not picky:
                    self.free -= 1
                    self.served.append(rank)
                    return True
                place.wait_on(let_pass=picky)
        return False

    def give(self, places: int) -> None:
        self.free += places
        self.room.call()


@contextmanager
def joined(house: House, ranks: list[Rank]) -> Iterator[list[asyncio.Task[bool]]]:
    tasks = [asyncio.create_task(house.client(rank)) for rank in ranks]
    yield tasks
    for task in tasks:
        task.cancel()


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_thousand_are_served_by_rank_and_look_only_when_there_may_be_room() -> None:
    house, ranks = House(), [(priority, arrival) for priority in range(4) for arrival in range(250)]
    shuffled = random.Random(1).sample(ranks, len(ranks))
    with joined(house, shuffled) as tasks:
        await settled()
        assert house.looks < 20, "only who is first for a moment looks"
        house.looks = 0
        for _ in ranks:
            house.give(1)
            await settled()
        await asyncio.gather(*tasks)
    assert house.served == ranks and house.looks < 2 * len(ranks) + 1 and not len(house.room)


async def test_one_call_serves_as_many_as_there_is_room_for() -> None:
    house = House()
    with joined(house, [(n,) for n in range(10)]):
        await settled()
        house.give(7)
        await settled()
        assert house.served == [(n,) for n in range(7)] and len(house.room) == 3


async def test_a_newcomer_does_not_overtake() -> None:
    house = House()
    with joined(house, [(1,)]):
        await settled()
        house.free = 1  # and nobody has been called yet
        late = asyncio.create_task(house.client((2,)))
        await settled()
        assert house.served == [] and not late.done()
        house.room.call()
        await settled()
        assert house.served == [(1,)]
        late.cancel()


async def test_an_urgent_newcomer_looks_at_once() -> None:
    house = House(free=0)
    with joined(house, [(5,)]):
        await settled()
        house.free = 1
        assert await house.client((0,))
        assert house.served == [(0,)]


async def test_who_cannot_use_what_is_free_lets_the_next_one_look() -> None:
    house = House()
    picky = [asyncio.create_task(house.client((n,), picky=True)) for n in range(2)]
    with joined(house, [(n,) for n in (2, 3)]):
        await settled()
        house.give(1)
        await settled()
        assert house.served == [(2,)] and len(house.room) == 3
    for task in picky:
        task.cancel()


async def test_who_gives_up_in_the_middle_of_the_line_calls_nobody() -> None:
    house = House()
    with joined(house, [(0,), (2,)]):
        short = asyncio.create_task(house.client((1,), within_s=0.02))
        await settled()
        looks, house.free = house.looks, 1
        assert not await short
        await settled()
        assert house.looks == looks and house.served == []


async def test_who_is_first_and_gives_up_calls_the_next() -> None:
    house = House()
    first = asyncio.create_task(house.client((0,)))
    with joined(house, [(1,)]):
        await settled()
        house.give(1)  # the first one is called, and cancelled before it looks
        first.cancel()
        await settled()
        assert house.served == [(1,)]


async def test_everybody_can_be_called() -> None:
    house = House()
    with joined(house, [(n,) for n in range(5)]):
        await settled()
        looks = house.looks
        house.room.call(everybody=True)
        await settled()
        assert house.looks == looks + 5


@pytest.mark.parametrize("within_s", [0.0, -1.0])
async def test_without_time_one_may_look_once(within_s: float) -> None:
    house = House(free=1)
    assert await house.client((0,), within_s) and not await house.client((1,), within_s)
