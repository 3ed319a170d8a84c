"""The block pool against a trivially simple model of it."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.engine.core.blocks import BlockPool, CacheChange, Leaving

SIZE = 6


class PoolMachine(RuleBasedStateMachine):
    """Owners hold lists of blocks; the model knows what each keyed block must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(SIZE)
        self.owned: list[list[int]] = []
        self.content: dict[int, bytes] = {}  # block → key sealed into it
        self.leaving: list[Leaving] = []  # somebody saves them
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

    @rule(count=st.integers(0, SIZE + 1))
    def leave(self, count: int) -> None:
        available, cached = self.pool.available, self.pool.num_cached
        leaving = self.pool.leave(count)
        assert len(leaving) == min(count, cached) and self.pool.available == available - len(leaving)
        for one in leaving:
            assert self.content[one.block] == one.key
            assert self.pool.matched([one.key])[0] == 1, "what leaves is still found"
        self.leaving += leaving

    @precondition(lambda self: self.leaving)
    @rule(data=st.data())
    def gone(self, data: st.DataObject) -> None:
        self.pool.gone([self.leaving.pop(data.draw(st.integers(0, len(self.leaving) - 1)))])

    @invariant()
    def what_leaves_keeps_its_content(self) -> None:
        """Nobody is given the room of a block before whoever saves it is done, unless its content turned out to be wrong."""
        fresh = [block for owner in self.owned for block in owner if block not in self.content]
        assert not set(fresh) & {one.block for one in self.leaving if self.pool._leaving.get(one.block) is one}

    @invariant()
    def conserved(self) -> None:
        self.pool.check()
        owners = [block for owner in self.owned for block in owner]
        assert self.pool.num_owned == len(set(owners))
        assert self.pool.available == SIZE - len(set(owners)) - len(self.pool._leaving)

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


def test_a_block_that_leaves_can_be_taken_back_and_its_saver_then_frees_nothing() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.seal(blocks[0], b"1")
    pool.release(blocks)
    pool.drain_changes()
    (one,) = pool.leave(5)
    assert pool.available == 1 and pool.allocate(2) is None
    assert pool.match([b"1"]) == [one.block]  # taken back
    pool.gone([one])
    assert pool.num_owned == 1 and pool.drain_changes() == []
    pool.release([one.block])
    (again,) = pool.leave(1)
    pool.gone([one])  # of the first time: it does not count for the second
    assert pool.allocate(2) is None
    pool.gone([again])
    assert pool.drain_changes() == [CacheChange(False, b"1")] and pool.allocate(2) is not None
    pool.check()


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
