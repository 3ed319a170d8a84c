"""A release between topologies: what is asked of Kubernetes in which order, what is refused, and what is left behind however it ends."""

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
import typer

from baton.access.options import ClientIdentity
from baton.cluster.errors import BatonError, Reason
from baton.launch.pods import OWNER, ReleaseName
from loadtest import cli, release_cluster
from loadtest.campaign import Arm
from loadtest.hardware import ClusterError
from loadtest.options import Arms, Entrance
from loadtest.release import Release, Sizes, make_arms, sizes_of

NAME = ReleaseName("models", "r")
COLOCATED, DISAGGREGATED = make_arms(("colocated", "disaggregated"), 2, (1, 1))


def deployment(role: str, replicas: int, **more: Any) -> dict[str, Any]:
    """`more`: owner, cpu, image, config, selector."""
    container = {
        "name": role, "image": more.get("image", "baton:1"), "command": ["python", "-m", f"{role}_worker"],
        "resources": {"requests": {"cpu": more.get("cpu", "1")}},
    }  # fmt: skip
    pod = {"containers": [container], "nodeSelector": more.get("selector", {})}
    return {
        "metadata": {"name": f"r-baton-{role}", "annotations": {OWNER: more.get("owner", "values")}},
        "spec": {"replicas": replicas, "template": {"metadata": {"annotations": {"baton/config": more.get("config", role)}}, "spec": pod}},
    }


class FakeCluster:
    """Counts pods as Kubernetes would. `most`: pods of workers that there ever were at once."""

    def __init__(self, prefill: int = 1, decode: int = 1, **more: Any) -> None:
        self.sizes = {"prefill": prefill, "decode": decode}
        self.more: dict[str, dict[str, Any]] = {"prefill": more, "decode": more}
        self.asked: list[tuple[str, int]] = []
        self.most = prefill + decode
        self.hang: asyncio.Event | None = None  # of the next resize, after it has taken effect
        self.fails: BatonError | None = None
        self.ready = True
        self.refuses: BatonError | None = None

    async def deployments(self) -> Mapping[str, Any]:
        return {"router": deployment("router", 1), **{role: deployment(role, n, **self.more[role]) for role, n in self.sizes.items()}}

    async def resize(self, role: str, count: int) -> None:
        if self.fails is not None:
            raise self.fails
        self.asked.append((role, count))
        self.sizes[role] = count
        self.most = max(self.most, sum(self.sizes.values()))
        if self.hang is not None:
            hang, self.hang = self.hang, None
            hang.set()
            await asyncio.Event().wait()

    async def workers(self) -> Sizes | None:
        if self.refuses is not None:
            raise self.refuses
        return (self.sizes["prefill"], self.sizes["decode"]) if self.ready else None

    async def addresses(self) -> dict[str, str]:
        return {"grpc": "127.0.0.1:1"}

    @property
    def found(self) -> tuple[int, int]:
        return self.sizes["prefill"], self.sizes["decode"]


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Release]:
    def make(cluster: FakeCluster, told: list[str] | None = None, ready_s: float = 5.0) -> Release:
        return Release(NAME, cluster, tmp_path / "state" / "keep.json", (told if told is not None else []).append, ready_s)

    return make


async def test_arms_are_switched_without_more_pods_than_there_were_and_put_back(made: Callable[..., Release]) -> None:
    cluster, told = FakeCluster(), list[str]()
    async with made(cluster, told) as release:
        assert (release.pods.workers, str(release.pods)) == (2, "2 pods") and release.config["pod"]["image"] == "baton:1"
        for arm, asked in (
            (DISAGGREGATED, []),
            (COLOCATED, [("prefill", 0), ("decode", 2)]),
            (COLOCATED, []),
            (DISAGGREGATED, [("decode", 1), ("prefill", 1)]),
            (COLOCATED, [("prefill", 0), ("decode", 2)]),
        ):
            cluster.asked.clear()
            async with release.running(arm) as endpoints:
                assert endpoints == {"grpc": "127.0.0.1:1"} and cluster.found == sizes_of(arm)
            assert cluster.asked == asked, "what shrinks drains before the other pool grows"
    assert cluster.found == (1, 1) and cluster.most == 2
    assert "1 prefill and 1 decode; if this is killed at once" in told[0] and "--replicas 1" in told[0]
    assert told[-1] == "models/r has its 1 prefill and 1 decode again"


