"""The block pool against a trivially simple model of it."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.engine.core.blocks import BlockPool, CacheChange

SIZE = 6


class PoolMachine(RuleBasedStateMachine):
    """Owners hold lists of blocks; the model knows what each keyed block must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(SIZE)
        self.owned: list[list[int]] = []
        self.content: dict[int, bytes] = {}  # block → key sealed into it
        self.listener: set[bytes] = set()  # what a reader of the changes believes is cached

    @rule(count=st.integers(1, SIZE + 1))
    def allocate(self, count: int) -> None:
        available = self.pool.available
        blocks = self.pool.allocate(count)
        if blocks is None:
            assert count > available
            return
        assert len(set(blocks)) == count <= available
        assert not set(blocks) & {block for owner in self.owned for block in owner}
        for block in blocks:
            self.content.pop(block, None)
        self.owned.append(blocks)

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), key=st.sampled_from([b"a", b"b", b"c"]))
    def seal(self, data: st.DataObject, key: bytes) -> None:
        block = data.draw(st.sampled_from([block for owner in self.owned for block in owner]))
        before = set(self.pool.sealed_keys())
        self.pool.seal(block, key)
        if key not in before and block not in self.content:
            self.content[block] = key

    @rule(keys=st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]), unique=True))
    def match(self, keys: list[bytes]) -> None:
        known, idle = self.pool.matched(keys)
        available = self.pool.available
        blocks = self.pool.match(keys)
        assert len(blocks) == known and self.pool.available == available - idle
        for block, key in zip(blocks, keys, strict=False):
            assert self.content[block] == key
        if blocks:
            self.owned.append(blocks)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1))))

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.content)))
        self.pool.forget([block])
        del self.content[block]

    @rule(count=st.integers(0, SIZE + 1), within=st.integers(0, SIZE), known=st.sets(st.sampled_from([b"a", b"b", b"c"])))
    def save(self, count: int, within: int, known: set[bytes]) -> None:
        available = self.pool.available
        coldest = self.pool.coldest(count, within, known)
        assert len(coldest) <= min(count, within) and self.pool.available == available - len(coldest)
        for one in coldest:
            assert self.content[one.block] == one.key and one.key not in known
            assert self.pool.matched([one.key]) == (1, 0), "what is saved is still found"
            self.owned.append([one.block])

    @invariant()
    def conserved(self) -> None:
        self.pool.check()
        owners = [block for owner in self.owned for block in owner]
        assert self.pool.num_owned == len(set(owners))
        assert self.pool.available == SIZE - len(set(owners))

    @invariant()
    def changes_report_every_cached_key(self) -> None:
        for change in self.pool.drain_changes():
            (self.listener.add if change.stored else self.listener.remove)(change.key)
        assert self.listener == set(self.pool.sealed_keys())


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_the_oldest_cached_chain_is_evicted_from_its_end() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    assert blocks is not None
    for block, key in zip(blocks, (b"1", b"2", b"3"), strict=True):
        pool.seal(block, key)
    pool.release(blocks)
    pool.drain_changes()
    pool.allocate(1)
    assert pool.drain_changes() == [CacheChange(False, b"3")]
    assert pool.matched([b"1", b"2", b"3"]) == (2, 2)


def cached(pool: BlockPool, keys: list[bytes]) -> list[int]:
    """Blocks with these keys, the first of which is the oldest."""
    blocks = pool.allocate(len(keys))
    assert blocks is not None
    for block, key in zip(blocks, keys, strict=True):
        pool.seal(block, key)
    pool.release(reversed(blocks))
    return blocks


def test_the_oldest_are_given_but_those_that_are_known() -> None:
    pool = BlockPool(4)
    cached(pool, [b"1", b"2", b"3", b"4"])
    assert [one.key for one in pool.coldest(2, 2, {b"1"})] == [b"2"]
    assert pool.coldest(9, 1, ()) == [], "the oldest one is looked at, and known"
    assert [one.key for one in pool.coldest(9, 3, ())] == [b"3", b"4"]
    pool.check()


def test_a_block_is_saved_once_until_it_is_used_again() -> None:
    """Else a tier that has no room for it would be given the same blocks for ever."""
    pool = BlockPool(2)
    cached(pool, [b"1", b"2"])
    for one in pool.coldest(2, 2, ()):
        pool.release([one.block])
    assert pool.coldest(2, 2, ()) == []
    pool.release(pool.match([b"2"]))
    assert [one.key for one in pool.coldest(2, 2, ())] == [b"2"]
    pool.check()


def test_the_order_of_eviction_outlives_a_save() -> None:
    pool = BlockPool(4)
    cached(pool, [b"1", b"2", b"3", b"4"])
    for keys in ([b"1"], [b"2"], [b"4"]):  # the third is known
        saved = pool.coldest(1, 4, {b"3"})
        assert [one.key for one in saved] == keys and pool.available == 3
        pool.release([saved[0].block])
    pool.drain_changes()
    assert pool.allocate(4) is not None
    assert [change.key for change in pool.drain_changes()] == [b"1", b"2", b"3", b"4"]


def test_what_is_used_while_it_is_saved_is_not_the_oldest_afterwards_and_keeps_its_content() -> None:
    """Its room is given to nobody until the saver is done, though whoever matched it has left."""
    pool = BlockPool(3)
    cached(pool, [b"1", b"2", b"3"])
    (one,) = pool.coldest(1, 3, ())
    pool.release(pool.match([b"1"]))
    assert pool.available == 2 and pool.allocate(3) is None
    pool.release([one.block])
    pool.drain_changes()
    assert pool.allocate(3) is not None
    assert [change.key for change in pool.drain_changes()] == [b"2", b"3", b"1"]


def test_a_block_that_proves_wrong_while_it_is_saved_is_free_afterwards() -> None:
    pool = BlockPool(1)
    cached(pool, [b"1"])
    (one,) = pool.coldest(1, 1, ())
    pool.forget([one.block])
    pool.release([one.block])
    pool.check()
    assert pool.num_cached == 0 and pool.available == 1


def test_releasing_a_block_without_an_owner_is_refused() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(ValueError, match="no owner"):
        pool.release(blocks)
    pool.check()


def test_check_detects_a_lost_block() -> None:
    """Negative control of the conservation law."""
    pool = BlockPool(2)
    pool._free.pop()
    with pytest.raises(RuntimeError, match="blocks lost"):
        pool.check()


def test_what_was_freed_is_used_again_before_what_was_never_used() -> None:
    pool = BlockPool(4)
    first = pool.allocate(2)
    assert first is not None and pool.reached == 2
    pool.release(first)
    assert pool.allocate(1) is not None and pool.reached == 2
    assert pool.allocate(2) is not None and pool.reached == 3
    pool.check()
    pool.reached = 1
    with pytest.raises(RuntimeError, match="from 1 on has been used"):
        pool.check()
