"""One behaviour suite for both registries, then the faults that only Redis can have, then the codecs."""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from redis_servers import sharded
from turn_work import TurnWork

from baton.cluster.config import RedisConfig
from baton.cluster.records import BlockEvent, Load, Pools, RouterRecord, StartRecord, WorkerRecord
from baton.cluster.redis_registry import SLICE_KEYS, SLICE_RECORDS, RedisRegistry
from baton.cluster.registry import EVENTS_BATCH, FENCE_LIFETIMES, Registry, StaleIncarnation
from baton.engine.core.block_key import MAX_EVENT_KEYS
from baton.launch.redis_server import EmbeddedRedis
from baton.simulate.memory_registry import MemoryRegistry

TTL = 60.0  # seconds; how long a record lives here
CONFIG = RedisConfig(record_ttl_s=TTL, command_timeout_s=5.0, stream_maxlen=3000)
KEY = bytes(range(16))


def record(name: str = "prefill-0", incarnation: int = 7, **changes: Any) -> WorkerRecord:
    facts = WorkerRecord(
        name=name,
        pool="prefill",
        address="127.0.0.1:5000",
        incarnation=incarnation,
        state="ready",
        pid=1,
        host="laptop",
        model_name="smöl",
        model_fingerprint="m",
        tokenizer_fingerprint="t",
        block_size=16,
        max_model_len=2048,
        kv_blocks=100,
        transport="tcp",
    )
    return dataclasses.replace(facts, **changes)


def stored(first: int, last: int, incarnation: int = 7) -> list[BlockEvent]:
    return [BlockEvent("prefill-0", incarnation, n, "stored", (KEY, n.to_bytes(16, "big"))) for n in range(first, last + 1)]


@dataclasses.dataclass
class World:
    """A registry, a second client of the same registry, and functions that let time pass and spoil stored values."""

    registry: Registry
    other: Registry
    advance: Callable[[float], Awaitable[None]]
    spoil_record: Callable[[str, bytes], None]
    spoil_pools: Callable[[bytes], object]
    add_entry: Callable[[dict[bytes, bytes]], object]


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


def memory_world() -> World:
    clock = [1000.0]
    registry = MemoryRegistry(CONFIG, now=lambda: clock[0])

    async def advance(seconds: float) -> None:
        clock[0] += seconds

    def add_entry(fields: dict[bytes, bytes]) -> None:
        registry._last_id += 1
        registry._entries.append((registry._last_id, fields))

    return World(
        registry,
        registry,
        advance,
        lambda name, data: registry._records.update({("worker", name): (data, clock[0] + 1000)}),
        lambda data: setattr(registry, "_pools", data),
        add_entry,
    )


def redis_world(url: str, cluster: str, raw: redis.Redis) -> World:
    def spoil_record(name: str, data: bytes) -> None:
        raw.sadd(f"baton:{{{cluster}}}:members", name)
        raw.set(f"baton:{{{cluster}}}:worker:{name}", data)

    async def advance(seconds: float) -> None:
        """Every key that expires does so that much sooner."""
        for key in raw.keys(f"baton:{{{cluster}}}:*"):
            if (left := raw.pttl(key)) > 0:
                raw.pexpire(key, left - round(seconds * 1000))

    return World(
        RedisRegistry(url, cluster, CONFIG),
        RedisRegistry(url, cluster, CONFIG),
        advance,
        spoil_record,
        lambda data: raw.set(f"baton:{{{cluster}}}:pools", data),
        lambda fields: raw.xadd(f"baton:{{{cluster}}}:events", dict(fields.items())),
    )


@pytest.fixture
def raw(server: EmbeddedRedis) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url) as client:
        yield client


@pytest.fixture
def cluster() -> str:
    return uuid4().hex


@pytest.fixture(scope="module")
def shards() -> Iterator[tuple[str, redis.Redis]]:
    with sharded() as found:
        yield found


@pytest.fixture(params=["memory", "redis", "sharded"])
async def world(request: pytest.FixtureRequest, cluster: str) -> AsyncIterator[World]:
    if request.param == "memory":
        world = memory_world()
    elif request.param == "redis":
        world = redis_world(request.getfixturevalue("server").url, cluster, request.getfixturevalue("raw"))
    else:
        url, raw = request.getfixturevalue("shards")
        world = redis_world(url, cluster, raw)
    yield world
    await world.registry.close()
    await world.other.close()


