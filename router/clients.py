"""The router's side of the wire to its workers. Protobuf and gRPC stop here; failures come out as BatonError.

A decode session is one stream per worker that carries all calls: a lost stream ends each of them with WORKER_LOST, at once.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Awaitable
from dataclasses import dataclass
from typing import TypeVar

import grpc

from baton.cluster import semconv
from baton.cluster.config import SecurityConfig
from baton.cluster.errors import BatonError, Reason
from baton.cluster.records import WorkerRecord
from baton.cluster.rpc import channel, to_error
from baton.engine.sampling import FIELDS
from baton.v1 import generation_pb2, worker_pb2, worker_pb2_grpc
from router.request import FinishReason, Handoff, Request, Token

log = logging.getLogger(__name__)
RELEASE_TIMEOUT_S = 2.0
ASK_TIMEOUT_S = 1.0
MAX_GONE = 1024
_Identity = tuple[str, int]  # name and incarnation of a worker
T = TypeVar("T")
_FINISH: dict[int, FinishReason | None] = {
    generation_pb2.FINISH_REASON_UNSPECIFIED: None,
    generation_pb2.FINISH_REASON_STOP: "stop",
    generation_pb2.FINISH_REASON_LENGTH: "length",
}


@dataclass(frozen=True, slots=True)
class FirstToken:
    token: Token
    handle: bytes  # empty when the token ends the output
    finish: FinishReason | None
    cached_tokens: int
    wait_ms: float
    compute_ms: float


@dataclass(frozen=True, slots=True)
class Adopted:
    handoff: Handoff
    read_ms: float
    verify_ms: float


@dataclass(frozen=True, slots=True)
class Ended:
    finish: FinishReason
    recomputed_tokens: int
    cached_tokens: int


DecodeEvent = Token | Adopted | Ended


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    incarnation: int
    sequence: int
    keys: tuple[bytes, ...]


class Workers:
    """Channels and decode sessions, by worker and incarnation."""

    def __init__(self, security: SecurityConfig) -> None:
        self._security = security
        self._channels: dict[_Identity, grpc.aio.Channel] = {}  # a process of its own has one of its own, also at an old address
        self._gone: dict[_Identity, None] = {}  # nothing is opened for these again; oldest first
        self._sessions: dict[_Identity, DecodeSession] = {}
        self._releases: set[asyncio.Task[None]] = set()

    async def prefill(self, worker: WorkerRecord, request: Request, timeout_s: float) -> FirstToken:
        stub = worker_pb2_grpc.PrefillStub(self._channel(worker))  # type: ignore[no-untyped-call]
        with request.trace.span.child(semconv.PREFILL, "client", {semconv.WORKER: worker.name}) as span:
            job = to_job(request, span.traceparent)
            answer = await _answer(stub.Prefill(worker_pb2.PrefillRequest(job=job), timeout=timeout_s))
        return FirstToken(
            to_token(answer.token),
            answer.handle,
            _FINISH[answer.finish],
            answer.cached_tokens,
            answer.wait_ms,
            answer.compute_ms,
        )

    def decode(self, worker: WorkerRecord, request: Request, handle: bytes, timeout_s: float) -> AsyncGenerator[DecodeEvent, None]:
        """Events up to and including Ended. Closing the generator early cancels the call on the worker."""
        return self._session(worker).run(request, handle, timeout_s)

    def release(self, worker: WorkerRecord, handle: bytes, request_id: str) -> None:
        """End a lease that nobody will read, without waiting. Best effort: it expires anyhow."""
        task = asyncio.create_task(self._release(worker, handle, request_id))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def snapshot(self, worker: WorkerRecord) -> CacheSnapshot:
        stub = worker_pb2_grpc.WorkerStub(self._channel(worker))  # type: ignore[no-untyped-call]
        answer = await _answer(stub.Snapshot(worker_pb2.SnapshotRequest(), timeout=ASK_TIMEOUT_S))
        keys = tuple(answer.keys[at : at + 16] for at in range(0, len(answer.keys), 16))
        return CacheSnapshot(answer.incarnation, answer.sequence, keys)

    async def describe(self, worker: WorkerRecord) -> tuple[WorkerRecord, dict[str, int]]:
        """The worker's record as it is now, and what it holds: leases, blocks in use, blocks in quarantine."""
        stub = worker_pb2_grpc.WorkerStub(self._channel(worker))  # type: ignore[no-untyped-call]
        answer = await _answer(stub.Describe(worker_pb2.DescribeRequest(), timeout=ASK_TIMEOUT_S))
        residue = {
            "idle": int(answer.idle),
            "leases": answer.leases,
            "quarantined_blocks": answer.quarantined_blocks,
            "blocks_in_use": answer.blocks_in_use,
        }
        return WorkerRecord.from_json(answer.record_json), residue

    def welcome(self, worker: WorkerRecord) -> None:
        """The worker joined; it may have been forgotten before."""
        self._gone.pop(_identity(worker), None)

    async def forget(self, worker: WorkerRecord) -> None:
        """The worker is gone, or its process was replaced. What is still asked of it fails with WORKER_LOST."""
        identity = _identity(worker)
        self._gone[identity] = None
        if len(self._gone) > MAX_GONE:
            del self._gone[next(iter(self._gone))]
        session, old = self._sessions.pop(identity, None), self._channels.pop(identity, None)
        if session is not None:
            await session.close()
        if old is not None:
            await old.close()

    async def close(self) -> None:
        for session in list(self._sessions.values()):
            await session.close()
        if self._releases:
            await asyncio.wait(self._releases, timeout=RELEASE_TIMEOUT_S)
        for open_channel in self._channels.values():
            await open_channel.close()

    def _channel(self, worker: WorkerRecord) -> grpc.aio.Channel:
        identity = _identity(worker)
        if identity in self._gone:
            raise BatonError(Reason.WORKER_LOST, f"{worker.name} is gone")
        if identity not in self._channels:
            self._channels[identity] = channel(worker.address, self._security)
        return self._channels[identity]

    def _session(self, worker: WorkerRecord) -> "DecodeSession":
        identity = _identity(worker)
        session = self._sessions.get(identity)
        if session is None or session.lost:
            stub = worker_pb2_grpc.DecodeStub(self._channel(worker))  # type: ignore[no-untyped-call]
            session = self._sessions[identity] = DecodeSession(worker.name, stub)
        return session

    async def _release(self, worker: WorkerRecord, handle: bytes, request_id: str) -> None:
        try:
            stub = worker_pb2_grpc.KvExchangeStub(self._channel(worker))  # type: ignore[no-untyped-call]
            await _answer(stub.Release(worker_pb2.ReleaseRequest(handle=handle, request_id=request_id), timeout=RELEASE_TIMEOUT_S))
        except BatonError as error:
            log.debug("release at %s: %s", worker.name, error)


