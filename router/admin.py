"""`baton.v1.Admin`, on its own port: the cluster as the router sees it. `Status` asks every worker again; `Live` and `Trace` ask the other
routers, so it does not matter which one is asked.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import asdict, dataclass

from baton.clock import loop_time
from baton.cluster import log_file
from baton.cluster.errors import BatonError, Reason, invalid
from baton.cluster.joining import Joining
from baton.cluster.records import RouterRecord, WorkerRecord
from baton.cluster.registry import RegistryUnavailable
from baton.cluster.rpc import Answering, Context
from baton.recorder.recorder import Recorder, check_secret
from baton.v1 import worker_pb2, worker_pb2_grpc
from router.clients import GrpcWorkers
from router.journal import Journal
from router.listing import Query
from router.live import Live, in_slices, to_message
from router.peers import PeerRouters
from router.proof import prove, usable
from router.view import ClusterView
from router.watch import Watch

MOST_WORKERS = 1024  # in one pool


@dataclass(frozen=True, slots=True)
class Own:
    """What is this router's own."""

    describe: Callable[[], RouterRecord]  # as it is now
    joining: Joining
    recorder: Recorder
    unproved: Callable[[str], str] = lambda name: ""  # why a worker has not proved itself, as far as this router knows


class AdminDoor(worker_pb2_grpc.AdminServicer):
    def __init__(
        self,
        view: ClusterView,
        workers: GrpcWorkers,
        watch: Watch,
        journal: Journal,
        live: Live,
        peers: PeerRouters,
        own: Own,
    ) -> None:
        self._joining = own.joining
        self._recorder = own.recorder
        self._view = view
        self._workers = workers
        self._watch = watch
        self._journal = journal
        self._live = live
        self._peers = peers
        self._describe_router = own.describe
        self._unproved = own.unproved

    async def Status(self, request: worker_pb2.StatusRequest, context: Context) -> worker_pb2.StatusResponse:
        own, plans = self._describe_router(), await self._watch.plans()
        planner = None if plans is None else plans.planner
        return worker_pb2.StatusResponse(
            endpoints=own.endpoints,
            model=own.model_name,
            router=worker_pb2.RouterStatus(
                pid=own.pid,
                inflight=own.inflight,
                queued=own.queued,
                registry="reachable" if self._watch.registry_reachable else "away",
                alarm=self._journal.alarm,
            ),
            workers=await asyncio.gather(*(self._describe(record) for record in self._view.members.records())),
            routers=[worker_pb2.RouterInfo(**asdict(record)) for record in self._peers.together(own)],
            starts=[worker_pb2.Start(**asdict(record)) for record in await self._watch.starts()],
            planner=None if planner is None else worker_pb2.PlannerStatus(**asdict(planner)),
        )

    async def Live(self, request: worker_pb2.LiveRequest, context: Context) -> worker_pb2.LiveResponse:
        return worker_pb2.LiveResponse(**await self._live.look(alone=request.alone))

    async def Trace(self, request: worker_pb2.TraceRequest, context: Context) -> worker_pb2.TraceResponse:
        async with Answering(context):
            if not request.request_id:
                return await self._list(request)
            own = self._journal.find(request.request_id)
            records = [] if own is None else [worker_pb2.TraceRecord(**own.to_json())]
            if not request.alone:
                asked = worker_pb2.TraceRequest(request_id=request.request_id, alone=True)
                for answer in await self._peers.ask("Trace", asked):
                    records += answer.records
            records.sort(key=lambda record: record.at, reverse=True)
            return worker_pb2.TraceResponse(records=records)
        raise AssertionError("answered with an error")

    async def _list(self, request: worker_pb2.TraceRequest) -> worker_pb2.TraceResponse:
        query = Query(
            request.sort or "age", request.ascending, request.failed, request.slower_than, request.outcome, request.worker, request.tenant,
            request.skip, request.last or 1,
        )  # fmt: skip
        listed, matched = await self._live.ended(query, request.alone)
        records = await in_slices(lambda one: worker_pb2.TraceRecord(**one[1]), listed)
        return worker_pb2.TraceResponse(records=records, places=[place for place, _ in listed], matched=matched)

    async def Curves(self, request: worker_pb2.CurvesRequest, context: Context) -> worker_pb2.CurvesResponse:
        points = await self._live.points(request.since, request.alone)
        return worker_pb2.CurvesResponse(points=await in_slices(to_message, points))

    async def SetRoles(self, request: worker_pb2.AdminSetRolesRequest, context: Context) -> worker_pb2.SetRolesResponse:
        async with Answering(context):
            known = {record.name: record for record in self._view.members.records()}
            if request.worker not in known:
                raise invalid("worker", f"there is no worker {request.worker!r}; known workers: {', '.join(known) or 'none'}")
            worker = known[request.worker]
            decoding = {record.name for record in self._view.models.of(worker).decode_workers()}
            if decoding == {worker.name} and "decode" not in request.roles and not request.force:
                raise invalid("roles", f"{worker.name} is the only worker that decodes: no request could be served (--force does it)")
            if request.prove:
                await prove(self._workers, usable(self._view.members, worker), worker, request.roles)
            serving, draining = await self._workers.set_roles(worker, request.roles)
            self._view.members.note_roles(worker.name, worker.incarnation, serving)
            return worker_pb2.SetRolesResponse(serving=serving, draining=draining)
        raise AssertionError("answered with an error")

    async def Join(self, request: worker_pb2.JoinRequest, context: Context) -> worker_pb2.JoinResponse:
        async with Answering(context):
            if not request.challenge:
                return worker_pb2.JoinResponse(challenge=self._joining.challenge(loop_time()))
            return worker_pb2.JoinResponse(env=self._joining.admit(request.challenge, request.proof, loop_time()))
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

    async def Down(self, request: worker_pb2.DownRequest, context: Context) -> worker_pb2.DownResponse:
        async with Answering(context):
            try:
                if not await self._watch.end():
                    raise BatonError(Reason.INVALID_FIELD, "no `baton up` runs this cluster: stop its processes where they were started")
            except RegistryUnavailable as error:
                raise BatonError(Reason.INTERNAL, f"the registry cannot note it: {error}") from None
            return worker_pb2.DownResponse()
        raise AssertionError("answered with an error")

    async def Logs(self, request: worker_pb2.AdminLogsRequest, context: Context) -> AsyncIterator[worker_pb2.LogsResponse]:
        async with Answering(context), aclosing(self._log(request)) as texts:
            try:
                async for text in texts:
                    yield worker_pb2.LogsResponse(text=text)
            except BatonError as error:
                if error.reason is Reason.WORKER_LOST:
                    raise BatonError(error.reason, f"{request.name} does not answer: {error}") from None
                raise

    async def Record(self, request: worker_pb2.AdminRecordRequest, context: Context) -> AsyncIterator[worker_pb2.RecordResponse]:
        async with Answering(context), aclosing(self._recording(request)) as pieces:
            try:
                async for piece in pieces:
                    yield worker_pb2.RecordResponse(lines=piece)
            except BatonError as error:
                if error.reason is Reason.WORKER_LOST:
                    raise BatonError(error.reason, f"{request.name} does not answer: {error}") from None
                raise

    def _recording(self, request: worker_pb2.AdminRecordRequest) -> AsyncGenerator[bytes, None]:
        check_secret(request.secret)
        own, routers, workers = self._processes()
        if request.name == own:
            return self._recorder.stream(request.secret)
        if request.name in workers:
            return self._workers.recording(workers[request.name], request.secret)
        if request.name in routers:
            return self._peers.recording(routers[request.name], request)
        raise self._unknown(request.name)

    def _processes(self) -> tuple[str, dict[str, RouterRecord], dict[str, WorkerRecord]]:
        """This router's name, the other routers, and the workers."""
        routers = {record.name: record for record in self._peers.others}
        return self._describe_router().name, routers, {record.name: record for record in self._view.members.records()}

    def _unknown(self, name: str) -> BatonError:
        own, routers, workers = self._processes()
        known = ", ".join([*sorted([own, *routers]), *workers])
        return invalid("name", f"there is no process {name!r}; known processes: {known}")

    def _log(self, request: worker_pb2.AdminLogsRequest) -> AsyncGenerator[bytes, None]:
        own, routers, workers = self._processes()
        if request.name == own:
            return log_file.read(own, request.lines, request.follow)
        if request.name in workers:
            return self._workers.logs(workers[request.name], request.lines, request.follow)
        if request.name in routers:
            return self._peers.logs(routers[request.name], request)
        raise self._unknown(request.name)

    async def _describe(self, record: WorkerRecord) -> worker_pb2.WorkerStatus:
        try:
            fresh, residue = await self._workers.describe(record)
        except (BatonError, ValueError) as error:
            last = worker_pb2.WorkerRecord(**{**asdict(record), "state": "unreachable"})
            return worker_pb2.WorkerStatus(record=last, error=str(error))
        shown, reason = asdict(fresh), ""
        if fresh.state == "ready" and (misfit := self._view.misfit(fresh.name)):
            shown["state"], reason = "unfit", misfit
        elif fresh.state == "ready" and (ejected := self._view.members.ejected(fresh.name)):
            shown["state"], reason = "ejected", ejected
        elif fresh.state == "ready" and self._view.members.unproven(fresh.name):
            shown["state"], shown["unproved"] = "unproven", self._unproved(fresh.name) or fresh.unproved
            reason = shown["unproved"] or "it has not proved itself yet"
        return worker_pb2.WorkerStatus(record=worker_pb2.WorkerRecord(**shown), residue=worker_pb2.Residue(**residue), error=reason)
