"""Merging several answers into one, and ending an answer when its client leaves."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed the connection, or does not read its answer."""


@asynccontextmanager
async def while_connected(receive: Receive, within_s: float) -> AsyncIterator[None]:
    """Cancels the block when the client leaves, or after `within_s` seconds, and raises ClientGone.

    The request's body must have been read before.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.reschedule(0.0)  # in the past: the timeout expires at once

    try:
        async with asyncio.timeout(within_s) as scope:
            watcher = asyncio.create_task(watch())
            try:
                yield
            finally:
                watcher.cancel()
    except TimeoutError:
        if not scope.expired():
            raise
        raise ClientGone from None


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
