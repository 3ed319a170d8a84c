"""The attention kernels against the formula, in Triton's interpreter where there is no device: ragged lengths, block tables in random
order, blocks of one token, tails full of NaN, windows, soft caps, scales, grouped, multi-query and one-vector KV."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from baton.engine.core.int5_rows import row_bytes
from baton.engine.gpu.attention import Layer, Packed, RoundedKv
from baton.engine.model.checkpoint import LayerAttention
from baton.engine.model.int5_rows import pack, unpack

kernels = pytest.importorskip("baton.engine.gpu.triton_attention", reason="needs triton", exc_type=ImportError)
storing = pytest.importorskip("baton.engine.gpu.triton_store", reason="needs triton", exc_type=ImportError)


@dataclass
class Paged:
    """Sequences in a pool that holds NaN wherever no sequence has written."""

    pool: Tensor  # [N, L, P, Hkv, bs, D]
    tables: Tensor  # [S, M] int32
    seats: Tensor  # [B] int32
    lens: Tensor  # [B] int32
    kv: list[Tensor]  # [len, P, Hkv, D] of each sequence, in layer 1


def paged(
    rng: random.Random,
    device: torch.device,
    lens: list[int],
    block_size: int,
    kv_heads: int,
    dim: int,
    parts: int = 2,
    dtype: torch.dtype = torch.float32,
) -> Paged:
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    width = -(-max(lens) // block_size) + 2
    blocks = sum(-(-n // block_size) for n in lens) + 3
    free = rng.sample(range(blocks), blocks)
    seats = rng.sample(range(len(lens) + 2), len(lens))
    pool = torch.full((blocks, 2, parts, kv_heads, block_size, dim), torch.nan)
    tables = torch.full((len(lens) + 2, width), 10**6, dtype=torch.int32)  # not a valid block
    kv = []
    for seat, n in zip(seats, lens, strict=True):
        mine = [free.pop() for _ in range(-(-n // block_size))]
        tables[seat, : len(mine)] = torch.tensor(mine)
        kv.append(torch.randn(n, parts, kv_heads, dim, generator=generator))
        for p in range(n):
            pool[mine[p // block_size], 1, :, :, p % block_size] = kv[-1][p]
    seated, lengths = (torch.tensor(values, dtype=torch.int32, device=device) for values in (seats, lens))
    return Paged(pool.to(device, dtype), tables.to(device), seated, lengths, [x.to(device, dtype) for x in kv])


def rounded(x: Tensor) -> RoundedKv:
    """Each row as int8, and its scale, NaN for one of NaN."""
    scales = x.float().abs().amax(dim=-1) / 127
    return RoundedKv((x / scales[..., None]).round().nan_to_num(7).to(torch.int8), scales)


def as_int8(case: Paged) -> RoundedKv:
    """Layer 1 of the pool, rounded, as are the numbers that the formula is given."""
    case.kv = [numbers * scales[..., None] for numbers, scales in map(rounded, case.kv)]
    numbers, scales = rounded(case.pool)
    return RoundedKv(numbers[:, 1], scales[:, 1])


def packed(x: Tensor) -> Packed:
    """Each row as int5, and its scale."""
    rows, scales = pack(x.reshape(-1, x.shape[-1]))
    return Packed(rows.view(*x.shape[:-1], -1), x.shape[-1], scales.view(x.shape[:-1]))


def unpacked(packed: Packed) -> Tensor:
    return unpack(packed.rows, packed.dim) * packed.scales[..., None]


def as_int5(case: Paged) -> Packed:
    """Layer 1 of the pool as rows of int5, as are the numbers that the formula is given."""
    case.kv = [unpacked(packed(kv)) for kv in case.kv]
    rows, dim, scales = packed(case.pool)
    return Packed(rows[:, 1], dim, scales[:, 1])


def formula(q: Tensor, kv: Tensor, how: LayerAttention, value_dim: int) -> Tensor:
    """In float64. q `[n, Hq, D]` are the last n positions of kv `[S, P, Hkv, D]`."""
    n, heads, dim = q.shape
    q, keys, values = q.double(), kv[:, 0].double(), kv[:, -1, :, :value_dim].double()
    keys, values = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q, keys) * (dim**-0.5 if how.scale is None else how.scale)
    if how.softcap is not None:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    age = torch.arange(len(kv) - n, len(kv), device=q.device)[:, None] - torch.arange(len(kv), device=q.device)
    hidden = (age < 0) | (age >= (how.window or 10**9))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(dim=-1), values)


SHAPES = [
    # block size, key heads, group, head dim
    pytest.param(16, 2, 4, 32, id="grouped"),
    pytest.param(1, 2, 1, 16, id="blocks-of-one-token"),
    pytest.param(5, 1, 8, 24, id="multi-query-odd-sizes"),
    pytest.param(256, 3, 1, 40, id="one-large-block"),
]
HOWS = [
    pytest.param(LayerAttention(), id="plain"),
    pytest.param(LayerAttention(window=7), id="window"),
    pytest.param(LayerAttention(window=100), id="wide-window"),
    pytest.param(LayerAttention(softcap=2.0, scale=0.7), id="softcap-scale"),
    pytest.param(LayerAttention(window=1, softcap=5.0), id="itself-only"),
]


def check_decode(
    device: torch.device, block_size: int, kv_heads: int, group: int, dim: int, how: LayerAttention, splits: int, lens: list[int]
) -> None:
    case = paged(random.Random(1), device, lens, block_size, kv_heads, dim)
    q = torch.randn(len(lens), kv_heads * group, dim, device=device)
    out = torch.full_like(q, torch.nan)
    kernels.decode(q, case.pool[:, 1], case.tables, case.seats, case.lens, how, out, splits)
    for b, kv in enumerate(case.kv):
        torch.testing.assert_close(out[b].double(), formula(q[b : b + 1], kv, how, dim)[0], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(("block_size", "kv_heads", "group", "dim"), SHAPES)
def test_decode_matches_the_formula(
    device: torch.device, block_size: int, kv_heads: int, group: int, dim: int, how: LayerAttention
) -> None:
    check_decode(device, block_size, kv_heads, group, dim, how, splits=4, lens=[1, 70, 16, 131, 33])


@pytest.mark.parametrize("how", HOWS)
def test_decode_without_splits_matches_the_formula(device: torch.device, how: LayerAttention) -> None:
    check_decode(device, 16, 2, 2, 16, how, splits=1, lens=[1, 131, 64])


def test_decode_with_more_heads_than_a_tile_matches_the_formula(device: torch.device) -> None:
    check_decode(device, 16, 1, 70, 16, LayerAttention(window=20), splits=2, lens=[40, 3])


@pytest.mark.parametrize("how", [HOWS[0], HOWS[1], HOWS[3]])
@pytest.mark.parametrize(("block_size", "kv_heads", "group", "dim"), SHAPES)
def test_prefill_matches_the_formula(
    device: torch.device, block_size: int, kv_heads: int, group: int, dim: int, how: LayerAttention
) -> None:
    """Whole prompts, chunks after cached tokens, and more queries than one tile. The kernel must not touch the first sequence."""
    rng = random.Random(2)
    lens, ns = [9, 5, 150, 40, 141], [1, 5, 140, 3, 2]
    case = paged(rng, device, lens, block_size, kv_heads, dim)
    firsts = torch.tensor([0, *torch.tensor(ns).cumsum(0).tolist()], dtype=torch.int32, device=device)
    q = torch.randn(sum(ns), kv_heads * group, dim, device=device)
    out = torch.full_like(q, torch.nan)
    kernels.prefill(q, case.pool[:, 1], case.tables, case.seats, case.lens, kernels.Queries(firsts, 1, max(ns)), how, out)
    assert out[0].isnan().all()
    for b in range(1, 5):
        rows = slice(int(firsts[b]), int(firsts[b + 1]))
        torch.testing.assert_close(out[rows].double(), formula(q[rows], case.kv[b], how, dim), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("how", [HOWS[0], HOWS[1], HOWS[3]])
@pytest.mark.parametrize(("parts", "dim", "value_dim"), [(2, 24, 24), (2, 80, 80), (1, 24, 16)])
@pytest.mark.parametrize("stored", [as_int8, as_int5])
def test_rounded_numbers_match_the_formula(
    device: torch.device, stored: Callable[[Paged], Layer], parts: int, dim: int, value_dim: int, how: LayerAttention
) -> None:
    case = paged(random.Random(7), device, [3, 90, 41], block_size=5, kv_heads=2, dim=dim, parts=parts)
    layer, firsts = stored(case), torch.tensor([0, 1, 28, 29], dtype=torch.int32, device=device)
    q = torch.randn(29, 6, dim, device=device)
    decoded, filled = (torch.full((n, 6, value_dim), torch.nan, device=device) for n in (3, 29))
    kernels.decode(q[:3], layer, case.tables, case.seats, case.lens, how, decoded, splits=2)
    kernels.prefill(q, layer, case.tables, case.seats, case.lens, kernels.Queries(firsts, 0, 27), how, filled)
    for b, kv in enumerate(case.kv):
        rows = slice(int(firsts[b]), int(firsts[b + 1]))
        torch.testing.assert_close(decoded[b].double(), formula(q[b : b + 1], kv, how, value_dim)[0], rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(filled[rows].double(), formula(q[rows], kv, how, value_dim), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("how", [HOWS[0], HOWS[1]])
def test_one_vector_can_be_both_key_and_value(device: torch.device, how: LayerAttention) -> None:
    """As in multi-head latent attention: the value is the first 32 of 40 numbers."""
    case = paged(random.Random(3), device, [3, 90, 41], block_size=16, kv_heads=1, dim=40, parts=1)
    q = torch.randn(3, 6, 40, device=device)
    out = torch.full((3, 6, 32), torch.nan, device=device)
    kernels.decode(q, case.pool[:, 1], case.tables, case.seats, case.lens, how, out, splits=2)
    for b, kv in enumerate(case.kv):
        torch.testing.assert_close(out[b].double(), formula(q[b : b + 1], kv, how, 32)[0], rtol=1e-4, atol=2e-5)
    firsts = torch.tensor([0, 3, 30, 31], dtype=torch.int32, device=device)
    q = torch.randn(31, 6, 40, device=device)
    out = torch.full((31, 6, 32), torch.nan, device=device)
    kernels.prefill(q, case.pool[:, 1], case.tables, case.seats, case.lens, kernels.Queries(firsts, 0, 27), how, out)
    for b, kv in enumerate(case.kv):
        rows = slice(int(firsts[b]), int(firsts[b + 1]))
        torch.testing.assert_close(out[rows].double(), formula(q[rows], kv, how, 32), rtol=1e-4, atol=2e-5)


def test_decode_supports_half_precision_and_strided_queries(device: torch.device) -> None:
    """q is a slice of one matrix's output, as in the model. The interpreter gets float16, because it multiplies bfloat16 as integers."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    case = paged(random.Random(4), device, [50, 129], block_size=16, kv_heads=2, dim=32, dtype=dtype)
    q = torch.randn(2, 12, 32, device=device).to(dtype)[:, :8]
    out = torch.empty(2, 8, 32, device=device, dtype=dtype)
    kernels.decode(q, case.pool[:, 1], case.tables, case.seats, case.lens, LayerAttention(), out, splits=4)
    for b, kv in enumerate(case.kv):
        torch.testing.assert_close(out[b].double(), formula(q[b : b + 1], kv, LayerAttention(), 32)[0], rtol=2e-2, atol=2e-2)


