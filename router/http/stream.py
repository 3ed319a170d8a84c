"""Ending an answer when its client leaves."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive


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
