"""Campaigns: what each seed is used for, and what remains when a cluster fails."""

import asyncio
import itertools
import subprocess
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from loadtest import cluster, measure
from loadtest import plan as planning
from loadtest.access import DoorAccess
from loadtest.campaign import Campaign
from loadtest.cluster import RunningCluster
from loadtest.drive import Answer, Run
from loadtest.hardware import ClusterError, Cores
from loadtest.measure import compare_arms, measure_endpoint
from loadtest.plan import ComparePlan, Plan, Workload
from loadtest.slo import Slo

WORKLOAD = Workload(input="8", output="4", max_tokens=64, arrivals="constant", duration_s=4.0)
PLAN = Plan(workload=WORKLOAD, slo=Slo(ttft_s=1.0), seeds=(1, 2), warm_up_s=0.5, cool_down_s=0.5, timeout_s=5.0)
COMPARISON = ComparePlan(
    model="model", arms=("colocated", "disaggregated"), hardware=Cores((0, 1), 1), ratio=(1, 1), chunk=64, rates=(1.0,),
    vary=("", ("",)), bisections=0,
)  # fmt: skip
BATON = "import sys; sys.stderr.write({!r}); sys.exit({})"


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Awaitable[Campaign]]:
    """Compares arms with fake clusters, of which only the first `clusters` start and only the first `end` stop."""

    def make(clusters: int, end: int = 99, plan: Plan = PLAN, **changes: Any) -> Awaitable[Campaign]:
        left, ends = iter(range(clusters)), iter(range(end))

        class Cluster:
            def __init__(self, *arguments: Any) -> None: ...

            async def __aenter__(self) -> dict[str, str]:
                if next(left, None) is None:
                    raise ClusterError("a port is taken")
                return {"grpc": "127.0.0.1:1", "http": "127.0.0.1:2"}

            async def __aexit__(self, *arguments: Any) -> None:
                if next(ends, None) is None:
                    raise ClusterError("it did not end")

        async def drive(*arguments: Any, **options: Any) -> Run:
            return Run((), 0, 4.0, "")

        async def warm_up(*arguments: Any) -> None: ...

        for home, name, fake in (
            (planning, "RunningCluster", Cluster),
            (planning, "check_equal", lambda *_: {}),
            (measure, "drive", drive),
            (measure, "warm_up", warm_up),
        ):
            monkeypatch.setattr(home, name, fake)
        return compare_arms(plan, replace(COMPARISON, **changes))

    return make


async def test_results_from_before_a_cluster_failed_are_kept(compared: Callable[..., Awaitable[Campaign]]) -> None:
    campaign = await compared(3)
    assert len({(probe.arm, probe.seed) for probe in campaign.probes}) == 3 and "a port is taken" in campaign.partial
    assert not (await compared(4)).partial


async def test_a_cluster_that_does_not_stop_ends_the_campaign_and_keeps_its_results(compared: Callable[..., Awaitable[Campaign]]) -> None:
    campaign = await compared(4, end=2)
    assert len({(probe.arm, probe.seed) for probe in campaign.probes}) == 3 and "it did not end" in campaign.partial


async def test_a_failure_of_the_first_cluster_is_an_error(compared: Callable[..., Awaitable[Campaign]]) -> None:
    with pytest.raises(ClusterError, match="a port is taken"):
        await compared(0)


