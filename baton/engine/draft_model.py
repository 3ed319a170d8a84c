"""Drafts with a smaller model that has the same tokenizer.

It says what it would say itself, under the same sampling: with the same noise at the same position it draws the target's token more often
than by chance (the Gumbel-max trick couples two distributions that are alike). The target then verifies all of it in one step (Leviathan et
al., "Fast Inference from Transformers via Speculative Decoding", 2023).

Its KV lies in the blocks of the target's (`KvLayout.draft`). Of a prompt it is computed together with the target's, so it is handed over
with it. Of the output it is computed when the next draft is wanted, for all sequences of a step together. Until then a block that the
target has filled does not count as full: nobody is shown one that has only one of both. `Sequence.drafted` counts the positions that have
it.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from baton.engine.core.drafting import Drafter, DraftRequest, Tree
from baton.engine.core.kvcache import DraftKv
from baton.engine.core.protocol import Chunk, NothingToSample, Tokens
from baton.engine.core.sampling import Sampled
from baton.engine.core.sequence import Sequence
from baton.engine.core.step_costs import DraftCosts, Drafting
from baton.engine.measure_steps import draft_costs
from baton.engine.model.attention import Span
from baton.engine.model.projections import Attention
from baton.engine.model.sampler import draws_alone, greatest, sample, takes_greatest
from baton.engine.runner import ForwardPart, ModelRunner

if TYPE_CHECKING:
    from baton.engine.draft_steps import DraftSteps

FEW = (
    40  # tokens that are caught up as steps, mostly recorded ones, and a trial of a bad draft is no further; more are computed as a prompt
)
CAUGHT_UP = 512  # tokens in a step, of all sequences: a stream beside them waits no longer


class DraftModel(Drafter):
    """A drafter, and a `Companion` of the runner for which it drafts. It remembers nothing of a sequence but its KV."""

    reads_hidden = False
    other_tokens = 1
    few = FEW

    def __init__(self, runner: ModelRunner, bound: int, others: int = 0) -> None:
        """`runner` has the smaller model, and no pool. `bound`: tokens of a draft at most; `others`: so many other choices of its first
        token are told."""
        self._runner = runner
        self.bound = bound
        self._others = others
        self._steps: DraftSteps | None = None
        self._costs = DraftCosts()
        own = runner.layout
        self.kv = DraftKv(own.model_fingerprint, own.dtype, own.num_layers, own.num_kv_heads, own.head_dim, own.parts, own.value_dim)

    def attach(self, kv: Tensor) -> None:
        self._runner.use(kv)
        if self._runner.model.ops.records and self._runner.takes_steps:
            from baton.engine.draft_steps import DraftSteps

            self._steps = DraftSteps(self._forward, self._runner.model.config, self._runner.paged, self.bound, self._others)

    def _forward(self, tokens: Tensor, before: Tensor, positions: Tensor, attention: Attention) -> tuple[None, Tensor]:
        return None, self._runner.model.forward(tokens, positions, attention, None)

    def follow(self, batch: Seq[Chunk], hidden: Tensor | None, yields: Seq[Tokens]) -> None:
        """See `Companion`. Decodes wait: where nothing is drafted, a step must cost no more than without a draft."""
        ends = {chunk.seq: chunk.seq.computed + chunk.n for chunk in batch if chunk.n > 1 or chunk.seq.hold}
        self._catch_up({seq: end for seq, end in ends.items() if seq.drafted < end})

    def propose(self, asks: Seq[DraftRequest]) -> list[Seq[int]]:
        """Greedy guesses of a greedy sequence; of another, what the draft would draw. None of one that is still far behind."""
        ends, left = dict[Sequence, int](), CAUGHT_UP
        for seq in (ask.seq for ask in asks):
            if len(seq.tokens) - seq.drafted > self.few and left > 0:
                ends[seq] = min(len(seq.tokens) - 1, seq.drafted + left)
                left -= ends[seq] - seq.drafted
        self._catch_up(ends)
        near = [ask for ask in asks if len(ask.seq.tokens) - ask.seq.drafted <= self.few]
        drafts = dict(zip((ask.seq for ask in near), self._guess(near), strict=True))
        for seq in drafts:
            seq.drafted = len(seq.tokens)
        return [drafts.get(ask.seq, []) for ask in asks]

    def _guess(self, near: Seq[DraftRequest]) -> list[Seq[int]]:
        plain = all(ask.seq.matcher is None and takes_greatest(ask.seq.params) for ask in near)
        return self._greedy(near) if plain else self._chained(near) or self._drawn(near)

    def _catch_up(self, ends: Mapping[Sequence, int]) -> None:
        """Computes the KV up to these ends as that of a prompt is."""
        if ends:
            self._runner.logits_of([part(seq, end, 0) for seq, end in ends.items()])
        for seq, end in ends.items():
            seq.drafted = end

    def drafting(self, sequences: int) -> Drafting:
        return self._costs.at(sequences)

    def measure(self, most: int) -> DraftCosts:
        """Measures what it takes for up to `most` sequences."""
        self._costs = draft_costs(self, most, self._runner.layout.block_size, self._runner.on_device)
        return self._costs

    def observe(self, seq: Sequence, drafted: int, accepted: int) -> None:
        """The last guess of a draft has no KV: nothing followed it."""
        seq.drafted += min(accepted, drafted - 1)

    def _greedy(self, asks: Seq[DraftRequest]) -> list[Seq[int]]:
        drafts: list[list[int]] = [[] for _ in asks]
        others: list[list[int]] = []
        parts = {i: part(ask.seq, len(ask.seq.tokens), 1, self._runner.takes_steps) for i, ask in enumerate(asks)}
        while parts:
            found, more = self._greatest([*parts.values()], min(asks[i].most - len(drafts[i]) for i in parts))
            others = others or more
            for i, tokens in zip(parts, found, strict=True):
                drafts[i] += tokens
            parts = {i: self._after(asks[i].seq, drafts[i]) for i in parts if self._goes_on(asks[i], drafts[i])}
        return trees(asks, [list(takewhile(lambda token: token >= 0, draft)) for draft in drafts], others)

    def _greatest(self, parts: Seq[ForwardPart], steps: int) -> tuple[list[list[int]], list[list[int]]]:
        """The likeliest token after each part, or what follows that, too: up to `steps`. And the next likeliest after each part."""
        spans, tokens = [part.span for part in parts], [part.tokens for part in parts]
        chained = self._steps.guesses(spans, tokens, steps) if self._steps and all(span.steps for span in spans) else None
        if chained is not None:
            return chained
        logits, best = self._last(parts)
        others: list[list[int]] = logits.topk(1 + self._others).indices[:, 1:].tolist() if self._others else []
        return [[token] for token in (greatest(logits).tolist() if best is None else best)], others

    def _chained(self, asks: Seq[DraftRequest]) -> list[Seq[int]] | None:
        """What it draws in one call, as many guesses for each; None: draw them step by step."""
        params = [ask.seq.params for ask in asks]
        if self._steps is None or not asks or not all(ask.seq.matcher is None and draws_alone(ask.seq.params) for ask in asks):
            return None
        if self._others and any(ask.others for ask in asks):
            return None  # a chain draws no other choices
        parts = [part(ask.seq, len(ask.seq.tokens), 1, self._runner.takes_steps) for ask in asks]
        if not all(each.span.steps for each in parts):
            return None
        found = self._steps.guesses([each.span for each in parts], [each.tokens for each in parts], min(ask.most for ask in asks), params)
        return found and [list(takewhile(lambda token: token >= 0, draft)) for draft in found[0]]

    def _drawn(self, asks: Seq[DraftRequest]) -> list[Seq[int]]:
        drafts: list[list[int]] = [[] for _ in asks]
        others: list[list[int]] = []
        seqs = [imagined(ask.seq) for ask in asks]
        parts = {i: part(ask.seq, len(ask.seq.tokens), 1, self._runner.takes_steps) for i, ask in enumerate(asks)}
        while parts:
            logits, best = self._last([*parts.values()])
            try:
                said = self._say(logits, [seqs[i] for i in parts], best)
            except NothingToSample:
                break
            if self._others and not others and any(ask.others for ask in asks):
                others = other_choices(logits, said, self._others, lambda left: self._say(left, seqs))
            for i, token in zip(parts, said, strict=True):
                drafts[i].append(token.token)
                seqs[i].tokens.append(token.token)
            parts = {i: self._after(asks[i].seq, drafts[i]) for i in parts if self._goes_on(asks[i], drafts[i])}
        return trees(asks, drafts, others)

    def _say(self, logits: Tensor, seqs: Seq[Sequence], best: list[int] | None = None) -> list[Sampled]:
        return sample(logits, seqs, self._runner.eos_token_ids, best, self._runner.model.ops.draw)

    def _last(self, parts: Seq[ForwardPart]) -> tuple[Tensor, list[int] | None]:
        """The logits after each part, and the likeliest token if it is known."""
        logits, best, _ = self._runner.logits_of(parts)
        if len(logits) == len(parts):
            return logits, best
        last = [end - 1 for end in accumulate(part.wants for part in parts)]  # a recorded step gives all rows
        return logits[last], best and [best[row] for row in last]

    def _after(self, seq: Sequence, draft: Seq[int]) -> ForwardPart:
        return ForwardPart(Span(len(seq.tokens) + len(draft) - 1, 1, seq.blocks, self._runner.takes_steps), draft[-1:], 1)

    def _goes_on(self, ask: DraftRequest, draft: Seq[int]) -> bool:
        ended = not ask.seq.params.ignore_eos and draft[-1] in self._runner.eos_token_ids
        return len(draft) < ask.most and draft[-1] >= 0 and not ended


def imagined(seq: Sequence) -> Sequence:
    """A copy that guesses may be added to."""
    params = seq.params if seq.params.logprobs is None else replace(seq.params, logprobs=None)
    return Sequence(seq.id, [*seq.tokens], seq.prompt_len, params, seq.root, matcher=seq.matcher, guessed=True)


def trees(asks: Seq[DraftRequest], drafts: Seq[list[int]], others: Seq[list[int]]) -> list[Seq[int]]:
    """The drafts, with other choices of the first token of each, where they are of use and known."""
    made: list[Seq[int]] = [*drafts]
    for i, more in enumerate(others):
        if asks[i].others:
            made[i] = Tree.of(drafts[i], ([token] for token in more))
    return made


def other_choices(logits: Tensor, said: Seq[Sampled], most: int, say: Callable[[Tensor], Seq[Sampled]]) -> list[list[int]]:
    """What each row would say with the same noise if what it has said were forbidden, and so on, up to `most` times."""
    logits, found = logits.clone(), list[list[int]]([[] for _ in said])
    for _ in range(most):
        for row, token in enumerate(said):
            logits[row, token.token] = -torch.inf
        try:
            said = say(logits)
        except NothingToSample:
            break
        for each, token in zip(found, said, strict=True):
            each.append(token.token)
    return found


def part(seq: Sequence, end: int, wants: int, steps: bool = False) -> ForwardPart:
    """What is not drafted before `end`, but at least the last token. With `steps`, a few are steps, which give the logits of all."""
    start = min(seq.drafted, end - 1)
    n = end - start
    steps = steps and n <= FEW
    return ForwardPart(Span(start, n, seq.blocks, steps), seq.tokens[start:end], n if steps else wants)
