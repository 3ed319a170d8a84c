"""Contexts longer than the pool: no token depends on where a block is, and nothing stays pinned."""

import asyncio
import time
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from tiered import BLOCK, CONFIG, PlainStore, Tiered, make_seq, tiered, until

from baton.engine.core.block_key import DISK, extend_keys
from baton.engine.core.colder import TierPolicy
from baton.engine.core.engine import Output, TooLong, Unfetchable
from baton.engine.core.long_contexts import LOSSES
from baton.engine.core.sequence import Finish, Sequence
from baton.engine.core.toy import naive
from baton.tiers.tier import HANG_S

BLOCKS = 16  # of the pool
LONGEST = 512  # tokens: eight times the pool
ROOM = 400  # units


def prompt(length: int, number: int = 1) -> list[int]:
    return [(number * 37 + i * 11) % 256 for i in range(length)]


def long_seq(name: str, length: int = 200, max_tokens: int = 30, number: int = 1, **params: Any) -> Sequence:
    return make_seq(name, prompt(length, number), max_tokens, **params)


def check(t: Tiered, *seqs: Sequence) -> None:
    for seq in seqs:
        assert seq.tokens[seq.prompt_len :] == naive(seq.tokens[: seq.prompt_len], seq.params, CONFIG["kv_width"])
    assert not any(store.pins for store in t.stores), "what no sequence uses may go"


def lengthened(
    *stores: PlainStore, most: int = 1, blocks: int = BLOCKS, policy: TierPolicy | None = None
) -> AbstractAsyncContextManager[Tiered]:
    return tiered(*stores, blocks=blocks, max_len=LONGEST, long_contexts=most, policy=policy)


@pytest.mark.parametrize("length", [BLOCKS * BLOCK - 1, BLOCKS * BLOCK, BLOCKS * BLOCK + 1, 200, LONGEST - 30])
async def test_a_prompt_that_does_not_fit_the_pool_has_the_tokens_that_it_has_in_a_large_one(length: int) -> None:
    async with lengthened(PlainStore(ROOM)) as t:
        seq = long_seq("a", length)
        await t.run(seq)
        await t.settled()
        check(t, seq)
        assert seq.preemptions == 0 and seq.prefilled == length - 1, "and nothing is computed twice"


async def test_without_the_key_it_is_refused() -> None:
    async with tiered(PlainStore(ROOM), blocks=BLOCKS) as t:
        with pytest.raises(TooLong):
            await t.loop.add(long_seq("a"))


async def test_an_output_outgrows_the_pool() -> None:
    async with lengthened(PlainStore(ROOM)) as t:
        seq = long_seq("a", 20, 300)
        await t.run(seq)
        await t.settled()
        check(t, seq)
        assert seq.recomputed == 0


async def test_others_run_beside_it_and_keep_their_tokens() -> None:
    async with lengthened(PlainStore(ROOM)) as t:
        seqs = [long_seq("a"), *(make_seq(f"b{i}", prompt(9 + i, i), 12) for i in range(6))]
        await t.run(*seqs)
        await t.settled()
        check(t, *seqs)


async def test_one_at_a_time_and_nobody_waits_behind_those_that_wait() -> None:
    async with lengthened(PlainStore(ROOM)) as t:
        seqs = [long_seq("a", 300, 100), long_seq("b", 200, 5, 2), make_seq("c", prompt(9, 3), 4)]
        most = 0
        for seq in seqs:
            await t.loop.add(seq)
        while t.engine.sequences:
            most = max(most, sum(seq.long for seq in list(t.engine.scheduler.running)))
            await asyncio.sleep(0.001)
        await t.settled()
        check(t, *seqs)
        assert most == 1
        ends = [output.seq.id for output in t.outputs if output.finish is not None]
        assert ends == ["c", "a", "b"]


async def test_two_may_run_at_once_if_that_is_allowed() -> None:
    async with lengthened(PlainStore(ROOM), most=2, blocks=2 * BLOCKS) as t:
        seqs = [long_seq("a", 300, 60), long_seq("b", 300, 60, 2)]
        for seq in seqs:
            await t.loop.add(seq)
        await until(lambda: sum(seq.long for seq in list(t.engine.scheduler.running)) == 2)
        await until(lambda: not t.engine.sequences)
        await t.settled()
        check(t, *seqs)


