"""What a campaign shows, in numbers and then in words. Pure: the same records yield the same verdict.

    versus              one arm against another, each at the rate chosen for it
    crossovers          where one arm overtakes another as the rate grows
    varied_crossovers   where one arm overtakes another as the varied parameter grows
    verdict             all of it, and the sentences a report begins with

Every comparison of a family is made at a confidence of 1 - 0.05 / (comparisons in the family), so that all of its intervals together hold
with 95 % (Dunn, "Multiple comparisons among means", 1961). The family is all pairs of arms at all variants, not only those with the leader,
because the same data decide which arm leads.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from loadtest.campaign import Campaign
from loadtest.compare import ATTAINMENT
from loadtest.estimate import Estimate, mean_and_interval, t_quantile
from loadtest.results import Best, Point, Results, best
from loadtest.slo import Miss

MISTAKES = 0.05  # how often a family of comparisons may contain a false one
FEW_SEEDS = 4  # fewer than these give an interval that says little


@dataclass(frozen=True, slots=True)
class Comparison:
    """`ahead` has the larger goodput. `factor` is None if no seed judged both or one had no goodput; its interval also if only one did."""

    ahead: str
    behind: str
    factor: float | None
    low: float | None
    high: float | None
    beyond_spread: bool | None  # None: one seed shows no spread
    family: int  # comparisons whose intervals hold together with 95 %


def versus(results: Results, ahead: str, behind: str, family: int = 1) -> Comparison:
    """Compares seed by seed: with one seed both arms got the same requests, which removes that source of chance from the difference.

    The factor is the geometric mean of the seeds' ratios, its interval Student's on their logarithms.
    """
    a, b = best(results, ahead).goodputs, best(results, behind).goodputs
    pairs = [(a[seed], b[seed]) for seed in sorted(a.keys() & b.keys())]
    if not pairs:
        return Comparison(ahead, behind, None, None, None, None, family)
    if any(x <= 0 or y <= 0 for x, y in pairs):  # no ratio
        never = len(pairs) > 1 and all(x > 0 and y <= 0 for x, y in pairs)
        return Comparison(ahead, behind, None, None, None, True if never else _clear([x - y for x, y in pairs], family), family)
    logs = [math.log(x / y) for x, y in pairs]
    found = mean_and_interval(logs, 1 - MISTAKES / family)
    low, high = (None if end is None else math.exp(end) for end in (found.low, found.high))
    return Comparison(ahead, behind, math.exp(found.mean or 0.0), low, high, _clear(logs, family), family)


def _clear(differences: list[float], family: int) -> bool | None:
    """Whether their interval excludes 0. None: one difference has no interval."""
    found = mean_and_interval(differences, 1 - MISTAKES / family)
    return None if found.low is None or found.high is None else not found.low <= 0 <= found.high


@dataclass(frozen=True, slots=True)
class Crossover:
    rate: float
    below: str  # the arm that is ahead at lower rates
    above: str


def all_crossovers(results: Results) -> list[Crossover]:
    """The crossovers of every pair of arms that ran."""
    pairs = list(itertools.combinations([arm for arm in results.arms if results.sound(arm)], 2))
    return [crossing for pair in pairs for crossing in crossovers(results, *pair, len(pairs))]


def crossovers(results: Results, first: str, second: str, pairs: int = 1) -> list[Crossover]:
    """Where the curves of mean goodput cross, by linear interpolation between the rates that both ran."""
    mine, theirs = ({point.rate: point for point in results.sweep(arm)} for arm in (first, second))
    rates = sorted(mine.keys() & theirs.keys())
    gaps = [_paired(mine[rate], theirs[rate]) for rate in rates]
    found = _crossings(rates, gaps, pairs * len(rates))
    return [Crossover(rate, *((first, second) if first_led else (second, first))) for rate, first_led in found]


@dataclass(frozen=True, slots=True)
class VariedCrossover:
    """A crossover between `low` and `high`, the nearest values that were measured; `value` is a linear interpolation."""

    parameter: str
    value: float
    low: float
    high: float
    below: str  # the arm that is ahead at smaller values
    above: str


def varied_crossovers(parts: Mapping[str, Results]) -> list[VariedCrossover]:
    """The crossovers of every pair of arms, over the variants ("input=32", ...) of a campaign that varies one numeric parameter.

    The arms are compared by (a - b) / (a + b), which does not depend on how fast a variant is.
    """
    values = numeric(list(parts))
    if len(values) < 2:
        return []
    arms = list(dict.fromkeys(arm for results in parts.values() for arm in results.arms))
    pairs = list(itertools.combinations(arms, 2))
    found = []
    for first, second in pairs:
        here = [(value, gap) for value, name in values if (gap := _relative(parts[name], first, second))]
        places = [value for value, _ in here]
        for value, first_led in _crossings(places, [gap for _, gap in here], len(pairs) * len(values)):
            low = max(place for place in places if place <= value)
            high = min(place for place in places if place >= value)
            parameter = next(iter(parts)).partition("=")[0]
            found.append(VariedCrossover(parameter, value, low, high, *((first, second) if first_led else (second, first))))
    return found


def numeric(variants: Sequence[str]) -> list[tuple[float, str]]:
    """(value, variant), smallest value first; empty if the variants vary several parameters, or one that is not a number."""
    split = [variant.partition("=") for variant in variants]
    if len({key for key, _, _ in split}) != 1:
        return []
    try:
        return sorted((float(value), variant) for (_, _, value), variant in zip(split, variants, strict=True))
    except ValueError:
        return []


def _relative(results: Results, first: str, second: str) -> list[float]:
    a, b = (best(results, arm).goodputs if arm in results.arms else {} for arm in (first, second))
    return [(a[seed] - b[seed]) / (a[seed] + b[seed]) if a[seed] + b[seed] else 0.0 for seed in sorted(a.keys() & b.keys())]


def _crossings(places: Sequence[float], gaps: Sequence[list[float]], family: int) -> Iterator[tuple[float, bool]]:
    """(place, whether the first arm led before it) of each change of the lead. `gaps`: the first arm's advantage by seed.

    An arm leads only where the difference exceeds the spread (with one seed: where there is a difference). Otherwise every tie at low
    rates, where both serve all that is offered, would be a crossing.
    """
    led = [(i, math.copysign(1, _mean(gap))) for i, gap in enumerate(gaps) if _mean(gap) and _clear(gap, family) is not False]
    for (i, before), (j, after) in itertools.pairwise(led):
        if before == after:
            continue
        k = max(k for k in range(i, j) if _mean(gaps[k]) * after <= 0)  # from here on the new leader leads
        here, there = _mean(gaps[k]), _mean(gaps[k + 1])
        yield places[k] + (places[k + 1] - places[k]) * here / (here - there), before > 0


def _paired(one: Point, other: Point) -> list[float]:
    """Differences in goodput by seed; the difference of the means if no seed ran both."""
    mine, theirs = ({run.probe.seed: run.summary.goodput or 0.0 for run in point.runs} for point in (one, other))
    return [mine[seed] - theirs[seed] for seed in mine.keys() & theirs.keys()] or [(one.goodput.mean or 0.0) - (other.goodput.mean or 0.0)]


def _mean(values: list[float]) -> float:
    return mean_and_interval(values).mean or 0.0


# Words


@dataclass(frozen=True, slots=True)
class Verdict:
    winner: str | None  # ahead of every other arm beyond the spread
    leader: str | None  # the largest goodput, whatever the spread. None: no arm has one
    bests: Mapping[str, Best]
    comparisons: tuple[Comparison, ...]  # of the leader with each other arm
    crossovers: tuple[Crossover, ...]
    sentences: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def verdict(campaign: Campaign) -> Verdict:
    """The verdict on one variant. Raises ValueError as `Results.of` does."""
    return verdict_of(Results.of(campaign))


def verdict_of(results: Results, variants: int = 1) -> Verdict:
    """`variants`: how many the campaign has; together they are one family of comparisons."""
    bests = {arm: best(results, arm) for arm in results.arms}
    leader = max(bests, key=lambda arm: bests[arm].goodput.mean or 0.0, default=None)
    if leader is None or not bests[leader].goodput.mean:
        return Verdict(None, None, bests, (), (), (*_nobody(results), *_left_out(results)))
    ran = [arm for arm in results.arms if results.sound(arm)]
    family = max(1, math.comb(len(ran), 2) * variants)
    compared = tuple(versus(results, leader, arm, family) for arm in ran if arm != leader)
    crossed = tuple(all_crossovers(results))
    sentences = _leads(leader, bests[leader], compared)
    for comparison in compared:
        sentences += _against(comparison, bests) + _why(results, comparison, bests[leader])
    if compared:
        sentences += _crossed(results, ran, crossed)
    sentences += _left_out(results)
    winner = leader if compared and all(comparison.beyond_spread for comparison in compared) else None
    return Verdict(winner, leader, bests, compared, crossed, tuple(sentences))


def over_variants(parts: Mapping[str, Results]) -> list[str]:
    """Sentences about the varied parameter; none if nothing numeric was varied."""
    values = numeric(list(parts))
    if len(values) < 2:
        return []
    found = [
        f"Crossover: {one.above} overtakes {one.below} between {one.parameter} {one.low:g} and {one.high:g}, "
        f"at about {one.value:.3g} by linear interpolation."
        for one in varied_crossovers(parts)
    ]
    key = next(iter(parts)).partition("=")[0]
    return found or [f"No crossover between {key} {values[0][0]:g} and {values[-1][0]:g}: no arm overtakes another beyond the spread."]


def percent(share: float) -> str:
    return f"{100 * share:.3g} %" if share < 0.1 or share > 0.99 else f"{100 * share:.0f} %"


def with_interval(value: Estimate) -> str:
    if value.mean is None:
        return "none"
    if value.low is None or value.high is None:
        return f"{value.mean:.3g}"
    return f"{value.mean:.3g} ({value.low:.3g} to {value.high:.3g})"


def miss_text(miss: Miss) -> str:
    """The miss in words, for a legend or a sentence."""
    where = miss.where.replace("_", " ")
    match miss.what:
        case "ttft":
            return f"TTFT too long, mostly {where}"
        case "tpot" | "itl_p99":
            return f"{'TPOT' if miss.what == 'tpot' else 'ITL P99'} too long, from {where}"
        case "short":
            return "fewer tokens than asked for"
        case what:
            return f"{what}: {miss.where}"


def judged(top: Best) -> str:
    """How the arm's rate was chosen, and what the other seeds attained there."""
    if top.rate is None:
        return "no rate held"
    if top.chosen_by is None:
        return f"offered {top.rate:.3g}"
    others = "" if top.attainment is None else f", where the other seeds attain {percent(top.attainment)}"
    return f"offered {top.rate:.3g}, chosen on seed {top.chosen_by}{others}"


