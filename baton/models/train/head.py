"""A head that guesses further tokens from the hidden states of a model (EAGLE: Li et al. 2024, https://arxiv.org/abs/2401.15077).

Slot p sees the token at p and the hidden state before it, and is trained to say what the model says after p. When several tokens are
guessed, the hidden states after the first are the head's own, so it is trained on those, too: in pass k, the last k - 1 of them, and the
keys and values made of them, come from the passes before (EAGLE-3: https://arxiv.org/abs/2503.01840).

Tensors have the names of DeepSeek's layers of this kind, and the model is left as it is.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

from baton.models.train.batches import Batch
from baton.models.train.recipe import SEED, HeadRecipe

PASSES = (1.0, 0.8)  # weight of the loss of each
EVERY = 4  # tokens, one is judged: logits cost as much as all else


class Projections(nn.Module):
    """The matrices of attention; `TrainedHead` computes it."""

    def __init__(self, hidden: int, q: int, kv: int) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(hidden, q, bias=False), nn.Linear(q, hidden, bias=False)
        self.k_proj, self.v_proj = nn.Linear(hidden, kv, bias=False), nn.Linear(hidden, kv, bias=False)


class TrainedHead(nn.Module):
    """A decoder layer of the model's shape, but for its MLP, over the fusion of a token and a hidden state. B documents of T tokens."""

    def __init__(self, model: LlamaForCausalLM, inner: int) -> None:
        super().__init__()
        c: Any = model.config
        self.after: int = c.num_hidden_layers
        self.heads: int = c.num_attention_heads
        self.kv_heads: int = c.num_key_value_heads
        self.dim: int = c.head_dim

        def norm() -> nn.Module:
            return LlamaRMSNorm(c.hidden_size, c.rms_norm_eps)

        self.enorm, self.hnorm, self.input_layernorm, self.post_attention_layernorm = norm(), norm(), norm(), norm()
        self.eh_proj = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False)
        self.self_attn = Projections(c.hidden_size, self.heads * self.dim, self.kv_heads * self.dim)
        narrow = type(c)(**(c.to_dict() | {"intermediate_size": inner}))
        self.mlp = LlamaMLP(narrow)

    def forward(self, embedded: Tensor, hidden: Tensor, turns: tuple[Tensor, Tensor], earlier: list[tuple[Tensor, Tensor]]) -> Tensor:
        """`[B, T, H]` each → before the model's last norm `[B, T, H]`. Adds the keys and values of this pass to `earlier`."""
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        x = x + self.self_attn.o_proj(self._attend(self.input_layernorm(x), turns, earlier))
        return cast(Tensor, x + self.mlp(self.post_attention_layernorm(x)))

    def _attend(self, x: Tensor, turns: tuple[Tensor, Tensor], earlier: list[tuple[Tensor, Tensor]]) -> Tensor:
        batch, length, _ = x.shape
        attention, groups = self.self_attn, self.heads // self.kv_heads

        def heads(y: Tensor, times: int) -> Tensor:  # [B, Hq, T, D]
            return y.view(batch, length, -1, self.dim).transpose(1, 2).repeat_interleave(times, dim=1)

        q, k = apply_rotary_pos_emb(heads(attention.q_proj(x), 1), heads(attention.k_proj(x), groups), *turns)
        earlier.append((k, heads(attention.v_proj(x), groups)))
        (keys, values), recent = earlier[0], earlier[:0:-1]  # this pass first
        scores = q @ keys.transpose(2, 3)
        for back, (key, _) in enumerate(recent):
            own = (q[:, :, back:] * key[:, :, : length - back]).sum(-1)
            scores = torch.diagonal_scatter(scores, own, -back, 2, 3)
        unseen = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        shares = (scores.float() * self.dim**-0.5).masked_fill(unseen, -torch.inf).softmax(-1).to(values.dtype)
        out = shares @ values
        for back, (_, value) in enumerate(recent):
            share = shares.diagonal(-back, 2, 3)[..., None]
            out = out + functional.pad(share * (value - values)[:, :, : length - back], (0, 0, back, 0))
        whole: Tensor = out.transpose(1, 2).reshape(batch, length, -1)
        return whole


def new_head(recipe: HeadRecipe, model: nn.Module) -> TrainedHead:
    torch.manual_seed(SEED)
    return TrainedHead(cast(LlamaForCausalLM, model), recipe.inner)


def head_loss(head: nn.Module, batch: Batch, device: str, teacher: nn.Module | None) -> Tensor:
    """Weighted mean over every `EVERY`th token and the passes: cross entropy with the model's distribution."""
    assert isinstance(teacher, LlamaForCausalLM), "a head is trained on the hidden states of a model"
    ids, judged = batch.ids[:, :-1].to(device), slice(batch.tokens % EVERY, None, EVERY)
    weights = batch.weights.to(device)[:, judged].flatten()
    with torch.no_grad():
        hidden = teacher.model(input_ids=ids, use_cache=False).last_hidden_state
        target = teacher.lm_head(hidden[:, judged]).flatten(0, 1).softmax(-1)
        embedded = teacher.model.embed_tokens(ids)
        turns = teacher.model.rotary_emb(hidden, torch.arange(ids.shape[1], device=device)[None])
    loss, earlier = torch.zeros((), device=device), list[tuple[Tensor, Tensor]]()
    for share in PASSES:
        hidden = teacher.model.norm(head(embedded, functional.pad(hidden, (0, 0, 1, 0))[:, :-1], turns, earlier))
        each = functional.cross_entropy(teacher.lm_head(hidden[:, judged]).flatten(0, 1), target, reduction="none")
        loss = loss + share / sum(PASSES) * (each * weights).sum() / weights.sum()
    return loss
