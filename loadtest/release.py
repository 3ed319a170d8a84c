"""A release of the chart as the place where arms run: the same pods, resized between them from outside, with the caller's rights.

An arm is two sizes, so the image, the configuration and the resources are the same in every arm, and Kubernetes says so: what it runs is
compared at each switch. The pool that is to be smaller shrinks first, and its pods drain; then the other grows. So no arm ever has more
workers than another. The sizes that were found are put back at the end, however the comparison ends; a process that is killed at once
leaves a file, from which the next comparison of the release takes them.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from baton.cluster.errors import BatonError
from baton.launch.kubernetes_launcher import until
from baton.launch.pods import Object, ReleaseName, name_of, owner_of, size_of
from loadtest.arms import Ratio, parse, ways
from loadtest.campaign import Arm
from loadtest.hardware import ClusterError

READY_S = 1800.0  # a worker may load a large model, or compile first
POOLS = ("prefill", "decode")
ARMS = ("colocated", "disaggregated")  # those that are sizes and nothing else
SIZED = ("values", "baton")  # owners of a size that leave it alone once it is set
SAME = ("image", "resources", "env", "nodeSelector", "affinity", "tolerations", "runtimeClassName", "resourceClaims", "priorityClassName")
RESTORES = 3  # tries: each further Ctrl-C ends one
Sizes = tuple[int, int]  # prefill, decode
Note = Callable[[str], None]
Found = TypeVar("Found")


class ReleaseCluster(Protocol):
    """What is asked of Kubernetes, and of the release's routers."""

    async def deployments(self) -> Mapping[str, Object]:
        """Role → Deployment."""

    async def resize(self, role: str, count: int) -> None:
        """Returns when the pods that go have ended, or those that come have a node. Raises BatonError."""

    async def workers(self) -> Sizes | None:
        """Those that are ready and that a router knows; None while other pods of the pools are there, or no router answers. Raises
        BatonError."""

    async def addresses(self) -> dict[str, str]:
        """The address of each door, for the requests of the load test."""


@dataclass(frozen=True, slots=True)
class Pods:
    """The hardware: so many pods, all alike."""

    workers: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.workers} pods"

    def place(self, prefill: int) -> dict[str, str]:
        return {}

    def check(self, arm: str, config: Mapping[str, Any]) -> None:
        """An arm is two sizes that add up to the number of pods."""


def sizes_of(arm: Arm) -> Sizes:
    return int(arm.topology["prefill.replicas"]), int(arm.topology["decode.replicas"])


def make_arms(names: Sequence[str], workers: int, ratio: Ratio) -> tuple[Arm, ...]:
    """Raises ValueError for arms that are more than sizes of pools, and ClusterError as `ways` does."""
    for name in names:
        way = parse(name)
        if way.kind not in ARMS or way.chunk is not None:
            raise ValueError(f"arms: {name!r}: a release keeps its configuration, so its arms are {' and '.join(ARMS)}")
    arms = []
    for name, way in ways(names, workers, ratio):
        prefill, decode = way.split or (0, workers)
        words = f"{prefill} pods prefill, {decode} decode" if prefill else f"{decode} pods do both"
        arms.append(Arm(name, {"prefill.replicas": str(prefill), "decode.replicas": str(decode)}, words))
    return tuple(arms)


def check_pods(deployments: Mapping[str, Object]) -> dict[str, Any]:
    """What a worker's pod is, the same for both pools. Raises ClusterError for pools that are unlike, or whose size is another's."""
    if missing := [role for role in POOLS if role not in deployments]:
        raise ClusterError(f"the release has no {missing[0]} pool")
    for role in POOLS:
        if (owner := owner_of(deployments[role])) not in SIZED:
            raise ClusterError(f"{role}: {owner or 'nobody known'} owns the size of this pool and may change it: set {role}.scaling=baton")
    prefill, decode = (described(deployments[role]) for role in POOLS)
    if differing := [key for key in SAME if prefill.get(key) != decode.get(key)]:
        raise ClusterError(
            f"prefill and decode pods differ in {', '.join(differing)}: a worker that changes pools would change its hardware or its engine"
        )
    return decode


def described(deployment: Object) -> dict[str, Any]:
    """What decides how fast a Deployment's pods are."""
    spec = deployment["spec"]["template"]["spec"]
    container = spec["containers"][0]
    return {key: found for key in SAME if (found := container.get(key, spec.get(key))) is not None}


def configured(deployments: Mapping[str, Object]) -> dict[str, Any]:
    """What must not change while arms are compared: the pods of every role, with the digest of their configuration."""
    return {
        role: (described(each), each["spec"]["template"]["metadata"].get("annotations", {}).get("baton/config"))
        for role, each in deployments.items()
    }


