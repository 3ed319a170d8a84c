"""Several steps of a model that drafts greedily, in one call: each computes the tokens that the step before it has found."""

from collections.abc import Sequence as Seq
from itertools import chain

import numpy as np
import torch

from baton.engine.cpu import pointwise
from baton.engine.cpu.kernel import Repeated
from baton.engine.cpu.recording import Arena, Recording, Unrecordable
from baton.engine.model.attention import Decodes, Meta, PagedAttention, PagedKv, Span, plan_decodes
from baton.engine.model.transformer import Transformer

ROWS = 16  # sequences: in larger steps, Python is a small part


class DraftSteps:
    """Each step is recorded for each number of sequences, as `DecodeSteps` are, the first one for each number of tokens that wait, and the
    others for each place in the chain. A chain is made of what is recorded, and computes nothing when it is made."""

    def __init__(self, model: Transformer, paged: PagedKv, most: int, others: int = 0) -> None:
        """`most`: steps at most; `others`: so many tokens that are less likely are told, too, for the first step."""
        self._model, self._paged, self._most = model, paged, most
        each = 3 + -(-model.config.max_positions // paged.block_size)
        self._index = np.zeros((most, ROWS * each), np.int64)  # of each step: see `Decodes.index`
        self._tokens = np.zeros((most + 1, ROWS), np.int64)  # of each step; the last are what the last one finds
        self._others = np.zeros((ROWS, others), np.int64)
        self._recordings: dict[tuple[int, int, int], Recording[None]] = {}  # sequences, place, tokens that wait
        self._chains: dict[tuple[int, int, int], Repeated] = {}  # sequences, steps, tokens that wait
        self._arena = Arena()
        self._possible = True

    def guesses(self, spans: Seq[Span], tokens: Seq[Seq[int]], steps: int) -> tuple[list[list[int]], list[list[int]]] | None:
        """`steps` tokens after each of `tokens`, each list of which is a span's and waits for the first step; and other choices of the
        first of them. -1 stands where logits are not finite, and from there on. A single sequence may have several tokens that wait. None:
        compute them step by step."""
        size, first = len(spans), len(tokens[0])
        if not self._possible or size > ROWS or steps > self._most or max(map(len, tokens)) > (1 if size > 1 else ROWS):
            return None
        wide = first - 1 + steps
        whole = np.frombuffer(plan_decodes([span._replace(n=wide) for span in spans], self._paged), np.int64)
        count = size * wide
        positions, bases, tables = whole[:count].reshape(size, wide), whole[count : 2 * count : wide], whole[3 * count :]
        index, parts = self._index, [slice(part * first, (part + 1) * first) for part in range(3)]
        if first > 1:
            index[0, parts[0]], index[0, parts[1]], index[0, parts[2]] = positions[0, :first], 0, np.arange(first) - 1
            index[0, 3 * first : 3 * first + len(tables)] = tables
        later = index[first > 1 : steps]  # steps in which each sequence has one token
        later[:, :size], later[:, size : 2 * size] = positions[:, steps - len(later) + first - 1 :].T, bases
        later[:, 2 * size : 3 * size], later[:, 3 * size : 3 * size + len(tables)] = -1, tables
        self._tokens[0, : size * first] = list(chain.from_iterable(tokens))
        if (repeated := self._chains.get((size, steps, first))) is not None:
            repeated()
        else:
            try:
                self._chain(size, steps, first, int(positions[:, first - 1].sum()) + size)
            except Unrecordable:
                self._possible = False
                return None
        found: list[list[int]] = self._tokens[1 : steps + 1, :size].T.tolist()
        return found, self._others[:size].tolist() if self._others.size else []

    def _chain(self, size: int, steps: int, first: int, keys: int) -> None:
        """Computes, and records what is not recorded yet."""
        parts = []
        for place in range(steps):
            key = size, place, first if place == 0 else 1
            if (recording := self._recordings.get(key)) is None:
                recording = self._recordings[key] = self._recorded(*key, keys)
            else:
                recording()
            parts.append(recording.replay)
        self._chains[size, steps, first] = Repeated(before=parts)

    @torch.inference_mode()
    def _recorded(self, size: int, place: int, first: int, keys: int) -> Recording[None]:
        """What a step finds is where the next one reads it."""
        layers, count = self._model.config.attention, size * first
        index, tokens = torch.from_numpy(self._index[place]), torch.from_numpy(self._tokens)
        others = torch.from_numpy(self._others[:size])
        meta = Meta(index[:count], Decodes(count, index, keys), layers, index[:0], ((),) * len(layers), self._paged.scratch(0))

        def step() -> None:
            logits = self._model.forward(tokens[place, :count], index[:count], PagedAttention(self._paged, meta), None)
            pointwise.greatest(logits[first - 1 :], tokens[place + 1, :size])
            if place == 0 and others.numel():
                pointwise.next_greatest(logits[first - 1 :], others)

        return Recording(step, self._arena)
