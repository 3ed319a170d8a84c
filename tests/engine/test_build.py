"""Building an engine from a folder: how many blocks, how long a sequence, and what is refused, with the name of the key to change."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from host_pool import on_host
from pydantic import ValidationError
from safetensors.numpy import load_file, save_file

from baton.engine.build import BuildError, build, check, count_blocks, pool_bytes, warm_up
from baton.engine.choice import load_runner
from baton.engine.core.engine import Engine
from baton.engine.core.kvcache import KvPool
from baton.engine.core.limits import Limits
from baton.engine.core.progress import Step, told_to
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.core.toy import ToyRunner, naive
from baton.engine.defaults import DeviceFacts, settle, stored_dtype
from baton.engine.facts.fields import CheckpointError
from baton.engine.facts.fingerprint import fingerprint, tokenizer_fingerprint
from baton.engine.gpu.device import free_memory, share_memory
from baton.engine.model.naive import generate
from baton.engine.options import Options
from baton.engine.runner import ModelRunner
from baton.models.make_small import make, make_toy

MIB = 1 << 20
BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4  # of the small model: layers, k and v, heads, tokens, dim, float32


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small")
    make(path, hidden=64, layers=2, heads=4, kv_heads=2, vocab=300, context=96)
    return path


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("toy")
    make_toy(path, context=200)
    return path


def options(path: Path, **change: Any) -> Options:
    return Options.of(path, kv_memory_mib=4, threads=1, max_num_seqs=4, max_num_batched_tokens=64).but(**change)


def settled(**keys: Any) -> Options:
    return settle(Options.of(Path(), **keys), DeviceFacts("cpu")).options


def altered(folder: Path, target: Path, change: Callable[[Path], object]) -> Path:
    copytree(folder, target)
    change(target)
    return target


def run(engine: Engine, prompt: list[int], max_tokens: int = 6) -> list[int]:
    seq = Sequence("s", list(prompt), len(prompt), SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True), b"root")
    engine.add(seq)
    while not engine.idle:
        engine.step()
    return seq.tokens[len(prompt) :]


# --- how many blocks -----------------------------------------------------------------------------------------------------------------


def test_the_memory_budget_sets_the_number_of_blocks() -> None:
    plain = settled(kv_memory_mib=10 + 5 / MIB)
    assert count_blocks(plain, 1000, MIB // 10, available=0) == 100
    share = plain.but(kv_memory_mib=None, kv_memory_fraction=0.25)
    assert count_blocks(share, 1000, MIB // 10, available=40 * MIB) == 100
    assert count_blocks(share.but(kv_memory_fraction=0.5), 1000, MIB // 10, available=40 * MIB) == 200


def test_there_are_at_most_twice_the_blocks_that_can_be_used() -> None:
    plenty = settled(kv_memory_mib=1 << 20, max_num_seqs=3)
    assert count_blocks(plenty, 33, 1000, available=0) == 2 * 3 * 3


@pytest.mark.parametrize(("memory", "named"), [({"kv_memory_mib": 2}, "engine.kv_memory_mib"), ({}, "engine.kv_memory_fraction")])
def test_a_pool_too_small_for_one_whole_sequence_is_refused(memory: dict[str, Any], named: str) -> None:
    asked = settled(kv_memory_fraction=0.1, **memory)
    with pytest.raises(BuildError, match=rf"^{named}: 2.0 MiB hold 320 tokens.*336 tokens needs \(2.1 MiB\).*model.max_model_len"):
        count_blocks(asked, 336, MIB // 10, available=20 * MIB)
    assert count_blocks(asked, 320, MIB // 10, available=20 * MIB) == 20


# --- what is built -------------------------------------------------------------------------------------------------------------------


def test_a_built_engine_generates(small: Path) -> None:
    seen: list[Step] = []
    with told_to(seen.append):
        built = build(options(small))
    loads = [step for step in seen if step.what == "loading weights"]
    assert loads and loads[-1].done == loads[-1].total == len(loads)
    assert built.max_model_len == built.engine.max_len == 96
    assert built.engine.pool.num_blocks == built.engine.runner.pool.num_blocks == 2 * 4 * 6 < 4 * MIB // BLOCK_BYTES
    assert built.model_fingerprint.startswith(f"{fingerprint(small)}-float32-")
    assert built.tokenizer_fingerprint == tokenizer_fingerprint(small)
    assert pool_bytes(options(small)) == built.engine.runner.pool.nbytes, "known without the weights"
    runner = built.engine.runner
    assert isinstance(runner, ModelRunner) and runner.layout.block_bytes == BLOCK_BYTES
    prompt = list(range(50, 75))
    assert run(built.engine, prompt) == [
        answer.token for answer in generate(runner.model, prompt, SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))
    ]


def test_the_toy_is_built_from_the_same_options(toy: Path) -> None:
    built = build(options(toy, max_model_len=100))
    assert isinstance(built.engine.runner, ToyRunner) and built.max_model_len == 100
    assert run(built.engine, [1, 2, 3]) == naive([1, 2, 3], SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))


def test_the_toy_on_a_gpu_is_refused(toy: Path) -> None:
    with pytest.raises(BuildError, match=r"^engine\.device: the toy computes on a CPU, not on cuda$"):
        build(options(toy, device="cuda"))


@pytest.mark.parametrize("model", ["small", "toy"])
@pytest.mark.parametrize("longest", [2, 17, 96])
def test_warming_up_leaves_no_block_owned_or_cached(model: str, longest: int, request: pytest.FixtureRequest) -> None:
    engine = build(options(request.getfixturevalue(model), max_model_len=longest, max_num_seqs=1, max_num_batched_tokens=64)).engine
    assert on_host(engine.runner.pool).array.any(), "nothing was computed"
    engine.pool.check()
    assert (engine.pool.num_owned, engine.pool.num_cached, engine.pool.available) == (0, 0, engine.pool.num_blocks)
    assert not engine.pool.sealed_keys() and not engine.pool.drain_changes() and not engine.sequences


def test_data_left_in_blocks_by_warming_up_changes_no_token(small: Path) -> None:
    def engine(warm: bool) -> Engine:
        runner = load_runner(ModelRunner, small)
        runner.attach(KvPool(runner.layout, 6))
        if warm:
            warm_up(runner, 90)
        return Engine(runner, Limits(4, 64), 96)

    prompt = list(range(100, 120))
    warm, cold = engine(True), engine(False)
    assert run(warm, prompt, 60) == run(cold, prompt, 60)
    assert np.array_equal(on_host(warm.runner.pool).array[:4], on_host(cold.runner.pool).array[:4])


def test_the_type_of_a_checkpoint_is_read_under_either_name() -> None:
    for config in (
        {"torch_dtype": "bfloat16"},
        {"dtype": "bfloat16", "torch_dtype": None},
        {"dtype": "bfloat16", "torch_dtype": "float32"},
    ):
        assert stored_dtype(config) == "bfloat16"
    assert stored_dtype({}) is None


def test_on_a_cpu_an_engine_computes_in_float32_whatever_the_checkpoint_says(small: Path, tmp_path: Path) -> None:
    half = altered(small, tmp_path / "half", lambda folder: edit(folder, torch_dtype="bfloat16"))
    assert build(options(half)).engine.runner.layout.dtype == "float32"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_type_that_is_asked_for_is_computed_in(small: Path, dtype: str) -> None:
    built = build(options(small, dtype=dtype))
    assert built.engine.runner.layout.dtype == dtype and f"-{dtype}-" in built.model_fingerprint
    assert len(run(built.engine, list(range(50, 75)))) == 6


# --- what is refused -----------------------------------------------------------------------------------------------------------------


def edit(folder: Path, **change: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))


def break_weights(folder: Path) -> None:
    weights = {name: array.copy() for name, array in load_file(folder / "model.safetensors").items()}
    weights["model.norm.weight"][3] = np.nan
    save_file(weights, folder / "model.safetensors")


def test_more_positions_than_the_model_has_are_refused(small: Path) -> None:
    with pytest.raises(BuildError, match=r"^model.max_model_len: 97 is more than the context of the model, 96 tokens"):
        build(options(small, max_model_len=97))
    assert build(options(small, max_model_len=96)).max_model_len == 96


def test_a_memory_budget_below_one_sequence_is_refused(small: Path) -> None:
    with pytest.raises(BuildError, match=r"^engine.kv_memory_mib: .*96 tokens"):
        build(options(small, kv_memory_mib=5 * BLOCK_BYTES / MIB))
    assert build(options(small, kv_memory_mib=6 * BLOCK_BYTES / MIB)).engine.pool.num_blocks == 6


@pytest.mark.parametrize("how", [{"device": "cpu"}, {"device": "cuda", "kind": "vllm"}])
def test_memory_that_is_not_a_devices_is_not_shared_as_one(how: dict[str, Any]) -> None:
    with pytest.raises(BuildError, match=r"kv\.transport: cuda_ipc needs engine\.device cuda and engine\.kind baton"):
        check(Options.of(Path("model"), direct=True, **how))


def test_a_gpu_without_room_for_the_weights_is_a_sentence(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the start at once, with the status of what will not do better the next time."""

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. If reserved but unallocated memory is large, wait")

    monkeypatch.setattr("baton.engine.choice.load", full)
    with pytest.raises(BuildError, match=r"^engine.device: the GPU has too little.*: CUDA out of memory\. Tried to allocate 2\.00 GiB\.$"):
        build(Options.of(small))


