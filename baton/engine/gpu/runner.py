"""A runner that submits a step to the device and does not wait for it.

`submit` fills the inputs, replays a graph or runs the model, samples, and starts the copies of the answers, all on one stream, so that
steps are computed in order; `Pending.result` waits for the event after the last copy. On the CPU, the same code computes immediately.
"""

import logging
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import takewhile

import torch
from torch import Tensor

from baton.engine.core.kvcache import KvPool
from baton.engine.core.protocol import Chunk, NonFiniteLogits, NothingAllowed, OutOfDeviceMemory, Tokens
from baton.engine.core.sampling import Sampled, SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.gpu.attention import DeviceAttention, Packed
from baton.engine.gpu.choice import Facts, first_that_works, installed, make_attention
from baton.engine.gpu.device import Mark, model_of, recover
from baton.engine.gpu.graphs import Captures, Graphs, ladder, uncaptured
from baton.engine.gpu.inputs import Capacity, Inputs, Seat, Step
from baton.engine.gpu.overlap import StepResult
from baton.engine.gpu.pool import DevicePool, rows
from baton.engine.gpu.sampler import Draw, Pick, Sampler, answers, pick_plainly
from baton.engine.gpu.trial import rehearse
from baton.engine.model.kv_views import DTYPES, views
from baton.engine.model.moe import Mixture, SeparateExperts
from baton.engine.model.transformer import Transformer
from baton.engine.runner import ModelRunner, computed_by

log = logging.getLogger(__name__)


class DevicePending:
    """A step that was submitted: its answers are being copied to the host."""

    def __init__(self, step: Step, rows: list[tuple[int, Sequence]], draw: Draw | None, copied: Mark) -> None:
        self._batch = step.batch
        self._rows = rows  # of the logits: index into the batch, and the sequence that is sampled
        self._draw = draw
        self._copied = copied

    def result(self) -> StepResult:
        self._copied.wait()
        tokens: list[Tokens] = [()] * len(self._batch)
        if self._draw is None:
            return StepResult(tokens)
        found: dict[int, list[Sampled | None]] = {}
        for (i, _), answer in zip(self._rows, answers(self._draw, [seq for _, seq in self._rows]), strict=True):
            found.setdefault(i, []).append(answer)
        for i, own in found.items():
            tokens[i] = tuple(takewhile(lambda answer: answer is not None, own))  # type: ignore[arg-type]
        denied = frozenset(i for at, (i, _) in enumerate(self._rows) if at in self._draw.denied)
        return StepResult(
            [() if i in denied else each for i, each in enumerate(tokens)],
            frozenset(i for i in found if not tokens[i]) - denied,
            denied,
        )


