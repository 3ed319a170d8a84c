"""One answer, read from beginning to end: thinking, then content and calls."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from router.tools.calls import CallReader
from router.tools.delta import Content, Delta, Message
from router.tools.families import ModelFamily
from router.tools.thinking import Thinking, ThinkingReader


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """What the text of an answer may hold besides content. Without tools and thinking it is all content."""

    family: ModelFamily | None = None
    tools: Mapping[str, Any] | None = None  # name → JSON Schema of the arguments
    thinking: Thinking | None = None
    opened: bool = False  # the prompt ends inside the thinking
    live: bool = False  # a grammar rules the calls
    parallel: bool = True  # else the answer ends with its first call
    id_of: Callable[[int], str] = lambda index: ""


class Reader:
    def __init__(self, format: AnswerFormat) -> None:
        family, thinking = format.family, format.thinking
        ends = family.ends_thinking if family is not None and format.tools else ()
        self._thinking = ThinkingReader(thinking, format.opened, ends) if thinking is not None else None
        self._calls = CallReader(family, format.tools, format.live, format.id_of) if family is not None and format.tools else None
        self._parallel = format.parallel
        self._after_thinking = False  # where only white space has come since the thinking ended

    @property
    def thinks(self) -> bool:
        """Whether the text so far ends inside the thinking."""
        return self._thinking is not None and self._thinking.thinks

    @property
    def calls(self) -> int:
        return self._calls.count if self._calls is not None else 0

    @property
    def complete(self) -> bool:
        """Whether the answer ends here: it has the only call that it may have."""
        return not self._parallel and self._calls is not None and self._calls.whole > 0

    def push(self, text: str) -> list[Delta]:
        thinking = self._thinking
        if thinking is None:
            return self._answer(text)
        deltas = thinking.push(text)
        return deltas + self._after(thinking) if thinking.over else deltas

    def flush(self, cut: bool = False) -> list[Delta]:
        """The rest, at the end of the text. `cut`: it would have gone on."""
        deltas: list[Delta] = []
        if self._thinking is not None:
            deltas = self._thinking.flush()
            deltas += self._after(self._thinking)
        return deltas + (self._calls.flush(cut) if self._calls is not None else [])

    def _after(self, thinking: ThinkingReader) -> list[Delta]:
        """Hands over to what follows the thinking."""
        self._thinking = None
        self._after_thinking = thinking.thought
        return self._answer(thinking.rest)

    def _answer(self, text: str) -> list[Delta]:
        if self._after_thinking:
            text = text.lstrip()
            self._after_thinking = not text
        if not text:
            return []
        return self._calls.push(text) if self._calls is not None else [Content(text)]


def read(text: str, format: AnswerFormat, cut: bool = False) -> Message:
    """A whole answer."""
    reader = Reader(format)
    return Message().add(reader.push(text)).add(reader.flush(cut))
