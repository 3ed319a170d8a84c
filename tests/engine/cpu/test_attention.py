"""Attention that reads blocks in place, against the formula in float64: ragged lengths, blocks in any order, slots that hold NaN, and KV as
it is or rounded to int8 or int5."""

import ctypes
import itertools
import math
import os
import random
from collections import defaultdict
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import carray
from torch import Tensor

from baton.engine.core.int5_rows import GROUP, GROUP_BYTES, row_bytes
from baton.engine.cpu import kernel, kv_int5, kv_int8
from baton.engine.cpu.decode_attention import attend_in_place, store
from baton.engine.cpu.span_attention import attend_span
from baton.engine.model.attention import CUT as KEYS
from baton.engine.model.attention import Kernels, Meta, PagedAttention, PagedKv, Span, batch_order, plan
from baton.engine.model.checkpoint import LayerAttention
from baton.engine.model.int5_rows import pack

U = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}  # largest relative error of rounding a number
LAYERS = 2
FEWER = int(os.environ.get("BATON_TEST_FEWER", "1"))  # times fewer examples: for other processors, see test_panels.py
# Without the other kernels, which take a minute to compile.
ATTENTION = {"": Kernels(attend_in_place, attend_span, store), "int8": kv_int8.ATTENTION, "int5": kv_int5.ATTENTION}
STORED = list(ATTENTION)
SCALES = {"int8": torch.float32, "int5": torch.bfloat16}


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    block_size: int
    dtype: torch.dtype = torch.float32
    value_dim: int = 0  # if not 0, there is one part
    stored: str = ""  # as int8 or int5

    @property
    def parts(self) -> int:
        return 1 if self.value_dim else 2


PLAIN = LayerAttention()
SHAPES = st.builds(
    lambda kv_heads, group, half, **rest: Shape(kv_heads * group, kv_heads, 2 * half, **rest),
    kv_heads=st.integers(1, 4),
    group=st.integers(1, 4),
    half=st.integers(1, 40) | st.sampled_from([16, 32]),  # heads of whole cache lines have products of their own
    block_size=st.sampled_from([1, 2, 3, 4, 7, 16, 64]),
    dtype=st.sampled_from(list(U)),
    stored=st.sampled_from(STORED),
)
HOWS = st.builds(
    LayerAttention,
    window=st.none() | st.integers(1, 40),
    softcap=st.none() | st.floats(0.5, 30.0),
    scale=st.none() | st.floats(0.05, 1.0),
)


