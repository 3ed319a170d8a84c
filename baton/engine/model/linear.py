"""A matrix of weights, in the form that the device multiplies fastest."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.model.ops import Multiply, Ops
from baton.engine.model.quantised.matrix import Matrix, Quantised, join, plain


class Linear:
    """`y = x Wᵀ + b`, W `[out, in]`: several matrices of a checkpoint stacked along `out`.

    On a CPU, `ops` chooses who multiplies. The weight may be reordered for that, once; it is then dropped, so nothing is held twice.

    A matrix that the checkpoint has quantised is computed so where `ops` can; elsewhere it is dequantised. Of stacked ones, one that is not
    quantised makes all of them plain, and so do float8 beside others. On a CPU x is rounded as with int8.

    `weight_dtype` int8 (CPU only): each row of W at load, and each row of x at each call, is rounded to 255 steps between minus and plus
    its greatest magnitude; `ops` rounds x. Products and sums of the rounded numbers are exact, so a row of y depends only on its own row of
    x, bit for bit.

    `weight_dtype` int4: groups of 32 neighbours of a row of W are rounded to 16 steps, and x as with int8. float: W as the model's type.
    """

    def __init__(
        self,
        weights: Sequence[Matrix],
        biases: Sequence[Tensor],
        dtype: torch.dtype,
        device: torch.device,
        weight_dtype: str = "auto",
        ops: Ops | None = None,
    ) -> None:
        """Raises ValueError for int8 and int4 on another device than a CPU, and for int8 if it would not be exact."""
        ops = ops or Ops()
        bias = stacked(biases, dtype, device) if biases else None  # [out]
        quantised = [weight for weight in weights if isinstance(weight, Quantised)]
        multiply = None
        if weight_dtype == "auto" and len(quantised) == len(weights) and len({weight.float8 for weight in quantised}) == 1:
            multiply = ops.stored_multiplier(join(quantised), bias, device)
        was_quantised = any(not isinstance(weight, Tensor) for weight in weights)
        self.form = PLAIN if not was_quantised else DEQUANTISED if multiply is None else AS_STORED
        self.multiply = multiply or self._converted(weights, bias, dtype, device, weight_dtype, ops)

    @staticmethod
    def _converted(
        weights: Sequence[Matrix], bias: Tensor | None, dtype: torch.dtype, device: torch.device, weight_dtype: str, ops: Ops
    ) -> Multiply:
        if weight_dtype in ROUNDED:
            if device.type != "cpu":
                raise ValueError(f"engine.weight_dtype: {weight_dtype} needs engine.device cpu")
            return ROUNDED[weight_dtype](stacked(weights, torch.float32, device), bias, ops)
        if device.type != "cpu":
            return partial(F.linear, weight=stacked(weights, dtype, device), bias=bias)
        alone = weights[0]
        if len(weights) == 1 and isinstance(alone, Tensor) and alone.dtype == dtype:
            return ops.multiplier(alone.contiguous(), bias)
        return ops.multiplier(stacked(weights, dtype, device), bias)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] → [T, out]."""
        return self.multiply(x)


def _int8(weight: Tensor, bias: Tensor | None, ops: Ops) -> Multiply:
    steps = weight.abs().amax(dim=1).div_(127).clamp_(min=torch.finfo(torch.float32).tiny)  # [out]
    return ops.int8_multiplier(weight.div_(steps[:, None]).round_().to(torch.int8), steps, bias)


def _int4(weight: Tensor, bias: Tensor | None, ops: Ops) -> Multiply:
    """A group's scale makes its number of the greatest magnitude -8 (llama.cpp's Q4_0), and is itself rounded to bfloat16 first."""
    groups = F.pad(weight, (0, -weight.shape[1] % INT4_GROUP)).view(len(weight), -1, INT4_GROUP)
    scales = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True)).div_(-8).to(torch.bfloat16)  # [out, groups, 1]
    matrix = groups.div(scales.float().where(scales != 0, 1)).round_().clamp_(-8, 7).to(torch.int8)
    return ops.int4_multiplier(matrix.flatten(1), scales.squeeze(2), bias)


ROUNDED = {"int8": _int8, "int4": _int4}
INT4_GROUP = 32
PLAIN, AS_STORED, DEQUANTISED = "", "computed as stored", "dequantised"  # forms: the matrix was not quantised, or was


def stacked(parts: Sequence[Matrix], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The parts stacked along the first dimension, copied and converted one at a time, so that no second copy of the whole exists."""
    whole = torch.empty(sum(part.shape[0] for part in parts), *parts[0].shape[1:], dtype=dtype, device=device)
    row = 0
    for part in parts:
        whole[row : row + part.shape[0]].copy_(plain(part))
        row += part.shape[0]
    return whole
