"""How much each tenant may ask for in a minute: requests, and tokens of prompts and outputs. Counted in Redis, so over all routers.

A window begins with a tenant's first request and lasts a minute (the fixed windows of the library `limits`). A prompt counts when its
request is let in, an output when it ends: nobody knows before how long it will be. What it goes over the limit, the rest of the window
pays for.

While Redis does not answer, each router counts for itself, from nothing: a tenant may get more than its limit then, and nobody is refused
for want of a counter.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from limits import RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage, RedisStorage, Storage
from limits.aio.strategies import FixedWindowRateLimiter
from limits.errors import StorageError

from baton.cluster.errors import BatonError, Reason, invalid
from router.keys import Quota

log = logging.getLogger(__name__)
AGAIN_S = 1.0  # pause before a Redis that was away is asked again
T = TypeVar("T")


class Rates:
    def __init__(
        self,
        shared: Storage,
        quota: Callable[[str], Quota],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`quota`: of a tenant. `timeout_s`: longest wait for `shared`."""
        self.shared = True  # whether the counts are those of all routers
        self._shared = FixedWindowRateLimiter(shared)
        self._own = FixedWindowRateLimiter(MemoryStorage())
        self._quota = quota
        self._timeout_s = timeout_s
        self._clock = clock
        self._wall_clock = wall_clock
        self._again_at = -math.inf

    async def admit(self, tenant: str, prompt_tokens: int) -> None:
        """Counts one request and its prompt. Raises RATE_LIMITED with the time that is left of the window, INVALID_FIELD for a prompt
        that no window has room for; then nothing is counted."""
        quota = self._quota(tenant)
        if quota.tokens is not None and prompt_tokens > quota.tokens:
            raise invalid("prompt", f"has {prompt_tokens} tokens, and {tenant} may use {quota.tokens} a minute")
        costs = [
            (what, RateLimitItemPerMinute(amount), cost)
            for what, amount, cost in (("requests", quota.requests, 1), ("tokens", quota.tokens, prompt_tokens))
            if amount is not None
        ]

        async def enter(limiter: FixedWindowRateLimiter) -> tuple[str, int, float] | None:
            for what, limit, cost in costs:
                if not await limiter.test(limit, what, tenant, cost=cost):
                    return what, limit.amount, (await limiter.get_window_stats(limit, what, tenant)).reset_time
            for what, limit, cost in costs:
                await limiter.hit(limit, what, tenant, cost=cost)
            return None

        full = await self._ask(enter) if costs else None
        if full is not None:
            what, amount, until = full
            left = max(1.0, until - self._wall_clock())
            raise BatonError(Reason.RATE_LIMITED, f"{tenant} has used its {amount} {what} of this minute", retry_after=left)

    async def charge(self, tenant: str, output_tokens: int) -> None:
        """An output of a request that was let in, whether or not there is room for it."""
        amount = self._quota(tenant).tokens
        if amount is not None and output_tokens:
            limit = RateLimitItemPerMinute(amount)
            await self._ask(lambda limiter: limiter.hit(limit, "tokens", tenant, cost=output_tokens))

    async def _ask(self, question: Callable[[FixedWindowRateLimiter], Awaitable[T]]) -> T:
        if self._clock() >= self._again_at:
            try:
                async with asyncio.timeout(self._timeout_s):
                    answer = await question(self._shared)
            except (TimeoutError, StorageError) as error:
                self._again_at = self._clock() + AGAIN_S
                if self.shared:
                    log.warning("the rates of tenants are counted by this router alone: %s", str(error) or "Redis does not answer")
                self.shared = False
            else:
                self.shared = True
                return answer
        return await question(self._own)


class Unlimited:
    """In its place where there are no API keys, and so no tenants."""

    async def admit(self, tenant: str, prompt_tokens: int) -> None:
        pass

    async def charge(self, tenant: str, output_tokens: int) -> None:
        pass


def redis_counters(url: str, cluster: str) -> Storage:
    """Beside the registry's own keys (`baton.cluster.redis_registry`). Nothing is asked of Redis yet."""
    address = f"redis+{url}" if url.startswith("unix:") else url
    return RedisStorage(address, wrap_exceptions=True, implementation="redispy", key_prefix=f"baton:{{{cluster}}}:rate")
