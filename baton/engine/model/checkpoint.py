"""A Hugging Face model folder: the facts of its config.json under our own names (`baton.engine.model.config_json` reads them), and its
tensors (safetensors), whose names, shapes and types are checked before any weight is read.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from baton.engine.facts.fields import CheckpointError
from baton.engine.facts.fingerprint import weight_files
from baton.engine.model.quantised.matrix import Matrix, plain
from baton.engine.model.quantised.scheme import Format, Part, Parts, Scheme

WEIGHT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
QUANTISED_DTYPES = ("F4", "F6", "F8", "I4", "I8", "U8", "I32")
# What GPTQ, AWQ, compressed-tensors, FP8 and bitsandbytes put next to a matrix or in its place
QUANTISED_NAMES = (
    ".qweight", ".qzeros", ".scales", ".g_idx", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight_zero_point",
    ".weight_shape", ".input_scale", ".SCB", ".absmax", ".quant_map", ".quant_state.bitsandbytes__nf4",
    ".quant_state.bitsandbytes__fp4",
)  # fmt: skip
QUANTISED = "the weights are quantised, although config.json has no quantization_config"
FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}  # of all experts: [E, out, in], these stacked along `out`
MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
# Files of weights that are not read, and why
OTHER_WEIGHTS = {
    "pytorch_model*.bin": "a pickle, which can run code when it is read; save the model again with safe_serialization",
    "*.gguf": "a GGUF file; give its own path, or `baton unpack` it",
    "adapter_model.*": "an adapter is not a model; merge it into its base model and save that",
    "*.safetensors": "safetensors under another name; the weights must be in model.safetensors, or in the files of its index",
    "*.pt": "a pickle, which can run code when it is read; save the model as safetensors",
    "*.pth": "a pickle, which can run code when it is read; save the model as safetensors",
}
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding: the base, and how low frequencies are stretched for long contexts (see `baton.engine.model.rope`)."""

    theta: float = 10000.0
    kind: str = "default"  # default | linear | llama3 | yarn | longrope
    factor: float = 1.0
    original_positions: int = 0
    slow: float = 1.0  # turns within the original positions
    fast: float = 32.0
    truncate: bool = True  # yarn: the blend begins and ends at whole pairs
    stretch: tuple[float, ...] = ()  # longrope: a factor for each pair
    amplitude: float = 1.0  # rotated elements are multiplied by this


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What a layer's queries do with the keys they see."""

    window: int | None = None  # keys a query sees, itself included
    softcap: float | None = None  # scores become cap * tanh(score / cap), before the mask
    scale: float | None = None  # of q k^T; None: 1 / sqrt(D)


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention (see `baton.engine.model.projections.LatentAttention`)."""

    rank: int  # of the latent from which keys and values are made
    q_rank: int | None  # of the latent from which queries are made; None: they are projected directly
    nope_dim: int  # elements of a query head without position
    rope_dim: int  # and those that are rotated
    value_dim: int  # of a head, after the latent is projected up
    interleaved: bool  # the two elements of a rotation are neighbours in the file


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """A mixture of experts, and how a token's experts are chosen (see `baton.engine.model.moe.route`)."""

    layers: frozenset[int]  # that have a mixture
    count: int
    chosen: int  # experts that a token passes through
    intermediate: int  # of one expert
    sigmoid: bool = False  # scores are sigmoids of the router's logits, not their softmax
    biased: bool = False  # the choice, not the share, is made with a bias for each expert
    groups: int = 1
    open_groups: int = 1  # the number of groups, those with the best experts, that a token chooses from
    normalised: bool = False  # the shares of a token's experts sum to 1, before `scale`
    scale: float = 1.0
    shared: int = 0  # intermediate size of the network that every token passes through as well


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The facts of config.json that the computation needs, under our own names: everything in which families differ."""

    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int  # 1 with `latent`: the pool then has one key head
    head_dim: int  # of keys in the pool
    intermediate: int
    vocab: int
    max_positions: int
    norm_eps: float
    ropes: tuple[Rope, ...]  # one per layer
    attention: tuple[LayerAttention, ...]  # one per layer
    tied: bool  # the LM head is the embedding
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMS norm over each head of q and k
    eos_token_ids: frozenset[int]
    activation: str = "silu"  # silu | gelu_tanh
    norm_offset: float = 0.0  # added to the weight of every norm
    post_norms: bool = False  # the outputs of attention and MLP are normalised too, before they are added
    embedding_scale: float = 1.0
    logit_softcap: float | None = None  # logits become cap * tanh(logit / cap)
    packed: bool = False  # q, k and v are one tensor in the file, and so are gate and up
    latent: LatentConfig | None = None
    experts: ExpertConfig | None = None
    draft_layers: int = 0  # layers after the model's own that predict further tokens; see `with_head`
    scheme: Scheme | None = None  # how the file has its matrices; None: plainly

    def experts_of(self, layer: int) -> ExpertConfig | None:
        """None if the layer has a single network."""
        return self.experts if self.experts and layer in self.experts.layers else None

    @property
    def rope_dim(self) -> int:
        """Elements of a head that are rotated."""
        return self.latent.rope_dim if self.latent else self.head_dim

    @property
    def kv_parts(self) -> int:
        """See `KvLayout.parts`."""
        return 1 if self.latent else 2

    @property
    def kv_value_dim(self) -> int:
        """See `KvLayout.value_dim`."""
        return self.latent.rank if self.latent else 0


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor of the checkpoint by its Hugging Face name, with its shape `[out, in]`; experts by their `_canonical` names."""
    c = config
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (c.vocab, c.hidden), "model.norm.weight": (c.hidden,)}
    if not c.tied:
        shapes["lm_head.weight"] = (c.vocab, c.hidden)
    for i in range(c.layers):
        shapes |= _layer(c, i)
    return shapes


