"""Drafts without a model: what followed the last time that these tokens stood in the prompt or in the output. Pure.

Prompt lookup decoding (Saxena, github.com/apoorvumang/prompt-lookup-decoding, 2023): answers that quote, edit or sum up their prompt, and
texts that repeat themselves, contain long pieces of what was there before.

The longest match that ends with the last known token counts, and of equal ones the latest. It is found through a hash chain, as in LZ77
compressors (RFC 1951, section 4): a table leads from the last two tokens to their latest occurrence, and a link from each occurrence to the
one before. At most `CANDIDATES` occurrences are looked at, and at most `LONGEST` tokens of each, so a token costs as much at position 8,000
as at position 80: one entry, and at most so many comparisons. A suffix automaton would find the longest of all matches, in several times
the memory, and would have to be updated along its links to know the latest.
"""

from array import array
from collections.abc import Sequence as Seq

from baton.engine.core.drafting import Drafter, DraftRequest, Tree
from baton.engine.core.sequence import Sequence

SHORTEST = 2  # tokens of a match
LONGEST = 16  # a longer match counts as one of so many
CANDIDATES = 16
TAKEN_IN = 512  # tokens of a long prompt that enter the table in one step; a stream beside it waits no longer
NOWHERE = -1


class SequenceHistory:
    """Where one sequence has said what. A place is a position whose token is known, and stands for the `SHORTEST` tokens before it."""

    def __init__(self) -> None:
        self._latest: dict[tuple[int, ...], int] = {}
        self._earlier = array("i", [NOWHERE] * SHORTEST)  # by place: the one before it with the same tokens before it

    def take_in(self, tokens: Seq[int], most: int) -> None:
        """Learns at most `most` of the places that it does not know yet."""
        known, latest, earlier = len(self._earlier), self._latest, self._earlier
        new = tokens[known - SHORTEST : min(len(tokens), known + most) - 1]
        for place, before in enumerate(zip(*(new[i:] for i in range(SHORTEST)), strict=False), known):
            earlier.append(latest.get(before, NOWHERE))
            latest[before] = place

    def match(self, tokens: Seq[int]) -> int:
        """The place after the longest match of the last tokens, or NOWHERE."""
        best, length = NOWHERE, 0
        place = self._latest.get(tuple(tokens[-SHORTEST:]), NOWHERE)
        for _ in range(CANDIDATES):
            if place == NOWHERE or length == LONGEST:
                break
            if (found := common(tokens, place)) > length:
                best, length = place, found
            place = self._earlier[place]
        return best

    def others(self, tokens: Seq[int], first: int) -> list[int]:
        """The places after the longest matches that go on with another token than `first`, one for each token, the longest first."""
        lengths: dict[int, tuple[int, int]] = {}  # token → how long its match is, and the place
        place = self._latest.get(tuple(tokens[-SHORTEST:]), NOWHERE)
        for _ in range(CANDIDATES):
            if place == NOWHERE:
                break
            token, found = tokens[place], common(tokens, place)
            if token != first and found > lengths.get(token, (0, NOWHERE))[0]:
                lengths[token] = found, place
            place = self._earlier[place]
        return [place for _, place in sorted(lengths.values(), reverse=True)]


def read_on(tokens: Seq[int], place: int, most: int) -> list[int]:
    """What follows a place, which is before the end. One that is nearer to the end than `most` tokens is read as a text that goes round."""
    period = len(tokens) - place
    return [tokens[place + i % period] for i in range(most)]


def common(tokens: Seq[int], place: int) -> int:
    """How many tokens before `place`, at least `SHORTEST`, equal the last ones. It looks at no more than `LONGEST`."""
    end, most = len(tokens), min(LONGEST, place)
    length = SHORTEST
    while length < most and tokens[place - 1 - length] == tokens[end - 1 - length]:
        length += 1
    return length


class PromptLookup(Drafter):
    """Costs next to nothing, and some 130 bytes of memory for a token of a sequence that is here."""

    name = "prompt_lookup"
    other_tokens = Drafter.bound

    def __init__(self, others: int = 0) -> None:
        """`others`: so many places where other tokens follow are told, too."""
        self._others = others
        self._histories: dict[Sequence, SequenceHistory] = {}

    @property
    def remembered(self) -> int:
        return len(self._histories)

    def ready(self, seq: Sequence) -> bool:
        return self._place(seq) != NOWHERE

    def propose(self, asks: Seq[DraftRequest]) -> list[Seq[int]]:
        return [self._tree(ask) if ask.others and self._others else self._guess(ask.seq, ask.most) for ask in asks]

    def forget(self, seq: Sequence) -> None:
        self._histories.pop(seq, None)

    def _guess(self, seq: Sequence, most: int) -> list[int]:
        place = self._place(seq)
        return [] if place == NOWHERE else read_on(seq.tokens, place, most)

    def _tree(self, ask: DraftRequest) -> Seq[int]:
        seq = ask.seq
        guess = self._guess(seq, ask.most)
        if not guess:
            return guess
        places = self._histories[seq].others(seq.tokens, guess[0])[: self._others]
        return Tree.of(guess, (read_on(seq.tokens, place, ask.most) for place in places))

    def _place(self, seq: Sequence) -> int:
        if (history := self._histories.get(seq)) is None:
            history = self._histories[seq] = SequenceHistory()
        history.take_in(seq.tokens, TAKEN_IN)
        return history.match(seq.tokens)
