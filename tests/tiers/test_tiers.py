"""Copies of KV that left the pool come back, verified or not at all, and no token depends on it."""

import asyncio
import random
import threading
import time
from collections.abc import Sequence as Seq
from contextlib import suppress

import pytest
from tiered import WITHIN_S, PlainStore, expected, make_keys, make_seq, prompt, said, tiered, until, visit

from baton.engine.core.block_key import DEVICE, DISK, HOST
from baton.engine.core.colder import NEAR, TierPolicy
from baton.engine.core.kvcache import HostCarrier
from baton.tiers.tier import HANG_S
from baton.tiers.tiers import Tiers, _Load


async def test_what_left_the_pool_is_loaded_and_not_computed() -> None:
    async with tiered(PlainStore(100)) as t:
        first = await visit(t, 1, 2, 3, tag="a")
        assert all(seq.prefilled == 32 for seq in first), "33 tokens, of which the last is always computed"
        again = await visit(t, 1, tag="b")
        assert again[0].prefilled < 32 and t.engine.colder is not None and t.engine.colder.loaded_tokens > 0
        tally = t.tiers.tiers[0].worth.tally
        assert tally.hits == tally.reads > 0 and tally.written >= 8


async def test_without_room_in_the_store_nothing_comes_back() -> None:
    """Negative control: the same requests compute everything again."""
    async with tiered(PlainStore(1)) as t:
        await visit(t, 1, 2, 3, tag="a")
        again = await visit(t, 1, tag="b")
        assert again[0].prefilled == 32


@pytest.mark.parametrize("verifies", [True, False])
async def test_a_flipped_byte_is_recomputed_and_without_verification_the_token_is_wrong(verifies: bool) -> None:
    store = PlainStore(100)
    store.verifies = verifies
    async with tiered(store) as t:
        await visit(t, 1, 2, 3, tag="a")
        keys = make_keys(1)
        assert keys[0] in store.units
        store.units[keys[0]][1][5] ^= 1
        seq = make_seq("again", prompt(1))
        await t.run(seq)
        await t.settled()
        assert (said(seq) == expected(seq)) == verifies
        if verifies:
            assert keys[0] not in t.held(HOST) or keys[0] in store.units, "nobody is told of what is not there"


async def test_salts_never_cross() -> None:
    async with tiered(PlainStore(100)) as t:
        for salt in ("", "blue"):
            for number in (1, 2, 3):
                seq = make_seq(f"{salt}{number}", prompt(number), salt=salt)
                await t.run(seq)
                await t.settled()
                assert seq.prefilled == 32 and said(seq) == expected(seq)
        assert t.engine.colder is not None and t.engine.colder.loaded_tokens == 0


async def test_what_one_tier_has_no_room_for_goes_to_the_next_and_comes_back_from_there() -> None:
    host, disk = PlainStore(12), PlainStore(100, DISK)
    async with tiered(host, disk) as t:
        await visit(t, *range(6), tag="a")
        await until(lambda: len(disk.units) >= 24)
        await until(lambda: t.held(DISK) == set(disk.units) and t.held(HOST) == set(host.units))
        assert not set(make_keys(0)) & set(host.units)
        again = await visit(t, 0, tag="b")
        assert again[0].prefilled < 32 and t.tiers.tiers[1].worth.tally.hits > 0


async def test_events_tell_what_each_medium_holds_and_a_snapshot_says_the_same() -> None:
    async with tiered(PlainStore(12)) as t:
        await visit(t, *range(5))
        await until(lambda: t.held(HOST) == set(t.stores[0].units))
        number, held = await t.loop.snapshot()
        assert [event.sequence for event in t.events] == list(range(1, number + 1))
        assert {medium: set(keys) for medium, keys in held.items()} == {DEVICE: t.held(DEVICE), HOST: t.held(HOST)}


async def test_everything_is_saved_at_once_if_that_is_wanted() -> None:
    async with tiered(PlainStore(100), blocks=64, policy=TierPolicy(at_once=True)) as t:
        await visit(t, 1)
        await until(lambda: set(make_keys(1)) <= t.held(HOST))
        await t.settled()


async def test_with_room_in_the_pool_nothing_is_saved() -> None:
    """Negative control: the prompt is far from being evicted."""
    async with tiered(PlainStore(100), blocks=NEAR + 64) as t:
        await visit(t, 1)
        await asyncio.sleep(0.05)
        assert not t.stores[0].units


