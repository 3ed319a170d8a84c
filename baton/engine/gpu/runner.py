"""A runner that submits a step to the device and does not wait for it.

`submit` fills the inputs, replays a graph or runs the model, samples, and starts the copies of the answers, all on one stream, so that
steps are computed in order; `Pending.result` waits for the event after the last copy. On the CPU, the same code computes immediately.
"""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Protocol

import torch
from torch import Tensor

from baton.engine.core.kvcache import KvPool
from baton.engine.core.protocol import Chunk, NonFiniteLogits, NothingAllowed, OutOfDeviceMemory, Tokens
from baton.engine.core.sampling import Sampled, SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.gpu.attention import DeviceAttention, Packed
from baton.engine.gpu.choice import BackendFacts, first_that_works, installed, make_attention
from baton.engine.gpu.device import Mark, model_of, recover
from baton.engine.gpu.graphs import Captures, Compute, Graphs, ladder, uncaptured
from baton.engine.gpu.inputs import Capacity, DeviceStep, Inputs, Seat
from baton.engine.gpu.overlap import StepResult
from baton.engine.gpu.pool import DevicePool, rows
from baton.engine.gpu.sampler import Draw, Pick, Sampler, answers, pick_plainly
from baton.engine.gpu.trial import rehearse
from baton.engine.model.kv_views import DTYPES, views
from baton.engine.model.moe import Mixture, SeparateExperts
from baton.engine.model.transformer import Transformer
from baton.engine.runner import Companion, ModelRunner, computed_by, rows_of

log = logging.getLogger(__name__)


Rows = list[tuple[int, Sequence]]  # of logits: index into the batch, and the sequence that is sampled


class DeviceCompanion(Companion, Protocol):
    """A `Companion` on a device. `follow` is called when the step is submitted: it does not wait, and what the chunks yield is not known
    yet."""

    def place(self, kv: Tensor, capacity: Capacity, capture: Callable[[Compute], Compute]) -> None:
        """Replaces `attach`. The last of the blocks is scratch. `capture`: see `Graphs`."""
        ...

    def detach(self) -> None:
        """Drops all that `place` made."""
        ...


class DevicePending:
    """A step that was submitted: its answers are being copied to the host."""

    def __init__(self, batch: Seq[Chunk], draws: list[tuple[Rows, Draw]], copied: Mark) -> None:
        self._batch = batch
        self._draws = draws
        self._copied = copied

    def result(self) -> StepResult:
        self._copied.wait()
        tokens: list[Tokens] = [()] * len(self._batch)
        found: dict[int, list[Sampled | None]] = {}
        denied = frozenset(i for told, draw in self._draws for at, (i, _) in enumerate(told) if at in draw.denied)
        for told, draw in self._draws:
            for (i, _), answer in zip(told, answers(draw, [seq for _, seq in told]), strict=True):
                found.setdefault(i, []).append(answer)
        for i, own in found.items():
            tokens[i] = tuple(takewhile(lambda answer: answer is not None, own))  # type: ignore[arg-type]
        return StepResult(
            [() if i in denied else each for i, each in enumerate(tokens)],
            frozenset(i for i in found if not tokens[i]) - denied,
            denied,
        )


