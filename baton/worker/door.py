"""`baton.v1.Worker`: what every worker reports about itself, whatever its role."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass

from baton.cluster import log_file
from baton.cluster.errors import invalid
from baton.cluster.records import Load, RoleName, WorkerRecord, WorkerState
from baton.cluster.rpc import Answering, Context
from baton.engine.core.block_key import KEY_BYTES
from baton.recorder.recorder import Recorder, check_secret
from baton.v1 import worker_pb2, worker_pb2_grpc
from baton.worker.identity import WorkerIdentity
from baton.worker.role import Mounts

MOST_HINTED = 4096  # keys of a hint
HINT_S = 30.0  # the longest that one lasts
PAGE_KEYS = 4096  # in one message of a snapshot: 64 KiB, a few milliseconds of the router's event loop


@dataclass(frozen=True, slots=True)
class Residue:
    """What a worker holds right now; all zero when nothing runs."""

    sequences: int
    leases: int
    quarantined_blocks: int
    blocks_in_use: int


@dataclass(frozen=True, slots=True)
class Probed:
    """The condition of a worker at one moment."""

    state: WorkerState
    load: Load
    roles: tuple[RoleName, ...]  # those that it serves
    stalled_s: float  # for how long its engine has made no progress although it has work
    others_tokens: int  # uncached tokens of prompts that others than the asker have sent


class WorkerDoor(worker_pb2_grpc.WorkerServicer):
    def __init__(
        self,
        identity: WorkerIdentity,
        probe: Callable[[str], Awaitable[Probed]],
        describe: Callable[[], Awaitable[WorkerRecord]],
        snapshot: Callable[[], Awaitable[tuple[int, dict[str, list[bytes]]]]],
        residue: Callable[[], Residue],
        set_roles: Callable[[Sequence[str], bool, str], Awaitable[Mounts]],
        bring: Callable[[Sequence[bytes], float], Awaitable[int]],
        recorder: Recorder,
    ) -> None:
        """`bring`: see `baton.engine.core.contract.ServingEngine`, for a hint."""
        self._recorder = recorder
        self._identity = identity
        self._probe = probe
        self._describe = describe
        self._snapshot = snapshot
        self._residue = residue
        self._set_roles = set_roles
        self._bring = bring

    async def Probe(self, request: worker_pb2.ProbeRequest, context: Context) -> worker_pb2.ProbeResponse:
        async with Answering(context):
            self._identity.check(request.to)
            now = await self._probe(request.asker)
            load, stalled_ms = worker_pb2.WorkerLoad(**asdict(now.load)), int(now.stalled_s * 1000)
            return worker_pb2.ProbeResponse(
                state=now.state, load=load, roles=now.roles, stalled_ms=stalled_ms, others_tokens=now.others_tokens
            )
        raise AssertionError("answered with an error")

    async def Hint(self, request: worker_pb2.HintRequest, context: Context) -> worker_pb2.HintResponse:
        async with Answering(context):
            self._identity.check(request.to)
            keys = request.keys
            if len(keys) % KEY_BYTES or len(keys) > MOST_HINTED * KEY_BYTES:
                raise invalid("keys", f"must be at most {MOST_HINTED} keys of {KEY_BYTES} bytes, not {len(keys)} bytes")
            split = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
            return worker_pb2.HintResponse(blocks=await self._bring(split, min(request.within_ms / 1000, HINT_S)))
        raise AssertionError("answered with an error")

    async def Snapshot(self, request: worker_pb2.SnapshotRequest, context: Context) -> AsyncIterator[worker_pb2.SnapshotResponse]:
        async with Answering(context):
            self._identity.check(request.to)
            sequence, held = await self._snapshot()
            for medium, keys in held.items():
                for start in range(0, max(1, len(keys)), PAGE_KEYS):
                    page = b"".join(keys[start : start + PAGE_KEYS])
                    yield worker_pb2.SnapshotResponse(incarnation=self._identity.incarnation, sequence=sequence, keys=page, medium=medium)

    async def Describe(self, request: worker_pb2.DescribeRequest, context: Context) -> worker_pb2.DescribeResponse:
        async with Answering(context):
            self._identity.check(request.to)
            record = await self._describe()
            residue = self._residue()  # from the same look at the engine
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

    async def Logs(self, request: worker_pb2.LogsRequest, context: Context) -> AsyncIterator[worker_pb2.LogsResponse]:
        async with Answering(context):
            self._identity.check(request.to)
            async with aclosing(log_file.read(self._identity.worker, request.lines, request.follow)) as texts:
                async for text in texts:
                    yield worker_pb2.LogsResponse(text=text)

    async def Record(self, request: worker_pb2.RecordRequest, context: Context) -> AsyncIterator[worker_pb2.RecordResponse]:
        async with Answering(context):
            self._identity.check(request.to)
            check_secret(request.secret)
            async with aclosing(self._recorder.stream(request.secret)) as pieces:
                async for piece in pieces:
                    yield worker_pb2.RecordResponse(lines=piece)

    async def SetRoles(self, request: worker_pb2.SetRolesRequest, context: Context) -> worker_pb2.SetRolesResponse:
        async with Answering(context):
            self._identity.check(request.to)
            mounts = await self._set_roles(request.roles, request.prove, request.why)
            return worker_pb2.SetRolesResponse(serving=mounts.serving, draining=mounts.draining)
        raise AssertionError("answered with an error")
