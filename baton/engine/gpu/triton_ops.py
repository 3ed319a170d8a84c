"""The pointwise operations of a layer as one kernel each: on a device, every launch and every pass over memory costs time."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.gpu import triton_groups
from baton.engine.model.ops import Multiply, Ops
from baton.engine.model.quantised.matrix import Quantised

LOG2_E = tl.constexpr(1.4426950408889634)
MOST_TURNED = 128  # numbers, of which one program holds a matrix
MOST_FUSED = 16384  # widest row that one program holds


@triton.jit
def _add_rms_norm_kernel(x, y, weight, out, width, eps, x_row, y_row, ADD: tl.constexpr, WIDTH: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH)
    inside = i < width
    precise = tl.load(x + token * x_row + i, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        total = (precise + tl.load(y + token * y_row + i, mask=inside, other=0.0).to(tl.float32)).to(x.dtype.element_ty)
        tl.store(x + token * x_row + i, total, mask=inside)
        precise = total.to(tl.float32)  # as it is stored: rounded
    scale = 1 / tl.sqrt(tl.sum(precise * precise, 0) / width + eps)
    w = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + i, (precise * scale * w).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated_kernel(gate_up, out, width, row_stride, TANH: tl.constexpr, WIDTH: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = i < width
    gate = tl.load(gate_up + token * row_stride + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * row_stride + width + i, mask=inside, other=0.0).to(tl.float32)
    z = gate
    if TANH:  # gelu(x) ≈ x (1 + tanh u) / 2 = x sigmoid(2 u), u = √(2/π) (x + 0.044715 x³)
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    tl.store(out + token * width + i, (gate / (1 + tl.exp2(-z * LOG2_E)) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_kernel(
    qk, rotation, qk_token, qk_head, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, PAIRS: tl.constexpr, PAIRS_PAD: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS_PAD + tl.arange(0, HEADS_PAD))[:, None]
    pair = tl.arange(0, PAIRS_PAD)[None, :]
    inside = (head < HEADS) & (pair < PAIRS)
    turn = rotation + (token * PAIRS + pair) * 2
    cos = tl.load(turn, mask=pair < PAIRS, other=0.0)
    sin = tl.load(turn + 1, mask=pair < PAIRS, other=0.0)
    x = qk + token * qk_token + head * qk_head + 2 * pair
    real = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    imaginary = tl.load(x + 1, mask=inside, other=0.0).to(tl.float32)
    tl.store(x, (real * cos - imaginary * sin).to(qk.dtype.element_ty), mask=inside)
    tl.store(x + 1, (real * sin + imaginary * cos).to(qk.dtype.element_ty), mask=inside)


@triton.jit
def _turn_kernel(x, x_token, x_head, scale, SIZE: tl.constexpr):
    first = x + tl.program_id(0).to(tl.int64) * x_token + tl.program_id(1) * x_head + tl.program_id(2) * SIZE
    i = tl.arange(0, SIZE)
    both = i[:, None] & i[None, :]
    both = both ^ (both >> 4)
    both = both ^ (both >> 2)
    odd = (both ^ (both >> 1)) & 1  # the bits that two places share: Hadamard's matrix is -1 there
    numbers = tl.load(first + i).to(tl.float32)
    turned = tl.sum(tl.where(odd == 0, numbers[:, None], -numbers[:, None]), 0) * scale
    tl.debug_barrier()  # all have been read
    tl.store(first + i, turned.to(x.dtype.element_ty))


class TritonOps(Ops):
    def stored_multiplier(self, matrix: Quantised, bias: Tensor | None, device: torch.device) -> Multiply | None:
        return triton_groups.GroupProduct(matrix, bias, device) if triton_groups.fits(matrix) else None

    def add_rms_norm(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        tokens, width = x.shape
        if width > MOST_FUSED:
            return super().add_rms_norm(x, y, weight, eps)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if tokens:
            add = y is not None
            z = x if y is None else y
            padded = triton.next_power_of_2(width)
            _add_rms_norm_kernel[(tokens,)](
                x, z, weight, out, width, eps, x.stride(0), z.stride(0), ADD=add, WIDTH=padded, num_warps=8 if padded > 2048 else 4
            )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return _gated(gate_up, tanh=False)

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        return _gated(gate_up, tanh=True)

    def rotate_(self, qk: Tensor, rotation: Tensor) -> None:
        tokens, heads, dim = qk.shape
        tile = min(8, triton.next_power_of_2(heads))
        if tokens:
            _rotate_kernel[(tokens, triton.cdiv(heads, tile))](
                qk,
                torch.view_as_real(rotation),
                qk.stride(0),
                qk.stride(1),
                HEADS=heads,
                HEADS_PAD=tile,
                PAIRS=dim // 2,
                PAIRS_PAD=triton.next_power_of_2(dim // 2),
            )

    def turn_(self, x: Tensor, size: int) -> None:
        tokens, heads, dim = x.shape
        if size > MOST_TURNED or x.stride(2) != 1:
            super().turn_(x, size)
        elif tokens:
            _turn_kernel[(tokens, heads, dim // size)](x, x.stride(0), x.stride(1), size**-0.5, SIZE=size)


def _gated(gate_up: Tensor, tanh: bool) -> Tensor:
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, width)
    if tokens:
        _gated_kernel[(tokens, triton.cdiv(width, 1024))](gate_up, out, width, gate_up.stride(0), TANH=tanh, WIDTH=1024)
    return out
