"""Quantised checkpoints are worth what their format says, number by number, or they are refused by name."""

import json
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantised_folders
import torch
from quantised_folders import TOKENS, VARIANTS, compressed, grouped, write, write_dequantised
from safetensors.torch import load_file, save_file

from baton.engine.choice import load_runner
from baton.engine.cpu.panels import Product
from baton.engine.cpu.tile import OUTS
from baton.engine.facts.fields import CheckpointError
from baton.engine.model.checkpoint import Checkpoint, expected_tensors
from baton.engine.model.config_json import read_config
from baton.engine.model.linear import AS_STORED, DEQUANTISED, PLAIN
from baton.engine.model.moe import Mlp
from baton.engine.model.naive import next_logits
from baton.engine.model.transformer import Transformer
from baton.engine.runner import ModelRunner
from baton.models.make_small import make

Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain")
    make(path, hidden=64, layers=1, heads=4, kv_heads=2, vocab=300, context=64)
    return path


@pytest.fixture
def made(plain: Path, tmp_path: Path) -> Callable[[str], Path]:
    def make_(variant: str) -> Path:
        write(plain, tmp_path / variant, variant)
        return tmp_path / variant

    return make_


def opened(folder: Path) -> Checkpoint:
    return Checkpoint(folder, read_config(folder))


