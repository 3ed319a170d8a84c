"""Drafts with a smaller model on the device of the model: `baton.engine.draft_model`, whose steps are a `Chain`.

Of a prompt, its KV is computed behind the model's, in the same step. That, and what it drafts, goes into the stream of the model's steps:
nothing of it is under way when the engine gives a block away, for drafts are read before the step that verifies them is submitted.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from itertools import takewhile

import torch
from torch import Tensor

from baton.engine.core.drafting import DraftRequest
from baton.engine.core.sequence import Sequence
from baton.engine.draft_model import DraftModel, trees
from baton.engine.gpu.attention import DeviceAttention
from baton.engine.gpu.chain import Chain, ChainParts, DraftLane
from baton.engine.gpu.choice import BackendFacts, make_attention, why_not
from baton.engine.gpu.graphs import Compute, uncaptured
from baton.engine.gpu.inputs import Capacity, Inputs, TokenRun
from baton.engine.gpu.runner import asks_the_device, picking
from baton.engine.model.checkpoint import LayerAttention
from baton.engine.runner import ModelRunner


class DeviceDraft(DraftModel):
    """A `DeviceCompanion`."""

    few = 2  # the last guess of a draft that was right, and what followed it

    def __init__(self, runner: ModelRunner, bound: int, others: int = 0) -> None:
        super().__init__(runner, bound, others)
        self._chain: Chain | None = None

    def place(self, kv: Tensor, capacity: Capacity, capture: Callable[[Compute], Compute]) -> None:
        """See `DeviceCompanion`."""
        model, layout, device = self._runner.model, self._runner.layout, self._runner.device
        self._inputs = Inputs(Capacity(capacity.max_num_seqs, capacity.max_num_batched_tokens, capacity.max_len), layout.block_size,
                              len(kv) - 1, device)  # fmt: skip
        self._attention = drafting_attention(kv, model.config.attention, model.config.heads, layout.value_dim, self._inputs)
        capture = uncaptured if asks_the_device(model) else capture
        how = ChainParts(self._compute, self._attention, self._inputs, picking(device), capture, self.bound, self.few, self._others)
        self._chain = Chain(how)

    def detach(self) -> None:
        """See `DeviceCompanion`."""
        for name in ("_inputs", "_attention"):
            self.__dict__.pop(name, None)
        self._chain = None

    def _compute(
        self, tokens: Tensor, hidden: Tensor | None, positions: Tensor, attention: DeviceAttention, rows: Tensor
    ) -> tuple[Tensor, None]:
        return self._runner.model.forward(tokens, positions, attention, rows), None

    @torch.inference_mode()
    def _catch_up(self, ends: Mapping[Sequence, int]) -> None:
        runs, left = list[TokenRun](), self._inputs.capacity.max_num_batched_tokens
        for seq, end in ends.items():
            start = min(seq.drafted, end - 1)
            while start < end:
                stop = min(end, start + left)
                runs.append(TokenRun(seq, start, seq.tokens[start:stop], seq.blocks, stop - start == 1, start))
                left -= stop - start
                if not left or len(runs) == self._inputs.capacity.max_num_seqs or stop < end:
                    self._fill(runs)
                    runs, left = [], self._inputs.capacity.max_num_batched_tokens
                start = stop
        self._fill(runs)
        for seq, end in ends.items():
            seq.drafted = end

    def _fill(self, runs: Seq[TokenRun]) -> None:
        """Computes the KV of these tokens."""
        if not runs:
            return
        step = self._inputs.prepare_runs(sorted(runs, key=lambda run: not run.apart))
        self._attention.begin(step)
        self._runner.model.forward(step.tokens, step.positions, self._attention, self._inputs.upload([]))

    def _guess(self, near: Seq[DraftRequest]) -> list[Seq[int]]:
        assert self._chain is not None, "place it first"
        if not near:
            return []
        lanes = []
        for ask in near:
            seq, known = ask.seq, len(ask.seq.tokens)
            start = min(seq.drafted, known - 1)
            run = TokenRun(seq, start, seq.tokens[start:], seq.blocks, False, start)
            room = len(seq.blocks) * self._inputs.block_size
            lanes.append(DraftLane(run, min(room, known - 1 + ask.most) - 1, seq.params, known))
        drafts, others = self._chain.draft(lanes, max(ask.most for ask in near))
        return trees(near, [self._said(ask, draft) for ask, draft in zip(near, drafts, strict=True)], others if self._others else [])

    def _said(self, ask: DraftRequest, draft: Seq[int]) -> list[int]:
        """The guesses that were asked for, up to the end that the draft sees."""
        draft = draft[: ask.most]
        if ask.seq.params.ignore_eos:
            return [*draft]
        eos = self._runner.eos_token_ids
        more = [*takewhile(lambda token: token not in eos, draft)]
        return [*draft[: len(more) + 1]]


def drafting_attention(kv: Tensor, layers: Seq[LayerAttention], heads: int, value_dim: int, inputs: Inputs) -> DeviceAttention:
    """Our own kernels, which read what a step has written for the next one, where they are possible."""
    _, _, parts, _, size, dim = kv.shape
    facts = BackendFacts(kv.device.type, kv.dtype, size, dim, parts)
    return make_attention("torch" if why_not("triton", facts) else "triton", kv, layers, heads, value_dim, inputs)
