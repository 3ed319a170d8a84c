"""A model that a Job fetches on a real cluster, from a server in the cluster, and a claim that several pods cannot share."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kube import ON_A_CLUSTER, Kube, Release, namespace
from model_stores import REPO

pytestmark = [*ON_A_CLUSTER, pytest.mark.timeout(2400)]
SERVER = Path(__file__).resolve().parents[1] / "support" / "model_stores.py"
PORT = 8080
SMALL = (
    "--set", "decode.replicas=1", "--set", "router.replicas=1", "--set", "common.env.OMP_NUM_THREADS=1",
    "--set", "model.fetch.storage.size=1Gi", "--set", f"networkPolicy.fetch[0].ports[0].port={PORT}",
)  # fmt: skip
CONFINED: dict[str, Any] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True}
FETCH = "app.kubernetes.io/component=fetch"


@pytest.fixture(scope="module")
def place(kube: Kube) -> Iterator[str]:
    """A namespace in which the pod `hub` serves the model that ships."""
    with namespace(kube, "baton-models") as name:
        kube.kubectl("-n", name, "create", "configmap", "server", f"--from-file={SERVER}")
        apply(kube, name, hub(kube.image), {
            "apiVersion": "v1", "kind": "Service", "metadata": {"name": "hub"},
            "spec": {"selector": {"app": "hub"}, "ports": [{"port": PORT}]},
        })  # fmt: skip
        kube.kubectl("-n", name, "wait", "pod/hub", "--for=condition=Ready", "--timeout=120s", timeout=150)
        yield name


@pytest.fixture(scope="module")
def release(kube: Kube, place: str) -> Iterator[Release]:
    made = Release(kube, "m", place)
    made.install(*SMALL, *fetching(place))
    yield made
    made.helm("uninstall", "m", "--wait")


def fetching(place: str) -> tuple[str, ...]:
    return ("--set", f"model.fetch.source=hf://{REPO}", "--set", f"model.fetch.endpoint=http://hub.{place}.svc.cluster.local:{PORT}")


def hub(image: str) -> dict[str, Any]:
    container = {
        "name": "hub", "image": image, "imagePullPolicy": "Never", "securityContext": CONFINED,
        "args": ["python", "/server/model_stores.py", "/models/tale", str(PORT)],
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}},
        "volumeMounts": [{"name": "server", "mountPath": "/server"}, {"name": "home", "mountPath": "/var/cache/baton"}],
    }  # fmt: skip
    return {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "hub", "labels": {"app": "hub"}},
        "spec": {
            "containers": [container], "automountServiceAccountToken": False, "terminationGracePeriodSeconds": 1,
            "securityContext": {"runAsNonRoot": True, "runAsUser": 10001, "seccompProfile": {"type": "RuntimeDefault"}},
            "volumes": [{"name": "server", "configMap": {"name": "server"}}, {"name": "home", "emptyDir": {}}],
        },
    }  # fmt: skip


def apply(kube: Kube, place: str, *objects: dict[str, Any]) -> None:
    kube.kubectl("-n", place, "apply", "-f", "-", given=json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)}))


def test_a_fetched_model_serves(release: Release) -> None:
    said = release.helm("test", "m", "--logs", timeout=300)
    assert "digests checked" in said, said
    [job] = release.kube.get("job", release.namespace, FETCH)
    assert job["status"].get("succeeded") == 1
    folder = release.kube.kubectl("-n", release.namespace, "exec", f"deployment/{release.full}-decode", "-c", "decode", "--",
                                  "sh", "-c", "cat /model/*/tale/.baton-fetch.json; touch /model/x && echo written || true")  # fmt: skip
    assert f"hf://{REPO}" in folder and "written" not in folder


def test_pods_did_not_start_and_fail_while_they_waited(release: Release) -> None:
    for role in ("router", "prefill", "decode"):
        [pod] = release.pods(role)
        states = pod["status"]["initContainerStatuses"] + pod["status"]["containerStatuses"]
        assert [state["restartCount"] for state in states] == [0, 0], role


def test_an_upgrade_that_changes_no_model_fetches_nothing(release: Release) -> None:
    names = {job["metadata"]["name"] for job in release.kube.get("job", release.namespace, FETCH)}
    release.install(*SMALL, *fetching(release.namespace), "--set", "config.decode.drain_s=20", verb="upgrade")
    assert {job["metadata"]["name"] for job in release.kube.get("job", release.namespace, FETCH)} == names


def test_the_job_reaches_only_what_its_policy_names(release: Release) -> None:
    """The Job's labels on a pod of ours: the hub's port is open to it, and Redis's is not."""
    code = (
        "import socket, sys\n"
        "def opens(host, port):\n"
        "    try:\n"
        "        socket.create_connection((host, port), 3).close()\n"
        "    except OSError:\n"
        "        return False\n"
        "    return True\n"
        f"print('hub', opens('hub', {PORT}), 'redis', opens('{release.full}-redis', 6379))\n"
    )
    [job] = release.kube.get("job", release.namespace, FETCH)
    probe = hub(release.kube.image)
    probe["metadata"] = {"name": "probe", "labels": {key: value for key, value in job["metadata"]["labels"].items() if "app.kub" in key}}
    probe["spec"]["restartPolicy"] = "Never"
    probe["spec"]["containers"][0] |= {"args": ["python", "-c", code], "readinessProbe": None}
    apply(release.kube, release.namespace, probe)
    phase = ("-n", release.namespace, "get", "pod", "probe", "-o", "jsonpath={.status.phase}")
    release.kube.wait(lambda: release.kube.kubectl(*phase) == "Succeeded")
    assert release.kube.kubectl("-n", release.namespace, "logs", "probe").split() == ["hub", "True", "redis", "False"]


def test_a_claim_for_one_node_is_refused(kube: Kube, place: str) -> None:
    for name, mode in (("once", "ReadWriteOnce"), ("many", "ReadWriteMany")):
        apply(kube, place, {
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name},
            "spec": {"accessModes": [mode], "resources": {"requests": {"storage": "1Gi"}}},
        })  # fmt: skip
    other = Release(kube, "x", place)
    # The server is asked: only then does the chart see the claim.
    said = other.install("--dry-run=server", "--set", "model.claim=once", check=False)
    assert "claim once is ReadWriteOnce" in said and "ReadWriteMany or ReadOnlyMany" in said
    assert "ReadWriteOnce" not in other.install("--dry-run=server", "--set", "model.claim=many", check=False)
