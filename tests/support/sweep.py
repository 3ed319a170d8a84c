"""Cancellation at every await: the work dies after 0, 1, 2 … turns of the event loop, until it is quicker than the sweep."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

FINE = 40  # turns up to which each one is tried
COARSE = 1.1  # beyond, where a peer's answer is waited for, the next trial has so many times the turns


async def cancelled(work: Callable[[], Awaitable[Any]]) -> AsyncIterator["asyncio.Task[Any]"]:
    """For each trial the ended task. The last one ended by itself; whoever iterates looks after each what is left."""
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
            assert tried >= 2, "nothing was cancelled"
            return
        tried += 1
        turns = turns + 1 if turns < FINE else int(turns * COARSE)


async def until(condition: Callable[[], Any], within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.002)
