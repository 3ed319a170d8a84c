"""Our sampler inside vLLM's V1 model runner: it decides the token, vLLM only reads it off.

vLLM runs the request as greedy. This processor sees the model's own logits, computes what our sampler would choose (filters, penalties from
the end of the original prompt, noise keyed by (seed, position)), and leaves that token alone. So a stream that was cut anywhere goes on
exactly, and every parameter means what it means in our engine. Log-probabilities are vLLM's, of the logits before any processor.

A processor cannot end one request alone. So a row whose grammar leaves nothing gets an end token, and our process, which follows the
grammar, too, sees that the document is not complete (`baton.engine.vllm.engine`).
"""

from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams as VllmParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from baton.engine.core.grammar import Grammar
from baton.engine.core.protocol import NothingAllowed
from baton.engine.core.sampling import FIELDS, SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.core.thinking import Marks, ThinkingBudget
from baton.engine.model.sampler import sample
from baton.engine.vllm.forms import VllmForms, forms_of

KEY = "baton"  # in SamplingParams.extra_args


def pack(params: SamplingParams, prompt_len: int, eos: frozenset[int]) -> dict[str, Any]:
    """`prompt_len`: length of the client's prompt; tokens after it count as output."""
    packed = {name: getattr(params, name) for name in FIELDS}
    packed |= {"logit_bias": list(params.logit_bias.items()), "stop_token_ids": sorted(params.stop_token_ids), "logprobs": None}
    packed["structured"] = None if params.structured is None else params.structured.told()
    packed["thinking"] = None if params.thinking is None else asdict(params.thinking)
    return {"prompt_len": prompt_len, "params": packed, "eos": sorted(eos)}


def unpack(packed: dict[str, Any], prompt: list[int], output: list[int], name: str = "", forms: VllmForms | None = None) -> "Row":
    """`forms`: who makes matchers; needed only for a request that has a form or bounds its thinking."""
    given = packed["params"] | {"logit_bias": dict(packed["params"]["logit_bias"])}
    given["stop_token_ids"] = frozenset(given["stop_token_ids"])
    given["structured"] = None if given["structured"] is None else Grammar(**given["structured"])
    if (thinking := given["thinking"]) is not None:
        marks = tuple(Marks(one["begin"], tuple(one["ends"]), tuple(one["closing"])) for one in thinking["marks"])
        given["thinking"] = ThinkingBudget(thinking["max_tokens"], marks, thinking["opened"])
    seq = Sequence(name, list(prompt), packed["prompt_len"], SamplingParams(**given), b"")
    if seq.params.structured is not None or seq.params.thinking is not None:
        assert forms is not None
        seq.matcher = forms.matcher(seq.params.structured, seq.params.thinking)
    return Row(seq, len(prompt), output, frozenset(packed["eos"]))


class Row:
    """A request in vLLM's batch. `output` is vLLM's own list, which grows."""

    def __init__(self, seq: Sequence, given: int, output: list[int], eos: frozenset[int]) -> None:
        self._seq, self._given, self._output, self.eos = seq, given, output, eos

    def sequence(self) -> Sequence:
        self._seq.tokens[self._given :] = self._output
        return self._seq


class BatonSampler(LogitsProcessor):
    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        model = vllm_config.model_config
        self._forms = forms_of(Path(model.model), model.get_vocab_size())
        self._rows: dict[int, Row] = {}
        self._names = count()

    @classmethod
    def validate_params(cls, sampling_params: VllmParams) -> None:
        if KEY not in (sampling_params.extra_args or {}):
            raise ValueError("only requests of a Baton worker run in this engine")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._rows.pop(row, None)
        for row, params, prompt, output in batch_update.added:
            assert params.extra_args is not None
            self._rows[row] = unpack(params.extra_args[KEY], prompt or [], output, str(next(self._names)), self._forms)
        for here, there, direction in batch_update.moved:
            mine, theirs = self._rows.pop(here, None), self._rows.pop(there, None)
            if mine is not None:
                self._rows[there] = mine
            if direction is MoveDirectionality.SWAP and theirs is not None:
                self._rows[here] = theirs

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Raises NonFiniteLogits, which ends the engine: weights or KV that give such logits are not to be served from."""
        rows = [row for row in sorted(self._rows) if row < logits.shape[0]]
        if rows:
            tokens = choose(logits[rows], [self._rows[row] for row in rows])
            logits[rows] = -torch.inf
            logits[rows, tokens] = 0.0
        return logits


def choose(logits: torch.Tensor, rows: list[Row]) -> list[int]:
    """The next token of each row; an end token where the grammar leaves nothing. All have the same end tokens: those of the model."""
    seqs, eos = [row.sequence() for row in rows], rows[0].eos
    try:
        return [each.token for each in sample(logits, seqs, eos)]
    except NothingAllowed as error:
        left = [i for i, seq in enumerate(seqs) if seq.id not in error.sequence_ids]
    tokens = [min(eos)] * len(rows)
    for i, token in zip(left, choose(logits[left], [rows[i] for i in left]) if left else (), strict=True):
        tokens[i] = token
    return tokens