async def test_a_load_that_is_late_is_not_waited_for_and_what_comes_later_touches_nothing() -> None:
    """The prompt needs more than half of the pool: it can only be computed if the load gives its blocks back."""
    async with tiered(PlainStore(100), policy=TierPolicy(wait_s=0.02)) as t:
        await visit(t, 1, 2, 3, tag="a")
        t.stores[0].gate.clear()
        seq = make_seq("late", prompt(1))
        await t.run(seq)
        assert said(seq) == expected(seq) and seq.prefilled == 32
        await t.run(other := make_seq("other", prompt(5)))  # in the blocks of the load
        assert said(other) == expected(other)
        t.stores[0].gate.set()
        await visit(t, 1, 5, tag="c")


async def test_a_block_that_is_being_filled_when_its_load_ends_is_nobodys_until_that_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that, what is copied late would land in the KV of whoever has the block by then."""
    into, copying, go_on = HostCarrier.into, threading.Event(), threading.Event()

    def slow(carrier: HostCarrier, blocks: Seq[int], places: Seq[int]) -> list[bool]:
        copying.set()
        assert go_on.wait(WITHIN_S)
        return into(carrier, blocks, places)

    async with tiered(PlainStore(100), blocks=24, policy=TierPolicy(wait_s=0.02)) as t:
        await visit(t, 1, 2, 3, 4, tag="a")
        monkeypatch.setattr(HostCarrier, "into", slow)
        await t.run(seq := make_seq("late", prompt(1)))
        assert copying.is_set() and said(seq) == expected(seq)
        colder, pool = t.engine.colder, t.engine.pool
        assert colder is not None and pool.num_owned >= colder._late > 0, "the load has ended, and its blocks are still owned"
        for number in (5, 6):
            await t.run(other := make_seq(f"b{number}", prompt(number, 13)))
            assert said(other) == expected(other)
        go_on.set()
        await t.settled()
        assert colder._late == 0
        await visit(t, 1, 5, tag="c")


@pytest.mark.parametrize("fails", [False, True])
def test_blocks_of_a_load_that_ends_while_they_are_filled_are_given_back_once(fails: bool) -> None:
    filling, go_on, back = threading.Event(), threading.Event(), list[int]()

    class Slow(HostCarrier):
        def __init__(self) -> None: ...

        def into(self, blocks: Seq[int], places: Seq[int]) -> list[bool]:
            filling.set()
            assert go_on.wait(WITHIN_S)
            if fails:
                raise RuntimeError("a device fails")
            return [True] * len(blocks)

    def fill() -> None:
        with suppress(RuntimeError):
            load.take([0, 1], [0, 1], Slow())

    load = _Load([5, 6, 7], lambda: None, back.extend)
    thread = threading.Thread(target=fill)
    thread.start()
    assert filling.wait(WITHIN_S)
    assert load.end() == [None, None, False] and not back
    go_on.set()
    thread.join(WITHIN_S)
    assert back == [5, 6] and load.arrived == [False] * 3
    assert load.take([2], [0], Slow()) == [True] and back == [5, 6], "nothing of it lands any more"


async def test_a_store_that_hangs_is_off_holds_no_block_and_comes_back_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    async with tiered(PlainStore(100), policy=TierPolicy(wait_s=0.02)) as t:
        await visit(t, 1, 2, 3, tag="a")
        t.stores[0].gate.clear()
        for number in (4, 5, 6):
            await t.run(seq := make_seq(f"b{number}", prompt(number)))
            assert said(seq) == expected(seq)
        await t.loop.call(lambda engine: t.tiers.watch(time.monotonic() + 2 * HANG_S))
        assert not t.tiers.tiers[0].on and "it has not answered for" in caplog.text
        await t.settled()
        await visit(t, 1, tag="c")
        t.stores[0].gate.set()
        await until(lambda: t.tiers.tiers[0].on)
        await until(lambda: t.held(HOST) == set(t.stores[0].units))


@pytest.mark.parametrize("when", ["loading", "late", "saving"])
async def test_who_leaves_in_the_middle_leaves_nothing_behind(when: str) -> None:
    async with tiered(PlainStore(100), policy=TierPolicy(wait_s=0.02 if when == "late" else 20.0)) as t:
        await visit(t, 1, 2, 3, tag="a")
        t.stores[0].gate.clear()
        seq = make_seq("gone", prompt(9 if when == "saving" else 1), max_tokens=20)
        await t.loop.add(seq)
        if when == "loading":
            await until(lambda: seq in t.engine.scheduler.loading)
        elif when == "late":
            await until(lambda: seq in t.engine.scheduler.running or seq.output_len)
        await t.loop.abort("gone", [])
        assert not t.engine.sequences and seq not in t.engine.scheduler.loading
        t.stores[0].gate.set()
        await t.settled()
        await visit(t, 1, 2, tag="b")


async def test_a_sequence_that_waits_for_a_load_counts_as_one_that_waits() -> None:
    async with tiered(PlainStore(100)) as t:
        await visit(t, 1, 2, 3, tag="a")
        t.stores[0].gate.clear()
        await t.loop.add(seq := make_seq("b", prompt(1)))
        await until(lambda: seq in t.engine.scheduler.loading)
        facts = await t.loop.look()
        assert (facts.waiting, facts.waiting_tokens, facts.sequences) == (1, 33, 1)


async def test_a_tier_that_fails_is_off_and_comes_back_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    async with tiered(PlainStore(100)) as t:
        await visit(t, 1, 2, 3, tag="a")
        t.stores[0].broken = True
        again = await visit(t, 1, tag="b")
        assert again[0].prefilled == 32 and not t.tiers.tiers[0].on
        await until(lambda: t.held(HOST) == set())
        assert "the tier host is off: the medium is broken" in caplog.text
        await visit(t, 2, 3, tag="c")
        t.stores[0].broken = False
        await until(lambda: t.tiers.tiers[0].on)
        await until(lambda: t.held(HOST) == set(t.stores[0].units))
        assert "the tier host is back" in caplog.text
        again = await visit(t, 1, tag="d")
        assert again[0].prefilled < 32


@pytest.mark.parametrize("room", [100, 1])
async def test_a_preempted_sequence_comes_back_from_a_tier(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two long outputs do not fit together: the younger is preempted, and its blocks are evicted by the other.
    Negative control: a store without room."""
    monkeypatch.setattr(Tiers, "worth_loading", lambda self, media, compute_s, now: len(media))
    monkeypatch.setattr(Tiers, "worth_meeting", lambda self, media, compute_s, now: None)
    async with tiered(PlainStore(room), blocks=24, seqs=2, max_len=96) as t:
        seqs = [make_seq(f"s{i}", prompt(i, 8), max_tokens=72) for i in range(2)]
        await t.run(*seqs)
        await t.settled()
        assert [said(seq) for seq in seqs] == [expected(seq) for seq in seqs]
        assert sum(seq.preemptions for seq in seqs) > 0 and t.engine.colder is not None
        assert (t.engine.colder.loaded_tokens > 0) == (room > 1)


