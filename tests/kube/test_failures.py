"""What can go wrong at an installation: Kubernetes or the pod says what to do, under the names that docs/kubernetes.md lists."""

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256

import pytest
from kube import ON_A_CLUSTER, Kube, Release
from kube_load import VALUES, loaded, toy_release

pytestmark = [*ON_A_CLUSTER, pytest.mark.timeout(900)]
ONE_EACH = ("--set", "router.replicas=1,prefill.replicas=1,decode.replicas=1")
GPU = "nvidia.com/gpu"
PROFILE = {
    "gpu": {
        "resources": {"requests": {"cpu": "50m", "memory": "256Mi", GPU: 1}, "limits": {GPU: 1}},
        "rollout": {"maxSurge": 0, "maxUnavailable": 1},
    }
}
# No GPU is there: `auto` computes on the CPU.
ON_GPUS = ("--set", "prefill.profile=gpu,decode.profile=gpu,config.engine.device=auto", "--set-json", f"profiles={json.dumps(PROFILE)}")


@pytest.fixture(scope="module")
def space(kube: Kube) -> Iterator[Release]:
    with toy_release(kube, "baton-failures", *ONE_EACH) as made:
        made.helm("uninstall", "baton", "--wait")
        yield made


@contextmanager
def installed(release: Release, *arguments: str) -> Iterator[None]:
    """Without waiting: these never become ready."""
    release.install("-f", str(VALUES), *ONE_EACH, *arguments, wait=False)
    try:
        yield
    finally:
        release.helm("uninstall", release.name, "--wait", "--timeout", "120s", timeout=150)


def told(release: Release, role: str, *words: str) -> str:
    """What `kubectl describe pod` prints of a role, once it contains these words."""

    def said() -> str:
        text = release.kube.kubectl("-n", release.namespace, "describe", "pod", "-l", f"app.kubernetes.io/component={role}")
        return text if all(word in text for word in words) else ""

    found: str = release.kube.wait(said, 120)
    return found


def test_a_model_that_is_not_there_is_named_by_the_pod(space: Release) -> None:
    with installed(space, "--set", "model.path=/models/nothing"):
        for role in ("router", "decode"):
            told(space, role, "Last State", "Terminated", "model.path: /models/nothing holds no")


def test_a_secret_that_is_not_there_is_named_by_an_event(space: Release) -> None:
    with installed(space, "--set", "secrets.existingSecret=forgotten"):
        told(space, "decode", "FailedMount", 'secret "forgotten" not found')


def test_a_secret_with_another_password_is_named_by_the_pods_log(space: Release) -> None:
    right = "redis: {url: 'redis://:right@baton-redis:6379/0'}\ncluster: {key: 0123456789abcdef0123456789abcdef}"
    given = {"config.yaml": right.replace(":right", ":wrong"), "redis.conf": "port 6379\nbind * -::*\nrequirepass right\ndir /tmp\n"}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "mine"}, "stringData": given}
    space.kube.kubectl("-n", space.namespace, "apply", "-f", "-", given=json.dumps(secret))
    with installed(space, "--set", "secrets.existingSecret=mine"):

        def said() -> bool:
            logs = space.kube.kubectl("-n", space.namespace, "logs", f"deployment/{space.full}-decode", "--tail=50", check=False)
            return "registry is unreachable: auth" in logs

        space.kube.wait(said, 120)


@pytest.mark.parametrize("role", ["decode"])
def test_a_gpu_that_is_nowhere_is_named_by_the_scheduler(space: Release, role: str) -> None:
    with installed(space, *ON_GPUS):
        told(space, role, "FailedScheduling", f"Insufficient {GPU}")


@contextmanager
def devices(kube: Kube, node: str, resource: str, count: int) -> Iterator[None]:
    """The node says that it has so many; there is no device."""
    name = resource.replace("/", "~1")

    def patch(op: str, **value: str) -> None:
        changes = [{"op": op, "path": f"/status/{part}/{name}", **value} for part in ("capacity", "allocatable")]
        kube.kubectl("patch", "node", node, "--subresource=status", "--type=json", "-p", json.dumps(changes))

    patch("add", value=str(count))
    try:
        yield
    finally:
        patch("remove")


