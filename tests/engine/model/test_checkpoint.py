"""A checkpoint folder is either served exactly or refused with the names of the file and the field."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from baton.engine.facts import fingerprint as fingerprints
from baton.engine.facts.fields import CheckpointError
from baton.engine.facts.fingerprint import fingerprint, tokenizer_fingerprint
from baton.engine.model.checkpoint import Checkpoint, LayerAttention, Rope, expected_tensors
from baton.engine.model.config_json import SUPPORTED, read_config
from baton.models.make_small import make

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.5, 2.0, 4.0], "long_factor": [9.0] * 4, "original_max_position_embeddings": 32}
MIXTRAL: dict[str, Any] = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
}
DEEPSEEK2: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
}
DEEPSEEK3 = DEEPSEEK2 | {"architectures": ["DeepseekV3ForCausalLM"], "n_group": 4, "topk_group": 2}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make(folder, hidden=32, layers=2, heads=4, kv_heads=2, vocab=300, context=64)  # a second of computing
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """For one test, which may change it."""
    return shutil.copytree(made, tmp_path, dirs_exist_ok=True)


def edit_config(folder: Path, name: str = "config.json", **fields: Any) -> None:
    raw = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({key: value for key, value in (raw | fields).items() if value != "absent"}))


def edit_weights(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def refusal(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder, read_config(folder))
    return caught.value


# --- config.json --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures", "GPT2LMHeadModel"),
        ({"architectures": "absent"}, "architectures", "None"),
        ({"architectures": ["LlamaForCausalLM", "MistralForCausalLM"]}, "architectures", "names 2 architectures"),
        ({"hidden_act": "gelu"}, "hidden_act", "gelu"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config.quant_method", "not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.original_max_position_embeddings", "positive integer"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope_parameters.rope_type", "dynamic"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor", "positive number"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mscale": 1.0}}, "rope_scaling.mscale", "linear"),
        ({"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": 4.0}}, "rope_scaling.low_freq_factor", "less than"),
        ({"rope_scaling": LLAMA3_ROPE | {"factor": "8"}}, "rope_scaling.factor", "positive number"),
        ({"rope_scaling": LONGROPE | {"short_factor": [1.0]}}, "rope_scaling.short_factor", "4 positive numbers"),
        ({"rope_scaling": [2]}, "rope_scaling", "object"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters", "all layers"),
        ({"rope_theta": -1}, "rope_theta", "positive number"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "supported: 1"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor", "0.5"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention", "not supported"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings", "true or false"),
        (
            {"rope_parameters": {"rope_theta": 5e4}, "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": "absent"},
            "rope_scaling",
            "rope_theta",
        ),
        ({"transformers_weights": "other.safetensors"}, "transformers_weights", "not supported"),
        ({"use_sliding_window": True}, "use_sliding_window", "not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types", "not supported"),
        ({"layer_types": ["full_attention"]}, "layer_types", "each of 2 layers"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types", "chunked_attention"),
        ({"hidden_size": "absent"}, "hidden_size", "positive integer"),
        ({"vocab_size": 0}, "vocab_size", "positive integer"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers", "positive integer"),
        ({"num_key_value_heads": 3}, "num_key_value_heads", "does not divide"),
        ({"head_dim": 7}, "head_dim", "even"),
        ({"eos_token_id": "</s>"}, "eos_token_id", "token id"),
    ],
)
def test_config_refusals_name_file_and_field(folder: Path, fields: dict[str, Any], field: str, says: str) -> None:
    edit_config(folder, **fields)
    error = refusal(folder)
    assert (error.file.name, error.field) == ("config.json", field)
    assert says in str(error)
    assert field in str(error)


def test_refusing_an_unknown_architecture_lists_the_supported_ones(folder: Path) -> None:
    edit_config(folder, architectures=["MambaForCausalLM"])
    assert all(name in str(refusal(folder)) for name in SUPPORTED)


def test_fields_missing_from_the_config_have_defaults(folder: Path) -> None:
    before = read_config(folder)
    edit_config(folder, head_dim="absent", rope_theta="absent", rms_norm_eps=before.norm_eps, tie_word_embeddings="absent")
    assert read_config(folder) == before
    assert before.ropes == (Rope(theta=10000.0),) * 2
    edit_config(folder, num_key_value_heads="absent")
    assert read_config(folder).kv_heads == before.heads


def test_eos_ids_are_collected_from_all_files(folder: Path) -> None:
    edit_config(folder, eos_token_id=[5, 6])
    edit_config(folder, "generation_config.json", eos_token_id=[6, 9])
    assert read_config(folder).eos_token_ids == {5, 6, 9, 1}
    edit_config(folder, eos_token_id=None)
    (folder / "generation_config.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert read_config(folder).eos_token_ids == frozenset()


@pytest.mark.parametrize(("window", "kept"), [(None, None), (64, None), (63, 63), ("absent", None)])
def test_a_window_as_long_as_the_context_is_dropped(folder: Path, window: int | str | None, kept: int | None) -> None:
    edit_config(folder, architectures=["MistralForCausalLM"], sliding_window=window)
    assert {layer.window for layer in read_config(folder).attention} == {kept}


# --- families -----------------------------------------------------------------------------------------------------------------------


def windows(folder: Path, layers: int, **fields: Any) -> list[int | None]:
    edit_config(folder, num_hidden_layers=layers, max_position_embeddings=8192, **fields)
    return [layer.window for layer in read_config(folder).attention]


def test_each_family_has_windows_on_the_right_layers(folder: Path) -> None:
    assert windows(folder, 3, architectures=["MistralForCausalLM"]) == [4096] * 3
    assert windows(folder, 3, architectures=["Phi3ForCausalLM"]) == [None] * 3
    assert windows(folder, 3, architectures=["Phi3ForCausalLM"], sliding_window=10) == [10] * 3
    assert windows(folder, 4, architectures=["Gemma2ForCausalLM"]) == [10, None, 10, None]
    assert windows(folder, 4, sliding_window_pattern=3) == [10, None, 10, None]  # a Gemma 3 field, which Gemma 2 ignores
    edit_config(folder, sliding_window_pattern="absent")
    assert windows(folder, 7, architectures=["Gemma3ForCausalLM"]) == [10] * 5 + [None, 10]
    assert windows(folder, 3, sliding_window_pattern=3) == [10, 10, None]
    assert windows(folder, 2, layer_types=["full_attention", "sliding_attention"]) == [None, 10]
    edit_config(folder, layer_types="absent", sliding_window_pattern="absent")
    assert windows(folder, 3, architectures=["Qwen2ForCausalLM"]) == [None] * 3
    assert windows(folder, 30, use_sliding_window=True) == [None] * 28 + [10] * 2
    assert windows(folder, 3, max_window_layers=1) == [None, 10, 10]
    assert windows(folder, 3, layer_types=["sliding_attention", "full_attention", "full_attention"]) == [10, None, None]
    assert windows(folder, 3, **QWEN3_MOE, layer_types="absent") == [10] * 3


def test_gemma_3_gets_two_rotary_embeddings_from_either_spelling(folder: Path) -> None:
    far, near = Rope(5e5, "linear", 8.0), Rope(2e4)
    edit_config(
        folder,
        architectures=["Gemma3ForCausalLM"],
        sliding_window_pattern=2,
        rope_theta=5e5,
        rope_local_base_freq=2e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    assert read_config(folder).ropes == (near, far)
    parameters = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    edit_config(folder, rope_theta="absent", rope_local_base_freq="absent", rope_scaling="absent", rope_parameters=parameters)
    assert read_config(folder).ropes == (near, far)
    edit_config(folder, rope_parameters="absent")
    assert read_config(folder).ropes == (Rope(1e4), Rope(1e6))


def test_gemma_softcaps_have_defaults_and_null_turns_them_off(folder: Path) -> None:
    edit_config(folder, architectures=["Gemma2ForCausalLM"])
    config = read_config(folder)
    assert (config.attention[0], config.logit_softcap) == (LayerAttention(None, 50.0, 256**-0.5), 30.0)
    edit_config(folder, attn_logit_softcapping=None, final_logit_softcapping=None, query_pre_attn_scalar=64)
    config = read_config(folder)
    assert (config.attention[0], config.logit_softcap) == (LayerAttention(None, None, 0.125), None)
    edit_config(folder, architectures=["Gemma3ForCausalLM"], attn_logit_softcapping="absent", final_logit_softcapping="absent")
    config = read_config(folder)
    assert (config.attention[0], config.logit_softcap) == (LayerAttention(None, None, 0.125), None)


def test_longrope_is_limited_to_the_length_its_short_factors_cover(folder: Path) -> None:
    edit_config(folder, architectures=["Phi3ForCausalLM"], rope_scaling=LONGROPE)
    config = read_config(folder)
    assert config.max_positions == 32
    assert config.ropes[0].amplitude == pytest.approx((1 + 1 / 5) ** 0.5)  # 64 positions are 2^1 times 2^5
    edit_config(folder, original_max_position_embeddings=16, rope_scaling=LONGROPE | {"type": "su"})
    assert read_config(folder).max_positions == 16


def test_each_family_has_experts_on_the_right_layers(folder: Path) -> None:
    def layers(**fields: Any) -> set[int]:
        edit_config(folder, num_hidden_layers=5, **fields)
        config = read_config(folder)
        return {i for i in range(5) if config.experts_of(i)}

    assert layers() == set()
    assert layers(**MIXTRAL) == {0, 1, 2, 3, 4}
    assert layers(**QWEN3_MOE) == {0, 1, 2, 3, 4}
    assert layers(decoder_sparse_step=2) == {1, 3}
    assert layers(decoder_sparse_step=1, mlp_only_layers=[0, 3]) == {1, 2, 4}
    assert layers(**DEEPSEEK2) == {0, 1, 2, 3, 4}
    assert layers(first_k_dense_replace=4) == {4}
    assert layers(**DEEPSEEK3, first_k_dense_replace="absent") == {3, 4}


@pytest.mark.parametrize(
    ("family", "fields", "field"),
    [
        (MIXTRAL, {"num_local_experts": "absent"}, "num_local_experts"),
        (MIXTRAL, {"num_experts_per_tok": 5}, "num_experts_per_tok"),
        (QWEN3_MOE, {"mlp_only_layers": 3}, "mlp_only_layers"),
        (QWEN3_MOE, {"moe_intermediate_size": "absent"}, "moe_intermediate_size"),
        (QWEN3_MOE, {"norm_topk_prob": "yes"}, "norm_topk_prob"),
        (DEEPSEEK2, {"topk_method": "noaux_tc"}, "topk_method"),
        (DEEPSEEK2, {"topk_method": "group_limited_greedy"}, "n_group"),
        (DEEPSEEK2, {"norm_topk_prob": True}, "norm_topk_prob"),
        (DEEPSEEK2, {"scoring_func": "sigmoid"}, "scoring_func"),
        (DEEPSEEK2, {"moe_layer_freq": 2}, "moe_layer_freq"),
        (DEEPSEEK2, {"rope_interleave": False}, "rope_interleave"),
        (DEEPSEEK2, {"num_key_value_heads": 2}, "num_key_value_heads"),
        (DEEPSEEK2, {"kv_lora_rank": 5}, "kv_lora_rank"),
        (DEEPSEEK2, {"qk_rope_head_dim": 3}, "qk_rope_head_dim"),
        (DEEPSEEK2, {"first_k_dense_replace": -1}, "first_k_dense_replace"),
        (DEEPSEEK3, {"topk_method": "greedy"}, "topk_method"),
        (DEEPSEEK3, {"scoring_func": "softmax"}, "scoring_func"),
        (DEEPSEEK3, {"n_group": 3}, "n_group"),
        (DEEPSEEK3, {"n_group": 8}, "n_group"),
        (DEEPSEEK3, {"topk_group": 5}, "topk_group"),
        (DEEPSEEK3, {"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ({"architectures": ["Gemma2ForCausalLM"]}, {"hidden_activation": "gelu"}, "hidden_activation"),
        ({"architectures": ["Gemma2ForCausalLM"]}, {"sliding_window": None}, "sliding_window"),
        ({"architectures": ["Gemma3ForCausalLM"]}, {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        ({"architectures": ["Gemma3ForCausalLM"]}, {"rope_parameters": {"rope_type": "default"}}, "rope_parameters.rope_type"),
    ],
)
def test_a_family_refuses_fields_it_does_not_support(folder: Path, family: dict[str, Any], fields: dict[str, Any], field: str) -> None:
    edit_config(folder, **family)
    read_config(folder)
    edit_config(folder, **fields)
    assert refusal(folder).field == field


# --- weights ------------------------------------------------------------------------------------------------------------------------


def test_a_good_folder_opens(folder: Path) -> None:
    config = read_config(folder)
    checkpoint = Checkpoint(folder, config)
    for name, shape in expected_tensors(config).items():
        assert tuple(checkpoint.tensor(name).shape) == shape


def test_a_missing_tensor_is_refused(folder: Path) -> None:
    edit_weights(folder, lambda w: w.pop("model.layers.1.mlp.up_proj.weight"))
    error = refusal(folder)
    assert error.field == "model.layers.1.mlp.up_proj.weight"
    assert "missing" in str(error)


def test_an_extra_tensor_is_refused(folder: Path) -> None:
    edit_weights(folder, lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32)}))
    error = refusal(folder)
    assert error.field == "model.layers.0.self_attn.q_proj.bias"
    assert "not part of" in str(error)


def test_a_tensor_of_the_wrong_shape_is_refused(folder: Path) -> None:
    edit_weights(folder, lambda w: w.update({"model.norm.weight": np.zeros(31, np.float32)}))
    error = refusal(folder)
    assert (error.file.name, error.field) == ("model.safetensors", "model.norm.weight")
    assert "[31]" in str(error)
    assert "[32]" in str(error)


def test_a_dtype_that_weights_cannot_have_is_refused(folder: Path) -> None:
    edit_weights(folder, lambda w: w.update({"model.norm.weight": np.zeros(32, np.int8)}))
    assert "I8" in str(refusal(folder))


def test_rotary_frequencies_in_old_files_are_ignored(folder: Path) -> None:
    edit_weights(folder, lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)}))
    Checkpoint(folder, read_config(folder))


def test_a_tied_head_in_the_file_must_equal_the_embedding(folder: Path) -> None:
    edit_config(folder, tie_word_embeddings=True)
    assert refusal(folder).field == "lm_head.weight"
    edit_weights(folder, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"]}))
    Checkpoint(folder, read_config(folder))


@pytest.mark.parametrize("keep", [0, 5, 500, -4])
def test_a_truncated_file_is_refused(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    error = refusal(folder)
    assert error.file == file
    assert "truncated" in str(error)


def test_an_altered_header_is_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[3] ^= 0xFF
    file.write_bytes(bytes(data))
    assert refusal(folder).file == file


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_missing_or_malformed_config_is_refused(folder: Path, text: str | None) -> None:
    file = folder / "config.json"
    file.unlink() if text is None else file.write_text(text)
    assert refusal(folder).file == file


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "neither" in str(refusal(folder))


@pytest.mark.parametrize("index", ["{}", "[]", '{"weight_map": {"a": "../model.safetensors"}}', '{"weight_map": {"a": 3}}'])
def test_a_damaged_index_is_refused(folder: Path, index: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index)
    assert refusal(folder).field == "weight_map"


def test_a_missing_shard_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    assert refusal(folder).file.name == "model-00001-of-00002.safetensors"


def test_a_single_file_is_preferred_to_an_index(folder: Path) -> None:
    """As in transformers (tests/engine/model/test_model_parity.py checks that)."""
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    assert fingerprints.weight_files(folder) == [folder / "model.safetensors"]
    Checkpoint(folder, read_config(folder))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("pytorch_model.bin", "pytorch_model.bin is: a pickle"),
        ("pytorch_model-00001-of-00002.bin", "pickle"),
        ("model-q4_k_m.gguf", "GGUF"),
        ("adapter_model.safetensors", "adapter"),
        ("consolidated.safetensors", "under another name"),
        ("consolidated.00.pth", "pickle"),
    ],
)
def test_refusing_unsupported_weight_files_names_them(folder: Path, name: str, says: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    error = str(refusal(folder))
    assert name in error and says in error


@pytest.mark.parametrize("suffix", ["qweight", "weight_scale_inv", "scales"])
def test_quantised_tensors_are_recognised_without_quantization_config(folder: Path, suffix: str) -> None:
    name = f"model.layers.0.self_attn.q_proj.{suffix}"
    edit_weights(folder, lambda w: w.update({name: np.zeros(3, np.int32)}))
    error = refusal(folder)
    assert error.field == name and "quantised" in str(error) and "quantization_config" in str(error)


def test_an_eight_bit_matrix_is_recognised_as_quantised(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    edit_weights(folder, lambda w: w.update({name: w[name].astype(np.int8)}))
    assert refusal(folder).field == name and "quantised" in str(refusal(folder))


def test_weights_in_float64_are_read(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    edit_weights(folder, lambda w: w.update({name: w[name].astype(np.float64)}))
    assert Checkpoint(folder, read_config(folder)).tensor(name).dtype == torch.float64


# --- experts ------------------------------------------------------------------------------------------------------------------------


def make_mixtral(folder: Path) -> dict[str, Any]:
    """Turns the folder's model into one with four experts in the layout of published files, and returns its tensors."""
    edit_config(folder, **MIXTRAL, sliding_window=None)
    random, weights = np.random.default_rng(1), load_file(folder / "model.safetensors")
    for i in range(2):
        for name in ("gate_proj", "up_proj", "down_proj"):
            weights.pop(f"model.layers.{i}.mlp.{name}.weight")
        block = f"model.layers.{i}.block_sparse_moe"
        weights[f"{block}.gate.weight"] = random.random((4, 32), np.float32)
        for expert in range(4):
            for name, shape in (("w1", (96, 32)), ("w3", (96, 32)), ("w2", (32, 96))):
                weights[f"{block}.experts.{expert}.{name}.weight"] = random.random(shape, np.float32)
    save_file(weights, folder / "model.safetensors")
    return weights


