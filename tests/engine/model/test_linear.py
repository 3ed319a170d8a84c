"""Matrices in every form multiply like the plain one; int8 products of rounded values are exact, row by row."""

import pytest
import torch
from torch import Tensor

from baton.engine.choice import choose_ops
from baton.engine.model import onednn
from baton.engine.model.linear import INT4_GROUP, Linear
from baton.engine.model.onednn import multiplies_int8
from baton.engine.model.ops import Ops

CPU = torch.device("cpu")
ROWS = [1, 2, 7, 64, 300]
int8 = pytest.mark.skipif(not multiplies_int8(), reason="no VNNI")


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    y = x.double() @ torch.cat(weights).double().T
    return y + torch.cat(biases).double() if biases else y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, *ROWS])
@pytest.mark.parametrize("bias", [False, True])
def test_stacked_matrices_multiply_like_one_matrix(dtype: torch.dtype, rows: int, bias: bool) -> None:
    weights = [numbers(size, 96, seed=size).to(dtype) for size in (40, 8, 65)]
    biases = [numbers(size, seed=size).to(dtype) for size in (40, 8, 65)] if bias else []
    x = numbers(rows, 96, seed=1).to(dtype)
    y = Linear(weights, biases, dtype, CPU)(x)
    bound = 1e-4 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(y.double(), exact(x, weights, biases), atol=bound, rtol=bound / 10)


@int8
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, *ROWS])
@pytest.mark.parametrize("bias", [False, True])
def test_int8_products_of_rounded_values_are_exact(dtype: torch.dtype, rows: int, bias: bool) -> None:
    weights, biases = [numbers(40, 96, seed=2), numbers(65, 96, seed=3)], [numbers(105, seed=4).to(dtype)] if bias else []
    x = numbers(rows, 96, seed=1).to(dtype)
    y = Linear(weights, biases, dtype, CPU, "int8")(x)
    whole = torch.cat(weights).double()
    steps = whole.abs().amax(dim=1, keepdim=True) / 127
    rounded, x_steps = Ops().quantize(x)
    expected = exact((rounded.double() - 128) * x_steps[:, None].double(), [(whole / steps).round() * steps], biases)
    bound = 1e-5 if dtype == torch.float32 else 2.0**-8
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), expected, atol=bound, rtol=bound)


@int8
def test_int8_is_close_to_the_plain_product() -> None:
    weight, x = numbers(512, 768, seed=5), numbers(200, 768, seed=6) * torch.logspace(-3, 3, 200)[:, None]
    error = (Linear([weight], [], torch.float32, CPU, "int8")(x) - x @ weight.T).norm(dim=1) / (x @ weight.T).norm(dim=1)
    assert error.min() > 1e-4 and error.max() < 0.02


@int8
@pytest.mark.parametrize("compiled", [False, True])
def test_an_int8_row_does_not_depend_on_its_neighbours(compiled: bool) -> None:
    """Bit for bit: a token gets the same result in any batch."""
    ops = choose_ops(CPU, torch.float32, compiled)
    matrix, x = Linear([numbers(130, 200, seed=7)], [], torch.float32, CPU, "int8", ops), numbers(33, 200, seed=8)
    x[5] *= 1e6
    whole = matrix(x)
    for rows in (slice(0, 1), slice(3, 5), slice(6, 33)):
        assert torch.equal(matrix(x[rows]), whole[rows])


@int8
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outs,width", [(1, 1), (3, 17), (130, 200), (700, 1536)])
def test_an_int8_row_gives_the_same_bits_alone_and_in_a_batch(dtype: torch.dtype, bias: bool, outs: int, width: int) -> None:
    """A row alone takes a different code path, which must give the same bits."""
    biases = [numbers(outs, seed=3).to(dtype)] if bias else []
    matrix = Linear([numbers(outs, width, seed=1)], biases, dtype, CPU, "int8", choose_ops(CPU, dtype, True))
    x = (numbers(9, width, seed=2) * torch.logspace(-6, 6, 9)[:, None]).to(dtype)
    x[3], x[4, 0], x[5, 0] = 0.0, torch.nan, torch.inf
    whole = matrix(x)
    for i in range(len(x)):
        torch.testing.assert_close(matrix(x[i : i + 1]), whole[i : i + 1], atol=0, rtol=0, equal_nan=True)


@int8
def test_int8_handles_zero_rows_and_rows_with_nan() -> None:
    weight, x = numbers(64, 32, seed=9), numbers(4, 32, seed=10)
    weight[3], x[1], x[2, 4] = 0.0, 0.0, torch.nan
    y = Linear([weight], [], torch.float32, CPU, "int8")(x)
    assert (y[1] == 0).all() and y[2].isnan().all() and (y[[0, 3], 3] == 0).all() and y[[0, 3]].isfinite().all()


@pytest.mark.parametrize("compiled", [False, True])
def test_int4_is_close_to_the_plain_product(compiled: bool) -> None:
    weight, x = numbers(512, 770, seed=5), numbers(200, 770, seed=6) * torch.logspace(-3, 3, 200)[:, None]
    y = Linear([weight], [], torch.float32, CPU, "int4", choose_ops(CPU, torch.float32, compiled))(x)
    error = (y - x @ weight.T).norm(dim=1) / (x @ weight.T).norm(dim=1)
    assert error.min() > 0.02 and error.max() < 0.15


def test_int4_rounds_each_group_by_itself() -> None:
    """A number sixteen times as large as the others costs its own group the others' values, and only that one."""
    weight = torch.full((2, 3 * INT4_GROUP), 0.5)
    weight[0, 5], weight[1] = -16.0, 0.0
    matrix = Linear([weight], [], torch.float32, CPU, "int4")
    x = torch.eye(3 * INT4_GROUP)
    rounded = matrix(x).T
    expected = weight.clone()
    expected[0, :INT4_GROUP] = 0.0
    expected[0, 5] = -16.0
    assert torch.equal(rounded, expected)


def test_int8_is_refused_where_it_would_not_be_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "_is_exact", lambda: False)
    with pytest.raises(ValueError, match=r"engine\.weight_dtype.*VNNI"):
        Linear([numbers(8, 8)], [], torch.float32, CPU, "int8")
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"engine\.weight_dtype"):
        Linear([numbers(8, 8).to("meta")], [], torch.float32, torch.device("meta"), "int8")
    with pytest.raises(ValueError, match=r"engine\.weight_dtype: int4 needs"):
        Linear([numbers(8, 8).to("meta")], [], torch.float32, torch.device("meta"), "int4")


def test_the_exactness_trial_detects_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the trial: a product that saturates at 2^15, as it does without VNNI, is not exact."""
    monkeypatch.setattr(onednn, "packed_int8", lambda weight, scales: lambda x: ((x.float() - 128) @ weight.float().T).clamp(max=2.0**15))
    onednn._is_exact.cache_clear()
    assert not multiplies_int8()
    onednn._is_exact.cache_clear()
