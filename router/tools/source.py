"""Text that arrives in pieces, for readers that are generators: they yield where they need more.

A reader decides by the text alone and never by where it was cut, so every way of cutting gives the same result.
"""

import re
from collections.abc import Callable, Generator, Iterator
from json import JSONDecodeError, JSONDecoder
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
_SPACE = re.compile(r"[ \t\r\n]*")
_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')


class NotACall(Exception):
    """The text does not have the form that its beginning announced: it is text."""


class CutOff(Exception):
    """The text has ended inside something."""


class TextSource:
    __slots__ = ("at", "ended", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0  # what is before it has been read
        self.ended = False

    def more(self) -> Reading[None]:
        """Waits for more text. Raises CutOff."""
        if self.ended:
            raise CutOff
        yield

    def peek(self, count: int = 1) -> Reading[str]:
        """The next `count` characters; fewer if the text ends before."""
        while len(self.text) - self.at < count and not self.ended:
            yield
        return self.text[self.at : self.at + count]

    def space(self) -> Reading[None]:
        """Reads white space."""
        while True:
            found = _SPACE.match(self.text, self.at)
            assert found is not None
            self.at = found.end()
            if self.at < len(self.text) or self.ended:
                return
            yield

    def literal(self, *words: str) -> Reading[str]:
        """Reads one of `words`, the first that fits. Raises NotACall, and CutOff where one may have begun."""
        while True:
            open_ = False
            for word in words:
                have = self.text[self.at : self.at + len(word)]
                if have == word:
                    self.at += len(word)
                    return word
                open_ = open_ or word.startswith(have)
            if not open_:
                raise NotACall
            yield from self.more()

    def comes(self, word: str) -> Reading[bool]:
        """Whether the text goes on with `word`. Reads it only if so."""
        while (here := self.text[self.at : self.at + len(word)]) != word:
            if self.ended or not word.startswith(here):
                return False
            yield
        self.at += len(word)
        return True

    def until(self, *words: str) -> Reading[tuple[str, str]]:
        """Reads up to the first place where one of `words` stands, and that word. Raises CutOff."""
        begun = looked = self.at
        longest = max(map(len, words))
        while True:
            found = [(at, word) for word in words if (at := self.text.find(word, looked)) >= 0]
            if found:
                at, word = min(found)
                self.at = at + len(word)
                return self.text[begun:at], word
            looked = max(begun, len(self.text) - longest + 1)
            yield from self.more()

    def object(self, tell: Callable[[str], None] | None = None) -> Reading[str]:
        """Reads a JSON object by its brackets alone; `tell` gets the pieces as they come. Raises NotACall if none begins here, CutOff."""
        if (yield from self.peek()) != "{":
            if self.at == len(self.text):
                raise CutOff
            raise NotACall
        begun = at = told = self.at
        depth, inside = 0, False
        while True:
            found = (_IN_STRING if inside else _OUTSIDE).search(self.text, at)
            if found is None or (found[0] == "\\" and found.end() == len(self.text)):
                at = len(self.text) if found is None else found.start()
                if tell is not None and told < at:
                    tell(self.text[told:at])
                    told = at
                yield from self.more()
                continue
            char, at = found[0], found.end()
            if char == "\\":
                at += 1
            elif char == '"':
                inside = not inside
            else:
                depth += 1 if char in "{[" else -1
            if depth == 0:
                self.at = at
                if tell is not None:
                    tell(self.text[told:at])
                return self.text[begun:at]


def _no_number(name: str) -> Any:
    raise JSONDecodeError("not a JSON number", name, 0)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise JSONDecodeError("a member is given twice", "", 0)
    return made


_STRICT = JSONDecoder(object_pairs_hook=_once, parse_constant=_no_number)


def value_of(text: str) -> Any:
    """The value of a JSON text. Raises NotACall."""
    try:
        return _STRICT.decode(text)
    except (ValueError, RecursionError):
        raise NotACall from None


def members_of(text: str) -> dict[str, tuple[Any, str]]:
    """The members of a JSON object: value, and the text that stands for it. Raises NotACall."""
    value_of(text)
    return dict(_members(text))


def _members(text: str) -> Iterator[tuple[str, tuple[Any, str]]]:
    """`text`: a valid object."""
    at = _after_space(text, text.index("{") + 1)
    while text[at] != "}":
        name, at = scanstring(text, at + 1)
        at = _after_space(text, _after_space(text, at) + 1)
        value, end = _STRICT.raw_decode(text, at)
        yield name, (value, text[at:end])
        at = _after_space(text, end)
        at = _after_space(text, at + 1) if text[at] == "," else at


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()
