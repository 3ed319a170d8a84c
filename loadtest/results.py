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
from loadtest.compare import capacity
from loadtest.estimate import Estimate, mean_and_interval
from loadtest.record import Record
from loadtest.slo import Miss
from loadtest.summary import Summary


def by_variant(campaign: Campaign) -> dict[str, Campaign]:
    """Variant -> the campaign with only that variant's probes and arms, in the order in which the variants first ran."""
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
    """A probe and its summary."""

    probe: Probe
    summary: Summary

    @property
    def flaw(self) -> str:
        """Why the run proves nothing, "" if it counts. A run that ended early lacks the requests that it would have failed."""
        return self.summary.void or (f"ended early: {self.probe.partial}" if self.probe.partial else "")


@dataclass(frozen=True, slots=True)
class Point:
    """The runs of one arm at one rate that count: one for each seed."""

    arm: str
    rate: float
    runs: tuple[Run, ...]

    def estimate(self, number: Callable[[Summary], float | None]) -> Estimate:
        """Over the seeds whose runs have the number."""
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
        """Raises ValueError for several variants (see `by_variant`), or a run that is shorter than warm-up and cool-down."""
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
        """The points without the rates that only a bisection visited: each arm has its own, so they are not part of a curve."""
        return [point for point in self.points(arm) if any(run.probe.why == "sweep" for run in point.runs)]

    def records(self, point: Point) -> list[Record]:
        """The records of all its seeds that were due in the window."""
        return [record for run in point.runs for record in self.campaign.window(run.probe).select(run.probe.records)]

    def at(self, rate: float) -> dict[str, Point]:
        """Arm -> its point at the rate; arms without one are left out."""
        return {point.arm: point for arm in self.arms for point in self.points(arm) if point.rate == rate}

    @property
    def pilot(self) -> int | None:
        """The seed whose runs choose each arm's rate: the campaign's first. None: nothing ran."""
        return self.runs[0].probe.seed if self.runs else None

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
    """An arm's result at the rate that was chosen for it.

    The largest of several noisy numbers is too large on average (the winner's curse), and an arm that was tried at more rates would profit
    from that. So one seed, the pilot, chooses the rate and the other seeds judge the arm there (sample splitting: Cox, "A note on
    data-splitting for the evaluation of significance levels", Biometrika 1975). A single seed both chooses and judges. With one rate there
    is no choice, so every seed judges.
    """

    rate: float | None  # None: no rate held the attainment
    goodputs: Mapping[int, float]  # judging seed -> requests/s; 0 where no rate was chosen
    attainment: float | None  # of the judging seeds together
    ended: bool  # a higher rate was seen to fail; else the arm can do more than it was offered
    chosen_by: int | None  # the pilot, unless it also judges

    @property
    def goodput(self) -> Estimate:
        return mean_and_interval(list(self.goodputs.values()))


def best(results: Results, arm: str) -> Best:
    runs = results.sound(arm)
    pilots = [run for run in runs if run.probe.seed == results.pilot]
    others = [run for run in runs if run.probe.seed != results.pilot]
    if len(points := results.points(arm)) == 1:
        known = capacity([(points[0].rate, points[0].attainment)])
        judging, chosen_by = runs, None
    else:
        known = capacity([(run.probe.rate, run.summary.attainment) for run in pilots])
        judging, chosen_by = (others, results.pilot) if others else (pilots, None)
    ended = known.fails is not None
    if known.holds is None:
        return Best(None, {run.probe.seed: 0.0 for run in judging}, None, ended, chosen_by)
    judges = [run for run in judging if run.probe.rate == known.holds]
    point = Point(arm, known.holds, tuple(judges))
    goodputs = {run.probe.seed: run.summary.goodput or 0.0 for run in judges}
    return Best(known.holds, goodputs, point.attainment if judges else None, ended, chosen_by)
