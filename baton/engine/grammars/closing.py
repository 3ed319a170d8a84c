"""Closes a model's thinking at its budget: after it, only the tokens of the closing may follow, one after the other.

What it reads is what the router's `ThinkingReader` reads: marks at the beginning of the text, as bytes. A state follows from the one before
it and a token, so guesses and rollbacks only cut a list.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from enum import Enum
from typing import NamedTuple

import numpy as np

from baton.engine.core.masks import WORD, Matcher, Words, common
from baton.engine.core.thinking import ThinkingBudget

SPACE = b" \t\r\n"


class ClosingPhase(Enum):
    BEFORE = "before"  # only white space and the beginning of a mark have come
    INSIDE = "inside"
    CLOSING = "closing"
    OVER = "over"  # or it never began


class ClosingState(NamedTuple):
    phase: ClosingPhase
    marks: int = 0
    tail: bytes = b""  # of the text: what may still become a mark or a character
    closed: int = 0  # tokens of the closing that have come


OVER = ClosingState(ClosingPhase.OVER)


class Closer:
    """A `Matcher`. `inner`: of the form of the whole output; it has the word when nothing is forced."""

    def __init__(self, budget: ThinkingBudget, spelled: Callable[[int], bytes], vocab_size: int, inner: Matcher | None = None) -> None:
        """`spelled`: the bytes that a token adds to the text; of control tokens, only those of marks have any."""
        self._budget = budget
        self._spelled = spelled
        self._inner = inner
        self._ends = [[end.encode() for end in marks.ends] for marks in budget.marks]
        self._begins = [marks.begin.encode() for marks in budget.marks]
        self._anything: Words = np.full(-(-vocab_size // WORD), -1, np.int32)
        begun = ClosingState(ClosingPhase.INSIDE if budget.opened else ClosingPhase.BEFORE)
        self._states = [self._due(begun, 0)]  # after each number of tokens
        self._seen: list[int] = []

    @property
    def failure(self) -> str:
        return self._inner.failure if self._inner is not None else ""

    def mask(self, output: Seq[int]) -> Words | None:
        state = self._follow(output)
        if state is None:
            return None
        if state.phase is ClosingPhase.CLOSING:
            words = np.zeros_like(self._anything)
            token = self._budget.marks[state.marks].closing[state.closed]
            words.view(np.uint32)[token // WORD] = 1 << token % WORD
            return words
        return self._inner.mask(output) if self._inner is not None else self._anything

    def _follow(self, output: Seq[int]) -> ClosingState | None:
        """None if `output` has another token where one was forced."""
        same = common(self._seen, output)
        del self._seen[same:], self._states[same + 1 :]
        for token in output[same:]:
            state = self._after(self._states[-1], token)
            if state is None:
                return None
            self._seen.append(token)
            self._states.append(self._due(state, len(self._seen)))
        return self._states[-1]

    def _after(self, state: ClosingState, token: int) -> ClosingState | None:
        match state.phase:
            case ClosingPhase.OVER:
                return state
            case ClosingPhase.CLOSING:
                closing = self._budget.marks[state.marks].closing
                if token != closing[state.closed]:
                    return None
                return state._replace(closed=state.closed + 1) if state.closed + 1 < len(closing) else OVER
            case ClosingPhase.BEFORE:
                return self._begin(state.tail + self._spelled(token))
        return self._inside(state.marks, state.tail + self._spelled(token))

    def _begin(self, text: bytes) -> ClosingState:
        text = text.lstrip(SPACE)
        for i, begin in enumerate(self._begins):
            if text.startswith(begin):
                return self._inside(i, text[len(begin) :])
        return ClosingState(ClosingPhase.BEFORE, tail=text) if any(begin.startswith(text) for begin in self._begins) else OVER

    def _inside(self, marks: int, text: bytes) -> ClosingState:
        ends = self._ends[marks]
        if any(end in text for end in ends):
            return OVER
        return ClosingState(ClosingPhase.INSIDE, marks, text[1 - max(4, *map(len, ends)) :])

    def _due(self, state: ClosingState, count: int) -> ClosingState:
        if state.phase is ClosingPhase.INSIDE and count >= self._budget.max_tokens and not inside_character(state.tail):
            return ClosingState(ClosingPhase.CLOSING, state.marks)
        return state


def inside_character(text: bytes) -> bool:
    """Whether UTF-8 ends inside a character. A byte that begins none is a (broken) character of its own."""
    for back, byte in enumerate(reversed(text[-3:]), 1):
        if byte < 0x80:
            return False
        if byte >= 0xC0:
            return back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4 if byte < 0xF5 else 1)
    return False
