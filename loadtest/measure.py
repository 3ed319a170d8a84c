"""Turns a plan into a campaign: executes every run in order, against an endpoint or against clusters that it starts."""

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from loadtest.access import Access
from loadtest.campaign import Arm, Campaign, Probe, this_machine
from loadtest.cluster import VLLM_BLOCK, ClusterError, RunningCluster, check_equal
from loadtest.compare import abba, judge_arm, pilot_arm
from loadtest.drive import NO_SERVER, Live, drive
from loadtest.plan import CHUNK, FIRST_ID, Comparison, Plan, Workload
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


async def compare_arms(plan: Plan, comparison: Comparison) -> Campaign:
    """Every arm at every rate, in the order of `loadtest.compare`. Raises WorkloadError and ValueError, and before the first run also
    ClusterError and ConnectionError. After the first run, a cluster that fails ends the campaign early: what was measured is kept, and the
    campaign says why it ended."""
    runs = _Runs(plan)
    machine = this_machine()
    arms: dict[str, Arm] = {}
    config: dict[str, Any] = {}
    key, values = comparison.vary
    try:
        for value in values:
            at_value = replace(comparison, chunk=int(value)) if key == CHUNK else comparison
            variant = f"{key}={value}" if key else ""
            config = await _compare_variant(runs, at_value, plan.workload.vary(key, value), variant, arms)
    except (KeyboardInterrupt, asyncio.CancelledError):
        runs.partial = INTERRUPTED
    except (ClusterError, ConnectionError) as error:
        if not runs.probes:
            raise
        runs.partial = f"a cluster failed: {error}"
    title = f"{Path(comparison.model).name} on {len(comparison.hardware.cores)} cores"
    return runs.campaign(title, tuple(arms.values()), config, machine)


async def _compare_variant(runs: "_Runs", comparison: Comparison, load: Workload, variant: str, all_arms: dict[str, Arm]) -> dict[str, Any]:
    """Adds to `all_arms`. Returns the configuration that the arms share."""
    plan, hardware = runs.plan, comparison.hardware
    common = {"model.path": comparison.model, "engine.threads": str(hardware.threads), "telemetry.log_level": "warning"}
    arms = comparison.make_arms()
    if comparison.engines != ("baton",):
        common["engine.block_size"] = VLLM_BLOCK
    for arm in arms:
        all_arms[arm.name] = arm.joined(all_arms.get(arm.name, arm))
    config = check_equal(arms, common, hardware)
    plan.note(f"{', '.join(all_arms)}: the same in every key but their topology, {len(hardware.cores)} cores each")
    chosen: dict[str, float | None] = {}
    for seed, arm in abba(arms, plan.seeds):
        async with RunningCluster({**common, **arm.topology}, "loadtest") as endpoints:
            address = endpoints[plan.access.protocol]
            await warm_up(address, plan.timeout_s, plan.access)
            runner = _Runner(runs, load, address, arm.name, seed, variant)
            if arm.name in chosen:
                await judge_arm(comparison.rates, chosen[arm.name], runner.measure_again, runs.attained)
            else:
                chosen[arm.name] = await pilot_arm(comparison.rates, runner.measure_again, runs.attained, comparison.bisections)
    return config


async def warm_up(address: str, timeout_s: float, access: Access) -> None:
    """Raises ConnectionError if no server answers."""
    async with access.door(address) as door:
        for number in range(WARM_UP_REQUESTS):
            answer = await door.ask([FIRST_ID + number] * 64, 4, timeout_s, lambda count: None)
            if answer.reason == NO_SERVER:
                raise ConnectionError(f"no server answers at {address}")


class _Runs:
    """What was measured so far: an interrupted campaign keeps it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.probes: list[Probe] = []
        self.skipped: dict[str, int] = {}
        self.partial = ""

    def summary(self, probe: Probe) -> Summary:
        return summarise(probe.records, self.plan.window, self.plan.slo, due=probe.due)

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
        broken = self.partial or next((probe.partial for probe in self.probes if probe.partial), "")
        return Campaign(
            title, plan.slo, plan.warm_up_s, plan.cool_down_s, arms, tuple(self.probes), asked, config, machine, self.skipped, broken
        )


class _Runner:
    """Runs of one arm with one seed."""

    def __init__(self, runs: _Runs, load: Workload, address: str, arm: str, seed: int, variant: str = "") -> None:
        self._runs, self._load, self._address = runs, load, address
        self._arm, self._seed, self._variant = arm, seed, variant

    async def measure_again(self, rate: float, why: str) -> Probe:
        """Measures one rate, and repeats the run once if it is void. Both runs are kept, and the report lists the void one."""
        for last in (False, True):
            probe = await self.measure(rate, why)
            told = self._runs.summary(probe)
            said = told.void or probe.partial or f"{told.attainment or 0.0:.0%} of {told.requests} within the SLO"
            self._runs.plan.note(" ".join(filter(None, (probe.variant, f"{probe.arm}, {rate:.3g}/s, seed {probe.seed}: {said}"))))
            if last or not told.void:
                break
        return probe

    async def measure(self, rate: float, why: str) -> Probe:
        runs, plan, load = self._runs, self._runs.plan, self._load
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
                await plan.show(run, live, " ".join(filter(None, (self._arm, self._variant, f"{rate:.3g}/s seed {self._seed}"))))
                done = await run
            except asyncio.CancelledError:
                run.cancel()
                await asyncio.wait({run})
                runs.probes.append(make(records=tuple(live.records), due=live.due, partial=INTERRUPTED))
                raise
        probe = make(records=done.records, due=done.due, partial=done.partial)
        runs.probes.append(probe)
        return probe