class GpuRunner(ModelRunner):
    """A `ModelRunner` that can `submit`. It is loaded as one; `attach` takes what a device needs in addition to a pool."""

    pool: DevicePool  # type: ignore[assignment]  # not a CPU's
    draft: DeviceCompanion | None

    def attach(
        self,
        pool: KvPool,
        tensor: Tensor | None = None,
        capacity: Capacity | None = None,
        backend: str = "auto",
        graph_sizes: Seq[int] | None = None,
    ) -> None:
        """Lays out a pool like `pool` on the device, or uses `tensor`, `[rows(layout, num_blocks), *]`, contiguous (see `DevicePool`).

        `capacity` bounds every batch. `backend`: see `baton.engine.gpu.choice`. `graph_sizes`: batch sizes for which decode steps are
        captured, if possible; None: a ladder up to the capacity. Raises ValueError for a pool of another layout and for a backend that is
        not available.
        """
        if difference := self.layout.difference(pool.layout):
            raise ValueError(f"the pool does not fit the model: {difference}")
        if capacity is None:
            raise ValueError("capacity: a runner on a device needs a bound on its batches")
        shape = rows(self.layout, pool.num_blocks), self.layout.block_bytes
        memory = torch.zeros(shape, dtype=torch.uint8, device=self.device) if tensor is None else tensor.view(torch.uint8).view(shape)
        self.pool, self._memory = DevicePool(self.layout, memory), memory
        found = views(self.layout, memory[: pool.num_blocks + 1])  # the last one is scratch
        self.blocks = found["kv"]
        self._hidden: Tensor | None = None  # of the last captured step, [T, H]
        self._inputs = Inputs(capacity, self.layout.block_size, pool.num_blocks, self.device)
        self._sampler = Sampler(self.eos_token_ids, capacity.max_num_seqs, self.device, picking(self.device))
        config = self.model.config
        kv = Packed(self.blocks, self.layout.head_dim, found["scales"]) if self.layout.stored == "int5" else self.blocks
        self.attention: DeviceAttention = make_attention(
            backend, kv, config.attention, config.heads, self.layout.value_dim, self._inputs, found.get("scales"),
            DTYPES[self.layout.dtype],
        )  # fmt: skip
        capture = Captures(self.device) if self.device.type == "cuda" else uncaptured
        self.graphs = Graphs(capture)
        if self.attention.capturable and not asks_the_device(self.model):
            self._capture(ladder(capacity.most_rows) if graph_sizes is None else sorted(graph_sizes))
        self._warm_up_sampler()
        if self.draft is not None:
            self.draft.place(found["draft"], capacity, capture)

    def choose_attention(self, wanted: str, declared_equal: bool = False) -> str:
        """The backend to `attach` with: `wanted`, or for auto the first that works. What does not is passed over, and the reason logged.
        Raises ValueError if none does. Call it before there is a pool: from then on the layout tells by which GPU and which kernels KV is
        computed, unless that is `declared_equal` everywhere."""
        config, layout = self.model.config, self.layout
        facts = BackendFacts(self.device.type, DTYPES[layout.dtype], layout.block_size, layout.head_dim, layout.parts, layout.stored)
        shape = config.attention, config.heads, layout.num_kv_heads, layout.value_dim, self.device
        done = first_that_works(wanted, facts, lambda name: rehearse(name, facts, *shape))
        for tried in done[:-1]:
            log.warning("attention backend %s is passed over: %s", tried.backend, tried.reason)
        chosen = done[-1].backend
        if declared_equal:
            return chosen
        # The kernels share the work by the size of the batch, so bits depend on it.
        arithmetic = f"{model_of(self.device)}, {self.model.ops.arithmetic}, {chosen}, not batch-invariant"
        log.info("arithmetic: %s", arithmetic)
        model = layout.model_fingerprint.rpartition("-")[0]
        self.layout = replace(layout, model_fingerprint=computed_by(model, arithmetic))
        return chosen

    def detach(self) -> None:
        """Drops the pool and all that `attach` made."""
        for name in ("blocks", "pool", "_memory", "attention", "graphs", "_inputs", "_sampler", "_hidden"):
            self.__dict__.pop(name, None)
        if self.draft is not None:
            self.draft.detach()

    def run(self, batch: Seq[Chunk]) -> list[Tokens]:
        result = self.submit(batch).result()
        if result.failed:
            raise NonFiniteLogits([batch[i].seq.id for i in sorted(result.failed)])
        if result.denied:
            raise NothingAllowed([batch[i].seq.id for i in sorted(result.denied)])
        return result.tokens

    def submit(self, batch: Seq[Chunk]) -> DevicePending:
        """See `OverlapRunner.submit`."""
        try:
            return self._submit(batch)
        except torch.OutOfMemoryError as error:
            said = str(error)  # of the error nothing else is kept: its frames hold the tensors of the step
        recover(self.device)
        log.error("no memory for a step of %d sequences and %d tokens: %s", len(batch), sum(chunk.positions for chunk in batch), said)
        raise OutOfDeviceMemory(said)

    @torch.inference_mode()
    def _submit(self, batch: Seq[Chunk]) -> DevicePending:
        step, logits, hidden = self._compute(batch)
        draws = self._sample(step, logits)
        if self.draft is not None:
            self.draft.follow(batch, self._in_order(step, hidden), ())
        copied = Mark(self.device)
        copied.record()
        return DevicePending(batch, draws, copied)

    @torch.inference_mode()
    def run_logits(self, batch: Seq[Chunk]) -> Tensor:
        """Computes the batch; float32 logits `[R, V]`, a row for each of `Chunk.rows`, in the batch's order."""
        step, logits, _ = self._compute(batch)
        own = _sampled(step)
        return logits[self._inputs.upload([row for i in sorted(own) for row in own[i]])]

    def _compute(self, batch: Seq[Chunk]) -> tuple[DeviceStep, Tensor, Tensor | None]:
        """(step, the logits of what is sampled, in the step's order, the hidden states of all tokens, if somebody reads them)."""
        step = self._inputs.prepare(batch, self.graphs.sizes)
        self.attention.begin(step)
        rows, end = list[int](), 0
        for chunk in (batch[i] for i in step.order):
            end += chunk.positions
            rows += range(end - 1 - chunk.guesses, end) if chunk.samples else ()
        if not step.captured:
            return step, *self._forward(step, self._inputs.upload(rows))
        logits = self.graphs.run(step.size)
        hidden = None if self._hidden is None else self._hidden[:end]
        return step, logits[:end] if len(rows) == end else logits[self._inputs.upload(rows)], hidden

    def _forward(self, step: DeviceStep, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        ids = self._inputs.ids(step)
        if self.draft is None or not self.draft.reads_hidden:
            return self.model.forward(ids, step.positions, self.attention, rows), None
        hidden = self.model.hidden(ids, step.positions, self.attention, None)
        return self.model.logits(hidden[rows]), hidden

    def _sample(self, step: DeviceStep, logits: Tensor) -> list[tuple[Rows, Draw]]:
        """Sequences with guesses on their own: the host knows their tokens, and keeps it so."""
        batch, own, draws = step.batch, _sampled(step), list[tuple[Rows, Draw]]()
        for guessed in (False, True):
            chosen = [i for i in own if bool(batch[i].drafts) == guessed]
            if not chosen:
                continue
            some = logits if len(chosen) == len(own) else logits[self._inputs.upload([row for i in chosen for row in own[i]])]
            rows = [(i, seq) for i in chosen for seq in rows_of(batch[i])]
            seqs = [seq for _, seq in rows]
            if guessed:
                draw = self._sampler.draw(some, seqs, [Seat(at) for at in range(len(rows))], guessed=True)
            else:
                seated = [self._inputs.seat(seq) for seq in seqs]
                draw = self._sampler.draw(some, seqs, seated)
                self._inputs.remember(seated, draw.tokens)
            draws.append((rows, self._to_host(draw)))
        return draws

    def _in_order(self, step: DeviceStep, hidden: Tensor | None) -> Tensor | None:
        """The states of the batch's tokens, in the batch's order."""
        if hidden is None or step.order == sorted(step.order):
            return hidden
        own, end = dict[int, range](), 0
        for i in step.order:
            own[i] = range(end, end + step.batch[i].positions)
            end = own[i].stop
        return hidden[self._inputs.upload([row for i in sorted(own) for row in own[i]])]

    @torch.inference_mode()
    def _capture(self, sizes: Seq[int]) -> None:
        """Captures graphs of these sizes, ascending, from batches of dummies. All write to the same tensors."""
        most = max(sizes, default=0)
        logits = torch.empty(most, self.vocab_size, device=self.device)
        if self.draft is not None and self.draft.reads_hidden:
            self._hidden = torch.empty(most, self.model.config.hidden, dtype=self.model.dtype, device=self.device)

        def compute(step: DeviceStep, rows: Tensor) -> Tensor:
            found, hidden = self._forward(step, rows)
            if hidden is not None and self._hidden is not None:
                self._hidden[: len(rows)].copy_(hidden)
            return logits[: len(rows)].copy_(found)

        for size in reversed(sizes):
            step = self._inputs.dummies(size)
            self.attention.begin(step)
            self.graphs.add(size, partial(compute, step, torch.arange(size, device=self.device)))

    @torch.inference_mode()
    def _warm_up_sampler(self) -> None:
        """Its kernels are compiled at their first call, which should not be a request's."""
        params = SamplingParams(max_tokens=1, top_k=2, top_p=0.5, min_p=0.1, logprobs=1)
        seq = Sequence("warm-up", [0], 1, params, root=b"")
        self._sampler.draw(torch.zeros(1, self.vocab_size, device=self.device), [seq], [])

    def _to_host(self, draw: Draw) -> Draw:
        """Starts the copies into pinned memory. They are valid after the step's event."""
        tensors = (draw.tokens, draw.finite, draw.logprobs, draw.ids)
        tokens, finite, logprobs, ids = (None if t is None else t.to("cpu", non_blocking=True) for t in tensors)
        assert tokens is not None and finite is not None
        return replace(draw, tokens=tokens, finite=finite, logprobs=logprobs, ids=ids)


def _sampled(step: DeviceStep) -> dict[int, range]:
    """Rows of the logits that `_compute` finds, by chunk, in the step's order."""
    own, end = dict[int, range](), 0
    for i in step.order:
        if step.batch[i].samples:
            own[i] = range(end, end + 1 + step.batch[i].guesses)
            end = own[i].stop
    return own


def asks_the_device(model: Transformer) -> bool:
    """Whether a forward pass reads numbers back from the device. Experts with separate matrices do, and cannot be captured."""
    return any(isinstance(layer.mlp, Mixture) and isinstance(layer.mlp.experts, SeparateExperts) for layer in model.layers)


def picking(device: torch.device) -> Pick:
    """Our kernels if Triton can compile them."""
    if device.type != "cuda" or not installed("triton"):
        return pick_plainly
    from baton.engine.gpu.triton_sampling import pick

    return pick
