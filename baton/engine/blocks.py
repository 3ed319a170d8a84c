"""Who owns which block of the pool. Ints and keys only: the bytes are nobody's business here.

    free ──allocate──▶ owned ──seal──▶ owned and keyed ──release──▶ cached ──match──▶ owned and keyed
      ▲                  │ release (no key)                            │
      └──────────────────┴──────────────────── evict (oldest cached) ──┘

A keyed block is immutable and may have several owners; `cached` are keyed blocks without owner, kept until somebody needs the room.
Invariant (`check`): every block is in exactly one of free, cached, owned.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheChange:
    """What the prefix cache gained or lost, in order. The caller turns these into block events."""

    stored: bool
    key: bytes


class BlockPool:
    """`num_blocks` blocks, of which none is used at first. Not thread-safe: it belongs to the engine's thread."""

    def __init__(self, num_blocks: int, prefix_caching: bool = True) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self.prefix_caching = prefix_caching
        # What was freed last is taken first: its memory is there, and perhaps in a cache.
        self._free = list(reversed(range(num_blocks)))
        self._owners: dict[int, int] = {}  # block → number of owners
        self._key_of: dict[int, bytes] = {}  # sealed blocks, owned or cached
        self._block_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._changes: list[CacheChange] = []

    @property
    def available(self) -> int:
        """Blocks that `allocate` can still hand out."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_owned(self) -> int:
        return len(self._owners)

    def sealed_keys(self) -> list[bytes]:
        """Keys of every block a prefix can be found in, parents before children where they were stored so."""
        return list(self._block_of)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known prefix of `keys`. They are owned by the caller from now on."""
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
            idle += block in self._cached
        return known, idle

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one owner and undefined content, or None (and nothing changed) when so many are not available."""
        if count > self.available:
            return None
        return [self._take() for _ in range(count)]

    def seal(self, block: int, key: bytes) -> None:
        """Declare that an owned block is full and holds the KV of `key`: immutable from now on.

        When another block already carries the key, this one stays private to its owners and the older copy keeps serving.
        """
        if block not in self._owners:
            raise ValueError(f"block {block} has no owner and cannot be sealed")
        if not self.prefix_caching or key in self._block_of or block in self._key_of:
            return
        self._key_of[block] = key
        self._block_of[key] = block
        self._changes.append(CacheChange(True, key))

    def release(self, blocks: Iterable[int]) -> None:
        """Give up one ownership of each. The deepest block of a prefix ages first: a chain is evicted from its end."""
        for block in reversed(list(blocks)):
            owners = self._owners.get(block)
            if owners is None:
                raise ValueError(f"block {block} is released but has no owner")
            if owners > 1:
                self._owners[block] = owners - 1
                continue
            del self._owners[block]
            if block in self._key_of:
                self._cached[block] = None
            else:
                self._free.append(block)

    def forget(self, blocks: Iterable[int]) -> None:
        """Drop the keys of blocks whose content turned out to be wrong; their owners keep them, nobody finds them again."""
        for block in blocks:
            self._unkey(block)
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)

    def drain_changes(self) -> list[CacheChange]:
        """What changed in the prefix cache since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def check(self) -> None:
        """The conservation law. Raises RuntimeError: a broken pool must not serve another request's memory, whatever -O says."""
        free, cached, owned = set(self._free), set(self._cached), set(self._owners)
        if len(free) != len(self._free) or free & cached or free & owned or cached & owned:
            raise RuntimeError("a block is in two places")
        if len(free) + len(cached) + len(owned) != self.num_blocks:
            raise RuntimeError(f"blocks lost: {len(free)} free + {len(cached)} cached + {len(owned)} owned of {self.num_blocks}")
        if {key: block for block, key in self._key_of.items()} != self._block_of or cached - set(self._key_of) or free & set(self._key_of):
            raise RuntimeError("keys and blocks disagree")
        if any(count < 1 for count in self._owners.values()):
            raise RuntimeError("a block is owned by nobody")

    def _retain(self, block: int) -> None:
        self._cached.pop(block, None)
        self._owners[block] = self._owners.get(block, 0) + 1

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._unkey(block)
        self._owners[block] = 1
        return block

    def _unkey(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
            self._changes.append(CacheChange(False, key))
