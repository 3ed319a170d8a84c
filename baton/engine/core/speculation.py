"""What a request says about guesses of its output, and where in its prediction an output is. The output is the same in any case. Pure."""

from bisect import bisect_left
from collections.abc import Sequence as Seq
from dataclasses import dataclass

NONE = "none"  # the method that guesses nothing
PREDICTION = "prediction"  # what stands for the method if the client's own prediction was the guess
SHORTEST = 2  # tokens of a match after which a place that was lost is found again
LONGEST = 16  # a longer match counts as one of so many
CANDIDATES = 16  # places that are looked at, on either side of where the place was lost
TAKEN_IN = 256  # tokens of a prediction that enter the table with one token of the output


@dataclass(frozen=True, slots=True)
class Speculation:
    method: str = ""  # empty: the engine's own
    max_tokens: int | None = None  # guesses in one step, at most; None: as many as the engine allows
    prediction: tuple[int, ...] = ()  # token ids that the client expects as output


@dataclass(frozen=True, slots=True)
class Offer:
    """What an engine has. A request may name its methods, but `PREDICTION`, which says that it may bring a prediction."""

    methods: tuple[str, ...] = (NONE,)  # the first is in force
    max_tokens: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*(name for name in self.methods if name != PREDICTION), NONE)))

    @property
    def predictions(self) -> bool:
        return PREDICTION in self.methods

    def method_for(self, asked: Speculation) -> str:
        """What guesses for a request that asks for this: the method in force if it names none, or one that another worker had."""
        return asked.method if asked.method in self.names else self.methods[0]


UNASKED, NOTHING_OFFERED = Speculation(), Offer()


class Follower:
    """Follows an output through a prediction of it, in constant time for each token. A function of the two: whoever follows the same output
    is at the same place.

    After a token that was not predicted, the place is lost until the last tokens stand in the prediction. Then it is after the longest
    match, and of equal ones after the first that does not go back. So an edit costs the tokens that it changes and `SHORTEST` more.
    """

    def __init__(self, prediction: Seq[int]) -> None:
        self._prediction = prediction
        self.place: int | None = 0  # of the token that is predicted next; None: it is lost
        self._accepted = 0
        self._lost_at = 0  # where the place was lost last
        self._recent: list[int] = []  # the last LONGEST tokens of the output
        self._lost_for = 0  # tokens since then
        self._doubted = 0  # tokens of a match that put it back, until the token after it confirms that
        self._places: dict[tuple[int, ...], list[int]] = {}  # SHORTEST tokens → the places after them
        self._known = SHORTEST  # places below are in the table

    @property
    def accepted(self) -> int:
        """Tokens of the prediction that stand in the output, in the prediction's order."""
        return min(self._accepted, len(self._prediction))

    @property
    def rejected(self) -> int:
        """Tokens of the prediction that the output does not have."""
        return len(self._prediction) - self.accepted

    def coming(self, most: int) -> Seq[int]:
        """What is predicted next, at most so many tokens."""
        return () if self.place is None else self._prediction[self.place : self.place + most]

    def follow(self, token: int) -> None:
        """The output goes on with `token`."""
        self._take_in()
        self._recent.append(token)
        del self._recent[:-LONGEST]
        if self.place is not None:
            if self.place < len(self._prediction) and self._prediction[self.place] == token:
                self.place += 1
                self._accepted += 1 + self._doubted
                self._doubted = 0
                return
            if not self._doubted:
                self._lost_at, self._lost_for = self.place, 0
            self.place, self._doubted = None, 0
        self._lost_for += 1
        self._find()

    def _find(self) -> None:
        places = self._places.get(tuple(self._recent[-SHORTEST:]), [])
        here = bisect_left(places, self._lost_at)
        length = 0
        for place in (*places[here : here + CANDIDATES], *reversed(places[max(0, here - CANDIDATES) : here])):
            if (found := self._common(place)) > length:
                self.place, length = place, found
        self._doubted = min(length, self._lost_for)

    def _common(self, place: int) -> int:
        """How many tokens before `place` are the last ones of the output."""
        most = min(place, len(self._recent))
        return next((n for n in range(SHORTEST, most) if self._prediction[place - 1 - n] != self._recent[-1 - n]), most)

    def _take_in(self) -> None:
        end = min(len(self._prediction) + 1, self._known + TAKEN_IN)
        for place in range(self._known, end):
            self._places.setdefault(tuple(self._prediction[place - SHORTEST : place]), []).append(place)
        self._known = max(self._known, end)
