"""Threads of the tokenizer: who goes first, and that nobody who leaves keeps a place."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from baton.cluster.errors import BatonError, Reason
from router.tokenizer_pool import TokenizerPool


class Work:
    """Calls that run until they are let go, and the order in which they began."""

    def __init__(self, pool: TokenizerPool) -> None:
        self.pool = pool
        self.order: list[str] = []
        self._gates: dict[str, threading.Event] = {}

    def start(self, name: str, begun: bool = False, within_s: float = 60.0) -> "asyncio.Task[str]":
        gate = self._gates[name] = threading.Event()

        def run() -> str:
            self.order.append(name)
            assert gate.wait(60)
            return name

        return asyncio.create_task(self.pool.run(run, within_s=within_s, begun=begun))

    def let_go(self, *names: str) -> None:
        for name in names or self._gates:
            self._gates[name].set()

    async def began(self, count: int) -> None:
        async with asyncio.timeout(30):
            while len(self.order) < count:
                await asyncio.sleep(0.001)


@asynccontextmanager
async def pool(threads: int = 1, waiting: int = 100) -> AsyncIterator[Work]:
    work = Work(TokenizerPool(threads, waiting))
    try:
        yield work
        work.let_go()
        async with asyncio.timeout(30):
            while work.pool._calls:
                await asyncio.sleep(0.001)
        assert work.pool._free == threads and not work.pool._waiting
    finally:
        work.let_go()
        work.pool.close()


async def test_the_next_step_of_a_request_goes_before_the_first_of_others() -> None:
    async with pool() as work:
        calls = [work.start("a")]
        await work.began(1)
        calls += [work.start(name, begun=name in "de") for name in "bcde"]
        await asyncio.sleep(0)
        work.let_go()
        assert await asyncio.gather(*calls) == list("abcde")
        assert work.order == list("adebc")


async def test_as_many_run_as_there_are_threads() -> None:
    async with pool(threads=2) as work:
        calls = [work.start(name) for name in "abc"]
        await work.began(2)
        await asyncio.sleep(0.01)
        assert sorted(work.order) == ["a", "b"]
        work.let_go("b")
        await work.began(3)
        work.let_go()
        await asyncio.gather(*calls)


async def test_a_call_that_leaves_the_line_never_runs_and_keeps_no_place() -> None:
    """Cancelled, or because its time is over."""
    async with pool(waiting=2) as work:
        first = work.start("a")
        await work.began(1)
        late, unwanted = work.start("b", within_s=0.001), work.start("c")
        await asyncio.sleep(0)
        with pytest.raises(BatonError) as caught:
            await work.start("d")
        assert caught.value.reason is Reason.SATURATED
        unwanted.cancel()
        with pytest.raises(BatonError) as caught:
            await late
        assert caught.value.reason is Reason.DEADLINE
        again = work.start("e")
        await asyncio.sleep(0)
        work.let_go()
        assert [await first, await again] == ["a", "e"] and work.order == ["a", "e"]


async def test_a_call_whose_time_is_over_while_it_runs_counts_until_it_is_done() -> None:
    async with pool(waiting=0) as work:
        with pytest.raises(BatonError, match="DEADLINE"):
            await work.start("a", within_s=0.05)
        with pytest.raises(BatonError, match="SATURATED"):
            await work.start("b")
        work.let_go()


@pytest.mark.parametrize("turns", range(8))
async def test_a_call_may_be_cancelled_at_any_moment(turns: int) -> None:
    """Also when it has just been called, or waits beside another that is cancelled."""
    async with pool() as work:
        first = work.start("a")
        await work.began(1)
        others = [work.start(name) for name in "bcd"]
        await asyncio.sleep(0)
        work.let_go()
        await first
        for _ in range(turns):
            await asyncio.sleep(0)
        others[0].cancel()
        others[1].cancel()
        assert await others[2] == "d"


async def test_an_error_of_the_call_is_raised() -> None:
    async with pool() as work:
        with pytest.raises(ZeroDivisionError):
            await work.pool.run(lambda: 1 / 0, within_s=30)
