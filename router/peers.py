"""The other routers of the cluster: who they are, how busy they are, and what they remember.

Each router is complete by itself. It follows the workers on its own, and needs the others only to share the workers' places with them
fairly, and to show the whole cluster whichever router is asked.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any, Literal

import grpc
from google.protobuf.message import Message

from baton.cluster.config import Config
from baton.cluster.guard import metadata
from baton.cluster.records import RouterRecord
from baton.cluster.registry import Registry, RegistryUnavailable
from baton.cluster.rpc import ProcessChannels, to_error
from baton.v1 import worker_pb2, worker_pb2_grpc
from router.admission import Admission, Elsewhere

log = logging.getLogger(__name__)
LOOK_EVERY_S = 0.25
RECORD_S = 60.0
ASK_S = 0.5  # a router that answers later is left out


class PeerRouters:
    def __init__(self, registry: Registry, name: str, config: Config) -> None:
        """`name`: of this router."""
        self.others: list[RouterRecord] = []  # as the registry last showed them; during an outage they stay
        self._registry = registry
        self._name = name
        self._security = config.security
        self._shown = metadata(config)
        self._lines: dict[str, ProcessChannels] = {}  # by address

    def together(self, own: RouterRecord) -> list[RouterRecord]:
        """All routers, sorted by name."""
        return sorted([own, *self.others], key=lambda record: record.name)

    async def run(self, admission: Admission) -> None:
        """Tells `admission` what the others do."""
        while True:
            try:
                self.others = [record for record in await self._registry.routers() if record.name != self._name]
            except RegistryUnavailable as error:
                log.debug("cannot look for other routers: %s", error)
            others = self.others
            taken, queued = sum(one.places or one.inflight for one in others), sum(one.queued for one in others)
            admission.share_with(Elsewhere(1 + len(others), taken, queued))
            await self._forget({record.endpoints.get("admin", "") for record in self.others})
            await asyncio.sleep(LOOK_EVERY_S)

    async def ask(self, method: Literal["Live", "Trace", "Curves"], request: Message) -> list[Any]:
        """The answers to this call of `Admin` of the routers that answer within ASK_S."""
        answers = await asyncio.gather(*(self._ask(record, method, request) for record in self.others))
        return [answer for answer in answers if answer is not None]

    async def logs(self, record: RouterRecord, request: worker_pb2.AdminLogsRequest) -> AsyncGenerator[bytes, None]:
        """Yields what that router answers to `Logs`. Raises BatonError."""
        call = worker_pb2_grpc.AdminStub(self._channel(record.endpoints["admin"])).Logs(request, metadata=self._shown)
        try:
            while (page := await call.read()) is not grpc.aio.EOF:
                yield page.text
        except grpc.RpcError as error:
            raise to_error(error) from None
        finally:
            call.cancel()

    async def recording(self, record: RouterRecord, request: worker_pb2.AdminRecordRequest) -> AsyncGenerator[bytes, None]:
        """Yields what that router answers to `Record`. Raises BatonError."""
        stub = worker_pb2_grpc.AdminStub(self._channel(record.endpoints["admin"]))
        call = stub.Record(request, metadata=self._shown, timeout=RECORD_S)
        try:
            while (page := await call.read()) is not grpc.aio.EOF:
                yield page.lines
        except grpc.RpcError as error:
            raise to_error(error) from None
        finally:
            call.cancel()

    async def close(self) -> None:
        await self._forget(set())

    async def _ask(self, record: RouterRecord, method: str, request: Message) -> Any:
        try:
            async with asyncio.timeout(ASK_S):
                stub = worker_pb2_grpc.AdminStub(self._channel(record.endpoints["admin"]))
                return await getattr(stub, method)(request, metadata=self._shown)
        except (grpc.RpcError, TimeoutError, KeyError) as error:
            log.debug("no answer from %s: %s", record.name, error)
            return None

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._lines:
            self._lines[address] = ProcessChannels(address, self._security)
        return self._lines[address].channel()

    async def _forget(self, keep: set[str]) -> None:
        for address in self._lines.keys() - keep:
            await self._lines.pop(address).close()
