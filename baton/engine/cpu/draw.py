"""The draw of `baton.engine.model.sampler`, without sorting, and with a logarithm for few tokens.

The least score that a filter keeps is found by radix select. Scores relative to the best are at most 0, so the bits of their magnitude
order them: a pass over the row adds up the weights of the scores by some of these bits, starting with the highest, and the sums say which
bits the least score has.

Of the tokens that are kept, the one with the greatest e^s / e wins, where e = -log u (the Gumbel-max trick). As -log u ≥ 1 - u, a token
whose e^s / (1 - u) is not above the best so far cannot win, and its logarithm is not needed.
"""

import math
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
import torch
from numba import njit
from torch import Tensor

from baton.engine.core.masks import WORD, Words, stacked
from baton.engine.core.sampling import GOLDEN, GREEDY_BELOW, MIXERS, SamplingParams, noise_key
from baton.engine.core.sequence import Sequence
from baton.engine.cpu.kernel import floats, int32s, int64s, kernel
from baton.engine.cpu.primitives import SUMS, exp, magnitude, share
from baton.engine.cpu.softmax import greatest_of

PASSES = ((20, 31), (10, 20), (0, 10))  # the lowest of the bits that a pass looks at, and the one after the highest
RACE = 1024  # tokens that get noise at a time
NEVER = np.float32(-math.inf)
SLACK = 1 + 2.0**-16  # more than a weight's error
STEP, MIX, MIX_MORE = np.uint64(GOLDEN), *(np.uint64(each) for each in MIXERS)


def draw(scores: Tensor, rows: Seq[int], seqs: Seq[Sequence], forms: Seq[Words | None]) -> list[int]:
    """A `baton.engine.model.sampler.Draw` of float32 scores."""
    limits, counts = filters(rows, [seq.params for seq in seqs])
    keys = noise_keys([(seq.params.seed, len(seq.tokens)) for seq in seqs])
    ids = np.empty(len(rows), np.int64)
    allowed = None if (words := stacked(forms, scores.shape[1])) is None else torch.from_numpy(words)
    _draw(scores.contiguous(), allowed, *(torch.from_numpy(each) for each in (limits, counts, keys, ids)))
    return ids.tolist()


def filters(rows: Seq[int], params: Seq[SamplingParams]) -> tuple["npt.NDArray[np.float32]", "npt.NDArray[np.int64]"]:
    """`limits` and `counts` of the kernel."""
    limits = np.array([(p.temperature if p.temperature >= GREEDY_BELOW else 0.0, p.top_p, p.min_p, p.top_a) for p in params], np.float32)
    return limits, np.array([(row, p.top_k) for row, p in zip(rows, params, strict=True)], np.int64)


def noise_keys(places: Seq[tuple[int, int]]) -> "npt.NDArray[np.int64]":
    """The noise key of each (seed, position)."""
    return np.array([noise_key(seed, position) for seed, position in places], np.uint64).view(np.int64)


def draw_rows(scores: Tensor, limits: Tensor, counts: Tensor, keys: Tensor, ids: Tensor) -> None:
    """Draws `ids` `[r]`, none of which is greedy or has a form; nothing but the kernel's call, so it can be recorded."""
    _draw(scores, None, limits, counts, keys, ids)


@njit
def _hold(row, words, held):
    """`row` without what `words` do not allow."""
    for w in range(len(words)):
        bits, first = words[w], w * WORD
        last = min(first + WORD, len(row))
        if bits == 0:  # as most of a mask is, or all of its bits are set
            held[first:last] = NEVER
        elif bits == -1:
            held[first:last] = row[first:last]
        else:
            for i in range(first, last):
                held[i] = row[i] if (bits >> (i - first)) & 1 else NEVER


@njit
def _first(row, score):
    for i in range(len(row)):
        if row[i] == score:
            return i
    return -1


@njit(fastmath=SUMS, error_model="numpy")
def _weigh(row, temperature, scaled, weights):
    """Scores relative to the best, over the temperature, and e to these. Returns the sum of the latter."""
    best, total = greatest_of(row, len(row)), 0.0
    for i in range(len(row)):
        scaled[i] = (row[i] - best) / temperature
        weights[i] = exp(scaled[i])
        total += np.float64(weights[i])
    return total