async def test_the_pilot_seed_bisects_and_the_other_seeds_judge(
    compared: Callable[..., Awaitable[Campaign]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every run attains its SLO fully up to 3 requests/s and not at all above."""
    monkeypatch.setattr(measure._Runs, "attained", lambda self, probe: 1.0 if probe.rate <= 3 else 0.0)
    campaign = await compared(9, rates=(2.0, 8.0), bisections=2)
    by_seed = {seed: [(p.rate, p.why) for p in campaign.probes if (p.seed, p.arm) == (seed, "colocated")] for seed in (1, 2)}
    assert [why for _, why in dict(by_seed[1]).items()] == ["sweep", "sweep", "bisection", "bisection"]
    chosen = max(rate for rate, _ in by_seed[1] if rate <= 3)
    assert dict(by_seed[2]) == {2.0: "sweep", 8.0: "sweep", chosen: "judge"}


async def test_the_next_seed_chooses_for_an_arm_whose_first_runs_are_void(
    compared: Callable[..., Awaitable[Campaign]], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoiled = {("disaggregated", 1)}
    holds = lambda self, probe: None if (probe.arm, probe.seed) in spoiled else float(probe.rate <= 3)  # noqa: E731
    monkeypatch.setattr(measure._Runs, "attained", holds)
    campaign = await compared(9, plan=replace(PLAN, seeds=(1, 2, 3)), rates=(2.0, 8.0), bisections=1)
    who = {(probe.arm, probe.seed): probe.why for probe in campaign.probes if probe.why != "sweep"}
    assert who == {
        ("colocated", 1): "bisection", ("disaggregated", 2): "bisection",
    }  # fmt: skip


async def test_a_comparison_ends_between_two_seeds_when_its_time_is_over(
    compared: Callable[..., Awaitable[Campaign]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never before three seeds, and only if nobody said how many."""
    plan = replace(PLAN, seeds=(1, 2, 3, 4, 5, 6))
    late_ = {"within_s": 0.0, "chosen": frozenset({"seeds"})}
    for changes, seeds in ((late_, 3), ({**late_, "chosen": frozenset[str]()}, 6), ({**late_, "within_s": 1e6}, 6)):
        campaign = await compared(99, plan=plan, **changes)
        ran = {arm: [p.seed for p in campaign.probes if p.arm == arm] for arm in ("colocated", "disaggregated")}
        assert all(sorted(set(some)) == list(range(1, seeds + 1)) for some in ran.values()) and not campaign.partial


async def test_run_lengths_follow_the_rate_where_nobody_gave_one(compared: Callable[..., Awaitable[Campaign]]) -> None:
    chosen = {"within_s": 600.0, "chosen": frozenset({"duration"}), "rates": (1.0, 20.0)}
    told: list[str] = []
    campaign = await compared(99, plan=replace(PLAN, note=told.append), **chosen)
    lengths = {probe.rate: probe.duration_s for probe in campaign.probes}
    assert lengths[1.0] > lengths[20.0] > PLAN.warm_up_s + PLAN.cool_down_s and any("--within" in line for line in told)
    assert campaign.workload["duration_s"] == "chosen for each rate"


async def test_a_void_run_is_repeated_only_while_there_is_time(
    compared: Callable[..., Awaitable[Campaign]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run without requests is void."""
    looks = itertools.count()
    for passes_s, runs in ((0.0, 16), (1000.0, 8)):  # between two looks at the clock
        monkeypatch.setattr(measure, "perf_counter", partial(lambda passes_s: passes_s * next(looks), passes_s))
        campaign = await compared(99, within_s=600.0, chosen=frozenset({"duration", "seeds"}), rates=(1.0, 20.0))
        assert len(campaign.probes) == runs


async def test_a_comparison_that_takes_longer_than_it_may_says_so_at_its_start(compared: Callable[..., Awaitable[Campaign]]) -> None:
    for within_s, late in ((100.0, True), (6000.0, False)):
        told: list[str] = []
        plan, chosen = replace(PLAN, note=told.append), frozenset({"duration", "seeds"})
        await compared(99, plan=plan, within_s=within_s, chosen=chosen, rates=(1.0, 20.0))
        assert any("does not fit: 3 seeds of the shortest runs take about" in line for line in told) == late


async def test_a_varied_chunk_size_is_shown_only_for_arms_that_use_it(compared: Callable[..., Awaitable[Campaign]]) -> None:
    campaign = await compared(99, vary=("chunk", ("64", "256")), arms=("colocated", "colocated@32"))
    chunks = {arm.name: arm.topology["engine.max_num_batched_tokens"] for arm in campaign.arms}
    assert chunks == {"colocated": "64 | 256", "colocated@32": "32"}


async def test_a_cluster_whose_start_is_interrupted_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes go on starting without the one that asked for them."""
    told: list[str] = []
    asked, goes_on = threading.Event(), threading.Event()

    def baton(command: str, *arguments: str, timeout_s: float = 60.0, niceness: int = 0) -> subprocess.CompletedProcess[str]:
        asked.set()
        assert goes_on.wait(60)
        told.append(command)
        return subprocess.CompletedProcess([command], 0, "{}", "")

    monkeypatch.setattr(cluster, "_baton", baton)
    starting = asyncio.create_task(RunningCluster({}, "loadtest").__aenter__())
    assert await asyncio.to_thread(asked.wait, 60)
    starting.cancel()
    await asyncio.sleep(0)
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert told == ["up", "down"]


@pytest.mark.parametrize(
    ("code", "says"), [(BATON.format("no such cluster", 3), "no such cluster"), ("import time; time.sleep(60)", "did not end within 0.5 s")]
)
async def test_errors_from_baton_down_are_reported(monkeypatch: pytest.MonkeyPatch, code: str, says: str) -> None:
    real = subprocess.run
    monkeypatch.setattr(cluster, "DOWN_WITHIN_S", 0.5 if "sleep" in code else 30.0)
    monkeypatch.setattr(subprocess, "run", lambda command, **options: real([command[0], "-c", code], **options))
    with pytest.raises(ClusterError, match=says):
        await RunningCluster({}, "x").__aexit__(None, None, None)
    await RunningCluster({}, "x").__aexit__(KeyError, KeyError(), None)  # a pending error is not replaced


def test_repeated_seeds_are_refused() -> None:
    with pytest.raises(ValueError, match="seeds: 1,1: a seed that occurs twice"):
        replace(PLAN, seeds=(1, 1))


class Silent:
    async def ask(self, *arguments: Any) -> Answer:
        return Answer("ok", tokens=(1,))

    async def __aenter__(self) -> "Silent":
        return self

    async def __aexit__(self, *_: object) -> None: ...


async def test_sessions_need_a_door_that_returns_token_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DoorAccess, "door", lambda *_: Silent())
    sessions = replace(PLAN, workload=replace(WORKLOAD, turns="2"), access=DoorAccess("http"))
    with pytest.raises(ValueError, match="HTTP door reports no token ids"):
        await measure_endpoint(sessions, "127.0.0.1:1", 1.0)


async def test_reading_a_long_trace_reports_progress(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("Timestamp,Request tokens,Response tokens\n" + "".join(f"{i / 100},5,5\n" for i in range(50_001)))
    told: list[str] = []
    items, _ = replace(WORKLOAD, trace=str(path), arrivals="trace").items(10.0, 1, told.append)
    assert told == [f"{path}: 50000 rows read"]
    assert len(items) == 4000 and max(item.at or 0.0 for item in items) < 4.0
