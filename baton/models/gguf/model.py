"""What a GGUF file says about the model: config.json as its Hugging Face folder would have it, and where each tensor goes.

The converter of llama.cpp reorders the rows of q and k of `llama` (not of others): its rotary embedding turns neighbours, while those of
Hugging Face are half a head apart.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.models.gguf.source import GgufFile


@dataclass(frozen=True, slots=True)
class Architecture:
    name: str
    reordered: bool = False  # rows of q and k
    qkv_bias: bool = False  # always has those


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", reordered=True),
    "qwen2": Architecture("Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": Architecture("Qwen3ForCausalLM"),
}
# Fields of an architecture that are read below, or that change no number
KNOWN = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon", "rope.freq_base",
    "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.finetuned", "rope.scaling.original_context_length",
    "expert_count", "expert_used_count",
}  # fmt: skip
NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}
PARTS = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
FACTORS = "rope_freqs.weight"
LOW, HIGH, ORIGINAL = 1.0, 4.0, 8192  # of all Llama 3 models; the file has only what follows from them


def config_of(source: GgufFile) -> dict[str, Any]:
    """config.json. Raises CheckpointError for what would compute something else."""
    kind = source.get("general.architecture", str)
    if kind not in ARCHITECTURES:
        raise source.error("general.architecture", f"{kind!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    if unknown := sorted(name for name in source.fields if name.startswith(f"{kind}.") and name[len(kind) + 1 :] not in KNOWN):
        raise source.error(unknown[0], "is not known here")
    if source.get(f"{kind}.expert_count", int, 0):
        raise source.error(f"{kind}.expert_count", "mixtures of experts are not supported in GGUF; use the model's folder of safetensors")
    heads, hidden = source.get(f"{kind}.attention.head_count", int), source.get(f"{kind}.embedding_length", int)
    if heads < 1 or hidden % heads:
        raise source.error(f"{kind}.attention.head_count", f"{heads} does not divide the embedding's length {hidden}")
    head_dim = source.get(f"{kind}.attention.key_length", int, hidden // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if source.get(f"{kind}.{name}", int, head_dim) != head_dim:
            raise source.error(f"{kind}.{name}", f"must be {head_dim}, as long as a key, got {source.fields[f'{kind}.{name}']}")
    return {
        "architectures": [ARCHITECTURES[kind].name],
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": source.get(f"{kind}.feed_forward_length", int),
        "num_hidden_layers": source.get(f"{kind}.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": source.get(f"{kind}.attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "vocab_size": _vocab(source, kind),
        "max_position_embeddings": source.get(f"{kind}.context_length", int),
        "rms_norm_eps": source.get(f"{kind}.attention.layer_norm_rms_epsilon", float),
        "rope_theta": source.get(f"{kind}.rope.freq_base", float, 10000.0),
        "rope_scaling": _scaling(source, kind, head_dim),
        "tie_word_embeddings": "output.weight" not in source.shapes(),
        "attention_bias": not ARCHITECTURES[kind].qkv_bias and "blk.0.attn_q.bias" in source.shapes(),
        "hidden_act": "silu",
        "dtype": "float32",
    }


def _vocab(source: GgufFile, kind: str) -> int:
    """The number of tokens, as many as the embedding has rows."""
    rows = source.shapes().get("token_embd.weight", (0,))[0]
    if source.get(f"{kind}.vocab_size", int, rows) != rows:
        raise source.error(f"{kind}.vocab_size", f"{source.fields[f'{kind}.vocab_size']}, but the embedding has {rows} rows")
    return rows


def _scaling(source: GgufFile, kind: str, head_dim: int) -> dict[str, Any] | None:
    how = source.get(f"{kind}.rope.scaling.type", str, "none")
    if how not in ("none", "linear"):
        raise source.error(f"{kind}.rope.scaling.type", f"{how!r} is not supported; supported: none, linear")
    if FACTORS in source.shapes():
        if how != "none":
            raise source.error(FACTORS, "is there beside rope.scaling.type")
        return _llama3(source, source.get(f"{kind}.rope.freq_base", float, 10000.0), head_dim)
    return {"rope_type": "linear", "factor": source.get(f"{kind}.rope.scaling.factor", float)} if how == "linear" else None


def _llama3(source: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """The parameters from which the factors follow, which divide the frequencies. The lowest is divided by the whole factor."""
    factors = np.concatenate([piece.ravel() for piece in source.pieces(FACTORS)]).astype(np.float64)
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    factor = float(factors.max(initial=1.0))
    keep = np.clip((ORIGINAL * frequencies / (2 * np.pi) - LOW) / (HIGH - LOW), 0, 1)
    if factors.shape != frequencies.shape or not np.allclose(factors, 1 / ((1 - keep) / factor + keep), rtol=1e-4):
        raise source.error(FACTORS, "stretches positions in another way than Llama 3")
    named = {"rope_type": "llama3", "factor": factor, "low_freq_factor": LOW, "high_freq_factor": HIGH}
    return named | {"original_max_position_embeddings": ORIGINAL}


def renamed(source: GgufFile) -> dict[str, str]:
    """Tensors by their Hugging Face names. Raises CheckpointError for one that has none."""
    found = {}
    for name in source.shapes():
        if name == FACTORS:
            continue
        block, _, rest = name.removeprefix("blk.").partition(".")
        part, _, last = rest.rpartition(".")
        if name in NAMES:
            found[NAMES[name]] = name
        elif name.startswith("blk.") and block.isdecimal() and part in PARTS and last in ("weight", "bias"):
            found[f"model.layers.{int(block)}.{PARTS[part]}.{last}"] = name
        else:
            raise source.error(name, "no tensor of this architecture has that name")
    return found


def order(name: str, config: dict[str, Any]) -> npt.NDArray[np.int64] | None:
    """The rows of a tensor of the file, in the order that Hugging Face has them. None: they have it."""
    part = name.split(".")[2] if name.startswith("blk.") else ""
    if part not in ("attn_q", "attn_k") or not ARCHITECTURES[config["model_type"]].reordered:
        return None
    heads, dim = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"], config["head_dim"]
    return np.arange(heads * dim).reshape(heads, dim // 2, 2).swapaxes(1, 2).ravel()
