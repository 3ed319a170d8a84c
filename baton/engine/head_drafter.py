"""Drafts with a head on the hidden states of the model itself (`baton.engine.model.head`).

Its KV is one layer more in the blocks of the model (`KvLayout.draft`), computed for every token in the step that computes the model's: keys
and values of one layer need no attention. So blocks that are handed over, shared or kept have both.

A slot needs the hidden state before its token. Between two steps it is remembered here; where it is not known (the KV came from elsewhere,
or from the cache), zeros stand for it. Such a hole may cost a guess, never a token: guesses are verified.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from baton.engine.core.drafting import Ask, Drafter
from baton.engine.core.kvcache import DraftKv, KvLayout
from baton.engine.core.protocol import Chunk, NothingToSample, Tokens, accepted
from baton.engine.core.sequence import Sequence, State
from baton.engine.core.step_costs import DraftCosts, Drafting
from baton.engine.draft_model import imagined
from baton.engine.facts.fields import Fields
from baton.engine.facts.fingerprint import fingerprint
from baton.engine.measure_steps import draft_costs
from baton.engine.model.attention import PagedAttention, PagedKv, Span, plan, plan_store, store
from baton.engine.model.checkpoint import Checkpoint, with_head
from baton.engine.model.head import Head
from baton.engine.model.kv_views import DTYPES
from baton.engine.model.quantised.config import read_scheme
from baton.engine.model.sampler import sample
from baton.engine.runner import ModelRunner

ALONE = "BatonHead"  # as architecture: a folder that holds a head alone


class HeadDrafter(Drafter):
    """A drafter, and a `Companion` of the runner whose model has the head."""

    reads_hidden = True

    def __init__(self, head: Head, fingerprint: str, layout: KvLayout, eos: frozenset[int], bound: int) -> None:
        """`fingerprint`: of the head's folder. `layout`: the model's. `bound`: tokens of a draft at most."""
        self._head, self._eos = head, eos
        self.bound = bound
        sizes = layout.num_kv_heads, layout.head_dim, layout.parts, layout.value_dim
        self.kv = DraftKv(f"head-{fingerprint}", layout.dtype, 1, *sizes)
        self._block_size = layout.block_size
        self._costs = DraftCosts()
        self._states: dict[Sequence, tuple[int, Tensor]] = {}  # a position, and the hidden state before it [H]

    @classmethod
    def load(cls, runner: ModelRunner, path: Path, folder: Path, weight_dtype: str, bound: int) -> Self:
        """The head in `folder` of the model in `path`, which `runner` has; both may be one folder. Raises CheckpointError."""
        inner, scheme = None, runner.model.config.scheme
        if folder.resolve() != path.resolve():
            fields = Fields.read(folder / "config.json")
            if fields.get("architectures") != [ALONE]:
                raise fields.error("architectures", f"must be {[ALONE]}: a folder that holds a head and nothing else")
            inner, scheme = fields.size("intermediate_size"), read_scheme(fields)
        config = replace(with_head(runner.model.config, inner), scheme=scheme)
        checkpoint = Checkpoint(folder, config, head=True)
        head = Head(runner.model, config, checkpoint.tensor, checkpoint.__contains__, weight_dtype)
        return cls(head, fingerprint(folder), runner.layout, runner.eos_token_ids, bound)

    @property
    def remembered(self) -> int:
        return len(self._states)

    def attach(self, kv: Tensor) -> None:
        ops = self._head.ops
        self._paged = PagedKv(kv, self.kv.value_dim, ops.attention(""), None, DTYPES[self.kv.dtype])

    @torch.inference_mode()
    def follow(self, batch: Seq[Chunk], hidden: Tensor | None, yields: Seq[Tokens]) -> None:
        """See `Companion`. KV of wrong guesses does not count, like the model's."""
        assert hidden is not None, "the runner gives them to who reads them"
        spans = [Span(chunk.seq.computed, chunk.positions, chunk.seq.blocks) for chunk in batch]
        before, rows = torch.empty_like(hidden), list(_rows(batch))
        before[1:] = hidden[:-1]
        for chunk, row in zip(batch, rows, strict=True):
            before[row] = self._state(chunk.seq, chunk.seq.computed, hidden)
        positions, slots = plan_store(spans, self._paged)
        tokens = [token for chunk in batch for token in chunk.tokens]
        kv = self._head.keys(self._tensor(tokens), before, positions)
        (self._paged.kernels.store if self._paged.kernels else store)(kv, self._paged.layers[0], slots)
        for chunk, row, said in zip(batch, rows, yields, strict=True):
            known = chunk.n + max(0, len(accepted(chunk.drafts, said)) - 1)
            chunk.seq.drafted = chunk.seq.computed + known
            if chunk.seq.state is State.RUNNING:  # else it is in no engine, and nobody would forget it
                self._states[chunk.seq] = chunk.seq.drafted, hidden[row + known - 1].clone()

    @torch.inference_mode()
    def propose(self, asks: Seq[Ask]) -> list[Seq[int]]:
        """Greedy guesses of a greedy sequence; of another, what is drawn with the noise that the model will draw with."""
        drafts: list[list[int]] = [[] for _ in asks]
        seqs = [imagined(ask.seq) for ask in asks]
        going = list(range(len(asks)))
        none = self._head.norm.new_zeros(0, self._head.config.hidden)
        hidden = torch.stack([self._state(ask.seq, len(ask.seq.tokens) - 1, none) for ask in asks])
        while going:
            hidden, logits = self._step([seqs[i].tokens for i in going], [asks[i].seq.blocks for i in going], hidden)
            try:
                said = sample(logits, [seqs[i] for i in going], self._eos, None, self._head.ops.draw)
            except NothingToSample:
                break
            for i, token in zip(going, said, strict=True):
                drafts[i].append(token.token)
                seqs[i].tokens.append(token.token)
            left = [k for k, i in enumerate(going) if len(drafts[i]) < asks[i].most and not self._ends(seqs[i])]
            going, hidden = [going[k] for k in left], hidden[left]
        return list(drafts)

    def forget(self, seq: Sequence) -> None:
        self._states.pop(seq, None)

    def drafting(self, sequences: int) -> Drafting:
        return self._costs.at(sequences)

    def measure(self, most: int) -> DraftCosts:
        """Measures what it takes for up to `most` sequences."""
        self._costs = draft_costs(self, most, self._block_size)
        return self._costs

    def _ends(self, seq: Sequence) -> bool:
        """Whether its last token says that nothing follows."""
        return not seq.params.ignore_eos and seq.tokens[-1] in self._eos

    def _step(self, texts: Seq[list[int]], blocks: Seq[list[int]], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The hidden state at the last token of each, as the head guesses it, and the logits of what follows."""
        exact = self._paged.kernels is not None
        spans = [Span(len(tokens) - 1, 1, own, steps=exact) for tokens, own in zip(texts, blocks, strict=True)]
        meta = plan(spans, self._paged, self._head.config.attention[-1:])
        return self._head.forward(self._tensor([tokens[-1] for tokens in texts]), hidden, meta.positions, PagedAttention(self._paged, meta))

    def _state(self, seq: Sequence, position: int, like: Tensor) -> Tensor:
        """The hidden state before `position` `[H]`, or zeros."""
        at, state = self._states.get(seq, (-1, None))
        return state if state is not None and at == position else like.new_zeros(like.shape[1])

    def _tensor(self, ids: list[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self._head.norm.device)


def _rows(batch: Seq[Chunk]) -> Iterator[int]:
    """Where each chunk begins in the rows of a step."""
    row = 0
    for chunk in batch:
        yield row
        row += chunk.positions
