"""Measures guesses, from outside, on a cluster whose engines guess: how often they are right, and what they take.

    answers   to prompts of random tokens, by the method that is configured. What prompt_lookup guesses follows from the text alone, so it
              is asked itself at each position. The other methods have always an answer; how often it is right the tokens tell: whether
              they had been guessed, and how many guesses beside them were wrong.
    costs     one answer alone, and several that go on from one prompt, step by step together: without guesses, then with a prediction
              that is right throughout, so that each step verifies as many guesses as it may, and by the method. What a step takes more
              than without guesses is what they take.

How often guesses are right depends on what is said. Answers to random prompts stand for no other text: the profile says what was measured,
and a prediction repeats it.

What an engine itself has measured when it started, and decides by, its log says: another machine's moment would decide otherwise.

Time is the processor's of the engine's thread, where one thread computes alone: a small model's steps are shorter than a token's way to the
client, whose moments say nothing of them.
"""

import asyncio
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Any, NamedTuple, Protocol

from baton.client import Token
from baton.predict.asker import Heard
from baton.profile.fit import DRAWS, fit
from baton.profile.models import KNOWN_ROWS, Fitted
from baton.simulate.guesses import Guess, looked_up, share_of

NUMBERS = ("plain", "guess", "guess_context", "draft")
OF_METHOD = ("speculation", "draft_model", "draft_dtype", "speculation_branches")  # keys of engine
TOGETHER = 4  # answers that are asked for at a time
SHORT = 4  # tokens of an answer that is as good as none
LEAST_S = 1e-6
SAID = "how many guesses a step gets follows from: "  # by `baton.engine.speculation`, before JSON
HALVES = (0.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


class Asks(Protocol):
    """Who sends prompts: `baton.predict.asker.Asker`."""

    def prompt(self, tokens: int) -> list[int]: ...

    async def ask(self, prompt: Sequence[int], tokens: int, **how: Any) -> Heard:
        """`how`: further arguments of the client."""
        ...


@dataclass(frozen=True, slots=True)
class GuessAmount:
    """How much of them is measured."""

    answers: int = 24
    tokens: int = 96  # of each
    prompt: int = 64
    batches: tuple[int, ...] = (1, 4)
    limits: tuple[int, ...] = (1, 3, 8)  # guesses of a sequence in a step
    contexts: tuple[int, ...] = (32, 384)
    steps: tuple[int, int] = (64, 512)  # at least and at most, of an answer without guesses whose time is taken
    seconds: float = 0.2  # of such an answer
    repeats: int = 2


GUESSES = GuessAmount()


class GuessedStep(NamedTuple):
    known: int  # tokens of the output before it
    right: int
    wrong: int

    @property
    def guesses(self) -> int:
        return self.right + self.wrong


@dataclass(slots=True)
class GuessCount:
    """What one answer says of its guesses."""

    asked: Counter[int] = field(default_factory=Counter)  # by tokens of the output: questions after a guess that was not right
    answered: Counter[int] = field(default_factory=Counter)  # of these
    right: int = 0  # of these answers
    went_on: int = 0  # guesses after a right one
    right_again: int = 0

    def note(self, known: int, before: Guess, here: Guess) -> None:
        if before is Guess.RIGHT:
            self.went_on += 1
            self.right_again += here is Guess.RIGHT
        else:
            self.asked[known] += 1
            self.answered[known] += here is not Guess.NONE
            self.right += here is Guess.RIGHT


@dataclass(slots=True)
class HeardGuesses:
    """`rows`: for the fit of the numbers of a step. `most`: guesses of a sequence in a step."""

    most: int
    source: str
    counts: list[GuessCount] = field(default_factory=list)
    rows: list[tuple[Mapping[str, float], float]] = field(default_factory=list)
    known: dict[str, float] = field(default_factory=dict)  # numbers of the model of that name; empty: the engine did not say


def without_guesses(settings: Mapping[str, str]) -> dict[str, str]:
    """The same configuration, of engines that do not guess."""
    return {key: value for key, value in settings.items() if key not in {f"engine.{name}" for name in OF_METHOD}}


async def measure_guesses(asker: Asks, amount: GuessAmount, method: str, most: int, clock: Callable[[], float]) -> HeardGuesses:
    """`most`: guesses of a sequence in a step. `clock`: seconds of the engine so far. Raises GenerateError."""
    texts = f"{amount.answers} answers of {amount.tokens} tokens to prompts of {amount.prompt} random tokens at temperature 0"
    found = HeardGuesses(most, f"{texts}, by {method}")
    for begun in range(0, amount.answers, TOGETHER):
        prompts = [asker.prompt(amount.prompt) for _ in range(min(TOGETHER, amount.answers - begun))]
        heards = await asyncio.gather(*(asker.ask(prompt, amount.tokens) for prompt in prompts))
        for prompt, heard in zip(prompts, heards, strict=True):
            if method == "prompt_lookup":
                found.counts.append(count_text(looked_up(prompt, heard.result.token_ids)))
            else:
                found.counts.append(count_steps(steps_of(heard.tokens)))
    for context, batch in product(amount.contexts, amount.batches):
        prompt, before = asker.prompt(context), clock()
        await asker.ask(prompt, amount.steps[0])
        tokens = max(amount.steps[0], min(amount.steps[1], int(amount.steps[0] * amount.seconds / max(LEAST_S, clock() - before))))
        said = (await asker.ask(prompt, tokens)).result.token_ids
        timed = _Timed(asker, clock, prompt, tokens, batch, amount.repeats)
        plain = await timed.row({"speculation": {"method": "none"}}, 0.0, False)
        found.rows.append(plain)
        for limit in sorted({min(limit, most) for limit in amount.limits}):
            how = {"speculation": {"max_tokens": limit}, "prediction": said}
            found.rows.append(await timed.row(how, plain[1], False))
        found.rows.append(await timed.row({}, plain[1], True))
    return found


@dataclass(frozen=True, slots=True)
class _Timed:
    """An answer, as many times as `batch` says, which take the same steps together. What it takes more than a short one is what its steps
    take."""

    asker: Asks
    clock: Callable[[], float]
    prompt: Sequence[int]
    tokens: int
    batch: int
    repeats: int

    async def row(self, how: Mapping[str, Any], plain: float, drafted: bool) -> tuple[Mapping[str, float], float]:
        """What an average step has, and its seconds. `plain`: those of one without guesses; 0: this one is."""
        seconds, guesses, context = min([await self._step(how) for _ in range(self.repeats)])
        drafts = guesses / self.batch if drafted else 0.0
        return {"plain": plain or seconds, "guess": guesses, "guess_context": context, "draft": drafts}, seconds

    async def _step(self, how: Mapping[str, Any]) -> tuple[float, float, float]:
        """Seconds of a step, guesses, and the tokens before them."""
        short, long = [await self._spent(tokens, how) for tokens in (SHORT, self.tokens)]
        seconds, steps, guesses, context = (more - less for more, less in zip(long, short, strict=True))
        return max(LEAST_S, seconds) / steps, self.batch * guesses / steps, self.batch * context / steps

    async def _spent(self, tokens: int, how: Mapping[str, Any]) -> tuple[float, int, int, int]:
        """Seconds, steps, and of one answer the guesses and the tokens before them."""
        before = self.clock()
        heard = await self.asker.ask(self.prompt, tokens, n=self.batch, **how)
        seconds, steps = self.clock() - before, steps_of([token for token in heard.tokens if not token.choice])
        context = sum(step.guesses * (len(self.prompt) + step.known) for step in steps)
        return seconds, len(steps), sum(step.guesses for step in steps), context


def steps_of(tokens: Sequence[Token]) -> list[GuessedStep]:
    """The steps of an answer after its first token. The last token of each had not been guessed, or ended the answer."""
    found, right, wrong, begun = list[GuessedStep](), 0, 0, 1
    for place, token in enumerate(tokens[1:], 1):
        right, wrong = right + token.guessed, wrong + token.rejected
        if not token.guessed or place == len(tokens) - 1:
            found.append(GuessedStep(begun, right, wrong))
            right, wrong, begun = 0, 0, place + 1
    return found


def count_text(guesses: Iterable[Guess]) -> GuessCount:
    """Counts for an answer in which each position from the second token on is known."""
    count, before = GuessCount(), Guess.WRONG
    for known, here in enumerate(guesses, 1):
        count.note(known, before, here)
        before = here
    return count


def count_steps(steps: Iterable[GuessedStep]) -> GuessCount:
    """Counts for an answer by a method that always guesses. What follows a draft that was right throughout was not asked for."""
    count, follows_wrong = GuessCount(), 1  # the position after one that was not guessed right
    for step in steps:
        here = [Guess.RIGHT] * step.right + [Guess.WRONG] * (step.wrong > 0)
        if here and step.known == follows_wrong:
            count.note(step.known, Guess.WRONG, here[0])
        for place, (before, after) in enumerate(pairwise(here), 1):
            count.note(step.known + place, before, after)
        follows_wrong = step.known + len(here) if step.wrong else 0
    return count


def guess_models(models: Mapping[str, Fitted], heard: HeardGuesses) -> dict[str, Fitted]:
    """The models of a profile with what was measured of guesses. Raises ValueError if that was too little."""
    cost = fit(heard.rows, NUMBERS, "")
    step = models["step"]
    draws = tuple({**draw, **_priced(more)} for draw, more in zip(step.draws, cost.draws, strict=True))
    whole = Fitted({**step.values, **_priced(cost.values)}, draws, step.error, step.rows + cost.rows, f"{step.source}; guesses beside them")
    found = {**models, "step": whole, "guesses": chances_of(heard.counts, heard.source)}
    return found | ({"known": Fitted(heard.known, source="what the engine had measured")} if heard.known else {})


def known_of(log: str) -> dict[str, float]:
    """What a worker's log says that its engine decides by; empty if it says nothing."""
    _, marked, after = log.rpartition(SAID)
    if not marked:
        return {}
    told, _ = json.JSONDecoder().raw_decode(after)
    found = {f"rows_{rows}": seconds for rows, seconds in told["step"] if rows in KNOWN_ROWS}
    found |= zip(("sequence", "token", "guess", "guess_token"), told.get("beside", ()), strict=False)
    for name in ("draft", "drafts"):
        found |= {f"{name}_{count}": seconds for count, seconds in told.get(name, ()) if count in (1, 8)}
    return found


def _priced(values: Mapping[str, float]) -> dict[str, float]:
    return {name: values[name] for name in NUMBERS[1:]}


def chances_of(counts: Sequence[GuessCount], source: str, seed: int = 0) -> Fitted:
    """See `baton.simulate.guesses`. The draws are a bootstrap over the answers."""
    rng = random.Random(seed)
    draws = tuple(_chances([rng.choice(counts) for _ in counts]) for _ in range(DRAWS))
    return Fitted(_chances(counts), draws, 0.0, sum(sum(count.asked.values()) + count.went_on for count in counts), source)


def _chances(counts: Sequence[GuessCount]) -> dict[str, float]:
    """Those that are likeliest; what was never seen never happens."""
    asked, answered = Counter[int](), Counter[int]()
    for count in counts:
        asked.update(count.asked)
        answered.update(count.answered)
    right, went_on, again = (sum(getattr(count, name) for count in counts) for name in ("right", "went_on", "right_again"))
    _, half, answers = max(((*_answers(asked, answered, half),) for half in HALVES), key=lambda each: (each[0], -each[1]))
    first = right / total if (total := answered.total()) else 0.0
    return {"answers": answers, "half": half, "first": first, "further": again / went_on if went_on else first}


def _answers(asked: Counter[int], answered: Counter[int], half: float) -> tuple[float, float, float]:
    """How likely that is with this half, the half, and the share of answers with which it is likeliest, nearly."""
    expected = sum(count * share_of(known, half) for known, count in asked.items())
    answers = min(1.0, answered.total() / expected) if expected else 0.0
    likely = 0.0
    for known, count in asked.items():
        chance = min(1 - 1e-9, max(1e-9, answers * share_of(known, half)))
        likely += answered[known] * math.log(chance) + (count - answered[known]) * math.log(1 - chance)
    return likely, half, answers
