"""FlashInfer on the paged pool: any block size.

Its wrappers are planned on the host once per step, for all layers that attend alike, and run once per layer. A captured decode needs its
own wrapper for every size. The graph reads the buffers of that wrapper, and planning before a replay fills them.

`plan` starts a copy from pinned memory that the wrapper owns and overwrites in the next `plan`. With a step in flight, that copy may not
have been made yet, so each `begin` waits for the copies of the step before it. It does not wait for that step's computation, because the
copies come first.
"""

from collections.abc import Sequence

import numpy as np
import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
from torch import Tensor

from baton.engine.gpu.device import Mark
from baton.engine.gpu.graphs import LARGEST
from baton.engine.gpu.inputs import DeviceStep, Inputs
from baton.engine.gpu.triton_attention import flatten_tables
from baton.engine.gpu.triton_backend import StoringAttention
from baton.engine.model.checkpoint import LayerAttention

WORKSPACE_BYTES = 256 << 20  # what FlashInfer's split-KV needs on an H200 with room to spare
TENSOR_CORE_GROUP = 4  # from this many query heads per key head, tensor cores decode faster


class FlashInferAttention(StoringAttention):
    name = "flashinfer"

    def __init__(self, pool: Tensor, layers: Sequence[LayerAttention], heads: int, value_dim: int, inputs: Inputs) -> None:
        super().__init__(pool, layers, heads, value_dim, inputs)
        self._kinds = list(dict.fromkeys(self.layers))  # distinct, in order
        self._kind_of = [self._kinds.index(how) for how in self.layers]
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=pool.device)
        # Block tables of a step, one after the other; and the copy that captured decodes read. One more than any step's blocks.
        rows = max(inputs.capacity.max_num_seqs, LARGEST)  # a guess has a row of its own
        self._indices, self._captured = torch.zeros(2, rows * inputs.width + 1, dtype=torch.int32, device=pool.device)
        self._decoders: dict[int, list[BatchDecodeWithPagedKVCacheWrapper]] = {}  # by size; 0: not captured
        self._prefillers = [BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND") for _ in self._kinds]
        self._copied = Mark(pool.device)

    def begin(self, step: DeviceStep) -> None:
        super().begin(step)
        self._copied.wait()
        counts = -(-step.lengths // self.inputs.block_size)  # [B]
        firsts = np.append(0, np.cumsum(counts)).astype(np.int32)
        last = (step.lengths - 1) % self.inputs.block_size + 1
        if firsts[-1] > len(self._indices):  # of a step that is not captured
            self._indices = self._indices.new_zeros(int(firsts[-1]))
        flatten_tables(self.inputs.tables, step.seats, self.inputs.upload(firsts.tolist()), int(counts.max()), self._indices)
        indptr, last_len, shape = torch.from_numpy(firsts), torch.from_numpy(last.astype(np.int32)), self._shape()
        if step.size:
            self._decoding = self._wrappers(step)
            for how, decoder in zip(self._kinds, self._decoding, strict=True):
                decoder.plan(indptr[: step.size + 1], self._indices[: firsts[step.size]], last_len[: step.size], *shape, **self._how(how))
        if len(step.lengths) > step.size:
            queries = step.rows[step.size :] - step.rows[step.size]
            for how, prefiller in zip(self._kinds, self._prefillers, strict=True):
                prefiller.plan(
                    torch.from_numpy(queries),
                    indptr[step.size :] - indptr[step.size],
                    self._indices[firsts[step.size] : firsts[-1]],
                    last_len[step.size :],
                    *shape,
                    causal=True,
                    **self._how(how),
                )
        self._copied.record()

    def decode(self, layer: int, q: Tensor, out: Tensor) -> None:
        self._decoding[self._kind_of[layer]].run(q.contiguous(), self.views[layer], out=out)

    def prefill(self, layer: int, q: Tensor, out: Tensor) -> None:
        self._prefillers[self._kind_of[layer]].run(q[self.step.size :].contiguous(), self.views[layer], out=out[self.step.size :])

    def _wrappers(self, step: DeviceStep) -> list[BatchDecodeWithPagedKVCacheWrapper]:
        """One for each kind of layer. A captured size has its own wrappers; other sizes share those that accept any size."""
        size = step.size if step.captured else 0
        if size not in self._decoders:
            self._decoders[size] = [self._decoder(size) for _ in self._kinds]
        return self._decoders[size]

    def _decoder(self, size: int) -> BatchDecodeWithPagedKVCacheWrapper:
        """`size`: 0 if it is not captured."""
        tensor_cores = self.heads // self.pool.shape[3] >= TENSOR_CORE_GROUP
        if size == 0:
            return BatchDecodeWithPagedKVCacheWrapper(self._workspace, "HND", use_tensor_cores=tensor_cores)
        return BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=tensor_cores,
            paged_kv_indptr_buffer=torch.zeros(size + 1, dtype=torch.int32, device=self.pool.device),
            paged_kv_indices_buffer=self._captured,
            paged_kv_last_page_len_buffer=torch.zeros(size, dtype=torch.int32, device=self.pool.device),
        )

    def _shape(self) -> tuple[int, int, int, int]:
        _, _, _, kv_heads, size, dim = self.pool.shape
        return self.heads, kv_heads, dim, size

    def _how(self, how: LayerAttention) -> dict[str, object]:
        return {
            "window_left": -1 if how.window is None else how.window - 1,
            "logits_soft_cap": how.softcap,
            "sm_scale": how.scale,
            "q_data_type": self.pool.dtype,
            "kv_data_type": self.pool.dtype,
        }
