"""Which tokens may come next: what an engine asks of the thing that knows a grammar, and bits for tokens."""

from collections.abc import Sequence as Seq
from typing import Any, Protocol

import numpy as np

Words = np.ndarray[Any, np.dtype[np.int32]]  # [ceil(V / 32)]: bit t % 32 of word t // 32 is set if token t is allowed
WORD = 32
NOTHING: Words = np.zeros(0, np.int32)


class Matcher(Protocol):
    """Where one output stands in its grammar, or in its thinking. For one thread at a time."""

    @property
    def failure(self) -> str:
        """Why the library gave up; "" if it did not."""
        ...

    def mask(self, output: Seq[int]) -> Words | None:
        """The tokens that may follow `output`, end tokens only where the document is complete. None if `output` itself does not match.
        NOTHING, this very object, if nothing may follow, or if the library gave up (`failure`)."""
        ...


def common(old: Seq[int], new: Seq[int]) -> int:
    """How many tokens they begin with alike. Nearly always all of `old`."""
    if new[: len(old)] == old:
        return len(old)
    return next((i for i, (one, other) in enumerate(zip(old, new, strict=False)) if one != other), min(len(old), len(new)))


def allows(words: Words, token: int) -> bool:
    return bool(int(words[token // WORD]) >> (token % WORD) & 1)


def without(words: Words, tokens: Seq[int]) -> Words:
    """`words` without `tokens`, unless nothing else is allowed."""
    left = words.copy()
    bits = left.view(np.uint32)
    for token in tokens:
        if 0 <= token < len(bits) * WORD:
            bits[token // WORD] &= np.uint32(~(1 << token % WORD) & 0xFFFFFFFF)
    return left if left.any() else words


def allowed_ids(words: Words, vocab_size: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
    return np.flatnonzero(unpacked(words, vocab_size))


def unpacked(words: Words, vocab_size: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """`[V]`: 1 for an allowed token. Tokens beyond the mask are not allowed."""
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size]
    return bits if len(bits) == vocab_size else np.pad(bits, (0, vocab_size - len(bits)))


def stacked(forms: Seq[Words | None], vocab_size: int) -> "np.ndarray[Any, np.dtype[np.int32]] | None":
    """`[rows, ceil(V / 32)]`, in which a row without a form allows everything; None if no row has one."""
    if all(words is None for words in forms):
        return None
    width = -(-vocab_size // WORD)
    every = b"\xff" * (4 * width)
    told = [every if words is None else words[:width].tobytes().ljust(4 * width, b"\0") for words in forms]
    return np.frombuffer(bytearray().join(told), np.int32).reshape(len(forms), width)  # bytearray: torch wants memory that may be written
