"""FlashInfer and flash-attn cannot run without a device. Stand-ins with the same signatures, written in plain torch, show that they get the
right arguments: the answers are those of `baton.engine.model.attention`."""

import random
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.engine.core.protocol import Chunk
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.gpu.attention import DeviceAttention, TorchAttention
from baton.engine.gpu.inputs import Capacity, Inputs
from baton.engine.model.checkpoint import LayerAttention

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-ins compute on the CPU, and kernels are compiled here")
LAYERS = (LayerAttention(), LayerAttention(window=6), LayerAttention(softcap=3.0, scale=0.4), LayerAttention(window=6))
HEADS, KV_HEADS, DIM, BLOCK, BLOCKS = 4, 2, 8, 4, 64


def formula(q: Tensor, keys: Tensor, values: Tensor, scale: float | None, window_left: int, softcap: float | None) -> Tensor:
    """q `[n, Hq, D]`, keys and values `[S, Hkv, D]`: causal, aligned at the end; a query sees `window_left` keys before its own."""
    keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q, keys) * (q.shape[2] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    age = torch.arange(len(keys) - len(q), len(keys))[:, None] - torch.arange(len(keys))
    hidden = (age < 0) | ((age > window_left) if window_left >= 0 else False)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(dim=-1), values)


class Wrapper:
    """What FlashInfer's two wrappers share: they are planned with page tables on the host and on the device, and run with the pages."""

    def __init__(
        self,
        workspace: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
    ) -> None:
        assert kv_layout == "HND"
        self.fixed: int | None = None
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None and paged_kv_indices_buffer is not None and paged_kv_last_page_len_buffer is not None
            self.fixed = len(paged_kv_last_page_len_buffer)
            assert len(paged_kv_indptr_buffer) == self.fixed + 1 and len(paged_kv_indices_buffer) > 0

    def keep(
        self,
        queries: Tensor,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        q_data_type: object = "float16",
        kv_data_type: object = None,
    ) -> None:
        assert (num_qo_heads, num_kv_heads, head_dim, page_size) == (HEADS, KV_HEADS, DIM, BLOCK)
        assert q_data_type == kv_data_type == torch.float32 and {x.dtype for x in (indptr, indices, last_page_len)} == {torch.int32}
        assert indptr[0] == 0 and indptr[-1] == len(indices) and len(last_page_len) == len(indptr) - 1
        self.queries, self.indptr, self.indices, self.last = queries.clone(), indptr.clone(), indices.clone(), last_page_len.clone()
        self.how = (sm_scale, window_left, logits_soft_cap)

    def run(self, q: Tensor, pages: Tensor, out: Tensor) -> None:
        assert pages.shape[1:] == (2, KV_HEADS, BLOCK, DIM) and q.is_contiguous() and q.shape == out.shape
        for b in range(len(self.last)):
            mine = pages[self.indices[self.indptr[b] : self.indptr[b + 1]].long()]
            kv = mine.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, : (len(mine) - 1) * BLOCK + int(self.last[b])]
            rows = slice(int(self.queries[b]), int(self.queries[b + 1]))
            out[rows] = formula(q[rows], kv[0], kv[1], *self.how)


class Decoder(Wrapper):
    def plan(self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, *shape: int, **how: Any) -> None:
        assert self.fixed in (None, len(last_page_len))
        self.keep(torch.arange(len(indptr)), indptr, indices, last_page_len, *shape, **how)


class Prefiller(Wrapper):
    def plan(self, qo_indptr: Tensor, indptr: Tensor, indices: Tensor, last: Tensor, *shape: int, causal: bool = False, **how: Any) -> None:
        assert causal and qo_indptr.dtype == torch.int32
        self.keep(qo_indptr, indptr, indices, last, *shape, **how)


