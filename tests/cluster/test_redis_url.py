"""The addresses of Redis: what is understood, what is refused, and that a failover under Sentinels costs a registry a few seconds."""

import asyncio
import signal
import time
from collections.abc import Iterator
from subprocess import Popen
from typing import Any

import pytest
from redis_servers import watched

from baton.cluster.config import Config, RedisConfig
from baton.cluster.keys import Quota
from baton.cluster.records import RouterRecord
from baton.cluster.redis_registry import RedisRegistry
from baton.cluster.redis_url import RedisUrl, parse
from baton.cluster.registry import RegistryUnavailable
from router.rates import Rates, redis_counters

WITHIN_S = 60.0


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("redis://10.0.0.1", RedisUrl("server", (("10.0.0.1", 6379),))),
        ("rediss://:p%40ss@redis.example:7000/3", RedisUrl("server", (("redis.example", 7000),), password="p@ss", db=3)),
        ("redis://[fd00::1]:6380", RedisUrl("server", (("fd00::1", 6380),))),
        ("unix:///run/redis.sock", RedisUrl("server")),
        (
            "redis+sentinel://me:secret@a,b:7001,[::1]:7002/main/2",
            RedisUrl("sentinel", (("a", 26379), ("b", 7001), ("::1", 7002)), "me", "secret", "main", 2),
        ),
        ("redis+cluster://a:1,b:2", RedisUrl("cluster", (("a", 1), ("b", 2)))),
    ],
)
def test_addresses_are_understood(url: str, found: RedisUrl) -> None:
    assert parse(url) == found
    assert Config(redis=RedisConfig(url=url)).redis.url == url


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://a", "must begin with one of"),
        ("redis://a,b", "take several hosts"),
        ("redis+sentinel://a:1,b:2", "master's name"),
        ("redis+sentinel://a:1/main/x", "number of a database"),
        ("redis://a/x", "number of a database"),
        ("redis+cluster://a/1", "no databases"),
        ("redis://a:port", "is not HOST:PORT"),
        ("redis://:secret-word@", "a host is missing"),
        ("unix://", "path of a socket"),
    ],
)
def test_other_addresses_are_refused_without_their_password(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        RedisConfig(url=url)
    assert "secret-word" not in str(refused.value)


@pytest.fixture
def pair() -> Iterator[tuple[str, "Popen[bytes]", "Popen[bytes]"]]:
    with watched() as found:
        yield found


async def until_works(call: Any) -> Any:
    deadline = time.monotonic() + WITHIN_S
    while True:
        try:
            return await call()
        except RegistryUnavailable:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)


async def test_the_registry_and_the_quotas_follow_a_failover(pair: tuple[str, "Popen[bytes]", "Popen[bytes]"]) -> None:
    url, primary, first_sentinel = pair
    registry = RedisRegistry(url, "c", RedisConfig())
    rates = Rates(redis_counters(url, "c"), lambda tenant: Quota(requests=3), 1.0)
    record = RouterRecord("router-0", 1, 1, "host", {}, "toy")
    try:
        await until_works(lambda: registry.join(record))
        await rates.admit("tenant", 1)
        first_sentinel.send_signal(signal.SIGSTOP)  # its connections stay open; the other Sentinel must be asked in time
        primary.kill()
        with pytest.raises(RegistryUnavailable):
            await registry.ping()
        await rates.admit("tenant", 1)  # counted here while nothing answers
        await until_works(lambda: registry.join(record))
        assert await registry.routers() == [record]
        assert (await registry.events(None, 0.0))[0] == []
        await rates.admit("tenant", 1)
    finally:
        first_sentinel.send_signal(signal.SIGCONT)
        await registry.close()
