"""The order of measurement, the rate at which an arm's goodput ends, and arms that differ only in their topology."""

import os

import pytest

from loadtest.arms import make_arms, over_engines
from loadtest.campaign import Arm, Probe
from loadtest.cluster import check_equal
from loadtest.compare import Capacity, abba, capacity, judge_arm, next_rate, pilot_arm
from loadtest.hardware import ClusterError, Cores, default_cores

A, B, C = (Arm(name, {}) for name in "ABC")


def test_the_abba_order_spreads_drift_evenly_over_the_arms() -> None:
    order = list(abba((A, B), (1, 2, 3, 4)))
    assert [(seed, arm.name) for seed, arm in order] == [(1, "A"), (1, "B"), (2, "B"), (2, "A"), (3, "A"), (3, "B"), (4, "B"), (4, "A")]
    for arms in ((A, B), (A, B, C)):
        moments: dict[str, int] = {}
        for moment, (_, arm) in enumerate(abba(arms, (1, 2))):
            moments[arm.name] = moments.get(arm.name, 0) + moment
        assert len(set(moments.values())) == 1, "a machine that slows down steadily affects every arm equally"


@pytest.mark.parametrize(
    ("attained", "expected"),
    [
        ([], Capacity(None, None)),
        ([(1, 1.0), (2, 0.95), (4, 0.5)], Capacity(2, 4)),
        ([(4, 0.5), (1, 1.0), (2, 0.9)], Capacity(2, 4)),
        ([(1, 1.0), (2, 1.0)], Capacity(2, None)),
        ([(1, 0.2)], Capacity(None, 1)),
        ([(1, 1.0), (2, 0.8), (4, 0.95)], Capacity(1, 2)),  # a success above a failure does not count
        ([(1, None), (2, 1.0)], Capacity(2, None)),  # nothing was due
    ],
)
def test_capacity_is_the_last_rate_before_the_first_failure(attained: list[tuple[float, float | None]], expected: Capacity) -> None:
    assert capacity(attained) == expected


def test_the_next_rate_lies_between_the_bounds() -> None:
    assert next_rate(Capacity(2, 8)) == pytest.approx(4)
    assert next_rate(Capacity(2, None)) is None and next_rate(Capacity(None, 2)) is None


class Simulated:
    """An arm that attains its SLO up to the rate `end`; records what was measured."""

    def __init__(self, end: float, partial: str = "") -> None:
        self.end, self.partial = end, partial
        self.asked: list[tuple[float, str]] = []

    async def measure(self, rate: float, why: str) -> Probe:
        self.asked.append((rate, why))
        return Probe("A", rate, 1, (), 0, 1.0, why, partial=self.partial)

    def attained(self, probe: Probe) -> float:
        return 1.0 if probe.rate <= self.end else 0.5


async def test_bisection_converges_on_the_capacity_of_the_arm() -> None:
    arm = Simulated(5.0)
    chosen = await pilot_arm((16, 1, 4, 8, 32), arm.measure, arm.attained, bisections=4)
    assert [rate for rate, why in arm.asked if why == "sweep"] == [1, 4, 8, 16], "the sweep stops after two failures"
    fails = min(rate for rate, _ in arm.asked if rate > arm.end)
    assert chosen is not None and chosen <= arm.end < fails < chosen * 1.1
    tireless = Simulated(99.0)
    assert await pilot_arm((1, 2), tireless.measure, tireless.attained) == 2 and len(tireless.asked) == 2, "nothing to bisect"
    hopeless = Simulated(0.0)
    assert await pilot_arm((1, 2), hopeless.measure, hopeless.attained) == 0.125, "the lowest rate is judged where none holds"


async def test_the_pilot_goes_lower_while_no_rate_holds_and_higher_while_none_fails() -> None:
    slow = Simulated(0.3)
    assert await pilot_arm((1, 2), slow.measure, slow.attained, bisections=0) == 0.25
    assert [rate for rate, why in slow.asked if why == "lower"] == [0.5, 0.25], "it stops where a rate holds"
    hopeless = Simulated(0.0)
    await pilot_arm((1, 2), hopeless.measure, hopeless.attained, higher=2)
    assert [rate for rate, why in hopeless.asked if why != "sweep"] == [0.5, 0.25, 0.125], "it is bounded"
    fast = Simulated(6.0)
    assert await pilot_arm((1, 2), fast.measure, fast.attained, bisections=0, higher=2) == 4
    assert [rate for rate, why in fast.asked if why == "higher"] == [4, 8]
    void = Simulated(0.3)
    assert await pilot_arm((1, 2), void.measure, lambda probe: None, higher=2) is None, "no run counts: another seed has to choose"
    assert len(void.asked) == 2


@pytest.mark.parametrize(("end", "way"), [(0.3, "lower"), (99.0, "higher"), (1.5, "bisection")])
async def test_the_pilot_looks_no_further_than_its_time_lasts(end: float, way: str) -> None:
    arm = Simulated(end)
    await pilot_arm((1, 2), arm.measure, arm.attained, bisections=3, higher=2, affords=lambda rate: len(arm.asked) < 3)
    assert [why for _, why in arm.asked] == ["sweep", "sweep", way]


