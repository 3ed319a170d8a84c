"""A prompt's front is computed while its tail is loaded: the tokens are the same wherever they meet, and whatever comes too late."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tiered import BLOCK, CONFIG, PlainStore, Tiered, make_seq, tiered, until

from baton.engine.core.meeting import LEAST_BLOCKS, Meeting
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.core.toy import naive
from baton.tiers.tiers import Tiers

BLOCKS = 64  # of the pool
LENGTH = 161  # of a prompt: 40 blocks and a token
FRONT = 20


def prompt(number: int, length: int = LENGTH) -> list[int]:
    return [(number * 37 + i * 11) % 256 for i in range(length)]


def right(*seqs: Sequence) -> bool:
    return all(seq.tokens[seq.prompt_len :] == naive(seq.tokens[: seq.prompt_len], seq.params, CONFIG["kv_width"]) for seq in seqs)


@pytest.fixture
def meets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the rates: both ends, of which the front is half of the run."""
    monkeypatch.setattr(Tiers, "worth_meeting", lambda self, media, compute_s, now: len(media) // 2 or None)


async def saved(t: Tiered) -> None:
    """Prompt 1 is in the store and not in the pool, and the pace of prefills is known."""
    for number in (1, 2, 3):
        await t.run(seq := make_seq(f"first{number}", prompt(number)))
        await t.settled()
        assert right(seq) and seq.prefilled == LENGTH - 1
    assert t.engine.colder is not None and t.engine.colder.loaded_tokens == 0


@contextmanager
def closed(store: PlainStore) -> Iterator[None]:
    store.gate.clear()
    try:
        yield
    finally:
        store.gate.set()


@pytest.mark.usefixtures("meets")
async def test_they_meet() -> None:
    async with tiered(PlainStore(500), blocks=BLOCKS) as t:
        await saved(t)
        t.engine.runner.token_delay_s = 0.005  # type: ignore[attr-defined]
        with closed(t.stores[0]):
            await t.loop.add(seq := make_seq("again", prompt(1)))
            await until(lambda: seq.meets is not None and seq.computed)
        await until(lambda: not t.engine.sequences)
        await t.settled()
        assert right(seq) and t.engine.colder is not None
        assert 0 < seq.prefilled < LENGTH - 1 and t.engine.colder.loaded_tokens == seq.cached > 0
        assert seq.cached + seq.prefilled == LENGTH - 1 and seq.meets is None


@pytest.mark.usefixtures("meets")
async def test_what_does_not_come_is_computed_and_what_comes_late_touches_nothing() -> None:
    async with tiered(PlainStore(500), blocks=BLOCKS) as t:
        await saved(t)
        with closed(t.stores[0]):
            await t.run(seq := make_seq("again", prompt(1)))
            assert right(seq) and seq.prefilled + seq.cached == LENGTH - 1 and seq.cached < FRONT * BLOCK
            await t.run(others := make_seq("other", prompt(5)))
        await t.run(more := make_seq("more", prompt(6)))
        await t.settled()
        assert right(others, more)


@pytest.mark.usefixtures("meets")
@pytest.mark.parametrize("ends", [True, False])
async def test_cancelled_nothing_lands_and_without_the_end_of_the_load_the_tokens_are_wrong(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tiered(PlainStore(500), blocks=BLOCKS) as t:
        await saved(t)
        t.engine.runner.token_delay_s = 0.002  # type: ignore[attr-defined]
        with closed(t.stores[0]):
            await t.loop.add(seq := make_seq("again", prompt(1)))
            await until(lambda: seq.meets is not None and seq.computed)
            if not ends:
                monkeypatch.setattr(Tiers, "end", lambda self, number: self._loads[number].arrived)
                monkeypatch.setattr(Tiers, "narrow", lambda self, number, most: None)
            await t.loop.abort("again", [])
            await t.loop.add(other := make_seq("other", prompt(7, 240), 2))
            await until(lambda: other.computed >= 100)
        await until(lambda: not t.engine.sequences)
        await t.settled()
        assert right(other) == ends


@pytest.mark.usefixtures("meets")
async def test_they_meet_behind_a_unit_that_is_lost() -> None:
    async with tiered(PlainStore(500), blocks=BLOCKS) as t:
        await saved(t)
        keys = make_seq("keys", prompt(1))
        t.engine.scheduler.extend_keys(keys)
        with closed(t.stores[0]):
            await t.loop.add(seq := make_seq("again", prompt(1)))
            await until(lambda: seq.meets is not None)
            t.stores[0].units[keys.keys[35]][1][9] ^= 1
        await until(lambda: not t.engine.sequences)
        await t.settled()
        assert right(seq) and seq.prefilled + seq.cached == LENGTH - 1


@pytest.mark.usefixtures("meets")
async def test_preempted_it_parts_and_comes_back() -> None:
    async with tiered(PlainStore(500), blocks=BLOCKS) as t:
        await saved(t)
        t.engine.runner.token_delay_s = 0.002  # type: ignore[attr-defined]
        with closed(t.stores[0]):
            await t.loop.add(seq := make_seq("again", prompt(1)))
            await until(lambda: seq.meets is not None and seq.computed)
            await t.loop.call(lambda engine: engine.scheduler.preempt(seq) and None)
        await until(lambda: not t.engine.sequences)
        await t.settled()
        assert right(seq) and seq.preemptions == 1


@pytest.mark.usefixtures("meets")
@pytest.mark.parametrize("seed", range(3))
async def test_at_any_time_units_may_come(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, get = random.Random(seed), PlainStore.get

    def late(self: PlainStore, wanted: Any) -> list[bool]:
        time.sleep(rng.random() * 0.01)
        return get(self, wanted)

    async with tiered(PlainStore(500), blocks=BLOCKS) as t:
        await saved(t)
        monkeypatch.setattr(PlainStore, "get", late)
        for i in range(12):
            seqs = [make_seq(f"s{i}-{j}", prompt(rng.randrange(1, 5), rng.randrange(60, LENGTH)), 3) for j in range(rng.randrange(1, 3))]
            await t.run(*seqs)
            await t.settled()
            assert right(*seqs)
        assert t.engine.colder is not None and t.engine.colder.loaded_tokens > 0


def meeting(arrived: list[bool], front: int = 10, end: int = 20) -> tuple[Meeting, list[int]]:
    seq, most = Sequence("s", [0] * 200, 200, SamplingParams(max_tokens=1), b""), [end]
    return Meeting(seq, front, end, 4, lambda: arrived, most.append), most


def test_a_chunk_ends_where_they_are_to_meet_and_later_halves_what_is_left() -> None:
    one, most = meeting([False] * 20)
    assert one.take(0, 1000) == 40 and most[-1] == 10
    one.seq.computed = 40
    assert one.take(40, 1000) == 5 * 4 and one.take(60, 1000) == LEAST_BLOCKS * 4
    assert not one.over


def test_a_chunk_ends_where_what_has_come_begins() -> None:
    one, _ = meeting([True] * 14 + [False] * 6)
    assert one.take(0, 1000) == 24 and one.take(8, 10) == 10
    one.seq.computed = 24
    assert one.over


def test_what_lands_while_a_chunk_begins_does_not_count_below_it() -> None:
    """The chunk may have written to a part of that block only."""
    arrived = [False] * 20
    one, most = meeting(arrived)
    assert one.take(0, 30) == 30 and most[-1] == 12, "it begins block 7: units from 8 on may land"
    arrived[:] = [True] * 20
    one.seq.computed = 30
    assert one.here == 8 and not one.over and one.take(30, 1000) == 2
    one.seq.computed = 32
    assert one.over


def test_nothing_that_came_is_the_end_of_the_run() -> None:
    one, _ = meeting([False] * 20)
    one.seq.computed = 80
    assert one.here == 20 and one.over
