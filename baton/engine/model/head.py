"""A head that predicts further tokens from the hidden states of a model: DeepSeek's layer of multi-token prediction (DeepSeek-V3, arXiv
2412.19437, section 2.2), and EAGLE's head (Li et al. 2024, arXiv 2401.15077), which is the same with other names.

Slot p sees the token at p and the hidden state before it, and predicts the token after p. So what a slot holds depends on the tokens up
to its own, like the model's KV, and may lie in the same block. Where the hidden state before is not known, zeros stand for it.

Letters in shapes: T tokens, H hidden, P parts, V vocabulary, D head dim.
"""

from collections.abc import Callable

from torch import Tensor

from baton.engine.model.checkpoint import ModelConfig, head_prefix
from baton.engine.model.projections import Attention
from baton.engine.model.transformer import Layer, Transformer
from baton.engine.model.weights import ReadMatrix, Weights


class Head:
    def __init__(self, target: Transformer, config: ModelConfig, read: ReadMatrix, has: Callable[[str], bool], weight_dtype: str) -> None:
        """`config`: the target's `with_head`. Reads `head_tensors`; where one is missing that need not be there, it takes the target's."""
        self.config, self._target, self.ops = config, target, target.ops
        dtype, device = target.dtype, target.device
        weights = Weights(read, dtype, device, weight_dtype, f"{head_prefix(config)}.", target.ops)

        def own(name: str) -> bool:
            return has(f"{weights.prefix}{name}.weight")

        self.layer = Layer(config, config.layers - 1, weights, target.ops)
        self.token_norm, self.hidden_norm = (weights.vector(name, config.norm_offset) for name in ("enorm", "hnorm"))  # [H]
        from_token, from_hidden = weights.tensor("eh_proj.weight").split(config.hidden, dim=1)
        self.from_token, self.from_hidden = weights.matrix([from_token]), weights.matrix([from_hidden])
        self.embedding = weights.placed(weights.tensor("embed_tokens.weight")) if own("embed_tokens") else target.embedding
        self.norm = weights.vector("shared_head.norm", config.norm_offset) if own("shared_head.norm") else target.norm
        self.head = weights.head(weights.stored("shared_head.head.weight")) if own("shared_head.head") else target.head

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attention: Attention) -> tuple[Tensor, Tensor]:
        """Tokens and positions `[T]`, the hidden states before them `[T, H]` → those at them, as the head guesses them, `[T, H]`, and
        the logits of what follows `[T, V]` in float32. Keys and values go to layer 0 of `attention`."""
        norm, eps, layer = self.ops.add_rms_norm, self.config.norm_eps, self.layer
        x, z, rotation = self._begin(tokens, hidden, positions)
        y = layer.attention(z, rotation, 0, attention)
        if layer.post_norm1 is not None:
            y = norm(y, None, layer.post_norm1, eps)
        y = layer.mlp(norm(x, y, layer.norm2, eps))
        if layer.post_norm2 is not None:
            y = norm(y, None, layer.post_norm2, eps)
        guessed = norm(x, y, self.norm, eps)
        return guessed, self.ops.logits(self.head(guessed), self.config.logit_softcap)

    def keys(self, tokens: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """The keys and values of the same `[T, P, Hkv, D]`, which need no attention."""
        _, z, rotation = self._begin(tokens, hidden, positions)
        return self.layer.attention.heads(z, rotation)[1]

    def _begin(self, tokens: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The residual stream, its norm, which the layer's attention reads, and the rotations."""
        norm, eps, rope = self.ops.add_rms_norm, self.config.norm_eps, self.config.ropes[-1]
        embedded = self.ops.embed(tokens, self.embedding, self._target.scale)
        x = self.from_token(norm(embedded, None, self.token_norm, eps))
        y = self.from_hidden(norm(hidden, None, self.hidden_norm, eps))
        z = norm(x, y, self.layer.norm1, eps)  # and y is in x
        return x, z, self.ops.rotation(positions, self._target.frequencies[rope], rope.amplitude)