def test_memory_of_a_shared_gpu_is_a_share_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10)
    device = torch.device("cuda")
    assert [free_memory(device, share) for share in (1.0, 0.9, 0.5, 0.1)] == [60, 60, 30, 0]
    limits: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limits.append)
    for share in (1.0, 0.5):
        share_memory(share)
    assert limits == [0.5]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_refused(small: Path) -> None:
    with pytest.raises(BuildError, match=r"engine\.device: this torch cannot use a cuda device: .*(CUDA|NVIDIA)"):
        build(Options.of(small, device="cuda"))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"block_size": 0}, "engine.block_size"),
        ({"block_size": -16}, "engine.block_size"),
        ({"max_model_len": 1}, "model.max_model_len"),
        ({"max_model_len": 0}, "model.max_model_len"),
        ({"kv_memory_mib": 0}, "engine.kv_memory_mib"),
        ({"kv_memory_mib": -1}, "engine.kv_memory_mib"),
        ({"threads": 0}, "engine.threads"),
        ({"kv_memory_fraction": 0.0}, "engine.kv_memory_fraction"),
        ({"kv_memory_fraction": 1.5}, "engine.kv_memory_fraction"),
        ({"speculation": "oracle"}, "engine.speculation"),
        ({"speculation_tokens": 0}, "engine.speculation_tokens"),
    ],
)
def test_impossible_options_are_refused_by_name(change: dict[str, Any], key: str) -> None:
    with pytest.raises(ValidationError, match=key.partition(".")[2]):
        Options.of(Path(), **change)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": -4}, "max_num_seqs"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
        ({"max_queue": 0}, "max_queue"),
        ({"speculation_batch_tokens": 0}, "speculation_batch_tokens"),
        ({"speculation_branches": 0}, "speculation_branches"),
        ({"reserve_growth": -0.1}, "reserve_growth"),
        ({"reserve_growth": 1.1}, "reserve_growth"),
        ({"batch_wait_s": -1.0}, "batch_wait_s"),
    ],
)
def test_impossible_limits_are_refused_by_name(change: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=rf"^engine.{key}: must be .*got "):
        Limits(**change)
    Limits(1, 1, 0.0, 1, batch_wait_s=0.0)


