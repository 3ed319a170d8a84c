"""A release from outside, with the rights of a kubeconfig: the contract of all launchers, the commands, and what they refuse."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from kube import ON_A_CLUSTER, Kube, Release, namespace
from pool_contract import CONTRACT, Bench, answering, states, until

from baton.client import Client
from baton.cluster.errors import BatonError, Reason
from baton.launch.kubernetes_api import connect
from baton.launch.kubernetes_launcher import KubernetesLauncher
from baton.launch.launcher import Template
from baton.launch.pods import Load, ReleaseName, is_ready, name_of
from baton.launch.port_forward import reach

pytestmark = [*ON_A_CLUSTER, pytest.mark.timeout(2400)]
SIZES = ("decode.scaling=baton", "decode.replicas=1", "prefill.replicas=1", "router.replicas=1", "common.env.OMP_NUM_THREADS=1")
SMALL = ("decode.resources.requests.cpu=100m", "decode.resources.requests.memory=256Mi", "prefill.resources.requests.cpu=100m")
SET = tuple(part for value in (*SIZES, *SMALL) for part in ("--set", value))
HEALTH = 8081
ASK = b"GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
KILL = "kill -KILL $(cat /proc/1/task/1/children)"  # the process, whose parent begins the container


@pytest.fixture(scope="module")
def release(kube: Kube) -> Iterator[Release]:
    with namespace(kube, "baton-outside") as name, pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", kube.env["KUBECONFIG"])
        made = Release(kube, "r", name)
        made.install(*SET)
        yield made
        made.helm("uninstall", "r", "--wait")


def named(release: Release) -> ReleaseName:
    return ReleaseName(release.namespace, release.name)


def baton(release: Release, *arguments: str, env: Mapping[str, str] = {}, timeout: float = 240) -> tuple[int, str, str]:
    command = [sys.executable, "-P", "-m", "baton", *arguments, "--kubernetes", f"{release.namespace}/{release.name}"]
    done = subprocess.run(command, env={**release.kube.env, **env}, capture_output=True, text=True, timeout=timeout)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


class ReleaseBench:
    """The decode pool of a release. `busy`: names of pods that shrinking should spare.

    A new pod counts as answering only when Kubernetes calls it ready, up to 4 s after the pod itself: whatever their load, it takes those
    first that it does not call ready."""

    role = "decode"
    patience_s = 300.0

    def __init__(self, release: Release) -> None:
        self.busy: list[str] = []
        self.manager = KubernetesLauncher(named(release), loads=self.loads, place_timeout_s=20.0)
        self._release = release
        self._api = connect()
        self._ready: set[str] = set()

    def loads(self) -> Mapping[str, Load]:
        return {name: (1.0,) for name in self.busy}

    async def begin(self, count: int) -> None:
        await self.manager.start()
        self._release.kube.kubectl("-n", self._release.namespace, "delete", "resourcequota", "few", "--ignore-not-found")
        if any(state.restarts for state in (await states(self)).values()):
            await self.manager.resize(self.role, 0)
        await self.manager.resize(self.role, count)
        for name in await states(self):
            await answering(self, name)
        self.busy = list(await states(self))[:1]

    async def ask(self, name: str) -> object:
        return await asyncio.to_thread(self._ask, name)

    def _ask(self, name: str) -> str:
        with closing(self._api.forward(self._release.namespace, name, HEALTH)) as wire:
            wire.settimeout(20)
            wire.sendall(ASK)
            said = b"".join(iter(lambda: wire.recv(4096), b""))
        assert b" 200 " in said, said
        [pod] = [pod for pod in self._release.pods(self.role) if name_of(pod) == name]
        assert name in self._ready or is_ready(pod)
        self._ready.add(name)
        identity: str = pod["status"]["containerStatuses"][0]["containerID"]
        return identity

    async def end(self, name: str) -> None:
        self._release.kube.kubectl("-n", self._release.namespace, "exec", name, "--", "sh", "-c", KILL, check=False)

    async def fill(self) -> None:
        kubectl = self._release.kube.kubectl
        here = json.loads(kubectl("-n", self._release.namespace, "get", "pods", "-o", "json"))["items"]
        kubectl("-n", self._release.namespace, "create", "quota", "few", f"--hard=pods={len(here)}")
        found = ("-n", self._release.namespace, "get", "quota", "few", "-o", "json")
        self._release.kube.wait(lambda: json.loads(kubectl(*found)).get("status", {}).get("used"))

    def template(self) -> Template:
        return Template(self.role, ("decode_worker",))


@pytest.mark.parametrize("behaviour", CONTRACT, ids=lambda behaviour: behaviour.__name__)
async def test_the_contract(behaviour: Callable[[Bench], Awaitable[None]], release: Release) -> None:
    await behaviour(ReleaseBench(release))


async def test_shrinking_takes_the_idlest_and_leaves_no_mark_behind(release: Release) -> None:
    """Without a mark, Kubernetes would take the youngest."""
    bench = ReleaseBench(release)
    await bench.begin(1)
    [oldest] = await states(bench)
    await bench.manager.resize("decode", 3)
    for name in await states(bench):
        await answering(bench, name)
    bench.busy = [name for name in await states(bench) if name != oldest]
    [ended] = await bench.manager.resize("decode", 2)
    assert (ended.name, ended.state) == (oldest, "exited") and set(await states(bench)) == set(bench.busy)
    assert all("pod-deletion-cost" not in str(pod["metadata"].get("annotations")) for pod in release.pods("decode"))


async def test_it_neither_starts_nor_ends_a_release(release: Release) -> None:
    manager = ReleaseBench(release).manager
    await manager.start()
    for attempt, way in ((manager.stop(), "helm -n baton-outside uninstall r"), (manager.resize("router", 2), "--set router.replicas=2")):
        with pytest.raises(BatonError, match=way) as refused:
            await attempt
        assert refused.value.reason is Reason.INVALID_FIELD
    assert len(release.pods("router")) == 1


async def test_a_pod_that_no_node_takes_is_refused_in_the_schedulers_words(kube: Kube, release: Release) -> None:
    """Only Redis runs of this release; its one decode worker waits for a node of 64 cores."""
    few = ("router.replicas=0", "prefill.replicas=0", "decode.scaling=baton", "decode.resources.requests.cpu=64")
    big = Release(kube, "big", release.namespace)
    big.helm("install", "big", "deploy/helm/baton", *(part for value in few for part in ("--set", value)), *image(kube))
    try:
        manager = KubernetesLauncher(named(big), place_timeout_s=5.0)
        await manager.start()
        kube.wait(lambda: big.pods("decode"))  # the cluster makes it a moment after the release
        waiting = await manager.processes()
        assert [(state.role, state.state, state.node) for state in waiting] == [("decode", "backoff", "")]
        with pytest.raises(BatonError, match=r"no room for 1 processes: 0/2 nodes are available: .*Insufficient cpu") as refused:
            await manager.resize("decode", 2)
        assert refused.value.reason is Reason.SATURATED
        assert [state.name for state in await manager.processes()] == [waiting[0].name] and (await manager.sizes())["decode"] == 1
    finally:
        big.helm("uninstall", "big", "--wait")


def image(kube: Kube) -> tuple[str, str]:
    repository, _, tag = kube.image.rpartition(":")
    return "--set", f"image.repository={repository},image.tag={tag},image.pullPolicy=Never"


def test_commands_reach_a_router_through_the_api_server(release: Release) -> None:
    rc, out, err = baton(release, "generate", "Once upon a time there was a fox.", "--max-tokens", "8", "--json")
    assert rc == 0, err
    answer = json.loads(out)
    rc, out, err = baton(release, "status", "--json")
    workers = {worker["name"] for worker in json.loads(out)["workers"]}
    assert workers == {name_of(pod) for role in ("prefill", "decode") for pod in release.pods(role)}
    rc, out, err = baton(release, "trace", answer["request_id"], "--json")
    assert json.loads(out)["request_id"] == answer["request_id"]
    rc, out, err = baton(release, "logs", name_of(release.pods("router")[0]), "--lines", "3")
    assert rc == 0 and 0 < len(out.splitlines()) <= 3, err
    [worker] = map(name_of, release.pods("prefill"))
    for serving in (("prefill", "decode"), ("prefill",)):
        rc, out, err = baton(release, "roles", worker, *serving)
        assert rc == 0 and f"serves {', '.join(serving)}" in out, err


async def test_scale_spares_the_worker_that_a_router_calls_busy(release: Release) -> None:
    """The older one is idle, so without the load Kubernetes would take the other one and its request."""
    bench = ReleaseBench(release)
    await bench.begin(1)
    [idle] = await states(bench)
    rc, out, err = await asyncio.to_thread(baton, release, "scale", "--decode", "2")
    assert (rc, out.strip()) == (0, "prefill 1, decode 2"), err
    for name in await states(bench):
        await answering(bench, name)
    [busy] = set(await states(bench)) - {idle}

    async def known() -> bool:
        return (await asyncio.to_thread(baton, release, "roles", idle, "prefill"))[0] == 0

    await until(known, bench.patience_s)
    quiet = threading.Event()
    with closing(reach(named(release), None, "grpc")) as forward, Client(forward.address) as client:
        asking = [asyncio.create_task(asyncio.to_thread(ask_until, client, quiet)) for _ in range(4)]
        try:
            rc, out, err = await asyncio.to_thread(baton, release, "scale", "--decode", "1")
        finally:
            quiet.set()
        answers = [answer for each in asking for answer in await each]
    assert (rc, out.strip()) == (0, "prefill 1, decode 1"), err
    assert f"{idle} is gone" in err and "no router tells" not in err and set(await states(bench)) == {busy}
    assert len(answers) >= 4 and all(answer["decode"] == busy and answer["retries"] == 0 for answer in answers)


def ask_until(client: Client, quiet: threading.Event) -> list[dict[str, Any]]:
    """Who answered each request."""
    answers: list[dict[str, Any]] = []
    while not quiet.is_set():
        with client.generate("Once upon a time there was a fox.", max_tokens=300, ignore_eos=True, timeout_s=120) as stream:
            for _ in stream.texts():
                pass
            answers.append(stream.result.workers)
    return answers


def test_tls_goes_through_the_port_forward_and_needs_no_name(kube: Kube, release: Release, tmp_path: Path) -> None:
    """The certificate names the service, and the address of the port-forward is nobody's."""
    made = [sys.executable, "-P", "-m", "baton", "certs", str(tmp_path)]
    subprocess.run(made, check=True, capture_output=True, timeout=60)
    files = {"tls.crt": "server.pem", "tls.key": "server.key", "ca.crt": "ca.pem"}
    given = [f"--from-file={key}={tmp_path / file}" for key, file in files.items()]
    kube.kubectl("-n", release.namespace, "create", "secret", "generic", "own", *given)
    safe = Release(kube, "safe", release.namespace)
    safe.install(*SET, "--set", "security.tlsSecret=own")
    try:
        own = ("--ca", str(tmp_path / "ca.pem"), "--cert", str(tmp_path / "client.pem"), "--key", str(tmp_path / "client.key"))
        rc, out, err = baton(safe, "status", "--json", *own)
        assert rc == 0 and len(json.loads(out)["workers"]) == 2, err
        rc, out, err = baton(safe, "generate", "Once upon a time", "--max-tokens", "4", *own)
        assert rc == 0 and out.strip(), err
        rc, out, err = baton(safe, "status", "--json", "--ca", str(tmp_path / "ca.pem"))
        assert (rc, out) == (1, ""), "without a certificate, nobody gets in"
    finally:
        safe.helm("uninstall", "safe", "--wait")


