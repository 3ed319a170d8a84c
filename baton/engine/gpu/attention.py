"""Attention on a device: `begin(step)` once per step, then `(layer, q [T, Hq, D], kv [T, P, Hkv, D]) → [T, Hq * Dv]`, the `Attention` that
a model is given. All kinds read the head-major pool `[N, L, P, Hkv, bs, D]` in place, as strided views of one layer.
"""

from collections.abc import Sequence

from torch import Tensor

from baton.engine.gpu.inputs import Inputs, Step
from baton.engine.model.attention import PagedAttention, PagedKv, plan
from baton.engine.model.checkpoint import LayerAttention


class DeviceAttention:
    """The `Attention` of one model and pool, for any number of steps."""

    name = "torch"
    capturable = False

    def __init__(self, pool: Tensor, layers: Sequence[LayerAttention], heads: int, value_dim: int, inputs: Inputs) -> None:
        """`pool` `[N, L, P, Hkv, bs, D]`, contiguous; `heads`: Hq; `value_dim`: Dv, 0 if it is D."""
        self.pool = pool
        self.layers = tuple(layers)
        self.heads = heads
        self.value_dim = value_dim or pool.shape[-1]
        self.inputs = inputs
        self.views = pool.unbind(dim=1)  # [N, P, Hkv, bs, D] each

    def begin(self, step: Step) -> None:
        """Prepares what is the same for all layers. Also called before a captured step is replayed."""
        raise NotImplementedError

    def __call__(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        raise NotImplementedError


class TorchAttention(DeviceAttention):
    """`baton.engine.model.attention`, unchanged."""

    def __init__(self, pool: Tensor, layers: Sequence[LayerAttention], heads: int, value_dim: int, inputs: Inputs) -> None:
        super().__init__(pool, layers, heads, value_dim, inputs)
        self._paged = PagedKv(pool, value_dim)

    def begin(self, step: Step) -> None:
        self._attend = PagedAttention(self._paged, plan(step.spans, self._paged, self.layers))

    def __call__(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        return self._attend(layer, q, kv)