def fuse(weights: dict[str, Any], layer: int) -> None:
    """Stacks the experts of a layer, as transformers 5 keeps them in memory and can write them."""
    block, fused = f"model.layers.{layer}.block_sparse_moe", f"model.layers.{layer}.mlp"
    matrices = {name: np.stack([weights.pop(f"{block}.experts.{i}.{name}.weight") for i in range(4)]) for name in ("w1", "w2", "w3")}
    weights[f"{fused}.experts.gate_up_proj"] = np.concatenate((matrices["w1"], matrices["w3"]), axis=1)
    weights[f"{fused}.experts.down_proj"] = matrices["w2"]
    weights[f"{fused}.gate.weight"] = weights.pop(f"{block}.gate.weight")


def test_experts_are_the_same_in_both_layouts(folder: Path) -> None:
    published = make_mixtral(folder)
    config = read_config(folder)
    separate = Checkpoint(folder, config)
    expected = {name: separate.tensor(name).numpy().copy() for name in expected_tensors(config)}
    for name, theirs in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        tensor = published[f"model.layers.1.block_sparse_moe.experts.2.{theirs}.weight"]
        assert np.array_equal(expected[f"model.layers.1.mlp.experts.2.{name}.weight"], tensor)

    def fuse_both(weights: dict[str, Any]) -> None:
        fuse(weights, 0)
        fuse(weights, 1)

    edit_weights(folder, fuse_both)
    fused = Checkpoint(folder, config)
    assert all(np.array_equal(fused.tensor(name).numpy(), tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda w: w[:3], "model.layers.0.mlp.experts.3.gate_proj.weight"),
        (lambda w: np.concatenate((w, w[:1])), "model.layers.0.mlp.experts.4.gate_proj.weight"),
        (lambda w: w[:, :-2], "model.layers.0.mlp.experts.gate_up_proj"),
        (lambda w: np.concatenate((w, w[:, :1]), axis=1), "model.layers.0.mlp.experts.0.gate_proj.weight"),
        (lambda w: w[0], "model.layers.0.mlp.experts.0.gate_proj.weight"),
    ],
)
def test_fused_expert_tensors_are_checked(folder: Path, change: Callable[[Any], Any], field: str) -> None:
    make_mixtral(folder)
    name = "model.layers.0.mlp.experts.gate_up_proj"

    def fuse_and_change(weights: dict[str, Any]) -> None:
        fuse(weights, 0)
        weights[name] = np.ascontiguousarray(change(weights[name]))

    edit_weights(folder, fuse_and_change)
    assert refusal(folder).field == field


