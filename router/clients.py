"""The router's client for its workers. Protobuf and gRPC stop here; failures are raised as BatonError.

A decode session is one stream per worker that carries all calls: when the stream is lost, all of them end immediately with WORKER_LOST.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar
from uuid import uuid4

import grpc

from baton.cluster import semconv
from baton.cluster.config import SecurityConfig
from baton.cluster.config_router import RouterConfig
from baton.cluster.errors import BatonError, Reason
from baton.cluster.messages import plain
from baton.cluster.records import ROLES, Load, RoleName, WorkerRecord, WorkerState
from baton.cluster.rpc import Line, to_error
from baton.engine.core.block_key import KEY_BYTES, MEDIA
from baton.v1 import worker_pb2, worker_pb2_grpc
from router.backlog import Backlog
from router.calls import Message, to_addressee, to_events, to_job, to_prefill_event, to_source
from router.inbox import Inbox
from router.request import Request
from router.turn_budget import BYTES_AT_ONCE, TurnBudget
from router.turnstile import Turnstile
from router.workers import Answer, CachePage, DecodeEvent, Died, Ended, FirstToken, PrefillEvent, Source

log = logging.getLogger(__name__)
RELEASE_TIMEOUT_S = 2.0
ASK_TIMEOUT_S = 1.0  # for an answer, or for one page of a snapshot
SNAPSHOT_TIMEOUT_S = 60.0  # for all pages
LOGS_TIMEOUT_S = 30.0
ASKED_A_TURN = 32  # probes and questions that are sent, or whose answers are read; the first one to a worker opens its channel
MAX_GONE = 1024
CONVERTING = 1 / 4  # of what a token costs at a door
NOT_CONNECTED = "failed to connect"  # gRPC's words for a call that was never sent: nothing listens there
_Identity = tuple[str, int]  # name and incarnation of a worker
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Streams:
    """How tokens travel from a decode worker to their readers."""

    interval_s: Callable[[], float] = lambda: 0.0  # shortest time between two batches of one call
    most_bytes: int = RouterConfig().backlog_bytes  # that may wait for one reader
    budget: TurnBudget = field(default_factory=TurnBudget)


class GrpcWorkers:
    """Channels and decode sessions, by worker and incarnation."""

    def __init__(self, security: SecurityConfig, streams: Streams | None = None) -> None:
        self._asker = uuid4().hex  # workers tell our prompts from those of other routers by it
        self._security = security
        self._streams = streams or Streams()
        self._channels: dict[_Identity, Line] = {}  # each process has its own, even at an old address
        self._gone: dict[_Identity, None] = {}  # nothing is opened to these again; oldest first
        self._sessions: dict[_Identity, DecodeSession] = {}
        self._releases: set[asyncio.Task[None]] = set()
        self._turns = Turnstile(ASKED_A_TURN)

    @property
    def unread_bytes(self) -> int:
        """How much of answers waits for their clients to read."""
        return sum(session.unread_bytes for session in self._sessions.values())

    async def prefill(
        self, worker: WorkerRecord, request: Request, timeout_s: float, source: Source | None = None, uncached_tokens: int = 0
    ) -> AsyncGenerator[PrefillEvent, None]:
        """Yields Opened at most once, when a long prompt has begun, then FirstToken. Closing the generator early cancels the call.

        `source`: a worker that caches more of the prompt. `uncached_tokens`: see `Workers.prefill`. Raises BatonError.
        """
        stub = worker_pb2_grpc.PrefillStub(self._channel(worker))
        with request.trace.span.child(semconv.PREFILL, "client", {semconv.WORKER: worker.name}) as span:
            job, to = to_job(request, span), to_addressee(worker)
            asked = worker_pb2.PrefillRequest(job=job, to=to, asker=self._asker, uncached_tokens=uncached_tokens)
            if source is not None:
                asked.source.CopyFrom(to_source(source))
            call = stub.Prefill(asked, timeout=timeout_s)
            try:
                while not isinstance(event := await _next_event(call), FirstToken):
                    yield event
            finally:
                call.cancel()
        yield event  # after its span: a caller that has the token need not read to the end of the stream

    def decode(
        self,
        worker: WorkerRecord,
        request: Request,
        handle: bytes,
        timeout_s: float,
        first: "asyncio.Future[int] | None" = None,
    ) -> AsyncGenerator[DecodeEvent, None]:
        """Yields events up to and including Ended. Closing the generator early cancels the call on the worker.

        `first`: given if the prompt is still being computed and its KV is read piece by piece. It resolves to the first token, which is
        then sent to the worker.
        """
        return self._session(worker).run(request, handle, timeout_s, first)

    def release(self, worker: WorkerRecord, handle: bytes, request_id: str) -> None:
        """Ends a lease that nobody will read, without waiting. Best effort: it expires anyway."""
        task = asyncio.create_task(self._release(worker, handle, request_id))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def snapshot(self, worker: WorkerRecord) -> AsyncGenerator[CachePage, None]:
        """Yields the keys of all blocks in the worker's cache; one page if there is none. The whole may take long, but the next page must
        come soon."""
        stub = worker_pb2_grpc.WorkerStub(self._channel(worker))
        pages = stub.Snapshot(worker_pb2.SnapshotRequest(to=to_addressee(worker)), timeout=SNAPSHOT_TIMEOUT_S)
        try:
            while True:
                async with asyncio.timeout(ASK_TIMEOUT_S):
                    page = await _answer(pages.read())
                if page is grpc.aio.EOF:
                    return
                keys = page.keys  # protobuf makes a new copy at each access
                if page.medium not in MEDIA:
                    raise BatonError(Reason.INTERNAL, f"{worker.name} holds blocks on {page.medium!r}, which is none of {', '.join(MEDIA)}")
                split = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
                yield CachePage(page.incarnation, page.sequence, split, page.medium)
        except TimeoutError:
            raise BatonError(Reason.DEADLINE, f"{worker.name} did not continue its snapshot") from None
        finally:
            pages.cancel()

    async def describe(self, worker: WorkerRecord) -> tuple[WorkerRecord, dict[str, Any]]:
        """Returns the worker's current record, and what it holds (`baton.v1.Residue`). Raises ValueError for an answer without a record."""
        await self._turns.enter()
        stub = worker_pb2_grpc.WorkerStub(self._channel(worker))
        answer = await _answer(stub.Describe(worker_pb2.DescribeRequest(to=to_addressee(worker)), timeout=ASK_TIMEOUT_S))
        await self._turns.enter()
        return WorkerRecord.from_mapping(plain(answer.record)), plain(answer.residue)

    async def probe(self, worker: WorkerRecord, timeout_s: float) -> Answer:
        """Returns the worker's current state and load."""
        await self._turns.enter()
        stub = worker_pb2_grpc.WorkerStub(self._channel(worker))
        answer = await _answer(stub.Probe(worker_pb2.ProbeRequest(to=to_addressee(worker), asker=self._asker), timeout=timeout_s))
        await self._turns.enter()
        state: WorkerState = "draining" if answer.state == "draining" else "ready"
        return Answer(state, _to_load(answer.load), _to_roles(answer.roles), answer.stalled_ms / 1000, answer.others_tokens)

    async def set_roles(self, worker: WorkerRecord, roles: Sequence[str]) -> tuple[tuple[RoleName, ...], tuple[RoleName, ...]]:
        """Changes what the worker serves. Returns the roles that it serves from now on, and those that it drains."""
        stub = worker_pb2_grpc.WorkerStub(self._channel(worker))
        asked = worker_pb2.SetRolesRequest(to=to_addressee(worker), roles=roles)
        answer = await _answer(stub.SetRoles(asked, timeout=ASK_TIMEOUT_S))
        return _to_roles(answer.serving), _to_roles(answer.draining)

    async def logs(self, worker: WorkerRecord, lines: int, follow: bool) -> AsyncGenerator[bytes, None]:
        """Yields the end of the worker's log, and with `follow` whatever is written later, until it is closed or the worker is gone."""
        stub = worker_pb2_grpc.WorkerStub(self._channel(worker))
        asked = worker_pb2.LogsRequest(to=to_addressee(worker), lines=lines, follow=follow)
        call = stub.Logs(asked, timeout=None if follow else LOGS_TIMEOUT_S)
        try:
            while (page := await _answer(call.read())) is not grpc.aio.EOF:
                yield page.text
        finally:
            call.cancel()

    def welcome(self, worker: WorkerRecord) -> None:
        """Notes that the worker joined. It may have been forgotten before."""
        self._gone.pop(_identity(worker), None)

    async def forget(self, worker: WorkerRecord) -> None:
        """Notes that the worker is gone or its process was replaced. Running calls to it fail with WORKER_LOST, and so do later ones."""
        self._gone[_identity(worker)] = None
        if len(self._gone) > MAX_GONE:
            del self._gone[next(iter(self._gone))]
        await self.lose(worker)

    async def lose(self, worker: WorkerRecord) -> None:
        """Running calls to the worker fail with WORKER_LOST. The next call opens a new connection."""
        identity = _identity(worker)
        session, old = self._sessions.pop(identity, None), self._channels.pop(identity, None)
        try:
            if session is not None:
                await session.close()
        finally:  # nothing else refers to the channel now, so it is closed even if this is cancelled
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
            self._channels[identity] = Line(worker.address, self._security)
        return self._channels[identity].channel()

    def _session(self, worker: WorkerRecord) -> "DecodeSession":
        identity = _identity(worker)
        session = self._sessions.get(identity)
        if session is None or session.lost:
            stub = worker_pb2_grpc.DecodeStub(self._channel(worker))
            session = self._sessions[identity] = DecodeSession(worker, stub, self._streams)
        return session

    async def _release(self, worker: WorkerRecord, handle: bytes, request_id: str) -> None:
        try:
            stub = worker_pb2_grpc.KvExchangeStub(self._channel(worker))
            await _answer(stub.Release(worker_pb2.ReleaseRequest(handle=handle, request_id=request_id), timeout=RELEASE_TIMEOUT_S))
        except BatonError as error:
            log.debug("release at %s: %s", worker.name, error)


