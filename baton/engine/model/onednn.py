"""Matrices in the form in which oneDNN multiplies them fastest."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

_NONE: tuple[str, list[float], str] = ("none", [], "")  # what oneDNN is to do after the product


def multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies matrices of this type on this processor."""
    return torch._C._has_mkldnn and (dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))


def multiplies_int8() -> bool:
    """Whether products of int8 are exact on this processor. Without VNNI, sums of two products can overflow."""
    return torch._C._has_mkldnn and _is_exact()


@cache
def _is_exact() -> bool:
    """Tried with the greatest possible products."""
    x, weight = torch.full((2, 64), 255, dtype=torch.uint8), torch.full((64, 64), 127, dtype=torch.int8)
    multiply = packed_int8(weight, torch.ones(64))
    return bool((multiply(x) == 127 * 127 * 64).all())


def packed(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """x Wᵀ + bias, W `[out, in]` reordered once."""
    reordered, multiply = torch.ops.mkldnn._reorder_linear_weight(weight, None), torch.ops.mkldnn._linear_pointwise.default
    return lambda x: multiply(x, reordered, bias, *_NONE)


def packed_int8(weight: Tensor, scales: Tensor) -> Callable[[Tensor], Tensor]:
    """(x - 128) Wᵀ · scales in float32, of uint8 x `[T, in]` and int8 W `[out, in]`."""
    zeros, multiply = torch.zeros(len(scales), dtype=torch.int64), torch.ops.onednn.qlinear_pointwise.default
    weights = torch.ops.onednn.qlinear_prepack(weight, None)
    return lambda x: multiply(x, 1.0, 128, weights, scales, zeros, None, 1.0, 0, torch.float32, *_NONE)
