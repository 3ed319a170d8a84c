"""Batches of one token or a few of each sequence, computed by a recording for their number of tokens."""

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from baton.engine.cpu import pointwise
from baton.engine.cpu.recording import Arena, Recording, Unrecordable
from baton.engine.model.attention import Decodes, Meta, PagedAttention, PagedKv, Span, plan_decodes, seen
from baton.engine.model.transformer import Transformer

MOST = 256  # tokens: in larger batches, Python is a small part of a step


class DecodeSteps:
    """What a step reads is copied to where its recording found it. The first step of each size is an ordinary one, and recorded."""

    def __init__(self, model: Transformer, paged: PagedKv) -> None:
        self._model, self._paged = model, paged
        each = 3 + -(-model.config.max_positions // paged.block_size)  # numbers of the index for one token of a sequence
        self._index, self._tokens, self._best = (np.zeros(size, np.int64) for size in (MOST * each, MOST, MOST))
        self._recordings: dict[int, Recording[tuple[Tensor, Tensor]]] = {}
        self._arena = Arena()
        self._possible = True

    def logits(self, spans: Seq[Span], tokens: Seq[int]) -> tuple[Tensor, list[int], Tensor] | None:
        """Float32 logits of every token `[T, V]`, the `greatest` of each row, and the hidden states `[T, H]`. The next step overwrites
        them. None: compute the step in the usual way.

        A row has the bits that it would have if each token had a step of its own: drafts can be verified exactly.
        """
        size = len(tokens)
        if not self._possible or size > MOST:
            return None
        index = plan_decodes(spans, self._paged)
        self._index[: len(index)] = index
        self._tokens[:size] = tokens
        if (recording := self._recordings.get(size)) is not None:
            logits, hidden = recording()
        else:
            try:
                recording = self._recordings[size] = self._recorded(spans)
            except Unrecordable:
                self._possible = False
                return None
            logits, hidden = recording.result
        return logits, self._best[:size].tolist(), hidden

    @torch.inference_mode()
    def _recorded(self, spans: Seq[Span]) -> Recording[tuple[Tensor, Tensor]]:
        size, layers = sum(span.tokens for span in spans), self._model.config.attention
        index, tokens, best = (torch.from_numpy(each) for each in (self._index, self._tokens[:size], self._best[:size]))
        decodes, positions = Decodes(size, index, seen(spans)), index[:size]
        meta = Meta(positions, decodes, layers, index[:0], ((),) * len(layers), self._paged.scratch(0))
        attention = PagedAttention(self._paged, meta)

        def compute() -> tuple[Tensor, Tensor]:
            hidden = self._model.hidden(tokens, positions, attention, None)
            logits = self._model.logits(hidden)
            pointwise.greatest(logits, best)
            return logits, hidden

        recording = Recording(compute, self._arena)
        logits, hidden = recording.result
        recording.result = self._arena.lent(logits), self._arena.lent(hidden)  # the next step overwrites them
        return recording
