"""Turns a plan into a campaign: executes every run in order, against an endpoint or against clusters that it starts."""

import asyncio
import math
import secrets
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from loadtest.access import DoorAccess
from loadtest.campaign import Arm, Campaign, Probe, this_machine
from loadtest.compare import HIGHER, abba, judge_arm, pilot_arm
from loadtest.drive import NO_SERVER, Live, drive
from loadtest.hardware import ClusterError
from loadtest.lengths import DRAIN_S, FEWEST_SEEDS, PILOT, Lengths, choose, share
from loadtest.plan import CHUNK, FIRST_ID, ComparePlan, Plan, Workload
from loadtest.priority import raised
from loadtest.summary import Summary, summarise

WARM_UP_REQUESTS = 4  # before anything is measured: connections, handshakes, first steps
INTERRUPTED = "interrupted"


async def measure_endpoint(plan: Plan, address: str, rate: float) -> Campaign:
    """One endpoint at one rate, once for each seed. Raises ConnectionError, WorkloadError, ValueError."""
    runs = _Runs(plan)
    machine = this_machine()
    try:
        await warm_up(address, plan.timeout_s, plan.access)
        for seed in plan.seeds:
            probe = await _Runner(runs, plan.workload, address, "endpoint", seed).measure(rate, "sweep")
            if probe.partial:
                break
    except (KeyboardInterrupt, asyncio.CancelledError):
        runs.partial = INTERRUPTED
    return runs.campaign(f"{address} at {rate:g} requests/s", (Arm("endpoint", {}, address),), {}, machine)


async def compare_arms(plan: Plan, comparison: ComparePlan) -> Campaign:
    """Every arm at every rate, in the order of `loadtest.compare`. Raises WorkloadError and ValueError, and before the first run also
    ClusterError and ConnectionError. After the first run, a cluster that fails ends the campaign early: what was measured is kept, and the
    campaign says why it ended."""
    runs = _Runs(plan, comparison)
    machine = {**this_machine(), **comparison.hardware.facts}
    arms: dict[str, Arm] = {}
    config: dict[str, Any] = {}
    key, values = comparison.vary
    end = perf_counter() + comparison.within_s
    try:
        for number, value in enumerate(values):
            at_value = replace(comparison, chunk=int(value)) if key == CHUNK else comparison
            variant = f"{key}={value}" if key else ""
            at_value = replace(at_value, within_s=(end - perf_counter()) / (len(values) - number))
            config = await _compare_variant(runs, at_value, plan.workload.vary(key, value), variant, arms)
    except (KeyboardInterrupt, asyncio.CancelledError):
        runs.partial = INTERRUPTED
    except (ClusterError, ConnectionError) as error:
        if not runs.probes:
            raise
        runs.partial = f"a cluster failed: {error}"
    what = Path(comparison.model).name if comparison.release is None else comparison.release.name
    title = f"{what} on {comparison.hardware}"
    return runs.campaign(title, tuple(arms.values()), config, machine)


async def _compare_variant(
    runs: "_Runs", comparison: ComparePlan, load: Workload, variant: str, all_arms: dict[str, Arm]
) -> dict[str, Any]:
    """Adds to `all_arms`. Returns the configuration that the arms share."""
    plan, hardware = runs.plan, comparison.hardware
    arms = comparison.make_arms()
    for arm in arms:
        all_arms[arm.name] = arm.joined(all_arms.get(arm.name, arm))
    config = comparison.check(arms)
    plan.note(f"{', '.join(all_arms)}: the same in every key but their topology, {hardware} each")
    seeds, lengths, share_s = _chosen(plan, comparison, len(arms))
    rounds = _Rounds(comparison.within_s if "seeds" in comparison.chosen else math.inf)
    higher = HIGHER if "rates" in comparison.chosen else 0
    chosen: dict[str, float] = {}
    for seed, arm in abba(arms, seeds):
        if not rounds.begin(seed):
            plan.note(f"the time that the comparison may take is over after {rounds.done} seeds")
            break
        until = perf_counter() + (1 + PILOT) * share_s
        async with comparison.running(arm) as endpoints:
            address = endpoints[plan.access.protocol]
            await warm_up(address, plan.timeout_s, plan.access)
            runner = _Runner(runs, load, address, arm.name, seed, variant, lengths, until)
            if arm.name in chosen:
                await judge_arm(comparison.rates, chosen[arm.name], runner.measure_again, runs.attained)
            elif rate := await pilot_arm(
                comparison.rates, runner.measure_again, runs.attained, comparison.bisections, higher, runner.affords
            ):
                chosen[arm.name] = rate
    return config


def _chosen(plan: Plan, comparison: ComparePlan, arms: int) -> tuple[tuple[int, ...], Lengths, float]:
    """The seeds and the lengths of the runs: as asked for, or as they fit into the time. `_Rounds` ends seeds that nobody asked for. And
    the seconds that a cluster of a seed may take, for what nobody asked for, either: runs at other rates, and repeated ones."""
    if "duration" not in comparison.chosen:
        return plan.seeds, Lengths(0.0, None, plan.workload.duration_s), math.inf
    around = plan.warm_up_s + plan.cool_down_s
    if "seeds" in comparison.chosen:
        seeds, lengths = choose(comparison.rates, comparison.within_s, arms, comparison.start_s, around)
    else:
        seeds = len(plan.seeds)
        lengths = Lengths.fit(comparison.rates, share(comparison.within_s, seeds, arms) - comparison.start_s, around)
    told = ", ".join(f"{lengths.of(rate):.0f} s at {rate:g}/s" for rate in sorted(comparison.rates))
    plan.note(f"runs of {told}, for {seeds} seeds within {comparison.within_s:.0f} s (--within)")
    share_s, needs_s = share(comparison.within_s, seeds, arms), comparison.start_s + lengths.sweep_s(comparison.rates)
    if needs_s > share_s:
        least = needs_s * (seeds + PILOT) * arms
        plan.note(f"that does not fit: {seeds} seeds of the shortest runs take about {least:.0f} s; higher rates take less time")
    return plan.seeds, lengths, max(share_s, needs_s)


