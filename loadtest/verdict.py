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
from statistics import fmean
from typing import Any, Literal

from loadtest.advice import advice
from loadtest.campaign import Campaign
from loadtest.compare import ATTAINMENT
from loadtest.estimate import mean_and_interval, t_quantile
from loadtest.results import Best, Point, Results, best
from loadtest.words import miss_text, percent, with_interval

MISTAKES = 0.05  # how often a family of comparisons may contain a false one
FEW_SEEDS = 4  # fewer than these give an interval that says little
TELLING = 1.5  # "no difference" is a verdict only if a difference by this factor would have been seen
MOST_SEEDS = 40  # that anybody is advised to run


@dataclass(frozen=True, slots=True)
class Comparison:
    """`factor`: goodput of `ahead` over that of `behind`. None if no seed judged both or one had no goodput; its interval also if only one
    seed judged both."""

    ahead: str
    behind: str
    factor: float | None
    low: float | None
    high: float | None
    beyond_spread: bool | None  # whether `ahead` is ahead. None: fewer than two seeds judged both, so no spread is known
    family: int  # comparisons whose intervals hold together with 95 %

    @property
    def wide(self) -> bool:
        """Whether nothing is shown: neither that `ahead` is ahead, nor that the two differ by less than TELLING."""
        shown = self.low is not None and self.high is not None and self.low > 1 / TELLING and self.high < TELLING
        return self.beyond_spread is False and not shown


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
        return Comparison(ahead, behind, None, None, None, True if never else _above([x - y for x, y in pairs], family), family)
    logs = [math.log(x / y) for x, y in pairs]
    found = mean_and_interval(logs, 1 - MISTAKES / family)
    low, high = (None if end is None else math.exp(end) for end in (found.low, found.high))
    return Comparison(ahead, behind, math.exp(fmean(logs)), low, high, _above(logs, family), family)


def _above(differences: list[float], family: int) -> bool | None:
    """Whether their interval lies above 0. None: one difference has no interval."""
    found = mean_and_interval(differences, 1 - MISTAKES / family)
    return None if found.low is None else found.low > 0


def _clear(differences: list[float], family: int) -> bool | None:
    """Whether their interval excludes 0. None: one difference has no interval."""
    above = _above(differences, family)
    return None if above is None else above or _above([-difference for difference in differences], family)


def _leader(results: Results, bests: Mapping[str, Best], family: int) -> str | None:
    """The arm with the largest mean goodput among those that no other is ahead of beyond the spread; None: no arm has any.

    Arms may be judged by different seeds, where some runs are void, so the largest mean alone may be that of easier seeds.
    """
    pairs = itertools.permutations(bests, 2)
    beaten = {behind for ahead, behind in pairs if versus(results, ahead, behind, family).beyond_spread}
    means = {arm: mean for arm, found in bests.items() if (mean := found.goodput.mean)}
    return max([arm for arm in means if arm not in beaten] or means, key=means.__getitem__, default=None)


def _held(results: Results, arm: str) -> Point | None:
    """The arm's point with the largest goodput among those that hold the attainment, over all its runs that count."""
    points = [point for point in results.points(arm) if point.attainment >= ATTAINMENT]
    return max(points, key=lambda point: fmean(run.goodput for run in point.runs), default=None)


def _outruns(results: Results, arm: str, leader: Best) -> bool:
    """Whether runs that count show the arm with no less goodput than the leader has, although fewer were judged: its rate was chosen by a
    lucky or an unlucky run."""
    held, mean = _held(results, arm), leader.goodput.mean
    return held is not None and mean is not None and fmean(run.goodput for run in held.runs) >= mean


@dataclass(frozen=True, slots=True)
class Crossover:
    rate: float
    below: str  # the arm that is ahead at lower rates
    above: str


def all_crossovers(results: Results) -> list[Crossover]:
    """The crossovers of every pair of arms that have runs that count."""
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
    led = [(i, math.copysign(1, fmean(gap))) for i, gap in enumerate(gaps) if fmean(gap) and _clear(gap, family) is not False]
    for (i, before), (j, after) in itertools.pairwise(led):
        if before == after:
            continue
        k = max(k for k in range(i, j) if fmean(gaps[k]) * after <= 0)  # from here on the new leader leads
        here, there = fmean(gaps[k]), fmean(gaps[k + 1])
        yield places[k] + (places[k + 1] - places[k]) * here / (here - there), before > 0


def _paired(one: Point, other: Point) -> list[float]:
    """Differences in goodput by seed; the difference of the means if no seed ran both."""
    mine, theirs = ({run.probe.seed: run.goodput for run in point.runs} for point in (one, other))
    both = sorted(mine.keys() & theirs.keys())
    return [mine[seed] - theirs[seed] for seed in both] or [fmean(mine.values()) - fmean(theirs.values())]