async def test_every_client_sees_a_worker_that_joined(world: World) -> None:
    assert await world.registry.members() == []
    two, one = record("b", load=Load(running=3, free_blocks=9)), record("a", pool="decode", state="draining")
    await world.registry.join(two)
    await world.registry.join(one)
    assert await world.other.members() == [one, two]


async def test_joining_again_refreshes_the_record(world: World) -> None:
    await world.registry.join(record())
    busy = record(load=Load(running=5))
    await world.registry.join(busy)
    assert await world.registry.members() == [busy]


async def test_a_record_expires_unless_refreshed(world: World) -> None:
    await world.registry.join(record("silent"))
    await world.registry.join(record("alive"))
    for _ in range(3):
        await world.advance(TTL / 2)
        await world.registry.join(record("alive"))
    assert [member.name for member in await world.registry.members()] == ["alive"]
    await world.advance(TTL * 1.1)
    assert await world.registry.members() == []


# The second pair differs only in bits that a double cannot represent; the third in its number of digits.
@pytest.mark.parametrize(("older", "newer"), [(6, 7), (2**63, 2**63 + 1), (9, 10)])
async def test_an_older_incarnation_is_refused_and_a_newer_one_is_not(world: World, older: int, newer: int) -> None:
    await world.other.join(record(incarnation=older))
    await world.registry.join(record(incarnation=newer))
    with pytest.raises(StaleIncarnation) as refusal:
        await world.other.join(record(incarnation=older, load=Load(running=1)))
    assert refusal.value.newest == newer
    assert await world.registry.members() == [record(incarnation=newer)]
    # Control: the same write is accepted from the same and from a newer incarnation.
    for incarnation in (newer, newer + 1):
        await world.other.join(record(incarnation=incarnation, load=Load(running=1)))
        assert await world.registry.members() == [record(incarnation=incarnation, load=Load(running=1))]


async def test_other_names_have_their_own_incarnations(world: World) -> None:
    await world.registry.join(record("a", 9))
    await world.registry.join(record("b", 1))
    assert len(await world.registry.members()) == 2


async def test_an_older_incarnation_stays_refused_until_the_newer_one_is_forgotten(world: World) -> None:
    await world.registry.join(record(incarnation=8))
    await world.registry.leave("prefill-0", 8)
    with pytest.raises(StaleIncarnation):
        await world.registry.join(record(incarnation=7))
    await world.advance(TTL * 1.1)
    with pytest.raises(StaleIncarnation):
        await world.registry.join(record(incarnation=7))
    assert await world.registry.members() == []
    await world.advance(TTL * FENCE_LIFETIMES)
    await world.registry.join(record(incarnation=7))
    assert await world.registry.members() == [record(incarnation=7)]


async def test_leave_removes_only_its_own_incarnation(world: World) -> None:
    await world.registry.leave("prefill-0", 7)  # not a member: nothing to do
    await world.registry.join(record(incarnation=8))
    await world.registry.join(record("bystander"))
    await world.registry.leave("prefill-0", 7)
    assert len(await world.registry.members()) == 2
    await world.registry.leave("prefill-0", 8)
    assert [member.name for member in await world.registry.members()] == ["bystander"]
    await world.registry.join(record(incarnation=8))
    assert len(await world.registry.members()) == 2


async def test_one_planner_leads_at_a_time(world: World) -> None:
    assert await world.other.leader() == ""
    first = await world.registry.lead("a 7", 10.0)
    assert first > 0 and await world.other.lead("b", 10.0) == 0
    assert await world.other.leader() == "a 7" and await world.other.leader("prover") == ""
    await world.advance(9.0)
    assert await world.registry.lead("a 7", 10.0, first) == first, "it keeps its term"
    await world.advance(9.0)
    assert await world.other.lead("b", 10.0) == 0
    await world.advance(2.0)
    second = await world.other.lead("b", 10.0)
    assert second > first and await world.registry.lead("a 7", 10.0, first) == 0
    await world.registry.resign("a 7", first)  # not its term any more
    assert await world.registry.lead("a", 10.0) == 0
    assert await world.registry.leader() == "b"
    await world.other.resign("b", second)
    assert await world.registry.leader() == ""
    assert await world.registry.lead("a", 10.0) > second


