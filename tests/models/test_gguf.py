"""GGUF files, written by the `gguf` package: what is unpacked computes what the file's numbers say, and damage is refused by name."""

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors import safe_open

from baton.engine.choice import load_runner
from baton.engine.facts.fields import CheckpointError
from baton.engine.facts.model_facts import end_tokens
from baton.engine.model.checkpoint import Checkpoint, expected_tensors
from baton.engine.model.config_json import read_config
from baton.engine.model.naive import next_logits
from baton.engine.runner import ModelRunner
from baton.models.gguf.unpack import cached, unpack
from router.tokenizer import Tokenizer

HIDDEN, HEADS, KV_HEADS, INNER, LAYERS = 256, 4, 2, 512, 1
WORDS = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
Floats = npt.NDArray[np.float32]


def silent(_: str) -> None:
    pass


def blocks(kind: Kind, rows: int, columns: int, rng: np.random.Generator) -> npt.NDArray[Any]:
    """Bytes of a type that the package cannot write: anything, with scales of an ordinary size."""
    size, width = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (rows, columns // size, width), np.uint8)
    scales = slice(-2, None) if kind == Kind.Q6_K else slice(0, 4)
    raw[..., scales] = np.full((rows, columns // size, 2), 0.0004, np.float16).view(np.uint8)[..., : raw[..., scales].shape[-1]]
    return raw.reshape(rows, -1)


def six_bits(raw: npt.NDArray[Any]) -> Floats:
    """Of Q6_K, number by number, as llama.cpp documents it."""
    made = []
    for block in raw.reshape(-1, 210).astype(np.int64):
        low, high, scale = block[:128], block[128:192], block[192:208]
        d = np.float32(block[208:210].astype(np.uint8).view(np.float16)[0])
        for i in range(256):
            half, quarter, at = i // 128, i % 128 // 32, i % 32
            nibble = low[64 * half + 32 * (quarter % 2) + at] >> 4 * (quarter // 2) & 15
            number = (nibble | (high[32 * half + at] >> 2 * quarter & 3) << 4) - 32
            made.append(d * np.float32(scale.astype(np.uint8).view(np.int8)[8 * half + 2 * quarter + at // 16]) * np.float32(number))
    return np.array(made, np.float32)


def four_bits(raw: npt.NDArray[Any]) -> Floats:
    """Of Q4_K."""
    made = []
    for block in raw.reshape(-1, 144).astype(np.int64):
        d, least = block[:4].astype(np.uint8).view(np.float16).astype(np.float32)
        s = block[4:16]
        for i in range(256):
            group = i // 32
            scale = s[group] & 63 if group < 4 else s[group + 4] & 15 | (s[group - 4] >> 6) << 4
            low = s[group + 4] & 63 if group < 4 else s[group + 4] >> 4 | (s[group] >> 6) << 4
            nibble = block[16 + 32 * (group // 2) + i % 32] >> 4 * (group % 2) & 15
            made.append(d * np.float32(scale) * np.float32(nibble) - least * np.float32(low))
    return np.array(made, np.float32)


def shapes(kind: str = "llama") -> dict[str, tuple[int, ...]]:
    kv = HIDDEN // HEADS * KV_HEADS
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(WORDS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    parts = {
        "attn_q": (HIDDEN, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN), "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER), "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,),
    }  # fmt: skip
    found |= {f"blk.0.{name}.weight": shape for name, shape in parts.items()}
    if kind == "qwen2":
        found |= {f"blk.0.attn_{name}.bias": (HIDDEN if name == "q" else kv,) for name in "qkv"}
    if kind == "qwen3":
        found |= {f"blk.0.attn_{name}_norm.weight": (HIDDEN // HEADS,) for name in "qk"}
    return found


def write(file: Path, stored: Kind = Kind.F32, kind: str = "llama", **changed: Any) -> dict[str, Floats]:
    """A model of one layer. Returns what its numbers are worth. `changed`: fields or tensors; None leaves one out."""
    rng, writer, worth = np.random.default_rng(0), gguf.GGUFWriter(file, kind), {}
    fields = {
        "block_count": LAYERS, "context_length": 64, "embedding_length": HIDDEN, "feed_forward_length": INNER,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    for name, value in ({f"{kind}.{name}": value for name, value in fields.items()} | changed.pop("fields", {})).items():
        if value is not None:
            (writer.add_uint32 if type(value) is int else writer.add_string if type(value) is str else writer.add_float32)(name, value)
    changed.pop("tokenizer", spm)(writer)
    for name, shape in (shapes(kind) | changed).items():
        if shape is None:
            continue
        plain = np.asarray(rng.standard_normal(shape) * 0.1, np.float32)
        used = stored if len(shape) == 2 else Kind.F32
        try:
            raw = gguf.quants.quantize(plain, used)
        except NotImplementedError:
            raw = blocks(used, shape[0], shape[1], rng)
        worth[name] = gguf.quants.dequantize(raw, used).astype(np.float32)
        if used in (Kind.Q4_K, Kind.Q6_K) and name == "blk.0.attn_k.weight":
            theirs = four_bits(raw) if used == Kind.Q4_K else six_bits(raw)
            np.testing.assert_allclose(worth[name].ravel(), theirs, rtol=1e-5, atol=1e-6)
        writer.add_tensor(name, raw, raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return worth


def spm(writer: gguf.GGUFWriter) -> None:
    words = [*WORDS[:-8], "▁", "a", "b", "ab", "▁ab", "ba", "c", "<|x|>"]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * (len(words) - 8) + [-10.0, -11.0, -12.0, -2.0, -1.0, -3.0, -13.0, 0.0])
    writer.add_token_types([3, 3, *[6] * (len(words) - 10), *[1] * 7, 3])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_uint32("tokenizer.ggml.eot_token_id", len(words) - 1)
    writer.add_chat_template("{% for m in messages %}<|x|>{{ m['content'] }}{% endfor %}")


def tensor(folder: Path, name: str) -> torch.Tensor:
    with safe_open(folder / "model.safetensors", "pt") as opened:
        found: torch.Tensor = opened.get_tensor(name)
    return found.float()


def logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    transformers = pytest.importorskip("transformers")
    with torch.inference_mode():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        found: torch.Tensor = model(torch.tensor([tokens])).logits[0]
        return found


def by_neighbours(x: Floats, theta: float = 10000.0) -> Floats:
    """Rotary embedding as llama.cpp computes it for `llama`: `[T, H, D]`, a pair is two neighbours."""
    dim = x.shape[-1]
    angles = np.arange(len(x))[:, None, None] * theta ** (-np.arange(0, dim, 2) / dim)
    turned = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)
    return np.stack([turned.real, turned.imag], -1).reshape(x.shape)


def as_llama_cpp(w: dict[str, Floats], tokens: list[int]) -> Floats:
    """Logits of a `llama` of one layer from the file's own numbers, in the file's own order of rows."""

    def norm(x: Floats, name: str) -> Floats:
        made: Floats = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w[f"{name}.weight"]
        return made

    x, dim = w["token_embd.weight"][tokens], HIDDEN // HEADS
    y = norm(x, "blk.0.attn_norm")
    q, k, v = ((y @ w[f"blk.0.attn_{name}.weight"].T).reshape(len(tokens), -1, dim) for name in "qkv")
    q, k = by_neighbours(q), by_neighbours(k)
    k, v = (np.repeat(part, HEADS // KV_HEADS, axis=1) for part in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / dim**0.5 + np.triu(np.full((len(tokens),) * 2, -np.inf), 1)
    share = np.exp(scores - scores.max(-1, keepdims=True))
    share /= share.sum(-1, keepdims=True)
    x = x + np.einsum("hqk,khd->qhd", share, v).reshape(len(tokens), -1) @ w["blk.0.attn_output.weight"].T
    y = norm(x, "blk.0.ffn_norm")
    gate = y @ w["blk.0.ffn_gate.weight"].T
    x = x + (gate / (1 + np.exp(-gate)) * (y @ w["blk.0.ffn_up.weight"].T)) @ w["blk.0.ffn_down.weight"].T
    return np.asarray(norm(x, "output_norm") @ w["token_embd.weight"].T)


@pytest.mark.parametrize("stored", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"])
def test_logits_are_those_of_the_dequantised_weights(stored: str, tmp_path: Path) -> None:
    """Without the order of q and k undone, they are not (by 0.1 and more)."""
    worth = write(tmp_path / "m.gguf", Kind[stored])
    unpack(tmp_path / "m.gguf", tmp_path / "m", silent, plainly=True)
    assert torch.equal(tensor(tmp_path / "m", "model.layers.0.mlp.up_proj.weight"), torch.from_numpy(worth["blk.0.ffn_up.weight"]))
    tokens = [0, 65, 254, 253, 90, 7]
    wanted = torch.from_numpy(as_llama_cpp({name: part.astype(np.float64) for name, part in worth.items()}, tokens)).float()
    torch.testing.assert_close(logits(tmp_path / "m", tokens), wanted, rtol=1e-3, atol=1e-3 * wanted.abs().max().item())


@pytest.mark.parametrize("stored", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"])
def test_blocks_are_kept_and_worth_what_the_library_says(stored: str, tmp_path: Path) -> None:
    worth = write(tmp_path / "m.gguf", Kind[stored])
    unpack(tmp_path / "m.gguf", tmp_path / "m", silent)
    unpack(tmp_path / "m.gguf", tmp_path / "plain", silent, plainly=True)
    kept, plain = (Checkpoint(folder, read_config(folder)) for folder in (tmp_path / "m", tmp_path / "plain"))
    assert (tmp_path / "m" / "model.safetensors").stat().st_size < (1.1 if stored != "Q6_K" else 6) * (tmp_path / "m.gguf").stat().st_size
    up = torch.from_numpy(worth["blk.0.ffn_up.weight"])
    torch.testing.assert_close(kept.tensor("model.layers.0.mlp.up_proj.weight"), up, rtol=0, atol=1e-7)
    for name in expected_tensors(read_config(tmp_path / "m")):
        torch.testing.assert_close(kept.tensor(name), plain.tensor(name).float(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("stored", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K"])
def test_blocks_are_computed_as_they_are_and_the_embedding_is_held_once(stored: str, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", Kind[stored])
    unpack(tmp_path / "m.gguf", tmp_path / "m", silent)
    runner = load_runner(ModelRunner, tmp_path / "m")
    assert runner.matrices == "5 computed as stored" and not isinstance(runner.model.embedding, torch.Tensor)
    dequantised = load_runner(ModelRunner, tmp_path / "m", weight_dtype="float")
    found, wanted = (next_logits(each.model, [0, 65, 254, 90]) for each in (runner, dequantised))
    assert (found - wanted).norm() < 0.03 * wanted.norm()


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_other_architectures_keep_the_order_of_rows(kind: str, tmp_path: Path) -> None:
    worth = write(tmp_path / "m.gguf", kind=kind)
    unpack(tmp_path / "m.gguf", tmp_path / "m", silent)
    assert torch.equal(tensor(tmp_path / "m", "model.layers.0.self_attn.q_proj.weight"), torch.from_numpy(worth["blk.0.attn_q.weight"]))


def test_the_tokenizer_joins_by_score_and_falls_back_to_bytes(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf")
    unpack(tmp_path / "m.gguf", tmp_path / "m", silent)
    tokenizer, first = Tokenizer.load(tmp_path / "m"), len(WORDS) - 8
    assert tokenizer.encode("abba") == [0, first + 4, first + 5]  # bos, " ab", "ba"
    ids = tokenizer.encode("abc é\n", add_special_tokens=False)
    assert tokenizer.decode(ids) == "abc é\n"
    assert tokenizer.render([("user", "c")])[0] == len(WORDS) - 1
    assert set(end_tokens(tmp_path / "m")) == {1, len(WORDS) - 1}


def test_a_file_is_unpacked_once_for_its_content(tmp_path: Path) -> None:
    said: list[str] = []
    write(tmp_path / "m.gguf")
    folder = cached(tmp_path / "m.gguf", said.append, tmp_path / "cache")
    assert cached(tmp_path / "m.gguf", said.append, tmp_path / "cache") == folder and len(said) == 1 and folder.name == "m"
    write(tmp_path / "m.gguf", Kind.Q8_0)
    assert cached(tmp_path / "m.gguf", said.append, tmp_path / "cache") != folder


def refused(tmp_path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        unpack(tmp_path / "m.gguf", tmp_path / "m", silent)
    assert not list(tmp_path.glob("*m")) and not list(tmp_path.glob(".*")), "something is left"
    assert str(tmp_path / "m.gguf") in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"kind": "gemma2"}, "general.architecture: 'gemma2' is not supported"),
        ({"fields": {"llama.expert_count": 8}}, "mixtures of experts"),
        ({"fields": {"llama.attention.sliding_window": 8}}, "llama.attention.sliding_window: is not known"),
        ({"fields": {"llama.rope.scaling.type": "yarn"}}, "llama.rope.scaling.type: 'yarn'"),
        ({"fields": {"llama.block_count": 2}}, "model.layers.1.*is missing"),
        ({"fields": {"llama.context_length": None}}, "llama.context_length: is missing"),
        ({"fields": {"llama.vocab_size": 7}}, "llama.vocab_size: 7, but the embedding has"),
        ({"blk.0.ffn_up.weight": None}, "ffn_up.*is missing|up_proj.weight: is missing"),
        ({"blk.0.ffn_up.weight": (INNER // 2, HIDDEN)}, "blk.0.ffn_up.weight: shape"),
        ({"blk.0.what.weight": (3,)}, "blk.0.what.weight: no tensor"),
        ({"tokenizer": lambda writer: None}, "tokenizer.ggml.tokens: is missing"),
        ({"stored": Kind.TQ2_0}, "type TQ2_0 is not supported"),
        ({"rope_freqs.weight": (32,)}, "rope_freqs.weight: stretches"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused_by_name(changed: dict[str, Any], says: str, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", **changed)
    assert re.search(says, refused(tmp_path))


@pytest.mark.parametrize("size", [0, 3, 20, 200, 5000, -33, -1])
def test_a_truncated_file_is_refused(size: int, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf")
    whole = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(whole[:size])
    refused(tmp_path)


def test_a_count_of_tensors_that_is_too_small_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf")
    whole = bytearray((tmp_path / "m.gguf").read_bytes())
    whole[8] -= 1
    (tmp_path / "m.gguf").write_bytes(whole)
    refused(tmp_path)


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf")
    whole = bytearray((tmp_path / "m.gguf").read_bytes())
    whole[-4:] = np.array([np.nan], np.float32).tobytes()
    (tmp_path / "m.gguf").write_bytes(whole)
    assert "not finite" in refused(tmp_path)