def with_head(config: ModelConfig, intermediate: int | None = None) -> ModelConfig:
    """The model with one layer more: that of a head which predicts further tokens (`baton.engine.model.head`). `intermediate`: of its
    feed-forward network, if that is not as in other layers."""
    c = config
    experts = c.experts and replace(c.experts, layers=c.experts.layers | ({c.layers} if c.layers - 1 in c.experts.layers else set()))
    return replace(
        c,
        layers=c.layers + 1,
        ropes=(*c.ropes, c.ropes[-1]),
        attention=(*c.attention, c.attention[-1]),
        experts=experts,
        intermediate=intermediate or c.intermediate,
    )


def head_tensors(config: ModelConfig) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Tensors of the head of a model `with_head`, with the names that DeepSeek-V3 gives them: those that must be there, and those that
    else are the model's own."""
    c, last = config, config.layers - 1
    parts = {"enorm.weight": (c.hidden,), "hnorm.weight": (c.hidden,), "eh_proj.weight": (c.hidden, 2 * c.hidden)}
    shared = {name: (c.vocab, c.hidden) for name in ("embed_tokens.weight", "shared_head.head.weight")}
    return _layer(c, last) | _under(head_prefix(c), parts), _under(head_prefix(c), shared | {"shared_head.norm.weight": (c.hidden,)})


def head_prefix(config: ModelConfig) -> str:
    return f"model.layers.{config.layers - 1}"


def _layer(c: ModelConfig, index: int) -> dict[str, Shape]:
    norms = ["input_layernorm", "post_attention_layernorm"]
    if c.post_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    attention, experts = _latent_attention(c, c.latent) if c.latent else _attention(c), c.experts_of(index)
    mlp = _mixture(c, experts) if experts else _mlp(c, c.intermediate, c.mlp_bias)
    parts = {f"{name}.weight": (c.hidden,) for name in norms} | _under("self_attn", attention) | _under("mlp", mlp)
    return _under(f"model.layers.{index}", parts)


def _under(prefix: str, shapes: dict[str, Shape]) -> dict[str, Shape]:
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def _linear(name: str, rows: int, columns: int, bias: bool = False) -> dict[str, Shape]:
    return {f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if bias else {})


def _attention(c: ModelConfig) -> dict[str, Shape]:
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    shapes = _linear("o_proj", c.hidden, q, c.o_bias)
    for name, rows in {"qkv": q + 2 * kv}.items() if c.packed else {"q": q, "k": kv, "v": kv}.items():
        shapes |= _linear(f"{name}_proj", rows, c.hidden, c.qkv_bias)
    if c.qk_norm:
        shapes |= {"q_norm.weight": (c.head_dim,), "k_norm.weight": (c.head_dim,)}
    return shapes


def _latent_attention(c: ModelConfig, latent: LatentConfig) -> dict[str, Shape]:
    q = c.heads * (latent.nope_dim + latent.rope_dim)
    shapes = _linear("kv_a_proj_with_mqa", latent.rank + latent.rope_dim, c.hidden, c.qkv_bias)
    shapes |= {"kv_a_layernorm.weight": (latent.rank,)}
    shapes |= _linear("kv_b_proj", c.heads * (latent.nope_dim + latent.value_dim), latent.rank)
    shapes |= _linear("o_proj", c.hidden, c.heads * latent.value_dim, c.o_bias)
    if latent.q_rank is None:
        return shapes | _linear("q_proj", q, c.hidden)
    shapes |= _linear("q_a_proj", latent.q_rank, c.hidden, c.qkv_bias)
    return shapes | {"q_a_layernorm.weight": (latent.q_rank,)} | _linear("q_b_proj", q, latent.q_rank)


