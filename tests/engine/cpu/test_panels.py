"""Products with weights in panels: the plain product's numbers, the same bits for a row in any batch, on processors of every kind."""

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.engine.cpu import amx, int4, int8, panels
from baton.engine.cpu.apart import APART
from baton.engine.cpu.features import AMX, FEATURES
from baton.engine.cpu.tile import BFLOAT16, INT8, LANES, OUTS, ROWS, VNNI
from baton.engine.model.ops import Ops

FLOATS = [torch.float32, torch.bfloat16]
SHAPES = [(1, 4), (3, 20), (OUTS, 64), (130, 200), (130, 640), (700, 96), (65, panels.DEPTH + 4), (40, 2 * panels.DEPTH)]
LAID = amx.CHUNK + amx.TILE + 3 if amx.THERE else 1  # rows that AMX lays out in two parts
MOST = 3 * amx.CHUNK + 7 if amx.THERE else panels.CHUNK + 9  # three threads share so many rows with AMX, and otherwise the panels
BATCHES = sorted(
    {1, 2, 3, ROWS - 1, ROWS, ROWS + 1, *range(2 * ROWS + 1, 3 * ROWS), 5 * ROWS + 2, panels.CHUNK, panels.CHUNK + 3, LAID, MOST}
)
Multiply = Callable[[Tensor], Tensor]


