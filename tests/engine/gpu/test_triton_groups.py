"""Products with matrices as checkpoints have them are those of the dequantised matrices, up to rounding."""

import pytest
import torch

from baton.engine.model.linear import AS_STORED, DEQUANTISED, Linear
from baton.engine.model.quantised.matrix import Quantised

pytest.importorskip("triton")
from baton.engine.gpu import triton_groups
from baton.engine.gpu.triton_groups import GroupProduct, ProductShape, fits, tiled
from baton.engine.gpu.triton_ops import TritonOps

# bits, group, rows, columns, shifts, float8
FORMS = {
    "gptq": (4, 128, 70, 256, False, False),
    "gptq with zeros": (4, 32, 40, 160, True, False),
    "q8_0": (8, 32, 33, 96, False, False),
    "q5_1": (8, 32, 33, 96, True, False),
    "int8 rows": (8, 200, 20, 200, False, False),
    "int4 rows": (4, 100, 10, 100, False, False),
    "float8 blocks": (8, 128, 33, 320, False, True),
    "float8 rows": (8, 100, 33, 100, False, True),
}


def make(bits: int, group: int, outs: int, width: int, shifted: bool, float8: bool) -> Quantised:
    random = torch.Generator().manual_seed(outs)
    groups = -(-width // group)
    numbers = torch.randint(0, 1 << bits, (outs, width), dtype=torch.uint8, generator=random)
    if float8:
        numbers[numbers & 127 == 127] = 0
    scales = torch.randn(outs, groups, generator=random).half()
    return Quantised(bits, group, numbers, scales, torch.randn(outs, groups, generator=random) * 4 if shifted else None, float8)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """As a share of what is expected."""
    return float((found.cpu().double() - expected).square().mean().sqrt() / expected.square().mean().sqrt())


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("rows", [0, 1, 2, 19, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_products_are_those_of_the_dequantised_matrix(device: torch.device, name: str, rows: int, dtype: torch.dtype) -> None:
    """One row is summed in float32; for more, numbers are rounded to x's type first, as those of a dequantised matrix are. The interpreter
    multiplies bfloat16 as integers."""
    if dtype == torch.bfloat16 and device.type != "cuda" and rows > 1:
        pytest.skip("needs a CUDA device")
    matrix = make(*FORMS[name])
    assert fits(matrix)
    x = torch.randn(rows, matrix.shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    bias = torch.randn(matrix.shape[0], generator=torch.Generator().manual_seed(2)).to(dtype)
    product = GroupProduct(matrix, bias.to(device), device)
    found = product(x.to(device))
    assert found.shape == (rows, matrix.shape[0]) and found.dtype == dtype
    if rows:
        expected = x.double() @ matrix.dequantised().double().t() + bias.double()
        plain = x.double() @ matrix.dequantised().to(dtype).double().t() + bias.double()
        rounding = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 4e-3}[dtype]
        assert error(found, expected) < rounding + error(plain, expected)


@pytest.mark.parametrize("name", ["gptq", "gptq with zeros", "float8 blocks"])
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_columns_may_be_divided_among_programs(device: torch.device, name: str, parts: int) -> None:
    matrix = make(*FORMS[name])
    x, bias = torch.randn(5, matrix.shape[1]), torch.randn(matrix.shape[0])
    out = torch.empty(5, matrix.shape[0], device=device)
    GroupProduct(matrix, bias.to(device), device).in_tiles(x.to(device), out, ProductShape(16, 32, 16, 4, parts))
    assert error(out, x.double() @ matrix.dequantised().double().t() + bias) < 2e-6


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("biased", [True, False])
def test_a_dequantised_matrix_takes_bounded_memory(device: torch.device, name: str, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = make(*FORMS[name])
    (outs, width), taken = matrix.shape, list[int]()
    monkeypatch.setattr(triton_groups, "SCRATCH_BYTES", 4 * width * 8)
    x, bias = torch.randn(5, 2 * width)[:, width:], torch.randn(outs) if biased else None
    product, out = GroupProduct(matrix, None if bias is None else bias.to(device), device), torch.empty(5, outs, device=device)
    inner = product._dequantise

    def dequantise(rows: slice, into: torch.Tensor) -> None:
        taken.append(into.numel())
        inner(rows, into)

    monkeypatch.setattr(product, "_dequantise", dequantise)
    product.dequantised(x.to(device), out)
    assert max(taken) <= 8 * width and sum(taken) == outs * width
    assert error(out, x.double() @ matrix.dequantised().double().t() + (0 if bias is None else bias)) < 2e-6


def test_a_matrix_is_dequantised_to_what_it_is_worth(device: torch.device) -> None:
    """Bit for bit, where no shift is added after a product was rounded."""
    for name in ("gptq", "q8_0", "float8 blocks"):
        matrix = make(*FORMS[name])
        found = torch.empty(matrix.shape, dtype=torch.float16, device=device)
        GroupProduct(matrix, None, device)._dequantise(slice(0, len(found)), found)
        assert torch.equal(found.cpu(), matrix.dequantised().half()), name


@pytest.mark.parametrize(
    ("rows", "group_words", "expected"), [(2, 16, True), (64, 32, True), (65, 16, False), (2048, 512, False), (8, 4, False)]
)
def test_tiles_are_for_few_rows_of_large_groups(rows: int, group_words: int, expected: bool) -> None:
    assert tiled(rows, group_words) == expected


def test_x_may_be_part_of_longer_rows(device: torch.device) -> None:
    matrix = make(*FORMS["gptq"])
    x = torch.randn(5, 2 * matrix.shape[1])[:, matrix.shape[1] :]
    assert error(GroupProduct(matrix, None, device)(x.to(device)), x.double() @ matrix.dequantised().double().t()) < 2e-6


def test_a_row_depends_on_itself_alone(device: torch.device) -> None:
    """Of as many rows: what is beside it changes no bit."""
    matrix = make(*FORMS["q8_0"])
    x = torch.randn(19, matrix.shape[1])
    product, other = GroupProduct(matrix, None, device), torch.cat((x[:1], torch.randn(18, matrix.shape[1])))
    assert torch.equal(product(x.to(device))[0], product(other.to(device))[0])


def test_it_is_held_as_it_is_stored(device: torch.device) -> None:
    """Half a byte for each number, and its share of a scale of two bytes."""
    matrix = make(4, 128, 64, 1024, False, False)
    assert GroupProduct(matrix, None, device).nbytes == 64 * (1024 // 2 + 1024 // 128 * 2)


def test_a_matrix_is_computed_as_stored_if_its_groups_are_whole_words(device: torch.device) -> None:
    bias = torch.randn(70)
    for group, form in ((128, AS_STORED), (24, DEQUANTISED)):
        matrix = make(4, group, 70, 240 if group == 24 else 256, False, False)
        x = torch.randn(3, matrix.shape[1])
        linear = Linear([matrix], [bias], torch.float32, device, ops=TritonOps())
        if device.type == "cuda" or form == AS_STORED:
            assert linear.form == form
            assert error(linear(x.to(device)), x.double() @ matrix.dequantised().double().t() + bias) < 2e-6


def test_float8_beside_other_numbers_is_dequantised(device: torch.device) -> None:
    parts = [make(*FORMS["float8 blocks"]), make(4, 32, 7, 320, False, False)]
    linear = Linear(parts, [], torch.float32, device, ops=TritonOps())
    assert linear.form == DEQUANTISED