@njit(fastmath=SUMS)
def _weight_from(scaled, weights, least):
    total = 0.0
    for i in range(len(scaled)):
        total += np.float64(weights[i]) if scaled[i] >= least else 0.0
    return total


@njit
def _least(scaled, weights, counted, limit):
    """The least score for which the scores above it weigh less than `limit`. If `counted`, each weighs 1."""
    sums = np.empty(1 << 11)
    found, above = np.uint32(0), 0.0  # the highest bits of the least score, and the weight above all scores with these bits
    for low, high in PASSES:
        size = 1 << (high - low)
        sums[:size] = 0.0
        for i in range(len(scaled)):
            bits = magnitude(scaled[i])
            if bits >> np.uint32(high) == found:
                sums[(bits >> np.uint32(low)) & np.uint32(size - 1)] += 1.0 if counted else np.float64(weights[i])
        chosen, before = 0, above
        for j in range(size):
            if above >= limit:
                break
            if sums[j] > 0:
                chosen, before = j, above
                above += sums[j]
        found, above = np.uint32(found << np.uint32(high - low) | np.uint32(chosen)), before
    return -np.uint32(found).view(np.float32)


@njit
def _uniform(key, i):
    """The top 53 bits of the noise of token i, as a float64 in [0, 1): see `baton.engine.core.sampling.noise_key`."""
    x = key + np.uint64(i + 1) * STEP
    x = (x ^ (x >> np.uint64(30))) * MIX
    x = (x ^ (x >> np.uint64(27))) * MIX_MORE
    return np.float64(np.int64((x ^ (x >> np.uint64(31))) >> np.uint64(11))) * 2.0**-53


@njit(error_model="numpy")
def _race(scaled, weights, least, key):
    """The id of the first token with the greatest e^s / e among those of at least `least`."""
    noise, winner, best = np.empty(RACE), -1, -1.0
    for first in range(0, len(scaled), RACE):
        count, hopeful = min(RACE, len(scaled) - first), 0
        for j in range(count):
            u = _uniform(key, first + j)
            noise[j] = u
            hopeful += (scaled[first + j] >= least) & (weights[first + j] * SLACK > (1.0 - u) * best)
        if hopeful == 0:
            continue
        for j in range(count):
            i = first + j
            if scaled[i] >= least and weights[i] * SLACK > (1.0 - noise[j]) * best:
                chance = math.exp(np.float64(scaled[i])) / -math.log(noise[j])  # u = 0 makes it 0
                if chance > best:
                    winner, best = i, chance
    return winner


@kernel(
    "rows * width",
    scores=floats("all_rows", "width"),
    allowed=int32s("rows", f"(width + {WORD - 1}) // {WORD}", optional=True),
    limits=floats("rows", "4"),
    counts=int64s("rows", "2"),
    keys=int64s("rows"),
    ids=int64s("rows"),
)
def _draw(scores, allowed, limits, counts, keys, ids, rows, width, has_allowed):
    first, last = share(rows)
    scaled, weights, held = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width if has_allowed else 0, np.float32)
    words = (width + WORD - 1) // WORD
    for r in range(first, last):
        at, top_k = counts[2 * r], counts[2 * r + 1]
        temperature, top_p, min_p, top_a = limits[4 * r], limits[4 * r + 1], limits[4 * r + 2], limits[4 * r + 3]
        row = scores[at * width : (at + 1) * width]
        if has_allowed:
            _hold(row, allowed[r * words : (r + 1) * words], held)
            row = held
            best = greatest_of(row, width)
            if temperature == 0 or best == NEVER:
                ids[r] = -1 if best == NEVER else _first(row, best)
                continue
        total = _weigh(row, temperature, scaled, weights)
        # The best probability is 1 / total. So min_p is a least e^score, and top_a / total is one.
        least = np.float32(math.log(max(min_p, np.float32(top_a / total))))
        if 0 < top_k < width:
            kept = _least(scaled, weights, True, np.float64(top_k))
            total, least = _weight_from(scaled, weights, kept), max(least, kept)
        if top_p < 1:
            least = max(least, _least(scaled, weights, False, top_p * total))
        ids[r] = _race(scaled, weights, least, np.uint64(keys[r]))
