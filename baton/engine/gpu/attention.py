"""Attention on a device: `begin(step)` once per step, then `(layer, q [T, Hq, D], kv [T, P, Hkv, D]) → [T, Hq * Dv]`, the `Attention` that
a model is given. All kinds read the head-major pool `[N, L, P, Hkv, bs, D]` in place, as strided views of one layer.
"""

from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.gpu.inputs import DeviceStep, Inputs
from baton.engine.model.attention import PagedAttention, PagedKv, plan, plan_store, store
from baton.engine.model.checkpoint import LayerAttention


class RoundedKv(NamedTuple):
    """One layer of a pool of int8. The scale of what a head has for a token is what its numbers are multiplied by."""

    numbers: Tensor  # [N, P, Hkv, bs, D]
    scales: Tensor  # [N, P, Hkv, bs] float32


class Packed(NamedTuple):
    """One layer of a pool of int5, or all of it."""

    rows: Tensor  # [N, P, Hkv, bs, bytes] uint8, or [N, L, P, Hkv, bs, bytes]
    dim: int  # numbers of a row
    scales: Tensor  # [N, P, Hkv, bs] bfloat16, or [N, L, P, Hkv, bs]


Layer = Tensor | RoundedKv | Packed  # a tensor: numbers of the model's type


def parts_of(layer: Layer) -> tuple[Tensor, Tensor]:
    """The numbers and the scales; those of numbers that have none are not read."""
    if isinstance(layer, RoundedKv):
        return layer
    return (layer.rows, layer.scales) if isinstance(layer, Packed) else (layer, layer)


class DeviceAttention:
    """The `Attention` of one model and pool, for any number of steps."""

    name = "torch"
    capturable = False

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
        """`pool` `[N, L, P, Hkv, bs, D]`, each block contiguous; `heads`: Hq; `value_dim`: Dv, 0 if it is D; `scales` `[N, L, P, Hkv, bs]`,
        if its numbers are int8, and the queries' `dtype`, if they are rounded."""
        numbers, dim, scales = pool if isinstance(pool, Packed) else (pool, pool.shape[-1], scales)
        self.pool = numbers
        self.layers = tuple(layers)
        self.heads = heads
        self.value_dim = value_dim or dim
        self.inputs = inputs
        self.views: tuple[Layer, ...] = numbers.unbind(dim=1)  # [N, P, Hkv, bs, D] each
        if isinstance(pool, Packed):
            self.views = tuple(map(Packed, numbers.unbind(dim=1), repeat(dim), pool.scales.unbind(dim=1)))
        elif scales is not None:
            self.views = tuple(map(RoundedKv, numbers.unbind(dim=1), scales.unbind(dim=1)))
        self.paged = PagedKv(numbers, value_dim, None, scales, dtype, dim)

    def begin(self, step: DeviceStep) -> None:
        """Prepares what is the same for all layers. Also called before a captured step is replayed."""
        raise NotImplementedError

    def __call__(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        raise NotImplementedError


class TorchAttention(DeviceAttention):
    """`baton.engine.model.attention`, unchanged."""

    def begin(self, step: DeviceStep) -> None:
        self._attend = PagedAttention(self.paged, plan(step.spans, self.paged, self.layers))
        self._again = [row for row, _ in step.again]
        self._slots = plan_store([span for _, span in step.again], self.paged)[1] if step.again else None

    def __call__(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        if self._slots is not None:
            store(kv[self._again], self.paged.layers[layer], self._slots)
        return self._attend(layer, q, kv)
