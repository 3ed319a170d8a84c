"""Clients of the workers that this worker fetches KV from: `KvExchange` over gRPC, one channel per address."""

from collections.abc import Awaitable
from typing import TypeVar

import grpc

from baton.cluster.config import SecurityConfig
from baton.cluster.errors import BatonError, Reason
from baton.cluster.rpc import ProcessChannels, Tasks, to_error
from baton.engine.core.kvcache import KvLayout
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc
from baton.worker.wire import pack_handle, pack_layout, pack_wish, unpack_handle, unpack_layout, unpack_piece
from kvtransfer.handle import KvHandle, Piece, Wish
from kvtransfer.importer import PeerFacts

T = TypeVar("T")
CALL_TIMEOUT_S = 2.0
MAX_CHANNELS = 256


class KvPeers:
    def __init__(self, name: str, incarnation: int, security: SecurityConfig) -> None:
        self._name = name
        self._incarnation = incarnation
        self._security = security
        self._channels: dict[str, ProcessChannels] = {}  # oldest first
        self._closing = Tasks(lambda error: None)

    def connect(self, address: str) -> "PeerClient":
        if address not in self._channels:
            self._channels[address] = ProcessChannels(address, self._security)
            if len(self._channels) > MAX_CHANNELS:  # workers come and go, each time on another port
                self._closing.start(self._channels.pop(next(iter(self._channels))).close(CALL_TIMEOUT_S), "close channel")
        return PeerClient(self._channels[address], self._name, self._incarnation)

    async def close(self) -> None:
        await self._closing.close()
        for open_channel in self._channels.values():
            await open_channel.close()


class PeerClient:
    """Implements `kvtransfer.importer.Peer`."""

    def __init__(self, line: ProcessChannels, name: str, incarnation: int) -> None:
        self._line = line
        self._name = name
        self._incarnation = incarnation

    @property
    def _stub(self) -> worker_pb2_grpc.KvExchangeStub:
        return worker_pb2_grpc.KvExchangeStub(self._line.channel())

    async def handshake(self, layout: KvLayout, transport: str) -> PeerFacts:
        request = pb.HandshakeRequest(worker=self._name, incarnation=self._incarnation, contract=pack_layout(layout), transport=transport)
        answer: pb.HandshakeResponse = await _ask(self._stub.Handshake(request, timeout=CALL_TIMEOUT_S))
        return PeerFacts(answer.worker, answer.incarnation, unpack_layout(answer.contract), answer.transport_address)

    async def piece(self, handle: KvHandle, first: int, wait_s: float, direct: bool) -> Piece:
        request = pb.PieceRequest(
            handle=pack_handle(handle), request_id=handle.request_id, first=first, wait_ms=int(wait_s * 1000), direct=direct
        )
        answer: pb.KvPiece = await _ask(self._stub.Piece(request, timeout=wait_s + CALL_TIMEOUT_S))
        return unpack_piece(answer)

    async def lend(self, wish: Wish) -> KvHandle:
        answer: pb.LendResponse = await _ask(self._stub.Lend(pack_wish(wish), timeout=CALL_TIMEOUT_S))
        return unpack_handle(answer.handle)

    async def renew(self, handle: KvHandle) -> float:
        request = pb.RenewRequest(handle=pack_handle(handle), request_id=handle.request_id)
        answer: pb.RenewResponse = await _ask(self._stub.Renew(request, timeout=CALL_TIMEOUT_S))
        return answer.ttl_ms / 1000

    async def release(self, handle: KvHandle) -> bool:
        request = pb.ReleaseRequest(handle=pack_handle(handle), request_id=handle.request_id)
        answer: pb.ReleaseResponse = await _ask(self._stub.Release(request, timeout=CALL_TIMEOUT_S))
        return answer.was_held


async def _ask(call: Awaitable[T]) -> T:
    """A holder that does not answer in time is as good as gone: its lease cannot be confirmed."""
    try:
        return await call
    except grpc.RpcError as error:
        ours = to_error(error)
        if ours.reason in (Reason.DEADLINE, Reason.WORKER_LOST, Reason.INTERNAL):
            raise BatonError(Reason.TRANSFER_FAILED, f"the holder of the KV does not answer: {ours.message}") from None
        raise ours from None
