"""The feed-forward half of a layer: one network, or many experts of which each token passes through a few.

Letters in shapes: T tokens, H hidden, I intermediate, E experts, K experts per token, A = T · K assignments.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.checkpoint import ExpertConfig, ModelConfig
from baton.engine.cpu.sizes import rounded_up
from baton.engine.ops import Ops
from baton.engine.weights import Weights

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

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] → [T, H]."""
        return self.down(self.activate(self.gate_up(x)))


class Mixture:
    """Sparsely gated experts, and the network that every token passes through as well."""

    def __init__(self, config: ModelConfig, experts: ExpertConfig, weights: Weights, ops: Ops) -> None:
        self.config, activate = experts, activation(config, ops)
        # float32, whatever the model's type: in a near tie, rounding would decide which experts compute.
        self.router = weights.placed(weights.tensor("gate.weight"), torch.float32)  # [E, H]
        self.bias: Tensor | None = None  # [E]
        if experts.biased:
            self.bias = weights.placed(weights.tensor("gate.e_score_correction_bias"), torch.float32)
        kind = GroupedExperts if _groups(weights, config.hidden, experts.intermediate) else SeparateExperts
        self.experts: Experts = kind(experts.count, weights.under("experts"), activate)
        self.shared = Mlp(weights.under("shared_experts"), activate, bias=config.mlp_bias) if experts.shared else None

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] → [T, H]."""
        shares, chosen = route(F.linear(x.float(), self.router), self.bias, self.config)
        y = self.experts(x, shares, chosen)
        return y if self.shared is None else y.add_(self.shared(x))


def route(logits: Tensor, bias: Tensor | None, config: ExpertConfig) -> tuple[Tensor, Tensor]:
    """Router logits `[T, E]` in float32 → the share of each chosen expert `[T, K]` and which they are `[T, K]`.

    Softmax: Mixtral, Qwen3-MoE, DeepSeek-V2 (arXiv 2405.04434, group-limited by the best expert of a group). Sigmoid: DeepSeek-V3 (arXiv
    2412.19437): the bias balances the load, so it affects the choice but not the shares, and a group is worth the sum of its two best.
    """
    scores = logits.sigmoid() if config.sigmoid else logits.softmax(dim=-1)
    choice = scores if bias is None else scores + bias
    if config.groups > 1:
        grouped = choice.view(-1, config.groups, config.count // config.groups)  # [T, groups, E / groups]
        worth = grouped.topk(2, dim=-1).values.sum(dim=-1) if config.sigmoid else grouped.amax(dim=-1)
        closed = torch.ones_like(worth, dtype=torch.bool).scatter_(1, worth.topk(config.open_groups, dim=-1).indices, False)
        choice = grouped.masked_fill(closed[..., None], -torch.inf).flatten(1)
    chosen = choice.topk(config.chosen, dim=-1).indices
    shares = scores.gather(1, chosen)
    if config.normalised:
        shares = shares / (shares.sum(dim=-1, keepdim=True) + 1e-20)  # sigmoids may all be 0
    return shares * config.scale, chosen


class Experts(ABC):
    """E networks. Each token's row is computed by those chosen for it."""

    def __call__(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """x `[T, H]`, shares and chosen `[T, K]` → `[T, H]`: the sum over K of share · expert(x)."""
        tokens, k = chosen.shape
        owners, order = chosen.reshape(-1).sort(stable=True)  # [A]: assignments expert by expert
        y = torch.empty(tokens * k, x.shape[-1], dtype=x.dtype, device=x.device)
        y[order] = self.apply(x[order // k], owners)
        return torch.bmm(shares[:, None].to(x.dtype), y.view(tokens, k, x.shape[-1]))[:, 0]

    @abstractmethod
    def apply(self, rows: Tensor, owners: Tensor) -> Tensor:
        """Passes each of rows `[A, H]` through its expert in owners `[A]`, which ascends: `[A, H]`."""


class SeparateExperts(Experts):
    """Each expert is a network with its own matrices: one product for every expert that some token chose."""

    def __init__(self, count: int, weights: Weights, activate: Callable[[Tensor], Tensor]) -> None:
        self.networks = [Mlp(weights.under(str(i)), activate) for i in range(count)]

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

    def __init__(self, count: int, weights: Weights, activate: Callable[[Tensor], Tensor]) -> None:
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