@pytest.mark.parametrize("when", ["during a run", "during a switch", "twice"])
async def test_an_interruption_leaves_the_topology_that_was_found(made: Callable[..., Release], when: str, tmp_path: Path) -> None:
    cluster, reached = FakeCluster(1, 2), asyncio.Event()
    colocated = make_arms(("colocated",), 3, (1, 1))[0]

    async def compare() -> None:
        async with made(cluster) as release, release.running(colocated):
            reached.set()
            await asyncio.Event().wait()

    if when == "during a switch":
        cluster.hang = reached
    running = asyncio.create_task(compare())
    await reached.wait()
    assert json.loads((tmp_path / "state" / "keep.json").read_text()) == [1, 2]
    if when == "twice":
        cluster.hang = again = asyncio.Event()
        running.cancel()
        await again.wait()  # it is putting the sizes back
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()  # as asyncio.run does after a second Ctrl-C
    else:
        running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert cluster.found == (1, 2) and not (tmp_path / "state" / "keep.json").exists()


async def test_what_a_killed_comparison_left_is_not_taken_for_the_release(made: Callable[..., Release], tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "keep.json").write_text("[1, 1]")
    cluster, told = FakeCluster(0, 2), list[str]()
    async with made(cluster, told):
        pass
    assert cluster.found == (1, 1) and "was killed and left 0 prefill and 2 decode; it had found 1 prefill and 1 decode" in told[0]
    assert not (tmp_path / "state" / "keep.json").exists()


async def test_a_release_that_changes_meanwhile_ends_the_comparison(made: Callable[..., Release]) -> None:
    changes: tuple[tuple[Callable[[FakeCluster], None], str], ...] = (
        (lambda cluster: cluster.sizes.update(decode=5), "made it 0 prefill and 5 decode instead of 0 prefill and 2 decode"),
        (lambda cluster: cluster.more.update(decode={"config": "other"}), "their configuration were changed"),
        (lambda cluster: cluster.more.update(decode={"image": "baton:2"}), "their configuration were changed"),
    )
    for change, why in changes:
        cluster = FakeCluster()
        with pytest.raises(ClusterError, match=why):
            async with made(cluster) as release, release.running(COLOCATED):
                change(cluster)
        assert cluster.found == (1, 1)


@pytest.mark.parametrize(
    ("cluster", "why"),
    [
        (FakeCluster(0, 1), "has 1 worker: a comparison needs two"),
        (FakeCluster(owner="hpa"), "prefill: hpa owns the size"),
        (FakeCluster(owner=""), "prefill: nobody known owns the size"),
    ],
)
async def test_a_release_on_which_nothing_can_be_compared_is_refused(made: Callable[..., Release], cluster: FakeCluster, why: str) -> None:
    with pytest.raises(ClusterError, match=why):
        await made(cluster).__aenter__()
    assert not cluster.asked


@pytest.mark.parametrize("more", [{"cpu": "2"}, {"image": "other"}, {"selector": {"gpu": "h100"}}])
async def test_pools_of_unlike_pods_are_refused(made: Callable[..., Release], more: dict[str, Any]) -> None:
    cluster = FakeCluster()
    cluster.more["prefill"] = more
    key = {"cpu": "resources", "selector": "nodeSelector"}.get(*more, *more)
    with pytest.raises(ClusterError, match=f"differ in {key}: a worker that changes pools"):
        await made(cluster).__aenter__()


async def test_what_kubernetes_refuses_and_pods_that_never_come_are_errors(made: Callable[..., Release]) -> None:
    cluster = FakeCluster()
    with pytest.raises(ClusterError, match=r"models/r: .*no room"):
        async with made(cluster) as release:
            cluster.fails = BatonError(Reason.SATURATED, "no room")
            async with release.running(COLOCATED):
                pass
    cluster = FakeCluster()
    with pytest.raises(ClusterError, match=r"0 prefill and 2 decode workers were not ready within 0\.3 s"):
        async with made(cluster, ready_s=0.3) as release:
            cluster.ready = False
            async with release.running(COLOCATED):
                pass
    assert cluster.found == (1, 1)


