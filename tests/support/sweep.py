"""Cancellation at every await: the work is cancelled after 0, 1, 2, ... turns of the event loop, until it finishes first."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any


async def cancelled(work: Callable[[], Awaitable[Any]], fine: int = 40, coarse: float = 1.1) -> AsyncIterator["asyncio.Task[Any]"]:
    """Yields the finished task of each trial; the last one finished by itself. After each task, the caller checks what is left behind.

    Tries every number of turns up to `fine`. After that, where the work waits for something external, each trial has `coarse` times more.
    """
    turns, tried = 0, 0
    while True:

        async def run() -> Any:
            return await work()

        task = asyncio.create_task(run())
        for _ in range(turns):
            await asyncio.sleep(0)
            if task.done():
                break
        finished = task.done()
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled() and not finished and (error := task.exception()) is not None:
            raise error
        yield task
        if finished:
            task.result()
            assert tried >= 1, "nothing was cancelled"
            return
        tried += 1
        turns = turns + 1 if turns < fine else int(turns * coarse)


async def until(condition: Callable[[], Any], within_s: float = 30.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.002)