def test_what_is_not_for_baton_scale_is_refused_with_the_way(release: Release) -> None:
    rc, out, err = baton(release, "scale", "--prefill", "2")
    assert (rc, out) == (1, "") and "helm -n baton-outside upgrade r deploy/helm/baton --reuse-values --set prefill.replicas=2" in err
    with closing(reach(named(release), None, "admin")) as forward:
        command = [sys.executable, "-P", "-m", "baton", "scale", "--decode", "2", "--address", forward.address]
        done = subprocess.run(command, env=release.kube.env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "baton scale --kubernetes baton-outside/r" in done.stderr
    rc, out, err = baton(Release(release.kube, "nothing", release.namespace), "status")
    assert (rc, out) == (1, "") and "there is no release baton-outside/nothing" in err and "baton-outside/r" in err
    rc, out, err = baton(release, "logs", "nobody")
    assert (rc, out) == (1, "") and all(name_of(pod) in err for pod in release.pods("decode"))


def test_a_missing_right_is_named(release: Release, tmp_path: Path) -> None:
    kubectl, space = release.kube.kubectl, release.namespace
    kubectl("-n", space, "create", "serviceaccount", "eve")
    config = yaml.safe_load(kubectl("config", "view", "--raw", "--minify", "--flatten"))
    config["users"][0]["user"] = {"token": kubectl("-n", space, "create", "token", "eve").strip()}
    file = tmp_path / "kubeconfig"
    file.write_text(yaml.safe_dump(config))
    asked: list[tuple[tuple[str, ...], str, str]] = [
        (("status",), "", "list deployments.apps in namespace baton-outside"),
        (("status",), "get,list deployments.apps,pods", "pods/portforward in namespace baton-outside"),
        (("logs", name_of(release.pods("router")[0])), "", "get pods/log in namespace baton-outside"),
        (("scale", "--decode", "5"), "", "patch deployments.apps/scale in namespace baton-outside"),
    ]
    for number, (command, grant, missing) in enumerate(asked):
        if grant:
            verbs, resources = grant.split()
            kubectl("-n", space, "create", "role", f"eve-{number}", f"--verb={verbs}", f"--resource={resources}")
            kubectl("-n", space, "create", "rolebinding", f"eve-{number}", f"--role=eve-{number}", f"--serviceaccount={space}:eve")
        rc, out, err = baton(release, *command, env={"KUBECONFIG": str(file)})
        assert (rc, out) == (1, "") and "FORBIDDEN" in err and missing in err, err


async def test_the_log_of_a_pod_that_is_down_is_that_of_its_last_run(release: Release) -> None:
    bench = ReleaseBench(release)
    await bench.begin(2)
    victim = sorted(set(await states(bench)) - set(bench.busy))[0]

    async def said() -> str:
        """What the command says of a pod that is down; empty if it was up again by then. Each pause is longer than the last."""
        state = (await states(bench))[victim]
        if state.state == "running":
            await bench.ask(victim)  # it has written its log by then
            await bench.end(victim)
        if state.state != "backoff" or not state.restarts:
            return ""
        rc, out, err = await asyncio.to_thread(baton, release, "logs", victim, "--lines", "5")
        return err if rc == 0 and out else ""

    assert "its run that ended with status -9" in await until(said, bench.patience_s)
