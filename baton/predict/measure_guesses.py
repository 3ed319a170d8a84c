"""Measures guesses, from outside, on a cluster whose engines guess: how often they are right, and what they take.

    answers   to prompts of random tokens, one after the other, by the method that is configured. Tokens say whether they had been guessed
              and how many guesses beside them were wrong, so each step is known. `chances_of` finds the chances of `baton.simulate.guesses`
              in them.
    costs     the same answers in batches: without guesses, then with a prediction that is right throughout, so that each step verifies as
              many guesses as it may, and by the method. What a step takes more than without guesses is what they take.

How often guesses are right depends on what is said. Answers to random prompts stand for no other text: the profile says what was measured,
and a prediction repeats it.
"""

import asyncio
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from baton.answer import Token
from baton.profile.fit import DRAWS, fit
from baton.profile.models import Fitted

if TYPE_CHECKING:
    from baton.predict.measure import Asker, Heard

NUMBERS = ("plain", "guess", "draft")
OF_METHOD = ("speculation", "draft_model", "draft_dtype", "speculation_branches")  # keys of engine
DOUBLINGS = 3  # as `baton.engine.core.drafting` has it


@dataclass(frozen=True, slots=True)
class GuessAmount:
    """How much of them is measured."""

    answers: int = 24
    tokens: int = 96  # of each
    prompt: int = 64
    batches: tuple[int, ...] = (1, 4)
    limits: tuple[int, ...] = (1, 3, 8)  # guesses of a sequence in a step


GUESSES = GuessAmount()


@dataclass(frozen=True, slots=True)
class GuessedStep:
    at: float  # when its tokens came
    known: int  # tokens of the output before it
    right: int
    wrong: int

    @property
    def guesses(self) -> int:
        return self.right + self.wrong


@dataclass(slots=True)
class HeardGuesses:
    """`rows`: for the fit of the numbers of a step. `most`: guesses of a sequence in a step."""

    most: int
    source: str
    answers: list[list[GuessedStep]] = field(default_factory=list)
    rows: list[tuple[Mapping[str, float], float]] = field(default_factory=list)


def without_guesses(settings: Mapping[str, str]) -> dict[str, str]:
    """The same configuration, of engines that do not guess."""
    return {key: value for key, value in settings.items() if key not in {f"engine.{name}" for name in OF_METHOD}}


def steps_of(tokens: Sequence[Token], times: Sequence[float]) -> list[GuessedStep]:
    """The steps of an answer after its first token. The last token of each had not been guessed, or ended the answer."""
    found, right, wrong, begun = list[GuessedStep](), 0, 0, 1
    for place, token in enumerate(tokens[1:], 1):
        right, wrong = right + token.guessed, wrong + token.rejected
        if not token.guessed or place == len(tokens) - 1:
            found.append(GuessedStep(times[place], begun, right, wrong))
            right, wrong, begun = 0, 0, place + 1
    return found


async def measure_guesses(asker: "Asker", amount: GuessAmount, most: int) -> HeardGuesses:
    """`most`: guesses of a sequence in a step. Raises GenerateError, and ValueError if answers have too few steps."""
    source = f"{amount.answers} answers of {amount.tokens} tokens to prompts of {amount.prompt} random tokens at temperature 0"
    found = HeardGuesses(most, source)
    for _ in range(amount.answers):
        heard = await asker.ask(asker.prompt(amount.prompt), amount.tokens)
        found.answers.append(steps_of(heard.tokens, heard.times))
    for batch in amount.batches:
        prompts = [asker.prompt(amount.prompt) for _ in range(batch)]
        plain = await _together(asker, amount, prompts, {"speculation": {"method": "none"}})
        seconds, _, _ = _step(plain)
        found.rows.append(({"plain": seconds}, seconds))
        said = [heard.result.token_ids for heard in plain]
        for limit in sorted({min(limit, most) for limit in amount.limits}):
            told = await _together(asker, amount, prompts, {"speculation": {"max_tokens": limit}}, said)
            found.rows.append(_row(seconds, told, drafted=False))
        found.rows.append(_row(seconds, await _together(asker, amount, prompts, {}), drafted=True))
    return found


