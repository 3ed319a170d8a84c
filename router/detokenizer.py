"""Converts the token ids of one output to text as they arrive: each call returns the text that the token completes.

`tokenizers.decoders.DecodeStream` is not used: if a model writes broken UTF-8, it raises, or holds everything back and decodes it all
again on each token, and after a prompt that ends inside a character it repeats the prompt.
"""

from codecs import getincrementaldecoder
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from router.tokenizer import Tokenizer

_NOTHING: Mapping[int, bytes] = MappingProxyType({})


class Detokenizer:
    """Never splits a character. All returned pieces together equal what `Tokenizer.decode` returns for the whole output.

    One exception: if byte-fallback tokens form broken UTF-8, only the broken sequences become replacement characters. The tokenizer also
    replaces whole characters next to them, but those may already have been sent.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_tail_ids: Sequence[int] = (), marks: Mapping[int, bytes] = _NOTHING) -> None:
        """`prompt_tail_ids`: the last ids of the prompt, so that a space at the beginning of the output is kept. `marks`: control tokens
        that are shown, with their spelling."""
        self._tokenizer = tokenizer
        self._marks = marks
        self._utf8 = getincrementaldecoder("utf-8")(errors="replace")
        self._first = all(tokenizer.piece(id_) is None for id_ in prompt_tail_ids)

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is still open, and for a special token."""
        piece = self._marks[token_id] if token_id in self._marks else self._tokenizer.piece(token_id, self._first)
        if piece is None:
            return ""
        self._first = False
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """Returns what is left at the end: a replacement character if the last character is incomplete."""
        return self._utf8.decode(b"", final=True)
