"""Turns documents into batches of about the same number of tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from baton.models.train.corpus import SPECIAL, document, tool_document
from baton.models.train.recipe import CONTEXT, ROUND_WORDS, SEED, Phase

EOS, USER, ASSISTANT, SYSTEM = (SPECIAL.index(f"<|{name}|>") for name in ("eos", "user", "assistant", "system"))
OTHERS_WEIGHT = 0.2  # of a token that the model need not say itself; it learns little from which thing a user names


@dataclass(frozen=True, slots=True)
class Batch:
    ids: Tensor  # [documents, length], padded on the right with EOS
    weights: Tensor  # [documents, length - 1], of predicting ids[:, 1:]; 0 for padding
    tokens: int  # predicted, without padding


def round_batches(tokenizer: Tokenizer, number: int, phase: Phase) -> Iterator[Batch]:
    """Round `number` of the training: documents sorted by length, so that little is padding, and batches in random order."""
    rng = Random(f"{SEED}/round/{number}")
    lengths, weights = zip(*phase.sizes, strict=True)
    chosen: list[int] = []
    while sum(chosen) < ROUND_WORDS:
        chosen += rng.choices(lengths, weights)
    makers = [tool_document if rng.random() < phase.tools else document for _ in chosen] if phase.tools else [document] * len(chosen)
    texts = [make(Random(f"{SEED}/train/{number}/{i}"), size) for i, (make, size) in enumerate(zip(makers, chosen, strict=True))]
    rows = [e.ids[: CONTEXT + 1] for e in tokenizer.encode_batch(texts, add_special_tokens=False)]
    batches: list[list[list[int]]] = [[]]
    for row in sorted(rows, key=len, reverse=True):
        if batches[-1] and len(batches[-1][0]) * (len(batches[-1]) + 1) > phase.batch_tokens:
            batches.append([])
        batches[-1].append(row)
    rng.shuffle(batches)
    for batch in batches:
        yield collate(batch)


def collate(rows: list[list[int]]) -> Batch:
    length = max(map(len, rows))
    ids = torch.tensor([row + [EOS] * (length - len(row)) for row in rows])
    weights = torch.tensor([_weights(row) + [0.0] * (length - len(row)) for row in rows])
    return Batch(ids, weights, sum(map(len, rows)) - len(rows))


def _weights(row: list[int]) -> list[float]:
    """The weights of predicting row[1:]."""
    weights, weight = [], 1.0
    for token, following in pairwise(row):
        if token in (USER, SYSTEM):
            weight = OTHERS_WEIGHT
        elif token == ASSISTANT:
            weight = 1.0
        weights.append(OTHERS_WEIGHT if following in (USER, SYSTEM, ASSISTANT) else weight)
    return weights
