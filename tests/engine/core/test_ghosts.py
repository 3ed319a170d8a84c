"""When tiers keep what leaves the pool, decided by keys alone: against a plain account, and rule by rule."""

from collections.abc import Iterator
from hashlib import blake2b
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.core.ghosts import KEEPS, MOST, PATIENCE_S, Ghosts

POOL, TIERS = 8, 24
REACH = POOL + TIERS


def key(number: int) -> bytes:
    return blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


def fresh() -> Iterator[bytes]:
    return map(key, count())


def leave(ghosts: Ghosts, keys: Iterator[bytes], blocks: int, now: float = 0.0) -> list[bytes]:
    gone = [next(keys) for _ in range(blocks)]
    ghosts.left(gone, now)
    return gone


class Plain:
    """The same decisions from a list of all that has ever left, without patience."""

    def __init__(self) -> None:
        self.gone: list[bytes] = []  # the last to leave is the last one
        self.balance = REACH

    def left(self, keys: list[bytes]) -> None:
        for one in keys:
            self.gone = [other for other in self.gone if other != one] + [one]
        self.balance = max(0, self.balance - len(keys))

    def asked(self, keys: list[bytes], held: set[bytes]) -> None:
        known = self.gone[-REACH:]
        came = [one for i, one in enumerate(keys) if one in held or (one in known and one not in keys[:i])]
        self.gone = [one for one in known if one not in keys]
        self.balance = min(REACH, self.balance + KEEPS * len(came))


KEYS = st.lists(st.integers(0, 60).map(key), max_size=12)


@given(st.lists(st.tuples(KEYS, KEYS, st.sets(st.integers(0, 60).map(key), max_size=3)), max_size=20))
def test_it_decides_as_a_plain_account_of_everything_that_left_does(moves: list[tuple[list[bytes], list[bytes], set[bytes]]]) -> None:
    ghosts, again, plain = Ghosts(POOL, TIERS), Ghosts(POOL, TIERS), Plain()
    for gone, wanted, held in moves:
        for one in (ghosts, again):
            one.left(gone, 0.0)
        plain.left(gone)
        assert ghosts.open == again.open == (plain.balance > 0)
        for one in (ghosts, again):
            one.asked(wanted, [held])
        plain.asked(wanted, held)
        assert ghosts.open == again.open == (plain.balance > 0) and ghosts.returned == again.returned
        assert len(ghosts) <= REACH


def test_it_closes_after_one_turnover_without_a_return_and_not_before() -> None:
    ghosts, keys = Ghosts(POOL, TIERS), fresh()
    leave(ghosts, keys, REACH - 1)
    assert ghosts.open
    leave(ghosts, keys, 1)
    assert not ghosts.open and ghosts.why == f"none of {REACH} blocks that left the pool has come back"


@given(st.integers(1, KEEPS), st.integers(1, 40))
def test_it_never_closes_while_what_is_kept_comes_back(apart: int, rounds: int) -> None:
    """One in `apart` does."""
    ghosts, keys = Ghosts(POOL, max(TIERS, KEEPS)), fresh()
    for _ in range(rounds):
        gone = leave(ghosts, keys, apart)
        assert ghosts.open
        ghosts.asked([gone[0]], [])
        assert ghosts.open


def test_fewer_returns_keep_as_many_blocks_as_they_are_worth() -> None:
    """Negative control of the one before: at one return in 4 x KEEPS, a quarter of what leaves finds it open."""
    ghosts, keys, found = Ghosts(POOL, 10 * KEEPS), fresh(), list[bool]()
    leave(ghosts, keys, ghosts.reach)
    for _ in range(20):
        for place in range(4 * KEEPS):
            found.append(ghosts.open)
            [gone] = leave(ghosts, keys, 1)
            if place == 0:
                ghosts.asked([gone], [])
    assert sum(found) == pytest.approx(len(found) / 4, abs=20)


@pytest.mark.parametrize("late", [1, TIERS])
def test_who_comes_back_late_opens_it_though_nothing_was_kept(late: int) -> None:
    ghosts, keys = Ghosts(POOL, TIERS), fresh()
    leave(ghosts, keys, 2 * REACH)
    gone = leave(ghosts, keys, 1)
    leave(ghosts, keys, late)
    assert not ghosts.open
    ghosts.asked(gone, [])
    assert ghosts.open and ghosts.returned == 1
    leave(ghosts, keys, KEEPS)
    assert not ghosts.open and "none of the last" in ghosts.why


def test_what_no_tier_would_have_any_more_and_what_never_was_here_says_nothing() -> None:
    """Negative control."""
    ghosts, keys = Ghosts(POOL, TIERS), fresh()
    gone = leave(ghosts, keys, 1)
    leave(ghosts, keys, REACH)
    ghosts.asked([*gone, *(next(keys) for _ in range(9))], [set[bytes]()])
    assert not ghosts.open and ghosts.returned == 0


def test_one_ghost_counts_once_for_each_time_that_it_left() -> None:
    ghosts, keys = Ghosts(POOL, TIERS), fresh()
    gone = leave(ghosts, keys, 1)
    for _ in range(3):
        ghosts.asked(gone, [])
    assert ghosts.returned == 1
    ghosts.left(gone, 0.0)
    ghosts.asked(gone, [])
    assert ghosts.returned == 2


def test_what_a_tier_kept_from_an_earlier_life_counts_too() -> None:
    ghosts, keys = Ghosts(POOL, TIERS), fresh()
    leave(ghosts, keys, 2 * REACH)
    old = key(10**9)
    ghosts.asked([old], [set[bytes](), {old}])
    assert ghosts.open and ghosts.returned == 1


def test_in_tiers_that_never_turn_over_five_minutes_of_work_are_enough() -> None:
    ghosts, keys = Ghosts(POOL, 10**6), fresh()
    for second in range(int(PATIENCE_S) + 1):
        assert ghosts.open
        leave(ghosts, keys, 1, float(second))
    leave(ghosts, keys, 1, PATIENCE_S + 1)
    assert not ghosts.open


def test_a_night_without_work_is_no_reason() -> None:
    """Negative control of the one before."""
    ghosts, keys = Ghosts(POOL, 10**6), fresh()
    for night in range(9):
        leave(ghosts, keys, POOL, night * 50_000.0)
    assert ghosts.open


@pytest.mark.parametrize("tiers", [MOST // 2, 4 * MOST, 1000 * MOST])
def test_of_large_tiers_some_keys_are_looked_at_and_stand_for_all(tiers: int) -> None:
    ghosts, keys = Ghosts(POOL, tiers), fresh()
    assert (ghosts.every > 1) == (tiers > MOST) and ghosts.every <= 256
    gone = leave(ghosts, keys, 10_000)
    assert len(ghosts) <= min(MOST, 1.5 * 10_000 / ghosts.every)
    assert ghosts.left_blocks == pytest.approx(10_000, rel=0.5)
    ghosts.asked(gone, [])
    assert ghosts.returned == ghosts.left_blocks, "the same ones"
