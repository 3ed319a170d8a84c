"""A campaign with every run summarised once, by arm and rate. Void runs and runs that ended early appear only in the list of runs.

by_variant    one campaign for each point of a varied parameter
Results       a campaign of one variant
best          an arm at the rate that was chosen for it
"""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Self

from loadtest.campaign import Campaign, Probe
from loadtest.compare import ATTAINMENT, capacity
from loadtest.estimate import Estimate, mean_and_interval
from loadtest.record import Record
from loadtest.slo import Miss
from loadtest.summary import Summary


def by_variant(campaign: Campaign) -> dict[str, Campaign]:
    """Variant -> the campaign with only that variant's probes, in the order in which the variants first ran."""
    names = dict.fromkeys(probe.variant for probe in campaign.probes)
    if len(names) < 2:
        return {next(iter(names), ""): campaign}
    return {name: replace(campaign, probes=tuple(probe for probe in campaign.probes if probe.variant == name)) for name in names}


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """A probe and its summary."""

    probe: Probe
    summary: Summary

    @property
    def flaw(self) -> str:
        """Why the run proves nothing, "" if it counts. A run that ended early lacks the requests that it would have failed."""
        return self.summary.void or (f"ended early: {self.probe.partial}" if self.probe.partial else "")

    @property
    def goodput(self) -> float:
        """Requests/s. A campaign always has an SLO, so every run has one."""
        assert self.summary.goodput is not None
        return self.summary.goodput


@dataclass(frozen=True, slots=True)
class Point:
    """The runs of one arm at one rate that count: one for each seed."""

    arm: str
    rate: float
    runs: tuple[ProbeResult, ...]

    def estimate(self, number: Callable[[Summary], float | None]) -> Estimate:
        """The estimate over the seeds whose runs have the number."""
        return mean_and_interval([value for run in self.runs if (value := number(run.summary)) is not None])

    @property
    def goodput(self) -> Estimate:
        return mean_and_interval([run.goodput for run in self.runs])

    @property
    def attainment(self) -> float:
        """The share of all requests of its runs together, so a run with few counts little. A run that counts has at least one request."""
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
    runs: tuple[ProbeResult, ...]  # in the order in which they ran

    @classmethod
    def of(cls, campaign: Campaign) -> Self:
        """Raises ValueError for several variants (see `by_variant`), or a run that is shorter than warm-up and cool-down."""
        if len({probe.variant for probe in campaign.probes}) > 1:
            raise ValueError("results are of one variant; split the campaign by_variant")
        return cls(campaign, tuple(ProbeResult(probe, campaign.summary(probe)) for probe in campaign.probes))

    @property
    def arms(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([arm.name for arm in self.campaign.arms] + [run.probe.arm for run in self.runs]))

    def sound(self, arm: str) -> list[ProbeResult]:
        """The arm's runs that count."""
        return [run for run in self.runs if run.probe.arm == arm and not run.flaw]

    def void(self, arm: str) -> list[Point]:
        """The arm's runs that do not count, each as a point of its own, by rate: to be shown, and never to be judged by."""
        flawed = [run for run in self.runs if run.probe.arm == arm and run.flaw]
        return [Point(arm, run.probe.rate, (run,)) for run in sorted(flawed, key=lambda run: run.probe.rate)]

    def points(self, arm: str) -> list[Point]:
        """Points by rate, from the lowest."""
        runs = sorted(self.sound(arm), key=lambda run: run.probe.rate)
        return [Point(arm, rate, tuple(same)) for rate, same in itertools.groupby(runs, key=lambda run: run.probe.rate)]

    def sweep(self, arm: str) -> list[Point]:
        """The points without the rates that only a bisection visited: each arm has its own, so they are not part of a curve."""
        return [point for point in self.points(arm) if any(run.probe.why == "sweep" for run in point.runs)]

    def records(self, point: Point) -> list[Record]:
        """The records of all its seeds that were due in the window."""
        return [record for run in point.runs for record in self.campaign.window(run.probe).select(run.probe.records)]

    def at(self, rate: float) -> dict[str, Point]:
        """Arm -> its point at the rate; arms without one are left out."""
        return {point.arm: point for arm in self.arms for point in self.points(arm) if point.rate == rate}

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds in the order in which they first ran. The first is the campaign's pilot, which bisected."""
        return tuple(dict.fromkeys(run.probe.seed for run in self.runs))

    @property
    def knee(self) -> float | None:
        """The rate at which arms are examined closely: of the rates that the most arms ran, the nearest to the first arm's own.

        None: no run counts.
        """
        ran = Counter(point.rate for arm in self.arms for point in self.points(arm))
        if not ran:
            return None
        wanted = best(self, self.arms[0]).rate
        return min(ran, key=lambda rate: (-ran[rate], rate if wanted is None else abs(rate - wanted)))


