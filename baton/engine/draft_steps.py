"""Several steps of a model that drafts, in one call: each computes the tokens that the step before it has found."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from baton.engine.core.sampling import SamplingParams
from baton.engine.cpu import pointwise
from baton.engine.cpu.draw import draw_rows, filters, noise_keys
from baton.engine.cpu.kernel import Repeated
from baton.engine.cpu.recording import Arena, Recording, Unrecordable
from baton.engine.model.attention import Decodes, Meta, PagedAttention, PagedKv, Span, plan_decodes
from baton.engine.model.checkpoint import ModelConfig
from baton.engine.model.projections import Attention

# (tokens [T], the hidden states before them [T, H], positions [T], keys and values) → (those at them, logits of what follows [T, V]);
# H is 0 for what reads none, and tells none
Forward = Callable[[Tensor, Tensor, Tensor, Attention], tuple[Tensor | None, Tensor]]
Key = tuple[int, int, int, bool]  # sequences, a place or the steps, tokens that wait, whether they are drawn
ROWS = 16  # sequences: in larger steps, Python is a small part


class DraftSteps:
    """Each step is recorded for each number of sequences, as `DecodeSteps` are, the first one for each number of tokens that wait, and the
    others for each place in the chain. A chain is made of what is recorded, and computes nothing when it is made."""

    def __init__(
        self, forward: Forward, config: ModelConfig, paged: PagedKv, most: int, others: int = 0, states: Tensor | None = None
    ) -> None:
        """`config`: the layers of `paged` are its last ones. `most`: steps at most; `others`: so many tokens that are less likely are told,
        too, for the first step. `states` `[most + 1, ROWS, H]`: who calls has put there the hidden states before the tokens that wait."""
        self._forward, self._layers, self._paged, self._most = forward, config.attention[-len(paged.layers) :], paged, most
        each = 3 + -(-config.max_positions // paged.block_size)
        self._index = np.zeros((most, ROWS * each), np.int64)  # of each step: see `Decodes.index`
        self._tokens = np.zeros((most + 1, ROWS), np.int64)  # of each step; the last are what the last one finds
        self._others = np.zeros((ROWS, others), np.int64)
        self._limits, self._counts = np.zeros((ROWS, 4), np.float32), np.zeros((ROWS, 2), np.int64)  # see `draw.filters`
        self._keys = np.zeros((most, ROWS), np.int64)  # of each step: see `draw.noise_keys`
        self._states = torch.empty(most + 1, ROWS, 0) if states is None else states  # before the tokens of each step
        self._places = torch.arange(ROWS)
        self._recordings: dict[Key, Recording[None]] = {}  # by place
        self._chains: dict[Key, Repeated] = {}  # by steps
        self._arena = Arena()
        self._possible = True

    def guesses(
        self, spans: Seq[Span], tokens: Seq[Seq[int]], steps: int, params: Seq[SamplingParams] | None = None
    ) -> tuple[list[list[int]], list[list[int]]] | None:
        """`steps` tokens after each of `tokens`, each list of which is a span's and waits for the first step: the likeliest, or with
        `params`, those that are drawn (see `sampler.draws_alone`); and other choices of the first of them, of the likeliest only. -1 stands
        where logits are not finite, and from there on. A single sequence may have several tokens that wait. None: compute them step by
        step."""
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
        if params is not None:
            self._limits[:size], self._counts[:size] = filters(range(size), params)
            ends = [span.start + span.n for span in spans]
            for place in range(steps):
                self._keys[place, :size] = noise_keys([(each.seed, end + place) for each, end in zip(params, ends, strict=True)])
        if (repeated := self._chains.get((size, steps, first, params is not None))) is not None:
            repeated()
        else:
            try:
                self._chain((size, steps, first, params is not None), int(positions[:, first - 1].sum()) + size)
            except Unrecordable:
                self._possible = False
                return None
        found: list[list[int]] = self._tokens[1 : steps + 1, :size].T.tolist()
        return found, self._others[:size].tolist() if self._others.size else []

    def _chain(self, made: Key, keys: int) -> None:
        """Computes, and records what is not recorded yet."""
        (size, steps, first, drawn), parts = made, []
        for place in range(steps):
            key = size, place, first if place == 0 else 1, drawn
            if (recording := self._recordings.get(key)) is None:
                recording = self._recordings[key] = self._recorded(*key, keys)
            else:
                recording()
            parts.append(recording.replay)
        self._chains[made] = Repeated(before=parts)

    @torch.inference_mode()
    def _recorded(self, size: int, place: int, first: int, drawn: bool, keys: int) -> Recording[None]:
        """What a step finds is where the next one reads it."""
        layers, count = self._layers, size * first
        index, tokens, noise = (torch.from_numpy(each) for each in (self._index[place], self._tokens, self._keys[place]))
        limits, counts, others = (torch.from_numpy(each[:size]) for each in (self._limits, self._counts, self._others))
        meta = Meta(index[:count], Decodes(count, index, keys), layers, index[:0], ((),) * len(layers), self._paged.scratch(0))

        def step() -> None:
            before = self._states[place, :count]
            states, logits = self._forward(tokens[place, :count], before, index[:count], PagedAttention(self._paged, meta))
            if states is not None:  # they are copied to where the next step reads them
                pointwise.embed(states, self._places[first - 1 : first - 1 + size], self._states[place + 1, :size], 1.0)
            last, found = logits[first - 1 :], tokens[place + 1, :size]
            if drawn:
                draw_rows(last, limits, counts, noise[:size], found)
            else:
                pointwise.greatest(last, found)
                if place == 0 and others.numel():
                    pointwise.next_greatest(last, others)

        return Recording(step, self._arena)
