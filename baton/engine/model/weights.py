"""Turns the tensors of a checkpoint into what a layer computes with."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from baton.engine.model.linear import Linear
from baton.engine.model.ops import Ops
from baton.engine.model.quantised.matrix import Matrix, plain

# Name in `expected_tensors` → tensor on the CPU
ReadMatrix = Callable[[str], Matrix]


@dataclass(frozen=True, slots=True)
class Weights:
    """Reads the tensors that share a prefix, and puts them on the device in the form in which they are used."""

    read: ReadMatrix
    dtype: torch.dtype
    device: torch.device
    weight_dtype: str  # of matrices, see `Linear`
    prefix: str = ""
    ops: Ops = field(default_factory=Ops)
    forms: Counter[str] = field(default_factory=Counter)  # how many matrices have each `Linear.form`; parts of the model share it

    def under(self, part: str) -> "Weights":
        """The weights of one part of the model."""
        return replace(self, prefix=f"{self.prefix}{part}.")

    def tensor(self, name: str) -> Tensor:
        """The tensor as it is in the file; a quantised one as float32."""
        return plain(self.stored(name))

    def stored(self, name: str) -> Matrix:
        """The same, as it is stored."""
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
        return self.matrix([self.stored(f"{name}.weight") for name in names], biases)

    def head(self, weight: Matrix) -> Linear:
        """The matrix that makes logits. It is never rounded to int4: that alone costs as much as rounding all the others."""
        finer = "int8" if self.ops.has_int8 else "auto"
        return replace(self, weight_dtype=finer if self.weight_dtype == "int4" else self.weight_dtype).matrix([weight])

    def matrix(self, weights: Sequence[Matrix], biases: Sequence[Tensor] = ()) -> Linear:
        """Same as `linear`, for tensors that have already been read."""
        made = Linear(weights, biases, self.dtype, self.device, self.weight_dtype, self.ops)
        self.forms[made.form] += 1
        return made