def test_a_missing_tokenizer_is_refused_before_the_weights_are_loaded(small: Path, tmp_path: Path) -> None:
    folder = altered(small, tmp_path / "model", lambda folder: (folder / "tokenizer.json").unlink())
    steps: list[Step] = []
    with told_to(steps.append), pytest.raises(BuildError, match=r"tokenizer\.json"):
        build(options(folder))
    assert not steps


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"^model.path: .*nothing holds no config.json"):
        build(options(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        (lambda folder: (folder / "config.json").write_text("{"), BuildError, r"model.path: .*config.json cannot be read"),
        (lambda folder: (folder / "config.json").write_text("[1]"), BuildError, r"model.path: .*config.json is not a JSON object"),
        (lambda folder: edit(folder, architectures=["GPT2LMHeadModel"]), CheckpointError, r"GPT2LMHeadModel.*supported: LlamaForCausalLM"),
        (lambda folder: edit(folder, architectures=7), CheckpointError, "architectures: 7 is not supported"),
        (lambda folder: (folder / "model.safetensors").unlink(), CheckpointError, "model.safetensors"),
        (lambda folder: (folder / "tokenizer.json").unlink(), BuildError, r"model.path: .* holds no tokenizer.json"),
        (break_weights, BuildError, r"model.path: the weights in .* not numbers"),
    ],
    ids=["invalid-json", "not-an-object", "unsupported", "no-architecture", "no-weights", "no-tokenizer", "nan"],
)
def test_a_folder_that_cannot_be_served_is_refused(
    small: Path, tmp_path: Path, change: Callable[[Path], object], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        build(options(altered(small, tmp_path / "model", change)))
