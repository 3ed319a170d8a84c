"""Several steps of a model that drafts greedily, in one call: each computes the tokens that the step before it has found."""

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from baton.engine.cpu import pointwise
from baton.engine.cpu.recording import Arena, Recording, Unrecordable
from baton.engine.model.attention import Decodes, Meta, PagedAttention, PagedKv, Span, plan_decodes, seen
from baton.engine.model.transformer import Transformer

ROWS = 16  # sequences: in larger steps, Python is a small part


class DraftSteps:
    """Recorded for each number of sequences and of steps, as `DecodeSteps` are."""

    def __init__(self, model: Transformer, paged: PagedKv, most: int) -> None:
        """`most`: steps at most."""
        self._model, self._paged, self._most = model, paged, most
        each = 2 + -(-model.config.max_positions // paged.block_size)
        self._index = np.zeros((most, ROWS * each), np.int64)  # of each step: see `Decodes.index`
        self._tokens = np.zeros((most + 1, ROWS), np.int64)  # of each step; the last are what the last one finds
        self._recordings: dict[tuple[int, int], Recording] = {}
        self._arena = Arena()
        self._possible = True

    def guesses(self, spans: Seq[Span], tokens: Seq[int]) -> list[list[int]] | None:
        """What follows each of `tokens`, and what follows that: as many as its span has positions, the same number for all. -1 stands
        where logits are not finite, and from there on. None: compute them step by step."""
        size, steps = len(spans), spans[0].n
        if not self._possible or size > ROWS or steps > self._most:
            return None
        whole = np.frombuffer(plan_decodes(spans, self._paged), np.int64)
        positions, bases, tables = np.split(whole, [size * steps, 2 * size * steps])
        self._index[:steps, :size] = positions.reshape(size, steps).T
        self._index[:steps, size : 2 * size] = bases[::steps]
        self._index[:steps, 2 * size : 2 * size + len(tables)] = tables
        self._tokens[0, :size] = tokens
        if (recording := self._recordings.get((size, steps))) is not None:
            recording()
        else:
            try:
                self._recordings[size, steps] = self._recorded(size, steps, seen(spans) // steps)
            except Unrecordable:
                self._possible = False
                return None
        found: list[list[int]] = self._tokens[1 : steps + 1, :size].T.tolist()
        return found

    @torch.inference_mode()
    def _recorded(self, size: int, steps: int, keys: int) -> Recording:
        layers, rows = self._model.config.attention, torch.from_numpy(self._tokens[:, :size])

        def step(number: int) -> Tensor:
            index = torch.from_numpy(self._index[number])
            meta = Meta(index[:size], Decodes(size, index, keys), layers, index[:0], ((),) * len(layers), self._paged.scratch(0))
            logits = self._model.forward(rows[number], index[:size], PagedAttention(self._paged, meta), None)
            pointwise.greatest(logits, rows[number + 1])
            return logits

        return Recording(lambda: [step(number) for number in range(steps)][-1], self._arena)
