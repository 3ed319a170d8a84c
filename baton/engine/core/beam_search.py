"""Beam search: which beams go on with which tokens, which hypotheses end, and when the search does. Pure.

The rules are those of `transformers` 5 (`GenerationMixin._beam_search`), for a batch of one and without sampling:

- Of all continuations of all beams, the best `width` may end: those that do are hypotheses, with the score
  sum of log-probabilities / (tokens of the output, the stop token included) ** length_penalty. The best `width` hypotheses are kept.
- The best `width` continuations that do not end are the next beams. `transformers` looks at (1 + stop tokens) · width continuations; the
  best width + stop tokens of each beam hold all that can matter among these.
- At `max_tokens` every continuation ends, and so does the search. Before that it ends once `width` hypotheses are kept and
  `early_stopping` is "true"; else once the best beam could not become better than the worst of them. "false" assumes the beam's length of
  now, which may be wrong for another length_penalty than 0; "never" assumes the length at which it would score best.

All is computed in float32, as there. Of equal continuations that of the earlier beam is first, then that of the lower token id; of equal
hypotheses the older one. (`torch.topk` promises no order.) There, a hypothesis below -1e9 counts as none; here it counts.
"""

import heapq
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from baton.engine.core.beams import Beams, Hypothesis

Candidate = tuple[int, float]  # token id, log-probability


@dataclass(frozen=True, slots=True)
class Beam:
    """An output that goes on. `score`: the sum of its log-probabilities."""

    tokens: tuple[int, ...]
    score: float


@dataclass(slots=True)
class BeamSearch:
    """One search, before its first step with one beam that has no tokens."""

    beams: Beams
    stops: frozenset[int]  # tokens that end an output
    max_tokens: int
    min_tokens: int = 0  # a stop token does not continue a shorter output
    live: list[Beam] = field(default_factory=lambda: [Beam((), 0.0)])  # the best first
    ended: list[Hypothesis] = field(default_factory=list)  # the best first
    done: bool = False
    steps: int = 0  # tokens that were computed for each beam

    @property
    def looks_at(self) -> int:
        """The best so many continuations of each beam are enough."""
        return self.beams.width + len(self.stops)

    @property
    def length(self) -> int:
        """Tokens of each beam."""
        return len(self.live[0].tokens)

    @property
    def found(self) -> tuple[Hypothesis, ...]:
        """The answer, once the search is done."""
        return tuple(self.ended[: self.beams.count])

    @property
    def trunk(self) -> tuple[int, ...]:
        """What all beams begin with."""
        first, last = min(beam.tokens for beam in self.live), max(beam.tokens for beam in self.live)
        same = next((i for i, (a, b) in enumerate(zip(first, last, strict=True)) if a != b), len(first))
        return first[:same]

    def step(self, rows: Seq[Seq[Candidate]]) -> list[int]:
        """`rows`: for each of `live` its best continuations, the best first (of equal ones the lowest id), `looks_at` of them or all.

        Returns for each of the new `live` which of the old ones it continues; nothing once the search is done.
        """
        self.steps += 1
        width, length = self.beams.width, self.length + 1
        young, last = length <= self.min_tokens, length >= self.max_tokens
        # Candidates are compared by (score, beam, token): merging keeps their order.
        ordered = heapq.merge(*(self._continuations(i, row, young) for i, row in enumerate(rows)))
        going: list[tuple[Beam, int]] = []
        before = self.live
        for rank, (cost, parent, token) in enumerate(ordered):
            tokens = (*before[parent].tokens, token)
            if last or token in self.stops:
                if rank < width:
                    self._end(Hypothesis(tokens, _divided(-cost, length, self.beams.length_penalty), token in self.stops))
            elif len(going) < width:
                going.append((Beam(tokens, -cost), parent))
            if rank + 1 >= width and (last or len(going) == width):
                break
        self.live = [beam for beam, _ in going] or before
        self.done = last or not going or self._is_over(length)
        return [] if self.done else [parent for _, parent in going]

    def _continuations(self, i: int, row: Seq[Candidate], young: bool) -> list[tuple[float, int, int]]:
        """(negative score, beam, token), the best first. Added in float32, unequal numbers may become equal: they are sorted again."""
        sums = np.float32(self.live[i].score) + np.array([logprob for _, logprob in row], dtype=np.float32)
        costs = (-sums.astype(np.float64)).tolist()
        pairs = zip(costs, row, strict=True)
        return sorted((cost, i, token) for cost, (token, _) in pairs if not (young and token in self.stops))

    def _end(self, hypothesis: Hypothesis) -> None:
        self.ended.append(hypothesis)
        self.ended.sort(key=lambda one: -one.score)  # stable
        del self.ended[self.beams.width :]

    def _is_over(self, length: int) -> bool:
        if len(self.ended) < self.beams.width:
            return False
        if self.beams.early_stopping == "true":
            return True
        grows = self.beams.early_stopping == "never" and self.beams.length_penalty > 0
        best = _divided(self.live[0].score, self.max_tokens if grows else length, self.beams.length_penalty)
        return best <= self.ended[-1].score


def _divided(score: float, length: int, penalty: float) -> float:
    return float(np.float32(score) / np.float32(length**penalty))
