"""Guesses in simulated engines. How many a step gets decide the engine's own `Paced` and `Chosen`; what a guess is worth and takes is a
model.

A modelled token is its position, so who knows the sequence knows what is right. Whether a guess is right is a property of the text, not of
who asks for how many: at each position of an output the method guesses right, guesses wrong, or has no answer, as in a Markov chain:

    after a right guess      the next one is right with the chance `further`, else wrong
    after any other          there is an answer with the chance `answers` n / (n + `half`), where the output has n tokens, and it is right
                             with the chance `first`

What looks for an answer in what was said before finds more of them the more that is: `half` tokens have half of the answers. An output
begins as after a wrong guess. So right ones come in runs, as where a text repeats itself, and some answers have more of them than others.
Which position is which follows from the prompt alone: an answer is the same wherever, and however often, it is computed.
"""

import math
from array import array
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from itertools import accumulate

from baton.engine.core.drafting import Chosen, Drafter, DraftRequest, Paced
from baton.engine.core.prompt_lookup import PromptLookup
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.core.step_costs import DraftCosts, Drafting, Line, Upkeep
from baton.profile.models import CHANCES, KNOWN_ROWS, Work
from baton.simulate.jumps import VOCABULARY

LEAST_S = 1e-9  # of a step
ROWS = (1, 2, 3, 4, 6, 8, 16, 32, 64, 128)  # of the steps whose times `Paced` knows
DRAFTED = 4  # guesses of the drafts with several that an engine measures, at most
FAR = 1024  # tokens of a context whose price is asked for


@dataclass(frozen=True, slots=True)
class GuessChances:
    """See above. Raises ValueError for what is no chance."""

    answers: float = 1.0
    half: float = 0.0  # tokens
    first: float = 0.0
    further: float = 0.0

    def __post_init__(self) -> None:
        for name in CHANCES:
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: {getattr(self, name)!r} is no chance")
        if not 0 <= self.half < math.inf:
            raise ValueError(f"half: {self.half!r} is no number of tokens")

    def answers_at(self, tokens: int) -> float:
        """The chance of an answer after so many tokens of an output."""
        return self.answers * share_of(tokens, self.half)


def share_of(tokens: int, half: float) -> float:
    """The share, of the answers that there are in the end, that there is after so many tokens."""
    return tokens / (tokens + half) if half else 1.0


class Guess(Enum):
    RIGHT, WRONG, NONE = range(3)


class GuessedText:
    """One output, as it is guessed."""

    def __init__(self, prompt: Seq[int], chances: GuessChances) -> None:
        self._chances, self._begin = chances, len(prompt)
        self._key = blake2b(array("q", prompt).tobytes(), digest_size=16).digest()
        self._next, self._last = len(prompt), Guess.WRONG  # the first position that is not known, and what the one before it is
        self._ahead: list[Guess] = []  # those before `_next`, as far as they have been asked for and not passed

    def at(self, start: int, count: int) -> list[Guess]:
        """What is guessed at so many positions from `start` on, of which no later call asks for an earlier one."""
        del self._ahead[: max(0, len(self._ahead) - (self._next - start))]
        while self._next < start + count:
            self._last = self._drawn()
            self._next += 1
            if self._next > start:
                self._ahead.append(self._last)
        return self._ahead[:count]

    def _drawn(self) -> Guess:
        drawn, chances = self._chance(), self._chances
        answers = chances.answers_at(self._next - self._begin)
        if self._last is Guess.RIGHT:
            return Guess.RIGHT if drawn < chances.further else Guess.WRONG
        if drawn >= answers:
            return Guess.NONE
        return Guess.RIGHT if drawn < answers * chances.first else Guess.WRONG

    def _chance(self) -> float:
        digest = blake2b(self._next.to_bytes(8, "big"), digest_size=8, key=self._key).digest()
        return int.from_bytes(digest, "big") / (1 << 64)


def looked_up(prompt: Seq[int], output: Seq[int]) -> list[Guess]:
    """What the method prompt_lookup guesses at each position of an output from the second token on."""
    lookup, found = PromptLookup(), list[Guess]()
    seq = Sequence("", [*prompt, output[0]], len(prompt), SamplingParams(max_tokens=len(output)), b"")
    for token in output[1:]:
        (guess,) = lookup.propose([DraftRequest(seq, 1)])
        found.append(Guess.NONE if not guess else Guess.RIGHT if guess[0] == token else Guess.WRONG)
        seq.tokens.append(token)
    return found


