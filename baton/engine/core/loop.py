"""The one thread that owns an engine. Async code talks to it through awaitables; it talks back through one callback per step.

Everything that touches the engine runs in its thread, between two steps: a command waits for one step at most. Results
reach the event loop in the order in which the engine produced them, so a caller that awaits a command has already seen all earlier steps.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from baton.engine.core.commands import Commands
from baton.engine.core.contract import Grammars, Listener
from baton.engine.core.engine import Engine, Output

T = TypeVar("T")
CHECK_EVERY_S = 5.0
AHEAD = 4  # largest steps whose KV has memory before it is computed
JOIN_S = 5.0  # a thread that hangs in a step cannot be stopped: the process exits without it


class EngineLoop(Commands):
    """Our own engine, as workers see it (`baton.engine.core.contract.ServingEngine`). `on_batch` is called in the engine's thread."""

    _wake: threading.Event

    def __init__(self, engine: Engine, listener: Listener, tokenizer_fingerprint: str = "", grammars: Grammars | None = None) -> None:
        super().__init__(engine, listener, tokenizer_fingerprint, grammars)
        self._wake = threading.Event()
        self._closing = False
        self._ahead = -(-AHEAD * engine.scheduler.limits.max_num_batched_tokens // engine.block_size)  # blocks
        self._laps = 0
        self._busy_since: float | None = None
        self._cpu_clock: int | None = None
        self._checked = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def activity(self) -> tuple[int, float | None, float | None]:
        cpu_s = 0.0 if self._engine.runner.on_device else None
        if self._cpu_clock is not None and cpu_s is None:
            with contextlib.suppress(OSError):  # the thread has ended
                cpu_s = time.clock_gettime(self._cpu_clock)
        return self._laps, self._busy_since, cpu_s

    async def close(self) -> None:
        self._closing = True
        self._wake.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, JOIN_S)

    def _run(self) -> None:
        if hasattr(time, "pthread_getcpuclockid"):
            self._cpu_clock = time.pthread_getcpuclockid(threading.get_ident())
        try:
            while not self._closing:
                while self._commands:
                    self._begin()
                    self._execute()
                self._engine.runner.pool.back(self._engine.pool.reached + self._ahead)
                if self._engine.idle:
                    if self._engine.colder is not None:
                        self._engine.colder.turn(time.monotonic())
                    if self._engine.idle:
                        self._rest()
                    continue
                self._begin()
                outputs = self._step()
                self._publish_cache()
                if outputs:
                    self._post(self._listener.on_step, outputs)
                elif self._engine.scheduler.waiting and not self._engine.scheduler.running:
                    # No sequence fits. Only a release, which is a command, can change that.
                    self._busy_since = None
                    self._wake.wait(timeout=0.05)
                    self._wake.clear()
        except BaseException as error:
            self._post(self._listener.on_failure, error)
        finally:
            self._stopped = True
            self._post(self._refuse)

    def _begin(self) -> None:
        self._laps += 1
        self._busy_since = time.monotonic()

    def _step(self) -> list[Output]:
        counts, began = self._engine.counts, time.monotonic()
        chunks, tokens = counts.chunks, counts.computed_tokens
        outputs = self._engine.step(began)
        if counts.chunks > chunks:
            done = time.monotonic() - began, counts.computed_tokens - tokens, counts.chunks - chunks
            self._listener.on_batch(*done)
            if self._engine.colder is not None:
                self._engine.colder.paced(*done)
        return outputs

    def _rest(self) -> None:
        self._busy_since = None
        now = time.monotonic()
        if now - self._checked > CHECK_EVERY_S:
            self._engine.pool.check()
            self._checked = now
        until = self._engine.colder.until(now) if self._engine.colder is not None else None
        self._wake.wait(timeout=CHECK_EVERY_S if until is None else min(until, CHECK_EVERY_S))
        self._wake.clear()

    def _post(self, function: Callable[..., None], *args: object) -> None:
        # The event loop is closed only while the process exits, and then no code waits for the call.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)
