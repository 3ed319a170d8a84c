"""Attention of one sequence whose KV is not in the pool as a whole, a few layers at a time.

The KV of these layers is copied from the shelf and from the sequence's window into a panel, in order, and the panel is a pool of its own:
the kernels find what they would find in the pool, and add in the same order, so the result has the same bits. What they have stored is
copied back into the window. A panel has room for the longest sequence, and for as many layers as half of the pool holds, at least one.
"""

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from baton.engine.core.kvcache import KvLayout, KvPool
from baton.engine.core.long_contexts import Shelf, ShelfFailed, Unreadable
from baton.engine.core.sequence import Sequence
from baton.engine.model.attention import Meta, PagedAttention, PagedKv, Span, plan
from baton.engine.model.checkpoint import LayerAttention
from baton.engine.model.kv_views import DTYPES

COPIED = ("kv", "scales")  # of `KvLayout.views`


class Panel:
    """KV of `layers` layers in `blocks` blocks: for each of COPIED that there is, uint8 `[blocks, layers * bytes of one layer]`."""

    def __init__(self, layout: KvLayout, like: PagedKv, blocks: int, layers: int) -> None:
        """`like`: the pool that it stands in for."""
        self.layers, self._layout = layers, layout
        views = {name: view for name, view in layout.views.items() if name in COPIED}
        self._bytes = {name: (view.offset, view.nbytes // layout.num_layers) for name, view in views.items()}
        self._parts = {name: np.zeros((blocks, layers * size), np.uint8) for name, (_, size) in self._bytes.items()}
        shaped = {
            name: torch.from_numpy(self._parts[name]).view(DTYPES[view.dtype]).view(blocks, layers, *view.shape[1:])
            for name, view in views.items()
        }
        self.paged = PagedKv(shaped["kv"], layout.value_dim, like.kernels, shaped.get("scales"), like.dtype, like.dim)

    def take(self, block: int, unit: "memoryview | np.ndarray[tuple[int], np.dtype[np.uint8]]", first: int) -> None:
        """These layers of a whole block, from `first` on."""
        own = np.frombuffer(unit, np.uint8) if isinstance(unit, memoryview) else unit
        for name, (offset, size) in self._bytes.items():
            n = min(self.layers, self._layout.num_layers - first) * size
            self._parts[name][block, :n] = own[offset + first * size :][:n]

    def clear(self, first: int, last: int) -> None:
        for part in self._parts.values():
            part[first:last] = 0

    def give(self, block: int, layer: int, own: "np.ndarray[tuple[int], np.dtype[np.uint8]]") -> None:
        """One layer back into a whole block."""
        for name, (offset, size) in self._bytes.items():
            at = layer % self.layers * size
            own[offset + layer * size :][:size] = self._parts[name][block, at : at + size]


class LongKv:
    """Belongs to a runner. `paged` is the pool as the kernels see it."""

    def __init__(self, pool: KvPool, paged: PagedKv, shelf: Shelf, longest: int) -> None:
        """`longest`: tokens."""
        layout = pool.layout
        blocks = -(-longest // layout.block_size)
        layer = blocks * layout.block_bytes // layout.num_layers
        layers = min(layout.num_layers, max(1, pool.nbytes // 2 // layer))
        self.pool, self.shelf = pool, shelf
        self.panel = Panel(layout, paged, blocks, layers)

    def attention(self, seq: Sequence, spans: Seq[Span], layers: Seq[LayerAttention]) -> "LongAttention":
        """Attention of the spans of one sequence, in `batch_order`; their blocks are those of `table`."""
        each = self.panel.layers
        metas = [plan(spans, self.panel.paged, layers[first : first + each]) for first in range(0, len(layers), each)]
        return LongAttention(self, seq, metas, max(span.start + span.n for span in spans))

    def table(self, seq: Sequence) -> range:
        """The blocks of the panel that stand for those of the sequence."""
        return range(seq.away + len(seq.blocks))


class LongAttention:
    """The `Attention` that a model is given for one step."""

    def __init__(self, kv: LongKv, seq: Sequence, metas: Seq[Meta], end: int) -> None:
        """`end`: positions that there are after the step."""
        self._kv, self._seq, self._metas = kv, seq, metas
        size = kv.pool.layout.block_size
        self._known = -(-seq.computed // size)  # blocks with something in them
        self._written = range(seq.computed // size, -(-end // size))

    @property
    def positions(self) -> Tensor:
        return self._metas[0].positions

    def __call__(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """See `PagedAttention`. Raises Unreadable."""
        seq, panel, pool = self._seq, self._kv.panel, self._kv.pool
        if layer % panel.layers == 0:
            self._fill(layer)
        out = PagedAttention(panel.paged, self._metas[layer // panel.layers])(layer % panel.layers, q, kv)
        for block in self._written:
            panel.give(block, layer, pool.array[seq.blocks[block - seq.away]])
        return out

    def _fill(self, first: int) -> None:
        """The panel has these layers, from `first` on. A block in which there is nothing yet is zero, as in the pool."""
        seq, panel, pool = self._seq, self._kv.panel, self._kv.pool
        try:
            self._kv.shelf.read(seq.keys[: seq.away], lambda block, unit: panel.take(block, unit, first))
        except ShelfFailed as error:
            raise Unreadable(seq.id, str(error)) from error
        for block in range(seq.away, self._known):
            panel.take(block, pool.array[seq.blocks[block - seq.away]], first)
        panel.clear(self._known, self._written.stop)
