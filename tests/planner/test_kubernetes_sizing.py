"""The planner sizes a release's pools through the API server of Kubernetes, here one that speaks HTTP and has no nodes."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kube_api import COST, NAMESPACE, RELEASE, KubeApi, served

from baton.cluster.config import ConfigError
from baton.cluster.errors import BatonError, Reason
from baton.cluster.records import Pools
from baton.planner.change import Resize
from baton.planner.kubernetes_sizing import KubernetesSizing
from baton.planner.sizing import Lease

WITHIN_S = 30.0


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeApi]:
    api = KubeApi({"router": 1, "prefill": 2, "decode": 2})
    with served(api, tmp_path) as kubeconfig:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        yield api


@pytest.fixture
async def sizing(api: KubeApi) -> "KubernetesSizing":
    return KubernetesSizing(f"{NAMESPACE}/{RELEASE}")


def lease(holds: Callable[[], bool] = lambda: True) -> Lease:
    return Lease("planner-0 1", 1, holds)


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        await asyncio.sleep(0.05)


async def over(sizing: KubernetesSizing) -> None:
    await until(lambda: not sizing._changes)


async def test_the_sizes_are_those_of_the_deployments(api: KubeApi, sizing: KubernetesSizing) -> None:
    assert await sizing.wanted() == Pools(2, 2)
    api.resize("decode", 3)
    assert await sizing.wanted() == Pools(2, 3)


async def test_a_pool_grows_and_those_that_are_meant_go(api: KubeApi, sizing: KubernetesSizing) -> None:
    assert await sizing.resize(lease(), Resize(Pools(2, 4), Pools(2, 2)), []) == ""
    await over(sizing)
    assert await sizing.wanted() == Pools(2, 4) and len(api.names("decode")) == 4
    oldest, *others = api.names("decode")
    assert await sizing.resize(lease(), Resize(Pools(2, 3), Pools(2, 4)), [oldest]) == ""
    await over(sizing)
    assert api.names("decode") == others, "not the youngest, whom Kubernetes would have taken"
    assert all(COST not in api.pods[name]["metadata"]["annotations"] for name in others), "only those that go are marked"


async def test_both_pools_change_together(api: KubeApi, sizing: KubernetesSizing) -> None:
    assert await sizing.resize(lease(), Resize(Pools(1, 3), Pools(2, 2)), [api.names("prefill")[0]]) == ""
    await over(sizing)
    assert await sizing.wanted() == Pools(1, 3)


async def test_it_asks_for_no_right_that_the_chart_does_not_give(api: KubeApi, sizing: KubernetesSizing) -> None:
    await sizing.resize(lease(), Resize(Pools(1, 3), Pools(2, 2)), [])
    await over(sizing)
    allowed = {("list", "deployments"), ("list", "pods"), ("patch", "pods"), ("patch", "deployments/scale")}
    assert {(verb, resource) for verb, resource, _ in api.asked} == allowed
    scaled = {name for verb, resource, name in api.asked if resource == "deployments/scale"}
    assert scaled == {f"{RELEASE}-prefill", f"{RELEASE}-decode"}


async def test_what_somebody_else_has_chosen_stands(api: KubeApi, sizing: KubernetesSizing) -> None:
    api.resize("decode", 5)
    assert "somebody has asked" in await sizing.resize(lease(), Resize(Pools(2, 3), Pools(2, 2)), [])
    assert api.sizes["decode"] == 5


async def test_a_size_that_changes_at_the_last_moment_stands(api: KubeApi, sizing: KubernetesSizing) -> None:
    """Between the look and the write. The launcher compares with the size that the planner saw."""
    await sizing.wanted()
    with pytest.raises(BatonError, match="somebody else has made the size of decode 5"):
        api.resize("decode", 5)
        await sizing._launcher.resize("decode", 3, 2)
    assert api.sizes["decode"] == 5


async def test_other_changes_of_a_deployment_are_no_matter(api: KubeApi, sizing: KubernetesSizing) -> None:
    api.conflicts = 3
    assert await sizing.resize(lease(), Resize(Pools(2, 3), Pools(2, 2)), []) == ""
    await over(sizing)
    assert api.sizes["decode"] == 3 and not api.conflicts


async def test_without_the_comparison_a_size_is_overwritten(api: KubeApi, sizing: KubernetesSizing) -> None:
    """Negative control: as `baton scale` does, which a person types."""
    await sizing.wanted()
    sizing._lease = lease()
    api.resize("decode", 5)
    await sizing._launcher.resize("decode", 3)
    assert api.sizes["decode"] == 3


async def test_who_does_not_lead_any_more_writes_nothing(api: KubeApi, sizing: KubernetesSizing) -> None:
    assert await sizing.resize(lease(lambda: False), Resize(Pools(1, 3), Pools(2, 2)), []) == ""
    await over(sizing)
    assert api.sizes == {"router": 1, "prefill": 2, "decode": 2}
    assert all(not pod["metadata"]["annotations"].get(COST) for pod in api.pods.values()), "nor is any pod left marked"


async def test_one_change_at_a_time(api: KubeApi, sizing: KubernetesSizing) -> None:
    assert await sizing.resize(lease(), Resize(Pools(2, 3), Pools(2, 2)), []) == ""
    assert "not over yet" in await sizing.resize(lease(), Resize(Pools(2, 4), Pools(2, 3)), [])
    await over(sizing)
    assert await sizing.resize(lease(), Resize(Pools(2, 4), Pools(2, 3)), []) == ""
    await sizing.close()


@pytest.mark.parametrize("owner", ["hpa", "keda", "values"])
async def test_a_pool_that_another_owns_is_left_alone(
    api: KubeApi, sizing: KubernetesSizing, owner: str, caplog: pytest.LogCaptureFixture
) -> None:
    api.owner = owner
    assert await sizing.resize(lease(), Resize(Pools(2, 3), Pools(2, 2)), []) == ""
    await over(sizing)
    assert api.sizes["decode"] == 2 and "the size of decode is not for" in caplog.text


async def test_a_pool_without_room_keeps_its_size(api: KubeApi, sizing: KubernetesSizing, caplog: pytest.LogCaptureFixture) -> None:
    api.full = True
    sizing._launcher._place_timeout_s = 0.5
    assert await sizing.resize(lease(), Resize(Pools(2, 3), Pools(2, 2)), []) == ""
    await over(sizing)
    assert await sizing.wanted() == Pools(2, 2) and len(api.names("decode")) == 2
    assert "0/2 nodes are available" in caplog.text, "in the words of Kubernetes"


async def test_an_api_server_that_is_away_and_a_missing_right_are_told(api: KubeApi, sizing: KubernetesSizing) -> None:
    api.down = True
    with pytest.raises(BatonError) as away:
        await sizing.wanted()
    assert away.value.reason is Reason.UNREACHABLE
    api.down, api.denied = False, {("list", "deployments")}
    with pytest.raises(BatonError, match="you lack the right to list deployments") as forbidden:
        await sizing.wanted()
    assert forbidden.value.reason is Reason.FORBIDDEN


@pytest.mark.parametrize("wrong", ["baton", "a/b/c", "A/b", "/"])
def test_a_release_has_a_namespace_and_a_name(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"planner\.release"):
        KubernetesSizing(wrong)