def _identity(worker: WorkerRecord) -> _Identity:
    return worker.name, worker.incarnation


class DecodeSession:
    def __init__(self, name: str, stub: worker_pb2_grpc.DecodeStub) -> None:
        self.lost = False
        self._name = name
        self._numbers = itertools.count(1)
        self._calls: dict[int, asyncio.Queue[worker_pb2.DecodeEvent | BatonError]] = {}
        self._commands: asyncio.Queue[worker_pb2.DecodeCommand] = asyncio.Queue()
        self._stream = stub.Session(wait_for_ready=False)
        self._writer = asyncio.create_task(self._write())
        self._reader = asyncio.create_task(self._read())

    async def run(self, request: Request, handle: bytes, timeout_s: float) -> AsyncGenerator[DecodeEvent, None]:
        if self.lost:
            raise BatonError(Reason.WORKER_LOST, f"{self._name} is gone")
        number = next(self._numbers)
        inbox: asyncio.Queue[worker_pb2.DecodeEvent | BatonError] = asyncio.Queue()
        self._calls[number] = inbox
        span = request.trace.span.child(semconv.DECODE, "client", {semconv.WORKER: self._name})
        job = to_job(request, span.traceparent)
        start = worker_pb2.DecodeStart(job=job, handle=handle, timeout_ms=max(1, int(timeout_s * 1000)))
        self._commands.put_nowait(worker_pb2.DecodeCommand(call_id=number, start=start))
        deadline = asyncio.get_running_loop().time() + timeout_s
        ended = False
        try:
            while not ended:
                async with asyncio.timeout_at(deadline):
                    message = await inbox.get()
                event = _to_event(message)
                ended = isinstance(event, Ended)
                yield event
        except BatonError as error:
            ended = True
            span.end(error.reason.name)
            raise
        except TimeoutError:
            span.end(Reason.DEADLINE.name)
            raise BatonError(Reason.DEADLINE, "the deadline of the request is over") from None
        finally:
            del self._calls[number]
            span.end("" if ended else Reason.CANCELLED.name)
            if not ended and not self.lost:
                self._commands.put_nowait(worker_pb2.DecodeCommand(call_id=number, cancel=worker_pb2.DecodeCancel()))

    async def close(self) -> None:
        self._lose(BatonError(Reason.WORKER_LOST, f"{self._name} is gone"))
        self._stream.cancel()
        self._reader.cancel()
        await asyncio.gather(self._reader, self._writer, return_exceptions=True)

    async def _write(self) -> None:
        try:
            while True:
                await self._stream.write(await self._commands.get())
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass  # the reader knows why

    async def _read(self) -> None:
        reason = BatonError(Reason.WORKER_LOST, f"{self._name} ended the stream")
        try:
            async for message in self._stream:
                for event in message.events:
                    inbox = self._calls.get(event.call_id)
                    if inbox is not None:
                        inbox.put_nowait(event)
        except grpc.RpcError as error:
            reason = BatonError(Reason.WORKER_LOST, f"{self._name}: {to_error(error).message}")
        finally:
            self._lose(reason)

    def _lose(self, reason: BatonError) -> None:
        if not self.lost:
            self.lost = True
            self._writer.cancel()
            for inbox in self._calls.values():
                inbox.put_nowait(reason)


