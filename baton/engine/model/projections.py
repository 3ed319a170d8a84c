"""The attention half of a layer: from its input to queries, keys and values, and from the result of attention to the layer's output.

Letters in shapes: T tokens, H hidden, Hq query heads, Hkv key/value heads, D head dim, Dv that of values, P parts (2: keys and values;
1: one vector that is both).
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from baton.engine.model.checkpoint import LatentConfig, ModelConfig
from baton.engine.model.ops import Ops
from baton.engine.model.quantised.matrix import Matrix, plain, with_rows
from baton.engine.model.rope import pairs
from baton.engine.model.weights import Weights

# (layer, q [T, Hq, D], kv [T, P, Hkv, D]) → [T, Hq * Dv]
Attention = Callable[[int, Tensor, Tensor], Tensor]

LATENT_EPS = 1e-6  # of the norms inside latent attention, whatever rms_norm_eps says


class SelfAttention:
    """Multi-head, grouped-query or multi-query attention. The matrices that make q, k and v are stacked into one."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops) -> None:
        c, d = config, config.head_dim
        self.config, self.ops = config, ops
        self.turned = 0  # neighbours that are turned together (`Ops.turn_`) on their way to attention and back; 0: they are not

        def paired(rows: Tensor) -> Tensor:
            return pairs(rows, d)

        def packed(rows: Tensor) -> Tensor:
            q, k, v = torch.split(rows, [c.heads * d, c.kv_heads * d, c.kv_heads * d])
            return torch.cat((paired(q), paired(k), v))

        def qkv(kind: str) -> list[Matrix]:
            """One tensor or three, the rows of q and k in pairs."""
            if c.packed:
                return [with_rows(weights.stored(f"qkv_proj.{kind}"), packed)]
            q, k, v = (weights.stored(f"{part}_proj.{kind}") for part in "qkv")
            return [with_rows(q, paired), with_rows(k, paired), v]

        self.qkv = weights.matrix(qkv("weight"), [plain(bias) for bias in qkv("bias")] if c.qkv_bias else [])
        self.out = weights.linear("o_proj", bias=c.o_bias)
        self.qk_norm: Tensor | None = None  # [Hq + Hkv, D]
        if c.qk_norm:
            q, k = (pairs(weights.vector(name, c.norm_offset), d) for name in ("q_norm", "k_norm"))
            self.qk_norm = torch.cat((q.expand(c.heads, -1), k.expand(c.kv_heads, -1)))

    def __call__(self, x: Tensor, rotation: Tensor, layer: int, attention: Attention) -> Tensor:
        """[T, H] → [T, H]."""
        values = attention(layer, *self.heads(x, rotation))
        if self.turned:
            self.ops.turn_(values.view(len(x), self.config.heads, -1), self.turned)
        return self.out(values)

    def heads(self, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
        """[T, H] → q [T, Hq, D], kv [T, 2, Hkv, D]."""
        c = self.config
        heads = self.qkv(x).view(x.shape[0], c.heads + 2 * c.kv_heads, c.head_dim)  # [T, Hq + 2 Hkv, D]
        qk = heads[:, : c.heads + c.kv_heads]
        if self.qk_norm is not None:
            self.ops.norm_heads_(qk, self.qk_norm, c.norm_eps)
        self.ops.rotate_(qk, rotation)
        if self.turned:  # products of queries and keys stay what they were
            self.ops.turn_(heads, self.turned)
        return heads[:, : c.heads], heads[:, c.heads :].view(-1, 2, c.kv_heads, c.head_dim)


class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), with the projections of keys and values absorbed into those of queries
    and outputs.

    A token stores one vector, the same for all heads: a latent of R numbers, from which two matrices would make each head's key and value,
    and rope_dim numbers that carry the position. Instead of making keys, q W_uk is multiplied with the latents; instead of making values,
    the weighted latents are summed and the sum is multiplied by W_uv. This is attention with a single key head, D = R + rope_dim, whose
    values are the first R numbers of the keys. These two matrices keep the model's type if others are quantised.
    """

    def __init__(self, config: ModelConfig, latent: LatentConfig, weights: Weights, ops: Ops) -> None:
        c, self.latent, self.ops, self.count = config, latent, ops, config.heads
        self.turned = 0  # as in `SelfAttention`

        def paired(head: int, rows: Tensor) -> Tensor:
            """Puts the last rope_dim of each head's rows, which are rotated, in pairs if the file has them apart."""
            if latent.interleaved:
                return rows
            kept, turned = torch.split(rows.view(-1, head, *rows.shape[1:]), [head - latent.rope_dim, latent.rope_dim], dim=1)
            return torch.cat((kept, pairs(turned.flatten(0, 1), latent.rope_dim).view_as(turned)), dim=1).flatten(0, 1)

        whole_head = partial(paired, c.head_dim)
        q_name = "q_b_proj" if latent.q_rank else "q_proj"
        self.q_down = weights.linear("q_a_proj", bias=c.qkv_bias) if latent.q_rank else None
        self.q_norm = weights.vector("q_a_layernorm") if latent.q_rank else None
        self.q = weights.matrix([with_rows(weights.stored(f"{q_name}.weight"), partial(paired, latent.nope_dim + latent.rope_dim))])
        biases = [whole_head(weights.tensor("kv_a_proj_with_mqa.bias"))] if c.qkv_bias else []
        self.kv = weights.matrix([with_rows(weights.stored("kv_a_proj_with_mqa.weight"), whole_head)], biases)
        self.kv_norm = weights.vector("kv_a_layernorm")  # [R]
        up = weights.tensor("kv_b_proj.weight").view(c.heads, -1, latent.rank)  # [Hq, nope_dim + value_dim, R]
        self.key_up = ops.per_head(weights.placed(up[:, : latent.nope_dim]).transpose(1, 2))  # W_uk [Hq, R, nope_dim]
        self.value_up = ops.per_head(weights.placed(up[:, latent.nope_dim :]))  # W_uv [Hq, value_dim, R]
        self.out = weights.linear("o_proj", bias=c.o_bias)

    def __call__(self, x: Tensor, rotation: Tensor, layer: int, attention: Attention) -> Tensor:
        """[T, H] → [T, H]."""
        latents = attention(layer, *self.heads(x, rotation)).view(x.shape[0], self.count, self.latent.rank)
        if self.turned:
            self.ops.turn_(latents, self.turned)
        return self.out(self.value_up(latents).flatten(1))

    def heads(self, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
        """[T, H] → absorbed q [T, Hq, D], kv [T, 1, 1, D]."""
        norm = self.ops.add_rms_norm
        key = self.kv(x)  # [T, D]
        if self.q_down is not None and self.q_norm is not None:
            x = norm(self.q_down(x), None, self.q_norm, LATENT_EPS)
        q = self.q(x).view(x.shape[0], self.count, -1)  # [T, Hq, nope_dim + rope_dim]
        absorbed = self.key_up(q[..., : self.latent.nope_dim])  # [T, Hq, R]
        heads = self.ops.latent_heads(absorbed, q, key, self.kv_norm, LATENT_EPS)  # [T, Hq + 1, D]
        self.ops.rotate_(heads[..., self.latent.rank :], rotation)
        if self.turned:
            self.ops.turn_(heads, self.turned)
        return heads[:, :-1], heads[:, None, -1:]