async def test_only_who_leads_plans_and_only_from_what_is_wanted(world: World) -> None:
    await world.registry.desire(Pools(1, 1))
    term = await world.registry.lead("a", 10.0)
    assert await world.registry.plan("a", term, Pools(1, 1), Pools(2, 1)) and await world.other.desired() == Pools(2, 1)
    assert not await world.registry.plan("a", term, Pools(1, 1), Pools(3, 1)), "somebody has asked for other sizes"
    assert not await world.other.plan("b", term, Pools(2, 1), Pools(3, 1)), "another process"
    assert not await world.registry.plan("a", term + 1, Pools(2, 1), Pools(3, 1))
    await world.registry.desire(Pools(2, 1, stop=True))
    assert not await world.registry.plan("a", term, Pools(2, 1), Pools(3, 1)), "the end of a cluster is not taken back"
    await world.registry.desire(Pools(2, 1))
    await world.advance(11.0)
    assert not await world.registry.plan("a", term, Pools(2, 1), Pools(3, 1)), "its lease is over, though nobody else leads"
    assert await world.other.desired() == Pools(2, 1)
    world.spoil_pools(b"{")
    term = await world.registry.lead("a", 10.0)
    assert not await world.registry.plan("a", term, Pools(2, 1), Pools(3, 1))


async def test_each_office_has_a_leader_of_its_own(world: World) -> None:
    term = await world.registry.lead("a", 10.0)
    assert await world.other.lead("b", 10.0, 0, "prover") == 1 and await world.registry.lead("a", 10.0, 0, "prover") == 0
    await world.other.resign("b", 1)  # of the planner, which it does not lead
    assert await world.registry.lead("a", 10.0, term) == term
    await world.other.resign("b", 1, "prover")
    assert await world.registry.lead("a", 10.0, 0, "prover") == 2


async def test_only_who_leads_notes_its_change(world: World) -> None:
    assert await world.other.noted_change() is None
    term = await world.registry.lead("a", 10.0)
    assert await world.registry.note_change("a", term, b"one") and await world.other.noted_change() == b"one"
    assert not await world.other.note_change("b", term, b"two") and not await world.registry.note_change("a", term + 1, b"two")
    await world.advance(11.0)
    assert not await world.registry.note_change("a", term, b"two") and await world.other.noted_change() == b"one"


async def test_the_last_plans_are_kept(world: World) -> None:
    assert await world.registry.noted_plans(5) == []
    for number in range(6):
        await world.registry.note_plan(b"%d" % number, 4)
    assert await world.other.noted_plans(2) == [b"4", b"5"] and len(await world.other.noted_plans(9)) == 4


async def test_what_one_has_said_first_holds_for_all_until_nobody_has_asked_for_long(world: World) -> None:
    assert await world.other.agree("products", "", 30.0) == "", "asking says nothing"
    assert await world.registry.agree("products", "one", 30.0) == "one" == await world.other.agree("products", "two", 30.0)
    assert await world.other.agree("more", "two", 30.0) == "two"
    for _ in range(3):
        await world.advance(20.0)
        assert await world.other.agree("products", "", 30.0) == "one"
    await world.advance(31.0)
    assert await world.other.agree("products", "two", 30.0) == "two"


def router(name: str = "router-0", incarnation: int = 7, **changes: Any) -> RouterRecord:
    return dataclasses.replace(RouterRecord(name, incarnation, 1, "laptop", {"grpc": "127.0.0.1:8470"}, "smöl"), **changes)


async def test_a_worker_that_starts_has_a_record_of_its_own(world: World) -> None:
    loading = StartRecord("one", "decode", 7, 1, "host", "loading weights", 3, 38, "tensors", 1.5)
    await world.registry.join(record("one", 9))
    await world.registry.join(loading)
    assert await world.other.starts() == [loading] and len(await world.other.members()) == 1
    await world.advance(TTL * 1.1)
    assert await world.other.starts() == []
    await world.registry.join(loading)
    await world.registry.leave("one", 7, "start")
    assert await world.other.starts() == [] and str(loading) == "loading weights: 3 of 38 tensors"


