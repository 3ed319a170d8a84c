"""Products with W in groups, as checkpoints have it: the numbers that its format defines, the same bits for a row in any batch, on
processors of every kind."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from baton.engine.cpu import groups
from baton.engine.cpu.group_tile import GROUP_ROWS
from baton.engine.cpu.panels import CHUNK
from baton.engine.cpu.tile import OUTS
from baton.engine.model.ops import Ops
from baton.engine.model.quantised.matrix import Quantised, join

THREADS = (1, 3)
MOST = max(THREADS) * CHUNK + 5  # rows that threads divide
BATCHES = sorted({1, 2, GROUP_ROWS - 1, GROUP_ROWS, GROUP_ROWS + 1, 2 * GROUP_ROWS + 1, CHUNK + 3, MOST})
# (outs, width, group): rows that end within a group, a group that is a row, and one that is longer
SHAPES = [(3, 20, 32), (OUTS, 32, 32), (130, 200, 64), (70, 576, 128), (OUTS + 1, 192, 192), (5, 64, 128)]
FORMS = ["half", "half, shifted", "single, shifted", "single"]


@pytest.fixture(params=THREADS, autouse=True)
def threads(request: pytest.FixtureRequest) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    request.addfinalizer(lambda: torch.set_num_threads(before))


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def matrix(bits: int, form: str, outs: int, width: int, group: int) -> Quantised:
    """Every number, and scales of every size."""
    each, many = torch.randint(0, 1 << bits, (outs, width), generator=torch.Generator().manual_seed(outs + width)), -(-width // group)
    scales, shifts = numbers(outs, many), numbers(outs, many, 1)[..., 0] if "shifted" in form else None
    if "half" in form:
        scales, shifts = scales.half(), None if shifts is None else shifts.half().float()
    return Quantised(bits, group, each.to(torch.uint8), scales, shifts)


def worth(w: Quantised) -> Tensor:
    """By the definition, number by number, in float64."""
    of = torch.arange(w.shape[1]) // w.group
    scales, number = w.scales.double()[:, of], w.numbers.double()
    return number * scales + w.shifts.double()[:, of] if w.shifts is not None else (number - w.middle) * scales


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("outs", "width", "group"), SHAPES)
def test_products_are_exact_but_for_rounding_and_a_row_is_the_same_in_any_batch(
    bits: int, form: str, outs: int, width: int, group: int
) -> None:
    w, dtype = matrix(bits, form, outs, width, group), torch.bfloat16 if (outs + bits) % 2 else torch.float32
    x = (numbers(MOST + 2, width) * torch.logspace(-3, 3, MOST + 2)[:, None]).to(dtype)
    x[0] = 0
    bias = numbers(outs).to(dtype) if outs > 5 else None
    multiply = groups.multiplier(w, bias)
    whole, (rounded, steps) = multiply(x), Ops().quantize(x)
    terms = (rounded.double() - 128) * steps[:, None].double()
    result = terms @ worth(w).T + (bias.double() if bias is not None else 0)
    sizes = (w.numbers.double() + 128) * w.scales.double().abs().amax() + (0 if w.shifts is None else w.shifts.abs().max())
    bound = 2.0**-21 * (terms.abs() @ sizes.T) + result.abs() * (2.0**-8 if dtype == torch.bfloat16 else 2.0**-22) + 1e-9
    assert whole.dtype == dtype and not ((whole.double() - result).abs() > bound).any()
    for count in BATCHES:
        assert torch.equal(multiply(x[:count]), whole[:count])
        assert torch.equal(multiply(x[2 : 2 + count]), whole[2 : 2 + count])


def test_the_greatest_numbers_do_not_overflow() -> None:
    for bits in (4, 8):
        top = torch.full((OUTS, 4096), (1 << bits) - 1, dtype=torch.uint8)
        top[1] = 0
        for group in (32, 4096):
            w = Quantised(bits, group, top, torch.ones(OUTS, 4096 // group, dtype=torch.float16))
            x = torch.cat((torch.ones(1, 4096), -torch.ones(1, 4096)))
            torch.testing.assert_close(groups.multiplier(w, None)(x).double(), x.double() @ worth(w).T, rtol=1e-6, atol=0)


def test_nan_and_infinity_stay_in_their_rows() -> None:
    x = numbers(5, 64)
    x[1, 3], x[2, 0] = torch.nan, torch.inf
    y = groups.multiplier(matrix(4, "half, shifted", OUTS + 5, 64, 32), None)(x)
    assert y[[0, 3, 4]].isfinite().all() and not y[1:3].isfinite().any()


@pytest.mark.parametrize("bits", [4, 8])
def test_unlike_matrices_are_joined_without_a_change(bits: int) -> None:
    parts = [matrix(4, "half", 5, 256, 128), matrix(bits, "half, shifted", 7, 256, 32), matrix(4, "single", 3, 256, 256)]
    whole = join(parts)
    assert (whole.bits, whole.group) == (bits, 32)
    torch.testing.assert_close(worth(whole), torch.cat([worth(part) for part in parts]), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(whole.dequantised().double(), worth(whole), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bits", [4, 8])
def test_rows_are_taken_of_the_same_memory(bits: int, form: str) -> None:
    w, ids = matrix(bits, form, 2 * OUTS + 3, 72, 32), torch.tensor([0, 2 * OUTS + 2, OUTS, 5])
    for dtype in (torch.float32, torch.bfloat16):
        found = groups.Rows(groups.multiplier(w, None), dtype)(ids, 2.0)
        torch.testing.assert_close(found, (2 * worth(w)[ids]).to(dtype), rtol=2.0**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)
    outside = groups.Rows(groups.multiplier(w, None), torch.float32)(torch.tensor([-1, 1, 2 * OUTS + 3]), 1.0)
    assert outside.isnan().all(dim=1).tolist() == [True, False, True]


def test_groups_that_blocks_do_not_divide_have_no_form() -> None:
    assert not groups.fits(matrix(4, "half", 4, 64, 16)) and groups.fits(matrix(4, "half", 4, 64, 64))


def test_nothing_is_kept_of_the_matrix() -> None:
    w = replace(matrix(8, "half", OUTS, 32, 32), numbers=torch.full((OUTS, 32), 129, dtype=torch.uint8), scales=torch.ones(OUTS, 1).half())
    multiply = groups.multiplier(w, None)
    w.numbers.zero_()
    w.scales.zero_()
    assert (multiply(torch.ones(1, 32)) == 32).all()