class Release:
    """`async with Release(...) as release`, then `async with release.running(arm) as endpoints` for each arm.

    `keep`: a file that holds the sizes that were found, as long as others may be in force.
    """

    def __init__(self, name: ReleaseName, cluster: ReleaseCluster, keep: Path, note: Note, ready_s: float = READY_S) -> None:
        self._name, self._cluster, self._keep, self._note, self._ready_s = name, cluster, keep, note, ready_s
        self._found: Sizes = (0, 0)
        self._asked: Sizes = (0, 0)
        self._before: dict[str, Any] = {}
        self._names: dict[str, str] = {}  # role → Deployment
        self.name, self.pods = str(name), Pods(0)
        self.config: dict[str, Any] = {}  # what all arms share

    async def __aenter__(self) -> Self:
        """Raises ClusterError for a release on which nothing can be compared. Nothing has changed then."""
        deployments = await self._deployments()
        pod = check_pods(deployments)
        self._names = {role: name_of(each) for role, each in deployments.items()}
        self._before = configured(deployments)
        self._found = self._asked = _replicas(deployments)
        if (left := _read(self._keep)) is not None and left != self._found:
            self._note(f"an earlier comparison was killed and left {_told(self._found)}; it had found {_told(left)}, which counts")
            self._found = left
        if (workers := sum(self._found)) < 2:
            raise ClusterError(f"{self._name} has {workers} worker: a comparison needs two, for prefill and decode")
        self.pods = Pods(workers, {"release": str(self._name)})
        self.config = {"pod": pod, "configuration": {role: digest for role, (_, digest) in self._before.items()}}
        self._note(f"{self._name} has {_told(self._found)}; if this is killed at once, that comes back with: {self._way_back()}")
        return self

    async def __aexit__(self, *raised: object) -> None:
        """Puts back the sizes that were found, also when cancelled. Raises ClusterError if that fails."""
        for _ in range(RESTORES):
            restoring = asyncio.ensure_future(self._restore())
            while not restoring.done():
                with contextlib.suppress(asyncio.CancelledError):  # a second Ctrl-C must not leave another topology behind
                    await asyncio.wait({restoring})
            if not restoring.cancelled():
                return restoring.result()
        raise ClusterError(f"{self._name} may not have its {_told(self._found)} again: {self._way_back()}")

    @contextlib.asynccontextmanager
    async def running(self, arm: Arm) -> AsyncIterator[dict[str, str]]:
        """The doors of the release in this arm's topology, drained and complete. Raises ClusterError, also afterwards if something else has
        changed the release meanwhile."""
        await self._switch(sizes_of(arm))
        yield await self._ask(self._cluster.addresses())
        await self._check_unchanged()

    async def _switch(self, sizes: Sizes) -> None:
        """Shrinks before it grows. The workers that stay keep their caches, which no request of another run shares."""
        await self._check_unchanged()
        if sizes != self._found:
            self._keep.parent.mkdir(parents=True, exist_ok=True)
            self._keep.write_text(json.dumps(self._found))
        await self._resize(sizes)

        async def complete() -> bool:
            return await self._ask(self._cluster.workers()) == sizes

        if not await until(complete, self._ready_s):
            look = f"kubectl -n {self._name.namespace} get pods"
            raise ClusterError(f"{self._name}: {_told(sizes)} workers were not ready within {self._ready_s:g} s: {look}")

    async def _resize(self, sizes: Sizes) -> None:
        """What shrinks comes first."""
        for role, before, after in sorted(zip(POOLS, self._asked, sizes, strict=True), key=lambda step: step[2] - step[1]):
            if before != after:
                self._asked = (after, self._asked[1]) if role == "prefill" else (self._asked[0], after)
                await self._ask(self._cluster.resize(role, after))

    async def _restore(self) -> None:
        self._asked = _replicas(await self._deployments())  # a change may have been interrupted
        if self._asked != self._found:
            try:
                await self._resize(self._found)
            except ClusterError as error:
                raise ClusterError(f"{self._name} does not have its {_told(self._found)} again ({error}): {self._way_back()}") from None
            self._note(f"{self._name} has its {_told(self._found)} again")
        self._keep.unlink(missing_ok=True)

    async def _check_unchanged(self) -> None:
        deployments = await self._deployments()
        if (sizes := _replicas(deployments)) != self._asked:
            raise ClusterError(f"{self._name}: something else than the comparison made it {_told(sizes)} instead of {_told(self._asked)}")
        if configured(deployments) != self._before:
            raise ClusterError(f"{self._name}: its pods or their configuration were changed during the comparison")

    async def _deployments(self) -> Mapping[str, Object]:
        return await self._ask(self._cluster.deployments())

    async def _ask(self, asked: Awaitable[Found]) -> Found:
        try:
            return await asked
        except BatonError as error:
            raise ClusterError(f"{self._name}: {error}") from None

    def _way_back(self) -> str:
        scale = f"kubectl -n {self._name.namespace} scale deployment"
        return " && ".join(f"{scale} {self._names[role]} --replicas {size}" for role, size in zip(POOLS, self._found, strict=True))


def _replicas(deployments: Mapping[str, Object]) -> Sizes:
    prefill, decode = (size_of(deployments[role]) for role in POOLS)
    return prefill, decode


def _told(sizes: Sizes) -> str:
    return f"{sizes[0]} prefill and {sizes[1]} decode"


def _read(file: Path) -> Sizes | None:
    """What an earlier comparison had found; None if it put it back."""
    with contextlib.suppress(OSError, ValueError):
        prefill, decode = json.loads(file.read_text())
        return int(prefill), int(decode)
    return None
