"""The Llama family as one pre-norm decoder: x += attention(norm(x)); x += mlp(norm(x)).

Knows tokens, positions and weights. Where keys and values live and which of them a token sees is the business of the `Attention` that it
is given: nothing here knows of batches, blocks or requests. Letters in shapes: T tokens of all sequences in a row, H hidden,
Hq query heads, Hkv key/value heads, D head dim, I intermediate, V vocabulary, R rows asked for.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.checkpoint import ModelConfig, Rope
from engine.linear import Linear, stacked

# (layer, q [T, Hq, D], kv [T, 2, Hkv, D]) → [T, Hq * D]
Attention = Callable[[int, Tensor, Tensor], Tensor]
# Hugging Face tensor name → tensor on the CPU
ReadTensor = Callable[[str], Tensor]


class Transformer:
    """Weights and the function they define."""

    def __init__(self, config: ModelConfig, read: ReadTensor, dtype: torch.dtype, device: torch.device) -> None:
        """Reads every tensor of `expected_tensors(config)` once, and holds them as `dtype` on `device`."""
        self.config = config
        self.embedding = stacked([read("model.embed_tokens.weight")], dtype, device)  # [V, H]
        self.layers = [Layer(config, f"model.layers.{i}", read, dtype, device) for i in range(config.layers)]
        self.norm = stacked([read("model.norm.weight")], dtype, device)  # [H]
        self.head = Linear([self.embedding if config.tied else read("lm_head.weight")], [], dtype, device)
        self.frequencies = rope_frequencies(config.rope, config.head_dim).to(device)  # [D / 2]

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention, rows: Tensor) -> Tensor:
        """Logits `[R, V]` in float32 of the tokens at `rows`; tokens and positions are `[T]` int64. Keys and values go to `attention`."""
        x = F.embedding(tokens, self.embedding)  # [T, H]
        rotation = self.rotation(positions)
        for i, layer in enumerate(self.layers):
            x += layer.attend(F.rms_norm(x, x.shape[-1:], layer.norm1, self.config.norm_eps), rotation, i, attention)
            x += layer.mlp(F.rms_norm(x, x.shape[-1:], layer.norm2, self.config.norm_eps))
        x = F.rms_norm(x[rows], x.shape[-1:], self.norm, self.config.norm_eps)  # [R, H]
        return self.head(x).float()

    def rotation(self, positions: Tensor) -> Tensor:
        """exp(i · position · frequency), complex64 `[T, 1, D / 2]`."""
        angles = positions.to(torch.float32)[:, None, None] * self.frequencies
        return torch.polar(torch.ones_like(angles), angles)


class Layer:
    """One decoder layer: q, k and v are one matrix, gate and up are one matrix."""

    def __init__(self, config: ModelConfig, name: str, read: ReadTensor, dtype: torch.dtype, device: torch.device) -> None:
        c, self.config = config, config

        def linear(*parts: str, bias: bool, paired: int = 0) -> Linear:
            """The first `paired` parts are matrices of q and k, whose rows are put into pairs."""

            def stack(kind: str) -> list[Tensor]:
                tensors = [read(f"{name}.{part}.{kind}") for part in parts]
                return [pairs(t, c.head_dim) if i < paired else t for i, t in enumerate(tensors)]

            return Linear(stack("weight"), stack("bias") if bias else [], dtype, device)

        def vector(part: str) -> Tensor:
            return stacked([read(f"{name}.{part}.weight")], dtype, device)

        self.qkv = linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias=c.qkv_bias, paired=2)
        self.out = linear("self_attn.o_proj", bias=c.o_bias)
        self.gate_up = linear("mlp.gate_proj", "mlp.up_proj", bias=c.mlp_bias)
        self.down = linear("mlp.down_proj", bias=c.mlp_bias)
        self.norm1 = vector("input_layernorm")  # [H]
        self.norm2 = vector("post_attention_layernorm")  # [H]
        self.qk_norm: Tensor | None = None  # [Hq + Hkv, D]
        if c.qk_norm:
            q, k = (pairs(vector(f"self_attn.{part}"), c.head_dim) for part in ("q_norm", "k_norm"))
            self.qk_norm = torch.cat((q.expand(c.heads, -1), k.expand(c.kv_heads, -1)))

    def attend(self, x: Tensor, rotation: Tensor, index: int, attention: Attention) -> Tensor:
        """[T, H] → [T, H]."""
        c = self.config
        heads = self.qkv(x).view(x.shape[0], c.heads + 2 * c.kv_heads, c.head_dim)  # [T, Hq + 2 Hkv, D]
        qk = heads[:, : c.heads + c.kv_heads]
        if self.qk_norm is not None:
            qk.copy_(F.rms_norm(qk, qk.shape[-1:], None, c.norm_eps) * self.qk_norm)
        rotate_(qk, rotation)
        kv = heads[:, c.heads :].view(-1, 2, c.kv_heads, c.head_dim)  # [T, 2, Hkv, D]
        return self.out(attention(index, heads[:, : c.heads], kv))

    def mlp(self, x: Tensor) -> Tensor:
        """[T, H] → [T, H]: down(silu(gate(x)) · up(x))."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # [T, I] each
        return self.down(F.silu(gate).mul_(up))


def pairs(rows: Tensor, head_dim: int) -> Tensor:
    """Reorders each head's rows (0 … D-1) to (0, D/2, 1, D/2 + 1, …), so that the two of a rotation are neighbours, a complex number.

    Hugging Face files keep them D/2 apart. q·k does not change when both are reordered; keys lie in the pool in this order.
    """
    return rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def rotate_(x: Tensor, rotation: Tensor) -> None:
    """Rotary position embedding in place: x `[T, heads, D]` as complex `[T, heads, D / 2]`, times `[T, 1, D / 2]`, in float32."""
    if x.dtype == torch.float32:
        torch.view_as_complex(x.view(*x.shape[:-1], -1, 2)).mul_(rotation)
    else:
        precise = x.float()
        rotate_(precise, rotation)
        x.copy_(precise)


def rope_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians per position `[D / 2]`: theta^(-2i/D), stretched as the checkpoint was trained.

    `linear` divides all by `factor`. `llama3` (Llama 3.1) divides those with fewer than `low_freq_factor` turns within the original
    context, keeps those with more than `high_freq_factor`, and blends in between.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    turns = rope.original_positions * plain / (2 * math.pi)
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - keep) * plain / rope.factor + keep * plain