async def test_routers_join_and_leave_apart_from_workers_of_the_same_name(world: World) -> None:
    await world.registry.join(record("one", 9))
    await world.registry.join(router("one", 3, inflight=2))
    await world.registry.join(router())
    assert await world.other.routers() == [router("one", 3, inflight=2), router()]
    assert await world.other.members() == [record("one", 9)]
    await world.registry.leave("one", 3)  # a worker's incarnation is meant
    await world.registry.leave("one", 9, "router")
    assert len(await world.other.routers()) == 2 and len(await world.other.members()) == 1
    await world.registry.leave("one", 3, "router")
    assert await world.other.routers() == [router()] and await world.other.members() == [record("one", 9)]
    with pytest.raises(StaleIncarnation):
        await world.registry.join(router(incarnation=6))
    await world.advance(TTL * 1.1)
    assert await world.other.routers() == []


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\x00\xfe",
        b"[]",
        b"null",
        b"{}",
        b"[" * 100_000,
        record("someone-else").to_json(),
        json.dumps(json.loads(record("bad").to_json()) | {"incarnation": "7"}).encode(),
        json.dumps(json.loads(record("bad").to_json()) | {"incarnation": True}).encode(),
        json.dumps(json.loads(record("bad").to_json()) | {"kv_blocks": -1}).encode(),
        json.dumps(json.loads(record("bad").to_json()) | {"pool": "king"}).encode(),
        json.dumps(json.loads(record("bad").to_json()) | {"load": []}).encode(),
        json.dumps(json.loads(record("bad").to_json()) | {"load": {"running": None}}).encode(),
    ],
    ids=lambda data: data[:12].decode(errors="replace"),
)
async def test_a_garbage_record_is_skipped_counted_and_replaced(world: World, data: bytes) -> None:
    await world.registry.join(record("good"))
    world.spoil_record("bad", data)
    assert await world.registry.members() == [record("good")]
    assert world.registry.garbage == 1
    await world.registry.join(record("bad"))
    assert [member.name for member in await world.registry.members()] == ["bad", "good"]
    assert world.registry.garbage == 1


async def test_events_after_the_cursor_come_once_and_in_order(world: World) -> None:
    await world.registry.publish(stored(1, 2))
    none, cursor = await world.other.events(None, 5.0)  # from now: does not wait, does not replay
    assert none == []
    assert await world.other.events(cursor, 0.0) == ([], cursor)
    await world.registry.publish(stored(3, 4))
    removed = BlockEvent("prefill-0", 8, 1, "removed", (KEY,))
    await world.registry.publish([removed])
    found, later = await world.other.events(cursor, 0.0)
    assert found == [*stored(3, 4), removed]
    assert await world.other.events(later, 0.0) == ([], later)
    # Any client can use a cursor again.
    assert (await world.registry.events(cursor, 0.0))[0] == found


async def test_publishing_no_events_adds_nothing(world: World) -> None:
    _, cursor = await world.registry.events(None, 0.0)
    await world.registry.publish([])
    assert await world.registry.events(cursor, 0.0) == ([], cursor)


async def test_a_waiting_reader_is_woken_by_an_event_or_times_out(world: World) -> None:
    _, cursor = await world.other.events(None, 0.0)
    waiting = asyncio.create_task(world.other.events(cursor, 30.0))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await world.registry.publish(stored(1, 1))
    found, cursor = await asyncio.wait_for(waiting, 30.0)
    assert found == stored(1, 1)
    assert await asyncio.wait_for(world.other.events(cursor, 0.05), 30.0) == ([], cursor)


async def test_waiting_readers_do_not_delay_other_calls(world: World) -> None:
    _, cursor = await world.registry.events(None, 0.0)
    readers = [asyncio.create_task(world.registry.events(cursor, 30.0)) for _ in range(3)]
    await asyncio.sleep(0.05)
    for call in (world.registry.ping(), world.registry.join(record()), world.registry.members(), world.registry.publish(stored(1, 1))):
        await asyncio.wait_for(call, 30.0)
    for reader in readers:
        assert (await asyncio.wait_for(reader, 30.0))[0] == stored(1, 1)


