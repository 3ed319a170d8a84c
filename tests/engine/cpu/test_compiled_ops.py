"""The compiled operations match plain torch, up to the rounding of their type, and plain torch is used where they are unavailable."""

from pathlib import Path

import pytest
import torch
from all_pairs import all_pairs
from families import loaded, prefill
from forks import forked
from torch import Tensor

from baton.engine.choice import choose_ops
from baton.engine.cpu import pointwise
from baton.engine.model.ops import Ops
from baton.engine.model.sampler import greatest
from baton.models.make_small import make

CPU = torch.device("cpu")
# Relative to the result: the effect of one rounding of the type, or of a few float32 roundings inside.
RELATIVE = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7}
DTYPES = tuple(RELATIVE)
THREADS = (1, 3)
SHAPES = [(1, 8), (1, 64), (3, 37), (16, 512), (64, 130), (700, 96)]  # the last is split between threads


@pytest.fixture(scope="module")
def compiled() -> Ops:
    ops = choose_ops(CPU, torch.float32, compiled=True)
    assert type(ops) is not Ops
    return ops


@pytest.fixture(params=THREADS, autouse=True)
def threads(request: pytest.FixtureRequest) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    request.addfinalizer(lambda: torch.set_num_threads(before))


def numbers(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def assert_near(ours: Tensor, theirs: Tensor, spread: Tensor | float = 0.0) -> None:
    """Within the type's rounding of the result, and of `spread` where the result is a difference of larger numbers."""
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    far = (ours.double() - theirs.double()).abs() > RELATIVE[ours.dtype] * (theirs.double().abs() + spread) + 1e-30
    assert not far.any(), (ours[far], theirs[far])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("added", [False, True])
def test_norm_matches_plain_torch(compiled: Ops, shape: tuple[int, int], dtype: torch.dtype, added: bool) -> None:
    weight = numbers(shape[1], dtype=dtype)
    ours, theirs = numbers(*shape, dtype=dtype), numbers(*shape, dtype=dtype)
    y = numbers(*shape, dtype=dtype).flip(0) if added else None
    assert_near(compiled.add_rms_norm(ours, y, weight, 1e-5), Ops().add_rms_norm(theirs, y, weight, 1e-5))
    assert torch.equal(ours, theirs), "x + y is rounded once: nothing may differ"
    assert added == (not torch.equal(ours, numbers(*shape, dtype=dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
def test_gates_match_the_exact_answer(compiled: Ops, name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = numbers(shape[0], 2 * shape[1], dtype=dtype, scale=4.0)
    # Against the exact answer: plain torch rounds the gate in between, and 1 + tanh loses digits where e^x is tiny.
    exact = getattr(Ops(), name)(gate_up.double()).to(dtype)
    # A rounding error in the exponent is multiplied by the exponent, which is about 8 where the gate still lets anything through.
    assert_near(getattr(compiled, name)(gate_up), exact, spread=2 * exact.double().abs() + 1e-3)


def test_gates_handle_extreme_and_non_finite_numbers(compiled: Ops) -> None:
    gates = torch.tensor([-1e30, -1e4, -89.0, -30.0, -0.0, 0.0, 30.0, 89.0, 1e4, 1e30])[None]
    out = compiled.silu_mul(torch.cat((gates, torch.full_like(gates, 2.0)), dim=1))
    torch.testing.assert_close(out, 2 * gates.clamp(min=0) + 2 * gates * gates.sigmoid() * (gates.abs() < 20), rtol=1e-6, atol=1e-5)
    broken = compiled.silu_mul(torch.tensor([[torch.nan, 1.0, torch.inf, 1.0, 1.0, torch.nan, 1.0, -torch.inf]]))
    assert broken.isfinite().tolist() == [[False, False, False, False]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "heads", "dim"), [(1, 1, 2), (3, 5, 16), (40, 12, 64), (130, 6, 128)])
def test_rotation_matches_plain_torch(compiled: Ops, rows: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    """Rotates a part of each row, then also a part of each head; the rest stays unchanged."""
    rotation = torch.polar(torch.ones(rows, 1, dim // 2), numbers(rows, 1, dim // 2) * 10)
    for part in ((slice(None), slice(0, heads), slice(None)), (slice(None), slice(1, None), slice(4, None))):
        ours, theirs = (numbers(rows, heads + 1, dim + (4 if part[1].start else 0), dtype=dtype) for _ in range(2))
        compiled.rotate_(ours[part], rotation)
        Ops().rotate_(theirs[part], rotation)
        assert_near(ours, theirs, spread=theirs[part].double().abs().max())
        before = numbers(*ours.shape, dtype=dtype)
        before[part] = ours[part]
        assert torch.equal(before, ours)
        assert not torch.equal(ours, numbers(*ours.shape, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "heads", "dim", "size"), [(1, 1, 2, 1), (3, 5, 16, 16), (3, 2, 96, 32), (40, 12, 64, 64), (130, 6, 128, 128)]
)
def test_heads_are_turned_by_hadamards_matrix_and_turned_back(
    compiled: Ops, rows: int, heads: int, dim: int, size: int, dtype: torch.dtype
) -> None:
    """And the heads behind them are left alone."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    for ops in (compiled, Ops()):
        x, before = (numbers(rows, heads + 1, dim, dtype=dtype) for _ in range(2))
        ops.turn_(x[:, :heads], size)
        exact = (before[:, :heads].double().unflatten(-1, (-1, size)) @ matrix / size**0.5).flatten(-2)
        assert_near(x[:, :heads], exact.to(dtype), spread=before.double().abs().max())
        assert torch.equal(x[:, heads:], before[:, heads:]) and (size == 1 or not torch.equal(x, before))
        ops.turn_(x[:, :heads], size)
        assert_near(x, before, spread=4 * before.double().abs().max())


def test_a_turned_row_has_the_bits_that_it_has_alone(compiled: Ops) -> None:
    for ops in (compiled, Ops()):
        many, alone = numbers(130, 6, 64), numbers(130, 6, 64)[77:78].clone()
        ops.turn_(many, 64)
        ops.turn_(alone, 64)
        assert torch.equal(many[77:78], alone)


def test_turning_strided_numbers_matches_plain_torch(compiled: Ops) -> None:
    ours, theirs = (numbers(3, 4, 8).transpose(1, 2) for _ in range(2))
    compiled.turn_(ours, 4)
    Ops().turn_(theirs, 4)
    assert torch.equal(ours, theirs)


def test_rotation_of_strided_tensors_matches_plain_torch(compiled: Ops) -> None:
    rotation = torch.polar(torch.ones(3, 1, 2), numbers(3, 1, 2))
    ours, theirs = (numbers(3, 4, 5).transpose(1, 2) for _ in range(2))
    compiled.rotate_(ours, rotation)
    Ops().rotate_(theirs, rotation)
    assert_near(ours, theirs, spread=4.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_quantising_matches_plain_torch_bit_for_bit(compiled: Ops, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = numbers(*shape, dtype=dtype) * torch.logspace(-30, 30, shape[0])[:, None].to(dtype)
    x[shape[0] // 2] = 0
    (ours, our_steps), (theirs, their_steps) = compiled.quantize(x), Ops().quantize(x)
    assert torch.equal(ours, theirs) and torch.equal(our_steps, their_steps)
    assert ours.max() == 255 or ours.min() == 1 or not x.any(), "the largest element must use the last step"
    products, bias = numbers(*shape), numbers(shape[1], dtype=dtype)
    for added in (None, bias):
        assert torch.equal(
            compiled.dequantize(products.clone(), our_steps, added, dtype), Ops().dequantize(products.clone(), our_steps, added, dtype)
        )


def test_a_row_with_nan_has_a_nan_step(compiled: Ops) -> None:
    x = numbers(3, 40)
    x[1, 7] = torch.nan
    for ops in (compiled, Ops()):
        assert ops.quantize(x)[1].isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("width", [1, 2, 255, 256, 257, 4096, 32001])
def test_the_greatest_logit_is_the_one_that_the_sampler_finds(width: int) -> None:
    first, last, mid = 0, width - 1, width // 2
    rows = numbers(16, width)
    rows[1, last] = rows[2, first] = rows[3, mid] = 50.0
    rows[4, mid:] = rows[5, :mid] = rows[5, last] = 7.0  # equals, beside each other and far apart
    rows[6] = -torch.inf
    rows[7], rows[7, last] = -torch.inf, -3e38
    rows[8, mid], rows[9, last] = torch.inf, torch.nan
    rows[10, first] = torch.copysign(torch.tensor(torch.nan), torch.tensor(-1.0))
    rows[11], rows[11, mid:] = -0.0, 0.0
    rows[12], rows[12, :mid] = -0.0, 0.0
    rows[13] = 0.0
    rows[14] = -rows[14].abs() - 1
    rows[15], rows[15, last] = -1e-45, 1e-45  # the smallest there are
    ids = torch.zeros(16, dtype=torch.int64)
    pointwise.greatest(rows, ids)
    assert torch.equal(ids, greatest(rows))


@pytest.mark.parametrize("width", [6, 255, 2048])
def test_the_next_greatest_logits_follow_the_greatest(width: int) -> None:
    rows = numbers(5, width)
    rows[1] = torch.arange(width)
    rows[2] = -rows[1]
    rows[3, 1:3] = 9.0  # equals
    rows[4, -1] = -torch.inf
    ids = torch.zeros(5, 3, dtype=torch.int64)
    pointwise.next_greatest(rows, ids)
    assert torch.equal(ids, rows.sort(dim=-1, descending=True, stable=True).indices[:, 1:4])


def test_empty_tensors_give_empty_tensors(compiled: Ops) -> None:
    x = torch.empty(0, 16)
    assert compiled.add_rms_norm(x, x, torch.ones(16), 1e-5).shape == (0, 16)
    assert compiled.silu_mul(x).shape == (0, 8)
    assert compiled.quantize(x)[0].shape == (0, 16)


@pytest.mark.parametrize(
    ("device", "dtype", "wanted"), [("cpu", torch.float32, False), ("meta", torch.float32, True), ("cpu", torch.float16, True)]
)
def test_plain_torch_is_chosen_where_the_kernels_do_not_apply(device: str, dtype: torch.dtype, wanted: bool) -> None:
    assert type(choose_ops(torch.device(device), dtype, compiled=wanted)) is Ops


PROCESS = """
import io, sys
from pathlib import Path
sys.stderr = io.StringIO()
sys.modules.update({{name: None for name in {absent!r}}})
from baton.engine.build import build
from baton.engine.options import Options
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
engine = build(Options.of(Path({folder!r}), kv_memory_mib=4, threads=1, compiled={compiled})).engine
seq = Sequence("s", list(range(50, 75)), 25, SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True), b"root")
engine.add(seq)
while not engine.idle:
    engine.step()
print(type(engine.runner.model.ops).__name__, "numba" in sys.modules, seq.tokens[25:])
print(sys.stderr.getvalue())
"""


def test_a_process_without_numba_serves_the_same_tokens(tmp_path: Path) -> None:
    if torch.get_num_threads() > 1:
        pytest.skip("these processes have one thread")
    make(tmp_path, hidden=64, layers=2, heads=4, kv_heads=2, vocab=300, context=96)
    asked: list[tuple[bool, list[str]]] = [(True, []), (True, ["numba"]), (False, [])]
    scripts = [PROCESS.format(folder=str(tmp_path), compiled=compiled, absent=absent) for compiled, absent in asked]
    fast, slow, off = (printed.split("\n", 1) for printed in forked(*scripts))
    assert fast[0].startswith("CompiledOps True") and "engine.compiled" not in fast[1]
    assert slow[0].startswith("Ops True") and "engine.compiled" in slow[1] and "numba" in slow[1]
    assert fast[0].split("[")[1] == slow[0].split("[")[1]
    assert off[0].startswith("Ops False"), "numba is not needed, so it must not even be imported"


KEEP_KV = ["LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM", "DeepseekV3ForCausalLM"]


@pytest.mark.parametrize(
    ("family", "precision", "threads"),
    all_pairs(KEEP_KV, ["float32", "bfloat16", "int8", "int4"], THREADS),
    indirect=["threads"],
)
def test_a_prompt_has_the_same_kv_bit_for_bit_in_chunks_of_any_size(family: str, precision: str) -> None:
    """Without windows. Chunks of one token are decodes, so there is none here."""
    runner = loaded(family, precision, scale=8, products="baton")
    pool = runner._paged.pool  # type: ignore[union-attr]
    pools = []
    for chunk in (300, 256, 100, 7):
        pool.fill_(7)
        prefill(runner, 300, chunk)
        pools.append(pool.clone())
    assert all(torch.equal(each, pools[0]) for each in pools) and pools[0].isfinite().all()
