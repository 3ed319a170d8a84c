"""Attention over the paged pool, in plain torch. It is correct on every device, and faster kernels are compared with it.

A step: `plan` turns the spans of the batch into index tensors, once. Then each layer stores the new keys and values in their slots and
attends to those of each sequence through its block table: decodes of similar length in one call, each longer span in its own call. If the
pool has kernels, one of them computes the decodes and another each longer span, and both read blocks in place. Nothing loops over tokens,
and no layer touches a list of blocks.

Letters in shapes: T tokens of the batch in a row, B sequences, M blocks per sequence, S = M · bs keys, bs block size, Hq query heads, Hkv
key/value heads, G = Hq / Hkv, D head dim, Dv that of values, P parts (2: keys and values; 1: one vector that is both, its first Dv numbers
being the value), L layers, N blocks of the pool.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import gcd
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.model.checkpoint import LayerAttention
from baton.engine.model.int5_rows import pack, unpack
from baton.engine.model.sizes import rounded_up

GROUP_BYTES = 32 << 20  # of keys and values gathered for one group of decodes
KEY_STEPS = 4  # allowed numbers of keys from one power of two to the next, for gathers
GROUP_SPREAD = 8  # blocks by which lengths in a group may differ, beyond half their length
INT8 = 127.0  # the largest number that is stored
CUT = 256  # keys that a kernel meets at a time; it cuts them at multiples of this, so that sums do not depend on where a span begins

Ints = npt.NDArray[np.int64]


class Span(NamedTuple):
    """`n` tokens of one sequence from position `start` on; `blocks` is its block table, at least up to `start + n`.

    `steps`: each is computed as a decode step, by the kernel for those. It adds in another order than the one for prompts: the bits differ.
    `branches`, of steps: other tokens that go on from the first one, each in a block table of its own, in which that first one gets a slot,
    too, if its block is not shared. Their tokens come behind the span's.
    """

    start: int
    n: int
    blocks: Sequence[int]
    steps: bool = False
    branches: tuple["Span", ...] = ()

    @property
    def tokens(self) -> int:
        """Its tokens and those of its branches."""
        return self.n + sum(branch.n for branch in self.branches)


class KvLayer(NamedTuple):
    """Three views of one layer's slice of the pool. W is D or, if they are rows of int5, the bytes of one."""

    blocks: Tensor  # [N, P, Hkv, bs, W]
    rows: Tensor  # [*, bs * W]: row (block · PLHkv + part · Hkv + head) is what one head has in one block
    slots: Tensor  # [*, W]: slot (row · bs + offset) is what it has for one token
    per_block: int  # rows from one block to the next
    scales: Tensor | None  # [N, P * Hkv, bs]: what the numbers of a row are multiplied by; None: they are as they are
    dim: int  # D

    def read(self, rows: Tensor, out: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The numbers of these rows `[n]`, `[n, bs * D]` of that type; `out`: room for them as they are stored."""
        stored = torch.index_select(self.rows, 0, rows, out=out)
        if self.scales is None:
            return stored if stored.dtype == dtype else stored.to(dtype)
        scales = self.scales[rows // self.per_block, rows % self.per_block]  # [n, bs]
        numbers = stored.view(*scales.shape, -1)
        if stored.dtype == torch.uint8:
            numbers = unpack(numbers, self.dim)
        return (numbers * scales[:, :, None]).to(dtype).view(len(rows), -1)

    def write(self, slots: Tensor, x: Tensor) -> None:
        """x `[n, D]` into slots `[n]`."""
        if self.scales is not None:
            size = self.scales.shape[2]
            rows, offsets = slots // size, slots % size
            x, scales = (pack if self.slots.dtype == torch.uint8 else _rounded)(x)  # scales: of a token of a head
            self.scales[rows // self.per_block, rows % self.per_block, offsets] = scales
        self.slots.index_copy_(0, slots, x.to(self.slots.dtype))


def _rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """The int8 numbers of `[n, D]`, and their scales `[n]`."""
    scales = (x.abs().amax(dim=1).float() / INT8).clamp_(min=torch.finfo(torch.float32).tiny)
    return (x.float() * scales.reciprocal()[:, None]).round_(), scales


@dataclass(frozen=True, slots=True)
class Decodes:
    """The tokens that come first in a batch and are computed in place, in the form that a kernel needs."""

    size: int  # tokens
    # [3 size + *] int64: their positions; where the block table of each begins; which of the tokens is the one before each, -1 if none is;
    # the block tables, one after the other.
    index: Tensor
    keys: int  # seen by all of them together


# (pool, layer, q [T, Hq, D], kv [T, P, Hkv, D], out [T, Hq * Dv], decodes, how): the first `size` tokens of each. Stores, then attends.
AttendInPlace = Callable[["PagedKv", int, Tensor, Tensor, Tensor, Decodes, LayerAttention], None]
# (pool, layer, q [n, Hq, D], out [n, Hq * Dv], group, how): the tokens of a longer span, whose keys and values are stored.
AttendSpan = Callable[["PagedKv", int, Tensor, Tensor, "Group", LayerAttention], None]


class Kernels(NamedTuple):
    """Functions that do the work of this module faster. A pool has all of them or none."""

    attend_in_place: AttendInPlace
    attend_span: AttendSpan
    store: Callable[[Tensor, KvLayer, Tensor], None]  # see `store`


class PagedKv:
    """The pool as torch sees it, and the scratch memory into which keys and values are gathered."""

    def __init__(
        self,
        pool: Tensor,
        value_dim: int = 0,
        kernels: Kernels | None = None,
        scales: Tensor | None = None,
        dtype: torch.dtype | None = None,
        dim: int = 0,
    ) -> None:
        """`pool` is `[N, L, P, Hkv, bs, W]`, each block contiguous, a whole number of rows from one to the next; `value_dim`: Dv, 0 if it
        is D; `scales` `[N, L, P, Hkv, bs]`, if `kernels` are for numbers that have them; `dtype` of queries, if it is not the pool's;
        `dim`: D, if it is not W (see `KvLayer`)."""
        _, layers, self.parts, self.kv_heads, self.block_size, width = pool.shape
        self.pool = pool
        self.dim = dim or width
        self.value_dim = value_dim or self.dim
        self.kernels = kernels
        self.dtype = dtype or pool.dtype
        self.scales = scales
        row, step = self.block_size * width, self.parts * self.kv_heads
        self.rows_per_block = pool.stride(0) // row
        count = (len(pool) - 1) * self.rows_per_block + layers * step
        rows, slots = pool.as_strided((count, row), (row, 1)), pool.as_strided((count * self.block_size, width), (width, 1))
        by_row = [None] * layers if scales is None else scales.flatten(2, 3).unbind(dim=1)
        self.layers = [
            KvLayer(pool[:, i], rows[i * step :], slots[i * step * self.block_size :], self.rows_per_block, by_row[i], self.dim)
            for i in range(layers)
        ]
        self.row_bytes = rows.shape[1] * rows.element_size()
        self._by_slot = pool.flatten(1, 3).transpose(1, 2)  # [N, bs, PLHkv, W]
        gathered = self.dtype if kernels else pool.dtype  # kernels gather what they compute with
        self._scratch = rows.new_empty(0, rows.shape[1], dtype=gathered)

    def tensor(self, array: Ints) -> Tensor:
        """The array as a tensor on the pool's device."""
        return torch.from_numpy(array).to(self._scratch.device)

    def rows(self, blocks: Ints) -> Ints:
        """Rows of blocks `[B, M]` in any layer's `rows`: `[P, B, Hkv, M]`."""
        parts = np.arange(self.parts * self.kv_heads).reshape(self.parts, 1, self.kv_heads, 1)
        return blocks[None, :, None, :] * self.rows_per_block + parts

    def clear(self, blocks: Ints, offsets: Ints) -> None:
        """Zeroes slots in all layers."""
        if len(blocks):
            self._by_slot[self.tensor(blocks), self.tensor(offsets)] = 0
            if self.scales is not None:
                self.scales.flatten(1, 3).transpose(1, 2)[self.tensor(blocks), self.tensor(offsets)] = 0

    def wipe(self, blocks: list[int]) -> None:
        """Zeroes blocks."""
        for block in blocks:
            self.pool[block].zero_()
            if self.scales is not None:
                self.scales[block].zero_()

    def scratch(self, rows: int) -> Tensor:
        """Uninitialised `[rows, bs * W]`, valid until the next call. Kept between steps, because fresh pages cost more than the gather."""
        if rows > len(self._scratch):
            self._scratch = self._scratch.new_empty(rows, self._scratch.shape[1])
        return self._scratch[:rows]


@dataclass(frozen=True, slots=True)
class Group:
    """`size` neighbours in the batch with `n` tokens each: many sequences with one token, or one with many. `gather` finds their KV."""

    first: int  # token of the batch
    size: int
    n: int
    gather: Tensor  # [P * B * Hkv * M] into a layer's rows
    keys: int  # of the S gathered keys, those that a query of the group may see
    mask: Tensor | None  # added to the scores: [B, 1, 1, keys] or [n, keys]; None: causal from position 0, or the kernel masks

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.size * self.n)


