"""A Hugging Face model folder: config.json, read by ourselves, and safetensors, checked name by name before a byte of weight is read.

What this engine does not compute exactly is refused with the file and the field, never approximated.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.fingerprint import weight_files

SUPPORTED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
WEIGHT_DTYPES = {"F32", "F16", "BF16"}


class CheckpointError(ValueError):
    """A model folder that cannot be served. `file` and `field` (or tensor) say where to look."""

    def __init__(self, file: Path, field: str, message: str) -> None:
        super().__init__(f"{file}: {field}: {message}" if field else f"{file}: {message}")
        self.file = file
        self.field = field


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding: the base and how low frequencies are stretched for long contexts."""

    theta: float = 10000.0
    kind: str = "default"  # default | linear | llama3
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The facts of config.json that the computation needs, under names of ours."""

    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_positions: int
    norm_eps: float
    rope: Rope
    tied: bool  # the LM head is the embedding
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMS norm over each head of q and k
    sliding_window: int | None  # keys a query sees, itself included
    eos_token_ids: frozenset[int]

    @classmethod
    def read(cls, path: Path) -> "ModelConfig":
        """From config.json (and the eos ids of generation_config.json) in the folder `path`. Raises CheckpointError."""
        file = path / "config.json"
        raw = _json(file)
        architecture = _architecture(raw, file)
        _refuse_unsupported(raw, file)
        heads, hidden = _size(raw, file, "num_attention_heads"), _size(raw, file, "hidden_size")
        max_positions = _size(raw, file, "max_position_embeddings")
        llama, qwen2, qwen3 = (architecture == f"{name}ForCausalLM" for name in ("Llama", "Qwen2", "Qwen3"))
        kv_heads = _size(raw, file, "num_key_value_heads", default=heads if llama else None)
        attention_bias = bool(raw.get("attention_bias", False)) and (llama or qwen3)
        config = cls(
            architecture=architecture,
            hidden=hidden,
            layers=_size(raw, file, "num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=_size(raw, file, "head_dim", default=128 if qwen3 else hidden // heads),
            intermediate=_size(raw, file, "intermediate_size"),
            vocab=_size(raw, file, "vocab_size"),
            max_positions=max_positions,
            norm_eps=_number(raw, file, "rms_norm_eps", default=1e-6),
            rope=_rope(raw, file),
            tied=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=qwen2 or attention_bias,
            o_bias=attention_bias,
            mlp_bias=llama and bool(raw.get("mlp_bias", False)),
            qk_norm=qwen3,
            sliding_window=_sliding_window(raw, file, architecture, max_positions),
            eos_token_ids=_eos(raw, file) | _generation_eos(path),
        )
        if config.heads % config.kv_heads:
            raise CheckpointError(file, "num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
        if config.head_dim % 2:
            raise CheckpointError(file, "head_dim", f"must be even for rotary embeddings, got {config.head_dim}")
        return config


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint by its Hugging Face name, with its shape `[out, in]`."""
    c, d = config, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab, c.hidden), "model.norm.weight": (c.hidden,)}
    if not c.tied:
        shapes["lm_head.weight"] = (c.vocab, c.hidden)
    linears = {
        "self_attn.q_proj": (c.heads * d, c.hidden, c.qkv_bias),
        "self_attn.k_proj": (c.kv_heads * d, c.hidden, c.qkv_bias),
        "self_attn.v_proj": (c.kv_heads * d, c.hidden, c.qkv_bias),
        "self_attn.o_proj": (c.hidden, c.heads * d, c.o_bias),
        "mlp.gate_proj": (c.intermediate, c.hidden, c.mlp_bias),
        "mlp.up_proj": (c.intermediate, c.hidden, c.mlp_bias),
        "mlp.down_proj": (c.hidden, c.intermediate, c.mlp_bias),
    }
    norms = {"input_layernorm": c.hidden, "post_attention_layernorm": c.hidden}
    if c.qk_norm:
        norms |= {"self_attn.q_norm": d, "self_attn.k_norm": d}
    for i in range(c.layers):
        layer = f"model.layers.{i}"
        for name, (rows, columns, bias) in linears.items():
            shapes[f"{layer}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{layer}.{name}.bias"] = (rows,)
        for name, size in norms.items():
            shapes[f"{layer}.{name}.weight"] = (size,)
    return shapes