def _leads(leader: str, top: Best, compared: tuple[Comparison, ...]) -> list[str]:
    which = "the largest goodput" if compared else "a goodput"
    n = top.goodput.count
    seeds = f"95 % interval over {n} seeds" if n > 1 else "one seed"
    more = "" if top.ended else " It still held at the highest rate tried, so it can do more than this."
    goodput = with_interval(top.goodput)
    said = [
        f"{leader} has {which} at the highest rate that holds {percent(ATTAINMENT)} attainment: {goodput} requests/s "
        f"({seeds}; {judged(top)}).{more}"
    ]
    if 1 < n < FEW_SEEDS:
        t = t_quantile(n - 1, 1 - MISTAKES)
        said.append(f"Only {n} seeds judge, so an interval is ± {t:.3g} standard errors wide and shows only large differences.")
    return said


def _against(comparison: Comparison, bests: Mapping[str, Best]) -> list[str]:
    ahead, behind = comparison.ahead, comparison.behind
    other = bests[behind]
    if not other.goodput.mean:
        return [f"{behind} never holds {percent(ATTAINMENT)} attainment, not even at the lowest rate tried."]
    together = f", {comparison.family} comparisons together" if comparison.family > 1 else ""
    if comparison.factor is None:
        factor = ", none at some seed" if 0.0 in other.goodputs.values() else ""
    elif comparison.low is None:
        factor = f", a factor of {comparison.factor:.3g}"
    else:
        interval = f"95 % interval {comparison.low:.3g} to {comparison.high:.3g}, seed by seed{together}"
        factor = f", a factor of {comparison.factor:.3g} ({interval})"
    numbers = f"{behind} reaches {with_interval(other.goodput)} requests/s ({judged(other)}){factor}"
    match comparison.beyond_spread:
        case True:
            said = [f"{numbers}."]
        case False:
            said = [f"No difference beyond the spread between {ahead} and {behind}: {numbers}."]
        case None:
            said = [f"{numbers}; without two seeds that judged both, no spread is known, and this may be chance."]
    if not other.ended:
        said.append(f"{behind} still held at the highest rate tried: higher rates would show more.")
    return said