async def test_a_batch_is_bounded_and_the_next_one_continues(world: World) -> None:
    _, cursor = await world.registry.events(None, 0.0)
    await world.registry.publish(stored(1, EVENTS_BATCH + 5))
    first, cursor = await world.registry.events(cursor, 0.0)
    rest, _ = await world.registry.events(cursor, 0.0)
    assert len(first) == EVENTS_BATCH
    assert first + rest == stored(1, EVENTS_BATCH + 5)


async def test_old_events_are_dropped_and_a_slow_reader_sees_the_gap(world: World) -> None:
    _, cursor = await world.registry.events(None, 0.0)
    await world.registry.publish(stored(1, 10_000))
    sequences: list[int] = []
    while found := (await world.registry.events(cursor, 0.0)):
        if not found[0]:
            break
        sequences += [event.sequence for event in found[0]]
        cursor = found[1]
    assert CONFIG.stream_maxlen <= len(sequences) <= CONFIG.stream_maxlen + 200
    assert sequences == list(range(10_001 - len(sequences), 10_001))


@pytest.mark.parametrize(
    "spoilt",
    [
        {b"s": b"one"},
        {b"s": b"0"},
        {b"i": b"-1"},
        {b"k": b"eaten"},
        {b"k": b"cleared"},
        {b"b": b"15 bytes exactly"[:15]},
        {b"w": b"\xff"},
        {b"w": b""},
        {b"s": b"9" * 5000},
        {b"w": None},
    ],
    ids=str,
)
async def test_a_garbage_event_is_skipped_and_counted_and_the_cursor_passes_it(world: World, spoilt: dict[bytes, bytes | None]) -> None:
    _, cursor = await world.registry.events(None, 0.0)
    await world.registry.publish(stored(1, 1))
    fields = stored(2, 2)[0].to_fields() | spoilt
    world.add_entry({name: value for name, value in fields.items() if value is not None})
    await world.registry.publish(stored(3, 3))
    found, cursor = await world.registry.events(cursor, 0.0)
    assert found == [*stored(1, 1), *stored(3, 3)]
    assert world.registry.garbage == 1
    world.add_entry({b"nothing": b"of ours"})  # the newest entry; the cursor passes it too
    found, later = await world.registry.events(cursor, 0.0)
    assert found == [] and later != cursor
    assert await world.registry.events(later, 0.0) == ([], later)
    assert world.registry.garbage == 2


async def test_desired_pool_sizes_do_not_expire_and_garbage_is_counted(world: World) -> None:
    assert await world.registry.desired() is None
    await world.registry.desire(Pools(2, 3))
    await world.advance(TTL * 1.1)
    assert await world.other.desired() == Pools(2, 3)
    for data in (b"", b'{"prefill": 1}', b'{"prefill": 1, "decode": "2"}', b'{"prefill": -1, "decode": 2}'):
        world.spoil_pools(data)
        assert await world.registry.desired() is None
    assert world.registry.garbage == 4
    await world.registry.desire(Pools(0, 1))
    assert await world.registry.desired() == Pools(0, 1)


