"""Attention over keys and values that are rounded to int8, each token of a head with a float32 scale, and their store.

The loops are those of `decode_attention` and `span_attention`: a number becomes a float32 in a register. A row is rounded as
`baton.engine.model.attention.KvLayer` does it, so its bytes depend on its own numbers alone.
"""

from torch import Tensor

from baton.engine.cpu.decode_attention import EVERYTHING, attend_tokens, in_rows, keep
from baton.engine.cpu.kernel import INT, REAL, floats, int8s, int64s, kernel, numbers
from baton.engine.cpu.primitives import SUMS, share
from baton.engine.cpu.span_attention import SIZE, attend_spans, numbers_of, room, spot_of
from baton.engine.cpu.tile import OUTS
from baton.engine.model.attention import Decodes, Group, Kernels, KvLayer, PagedKv
from baton.engine.model.checkpoint import LayerAttention


def attend_in_place(paged: PagedKv, layer: int, q: Tensor, kv: Tensor, out: Tensor, decodes: Decodes, how: LayerAttention) -> None:
    """An `AttendInPlace`."""
    window = EVERYTHING if how.window is None else how.window
    scale = q.shape[2] ** -0.5 if how.scale is None else how.scale
    _attend(
        paged.pool, paged.scales, in_rows(q), in_rows(kv), out, decodes.index, decodes.size, decodes.keys, paged.value_dim, layer, window,
        how.softcap or 0.0, scale,
    )  # fmt: skip


def attend_span(paged: PagedKv, layer: int, q: Tensor, out: Tensor, group: Group, how: LayerAttention) -> None:
    """An `AttendSpan`."""
    own = paged.layers[layer]
    _attend_span(in_rows(q), own.rows, own.scales, *room(paged, group), out, own.per_block, *numbers_of(paged, q, group, how))


def store(kv: Tensor, kv_layer: KvLayer, slots: Tensor) -> None:
    """See `baton.engine.model.attention.store`."""
    _store(in_rows(kv), kv_layer.slots, kv_layer.scales, slots, kv_layer.per_block)


@kernel(
    "keys * kv_heads * dim",
    SUMS,
    pool=int8s("blocks", "layers", "parts", "kv_heads", "block_size", "dim", strided=1),
    scales=floats("blocks", "layers", "parts", "kv_heads", "block_size", strided=1),
    q=numbers("tokens", "heads", "dim", strided=1),
    kv=numbers("tokens", "parts", "kv_heads", "dim", strided=1),
    out=numbers("tokens", "heads * value_dim"),
    index=int64s("index_size"),
    size=INT,
    keys=INT,
    value_dim=INT,
    layer=INT,
    window=INT,
    softcap=REAL,
    scale=REAL,
)
def _attend(
    pool, pool_stride0, scales, scales_stride0, layer, parts, kv_heads, block_size, q, q_stride0, heads, dim, kv, kv_stride0, out,
    value_dim, index, size, window, softcap, scale,
):  # fmt: skip
    shape = (pool_stride0, scales_stride0, layer), (parts, heads, kv_heads, block_size, dim, value_dim)
    attend_tokens(pool, scales, (q, q_stride0, kv, kv_stride0, out), (index, size), shape, (window, softcap, scale))


@kernel(
    "tokens * heads * keys",
    SUMS,
    q=numbers("tokens", "heads", "dim", strided=1),
    rows=int8s("slots", "block_size * dim"),
    scales=floats("pool_blocks", "parts * kv_heads", "block_size", strided=1),
    gather=int64s("parts", "kv_heads", "blocks"),
    key_panels=numbers(f"{SIZE} * kv_heads * (dim + dim % 2)"),
    value_panels=numbers(f"{SIZE} * kv_heads * -(-value_dim // {OUTS}) * {OUTS}"),
    out=numbers("tokens", "heads * value_dim"),
    per_block=INT,
    keys=INT,
    block_size=INT,
    value_dim=INT,
    window=INT,
    softcap=REAL,
    scale=REAL,
)
def _attend_span(
    q, q_stride0, rows, scales, scales_stride0, gather, parts, blocks, kv_heads, key_panels, value_panels, out, per_block, tokens, heads,
    dim, keys, block_size, value_dim, window, softcap, scale,
):  # fmt: skip
    sizes = (tokens, heads, keys), (parts, kv_heads, blocks), (block_size, dim, value_dim, (per_block * block_size, scales_stride0))
    attend_spans(rows, scales, (q, q_stride0, gather, out), (key_panels, value_panels), sizes, (window, scale, softcap))


@kernel(
    "tokens * parts * kv_heads * dim",
    kv=numbers("tokens", "parts", "kv_heads", "dim", strided=1),
    into=int8s("rows", "dim"),
    scales=floats("blocks", "parts * kv_heads", "block_size", strided=1),
    slots=int64s("tokens * parts * kv_heads"),
    per_block=INT,
)
def _store(kv, kv_stride0, into, scales, scales_stride0, block_size, slots, per_block, tokens, parts, kv_heads, dim):
    heads, block_stride = parts * kv_heads, per_block * block_size
    first, last = share(tokens)
    for token in range(first, last):
        for head in range(heads):
            new, slot = token * kv_stride0 + head * dim, slots[token * heads + head]
            keep(into, scales, kv[new : new + dim], slot * dim, spot_of(slot, block_stride, scales_stride0))


ATTENTION = Kernels(attend_in_place, attend_span, store)
