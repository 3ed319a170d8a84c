"""Each operation is one kernel and gives the numbers of the plain operation."""

from typing import Any

import pytest
import torch

from baton.engine.model.ops import Ops

triton_ops = pytest.importorskip("baton.engine.gpu.triton_ops", reason="needs triton", exc_type=ImportError)
PLAIN, FUSED = Ops(), triton_ops.TritonOps()
TOLERANCE: dict[torch.dtype, dict[str, Any]] = {torch.float32: {"rtol": 1e-5, "atol": 1e-6}, torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}}


def rows(device: torch.device, dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [64, 100])
def test_add_rms_norm_matches_the_plain_operation(device: torch.device, dtype: torch.dtype, width: int) -> None:
    x, y, weight = rows(device, dtype, 5, width), rows(device, dtype, 5, 2 * width, seed=1)[:, width:], rows(device, dtype, width, seed=2)
    for added in (None, y):
        ours, theirs = x.clone(), x.clone()
        found, expected = (ops.add_rms_norm(z, added, weight, 1e-5) for ops, z in ((FUSED, ours), (PLAIN, theirs)))
        torch.testing.assert_close(found, expected, **TOLERANCE[dtype])
        torch.testing.assert_close(ours, theirs, **TOLERANCE[dtype])
        assert torch.equal(ours, x) == (added is None)


def test_a_row_too_wide_for_one_program_gives_the_same_numbers(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_ops, "MOST_FUSED", 32)
    x, weight = rows(device, torch.float32, 2, 64), rows(device, torch.float32, 64)
    torch.testing.assert_close(FUSED.add_rms_norm(x, None, weight, 1e-6), PLAIN.add_rms_norm(x, None, weight, 1e-6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [48, 1500])
def test_gates_match_the_plain_operations(device: torch.device, dtype: torch.dtype, width: int) -> None:
    gate_up = rows(device, dtype, 3, 2 * width) * 4
    torch.testing.assert_close(FUSED.silu_mul(gate_up), PLAIN.silu_mul(gate_up), **TOLERANCE[dtype])
    torch.testing.assert_close(FUSED.gelu_tanh_mul(gate_up), PLAIN.gelu_tanh_mul(gate_up), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "dim"), [(3, 16), (11, 24)])
def test_rotate_matches_the_plain_operation_and_changes_only_the_given_heads(
    device: torch.device, dtype: torch.dtype, heads: int, dim: int
) -> None:
    """It changes its argument in place."""
    whole = rows(device, dtype, 4, heads + 2, dim)
    angles = rows(device, torch.float32, 4, 1, dim // 2, seed=3)
    rotation = torch.polar(torch.ones_like(angles), angles)
    ours, theirs = whole.clone(), whole.clone()
    FUSED.rotate_(ours[:, :heads], rotation)
    PLAIN.rotate_(theirs[:, :heads], rotation)
    torch.testing.assert_close(ours, theirs, **TOLERANCE[dtype])
    assert torch.equal(ours[:, heads:], whole[:, heads:]) and not torch.equal(ours[:, :heads], whole[:, :heads])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("dim", "size"), [(16, 16), (96, 32), (128, 128), (256, 256)])
def test_turn_matches_the_plain_operation_and_changes_only_the_given_heads(
    device: torch.device, dtype: torch.dtype, dim: int, size: int
) -> None:
    whole = rows(device, dtype, 3, 4, dim)
    ours, theirs = whole.clone(), whole.clone()
    FUSED.turn_(ours[:, :3], size)
    PLAIN.turn_(theirs[:, :3], size)
    torch.testing.assert_close(ours, theirs, **TOLERANCE[dtype])
    assert torch.equal(ours[:, 3], whole[:, 3]) and not torch.equal(ours[:, :3], whole[:, :3])


def test_empty_tensors_give_empty_tensors(device: torch.device) -> None:
    x, weight = rows(device, torch.float32, 0, 64), rows(device, torch.float32, 64)
    assert FUSED.add_rms_norm(x, None, weight, 1e-6).shape == (0, 64)
    assert FUSED.silu_mul(x).shape == (0, 32)
    FUSED.turn_(x.view(0, 1, 64), 64)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
def test_the_interpreter_looks_through_the_language_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    x, looks = rows(device, torch.float32, 2, 64), list[str]()
    FUSED.silu_mul(x)
    monkeypatch.setattr(interpreter, "_patch_builtin", lambda package, *_: looks.append(package.__name__))
    FUSED.silu_mul(x)
    assert not looks
    monkeypatch.setattr(interpreter, "_patch_lang", interpreter._patch_lang.__wrapped__)
    FUSED.silu_mul(x)
    assert looks, "negative control: as Triton has it"
