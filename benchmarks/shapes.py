"""Models of the sizes that people serve, with random weights, which do not affect speed: config.json by name, and a writer of checkpoints.

python benchmarks/shapes.py 0.6b FOLDER [--device cuda]      # 8b: 15 GiB on the disk
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from baton.engine.model.checkpoint import expected_tensors
from baton.engine.model.config_json import read_config
from baton.models.folder import tokenizer_config, write_json
from baton.models.make_small import TOKENIZER_DOCUMENTS, TOY_CHAT_TEMPLATE
from baton.models.train.tokenizer import train_tokenizer

PIECE = 2 << 30  # bytes of a file
TOKENIZER_VOCAB = 2048  # of the ids that prompts and texts use; the model's vocabulary may be larger


def llama(**fields: Any) -> dict[str, Any]:
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "rms_norm_eps": 1e-5, "eos_token_id": 2,
            "hidden_act": "silu", "tie_word_embeddings": False, **fields}  # fmt: skip


LLAMA_8B = llama(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    vocab_size=128256, max_position_embeddings=131072, rope_theta=500000.0,
)  # fmt: skip
QWEN3_06B = {
    **llama(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        vocab_size=151936, max_position_embeddings=40960, rope_theta=1000000.0,
    ),
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
}  # fmt: skip
TINY = llama(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=96,
    max_position_embeddings=512,
)  # fmt: skip
SHAPES = {"0.6b": QWEN3_06B, "8b": LLAMA_8B}


@cache
def tokenizer() -> Tokenizer:
    return train_tokenizer(TOKENIZER_VOCAB, 0, TOKENIZER_DOCUMENTS)


def weight_bytes(raw: Mapping[str, Any]) -> int:
    """In bfloat16."""
    with tempfile.TemporaryDirectory() as folder:
        write_json(Path(folder) / "config.json", dict(raw))
        return 2 * sum(prod(shape) for shape in expected_tensors(read_config(Path(folder))).values())


def write(raw: Mapping[str, Any], folder: Path, device: str = "cpu") -> None:
    """A checkpoint in bfloat16, in files of about PIECE bytes, with an index and a tokenizer, whose tokens its vocabulary must hold."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", dict(raw))
    generator = torch.Generator(device).manual_seed(0)
    held: dict[str, torch.Tensor] = {}
    where: dict[str, str] = {}

    def flush() -> None:
        name = f"model-{len(set(where.values())) + 1:05}.safetensors"
        save_file(held, folder / name, metadata={"format": "pt"})
        where.update(dict.fromkeys(held, name))
        held.clear()

    for tensor, shape in expected_tensors(read_config(folder)).items():
        noise = torch.empty(shape, device=device).normal_(0, 0.02, generator=generator)
        made = torch.ones(shape) if tensor.endswith("norm.weight") else noise
        held[tensor] = made.to(torch.bfloat16).cpu()
        if sum(each.nbytes for each in held.values()) > PIECE:
            flush()
    if held:
        flush()
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": where})
    tokenizer().save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", tokenizer_config(raw["max_position_embeddings"], TOY_CHAT_TEMPLATE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    write(SHAPES[options.shape], options.folder, options.device)
    print(json.dumps({"shape": options.shape, "files": sorted(file.name for file in options.folder.iterdir())}), file=sys.stderr)


if __name__ == "__main__":
    main()
