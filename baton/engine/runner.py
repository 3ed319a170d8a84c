"""One model on one torch device: batches in, sampled tokens out."""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.core.kvcache import KvLayout, KvPool
from baton.engine.core.protocol import Chunk, Tokens, accepted
from baton.engine.facts.fingerprint import fingerprint
from baton.engine.model.attention import PagedAttention, PagedKv, Span, batch_order, plan
from baton.engine.model.checkpoint import Checkpoint, expected_tensors
from baton.engine.model.config_json import read_config
from baton.engine.model.kv_views import DTYPES, views
from baton.engine.model.memory import keep_memory, return_memory
from baton.engine.model.ops import Ops
from baton.engine.model.sampler import sample, score
from baton.engine.model.sizes import rounded_up
from baton.engine.model.transformer import Transformer
from baton.engine.options import Options

if TYPE_CHECKING:
    from baton.engine.cpu.decode_steps import DecodeSteps

ROUNDED = {"auto": "", "int8": "-int8", "int4": "-int4+int8"}  # what the fingerprint says of the matrices, the head last if it differs
DECLARED = "declared equal"
log = logging.getLogger(__name__)


def computed_by(model: str, arithmetic: str) -> str:
    """The fingerprint of a model's KV and streams where they are computed so."""
    return f"{model}-{blake2b(arithmetic.encode(), digest_size=4).hexdigest()}"


def ignore_progress(done: int, total: int) -> None:
    """Serves callers that do not follow the load."""


