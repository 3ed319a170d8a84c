"""The launcher of a release against an API server without nodes. tests/kube runs it on a real one."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from kube_api import COST, NAMESPACE, RELEASE, KubeApi, served

from baton.cluster.errors import BatonError, Reason
from baton.launch import kubernetes_launcher
from baton.launch.kubernetes_launcher import KubernetesLauncher
from baton.launch.pods import ReleaseName


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[KubeApi]:
    monkeypatch.setattr(kubernetes_launcher, "CONTROLLERS_S", 0.0)  # these have no caches
    api = KubeApi({"router": 1, "decode": 4})
    with served(api, tmp_path) as kubeconfig, caplog.at_level(logging.WARNING):
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        yield api


async def started(busy: list[str]) -> KubernetesLauncher:
    launcher = KubernetesLauncher(ReleaseName(NAMESPACE, RELEASE), loads=lambda: dict.fromkeys(busy, (1.0,)))
    await launcher.start()
    return launcher


def marks(api: KubeApi) -> dict[str, str | None]:
    return {name: api.pods[name]["metadata"]["annotations"].get(COST) for name in api.names("decode")}


async def test_the_idlest_go_and_nothing_is_said(api: KubeApi, caplog: pytest.LogCaptureFixture) -> None:
    one, other, *busy = api.names("decode")
    ended = await (await started(busy)).resize("decode", 2)
    assert {state.name for state in ended} == {one, other} and marks(api) == dict.fromkeys(busy) and not caplog.text


async def test_a_pod_that_kubernetes_keeps_gets_back_the_cost_that_it_had(api: KubeApi, caplog: pytest.LogCaptureFixture) -> None:
    """A busy pod stops being ready between the look and the order: it goes, and the idle one must not be the first of the next time."""
    one, other, *busy = api.names("decode")
    api.pods[one]["metadata"]["annotations"][COST] = "-7"  # somebody else's
    launcher = await started(busy)
    api.unready = {other, busy[0]}
    ended = await launcher.resize("decode", 2)
    assert {state.name for state in ended} == api.unready and marks(api) == {one: "-7", busy[1]: None}
    assert f"decode: Kubernetes has kept {one} and taken others" in caplog.text


async def test_marks_stay_while_kubernetes_has_not_acted(api: KubeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """It still needs them."""
    monkeypatch.setattr(kubernetes_launcher, "GONE_S", 0.0)
    one, other, *busy = api.names("decode")
    launcher, api.late = await started(busy), True
    with pytest.raises(BatonError) as late:
        await launcher.resize("decode", 2)
    assert late.value.reason is Reason.DEADLINE and marks(api) == {one: "-1", other: "-1", **dict.fromkeys(busy)}
    api.late = False
    api.resize("decode", 2)
    assert api.names("decode") == busy


@pytest.mark.parametrize("why", ("gone", "away"))
async def test_a_mark_that_cannot_be_taken_away_fails_nothing(api: KubeApi, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """The pods are as many as were asked for."""
    one, other, *busy = api.names("decode")
    launcher = await started(busy)
    api.unready = set(busy)
    unmark = launcher._unmark

    async def disturbed(counted: list[dict[str, object]], names: list[str]) -> None:
        if why == "gone":
            del api.pods[one]
        else:
            api.down = True
        await unmark(counted, names)
        api.down = False

    monkeypatch.setattr(launcher, "_unmark", disturbed)
    ended = await launcher.resize("decode", 2)
    assert {state.name for state in ended} == set(busy)
    assert marks(api) == ({other: None} if why == "gone" else {one: "-1", other: "-1"})
