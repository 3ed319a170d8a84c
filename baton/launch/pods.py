"""What the objects of Kubernetes say about a release, as its API writes them (JSON). It decides; `kubernetes_launcher` asks and acts."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from baton.cluster.errors import BatonError, Reason, invalid
from baton.launch.launcher import ProcessState, State

ROLES = ("router", "prefill", "decode")
PART_OF = "app.kubernetes.io/part-of=baton"
INSTANCE, COMPONENT = "app.kubernetes.io/instance", "app.kubernetes.io/component"
OWNER = "baton/scaling"  # on a Deployment: who chooses its number of pods
COST = "controller.kubernetes.io/pod-deletion-cost"  # pods of the lowest cost go first; those without the annotation have 0
LEAST_COST = -(2**31)
BY_SIGNAL = 128  # what a container runtime adds to the number of a signal
Object = dict[str, Any]
Load = tuple[float, ...]  # of a worker, the weightiest number first; compared as a whole


@dataclass(frozen=True, slots=True)
class ReleaseName:
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def selector(self) -> str:
        return f"{INSTANCE}={self.name},{PART_OF}"

    def uninstall(self) -> str:
        return f"helm -n {self.namespace} uninstall {self.name}"

    def upgrade(self, *values: str) -> str:
        return f"helm -n {self.namespace} upgrade {self.name} deploy/helm/baton --reuse-values" + "".join(
            f" --set {each}" for each in values
        )


def parse_release(text: str) -> ReleaseName | None:
    """NAMESPACE/RELEASE; None for anything else."""
    found = re.fullmatch(r"([a-z0-9]([a-z0-9-]*[a-z0-9])?)/([a-z0-9]([a-z0-9.-]*[a-z0-9])?)", text)
    return ReleaseName(found[1], found[3]) if found else None


def name_of(thing: Object) -> str:
    name: str = thing["metadata"]["name"]
    return name


def role_of(thing: Object) -> str:
    role: str = thing["metadata"].get("labels", {}).get(COMPONENT, "")
    return role


def release_of(deployment: Object) -> str:
    meta = deployment["metadata"]
    return f"{meta['namespace']}/{meta['labels'][INSTANCE]}"


def size_of(deployment: Object) -> int:
    size: int = deployment["spec"].get("replicas", 1)
    return size


def version_of(thing: Object) -> str:
    """Changes with every change of the object."""
    version: str = thing["metadata"]["resourceVersion"]
    return version


def owner_of(deployment: Object) -> str:
    """Who chooses its number of pods; empty if it does not say."""
    owner: str = deployment["metadata"].get("annotations", {}).get(OWNER, "")
    return owner


def selector_of(deployment: Object) -> str:
    return ",".join(f"{key}={value}" for key, value in sorted(deployment["spec"]["selector"]["matchLabels"].items()))


def is_leaving(pod: Object) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def has_ended(pod: Object) -> bool:
    """Whether it is over for good: its Deployment no longer counts it, and only its object is left (a pod that was evicted, say)."""
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def counts(pod: Object) -> bool:
    """Whether its Deployment counts it."""
    return not is_leaving(pod) and not has_ended(pod)


def is_ready(pod: Object) -> bool:
    return _condition(pod, "Ready").get("status") == "True"


def is_placed(pod: Object) -> bool:
    return bool(pod["spec"].get("nodeName"))


def grace_s(pod: Object) -> float:
    """The time from the order to stop to the end."""
    return float(pod["spec"].get("terminationGracePeriodSeconds") or 30)


def port_of(pod: Object, name: str) -> int | None:
    ports = (port for container in pod["spec"]["containers"] for port in container.get("ports", ()))
    return next((port["containerPort"] for port in ports if port.get("name") == name), None)


def process_of(pod: Object) -> ProcessState:
    """`backoff`: nothing runs in it, yet or again. There is no pid: it would be one inside the pod."""
    status = _container(pod)
    current, before = status.get("state", {}), status.get("lastState", {})
    state: State = "exited" if has_ended(pod) else "stopping" if is_leaving(pod) else "running" if "running" in current else "backoff"
    ended = current.get("terminated") or before.get("terminated")
    return ProcessState(
        name_of(pod),
        role_of(pod),
        None,
        state,
        status.get("restartCount", 0),
        _exit_of(ended) if ended else None,
        pod["spec"].get("nodeName", ""),
    )


def _exit_of(terminated: Object) -> int:
    code: int = terminated["exitCode"]
    return BY_SIGNAL - code if code > BY_SIGNAL else code


def idlest(pods: Iterable[Object], loads: Mapping[str, Load], count: int) -> list[str]:
    """Names of the `count` pods that should go. Kubernetes first removes those that are not ready, whatever their cost, so these count as
    the idlest; then those whose load nobody knows; then by load, and of equal ones the youngest."""
    youngest_first = sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")), reverse=True)
    by_load = sorted(youngest_first, key=lambda pod: (is_placed(pod), is_ready(pod), loads.get(name_of(pod), ())))
    return [name_of(pod) for pod in by_load[:count]]


def cost_of(pod: Object) -> str | None:
    """What it would cost to remove it, as it was given; None: nobody has said."""
    cost: str | None = pod["metadata"].get("annotations", {}).get(COST)
    return cost


def cost_to_go_first(pods: Iterable[Object]) -> int:
    """A deletion cost below that of every pod. Only those that go get it, so that nothing stale is left behind."""
    return max(min((0, *(int(cost_of(pod) or 0) for pod in pods))) - 1, LEAST_COST)


def obstacle(deployment: Object, fresh: Iterable[Object]) -> str:
    """Why pods that were asked for have no place, in the words of Kubernetes; empty if it has said nothing."""
    failure = _condition(deployment, "ReplicaFailure")  # a quota, for example
    waiting = [failure] if failure.get("status") == "True" else []
    waiting += [placed for pod in fresh if (placed := _condition(pod, "PodScheduled")).get("status") == "False"]
    return next((str(condition.get("message") or condition.get("reason", "")) for condition in waiting), "")


def check_owner(release: ReleaseName, deployment: Object, count: int) -> None:
    """Raises INVALID_FIELD unless `baton scale` owns the size of the pool; the error names the owner and the way."""
    role, owner = role_of(deployment), owner_of(deployment)
    if owner == "baton":
        return
    hand_over = f"or hand it over with `{release.upgrade(f'{role}.scaling=baton')}`"
    match owner:
        case "values" if role == "router":
            way = f"the chart's values own it: `{release.upgrade(f'router.replicas={count}')}`"
        case "values":
            way = f"the chart's values own it: `{release.upgrade(f'{role}.replicas={count}')}`, {hand_over}"
        case "hpa" | "keda":
            limits = release.upgrade(f"{role}.autoscale.min=MIN", f"{role}.autoscale.max=MAX")
            way = f"{owner} owns it: change its limits with `{limits}`, {hand_over}"
        case _:
            way = f"its Deployment does not say who owns it: bring the release up to date with `{release.upgrade()}`"
    raise invalid("role", f"the size of {role} is not for `baton scale`; {way}")


class Conflict(BatonError):
    """The object was changed by somebody else since it was read."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.INVALID_FIELD, message)


