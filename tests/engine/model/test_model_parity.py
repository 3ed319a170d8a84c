"""Logits equal those of transformers for each architecture: in one prefill, in odd chunks and single steps, and in ragged batches, on a
pool whose blocks are in random order and whose unwritten slots hold NaN."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from baton.engine.choice import load_runner
from baton.engine.core.kvcache import KvPool
from baton.engine.core.protocol import Chunk
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.facts.fields import CheckpointError
from baton.engine.model import attention
from baton.engine.model.attention import PagedKv
from baton.engine.model.config_json import SUPPORTED, read_config
from baton.engine.model.naive import next_logits
from baton.engine.runner import ModelRunner

TOLERANCE = 1e-4  # absolute, on float32 logits whose standard deviation is about 5
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 199,
    "max_position_embeddings": 512,
}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR: dict[str, Any] = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 8,
    "beta_slow": 0.5,
}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.7, 2.1, 2.9, 3.1, 4.7],
    "long_factor": [50.0] * 8,
    "original_max_position_embeddings": 128,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 3, "moe_intermediate_size": 40}
GEMMA: dict[str, Any] = {**SIZES, "head_dim": 32, "query_pre_attn_scalar": 20, "sliding_window": 21, "final_logit_softcapping": 9.0}
GEMMA3_ROPES: dict[str, Any] = {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
DEEPSEEK: dict[str, Any] = {
    **SIZES,
    **EXPERTS,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "rms_norm_eps": 1e-2,  # the norms inside latent attention have their own epsilon
}
DEEPSEEK_YARN: dict[str, Any] = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama-one-kv-head": LlamaConfig(**{**SIZES, "num_key_value_heads": 1}),
    "llama-no-shared-kv-heads": LlamaConfig(**{**SIZES, "num_key_value_heads": 4}),
    "llama3-rope": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "linear-rope": LlamaConfig(**SIZES, rope_parameters=LINEAR),
    "yarn-rope": LlamaConfig(**SIZES, rope_parameters={**YARN, "rope_theta": 10.0}),  # the blend ends after the last pair
    "yarn-rope-whole-turns": LlamaConfig(**SIZES, rope_parameters={**YARN, "truncate": False, "attention_factor": 0.9}),
    "mistral": MistralConfig(**SIZES, sliding_window=None, head_dim=32),
    "mistral-window": MistralConfig(**SIZES, sliding_window=21),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2-upper-window": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=21, max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=5),
    "mixtral-fused": MixtralConfig(**SIZES, num_local_experts=5, sliding_window=21),
    "qwen3-moe": Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=8, norm_topk_prob=True, attention_bias=True),
    "qwen3-moe-fused": Qwen3MoeConfig(
        **{**SIZES, "num_hidden_layers": 4, "head_dim": 32}, **EXPERTS, num_experts=8, decoder_sparse_step=2, mlp_only_layers=[3]
    ),
    "gemma2": Gemma2Config(**GEMMA, attn_logit_softcapping=3.0),
    "gemma3": Gemma3TextConfig(**GEMMA, layer_types=["sliding_attention", "full_attention"], rope_parameters=GEMMA3_ROPES),
    "phi3": Phi3Config(**SIZES, pad_token_id=0),
    "phi3-window": Phi3Config(**SIZES, pad_token_id=0, sliding_window=21),
    "phi3-longrope": Phi3Config(**SIZES, pad_token_id=0, original_max_position_embeddings=128, rope_parameters=LONGROPE),
    "deepseek2": DeepseekV2Config(**DEEPSEEK, q_lora_rank=None),
    "deepseek2-groups": DeepseekV2Config(
        **{**DEEPSEEK, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"},
        q_lora_rank=28,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters=DEEPSEEK_YARN,
    ),
    "deepseek3": DeepseekV3Config(**DEEPSEEK, q_lora_rank=28, n_group=4, topk_group=2, rope_parameters=DEEPSEEK_YARN),
    "deepseek3-halves": DeepseekV3Config(
        **DEEPSEEK, q_lora_rank=None, n_group=1, topk_group=1, norm_topk_prob=False, rope_interleave=False, attention_bias=True
    ),
}
SHARDED = "llama"


def build(name: str, folder: Path) -> torch.nn.Module:
    """A random model whose vectors matter, too: transformers would initialize biases to 0 and norms to 1."""
    torch.manual_seed(7)
    config = CONFIGS[name]
    config.initializer_range = 0.3
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for vector in (p for p in model.parameters() if p.dim() == 1):
            vector.uniform_(0.5, 1.5)
        for bias in (b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")):
            bias.uniform_(-0.5, 0.5)
    size = {"max_shard_size": "100KB"} if name == SHARDED else {}
    model.save_pretrained(folder, save_original_format=not name.endswith("-fused"), **size)
    built: torch.nn.Module = model
    return built


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    return build(request.param, folder), folder


def reference(model: torch.nn.Module, tokens: list[int]) -> Tensor:
    """[T, V]"""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def random_tokens(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(SIZES["vocab_size"]) for _ in range(length)]


class Pages:
    """A runner on a pool full of NaN, and sequences whose blocks are drawn from it at random."""

    def __init__(self, folder: Path, block_size: int = 16, blocks: int = 120, dtype: str = "float32", compiled: bool = True) -> None:
        self.runner = load_runner(ModelRunner, folder, dtype=dtype, block_size=block_size, compiled=compiled)
        self.runner.attach(KvPool(self.runner.layout, blocks))
        # [N, L, 2, Hkv, bs, D]
        self.pool = torch.from_numpy(self.runner.pool.array).view(getattr(torch, dtype)).view(blocks, *self.runner.layout.block_shape)
        self.pool[:] = torch.nan
        self.free = list(range(blocks))
        random.Random(3).shuffle(self.free)
        self.seqs: list[Sequence] = []

    def sequence(self, length: int, seed: int) -> tuple[Sequence, list[int]]:
        """A sequence with room for `length` tokens but none known yet, and the tokens it will get."""
        tokens = random_tokens(length, seed)
        seq = Sequence(f"s{seed}", [], length, SamplingParams(max_tokens=1), root=b"")
        seq.blocks = [self.free.pop() for _ in range(-(-length // self.runner.layout.block_size))]
        self.seqs.append(seq)
        return seq, tokens

    def step(self, work: list[tuple[Sequence, list[int]]]) -> Tensor:
        """Gives each sequence its next tokens, computes them, and returns the logits after the last token of each."""
        for seq, tokens in work:
            seq.tokens += tokens
        logits = self.runner.run_logits([Chunk(seq, len(tokens)) for seq, tokens in work])
        for seq, tokens in work:
            seq.computed += len(tokens)
        self.poison()
        return logits

    def poison(self) -> None:
        """Puts NaN wherever no sequence has written."""
        size = self.runner.layout.block_size
        written = torch.zeros(self.pool.shape[0], size, dtype=torch.bool)
        for seq in self.seqs:
            positions = torch.arange(seq.computed)
            written[torch.tensor(seq.blocks)[positions // size], positions % size] = True
        self.pool.permute(0, 4, 1, 2, 3, 5)[~written] = torch.nan


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


def test_one_prefill_matches_transformers(pair: tuple[torch.nn.Module, Path]) -> None:
    model, folder = pair
    pages = Pages(folder)
    seq, tokens = pages.sequence(75, seed=1)
    expected = reference(model, tokens)
    assert expected.std() > 1, "logits too flat to tell anything apart"
    assert_close(pages.step([(seq, tokens)]), expected[-1:])


def test_odd_chunks_and_single_steps_match_transformers(pair: tuple[torch.nn.Module, Path]) -> None:
    model, folder = pair
    pages = Pages(folder, block_size=4)
    seq, tokens = pages.sequence(80, seed=2)
    expected = reference(model, tokens)
    done = 0
    for n in (1, 7, 13, 16, 2, 21, *[1] * 20):
        assert_close(pages.step([(seq, tokens[done : done + n])]), expected[done + n - 1][None])
        done += n
    assert done == len(tokens)


@pytest.mark.parametrize("compiled", [True, False])
def test_ragged_batches_of_prefill_chunks_and_decodes_match_transformers(pair: tuple[torch.nn.Module, Path], compiled: bool) -> None:
    model, folder = pair
    pages, rng = Pages(folder, compiled=compiled), random.Random(5)
    lengths = (3, 90, 17, 64, 33, 1, 49)
    made = [pages.sequence(length, seed) for seed, length in enumerate(lengths)]
    expected = [reference(model, tokens) for _, tokens in made]
    for _ in range(200):
        left = [i for i, (seq, tokens) in enumerate(made) if seq.computed < len(tokens)]
        if not left:
            break
        chosen = rng.sample(left, rng.randint(1, len(left)))
        sizes = [rng.choice((1, 1, 1, 5, 18)) for _ in chosen]
        logits = pages.step([(made[i][0], made[i][1][made[i][0].computed :][:n]) for i, n in zip(chosen, sizes, strict=True)])
        assert_close(logits, torch.stack([expected[i][made[i][0].computed - 1] for i in chosen]))
    assert all(seq.computed == len(tokens) for seq, tokens in made)


def test_the_naive_oracle_matches_transformers(pair: tuple[torch.nn.Module, Path]) -> None:
    model, folder = pair
    tokens = random_tokens(50, seed=9)
    assert_close(next_logits(load_runner(ModelRunner, folder).model, tokens), reference(model, tokens)[-1:])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    folder = tmp_path_factory.mktemp("llama")
    return build("llama", folder), folder


@pytest.mark.parametrize("group_bytes", [None, 1, attention.GROUP_BYTES], ids=["compiled", "many", "one"])
def test_decodes_of_any_length_match_in_one_or_many_groups(
    llama: tuple[torch.nn.Module, Path], monkeypatch: pytest.MonkeyPatch, group_bytes: int | None
) -> None:
    if group_bytes:
        monkeypatch.setattr(attention, "GROUP_BYTES", group_bytes)
    model, folder = llama
    pages = Pages(folder, block_size=2, blocks=600, compiled=not group_bytes)
    made = [pages.sequence(length, seed) for seed, length in enumerate((300, 2, 40, 41, 7, 150, 16))]
    for seq, tokens in made:
        pages.step([(seq, tokens[:-1])])
    logits = pages.step([(seq, tokens[-1:]) for seq, tokens in made])
    assert_close(logits, torch.stack([reference(model, tokens)[-1] for _, tokens in made]))


def test_garbage_reaches_the_logits_if_slots_are_not_cleared(llama: tuple[torch.nn.Module, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control, with plain torch: the compiled kernel does not read those slots."""
    monkeypatch.setattr(PagedKv, "clear", lambda *_: None)
    pages = Pages(llama[1], compiled=False)
    seq, tokens = pages.sequence(20, seed=1)
    pages.step([(seq, tokens[:-1])])
    assert pages.step([(seq, tokens[-1:])]).isnan().any()


