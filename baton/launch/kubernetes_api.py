"""The API of Kubernetes with the rights of whoever calls: what a kubeconfig, or the service account of a pod, gives them.

Every call blocks, with a deadline, and answers with plain JSON: a server may be newer than the package, whose classes refuse what they do
not know. Every refusal becomes a BatonError that says which right is missing. `kubernetes` is loaded only by `connect`.
"""

import json
import logging
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from baton.cluster.config import ConfigError
from baton.cluster.errors import BatonError, Reason, invalid
from baton.launch.pods import PART_OF, Object, ReleaseName, explain, release_of, role_of

log = logging.getLogger(__name__)
CALL_S = 10.0
LOG_S = 60.0
CLOSE_S = 2.0
MERGE = "application/merge-patch+json"


def connect(context: str | None = None) -> "Api":
    """`context`: of the kubeconfig; its current one by default. Raises ConfigError."""
    try:
        import urllib3  # through which `kubernetes` asks
        from kubernetes import client, config, stream
        from kubernetes.stream import ws_client
    except ImportError as error:
        raise ConfigError(f"--kubernetes needs the package `kubernetes` ({error}): pip install 'baton-llm[k8s]'") from None
    settings = client.Configuration()
    try:
        try:
            config.load_kube_config(os.environ.get("KUBECONFIG") or None, context, settings)
        except config.ConfigException:
            if context is not None:
                raise
            with_own_account(config, settings)
    except (config.ConfigException, OSError, ValueError) as error:
        raise ConfigError(f"kubeconfig: {error}") from None
    settings.retries = False  # otherwise a deadline would be several
    ws_client.PortForward = that_closes(ws_client.PortForward)
    return Api(client, stream.portforward, settings, (urllib3.exceptions.HTTPError, OSError, ValueError))


def that_closes(tunnel: Any) -> Any:
    """A class of port-forwards whose connections end with their thread. The package's own, when the API server hangs up, can die with a
    traceback and leave its side of a connection open, so whoever reads there waits forever."""
    if getattr(tunnel, "closes", False):
        return tunnel

    class Closing(tunnel):  # type: ignore[misc]
        closes = True

        def __init__(self, *how: Any) -> None:
            self.ended = threading.Event()
            super().__init__(*how)  # starts the thread

        def _proxy(self) -> None:
            try:
                super()._proxy()
            except Exception as error:
                log.debug("a port-forward broke: %s", error)
                self.websocket.shutdown()
            finally:
                for port in self.local_ports.values():
                    port.python.close()
                self.ended.set()

    return Closing


def with_own_account(config: Any, settings: Any) -> None:
    """Connects from a pod that has a service account. Raises the error of the kubeconfig anywhere else."""
    try:
        config.load_incluster_config(client_configuration=settings)
    except config.ConfigException:
        raise config.ConfigException("there is none (KUBECONFIG, ~/.kube/config), and this is no pod with a service account") from None


