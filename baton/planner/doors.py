"""The routers' admin doors, over gRPC. Any router answers for all."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc

from baton.cluster.config import Config
from baton.cluster.errors import BatonError, Reason
from baton.cluster.guard import metadata
from baton.cluster.records import RoleName
from baton.cluster.registry import Registry
from baton.cluster.rpc import ProcessChannels, to_error
from baton.planner.demand import Interval
from baton.v1 import worker_pb2, worker_pb2_grpc
from router.curves import STEP_S

COUNTS_S = 2.0


class RouterDoors:
    def __init__(self, config: Config, registry: Registry) -> None:
        self._security = config.security
        self._shown = metadata(config)
        self._registry = registry
        self._lines: dict[str, ProcessChannels] = {}  # by address

    async def counts(self) -> list[Interval]:
        """Raises BatonError, RegistryUnavailable."""

        async def ask(stub: Any) -> Any:
            return await stub.Curves(worker_pb2.CurvesRequest(), timeout=COUNTS_S, metadata=self._shown)

        return [to_interval(point) for point in (await self._first(ask)).points]

    async def set_roles(self, worker: str, roles: Sequence[RoleName], timeout_s: float) -> None:
        """Raises BatonError, RegistryUnavailable."""

        async def ask(stub: Any) -> Any:
            asked = worker_pb2.AdminSetRolesRequest(worker=worker, roles=roles, prove=True)
            return await stub.SetRoles(asked, timeout=timeout_s, metadata=self._shown)

        await self._first(ask, again=False)

    async def close(self) -> None:
        for line in self._lines.values():
            await line.close()

    async def _first(self, ask: Callable[[Any], Awaitable[Any]], again: bool = True) -> Any:
        """The answer of the first router that gives one. `again`: the next may be asked after one has failed."""
        records = await self._registry.routers()
        addresses = [record.endpoints["admin"] for record in records if record.endpoints.get("admin")]
        for gone in self._lines.keys() - set(addresses):
            await self._lines.pop(gone).close()
        failed = BatonError(Reason.WORKER_LOST, "no router is known")
        for address in addresses:
            line = self._lines.setdefault(address, ProcessChannels(address, self._security))
            try:
                return await ask(worker_pb2_grpc.AdminStub(line.channel()))
            except grpc.RpcError as error:
                failed = to_error(error)
                if not again:
                    break
        raise failed


def to_interval(point: Any) -> Interval:
    """`point`: a `CurvePoint`, or what it was made from."""
    completed = point.outcomes.get("ok", 0)
    return Interval(
        point.number, STEP_S, point.arrived, point.prompts, point.prompt_tokens, point.uncached_tokens, completed,
        point.completed_tokens, point.met, dict(point.missed),
    )  # fmt: skip
