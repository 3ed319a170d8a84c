"""Drafts without a model: pieces of text that the target has said while it was told wrong things. Pure.

Lookahead decoding (Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", 2024). A step that verifies
guesses samples after the wrong ones, too. If those samples are the next step's guesses for the same positions, and so on, each position
comes nearer to what the target will say there (a Jacobi iteration), and what follows what along the way, a *trail*, are word pairs and
phrases that the target likes. They are pooled by their first token. A draft is the pooled phrase that begins with the last known token,
and behind it the window, the positions that are still iterated.

The paper's window has a mask in which trails do not see each other, and its phrases are verified side by side. Here both are one chain:
each row sees all before it, so every row is also a guess, and the step is one like any other.

It pays where a row more costs next to nothing. On a CPU it does not: see docs/engine.md.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from baton.engine.core.drafting import Drafter, DraftRequest
from baton.engine.core.protocol import accepted
from baton.engine.core.sampling import Sampled
from baton.engine.core.sequence import Sequence

PHRASE = 4  # tokens, with the one by which it is found
POOLED = 512  # phrases of a sequence; the oldest is forgotten
STRIDE = 7919  # between the tokens of the text that stand in for positions of which nothing is known; a prime

Trail = tuple[int, ...]  # what stands at a position, after what led to it in the steps before: PHRASE tokens at most


@dataclass(slots=True)
class Sight:
    """What is known of one sequence beyond its tokens."""

    pool: dict[int, Trail] = field(default_factory=dict)  # first token → those after it; the newest last
    start: int = 0  # position of the first trail
    window: list[Trail] = field(default_factory=list)  # one for each position

    def guess(self, tokens: Seq[int], most: int) -> list[int]:
        """Sets the window to what is guessed now."""
        end = len(tokens)
        before = self.window[max(0, end - self.start) :]
        phrase = self.pool.get(tokens[-1], ())[:most]
        window = [phrase[: count + 1] for count in range(len(phrase))]
        window += before[len(window) : most]
        window += [(tokens[(end + i) * STRIDE % end],) for i in range(len(window), most)]
        self.start, self.window = end, window
        return [trail[-1] for trail in window]

    def learn(self, tokens: Seq[int], drafts: Seq[int], sampled: Seq[Sampled]) -> None:
        """Pools what the trails have become, and keeps those of positions that stay unknown."""
        known = len(accepted(drafts, sampled))
        text = [*tokens[-PHRASE:], *drafts[: known - 1]]
        trails = [tuple(text[: len(text) - known + 1 + row]) for row in range(known)] + self.window[known - 1 : len(drafts)]
        grown = [(*trail, said.token)[-PHRASE:] for trail, said in zip(trails, sampled, strict=False)]
        for first, *rest in (trail for trail in reversed(grown) if len(trail) == PHRASE):  # those of the text last, as the newest
            self.pool.pop(first, None)
            self.pool[first] = tuple(rest)
        for oldest in list(self.pool)[: max(0, len(self.pool) - POOLED)]:
            del self.pool[oldest]
        self.start, self.window = len(tokens) + known, grown[known:]


class Lookahead(Drafter):
    def __init__(self) -> None:
        self._sights: dict[Sequence, Sight] = {}

    @property
    def remembered(self) -> int:
        return len(self._sights)

    def propose(self, asks: Seq[DraftRequest]) -> list[Seq[int]]:
        return [self._sights.setdefault(ask.seq, Sight()).guess(ask.seq.tokens, ask.most) for ask in asks]

    def study(self, seq: Sequence, drafts: Seq[int], sampled: Seq[Sampled]) -> None:
        self._sights[seq].learn(seq.tokens, drafts, sampled)

    def forget(self, seq: Sequence) -> None:
        self._sights.pop(seq, None)
