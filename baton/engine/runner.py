"""One model on one torch device: batches in, sampled tokens out."""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.core.kvcache import DraftKv, KvLayout, KvPool
from baton.engine.core.long_contexts import Shelf
from baton.engine.core.protocol import Chunk, Tokens
from baton.engine.core.sampling import Sampled
from baton.engine.core.sequence import Sequence
from baton.engine.facts.fingerprint import fingerprint
from baton.engine.model.attention import PagedAttention, PagedKv, Span, batch_order, plan
from baton.engine.model.checkpoint import Checkpoint, expected_tensors
from baton.engine.model.config_json import read_config
from baton.engine.model.kv_views import DTYPES, views
from baton.engine.model.linear import PLAIN
from baton.engine.model.long_attention import LongKv
from baton.engine.model.memory import keep_memory, return_memory
from baton.engine.model.ops import Ops
from baton.engine.model.projections import Attention
from baton.engine.model.quantised.matrix import Matrix
from baton.engine.model.sampler import sample, score, takes_greatest
from baton.engine.model.sizes import rounded_up
from baton.engine.model.transformer import Transformer
from baton.engine.options import Options

if TYPE_CHECKING:
    from baton.engine.cpu.decode_steps import DecodeSteps

# What the fingerprint says of the matrices, the head last if it differs
ROUNDED = {"auto": "", "float": "-float", "int8": "-int8", "int4": "-int4+int8"}
DECLARED = "declared equal"
log = logging.getLogger(__name__)


def computed_by(model: str, arithmetic: str) -> str:
    """The fingerprint of a model's KV and streams where they are computed so."""
    return f"{model}-{blake2b(arithmetic.encode(), digest_size=4).hexdigest()}"


def ignore_progress(done: int, total: int) -> None:
    """Serves callers that do not follow the load."""


class ForwardPart(NamedTuple):
    """A span with its tokens `[span.tokens]`, and of how many of them, the last ones, the logits are wanted."""

    span: Span
    tokens: Seq[int]
    wants: int


class Computed(NamedTuple):
    """The results of parts, in their order. The next step may overwrite it."""

    logits: Tensor  # float32 [R, V], a row for each token whose logits are wanted
    best: list[int] | None  # what `sampler.greatest` finds in them if it is known
    hidden: Tensor | None  # [T, H] of all tokens, if a companion reads them


class Companion(Protocol):
    """What has KV of its own in the blocks of a model that it drafts for: `baton.engine.draft_model.DraftModel`, and
    `baton.engine.head_drafter.HeadDrafter`."""

    kv: DraftKv
    reads_hidden: bool  # of the model

    def attach(self, kv: Tensor) -> None:
        """`kv` `[N, L, P, Hkv, bs, D]`: its part of every block."""
        ...

    def follow(self, batch: Seq[Chunk], hidden: Tensor | None, yields: Seq[Tokens]) -> None:
        """Computes its KV of the known tokens of a batch that the model has computed, unless it will do so later: `Sequence.drafted` says
        how far it is. When a chunk of a prompt ends, it is there. `hidden` `[T, H]`: of all tokens of the batch, if it reads them;
        `yields`: what each chunk yields."""
        ...


