"""Drafts with a head on the hidden states of the model itself (`baton.engine.model.head`).

Its KV is one layer more in the blocks of the model (`KvLayout.draft`): keys and values of one layer need no attention. Those of a prompt
are computed in the step that computes the model's, so they are handed over with them. Those of the output are computed when the next guess
is wanted (`Sequence.drafted` counts the positions that have them): where nothing is guessed, a step computes nothing for the head.

A slot needs the hidden state before its token. The newest are kept here; where one is not known (it is too old, or the KV came from
elsewhere, or from the cache), zeros stand for it. Such a hole may cost a guess, never a token: guesses are verified.
"""

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from itertools import accumulate, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

import torch
from torch import Tensor

from baton.engine.core.drafting import Drafter, DraftRequest
from baton.engine.core.kvcache import DraftKv, KvLayout
from baton.engine.core.protocol import Chunk, NothingToSample, Tokens, path
from baton.engine.core.sampling import Sampled
from baton.engine.core.sequence import Sequence, State
from baton.engine.core.step_costs import DraftCosts, Drafting
from baton.engine.draft_model import imagined, other_choices, trees
from baton.engine.facts.fields import Fields
from baton.engine.facts.fingerprint import fingerprint
from baton.engine.measure_steps import draft_costs
from baton.engine.model.attention import PagedAttention, PagedKv, Span, plan, plan_store, store
from baton.engine.model.checkpoint import Checkpoint, with_head
from baton.engine.model.head import Head
from baton.engine.model.kv_views import DTYPES
from baton.engine.model.quantised.config import read_scheme
from baton.engine.model.sampler import draws_alone, sample, takes_greatest
from baton.engine.runner import ROUNDED, ModelRunner

if TYPE_CHECKING:
    from baton.engine.draft_steps import DraftSteps

ALONE = "BatonHead"  # as architecture: a folder that holds a head alone
KEPT = 1024  # hidden states, of all sequences
FEW = 16  # tokens of a sequence that are caught up in the first step of a draft; more are computed without attention before it
CAUGHT_UP = 512  # tokens of all sequences that are computed so in a step: a stream beside them waits no longer


class KeptStates(NamedTuple):
    """What is kept of one step."""

    states: Tensor  # [n, H]
    numbers: Seq[int]  # of their sequences
    positions: Seq[int]


