"""Attention in our own kernels, and what it shares with borrowed backends: these read the pool, and our kernel writes it."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from baton.engine.gpu import triton_attention, triton_store
from baton.engine.gpu.attention import DeviceAttention, Packed
from baton.engine.gpu.inputs import DeviceStep, Inputs
from baton.engine.model.checkpoint import LayerAttention


class StoringAttention(DeviceAttention):
    """Stores with our own kernel, then computes the decodes, then the spans with more than one query."""

    capturable = True

    def begin(self, step: DeviceStep) -> None:
        self.step = step

    def __call__(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        step = self.step
        triton_store.store(kv, self.views[layer], step.slots, step.tails, step.sources)
        out = q.new_empty(len(q), self.heads, self.value_dim)
        if step.size:
            self.decode(layer, q[: step.size], out[: step.size])
        if len(q) > step.size:
            self.prefill(layer, q, out)
        return out.view(len(q), -1)

    def decode(self, layer: int, q: Tensor, out: Tensor) -> None:
        """q `[size, Hq, D]` → out `[size, Hq, Dv]`."""
        raise NotImplementedError

    def prefill(self, layer: int, q: Tensor, out: Tensor) -> None:
        """Rows `[size:]` of q `[T, Hq, D]` → the same rows of out `[T, Hq, Dv]`."""
        raise NotImplementedError


class TritonAttention(StoringAttention):
    """Our kernels; but plain causal prefills, which are bound by arithmetic, use torch's own over gathered keys and values."""

    name = "triton"

    def __init__(
        self,
        pool: Tensor | Packed,
        layers: Sequence[LayerAttention],
        heads: int,
        value_dim: int,
        inputs: Inputs,
        scales: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(pool, layers, heads, value_dim, inputs, scales, dtype)
        pool = self.pool
        _, _, parts, self._kv_heads, _, _ = pool.shape
        cuda = pool.device.type == "cuda"
        self._processors = torch.cuda.get_device_properties(pool.device).multi_processor_count if cuda else 1
        self._plain = [parts == 2 and how.window is None and how.softcap is None for how in layers]
        self._part_rows = torch.arange(parts * self._kv_heads, device=pool.device)[:, None]

    def begin(self, step: DeviceStep) -> None:
        super().begin(step)
        self._gathers = [self._gather(i) for i in range(step.decodes, len(step.spans))] if any(self._plain) else []

    def _gather(self, i: int) -> Tensor:
        """Rows of all heads and blocks of the step's sequence i, `[2 * Hkv * M]`."""
        count = -(-int(self.step.lengths[i]) // self.inputs.block_size)
        blocks = self.inputs.tables[self.step.seated[i].index, :count].long()
        return (blocks * self.paged.rows_per_block + self._part_rows).view(-1)

    def decode(self, layer: int, q: Tensor, out: Tensor) -> None:
        parts = triton_attention.splits(len(q), self._kv_heads, self._processors)
        triton_attention.decode(q, self.views[layer], self.inputs.tables, self.step.seats, self.step.lens, self.layers[layer], out, parts)

    def prefill(self, layer: int, q: Tensor, out: Tensor) -> None:
        step, how = self.step, self.layers[layer]
        if not self._plain[layer]:
            longest = max(span.n for span in step.spans)
            queries = triton_attention.Queries(step.firsts, step.size, longest)
            triton_attention.prefill(q, self.views[layer], self.inputs.tables, step.seats, step.lens, queries, how, out)
            return
        row = step.size
        for span, gather in zip(step.spans[step.decodes :], self._gathers, strict=True):
            kv = self.paged.layers[layer].read(gather, None, q.dtype).view(2, 1, self._kv_heads, -1, q.shape[2])
            k, v = kv[..., : span.start + span.n, :]  # [1, Hkv, keys, D] each
            mine = q[row : row + span.n].transpose(0, 1)[None]  # [1, Hq, n, D]
            mask = causal_lower_right(span.n, k.shape[2]) if span.start else None
            answer = F.scaled_dot_product_attention(mine, k, v, mask, is_causal=mask is None, scale=how.scale, enable_gqa=True)
            out[row : row + span.n] = answer[0].transpose(0, 1)
            row += span.n
