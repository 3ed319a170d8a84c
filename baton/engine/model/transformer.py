"""A decoder: x += attention(norm(x)); x += mlp(norm(x)). What families add to that is data in `ModelConfig`.

It knows tokens, positions and weights. The `Attention` that it is given decides where keys and values live and which of them a token sees:
nothing here knows of batches, blocks or requests. Letters in shapes: T tokens of all sequences in a row, H hidden, D rotated
elements of a head, V vocabulary, R requested rows.
"""

import torch
from torch import Tensor

from baton.engine.model.checkpoint import ModelConfig
from baton.engine.model.linear import Linear
from baton.engine.model.moe import Mixture, Mlp, activation
from baton.engine.model.ops import Ops, Table
from baton.engine.model.projections import Attention, LatentAttention, SelfAttention
from baton.engine.model.quantised.matrix import Matrix, plain
from baton.engine.model.rope import frequencies
from baton.engine.model.weights import ReadMatrix, Weights


class Transformer:
    """Weights and the function they define."""

    def __init__(
        self, config: ModelConfig, read: ReadMatrix, dtype: torch.dtype, device: torch.device, ops: Ops, weight_dtype: str = "auto"
    ) -> None:
        """Reads every tensor of `expected_tensors(config)` once, and holds them as `dtype` on `device`; matrices as `weight_dtype`."""
        self.config = config
        self.ops = ops
        weights = Weights(read, dtype, device, weight_dtype, ops=ops)
        self.dtype, self.device = dtype, device
        table = weights.stored("model.embed_tokens.weight")  # [V, H]
        self.scale = torch.tensor(config.embedding_scale, dtype=dtype).item()  # rounded, as it was in training
        self.layers = [Layer(config, i, weights.under(f"model.layers.{i}"), ops) for i in range(config.layers)]
        self.norm = weights.vector("model.norm", config.norm_offset)  # [H]
        self.embedding, self.head = _ends(weights, table, None if config.tied else weights.stored("lm_head.weight"))
        self.forms = weights.forms
        self.frequencies = {rope: frequencies(rope, config.rope_dim).to(device) for rope in dict.fromkeys(config.ropes)}  # [D / 2] each

    def turn_heads(self) -> None:
        """Turns queries, keys and values from now on before attention, and turns back what comes back: in exact arithmetic nothing changes.
        The largest power of two that divides both sizes of a head is turned together."""
        c = self.config
        both = c.head_dim | (c.kv_value_dim or c.head_dim)
        for layer in self.layers:
            layer.attention.turned = both & -both

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention, rows: Tensor | None) -> Tensor:
        """Logits `[R, V]` in float32 of the tokens at `rows`, or of all; tokens and positions are `[T]` int64. Keys and values go to
        `attention`."""
        return self.logits(self.hidden(tokens, positions, attention, rows))

    def logits(self, hidden: Tensor) -> Tensor:
        """`[R, H]`, as `hidden` makes them → `[R, V]` in float32."""
        return self.ops.logits(self.head(hidden), self.config.logit_softcap)

    def hidden(self, tokens: Tensor, positions: Tensor, attention: Attention, rows: Tensor | None) -> Tensor:
        """What `logits` are made of, after the last norm: `[R, H]`."""
        c, norm, eps = self.config, self.ops.add_rms_norm, self.config.norm_eps
        x = self.ops.embed(tokens, self.embedding, self.scale)  # [T, H]
        y: Tensor | None = None  # the output of the previous sublayer: the norm adds it to x
        rotations = {rope: self.ops.rotation(positions, turns, rope.amplitude) for rope, turns in self.frequencies.items()}
        for i, layer in enumerate(self.layers):
            y = layer.attention(norm(x, y, layer.norm1, eps), rotations[c.ropes[i]], i, attention)
            if layer.post_norm1 is not None:
                y = norm(y, None, layer.post_norm1, eps)
            if layer is self.layers[-1] and rows is not None:
                x, y = x[rows], y[rows]  # [R, H]: after the last attention, no token depends on another
            y = layer.mlp(norm(x, y, layer.norm2, eps))
            if layer.post_norm2 is not None:
                y = norm(y, None, layer.post_norm2, eps)
        return norm(x, y, self.norm, eps)


def _ends(weights: Weights, table: Matrix, head: Matrix | None) -> tuple[Tensor | Table, Linear]:
    """The embedding and the matrix that makes logits. None: they are one, and a quantised one is held once if `ops` can."""
    made = weights.head(table if head is None else head) if head is not None or not isinstance(table, Tensor) else None
    if head is None and made is not None and (rows := weights.ops.table(made.multiply, weights.dtype)):
        return rows, made
    placed = weights.placed(plain(table))
    return placed, made or weights.head(placed)


class Layer:
    """One decoder layer: two sublayers, a norm before each, and in some families one after each."""

    def __init__(self, config: ModelConfig, index: int, weights: Weights, ops: Ops) -> None:
        c, experts = config, config.experts_of(index)
        self.attention: SelfAttention | LatentAttention
        self.mlp: Mlp | Mixture
        if c.latent:
            self.attention = LatentAttention(c, c.latent, weights.under("self_attn"), ops)
        else:
            self.attention = SelfAttention(c, weights.under("self_attn"), ops)
        if experts:
            self.mlp = Mixture(c, experts, weights.under("mlp"), ops)
        else:
            self.mlp = Mlp(weights.under("mlp"), activation(c, ops), c.mlp_bias, c.packed)

        def norm(name: str) -> Tensor:  # [H]
            return weights.vector(name, c.norm_offset)

        # If there are four norms, the one after attention has the name that elsewhere is the name of the second of two.
        self.norm1 = norm("input_layernorm")
        self.norm2 = norm("pre_feedforward_layernorm" if c.post_norms else "post_attention_layernorm")
        self.post_norm1: Tensor | None = norm("post_attention_layernorm") if c.post_norms else None
        self.post_norm2: Tensor | None = norm("post_feedforward_layernorm") if c.post_norms else None
