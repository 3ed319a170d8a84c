"""vLLM's prefix cache in our block keys: it names blocks by hashes of its own, but says which tokens they hold and what they follow."""

from collections.abc import Iterable
from typing import Any

from baton.engine.core.block_key import block_key
from baton.engine.core.blocks import CacheChange


class BlockEvents:
    """Remembers the key of every block that the cache holds. `salt`: what we put into `cache_salt`, the hex of the sequence's root key."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._keys: dict[Any, bytes] = {}

    def stored(self, hashes: Iterable[Any], parent: Any, tokens: list[int], salt: str | None) -> list[CacheChange]:
        """Blocks in order. A block whose parent or root is not known is left out: nobody could find it."""
        key = bytes.fromhex(salt) if parent is None and salt else self._keys.get(parent)
        changes: list[CacheChange] = []
        for i, name in enumerate(hashes):
            if key is None:
                break
            key = block_key(key, tokens[i * self._size : (i + 1) * self._size])
            if name not in self._keys:
                changes.append(CacheChange(True, key))
            self._keys[name] = key
        return changes

    def removed(self, hashes: Iterable[Any]) -> list[CacheChange]:
        return [CacheChange(False, self._keys.pop(name)) for name in hashes if name in self._keys]

    def cleared(self) -> list[CacheChange]:
        return self.removed(list(self._keys))
