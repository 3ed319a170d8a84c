"""Tells workers of prompts that still wait in the router, so that they load what their tiers hold of them meanwhile.

A hint is a call that lasts as long as the load. It ends with its deadline, or when the request leaves or goes elsewhere: then it is
cancelled, and so is the load. Whether it was of use, the worker counts. Nothing depends on a hint.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from baton.cluster.errors import BatonError
from baton.cluster.records import WorkerRecord

log = logging.getLogger(__name__)
HINTS = 64  # at a time
HINTS_A_WORKER = 8
HINT_KEYS = 4096  # of one
HINT_S = 10.0
Send = Callable[[WorkerRecord, Sequence[bytes], float], Awaitable[int]]


@dataclass(eq=False, slots=True)
class Hint:
    worker: str
    incarnation: int
    call: "asyncio.Task[None]"


class Hints:
    def __init__(self, send: Send) -> None:
        self._send = send
        self._open: dict[int, Hint] = {}  # by the arrival of the request
        self._calls: set[asyncio.Task[None]] = set()  # also those of requests that are on their way to the worker

    def __len__(self) -> int:
        """Those that have not ended."""
        return len(self._calls)

    def tell(self, request: int, worker: WorkerRecord, keys: Sequence[bytes], within_s: float) -> None:
        """Does nothing if the worker has been told, cannot use it, or too many hints are open. Another worker that was told is told that
        the request does not come."""
        known = self._open.get(request)
        if not worker.brings or (known and (known.worker, known.incarnation) == (worker.name, worker.incarnation)):
            return
        self.leave(request)
        if len(self._calls) >= HINTS or sum(hint.worker == worker.name for hint in self._open.values()) >= HINTS_A_WORKER:
            return
        call = asyncio.create_task(self._call(worker, keys[:HINT_KEYS], min(within_s, HINT_S)))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        self._open[request] = Hint(worker.name, worker.incarnation, call)

    def leave(self, request: int, goes_to: str = "") -> None:
        """The request has ended, or waits no more. `goes_to`: the worker whose load it can use."""
        hint = self._open.pop(request, None)
        if hint is not None and hint.worker != goes_to:
            hint.call.cancel()

    async def _call(self, worker: WorkerRecord, keys: Sequence[bytes], within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                await self._send(worker, keys, within_s)
        except (BatonError, TimeoutError) as error:
            log.debug("hint to %s: %s", worker.name, error)
