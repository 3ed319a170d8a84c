"""A worker's presence in the registry. A worker keeps running while the registry is late, unavailable or emptied. It stops writing once a
newer process has its name."""

import asyncio
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from baton.clock import loop_time
from baton.cluster import membership
from baton.cluster.config import RedisConfig
from baton.cluster.lifecycle import Stop, run
from baton.cluster.membership import Membership, process_name
from baton.cluster.records import BlockEvent, Load, WorkerRecord
from baton.cluster.registry import RegistryUnavailable, StaleIncarnation
from baton.cluster.rpc import Tasks
from baton.engine.core.block_key import HOST
from baton.simulate.memory_registry import MemoryRegistry

RECORD = WorkerRecord("d0", "decode", "host:1", 5, "ready", 1, "host", "toy", "model", "tokens", 16, 1024, 100, "tcp", Load())

pytestmark = pytest.mark.virtual_time


def events(first: int, last: int) -> list[BlockEvent]:
    return [BlockEvent("d0", 5, number, "stored", (number.to_bytes(16, "big"),)) for number in range(first, last + 1)]


@dataclass
class Worker:
    """A worker whose record states, as `running`, how often the record was requested."""

    registry: MemoryRegistry = field(default_factory=MemoryRegistry)
    heartbeat_s: float = 0.02
    record: WorkerRecord = RECORD
    asked: int = 0
    stale: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.membership = Membership(self.registry, self.describe, self.heartbeat_s, self.stale.append)

    async def describe(self) -> WorkerRecord:
        self.asked += 1
        return replace(self.record, load=Load(running=self.asked))

    @asynccontextmanager
    async def present(self) -> AsyncIterator["asyncio.Task[None]"]:
        running = asyncio.create_task(self.membership.run())
        try:
            yield running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def published(self) -> list[int]:
        self.registry.available = True
        found, _ = await self.registry.events("0", 0)
        return [event.sequence for event in found]


async def until(condition: Callable[[], Any], within_s: float = 30.0) -> None:
    async with asyncio.timeout(within_s):
        while not (await condition() if asyncio.iscoroutinefunction(condition) else condition()):
            await asyncio.sleep(0.005)


async def test_the_record_is_refreshed_and_removed_on_leaving() -> None:
    worker = Worker(MemoryRegistry(RedisConfig(record_ttl_s=0.2, heartbeat_s=0.05)))
    async with worker.present():

        async def refreshed() -> bool:
            return any(record.load.running > 8 for record in await worker.registry.members())  # after twice the life of a record

        await until(refreshed)
        assert loop_time() == pytest.approx(8 * worker.heartbeat_s, abs=0.01)
    await worker.membership.leave()
    assert await worker.registry.members() == []


async def test_a_record_that_is_not_refreshed_expires() -> None:
    """Negative control."""
    worker = Worker(MemoryRegistry(RedisConfig(record_ttl_s=0.1, heartbeat_s=0.02)))
    async with worker.present():
        await until(lambda: worker.asked)
    await asyncio.sleep(0.15)
    assert await worker.registry.members() == []


async def test_a_worker_joins_once_the_registry_becomes_available() -> None:
    worker = Worker()
    worker.registry.available = False
    async with worker.present() as running:
        await until(lambda: worker.asked > 3)
        assert not running.done()
        worker.registry.available = True
        await until(worker.registry.members)


async def test_each_reconnection_to_the_registry_is_counted() -> None:
    worker = Worker()
    async with worker.present():
        await until(worker.registry.members)
        for times in (1, 2):
            assert worker.membership.reachable and worker.membership.reconnects == times - 1
            worker.registry.available = False
            await until(lambda: not worker.membership.reachable)
            worker.registry.available = True

            def counted(times: int = times) -> bool:
                return worker.membership.reconnects == times

            await until(counted)
        asked = worker.asked
        await until(lambda: worker.asked > asked + 2)
        assert worker.membership.reconnects == 2, "a heartbeat is not a reconnection"


async def test_each_reason_of_an_outage_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    worker, joins, kinds = Worker(), 0, ["slow", "auth", "slow", "auth"]
    join = worker.registry.join

    async def refuse(*what: Any) -> Any:
        nonlocal joins
        joins += 1
        if joins <= len(kinds):
            raise RegistryUnavailable(kinds[joins - 1], "no")
        return await join(*what)

    monkeypatch.setattr(worker.registry, "join", refuse)
    async with worker.present():
        await until(lambda: worker.membership.reconnects == 1)
    said = [record.getMessage() for record in caplog.records if "registry" in record.getMessage()]
    assert said == ["registry is unreachable: slow: no", "registry is unreachable: auth: no", "registry is reachable again"]


