"""The formulae against published figures, against the tensors of real families, and against each other."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.cli.main import app
from baton.engine.model.checkpoint import expected_tensors
from baton.engine.model.config_json import read_config
from baton.plan import formulae
from baton.plan.hardware import DEVICES, Efficiency
from baton.plan.shape import KNOWN, shape_of
from baton.plan.size import Asked, Figure, figures, shown

STATED = Efficiency(1, 1, "all of it")
COMMON: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 160,
    "vocab_size": 300, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "hidden_act": "silu",
}  # fmt: skip
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 8}
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "n_shared_experts": 1, "first_k_dense_replace": 1}
FOLDERS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "Qwen3ForCausalLM": {"head_dim": 16, "tie_word_embeddings": True},
    "Gemma3ForCausalLM": {"head_dim": 16, "query_pre_attn_scalar": 16, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 32},
    "MixtralForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "Qwen3MoeForCausalLM": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "head_dim": 16, "norm_topk_prob": True,
    },
    "DeepseekV2ForCausalLM": {**LATENT, **EXPERTS, "q_lora_rank": None, "norm_topk_prob": False, "topk_method": "greedy"},
    "DeepseekV3ForCausalLM": {**LATENT, **EXPERTS, "q_lora_rank": 24, "n_group": 2, "topk_group": 1},
}  # fmt: skip


def told(model: str, device: str, reached: Efficiency = STATED, **asked: Any) -> dict[str, float]:
    defaults: dict[str, Any] = {"prompt": 4096, "output": 512, "batch": 1}
    return {one.name: one.value for one in figures(shape_of(model), DEVICES[device], reached, Asked(**defaults | asked))}


def test_every_line_says_how_it_was_computed() -> None:
    asked = Asked(prompt=4096, output=512, batch=8, devices=8, weight_bits=8, price=2.5, acceptance=0.8, longest=32768)
    for model in KNOWN:
        assert all(one.formula for one in figures(KNOWN[model], DEVICES["h200"], STATED, asked))


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [("llama-3.1-8b", 8.03, 8.03), ("llama-3.1-70b", 70.6, 70.6), ("mixtral-8x7b", 46.7, 12.9), ("deepseek-v3", 671, 37),
     ("qwen3-8b", 8.19, 8.19), ("qwen3-30b-a3b", 30.5, 3.35), ("qwen3-0.6b", 0.6, 0.6), ("smollm2-135m", 0.135, 0.135)],
)  # fmt: skip
def test_parameters_are_those_that_the_makers_publish(name: str, billions: float, active: float) -> None:
    shape = KNOWN[name]
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.01)
    used = shape.active_parameters + (1 if shape.tied else 2) * shape.head_parameters
    assert used / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize("family", FOLDERS)
def test_a_folder_has_the_parameters_that_its_tensors_have(family: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(COMMON | FOLDERS[family] | {"architectures": [family], "model_type": family.lower()}))
    shape, config = shape_of(str(tmp_path)), read_config(tmp_path)
    assert shape.parameters == pytest.approx(sum(math.prod(each) for each in expected_tensors(config).values()), rel=0.02)
    assert shape.kv_bytes(4) == config.layers * config.kv_parts * config.kv_heads * config.head_dim * 4


def test_what_a_70_b_model_needs() -> None:
    """KV of 4,096 tokens is 1.34 GB and not 1.07, which is 1.34 / 1.25 once more; 16-bit weights are 141 GB and not twice that."""
    found = told("llama-3.1-70b", "h100", devices=4)
    assert found["KV of a prompt"] == 80 * 2 * 8 * 128 * 2 * 4096 == 1_342_177_280
    assert found["weights"] / 1e9 == pytest.approx(141, rel=0.01)
    # One sequence reads the weights once a token; twice would be another model.
    assert found["decode step: TPOT"] == pytest.approx((found["weights"] + 4352 * 327_680) / (4 * 3350e9), rel=0.02)
    halved = told("llama-3.1-70b", "h100", devices=4, weight_bits=8)
    assert halved["decode step: TPOT"] / found["decode step: TPOT"] == pytest.approx(0.5, rel=0.03)


def test_cost_follows_from_price_and_rate_alone() -> None:
    found = [told("llama-3.1-8b", "h100", price=price, batch=batch) for price, batch in ((2.0, 32), (4.0, 32), (2.0, 1))]
    costs = [each["cost of a million output tokens"] for each in found]
    assert costs[1] == pytest.approx(2 * costs[0]) and costs[2] > costs[0]
    assert costs[0] == pytest.approx(2.0 / (found[0]["requests, colocated"] * 512 * 3600) * 1e6)


def test_a_cached_prefix_costs_only_its_attention() -> None:
    whole, most = told("llama-3.1-8b", "h100"), told("llama-3.1-8b", "h100", cached=3072)
    assert 0.25 < most["prefill of a prompt"] / whole["prefill of a prompt"] < 0.35
    assert most["handoff of a prompt"] == pytest.approx(whole["handoff of a prompt"] / 4)


def test_latent_attention_keeps_one_vector_for_all_heads() -> None:
    assert KNOWN["deepseek-v3"].kv_bytes() == 61 * 576 * 2
    assert formulae.kv_bytes_per_token(61, 128, 192) / KNOWN["deepseek-v3"].kv_bytes() > 80


def test_ranks_that_share_no_head_keep_copies() -> None:
    """Latent attention has one head: eight ranks keep its KV eight times, and eight heads of KV once."""
    for model, copies in (("deepseek-v3", 8), ("llama-3.1-70b", 1)):
        one, many = KNOWN[model].kv_copies(1), KNOWN[model].kv_copies(8)
        assert (one, many) == (1, copies)
    assert KNOWN["llama-3.1-70b"].kv_copies(16) == 2
    found = told("deepseek-v3", "h200", devices=16)
    room = 0.9 * 16 * 141e9 - found["weights"]
    assert found["sequences that fit"] == pytest.approx(room / (16 * 4608 * 61 * 576 * 2), rel=0.01)


def test_fewer_than_8_bits_save_reading_and_no_arithmetic() -> None:
    """AWQ and GPTQ multiply in 16 bits: the prefill takes as long, the decode step a quarter."""
    whole, eight, four = (told("llama-3.1-8b", "h100", weight_bits=bits) for bits in (16, 8, 4))
    assert four["prefill of a prompt"] == whole["prefill of a prompt"] == pytest.approx(2 * eight["prefill of a prompt"])
    assert four["decode step: TPOT"] < eight["decode step: TPOT"] < whole["decode step: TPOT"]
    assert DEVICES["a100"].flop_rate(8) == DEVICES["a100"].flop_rate(16), "no arithmetic of 8-bit floats there"


def test_types_of_kv_are_as_large_as_their_bits() -> None:
    sizes = [told("llama-3.1-8b", "h100", kv_bits=bits)["KV of a token"] for bits in (16, 8, 5)]
    assert sizes == [131_072, 65_536, 40_960]
    assert formulae.kv_bytes_per_token(32, 1, 128) == 131_072 / 8, "one head for all"


def test_shared_heads_make_the_cache_smaller_by_their_number() -> None:
    """The 70 B model: 2.6 MB a token with a head each, an eighth with its 8, a 64th with one; 1.34 GB for 4,096 tokens, not 1.07."""
    every, grouped, one = (formulae.kv_bytes_per_token(80, heads, 128) for heads in (64, 8, 1))
    assert (every, grouped, one) == (2_621_440, 327_680, 40_960)
    assert grouped * 4096 / 1e9 == pytest.approx(1.342, abs=1e-3)
    assert told("llama-3.1-70b", "h100", devices=4)["times less than a head each"] == 8
    assert told("deepseek-v3", "h200", devices=16)["times less than a head each"] > 80
    assert grouped / formulae.kv_bytes_per_token(80, 8, 128, number_bytes=1) == 2, "8 bits are half"


def test_a_handoff_takes_what_its_link_carries() -> None:
    """KV of 4,096 tokens of the 70 B model: 54 ms at 200 Gbit/s, 107 ms at 100, 1.07 s at 10; a link inside a node 3 ms."""
    nbytes = 4096 * 327_680
    assert [formulae.transfer_seconds(nbytes, gbit / 8 * 1e9) for gbit in (200, 100, 10)] == pytest.approx(
        [0.0537, 0.1074, 1.074], rel=1e-3
    )
    assert formulae.transfer_seconds(nbytes, DEVICES["h100"].link_bytes_per_s) == pytest.approx(0.00298, rel=1e-2)


def test_what_a_cost_is_made_of() -> None:
    """A million tokens cost price over rate: 4 an hour at 1,000 tokens/s are 1.11. Six times less needs six times the rate, or a sixth of
    the price: half the price with twice the rate is four times less, and not six."""
    cost = formulae.cost_per_million(4.0, 1000)
    assert cost == pytest.approx(4 / 3.6)
    assert cost / formulae.cost_per_million(2.0, 2000) == pytest.approx(4)
    assert cost / formulae.cost_per_million(4.0, 6000) == pytest.approx(6) == pytest.approx(cost / formulae.cost_per_million(2.0, 3000))


def test_room_for_the_longest_answer_is_mostly_empty() -> None:
    """Sequences of 400 tokens that may reach 2,048: 80 % is reserved in vain, and blocks of 16 lose 2 %."""
    assert formulae.reserved_in_vain(400, 2048) == pytest.approx(0.805, abs=1e-3)
    assert formulae.fragmentation(400, 16) == pytest.approx(0.0184, abs=1e-3)
    found = told("llama-3.1-8b", "h100", prompt=300, output=100, longest=2048)
    assert found["slots lost without blocks"] == pytest.approx(0.805, abs=1e-3)
    assert "slots lost without blocks" not in told("llama-3.1-8b", "h100")


def test_of_many_experts_a_step_reads_more_the_larger_it_is() -> None:
    shape = KNOWN["mixtral-8x7b"]
    one, many = shape.read_parameters(1), shape.read_parameters(1000)
    assert one == pytest.approx(shape.active_parameters + shape.head_parameters) and many == pytest.approx(shape.parameters, rel=0.01)
    assert formulae.experts_read(8, 2, 2) == pytest.approx(2 + 2 * 6 / 8)


def test_speculation_counts_the_token_that_is_sampled_anyway() -> None:
    assert formulae.tokens_per_step(0.0, 4) == 1 and formulae.tokens_per_step(1.0, 4) == 5
    assert formulae.tokens_per_step(0.8, 2) == pytest.approx(1 + 0.8 + 0.64)
    assert formulae.best_guesses(0.0, 0.1) == 0 == formulae.best_guesses(0.9, 0.1, verify_cost=10)
    gains = [formulae.speculation_gain(0.8, k, 0.1) for k in range(17)]
    assert gains[formulae.best_guesses(0.8, 0.1)] == max(gains) > 2
    # Four guesses at 80 %: 3.36 tokens a step, 2.4 times as fast if a guess costs a tenth of a step, and slower if it costs a whole one.
    assert formulae.tokens_per_step(0.8, 4) == pytest.approx(3.3616) and gains[4] == pytest.approx(3.3616 / 1.4)
    assert formulae.speculation_gain(0.8, 4, 1.0) < 1


def test_blocks_lose_half_a_block_for_each_sequence() -> None:
    lengths = range(1, 1601)
    slots = sum(-(-length // 16) * 16 for length in lengths)
    assert formulae.fragmentation(sum(lengths) / 1600, 16) == pytest.approx(1 - sum(lengths) / slots, rel=0.01)
    assert formulae.fragmentation(100, 1) == 0


def test_rings_and_pipelines() -> None:
    assert formulae.ring_seconds(8e9, 1, 1e9) == 0 and formulae.ring_seconds(8e9, 8, 1e9) == pytest.approx(14)
    assert formulae.pipeline_bubble(1, 4) == 0 and formulae.pipeline_bubble(4, 4) == pytest.approx(3 / 7)


def test_no_bound_is_passed_by_a_larger_batch() -> None:
    """Tokens a second grow with the batch, and never beyond what computing alone allows."""
    rates = [told("llama-3.1-8b", "h100", batch=batch, prompt=64, output=64)["decode"] for batch in (1, 8, 64, 512, 4096)]
    assert rates == sorted(rates)
    shape = KNOWN["llama-3.1-8b"]
    assert rates[-1] <= 989e12 / (2 * (shape.active_parameters + shape.head_parameters))


def test_the_command_prints_a_table_or_json_and_refuses_by_name() -> None:
    run = CliRunner().invoke
    assert "KV of a token" in run(app, ["size", "llama-3.1-8b"], terminal_width=160).stdout
    read = json.loads(run(app, ["size", "llama-3.1-8b", "--json"]).stdout)
    assert {one["name"] for one in read["figures"]} >= {"weights", "decode step: TPOT"}
    refused = {
        "at least 2": ["llama-3.1-70b"], "is no folder": ["gpt-9"], "--gpu": ["llama-3.1-8b", "--gpu", "tpu"],
        "--cached": ["llama-3.1-8b", "--cached", "4096"],
    }  # fmt: skip
    for words, arguments in refused.items():
        result = run(app, ["size", *arguments], terminal_width=160)
        assert result.exit_code == 2 and words in result.output, arguments


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(70.6e9, "", "70.6 billion"), (97, "", "97"), (1_342_177_280, "B", "1.34 GB"), (0.0197, "s", "19.7 ms"), (2.5e-7, "s", "250 ns"),
     (0.0, "s", "0 s"), (0.031, "%", "3.1%"), (1626, "tokens/s", "1,626 tokens/s"), (12, "s", "12 s")],
)  # fmt: skip
def test_numbers_are_shown_in_the_unit_that_suits(value: float, unit: str, text: str) -> None:
    assert shown(Figure("", value, unit, "")) == text
