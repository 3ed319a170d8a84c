"""A live decode call: the decode worker reads the KV while the prompt is still being computed, and nobody consumes the events yet.

One event waits here until the dispatcher takes it, the others in the call's own inbox, which bounds them. `first` resolves to the token
that the prefill worker samples.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from router.workers import DecodeEvent

Open = Callable[["asyncio.Future[int]"], AsyncGenerator[DecodeEvent, None]]


class LiveDecode:
    def __init__(self, open_call: Open) -> None:
        self.first: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._events: asyncio.Queue[DecodeEvent | Exception | None] = asyncio.Queue(1)
        self._task = asyncio.create_task(self._run(open_call))

    async def events(self) -> AsyncGenerator[DecodeEvent, None]:
        """Yields all events from the beginning. Raises the error that ended the call. Closing the generator early cancels the call."""
        try:
            while (event := await self._events.get()) is not None:
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            await self.close()

    async def close(self) -> None:
        """Cancels the call unless it has ended."""
        self.first.cancel()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, open_call: Open) -> None:
        try:
            async with aclosing(open_call(self.first)) as events:
                async for event in events:
                    await self._events.put(event)
        except Exception as error:  # unexpected ones too: otherwise the reader would wait forever
            await self._events.put(error)
        else:
            await self._events.put(None)
