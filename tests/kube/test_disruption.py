"""What an operator and a machine do to a release while it serves: no request is lost, and no token is wrong."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from kube import NODE, ON_A_CLUSTER, Kube, Release
from kube_load import VALUES, loaded, toy_release, wait_for_doors, wait_for_handoff

pytestmark = [*ON_A_CLUSTER, pytest.mark.timeout(900)]
WHOLE = {"router": 2, "prefill": 2, "decode": 2, "redis": 1}
REQUESTS, FEWER = 1000, 400
# A node's door leads to its own router. Otherwise it may lead to one on a node that is gone until Kubernetes notices, after 20 s here.
LOCAL = ("--set", "service.externalTrafficPolicy=Local")
needs_nodes = pytest.mark.skipif(NODE not in os.environ, reason=f"no program that cuts nodes off: {NODE} is not set")


@pytest.fixture(scope="module")
def toy(kube: Kube) -> Iterator[Release]:
    with toy_release(kube, "baton-disruption", *LOCAL) as made:
        yield made


@pytest.fixture
def release(toy: Release) -> Release:
    toy.whole(**WHOLE)
    return toy


def uids(release: Release, role: str) -> set[str]:
    return {pod["metadata"]["uid"] for pod in release.pods(role)}


def spread(release: Release) -> None:
    """A pod of each role on either node: after an eviction or a rollout all may be on one, and Kubernetes moves none back."""
    for role in ("router", "prefill", "decode"):
        one, other = release.pods(role)
        node = one["spec"]["nodeName"]
        if node == other["spec"]["nodeName"]:
            release.kube.kubectl("cordon", node)
            try:
                release.kube.kubectl("-n", release.namespace, "delete", "pod", one["metadata"]["name"])
                release.whole(**WHOLE)
            finally:
                release.kube.kubectl("uncordon", node)


def test_a_rolling_restart_of_each_tier_loses_nothing(release: Release) -> None:
    before = {role: uids(release, role) for role in ("decode", "prefill", "router")}
    with loaded(release, REQUESTS):
        for role in before:
            deployment = f"deployment/{release.full}-{role}"
            release.kube.kubectl("-n", release.namespace, "rollout", "restart", deployment)
            release.kube.kubectl("-n", release.namespace, "rollout", "status", deployment, "--timeout=240s", timeout=250)
    release.whole(**WHOLE)
    assert all(not before[role] & uids(release, role) for role in before)


def test_an_upgrade_loses_nothing(release: Release) -> None:
    before = uids(release, "decode")
    with loaded(release, FEWER):
        release.install("-f", str(VALUES), *LOCAL, "--set", "config.decode.drain_s=20", verb="upgrade")
    release.whole(**WHOLE)
    assert not before & uids(release, "decode")


def test_a_drain_of_each_node_respects_the_budgets_and_loses_nothing(release: Release) -> None:
    spread(release)
    nodes = sorted({pod["spec"]["nodeName"] for role in WHOLE for pod in release.pods(role)})
    with loaded(release, FEWER), watched(release) as fewest:
        wait_for_handoff(release, nodes=2)
        for node in nodes:
            try:
                how = ("--ignore-daemonsets", "--delete-emptydir-data", f"--pod-selector=app.kubernetes.io/instance={release.name}")
                release.kube.kubectl("drain", node, *how, "--timeout=240s", timeout=250)
                assert not [pod for role in WHOLE for pod in release.pods(role) if pod["spec"].get("nodeName") == node]
                wait_for_handoff(release, nodes=1)
            finally:
                release.kube.kubectl("uncordon", node)
            release.whole(**WHOLE)
    assert min(fewest.values()) >= 1, fewest


@contextmanager
def watched(release: Release) -> Iterator[dict[str, int]]:
    """The fewest ready pods of each role with a budget, at any time of the block."""
    fewest = {"router": 9, "prefill": 9, "decode": 9}
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.3):
            for role in fewest:
                fewest[role] = min(fewest[role], len(release.ready(role)))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield fewest
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("role", ["decode", "prefill", "router", "redis"])
def test_a_pod_that_is_killed_loses_nothing(release: Release, role: str) -> None:
    victim = release.pods(role)[0]["metadata"]["name"]
    with loaded(release, 200, seed=len(role)):
        release.kube.kubectl("-n", release.namespace, "delete", "pod", victim, "--grace-period=0", "--force")
        release.whole(**WHOLE)


@needs_nodes
@pytest.mark.parametrize(("what", "with_redis"), [("cut", False), ("kill", False), ("cut", True)])
def test_a_node_that_is_gone_for_30_s_loses_nothing(release: Release, what: str, with_redis: bool) -> None:
    """Cut off, it comes back with workers that believe to be members; killed, with new ones, which start before it is back."""
    spread(release)
    wait_for_doors(release)
    [redis] = release.pods("redis")
    home = redis["spec"]["nodeName"]
    others = sorted({pod["spec"]["nodeName"] for role in WHOLE for pod in release.pods(role)} - {home})
    node = home if with_redis else others[0]
    with loaded(release, FEWER) as load:
        try:
            release.kube.node(node, "cut")
            if what == "kill":
                release.kube.node(node, "kill")
            before = load.done.total()
            time.sleep(30)
            assert load.done.total() > before
        finally:
            release.kube.node(node, "back")
        release.whole(**WHOLE)
