"""`baton.v1.Worker`: what every worker answers about itself, whatever its role."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass

from baton.cluster.records import Load, WorkerRecord, WorkerState
from baton.cluster.rpc import Answering, Context
from baton.v1 import worker_pb2, worker_pb2_grpc
from baton.worker.identity import Identity

PAGE_KEYS = 8192  # of one message of a snapshot: 128 KiB, a few milliseconds of the router's event loop


@dataclass(frozen=True, slots=True)
class Residue:
    """What a worker holds right now; all zero when nothing runs."""

    sequences: int
    leases: int
    quarantined_blocks: int
    blocks_in_use: int


class WorkerDoor(worker_pb2_grpc.WorkerServicer):
    def __init__(
        self,
        identity: Identity,
        probe: Callable[[], Awaitable[tuple[WorkerState, Load, float]]],
        describe: Callable[[], Awaitable[WorkerRecord]],
        snapshot: Callable[[], Awaitable[tuple[int, list[bytes]]]],
        residue: Callable[[], Residue],
    ) -> None:
        self._identity = identity
        self._probe = probe
        self._describe = describe
        self._snapshot = snapshot
        self._residue = residue

    async def Probe(self, request: worker_pb2.ProbeRequest, context: Context) -> worker_pb2.ProbeResponse:
        async with Answering(context):
            self._identity.check(request.to)
            state, load, stalled_s = await self._probe()
            return worker_pb2.ProbeResponse(state=state, load=worker_pb2.WorkerLoad(**asdict(load)), stalled_ms=int(stalled_s * 1000))
        raise AssertionError("answered with an error")

    async def Snapshot(self, request: worker_pb2.SnapshotRequest, context: Context) -> AsyncIterator[worker_pb2.SnapshotResponse]:
        async with Answering(context):
            self._identity.check(request.to)
            sequence, keys = await self._snapshot()
            for start in range(0, max(1, len(keys)), PAGE_KEYS):
                page = b"".join(keys[start : start + PAGE_KEYS])
                yield worker_pb2.SnapshotResponse(incarnation=self._identity.incarnation, sequence=sequence, keys=page)

    async def Describe(self, request: worker_pb2.DescribeRequest, context: Context) -> worker_pb2.DescribeResponse:
        async with Answering(context):
            self._identity.check(request.to)
            record = await self._describe()
            residue = self._residue()  # of the same look at the engine
            return worker_pb2.DescribeResponse(
                record=worker_pb2.WorkerRecord(**asdict(record)),
                residue=worker_pb2.Residue(
                    idle=residue.sequences == 0,
                    leases=residue.leases,
                    quarantined_blocks=residue.quarantined_blocks,
                    blocks_in_use=residue.blocks_in_use,
                ),
            )
        raise AssertionError("answered with an error")
