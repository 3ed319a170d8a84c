"""The text of one answer of a beam search. It is made at once: nothing of it is known before the search is done."""

from dataclasses import dataclass

from baton.engine.core.beams import Hypothesis
from router.backlog import ENTRY_BYTES
from router.request import FinishReason
from router.tools.delta import Delta
from router.transcript import Transcript


@dataclass(frozen=True, slots=True)
class Found:
    index: int  # the best is number 0
    token_ids: tuple[int, ...]
    text: str  # content alone, if calls and thinking are told apart
    deltas: tuple[Delta, ...]  # all of it, if they are
    reason: FinishReason
    score: float
    reasoning_tokens: int

    @property
    def choice(self) -> int:
        return self.index

    @property
    def size(self) -> int:
        """See `router.request.Token.size`."""
        return ENTRY_BYTES * len(self.token_ids)


def found(index: int, one: Hypothesis, text: Transcript) -> Found:
    """`text`: one that has seen nothing yet."""
    reason: FinishReason = "stop" if one.stopped else "length"
    said = [text.push(token) for token in one.tokens]
    said.append(text.flush(reason))
    deltas = tuple(delta for each in said for delta in each.deltas)
    return Found(index, one.tokens, "".join(each.text for each in said), deltas, reason, one.score, text.reasoning_tokens)
