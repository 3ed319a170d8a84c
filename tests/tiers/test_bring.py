"""Blocks that are loaded before a sequence asks for them: they are used, or counted as useless, and no token depends on it."""

import asyncio

import pytest
from tiered import PlainStore, Tiered, make_seq, tiered, until

from baton.engine.core.ahead import AWAITED_S, REMEMBERED, Ahead
from baton.engine.core.block_key import extend_keys, root_key
from baton.engine.core.sequence import Sequence
from baton.engine.core.toy import naive

BLOCK, WAIT_S = 4, 20.0


def prompt(number: int) -> list[int]:
    return [(number * 37 + i * 11) % 256 for i in range(33)]


def keys(number: int) -> list[bytes]:
    found: list[bytes] = []
    extend_keys(found, root_key("toy", ""), prompt(number), BLOCK)
    return found


async def visit(t: Tiered, *numbers: int, tag: str = "") -> list[Sequence]:
    seqs = [make_seq(f"{tag}{number}", prompt(number)) for number in numbers]
    for seq in seqs:
        await t.run(seq)
        await t.settled()
        assert seq.tokens[seq.prompt_len :] == naive(seq.tokens[: seq.prompt_len], seq.params, 8)
    return seqs


async def test_what_a_hint_brings_is_not_loaded_again_and_its_use_counts() -> None:
    async with tiered(PlainStore(100), blocks=40) as t:
        await visit(t, *range(1, 9), tag="a")
        before = t.tiers.tiers[0].worth.tally.saved_s
        came = await t.loop.bring(keys(1), WAIT_S, hint=True)
        assert came > 0 and t.tiers.tiers[0].worth.tally.saved_s == before, "nobody has come for them yet"
        assert await t.loop.bring(keys(1), WAIT_S, hint=True) == 0, "they are here"
        await t.settled()
        reads = t.tiers.tiers[0].worth.tally.reads
        again = await visit(t, 1, tag="b")
        assert again[0].prefilled < 32 and t.tiers.tiers[0].worth.tally.reads == reads
        assert t.tiers.tiers[0].worth.tally.saved_s > before


async def test_without_a_tier_that_holds_it_a_hint_brings_nothing() -> None:
    """Negative control."""
    async with tiered(PlainStore(100), blocks=40) as t:
        assert await t.loop.bring(keys(1), WAIT_S, hint=True) == 0
        await visit(t, 1)


async def test_a_sequence_waits_for_the_load_that_is_under_way() -> None:
    async with tiered(PlainStore(100), blocks=40) as t:
        await visit(t, *range(1, 9), tag="a")
        t.stores[0].gate.clear()
        hint = asyncio.create_task(t.loop.bring(keys(1), WAIT_S, hint=True))
        await until(lambda: t.engine.colder is not None and bool(t.engine.colder._loads))
        await t.loop.add(seq := make_seq("soon", prompt(1)))
        await until(lambda: seq in t.engine.scheduler.loading)
        reads = t.tiers.tiers[0].worth.tally.reads
        t.stores[0].gate.set()
        came = await hint
        await until(lambda: not t.engine.sequences)
        assert 0 < came == t.tiers.tiers[0].worth.tally.reads - reads, "each block was read once"
        assert seq.tokens[seq.prompt_len :] == naive(prompt(1), seq.params, 8)
        await t.settled()


@pytest.mark.parametrize("waits", [False, True])
async def test_who_cancels_a_hint_leaves_nothing_and_takes_nothing_from_who_waits(waits: bool) -> None:
    async with tiered(PlainStore(100), blocks=40) as t:
        await visit(t, *range(1, 9), tag="a")
        t.stores[0].gate.clear()
        hint = asyncio.create_task(t.loop.bring(keys(1), WAIT_S, hint=True))
        await until(lambda: t.engine.colder is not None and bool(t.engine.colder._loads))
        if waits:
            await t.loop.add(seq := make_seq("soon", prompt(1)))
            await until(lambda: seq in t.engine.scheduler.loading)
        hint.cancel()
        await asyncio.gather(hint, return_exceptions=True)
        assert t.engine.colder is not None
        if waits:
            t.stores[0].gate.set()
            await until(lambda: not t.engine.sequences)
            assert t.engine.colder.loaded_tokens > 0
        else:
            await until(lambda: t.engine.pool.num_owned == 0)
            t.stores[0].gate.set()
        await t.settled()


async def test_more_hints_than_are_loaded_at_a_time_are_refused_and_the_pool_is_left_to_those_that_run() -> None:
    async with tiered(PlainStore(200), blocks=40) as t:
        await visit(t, *range(1, 9), tag="a")
        t.stores[0].gate.clear()
        hints = [asyncio.create_task(t.loop.bring(keys(number), WAIT_S, hint=True)) for number in range(1, 7)]
        await until(lambda: t.tiers.hints["nothing"] > 0)
        assert t.engine.pool.available >= 20
        t.stores[0].gate.set()
        await asyncio.gather(*hints)
        await t.settled()


async def test_a_block_whose_load_costs_more_than_its_rival_is_not_brought() -> None:
    async with tiered(PlainStore(100), blocks=40) as t:
        await visit(t, *range(1, 9), tag="a")
        await t.loop.bring(keys(1), WAIT_S)  # now the rate is known
        assert await t.loop.bring(keys(2), WAIT_S, rival_s=1e-12) == 0
        assert await t.loop.bring(keys(2), WAIT_S, rival_s=10.0) > 0
        await t.settled()


def test_a_hint_is_used_or_not_once() -> None:
    ahead = Ahead()
    assert ahead.brought(1, [], 0.0) == ["nothing"]
    assert ahead.brought(2, [(b"a", "host"), (b"b", "disk")], 0.0) == [] and ahead
    assert ahead.used([b"b", b"c"]) == {"disk": 1} and ahead.used([b"b"]) == {}
    assert ahead.brought(3, [(b"d", "host")], 1.0) == []
    assert ahead.expire(AWAITED_S - 0.1) == []
    assert ahead.expire(AWAITED_S) == ["used"] and ahead.used([b"a"]) == {}, "its time is over"
    assert ahead.expire(AWAITED_S + 1) == ["unused"] and not ahead


def test_what_is_remembered_of_hints_is_bounded() -> None:
    ahead = Ahead()
    results = [result for i in range(2 * REMEMBERED) for result in ahead.brought(i, [(bytes([i]), "host")], 0.0)]
    assert results == ["unused"] * REMEMBERED