def rounded(kv: Tensor) -> tuple[Tensor, Tensor]:
    """What is stored as int8 of numbers `[*, D]`: these and their scales `[*]`."""
    scales = (kv.float().abs().amax(dim=-1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (kv.float() * (1 / scales)[..., None]).round().to(torch.int8), scales


def unpacked(rows: Tensor, dim: int) -> Tensor:
    """The levels of rows of int5 `[*, bytes]`, `[*, dim]` in float64: exactly."""
    found = []
    for group in rows.unflatten(-1, (-1, GROUP_BYTES)).unbind(-2):
        nibbles, fifth = group[..., :16], group[..., 16:].contiguous().view(torch.int32).long()
        high = fifth >> torch.arange(GROUP) & 1
        found.append(torch.cat((nibbles % 16, nibbles // 16), dim=-1) - 16.0 * high)
    return torch.cat(found, dim=-1)[..., :dim].double()


class Case:
    """Sequences of given lengths in randomly drawn blocks of a pool of NaN; the last tokens of each are new."""

    def __init__(self, shape: Shape, lengths: list[tuple[int, int]], seed: int = 0, in_place: bool = True, decodes: bool = True) -> None:
        """`lengths`: (tokens before, new tokens) of each. `decodes`: a sequence with one new token decodes."""
        self.shape, self.lengths = shape, lengths
        generator = torch.Generator().manual_seed(seed)
        tables = [-(-(before + new) // shape.block_size) for before, new in lengths]
        ids = list(range(sum(tables) + 3))
        random.Random(seed).shuffle(ids)
        size = len(ids), LAYERS, shape.parts, shape.kv_heads, shape.block_size, shape.dim
        self.pool = torch.full(size, torch.nan, dtype=shape.dtype)
        if shape.stored == "int8":
            self.pool = torch.full(size, 7, dtype=torch.int8)
        elif shape.stored == "int5":
            self.pool = torch.full((*size[:-1], row_bytes(shape.dim)), 255, dtype=torch.uint8)
        self.scales = torch.full(size[:-1], torch.nan, dtype=SCALES[shape.stored]) if shape.stored else None
        self.spans = [
            Span(before, new, [ids.pop() for _ in range(count)], steps=decodes and new == 1)
            for (before, new), count in zip(lengths, tables, strict=True)
        ]
        self.given = [
            torch.randn(before + new, shape.parts, shape.kv_heads, shape.dim, generator=generator).to(shape.dtype)
            for before, new in lengths
        ]
        self.kv = list(self.given)  # as it is read
        for i, (span, kv) in enumerate(zip(self.spans, self.given, strict=True)):
            numbers, scales = kv, None
            if shape.stored == "int8":
                numbers, scales = rounded(kv)
                self.kv[i] = numbers * scales[..., None]
            elif shape.stored == "int5":
                rows, scales = pack(kv.reshape(-1, shape.dim))
                numbers, scales = rows.view(*kv.shape[:-1], -1), scales.view(kv.shape[:-1])
                self.kv[i] = unpacked(numbers, shape.dim) * scales[..., None]
            for position in range(span.start):
                self.slot(span, position, self.pool)[:] = numbers[position]
                if scales is not None:
                    self.slot(span, position)[:] = scales[position]
        self.q = torch.randn(sum(new for _, new in lengths), shape.heads, shape.dim, generator=generator).to(shape.dtype)
        kernels = ATTENTION[shape.stored] if in_place else None
        self.paged = PagedKv(self.pool, shape.value_dim, kernels, self.scales, shape.dtype, shape.dim)

    def slot(self, span: Span, position: int, of: Tensor | None = None) -> Tensor:
        """[L, P, Hkv, D], or of scales [L, P, Hkv]"""
        of = (self.pool if self.scales is None else self.scales) if of is None else of
        return of[span.blocks[position // self.shape.block_size], :, :, :, position % self.shape.block_size]

    def read(self) -> Tensor:
        """A copy of the pool, as it is read."""
        numbers = unpacked(self.pool, self.shape.dim) if self.shape.stored == "int5" else self.pool
        return numbers.clone() if self.scales is None else numbers * self.scales[..., None]

    def spoil(self, span: Span, position: int, part: int) -> None:
        """Something in the slot is no number: of rounded ones, the scales."""
        self.slot(span, position)[:, part] = torch.nan

    def plan(self, how: LayerAttention = PLAIN) -> Meta:
        return plan(self.spans, self.paged, [how] * LAYERS)

    def attend(self, how: LayerAttention = PLAIN, layer: int = 1) -> Tensor:
        new = torch.cat([kv[span.start :] for span, kv in zip(self.spans, self.given, strict=True)])
        return PagedAttention(self.paged, self.plan(how))(layer, self.q, new)

    def expected(self, how: LayerAttention = PLAIN) -> Tensor:
        """[T, Hq * Dv] in float64."""
        return self.expected_within(how)[0]

    def expected_within(self, how: LayerAttention = PLAIN) -> tuple[Tensor, Tensor]:
        """The answer in float64, one query at a time, and how far float32 (with bfloat16's rounding) may be from it: [T, Hq * Dv] each."""
        rows, bounds, group = [], [], self.shape.heads // self.shape.kv_heads
        scale = self.shape.dim**-0.5 if how.scale is None else how.scale
        queries = iter(self.q.double().view(len(self.q), self.shape.kv_heads, group, -1))
        for span, kv in zip(self.spans, self.kv, strict=True):
            parts = kv[:, 0], kv[:, -1, :, : self.shape.value_dim or self.shape.dim]
            keys, values = (part.double().transpose(0, 1) for part in parts)  # [Hkv, positions, D or Dv]
            for position in range(span.start, span.start + span.n):
                query = next(queries)
                seen = slice(0 if how.window is None else max(0, position + 1 - how.window), position + 1)
                scores = query @ keys[:, seen].mT * scale  # [Hkv, group, keys]
                terms = query.abs() @ keys[:, seen].abs().mT * scale
                if how.softcap is not None:
                    scores = how.softcap * torch.tanh(scores / how.softcap)
                rows.append(scores.softmax(dim=-1) @ values[:, seen])
                bounds.append(error_bound(scores, terms, values[:, seen], self.shape, how.softcap or 0.0))
        return torch.stack(rows).view(len(self.q), -1), torch.stack(bounds).view(len(self.q), -1)

    def check(self, how: LayerAttention = PLAIN) -> None:
        before = self.read()
        out, (expected, bound) = self.attend(how), self.expected_within(how)
        error = (out.double() - expected).abs()
        assert (error <= bound).all(), f"{(error / bound).max():.2f} times what rounding explains"
        after = self.read()
        for span, kv in zip(self.spans, self.kv, strict=True):
            for position in range(span.start, span.start + span.n):
                assert torch.equal(self.slot(span, position, after)[1], kv[position]), "the new key and value must be in their slot"
                self.slot(span, position, after)[:] = self.slot(span, position, before)[:] = torch.nan
        unchanged = (after == before) | (before.isnan() & (after.isnan() | (after == 0)))
        assert unchanged.all(), "only new slots may be written, and only newly begun blocks zeroed"


def error_bound(scores: Tensor, terms: Tensor, values: Tensor, shape: Shape, softcap: float) -> Tensor:
    """How far rounding alone can move the answer of one query: [Hkv, group, Dv].

    scores: [Hkv, group, keys]; terms: Σ |q| |k| · scale of each; values: [Hkv, keys, Dv]. With p = softmax(scores) and o = p · values, to
    first order in u:

    - A score is a sum of `dim` products of two rounded factors. If there is a cap, it is applied (an exponential, a sum, a quotient and a
      difference of numbers up to 2 · cap); then the greatest score is subtracted. So a score is wrong by at most
      δ = u · ((dim + 2) · terms + 12 · cap + |score - greatest|), and its exponential by 4 u more.
    - That moves the answer by Σ p · δ · |v - o|: if one key has all the weight, an error in its score moves nothing.
    - The sums of `keys` numbers in the numerator and the denominator are wrong by keys · u of Σ p · |v| and of |o|; the quotient adds
      u of |o|.
    - In bfloat16 the weights are rounded, then the sum, then the answer.
    - A number that is stored as int8 is multiplied by its scale, and rounded to the type of the queries; so is one of int5.

    A long sum is held to less than its worst case: n independent rounding errors add up to more than 7 √n u only once in 10^10
    sums (Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019, theorem 3.1).
    """

    def steps(n: int) -> float:
        return min(n, 7 * math.sqrt(n))

    u, p = U[torch.float32], scores.softmax(dim=-1)
    o, size = p @ values, p @ values.abs()
    wrong = u * (steps(shape.dim + 2) * terms + 12 * softcap + (scores - scores.amax(dim=-1, keepdim=True)).abs() + 4)
    wrong += (U[shape.dtype] if shape.stored else 0) * terms
    heads = zip((p * wrong).split(1, dim=1), o.split(1, dim=1), strict=True)  # one after another: their distances fit into a cache
    moved = torch.cat([weights @ (values - mean).abs() for weights, mean in heads], dim=1)
    bound = moved + u * (steps(p.shape[-1]) + 1) * (size + o.abs())
    if shape.stored:
        bound += U[shape.dtype] * size
    if shape.dtype == torch.bfloat16:
        bound += U[torch.bfloat16] * (size + 2 * o.abs())
    return bound


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_exceeds_the_rounding_bound(dtype: torch.dtype) -> None:
    """Negative control: queries that lose half of their bits exceed the bound."""
    case = Case(Shape(4, 2, 80, 16), [(60, 1), (20, 9)])
    want, bound = case.expected_within()
    case.q = case.q.to(dtype).float()
    assert ((case.expected() - want).abs() > bound).float().mean() > 0.5


@given(SHAPES, HOWS, st.lists(st.integers(0, 70), min_size=1, max_size=9), st.integers(0, 1000), st.sampled_from([1, 2, 5]))
@settings(max_examples=80 // FEWER, deadline=None)
def test_decodes_match_the_formula(shape: Shape, how: LayerAttention, before: list[int], seed: int, threads: int) -> None:
    run_with(threads, Case(shape, [(length, 1) for length in before], seed), how)


def run_with(threads: int, case: Case, how: LayerAttention = PLAIN) -> None:
    usual, shared_from = torch.get_num_threads(), kernel.SHARED_FROM
    torch.set_num_threads(threads)
    kernel.SHARED_FROM = 1
    try:
        case.check(how)
    finally:
        torch.set_num_threads(usual)
        kernel.SHARED_FROM = shared_from


@given(
    st.integers(1, 4),
    st.integers(1, 30),
    st.integers(1, 30),
    HOWS,
    st.lists(st.integers(0, 60), min_size=1, max_size=5),
    st.sampled_from([1, 16]),
    st.sampled_from(STORED),
)
@settings(max_examples=40 // FEWER, deadline=None)
def test_decodes_match_when_one_vector_is_key_and_value(
    heads: int, value: int, rest: int, how: LayerAttention, before: list[int], block_size: int, stored: str
) -> None:
    shape = Shape(heads, 1, value + rest, block_size, value_dim=value, stored=stored)
    Case(shape, [(length, 1) for length in before]).check(how)


@pytest.mark.parametrize("batch", [1, 2, 31, 64])
@pytest.mark.parametrize("dtype", list(U))
@pytest.mark.parametrize("stored", STORED)
def test_batches_of_decodes_match_the_formula(batch: int, dtype: torch.dtype, stored: str) -> None:
    rng = random.Random(batch)
    Case(Shape(8, 2, 64, 16, dtype, stored=stored), [(rng.randrange(200), 1) for _ in range(batch)]).check()


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_one_long_sequence_matches_the_formula(threads: int) -> None:
    run_with(threads, Case(Shape(6, 3, 32, 16), [(1500, 1)]))


@given(
    SHAPES,
    HOWS,
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from([1, 1, 2, 9, 20])), min_size=1, max_size=6),
    st.integers(0, 1000),
)
@settings(max_examples=60 // FEWER, deadline=None)
def test_decodes_beside_longer_spans_match_the_formula(
    shape: Shape, how: LayerAttention, lengths: list[tuple[int, int]], seed: int
) -> None:
    lengths = [lengths[i] for i in batch_order([Span(before, new, [], steps=new == 1) for before, new in lengths])]
    Case(shape, lengths, seed).check(how)


@given(SHAPES, HOWS, st.integers(0, 60) | st.integers(200, 700), st.integers(1, 90), st.sampled_from([1, 3]), st.booleans())
@settings(max_examples=100 // FEWER, deadline=None)
def test_spans_match_the_formula(shape: Shape, how: LayerAttention, before: int, new: int, threads: int, latent: bool) -> None:
    if latent:
        shape = replace(shape, kv_heads=1, value_dim=max(1, shape.dim - 3))
    run_with(threads, Case(shape, [(before, new)], decodes=False), how)


@pytest.mark.parametrize("dtype", list(U))
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (3, 3, 40), (80, 1, 16)])
def test_spans_of_several_times_as_many_keys_as_are_met_at_once_match_the_formula(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, stored: str
) -> None:
    case = Case(Shape(heads, kv_heads, dim, 16, dtype, stored=stored), [(3 * KEYS + 5, 40)])
    case.q *= 20  # so that greater scores are found late
    case.check()


@given(SHAPES, HOWS, st.integers(2, 2 * KEYS), st.data())
@settings(max_examples=60 // FEWER, deadline=None)
def test_a_token_has_the_same_bits_in_any_span(shape: Shape, how: LayerAttention, tokens: int, data: st.DataObject) -> None:
    """So another size of chunks does not change a result: not even a chunk of one token, nor with a window."""
    before = data.draw(st.integers(0, tokens - 1))
    whole, part = (Case(shape, [(first, tokens - first)], decodes=False) for first in (0, before))
    part.q = whole.q[before:]
    assert torch.equal(part.attend(how), whole.attend(how)[before:])


def test_keys_that_a_token_does_not_see_change_no_bit_of_it() -> None:
    case = Case(Shape(4, 2, 16, 16), [(0, 100)])
    first = case.attend()
    case.given[0][60:] = 1e4
    assert torch.equal(case.attend()[:60], first[:60])
    assert not torch.equal(case.attend()[60:], first[60:])


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("stored", STORED)
def test_nan_in_a_longer_span_affects_only_its_sequence(part: int, stored: str) -> None:
    case = Case(Shape(4, 2, 16, 4, stored=stored), [(30, 3), (30, 5), (30, 4)])
    case.spoil(case.spans[1], 11, part)
    assert case.attend().isnan().any(dim=1).tolist() == [False] * 3 + [True] * 5 + [False] * 4


def test_each_layer_can_have_its_own_window() -> None:
    case = Case(Shape(4, 2, 16, 4), [(50, 1), (9, 1), (30, 3)])
    hows = [LayerAttention(window=8), LayerAttention(scale=0.5, softcap=3.0)]
    meta = plan(case.spans, case.paged, hows)
    new = torch.cat([kv[span.start :] for span, kv in zip(case.spans, case.kv, strict=True)])
    for layer, how in enumerate(hows):
        out = PagedAttention(case.paged, meta)(layer, case.q, new)
        torch.testing.assert_close(out.double(), case.expected(how), atol=1e-5, rtol=1e-5)


def test_strided_queries_keys_and_values_match_the_formula() -> None:
    """q and kv as views of one matrix's output, with rows longer than they are, and with heads that are not adjacent."""
    case = Case(Shape(4, 2, 16, 4), [(5, 1), (20, 1)])
    rows = torch.cat((case.q, torch.stack([kv[-1] for kv in case.kv]).view(2, 4, 16), torch.full((2, 1, 16), torch.nan)), dim=1)
    q, kv = rows[:, :4], rows[:, 4:8].view(2, 2, 2, 16)
    expected = PagedAttention(case.paged, case.plan())(0, q, kv)
    torch.testing.assert_close(expected.double(), case.expected(), atol=1e-5, rtol=1e-5)
    spread = q.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(PagedAttention(case.paged, case.plan())(0, spread, kv), expected)


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("stored", STORED)
def test_nan_in_a_key_or_value_affects_only_its_sequence(part: int, stored: str) -> None:
    case = Case(Shape(4, 2, 16, 4, stored=stored), [(30, 1), (30, 1), (30, 1)])
    case.spoil(case.spans[1], 11, part)
    assert case.attend().isnan().any(dim=1).tolist() == [False, True, False]


@pytest.mark.parametrize("given", [torch.nan, torch.inf])
@pytest.mark.parametrize("stored", ["int8", "int5"])
def test_a_key_that_is_no_number_is_none_once_it_is_rounded(stored: str, given: float) -> None:
    """So the logits are not finite, and the sequence fails instead of going on with what was made of it."""
    for new in (1, 3):
        case = Case(Shape(4, 2, 16, 4, stored=stored), [(30, new), (30, new)])
        case.given[1][30, 0, :, 5] = given
        assert not case.attend()[new:].isfinite().all(dim=1).any() and case.attend()[:new].isfinite().all()


@pytest.mark.parametrize("stored", STORED)
def test_another_block_changes_the_answer(stored: str) -> None:
    """Negative control: attention reads the blocks that the block table names."""
    case = Case(Shape(4, 2, 16, 4, stored=stored), [(30, 1), (30, 1)])
    case.spans[0].blocks[2] = case.spans[1].blocks[2]  # type: ignore[index]
    assert (case.attend().double() - case.expected()).abs().amax(dim=1)[0] > 1e-2


@pytest.mark.parametrize("stored", STORED)
def test_without_the_kernel_no_blocks_are_read_in_place(stored: str) -> None:
    lengths = [(9, 1), (30, 1), (5, 4)]
    plain, in_place = (Case(Shape(4, 2, 16, 4, stored=stored), lengths, in_place=way) for way in (False, True))
    assert plain.plan().decodes is None
    found = in_place.plan().decodes
    assert found is not None and found.size == 2
    torch.testing.assert_close(plain.attend(), in_place.attend(), atol=1e-5, rtol=1e-5)
    assert torch.equal(plain.read().nan_to_num(), in_place.read().nan_to_num()), "stored bytes do not depend on who stores them"


def test_only_newly_begun_blocks_are_zeroed() -> None:
    case = Case(Shape(2, 2, 4, 4), [(8, 1), (9, 1), (3, 6), (4, 2)])
    case.plan()
    begun = [(span.blocks[-1], index) for index, span in enumerate(case.spans) if index != 1]
    for block, _ in begun:
        assert (case.pool[block] == 0).all()
    assert (case.pool == 0).flatten(1).any(dim=1).sum() == len(begun)


def test_kernels_work_without_a_place_to_cache_them(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(kernel, "place_of", lambda file, half: None)
    monkeypatch.setattr(kernel, "_numbers", defaultdict(lambda: itertools.count(1)))

    def first_two_are_one(pointer):  # type: ignore[no-untyped-def]
        carray(pointer, 2)[1] = carray(pointer, 2)[0]

    memory = torch.tensor([7, 0])
    ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(kernel.c_function(first_two_are_one).address)(memory.data_ptr())
    assert memory.tolist() == [7, 7] and "BATON_KERNEL_CACHE" in caplog.text