def test_another_sequences_block_changes_the_logits(llama: tuple[torch.nn.Module, Path]) -> None:
    model, folder = llama
    pages = Pages(folder)
    (seq, tokens), (other, others) = pages.sequence(60, seed=1), pages.sequence(60, seed=2)
    pages.step([(seq, tokens[:-1]), (other, others)])
    seq.blocks[1] = other.blocks[1]
    assert (pages.step([(seq, tokens[-1:])]) - reference(model, tokens)[-1:]).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("name", ["llama", "mixtral", "gemma2", "gemma3", "phi3", "deepseek2-groups", "deepseek3"])
def test_bfloat16_follows_float32(tmp_path: Path, name: str) -> None:
    """Only the median is bounded: where two experts score almost the same, a token may go to the other one (in transformers as well)."""
    model = build(name, tmp_path)
    pages = Pages(tmp_path, dtype="bfloat16")
    seq, tokens = pages.sequence(60, seed=1)
    expected = reference(model, tokens)[29:]
    logits = [pages.step([(seq, tokens[:30])]), *(pages.step([(seq, [token])]) for token in tokens[30:])]
    errors = (torch.cat(logits) - expected).std(dim=-1) / expected.std(dim=-1)
    assert errors.median() < 0.05


def test_the_old_spelling_of_rope_scaling_is_read_the_same(tmp_path: Path) -> None:
    build("llama3-rope", tmp_path)
    new = read_config(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    scaling = raw.pop("rope_parameters")
    raw |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_config(tmp_path) == new
    scaling["type"] = scaling.pop("rope_type")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_config(tmp_path) == new
    assert new.ropes[0].kind == "llama3"
    assert new.ropes[0].original_positions == 64


def edit_config(folder: Path, **fields: object) -> None:
    file = folder / "config.json"
    raw = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: value for name, value in raw.items() if value is not None}))


