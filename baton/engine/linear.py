"""A matrix of weights, in the form that the device multiplies fastest."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.cpu import onednn
from baton.engine.ops import Ops

Multiply = Callable[[Tensor], Tensor]  # [T, in] → [T, out]


class Linear:
    """`y = x Wᵀ + b`, W `[out, in]`: several matrices of a checkpoint stacked along `out`.

    `ops` may have products of its own, or say that oneDNN's are used, which at 2 to 32 rows are 2 to 5 times as fast as `F.linear` in
    float32. Both reorder the weight once. The plain weight is then dropped, so nothing is held twice.

    `weight_dtype` int8 (CPU only): each row of W at load, and each row of x at each call, is rounded to 255 steps between minus and plus
    its greatest magnitude; `ops` rounds x. Products and sums of the rounded numbers are exact, so a row of y depends only on its own row of
    x, bit for bit.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor],
        dtype: torch.dtype,
        device: torch.device,
        weight_dtype: str = "auto",
        ops: Ops | None = None,
    ) -> None:
        """Raises ValueError for int8 if it would not be exact."""
        ops = ops or Ops()
        bias = stacked(biases, dtype, device) if biases else None  # [out]
        if weight_dtype == "int8":
            self._multiply = _int8(stacked(weights, torch.float32, device), bias, dtype, ops)
        elif device.type != "cpu":
            self._multiply = _plain(stacked(weights, dtype, device), bias)
        else:
            alone = len(weights) == 1 and weights[0].dtype == dtype
            self._multiply = _on_cpu(weights[0].contiguous() if alone else stacked(weights, dtype, device), bias, ops)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] → [T, out]."""
        return self._multiply(x)


def _on_cpu(weight: Tensor, bias: Tensor | None, ops: Ops) -> Multiply:
    if (multiply := ops.multiplier(weight, bias)) is not None:
        return multiply
    if ops.packs and onednn.multiplies(weight.dtype):
        return onednn.packed(weight, bias)
    return _plain(weight.clone(), bias)  # the tensor of a file keeps the file open


def _plain(weight: Tensor, bias: Tensor | None) -> Multiply:
    return lambda x: F.linear(x, weight, bias)


def _int8(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, ops: Ops) -> Multiply:
    if not onednn.multiplies_int8(weight.device):
        raise ValueError("engine.weight_dtype: int8 needs a CPU that multiplies it exactly (VNNI)")
    scales = weight.abs().amax(dim=1).div_(127).clamp_(min=torch.finfo(torch.float32).tiny)  # [out]
    matrix = weight.div_(scales[:, None]).round_().to(torch.int8)
    if (whole := ops.int8_multiplier(matrix, scales, bias)) is not None:
        return whole
    multiply = onednn.packed_int8(matrix, scales) if ops.packs else _plain_int8(matrix, scales)

    def linear(x: Tensor) -> Tensor:
        rounded, steps = ops.quantize(x)
        return ops.dequantize(multiply(rounded), steps, bias, dtype)

    return linear


def _plain_int8(matrix: Tensor, scales: Tensor) -> Multiply:
    """As `onednn.packed_int8`, with exactly the same results."""
    return lambda x: torch._int_mm(x.to(torch.int16).sub_(128).to(torch.int8), matrix.t()).float().mul_(scales)


def stacked(parts: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The parts stacked along the first dimension, copied and converted one at a time, so that no second copy of the whole exists."""
    whole = torch.empty(sum(part.shape[0] for part in parts), *parts[0].shape[1:], dtype=dtype, device=device)
    row = 0
    for part in parts:
        whole[row : row + part.shape[0]].copy_(part)
        row += part.shape[0]
    return whole
