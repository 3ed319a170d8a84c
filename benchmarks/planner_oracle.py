"""How the oracle of benchmarks/planner.py finds its sizes: it knows what comes, and the simulator tells it what each split makes of each
part of it.

`frontier` takes for each part, which was simulated alone, the split that is best at one price of a worker's time: for a sum over parts,
such choices are the ones that nothing beats (Everett, "Generalized Lagrange multiplier method", 1963). It leaves out what changing costs,
and queues that last from one part to the next. `neighbours` are the schedules that differ a little from one: the caller simulates them, and
goes on from what is better.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from baton.planner.capacity import PoolSizes

PRICES = tuple(2 ** (step / 4) for step in range(-16, 33))  # requests that met their objectives, that a worker must be worth in a part
Schedule = tuple[PoolSizes, ...]  # of each part


@dataclass(frozen=True, slots=True)
class Made:
    """What a split made of each part: requests that came in it and met the objectives, and seconds of workers."""

    met: tuple[int, ...]
    worker_s: float  # of a part

    @property
    def parts(self) -> int:
        return len(self.met)


def frontier(splits: Mapping[PoolSizes, Made], offered: int, enough: float) -> list[Schedule]:
    """Those that should meet the objectives for at least `enough` of the requests, with the most for a worker's time first; then the
    others, with the most that is met first."""
    parts = next(iter(splits.values())).parts
    found: dict[Schedule, tuple[float, float]] = {}
    for price in PRICES:
        schedule = tuple(max(splits, key=lambda size: splits[size].met[part] - price * size.total) for part in range(parts))
        met = sum(splits[size].met[part] for part, size in enumerate(schedule))
        found[schedule] = met / offered, met / sum(splits[size].worker_s for size in schedule)
    return sorted(found, key=lambda one: (True, found[one][1]) if found[one][0] >= enough else (False, found[one][0]), reverse=True)


def neighbours(schedule: Schedule, part: int, most: int) -> Iterator[Schedule]:
    """With one worker less or more in one part, or one that serves the other role."""
    size = schedule[part]
    for prefill, decode in ((-1, 0), (0, -1), (1, 0), (0, 1), (-1, 1), (1, -1)):
        other = PoolSizes(size.prefill + prefill, size.decode + decode)
        if min(other.prefill, other.decode) >= 1 and other.total <= most:
            yield (*schedule[:part], other, *schedule[part + 1 :])


def wanted(schedule: Schedule, part_s: float, now: float, ahead_s: float, most: int) -> PoolSizes:
    """Sizes to ask for: those of now, and whoever is needed more in a start's time starts. Who only changes the role changes it then."""

    def at(moment: float) -> PoolSizes:
        return schedule[min(int(max(0.0, moment) // part_s), len(schedule) - 1)]

    sizes, then = at(now), at(now + ahead_s)
    more = min(then.total, most) - sizes.total
    if more <= 0:
        return sizes
    prefill = min(more, max(0, then.prefill - sizes.prefill))
    return PoolSizes(sizes.prefill + prefill, sizes.decode + more - prefill)


def by_part(arrivals: Sequence[float], part_s: float, count: int) -> list[list[int]]:
    """The numbers of those that arrive in each part."""
    found: list[list[int]] = [[] for _ in range(count)]
    for number, at in enumerate(arrivals):
        found[min(int(at // part_s), count - 1)].append(number)
    return found