class ModelRunner:
    """A `Runner`, made in two steps: `load` the weights, then `attach` the pool. How many blocks fit is decided in between."""

    pool: KvPool
    _memory: Tensor  # of the pool: [num_blocks, block_bytes] uint8

    def __init__(self, model: Transformer, layout: KvLayout, device: torch.device) -> None:
        self.model = model
        self.layout = layout
        self.device = device
        self.vocab_size = model.config.vocab
        if layout.stored == "int5":
            model.turn_heads()
        self.eos_token_ids = model.config.eos_token_ids
        self.max_positions = model.config.max_positions
        self._paged: PagedKv | None = None
        self._steps: DecodeSteps | None = None
        self._long: LongKv | None = None
        self.draft: Companion | None = None
        self.on_device = device.type != "cpu"
        self.matrices = ", ".join(f"{count} {form}" for form, count in sorted(model.forms.items()) if form != PLAIN)
        self.separates_output = False

    @classmethod
    def load(
        cls,
        options: Options,
        choose: Callable[[torch.device, torch.dtype], Ops] = lambda device, dtype: Ops(),
        progress: Callable[[int, int], None] = ignore_progress,
    ) -> Self:
        """Reads the Hugging Face folder; `progress(done, total)` is called for each tensor. The options are settled.

        `choose`: what computes the layers' operations. Raises CheckpointError for a folder that cannot be served, ValueError for a type
        that this processor cannot multiply.
        """
        path, dtype, weight_dtype, stored = options.path, options.model.dtype, options.engine.weight_dtype, options.engine.kv_stored
        config = read_config(path)
        return_memory()
        checkpoint = Checkpoint(path, config)
        total, done = len(expected_tensors(config)), 0

        def read(name: str) -> Matrix:
            nonlocal done
            done += 1
            progress(done, total)
            return checkpoint.matrix(name)

        where = torch.device(options.engine.device)
        model = Transformer(config, read, DTYPES[dtype], where, choose(where, DTYPES[dtype]), weight_dtype)
        keep_memory()
        # KV and streams are continued only where they would have had the same bits: with the same weights, type, rounding and arithmetic.
        arithmetic = DECLARED if options.engine.equal_arithmetic else f"{where.type}, {model.ops.arithmetic}"
        log.info("arithmetic: %s", arithmetic)
        layout = KvLayout(
            computed_by(f"{fingerprint(path)}-{dtype}{ROUNDED[weight_dtype]}{stored and f'-kv_{stored}'}", arithmetic),
            dtype,
            options.block_size,
            config.layers,
            config.kv_heads,
            config.head_dim,
            parts=config.kv_parts,
            value_dim=config.kv_value_dim,
            stored=stored,
        )
        made = cls(model, layout, where)
        if made.matrices:
            log.info("quantised matrices: %s", made.matrices)
        return made

    def attach(self, pool: KvPool, tensor: Tensor | None = None) -> None:
        """Keys and values will live in `pool`; `tensor` is its memory as `[num_blocks, *block_shape]` if that is not host memory.

        Raises ValueError for a pool of another layout.
        """
        if difference := self.layout.difference(pool.layout):
            raise ValueError(f"the pool does not fit the model: {difference}")
        memory = torch.from_numpy(pool.array) if tensor is None else tensor.view(torch.uint8).view(pool.num_blocks, -1)
        found = views(self.layout, memory)
        self.pool = pool
        self._memory = memory
        self.use(found["kv"], found.get("scales"))
        if self.draft is not None:
            self.draft.attach(found["draft"])

    def pair(self, draft: Companion) -> None:
        """`draft` has its KV in the same blocks. Call it before there is a pool."""
        self.draft = draft
        self.layout = replace(self.layout, draft=draft.kv)

    def use(self, kv: Tensor, scales: Tensor | None = None) -> None:
        """Keys and values will live in `kv`; `scales`: what `KvLayout.views` calls so."""
        kernels = self.model.ops.attention(self.layout.stored)
        layout = self.layout
        self._paged = paged = PagedKv(kv, layout.value_dim, kernels, scales, DTYPES[layout.dtype], layout.head_dim)
        self.separates_output = paged.kernels is not None and not self.model.ops.recurring
        if self.model.ops.records and paged.kernels is not None:
            from baton.engine.cpu.decode_steps import DecodeSteps

            self._steps = DecodeSteps(self.model, paged)

    def read_from(self, shelf: Shelf, longest: int) -> None:
        """See `ReadsShelf`. Call it when there is a pool."""
        self._long = LongKv(self.pool, self.paged, shelf, longest)

    @property
    def paged(self) -> PagedKv:
        assert self._paged is not None, "attach a pool first"
        return self._paged

    @property
    def takes_steps(self) -> bool:
        """Whether a `Span` may be computed as steps."""
        return self.paged.kernels is not None

    def run(self, batch: Seq[Chunk]) -> list[Tokens]:
        """See `Runner.run`. Raises NonFiniteLogits if logits are not finite."""
        logits, best, hidden = self._logits(batch)
        told: list[Tokens] | None = None
        if best is not None and min(best) >= 0 and all(_greedy(chunk.seq) for chunk in batch):
            found = iter(best)  # a row for each token of the batch, for all of them are steps
            yields = [tuple([_sampled(next(found)) for _ in range(chunk.positions)]) for chunk in batch]
        else:
            if any(chunk.scored for chunk in batch):
                logits, told = _scores(logits, batch)
            rows = [rows_of(chunk) for chunk in batch]
            sampled = iter(sample(logits, list(chain.from_iterable(rows)), self.eos_token_ids, best, self.model.ops.draw))
            yields = [tuple(next(sampled) for _ in own) for own in rows]
        if self.draft is not None:
            self.draft.follow(batch, hidden, yields)
        return yields if told is None else [(*scores, *tokens) for scores, tokens in zip(told, yields, strict=True)]

    @torch.inference_mode()
    def copy(self, source: int, target: int) -> None:
        """See `Runner.copy`."""
        self._memory[target].copy_(self._memory[source])

    def run_logits(self, batch: Seq[Chunk]) -> Tensor:
        """Computes the batch; float32 logits `[R, vocab]`, a row for each of `Chunk.rows` in the batch's order, and for all positions of a
        chunk that scores."""
        computed = self._logits(batch)
        return computed.logits if computed.best is None else computed.logits.clone()

    def _logits(self, batch: Seq[Chunk]) -> Computed:
        """What `logits_of` finds for the parts of the batch; each long sequence is computed by itself."""
        if self._long is not None and any(chunk.seq.long for chunk in batch):
            return self._mixed(batch, self._long)
        return self.logits_of([part for chunk in batch for part in parts_of(chunk, self.takes_steps)])

    def logits_of(self, parts: Seq[ForwardPart]) -> Computed:
        if self._steps is not None and all(part.span.steps and part.wants == len(part.tokens) for part in parts):
            tokens = list(chain.from_iterable(part.tokens for part in parts))
            if (found := self._steps.logits([part.span for part in parts], tokens)) is not None:
                return Computed(*found)
        return self._planned(parts, self.paged)

    @torch.inference_mode()
    def _mixed(self, batch: Seq[Chunk], long: LongKv) -> Computed:
        logits: dict[int, Tensor] = {}  # chunk → rows
        for i, chunk in enumerate(batch):
            if chunk.seq.long:
                found = [part._replace(span=part.span._replace(blocks=long.table(chunk.seq))) for part in parts_of(chunk, self.takes_steps)]
                order = batch_order([part.span for part in found])
                attention = long.attention(chunk.seq, [found[j].span for j in order], self.model.config.attention)
                logits[i] = self._computed(found, order, attention.positions, attention).logits
        whole = [i for i in range(len(batch)) if i not in logits]
        parts = [parts_of(batch[i], self.takes_steps) for i in whole]
        if whole:
            rows = self.logits_of([part for own in parts for part in own]).logits
            logits |= zip(whole, rows.split([sum(part.wants for part in own) for own in parts]), strict=True)
        return Computed(torch.cat([logits[i] for i in range(len(batch))]), None, None)

    @torch.inference_mode()
    def _planned(self, parts: Seq[ForwardPart], paged: PagedKv) -> Computed:
        order = batch_order([part.span for part in parts])
        meta = plan([parts[i].span for i in order], paged, self.model.config.attention)
        return self._computed(parts, order, meta.positions, PagedAttention(paged, meta))

    def _computed(self, parts: Seq[ForwardPart], order: list[int], given: Tensor, attention: Attention) -> Computed:
        """`given`: the positions of the parts in this order."""
        tokens: list[int] = []
        own: dict[int, range] = {}  # part → rows of the step
        for i in order:
            own[i] = range(len(tokens), len(tokens) + len(parts[i].tokens))
            tokens += parts[i].tokens
        rows = [row for i, part in enumerate(parts) for row in own[i][len(own[i]) - part.wants :]]
        more = more_rows = 0
        if self.model.ops.recurring:
            more, more_rows = rounded_up(len(tokens)) - len(tokens), rounded_up(len(rows)) - len(rows)
        positions = F.pad(given, (0, more)) if more else given
        padded, padded_rows = self._tensor(tokens + [0] * more), self._tensor(rows + rows[-1:] * more_rows)
        if self.draft is None or not self.draft.reads_hidden:
            return Computed(self.model.forward(padded, positions, attention, padded_rows)[: len(rows)], None, None)
        hidden = self.model.hidden(padded, positions, attention, None)
        logits = self.model.logits(hidden[padded_rows])[: len(rows)]
        return Computed(logits, None, hidden[self._tensor([row for i in range(len(parts)) for row in own[i]])])

    def _tensor(self, ids: list[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self.device)


def _scores(logits: Tensor, batch: Seq[Chunk]) -> tuple[Tensor, list[Tokens]]:
    """The rows that are left for sampling, and what each chunk says of its prompt."""
    told, left, row = list[Tokens](), list[int](), 0
    for chunk in batch:
        seq, start, count = chunk.seq, chunk.seq.computed + 1, chunk.scored
        known = seq.tokens[start : start + count]
        told.append(tuple(score(logits[row : row + count], known, seq.params.prompt_logprobs or 0)) if count else ())
        row += chunk.positions if count else len(chunk.rows)
        left += range(row - len(chunk.rows), row)
    return logits[left], told


def rows_of(chunk: Chunk) -> list[Sequence]:
    """`Chunk.rows`, or for rows of which the greatest logit is the answer, whatever was said before, the sequence itself."""
    return [chunk.seq] * (1 + chunk.guesses) if chunk.drafts and _greedy(chunk.seq) else chunk.rows


def _greedy(seq: Sequence) -> bool:
    """Whether its tokens are the likeliest ones, whatever was said before."""
    return seq.matcher is None and takes_greatest(seq.params)


@lru_cache(maxsize=1 << 14)
def _sampled(token: int) -> Sampled:
    return Sampled(token)


def parts_of(chunk: Chunk, exact: bool) -> list[ForwardPart]:
    """A chunk's part of the prompt, and its part of the output with the guesses, which is computed as steps: so what is computed again, or
    in one step with what follows, has the bits that it had. Without `exact`, one part, and there can be no branches."""
    seq, start, end = chunk.seq, chunk.seq.computed, chunk.seq.computed + chunk.n + len(chunk.drafts)
    if chunk.branches:
        assert exact, "branches are steps"
        branches = tuple(Span(start + 1, len(branch.drafts), branch.blocks, steps=True) for branch in chunk.branches)
        return [ForwardPart(Span(start, end - start, seq.blocks, True, branches), chunk.tokens, chunk.positions)]
    cut = min(max(start, seq.prompt_len), end) if exact else end
    spans = (Span(start, cut - start, seq.blocks), Span(cut, end - cut, seq.blocks, steps=True))
    sampled = start + chunk.n - 1 if chunk.samples else end
    tokens, first = chunk.tokens, start if chunk.scored else sampled  # the first position whose logits are wanted
    return [
        ForwardPart(span, tokens[span.start - start :][: span.n], max(0, span.start + span.n - max(first, span.start)))
        for span in spans
        if span.n
    ]
