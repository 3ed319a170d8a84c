"""Who reaches whom: releases beside each other, and the network policies, tried with real connections."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from kube import ON_A_CLUSTER, Kube, Release, namespace
from kube_load import VALUES, loaded, toy_release, workers_of

pytestmark = [*ON_A_CLUSTER, pytest.mark.timeout(900)]
SMALL = ("--set", "prefill.replicas=1,decode.replicas=1")
DOORS, ADMIN, WORKER, KV, HEALTH, METRICS, REDIS = {8470, 8000, 8472}, 8471, 8473, 8474, 8081, 9090, 6379
PORTS = sorted(DOORS | {ADMIN, WORKER, KV, HEALTH, METRICS, REDIS})
STRANGERS = {"stranger", "foreigner"}  # a pod in the namespace of the release, and one in another
# Which ports another pod may reach. What is not in this table is closed.
ALLOWED = {
    ("router", "router"): {ADMIN},
    **{("router", worker): {WORKER} for worker in ("prefill", "decode")},
    **{(one, other): {WORKER, KV} for one in ("prefill", "decode") for other in ("prefill", "decode")},
    **{(role, "redis"): {REDIS} for role in ("router", "prefill", "decode")},
    **{(stranger, "router"): DOORS for stranger in STRANGERS},
    **{(one, other): {8000} for one in STRANGERS for other in STRANGERS},  # no policy selects them: the negative control
}
KNOCK = """
import json, socket, sys
from concurrent.futures import ThreadPoolExecutor
def opens(target):
    try:
        socket.create_connection(target, 3).close()
        return True
    except OSError:
        return False
targets = [(host, port) for host in sys.argv[2:] for port in json.loads(sys.argv[1])]
with ThreadPoolExecutor(64) as pool:
    print(json.dumps([target for target, opened in zip(targets, pool.map(opens, targets)) if opened]))
"""


@pytest.fixture(scope="module")
def release(kube: Kube) -> Iterator[Release]:
    with toy_release(kube, "baton-isolation", *SMALL, name="one") as made:
        yield made


def stranger(release: Release, name: str) -> None:
    """A pod that serves port 8000 to everybody."""
    security = {"runAsNonRoot": True, "runAsUser": 10001, "seccompProfile": {"type": "RuntimeDefault"}}
    confined = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    container = {"name": "c", "image": release.kube.image, "imagePullPolicy": "Never", "securityContext": confined}
    container["args"] = ["python", "-m", "http.server", "8000"]
    container["readinessProbe"] = {"tcpSocket": {"port": 8000}, "periodSeconds": 1}  # not ready before it listens
    spec = {"securityContext": security, "containers": [container], "terminationGracePeriodSeconds": 0}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}}, "spec": spec}
    release.kube.kubectl("-n", release.namespace, "apply", "-f", "-", given=json.dumps(pod))
    release.kube.kubectl("-n", release.namespace, "wait", "--for=condition=Ready", f"pod/{name}", "--timeout=120s", timeout=130)


def test_exactly_the_ports_of_the_table_are_open(kube: Kube, release: Release) -> None:
    with namespace(kube, "baton-foreign") as foreign:
        elsewhere = Release(kube, "none", foreign)
        stranger(release, "stranger")
        stranger(elsewhere, "foreigner")
        pods = [(pod, role) for role in ("router", "prefill", "decode", "redis") for pod in release.pods(role)]
        pods += [
            (kube.get("pods", space, f"app={name}")[0], name) for space, name in ((release.namespace, "stranger"), (foreign, "foreigner"))
        ]
        role_of = {pod["status"]["podIP"]: role for pod, role in pods}
        assert sorted(role_of.values()) == ["decode", "foreigner", "prefill", "redis", "router", "router", "stranger"]

        def knock(pod: dict[str, dict[str, str]]) -> list[tuple[str, int]]:
            others = [address for address in role_of if address != pod["status"]["podIP"]]
            where = ("-n", pod["metadata"]["namespace"], "exec", pod["metadata"]["name"], "--")
            return [(host, port) for host, port in json.loads(kube.kubectl(*where, "python", "-c", KNOCK, json.dumps(PORTS), *others))]

        with ThreadPoolExecutor() as pool:
            found = list(pool.map(knock, [pod for pod, _ in pods]))
    wrong = []
    for (pod, source), opened in zip(pods, found, strict=True):
        for address, role in role_of.items():
            if address != pod["status"]["podIP"]:
                ports, allowed = {port for host, port in opened if host == address}, ALLOWED.get((source, role), set())
                wrong += [f"{source} → {role}: open {sorted(ports)}, allowed {sorted(allowed)}"] * (ports != allowed)
    assert not wrong, "\n".join(wrong)


def test_releases_beside_each_other_never_meet(kube: Kube, release: Release) -> None:
    """Another release in the namespace, and one of the same name in another namespace, while all serve."""
    beside = Release(kube, "two", release.namespace)
    beside.install("-f", str(VALUES), *SMALL)
    with toy_release(kube, "baton-apart", *SMALL, name="one") as apart:
        every = [release, beside, apart]
        own = {id(each): {pod["metadata"]["name"] for role in ("prefill", "decode") for pod in each.pods(role)} for each in every}
        for each in every:
            with loaded(each, 50):
                pass
            used = {name for number in range(8) for name in workers_of(each, number)}
            assert used == own[id(each)]
        beside.helm("uninstall", "two", "--wait")
    with loaded(release, 50):
        pass
