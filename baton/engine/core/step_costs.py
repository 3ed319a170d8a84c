"""How many guesses a step is worth, by what steps of several sizes took when they were measured. Pure: the table is an argument.

A step yields a token for each of its rows, and a guess that is accepted with chance p yields p more. So one more row is worth computing
while p, divided by what the row and its guess take, is no less than all tokens of the step divided by what the step takes: then it yields
more tokens a second with it than without (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023, section 3,
for a step that is bound by reading the weights). Where a step is bound by computing, a row takes its full share, and no guess is worth it.
"""

from bisect import bisect_left
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from heapq import heapify, heappop, heappush


@dataclass(frozen=True, slots=True)
class Line:
    """A function of a count, known at some. In between it is interpolated, and beyond the last two it goes on as between these."""

    points: tuple[tuple[int, float], ...]  # (count, seconds), by count, two or more

    def at(self, count: int) -> float:
        i = min(max(1, bisect_left(self.points, (count, 0.0))), len(self.points) - 1)
        (x0, y0), (x1, y1) = self.points[i - 1 : i + 1]
        return y0 + (y1 - y0) * (count - x0) / (x1 - x0)


ASSUMED = Line(((1, 1.0), (2, 1.15)))  # a row more costs 15 % of a step with one row: where nothing is measured


def allot(chances: Seq[float], most: Seq[int], rows: int, step: Line, drafting: float) -> list[int]:
    """How many guesses each sequence gets, the likeliest first. `chances`: that one is accepted if all before it are; `most` of each;
    `rows` that the step has without guesses; `drafting`: seconds for one guess of one sequence."""
    counts, expected, seconds = [0] * len(chances), float(rows), step.at(rows)
    queue = [(-chance, i) for i, chance in enumerate(chances) if most[i] > 0]
    heapify(queue)
    while queue:
        chance, i = heappop(queue)
        more = max(0.0, step.at(rows + 1) - step.at(rows)) + drafting
        if -chance * seconds < expected * more:
            break
        counts[i] += 1
        rows, expected, seconds = rows + 1, expected - chance, seconds + more
        if counts[i] < most[i]:
            heappush(queue, (chance * chances[i], i))
    return counts
