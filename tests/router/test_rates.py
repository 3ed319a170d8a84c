"""Limits of tenants, counted in a real Redis that routers share, and what happens while it is away."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import pytest
from limits.aio.storage import MemoryStorage

from baton.cluster.errors import BatonError, Reason
from baton.cluster.keys import Quota
from baton.launch.redis_server import EmbeddedRedis
from router.rates import AGAIN_S, Rates, redis_counters

QUOTAS = {"few": Quota(requests=2), "small": Quota(tokens=100), "both": Quota(3, 100), "free": Quota()}


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def router(server: EmbeddedRedis, request: pytest.FixtureRequest) -> Rates:
    return make(server, request.node.name)


def make(server: EmbeddedRedis, cluster: str, timeout_s: float = 5.0) -> Rates:
    return Rates(redis_counters(server.url, cluster), QUOTAS.__getitem__, timeout_s)


async def refused(rates: Rates, tenant: str, tokens: int = 1) -> BatonError:
    with pytest.raises(BatonError) as caught:
        await rates.admit(tenant, tokens)
    return caught.value


async def test_requests_are_counted_for_each_tenant(router: Rates) -> None:
    for _ in range(2):
        await router.admit("few", 1000)
    error = await refused(router, "few")
    assert error.reason is Reason.RATE_LIMITED and "few has used its 2 requests" in error.message
    assert error.retry_after is not None and 1 <= error.retry_after <= 61
    for _ in range(10):
        await router.admit("free", 1000)
        await router.charge("free", 1000)


async def test_prompt_tokens_are_counted(router: Rates) -> None:
    await router.admit("small", 60)
    await refused(router, "small", 41)
    await router.admit("small", 40)
    await refused(router, "small", 1)


async def test_an_output_beyond_the_limit_uses_up_the_window(router: Rates) -> None:
    await router.admit("small", 10)
    await router.charge("small", 500)
    assert "100 tokens" in (await refused(router, "small", 1)).message


async def test_a_refused_request_uses_nothing(router: Rates) -> None:
    await router.admit("both", 90)
    for _ in range(5):
        await refused(router, "both", 50)
    await router.admit("both", 5)
    await router.admit("both", 5)
    assert "3 requests" in (await refused(router, "both", 0)).message


async def test_a_prompt_larger_than_the_limit_is_invalid_and_not_to_be_retried(router: Rates) -> None:
    error = await refused(router, "small", 101)
    assert error.reason is Reason.INVALID_FIELD and error.violations[0].field == "prompt" and error.retry_after is None
    await router.admit("small", 100)


async def test_routers_of_one_cluster_share_the_counts(server: EmbeddedRedis) -> None:
    one, other, foreign = make(server, "together"), make(server, "together"), make(server, "elsewhere")
    await one.admit("few", 1)
    await other.admit("few", 1)
    await refused(one, "few")
    await refused(other, "few")
    await foreign.admit("few", 1)


async def test_while_redis_is_away_a_router_counts_alone_and_retries_later(server: EmbeddedRedis) -> None:
    """SIGSTOP keeps the connection open, but Redis no longer answers."""
    now = [0.0]
    router = Rates(redis_counters(server.url, "away"), QUOTAS.__getitem__, 0.2, clock=lambda: now[0])
    await router.admit("few", 1)
    assert router.shared
    os.kill(server.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        for _ in range(2):
            await router.admit("few", 1)
        await refused(router, "few")
        assert not router.shared and time.monotonic() - began < 2, "a request waited for a Redis that is known to be away"
    finally:
        os.kill(server.pid, signal.SIGCONT)
    await refused(router, "few")
    now[0] += AGAIN_S
    await router.admit("few", 1)
    assert router.shared
    await refused(router, "few")


async def test_without_any_redis_a_router_counts_alone(server: EmbeddedRedis) -> None:
    router = Rates(redis_counters("redis://127.0.0.1:1/0", "nowhere"), QUOTAS.__getitem__, 0.5)
    await router.admit("few", 1)
    await router.admit("few", 1)
    assert (await refused(router, "few")).reason is Reason.RATE_LIMITED and not router.shared


async def test_requests_are_admitted_again_in_the_next_window() -> None:
    """The expiry times in the library's storage are moved back by a minute."""
    storage = MemoryStorage()
    router = Rates(storage, QUOTAS.__getitem__, 1.0)
    for _ in range(2):
        await router.admit("few", 1)
    await refused(router, "few")
    for key in storage.expirations:
        storage.expirations[key] -= 61
    await router.admit("few", 1)


@pytest.mark.parametrize(("tenant", "tokens", "let_in"), [("few", 1, 2), ("small", 40, 2), ("both", 60, 1)])
async def test_simultaneous_requests_cannot_exceed_the_quota(server: EmbeddedRedis, tenant: str, tokens: int, let_in: int) -> None:
    """The requests come through two routers, so only Redis can keep the count."""
    routers = [make(server, f"at once {tenant}") for _ in range(2)]

    async def one(number: int) -> bool:
        try:
            await routers[number % 2].admit(tenant, tokens)
        except BatonError as error:
            assert error.reason is Reason.RATE_LIMITED
            return False
        return True

    assert sum(await asyncio.gather(*(one(number) for number in range(20)))) == let_in
    if tenant == "small":
        await routers[0].admit("small", 20)
    await refused(routers[1], tenant, tokens)


async def test_a_check_counts_nothing_and_refuses_a_tenant_that_used_up_its_quota(router: Rates) -> None:
    for _ in range(5):
        await router.check("few")
    for _ in range(2):
        await router.admit("few", 1)
    with pytest.raises(BatonError) as caught:
        await router.check("few")
    assert caught.value.reason is Reason.RATE_LIMITED and caught.value.retry_after is not None
    await router.check("free")


async def test_the_quota_of_a_request_refused_later_is_refunded(router: Rates) -> None:
    for _ in range(5):
        await router.admit("both", 90)
        await router.refund("both", 90)
    await router.admit("both", 100)
    await router.refund("free", 10)