class HeadDrafter(Drafter):
    """A drafter, and a `Companion` of the runner whose model has the head."""

    reads_hidden = True
    other_tokens = 1

    def __init__(self, head: Head, fingerprint: str, layout: KvLayout, eos: frozenset[int], bound: int, others: int = 0) -> None:
        """`fingerprint`: of the head's folder, and of how its matrices are rounded. `layout`: the model's. `bound`: tokens of a draft at
        most; `others`: so many other choices of its first token are told."""
        self._head, self._eos = head, eos
        self._others = others
        self.bound = bound
        sizes = layout.num_kv_heads, layout.head_dim, layout.parts, layout.value_dim
        self.kv = DraftKv(f"head-{fingerprint}", layout.dtype, 1, *sizes)
        self._block_size = layout.block_size
        self._costs = DraftCosts()
        self._steps: DraftSteps | None = None
        self._numbers: dict[Sequence, int] = {}  # of sequences whose states are kept
        self._kept, self._kept_rows = deque[KeptStates](), 0
        self._unasked = KEPT + 1  # rows since the last question; at first, nothing is kept for one
        self._next = 0  # number

    @classmethod
    def load(cls, runner: ModelRunner, model: Path, folder: Path, weight_dtype: str, bound: int, others: int = 0) -> Self:
        """The head in `folder` of the model in `model`, which `runner` has; both may be one folder. Raises CheckpointError."""
        inner, scheme = None, runner.model.config.scheme
        if folder.resolve() != model.resolve():
            fields = Fields.read(folder / "config.json")
            if fields.get("architectures") != [ALONE]:
                raise fields.error("architectures", f"must be {[ALONE]}: a folder that holds a head and nothing else")
            inner, scheme = fields.size("intermediate_size"), read_scheme(fields)
        config = replace(with_head(runner.model.config, inner), scheme=scheme)
        checkpoint = Checkpoint(folder, config, head=True)
        head = Head(runner.model, config, checkpoint.matrix, checkpoint.__contains__, weight_dtype)
        return cls(head, fingerprint(folder) + ROUNDED[weight_dtype], runner.layout, runner.eos_token_ids, bound, others)

    @property
    def remembered(self) -> int:
        return len(self._numbers)

    def attach(self, kv: Tensor) -> None:
        ops = self._head.ops
        self._paged = PagedKv(kv, self.kv.value_dim, ops.attention(""), None, DTYPES[self.kv.dtype])
        if ops.records and self._paged.kernels is not None:
            from baton.engine.draft_steps import ROWS, DraftSteps

            self._states = self._head.norm.new_zeros(self.bound + 1, ROWS, self._head.config.hidden)
            self._steps = DraftSteps(self._head.forward, self._head.config, self._paged, self.bound, self._others, self._states)

    def follow(self, batch: Seq[Chunk], hidden: Tensor | None, yields: Seq[Tokens]) -> None:
        """See `Companion`. Decodes wait: where nothing is guessed, a step must cost no more than without a head."""
        assert hidden is not None, "the runner gives them to who reads them"
        if self._unasked <= KEPT or [chunk for chunk in batch if chunk.n > 1 or chunk.seq.hold]:
            self._follow(batch, hidden, yields)

    @torch.inference_mode()
    def _follow(self, batch: Seq[Chunk], hidden: Tensor, yields: Seq[Tokens]) -> None:
        rows = list(_rows(batch))
        if prompts := [(chunk, row) for chunk, row in zip(batch, rows, strict=True) if chunk.n > 1 or chunk.seq.hold]:
            before = list[Tensor]()
            for chunk, row in prompts:
                start = chunk.seq.drafted  # a chunk of one token may have been left out before
                before += self._before(chunk.seq, start, chunk.seq.computed + 1 - start), hidden[row : row + chunk.n - 1]
            self._store([(chunk.seq, chunk.seq.computed + chunk.n) for chunk, _ in prompts], torch.cat(before))
        self._keep(batch, rows, hidden, yields)

    @torch.inference_mode()
    def propose(self, asks: Seq[DraftRequest]) -> list[Seq[int]]:
        """Greedy guesses of a greedy sequence; of another, what is drawn with the noise that the model will draw with. None of one that is
        still far behind."""
        self._unasked = 0
        self._catch_up([ask.seq for ask in asks])
        near = [ask for ask in asks if len(ask.seq.tokens) - ask.seq.drafted <= self._few]
        drafts = dict(zip((ask.seq for ask in near), self._chained(near) or self._drawn(near), strict=True))
        return [drafts.get(ask.seq, []) for ask in asks]

    def _chained(self, asks: Seq[DraftRequest]) -> list[Seq[int]] | None:
        """What it guesses in one call, as many for each; None: guess step by step."""
        params = [ask.seq.params for ask in asks]
        greedy = all(map(takes_greatest, params))
        alone = (greedy or all(map(draws_alone, params))) and all(ask.seq.matcher is None for ask in asks)
        if self._steps is None or not asks or not alone or len(asks) > self._states.shape[1]:
            return None
        if self._others and not greedy and any(ask.others for ask in asks):
            return None  # a chain draws no other choices
        if len(asks) > 1 and (behind := [ask.seq for ask in asks if len(ask.seq.tokens) - ask.seq.drafted > 1]):
            self._follow_up([(seq, len(seq.tokens) - 1) for seq in behind])
        waiting, states = self._waiting(asks)
        self._states[0, : len(states)] = states
        texts = [ask.seq.tokens for ask in asks]
        spans = [Span(len(text) - n, n, ask.seq.blocks, True) for ask, text, n in zip(asks, texts, waiting, strict=True)]
        found = self._steps.guesses(
            spans,
            [text[-n:] for text, n in zip(texts, waiting, strict=True)],
            min(ask.most for ask in asks),
            None if greedy else params,
        )
        if found is None:
            return None
        for ask in asks:
            ask.seq.drafted = len(ask.seq.tokens)
        return trees(asks, [list(takewhile(lambda token: token >= 0, draft)) for draft in found[0]], found[1])

    def _waiting(self, asks: Seq[DraftRequest]) -> tuple[list[int], Tensor]:
        """How many tokens of each wait for the first step, at least the last one, and the hidden states before them."""
        waiting = [max(1, len(ask.seq.tokens) - ask.seq.drafted) for ask in asks]
        states = [self._before(ask.seq, len(ask.seq.tokens) - n, n) for ask, n in zip(asks, waiting, strict=True)]
        return waiting, states[0] if len(states) == 1 else torch.cat(states)

    def _drawn(self, asks: Seq[DraftRequest]) -> list[Seq[int]]:
        drafts: list[list[int]] = [[] for _ in asks]
        others: list[list[int]] = []
        seqs, going = [imagined(ask.seq) for ask in asks], list(range(len(asks)))
        waiting, hidden = self._waiting(asks) if asks else ([], None)
        for ask in asks:
            ask.seq.drafted = len(ask.seq.tokens)
        while going and hidden is not None:
            hidden, logits = self._step([seqs[i].tokens for i in going], [asks[i].seq.blocks for i in going], waiting, hidden)
            try:
                said = self._say(logits, [seqs[i] for i in going])
            except NothingToSample:
                break
            if self._others and not others and any(ask.others for ask in asks):
                others = other_choices(logits, said, self._others, partial(self._say, seqs=seqs))
            for i, token in zip(going, said, strict=True):
                drafts[i].append(token.token)
                seqs[i].tokens.append(token.token)
            left = [k for k, i in enumerate(going) if len(drafts[i]) < asks[i].most and not self._ends(seqs[i])]
            going, hidden, waiting = [going[k] for k in left], hidden[left], [1] * len(left)
        return trees(asks, drafts, others)

    def forget(self, seq: Sequence) -> None:
        self._numbers.pop(seq, None)

    def drafting(self, sequences: int) -> Drafting:
        return self._costs.at(sequences)

    def measure(self, most: int) -> DraftCosts:
        """Measures what it takes for up to `most` sequences. Of what was guessed, only what the model has computed since counts, so the
        tokens that were accepted wait, too: one of a guess, usually."""
        self._costs = draft_costs(self, most, self._block_size, usual=2)
        self._unasked = KEPT + 1
        return self._costs

    def _say(self, logits: Tensor, seqs: Seq[Sequence]) -> list[Sampled]:
        return sample(logits, seqs, self._eos, None, self._head.ops.draw)

    def _ends(self, seq: Sequence) -> bool:
        """Whether its last token says that nothing follows."""
        return not seq.params.ignore_eos and seq.tokens[-1] in self._eos

    @property
    def _few(self) -> int:
        """Tokens that may wait for the first step of a draft."""
        return FEW if self._paged.kernels is not None else 1

    def _step(self, texts: Seq[list[int]], blocks: Seq[list[int]], waiting: Seq[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The hidden state at the last token of each, as the head guesses it, and the logits of what follows. So many of the last tokens
        of each have no KV yet; `hidden`: the states before them."""
        exact = self._paged.kernels is not None
        spans = [Span(len(tokens) - n, n, own, steps=exact) for tokens, n, own in zip(texts, waiting, blocks, strict=True)]
        meta = plan(spans, self._paged, self._head.config.attention[-1:])
        tokens = self._tensor([token for text, n in zip(texts, waiting, strict=True) for token in text[-n:]])
        guessed, logits = self._head.forward(tokens, hidden, meta.positions, PagedAttention(self._paged, meta))
        if len(guessed) == len(texts):
            return guessed, logits
        last = [end - 1 for end in accumulate(waiting)]
        return guessed[last], logits[last]

    def _catch_up(self, seqs: Seq[Sequence]) -> None:
        """Computes the KV of those that are far behind, but that of their last token."""
        ends, left = list[tuple[Sequence, int]](), CAUGHT_UP
        for seq in seqs:
            if len(seq.tokens) - seq.drafted > self._few and left > 0:
                ends.append((seq, min(len(seq.tokens) - 1, seq.drafted + left)))
                left -= ends[-1][1] - seq.drafted
        if ends:
            self._follow_up(ends)

    def _follow_up(self, ends: Seq[tuple[Sequence, int]]) -> None:
        self._store(ends, torch.cat([self._before(seq, seq.drafted, end - seq.drafted) for seq, end in ends]))

    def _store(self, ends: Seq[tuple[Sequence, int]], before: Tensor) -> None:
        """Computes the KV of each up to its end, with the states before its tokens `[T, H]`."""
        begins = [seq.drafted for seq, _ in ends]
        positions, slots = plan_store(
            [Span(start, end - start, seq.blocks) for start, (seq, end) in zip(begins, ends, strict=True)], self._paged
        )
        tokens = [token for start, (seq, end) in zip(begins, ends, strict=True) for token in seq.tokens[start:end]]
        kv = self._head.keys(self._tensor(tokens), before, positions)
        (self._paged.kernels.store if self._paged.kernels else store)(kv, self._paged.layers[0], slots)
        for seq, end in ends:
            seq.drafted = end

    def _keep(self, batch: Seq[Chunk], rows: Seq[int], hidden: Tensor, yields: Seq[Tokens]) -> None:
        """Keeps the states at known tokens that the next guesses may need: for as long as they are few and somebody may ask."""
        self._unasked += len(hidden)
        if self._unasked > KEPT:
            self._kept.clear()
            self._kept_rows = 0
            return
        if len(hidden) == len(batch):
            kept, seqs, positions = hidden.clone(), [chunk.seq for chunk in batch], [chunk.seq.computed for chunk in batch]
        else:
            taken, seqs, positions = list[int](), list[Sequence](), list[int]()
            for chunk, row, said in zip(batch, rows, yields, strict=True):
                way = (path(chunk, said)[1] if said else ()) or (0,)
                taken += [row + chunk.n - 1 + i for i in way]
                positions += range(chunk.seq.computed + chunk.n - 1, chunk.seq.computed + chunk.n - 1 + len(way))
                seqs += [chunk.seq] * len(way)
            kept = hidden[self._tensor(taken)]
        numbers = [self._numbers.get(seq) or self._number(seq) for seq in seqs]
        self._kept.append(KeptStates(kept, numbers, positions))
        self._kept_rows += len(kept)
        while self._kept_rows > KEPT:
            self._kept_rows -= len(self._kept.popleft().states)

    def _number(self, seq: Sequence) -> int:
        """0 for one that is in no engine: nobody would forget it."""
        if seq.state is not State.RUNNING:
            return 0
        self._next += 1
        self._numbers[seq] = self._next
        return self._next

    def _before(self, seq: Sequence, start: int, n: int) -> Tensor:
        """The hidden states before `n` positions from `start` on `[n, H]`; zeros where they are not known."""
        found, left = self._head.norm.new_zeros(n, self._head.config.hidden), n
        if (number := self._numbers.get(seq)) is None:
            return found
        for states, numbers, positions in reversed(self._kept):
            i = numbers.index(number) if number in numbers else len(numbers)
            while i < len(numbers) and numbers[i] == number:
                if 0 <= (at := positions[i] + 1 - start) < n:
                    found[at] = states[i]
                    left -= 1
                i += 1
            if left <= 0:
                break
        return found

    def _tensor(self, ids: list[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self._head.norm.device)


def _rows(batch: Seq[Chunk]) -> Iterator[int]:
    """Where each chunk begins in the rows of a step."""
    row = 0
    for chunk in batch:
        yield row
        row += chunk.positions
