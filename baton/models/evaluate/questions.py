"""Questions with one right answer, made from a seed: of facts, of sums, and of what was told so many tokens before."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from baton.models.evaluate.general import FACTS
from baton.models.evaluate.texts import Speller
from baton.models.train.corpus import EOS, render
from baton.models.train.dialogues import Message, ToldFact, fact, long_document
from baton.models.train.evaluate import WORDS_PER_TOKEN, ask, recall_question
from baton.models.train.recipe import SEED

COUNT = 60  # of a kind
SHOTS = ("What is the opposite of up?", "down"), ("How many fingers are on one hand?", "five")


@dataclass(frozen=True, slots=True)
class MultipleChoice:
    """The model chooses the answer that it finds likeliest. `answers`: prompt and answer in tokens."""

    answers: tuple[tuple[list[int], list[int]], ...]
    right: int


def facts(speller: Speller) -> Iterator[MultipleChoice]:
    """What a model knows by heart; of a model that only knows stories, what it was just told."""
    rng = Random(f"{SEED}/choices")
    for item in FACTS[:COUNT]:
        question, right, *wrong = item.split("|")
        if speller.ours:
            yield _told(speller, rng)
        else:
            yield _choice(speller, rng, _asked(question), f" {right}", [f" {each}" for each in wrong])


def sums(speller: Speller) -> Iterator[MultipleChoice]:
    """The wrong answers are near the right one."""
    rng = Random(f"{SEED}/sum choices")
    for i in range(COUNT):
        kind = ("plus", "minus", "times")[i % 3]
        y, x = sorted(rng.randint(1, 10 if kind == "times" else 20) for _ in range(2))
        result = {"plus": x + y, "minus": x - y, "times": x * y}[kind]
        wrong = rng.sample([each for each in range(max(0, result - 4), result + 5) if each != result], 3)
        if speller.ours:
            begin = f"{x} {kind} {y} is "
            yield _choice(
                speller, rng, ask(f"What is {x} {kind} {y}?"), f"{begin}{result}.{EOS}", [f"{begin}{each}.{EOS}" for each in wrong]
            )
        else:
            yield _choice(speller, rng, _asked(f"What is {x} {kind} {y}?"), f" {result}", [f" {each}" for each in wrong])


def recall(speller: Speller, distance: int, trials: int) -> Iterator[tuple[list[int], list[int]]]:
    """Prompts and right answers: one of four facts is asked for, about `distance` tokens after it was told. Of a model that was not trained
    to answer, the answer is begun for it."""
    for trial in range(trials):
        if speller.ours:
            prompt, answer, _ = recall_question(speller.tokenizer, distance, trial)
            yield prompt, answer
            continue
        rng = Random(f"{SEED}/recall/{distance}/{trial}")
        long = long_document(rng, int(max(0, distance - 40) * WORDS_PER_TOKEN))
        asked = rng.choice(long.facts)
        said = asked.answer[: asked.answer.index(asked.value)].rstrip()
        text = "\n\n".join(message.content for message in long.messages if message.role == "user")
        yield speller.split(f"{text}\n\nQuestion: {asked.question}\nAnswer: {said}", f" {asked.value}")


def _asked(question: str) -> str:
    shown = "".join(f"Question: {each}\nAnswer: {answer}\n\n" for each, answer in SHOTS)
    return f"{shown}Question: {question}\nAnswer:"


def _told(speller: Speller, rng: Random) -> MultipleChoice:
    """The wrong answers have values of other facts of the same kind."""
    long = long_document(rng, 40)
    asked = rng.choice(long.facts)
    others: list[str] = []
    while len(others) < 3:  # the generator has many values of each kind
        other = fact(rng)
        if _kind(other) == _kind(asked) and other.value not in (asked.value, *others):
            others.append(other.value)
    prompt = render([*long.messages, Message("user", asked.question)], reply=True)
    return _choice(speller, rng, prompt, asked.answer + EOS, [asked.answer.replace(asked.value, other) + EOS for other in others])


def _kind(told: ToldFact) -> tuple[str, ...]:
    first, second, third, *_ = told.question.split()
    return (first, second) if first != "What" or second == "does" else (first, second, third)


def _choice(speller: Speller, rng: Random, prompt: str, right: str, wrong: list[str]) -> MultipleChoice:
    options = [right, *wrong]
    rng.shuffle(options)
    return MultipleChoice(tuple(speller.split(prompt, option) for option in options), options.index(right))