def explain(verb: str, resource: str, status: int, body: str) -> BatonError:
    """An answer of the API server that is a refusal. `resource`: as its rights call it, with the namespace."""
    said = _said(body)
    match status:
        case 401:
            return BatonError(
                Reason.UNAUTHENTICATED, f"the API server does not know you ({said}); renew the credentials of your kubeconfig"
            )
        case 403 if "exceeded quota" in said:
            return BatonError(Reason.SATURATED, said)
        case 403:
            return BatonError(Reason.FORBIDDEN, f"you lack the right to {verb} {resource}: {said}")
        case 409:
            return Conflict(f"cannot {verb} {resource}: {said}")
        case 404 | 422 | 400:
            return invalid("kubernetes", f"cannot {verb} {resource}: {said}")
        case _:
            return BatonError(Reason.UNREACHABLE, f"the API server cannot {verb} {resource} ({status}): {said}")


def _said(body: str) -> str:
    try:
        answer = json.loads(body)
    except ValueError:
        return body.strip()[:500] or "it gives no reason"
    return str(answer.get("message") or answer.get("reason") or body) if isinstance(answer, dict) else body


@dataclass(frozen=True, slots=True)
class Log:
    """Which log of a pod can be read."""

    container: str
    previous: bool = False  # of the run before this one
    note: str = ""  # for the reader


def log_of(pod: Object) -> Log:
    """Raises INVALID_FIELD if nothing has run in the pod, with the reason that Kubernetes gives."""
    container, status = _own(pod), _container(pod)
    state, before = status.get("state", {}), status.get("lastState", {}).get("terminated")
    if "running" in state or "terminated" in state:
        return Log(container)
    waiting = state.get("waiting", {})
    if before:
        why = waiting.get("reason", "nothing runs in it")
        return Log(container, True, f"{name_of(pod)} is down ({why}); this is the log of its run that ended with status {_exit_of(before)}")
    reason = " ".join(filter(None, (waiting.get("reason"), waiting.get("message") or _condition(pod, "PodScheduled").get("message"))))
    raise invalid("name", f"{name_of(pod)} has not run yet: {reason or pod.get('status', {}).get('phase', 'unknown')}")


def _own(pod: Object) -> str:
    """The container that is Baton's: the chart makes one, named by its role, but a mesh may add others."""
    names = [container["name"] for container in pod["spec"]["containers"]]
    return role_of(pod) if role_of(pod) in names else str(names[0])


def _container(pod: Object) -> Object:
    own = _own(pod)
    given: list[Object] = pod.get("status", {}).get("containerStatuses") or []
    return next((status for status in given if status["name"] == own), {})


def _condition(thing: Object, kind: str) -> Object:
    given: list[Object] = thing.get("status", {}).get("conditions") or []
    return next((condition for condition in given if condition["type"] == kind), {})