def refusal(folder: Path) -> CheckpointError:
    """When it is opened, or when it is read."""
    with pytest.raises(CheckpointError) as caught:
        checkpoint = opened(folder)
        for name in expected_tensors(read_config(folder)):
            checkpoint.matrix(name)
    return caught.value


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def tell(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


# --- what they are worth ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_matrix_is_worth_what_the_format_says(plain: Path, tmp_path: Path, variant: str) -> None:
    worth = write(plain, tmp_path, variant)
    checkpoint = opened(tmp_path)
    assert len(worth) == 7
    for name, expected in worth.items():
        np.testing.assert_allclose(checkpoint.tensor(name).double().numpy(), expected, rtol=1e-6, atol=1e-7 * np.abs(expected).max())


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_the_dequantised_weights(plain: Path, tmp_path: Path, variant: str) -> None:
    write_dequantised(plain, tmp_path / "float", write(plain, tmp_path / "quantised", variant))
    ours, expected = (
        next_logits(load_runner(ModelRunner, tmp_path / folder, compiled=False).model, [5, 17, 200, 3]) for folder in ("quantised", "float")
    )
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


AS_THEY_ARE = [v for v in VARIANTS if v != "gptq-ordered" and not v.startswith("fp8")]


def loaded(folder: Path, **keys: Any) -> Transformer:
    return load_runner(ModelRunner, folder, **keys).model


@pytest.mark.parametrize("variant", VARIANTS)
def test_matrices_are_computed_as_they_are_stored_where_a_kernel_has_the_form(plain: Path, tmp_path: Path, variant: str) -> None:
    """But for the rounding of activations, logits are those of the dequantised weights."""
    write_dequantised(plain, tmp_path / "float", write(plain, tmp_path / "quantised", variant))
    ours, expected = loaded(tmp_path / "quantised"), loaded(tmp_path / "float")
    form = AS_STORED if variant in AS_THEY_ARE else DEQUANTISED
    assert ours.forms == {form: 4, PLAIN: 1} and expected.forms == {PLAIN: 5}
    found, wanted = (next_logits(model, [5, 17, 200, 3]) for model in (ours, expected))
    error = (found - wanted).norm() / wanted.norm()
    assert (1e-5 < error < 0.03) if form == AS_STORED else error < 1e-5


def test_nothing_is_held_twice(plain: Path, tmp_path: Path) -> None:
    """The packed numbers, scales, and biases of zeros; nothing of the file."""
    write(plain, tmp_path, "gptq-asymmetric")
    mlp = loaded(tmp_path).layers[0].mlp
    assert isinstance(mlp, Mlp) and isinstance(mlp.down.multiply, Product)
    down = mlp.down.multiply
    held = sum(part.nbytes for part in down.matrix if isinstance(part, torch.Tensor))
    rows, width = -(-down.outs // OUTS) * OUTS, down.width
    assert held == rows * (width // 2 + width // 32 * 8 + 4)


def test_quantised_matrices_are_converted_if_told_so(plain: Path, tmp_path: Path) -> None:
    worth = write(plain, tmp_path / "quantised", "gptq")
    write_dequantised(plain, tmp_path / "float", worth)
    for weight_dtype in ("float", "int8", "int4"):
        ours, expected = (loaded(tmp_path / folder, weight_dtype=weight_dtype) for folder in ("quantised", "float"))
        assert ours.forms[DEQUANTISED] == 4
        torch.testing.assert_close(next_logits(ours, [5, 17]), next_logits(expected, [5, 17]), rtol=1e-4, atol=1e-4)


def test_streams_are_not_continued_where_matrices_have_another_form(made: Callable[[str], Path]) -> None:
    folder = made("gptq")
    one, other = (load_runner(ModelRunner, folder, weight_dtype=each).layout.model_fingerprint for each in ("auto", "float"))
    assert one != other


def test_parts_of_one_matrix_may_be_quantised_in_unlike_ways(plain: Path, tmp_path: Path) -> None:
    """q has eight bits for each row, k groups of 32 with zero points, and v is not quantised: then all three are dequantised."""
    worth = write(plain, tmp_path / "quantised", "w4a16")
    w = load_file(plain / "model.safetensors")
    groups = dict[str, Any]()
    for name, make_, told in (
        ("q_proj", quantised_folders.int_quantized, compressed("int-quantized", {})),
        ("k_proj", partial(quantised_folders.pack_quantized, symmetric=False), compressed("pack-quantized", grouped(symmetric=False))),
    ):
        module = f"model.layers.0.self_attn.{name}"
        parts, worth[f"{module}.weight"] = make_(w[f"{module}.weight"].double().numpy())
        edit(tmp_path / "quantised", partial(without, module=module))
        edit(tmp_path / "quantised", partial(dict.update, **{f"{module}.{part}": tensor for part, tensor in parts.items()}))
        groups[name] = told["config_groups"]["group_0"] | {"targets": [f"re:.*{name}"], "format": told["format"]}
    tell(tmp_path / "quantised", lambda q: q["config_groups"].update(groups))
    check_parts(tmp_path, plain, worth, {AS_STORED: 4, PLAIN: 1})
    v = "model.layers.0.self_attn.v_proj"
    edit(tmp_path / "quantised", partial(without, module=v))
    edit(tmp_path / "quantised", partial(dict.update, **{f"{v}.weight": w[f"{v}.weight"]}))
    tell(tmp_path / "quantised", lambda q: q["ignore"].append("re:.*v_proj"))
    del worth[f"{v}.weight"]
    check_parts(tmp_path, plain, worth, {AS_STORED: 3, DEQUANTISED: 1, PLAIN: 1})


def without(tensors: dict[str, Any], module: str) -> None:
    for name in [name for name in tensors if name.startswith(f"{module}.")]:
        del tensors[name]


def check_parts(tmp_path: Path, plain: Path, worth: dict[str, Any], forms: dict[str, int]) -> None:
    write_dequantised(plain, tmp_path / "float", worth)
    ours, expected = loaded(tmp_path / "quantised"), loaded(tmp_path / "float")
    assert ours.forms == forms
    found, wanted = (next_logits(model, [5, 17, 200, 3]) for model in (ours, expected))
    assert (found - wanted).norm() < 0.03 * wanted.norm()


def test_a_module_that_is_ignored_is_read_plainly(plain: Path, tmp_path: Path) -> None:
    write(plain, tmp_path, "w4a16")
    w = load_file(plain / "model.safetensors")[f"{Q}.weight"]
    edit(tmp_path, lambda t: [t.pop(f"{Q}.{part}") for part in ("weight_packed", "weight_scale", "weight_shape")])
    edit(tmp_path, lambda t: t.update({f"{Q}.weight": w}))
    assert refusal(tmp_path).field == f"{Q}.weight_packed"
    tell(tmp_path, lambda q: q.update(ignore=["lm_head", "re:.*q_proj$"]))
    assert torch.equal(opened(tmp_path).tensor(f"{Q}.weight"), w)


@pytest.mark.parametrize(("field", "key"), [("dynamic", "-:.*q_proj"), ("extra_config", "q_proj")])
def test_a_module_that_gptq_leaves_out_is_read_plainly(plain: Path, tmp_path: Path, field: str, key: str) -> None:
    write(plain, tmp_path, "gptq")
    w = load_file(plain / "model.safetensors")[f"{Q}.weight"]
    edit(tmp_path, lambda t: [t.pop(f"{Q}.{part}") for part in ("qweight", "qzeros", "scales", "g_idx")])
    edit(tmp_path, lambda t: t.update({f"{Q}.weight": w}))
    tell(tmp_path, lambda q: q.update({field: {key: {"bits": 16} if field == "extra_config" else {}}}))
    assert torch.equal(opened(tmp_path).tensor(f"{Q}.weight"), w)


def test_modules_may_be_quantised_in_two_ways(plain: Path, tmp_path: Path) -> None:
    """A group that names a module goes before one that names its class."""
    worth = write(plain, tmp_path, "w4a16")
    eight, worth[f"{Q}.weight"] = quantised_folders.int_quantized(load_file(plain / "model.safetensors")[f"{Q}.weight"].double().numpy())
    edit(tmp_path, lambda t: [t.pop(f"{Q}.{part}") for part in ("weight_packed", "weight_scale", "weight_shape")])
    edit(tmp_path, lambda t: t.update({f"{Q}.{part}": tensor for part, tensor in eight.items()}))
    other = {"targets": ["re:.*q_proj"], "format": "int-quantized", "weights": {"num_bits": 8, "strategy": "channel"}}
    tell(tmp_path, lambda q: q["config_groups"].update(group_1=other))
    for name, expected in worth.items():
        np.testing.assert_allclose(opened(tmp_path).tensor(name).double().numpy(), expected, rtol=1e-6, atol=1e-8)


def test_biases_of_zeros_that_the_model_does_not_have_are_left_out(made: Callable[[str], Path]) -> None:
    folder = made("gptq")
    edit(folder, lambda t: t.update({f"{Q}.bias": torch.zeros(64)}))
    opened(folder)
    edit(folder, lambda t: t.update({f"{Q}.bias": torch.ones(64)}))
    assert refusal(folder).field == f"{Q}.bias"


# --- what is refused --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "told", "field", "says"),
    [
        ("gptq", {"quant_method": "bitsandbytes"}, "quant_method", "'bitsandbytes' is not supported; supported: awq, com"),
        ("gptq", {"bits": 3}, "bits", "3 is not supported"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format", "marlin"),
        ("gptq", {"is_marlin_format": True}, "is_marlin_format", "True"),
        ("gptq", {"dynamic": {"-:.*up.*": {}, "+:.*down.*": {"bits": 8}}}, "dynamic", "different ways"),
        ("gptq", {"extra_config": {"down": {"bits": 8}}}, "extra_config", "different ways"),
        ("gptq", {"dynamic": ["-:.*up.*"]}, "dynamic", "must be an object"),
        ("gptq", {"group_size": 0}, "group_size", "positive integer"),
        ("gptq", {"pack_dtype": "int16"}, "pack_dtype", "int16"),
        ("gptq", {"desc_act": "yes"}, "desc_act", "true or false"),
        ("awq", {"bits": 8}, "bits", "8 is not supported"),
        ("awq", {"version": "gemv"}, "version", "gemv"),
        ("awq", {"group_size": 128}, "group_size", "128 does not divide the 64 columns"),
        ("w4a16", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme", "KV cache"),
        ("w4a16", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format", "sparse-24"),
        ("w4a16", {"transform_config": {"config_groups": {"u": {}}}}, "transform_config", "not supported"),
        ("w4a16", {"format": "marlin-24"}, "config_groups.group_0.format", "marlin-24"),
        ("w4a16", {"config_groups": {}}, "config_groups", "is missing"),
        ("w4a16", {"ignore": ["re:("]}, "ignore", "regular expression"),
        ("fp8-transformers", {"weight_block_size": [128]}, "weight_block_size", "two positive integers"),
        ("fp8-transformers", {"activation_scheme": "none"}, "activation_scheme", "none"),
    ],
)
def test_a_variant_that_is_not_read_is_refused_by_its_field(
    made: Callable[[str], Path], variant: str, told: dict[str, Any], field: str, says: str
) -> None:
    folder = made(variant)
    tell(folder, lambda q: q.update(told))
    error = refusal(folder)
    assert error.file.name == "config.json" and error.field.endswith(field) and says in str(error)
    assert error.field.startswith("quantization_config.")


@pytest.mark.parametrize(
    ("variant", "told", "field"),
    [
        ("w4a16", {"weights": {"num_bits": 3}}, "weights.num_bits"),
        ("w4a16", {"weights": {"type": "float"}}, "format"),
        ("w4a16", {"weights": {"strategy": "tensor_group"}}, "weights.strategy"),
        ("w4a16", {"weights": {"actorder": "group"}}, "weights.actorder"),
        ("w4a16", {"weights": {"dynamic": True}}, "weights.dynamic"),
        ("w4a16", {"weights": {"codebook": "nf4"}}, "weights.codebook"),
        ("w4a16", {"weights": {"group_size": 48}}, "weights.group_size"),
        ("w4a16", {"targets": ["Embedding"]}, "targets"),
        ("w4a16", {"targets": "Linear"}, "targets"),
        ("w4a16", {"output_activations": TOKENS}, "output_activations"),
        ("w8a8", {"input_activations": TOKENS | {"dynamic": False}}, "input_activations.dynamic"),
        ("w8a8", {"input_activations": TOKENS | {"symmetric": False}}, "input_activations.symmetric"),
        ("w8a8", {"input_activations": TOKENS | {"strategy": "tensor"}}, "input_activations.dynamic"),
        ("w8a8", {"input_activations": TOKENS | {"num_bits": 4}}, "input_activations.num_bits"),
        ("fp8", {"weights": {"num_bits": 4, "type": "float"}}, "weights.num_bits"),
        ("fp8", {"weights": {"type": "float", "symmetric": False}}, "weights.symmetric"),
    ],
)
def test_a_group_that_is_not_read_is_refused_by_its_field(
    made: Callable[[str], Path], variant: str, told: dict[str, Any], field: str
) -> None:
    folder = made(variant)

    def change(q: dict[str, Any]) -> None:
        group = q["config_groups"]["group_0"]
        group |= told | ({"weights": group["weights"] | told["weights"]} if "weights" in told else {})

    tell(folder, change)
    assert refusal(folder).field == f"quantization_config.config_groups.group_0.{field}"


SOME = np.random.default_rng(0).standard_normal((64, 64))
PARTS = [(variant, part) for variant, (make_, _) in VARIANTS.items() for part in make_(SOME)[0]]
MAY_BE_MISSING = {(v, p) for v, p in PARTS if p == "input_scale" or (p == "g_idx" and v != "gptq-ordered")} | {("awq-symmetric", "qzeros")}


@pytest.mark.parametrize(("variant", "part"), PARTS)
def test_a_part_that_is_missing_misshapen_or_mistyped_is_refused_by_name(made: Callable[[str], Path], variant: str, part: str) -> None:
    folder, name = made(variant), f"{Q}.{part}"
    whole = load_file(folder / "model.safetensors")[name]
    edit(folder, lambda t: t.pop(name))
    if (variant, part) not in MAY_BE_MISSING:
        # Without the part that says so, the matrix counts as a plain one, and its other parts are too many.
        assert refusal(folder).field.startswith(f"{Q}.")
    for wrong in (torch.cat((whole.reshape(-1), whole.reshape(-1)[:1])), whole.to(torch.float64) if whole.dim() else whole.bool()):
        edit(folder, partial(dict.update, **{name: wrong}))
        assert refusal(folder).field in (name, f"{Q}.weight")


@pytest.mark.parametrize(("variant", "part"), [(v, p) for v, p in PARTS if "scale" in p and p != "input_scale"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_scales_that_are_no_numbers_are_refused_by_name(made: Callable[[str], Path], variant: str, part: str, value: float) -> None:
    folder = made(variant)
    edit(folder, lambda t: t[f"{Q}.{part}"].view(-1)[-1:].fill_(value))
    error = refusal(folder)
    assert error.field == f"{Q}.{part}" and "not finite" in str(error) and error.file.name == "model.safetensors"


def test_numbers_that_make_no_sense_are_refused_by_name(made: Callable[[str], Path], plain: Path) -> None:
    folder = made("gptq")
    edit(folder, lambda t: t[f"{Q}.qzeros"].fill_(-1))  # 15 stored, which is 16, or 0 to a tool that cuts it off
    assert refusal(folder).field == f"{Q}.qzeros" and "gptq_v2" in str(refusal(folder))
    folder = made("gptq-ordered")
    edit(folder, lambda t: t[f"{Q}.g_idx"][:1].fill_(2))
    assert refusal(folder).field == f"{Q}.g_idx" and "there are 2" in str(refusal(folder))
    folder = made("w4a16")
    edit(folder, lambda t: t[f"{Q}.weight_shape"].copy_(torch.tensor([64, 63])))
    assert refusal(folder).field == f"{Q}.weight_shape" and "[64, 63]" in str(refusal(folder))
    folder = made("fp8")
    edit(folder, lambda t: t[f"{Q}.weight"].view(torch.uint8)[3, 3:4].fill_(0x7F))  # E4M3's NaN
    assert refusal(folder).field == f"{Q}.weight"


@pytest.mark.parametrize("variant", ["gptq", "awq", "w4a16", "w8a8", "fp8"])
def test_a_damaged_file_is_refused_whatever_is_cut_off_or_overwritten(made: Callable[[str], Path], variant: str) -> None:
    """Anything but a CheckpointError fails the test; bytes of numbers may change without notice (SHA256SUMS is for these)."""
    folder, rng = made(variant), random.Random(variant)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    header = int.from_bytes(whole[:8], "little")
    for at in [0, 7, 8, header, *(rng.randrange(len(whole)) for _ in range(20))]:
        file.write_bytes(whole[:at])
        assert refusal(folder).file == file
    for _ in range(60):
        at = rng.randrange(8 + header)
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :])
        try:
            checkpoint = opened(folder)
            for name in expected_tensors(read_config(folder)):
                checkpoint.matrix(name)
        except CheckpointError:
            pass
    file.write_bytes(whole)
    shutil.copy(file, folder / "kept")
    opened(folder)
