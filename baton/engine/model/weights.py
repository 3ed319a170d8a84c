"""Turns the tensors of a checkpoint into what a layer computes with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from baton.engine.model.linear import Linear
from baton.engine.model.ops import Ops

# Name in `expected_tensors` → tensor on the CPU
ReadTensor = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class Weights:
    """Reads the tensors that share a prefix, and puts them on the device in the form in which they are used."""

    read: ReadTensor
    dtype: torch.dtype
    device: torch.device
    weight_dtype: str  # of matrices, see `Linear`
    prefix: str = ""
    ops: Ops = field(default_factory=Ops)

    def under(self, part: str) -> "Weights":
        """The weights of one part of the model."""
        return replace(self, prefix=f"{self.prefix}{part}.")

    def tensor(self, name: str) -> Tensor:
        """The tensor as it is in the file."""
        return self.read(self.prefix + name)

    def placed(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A copy on the device, which does not keep the file open."""
        return tensor.to(self.device, dtype or self.dtype, copy=True)

    def vector(self, name: str, offset: float = 0.0) -> Tensor:
        """`name.weight + offset`, `[n]`."""
        return self.placed(self.tensor(f"{name}.weight").float() + offset)

    def linear(self, *names: str, bias: bool = False) -> Linear:
        """One matrix that stacks several, all with a bias or all without."""
        biases = [self.tensor(f"{name}.bias") for name in names] if bias else []
        return self.matrix([self.tensor(f"{name}.weight") for name in names], biases)

    def head(self, weight: Tensor) -> Linear:
        """The matrix that makes logits. It is never rounded to int4: that alone costs as much as rounding all the others."""
        finer = "int8" if self.ops.has_int8 else "auto"
        return replace(self, weight_dtype=finer if self.weight_dtype == "int4" else self.weight_dtype).matrix([weight])

    def matrix(self, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> Linear:
        """Same as `linear`, for tensors that have already been read."""
        return Linear(weights, biases, self.dtype, self.device, self.weight_dtype, self.ops)
