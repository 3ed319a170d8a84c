"""Who owns which block of the pool. This file handles only numbers and keys, never the bytes of a block.

    free ──allocate──▶ owned ──seal──▶ owned and keyed ──release──▶ cached ──match, coldest──▶ owned and keyed
      ▲                  │ release (no key)                            │
      └──────────────────┴──────────────────── evict (oldest cached) ──┘

A full block is immutable and may have several owners: one with a key, which `match` finds, or one that a sequence shares with another
(`share`). `cached` blocks are keyed blocks without an owner, kept until the room is needed. Who saves the content of a block elsewhere owns
it meanwhile (`coldest`).
Invariant (`check`): every block is in exactly one of free, cached, owned.
"""

from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from baton.engine.core.block_key import DEVICE


@dataclass(frozen=True, slots=True)
class BlockContent:
    """What a block holds. `parent`: the key of the block before it; None: it is the first of a prompt."""

    parent: bytes | None
    tokens: tuple[int, ...]


class CacheChange(NamedTuple):
    """What the prefix cache gained or lost, in order. The caller turns these into block events. A tuple, because each block is one twice in
    its life: a frozen dataclass takes several times as long to make."""

    stored: bool
    key: bytes
    medium: str = DEVICE  # one of MEDIA
    content: BlockContent | None = None  # of a stored block, if the pool describes them


_change = tuple.__new__  # a `CacheChange` of all its fields, without the function of Python that a named tuple is made by


class Keyed(NamedTuple):
    """A sealed block. Its content does not change while it has an owner."""

    block: int
    key: bytes


