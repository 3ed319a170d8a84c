"""The models of a profile: which numbers each has, and what follows from them. All times are seconds.

    step      of an engine, from what it computes (`Work`); guess for each guess that it verifies, guess_context for each token before
              one, draft for each place of a draft
    guesses   no times, but chances, and tokens: see `baton.simulate.guesses`
    known     what an engine that guesses has measured of its own steps when it started, and decides by (`baton.engine.measure_steps`): its
              `Line` (rows_1, …), its `Upkeep` (sequence to guess_token), and drafts with one guess and with several, for one sequence and
              for eight. 0: not measured
    handoff   KV from a prefill worker to a decode worker: base + byte * bytes
    router    processor time of the router: request + token * output tokens
    worker    processor time of a worker beside its steps: request + token * output tokens; lend, of a prefill worker for a handoff, and
              fetch, of a decode worker
    client    processor time of who asks, where that shares the cores: request + token * output tokens
    path      time that a request and its first token travel and wait where nothing computes: request
    start     from the start of a worker to its first request: base
    sharing   how fast one of two busy cores goes, where 1 is as if alone (`baton.simulate.cores.Speeds`): pair, while both compute prompts;
              decode, while both decode; prompt_beside, with a prompt while the other decodes; decode_beside, with a decode meanwhile. One
              that is 0 is as pair
    crowding  how fast a step goes on one of two busy cores while the other does anything but a step: prompt, decode. The threads of a
              cluster wake each other for each message, often on the core where a step is computed, though the other is free. Its
              error is that of the times of whole loads
    tier_…    memory, or disk, for KV that has left a worker's pool (`baton.simulate.tiers.TierPace`): a load takes base + byte * bytes;
              write: processor time of writing a byte

A step is a sum of what it computes, because a core computes one thing after the other: a constant (what a step costs by itself: weights
that are read once, a call for each layer), the tokens of prompts (matrices), the pairs of a token with an earlier one (attention), the
sequences that decode, and the tokens of their contexts, whose KV is read. On a device whose memory and arithmetic work side by side, it
takes what the slower of the two takes (Williams et al., "Roofline", 2009): `form` says which.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

Form = Literal["sum", "roof"]
PAIR, TIER = ("request", "token"), ("base", "byte", "write")
KNOWN_ROWS = (1, 2, 3, 4, 6, 8, 16, 32, 64)
# The numbers of each model. Those of a step's `Work` have its names; `read` is time of memory, where the form is a roof.
NUMBERS: Mapping[str, tuple[str, ...]] = {
    "step": ("step", "read", "tokens", "pairs", "decodes", "context", "mixed", "guess", "guess_context", "draft"),
    "handoff": ("base", "byte"),
    "router": PAIR,
    "worker": (*PAIR, "lend", "fetch"),
    "client": PAIR,
    "path": ("request",),
    "start": ("base",),
    "sharing": ("pair", "decode", "prompt_beside", "decode_beside"),
    "crowding": ("prompt", "decode"),
    "tier_memory": TIER,
    "tier_disk": TIER,
    "guesses": ("answers", "half", "first", "further"),
    "known": (
        *(f"rows_{rows}" for rows in KNOWN_ROWS), "sequence", "token", "guess", "guess_token",
        "draft_1", "draft_8", "drafts_1", "drafts_8",
    ),
}  # fmt: skip
OF_GUESSES = ("guesses", "known")  # nothing that takes time follows from them
CHANCES = ("answers", "first", "further")
OF_LOADS = ("step", "handoff", "router", "worker", "client", "path")  # the times of a load are made of theirs
OF_TIERS = ("tier_memory", "tier_disk")  # measured only where there are such tiers


class Work(NamedTuple):
    """What one step computes."""

    tokens: int = 0  # of prompts
    pairs: float = 0.0  # of a token of a prompt with itself or one before it
    decodes: int = 0  # sequences that decode
    context: int = 0  # tokens before those
    guesses: int = 0  # that are verified beside them
    guess_context: int = 0  # tokens before those
    drafts: int = 0  # of those, of the sequence with the most: who drafts does so in so many steps of its own

    @property
    def mixed(self) -> bool:
        """Prompts and decodes at once."""
        return bool(self.tokens and self.decodes)


def pairs_of(tokens: int, cached: int) -> float:
    """The pairs of `tokens` new positions after `cached` ones."""
    return tokens * cached + tokens * (tokens + 1) / 2


def step_seconds(numbers: Mapping[str, float], form: Form, work: Work) -> float:
    tokens, pairs, decodes, context, guesses, guess_context, drafts = work
    apart = numbers["mixed"] if tokens and decodes else 0.0  # what nothing else hides
    rows = numbers["tokens"] * tokens + numbers["decodes"] * decodes + numbers["pairs"] * pairs
    read = numbers["read"] + numbers["context"] * context
    if guesses:
        rows += numbers["guess"] * guesses + numbers["guess_context"] * guess_context
        apart += numbers["draft"] * drafts
    return numbers["step"] + apart + (rows + read if form == "sum" else max(rows, read))


def decode_seconds(numbers: Mapping[str, float], form: Form, decodes: int, context: int, steps: int) -> list[float]:
    """The `step_seconds` of so many steps in which the same sequences decode, equal to the last bit. `context`: of the first."""
    zero = Work(decodes=decodes)
    rows = numbers["tokens"] * zero.tokens + numbers["decodes"] * decodes + numbers["pairs"] * zero.pairs
    read, each, step = numbers["read"], numbers["context"], numbers["step"] + 0.0
    contexts = range(context, context + steps * decodes, decodes)
    if form == "sum":
        return [step + (rows + (read + each * now)) for now in contexts]
    return [step + max(rows, read + each * now) for now in contexts]


def works_of_prompt(tokens: int, cached: int, chunk: int) -> list[Work]:
    """The steps that compute a prompt with nothing else: `cached` of its tokens are known, `chunk` fit into a step."""
    works = []
    while cached < tokens:
        now = min(chunk, tokens - cached)
        works.append(Work(now, pairs_of(now, cached)))
        cached += now
    return works


@dataclass(frozen=True, slots=True)
class Fitted:
    """One model. `draws`: other values that the measurements allow as well (from the bootstrap). `error`: relative; standard deviation of
    what was not fitted around what the model says of it."""

    values: Mapping[str, float]
    draws: tuple[Mapping[str, float], ...] = ()
    error: float = 0.0
    rows: int = 0  # measurements; 0: it is assumed
    source: str = ""
