"""The compiled kernels of the CPU answer what plain torch answers, up to rounding, and where they cannot be had plain torch serves."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.attention import PagedAttention, PagedKv, Span, plan
from engine.checkpoint import LayerAttention
from engine.kernels import CompiledOps
from engine.ops import Ops, choose

DTYPES = {torch.float32: 2e-6, torch.bfloat16: 1e-2}  # and how far apart answers may be, relative to values of about 1
PLAIN, COMPILED = Ops(), CompiledOps()


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(a: Tensor, b: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(a.float(), b.float(), rtol=tolerance, atol=tolerance)


@pytest.fixture(params=[1, 2], autouse=True)
def threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 200), (64, 768)])
def test_the_norm_adds_and_normalises(dtype: torch.dtype, rows: int, width: int) -> None:
    weight, y = values(width, dtype=dtype, seed=1), values(rows, width, dtype=dtype, seed=2)
    for added in (None, y):
        a, b = values(rows, width, dtype=dtype), values(rows, width, dtype=dtype)
        close(COMPILED.add_rms_norm(a, added, weight, 1e-5), PLAIN.add_rms_norm(b, added, weight, 1e-5), 4 * DTYPES[dtype])
        assert torch.equal(a, b), "the sum is left in x"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 7), (5, 96), (64, 1024)])
def test_the_gates(dtype: torch.dtype, rows: int, width: int) -> None:
    gate_up = 4 * values(rows, 2 * width, dtype=dtype)
    gate_up[0, 0], gate_up[0, 1] = 90.0, -90.0  # where e^x ends
    close(COMPILED.silu_mul(gate_up), PLAIN.silu_mul(gate_up), 4 * DTYPES[dtype])
    close(COMPILED.gelu_tanh_mul(gate_up), PLAIN.gelu_tanh_mul(gate_up), 8 * DTYPES[dtype])


def test_what_is_no_number_stays_none() -> None:
    """It is how broken weights are found."""
    x = values(2, 64)
    x[1, 3] = torch.nan
    assert COMPILED.add_rms_norm(x.clone(), None, torch.ones(64), 1e-5)[1].isnan().all()
    assert COMPILED.silu_mul(x)[1, 3].isnan() and COMPILED.silu_mul(x)[0].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "heads", "dim"), [(1, 2, 8), (17, 6, 64)])
def test_rotation_in_a_part_of_a_wider_row(dtype: torch.dtype, rows: int, heads: int, dim: int) -> None:
    a, b = values(rows, heads + 2, dim, dtype=dtype), values(rows, heads + 2, dim, dtype=dtype)
    angles = values(rows, 1, dim // 2, seed=3)
    rotation = torch.polar(torch.ones_like(angles), angles)
    COMPILED.rotate_(a[:, :heads], rotation)
    PLAIN.rotate_(b[:, :heads], rotation)
    close(a, b, 4 * DTYPES[dtype])
    assert torch.equal(a[:, heads:], b[:, heads:]), "the values are not turned"


CASES = {
    "plain": (LayerAttention(), 2),
    "window": (LayerAttention(window=5), 2),
    "softcap": (LayerAttention(softcap=2.0, scale=0.3), 2),
    "latent": (LayerAttention(scale=0.2), 1),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("block_size", "heads", "kv_heads", "dim"), [(16, 8, 2, 32), (1, 3, 3, 24), (5, 4, 1, 64)])
def test_attention_reads_blocks_in_place(dtype: torch.dtype, case: str, block_size: int, heads: int, kv_heads: int, dim: int) -> None:
    """Ragged lengths, blocks in any order, NaN where nothing was written: one-token spans and a longer one beside them."""
    how, parts = CASES[case]
    kv_heads, value_dim = (1, dim // 2) if parts == 1 else (kv_heads, 0)
    rng, layers = random.Random(7), 2
    lengths = [1, 2, block_size, block_size + 1, 3 * block_size, 83, 200]
    counts = [-(-length // block_size) for length in lengths]
    order = rng.sample(range(sum(counts) + 3), sum(counts))
    tables = [[order.pop() for _ in range(count)] for count in counts]
    pool = torch.full((sum(counts) + 3, layers, parts, kv_heads, block_size, dim), torch.nan, dtype=dtype)
    for i, (length, table) in enumerate(zip(lengths, tables, strict=True)):
        past = values(length, layers, parts, kv_heads, dim, dtype=dtype, seed=i)
        for position in range(length - 1):
            pool[table[position // block_size], :, :, :, position % block_size] = past[position]
    spans = [Span(length - 1, 1, table) for length, table in zip(lengths, tables, strict=True)]
    q = values(len(spans), heads, dim, dtype=dtype, seed=50)
    kv = values(len(spans), parts, kv_heads, dim, dtype=dtype, seed=51)
    answers, pools = [], []
    for in_place in (None, COMPILED.attend_in_place):
        paged = PagedKv(pool.clone(), value_dim, in_place)
        answers.append(PagedAttention(paged, plan(spans, paged, [how] * layers))(1, q, kv))
        pools.append(paged.pool)
    assert answers[1].isfinite().all()
    close(answers[1], answers[0], 20 * DTYPES[dtype])
    for span, row in zip(spans, kv, strict=True):
        block, offset = span.blocks[span.start // block_size], span.start % block_size
        assert torch.equal(pools[1][block, 1, :, :, offset], row), "the new key and value are in their slot"
        assert torch.equal(pools[1][block, 0, :, :, :offset], pool[block, 0, :, :, :offset]), "another layer is left alone"


def test_off_by_config_means_plain_torch() -> None:
    assert type(choose(torch.device("cpu"), torch.float32, compiled=False)) is Ops
    assert type(choose(torch.device("cpu"), torch.float32, compiled=True)) is CompiledOps


def test_without_numba_plain_torch_serves(tmp_path: Path) -> None:
    (tmp_path / "numba.py").write_text("raise ImportError('not here')\n")
    code = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from engine.ops import Ops, choose
assert type(choose(torch.device("cpu"), torch.float32, compiled=True)) is Ops
"""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "numba" in done.stderr or "not here" in done.stderr, "the log says why"
