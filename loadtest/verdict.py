"""What a campaign shows, in numbers and then in words. Pure: the same records give the same verdict.

    by_variant   one campaign for each point of a varied parameter
    Results      a campaign of one variant with every run summarised, once
    best         an arm's largest goodput at 90 % attainment, for each seed
    versus       one arm's best against another's
    crossovers   where one arm overtakes another as the rate grows
    verdict      all of it, and the sentences a report begins with

Runs that are void or ended early are left out of everything but the list of runs.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from loadtest.campaign import Campaign, Probe
from loadtest.compare import ATTAINMENT, capacity
from loadtest.estimate import Estimate, mean_and_interval
from loadtest.record import Record
from loadtest.slo import Miss
from loadtest.summary import Summary


def by_variant(campaign: Campaign) -> dict[str, Campaign]:
    """Variant -> the campaign with its probes and the arms that ran it only, in the order in which the variants first ran."""
    names = dict.fromkeys(probe.variant for probe in campaign.probes)
    if len(names) < 2:
        return {next(iter(names), ""): campaign}
    parts = {name: tuple(probe for probe in campaign.probes if probe.variant == name) for name in names}
    ran = {name: {probe.arm for probe in probes} for name, probes in parts.items()}
    return {
        name: replace(campaign, probes=probes, arms=tuple(arm for arm in campaign.arms if arm.name in ran[name]))
        for name, probes in parts.items()
    }


@dataclass(frozen=True, slots=True)
class Run:
    """A probe and what it came to."""

    probe: Probe
    summary: Summary

    @property
    def flaw(self) -> str:
        """Why it proves nothing, "" when it counts. A run that ended early misses the requests that it would have failed."""
        return self.summary.void or (f"ended early: {self.probe.partial}" if self.probe.partial else "")


@dataclass(frozen=True, slots=True)
class Point:
    """The runs of one arm at one rate that count: one for each seed."""

    arm: str
    rate: float
    runs: tuple[Run, ...]

    def estimate(self, number: Callable[[Summary], float | None]) -> Estimate:
        """Over the seeds, of those runs where the number exists."""
        return mean_and_interval([value for run in self.runs if (value := number(run.summary)) is not None])

    @property
    def goodput(self) -> Estimate:
        return self.estimate(lambda summary: summary.goodput)

    @property
    def attainment(self) -> float:
        return 1 - self.misses.total() / self.requests

    @property
    def requests(self) -> int:
        return sum(run.summary.requests for run in self.runs)

    @property
    def misses(self) -> Counter[Miss]:
        return sum((Counter(run.summary.misses) for run in self.runs), Counter())


@dataclass(frozen=True, slots=True)
class Results:
    campaign: Campaign
    runs: tuple[Run, ...]  # in the order in which they ran

    @classmethod
    def of(cls, campaign: Campaign) -> Self:
        """Raises ValueError: several variants (see `by_variant`), or a run that is shorter than warm-up and cool-down."""
        if len({probe.variant for probe in campaign.probes}) > 1:
            raise ValueError("results are of one variant; split the campaign by_variant")
        return cls(campaign, tuple(Run(probe, campaign.summary(probe)) for probe in campaign.probes))

    @property
    def arms(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([arm.name for arm in self.campaign.arms] + [run.probe.arm for run in self.runs]))

    def sound(self, arm: str) -> list[Run]:
        return [run for run in self.runs if run.probe.arm == arm and not run.flaw]

    def points(self, arm: str) -> list[Point]:
        """By rate, from the lowest."""
        runs = sorted(self.sound(arm), key=lambda run: run.probe.rate)
        return [Point(arm, rate, tuple(same)) for rate, same in itertools.groupby(runs, key=lambda run: run.probe.rate)]

    def sweep(self, arm: str) -> list[Point]:
        """Without the rates that only a bisection visited: each seed has its own, so they are no part of a curve."""
        return [point for point in self.points(arm) if any(run.probe.why == "sweep" for run in point.runs)]

    def records(self, point: Point) -> list[Record]:
        """Of all its seeds, due in the window."""
        return [record for run in point.runs for record in self.campaign.window(run.probe).select(run.probe.records)]

    def at(self, rate: float) -> dict[str, Point]:
        """Arm -> its point there; arms without one are left out."""
        return {point.arm: point for arm in self.arms for point in self.points(arm) if point.rate == rate}

    @property
    def knee(self) -> float | None:
        """Where arms are looked at closely: of the rates that most arms ran, nearest to the first arm's best. None: no run counts."""
        ran = Counter(point.rate for arm in self.arms for point in self.points(arm))
        if not ran:
            return None
        wanted = best(self, self.arms[0]).rate
        return min(ran, key=lambda rate: (-ran[rate], rate if wanted is None else abs(rate - wanted)))