SCALING = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama", {"rope_scaling": SCALING | {"rope_theta": 777.0}}),
        ("llama", {"rope_scaling": SCALING, "rope_theta": 10000.0}),
        ("llama3-rope", {"rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 1000.0}}),
        ("deepseek3", {"rope_scaling": SCALING | {"rope_theta": 1000.0, "mscale": 1.0, "mscale_all_dim": 0.5}}),
        ("gemma3", {"rope_scaling": {"factor": 2.0}}),
        ("gemma2", {"sliding_window_pattern": 3, "layer_types": None, "num_hidden_layers": 2}),
    ],
    ids=["theta-inside", "theta-outside", "llama3-to-linear", "deepseek", "gemma3-merges", "gemma2-ignores-the-pattern"],
)
def test_fields_given_twice_are_read_as_transformers_reads_them(tmp_path: Path, name: str, fields: dict[str, object]) -> None:
    build(name, tmp_path)
    before = read_config(tmp_path)
    edit_config(tmp_path, **fields)
    tokens = random_tokens(75, seed=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", dtype="float32").eval()
    assert_close(next_logits(load_runner(ModelRunner, tmp_path).model, tokens), reference(model, tokens)[-1:])
    assert (read_config(tmp_path) != before) is ("rope_scaling" in fields)


def test_rope_scaling_that_would_lose_the_base_is_refused(tmp_path: Path) -> None:
    """transformers silently falls back to its default."""
    build("llama3-rope", tmp_path)
    edit_config(tmp_path, rope_scaling=SCALING)
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters["rope_theta"] == 10000.0
    with pytest.raises(CheckpointError, match=r"rope_scaling: replaces rope_parameters.*1000\.0"):
        read_config(tmp_path)


def test_a_single_file_is_preferred_to_an_index_as_in_transformers(tmp_path: Path) -> None:
    model = build("llama", tmp_path / "shards")
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    other = build("llama-tied", tmp_path / "whole")
    edit_config(tmp_path / "whole", tie_word_embeddings=False)
    tensors = {key: value.contiguous() for key, value in other.state_dict().items()}
    save_file({key: value.clone() for key, value in tensors.items()}, tmp_path / "shards" / "model.safetensors")
    tokens, folder = random_tokens(20, seed=1), tmp_path / "shards"
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype="float32").eval()
    assert index["weight_map"] and not torch.equal(reference(model, tokens), reference(theirs, tokens))
    assert_close(next_logits(load_runner(ModelRunner, folder).model, tokens), reference(theirs, tokens)[-1:])


