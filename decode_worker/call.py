"""One decode call, and what it holds: blocks that a fetch fills, and the lease that is read.

    event →       add       fetch     verify    recompute   settle    end
    arrived       placed    fetching            computing             ended
    fetching                          placed    computing             leaving
    computing                                               placed    leaving
    placed                                      computing             ended
    leaving                           ended     leaving     ended
    ended                                       leaving

`add`: the engine gets the sequence without KV. `verify`: the KV was read and its lease has ended. `recompute`: it does not come, and the
engine computes the prompt. `settle`: no byte can land any more in the blocks that the fetch was filling. `end`: the engine has told the
last token, or a failure. A call that stops before it has `ended` still holds something and must be withdrawn.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from baton.cluster.errors import BatonError
from baton.cluster.handoff import Handoff
from baton.cluster.telemetry import NO_SPAN, TraceSpan
from baton.engine.core.beams import Hypothesis
from baton.engine.core.sampling import Sampled, Scored
from baton.engine.core.sequence import Finish, Sequence
from baton.moves import Moves
from kvtransfer.handle import KvHandle
from kvtransfer.importer import Fetch


class CallState(Enum):
    ARRIVED = "arrived"
    FETCHING = "fetching"
    COMPUTING = "computing"  # the prompt; an abandoned fetch may still write into blocks of the call
    PLACED = "placed"  # the engine has the sequence, and nothing is left of a fetch
    LEAVING = "leaving"  # it has ended, and a fetch is not settled
    ENDED = "ended"


MOVES = Moves(
    {
        (CallState.ARRIVED, "add"): CallState.PLACED,
        (CallState.ARRIVED, "fetch"): CallState.FETCHING,
        (CallState.ARRIVED, "recompute"): CallState.COMPUTING,
        (CallState.ARRIVED, "end"): CallState.ENDED,
        (CallState.FETCHING, "verify"): CallState.PLACED,
        (CallState.FETCHING, "recompute"): CallState.COMPUTING,
        (CallState.FETCHING, "end"): CallState.LEAVING,
        (CallState.COMPUTING, "settle"): CallState.PLACED,
        (CallState.COMPUTING, "end"): CallState.LEAVING,
        (CallState.PLACED, "recompute"): CallState.COMPUTING,
        (CallState.PLACED, "end"): CallState.ENDED,
        (CallState.LEAVING, "verify"): CallState.ENDED,
        (CallState.LEAVING, "recompute"): CallState.LEAVING,
        (CallState.LEAVING, "settle"): CallState.ENDED,
        (CallState.ENDED, "recompute"): CallState.LEAVING,
    }
)


@dataclass(frozen=True, slots=True)
class Adopted:
    handoff: Handoff
    cached_tokens: int = 0  # of a prompt that is computed here


@dataclass(frozen=True, slots=True)
class Finished:
    finish: Finish
    handoff: Handoff
    cached_tokens: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class PromptScores:
    first: int  # position in the prompt
    scores: tuple[Scored, ...]


@dataclass(frozen=True, slots=True)
class Made:
    """One token, whether it had been guessed, and how many guesses of its step were not right."""

    sampled: Sampled
    guessed: bool = False
    rejected: int = 0


@dataclass(frozen=True, slots=True)
class Searched:
    """How far a search has come."""

    tokens: int  # that were computed for each beam


Event = PromptScores | Adopted | Made | Searched | Hypothesis | Finished | BatonError
Emit = Callable[[Event], None]


class CallAhead:
    """The call that others begin with, as they see it: they go on from the prompt that it has computed or read."""

    def __init__(self, expected: int = 0) -> None:
        self.expected = expected  # how many begin with it
        self.forks: list[Sequence] = []  # those that have come and that the engine does not have
        self.begun = False  # its task runs before theirs, unless it was cancelled before
        self.settled = asyncio.Event()  # the engine has those that it will get with this call
        self.refusal: BatonError | None = None  # why the call was not placed

    def settle(self, refusal: BatonError | None = None) -> None:
        if not self.settled.is_set():
            self.refusal = refusal
            self.settled.set()


@dataclass(eq=False, slots=True)
class DecodeCall:
    seq: Sequence
    request_id: str
    handle: KvHandle | None
    emit: Emit
    first: "asyncio.Future[int] | None" = None  # of a live call: resolves to the first token
    span: TraceSpan = NO_SPAN
    ahead: CallAhead = field(default_factory=CallAhead)  # for the calls that begin with this one
    forked: bool = False  # it begins with another
    told: bool = False  # how much of its prompt was cached
    state: CallState = CallState.ARRIVED
    fetch: Fetch | None = None  # what was opened and is not settled
    filling: list[int] = field(default_factory=list)  # blocks that the engine gave up and the fetch may still write into
    handoff: Handoff = field(default_factory=Handoff)
    over: asyncio.Event = field(default_factory=asyncio.Event)  # set by `end`

    def before_first_token(self) -> bool:
        return self.first is not None and not self.first.done()

    def move(self, event: str) -> None:
        self.state = MOVES.after(self.state, event, f"call {self.request_id}")

    def begin(self, fetch: Fetch) -> None:
        self.move("fetch")
        self.fetch = fetch

    def verified(self) -> None:
        self.move("verify")
        self.fetch = None

    def end(self) -> None:
        self.move("end")
        self.over.set()

    @property
    def is_over(self) -> bool:
        """Whether the engine has told everything."""
        return self.state in (CallState.LEAVING, CallState.ENDED)

    def fail(self, error: BatonError) -> None:
        self.emit(error)
        self.span.end(error.reason.name)
