"""Our sampler inside vLLM's V1 model runner: it decides the token, vLLM only reads it off.

vLLM runs the request as greedy. This processor sees the model's own logits, computes what our sampler would choose (filters, penalties from
the end of the original prompt, noise keyed by (seed, position)), and leaves that token alone. So a stream that was cut anywhere goes on
exactly, and every parameter means what it means in our engine. Log-probabilities are vLLM's, of the logits before any processor.
"""

from typing import Any

import torch
from vllm import SamplingParams as VllmParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from baton.engine.core.sampling import FIELDS, SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.model.sampler import sample

KEY = "baton"  # in SamplingParams.extra_args


def pack(params: SamplingParams, prompt_len: int, stops: frozenset[int]) -> dict[str, Any]:
    """`prompt_len`: length of the client's prompt; tokens after it count as output. `stops`: all tokens that may end the sequence."""
    packed = {name: getattr(params, name) for name in FIELDS}
    packed |= {"logit_bias": list(params.logit_bias.items()), "stop_token_ids": sorted(stops), "logprobs": None}
    return {"prompt_len": prompt_len, "params": packed}


def unpack(packed: dict[str, Any], prompt: list[int], output: list[int]) -> "Row":
    given = packed["params"]
    params = SamplingParams(**given | {"logit_bias": dict(given["logit_bias"]), "stop_token_ids": frozenset(given["stop_token_ids"])})
    return Row(Sequence("", list(prompt), packed["prompt_len"], params, b""), len(prompt), output)


class Row:
    """A request in vLLM's batch. `output` is vLLM's own list, which grows."""

    def __init__(self, seq: Sequence, given: int, output: list[int]) -> None:
        self._seq, self._given, self._output = seq, given, output

    def sequence(self) -> Sequence:
        self._seq.tokens[self._given :] = self._output
        return self._seq


class BatonSampler(LogitsProcessor):
    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, Row] = {}

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
            self._rows[row] = unpack(params.extra_args[KEY], prompt or [], output)
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
            chosen = sample(logits[rows], [self._rows[row].sequence() for row in rows], frozenset())
            logits[rows] = -torch.inf
            logits[rows, [each.token for each in chosen]] = 0.0
        return logits
