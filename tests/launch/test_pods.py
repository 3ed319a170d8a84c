"""What the API of Kubernetes says: states of processes, who goes first, whose a size is, why there is no room."""

import json
from typing import Any

import pytest

from baton.cluster.errors import BatonError, Reason
from baton.launch.kubernetes_api import refusal_of
from baton.launch.launcher import ProcessState
from baton.launch.pods import (
    COST,
    Log,
    ReleaseName,
    check_owner,
    cost_to_go_first,
    explain,
    has_ended,
    idlest,
    is_ready,
    log_of,
    obstacle,
    parse_release,
    port_of,
    process_of,
    selector_of,
)

RUNNING = {"running": {"startedAt": "2026-11-23T02:00:05Z"}}
ENDED = {"terminated": {"exitCode": 3, "reason": "Error", "startedAt": "2026-11-23T02:00:05Z", "finishedAt": "2026-11-23T02:01:00Z"}}
KILLED = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
LOOP = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting failed container=decode"}}
RELEASE = ReleaseName("models", "r")


def pod(name: str = "r-baton-decode-7d9c-x", born: int = 0, ready: bool = True, **more: Any) -> dict[str, Any]:
    """`more`: state, last (of the container), restarts, phase, leaving, cost, conditions."""
    meta: dict[str, Any] = {
        "name": name,
        "namespace": "models",
        "labels": {"app.kubernetes.io/name": "baton", "app.kubernetes.io/instance": "r", "app.kubernetes.io/component": "decode"},
        "creationTimestamp": f"2026-11-23T02:00:{born:02}Z",
    }
    if more.get("leaving"):
        meta |= {"deletionTimestamp": "2026-11-23T03:00:00Z", "deletionGracePeriodSeconds": 40}
    if "cost" in more:
        meta["annotations"] = {COST: more["cost"]}
    status = {
        "name": "decode", "ready": ready, "restartCount": more.get("restarts", 0), "started": ready,
        "state": more.get("state", RUNNING), "lastState": more.get("last", {}),
    }  # fmt: skip
    sidecar = {"name": "mesh", "ready": True, "restartCount": 9, "state": RUNNING, "lastState": {}}
    conditions = more.get(
        "conditions", [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "True" if ready else "False"}]
    )
    ports = [{"name": "grpc", "containerPort": 8473, "protocol": "TCP"}, {"name": "health", "containerPort": 8081, "protocol": "TCP"}]
    return {
        "metadata": meta,
        "spec": {
            "nodeName": "node1",
            "terminationGracePeriodSeconds": 40,
            "containers": [{"name": "mesh"}, {"name": "decode", "ports": ports}],
        },
        "status": {"phase": more.get("phase", "Running"), "conditions": conditions, "containerStatuses": [sidecar, status]},
    }


def unplaced(name: str, why: str | None = None) -> dict[str, Any]:
    made = pod(name, ready=False, phase="Pending")
    del made["spec"]["nodeName"], made["status"]["containerStatuses"]
    made["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": why}] if why else []
    return made


def deployment(owner: str | None = "values", role: str = "decode", conditions: tuple[dict[str, str], ...] = ()) -> dict[str, Any]:
    labels = {"app.kubernetes.io/instance": "r", "app.kubernetes.io/component": role, "app.kubernetes.io/part-of": "baton"}
    return {
        "metadata": {
            "name": f"r-baton-{role}",
            "namespace": "models",
            "labels": labels,
            "annotations": {"baton/scaling": owner} if owner else {},
        },
        "spec": {"replicas": 2, "selector": {"matchLabels": {"b": "2", "a": "1"}}},
        "status": {"conditions": list(conditions)},
    }


@pytest.mark.parametrize(
    ("given", "state", "restarts", "last_exit"),
    [
        (pod(), "running", 0, None),
        (pod(ready=False), "running", 0, None),
        (pod(restarts=2, last=KILLED), "running", 2, -9),
        (pod(restarts=4, state=LOOP, last=ENDED, ready=False), "backoff", 4, 3),
        (pod(state=ENDED, ready=False), "backoff", 0, 3),
        (unplaced("x"), "backoff", 0, None),
        (pod(leaving=True), "stopping", 0, None),
        (pod(leaving=True, state={"terminated": {"exitCode": 0}}), "stopping", 0, 0),
        (pod(phase="Failed", state=KILLED), "exited", 0, -9),
    ],
)
def test_a_pod_is_a_process(given: dict[str, Any], state: Any, restarts: int, last_exit: int | None) -> None:
    node = "" if "nodeName" not in given["spec"] else "node1"
    assert process_of(given) == ProcessState(given["metadata"]["name"], "decode", None, state, restarts, last_exit, node)
    assert has_ended(given) == (state == "exited")


def test_the_idlest_go_first() -> None:
    pods = [pod("busy", 1), pod("idle", 2), pod("cached", 3), pod("silent", 4), pod("starting", 5, ready=False), unplaced("waiting")]
    loads = {"busy": (3, 0, 1, 9), "idle": (0, 0, 0, 0), "cached": (0, 0, 0, 7), "starting": (9, 9, 9, 9)}
    order = ["waiting", "starting", "silent", "idle", "cached", "busy"]
    assert [idlest(pods, loads, count) for count in range(7)] == [order[:count] for count in range(7)]
    assert not is_ready(pods[4]) and idlest(pods[::-1], loads, 6) == order


def test_of_equal_ones_the_youngest_goes() -> None:
    pods = [pod("old", 1), pod("young", 30), pod("middle", 20)]
    assert idlest(pods, dict.fromkeys(("old", "young", "middle"), (1, 0)), 2) == ["young", "middle"]
    assert idlest(pods, {}, 2) == ["young", "middle"]


