"""`baton loadtest compare --kubernetes`: a release between topologies, from outside and in a Job, and the sizes that it has afterwards."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from kube import ON_A_CLUSTER, Kube, Release, namespace

from loadtest.campaign import Campaign

pytestmark = [*ON_A_CLUSTER, pytest.mark.timeout(1200)]
SIZES = ("prefill.replicas=1", "decode.replicas=1", "router.replicas=1", "common.env.OMP_NUM_THREADS=1")
SMALL = tuple(f"{role}.resources.requests.{what}" for role in ("prefill", "decode") for what in ("cpu=100m", "memory=256Mi"))
SET = tuple(part for value in (*SIZES, *SMALL) for part in ("--set", value))
LOAD = ("--slo", "ttft=5s,tpot=1s", "--rates", "2", "--arrivals", "constant", "--input", "64-200", "--output", "8", "--timeout", "30")
SHORT = ("--seeds", "1,2", "--duration", "6", "--warm-up", "1", "--cool-down", "1", "--bisections", "0")


@pytest.fixture(scope="module")
def release(kube: Kube) -> Iterator[Release]:
    with namespace(kube, "baton-compare") as name:
        made = Release(kube, "r", name)
        made.install(*SET)
        yield made
        made.helm("uninstall", "r", "--wait")


def compare(release: Release, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """In a group of its own, and with its own state."""
    command = [sys.executable, "-m", "loadtest", "compare", "--kubernetes", f"{release.namespace}/{release.name}", *LOAD, *arguments]
    env = {**os.environ, **release.kube.env, "BATON_STATE_DIR": str(folder / "state")}
    return subprocess.Popen([*command, "--out", str(folder / "report")], env=env, stderr=subprocess.PIPE, text=True)


def sizes(release: Release) -> tuple[int, int]:
    selector = f"app.kubernetes.io/instance={release.name},app.kubernetes.io/component="
    prefill, decode = (release.kube.get("deployments", release.namespace, selector + role) for role in ("prefill", "decode"))
    return prefill[0]["spec"]["replicas"], decode[0]["spec"]["replicas"]


def test_a_release_is_compared_and_put_back(release: Release, tmp_path: Path) -> None:
    with compare(release, tmp_path, *SHORT) as done:
        said = done.communicate(timeout=900)[1]
    assert done.returncode in (0, 1, 3) and "Traceback" not in said, said  # a busy machine's generator is late
    campaign = Campaign.load(tmp_path / "report")
    assert not campaign.partial and {probe.arm for probe in campaign.probes} == {"colocated", "disaggregated"}, campaign.partial
    for probe in campaign.probes:
        told = campaign.summary(probe)
        workers = {record.decode_worker for record in probe.records}
        assert told.completed == told.requests > 5 and (told.handoffs > 0) == (probe.arm == "disaggregated")
        # At this rate one worker may serve all: the prompts' common beginning is cached there.
        assert 1 <= len(workers) <= (2 if probe.arm == "colocated" else 1), "no worker of another arm was used"
    assert sizes(release) == (1, 1) and not list((tmp_path / "state").rglob("*.json"))
    release.whole(prefill=1, decode=1)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_comparison_that_is_killed_is_undone(release: Release, how: signal.Signals, tmp_path: Path) -> None:
    with compare(release, tmp_path, "--arms", "colocated", "--seeds", "1,2,3", "--duration", "120") as killed:
        release.kube.wait(lambda: sizes(release) == (0, 2), 240)
        time.sleep(2)
        killed.send_signal(how)
        said = killed.communicate(timeout=240)[1]
    if how == signal.SIGKILL:
        assert sizes(release) == (0, 2)
        with compare(release, tmp_path, *SHORT, "--arms", "colocated") as healing:
            said = healing.communicate(timeout=600)[1]
        assert "was killed and left 0 prefill and 2 decode; it had found 1 prefill and 1 decode" in said
    assert sizes(release) == (1, 1) and "has its 1 prefill and 1 decode again" in said and "Traceback" not in said, said
    release.whole(prefill=1, decode=1)


def test_pools_of_unlike_pods_are_refused(kube: Kube, release: Release, tmp_path: Path) -> None:
    """Only Redis and the objects of this release exist."""
    none = ("--set", "router.replicas=0,decode.replicas=1,prefill.replicas=1,decode.resources.requests.cpu=64")
    other = Release(kube, "unlike", release.namespace)
    other.install(*none, wait=False)
    try:
        with compare(other, tmp_path, *SHORT) as done:
            said = done.communicate(timeout=120)[1]
        assert done.returncode == 1 and "prefill and decode pods differ in resources" in said
    finally:
        other.helm("uninstall", "unlike", "--wait")


def in_a_job(*arguments: str) -> tuple[str, ...]:
    """`--set-json` alone leaves commas as they are."""
    return ("--set", "loadtest.enabled=true,loadtest.keepSeconds=600", "--set-json", f"loadtest.args={json.dumps([*LOAD, *arguments])}")


def log(release: Release) -> str:
    told = release.kube.kubectl("-n", release.namespace, "logs", "-l", "app.kubernetes.io/component=loadtest", "--tail=-1", check=False)
    assert "Traceback" not in told, told
    return told


def test_a_job_in_the_cluster_compares_its_own_release(kube: Kube, tmp_path: Path) -> None:
    """Where the policies let only named clients in and every door asks for a key, with the rights of its own account; its report can be
    copied. Deleted in the midst of a run, it gives the pools their sizes back."""
    key = secrets.token_hex(16)
    closed = ("--set", "security.apiKeysSecret=keys,networkPolicy.clients[0].podSelector.matchLabels.app=nobody")
    with namespace(kube, "baton-compare-inside") as space:
        given = {"keys": f"own {sha256(key.encode()).hexdigest()} admin=yes\n", "test-key": key}
        literals = [f"--from-literal={name}={value}" for name, value in given.items()]
        kube.kubectl("-n", space, "create", "secret", "generic", "keys", *literals)
        release = Release(kube, "r", space)
        try:
            release.install(*SET, *closed, *in_a_job(*SHORT))
            account = f"--as=system:serviceaccount:{space}:r-baton-loadtest"
            for allowed, right in (("yes", "patch deployments/r-baton-decode"), ("no", "patch deployments"), ("no", "get secrets")):
                verb, what = right.split()
                subresource = ("--subresource=scale",) if "/" in what else ()
                assert kube.kubectl("-n", space, "auth", "can-i", verb, what, *subresource, account, check=False).split()[0] == allowed, (
                    right
                )
            kube.wait(lambda: f"-n {space} cp " in log(release), 600)
            [pod] = [each["metadata"]["name"] for each in release.pods("loadtest")]
            kube.kubectl("-n", space, "cp", f"{pod}:/report", str(tmp_path / "report"))
            campaign = Campaign.load(tmp_path / "report")
            assert not campaign.partial and {probe.arm for probe in campaign.probes} == {"colocated", "disaggregated"}, campaign.partial
            assert all(campaign.summary(probe).completed == campaign.summary(probe).requests > 5 for probe in campaign.probes)
            assert sizes(release) == (1, 1)
            release.install(*SET, *closed, *in_a_job("--arms", "colocated", "--seeds", "1,2,3", "--duration", "120"), verb="upgrade")
            kube.wait(lambda: sizes(release) == (0, 2), 240)
            kube.kubectl("-n", space, "delete", "job", "-l", "app.kubernetes.io/component=loadtest", "--timeout=200s", timeout=240)
            kube.wait(lambda: sizes(release) == (1, 1), 60)
            release.whole(prefill=1, decode=1)
        finally:
            release.helm("uninstall", "r", "--wait")