async def _answer(call: Awaitable[T]) -> T:
    """Raises BatonError. A call whose channel is closed under it looks cancelled, but nobody cancelled us: the worker is gone."""
    try:
        return await call
    except grpc.RpcError as error:
        raise to_error(error) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise BatonError(Reason.WORKER_LOST, "the channel to the worker was closed") from None


def to_job(request: Request, traceparent: str = "") -> worker_pb2.Job:
    told = {name: getattr(request.params, name) for name in FIELDS}
    told["stop_token_ids"] = sorted(request.params.stop_token_ids)  # the same bytes for the same request
    sampling = generation_pb2.SamplingParams(**told)
    return worker_pb2.Job(
        request_id=request.id,
        token_ids=request.tokens,
        prompt_tokens=request.prompt_len,
        sampling=sampling,
        cache_salt=request.salt,
        traceparent=traceparent,
    )


def to_token(token: worker_pb2.GeneratedToken) -> Token:
    return Token(token.id, token.logprob if token.HasField("logprob") else None, tuple((top.id, top.logprob) for top in token.top))


def _to_event(message: worker_pb2.DecodeEvent | BatonError) -> DecodeEvent:
    """Raises the BatonError that ended the call."""
    if isinstance(message, BatonError):
        raise message
    match message.WhichOneof("event"):
        case "token":
            return to_token(message.token)
        case "adopted":
            told = message.adopted.handoff
            handoff = Handoff(told.transport, told.blocks, told.bytes, told.blocks_reused, told.digests_checked, 0, told.failure)
            return Adopted(handoff, message.adopted.read_ms, message.adopted.verify_ms)
        case "finished":
            told = message.finished.handoff
            finish = _FINISH[message.finished.reason]
            if finish is None:
                raise BatonError(Reason.INTERNAL, "the worker finished without a reason")
            return Ended(finish, told.recomputed_tokens, message.finished.cached_tokens)
        case "error":
            name = message.error.reason
            raise BatonError(Reason[name] if name in Reason.__members__ else Reason.INTERNAL, message.error.message)
        case other:
            raise BatonError(Reason.INTERNAL, f"the worker sent {other!r}")