# Numbers


@dataclass(frozen=True, slots=True)
class Best:
    """An arm's largest goodput at rates that hold the attainment, requests/s."""

    goodputs: Mapping[int, float]  # seed -> it; 0 where no rate held
    rates: Mapping[int, float]  # seed -> where that was
    ended: bool  # every seed saw a higher rate fail; else the arm can do more than was asked of it

    @property
    def goodput(self) -> Estimate:
        return mean_and_interval(list(self.goodputs.values()))

    @property
    def rate(self) -> float | None:
        """Mean over the seeds. None: no rate held."""
        return mean_and_interval(list(self.rates.values())).mean


def best(results: Results, arm: str) -> Best:
    """For each seed alone, since each has its own bisection. A rate that holds above one that failed is luck (`compare.capacity`)."""
    goodputs, rates, ended = {}, {}, True
    for seed in sorted({run.probe.seed for run in results.sound(arm)}):
        runs = [run for run in results.sound(arm) if run.probe.seed == seed]
        known = capacity([(run.probe.rate, run.summary.attainment) for run in runs])
        held = [run for run in runs if known.holds is not None and run.probe.rate <= known.holds]
        top = max(held, key=lambda run: run.summary.goodput or 0.0, default=None)
        goodputs[seed] = (top.summary.goodput or 0.0) if top else 0.0
        ended &= known.fails is not None
        if top:
            rates[seed] = top.probe.rate
    return Best(goodputs, rates, ended)


@dataclass(frozen=True, slots=True)
class Comparison:
    """`ahead` has the larger best. `factor` with its 95 % interval: None where a seed has no goodput, or only one seed ran both."""

    ahead: str
    behind: str
    factor: float | None
    low: float | None
    high: float | None
    beyond_spread: bool | None  # None: one seed tells no spread


def versus(results: Results, ahead: str, behind: str) -> Comparison:
    """Seed by seed: with one seed both arms got the same requests at the same moments, which takes that chance out of the difference.

    The factor is the geometric mean of the seeds' ratios, its interval Student's on their logarithms.
    """
    a, b = best(results, ahead).goodputs, best(results, behind).goodputs
    pairs = [(a[seed], b[seed]) for seed in sorted(a.keys() & b.keys())]
    if not pairs:
        return Comparison(ahead, behind, None, None, None, None)
    if any(x <= 0 or y <= 0 for x, y in pairs):  # no ratio
        never = len(pairs) > 1 and all(x > 0 and y <= 0 for x, y in pairs)
        return Comparison(ahead, behind, None, None, None, True if never else _clear([x - y for x, y in pairs]))
    logs = [math.log(x / y) for x, y in pairs]
    found = mean_and_interval(logs)
    low, high = (None if end is None else math.exp(end) for end in (found.low, found.high))
    return Comparison(ahead, behind, math.exp(found.mean or 0.0), low, high, _clear(logs))


def _clear(differences: list[float]) -> bool | None:
    """Their interval leaves 0 out."""
    found = mean_and_interval(differences)
    return None if found.low is None or found.high is None else not found.low <= 0 <= found.high


@dataclass(frozen=True, slots=True)
class Crossover:
    rate: float
    below: str  # the arm that is ahead at lower rates
    above: str


def crossovers(results: Results, first: str, second: str) -> list[Crossover]:
    """Where the curves of mean goodput cross, by linear interpolation between the rates that both ran.

    A rate counts as led only where the difference leaves the spread (with one seed: where there is one), else every tie at low
    rates, where both serve all that is offered, would be a crossing.
    """
    mine, theirs = ({point.rate: point for point in results.sweep(arm)} for arm in (first, second))
    rates = sorted(mine.keys() & theirs.keys())
    gaps = [_paired(mine[rate], theirs[rate]) for rate in rates]
    led = [(i, math.copysign(1, _mean(gap))) for i, gap in enumerate(gaps) if _mean(gap) and _clear(gap) is not False]
    found = []
    for (i, before), (j, after) in itertools.pairwise(led):
        if before == after:
            continue
        k = max(k for k in range(i, j) if _mean(gaps[k]) * after <= 0)  # from here on the new leader leads
        here, there = _mean(gaps[k]), _mean(gaps[k + 1])
        rate = rates[k] + (rates[k + 1] - rates[k]) * here / (here - there)
        found.append(Crossover(rate, *((first, second) if before > 0 else (second, first))))
    return found


def _paired(one: Point, other: Point) -> list[float]:
    """Differences of goodput by seed; of the means where no seed ran both."""
    mine, theirs = ({run.probe.seed: run.summary.goodput or 0.0 for run in point.runs} for point in (one, other))
    return [mine[seed] - theirs[seed] for seed in mine.keys() & theirs.keys()] or [(one.goodput.mean or 0.0) - (other.goodput.mean or 0.0)]