class Api:
    def __init__(self, client: Any, portforward: Any, settings: Any, failures: tuple[type[Exception], ...]) -> None:
        """`failures`: the exceptions of a call that got no answer."""
        self._client = client
        self._portforward = portforward
        self._settings = settings
        self._failures = failures
        self._tunnels: list[Any] = []
        shared = client.ApiClient(settings)
        self._core, self._apps = client.CoreV1Api(shared), client.AppsV1Api(shared)

    def close(self) -> None:
        """Waits a moment for the threads of port-forwards whose connections are closed."""
        deadline = time.monotonic() + CLOSE_S
        for tunnel in self._tunnels:
            tunnel.ended.wait(max(0.0, deadline - time.monotonic()))

    @property
    def server(self) -> str:
        return str(self._settings.host)

    def release(self, release: ReleaseName) -> dict[str, Object]:
        """Role → Deployment. Raises INVALID_FIELD if there is no such release; the error names those that the caller may see."""
        found = {role_of(each): each for each in self.deployments(release.namespace, release.selector)}
        if "router" not in found:
            others = ", ".join(self._visible(release.namespace)) or "none that you may see"
            raise invalid("kubernetes", f"there is no release {release} of Baton at {self.server}; there are: {others}")
        return found

    def _visible(self, namespace: str) -> list[str]:
        found: list[Object] = []
        with suppress(BatonError):
            found = self.deployments(namespace, PART_OF)
        with suppress(BatonError):
            found = self._deployments_everywhere(PART_OF)
        return sorted({release_of(each) for each in found})

    def pods(self, namespace: str, selector: str) -> list[Object]:
        return self._items("pods", namespace, self._core.list_namespaced_pod, namespace, label_selector=selector)

    def deployments(self, namespace: str, selector: str) -> list[Object]:
        return self._items("deployments.apps", namespace, self._apps.list_namespaced_deployment, namespace, label_selector=selector)

    def _deployments_everywhere(self, selector: str) -> list[Object]:
        """The deployments of all namespaces. Few callers have the right to list them."""
        return self._items("deployments.apps", "", self._apps.list_deployment_for_all_namespaces, label_selector=selector)

    def scale(self, namespace: str, deployment: str, size: int, version: str | None = None) -> None:
        """`version`: of the Deployment, which must still have it. Raises Conflict if it has not."""
        what = ("patch", f"deployments.apps/scale in namespace {namespace}")
        body: Object = {"spec": {"replicas": size}} | ({"metadata": {"resourceVersion": version}} if version else {})
        self._call(*what, self._apps.patch_namespaced_deployment_scale, deployment, namespace, body, _content_type=MERGE)

    def annotate_pod(self, namespace: str, pod: str, annotations: dict[str, str | None]) -> None:
        """None removes one."""
        body = {"metadata": {"annotations": annotations}}
        self._call("patch", f"pods in namespace {namespace}", self._core.patch_namespaced_pod, pod, namespace, body, _content_type=MERGE)

    def log(self, namespace: str, pod: str, container: str, **how: Any) -> Generator[bytes, None, None]:
        """Pieces of a log. `how`: `tail_lines`, `previous`, `follow`, which has no deadline."""
        what = ("get", f"pods/log in namespace {namespace}")
        patience = (CALL_S, 365 * 86400.0) if how.get("follow") else LOG_S
        answer = self._ask(*what, self._core.read_namespaced_pod_log, pod, namespace, container=container, _request_timeout=patience, **how)
        with self._told(*what):
            yield from answer.stream(1 << 16)

    def forward(self, namespace: str, pod: str, port: int) -> socket.socket:
        """A connection to a port of a pod. Its threads end when it is closed."""
        made: queue.Queue[Any] = queue.Queue()

        def open_it() -> None:
            try:
                core = self._client.CoreV1Api(self._client.ApiClient(self._settings))  # `portforward` changes its client meanwhile
                made.put(self._portforward(core.connect_get_namespaced_pod_portforward, pod, namespace, ports=str(port)))
            except Exception as error:
                made.put(error)

        threading.Thread(target=open_it, name=f"open {pod}:{port}", daemon=True).start()  # it has no deadline of its own
        what = ("get and create", f"pods/portforward in namespace {namespace}")
        with self._told(*what):
            try:
                answer = made.get(timeout=CALL_S)
            except queue.Empty:
                raise TimeoutError(f"no answer within {CALL_S:g} s") from None
            if isinstance(answer, Exception):
                raise answer
            self._tunnels = [tunnel for tunnel in self._tunnels if not tunnel.ended.is_set()] + [answer]
            opened: socket.socket = answer.socket(port)
            return opened

    def _items(self, resource: str, namespace: str, method: Any, *where: str, **how: Any) -> list[Object]:
        answer = self._call("list", f"{resource} in {f'namespace {namespace}' if namespace else 'all namespaces'}", method, *where, **how)
        items: list[Object] = answer["items"]
        return items

    def _call(self, verb: str, resource: str, method: Any, *what: Any, **how: Any) -> Object:
        answer = self._ask(verb, resource, method, *what, _request_timeout=CALL_S, **how)
        with self._told(verb, resource):
            value: Object = json.loads(answer.read())
            return value

    def _ask(self, verb: str, resource: str, method: Any, *what: Any, **how: Any) -> Any:
        with self._told(verb, resource):
            answer = method(*what, _preload_content=False, **how)
            answer = getattr(answer, "response", answer)
            if not 200 <= answer.status < 300:
                raise explain(verb, resource, answer.status, answer.read().decode(errors="replace"))
            return answer

    @contextmanager
    def _told(self, verb: str, resource: str) -> Iterator[None]:
        """Turns whatever goes wrong with a call into a BatonError."""
        try:
            yield
        except self._client.ApiException as error:
            status, body = refusal_of(error.status or 0, str(error.body or error.reason or ""))
            raise explain(verb, resource, status, body) from None
        except self._failures as error:
            raise BatonError(Reason.UNREACHABLE, f"the API server {self.server} does not answer: {error}") from None


def refusal_of(status: int, text: str) -> tuple[int, str]:
    """Status and body of a refusal. That of a port-forward has them in its text: Handshake status 403 Forbidden -+-+- {…} -+-+- body."""
    found = re.search(r"Handshake status (\d+) ", text)
    return (int(found[1]), text.rpartition("-+-+-")[2].strip()) if found else (status, text)