def _mlp(c: ModelConfig, intermediate: int, bias: bool) -> dict[str, Shape]:
    if c.packed:
        up = _linear("gate_up_proj", 2 * intermediate, c.hidden)
    else:
        up = _linear("gate_proj", intermediate, c.hidden, bias) | _linear("up_proj", intermediate, c.hidden, bias)
    return up | _linear("down_proj", c.hidden, intermediate, bias)


def _mixture(c: ModelConfig, experts: ExpertConfig) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {"gate.weight": (experts.count, c.hidden)}
    if experts.biased:
        shapes["gate.e_score_correction_bias"] = (experts.count,)
    if experts.shared:
        shapes |= _under("shared_experts", _mlp(c, experts.shared, c.mlp_bias))
    for i in range(experts.count):
        shapes |= _under(f"experts.{i}", _mlp(c, experts.intermediate, bias=False))
    return shapes


class _Place(NamedTuple):
    """Where a tensor is: it is a whole tensor of a file, or a part of one."""

    file: Path
    name: str
    shape: Shape
    part: tuple[int, slice] | None = None


class Checkpoint:
    """The weights of one folder. Opening it checks names, shapes and types. `tensor` maps the file anew each time, so that the bytes read
    count as this process's memory only while the tensor lives."""

    def __init__(self, path: Path, config: ModelConfig, head: bool = False) -> None:
        """`head`: only that of a model `with_head` is wanted, whether or not the model is in the same folder.

        Raises CheckpointError for a missing, unexpected, misshapen or mistyped tensor and for a damaged file."""
        self._folder = path
        files = {file: _open(file) for file in _weight_files(path)}
        self._where = dict(place for file, opened in files.items() for place in _places(file, opened))
        if head:
            self._where = {name: place for name, place in self._where.items() if name.startswith(f"{head_prefix(config)}.")}
            expected, own = head_tensors(config)
            expected |= {name: shape for name, shape in own.items() if name in self._where}
        else:
            expected = expected_tensors(config)
        self._quantised = self._formats(config.scheme, expected) if config.scheme else {}
        parts = self._parts(expected)
        spare = self._empty_biases(parts) if config.scheme and config.scheme.empty_biases else set()
        self._check_names({name for name, part in parts.items() if not part.optional}, parts.keys() | spare, config)
        for name, part in parts.items():
            if name in self._where:
                _check_tensor(self._where[name], files[self._where[name].file], part)
        if config.tied and "lm_head.weight" in self._where:
            self._check_tied()

    def __contains__(self, name: str) -> bool:
        return name in self._where or name in self._quantised

    def tensor(self, name: str) -> Tensor:
        """One of `expected_tensors`, on the CPU, in the file's dtype; a quantised one as float32."""
        return plain(self.matrix(name))

    def matrix(self, name: str) -> Matrix:
        """The same, as the file has it. Raises CheckpointError for one that cannot be read, or makes no sense."""
        if name not in self._quantised:
            return self._tensor(name)
        module, (format_, shape) = name.removesuffix(".weight"), self._quantised[name]

        def error(part: str, message: str) -> CheckpointError:
            return CheckpointError(self._where[f"{module}.{part}"].file, f"{module}.{part}", message)

        return format_.read(Parts(lambda part: self._tensor(f"{module}.{part}"), partial(self._has, module), error), shape)

    def _has(self, module: str, part: str) -> bool:
        return f"{module}.{part}" in self._where

    def _tensor(self, name: str) -> Tensor:
        place = self._where[name]
        opened = _open(place.file)
        try:
            tensor: Tensor = opened.get_tensor(place.name) if place.part is None else opened.get_slice(place.name)[place.part]
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(place.file, name, f"cannot be read: {error}") from error
        return tensor

    def _formats(self, scheme: Scheme, expected: dict[str, Shape]) -> dict[str, tuple[Format, Shape]]:
        """The formats of the quantised weights. The scheme knows modules by the names that they have in the file."""
        named = {name.rpartition(".")[0]: place.name.rpartition(".")[0] for name, place in self._where.items()}
        found = dict[str, tuple[Format, Shape]]()
        for name, shape in expected.items():
            module = name.removesuffix(".weight")
            if len(shape) == 2 and module != name:
                format_ = scheme.format_of(named.get(module, module), partial(self._has, module))
                if format_:
                    found[name] = format_, shape
        return found

    def _parts(self, expected: dict[str, Shape]) -> dict[str, Part]:
        """What the file must have, or may have."""
        found = {name: Part(WEIGHT_DTYPES, (shape,)) for name, shape in expected.items() if name not in self._quantised}
        for name, (format_, shape) in self._quantised.items():
            found |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in format_.parts(shape).items()}
        return found

    def _empty_biases(self, parts: Iterable[str]) -> set[str]:
        """Biases of quantised matrices that the model does not have. Raises CheckpointError for one that is not 0."""
        found = {f"{name.removesuffix('.weight')}.bias" for name in self._quantised} & self._where.keys() - set(parts)
        for name in sorted(found):
            if self._tensor(name).any():
                raise CheckpointError(self._where[name].file, name, "is not 0, but config.json says that there is no bias")
        return found

    def _check_names(self, needed: set[str], allowed: set[str], config: ModelConfig) -> None:
        allowed = allowed | ({"lm_head.weight"} if config.tied else set())
        # Old Llama files hold the rotary frequencies, which follow from config.json.
        drafts = tuple(f"model.layers.{config.layers + i}." for i in range(config.draft_layers))
        found = {name for name in self._where if not name.endswith("rotary_emb.inv_freq") and not name.startswith(drafts)}
        if not config.scheme and (quantised := sorted(name for name in found - allowed if name.endswith(QUANTISED_NAMES))):
            raise CheckpointError(self._folder, quantised[0], QUANTISED)
        for word, names in (("missing", needed - found), ("not part of this architecture", found - allowed)):
            if names:
                listed = sorted(names)
                more = f" and {len(listed) - 5} more" if len(listed) > 5 else ""
                raise CheckpointError(self._folder, listed[0], f"{word}: {', '.join(listed[:5])}{more}")

    def _check_tied(self) -> None:
        if not torch.equal(self.tensor("lm_head.weight"), self.tensor("model.embed_tokens.weight")):
            file = self._where["lm_head.weight"].file
            raise CheckpointError(file, "lm_head.weight", "differs from the embedding although config.json says tie_word_embeddings")


