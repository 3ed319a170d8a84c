"""The launcher of a release against an API server without nodes. tests/kube runs it on a real one."""

import logging
from pathlib import Path

import pytest
from kube_api import COST, NAMESPACE, RELEASE, KubeApi, served

from baton.launch.kubernetes_launcher import KubernetesLauncher
from baton.launch.pods import ReleaseName


@pytest.mark.parametrize("meanwhile", (False, True))
async def test_a_pod_that_kubernetes_keeps_loses_its_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, meanwhile: bool
) -> None:
    """A busy pod stops being ready between the look and the order: it goes, and the idle one must not be the first of the next time."""
    api = KubeApi({"router": 1, "decode": 2})
    idle, busy = api.names("decode")
    with served(api, tmp_path) as kubeconfig, caplog.at_level(logging.WARNING):
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        launcher = KubernetesLauncher(ReleaseName(NAMESPACE, RELEASE), loads=lambda: {busy: (1.0,)})
        await launcher.start()
        api.unready = {busy} if meanwhile else set()
        [ended] = await launcher.resize("decode", 1)
    marks = {name: api.pods[name]["metadata"]["annotations"].get(COST) for name in api.names("decode")}
    assert (ended.name, marks) == ((busy, {idle: None}) if meanwhile else (idle, {busy: None}))
    assert ("Kubernetes has kept" in caplog.text) == meanwhile