async def _together(
    asker: "Asker", amount: GuessAmount, prompts: Sequence[Sequence[int]], how: Mapping[str, Any], said: Sequence[Sequence[int]] = ()
) -> list["Heard"]:
    """`said`: what the answers will be."""
    asks = [{**how, "prediction": said[i]} if said else how for i in range(len(prompts))]
    return await asyncio.gather(*(asker.ask(prompt, amount.tokens, **ask) for prompt, ask in zip(prompts, asks, strict=True)))


def _step(streams: Sequence["Heard"]) -> tuple[float, float, float]:
    """Of an average step in which all decode: seconds, guesses, and those of the sequence with the most."""
    began = min(heard.began for heard in streams)
    every = [steps_of(heard.tokens, [heard.began - began + at for at in heard.times]) for heard in streams]
    first, last = max(steps[0].at for steps in every), min(steps[-1].at for steps in every)
    within = [[step for step in steps if first < step.at <= last] for steps in every]
    count = sum(map(len, within)) / len(within)
    if last <= first or count < 2:
        raise ValueError(f"guesses: {len(streams)} answers of too few steps at once")
    most = [max(step.guesses for step in steps) for steps in zip(*within, strict=False)]
    return (last - first) / count, sum(step.guesses for steps in within for step in steps) / count, sum(most) / len(most)


def _row(plain: float, streams: Sequence["Heard"], drafted: bool) -> tuple[Mapping[str, float], float]:
    seconds, guesses, drafts = _step(streams)
    return {"plain": plain, "guess": guesses, "draft": drafts if drafted else 0.0}, seconds


def with_guesses(models: Mapping[str, Fitted], heard: HeardGuesses) -> dict[str, Fitted]:
    """The models of a profile with what was measured of guesses. Raises ValueError if that was too little."""
    cost = fit(heard.rows, NUMBERS, "")
    step = models["step"]
    draws = tuple({**draw, **_priced(more)} for draw, more in zip(step.draws, cost.draws, strict=True))
    whole = Fitted({**step.values, **_priced(cost.values)}, draws, step.error, step.rows + cost.rows, f"{step.source}; guesses beside them")
    return {**models, "step": whole, "guesses": chances_of(heard.answers, heard.source)}


def _priced(values: Mapping[str, float]) -> dict[str, float]:
    return {name: values[name] for name in NUMBERS[1:]}


def chances_of(answers: Sequence[Sequence[GuessedStep]], source: str, seed: int = 0) -> Fitted:
    """See `baton.simulate.guesses`. The draws are a bootstrap over the answers."""
    counts = [_counted(steps) for steps in answers]
    rng = random.Random(seed)
    draws = tuple(_chances([rng.choice(counts) for _ in counts]) for _ in range(DRAWS))
    return Fitted(_chances(counts), draws, 0.0, sum(count.asked for count in counts), source)


@dataclass(slots=True)
class _Count:
    """Of what is known of the guess before it: that it was not right, or that it was."""

    asked: int = 0
    answered: int = 0
    right: int = 0
    went_on: int = 0
    right_again: int = 0


def _counted(steps: Iterable[GuessedStep]) -> _Count:
    """A question without an answer is a step without guesses that comes when `Paced` asks: it waits longer after each. One is counted if
    the position before it was asked for and was not right, or if it is the first of the output."""
    count, ask_at, unanswered, fresh_at = _Count(), 0, 0, 1
    for step in steps:
        if step.known < ask_at:
            continue
        if step.known == fresh_at:
            count.asked += 1
            count.answered += step.guesses > 0
            count.right += step.right > 0
        if step.guesses:
            unanswered = 0
            count.went_on += min(step.guesses - 1, step.right)
            count.right_again += max(0, step.right - 1)
            fresh_at = step.known + step.right + 1 if step.wrong else 0
        else:
            ask_at, unanswered, fresh_at = step.known + (1 << min(unanswered, DOUBLINGS)), unanswered + 1, step.known + 1
    return count


def _chances(counts: Sequence[_Count]) -> dict[str, float]:
    asked, answered, right, went_on, again = (
        sum(getattr(count, name) for count in counts) for name in ("asked", "answered", "right", "went_on", "right_again")
    )
    first = right / answered if answered else 0.0
    return {"answers": answered / asked if asked else 1.0, "first": first, "further": again / went_on if went_on else first}
