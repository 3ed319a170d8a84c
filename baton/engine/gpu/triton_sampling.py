"""The draw of `baton.engine.model.sampler` in two kernels that never wait for the host.

`cutoff` finds the least score that top-k and top-p let through, without sorting: scores relative to the best are at most 0, so the bits of
their magnitude order them. A search over these bits, with several pivots at a time, finds the score at which the count, or the mass, of all
scores at least as good crosses the requested value. A program owns a row and loops until it has found it; the row is read about
fourteen times for each of the two. `race` draws from what is left by the Gumbel-max trick, with the noise of `baton.engine.core.sampling`.

Masses are summed in float64, in an order that depends only on the vocabulary: neither the other rows nor the device's scheduling matter.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.gpu.sampler import Filters
from baton.engine.gpu.triton_blocks import GOLDEN, mix64

# On an H200, 256 rows of 128,256 scores: top-p in 1.6 ms, top-k in 0.9. With 8 pivots and chunks of 256: 3.1 and 2.0.
PIVOTS = 4
CHUNK = 2048  # scores compared with all pivots at a time
WARPS = 16
RACE = 2048  # scores that race within one program

_INFINITE = tl.constexpr(0x7F800000)  # bits of float32's infinity: the magnitude of a masked score
_GOLDEN = tl.constexpr(GOLDEN)


@triton.jit
def _weigh(row, best, temperature, vocab, pivots, CHUNK: tl.constexpr, PIVOTS: tl.constexpr):
    """How many scores have a magnitude of at most each pivot, and their mass: `[PIVOTS]` int64 and float64."""
    counts = tl.zeros([CHUNK, PIVOTS], tl.int32)
    masses = tl.zeros([CHUNK, PIVOTS], tl.float64)
    for at in range(0, vocab, CHUNK):
        i = at + tl.arange(0, CHUNK)
        scaled = (tl.load(row + i, mask=i < vocab, other=float("-inf")) - best) / temperature
        bits = tl.abs(scaled).to(tl.int32, bitcast=True).to(tl.int64)
        within = (bits[:, None] <= pivots[None, :]) & (i < vocab)[:, None]
        counts += within.to(tl.int32)
        masses += tl.where(within, tl.exp(scaled)[:, None], 0.0).to(tl.float64)
    return tl.sum(counts, 0).to(tl.int64), tl.sum(masses, 0)


@triton.jit
def _cutoff_kernel(scores, bests, temperatures, top_ks, top_ps, least, vocab, row_stride, CHUNK: tl.constexpr, PIVOTS: tl.constexpr):
    r = tl.program_id(0)
    row = scores + r.to(tl.int64) * row_stride
    best = tl.load(bests + r)
    temperature = tl.load(temperatures + r)
    k = tl.load(top_ks + r)
    p = tl.load(top_ps + r)
    steps = tl.arange(0, PIVOTS).to(tl.int64) + 1
    # Invariant of both searches: too little is within `low`, enough is within `high`, and `below` and `upto` count the scores within them.
    # A search ends when `low` and `high` are neighbours, or when a single score is between them.
    low = tl.full([], -1, tl.int64)
    high = tl.full([], _INFINITE, tl.int64)
    below = tl.full([], 0, tl.int64)
    upto = below + vocab
    while (k < vocab) & (high - low > 1) & (upto - below > 1):
        pivots = low + (high - low) * steps // (PIVOTS + 1)
        counts, masses = _weigh(row, best, temperature, vocab, pivots, CHUNK, PIVOTS)
        short = counts < k
        low = tl.max(tl.where(short, pivots, low), 0)
        below = tl.max(tl.where(short, counts, below), 0)
        high = tl.min(tl.where(short, high, pivots), 0)
        upto = tl.min(tl.where(short, upto, counts), 0)
    if p < 1:
        counts, masses = _weigh(row, best, temperature, vocab, high + steps * 0, CHUNK, PIVOTS)
        target = p * tl.max(masses, 0)  # of what top-k keeps: k scores, and those that tie with the k-th
        low = tl.full([], -1, tl.int64)
        below = tl.full([], 0, tl.int64)
        while (high - low > 1) & (upto - below > 1):
            pivots = low + (high - low) * steps // (PIVOTS + 1)
            counts, masses = _weigh(row, best, temperature, vocab, pivots, CHUNK, PIVOTS)
            short = masses < target
            low = tl.max(tl.where(short, pivots, low), 0)
            below = tl.max(tl.where(short, counts, below), 0)
            high = tl.min(tl.where(short, high, pivots), 0)
            upto = tl.min(tl.where(short, upto, counts), 0)
    tl.store(least + r, -high.to(tl.int32).to(tl.float32, bitcast=True))


@triton.jit
def _race_kernel(scores, bests, temperatures, least, greedy, keys, firsts, winners, vocab, row_stride, RACE: tl.constexpr):
    r = tl.program_id(0)
    piece = tl.program_id(1)
    i = piece * RACE + tl.arange(0, RACE)
    x = tl.load(scores + r.to(tl.int64) * row_stride + i, mask=i < vocab, other=float("-inf"))
    scaled = (x - tl.load(bests + r)) / tl.load(temperatures + r)
    key = tl.load(keys + r).to(tl.uint64, bitcast=True)
    bits = mix64(key + (i + 1).to(tl.uint64) * _GOLDEN) >> 11
    e = -tl.log(bits.to(tl.float64) * (1.0 / (1 << 53)))
    time = tl.where(tl.load(greedy + r), scaled.to(tl.float64), tl.exp(scaled.to(tl.float64)) / e)
    time = tl.where((scaled >= tl.load(least + r)) & (i < vocab), time, float("-inf"))
    first, winner = tl.max(time, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(firsts + r * tl.num_programs(1) + piece, first)
    tl.store(winners + r * tl.num_programs(1) + piece, piece * RACE + winner)


def pick(scores: Tensor, best: Tensor, filters: Filters) -> Tensor:
    """Token ids `[R]` of scores `[R, V]` float32 under the filters of their rows; `best` `[R]` is the highest of each."""
    least = filters.floor
    if filters.any_top:
        least = torch.maximum(least, cutoff(scores, best, filters))
    return race(scores, best, least, filters)


def cutoff(scores: Tensor, best: Tensor, filters: Filters) -> Tensor:
    """Least (score - best) / temperature `[R]` that top-k, and top-p of what top-k leaves, let through; ties stay in together."""
    least = torch.empty_like(best)
    rows, vocab = scores.shape
    _cutoff_kernel[(rows,)](
        scores,
        best,
        filters.temperature,
        filters.top_k,
        filters.top_p,
        least,
        vocab,
        scores.stride(0),
        CHUNK=CHUNK,
        PIVOTS=PIVOTS,
        num_warps=WARPS,
    )
    return least


def race(scores: Tensor, best: Tensor, least: Tensor, filters: Filters) -> Tensor:
    """Token ids `[R]`: drawn from softmax of the scaled scores that are at least `least` `[R]`, or the best if greedy."""
    rows, vocab = scores.shape
    pieces = triton.cdiv(vocab, RACE)
    firsts = torch.empty(rows, pieces, dtype=torch.float64, device=scores.device)
    winners = torch.empty(rows, pieces, dtype=torch.int64, device=scores.device)
    _race_kernel[(rows, pieces)](
        scores,
        best,
        filters.temperature,
        least,
        filters.greedy,
        filters.keys,
        firsts,
        winners,
        vocab,
        scores.stride(0),
        RACE=RACE,
        num_warps=8,
    )
    return winners.gather(1, firsts.argmax(dim=1, keepdim=True))[:, 0].clamp_(max=vocab - 1)  # a row of NaN has no winner
