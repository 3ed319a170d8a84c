"""gRPC of a prefill worker: `Prefill` for routers, `KvExchange` for decode workers. Protobuf stops here."""

from baton.cluster.errors import BatonError, Reason
from baton.cluster.rpc import Answering, Context
from baton.engine.kvcache import KvLayout
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc
from baton.worker.wire import pack_handle, pack_layout, to_finish, to_sequence, to_token, unpack_handle, unpack_layout
from kvtransfer.exporter import Exporter
from kvtransfer.transport import Transport
from prefill_worker.worker import PrefillWorker


class PrefillDoor(worker_pb2_grpc.PrefillServicer):
    def __init__(self, worker: PrefillWorker, model_fingerprint: str) -> None:
        self._worker = worker
        self._model_fingerprint = model_fingerprint

    async def Prefill(self, request: pb.PrefillRequest, context: Context) -> pb.PrefillResponse:
        async with Answering(context):
            seq = to_sequence(request.job, self._model_fingerprint, hold=True, timeout_s=context.time_remaining())
            done = await self._worker.prefill(seq, request.job.request_id, request.job.traceparent)
            return pb.PrefillResponse(
                token=to_token(done.sampled),
                handle=pack_handle(done.handle) if done.handle else b"",
                finish=to_finish(done.finish),
                cached_tokens=done.cached_tokens,
                wait_ms=done.wait_ms,
                compute_ms=done.compute_ms,
            )
        raise AssertionError("answered with an error")


class KvExchangeDoor(worker_pb2_grpc.KvExchangeServicer):
    def __init__(self, exporter: Exporter, transport: Transport, layout: KvLayout) -> None:
        self._exporter = exporter
        self._transport = transport
        self._contract = pack_layout(layout)

    async def Handshake(self, request: pb.HandshakeRequest, context: Context) -> pb.HandshakeResponse:
        async with Answering(context):
            self._exporter.handshake(unpack_layout(request.contract))
            if request.transport != self._transport.name:
                raise BatonError(Reason.HANDSHAKE_MISMATCH, f"transport: {self._transport.name!r} here, {request.transport!r} there")
            return pb.HandshakeResponse(
                worker=self._exporter.worker,
                incarnation=self._exporter.incarnation,
                contract=self._contract,
                transport_address=self._transport.address(),
            )
        raise AssertionError("answered with an error")

    async def Renew(self, request: pb.RenewRequest, context: Context) -> pb.RenewResponse:
        async with Answering(context):
            return pb.RenewResponse(ttl_ms=self._exporter.renew(unpack_handle(request.handle), request.request_id))
        raise AssertionError("answered with an error")

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        async with Answering(context):
            return pb.ReleaseResponse(was_held=self._exporter.release(unpack_handle(request.handle), request.request_id))
        raise AssertionError("answered with an error")
