"""The best of several choices: those with the highest mean log-probability of their tokens, best first. Nothing is told before all of them
have ended. Pure."""

from collections.abc import Iterator
from dataclasses import replace

from router.events import Finished, Pieces


class Best:
    def __init__(self, n: int, computed: int, logprobs: int | None) -> None:
        """`logprobs`: what the client asked for; None: it is not told any."""
        self._n = n
        self._logprobs = logprobs
        self._said: list[list[Pieces]] = [[] for _ in range(computed)]
        self._ends: dict[int, Finished] = {}

    def take(self, choice: int, event: Pieces | Finished) -> None:
        if isinstance(event, Finished):
            self._ends[choice] = event
        else:
            self._said[choice].append(event)

    def events(self) -> Iterator[Pieces | Finished]:
        """Call it when all choices have ended."""
        ranked = sorted(self._ends, key=lambda choice: (-self._mean(choice), choice))
        best, others = ranked[: self._n], ranked[self._n :]
        discarded = sum(self._ends[choice].request.output_len for choice in others)
        if all(self._ends[choice].uncached is None for choice in best):  # one that is not among them was the prompt computed for
            told = next((end.uncached for end in self._ends.values() if end.uncached is not None), None)
            self._ends[best[0]] = replace(self._ends[best[0]], uncached=told)
        for place, choice in enumerate(best):
            for pieces in self._said[choice]:
                yield replace(pieces if self._logprobs is not None else _silent(pieces), choice=place)
            yield replace(self._ends[choice], choice=place, discarded_tokens=discarded if place == len(best) - 1 else 0)

    def _mean(self, choice: int) -> float:
        told = [piece.token.logprob for pieces in self._said[choice] for piece in pieces.pieces]
        return sum(logprob for logprob in told if logprob is not None) / max(1, len(told))


def _silent(pieces: Pieces) -> Pieces:
    return replace(pieces, pieces=tuple(piece._replace(token=piece.token._replace(logprob=None, top=())) for piece in pieces.pieces))