class GpuRunner(ModelRunner):
    """A `ModelRunner` that can `submit`. It is loaded as one; `attach` takes what a device needs in addition to a pool."""

    pool: DevicePool  # type: ignore[assignment]  # not a CPU's

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
        self._inputs = Inputs(capacity, self.layout.block_size, pool.num_blocks, self.device)
        self._sampler = Sampler(self.eos_token_ids, capacity.max_num_seqs, self.device, _pick(self.device))
        config = self.model.config
        kv = Packed(self.blocks, self.layout.head_dim) if self.layout.stored == "int4" else self.blocks
        self.attention: DeviceAttention = make_attention(
            backend, kv, config.attention, config.heads, self.layout.value_dim, self._inputs, found.get("scales"),
            DTYPES[self.layout.dtype],
        )  # fmt: skip
        self.graphs = Graphs(Captures(self.device) if self.device.type == "cuda" else uncaptured)
        if self.attention.capturable and not _asks_the_device(self.model):
            self._capture(ladder(capacity.max_num_seqs) if graph_sizes is None else sorted(graph_sizes))
        self._warm_up_sampler()

    def choose_attention(self, wanted: str, declared_equal: bool = False) -> str:
        """The backend to `attach` with: `wanted`, or for auto the first that works. What does not is passed over, and the reason logged.
        Raises ValueError if none does. Call it before there is a pool: from then on the layout tells by which GPU and which kernels KV is
        computed, unless that is `declared_equal` everywhere."""
        config, layout = self.model.config, self.layout
        facts = Facts(self.device.type, DTYPES[layout.dtype], layout.block_size, layout.head_dim, layout.parts, layout.stored)
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
        for name in ("blocks", "pool", "_memory", "attention", "graphs", "_inputs", "_sampler"):
            self.__dict__.pop(name, None)

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
        step, sampling, logits = self._compute(batch)
        draw: Draw | None = None
        rows = [(i, seq) for i in sampling for seq in batch[i].rows]
        if any(chunk.drafts for chunk in batch):  # the host knows all tokens, and keeps it so
            draw = self._to_host(self._sampler.draw(logits, [seq for _, seq in rows], [Seat(at) for at in range(len(rows))], guessed=True))
        elif sampling:
            seated = [seat for i, seat in zip(step.order, step.seated, strict=True) if batch[i].samples]
            draw = self._sampler.draw(logits, [batch[i].seq for i in sampling], seated)
            self._inputs.remember(seated, draw.tokens)
            draw = self._to_host(draw)
        copied = Mark(self.device)
        copied.record()
        return DevicePending(step, rows, draw, copied)

    @torch.inference_mode()
    def run_logits(self, batch: Seq[Chunk]) -> Tensor:
        """Computes the batch; float32 logits `[chunks that sample, V]` in the batch's order."""
        _, sampling, logits = self._compute(batch)
        return logits[torch.tensor(sampling, device=self.device).argsort()]

    def _compute(self, batch: Seq[Chunk]) -> tuple[Step, list[int], Tensor]:
        """(step, indices of the chunks that sample, in the step's order, the logits of their rows in that order)."""
        step = self._inputs.prepare(batch, self.graphs.sizes)
        sampling = [i for i in step.order if batch[i].samples]
        self.attention.begin(step)
        if step.captured:
            logits = self.graphs.run(step.size)
            if len(sampling) == len(batch):
                return step, sampling, logits[: len(batch)]
            return step, sampling, logits[self._inputs.upload([row for row, i in enumerate(step.order) if batch[i].samples])]
        lasts = (step.rows[1:] - 1).tolist()
        ends = [(batch[i], last) for i, last in zip(step.order, lasts, strict=True) if batch[i].samples]
        rows = [row for chunk, last in ends for row in range(last - len(chunk.drafts), last + 1)]
        return step, sampling, self._forward(step, self._inputs.upload(rows))

    def _forward(self, step: Step, rows: Tensor) -> Tensor:
        return self.model.forward(self._inputs.ids(step), step.positions, self.attention, rows)

    @torch.inference_mode()
    def _capture(self, sizes: Seq[int]) -> None:
        """Captures graphs of these sizes, ascending, from batches of dummies. All write their logits to the same tensor."""
        logits = torch.empty(max(sizes, default=0), self.vocab_size, device=self.device)
        for size in reversed(sizes):
            step = self._inputs.dummies(size)
            self.attention.begin(step)
            rows = torch.arange(size, device=self.device)
            self.graphs.add(size, lambda step=step, rows=rows: logits[: len(rows)].copy_(self._forward(step, rows)))  # type: ignore[misc]

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


def _asks_the_device(model: Transformer) -> bool:
    """Whether a forward pass reads numbers back from the device. Experts with separate matrices do, and cannot be captured."""
    return any(isinstance(layer.mlp, Mixture) and isinstance(layer.mlp.experts, SeparateExperts) for layer in model.layers)


def _pick(device: torch.device) -> Pick:
    """Our kernels if Triton can compile them."""
    if device.type != "cuda" or not installed("triton"):
        return pick_plainly
    from baton.engine.gpu.triton_sampling import pick

    return pick