def _check_tensor(place: _Place, opened: Any, part: Part) -> None:
    dtype = opened.get_slice(place.name).get_dtype()
    if dtype not in part.dtypes and part.dtypes == WEIGHT_DTYPES and dtype.startswith(QUANTISED_DTYPES):
        raise CheckpointError(place.file, place.name, f"dtype {dtype}: {QUANTISED} that says so of this tensor")
    if place.shape not in part.shapes:
        wanted = " or ".join(str(list(shape)) for shape in part.shapes)
        raise CheckpointError(place.file, place.name, f"shape {list(place.shape)}, config.json implies {wanted}")
    if dtype not in part.dtypes:
        raise CheckpointError(place.file, place.name, f"dtype {dtype} is not supported; supported: {', '.join(sorted(part.dtypes))}")


def _places(file: Path, opened: Any) -> Iterator[tuple[str, _Place]]:
    """The tensors of a file by the names of `expected_tensors`; if all experts are one tensor (transformers 5), each is a part of it."""
    for name in opened.keys():  # noqa: SIM118
        shape, canonical = tuple(opened.get_slice(name).get_shape()), _canonical(name)
        block, _, kind = canonical.rpartition(".experts.")
        if kind not in FUSED or len(shape) != 3 or shape[1] % len(FUSED[kind]):
            yield canonical, _Place(file, name, shape)
            continue
        rows = shape[1] // len(FUSED[kind])
        for expert in range(shape[0]):
            for i, matrix in enumerate(FUSED[kind]):
                part = (expert, slice(i * rows, (i + 1) * rows))
                yield f"{block}.experts.{expert}.{matrix}.weight", _Place(file, name, (rows, shape[2]), part)


def _canonical(name: str) -> str:
    """Mixtral's files have their own names for what others call mlp.gate and mlp.experts.N.gate_proj."""
    name = name.replace(".block_sparse_moe.", ".mlp.")
    return re.sub(r"(\.experts\.\d+\.)(w[123])\.", lambda match: f"{match[1]}{MIXTRAL[match[2]]}.", name)


def _weight_files(path: Path) -> list[Path]:
    try:
        files = weight_files(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(path / "model.safetensors.index.json", "weight_map", str(error)) from error
    if not files:
        raise CheckpointError(path, "", f"neither model.safetensors nor model.safetensors.index.json is there{_found_instead(path)}")
    return files


def _found_instead(path: Path) -> str:
    """Says which other weights a folder holds in place of those that we read, and what to do about it; empty if it holds none."""
    for pattern, what in OTHER_WEIGHTS.items():
        if found := sorted(path.glob(pattern)):
            return f"; {found[0].name} is: {what}"
    return ""


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(file, "", f"cannot be opened (truncated or altered?): {error}") from error