async def test_a_prefix_that_the_tier_has_is_not_computed_again() -> None:
    async with lengthened(PlainStore(ROOM)) as t:
        await t.run(first := long_seq("a"))
        await t.run(again := long_seq("b"))
        await t.settled()
        check(t, first, again)
        assert first.prefilled == 199 and again.prefilled < BLOCK and again.cached >= 196


async def test_what_the_pool_has_goes_to_the_tier_with_it() -> None:
    async with lengthened(PlainStore(ROOM)) as t:
        await t.run(short := long_seq("a", 40, 1))
        await t.run(seq := long_seq("b"))
        await t.settled()
        check(t, short, seq)
        assert seq.cached == 40 // BLOCK * BLOCK


@pytest.mark.parametrize("holding", [True, False])
async def test_other_blocks_push_out_none_that_is_pinned_and_without_pins_they_do(holding: bool) -> None:
    """The tier has hardly more room than the longest sequence needs, others write to it all the time, and the oldest goes, read or not."""
    store = PlainStore(LONGEST // BLOCK + 2)
    store.holding, store.refreshes = holding, False
    async with lengthened(store, blocks=2 * BLOCKS, policy=TierPolicy(at_once=True)) as t:
        seqs = [long_seq("a", 400, 100), *(make_seq(f"b{i}", prompt(30, i + 2), 8) for i in range(20))]
        await t.run(*seqs)
        await t.settled()
        if holding:
            check(t, *seqs)
        assert (seqs[0].losses == 0) == holding


@pytest.mark.parametrize("verifies", [True, False])
async def test_a_flipped_byte_is_computed_again_and_without_verification_the_token_is_wrong(verifies: bool) -> None:
    store = PlainStore(ROOM)
    store.verifies = verifies
    async with lengthened(store) as t:
        seq = long_seq("a", 200, 60)
        await t.loop.add(seq)
        await until(lambda: seq.output_len > 3)
        store.units[seq.keys[5]][1][7] ^= 1
        await until(lambda: not t.engine.sequences)
        await t.settled()
        right = naive(seq.tokens[:200], seq.params, CONFIG["kv_width"])
        assert (seq.tokens[200:] == right) == verifies
        assert seq.losses == verifies and (not verifies or seq.recomputed > 0)


async def test_blocks_that_are_lost_again_and_again_end_the_sequence() -> None:
    store = PlainStore(ROOM)
    async with lengthened(store) as t:
        store.forgetful = True
        await t.run(seq := long_seq("a"))
        await t.settled()
        told = [output for output in t.outputs if output.failure is not None]
        assert len(told) == 1 and told[0].unavailable and "lost some of it" in (told[0].failure or "") and seq.losses == LOSSES
        assert not store.pins


@pytest.mark.parametrize("fault", ["broken", "hung"])
async def test_a_tier_that_fails_ends_what_lives_there_and_nothing_else(fault: str) -> None:
    store = PlainStore(ROOM)
    async with lengthened(store) as t:
        seqs = [long_seq("a", 200, 200), long_seq("b", 200, 5, 2), make_seq("c", prompt(9, 3), 50)]
        for seq in seqs:
            await t.loop.add(seq)
        await until(lambda: seqs[0].output_len > 3)
        if fault == "broken":
            store.broken = True
        else:
            t.tiers.tiers[0]._clock = lambda: time.monotonic() - 2 * HANG_S
            store.hung.add("get")
        await until(lambda: not t.engine.sequences)
        await t.settled()
        told = {output.seq.id: output for output in t.outputs if output.failure is not None}
        assert set(told) == {"a", "b"} and all(output.unavailable and "is off" in (output.failure or "") for output in told.values())
        assert seqs[2].tokens[9:] == naive(seqs[2].tokens[:9], seqs[2].params, CONFIG["kv_width"]) and not store.pins
        store.hung.clear()
        store.broken = False


async def test_while_the_tier_is_off_one_that_comes_is_told_so() -> None:
    store = PlainStore(ROOM)
    async with lengthened(store) as t:
        t.tiers.tiers[0]._fail(OSError("it is gone"))
        await t.run(seq := long_seq("a"))
        await t.settled()
        assert [output.failure for output in t.outputs] == [
            "a context longer than the pool cannot go on while it waited: the tier host is off: it is gone"
        ]
        assert seq.output_len == 0


async def test_a_cancelled_one_leaves_nothing_behind() -> None:
    async with lengthened(PlainStore(ROOM)) as t:
        seqs = [long_seq("a", 200, 200), long_seq("b", 200, 5, 2)]
        for seq in seqs:
            await t.loop.add(seq)
        await until(lambda: seqs[0].output_len > 3 and seqs[1] in t.engine.scheduler.aside)
        for name in ("b", "a"):
            await t.loop.abort(name, [])
        await t.settled()
        assert not t.stores[0].pins and not t.engine.scheduler.aside
        await t.run(again := long_seq("c"))
        check(t, again)


async def test_one_that_is_preempted_finds_its_blocks_in_the_tier() -> None:
    async with lengthened(PlainStore(ROOM)) as t:
        seq = long_seq("a", 200, 60)
        await t.loop.add(seq)
        await until(lambda: seq.output_len > 3)
        await t.loop.call(lambda engine: engine.scheduler.preempt(seq) and None)
        await until(lambda: not t.engine.sequences)
        await t.settled()
        check(t, seq)
        assert seq.preemptions == 1 and seq.recomputed <= BLOCK


async def test_one_whose_time_is_up_expires_beside_the_queue() -> None:
    async with lengthened(PlainStore(ROOM)) as t:
        first, second = long_seq("a", 200, 200), long_seq("b", 200, 5, 2)
        second.expires_at = time.monotonic() + 0.05
        await t.loop.add(first)
        await t.loop.add(second)
        await until(lambda: not t.engine.sequences)
        await t.settled()
        assert [output.seq.id for output in t.outputs if output.expired] == ["b"]
        check(t, first)


async def test_its_kv_is_neither_fetched_nor_handed_over() -> None:
    async with lengthened(PlainStore(ROOM)) as t:
        held = long_seq("a")
        held.hold = True
        with pytest.raises(Unfetchable, match="KV of 200 tokens is not handed over: the pool has room for 64"):
            await t.loop.add(held)
        with pytest.raises(Unfetchable):
            await t.loop.reserve(long_seq("b"))
        fits = make_seq("c", prompt(40), 1)
        fits.hold = True
        await t.loop.add(fits)
        await until(lambda: any(output.sampled for output in t.outputs))
        await t.loop.abort("c", [])


async def test_what_was_fetched_outgrows_the_pool_like_any_other() -> None:
    async with lengthened(PlainStore(ROOM)) as t:
        seq = long_seq("a", 40, 300)
        assert await t.loop.reserve(seq)
        filling: list[int] = []
        await t.loop.give_up(seq, filling)
        await t.loop.release(filling)
        await until(lambda: not t.engine.sequences)
        await t.settled()
        check(t, seq)


async def test_choices_of_one_prompt_run_one_after_the_other() -> None:
    async with lengthened(PlainStore(ROOM)) as t:
        parent, forks = long_seq("a", seed=1), [long_seq(f"f{i}") for i in range(2)]
        await t.loop.add(parent, list(forks))
        await until(lambda: not t.engine.sequences)
        await t.settled()
        check(t, parent, *forks)
        assert all(fork.prefilled <= BLOCK for fork in forks), "the tier has their prompt"


async def test_it_goes_on_elsewhere_with_what_it_has_said() -> None:
    async with lengthened(PlainStore(ROOM)) as t:
        await t.run(whole := long_seq("a", 200, 40))
    async with lengthened(PlainStore(ROOM)) as t:
        rest = Sequence("b", whole.tokens[:220], 200, whole.params, whole.root)
        await t.run(rest)
        assert rest.tokens == whole.tokens


async def test_the_next_tier_serves_if_the_first_is_too_small() -> None:
    host, disk = PlainStore(8), PlainStore(ROOM, DISK)
    async with lengthened(host, disk) as t:
        await t.run(seq := long_seq("a"))
        await t.settled()
        check(t, seq)
        assert seq.keys[0] in disk.units


async def test_a_tier_that_is_too_small_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"tiers.long_contexts: 2 of 512 tokens need 256 blocks in one tier, and the largest has 200"):
        async with lengthened(PlainStore(200), most=2):
            pass


async def test_it_ends_at_its_length() -> None:
    async with lengthened(PlainStore(ROOM)) as t:
        outputs: list[Output] = t.outputs
        await t.run(seq := long_seq("a", 200, 300))
        await until(lambda: outputs[-1].finish is Finish.LENGTH)
        assert len(seq.tokens) == 500


def test_the_keys_are_those_of_the_prompt() -> None:
    keys: list[bytes] = []
    seq = long_seq("a")
    extend_keys(keys, seq.root, seq.tokens, BLOCK)
    assert len(set(keys)) == 200 // BLOCK
