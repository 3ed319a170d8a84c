"""The share of a turn of the loop, and what waits for a reader."""

import asyncio

from router.backlog import ENTRY_BYTES, Backlog
from router.inbox import Inbox
from router.turn_budget import BYTES_OF_AN_END, TurnBudget


async def turns_of(budget: TurnBudget, sizes: list[int]) -> list[int]:
    """The turn in which each piece of work is done, if all ask at once."""
    turn, done = 0, [-1] * len(sizes)

    async def work(number: int) -> None:
        await budget.spend(sizes[number])
        done[number] = turn

    tasks = [asyncio.create_task(work(number)) for number in range(len(sizes))]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        turn += 1
    return done


async def test_work_that_a_turn_has_no_room_for_is_done_in_later_ones_in_order() -> None:
    done = await turns_of(TurnBudget(1000), [100] * 100)
    assert done == sorted(done)
    assert max(done.count(turn) for turn in done) <= 20, "a turn sees the last of one budget and the first of the next, at most"


async def test_work_that_fits_does_not_wait() -> None:
    assert len(set(await turns_of(TurnBudget(1000), [100] * 9))) == 1


async def test_work_that_is_greater_than_a_turn_is_done() -> None:
    done = await turns_of(TurnBudget(1000), [5000, 5000, 1])
    assert done[0] < done[1] < done[2] or done[0] < done[1] == done[2]


async def test_a_stream_that_ends_while_it_waits_stops_nobody() -> None:
    budget = TurnBudget(10)
    await budget.spend(10)
    waiting = [asyncio.create_task(budget.spend(10)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[1].cancel()  # the first has had its turn
    async with asyncio.timeout(30):
        ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(ended[1], asyncio.CancelledError) and [ended[0], ended[2]] == [None, None]


async def test_the_ends_of_requests_share_a_turn_too() -> None:
    budget, turn = TurnBudget(2 * BYTES_OF_AN_END), 0
    ended: list[int] = []

    async def request() -> None:
        async with budget.ending():
            pass
        ended.append(turn)

    tasks = [asyncio.create_task(request()) for _ in range(20)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        turn += 1
    assert max(ended.count(each) for each in ended) <= 4


async def test_what_waits_is_counted_and_taken_in_order_and_a_piece_at_a_time() -> None:
    backlog = Backlog()
    one, other = Inbox[str](lambda: 0.0, backlog), Inbox[str](lambda: 0.0, backlog)
    one.put("adopted")
    for i in range(10):
        one.put_token(bytes([i]) * i)
    one.put("ended")
    other.put_token(b"x")
    assert backlog.size == 11 * ENTRY_BYTES + 45 + 1
    got: list[str | bytes] = []
    while len(got) < 12:
        taken, size = await one.take(2 * ENTRY_BYTES)
        assert sum(ENTRY_BYTES + len(token) for token in taken if isinstance(token, bytes)) == size < 4 * ENTRY_BYTES
        got += taken
    assert got == ["adopted", *(bytes([i]) * i for i in range(10)), "ended"]
    assert backlog.size == ENTRY_BYTES + 1
    other.close()
    assert backlog.size == 0


async def test_an_end_drops_what_waits_and_nothing_comes_after_it() -> None:
    backlog = Backlog()
    inbox = Inbox[str](lambda: 0.0, backlog)
    inbox.put_token(b"abc")
    inbox.end("cut")
    inbox.put_token(b"def")
    inbox.put("late")
    assert backlog.size == 0 and (await inbox.take(1 << 20)) == (["cut"], 0)