class Checkpoint:
    """The weights of one folder, memory-mapped: opening checks names, shapes and types; `tensor` copies nothing until it is used."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        """Raises CheckpointError for a missing, unexpected, misshapen or mistyped tensor and for a damaged file."""
        self._folder = path
        self._files = {file: _open(file) for file in _weight_files(path)}
        self._where: dict[str, Path] = {name: file for file, opened in self._files.items() for name in opened.keys()}  # noqa: SIM118
        expected = expected_tensors(config)
        self._check_names(expected, config.tied)
        for name, shape in expected.items():
            self._check_tensor(name, shape)
        if config.tied and "lm_head.weight" in self._where:
            self._check_tied()

    def tensor(self, name: str) -> Tensor:
        """On the CPU, in the file's dtype."""
        file = self._where[name]
        try:
            tensor: Tensor = self._files[file].get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(file, name, f"cannot be read: {error}") from error
        return tensor

    def _check_names(self, expected: Iterable[str], tied: bool) -> None:
        allowed = set(expected) | ({"lm_head.weight"} if tied else set())
        # Old Llama files carry the rotary frequencies, which follow from config.json.
        found = {name for name in self._where if not name.endswith("rotary_emb.inv_freq")}
        for word, names in (("missing", set(expected) - found), ("not part of this architecture", found - allowed)):
            if names:
                listed = sorted(names)
                more = f" and {len(listed) - 5} more" if len(listed) > 5 else ""
                raise CheckpointError(self._folder, listed[0], f"{word}: {', '.join(listed[:5])}{more}")

    def _check_tensor(self, name: str, shape: tuple[int, ...]) -> None:
        file = self._where[name]
        view = self._files[file].get_slice(name)
        if tuple(view.get_shape()) != shape:
            raise CheckpointError(file, name, f"shape {list(view.get_shape())}, config.json implies {list(shape)}")
        if view.get_dtype() not in WEIGHT_DTYPES:
            raise CheckpointError(file, name, f"dtype {view.get_dtype()} is not supported; supported: {', '.join(sorted(WEIGHT_DTYPES))}")

    def _check_tied(self) -> None:
        if not torch.equal(self.tensor("lm_head.weight"), self.tensor("model.embed_tokens.weight")):
            file = self._where["lm_head.weight"]
            raise CheckpointError(file, "lm_head.weight", "differs from the embedding although config.json says tie_word_embeddings")


def _weight_files(path: Path) -> list[Path]:
    try:
        files = weight_files(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(path / "model.safetensors.index.json", "weight_map", str(error)) from error
    if not files:
        raise CheckpointError(path, "", "neither model.safetensors nor model.safetensors.index.json is there")
    return files


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(file, "", f"cannot be opened, truncated or altered? {error}") from error


def _json(file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(file, "", f"cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(file, "", "is not a JSON object")
    return raw


def _architecture(raw: dict[str, Any], file: Path) -> str:
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in SUPPORTED:
        raise CheckpointError(file, "architectures", f"{names!r} is not supported; supported: {', '.join(SUPPORTED)}")
    return str(names[0])


def _refuse_unsupported(raw: dict[str, Any], file: Path) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(file, "hidden_act", f"{raw['hidden_act']!r} is not supported; supported: silu")
    for field in ("quantization_config", "compression_config"):
        if raw.get(field):
            raise CheckpointError(file, field, "quantised checkpoints are not supported")
    if raw.get("use_sliding_window"):
        raise CheckpointError(file, "use_sliding_window", "a window on some layers only is not supported")
    if set(raw.get("layer_types") or []) - {"full_attention"}:
        raise CheckpointError(file, "layer_types", "only full_attention is supported")


def _sliding_window(raw: dict[str, Any], file: Path, architecture: str, max_positions: int) -> int | None:
    """Only Mistral's applies to every layer; one that no sequence can outgrow is none."""
    if architecture != "MistralForCausalLM" or raw.get("sliding_window") is None:
        return None
    window = _size(raw, file, "sliding_window")
    return window if window < max_positions else None


def _rope(raw: dict[str, Any], file: Path) -> Rope:
    """Both spellings: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (before)."""
    field = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    given = raw.get(field) or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise CheckpointError(file, field, "must be one set of parameters for all layers")
    kind = given.get("rope_type", given.get("type", "default"))
    theta = _number(given if "rope_theta" in given else raw, file, "rope_theta", default=10000.0)
    if given.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise CheckpointError(file, "partial_rotary_factor", "only whole heads are rotated here")
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, kind, _number(given, file, "factor"))
    if kind != "llama3":
        raise CheckpointError(file, f"{field}.rope_type", f"{kind!r} is not supported; supported: default, linear, llama3")
    low, high = _number(given, file, "low_freq_factor"), _number(given, file, "high_freq_factor")
    if low >= high:
        raise CheckpointError(file, f"{field}.low_freq_factor", f"must be less than high_freq_factor {high}, got {low}")
    return Rope(theta, kind, _number(given, file, "factor"), low, high, _size(given, file, "original_max_position_embeddings"))


def _generation_eos(path: Path) -> frozenset[int]:
    file = path / "generation_config.json"
    return _eos(_json(file), file) if file.exists() else frozenset()


def _eos(raw: dict[str, Any], file: Path) -> frozenset[int]:
    value = raw.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise CheckpointError(file, "eos_token_id", f"must be a token id or a list of them, got {value!r}")
    return frozenset(ids)


def _size(raw: dict[str, Any], file: Path, field: str, default: int | None = None) -> int:
    value = raw.get(field) if raw.get(field) is not None else default
    if type(value) is not int or value < 1:
        raise CheckpointError(file, field, f"must be a positive integer, got {value!r}")
    return value


def _number(raw: dict[str, Any], file: Path, field: str, default: float | None = None) -> float:
    value = raw.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise CheckpointError(file, field, f"must be a positive number, got {value!r}")
    return float(value)
