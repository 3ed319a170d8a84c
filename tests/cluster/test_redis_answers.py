"""Answers that are kept in a real Redis: life, bound, and whose answers make room."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from uuid import uuid4

import pytest
import redis
from redis_servers import sharded

from baton.cluster.config import RedisConfig, SecurityConfig
from baton.cluster.redis_answers import RedisAnswers
from baton.cluster.registry import RegistryUnavailable
from baton.launch.redis_server import EmbeddedRedis

CONFIG = RedisConfig(command_timeout_s=5.0)
MOST = 1000
LIFE = 60.0
ONE, OTHER = "0a", "0b"  # tenants


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def name() -> str:
    return f"c{uuid4().hex[:8]}"


@pytest.fixture
async def answers(server: EmbeddedRedis, name: str) -> AsyncIterator[RedisAnswers]:
    made = RedisAnswers(server.url, name, CONFIG, SecurityConfig(), MOST)
    yield made
    await made.close()


def raw(server: EmbeddedRedis) -> redis.Redis:
    return redis.Redis.from_url(server.url)


def indexed(server: EmbeddedRedis, name: str) -> tuple[int, int, dict[bytes, float]]:
    """Answers and bytes in the index, and the bytes of each tenant."""
    with raw(server) as client:
        prefix = f"baton:{{{name}}}:"
        held = dict(client.zrange(f"{prefix}answers-held", 0, -1, withscores=True))
        return int(client.zcard(f"{prefix}answers")), int(client.get(f"{prefix}answers-bytes") or 0), held


async def test_an_answer_is_found_until_it_is_deleted(answers: RedisAnswers, server: EmbeddedRedis, name: str) -> None:
    assert await answers.put(ONE, "01", b"\x00text\xff", LIFE)
    assert await answers.get("01") == b"\x00text\xff" and await answers.get("02") is None
    assert indexed(server, name) == (1, 6, {b"0a": 6.0})
    assert await answers.delete(ONE, "01") and not await answers.delete(ONE, "01")
    assert await answers.get("01") is None and indexed(server, name) == (0, 0, {})


async def test_an_answer_expires_and_leaves_nothing(answers: RedisAnswers, server: EmbeddedRedis, name: str) -> None:
    assert await answers.put(ONE, "01", b"text", 0.05)
    with raw(server) as client:
        while client.keys(f"baton:{{{name}}}:*"):
            await asyncio.sleep(0.01)
    assert await answers.get("01") is None
    assert await answers.put(ONE, "02", b"text", 0.02) and await answers.put(ONE, "03", b"text", LIFE)
    while await answers.get("02") is not None:
        await asyncio.sleep(0.01)
    assert await answers.put(OTHER, "04", b"text", LIFE), "whoever writes next takes what has expired out of the index"
    assert indexed(server, name) == (2, 8, {b"0a": 4.0, b"0b": 4.0})


async def test_the_tenant_that_holds_the_most_makes_room(answers: RedisAnswers, server: EmbeddedRedis, name: str) -> None:
    assert await answers.put(OTHER, "ff", b"x" * 100, LIFE)
    for i in range(20):
        assert await answers.put(ONE, f"{i:02x}", b"x" * 100, LIFE)
    assert await answers.get("ff"), "the oldest of all, but its owner holds little"
    found = [i for i in range(20) if await answers.get(f"{i:02x}")]
    assert found == list(range(11, 20)), "the newest of the other are left, as many as there is room for"
    assert indexed(server, name) == (10, MOST, {b"0a": 900.0, b"0b": 100.0})
    assert not await answers.put(OTHER, "fe", b"x" * (MOST + 1), LIFE) and await answers.get("fe") is None
    assert not await answers.put(OTHER, "fd", b"x" * MOST, LIFE), "its owner would hold the most, and has nothing else to drop"
    assert indexed(server, name) == (9, 900, {b"0a": 900.0})
    assert await answers.put(OTHER, "fc", b"x" * 400, LIFE)
    assert indexed(server, name) == (7, MOST, {b"0a": 600.0, b"0b": 400.0})


async def test_another_value_under_the_key_is_no_answer_and_a_lost_index_no_loop(
    answers: RedisAnswers, server: EmbeddedRedis, name: str
) -> None:
    prefix = f"baton:{{{name}}}:"
    with raw(server) as client:
        client.set(f"{prefix}answers-bytes", 5 * MOST)  # too high: somebody has deleted keys
        assert await answers.put(ONE, "01", b"text", LIFE) is False
        client.zadd(f"{prefix}answers-held", {"0c": 10_000.0})
        assert await answers.put(ONE, "02", b"text", LIFE) is False
        client.flushall()
        assert await answers.put(ONE, "03", b"text", LIFE)
        client.delete(f"{prefix}answer:03")
        client.lpush(f"{prefix}answer:03", "x")
        with pytest.raises(RegistryUnavailable):
            await answers.get("03")


async def test_a_redis_that_has_gone_is_told_at_once() -> None:
    with EmbeddedRedis() as server:
        made = RedisAnswers(server.url, "gone", RedisConfig(command_timeout_s=0.5), SecurityConfig(), MOST)
        assert await made.put(ONE, "01", b"text", LIFE)
    for call in (made.get("01"), made.put(ONE, "01", b"text", LIFE), made.delete(ONE, "01")):
        with pytest.raises(RegistryUnavailable):
            await call
    await made.close()


async def test_a_sharded_redis_keeps_them_too() -> None:
    with sharded() as (url, _):
        made = RedisAnswers(url, "shards", CONFIG, SecurityConfig(), MOST)
        for i in range(12):
            assert await made.put(ONE, f"{i:02x}", b"x" * 100, LIFE)
        assert await made.get("0b") and await made.get("00") is None and await made.delete(ONE, "0b")
        await made.close()
