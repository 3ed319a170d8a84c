"""How many guesses a step is worth, by what steps of several sizes took when they were measured. Pure: the table is an argument.

A step yields a token for each of its rows, and a guess that is accepted with chance p yields p more. So one more row is worth computing
while p, divided by what the row and its guess take, is no less than all tokens of the step divided by what the step takes: then it yields
more tokens a second with it than without (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023, section 3,
for a step that is bound by reading the weights). Where a step is bound by computing, a row takes its full share, and no guess is worth it.

A step takes more than its rows: what is read of each sequence, and the engine's own work for it, are the same however many guesses it
gets. The more of that there is, the more a guess is worth. Attention and the engine take more for each guess, too, which makes it worth
less the longer its sequence is.

Rows do not all take the same: a kernel computes several at once, so the second may take half of a step, and the next six nothing. Guesses
are therefore added as long as some number of further rows may be worth it, by what each of these takes on average, and those after the
best number are given back.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple, TypeVar

REMEMBERED = 1 << 14  # values of a function
Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Line:
    """A function of a count, known at some. In between it is interpolated, and beyond the last two it goes on as between these."""

    points: tuple[tuple[int, float], ...]  # (count, seconds), by count, two or more
    _found: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    _found_further: dict[tuple[int, int], float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def at(self, count: int) -> float:
        if (found := self._found.get(count)) is None:
            i = min(max(1, bisect_left(self.points, (count, 0.0))), len(self.points) - 1)
            (x0, y0), (x1, y1) = self.points[i - 1 : i + 1]
            found = remember(self._found, count, y0 + (y1 - y0) * (count - x0) / (x1 - x0))
        return found

    def further(self, count: int, most: int) -> float:
        """Seconds of one more than `count`, as the average over that number of further ones, of at most `most >= 1`, with which it is
        least."""
        if (found := self._found_further.get((count, most))) is None:
            here, end = self.at(count), count + most
            least = (self.at(end) - here) / most
            for known, seconds in self.points[bisect_right(self.points, (count, float("inf"))) :]:
                if known >= end:
                    break
                least = min(least, (seconds - here) / (known - count))
            found = remember(self._found_further, (count, most), max(0.0, least))
        return found


def remember(known: dict[Key, Value], key: Key, value: Value) -> Value:
    """The value, which is noted; all others are forgotten if there are too many."""
    if len(known) >= REMEMBERED:
        known.clear()
    known[key] = value
    return value


NOTHING = Line(((1, 0.0), (2, 0.0)))
ASSUMED = Line(((1, 1.0), (2, 1.15)))  # a row more costs 15 % of a step with one row: where nothing is measured


class Drafting(NamedTuple):
    """What a drafter takes, as the share of one sequence, in seconds."""

    begin: float = 0.0  # if it is asked at all
    guess: float = 0.0  # and for each guess


class DraftCosts:
    """What a drafter takes, as measured with one guess and with `most >= 2` guesses of each sequence. Before it is measured: nothing."""

    def __init__(self, one: Line = NOTHING, several: Line = NOTHING, most: int = 2) -> None:
        """`one` and `several`: seconds by the number of sequences."""
        self.one, self.several, self._most = one, several, most
        self._known: dict[int, Drafting] = {}

    def at(self, sequences: int) -> Drafting:
        """What it takes with so many sequences."""
        if (found := self._known.get(sequences)) is None:
            one = self.one.at(sequences) / sequences
            guess = min(one, max(0.0, self.several.at(sequences) / sequences - one) / (self._most - 1))
            found = self._known[sequences] = Drafting(one - guess, guess)
        return found


class Beside(NamedTuple):
    """What a step takes beside its rows, in seconds."""

    step: float = 0.0  # however many guesses it has
    guess: float = 0.0  # for each guess


NOTHING_BESIDE = Beside()


class Upkeep(NamedTuple):
    """What `Beside` consists of, in seconds."""

    sequence: float = 0.0
    token: float = 0.0  # for each known token of a sequence, which is read once for all of its rows
    guess: float = 0.0
    guess_token: float = 0.0  # for each known token of a guess's sequence: attention computes with it


NO_UPKEEP = Upkeep()


Chances = tuple[float, float]  # that the first guess is right, and that a further one is if all before it are


def least_chance(rows: int, most: int, step: Line, drafting: Drafting, beside: Beside = NOTHING_BESIDE) -> float:
    """The least chance of a first guess that may be worth it in a step with so many rows and at most `most` guesses. Above 1, none is, as
    where a step is bound by computing."""
    return (step.further(rows, most) + drafting.guess + beside.guess) * rows / (step.at(rows) + beside.step)


class DraftWorth(NamedTuple):
    guesses: list[tuple[int, float]]  # (whose, chance that it becomes output), the likeliest first
    tokens: float  # expected of the step with them
    seconds: float


def _worth(
    chances: Seq[Chances], most: Seq[int], rows: int, step: Line, before: tuple[float, float], guess: float, begin: float = 0.0
) -> DraftWorth:
    """Those guesses with which a step yields the most tokens a second. `rows` and `before`, its tokens and seconds: without them; `guess`:
    seconds for each, `begin`: and for the first of each sequence."""
    end, taken, kept, given = rows + sum(most), list[tuple[int, float]](), 0, [0] * len(chances)
    (tokens, seconds), plain = before, step.at(rows)
    best = before
    queue = [(-first, i) for i, (first, _) in enumerate(chances) if most[i] > 0]
    heapify(queue)
    while queue:
        chance, i = heappop(queue)
        once = 0.0 if given[i] else begin
        # What yields fewer tokens a second than the best so far only brings its rate down, however much of it there is.
        if -chance * best[1] < best[0] * (step.further(rows, end - rows) + guess + once):
            if once:
                continue  # one that has begun may be worth it, though it is less likely
            break
        rows, larger = rows + 1, step.at(rows + 1)
        tokens, seconds = tokens - chance, seconds + max(0.0, larger - plain) + guess + once
        plain = larger
        taken.append((i, -chance))
        given[i] += 1
        if tokens * best[1] >= best[0] * seconds:
            best, kept = (tokens, seconds), len(taken)
        if given[i] < most[i]:
            heappush(queue, (chance * chances[i][1], i))
    return DraftWorth(taken[:kept], *best)


def allot(chances: Seq[Chances], most: Seq[int], rows: int, step: Line, drafting: Drafting, beside: Beside = NOTHING_BESIDE) -> list[int]:
    """How many guesses each sequence gets, the likeliest first. `most` of each; `rows` that the step has without guesses."""
    plain, guess = step.at(rows), drafting.guess + beside.guess
    worth = _worth(chances, most, rows, step, (float(rows), plain + beside.step + drafting.begin * len(chances)), guess)
    counts, gains = [0] * len(chances), [0.0] * len(chances)
    for i, chance in worth.guesses:
        counts[i], gains[i] = counts[i] + 1, gains[i] + chance
    if drafting.begin > 0:
        guesses = len(worth.guesses)
        row = (step.at(rows + guesses) - plain) / guesses if guesses else 0.0
        costs = [drafting.begin + count * (row + guess) for count in counts]
        _drop_losers(counts, gains, costs, worth.tokens, worth.seconds - drafting.begin * counts.count(0))
    return counts


class OtherGuess(NamedTuple):
    """Guesses of sequence number `of` that begin with another token than its first ones. Nothing has to be drafted for them."""

    of: int
    chances: Chances
    most: int


def allot_others(
    others: Seq[OtherGuess],
    chances: Seq[Chances],
    counts: Seq[int],
    rows: int,
    step: Line,
    drafting: Drafting,
    begin: float,
    beside: Beside = NOTHING_BESIDE,
) -> list[int]:
    """How many guesses each of `others` gets beside the `counts` that `allot` has found, the likeliest first. `begin`: seconds for the
    first of each."""
    expected = rows + sum(first * sum(further**i for i in range(count)) for (first, further), count in zip(chances, counts, strict=True))
    rows += sum(counts)
    seconds = step.at(rows) + beside.step + sum(drafting.begin + count * (drafting.guess + beside.guess) for count in counts if count)
    most = [other.most if counts[other.of] else 0 for other in others]
    found = [0] * len(others)
    for k, _ in _worth([other.chances for other in others], most, rows, step, (expected, seconds), beside.guess, begin).guesses:
        found[k] += 1
    return found


def _drop_losers(counts: list[int], gains: Seq[float], costs: Seq[float], expected: float, seconds: float) -> None:
    """Takes the guesses away from sequences without which the step yields more tokens a second, for asking costs, too."""
    for i in sorted((i for i, count in enumerate(counts) if count), key=lambda i: gains[i] / costs[i]):
        if gains[i] * seconds >= expected * costs[i]:
            break
        counts[i], expected, seconds = 0, expected - gains[i], seconds - costs[i]