@dataclass(frozen=True, slots=True)
class Meta:
    """A batch as index tensors. T' counts the tokens after `decodes`, which no kernel computes in place."""

    positions: Tensor  # [T]
    decodes: Decodes | None
    layers: tuple[LayerAttention, ...]  # [L]
    slots: Tensor  # [T' * P * Hkv] into a layer's slots: where the new keys and values go
    groups: tuple[tuple[Group, ...], ...]  # [L], shared by layers of the same kind: in order, they cover the T' tokens
    scratch: Tensor  # [rows, bs * W], room for the largest gather


class PagedAttention:
    """The `Attention` that a model is given for one step: store, then attend."""

    def __init__(self, paged: PagedKv, meta: Meta) -> None:
        self._paged = paged
        self._meta = meta

    def __call__(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """q `[T, Hq, D]` → `[T, Hq * Dv]`: softmax(scale · q kᵀ) v over the tokens at or before each query's own position. Rows after
        those of the batch are 0."""
        meta, paged, kernels = self._meta, self._paged, self._paged.kernels
        tokens = len(meta.positions)
        out, first = q.new_empty(q.shape[0], q.shape[1] * paged.value_dim), 0
        if meta.decodes:
            first = meta.decodes.size
        if meta.groups[layer]:  # before the decodes: the end of a prompt and output after it may be computed in one step
            (kernels.store if kernels else store)(kv[first:tokens], paged.layers[layer], meta.slots)
        if meta.decodes and kernels:
            kernels.attend_in_place(paged, layer, q, kv, out, meta.decodes, meta.layers[layer])
        for group in meta.groups[layer]:
            if kernels:
                kernels.attend_span(paged, layer, q[group.rows], out[group.rows], group, meta.layers[layer])
            else:
                out[group.rows] = _attend_group(q[group.rows], paged, layer, group, meta)
        if tokens < len(out):
            out[tokens:] = 0
        return out


def store(kv: Tensor, kv_layer: KvLayer, slots: Tensor) -> None:
    """kv `[T', P, Hkv, D]` into the slots `[T' * P * Hkv]` of its tokens."""
    kv_layer.write(slots, kv.reshape(-1, kv.shape[-1]))


def _attend_group(q: Tensor, paged: PagedKv, layer: int, group: Group, meta: Meta) -> Tensor:
    _, heads, dim = q.shape
    gathered = paged.layers[layer].read(group.gather, meta.scratch[: len(group.gather)], q.dtype)
    kv = gathered.view(paged.parts, group.size, paged.kv_heads, -1, dim)  # [P, B, Hkv, S, D]
    kv = kv[..., : group.keys, :]
    k, v = kv[0], kv[-1][..., : paged.value_dim]
    if group.n == 1:
        # The G queries that share a key head take the place of a sequence of queries, so nothing is repeated.
        q = q.view(-1, paged.kv_heads, heads // paged.kv_heads, dim)  # [B, Hkv, G, D]
        return _attend(q, k, v, group.mask, meta.layers[layer]).reshape(-1, heads * paged.value_dim)
    out = _attend(q.transpose(0, 1)[None], k, v, group.mask, meta.layers[layer])  # [1, Hq, n, Dv]
    return out[0].transpose(0, 1).reshape(-1, heads * paged.value_dim)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: LayerAttention) -> Tensor:
    """q `[B, Hq, n, D]`, k `[B, Hkv, keys, D]`, v `[B, Hkv, keys, Dv]` → `[B, Hq, n, Dv]`; without a mask causal."""
    if how.softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=how.scale, enable_gqa=True)
    assert mask is not None, "no kernel caps scores and masks them on its own"
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))  # [B, Hq, keys, *]
    scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if how.scale is None else how.scale)
    capped = how.softcap * torch.tanh(scores.float() / how.softcap) + mask
    return capped.softmax(dim=-1).to(v.dtype) @ v


