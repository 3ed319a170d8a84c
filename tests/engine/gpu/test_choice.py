"""Which attention backend is chosen: the best that is installed and fits, or the one that is named, or a refusal that says why."""

import sys
from collections.abc import Callable

import pytest
import torch

from baton.engine.gpu.choice import BACKENDS, BackendFacts, choose, installed, why_not

H200 = BackendFacts("cuda", torch.bfloat16, 16, 128, 2)


def everything(_: str) -> bool:
    return True


def only(*packages: str) -> Callable[[str], bool]:
    return lambda package: package in packages


@pytest.mark.parametrize(
    ("facts", "found", "expected"),
    [
        (H200, everything, "flashinfer"),
        (H200, only("flash_attn", "triton"), "triton"),  # flash_attn does not support blocks of 16
        (BackendFacts("cuda", torch.bfloat16, 256, 128, 2), only("flash_attn", "triton"), "flash_attn"),
        (BackendFacts("cuda", torch.bfloat16, 16, 80, 2), everything, "triton"),
        (BackendFacts("cuda", torch.float32, 256, 128, 2), everything, "triton"),
        (BackendFacts("cuda", torch.bfloat16, 256, 576, 1), everything, "triton"),
        (BackendFacts("cuda", torch.bfloat16, 256, 128, 2, "int8"), everything, "triton"),
        (H200, only(), "torch"),
    ],
)
def test_auto_chooses_the_best_backend_that_fits(facts: BackendFacts, found: Callable[[str], bool], expected: str) -> None:
    assert choose("auto", facts, found) == expected


def test_on_a_cpu_only_torch_is_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    facts = BackendFacts("cpu", torch.bfloat16, 256, 128, 2)
    assert choose("auto", facts, everything) == "torch"
    for backend in BACKENDS[:-1]:
        with pytest.raises(ValueError, match=rf"engine\.attention_backend: {backend} is not possible here: it needs a CUDA device"):
            choose(backend, facts, everything)


@pytest.mark.parametrize(
    ("backend", "facts", "found", "reason"),
    [
        ("flashinfer", H200, only("triton"), "flashinfer is not installed"),
        ("flashinfer", BackendFacts("cuda", torch.bfloat16, 16, 96, 2), everything, "head_dim 96"),
        ("flashinfer", BackendFacts("cuda", torch.float32, 16, 128, 2), everything, "float32"),
        ("flash_attn", H200, everything, r"engine\.block_size 16 is not a multiple of 256"),
        ("flash_attn", BackendFacts("cuda", torch.bfloat16, 384, 128, 2), everything, r"engine\.block_size 384"),
        ("flash_attn", BackendFacts("cuda", torch.bfloat16, 256, 576, 1), everything, "one vector"),
        ("flash_attn", BackendFacts("cuda", torch.bfloat16, 256, 512, 2), everything, "head_dim 512"),
        ("triton", H200, only(), "triton is not installed"),
        ("flashinfer", BackendFacts("cuda", torch.bfloat16, 16, 128, 2, "int8"), everything, r"engine\.kv_dtype is int8"),
        ("flash_attn", BackendFacts("cuda", torch.bfloat16, 256, 128, 2, "int5"), everything, r"engine\.kv_dtype is int5"),
        ("triton", BackendFacts("cuda", torch.bfloat16, 16, 256, 2, "int5"), everything, r"heads up to 128 numbers, these have 256"),
    ],
)
def test_a_named_backend_that_does_not_fit_is_refused_with_the_reason(
    backend: str, facts: BackendFacts, found: Callable[[str], bool], reason: str
) -> None:
    with pytest.raises(ValueError, match=rf"engine\.attention_backend: {backend} is not possible here: .*{reason}"):
        choose(backend, facts, found)


def test_a_named_backend_that_fits_is_chosen() -> None:
    assert [choose(backend, BackendFacts("cuda", torch.bfloat16, 256, 128, 2), everything) for backend in BACKENDS] == list(BACKENDS)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="'xformers' is unknown; known: auto, flashinfer"):
        choose("xformers", H200, everything)


@pytest.mark.skipif(sys.platform != "linux", reason="triton is built for Linux")
def test_triton_is_installed_on_linux() -> None:
    """Without it the tests of this folder are skipped; a missing dependency must not look like a passed suite."""
    assert installed("triton")


def test_torch_is_always_possible() -> None:
    assert why_not("torch", BackendFacts("cpu", torch.float32, 1, 3, 1), only()) is None
