"""Merging of streams, and work that is cancelled when its client disconnects."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from router.http.stream import ClientGone, while_connected
from router.merging import merge


class Source:
    """Yields numbers while the gate is open, and records whether it was closed."""

    def __init__(self, count: int = 3, error: Exception | None = None, gate: asyncio.Event | None = None) -> None:
        self.count, self.error, self.gate = count, error, gate
        self.made = 0
        self.closed = False

    async def run(self) -> AsyncGenerator[int, None]:
        try:
            for i in range(self.count):
                if self.gate:
                    await self.gate.wait()
                await asyncio.sleep(0)
                self.made += 1
                yield i
            if self.error:
                raise self.error
        finally:
            self.closed = True


async def read(*sources: Source) -> list[tuple[int, int]]:
    async with aclosing(merge([source.run() for source in sources])) as items:
        return [item async for item in items]


@pytest.mark.parametrize("streams", [1, 2, 5])
async def test_every_item_arrives_once_and_in_the_order_of_its_stream(streams: int) -> None:
    sources = [Source(4) for _ in range(streams)]
    items = await read(*sources)
    for number in range(streams):
        assert [item for i, item in items if i == number] == [0, 1, 2, 3]
    assert len(items) == 4 * streams and all(source.closed for source in sources)


async def test_no_stream_waits_for_another() -> None:
    gate = asyncio.Event()
    slow, quick = Source(1, gate=gate), Source(3)
    async with aclosing(merge([slow.run(), quick.run()])) as items:
        assert [await anext(items) for _ in range(3)] == [(1, 0), (1, 1), (1, 2)]
        gate.set()
        assert [item async for item in items] == [(0, 0)]


@pytest.mark.parametrize("streams", [1, 3])
async def test_the_first_failure_ends_all_streams(streams: int) -> None:
    never = asyncio.Event()
    sources = [Source(1, ValueError("first"))] + [Source(1, gate=never) for _ in range(streams - 1)]
    with pytest.raises(ValueError, match="first"):
        await read(*sources)
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("streams", [1, 3])
async def test_closing_ends_all_streams(streams: int) -> None:
    sources = [Source(100) for _ in range(streams)]
    items = merge([source.run() for source in sources])
    await anext(items)
    await items.aclose()
    assert all(source.closed for source in sources if source.made)
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


async def test_a_slow_reader_buffers_few_items() -> None:
    sources = [Source(1000) for _ in range(4)]
    async with aclosing(merge([source.run() for source in sources])) as items:
        await anext(items)
        for _ in range(100):
            await asyncio.sleep(0)
        assert sum(source.made for source in sources) <= 1 + 1 + 4, "one delivered, one queued, and one held by each source"


class Line:
    """A connection, as `receive` of ASGI presents it."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.first: list[dict[str, Any]] = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive(self) -> dict[str, Any]:
        if self.first:
            return self.first.pop()
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def test_the_work_is_cancelled_when_the_client_disconnects() -> None:
    line, ended = Line(), False
    asyncio.get_running_loop().call_later(0.01, line.gone.set)
    with pytest.raises(ClientGone):
        async with while_connected(line.receive, 60):
            try:
                await asyncio.sleep(60)
            finally:
                ended = True
    assert ended and not asyncio.current_task().cancelling()  # type: ignore[union-attr]


async def test_work_that_takes_too_long_is_cancelled() -> None:
    with pytest.raises(ClientGone):
        async with while_connected(Line().receive, 0.01):
            await asyncio.sleep(60)


async def test_finished_work_is_not_disturbed() -> None:
    line = Line()
    async with while_connected(line.receive, 60):
        await asyncio.sleep(0)
    line.gone.set()
    await asyncio.sleep(0.01)
    assert len(asyncio.all_tasks()) == 1


async def test_errors_of_the_work_are_passed_on_unchanged() -> None:
    for error in (ValueError(), TimeoutError()):
        with pytest.raises(type(error)):
            async with while_connected(Line().receive, 60):
                raise error


async def test_an_outside_cancellation_stays_a_cancellation() -> None:
    async def work() -> None:
        async with while_connected(Line().receive, 60):
            await asyncio.sleep(60)

    task = asyncio.create_task(work())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1


async def test_many_streams_begin_in_separate_turns_of_the_loop() -> None:
    """If all began in the same turn, their work before the first await would together block the event loop."""
    turn, began = 0, []

    async def one() -> AsyncGenerator[int, None]:
        began.append(turn)
        yield 1

    async def count() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    async with aclosing(merge([one() for _ in range(128)])) as items:
        assert len([item async for item in items]) == 128
    counting.cancel()
    assert len(set(began)) >= 127
