"""The oracle: no cache, no batch, no blocks. Every token costs a whole forward pass, and there is nothing to get wrong.

It is kept for good; the engine's tokens are compared with these.
"""

import torch
from torch import Tensor

from baton.engine.core.sampling import Sampled, SamplingParams
from baton.engine.core.sequence import Sequence, finish_reason
from baton.engine.model.checkpoint import LayerAttention
from baton.engine.model.sampler import sample
from baton.engine.model.transformer import Transformer


def generate(model: Transformer, tokens: list[int], params: SamplingParams, prompt_len: int | None = None) -> list[Sampled]:
    """The tokens that `params` asks for after `tokens`; those of `tokens` beyond `prompt_len` count as earlier output."""
    seq = Sequence("naive", list(tokens), len(tokens) if prompt_len is None else prompt_len, params, root=b"")
    config, answers = model.config, []
    while True:
        answer = sample(next_logits(model, seq.tokens).cpu(), [seq], config.eos_token_ids)[0]
        answers.append(answer)
        seq.tokens.append(answer.token)
        if finish_reason(seq, config.eos_token_ids, config.max_positions):
            return answers


@torch.inference_mode()
def next_logits(model: Transformer, tokens: list[int]) -> Tensor:
    """Logits `[1, V]` after the last of `tokens`."""
    positions, config = torch.arange(len(tokens), device=model.device), model.config

    def attention(layer: int, q: Tensor, kv: Tensor) -> Tensor:
        return attend_plainly(q, kv[:, 0], kv[:, -1][..., : config.kv_value_dim or config.head_dim], config.attention[layer])

    return model.forward(torch.tensor(tokens, device=model.device), positions, attention, positions[-1:])


def attend_plainly(q: Tensor, k: Tensor, v: Tensor, how: LayerAttention) -> Tensor:
    """q `[T, Hq, D]`, k `[T, Hkv, D]`, v `[T, Hkv, Dv]` → `[T, Hq * Dv]`: the formula, with heads repeated and scores spelt out."""
    length, heads, dim = q.shape
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))  # [T, Hq, D]
    scores = torch.einsum("qhd,khd->hqk", q, k) * (dim**-0.5 if how.scale is None else how.scale)
    if how.softcap is not None:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    at = torch.arange(length, device=q.device)
    age = at[:, None] - at  # [query, key]
    hidden = (age < 0) if how.window is None else (age < 0) | (age >= how.window)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v).reshape(length, -1)