def architecture_of(config: PretrainedConfig) -> str:
    model: Any = AutoModelForCausalLM._model_mapping[type(config)]
    name: str = model.__name__
    return name


@pytest.mark.parametrize("name", CONFIGS)
def test_an_omitted_field_has_the_default_of_transformers(tmp_path: Path, name: str) -> None:
    config = CONFIGS[name]
    architecture = {"architectures": [architecture_of(config)]}
    fields, defaults = config.to_dict() | {"eos_token_id": 7}, type(config)().to_dict()
    (tmp_path / "config.json").write_text(json.dumps(fields | architecture))
    whole = read_config(tmp_path)
    rest = {field: value for field, value in fields.items() if field not in defaults or value != defaults[field]}
    (tmp_path / "config.json").write_text(json.dumps(rest | architecture))
    assert read_config(tmp_path) == whole


def test_the_sharded_folder_is_sharded(llama: tuple[torch.nn.Module, Path]) -> None:
    assert len(list(llama[1].glob("model-*.safetensors"))) > 1


def test_every_supported_architecture_is_compared() -> None:
    assert {architecture_of(config) for config in CONFIGS.values()} == set(SUPPORTED)


@pytest.mark.parametrize(("name", "fused"), [("mixtral", False), ("mixtral-fused", True), ("qwen3-moe", False), ("qwen3-moe-fused", True)])
def test_both_layouts_of_experts_are_read(tmp_path: Path, name: str, fused: bool) -> None:
    """Published files have a tensor for each matrix of each expert; transformers 5 can write one for all experts."""
    build(name, tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert any(key.endswith(".experts.gate_up_proj") for key in file.keys()) is fused  # noqa: SIM118


def test_a_longrope_model_is_limited_to_its_original_length(tmp_path: Path) -> None:
    build("phi3-longrope", tmp_path)
    assert read_config(tmp_path).max_positions == 128


def test_latent_attention_stores_one_vector_per_token_and_layer(tmp_path: Path) -> None:
    build("deepseek3", tmp_path)
    layout = load_runner(ModelRunner, tmp_path, block_size=16).layout
    assert layout.block_shape == (3, 1, 1, 16, 24 + 8)
    assert layout.value_dim == 24
