"""What model families need from the kernels, from config.json to logits, against transformers: alternating windows and soft caps,
one-vector KV with experts, norms on heads. Every operation that has a Triton kernel uses it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV2Config, Gemma2Config, PretrainedConfig, Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from baton.engine import choice
from baton.engine.choice import load_runner
from baton.engine.core.kvcache import KvPool
from baton.engine.core.protocol import Chunk
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.gpu.inputs import Capacity
from baton.engine.gpu.runner import GpuRunner

triton_ops = pytest.importorskip("baton.engine.gpu.triton_ops", reason="needs triton", exc_type=ImportError)
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 99,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "n_routed_experts": 4, "first_k_dense_replace": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 40, "q_lora_rank": None,
}  # fmt: skip
CONFIGS = {
    "gemma2": Gemma2Config(**SIZES, head_dim=16, query_pre_attn_scalar=20, sliding_window=9, attn_logit_softcapping=3.0),
    "deepseek2": DeepseekV2Config(**{**SIZES, "num_key_value_heads": 4}, **LATENT),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_logits_match_transformers(config: PretrainedConfig, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences: chunks beside decodes, then decodes alone, padded to three."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(choice, "choose_ops", lambda *_: triton_ops.TritonOps())
    runner = load_runner(GpuRunner, tmp_path, block_size=4, device=str(device))
    assert isinstance(runner, GpuRunner)
    runner.attach(KvPool(runner.layout, 20), capacity=Capacity(3, 64, 64), backend="triton", graph_sizes=(3,))
    texts = [torch.randint(99, (n,)).tolist() for n in (30, 14)]
    with torch.inference_mode():
        reference = [model(torch.tensor([text])).logits[0].float() for text in texts]
    params = SamplingParams(max_tokens=9)
    a, b = (Sequence(str(i), text[:-3], 1, params, b"", blocks=[*range(9 * i, 9 * i + 9)]) for i, text in enumerate(texts))
    for work in ([(a, 20), (b, 11)], [(b, 1), (a, 7)], [(a, 1), (b, 1)], [(b, 1), (a, 1)]):
        logits = runner.run_logits([Chunk(seq, n) for seq, n in work]).cpu()
        sampled = [seq for seq, n in work if seq.computed + n == len(seq.tokens)]
        expected = torch.stack([reference[int(seq.id)][len(seq.tokens) - 1] for seq in sampled])
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=2e-4)
        for seq, n in work:
            seq.computed += n
            if seq.pending == 0 and len(seq.tokens) < len(texts[int(seq.id)]):
                seq.tokens.append(texts[int(seq.id)][len(seq.tokens)])
    assert (a.computed, b.computed) == (29, 14)