class TestRedis:
    @pytest.fixture
    async def registry(self, server: EmbeddedRedis, cluster: str) -> AsyncIterator[RedisRegistry]:
        registry = RedisRegistry(server.url, cluster, CONFIG)
        yield registry
        await registry.close()

    async def test_clusters_do_not_see_each_other(self, server: EmbeddedRedis, registry: RedisRegistry) -> None:
        neighbour = RedisRegistry(server.url, "neighbour", CONFIG)
        _, cursor = await neighbour.events(None, 0.0)
        await registry.join(record())
        await registry.publish(stored(1, 1))
        await registry.desire(Pools(1, 1))
        assert await neighbour.members() == []
        assert await neighbour.events(cursor, 0.0) == ([], cursor)
        assert await neighbour.desired() is None
        await neighbour.close()

    async def test_values_of_the_wrong_type_are_tolerated_and_overwritten(
        self, registry: RedisRegistry, cluster: str, raw: redis.Redis
    ) -> None:
        prefix = f"baton:{{{cluster}}}:"
        for name in ("worker:a", "fence:a", "members", "events"):
            raw.hset(prefix + name, "x", "y")
        assert await registry.members() == []
        assert registry.garbage == 1
        await registry.leave("a", 1)
        await registry.join(record("a"))
        await registry.publish(stored(1, 1))
        assert await registry.members() == [record("a")]
        assert (await registry.events("0-0", 0.0))[0] == stored(1, 1)
        raw.delete(prefix + "worker:a")
        raw.hset(prefix + "worker:a", "x", "y")
        assert await registry.members() == []
        assert registry.garbage == 2

    async def test_records_are_read_in_slices_and_only_if_they_are_new(
        self, registry: RedisRegistry, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        work, members = TurnWork(), [record(f"w{i:03}") for i in range(3 * SLICE_RECORDS)]
        monkeypatch.setattr(WorkerRecord, "from_json", work.counted(WorkerRecord.from_json))
        for member in members:
            await registry.join(member)
        with work.watched():
            assert await registry.members() == members
        assert 1 < work.most <= SLICE_RECORDS
        await registry.join(new := dataclasses.replace(members[7], load=Load(running=3)))
        await registry.leave(members[0].name, members[0].incarnation)
        with work.watched():
            assert await registry.members() == [*members[1:7], new, *members[8:]]
        assert work.most == 1

    async def test_events_are_read_in_slices(self, registry: RedisRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
        work, keys = TurnWork(), tuple(i.to_bytes(16, "big") for i in range(MAX_EVENT_KEYS))
        monkeypatch.setattr(BlockEvent, "from_fields", work.counted(BlockEvent.from_fields, lambda fields: MAX_EVENT_KEYS))
        events = [BlockEvent("w", 1, number, "stored", keys) for number in range(1, 21)]
        await registry.publish(events)
        with work.watched():
            assert (await registry.events("0-0", 0.0))[0] == events
        assert work.most <= SLICE_KEYS

    async def test_a_garbage_fence_does_not_prevent_joining(self, registry: RedisRegistry, cluster: str, raw: redis.Redis) -> None:
        raw.set(f"baton:{{{cluster}}}:fence:prefill-0", "zzzzzzzz")
        await registry.join(record())
        assert await registry.members() == [record()]

    async def test_a_silent_worker_expires_and_its_name_is_removed(self, server: EmbeddedRedis, cluster: str, raw: redis.Redis) -> None:
        registry = RedisRegistry(server.url, cluster, RedisConfig(record_ttl_s=0.2, heartbeat_s=0.05, command_timeout_s=5.0))
        await registry.join(record())
        assert raw.smembers(f"baton:{{{cluster}}}:members") == {b"prefill-0"}
        async with asyncio.timeout(10):
            while await registry.members():
                await asyncio.sleep(0.02)
        assert raw.smembers(f"baton:{{{cluster}}}:members") == set()
        await registry.close()

    async def test_every_key_except_the_member_set_expires(self, registry: RedisRegistry, cluster: str, raw: redis.Redis) -> None:
        await registry.join(record())
        keys = {key if isinstance(key, str) else key.decode() for key in raw.keys(f"baton:{{{cluster}}}:*")}
        ttls = {key.split(":", 2)[2]: raw.pttl(key) for key in keys}
        assert ttls.pop("members") == -1
        assert ttls.keys() == {"worker:prefill-0", "fence:prefill-0"}
        assert 0 < ttls["worker:prefill-0"] <= TTL * 1000 < ttls["fence:prefill-0"]

    async def test_a_cursor_from_a_server_whose_clock_was_ahead_is_reset(self, registry: RedisRegistry) -> None:
        await registry.publish(stored(1, 1))
        found, cursor = await registry.events("99999999999999-5", 0.0)
        assert (found, cursor) == ([], "0-0")
        assert (await registry.events(cursor, 0.0))[0] == stored(1, 1)

    async def test_the_registry_works_over_a_unix_socket(self, server: EmbeddedRedis, cluster: str, tmp_path: Path) -> None:
        path = tmp_path / "redis.sock"

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            behind, ahead = await asyncio.open_connection("127.0.0.1", server.port)

            async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
                while data := await source.read(65536):
                    sink.write(data)
                sink.close()

            await asyncio.gather(copy(reader, ahead), copy(behind, writer))

        listener = await asyncio.start_unix_server(relay, path)
        registry = RedisRegistry(f"unix://{path}?password={server.password}", cluster, CONFIG)
        await registry.join(record())
        assert await registry.members() == [record()]
        await registry.close()
        listener.close()

    def test_an_invalid_address_is_refused_immediately(self) -> None:
        for url in ("embedded", "http://127.0.0.1"):
            with pytest.raises(ValueError):
                RedisRegistry(url, "baton", CONFIG)


small = st.integers(0, 2**64 - 1)
records = st.builds(
    WorkerRecord,
    name=st.text(),
    pool=st.sampled_from(["prefill", "decode"]),
    address=st.text(),
    incarnation=small,
    state=st.sampled_from(["ready", "draining"]),
    pid=small,
    host=st.text(),
    model_name=st.text(),
    model_fingerprint=st.text(),
    tokenizer_fingerprint=st.text(),
    block_size=small,
    max_model_len=small,
    kv_blocks=small,
    transport=st.text(),
    load=st.builds(Load, *[small] * len(dataclasses.fields(Load))),
)
events = st.builds(
    BlockEvent,
    worker=st.text(min_size=1),
    incarnation=small,
    sequence=st.integers(1, 2**64 - 1),
    kind=st.sampled_from(["stored", "removed"]),
    keys=st.lists(st.binary(min_size=16, max_size=16)).map(tuple),
)


@given(records)
def test_a_record_survives_its_encoding(facts: WorkerRecord) -> None:
    assert WorkerRecord.from_json(facts.to_json()) == facts


@given(events)
def test_an_event_survives_its_encoding(event: BlockEvent) -> None:
    assert BlockEvent.from_fields(event.to_fields()) == event


def test_an_event_with_too_many_keys_is_refused() -> None:
    """A reader applies an event in one piece. Its number is then missing, so the reader asks for a snapshot."""
    fields = BlockEvent("w", 1, 1, "stored", (b"k" * 16,) * MAX_EVENT_KEYS).to_fields()
    assert len(BlockEvent.from_fields(fields).keys) == MAX_EVENT_KEYS
    with pytest.raises(ValueError, match="bytes of keys"):
        BlockEvent.from_fields({**fields, b"b": fields[b"b"] + b"k" * 16})


def test_unknown_fields_are_skipped_and_fields_with_a_default_may_be_missing() -> None:
    tree = json.loads(record().to_json())
    assert WorkerRecord.from_json(json.dumps(tree | {"colour": "red", "load": tree["load"] | {"mood": 1}})) == record()
    del tree["load"]["leases"]
    assert WorkerRecord.from_json(json.dumps(tree)) == record()
    del tree["kv_blocks"]
    with pytest.raises(ValueError, match="kv_blocks"):
        WorkerRecord.from_json(json.dumps(tree))


def test_a_decoding_error_is_one_line_that_names_the_field() -> None:
    tree = json.loads(record().to_json())
    for change, where in (
        ({"kv_blocks": "x" * 5000}, "record.kv_blocks"),
        ({"load": {"leases": -1}}, "record.load.leases"),
        ({"state": "gone"}, "record.state"),
    ):
        with pytest.raises(ValueError, match=f"^{where}: ") as refusal:
            WorkerRecord.from_json(json.dumps(tree | change))
        assert len(str(refusal.value)) < 200 and "\n" not in str(refusal.value)


def test_only_the_credit_may_be_negative() -> None:
    tree = json.loads(record().to_json())
    assert WorkerRecord.from_json(json.dumps(tree | {"load": {"credit_tokens": -5}})).load.credit_tokens == -5
    for name in (name for name in tree["load"] if name != "credit_tokens"):
        with pytest.raises(ValueError, match=f"record.load.{name}"):
            WorkerRecord.from_json(json.dumps(tree | {"load": {name: -5}}))


json_values = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner), max_leaves=5)


@given(st.sampled_from([f.name for f in dataclasses.fields(WorkerRecord)]), json_values)
def test_any_value_of_a_field_is_either_decoded_or_refused(name: str, value: object) -> None:
    with contextlib.suppress(ValueError):
        facts = WorkerRecord.from_json(json.dumps(json.loads(record().to_json()) | {name: value}))
        assert type(getattr(facts, name)) is type(getattr(record(), name))


@given(st.binary())
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        WorkerRecord.from_json(data)
    with contextlib.suppress(ValueError):
        Pools.from_json(data)
