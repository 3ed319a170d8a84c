"""A Kubernetes cluster, and releases of the chart on it.

KUBECONFIG names a cluster whose nodes have the image `BATON_TEST_KUBE_IMAGE`; kubectl and helm are on PATH (tests/kube/run sees to it).
`BATON_TEST_KUBE_NODE` names a program that is called with a node and `cut` (its network ends), `back` or `kill` (all its containers end);
the tests that need it are skipped without it.
"""

import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "baton"
IMAGE, NODE = "BATON_TEST_KUBE_IMAGE", "BATON_TEST_KUBE_NODE"
RESTRICTED = "pod-security.kubernetes.io/enforce"
HELMS = [name for name in ("helm", "helm3", "helm4") if shutil.which(name)]
ABSENT = not (os.environ.get("KUBECONFIG") and os.environ.get(IMAGE))
ON_A_CLUSTER = [pytest.mark.kube, pytest.mark.skipif(ABSENT, reason=f"no Kubernetes: KUBECONFIG and {IMAGE} are not set")]


@dataclass(frozen=True)
class Kube:
    env: dict[str, str]
    image: str
    helm: str

    @property
    def helms(self) -> list[str]:
        """Both versions, where they are told apart."""
        return [name for name in HELMS if name != "helm"] or [self.helm]

    def run(self, *command: str, timeout: float = 120, check: bool = True, given: str | None = None) -> str:
        """Raises AssertionError with what the command wrote, if it fails. `given` is its input."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=timeout, cwd=ROOT, input=given)
        assert not check or done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout + ("" if check else done.stderr)

    def kubectl(self, *arguments: str, **how: Any) -> str:
        return self.run("kubectl", *arguments, **how)

    def get(self, kind: str, namespace: str, selector: str) -> list[dict[str, Any]]:
        found = self.kubectl("-n", namespace, "get", kind, "-o", "json", "-l", selector)
        items: list[dict[str, Any]] = json.loads(found)["items"]
        return items

    def node(self, name: str, what: str) -> None:
        self.run(os.environ[NODE], name, what)

    def wait(self, condition: Callable[[], Any], within_s: float = 120) -> Any:
        deadline = time.monotonic() + within_s
        while True:
            value = None
            with suppress(AssertionError, StopIteration):
                value = condition()
            if value:
                return value
            assert time.monotonic() < deadline, "the condition was not met in time"
            time.sleep(0.5)


def start() -> Kube:
    return Kube(dict(os.environ), os.environ[IMAGE], HELMS[0])


@dataclass(frozen=True)
class Release:
    kube: Kube
    name: str
    namespace: str

    @property
    def full(self) -> str:
        return self.name if "baton" in self.name else f"{self.name}-baton"

    def pods(self, role: str) -> list[dict[str, Any]]:
        """Those that are not ending."""
        found = self.kube.get("pods", self.namespace, f"app.kubernetes.io/instance={self.name},app.kubernetes.io/component={role}")
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def ready(self, role: str) -> list[dict[str, Any]]:
        return [pod for pod in self.pods(role) if _condition(pod, "Ready").get("status") == "True"]

    def doors(self, name: str = "grpc") -> list[str]:
        """Addresses of the Service's door on each node. The Service is of type NodePort."""
        nodes = json.loads(self.kube.kubectl("get", "nodes", "-o", "json"))["items"]
        service = json.loads(self.kube.kubectl("-n", self.namespace, "get", "service", self.full, "-o", "json"))
        port = next(port["nodePort"] for port in service["spec"]["ports"] if port["name"] == name)
        addresses = [address["address"] for node in nodes for address in node["status"]["addresses"] if address["type"] == "InternalIP"]
        return [f"{address}:{port}" for address in addresses]

    def whole(self, **sizes: int) -> None:
        """Waits until each role has so many ready pods and no other ones."""

        def there() -> bool:
            return all(len(self.ready(role)) == len(self.pods(role)) == size for role, size in sizes.items())

        self.kube.wait(there, 400)  # a pod's request of a tenth of a core is all that it gets beside others that want both

    def helm(self, *arguments: str, **how: Any) -> str:
        return self.kube.run(self.kube.helm, "-n", self.namespace, *arguments, **how)

    def install(self, *arguments: str, verb: str = "install", wait: bool = True, **how: Any) -> str:
        repository, _, tag = self.kube.image.rpartition(":")
        image = ("--set", f"image.repository={repository},image.tag={tag},image.pullPolicy=Never")
        until = ("--wait", "--timeout", "300s") if wait else ()
        return self.helm(verb, self.name, str(CHART), *image, *until, *arguments, timeout=360, **how)


def _condition(pod: dict[str, Any], kind: str) -> dict[str, Any]:
    return next((found for found in pod["status"].get("conditions", []) if found["type"] == kind), {})


@contextmanager
def namespace(kube: Kube, name: str) -> Iterator[str]:
    """One that admits only pods of the profile `restricted`."""
    kube.wait(lambda: kube.kubectl("create", "namespace", name))  # one of an earlier run may still be going
    kube.kubectl("label", "namespace", name, f"{RESTRICTED}=restricted")
    try:
        yield name
    finally:
        # Its pods take seconds to go; what the controller looks for afterwards, half a minute.
        kube.kubectl("delete", "namespace", name, "--wait=false")
        kube.wait(lambda: not json.loads(kube.kubectl("-n", name, "get", "pods", "-o", "json"))["items"], 180)


@contextmanager
def forwarded(release: Release, port: int) -> Iterator[str]:
    """An address on this host that `kubectl port-forward` connects with the release."""
    command = ["kubectl", "-n", release.namespace, "port-forward", f"service/{release.full}", f":{port}"]
    with subprocess.Popen(command, env=release.kube.env, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            line = process.stdout.readline()  # Forwarding from 127.0.0.1:40321 -> 8470
            assert "127.0.0.1:" in line, line
            yield line.split()[2]
        finally:
            process.terminate()