async def test_a_worker_rejoins_a_registry_that_lost_its_data() -> None:
    worker = Worker()
    async with worker.present():
        await until(worker.registry.members)
        worker.registry._records.clear()
        await until(worker.registry.members)


async def test_a_requested_heartbeat_is_sent_immediately() -> None:
    worker = Worker(heartbeat_s=60)
    async with worker.present():
        await until(worker.registry.members)
        worker.record = replace(RECORD, state="draining")
        worker.membership.beat()
        await until(lambda: worker.asked == 2)
        assert (await worker.registry.members())[0].state == "draining"


async def test_leaving_an_unavailable_registry_is_not_an_error() -> None:
    worker = Worker()
    async with worker.present():
        await until(worker.registry.members)
    worker.registry.available = False
    await worker.membership.leave()
    await Worker().membership.leave()  # it never joined


# A newer process of the same name


async def test_an_older_process_is_notified_and_writes_nothing_more() -> None:
    worker = Worker()
    async with worker.present() as running:
        await until(worker.registry.members)
        await worker.registry.join(replace(RECORD, incarnation=6))
        await until(lambda: worker.stale)
        asked = worker.asked
        await asyncio.sleep(0.1)
        assert worker.asked == asked and not running.done()
        assert isinstance(worker.stale[0], StaleIncarnation) and worker.stale[0].newest == 6 and len(worker.stale) == 1
    await worker.membership.leave()
    assert [record.incarnation for record in await worker.registry.members()] == [6], "the newer process stays registered"


async def test_a_process_whose_name_was_taken_fails_without_draining() -> None:
    seen: list[str] = []

    class Process:
        def __init__(self, stop: Stop) -> None:
            self.worker = Worker()
            self.worker.membership._on_stale = stop.fail
            self.tasks = Tasks(stop.fail)

        async def start(self) -> None:
            self.tasks.start(self.worker.membership.run(), "membership")

        async def drain(self) -> None:
            seen.append("drain")

        async def close(self) -> None:
            await self.tasks.close()
            await self.worker.membership.leave()

    stop = Stop()
    process = Process(stop)
    running = asyncio.create_task(run(process, stop))
    await until(process.worker.registry.members)
    await process.worker.registry.join(replace(RECORD, incarnation=6))
    async with asyncio.timeout(30):
        assert await running == 1
    assert isinstance(stop.failure, StaleIncarnation) and seen == []
    assert [record.incarnation for record in await process.worker.registry.members()] == [6]


async def test_membership_fails_if_the_worker_cannot_describe_itself() -> None:
    worker = Worker()

    async def broken() -> WorkerRecord:
        raise RuntimeError("the engine is gone")

    worker.membership._describe = broken
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(30):
            await worker.membership.run()
    assert caught.group_contains(RuntimeError, match="engine")


# Block events


