"""Prefill of every family on the CPU, compiled against plain torch, so that no family becomes slow unnoticed.

    python benchmarks/families.py [--json FILE]

For each family, a random model of two layers with the widths of a small published model (DeepSeek's attention is that of V2-Lite, with
fewer experts) prefills a prompt in chunks with `engine.compiled` on and off, in turns. If a family's compiled prefill takes more than BOUND
times as long as the plain one, the benchmark names it and exits with status 1.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from machine import describe
from torch import Tensor

from baton.engine.choice import choose_ops
from baton.engine.core.kvcache import KvLayout, KvPool
from baton.engine.core.protocol import Chunk
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.model.checkpoint import expected_tensors
from baton.engine.model.config_json import SUPPORTED, read_config
from baton.engine.model.kv_views import DTYPES
from baton.engine.model.linear import ROUNDED
from baton.engine.model.memory import keep_memory
from baton.engine.model.onednn import multiplies_int8
from baton.engine.model.transformer import Transformer
from baton.engine.runner import ModelRunner

BOUND = 1.5  # compiled over plain
PRECISIONS = ("float32", "bfloat16", "int8")
TOKENS, CHUNK, BLOCK, ROUNDS = 512, 256, 16, 5
SIZES = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 2816, "vocab_size": 4096}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 704}
DEEPSEEK = {
    "hidden_size": 2048, "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 704,
    "first_k_dense_replace": 1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 128},
    "MixtralForCausalLM": {"num_local_experts": 8, "sliding_window": None, "intermediate_size": 1408},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {"head_dim": 128},
    "Qwen3MoeForCausalLM": EXPERTS,
    "Gemma2ForCausalLM": {"head_dim": 128, "sliding_window": 128},
    "Gemma3ForCausalLM": {"head_dim": 128, "sliding_window": 128},
    "Phi3ForCausalLM": {},
    "DeepseekV2ForCausalLM": DEEPSEEK,
    "DeepseekV3ForCausalLM": {**DEEPSEEK, "q_lora_rank": 384, "n_group": 4, "topk_group": 2},
}
WIDTHS = (
    "hidden_size", "intermediate_size", "moe_intermediate_size", "kv_lora_rank", "q_lora_rank", "head_dim", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "vocab_size", "sliding_window",
)  # fmt: skip
assert set(FAMILIES) == set(SUPPORTED)


def loaded(
    family: str,
    precision: str,
    compiled: bool = True,
    layers: int = 2,
    scale: int = 1,
    products: str = "auto",
    spread: float = 0.02,
) -> ModelRunner:
    """A runner of a random model whose widths are divided by `scale`. `precision`: float32, bfloat16, or int8 or int4 with the rest in
    float32; after a slash, the type of KV that is stored in another. `products`: what multiplies matrices; `spread`: the standard deviation
    of the weights."""
    precision, _, stored = precision.partition("/")
    fields = SIZES | FAMILIES[family] | {"num_hidden_layers": layers, "max_position_embeddings": 2 * TOKENS, "eos_token_id": 1}
    fields |= {name: fields[name] // scale for name in WIDTHS if fields.get(name)}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields | {"architectures": [family]}))
        config = read_config(Path(folder))
    shapes, generator = expected_tensors(config), torch.Generator().manual_seed(1)

    def read(name: str) -> Tensor:
        return torch.randn(shapes[name], generator=generator) * spread

    rounded, cpu = precision in ROUNDED, torch.device("cpu")
    dtype = "float32" if rounded else precision
    ops = choose_ops(cpu, DTYPES[dtype], compiled, products)
    model = Transformer(config, read, DTYPES[dtype], cpu, ops, precision if rounded else "auto")
    dims = config.layers, config.kv_heads, config.head_dim
    layout = KvLayout(family, dtype, BLOCK, *dims, parts=config.kv_parts, value_dim=config.kv_value_dim, stored=stored)
    runner = ModelRunner(model, layout, cpu)
    runner.attach(KvPool(layout, TOKENS // BLOCK + 1))
    return runner


def prefill(runner: ModelRunner, tokens: int = TOKENS, chunk: int = CHUNK) -> float:
    """Seconds for one prompt."""
    blocks = list(range(-(-tokens // BLOCK)))
    seq = Sequence("s", [(31 * i) % 200 + 5 for i in range(tokens)], tokens, SamplingParams(max_tokens=1), b"", blocks=blocks)
    began = time.perf_counter()
    while seq.pending:
        n = min(chunk, seq.pending)
        runner.run_logits([Chunk(seq, n)])
        seq.computed += n
    return time.perf_counter() - began


def measure(families: list[str]) -> Iterator[dict[str, Any]]:
    for family in families:
        for precision in PRECISIONS:
            if precision == "int8" and not multiplies_int8():
                continue
            runners = {arm: loaded(family, precision, arm == "compiled") for arm in ("compiled", "plain")}
            seconds: dict[str, list[float]] = {arm: [] for arm in runners}
            for round_ in range(ROUNDS + 1):
                for arm in list(runners)[:: 1 if round_ % 2 else -1]:
                    took = prefill(runners[arm])
                    if round_:  # the first is a warm-up
                        seconds[arm].append(took)
            ratio = min(seconds["compiled"]) / min(seconds["plain"])  # minima: other programs can only add time
            yield {"family": family, "precision": precision, "seconds": seconds, "compiled_over_plain": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("families", nargs="*", default=list(FAMILIES), help="all by default")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_memory()
    print(describe())
    print(f"{TOKENS} tokens in chunks of {CHUNK}, two layers, {options.threads} threads; tokens/s, the best of {ROUNDS} rounds in turns")
    rows = []
    for row in measure(options.families):
        rows.append(row)
        rates = {arm: TOKENS / min(took) for arm, took in row["seconds"].items()}
        late = "" if row["compiled_over_plain"] <= BOUND else f"   MORE THAN {BOUND} TIMES THE PLAIN PATH"
        cells = "  ".join(f"{arm} {rate:7.0f}" for arm, rate in rates.items())
        print(f"  {row['family']:22} {row['precision']:9} {cells}   compiled ÷ plain, time: {row['compiled_over_plain']:.2f}{late}")
    if options.json:
        options.json.write_text(
            json.dumps({"machine": describe(), "tokens": TOKENS, "chunk": CHUNK, "bound": BOUND, "rows": rows}, indent=1)
        )
    sys.exit(any(row["compiled_over_plain"] > BOUND for row in rows))


if __name__ == "__main__":
    main()
