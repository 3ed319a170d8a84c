"""The life of a process: starting → ready → draining → closed.

The first SIGTERM or SIGINT drains the process: health reports NOT_SERVING, new work is refused, and running work may finish within its
grace period. A second signal cancels whatever the process is waiting for, in every stage. `close` is bounded; a step that hangs in it is
abandoned, and the others still run. `run` takes an object with three coroutine methods, so a test can start a process the same way.
"""

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from enum import Enum
from typing import Any, Protocol

from baton.cluster.errors import BatonError
from baton.moves import Moves

log = logging.getLogger(__name__)
CLOSE_S = 10.0  # for `close`
HURRY_S = 2.0  # for `close` after a second signal
EXIT_S = 5.0  # after `close`, for threads that cannot be stopped; then the process exits without waiting for them
TELL_S = 0.5  # for the last words
WITNESS_S = 5.0  # for what is written after a failure
LOOK_S = 0.05
SIGNALS = (signal.SIGTERM, signal.SIGINT)
# For these, the text is all that a person needs; anything else is a bug and is logged with its traceback. A checkpoint or a configuration
# that cannot be used is a ValueError.
FORESEEN = (BatonError, OSError, ValueError)
YOUNG = 5000  # objects that are made before the garbage collector looks at them; Python's own 700 costs a request a tenth of its time
CANNOT = 2  # exit status of a process that cannot start with this configuration or this model, however often it is tried


class Stage(Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    CLOSED = "closed"


MOVES = Moves(
    {
        (Stage.STARTING, "ready"): Stage.READY,
        (Stage.STARTING, "drain"): Stage.DRAINING,
        (Stage.STARTING, "close"): Stage.CLOSED,
        (Stage.READY, "drain"): Stage.DRAINING,
        (Stage.READY, "close"): Stage.CLOSED,
        (Stage.DRAINING, "close"): Stage.CLOSED,
    }
)


def move(stage: Stage, event: str) -> Stage:
    return MOVES.after(stage, event, "the process")


class Process(Protocol):
    async def start(self) -> None:
        """Become ready, or raise the error that prevents it."""

    async def drain(self) -> None:
        """Refuse new work; return when nothing is running any more or the grace period is over."""

    async def close(self) -> None:
        """Free everything, in the reverse order of start. Called once, even after a failed start."""


class Stop:
    """Why and how fast the process ends. `fail` is for a process that cannot go on."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.now = asyncio.Event()
        self.failure: BaseException | None = None
        self.witness: Callable[[str], object] = lambda why: None  # writes down what happened before; it may take seconds

    def ask(self) -> None:
        if self.asked.is_set():
            self.now.set()
        self.asked.set()

    def fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
            log.error("the process must stop: %r", error, exc_info=error)
        self.now.set()
        self.asked.set()


def settle() -> None:
    """What a process made at its start stays, so the garbage collector need not look at it again: that took 10 to 30 ms, in which no thread
    runs. And the loop keeps no list of async generators, which it needs only at its end: everybody closes his own."""
    gc.freeze()
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
    gc.enable()
    sys.set_asyncgen_hooks(firstiter=None)


async def run(
    process: Process,
    stop: Stop,
    gone_within: Callable[[float], object] = lambda seconds: None,
    settled: Callable[[], object] = lambda: None,
) -> int:
    """Start, serve until asked to stop, drain, close. Returns the exit status: 0, CANNOT if it could not start with what it was given, or 1
    after any other failure. `settled` is called when the process is ready.

    When the process begins to close, `gone_within` is called with the number of seconds within which the whole process must be gone,
    threads included. The latest call counts.
    """
    loop, started = asyncio.get_running_loop(), False
    for number in SIGNALS:
        loop.add_signal_handler(number, stop.ask)
    try:
        if await _unless(stop.asked, process.start(), stop.now):
            started = True
            settled()
            await stop.asked.wait()
            if stop.failure is None:
                log.info("draining")
                await _unless(stop.now, process.drain())
    except Exception as error:
        log.error("%s", error, exc_info=not isinstance(error, FORESEEN) or log.isEnabledFor(logging.DEBUG))
        stop.failure = error
    finally:
        if stop.failure is not None and started:
            await _testify(stop)
        await _close(process, stop, gone_within)
        for number in SIGNALS:
            loop.remove_signal_handler(number)
    if stop.failure is None:
        return 0
    return CANNOT if isinstance(stop.failure, ValueError) and not started else 1


async def _testify(stop: Stop) -> None:
    """Calls the witness in a thread, which is left alone if it takes too long."""
    told = threading.Thread(target=stop.witness, args=("crash",), daemon=True)
    told.start()
    deadline = asyncio.get_running_loop().time() + WITNESS_S
    while told.is_alive() and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(LOOK_S)


async def _close(process: Process, stop: Stop, gone_within: Callable[[float], object]) -> None:
    within = HURRY_S if stop.now.is_set() else CLOSE_S
    gone_within(within + EXIT_S)
    given_up = asyncio.Event() if stop.now.is_set() else stop.now
    limit = asyncio.get_running_loop().call_later(within, _time_is_up, stop, within, given_up)
    try:
        finished = await _unless(given_up, process.close(), cleanup_s=HURRY_S)
    except Exception as error:
        log.error("closing: %r", error, exc_info=not isinstance(error, TimeoutError))
        stop.failure = stop.failure or error
        finished = not isinstance(error, TimeoutError)
    finally:
        limit.cancel()
    if not finished:
        gone_within(HURRY_S / 4)


def _time_is_up(stop: Stop, within: float, given_up: asyncio.Event) -> None:
    log.error("closing takes longer than %g s", within)
    stop.failure = stop.failure or TimeoutError(f"closing took longer than {within:g} s")
    given_up.set()


async def _unless(
    event: asyncio.Event, work: Coroutine[Any, Any, None], at_once: asyncio.Event | None = None, cleanup_s: float = CLOSE_S
) -> bool:
    """Await `work`, but cancel it when `event` is set. Returns whether it finished; raises its exception.

    Cancelled work may still clean up; this waits for it until `at_once` is set, but no longer than `cleanup_s`.
    """
    task = asyncio.create_task(work)
    try:
        if await _first(task, event):
            task.result()
            return True
    finally:
        task.cancel()
    async with asyncio.timeout(cleanup_s):
        if await _first(task, at_once or asyncio.Event()) and not task.cancelled() and (error := task.exception()) is not None:
            log.warning("cancelled work failed: %r", error)
    return False


async def _first(task: "asyncio.Task[None]", event: asyncio.Event) -> bool:
    """Whether the task was done before the event was set."""
    waiter = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
        return task.done()
    finally:
        waiter.cancel()


class LastResort:
    """Ends this process when its time is up, whatever its threads are doing. Another call sets a new time."""

    def __init__(self) -> None:
        self._timer: threading.Timer | None = None

    def __call__(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(seconds, self._leave)
        self._timer.daemon = True
        self._timer.start()

    @staticmethod
    def _leave() -> None:
        words = "something does not finish; the process exits without it"
        told = threading.Thread(target=lambda: print(words, file=sys.stderr, flush=True), daemon=True)
        told.start()
        told.join(TELL_S)  # the reader of stderr may be what does not go on
        os._exit(1)
