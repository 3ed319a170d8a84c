"""The feed-forward half of a layer: one network, or many experts of which each token passes through a few.

Letters in shapes: T tokens, H hidden, I intermediate, E experts, K experts per token, A = T · K assignments.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.model.checkpoint import ExpertConfig, ModelConfig
from baton.engine.model.linear import Linear
from baton.engine.model.ops import Ops
from baton.engine.model.sizes import rounded_up
from baton.engine.model.weights import Weights

GROUPED_ALIGNMENT = 8  # elements: rows of the grouped kernel begin at multiples of 16 bytes


def activation(config: ModelConfig, ops: Ops) -> Callable[[Tensor], Tensor]:
    """[T, 2I] → [T, I]."""
    return ops.gelu_tanh_mul if config.activation == "gelu_tanh" else ops.silu_mul


class Mlp:
    """down(act(gate(x)) · up(x)); gate and up are one matrix."""

    def __init__(self, weights: Weights, activate: Callable[[Tensor], Tensor], bias: bool = False, packed: bool = False) -> None:
        """`packed`: they are one matrix in the file, too."""
        self.gate_up = weights.linear("gate_up_proj") if packed else weights.linear("gate_proj", "up_proj", bias=bias)
        self.down = weights.linear("down_proj", bias=bias)
        self.activate = activate
        self.at_once = weights.ops.at_once

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] → [T, H]."""
        if self.at_once is None or len(x) <= self.at_once:
            return self.down(self.activate(self.gate_up(x)))
        return torch.cat([self(part) for part in x.split(self.at_once)])


class Mixture:
    """Sparsely gated experts, and the network that every token passes through as well."""

    def __init__(self, config: ModelConfig, experts: ExpertConfig, weights: Weights, ops: Ops) -> None:
        self.config, self.ops = experts, ops
        # float32, whatever the model's type: in a near tie, rounding would decide which experts compute.
        self.router = Linear([weights.tensor("gate.weight")], [], torch.float32, weights.device, ops=ops)  # [E, H]
        self.bias: Tensor | None = None  # [E]
        if experts.biased:
            self.bias = weights.placed(weights.tensor("gate.e_score_correction_bias"), torch.float32)
        kind = GroupedExperts if _groups(weights, config.hidden, experts.intermediate) else SeparateExperts
        self.experts: Experts = kind(experts.count, weights.under("experts"), activation(config, ops), ops)
        self.shared = Mlp(weights.under("shared_experts"), activation(config, ops), bias=config.mlp_bias) if experts.shared else None

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] → [T, H]."""
        shares, chosen = self.ops.route(self.router(self.ops.logits(x, None)), self.bias, self.config)
        shared = None if self.shared is None else self.shared(x)
        return self.experts(x, shares, chosen, shared)


class Experts(ABC):
    """E networks. Each token's row is computed by those chosen for it."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    def __call__(self, x: Tensor, shares: Tensor, chosen: Tensor, more: Tensor | None = None) -> Tensor:
        """x `[T, H]`, shares and chosen `[T, K]` → `[T, H]`: the sum over K of share · expert(x), and of `more`."""
        return self.ops.combine(self.each(x, chosen), shares, more)

    def each(self, x: Tensor, chosen: Tensor) -> Tensor:
        """x `[T, H]`, chosen `[T, K]` → `[A, H]`: what each token's experts make of it."""
        tokens, k = chosen.shape
        owners, order = chosen.reshape(-1).sort(stable=True)  # [A]: assignments expert by expert
        y = torch.empty(tokens * k, x.shape[-1], dtype=x.dtype, device=x.device)
        y[order] = self.apply(x[order // k], owners)
        return y

    @abstractmethod
    def apply(self, rows: Tensor, owners: Tensor) -> Tensor:
        """Passes each of rows `[A, H]` through its expert in owners `[A]`, which ascends: `[A, H]`."""


class SeparateExperts(Experts):
    """Each expert is a network with its own matrices: one product for every expert that some token chose, unless `ops` makes it one for
    all."""

    def __init__(self, count: int, weights: Weights, activate: Callable[[Tensor], Tensor], ops: Ops) -> None:
        super().__init__(ops)
        self.activate = activate
        self.networks = [Mlp(weights.under(str(i)), activate) for i in range(count)]
        self.gate_up = ops.each([network.gate_up.multiply for network in self.networks])
        self.down = ops.each([network.down.multiply for network in self.networks])

    def each(self, x: Tensor, chosen: Tensor) -> Tensor:
        if self.gate_up is None or self.down is None:
            return super().each(x, chosen)
        owners = chosen.reshape(-1)
        return self.down(self.activate(self.gate_up(x, owners)), owners)

    def apply(self, rows: Tensor, owners: Tensor) -> Tensor:
        y, first = torch.empty_like(rows), 0
        for network, n in zip(self.networks, owners.bincount(minlength=len(self.networks)).tolist(), strict=True):
            if n:
                mine = F.pad(rows[first : first + n], (0, 0, 0, rounded_up(n) - n))
                y[first : first + n] = network(mine)[:n]
                first += n
        return y


class GroupedExperts(Experts):
    """All experts in one product, if the device has a kernel for that. Nothing is read back, so it can be captured in a graph."""

    def __init__(self, count: int, weights: Weights, activate: Callable[[Tensor], Tensor], ops: Ops) -> None:
        super().__init__(ops)
        self.activate = activate
        self.gate_up = _stack(count, weights, "gate_proj", "up_proj")  # [E, 2I, H]
        self.down = _stack(count, weights, "down_proj")  # [E, H, I]
        self.numbers = torch.arange(count, device=weights.device)

    def apply(self, rows: Tensor, owners: Tensor) -> Tensor:
        ends = torch.searchsorted(owners, self.numbers, right=True).to(torch.int32)  # [E]
        gate_up = F.grouped_mm(rows, self.gate_up.transpose(1, 2), offs=ends)
        return F.grouped_mm(self.activate(gate_up), self.down.transpose(1, 2), offs=ends)


def _groups(weights: Weights, *sizes: int) -> bool:
    """Whether torch has a grouped kernel for such matrices. Elsewhere its grouped product is a slow loop."""
    aligned = all(size % GROUPED_ALIGNMENT == 0 for size in sizes)
    return aligned and weights.device.type == "cuda" and weights.dtype == torch.bfloat16 and weights.weight_dtype == "auto"


def _stack(count: int, weights: Weights, *names: str) -> Tensor:
    """[E, out, in], one expert at a time, so that no second copy of the whole exists."""

    def expert(i: int) -> Tensor:
        return torch.cat([weights.tensor(f"{i}.{name}.weight") for name in names])

    first = expert(0)
    whole = torch.empty(count, *first.shape, dtype=weights.dtype, device=weights.device)
    whole[0] = first
    for i in range(1, count):
        whole[i] = expert(i)
    return whole