def _why(results: Results, comparison: Comparison, top: Best) -> list[str]:
    """What held the loser back: its commonest miss near the leader's rate, where the loser no longer holds."""
    failing = [point for point in results.points(comparison.behind) if point.attainment < ATTAINMENT]
    if comparison.beyond_spread is False or not failing:
        return []
    point = min(failing, key=lambda point: abs(point.rate - (top.rate or 0.0)))
    [(miss, count)] = point.misses.most_common(1)
    missed = point.misses.total()
    how_often = "all of them" if count == missed else f"most often ({percent(count / missed)} of these)"
    return [
        f"Why: at {point.rate:.3g} requests/s {comparison.behind} missed the SLO on {percent(missed / point.requests)} of its requests, "
        f"{how_often} because of: {miss_text(miss)}."
    ]


def _crossed(results: Results, ran: list[str], crossed: tuple[Crossover, ...]) -> list[str]:
    if crossed:
        chance = "" if any(len(point.runs) > 1 for arm in ran for point in results.sweep(arm)) else "; with one seed, this may be chance"
        return [f"Crossover: {found.above} overtakes {found.below} at {found.rate:.3g} requests/s{chance}." for found in crossed]
    common = set.intersection(*({point.rate for point in results.sweep(arm)} for arm in ran))
    if len(common) < 2:
        return ["Fewer than two rates were run by all arms, so no crossover can be seen."]
    return [f"No crossover between {min(common):.3g} and {max(common):.3g} requests/s: no arm overtakes another."]


def _nobody(results: Results) -> list[str]:
    points = [point for arm in results.arms for point in results.points(arm)]
    if not points:
        return ["Nothing can be said: no run counts."]
    said = [f"No arm holds {percent(ATTAINMENT)} attainment, not even at the lowest rate tried."]
    for arm in results.arms:
        top = max(results.points(arm), key=lambda point: point.attainment, default=None)
        if top:
            reason = "".join(f"; commonest miss: {miss_text(miss)}" for miss, _ in top.misses.most_common(1))
            said.append(f"{arm} reaches {percent(top.attainment)} at best, at {top.rate:.3g} requests/s{reason}.")
    return said


def _left_out(results: Results) -> list[str]:
    flawed = sum(run.flaw != "" for run in results.runs)
    return [f"{flawed} of {len(results.runs)} runs are void or ended early and are left out."] if flawed else []
