"""`baton quantize`: each method does what its paper says, each format says what was meant, and a folder is whole or not there."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Gemma2Config, LlamaConfig, MixtralConfig, Phi3Config, PretrainedConfig, Qwen2Config
from typer.testing import CliRunner

from baton.cli.main import app
from baton.cli.up import SHIPPED
from baton.engine.model.checkpoint import Checkpoint, expected_tensors
from baton.engine.model.config_json import read_config
from baton.engine.model.naive import next_logits
from baton.engine.model.ops import Ops
from baton.engine.model.transformer import Transformer
from baton.models.make_small import make
from baton.models.quantise import formats, methods, shards
from baton.models.quantise.awq import scaling
from baton.models.quantise.gptq import DAMPING, gptq
from baton.models.quantise.inputs import InputSums
from baton.models.quantise.methods import METHODS
from baton.models.quantise.rounding import Rounded, fit, nearest
from baton.models.quantise.sites import scale_columns, sites
from baton.models.quantise.smoothquant import by_rows, migration
from baton.models.quantise.walk import Walk
from baton.models.quantise.whole import Done, quantise

NAMES = tuple(METHODS)
TEXTS = [list(range(5, 55)), list(range(100, 140))]
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 199,
    "max_position_embeddings": 128,
}
FAMILIES: dict[str, PretrainedConfig] = {
    "LlamaForCausalLM": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "Qwen2ForCausalLM": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "Gemma2ForCausalLM": Gemma2Config(**SIZES, head_dim=16, query_pre_attn_scalar=20),
    "Phi3ForCausalLM": Phi3Config(**SIZES, pad_token_id=0),
    "MixtralForCausalLM": MixtralConfig(**SIZES, num_local_experts=2),
}


def family(name: str, folder: Path) -> Path:
    """A model with random weights, without a tokenizer."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**FAMILIES[name].to_dict(), "architectures": [name]}))
    if name != "MixtralForCausalLM":
        rng = torch.Generator().manual_seed(3)
        tensors = {each: torch.randn(shape, generator=rng) / 5 for each, shape in expected_tensors(read_config(folder)).items()}
        save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "plain"
    make(path, hidden=64, layers=2, heads=4, kv_heads=2, vocab=300, context=128)
    return path


@pytest.fixture
def inputs() -> InputSums:
    """Neighbouring columns are alike, and some are much larger than others."""
    rng = torch.Generator().manual_seed(1)
    rows = torch.randn(400, 64, generator=rng)
    rows = (rows + 2 * rows[:, :1] + rows.roll(1, 1)) * torch.logspace(-1, 1, 64)[torch.randperm(64, generator=rng)]
    found = InputSums.none(64)
    for part in rows.split(150):
        found.add(part, 100)
    return found


@pytest.fixture
def w() -> Tensor:
    return torch.randn(48, 64, generator=torch.Generator().manual_seed(2)) / 8


def transformer(folder: Path, tensors: dict[str, Tensor] | None = None) -> Transformer:
    config = read_config(folder)
    read = tensors.__getitem__ if tensors else Checkpoint(folder, config).tensor
    return Transformer(config, read, torch.float32, torch.device("cpu"), Ops())


def made(model: Path, out: Path, name: str, group: int | None = None) -> Done:
    return quantise(model, out, name, TEXTS, group, lambda line: None)


# Methods


def test_inputs_tell_how_far_outputs_are_apart(inputs: InputSums, w: Tensor) -> None:
    rows = torch.randn(50, 64)
    found = InputSums.none(64)
    for part in rows.split(20):
        found.add(part, 100)
    wrong = w / 7
    assert found.error(wrong) == pytest.approx(float((rows @ wrong.t()).square().sum()) / 50, rel=1e-4)
    assert torch.equal(found.sample, rows) and torch.equal(found.largest, rows.abs().amax(0))
    assert len(inputs.sample) <= 256 and inputs.count == 400


def test_gptq_makes_the_best_of_every_column_by_the_definition(inputs: InputSums, w: Tensor) -> None:
    """Column by column, with the whole problem solved anew each time: the later columns are what makes the error least."""
    hessian = inputs.hessian.double() + torch.eye(64).double() * DAMPING * inputs.hessian.diagonal().mean()
    left = w.double().clone()
    expected = torch.empty(w.shape)
    for i in range(64):
        if i % 16 == 0:
            grid = fit(left[:, None, i : i + 16].float(), 4, True)
        numbers = grid.numbers(left[:, i, None, None].float())
        expected[:, i] = numbers[:, 0, 0]
        error = left[:, i] - grid.worth(numbers)[:, 0, 0]
        if i < 63:  # least squares: the others take over what column i no longer does
            left[:, i + 1 :] += error[:, None] * torch.linalg.solve(hessian[i + 1 :, i + 1 :], hessian[i + 1 :, i])
    found = gptq(w, inputs, 4, 16)
    assert (found.numbers.float() == expected).float().mean() > 0.99, "but for rounding in near ties"


