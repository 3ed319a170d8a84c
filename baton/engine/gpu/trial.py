"""Each attention backend, tried with one small step: only what has computed counts as there."""

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.engine.core.int5_rows import row_bytes
from baton.engine.core.protocol import Chunk
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence as Seq
from baton.engine.gpu.attention import Packed
from baton.engine.gpu.choice import BackendFacts, Tried, make_attention, tries
from baton.engine.gpu.inputs import Capacity, Inputs
from baton.engine.model.checkpoint import LayerAttention
from baton.engine.model.kv_views import DTYPES

TOKENS = (1, 9)  # that the two sequences of a small step compute: a decode, and a prompt
PAST = 3  # positions that the decode has before


@torch.inference_mode()
def rehearse(
    backend: str, facts: BackendFacts, layers: Sequence[LayerAttention], heads: int, kv_heads: int, value_dim: int, device: torch.device
) -> None:
    """Plans and computes attention once for a decode and a prompt, in each kind of layer. Raises whatever the backend raises."""
    kinds = tuple(dict.fromkeys(layers))
    seqs = [Seq(str(n), [0] * (n + PAST), n + PAST, SamplingParams(max_tokens=1), b"") for n in TOKENS]
    chunks, block = [], 0
    for seq, n in zip(seqs, TOKENS, strict=True):
        count = -(-len(seq.tokens) // facts.block_size)
        seq.blocks, block = list(range(block, block + count)), block + count
        seq.computed = len(seq.tokens) - n
        chunks.append(Chunk(seq, n))
    places = block + 1, len(kinds), facts.parts, kv_heads, facts.block_size
    if facts.stored == "int5":
        rows = torch.zeros(*places, row_bytes(facts.head_dim), dtype=torch.uint8, device=device)
        pool: Tensor | Packed = Packed(rows, facts.head_dim, torch.zeros(places, dtype=torch.bfloat16, device=device))
    else:
        pool = torch.zeros(*places, facts.head_dim, dtype=DTYPES[facts.stored] if facts.stored else facts.dtype, device=device)
    scales = torch.zeros(places, device=device) if facts.stored == "int8" else None
    inputs = Inputs(Capacity(len(seqs), sum(TOKENS), max(len(seq.tokens) for seq in seqs) + 1), facts.block_size, block, device)
    attention = make_attention(backend, pool, kinds, heads, value_dim, inputs, scales, facts.dtype)
    attention.begin(inputs.prepare(chunks))
    q = torch.zeros(sum(TOKENS), heads, facts.head_dim, dtype=facts.dtype, device=device)
    kv = torch.zeros(sum(TOKENS), facts.parts, kv_heads, facts.head_dim, dtype=facts.dtype, device=device)
    for layer in range(len(kinds)):
        if not attention(layer, q, kv).isfinite().all():  # which waits for the device
            raise ValueError("attention over zeros is not finite")


def tried_here(
    device: str = "cuda", dtype: torch.dtype = torch.bfloat16, block_size: int = 16, heads: int = 32, kv_heads: int = 8, head_dim: int = 128
) -> list[Tried]:
    """Every backend, tried on this device with the shapes of a usual model: what `baton doctor` shows."""
    facts = BackendFacts(torch.device(device).type, dtype, block_size, head_dim, parts=2)
    return list(tries("auto", facts, lambda name: rehearse(name, facts, [LayerAttention()], heads, kv_heads, 0, torch.device(device))))
