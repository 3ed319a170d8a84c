"""The cluster that `loadtest.release` asks, from outside: the API server with the rights of the caller, and the routers by a port-forward,
or at an address that was given."""

import asyncio
from collections.abc import Mapping

import grpc

from baton.access.access import Access, Endpoint, find
from baton.access.options import ClientIdentity, ClusterOptions
from baton.cluster.errors import BatonError, Reason
from baton.launch.kubernetes_api import Api, connect
from baton.launch.kubernetes_launcher import KubernetesLauncher
from baton.launch.pods import Object, ReleaseName, has_ended, is_leaving, is_ready, name_of, selector_of
from baton.v1 import worker_pb2, worker_pb2_grpc
from loadtest.release import POOLS, Sizes

STATUS_S = 5.0


class OutsideCluster:
    """`address`: of the door of the requests, if not through the API server. Raises ConfigError where there is no kubeconfig."""

    def __init__(self, release: ReleaseName, context: str | None, door: Endpoint, identity: ClientIdentity, address: str | None) -> None:
        self._release, self._door, self._identity, self._address = release, door, identity, address
        self._place = ClusterOptions(kubernetes=str(release), context=context)
        self._api: Api = connect(context)
        self._launcher = KubernetesLauncher(release, context, borrows=True)
        self._started = False
        self._admin: Access | None = None

    async def deployments(self) -> Mapping[str, Object]:
        if not self._started:
            await self._launcher.start()
            self._started = True
        return await asyncio.to_thread(self._api.release, self._release)

    async def resize(self, role: str, count: int) -> None:
        await self._launcher.resize(role, count)

    async def workers(self) -> Sizes | None:
        deployments = await self.deployments()
        pods = {role: await asyncio.to_thread(self._pods, deployments[role]) for role in POOLS}
        every = [pod for each in pods.values() for pod in each]
        if any(is_leaving(pod) or not is_ready(pod) for pod in every):
            return None
        if await asyncio.to_thread(self._known) != {name_of(pod) for pod in every}:
            return None
        return len(pods["prefill"]), len(pods["decode"])

    def _pods(self, deployment: Object) -> list[Object]:
        return [pod for pod in self._api.pods(self._release.namespace, selector_of(deployment)) if not has_ended(pod)]

    def _known(self) -> set[str]:
        """Names of the workers that a router can ask; none while no router answers. Raises BatonError for a missing right or key."""
        try:
            if self._admin is None:
                self._admin = find("admin", self._place, self._identity)
            with self._admin.channel() as channel:
                status = worker_pb2_grpc.AdminStub(channel).Status(worker_pb2.StatusRequest(), timeout=STATUS_S)
        except (grpc.RpcError, BatonError, OSError) as error:
            if isinstance(error, BatonError) and error.reason is Reason.FORBIDDEN:  # by the API server
                raise
            if isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise BatonError(Reason.UNAUTHENTICATED, error.details()) from None
            return set()
        return {worker.record.name for worker in status.workers if not worker.error}

    async def addresses(self) -> dict[str, str]:
        if self._address is None:
            self._address = (await asyncio.to_thread(find, self._door, self._place, self._identity)).address
        return {self._door: self._address}