class ModelRunner:
    """A `Runner`, made in two steps: `load` the weights, then `attach` the pool. How many blocks fit is decided in between."""

    pool: KvPool

    def __init__(self, model: Transformer, layout: KvLayout, device: torch.device) -> None:
        self.model = model
        self.layout = layout
        self.device = device
        self.vocab_size = model.config.vocab
        self.eos_token_ids = model.config.eos_token_ids
        self.max_positions = model.config.max_positions
        self._paged: PagedKv | None = None
        self._steps: DecodeSteps | None = None
        self.on_device = device.type != "cpu"
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
        path, dtype, weight_dtype = options.path, options.model.dtype, options.engine.weight_dtype
        config = read_config(path)
        return_memory()
        checkpoint = Checkpoint(path, config)
        total, done = len(expected_tensors(config)), 0

        def read(name: str) -> Tensor:
            nonlocal done
            done += 1
            progress(done, total)
            return checkpoint.tensor(name)

        where = torch.device(options.engine.device)
        model = Transformer(config, read, DTYPES[dtype], where, choose(where, DTYPES[dtype]), weight_dtype)
        keep_memory()
        # KV and streams are continued only where they would have had the same bits: with the same weights, type, rounding and arithmetic.
        arithmetic = DECLARED if options.engine.equal_arithmetic else f"{where.type}, {model.ops.arithmetic}"
        log.info("arithmetic: %s", arithmetic)
        layout = KvLayout(
            computed_by(f"{fingerprint(path)}-{dtype}{ROUNDED[weight_dtype]}", arithmetic),
            dtype,
            options.block_size,
            config.layers,
            config.kv_heads,
            config.head_dim,
            parts=config.kv_parts,
            value_dim=config.kv_value_dim,
        )
        return cls(model, layout, where)

    def attach(self, pool: KvPool, tensor: Tensor | None = None) -> None:
        """Keys and values will live in `pool`; `tensor` is its memory as `[num_blocks, *block_shape]` if that is not host memory.

        Raises ValueError for a pool of another layout.
        """
        if difference := self.layout.difference(pool.layout):
            raise ValueError(f"the pool does not fit the model: {difference}")
        memory = torch.from_numpy(pool.array) if tensor is None else tensor.view(torch.uint8).view(pool.num_blocks, -1)
        found = views(self.layout, memory)
        kernels = None if self.layout.stored else self.model.ops.attention  # they read numbers of the model's own type
        self.pool = pool
        self._paged = paged = PagedKv(found["kv"], self.layout.value_dim, kernels, found.get("scales"), DTYPES[self.layout.dtype])
        self.separates_output = paged.kernels is not None and not self.model.ops.recurring
        if self.model.ops.records and paged.kernels is not None:
            from baton.engine.cpu.decode_steps import DecodeSteps

            self._steps = DecodeSteps(self.model, paged)

    def run(self, batch: Seq[Chunk]) -> list[Tokens]:
        """See `Runner.run`. Raises NonFiniteLogits if logits are not finite."""
        rows = [chunk.rows for chunk in batch]
        logits, best = self._logits(batch)
        told: list[Tokens] = [()] * len(batch)
        if any(chunk.scored for chunk in batch):
            logits, told = _scores(logits, batch)
        sampled = iter(sample(logits, list(chain.from_iterable(rows)), self.eos_token_ids, best, self.model.ops.draw))
        found = [accepted(chunk.drafts, [next(sampled) for _ in own]) if own else () for chunk, own in zip(batch, rows, strict=True)]
        return [(*scores, *tokens) for scores, tokens in zip(told, found, strict=True)]

    @torch.inference_mode()
    def copy(self, source: int, target: int) -> None:
        """See `Runner.copy`."""
        assert self._paged is not None, "attach a pool first"
        self._paged.pool[target].copy_(self._paged.pool[source])

    def run_logits(self, batch: Seq[Chunk]) -> Tensor:
        """Computes the batch; float32 logits `[R, vocab]`, a row for each position that is scored and each of `Chunk.rows`, in the batch's
        order."""
        logits, best = self._logits(batch)
        return logits if best is None else logits.clone()

    def _logits(self, batch: Seq[Chunk]) -> tuple[Tensor, list[int] | None]:
        """The logits, and what `sampler.greatest` finds in them if it is known. The next step may overwrite them then."""
        assert self._paged is not None, "attach a pool first"
        parts = [(i, span) for i, chunk in enumerate(batch) for span in spans_of(chunk, self._paged.kernels is not None)]
        if self._steps is not None and all(chunk.n == 1 and chunk.samples for chunk in batch) and all(span.steps for _, span in parts):
            tokens = list(chain.from_iterable(chunk.tokens for chunk in batch))
            if (found := self._steps.logits([span for _, span in parts], tokens)) is not None:
                return found
        order = batch_order([span for _, span in parts])
        return self._planned(batch, [parts[i] for i in order], self._paged), None

    @torch.inference_mode()
    def _planned(self, batch: Seq[Chunk], parts: Seq[tuple[int, Span]], paged: PagedKv) -> Tensor:
        """`parts`: the spans in `batch_order`, each with the index of its chunk."""
        meta = plan([span for _, span in parts], paged, self.model.config.attention)
        tokens: list[int] = []
        at: dict[tuple[int, int], int] = {}  # (chunk, its position that is scored or samples) → row
        for i, span in parts:
            chunk, first = batch[i], span.start - batch[i].seq.computed
            end = first + span.n
            asked = chain(range(first, min(chunk.scored, end)), range(max(first, chunk.n - 1), end if chunk.samples else 0))
            at |= {(i, each): len(tokens) + each - first for each in asked}
            tokens += chunk.tokens[first : first + span.n]
        rows = [at[key] for key in sorted(at)]
        more = more_rows = 0
        if self.model.ops.recurring:
            more, more_rows = rounded_up(len(tokens)) - len(tokens), rounded_up(len(rows)) - len(rows)
        positions = F.pad(meta.positions, (0, more)) if more else meta.positions
        padded, padded_rows = self._tensor(tokens + [0] * more), self._tensor(rows + rows[-1:] * more_rows)
        return self.model.forward(padded, positions, PagedAttention(paged, meta), padded_rows)[: len(rows)]

    def _tensor(self, ids: list[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self.device)


def _scores(logits: Tensor, batch: Seq[Chunk]) -> tuple[Tensor, list[Tokens]]:
    """The rows that are left for sampling, and what each chunk says of its prompt."""
    told, left, row = list[Tokens](), list[int](), 0
    for chunk in batch:
        seq, start, count = chunk.seq, chunk.seq.computed + 1, chunk.scored
        known = seq.tokens[start : start + count]
        told.append(tuple(score(logits[row : row + count], known, seq.params.prompt_logprobs or 0)) if count else ())
        after = row + count + len(chunk.rows)
        left += range(row + count, after)
        row = after
    return logits[left], told


def spans_of(chunk: Chunk, exact: bool) -> list[Span]:
    """A chunk's part of the prompt, and its part of the output with the guesses, which is computed as steps: so what is computed again, or
    in one step with what follows, has the bits that it had. Without `exact`, one span."""
    seq, start, end = chunk.seq, chunk.seq.computed, chunk.seq.computed + chunk.positions
    if not exact:
        return [Span(start, chunk.positions, seq.blocks)]
    cut = min(max(start, seq.prompt_len), end)
    parts = (Span(start, cut - start, seq.blocks), Span(cut, end - cut, seq.blocks, steps=True))
    return [part for part in parts if part.n]
