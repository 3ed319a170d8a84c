"""Several steps of a model that drafts greedily, in one call: each computes the tokens that the step before it has found."""

from collections.abc import Sequence as Seq
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from baton.engine.cpu import pointwise
from baton.engine.cpu.recording import Arena, Recording, Unrecordable
from baton.engine.model.attention import Decodes, Ints, Meta, PagedAttention, PagedKv, Span, plan_decodes
from baton.engine.model.transformer import Transformer

ROWS = 16  # sequences: in larger steps, Python is a small part


class DraftSteps:
    """Recorded for each number of sequences, of steps, and of tokens that wait, as `DecodeSteps` are."""

    def __init__(self, model: Transformer, paged: PagedKv, most: int) -> None:
        """`most`: steps at most."""
        self._model, self._paged, self._most = model, paged, most
        each = 2 + -(-model.config.max_positions // paged.block_size)
        self._index = np.zeros((most, ROWS * each), np.int64)  # of each step: see `Decodes.index`
        self._tokens = np.zeros((most + 1, ROWS), np.int64)  # of each step; the last are what the last one finds
        self._recordings: dict[tuple[int, int, int], Recording[Tensor]] = {}
        self._arena = Arena()
        self._possible = True

    def guesses(self, spans: Seq[Span], tokens: Seq[Seq[int]], steps: int) -> list[list[int]] | None:
        """`steps` tokens after each of `tokens`, each list of which is a span's and waits for the first step. -1 stands where logits are
        not finite, and from there on. A single sequence may have several tokens that wait. None: compute them step by step."""
        size, first = len(spans), len(tokens[0])
        if not self._possible or size > ROWS or steps > self._most or max(map(len, tokens)) > (1 if size > 1 else ROWS):
            return None
        whole = np.frombuffer(plan_decodes([span._replace(n=first - 1 + steps) for span in spans], self._paged), np.int64)
        count = size * (first - 1 + steps)
        positions, bases, tables = np.split(whole, [count, 2 * count])
        positions = positions.reshape(size, -1)
        self._fill(0, positions[:, :first].ravel(), np.repeat(bases[:: first - 1 + steps], first), tables)
        for step in range(1, steps):
            self._fill(step, positions[:, first - 1 + step], bases[:: first - 1 + steps], tables)
        self._tokens[0, : size * first] = list(chain.from_iterable(tokens))
        if (recording := self._recordings.get((size, steps, first))) is not None:
            recording()
        else:
            try:
                self._recordings[size, steps, first] = self._recorded(size, steps, first, int(positions[:, first - 1].sum()) + size)
            except Unrecordable:
                self._possible = False
                return None
        found: list[list[int]] = self._tokens[1 : steps + 1, first - 1 : first - 1 + size].T.tolist()
        return found

    def _fill(self, step: int, *parts: Ints) -> None:
        np.concatenate(parts, out=self._index[step, : sum(map(len, parts))])

    @torch.inference_mode()
    def _recorded(self, size: int, steps: int, first: int, keys: int) -> Recording[Tensor]:
        """What a step finds is where the next one reads it: the tokens of all but the first step are those after the last that waited."""
        layers, tokens = self._model.config.attention, torch.from_numpy(self._tokens)

        def step(number: int) -> Tensor:
            index, rows = (
                torch.from_numpy(self._index[number]),
                slice(0, size * first) if number == 0 else slice(first - 1, first - 1 + size),
            )
            count = rows.stop - rows.start
            meta = Meta(index[:count], Decodes(count, index, keys), layers, index[:0], ((),) * len(layers), self._paged.scratch(0))
            logits = self._model.forward(tokens[number, rows], index[:count], PagedAttention(self._paged, meta), None)
            pointwise.greatest(logits, tokens[number + 1, rows])
            return logits

        return Recording(lambda: [step(number) for number in range(steps)][-1], self._arena)
