"""An API server of Kubernetes over HTTP, as far as a release's two pools need it, with the controllers' work done at once: pods come and
go with the size of their Deployment, those that are not ready first, then by their deletion cost, then the youngest."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

COST = "controller.kubernetes.io/pod-deletion-cost"
NAMESPACE, RELEASE = "models", "baton"


@dataclass
class KubeApi:
    """`full`: new pods find no node. `denied`: verb and resource that the caller has no right to. `conflicts`: so many writes of a size
    come just after another change of the Deployment. `unready`: pods that go first, as Kubernetes has seen meanwhile. `late`: the
    controllers do nothing for now."""

    sizes: dict[str, int]
    owner: str = "baton"
    full: bool = False
    down: bool = False
    denied: set[tuple[str, str]] = field(default_factory=set)
    conflicts: int = 0
    asked: list[tuple[str, str, str]] = field(default_factory=list)  # verb, resource, name
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    unready: set[str] = field(default_factory=set)
    late: bool = False

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self._numbers, self._versions = count(), count(1)
        self.versions = dict.fromkeys(self.sizes, "0")
        for role in self.sizes:
            self._settle(role)

    def names(self, role: str) -> list[str]:
        return sorted(name for name, pod in self.pods.items() if pod["metadata"]["labels"]["app.kubernetes.io/component"] == role)

    def resize(self, role: str, size: int) -> None:
        """As anybody may."""
        with self.lock:
            self.sizes[role] = size
            self.versions[role] = str(next(self._versions))
            self._settle(role)

    def answer(self, verb: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self.lock:
            found = re.fullmatch(rf"/(?:api|apis/apps)/v1/namespaces/{NAMESPACE}/(\w+)(?:/([\w.-]+))?(?:/(\w+))?", path)
            if not found:
                return 404, {"message": f"no {path}"}
            resource, name = "/".join(filter(None, (found[1], found[3]))), found[2] or ""
            self.asked.append((verb, resource, name))
            if (verb, resource) in self.denied:
                return 403, {"message": f"{resource} is forbidden"}
            match verb, resource:
                case "list", "deployments":
                    return 200, {"items": [self._deployment(role) for role in self.sizes]}
                case "list", "pods":
                    return 200, {"items": list(self.pods.values())}
                case "patch", "deployments/scale":
                    return self._scale(name.rpartition("-")[2], body)
                case "patch", "pods" if name not in self.pods:
                    return 404, {"message": f'pods "{name}" not found'}
                case "patch", "pods":
                    notes = self.pods[name]["metadata"]["annotations"]
                    notes.update(body["metadata"]["annotations"])
                    return 200, self.pods[name]
            return 405, {"message": f"no {verb} of {resource}"}

    def _scale(self, role: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self.conflicts:
            self.conflicts -= 1
            self.versions[role] = str(next(self._versions))
        if body.get("metadata", {}).get("resourceVersion", self.versions[role]) != self.versions[role]:
            return 409, {"message": "the object has been modified"}
        self.resize(role, body["spec"]["replicas"])
        return 200, {"spec": body["spec"]}

    def _settle(self, role: str) -> None:
        there = [self.pods[name] for name in self.names(role)]
        if self.late:
            return
        for _ in range(self.sizes[role] - len(there)):
            self._create(role)
        order = sorted(there, key=lambda pod: (pod["metadata"]["name"] not in self.unready, first_to_go(pod)))
        for pod in order[: max(0, len(there) - self.sizes[role])]:
            del self.pods[pod["metadata"]["name"]]

    def _create(self, role: str) -> None:
        number = next(self._numbers)
        name = f"{RELEASE}-{role}-5d{number:03}"
        condition = {"type": "PodScheduled", "status": "False", "message": "0/2 nodes are available"}
        self.pods[name] = {
            "number": number,
            "metadata": {
                "name": name,
                "namespace": NAMESPACE,
                "labels": {"app.kubernetes.io/component": role},
                "annotations": {},
                "creationTimestamp": f"2026-01-01T00:00:{number % 60:02}Z",
            },
            "spec": {"containers": [{"name": role}], "terminationGracePeriodSeconds": 1} | ({} if self.full else {"nodeName": "node1"}),
            "status": {"conditions": [condition if self.full else {"type": "Ready", "status": "True"}]},
        }

    def _deployment(self, role: str) -> dict[str, Any]:
        labels = {"app.kubernetes.io/component": role, "app.kubernetes.io/instance": RELEASE}
        return {
            "metadata": {
                "name": f"{RELEASE}-{role}",
                "namespace": NAMESPACE,
                "labels": labels,
                "annotations": {"baton/scaling": self.owner if role != "router" else "values"},
                "resourceVersion": self.versions[role],
            },
            "spec": {"replicas": self.sizes[role], "selector": {"matchLabels": labels}},
            "status": {},
        }


def first_to_go(pod: dict[str, Any]) -> tuple[bool, int, int]:
    return bool(pod["spec"].get("nodeName")), int(pod["metadata"]["annotations"].get(COST) or 0), -pod["number"]


@contextmanager
def served(api: KubeApi, folder: Path) -> Iterator[Path]:
    """Yields a kubeconfig for it."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _do(self, verb: str) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
            status, told = (503, {"message": "down"}) if api.down else api.answer(verb, urlsplit(self.path).path, body)
            if verb == "list" and "pods" in self.path:
                role = re.search(r"component%3D(\w+)", self.path)
                assert role is not None
                told = {"items": [api.pods[name] for name in api.names(role[1])]} if status == 200 else told
            data = json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self._do("list")

        def do_PATCH(self) -> None:
            self._do("patch")

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    file = folder / "kubeconfig"
    file.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "it",
                "clusters": [{"name": "it", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
                "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
                "users": [{"name": "it", "user": {}}],
            }
        )
    )
    try:
        yield file
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
