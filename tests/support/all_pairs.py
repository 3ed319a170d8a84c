"""Fewer cases than a product of parameters: every pair of values of two parameters occurs, most triples do not."""

import os
from collections import Counter
from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

EVERY_CASE = "EVERY_CASE"  # set in the environment: the whole product


def all_pairs(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Cases, one value of each axis, that cover each pair of values of any two axes. The same cases each time."""
    values = [list(axis) for axis in axes]
    if os.environ.get(EVERY_CASE):
        return list(product(*values))
    # An item is (axis, place in it): values need no hash.
    wanted = {
        ((a, i), (b, j)): None
        for a, b in combinations(range(len(values)), 2)
        for i, j in product(range(len(values[a])), range(len(values[b])))
    }
    used: Counter[tuple[int, int]] = Counter()

    def merit(item: tuple[int, int], chosen: list[tuple[int, int]]) -> tuple[int, int]:
        """How many wanted pairs it makes with those chosen, and how seldom it was taken."""
        return sum(tuple(sorted((item, other))) in wanted for other in chosen), -used[item]

    cases = []
    while wanted:
        chosen = list(next(iter(wanted)))
        for axis in sorted(set(range(len(values))) - {axis for axis, _ in chosen}):
            chosen.append(max(((axis, place) for place in range(len(values[axis]))), key=lambda item: merit(item, chosen)))
        chosen.sort()
        for pair in combinations(chosen, 2):
            wanted.pop(pair, None)
        used.update(chosen)
        cases.append(tuple(values[axis][place] for axis, place in chosen))
    return cases