def last_node(kube: Kube) -> str:
    name: str = json.loads(kube.kubectl("get", "nodes", "-o", "json"))["items"][-1]["metadata"]["name"]
    return name


def test_workers_land_where_the_gpus_are_and_an_update_needs_no_spare_one(space: Release) -> None:
    """Two GPUs for two workers, so the third stays pending, and a worker goes before its successor comes."""
    node = last_node(space.kube)
    with devices(space.kube, node, GPU, 2), installed(space, *ON_GPUS):
        space.whole(router=1, prefill=1, decode=1)
        assert {pod["spec"]["nodeName"] for role in ("prefill", "decode") for pod in space.pods(role)} == {node}
        with loaded(space, 30):
            pass
        before = space.pods("decode")[0]["metadata"]["uid"]
        space.install("-f", str(VALUES), *ONE_EACH, *ON_GPUS, "--set", "config.decode.drain_s=21", verb="upgrade")
        space.whole(router=1, prefill=1, decode=1)
        assert space.pods("decode")[0]["metadata"]["uid"] != before
        space.kube.kubectl("-n", space.namespace, "scale", f"deployment/{space.full}-decode", "--replicas=2")
        told(space, "decode", f"Insufficient {GPU}")
        assert len(space.ready("decode")) == 1


def test_a_worker_gets_its_gpu_by_itself_and_says_what_is_missing_of_it(space: Release) -> None:
    """Two GPUs for the two workers; a router asks for none. No device is there, and this image has no torch for one."""
    node = last_node(space.kube)
    with devices(space.kube, node, GPU, 2), installed(space, "--set", "config.engine.device=cuda"):
        told(space, "decode", f"{GPU}:  1", "engine.device cuda: ", "set engine.device to cpu")
        assert {pod["spec"]["nodeName"] for role in ("prefill", "decode") for pod in space.pods(role)} == {node}
        space.whole(router=1)


def test_kv_by_tcp_where_rdma_was_asked_for_fails_the_test_of_the_release(space: Release) -> None:
    """The pods get what calls itself an adapter, and nothing opens."""
    profile = {"rdma": {"resources": {"requests": {"cpu": "50m", "memory": "256Mi", "rdma/hca": 1}, "limits": {"rdma/hca": 1}}}}
    asked = ("--set", "prefill.profile=rdma,decode.profile=rdma", "--set-json", f"profiles={json.dumps(profile)}")
    with devices(space.kube, last_node(space.kube), "rdma/hca", 2), installed(space, *asked):
        space.whole(router=1, prefill=1, decode=1)
        said = space.helm("test", space.name, "--logs", timeout=300, check=False)
        assert "RDMA was asked for, but KV went by tcp" in said, said


def test_the_test_of_a_release_shows_a_key_and_is_let_in_where_clients_are_named(space: Release) -> None:
    key = secrets.token_hex(16)
    secret = {"keys": f"tester {sha256(key.encode()).hexdigest()}\n", "test-key": key}

    def give(given: dict[str, str]) -> None:
        space.kube.kubectl("-n", space.namespace, "delete", "secret", "tenants", "--ignore-not-found")
        space.kube.kubectl(
            "-n", space.namespace, "create", "secret", "generic", "tenants", *(f"--from-literal={k}={v}" for k, v in given.items())
        )

    nobody = "networkPolicy.clients[0].podSelector.matchLabels.app=nobody"
    give(secret)
    with installed(space, "--set", f"security.apiKeysSecret=tenants,{nobody}"):
        space.whole(router=1, prefill=1, decode=1)
        assert "KV by tcp" in space.helm("test", space.name, "--logs", timeout=300)
        give({"keys": secret["keys"]})
        said = space.helm("test", space.name, "--logs", timeout=300, check=False)
        assert "has no `test-key`" in said, said