def test_the_cost_of_those_that_go_is_below_that_of_every_other() -> None:
    assert cost_to_go_first([pod(), pod()]) == -1
    assert cost_to_go_first([pod(cost="100"), pod(cost="5")]) == -1
    assert cost_to_go_first([pod(cost="-7"), pod()]) == -8
    assert cost_to_go_first([pod(cost="-2147483648")]) == -2147483648, "there is nothing below the least"
    assert cost_to_go_first([]) == -1


@pytest.mark.parametrize(
    ("owner", "role", "said"),
    [
        ("values", "decode", ["--set decode.replicas=5", "--set decode.scaling=baton", "helm -n models upgrade r"]),
        ("values", "router", ["--set router.replicas=5"]),
        ("hpa", "decode", ["hpa owns it", "decode.autoscale.max=MAX", "decode.scaling=baton"]),
        ("keda", "prefill", ["keda owns it", "prefill.autoscale.min=MIN"]),
        (None, "decode", ["does not say who owns it", "helm -n models upgrade r"]),
    ],
)
def test_a_size_that_another_owns_is_refused_with_the_way_to_change_it(owner: str | None, role: str, said: list[str]) -> None:
    with pytest.raises(BatonError) as refused:
        check_owner(RELEASE, deployment(owner, role), 5)
    assert refused.value.reason is Reason.INVALID_FIELD and all(each in str(refused.value) for each in said)
    assert role != "router" or "scaling=baton" not in str(refused.value), "the chart has no such value"


def test_a_size_that_is_ours_is_not_refused() -> None:
    check_owner(RELEASE, deployment("baton"), 5)
    assert selector_of(deployment()) == "a=1,b=2"


def test_an_obstacle_is_told_in_the_words_of_kubernetes() -> None:
    said = "0/2 nodes are available: 2 Insufficient cpu. preemption: 0/2 nodes are available: 2 No preemption victims found."
    assert obstacle(deployment(), [pod(), unplaced("a"), unplaced("b", said)]) == said
    quota = 'pods "r-baton-decode-7d9c-y" is forbidden: exceeded quota: few, requested: pods=1, used: pods=4, limited: pods=4'
    failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": quota}
    assert obstacle(deployment(conditions=(failure,)), []) == quota
    assert obstacle(deployment(conditions=({**failure, "status": "False"},)), [pod()]) == ""


FORBIDDEN = {
    "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "reason": "Forbidden", "code": 403,
    "message": 'pods is forbidden: User "eve" cannot list resource "pods" in API group "" in the namespace "models"',
}  # fmt: skip


@pytest.mark.parametrize(
    ("status", "body", "reason", "said"),
    [
        (
            403,
            json.dumps(FORBIDDEN),
            Reason.FORBIDDEN,
            'you lack the right to list pods in namespace models: pods is forbidden: User "eve"',
        ),
        (401, '{"message": "Unauthorized"}', Reason.UNAUTHENTICATED, "renew the credentials of your kubeconfig"),
        (404, '{"message": "deployments.apps \\"x\\" not found"}', Reason.INVALID_FIELD, 'deployments.apps "x" not found'),
        (409, '{"message": "the object has been modified"}', Reason.INVALID_FIELD, "has been modified"),
        (500, "no JSON at all", Reason.UNREACHABLE, "(500): no JSON at all"),
        (0, "", Reason.UNREACHABLE, "it gives no reason"),
        (403, '{"message": "pods \\"x\\" is forbidden: exceeded quota: few"}', Reason.SATURATED, "exceeded quota"),
    ],
)
def test_a_refusal_of_the_api_server_says_what_to_do(status: int, body: str, reason: Reason, said: str) -> None:
    error = explain("list", "pods in namespace models", status, body)
    assert error.reason is reason and said in error.message


def test_a_refused_port_forward_has_its_status_in_its_text() -> None:
    text = f"Handshake status 403 Forbidden -+-+- {{'content-type': 'application/json'}} -+-+- {json.dumps(FORBIDDEN)}"
    assert refusal_of(0, text) == (403, json.dumps(FORBIDDEN))
    assert refusal_of(404, "gone") == (404, "gone")


def test_the_log_of_a_pod_that_is_down_is_that_of_its_last_run() -> None:
    assert log_of(pod()) == log_of(pod(restarts=3, last=ENDED)) == log_of(pod(state=ENDED)) == Log("decode")
    log = log_of(pod(state=LOOP, last=KILLED, restarts=2))
    assert (log.container, log.previous) == ("decode", True) and "CrashLoopBackOff" in log.note and "status -9" in log.note


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            pod(state={"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}}),
            "ImagePullBackOff Back-off pulling image",
        ),
        (unplaced("x", "0/2 nodes are available"), "0/2 nodes are available"),
        (unplaced("x"), "Pending"),
    ],
)
def test_a_pod_in_which_nothing_has_run_has_no_log(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BatonError, match=said) as refused:
        log_of(given)
    assert refused.value.reason is Reason.INVALID_FIELD


def test_a_door_is_found_by_its_name() -> None:
    assert port_of(pod(), "health") == 8081 and port_of(pod(), "http") is None


@pytest.mark.parametrize("text", ["models", "models/", "/r", "a/b/c", "Models/r", "models/r --set x", "-a/r", "models/r\n"])
def test_what_names_no_release_is_not_taken_for_one(text: str) -> None:
    assert parse_release(text) is None


def test_a_release_is_named_by_its_namespace_and_name() -> None:
    assert parse_release("models/r-1.2") == ReleaseName("models", "r-1.2") and str(RELEASE) == "models/r"
    assert RELEASE.selector == "app.kubernetes.io/instance=r,app.kubernetes.io/part-of=baton"