@pytest.mark.parametrize("block", [24, 64, 128])  # groups end within blocks, and reach beyond them
def test_gptq_does_not_depend_on_its_blocks(block: int, inputs: InputSums, w: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    whole_ = gptq(w, inputs, 4, 32)
    monkeypatch.setattr("baton.models.quantise.gptq.BLOCK", block)
    assert (gptq(w, inputs, 4, 32).numbers == whole_.numbers).float().mean() > 0.99


def test_gptq_and_awq_are_nearer_to_the_outputs_than_rounding(inputs: InputSums, w: Tensor) -> None:
    by_itself = {symmetric: inputs.error(nearest(w, 4, 32, symmetric).worth() - w) for symmetric in (True, False)}
    assert inputs.error(gptq(w, inputs, 4, 32).worth() - w) < 0.5 * by_itself[True]
    s = scaling([w], inputs, (1, 1), 4, 32)
    assert inputs.error(nearest(w * s, 4, 32, False).worth() / s - w) < 0.8 * by_itself[False]


def test_gptq_takes_columns_that_are_never_used_or_all_alike(w: Tensor) -> None:
    alike = InputSums.none(64)
    alike.add(torch.randn(30, 1) * torch.ones(64) * (torch.arange(64) > 7), 10)
    assert gptq(w, alike, 4, 32).worth().isfinite().all()
    alike.hessian[0, 0] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        gptq(w, alike, 4, 32)


def test_smoothquant_evens_out_what_is_hard_to_round_and_nothing_else(w: Tensor) -> None:
    rows = torch.randn(200, 64, generator=torch.Generator().manual_seed(4))
    for outlier, better in ((1.0, 1.01), (100.0, 0.3)):
        met = InputSums.none(64)
        met.add(rows * torch.where(torch.arange(64) == 9, outlier, 1.0), 300)
        s = migration([w], met)
        method, x = METHODS["smoothquant"], met.sample
        plainly = method.error(w, nearest(w, 8, 64, True).worth(), met)
        assert plainly == pytest.approx(float((by_rows(x) @ nearest(w, 8, 64, True).worth().t() - x @ w.t()).square().sum()) / len(x))
        assert method.error(w, nearest(w * s, 8, 64, True).worth(), met, s) < better * plainly


@pytest.mark.parametrize("name", [name for name in FAMILIES if "Mixtral" not in name])
def test_a_factor_of_columns_is_taken_back_where_their_inputs_are_made(name: str, tmp_path: Path) -> None:
    folder = family(name, tmp_path / name)
    config, tokens = read_config(folder), TEXTS[0]
    expected = next_logits(transformer(folder), tokens)
    tensors = load_file(folder / "model.safetensors")
    for i in range(config.layers):
        prefix = f"model.layers.{i}."
        own = {each.removeprefix(prefix): tensor for each, tensor in tensors.items() if each.startswith(prefix)}
        for site in sites(config):
            if site.norm or site.made_by:
                s = torch.rand(own[f"{site.names[0]}.weight"].shape[1]) + 0.5
                sets, repeats = site.heads
                s = s.view(sets, repeats, -1)[:, :1].expand(-1, repeats, -1).flatten()
                scale_columns(site, s, own, config)
    torch.testing.assert_close(next_logits(transformer(folder, tensors), tokens), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", [name for name in FAMILIES if "Mixtral" not in name])
def test_the_text_goes_through_the_layers_as_through_the_model(name: str, tmp_path: Path) -> None:
    folder = family(name, tmp_path / name)
    config = read_config(folder)
    model, checkpoint = transformer(folder), Checkpoint(folder, config)
    walk = Walk(checkpoint, config, TEXTS)
    for i in range(config.layers):
        own = {each.partition(f"layers.{i}.")[2]: checkpoint.tensor(each) for each in expected_tensors(config) if f"layers.{i}." in each}
        before = [text.clone() for text in walk.texts]
        found = walk.inputs(i, own)
        assert all(map(torch.equal, walk.texts, before)) and {each.count for each in found} == {sum(map(len, TEXTS))}
        walk.move(i, own)
    last = Ops().add_rms_norm(walk.texts[1], None, model.norm, config.norm_eps)[-1:]
    torch.testing.assert_close(model.logits(last), next_logits(model, TEXTS[1]), rtol=1e-4, atol=1e-4)


# Formats, read by their definition


def unpack(words: Tensor, order: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """int32 `[rows, n]` → `[rows, 8 n]`, with the number at place i of a word where `order` says."""
    unsigned = words.numpy().astype(np.int64) & 0xFFFFFFFF
    found = np.empty((*unsigned.shape, 8), np.int64)
    for i, place in enumerate(order):
        found[..., place] = unsigned // 16**i % 16
    return found.reshape(len(unsigned), -1)


def test_gptq_says_what_was_meant(w: Tensor) -> None:
    meant = nearest(w, 4, 32, True)
    parts = {name: part.numpy() for name, part in formats.gptq(meant).items()}
    numbers = unpack(torch.from_numpy(parts["qweight"].T.copy()), tuple(range(8))).T  # [in, out]
    zeros = unpack(torch.from_numpy(parts["qzeros"]), tuple(range(8))) + 1  # [groups, out]
    group = parts["g_idx"]
    assert {name: part.dtype.name for name, part in parts.items()} == {
        "qweight": "int32", "qzeros": "int32", "scales": "float16", "g_idx": "int32",
    }  # fmt: skip
    worth = (numbers - zeros[group]) * parts["scales"].astype(np.float64)[group]
    np.testing.assert_allclose(worth.T, meant.worth().numpy(), rtol=1e-6)


def test_awq_says_what_was_meant(w: Tensor) -> None:
    meant = nearest(w, 4, 32, False)
    parts, order = formats.awq(meant), (0, 2, 4, 6, 1, 3, 5, 7)
    numbers, zeros = unpack(parts["qweight"], order), unpack(parts["qzeros"], order)
    scales = parts["scales"].numpy().astype(np.float64)
    worth = (numbers - zeros.repeat(32, axis=0)) * scales.repeat(32, axis=0)
    np.testing.assert_allclose(worth.T, meant.worth().numpy(), rtol=1e-6)
    assert len(np.unique(zeros)) > 3, "else an order that is wrong would not show"


def test_int8_says_what_was_meant(w: Tensor) -> None:
    meant = nearest(w, 8, 64, True)
    parts = formats.int8(meant)
    worth = parts["weight"].double() * parts["weight_scale"].double()
    np.testing.assert_allclose(worth.numpy(), meant.worth().numpy(), rtol=1e-6)
    assert parts["weight"].dtype == torch.int8 and parts["weight_scale"].shape == (48, 1)


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_grid_reaches_from_end_to_end_and_has_a_zero(symmetric: bool) -> None:
    rows = torch.tensor(
        [[0.0, 0.0, 0.0, 0.0], [1e-9, -1e-9, 0.0, 0.0], [3.0, 4.0, 5.0, 0.0], [-1.0, -2.0, -7.0, 0.0], [60.0, -1e4, 2.0, 0.0]]
    )
    rounded = nearest(rows, 4, 4, symmetric)
    step = rounded.grid.scales.float()
    assert ((rounded.worth() - rows).abs() <= 0.51 * step).all()
    assert (rounded.worth()[:, 3] == 0).all()


# Folders


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_read_and_stands_for_the_model(name: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meant: list[Rounded] = []
    write = METHODS[name].write

    def kept(rounded: Rounded) -> dict[str, Tensor]:
        meant.append(rounded)
        return write(rounded)

    monkeypatch.setitem(methods.METHODS, name, replace(METHODS[name], write=kept))
    done = made(plain, tmp_path / "out", name)
    config = read_config(tmp_path / "out")
    read = Checkpoint(tmp_path / "out", config)
    matrices = [f"model.layers.{i}.{module}.weight" for i in range(2) for site in sites(config) for module in site.names]
    for matrix, rounded in zip(matrices, meant, strict=True):
        torch.testing.assert_close(read.tensor(matrix), rounded.worth(), rtol=1e-6, atol=0)
    expected, found = (next_logits(transformer(folder), TEXTS[0]) for folder in (plain, tmp_path / "out"))
    assert 0 < float((found - expected).square().mean() / expected.square().mean()) < (0.08 if done.group else 0.002)
    assert done.bytes_after < done.bytes_before and done.layers == 2 and done.tokens == 90
    assert done.error < done.error_nearest if done.group else done.error <= 1.01 * done.error_nearest


def test_the_tokenizer_and_the_template_come_along_and_the_weights_do_not(plain: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(plain, model)
    for name in ("chat_template.jinja", "LICENSE", "README.md", "other.safetensors", "adapter.bin"):
        (model / name).write_text("x")
    (model / "other.safetensors").unlink()
    made(model, tmp_path / "out", "int8")
    there = {file.name for file in (tmp_path / "out").iterdir()}
    assert there == {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE",
        "model.safetensors",
    }  # fmt: skip
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.pop("quantization_config")["quant_method"] == "compressed-tensors"
    assert config == json.loads((model / "config.json").read_text())


def test_a_large_model_is_written_in_parts(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(plain, tmp_path / "one", "gptq")
    monkeypatch.setattr(shards.Shards.__init__, "__defaults__", (40_000,))
    made(plain, tmp_path / "many", "gptq")
    assert len(list((tmp_path / "many").glob("model-*-of-*.safetensors"))) > 2
    one, many = (Checkpoint(folder, read_config(folder)) for folder in (tmp_path / "one", tmp_path / "many"))
    for name in expected_tensors(read_config(plain)):
        assert torch.equal(one.tensor(name), many.tensor(name)), name


def test_nothing_is_left_of_what_fails(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(shards, "save_file", full)
    with pytest.raises(OSError, match="no space"):
        made(plain, tmp_path / "out", "int8")
    assert not list(tmp_path.iterdir())


def damage(folder: Path, **altered: Tensor) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | altered, folder / "model.safetensors")


@pytest.mark.parametrize("name", NAMES)
def test_numbers_that_are_not_finite_are_refused_by_name(name: str, plain: Path, tmp_path: Path) -> None:
    model, place = tmp_path / "model", "model.layers.1.mlp.up_proj.weight"
    shutil.copytree(plain, model, ignore=shutil.ignore_patterns("SHA256SUMS"))
    damage(model, **{place: torch.full((192, 64), torch.nan)})
    with pytest.raises(ValueError, match=place):
        made(model, tmp_path / "out", name)
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_quantised_is_refused_at_once(plain: Path, tmp_path: Path) -> None:
    made(plain, tmp_path / "out", "awq")
    for model, name, group, said in (
        (plain, "gptq", 48, "--group: 48 divides the"),
        (plain, "int8", 32, "--group"),
        (tmp_path / "out", "gptq", None, "quantised already"),
        (family("MixtralForCausalLM", tmp_path / "mixtral"), "gptq", None, "MixtralForCausalLM is a mixture"),
    ):
        with pytest.raises(ValueError, match=said):
            made(model, tmp_path / "new", name, group)
    with pytest.raises(ValueError, match="not an empty folder"):
        made(plain, tmp_path / "out", "gptq")
    with pytest.raises(ValueError, match="not an empty folder"):
        made(plain, plain / "config.json", "gptq")
    (tmp_path / "empty").mkdir()
    made(plain, tmp_path / "empty", "int8")
    assert {file.name for file in tmp_path.iterdir()} == {"out", "mixtral", "empty"}


def test_a_matrix_that_fills_no_words_or_groups_is_named() -> None:
    for sizes, said in (({"a": (64, 64), "b": (12, 64)}, "b: 12 rows"), ({"a": (64, 64), "b": (64, 24)}, "24 columns of b")):
        with pytest.raises(ValueError, match=said):
            methods.group_of(METHODS["awq"], sizes, None)
    assert methods.group_of(METHODS["awq"], {"a": (64, 256), "b": (64, 96)}, None) == 32


def test_the_command_prints_what_it_cost_and_what_it_is_worth(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The fox ran home, and the girl told everybody. " * 20)
    asked = ["quantize", str(SHIPPED), str(tmp_path / "out"), "--method", "int8", "--calibration", str(text), "--tokens", "64", "--json"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    before, after = told["quality"]
    assert told["tokens"] == 64 and told["seconds"] > 0 and told["peak_mib"] > 50 and told["bytes_after"] < told["bytes_before"]
    assert after["held out"]["perplexity"] == pytest.approx(before["held out"]["perplexity"], rel=0.02)
    assert 0 < after["held out"]["kl"] < 0.01
    for wrong in ([*asked[:4], "int3"], asked, [*asked[:2], str(tmp_path / "new"), "--method", "gptq", "--group", "100"]):
        refused = CliRunner().invoke(app, wrong)
        assert refused.exit_code == 2 and not refused.stdout and refused.stderr
    assert not (tmp_path / "new").exists()
