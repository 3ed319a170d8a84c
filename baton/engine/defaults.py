"""What an option is if nobody sets it: it depends on the device, on its memory, on the checkpoint, and on the other options.

The figures of a CPU are those of a laptop. Those of a GPU let one step fill it: 8,192 tokens, or 2,048 where the activations of more would
take the place of KV.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.engine.core.limits import Limits
from baton.engine.options import Options

GIB = 1 << 30
LARGE = 64 * GIB  # memory of a GPU that computes LARGE_STEP tokens at once
LARGE_STEP, SMALL_STEP = 8192, 2048
GPU_SEQUENCES = 256
# Tokens of a step with guesses at most, by device: as many as recorded or captured steps have. How many are worth it is measured.
GUESSED = {"cpu": 256, "cuda": 64}
BLOCK, FLASH_ATTN_BLOCK, VLLM_CPU_BLOCK = 16, 256, 32
CPU_SHARE, GPU_SHARE = 0.25, 0.95  # of the free memory, for KV: a CPU's memory is for others, too
HALVES = ("bfloat16", "float16")
BFLOAT16_SINCE = (8, 0)  # compute capability


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    kind: str  # "cpu", "cuda"
    memory_bytes: int = 0  # of a GPU; 0: not known
    capability: tuple[int, int] | None = None  # of a GPU, if it is known


@dataclass(frozen=True, slots=True)
class SettledOptions:
    """Options of which none is left open, but those of vLLM that it decides; and for each that was open, why it is what it is."""

    options: Options
    values: Mapping[str, Any]  # that were open, by dotted key
    why: Mapping[str, str]  # of the same keys


def settle(options: Options, device: DeviceFacts, stored: str | None = None) -> SettledOptions:
    """`stored`: the type that config.json names, if it does. Pure; what is set stays."""
    engine, vllm = options.engine, options.engine.kind == "vllm"
    values: dict[str, tuple[Any, str]] = {}
    if options.model.dtype == "auto":
        values["model.dtype"] = _dtype(vllm, device, stored)
    if engine.block_size is None:
        values["engine.block_size"] = _block_size(engine.attention_backend, vllm, device)
    if engine.kv_memory_fraction is None:
        gpu = device.kind == "cuda"
        values["engine.kv_memory_fraction"] = (GPU_SHARE, "of what a GPU has left") if gpu else (CPU_SHARE, "of a CPU's free memory")
    guesses = not vllm and (engine.speculation != "none" or engine.predictions)
    if guesses and engine.speculation_batch_tokens is None:
        values["engine.speculation_batch_tokens"] = GUESSED[device.kind], "a bound: what steps take decides"
    values |= _limits(engine.max_num_seqs, engine.max_num_batched_tokens, vllm, device)
    found = {name: value for name, (value, _) in values.items()}
    whole = options.but(**{name.partition(".")[2]: value for name, value in found.items()})
    return SettledOptions(whole, found, {name: why for name, (_, why) in values.items()})


def stored_dtype(config: Mapping[str, Any]) -> str | None:
    """The type that a config.json names, under either name of the field."""
    return config.get("dtype") or config.get("torch_dtype")


def _dtype(vllm: bool, device: DeviceFacts, stored: str | None) -> tuple[str, str]:
    if device.kind == "cpu":
        return "float32", "on a CPU"
    if vllm:
        return "auto", "vLLM decides"
    if stored == "bfloat16" and device.capability is not None and device.capability < BFLOAT16_SINCE:
        return "float16", f"the checkpoint is bfloat16, which a GPU of compute capability {device.capability} cannot multiply"
    if stored in HALVES:
        return stored, "as the checkpoint"
    return "float32", f"as the checkpoint: its config.json says {stored}" if stored else "config.json names no type"


def _block_size(backend: str, vllm: bool, device: DeviceFacts) -> tuple[int | None, str]:
    if vllm:
        return (VLLM_CPU_BLOCK, "vLLM's attention on a CPU needs it") if device.kind == "cpu" else (None, "vLLM decides")
    if backend == "flash_attn" and device.kind == "cuda":
        return FLASH_ATTN_BLOCK, "flash_attn needs it"
    return BLOCK, "fits every attention backend but flash_attn"


def _limits(seqs: int | None, tokens: int | None, vllm: bool, device: DeviceFacts) -> dict[str, tuple[int | None, str]]:
    """A step has a token for each of its sequences, so one that is set bounds the other."""
    found: dict[str, tuple[int | None, str]] = {}
    if vllm and device.kind == "cuda":
        most_seqs, most_tokens, why_seqs, why_tokens = None, None, "vLLM decides", "vLLM decides"
    elif device.kind == "cuda":
        large = device.memory_bytes >= LARGE
        most_seqs, most_tokens, why_seqs = GPU_SEQUENCES, LARGE_STEP if large else SMALL_STEP, "on a GPU"
        size = f"of {device.memory_bytes / GIB:.0f} GiB" if device.memory_bytes else f"; {LARGE_STEP} from {LARGE // GIB} GiB on"
        why_tokens = f"on a GPU {size}" if device.memory_bytes else f"on a GPU{size}"
    else:
        most_seqs, most_tokens, why_seqs, why_tokens = Limits().max_num_seqs, Limits().max_num_batched_tokens, "on a CPU", "on a CPU"
    if seqs is None:
        if most_seqs is not None and tokens is not None and tokens < most_seqs:
            most_seqs, why_seqs = tokens, "engine.max_num_batched_tokens is no more"
        found["engine.max_num_seqs"] = most_seqs, why_seqs
    if tokens is None:
        if most_tokens is not None and seqs is not None and seqs > most_tokens:
            most_tokens, why_tokens = seqs, "engine.max_num_seqs is as much"
        found["engine.max_num_batched_tokens"] = most_tokens, why_tokens
    return found
