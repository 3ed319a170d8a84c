"""Pools that are resized: by hand, over upgrades with both versions of Helm, by an autoscaler, and prefill to zero and back."""

import json
import sys
from collections.abc import Iterator

import pytest
from kube import ON_A_CLUSTER, Kube, Release
from kube_load import VALUES, loaded, toy_release, workers_of

pytestmark = [*ON_A_CLUSTER, pytest.mark.timeout(900)]
SMALL = ("--set", "router.replicas=1,prefill.replicas=1,decode.replicas=1")
BY_HAND = (*SMALL, "--set", "prefill.scaling=baton,decode.scaling=baton")
# A pool of 512 blocks, so that 12 streams use a third of it; scaled down after 5 s and not after the usual 5 minutes.
AUTOSCALE = {"min": 1, "max": 3, "target": "0.15", "behavior": {"scaleDown": {"stabilizationWindowSeconds": 5}}}
BY_HPA = (*SMALL, "--set", "decode.scaling=hpa,config.engine.kv_memory_mib=1", "--set-json", f"decode.autoscale={json.dumps(AUTOSCALE)}")
SCRAPED = ("--set-json", 'networkPolicy.monitoring=[{"ipBlock":{"cidr":"0.0.0.0/0"}}]')


@pytest.fixture(scope="module")
def release(kube: Kube) -> Iterator[Release]:
    with toy_release(kube, "baton-scaling", *BY_HAND) as made:
        yield made


def replicas(release: Release, role: str) -> int:
    found = release.kube.kubectl("-n", release.namespace, "get", "deployment", f"{release.full}-{role}", "-o", "json")
    return int(json.loads(found)["spec"]["replicas"])


def scale(release: Release, role: str, count: int) -> None:
    place = ("--kubernetes", f"{release.namespace}/{release.name}")
    release.kube.run(sys.executable, "-P", "-m", "baton", "scale", f"--{role}", str(count), *place, timeout=180)


def test_an_upgrade_leaves_the_size_that_a_person_chose(release: Release) -> None:
    with loaded(release, 100):
        scale(release, "decode", 3)
        release.whole(decode=3)
        for number, helm in enumerate(release.kube.helms):
            Release(Kube(release.kube.env, release.kube.image, helm), release.name, release.namespace).install(
                "-f", str(VALUES), *BY_HAND, "--set", f"config.router.drain_s={21 + number}", verb="upgrade"
            )
            assert replicas(release, "decode") == 3
        scale(release, "decode", 1)
        release.whole(decode=1)


def test_without_prefill_workers_the_decode_workers_do_both(release: Release) -> None:
    with loaded(release, 100):
        scale(release, "prefill", 0)
        release.whole(prefill=0)
    prefill, decode = workers_of(release, 7)
    assert not prefill and decode
    with loaded(release, 100):
        scale(release, "prefill", 1)
        release.whole(prefill=1)
        release.kube.wait(lambda: all(workers_of(release, 8)))


def test_an_autoscaler_follows_the_use_of_kv_up_and_down(release: Release) -> None:
    """With the metric that the pods publish and a controller that reads it."""
    release.install("-f", str(VALUES), *BY_HPA, *SCRAPED, verb="upgrade")
    with loaded(release, 100):
        release.kube.wait(lambda: len(release.ready("decode")) >= 2, 180)
    release.kube.wait(lambda: len(release.pods("decode")) == 1, 180)
    with loaded(release, 50):
        pass
