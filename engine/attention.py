"""Attention over the paged pool. One signature, `attend(q, kv_layer, meta)`; this kernel is plain torch and right on every device.

A step: `plan` turns the spans of the batch into index tensors, once. Then each layer's `store` writes the new keys and values into their
slots and `attend` reads every sequence's back through its block table: decodes of similar length in one call, each longer
span in one of its own. Nothing loops over tokens, and no layer touches a Python list of blocks.

Letters in shapes: T tokens of the batch in a row, B sequences, M blocks a sequence, S = M · bs keys, bs block size, Hq query heads, Hkv
key/value heads, G = Hq / Hkv, D head dim, L layers, N blocks of the pool.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

GROUP_BYTES = 32 << 20  # of keys and values gathered for one group of decodes
GROUP_SPREAD = 8  # blocks by which lengths in a group may differ, beyond a half

Ints = npt.NDArray[np.int64]


class Span(NamedTuple):
    """`n` tokens of one sequence from position `start` on; `blocks` is its block table, at least up to `start + n`."""

    start: int
    n: int
    blocks: Sequence[int]


class KvLayer(NamedTuple):
    """Three views of one layer's slice of the pool."""

    blocks: Tensor  # [N, 2, Hkv, bs, D]
    rows: Tensor  # [*, bs * D]: row block · 2LHkv + kv · Hkv + head is what one head has in one block
    slots: Tensor  # [*, D]: slot row · bs + offset is what it has for one token


class PagedKv:
    """The pool as torch sees it, and the scratch memory that gathered keys and values share."""

    def __init__(self, pool: Tensor) -> None:
        """`pool` is `[N, L, 2, Hkv, bs, D]`, contiguous."""
        _, layers, two, self.kv_heads, self.block_size, dim = pool.shape
        self.rows_per_block = layers * two * self.kv_heads
        rows, slots, step = pool.view(-1, self.block_size * dim), pool.view(-1, dim), two * self.kv_heads
        self.layers = [KvLayer(pool[:, i], rows[i * step :], slots[i * step * self.block_size :]) for i in range(layers)]
        self.row_bytes = rows.shape[1] * rows.element_size()
        self._by_slot = pool.view(-1, self.rows_per_block, self.block_size, dim).transpose(1, 2)  # [N, bs, 2LHkv, D]
        self._scratch = rows.new_empty(0, rows.shape[1])

    @property
    def dtype(self) -> torch.dtype:
        return self._scratch.dtype

    def tensor(self, array: Ints) -> Tensor:
        """On the pool's device."""
        return torch.from_numpy(array).to(self._scratch.device)

    def rows(self, blocks: Ints) -> Ints:
        """Rows of blocks `[B, M]` in any layer's `rows`: `[2, B, Hkv, M]`."""
        parts = np.arange(2 * self.kv_heads).reshape(2, 1, self.kv_heads, 1)
        return blocks[None, :, None, :] * self.rows_per_block + parts

    def clear(self, blocks: Ints, offsets: Ints) -> None:
        """Zeroes slots in all layers."""
        if len(blocks):
            self._by_slot[self.tensor(blocks), self.tensor(offsets)] = 0

    def scratch(self, rows: int) -> Tensor:
        """Uninitialised `[rows, bs * D]`, valid until the next call. Kept from step to step: fresh pages cost more than the gather."""
        if rows > len(self._scratch):
            self._scratch = self._scratch.new_empty(rows, self._scratch.shape[1])
        return self._scratch[:rows]


@dataclass(frozen=True, slots=True)
class Group:
    """`size` sequences with `n` tokens each, neighbours in the batch: many with one, or one with many. `gather` finds their KV."""

    first: int  # token of the batch
    size: int
    n: int
    gather: Tensor  # [2 * B * Hkv * M] into a layer's rows
    keys: int  # of the S gathered, those that a query of the group may see
    mask: Tensor | None  # added to the scores: [B, 1, 1, keys] or [n, keys]; None: plainly causal, from position 0

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.size * self.n)


