"""Limits of tenants: against a real Redis, shared between routers, and what happens while it is away."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import pytest
from limits.aio.storage import MemoryStorage

from baton.cluster.errors import BatonError, Reason
from baton.launch.redis_server import EmbeddedRedis
from router.keys import Quota
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


async def test_prompts_and_outputs_are_tokens(router: Rates) -> None:
    await router.admit("small", 60)
    await refused(router, "small", 41)
    await router.admit("small", 40)
    await refused(router, "small", 1)


async def test_an_output_that_goes_over_the_limit_is_paid_for(router: Rates) -> None:
    await router.admit("small", 10)
    await router.charge("small", 500)
    assert "100 tokens" in (await refused(router, "small", 1)).message


async def test_who_is_refused_uses_nothing(router: Rates) -> None:
    await router.admit("both", 90)
    for _ in range(5):
        await refused(router, "both", 50)
    await router.admit("both", 5)
    await router.admit("both", 5)
    assert "3 requests" in (await refused(router, "both", 0)).message


async def test_a_prompt_that_never_has_room_is_no_matter_of_time(router: Rates) -> None:
    error = await refused(router, "small", 101)
    assert error.reason is Reason.INVALID_FIELD and error.violations[0].field == "prompt" and error.retry_after is None
    await router.admit("small", 100)


async def test_routers_count_together(server: EmbeddedRedis) -> None:
    one, other, foreign = make(server, "together"), make(server, "together"), make(server, "elsewhere")
    await one.admit("few", 1)
    await other.admit("few", 1)
    await refused(one, "few")
    await refused(other, "few")
    await foreign.admit("few", 1)


async def test_while_redis_is_away_a_router_counts_alone_and_asks_again_later(server: EmbeddedRedis) -> None:
    """SIGSTOP: the connection stands, and nobody answers."""
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
        assert not router.shared and time.monotonic() - began < 2, "each request waited for a Redis that is known to be away"
    finally:
        os.kill(server.pid, signal.SIGCONT)
    await refused(router, "few")
    now[0] += AGAIN_S
    await router.admit("few", 1)
    assert router.shared
    await refused(router, "few")


async def test_a_redis_that_is_not_there(server: EmbeddedRedis) -> None:
    router = Rates(redis_counters("redis://127.0.0.1:1/0", "nowhere"), QUOTAS.__getitem__, 0.5)
    await router.admit("few", 1)
    await router.admit("few", 1)
    assert (await refused(router, "few")).reason is Reason.RATE_LIMITED and not router.shared


async def test_a_window_ends() -> None:
    """The library's clock, moved on."""
    storage = MemoryStorage()
    router = Rates(storage, QUOTAS.__getitem__, 1.0)
    for _ in range(2):
        await router.admit("few", 1)
    await refused(router, "few")
    for key in storage.expirations:
        storage.expirations[key] -= 61
    await router.admit("few", 1)


@pytest.mark.parametrize(("tenant", "tokens", "let_in"), [("few", 1, 2), ("small", 40, 2), ("both", 60, 1)])
async def test_of_many_that_come_at_once_no_more_are_let_in_than_there_is_room_for(
    server: EmbeddedRedis, tenant: str, tokens: int, let_in: int
) -> None:
    """Through two routers, so that nothing but Redis can keep the count."""
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


async def test_looking_counts_nothing_and_sees_a_minute_that_is_used_up(router: Rates) -> None:
    for _ in range(5):
        await router.check("few")
    for _ in range(2):
        await router.admit("few", 1)
    with pytest.raises(BatonError) as caught:
        await router.check("few")
    assert caught.value.reason is Reason.RATE_LIMITED and caught.value.retry_after is not None
    await router.check("free")


async def test_what_was_refused_after_all_is_given_back(router: Rates) -> None:
    for _ in range(5):
        await router.admit("both", 90)
        await router.refund("both", 90)
    await router.admit("both", 100)
    await router.refund("free", 10)