def batch_order(spans: Sequence[Span]) -> list[int]:
    """Indices of the spans in the order that `plan` wants: decodes first, those of similar length side by side."""
    return sorted(range(len(spans)), key=lambda i: (not spans[i].steps, spans[i].n > 1, spans[i].start))


def plan(spans: Sequence[Span], paged: PagedKv, layers: Sequence[LayerAttention]) -> Meta:
    """Index tensors for at least one span, in `batch_order`, once for layers that see the same keys.

    Also zeroes the slots after the last token of a sequence, so that the bytes of its last block depend only on its tokens. Shared blocks
    are full, so no other sequence reads this one.
    """
    decodes = sum(span.steps for span in spans) if paged.kernels else 0
    size = sum(span.tokens for span in spans[:decodes])
    longer = _plan_longer(spans[decodes:], size, paged, layers)
    if paged.kernels:
        paged.wipe(_begun(spans, paged.block_size))
    if not decodes:
        return longer
    index = torch.frombuffer(_index(spans[:decodes], paged.block_size), dtype=torch.int64)
    found, positions = Decodes(size, index, seen(spans[:decodes])), index[:size]
    return replace(longer, decodes=found, positions=torch.cat((positions, longer.positions)) if decodes < len(spans) else positions)


def plan_decodes(spans: Sequence[Span], paged: PagedKv) -> "array[int]":
    """`Decodes.index` for spans of one or a few tokens that kernels compute."""
    paged.wipe(_begun(spans, paged.block_size))
    return _index(spans, paged.block_size)