def _identity(worker: WorkerRecord) -> _Identity:
    return worker.name, worker.incarnation


class DecodeSession:
    def __init__(self, worker: WorkerRecord, stub: worker_pb2_grpc.DecodeStub, streams: Streams) -> None:
        self.lost = False
        self._streams = streams
        self._name = worker.name
        self._to = to_addressee(worker)
        self._numbers = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._commands: asyncio.Queue[worker_pb2.DecodeCommand] = asyncio.Queue()
        self._stream = stub.Session(wait_for_ready=False)
        self._writer = asyncio.create_task(self._write())
        self._reader = asyncio.create_task(self._read())

    @property
    def unread_bytes(self) -> int:
        return sum(call.inbox.size for call in self._calls.values())

    async def run(
        self, request: Request, handle: bytes, timeout_s: float, first: "asyncio.Future[int] | None" = None
    ) -> AsyncGenerator[DecodeEvent, None]:
        if self.lost:
            raise BatonError(Reason.WORKER_LOST, f"{self._name} is gone")
        number = next(self._numbers)
        inbox: Inbox[Message] = Inbox(self._streams.interval_s, request.backlog)
        self._calls[number] = _Call(inbox, request.backlog)
        span = request.trace.span.child(semconv.DECODE, "client", {semconv.WORKER: self._name})
        job = to_job(request, span)
        timeout_ms, live = max(1, int(timeout_s * 1000)), first is not None
        start = worker_pb2.DecodeStart(job=job, handle=handle, timeout_ms=timeout_ms, to=self._to, live=live)
        self._commands.put_nowait(worker_pb2.DecodeCommand(call_id=number, start=start))
        if first is not None:
            first.add_done_callback(lambda done: self._tell_first(number, done))
        late = BatonError(Reason.DEADLINE, "the deadline of the request has passed")
        timer = asyncio.get_running_loop().call_later(timeout_s, inbox.put, late)
        ended = False
        try:
            while True:
                messages, size = await inbox.take(BYTES_AT_ONCE)
                await self._streams.budget.spend(int(size * CONVERTING))
                for event in to_events(messages):
                    ended = isinstance(event, Ended)
                    yield event
                    if ended:
                        return  # an error may have come after it
        except BatonError as error:
            ended = error is not late
            span.end(error.reason.name)
            raise
        finally:
            timer.cancel()
            inbox.close()
            del self._calls[number]
            span.end("" if ended else Reason.CANCELLED.name)
            if not ended:
                self._cancel(number)

    def _cancel(self, number: int) -> None:
        if not self.lost:
            self._commands.put_nowait(worker_pb2.DecodeCommand(call_id=number, cancel=worker_pb2.DecodeCancel()))

    def _tell_first(self, number: int, first: "asyncio.Future[int]") -> None:
        if number in self._calls and not first.cancelled() and not self.lost:
            told = worker_pb2.DecodeFirst(token_id=first.result())
            self._commands.put_nowait(worker_pb2.DecodeCommand(call_id=number, first=told))

    async def close(self) -> None:
        self._lose(Died(f"{self._name} is gone"))
        self._stream.cancel()
        self._reader.cancel()
        await asyncio.gather(self._reader, self._writer, return_exceptions=True)

    async def _write(self) -> None:
        try:
            while True:
                await self._stream.write(await self._commands.get())
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass  # the reader reports why

    async def _read(self) -> None:
        reason = BatonError(Reason.WORKER_LOST, f"{self._name} ended the stream")
        try:
            async for message in self._stream:
                for event in message.events:
                    call = self._calls.get(event.call_id)
                    if call is not None:
                        self._deliver(event, call)
        except grpc.RpcError as error:
            found = _meaning(error)
            text = f"{self._name}: {found.message}"
            reason = Died(text) if isinstance(found, Died) else BatonError(Reason.WORKER_LOST, text)
        finally:
            self._lose(reason)

    def _deliver(self, event: worker_pb2.DecodeEvent, call: "_Call") -> None:
        """A token waits as bytes of its own: the event would keep the whole message that it came in. Too many of them end the call, here
        and at the worker."""
        if event.WhichOneof("event") != "token":
            call.inbox.put(event)
            return
        call.inbox.put_token(event.token.SerializeToString())
        if call.backlog.size > self._streams.most_bytes and not call.cut:
            call.cut = True
            message = f"more than {self._streams.most_bytes} bytes of the answer wait for the client to read"
            call.inbox.end(BatonError(Reason.STALLED, message))
            self._cancel(event.call_id)

    def _lose(self, reason: BatonError) -> None:
        if not self.lost:
            self.lost = True
            self._writer.cancel()
            for call in self._calls.values():
                call.inbox.put(reason)


