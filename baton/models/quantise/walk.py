"""The calibration text on its way through the model: one layer in memory at a time, and what its matrices are multiplied with."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from baton.engine.model.checkpoint import Checkpoint, ModelConfig
from baton.engine.model.linear import Linear
from baton.engine.model.naive import attend_plainly
from baton.engine.model.ops import Ops
from baton.engine.model.rope import frequencies
from baton.engine.model.transformer import Layer
from baton.engine.model.weights import Weights
from baton.models.quantise.inputs import SAMPLE, InputSums
from baton.models.quantise.sites import Tensors, linears, sites


class Walk:
    """Texts stand before layer 0, 1, …; they take H numbers for each token."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, texts: list[list[int]]) -> None:
        self._config, self._ops = config, Ops()
        embedding = checkpoint.tensor("model.embed_tokens.weight")
        self.texts = [self._ops.embed(torch.tensor(text), embedding, 1).float().mul_(config.embedding_scale) for text in texts]

    def inputs(self, index: int, tensors: Tensors) -> list[InputSums]:
        """The inputs of each of the layer's sites. The texts stay where they are."""
        layer, share = self._layer(index, tensors), max(1, SAMPLE // len(self.texts))
        found = [InputSums.none(tensors[f"{site.names[0]}.weight"].shape[1]) for site in sites(self._config)]
        for linear, inputs in zip(linears(layer), found, strict=True):
            _watch(linear, partial(inputs.add, share=share))
        for x in self.texts:
            self._apply(layer, index, x.clone())
        return found

    def move(self, index: int, tensors: Tensors) -> None:
        """Moves the texts past the layer, with these weights."""
        layer = self._layer(index, tensors)
        for x in self.texts:
            self._apply(layer, index, x)

    def _layer(self, index: int, tensors: Tensors) -> Layer:
        weights = Weights(tensors.__getitem__, torch.float32, torch.device("cpu"), "auto", ops=self._ops)
        return Layer(self._config, index, weights, self._ops)

    def _apply(self, layer: Layer, index: int, x: Tensor) -> None:
        """x `[T, H]` becomes the layer's output."""
        c, norm, rope = self._config, self._ops.add_rms_norm, self._config.ropes[index]
        turned = self._ops.rotation(torch.arange(len(x)), frequencies(rope, c.rope_dim), rope.amplitude)

        def attention(index: int, q: Tensor, kv: Tensor) -> Tensor:
            return attend_plainly(q, kv[:, 0], kv[:, 1], c.attention[index])

        for part, before, after in (
            (lambda y: layer.attention(y, turned, index, attention), layer.norm1, layer.post_norm1),
            (layer.mlp, layer.norm2, layer.post_norm2),
        ):
            y = part(norm(x, None, before, c.norm_eps))
            x += y if after is None else norm(y, None, after, c.norm_eps)


def _watch(linear: Linear, seen: Callable[[Tensor], None]) -> None:
    multiply = linear.multiply

    def watched(x: Tensor) -> Tensor:
        seen(x)
        return multiply(x)

    linear.multiply = watched
