"""What a model thinks before it answers: the text between two marks, at the beginning of its output."""

from collections.abc import Sequence
from dataclasses import dataclass

from router.tools.delta import Delta, Reasoning
from router.tools.source import Reading, TextSource


@dataclass(frozen=True, slots=True)
class Thinking:
    begin: str
    end: str
    closing: str  # what ends it by force: the end, with the white space that the family's models put around it
    other: "Thinking | None" = None  # marks that the family's models write sometimes


THINK = Thinking("<think>", "</think>", "\n</think>\n\n")
BY_NAME = {"think": THINK, "mistral": Thinking("[THINK]", "[/THINK]", "[/THINK]", THINK)}


def thinking_of(template: str | None) -> Thinking | None:
    """The marks that a chat template knows; None if its model does not think."""
    if template is None:
        return None
    return next((one for one in BY_NAME.values() if one.end in template), None)


def is_open(thinking: Thinking, prompt: str) -> bool:
    """Whether a prompt ends inside the thinking. Only white space may follow the mark: what stands before it may be anybody's text."""
    return prompt.rstrip().endswith(thinking.begin)


class ThinkingReader:
    """Text that follows the thinking is not read: it is in `rest` once `over` is true."""

    def __init__(self, thinking: Thinking, opened: bool = False, ends: Sequence[str] = ()) -> None:
        """`opened`: the prompt ends inside the thinking. `ends`: texts that end it without belonging to it."""
        self.over = False
        self.thought = False  # there was a mark
        self.rest = ""
        self._thinking = thinking
        self._opened = opened
        self._ends = (thinking.end, *ends)
        self._source = TextSource()
        self._out: list[Delta] = []
        self._run = self._main()
        next(self._run, None)

    @property
    def thinks(self) -> bool:
        return self.thought and not self.over

    def push(self, text: str) -> list[Delta]:
        self._source.text += text
        return self._step()

    def flush(self) -> list[Delta]:
        self._source.ended = True
        return self._step()

    def _step(self) -> list[Delta]:
        next(self._run, None)
        out, self._out = self._out, []
        return out

    def _main(self) -> Reading[None]:
        source = self._source
        if not self._opened:
            yield from source.space()
            other = self._thinking.other
            if not (yield from source.comes(self._thinking.begin)):
                if other is None or not (yield from source.comes(other.begin)):
                    self._end(0)
                    return
                self._ends = (other.end,)
        self.thought = True
        yield from source.space()  # a mark that is repeated after the prompt's own, and the line break after it
        if self._opened and (yield from source.comes(self._thinking.begin)):
            yield from source.space()
        yield from self._thoughts()

    def _thoughts(self) -> Reading[None]:
        source = self._source
        while True:
            source.text, source.at = source.text[source.at :], 0
            found = [(at, end) for end in self._ends if (at := source.text.find(end)) >= 0]
            if found:
                at, end = min(found)
                self._say(source.text[:at].rstrip())
                self._end(at + len(end) if end == self._ends[0] else at)
                return
            if source.ended:
                self._say(source.text.rstrip())
                self._end(len(source.text))
                return
            keep = self._open(source.text)
            shown = source.text[: len(source.text) - keep].rstrip()
            self._say(shown)
            source.at = len(shown)
            yield

    def _open(self, text: str) -> int:
        most = min(len(text), max(map(len, self._ends)) - 1)
        return next((size for size in range(most, 0, -1) if any(end.startswith(text[-size:]) for end in self._ends)), 0)

    def _say(self, text: str) -> None:
        if text:
            self._out.append(Reasoning(text))

    def _end(self, at: int) -> None:
        self.rest = self._source.text[at:]
        self.over = True