def rows_of(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """cache `[N, bs, Hkv, D]` → `[length, Hkv, D]`."""
    return cache[table.long().clamp(max=len(cache) - 1)].flatten(0, 1)[:length]


def with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Tensor:
    assert causal and window_size[1] in (-1, 0) and q.shape[1] == 1 and block_table.dtype == cache_seqlens.dtype == torch.int32
    answers = []
    for one, table, length in zip(q, block_table, cache_seqlens.tolist(), strict=True):
        answers.append(
            formula(one, rows_of(k_cache, table, length), rows_of(v_cache, table, length), softmax_scale, window_size[0], softcap)
        )
    return torch.stack(answers)


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    block_table: Tensor,
) -> Tensor:
    assert causal and window_size[1] in (-1, 0) and cu_seqlens_q.dtype == cu_seqlens_k.dtype == block_table.dtype == torch.int32
    ns, lengths = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    assert int(cu_seqlens_q[-1]) == len(q) and max_seqlen_q == int(ns.max()) and max_seqlen_k == int(lengths.max())
    answers = []
    for one, table, length in zip(q.split(ns.tolist()), block_table, lengths.tolist(), strict=True):
        answers.append(formula(one, rows_of(k, table, length), rows_of(v, table, length), softmax_scale, window_size[0], softcap))
    return torch.cat(answers)


@pytest.fixture(params=["flashinfer", "flash_attn"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[DeviceAttention]:
    packages: dict[str, dict[str, Any]] = {
        "flashinfer": {"BatchDecodeWithPagedKVCacheWrapper": Decoder, "BatchPrefillWithPagedKVCacheWrapper": Prefiller},
        "flash_attn": {"flash_attn_with_kvcache": with_kvcache, "flash_attn_varlen_func": varlen},
    }
    stand_in = ModuleType(request.param)
    stand_in.__dict__.update(packages[request.param])
    monkeypatch.setitem(sys.modules, request.param, stand_in)
    module = f"baton.engine.gpu.{request.param}_backend"
    monkeypatch.delitem(sys.modules, module, raising=False)
    found = __import__(module, fromlist=["x"])
    monkeypatch.delitem(sys.modules, module)
    return next(x for x in vars(found).values() if isinstance(x, type) and x.__module__ == module)


def world(kind: type[DeviceAttention]) -> SimpleNamespace:
    inputs = Inputs(Capacity(6, 64, 60), BLOCK, BLOCKS, torch.device("cpu"))
    pool = torch.zeros(BLOCKS + 1, len(LAYERS), 2, KV_HEADS, BLOCK, DIM)
    return SimpleNamespace(inputs=inputs, pool=pool, attention=kind(pool, LAYERS, HEADS, 0, inputs))


def test_answers_match_plain_attention(backend: type[DeviceAttention]) -> None:
    """Mixed batches, decodes alone, with and without padding, over many steps of the same sequences."""
    rng = random.Random(1)
    ours, theirs = world(backend), world(TorchAttention)
    blocks = list(range(BLOCKS))
    rng.shuffle(blocks)
    seqs = [Sequence(str(i), [0] * 50, 50, SamplingParams(max_tokens=1), b"", blocks=blocks[12 * i : 12 * i + 12]) for i in range(5)]
    padded = longer = 0
    for _ in range(14):
        batch = [Chunk(seq, rng.choice((1, 1, 1, 7))) for seq in rng.sample(seqs, rng.randint(1, 5)) if seq.computed < 40]
        if not batch:
            break
        step = ours.inputs.prepare(batch, sizes=(2, 4))
        plain = theirs.inputs.prepare(batch)
        padded, longer = padded + (step.size > step.decodes), longer + (len(step.spans) > step.decodes)
        ours.attention.begin(step)
        theirs.attention.begin(plain)
        tokens = len(plain.tokens)
        for layer in range(len(LAYERS)):
            q, kv = torch.randn(len(step.tokens), HEADS, DIM), torch.randn(len(step.tokens), 2, KV_HEADS, DIM)
            expected = theirs.attention(layer, q[:tokens], kv[:tokens])
            torch.testing.assert_close(ours.attention(layer, q, kv)[:tokens], expected, rtol=1e-4, atol=1e-5)
        for chunk in batch:
            chunk.seq.computed += chunk.n
    assert padded and longer and max(seq.computed for seq in seqs) > 4 * BLOCK
