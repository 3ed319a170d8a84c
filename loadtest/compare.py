"""Arms against each other: the same requests at the same rates on the same cores, in an order in which drift affects all of them alike.

for each seed                      the arms in order, then in reverse order, in turn (A B B A): a machine that slows down slows both
  for each arm                     its cluster is started
    for each rate                  a run of the sweep
    the first seed                 goes lower while no rate holds (and higher while none fails, if nobody gave the rates), and bisects
                                   between the largest rate that holds the attainment and the smallest that does not, as long as its
                                   time lasts; thereby it chooses the arm's rate. If its runs are void, the next seed does so
    every other seed               judges the arm at that rate (`results.Best` says why)
"""

import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from loadtest.campaign import Arm, Probe

ATTAINMENT = 0.9
BISECTIONS = 3
LOWER, HIGHER = 3, 2  # times that the rate is halved or doubled to find one that holds, or fails

Measure = Callable[[float, str], Awaitable[Probe]]  # rate, why


def abba(arms: Sequence[Arm], seeds: Sequence[int]) -> Iterator[tuple[int, Arm]]:
    """(seed, arm) in the order of measurement."""
    for turn, seed in enumerate(seeds):
        for arm in arms if turn % 2 == 0 else reversed(arms):
            yield seed, arm


@dataclass(frozen=True, slots=True)
class Capacity:
    """Where an arm's goodput ends. `holds`: the largest rate that was seen to hold; `fails`: the smallest rate above it that failed."""

    holds: float | None
    fails: float | None


def capacity(attained: Sequence[tuple[float, float | None]], attainment: float = ATTAINMENT) -> Capacity:
    """Judges (rate, attainment) pairs. A rate that holds above one that does not is luck: what counts is the first failure from below."""
    holds: float | None = None
    for rate, share in sorted(attained):
        if share is None:
            continue
        if share < attainment:
            return Capacity(holds, rate)
        holds = rate
    return Capacity(holds, None)


def next_rate(known: Capacity) -> float | None:
    """Where to look next: the geometric mean of the two rates. None if no rate failed, or if the lowest rate already failed."""
    if known.holds is None or known.fails is None:
        return None
    return math.sqrt(known.holds * known.fails)


async def pilot_arm(
    rates: Sequence[float],
    measure: Measure,
    attained: Callable[[Probe], float | None],
    bisections: int = BISECTIONS,
    higher: int = 0,
    affords: Callable[[float], bool] = lambda rate: True,
) -> float | None:
    """Runs the sweep, goes lower while no rate holds, and up to `higher` times higher while none fails, and then bisects. Returns the rate
    to judge: the largest that holds the attainment, or the lowest if none does. None: no run counts, so another seed has to choose.
    `affords`: whether there is time for a run at a rate that is not of the sweep."""
    probes = await _sweep(rates, measure, attained)
    for _ in range(LOWER):
        known = _capacity(probes, attained)
        lower = min(probe.rate for probe in probes) / 2
        if known.holds is None and known.fails is not None and not probes[-1].partial and affords(lower):
            probes.append(await measure(lower, "lower"))
    for _ in range(higher):
        known = _capacity(probes, attained)
        doubled = max(probe.rate for probe in probes) * 2
        if known.holds is not None and known.fails is None and not probes[-1].partial and affords(doubled):
            probes.append(await measure(doubled, "higher"))
    for _ in range(bisections):
        between = next_rate(_capacity(probes, attained))
        if between is None or probes[-1].partial or not affords(between):
            break
        probes.append(await measure(between, "bisection"))
    known = _capacity(probes, attained)
    if known.holds is None and known.fails is not None:
        return min(probe.rate for probe in probes)
    return known.holds


async def judge_arm(rates: Sequence[float], chosen: float | None, measure: Measure, attained: Callable[[Probe], float | None]) -> None:
    """Runs the sweep, and then the rate that the pilot chose, unless the sweep ran it."""
    probes = await _sweep(rates, measure, attained)
    if chosen is not None and chosen not in {probe.rate for probe in probes} and not probes[-1].partial:
        await measure(chosen, "judge")


async def _sweep(rates: Sequence[float], measure: Measure, attained: Callable[[Probe], float | None]) -> list[Probe]:
    """Goes from the lowest rate up. It ends once two rates have failed: at higher rates every request would time out, which takes long and
    shows nothing new."""
    probes: list[Probe] = []
    failed = 0
    for rate in sorted(rates):
        probe = await measure(rate, "sweep")
        probes.append(probe)
        share = attained(probe)
        failed += share is not None and share < ATTAINMENT
        if probe.partial or failed > 1:
            break
    return probes


def _capacity(probes: Sequence[Probe], attained: Callable[[Probe], float | None]) -> Capacity:
    return capacity([(probe.rate, attained(probe)) for probe in probes])
