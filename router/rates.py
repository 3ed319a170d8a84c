"""Limits how much each tenant may use in a minute: requests, and tokens of prompts and outputs. Redis counts them across all routers.

A window begins with a tenant's first request and lasts a minute (the fixed windows of the library `limits`). A prompt is counted when its
request is admitted, an output when it ends, because its length is not known before. An output may exceed the limit; then the tenant gets
nothing more for the rest of the window.

Counting is atomic: a request is counted first and taken back if that exceeds the limit. So of any number of simultaneous requests, no more
are admitted than the quota has room for. Until a request is taken back, another one that would just have fitted may be refused.

While Redis does not answer, each router counts for itself, starting from zero. A tenant may then get more than its limit, and no request is
refused for lack of a counter.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from limits import RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage, RedisClusterStorage, RedisSentinelStorage, RedisStorage, Storage
from limits.aio.strategies import FixedWindowRateLimiter
from limits.errors import StorageError

from baton.clock import loop_time
from baton.cluster.errors import BatonError, Reason, invalid
from baton.cluster.keys import Quota
from baton.cluster.redis_url import parse

log = logging.getLogger(__name__)
NO_TLS: Mapping[str, Any] = MappingProxyType({})
AGAIN_S = 1.0  # pause before Redis is asked again after a failure
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Cost:
    what: str
    limit: RateLimitItemPerMinute
    amount: int


@dataclass(frozen=True, slots=True)
class _Full:
    """A quota without room. `until`: the end of its window, in seconds since the epoch."""

    what: str
    most: int
    until: float


class Rates:
    def __init__(
        self,
        shared: Storage,
        quota: Callable[[str], Quota],
        timeout_s: float,
        clock: Callable[[], float] = loop_time,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`quota` returns that of a tenant. `timeout_s`: longest wait for `shared`."""
        self.shared = True  # whether all routers share the counts
        self._shared = FixedWindowRateLimiter(shared)
        self._own = FixedWindowRateLimiter(MemoryStorage())
        self._quota = quota
        self._timeout_s = timeout_s
        self._clock = clock
        self._wall_clock = wall_clock
        self._again_at = -math.inf

    async def check(self, tenant: str) -> None:
        """Raises RATE_LIMITED if the tenant has used up its minute. Counts nothing: it only saves work that would be refused."""
        costs = self._costs(tenant, 1)

        if costs:
            self._raise(tenant, await self._ask(lambda limiter: _find_full(limiter, costs, tenant)))

    async def admit(self, tenant: str, prompt_tokens: int) -> None:
        """Counts one request and its prompt. Raises RATE_LIMITED with the time left in the window, or INVALID_FIELD for a prompt that no
        window has room for; then nothing is counted."""
        quota = self._quota(tenant)
        if quota.tokens is not None and prompt_tokens > quota.tokens:
            raise invalid("prompt", f"has {prompt_tokens} tokens, but {tenant} may use only {quota.tokens} per minute")
        costs = self._costs(tenant, prompt_tokens)

        async def enter(limiter: FixedWindowRateLimiter) -> _Full | None:
            # Test first: a Redis that does not answer in time may still carry out the command later.
            if full := await _find_full(limiter, costs, tenant):
                return full
            for i, cost in enumerate(costs):
                if not await limiter.hit(cost.limit, cost.what, tenant, cost=cost.amount):
                    full = await _full(limiter, cost, tenant)
                    for counted in costs[: i + 1]:
                        await limiter.hit(counted.limit, counted.what, tenant, cost=-counted.amount)
                    return full
            return None

        if costs:
            self._raise(tenant, await self._ask(enter))

    async def refund(self, tenant: str, prompt_tokens: int) -> None:
        """Takes back what `admit` counted for a request that was refused later."""

        async def take_back(limiter: FixedWindowRateLimiter) -> None:
            for cost in self._costs(tenant, prompt_tokens):
                await limiter.hit(cost.limit, cost.what, tenant, cost=-cost.amount)

        if self._costs(tenant, prompt_tokens):
            await self._ask(take_back)

    async def charge(self, tenant: str, output_tokens: int) -> None:
        """Counts the output of an admitted request, even if the window has no room for it."""
        amount = self._quota(tenant).tokens
        if amount is not None and output_tokens:
            limit = RateLimitItemPerMinute(amount)
            await self._ask(lambda limiter: limiter.hit(limit, "tokens", tenant, cost=output_tokens))

    def _costs(self, tenant: str, prompt_tokens: int) -> list["_Cost"]:
        """What one request costs, for each limit that the tenant has."""
        quota = self._quota(tenant)
        costs = (("requests", quota.requests, 1), ("tokens", quota.tokens, prompt_tokens))
        return [_Cost(what, RateLimitItemPerMinute(most), amount) for what, most, amount in costs if most is not None and amount]

    def _raise(self, tenant: str, full: "_Full | None") -> None:
        if full is not None:
            left = max(1.0, full.until - self._wall_clock())
            raise BatonError(Reason.RATE_LIMITED, f"{tenant} has used its {full.most} {full.what} for this minute", retry_after=left)

    async def _ask(self, question: Callable[[FixedWindowRateLimiter], Awaitable[T]]) -> T:
        if self._clock() >= self._again_at:
            try:
                async with asyncio.timeout(self._timeout_s):
                    answer = await question(self._shared)
            except (TimeoutError, StorageError) as error:
                self._again_at = self._clock() + AGAIN_S
                if self.shared:
                    log.warning("this router alone counts the rates of tenants: %s", str(error) or "Redis does not answer")
                self.shared = False
            else:
                self.shared = True
                return answer
        return await question(self._own)


async def _find_full(limiter: FixedWindowRateLimiter, costs: list[_Cost], tenant: str) -> _Full | None:
    for cost in costs:
        if not await limiter.test(cost.limit, cost.what, tenant, cost=cost.amount):
            return await _full(limiter, cost, tenant)
    return None


async def _full(limiter: FixedWindowRateLimiter, cost: _Cost, tenant: str) -> _Full:
    return _Full(cost.what, cost.limit.amount, (await limiter.get_window_stats(cost.limit, cost.what, tenant)).reset_time)


class Unlimited:
    """Stands in for `Rates` if no tenant has a limit."""

    async def check(self, tenant: str) -> None:
        pass

    async def refund(self, tenant: str, prompt_tokens: int) -> None:
        pass

    async def admit(self, tenant: str, prompt_tokens: int) -> None:
        pass

    async def charge(self, tenant: str, output_tokens: int) -> None:
        pass


def redis_counters(url: str, cluster: str, tls: Mapping[str, Any] = NO_TLS) -> Storage:
    """Counters beside the registry's own keys (`baton.cluster.redis_registry`). Creating them does not contact Redis. `tls`: options of
    redis-py (`tls_options`)."""
    options: dict[str, Any] = {"wrap_exceptions": True, "implementation": "redispy", "key_prefix": f"baton:{{{cluster}}}:rate", **tls}
    match parse(url).kind:
        case "sentinel":
            return RedisSentinelStorage(url, use_replicas=False, **options)
        case "cluster":
            return RedisClusterStorage(url, **options)
    return RedisStorage(f"redis+{url}" if url.startswith("unix:") else url, **options)
