"""Token ids of texts that stood between two control tokens of a conversation, which sends them again with every turn.

The tokenizer encodes each such text by itself (`Tokenizer.render`), so its ids do not depend on what stands around it, and a known text is
exactly what encoding it again would give. Texts are told apart by salt, like blocks: how fast an answer comes tells a tenant nothing about
the texts of another.
"""

import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b

from router.chat_map import Encode, Known

LEAST_CHARS = 1024  # a shorter text costs about as much to look up
ENTRY_BYTES = 256  # what keeping a text costs besides its ids


class KnownTexts:
    """Safe to use from several threads."""

    def __init__(self, most_bytes: int, least_chars: int = LEAST_CHARS) -> None:
        """`most_bytes`: of all ids; the text that was not needed for longest goes first. Shorter texts than `least_chars` are not kept."""
        self.hits = self.misses = 0  # tokens that were known, and that were made
        self._most, self._least = most_bytes, least_chars
        self._size = 0
        self._known: OrderedDict[bytes, array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, salt: str) -> Known:
        """What a conversation with this salt may use."""
        return partial(self._ids, salt)

    def _ids(self, salt: str, text: str, at: int, encode: Encode) -> Sequence[int]:
        if not self._most or len(text) < self._least:
            return encode()
        key = _key(salt, text, at == 0)
        with self._lock:
            if (known := self._known.get(key)) is not None:
                self._known.move_to_end(key)
                self.hits += len(known)
        return known.tolist() if known is not None else self._add(key, encode())

    def _add(self, key: bytes, ids: Sequence[int]) -> Sequence[int]:
        packed = array("I", ids)
        with self._lock:
            self.misses += len(ids)
            if key not in self._known:  # else another thread was faster
                self._known[key] = packed
                self._size += _size(packed)
            while self._size > self._most:
                self._size -= _size(self._known.popitem(last=False)[1])
        return ids


def _key(salt: str, text: str, first: bool) -> bytes:
    """A collision would give a prompt other tokens, so the hash is a cryptographic one."""
    told = salt.encode("utf-8", "surrogatepass")
    digest = blake2b(len(told).to_bytes(8, "little") + told + bytes([first]), digest_size=32)
    digest.update(text.encode("utf-8", "surrogatepass"))
    return digest.digest()


def _size(ids: "array[int]") -> int:
    return ENTRY_BYTES + ids.itemsize * len(ids)
