"""Drafts that the client brings: what it expects the output to be, such as a file in which the model is to change one line. Pure.

As OpenAI's "predicted outputs" have it: the prediction costs the client no prompt, and where it is wrong, the output is what it would have
been. How an output is followed through a prediction is told in `Follower`; an engine that has been given the beginning of an output catches
up over several steps.
"""

from collections.abc import Sequence as Seq

from baton.engine.core.drafting import Drafter, DraftRequest
from baton.engine.core.sequence import Sequence
from baton.engine.core.speculation import PREDICTION, Follower

CAUGHT_UP = 256  # tokens of an output that are followed in one step


class Prediction(Drafter):
    name = PREDICTION

    def __init__(self) -> None:
        self._followers: dict[Sequence, tuple[Follower, int]] = {}  # and the tokens of the sequence that it has followed, prompt included

    @property
    def remembered(self) -> int:
        return len(self._followers)

    def ready(self, seq: Sequence) -> bool:
        return bool(self._coming(seq, 1))

    def propose(self, asks: Seq[DraftRequest]) -> list[Seq[int]]:
        return [self._coming(ask.seq, ask.most) for ask in asks]

    def forget(self, seq: Sequence) -> None:
        self._followers.pop(seq, None)

    def _coming(self, seq: Sequence, most: int) -> Seq[int]:
        predicted = seq.params.speculation.prediction
        if not predicted:
            return ()
        follower, known = self._followers.get(seq) or (Follower(predicted), seq.prompt_len)
        end = min(len(seq.tokens), known + CAUGHT_UP)
        for position in range(known, end):
            follower.follow(seq.tokens[position])
        self._followers[seq] = follower, end
        return follower.coming(most) if end == len(seq.tokens) else ()
