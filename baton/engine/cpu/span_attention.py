"""Attention of longer spans: two oneDNN products around a compiled softmax.

Letters in shapes are those of `baton.engine.attention`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from baton.engine.attention import KEY_STEPS
from baton.engine.checkpoint import LayerAttention
from baton.engine.cpu.decode_attention import EVERYTHING
from baton.engine.cpu.kernel import INT, REAL, floats, kernel, numbers
from baton.engine.cpu.onednn import product
from baton.engine.cpu.primitives import SUMS, put, share
from baton.engine.cpu.sizes import rounded_up
from baton.engine.cpu.softmax import weigh

LEAST_QUERIES, LEAST_KEYS = 16, 64  # whose scores are computed together, if there are that many
QUERIES = 256  # of a longer span at a time; fewer if SCORE_BYTES cannot hold the scores of a group of heads
SCORE_BYTES = 8 << 20


def attend_span(q: Tensor, k: Tensor, v: Tensor, keys: int, how: LayerAttention) -> Tensor:
    """An `AttendSpan`: a few queries at a time, in products of few different sizes.

    So the scores stay in the caches, and little is computed that no query sees. Scores are float32; for bfloat16 values, the weights are
    rounded to bfloat16.
    """
    (n, heads, dim), (kv_heads, size, value_dim) = q.shape, v.shape
    group, window = heads // kv_heads, EVERYTHING if how.window is None else how.window
    scale = dim**-0.5 if how.scale is None else how.scale
    queries, precise = (q.float() * scale).view(n, kv_heads, group, dim), k.float()
    v = v.contiguous()  # once for all parts: for each, `product` would copy the values of latent attention, which are a part of the keys
    out = q.new_empty(n, kv_heads, group, value_dim)
    for first, last in parts(n, min(QUERIES, max(1, SCORE_BYTES // (4 * group * size)))):
        count, seen = last - first, keys - n + first + 1  # by the first of them
        end, start = seen + count - 1, max(0, seen - window)
        width = min(size, max(LEAST_KEYS, rounded_up(end - start, KEY_STEPS)))
        start = max(0, end - width)
        near, rows = slice(start, start + width), group * count
        asking = queries[first:last].permute(1, 2, 0, 3).reshape(kv_heads, rows, dim)
        weights, totals = [], q.new_empty(kv_heads, rows, dtype=torch.float32)
        for head in range(kv_heads):
            scores = product(asking[head], precise[head, near].t())
            weights.append(scores if q.dtype == torch.float32 else torch.empty_like(scores, dtype=q.dtype))
            _weigh_span(scores, weights[-1], totals[head], count, seen - start, window, how.softcap or 0.0)
        sums = torch.stack([product(mine, v[head, near]) for head, mine in enumerate(weights)]).view(kv_heads, group, count, value_dim)
        torch.div(sums.permute(2, 0, 1, 3), totals.view(kv_heads, group, count, 1).permute(2, 0, 1, 3), out=out[first:last])
    return out.view(n, heads * value_dim)


def parts(n: int, most: int) -> Iterator[tuple[int, int]]:
    """Ranges that cover `range(n)`, each a power of two long, at most `most`. The last ones may overlap: computing a query twice avoids
    another size."""
    done = 0
    while done < n:
        count = 1 << (max(LEAST_QUERIES, min(n - done, most)) - 1).bit_length()
        while count > min(n, most):
            count //= 2
        done = min(done + count, n)
        yield done - count, done


@kernel(
    "8 * rows * keys",
    SUMS,
    scores=floats("rows", "keys"),
    weights=numbers("rows", "keys"),
    totals=floats("rows"),
    n=INT,
    seen=INT,
    window=INT,
    softcap=REAL,
)
def _weigh_span(scores, weights, totals, rows, keys, n, seen, window, softcap):
    """Rows of scores; those of the `n` queries, in order, repeat. The first query sees `seen` keys, the next one key more, and so on.
    `weights` may be `scores`."""
    first, last = share(rows)
    for row in range(first, last):
        end = seen + row % n
        at, begin = row * keys, max(0, end - window)
        precise, rounded = scores[at + begin : at + end], weights[at + begin : at + end]
        totals[row] = weigh(precise, end - begin, softcap)
        if weights.itemsize != scores.itemsize:
            for i in range(end - begin):
                put(rounded, i, precise[i])
        weights[at : at + begin] = 0
        weights[at + end : at + keys] = 0