def counted(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many events each message has from now on."""
    batches: list[int] = []
    publish = worker.registry.publish

    async def counting(batch: list[BlockEvent]) -> None:
        batches.append(len(batch))
        await publish(batch)

    monkeypatch.setattr(worker.registry, "publish", counting)
    return batches


async def test_events_are_published_in_order_and_in_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    batches = counted(worker, monkeypatch)
    async with worker.present():
        for number in range(1, 51):
            worker.membership.announce(events(number, number))
        await until(worker.published)
    assert await worker.published() == list(range(1, 51)) and batches == [50]


async def test_events_of_colder_media_go_with_the_next_ones_or_alone_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    batches = counted(worker, monkeypatch)

    def colder(number: int) -> list[BlockEvent]:
        return [replace(event, medium=HOST) for event in events(number, number)]

    monkeypatch.setattr(membership, "LATER_S", 3600.0)
    async with worker.present():
        worker.membership.announce(colder(1))
        worker.membership.announce(events(2, 2))
        await until(worker.published)
        assert batches == [2], "in order, and nothing waits for the first"
        monkeypatch.setattr(membership, "LATER_S", 0.02)
        worker.membership.announce(colder(3))
        worker.membership.announce(colder(4))
        await until(lambda: worker.registry._last_id >= 4)
    assert await worker.published() == [1, 2, 3, 4] and batches == [2, 2]


async def test_events_of_an_outage_are_published_after_it() -> None:
    """Otherwise readers would not notice the gap until the next event, which may come much later."""
    worker = Worker()
    async with worker.present():
        worker.membership.announce(events(1, 2))
        await until(worker.published)
        worker.registry.available = False
        worker.membership.announce(events(3, 4))
        await asyncio.sleep(0.05)
        worker.membership.announce(events(5, 6))
        await asyncio.sleep(0.05)
        worker.registry.available = True
        await until(lambda: worker.registry._last_id >= 6)
    assert await worker.published() == [1, 2, 3, 4, 5, 6]


async def test_events_announced_during_a_publish_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    publish = worker.registry.publish

    async def slow(batch: list[BlockEvent]) -> None:
        if len(worker.registry._entries) == 0:
            worker.membership.announce(events(3, 3))
        await asyncio.sleep(0.03)
        await publish(batch)

    monkeypatch.setattr(worker.registry, "publish", slow)
    async with worker.present():
        worker.membership.announce(events(1, 2))
        await until(lambda: worker.registry._last_id >= 3)
    assert await worker.published() == [1, 2, 3]


async def test_a_batch_that_was_stored_despite_an_error_is_published_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers drop the repeated events."""
    worker = Worker()
    publish = worker.registry.publish
    failures = 1

    async def lying(batch: list[BlockEvent]) -> None:
        nonlocal failures
        await publish(batch)
        if failures:
            failures -= 1
            raise RegistryUnavailable("slow", "no answer")

    monkeypatch.setattr(worker.registry, "publish", lying)
    async with worker.present():
        worker.membership.announce(events(1, 2))
        await until(lambda: worker.registry._last_id >= 4)
    assert await worker.published() == [1, 2, 1, 2]


async def test_a_long_outage_drops_the_oldest_events_and_leaves_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "MAX_BUFFERED_EVENTS", 4)
    worker = Worker()
    async with worker.present():
        worker.membership.announce(events(1, 1))
        await until(worker.published)
        worker.registry.available = False
        for number in range(2, 12):
            worker.membership.announce(events(number, number))
            await asyncio.sleep(0.005)
        worker.registry.available = True
        await until(lambda: worker.registry._last_id >= 5)
    assert await worker.published() == [1, 8, 9, 10, 11]


@pytest.mark.parametrize("turns", range(4))
async def test_a_cancel_that_comes_with_a_beat_ends_the_membership(turns: int) -> None:
    """A worker that drains beats, and may close at once. `asyncio.wait_for` of Python 3.11 loses a cancel that meets its event."""
    worker = Worker(heartbeat_s=60.0)
    running = asyncio.create_task(worker.membership.run())
    await until(lambda: worker.asked)
    await asyncio.sleep(0.01)  # the membership waits for its next heartbeat
    worker.membership.beat()
    for _ in range(turns):
        await asyncio.sleep(0)
    running.cancel()
    _, lost = await asyncio.wait([running], timeout=5)
    await worker.membership.leave()  # ends it anyway
    worker.membership.beat()
    await asyncio.gather(running, return_exceptions=True)
    assert not lost


# The name of a process


def name_at(monkeypatch: pytest.MonkeyPatch, host: str, pid: int) -> str:
    """The name that a process takes on that host."""
    monkeypatch.delenv("BATON_WORKER_NAME", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    monkeypatch.setattr(os, "getpid", lambda: pid)
    return process_name("decode")


def test_a_process_keeps_the_name_that_its_launcher_gave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_WORKER_NAME", "decode-3")
    assert process_name("decode") == process_name("router") == "decode-3"


@pytest.mark.parametrize("given", [None, ""])
def test_a_process_without_a_given_name_is_named_after_its_role_and_host(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda size: "00" * size)
    name_at(monkeypatch, "gpu7.example.org", 41)
    if given is not None:
        monkeypatch.setenv("BATON_WORKER_NAME", given)
    assert process_name("decode") == "decode-gpu7-41-0000"


def test_processes_of_different_hosts_roles_or_process_ids_have_different_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda size: "00" * size)  # the host, the role and the process id alone must tell them apart
    names = {name_at(monkeypatch, "a", 1), name_at(monkeypatch, "b", 1), name_at(monkeypatch, "a", 2), process_name("prefill")}
    assert len(names) == 4


def test_containers_that_share_a_host_name_and_a_process_id_have_different_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len({name_at(monkeypatch, "a", 1) for _ in range(50)}) > 1  # two of them may draw the same number


def test_a_long_host_name_leaves_room_for_what_is_unique(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {name_at(monkeypatch, "h" * 63, 1), name_at(monkeypatch, "h" * 63, 2)}
    assert len(names) == 2 and all(len(name) <= 63 for name in names)