@dataclass(slots=True)
class _Call:
    inbox: Inbox[Message]
    backlog: Backlog
    cut: bool = False


async def _answer(call: Awaitable[T]) -> T:
    """Raises BatonError. If its channel is closed, a call looks cancelled although nobody cancelled this task: the worker is gone."""
    try:
        return await call
    except grpc.RpcError as error:
        raise _meaning(error) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise Died("the channel to the worker was closed") from None


def _meaning(error: grpc.RpcError) -> BatonError:
    ours = to_error(error)
    if ours.reason is Reason.WORKER_LOST and not ours.message.startswith(NOT_CONNECTED):
        return Died(ours.message)
    return ours


def _to_roles(names: Sequence[str]) -> tuple[RoleName, ...]:
    """Leaves out names that a newer worker knows and we do not."""
    return tuple(role for role in ROLES if role in names)


def _to_load(load: worker_pb2.WorkerLoad) -> Load:
    return Load(**{field.name: getattr(load, field.name) for field in fields(Load)})


async def _next_event(call: Any) -> PrefillEvent:
    """Raises BatonError."""
    message = await _answer(call.read())
    if message is grpc.aio.EOF:
        raise BatonError(Reason.INTERNAL, "the prefill ended without a token")
    return to_prefill_event(message)