def seen(spans: Sequence[Span]) -> int:
    """`Decodes.keys`."""
    return sum(position + 1 for span in spans for each in (span, *span.branches) for position in range(each.start, each.start + each.n))


def _index(spans: Sequence[Span], block_size: int) -> "array[int]":
    index, bases, before, tables = array("q"), array("q"), array("q"), array("q")
    for span in spans:
        first = len(index)
        for each in (span, *span.branches):
            before.append(-1 if each is span else first)
            before.extend(range(len(index), len(index) + each.n - 1))
            index.extend(range(each.start, each.start + each.n))
            bases.extend([len(tables)] * each.n)
            tables.extend(each.blocks[: (each.start + each.n - 1) // block_size + 1])
    for part in (bases, before, tables):
        index += part
    return index


def _plan_longer(spans: Sequence[Span], first: int, paged: PagedKv, layers: Sequence[LayerAttention]) -> Meta:
    """The plan for spans that are gathered. `first`: how many tokens of the batch come before those of `spans`."""
    if not spans:
        none = paged.tensor(np.empty(0, np.int64))
        return Meta(none, None, tuple(layers), none, ((),) * len(layers), paged.scratch(0))
    whole = _Table.of(spans, paged.block_size, None)
    if not paged.kernels:
        # Their scores are masked, but zero times NaN is NaN.
        paged.clear(*whole.tails())
    slots = _slots(whole, paged)
    kinds = {}
    for window, masked in {(layer.window, layer.softcap is not None) for layer in layers}:
        table = whole if window is None else _Table.of(spans, paged.block_size, window, CUT if paged.kernels else 1)
        kinds[window, masked] = tuple(_group(table, slice(*cut), first, paged, window, masked) for cut in _cuts(table, paged))
    groups = tuple(kinds[layer.window, layer.softcap is not None] for layer in layers)
    scratch = paged.scratch(0 if paged.kernels else max(len(group.gather) for kind in kinds.values() for group in kind))
    return Meta(paged.tensor(whole.positions), None, tuple(layers), slots, groups, scratch)


def plan_store(spans: Sequence[Span], paged: PagedKv) -> tuple[Tensor, Tensor]:
    """Positions `[T]` and slots `[T * P * Hkv]` (see `store`) of spans whose keys and values are only stored."""
    table = _Table.of(spans, paged.block_size, None)
    paged.wipe(_begun(spans, paged.block_size))
    return paged.tensor(table.positions), _slots(table, paged)


def _slots(table: "_Table", paged: PagedKv) -> Tensor:
    """`[T * P * Hkv]` into a layer's slots."""
    blocks, offsets = table.slots()
    slots = paged.rows(blocks[:, None])[..., 0].transpose(1, 0, 2) * paged.block_size + offsets[:, None, None]  # [T, P, Hkv]
    return paged.tensor(slots.reshape(-1))


def _begun(spans: Sequence[Span], block_size: int) -> list[int]:
    """The last blocks of the spans, if they begin within the span: nothing has been written to these yet. A branch writes the token before
    its first one, too."""
    begun = []
    for span in spans:
        for each in (span, *span.branches):
            last, first = (each.start + each.n - 1) // block_size, each.start - (each is not span)
            if last * block_size >= first:
                begun.append(each.blocks[last])
    return begun


@dataclass(frozen=True, slots=True)
class _Table:
    """The spans as arrays. A table leaves out the blocks that no query of its span can see any more (sliding window), and begins at a
    multiple of `cut` keys."""

    block_size: int
    starts: Ints  # [B]
    ns: Ints  # [B]
    first_block: Ints  # [B] index, in the sequence, of the first block in the table
    counts: Ints  # [B] blocks in the table
    flat: Ints  # all tables, one after the other
    bases: Ints  # [B] where each begins in `flat`
    owners: Ints  # [T] span of each token
    positions: Ints  # [T]

    @classmethod
    def of(cls, spans: Sequence[Span], block_size: int, window: int | None, cut: int = 1) -> "_Table":
        starts = np.array([span.start for span in spans])
        ns = np.array([span.n for span in spans])
        seen = starts if window is None else np.minimum(starts, window - 1)  # keys before the first query that it sees
        apart = cut // gcd(cut, block_size)  # blocks
        first_block = (starts - seen) // (apart * block_size) * apart
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
        """Block and offset of each slot after the last token of a span, in its last block."""
        tails = -(self.starts + self.ns) % self.block_size  # [B]
        offsets = np.arange(tails.sum()) + np.repeat(self.block_size - tails - _before(tails), tails)
        return np.repeat(self.flat[self.bases + self.counts - 1], tails), offsets

    def padded(self, cut: slice) -> Ints:
        """Block tables of some spans `[B, M]`. Short ones repeat their last block, and so does the longest, up to one of a few sizes."""
        bases, counts = self.bases[cut], self.counts[cut]
        steps = np.minimum(np.arange(rounded_up(int(counts.max()), KEY_STEPS)), counts[:, None] - 1)
        table: Ints = self.flat[bases[:, None] + steps]
        return table


def _before(counts: Ints) -> Ints:
    """Sum of the counts before each."""
    before: Ints = np.cumsum(counts) - counts
    return before


def _cuts(table: _Table, paged: PagedKv) -> Iterator[tuple[int, int]]:
    """Spans `first : last` that make a group: one span, or without kernels decodes that waste little on each other's padding."""
    counts, decodes = table.counts.tolist(), 0 if paged.kernels else int((table.ns == 1).sum())
    most = GROUP_BYTES // (paged.parts * paged.kv_heads * paged.row_bytes)  # blocks
    first = 0
    while first < decodes:
        last = first + 1
        while last < decodes and 2 * counts[last] <= 3 * counts[first] + 2 * GROUP_SPREAD and (last + 1 - first) * counts[last] <= most:
            last += 1
        yield first, last
        first = last
    yield from ((i, i + 1) for i in range(decodes, len(counts)))


def _group(table: _Table, cut: slice, before: int, paged: PagedKv, window: int | None, masked: bool) -> Group:
    """`before`: how many tokens of the batch come before those of the table. `masked`: make a mask even where causality alone would do."""
    start, n = int(table.starts[cut.start]), int(table.ns[cut.start])
    blocks = table.padded(cut)  # [B, M]
    queries = table.starts[cut] if n == 1 else np.arange(start, start + n)  # [B] or [n]
    keys = blocks.shape[1] * table.block_size
    if n > 1 or paged.kernels:
        keys = start + n - int(table.first_block[cut.start]) * table.block_size
    mask = None
    if not paged.kernels and (n == 1 or masked or start > 0 or (window is not None and n > window)):
        first_key = paged.tensor(table.first_block[cut] * table.block_size)[:, None]  # [B, 1], with B = 1 for a longer span
        mask = _mask(paged.tensor(queries)[:, None], first_key + torch.arange(keys, device=first_key.device), window, paged.dtype)
        mask = mask[:, None, None] if n == 1 else mask
    gather = paged.tensor(paged.rows(blocks).reshape(-1))
    return Group(before + int(_before(table.ns)[cut.start]), len(blocks), n, gather, keys, mask)


def _mask(queries: Tensor, keys: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """0 where the query sees the key's position, -inf elsewhere."""
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
