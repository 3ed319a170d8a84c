"""The planner sizes a release's pools while it serves: up when its profile says that workers are slow, down when it says they are fast.
No request is lost, and no token is wrong."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from kube import ON_A_CLUSTER, Kube, Release
from kube_load import VALUES, loaded, toy_release

from baton.profile.file import Profile
from baton.profile.models import Fitted

pytestmark = [*ON_A_CLUSTER, pytest.mark.timeout(900)]
SLOW = {"step": 0.02, "tokens": 1e-3, "decodes": 1e-2}
FAST = {"step": 1e-4, "tokens": 1e-6, "decodes": 1e-5}
BOUNDS = "budget=5,most_prefill=2,most_decode=3,interval_s=5,cooldown_s=1,hold_s=20,cold_s=1,stale_s=30,lease_s=5,period_s=0,flips=false"
SIZED = (
    *("--set", "router.replicas=1,prefill.replicas=1,decode.replicas=1,prefill.scaling=baton,decode.scaling=baton"),
    *("--set", "planner.enabled=true,config.slo.ttft_s=3"),
    *("--set-json", "config.slo.tpot_s=0.1"),  # `--set` makes text of it
    *("--set", ",".join(f"config.planner.{bound}" for bound in BOUNDS.split(","))),
)


def planned(folder: Path, step: dict[str, float]) -> tuple[str, ...]:
    """Flags with a profile whose steps take so long."""
    file = folder / "profile.yaml"
    Profile("test", "", "toy", {}, 100.0, "sum", {"step": Fitted(step), "start": Fitted({"base": 5.0})}).save(file)
    return (*SIZED, "--set-file", f"planner.times={file}")


@pytest.fixture(scope="module")
def release(kube: Kube, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    with toy_release(kube, "baton-planner", *planned(tmp_path_factory.mktemp("planned"), SLOW)) as made:
        yield made


def told(release: Release) -> str:
    lines = release.kube.kubectl("-n", release.namespace, "logs", f"deployment/{release.full}-planner", "--tail=200").splitlines()
    return "\n".join(json.loads(line)["message"] for line in lines)


def test_pools_follow_the_plan_up_and_down_under_load(release: Release, tmp_path: Path) -> None:
    with loaded(release, 400):
        release.kube.wait(lambda: len(release.ready("decode")) >= 3, 240)
        assert "decode pool 1 → " in told(release)
        release.install("-f", str(VALUES), *planned(tmp_path, FAST), verb="upgrade")
        release.kube.wait(lambda: len(release.pods("decode")) == len(release.pods("prefill")) == 1, 300)
    assert "were not needed for 20 s" in told(release)


def test_it_may_do_nothing_else(release: Release) -> None:
    """With the planner's own account, and the API server's judgement."""
    account = f"system:serviceaccount:{release.namespace}:{release.full}-planner"

    def may(verb: str, *what: str) -> bool:
        said = release.kube.kubectl("-n", release.namespace, "auth", "can-i", verb, *what, "--as", account, check=False)
        return said.strip().startswith("yes")

    for role in ("prefill", "decode"):
        assert may("patch", f"deployments.apps/{release.full}-{role}", "--subresource=scale")
    assert not may("patch", f"deployments.apps/{release.full}-router", "--subresource=scale")
    for verb, what in (("patch", "deployments.apps"), ("delete", "pods"), ("get", "secrets"), ("create", "pods")):
        assert not may(verb, what), f"{verb} {what}"


def test_a_planner_that_dies_changes_nothing_and_another_goes_on(release: Release) -> None:
    before = {role: len(release.pods(role)) for role in ("prefill", "decode")}
    [pod] = release.pods("planner")
    with loaded(release, 60):
        release.kube.kubectl("-n", release.namespace, "delete", "pod", pod["metadata"]["name"], "--grace-period=0", "--force")
        release.kube.wait(lambda: "this planner leads" in told(release), 120)
        assert {role: len(release.pods(role)) for role in before} == before
