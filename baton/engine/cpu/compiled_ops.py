"""The operations of a layer on compiled kernels.

Importing this module compiles them for float32, which takes seconds, or loads what an earlier process compiled; those for bfloat16
(`kernel.prepare`), and those of experts, int8, int4, groups and KV as int8 or int5, are compiled when the first model that needs them is
loaded. The import fails if Numba cannot compile for this processor, or if torch's threads are not GNU's OpenMP;
`baton.engine.choice.choose_ops` then keeps plain torch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.engine.cpu import amx, panels, pointwise, products
from baton.engine.cpu.decode_attention import attend_in_place, store
from baton.engine.cpu.draw import draw
from baton.engine.cpu.features import target
from baton.engine.cpu.span_attention import attend_span
from baton.engine.model import onednn
from baton.engine.model.attention import Kernels
from baton.engine.model.checkpoint import ExpertConfig
from baton.engine.model.ops import Each, Multiply, Ops, Table
from baton.engine.model.quantised.matrix import Quantised

ATTENTION = Kernels(attend_in_place, attend_span, store)


class CompiledOps(Ops):
    """float32 and bfloat16 on the CPU."""

    draw, records = staticmethod(draw), True
    at_once = 512  # products are as fast as with a whole step of 2,048, and gate and up take a fourth of its memory

    def __init__(self, products: str = "auto") -> None:
        """`products`: which of `baton.engine.cpu.products.CANDIDATES` multiplies; auto: what is fastest here."""
        super().__init__(packs=True)
        self._products = products
        self.recurring = False  # until a matrix is left to others
        self._by: dict[str, str] = {}  # type of weights → what multiplies them

    def attention(self, stored: str) -> Kernels | None:
        if not stored:
            return ATTENTION
        if stored == "int5":
            from baton.engine.cpu import kv_int5

            return kv_int5.ATTENTION
        from baton.engine.cpu import kv_int8

        return kv_int8.ATTENTION

    def add_rms_norm(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        if not x.is_contiguous() or weight.dtype != x.dtype:
            return super().add_rms_norm(x, y, weight, eps)
        out = torch.empty_like(x)
        pointwise.add_rms_norm(x, y if y is None else y.contiguous(), weight, out, eps)
        return out

    def embed(self, tokens: Tensor, table: Tensor | Table, scale: float) -> Tensor:
        if not isinstance(table, Tensor):
            return table(tokens, scale)
        out = table.new_empty(len(tokens), table.shape[1])
        pointwise.embed(table, tokens, out, scale)
        return out

    def rotation(self, positions: Tensor, frequencies: Tensor, amplitude: float) -> Tensor:
        out = frequencies.new_empty(len(positions), 1, len(frequencies), dtype=torch.complex64)
        pointwise.turns(positions, frequencies, out, amplitude)
        return out

    def norm_heads_(self, x: Tensor, weight: Tensor, eps: float) -> None:
        if x.stride(2) != 1:
            return super().norm_heads_(x, weight, eps)
        return pointwise.norm_heads(x, weight, eps)

    def logits(self, x: Tensor, cap: float | None) -> Tensor:
        if x.dtype == torch.float32 and cap is None:
            return x
        out = x.new_empty(x.shape, dtype=torch.float32)
        pointwise.to_logits(x, out, cap or 0.0)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return _gated(gate_up.contiguous(), gelu=False)

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        return _gated(gate_up.contiguous(), gelu=True)

    def rotate_(self, qk: Tensor, rotation: Tensor) -> None:
        if qk.stride(2) != 1:
            return super().rotate_(qk, rotation)
        pointwise.rotate(qk, rotation.contiguous())
        return None

    def turn_(self, x: Tensor, size: int) -> None:
        if x.stride(2) != 1:
            return super().turn_(x, size)
        return pointwise.turn(x, size)

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        from baton.engine.cpu import int8

        x = x.contiguous()
        out, steps = torch.empty_like(x, dtype=torch.uint8), x.new_empty(len(x), dtype=torch.float32)
        int8.quantize(x, out, steps)
        return out, steps

    def multiplier(self, matrix: Tensor, bias: Tensor | None) -> Multiply:
        return panels.multiplier(matrix, bias) if self._takes(matrix) else super().multiplier(matrix, bias)

    def int8_multiplier(self, matrix: Tensor, steps: Tensor, bias: Tensor | None) -> Multiply:
        from baton.engine.cpu import int8

        return int8.multiplier(matrix, steps, bias) if self._takes(matrix) else super().int8_multiplier(matrix, steps, bias)

    def int4_multiplier(self, matrix: Tensor, scales: Tensor, bias: Tensor | None) -> Multiply:
        from baton.engine.cpu import int4

        return int4.multiplier(matrix, scales, bias)

    def stored_multiplier(self, matrix: Quantised, bias: Tensor | None, device: torch.device) -> Multiply | None:
        if matrix.float8:
            return None
        if matrix.bits == 8 and matrix.scales.shape[1] == 1 and matrix.shifts is None:
            rows = matrix.numbers.bitwise_xor(matrix.middle).view(torch.int8)
            return self.int8_multiplier(rows, matrix.scales[:, 0].float().contiguous(), bias)
        from baton.engine.cpu import groups

        return groups.multiplier(matrix, bias) if groups.fits(matrix) else None

    def table(self, multiply: Multiply, dtype: torch.dtype) -> Table | None:
        from baton.engine.cpu import groups

        return groups.Rows(multiply, dtype) if isinstance(multiply, panels.Product) and multiply.kernel in groups.TAKES else None

    def _takes(self, matrix: Tensor) -> bool:
        """Whether our own kernels multiply it. Otherwise `packs` says who does."""
        by = choice(matrix.dtype).by if self._products == "auto" else self._products
        if by == "baton" and panels.fits(matrix):
            self._by.setdefault(str(matrix.dtype), by)
            return True
        self.recurring, self.packs = True, by != "torch"
        self._by[str(matrix.dtype)] = f"{by}, torch {torch.__version__}"
        return False

    @property
    def arithmetic(self) -> str:
        return f"{_kernels()}; {dict(sorted(self._by.items()))}"

    @property
    def has_int8(self) -> bool:
        return True

    def per_head(self, matrices: Tensor) -> Multiply:
        if not self._takes(matrices[0]):
            return super().per_head(matrices)
        from baton.engine.cpu import experts

        heads, outs, _ = matrices.shape
        each = experts.Each([panels.multiplier(head.contiguous(), None) for head in matrices])
        return lambda x: each(x.flatten(0, 1)).view(len(x), heads, outs)

    def latent_heads(self, absorbed: Tensor, q: Tensor, key: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = key.new_empty(len(q), q.shape[1] + 1, key.shape[1])
        pointwise.latent_heads(absorbed.contiguous(), key, q[..., absorbed.shape[2] - key.shape[1] :], weight, out, eps)
        return out

    def each(self, products: Sequence[Multiply]) -> Each | None:
        from baton.engine.cpu import experts

        return experts.each(products)

    def route(self, logits: Tensor, bias: Tensor | None, config: ExpertConfig) -> tuple[Tensor, Tensor]:
        from baton.engine.cpu import experts

        c, size = config, (len(logits), config.chosen)
        shares, ids = logits.new_empty(size), logits.new_empty(size, dtype=torch.int64)
        experts.route(logits, bias, shares, ids, c.sigmoid, c.groups, c.open_groups, c.normalised, c.scale)
        return shares, ids

    def combine(self, y: Tensor, shares: Tensor, more: Tensor | None) -> Tensor:
        from baton.engine.cpu import experts

        out = y.new_empty(len(shares), y.shape[1])
        experts.combine(y, shares, more, out)
        return out

    def dequantize(self, products: Tensor, steps: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        from baton.engine.cpu import int8

        out = products if dtype == torch.float32 else torch.empty_like(products, dtype=dtype)
        int8.dequantize(products, steps, bias, out)
        return out


def choice(kind: torch.dtype) -> products.ProductChoice:
    """Chooses what multiplies weights of this type, with as many threads as torch has now."""
    return products.choice(kind, torch.get_num_threads(), _arm, _kernels())


def _kernels() -> str:
    """What is the same on two machines whose kernels compute the same bits."""
    return f"kernels for {target()}{' with AMX' if amx.THERE else ''}"


def _arm(by: str, matrix: Tensor) -> Multiply:
    ops = CompiledOps(by)
    if matrix.dtype == torch.int8:
        return ops.int8_multiplier(matrix, torch.ones(len(matrix)), None)
    if by == "onednn" and not onednn.multiplies(matrix.dtype):
        raise ValueError("oneDNN does not multiply this type here")
    return ops.multiplier(matrix, None)


def _gated(gate_up: Tensor, gelu: bool) -> Tensor:
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    pointwise.gated(gate_up, out, gelu)
    return out
