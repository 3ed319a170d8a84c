"""`baton.v1.Admin`, on its own port: the cluster as the router sees it. `Status` asks every worker again."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import asdict

from baton.cluster.errors import BatonError, Reason, invalid
from baton.cluster.records import WorkerRecord
from baton.cluster.registry import RegistryUnavailable
from baton.cluster.rpc import Answering, Context
from baton.v1 import worker_pb2, worker_pb2_grpc
from router.admission import Admission
from router.clients import Workers
from router.journal import Journal
from router.live import Live
from router.view import ClusterView
from router.watch import Watch

MOST_WORKERS = 1024  # in one pool


class AdminDoor(worker_pb2_grpc.AdminServicer):
    def __init__(
        self,
        view: ClusterView,
        workers: Workers,
        watch: Watch,
        admission: Admission,
        journal: Journal,
        live: Live,
        model_name: str,
        endpoints: Callable[[], dict[str, str]],
    ) -> None:
        self._view = view
        self._workers = workers
        self._watch = watch
        self._admission = admission
        self._journal = journal
        self._live = live
        self._model_name = model_name
        self._endpoints = endpoints

    async def Status(self, request: worker_pb2.StatusRequest, context: Context) -> worker_pb2.StatusResponse:
        return worker_pb2.StatusResponse(
            endpoints=self._endpoints(),
            model=self._model_name,
            router=worker_pb2.RouterStatus(
                pid=os.getpid(),
                inflight=self._admission.inflight,
                queued=self._admission.queued,
                registry="reachable" if self._watch.registry_reachable else "away",
            ),
            workers=await asyncio.gather(*(self._describe(record) for record in self._view.members())),
        )

    async def Live(self, request: worker_pb2.LiveRequest, context: Context) -> worker_pb2.LiveResponse:
        return worker_pb2.LiveResponse(**await self._live.look())

    async def Trace(self, request: worker_pb2.TraceRequest, context: Context) -> worker_pb2.TraceResponse:
        if request.request_id:
            found = [record for record in [self._journal.find(request.request_id)] if record is not None]
        else:
            found = self._journal.last(request.last or 1)
        return worker_pb2.TraceResponse(records=[worker_pb2.TraceRecord(**record.to_json()) for record in found])

    async def SetRoles(self, request: worker_pb2.AdminSetRolesRequest, context: Context) -> worker_pb2.SetRolesResponse:
        async with Answering(context):
            known = {record.name: record for record in self._view.members()}
            if request.worker not in known:
                raise invalid("worker", f"there is no worker {request.worker!r}; known workers: {', '.join(known) or 'none'}")
            serving, draining = await self._workers.set_roles(known[request.worker], request.roles)
            return worker_pb2.SetRolesResponse(serving=serving, draining=draining)
        raise AssertionError("answered with an error")

    async def Scale(self, request: worker_pb2.ScaleRequest, context: Context) -> worker_pb2.ScaleResponse:
        async with Answering(context):
            asked = {name: getattr(request, name) if request.HasField(name) else None for name in ("prefill", "decode")}
            for name, least in (("prefill", 0), ("decode", 1)):
                if (size := asked[name]) is not None and not least <= size <= MOST_WORKERS:
                    raise invalid(name, f"must be from {least} to {MOST_WORKERS}")
            try:
                wanted = await self._watch.resize(**asked)
            except RegistryUnavailable as error:
                raise BatonError(Reason.INTERNAL, f"the registry cannot note the sizes: {error}") from None
            return worker_pb2.ScaleResponse(prefill=wanted.prefill, decode=wanted.decode)
        raise AssertionError("answered with an error")

    async def _describe(self, record: WorkerRecord) -> worker_pb2.WorkerStatus:
        try:
            fresh, residue = await self._workers.describe(record)
        except (BatonError, ValueError) as error:
            last = worker_pb2.WorkerRecord(**{**asdict(record), "state": "unreachable"})
            return worker_pb2.WorkerStatus(record=last, error=str(error))
        return worker_pb2.WorkerStatus(record=worker_pb2.WorkerRecord(**asdict(fresh)), residue=worker_pb2.Residue(**residue))
