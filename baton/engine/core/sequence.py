"""A request inside the engine: few stored facts, the rest derived.

Two lengths say everything: `len(tokens)`, the tokens that are known, and `computed`, the positions whose KV is in `blocks`. A prefill, a
chunk of a prefill, a decode step, a resumed sequence, and a sequence whose KV came wholly or partly from elsewhere are all the same
subtraction, `pending`.
"""

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from baton.engine.core.masks import NOTHING, Matcher, Words, without
from baton.engine.core.sampling import SamplingParams
from baton.moves import Moves


class State(Enum):
    WAITING = "waiting"  # in the scheduler's queue, or for the prompt of the sequence that it is forked from; owns no block
    FETCHING = "fetching"  # owns blocks that another worker's KV is being copied into
    RUNNING = "running"
    SEARCHING = "searching"  # its beams run in its place
    HELD = "held"  # prompt computed; blocks pinned for a reader
    DONE = "done"


class Finish(Enum):
    STOP = "stop"
    LENGTH = "length"


# (state, event) → state. Every move goes through Sequence.move; a pair that is not here changes nothing and raises.
MOVES = Moves(
    {
        (State.WAITING, "admit"): State.RUNNING,
        (State.WAITING, "reserve"): State.FETCHING,
        (State.WAITING, "abort"): State.DONE,
        (State.FETCHING, "arrive"): State.FETCHING,
        (State.FETCHING, "adopt"): State.RUNNING,
        (State.FETCHING, "give_up"): State.WAITING,
        (State.FETCHING, "abort"): State.DONE,
        (State.RUNNING, "preempt"): State.WAITING,
        (State.RUNNING, "hold"): State.HELD,
        (State.RUNNING, "finish"): State.DONE,
        (State.RUNNING, "abort"): State.DONE,
        (State.RUNNING, "branch"): State.SEARCHING,
        (State.SEARCHING, "preempt"): State.WAITING,
        (State.SEARCHING, "finish"): State.DONE,
        (State.SEARCHING, "abort"): State.DONE,
        (State.HELD, "release"): State.DONE,
    }
)


class Meets(Protocol):
    """A load of later blocks of a running sequence: `baton.engine.core.meeting`."""

    def take(self, computed: int, most: int) -> int: ...


@dataclass(eq=False, slots=True)
class Sequence:
    id: str
    tokens: list[int]
    prompt_len: int  # the client's prompt; the tokens after it are output, from an earlier attempt or from this engine
    params: SamplingParams
    root: bytes  # parent of the first block key
    hold: bool = False  # prefill worker: keep the blocks after the first token
    computed: int = 0
    drafted: int = 0  # leading positions of which a draft's KV is in `blocks`, too (see `KvLayout.draft`); at most one more than `computed`
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)  # of the blocks that known tokens fill, as far as the keys have been computed
    sealed: int = 0  # leading blocks that are in the prefix cache
    state: State = State.WAITING
    began: int = 0  # `computed` when it was last admitted or adopted
    cached: int = 0  # prompt tokens found in the prefix cache at first admission
    reached: int = 0  # the highest value of `computed` so far: below it, work is done again
    recomputed: int = 0  # positions computed again because a preemption threw their KV away
    prefilled: int = 0  # positions computed here, for the first time, before the last token that was known on arrival
    preemptions: int = 0
    arrival: int | None = None  # place in the order in which sequences get room; a preemption does not change it
    arrived_with: int = 0  # len(tokens) on arrival
    started_at: float | None = None  # the caller's clock when the first chunk was scheduled
    sought: int | None = None  # leading blocks that were in the pool when the next ones were last looked up in colder tiers
    scored: int = 0  # tokens of the prompt that have been scored and told
    expires_at: float = math.inf  # on the same clock: from then on no client waits for it, and it is not started
    matcher: Matcher | None = None  # of `params.structured` and `params.thinking`
    owner: "Sequence | None" = field(default=None, repr=False)  # of a beam: the sequence that it searches for
    long: bool = False  # it has a window of blocks; those before it are in a tier (`core.long_contexts`)
    away: int = 0  # how many these are: `blocks` begins with the next one
    meets: Meets | None = None  # a load of blocks that it has not reached
    losses: int = 0  # how often some of them were lost
    guessed: bool = False  # a version of a sequence in which guesses count as known; what follows a wrong one does not matter

    def __post_init__(self) -> None:
        self.arrived_with = len(self.tokens)

    @property
    def pending(self) -> int:
        """Tokens that are known and not computed."""
        return len(self.tokens) - self.computed

    def room(self, block_size: int) -> int:
        """Positions for which it has blocks, here or away."""
        return (self.away + len(self.blocks)) * block_size

    @property
    def decoding(self) -> bool:
        """One step samples the next token."""
        return self.pending == 1

    @property
    def prefilling(self) -> bool:
        return self.pending > 1

    @property
    def branches(self) -> bool:
        """Whether it is to become several beams on this worker."""
        return self.params.beams is not None and self.owner is None and not self.hold

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def remaining(self) -> int:
        """Tokens that may still be sampled."""
        return self.params.max_tokens - self.output_len

    @property
    def unscored(self) -> bool:
        """Whether tokens of the prompt are still to be scored: then all of it is computed here."""
        return self.params.prompt_logprobs is not None and self.scored < self.prompt_len - 1

    def words(self, eos: frozenset[int]) -> Words | None:
        """The tokens that may be sampled next; None for all, NOTHING for none. An early end is not among them, unless nothing else is."""
        if self.matcher is None:
            return None
        words = self.matcher.mask(self.tokens[self.prompt_len :])
        if words is None or words is NOTHING:
            return None if self.guessed else NOTHING
        young, ended = self.output_len < self.params.min_tokens, self.params.structured is not None  # an end ends a document for good
        early = self.params.stop_token_ids | eos if young else eos if self.params.ignore_eos and ended else frozenset[int]()
        words = without(words, sorted(early)) if early else words
        return None if self.params.thinking is not None and (words == -1).all() else words  # outside its closing it allows all

    def move(self, event: str) -> None:
        self.state = MOVES.after(self.state, event, f"sequence {self.id}")


def finish_reason(seq: Sequence, eos: frozenset[int], max_len: int) -> Finish | None:
    """Why the sequence ends after its last token; None to go on."""
    last, params = seq.tokens[-1], seq.params
    if params.beams is not None:
        return None  # this token is nobody's: the search has its own
    if params.structured is not None and last in eos:
        return Finish.STOP  # the document is complete, and nothing may follow
    if seq.output_len >= params.min_tokens and (last in params.stop_token_ids or (last in eos and not params.ignore_eos)):
        return Finish.STOP
    if seq.remaining <= 0 or len(seq.tokens) >= max_len:
        return Finish.LENGTH
    return None
