"""What readers make of texts and questions, in numbers."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from baton.models.evaluate.questions import MultipleChoice
from baton.models.evaluate.reader import Reader

Tick = Callable[[int], None]  # is told how many tokens or questions are done


def unheard(done: int) -> None:
    """Does nothing, for callers that show no progress."""


@dataclass(slots=True)
class Reading:
    """One reader's results on a text, beside the first reader's. Sums over its positions; nats."""

    tokens: int = 0
    loss_sum: float = 0.0
    kl_sum: float = 0.0  # from the first reader's distribution
    same: int = 0  # greedy choices that are the first reader's

    def add(self, other: "Reading") -> None:
        self.tokens, self.same = self.tokens + other.tokens, self.same + other.same
        self.loss_sum, self.kl_sum = self.loss_sum + other.loss_sum, self.kl_sum + other.kl_sum

    @property
    def loss(self) -> float:
        return self.loss_sum / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def kl(self) -> float:
        return self.kl_sum / self.tokens

    @property
    def same_choice(self) -> float:
        return self.same / self.tokens


@dataclass(slots=True)
class Continuations:
    """Greedy ones, beside those of the first of several readers."""

    tokens: int = 0
    same: int = 0  # tokens before the first that differs
    possible: int = 0  # tokens that the first reader said
    drafted: int = 0
    accepted: int = 0
    said: list[list[int]] = field(default_factory=list)


def read(readers: Sequence[Reader], texts: Sequence[list[int]], prompt: float = 0.5, tick: Tick = unheard) -> list[Reading]:
    """All readers read each text together. `prompt`: the share of a text that is a prompt, the rest is read as output. Raises ValueError if
    a reader's logits are not finite."""
    totals, done = [Reading() for _ in readers], 0
    for text in texts:
        told = max(1, int(prompt * len(text)))
        at = 1
        for pieces in zip(*(reader.read(text, told) for reader in readers), strict=True):
            tokens = torch.tensor(text[at : at + len(pieces[0])])
            first, *others = map(_finite, readers, pieces)
            for total, own in zip(totals, (first, *others), strict=True):
                total.add(_compare(own, first, tokens))
            at += len(tokens)
        tick(done := done + len(text))
    return totals


def choose(reader: Reader, questions: Iterable[MultipleChoice], tick: Tick = unheard) -> float:
    """The share of right answers."""
    right = count = 0
    for question in questions:
        found, before = list[float](), list[int]()
        for prompt, answer in question.answers:
            known = len(prompt) - 1 if prompt == before else 0
            logits = torch.cat([piece.cpu() for piece in reader.read(prompt + answer, len(prompt), len(prompt) - 1, known)])
            found.append(float(logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None]).sum()))
            before = prompt
        right += max(range(len(found)), key=found.__getitem__) == question.right
        tick(count := count + 1)
    return right / count


def recall(reader: Reader, asked: Iterable[tuple[list[int], list[int]]], tick: Tick = unheard) -> float:
    """The share of answers that greedy decoding gives word for word: each token is the best after the right ones before it."""
    right = count = 0
    for prompt, answer in asked:
        best = torch.cat([logits.argmax(-1) for logits in reader.read(prompt + answer, len(prompt), len(prompt) - 1)])
        right += best.tolist() == answer
        tick(count := count + 1)
    return right / count


def go_on(readers: Sequence[Reader], prompts: Sequence[list[int]], tokens: int, tick: Tick = unheard) -> list[Continuations]:
    """The only figure that sees speculation: how many guesses were right, and that no token changed."""
    found = []
    for reader in readers:
        before = reader.engine.counts.copy()
        told = Continuations()
        for prompt in prompts:
            told.said.append(reader.go_on(prompt, tokens))
            told.tokens += len(told.said[-1])
            tick(len(told.said))
        told.drafted = reader.engine.counts.drafted_tokens - before.drafted_tokens
        told.accepted = reader.engine.counts.accepted_tokens - before.accepted_tokens
        found.append(told)
    for told in found:
        told.possible = found[0].tokens
        told.same = sum(map(_common, told.said, found[0].said))
    return found


def _compare(own: Tensor, first: Tensor, tokens: Tensor) -> Reading:
    """Log-probabilities `[n, vocab]` each."""
    return Reading(
        len(tokens),
        functional.nll_loss(own, tokens, reduction="sum").item(),
        0.0 if own is first else functional.kl_div(own, first, reduction="sum", log_target=True).item(),
        int((own.argmax(-1) == first.argmax(-1)).sum()),
    )


def _finite(reader: Reader, logits: Tensor) -> Tensor:
    own = logits.cpu().log_softmax(-1)
    if not own.isfinite().all():
        raise ValueError(f"model.path: the weights in {reader.folder} produce logits that are not numbers")
    return own


def _common(said: list[int], first: list[int]) -> int:
    """How many tokens they begin with alike."""
    return next((i for i, (a, b) in enumerate(zip(said, first, strict=False)) if a != b), min(len(said), len(first)))