class _Rounds:
    """Ends a comparison whose time is over between two seeds, so that all arms have the same ones; never before FEWEST_SEEDS.

    What was measured does not decide, only the time, so an early end favours no arm.
    """

    def __init__(self, within_s: float) -> None:
        self._began = perf_counter()
        self._within_s = within_s
        self._seeds: list[int] = []

    @property
    def done(self) -> int:
        return len(self._seeds)

    def begin(self, seed: int) -> bool:
        if seed in self._seeds:
            return True
        spent = perf_counter() - self._began
        if self.done >= FEWEST_SEEDS and spent + spent / self.done > self._within_s:
            return False
        self._seeds.append(seed)
        return True


async def warm_up(address: str, timeout_s: float, access: DoorAccess) -> None:
    """Raises ConnectionError if no server answers."""
    async with access.door(address) as door:
        for number in range(WARM_UP_REQUESTS):
            answer = await door.ask([FIRST_ID + number] * 64, 4, timeout_s, lambda count: None)
            if answer.reason == NO_SERVER:
                raise ConnectionError(f"no server answers at {address}")


class _Runs:
    """What was measured so far: an interrupted campaign keeps it."""

    def __init__(self, plan: Plan, comparison: ComparePlan | None = None) -> None:
        self.plan = plan
        self.proposed = comparison.proposed if comparison else {}
        self.chosen = comparison.chosen if comparison else frozenset[str]()
        self.probes: list[Probe] = []
        self.skipped: dict[str, int] = {}
        self.partial = ""

    def summary(self, probe: Probe) -> Summary:
        return summarise(probe.records, self.plan.window_of(probe.duration_s), self.plan.slo, due=probe.due)

    def attained(self, probe: Probe) -> float | None:
        """None if the run does not count."""
        told = self.summary(probe)
        return None if told.void else told.attainment

    def campaign(self, title: str, arms: tuple[Arm, ...], config: Mapping[str, Any], machine: Mapping[str, Any]) -> Campaign:
        """Raises ValueError if nothing was measured."""
        if not self.probes:
            raise ValueError(f"nothing was measured: {self.partial or 'no run'}")
        plan = self.plan
        asked = {name: getattr(plan.workload, name) for name in Workload.__slots__} | {"door": plan.access.protocol}
        if "duration" in self.chosen:
            asked["duration_s"] = "chosen for each rate"
        broken = self.partial or next((probe.partial for probe in self.probes if probe.partial), "")
        return Campaign(
            title, plan.slo, plan.warm_up_s, plan.cool_down_s, arms, tuple(self.probes), asked, config, machine, self.skipped, broken,
            self.proposed,
        )  # fmt: skip


class _Runner:
    """Runs of one arm with one seed."""

    def __init__(
        self,
        runs: _Runs,
        load: Workload,
        address: str,
        arm: str,
        seed: int,
        variant: str = "",
        lengths: Lengths | None = None,
        until: float = math.inf,
    ) -> None:
        self._runs, self._load, self._address = runs, load, address
        self._lengths = lengths or Lengths(0.0, None, load.duration_s)
        self._arm, self._seed, self._variant, self._until = arm, seed, variant, until

    def affords(self, rate: float) -> bool:
        """Whether another run at this rate ends before the arm's time does."""
        return perf_counter() + self._lengths.of(rate) + DRAIN_S <= self._until

    async def measure_again(self, rate: float, why: str) -> Probe:
        """Measures one rate. A void run is repeated once, if there is time. Both are kept, and the report lists the void one."""
        for last in (False, True):
            probe = await self.measure(rate, why)
            told = self._runs.summary(probe)
            said = told.void or probe.partial or f"{told.met} of {told.requests} within the SLO"
            self._runs.plan.note(" ".join(filter(None, (probe.variant, f"{probe.arm}, {rate:.3g}/s, seed {probe.seed}: {said}"))))
            if last or not told.void or not self.affords(rate):
                break
        return probe

    async def measure(self, rate: float, why: str) -> Probe:
        runs, plan, load = self._runs, self._runs.plan, replace(self._load, duration_s=self._lengths.of(rate))
        items, skipped = load.items(rate, self._seed, plan.note)
        if plan.access.protocol == "http" and any(item.session for item in items):
            raise ValueError("turns: the HTTP door reports no token ids, so a later turn cannot carry the answer; use --door grpc")
        runs.skipped |= skipped
        times = load.times(rate, self._seed, items)
        live = Live()
        # Each run has its own salt, so it finds nothing in the caches from the previous run, whose prompts may be the same.
        async with plan.access.door(self._address, secrets.token_hex(8)) as door:
            run = asyncio.create_task(drive(items, times, door, duration_s=load.duration_s, timeout_s=plan.timeout_s, live=live))
            make = partial(Probe, self._arm, rate, self._seed, why=why, variant=self._variant, duration_s=load.duration_s)
            try:
                title = " ".join(filter(None, (self._arm, self._variant, f"{rate:.3g}/s seed {self._seed}")))
                with raised():
                    await plan.show(run, live, plan.slo, load.duration_s, title)
                    done = await run
            except asyncio.CancelledError:
                run.cancel()
                await asyncio.wait({run})
                runs.probes.append(make(records=tuple(live.records), due=live.due, partial=INTERRUPTED))
                raise
        probe = make(records=done.records, due=done.due, partial=done.partial)
        runs.probes.append(probe)
        return probe
