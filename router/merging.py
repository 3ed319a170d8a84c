"""Merging the streams of several choices, or of several prompts, into one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yields the items of all streams as they arrive, each with the number of its stream. The first failure is raised and ends the other
    streams; closing the generator ends them, too.

    A stream runs ahead of the reader by one item, so a slow reader needs little memory.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for one in only:
                yield 0, one
        return
    queue = asyncio.Queue[tuple[int, T | None, Exception | None]](1)

    async def pump(number: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put((number, item, None))
            await queue.put((number, None, None))
        except Exception as error:
            await queue.put((number, None, error))

    tasks: list[asyncio.Task[None]] = []
    try:
        for number, stream in enumerate(streams):
            tasks.append(asyncio.create_task(pump(number, stream)))
            await asyncio.sleep(0)  # one begins per turn of the loop: all of them together would delay other requests
        running = len(tasks)
        while running:
            number, item, error = await queue.get()
            if error is not None:
                raise error
            if item is None:
                running -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
