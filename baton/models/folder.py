"""Writes a Llama's folder in Hugging Face format, except for the weights."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from baton.engine.facts.fingerprint import SUMS
from baton.models.train.corpus import BOS, CHAT_TEMPLATE, EOS, SPECIAL

BOS_ID, EOS_ID = SPECIAL.index(BOS), SPECIAL.index(EOS)
RMS_NORM_EPS = 1e-5
ROPE_THETA = 10000.0


@dataclass(frozen=True, slots=True)
class Shape:
    """Raises ValueError for sizes that do not fit together."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    context: int  # tokens
    tied: bool  # the LM head is the embedding

    def __post_init__(self) -> None:
        if self.hidden % self.heads or self.head_dim % 2 or self.heads % self.kv_heads:
            raise ValueError(
                f"hidden {self.hidden} must be an even multiple of heads {self.heads}, and heads a multiple of kv_heads {self.kv_heads}"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


def write(path: Path, shape: Shape, tokenizer: Tokenizer, *, dtype: str, temperature: float) -> None:
    """Writes config.json, generation_config.json, tokenizer.json and tokenizer_config.json."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    write_json(
        path / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": shape.hidden,
            "intermediate_size": shape.inner,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "vocab_size": shape.vocab,
            "max_position_embeddings": shape.context,
            "rms_norm_eps": RMS_NORM_EPS,
            "rope_theta": ROPE_THETA,
            "rope_scaling": None,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": shape.tied,
            "torch_dtype": dtype,
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
        },
    )
    generation = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "do_sample": True, "temperature": temperature}
    write_json(path / "generation_config.json", generation)
    write_json(path / "tokenizer_config.json", tokenizer_config(shape.context, CHAT_TEMPLATE, bos_token=BOS))


def tokenizer_config(context: int, chat_template: str, **tokens: str) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **tokens,
        "eos_token": EOS,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
    }


def write_sums(path: Path) -> None:
    """Writes SHA256SUMS for the files that a server reads, in the format of `sha256sum`."""
    files = sorted(file for file in path.iterdir() if file.suffix in (".json", ".safetensors") and file.name != "results.json")
    (path / SUMS).write_text("".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files))


def write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
