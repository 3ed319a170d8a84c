"""Work that comes at once is spread over turns of the event loop, in order."""

import asyncio

from turn_work import TurnWork

from router.turnstile import Turnstile


async def test_so_much_passes_in_a_turn_and_the_rest_in_order() -> None:
    turnstile, work, passed = Turnstile(10), TurnWork(), list[int]()
    note = work.counted(passed.append)

    async def one(number: int) -> None:
        await turnstile.enter(2)
        note(number)

    with work.watched():
        await asyncio.gather(*map(one, range(100)))
    assert passed == list(range(100)) and work.most == 5 and work.turns >= 20


async def test_nobody_waits_while_something_is_left() -> None:
    turnstile, work = Turnstile(3), TurnWork()
    with work.watched():
        count = work.turns
        for _ in range(3):
            await turnstile.enter()
        assert work.turns == count
        await turnstile.enter()
        assert work.turns > count


async def test_an_amount_above_a_turn_gets_a_turn_for_itself() -> None:
    turnstile, work, passed = Turnstile(3), TurnWork(), list[int]()
    note = work.counted(passed.append)

    async def one(amount: int) -> None:
        await turnstile.enter(amount)
        note(amount)

    with work.watched():
        await asyncio.wait_for(asyncio.gather(*map(one, (50, 50, 1, 1))), 10)
    assert passed == [50, 50, 1, 1] and work.most == 2


async def test_who_is_cancelled_while_it_waits_takes_no_place() -> None:
    turnstile, passed = Turnstile(1), list[int]()

    async def one(number: int) -> None:
        await turnstile.enter()
        passed.append(number)

    tasks = [asyncio.create_task(one(number)) for number in range(5)]
    await asyncio.sleep(0)
    tasks[2].cancel()
    tasks[3].cancel()
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
    assert passed == [0, 1, 4]
    await asyncio.wait_for(turnstile.enter(), 10)
