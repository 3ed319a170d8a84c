"""A matrix that multiplies, in the form that the device multiplies fastest."""

from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.ops import Ops

_NONE: tuple[str, list[float], str] = ("none", [], "")  # what oneDNN is to do behind the product


class Linear:
    """`y = x Wᵀ + b`, W `[out, in]`: several matrices of a checkpoint stacked along `out`.

    On the CPU the weight is reordered once for oneDNN, which at 2 to 32 rows is worth a factor of 2 to 5 over `F.linear` in float32. The
    plain weight is then dropped, so nothing is held twice.

    `weight_dtype` int8 (CPU only): each row of W, and each row of x when it comes, is rounded to 255 steps between plus and minus its
    greatest element; `ops` does the latter. Products and sums of those are exact: a row of y depends on its own row of x only, to the bit.
    Where `ops` multiplies a single row, W is held a second time for that, a byte a weight.
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
        """Raises ValueError for int8 where it is not exact."""
        bias = stacked(biases, dtype, device) if biases else None  # [out]
        if weight_dtype == "int8":
            self._multiply = _int8(stacked(weights, torch.float32, device), bias, dtype, ops or Ops())
            return
        if device.type == "cpu" and torch._C._has_mkldnn and (dtype == torch.float32 or _multiplies_bfloat16()):
            alone = len(weights) == 1 and weights[0].dtype == dtype
            self._multiply = _packed(weights[0].contiguous() if alone else stacked(weights, dtype, device), bias)
        else:
            weight = stacked(weights, dtype, device)
            self._multiply = lambda x: F.linear(x, weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] → [T, out]."""
        return self._multiply(x)


def multiplies_int8(device: torch.device) -> bool:
    """Whether int8 is exact there: a CPU without VNNI lets sums of two products overflow."""
    return device.type == "cpu" and torch._C._has_mkldnn and _is_exact()


@cache
def _is_exact() -> bool:
    """Tried with the greatest products there are."""
    x, weight = torch.full((2, 64), 255, dtype=torch.uint8), torch.full((64, 64), 127, dtype=torch.int8)
    multiply = _product(weight, torch.ones(64))
    return bool((multiply(x) == 127 * 127 * 64).all())


def _packed(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    reordered, multiply = torch.ops.mkldnn._reorder_linear_weight(weight, None), torch.ops.mkldnn._linear_pointwise.default
    return lambda x: multiply(x, reordered, bias, *_NONE)


def _int8(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, ops: Ops) -> Callable[[Tensor], Tensor]:
    if not multiplies_int8(weight.device):
        raise ValueError("engine.weight_dtype: int8 needs a CPU that multiplies it exactly (VNNI)")
    scales = weight.abs().amax(dim=1).div_(127).clamp_(min=torch.finfo(torch.float32).tiny)  # [out]
    matrix = weight.div_(scales[:, None]).round_().to(torch.int8)
    multiply, multiply_row = _product(matrix, scales), ops.row_multiplier(matrix, scales, bias)

    def linear(x: Tensor) -> Tensor:
        if len(x) == 1 and multiply_row is not None:
            return multiply_row(x)
        rounded, steps = ops.quantize(x)
        return ops.dequantize(multiply(rounded), steps, bias, dtype)

    return linear


def _product(weight: Tensor, scales: Tensor) -> Callable[[Tensor], Tensor]:
    """(x - 128) Wᵀ · scales in float32, of uint8 x `[T, in]` and int8 W `[out, in]`."""
    zeros, multiply = torch.zeros(len(scales), dtype=torch.int64), torch.ops.onednn.qlinear_pointwise.default
    packed = torch.ops.onednn.qlinear_prepack(weight, None)
    return lambda x: multiply(x, 1.0, 128, packed, scales, zeros, None, 1.0, 0, torch.float32, *_NONE)


def product(x: Tensor, y: Tensor) -> Tensor:
    """x `[T, in]` · y `[in, out]`, neither known before. Of float32, torch's own product is half as fast as oneDNN's on some processors."""
    if x.dtype == torch.float32 and torch._C._has_mkldnn:
        multiply: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
        return multiply(x, y.t(), None, *_NONE)
    return x @ y


def _multiplies_bfloat16() -> bool:
    """Whether oneDNN does on this processor."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def stacked(parts: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The parts one below the other, copied and converted one at a time, so that no second copy of the whole exists."""
    whole = torch.empty(sum(part.shape[0] for part in parts), *parts[0].shape[1:], dtype=dtype, device=device)
    row = 0
    for part in parts:
        whole[row : row + part.shape[0]].copy_(part)
        row += part.shape[0]
    return whole