async def test_a_right_or_a_key_that_is_missing_ends_the_wait_for_the_workers(made: Callable[..., Release]) -> None:
    cluster = FakeCluster()
    with pytest.raises(ClusterError, match="models/r: UNAUTHENTICATED: this door needs an API key with admin=yes"):
        async with made(cluster, ready_s=3600.0) as release:
            cluster.refuses = BatonError(Reason.UNAUTHENTICATED, "this door needs an API key with admin=yes")
            async with release.running(COLOCATED):
                pass
    assert cluster.found == (1, 1)


class Refusing(grpc.RpcError):  # type: ignore[misc]  # it has no types
    """What a router answers, or nothing."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "it says so"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Refusing(grpc.StatusCode.UNAUTHENTICATED), Reason.UNAUTHENTICATED),
        (BatonError(Reason.FORBIDDEN, "pods/portforward"), Reason.FORBIDDEN),
        (Refusing(grpc.StatusCode.UNAVAILABLE), None),
        (BatonError(Reason.UNREACHABLE, "later"), None),
    ],
)
def test_a_router_that_is_not_there_yet_is_asked_again_and_a_refusal_is_told(
    error: Exception, reason: Reason | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(*_: object) -> object:
        raise error

    monkeypatch.setattr(release_cluster, "connect", lambda _: None)
    monkeypatch.setattr(release_cluster, "find", find)
    cluster = release_cluster.OutsideCluster(NAME, None, "grpc", ClientIdentity(), None)
    if reason is None:
        assert cluster._known() == set()
        return
    with pytest.raises(BatonError) as told:
        cluster._known()
    assert told.value.reason is reason


async def test_sizes_that_cannot_be_put_back_are_said_with_the_way(made: Callable[..., Release], tmp_path: Path) -> None:
    cluster = FakeCluster()
    with pytest.raises(
        ClusterError,
        match=r"does not have its 1 prefill and 1 decode again .*kubectl -n models scale deployment r-baton-prefill --replicas 1",
    ):
        async with made(cluster) as release:
            async with release.running(COLOCATED):
                pass
            cluster.fails = BatonError(Reason.UNREACHABLE, "the API server does not answer")
    assert (tmp_path / "state" / "keep.json").exists(), "the next comparison puts them back"


def test_arms_of_a_release_are_sizes_and_nothing_else() -> None:
    arms = make_arms(("colocated", "disaggregated"), 3, None)
    assert [(arm.name, sizes_of(arm)) for arm in arms] == [
        ("colocated", (0, 3)),
        ("disaggregated-1:2", (1, 2)),
        ("disaggregated-2:1", (2, 1)),
    ]
    assert all(set(arm.topology) == {"prefill.replicas", "decode.replicas"} for arm in arms)
    for name in ("bypass", "static", "colocated@64", "disaggregated@64"):
        with pytest.raises(ValueError, match="a release keeps its configuration"):
            make_arms((name,), 2, (1, 1))


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"kubernetes": "r"}, "kubernetes: 'r' is not NAMESPACE/RELEASE"),
        ({"context": "c"}, "context: goes with --kubernetes"),
        ({"address": "h:1"}, "address: goes with --kubernetes"),
        ({"kubernetes": "n/r", "gpus": 2}, "gpus: the release decides that"),
        ({"kubernetes": "n/r", "model": "m"}, "model: the release decides that"),
        ({"kubernetes": "n/r", "vllm": "{a: 1}"}, "the release decides that"),
        ({"kubernetes": "n/r", "vary": "chunk=1,2"}, "vary: chunk: a release keeps"),
    ],
)
def test_flags_that_a_release_decides_itself_are_bad_input(flags: dict[str, Any], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, cli.failing():
        cli._release(Arms(**flags), Entrance(), ClientIdentity(), None)  # type: ignore[arg-type]
    assert ended.value.exit_code == 2 and why in capsys.readouterr().err


def test_an_arm_has_two_sizes() -> None:
    assert sizes_of(Arm("x", {"prefill.replicas": "1", "decode.replicas": "3"})) == (1, 3)