# Words


Status = Literal["winner", "no difference", "one arm", "no verdict"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """`status`
    winner          one arm is ahead of every other beyond the spread
    no difference   every arm was judged, and the leader is not ahead of every other beyond a spread that would have shown it
    one arm         the only arm was judged
    no verdict      an arm was not judged, no arm holds the attainment, or the spread is unknown or too wide; `advice` says what to do
    """

    status: Status
    winner: str | None  # ahead of every other arm beyond the spread
    leader: str | None  # the largest goodput, whatever the spread. None: no arm that was judged has one
    bests: Mapping[str, Best]
    comparisons: tuple[Comparison, ...]  # of the leader with each other arm that was judged
    crossovers: tuple[Crossover, ...]
    sentences: tuple[str, ...]  # the advice is their end
    advice: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """`bests` says of each arm whether it was judged, and why not."""
        told = asdict(self)
        for arm, found in self.bests.items():
            told["bests"][arm]["status"] = "not judged" if found.unjudged else "judged"
        return told


def verdict(campaign: Campaign) -> Verdict:
    """The verdict on one variant. Raises ValueError as `Results.of` does."""
    return verdict_of(Results.of(campaign))


def verdict_of(results: Results, variants: int = 1) -> Verdict:
    """`variants`: how many the campaign has; together they are one family of comparisons."""
    bests = {arm: best(results, arm) for arm in results.arms}
    judged_ = {arm: found for arm, found in bests.items() if not found.unjudged}
    family = max(1, math.comb(len(judged_), 2) * variants)
    leader = _leader(results, judged_, family)
    if leader is None:
        said, told = _nobody(results, bests), tuple(advice(results, bests, spread=True))
        return Verdict("no verdict", None, None, bests, (), (), (*said, *_not_judged(bests), *_left_out(results), *told), told)
    compared = tuple(versus(results, leader, arm, family) for arm in judged_ if arm != leader)
    crossed = tuple(all_crossovers(results))
    doubted = [one.behind for one in compared if one.beyond_spread and _outruns(results, one.behind, bests[leader])]
    status = _status(bests, compared, doubted)
    wide = [seeds for one in compared if one.wide and (seeds := _seeds_to_tell(results, one)) is not None]
    told = tuple(advice(results, bests, all(one.beyond_spread is not None for one in compared), wide)) if status == "no verdict" else ()
    sentences = _leads(results, leader, bests, compared)
    for comparison in compared:
        sentences += _against(results, comparison, bests) + _why(results, comparison, bests[leader])
        sentences += _doubt(results, comparison) if comparison.behind in doubted else []
    if compared:
        sentences += _crossed(results, list(judged_), crossed)
    sentences = [*_headline(status, leader), *sentences, *_not_judged(bests), *_left_out(results), *told]
    return Verdict(status, leader if status == "winner" else None, leader, bests, compared, crossed, tuple(sentences), told)


def _status(bests: Mapping[str, Best], compared: Sequence[Comparison], doubted: Sequence[str]) -> Status:
    unknown = any(one.beyond_spread is None or one.wide for one in compared)
    if doubted or unknown or any(found.unjudged for found in bests.values()):
        return "no verdict"
    if not compared:
        return "one arm"
    return "winner" if all(one.beyond_spread for one in compared) else "no difference"


def _seeds_to_tell(results: Results, comparison: Comparison) -> int | None:
    """How many seeds must judge for an interval that shows a factor of TELLING, if the spread stays as it is. None: it is not known, or
    more than MOST_SEEDS."""
    if comparison.factor is None or comparison.high is None:
        return None
    confidence = 1 - MISTAKES / comparison.family
    n = len(best(results, comparison.ahead).goodputs.keys() & best(results, comparison.behind).goodputs.keys())
    spread = math.log(comparison.high / comparison.factor) * math.sqrt(n) / t_quantile(n - 1, confidence)
    enough = (m for m in range(n + 1, MOST_SEEDS + 1) if t_quantile(m - 1, confidence) * spread / math.sqrt(m) < math.log(TELLING))
    return next(enough, None)


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
    judged_ = {name: sum(not best(results, arm).unjudged for arm in results.arms) for name, results in parts.items()}
    if sum(arms > 1 for arms in judged_.values()) < 2:
        return [f"No crossover can be seen: at fewer than two values of {key} were two arms judged."]
    return found or [f"No crossover between {key} {values[0][0]:g} and {values[-1][0]:g}: no arm overtakes another beyond the spread."]


def judged(top: Best) -> str:
    """How the arm's rate was chosen, and what the other seeds attained there."""
    if top.unjudged:
        return f"not judged: {top.unjudged}"
    if top.rate is None:
        return "no rate held"
    if top.chosen_by is None:
        return f"offered {top.rate:.3g}"
    others = "" if top.attainment is None else f", where the other seeds attain {percent(top.attainment)}"
    return f"offered {top.rate:.3g}, chosen on seed {top.chosen_by}{others}"


def _headline(status: Status, leader: str) -> list[str]:
    match status:
        case "winner":
            return [f"Verdict: {leader} is ahead."]
        case "no difference":
            return ["Verdict: no arm is ahead of every other beyond the spread."]
        case "no verdict":
            return ["No verdict."]
        case _:
            return []


def _leads(results: Results, leader: str, bests: Mapping[str, Best], compared: tuple[Comparison, ...]) -> list[str]:
    top = bests[leader]
    largest = top.goodput.mean == max(mean for found in bests.values() if (mean := found.goodput.mean) is not None)
    which = "a goodput" if not compared else "the largest goodput" if largest else "the largest goodput seed by seed"
    n = top.goodput.count
    seeds = f"95 % interval over {n} seeds" if n > 1 else "one seed"
    more = "" if top.ended else f" {_still_held(results, leader, top, 'It')}, so it can do more than this."
    goodput = with_interval(top.goodput)
    said = [
        f"{leader} has {which} at the highest rate that holds {percent(ATTAINMENT)} attainment: {goodput} requests/s "
        f"({seeds}; {judged(top)}).{more}"
    ]
    if 1 < n < FEW_SEEDS:
        t = t_quantile(n - 1, 1 - MISTAKES)
        said.append(f"Only {n} seeds judge, so an interval is ± {t:.3g} standard errors wide and shows only large differences.")
    return said


def _still_held(results: Results, arm: str, top: Best, name: str) -> str:
    """A rate whose runs are void shows nothing: the highest rate that counts need not be the highest one tried."""
    tried = max(run.probe.rate for run in results.runs if run.probe.arm == arm)
    counts = "" if top.rate == tried else " that counts"
    return f"{name} still held at the highest rate{counts or ' tried'}"


def _against(results: Results, comparison: Comparison, bests: Mapping[str, Best]) -> list[str]:
    ahead, behind = comparison.ahead, comparison.behind
    other = bests[behind]
    if other.rate is None:
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
            if comparison.wide:
                said.append(f"That spread is too wide: it would hide a difference by a factor of {TELLING:g}.")
        case None:
            said = [f"{numbers}; without two seeds that judged both, no spread is known, and this may be chance."]
    if not other.ended:
        said.append(f"{_still_held(results, behind, other, behind)}: higher rates would show more.")
    return said


def _doubt(results: Results, comparison: Comparison) -> list[str]:
    point = _held(results, comparison.behind)
    assert point is not None, "only an arm with such a point is in doubt"
    return [
        f"But the runs of {comparison.behind} at {point.rate:.3g} requests/s hold {percent(point.attainment)} with "
        f"{with_interval(point.goodput)} requests/s, no less than {comparison.ahead}: the seed that chose its rate was not typical."
    ]


def _why(results: Results, comparison: Comparison, top: Best) -> list[str]:
    """What held the loser back: its commonest miss near the leader's rate, where the loser no longer holds."""
    failing = [point for point in results.points(comparison.behind) if point.attainment < ATTAINMENT]
    if comparison.beyond_spread is False or not failing:
        return []
    assert top.rate is not None, "the leader has goodput, so it has a rate"
    nearest = top.rate
    point = min(failing, key=lambda point: abs(point.rate - nearest))
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


def _nobody(results: Results, bests: Mapping[str, Best]) -> list[str]:
    points = {arm: some for arm in results.arms if (some := results.points(arm))}
    if not points:
        return ["No verdict: no run counts."]
    which = "No arm that was judged" if any(found.unjudged for found in bests.values()) else "No arm"
    said = [f"{which} holds {percent(ATTAINMENT)} attainment, not even at the lowest rate tried."]
    if all(found.unjudged for found in bests.values()):
        said = ["No verdict: no arm was judged."]
    for arm, some in points.items():
        top = max(some, key=lambda point: point.attainment)
        reason = "".join(f"; commonest miss: {miss_text(miss)}" for miss, _ in top.misses.most_common(1))
        said.append(f"{arm} reaches {percent(top.attainment)} at best, at {top.rate:.3g} requests/s{reason}.")
    return said


def _not_judged(bests: Mapping[str, Best]) -> list[str]:
    return [f"{arm} was not judged: {found.unjudged}." for arm, found in bests.items() if found.unjudged]


def _left_out(results: Results) -> list[str]:
    flawed = sum(run.flaw != "" for run in results.runs)
    return [f"{flawed} of {len(results.runs)} runs are void or ended early and are left out."] if flawed else []
