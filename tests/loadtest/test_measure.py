"""A campaign of arms whose clusters fail: what was measured before is kept and marked."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from loadtest import measure
from loadtest.campaign import Campaign
from loadtest.cluster import ClusterError, Hardware
from loadtest.drive import Live, Run
from loadtest.measure import Comparison, Plan, Workload, compare_arms
from loadtest.slo import Slo

WORKLOAD = Workload(
    input="8", output="4", hit_rate=0.0, turns="1", think="0", prefix_tokens=64, prefix_branching=4, prefix_depth=1, trace=None,
    format="auto", tokenizer=None, scale=1.0, max_tokens=64, vocab=256, lenient=False, arrivals="constant", duration_s=4.0,
)  # fmt: skip
COMPARISON = Comparison("model", ("colocated", "disaggregated"), Hardware((0, 1), 1), (1, 1), 64, (1.0,), ("", ("",)), 0)


async def show(run: Any, live: Live, what: str) -> None: ...


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Awaitable[Campaign]]:
    """Only so many clusters come up."""

    def make(clusters: int) -> Awaitable[Campaign]:
        left = iter(range(clusters))

        class Cluster:
            def __init__(self, *arguments: Any) -> None: ...

            async def __aenter__(self) -> str:
                if next(left, None) is None:
                    raise ClusterError("a port is taken")
                return "127.0.0.1:1"

            async def __aexit__(self, *arguments: Any) -> None: ...

        async def drive(*arguments: Any, **options: Any) -> Run:
            return Run((), 0, 4.0, "")

        async def warm_up(*arguments: Any) -> None: ...

        for name, fake in (("RunningCluster", Cluster), ("drive", drive), ("warm_up", warm_up), ("check_equal", lambda *_: {})):
            monkeypatch.setattr(measure, name, fake)
        return compare_arms(Plan(WORKLOAD, Slo(ttft_s=1.0), (1, 2), 0.5, 0.5, 5.0, show), COMPARISON, lambda line: None)

    return make


async def test_what_was_measured_before_a_cluster_failed_is_kept(compared: Callable[[int], Awaitable[Campaign]]) -> None:
    campaign = await compared(3)
    assert len({(probe.arm, probe.seed) for probe in campaign.probes}) == 3 and "a port is taken" in campaign.partial
    assert not (await compared(4)).partial


async def test_a_first_cluster_that_fails_is_an_error(compared: Callable[[int], Awaitable[Campaign]]) -> None:
    with pytest.raises(ClusterError, match="a port is taken"):
        await compared(0)
