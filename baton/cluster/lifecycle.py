"""The life of a process: starting → ready → draining → closed.

The first SIGTERM or SIGINT drains: health says NOT_SERVING, no new work is taken, what runs may finish within the grace. A second one
ends the process at once. `run` takes the process as an object with three awaitables, so a test starts one the same way.
"""

import asyncio
import logging
import signal
from collections.abc import Coroutine
from enum import Enum
from typing import Any, Protocol

log = logging.getLogger(__name__)


class Stage(Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    CLOSED = "closed"


MOVES = {
    (Stage.STARTING, "ready"): Stage.READY,
    (Stage.STARTING, "drain"): Stage.DRAINING,
    (Stage.STARTING, "close"): Stage.CLOSED,
    (Stage.READY, "drain"): Stage.DRAINING,
    (Stage.READY, "close"): Stage.CLOSED,
    (Stage.DRAINING, "close"): Stage.CLOSED,
}


class IllegalStage(RuntimeError):
    """An event that the stage does not know. Nothing was changed."""


def move(stage: Stage, event: str) -> Stage:
    target = MOVES.get((stage, event))
    if target is None:
        raise IllegalStage(f"the process is {stage.value}: {event!r} is not possible")
    return target


class Process(Protocol):
    async def start(self) -> None:
        """Become ready; raises what keeps it from that."""

    async def drain(self) -> None:
        """Refuse new work and return when nothing runs any more, or when the grace is over."""

    async def close(self) -> None:
        """Free everything, in the reverse order of start. Called once, also after a failed start."""


class Stop:
    """Why and how fast the process ends. `fail` is for a process that cannot go on."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.now = asyncio.Event()
        self.failure: BaseException | None = None

    def ask(self) -> None:
        if self.asked.is_set():
            self.now.set()
        self.asked.set()

    def fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
            log.error("cannot go on: %r", error, exc_info=error)
        self.now.set()
        self.asked.set()


async def run(process: Process, stop: Stop) -> int:
    """Start, serve until asked to stop, drain, close. Returns the exit status: 0, or 1 after a failure."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.ask)
    try:
        if await _unless(stop.asked, process.start()):
            await stop.asked.wait()
            if stop.failure is None:
                log.info("draining")
                await _unless(stop.now, process.drain())
    except Exception as error:
        log.error("%s", error, exc_info=log.isEnabledFor(logging.DEBUG))
        stop.failure = error
    finally:
        await process.close()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
    return 0 if stop.failure is None else 1


async def _unless(event: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Await `work`, but give it up when `event` is set. True if it came to its end; its exception is raised."""
    task = asyncio.create_task(work)
    waiter = asyncio.create_task(event.wait())
    done, _ = await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()
    if task not in done:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return False
    task.result()
    return True
