"""The gRPC service of a KV port: `KvExchange`, for other workers. Protobuf stops here."""

from baton.cluster.errors import BatonError, Reason
from baton.cluster.rpc import Answering, Context
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc
from baton.worker.kv_port import KvPort
from baton.worker.wire import pack_handle, pack_layout, pack_piece, unpack_handle, unpack_layout, unpack_wish


class KvExchangeDoor(worker_pb2_grpc.KvExchangeServicer):
    def __init__(self, port: KvPort) -> None:
        self._port = port
        self._contract = pack_layout(port.pool.layout)

    async def Handshake(self, request: pb.HandshakeRequest, context: Context) -> pb.HandshakeResponse:
        async with Answering(context):
            port = self._port
            port.exporter.handshake(unpack_layout(request.contract))
            if request.transport != port.transport.name:
                raise BatonError(Reason.HANDSHAKE_MISMATCH, f"transport: {port.transport.name!r} here, {request.transport!r} there")
            return pb.HandshakeResponse(
                worker=port.place.worker,
                incarnation=port.place.incarnation,
                contract=self._contract,
                transport_address=port.transport.address(),
            )
        raise AssertionError("answered with an error")

    async def Piece(self, request: pb.PieceRequest, context: Context) -> pb.KvPiece:
        async with Answering(context):
            handle = unpack_handle(request.handle)
            wait_s = request.wait_ms / 1000
            piece = await self._port.exporter.piece(handle, request.request_id, request.first, wait_s, request.direct)
            return pack_piece(piece)
        raise AssertionError("answered with an error")

    async def Renew(self, request: pb.RenewRequest, context: Context) -> pb.RenewResponse:
        async with Answering(context):
            return pb.RenewResponse(ttl_ms=self._port.exporter.renew(unpack_handle(request.handle), request.request_id))
        raise AssertionError("answered with an error")

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        async with Answering(context):
            return pb.ReleaseResponse(was_held=self._port.exporter.release(unpack_handle(request.handle), request.request_id))
        raise AssertionError("answered with an error")

    async def Lend(self, request: pb.LendRequest, context: Context) -> pb.LendResponse:
        async with Answering(context):
            return pb.LendResponse(handle=pack_handle(await self._port.lend(unpack_wish(request))))
        raise AssertionError("answered with an error")
