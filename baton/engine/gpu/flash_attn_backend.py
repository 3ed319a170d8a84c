"""flash-attn 2 on the paged pool, for blocks of a multiple of 256 tokens."""

import numpy as np
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from torch import Tensor

from baton.engine.gpu.inputs import DeviceStep
from baton.engine.gpu.triton_backend import StoringAttention


class FlashAttnAttention(StoringAttention):
    name = "flash_attn"

    def begin(self, step: DeviceStep) -> None:
        super().begin(step)
        longer = step.lengths[step.decodes :]
        if len(step.spans) > step.decodes:
            self._tables = self.inputs.tables.index_select(0, step.seats[step.decodes :])
            self._firsts = step.firsts[step.decodes :] - step.size
            self._key_firsts = self.inputs.upload([0, *np.cumsum(longer)]).int()
            self._most = max(span.n for span in step.spans), int(longer.max())

    def decode(self, layer: int, q: Tensor, out: Tensor) -> None:
        answer = flash_attn_with_kvcache(
            q[:, None],
            *self._caches(layer),
            cache_seqlens=self.step.lens[: len(q)],
            block_table=self.inputs.tables.index_select(0, self.step.seats[: len(q)]),  # inside a graph: seats change
            **self._how(layer),
        )
        out.copy_(answer[:, 0])

    def prefill(self, layer: int, q: Tensor, out: Tensor) -> None:
        out[self.step.size :] = flash_attn_varlen_func(
            q[self.step.size :],
            *self._caches(layer),
            self._firsts,
            self._key_firsts,
            *self._most,
            block_table=self._tables,
            **self._how(layer),
        )

    def _caches(self, layer: int) -> tuple[Tensor, Tensor]:
        """Views `[N, bs, Hkv, D]` of keys and of values."""
        keys, values = self.pool[:, layer].transpose(2, 3).unbind(dim=1)
        return keys, values

    def _how(self, layer: int) -> dict[str, object]:
        how = self.layers[layer]
        return {
            "softmax_scale": how.scale,
            "causal": True,
            "window_size": (-1, -1) if how.window is None else (how.window - 1, 0),
            "softcap": how.softcap or 0.0,
        }
