"""A folder is served exactly or refused with the file and the field."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine import fingerprint as fingerprints
from engine.checkpoint import SUPPORTED, Checkpoint, CheckpointError, ModelConfig, Rope, expected_tensors
from engine.fingerprint import fingerprint, tokenizer_fingerprint
from models.make_small import make


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make(tmp_path, hidden=32, layers=2, heads=4, kv_heads=2, vocab=300, context=64)
    return tmp_path


def edit_config(folder: Path, name: str = "config.json", **fields: Any) -> None:
    raw = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({key: value for key, value in (raw | fields).items() if value != "absent"}))


def edit_weights(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def refusal(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder, ModelConfig.read(folder))
    return caught.value


# --- config.json --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures", "GPT2LMHeadModel"),
        ({"architectures": "absent"}, "architectures", "None"),
        ({"hidden_act": "gelu"}, "hidden_act", "gelu"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config", "not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type", "yarn"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope_parameters.rope_type", "dynamic"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor", "positive number"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor", "positive number"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters", "all layers"),
        ({"rope_theta": -1}, "rope_theta", "positive number"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "whole heads"),
        ({"use_sliding_window": True}, "use_sliding_window", "not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types", "full_attention"),
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


def test_an_unknown_architecture_is_told_the_known_ones(folder: Path) -> None:
    edit_config(folder, architectures=["MambaForCausalLM"])
    assert all(name in str(refusal(folder)) for name in SUPPORTED)


def test_what_the_config_leaves_out(folder: Path) -> None:
    before = ModelConfig.read(folder)
    edit_config(folder, head_dim="absent", rope_theta="absent", rms_norm_eps=before.norm_eps, tie_word_embeddings="absent")
    assert ModelConfig.read(folder) == before
    assert before.rope == Rope(theta=10000.0)
    edit_config(folder, num_key_value_heads="absent")
    assert ModelConfig.read(folder).kv_heads == before.heads


def test_every_eos_id_counts(folder: Path) -> None:
    edit_config(folder, eos_token_id=[5, 6])
    edit_config(folder, "generation_config.json", eos_token_id=[6, 9])
    assert ModelConfig.read(folder).eos_token_ids == {5, 6, 9}
    edit_config(folder, eos_token_id=None)
    (folder / "generation_config.json").unlink()
    assert ModelConfig.read(folder).eos_token_ids == frozenset()


@pytest.mark.parametrize(("window", "kept"), [(None, None), (64, None), (63, 63)])
def test_a_window_that_no_sequence_outgrows_is_none(folder: Path, window: int | None, kept: int | None) -> None:
    edit_config(folder, architectures=["MistralForCausalLM"], sliding_window=window)
    assert ModelConfig.read(folder).sliding_window == kept


# --- weights ------------------------------------------------------------------------------------------------------------------------


def test_a_good_folder_opens(folder: Path) -> None:
    config = ModelConfig.read(folder)
    checkpoint = Checkpoint(folder, config)
    for name, shape in expected_tensors(config).items():
        assert tuple(checkpoint.tensor(name).shape) == shape


def test_missing_tensor(folder: Path) -> None:
    edit_weights(folder, lambda w: w.pop("model.layers.1.mlp.up_proj.weight"))
    error = refusal(folder)
    assert error.field == "model.layers.1.mlp.up_proj.weight"
    assert "missing" in str(error)


def test_extra_tensor(folder: Path) -> None:
    edit_weights(folder, lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32)}))
    error = refusal(folder)
    assert error.field == "model.layers.0.self_attn.q_proj.bias"
    assert "not part of" in str(error)


def test_misshapen_tensor(folder: Path) -> None:
    edit_weights(folder, lambda w: w.update({"model.norm.weight": np.zeros(31, np.float32)}))
    error = refusal(folder)
    assert (error.file.name, error.field) == ("model.safetensors", "model.norm.weight")
    assert "[31]" in str(error)
    assert "[32]" in str(error)


def test_a_dtype_that_is_no_weight(folder: Path) -> None:
    edit_weights(folder, lambda w: w.update({"model.norm.weight": np.zeros(32, np.int8)}))
    assert "I8" in str(refusal(folder))


def test_rotary_frequencies_of_old_files_are_left_alone(folder: Path) -> None:
    edit_weights(folder, lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)}))
    Checkpoint(folder, ModelConfig.read(folder))


def test_a_tied_head_in_the_file_must_be_the_embedding(folder: Path) -> None:
    edit_config(folder, tie_word_embeddings=True)
    assert refusal(folder).field == "lm_head.weight"
    edit_weights(folder, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"]}))
    Checkpoint(folder, ModelConfig.read(folder))


@pytest.mark.parametrize("keep", [0, 5, 500, -4])
def test_a_truncated_file(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    error = refusal(folder)
    assert error.file == file
    assert "truncated" in str(error)


def test_an_altered_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[3] ^= 0xFF
    file.write_bytes(bytes(data))
    assert refusal(folder).file == file


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_config_that_is_not_one(folder: Path, text: str | None) -> None:
    file = folder / "config.json"
    file.unlink() if text is None else file.write_text(text)
    assert refusal(folder).file == file


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "neither" in str(refusal(folder))


@pytest.mark.parametrize("index", ["{}", "[]", '{"weight_map": {"a": "../model.safetensors"}}', '{"weight_map": {"a": 3}}'])
def test_a_damaged_index(folder: Path, index: str) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    assert refusal(folder).field == "weight_map"


def test_a_missing_shard(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    assert refusal(folder).file.name == "model-00001-of-00002.safetensors"


# --- fingerprints -------------------------------------------------------------------------------------------------------------------


def flip(file: Path, offset: int) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(bytes(data))


def test_a_fingerprint_is_of_contents_not_of_place(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    copy = tmp_path_factory.mktemp("copy")
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert fingerprint(copy) == fingerprint(folder)
    assert tokenizer_fingerprint(copy) == tokenizer_fingerprint(folder)
    assert len(fingerprint(folder)) == 32


@pytest.mark.parametrize(
    ("name", "offset"), [("config.json", 5), ("model.safetensors", 9), ("model.safetensors", -1), ("model.safetensors", 50000)]
)
def test_one_flipped_bit_is_another_model(folder: Path, name: str, offset: int) -> None:
    before = fingerprint(folder)
    flip(folder / name, offset)
    assert fingerprint(folder) != before


def test_a_long_file_is_sampled_first_and_last_byte_included(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_tokenizer_is_another_name(folder: Path) -> None:
    model, tokenizer = fingerprint(folder), tokenizer_fingerprint(folder)
    flip(folder / "tokenizer.json", 100)
    assert fingerprint(folder) == model
    assert tokenizer_fingerprint(folder) != tokenizer


def test_a_folder_without_weights_has_a_fingerprint_too(folder: Path) -> None:
    before = fingerprint(folder)
    (folder / "model.safetensors").unlink()
    assert fingerprint(folder) != before