async def test_the_other_seeds_judge_at_the_rate_chosen_by_the_first() -> None:
    arm = Simulated(5.0)
    await judge_arm((1, 4, 8, 16), 4.6, arm.measure, arm.attained)
    assert arm.asked == [(1, "sweep"), (4, "sweep"), (8, "sweep"), (16, "sweep"), (4.6, "judge")]
    weaker = Simulated(1.0)
    await judge_arm((1, 4, 8, 16), 16, weaker.measure, weaker.attained)
    assert weaker.asked[-1] == (16, "judge"), "the chosen rate is measured even if the sweep ended below it"
    for chosen in (4.0, None):
        again = Simulated(5.0)
        await judge_arm((1, 4), chosen, again.measure, again.attained)
        assert len(again.asked) == 2, "a rate of the sweep is not measured again, and without a rate there is nothing to judge"


async def test_a_broken_run_ends_the_arm() -> None:
    arm = Simulated(5.0, partial="the server is gone")
    await pilot_arm((1, 2, 4), arm.measure, arm.attained)
    assert len(arm.asked) == 1
    await judge_arm((1, 2, 4), 3.0, arm.measure, arm.attained)
    assert len(arm.asked) == 2


HARDWARE = Cores(default_cores()[:2], 1)
COMMON = {"model.path": "nowhere", "engine.threads": "1"}
ALL = ("colocated", "unchunked", "static", "dynamic", "disaggregated", "bypass")


def test_arms_differ_only_in_topology() -> None:
    arms = make_arms(ALL, HARDWARE, (1, 1), 128)
    shared = check_equal(arms, COMMON, HARDWARE)
    assert shared["engine.threads"] == 1 and "prefill.replicas" not in shared and shared["model.path"] == "nowhere"
    replicas = {arm.name: (arm.topology["prefill.replicas"], arm.topology["decode.replicas"]) for arm in arms}
    both, split = ("0", "2"), ("1", "1")
    assert replicas == {**dict.fromkeys(ALL[:4], both), **dict.fromkeys(ALL[4:], split)}


def test_an_arm_may_have_its_own_chunk_size() -> None:
    chunks = {
        arm.name: arm.topology["engine.max_num_batched_tokens"] for arm in make_arms(("colocated", "colocated@64"), HARDWARE, (1, 1), 128)
    }
    assert chunks == {"colocated": "128", "colocated@64": "64"}


def test_arms_that_differ_in_more_cannot_be_compared() -> None:
    good, other = make_arms(("colocated", "disaggregated"), HARDWARE, (1, 1), 128)
    faster = Arm("faster", {**other.topology, "engine.max_num_seqs": "128"})
    with pytest.raises(ClusterError, match=r"differ in engine\.max_num_seqs"):
        check_equal((good, faster), COMMON, HARDWARE)
    greedy = Arm("greedy", {**other.topology, "prefill.replicas": "2"})
    with pytest.raises(ClusterError, match="greedy uses cores"):
        check_equal((good, greedy), COMMON, HARDWARE)
    half = Arm("half", {**good.topology, "decode.cores": str(list(HARDWARE.cores[:1]))})
    with pytest.raises(ClusterError, match="half uses cores"):
        check_equal((other, half), COMMON, HARDWARE)


def test_every_arm_runs_over_every_engine() -> None:
    arms = make_arms(("colocated@64", "disaggregated"), HARDWARE, (1, 1), 128)
    eager = "{enforce_eager: true}"
    both = over_engines(arms, ("baton", "vllm"), eager)
    assert [arm.name for arm in both] == ["colocated@64/baton", "disaggregated/baton", "colocated@64/vllm", "disaggregated/vllm"]
    shared = check_equal(both, {**COMMON, "engine.block_size": "32"}, HARDWARE)
    assert shared["engine.block_size"] == 32 and "engine.kind" not in shared
    assert [arm.topology["engine.vllm"] for arm in both] == ["{}", "{}", eager, eager]
    alone = over_engines(arms, ("vllm",), eager)
    assert [(arm.name, arm.topology["engine.kind"]) for arm in alone] == [("colocated@64", "vllm"), ("disaggregated", "vllm")]
    with pytest.raises(ClusterError, match=r"engines: 'sglang' is not one of baton, vllm"):
        over_engines(arms, ("baton", "sglang"), eager)
    for own in ("static", "dynamic", "unchunked"):
        with pytest.raises(ClusterError, match=f"{own} is a mode of Baton's own engine"):
            over_engines(make_arms((own,), HARDWARE, (1, 1), 128), ("baton", "vllm"), eager)


def test_impossible_hardware_and_arms_are_refused() -> None:
    with pytest.raises(ClusterError, match="cannot be used"):
        Cores((0, 4096), 1)
    with pytest.raises(ClusterError, match="do not fill"):
        Cores(HARDWARE.cores, 3)
    with pytest.raises(ClusterError, match="'fast' is not one of"):
        make_arms(("fast",), HARDWARE, (1, 1), 128)
    for name in ("colocated@many", "unchunked@64"):
        with pytest.raises(ClusterError, match="after @"):
            make_arms((name,), HARDWARE, (1, 1), 128)
    for ratio in ((2, 1), (0, 1), (1, 0)):
        with pytest.raises(ClusterError, match="cannot be split"):
            make_arms(("disaggregated",), HARDWARE, ratio, 128)
    assert make_arms(("colocated",), HARDWARE, (2, 1), 128), "a ratio that no arm uses is not checked"
    assert set(default_cores()) == os.sched_getaffinity(0)