class BlockPool:
    """`num_blocks` blocks, all unused at first. Not thread-safe: it belongs to the engine's thread."""

    def __init__(self, num_blocks: int, prefix_caching: bool = True) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self.prefix_caching = prefix_caching
        self.describes = False  # changes tell what blocks hold
        self.reached = 0  # blocks from this number on have never been used
        # The block that was freed last is taken first: its memory is mapped, and perhaps in a cache of the processor.
        self._free = list(reversed(range(num_blocks)))
        self._owners: dict[int, int] = {}  # block → number of owners
        self._key_of: dict[int, bytes] = {}  # sealed blocks, owned or cached
        self._block_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._saved: OrderedDict[int, None] = OrderedDict()  # those that are cached and older: they need not be saved any more
        self._offered: set[int] = set()  # those that `coldest` gave and nobody has matched since; `_saved` and others that are owned
        self._changes: list[CacheChange] = []

    @property
    def available(self) -> int:
        """Blocks that `allocate` can still hand out."""
        return len(self._free) + self.num_cached

    @property
    def num_cached(self) -> int:
        return len(self._cached) + len(self._saved)

    @property
    def num_owned(self) -> int:
        return len(self._owners)

    def sealed_keys(self) -> list[bytes]:
        """Keys of all blocks in which a prefix can be found; parents come before children if they were stored in that order."""
        return list(self._block_of)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known prefix of `keys`. The caller owns them from now on."""
        blocks = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        for block in blocks:
            self._retain(block)
        return blocks

    def matched(self, keys: Sequence[bytes]) -> tuple[int, int]:
        """(blocks that `match` would return, how many of these are cached and would leave `available`)."""
        known = idle = 0
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            known += 1
            idle += block not in self._owners
        return known, idle

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one owner and undefined content, or None (and nothing changed) if fewer are available."""
        if count > self.available:
            return None
        free, owners = self._free, self._owners
        if count <= len(free):
            blocks = [free.pop() for _ in range(count)]
            self.reached = max(self.reached, max(blocks, default=-1) + 1)
        else:
            self.reached = self.num_blocks
            blocks = [*reversed(free), *self._evict(count - len(free))]
            free.clear()
        for block in blocks:
            owners[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more owner for each. The caller vouches that they are full: nobody writes to them any more."""
        blocks = list(blocks)
        if missing := [block for block in blocks if block not in self._owners]:
            raise ValueError(f"block {missing[0]} has no owner and cannot be shared")
        for block in blocks:
            self._retain(block)

    def seal(self, block: int, key: bytes, content: BlockContent | None = None) -> None:
        """Declare that an owned block is full and holds the KV of `key`: it is immutable from now on.

        If another block already has the key, this one stays private to its owners, and the older copy continues to be found.
        """
        if block not in self._owners:
            raise ValueError(f"block {block} has no owner and cannot be sealed")
        if not self.prefix_caching or key in self._block_of or block in self._key_of:
            return
        self._key_of[block] = key
        self._block_of[key] = block
        self._changes.append(_change(CacheChange, (True, key, DEVICE, content)))

    def release(self, blocks: Iterable[int]) -> None:
        """Give up one ownership of each. The deepest block of a prefix ages first: a chain is evicted from its end."""
        owned, key_of, offered = self._owners, self._key_of, self._offered
        for block in reversed(list(blocks)):
            owners = owned.pop(block, None)
            if owners is None:
                raise ValueError(f"block {block} is released but has no owner")
            if owners > 1:
                owned[block] = owners - 1
            elif block not in key_of:
                self._free.append(block)
            else:
                (self._saved if block in offered else self._cached)[block] = None

    def forget(self, blocks: Iterable[int]) -> None:
        """Drop the keys of blocks whose content turned out to be wrong: their owners keep them, but they are not found again."""
        for block in blocks:
            self._unkey(block)
            if block in self._cached or block in self._saved:
                self._drop(block)
                self._free.append(block)

    def coldest(self, count: int, within: int, known: Container[bytes], only: Container[bytes] | None = None) -> list[Keyed]:
        """Up to `count` of the `within` oldest cached blocks, without those whose keys are `known` and those that it has given before,
        unless somebody has matched them since. The caller owns them, and releases the oldest first: then they are the oldest again. `only`:
        none but these keys."""
        found: list[Keyed] = []
        for block in list(islice(self._cached, max(0, within - len(self._saved)))):
            if len(found) >= count:
                break
            key = self._key_of[block]
            if only is not None and key not in only:
                continue
            if key in known:
                del self._cached[block]
                self._saved[block] = None
            else:
                self._retain(block)
                found.append(Keyed(block, key))
            self._offered.add(block)
        return found

    def note(self, changes: Iterable[CacheChange]) -> None:
        """What changed in other media than the device: it is told in one order with what changes here."""
        self._changes += changes

    def drain_changes(self) -> list[CacheChange]:
        """What changed in the prefix cache since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def check(self) -> None:
        """Checks the invariant. Raises RuntimeError, also under -O: a broken pool must not serve another request's memory."""
        places = {"free": set(self._free), "cached": {*self._cached, *self._saved}, "owned": set(self._owners)}
        free, cached, _ = places.values()
        if len(free) != len(self._free) or len(set().union(*places.values())) != sum(map(len, places.values())):
            raise RuntimeError("a block is in two places")
        if sum(map(len, places.values())) != self.num_blocks:
            told = " + ".join(f"{len(blocks)} {place}" for place, blocks in places.items())
            raise RuntimeError(f"blocks lost: {told} of {self.num_blocks}")
        if {key: block for block, key in self._key_of.items()} != self._block_of or cached - set(self._key_of) or free & set(self._key_of):
            raise RuntimeError("keys and blocks disagree")
        if self._offered - set(self._key_of) or set(self._saved) - self._offered or self._offered & set(self._cached):
            raise RuntimeError("it is not clear what was saved")
        if set(range(self.reached, self.num_blocks)) - free:
            raise RuntimeError(f"a block from {self.reached} on has been used")
        if any(count < 1 for count in self._owners.values()):
            raise RuntimeError("a block is owned by nobody")

    def _retain(self, block: int) -> None:
        self._drop(block)
        self._offered.discard(block)
        self._owners[block] = self._owners.get(block, 0) + 1

    def _drop(self, block: int) -> None:
        self._cached.pop(block, None)
        self._saved.pop(block, None)

    def _evict(self, count: int) -> list[int]:
        """So many of the cached blocks, the oldest first, without their keys."""
        evicted = []
        key_of, block_of, offered, changes = self._key_of, self._block_of, self._offered, self._changes
        for _ in range(count):
            block, _ = (self._saved or self._cached).popitem(last=False)
            key = key_of.pop(block)
            del block_of[key]
            if offered:
                offered.discard(block)
            changes.append(_change(CacheChange, (False, key, DEVICE, None)))
            evicted.append(block)
        return evicted

    def _unkey(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        self._offered.discard(block)
        if key is not None:
            del self._block_of[key]
            self._changes.append(CacheChange(False, key))
