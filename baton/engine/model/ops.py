"""The pointwise operations between the matrices of a layer, in plain torch. They are correct on every device, and define what any faster
version must compute.

Letters in shapes: T tokens of the batch, H hidden, I intermediate, D head dim, E experts, K experts per token, A = T · K.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.model import onednn
from baton.engine.model.attention import Kernels
from baton.engine.model.checkpoint import ExpertConfig
from baton.engine.model.quantised.matrix import Quantised
from baton.engine.model.rope import rotation
from baton.engine.model.sampler import Draw

Multiply = Callable[[Tensor], Tensor]  # [T, in] → [T, out]
# (x [A / n, in], owners [A]) → [A, out]: row a is row a // n of x times the matrix with number owners[a].
Each = Callable[[Tensor, Tensor], Tensor]
Table = Callable[[Tensor, float], Tensor]  # (tokens [T], scale) → [T, H]: rows, times the scale
TINY = torch.finfo(torch.float32).tiny  # the step of a row of zeros


class Ops:
    """What a `Transformer` computes between two matrices. Subclasses compute the same numbers, up to rounding, but faster."""

    draw: Draw | None = None
    records = False  # whether a step can be recorded (see `baton.engine.cpu.recording`)
    at_once: int | None = None  # tokens that pass a feed-forward network together, if not all

    def __init__(self, packs: bool = False) -> None:
        """`packs`: matrices on a CPU are reordered for oneDNN, which at 2 to 32 rows is 2 to 5 times as fast as `F.linear` in float32."""
        self.packs = packs
        self.recurring = True  # whether products are faster if their sizes recur (see `baton.engine.model.sizes`)

    @property
    def arithmetic(self) -> str:
        """Whatever the last bits of a result depend on, besides the model and its type: equal for two workers whose bits are equal."""
        return f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}{', packed' if self.packs else ''}"

    @property
    def has_int8(self) -> bool:
        """Whether `int8_multiplier` is exact on this processor."""
        return onednn.multiplies_int8()

    def attention(self, stored: str) -> Kernels | None:
        """Kernels for a pool as `KvLayout.stored` says it; None: there are none."""
        return None

    def add_rms_norm(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """x / √(mean(x²) + eps) · weight, `[T, H]`, after `x += y` in place if `y` is given."""
        if y is not None:
            x += y
        return F.rms_norm(x, x.shape[-1:], weight, eps)

    def embed(self, tokens: Tensor, table: Tensor | Table, scale: float) -> Tensor:
        """Rows of `[V, H]`, times `scale`, for tokens `[T]`."""
        if not isinstance(table, Tensor):
            return table(tokens, scale)
        x = F.embedding(tokens, table)
        return x if scale == 1 else x.mul_(scale)

    def rotation(self, positions: Tensor, frequencies: Tensor, amplitude: float) -> Tensor:
        """See `baton.engine.model.rope.rotation`."""
        return rotation(positions, frequencies, amplitude)

    def norm_heads_(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """`x / √(mean(x²) + eps) · weight`, in place, for each head of `[T, heads, D]`; the weight is `[heads, D]`."""
        x.copy_(F.rms_norm(x, x.shape[-1:], None, eps) * weight)

    def logits(self, x: Tensor, cap: float | None) -> Tensor:
        """Returns float32; with a cap, cap · tanh(x / cap)."""
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

    def turn_(self, x: Tensor, size: int) -> None:
        """Every `size` neighbours of a head of `[T, heads, D]`, a power of two, times the orthonormal Hadamard matrix of Sylvester's order,
        in place and in float32. It turns them back, too. (Rotated before they are rounded, numbers have no outliers: QuaRot, Ashkboos et
        al. 2024, arXiv 2404.00456.)"""
        turned, apart = x.float().unflatten(-1, (-1, size)), 1
        while apart < size:  # additions in an order that follows from the size alone
            first, second = turned.unflatten(-1, (-1, 2, apart)).unbind(-2)
            turned, apart = torch.stack((first + second, first - second), dim=-2).flatten(-3), 2 * apart
        x.copy_(turned.flatten(-2) * size**-0.5)

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Each row of `[T, H]` in its own steps, 127 up to its greatest magnitude: uint8 `[T, H]` around 128, and float32 steps `[T]`."""
        precise = x.float()
        steps = precise.abs().amax(dim=-1).div_(127).clamp_(min=TINY)
        return precise.mul(steps.reciprocal()[:, None]).round_().add_(128).to(torch.uint8), steps

    def multiplier(self, matrix: Tensor, bias: Tensor | None) -> Multiply:
        """x `[T, H]` → x Wᵀ + bias `[T, out]` for W `[out, H]` on the CPU, of the type of x. Keeps nothing of `matrix`, which may be
        part of a file."""
        if self.packs and onednn.multiplies(matrix.dtype):
            return onednn.packed(matrix, bias)
        own = matrix.clone()
        return lambda x: F.linear(x, own, bias)

    def int8_multiplier(self, matrix: Tensor, steps: Tensor, bias: Tensor | None) -> Multiply:
        """The same for int8 `[out, H]` and the steps `[out]` of its rows: `quantize`, the product, which is exact, and `dequantize`. Raises
        ValueError if it would not be exact on this processor."""
        if not self.has_int8:
            raise ValueError("engine.weight_dtype: int8 needs compiled kernels, or a CPU with VNNI: others do not multiply it exactly")
        multiply = onednn.packed_int8(matrix, steps) if self.packs else _plain_int8(matrix, steps)

        def linear(x: Tensor) -> Tensor:
            rounded, sizes = self.quantize(x)
            return self.dequantize(multiply(rounded), sizes, bias, x.dtype)

        return linear

    def int4_multiplier(self, matrix: Tensor, scales: Tensor, bias: Tensor | None) -> Multiply:
        """x `[T, H]` → x Wᵀ + bias for W of int8 `[out, H rounded up]` between -8 and 7, times bfloat16 scales `[out, H rounded up / 32]`.
        `quantize` rounds x."""
        width, size = matrix.shape[1], matrix.shape[1] // scales.shape[1]
        weights = matrix.float().mul_(scales.float().repeat_interleave(size, dim=1))

        def linear(x: Tensor) -> Tensor:
            rounded, steps = self.quantize(x)
            products = F.linear(F.pad(rounded.float().sub_(128), (0, width - x.shape[1])), weights)
            return self.dequantize(products, steps, bias, x.dtype)

        return linear

    def stored_multiplier(self, matrix: Quantised, bias: Tensor | None, device: torch.device) -> Multiply | None:
        """The same for a matrix as a checkpoint has it, on `device`, where the bias is. None: it is not computed so, but dequantised. On a
        CPU `quantize` rounds x for it."""
        return None

    def table(self, multiply: Multiply, dtype: torch.dtype) -> Table | None:
        """The rows of W, from a `stored_multiplier`; they are of the type `dtype`. None: it does not give them."""
        return None

    def per_head(self, matrices: Tensor) -> Multiply:
        """x `[T, Hq, in]` → `[T, Hq, out]`: each head has its own of the matrices `[Hq, out, in]`, which are of the type of x."""
        turned = matrices.transpose(1, 2)
        return lambda x: torch.bmm(x.transpose(0, 1), turned).transpose(0, 1)

    def latent_heads(self, absorbed: Tensor, q: Tensor, key: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The queries and, last, the key of latent attention, `[T, Hq + 1, D]`: absorbed `[T, Hq, R]` beside the end of q `[T, Hq, *]`,
        and key `[T, D]` with its first R numbers normed by the weight `[R]`."""
        (tokens, heads, rank), dim = absorbed.shape, key.shape[1]
        out = key.new_empty(tokens, heads + 1, dim)
        out[:, :-1, :rank], out[:, :-1, rank:] = absorbed, q[..., rank - dim :]
        out[:, -1, :rank], out[:, -1, rank:] = self.add_rms_norm(key[:, :rank].contiguous(), None, weight, eps), key[:, rank:]
        return out

    def each(self, products: Sequence[Multiply]) -> Each | None:
        """Products of rows with a matrix each, as one. None: there is no faster way than one after the other."""
        return None

    def route(self, logits: Tensor, bias: Tensor | None, config: ExpertConfig) -> tuple[Tensor, Tensor]:
        """Router logits `[T, E]` in float32 → the share of each chosen expert `[T, K]` and which they are `[T, K]`.

        Softmax: Mixtral, Qwen3-MoE, DeepSeek-V2 (arXiv 2405.04434, group-limited by the best expert of a group). Sigmoid: DeepSeek-V3
        (arXiv 2412.19437): the bias balances the load, so it affects the choice but not the shares, and a group is worth the sum of its
        two best.
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

    def combine(self, y: Tensor, shares: Tensor, more: Tensor | None) -> Tensor:
        """The sum over K of shares `[T, K]` · y `[T · K, H]`, and of `more` `[T, H]` if there is more."""
        x = torch.bmm(shares[:, None].to(y.dtype), y.view(*shares.shape, y.shape[-1]))[:, 0]
        return x if more is None else x.add_(more)

    def dequantize(self, products: Tensor, steps: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """products · steps + bias, of float32 `[T, out]` and `[T]`, as `dtype`. Products may be overwritten."""
        products *= steps[:, None]
        if bias is not None:
            products += bias
        return products.to(dtype)


def _plain_int8(matrix: Tensor, steps: Tensor) -> Multiply:
    """Same as `onednn.packed_int8`, with exactly the same results."""
    return lambda x: torch._int_mm(x.to(torch.int16).sub_(128).to(torch.int8), matrix.t()).float().mul_(steps)
