"""Chooses the attention kernels of a device once, at start, by what is installed, what the layout allows, and what works when it is tried
(`baton.engine.gpu.trial`). The caller never branches.

flashinfer   any block size, heads of 64, 128 or 256: the fastest on Hopper
flash_attn   blocks of a multiple of 256 tokens
triton       everything, heads of any size and one-vector KV (multi-head latent attention) included; comes with torch on CUDA
torch        everything, slowly, on every device; cannot be captured into graphs
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from baton.engine.gpu.attention import DeviceAttention, Packed, TorchAttention
from baton.engine.gpu.inputs import Inputs
from baton.engine.model.checkpoint import LayerAttention

BACKENDS = ("flashinfer", "flash_attn", "triton", "torch")  # best first
FLASHINFER_HEADS = (64, 128, 256)
FLASH_ATTN_BLOCK = 256
MOST_REASON = 300  # characters
INT5_HEAD = 128  # numbers of a head: wider ones spill registers
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class BackendFacts:
    """What decides which backends are possible."""

    device: str  # "cuda", "cpu"
    dtype: torch.dtype
    block_size: int
    head_dim: int
    parts: int
    stored: str = ""  # type of the KV, if it is not `dtype`


def installed(package: str) -> bool:
    return find_spec(package) is not None


def why_not(backend: str, facts: BackendFacts, found: Callable[[str], bool] = installed) -> str | None:
    """Why a backend cannot serve a pool; None if it can."""
    if backend == "torch":
        return None
    if not found(backend):
        return f"the package {backend} is not installed"
    if backend == "triton":
        if facts.stored == "int5" and facts.head_dim > INT5_HEAD:
            return f"it reads int5 of heads up to {INT5_HEAD} numbers, these have {facts.head_dim}"
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return None if facts.device == "cuda" or interpreted else f"it needs a CUDA device, this is {facts.device!r}"
    if facts.device != "cuda":
        return f"it needs a CUDA device, this is {facts.device!r}"
    if facts.stored:
        return f"it reads KV of the model's own type, and engine.kv_dtype is {facts.stored}"
    if facts.dtype not in HALVES:
        return f"it computes in bfloat16 or float16, the model is {facts.dtype}"
    if facts.parts != 2:
        return "the KV of this model is one vector per token"
    if backend == "flashinfer":
        return None if facts.head_dim in FLASHINFER_HEADS else f"head_dim {facts.head_dim} is not one of {FLASHINFER_HEADS}"
    if facts.block_size % FLASH_ATTN_BLOCK:
        return f"engine.block_size {facts.block_size} is not a multiple of {FLASH_ATTN_BLOCK}"
    return None if facts.head_dim <= 256 and facts.head_dim % 8 == 0 else f"head_dim {facts.head_dim} is not a multiple of 8 up to 256"


@dataclass(frozen=True, slots=True)
class Tried:
    backend: str
    ok: bool
    reason: str = ""  # why it is not, in one line


def tries(wanted: str, facts: BackendFacts, attempt: Callable[[str], object], found: Callable[[str], bool] = installed) -> Iterator[Tried]:
    """Tries backends, best first if `wanted` is auto, as far as the caller asks. `attempt` computes with one and raises whatever it raises:
    a package that is installed may lack a compiler, or kernels for this device."""
    for backend in BACKENDS if wanted == "auto" else (wanted,):
        reason = why_not(backend, facts, found)
        if reason is None:
            try:
                attempt(backend)
            except Exception as error:
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:MOST_REASON]
        yield Tried(backend, reason is None, reason or "")


def first_that_works(
    wanted: str, facts: BackendFacts, attempt: Callable[[str], object], found: Callable[[str], bool] = installed
) -> list[Tried]:
    """What was tried, the last of which works. Raises ValueError, which says what each lacks, if none does."""
    if wanted not in ("auto", *BACKENDS):
        raise ValueError(f"engine.attention_backend: {wanted!r} is unknown; known: auto, {', '.join(BACKENDS)}")
    done: list[Tried] = []
    for tried in tries(wanted, facts, attempt, found):
        done.append(tried)
        if tried.ok:
            return done
    raise ValueError("engine.attention_backend: " + "; ".join(f"{each.backend} is not possible here: {each.reason}" for each in done))


def choose(wanted: str, facts: BackendFacts, found: Callable[[str], bool] = installed) -> str:
    """The best possible backend for `auto`, else the one that is named. Raises ValueError if that one is not possible."""
    if wanted == "auto":
        return next(backend for backend in BACKENDS if why_not(backend, facts, found) is None)
    if wanted not in BACKENDS:
        raise ValueError(f"engine.attention_backend: {wanted!r} is unknown; known: auto, {', '.join(BACKENDS)}")
    if reason := why_not(wanted, facts, found):
        raise ValueError(f"engine.attention_backend: {wanted} is not possible here: {reason}")
    return wanted


def make_attention(
    wanted: str,
    pool: Tensor | Packed,
    layers: Sequence[LayerAttention],
    heads: int,
    value_dim: int,
    inputs: Inputs,
    scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> DeviceAttention:
    """See `DeviceAttention`. Raises ValueError if `wanted` is unknown or not possible."""
    numbers, dim = (pool.rows, pool.dim) if isinstance(pool, Packed) else (pool, pool.shape[-1])
    _, _, parts, _, size, _ = numbers.shape
    stored = "int5" if isinstance(pool, Packed) else "" if scales is None else "int8"
    match choose(wanted, BackendFacts(numbers.device.type, dtype or numbers.dtype, size, dim, parts, stored)):
        case "flashinfer":
            from baton.engine.gpu.flashinfer_backend import FlashInferAttention

            return FlashInferAttention(numbers, layers, heads, value_dim, inputs)
        case "flash_attn":
            from baton.engine.gpu.flash_attn_backend import FlashAttnAttention

            return FlashAttnAttention(numbers, layers, heads, value_dim, inputs)
        case "triton":
            from baton.engine.gpu.triton_backend import TritonAttention

            return TritonAttention(pool, layers, heads, value_dim, inputs, scales, dtype)
        case _:
            return TorchAttention(pool, layers, heads, value_dim, inputs, scales, dtype)
