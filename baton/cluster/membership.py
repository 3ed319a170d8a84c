"""A process's presence in the registry: it joins and refreshes its record; a worker also publishes its block events.

The registry is a cache of facts that the process can rebuild. While the registry is unreachable, the process keeps serving, and the next
heartbeat restores what was lost. Events are queued meanwhile; in a long outage the oldest are dropped, and the gap in their numbers makes
readers ask for a snapshot.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable

from baton.cluster.records import BlockEvent, Record, kind_of
from baton.cluster.registry import Registry, RegistryUnavailable, StaleIncarnation
from baton.engine.core.block_key import DEVICE

log = logging.getLogger(__name__)
MAX_BUFFERED_EVENTS = 4096
PUBLISH_DELAY_S = 0.01  # so that the events of a few steps are sent together
LATER_S = 0.1  # within which other events will come, with which those of colder media are sent


def process_name(role: str) -> str:
    """The name that a launcher gave this process, or one that no other process has: in containers every pid may be 1, and containers on the
    host's network share its name."""
    given = os.environ.get("BATON_WORKER_NAME")
    return given or f"{role}-{socket.gethostname().partition('.')[0][:40]}-{os.getpid()}-{secrets.token_hex(2)}"


def lasting_name(role: str) -> str:
    """One that the next process in the place of this one has again: what it left on a disk is found by it."""
    return os.environ.get("BATON_WORKER_NAME") or role


def draw_incarnation() -> int:
    """A number that grows from one process of a name to the next: microseconds since the epoch."""
    return time.time_ns() // 1000


class Membership:
    """`describe` returns the record as it is now; `on_stale` is called when a newer incarnation has taken this worker's name."""

    def __init__(
        self,
        registry: Registry,
        describe: Callable[[], Awaitable[Record]],
        heartbeat_s: float,
        on_stale: Callable[[BaseException], None],
    ) -> None:
        self._registry = registry
        self._describe = describe
        self._heartbeat_s = heartbeat_s
        self._on_stale = on_stale
        self._events: deque[BlockEvent] = deque(maxlen=MAX_BUFFERED_EVENTS)
        self._new_events = asyncio.Event()
        self._later: asyncio.TimerHandle | None = None
        self._beat = asyncio.Event()
        self._left = False
        self.reachable = True
        self._reasons: set[str] = set()  # of this outage, those that the log has
        self.reconnects = 0  # how often the registry has come back after an outage
        self._joined: Record | None = None

    def announce(self, events: list[BlockEvent]) -> None:
        """Queue block events. In a long outage of the registry the oldest are dropped, and readers see the gap."""
        self._events.extend(events)
        if any(event.medium == DEVICE for event in events):
            self._new_events.set()
        elif self._later is None:  # a message for itself would cost a worker more than the copying of a prompt's KV
            self._later = asyncio.get_running_loop().call_later(LATER_S, self._new_events.set)

    def beat(self) -> None:
        """Refresh the record now instead of at the next heartbeat."""
        self._beat.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._run_heartbeat())
            group.create_task(self._run_events())

    async def leave(self) -> None:
        """Best effort: if the registry is unreachable, the record expires. Nothing is refreshed afterwards."""
        self._left, joined = True, self._joined
        if joined is not None:
            with contextlib.suppress(RegistryUnavailable):
                await self._registry.leave(joined.name, joined.incarnation, kind_of(joined))

    async def _run_heartbeat(self) -> None:
        while not self._left:
            record = await self._describe()
            try:
                await self._registry.join(record)
                self._joined = record
                self._note(True)
            except RegistryUnavailable as error:
                self._note(False, error)
            except StaleIncarnation as error:
                self._on_stale(error)
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeat_s):
                    await self._beat.wait()
            self._beat.clear()

    async def _run_events(self) -> None:
        while True:
            await self._new_events.wait()
            await asyncio.sleep(PUBLISH_DELAY_S)
            self._new_events.clear()
            if self._later is not None:
                self._later.cancel()
                self._later = None
            batch, self._events = self._events, deque(maxlen=MAX_BUFFERED_EVENTS)
            try:
                await self._registry.publish(list(batch))
            except RegistryUnavailable as error:
                self._note(False, error)
                self._events = deque([*batch, *self._events], MAX_BUFFERED_EVENTS)
                self._new_events.set()
                await asyncio.sleep(self._heartbeat_s)

    def _note(self, reachable: bool, error: RegistryUnavailable | None = None) -> None:
        """Logs each reason of an outage once: a password that is refused may hide behind a first answer that was only slow."""
        if error is not None and error.kind not in self._reasons:
            self._reasons.add(error.kind)
            log.warning("registry is unreachable: %s", error)
        if reachable and not self.reachable:
            self._reasons.clear()
            log.warning("registry is reachable again")
            self.reconnects += 1
        self.reachable = reachable
