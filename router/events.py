"""What the service says about a request, to the doors."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from baton.engine.core.sampling import SamplingParams
from router.choices import seeded
from router.found import Found
from router.request import FinishReason, Request, Scores, Token
from router.tools.delta import Delta
from router.uncached import Uncached


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is complete: every default is filled in. `output_tokens` and `shown` (characters) say how much of the output an earlier
    call has streamed."""

    request_id: str
    model: str
    prompt_tokens: int
    params: SamplingParams
    stops: tuple[str, ...] = ()
    receipt: bytes = b""
    output_tokens: int = 0
    shown: int = 0
    relaxed: tuple[str, ...] = ()  # what of the form is not enforced, because the request is not strict
    choices: int = 1
    degraded: tuple[str, ...] = ()  # what overload took from it: sentences, each beginning with a field

    def of(self, choice: int) -> "Accepted":
        """What is in force for one choice."""
        return replace(self, params=seeded(self.params, choice)) if choice else self


class TextPiece(NamedTuple):
    """One token of the output and the text that it completed: content alone, if calls and thinking are told apart."""

    index: int  # type: ignore[assignment]  # nobody searches in a piece
    token: Token
    text: str
    deltas: tuple[Delta, ...] = ()  # all of it, if they are


@dataclass(frozen=True, slots=True)
class Pieces:
    """Successive tokens of a choice that were ready together; at least one."""

    pieces: tuple[TextPiece, ...]
    choice: int = 0

    @property
    def size(self) -> int:
        """See `Token.size`."""
        return sum(piece.token.size for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Finished:
    request: Request
    reason: FinishReason
    text: str  # what was held back until now
    stop: str | None  # the stop string that ended the output
    deltas: tuple[Delta, ...] = ()  # as in a TextPiece
    calls: int = 0
    reasoning_tokens: int = 0
    incomplete: bool = False  # it ended before the form that was asked for was complete
    predicted: tuple[int, int] = (0, 0)  # tokens of the request's prediction that the output has, and that it does not have
    choice: int = 0
    discarded_tokens: int = 0  # of choices that were computed and are not part of the answer; told with its last choice
    uncached: Uncached | None = None  # of its prompt, unless another choice tells it


Event = Accepted | Scores | Pieces | Found | Finished
Part = Accepted | Scores | TextPiece | Found | Finished


def parts(event: Event) -> tuple[Part, ...]:
    return event.pieces if isinstance(event, Pieces) else (event,)