@dataclass(frozen=True, slots=True)
class Meta:
    """A batch as index tensors, the same for all layers."""

    positions: Tensor  # [T]
    slots: Tensor  # [T * 2 * Hkv] into a layer's slots: where the new keys and values go
    groups: tuple[Group, ...]  # in order; they cover the T tokens
    scratch: Tensor  # [rows, bs * D], room for the largest gather


class PagedAttention:
    """The `Attention` that a model is given for one step: store, then attend."""

    def __init__(self, paged: PagedKv, meta: Meta) -> None:
        self._layers = paged.layers
        self._meta = meta

    def __call__(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        store(kv, self._layers[layer], self._meta)
        return attend(q, self._layers[layer], self._meta)


def store(kv: Tensor, kv_layer: KvLayer, meta: Meta) -> None:
    """kv `[T, 2, Hkv, D]` into the slots of its tokens."""
    kv_layer.slots.index_copy_(0, meta.slots, kv.reshape(-1, kv.shape[-1]))


def attend(q: Tensor, kv_layer: KvLayer, meta: Meta) -> Tensor:
    """q `[T, Hq, D]` → `[T, Hq * D]`: softmax(q kᵀ / √D) v over the tokens at or before each query's own position."""
    parts = [_attend_group(q[group.rows], kv_layer, group, meta.scratch) for group in meta.groups]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_group(q: Tensor, kv_layer: KvLayer, group: Group, scratch: Tensor) -> Tensor:
    _, heads, dim = q.shape
    kv_heads = kv_layer.blocks.shape[2]
    kv = torch.index_select(kv_layer.rows, 0, group.gather, out=scratch[: len(group.gather)])
    k, v = kv.view(2, group.size, kv_heads, -1, dim)[..., : group.keys, :]  # [B, Hkv, keys, D] each
    if group.n == 1:
        # The G queries that share a key head stand where a sequence of queries would: nothing is repeated.
        q = q.view(-1, kv_heads, heads // kv_heads, dim)  # [B, Hkv, G, D]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask).reshape(-1, heads * dim)
    q = q.transpose(0, 1)[None]  # [1, Hq, n, D]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, is_causal=group.mask is None, enable_gqa=True)
    return out[0].transpose(0, 1).reshape(-1, heads * dim)


def batch_order(spans: Sequence[Span]) -> list[int]:
    """Indices of the spans in the order that `plan` wants: decodes first, those of similar length side by side."""
    return sorted(range(len(spans)), key=lambda i: (spans[i].n > 1, spans[i].start))


def plan(spans: Sequence[Span], paged: PagedKv, window: int | None = None) -> Meta:
    """Index tensors for at least one span, in `batch_order`; `window`: how many keys a query sees at most, its own included.

    Also zeroes the unwritten slots of each span's last block: they are masked, but zero times a NaN is a NaN. The block is the
    sequence's own (a shared one is full), so nobody else reads it.
    """
    table = _Table.of(spans, paged.block_size, window)
    paged.clear(*table.tails())
    blocks, offsets = table.slots()
    slots = paged.rows(blocks[:, None])[..., 0].transpose(1, 0, 2) * paged.block_size + offsets[:, None, None]  # [T, 2, Hkv]
    groups = tuple(_group(table, slice(*cut), paged, window) for cut in _cuts(table, paged))
    scratch = paged.scratch(max(len(group.gather) for group in groups))
    return Meta(paged.tensor(table.positions), paged.tensor(slots.reshape(-1)), groups, scratch)


@dataclass(frozen=True, slots=True)
class _Table:
    """The spans as arrays. A block that no query of a span sees any more (sliding window) is left out of its table."""

    block_size: int
    starts: Ints  # [B]
    ns: Ints  # [B]
    first_block: Ints  # [B] index in the sequence of the first block in the table
    counts: Ints  # [B] blocks in the table
    flat: Ints  # all tables, one after the other
    bases: Ints  # [B] where each begins in `flat`
    owners: Ints  # [T] span of each token
    positions: Ints  # [T]

    @classmethod
    def of(cls, spans: Sequence[Span], block_size: int, window: int | None) -> "_Table":
        starts = np.array([span.start for span in spans])
        ns = np.array([span.n for span in spans])
        seen = starts if window is None else np.minimum(starts, window - 1)  # keys before the first query that it sees
        first_block = (starts - seen) // block_size
        counts = (starts + ns - 1) // block_size + 1 - first_block
        tables = (span.blocks[f : f + c] for span, f, c in zip(spans, first_block.tolist(), counts.tolist(), strict=True))
        flat = np.fromiter(chain.from_iterable(tables), dtype=np.int64)
        owners = np.repeat(np.arange(len(spans)), ns)
        positions = np.arange(len(owners)) + (starts - _before(ns))[owners]
        return cls(block_size, starts, ns, first_block, counts, flat, _before(counts), owners, positions)

    def slots(self) -> tuple[Ints, Ints]:
        """Block and offset of each token, `[T]` each."""
        index = self.bases[self.owners] + self.positions // self.block_size - self.first_block[self.owners]
        return self.flat[index], self.positions % self.block_size

    def tails(self) -> tuple[Ints, Ints]:
        """Block and offset of each slot behind the last token of a span, in its last block."""
        tails = -(self.starts + self.ns) % self.block_size  # [B]
        offsets = np.arange(tails.sum()) + np.repeat(self.block_size - tails - _before(tails), tails)
        return np.repeat(self.flat[self.bases + self.counts - 1], tails), offsets

    def padded(self, cut: slice) -> Ints:
        """Block tables of some spans `[B, M]`; short ones repeat their last block."""
        bases, counts = self.bases[cut], self.counts[cut]
        steps = np.minimum(np.arange(counts.max()), counts[:, None] - 1)
        table: Ints = self.flat[bases[:, None] + steps]
        return table


def _before(counts: Ints) -> Ints:
    """Sum of the counts before each."""
    before: Ints = np.cumsum(counts) - counts
    return before


def _cuts(table: _Table, paged: PagedKv) -> Iterator[tuple[int, int]]:
    """Spans `first : last` that make a group: one longer span, or decodes that waste little on each other's padding."""
    counts, decodes = table.counts.tolist(), int((table.ns == 1).sum())
    most = GROUP_BYTES // (2 * paged.kv_heads * paged.row_bytes)  # blocks
    first = 0
    while first < decodes:
        last = first + 1
        while last < decodes and 2 * counts[last] <= 3 * counts[first] + 2 * GROUP_SPREAD and (last + 1 - first) * counts[last] <= most:
            last += 1
        yield first, last
        first = last
    yield from ((i, i + 1) for i in range(decodes, len(counts)))


def _group(table: _Table, cut: slice, paged: PagedKv, window: int | None) -> Group:
    start, n = int(table.starts[cut.start]), int(table.ns[cut.start])
    blocks = table.padded(cut)  # [B, M]
    queries = table.starts[cut] if n == 1 else np.arange(start, start + n)  # [B] or [n]
    keys = blocks.shape[1] * table.block_size
    if n > 1:
        keys = start + n - int(table.first_block[cut.start]) * table.block_size
    mask = None
    if n == 1 or start > 0 or (window is not None and n > window):
        first_key = paged.tensor(table.first_block[cut] * table.block_size)[:, None]  # [B, 1], with B = 1 for a longer span
        mask = _mask(paged.tensor(queries)[:, None], first_key + torch.arange(keys, device=first_key.device), window, paged.dtype)
        mask = mask[:, None, None] if n == 1 else mask
    gather = paged.tensor(paged.rows(blocks).reshape(-1))
    return Group(int(_before(table.ns)[cut.start]), len(blocks), n, gather, keys, mask)


def _mask(queries: Tensor, keys: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """0 where the key's position is seen from the query's, -inf elsewhere."""
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
