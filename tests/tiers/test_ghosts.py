"""Tiers that keep nothing while nothing comes back: what they write and tell, who opens them, and what is kept nevertheless."""

import pytest
from tiered import PlainStore, Tiered, expected, make_keys, make_seq, prompt, said, tiered, until, visit

from baton.engine.core.block_key import DISK, HOST
from baton.engine.core.colder import Colder, TierPolicy
from baton.tiers.tiers import Tiers

ROOM = 16  # of the store, and of the pool: four prompts are more than both


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a tier holds is loaded: how fast this machine loads and computes at the moment does not matter."""
    monkeypatch.setattr(Colder, "paced", lambda *_: None)


def written(t: Tiered) -> int:
    return sum(tier.worth.tally.written for tier in t.tiers.tiers)


async def close(t: Tiered) -> int:
    """Says so much that never returns that the tiers only watch. Returns the number of the next prompt."""
    for number in range(100, 200):
        await visit(t, number, tag="x")
        if all(told.state == "watching" for told in t.tiers.told()):
            return number + 1
    raise AssertionError("they are still open")


@pytest.mark.parametrize("at_once", [False, True])
async def test_while_nothing_comes_back_nothing_is_written_nor_told(at_once: bool) -> None:
    async with tiered(PlainStore(ROOM), policy=TierPolicy(at_once=at_once, wait_s=20.0)) as t:
        after = await close(t)
        assert written(t) >= ROOM, "it was open at first"
        before, events = written(t), len([event for event in t.events if event.medium == HOST])
        await visit(t, *range(after, after + 6))
        assert written(t) == before and len([event for event in t.events if event.medium == HOST]) == events
        [told] = t.tiers.told()
        assert told.why == f"none of {t.tiers.ghosts.left_blocks} blocks that left the pool has come back" and t.tiers.tiers[0].on


@pytest.mark.parametrize("at_once", [False, True])
async def test_everything_is_kept_if_that_is_wanted(at_once: bool) -> None:
    """Negative control."""
    async with tiered(PlainStore(ROOM), policy=TierPolicy(at_once=at_once, wait_s=20.0, keeps_all=True)) as t:
        await visit(t, *range(20), tag="a")
        before = written(t)
        await visit(t, *range(20, 24))
        assert written(t) >= before + 24 and [told.state for told in t.tiers.told()] == ["on"]
        assert not t.tiers.ghosts.open, "they would not have been kept"


@pytest.mark.parametrize("stores", [(HOST,), (DISK,), (HOST, DISK)])
async def test_the_first_who_comes_back_late_is_computed_and_the_next_ones_find_their_blocks(stores: tuple[str, ...]) -> None:
    async with tiered(*(PlainStore(2 * ROOM, medium) for medium in stores)) as t:
        after = await close(t)
        await visit(t, after, after + 1, after + 2)
        assert not set(make_keys(after)) & {key for store in t.stores for key in store.units}
        late = await visit(t, after, tag="late")
        assert late[0].prefilled == 32 and t.tiers.ghosts.open and t.tiers.ghosts.returned >= 8
        assert {told.state for told in t.tiers.told()} == {"on"}
        await visit(t, after + 3, after + 4)
        again = await visit(t, after, tag="again")
        assert again[0].prefilled < 32


async def test_what_is_kept_already_is_loaded_while_it_only_watches_and_opens_it() -> None:
    async with tiered(PlainStore(3 * ROOM)) as t:
        after = await close(t)
        kept = [n for n in range(100, after) if set(make_keys(n)[:4]) <= set(t.stores[0].units)]
        # Not the oldest, which have to go for what is kept as soon as it is open.
        seqs = await visit(t, kept[len(kept) // 2], tag="again")
        assert seqs[0].prefilled < 32 and t.tiers.ghosts.open


async def test_a_preempted_sequence_is_saved_while_a_tier_only_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody speculates that it needs its blocks again. What others leave is not saved."""
    monkeypatch.setattr(Tiers, "worth_meeting", lambda self, media, compute_s, now: None)
    async with tiered(PlainStore(4 * ROOM), blocks=24, seqs=2, max_len=96) as t:
        after = await close(t)
        before = t.tiers.ghosts.returned
        seqs = [make_seq(f"s{i}", prompt(after + i, 8), max_tokens=72) for i in range(2)]
        await t.run(*seqs)
        await t.settled()
        assert [said(seq) for seq in seqs] == [expected(seq) for seq in seqs]
        assert sum(seq.preemptions for seq in seqs) > 0 and t.engine.colder is not None
        assert t.engine.colder.loaded_tokens > 0
        theirs = {key for seq in seqs if seq.preemptions for key in seq.keys}
        await until(lambda: t.engine.idle)
        assert not t.tiers.ghosts.open and t.tiers.ghosts.returned == before, "it says nothing of what else leaves"
        youngest = [key for key in t.stores[0].units if key in theirs]
        assert youngest and not {key for seq in seqs if not seq.preemptions for key in seq.keys} & set(t.stores[0].units)


async def test_a_context_longer_than_the_pool_runs_while_the_tiers_only_watch() -> None:
    async with tiered(PlainStore(4 * ROOM), blocks=16, max_len=200, long_contexts=1) as t:
        await close(t)
        seq = make_seq("long", prompt(3, 100))
        await t.run(seq)
        assert said(seq) == expected(seq) and not t.tiers.ghosts.open
