"""Which matrices of a layer share their inputs, and what makes these inputs: there, a factor for each column can be taken back."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from baton.engine.model.checkpoint import ModelConfig
from baton.engine.model.linear import Linear
from baton.engine.model.moe import Mlp
from baton.engine.model.projections import SelfAttention
from baton.engine.model.transformer import Layer

Tensors = dict[str, Tensor]  # of one layer, float32, by their names within it


@dataclass(frozen=True, slots=True)
class Site:
    """Matrices with the same inputs."""

    names: tuple[str, ...]  # of modules, which have a weight and may have a bias
    norm: str | None = None  # the norm whose output they read
    made_by: str | None = None  # or the matrix whose outputs, each times something, they read
    heads: tuple[int, int] = (1, 1)  # see `baton.models.quantise.awq.scaling`


def sites(config: ModelConfig) -> tuple[Site, Site, Site, Site]:
    """The sites in the order of `linears`."""
    c = config
    qkv = ("self_attn.qkv_proj",) if c.packed else tuple(f"self_attn.{part}_proj" for part in "qkv")
    up = ("mlp.gate_up_proj",) if c.packed else ("mlp.gate_proj", "mlp.up_proj")
    return (
        Site(qkv, norm="input_layernorm"),
        Site(("self_attn.o_proj",), made_by=None if c.packed else "self_attn.v_proj", heads=(c.kv_heads, c.heads // c.kv_heads)),
        Site(up, norm="pre_feedforward_layernorm" if c.post_norms else "post_attention_layernorm"),
        Site(("mlp.down_proj",), made_by=None if c.packed else "mlp.up_proj"),
    )


def linears(layer: Layer) -> Iterator[Linear]:
    """What computes each of `sites`."""
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(attention, SelfAttention) and isinstance(mlp, Mlp)
    yield from (attention.qkv, attention.out, mlp.gate_up, mlp.down)


def check(config: ModelConfig) -> None:
    """Raises ValueError for a model whose layers are not of that kind."""
    if config.latent:
        raise ValueError(f"config.json: {config.architecture} has latent attention, whose matrices are not quantised here")
    if config.experts:
        raise ValueError(f"config.json: {config.architecture} is a mixture of experts, which is not quantised here")
    if config.scheme:
        raise ValueError("config.json: quantization_config: the weights are quantised already; quantise the original model")


def scale_columns(site: Site, s: Tensor, tensors: Tensors, config: ModelConfig) -> Tensor | None:
    """Multiplies the columns of the site's matrices with s `[in]`, and divides what makes their inputs: the layer computes the same.
    Returns what the rows of `site.made_by` were divided by, `[out, 1]`."""
    for name in site.names:
        tensors[f"{name}.weight"] *= s
    if site.norm is not None:
        norm = tensors[f"{site.norm}.weight"]
        norm.copy_((norm + config.norm_offset) / s - config.norm_offset)
        return None
    sets, repeats = site.heads
    rows = s.view(sets, repeats, -1)[:, 0].flatten()
    tensors[f"{site.made_by}.weight"] /= rows[:, None]
    if (bias := f"{site.made_by}.bias") in tensors:
        tensors[bias] /= rows
    return rows[:, None]
