"""The gRPC service of the prefill role: `Prefill`, for routers. Protobuf stops here."""

import asyncio
from collections.abc import AsyncIterator

from baton.cluster.rpc import Answering, Context
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc
from baton.worker.identity import Identity
from baton.worker.kv_port import Place
from baton.worker.prompts import Prompts
from baton.worker.wire import pack_handle, to_finish, to_sequence, to_token
from kvtransfer.handle import KvHandle
from prefill_worker.worker import Prefilled, PrefillWorker, Source


class PrefillDoor(worker_pb2_grpc.PrefillServicer):
    def __init__(self, worker: PrefillWorker, identity: Identity, prompts: Prompts) -> None:
        self._worker = worker
        self._identity = identity
        self._prompts = prompts

    async def Prefill(self, request: pb.PrefillRequest, context: Context) -> AsyncIterator[pb.PrefillEvent]:
        async with Answering(context):
            self._identity.check(request.to)
            opened: asyncio.Queue[KvHandle | None] = asyncio.Queue()
            task = asyncio.create_task(self._prefill(request, opened, context.time_remaining()))
            task.add_done_callback(lambda _: opened.put_nowait(None))
            try:
                while (handle := await opened.get()) is not None:
                    yield pb.PrefillEvent(opened=pb.PrefillOpened(handle=pack_handle(handle)))
                yield pb.PrefillEvent(done=to_response(await task))
            finally:
                # The router is gone or has cancelled the call: the work that it started ends, too.
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _prefill(self, request: pb.PrefillRequest, opened: "asyncio.Queue[KvHandle | None]", timeout_s: float | None) -> Prefilled:
        job = request.job
        seq = to_sequence(job, self._identity.model_fingerprint, hold=True, timeout_s=timeout_s)
        trace = job.traceparent, job.tracestate
        with self._prompts.present(request.asker, request.uncached_tokens):
            return await self._worker.prefill(seq, job.request_id, opened.put_nowait, to_source(request), *trace)


def to_source(request: pb.PrefillRequest) -> Source | None:
    if not request.HasField("source"):
        return None
    source = request.source
    return Source(Place(source.worker, source.incarnation, source.address), source.blocks)


def to_response(done: Prefilled) -> pb.PrefillResponse:
    return pb.PrefillResponse(
        token=to_token(done.sampled),
        handle=pack_handle(done.handle) if done.handle else b"",
        finish=to_finish(done.finish),
        cached_tokens=done.cached_tokens,
        fetched_tokens=done.fetched_tokens,
        wait_ms=done.wait_ms,
        compute_ms=done.compute_ms,
    )
