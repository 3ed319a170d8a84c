"""What a worker keeps in its tiers is lent to others, and spares it reading a handoff that it knows."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from handoff_pair import KEY, PROMPT, Pair, expected, pair

from baton.cluster.errors import BatonError, Reason
from baton.cluster.handoff import Handoff
from baton.engine.core.block_key import HOST, extend_keys, root_key
from baton.engine.core.colder import TierPolicy
from baton.tiers.choice import Measured
from baton.tiers.memory_store import MemoryStore
from baton.tiers.tier import Bounds
from baton.tiers.tiers import Tiers
from kvtransfer.handle import Wish

KEYS: list[bytes] = []
extend_keys(KEYS, root_key("toy"), PROMPT, 4)


async def until(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def tiered_pair() -> AsyncIterator[tuple[Pair, Tiers]]:
    """The decode worker has had the prompt: now only its tier holds it."""
    async with pair() as p:
        tiers = Tiers(lambda pool: [(MemoryStore(pool.unit_bytes, 100), Bounds())], TierPolicy(at_once=True, wait_s=20.0))
        p.loops[1].attach(tiers)
        try:
            await p.start(await p.hand_over()).task
            colder = p.engines[1].colder
            assert colder is not None
            await until(lambda: set(KEYS) <= set(colder.held[HOST]))
            await p.settled()
            await forget(p)
            yield p, tiers
        finally:
            await asyncio.to_thread(tiers.close)


async def forget(p: Pair) -> None:
    for loop in p.loops:
        await loop.call(lambda engine: engine.pool.forget(range(64)))


def wish(keys: list[bytes]) -> Wish:
    return Wish("decode-0", 7, "x", 0, b"".join(keys)).sealed(KEY)


async def test_a_wish_is_answered_from_a_tier() -> None:
    async with tiered_pair() as (p, tiers):
        handle = await p.back.lend(wish(KEYS))
        assert (handle.start, handle.end) == (0, 16) and tiers.tiers[0].worth.tally.hits == 4
        assert p.decode.port.exporter.release(handle, "x")
        await p.settled()


async def test_a_wish_for_what_neither_pool_nor_tier_holds_is_refused() -> None:
    async with tiered_pair() as (p, tiers):
        tiers.drop(KEYS)
        colder = p.engines[1].colder
        assert colder is not None
        await until(lambda: not set(KEYS) & set(colder.held[HOST]))
        with pytest.raises(BatonError) as caught:
            await p.back.lend(wish(KEYS))
        assert caught.value.reason is Reason.LEASE_REFUSED
        await p.settled()


async def test_a_block_that_is_wrong_in_the_tier_is_not_lent() -> None:
    async with tiered_pair() as (p, tiers):
        store = tiers.tiers[0].store
        assert isinstance(store, MemoryStore)
        assert store._memory is not None
        store._memory[:] = 7
        with pytest.raises(BatonError) as caught:
            await p.back.lend(wish(KEYS))
        assert caught.value.reason is Reason.LEASE_REFUSED
        await p.settled()


SLOW, QUICK = Handoff(blocks=1, bytes=1, read_ms=1000.0), Handoff(blocks=1, bytes=1 << 60, read_ms=0.001)


@pytest.mark.parametrize(("known", "own"), [(SLOW, 4), (QUICK, 0), (None, 0)], ids=["slow", "quick", "unknown"])
async def test_who_decodes_takes_from_its_own_tiers_what_is_sooner_there_than_at_its_holder(known: Handoff | None, own: int) -> None:
    """`known`: an earlier read; `own`: blocks."""
    async with tiered_pair() as (p, _):
        p.decode.port._read = Measured()
        p.decode.port.noted(known or Handoff())
        await p.loops[1].bring(KEYS[:1], 20.0)  # the tier's rate is known
        await forget(p)
        call = p.start(await p.hand_over("again"), "again")
        await call.task
        assert call.tokens == expected(1)
        handoff = call.finished.handoff
        assert (handoff.blocks_reused, handoff.blocks) == (own, 5 - own)
        await p.settled()


async def test_if_the_holder_is_gone_what_the_tiers_hold_is_not_computed_again() -> None:
    async with tiered_pair() as (p, _):
        first = await p.hand_over("again")
        assert first.handle is not None and p.prefill.port.exporter.release(first.handle, "again")
        call = p.start(first, "again")
        await call.task
        assert call.tokens == expected(1) and call.finished.handoff.failure
        assert call.finished.handoff.recomputed_tokens <= len(PROMPT) - 16
        await p.settled()