@pytest.mark.parametrize("seed", range(6))
async def test_random_requests_on_a_tiny_pool_get_the_oracles_tokens(seed: int) -> None:
    rng = random.Random(seed)
    host, disk = PlainStore(rng.choice([3, 12, 40])), PlainStore(rng.choice([8, 60]), DISK)
    policy = TierPolicy(rng.random() < 0.5, rng.choice([0.001, 1.0]))
    async with tiered(host, disk, blocks=20, policy=policy, seqs=3) as t:
        over = threading.Event()
        vandal = threading.Thread(target=harm, args=(rng.randrange(1 << 30), [host, disk], over))
        vandal.start()
        seqs = [
            make_seq(f"s{i}", prompt(rng.randrange(5), rng.randrange(5, 40)), rng.randrange(1, 12), rng.choice("xy")) for i in range(60)
        ]
        aborted: set[str] = set()
        for seq in seqs:
            await t.loop.add(seq)
            if rng.random() < 0.5:
                await asyncio.sleep(rng.random() * 0.01)
            if rng.random() < 0.2:
                aborted.add(gone := rng.choice(seqs[: int(seq.id[1:]) + 1]).id)
                t.loop.forget(gone)
        await until(lambda: not t.engine.sequences)
        over.set()
        vandal.join()
        host.broken = disk.broken = False
        for seq in seqs:
            whole = expected(seq)
            assert said(seq) == (whole[: seq.output_len] if seq.id in aborted else whole)
        await t.settled()


def harm(seed: int, stores: list[PlainStore], over: threading.Event) -> None:
    """Flips bytes, and breaks media for a moment."""
    rng = random.Random(seed)
    while not over.wait(0.003):
        store = rng.choice(stores)
        store.broken = rng.random() < 0.05
        with store._lock:
            if store.units and rng.random() < 0.5:
                rng.choice(list(store.units.values()))[1][rng.randrange(store.unit_bytes)] ^= 1 << rng.randrange(8)
