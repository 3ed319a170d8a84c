"""Products with int4 weights: the plain product's numbers, the same bits for a row in any batch, on processors of every kind."""

import pytest
import torch
from torch import Tensor

from baton.engine.cpu import amx, int4
from baton.engine.cpu.group_tile import GROUP_ROWS
from baton.engine.cpu.panels import CHUNK
from baton.engine.cpu.tile import OUTS
from baton.engine.model.linear import INT4_GROUP
from baton.engine.model.ops import Ops

FLOATS = [torch.float32, torch.bfloat16]
SHAPES = [(1, 4), (3, 20), (OUTS, INT4_GROUP), (130, 200), (700, 96), (2 * OUTS + 1, 4100)]
THREADS = (1, 3)
MOST = max(THREADS) * max(CHUNK, amx.CHUNK) + 5  # rows that threads divide, and round in more than one part if there is one thread
BATCHES = sorted({1, 2, GROUP_ROWS - 1, GROUP_ROWS, GROUP_ROWS + 1, 2 * GROUP_ROWS + 1, int4.TILES_FROM, CHUNK, CHUNK + 3, MOST})


@pytest.fixture(params=THREADS, autouse=True)
def threads(request: pytest.FixtureRequest) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    request.addfinalizer(lambda: torch.set_num_threads(before))


def weights(outs: int, width: int) -> tuple[Tensor, Tensor]:
    """Every number of int4, and scales of every size."""
    generator = torch.Generator().manual_seed(outs + width)
    groups = -(-width // INT4_GROUP)
    matrix = torch.randint(-8, 8, (outs, groups * INT4_GROUP), generator=generator, dtype=torch.int8)
    matrix[:, width:] = 0
    return matrix, torch.randn(outs, groups, generator=generator).to(torch.bfloat16)


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outs", "width"), SHAPES)
def test_products_are_exact_but_for_rounding_and_a_row_is_the_same_in_any_batch(
    dtype: torch.dtype, bias: bool, outs: int, width: int
) -> None:
    matrix, scales = weights(outs, width)
    x = (numbers(MOST + 2, width) * torch.logspace(-3, 3, MOST + 2)[:, None]).to(dtype)
    x[0] = 0
    added = numbers(outs).to(dtype) if bias else None
    multiply = int4.multiplier(matrix, scales, added)
    whole, (rounded, steps) = multiply(x), Ops().quantize(x)
    exact = matrix[:, :width].double() * scales.double().repeat_interleave(INT4_GROUP, dim=1)[:, :width]
    terms = (rounded.double() - 128) * steps[:, None].double()
    result = terms @ exact.T + (added.double() if added is not None else 0)
    bound = 2.0**-22 * (terms.abs() @ exact.abs().T) + result.abs() * (2.0**-8 if dtype == torch.bfloat16 else 2.0**-22) + 1e-9
    assert whole.dtype == dtype and not ((whole.double() - result).abs() > bound).any()
    for count in BATCHES:
        assert torch.equal(multiply(x[:count]), whole[:count])
        assert torch.equal(multiply(x[2 : 2 + count]), whole[2 : 2 + count])


@pytest.mark.parametrize("dtype", FLOATS)
def test_plain_torch_computes_the_same_product(dtype: torch.dtype) -> None:
    (matrix, scales), x, bias = weights(130, 200), numbers(9, 200).to(dtype), numbers(130).to(dtype)
    torch.testing.assert_close(int4.multiplier(matrix, scales, bias)(x), Ops().int4_multiplier(matrix, scales, bias)(x))


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_and_infinity_stay_in_their_rows(dtype: torch.dtype) -> None:
    x = numbers(5, 64).to(dtype)
    x[1, 3], x[2, 0] = torch.nan, torch.inf
    y = int4.multiplier(*weights(OUTS + 5, 64), None)(x)
    assert y[[0, 3, 4]].isfinite().all() and not y[1:3].isfinite().any()


def test_nothing_is_kept_of_the_matrix() -> None:
    for outs in (1, OUTS):
        matrix, scales = torch.full((outs, INT4_GROUP), -8, dtype=torch.int8), torch.ones(outs, 1, dtype=torch.bfloat16)
        multiply = int4.multiplier(matrix, scales, None)
        matrix.zero_()
        scales.zero_()
        assert (multiply(torch.ones(1, INT4_GROUP)) == -8 * INT4_GROUP).all()