class ModelledDrafter(Drafter):
    """Always as many guesses as it is asked for, or none."""

    def __init__(self, name: str, chances: GuessChances, costs: DraftCosts) -> None:
        self.name, self._chances, self._costs = name, chances, costs
        self._texts: dict[Sequence, GuessedText] = {}

    @property
    def remembered(self) -> int:
        return len(self._texts)

    def propose(self, asks: Seq[DraftRequest]) -> list[Seq[int]]:
        return [self._guesses(ask.seq, ask.most) for ask in asks]

    def drafting(self, sequences: int) -> Drafting:
        return self._costs.at(sequences)

    def forget(self, seq: Sequence) -> None:
        self._texts.pop(seq, None)

    def _guesses(self, seq: Sequence, most: int) -> list[int]:
        if (text := self._texts.get(seq)) is None:
            text = self._texts[seq] = GuessedText(seq.tokens[: seq.prompt_len], self._chances)
        found, start = text.at(len(seq.tokens), most), len(seq.tokens)
        if found[0] is Guess.NONE:
            return []
        return [(start + i + (each is not Guess.RIGHT)) % VOCABULARY for i, each in enumerate(found)]


@dataclass(frozen=True, slots=True)
class StepPrices:
    """What `Paced` knows of steps."""

    step: Line
    upkeep: Upkeep
    drafts: DraftCosts

    @classmethod
    def known(cls, numbers: Mapping[str, float], bound: int) -> "StepPrices":
        """What an engine has measured when it started. `numbers`: of the model `known` of a profile. Raises ValueError for fewer than two
        sizes of steps."""
        points = tuple((rows, numbers[name]) for rows in KNOWN_ROWS if numbers[name := f"rows_{rows}"])
        if len(points) < 2:
            raise ValueError("models.known: two of rows_1, rows_2, … are the least")
        one, several = (Line(tuple((count, numbers[f"{name}_{count}"]) for count in (1, 8))) for name in ("draft", "drafts"))
        upkeep = Upkeep(*(numbers[name] for name in Upkeep._fields))
        return cls(Line(points), upkeep, DraftCosts(one, several, min(DRAFTED, bound)) if bound > 1 else DraftCosts(one))

    @classmethod
    def of(cls, pace: Callable[[Work], float]) -> "StepPrices":
        """What it would know if it knew what steps take."""
        alone, two = pace(Work(decodes=1)), pace(Work(decodes=1, guesses=1))
        sequence = max(0.0, pace(Work(decodes=2)) - two)  # more than one of its rows takes
        seconds = accumulate((max(LEAST_S, pace(Work(decodes=1, guesses=rows - 1)) - sequence) for rows in ROWS), max)
        token = max(0.0, pace(Work(decodes=1, context=FAR)) - alone) / FAR
        guess_token = max(0.0, pace(Work(decodes=1, guesses=1, guess_context=FAR)) - two) / FAR
        draft_s = max(0.0, pace(Work(decodes=1, guesses=1, drafts=1)) - two)
        one, several = (Line(((1, count * draft_s), (2, count * draft_s))) for count in (1, DRAFTED))
        upkeep = Upkeep(sequence, token, guess_token=guess_token)
        return cls(Line(tuple(zip(ROWS, seconds, strict=True))), upkeep, DraftCosts(one, several, DRAFTED))


def drafter_of(
    method: str, bound: int, chances: GuessChances, pace: Callable[[Work], float], known: Mapping[str, float] | None = None
) -> Drafter:
    """Who guesses in an engine whose steps take what `pace` says, and which decides by what is `known`; None: by what they take. `bound`:
    guesses of a sequence in a step, at most."""
    prices = StepPrices.of(pace) if known is None else StepPrices.known(known, bound)
    modelled = ModelledDrafter(method, chances, prices.drafts)
    return Chosen({method: Paced(modelled, bound, prices.step, upkeep=prices.upkeep)}, method, bound)
