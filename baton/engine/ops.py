"""The pointwise operations between the matrices of a layer, in plain torch. They are correct on every device, and define what any faster
version must compute.

Letters in shapes: T tokens of the batch, H hidden, I intermediate, D head dim.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.attention import Kernels
from baton.engine.rope import rotation

TINY = torch.finfo(torch.float32).tiny  # the step of a row of zeros


class Ops:
    """What a `Transformer` computes between two matrices. Subclasses compute the same numbers, up to rounding, but faster."""

    attention: Kernels | None = None
    records = False  # whether a step can be recorded (see `baton.engine.cpu.recording`)

    def __init__(self, packs: bool = False) -> None:
        """`packs`: matrices on a CPU are reordered for oneDNN (see `Linear`)."""
        self.packs = packs
        self.recurring = True  # whether products are faster if their sizes recur (see `baton.engine.cpu.sizes`)

    def add_rms_norm(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """x / √(mean(x²) + eps) · weight, `[T, H]`, after `x += y` in place if `y` is given."""
        if y is not None:
            x += y
        return F.rms_norm(x, x.shape[-1:], weight, eps)

    def embed(self, tokens: Tensor, table: Tensor, scale: float) -> Tensor:
        """Rows of `[V, H]`, times `scale`, for tokens `[T]`."""
        x = F.embedding(tokens, table)
        return x if scale == 1 else x.mul_(scale)

    def rotation(self, positions: Tensor, frequencies: Tensor, amplitude: float) -> Tensor:
        """See `baton.engine.rope.rotation`."""
        return rotation(positions, frequencies, amplitude)

    def norm_heads_(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """`x / √(mean(x²) + eps) · weight`, in place, for each head of `[T, heads, D]`; the weight is `[heads, D]`."""
        x.copy_(F.rms_norm(x, x.shape[-1:], None, eps) * weight)

    def logits(self, x: Tensor, cap: float | None) -> Tensor:
        """As float32; with a cap, cap · tanh(x / cap)."""
        x = x.float()
        return x if cap is None else cap * torch.tanh(x / cap)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) · up of `[T, 2 I]`, gate first: `[T, I]`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        """gelu(gate) · up of `[T, 2 I]` with gelu in its tanh form: `[T, I]`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh").mul_(up)

    def rotate_(self, qk: Tensor, rotation: Tensor) -> None:
        """Rotary position embedding in place: qk `[T, heads, D]` as complex `[T, heads, D / 2]`, times `[T, 1, D / 2]`, in float32."""
        if qk.dtype == torch.float32 and qk.stride(-1) == 1:
            torch.view_as_complex(qk.view(*qk.shape[:-1], -1, 2)).mul_(rotation)
        else:
            precise = qk.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            self.rotate_(precise, rotation)
            qk.copy_(precise)

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Each row of `[T, H]` in its own steps, 127 up to its greatest magnitude: uint8 `[T, H]` around 128, and float32 steps `[T]`."""
        precise = x.float()
        steps = precise.abs().amax(dim=-1).div_(127).clamp_(min=TINY)
        return precise.div(steps[:, None]).round_().add_(128).to(torch.uint8), steps

    def multiplier(self, matrix: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor] | None:
        """x `[T, H]` → x Wᵀ + bias `[T, out]` for W `[out, H]` of the type of x, if that is faster than what `Linear` has. Keeps nothing of
        `matrix`."""
        return None

    def int8_multiplier(self, matrix: Tensor, steps: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor] | None:
        """The same for int8 `[out, H]` and the steps `[out]` of its rows: `quantize`, the product and `dequantize` in one, with exactly the
        same results."""
        return None

    def dequantize(self, products: Tensor, steps: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """products · steps + bias, of float32 `[T, out]` and `[T]`, as `dtype`. Products may be overwritten."""
        products *= steps[:, None]
        if bias is not None:
            products += bias
        return products.to(dtype)
