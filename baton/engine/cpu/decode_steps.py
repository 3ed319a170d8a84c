"""Batches of one token for each sequence, computed by a recording for their size."""

from collections.abc import Sequence as Seq
from dataclasses import replace

import torch
from torch import Tensor

from baton.engine.attention import Decodes, Meta, PagedAttention, PagedKv, Span, plan_decodes
from baton.engine.cpu.recording import Arena, Recording, Unrecordable
from baton.engine.model import Transformer

MOST = 64  # sequences: in larger batches, Python is a small part of a step


class DecodeSteps:
    """What a step reads is copied to where its recording found it. The first step of each size is an ordinary one, and recorded."""

    def __init__(self, model: Transformer, paged: PagedKv) -> None:
        self._model, self._paged = model, paged
        each = 2 + -(-model.config.max_positions // paged.block_size)  # numbers of the index for one sequence
        self._index = torch.zeros(MOST * each, dtype=torch.int64)
        self._tokens = torch.zeros(MOST, dtype=torch.int64)
        self._recordings: dict[int, Recording] = {}
        self._arena = Arena()
        self._possible = True

    def logits(self, spans: Seq[Span], tokens: Seq[int]) -> Tensor | None:
        """Float32 `[B, V]`. None: the step must be computed in the usual way."""
        if not self._possible or len(spans) > MOST:
            return None
        size, decodes = len(spans), plan_decodes(spans, self._paged)
        self._index[: len(decodes.index)] = decodes.index
        self._tokens[:size] = torch.tensor(tokens)
        if (recording := self._recordings.get(size)) is not None:
            return recording().clone()  # the next step writes there
        try:
            recording = self._recordings[size] = self._recorded(size, decodes)
        except Unrecordable:
            self._possible = False
            return None
        return recording.result.clone()

    def _recorded(self, size: int, decodes: Decodes) -> Recording:
        layers, none = self._model.config.attention, self._index[:0]
        positions = self._index[:size]
        meta = Meta(positions, replace(decodes, index=self._index), layers, none, ((),) * len(layers), self._paged.scratch(0))
        attention = PagedAttention(self._paged, meta)
        return Recording(lambda: self._model.forward(self._tokens[:size], positions, attention, None), self._arena)