def _mean(values: list[float]) -> float:
    return mean_and_interval(values).mean or 0.0


# Words


@dataclass(frozen=True, slots=True)
class Verdict:
    winner: str | None  # ahead of every other arm beyond the spread
    leader: str | None  # the largest best, whatever the spread. None: no arm has one
    bests: Mapping[str, Best]
    comparisons: tuple[Comparison, ...]  # of the leader with each other arm
    crossovers: tuple[Crossover, ...]
    sentences: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def verdict(campaign: Campaign) -> Verdict:
    """Of one variant. Raises ValueError as `Results.of`."""
    return verdict_of(Results.of(campaign))


def verdict_of(results: Results) -> Verdict:
    bests = {arm: best(results, arm) for arm in results.arms}
    leader = max(bests, key=lambda arm: bests[arm].goodput.mean or 0.0, default=None)
    if leader is None or not bests[leader].goodput.mean:
        return Verdict(None, None, bests, (), (), (*_nobody(results), *_left_out(results)))
    ran = [arm for arm in results.arms if results.sound(arm)]
    compared = tuple(versus(results, leader, arm) for arm in ran if arm != leader)
    crossed = tuple(crossing for pair in itertools.combinations(ran, 2) for crossing in crossovers(results, *pair))
    sentences = [_leads(leader, bests[leader], compared)]
    for comparison in compared:
        sentences += _against(comparison, bests) + _why(results, comparison, bests[leader])
    if compared:
        sentences += _crossed(results, ran, crossed)
    sentences += _left_out(results)
    winner = leader if compared and all(comparison.beyond_spread for comparison in compared) else None
    return Verdict(winner, leader, bests, compared, crossed, tuple(sentences))


def percent(share: float) -> str:
    return f"{100 * share:.3g} %" if share < 0.1 or share > 0.99 else f"{100 * share:.0f} %"


def with_interval(value: Estimate) -> str:
    if value.mean is None:
        return "none"
    if value.low is None or value.high is None:
        return f"{value.mean:.3g}"
    return f"{value.mean:.3g} ({value.low:.3g} to {value.high:.3g})"


def miss_text(miss: Miss) -> str:
    """As a legend or a sentence names it."""
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


def _leads(leader: str, top: Best, compared: tuple[Comparison, ...]) -> str:
    which = "the largest goodput" if compared else "a goodput"
    seeds = f"95 % interval over {top.goodput.count} seeds" if top.goodput.count > 1 else "one seed"
    more = "" if top.ended else " It still held at the highest rate tried, so it can do more than this."
    rate = f"offered {top.rate:.3g}" if top.rate else ""
    goodput = with_interval(top.goodput)
    return f"{leader} has {which} at {percent(ATTAINMENT)} attainment or more: {goodput} requests/s ({seeds}, {rate}).{more}"


def _against(comparison: Comparison, bests: Mapping[str, Best]) -> list[str]:
    ahead, behind = comparison.ahead, comparison.behind
    other = bests[behind]
    if not other.goodput.mean:
        return [f"{behind} never holds {percent(ATTAINMENT)} attainment, not even at the lowest rate tried."]
    if comparison.factor is None:
        factor = ", at some seed without any" if 0.0 in other.goodputs.values() else ""
    elif comparison.low is None:
        factor = f", a factor of {comparison.factor:.3g}"
    else:
        factor = f", a factor of {comparison.factor:.3g} (95 % interval {comparison.low:.3g} to {comparison.high:.3g}, seed by seed)"
    numbers = f"{behind} reaches {with_interval(other.goodput)} requests/s{factor}"
    match comparison.beyond_spread:
        case True:
            said = [f"{numbers}."]
        case False:
            said = [f"No difference beyond the spread between {ahead} and {behind}: {numbers}."]
        case None:
            said = [f"{numbers}; without two seeds that ran both, no spread is known, and this may be chance."]
    if not other.ended:
        said.append(f"{behind} still held at the highest rate tried: higher rates would tell more.")
    return said


def _why(results: Results, comparison: Comparison, top: Best) -> list[str]:
    """What kept the loser back: the commonest miss near the leader's best rate, where the loser no longer holds."""
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
            said.append(f"{arm} comes to {percent(top.attainment)} at best, at {top.rate:.3g} requests/s{reason}.")
    return said


def _left_out(results: Results) -> list[str]:
    flawed = sum(run.flaw != "" for run in results.runs)
    return [f"{flawed} of {len(results.runs)} runs are void or ended early and are left out."] if flawed else []