def test_multi_token_prediction_layers_are_ignored(folder: Path) -> None:
    edit_config(folder, **DEEPSEEK3)
    config = read_config(folder)
    weights = {name: np.zeros(shape, np.float32) for name, shape in expected_tensors(config).items()}
    extra = {"model.layers.2.eh_proj.weight": np.zeros(3, np.float32)}
    save_file(weights | extra, folder / "model.safetensors")
    Checkpoint(folder, config)
    save_file(weights | {"model.layers.3.eh_proj.weight": np.zeros(3, np.float32)}, folder / "model.safetensors")
    assert refusal(folder).field == "model.layers.3.eh_proj.weight"


# --- fingerprints -------------------------------------------------------------------------------------------------------------------


def flip(file: Path, offset: int) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(bytes(data))


def test_a_fingerprint_depends_on_contents_not_on_location(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    copy = tmp_path_factory.mktemp("copy")
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert fingerprint(copy) == fingerprint(folder)
    assert tokenizer_fingerprint(copy) == tokenizer_fingerprint(folder)
    assert len(fingerprint(folder)) == 32


@pytest.mark.parametrize(
    ("name", "offset"), [("config.json", 5), ("model.safetensors", 9), ("model.safetensors", -1), ("model.safetensors", 50000)]
)
def test_one_flipped_bit_changes_the_fingerprint(folder: Path, name: str, offset: int) -> None:
    before = fingerprint(folder)
    flip(folder / name, offset)
    assert fingerprint(folder) != before


def test_the_samples_of_a_long_file_include_its_first_and_last_byte(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "WHOLE_FILE", 1000)
    monkeypatch.setattr(fingerprints, "SAMPLE", 100)
    file, prints = folder / "model.safetensors", set()
    for offset in (None, 0, -1, 50):
        if offset is not None:
            flip(file, offset)
        prints.add(fingerprint(folder))
    assert len(prints) == 4
    file.write_bytes(file.read_bytes() + b"\0")
    assert fingerprint(folder) not in prints


def test_the_tokenizer_has_its_own_fingerprint(folder: Path) -> None:
    model, tokenizer = fingerprint(folder), tokenizer_fingerprint(folder)
    flip(folder / "tokenizer.json", 100)
    assert fingerprint(folder) == model
    assert tokenizer_fingerprint(folder) != tokenizer


def test_a_folder_without_weights_also_has_a_fingerprint(folder: Path) -> None:
    before = fingerprint(folder)
    (folder / "model.safetensors").unlink()
    assert fingerprint(folder) != before