@dataclass(frozen=True, slots=True)
class Best:
    """An arm's result at the rate that was chosen for it, or why there is none.

    The largest of several noisy numbers is too large on average (the winner's curse), and an arm that was tried at more rates would profit
    from that. So one seed, the pilot, chooses the rate and the other seeds judge the arm there (sample splitting: Cox, "A note on
    data-splitting for the evaluation of significance levels", Biometrika 1975). A single seed both chooses and judges. With one rate there
    is no choice, so every seed judges. If no run of the pilot shows what to choose, because they are void, the next seed chooses.
    """

    rate: float | None  # None: no rate held the attainment, or not judged
    goodputs: Mapping[int, float]  # judging seed -> requests/s; 0 where no rate held. Empty: not judged
    attainment: float | None  # of the judging seeds together, at `rate`
    ended: bool  # a higher rate was seen to fail; else the arm can do more than it was offered
    chosen_by: int | None  # the seed that chose the rate, unless it also judges
    unjudged: str = ""  # why nothing can be said about the arm: no sound run shows it. "": it was judged

    @property
    def goodput(self) -> Estimate:
        return mean_and_interval(list(self.goodputs.values()))


def best(results: Results, arm: str) -> Best:
    """A number that no sound run has is missing: it is never 0, and an arm without one is not judged."""
    sound, tried = results.sound(arm), [run for run in results.runs if run.probe.arm == arm]
    if not sound:
        return _not_judged(_nothing_sound(tried))
    points, lowest = results.points(arm), min(run.probe.rate for run in tried)
    if len(points) == 1:
        return _judge(points[0], lowest, ended=False, chosen_by=None)
    missing = ""
    for seed in results.seeds:
        own = [run for run in sound if run.probe.seed == seed]
        known = capacity([(run.probe.rate, run.summary.attainment) for run in own])
        if known.holds is None and known.fails != lowest:
            continue  # it shows neither a rate that holds nor that none does
        if known.holds is None:
            return _judge(points[0], lowest, ended=True, chosen_by=None)
        judges = [run for run in sound if run.probe.rate == known.holds and (run.probe.seed != seed or len(own) == len(sound))]
        if judges:
            chosen_by = seed if len(own) < len(sound) else None
            return _judge(Point(arm, known.holds, tuple(judges)), lowest, known.fails is not None, chosen_by)
        missing = missing or f"no sound run of another seed at {known.holds:.3g} requests/s, the rate that seed {seed} chose"
    return _not_judged(missing or f"no sound run at {lowest:.3g} requests/s, the lowest rate tried, and none that holds above it")


def _judge(point: Point, lowest: float, ended: bool, chosen_by: int | None) -> Best:
    """The arm by the runs of the point. They show that no rate holds only if it is the lowest one that was tried, and no seed chose it."""
    goodputs = {run.probe.seed: run.goodput for run in point.runs}
    if chosen_by is not None or point.attainment >= ATTAINMENT:
        return Best(point.rate, goodputs, point.attainment, ended, chosen_by)
    if point.rate > lowest:
        return _not_judged(f"no sound run below {point.rate:.3g} requests/s, where it does not hold")
    return Best(None, dict.fromkeys(goodputs, 0.0), None, True, None)


def _not_judged(why: str) -> Best:
    return Best(None, {}, None, False, None, why)


def _nothing_sound(tried: list[ProbeResult]) -> str:
    if not tried:
        return "it never ran"
    early = sum(not run.summary.void for run in tried)
    parts = [f"{len(tried) - early} void" if early < len(tried) else "", f"{early} ended early" if early else ""]
    return f"none of its {len(tried)} runs counts ({', '.join(filter(None, parts))})"