@pytest.fixture(params=[1, 3], autouse=True)
def threads(request: pytest.FixtureRequest) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    request.addfinalizer(lambda: torch.set_num_threads(before))


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def small(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """int8, and the steps of its rows."""
    steps = matrix.abs().amax(dim=1).div(127)
    return matrix.div(steps[:, None]).round().to(torch.int8), steps


def check_rows(multiply: Multiply, x: Tensor, whole: Tensor) -> None:
    for count in BATCHES:
        assert torch.equal(multiply(x[:count]), whole[:count])
        assert torch.equal(multiply(x[2 : 2 + count]), whole[2 : 2 + count])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outs", "width"), [*SHAPES, (OUTS + 3, 6), (20, panels.DEPTH + 2)])  # steps that are left, too
def test_products_are_those_of_plain_torch_and_a_row_is_the_same_in_any_batch(
    dtype: torch.dtype, bias: bool, outs: int, width: int
) -> None:
    weight, x = numbers(outs, width).to(dtype), numbers(MOST + 2, width).to(dtype)
    added = numbers(outs).to(dtype) if bias else None
    multiply = panels.multiplier(weight, added)
    whole = multiply(x)
    exact = x.double() @ weight.double().T + (added.double() if added is not None else 0)
    # Each product is rounded to float32 as it is added; the result once more, to its own type.
    sizes = x.double().abs() @ weight.double().abs().T
    bound = sizes * 2.0**-23 * width**0.5 + exact.abs() * (2.0**-8 if dtype == torch.bfloat16 else 2.0**-23) + 1e-6
    assert whole.dtype == dtype and not ((whole.double() - exact).abs() > bound).any()
    check_rows(multiply, x, whole)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outs", "width"), SHAPES)
def test_int8_products_have_the_bits_of_plain_torch(dtype: torch.dtype, bias: bool, outs: int, width: int) -> None:
    weight, scales = small(numbers(outs, width))
    x = (numbers(MOST + 2, width) * torch.logspace(-3, 3, MOST + 2)[:, None]).to(dtype)
    x[0] = 0
    added = numbers(outs).to(dtype) if bias else None
    multiply = int8.multiplier(weight, scales, added)
    whole, (rounded, steps) = multiply(x), Ops().quantize(x)
    products = ((rounded.double() - 128) @ weight.double().T).float() * scales
    assert torch.equal(whole, Ops().dequantize(products, steps, added, dtype))
    check_rows(multiply, x, whole)


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_and_infinity_stay_in_their_rows(dtype: torch.dtype) -> None:
    weight, x = numbers(OUTS + 5, 64).to(dtype), numbers(5, 64).to(dtype)
    x[1, 3], x[2, 0], x[3, 7] = torch.nan, torch.inf, -torch.inf
    y = panels.multiplier(weight, None)(x)
    assert y[[0, 4]].isfinite().all() and y[1].isnan().all() and not y[2:4].isfinite().any()


def test_bfloat16_is_rounded_to_nearest_even() -> None:
    """2⁻⁸ is half a step of bfloat16 at 1, and 3 · 2⁻⁸ one and a half."""
    x = torch.tensor([[1, 2.0**-8, 0, 0], [1, 0, 3 * 2.0**-8, 0], [-1, 0, 0, -(2.0**-8)]], dtype=torch.bfloat16)
    y = panels.multiplier(torch.ones(1, 4, dtype=torch.bfloat16), None)(x)
    assert y[:, 0].tolist() == [1, 1 + 2.0**-6, -1]


@pytest.mark.parametrize("dtype", FLOATS)
def test_no_rows_and_no_weights(dtype: torch.dtype) -> None:
    for width in (8, 64):
        assert panels.multiplier(numbers(5, width).to(dtype), None)(torch.empty(0, width, dtype=dtype)).shape == (0, 5)
        weight, scales = small(numbers(5, width))
        assert int8.multiplier(weight, scales, None)(torch.empty(0, width, dtype=dtype)).shape == (0, 5)
    assert not panels.fits(torch.empty(0, 8, dtype=dtype)) and not panels.fits(torch.empty(8, 0, dtype=dtype))


def test_a_width_that_is_no_multiple_of_the_group_is_left_to_others() -> None:
    for dtype, group in panels.GROUPS.items():
        assert panels.fits(torch.zeros(8, 3 * group, dtype=dtype))
        assert group == 1 or not panels.fits(torch.zeros(8, group + 1, dtype=dtype))
    assert not panels.fits(torch.zeros(8, 4, dtype=torch.float64))


def test_panels_keep_nothing_of_the_matrix() -> None:
    """Its memory may be a file that is to be closed."""
    for shape in ((OUTS, 1), (OUTS, 8), (1, 8)):
        matrix = torch.ones(shape)
        packed = panels.panels(matrix)
        matrix.zero_()
        assert packed.sum() == shape[0] * shape[1]


ATTENTION = (
    "test_decodes_match_the_formula",
    "test_decodes_match_when_one_vector_is_key_and_value",
    "test_batches_of_decodes_match_the_formula",
    "test_spans_match_the_formula",
    "test_a_token_has_the_same_bits_in_any_span",
)
FAMILY = """
import os, sys
from importlib import import_module
from pathlib import Path
import pytest
import torch
here, kernels, *files = sys.argv[1:]
child = os.fork()
if not child:
    for name in kernels.split(","):
        import_module(f"baton.engine.cpu.{name}")
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0  # what it has compiled is read back from the disk, as processes that serve have it
from baton.engine.cpu import amx, tile
print(tile.LANES, tile.BFLOAT16.group, tile.INT8.group, amx.THERE, flush=True)
sys.path.insert(0, here)
from test_panels import greatest_products
print(greatest_products(), flush=True)
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-k", "not family", *files]) if files else 0)
"""


WITHOUT_AMX = ",".join(f"{'-' if name in AMX else '+'}{name}" for name in sorted(FEATURES | AMX))


def greatest_products() -> str:
    """A digest of products of the greatest numbers of int8 and int4, of either sign, and of others, for few rows and many."""
    small_numbers = torch.arange(72 * 576).mul(7919).remainder(256).sub(128).view(-1, 576)
    extreme = torch.tensor([-128, 127]).repeat(288).expand(4, -1)
    matrix = torch.cat((small_numbers, extreme, extreme.flip(1), extreme.flip(1)[:, :1].expand(4, 576))).to(torch.int8)
    x = torch.cat((numbers(40, 576), torch.ones(4, 576), -torch.ones(4, 576), extreme.float().sign()))
    eight = int8.multiplier(matrix, torch.linspace(0.5, 2, len(matrix)), None)
    four = int4.multiplier(matrix.div(16, rounding_mode="floor"), torch.linspace(0.5, 2, len(matrix) * 18).view(-1, 18).bfloat16(), None)
    found = [multiply(each) for multiply in (eight, four) for each in (x, x[-1:], x[:5])]
    return hashlib.sha256(torch.cat(found).numpy().tobytes()).hexdigest()


@pytest.mark.timeout(1500)  # kernels are compiled for it, and tests run with the slow ones
@pytest.mark.skipif(platform.machine() != "x86_64" or "avx2" not in FEATURES, reason="no such processors are at hand")
@pytest.mark.parametrize(
    ("family", "given", "kinds", "everything"),
    [
        ("x86-64", "", (4, 1, 1), True),
        ("x86-64-v3", "", (8, 1, 4), True),
        ("x86-64-v4", "", (16, 1, 4), False),
        pytest.param("x86-64-v4", WITHOUT_AMX, (16, 2, 4), True, id="without AMX"),
    ],
)
def test_a_family_of_processors_without_the_newest_instructions(family: str, given: str, kinds: tuple[int, ...], everything: bool) -> None:
    """The same tests, and those of int4, groups and attention, with the kernels compiled for it. int8 and int4 have the bits of this
    processor's."""
    if torch.get_num_threads() > 1:
        pytest.skip("once is enough")
    if (given and not amx.THERE) or (kinds == (LANES, BFLOAT16.group, INT8.group) and not VNNI):
        pytest.skip("that is this processor")
    if kinds[0] > LANES:
        pytest.skip("this processor has no such registers")
    chosen = {"NUMBA_CPU_NAME": family, "NUMBA_CPU_FEATURES": given, "BATON_TEST_FEWER": "3"}
    env = {**os.environ, **chosen, APART: "1"}  # else kernels are compiled that nobody uses here
    here = Path(__file__).parent
    attention = [f"{here / 'test_attention.py'}::{name}" for name in ATTENTION]
    files = [__file__, str(here / "test_int4.py"), str(here / "test_groups.py"), *attention] if everything else []
    kernels = ["int4", "int8"] + (["groups", "kv_int5", "kv_int8"] if everything else [])  # with those that they import
    command = [sys.executable, "-c", FAMILY, str(here), ",".join(kernels), *files]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.split()[:5] == [*map(str, kinds), "False", greatest_products()]
