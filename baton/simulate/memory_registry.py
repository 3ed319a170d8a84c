"""A registry without a server, whose outages and clock its user controls. The contract suite runs against both this and Redis, so what is
shown with it holds in production. It stores values encoded, as Redis does."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TypeVar

from baton.clock import loop_time
from baton.cluster.config import RedisConfig
from baton.cluster.records import BlockEvent, Kind, Pools, Record, RouterRecord, StartRecord, WorkerRecord, kind_of
from baton.cluster.registry import EVENTS_BATCH, FENCE_LIFETIMES, Office, RegistryUnavailable, StaleIncarnation

R = TypeVar("R")


class MemoryRegistry:
    """`now` (in seconds) decides what has expired. While `available` is False, every call fails as it would in an outage."""

    def __init__(self, config: RedisConfig | None = None, now: Callable[[], float] = loop_time) -> None:
        config = config or RedisConfig()
        self.garbage = 0
        self.available = True
        self._ttl = config.record_ttl_s
        self._now = now
        self._records: dict[tuple[Kind, str], tuple[bytes, float]] = {}  # JSON, when it expires
        self._fences: dict[tuple[Kind, str], tuple[int, float]] = {}  # newest incarnation, when it is forgotten
        self._entries: deque[tuple[int, Mapping[bytes, bytes]]] = deque(maxlen=config.stream_maxlen)
        self._last_id = 0
        self._published = asyncio.Event()
        self._pools: bytes | None = None
        self._leaders: dict[Office, tuple[str, float]] = {}  # "TERM WHO", when its lease ends
        self._terms: dict[Office, int] = {}
        self._plans: list[bytes] = []
        self._change: bytes | None = None
        self._agreed: dict[str, tuple[str, float]] = {}  # until when

    async def join(self, record: Record) -> None:
        self._reach()
        key = kind_of(record), record.name
        newest = self._newest(key)
        if newest is not None and newest > record.incarnation:
            raise StaleIncarnation(record.name, record.incarnation, newest)
        now = self._now()
        self._records[key] = (record.to_json(), now + self._ttl)
        self._fences[key] = (record.incarnation, now + self._ttl * FENCE_LIFETIMES)

    async def leave(self, name: str, incarnation: int, kind: Kind = "worker") -> None:
        self._reach()
        if self._newest((kind, name)) == incarnation:
            self._records.pop((kind, name), None)

    async def members(self) -> list[WorkerRecord]:
        return self._read("worker", WorkerRecord.from_json)

    async def routers(self) -> list[RouterRecord]:
        return self._read("router", RouterRecord.from_json)

    async def starts(self) -> list[StartRecord]:
        return self._read("start", StartRecord.from_json)

    def _read(self, wanted: Kind, read: Callable[[bytes, str], R]) -> list[R]:
        self._reach()
        now = self._now()
        self._records = {key: held for key, held in self._records.items() if held[1] > now}
        found = []
        for (kind, name), (data, _) in sorted(self._records.items()):
            try:
                if kind == wanted:
                    found.append(read(data, name))
            except ValueError:
                self.garbage += 1
        return found

    async def publish(self, events: Sequence[BlockEvent]) -> None:
        self._reach()
        for event in events:
            self._last_id += 1
            self._entries.append((self._last_id, event.to_fields()))
        self._published.set()
        self._published = asyncio.Event()

    async def events(self, after: str | None, wait_s: float) -> tuple[list[BlockEvent], str]:
        self._reach()
        if after is None:
            return [], str(self._last_id)
        cursor = int(after)
        if self._last_id == cursor and wait_s > 0:
            try:
                async with asyncio.timeout(wait_s):
                    await self._published.wait()
            except TimeoutError:
                return [], after
            self._reach()
        found = []
        unread = [*islice(reversed(self._entries), self._last_id - cursor)]  # numbers have no gaps
        for entry_id, fields in reversed(unread[-EVENTS_BATCH:]):
            after = str(entry_id)
            try:
                found.append(BlockEvent.from_fields(fields))
            except ValueError:
                self.garbage += 1
        return found, after

    async def desire(self, pools: Pools) -> None:
        self._reach()
        self._pools = pools.to_json()

    async def desired(self) -> Pools | None:
        self._reach()
        if self._pools is None:
            return None
        try:
            return Pools.from_json(self._pools)
        except ValueError:
            self.garbage += 1
            return None

    async def lead(self, who: str, ttl_s: float, term: int = 0, office: Office = "planner") -> int:
        self._reach()
        until = self._now() + ttl_s
        if self._leads(f"{term} {who}", office):
            self._leaders[office] = f"{term} {who}", until
            return term
        if office in self._leaders and self._leaders[office][1] > self._now():
            return 0
        self._terms[office] = self._terms.get(office, 0) + 1
        self._leaders[office] = f"{self._terms[office]} {who}", until
        return self._terms[office]

    async def leader(self, office: Office = "planner") -> str:
        self._reach()
        leader, until = self._leaders.get(office, ("", 0.0))
        return leader.partition(" ")[2] if until > self._now() else ""

    async def resign(self, who: str, term: int, office: Office = "planner") -> None:
        self._reach()
        if self._leads(f"{term} {who}", office):
            del self._leaders[office]

    async def plan(self, who: str, term: int, before: Pools, wanted: Pools) -> bool:
        if not self._leads(f"{term} {who}") or before.stop or await self.desired() != before:
            return False
        await self.desire(wanted)
        return True

    async def note_change(self, who: str, term: int, change: bytes) -> bool:
        self._reach()
        if not self._leads(f"{term} {who}"):
            return False
        self._change = change
        return True

    async def noted_change(self) -> bytes | None:
        self._reach()
        return self._change

    async def note_plan(self, note: bytes, keep: int) -> None:
        self._reach()
        self._plans = [*self._plans, note][-keep:]

    async def noted_plans(self, last: int) -> list[bytes]:
        self._reach()
        return self._plans[-last:]

    async def agree(self, topic: str, mine: str, ttl_s: float) -> str:
        self._reach()
        held, until = self._agreed.get(topic, ("", 0.0))
        held = held if until > self._now() else mine
        if held:
            self._agreed[topic] = held, self._now() + ttl_s
        return held

    async def ping(self) -> None:
        self._reach()

    async def close(self) -> None:
        pass

    def _reach(self) -> None:
        if not self.available:
            raise RegistryUnavailable("down", "switched off")

    def _leads(self, leader: str, office: Office = "planner") -> bool:
        known, until = self._leaders.get(office, ("", 0.0))
        return known == leader and until > self._now()

    def _newest(self, key: tuple[Kind, str]) -> int | None:
        incarnation, forgotten = self._fences.get(key, (None, 0.0))
        return incarnation if forgotten > self._now() else None