def test_splitting_changes_only_rounding(device: torch.device) -> None:
    case = paged(random.Random(5), device, [200], block_size=16, kv_heads=1, dim=16)
    q = torch.randn(1, 2, 16, device=device)
    outs = []
    for splits in (1, 2, 8, 64):
        outs.append(torch.empty_like(q))
        kernels.decode(q, case.pool[:, 1], case.tables, case.seats, case.lens, LayerAttention(), outs[-1], splits)
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=1e-5, atol=1e-6)


def test_splits_fill_the_device_and_are_powers_of_two() -> None:
    for batch in (1, 3, 8, 64, 256):
        found = kernels.splits(batch, kv_heads=8, processors=132)
        assert found.bit_count() == 1 and found <= kernels.MOST_SPLITS
        assert found * batch * 8 <= kernels.PROGRAMS_PER_PROCESSOR * 132 or found == 1
        assert 2 * found * batch * 8 > kernels.PROGRAMS_PER_PROCESSOR * 132 or found == kernels.MOST_SPLITS


@pytest.mark.parametrize(("block_size", "kv_heads", "dim", "parts"), [(16, 2, 32, 2), (1, 3, 24, 2), (5, 1, 40, 1)])
def test_store_writes_slots_and_zeroes_tails(device: torch.device, block_size: int, kv_heads: int, dim: int, parts: int) -> None:
    """Keys and values land in their slots, the requested tails are zeroed, and nothing else is touched."""
    generator = torch.Generator().manual_seed(6)
    pool = torch.randn(9, 2, parts, kv_heads, block_size, dim, generator=generator).to(device)
    expected = pool.clone()
    slots = [3 * block_size, 7 * block_size + block_size - 1, 5 * block_size + block_size // 2]
    tails = [block_size - 1, 0, 0]
    columns = torch.randn(3, 5, parts, kv_heads, dim, generator=generator).to(device)
    kv = columns[:, 2]
    for t, (slot, tail) in enumerate(zip(slots, tails, strict=True)):
        block, offset = divmod(slot, block_size)
        expected[block, 1, :, :, offset] = kv[t]
        expected[block, 1, :, :, offset + 1 : offset + 1 + tail] = 0
    sent = [torch.tensor(values, device=device) for values in (slots, tails)]
    storing.store(kv, pool[:, 1], *sent)
    assert torch.equal(pool, expected)


def test_store_rounds_each_row_and_zeroes_the_tails_of_numbers_and_scales(device: torch.device) -> None:
    """A row of zeros has a scale, too; one that is not finite has a scale that says so, and numbers that hide it from nobody."""
    pool, scales = torch.full((4, 2, 2, 3, 5, 24), 9, dtype=torch.int8, device=device), torch.full((4, 2, 2, 3, 5), 9.0, device=device)
    kv = torch.randn(3, 2, 3, 24, generator=torch.Generator().manual_seed(1)).to(device)
    kv[0, 0, 1], kv[1, 0, 0, 3], kv[1, 1, 2, 7] = 0, torch.nan, -torch.inf
    slots, tails = (torch.tensor(values, device=device) for values in ([2 * 5 + 1, 3, 4], [3, 0, 0]))
    storing.store(kv, RoundedKv(pool[:, 1], scales[:, 1]), slots, tails)
    assert (pool[:, 0] == 9).all() and (scales[:, 0] == 9).all() and (pool[:, 1] != 9).any(dim=-1).sum() == 6 * 6
    for token, (block, offset) in enumerate([(2, 1), (0, 3), (0, 4)]):
        numbers, scale = pool[block, 1, :, :, offset], scales[block, 1, :, :, offset]
        plain = kv[token].isfinite().all(dim=-1)
        assert torch.equal(scale.isfinite() & (scale > 0), plain) and not numbers[~plain].any()
        error = (numbers * scale[..., None] - kv[token]).abs()[plain]
        assert (error <= 0.501 * scale[plain][:, None]).all() and (numbers.abs().amax(dim=-1)[plain & kv[token].any(dim=-1)] == 127).all()
    assert not pool[2, 1, :, :, 2:].any() and not scales[2, 1, :, :, 2:].any()


def test_store_packs_rows_of_int5_and_zeroes_their_tails(device: torch.device) -> None:
    """Numbers may be rounded to the next level, where a device divides in another way. The scale of a row that is not finite says so."""
    pool = torch.full((4, 2, 2, 3, 5, row_bytes(40)), 9, dtype=torch.uint8, device=device)
    scales = torch.full((4, 2, 2, 3, 5), 9.0, dtype=torch.bfloat16, device=device)
    kv = torch.randn(3, 2, 3, 40, generator=torch.Generator().manual_seed(1)).to(device)
    kv[0, 0, 1], kv[1, 0, 0, 3], kv[1, 1, 2, 37] = 0, torch.nan, -torch.inf
    slots, tails = (torch.tensor(values, device=device) for values in ([2 * 5 + 1, 3, 4], [3, 0, 0]))
    storing.store(kv, Packed(pool[:, 1], 40, scales[:, 1]), slots, tails)
    assert (pool[:, 0] == 9).all() and (scales[:, 0] == 9).all() and (pool[:, 1] != 9).any(dim=-1).sum() == 6 * 6
    assert not pool[2, 1, :, :, 2:].any() and not scales[2, 1, :, :, 2:].any()
    for token, (block, offset) in enumerate([(2, 1), (0, 3), (0, 4)]):
        stored = Packed(pool[block, 1, :, :, offset], 40, scales[block, 1, :, :, offset])
        found, expected = unpacked(stored), unpacked(packed(kv[token]))
        assert torch.equal(found.isnan(), expected.isnan())
        assert (found == expected).float().mean() > 0.95 or token == 1
        torch.testing.assert_close(found, expected, rtol=0, atol=0.5, equal_nan=True)


def test_flatten_tables_joins_the_blocks_of_each_seat(device: torch.device) -> None:
    tables = torch.arange(40, dtype=torch.int32, device=device).view(4, 10)
    out = torch.full((12,), -1, dtype=torch.int32, device=device)
    kernels.flatten_tables(tables, *(torch.tensor(x, dtype=torch.int32, device=device) for x in ([2, 0, 3], [0, 1, 8, 11])), 7, out)
    assert out.tolist() == [20, *range(7), 30, 31, 32, -1]
